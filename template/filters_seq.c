/* SPDX-License-Identifier: MIT */
/* Owns: filters that go through a list or a dict. Does not own: those of one value (filters.c). */
#include "template/value.h"

#include <errno.h>

#define FILTER(id) static struct tpl_val id(struct tpl_run *r, struct tpl_val in, const struct tpl_val *const *v)

/* An attribute by its path: "a.b.0", or a number. */
static struct tpl_val path(struct tpl_run *r, struct tpl_val of, struct tpl_val attr)
{
	const struct tpl_str *s;

	if (!tpl_is(attr, TPL_STR))
		return tpl_item(r, of, attr);
	s = attr.u.s;
	for (size_t at = 0; at <= s->len;) {
		const char *dot = at < s->len ? memchr(s->p + at, '.', s->len - at) : NULL;
		size_t n = dot ? (size_t)(dot - (s->p + at)) : s->len - at;
		int64_t i = 0;
		bool number = n > 0 && n < 10;
		for (size_t k = at; number && k < at + n; k++) {
			number = s->p[k] >= '0' && s->p[k] <= '9';
			i = i * 10 + s->p[k] - '0';
		}
		of = tpl_item(r, of, number ? tpl_int(i) : tpl_part(r, s, at, n));
		at += n + 1;
	}
	return of;
}

static struct tpl_val by_path(struct tpl_run *r, struct tpl_val of, const struct tpl_val *attr)
{
	return attr && !tpl_is(*attr, TPL_NONE) ? path(r, of, *attr) : of;
}

/* Texts compare without their case unless it is asked for. */
static struct tpl_val folded(struct tpl_run *r, struct tpl_val v, bool with_case)
{
	return !with_case && tpl_is(v, TPL_STR) ? tpl_recase(r, v.u.s, TPL_LOWER) : v;
}

/* ---- one of them ------------------------------------------------------------------------- */

FILTER(f_length)
{
	(void)v;
	return tpl_int((int64_t)tpl_length(r, in));
}

FILTER(f_first)
{
	(void)v;
	if (tpl_is(in, TPL_LIST) && in.u.l->flavour == TPL_ONCE) /* takes that one alone */
		return in.u.l->at < in.u.l->n ? in.u.l->v[in.u.l->at++] : TPL_UNDEFINED;
	struct tpl_list *l = tpl_walk(r, in);
	return l->n ? l->v[0] : TPL_UNDEFINED;
}

FILTER(f_last)
{
	(void)v;
	if (tpl_is(in, TPL_LIST) && in.u.l->flavour == TPL_ONCE)
		tpl_fail(&r->h, -EINVAL, "the last of what is walked through once: put |list before it");
	struct tpl_list *l = tpl_walk(r, in);
	return l->n ? l->v[l->n - 1] : TPL_UNDEFINED;
}

static struct tpl_val most(struct tpl_run *r, struct tpl_val in, const struct tpl_val *const *v, int sign)
{
	struct tpl_list *l = tpl_walk(r, in);
	bool with_case = v[0] && tpl_true(r, *v[0]);
	uint32_t best = 0;
	struct tpl_val top = TPL_UNDEFINED;

	for (uint32_t i = 0; i < l->n; i++) {
		struct tpl_val k = folded(r, by_path(r, l->v[i], v[1]), with_case);
		if (!i || tpl_order(r, k, top) == sign) {
			top = k;
			best = i;
		}
	}
	return l->n ? l->v[best] : TPL_UNDEFINED;
}

FILTER(f_min)
{
	return most(r, in, v, -1);
}

FILTER(f_max)
{
	return most(r, in, v, 1);
}

FILTER(f_sum)
{
	struct tpl_list *l = tpl_walk(r, in);
	struct tpl_val all = v[1] ? *v[1] : tpl_int(0);

	for (uint32_t i = 0; i < l->n; i++)
		all = tpl_arith(r, 0, all, by_path(r, l->v[i], v[0]));
	return all;
}

FILTER(f_join)
{
	struct tpl_list *l = tpl_walk(r, in);
	const struct tpl_str *by = v[0] ? tpl_to_str(r, *v[0]) : NULL;
	struct tpl_buf b = { 0 };

	for (uint32_t i = 0; i < l->n; i++) {
		if (i && by)
			tpl_put_str(r, &b, by);
		tpl_put_val(r, &b, by_path(r, l->v[i], v[1]));
	}
	return tpl_buf_val(r, &b);
}

/* ---- lists of lists --------------------------------------------------------------------------- */

static struct tpl_list *copy(struct tpl_run *r, const struct tpl_list *l, enum tpl_flavour flavour)
{
	struct tpl_list *to = tpl_list_new(r, l->n, flavour);

	if (l->n)
		memcpy(to->v, l->v, l->n * sizeof(*to->v));
	return to;
}

FILTER(f_list)
{
	(void)v;
	return tpl_list_val(copy(r, tpl_walk(r, in), TPL_PLAIN_LIST));
}

FILTER(f_items)
{
	(void)v;
	if (!tpl_is(in, TPL_DICT) && !tpl_is(in, TPL_UNDEF))
		tpl_fail(&r->h, -EINVAL, "items of a %s", tpl_kind_name(in));
	struct tpl_list *l = tpl_list_new(r, tpl_is(in, TPL_DICT) ? in.u.d->n : 0, TPL_ONCE);
	for (uint32_t i = 0; i < l->n; i++)
		l->v[i] = tpl_pair(r, in.u.d->k[i], in.u.d->v[i]);
	return tpl_list_val(l);
}

FILTER(f_reverse)
{
	struct tpl_buf b = { 0 };
	struct tpl_list *l, *to;

	(void)v;
	if (tpl_is(in, TPL_STR)) {
		const struct tpl_val part[3] = { TPL_NULL, TPL_NULL, tpl_int(-1) };
		l = tpl_walk(r, in);
		if (in.u.s->chars == in.u.s->len)
			return tpl_slice(r, in, part);
		for (uint32_t i = l->n; i-- > 0;)
			tpl_put_str(r, &b, l->v[i].u.s);
		return tpl_buf_val(r, &b);
	}
	l = tpl_walk(r, in);
	to = tpl_list_new(r, l->n, TPL_ONCE);
	for (uint32_t i = 0; i < l->n; i++)
		to->v[i] = l->v[l->n - 1 - i];
	return tpl_list_val(to);
}

struct sorting {
	struct tpl_run *r;
	const struct tpl_val *key;
	bool down;
};

static int by_order(const void *a, const void *b, void *arg)
{
	const struct sorting *s = arg;
	int o = tpl_order(s->r, s->key[*(const uint32_t *)a], s->key[*(const uint32_t *)b]);

	return s->down ? -o : o;
}

/* keys: l's, to sort it by */
static struct tpl_list *sorted(struct tpl_run *r, const struct tpl_list *l, const struct tpl_val *keys, bool down)
{
	struct tpl_list *to = tpl_list_new(r, l->n, TPL_PLAIN_LIST);
	uint32_t *at = tpl_array(&r->h, l->n, sizeof(*at));
	struct sorting s = { r, keys, down };

	for (uint32_t i = 0; i < l->n; i++)
		at[i] = i;
	tpl_sort(r, at, l->n, by_order, &s);
	for (uint32_t i = 0; i < l->n; i++)
		to->v[i] = l->v[at[i]];
	return to;
}

FILTER(f_sort)
{
	struct tpl_list *l = tpl_walk(r, in);
	struct tpl_val *keys = tpl_array(&r->h, l->n, sizeof(*keys));
	bool with_case = v[1] && tpl_true(r, *v[1]);

	for (uint32_t i = 0; i < l->n; i++)
		keys[i] = folded(r, by_path(r, l->v[i], v[2]), with_case);
	return tpl_list_val(sorted(r, l, keys, v[0] && tpl_true(r, *v[0])));
}

FILTER(f_dictsort)
{
	const struct tpl_str *by = v[1] ? tpl_to_str(r, *v[1]) : NULL;
	bool with_case = v[0] && tpl_true(r, *v[0]), by_value = by && tpl_eq(by, "value");
	struct tpl_val *keys;
	struct tpl_list *l;

	if (!tpl_is(in, TPL_DICT))
		tpl_fail(&r->h, -EINVAL, "dictsort of a %s", tpl_kind_name(in));
	if (by && !by_value && !tpl_eq(by, "key"))
		tpl_fail(&r->h, -EINVAL, "dictsort: by key or value");
	l = tpl_list_new(r, in.u.d->n, TPL_PLAIN_LIST);
	keys = tpl_array(&r->h, l->n, sizeof(*keys));
	for (uint32_t i = 0; i < l->n; i++) {
		l->v[i] = tpl_pair(r, in.u.d->k[i], in.u.d->v[i]);
		keys[i] = folded(r, by_value ? in.u.d->v[i] : in.u.d->k[i], with_case);
	}
	return tpl_list_val(sorted(r, l, keys, v[2] && tpl_true(r, *v[2])));
}

FILTER(f_unique)
{
	struct tpl_list *l = tpl_walk(r, in), *to = tpl_list_new(r, l->n, TPL_ONCE);
	struct tpl_val *keys = tpl_array(&r->h, l->n, sizeof(*keys));
	bool with_case = v[0] && tpl_true(r, *v[0]);

	to->n = 0;
	for (uint32_t i = 0; i < l->n; i++) {
		struct tpl_val k = folded(r, by_path(r, l->v[i], v[1]), with_case);
		uint32_t j = 0;
		while (j < to->n && !tpl_same(r, keys[j], k))
			j++;
		tpl_work(r, j);
		if (j < to->n)
			continue;
		keys[to->n] = k;
		to->v[to->n++] = l->v[i];
	}
	return tpl_list_val(to);
}

FILTER(f_batch)
{
	struct tpl_list *l = tpl_walk(r, in), *to;
	struct tpl_val filler = v[1] ? *v[1] : TPL_NULL;
	int64_t width = tpl_want_whole(r, v[0], 0);

	if (width < 1)
		tpl_fail(&r->h, -EINVAL, "batch of less than 1");
	if (width > UINT32_MAX || (v[1] && width > 100000))
		tpl_fail(&r->h, -EINVAL, "batch of more than 100000");
	to = tpl_list_new(r, (size_t)((l->n + width - 1) / width), TPL_ONCE);
	for (uint32_t i = 0; i < to->n; i++) {
		uint32_t from = i * (uint32_t)width, n = l->n - from < width ? l->n - from : (uint32_t)width;
		struct tpl_list *one = tpl_list_new(r, tpl_is(filler, TPL_NONE) ? n : (size_t)width, TPL_PLAIN_LIST);
		for (uint32_t k = 0; k < one->n; k++)
			one->v[k] = k < n ? l->v[from + k] : filler;
		to->v[i] = tpl_list_val(one);
	}
	return tpl_list_val(to);
}

/* Pairs of a value and what has it, in the value's order. */
FILTER(f_groupby)
{
	struct tpl_list *l = tpl_walk(r, in), *to = tpl_list_new(r, l->n, TPL_PLAIN_LIST), *in_order;
	struct tpl_val *keys = tpl_array(&r->h, l->n, sizeof(*keys));
	bool with_case = v[2] && tpl_true(r, *v[2]);
	uint32_t from = 0;

	for (uint32_t i = 0; i < l->n; i++) {
		struct tpl_val k = by_path(r, l->v[i], v[0]);
		keys[i] = folded(r, tpl_is(k, TPL_UNDEF) && v[1] ? *v[1] : k, with_case);
	}
	struct tpl_list key_list = { l->n, 0, TPL_PLAIN_LIST, keys };
	in_order = sorted(r, l, keys, false);
	key_list.v = sorted(r, &key_list, keys, false)->v;
	to->n = 0;
	while (from < l->n) {
		uint32_t end = from + 1;
		while (end < l->n && tpl_same(r, key_list.v[end], key_list.v[from]))
			end++;
		struct tpl_list *one = tpl_list_new(r, end - from, TPL_PLAIN_LIST);
		memcpy(one->v, in_order->v + from, one->n * sizeof(*one->v));
		struct tpl_val name = by_path(r, one->v[0], v[0]);
		to->v[to->n++] = tpl_pair(r, tpl_is(name, TPL_UNDEF) && v[1] ? *v[1] : name, tpl_list_val(one));
		from = end;
	}
	return tpl_list_val(to);
}

/* ---- by another filter or test ------------------------------------------------------------------ */

static const struct tpl_val *kwarg(const struct tpl_args *a, const char *name)
{
	for (uint32_t i = 0; i < a->n_kw; i++)
		if (tpl_eq(a->kw[i].name, name))
			return &a->kw[i].v;
	return NULL;
}

static const struct tpl_str *name_at(struct tpl_run *r, const struct tpl_args *a, uint32_t i, const char *what)
{
	if (i >= a->n || !tpl_is(a->pos[i], TPL_STR))
		tpl_fail(&r->h, -EINVAL, "%s wants a name", what);
	return a->pos[i].u.s;
}

/* These filters ask first whether there is anything at all: none has no items, but is no error. */
static struct tpl_list *through(struct tpl_run *r, struct tpl_val v)
{
	return tpl_walk(r, tpl_true(r, v) ? v : TPL_UNDEFINED);
}

static struct tpl_val f_map(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a)
{
	struct tpl_list *l = through(r, in), *to = tpl_list_new(r, l->n, TPL_ONCE);
	const struct tpl_val *attr = a->n ? NULL : kwarg(a, "attribute"), *none = kwarg(a, "default");
	const struct tpl_args rest = { a->n ? a->pos + 1 : NULL, a->kw, a->n ? a->n - 1 : 0, a->n_kw };
	const struct tpl_str *name = attr ? NULL : name_at(r, a, 0, "map");

	for (uint32_t i = 0; i < l->n; i++) {
		if (!attr) {
			to->v[i] = tpl_filter(r, name, l->v[i], &rest);
			continue;
		}
		to->v[i] = path(r, l->v[i], *attr);
		if (none && tpl_is(to->v[i], TPL_UNDEF))
			to->v[i] = *none;
	}
	return tpl_list_val(to);
}

static struct tpl_val choose(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a, bool want, bool by_attr)
{
	struct tpl_list *l = through(r, in), *to = tpl_list_new(r, l->n, TPL_ONCE);
	uint32_t off = by_attr;
	struct tpl_args rest = { NULL, a->kw, 0, a->n_kw };
	const struct tpl_str *test = NULL;

	if (by_attr && !a->n)
		tpl_fail(&r->h, -EINVAL, "selectattr wants an attribute's name");
	if (a->n > off) {
		test = name_at(r, a, off, "select");
		rest.pos = a->pos + off + 1;
		rest.n = a->n - off - 1;
	}
	to->n = 0;
	for (uint32_t i = 0; i < l->n; i++) {
		struct tpl_val x = by_attr ? path(r, l->v[i], a->pos[0]) : l->v[i];
		if ((test ? tpl_test(r, test, x, &rest) : tpl_true(r, x)) == want)
			to->v[to->n++] = l->v[i];
	}
	return tpl_list_val(to);
}

static struct tpl_val f_select(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a)
{
	return choose(r, in, a, true, false);
}

static struct tpl_val f_reject(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a)
{
	return choose(r, in, a, false, false);
}

static struct tpl_val f_selectattr(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a)
{
	return choose(r, in, a, true, true);
}

static struct tpl_val f_rejectattr(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a)
{
	return choose(r, in, a, false, true);
}

static const struct tpl_function filters[] = {
	{ "batch", f_batch, "linecount fill_with", 1, NULL },
	{ "count", f_length, "", 0, NULL },
	{ "dictsort", f_dictsort, "case_sensitive by reverse", 0, NULL },
	{ "first", f_first, "", 0, NULL },
	{ "groupby", f_groupby, "attribute default case_sensitive", 1, NULL },
	{ "items", f_items, "", 0, NULL },
	{ "join", f_join, "d attribute", 0, NULL },
	{ "last", f_last, "", 0, NULL },
	{ "length", f_length, "", 0, NULL },
	{ "list", f_list, "", 0, NULL },
	{ "map", NULL, NULL, 0, f_map },
	{ "max", f_max, "case_sensitive attribute", 0, NULL },
	{ "min", f_min, "case_sensitive attribute", 0, NULL },
	{ "reject", NULL, NULL, 0, f_reject },
	{ "rejectattr", NULL, NULL, 0, f_rejectattr },
	{ "reverse", f_reverse, "", 0, NULL },
	{ "select", NULL, NULL, 0, f_select },
	{ "selectattr", NULL, NULL, 0, f_selectattr },
	{ "sort", f_sort, "reverse case_sensitive attribute", 0, NULL },
	{ "sum", f_sum, "attribute start", 0, NULL },
	{ "unique", f_unique, "case_sensitive attribute", 0, NULL },
};

const struct tpl_function *tpl_find_seq_filter(const struct tpl_str *name)
{
	return tpl_in_table(filters, sizeof(filters) / sizeof(filters[0]), name->p, name->len);
}
