/* SPDX-License-Identifier: MIT */
/* Owns: stdout and stderr: error lines, JSON, colours. */
#include "client/aprctl/ctl.h"
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* One line whatever the words hold. */
static void say(const struct ctl *c, const char *fmt, va_list ap)
{
	char line[1024];

	vsnprintf(line, sizeof(line), fmt, ap);
	for (char *p = line; *p; p++)
		if ((unsigned char)*p < 0x20 || *p == 0x7f)
			*p = ' ';
	fflush(stdout);
	fprintf(stderr, "aprctl: %s%s%s\n", c->verb ? c->verb->name : "", c->verb ? ": " : "", line);
}

int ctl_fail(const struct ctl *c, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	say(c, fmt, ap);
	va_end(ap);
	return CTL_FAIL;
}

void ctl_note(const struct ctl *c, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	say(c, fmt, ap);
	va_end(ap);
}

int ctl_usage(const struct ctl *c, const char *fmt, ...)
{
	va_list ap;
	char line[900];

	va_start(ap, fmt);
	vsnprintf(line, sizeof(line), fmt, ap);
	va_end(ap);
	ctl_fail(c, "%s (aprctl %s%s--help says more)", line, c->verb ? c->verb->name : "", c->verb ? " " : "");
	return CTL_USAGE;
}

int ctl_flush(const struct ctl *c, int status)
{
	if (fflush(stdout) || ferror(stdout))
		return errno == EPIPE ? CTL_FAIL : ctl_fail(c, "standard output: %s", strerror(errno));
	return status;
}

/* jansson's integers are signed: a larger seed travels as a marked text and loses its quotes here. A text
 * of the answer cannot imitate the mark, because quotes inside texts are escaped. */
static const char mark[] = "\"seed\": \"u64:";

int ctl_print_json(const struct ctl *c, json_t *j)
{
	char *text = j ? json_dumps(j, JSON_REAL_PRECISION(9)) : NULL, *at;

	json_decref(j);
	if (!text)
		return ctl_fail(c, "out of memory");
	at = strstr(text, mark);
	if (at) {
		char *digits = at + strlen(mark), *end = strchr(digits, '"');

		at += strlen("\"seed\": ");
		memmove(at, digits, (size_t)(end - digits));
		memmove(at + (end - digits), end + 1, strlen(end + 1) + 1);
	}
	puts(text);
	free(text);
	return ctl_flush(c, CTL_OK);
}

json_t *ctl_json_u64(uint64_t v)
{
	char buf[32];

	if (v <= INT64_MAX)
		return json_integer((json_int_t)v);
	snprintf(buf, sizeof(buf), "u64:%" PRIu64, v);
	return json_string(buf);
}

json_t *ctl_json_float(float v)
{
	return isfinite(v) ? json_real((double)v) : json_null();
}

json_t *ctl_json_ids(const uint32_t *ids, size_t n)
{
	json_t *a = json_array();

	for (size_t i = 0; i < n; i++)
		json_array_append_new(a, json_integer(ids[i]));
	return a;
}

/* Length of the character at s, 0 where it is not UTF-8. */
static size_t utf8_char(const unsigned char *s, size_t n)
{
	if (s[0] < 0x80)
		return 1;
	size_t len = s[0] >= 0xf0 && s[0] < 0xf5 ? 4 : s[0] >= 0xe0 ? 3 : s[0] >= 0xc2 ? 2 : 0;

	if (!len || s[0] >= 0xf5 || len > n)
		return 0;
	for (size_t i = 1; i < len; i++)
		if ((s[i] & 0xc0) != 0x80)
			return 0;
	if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) || (s[0] == 0xf0 && s[1] < 0x90) ||
	    (s[0] == 0xf4 && s[1] > 0x8f))
		return 0;
	return len;
}

bool ctl_is_utf8(const char *text, size_t len)
{
	for (size_t i = 0, k; i < len; i += k) {
		k = utf8_char((const unsigned char *)text + i, len - i);
		if (!k)
			return false;
	}
	return true;
}

json_t *ctl_json_text(const char *text, size_t len)
{
	static const char instead[3] = {'\xef', '\xbf', '\xbd'}; /* U+FFFD */
	char *out = malloc(len * 3 + 1);
	size_t n = 0;
	json_t *j;

	if (!out)
		return NULL;
	for (size_t i = 0; i < len;) {
		size_t k = utf8_char((const unsigned char *)text + i, len - i);

		if (k) {
			memcpy(out + n, text + i, k);
			n += k;
			i += k;
		} else {
			memcpy(out + n, instead, sizeof(instead));
			n += 3;
			i++;
		}
	}
	j = json_stringn_nocheck(out, n);
	free(out);
	return j;
}

void ctl_json_set_text(json_t *obj, const char *text, size_t len)
{
	char *hex;

	json_object_set_new(obj, "text", ctl_json_text(text, len));
	if (ctl_is_utf8(text, len))
		return;
	hex = malloc(len * 2 + 1);
	if (!hex)
		return;
	ctl_hex(text, len, hex);
	json_object_set_new(obj, "bytes", json_string(hex));
	free(hex);
}

void ctl_hex(const void *data, size_t n, char *out)
{
	static const char digits[] = "0123456789abcdef";
	const unsigned char *p = data;

	for (size_t i = 0; i < n; i++) {
		out[2 * i] = digits[p[i] >> 4];
		out[2 * i + 1] = digits[p[i] & 15];
	}
	out[2 * n] = 0;
}

static int nibble(char ch)
{
	return ch >= '0' && ch <= '9' ? ch - '0' : ch >= 'a' && ch <= 'f' ? ch - 'a' + 10 : -1;
}

bool ctl_unhex(const char *hex, void *out, size_t n)
{
	unsigned char *p = out;

	if (strlen(hex) != 2 * n)
		return false;
	for (size_t i = 0; i < n; i++) {
		int a = nibble(hex[2 * i]), b = nibble(hex[2 * i + 1]);

		if (a < 0 || b < 0)
			return false;
		p[i] = (unsigned char)(a << 4 | b);
	}
	return true;
}

const char *ctl_size(uint64_t bytes, char buf[32])
{
	static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
	double v = (double)bytes;
	int u = 0;

	while (v >= 1024 && u < 4) {
		v /= 1024;
		u++;
	}
	snprintf(buf, 32, v < 10 && u ? "%.1f %s" : "%.0f %s", v, unit[u]);
	return buf;
}

static const char *color(const struct ctl *c, const char *code)
{
	return c->color ? code : "";
}

const char *ctl_bold(const struct ctl *c)
{
	return color(c, "\033[1m");
}

const char *ctl_red(const struct ctl *c)
{
	return color(c, "\033[31m");
}

const char *ctl_green(const struct ctl *c)
{
	return color(c, "\033[32m");
}

const char *ctl_dim(const struct ctl *c)
{
	return color(c, "\033[2m");
}

const char *ctl_plain(const struct ctl *c)
{
	return color(c, "\033[0m");
}
