/* SPDX-License-Identifier: BSD-3-Clause */
#include "child_list.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

/* Less than this is kept from fork to fork: faulting it in anew takes as long as copying it. */
#define TRIMMED ((size_t)16 << 20)
/* The largest base page. */
#define FIRST_BYTES ((size_t)64 << 10)
/* From this size on a transparent huge page, a seventh of the time, is worth a system call. */
#define HUGE ((size_t)2 << 20)

/* The least bytes of an area reserved in each round; the next round takes shorter areas. */
static const size_t shortest[] = { 1u << 24, 1u << 20, 1u << 16, 0 };

#define ROUNDS (sizeof(shortest) / sizeof(*shortest))

/* ---- Room ---- */

static size_t header(uint64_t areas)
{
	return sizeof(struct rf_areas) + areas * sizeof(struct rf_area);
}

/* Saved bytes that fill huge pages begin at one, wherever the list is mapped. */
static size_t room_for_bytes(uint64_t nbytes)
{
	return nbytes < HUGE ? nbytes : nbytes + HUGE;
}

/* A larger one with the same content takes its place, in one store. */
static int grow(struct rf_areas **areas, size_t needed)
{
	struct rf_areas *old = *areas, *larger;
	size_t mapped = old ? old->mapped : FIRST_BYTES;
	void *memory;

	if (old && old->mapped >= needed)
		return 0;
	while (mapped < needed)
		mapped *= 2;
	if (rf_sys_map(mapped, &memory) < 0)
		return -ENOMEM;
	larger = memory;
	if (old)
		memcpy(larger, old, old->used);
	larger->mapped = mapped;
	__atomic_store_n(areas, larger, __ATOMIC_RELEASE);
	if (old)
		rf_sys_unmap(old, old->mapped);
	return 0;
}

int rf_child_list_grow(struct rf_child_list *list, uint64_t areas, uint64_t nbytes)
{
	size_t needed;

	areas = areas > list->room ? areas : list->room;
	nbytes = nbytes > list->room_bytes ? nbytes : list->room_bytes;
	needed = header(areas) + room_for_bytes(nbytes < RF_LIST_ROOM ? nbytes : RF_LIST_ROOM);
	if (grow(&list->spare, needed) < 0 || grow(&list->shown, needed) < 0)
		return -ENOMEM;
	list->room = areas;
	list->room_bytes = nbytes;
	return 0;
}

/* ---- Which areas there are ---- */

/* The list under construction. */
struct collection {
	struct rf_child_list *list;
	struct rf_tracker *tracker;
	bool open;		/* the tracker's reader is */
	bool mapped_anew;	/* for the list, whose own field other threads read meanwhile */
	struct rf_area last;	/* not appended yet: the next range may continue it */
};

static int append(struct collection *to, const struct rf_area *area)
{
	struct rf_areas *spare;

	if (grow(&to->list->spare, header(to->list->spare->count + 1ull)) < 0)
		return -ENOMEM;
	spare = to->list->spare;
	spare->areas[spare->count++] = *area;
	spare->used = header(spare->count);
	return 0;
}

/* Page by page, as the bytes of some may be refused. */
static int append_copies(struct collection *to, struct rf_area area)
{
	const size_t page_size = to->tracker->kernel->page_size;
	const uintptr_t end = area.end;
	int rc = 0;

	for (; rc >= 0 && area.start < end; area.start = area.end) {
		area.end = area.start + page_size;
		rc = append(to, &area);
	}
	return rc;
}

/* The end of its first part with one protection; nothing, where nothing is mapped. */
static uintptr_t ask_protection(struct collection *to, struct rf_area *area)
{
	uintptr_t stop = area->end;
	struct rf_vma vma;
	int rc;

	area->protection = PROT_READ | PROT_WRITE;
	if (!to->open)
		return stop;
	rc = rf_vma_part(&to->tracker->reader, area->start, area->end, &vma, &stop);
	if (rc > 0)
		area->protection = vma.protection;
	if (!rc)
		area->finds = RF_FINDS_NOTHING;
	return stop;
}

/* The child maps pages as the parent's mappings are: their protection is asked here. */
static int append_mapped(struct collection *to, struct rf_area area)
{
	const uintptr_t end = area.end;
	const uint8_t finds = area.finds;
	int rc = 0;

	to->mapped_anew = true;
	if (!to->open)
		to->open = rf_vma_open(&to->tracker->reader) >= 0;
	for (; rc >= 0 && area.start < end; area.start = area.end) {
		area.end = end;
		area.finds = finds;
		area.end = ask_protection(to, &area);
		rc = area.finds == RF_FINDS_COPY ? append_copies(to, area) : append(to, &area);
	}
	return rc;
}

static int flush(struct collection *to)
{
	const struct rf_area *last = &to->last;

	if (last->start == last->end)
		return 0;
	if (last->finds == RF_FINDS_NOTHING || last->mark == RF_MARK_WIPEONFORK)
		return append(to, last);
	return append_mapped(to, *last);
}

static int collect_area(struct collection *to, const struct rf_area *area)
{
	struct rf_area *last = &to->last;
	int rc;

	if (last->end == area->start && last->finds == area->finds && last->mark == area->mark &&
	    last->doubt == area->doubt) {
		last->end = area->end;
		return 0;
	}
	rc = flush(to);
	*last = *area;
	return rc;
}

/* A child lacks pages that wait to be unmarked, if one registration had filled them. */
static uint8_t finds_on(const struct rf_range *range)
{
	if (!rf_range_is_counted(range) && range->flags & RF_RANGE_RETRY &&
	    !(range->flags & RF_RANGE_PARTIAL))
		return RF_FINDS_NOTHING;
	return (uint8_t)rf_range_finds(range);
}

/* [@start, @end) is about to be marked. */
static int collect(struct collection *to, uintptr_t start, uintptr_t end)
{
	const struct rf_ranges *ranges = &to->tracker->ranges;
	struct rf_cursor cursor = rf_ranges_seek(ranges, 0);
	const struct rf_range *range = rf_ranges_at(cursor);
	int rc = 0;

	for (; rc >= 0 && range; range = rf_ranges_next(ranges, &cursor)) {
		struct rf_area area = {
			.start = range->start,
			.end = range->end,
			.finds = finds_on(range),
			.mark = range->mark,
			.doubt = range->flags & RF_RANGE_DOUBT,
		};

		if (!area.mark) {
			area.start = area.start < start ? start : area.start;
			area.end = area.end > end ? end : area.end;
			area.mark = RF_MARK_DONTFORK;
			if (area.start >= area.end || !rf_range_wants_mark(range))
				continue;
		}
		/* Reserved addresses are not told of, and long areas of them are better. */
		area.doubt &= area.finds != RF_FINDS_NOTHING;
		rc = collect_area(to, &area);
	}
	return rc < 0 ? rc : flush(to);
}

/* ---- Their bytes ---- */

/* Stretches of areas [first, end) that are read by one call. */
struct batch {
	uint32_t first, end;
	unsigned int count;
	size_t nbytes;
	struct iovec *from;
};

static bool is_copy(const struct rf_area *area)
{
	return area->finds == RF_FINDS_COPY && area->at;
}

/*
 * By system calls: memory that is not held may be unmapped by now. Inaccessible memory is saved
 * too, as a program may open it when it is touched.
 */
static bool read_bytes(char *at, size_t nbytes, const struct iovec *from, unsigned int count)
{
	const struct iovec to = { at, nbytes };

	return rf_sys_copy_readable(&to, from, count) == (ssize_t)nbytes ||
	       rf_sys_copy_inaccessible(&to, from, count) == (ssize_t)nbytes;
}

static bool read_one(struct rf_areas *areas, const struct rf_area *area)
{
	const struct iovec from = { (void *)area->start, area->end - area->start };

	return read_bytes((char *)areas + area->at, from.iov_len, &from, 1);
}

static void read_batch(struct rf_areas *areas, struct batch *batch)
{
	struct rf_area *area = areas->areas + batch->first;
	const struct rf_area *last = areas->areas + batch->end;

	if (!batch->count)
		return;
	while (!is_copy(area))
		area++;
	if (read_bytes((char *)areas + area->at, batch->nbytes, batch->from, batch->count))
		return;
	for (; area < last; area++)
		if (is_copy(area) && !read_one(areas, area))
			area->at = 0;
}

static void read_all(struct rf_child_list *list)
{
	struct rf_areas *areas = list->spare;
	struct batch batch = { .from = list->from };
	struct iovec *last = NULL;
	uint32_t i;

	for (i = 0; i < areas->count; i++) {
		const struct rf_area *area = &areas->areas[i];
		const size_t nbytes = area->end - area->start;

		if (!is_copy(area))
			continue;
		if (last && (uintptr_t)last->iov_base + last->iov_len == area->start) {
			last->iov_len += nbytes;
			batch.nbytes += nbytes;
			continue;
		}
		if (batch.count == RF_LIST_BATCH) {
			batch.end = i;
			read_batch(areas, &batch);
			batch = (struct batch){ .first = i, .from = list->from };
		}
		last = &batch.from[batch.count++];
		*last = (struct iovec){ (void *)area->start, nbytes };
		batch.nbytes += nbytes;
	}
	batch.end = areas->count;
	read_batch(areas, &batch);
}

/* Huge pages that the bytes fill, so no more memory is taken. A refusal costs only time. */
static void want_huge_pages(const struct rf_areas *areas)
{
	const uintptr_t start = (uintptr_t)areas + areas->bytes_at;
	const uintptr_t end = ((uintptr_t)areas + areas->used) & ~(uintptr_t)(HUGE - 1);

	if (areas->used - areas->bytes_at >= HUGE)
		(void)rf_sys_madvise(start, end - start, MADV_HUGEPAGE);
}

static uint64_t count_bytes(const struct rf_areas *areas)
{
	uint64_t nbytes = 0;
	uint32_t i;

	for (i = 0; i < areas->count; i++)
		if (areas->areas[i].finds == RF_FINDS_COPY)
			nbytes += areas->areas[i].end - areas->areas[i].start;
	return nbytes;
}

/* Give each copy its place among the bytes, which begin at @at. */
static void place_bytes(struct rf_areas *areas, size_t at)
{
	uint32_t i;

	areas->bytes_at = at;
	for (i = 0; i < areas->count; i++) {
		struct rf_area *area = &areas->areas[i];

		if (area->finds != RF_FINDS_COPY)
			continue;
		area->at = at;
		at += area->end - area->start;
	}
	areas->used = at;
}

static int save_bytes(struct rf_child_list *list)
{
	const uint64_t nbytes = count_bytes(list->spare);
	const size_t begin = header(list->spare->count);
	uintptr_t at;

	if (grow(&list->spare, begin + room_for_bytes(nbytes)) < 0)
		return -ENOMEM;
	at = (uintptr_t)list->spare + begin;
	if (nbytes >= HUGE)
		at = (at + HUGE - 1) & ~(uintptr_t)(HUGE - 1);
	place_bytes(list->spare, at - (uintptr_t)list->spare);
	want_huge_pages(list->spare);
	read_all(list);
	return 0;
}

/* ---- Reserved addresses ---- */

static bool may_be_reserved(const struct rf_area *area)
{
	return area->finds == RF_FINDS_NOTHING || (area->finds == RF_FINDS_COPY && !area->at);
}

static void choose_reserved(struct rf_areas *areas)
{
	uint32_t i, taken = 0;
	size_t round;

	for (round = 0; round < ROUNDS && taken < RF_RESERVED; round++) {
		for (i = 0; i < areas->count && taken < RF_RESERVED; i++) {
			struct rf_area *area = &areas->areas[i];

			if (area->reserved || !may_be_reserved(area) ||
			    area->end - area->start < shortest[round])
				continue;
			area->reserved = true;
			taken++;
		}
	}
}

/* ---- All of it ---- */

static int fill_spare(struct rf_child_list *list, struct rf_tracker *tracker, uintptr_t start,
		      uintptr_t end, bool *mapped_anew)
{
	struct collection to = { .list = list, .tracker = tracker };
	int rc;

	/* Both, as they change places. */
	if (grow(&list->spare, header(0)) < 0 || grow(&list->shown, header(0)) < 0)
		return -ENOMEM;
	list->spare->count = 0;
	list->spare->early = start < end;
	list->spare->used = header(0);
	rc = collect(&to, start, end);
	*mapped_anew = to.mapped_anew;
	if (to.open)
		rf_vma_close(&tracker->reader);
	if (rc >= 0)
		rc = save_bytes(list);
	if (rc >= 0)
		choose_reserved(list->spare);
	return rc;
}

/* Has a fork taken more room than registrations reserve? Smaller lists keep theirs. */
static bool has_much_room(const struct rf_child_list *list)
{
	return list->shown && list->shown->mapped + list->spare->mapped > 4 * RF_LIST_ROOM;
}

int rf_child_list_make(struct rf_child_list *list, struct rf_tracker *tracker, uintptr_t start,
		       uintptr_t end)
{
	const struct rf_ranges *ranges = &tracker->ranges;
	struct rf_areas *shown;
	bool mapped_anew;
	int rc;

	if (start >= end && !list->mapped_anew && list->version == ranges->version)
		return 0;
	if (start >= end && !ranges->marked_bytes) {
		if (has_much_room(list))
			rf_child_list_clear(list);
		if (!list->shown || !list->shown->count) {
			list->version = ranges->version;
			return 0;
		}
	}
	rc = fill_spare(list, tracker, start, end, &mapped_anew);
	if (rf_unlikely(rc < 0)) {
		/*
		 * The list on show stays: a fork under way may have been prepared with it, and it
		 * names each mark that a child must make its own.
		 */
		list->version = UINT64_MAX;
		return rc;
	}
	shown = list->shown;
	list->version = ranges->version;
	__atomic_store_n(&list->mapped_anew, mapped_anew, __ATOMIC_RELAXED);
	__atomic_store_n(&list->shown, list->spare, __ATOMIC_RELEASE);
	list->spare = shown;
	return 0;
}

/* ---- In a child ---- */

#define UNSANITIZED __attribute__((no_sanitize("address", "thread", "undefined")))

/* A sanitizer takes memcpy() for the program's own, which may not write there. */
UNSANITIZED static void store(uintptr_t to, const char *from, size_t nbytes)
{
	volatile uint64_t *words = (volatile uint64_t *)to;
	uint64_t word;

	for (; nbytes; nbytes -= sizeof(word), from += sizeof(word)) {
		__builtin_memcpy(&word, from, sizeof(word));
		*words++ = word;
	}
}

/* Map zeros on those pages of [@start, @end) that are absent. The first error. */
static int map_zeros(uintptr_t start, uintptr_t end, int protection, size_t page_size)
{
	int rc = rf_sys_map_at(start, end - start, protection), other;
	uintptr_t middle;

	if (rc != -EEXIST || end - start <= page_size ||
	    rf_sys_is_mapped(start, end - start) > 0)
		return rc;
	middle = start + (end - start) / page_size / 2 * page_size;
	rc = map_zeros(start, middle, protection, page_size);
	other = map_zeros(middle, end, protection, page_size);
	return rc < 0 ? rc : other;
}

static void note(struct rf_child_list *list, const struct rf_refused *refused)
{
	if (!list->refused.error)
		list->refused = *refused;
}

/* Mapped pages are an error only if they should be the registered ones, and those still are. */
static void note_refused(struct rf_child_list *list, const struct rf_area *area, int error,
			 enum rf_child_of how)
{
	const struct rf_refused refused = { area->start, area->end, area->finds, false, error };

	if (error >= 0 || (error == -EEXIST && (area->doubt || how != RF_CHILD_AS_PREPARED)))
		return;
	if (error != -EEXIST)
		(void)rf_sys_map_at(area->start, area->end - area->start, PROT_NONE);
	note(list, &refused);
}

/* The bytes are the child's, which may be refused what its parent may do: see PR_SET_MDWE. */
static void protect(struct rf_child_list *list, const struct rf_area *area, uintptr_t end)
{
	struct rf_refused refused = { area->start, end, area->finds, true, 0 };

	if (area->protection == (PROT_READ | PROT_WRITE))
		return;
	refused.error = rf_sys_protect(area->start, end - area->start, area->protection);
	if (refused.error < 0)
		note(list, &refused);
}

/* The areas [@first, @last) touch each other and have one protection. */
static void give_back(struct rf_child_list *list, const struct rf_area *first,
		      const struct rf_area *last, enum rf_child_of how)
{
	const uintptr_t start = first->start, nbytes = last[-1].end - start;
	int rc = rf_sys_map_at(start, nbytes, PROT_READ | PROT_WRITE);

	if (rc >= 0) {
		if (nbytes >= HUGE)
			(void)rf_sys_madvise(start, nbytes, MADV_HUGEPAGE);
		store(start, (const char *)list->shown + first->at, nbytes);
		protect(list, first, start + nbytes);
	} else if (last - first > 1) {
		/* Some of them may be mapped: try each by itself. */
		for (; first < last; first++)
			give_back(list, first, first + 1, how);
	} else {
		note_refused(list, first, rc, how);
	}
}

/* The end of those areas that are given back together with @area. */
static struct rf_area *end_of_run(struct rf_area *area, const struct rf_area *last)
{
	struct rf_area *next = area + 1;

	while (next < last && is_copy(next) && next->start == next[-1].end &&
	       next->at == next[-1].at + (next[-1].end - next[-1].start) &&
	       next->protection == area->protection)
		next++;
	return next;
}

static bool is_wiped(const struct rf_area *area)
{
	return area->mark == RF_MARK_WIPEONFORK;
}

/* Another thread's fork may have been marking pages as this child was made. */
static bool may_be_wiped(const struct rf_areas *areas, const struct rf_area *area)
{
	return is_wiped(area) || (areas->early && area->finds == RF_FINDS_ZEROS);
}

/* Areas that touch go in one call, which needs no split at the limit of VMAs. Was any refused? */
static bool keep_wiped(const struct rf_areas *areas)
{
	const struct rf_area *area = areas->areas, *last = area + areas->count;
	bool refused = false;
	uintptr_t start;

	for (; area < last; area++) {
		if (!may_be_wiped(areas, area))
			continue;
		start = area->start;
		while (area + 1 < last && may_be_wiped(areas, area + 1) &&
		       area[1].start == area->end)
			area++;
		refused |= rf_sys_madvise(start, area->end - start, MADV_KEEPONFORK) < 0;
	}
	return refused;
}

static void map_all(struct rf_child_list *list, enum rf_child_of how)
{
	struct rf_area *area = list->shown->areas, *last = area + list->shown->count, *next;
	const size_t page_size = rf_sys_page_size();

	for (; area < last; area = next) {
		next = area + 1;
		if (is_wiped(area))
			continue;
		if (area->finds == RF_FINDS_ZEROS) {
			note_refused(list, area,
				     map_zeros(area->start, area->end, area->protection, page_size),
				     how);
		} else if (is_copy(area) && how >= RF_CHILD_PREPARED) {
			next = end_of_run(area, last);
			give_back(list, area, next, how);
		}
	}
}

static void reserve_all(struct rf_areas *areas, enum rf_child_of how)
{
	struct rf_area *area = areas->areas, *last = area + areas->count;
	bool reserved;

	for (; area < last; area++) {
		if (is_wiped(area) ||
		    !(area->reserved || (is_copy(area) && how < RF_CHILD_PREPARED)))
			continue;
		reserved = rf_sys_map_at(area->start, area->end - area->start, PROT_NONE) >= 0;
		if (reserved != area->reserved)
			area->reserved = reserved;
	}
}

void rf_child_list_apply(struct rf_child_list *list, enum rf_child_of how)
{
	struct rf_areas *areas = list->shown;

	list->refused.error = 0;
	if (!areas || !areas->count)
		return;
	/* First, while VMAs are left. The second pass may use VMAs that the first has freed. */
	if (keep_wiped(areas))
		(void)keep_wiped(areas);
	/* Nothing is written that does not change: the child would copy the page. */
	if (areas->cloned != (how == RF_CHILD_OF_CLONE))
		areas->cloned = how == RF_CHILD_OF_CLONE;
	if (areas->cloned)
		return;
	/* Content first: the kernel may have too few VMAs for both. */
	map_all(list, how);
	reserve_all(areas, how);
}

/* ---- Memory ---- */

static void trim(struct rf_areas *areas)
{
	const size_t mask = rf_sys_page_size() - 1;
	const size_t at = areas ? (areas->bytes_at + mask) & ~mask : 0;

	if (areas && areas->used > at + TRIMMED)
		(void)rf_sys_madvise((uintptr_t)areas + at, areas->mapped - at, MADV_DONTNEED);
}

void rf_child_list_trim(struct rf_child_list *list)
{
	if (rf_likely(!list->mapped_anew))
		return;
	trim(list->shown);
	trim(list->spare);
}

uint64_t rf_child_list_bytes(const struct rf_child_list *list)
{
	return (list->shown ? list->shown->used : 0) + (list->spare ? list->spare->used : 0);
}

static bool has_absent(const struct rf_areas *areas)
{
	uint32_t i;

	for (i = 0; i < areas->count; i++)
		if (may_be_reserved(&areas->areas[i]))
			return true;
	return false;
}

struct rf_areas *rf_child_list_take(struct rf_child_list *list)
{
	const size_t mask = rf_sys_page_size() - 1;
	struct rf_areas *areas = list->shown;
	size_t needed;

	if (!areas || !has_absent(areas))
		return NULL;
	if (list->spare == areas)
		list->spare = NULL;
	__atomic_store_n(&list->shown, NULL, __ATOMIC_RELEASE);
	needed = (header(areas->count) + mask) & ~mask;
	if (needed < areas->used &&
	    rf_sys_unmap((char *)areas + needed, areas->mapped - needed) >= 0)
		areas->mapped = needed;
	return areas;
}

void rf_child_list_clear(struct rf_child_list *list)
{
	struct rf_areas *shown = list->shown;

	__atomic_store_n(&list->shown, NULL, __ATOMIC_RELEASE);
	/* In a child that was made as they changed places, both are one. */
	if (list->spare == shown)
		list->spare = NULL;
	list->version = UINT64_MAX;
	__atomic_store_n(&list->mapped_anew, false, __ATOMIC_RELAXED);
	list->room = 0;
	list->room_bytes = 0;
	if (shown)
		rf_sys_unmap(shown, shown->mapped);
	/* A small one is of use yet, and a system call takes a child longer than the pages. */
	if (list->spare && list->spare->mapped > FIRST_BYTES) {
		rf_sys_unmap(list->spare, list->spare->mapped);
		list->spare = NULL;
	}
}
