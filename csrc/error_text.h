/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * The text of an error: rf_strerror(). C and Python tell it in the same sentences.
 *
 *	struct rf_error		the cause, and the values as they were when the call failed
 *	rf_strerror()		the sentence: only where somebody asks for it
 */
#ifndef RF_ERROR_TEXT_H
#define RF_ERROR_TEXT_H

#include "rdmafork.h"

/* Says in *@error why the kernel's copying is not trusted. */
void rf_error_untrusted(struct rf_error *error);

#endif
