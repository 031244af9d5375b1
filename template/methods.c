/* SPDX-License-Identifier: MIT */
/*
 * Owns: the methods of str, dict and list. Does not own: those that would change
 * something: a template changes nothing but its namespaces.
 */
#include "template/value.h"

#include <errno.h>

#define METHOD(id) static struct tpl_val id(struct tpl_run *r, struct tpl_val in, const struct tpl_val *const *v)

static const struct tpl_str *text(struct tpl_run *r, const struct tpl_val *v)
{
	if (!v || tpl_is(*v, TPL_NONE))
		return NULL;
	if (!tpl_is(*v, TPL_STR))
		tpl_fail(&r->h, -EINVAL, "a %s where a str should be", tpl_kind_name(*v));
	return v->u.s;
}

/* ---- case and ends ------------------------------------------------------------------ */

METHOD(s_strip)
{
	return tpl_strip(r, in.u.s, text(r, v[0]), true, true);
}

METHOD(s_lstrip)
{
	return tpl_strip(r, in.u.s, text(r, v[0]), true, false);
}

METHOD(s_rstrip)
{
	return tpl_strip(r, in.u.s, text(r, v[0]), false, true);
}

#define CASE_METHOD(id, how) \
	METHOD(id) \
	{ \
		(void)v; \
		return tpl_recase(r, in.u.s, how); \
	}
CASE_METHOD(s_upper, TPL_UPPER)
CASE_METHOD(s_lower, TPL_LOWER)
CASE_METHOD(s_title, TPL_TITLE)
CASE_METHOD(s_capitalize, TPL_CAPITALIZE)
CASE_METHOD(s_swapcase, TPL_SWAP)

#define CLASS_METHOD(id, what) \
	METHOD(id) \
	{ \
		(void)r; \
		(void)v; \
		return tpl_bool(tpl_all_of(in.u.s, what)); \
	}
CLASS_METHOD(s_isalpha, TPL_ALPHA)
CLASS_METHOD(s_isdigit, TPL_DIGIT)
CLASS_METHOD(s_isalnum, TPL_ALNUM)
CLASS_METHOD(s_isspace, TPL_IS_SPACE)
CLASS_METHOD(s_isupper, TPL_IS_UPPER)
CLASS_METHOD(s_islower, TPL_IS_LOWER)
CLASS_METHOD(s_istitle, TPL_IS_TITLE)

/* The part of s from character v[0] to v[1], as slices have them. */
static const struct tpl_str *part(struct tpl_run *r, const struct tpl_str *s, const struct tpl_val *from,
				  const struct tpl_val *end, size_t *at)
{
	struct tpl_val bounds[3] = { from ? *from : TPL_NULL, end ? *end : TPL_NULL, TPL_NULL };
	const struct tpl_str *p;

	*at = 0;
	if (!from && !end)
		return s;
	if (tpl_want_whole(r, from, 0) > (int64_t)s->chars)
		return NULL;
	p = tpl_slice(r, tpl_str_val(s), bounds).u.s;
	*at = (size_t)(p->p - s->p);
	return p;
}

static bool begins(const struct tpl_str *s, const struct tpl_str *with)
{
	return s->len >= with->len && !memcmp(s->p, with->p, with->len);
}

static bool ends(const struct tpl_str *s, const struct tpl_str *with)
{
	return s->len >= with->len && !memcmp(s->p + s->len - with->len, with->p, with->len);
}

static struct tpl_val any_end(struct tpl_run *r, struct tpl_val in, const struct tpl_val *const *v,
			      bool (*is)(const struct tpl_str *, const struct tpl_str *))
{
	size_t at;
	const struct tpl_str *s = part(r, in.u.s, v[1], v[2], &at);

	if (!s)
		return tpl_bool(false);
	if (!tpl_is(*v[0], TPL_LIST) || v[0]->u.l->flavour != TPL_TUPLE) {
		const struct tpl_str *with = text(r, v[0]);
		if (!with)
			tpl_fail(&r->h, -EINVAL, "a None where a str should be");
		tpl_work_bytes(r, with->len);
		return tpl_bool(is(s, with));
	}
	for (uint32_t i = 0; i < v[0]->u.l->n; i++) {
		const struct tpl_str *with = text(r, &v[0]->u.l->v[i]);
		if (with)
			tpl_work_bytes(r, with->len);
		if (with && is(s, with))
			return tpl_bool(true);
	}
	return tpl_bool(false);
}

METHOD(s_startswith)
{
	return any_end(r, in, v, begins);
}

METHOD(s_endswith)
{
	return any_end(r, in, v, ends);
}

METHOD(s_removeprefix)
{
	const struct tpl_str *s = in.u.s, *with = text(r, v[0]);

	return with && begins(s, with) ? tpl_part(r, s, with->len, s->len - with->len) : in;
}

METHOD(s_removesuffix)
{
	const struct tpl_str *s = in.u.s, *with = text(r, v[0]);

	return with && ends(s, with) ? tpl_part(r, s, 0, s->len - with->len) : in;
}

/* ---- places --------------------------------------------------------------------------- */

static struct tpl_val find(struct tpl_run *r, struct tpl_val in, const struct tpl_val *const *v, bool last)
{
	size_t off, hit = SIZE_MAX, next;
	const struct tpl_str *s = part(r, in.u.s, v[1], v[2], &off), *what = text(r, v[0]);

	if (!what)
		tpl_fail(&r->h, -EINVAL, "a None where a str should be");
	if (!s)
		return tpl_int(-1);
	if (last && !what->len)
		return tpl_int((int64_t)tpl_chars(in.u.s->p, off + s->len));
	next = tpl_find(r, s, what, 0);
	while (next != SIZE_MAX) {
		tpl_work(r, 1);
		hit = next;
		if (!last)
			break;
		next = tpl_find(r, s, what, hit + 1);
	}
	return tpl_int(hit == SIZE_MAX ? -1 : (int64_t)tpl_chars(in.u.s->p, off + hit));
}

METHOD(s_find)
{
	return find(r, in, v, false);
}

METHOD(s_rfind)
{
	return find(r, in, v, true);
}

METHOD(s_index)
{
	struct tpl_val at = find(r, in, v, false);

	if (at.u.i < 0)
		tpl_fail(&r->h, -EINVAL, "index of what is not in the text");
	return at;
}

METHOD(s_rindex)
{
	struct tpl_val at = find(r, in, v, true);

	if (at.u.i < 0)
		tpl_fail(&r->h, -EINVAL, "rindex of what is not in the text");
	return at;
}

METHOD(s_count)
{
	size_t off, at = 0;
	const struct tpl_str *s = part(r, in.u.s, v[1], v[2], &off), *what = text(r, v[0]);
	int64_t n = 0;

	if (!what)
		tpl_fail(&r->h, -EINVAL, "a None where a str should be");
	if (!s)
		return tpl_int(0);
	if (!what->len)
		return tpl_int((int64_t)s->chars + 1);
	for (; (at = tpl_find(r, s, what, at)) != SIZE_MAX; at += what->len) {
		tpl_work(r, 1);
		n++;
	}
	return tpl_int(n);
}

METHOD(s_replace)
{
	const struct tpl_str *old = text(r, v[0]), *by = text(r, v[1]);

	if (!old || !by)
		tpl_fail(&r->h, -EINVAL, "a None where a str should be");
	return tpl_replace(r, in.u.s, old, by, tpl_want_whole(r, v[2], -1));
}

/* ---- to lists and back --------------------------------------------------------------------- */

struct parts { /* grows */
	struct tpl_list *l;
	uint32_t cap;
};

static void add(struct tpl_run *r, struct parts *p, struct tpl_val v)
{
	if (p->l->n == p->cap) {
		uint32_t cap = p->cap ? p->cap * 2 : 8;
		struct tpl_val *more = tpl_array(&r->h, cap, sizeof(*more));
		if (p->l->n)
			memcpy(more, p->l->v, p->l->n * sizeof(*more));
		p->l->v = more;
		p->cap = cap;
	}
	p->l->v[p->l->n++] = v;
}

static struct tpl_val split_at(struct tpl_run *r, const struct tpl_str *s, const struct tpl_str *by, int64_t most)
{
	struct parts p = { tpl_list_new(r, 0, TPL_PLAIN_LIST), 0 };
	size_t at = 0, hit;

	if (!by->len)
		tpl_fail(&r->h, -EINVAL, "split at an empty text");
	for (; most && (hit = tpl_find(r, s, by, at)) != SIZE_MAX; most--) {
		add(r, &p, tpl_part(r, s, at, hit - at));
		at = hit + by->len;
	}
	add(r, &p, tpl_part(r, s, at, s->len - at));
	return tpl_list_val(p.l);
}

static struct tpl_val split_blanks(struct tpl_run *r, const struct tpl_str *s, int64_t most)
{
	struct parts p = { tpl_list_new(r, 0, TPL_PLAIN_LIST), 0 };
	struct tpl_val left = tpl_strip(r, s, NULL, true, false);

	while (left.u.s->len) {
		const struct tpl_str *t = left.u.s;
		size_t i = 0;
		if (!most--) {
			add(r, &p, left); /* what follows the last cut keeps its end */
			break;
		}
		while (i < t->len) {
			int32_t c;
			unsigned n = tpl_next(t->p + i, t->len - i, &c);
			if (tpl_space(c))
				break;
			i += n;
		}
		add(r, &p, tpl_part(r, t, 0, i));
		left = tpl_strip(r, tpl_part(r, t, i, t->len - i).u.s, NULL, true, false);
	}
	return tpl_list_val(p.l);
}

METHOD(s_split)
{
	const struct tpl_str *by = text(r, v[0]);
	int64_t most = tpl_want_whole(r, v[1], -1);

	most = most < 0 ? INT64_MAX : most;
	return by ? split_at(r, in.u.s, by, most) : split_blanks(r, in.u.s, most);
}

static void turn(struct tpl_list *l)
{
	for (uint32_t i = 0, k = l->n; i + 1 < k; i++) {
		struct tpl_val v = l->v[i];
		l->v[i] = l->v[--k];
		l->v[k] = v;
	}
}

METHOD(s_rsplit)
{
	const struct tpl_str *by = text(r, v[0]), *s = in.u.s;
	struct parts p = { tpl_list_new(r, 0, TPL_PLAIN_LIST), 0 };
	int64_t most = tpl_want_whole(r, v[1], -1);
	size_t end = s->len;

	if (most < 0)
		return s_split(r, in, v);
	if (!by || !by->len)
		tpl_fail(&r->h, -EINVAL, "rsplit with a count wants a text to split at");
	for (size_t i = end; most && i >= by->len; i--) {
		tpl_work_bytes(r, by->len);
		if (memcmp(s->p + i - by->len, by->p, by->len) != 0)
			continue;
		add(r, &p, tpl_part(r, s, i, end - i));
		end = i - by->len;
		i = end + 1;
		most--;
	}
	add(r, &p, tpl_part(r, s, 0, end));
	turn(p.l);
	return tpl_list_val(p.l);
}

METHOD(s_splitlines)
{
	return tpl_list_val(tpl_lines(r, in.u.s, v[0] && tpl_true(r, *v[0])));
}

static struct tpl_val three(struct tpl_run *r, const struct tpl_str *s, size_t at, size_t len)
{
	struct tpl_list *l = tpl_list_new(r, 3, TPL_TUPLE);

	l->v[0] = tpl_part(r, s, 0, at);
	l->v[1] = tpl_part(r, s, at, len);
	l->v[2] = tpl_part(r, s, at + len, s->len - at - len);
	return tpl_list_val(l);
}

METHOD(s_partition)
{
	const struct tpl_str *by = text(r, v[0]);
	size_t hit;

	if (!by || !by->len)
		tpl_fail(&r->h, -EINVAL, "partition at an empty text");
	hit = tpl_find(r, in.u.s, by, 0);
	return hit == SIZE_MAX ? three(r, in.u.s, in.u.s->len, 0) : three(r, in.u.s, hit, by->len);
}

METHOD(s_rpartition)
{
	const struct tpl_str *by = text(r, v[0]);
	size_t hit, last = SIZE_MAX;

	if (!by || !by->len)
		tpl_fail(&r->h, -EINVAL, "rpartition at an empty text");
	for (hit = tpl_find(r, in.u.s, by, 0); hit != SIZE_MAX; hit = tpl_find(r, in.u.s, by, hit + 1)) {
		tpl_work(r, 1);
		last = hit;
	}
	return last == SIZE_MAX ? three(r, in.u.s, 0, 0) : three(r, in.u.s, last, by->len);
}

METHOD(s_join)
{
	struct tpl_list *l = tpl_walk(r, *v[0]);
	struct tpl_buf b = { 0 };

	for (uint32_t i = 0; i < l->n; i++) {
		const struct tpl_str *s = text(r, &l->v[i]);
		if (!s)
			tpl_fail(&r->h, -EINVAL, "join of a None");
		if (i)
			tpl_put_str(r, &b, in.u.s);
		tpl_put_str(r, &b, s);
	}
	return tpl_buf_val(r, &b);
}

static struct tpl_val padded(struct tpl_run *r, const struct tpl_str *s, int64_t before, int64_t after, const char *by)
{
	struct tpl_buf b = { 0 };

	for (; before > 0; before--)
		tpl_put_text(r, &b, by);
	tpl_put_str(r, &b, s);
	for (; after > 0; after--)
		tpl_put_text(r, &b, by);
	return tpl_buf_val(r, &b);
}

static int64_t missing(const struct tpl_str *s, int64_t width)
{
	return width > s->chars ? width - s->chars : 0;
}

METHOD(s_ljust)
{
	return padded(r, in.u.s, 0, missing(in.u.s, tpl_want_whole(r, v[0], 0)), " ");
}

METHOD(s_rjust)
{
	return padded(r, in.u.s, missing(in.u.s, tpl_want_whole(r, v[0], 0)), 0, " ");
}

METHOD(s_center)
{
	int64_t width = tpl_want_whole(r, v[0], 0), n = missing(in.u.s, width);
	int64_t left = n / 2 + (n & width & 1);

	return padded(r, in.u.s, left, n - left, " ");
}

METHOD(s_zfill)
{
	const struct tpl_str *s = in.u.s;
	int64_t n = missing(s, tpl_want_whole(r, v[0], 0));
	struct tpl_buf b = { 0 };
	bool sign = s->len && (s->p[0] == '-' || s->p[0] == '+');

	tpl_put_part(r, &b, s, 0, sign);
	for (; n > 0; n--)
		tpl_put_text(r, &b, "0");
	tpl_put_part(r, &b, s, sign, s->len - sign);
	return tpl_buf_val(r, &b);
}

/* "...{}...{0}...{name}...": fields without formats of their own */
static struct tpl_val field(struct tpl_run *r, const struct tpl_args *a, const struct tpl_str *s, size_t from, size_t n,
			    uint32_t *next)
{
	uint64_t i = 0;

	if (!n)
		i = (*next)++;
	for (size_t k = from; k < from + n && i <= UINT32_MAX; k++) {
		if (s->p[k] >= '0' && s->p[k] <= '9') {
			i = i * 10 + (uint64_t)(s->p[k] - '0');
			continue;
		}
		for (uint32_t w = 0; w < a->n_kw; w++)
			if (a->kw[w].name->len == n && !memcmp(a->kw[w].name->p, s->p + from, n))
				return a->kw[w].v;
		tpl_fail(&r->h, -EINVAL, "format: no field is named '%.*s'", n < 60 ? (int)n : 60, s->p + from);
	}
	if (i >= a->n)
		tpl_fail(&r->h, -EINVAL, "format: fewer values than fields");
	return a->pos[i];
}

static struct tpl_val s_format(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a)
{
	const struct tpl_str *s = in.u.s;
	struct tpl_buf b = { 0 };
	uint32_t next = 0;

	for (size_t i = 0; i < s->len;) {
		size_t from = i, end;
		while (i < s->len && s->p[i] != '{' && s->p[i] != '}')
			i++;
		tpl_put_part(r, &b, s, from, i - from);
		if (i == s->len)
			break;
		if (i + 1 < s->len && s->p[i + 1] == s->p[i]) {
			tpl_put_part(r, &b, s, i, 1);
			i += 2;
			continue;
		}
		for (end = i + 1; end < s->len && s->p[end] != '}'; end++)
			;
		if (s->p[i] == '}' || end == s->len)
			tpl_fail(&r->h, -EINVAL, "format: a brace alone");
		tpl_put_val(r, &b, field(r, a, s, i + 1, end - i - 1, &next));
		i = end + 1;
	}
	return tpl_buf_val(r, &b);
}

/* ---- dict and list --------------------------------------------------------------------------- */

static struct tpl_val view(struct tpl_run *r, struct tpl_val *v, uint32_t n, enum tpl_flavour flavour)
{
	struct tpl_list *l = tpl_list_new(r, 0, flavour);

	l->v = v;
	l->n = n;
	return tpl_list_val(l);
}

METHOD(d_keys)
{
	(void)v;
	return view(r, in.u.d->k, in.u.d->n, TPL_KEYS);
}

METHOD(d_values)
{
	(void)v;
	return view(r, in.u.d->v, in.u.d->n, TPL_VALUES);
}

METHOD(d_items)
{
	struct tpl_list *l = tpl_list_new(r, in.u.d->n, TPL_ITEMS);

	(void)v;
	for (uint32_t i = 0; i < l->n; i++)
		l->v[i] = tpl_pair(r, in.u.d->k[i], in.u.d->v[i]);
	return tpl_list_val(l);
}

METHOD(d_get)
{
	const struct tpl_val *got = tpl_dict_get(r, in.u.d, *v[0]);

	return got ? *got : v[1] ? *v[1] : TPL_NULL;
}

METHOD(same_again)
{
	(void)r;
	(void)v;
	return in;
}

METHOD(l_index)
{
	for (uint32_t i = 0; i < in.u.l->n; i++)
		if (tpl_same(r, in.u.l->v[i], *v[0]))
			return tpl_int(i);
	tpl_fail(&r->h, -EINVAL, "index of what is not in the list");
}

METHOD(l_count)
{
	int64_t n = 0;

	for (uint32_t i = 0; i < in.u.l->n; i++)
		n += tpl_same(r, in.u.l->v[i], *v[0]);
	return tpl_int(n);
}

static const struct tpl_function of_str[] = {
	{ "strip", s_strip, "chars", 0, NULL },
	{ "lstrip", s_lstrip, "chars", 0, NULL },
	{ "rstrip", s_rstrip, "chars", 0, NULL },
	{ "upper", s_upper, "", 0, NULL },
	{ "lower", s_lower, "", 0, NULL },
	{ "casefold", s_lower, "", 0, NULL },
	{ "title", s_title, "", 0, NULL },
	{ "capitalize", s_capitalize, "", 0, NULL },
	{ "swapcase", s_swapcase, "", 0, NULL },
	{ "isalpha", s_isalpha, "", 0, NULL },
	{ "isdigit", s_isdigit, "", 0, NULL },
	{ "isdecimal", s_isdigit, "", 0, NULL },
	{ "isnumeric", s_isdigit, "", 0, NULL },
	{ "isalnum", s_isalnum, "", 0, NULL },
	{ "isspace", s_isspace, "", 0, NULL },
	{ "isupper", s_isupper, "", 0, NULL },
	{ "islower", s_islower, "", 0, NULL },
	{ "istitle", s_istitle, "", 0, NULL },
	{ "startswith", s_startswith, "prefix start end", 1, NULL },
	{ "endswith", s_endswith, "suffix start end", 1, NULL },
	{ "removeprefix", s_removeprefix, "prefix", 1, NULL },
	{ "removesuffix", s_removesuffix, "suffix", 1, NULL },
	{ "find", s_find, "sub start end", 1, NULL },
	{ "rfind", s_rfind, "sub start end", 1, NULL },
	{ "index", s_index, "sub start end", 1, NULL },
	{ "rindex", s_rindex, "sub start end", 1, NULL },
	{ "count", s_count, "sub start end", 1, NULL },
	{ "replace", s_replace, "old new count", 2, NULL },
	{ "split", s_split, "sep maxsplit", 0, NULL },
	{ "rsplit", s_rsplit, "sep maxsplit", 0, NULL },
	{ "splitlines", s_splitlines, "keepends", 0, NULL },
	{ "partition", s_partition, "sep", 1, NULL },
	{ "rpartition", s_rpartition, "sep", 1, NULL },
	{ "join", s_join, "iterable", 1, NULL },
	{ "ljust", s_ljust, "width", 1, NULL },
	{ "rjust", s_rjust, "width", 1, NULL },
	{ "center", s_center, "width", 1, NULL },
	{ "zfill", s_zfill, "width", 1, NULL },
	{ "format", NULL, NULL, 0, s_format },
};

static const struct tpl_function of_dict[] = {
	{ "keys", d_keys, "", 0, NULL },
	{ "values", d_values, "", 0, NULL },
	{ "items", d_items, "", 0, NULL },
	{ "get", d_get, "key default", 1, NULL },
	{ "copy", same_again, "", 0, NULL },
};

static const struct tpl_function of_list[] = {
	{ "index", l_index, "value", 1, NULL },
	{ "count", l_count, "value", 1, NULL },
	{ "copy", same_again, "", 0, NULL },
};

const struct tpl_function *tpl_find_method(struct tpl_val of, const struct tpl_str *name)
{
	switch (of.kind) {
	case TPL_STR: return tpl_in_table(of_str, sizeof(of_str) / sizeof(of_str[0]), name->p, name->len);
	case TPL_DICT: return tpl_in_table(of_dict, sizeof(of_dict) / sizeof(of_dict[0]), name->p, name->len);
	case TPL_LIST:
		if (of.u.l->flavour <= TPL_TUPLE)
			return tpl_in_table(of_list, sizeof(of_list) / sizeof(of_list[0]), name->p, name->len);
		return NULL;
	default: return NULL;
	}
}
