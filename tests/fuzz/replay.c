/* SPDX-License-Identifier: BSD-3-Clause */
/* The inputs of tests/fuzz/corpus/NAME, or those that are named, to the fuzzer NAME. */
#define _GNU_SOURCE /* program_invocation_short_name */
#include "check.h"
#include "fuzz.h"

#include <dirent.h>

static void play(const char *path)
{
	static uint8_t bytes[1 << 20];
	FILE *file = fopen(path, "rb");
	uint8_t *input;
	size_t nbytes;

	CHECK(file, "%s: %s", path, strerror(errno));
	nbytes = fread(bytes, 1, sizeof(bytes), file);
	fclose(file);
	/* Of its own size, so that a read too far is noticed. */
	input = malloc(nbytes ? nbytes : 1);
	memcpy(input, bytes, nbytes);
	printf("%s\n", path);
	fflush(stdout);
	LLVMFuzzerTestOneInput(input, nbytes);
	free(input);
}

int main(int argc, char **argv)
{
	char folder[256], path[1024];
	struct dirent *entry;
	unsigned int played = 0;
	DIR *entries;
	int i;

	for (i = 1; i < argc; i++)
		play(argv[i]);
	if (argc > 1)
		return 0;
	snprintf(folder, sizeof(folder), "tests/fuzz/corpus/%s", program_invocation_short_name);
	entries = opendir(folder);
	CHECK(entries, "%s: %s", folder, strerror(errno));
	while ((entry = readdir(entries))) {
		if (entry->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
		play(path);
		played++;
	}
	closedir(entries);
	CHECK(played, "%s is empty", folder);
	return 0;
}
