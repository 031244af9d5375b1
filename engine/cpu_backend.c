/* SPDX-License-Identifier: MIT */
/*
 * The CPU behind engine/backend.h: the recorded list of op calls, replayed with
 * the live rows of each step on a thread of its own plus the pool.
 *
 * Owns: that thread, the list, results of a step. Does not own the ops' arithmetic
 * (kernels/cpu), the weights' file (engine/panels.c), memory (engine/cpu_memory.c).
 */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/cpu_memory.h"
#include "engine/internal.h"
#include "engine/panels.h"
#include "engine/plan.h"
#include "kernels/common/dequant.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/pool.h"

struct call {
	enum apr_op_kind kind;
	struct apr_linear_next next; /* products of the first later call that has any */
	union {
		struct apr_op_embed embed;
		struct apr_op_attn_in attn_in;
		struct apr_op_attn attn;
		struct apr_op_proj proj;
		struct apr_op_ffn_in ffn_in;
		struct apr_op_head head;
	} u;
};

struct apr_backend_ctx {
	struct apr_backend_config cfg;
	struct apr_pool *pool; /* the worker thread's alone once it runs */
	pthread_t thread;
	pthread_mutex_t lock;  /* guards queue, stop */
	pthread_cond_t wake, idle;
	struct apr_backend_model *queue, **queue_tail; /* steps not begun yet, in order */
	bool stop;
};

struct apr_backend_model {
	struct apr_backend_ctx *ctx;
	struct apr_backend_model *next; /* in the queue */
	struct apr_sizes sizes;
	struct apr_panels *panels;
	struct apr_layer_weights *layers;
	struct apr_cpu_scratch *scratch;
	enum apr_cpu_math math;
	struct call *call;
	uint32_t n_calls, max_calls;
	char *fail_why;
	size_t fail_len;
	struct apr_sample_result *results;
	uint8_t *work;     /* [threads][work_bytes] */
	size_t work_bytes;
	const struct apr_step *step;
	_Atomic uint64_t steps; /* relaxed: for status */
	/* RUNNING by submit, DONE with release by the worker: pairs with the acquire in cpu_poll, after which results are
	 * read. IDLE by records. */
	_Atomic int state;
};

static const struct apr_backend_route routes[] = {
	/* numbers of enum apr_route_id */
	{.name = "int16", .id = 7, .kv_type = APR_KV_F16, .arithmetic = "int16", .equal_bits = true},
	{.name = "f32", .id = 1, .kv_type = APR_KV_F32, .arithmetic = "f32", .equal_bits = true},
	{.name = NULL},
};

static enum apr_cpu_math math_of(uint8_t route_id)
{
	return route_id == 1 ? APR_CPU_F32 : APR_CPU_INT16;
}

/* ---- running a step -------------------------------------------------------------- */

static void apply_updates(struct apr_backend_model *m)
{
	uint32_t i;

	for (i = 0; i < m->step->n_updates; i++) {
		const struct apr_table_update *u = &m->step->updates[i];
		const struct apr_kv_group *g = &m->sizes.group[u->group];
		/* the table is const to the ops alone; this thread is its one writer */
		uint32_t *row = (uint32_t *)(uintptr_t)g->table + (size_t)u->slot * g->max_pages_seq;

		memcpy(row + u->first, u->pages, u->n * sizeof *row);
	}
}

static void run_call(struct apr_backend_model *m, const struct apr_rows *r, const struct call *c)
{
	apr_cpu_next(m->scratch, &c->next);
	switch (c->kind) {
	case APR_OP_EMBED:
		apr_cpu_embed(m->scratch, r, &c->u.embed);
		break;
	case APR_OP_ATTN_IN:
		apr_cpu_attn_in(m->scratch, r, &c->u.attn_in);
		break;
	case APR_OP_ATTN:
		apr_cpu_attn(m->scratch, r, &c->u.attn);
		break;
	case APR_OP_PROJ:
		apr_cpu_proj(m->scratch, r, &c->u.proj);
		break;
	case APR_OP_FFN_IN:
		apr_cpu_ffn_in(m->scratch, r, &c->u.ffn_in);
		break;
	case APR_OP_HEAD:
		break; /* run_head does it, 64 rows at a time */
	}
}

struct drawing {
	struct apr_backend_model *m;
	const float *logits;
	uint32_t first, stride;
};

static void draw_one(void *arg, uint32_t i, unsigned worker)
{
	const struct drawing *d = arg;
	struct apr_backend_model *m = d->m;
	const struct apr_draw *w = &m->step->draws[d->first + i];
	struct apr_sample_result *res = &m->results[d->first + i];
	const float *row = d->logits + (size_t)i * d->stride;

	if (w->kind == APR_DRAW_SCORE) {
		res->numeric = apr_score_row(row, m->sizes.n_real, w->score_id, w->n_top, res) != 0;
		return;
	}
	apr_sample(row, m->sizes.n_real, w->params, w->seen, w->n_seen, w->position, w->want_logprob, w->n_top,
	           m->work + worker * m->work_bytes, res);
}

static void run_head(struct apr_backend_model *m, const struct apr_rows *r, const struct call *c)
{
	const struct apr_op_head *op = &c->u.head;
	struct drawing d = {.m = m, .logits = op->logits, .stride = op->n_vocab};
	uint32_t n;

	apr_cpu_next(m->scratch, &c->next);
	for (; d.first < r->n_out; d.first += n) {
		n = r->n_out - d.first < APR_HEAD_ROWS ? r->n_out - d.first : APR_HEAD_ROWS;
		apr_cpu_head(m->scratch, r, op, d.first, n);
		apr_pool_run(m->ctx->pool, n, draw_one, &d);
	}
}

static void run_step(struct apr_backend_model *m)
{
	const struct apr_step *s = m->step;
	struct apr_rows r = {.n = s->n_rows, .n_out = s->n_draws, .tok = s->tok, .pos = s->pos, .slot = s->slot, .out = s->out};
	uint32_t i;

	apply_updates(m);
	for (i = 0; i < m->n_calls; i++)
		run_call(m, &r, &m->call[i]);
	if (s->n_draws)
		run_head(m, &r, &m->call[m->n_calls - 1]);
}

static void *worker(void *arg)
{
	struct apr_backend_ctx *c = arg;
	const uint64_t one = 1;

	pthread_mutex_lock(&c->lock);
	while (!c->stop || c->queue) {
		struct apr_backend_model *m = c->queue;

		if (!m) {
			pthread_cond_wait(&c->wake, &c->lock);
			continue;
		}
		c->queue = m->next;
		if (!c->queue)
			c->queue_tail = &c->queue;
		pthread_mutex_unlock(&c->lock);
		run_step(m);
		pthread_mutex_lock(&c->lock);
		/* pairs with cpu_poll */
		atomic_store_explicit(&m->state, APR_STEP_DONE, memory_order_release);
		pthread_cond_broadcast(&c->idle);
		/* An eventfd's counter cannot fill up by ones; nothing to do about another failure. */
		if (c->cfg.notify_fd >= 0 && write(c->cfg.notify_fd, &one, sizeof one) < 0)
			continue;
	}
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

static int cpu_submit(struct apr_backend_model *m, const struct apr_step *step)
{
	struct apr_backend_ctx *c = m->ctx;

	if (atomic_load_explicit(&m->state, memory_order_relaxed) != APR_STEP_IDLE)
		return -EBUSY;
	m->step = step;
	atomic_fetch_add_explicit(&m->steps, 1, memory_order_relaxed);
	m->next = NULL;
	pthread_mutex_lock(&c->lock);
	/* relaxed: the worker reads step under the lock */
	atomic_store_explicit(&m->state, APR_STEP_RUNNING, memory_order_relaxed);
	*c->queue_tail = m;
	c->queue_tail = &m->next;
	pthread_cond_signal(&c->wake);
	pthread_mutex_unlock(&c->lock);
	return 0;
}

static enum apr_step_state cpu_poll(struct apr_backend_model *m)
{
	/* pairs with worker's release */
	return (enum apr_step_state)atomic_load_explicit(&m->state, memory_order_acquire);
}

static int cpu_records(struct apr_backend_model *m, const struct apr_sample_result **out)
{
	if (cpu_poll(m) != APR_STEP_DONE)
		return -EAGAIN;
	/* relaxed: this thread alone goes on from here */
	atomic_store_explicit(&m->state, APR_STEP_IDLE, memory_order_relaxed);
	*out = m->results;
	return 0;
}

static void cpu_fence(struct apr_backend_model *m)
{
	struct apr_backend_ctx *c = m->ctx;

	pthread_mutex_lock(&c->lock);
	while (cpu_poll(m) == APR_STEP_RUNNING)
		pthread_cond_wait(&c->idle, &c->lock);
	pthread_mutex_unlock(&c->lock);
}

static uint32_t cpu_buckets(const struct apr_backend_model *m, struct apr_bucket *out, uint32_t max, uint64_t *bytes)
{
	if (max)
		*out = (struct apr_bucket){APR_GRAPH_STEP, m->sizes.max_rows, atomic_load_explicit(&m->steps, memory_order_relaxed)};
	*bytes = m->max_calls * sizeof *m->call;
	return 1;
}

/* ---- recording ------------------------------------------------------------------- */

static int keep(struct apr_backend_model *m, enum apr_op_kind kind, const void *args, size_t size)
{
	struct call *c;
	int rc = apr_cpu_backend.supports(m->ctx, kind, args, m->math == APR_CPU_F32 ? 1 : 7, m->fail_why, m->fail_len);

	if (rc)
		return rc;
	if (m->n_calls == m->max_calls) {
		uint32_t max = m->max_calls ? 2 * m->max_calls : 64;

		c = realloc(m->call, max * sizeof *c);
		if (!c)
			return -ENOMEM;
		m->call = c;
		m->max_calls = max;
	}
	c = &m->call[m->n_calls++];
	c->kind = kind;
	memcpy(&c->u, args, size);
	return 0;
}

static int rec_embed(void *ctx, const struct apr_op_embed *a)
{
	return keep(ctx, APR_OP_EMBED, a, sizeof *a);
}
static int rec_attn_in(void *ctx, const struct apr_op_attn_in *a)
{
	return keep(ctx, APR_OP_ATTN_IN, a, sizeof *a);
}
static int rec_attn(void *ctx, const struct apr_op_attn *a)
{
	return keep(ctx, APR_OP_ATTN, a, sizeof *a);
}
static int rec_proj(void *ctx, const struct apr_op_proj *a)
{
	return keep(ctx, APR_OP_PROJ, a, sizeof *a);
}
static int rec_ffn_in(void *ctx, const struct apr_op_ffn_in *a)
{
	return keep(ctx, APR_OP_FFN_IN, a, sizeof *a);
}
static int rec_head(void *ctx, const struct apr_op_head *a)
{
	return keep(ctx, APR_OP_HEAD, a, sizeof *a);
}

static struct apr_linear_next products_of(const struct call *c)
{
	const struct apr_op_ffn_in *f = &c->u.ffn_in;

	switch (c->kind) {
	case APR_OP_ATTN_IN:
		return (struct apr_linear_next){3, {&c->u.attn_in.wq->lin, &c->u.attn_in.wk->lin, &c->u.attn_in.wv->lin}};
	case APR_OP_PROJ:
		return (struct apr_linear_next){1, {&c->u.proj.w->lin}};
	case APR_OP_FFN_IN:
		if (f->gate)
			return (struct apr_linear_next){2, {&f->gate->lin, &f->up->lin}};
		return (struct apr_linear_next){1, {&f->up->lin}};
	case APR_OP_HEAD:
		return (struct apr_linear_next){1, {&c->u.head.w->lin}};
	default:
		return (struct apr_linear_next){0};
	}
}

/* Tells each call which products come next; after the last come the first, of the next step. */
static void chain_calls(struct apr_backend_model *m)
{
	struct apr_linear_next next = {0};
	uint32_t i;

	for (i = 0; i < m->n_calls && !next.n; i++)
		next = products_of(&m->call[i]);
	for (i = m->n_calls; i-- > 0;) {
		struct apr_linear_next own = products_of(&m->call[i]);

		m->call[i].next = next;
		if (own.n)
			next = own;
	}
}

static int cpu_record(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t bucket, apr_build_fn build, void *arg,
                      char *err, size_t errlen)
{
	struct apr_ops ops = {.ctx = m, .embed = rec_embed, .attn_in = rec_attn_in, .attn = rec_attn, .proj = rec_proj,
	                      .ffn_in = rec_ffn_in, .head = rec_head};
	char why[160] = "", where[32];
	int rc;

	if (kind != APR_GRAPH_STEP || bucket)
		return apr_engine_fail(-EINVAL, err, errlen, "the cpu backend records one list of calls for every step");
	m->n_calls = 0;
	m->fail_why = why;
	m->fail_len = sizeof why;
	rc = build(arg, &ops);
	m->fail_why = NULL;
	m->fail_len = 0;
	if (rc)
		return apr_engine_fail(rc, err, errlen, "%s: %s", apr_forward_where(where, sizeof where, m->n_calls),
		                       why[0] ? why : strerror(-rc));
	if (!m->n_calls || m->call[m->n_calls - 1].kind != APR_OP_HEAD)
		return apr_engine_fail(-EINVAL, err, errlen, "a forward pass must end in its head");
	chain_calls(m);
	return 0;
}

static int bad_mat(const struct apr_mat *w, const char *what, char *err, size_t errlen)
{
	if (w && !apr_panel_bytes(w->lin.type, w->lin.n_in, w->lin.n_out))
		return apr_engine_fail(-ENOTSUP, err, errlen, "%s: %s of %u columns is not supported", what,
		                       apr_type_info(w->lin.type).name, w->lin.n_in);
	return 0;
}

static int cpu_supports(struct apr_backend_ctx *c, enum apr_op_kind kind, const void *args, uint8_t route_id, char *err,
                        size_t errlen)
{
	const struct apr_op_attn_in *ai = args;
	const struct apr_op_ffn_in *fi = args;
	int rc = 0;

	(void)c;
	(void)route_id; /* both routes know every op and type */
	switch (kind) {
	case APR_OP_EMBED:
		return bad_mat(((const struct apr_op_embed *)args)->w, "token_embd", err, errlen);
	case APR_OP_ATTN_IN:
		rc = bad_mat(ai->wq, "attn_q", err, errlen);
		if (!rc)
			rc = bad_mat(ai->wk, "attn_k", err, errlen);
		if (!rc)
			rc = bad_mat(ai->wv, "attn_v", err, errlen);
		return rc;
	case APR_OP_ATTN:
		return 0;
	case APR_OP_PROJ:
		return bad_mat(((const struct apr_op_proj *)args)->w, "weight", err, errlen);
	case APR_OP_FFN_IN:
		rc = bad_mat(fi->gate, "ffn_gate", err, errlen);
		return rc ? rc : bad_mat(fi->up, "ffn_up", err, errlen);
	case APR_OP_HEAD:
		return bad_mat(((const struct apr_op_head *)args)->w, "output", err, errlen);
	}
	return apr_engine_fail(-ENOTSUP, err, errlen, "unknown op %u", (unsigned)kind);
}

/* ---- weights --------------------------------------------------------------------- */

struct vectors { /* hands out the "vectors" line piece by piece; base NULL: counts alone */
	uint8_t *base;
	uint64_t at;
};

static const float *vector(struct vectors *v, const struct apr_weight *w)
{
	float *out = v->base ? (float *)(void *)(v->base + v->at) : NULL;

	if (!w->data)
		return NULL;
	v->at += ((uint64_t)w->n_in * sizeof(float) + 63) & ~UINT64_C(63);
	if (out)
		apr_dequant_row(w->type, w->data, w->n_in, out);
	return out;
}

static void layer_vectors(struct vectors *v, const struct apr_layer *la, struct apr_layer_weights *w)
{
	w->attn_norm = vector(v, &la->attn_norm);
	w->post_attn_norm = vector(v, &la->post_attn_norm);
	w->ffn_norm = vector(v, &la->ffn_norm);
	w->post_ffn_norm = vector(v, &la->post_ffn_norm);
	w->bq = vector(v, &la->bq);
	w->bk = vector(v, &la->bk);
	w->bv = vector(v, &la->bv);
	w->bo = vector(v, &la->bo);
	w->q_norm = vector(v, &la->q_norm);
	w->k_norm = vector(v, &la->k_norm);
}

static void fill_weights(struct apr_backend_model *b, const struct apr_model *m, struct vectors *v, struct apr_weights *out)
{
	uint32_t l;

	for (l = 0; l < m->n_layers; l++) {
		const struct apr_layer *la = &m->layers[l];
		struct apr_layer_weights *w = &b->layers[l];

		layer_vectors(v, la, w);
		w->wq = apr_panels_mat(b->panels, &la->wq);
		w->wk = apr_panels_mat(b->panels, &la->wk);
		w->wv = apr_panels_mat(b->panels, &la->wv);
		w->wo = apr_panels_mat(b->panels, &la->wo);
		w->gate = apr_panels_mat(b->panels, &la->gate);
		w->up = apr_panels_mat(b->panels, &la->up);
		w->down = apr_panels_mat(b->panels, &la->down);
	}
	out->layers = b->layers;
	out->tok_embd = apr_panels_mat(b->panels, &m->tok_embd);
	out->output = m->tied ? out->tok_embd : apr_panels_mat(b->panels, &m->output);
	out->output_norm = vector(v, &m->output_norm);
}

static struct apr_cpu_limits limits_of(const struct apr_model *m, const struct apr_sizes *s)
{
	struct apr_cpu_limits l = {.rows = s->max_rows, .n_embd = m->n_embd, .n_ff = m->n_ff, .n_heads = m->n_heads,
	                           .k_dim = m->head_dim, .v_dim = m->v_dim, .n_ctx = s->n_ctx, .math = math_of(s->route_id)};
	uint32_t i;

	for (i = 0; i < m->n_layers; i++)
		if (m->layers[i].n_kv_heads > l.n_kv_heads)
			l.n_kv_heads = m->layers[i].n_kv_heads;
	return l;
}

static int cpu_need(struct apr_backend_ctx *c, const struct apr_model *m, const struct apr_sizes *s, bool have_cache,
                    struct apr_plan *plan)
{
	struct apr_cpu_limits l = limits_of(m, s);
	struct apr_layer_weights w;
	struct vectors v = {0};
	unsigned threads = apr_pool_threads(c->pool);
	char err[160];
	uint32_t i;

	for (i = 0; i < m->n_layers; i++)
		layer_vectors(&v, &m->layers[i], &w);
	vector(&v, &m->output_norm);
	/* A line of its own for weights either way: apr_panels_open maps it. */
	apr_plan_add(plan, have_cache ? "weights" : "weights, no cache", APR_PLACE_FILE, apr_panels_bytes(m, err, sizeof err), 1);
	apr_plan_add(plan, "vectors", APR_PLACE_HOST, v.at, 1);
	apr_plan_add(plan, "scratch", APR_PLACE_HOST, apr_cpu_scratch_bytes(&l, threads), 1);
	apr_plan_add(plan, "sampling", APR_PLACE_HOST, (apr_sample_work_bytes(s->n_vocab) + 63) & ~(size_t)63, threads);
	apr_plan_add(plan, "results", APR_PLACE_HOST, s->max_rows, sizeof(struct apr_sample_result));
	return plan->overflow ? -EOVERFLOW : 0;
}

static void cpu_unload(struct apr_backend_model *b)
{
	if (!b)
		return;
	cpu_fence(b);
	apr_panels_close(b->panels);
	free(b->layers);
	free(b->call);
	free(b);
}

static void *line_base(const struct apr_plan *p, const char *purpose)
{
	uint32_t i = apr_plan_find(p, purpose);

	return i < p->n ? p->line[i].base : NULL;
}

static int cpu_load(struct apr_backend_ctx *c, const struct apr_backend_load *in, struct apr_backend_model **out, char *err,
                    size_t errlen)
{
	struct apr_panels_ask ask = {.model = in->model, .cache_dir = in->cache_dir, .threads = apr_pool_threads(c->pool),
	                             .progress = in->progress, .progress_arg = in->progress_arg, .log = c->cfg.log,
	                             .log_arg = c->cfg.log_arg};
	struct apr_cpu_limits l = limits_of(in->model, in->sizes);
	struct apr_backend_model *b = calloc(1, sizeof *b);
	struct vectors v = {.base = line_base(in->plan, "vectors")};
	uint32_t i;
	int rc;

	if (!b)
		return apr_engine_fail(-ENOMEM, err, errlen, "out of memory");
	b->ctx = c;
	b->sizes = *in->sizes;
	b->math = l.math;
	b->layers = calloc(in->model->n_layers, sizeof *b->layers);
	rc = b->layers ? apr_panels_open(&b->panels, &ask, err, errlen) : -ENOMEM;
	if (rc || !b->layers) {
		if (!b->layers)
			apr_engine_fail(rc, err, errlen, "out of memory");
		cpu_unload(b);
		return rc;
	}
	fill_weights(b, in->model, &v, in->weights);
	b->scratch = apr_cpu_scratch_init(&l, c->pool, line_base(in->plan, "scratch"));
	b->results = line_base(in->plan, "results");
	b->work = line_base(in->plan, "sampling");
	b->work_bytes = (apr_sample_work_bytes(in->sizes->n_vocab) + 63) & ~(size_t)63;
	for (i = 0; i < in->plan->n; i++)
		if (in->plan->line[i].place == APR_PLACE_FILE && !apr_panels_from_file(b->panels))
			in->plan->line[i].place = APR_PLACE_HOST;
	*out = b;
	return 0;
}

static int cpu_upload(struct apr_backend_ctx *c, void *dst, const void *src, uint64_t bytes)
{
	(void)c;
	memcpy(dst, src, bytes);
	return 0;
}

/* ---- KV pages -------------------------------------------------------------------- */

static uint8_t *page_at(const struct apr_backend_model *b, uint32_t group, uint32_t page, uint64_t *bytes)
{
	const struct apr_kv_group *g = &b->sizes.group[group];

	*bytes = g->layer_bytes * g->n_layers;
	return g->pool + page * *bytes;
}

static int cpu_kv_zero(struct apr_backend_model *b, uint32_t group, const uint32_t *pages, uint32_t n)
{
	uint64_t bytes;
	uint32_t i;

	for (i = 0; i < n; i++) {
		uint8_t *p = page_at(b, group, pages[i], &bytes);

		memset(p, 0, bytes);
	}
	return 0;
}

static int cpu_kv_copy(struct apr_backend_model *b, uint32_t group, const uint32_t *from, const uint32_t *to, uint32_t n)
{
	uint64_t bytes;
	uint32_t i;

	for (i = 0; i < n; i++) {
		const uint8_t *src = page_at(b, group, from[i], &bytes);
		uint8_t *dst = page_at(b, group, to[i], &bytes);

		if (src != dst)
			memcpy(dst, src, bytes);
	}
	return 0;
}

/* ---- opening --------------------------------------------------------------------- */

static int cpu_probe(const struct apr_backend_config *cfg, char *device, size_t devlen, char *err, size_t errlen)
{
	char model[80];
	unsigned threads = cfg->threads ? cfg->threads : apr_pool_usable_cpus();

	(void)err;
	(void)errlen;
	apr_cpu_model_name(model, sizeof model);
	snprintf(device, devlen, "%s, %s, %u thread%s", model, apr_cpu_isa_name(apr_cpu_isa_current()), threads,
	         threads == 1 ? "" : "s");
	return 0;
}

static int cpu_open(struct apr_backend_ctx **out, const struct apr_backend_config *cfg, char *err, size_t errlen)
{
	struct apr_backend_ctx *c = calloc(1, sizeof *c);
	int rc;

	if (!c)
		return apr_engine_fail(-ENOMEM, err, errlen, "out of memory");
	c->cfg = *cfg;
	c->queue_tail = &c->queue;
	rc = apr_pool_new(&c->pool, cfg->threads);
	if (rc) {
		free(c);
		return apr_engine_fail(rc, err, errlen, "compute threads: %s", strerror(-rc));
	}
	pthread_mutex_init(&c->lock, NULL);
	pthread_cond_init(&c->wake, NULL);
	pthread_cond_init(&c->idle, NULL);
	rc = -pthread_create(&c->thread, NULL, worker, c);
	if (rc) {
		apr_pool_free(c->pool);
		free(c);
		return apr_engine_fail(rc, err, errlen, "the backend's thread: %s", strerror(-rc));
	}
	(void)pthread_setname_np(c->thread, "apr-step");
	*out = c;
	return 0;
}

static void cpu_close(struct apr_backend_ctx *c)
{
	pthread_mutex_lock(&c->lock);
	c->stop = true;
	pthread_cond_signal(&c->wake);
	pthread_mutex_unlock(&c->lock);
	pthread_join(c->thread, NULL);
	apr_pool_free(c->pool);
	pthread_cond_destroy(&c->wake);
	pthread_cond_destroy(&c->idle);
	pthread_mutex_destroy(&c->lock);
	free(c);
}

static uint32_t cpu_threads(const struct apr_backend_ctx *c)
{
	return apr_pool_threads(c->pool);
}

static uint64_t cpu_available(struct apr_backend_ctx *c)
{
	(void)c;
	return apr_cpu_memory_available();
}

static int cpu_reserve(struct apr_backend_ctx *c, struct apr_plan *plan, char *err, size_t errlen)
{
	(void)c;
	return apr_cpu_memory_reserve(plan, err, errlen);
}

static void cpu_unreserve(struct apr_backend_ctx *c, struct apr_plan *plan)
{
	(void)c;
	apr_cpu_memory_release(plan);
}

static int cpu_health(struct apr_backend_ctx *c, char *err, size_t errlen)
{
	(void)c;
	(void)err;
	(void)errlen;
	return 0; /* a thread that computes cannot fail but with the process */
}

const struct apr_backend apr_cpu_backend = {
	.abi = APR_BACKEND_ABI,
	.size = sizeof(struct apr_backend),
	.name = "cpu",
	.id = 1, /* enum apr_backend_id */
	.routes = routes,
	.depth = 1,
	.place = APR_PLACE_HOST,
	.probe = cpu_probe,
	.open = cpu_open,
	.supports = cpu_supports,
	.threads = cpu_threads,
	.available = cpu_available,
	.need = cpu_need,
	.reserve = cpu_reserve,
	.unreserve = cpu_unreserve,
	.load = cpu_load,
	.unload = cpu_unload,
	.upload = cpu_upload,
	.record = cpu_record,
	.buckets = cpu_buckets,
	.submit = cpu_submit,
	.poll = cpu_poll,
	.records = cpu_records,
	.fence = cpu_fence,
	.kv_zero = cpu_kv_zero,
	.kv_copy = cpu_kv_copy,
	.health = cpu_health,
	.close = cpu_close,
};
