/* SPDX-License-Identifier: BSD-3-Clause */
#include "pinned.h"
#include "open_files.h"
#include "sys.h"

#include <errno.h>

#define NAME "\nVmPin:"

/* Reading "\nVmPin:   8192 kB\n" a byte at a time: the lines before it have any length. */
struct field {
	size_t matched;		/* bytes of the name; all of them: its number follows */
	uint64_t kib;
};

/* True as the number has ended. */
static bool read_byte(struct field *field, char byte)
{
	if (field->matched < sizeof(NAME) - 1) {
		/* Its first byte comes only once in it. */
		field->matched = byte == NAME[field->matched] ? field->matched + 1
							      : byte == NAME[0];
		return false;
	}
	if (byte >= '0' && byte <= '9')
		field->kib = 10 * field->kib + (uint64_t)(byte - '0');
	return byte == 'k';
}

int64_t rf_pinned_bytes(void)
{
	/* Not "self", whose memory is gone once the main thread has ended. */
	int fd = rf_transient_open("/proc/thread-self/status");
	struct field field = { 0, 0 };
	int64_t result = -ENOENT;
	char buffer[1024];
	ssize_t count, at;

	if (fd < 0)
		return fd;
	while (result == -ENOENT && (count = rf_sys_read(fd, buffer, sizeof(buffer))) > 0)
		for (at = 0; at < count && result == -ENOENT; at++)
			if (read_byte(&field, buffer[at]))
				result = (int64_t)(field.kib << 10);
	rf_transient_close(fd);
	return result;
}
