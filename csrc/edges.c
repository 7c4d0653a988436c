/* SPDX-License-Identifier: BSD-3-Clause */
#include "edges.h"

#include <errno.h>
#include <string.h>

#define BATCH 64

static uintptr_t down(const struct rf_edges *edges, uintptr_t address)
{
	return address & ~(edges->page_size - 1);
}

static uintptr_t up(const struct rf_edges *edges, uintptr_t address)
{
	return down(edges, address + edges->page_size - 1);
}

void rf_edges_start(struct rf_edges *edges, size_t page_size)
{
	char from = 1, to = 0;
	struct iovec source = { &from, 1 }, target = { &to, 1 };

	edges->page_size = page_size;
	edges->forbidden = rf_sys_copy(&target, &source, 1) != 1;
}

static size_t header(uint64_t pieces)
{
	return sizeof(struct rf_snapshot) + pieces * sizeof(struct rf_piece);
}

/* A larger one with the same content takes its place, in one store. */
static int grow(struct rf_snapshot **snapshot, size_t needed)
{
	struct rf_snapshot *old = *snapshot, *larger;
	size_t mapped = old ? old->mapped : 64 * (size_t)1024;
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
	__atomic_store_n(snapshot, larger, __ATOMIC_RELEASE);
	if (old)
		rf_sys_unmap(old, old->mapped);
	return 0;
}

int rf_edges_reserve(struct rf_edges *edges, uint64_t gaps, uint64_t nbytes)
{
	/* A registration that begins or ends in a gap cuts it in two, each page begins anew. */
	size_t needed = header(2 * gaps + nbytes / edges->page_size) + nbytes;

	return grow(&edges->spare, needed) < 0 || grow(&edges->shown, needed) < 0 ? -ENOMEM : 0;
}

/*
 * Has nobody who takes the page of @at registered that byte? *@stop comes down to where
 * the answer may change.
 */
static bool is_nobodys(const struct rf_leaving *leaving, uintptr_t at, uintptr_t *stop)
{
	const struct rf_range *page, *gap;
	uintptr_t end;

	page = rf_ranges_at(leaving->pages, rf_ranges_seek(leaving->pages, at));
	if (!page || page->start > at) {
		*stop = page && page->start < *stop ? page->start : *stop;
		return true;
	}
	*stop = page->end < *stop ? page->end : *stop;
	/* Left over of a huge page. What waits to be unmarked may be unmapped by now. */
	if (!page->count)
		return !(page->flags & RF_RANGE_RETRY);
	gap = rf_ranges_at(leaving->gaps, rf_ranges_seek(leaving->gaps, at));
	if (!gap)
		return false;
	end = gap->start > at ? gap->start : gap->end;
	*stop = end < *stop ? end : *stop;
	return gap->start <= at && gap->count == page->count;
}

/* Do its pages leave, now or before the fork under way makes its child? */
static bool leaves(const struct rf_range *range)
{
	return range->mark || rf_range_wants_mark(range);
}

/* Do the pages at @at leave? *@stop as above. */
static bool is_leaving(const struct rf_leaving *leaving, uintptr_t at, uintptr_t *stop)
{
	const struct rf_range *page;
	uintptr_t end;

	page = rf_ranges_at(leaving->pages, rf_ranges_seek(leaving->pages, at));
	if (!page)
		return false;
	end = page->start > at ? page->start : page->end;
	*stop = end < *stop ? end : *stop;
	return page->start <= at && leaves(page);
}

/* Append to what is being collected in the spare snapshot. */
static int append(struct rf_edges *edges, uintptr_t start, uintptr_t end)
{
	struct rf_snapshot *spare;
	uintptr_t stop;

	/* Page by page: of memory that is not held some may be gone. */
	for (; start < end; start = stop) {
		stop = down(edges, start) + edges->page_size;
		stop = stop < end ? stop : end;
		spare = edges->spare;
		spare->used = header(spare->count);
		if (grow(&edges->spare, header(spare->count + 1)) < 0)
			return -ENOMEM;
		spare = edges->spare;
		spare->pieces[spare->count++] = (struct rf_piece){ start, stop, 0 };
	}
	return 0;
}

/* Append what is nobody's in one range of pages that leave. */
static int collect_range(struct rf_edges *edges, const struct rf_range *range, bool wiped)
{
	uintptr_t at, stop;
	bool nobodys;

	edges->leftovers |= !range->count;
	for (at = range->start; at < range->end; at = stop) {
		stop = range->end;
		nobodys = is_nobodys(&edges->omitted, at, &stop);
		nobodys &= is_nobodys(&edges->wiped, at, &stop);
		if (wiped)
			nobodys &= !is_leaving(&edges->omitted, at, &stop);
		if (nobodys && append(edges, at, stop) < 0)
			return -ENOMEM;
	}
	return 0;
}

static int collect(struct rf_edges *edges, const struct rf_leaving *leaving, bool wiped)
{
	struct rf_cursor cursor = { 0, 0 };
	const struct rf_range *range = rf_ranges_at(leaving->pages, cursor);
	int rc = 0;

	for (; rc >= 0 && range; range = rf_ranges_next(leaving->pages, &cursor))
		if (leaves(range))
			rc = collect_range(edges, range, wiped);
	return rc;
}

/* Not by loads: what is not held may be unmapped or inaccessible by now. */
static int read_pieces(struct rf_snapshot *snapshot, const struct rf_piece *pieces,
		       uint32_t count)
{
	struct iovec to, from[BATCH];
	uint32_t i;

	to.iov_base = (char *)snapshot + pieces->at;
	to.iov_len = 0;
	for (i = 0; i < count; i++) {
		from[i].iov_base = (void *)pieces[i].start;
		from[i].iov_len = pieces[i].end - pieces[i].start;
		to.iov_len += from[i].iov_len;
	}
	return rf_sys_copy(&to, from, count) == (ssize_t)to.iov_len ? 0 : -EFAULT;
}

/* The bytes of [@first, @end) of the pieces. What cannot be read is empty then. */
static void read_batch(struct rf_snapshot *snapshot, uint32_t first, uint32_t end)
{
	if (read_pieces(snapshot, snapshot->pieces + first, end - first) >= 0)
		return;
	for (; first < end; first++)
		if (read_pieces(snapshot, snapshot->pieces + first, 1) < 0)
			snapshot->pieces[first].end = snapshot->pieces[first].start;
}

static void drop_empty(struct rf_snapshot *snapshot)
{
	uint32_t i, kept = 0, absent = 0;

	for (i = 0; i < snapshot->count; i++) {
		if (snapshot->pieces[i].start == snapshot->pieces[i].end)
			continue;
		absent += i < snapshot->absent;
		snapshot->pieces[kept++] = snapshot->pieces[i];
	}
	snapshot->count = kept;
	snapshot->absent = absent;
}

static int read_all(struct rf_edges *edges)
{
	struct rf_snapshot *spare = edges->spare;
	uint32_t i, end;

	spare->used = header(spare->count);
	for (i = 0; i < spare->count; i++) {
		spare->pieces[i].at = spare->used;
		spare->used += spare->pieces[i].end - spare->pieces[i].start;
	}
	if (spare->used > spare->mapped) {
		size_t used = spare->used;

		spare->used = header(spare->count);
		if (grow(&edges->spare, used) < 0)
			return -ENOMEM;
		spare = edges->spare;
		spare->used = used;
	}
	for (i = 0; i < spare->count; i = end) {
		end = i + BATCH < spare->count ? i + BATCH : spare->count;
		read_batch(spare, i, end);
	}
	drop_empty(spare);
	return 0;
}

/* Fill the spare snapshot. -ENOMEM: it is not to be shown. */
static int fill_spare(struct rf_edges *edges)
{
	int rc = rf_edges_reserve(edges, 0, 0);

	if (rc < 0)
		return rc;
	edges->spare->count = 0;
	edges->spare->used = header(0);
	edges->leftovers = false;
	rc = collect(edges, &edges->omitted, false);
	edges->spare->absent = edges->spare->count;
	if (rc >= 0)
		rc = collect(edges, &edges->wiped, true);
	if (rc >= 0)
		rc = read_all(edges);
	edges->leftovers |= rc < 0;
	return rc;
}

/* More than registrations take in advance: twice as much is mapped for each snapshot. */
static bool has_much_room(const struct rf_edges *edges)
{
	return edges->shown && edges->shown->mapped + edges->spare->mapped > 4 * RF_EDGES_ROOM;
}

void rf_edges_save(struct rf_edges *edges)
{
	struct rf_snapshot *shown;

	if (edges->omitted.gaps->count || edges->wiped.gaps->count || edges->leftovers) {
		if (fill_spare(edges) < 0) {
			/* What was saved for an earlier fork is no answer. */
			rf_edges_clear(edges);
			return;
		}
	} else if (has_much_room(edges)) {
		rf_edges_clear(edges);
		return;
	} else if (edges->shown && edges->shown->count) {
		/* The room stays: registrations come again. */
		edges->spare->count = 0;
		edges->spare->absent = 0;
		edges->spare->used = header(0);
	} else {
		return;
	}
	shown = edges->shown;
	__atomic_store_n(&edges->shown, edges->spare, __ATOMIC_RELEASE);
	edges->spare = shown;
}

bool rf_edges_next(const struct rf_edges *edges, uint32_t *at, uintptr_t *start, uintptr_t *end)
{
	const struct rf_snapshot *shown = edges->shown;

	if (!shown || *at >= shown->absent)
		return false;
	*start = down(edges, shown->pieces[*at].start);
	do
		*end = up(edges, shown->pieces[(*at)++].end);
	while (*at < shown->absent && down(edges, shown->pieces[*at].start) <= *end);
	return true;
}

#define UNSANITIZED __attribute__((no_sanitize("address", "thread", "undefined")))

/* Not memcpy(): to a sanitizer that is the program's own, which may not write there. */
UNSANITIZED static void store(uintptr_t to, const char *from, size_t nbytes)
{
	volatile char *bytes = (volatile char *)to;
	volatile uint64_t *words;
	uint64_t word;

	for (; nbytes && (uintptr_t)bytes % sizeof(word); nbytes--)
		*bytes++ = *from++;
	words = (volatile uint64_t *)bytes;
	for (; nbytes >= sizeof(word); nbytes -= sizeof(word), from += sizeof(word)) {
		__builtin_memcpy(&word, from, sizeof(word));
		*words++ = word;
	}
	bytes = (volatile char *)words;
	while (nbytes--)
		*bytes++ = *from++;
}

/* To a page that may be gone, or closed to writers, as it is again when this returns. */
static void copy_to(const struct rf_edges *edges, const struct iovec *to, const struct iovec *from)
{
	const uintptr_t page = down(edges, (uintptr_t)to->iov_base);

	if (rf_sys_copy(to, from, 1) == (ssize_t)to->iov_len ||
	    rf_sys_protect(page, edges->page_size, PROT_READ | PROT_WRITE) < 0)
		return;
	(void)rf_sys_copy(to, from, 1);
	(void)rf_sys_protect(page, edges->page_size, PROT_READ);
}

/* As far as @piece lies in [@start, @end), which is @mapped or may be gone. */
static void put_back(const struct rf_edges *edges, const struct rf_piece *piece,
		     uintptr_t start, uintptr_t end, bool mapped)
{
	struct iovec from, to;

	start = piece->start > start ? piece->start : start;
	end = piece->end < end ? piece->end : end;
	if (start >= end)
		return;
	from.iov_base = (char *)edges->shown + piece->at + (start - piece->start);
	from.iov_len = end - start;
	to.iov_base = (void *)start;
	to.iov_len = end - start;
	if (mapped)
		store(start, from.iov_base, from.iov_len);
	else
		copy_to(edges, &to, &from);
}

/* Pages of which @pieces hold what is to be on them. */
static void restore_pages(const struct rf_edges *edges, const struct rf_piece *first,
			  const struct rf_piece *last, uintptr_t start, uintptr_t end)
{
	const struct rf_piece *piece;
	uintptr_t at;

	if (rf_sys_map_at(start, end - start, RF_READ_WRITE) >= 0) {
		for (piece = first; piece < last; piece++)
			put_back(edges, piece, start, end, true);
		return;
	}
	/* Some are there, as their registration ended while the fork was under way. */
	if (end - start > edges->page_size)
		for (at = start; at < end; at += edges->page_size)
			restore_pages(edges, first, last, at, at + edges->page_size);
}

void rf_edges_restore(const struct rf_edges *edges)
{
	const struct rf_snapshot *shown = edges->shown;
	uint32_t first = 0, at = 0;
	uintptr_t start, end;

	for (; rf_edges_next(edges, &at, &start, &end); first = at)
		restore_pages(edges, shown->pieces + first, shown->pieces + at, start, end);
	for (at = shown ? shown->absent : 0; shown && at < shown->count; at++)
		put_back(edges, &shown->pieces[at], 0, UINTPTR_MAX, false);
}

uint64_t rf_edges_bytes(const struct rf_edges *edges)
{
	return (edges->shown ? edges->shown->used : 0) + (edges->spare ? edges->spare->used : 0);
}

void rf_edges_clear(struct rf_edges *edges)
{
	struct rf_snapshot *shown = edges->shown, *spare = edges->spare;

	__atomic_store_n(&edges->shown, NULL, __ATOMIC_RELEASE);
	edges->spare = NULL;
	if (spare)
		rf_sys_unmap(spare, spare->mapped);
	/* They are the same in a child made as one took the other's place. */
	if (shown && shown != spare)
		rf_sys_unmap(shown, shown->mapped);
}
