/* SPDX-License-Identifier: BSD-3-Clause */
/* The writer's output is JSON, and reads as the values given: any names, any bytes. */
#include "check.h"
#include "fuzz.h"
#include "preload/json.h"

#define DEPTH 8
#define LONGEST 80

static char text[1 << 16];
static const char *at;

/* ---- A reader as strict as RFC 8259 ---- */

static void expect(const char *bytes)
{
	CHECK(!strncmp(at, bytes, strlen(bytes)), "at %ld of %s", (long)(at - text), text);
	at += strlen(bytes);
}

static unsigned int read_escape(void)
{
	unsigned int code, used;

	CHECK(sscanf(at, "\\u%4x%n", &code, (int *)&used) == 1 && used == 6);
	at += used;
	return code;
}

/* As many bytes of UTF-8 as the decoder of RFC 3629 takes. */
static size_t character_length(const unsigned char *c)
{
	size_t length = 1 + (*c >= 0x80) + (*c >= 0xe0) + (*c >= 0xf0), i;
	unsigned int code = length == 1 ? *c : *c & (0xff >> (length + 1));
	static const unsigned int least[] = { 0, 0, 0x80, 0x800, 0x10000 };

	CHECK(*c < 0x80 || *c >= 0xc0);
	for (i = 1; i < length; i++) {
		CHECK((c[i] & 0xc0) == 0x80);
		code = code << 6 | (c[i] & 0x3f);
	}
	CHECK(code >= least[length] && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff));
	return length;
}

/* A string, as surrogateescape has bytes that are no UTF-8. */
static void expect_string(const char *value)
{
	const char *begin = value;
	size_t length;

	expect("\"");
	while (*at != '"') {
		CHECK((unsigned char)*at >= 0x20);
		if (*at == '\\') {
			unsigned int code = read_escape();

			CHECK(code < 0x80 || (code >= 0xdc80 && code <= 0xdcff), "%x", code);
			CHECK((unsigned char)*value == (code & 0xff));
			value++;
			continue;
		}
		length = character_length((const unsigned char *)at);
		CHECK(!strncmp(at, value, length));
		at += length;
		value += length;
	}
	CHECK(!*value || value - begin > (long)RF_JSON_STRING - 4, "cut short");
	CHECK(value - begin <= (long)RF_JSON_STRING, "not cut");
	expect("\"");
}

/* ---- Values, written and then read ---- */

struct item {
	char kind;		/* { [ } ] s n, or 0 for null */
	char name[LONGEST], value[LONGEST];
	uint64_t number;
};

static struct item items[256];
static size_t item_count;

static void choose_text(char *out)
{
	size_t length = check_below(check_below(4) ? 8 : LONGEST), i;

	for (i = 0; i < length; i++)
		out[i] = (char)(1 + check_below(255));
	out[length] = '\0';
}

static void choose_items(void)
{
	static const char kinds[] = { '{', '[', 's', 'n', 0, 's' };
	char open[DEPTH] = { '{' };
	size_t depth = 1;

	items[0].kind = '{';
	for (item_count = 1; depth && item_count < COUNT_OF(items); item_count++) {
		struct item *item = &items[item_count];
		size_t wish = check_below(COUNT_OF(kinds) + 2);

		item->kind = open[depth - 1] == '{' ? '}' : ']';
		if (wish >= COUNT_OF(kinds) || item_count >= COUNT_OF(items) - DEPTH ||
		    check_played()) {
			depth--;
			continue;
		}
		if (wish < 2 && depth == DEPTH)
			wish = 2;
		item->kind = kinds[wish];
		choose_text(item->name);
		choose_text(item->value);
		item->number = check_below(SIZE_MAX);
		if (wish < 2)
			open[depth++] = item->kind;
	}
}

static void write_items(struct rf_json *json)
{
	char open[DEPTH + 1] = { '[' };
	size_t depth = 0, i;

	for (i = 0; i < item_count; i++) {
		const struct item *item = &items[i];
		const char *name = i && open[depth] == '{' ? item->name : NULL;

		if (item->kind == '{' || item->kind == '[') {
			rf_json_open(json, name, item->kind);
			open[++depth] = item->kind;
		} else if (item->kind == '}' || item->kind == ']') {
			rf_json_close(json, item->kind);
			depth--;
		} else if (item->kind == 'n') {
			rf_json_number(json, name, item->number);
		} else {
			rf_json_string(json, name, item->kind ? item->value : NULL);
		}
	}
}

static void expect_items(void)
{
	char open[DEPTH + 1] = { '[' }, digits[32];
	bool first[DEPTH + 1] = { true };
	size_t depth = 0, i;

	for (i = 0; i < item_count; i++) {
		const struct item *item = &items[i];

		if (item->kind == '}' || item->kind == ']') {
			expect(item->kind == '}' ? "}" : "]");
			depth--;
			continue;
		}
		if (!first[depth])
			expect(", ");
		first[depth] = false;
		if (i && open[depth] == '{') {
			expect_string(item->name);
			expect(": ");
		}
		if (item->kind == '{' || item->kind == '[') {
			expect(item->kind == '{' ? "{" : "[");
			open[++depth] = item->kind;
			first[depth] = true;
		} else if (item->kind == 'n') {
			snprintf(digits, sizeof(digits), "%llu", (unsigned long long)item->number);
			expect(digits);
		} else if (item->kind) {
			expect_string(item->value);
		} else {
			expect("null");
		}
	}
	CHECK(!*at);
}

/* A text over and over again, about as long as a string may be. */
static void check_long_string(void)
{
	static char value[RF_JSON_STRING + 2 * LONGEST];
	struct rf_json json;
	char piece[LONGEST];
	size_t length, i;

	choose_text(piece);
	length = strlen(piece);
	for (i = 0; length && i < RF_JSON_STRING + length; i += length)
		memcpy(value + i, piece, length);
	value[length ? RF_JSON_STRING - LONGEST + check_below(2 * LONGEST) : 0] = '\0';
	rf_json_begin(&json, text, sizeof(text) - 1);
	rf_json_string(&json, NULL, value);
	CHECK(!json.full);
	text[json.used] = '\0';
	at = text;
	expect_string(value);
	CHECK(!*at);
}

int LLVMFuzzerTestOneInput(const uint8_t *input, size_t nbytes)
{
	struct rf_json json;
	char *small;
	size_t limit, whole;

	check_play(input, nbytes);
	limit = check_below(512);
	choose_items();
	rf_json_begin(&json, text, sizeof(text) - 1);
	write_items(&json);
	CHECK(!json.full);
	text[json.used] = '\0';
	at = text;
	expect_items();
	/* Where it does not fit, it says so, and has written the beginning. */
	whole = json.used;
	small = malloc(limit + 1);
	rf_json_begin(&json, small, limit);
	write_items(&json);
	CHECK(json.used <= limit && !json.full == (whole <= limit));
	CHECK(!memcmp(small, text, json.used) && (json.full || json.used == whole));
	free(small);
	check_long_string();
	return 0;
}
