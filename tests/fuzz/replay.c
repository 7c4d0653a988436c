/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The inputs of tests/fuzz/corpus/NAME, and random ones, to the fuzzer NAME; or those that
 * are named.
 */
#define _GNU_SOURCE /* program_invocation_short_name */
#include "check.h"
#include "fuzz.h"

#include <dirent.h>

static uint8_t bytes[1 << 20];

static void play(size_t nbytes)
{
	/* Of its own size, so that a read too far is noticed. */
	uint8_t *input = malloc(nbytes ? nbytes : 1);

	memcpy(input, bytes, nbytes);
	fflush(stdout);
	LLVMFuzzerTestOneInput(input, nbytes);
	free(input);
}

static void play_file(const char *path)
{
	FILE *file = fopen(path, "rb");
	size_t nbytes;

	CHECK(file, "%s: %s", path, strerror(errno));
	nbytes = fread(bytes, 1, sizeof(bytes), file);
	fclose(file);
	printf("%s\n", path);
	play(nbytes);
}

static void play_random(void)
{
	size_t nbytes = 1 + check_random() % 4096, i;

	for (i = 0; i < nbytes; i++)
		bytes[i] = (uint8_t)(check_random() >> 56);
	play(nbytes);
}

int main(int argc, char **argv)
{
	char folder[256], path[1024];
	unsigned long played = 0, inputs = check_scale(60);
	struct dirent *entry;
	DIR *entries;
	int i;

	for (i = 1; i < argc; i++)
		play_file(argv[i]);
	if (argc > 1)
		return 0;
	snprintf(folder, sizeof(folder), "tests/fuzz/corpus/%s", program_invocation_short_name);
	entries = opendir(folder);
	CHECK(entries, "%s: %s", folder, strerror(errno));
	while ((entry = readdir(entries))) {
		if (entry->d_name[0] == '.')
			continue;
		snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
		play_file(path);
		played++;
	}
	closedir(entries);
	CHECK(played, "%s is empty", folder);
	check_seed();
	while (inputs--)
		play_random();
	return 0;
}
