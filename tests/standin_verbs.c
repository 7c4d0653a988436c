/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A libibverbs with one device, for where none is, each of whose calls can be made to fail.
 * What it has open is counted, and what no device would survive: its objects know their
 * parents, and are never freed. Any thread may call it while none of its calls is to fail.
 */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* Last in every object, behind libibverbs' own fields. */
struct life {
	int open, children;
};

struct ibv_context {
	void *device;
	void *ops[32];
	int cmd_fd, async_fd;
	struct life life;
};

struct ibv_pd {
	struct ibv_context *context;
	uint32_t handle;
	struct life life;
};

struct ibv_mr {
	struct ibv_context *context;
	struct ibv_pd *pd;
	void *addr;
	size_t length;
	uint32_t handle, lkey, rkey;
	struct life life;
};

static int fail_at, fail_with, faults, calls, open_now, wrong;

/* The @nth call from now on fails with @error; 0: none. */
void standin_fail(int nth, int error)
{
	fail_at = nth;
	fail_with = error;
}

int standin_faults(void)
{
	return faults;
}

/* Contexts, domains, regions and lists. */
int standin_open(void)
{
	return __atomic_load_n(&open_now, __ATOMIC_SEQ_CST);
}

/* Calls on objects that are gone, or that leave children behind. */
int standin_wrong(void)
{
	return __atomic_load_n(&wrong, __ATOMIC_SEQ_CST);
}

static int add(int *count, int n)
{
	return __atomic_add_fetch(count, n, __ATOMIC_SEQ_CST);
}

static int injected(void)
{
	add(&calls, 1);
	if (!fail_at || --fail_at)
		return 0;
	faults++;
	errno = fail_with;
	return fail_with;
}

/* So that threads meet in every order. */
static void take_time(void)
{
	usleep((unsigned int)calls * 37 & 127);
}

static void *make(size_t nbytes)
{
	if (injected())
		return NULL;
	add(&open_now, 1);
	return calloc(1, nbytes);
}

static void begin(struct life *life, struct life *parent)
{
	life->open = 1;
	if (!parent)
		return;
	add(&wrong, !__atomic_load_n(&parent->open, __ATOMIC_SEQ_CST));
	add(&parent->children, 1);
	take_time();
}

static void end(struct life *life, struct life *parent)
{
	add(&wrong, __atomic_load_n(&life->children, __ATOMIC_SEQ_CST) != 0);
	add(&wrong, !__atomic_exchange_n(&life->open, 0, __ATOMIC_SEQ_CST));
	add(&open_now, -1);
	if (!parent)
		return;
	take_time();
	add(&wrong, !__atomic_load_n(&parent->open, __ATOMIC_SEQ_CST));
	add(&parent->children, -1);
}

void **ibv_get_device_list(int *count)
{
	void **list = make(2 * sizeof(*list));

	if (list) {
		list[0] = &open_now;
		*count = 1;
	}
	return list;
}

void ibv_free_device_list(void **list)
{
	add(&open_now, -1);
	free(list);
}

const char *ibv_get_device_name(void *device)
{
	(void)device;
	return "mlx5_7";
}

uint64_t ibv_get_device_guid(void *device)
{
	static const unsigned char guid[8] = { 0x98, 0x03, 0x9b, 0x03, 0x00, 0x67, 0xac, 0x2a };

	(void)device;
	return *(const uint64_t *)(const void *)guid;
}

struct ibv_context *ibv_open_device(void *device)
{
	struct ibv_context *context = make(sizeof(*context));

	if (context) {
		context->device = device;
		context->cmd_fd = open("/dev/zero", O_RDWR | O_CLOEXEC);
		context->async_fd = eventfd(0, EFD_CLOEXEC);
		begin(&context->life, NULL);
	}
	return context;
}

int ibv_close_device(struct ibv_context *context)
{
	end(&context->life, NULL);
	close(context->cmd_fd);
	close(context->async_fd);
	return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, void *attributes)
{
	(void)context, (void)port, (void)attributes;
	return injected();
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct ibv_pd *pd = make(sizeof(*pd));

	if (pd) {
		pd->context = context;
		begin(&pd->life, &context->life);
	}
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	int error = injected();

	if (!error)
		end(&pd->life, &pd->context->life);
	return error;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct ibv_mr *mr = make(sizeof(*mr));

	(void)access;
	if (mr) {
		*mr = (struct ibv_mr){ pd->context, pd, addr, length, 1, 2, 3, { 0, 0 } };
		begin(&mr->life, &pd->life);
	}
	return mr;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova,
				unsigned int access)
{
	(void)iova;
	return ibv_reg_mr(pd, addr, length, (int)access);
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
	int error = injected();

	if (!error)
		end(&mr->life, &mr->pd->life);
	return error;
}
