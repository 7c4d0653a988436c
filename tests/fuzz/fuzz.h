/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * A fuzzer is this function, of one input. libFuzzer calls it with inputs of its own,
 * replay.c with those of tests/fuzz/corpus.
 */
#ifndef FUZZ_H
#define FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t nbytes);

#endif
