/* SPDX-License-Identifier: MIT */
/*
 * The ops of kernels/ops.h on the CPU: norms, products, KV writes, activations.
 *
 * Owns: the scratch memory, the order of steps within an op, which steps are worth
 * a parallel region. Does not own attention (attn_cpu.c), the arithmetic of a row
 * (rows_impl.h) or products (linear.h).
 */
#include "kernels/cpu/ops_cpu.h"

#include <string.h>

#include "kernels/cpu/pool.h"
#include "kernels/cpu/scratch.h"

/* A region's hand-off costs a microsecond or two, about what this many floats' worth of row work does. */
#define REGION_FLOATS 8192u
#define PART_PAIRS 512u

const struct apr_ops_isa *apr_cpu_ops_isa(void)
{
	switch (apr_cpu_isa_current()) {
#ifdef __x86_64__
	case APR_ISA_AVX2:
		return &apr_ops_avx2;
	case APR_ISA_AVX512:
	case APR_ISA_VNNI:
		return &apr_ops_avx512;
#endif
#ifdef __aarch64__
	case APR_ISA_NEON:
		return &apr_ops_neon;
#endif
	default:
		return &apr_ops_scalar;
	}
}

/* ---- scratch ------------------------------------------------------------------ */
struct layout {
	size_t size;
	bool bad;
};

/* count × each × size bytes, 64-aligned; the offset of their first byte */
static size_t take(struct layout *l, uint64_t count, uint64_t each, uint64_t size)
{
	size_t at = l->size, n;

	if (__builtin_mul_overflow(count, each, &n) || __builtin_mul_overflow(n, size, &n) ||
	    __builtin_add_overflow(n, 63, &n) || __builtin_add_overflow(l->size, n & ~(size_t)63, &l->size))
		l->bad = true;
	return at;
}

static size_t act_bytes(const struct apr_cpu_limits *l, uint32_t rows, bool *bad)
{
	uint64_t o = (uint64_t)l->n_heads * l->v_dim;
	uint64_t widths[3] = {l->n_embd, l->n_ff, o};
	size_t most = 0;
	int i;

	for (i = 0; i < 3; i++) {
		size_t n;

		if (widths[i] > UINT32_MAX) {
			*bad = true;
			return 0;
		}
		if (!widths[i])
			continue;
		n = apr_act_bytes(l->math, rows, (uint32_t)widths[i]);
		*bad |= !n;
		most = n > most ? n : most;
	}
	return most;
}

struct places {
	size_t h, k, v, up, act, tiles, order, work, part, buffers, end;
	size_t q, s, block, half, o, total, ml, worker; /* of one worker's buffers */
	uint32_t part_pairs;
};

static bool place(const struct apr_cpu_limits *l, unsigned threads, struct places *p)
{
	uint32_t rows = l->rows > APR_HEAD_ROWS ? l->rows : APR_HEAD_ROWS;
	uint32_t segs = l->n_ctx / APR_KV_SEGMENT + 1, dim = l->k_dim > l->v_dim ? l->k_dim : l->v_dim;
	uint32_t ldv, tile = l->n_heads > APR_ATTN_TILE_HEADS ? l->n_heads : APR_ATTN_TILE_HEADS;
	struct layout m = {.size = sizeof(struct apr_cpu_scratch)}, w = {0};

	if (!l->rows || !l->n_heads || !l->n_kv_heads || dim > UINT32_MAX - 64)
		return false;
	dim = (dim + 15u) & ~15u;
	ldv = apr_attn_ldv(l->v_dim);
	m.size = (m.size + 63) & ~(size_t)63;
	p->part_pairs = segs > PART_PAIRS ? segs : PART_PAIRS;
	p->h = take(&m, rows, l->n_embd, sizeof(float));
	p->k = take(&m, l->rows, (uint64_t)l->n_kv_heads * l->k_dim, sizeof(float));
	p->v = take(&m, l->rows, (uint64_t)l->n_kv_heads * l->v_dim, sizeof(float));
	p->up = take(&m, l->rows, l->n_ff, sizeof(float));
	p->act = take(&m, act_bytes(l, rows, &m.bad), 1, 1);
	p->tiles = take(&m, l->rows, 1, sizeof(struct apr_attn_tile));
	p->order = take(&m, l->rows, 1, sizeof(uint32_t));
	p->work = take(&m, threads, 1, sizeof(struct apr_attn_work));
	p->part = take(&m, p->part_pairs, (uint64_t)l->n_heads * ((uint64_t)l->v_dim + APR_ATTN_PART_HEAD), sizeof(float));
	p->q = take(&w, tile, l->k_dim, sizeof(float));
	p->s = take(&w, tile, APR_KV_SEGMENT, sizeof(float));
	p->block = take(&w, APR_KV_PAGE, dim, sizeof(float));
	p->half = take(&w, APR_KV_PAGE, dim, sizeof(uint16_t));
	p->o = take(&w, tile, ldv, sizeof(float));
	p->total = take(&w, tile, ldv, sizeof(float));
	p->ml = take(&w, tile, 4, sizeof(float));
	p->worker = w.size;
	p->buffers = take(&m, threads, w.size, 1);
	p->end = m.size;
	return !m.bad && !w.bad;
}

size_t apr_cpu_scratch_bytes(const struct apr_cpu_limits *l, unsigned threads)
{
	struct places p;

	return place(l, threads, &p) ? p.end : 0;
}

struct apr_cpu_scratch *apr_cpu_scratch_init(const struct apr_cpu_limits *l, struct apr_pool *pool, void *mem)
{
	struct apr_cpu_scratch *s = mem;
	uint8_t *base = mem;
	struct places p;
	unsigned i, threads = apr_pool_threads(pool);

	if (!place(l, threads, &p))
		return NULL;
	memset(s, 0, sizeof(*s));
	s->lim = *l;
	s->pool = pool;
	s->threads = threads;
	s->h = (float *)(base + p.h);
	s->k = (float *)(base + p.k);
	s->v = (float *)(base + p.v);
	s->up = (float *)(base + p.up);
	s->act = base + p.act;
	s->tiles = (struct apr_attn_tile *)(base + p.tiles);
	s->order = (uint32_t *)(base + p.order);
	s->work = (struct apr_attn_work *)(base + p.work);
	s->part = (float *)(base + p.part);
	s->part_pairs = p.part_pairs;
	for (i = 0; i < threads; i++) {
		uint8_t *b = base + p.buffers + i * p.worker;

		s->work[i] = (struct apr_attn_work){.q = (float *)(b + p.q),
		                                    .s = (float *)(b + p.s),
		                                    .block = (float *)(b + p.block),
		                                    .half = (uint16_t *)(b + p.half),
		                                    .o = (float *)(b + p.o),
		                                    .total = (float *)(b + p.total),
		                                    .ml = (float *)(b + p.ml)};
	}
	return s;
}

/* ---- steps over rows -------------------------------------------------------------- */
/* fn for each of n rows: in a region where rows × floats are worth one, else here */
static void each_row(struct apr_cpu_scratch *s, uint32_t n, uint64_t floats, void (*fn)(void *, uint32_t, unsigned), void *arg)
{
	apr_pool_run(n > 1 && n * floats >= REGION_FLOATS ? s->pool : NULL, n, fn, arg);
}

static struct apr_pool *pool_for(struct apr_cpu_scratch *s, uint32_t rows, uint64_t floats)
{
	return rows * floats >= REGION_FLOATS ? s->pool : NULL;
}

struct norm_rows {
	const struct apr_ops_isa *isa;
	const float *x, *y;
	float *x_out, *h;
	const struct apr_norm *post, *norm;
	const uint32_t *index; /* row i reads x[index[i]]; NULL: x[i] */
	uint32_t n;
};

static void norm_row(void *arg, uint32_t i, unsigned worker)
{
	const struct norm_rows *r = arg;
	size_t from = (size_t)(r->index ? r->index[i] : i) * r->n, to = (size_t)i * r->n;

	(void)worker;
	r->isa->add_norm(r->x + from, r->y ? r->y + from : NULL, r->post, r->x_out ? r->x_out + to : NULL, r->norm, r->h + to, r->n);
}

/* h = prepared norm(x + post(y)) */
static void norm_prepare(struct apr_cpu_scratch *s, struct norm_rows *r, uint32_t rows, struct apr_act *a)
{
	r->isa = apr_cpu_ops_isa();
	r->h = s->h;
	each_row(s, rows, r->n, norm_row, r);
	apr_act_prepare(pool_for(s, rows, r->n), a, s->lim.math, s->h, r->n, rows, r->n, s->act);
}

struct embed_rows {
	const struct apr_rows *r;
	const struct apr_op_embed *op;
};

static void embed_row(void *arg, uint32_t i, unsigned worker)
{
	const struct embed_rows *e = arg;
	float *x = e->op->x + (size_t)i * e->op->n_embd;

	(void)worker;
	apr_panel_row(&e->op->w->lin, (uint32_t)e->r->tok[i], x);
	if (e->op->scale != 1.0f)
		apr_cpu_ops_isa()->scale(x, e->op->n_embd, e->op->scale, 0.0f);
}

void apr_cpu_next(struct apr_cpu_scratch *s, const struct apr_linear_next *next)
{
	s->next = next;
}

void apr_cpu_embed(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_embed *op)
{
	struct embed_rows e = {r, op};

	each_row(s, r->n, op->n_embd, embed_row, &e);
}

struct kv_rows {
	const struct apr_ops_isa *isa;
	const struct apr_rows *r;
	const struct apr_op_attn_in *op;
	float *k, *v;
};

/* One row's heads normed and turned; its K and V rounded into the page of its position. */
static void kv_row(void *arg, uint32_t i, unsigned worker)
{
	const struct kv_rows *a = arg;
	const struct apr_op_attn_in *op = a->op;
	const struct apr_kv_group *g = op->kv.group;
	uint32_t pos = a->r->pos[i], at = pos % APR_KV_PAGE, h;
	uint32_t page = g->table[(size_t)a->r->slot[i] * g->max_pages_seq + pos / APR_KV_PAGE];
	size_t size = g->type == APR_KV_F32 ? 4 : 2, k_head = size * APR_KV_PAGE * op->k_dim, v_head = size * APR_KV_PAGE * op->v_dim;
	uint8_t *layer = g->pool + ((uint64_t)page * g->n_layers + op->kv.index) * g->layer_bytes;
	float *q = op->q + (size_t)i * op->n_heads * op->k_dim;
	float *k = a->k + (size_t)i * op->n_kv_heads * op->k_dim, *v = a->v + (size_t)i * op->n_kv_heads * op->v_dim;
	const float *cs = op->rope.cos_sin ? op->rope.cos_sin + (size_t)pos * (op->rope.n_rot / 2) * 2 : NULL;

	(void)worker;
	a->isa->heads(q, op->n_heads, op->k_dim, &op->q_norm, &op->rope, cs);
	a->isa->heads(k, op->n_kv_heads, op->k_dim, &op->k_norm, &op->rope, cs);
	for (h = 0; h < op->n_kv_heads; h++) {
		a->isa->store_kv(g->type, k + (size_t)h * op->k_dim, layer + h * k_head + size * at * op->k_dim, op->k_dim);
		a->isa->store_kv(g->type, v + (size_t)h * op->v_dim,
		                 layer + op->n_kv_heads * k_head + h * v_head + size * at * op->v_dim, op->v_dim);
	}
}

void apr_cpu_attn_in(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_attn_in *op)
{
	struct norm_rows n = {.x = op->x, .y = op->y, .x_out = op->x_out, .post = &op->post, .norm = &op->norm, .n = op->n_embd};
	const struct apr_linear *w[3] = {&op->wq->lin, &op->wk->lin, &op->wv->lin};
	const float *bias[3] = {op->bq, op->bk, op->bv};
	float *out[3] = {op->q, s->k, s->v};
	size_t ld[3] = {(size_t)op->n_heads * op->k_dim, (size_t)op->n_kv_heads * op->k_dim, (size_t)op->n_kv_heads * op->v_dim};
	struct kv_rows kv = {apr_cpu_ops_isa(), r, op, s->k, s->v};
	struct apr_act act;

	if (!r->n)
		return;
	norm_prepare(s, &n, r->n, &act);
	apr_linear_run_then(s->pool, &act, 3, w, bias, out, ld, s->next);
	each_row(s, r->n, ld[0] + ld[1] + ld[2], kv_row, &kv);
}

void apr_cpu_proj(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_proj *op)
{
	const struct apr_linear *w = &op->w->lin;
	float *y = op->y;
	size_t ld = op->n_out;
	struct apr_act act;

	if (!r->n)
		return;
	apr_act_prepare(pool_for(s, r->n, op->n_in), &act, s->lim.math, op->in, op->n_in, r->n, op->n_in, s->act);
	apr_linear_run_then(s->pool, &act, 1, &w, &op->bias, &y, &ld, s->next);
}

struct act_parts {
	const struct apr_ops_isa *isa;
	uint32_t act;
	float *a;
	const float *up; /* NULL: no gate */
	uint64_t n;
};
#define ACT_PART 4096u

static void act_part(void *arg, uint32_t i, unsigned worker)
{
	const struct act_parts *p = arg;
	uint64_t at = (uint64_t)i * ACT_PART;
	uint32_t n = p->n - at < ACT_PART ? (uint32_t)(p->n - at) : ACT_PART;

	(void)worker;
	p->isa->act(p->act, p->a + at, p->a + at, p->up ? p->up + at : NULL, n);
}

void apr_cpu_ffn_in(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_ffn_in *op)
{
	struct norm_rows n = {.x = op->x, .y = op->y, .x_out = op->x_out, .post = &op->post, .norm = &op->norm, .n = op->n_embd};
	const struct apr_linear *w[2] = {op->gate ? &op->gate->lin : &op->up->lin, &op->up->lin};
	const float *bias[2] = {NULL, NULL};
	float *out[2] = {op->a, s->up};
	size_t ld[2] = {op->n_ff, op->n_ff};
	struct act_parts p = {apr_cpu_ops_isa(), op->act, op->a, op->gate ? s->up : NULL, (uint64_t)r->n * op->n_ff};
	struct apr_act act;

	if (!r->n)
		return;
	norm_prepare(s, &n, r->n, &act);
	apr_linear_run_then(s->pool, &act, op->gate ? 2 : 1, w, bias, out, ld, s->next);
	apr_pool_run(pool_for(s, r->n, op->n_ff), (uint32_t)((p.n + ACT_PART - 1) / ACT_PART), act_part, &p);
}

struct cap_rows {
	const struct apr_ops_isa *isa;
	const struct apr_op_head *op;
	uint32_t parts; /* a row */
};
#define CAP_PART 16384u

static void cap_part(void *arg, uint32_t i, unsigned worker)
{
	const struct cap_rows *c = arg;
	uint32_t row = i / c->parts, at = i % c->parts * CAP_PART, n = c->op->n_vocab - at;

	(void)worker;
	c->isa->scale(c->op->logits + (size_t)row * c->op->n_vocab + at, n < CAP_PART ? n : CAP_PART, c->op->scale, c->op->softcap);
}

void apr_cpu_head(struct apr_cpu_scratch *s, const struct apr_rows *r, const struct apr_op_head *op, uint32_t first, uint32_t n)
{
	struct norm_rows nr = {.x = op->x, .y = op->y, .post = &op->post, .norm = &op->norm, .n = op->n_embd};
	const struct apr_linear *w = &op->w->lin;
	const float *bias = NULL;
	float *logits = op->logits;
	size_t ld = op->n_vocab;
	struct apr_act act;

	if (!n)
		return;
	nr.index = r->out + first;
	nr.x_out = s->h; /* the sum is only needed on the way to the norm */
	norm_prepare(s, &nr, n, &act);
	apr_linear_run_then(s->pool, &act, 1, &w, &bias, &logits, &ld, s->next);
	if (op->scale != 1.0f || op->softcap != 0.0f) {
		struct cap_rows c = {apr_cpu_ops_isa(), op, (op->n_vocab + CAP_PART - 1) / CAP_PART};

		apr_pool_run(s->pool, n * c.parts, cap_part, &c);
	}
}
