/* SPDX-License-Identifier: BSD-3-Clause */
/* The list of ranges against its model, as the bytes of an input say. */
#include "check.h"
#include "fuzz.h"
#include "ranges_model.h"

/* Dense, anywhere, alone, or as long as all of it. */
static struct interval choose(void)
{
	size_t shape = check_below(4), start, length;

	if (shape == 0) {
		start = check_below(48);
		length = 1 + check_below(16);
	} else if (shape == 1) {
		start = check_below(model_pages);
		length = 1 + check_below(4);
	} else if (shape == 2) {
		start = 2 * check_below(model_pages / 2);
		length = 1;
	} else {
		start = check_below(model_pages);
		length = 1 + check_below(model_pages - start);
	}
	if (length > model_pages - start)
		length = model_pages - start;
	return (struct interval){ start, start + length };
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t nbytes)
{
	unsigned int step;

	check_play(input, nbytes);
	model_begin(MODEL_FEW);
	for (step = 1; !check_played(); step++) {
		model_step(choose());
		if (step % 8 == 0)
			model_compare();
	}
	model_compare();
	model_end();
	return 0;
}
