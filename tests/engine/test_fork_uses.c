/* SPDX-License-Identifier: BSD-3-Clause */
/* Where whole pages leave: memory on them that fork() or malloc() uses is named. */
#define _GNU_SOURCE
#include "check.h"
#include "engine.h"
#include "fork_uses.h"
#include "preload/exit_report.h"

#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>

int ibv_dontfork_range(void *base, size_t size);
int ibv_dofork_range(void *base, size_t size);

/* The program's own TLS lies between the thread pointer and libc's. */
static __thread char thread_local[40000];

/* Why memory registered at @start is named, or NULL; it is released again. */
static const char *named(const void *start, size_t nbytes)
{
	static __thread struct rf_error error;
	struct rf_handle handle;

	CHECK(rf_register(start, nbytes, 0, RF_OMIT, &handle, &error) == 1);
	check_release(handle);
	if (error.cause == RF_CAUSE_NONE)
		return NULL;
	CHECK(error.cause == RF_CAUSE_SHARED_PAGE && error.end - error.start == check_page);
	CHECK(error.start < (uintptr_t)start + nbytes && error.end > (uintptr_t)start);
	return error.text;
}

static bool is_named(const void *start, size_t nbytes, const char *why)
{
	const char *text = named(start, nbytes);

	if (!text || !strstr(text, why))
		fprintf(stderr, "        %p is named \"%s\"\n", start, text ? text : "nothing");
	return text && strstr(text, why);
}

static void tls_is_named(void)
{
	size_t at;

	memset(thread_local, 1, sizeof(thread_local));
	check_start_untrusted();
	for (at = 0; at < sizeof(thread_local); at += 3000)
		CHECK(is_named(thread_local + at, 8, "this thread's"), "byte %zu", at);
	CHECK(is_named(&errno, sizeof(errno), "this thread's"));
}

/* Beyond the pair of madvise() the kernel is not asked again. */
static void partial_pages_cost_no_more_calls(void)
{
	char *memory = check_map(4);
	const unsigned long calls = check_marks_stay() ? 3 : 2;
	unsigned long before;
	int i;

	check_start_untrusted();
	for (i = 0; i < 3; i++) {
		before = inject_calls();
		check_release(check_register(memory + 777, 2 * check_page, RF_HELD));
		CHECK(!i || inject_calls() - before == calls, "%lu", inject_calls() - before);
	}
}

static void *name_tls_of_thread(void *unused)
{
	memset(thread_local, 1, sizeof(thread_local));
	CHECK(is_named(thread_local + 20000, 8, "this thread's"));
	CHECK(is_named(&errno, sizeof(errno), "this thread's"));
	return unused;
}

static void tls_of_another_thread_is_named(void)
{
	pthread_t thread;

	check_start_untrusted();
	CHECK(!pthread_create(&thread, NULL, name_tls_of_thread, NULL));
	CHECK(!pthread_join(thread, NULL));
}

/* Of the main thread, whose stack is elsewhere: it begins at the thread pointer, where TLS ends. */
static void the_control_block_is_named(void)
{
	const uintptr_t last = ((uintptr_t)pthread_self() + 4095) & ~(check_page - 1);
	const char *why = rf_fork_uses(last, check_page);

#ifndef __GLIBC__
	check_skip("another libc's control block");
#endif
	CHECK(why && strstr(why, "this thread's control block, which fork() uses"), "%s", why);
	CHECK(!rf_fork_uses(last + check_page, check_page));
}

/* As in a program that has the engine linked into it, whose own data may share its pages. */
static void the_engine_s_own_data_is_named(void)
{
	const char *const data = (const char *)&rf_engine;
	const char *const end = (const char *)(&rf_engine + 1);
	const uintptr_t first = (uintptr_t)data & ~(check_page - 1);
	static char elsewhere[1 << 18];

	check_start_untrusted();
	CHECK(is_named(data, 8, "rdmafork's own data"));
	CHECK(is_named(end - 8, 8, "rdmafork's own data"));
	/* Other data on the first page of it, where there is some. */
	if (first != (uintptr_t)data)
		CHECK(is_named((char *)first, 1, "rdmafork's own data"));
	CHECK(!named(elsewhere + sizeof(elsewhere) / 2, 8));
}

static const char of_malloc[] =
	"malloc()'s memory: if the program has threads, a child may die in fork() or malloc(); "
	"align the buffer to whole pages";

static void needs_glibc_s_malloc(void)
{
#ifndef __GLIBC__
	check_skip("another libc's malloc()");
#endif
	if (CHECK_SLOWNESS > 1)
		check_skip("a sanitizer's malloc()");
}

extern char _end[]; /* of the program's data, from the linker */

static void memory_before_the_heap_is_not_malloc_s(void)
{
	needs_glibc_s_malloc();
	free(malloc(100));
	CHECK(!rf_malloc_uses((uintptr_t)_end - 1));
	CHECK(!rf_malloc_uses((uintptr_t)named));
	CHECK(rf_malloc_uses((uintptr_t)sbrk(0) - 1));
	CHECK(!rf_malloc_uses((uintptr_t)sbrk(0)));
}

static void *name_arena(void *unused)
{
	char *block = malloc(20000);

	if (!((uintptr_t)block >> 26) || !block || (char *)sbrk(0) > block)
		check_skip("malloc() took the thread's memory from the main heap");
	CHECK(is_named(block + 8192, 100, of_malloc));
	CHECK(is_named(block + 8193, 100, of_malloc));
	free(block);
	return unused;
}

static void malloc_s_memory_is_named(void)
{
	char *small, *block, *large, *aligned, *mapped = check_map(3);
	static char data[20000];
	pthread_t thread;

	needs_glibc_s_malloc();
	mallopt(M_MMAP_THRESHOLD, 1 << 17);
	small = malloc(100);
	block = malloc(100000);
	large = malloc(1 << 20);
	aligned = aligned_alloc(check_page, 2 * check_page);
	check_start_untrusted();
	errno = 77;
	CHECK(is_named(small, 100, of_malloc));
	CHECK(is_named(block, 100000, of_malloc));
	/* Its end alone shares a page. */
	CHECK(is_named(aligned, check_page + 100, of_malloc));
	CHECK(!named(aligned, 2 * check_page));
	CHECK(!named(large, 1 << 20));
	CHECK(!named(mapped + 100, check_page));
	CHECK(!named(data + 5000, 3));
	CHECK(!named(small, 0));
	CHECK(errno == 77);
	CHECK(!pthread_create(&thread, NULL, name_arena, NULL));
	CHECK(!pthread_join(thread, NULL));
	free(small);
	free(block);
	free(large);
	free(aligned);
}

/* ---- C programs ---- */

/* Runs @act, and takes the text that it writes to stderr. */
static size_t written(void (*act)(void), char *text, size_t nbytes)
{
	int ends[2], before = dup(STDERR_FILENO);
	ssize_t length;

	CHECK(pipe2(ends, O_NONBLOCK) == 0 && before >= 0);
	CHECK(dup2(ends[1], STDERR_FILENO) == STDERR_FILENO);
	rf_exit_report_begin(false); /* this is stderr */
	act();
	CHECK(dup2(before, STDERR_FILENO) == STDERR_FILENO);
	close(before);
	close(ends[1]);
	length = read(ends[0], text, nbytes - 1);
	close(ends[0]);
	text[length > 0 ? length : 0] = '\0';
	return length > 0 ? (size_t)length : 0;
}

static char on_stack_text[64];

static void register_on_the_stack(void)
{
	char ring[512];
	int round;

	snprintf(on_stack_text, sizeof(on_stack_text), "the %zu bytes registered at %p ",
		 sizeof(ring), (void *)ring);
	for (round = 0; round < 3; round++) {
		errno = 77;
		CHECK(ibv_dontfork_range(ring, sizeof(ring)) == 0);
		CHECK(ibv_dofork_range(ring, sizeof(ring)) == 0);
		CHECK(errno == 77);
	}
}

static void register_malloc_s(void)
{
	char *blocks[3];
	size_t i;

	for (i = 0; i < COUNT_OF(blocks); i++) {
		blocks[i] = malloc(100);
		CHECK(ibv_dontfork_range(blocks[i], 100) == 0);
	}
	for (i = 0; i < COUNT_OF(blocks); i++) {
		CHECK(ibv_dofork_range(blocks[i], 100) == 0);
		free(blocks[i]);
	}
}

static void register_mapped(void)
{
	static char *memory;

	memory = check_map(2);
	CHECK(ibv_dontfork_range(memory + 10, check_page) == 0);
	CHECK(ibv_dofork_range(memory + 10, check_page) == 0);
}

static size_t lines(const char *text)
{
	size_t count = 0;

	for (; *text; text++)
		count += *text == '\n';
	return count;
}

static void a_c_program_is_warned_once_for_each_cause(void)
{
	char text[4096], pid[32];

	needs_glibc_s_malloc();
	check_start_untrusted();
	CHECK(!written(register_mapped, text, sizeof(text)), "%s", text);
	CHECK(written(register_on_the_stack, text, sizeof(text)));
	snprintf(pid, sizeof(pid), "rdmafork: pid %d: ", (int)getpid());
	CHECK(!strncmp(text, pid, strlen(pid)) && lines(text) == 1, "%s", text);
	CHECK(strstr(text, "this thread's stack") && strstr(text, "align"), "%s", text);
	CHECK(strstr(text, on_stack_text), "%s: %s", on_stack_text, text);
	CHECK(written(register_malloc_s, text, sizeof(text)));
	CHECK(lines(text) == 1 && strstr(text, of_malloc), "%s", text);
	CHECK(!written(register_malloc_s, text, sizeof(text)), "%s", text);
	CHECK(!written(register_on_the_stack, text, sizeof(text)), "%s", text);
}

static void nothing_is_told_where_copying_is_trusted(void)
{
	char text[4096];

	check_needs_lazy();
	check_start(RF_MODE_EAGER);
	CHECK(!written(register_on_the_stack, text, sizeof(text)), "%s", text);
	CHECK(!written(register_malloc_s, text, sizeof(text)), "%s", text);
}

static void report_and_exit(void)
{
	rf_exit_report_begin(true);
	check_start_untrusted();
	register_on_the_stack();
	register_malloc_s();
	exit(0);
}

/* And in its report; a child has its own. */
static void the_report_has_the_causes(void)
{
	static char text[1 << 16];
	char path[] = "/tmp/rdmafork-report-XXXXXX";
	const char *errors;
	int fd = mkstemp(path), null = open("/dev/null", O_WRONLY);
	ssize_t length;
	pid_t pid;

	needs_glibc_s_malloc();
	CHECK(fd >= 0 && null >= 0 && dup2(null, STDERR_FILENO) >= 0);
	CHECK(setenv("RDMAFORK_REPORT", path, 1) == 0);
	pid = fork();
	CHECK(pid >= 0);
	if (!pid)
		report_and_exit();
	CHECK(check_wait(pid) == 0);
	length = read(fd, text, sizeof(text) - 1);
	unlink(path);
	CHECK(length > 2);
	errors = strstr(text, "\"errors\": [\"rdmafork: pid ");
	CHECK(errors && strstr(errors, "this thread's stack") && strstr(errors, of_malloc), "%s",
	      text);
	CHECK(text[length - 1] == '\n' && lines(text) == 1 && !strstr(text, "\\n"), "%s", text);
}

static void in_its_child(void)
{
	pid_t pid = fork();

	if (!pid) {
		check_start(RF_MODE_EAGER);
		register_malloc_s();
		_exit(0);
	}
	CHECK(check_wait(pid) == 0);
}

static void a_child_is_warned_anew(void)
{
	char text[4096];

	needs_glibc_s_malloc();
	check_start_untrusted();
	CHECK(written(register_malloc_s, text, sizeof(text)) && lines(text) == 1);
	CHECK(written(in_its_child, text, sizeof(text)) && lines(text) == 1, "%s", text);
}

/* ---- Marks that travel ---- */

static uint64_t gone_bytes(void)
{
	struct rf_stats stats;

	CHECK(rf_stats(&stats) == 0);
	return stats.gone_bytes;
}

static void memory_moved_before_its_release_is_counted(void)
{
	char *memory = check_map(8), *moved;
	struct rf_handle handle;
	struct rf_error error;

	check_start_untrusted();
	handle = check_register(memory, 4 * check_page, 0);
	check_release(handle);
	CHECK(gone_bytes() == 0);
	/* As a plain realloc() of a large block. */
	handle = check_register(memory, 4 * check_page, 0);
	moved = mremap(memory, 4 * check_page, 64 * check_page, MREMAP_MAYMOVE);
	CHECK(moved != MAP_FAILED && moved != memory);
	check_release(handle);
	CHECK(gone_bytes() == 4 * check_page);
	CHECK(check_flags(moved) & CHECK_DC);
	/* A registration that fails has lost nothing. */
	CHECK(rf_register(memory, 8 * check_page, 0, RF_OMIT, &handle, &error) == -ENOMEM);
	CHECK(gone_bytes() == 4 * check_page);
	/* A part that is unmapped counts as well. */
	handle = check_register(memory + 4 * check_page, 4 * check_page, 0);
	check_unmap(memory + 5 * check_page, 1);
	check_release(handle);
	CHECK(gone_bytes() == 5 * check_page);
	check_sound();
}

int main(int argc, char **argv)
{
	static const struct check_scenario scenarios[] = {
		SCENARIO(tls_is_named),
		SCENARIO(tls_of_another_thread_is_named),
		SCENARIO(the_control_block_is_named),
		SCENARIO(the_engine_s_own_data_is_named),
		SCENARIO(malloc_s_memory_is_named),
		SCENARIO(memory_before_the_heap_is_not_malloc_s),
		SCENARIO(partial_pages_cost_no_more_calls),
		SCENARIO(a_c_program_is_warned_once_for_each_cause),
		SCENARIO(nothing_is_told_where_copying_is_trusted),
		SCENARIO(the_report_has_the_causes),
		SCENARIO(a_child_is_warned_anew),
		SCENARIO(memory_moved_before_its_release_is_counted),
	};

	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
