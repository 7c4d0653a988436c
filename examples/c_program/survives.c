/*
 * A buffer that a device could write to, and a child that does without it.
 *
 *	make && ./survives
 */
#include <rdmafork.h>

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define NBYTES ((size_t)16 << 20)

static void check(int rc, const struct rf_error *error)
{
	char text[RF_STRERROR_SIZE];

	if (rc >= 0)
		return;
	fprintf(stderr, "%s\n", rf_strerror(rc, error, text, sizeof(text)));
	exit(1);
}

/* The kernel cannot read a page that the child does not have: EFAULT. */
static int is_missing(const char *page)
{
	int ends[2];

	return !pipe(ends) && write(ends[1], page, 1) < 0 && errno == EFAULT;
}

int main(void)
{
	struct rf_error error;
	struct rf_handle handle;
	struct rf_stats stats;
	char *buffer = mmap(NULL, NBYTES, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int status;
	pid_t pid;

	if (buffer == MAP_FAILED)
		return 1;
	memset(buffer, 1, NBYTES);
	check(rf_fork_init(RF_MODE_AUTO, &error), &error);
	/* Held: nobody unmaps it before it is released. */
	check(rf_register(buffer, NBYTES, RF_HELD, RF_OMIT, &handle, &error), &error);
	pid = fork();
	if (!pid)
		_exit(!is_missing(buffer + NBYTES / 2));
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return 1;
	check(rf_stats(&stats), NULL);
	printf("the child had %s of the buffer; the kernel copied none of %zu MiB\n",
	       status ? "some" : "nothing", (size_t)stats.marked_bytes >> 20);
	check(rf_release(handle, 0), NULL);
	return status || stats.marked_bytes != NBYTES;
}
