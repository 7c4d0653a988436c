/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The device, which pins memory and moves bytes through the pins: io_uring, or a pair of reliable
 * connections (tests/vm/rc.c), each thread its own.
 *
 * An io_uring's fixed buffers are pinned together, so each pin has a ring; rings stay
 * when a pin goes. READ_FIXED and WRITE_FIXED are from and to a pipe, at which no thread
 * of the kernel need wait for them as at a file.
 */
#define _GNU_SOURCE
#include "soak.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#if __has_include(<infiniband/verbs.h>)
#define SOAK_VERBS
#include "../vm/rc.h"
#endif

#define RINGS 12

/* linux/io_uring.h as of Linux 5.5: build machines have older headers. */
struct params {
	uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle;
	uint32_t features, wq_fd, reserved[3];
	struct {
		uint32_t head, tail, mask, entries, flags, dropped, array, reserved[3];
	} sq;
	struct {
		uint32_t head, tail, mask, entries, overflow, cqes, flags, reserved[3];
	} cq;
};

struct sqe {
	uint8_t opcode, flags;
	uint16_t ioprio;
	int32_t fd;
	uint64_t offset, address;
	uint32_t nbytes, rw_flags;
	uint64_t user_data;
	uint16_t buffer, personality;
	uint32_t reserved[5];
};

struct cqe {
	uint64_t user_data;
	int32_t result;
	uint32_t flags;
};

enum {
	SETUP = 425,
	ENTER = 426,
	REGISTER = 427,
	REGISTER_BUFFERS = 0,
	UNREGISTER_BUFFERS = 1,
	WAIT = 1,
	READ_FIXED = 4,
	WRITE_FIXED = 5,
	SQ_RING = 0,
	CQ_RING = 0x8000000,
	SQES = 0x10000000,
};

struct soak_pin {
	bool taken;
	/* io_uring */
	int fd;
	struct sqe *sqes;
	uint32_t *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
	struct cqe *cqes;
	/* verbs */
	struct ibv_mr *region;
	uint32_t lkey, rkey;
};

struct soak_device {
	int pipe[2];
	char *bounce;
	struct soak_pin pins[RINGS];
#ifdef SOAK_VERBS
	struct ibv_context *context;
	struct ibv_pd *domain;
	struct rc_pair *pair;
	struct ibv_mr *bounce_region;
	uint32_t bounce_key;
#endif
};

char *soak_device_bounce(struct soak_device *device)
{
	return device->bounce;
}

static struct soak_pin *free_pin(struct soak_device *device)
{
	size_t i;

	for (i = 0; i < RINGS; i++)
		if (!device->pins[i].taken)
			return &device->pins[i];
	return NULL;
}

/* ---- io_uring ---- */

static void *ring_map(int fd, size_t nbytes, off_t what)
{
	void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
			    what);

	SOAK_CHECK(memory != MAP_FAILED);
	/* A child has no business here. */
	madvise(memory, nbytes, MADV_DONTFORK);
	return memory;
}

static void ring_open(struct soak_pin *pin)
{
	struct params p = { 0 };
	char *sq, *cq;

	pin->fd = (int)syscall(SETUP, 4, &p);
	if (pin->fd < 0)
		soak_failed("io_uring_setup: %s", strerror(errno));
	sq = ring_map(pin->fd, p.sq.array + p.sq_entries * sizeof(uint32_t), SQ_RING);
	cq = ring_map(pin->fd, p.cq.cqes + p.cq_entries * sizeof(struct cqe), CQ_RING);
	pin->sqes = ring_map(pin->fd, p.sq_entries * sizeof(struct sqe), SQES);
	pin->sq_tail = (uint32_t *)(sq + p.sq.tail);
	pin->sq_mask = (uint32_t *)(sq + p.sq.mask);
	pin->sq_array = (uint32_t *)(sq + p.sq.array);
	pin->cq_head = (uint32_t *)(cq + p.cq.head);
	pin->cq_tail = (uint32_t *)(cq + p.cq.tail);
	pin->cq_mask = (uint32_t *)(cq + p.cq.mask);
	pin->cqes = (struct cqe *)(cq + p.cq.cqes);
}

static void ring_pin(struct soak_pin *pin, char *start, char *end)
{
	struct iovec range = { start, (size_t)(end - start) };

	if (syscall(REGISTER, pin->fd, REGISTER_BUFFERS, &range, 1) < 0)
		soak_failed("pinning [%p, %p): %s", (void *)start, (void *)end, strerror(errno));
}

static int32_t ring_run(struct soak_pin *pin, uint8_t opcode, int fd, char *at, size_t nbytes)
{
	uint32_t tail = *pin->sq_tail, slot = tail & *pin->sq_mask, head = *pin->cq_head;
	struct sqe *sqe = &pin->sqes[slot];
	int32_t result;
	long rc;

	memset(sqe, 0, sizeof(*sqe));
	sqe->opcode = opcode;
	sqe->fd = fd;
	sqe->address = (uintptr_t)at;
	sqe->nbytes = (uint32_t)nbytes;
	pin->sq_array[slot] = slot;
	__atomic_store_n(pin->sq_tail, tail + 1, __ATOMIC_RELEASE);
	do
		rc = syscall(ENTER, pin->fd, 1, 1, WAIT, NULL, 0);
	while (rc < 0 && (errno == EAGAIN || errno == EBUSY));
	/* A signal after it was submitted; only debuggers send any. */
	SOAK_CHECK(rc == 1 || (rc < 0 && errno == EINTR));
	while (__atomic_load_n(pin->cq_tail, __ATOMIC_ACQUIRE) == head)
		(void)syscall(ENTER, pin->fd, 0, 1, WAIT, NULL, 0);
	result = pin->cqes[head & *pin->cq_mask].result;
	__atomic_store_n(pin->cq_head, head + 1, __ATOMIC_RELEASE);
	return result;
}

static void ring_move(struct soak_pin *pin, uint8_t opcode, int fd, char *at, size_t nbytes)
{
	int32_t rc;

	do
		rc = ring_run(pin, opcode, fd, at, nbytes);
	while (rc == -EINTR || rc == -EAGAIN);
	if (rc != (int32_t)nbytes)
		soak_failed("%s of %zu bytes at %p: %d",
			    opcode == READ_FIXED ? "READ_FIXED" : "WRITE_FIXED", nbytes,
			    (void *)at, rc);
}

static void pipe_open(struct soak_device *device)
{
	SOAK_CHECK(!pipe2(device->pipe, O_CLOEXEC));
	if (fcntl(device->pipe[0], F_SETPIPE_SZ, SOAK_BOUNCE) < (int)SOAK_BOUNCE)
		soak_failed("no pipe of %u bytes: %s", SOAK_BOUNCE, strerror(errno));
}

/* ---- Reliable connections ---- */

#ifdef SOAK_VERBS
/* IBV_ACCESS_LOCAL_WRITE, _REMOTE_WRITE and _REMOTE_READ */
#define ACCESS 7

static void verbs_check(const char *what, int rc)
{
	if (rc)
		soak_failed("%s: %s", what, rc < 0 ? strerror(-rc) : "completed with an error");
}

static void verbs_open(struct soak_device *device)
{
	int fds[2], i;
	uint32_t rkey;

	verbs_check(soak.device, rc_open(soak.device, &device->context, &device->domain));
	rc_fds(device->context, fds);
	for (i = 0; i < 2; i++)
		verbs_check("rf_descriptor_omit", rf_descriptor_omit(fds[i], i ? 0 : RF_MAPPED));
	verbs_check("rc_pair_open", rc_pair_open(device->context, device->domain, &device->pair));
	/* Shared memory: fork() does not move it. */
	rf_ranges_own(1);
	verbs_check("rc_reg", rc_reg(device->domain, (uintptr_t)device->bounce, SOAK_BOUNCE, ACCESS,
				     &device->bounce_region, &device->bounce_key, &rkey));
	rf_ranges_own(0);
}

static void verbs_close(struct soak_device *device)
{
	int fds[2], i;

	rc_fds(device->context, fds);
	verbs_check("rc_pair_close", rc_pair_close(device->pair));
	rf_ranges_own(1);
	verbs_check("rc_dereg", rc_dereg(device->bounce_region));
	rf_ranges_own(0);
	for (i = 0; i < 2; i++)
		verbs_check("rf_descriptor_release", rf_descriptor_release(fds[i]));
	verbs_check("rc_close", rc_close(device->context, device->domain));
}

static void verbs_pin(struct soak_device *device, struct soak_pin *pin, char *start, char *end,
		      bool own)
{
	int rc;

	rf_ranges_own(own);
	rc = rc_reg(device->domain, (uintptr_t)start, (size_t)(end - start), ACCESS, &pin->region,
		    &pin->lkey, &pin->rkey);
	rf_ranges_own(0);
	verbs_check("ibv_reg_mr", rc);
	pin->fd = own;
}

static void verbs_unpin(struct soak_pin *pin)
{
	rf_ranges_own(pin->fd);
	verbs_check("ibv_dereg_mr", rc_dereg(pin->region));
	rf_ranges_own(0);
}

static void verbs_move(struct soak_device *device, struct soak_pin *pin, enum rc_what what,
		       char *at, size_t nbytes)
{
	struct rc_job job = {
		.local = (uintptr_t)device->bounce,
		.remote = (uintptr_t)at,
		.nbytes = nbytes,
		.stride = nbytes,
		.piece = (uint32_t)nbytes,
		.lkey = device->bounce_key,
		.rkey = pin->rkey,
		.timeout_ms = 120000,
	};
	int rc = rc_move(device->pair, what, &job);

	if (rc)
		soak_failed("%s of %zu bytes at %p: %d", what == RC_READ ? "read" : "write", nbytes,
			    (void *)at, rc);
}
#else
#define RC_READ 0
#define RC_WRITE 0
#define verbs_open(device) soak_failed("built without libibverbs' headers")
#define verbs_close(device) ((void)0)
#define verbs_pin(device, pin, start, end, own) ((void)(own))
#define verbs_unpin(pin) ((void)0)
#define verbs_move(device, pin, what, at, nbytes) ((void)0)
#endif

/* ---- Either ---- */

struct soak_device *soak_device_open(void)
{
	struct soak_device *device = calloc(1, sizeof(*device));
	size_t i;

	SOAK_CHECK(device);
	device->bounce = mmap(NULL, SOAK_BOUNCE, PROT_READ | PROT_WRITE,
			      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	SOAK_CHECK(device->bounce != MAP_FAILED);
	if (soak.device)
		verbs_open(device);
	else
		pipe_open(device);
	for (i = 0; i < RINGS && !soak.device; i++)
		ring_open(&device->pins[i]);
	return device;
}

void soak_device_close(struct soak_device *device)
{
	size_t i;

	if (soak.device)
		verbs_close(device);
	for (i = 0; i < RINGS && !soak.device; i++)
		close(device->pins[i].fd);
	for (i = 0; i < 2 && !soak.device; i++)
		close(device->pipe[i]);
	SOAK_CHECK(!munmap(device->bounce, SOAK_BOUNCE));
	free(device);
}

struct soak_pin *soak_device_pin(struct soak_device *device, char *start, char *end, bool own)
{
	struct soak_pin *pin = free_pin(device);

	if (!pin)
		return NULL;
	if (soak.device)
		verbs_pin(device, pin, start, end, own);
	else
		ring_pin(pin, start, end);
	pin->taken = true;
	return pin;
}

void soak_device_unpin(struct soak_device *device, struct soak_pin *pin)
{
	(void)device;
	if (soak.device)
		verbs_unpin(pin);
	else
		SOAK_CHECK(!syscall(REGISTER, pin->fd, UNREGISTER_BUFFERS, NULL, 0));
	pin->taken = false;
}

void soak_device_read(struct soak_device *device, struct soak_pin *pin, char *at, size_t nbytes)
{
	/* RDMA: by the peer, of the memory behind the remote key. */
	if (soak.device) {
		verbs_move(device, pin, RC_READ, at, nbytes);
		return;
	}
	ring_move(pin, WRITE_FIXED, device->pipe[1], at, nbytes);
	SOAK_CHECK(read(device->pipe[0], device->bounce, nbytes) == (ssize_t)nbytes);
}

void soak_device_write(struct soak_device *device, struct soak_pin *pin, char *at, size_t nbytes)
{
	if (soak.device) {
		verbs_move(device, pin, RC_WRITE, at, nbytes);
		return;
	}
	SOAK_CHECK(write(device->pipe[1], device->bounce, nbytes) == (ssize_t)nbytes);
	ring_move(pin, READ_FIXED, device->pipe[0], at, nbytes);
}
