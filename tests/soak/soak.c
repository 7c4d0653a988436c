/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The program: what is asked for, a line of progress every ten seconds, and at the end
 * one line of JSON that says what was done.
 *
 *	soak [--seconds S] [--forks N] [--seed N] [--threads N] [--mode lazy|eager]
 *	     [--device NAME] [--huge PAGES] [--break unseen|lost|moved]
 *
 * It goes on for as long, and with --forks until so many have been, of every kind.
 *
 * Exit status: 0, or 99 and what was wrong.
 */
#define _GNU_SOURCE
#include "soak.h"

#include "fork.h"
#include "preload/ibv.h"

#include <errno.h>
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define THREADS_MOST 64

struct soak_settings soak = { .seconds = 5, .threads = 4, .mode = RF_MODE_AUTO };
struct soak_counts *soak_children;
static double began;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* ---- Failures ---- */

/* One write(), so that lines of several processes stay apart. */
static void say(const char *text, size_t nbytes)
{
	(void)!write(STDERR_FILENO, text, nbytes);
}

static const char *const modes[] = {
	[RF_MODE_NONE] = "none",
	[RF_MODE_AUTO] = "auto",
	[RF_MODE_LAZY] = "lazy",
	[RF_MODE_EAGER] = "eager",
};

static const char *mode_name(void)
{
	return modes[rf_mode()];
}

void soak_failed(const char *format, ...)
{
	char text[1024];
	va_list arguments;
	int n = snprintf(text, sizeof(text), "soak: seed %llu, %s, process %d, after %.1f s: ",
			 (unsigned long long)soak.seed, mode_name(), (int)getpid(),
			 now() - began);

	va_start(arguments, format);
	n += vsnprintf(text + n, sizeof(text) - (size_t)n - 1, format, arguments);
	va_end(arguments);
	n = n < (int)sizeof(text) - 2 ? n : (int)sizeof(text) - 2;
	text[n++] = '\n';
	say(text, (size_t)n);
	_exit(99);
}

/* The lines of smaps on @address. */
static void say_mapping(uintptr_t address)
{
	FILE *smaps = fopen("/proc/self/smaps", "re");
	unsigned long start = 0, end = 0, a, b;
	char line[512];

	while (smaps && fgets(line, sizeof(line), smaps)) {
		if (sscanf(line, "%lx-%lx ", &a, &b) == 2) {
			start = a;
			end = b;
		}
		if (start <= address && address < end)
			say(line, strlen(line));
	}
}

void soak_wrong(const char *who, const char *address, unsigned int expected, unsigned int found)
{
	say_mapping((uintptr_t)address);
	soak_failed("%s: at %p expected %02x, found %02x", who, (const void *)address, expected,
		    found);
}

/* ---- Threads ---- */

static unsigned int slowness(void)
{
	const char *text = getenv("RDMAFORK_TEST_SLOWNESS");
	unsigned long value = text ? strtoul(text, NULL, 10) : 1;

	return (SOAK_TSAN ? 10 : 1) * (value && value < 1000 ? (unsigned int)value : 1);
}

/* While they count, too: a number that is late does no harm. */
__attribute__((no_sanitize("thread"))) static void total(struct soak_counts *counts)
{
	uint64_t *to = (uint64_t *)counts;
	unsigned int i;
	size_t j;

	*counts = *soak_children;
	for (i = 0; i < soak.threads; i++)
		for (j = 0; j < sizeof(*counts) / sizeof(*to); j++)
			to[j] += ((const volatile uint64_t *)&soak_workers[i].counts)[j];
}

/* So many forks, and everything has come up, however slow this machine is. */
static bool is_enough(void)
{
	struct soak_counts c;

	total(&c);
	return !soak.forks ||
	       (c.forks + c.clones >= soak.forks && (c.clones || SOAK_TSAN) && c.by_exit_now &&
		c.by_exit && c.by_signal && c.killed && c.pages_absent && c.pages_wiped &&
		c.pages_written_over && c.device_reads && c.device_writes && c.remaps);
}

static void report_progress(void)
{
	struct soak_counts counts;

	total(&counts);
	fprintf(stderr, "soak: %.0f s, %llu forks, %llu registrations, %llu MiB compared\n",
		now() - began, (unsigned long long)(counts.forks + counts.clones),
		(unsigned long long)counts.registrations,
		(unsigned long long)(counts.bytes_compared >> 20));
}

/* Until all have ended; a thread that does nothing for two minutes hangs. */
static void watch(void)
{
	double spoken = now(), moved[THREADS_MOST];
	uint64_t seen[THREADS_MOST] = { 0 };
	unsigned int i, ended = 0;

	for (i = 0; i < soak.threads; i++)
		moved[i] = now();
	while (ended < soak.threads) {
		usleep(20000);
		if (now() - began > soak.seconds && is_enough())
			__atomic_store_n(&soak_enough, true, __ATOMIC_RELAXED);
		if (now() - spoken > 10) {
			spoken = now();
			report_progress();
		}
		for (i = 0, ended = 0; i < soak.threads; i++) {
			uint64_t operations = __atomic_load_n(&soak_workers[i].counts.operations,
							      __ATOMIC_RELAXED);

			ended += __atomic_load_n(&soak_workers[i].ended, __ATOMIC_ACQUIRE);
			if (operations != seen[i])
				moved[i] = now();
			seen[i] = operations;
			if (now() - moved[i] > 120 * slowness())
				soak_failed("thread %u hangs", i);
		}
	}
}

static void run(void)
{
	pthread_t threads[THREADS_MOST], mover;
	unsigned int i;

	for (i = 0; i < soak.threads; i++)
		soak_workers[i].device = soak_device_open();
	for (i = 0; i < soak.threads; i++)
		SOAK_CHECK(!pthread_create(&threads[i], NULL, soak_worker_run, &soak_workers[i]));
	SOAK_CHECK(!pthread_create(&mover, NULL, soak_mover_run, NULL));
	watch();
	for (i = 0; i < soak.threads; i++)
		SOAK_CHECK(!pthread_join(threads[i], NULL));
	SOAK_CHECK(!pthread_join(mover, NULL));
	for (i = 0; i < soak.threads; i++)
		soak_device_close(soak_workers[i].device);
}

/* The structures are sound, and nothing is in them. */
static void check_engine(struct rf_stats *stats)
{
	SOAK_CHECK(rf_enter(0) == 0);
	rf_ranges_check(&rf_engine.tracker.ranges);
	rf_registry_check(&rf_engine.registry);
	rf_ibv_check();
	rf_leave();
	SOAK_CHECK(rf_stats(stats) == 0);
	SOAK_CHECK(!stats->registrations && !stats->pending && !stats->ranges);
	SOAK_CHECK(!stats->marked_ranges && !stats->marked_bytes && !stats->still_marked_bytes);
	SOAK_CHECK(!stats->unmarked_ranges && !stats->ibv_ranges && !stats->ibv_unbalanced);
}

/* ---- The result ---- */

#define FIELD(of, name) printf(", \"" #name "\": %llu", (unsigned long long)(of).name)

static void print_result(const struct rf_stats *stats)
{
	struct rf_kernel kernel;
	struct soak_counts counts;

	rf_kernel_info(&kernel);
	total(&counts);
	printf("{\"kernel\": \"%s\", \"device\": \"%s\", \"mode\": \"%s\", \"seed\": %llu, "
	       "\"threads\": %u, \"huge_pages\": %u, \"whole\": %s, \"seconds\": %.1f",
	       kernel.release, soak.device ? soak.device : "io_uring", mode_name(),
	       (unsigned long long)soak.seed, soak.threads, soak.huge_pages,
	       soak.whole ? "true" : "false", now() - began);
	FIELD(counts, operations);
	FIELD(counts, registrations);
	FIELD(counts, releases);
	FIELD(counts, remaps);
	FIELD(counts, holes);
	FIELD(counts, forks);
	FIELD(counts, clones);
	FIELD(counts, forks_refused);
	FIELD(counts, by_exit_now);
	FIELD(counts, by_exit);
	FIELD(counts, by_signal);
	FIELD(counts, killed);
	FIELD(counts, pages_looked_at);
	FIELD(counts, pages_absent);
	FIELD(counts, pages_wiped);
	FIELD(counts, pages_written_over);
	FIELD(counts, pins);
	FIELD(counts, device_reads);
	FIELD(counts, device_writes);
	FIELD(counts, bytes_by_device);
	FIELD(counts, bytes_compared);
	printf(", \"moves\": {\"nodes\": %u", soak_moves.nodes);
	FIELD(soak_moves, asked);
	FIELD(soak_moves, there);
	FIELD(soak_moves, moved);
	FIELD(soak_moves, busy);
	FIELD(soak_moves, migrated);
	FIELD(soak_moves, compactions);
	FIELD(soak_moves, collapses);
	FIELD(soak_moves, collapsed);
	FIELD(soak_moves, page_outs);
	printf("}, \"engine\": {\"abi\": %d", rf_abi());
	FIELD(*stats, forks);
	FIELD(*stats, madvise_calls);
	FIELD(*stats, query_calls);
	FIELD(*stats, unmarked_bytes);
	FIELD(*stats, ibv_calls);
	FIELD(*stats, engine_bytes);
	printf("}, \"errors\": 0}\n");
	fflush(stdout);
}

/* ---- Options ---- */

static const char *const faults[] = {
	[SOAK_SOUND] = "nothing",
	[SOAK_UNSEEN] = "unseen",
	[SOAK_LOST] = "lost",
	[SOAK_MOVED] = "moved",
};

static void usage(void)
{
	fprintf(stderr,
		"usage: soak [--seconds S] [--forks N] [--seed N] [--threads N]\n"
		"            [--mode lazy|eager] [--device NAME] [--huge PAGES]\n"
		"            [--break unseen|lost|moved]\n");
	exit(2);
}

static size_t choose(const char *text, const char *const *names, size_t count)
{
	size_t i;

	for (i = 0; i < count; i++)
		if (!strcmp(text, names[i]))
			return i;
	usage();
	return 0;
}

static void parse(int argc, char **argv)
{
	static const struct option options[] = {
		{ "seconds", required_argument, NULL, 's' },
		{ "forks", required_argument, NULL, 'f' },
		{ "seed", required_argument, NULL, 'r' },
		{ "threads", required_argument, NULL, 't' },
		{ "mode", required_argument, NULL, 'm' },
		{ "device", required_argument, NULL, 'd' },
		{ "huge", required_argument, NULL, 'h' },
		{ "break", required_argument, NULL, 'b' },
		{ NULL, 0, NULL, 0 },
	};
	int option;

	soak.seed = (uint64_t)time(NULL) * 1000003 + (uint64_t)getpid();
	while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
		if (option == 's')
			soak.seconds = strtod(optarg, NULL);
		else if (option == 'f')
			soak.forks = strtoull(optarg, NULL, 0);
		else if (option == 'r')
			soak.seed = strtoull(optarg, NULL, 0);
		else if (option == 't')
			soak.threads = (unsigned int)strtoul(optarg, NULL, 0);
		else if (option == 'm')
			soak.mode = (enum rf_mode)choose(optarg, modes, 4);
		else if (option == 'd')
			soak.device = optarg;
		else if (option == 'h')
			soak.huge_pages = (unsigned int)strtoul(optarg, NULL, 0);
		else if (option == 'b')
			soak.fault = (enum soak_fault)choose(optarg, faults, 4);
		else
			usage();
	}
	if (!soak.threads || soak.threads > THREADS_MOST || optind < argc)
		usage();
}

static void start(void)
{
	struct rf_kernel kernel;
	struct rf_error error;
	int rc;

	unsetenv("RDMAFORK_MODE");
	unsetenv("RDMAV_FORK_SAFE");
	unsetenv("IBV_FORK_SAFE");
	rf_kernel_info(&kernel);
	soak.trusted = kernel.copy_trusted;
	soak.whole = !kernel.copy_trusted;
	if (!soak_is_protected())
		return;
	rc = rf_fork_init(soak.mode, &error);
	if (rc)
		soak_failed("rf_fork_init: %d, cause %d", rc, error.cause);
}

static void *share(size_t nbytes)
{
	const int sharing = MAP_SHARED | MAP_ANONYMOUS;
	void *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, sharing, -1, 0);

	SOAK_CHECK(memory != MAP_FAILED);
	return memory;
}

int main(int argc, char **argv)
{
	const struct rlimit no_core = { 0, 0 };
	struct rf_stats stats;
	uint32_t *gates;
	unsigned int i;

	began = now();
	parse(argc, argv);
	setrlimit(RLIMIT_CORE, &no_core);
	start();
	soak_children = share(sizeof(*soak_children));
	gates = share(soak.threads * 64);
	soak_workers = calloc(soak.threads, sizeof(*soak_workers));
	SOAK_CHECK(soak_workers);
	for (i = 0; i < soak.threads; i++) {
		soak_workers[i].number = i;
		soak_workers[i].gate = gates + i * 16;
		soak_worker_prepare(&soak_workers[i]);
	}
	run();
	check_engine(&stats);
	print_result(&stats);
	return 0;
}
