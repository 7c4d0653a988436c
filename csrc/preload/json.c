/* SPDX-License-Identifier: BSD-3-Clause */
#include "json.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

void rf_json_begin(struct rf_json *json, void *memory, size_t nbytes)
{
	json->text = memory;
	json->used = 0;
	json->limit = nbytes;
	json->first = true;
	json->full = false;
}

static void put(struct rf_json *json, const char *bytes, size_t count)
{
	/* Something smaller that comes later is not to fit either. */
	if (count > json->limit - json->used)
		json->full = true;
	if (json->full)
		return;
	memcpy(json->text + json->used, bytes, count);
	json->used += count;
}

void rf_json_raw(struct rf_json *json, const char *text)
{
	put(json, text, strlen(text));
}

/* How many bytes of UTF-8 make the character at @text; 0: they make none. */
static size_t character(const unsigned char *text)
{
	size_t length, i;

	if (text[0] < 0x80)
		return 1;
	length = 2 + (text[0] >= 0xe0) + (text[0] >= 0xf0);
	if (text[0] < 0xc2 || text[0] > 0xf4)
		return 0;
	/* Overlong ones, surrogates, and numbers beyond Unicode. */
	if ((text[0] == 0xe0 && text[1] < 0xa0) || (text[0] == 0xed && text[1] > 0x9f) ||
	    (text[0] == 0xf0 && text[1] < 0x90) || (text[0] == 0xf4 && text[1] > 0x8f))
		return 0;
	for (i = 1; i < length; i++)
		if ((text[i] & 0xc0) != 0x80)
			return 0;
	return length;
}

static void put_escape(struct rf_json *json, unsigned int code)
{
	char escape[16];

	snprintf(escape, sizeof(escape), "\\u%04x", code);
	rf_json_raw(json, escape);
}

static void put_string(struct rf_json *json, const char *value)
{
	const unsigned char *at = (const unsigned char *)value, *end = at + RF_JSON_STRING;
	size_t length;

	put(json, "\"", 1);
	for (; *at; at += length) {
		length = character(at);
		if (at + (length ? length : 1) > end)
			break;
		if (!length) {
			put_escape(json, 0xdc00u + *at);
			length = 1;
		} else if (*at < 0x20 || *at == '"' || *at == '\\') {
			put_escape(json, *at);
		} else {
			put(json, (const char *)at, length);
		}
	}
	put(json, "\"", 1);
}

static void put_name(struct rf_json *json, const char *name)
{
	if (!json->first)
		put(json, ", ", 2);
	json->first = false;
	if (!name)
		return;
	put_string(json, name);
	put(json, ": ", 2);
}

void rf_json_open(struct rf_json *json, const char *name, char bracket)
{
	put_name(json, name);
	put(json, &bracket, 1);
	json->first = true;
}

void rf_json_close(struct rf_json *json, char bracket)
{
	put(json, &bracket, 1);
	json->first = false;
}

void rf_json_number(struct rf_json *json, const char *name, uint64_t value)
{
	char digits[24];

	put_name(json, name);
	snprintf(digits, sizeof(digits), "%llu", (unsigned long long)value);
	rf_json_raw(json, digits);
}

void rf_json_string(struct rf_json *json, const char *name, const char *value)
{
	put_name(json, name);
	if (value)
		put_string(json, value);
	else
		put(json, "null", 4);
}
