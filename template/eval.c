/* SPDX-License-Identifier: MIT */
/*
 * Owns: walking the tree: expressions to values, statements to text, scopes. Does
 * not own: calls (call.c), filters and tests (their own files).
 */
#include "template/tree.h"

#include <errno.h>

typedef struct tpl_node node;

/* ---- names -------------------------------------------------------------------------- */

void tpl_bind(struct tpl_run *r, uint32_t sym, struct tpl_val v)
{
	struct tpl_binding *b = r->frame->names;

	while (b && b->sym != sym)
		b = b->next;
	if (!b) {
		b = tpl_alloc(&r->h, sizeof(*b));
		b->next = r->frame->names;
		b->sym = sym;
		r->frame->names = b;
	}
	b->v = v;
}

static struct tpl_val look_up(struct tpl_run *r, const node *n)
{
	for (const struct tpl_frame *f = r->frame; f; f = f->up)
		for (const struct tpl_binding *b = f->names; b; b = b->next) {
			tpl_work(r, 1);
			if (b->sym == n->sym)
				return b->v;
		}
	if (!tpl_is(r->globals[n->sym], TPL_UNDEF))
		return r->globals[n->sym];
	return (struct tpl_val){ TPL_UNDEF, { .s = n->value.u.s } };
}

void tpl_assign(struct tpl_run *r, const node *target, struct tpl_val v)
{
	if (target->type == N_NAME) {
		tpl_bind(r, target->sym, v);
	} else if (target->type == N_NS_ATTR) {
		node name = { .sym = target->sym };
		struct tpl_val ns = look_up(r, &name);
		if (!tpl_is(ns, TPL_NAMESPACE))
			tpl_fail(&r->h, -EINVAL, "setting an attribute of what is no namespace");
		tpl_dict_set(r, ns.u.d, target->value, v);
	} else {
		struct tpl_list *l = tpl_walk(r, v);
		uint32_t i = 0;
		tpl_enter(r);
		for (const node *k = target->kids; k; k = k->next, i++) {
			if (i >= l->n)
				tpl_fail(&r->h, -EINVAL, "fewer values than names to assign to");
			tpl_assign(r, k, l->v[i]);
		}
		tpl_leave(r);
		if (i < l->n)
			tpl_fail(&r->h, -EINVAL, "more values than names to assign to");
	}
}

static struct tpl_frame *push(struct tpl_run *r, struct tpl_frame *up)
{
	struct tpl_frame *was = r->frame, *f = tpl_alloc(&r->h, sizeof(*f));

	*f = (struct tpl_frame){ up, NULL };
	r->frame = f;
	return was;
}

/* ---- expressions ------------------------------------------------------------------------ */

static struct tpl_val list(struct tpl_run *r, const node *n)
{
	uint32_t i = 0;
	struct tpl_list *l;

	for (const node *k = n->kids; k; k = k->next)
		i++;
	l = tpl_list_new(r, i, n->type == N_TUPLE ? TPL_TUPLE : TPL_PLAIN_LIST);
	i = 0;
	for (const node *k = n->kids; k; k = k->next)
		l->v[i++] = tpl_eval(r, k);
	return tpl_list_val(l);
}

static struct tpl_val dict(struct tpl_run *r, const node *n)
{
	struct tpl_val d = tpl_dict_new(r, 0, TPL_DICT);

	for (const node *k = n->kids; k; k = k->next->next) {
		struct tpl_val key = tpl_eval(r, k);
		tpl_dict_set(r, d.u.d, key, tpl_eval(r, k->next));
	}
	return d;
}

static bool ordered(struct tpl_run *r, int op, struct tpl_val a, struct tpl_val b)
{
	int o = tpl_order(r, a, b);

	if (o == 2)
		return false;
	return op == OP_LT ? o < 0 : op == OP_LE ? o <= 0 : op == OP_GT ? o > 0 : o >= 0;
}

static struct tpl_val compare(struct tpl_run *r, const node *n)
{
	struct tpl_val a = tpl_eval(r, n->a);

	for (const node *k = n->kids; k; k = k->next) {
		struct tpl_val b = tpl_eval(r, k->a);
		bool yes;
		r->h.line = n->line;
		switch (k->op) {
		case OP_EQ: yes = tpl_same(r, a, b); break;
		case OP_NE: yes = !tpl_same(r, a, b); break;
		case OP_IN: yes = tpl_within(r, a, b); break;
		case OP_NOT_IN: yes = !tpl_within(r, a, b); break;
		default: yes = ordered(r, k->op, a, b);
		}
		if (!yes)
			return tpl_bool(false);
		a = b;
	}
	return tpl_bool(true);
}

static struct tpl_val concat(struct tpl_run *r, const node *n)
{
	struct tpl_buf b = { 0 };

	for (const node *k = n->kids; k; k = k->next)
		tpl_put_val(r, &b, tpl_eval(r, k));
	return tpl_buf_val(r, &b);
}

static struct tpl_val slice(struct tpl_run *r, const node *n)
{
	struct tpl_val of = tpl_eval(r, n->a), part[3];
	int i = 0;

	for (const node *k = n->kids; k; k = k->next)
		part[i++] = k->type == N_NOTHING ? TPL_NULL : tpl_eval(r, k);
	r->h.line = n->line;
	return tpl_slice(r, of, part);
}

static struct tpl_val item(struct tpl_run *r, const node *n)
{
	struct tpl_val of = tpl_eval(r, n->a), key = tpl_eval(r, n->b);

	r->h.line = n->line;
	return tpl_item(r, of, key);
}

static struct tpl_val attr(struct tpl_run *r, const node *n)
{
	struct tpl_val of = tpl_eval(r, n->a);

	r->h.line = n->line;
	return tpl_attr(r, of, n->value.u.s);
}

static struct tpl_val arith(struct tpl_run *r, const node *n)
{
	struct tpl_val a = tpl_eval(r, n->a), b = tpl_eval(r, n->b);

	r->h.line = n->line;
	return tpl_arith(r, n->op, a, b);
}

static struct tpl_val call(struct tpl_run *r, const node *n)
{
	struct tpl_val fn = tpl_eval(r, n->a);
	struct tpl_args a = tpl_args_of(r, n->kids);

	r->h.line = n->line;
	return tpl_call(r, fn, &a);
}

/* in: what a chain of filters at the head of a block works on; its innermost node has no operand. */
static struct tpl_val filter(struct tpl_run *r, const node *n, const struct tpl_val *in)
{
	struct tpl_val v;
	struct tpl_args a;

	tpl_enter(r);
	v = n->a ? (n->a->type == N_FILTER && in ? filter(r, n->a, in) : tpl_eval(r, n->a)) : in ? *in : TPL_UNDEFINED;
	a = tpl_args_of(r, n->kids);
	r->h.line = n->line;
	v = tpl_filter(r, n->value.u.s, v, &a);
	tpl_leave(r);
	return v;
}

static struct tpl_val test(struct tpl_run *r, const node *n)
{
	struct tpl_val v = tpl_eval(r, n->a);
	struct tpl_args a = tpl_args_of(r, n->kids);

	r->h.line = n->line;
	return tpl_bool(tpl_test(r, n->value.u.s, v, &a));
}

static struct tpl_val choose(struct tpl_run *r, const node *n)
{
	struct tpl_val v;

	switch (n->type) {
	case N_AND:
		v = tpl_eval(r, n->a);
		return tpl_true(r, v) ? tpl_eval(r, n->b) : v;
	case N_OR:
		v = tpl_eval(r, n->a);
		return tpl_true(r, v) ? v : tpl_eval(r, n->b);
	default:
		if (tpl_true(r, tpl_eval(r, n->b)))
			return tpl_eval(r, n->a);
		return n->c ? tpl_eval(r, n->c) : TPL_UNDEFINED;
	}
}

static struct tpl_val eval(struct tpl_run *r, const node *n)
{
	switch (n->type) {
	case N_LIST:
	case N_TUPLE: return list(r, n);
	case N_DICT: return dict(r, n);
	case N_ATTR: return attr(r, n);
	case N_ITEM: return item(r, n);
	case N_SLICE: return slice(r, n);
	case N_CALL: return call(r, n);
	case N_FILTER: return filter(r, n, NULL);
	case N_TEST: return test(r, n);
	case N_NOT: return tpl_bool(!tpl_true(r, tpl_eval(r, n->a)));
	case N_SIGN: return tpl_negate(r, tpl_eval(r, n->a), n->op == '-');
	case N_COMPARE: return compare(r, n);
	case N_ARITH: return arith(r, n);
	case N_CONCAT: return concat(r, n);
	default: return choose(r, n);
	}
}

struct tpl_val tpl_eval(struct tpl_run *r, const node *n)
{
	struct tpl_val v;

	if (n->type == N_LITERAL)
		return n->value;
	r->h.line = n->line;
	if (n->type == N_NAME)
		return look_up(r, n);
	tpl_enter(r);
	v = eval(r, n);
	tpl_leave(r);
	return v;
}

/* ---- statements ---------------------------------------------------------------------------- */

/* A body's text for itself. */
static struct tpl_val captured(struct tpl_run *r, const node *body)
{
	struct tpl_buf b = { 0 }, *was = r->out;

	r->out = &b;
	tpl_exec(r, body);
	r->out = was;
	return tpl_buf_val(r, &b);
}

static void one_round(struct tpl_run *r, const node *n, struct tpl_loop *loop)
{
	struct tpl_frame *was = push(r, r->frame);

	tpl_assign(r, n->a, loop->v[loop->i]);
	tpl_bind(r, r->t->s_loop, (struct tpl_val){ TPL_LOOP, { .loop = loop } });
	tpl_exec(r, n->kids);
	r->frame = was;
}

/* Those items of l for which the loop's condition holds. */
static struct tpl_list *chosen(struct tpl_run *r, const node *n, const struct tpl_list *l)
{
	struct tpl_list *some = tpl_list_new(r, l->n, TPL_PLAIN_LIST);

	some->n = 0;
	for (uint32_t i = 0; i < l->n; i++) {
		struct tpl_frame *was = push(r, r->frame);
		tpl_assign(r, n->a, l->v[i]);
		if (tpl_true(r, tpl_eval(r, n->c)))
			some->v[some->n++] = l->v[i];
		r->frame = was;
	}
	return some;
}

static void run_loop(struct tpl_run *r, const node *n, struct tpl_val items, uint32_t depth)
{
	struct tpl_list *l = tpl_walk(r, items);
	struct tpl_loop *loop;

	if (n->c)
		l = chosen(r, n, l);
	loop = tpl_array(&r->h, 1, sizeof(*loop));
	loop->v = l->v;
	loop->n = l->n;
	loop->depth = depth;
	loop->node = n->op ? n : NULL;
	loop->home = r->frame;
	for (uint32_t i = 0; i < loop->n && r->flow != TPL_BREAK; i++) {
		loop->i = i;
		r->flow = TPL_GO_ON;
		one_round(r, n, loop);
	}
	r->flow = TPL_GO_ON;
	if (!loop->n && n->alt)
		tpl_exec(r, n->alt);
}

static void for_loop(struct tpl_run *r, const node *n)
{
	run_loop(r, n, tpl_eval(r, n->b), 1);
}

struct tpl_val tpl_call_loop(struct tpl_run *r, const struct tpl_loop *l, struct tpl_val items)
{
	struct tpl_buf b = { 0 }, *out = r->out;
	struct tpl_frame *was = r->frame;

	if (!l->node)
		tpl_fail(&r->h, -EINVAL, "loop(...) of a loop that is not recursive");
	tpl_enter(r);
	r->out = &b;
	r->frame = l->home;
	run_loop(r, l->node, items, l->depth + 1);
	r->frame = was;
	r->out = out;
	tpl_leave(r);
	return tpl_buf_val(r, &b);
}

static void if_chain(struct tpl_run *r, const node *n)
{
	for (const node *k = n->kids; k; k = k->next)
		if (!k->a || tpl_true(r, tpl_eval(r, k->a))) {
			tpl_exec(r, k->kids);
			return;
		}
}

static void set_block(struct tpl_run *r, const node *n)
{
	struct tpl_frame *was = push(r, r->frame);
	struct tpl_val v = captured(r, n->kids);

	r->frame = was;
	if (n->b)
		v = filter(r, n->b, &v);
	tpl_assign(r, n->a, v);
}

static void filter_block(struct tpl_run *r, const node *n)
{
	struct tpl_frame *was = push(r, r->frame);
	struct tpl_val v = captured(r, n->kids);

	r->frame = was;
	tpl_put_val(r, r->out, filter(r, n->b, &v));
}

static struct tpl_val macro(struct tpl_run *r, const node *n)
{
	struct tpl_macro *m = tpl_alloc(&r->h, sizeof(*m));

	*m = (struct tpl_macro){ n, r->frame };
	return (struct tpl_val){ TPL_MACRO, { .macro = m } };
}

static void call_block(struct tpl_run *r, const node *n)
{
	struct tpl_val caller = macro(r, n), fn = tpl_eval(r, n->a->a);
	struct tpl_args a = tpl_args_of(r, n->a->kids);

	r->h.line = n->line;
	if (!tpl_is(fn, TPL_MACRO))
		tpl_fail(&r->h, -EINVAL, "a call block of what is no macro");
	tpl_put_val(r, r->out, tpl_call_macro(r, fn.u.macro, &a, &caller));
}

static void scope(struct tpl_run *r, const node *n)
{
	struct tpl_frame *was = push(r, r->frame);

	for (const node *s = n->alt; s; s = s->next) { /* of a with: each value is seen from outside */
		struct tpl_frame *inner = r->frame;
		r->frame = was;
		struct tpl_val v = tpl_eval(r, s->b);
		r->frame = inner;
		tpl_assign(r, s->a, v);
	}
	tpl_exec(r, n->kids);
	r->frame = was;
}

static void statement(struct tpl_run *r, const node *n)
{
	r->h.line = n->line;
	switch (n->type) {
	case N_TEXT: tpl_put_str(r, r->out, n->value.u.s); break;
	case N_PRINT: tpl_put_val(r, r->out, tpl_eval(r, n->a)); break;
	case N_FOR: for_loop(r, n); break;
	case N_IF: if_chain(r, n); break;
	case N_SET: tpl_assign(r, n->a, tpl_eval(r, n->b)); break;
	case N_SET_BLOCK: set_block(r, n); break;
	case N_MACRO: tpl_bind(r, n->sym, macro(r, n)); break;
	case N_CALL_BLOCK: call_block(r, n); break;
	case N_FILTER_BLOCK: filter_block(r, n); break;
	case N_BREAK: r->flow = TPL_BREAK; break;
	case N_CONTINUE: r->flow = TPL_CONTINUE; break;
	default: scope(r, n);
	}
}

void tpl_exec(struct tpl_run *r, const node *body)
{
	tpl_enter(r);
	for (; body && r->flow == TPL_GO_ON; body = body->next) {
		tpl_work(r, 1);
		statement(r, body);
	}
	tpl_leave(r);
}
