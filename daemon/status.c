/* SPDX-License-Identifier: MIT */
/*
 * Owns: what status says, as JSON. Io thread; the core's totals are read as they
 * stand. See worker.h.
 */
#include "daemon/worker.h"
#include "daemon/graphs.h"
#include "daemon/quota.h"
#include "shm/wire.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MEMORY_ROWS = 256 };

static json_t *hex(const uint8_t *b, size_t n)
{
	char text[65];

	for (size_t i = 0; i < n && i < 32; i++)
		snprintf(text + 2 * i, 3, "%02x", b[i]);
	return json_string(text);
}

static json_t *number(uint64_t v)
{
	return json_integer((json_int_t)v);
}

static uint64_t look(const uint64_t *v)
{
	return __atomic_load_n(v, __ATOMIC_RELAXED);
}

static uint32_t look32(const uint32_t *v)
{
	return __atomic_load_n(v, __ATOMIC_RELAXED);
}

static json_t *sampling(const struct apr_loaded *m)
{
	struct apr_sampling_request none = { 0 };
	struct apr_sample_params p;
	const char *field;

	memset(&p, 0, sizeof(p));
	if (apr_sampling_resolve(m, &none, &p, &field))
		return json_null();
	return json_pack("{s:f,s:I,s:f,s:f,s:f,s:f,s:f,s:i}", "temperature", (double)p.temperature, "top_k",
			 (json_int_t)p.top_k, "top_p", (double)p.top_p, "min_p", (double)p.min_p, "repeat_penalty",
			 (double)p.repeat_penalty, "frequency_penalty", (double)p.frequency_penalty, "presence_penalty",
			 (double)p.presence_penalty, "penalty_window", p.penalty_window);
}

/* What steps were measured to take, by rows: [[rows, us], ...]; bench/simulate reads it. */
static json_t *pace(const struct pace *p)
{
	json_t *decode = json_array(), *prefill = json_array();

	for (int i = 0; i < PACE_DECODE; i++)
		if (look(&p->decode[i]))
			json_array_append_new(decode, json_pack("[i,f]", 1 << i, (double)look(&p->decode[i]) * 1e-3));
	for (int i = 0; i < PACE_PREFILL; i++)
		if (look(&p->prefill[i]))
			json_array_append_new(prefill, json_pack("[i,f]", (int)pace_edge[i], (double)look(&p->prefill[i]) * 1e-3));
	return json_pack("{s:I,s:o,s:o}", "budget_us", (json_int_t)(p->budget_ns / 1000), "decode", decode, "prefill",
			 prefill);
}

static json_t *model_row(const struct served *s, const struct apr_loaded_info *i)
{
	const struct apr_model *m = apr_loaded_model(s->loaded);
	json_t *o = json_object();

	json_object_set_new(o, "name", json_string(s->name));
	json_object_set_new(o, "path", json_string(s->path));
	json_object_set_new(o, "arch", json_string(m->arch_name));
	json_object_set_new(o, "n_ctx", number(i->n_ctx));
	json_object_set_new(o, "n_vocab", number(i->n_vocab));
	json_object_set_new(o, "numerics", hex(i->numerics, 16));
	json_object_set_new(o, "route", json_string(i->route));
	json_object_set_new(o, "bytes", number(i->bytes));
	json_object_set_new(o, "equal_bits", json_boolean(i->equal_bits));
	if (i->how[0])
		json_object_set_new(o, "how", json_string(i->how));
	json_object_set_new(o, "id", number(s->id));
	json_object_set_new(o, "kv_type", json_string(i->kv_type));
	json_object_set_new(o, "weights", hex(m->weights_hash, 32));
	json_object_set_new(o, "pages_total", number(i->pages_total));
	json_object_set_new(o, "pages_free", number(i->pages_free));
	json_object_set_new(o, "pages_cached", number(i->pages_cached));
	json_object_set_new(o, "sampling", sampling(s->loaded));
	json_object_set_new(o, "state", json_string(s->leaving ? "unloading" : i->resting ? "resting" : "ready"));
	json_object_set_new(o, "resting", json_boolean(i->resting));
	json_object_set_new(o, "keep_alive_s", number(s->keep_alive / UINT64_C(1000000000)));
	json_object_set_new(o, "share_prefixes", json_string(share_names[s->share]));
	json_object_set_new(o, "prompt_tokens", number(look(&s->prompt_tokens)));
	json_object_set_new(o, "cached_tokens", number(look(&s->cached_tokens)));
	json_object_set_new(o, "pace", pace(&s->batch.pace));
	return o;
}

/* The models that the loader has before it, and the one at which it is. */
static json_t *loading(struct worker *w)
{
	json_t *all = json_array();

	pthread_mutex_lock(&w->load_lock);
	if (w->loading[0])
		json_array_append_new(all, json_string(w->loading));
	for (const struct load_job *j = w->jobs; j; j = j->next)
		if (job_is_load(j))
			json_array_append_new(all, json_string(j->name));
	pthread_mutex_unlock(&w->load_lock);
	return all;
}

/* Why the state is another one than ready; empty where it is ready. */
static json_t *state_why(const struct worker *w)
{
	if (w->state == STATE_DRAINING)
		return json_string("nothing new is taken, what runs is finished");
	if (w->state == STATE_DEGRADED && w->to_load)
		return json_sprintf("the worker died and was started again (restart %u): %u of %zu models are still to be loaded",
				    w->start->restarts, w->to_load, w->start->options->n_models);
	if (w->state == STATE_DEGRADED) {
		json_t *why = json_sprintf("after restart %u: %s", w->start->restarts, w->load_words);
		return why ? why : json_string("a model was not loaded after a restart: the log says why"); /* no UTF-8 */
	}
	if (w->state != STATE_READY)
		return json_sprintf("%u of %zu models are still to be loaded", w->to_load, w->start->options->n_models);
	return json_string("");
}

static void memory_row(json_t *all, const char *purpose, const char *where, uint64_t bytes, const char *model)
{
	json_t *o = json_object();

	json_object_set_new(o, "purpose", json_string(purpose));
	json_object_set_new(o, "where", json_string(where));
	json_object_set_new(o, "bytes", number(bytes));
	if (model && *model)
		json_object_set_new(o, "model", json_string(model));
	json_array_append_new(all, o);
}

static json_t *memory(struct worker *w)
{
	struct apr_memory_row *rows = calloc(MEMORY_ROWS, sizeof(*rows));
	size_t n = rows ? apr_engine_memory(w->engine, rows, MEMORY_ROWS) : 0;
	json_t *all = json_array();

	for (size_t i = 0; i < n && i < MEMORY_ROWS; i++)
		memory_row(all, rows[i].purpose, rows[i].where, rows[i].bytes, rows[i].model);
	free(rows);
	for (uint32_t i = 0; i < w->models.n_rows; i++)
		memory_row(all, "vocabulary", "shared memory", w->models.rows[i]->vocab_bytes, w->models.rows[i]->name);
	memory_row(all, "spare session regions", "shared memory", sessions_spare_bytes(&w->sessions), NULL);
	memory_row(all, "session regions", "shared memory", w->sessions.region_bytes, NULL);
	memory_row(all, "tables", "host", sizeof(struct worker), NULL);
	return all;
}

static void models(struct worker *w, json_t *o)
{
	json_t *all = json_array();
	uint64_t total = 0, unused = 0;

	pthread_mutex_lock(&w->models.lock);
	for (uint32_t i = 0; i < w->models.n_rows; i++) {
		struct apr_loaded_info info;
		apr_loaded_info(w->models.rows[i]->loaded, &info);
		total += info.pages_total;
		unused += info.pages_free;
		json_array_append_new(all, model_row(w->models.rows[i], &info));
	}
	json_object_set_new(o, "models", all);
	json_object_set_new(o, "memory", memory(w));
	json_object_set_new(o, "graphs", graphs_json(&w->models));
	pthread_mutex_unlock(&w->models.lock);
	json_object_set_new(o, "kv",
			    json_pack("{s:I,s:I}", "pages_total", (json_int_t)total, "pages_free", (json_int_t)unused));
}

static json_t *session_rows(struct worker *w, const struct identity *who)
{
	json_t *all = json_array();

	for (struct session *s = w->sessions.all; s; s = s->io_next) {
		if (who && s->who != who)
			continue;
		const uint64_t *n = s->ring.res->counters;
		char name[sizeof(s->name) + 1] = "";
		for (size_t i = 0; i < sizeof(s->name) && s->name[i]; i++) /* any bytes may have come */
			name[i] = s->name[i] >= 0x20 && s->name[i] < 0x7f ? s->name[i] : '?';
		json_t *o = json_pack(
			"{s:I,s:s,s:I,s:s,s:I,s:I,s:I,s:I,s:I,s:I}", "session", (json_int_t)s->id, "name", name, "uid",
			(json_int_t)s->who->uid, "tenant", s->who->tenant, "bytes",
			(json_int_t)s->req.size + (json_int_t)s->res.size, "sqes", (json_int_t)look(&n[APR_COUNT_SQES]),
			"cqes", (json_int_t)look(&n[APR_COUNT_CQES]), "wakes", (json_int_t)look(&n[APR_COUNT_WAKES]),
			"parked", (json_int_t)look(&n[APR_COUNT_PARKED]), "tokens",
			(json_int_t)look(&n[APR_COUNT_TOKENS]));
		json_array_append_new(all, o ? o : json_null());
	}
	return all;
}

static json_t *limits_row(const struct limits *l)
{
	return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I}", "connections", (json_int_t)l->connections, "sessions",
			 (json_int_t)l->sessions, "in_flight", (json_int_t)l->in_flight, "region_bytes",
			 (json_int_t)l->region_bytes, "kv_pages", (json_int_t)l->kv_pages, "queued_tokens",
			 (json_int_t)l->queued_tokens, "tokens_minute", (json_int_t)l->tokens_minute, "prio_max",
			 (json_int_t)l->prio_max);
}

/* One row an identity: what it uses, and what it may. */
static json_t *client_rows(struct worker *w, const struct identity *only)
{
	json_t *all = json_array();

	for (struct identity *who = w->sessions.identities; who; who = who->next) {
		if (only && who != only)
			continue;
		json_t *o = json_pack("{s:I,s:s,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I}", "uid", (json_int_t)who->uid,
				      "tenant", who->tenant, "weight", (json_int_t)who->may.weight, "connections",
				      (json_int_t)who->connections, "sessions", (json_int_t)who->sessions, "region_bytes",
				      (json_int_t)who->region_bytes, "in_flight", (json_int_t)look32(&who->in_flight), "running",
				      (json_int_t)look32(&who->running), "queued_tokens", (json_int_t)look(&who->queued_tokens),
				      "kv_pages", (json_int_t)look(&who->kv_pages), "tokens", (json_int_t)look(&who->tokens),
				      "refused", (json_int_t)look(&who->refused_quota));
		if (o)
			json_object_set_new(o, "tokens_minute", number(quota_minute(who, apr_now_ns())));
		if (o)
			json_object_set_new(o, "limits", limits_row(&who->may));
		json_array_append_new(all, o ? o : json_null());
	}
	return all;
}

static json_t *totals(const struct core *c)
{
	const struct totals *t = &c->t;

	return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I}", "sqes", (json_int_t)look(&t->sqes), "cqes",
			 (json_int_t)look(&t->cqes), "wakes", (json_int_t)look(&t->wakes), "doorbells",
			 (json_int_t)look(&t->doorbells), "parked", (json_int_t)look(&t->parked), "tokens",
			 (json_int_t)look(&t->tokens), "steps", (json_int_t)look(&t->steps), "preempted",
			 (json_int_t)look(&t->preempted), "finished", (json_int_t)look(&t->finished), "failed",
			 (json_int_t)look(&t->failed), "step_us_max", (json_int_t)(look(&t->step_ns_max) / 1000),
			 "plan_us", (json_int_t)(look(&t->plan_ns) / 1000));
}

static json_t *times_row(const struct times *t)
{
	json_t *counts = json_array();

	for (int i = 0; i < TIMES; i++)
		json_array_append_new(counts, number(look(&t->n[i])));
	return json_pack("{s:I,s:o}", "sum_us", (json_int_t)(look(&t->sum_ns) / 1000), "counts", counts);
}

static json_t *metrics_rows(const struct metrics *m)
{
	static const char *const names[OUTCOMES] = { "ok", "cancelled", "timeout", "quota", "shutdown", "error" };
	json_t *outcomes = json_object();

	for (int i = 0; i < OUTCOMES; i++)
		json_object_set_new(outcomes, names[i], number(look(&m->outcomes[i])));
	json_object_set_new(outcomes, "refused", number(look(&m->refused)));
	return json_pack("{s:o,s:i,s:o,s:o,s:o,s:o}", "outcomes", outcomes, "le_us", TIMES_FIRST_US, "step",
			 times_row(&m->step), "queue", times_row(&m->queue), "first_token", times_row(&m->first),
			 "inter_token", times_row(&m->gap));
}

char *status_json(struct worker *w, const struct identity *who)
{
	static const char *const states[] = { "starting", "loading", "ready", "degraded", "draining" };
	const struct apr_engine_info *e = &w->core.engine;
	json_t *o = json_object();

	json_object_set_new(o, "version", json_string(APR_VERSION));
	json_object_set_new(o, "abi", json_sprintf("%u.%u", APR_ABI_MAJOR, APR_ABI_MINOR));
	json_object_set_new(o, "pid", number((uint64_t)w->start->supervisor));
	json_object_set_new(o, "worker_pid", number((uint64_t)getpid()));
	json_object_set_new(o, "restarts", number(w->start->restarts));
	json_object_set_new(o, "uptime_s", json_real((double)(apr_now_ns() - w->began) * 1e-9));
	json_object_set_new(o, "state", json_string(states[w->state]));
	json_object_set_new(o, "state_why", state_why(w));
	json_object_set_new(o, "loading", loading(w));
	json_object_set_new(o, "backend",
			    json_pack("{s:s,s:s,s:s,s:b}", "name", e->backend, "device", e->device, "why", e->why,
				      "fell_back", e->fell_back));
	models(w, o);
	json_object_set_new(o, "sessions", number(look32(&w->core.t.sessions)));
	json_object_set_new(o, "running", number(look32(&w->core.t.running)));
	json_object_set_new(o, "queued", number(look32(&w->core.t.queued)));
	json_object_set_new(o, "loop", json_pack("{s:s,s:s}", "name", loop_name(w->io), "why", w->loop_why));
	json_object_set_new(
		o, "polling",
		json_pack("{s:i,s:i,s:s}", "poll_us", (int)w->poll_us, "spin_us", (int)w->spin_us, "why", w->poll_why));
	json_object_set_new(o, "threads",
			    json_pack("{s:i,s:i}", "compute", (int)e->threads, "usable_cpus", (int)e->usable_cpus));
	json_object_set_new(o, "connections", number(w->n_conns));
	json_object_set_new(o, "session_rows", session_rows(w, who));
	json_object_set_new(o, "clients", client_rows(w, who));
	json_object_set_new(o, "totals", totals(&w->core));
	json_object_set_new(o, "metrics", metrics_rows(&w->core.metrics));
	char *text = json_dumps(o, JSON_COMPACT | JSON_ENSURE_ASCII | JSON_REAL_PRECISION(9));
	json_decref(o);
	return text;
}

char *settings_json(const struct worker *w)
{
	static const char *const from[] = { "default", "file", "environment", "flag" };
	json_t *rows = json_array();
	char value[4096];

	for (size_t i = 0; i < option_rows; i++) {
		const struct option_row *r = &option_table[i];
		if (!(r->in & IN_FILE))
			continue;
		r->show(&w->o, r, value, sizeof(value));
		json_array_append_new(rows, json_pack("{s:s,s:s,s:s}", "name", r->name, "value", value, "from",
						      from[w->o.from[i]]));
	}
	json_t *o = json_pack("{s:o,s:s}", "settings", rows, "file", w->o.config ? w->o.config : "");
	char *text = json_dumps(o, JSON_COMPACT | JSON_ENSURE_ASCII);
	json_decref(o);
	return text;
}
