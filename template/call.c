/* SPDX-License-Identifier: MIT */
/*
 * Owns: arguments and calls, loop's attributes, the functions that a template finds
 * (range, namespace, raise_exception, ...), and a rendering from its beginning.
 */
#include "template/tree.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

typedef struct tpl_node node;

/* ---- arguments ------------------------------------------------------------------------ */

static void count(struct tpl_run *r, const node *list, struct tpl_val *spread, uint32_t *n, uint32_t *n_kw)
{
	uint32_t i = 0;

	for (const node *k = list; k; k = k->next) {
		if (k->type == N_STAR) {
			spread[i] = tpl_list_val(tpl_walk(r, tpl_eval(r, k->a)));
			*n += spread[i++].u.l->n;
		} else if (k->type == N_STARS) {
			spread[i] = tpl_eval(r, k->a);
			if (!tpl_is(spread[i], TPL_DICT))
				tpl_fail(&r->h, -EINVAL, "** of a %s", tpl_kind_name(spread[i]));
			*n_kw += spread[i++].u.d->n;
		} else {
			++*(k->type == N_KEYWORD ? n_kw : n);
		}
	}
}

static void add_kw(struct tpl_run *r, struct tpl_args *a, struct tpl_val name, struct tpl_val v)
{
	if (!tpl_is(name, TPL_STR))
		tpl_fail(&r->h, -EINVAL, "an argument's name is a %s", tpl_kind_name(name));
	a->kw[a->n_kw++] = (struct tpl_kwarg){ name.u.s, v };
}

struct tpl_args tpl_args_of(struct tpl_run *r, const node *list)
{
	struct tpl_args a = { 0 };
	uint32_t n = 0, n_kw = 0, all = 0, i = 0;
	struct tpl_val *spread;

	if (!list)
		return a;
	for (const node *k = list; k; k = k->next)
		all++;
	spread = tpl_array(&r->h, all, sizeof(*spread));
	count(r, list, spread, &n, &n_kw);
	a.pos = tpl_array(&r->h, n, sizeof(*a.pos));
	a.kw = tpl_array(&r->h, n_kw, sizeof(*a.kw));
	tpl_work(r, (n + n_kw) / 4);
	for (const node *k = list; k; k = k->next) {
		struct tpl_val s;
		if (k->type == N_KEYWORD) {
			add_kw(r, &a, k->value, tpl_eval(r, k->a));
			continue;
		}
		if (k->type != N_STAR && k->type != N_STARS) {
			a.pos[a.n++] = tpl_eval(r, k);
			continue;
		}
		s = spread[i++];
		for (uint32_t j = 0; k->type == N_STAR && j < s.u.l->n; j++)
			a.pos[a.n++] = s.u.l->v[j];
		for (uint32_t j = 0; k->type == N_STARS && j < s.u.d->n; j++)
			add_kw(r, &a, s.u.d->k[j], s.u.d->v[j]);
	}
	return a;
}

/* Which parameter a name is in a list of words; -1 none. */
static int param_of(const char *params, const struct tpl_str *name)
{
	int i = 0;

	for (const char *p = params; *p; i++) {
		size_t n = strcspn(p, " ");
		if (n == name->len && !memcmp(p, name->p, n))
			return i;
		p += n + (p[n] == ' ');
	}
	return -1;
}

static uint32_t n_params(const char *params)
{
	uint32_t n = *params != 0;

	for (; *params; params++)
		n += *params == ' ';
	return n;
}

struct tpl_val tpl_invoke(struct tpl_run *r, const struct tpl_function *f, const char *what, struct tpl_val in,
			  const struct tpl_args *a)
{
	const struct tpl_val *v[TPL_PARAMS_MAX] = { NULL };
	uint32_t n = 0, need;

	tpl_work(r, 1);
	if (!f->params)
		return f->raw(r, in, a);
	n = n_params(f->params);
	if (a->n > n)
		tpl_fail(&r->h, -EINVAL, "%s %s takes at most %u arguments", what, f->name, n);
	for (uint32_t i = 0; i < a->n; i++)
		v[i] = &a->pos[i];
	for (uint32_t i = 0; i < a->n_kw; i++) {
		const struct tpl_str *name = a->kw[i].name;
		int at = param_of(f->params, name);
		if (at < 0 || v[at])
			tpl_fail(&r->h, -EINVAL, "%s %s: argument '%.*s' %s", what, f->name, (int)name->len, name->p,
				 at < 0 ? "is not known" : "comes twice");
		v[at] = &a->kw[i].v;
	}
	for (need = 0; need < f->need; need++)
		if (!v[need])
			tpl_fail(&r->h, -EINVAL, "%s %s wants %u arguments", what, f->name, f->need);
	return f->fn(r, in, v);
}

/* ---- macros -------------------------------------------------------------------------------- */

struct passing {
	const struct tpl_args *a;
	bool *used; /* of the named ones */
};

static bool named(struct passing *p, const struct tpl_str *name, struct tpl_val *v)
{
	for (uint32_t i = 0; i < p->a->n_kw; i++)
		if (p->a->kw[i].name->len == name->len && !memcmp(p->a->kw[i].name->p, name->p, name->len)) {
			*v = p->a->kw[i].v;
			p->used[i] = true;
			return true;
		}
	return false;
}

/* What no parameter took: varargs and kwargs, where the macro's text names them. */
static void left_over(struct tpl_run *r, const struct tpl_macro *m, struct passing *p, uint32_t taken)
{
	struct tpl_list *more = tpl_list_new(r, p->a->n > taken ? p->a->n - taken : 0, TPL_TUPLE);
	struct tpl_val kw = tpl_dict_new(r, 0, TPL_DICT);

	for (uint32_t i = 0; i < more->n; i++)
		more->v[i] = p->a->pos[taken + i];
	for (uint32_t i = 0; i < p->a->n_kw; i++)
		if (!p->used[i])
			tpl_dict_set(r, kw.u.d, tpl_str_val(p->a->kw[i].name), p->a->kw[i].v);
	if ((more->n && !(m->node->op & TPL_NAMES_VARARGS)) || (kw.u.d->n && !(m->node->op & TPL_NAMES_KWARGS)))
		tpl_fail(&r->h, -EINVAL, "the macro does not take so many arguments, or not by this name");
	tpl_bind(r, r->t->s_varargs, tpl_list_val(more));
	tpl_bind(r, r->t->s_kwargs, kw);
}

static void pass(struct tpl_run *r, const struct tpl_macro *m, const struct tpl_args *a)
{
	struct passing p = { a, tpl_array(&r->h, a->n_kw, sizeof(bool)) };
	uint32_t i = 0;

	for (const node *k = m->node->alt; k; k = k->next, i++) {
		struct tpl_val v = { TPL_UNDEF, { .s = k->value.u.s } }, twice;
		if (i < a->n) {
			v = a->pos[i];
			if (named(&p, k->value.u.s, &twice))
				tpl_fail(&r->h, -EINVAL, "argument '%.*s' comes twice", (int)k->value.u.s->len, k->value.u.s->p);
		} else if (!named(&p, k->value.u.s, &v) && k->a) {
			v = tpl_eval(r, k->a);
		}
		tpl_bind(r, k->sym, v);
	}
	left_over(r, m, &p, i);
}

struct tpl_val tpl_call_macro(struct tpl_run *r, const struct tpl_macro *m, const struct tpl_args *a,
			      const struct tpl_val *caller)
{
	struct tpl_frame *was = r->frame, *own = tpl_alloc(&r->h, sizeof(*own));
	struct tpl_buf b = { 0 }, *out = r->out;

	tpl_enter(r);
	*own = (struct tpl_frame){ m->home, NULL };
	r->frame = own;
	pass(r, m, a);
	if (m->node->type == N_MACRO)
		tpl_bind(r, r->t->s_caller, caller ? *caller : TPL_UNDEFINED);
	r->out = &b;
	tpl_exec(r, m->node->kids);
	r->out = out;
	r->frame = was;
	tpl_leave(r);
	return tpl_buf_val(r, &b);
}

struct tpl_val tpl_call(struct tpl_run *r, struct tpl_val fn, const struct tpl_args *a)
{
	switch (fn.kind) {
	case TPL_MACRO: return tpl_call_macro(r, fn.u.macro, a, NULL);
	case TPL_METHOD: return tpl_invoke(r, fn.u.method->fn, "method", fn.u.method->of, a);
	case TPL_FUNCTION: return tpl_invoke(r, fn.u.fn, "function", TPL_UNDEFINED, a);
	case TPL_LOOP:
		if (a->n != 1 || a->n_kw)
			tpl_fail(&r->h, -EINVAL, "loop(...) wants one argument");
		return tpl_call_loop(r, fn.u.loop, a->pos[0]);
	case TPL_UNDEF:
		tpl_fail(&r->h, -EINVAL, "'%.*s' is undefined, and called", fn.u.s ? (int)fn.u.s->len : 1,
			 fn.u.s ? fn.u.s->p : "?");
	default: tpl_fail(&r->h, -EINVAL, "a %s is called", tpl_kind_name(fn));
	}
}

/* ---- loop -------------------------------------------------------------------------------------- */

static struct tpl_val loop_cycle(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a)
{
	if (!a->n)
		tpl_fail(&r->h, -EINVAL, "loop.cycle of nothing");
	return a->pos[in.u.loop->i % a->n];
}

static struct tpl_val loop_changed(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a)
{
	struct tpl_loop *l = in.u.loop;
	struct tpl_list *now = tpl_list_new(r, a->n, TPL_TUPLE);
	bool changed;

	for (uint32_t i = 0; i < a->n; i++)
		now->v[i] = a->pos[i];
	changed = !l->has_seen || !tpl_same(r, l->seen, tpl_list_val(now));
	l->seen = tpl_list_val(now);
	l->has_seen = true;
	return tpl_bool(changed);
}

static const struct tpl_function loop_methods[] = {
	{ "cycle", NULL, NULL, 0, loop_cycle },
	{ "changed", NULL, NULL, 0, loop_changed },
};

struct tpl_val tpl_loop_attr(struct tpl_run *r, struct tpl_loop *l, const struct tpl_str *name)
{
	const struct tpl_function *f;
	struct tpl_bound *m;

	if (tpl_eq(name, "index"))
		return tpl_int((int64_t)l->i + 1);
	if (tpl_eq(name, "index0"))
		return tpl_int(l->i);
	if (tpl_eq(name, "revindex"))
		return tpl_int((int64_t)l->n - l->i);
	if (tpl_eq(name, "revindex0"))
		return tpl_int((int64_t)l->n - l->i - 1);
	if (tpl_eq(name, "first"))
		return tpl_bool(!l->i);
	if (tpl_eq(name, "last"))
		return tpl_bool(l->i + 1 == l->n);
	if (tpl_eq(name, "length"))
		return tpl_int(l->n);
	if (tpl_eq(name, "depth") || tpl_eq(name, "depth0"))
		return tpl_int((int64_t)l->depth - (name->len == 6));
	if (tpl_eq(name, "previtem"))
		return l->i ? l->v[l->i - 1] : tpl_undefined(r, "loop.previtem", 13);
	if (tpl_eq(name, "nextitem"))
		return l->i + 1 < l->n ? l->v[l->i + 1] : tpl_undefined(r, "loop.nextitem", 13);
	f = tpl_in_table(loop_methods, sizeof(loop_methods) / sizeof(loop_methods[0]), name->p, name->len);
	if (!f)
		return tpl_undefined(r, name->p, name->len);
	m = tpl_alloc(&r->h, sizeof(*m));
	*m = (struct tpl_bound){ f, { TPL_LOOP, { .loop = l } } };
	return (struct tpl_val){ TPL_METHOD, { .method = m } };
}

/* ---- functions ------------------------------------------------------------------------------------ */

static struct tpl_val fn_range(struct tpl_run *r, struct tpl_val in, const struct tpl_val *const *v)
{
	int64_t at[3] = { 0, 0, 1 };

	(void)in;
	for (int i = 0; i < 3; i++)
		if (v[i] && !tpl_whole(*v[i], &at[v[1] ? i : 1]))
			tpl_fail(&r->h, -EINVAL, "range of a %s", tpl_kind_name(*v[i]));
	if (!at[2])
		tpl_fail(&r->h, -EINVAL, "range with a step of 0");
	uint64_t n = 0;
	if (at[2] > 0 && at[0] < at[1])
		n = ((uint64_t)at[1] - (uint64_t)at[0] - 1) / (uint64_t)at[2] + 1;
	else if (at[2] < 0 && at[0] > at[1])
		n = ((uint64_t)at[0] - (uint64_t)at[1] - 1) / (0 - (uint64_t)at[2]) + 1;
	if (n > 100000) /* as Jinja's sandbox has it */
		tpl_fail(&r->h, -EINVAL, "a range of more than 100000 numbers");
	struct tpl_list *l = tpl_list_new(r, (size_t)n, TPL_RANGE);
	for (uint32_t i = 0; i < l->n; i++)
		l->v[i] = tpl_int((int64_t)((uint64_t)at[0] + i * (uint64_t)at[2]));
	return tpl_list_val(l);
}

static struct tpl_val named_values(struct tpl_run *r, const struct tpl_args *a, enum tpl_kind kind)
{
	struct tpl_val d = tpl_dict_new(r, 0, kind);

	if (a->n > 1)
		tpl_fail(&r->h, -EINVAL, "at most one argument without a name");
	if (a->n && tpl_is(a->pos[0], TPL_DICT)) {
		const struct tpl_dict *from = a->pos[0].u.d;
		for (uint32_t i = 0; i < from->n; i++)
			tpl_dict_set(r, d.u.d, from->k[i], from->v[i]);
	} else if (a->n) {
		const struct tpl_list *pairs = tpl_walk(r, a->pos[0]);
		for (uint32_t i = 0; i < pairs->n; i++) {
			const struct tpl_list *p = tpl_walk(r, pairs->v[i]);
			if (p->n != 2)
				tpl_fail(&r->h, -EINVAL, "a dict of what is no pair");
			tpl_dict_set(r, d.u.d, p->v[0], p->v[1]);
		}
	}
	for (uint32_t i = 0; i < a->n_kw; i++)
		tpl_dict_set(r, d.u.d, tpl_str_val(a->kw[i].name), a->kw[i].v);
	return d;
}

static struct tpl_val fn_namespace(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a)
{
	(void)in;
	return named_values(r, a, TPL_NAMESPACE);
}

static struct tpl_val fn_dict(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a)
{
	(void)in;
	return named_values(r, a, TPL_DICT);
}

static struct tpl_val fn_raise(struct tpl_run *r, struct tpl_val in, const struct tpl_val *const *v)
{
	const struct tpl_str *s = tpl_to_str(r, *v[0]);

	(void)in;
	tpl_fail(&r->h, -EINVAL, "the template refuses: %.*s", s->len < 200 ? (int)s->len : 200, s->p);
}

static struct tpl_val fn_now(struct tpl_run *r, struct tpl_val in, const struct tpl_val *const *v)
{
	const struct tpl_str *f = tpl_to_str(r, *v[0]);
	char fmt[128], *out = tpl_alloc(&r->h, 512);
	time_t at = (time_t)r->now;
	struct tm tm;
	size_t n;

	(void)in;
	if (f->len >= sizeof(fmt) || memchr(f->p, 0, f->len))
		tpl_fail(&r->h, -EINVAL, "strftime_now: a format above %zu bytes", sizeof(fmt) - 1);
	memcpy(fmt, f->p, f->len);
	fmt[f->len] = 0;
	if (!localtime_r(&at, &tm))
		tpl_fail(&r->h, -EINVAL, "strftime_now: no such time");
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
	n = strftime(out, 512, fmt, &tm);
#pragma GCC diagnostic pop
	if ((!n && f->len) || !tpl_utf8_ok(out, n))
		tpl_fail(&r->h, -EINVAL, "strftime_now: nothing comes of this format");
	return tpl_str_val(tpl_str_new(&r->h, out, n, NULL, 0));
}

static const struct tpl_function functions[] = {
	{ "range", fn_range, "start stop step", 1, NULL },
	{ "namespace", NULL, NULL, 0, fn_namespace },
	{ "dict", NULL, NULL, 0, fn_dict },
	{ "raise_exception", fn_raise, "message", 1, NULL },
	{ "strftime_now", fn_now, "format", 1, NULL },
};

const struct tpl_function *tpl_in_table(const struct tpl_function *t, size_t n, const char *name, size_t len)
{
	for (size_t i = 0; i < n; i++)
		if (strlen(t[i].name) == len && !memcmp(t[i].name, name, len))
			return &t[i];
	return NULL;
}

/* ---- a rendering -------------------------------------------------------------------------------------- */

/* A role is the caller's word for who speaks. Templates write it between a delimiter's halves; a word this short and
 * plain can close no half and open none. */
static bool is_role(const struct tpl_str *s)
{
	for (uint32_t i = 0; i < s->len; i++) {
		char c = s->p[i];
		if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-'))
			return false;
	}
	return s->len <= 32;
}

static void own_roles(struct tpl_run *r, struct tpl_val messages)
{
	static const struct tpl_str role = { "role", NULL, 4, 4, 0 };

	for (uint32_t i = 0; tpl_is(messages, TPL_LIST) && i < messages.u.l->n; i++) {
		struct tpl_val m = messages.u.l->v[i];
		const struct tpl_val *v = tpl_is(m, TPL_DICT) ? tpl_dict_get_name(r, m.u.d, &role) : NULL;
		if (v && tpl_is(*v, TPL_STR) && is_role(v->u.s))
			m.u.d->v[v - m.u.d->v] = tpl_str_val(tpl_str_new(&r->h, v->u.s->p, v->u.s->len, NULL, 0));
	}
}

static void fill_globals(struct tpl_run *r, const struct apr_template_args *a)
{
	r->globals = tpl_array(&r->h, r->t->n_symbols, sizeof(*r->globals));
	for (uint32_t s = 0; s < r->t->n_symbols; s++) {
		const struct tpl_str *name = r->t->symbols[s];
		const struct tpl_function *f =
			tpl_in_table(functions, sizeof(functions) / sizeof(functions[0]), name->p, name->len);
		if (f)
			r->globals[s] = (struct tpl_val){ TPL_FUNCTION, { .fn = f } };
		for (size_t i = 0; i < a->n_vars; i++) {
			if (!tpl_eq(name, a->vars[i].name))
				continue;
			r->globals[s] = tpl_from_json(r, a->vars[i].value, !a->vars[i].own);
			if (a->vars[i].messages)
				own_roles(r, r->globals[s]);
		}
	}
}

static void render(struct tpl_run *r, const struct apr_template_args *a, struct apr_template_text *out)
{
	struct tpl_buf b = { 0 };
	struct tpl_frame top = { 0 };

	fill_globals(r, a);
	r->frame = &top;
	r->out = &b;
	tpl_exec(r, r->t->body->kids);
	r->h.line = 0;
	out->text = malloc(b.len + 1);
	out->mark = malloc(b.len + 1);
	out->len = b.len;
	if (!out->text || !out->mark)
		tpl_fail(&r->h, -ENOMEM, "out of memory");
	if (b.len) {
		memcpy(out->text, b.p, b.len);
		memcpy(out->mark, b.mark, b.len);
	}
	out->text[b.len] = 0;
	out->mark[b.len] = 0;
}

int apr_template_render(const struct apr_template *t, const struct apr_template_args *a, struct apr_template_text *out,
			char *err, size_t errlen)
{
	struct tpl_run *r = calloc(1, sizeof(*r));
	int e;

	if (!r)
		return -ENOMEM;
	*out = (struct apr_template_text){ 0 };
	r->h = (struct tpl_heap){ .limit = a->limits.memory ? a->limits.memory : APR_TEMPLATE_MEMORY,
				  .words = err,
				  .words_len = errlen };
	r->t = t;
	r->max_depth = a->limits.depth ? a->limits.depth : APR_TEMPLATE_DEPTH;
	r->max_steps = a->limits.steps ? a->limits.steps : APR_TEMPLATE_STEPS;
	r->max_output = a->limits.output ? a->limits.output : APR_TEMPLATE_OUTPUT;
	r->now = a->now;
	if (errlen)
		*err = 0;
	if (!setjmp(r->h.way_out))
		render(r, a, out);
	e = r->h.err;
	if (e)
		apr_template_text_free(out);
	tpl_blocks_free(r->h.blocks);
	free(r);
	return e;
}

void apr_template_text_free(struct apr_template_text *x)
{
	free(x->text);
	free(x->mark);
	*x = (struct apr_template_text){ 0 };
}
