/* SPDX-License-Identifier: MIT */
/* Owns: expressions as trees, in the precedence that Jinja gives its operators. Does not own: statements (parse.c). */
#include "template/tree.h"

#include <errno.h>

typedef struct tpl_node node;

static node *literal(struct tpl_parse *p, struct tpl_val v)
{
	node *n = tpl_node_new(p, N_LITERAL, p->now.line);

	n->value = v;
	return n;
}

static node *two(struct tpl_parse *p, enum tpl_type type, node *a, node *b)
{
	node *n = tpl_node_new(p, type, a->line);

	n->a = a;
	n->b = b;
	tpl_own(p, n, a);
	tpl_own(p, n, b);
	return n;
}

/* A chain's end, to hang the next one on. */
struct chain {
	node *of, **end;
};

static struct chain chain(node *of)
{
	return (struct chain){ of, &of->kids };
}

static void hang(struct tpl_parse *p, struct chain *c, node *kid)
{
	*c->end = kid;
	c->end = &kid->next;
	tpl_own(p, c->of, kid);
}

/* ---- what stands alone ------------------------------------------------------------------ */

static node *string(struct tpl_parse *p)
{
	struct tpl_token t = p->now;
	node *n;
	char *all;

	tpl_advance(p);
	while (p->now.type == T_STRING) { /* one beside the other are one */
		if (t.len + p->now.len < t.len)
			tpl_unexpected(p, "less text");
		all = tpl_alloc(&p->h, t.len + p->now.len);
		memcpy(all, t.p, t.len);
		memcpy(all + t.len, p->now.p, p->now.len);
		t.p = all;
		t.len += p->now.len;
		tpl_advance(p);
	}
	n = literal(p, TPL_UNDEFINED);
	n->line = t.line;
	n->value = tpl_str_val(tpl_str_new(&p->h, t.p, t.len, NULL, 0));
	return n;
}

static bool word_literal(const struct tpl_parse *p, struct tpl_val *v)
{
	if (tpl_at_word(p, "true") || tpl_at_word(p, "True"))
		*v = tpl_bool(true);
	else if (tpl_at_word(p, "false") || tpl_at_word(p, "False"))
		*v = tpl_bool(false);
	else if (tpl_at_word(p, "none") || tpl_at_word(p, "None"))
		*v = TPL_NULL;
	else
		return false;
	return true;
}

static node *list(struct tpl_parse *p)
{
	node *n = tpl_node_new(p, N_LIST, p->now.line);
	struct chain c = chain(n);

	tpl_advance(p);
	while (!tpl_at_op(p, ']')) {
		if (n->kids) {
			tpl_want_op(p, ',');
			if (tpl_at_op(p, ']'))
				break;
		}
		hang(p, &c, tpl_parse_expr(p));
	}
	tpl_advance(p);
	return n;
}

static node *dict(struct tpl_parse *p)
{
	node *n = tpl_node_new(p, N_DICT, p->now.line);
	struct chain c = chain(n);

	tpl_advance(p);
	while (!tpl_at_op(p, '}')) {
		if (n->kids) {
			tpl_want_op(p, ',');
			if (tpl_at_op(p, '}'))
				break;
		}
		hang(p, &c, tpl_parse_expr(p));
		tpl_want_op(p, ':');
		hang(p, &c, tpl_parse_expr(p));
	}
	tpl_advance(p);
	return n;
}

static bool tuple_end(const struct tpl_parse *p)
{
	return p->now.type == T_VAR_END || p->now.type == T_BLOCK_END || p->now.type == T_EOF || tpl_at_op(p, ')') ||
	       tpl_at_word(p, "in") || tpl_at_word(p, "recursive");
}

static node *tuple(struct tpl_parse *p, node *(*part)(struct tpl_parse *), bool empty)
{
	node *first = NULL, *n = NULL;
	struct chain c = { NULL, NULL };
	uint32_t line = p->now.line;

	while (!tuple_end(p)) {
		node *one = part(p);
		if (n)
			hang(p, &c, one);
		else
			first = one;
		if (!tpl_at_op(p, ','))
			break;
		if (!n) {
			n = tpl_node_new(p, N_TUPLE, line);
			c = chain(n);
			hang(p, &c, one);
		}
		tpl_advance(p);
	}
	if (!first && !n) {
		if (!empty)
			tpl_unexpected(p, "an expression");
		n = tpl_node_new(p, N_TUPLE, line);
	}
	return n ? n : first;
}

node *tpl_parse_tuple(struct tpl_parse *p, bool with_if)
{
	return tuple(p, with_if ? tpl_parse_expr : tpl_parse_or, false);
}

static node *primary(struct tpl_parse *p)
{
	struct tpl_val v;
	node *n;

	switch (p->now.type) {
	case T_WORD:
		if (!word_literal(p, &v))
			return tpl_name(p);
		n = literal(p, v);
		break;
	case T_STRING: return string(p);
	case T_INT: n = literal(p, tpl_int(p->now.i)); break;
	case T_FLOAT: n = literal(p, tpl_float(p->now.f)); break;
	default:
		if (tpl_at_op(p, '['))
			return list(p);
		if (tpl_at_op(p, '{'))
			return dict(p);
		if (!tpl_take_op(p, '('))
			tpl_unexpected(p, "an expression");
		n = tuple(p, tpl_parse_expr, true);
		tpl_want_op(p, ')');
		return n;
	}
	tpl_advance(p);
	return n;
}

/* ---- what follows it ------------------------------------------------------------------------ */

static node *argument(struct tpl_parse *p)
{
	enum tpl_type type = tpl_at_op(p, '*') ? N_STAR : tpl_at_op(p, OPCODE('*', '*')) ? N_STARS : N_KEYWORD;
	node *n;

	if (type == N_KEYWORD && !(p->now.type == T_WORD && p->ahead.type == T_OP && p->ahead.op == '='))
		return tpl_parse_expr(p);
	n = tpl_node_new(p, type, p->now.line);
	if (type == N_KEYWORD) {
		n->value = tpl_str_val(tpl_str_new(&p->h, p->now.p, p->now.len, NULL, 0));
		tpl_advance(p);
	}
	tpl_advance(p);
	n->a = tpl_parse_expr(p);
	tpl_own(p, n, n->a);
	return n;
}

/* ( ... ) into n's kids: first those by place, then those by name. */
static void arguments(struct tpl_parse *p, node *n)
{
	struct chain c = chain(n);
	bool named = false;

	tpl_want_op(p, '(');
	while (!tpl_at_op(p, ')')) {
		if (n->kids) {
			tpl_want_op(p, ',');
			if (tpl_at_op(p, ')'))
				break;
		}
		node *a = argument(p);
		if (a->type != N_KEYWORD && a->type != N_STAR && a->type != N_STARS && named)
			tpl_unexpected(p, "an argument by name");
		named |= a->type == N_KEYWORD || a->type == N_STAR || a->type == N_STARS;
		hang(p, &c, a);
	}
	tpl_advance(p);
}

static node *call(struct tpl_parse *p, node *of)
{
	node *n = tpl_node_new(p, N_CALL, p->now.line);

	n->a = of;
	tpl_own(p, n, of);
	arguments(p, n);
	return n;
}

static node *bound(struct tpl_parse *p)
{
	if (tpl_at_op(p, ':') || tpl_at_op(p, ']') || tpl_at_op(p, ','))
		return tpl_node_new(p, N_NOTHING, p->now.line);
	return tpl_parse_expr(p);
}

static node *in_brackets(struct tpl_parse *p, node *of)
{
	node *first, *n;

	tpl_advance(p);
	first = bound(p);
	if (!tpl_at_op(p, ':')) {
		if (first->type == N_NOTHING)
			tpl_unexpected(p, "an index");
		n = two(p, N_ITEM, of, first);
	} else {
		struct chain c;
		n = tpl_node_new(p, N_SLICE, of->line);
		n->a = of;
		tpl_own(p, n, of);
		c = chain(n);
		hang(p, &c, first);
		for (int i = 0; i < 2; i++)
			hang(p, &c, tpl_take_op(p, ':') ? bound(p) : tpl_node_new(p, N_NOTHING, p->now.line));
	}
	tpl_want_op(p, ']');
	return n;
}

static node *after_dot(struct tpl_parse *p, node *of)
{
	node *n;

	tpl_advance(p);
	if (p->now.type == T_INT) {
		n = two(p, N_ITEM, of, literal(p, tpl_int(p->now.i)));
	} else if (p->now.type == T_WORD) {
		n = tpl_node_new(p, N_ATTR, p->now.line);
		n->a = of;
		tpl_own(p, n, of);
		n->value = tpl_str_val(tpl_str_new(&p->h, p->now.p, p->now.len, NULL, 0));
	} else {
		tpl_unexpected(p, "a name after the dot");
	}
	tpl_advance(p);
	return n;
}

static node *postfix(struct tpl_parse *p, node *n)
{
	for (;;) {
		if (tpl_at_op(p, '.'))
			n = after_dot(p, n);
		else if (tpl_at_op(p, '['))
			n = in_brackets(p, n);
		else if (tpl_at_op(p, '('))
			n = call(p, n);
		else
			return n;
	}
}

static void its_name(struct tpl_parse *p, node *n, const char *what)
{
	if (p->now.type != T_WORD)
		tpl_unexpected(p, what);
	n->value = tpl_str_val(tpl_str_new(&p->h, p->now.p, p->now.len, NULL, 0));
	tpl_advance(p);
}

node *tpl_parse_filters(struct tpl_parse *p, node *of, bool inline_first)
{
	while (inline_first || tpl_take_op(p, '|')) {
		node *n = tpl_node_new(p, N_FILTER, p->now.line);
		inline_first = false;
		its_name(p, n, "a filter's name");
		n->a = of;
		if (of)
			tpl_own(p, n, of);
		if (tpl_at_op(p, '('))
			arguments(p, n);
		of = n;
	}
	return of;
}

/* Whether a test takes what comes as its one argument, without parentheses. */
static bool bare_argument(const struct tpl_parse *p)
{
	if (p->now.type == T_WORD)
		return !tpl_at_word(p, "else") && !tpl_at_word(p, "or") && !tpl_at_word(p, "and");
	return p->now.type == T_STRING || p->now.type == T_INT || p->now.type == T_FLOAT || tpl_at_op(p, '[') ||
	       tpl_at_op(p, '{');
}

static node *test(struct tpl_parse *p, node *of)
{
	node *n = tpl_node_new(p, N_TEST, p->now.line), *inverse;
	bool negated;

	tpl_advance(p);
	negated = tpl_take_word(p, "not");
	its_name(p, n, "a test's name");
	n->a = of;
	tpl_own(p, n, of);
	if (tpl_at_op(p, '(')) {
		arguments(p, n);
	} else if (bare_argument(p)) {
		struct chain c = chain(n);
		if (tpl_at_word(p, "is"))
			tpl_unexpected(p, "one test alone");
		hang(p, &c, postfix(p, primary(p)));
	}
	if (!negated)
		return n;
	inverse = tpl_node_new(p, N_NOT, n->line);
	inverse->a = n;
	tpl_own(p, inverse, n);
	return inverse;
}

static node *filters_and_tests(struct tpl_parse *p, node *n)
{
	for (;;) {
		if (tpl_at_op(p, '|'))
			n = tpl_parse_filters(p, n, false);
		else if (tpl_at_word(p, "is"))
			n = test(p, n);
		else if (tpl_at_op(p, '('))
			n = call(p, n);
		else
			return n;
	}
}

/* ---- operators ----------------------------------------------------------------------------------- */

static node *unary(struct tpl_parse *p, bool with_filter)
{
	node *n;

	tpl_deeper(p);
	if (tpl_at_op(p, '-') || tpl_at_op(p, '+')) {
		n = tpl_node_new(p, N_SIGN, p->now.line);
		n->op = (uint8_t)p->now.op;
		tpl_advance(p);
		n->a = unary(p, false);
		tpl_own(p, n, n->a);
	} else {
		n = primary(p);
	}
	n = postfix(p, n);
	if (with_filter)
		n = filters_and_tests(p, n);
	tpl_higher(p);
	return n;
}

static node *arith(struct tpl_parse *p, enum tpl_op op, node *a, node *b)
{
	node *n = two(p, N_ARITH, a, b);

	n->op = (uint8_t)op;
	return n;
}

static node *power(struct tpl_parse *p)
{
	node *n = unary(p, true);

	while (tpl_take_op(p, OPCODE('*', '*')))
		n = arith(p, OP_POW, n, unary(p, true));
	return n;
}

static node *product(struct tpl_parse *p)
{
	node *n = power(p);

	for (;;) {
		if (tpl_take_op(p, '*'))
			n = arith(p, OP_MUL, n, power(p));
		else if (tpl_take_op(p, '/'))
			n = arith(p, OP_DIV, n, power(p));
		else if (tpl_take_op(p, OPCODE('/', '/')))
			n = arith(p, OP_FLOORDIV, n, power(p));
		else if (tpl_take_op(p, '%'))
			n = arith(p, OP_MOD, n, power(p));
		else
			return n;
	}
}

static node *concat(struct tpl_parse *p)
{
	node *first = product(p), *n;
	struct chain c;

	if (!tpl_at_op(p, '~'))
		return first;
	n = tpl_node_new(p, N_CONCAT, first->line);
	c = chain(n);
	hang(p, &c, first);
	while (tpl_take_op(p, '~'))
		hang(p, &c, product(p));
	return n;
}

static node *sum(struct tpl_parse *p)
{
	node *n = concat(p);

	for (;;) {
		if (tpl_take_op(p, '+'))
			n = arith(p, OP_ADD, n, concat(p));
		else if (tpl_take_op(p, '-'))
			n = arith(p, OP_SUB, n, concat(p));
		else
			return n;
	}
}

static int comparison(struct tpl_parse *p)
{
	static const struct {
		unsigned code;
		enum tpl_op op;
	} ops[] = { { OPCODE('=', '='), OP_EQ }, { OPCODE('!', '='), OP_NE }, { OPCODE('<', '='), OP_LE },
		    { OPCODE('>', '='), OP_GE }, { '<', OP_LT },	      { '>', OP_GT } };

	for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++)
		if (tpl_take_op(p, ops[i].code))
			return ops[i].op;
	if (tpl_take_word(p, "in"))
		return OP_IN;
	if (tpl_at_word(p, "not") && tpl_ahead_word(p, "in")) {
		tpl_advance(p);
		tpl_advance(p);
		return OP_NOT_IN;
	}
	return -1;
}

static node *compare(struct tpl_parse *p)
{
	node *first = sum(p), *n = NULL;
	struct chain c = { NULL, NULL };
	int op;

	while ((op = comparison(p)) >= 0) {
		node *o = tpl_node_new(p, N_OPERAND, p->now.line);
		o->op = (uint8_t)op;
		o->a = sum(p);
		tpl_own(p, o, o->a);
		if (!n) {
			n = tpl_node_new(p, N_COMPARE, first->line);
			n->a = first;
			tpl_own(p, n, first);
			c = chain(n);
		}
		hang(p, &c, o);
	}
	return n ? n : first;
}

static node *negation(struct tpl_parse *p)
{
	node *n;

	if (!tpl_at_word(p, "not"))
		return compare(p);
	tpl_deeper(p);
	n = tpl_node_new(p, N_NOT, p->now.line);
	tpl_advance(p);
	n->a = negation(p);
	tpl_own(p, n, n->a);
	tpl_higher(p);
	return n;
}

static node *conjunction(struct tpl_parse *p)
{
	node *n = negation(p);

	while (tpl_take_word(p, "and"))
		n = two(p, N_AND, n, negation(p));
	return n;
}

node *tpl_parse_or(struct tpl_parse *p)
{
	node *n = conjunction(p);

	while (tpl_take_word(p, "or"))
		n = two(p, N_OR, n, conjunction(p));
	return n;
}

node *tpl_parse_expr(struct tpl_parse *p)
{
	node *n;

	tpl_deeper(p);
	n = tpl_parse_or(p);
	while (tpl_take_word(p, "if")) {
		node *condition = tpl_parse_or(p);
		n = two(p, N_IF_ELSE, n, condition);
		if (tpl_take_word(p, "else")) {
			n->c = tpl_parse_expr(p);
			tpl_own(p, n, n->c);
		}
	}
	tpl_higher(p);
	return n;
}

/* ---- what can be assigned to ------------------------------------------------------------------------ */

static node *target(struct tpl_parse *p)
{
	struct tpl_val v;
	node *n;

	if (tpl_take_op(p, '(')) {
		tpl_deeper(p);
		n = tuple(p, target, false);
		tpl_higher(p);
		tpl_want_op(p, ')');
		return n;
	}
	if (p->now.type != T_WORD || word_literal(p, &v))
		tpl_unexpected(p, "a name to assign to");
	return tpl_name(p);
}

node *tpl_parse_target(struct tpl_parse *p, bool namespaces)
{
	node *n = tuple(p, target, false);

	if (n->type == N_TUPLE && !n->kids)
		tpl_unexpected(p, "a name to assign to");
	if (namespaces && n->type == N_NAME && tpl_take_op(p, '.')) {
		n->type = N_NS_ATTR;
		its_name(p, n, "a name after the dot");
	}
	return n;
}
