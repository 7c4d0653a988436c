/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Another library with fork handlers: it gives idle registrations back before a
 * fork, as UCX does, and registers them again; it takes Python's lock there, as
 * gRPC does; and, if asked to, forks. Installed as it is loaded, so before or
 * after the engine's handlers, which it finds when told to.
 */
#define _GNU_SOURCE
#include <rdmafork.h>

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
	REGISTER = 1,
	TAKE_GIL = 2,
	FORK = 4
};

#define COUNT 8
#define NBYTES 16384ul

static int kind, nested;
static char *memory;
static struct rf_handle handles[COUNT];
static int failures, runs;

static int (*engine_register)(const void *, size_t, unsigned int, enum rf_policy,
			      struct rf_handle *, struct rf_error *);
static int (*engine_release)(struct rf_handle, unsigned int);
static int (*take_gil)(void);
static void (*give_gil)(int);

/* Forks run in several threads at once. */
static pthread_mutex_t cache = PTHREAD_MUTEX_INITIALIZER;

static void expect(int is, int wanted)
{
	if (is != wanted)
		__atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED);
}

static void register_all(void)
{
	struct rf_error error;
	int i;

	for (i = 0; i < COUNT; i++)
		expect(engine_register(memory + 2 * i * NBYTES, NBYTES, i & 1 ? RF_HELD : 0,
				       RF_OMIT, &handles[i], &error),
		       1);
}

static void release_all(int wanted)
{
	int i;

	for (i = 0; i < COUNT; i++)
		expect(engine_release(handles[i], 0), wanted);
}

static void visit_python(void)
{
	int state = take_gil();

	/* Let others have it. */
	give_gil(state);
}

static void fork_within(void)
{
	int status;
	pid_t pid;

	if (nested)
		return;
	nested = 1;
	pid = fork();
	if (!pid)
		_exit(0);
	expect(waitpid(pid, &status, 0) == pid && !status, 1);
	nested = 0;
}

static void prepare(void)
{
	if (kind & TAKE_GIL)
		visit_python();
	if (kind & REGISTER) {
		pthread_mutex_lock(&cache);
		release_all(0);
		register_all();
		release_all(0);
		register_all();
		pthread_mutex_unlock(&cache);
	}
	if (kind & FORK)
		fork_within();
	if (kind)
		__atomic_add_fetch(&runs, 1, __ATOMIC_RELAXED);
}

static void parent(void)
{
	if (kind & REGISTER) {
		pthread_mutex_lock(&cache);
		release_all(0);
		register_all();
		pthread_mutex_unlock(&cache);
	}
	if (kind & TAKE_GIL)
		visit_python();
	if (kind & FORK)
		fork_within();
}

/* Not the GIL: the thread that had it is not in the child. */
static void child(void)
{
	if (!(kind & REGISTER))
		return;
	pthread_mutex_init(&cache, NULL);
	release_all(-ECHILD);
	memory = mmap(NULL, 2 * COUNT * NBYTES, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	register_all();
	release_all(0);
	register_all();
}

void handlers_use(const char *path, int kinds)
{
	void *engine = dlopen(path, RTLD_NOW);

	*(void **)&engine_register = dlsym(engine, "rf_register");
	*(void **)&engine_release = dlsym(engine, "rf_release");
	*(void **)&take_gil = dlsym(RTLD_DEFAULT, "PyGILState_Ensure");
	*(void **)&give_gil = dlsym(RTLD_DEFAULT, "PyGILState_Release");
	memory = mmap(NULL, 2 * COUNT * NBYTES, PROT_READ | PROT_WRITE,
		      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (kinds & REGISTER)
		register_all();
	kind = kinds;
}

int handlers_runs(void)
{
	return runs;
}

int handlers_failures(void)
{
	return failures;
}

__attribute__((constructor)) static void install(void)
{
	pthread_atfork(prepare, parent, child);
}
