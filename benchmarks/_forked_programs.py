"""Programs that do not fork: perftest's and UCX's, with a library preloaded that forks in them.

As a plugin, a profiler or a resolver may. It forks when as much is pinned as is asked for.
"""

import os
import socket
import subprocess
import time
from pathlib import Path

from ._workers import WorkerError

FORKER = r"""
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct ibv_mr;
int ibv_dereg_mr(struct ibv_mr *region);

static bool forking;

/* The sum of the lines that begin so, in KiB. */
static long sum(const char *path, const char *name)
{
	FILE *file = fopen(path, "r");
	char line[256];
	long found = 0;

	while (file && fgets(line, sizeof(line), file))
		if (!strncmp(line, name, strlen(name)))
			found += atol(strchr(line, ':') + 1);
	if (file)
		fclose(file);
	return found;
}

static void fork_once(FILE *out)
{
	struct timespec before, after;
	long found = 0;
	int ends[2];
	pid_t pid;

	if (pipe(ends) < 0)
		return;
	clock_gettime(CLOCK_MONOTONIC, &before);
	pid = fork();
	if (!pid) {
		found = sum("/proc/self/smaps_rollup", "Private_");
		_exit(write(ends[1], &found, sizeof(found)) != sizeof(found));
	}
	clock_gettime(CLOCK_MONOTONIC, &after);
	if (read(ends[0], &found, sizeof(found)) == sizeof(found))
		fprintf(out, "%ld %ld\n", (after.tv_sec - before.tv_sec) * 1000000000 +
			after.tv_nsec - before.tv_nsec, found << 10);
	waitpid(pid, NULL, 0);
	close(ends[0]);
	close(ends[1]);
}

static void *work(void *unused)
{
	int forks = atoi(getenv("FORKER_FORKS"));
	FILE *out;

	(void)unused;
	while (sum("/proc/self/status", "VmPin:") < atol(getenv("FORKER_KIB")))
		usleep(10000);
	out = fopen(getenv("FORKER_OUT"), "w");
	while (out && forks--)
		fork_once(out);
	if (out)
		fclose(out);
	__atomic_store_n(&forking, false, __ATOMIC_RELEASE);
	return NULL;
}

/* What is pinned stays so until the last fork: on a slow machine the program is done before. */
int ibv_dereg_mr(struct ibv_mr *region)
{
	void *libibverbs = dlopen("libibverbs.so.1", RTLD_LAZY | RTLD_NOLOAD);
	int (*next)(struct ibv_mr *), waits = 0;

	while (__atomic_load_n(&forking, __ATOMIC_ACQUIRE) && waits++ < 6000)
		usleep(10000);
	*(void **)&next = dlsym(libibverbs, "ibv_dereg_mr");
	return next(region);
}

__attribute__((constructor)) static void begin(void)
{
	pthread_t thread;

	forking = getenv("FORKER_OUT");
	if (forking && pthread_create(&thread, NULL, work, NULL))
		forking = false;
	else if (forking)
		pthread_detach(thread);
}
"""

# MiB that are pinned, and the command. 16 connections of 2 buffers of 4 MiB each are 128 MiB. UCX's
# own test registers 52 MiB, with buffers as long as soft-RoCE's messages may be.
PROGRAMS = {
    "ib_write_bw": (128, "ib_write_bw -d {device} -x 1 -q 16 -s 4194304 -n 5 -p {port}"),
    "ucx_perftest": (
        48,
        "ucx_perftest -d {device}:1 -x rc_verbs -t put_bw -D zcopy -s 8388608 -n 20 -w 1 -p {port}",
    ),
}
# Private memory, where UCX would take shared huge pages, which no fork() copies; and no protection
# by libibverbs itself, for which UCX does not ask where it is told that it is not needed.
SETTINGS = {"UCX_RC_VERBS_ALLOC": "mmap", "UCX_IB_FORK_INIT": "n"}


def listens(port: int) -> bool:
    """Is it there to connect to? Known without a connection, of which it takes one."""
    with open("/proc/net/tcp") as tcp, open("/proc/net/tcp6") as tcp6:
        lines = [*tcp, *tcp6]
    return any(f":{port:04X} " in line and line.split()[3] == "0A" for line in lines)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def run(program: str, device: str, forker: str, forks: int, prefix: list[str]) -> dict[str, object]:
    """Its server forks; a client talks to it meanwhile, and both are to end well."""
    mebibytes, line = PROGRAMS[program]
    port, out = free_port(), Path(forker).with_name("forks")
    command = [*prefix, *line.format(device=device, port=port).split()]
    settings = os.environ | SETTINGS
    forking = {"LD_PRELOAD": forker, "FORKER_OUT": str(out), "FORKER_FORKS": str(forks)}
    forking["FORKER_KIB"] = str(mebibytes << 10)
    server = subprocess.Popen(command, env=settings | forking, stdout=subprocess.DEVNULL)
    try:
        while not listens(port) and server.poll() is None:
            time.sleep(0.1)
        client = subprocess.run([*command, "127.0.0.1"], env=settings, stdout=subprocess.DEVNULL)
        if client.returncode or server.wait():
            raise WorkerError(f"{program}: exit status {client.returncode or server.returncode}")
    finally:
        server.kill()
        server.wait()
    costs = [list(map(int, line.split())) for line in out.read_text().splitlines()]
    return {
        "nbytes": mebibytes << 20,
        "fork_ns": [ns for ns, _ in costs],
        "child_nbytes": max(nbytes for _, nbytes in costs),
    }
