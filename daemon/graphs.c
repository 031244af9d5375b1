/* SPDX-License-Identifier: MIT */
/* Owns: recorded steps in JSON. See graphs.h. */
#include "daemon/graphs.h"
#include <errno.h>
#include <string.h>

enum { BUCKETS = 64 };

/* ---- status ------------------------------------------------------------------------ */

struct sums {
	json_t *prefill, *decode, *buckets;
	uint64_t bytes, replays;
};

static void add_size(json_t *list, const struct apr_graph_row *r)
{
	json_t *o, *n;
	size_t i;

	json_array_foreach (list, i, o) {
		if (json_integer_value(json_object_get(o, "rows")) != (json_int_t)r->rows)
			continue;
		n = json_object_get(o, "replays"); /* of another model, too */
		json_integer_set(n, json_integer_value(n) + (json_int_t)r->replays);
		return;
	}
	json_array_append_new(
		list, json_pack("{s:I,s:I}", "rows", (json_int_t)r->rows, "replays", (json_int_t)r->replays));
}

static json_t *bucket_row(const struct served *s, const struct apr_graph_row *r)
{
	json_t *o = json_object();

	json_object_set_new(o, "model", json_string(s->name));
	json_object_set_new(o, "kind", json_string(r->kind));
	json_object_set_new(o, "rows", json_integer((json_int_t)r->rows));
	return o;
}

static void add_model(struct sums *t, const struct served *s)
{
	struct apr_graph_row rows[BUCKETS];
	uint64_t bytes = 0;
	size_t n = apr_loaded_graphs(s->loaded, rows, BUCKETS, &bytes);

	t->bytes += bytes;
	for (size_t i = 0; i < n && i < BUCKETS; i++) {
		json_t *o = bucket_row(s, &rows[i]);
		json_object_set_new(o, "replays", json_integer((json_int_t)rows[i].replays));
		json_array_append_new(t->buckets, o);
		t->replays += rows[i].replays;
		if (!strcmp(rows[i].kind, "prefill") || !strcmp(rows[i].kind, "step"))
			add_size(t->prefill, &rows[i]);
		if (!strcmp(rows[i].kind, "decode") || !strcmp(rows[i].kind, "step"))
			add_size(t->decode, &rows[i]);
	}
}

json_t *graphs_json(const struct models *m)
{
	struct sums t = { json_array(), json_array(), json_array(), 0, 0 };
	json_t *o = json_object();

	for (uint32_t i = 0; i < m->n_rows; i++)
		add_model(&t, m->rows[i]);
	json_object_set_new(o, "prefill", t.prefill);
	json_object_set_new(o, "decode", t.decode);
	json_object_set_new(o, "bytes", json_integer((json_int_t)t.bytes));
	json_object_set_new(o, "replays", json_integer((json_int_t)t.replays));
	json_object_set_new(o, "buckets", t.buckets);
	return o;
}

/* ---- WARMUP ------------------------------------------------------------------------ */

struct warming {
	const char *kind; /* NULL: all */
	uint32_t rows;
	json_t *warmed;
	const char *why;
	char *err;
	size_t errlen;
};

static int warm_bucket(struct warming *w, const struct served *s, const struct apr_graph_row *r)
{
	double us = 0;
	int e = apr_loaded_warm(s->loaded, r->kind, r->rows, &us, w->err, w->errlen);

	if (e && e != -EOPNOTSUPP)
		return e;
	json_t *o = bucket_row(s, r);
	if (e)
		w->why = "the cpu backend prepares everything when it loads";
	else
		json_object_set_new(o, "us", json_real(us));
	json_array_append_new(w->warmed, o);
	return 0;
}

static int warm_model(struct warming *w, const struct served *s)
{
	struct apr_graph_row rows[BUCKETS];
	uint64_t bytes = 0;
	size_t n = apr_loaded_graphs(s->loaded, rows, BUCKETS, &bytes);
	int e = 0;

	for (size_t i = 0; i < n && i < BUCKETS && !e; i++)
		if (!w->kind || (rows[i].rows == w->rows && !strcmp(rows[i].kind, w->kind)))
			e = warm_bucket(w, s, &rows[i]);
	return e;
}

int graphs_warm_all(struct models *m, const char *model, const char *kind, uint32_t rows, char **reply, char *err,
		    size_t errlen)
{
	struct warming w = { .kind = kind, .rows = rows, .warmed = json_array(), .err = err, .errlen = errlen };
	struct served *all[MODELS_MAX];
	uint32_t n = 0;
	int e = 0;

	pthread_mutex_lock(&m->lock);
	for (uint32_t i = 0; i < m->n_rows; i++)
		if (!model || !strcmp(m->rows[i]->name, model))
			all[n++] = m->rows[i];
	pthread_mutex_unlock(&m->lock);
	for (uint32_t i = 0; i < n && !e; i++)
		e = warm_model(&w, all[i]);
	if (!e && ((model && !n) || (kind && !json_array_size(w.warmed)))) {
		e = -ENOENT;
		snprintf(err, errlen, n ? "there is no such bucket" : "no such model");
	}
	json_t *o = json_object();
	json_object_set_new(o, "warmed", w.warmed);
	if (w.why)
		json_object_set_new(o, "why", json_string(w.why));
	*reply = e ? NULL : json_dumps(o, JSON_COMPACT | JSON_REAL_PRECISION(9));
	json_decref(o);
	if (!e && !*reply) {
		e = -ENOMEM;
		snprintf(err, errlen, "no memory");
	}
	return e;
}
