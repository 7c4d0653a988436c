/* SPDX-License-Identifier: BSD-3-Clause */
#include "pinned.h"
#include "open_files.h"

#include <errno.h>

int64_t rf_pinned_bytes(void)
{
	/* Not "self", whose memory is gone once the main thread has ended. */
	struct rf_text text = { .fd = rf_transient_open("/proc/thread-self/status") };
	const char *line;
	uint64_t kib = 0;
	size_t length;
	int rc;

	if (text.fd < 0)
		return text.fd;
	while ((rc = rf_text_next(&text, &line, &length)) > 0)
		if (rf_text_kib(line, length, "VmPin:", &kib))
			break;
	rf_transient_close(text.fd);
	return rc > 0 ? (int64_t)(kib << 10) : -ENOENT;
}
