/* SPDX-License-Identifier: MIT */
/*
 * One step: from the engine's rows to passes on the stream, and its records.
 *
 * Owns: the division of a step by kind of row, the pinned slots that a pass is read
 * from, the watch for the step's marks. submit first fills pinned memory, which may
 * fail and then leaves the stream alone, and then only enqueues. Generated rows go
 * first, unless a sequence has rows of both kinds (its prompt's KV must be there). The
 * watching thread spins on pinned memory and asks the runtime now and then, without
 * waiting, whether the device is still well.
 */
#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "graphs/graphs.h"

#define ASK_EVERY_NS 1000000 /* of a step that has not ended */
#define HUNG_NS UINT64_C(60000000000) /* no step takes so long: the device hangs */

struct enqueue { /* one step on its way to the stream */
	struct apr_backend_model *m;
	struct flight *f;
	struct pinned_step *pin;
	const struct apr_step *s;
	cudaStream_t stream;
	uint32_t n_prompt, n_generated, n_passes, heads, records;
	bool both; /* a sequence has rows of both kinds */
	uint64_t lists; /* bytes taken */
	int rc;
};

static void note(struct enqueue *q, cudaError_t rc, const char *what)
{
	int r = graphs_cuda(q->m->ctx, rc, what, NULL, 0);

	if (r && !q->rc)
		q->rc = r;
}

static void copy_in(struct enqueue *q, void *dev, const void *pinned, uint64_t bytes)
{
	note(q, cudaMemcpyAsync(dev, pinned, bytes, cudaMemcpyHostToDevice, q->stream), "a copy to the device");
}

/* ---- parts of a step ------------------------------------------------------------------- */

static void update_tables(struct enqueue *q)
{
	struct apr_backend_model *m = q->m;
	uint32_t i;

	for (i = 0; i < q->s->n_updates; i++) {
		const struct apr_table_update *u = &q->s->updates[i];
		const struct apr_kv_group *g = &m->sizes.group[u->group];
		size_t at = (size_t)(g->table - m->table) + (size_t)u->slot * g->max_pages_seq + u->first;

		memcpy(m->rest.table + at, u->pages, u->n * sizeof *u->pages);
		copy_in(q, m->table + at, m->rest.table + at, u->n * sizeof *u->pages);
	}
}

/* Each row's place among those of its kind, and into the slot of its pass. */
static void divide_rows(struct enqueue *q)
{
	struct apr_backend_model *m = q->m;
	const struct apr_step *s = q->s;
	uint64_t slots[2] = {0};
	uint32_t i;

	for (i = 0; i < s->n_rows; i++) {
		bool prompt = s->kind[i] == APR_ROW_PROMPT;
		uint32_t at = prompt ? q->n_prompt++ : q->n_generated++;
		const struct rows_at *r = prompt ? &q->pin->prefill : &q->pin->decode[at / APR_CUDA_DECODE_ROWS];
		uint32_t k = prompt ? at : at % APR_CUDA_DECODE_ROWS;

		m->rest.place[i] = at;
		slots[prompt] |= UINT64_C(1) << s->slot[i];
		r->tok[k] = s->tok[i];
		r->pos[k] = s->pos[i];
		r->slot[k] = s->slot[i];
	}
	q->both = (slots[0] & slots[1]) != 0;
}

/* bytes into the lists' arena, with room for more; the device address of what the pinned arena holds there. */
static const void *list(struct enqueue *q, const void *from, uint64_t bytes, uint64_t more)
{
	uint64_t at = q->lists;

	if (!(bytes + more))
		return NULL;
	if (round_up(bytes + more, 64) > q->m->lists_bytes - at) {
		q->rc = q->rc ? q->rc : -E2BIG;
		return NULL;
	}
	if (bytes)
		memcpy(q->pin->lists + at, from, bytes);
	q->lists += round_up(bytes + more, 64);
	return q->m->dev.lists + at;
}

static struct apr_cuda_draw draw_of(struct enqueue *q, const struct apr_draw *d)
{
	struct apr_cuda_draw out = {.kind = APR_CUDA_SCORE, .score_id = d->score_id, .want_logprob = d->want_logprob,
	                            .n_top = d->n_top, .position = d->position};
	const struct apr_sample_params *p = d->params;

	if (d->kind == APR_DRAW_SCORE)
		return out;
	out.kind = APR_CUDA_SAMPLE;
	out.temperature = p->temperature;
	out.top_p = p->top_p;
	out.min_p = p->min_p;
	out.repeat_penalty = p->repeat_penalty;
	out.frequency_penalty = p->frequency_penalty;
	out.presence_penalty = p->presence_penalty;
	out.top_k = p->top_k;
	out.seed = p->seed;
	out.sample = p->sample;
	out.n_bias = p->n_bias;
	out.n_seen = d->n_seen;
	out.bias_id = list(q, p->bias_id, p->n_bias * sizeof *p->bias_id, 0);
	out.bias = list(q, p->bias, p->n_bias * sizeof *p->bias, 0);
	out.seen = list(q, d->seen, d->n_seen * sizeof *d->seen, d->unseen ? sizeof *d->seen : 0);
	return out;
}

static struct draw_end end_of(struct enqueue *q, const struct apr_draw *d, uint32_t row)
{
	struct draw_end out = {.slot = d->slot, .sample = d->kind == APR_DRAW_SAMPLE, .last = d->last, .unseen = d->unseen,
	                       .row_of_last = q->s->tok[row] == APR_TOK_LAST, .n_ends = d->n_ends};

	if (d->n_ends > ENDS_INLINE)
		out.ends = list(q, d->ends, d->n_ends * sizeof *d->ends, 0);
	else if (d->n_ends)
		memcpy(out.few, d->ends, d->n_ends * sizeof *d->ends);
	return out;
}

/* ---- pinned memory -------------------------------------------------------------------------- */

/* The wanted rows of the pass, 64 at a time. */
static void fill_heads(struct enqueue *q, struct pass *p)
{
	const struct apr_step *s = q->s;
	struct head_block *h = NULL;
	uint32_t i;

	p->first_head = q->heads;
	for (i = 0; i < s->n_draws; i++) {
		uint32_t row = s->out[i], at = q->m->rest.place[row];

		if (s->kind[row] != p->kind || at < p->first || at >= p->first + p->n)
			continue;
		if (!h || h->n_out == APR_HEAD_ROWS) {
			if (q->heads == q->m->n_head) {
				q->rc = q->rc ? q->rc : -E2BIG;
				return;
			}
			h = &q->pin->head[q->heads++];
			h->n_out = 0;
		}
		h->out[h->n_out] = at - p->first;
		h->draws[h->n_out] = draw_of(q, &s->draws[i]);
		h->ends[h->n_out++] = end_of(q, &s->draws[i], row);
		q->pin->draw_of[q->f->n_records++] = i;
		q->f->has_tops |= s->draws[i].n_top > 0;
	}
	p->n_heads = q->heads - p->first_head;
}

static void add_pass(struct enqueue *q, uint8_t kind, uint32_t first, uint32_t n)
{
	struct pass *p = &q->m->passes[q->n_passes++];

	*p = (struct pass){.kind = kind, .first = first, .n = n};
	fill_heads(q, p);
}

static void add_prefill(struct enqueue *q)
{
	if (!q->n_prompt)
		return;
	*q->pin->prefill.n = q->n_prompt;
	apr_cuda_attn_cut(&q->m->tile_plan, q->pin->prefill.pos, q->pin->prefill.slot, q->n_prompt, q->pin->prefill.tiles,
	                  q->pin->prefill.n_tiles);
	add_pass(q, APR_ROW_PROMPT, 0, q->n_prompt);
}

static void fill(struct enqueue *q)
{
	uint32_t first, n;

	divide_rows(q);
	if (q->both)
		add_prefill(q);
	for (first = 0; first < q->n_generated; first += n) {
		n = q->n_generated - first < APR_CUDA_DECODE_ROWS ? q->n_generated - first : APR_CUDA_DECODE_ROWS;
		add_pass(q, APR_ROW_GENERATED, first, n);
	}
	if (!q->both)
		add_prefill(q);
}

/* ---- the stream ------------------------------------------------------------------------------- */

static void check(struct enqueue *q, int rc)
{
	if (rc && !q->rc)
		q->rc = graphs_cuda(q->m->ctx, cudaGetLastError(), "a launch", NULL, 0) ? -EIO : rc;
}

/* Rows of a decode pass (r, or NULL), wanted rows (h, or NULL). */
static void begin(struct enqueue *q, const struct rows_at *r, uint32_t n, const struct head_block *h, bool near)
{
	struct apr_backend_model *m = q->m;
	const struct rows_at *to = &m->dev.decode;
	struct edge_begin a = {.to_head = m->dev.head, .states = m->dev.states, .number = q->f->number,
	                       .near = near ? m->rest.near : NULL};

	if (r) {
		a.n_rows = n;
		a.tok = r->tok;
		a.pos = r->pos;
		a.slot = r->slot;
		a.to_n = to->n;
		a.to_tok = to->tok;
		a.to_pos = to->pos;
		a.to_slot = to->slot;
	}
	if (h) {
		a.head = h;
		a.n_out = h->n_out;
	}
	check(q, apr_graphs_begin(q->stream, &a));
}

/* Head and sampling of the rows that h holds, then their records to pinned memory. mark: it is the step's end. */
static void run_head(struct enqueue *q, const struct head_block *h, bool mark)
{
	struct apr_backend_model *m = q->m;
	struct edge_end a = {.n_out = h->n_out, .head = m->dev.head, .records = m->dev.records,
	                     .to_records = q->pin->records + q->records, .tops = m->dev.tops,
	                     .to_tops = q->f->has_tops ? q->pin->tops + q->records : NULL, .states = m->dev.states,
	                     .mark = mark ? m->rest.mark : NULL, .number = q->f->number};

	check(q, graphs_launch(m, APR_GRAPH_HEAD, h->n_out));
	check(q, apr_graphs_end(q->stream, &a));
	q->records += h->n_out;
}

static void run_pass(struct enqueue *q, const struct pass *p, bool last)
{
	struct apr_backend_model *m = q->m;
	const struct head_block *h = p->n_heads ? &q->pin->head[p->first_head] : NULL;
	bool prompt = p->kind == APR_ROW_PROMPT, near = last && h;
	uint32_t i;

	if (prompt)
		copy_in(q, m->dev.prefill.base, q->pin->prefill.base, q->pin->prefill.bytes);
	if (!prompt || h)
		begin(q, prompt ? NULL : &q->pin->decode[p->first / APR_CUDA_DECODE_ROWS], p->n, h, near && m->early);
	check(q, graphs_launch(m, prompt ? APR_GRAPH_PREFILL : APR_GRAPH_DECODE, p->n));
	if (near && !m->early)
		check(q, apr_graphs_mark(q->stream, m->rest.near, q->f->number));
	for (i = 0; i < p->n_heads; i++) {
		if (i)
			begin(q, NULL, 0, &h[i], false);
		run_head(q, &h[i], last && i + 1 == p->n_heads);
	}
	if (last && !h)
		check(q, apr_graphs_mark(q->stream, m->rest.mark, q->f->number));
}

static int enqueue(struct enqueue *q)
{
	struct apr_backend_model *m = q->m;
	uint32_t i;

	update_tables(q);
	if (q->lists)
		copy_in(q, m->dev.lists, q->pin->lists, q->lists);
	for (i = 0; i < q->n_passes && !q->rc; i++)
		run_pass(q, &m->passes[i], i + 1 == q->n_passes);
	return q->rc;
}

/* ---- submit, watch, records ---------------------------------------------------------------- */

int graphs_submit(struct apr_backend_model *m, const struct apr_step *step)
{
	uint32_t at = (m->oldest + m->n_flights) % APR_MAX_DEPTH;
	struct apr_backend_ctx *c = m->ctx;
	struct flight *f = &m->flight[at];
	struct enqueue q = {.m = m, .f = f, .pin = &m->pin[at], .s = step, .stream = c->compute};

	if (m->n_flights == APR_MAX_DEPTH)
		return -EBUSY;
	if (atomic_load_explicit(&c->sticky, memory_order_relaxed) || cudaSetDevice(c->device) != cudaSuccess)
		return -EIO;
	f->number = m->number + 1;
	f->n_records = 0;
	f->failed = 0;
	f->has_tops = false;
	f->next = NULL;
	fill(&q);
	if (q.rc)
		return q.rc;
	m->number++;
	pthread_mutex_lock(&c->enqueue_lock);
	(void)enqueue(&q);
	pthread_mutex_unlock(&c->enqueue_lock);
	if (q.rc) { /* part of it may run: nothing after it on this stream can be trusted */
		atomic_store_explicit(&c->sticky, q.rc, memory_order_relaxed);
		return q.rc;
	}
	m->n_flights++;
	pthread_mutex_lock(&c->lock);
	/* relaxed: the watcher reads the rest under the lock */
	atomic_store_explicit(&f->state, APR_STEP_RUNNING, memory_order_relaxed);
	*c->queue_tail = f;
	c->queue_tail = &f->next;
	pthread_cond_signal(&c->wake);
	pthread_mutex_unlock(&c->lock);
	return 0;
}

/* Has the mark reached the step's number, or passed it? */
static bool reached(const uint32_t *mark, uint32_t number)
{
	/* pairs with the release stores in edges.cu */
	return (int32_t)(__atomic_load_n(mark, __ATOMIC_ACQUIRE) - number) >= 0;
}

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

static void tell(const struct apr_backend_ctx *c)
{
	const uint64_t one = 1;

	/* An eventfd's counter cannot fill up by ones; nothing to do about another failure. */
	if (c->cfg.notify_fd >= 0 && write(c->cfg.notify_fd, &one, sizeof one) < 0)
		return;
}

static int give_up(struct apr_backend_ctx *c)
{
	graphs_log(c, 2, "cuda: a step has not ended for %llu s: the device hangs", (unsigned long long)(HUNG_NS / 1000000000u));
	atomic_store_explicit(&c->sticky, -ETIMEDOUT, memory_order_relaxed);
	return -ETIMEDOUT;
}

/* Until the step's mark is there, or the device is known to have failed. */
static int watch_step(struct flight *f)
{
	const struct pinned_rest *r = &f->m->rest;
	uint64_t began = now_ns(), ask = began + ASK_EVERY_NS; /* it runs from now on at the latest */
	bool near = false;
	uint32_t i = 0;

	while (!reached(r->mark, f->number)) {
		if (!near && reached(r->near, f->number)) {
			near = true;
			/* pairs with graphs_poll */
			atomic_store_explicit(&f->state, APR_STEP_NEAR, memory_order_release);
			tell(f->m->ctx);
		}
		relax();
		if (++i % 256 || now_ns() < ask)
			continue;
		cudaError_t rc = cudaStreamQuery(f->m->ctx->compute);

		if (rc == cudaSuccess && !reached(r->mark, f->number))
			return -EIO; /* it ended without its mark */
		if (rc != cudaSuccess && rc != cudaErrorNotReady)
			return graphs_cuda(f->m->ctx, rc, "a step", NULL, 0);
		if (now_ns() - began > HUNG_NS)
			return give_up(f->m->ctx);
		ask = now_ns() + ASK_EVERY_NS;
	}
	return 0;
}

void *graphs_watch(void *ctx)
{
	struct apr_backend_ctx *c = ctx;

	(void)cudaSetDevice(c->device);
	pthread_mutex_lock(&c->lock);
	while (!c->stop || c->queue) {
		struct flight *f = c->queue;

		if (!f) {
			pthread_cond_wait(&c->wake, &c->lock);
			continue;
		}
		pthread_mutex_unlock(&c->lock);
		f->failed = watch_step(f);
		pthread_mutex_lock(&c->lock);
		c->queue = f->next;
		if (!c->queue)
			c->queue_tail = &c->queue;
		/* pairs with graphs_poll */
		atomic_store_explicit(&f->state, APR_STEP_DONE, memory_order_release);
		pthread_cond_broadcast(&c->idle);
		tell(c);
	}
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

static enum apr_step_state state_of(const struct flight *f)
{
	/* pairs with the watching thread's releases */
	return (enum apr_step_state)atomic_load_explicit(&f->state, memory_order_acquire);
}

enum apr_step_state graphs_poll(struct apr_backend_model *m)
{
	return m->n_flights ? state_of(&m->flight[m->oldest]) : APR_STEP_IDLE;
}

int graphs_records(struct apr_backend_model *m, const struct apr_sample_result **out)
{
	const struct pinned_step *pin = &m->pin[m->oldest];
	struct flight *f = &m->flight[m->oldest];
	uint32_t i;

	if (graphs_poll(m) != APR_STEP_DONE)
		return -EAGAIN;
	m->oldest = (m->oldest + 1) % APR_MAX_DEPTH;
	m->n_flights--;
	/* relaxed: this thread alone goes on from here */
	atomic_store_explicit(&f->state, APR_STEP_IDLE, memory_order_relaxed);
	if (f->failed)
		return f->failed;
	for (i = 0; i < f->n_records; i++) {
		const struct apr_cuda_record *r = &pin->records[i];
		struct apr_sample_result *o = &m->rest.results[pin->draw_of[i]];

		o->id = r->id;
		o->logprob = r->logprob;
		o->numeric = r->numeric != 0;
		o->n_top = r->n_top;
		if (r->n_top) {
			memcpy(o->top_id, pin->tops[i].id, sizeof o->top_id);
			memcpy(o->top_logprob, pin->tops[i].logprob, sizeof o->top_logprob);
		}
	}
	*out = m->rest.results;
	return 0;
}

void graphs_fence(struct apr_backend_model *m)
{
	struct apr_backend_ctx *c = m->ctx;
	uint32_t i;

	pthread_mutex_lock(&c->lock);
	for (i = 0; i < APR_MAX_DEPTH; i++)
		while (state_of(&m->flight[i]) == APR_STEP_RUNNING || state_of(&m->flight[i]) == APR_STEP_NEAR)
			pthread_cond_wait(&c->idle, &c->lock);
	pthread_mutex_unlock(&c->lock);
}
