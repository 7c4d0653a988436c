/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE /* dladdr() */
#include "fork_callers.h"
#include "elf.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#ifdef __GLIBC__
#include <execinfo.h>
#else
/* musl has none: forks are counted there, without their callers. */
static int backtrace(void **frames, int size)
{
	(void)frames, (void)size;
	return 0;
}
#endif

#define CALLERS RF_FORK_CALLERS
#define FRAMES 16
#define OBJECTS 2	/* this library and libc */

struct caller {
	uintptr_t address;
	uint64_t count;
};

static struct {
	bool on;
	struct caller callers[CALLERS];
	struct {
		uintptr_t start, end;
	} within[OBJECTS];
	size_t within_count;
} state;

static int note_object(struct dl_phdr_info *info, size_t size, void *unused)
{
	const uintptr_t here = (uintptr_t)note_object, libc = (uintptr_t)abort;
	struct rf_elf object;

	(void)size, (void)unused;
	if (!rf_elf_read(&object, info) || state.within_count == OBJECTS)
		return 0;
	if ((object.start <= here && here < object.end) ||
	    (object.start <= libc && libc < object.end)) {
		state.within[state.within_count].start = object.start;
		state.within[state.within_count++].end = object.end;
	}
	return 0;
}

void rf_fork_callers_begin(void)
{
	void *frame;

	dl_iterate_phdr(note_object, NULL);
	(void)backtrace(&frame, 1);
	state.on = true;
}

static bool is_within(uintptr_t address)
{
	size_t i;

	for (i = 0; i < state.within_count; i++)
		if (state.within[i].start <= address && address < state.within[i].end)
			return true;
	return false;
}

static void count_caller(uintptr_t address)
{
	size_t i;

	for (i = 0; i < CALLERS; i++) {
		struct caller *caller = &state.callers[i];

		if (caller->address && caller->address != address)
			continue;
		caller->address = address;
		caller->count++;
		return;
	}
}

/* The caller of fork(), or of daemon(): the first frame that is neither libc's nor ours. */
void rf_fork_callers_count(void)
{
	void *frames[FRAMES];
	int i, count;

	if (!state.on)
		return;
	count = backtrace(frames, FRAMES);
	for (i = 1; i < count; i++) {
		if (is_within((uintptr_t)frames[i]))
			continue;
		count_caller((uintptr_t)frames[i]);
		return;
	}
}

void rf_fork_callers_clear(void)
{
	memset(state.callers, 0, sizeof(state.callers));
}

struct place {
	uintptr_t address;
	uintptr_t offset;
	char path[RF_JSON_STRING];	/* "": in no object */
	char build_id[129];
};

static int find_place(struct dl_phdr_info *info, size_t size, void *data)
{
	struct place *place = data;
	struct rf_elf object;

	(void)size;
	(void)rf_elf_read(&object, info);
	if (place->address < object.start || place->address >= object.end)
		return 0;
	place->offset = place->address - object.base;
	rf_elf_path(object.name, place->path, sizeof(place->path));
	rf_elf_build_id(&object, place->build_id, sizeof(place->build_id));
	return 1;
}

static void put_caller(struct rf_json *json, const struct caller *caller)
{
	/* The return address follows the call. */
	struct place place = { .address = caller->address - 1 };
	Dl_info known = { .dli_sname = NULL };

	(void)dladdr((void *)place.address, &known);
	dl_iterate_phdr(find_place, &place);
	rf_json_open(json, NULL, '{');
	rf_json_string(json, "symbol", known.dli_sname);
	rf_json_string(json, "object", *place.path ? place.path : NULL);
	rf_json_string(json, "build_id", *place.build_id ? place.build_id : NULL);
	rf_json_number(json, "offset", place.offset);
	rf_json_number(json, "count", caller->count);
	rf_json_close(json, '}');
}

void rf_fork_callers_put(struct rf_json *json, const char *name)
{
	size_t i;

	rf_json_open(json, name, '[');
	for (i = 0; i < CALLERS && state.callers[i].count; i++)
		put_caller(json, &state.callers[i]);
	rf_json_close(json, ']');
}
