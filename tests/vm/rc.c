#include "rc.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RC_DEPTH 32

struct rc_pair {
	struct ibv_cq *cq;
	struct ibv_qp *qp[2];
	struct ibv_port_attr port;
	union ibv_gid gid;
	uint8_t gid_index;
	bool broken;
};

static int last_error(void)
{
	return errno ? -errno : -EIO;
}

static int64_t now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

/* ---- A device of our own ------------------------------------------------------------------ */

int rc_open(const char *name, struct ibv_context **context, struct ibv_pd **pd)
{
	int i, n, err = -ENODEV;
	struct ibv_device **list = ibv_get_device_list(&n);

	if (!list)
		return last_error();
	for (i = 0; i < n; i++) {
		if (strcmp(ibv_get_device_name(list[i]), name))
			continue;
		*context = ibv_open_device(list[i]);
		err = *context ? 0 : last_error();
		break;
	}
	ibv_free_device_list(list);
	if (err)
		return err;
	*pd = ibv_alloc_pd(*context);
	if (*pd)
		return 0;
	err = last_error();
	ibv_close_device(*context);
	return err;
}

int rc_close(struct ibv_context *context, struct ibv_pd *pd)
{
	int err = pd ? ibv_dealloc_pd(pd) : 0;

	if (err)
		return -err;
	return ibv_close_device(context) ? last_error() : 0;
}

int rc_alloc_pd(struct ibv_context *context, struct ibv_pd **pd)
{
	*pd = ibv_alloc_pd(context);
	return *pd ? 0 : last_error();
}

int rc_dealloc_pd(struct ibv_pd *pd)
{
	return -ibv_dealloc_pd(pd);
}

int rc_reg(struct ibv_pd *pd, uint64_t address, uint64_t nbytes, int access, struct ibv_mr **mr,
	   uint32_t *lkey, uint32_t *rkey)
{
	*mr = ibv_reg_mr(pd, (void *)(uintptr_t)address, nbytes, access);
	if (!*mr)
		return last_error();
	*lkey = (*mr)->lkey;
	*rkey = (*mr)->rkey;
	return 0;
}

int rc_dereg(struct ibv_mr *mr)
{
	return -ibv_dereg_mr(mr);
}

int rc_reg_dereg(struct ibv_pd *pd, uint64_t address, uint64_t nbytes, int access, int times)
{
	int err = 0;

	while (times-- && !err) {
		struct ibv_mr *mr = ibv_reg_mr(pd, (void *)(uintptr_t)address, nbytes, access);

		err = mr ? -ibv_dereg_mr(mr) : last_error();
	}
	return err;
}

int rc_on_demand(struct ibv_context *context)
{
	struct ibv_device_attr_ex attr;
	uint32_t needed = IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ;
	int err = ibv_query_device_ex(context, NULL, &attr);

	if (err)
		return -err;
	return attr.odp_caps.general_caps & IBV_ODP_SUPPORT &&
	       (attr.odp_caps.per_transport_caps.rc_odp_caps & needed) == needed;
}

void rc_fds(struct ibv_context *context, int fds[2])
{
	fds[0] = context->cmd_fd;
	fds[1] = context->async_fd;
}

/* ---- Two queue pairs ---------------------------------------------------------------------- */

/* Better ones are greater; 0 cannot be used. */
static int gid_rank(const struct ibv_gid_entry *entry)
{
	static const uint8_t ipv4[12] = { [10] = 0xff, [11] = 0xff };

	if (entry->port_num != 1 || entry->gid_type == IBV_GID_TYPE_IB)
		return 0;
	if (entry->gid_type == IBV_GID_TYPE_ROCE_V1)
		return 1;
	return memcmp(entry->gid.raw, ipv4, sizeof(ipv4)) ? 2 : 3;
}

static int find_gid(struct ibv_context *context, struct rc_pair *pair)
{
	struct ibv_gid_entry entries[256];
	ssize_t i, n = ibv_query_gid_table(context, entries, 256, 0);
	int best = 0;

	for (i = 0; i < n; i++) {
		int rank = gid_rank(&entries[i]);

		if (rank <= best || entries[i].gid_index > UINT8_MAX)
			continue;
		best = rank;
		pair->gid = entries[i].gid;
		pair->gid_index = entries[i].gid_index;
	}
	if (n < 0)
		return (int)n;
	return best ? 0 : -EADDRNOTAVAIL;
}

static int connect_qp(struct rc_pair *pair, struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = 1,
		.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
				   IBV_ACCESS_REMOTE_WRITE,
	};
	int err = ibv_modify_qp(qp, &attr,
				IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					IBV_QP_ACCESS_FLAGS);

	if (err)
		return -err;
	attr.qp_state = IBV_QPS_RTR;
	attr.path_mtu = pair->port.active_mtu;
	attr.dest_qp_num = peer;
	attr.max_dest_rd_atomic = 1;
	attr.min_rnr_timer = 12;
	attr.ah_attr.port_num = 1;
	attr.ah_attr.dlid = pair->port.lid;
	if (pair->port.link_layer == IBV_LINK_LAYER_ETHERNET) {
		attr.ah_attr.is_global = 1;
		attr.ah_attr.grh.dgid = pair->gid;
		attr.ah_attr.grh.sgid_index = pair->gid_index;
		attr.ah_attr.grh.hop_limit = 1;
	}
	err = ibv_modify_qp(qp, &attr,
			    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
				    IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
				    IBV_QP_MIN_RNR_TIMER);
	if (err)
		return -err;
	attr.qp_state = IBV_QPS_RTS;
	attr.timeout = 18; /* a second: an emulated processor answers late */
	attr.retry_cnt = 7;
	attr.rnr_retry = 7;
	attr.max_rd_atomic = 1;
	return -ibv_modify_qp(qp, &attr,
			      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

int rc_pair_close(struct rc_pair *pair)
{
	int i, err = 0;

	for (i = 0; i < 2; i++)
		if (pair->qp[i] && !err)
			err = ibv_destroy_qp(pair->qp[i]);
	if (pair->cq && !err)
		err = ibv_destroy_cq(pair->cq);
	free(pair);
	return -err;
}

static int pair_setup(struct ibv_context *context, struct ibv_pd *pd, struct rc_pair *pair)
{
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC,
		.cap = { RC_DEPTH, RC_DEPTH, 1, 1, 0 },
	};
	int i, err = ibv_query_port(context, 1, &pair->port);

	if (err)
		return -err;
	if (context->device->transport_type == IBV_TRANSPORT_IWARP)
		return -EPROTONOSUPPORT; /* connects through librdmacm only */
	if (pair->port.state != IBV_PORT_ACTIVE)
		return -ENETDOWN;
	err = pair->port.link_layer == IBV_LINK_LAYER_ETHERNET ? find_gid(context, pair) : 0;
	if (err)
		return err;
	pair->cq = ibv_create_cq(context, 3 * RC_DEPTH, NULL, NULL, 0);
	if (!pair->cq)
		return last_error();
	attr.send_cq = attr.recv_cq = pair->cq;
	for (i = 0; i < 2; i++) {
		pair->qp[i] = ibv_create_qp(pd, &attr);
		if (!pair->qp[i])
			return last_error();
	}
	for (i = 0; i < 2 && !err; i++)
		err = connect_qp(pair, pair->qp[i], pair->qp[!i]->qp_num);
	return err;
}

int rc_pair_open(struct ibv_context *context, struct ibv_pd *pd, struct rc_pair **result)
{
	struct rc_pair *pair = calloc(1, sizeof(*pair));
	int err = pair ? pair_setup(context, pd, pair) : -ENOMEM;

	if (!err)
		*result = pair;
	else if (pair)
		rc_pair_close(pair);
	return err;
}

/* ---- Moving data -------------------------------------------------------------------------- */

static int wait_for(struct rc_pair *pair, int completions, int64_t until)
{
	struct timespec nap = { .tv_nsec = 200000 };
	struct ibv_wc wc;

	while (completions) {
		int n = ibv_poll_cq(pair->cq, 1, &wc);

		if (n < 0)
			return -EIO;
		if (n && wc.status != IBV_WC_SUCCESS)
			return wc.status;
		completions -= n;
		if (!n && now_ms() > until)
			return -ETIMEDOUT;
		if (!n)
			nanosleep(&nap, NULL);
	}
	return 0;
}

static int post(struct rc_pair *pair, enum rc_what what, const struct rc_job *job, uint64_t at,
		bool signaled)
{
	static const enum ibv_wr_opcode opcodes[] = {
		[RC_WRITE] = IBV_WR_RDMA_WRITE,
		[RC_READ] = IBV_WR_RDMA_READ,
		[RC_SEND] = IBV_WR_SEND,
	};
	uint64_t rest = job->nbytes - at;
	uint32_t length = rest < job->piece ? rest : job->piece;
	struct ibv_sge near = { job->local + at, length, job->lkey };
	struct ibv_sge far = { job->remote + at, length, job->rkey };
	struct ibv_recv_wr receive = { .sg_list = &far, .num_sge = 1 };
	struct ibv_recv_wr *bad_receive;
	struct ibv_send_wr send = {
		.sg_list = &near,
		.num_sge = 1,
		.opcode = opcodes[what],
		.send_flags = signaled ? IBV_SEND_SIGNALED : 0,
		.wr.rdma = { job->remote + at, job->rkey },
	};
	struct ibv_send_wr *bad_send;
	int err = what == RC_SEND ? ibv_post_recv(pair->qp[1], &receive, &bad_receive) : 0;

	return err ? -err : -ibv_post_send(pair->qp[0], &send, &bad_send);
}

int rc_move(struct rc_pair *pair, enum rc_what what, const struct rc_job *job)
{
	int64_t until = now_ms() + job->timeout_ms;
	uint64_t at = 0;
	int err = pair->broken ? -ENOTCONN : 0;

	while (at < job->nbytes && !err) {
		int n = 0, received = 0;
		bool last = false;

		while (!last && !err) {
			last = ++n == RC_DEPTH || job->nbytes - at <= job->stride;
			err = post(pair, what, job, at, last);
			received += what == RC_SEND;
			at += job->stride;
		}
		if (!err)
			err = wait_for(pair, 1 + received, until);
	}
	pair->broken = err;
	return err;
}

/* ---- Transfers --------- ------------------------------------------------------------------- */

static unsigned char expected(uint32_t seed, uint64_t at)
{
	uint64_t x = (at + 1) * 0x9e3779b97f4a7c15 + seed * 0xbf58476d1ce4e5b9;

	return (x ^ x >> 29) >> 16;
}

void rc_fill(volatile unsigned char *to, const struct rc_job *job, uint32_t seed)
{
	uint64_t at, i;

	for (at = 0; at < job->nbytes; at += job->stride)
		for (i = at; i < at + job->piece && i < job->nbytes; i++)
			to[i] = expected(seed, i);
}

uint64_t rc_wrong(const volatile unsigned char *in, const struct rc_job *job, uint32_t seed)
{
	uint64_t at, i, wrong = 0;

	for (at = 0; at < job->nbytes; at += job->stride)
		for (i = at; i < at + job->piece && i < job->nbytes; i++)
			wrong += in[i] != expected(seed, i);
	return wrong;
}
