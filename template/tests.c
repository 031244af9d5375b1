/* SPDX-License-Identifier: MIT */
/* Owns: what stands after "is". Does not own: filters that choose by them (filters_seq.c). */
#include "template/tree.h"

#include <errno.h>

#define TEST(id) static struct tpl_val id(struct tpl_run *r, struct tpl_val in, const struct tpl_val *const *v)
#define KIND_TEST(id, expr) \
	TEST(id) \
	{ \
		(void)r; \
		(void)in; \
		(void)v; \
		return tpl_bool(expr); \
	}

KIND_TEST(is_defined, !tpl_is(in, TPL_UNDEF))
KIND_TEST(is_undefined, tpl_is(in, TPL_UNDEF))
KIND_TEST(is_none, tpl_is(in, TPL_NONE))
KIND_TEST(is_boolean, tpl_is(in, TPL_BOOL))
KIND_TEST(is_true, tpl_is(in, TPL_BOOL) && in.u.b)
KIND_TEST(is_false, tpl_is(in, TPL_BOOL) && !in.u.b)
KIND_TEST(is_integer, tpl_is(in, TPL_INT))
KIND_TEST(is_float, tpl_is(in, TPL_FLOAT))
KIND_TEST(is_number, tpl_is(in, TPL_INT) || tpl_is(in, TPL_FLOAT) || tpl_is(in, TPL_BOOL))
KIND_TEST(is_string, tpl_is(in, TPL_STR))
KIND_TEST(is_mapping, tpl_is(in, TPL_DICT))
KIND_TEST(is_callable, tpl_is(in, TPL_MACRO) || tpl_is(in, TPL_METHOD) || tpl_is(in, TPL_FUNCTION))
KIND_TEST(is_iterable, tpl_is(in, TPL_STR) || tpl_is(in, TPL_LIST) || tpl_is(in, TPL_DICT) || tpl_is(in, TPL_UNDEF))
KIND_TEST(is_sequence, tpl_is(in, TPL_STR) || tpl_is(in, TPL_DICT) || tpl_is(in, TPL_UNDEF) ||
			       (tpl_is(in, TPL_LIST) && (in.u.l->flavour <= TPL_TUPLE || in.u.l->flavour == TPL_RANGE)))
KIND_TEST(is_lower, tpl_all_of(tpl_to_str(r, in), TPL_IS_LOWER))
KIND_TEST(is_upper, tpl_all_of(tpl_to_str(r, in), TPL_IS_UPPER))
KIND_TEST(is_escaped, false)

TEST(is_eq)
{
	return tpl_bool(tpl_same(r, in, *v[0]));
}

TEST(is_ne)
{
	return tpl_bool(!tpl_same(r, in, *v[0]));
}

TEST(is_lt)
{
	return tpl_bool(tpl_order(r, in, *v[0]) < 0);
}

TEST(is_le)
{
	return tpl_bool(tpl_order(r, in, *v[0]) <= 0);
}

TEST(is_gt)
{
	return tpl_bool(tpl_order(r, in, *v[0]) == 1);
}

TEST(is_ge)
{
	int o = tpl_order(r, in, *v[0]);

	return tpl_bool(o == 0 || o == 1);
}

TEST(is_in)
{
	return tpl_bool(tpl_within(r, in, *v[0]));
}

TEST(is_sameas)
{
	bool plain = in.kind <= TPL_FLOAT;

	return tpl_bool(in.kind == v[0]->kind && (plain ? tpl_same(r, in, *v[0]) : in.u.d == v[0]->u.d));
}

static struct tpl_val rest_is(struct tpl_run *r, struct tpl_val in, struct tpl_val by, int64_t want)
{
	return tpl_bool(tpl_same(r, tpl_arith(r, OP_MOD, in, by), tpl_int(want)));
}

TEST(is_even)
{
	(void)v;
	return rest_is(r, in, tpl_int(2), 0);
}

TEST(is_odd)
{
	(void)v;
	return rest_is(r, in, tpl_int(2), 1);
}

TEST(is_divisible)
{
	return rest_is(r, in, *v[0], 0);
}

TEST(is_filter)
{
	(void)r;
	(void)v;
	return tpl_bool(tpl_is(in, TPL_STR) && tpl_find_filter(in.u.s));
}

TEST(is_test)
{
	(void)r;
	(void)v;
	return tpl_bool(tpl_is(in, TPL_STR) && tpl_find_test(in.u.s));
}

static const struct tpl_function tests[] = {
	{ "defined", is_defined, "", 0, NULL },	    { "undefined", is_undefined, "", 0, NULL },
	{ "none", is_none, "", 0, NULL },	    { "boolean", is_boolean, "", 0, NULL },
	{ "true", is_true, "", 0, NULL },	    { "false", is_false, "", 0, NULL },
	{ "integer", is_integer, "", 0, NULL },	    { "float", is_float, "", 0, NULL },
	{ "number", is_number, "", 0, NULL },	    { "string", is_string, "", 0, NULL },
	{ "mapping", is_mapping, "", 0, NULL },	    { "callable", is_callable, "", 0, NULL },
	{ "iterable", is_iterable, "", 0, NULL },   { "sequence", is_sequence, "", 0, NULL },
	{ "lower", is_lower, "", 0, NULL },	    { "upper", is_upper, "", 0, NULL },
	{ "escaped", is_escaped, "", 0, NULL },	    { "sameas", is_sameas, "other", 1, NULL },
	{ "even", is_even, "", 0, NULL },	    { "odd", is_odd, "", 0, NULL },
	{ "divisibleby", is_divisible, "num", 1, NULL }, { "in", is_in, "seq", 1, NULL },
	{ "eq", is_eq, "other", 1, NULL },	    { "equalto", is_eq, "other", 1, NULL },
	{ "==", is_eq, "other", 1, NULL },	    { "ne", is_ne, "other", 1, NULL },
	{ "!=", is_ne, "other", 1, NULL },	    { "lt", is_lt, "other", 1, NULL },
	{ "lessthan", is_lt, "other", 1, NULL },    { "<", is_lt, "other", 1, NULL },
	{ "le", is_le, "other", 1, NULL },	    { "<=", is_le, "other", 1, NULL },
	{ "gt", is_gt, "other", 1, NULL },	    { "greaterthan", is_gt, "other", 1, NULL },
	{ ">", is_gt, "other", 1, NULL },	    { "ge", is_ge, "other", 1, NULL },
	{ ">=", is_ge, "other", 1, NULL },	    { "filter", is_filter, "", 0, NULL },
	{ "test", is_test, "", 0, NULL },
};

const struct tpl_function *tpl_find_test(const struct tpl_str *name)
{
	return tpl_in_table(tests, sizeof(tests) / sizeof(tests[0]), name->p, name->len);
}

bool tpl_test(struct tpl_run *r, const struct tpl_str *name, struct tpl_val in, const struct tpl_args *a)
{
	const struct tpl_function *f = tpl_find_test(name);

	if (!f)
		tpl_fail(&r->h, -EINVAL, "no test is named '%.*s'", name->len < 60 ? (int)name->len : 60, name->p);
	return tpl_true(r, tpl_invoke(r, f, "test", in, a));
}
