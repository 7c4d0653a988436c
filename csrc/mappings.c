/* SPDX-License-Identifier: BSD-3-Clause */
#include "mappings.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/sysmacros.h>

/* Lines are shorter than a path may be, and these are of devices. */
struct text {
	int fd;
	size_t used, at;
	char bytes[8192];
};

/* The next line, or NULL at the end. What does not fit in is of no interest. */
static char *next_line(struct text *text)
{
	char *line = text->bytes + text->at, *end = memchr(line, '\n', text->used - text->at);
	ssize_t got;

	if (!end) {
		text->used -= text->at;
		memmove(text->bytes, line, text->used);
		if (text->used == sizeof(text->bytes))
			text->used = 0;
		got = rf_sys_read(text->fd, text->bytes + text->used,
				  sizeof(text->bytes) - text->used);
		if (got <= 0)
			return NULL;
		text->used += (size_t)got;
		text->at = 0;
		return next_line(text);
	}
	*end = '\0';
	text->at = (size_t)(end + 1 - text->bytes);
	return line;
}

static uint64_t number(const char **at, unsigned int base)
{
	uint64_t value = 0;
	unsigned int digit;

	for (;; (*at)++) {
		digit = (unsigned int)(**at | 32) - '0';
		if (digit > 9)
			digit -= 'a' - '0' - 10;
		if (digit >= base)
			return value;
		value = value * base + digit;
	}
}

/* "start-end perms offset major:minor inode   path" */
static bool is_of(const char *line, const struct rf_file *file, uintptr_t *start, uintptr_t *end)
{
	unsigned int fields, device_major, device_minor;

	*start = number(&line, 16);
	line += *line == '-';
	*end = number(&line, 16);
	for (fields = 0; fields < 3 && *line; line++)
		fields += *line == ' ';
	device_major = (unsigned int)number(&line, 16);
	line += *line == ':';
	device_minor = (unsigned int)number(&line, 16);
	line += *line == ' ';
	return makedev(device_major, device_minor) == file->device &&
	       number(&line, 10) == file->inode && *start < *end;
}

void rf_mappings_replace(const struct rf_file *file)
{
	struct text text = { .fd = rf_sys_open("/proc/self/maps", RF_READ) };
	uintptr_t start, end;
	const char *line;

	if (text.fd < 0)
		return;
	while ((line = next_line(&text)))
		if (is_of(line, file, &start, &end))
			(void)rf_sys_map_over(start, end - start);
	rf_sys_close(text.fd);
}
