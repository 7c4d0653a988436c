/* SPDX-License-Identifier: BSD-3-Clause */
/*
 * One line of JSON, into memory that is there, without malloc(). A value that does not fit
 * makes it full, and ends it: it is JSON unless it is full.
 */
#ifndef RF_JSON_H
#define RF_JSON_H

#include <stddef.h>
#include <stdint.h>

#define RF_JSON_STRING 4096u	/* bytes of one; it is cut after them */

struct rf_json {
	char *text;
	size_t used, limit;
	int first;	/* of its object or list: no comma before it */
	int full;
};

void rf_json_begin(struct rf_json *json, void *memory, size_t nbytes);

/* @bracket is { or [, closed by } or ]. @name is NULL in a list. */
void rf_json_open(struct rf_json *json, const char *name, char bracket);
void rf_json_close(struct rf_json *json, char bracket);
void rf_json_number(struct rf_json *json, const char *name, uint64_t value);
/* @value NULL is null. Bytes that are not UTF-8 are as Python's surrogateescape has them. */
void rf_json_string(struct rf_json *json, const char *name, const char *value);
/* Append @text unchanged. */
void rf_json_raw(struct rf_json *json, const char *text);

#endif
