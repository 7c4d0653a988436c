/* SPDX-License-Identifier: BSD-3-Clause */
#include "one_engine.h"
#include "sys.h"

#include <errno.h>
#include <string.h>
#include <sys/auxv.h>

/* In the bits that no address has: another's word is not taken for an engine. */
#define ADDRESS 0x0000ffffffffffffull
#define MARK 0x7264000000000000ull

/* NULL: the stack does not end as Linux makes it. */
static uint64_t *word_above(const char *name)
{
	const uintptr_t word = name ? (uintptr_t)name + strlen(name) + 1 : 0;

	return !word || (word + sizeof(uint64_t)) % rf_sys_page_size() ? NULL : (uint64_t *)word;
}

/* A dynamic loader that was called as a program has put its argument's in the vector. */
static const char *name_by_kernel(void)
{
	unsigned long vector[64] = { 0 };
	const int fd = rf_sys_open("/proc/thread-self/auxv", RF_READ);
	size_t i;

	if (fd < 0)
		return NULL;
	(void)rf_sys_read(fd, vector, sizeof(vector));
	rf_sys_close(fd);
	for (i = 0; i + 1 < sizeof(vector) / sizeof(*vector) && vector[i]; i += 2)
		if (vector[i] == AT_EXECFN)
			return (const char *)vector[i + 1];
	return NULL;
}

static uint64_t *find_word(void)
{
	uint64_t *word = word_above((const char *)getauxval(AT_EXECFN));

	return word || getauxval(AT_BASE) ? word : word_above(name_by_kernel());
}

int rf_one_engine_claim(uintptr_t engine, uintptr_t *other)
{
	uint64_t *word = find_word(), found = 0, ours = engine | MARK;

	*other = 0;
	if (!word || __atomic_compare_exchange_n(word, &found, ours, false, __ATOMIC_SEQ_CST,
						 __ATOMIC_SEQ_CST))
		return 0;
	if (found == ours || (found & ~ADDRESS) != MARK)
		return 0;
	*other = (uintptr_t)(found & ADDRESS);
	return -EEXIST;
}
