/* SPDX-License-Identifier: MIT */
/* Owns: filters of one value: texts and numbers. Does not own: those that go through lists (filters_seq.c). */
#include "template/value.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#define FILTER(id) static struct tpl_val id(struct tpl_run *r, struct tpl_val in, const struct tpl_val *const *v)

#define CASE_FILTER(id, how) \
	FILTER(id) \
	{ \
		(void)v; \
		return tpl_recase(r, tpl_to_str(r, in), how); \
	}
CASE_FILTER(f_upper, TPL_UPPER)
CASE_FILTER(f_lower, TPL_LOWER)
CASE_FILTER(f_capitalize, TPL_CAPITALIZE)
CASE_FILTER(f_title, TPL_TITLE_WORDS)

FILTER(f_trim)
{
	const struct tpl_str *set = v[0] && tpl_is(*v[0], TPL_STR) ? v[0]->u.s : NULL;

	if (v[0] && !set && !tpl_is(*v[0], TPL_NONE))
		tpl_fail(&r->h, -EINVAL, "trim of a %s's characters", tpl_kind_name(*v[0]));
	return tpl_strip(r, tpl_to_str(r, in), set, true, true);
}

FILTER(f_string)
{
	(void)v;
	return tpl_str_val(tpl_to_str(r, in));
}

FILTER(f_replace)
{
	return tpl_replace(r, tpl_to_str(r, in), tpl_to_str(r, *v[0]), tpl_to_str(r, *v[1]), tpl_want_whole(r, v[2], -1));
}

FILTER(f_default)
{
	bool by_truth = v[1] && tpl_true(r, *v[1]);

	if (tpl_is(in, TPL_UNDEF) || (by_truth && !tpl_true(r, in)))
		return v[0] ? *v[0] : tpl_text(r, "");
	return in;
}

FILTER(f_escape)
{
	static const struct {
		char c;
		const char *to;
	} by[] = { { '&', "&amp;" }, { '<', "&lt;" }, { '>', "&gt;" }, { '\'', "&#39;" }, { '"', "&#34;" } };
	const struct tpl_str *s = tpl_to_str(r, in);
	struct tpl_buf b = { 0 };
	size_t from = 0;

	(void)v;
	for (size_t i = 0; i < s->len; i++)
		for (size_t k = 0; k < sizeof(by) / sizeof(by[0]); k++)
			if (s->p[i] == by[k].c) {
				tpl_put_part(r, &b, s, from, i - from);
				tpl_put(r, &b, by[k].to, strlen(by[k].to), NULL, s->mark ? s->mark[i] : s->from);
				from = i + 1;
				break;
			}
	tpl_put_part(r, &b, s, from, s->len - from);
	return tpl_buf_val(r, &b);
}

static void put_line(struct tpl_run *r, struct tpl_buf *b, const struct tpl_str *line, const struct tpl_str *by,
		     bool indented)
{
	if (indented)
		tpl_put_str(r, b, by);
	tpl_put_str(r, b, line);
}

FILTER(f_indent)
{
	const struct tpl_str *s, *by;
	struct tpl_buf b = { 0 }, blanks = { 0 };
	bool first = v[1] && tpl_true(r, *v[1]), blank = v[2] && tpl_true(r, *v[2]);
	struct tpl_list *l;

	if (!tpl_is(in, TPL_STR))
		tpl_fail(&r->h, -EINVAL, "indent of a %s", tpl_kind_name(in));
	tpl_put_str(r, &b, in.u.s);
	tpl_put_text(r, &b, "\n"); /* so that a last newline has an empty line after it */
	s = tpl_buf_val(r, &b).u.s;
	if (v[0] && tpl_is(*v[0], TPL_STR)) {
		by = v[0]->u.s;
	} else {
		for (int64_t i = tpl_want_whole(r, v[0], 4); i > 0; i--)
			tpl_put_text(r, &blanks, " ");
		by = tpl_buf_val(r, &blanks).u.s;
	}
	l = tpl_lines(r, s, false);
	b = (struct tpl_buf){ 0 };
	for (uint32_t i = 0; i < l->n; i++) {
		if (i)
			tpl_put_text(r, &b, "\n");
		put_line(r, &b, l->v[i].u.s, by, i ? blank || l->v[i].u.s->len : first);
	}
	return tpl_buf_val(r, &b);
}

FILTER(f_tojson)
{
	struct tpl_json how = { .ascii = v[1] && tpl_true(r, *v[1]), .sort = v[3] && tpl_true(r, *v[3]) };
	struct tpl_buf b = { 0 };

	if (v[0] && tpl_is(*v[0], TPL_STR)) {
		how.indent = v[0]->u.s;
	} else if (v[0] && !tpl_is(*v[0], TPL_NONE)) {
		for (int64_t i = tpl_want_whole(r, v[0], 0); i > 0; i--)
			tpl_put_text(r, &b, " ");
		how.indent = tpl_buf_val(r, &b).u.s;
	}
	if (v[2] && !tpl_is(*v[2], TPL_NONE)) {
		const struct tpl_list *l = tpl_walk(r, *v[2]);
		if (l->n != 2 || !tpl_is(l->v[0], TPL_STR) || !tpl_is(l->v[1], TPL_STR))
			tpl_fail(&r->h, -EINVAL, "tojson: separators are two texts");
		how.comma = l->v[0].u.s;
		how.colon = l->v[1].u.s;
	}
	return tpl_to_json(r, in, &how);
}

FILTER(f_safe)
{
	return f_string(r, in, v);
}

/* ---- numbers ---------------------------------------------------------------------------- */

/* Blanks around, underscores between digits: as Python reads numbers. False: it is none. */
static bool clean(struct tpl_run *r, const struct tpl_str *s, char out[400])
{
	const struct tpl_str *t = tpl_strip(r, s, NULL, true, true).u.s;
	size_t n = 0;

	if (!t->len || t->len >= 400)
		return false;
	for (size_t i = 0; i < t->len; i++) {
		bool digits = i && i + 1 < t->len && t->p[i - 1] >= '0' && t->p[i - 1] <= '9' && t->p[i + 1] >= '0' &&
			      t->p[i + 1] <= '9';
		if (!t->p[i] || (t->p[i] == '_' && !digits) || t->p[i] == 'x' || t->p[i] == 'X' || t->p[i] == '(')
			return false;
		if (t->p[i] != '_')
			out[n++] = t->p[i];
	}
	out[n] = 0;
	return true;
}

static bool read_float(struct tpl_run *r, const struct tpl_str *s, double *f)
{
	char text[400], *end;

	if (!clean(r, s, text))
		return false;
	*f = strtod(text, &end);
	return !*end && end != text;
}

static bool read_whole(struct tpl_run *r, const struct tpl_str *s, int64_t base, int64_t *i)
{
	char text[400], *end, *from = text;
	const struct tpl_str *t = tpl_strip(r, s, NULL, true, true).u.s;

	if (base != 10 && t->len && t->len < sizeof(text)) {
		memcpy(text, t->p, t->len);
		text[t->len] = 0;
		/* 0x, 0o and 0b go with their bases; C knows the first alone */
		char mark = base == 8 ? 'o' : base == 2 ? 'b' : 0;
		if (mark && text[0] == '0' && (text[1] | 0x20) == mark)
			from = text + 2;
	} else if (!clean(r, s, text)) {
		return false;
	}
	if (base < 2 || base > 36)
		return false;
	errno = 0;
	*i = strtoll(from, &end, (int)base);
	if (errno == ERANGE)
		tpl_fail(&r->h, -EINVAL, "a number beyond 64 bits");
	return !*end && end != from;
}

static struct tpl_val truncated(struct tpl_run *r, double f, struct tpl_val otherwise)
{
	if (!isfinite(f))
		return otherwise;
	if (fabs(f) >= 9.2e18)
		tpl_fail(&r->h, -EINVAL, "a number beyond 64 bits");
	return tpl_int((int64_t)f);
}

FILTER(f_int)
{
	struct tpl_val otherwise = v[0] ? *v[0] : tpl_int(0);
	int64_t i;
	double f;

	if (tpl_is(in, TPL_UNDEF))
		tpl_fail(&r->h, -EINVAL, "'%.*s' is undefined", in.u.s ? (int)in.u.s->len : 1, in.u.s ? in.u.s->p : "?");
	if (tpl_whole(in, &i))
		return tpl_int(i);
	if (tpl_is(in, TPL_FLOAT))
		return truncated(r, in.u.f, otherwise);
	if (!tpl_is(in, TPL_STR))
		return otherwise;
	if (read_whole(r, in.u.s, tpl_want_whole(r, v[1], 10), &i))
		return tpl_int(i);
	return read_float(r, in.u.s, &f) ? truncated(r, f, otherwise) : otherwise;
}

FILTER(f_float)
{
	double f;

	if (tpl_is(in, TPL_UNDEF))
		tpl_fail(&r->h, -EINVAL, "'%.*s' is undefined", in.u.s ? (int)in.u.s->len : 1, in.u.s ? in.u.s->p : "?");
	if (tpl_number(in, &f) || (tpl_is(in, TPL_STR) && read_float(r, in.u.s, &f)))
		return tpl_float(f);
	return v[0] ? *v[0] : tpl_float(0);
}

FILTER(f_abs)
{
	int64_t i;

	(void)v;
	if (tpl_is(in, TPL_FLOAT))
		return tpl_float(fabs(in.u.f));
	if (!tpl_whole(in, &i))
		tpl_fail(&r->h, -EINVAL, "abs of a %s", tpl_kind_name(in));
	return i < 0 ? tpl_negate(r, tpl_int(i), true) : tpl_int(i);
}

/* To the nearest, the even one of two: as Python rounds. */
static double nearest(double f, int64_t digits)
{
	char text[400];

	if (digits <= 0) {
		double by = pow(10, (double)-digits);
		return isfinite(by) ? rint(f / by) * by : 0;
	}
	if (digits > 30)
		return f;
	snprintf(text, sizeof(text), "%.*f", (int)digits, f); /* exact decimal, so ties are true ties */
	return strtod(text, NULL);
}

/* To tens, hundreds, ...: half goes to the even one. */
static struct tpl_val round_whole(struct tpl_run *r, int64_t i, int64_t digits)
{
	int64_t unit = 1, rest, down;

	for (; digits < 0; digits++)
		if (__builtin_mul_overflow(unit, 10, &unit))
			return tpl_int(0);
	rest = i % unit;
	if (rest < 0)
		rest += unit;
	if (__builtin_sub_overflow(i, rest, &down))
		tpl_fail(&r->h, -EINVAL, "a number beyond 64 bits");
	if (rest > unit - rest || (rest == unit - rest && down / unit % 2)) {
		if (__builtin_add_overflow(down, unit, &down))
			tpl_fail(&r->h, -EINVAL, "a number beyond 64 bits");
	}
	return tpl_int(down);
}

FILTER(f_round)
{
	double f, by;
	int64_t i, digits = tpl_want_whole(r, v[0], 0);
	const struct tpl_str *how = v[1] ? tpl_to_str(r, *v[1]) : NULL;

	if (!tpl_number(in, &f))
		tpl_fail(&r->h, -EINVAL, "round of a %s", tpl_kind_name(in));
	if (!how || tpl_eq(how, "common"))
		return tpl_whole(in, &i) ? round_whole(r, i, digits) : tpl_float(nearest(f, digits));
	if (!tpl_eq(how, "ceil") && !tpl_eq(how, "floor"))
		tpl_fail(&r->h, -EINVAL, "round: common, ceil or floor");
	by = pow(10, (double)digits);
	return tpl_float((tpl_eq(how, "ceil") ? ceil(f * by) : floor(f * by)) / by);
}

static struct tpl_val f_format(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a)
{
	if (a->n_kw)
		tpl_fail(&r->h, -EINVAL, "format by names is not built");
	return tpl_percent(r, tpl_to_str(r, in), a->pos, a->n);
}

FILTER(f_wordcount)
{
	const struct tpl_str *s = tpl_to_str(r, in);
	int64_t n = 0;
	bool inside = false;

	(void)v;
	for (size_t i = 0; i < s->len;) {
		int32_t c;
		i += tpl_next(s->p + i, s->len - i, &c);
		bool is = c == '_' || (c < 0x80 ? (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') :
						 tpl_printable(c) && !tpl_space(c));
		n += is && !inside;
		inside = is;
	}
	return tpl_int(n);
}

FILTER(f_center)
{
	struct tpl_val width = v[0] ? *v[0] : tpl_int(80);
	const struct tpl_args a = { &width, NULL, 1, 0 };
	static const struct tpl_str name = { "center", NULL, 6, 6, 0 };
	struct tpl_val s = tpl_str_val(tpl_to_str(r, in));

	return tpl_invoke(r, tpl_find_method(s, &name), "filter", s, &a);
}

FILTER(f_attr)
{
	return tpl_is(in, TPL_DICT) && !tpl_find_method(in, tpl_to_str(r, *v[0])) ? TPL_UNDEFINED :
										  tpl_attr(r, in, tpl_to_str(r, *v[0]));
}

static const struct tpl_function filters[] = {
	{ "abs", f_abs, "", 0, NULL },
	{ "attr", f_attr, "name", 1, NULL },
	{ "capitalize", f_capitalize, "", 0, NULL },
	{ "center", f_center, "width", 0, NULL },
	{ "d", f_default, "default_value boolean", 0, NULL },
	{ "default", f_default, "default_value boolean", 0, NULL },
	{ "e", f_escape, "", 0, NULL },
	{ "escape", f_escape, "", 0, NULL },
	{ "float", f_float, "default", 0, NULL },
	{ "format", NULL, NULL, 0, f_format },
	{ "indent", f_indent, "width first blank", 0, NULL },
	{ "int", f_int, "default base", 0, NULL },
	{ "lower", f_lower, "", 0, NULL },
	{ "replace", f_replace, "old new count", 2, NULL },
	{ "round", f_round, "precision method", 0, NULL },
	{ "safe", f_safe, "", 0, NULL },
	{ "string", f_string, "", 0, NULL },
	{ "title", f_title, "", 0, NULL },
	{ "tojson", f_tojson, "indent ensure_ascii separators sort_keys", 0, NULL },
	{ "trim", f_trim, "chars", 0, NULL },
	{ "upper", f_upper, "", 0, NULL },
	{ "wordcount", f_wordcount, "", 0, NULL },
};

const struct tpl_function *tpl_find_filter(const struct tpl_str *name)
{
	const struct tpl_function *f = tpl_in_table(filters, sizeof(filters) / sizeof(filters[0]), name->p, name->len);

	return f ? f : tpl_find_seq_filter(name);
}

struct tpl_val tpl_filter(struct tpl_run *r, const struct tpl_str *name, struct tpl_val in, const struct tpl_args *a)
{
	const struct tpl_function *f = tpl_find_filter(name);

	if (!f)
		tpl_fail(&r->h, -EINVAL, "no filter is named '%.*s'", name->len < 60 ? (int)name->len : 60, name->p);
	return tpl_invoke(r, f, "filter", in, a);
}
