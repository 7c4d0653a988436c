/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The list of pages kept from a child, and of their replacements: made as a fork is prepared,
 * applied once in the child, before the child maps anything.
 *
 *	pages       |----------------|----------------|----------------|
 *	registered        [=====RF_OMIT=====================]
 *	counted           a copy           nothing          a copy
 *	the list    [ copy, bytes    ][ nothing        ][ copy, bytes    ]
 *
 *	finds	    mark	     in the child
 *	nothing	    MADV_DONTFORK    the addresses are reserved, inaccessible, so that nothing
 *				     else is mapped there: the longest RF_RESERVED of them
 *	zeros	    MADV_WIPEONFORK  zeros by then; MADV_KEEPONFORK, as they are its own now
 *	zeros	    MADV_DONTFORK    zeros are mapped, with the protection the parent's have
 *	a copy	    MADV_DONTFORK    the page's bytes, as the fork found them; the same
 *
 * A child may be made while another thread is in the middle of any change, that of
 * another fork's list too. So a list is written where no child looks, and then shown by
 * one store. Bytes are as they were when the fork was prepared: a thread that writes
 * there before the child is made writes for the parent alone.
 *
 * Nothing is mapped over another mapping: a registration that ends while a fork is
 * under way leaves its pages to the child, and a library that was loaded earlier may have
 * mapped something in its child handler. The child is told of the latter.
 *
 * No locks: the engine's lock is held, but in a child.
 */
#ifndef RF_CHILD_LIST_H
#define RF_CHILD_LIST_H

#include "tracker.h"

/* About a microsecond each, so their number has a limit. */
#define RF_RESERVED 1024

struct rf_area {
	uintptr_t start, end;
	size_t at;		/* where its bytes are in the list; 0: none were saved */
	uint8_t finds;		/* enum rf_finds */
	uint8_t mark;		/* enum rf_mark */
	uint8_t protection;	/* PROT_READ ... of the parent's */
	bool doubt;		/* other memory may be mapped there now: the child has that */
	bool reserved;		/* to be reserved; after rf_child_list_apply(): it is */
};

struct rf_areas {
	size_t mapped;
	size_t bytes_at, used;
	uint32_t count;
	bool early;		/* made before the marks: areas of zeros may bear theirs later */
	bool cloned;		/* in a child: nothing was reserved */
	struct rf_area areas[];
};

/* Pages whose zeros or bytes could not be mapped, or not with their parent's protection. */
struct rf_refused {
	uintptr_t start, end;
	uint8_t finds;
	bool mapped;		/* with another protection: the child can read and write */
	int error;		/* 0: there is none; -EEXIST: something is mapped there */
};

/* Stretches of memory that one system call reads. */
#define RF_LIST_BATCH 64

struct rf_child_list {
	struct rf_areas *shown, *spare;	/* or NULL */
	uint64_t room, room_bytes;	/* areas and bytes there is room for in both */
	uint64_t version;		/* of the ranges that are shown */
	bool mapped_anew;		/* a child maps some area: made at each fork; atomic */
	struct iovec from[RF_LIST_BATCH]; /* not on the stack, which may be a signal handler's */
	struct rf_refused refused; /* in a child: the first there was */
};

/* Registrations take room for so many bytes in advance; a fork takes the rest. */
#define RF_LIST_ROOM ((uint64_t)64 << 20)

/* The rest of rf_child_list_reserve(), where there is less. */
int rf_child_list_grow(struct rf_child_list *list, uint64_t areas, uint64_t nbytes);

/*
 * Make room for @areas and @nbytes, so that a fork finds it. -ENOMEM: nothing has changed.
 * Where many registrations share huge pages, @nbytes is far more than a fork will save:
 * beyond RF_LIST_ROOM the fork takes the room itself, when it knows how much it needs.
 */
static inline int rf_child_list_reserve(struct rf_child_list *list, uint64_t areas,
					uint64_t nbytes)
{
	if (rf_likely(list->room >= areas && list->room_bytes >= nbytes))
		return 0;
	return rf_child_list_grow(list, areas, nbytes);
}

/*
 * Show the list to children made from now on. [@start, @end) is about to be marked as well.
 * Pages whose bytes cannot be read are reserved instead. -ENOMEM: children see the list that was
 * shown before.
 */
int rf_child_list_make(struct rf_child_list *list, struct rf_tracker *tracker, uintptr_t start,
		       uintptr_t end);

/* How much of the list is of use to a child. */
enum rf_child_of {
	RF_CHILD_OF_CLONE,	/* no handler saw the fork: marks become its own */
	RF_CHILD_UNPREPARED,	/* the list is of an earlier fork: no bytes, either */
	RF_CHILD_PREPARED,
	RF_CHILD_AS_PREPARED,	/* nothing was released since: each area is missing */
};

/* The child lacks an area that the kernel refuses to map; @list->refused names the first one. */
void rf_child_list_apply(struct rf_child_list *list, enum rf_child_of how);

/* No fork is under way: give back the memory of many saved bytes. */
void rf_child_list_trim(struct rf_child_list *list);

/* Bytes of the lists' memory that have been written to. */
uint64_t rf_child_list_bytes(const struct rf_child_list *list);

/*
 * In a child: take the areas out of the list, without the bytes. The caller unmaps them.
 * NULL: the child lacks no page.
 */
struct rf_areas *rf_child_list_take(struct rf_child_list *list);

/* Show nothing, and give the memory back, but for a little. */
void rf_child_list_clear(struct rf_child_list *list);

#endif
