/* SPDX-License-Identifier: MIT */
/* Owns: truth, equality, order, arithmetic, parts of values. See value.h. */
#include "template/tree.h"

#include <errno.h>
#include <math.h>

const char *tpl_kind_name(struct tpl_val v)
{
	static const char *const names[] = { "undefined value", "None",      "bool",  "int",    "float",    "str",     "list",
					     "dict",            "namespace", "macro", "method", "function", "loop" };
	return names[v.kind];
}

bool tpl_number(struct tpl_val v, double *f)
{
	if (tpl_is(v, TPL_FLOAT))
		*f = v.u.f;
	else if (tpl_is(v, TPL_INT))
		*f = (double)v.u.i;
	else if (tpl_is(v, TPL_BOOL))
		*f = v.u.b;
	else
		return false;
	return true;
}

bool tpl_whole(struct tpl_val v, int64_t *i)
{
	if (tpl_is(v, TPL_INT))
		*i = v.u.i;
	else if (tpl_is(v, TPL_BOOL))
		*i = v.u.b;
	else
		return false;
	return true;
}

int64_t tpl_want_whole(struct tpl_run *r, const struct tpl_val *v, int64_t none)
{
	int64_t i = none;

	if (v && !tpl_is(*v, TPL_NONE) && !tpl_whole(*v, &i))
		tpl_fail(&r->h, -EINVAL, "a %s where a whole number should be", tpl_kind_name(*v));
	return i;
}

bool tpl_true(struct tpl_run *r, struct tpl_val v)
{
	(void)r;
	switch (v.kind) {
	case TPL_UNDEF:
	case TPL_NONE: return false;
	case TPL_BOOL: return v.u.b;
	case TPL_INT: return v.u.i != 0;
	case TPL_FLOAT: return v.u.f != 0; /* a NaN is true */
	case TPL_STR: return v.u.s->len != 0;
	case TPL_LIST: return v.u.l->flavour == TPL_ONCE || v.u.l->n;
	case TPL_DICT: return v.u.d->n != 0;
	default: return true;
	}
}

/* ---- equality and order ------------------------------------------------------------------ */

static bool same_lists(struct tpl_run *r, const struct tpl_list *a, const struct tpl_list *b)
{
	if (a->n != b->n || (a->flavour == TPL_TUPLE) != (b->flavour == TPL_TUPLE))
		return false;
	for (uint32_t i = 0; i < a->n; i++)
		if (!tpl_same(r, a->v[i], b->v[i]))
			return false;
	return true;
}

static bool same_dicts(struct tpl_run *r, const struct tpl_dict *a, const struct tpl_dict *b)
{
	if (a->n != b->n)
		return false;
	for (uint32_t i = 0; i < a->n; i++) {
		const struct tpl_val *other = tpl_dict_get(r, b, a->k[i]);
		if (!other || !tpl_same(r, a->v[i], *other))
			return false;
	}
	return true;
}

static bool same_str(struct tpl_run *r, const struct tpl_str *a, const struct tpl_str *b)
{
	tpl_work_bytes(r, a->len < b->len ? a->len : b->len);
	return a->len == b->len && !memcmp(a->p, b->p, a->len);
}

bool tpl_same(struct tpl_run *r, struct tpl_val a, struct tpl_val b)
{
	double x, y;
	bool same = false;

	tpl_work(r, 1);
	if (tpl_is(a, TPL_INT) && tpl_is(b, TPL_INT))
		return a.u.i == b.u.i;
	if (tpl_number(a, &x) && tpl_number(b, &y))
		return x == y;
	if (a.kind != b.kind)
		return false;
	tpl_enter(r);
	switch (a.kind) {
	case TPL_UNDEF:
	case TPL_NONE: same = true; break;
	case TPL_STR: same = same_str(r, a.u.s, b.u.s); break;
	case TPL_LIST: same = a.u.l == b.u.l || same_lists(r, a.u.l, b.u.l); break;
	case TPL_DICT: same = a.u.d == b.u.d || same_dicts(r, a.u.d, b.u.d); break;
	default: same = a.u.d == b.u.d; break;
	}
	tpl_leave(r);
	return same;
}

static int order_lists(struct tpl_run *r, const struct tpl_list *a, const struct tpl_list *b)
{
	uint32_t n = a->n < b->n ? a->n : b->n;

	for (uint32_t i = 0; i < n; i++)
		if (!tpl_same(r, a->v[i], b->v[i]))
			return tpl_order(r, a->v[i], b->v[i]);
	return a->n < b->n ? -1 : a->n > b->n;
}

int tpl_order(struct tpl_run *r, struct tpl_val a, struct tpl_val b)
{
	double x, y;
	int o;

	if (tpl_is(a, TPL_INT) && tpl_is(b, TPL_INT))
		return a.u.i < b.u.i ? -1 : a.u.i > b.u.i;
	if (tpl_number(a, &x) && tpl_number(b, &y))
		return x < y ? -1 : x > y ? 1 : x == y ? 0 : 2; /* 2: a NaN is in no order */
	if (tpl_is(a, TPL_STR) && tpl_is(b, TPL_STR)) { /* UTF-8 is in the order of its characters */
		uint32_t n = a.u.s->len < b.u.s->len ? a.u.s->len : b.u.s->len;
		tpl_work_bytes(r, n);
		o = memcmp(a.u.s->p, b.u.s->p, n);
		return o ? (o < 0 ? -1 : 1) : a.u.s->len < b.u.s->len ? -1 : a.u.s->len > b.u.s->len;
	}
	if (tpl_is(a, TPL_LIST) && tpl_is(b, TPL_LIST) && a.u.l->flavour <= TPL_TUPLE &&
	    a.u.l->flavour == b.u.l->flavour) {
		tpl_enter(r);
		o = order_lists(r, a.u.l, b.u.l);
		tpl_leave(r);
		return o;
	}
	tpl_fail(&r->h, -EINVAL, "a %s and a %s have no order", tpl_kind_name(a), tpl_kind_name(b));
}

bool tpl_within(struct tpl_run *r, struct tpl_val item, struct tpl_val of)
{
	if (tpl_is(of, TPL_STR)) {
		if (!tpl_is(item, TPL_STR))
			tpl_fail(&r->h, -EINVAL, "'in' of a str wants a str, not a %s", tpl_kind_name(item));
		return tpl_find(r, of.u.s, item.u.s, 0) != SIZE_MAX;
	}
	if (tpl_is(of, TPL_DICT))
		return tpl_dict_get(r, of.u.d, item) != NULL;
	struct tpl_list *l = tpl_walk(r, of);
	for (uint32_t i = 0; i < l->n; i++)
		if (tpl_same(r, l->v[i], item))
			return true;
	return false;
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

static _Noreturn void no_such(struct tpl_run *r, int op, struct tpl_val a, struct tpl_val b)
{
	static const char *const names[] = { "+", "-", "*", "/", "//", "%", "**" };

	if (tpl_is(a, TPL_UNDEF) || tpl_is(b, TPL_UNDEF)) {
		const struct tpl_str *s = tpl_is(a, TPL_UNDEF) ? a.u.s : b.u.s;
		tpl_fail(&r->h, -EINVAL, "'%.*s' is undefined", s ? (int)s->len : 1, s ? s->p : "?");
	}
	tpl_fail(&r->h, -EINVAL, "%s does not go with a %s and a %s", names[op], tpl_kind_name(a), tpl_kind_name(b));
}

static int64_t whole_power(struct tpl_run *r, int64_t a, int64_t n)
{
	int64_t v = 1;
	bool over = false;

	for (; n > 0 && !over; n >>= 1) {
		if (n & 1)
			over = __builtin_mul_overflow(v, a, &v);
		if (n > 1 && !over)
			over = __builtin_mul_overflow(a, a, &a);
	}
	if (over)
		tpl_fail(&r->h, -EINVAL, "a number beyond 64 bits");
	return v;
}

static int64_t floor_div(int64_t a, int64_t b)
{
	int64_t q = a / b;
	return q - (a % b && (a < 0) != (b < 0));
}

static int64_t floor_mod(int64_t a, int64_t b)
{
	int64_t m = a % b;

	return m && (m < 0) != (b < 0) ? m + b : m;
}

static struct tpl_val whole_arith(struct tpl_run *r, int op, int64_t a, int64_t b)
{
	int64_t v = 0;
	bool over = false;

	switch (op) {
	case OP_ADD: over = __builtin_add_overflow(a, b, &v); break;
	case OP_SUB: over = __builtin_sub_overflow(a, b, &v); break;
	case OP_MUL: over = __builtin_mul_overflow(a, b, &v); break;
	case OP_POW:
		if (b < 0)
			return tpl_float(pow((double)a, (double)b));
		v = whole_power(r, a, b);
		break;
	default:
		if (!b)
			tpl_fail(&r->h, -EINVAL, "division by zero");
		if (op == OP_DIV)
			return tpl_float((double)a / (double)b);
		if (a == INT64_MIN && b == -1)
			over = op == OP_FLOORDIV;
		else
			v = op == OP_FLOORDIV ? floor_div(a, b) : floor_mod(a, b);
	}
	if (over)
		tpl_fail(&r->h, -EINVAL, "a number beyond 64 bits");
	return tpl_int(v);
}

static struct tpl_val float_arith(struct tpl_run *r, int op, double a, double b)
{
	double m;

	if (b == 0 && (op == OP_DIV || op == OP_FLOORDIV || op == OP_MOD))
		tpl_fail(&r->h, -EINVAL, "division by zero");
	switch (op) {
	case OP_ADD: return tpl_float(a + b);
	case OP_SUB: return tpl_float(a - b);
	case OP_MUL: return tpl_float(a * b);
	case OP_DIV: return tpl_float(a / b);
	case OP_POW: return tpl_float(pow(a, b));
	default: break;
	}
	m = fmod(a, b);
	if (m != 0 && (m < 0) != (b < 0))
		m += b;
	else if (m == 0)
		m = copysign(0, b);
	return tpl_float(op == OP_MOD ? m : floor((a - m) / b + 0.5));
}

static struct tpl_val repeat(struct tpl_run *r, struct tpl_val v, int64_t n)
{
	if (tpl_is(v, TPL_STR)) {
		struct tpl_buf b = { 0 };
		for (; n > 0 && v.u.s->len; n--)
			tpl_put_str(r, &b, v.u.s);
		return tpl_buf_val(r, &b);
	}
	uint64_t times = n > 0 ? (uint64_t)n : 0, all;
	if (__builtin_mul_overflow(times, (uint64_t)v.u.l->n, &all) || all > UINT32_MAX)
		tpl_fail(&r->h, -E2BIG, "a list above 2^32 items");
	struct tpl_list *l = tpl_list_new(r, (size_t)all, v.u.l->flavour);
	for (uint32_t i = 0; i < l->n; i++)
		l->v[i] = v.u.l->v[i % v.u.l->n];
	return tpl_list_val(l);
}

static bool plain(struct tpl_val v)
{
	return tpl_is(v, TPL_LIST) && v.u.l->flavour <= TPL_TUPLE && v.u.l->flavour != TPL_ONCE;
}

static struct tpl_val join_two(struct tpl_run *r, struct tpl_val a, struct tpl_val b)
{
	if (tpl_is(a, TPL_STR)) {
		struct tpl_buf buf = { 0 };
		if (!a.u.s->len || !b.u.s->len)
			return a.u.s->len ? a : b;
		tpl_put_str(r, &buf, a.u.s);
		tpl_put_str(r, &buf, b.u.s);
		return tpl_buf_val(r, &buf);
	}
	struct tpl_list *l = tpl_list_new(r, (size_t)a.u.l->n + b.u.l->n, a.u.l->flavour);
	if (a.u.l->n)
		memcpy(l->v, a.u.l->v, a.u.l->n * sizeof(*l->v));
	if (b.u.l->n)
		memcpy(l->v + a.u.l->n, b.u.l->v, b.u.l->n * sizeof(*l->v));
	return tpl_list_val(l);
}

struct tpl_val tpl_arith(struct tpl_run *r, int op, struct tpl_val a, struct tpl_val b)
{
	int64_t i, k;
	double x, y;

	if (tpl_whole(a, &i) && tpl_whole(b, &k))
		return whole_arith(r, op, i, k);
	if (tpl_number(a, &x) && tpl_number(b, &y))
		return float_arith(r, op, x, y);
	if (op == OP_ADD && ((tpl_is(a, TPL_STR) && tpl_is(b, TPL_STR)) ||
			     (plain(a) && plain(b) && a.u.l->flavour == b.u.l->flavour)))
		return join_two(r, a, b);
	if (op == OP_MUL && (tpl_is(a, TPL_STR) || plain(a)) && tpl_whole(b, &k))
		return repeat(r, a, k);
	if (op == OP_MUL && (tpl_is(b, TPL_STR) || plain(b)) && tpl_whole(a, &i))
		return repeat(r, b, i);
	if (op == OP_MOD && tpl_is(a, TPL_STR)) {
		if (tpl_is(b, TPL_LIST) && b.u.l->flavour == TPL_TUPLE)
			return tpl_percent(r, a.u.s, b.u.l->v, b.u.l->n);
		return tpl_percent(r, a.u.s, &b, 1);
	}
	no_such(r, op, a, b);
}

struct tpl_val tpl_negate(struct tpl_run *r, struct tpl_val v, bool minus)
{
	int64_t i;

	if (tpl_is(v, TPL_FLOAT))
		return tpl_float(minus ? -v.u.f : v.u.f);
	if (!tpl_whole(v, &i))
		tpl_fail(&r->h, -EINVAL, "a sign before a %s", tpl_kind_name(v));
	return minus ? whole_arith(r, OP_SUB, 0, i) : tpl_int(i);
}

/* ---- parts -------------------------------------------------------------------------------------- */

static struct tpl_val char_at(struct tpl_run *r, const struct tpl_str *s, uint32_t i)
{
	size_t from = tpl_byte_of(s, i);
	int32_t c;

	tpl_work_bytes(r, from);
	return tpl_part(r, s, from, tpl_next(s->p + from, s->len - from, &c));
}

static _Noreturn void is_undefined(struct tpl_run *r, struct tpl_val v)
{
	tpl_fail(&r->h, -EINVAL, "'%.*s' is undefined", v.u.s ? (int)v.u.s->len : 1, v.u.s ? v.u.s->p : "?");
}

static struct tpl_val indexed(struct tpl_run *r, struct tpl_val of, int64_t i)
{
	int64_t n = tpl_is(of, TPL_STR) ? of.u.s->chars : of.u.l->n;

	if (i < 0)
		i += n;
	if (i < 0 || i >= n)
		return TPL_UNDEFINED;
	return tpl_is(of, TPL_STR) ? char_at(r, of.u.s, (uint32_t)i) : of.u.l->v[i];
}

static bool can_index(struct tpl_val v)
{
	return tpl_is(v, TPL_STR) || (tpl_is(v, TPL_LIST) && (v.u.l->flavour <= TPL_TUPLE || v.u.l->flavour == TPL_RANGE));
}

static struct tpl_val method_of(struct tpl_run *r, struct tpl_val of, const struct tpl_str *name)
{
	const struct tpl_function *f = tpl_find_method(of, name);
	struct tpl_bound *m;

	if (!f)
		return tpl_undefined(r, name->p, name->len);
	m = tpl_alloc(&r->h, sizeof(*m));
	*m = (struct tpl_bound){ f, of };
	return (struct tpl_val){ TPL_METHOD, { .method = m } };
}

struct tpl_val tpl_item(struct tpl_run *r, struct tpl_val of, struct tpl_val key)
{
	const struct tpl_val *v;
	int64_t i;

	if (tpl_is(of, TPL_UNDEF))
		is_undefined(r, of);
	if (tpl_is(of, TPL_DICT)) {
		v = tpl_dict_get(r, of.u.d, key);
		if (v)
			return *v;
	} else if (tpl_whole(key, &i) && can_index(of)) {
		return indexed(r, of, i);
	} else if (tpl_is(key, TPL_STR) && (tpl_is(of, TPL_NAMESPACE) || tpl_is(of, TPL_LOOP))) {
		return tpl_attr(r, of, key.u.s);
	}
	return tpl_is(key, TPL_STR) ? method_of(r, of, key.u.s) : TPL_UNDEFINED;
}

struct tpl_val tpl_attr(struct tpl_run *r, struct tpl_val of, const struct tpl_str *name)
{
	const struct tpl_val *v = NULL;

	if (tpl_is(of, TPL_UNDEF))
		is_undefined(r, of);
	if (tpl_is(of, TPL_LOOP))
		return tpl_loop_attr(r, of.u.loop, name);
	if (tpl_is(of, TPL_NAMESPACE)) {
		v = tpl_dict_get_name(r, of.u.d, name);
		return v ? *v : tpl_undefined(r, name->p, name->len);
	}
	struct tpl_val m = method_of(r, of, name); /* before the keys, as Python has it */
	if (tpl_is(m, TPL_UNDEF) && tpl_is(of, TPL_DICT))
		v = tpl_dict_get_name(r, of.u.d, name);
	return v ? *v : m;
}

/* Python's rule: bounds clipped to the sequence, negative ones from its end. */
static int64_t bound(struct tpl_run *r, struct tpl_val v, int64_t n, int64_t none, int64_t step)
{
	int64_t i, low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;

	if (tpl_is(v, TPL_NONE))
		return none;
	if (!tpl_whole(v, &i))
		tpl_fail(&r->h, -EINVAL, "a slice's bound is a %s", tpl_kind_name(v));
	if (i < 0) {
		i = i < -n ? low : i + n;
		return i < low ? low : i;
	}
	return i > high ? high : i;
}

static struct tpl_val slice_str(struct tpl_run *r, const struct tpl_str *s, int64_t from, int64_t end, int64_t step)
{
	struct tpl_buf b = { 0 };

	if (step == 1) {
		size_t i = tpl_byte_of(s, (uint32_t)from), k = from < end ? tpl_byte_of(s, (uint32_t)end) : i;
		return tpl_part(r, s, i, k - i);
	}
	for (int64_t i = from; step > 0 ? i < end : i > end;) {
		struct tpl_val c = char_at(r, s, (uint32_t)i);
		tpl_put_str(r, &b, c.u.s);
		if (__builtin_add_overflow(i, step, &i))
			break;
	}
	return tpl_buf_val(r, &b);
}

struct tpl_val tpl_slice(struct tpl_run *r, struct tpl_val of, const struct tpl_val part[3])
{
	int64_t step = 1, n = 0;

	if (!tpl_is(part[2], TPL_NONE) && (!tpl_whole(part[2], &step) || !step))
		tpl_fail(&r->h, -EINVAL, "a slice's step is a whole number and not 0");
	if (tpl_is(of, TPL_UNDEF))
		is_undefined(r, of);
	if (!can_index(of))
		tpl_fail(&r->h, -EINVAL, "a slice of a %s", tpl_kind_name(of));
	n = tpl_is(of, TPL_STR) ? of.u.s->chars : of.u.l->n;
	int64_t from = bound(r, part[0], n, step < 0 ? n - 1 : 0, step);
	int64_t end = bound(r, part[1], n, step < 0 ? -1 : n, step);
	if (tpl_is(of, TPL_STR))
		return slice_str(r, of.u.s, from, end, step);
	uint64_t count = 0;
	if (step > 0 && from < end)
		count = (uint64_t)(end - from - 1) / (uint64_t)step + 1;
	else if (step < 0 && from > end)
		count = (uint64_t)(from - end - 1) / (0 - (uint64_t)step) + 1;
	struct tpl_list *l = tpl_list_new(r, (size_t)count, of.u.l->flavour);
	for (uint32_t i = 0; i < l->n; i++)
		l->v[i] = of.u.l->v[from + (int64_t)i * step];
	return tpl_list_val(l);
}

struct tpl_list *tpl_walk(struct tpl_run *r, struct tpl_val v)
{
	struct tpl_list *l;

	switch (v.kind) {
	case TPL_UNDEF: return tpl_list_new(r, 0, TPL_PLAIN_LIST);
	case TPL_LIST:
		if (v.u.l->flavour != TPL_ONCE)
			return v.u.l;
		l = tpl_list_new(r, 0, TPL_PLAIN_LIST);
		l->v = v.u.l->v + v.u.l->at;
		l->n = v.u.l->n - v.u.l->at;
		v.u.l->at = v.u.l->n;
		return l;
	case TPL_DICT:
		l = tpl_list_new(r, 0, TPL_PLAIN_LIST);
		l->v = v.u.d->k;
		l->n = v.u.d->n;
		return l;
	case TPL_STR:
		l = tpl_list_new(r, v.u.s->chars, TPL_PLAIN_LIST);
		for (size_t i = 0, at = 0; i < l->n; i++) {
			int32_t c;
			size_t k = tpl_next(v.u.s->p + at, v.u.s->len - at, &c);
			l->v[i] = tpl_part(r, v.u.s, at, k);
			at += k;
		}
		return l;
	default: tpl_fail(&r->h, -EINVAL, "a %s has no items to go through", tpl_kind_name(v));
	}
}

size_t tpl_length(struct tpl_run *r, struct tpl_val v)
{
	switch (v.kind) {
	case TPL_UNDEF: return 0;
	case TPL_STR: return v.u.s->chars;
	case TPL_DICT: return v.u.d->n;
	case TPL_LIST:
		if (v.u.l->flavour != TPL_ONCE)
			return v.u.l->n;
		tpl_fail(&r->h, -EINVAL, "the length of what is walked through once: put |list before it");
	default: tpl_fail(&r->h, -EINVAL, "the length of a %s", tpl_kind_name(v));
	}
}

void tpl_sort(struct tpl_run *r, uint32_t *at, size_t n, int (*cmp)(const void *, const void *, void *), void *arg)
{
	uint32_t *from = at, *to = tpl_array(&r->h, n, sizeof(*to)), *swap;

	for (size_t width = 1; width < n; width *= 2) {
		for (size_t lo = 0; lo < n; lo += 2 * width) {
			size_t mid = lo + width < n ? lo + width : n, hi = mid + width < n ? mid + width : n, i = lo, k = mid;
			for (size_t o = lo; o < hi; o++) {
				tpl_work(r, 1);
				bool left = i < mid && (k == hi || cmp(&from[i], &from[k], arg) <= 0);
				to[o] = left ? from[i++] : from[k++];
			}
		}
		swap = from;
		from = to;
		to = swap;
	}
	if (from != at)
		memcpy(at, from, n * sizeof(*at));
}
