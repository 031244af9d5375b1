/* SPDX-License-Identifier: MIT */
/* Owns: making values and growing text. See value.h. */
#include "template/value.h"

#include <errno.h>

void tpl_out_of_steps(struct tpl_run *r)
{
	tpl_fail(&r->h, -EINVAL, "the template goes on for more than %llu steps", (unsigned long long)r->max_steps);
}

void tpl_enter(struct tpl_run *r)
{
	if (++r->depth > r->max_depth)
		tpl_fail(&r->h, -EINVAL, "nested deeper than %u levels", r->max_depth);
	tpl_work(r, 1);
}

/* ---- strings ----------------------------------------------------------------------- */

const struct tpl_str *tpl_str_new(struct tpl_heap *h, const char *p, size_t len, const uint8_t *mark, uint8_t from)
{
	struct tpl_str *s = tpl_alloc(h, sizeof(*s));

	if (len > INT32_MAX)
		tpl_fail(h, -E2BIG, "a text above 2 GiB");
	*s = (struct tpl_str){ p, mark, (uint32_t)len, tpl_chars(p, len), from };
	return s;
}

struct tpl_val tpl_str_val(const struct tpl_str *s)
{
	return (struct tpl_val){ TPL_STR, { .s = s } };
}

struct tpl_val tpl_text(struct tpl_run *r, const char *constant)
{
	return tpl_str_val(tpl_str_new(&r->h, constant, strlen(constant), NULL, 0));
}

struct tpl_val tpl_part(struct tpl_run *r, const struct tpl_str *s, size_t from, size_t len)
{
	if (!from && len == s->len)
		return tpl_str_val(s);
	tpl_work_bytes(r, len);
	return tpl_str_val(tpl_str_new(&r->h, s->p + from, len, s->mark ? s->mark + from : NULL, s->from));
}

struct tpl_val tpl_undefined(struct tpl_run *r, const char *name, size_t len)
{
	return (struct tpl_val){ TPL_UNDEF, { .s = tpl_str_new(&r->h, name, len, NULL, 0) } };
}

/* ---- lists and dicts ------------------------------------------------------------------ */

struct tpl_list *tpl_list_new(struct tpl_run *r, size_t n, enum tpl_flavour flavour)
{
	struct tpl_list *l = tpl_alloc(&r->h, sizeof(*l));

	if (n > UINT32_MAX)
		tpl_fail(&r->h, -E2BIG, "a list above 2^32 items");
	tpl_work(r, 1 + n / 4);
	*l = (struct tpl_list){ (uint32_t)n, 0, (uint8_t)flavour, tpl_array(&r->h, n, sizeof(struct tpl_val)) };
	return l;
}

struct tpl_val tpl_pair(struct tpl_run *r, struct tpl_val a, struct tpl_val b)
{
	struct tpl_list *l = tpl_list_new(r, 2, TPL_TUPLE);

	l->v[0] = a;
	l->v[1] = b;
	return tpl_list_val(l);
}

struct tpl_val tpl_dict_new(struct tpl_run *r, size_t room, enum tpl_kind kind)
{
	struct tpl_dict *d = tpl_alloc(&r->h, sizeof(*d));

	if (room > UINT32_MAX)
		tpl_fail(&r->h, -E2BIG, "a dict above 2^32 items");
	*d = (struct tpl_dict){ 0, (uint32_t)room, tpl_array(&r->h, room, sizeof(struct tpl_val)),
				tpl_array(&r->h, room, sizeof(struct tpl_val)) };
	return (struct tpl_val){ (uint8_t)kind, { .d = d } };
}

const struct tpl_val *tpl_dict_get_name(struct tpl_run *r, const struct tpl_dict *d, const struct tpl_str *name)
{
	tpl_work(r, 1 + d->n / 16);
	for (uint32_t i = 0; i < d->n; i++)
		if (tpl_is(d->k[i], TPL_STR) && d->k[i].u.s->len == name->len &&
		    !memcmp(d->k[i].u.s->p, name->p, name->len))
			return &d->v[i];
	return NULL;
}

/* Its place; d->n: there is none. */
static uint32_t place(struct tpl_run *r, const struct tpl_dict *d, struct tpl_val k)
{
	uint32_t i = 0;

	while (i < d->n && !tpl_same(r, d->k[i], k))
		i++;
	return i;
}

const struct tpl_val *tpl_dict_get(struct tpl_run *r, const struct tpl_dict *d, struct tpl_val k)
{
	uint32_t i;

	if (tpl_is(k, TPL_STR))
		return tpl_dict_get_name(r, d, k.u.s);
	i = place(r, d, k);
	return i < d->n ? &d->v[i] : NULL;
}

void tpl_dict_set(struct tpl_run *r, struct tpl_dict *d, struct tpl_val k, struct tpl_val v)
{
	uint32_t at = place(r, d, k);

	if (tpl_is(k, TPL_DICT) || (tpl_is(k, TPL_LIST) && k.u.l->flavour != TPL_TUPLE))
		tpl_fail(&r->h, -EINVAL, "a %s cannot be a key", tpl_kind_name(k));
	if (at < d->n) {
		d->v[at] = v;
		return;
	}
	if (d->n == d->cap) {
		uint32_t cap = d->cap ? d->cap * 2 : 8;
		struct tpl_val *ks = tpl_array(&r->h, cap, sizeof(*ks)), *vs = tpl_array(&r->h, cap, sizeof(*vs));
		if (d->n) {
			memcpy(ks, d->k, d->n * sizeof(*ks));
			memcpy(vs, d->v, d->n * sizeof(*vs));
		}
		d->k = ks;
		d->v = vs;
		d->cap = cap;
	}
	d->k[d->n] = k;
	d->v[d->n++] = v;
}

static struct tpl_val object(struct tpl_run *r, const json_t *j, uint8_t from)
{
	struct tpl_val v = tpl_dict_new(r, json_object_size(j), TPL_DICT);
	struct tpl_dict *d = v.u.d;
	const char *key;
	json_t *item;

	json_object_foreach((json_t *)(uintptr_t)j, key, item) {
		/* keys of an object are all different: no look-up */
		d->k[d->n] = tpl_str_val(tpl_str_new(&r->h, key, strlen(key), NULL, from));
		d->v[d->n] = tpl_from_json(r, item, from);
		d->n++;
	}
	return v;
}

static struct tpl_val array(struct tpl_run *r, const json_t *j, uint8_t from)
{
	struct tpl_list *l = tpl_list_new(r, json_array_size(j), TPL_PLAIN_LIST);

	for (uint32_t i = 0; i < l->n; i++)
		l->v[i] = tpl_from_json(r, json_array_get(j, i), from);
	return tpl_list_val(l);
}

struct tpl_val tpl_from_json(struct tpl_run *r, const json_t *j, uint8_t from)
{
	struct tpl_val v = TPL_NULL;

	tpl_enter(r);
	switch (j ? json_typeof(j) : JSON_NULL) {
	case JSON_OBJECT: v = object(r, j, from); break;
	case JSON_ARRAY: v = array(r, j, from); break;
	case JSON_STRING:
		tpl_work_bytes(r, json_string_length(j));
		v = tpl_str_val(tpl_str_new(&r->h, json_string_value(j), json_string_length(j), NULL, from));
		break;
	case JSON_INTEGER: v = tpl_int(json_integer_value(j)); break;
	case JSON_REAL: v = tpl_float(json_real_value(j)); break;
	case JSON_TRUE:
	case JSON_FALSE: v = tpl_bool(json_is_true(j)); break;
	default: break;
	}
	tpl_leave(r);
	return v;
}

/* ---- text that grows ------------------------------------------------------------------ */

static void room(struct tpl_run *r, struct tpl_buf *b, size_t n)
{
	size_t cap = b->cap ? b->cap : 64;
	char *p;
	uint8_t *m;

	if (n > r->max_output || b->len + n > r->max_output)
		tpl_fail(&r->h, -E2BIG, "the text grows above %zu bytes", r->max_output);
	if (n <= b->cap - b->len)
		return;
	while (cap - b->len < n)
		cap *= 2;
	p = tpl_alloc(&r->h, cap);
	m = tpl_alloc(&r->h, cap);
	if (b->len) {
		memcpy(p, b->p, b->len);
		memcpy(m, b->mark, b->len);
	}
	b->p = p;
	b->mark = m;
	b->cap = cap;
}

void tpl_put(struct tpl_run *r, struct tpl_buf *b, const char *p, size_t n, const uint8_t *mark, uint8_t from)
{
	if (!n)
		return;
	tpl_work_bytes(r, n);
	room(r, b, n);
	memcpy(b->p + b->len, p, n);
	if (mark)
		memcpy(b->mark + b->len, mark, n);
	else
		memset(b->mark + b->len, from, n);
	b->len += n;
}

void tpl_put_str(struct tpl_run *r, struct tpl_buf *b, const struct tpl_str *s)
{
	tpl_put(r, b, s->p, s->len, s->mark, s->from);
}

void tpl_put_part(struct tpl_run *r, struct tpl_buf *b, const struct tpl_str *s, size_t from, size_t len)
{
	tpl_put(r, b, s->p + from, len, s->mark ? s->mark + from : NULL, s->from);
}

void tpl_put_text(struct tpl_run *r, struct tpl_buf *b, const char *constant)
{
	tpl_put(r, b, constant, strlen(constant), NULL, 0);
}

struct tpl_val tpl_buf_val(struct tpl_run *r, const struct tpl_buf *b)
{
	return tpl_str_val(tpl_str_new(&r->h, b->p ? b->p : "", b->len, b->mark, 0));
}
