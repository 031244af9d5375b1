/* SPDX-License-Identifier: MIT */
/*
 * One step: from the engine's rows to passes on the stream, and its records.
 *
 * Owns: the division of a step by kind of row, the pinned slots that a pass is
 * copied from, the watch for the step's mark. submit only enqueues; the watching
 * thread spins on pinned memory and asks the runtime now and then, without
 * waiting, whether the device is still well.
 */
#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "graphs/graphs.h"

#define ASK_EVERY_NS 1000000 /* of a step that has not ended */

struct enqueue { /* one step on its way to the stream */
	struct apr_backend_model *m;
	const struct apr_step *s;
	cudaStream_t stream;
	uint32_t n_prompt, n_generated, heads;
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

static void copy_out(struct enqueue *q, void *pinned, const void *dev, uint64_t bytes)
{
	note(q, cudaMemcpyAsync(pinned, dev, bytes, cudaMemcpyDeviceToHost, q->stream), "a copy from the device");
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

		memcpy(m->pin.table + at, u->pages, u->n * sizeof *u->pages);
		copy_in(q, m->table + at, m->pin.table + at, u->n * sizeof *u->pages);
	}
}

/* Each row's place among those of its kind; prompt rows straight into their slot. */
static void divide_rows(struct enqueue *q)
{
	struct apr_backend_model *m = q->m;
	const struct apr_step *s = q->s;
	uint32_t i;

	for (i = 0; i < s->n_rows; i++) {
		bool prompt = s->kind[i] == APR_ROW_PROMPT;
		uint32_t at = prompt ? q->n_prompt++ : q->n_generated++;
		const struct rows_at *r = prompt ? &m->pin.prefill : &m->pin.decode[at / APR_CUDA_DECODE_ROWS];
		uint32_t k = prompt ? at : at % APR_CUDA_DECODE_ROWS;

		m->pin.place[i] = at;
		r->tok[k] = s->tok[i];
		r->pos[k] = s->pos[i];
		r->slot[k] = s->slot[i];
	}
}

/* Tiles of at most 64 consecutive positions of one sequence; the latest positions have the most keys and go first. */
static void make_tiles(const struct rows_at *r, uint32_t n)
{
	uint32_t i, k, n_tiles = 0;

	for (i = 0; i < n; i += k) {
		for (k = 1; k < 64 && i + k < n; k++)
			if (r->slot[i + k] != r->slot[i] || r->pos[i + k] != r->pos[i] + k)
				break;
		r->tiles[n_tiles++] = (struct apr_cuda_attn_tile){.slot = r->slot[i], .row = i, .rows = k, .pos = r->pos[i]};
	}
	for (i = 1; i < n_tiles; i++) { /* few, and nearly sorted backwards */
		struct apr_cuda_attn_tile t = r->tiles[i];

		for (k = i; k > 0 && r->tiles[k - 1].pos < t.pos; k--)
			r->tiles[k] = r->tiles[k - 1];
		r->tiles[k] = t;
	}
	*r->n_tiles = n_tiles;
}

static void launch(struct enqueue *q, struct bucket_set *set, uint32_t rows)
{
	uint32_t i;

	for (i = 0; i < set->n && set->b[i].rows < rows; i++)
		;
	if (i == set->n) {
		q->rc = q->rc ? q->rc : -EINVAL; /* max_rows is the last bucket: the engine gives no more */
		return;
	}
	note(q, cudaGraphLaunch(set->b[i].exec, q->stream), "a graph");
	set->b[i].replays++;
}

/* n items into the lists' arena; the device address of what the pinned arena holds there. */
static const void *list(struct enqueue *q, const void *from, uint64_t bytes)
{
	uint64_t at = q->lists;

	if (!bytes)
		return NULL;
	if (round_up(bytes, 64) > q->m->lists_bytes - at) {
		q->rc = q->rc ? q->rc : -E2BIG;
		return NULL;
	}
	memcpy(q->m->pin.lists + at, from, bytes);
	q->lists += round_up(bytes, 64);
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
	out.bias_id = list(q, p->bias_id, p->n_bias * sizeof *p->bias_id);
	out.bias = list(q, p->bias, p->n_bias * sizeof *p->bias);
	out.seen = list(q, d->seen, d->n_seen * sizeof *d->seen);
	return out;
}

/* Head and sampling of the n rows that h holds, then their records to pinned memory. */
static void run_head(struct enqueue *q, struct head_block *h, uint32_t n)
{
	struct apr_backend_model *m = q->m;
	struct apr_cuda_record *records = m->pin.records + m->n_records - n;
	struct apr_cuda_top *tops = m->pin.tops + m->n_records - n;

	h->n_out = n;
	h->step = m->number;
	copy_in(q, m->dev.head, h, offsetof(struct head_block, draws) + n * sizeof *h->draws);
	launch(q, &m->head, n);
	copy_out(q, records, m->dev.records, n * sizeof *records);
	if (m->has_tops)
		copy_out(q, tops, m->dev.tops, n * sizeof *tops);
}

/* The wanted rows of a kind at places first … end - 1, 64 at a time; x and y hold that pass. */
static void run_heads(struct enqueue *q, uint8_t kind, uint32_t first, uint32_t end)
{
	struct apr_backend_model *m = q->m;
	const struct apr_step *s = q->s;
	struct head_block *h = NULL;
	uint32_t i, n = 0;

	for (i = 0; i < s->n_draws; i++) {
		uint32_t row = s->out[i], at = m->pin.place[row];

		if (s->kind[row] != kind || at < first || at >= end)
			continue;
		if (!n) {
			if (q->heads == m->n_head) {
				q->rc = q->rc ? q->rc : -E2BIG;
				return;
			}
			h = &m->pin.head[q->heads++];
		}
		h->out[n] = at - first;
		h->draws[n++] = draw_of(q, &s->draws[i]);
		m->pin.draw_of[m->n_records++] = i;
		if (n == APR_HEAD_ROWS) {
			run_head(q, h, n);
			n = 0;
		}
	}
	if (n)
		run_head(q, h, n);
}


static void run_passes(struct enqueue *q)
{
	struct apr_backend_model *m = q->m;
	uint32_t first, n;

	if (q->n_prompt) {
		*m->pin.prefill.n = q->n_prompt;
		make_tiles(&m->pin.prefill, q->n_prompt);
		copy_in(q, m->dev.prefill.base, m->pin.prefill.base, m->pin.prefill.bytes);
		launch(q, &m->prefill, q->n_prompt);
		run_heads(q, APR_ROW_PROMPT, 0, q->n_prompt);
	}
	for (first = 0; first < q->n_generated && !q->rc; first += n) {
		const struct rows_at *r = &m->pin.decode[first / APR_CUDA_DECODE_ROWS];

		n = q->n_generated - first < APR_CUDA_DECODE_ROWS ? q->n_generated - first : APR_CUDA_DECODE_ROWS;
		*r->n = n;
		copy_in(q, m->dev.decode.base, r->base, r->bytes);
		launch(q, &m->decode, n);
		run_heads(q, APR_ROW_GENERATED, first, first + n);
	}
}

/* ---- submit, watch, records ---------------------------------------------------------------- */

int graphs_submit(struct apr_backend_model *m, const struct apr_step *step)
{
	struct apr_backend_ctx *c = m->ctx;
	struct enqueue q = {.m = m, .s = step, .stream = c->compute};
	uint32_t i;

	/* relaxed: this thread set it, or saw it DONE */
	if (atomic_load_explicit(&m->state, memory_order_relaxed) == APR_STEP_RUNNING)
		return -EBUSY;
	if (atomic_load_explicit(&c->sticky, memory_order_relaxed) || cudaSetDevice(c->device) != cudaSuccess)
		return -EIO;
	m->step = step;
	m->number++;
	m->n_records = 0;
	m->failed = 0;
	m->has_tops = false;
	for (i = 0; i < step->n_draws; i++)
		m->has_tops |= step->draws[i].n_top > 0;
	update_tables(&q);
	divide_rows(&q);
	run_passes(&q);
	if (!q.rc)
		q.rc = apr_graphs_mark(c->compute, m->pin.mark, m->number);
	if (q.rc) { /* part of it may run: nothing after it on this stream can be trusted */
		atomic_store_explicit(&c->sticky, q.rc, memory_order_relaxed);
		return q.rc;
	}
	m->next = NULL;
	pthread_mutex_lock(&c->lock);
	/* relaxed: the watcher reads the rest under the lock */
	atomic_store_explicit(&m->state, APR_STEP_RUNNING, memory_order_relaxed);
	*c->queue_tail = m;
	c->queue_tail = &m->next;
	pthread_cond_signal(&c->wake);
	pthread_mutex_unlock(&c->lock);
	return 0;
}

static bool ended(const struct apr_backend_model *m)
{
	/* pairs with the release store in mark.cu */
	return __atomic_load_n(m->pin.mark, __ATOMIC_ACQUIRE) == m->number;
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

/* Until the step's mark is there, or the device is known to have failed. */
static int watch_step(struct apr_backend_model *m)
{
	uint64_t ask = now_ns() + ASK_EVERY_NS;
	uint32_t i = 0;

	while (!ended(m)) {
		relax();
		if (++i % 256 || now_ns() < ask)
			continue;
		cudaError_t rc = cudaStreamQuery(m->ctx->compute);

		if (rc == cudaSuccess && !ended(m))
			return -EIO; /* it ended without its mark */
		if (rc != cudaSuccess && rc != cudaErrorNotReady)
			return graphs_cuda(m->ctx, rc, "a step", NULL, 0);
		ask = now_ns() + ASK_EVERY_NS;
	}
	return 0;
}

void *graphs_watch(void *ctx)
{
	struct apr_backend_ctx *c = ctx;
	const uint64_t one = 1;

	(void)cudaSetDevice(c->device);
	pthread_mutex_lock(&c->lock);
	while (!c->stop || c->queue) {
		struct apr_backend_model *m = c->queue;

		if (!m) {
			pthread_cond_wait(&c->wake, &c->lock);
			continue;
		}
		pthread_mutex_unlock(&c->lock);
		m->failed = watch_step(m);
		pthread_mutex_lock(&c->lock);
		c->queue = m->next;
		if (!c->queue)
			c->queue_tail = &c->queue;
		/* pairs with graphs_poll */
		atomic_store_explicit(&m->state, APR_STEP_DONE, memory_order_release);
		pthread_cond_broadcast(&c->idle);
		/* An eventfd's counter cannot fill up by ones; nothing to do about another failure. */
		if (c->cfg.notify_fd >= 0 && write(c->cfg.notify_fd, &one, sizeof one) < 0)
			continue;
	}
	pthread_mutex_unlock(&c->lock);
	return NULL;
}

enum apr_step_state graphs_poll(struct apr_backend_model *m)
{
	/* pairs with graphs_watch's release */
	return (enum apr_step_state)atomic_load_explicit(&m->state, memory_order_acquire);
}

int graphs_records(struct apr_backend_model *m, const struct apr_sample_result **out)
{
	uint32_t i;

	if (graphs_poll(m) != APR_STEP_DONE)
		return -EAGAIN;
	if (m->failed)
		return m->failed;
	for (i = 0; i < m->n_records; i++) {
		const struct apr_cuda_record *r = &m->pin.records[i];
		struct apr_sample_result *o = &m->pin.results[m->pin.draw_of[i]];

		o->id = r->id;
		o->logprob = r->logprob;
		o->numeric = r->numeric != 0;
		o->n_top = r->n_top;
		if (r->n_top) {
			memcpy(o->top_id, m->pin.tops[i].id, sizeof o->top_id);
			memcpy(o->top_logprob, m->pin.tops[i].logprob, sizeof o->top_logprob);
		}
	}
	*out = m->pin.results;
	return 0;
}

void graphs_fence(struct apr_backend_model *m)
{
	struct apr_backend_ctx *c = m->ctx;

	pthread_mutex_lock(&c->lock);
	while (graphs_poll(m) == APR_STEP_RUNNING)
		pthread_cond_wait(&c->idle, &c->lock);
	pthread_mutex_unlock(&c->lock);
}
