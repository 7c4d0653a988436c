/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * Every system call that taking a libibverbs' calls makes fails, with every errno, alone and
 * with all that follow. Then all its calls come here, or none: memory that it marks itself
 * it unmarks itself.
 */
#define _GNU_SOURCE /* struct dl_phdr_info */
#include "check.h"
#include "engine.h"
#include "preload/elf.h"

#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>

#define DONE 2 /* exit status: fewer calls were made */

static const char *const kinds[] = { "got", "relro", "direct" };

/* A library loaded meanwhile is noticed by a question, or by a fork. */
static bool by_fork;

static struct {
	int (*fork_init)(void);
	int (*enter)(void *base, size_t size);
	int (*leave)(void *base, size_t size);
	int (*own_calls)(void);
} library;

static void *find(void *handle, const char *name)
{
	void *found = dlsym(handle, name);

	CHECK(found, "%s", dlerror());
	return found;
}

static void load(const char *kind, int mode)
{
	char path[64];
	void *handle;

	snprintf(path, sizeof(path), "build/ctest/standin-%s.so", kind);
	handle = dlopen(path, mode | RTLD_LOCAL);
	CHECK(handle, "%s", dlerror());
	*(void **)&library.fork_init = find(handle, "ibv_fork_init");
	*(void **)&library.enter = find(handle, "standin_register");
	*(void **)&library.leave = find(handle, "standin_release");
	*(void **)&library.own_calls = find(handle, "standin_own_calls");
}

/* Its memory is marked and unmarked, either all by the engine or all by the library. */
static void check_whole(bool served)
{
	char *memory = check_map(4);
	struct rf_stats before, now;
	int own = library.own_calls();

	CHECK(rf_stats(&before) == 0);
	CHECK(served || library.fork_init() == 0);
	CHECK(library.enter(memory + check_page, 2 * check_page) == 0);
	CHECK(check_marked(memory, 4) == 2);
	CHECK(library.leave(memory + check_page, 2 * check_page) == 0);
	CHECK(check_marked(memory, 4) == 0, "it stays marked");
	CHECK(rf_stats(&now) == 0);
	CHECK(now.ibv_calls - before.ibv_calls == (served ? 2 : 0), "%lu of 2 calls came here",
	      (unsigned long)(now.ibv_calls - before.ibv_calls));
	CHECK(library.own_calls() - own == (served ? 0 : 2));
	CHECK(now.ibv_unbalanced == before.ibv_unbalanced);
}

static void run_once(const char *kind, void (*fail)(unsigned long, int), unsigned long nth,
		     int with)
{
	struct rf_library found = { .how = RF_LIBRARY_OURS };
	unsigned long faults = inject_faults();
	struct rf_error error;
	int rc = 0;

	check_start(RF_MODE_EAGER);
	if (by_fork)
		CHECK(rf_intercept(&error) == 0);
	load(kind, RTLD_NOW);
	fail(nth, with);
	if (by_fork)
		check_fork();
	else
		rc = rf_intercept(&error);
	inject(0, 0);
	if (by_fork)
		rc = rf_intercept(&error);
	faults = inject_faults() - faults;
	CHECK(rc == 1 || (rc == -ENOTSUP && error.cause == RF_CAUSE_LIBRARY && faults), "%d", rc);
	CHECK(rf_libraries(&found, 1) == 1);
	CHECK((found.how == RF_LIBRARY_REFUSED) == (rc < 0));
	CHECK(rc == 1 || strstr(found.why, "not allowed"), "%s", found.why);
	CHECK(strstr(found.path, kind));
	check_whole(rc == 1);
	check_fork();
	check_whole(rc == 1);
	check_empty();
	_exit(faults ? 0 : DONE);
}

static unsigned long fail_each(const char *kind, void (*fail)(unsigned long, int), int with)
{
	unsigned long nth;
	int status;

	for (nth = 1;; nth++) {
		pid_t child = fork();

		CHECK(child >= 0);
		if (!child)
			run_once(kind, fail, nth, with);
		status = check_wait(child);
		if (status == DONE)
			return nth - 1;
		CHECK(status == 0, "%s, call %lu with %s: %d", kind, nth, strerror(with), status);
		CHECK(nth < 1000);
	}
}

static void fail_all(void)
{
	static const int errors[] = { ENOMEM, EAGAIN, EINVAL, EPERM, EACCES };
	unsigned long faults = 0;
	size_t i, kind;

	for (kind = 0; kind < COUNT_OF(kinds); kind++) {
#if !defined(__x86_64__)
		if (!strcmp(kinds[kind], "direct"))
			continue;
#endif
		for (i = 0; i < COUNT_OF(errors); i++) {
			faults += fail_each(kinds[kind], inject, errors[i]);
			faults += fail_each(kinds[kind], inject_from, errors[i]);
		}
	}
	CHECK(faults >= COUNT_OF(errors), "%lu faults", faults);
	printf("        %lu faults\n", faults);
	fflush(stdout);
}

static void calls_of_a_libibverbs_are_taken_all_or_none(void)
{
	fail_all();
}

static void calls_of_a_library_that_a_fork_notices_are_taken_all_or_none(void)
{
	by_fork = true;
	fail_all();
}

/* The loader makes whole pages read-only: the page that its range begins in too. */
static void a_got_entry_is_read_only_where_its_page_is(void)
{
	const struct rf_elf object = {
		.relro_start = 2 * check_page + 16,
		.relro_end = 4 * check_page - 16,
	};
	uintptr_t at;

	for (at = 0; at < 6 * check_page; at += sizeof(at))
		CHECK(rf_elf_is_read_only(&object, (const uintptr_t *)at) ==
			      (at / check_page == 2),
		      "%zu", (size_t)at);
}

/* A program that is not PIE begins where it was linked for, not at the loader's base. */
static void an_object_begins_with_its_first_segment(void)
{
	static const rf_elf_header headers[] = {
		{ .p_type = PT_PHDR, .p_vaddr = 0x400040, .p_memsz = 0x1000 },
		{ .p_type = PT_LOAD, .p_vaddr = 0x400000, .p_memsz = 0x1000 },
		{ .p_type = PT_LOAD, .p_vaddr = 0x402000, .p_memsz = 0x800 },
	};
	struct dl_phdr_info info = { .dlpi_name = "", .dlpi_phdr = headers };
	struct rf_elf object;

	info.dlpi_phnum = COUNT_OF(headers);
	(void)rf_elf_read(&object, &info);
	CHECK(object.start == 0x400000 && object.end == 0x402800, "%#lx-%#lx",
	      (unsigned long)object.start, (unsigned long)object.end);
	info.dlpi_addr = 0x7000000;
	(void)rf_elf_read(&object, &info);
	CHECK(object.start == 0x7400000 && object.end == 0x7402800);
}

static bool loaded_enough;

static void *load_and_unload(void *path)
{
	void *handle;

	while (!__atomic_load_n(&loaded_enough, __ATOMIC_RELAXED)) {
		handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
		CHECK(handle, "%s", dlerror());
		CHECK(dlclose(handle) == 0);
	}
	return NULL;
}

static void another_thread_loads_and_unloads_a_libibverbs(void)
{
	unsigned long i, forks = check_scale(600);
	struct rf_error error;
	pthread_t thread;
	int served;

	check_start(RF_MODE_EAGER);
	CHECK(rf_intercept(&error) == 0);
	CHECK(pthread_create(&thread, NULL, load_and_unload, "build/ctest/standin-direct.so") == 0);
	for (i = 0; i < forks; i++) {
		check_fork();
		served = rf_intercept(&error);
		CHECK(served == 0 || served == 1 || served == -ENOTSUP, "%d", served);
	}
	__atomic_store_n(&loaded_enough, true, __ATOMIC_RELAXED);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(rf_libraries(NULL, 0) == 0);
}

/* ---- A fork while interception is switched on ---- */

static struct {
	bool on, answered;
	sem_t asked, forked;
} asking;

/* standin-asked.so asks it for its status: then the loader's gate is held. */
int standin_asks(void);
int standin_asks(void)
{
	if (asking.on && !sem_post(&asking.asked)) {
		usleep(200000);
		__atomic_store_n(&asking.answered, true, __ATOMIC_SEQ_CST);
	}
	return 0;
}

static void *switch_on(void *unused)
{
	struct rf_error error;

	CHECK(rf_intercept(&error) == 1);
	/* To the child a thread that has ended would be a leak. */
	CHECK(sem_wait(&asking.forked) == 0);
	return unused;
}

static void a_fork_waits_while_interception_is_switched_on(void)
{
	uint64_t began, took;
	pthread_t thread;
	pid_t child;

	check_start(RF_MODE_EAGER);
	load("asked", RTLD_NOW);
	CHECK(sem_init(&asking.asked, 0, 0) == 0 && sem_init(&asking.forked, 0, 0) == 0);
	asking.on = true;
	CHECK(pthread_create(&thread, NULL, switch_on, NULL) == 0);
	CHECK(sem_wait(&asking.asked) == 0);
	began = rf_sys_now();
	child = fork();
	CHECK(child >= 0);
	if (!child) {
		took = rf_sys_now() - began;
		/* It does not wait for ever. */
		CHECK(asking.answered || took >= 1000000000, "after %lu ms",
		      (unsigned long)took / 1000000);
		_exit(0);
	}
	CHECK(sem_post(&asking.forked) == 0);
	CHECK(check_wait(child) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	asking.on = false;
	check_fork();
	check_whole(true);
}

#if defined(__GLIBC__)
static struct {
	bool on;
	sem_t reached, done;
} relocating;

static int nothing(void)
{
	return 0;
}

/* The loader calls it as it relocates a library that refers to the function below. */
static int (*pick(void))(void)
{
	if (relocating.on) {
		CHECK(sem_post(&relocating.reached) == 0);
		CHECK(sem_wait(&relocating.done) == 0);
	}
	return nothing;
}

int standin_wait(void);
int standin_wait(void) __attribute__((ifunc("pick")));

static void *look_meanwhile(void *unused)
{
	CHECK(sem_wait(&relocating.reached) == 0);
	if (by_fork)
		check_fork();
	else
		CHECK(rf_libraries(NULL, 0) == 0);
	relocating.on = false;
	CHECK(sem_post(&relocating.done) == 0);
	return unused;
}

static void look_as_it_is_relocated(const char *kind, int mode)
{
	struct rf_error error;
	pthread_t thread;

	check_start(RF_MODE_EAGER);
	CHECK(rf_intercept(&error) == 0);
	CHECK(sem_init(&relocating.reached, 0, 0) == 0 && sem_init(&relocating.done, 0, 0) == 0);
	relocating.on = true;
	CHECK(pthread_create(&thread, NULL, look_meanwhile, NULL) == 0);
	load(kind, mode);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(!relocating.on);
	check_fork();
	check_whole(true);
	CHECK(rf_libraries(NULL, 0) == 1);
	_exit(0);
}

/* Other threads find an object that the loader has mapped before it is relocated. */
static void nothing_is_changed_while_the_loader_is_at_work(void)
{
	static const int modes[] = { RTLD_NOW, RTLD_LAZY };
	size_t kind, i;

	for (i = 0; i < 2 * COUNT_OF(kinds) * COUNT_OF(modes); i++) {
		pid_t child = fork();

		CHECK(child >= 0);
		by_fork = i % 2;
		kind = i / 2 % COUNT_OF(kinds);
#if !defined(__x86_64__)
		if (!strcmp(kinds[kind], "direct"))
			kind = 0;
#endif
		if (!child)
			look_as_it_is_relocated(kinds[kind], modes[i / 2 / COUNT_OF(kinds)]);
		CHECK(check_wait(child) == 0, "%s, by fork: %d", kinds[kind], by_fork);
	}
}
#endif

#if defined(__x86_64__)
/* Another is loaded, so all are looked at again. */
static void a_patched_library_stays_patched(void)
{
	struct rf_library found[2];
	struct rf_error error;

	check_start(RF_MODE_EAGER);
	load("direct", RTLD_NOW);
	CHECK(rf_intercept(&error) == 1);
	check_whole(true);
	load("got", RTLD_NOW);
	CHECK(rf_intercept(&error) == 2, "%s", error.text);
	CHECK(rf_libraries(found, 2) == 2);
	CHECK(found[0].how == RF_LIBRARY_PATCHED && found[1].how == RF_LIBRARY_REWRITTEN);
	check_whole(true);
}
#endif

/* ---- Its list of libraries ---- */

/* The table ends with its mapping, so that a read too far is a fault. */
static void a_name_outside_the_string_table_is_ignored(void)
{
	char *page = check_map(1);
	const rf_elf_entry entry = { .d_tag = DT_NEEDED, .d_un.d_val = 4 };
	struct rf_elf object = { .dynamic = &entry, .entry_count = 1, .string_bytes = 4 };

	object.strings = page + check_page - 4;
	memcpy(page + check_page - 4, "abc", 4);
	CHECK(rf_elf_needs(&object, "") && !rf_elf_needs(&object, "abc"));
}

/* Not as it was called: that may be relative to another folder by now. */
static void the_program_has_its_whole_path(void)
{
	char path[4096], expected[4096] = "";

	CHECK(readlink("/proc/self/exe", expected, sizeof(expected) - 1) > 0);
	rf_elf_path("", path, sizeof(path));
	CHECK(!strcmp(path, expected), "%s", path);
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(calls_of_a_libibverbs_are_taken_all_or_none),
		SCENARIO(calls_of_a_library_that_a_fork_notices_are_taken_all_or_none),
		SCENARIO(a_got_entry_is_read_only_where_its_page_is),
		SCENARIO(an_object_begins_with_its_first_segment),
		SCENARIO(another_thread_loads_and_unloads_a_libibverbs),
		SCENARIO(a_fork_waits_while_interception_is_switched_on),
#if defined(__x86_64__)
		SCENARIO(a_patched_library_stays_patched),
#endif
		SCENARIO(a_name_outside_the_string_table_is_ignored),
		SCENARIO(the_program_has_its_whole_path),
#if defined(__GLIBC__)
		SCENARIO(nothing_is_changed_while_the_loader_is_at_work),
#endif
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
