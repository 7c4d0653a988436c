/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A program with a libibverbs of its own inside: it registers 8 MiB at the device that is named,
 * says so, waits for a byte, and forks.
 */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define NBYTES ((size_t)8 << 20)

static struct ibv_context *open_device(const char *name)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);

	while (devices && *devices && strcmp(ibv_get_device_name(*devices), name))
		devices++;
	return devices && *devices ? ibv_open_device(*devices) : NULL;
}

int main(int argc, char **argv)
{
	struct ibv_context *context = open_device(argv[argc - 1]);
	struct ibv_pd *pd = context ? ibv_alloc_pd(context) : NULL;
	void *memory = mmap(NULL, NBYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *region = pd ? ibv_reg_mr(pd, memory, NBYTES, IBV_ACCESS_LOCAL_WRITE) : NULL;

	if (!region) {
		perror("cannot register");
		return 1;
	}
	puts("registered");
	fflush(stdout);
	getchar();
	if (!fork())
		_exit(0);
	wait(NULL);
	return ibv_dereg_mr(region) || ibv_dealloc_pd(pd) || ibv_close_device(context);
}
