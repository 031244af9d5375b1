/* SPDX-License-Identifier: MIT */
/*
 * graphs/step.c over a device that is a thread: what is enqueued runs later, in order,
 * at its own pace, and reads pinned memory only then. Whatever is overwritten too
 * early, copied to the wrong place or launched in the wrong order changes what the
 * device computes: its forward pass is a hash over the tokens that it finds in a
 * row's own pages, its sampler a hash over that and the lists of the draw. The engine
 * drives it; each answer with two steps in flight equals that of one at a time.
 *
 * Owns: that device. Needs CUDA's headers, not its libraries nor a GPU.
 */
#include "tests/harness.h"

#if __has_include(<cublasLt.h>)

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/internal.h"
#include "graphs/step.c" /* under test: its statics are the device's business too */
#include "kernels/common/sample.h"
#include "tests/support/drive.h"
#include "tests/support/gguf_writer.h"

#define CTX 512u
#define VOCAB 400u
#define MAX_OPS 4096u

/* ---- the device ------------------------------------------------------------------------- */

struct op {
	enum { COPY, BEGIN, GRAPH, END, MARK } what;
	void *dst;
	const void *src;
	uint64_t bytes;
	struct edge_begin begin;
	struct edge_end end;
	enum apr_graph_kind kind;
	uint32_t *mark, number;
};

static struct { /* the stream, and what the forward pass leaves */
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t some, all;
	struct op op[MAX_OPS];
	uint32_t head, tail; /* free-running */
	bool stop;
	uint32_t seed, linger; /* µs between being near its end and it: time for the host to make another step */
	uint64_t h[APR_MAX_SLOTS + 2048]; /* of the pass's rows */
	uint32_t *kv;                     /* [pages × 64] */
	uint32_t passes[2];               /* decode, prefill */
	uint32_t dead;
} dev = {.lock = PTHREAD_MUTEX_INITIALIZER, .some = PTHREAD_COND_INITIALIZER, .all = PTHREAD_COND_INITIALIZER};

static struct apr_backend_ctx ctx;
static struct apr_backend_model gpu;

static uint64_t mix(uint64_t h, uint64_t v)
{
	h = (h ^ v) * UINT64_C(0x9e3779b97f4a7c15);
	return h ^ h >> 29;
}

static uint32_t *kv_at(uint32_t slot, uint32_t pos)
{
	const struct apr_kv_group *g = &gpu.sizes.group[0];

	return &dev.kv[(size_t)g->table[(size_t)slot * g->max_pages_seq + pos / 64] * 64 + pos % 64];
}

static void begin_draws(const struct edge_begin *a)
{
	for (uint32_t i = 0; i < a->n_out; i++) {
		struct draw_end *e = &a->to_head->ends[i];
		struct apr_cuda_draw *d = &a->to_head->draws[i];
		const struct slot_state *s;
		struct apr_seen *list;
		uint32_t k;

		*d = a->head->draws[i];
		*e = a->head->ends[i];
		a->to_head->out[i] = a->head->out[i];
		if (!e->row_of_last)
			continue;
		s = &a->states[e->slot];
		e->dead = !s->alive;
		if (e->dead || !e->unseen)
			continue;
		list = (struct apr_seen *)(uintptr_t)d->seen;
		for (k = 0; k < d->n_seen && list[k].id != s->token; k++)
			;
		if (k == d->n_seen)
			list[d->n_seen++] = (struct apr_seen){.id = s->token};
		list[k].output++;
	}
	a->to_head->n_out = a->n_out;
	a->to_head->step = a->number;
}

static void run_begin(const struct edge_begin *a)
{
	for (uint32_t i = 0; i < a->n_rows; i++) {
		bool last = a->tok[i] == APR_TOK_LAST, alive = !last || a->states[a->slot[i]].alive;

		dev.dead += !alive;
		a->to_tok[i] = last ? (int32_t)a->states[a->slot[i]].token : a->tok[i];
		a->to_pos[i] = a->pos[i];
		a->to_slot[i] = alive ? a->slot[i] : APR_CUDA_DEAD;
	}
	if (a->n_rows)
		*a->to_n = a->n_rows;
	if (a->n_out)
		begin_draws(a);
	if (a->near)
		__atomic_store_n(a->near, a->number, __ATOMIC_RELEASE);
}

/* All rows' tokens are written before any row looks at those up to its own. */
static void run_forward(const struct rows_at *r)
{
	for (uint32_t i = 0; i < *r->n; i++)
		if (r->slot[i] != APR_CUDA_DEAD)
			*kv_at(r->slot[i], r->pos[i]) = (uint32_t)r->tok[i];
	for (uint32_t i = 0; i < *r->n; i++) {
		dev.h[i] = 1;
		for (uint32_t p = 0; r->slot[i] != APR_CUDA_DEAD && p <= r->pos[i]; p++)
			dev.h[i] = mix(dev.h[i], *kv_at(r->slot[i], p));
	}
}

static void draw(const struct apr_cuda_draw *d, uint64_t h, struct apr_cuda_record *rec, struct apr_cuda_top *top)
{
	uint64_t lists = 0, x;

	for (uint32_t i = 0; i < d->n_bias; i++)
		lists += mix(d->bias_id[i], (uint64_t)(int64_t)d->bias[i]);
	for (uint32_t i = 0; i < d->n_seen; i++) /* in any order */
		lists += mix(d->seen[i].id, d->seen[i].prompt * 131 + d->seen[i].output);
	x = mix(mix(h, lists), d->seed + d->position + d->sample);
	*rec = (struct apr_cuda_record){.id = d->kind == APR_CUDA_SCORE ? d->score_id : (uint32_t)(x % VOCAB), .n_top = d->n_top,
	                                .logprob = -(float)(mix(h, d->score_id) & 0xffff)};
	for (uint32_t i = 0; i < d->n_top; i++) {
		top->id[i] = (uint32_t)(x + i) % VOCAB;
		top->logprob[i] = (float)i;
	}
}

static void run_graph(enum apr_graph_kind kind)
{
	if (kind == APR_GRAPH_DECODE || kind == APR_GRAPH_PREFILL) {
		dev.passes[kind == APR_GRAPH_PREFILL]++;
		run_forward(kind == APR_GRAPH_DECODE ? &gpu.dev.decode : &gpu.dev.prefill);
		return;
	}
	for (uint32_t i = 0; i < gpu.dev.head->n_out; i++)
		draw(&gpu.dev.head->draws[i], dev.h[gpu.dev.head->out[i]], &gpu.dev.records[i], &gpu.dev.tops[i]);
}

static void run_end(const struct edge_end *a)
{
	for (uint32_t i = 0; i < a->n_out; i++) {
		const struct draw_end *e = &a->head->ends[i];
		const uint32_t *ends = e->n_ends > ENDS_INLINE ? e->ends : e->few;
		bool follows = !e->dead && !e->last;

		a->to_records[i] = a->records[i];
		if (a->to_tops)
			a->to_tops[i] = a->tops[i];
		for (uint32_t k = 0; k < e->n_ends; k++)
			follows &= ends[k] != a->records[i].id;
		if (e->sample)
			a->states[e->slot] = (struct slot_state){a->records[i].id, follows};
	}
	if (a->mark)
		__atomic_store_n(a->mark, a->number, __ATOMIC_RELEASE);
}

static void run_op(const struct op *o)
{
	switch (o->what) {
	case COPY:
		memcpy(o->dst, o->src, o->bytes);
		break;
	case BEGIN:
		run_begin(&o->begin);
		break;
	case GRAPH:
		run_graph(o->kind);
		break;
	case END:
		run_end(&o->end);
		break;
	case MARK:
		__atomic_store_n(o->mark, o->number, __ATOMIC_RELEASE);
		break;
	}
}

static void *run_device(void *arg)
{
	pthread_mutex_lock(&dev.lock);
	while (!dev.stop || dev.head != dev.tail) {
		if (dev.head == dev.tail) {
			pthread_cond_broadcast(&dev.all);
			pthread_cond_wait(&dev.some, &dev.lock);
			continue;
		}
		const struct op *o = &dev.op[dev.head % MAX_OPS];
		uint32_t nap = (dev.seed = dev.seed * 1664525 + 1013904223) >> 24;

		pthread_mutex_unlock(&dev.lock);
		if (nap < 40) /* now and then it is late */
			usleep(nap);
		run_op(o);
		if (o->what == MARK && o->mark == gpu.rest.near)
			usleep(dev.linger);
		pthread_mutex_lock(&dev.lock);
		dev.head++;
	}
	pthread_mutex_unlock(&dev.lock);
	return arg;
}

static int put(const struct op *o)
{
	pthread_mutex_lock(&dev.lock);
	if (dev.tail - dev.head == MAX_OPS)
		abort();
	dev.op[dev.tail++ % MAX_OPS] = *o;
	pthread_cond_signal(&dev.some);
	pthread_mutex_unlock(&dev.lock);
	return 0;
}

/* ---- what step.c calls ----------------------------------------------------------------------- */

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream)
{
	(void)kind;
	(void)stream;
	put(&(struct op){.what = COPY, .dst = dst, .src = src, .bytes = n});
	return cudaSuccess;
}
cudaError_t cudaSetDevice(int device)
{
	return device ? cudaErrorInvalidDevice : cudaSuccess;
}
cudaError_t cudaGetLastError(void)
{
	return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream)
{
	bool idle;

	(void)stream;
	pthread_mutex_lock(&dev.lock);
	idle = dev.head == dev.tail;
	pthread_mutex_unlock(&dev.lock);
	return idle ? cudaSuccess : cudaErrorNotReady;
}
int graphs_cuda(struct apr_backend_ctx *c, cudaError_t rc, const char *what, char *err, size_t errlen)
{
	(void)c;
	(void)what;
	(void)err;
	(void)errlen;
	return rc == cudaSuccess ? 0 : -EIO;
}
void graphs_log(const struct apr_backend_ctx *c, int level, const char *fmt, ...)
{
	(void)c;
	(void)level;
	(void)fmt;
}
int graphs_launch(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t rows)
{
	(void)m;
	(void)rows;
	return put(&(struct op){.what = GRAPH, .kind = kind});
}
int apr_graphs_begin(cudaStream_t stream, const struct edge_begin *a)
{
	(void)stream;
	return put(&(struct op){.what = BEGIN, .begin = *a});
}
int apr_graphs_end(cudaStream_t stream, const struct edge_end *a)
{
	(void)stream;
	return put(&(struct op){.what = END, .end = *a});
}
int apr_graphs_mark(cudaStream_t stream, uint32_t *mark, uint32_t number)
{
	(void)stream;
	return put(&(struct op){.what = MARK, .mark = mark, .number = number});
}
void apr_cuda_attn_cut(const struct apr_cuda_attn_plan *p, const uint32_t *pos, const uint32_t *slot, uint32_t n,
                       struct apr_cuda_attn_tile *tiles, uint32_t *n_tiles)
{
	(void)p;
	(void)pos;
	(void)slot;
	(void)tiles;
	n_tiles[0] = n;
	n_tiles[1] = 0;
}

/* ---- the backend ------------------------------------------------------------------------------- */

static void *some(size_t n, size_t size)
{
	void *p = calloc(n + 1, size);

	if (!p)
		abort();
	return p;
}

static void place(struct rows_at *r, uint32_t n)
{
	uint8_t *b = some(64 + 12 * (size_t)n, 1);

	*r = (struct rows_at){.base = b, .bytes = 64 + 12 * (uint64_t)n};
	r->n = (uint32_t *)(void *)b;
	r->n_tiles = r->n + 1;
	r->tok = (int32_t *)(void *)(b + 64);
	r->pos = (uint32_t *)(void *)(b + 64 + 4 * (size_t)n);
	r->slot = (uint32_t *)(void *)(b + 64 + 8 * (size_t)n);
}

static void make_pinned(struct pinned_step *p, uint32_t rows)
{
	place(&p->prefill, rows);
	p->decode = some(gpu.n_decode, sizeof *p->decode);
	for (uint32_t i = 0; i < gpu.n_decode; i++)
		place(&p->decode[i], APR_CUDA_DECODE_ROWS);
	p->head = some(gpu.n_head, sizeof *p->head);
	p->records = some(rows, sizeof *p->records);
	p->tops = some(rows, sizeof *p->tops);
	p->draw_of = some(rows, sizeof *p->draw_of);
	p->lists = some(gpu.lists_bytes, 1);
}

/* The model behind the CPU's handle: its weights are loaded and never looked at. */
static void make_gpu(const struct apr_sizes *s)
{
	uint32_t rows = s->max_rows, i;

	memset(&gpu, 0, sizeof gpu);
	gpu.ctx = &ctx;
	gpu.sizes = *s;
	gpu.table = (uint32_t *)(uintptr_t)s->group[0].table;
	gpu.n_decode = rows / APR_CUDA_DECODE_ROWS + 1;
	gpu.n_head = 2 * gpu.n_decode + 1;
	gpu.lists_bytes = UINT64_C(4) << 20;
	gpu.passes = some(gpu.n_decode + 1, sizeof *gpu.passes);
	place(&gpu.dev.prefill, rows);
	place(&gpu.dev.decode, APR_CUDA_DECODE_ROWS);
	gpu.dev.head = some(1, sizeof *gpu.dev.head);
	gpu.dev.records = some(APR_HEAD_ROWS, sizeof *gpu.dev.records);
	gpu.dev.tops = some(APR_HEAD_ROWS, sizeof *gpu.dev.tops);
	gpu.dev.states = some(APR_MAX_SLOTS, sizeof *gpu.dev.states);
	gpu.dev.lists = some(gpu.lists_bytes, 1);
	for (i = 0; i < APR_MAX_DEPTH; i++) {
		make_pinned(&gpu.pin[i], rows);
		gpu.flight[i].m = &gpu;
	}
	gpu.rest.mark = some(16, 4);
	gpu.rest.near = some(16, 4);
	gpu.rest.place = some(rows, 4);
	gpu.rest.results = some(rows, sizeof *gpu.rest.results);
	gpu.rest.table = some((size_t)s->group[0].max_pages_seq * APR_MAX_SLOTS, 4);
	dev.kv = some((size_t)s->group[0].n_pages * 64, 4);
}

static void free_rows(struct rows_at *r)
{
	free(r->base);
}

static void unmake_gpu(void)
{
	for (uint32_t i = 0; i < APR_MAX_DEPTH; i++) {
		struct pinned_step *p = &gpu.pin[i];

		free_rows(&p->prefill);
		for (uint32_t k = 0; k < gpu.n_decode; k++)
			free_rows(&p->decode[k]);
		free(p->decode);
		free(p->head);
		free(p->records);
		free(p->tops);
		free(p->draw_of);
		free(p->lists);
	}
	free_rows(&gpu.dev.prefill);
	free_rows(&gpu.dev.decode);
	free(gpu.dev.head);
	free(gpu.dev.records);
	free(gpu.dev.tops);
	free(gpu.dev.states);
	free(gpu.dev.lists);
	free(gpu.rest.mark);
	free(gpu.rest.near);
	free(gpu.rest.place);
	free(gpu.rest.results);
	free(gpu.rest.table);
	free(gpu.passes);
	free(dev.kv);
}

static int gpu_load(struct apr_backend_ctx *c, const struct apr_backend_load *in, struct apr_backend_model **out, char *err,
                    size_t errlen)
{
	int rc = apr_cpu_backend.load(c, in, out, err, errlen);

	if (!rc)
		make_gpu(in->sizes);
	return rc;
}
static void gpu_unload(struct apr_backend_model *m)
{
	graphs_fence(&gpu);
	unmake_gpu();
	apr_cpu_backend.unload(m);
}
static int gpu_submit(struct apr_backend_model *m, const struct apr_step *step)
{
	(void)m;
	return graphs_submit(&gpu, step);
}
static enum apr_step_state gpu_poll(struct apr_backend_model *m)
{
	(void)m;
	return graphs_poll(&gpu);
}
static int gpu_records(struct apr_backend_model *m, const struct apr_sample_result **out)
{
	(void)m;
	return graphs_records(&gpu, out);
}
static void gpu_fence(struct apr_backend_model *m)
{
	(void)m;
	graphs_fence(&gpu);
}

static struct apr_engine *engine;
static struct apr_loaded *model;
static uint32_t ids[CTX];

static void open_it(bool early, uint64_t kv_mem)
{
	static struct apr_backend table;
	struct tiny_spec spec = {.n_layers = 1, .type = APR_TYPE_F16, .n_vocab = VOCAB, .n_ctx = CTX};
	struct apr_engine_config cfg = drive_config(NULL, CTX, 1);
	char path[300], err[256] = "";

	for (uint32_t i = 0; i < CTX; i++)
		ids[i] = (i * 7919u + 13) % 390;
	snprintf(path, sizeof path, "%s/stream.gguf", apr_test_tmpdir());
	CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(path, &spec), 0);
	cfg.kv_mem = kv_mem;
	CU_ASSERT_EQUAL_FATAL(apr_engine_open(&engine, &cfg, err, sizeof err), 0);
	table = apr_cpu_backend;
	table.depth = APR_MAX_DEPTH;
	table.load = gpu_load;
	table.unload = gpu_unload;
	table.submit = gpu_submit;
	table.poll = gpu_poll;
	table.records = gpu_records;
	table.fence = gpu_fence;
	engine->backend = &table;
	memset(&ctx, 0, sizeof ctx);
	ctx.cfg.notify_fd = engine->notify_fd;
	ctx.queue_tail = &ctx.queue;
	pthread_mutex_init(&ctx.lock, NULL);
	pthread_mutex_init(&ctx.enqueue_lock, NULL);
	pthread_cond_init(&ctx.wake, NULL);
	pthread_cond_init(&ctx.idle, NULL);
	dev.stop = false;
	dev.passes[0] = dev.passes[1] = dev.dead = 0;
	CU_ASSERT_EQUAL_FATAL(pthread_create(&dev.thread, NULL, run_device, NULL), 0);
	CU_ASSERT_EQUAL_FATAL(pthread_create(&ctx.thread, NULL, graphs_watch, &ctx), 0);
	CU_ASSERT_EQUAL_FATAL(apr_engine_load(engine, "m", path, NULL, NULL, &model, err, sizeof err), 0);
	gpu.early = early;
}

static void close_it(void)
{
	CU_ASSERT_EQUAL(apr_kv_check(model->kv), 0);
	CU_ASSERT_EQUAL(atomic_load(&ctx.sticky), 0);
	drive_close(engine, model);
	pthread_mutex_lock(&ctx.lock);
	ctx.stop = true;
	pthread_cond_signal(&ctx.wake);
	pthread_mutex_unlock(&ctx.lock);
	pthread_join(ctx.thread, NULL);
	pthread_mutex_lock(&dev.lock);
	dev.stop = true;
	pthread_cond_signal(&dev.some);
	pthread_mutex_unlock(&dev.lock);
	pthread_join(dev.thread, NULL);
}

/* ---- the tests ------------------------------------------------------------------------------------ */

static struct drive_job job_of(uint32_t n_prompt, uint32_t n, uint64_t seed)
{
	struct drive_job j = {.p = {.kind = APR_SEQ_GENERATE, .ids = ids, .n_ids = n_prompt, .max_tokens = n,
	                            .sampling = drive_greedy(), .ignore_eos = true, .want_logprob = true, .n_top = 3}};

	j.p.sampling.seed = seed;
	j.p.scope = seed;
	return j;
}

static void same(const struct drive_job *a, const struct drive_job *b)
{
	CU_ASSERT(a->rc == 0 && b->rc == 0 && a->end == b->end && a->n_ends == b->n_ends);
	CU_ASSERT_EQUAL_FATAL(a->n_tok, b->n_tok);
	for (uint32_t i = 0; i < a->n_tok; i++) {
		const struct drive_token *x = &a->tok[i], *y = &b->tok[i];

		if (x->index == y->index && x->id == y->id && !memcmp(&x->logprob, &y->logprob, sizeof x->logprob) &&
		    x->n_top == y->n_top && !memcmp(x->top_id, y->top_id, x->n_top * sizeof *x->top_id))
			continue;
		printf("\n  token %u: %u against %u", i, x->id, y->id);
		CU_FAIL("other tokens");
		return;
	}
}

/* One step at a time, then two, over a late device: equal answers. */
static void both(const struct drive_job *jobs, uint32_t n, bool early, uint64_t kv_mem)
{
	struct drive_job a[APR_MAX_SLOTS], b[APR_MAX_SLOTS];

	memcpy(a, jobs, n * sizeof *jobs);
	memcpy(b, jobs, n * sizeof *jobs);
	drive_one_step = true;
	open_it(early, kv_mem);
	CU_ASSERT(drive_run(model, engine, a, n) > 0);
	close_it();
	drive_one_step = false;
	open_it(early, kv_mem);
	CU_ASSERT(drive_run(model, engine, b, n) > 0);
	close_it();
	for (uint32_t i = 0; i < n; i++)
		same(&a[i], &b[i]);
	drive_done(a, n);
	drive_done(b, n);
}

static void a_crowd(void)
{
	struct drive_job jobs[12];

	for (uint32_t round = 0; round < 2; round++) {
		for (uint32_t i = 0; i < 12; i++) {
			jobs[i] = job_of(17 + 31 * i, 20 + 7 * i, 100 + i);
			jobs[i].start_step = 2 * i;
			jobs[i].chunk = i % 2 ? 40 : 0;
			jobs[i].p.sampling.repeat_penalty = i % 3 ? 1.0f : 1.2f;
			jobs[i].p.sampling.penalty_window = i % 2 ? -1 : 7;
		}
		jobs[3].p.kind = jobs[7].p.kind = APR_SEQ_SCORE; /* more than 64 wanted rows in a pass */
		jobs[7].p.force_decode = true;
		both(jobs, 12, round, 0);
		CU_ASSERT(dev.passes[0] > 0 && dev.passes[1] > 0);
	}
}

/* 64 sequences and forced tokens: several decode passes in a step. */
static void many_rows(void)
{
	struct drive_job jobs[APR_MAX_SLOTS];

	for (uint32_t i = 0; i < APR_MAX_SLOTS; i++) {
		jobs[i] = job_of(3 + i, 70, 300 + i);
		jobs[i].p.forced = ids + 100;
		jobs[i].p.n_forced = i % 4 ? 0 : 50;
		jobs[i].p.sampling.frequency_penalty = i % 2 ? 0.5f : 0.0f;
	}
	both(jobs, APR_MAX_SLOTS, false, 0);
}

static void preempted(void)
{
	struct drive_job jobs[3];

	for (uint32_t i = 0; i < 3; i++) {
		jobs[i] = job_of(150 + 20 * i, 120, 21 + i);
		jobs[i].drop_every = 11 + i; /* both kinds of rows of a sequence in a step */
	}
	both(jobs, 3, true, 0);
}

static void ends_and_biases(void)
{
	struct drive_job want = job_of(70, 60, 9), jobs[3];
	uint32_t stop[3][12], bias_id[2] = {5, 9};
	float bias[2] = {2.0f, -3.0f};

	open_it(false, 0);
	CU_ASSERT(drive_run(model, engine, &want, 1) > 0);
	close_it();
	CU_ASSERT_EQUAL_FATAL(want.n_tok, 60);
	for (uint32_t i = 0; i < 3; i++) {
		for (uint32_t k = 0; k < 12; k++)
			stop[i][k] = want.tok[10 + 20 * i].id;
		jobs[i] = job_of(70, 60, 9);
		jobs[i].p.scope = 50 + i;
		jobs[i].p.stop_ids = stop[i];
		jobs[i].p.n_stop_ids = i == 1 ? 12 : 1; /* in the draw itself, and beside it */
	}
	jobs[2].p.sampling.n_bias = 2;
	jobs[2].p.sampling.bias_id = bias_id;
	jobs[2].p.sampling.bias = bias;
	dev.linger = 3000;
	both(jobs, 3, false, 0);
	dev.linger = 0;
	CU_ASSERT(dev.dead > 0); /* rows for nothing, and nobody saw them */
	drive_done(&want, 1);
}

/* The list's room is checked before anything is enqueued: the step is refused, the device is as well as before, and the
 * same sequence goes on when there is room. */
static void too_long_a_list(void)
{
	struct drive_job j = job_of(200, 10, 4);
	struct apr_step_part part;
	struct apr_record rec;
	uint32_t bad;
	bool more;
	int n;

	open_it(false, 0);
	gpu.lists_bytes = 64;
	j.p.sampling.repeat_penalty = 1.5f;
	CU_ASSERT_EQUAL_FATAL(apr_seq_new(model, &j.p, &j.seq, &bad), 0);
	CU_ASSERT_EQUAL(apr_seq_reserve(j.seq, 200), 0);
	part = (struct apr_step_part){j.seq, 200};
	CU_ASSERT_EQUAL(apr_step_submit(model, &part, 1), -E2BIG);
	CU_ASSERT_EQUAL(cudaStreamQuery(NULL), cudaSuccess);
	gpu.lists_bytes = 1 << 20;
	CU_ASSERT_EQUAL(apr_step_submit(model, &part, 1), 0);
	while ((n = apr_step_poll(model, &rec, 1, &more)) == -EAGAIN)
		drive_wait(engine);
	CU_ASSERT(n == 1 && rec.has_token);
	apr_seq_free(j.seq);
	j.seq = NULL;
	j.p.scope = 5; /* nothing cached */
	CU_ASSERT(drive_run(model, engine, &j, 1) > 0);
	CU_ASSERT(j.n_tok == 10 && j.tok[0].id == rec.id);
	drive_done(&j, 1);
	close_it();
}

static const struct apr_test tests[] = {
	{"a_crowd", a_crowd, KEEPS_HEAP}, /* stdio's first buffer, ended threads' stacks */
	{"many_rows", many_rows, KEEPS_HEAP},
	{"preempted", preempted, KEEPS_HEAP},
	{"ends_and_biases", ends_and_biases, KEEPS_HEAP},
	{"too_long_a_list", too_long_a_list, KEEPS_HEAP},
};

#else

static void no_headers(void)
{
	SKIP("CUDA's headers are not here");
}

static const struct apr_test tests[] = {{"no_headers", no_headers, 0}};

#endif

TEST_MAIN("graphs/stream", tests)
