/* SPDX-License-Identifier: MIT */
/*
 * Owns: values as JSON, in the form of Python's json.dumps without HTML escapes.
 * All of it counts as what came in variables: a delimiter spelt inside stays text.
 */
#include "template/value.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

struct writer {
	struct tpl_run *r;
	struct tpl_buf b;
	const struct tpl_json *how;
	unsigned level;
};

static void put(struct writer *w, const char *p, size_t n)
{
	tpl_put(w->r, &w->b, p, n, NULL, 1);
}

static void put_escape(struct writer *w, int32_t c)
{
	static const char named[] = "\"\"\\\\\bb\ff\nn\rr\tt";
	char out[16];

	for (size_t i = 0; i < sizeof(named) - 1; i += 2)
		if (c == named[i]) {
			out[0] = '\\';
			out[1] = named[i + 1];
			put(w, out, 2);
			return;
		}
	if (c > 0xffff) {
		c -= 0x10000;
		snprintf(out, sizeof(out), "\\u%04x\\u%04x", 0xd800u + ((unsigned)c >> 10), 0xdc00u + ((unsigned)c & 0x3ff));
	} else {
		snprintf(out, sizeof(out), "\\u%04x", (unsigned)c);
	}
	put(w, out, strlen(out));
}

static void put_string(struct writer *w, const struct tpl_str *s)
{
	size_t from = 0, i = 0;

	put(w, "\"", 1);
	while (i < s->len) {
		int32_t c;
		size_t n = tpl_next(s->p + i, s->len - i, &c);
		if (c < ' ' || c == '"' || c == '\\' || (w->how->ascii && c > '~')) {
			put(w, s->p + from, i - from);
			put_escape(w, c);
			from = i + n;
		}
		i += n;
	}
	put(w, s->p + from, i - from);
	put(w, "\"", 1);
}

static void put_number(struct writer *w, struct tpl_val v)
{
	char out[40];

	if (tpl_is(v, TPL_INT))
		snprintf(out, sizeof(out), "%lld", (long long)v.u.i);
	else if (!isfinite(v.u.f))
		snprintf(out, sizeof(out), "%s", isnan(v.u.f) ? "NaN" : v.u.f < 0 ? "-Infinity" : "Infinity");
	else
		tpl_float_text(v.u.f, out);
	put(w, out, strlen(out));
}

static void line(struct writer *w)
{
	if (!w->how->indent)
		return;
	put(w, "\n", 1);
	for (unsigned i = 0; i < w->level; i++)
		put(w, w->how->indent->p, w->how->indent->len);
}

static void between(struct writer *w, bool any)
{
	const struct tpl_str *c = w->how->comma;

	if (any && c)
		put(w, c->p, c->len);
	else if (any)
		put(w, ", ", w->how->indent ? 1 : 2);
	line(w);
}

static void put_value(struct writer *w, struct tpl_val v);

static void put_list(struct writer *w, const struct tpl_list *l)
{
	if (l->flavour > TPL_TUPLE)
		tpl_fail(&w->r->h, -EINVAL, "tojson of what is no list: put |list before it");
	if (!l->n) {
		put(w, "[]", 2);
		return;
	}
	put(w, "[", 1);
	w->level++;
	for (uint32_t i = 0; i < l->n; i++) {
		between(w, i);
		put_value(w, l->v[i]);
	}
	w->level--;
	line(w);
	put(w, "]", 1);
}

static void put_key(struct writer *w, struct tpl_val k)
{
	const struct tpl_str *s;

	if (tpl_is(k, TPL_STR)) {
		put_string(w, k.u.s);
		return;
	}
	if (k.kind > TPL_STR || tpl_is(k, TPL_UNDEF))
		tpl_fail(&w->r->h, -EINVAL, "tojson of a dict whose key is a %s", tpl_kind_name(k));
	s = tpl_is(k, TPL_NONE) ? tpl_text(w->r, "null").u.s :
	    tpl_is(k, TPL_BOOL) ? tpl_text(w->r, k.u.b ? "true" : "false").u.s :
				  tpl_to_str(w->r, k);
	put_string(w, s);
}

struct sorted {
	struct tpl_run *r;
	const struct tpl_dict *d;
};

static int by_key(const void *a, const void *b, void *arg)
{
	const struct sorted *s = arg;

	return tpl_order(s->r, s->d->k[*(const uint32_t *)a], s->d->k[*(const uint32_t *)b]);
}

static void put_dict(struct writer *w, const struct tpl_dict *d)
{
	uint32_t *at = tpl_array(&w->r->h, d->n, sizeof(*at));
	const struct tpl_str *colon = w->how->colon;

	if (!d->n) {
		put(w, "{}", 2);
		return;
	}
	for (uint32_t i = 0; i < d->n; i++)
		at[i] = i;
	if (w->how->sort) {
		struct sorted s = { w->r, d };
		tpl_sort(w->r, at, d->n, by_key, &s);
	}
	put(w, "{", 1);
	w->level++;
	for (uint32_t i = 0; i < d->n; i++) {
		between(w, i);
		put_key(w, d->k[at[i]]);
		if (colon)
			put(w, colon->p, colon->len);
		else
			put(w, ": ", 2);
		put_value(w, d->v[at[i]]);
	}
	w->level--;
	line(w);
	put(w, "}", 1);
}

static void put_value(struct writer *w, struct tpl_val v)
{
	tpl_enter(w->r);
	switch (v.kind) {
	case TPL_NONE: put(w, "null", 4); break;
	case TPL_BOOL: put(w, v.u.b ? "true" : "false", v.u.b ? 4 : 5); break;
	case TPL_INT:
	case TPL_FLOAT: put_number(w, v); break;
	case TPL_STR: put_string(w, v.u.s); break;
	case TPL_LIST: put_list(w, v.u.l); break;
	case TPL_DICT: put_dict(w, v.u.d); break;
	default: tpl_fail(&w->r->h, -EINVAL, "tojson of a %s", tpl_kind_name(v));
	}
	tpl_leave(w->r);
}

struct tpl_val tpl_to_json(struct tpl_run *r, struct tpl_val v, const struct tpl_json *how)
{
	struct writer w = { r, { 0 }, how, 0 };

	put_value(&w, v);
	return tpl_buf_val(r, &w.b);
}
