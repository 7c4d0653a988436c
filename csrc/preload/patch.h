/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A jump over the entry of a function, for calls that do not go through the GOT.
 *
 *	entry	[endbr64]  cmpq $0, there(%rip)		8 bytes
 *		[endbr64]  jmp *near(%rip), 2 bytes	the same 8
 *	near	the address to go to, within 2 GiB of the entry
 *
 * Only where the first instruction is just this one, as in all range functions of
 * libibverbs there are: then no thread can be in the middle of it, and it is
 * replaced in one step, as it lies within one aligned unit of 16 bytes.
 */
#ifndef RF_PATCH_H
#define RF_PATCH_H

#include <stdbool.h>
#include <stdint.h>

struct rf_patch {
	uintptr_t unit;
	unsigned char before[16], after[16];
};

/*
 * The bytes to write at @entry to go to @to. -ENOTSUP: not on this machine. -ENOEXEC: other
 * code than the above. -ENOMEM: no memory near it.
 */
int rf_patch_plan(struct rf_patch *patch, uintptr_t entry, uintptr_t to);

/* The word that the first instruction of @entry compares with zero; NULL: it is another. */
const uintptr_t *rf_patch_compared(uintptr_t entry);

/* Is there a jump to @to already? */
bool rf_patch_leads(uintptr_t entry, uintptr_t to);

/*
 * Make the code of a patch writable. 0, or mprotect()'s error. All patches are opened before
 * the first is written, so that each can be undone.
 */
int rf_patch_open(const struct rf_patch *patch);
void rf_patch_shut(const struct rf_patch *patch);

/* Write the jump, while the code can be written. -EBUSY: other code has changed it. */
int rf_patch_apply(const struct rf_patch *patch);
void rf_patch_undo(const struct rf_patch *patch);

#endif
