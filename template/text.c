/* SPDX-License-Identifier: MIT */
/* Owns: how values print, as Python prints them, and the % of strings. See value.h. */
#include "template/value.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* The digits of the shortest decimal that reads back as the same number. */
static int shortest(double f, char out[40])
{
	for (int digits = 1; digits <= 17; digits++) {
		snprintf(out, 40, "%.*e", digits - 1, f);
		if (strtod(out, NULL) == f)
			break;
	}
	return (int)strtol(strchr(out, 'e') + 1, NULL, 10);
}

size_t tpl_float_text(double f, char out[40])
{
	char raw[40], digits[32] = "";
	int exp, n = 0, k = 0;

	if (!isfinite(f))
		return (size_t)snprintf(out, 40, "%s", isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
	exp = shortest(fabs(f), raw);
	for (const char *p = raw; *p && *p != 'e'; p++)
		if (*p != '.')
			digits[n++] = *p;
	while (n > 1 && digits[n - 1] == '0')
		n--;
	if (signbit(f))
		out[k++] = '-';
	if (exp < -4 || exp >= 16) {
		out[k++] = digits[0];
		if (n > 1)
			out[k++] = '.';
		for (int i = 1; i < n; i++)
			out[k++] = digits[i];
		k += snprintf(out + k, (size_t)(40 - k), "e%c%02d", exp < 0 ? '-' : '+', abs(exp));
		return (size_t)k;
	}
	if (exp < 0) {
		k += snprintf(out + k, (size_t)(40 - k), "0.%.*s", -exp - 1, "000");
		for (int i = 0; i < n; i++)
			out[k++] = digits[i];
	} else {
		for (int i = 0; i < n || i <= exp; i++) {
			if (i == exp + 1)
				out[k++] = '.';
			out[k++] = i < n ? digits[i] : '0';
		}
		if (n <= exp + 1) {
			out[k++] = '.';
			out[k++] = '0';
		}
	}
	out[k] = 0;
	return (size_t)k;
}

/* ---- as inside a list ----------------------------------------------------------------- */

static void repr_char(struct tpl_run *r, struct tpl_buf *b, const struct tpl_str *s, size_t at, size_t n, int32_t c)
{
	char out[16];
	const char *fmt = c > 0xffff ? "\\U%08x" : c > 0xff ? "\\u%04x" : "\\x%02x";

	if (c == '\n' || c == '\r' || c == '\t')
		snprintf(out, sizeof(out), "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
	else if (c == '\\')
		snprintf(out, sizeof(out), "\\\\");
	else if (tpl_printable(c)) {
		tpl_put_part(r, b, s, at, n);
		return;
	} else {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
		snprintf(out, sizeof(out), fmt, (unsigned)c);
#pragma GCC diagnostic pop
	}
	tpl_put(r, b, out, strlen(out), NULL, s->mark ? s->mark[at] : s->from);
}

static void repr_str(struct tpl_run *r, struct tpl_buf *b, const struct tpl_str *s)
{
	char quote = s->len && memchr(s->p, '\'', s->len) && !memchr(s->p, '"', s->len) ? '"' : '\'';
	const char *const escaped = "\\'";

	tpl_put(r, b, &quote, 1, NULL, 0);
	for (size_t i = 0; i < s->len;) {
		int32_t c;
		size_t n = tpl_next(s->p + i, s->len - i, &c);
		if (c == quote)
			tpl_put_text(r, b, escaped);
		else
			repr_char(r, b, s, i, n, c);
		i += n;
	}
	tpl_put(r, b, &quote, 1, NULL, 0);
}

static void repr_list(struct tpl_run *r, struct tpl_buf *b, const struct tpl_list *l)
{
	static const char *const around[][2] = { { "[", "]" },		   { "(", ")" },	   { NULL, NULL },
						 { "dict_keys([", "])" },  { "dict_values([", "])" },
						 { "dict_items([", "])" }, { NULL, NULL } };

	if (l->flavour == TPL_ONCE)
		tpl_fail(&r->h, -EINVAL, "printing what is walked through once: put |list before it");
	if (l->flavour == TPL_RANGE)
		tpl_fail(&r->h, -EINVAL, "printing a range: put |list before it");
	tpl_put_text(r, b, around[l->flavour][0]);
	for (uint32_t i = 0; i < l->n; i++) {
		if (i)
			tpl_put_text(r, b, ", ");
		tpl_put_repr(r, b, l->v[i]);
	}
	if (l->flavour == TPL_TUPLE && l->n == 1)
		tpl_put_text(r, b, ",");
	tpl_put_text(r, b, around[l->flavour][1]);
}

static void repr_dict(struct tpl_run *r, struct tpl_buf *b, const struct tpl_dict *d)
{
	tpl_put_text(r, b, "{");
	for (uint32_t i = 0; i < d->n; i++) {
		if (i)
			tpl_put_text(r, b, ", ");
		tpl_put_repr(r, b, d->k[i]);
		tpl_put_text(r, b, ": ");
		tpl_put_repr(r, b, d->v[i]);
	}
	tpl_put_text(r, b, "}");
}

void tpl_put_repr(struct tpl_run *r, struct tpl_buf *b, struct tpl_val v)
{
	char out[40];

	tpl_enter(r);
	switch (v.kind) {
	case TPL_UNDEF: tpl_put_text(r, b, "Undefined"); break;
	case TPL_NONE: tpl_put_text(r, b, "None"); break;
	case TPL_BOOL: tpl_put_text(r, b, v.u.b ? "True" : "False"); break;
	case TPL_INT:
		snprintf(out, sizeof(out), "%" PRId64, v.u.i);
		tpl_put_text(r, b, out);
		break;
	case TPL_FLOAT: tpl_put(r, b, out, tpl_float_text(v.u.f, out), NULL, 0); break;
	case TPL_STR: repr_str(r, b, v.u.s); break;
	case TPL_LIST: repr_list(r, b, v.u.l); break;
	case TPL_DICT: repr_dict(r, b, v.u.d); break;
	default: tpl_fail(&r->h, -EINVAL, "a %s cannot be printed", tpl_kind_name(v));
	}
	tpl_leave(r);
}

void tpl_put_val(struct tpl_run *r, struct tpl_buf *b, struct tpl_val v)
{
	if (tpl_is(v, TPL_STR))
		tpl_put_str(r, b, v.u.s);
	else if (!tpl_is(v, TPL_UNDEF)) /* which prints as nothing */
		tpl_put_repr(r, b, v);
}

const struct tpl_str *tpl_to_str(struct tpl_run *r, struct tpl_val v)
{
	struct tpl_buf b = { 0 };

	if (tpl_is(v, TPL_STR))
		return v.u.s;
	tpl_put_val(r, &b, v);
	return tpl_buf_val(r, &b).u.s;
}

/* ---- % of strings: flags - and 0, a width, a precision; s r d i f e g x X o c and %% ------------ */

struct spec {
	bool left, zero;
	int width, precision; /* precision -1: none */
	char what;
};

static int digits(const struct tpl_str *f, size_t *i)
{
	int n = 0;

	while (*i < f->len && f->p[*i] >= '0' && f->p[*i] <= '9' && n < 1000)
		n = n * 10 + f->p[(*i)++] - '0';
	return n;
}

static struct spec read_spec(const struct tpl_str *f, size_t *i)
{
	struct spec s = { .precision = -1 };

	for (; *i < f->len && (f->p[*i] == '-' || f->p[*i] == '0'); ++*i)
		*(f->p[*i] == '-' ? &s.left : &s.zero) = true;
	s.width = digits(f, i);
	if (*i < f->len && f->p[*i] == '.') {
		++*i;
		s.precision = digits(f, i);
	}
	s.what = *i < f->len ? f->p[(*i)++] : 0;
	return s;
}

static void pad(struct tpl_run *r, struct tpl_buf *b, const struct spec *s, const struct tpl_str *text, bool number)
{
	int64_t n = (int64_t)s->width - (int64_t)text->chars;
	bool zeros = number && s->zero && !s->left;
	size_t sign = zeros && text->len && text->p[0] == '-';

	tpl_put_part(r, b, text, 0, sign);
	for (int64_t i = 0; i < n && !s->left; i++)
		tpl_put_text(r, b, zeros ? "0" : " ");
	tpl_put_part(r, b, text, sign, text->len - sign);
	for (int64_t i = 0; i < n && s->left; i++)
		tpl_put_text(r, b, " ");
}

static const struct tpl_str *whole_text(struct tpl_run *r, const struct spec *s, struct tpl_val v)
{
	char *out = tpl_alloc(&r->h, 32);
	int64_t i;

	if (tpl_is(v, TPL_FLOAT) && fabs(v.u.f) < 9e18 && (s->what == 'd' || s->what == 'i'))
		i = (int64_t)v.u.f;
	else if (!tpl_whole(v, &i))
		tpl_fail(&r->h, -EINVAL, "%%%c of a %s", s->what, tpl_kind_name(v));
	uint64_t u = i < 0 ? 0 - (uint64_t)i : (uint64_t)i;
	const char *minus = i < 0 ? "-" : "";
	int n = s->what == 'x'   ? snprintf(out, 32, "%s%" PRIx64, minus, u)
		: s->what == 'X' ? snprintf(out, 32, "%s%" PRIX64, minus, u)
		: s->what == 'o' ? snprintf(out, 32, "%s%" PRIo64, minus, u)
				 : snprintf(out, 32, "%s%" PRIu64, minus, u);
	return tpl_str_new(&r->h, out, (size_t)n, NULL, 0);
}

static const struct tpl_str *float_text(struct tpl_run *r, const struct spec *s, struct tpl_val v)
{
	enum { ROOM = 1400 }; /* 309 digits and 1,000 after the point */
	char *out = tpl_alloc(&r->h, ROOM);
	int digits_after = s->precision < 0 ? 6 : s->precision, n;
	double f;

	if (!tpl_number(v, &f))
		tpl_fail(&r->h, -EINVAL, "%%%c of a %s", s->what, tpl_kind_name(v));
	n = s->what == 'f'   ? snprintf(out, ROOM, "%.*f", digits_after, f)
	    : s->what == 'e' ? snprintf(out, ROOM, "%.*e", digits_after, f)
			     : snprintf(out, ROOM, "%.*g", digits_after, f);
	return tpl_str_new(&r->h, out, (size_t)n, NULL, 0);
}

static void put_spec(struct tpl_run *r, struct tpl_buf *b, const struct spec *s, struct tpl_val v)
{
	struct tpl_buf one = { 0 };
	const struct tpl_str *text;

	switch (s->what) {
	case 's':
	case 'r':
		if (s->what == 'r')
			tpl_put_repr(r, &one, v);
		else
			tpl_put_val(r, &one, v);
		text = tpl_buf_val(r, &one).u.s;
		if (s->precision >= 0 && (uint32_t)s->precision < text->chars)
			text = tpl_part(r, text, 0, tpl_byte_of(text, (uint32_t)s->precision)).u.s;
		pad(r, b, s, text, false);
		break;
	case 'd':
	case 'i':
	case 'x':
	case 'X':
	case 'o': pad(r, b, s, whole_text(r, s, v), true); break;
	case 'f':
	case 'e':
	case 'g': pad(r, b, s, float_text(r, s, v), true); break;
	default: tpl_fail(&r->h, -EINVAL, "an unknown %% format");
	}
}

struct tpl_val tpl_percent(struct tpl_run *r, const struct tpl_str *fmt, struct tpl_val *v, uint32_t n)
{
	struct tpl_buf b = { 0 };
	uint32_t used = 0;

	for (size_t i = 0; i < fmt->len;) {
		size_t from = i;
		while (i < fmt->len && fmt->p[i] != '%')
			i++;
		tpl_put_part(r, &b, fmt, from, i - from);
		if (i == fmt->len)
			break;
		i++;
		if (i < fmt->len && fmt->p[i] == '%') {
			tpl_put_part(r, &b, fmt, i++, 1);
			continue;
		}
		struct spec s = read_spec(fmt, &i);
		if (used == n)
			tpl_fail(&r->h, -EINVAL, "fewer values than %% formats");
		put_spec(r, &b, &s, v[used++]);
	}
	if (used < n && !(n == 1 && tpl_is(v[0], TPL_DICT)))
		tpl_fail(&r->h, -EINVAL, "more values than %% formats");
	return tpl_buf_val(r, &b);
}
