/* SPDX-License-Identifier: BSD-3-Clause */
/* rf_strerror(): each failure has its own sentence, with the values that were wrong. */
#define _GNU_SOURCE
#include "check.h"

#include <stdarg.h>

static struct rf_error error;
static struct rf_handle handle;

/* The text for a call's result holds each of these; the last one is NULL. */
static void check_text(int rc, const struct rf_error *of, ...)
{
	char text[RF_STRERROR_SIZE];
	const char *word;
	va_list words;

	errno = 77;
	CHECK(rf_strerror(rc, of, text, sizeof(text)) == text && errno == 77);
	CHECK(strlen(text) < sizeof(text) - 1);
	va_start(words, of);
	while ((word = va_arg(words, const char *)))
		CHECK(strstr(text, word), "%s: not in: %s", word, text);
	va_end(words);
}

static const char *hex(const void *address)
{
	static char shown[8][24];
	static unsigned int next;
	char *out = shown[next++ % 8];

	snprintf(out, sizeof(shown[0]), "0x%zx", (size_t)address);
	return out;
}

static void an_unknown_mode_is_named(void)
{
	CHECK(rf_fork_init((enum rf_mode)99, &error) == -EINVAL);
	check_text(-EINVAL, &error, "mode must be one of auto, lazy, eager, not 99", NULL);
	CHECK(rf_fork_init(RF_MODE_NONE, &error) == -EINVAL);
	check_text(-EINVAL, &error, "eager, not 0", NULL);
	CHECK(rf_mode() == RF_MODE_NONE);
}

static void a_start_says_why_not(void)
{
	char byte;

	setenv("RDMAFORK_MODE", "sometimes", 1);
	CHECK(rf_fork_init(RF_MODE_AUTO, &error) == -EINVAL);
	check_text(-EINVAL, &error, "RDMAFORK_MODE=sometimes in the environment", NULL);
	unsetenv("RDMAFORK_MODE");
	setenv("RDMAFORK_TRUST_COPYING", "0", 1);
	CHECK(rf_fork_init(RF_MODE_LAZY, &error) == -ENOTSUP);
	check_text(-ENOTSUP, &error, "lazy mode needs", "use eager", NULL);
	CHECK(rf_register(&byte, 1, RF_HELD, RF_OMIT, &handle, &error) == 0);
	CHECK(rf_fork_init(RF_MODE_EAGER, &error) == -EINVAL);
	check_text(-EINVAL, &error, "too late", "RDMAV_FORK_SAFE=1", NULL);
	CHECK(rf_release(handle, RF_UNDO) == 0);
	CHECK(rf_fork_init(RF_MODE_EAGER, &error) == 0);
	CHECK(rf_fork_init(RF_MODE_LAZY, &error) == -EINVAL);
	check_text(-EINVAL, &error, "mode='lazy'", "runs in mode 'eager' already", NULL);
	/* Private memory: a child cannot be given a copy. */
	CHECK(rf_register(&byte, 1, RF_HELD, RF_KEEP, &handle, &error) == -ENOTSUP);
	check_text(-ENOTSUP, &error, hex(&byte), "(1 bytes)", "keep", "5.19", NULL);
}

static void a_registration_says_why_not(void)
{
	char *memory = mmap(NULL, 4 * check_page, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(memory != MAP_FAILED && munmap(memory + check_page, check_page) == 0);
	CHECK(rf_fork_init(RF_MODE_EAGER, &error) == 0);
	CHECK(rf_register(memory, 4 * check_page, 0, RF_OMIT, &handle, &error) == -ENOMEM);
	check_text(-ENOMEM, &error, "cannot register", hex(memory), hex(memory + 4 * check_page),
		   "nothing is mapped at", hex(memory + check_page), hex(memory + 2 * check_page),
		   NULL);
	CHECK(rf_register(memory, SIZE_MAX, 0, RF_OMIT, &handle, &error) == -EOVERFLOW);
	check_text(-EOVERFLOW, &error, hex(memory), "18446744073709551615 bytes", NULL);
	CHECK(rf_register(memory, 5, 0, (enum rf_policy)7, &handle, &error) == -EINVAL);
	check_text(-EINVAL, &error, hex(memory), "(5 bytes)", "omit, wipe, keep, not 7", NULL);
	CHECK(rf_register(memory, 5, RF_HELD | RF_UNDO | 0x80000000u, RF_OMIT, &handle, &error) ==
	      -EINVAL);
	check_text(-EINVAL, &error, hex(memory), "(5 bytes)", "no flags 0x80000008;",
		   "RF_HELD (0x1) and RF_NOWAIT (0x2)", NULL);
}

static void a_registration_that_starts_the_engine_is_named(void)
{
	setenv("RDMAV_FORK_SAFE", "1", 1);
	setenv("RDMAFORK_MODE", "eager", 1);
	CHECK(rf_register((void *)check_page, check_page, 0, RF_OMIT, &handle, &error) == -ENOMEM);
	check_text(-ENOMEM, &error, hex((void *)check_page), "nothing is mapped", NULL);
}

static void calls_without_an_error_have_a_text(void)
{
	int status;
	pid_t pid;
	void *memory = mmap(NULL, check_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			    -1, 0);

	CHECK(memory != MAP_FAILED && rf_fork_init(RF_MODE_AUTO, &error) == 0);
	CHECK(rf_register(memory, 1, RF_HELD, RF_OMIT, &handle, &error) == 1);
	pid = fork();
	if (!pid) {
		check_text(rf_release(handle, 0), NULL, "parent process", NULL);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	CHECK(rf_release(handle, 0) == 0);
	check_text(rf_release(handle, 0), NULL, "released already", NULL);
	check_text(rf_descriptor_omit(-1, 0), NULL, strerror(EBADF), NULL);
	check_text(rf_release(handle, RF_HELD), NULL, "unknown flags: rf_release()",
		   "RF_NOWAIT (0x2) and RF_UNDO (0x8)", NULL);
	check_text(rf_descriptor_omit(0, RF_HELD), NULL,
		   "rf_descriptor_omit() takes RF_MAPPED (0x4)", NULL);
	check_text(-EDEADLK, NULL, "signal handler", NULL);
	check_text(-12345, NULL, "12345", NULL);
}

/* NULL in place of an error: the calls end as they do with one. */
static void an_error_need_not_be_asked_for(void)
{
	char *memory = mmap(NULL, check_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			    -1, 0);

	CHECK(memory != MAP_FAILED);
	CHECK(rf_register(memory, SIZE_MAX, RF_HELD, RF_OMIT, &handle, NULL) == -EOVERFLOW);
	CHECK(rf_fork_init((enum rf_mode)99, NULL) == -EINVAL);
	CHECK(rf_fork_init(RF_MODE_EAGER, NULL) == 0);
	CHECK(rf_fork_init(RF_MODE_LAZY, NULL) == -EINVAL);
	CHECK(rf_intercept(NULL) >= 0);
	CHECK(rf_register(memory, 1, RF_HELD, (enum rf_policy)7, &handle, NULL) == -EINVAL);
	CHECK(rf_register(memory, 1, RF_HELD, RF_OMIT, &handle, NULL) == 1);
	CHECK(rf_release(handle, 0) == 0);
	CHECK(munmap(memory, check_page) == 0);
	CHECK(rf_register(memory, check_page, 0, RF_OMIT, &handle, NULL) == -ENOMEM);
}

/* Each cause, with any values: it ends in its room, and has a sentence of its own. */
static void no_text_leaves_its_room(void)
{
	static char all[RF_CAUSE_FLAGS + 1][RF_STRERROR_SIZE];
	char text[RF_STRERROR_SIZE + 1];
	size_t size, full;
	int cause, other;

	for (cause = RF_CAUSE_NONE; cause <= RF_CAUSE_FLAGS; cause++) {
		memset(&error, 0xff, sizeof(error));
		error.cause = (enum rf_cause)cause;
		error.nbytes = SIZE_MAX;
		memset(error.text, 'x', sizeof(error.text) - 1);
		error.text[sizeof(error.text) - 1] = '\0';
		other = cause == RF_CAUSE_SIGNAL ? -EDEADLK : -ENOMEM;
		full = strlen(rf_strerror(other, &error, all[cause], RF_STRERROR_SIZE));
		CHECK(full && full < RF_STRERROR_SIZE - 1, "cause %d: %zu", cause, full);
		for (size = 0; size <= full; size++) {
			memset(text, '#', sizeof(text) - 1);
			text[sizeof(text) - 1] = '\0';
			CHECK(rf_strerror(other, &error, text, size) == text);
			CHECK(!size || strlen(text) == size - 1);
			CHECK(!memcmp(text, all[cause], size ? size - 1 : 0));
			CHECK(strspn(text + size, "#") == sizeof(text) - 1 - size);
		}
		for (other = 0; other < cause; other++)
			CHECK(strcmp(all[other], all[cause]) != 0, "%d, %d", other, cause);
	}
}

static const struct check_scenario scenarios[] = {
	SCENARIO(an_unknown_mode_is_named),
	SCENARIO(a_start_says_why_not),
	SCENARIO(a_registration_says_why_not),
	SCENARIO(a_registration_that_starts_the_engine_is_named),
	SCENARIO(calls_without_an_error_have_a_text),
	SCENARIO(an_error_need_not_be_asked_for),
	SCENARIO(no_text_leaves_its_room),
};

int main(int argc, char **argv)
{
	return check_run(scenarios, COUNT_OF(scenarios), argc, argv);
}
