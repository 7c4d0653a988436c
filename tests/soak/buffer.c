/* SPDX-License-Identifier: BSD-3-Clause */
/* Memory of all kinds, and the value that every byte of it is to have. */
#define _GNU_SOURCE
#include "soak.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define WORDS (SOAK_BLOCK / sizeof(uint64_t))

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif

const char *const soak_kind_names[SOAK_KINDS] = {
	[SOAK_BASE] = "base",
	[SOAK_HOLED] = "holed",
	[SOAK_THP] = "thp",
	[SOAK_HUGETLB] = "hugetlb",
	[SOAK_FILE] = "file",
	[SOAK_SHARED] = "shared",
	[SOAK_HEAP] = "heap",
	[SOAK_STACK] = "stack",
};

/* ---- Mapping ---- */

static size_t mapped_bytes(const struct soak_buffer *buffer)
{
	size_t page = buffer->kind == SOAK_HUGETLB ? SOAK_HUGE : SOAK_PAGE;

	return (buffer->nbytes + page - 1) / page * page;
}

static bool map_at(const struct soak_buffer *buffer, int flags, int fd)
{
	size_t nbytes = mapped_bytes(buffer);
	void *at = mmap(buffer->place, nbytes, PROT_READ | PROT_WRITE, flags, fd, 0);

	if (at == MAP_FAILED && (errno == EEXIST || errno == ENOMEM))
		return false;
	SOAK_CHECK(at != MAP_FAILED);
	if (at == buffer->place)
		return true;
	/* Others were faster, and this kernel takes the address for a hint. */
	munmap(at, nbytes);
	return false;
}

static bool map_file(const struct soak_buffer *buffer)
{
	int fd = memfd_create("soak", MFD_CLOEXEC);
	bool mapped;

	SOAK_CHECK(fd >= 0);
	SOAK_CHECK(!ftruncate(fd, (off_t)buffer->nbytes));
	mapped = map_at(buffer, MAP_PRIVATE | MAP_FIXED, fd);
	close(fd);
	return mapped;
}

static bool map_memory(const struct soak_buffer *buffer)
{
	const int private = MAP_PRIVATE | MAP_ANONYMOUS;
	bool mapped;

	switch (buffer->kind) {
	case SOAK_HOLED:
		return map_at(buffer, private | MAP_FIXED_NOREPLACE, -1);
	case SOAK_THP:
		mapped = map_at(buffer, private | MAP_FIXED, -1);
		madvise(buffer->place, buffer->nbytes, MADV_HUGEPAGE);
		return mapped;
	case SOAK_HUGETLB:
		return map_at(buffer, private | MAP_FIXED | MAP_HUGETLB | 21 << 26, -1);
	case SOAK_FILE:
		return map_file(buffer);
	case SOAK_SHARED:
		return map_at(buffer, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1);
	default:
		return map_at(buffer, private | MAP_FIXED, -1);
	}
}

bool soak_buffer_map(struct soak_buffer *buffer, size_t nbytes)
{
	buffer->nbytes = nbytes;
	if (buffer->kind == SOAK_HEAP) {
		buffer->start = malloc(nbytes);
		SOAK_CHECK(buffer->start);
	} else if (buffer->kind == SOAK_STACK) {
		buffer->start = buffer->place;
	} else {
		if (!map_memory(buffer))
			return false;
		buffer->start = buffer->place;
	}
	soak_buffer_write(buffer, 0, nbytes);
	return true;
}

void soak_buffer_unmap(struct soak_buffer *buffer)
{
	if (buffer->kind == SOAK_HEAP)
		free(buffer->start);
	else if (buffer->kind == SOAK_HOLED)
		SOAK_CHECK(!munmap(buffer->place, mapped_bytes(buffer)));
	else if (buffer->kind != SOAK_STACK)
		/* Any next mapping could take a hole. */
		SOAK_CHECK(mmap(buffer->place, buffer->room, PROT_NONE,
				MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
				0) != MAP_FAILED);
	buffer->start = NULL;
}

/* ---- Content ---- */

static void block_expected(const struct soak_buffer *buffer, size_t block, uint64_t *words)
{
	uint64_t name = (uint64_t)buffer->id << 32 | buffer->generations[block];
	uint64_t word = name * 0xbf58476d1ce4e5b9 + block * WORDS * 0x9e3779b97f4a7c15;
	size_t i;

	for (i = 0; i < WORDS; i++, word += 0x9e3779b97f4a7c15)
		words[i] = word;
}

void soak_buffer_expected(const struct soak_buffer *buffer, size_t at, size_t nbytes, char *to)
{
	uint64_t words[WORDS];
	size_t skip, n;

	for (; nbytes; at += n, to += n, nbytes -= n) {
		block_expected(buffer, at / SOAK_BLOCK, words);
		skip = at % SOAK_BLOCK;
		n = SOAK_BLOCK - skip < nbytes ? SOAK_BLOCK - skip : nbytes;
		memcpy(to, (const char *)words + skip, n);
	}
}

void soak_buffer_renew(struct soak_buffer *buffer, size_t at, size_t nbytes)
{
	size_t block;

	for (block = at / SOAK_BLOCK; block * SOAK_BLOCK < at + nbytes; block++)
		buffer->generations[block]++;
}

void soak_buffer_write(struct soak_buffer *buffer, size_t at, size_t nbytes)
{
	size_t first = at / SOAK_BLOCK * SOAK_BLOCK;
	size_t last = (at + nbytes + SOAK_BLOCK - 1) / SOAK_BLOCK * SOAK_BLOCK;

	last = last < buffer->nbytes ? last : buffer->nbytes;
	soak_buffer_renew(buffer, first, last - first);
	soak_buffer_expected(buffer, first, last - first, buffer->start + first);
}

static void name_wrong(const struct soak_buffer *buffer, size_t at, size_t nbytes,
		       const char *found, const char *expected, const char *who)
{
	char text[160];
	size_t i;

	for (i = 0; i < nbytes - 1 && found[i] == expected[i]; i++)
		;
	snprintf(text, sizeof(text), "%s, %s buffer %u at %zu of %zu, generation %u", who,
		 soak_kind_names[buffer->kind], buffer->id, at + i, buffer->nbytes,
		 buffer->generations[(at + i) / SOAK_BLOCK]);
	soak_wrong(text, buffer->start + at + i, (unsigned char)expected[i],
		   (unsigned char)found[i]);
}

void soak_buffer_compare(const struct soak_buffer *buffer, size_t at, size_t nbytes,
			 const char *found, const char *who)
{
	char expected[SOAK_BLOCK];
	size_t n;

	for (; nbytes; at += n, found += n, nbytes -= n) {
		n = SOAK_BLOCK - at % SOAK_BLOCK;
		n = n < nbytes ? n : nbytes;
		soak_buffer_expected(buffer, at, n, expected);
		if (memcmp(found, expected, n))
			name_wrong(buffer, at, n, found, expected, who);
	}
}
