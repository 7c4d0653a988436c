/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A libibverbs with one device, for where none is, each of whose calls can be made to fail.
 * What it has open is counted.
 */
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct ibv_context {
	void *device;
	void *ops[32];
	int cmd_fd, async_fd;
};

struct ibv_pd {
	struct ibv_context *context;
	uint32_t handle;
};

struct ibv_mr {
	struct ibv_context *context;
	struct ibv_pd *pd;
	void *addr;
	size_t length;
	uint32_t handle, lkey, rkey;
};

static int fail_at, fail_with, faults, calls, open_now;

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

int standin_calls(void)
{
	return calls;
}

/* Contexts, domains, regions and lists. */
int standin_open(void)
{
	return open_now;
}

static int injected(void)
{
	calls++;
	if (!fail_at || --fail_at)
		return 0;
	faults++;
	errno = fail_with;
	return fail_with;
}

static void *make(size_t nbytes)
{
	if (injected())
		return NULL;
	open_now++;
	return calloc(1, nbytes);
}

static int unmake(void *object)
{
	int error = injected();

	if (error)
		return error;
	open_now--;
	free(object);
	return 0;
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
	open_now--;
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
	}
	return context;
}

int ibv_close_device(struct ibv_context *context)
{
	close(context->cmd_fd);
	close(context->async_fd);
	open_now--;
	free(context);
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

	if (pd)
		pd->context = context;
	return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
	return unmake(pd);
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct ibv_mr *mr = make(sizeof(*mr));

	(void)access;
	if (mr)
		*mr = (struct ibv_mr){ pd->context, pd, addr, length, 1, 2, 3 };
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
	return unmake(mr);
}
