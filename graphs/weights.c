/* SPDX-License-Identifier: MIT */
/*
 * A model on the device: what it needs, and bringing its weights there.
 *
 * Owns: the backend's lines of the plan, their division, upload and repacking
 * (slices through a pinned double buffer, repacked on the device, then widened once
 * to F16 for prefill). Does not own the tiles' layout (kernels/cuda).
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "graphs/graphs.h"

#define SHORT_HEAD (UINT64_C(160) << 20) /* read in the time that the host takes for a step: some 40 µs */
#define WIDE_F32 (UINT64_C(256) << 20) /* F32 weights are widened in slices of so many bytes */
#define HALF_LEAST (UINT64_C(8) << 20) /* of the upload buffer */

/* ---- the plan ---------------------------------------------------------------------- */

static void add(struct apr_plan *p, const char *purpose, enum apr_place place, uint64_t a, uint64_t b)
{
	uint64_t bytes;

	if (p->n == APR_PLAN_LINES || __builtin_mul_overflow(a, b, &bytes) || bytes > INT64_MAX) {
		p->overflow = true;
		return;
	}
	if (bytes) /* a route has no line of what it does without */
		p->line[p->n++] = (struct apr_plan_line){.purpose = purpose, .place = place, .bytes = bytes};
}

static void *line_base(const struct apr_plan *p, const char *purpose, uint64_t *bytes)
{
	uint32_t i;

	for (i = 0; i < p->n; i++)
		if (!strcmp(p->line[i].purpose, purpose)) {
			*bytes = p->line[i].bytes;
			return p->line[i].base;
		}
	*bytes = 0;
	return NULL;
}

struct carve { /* hands out a line piece by piece; base NULL: counts alone */
	uint8_t *base;
	uint64_t at;
};

static void *take(struct carve *c, uint64_t bytes)
{
	void *p = c->base ? c->base + c->at : NULL;

	c->at += round_up(bytes, 256);
	return p;
}

void rows_place(struct rows_at *r, void *base, uint32_t rows, uint32_t tiles)
{
	uint8_t *b = base;
	uint64_t tok = 64, pos = tok + 4ull * rows, slot = pos + 4ull * rows, tile = round_up(slot + 4ull * rows, 16);

	r->bytes = tile + (uint64_t)tiles * sizeof(struct apr_cuda_attn_tile);
	r->base = b;
	if (!b)
		return;
	r->n = (uint32_t *)(void *)b;
	r->n_tiles = r->n + 1; /* two */
	r->tok = (int32_t *)(void *)(b + tok);
	r->pos = (uint32_t *)(void *)(b + pos);
	r->slot = (uint32_t *)(void *)(b + slot);
	r->tiles = (struct apr_cuda_attn_tile *)(void *)(b + tile);
}

/* Rows of r at a fresh piece of c. */
static void take_rows(struct carve *c, struct rows_at *r, uint32_t rows, uint32_t tiles)
{
	rows_place(r, NULL, rows, tiles);
	rows_place(r, take(c, r->bytes), rows, tiles);
}

/* Biases and seen ids: at most one sampling draw a sequence, each id once. */
static uint64_t lists_bytes(const struct apr_sizes *s)
{
	uint64_t seen = s->n_ctx < s->n_vocab ? s->n_ctx : s->n_vocab, bias = s->n_vocab < 1024 ? s->n_vocab : 1024;

	uint64_t ends = 256; /* more than a request and a file name together */

	return APR_MAX_SLOTS * (round_up((seen + 1) * sizeof(struct apr_seen), 64) + 2 * round_up(bias * sizeof(float), 64) +
	                        ends * sizeof(uint32_t));
}

static uint32_t decode_slots(const struct apr_sizes *s)
{
	return s->max_rows / APR_CUDA_DECODE_ROWS + 1;
}

static uint64_t carve_device(struct device_step *d, const struct apr_sizes *s, void *base)
{
	struct carve c = {.base = base};

	take_rows(&c, &d->prefill, s->max_rows, tiles_of(s->max_rows));
	take_rows(&c, &d->decode, APR_CUDA_DECODE_ROWS, 0);
	d->head = take(&c, sizeof *d->head);
	d->records = take(&c, APR_HEAD_ROWS * sizeof *d->records);
	d->tops = take(&c, APR_HEAD_ROWS * sizeof *d->tops);
	d->states = take(&c, APR_MAX_SLOTS * sizeof *d->states);
	d->lists = take(&c, lists_bytes(s));
	return c.at;
}

static void carve_one(struct carve *c, struct pinned_step *p, const struct apr_sizes *s)
{
	struct rows_at one;
	uint32_t i;

	take_rows(c, &p->prefill, s->max_rows, tiles_of(s->max_rows));
	for (i = 0; i < decode_slots(s); i++)
		take_rows(c, p->decode ? &p->decode[i] : &one, APR_CUDA_DECODE_ROWS, 0);
	p->head = take(c, (2ull * decode_slots(s) + 1) * sizeof *p->head);
	p->records = take(c, s->max_rows * sizeof *p->records);
	p->tops = take(c, s->max_rows * sizeof *p->tops);
	p->draw_of = take(c, s->max_rows * sizeof *p->draw_of);
	p->lists = take(c, lists_bytes(s));
}

/* p[i].decode: the model's arrays of slots, or NULL to count. */
static uint64_t carve_pinned(struct pinned_step p[APR_MAX_DEPTH], struct pinned_rest *r, const struct apr_sizes *s, void *base)
{
	struct carve c = {.base = base};
	uint64_t entries = 0;
	uint32_t i;

	r->mark = take(&c, 64);
	r->near = take(&c, 64);
	for (i = 0; i < APR_MAX_DEPTH; i++)
		carve_one(&c, &p[i], s);
	r->place = take(&c, s->max_rows * sizeof *r->place);
	r->results = take(&c, s->max_rows * sizeof *r->results);
	take_rows(&c, &r->warm, s->max_rows, tiles_of(s->max_rows));
	r->warm_head = take(&c, sizeof *r->warm_head);
	for (i = 0; i < s->n_groups; i++)
		entries += s->group[i].max_pages_seq;
	r->table = take(&c, entries * APR_MAX_SLOTS * sizeof *r->table);
	return c.at;
}

/* ---- what a matrix becomes ------------------------------------------------------------ */

static struct apr_mat describe(const struct apr_weight *a, uint8_t route, uint32_t order, uint32_t dim, uint32_t half)
{
	uint32_t tile = route == ROUTE_F32 ? APR_TILE_RAW : apr_cuda_tile_of(a->type); /* exact: nothing is rounded to F16 */

	return (struct apr_mat){.type = a->type, .tile = tile, .n_in = a->n_in,
	                        .n_out = order == APR_ORDER_GATE_UP ? 2 * a->n_out : a->n_out, .order = order, .dim = dim,
	                        .half = half};
}
static struct apr_mat describe_turned(const struct apr_model *m, const struct apr_weight *a, uint8_t route)
{
	if (m->rope.kind == APR_ROPE_HALVES)
		return describe(a, route, APR_ORDER_ROPE_HALVES, m->head_dim, m->rope.n_rot / 2);
	return describe(a, route, APR_ORDER_PLAIN, m->head_dim, 0);
}
static struct apr_mat describe_up(const struct apr_layer *la, uint8_t route)
{
	return describe(&la->up, route, la->gate.data ? APR_ORDER_GATE_UP : APR_ORDER_PLAIN, 0, 0);
}

static void describe_layer(const struct apr_model *m, const struct apr_layer *la, uint8_t route, struct layer_mats *w)
{
	w->wq.m = describe_turned(m, &la->wq, route);
	w->wk.m = describe_turned(m, &la->wk, route);
	w->wv.m = describe(&la->wv, route, APR_ORDER_PLAIN, 0, 0);
	w->wo.m = describe(&la->wo, route, APR_ORDER_PLAIN, 0, 0);
	w->up.m = describe_up(la, route);
	w->down.m = describe(&la->down, route, APR_ORDER_PLAIN, 0, 0);
}

/* Rows that a slice for repacking must be a multiple of, of each matrix. */
static uint32_t slice_unit(const struct apr_mat *w)
{
	uint32_t d = w->order == APR_ORDER_ROPE_HALVES ? w->dim : 1, u = d;

	while (u % 32)
		u += d;
	return u;
}
static uint64_t row_bytes(const struct apr_mat *w)
{
	struct apr_type_info t = apr_type_info(w->type);

	return t.block ? (uint64_t)w->n_in / t.block * t.block_bytes : 0;
}
uint64_t graphs_mat_bytes(const struct apr_mat *m)
{
	if (m->tile != APR_TILE_RAW)
		return apr_cuda_tile_bytes(m->tile, m->n_in, m->n_out);
	return m->n_in % 32 || m->n_in > 1u << 20 || m->n_out > 1u << 28 ? 0 : row_bytes(m) * m->n_out;
}
static uint64_t unit_bytes(const struct apr_mat *w) /* with room to align the second matrix */
{
	return slice_unit(w) * row_bytes(w) * (w->order == APR_ORDER_GATE_UP ? 2 : 1) + 1024;
}

struct sums {
	uint64_t tiles, cache, channels, vectors, half;
	uint64_t widest; /* numbers of the largest product's matrices */
	uint8_t route;
};

/* Bytes a weight of what a route's GEMMs read beside the tiles */
static uint64_t cache_bytes(uint8_t route)
{
	return route == ROUTE_FP16 ? 2 : route_is_fp8(route) ? 1 : 0;
}

static void count(struct sums *s, const struct apr_mat *w, bool cached)
{
	uint64_t u = unit_bytes(w);

	s->tiles += round_up(graphs_mat_bytes(w), 256);
	if (cached) {
		s->cache += round_up((uint64_t)w->n_in * w->n_out * cache_bytes(s->route), 256);
		s->channels += route_is_fp8(s->route) ? round_up(w->n_out * sizeof(float), 256) : 0;
	}
	if (u > s->half)
		s->half = u;
}
static void count_vector(struct sums *s, const struct apr_weight *w)
{
	if (w->data)
		s->vectors += round_up((uint64_t)w->n_in * sizeof(float), 256);
}

static void count_layer(struct sums *s, const struct apr_model *m, const struct apr_layer *la)
{
	const struct apr_weight *v[10] = {&la->attn_norm, &la->post_attn_norm, &la->ffn_norm, &la->post_ffn_norm, &la->bq,
	                                &la->bk, &la->bv, &la->bo, &la->q_norm, &la->k_norm};
	struct layer_mats w = {0};
	uint64_t qkv, up;
	size_t i;

	describe_layer(m, la, s->route, &w);
	qkv = ((uint64_t)w.wq.m.n_out + w.wk.m.n_out + w.wv.m.n_out) * w.wq.m.n_in;
	up = (uint64_t)w.up.m.n_out * w.up.m.n_in;
	s->widest = qkv > s->widest ? qkv : s->widest;
	s->widest = up > s->widest ? up : s->widest;
	up = (uint64_t)w.down.m.n_out * w.down.m.n_in; /* without a gate it may be the largest */
	s->widest = up > s->widest ? up : s->widest;
	count(s, &w.wq.m, true);
	count(s, &w.wk.m, true);
	count(s, &w.wv.m, true);
	count(s, &w.wo.m, true);
	count(s, &w.up.m, true);
	count(s, &w.down.m, true);
	for (i = 0; i < 10; i++)
		count_vector(s, v[i]);
}

static struct sums sums_of(const struct apr_model *m, uint8_t route)
{
	struct sums s = {.half = HALF_LEAST, .route = route};
	struct apr_mat w = describe(&m->tok_embd, route, APR_ORDER_PLAIN, 0, 0);
	uint32_t i;

	for (i = 0; i < m->n_layers; i++)
		count_layer(&s, m, &m->layers[i]);
	count(&s, &w, false);
	if (!m->tied) {
		w = describe(&m->output, route, APR_ORDER_PLAIN, 0, 0);
		count(&s, &w, false);
	}
	count_vector(&s, &m->output_norm);
	s.half = round_up(s.half, 4096);
	return s;
}

static uint64_t widest_in(const struct apr_model *m)
{
	uint64_t k = m->n_embd > m->n_ff ? m->n_embd : m->n_ff, o = (uint64_t)m->n_heads * m->v_dim;

	return k > o ? k : o;
}
static uint32_t most_kv_heads(const struct apr_model *m)
{
	uint32_t i, n = 0;

	for (i = 0; i < m->n_layers; i++)
		if (m->layers[i].n_kv_heads > n)
			n = m->layers[i].n_kv_heads;
	return n;
}
static uint64_t widest_out(const struct apr_model *m) /* q, k, v side by side; gate and up */
{
	uint64_t qkv = (uint64_t)m->n_heads * m->head_dim + (uint64_t)most_kv_heads(m) * (m->head_dim + m->v_dim);

	uint64_t most = qkv > 2ull * m->n_ff ? qkv : 2ull * m->n_ff;

	return most > m->n_embd ? most : m->n_embd;
}

/* Weights that are widened on their way to a GEMM, or to the reference that the fused kernel must equal. */
static uint64_t wide_bytes(const struct apr_model *m, const struct sums *n)
{
	uint64_t all = n->widest * sizeof(float), least = widest_in(m) * sizeof(float) * 64;

	if (n->route == ROUTE_QUANT || n->route == ROUTE_FUSED)
		return n->widest * 2;
	if (n->route != ROUTE_F32)
		return 0;
	if (all > WIDE_F32)
		all = WIDE_F32;
	return all > least ? all : least;
}

static struct apr_cuda_limits limits_of(const struct apr_model *m, const struct apr_sizes *s)
{
	return (struct apr_cuda_limits){.rows = APR_CUDA_DECODE_ROWS, .n_embd = m->n_embd, .n_ff = m->n_ff,
	                                .n_heads = m->n_heads, .n_kv_heads = most_kv_heads(m), .k_dim = m->head_dim,
	                                .v_dim = m->v_dim, .n_ctx = s->n_ctx};
}

int graphs_need(struct apr_backend_ctx *c, const struct apr_model *m, const struct apr_sizes *s, bool have_cache,
                struct apr_plan *plan)
{
	struct apr_cuda_limits l = limits_of(m, s);
	struct sums n = sums_of(m, s->route_id);
	struct device_step d;
	struct pinned_step p[APR_MAX_DEPTH] = {0};
	struct pinned_rest rest;
	uint64_t rows = round_up(s->max_rows, 64), real = s->route_id == ROUTE_F32 ? sizeof(float) : 2;

	(void)c;
	(void)have_cache;
	add(plan, "weights", APR_PLACE_DEVICE, n.tiles, 1);
	add(plan, route_is_fp8(s->route_id) ? "weights e4m3" : "weights f16", APR_PLACE_DEVICE, n.cache, 1);
	add(plan, "channel scales", APR_PLACE_DEVICE, n.channels, 1);
	add(plan, "widened weights", APR_PLACE_DEVICE, wide_bytes(m, &n), 1);
	add(plan, "row hashes", APR_PLACE_DEVICE, rows, sizeof(uint64_t));
	add(plan, "vectors", APR_PLACE_DEVICE, n.vectors, 1);
	add(plan, "gemm inputs", APR_PLACE_DEVICE, rows * real, widest_in(m));
	add(plan, "row scales", APR_PLACE_DEVICE, rows, sizeof(float));
	add(plan, "gemm outputs", APR_PLACE_DEVICE, rows * sizeof(float), widest_out(m));
	add(plan, "decode scratch", APR_PLACE_DEVICE, apr_cuda_scratch_bytes(&l), 1);
	add(plan, "cublas workspace", APR_PLACE_DEVICE, WORKSPACE_BYTES, 1);
	add(plan, "step rows", APR_PLACE_DEVICE, carve_device(&d, s, NULL), 1);
	add(plan, "upload", APR_PLACE_DEVICE, n.half, 2);
	add(plan, "upload staging", APR_PLACE_PINNED, n.half, 2);
	add(plan, "step staging", APR_PLACE_PINNED, carve_pinned(p, &rest, s, NULL), 1);
	return plan->overflow ? -EOVERFLOW : 0;
}

/* ---- refusals ---------------------------------------------------------------------------- */

int graphs_bad_mat(const struct apr_mat *m, const char *what, char *err, size_t errlen)
{
	if (m && !graphs_mat_bytes(m))
		return graphs_fail(-ENOTSUP, err, errlen, "%s: %s, %u x %u: the cuda backend has no tiles for it", what,
		                   apr_type_info(m->type).name, m->n_in, m->n_out);
	return 0;
}

static int check_layer(const struct apr_model *m, uint32_t i, uint8_t route, char *err, size_t errlen)
{
	static const char *const name[6] = {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"};
	const struct apr_layer *la = &m->layers[i];
	struct layer_mats w = {0};
	const struct apr_mat *mat[6] = {&w.wq.m, &w.wk.m, &w.wv.m, &w.wo.m, &w.up.m, &w.down.m};
	char what[48];
	size_t k;
	int rc = 0;

	describe_layer(m, la, route, &w);
	for (k = 0; k < 6 && !rc; k++) {
		snprintf(what, sizeof what, "blk.%u %s", i, name[k]);
		rc = graphs_bad_mat(mat[k], what, err, errlen);
		if (!rc && route_is_fp8(route) && (mat[k]->n_in % 16 || mat[k]->n_out % 16))
			rc = graphs_fail(-ENOTSUP, err, errlen, "%s: %u x %u: E4M3 products want widths in sixteens; take another route",
			                 what, mat[k]->n_in, mat[k]->n_out);
	}
	if (!rc && la->gate.data && la->gate.type != la->up.type)
		rc = graphs_fail(-ENOTSUP, err, errlen, "blk.%u ffn_gate is %s and ffn_up %s: the cuda backend wants one type", i,
		                 apr_type_info(la->gate.type).name, apr_type_info(la->up.type).name);
	return rc;
}

static int check_model(const struct apr_model *m, uint8_t route, char *err, size_t errlen)
{
	struct apr_mat w = describe(&m->tok_embd, route, APR_ORDER_PLAIN, 0, 0);
	int rc = graphs_bad_mat(&w, "token_embd", err, errlen);
	uint32_t i;

	if (!rc && !m->tied) {
		w = describe(&m->output, route, APR_ORDER_PLAIN, 0, 0);
		rc = graphs_bad_mat(&w, "output", err, errlen);
	}
	for (i = 0; i < m->n_layers && !rc; i++)
		rc = check_layer(m, i, route, err, errlen);
	if (!rc && m->n_tokens > APR_CUDA_MAX_VOCAB)
		rc = graphs_fail(-ENOTSUP, err, errlen, "a vocabulary of %u is above the cuda backend's %u", m->n_tokens,
		                 APR_CUDA_MAX_VOCAB);
	return rc;
}

/* ---- upload ------------------------------------------------------------------------------ */

struct loader {
	struct apr_backend_ctx *c;
	cudaError_t cuda; /* first failure */
	int rc;
	uint8_t *dev[2], *host[2];
	cudaEvent_t done[2]; /* the device has read that half */
	uint64_t half;
	int at;
	uint8_t route;
	struct carve tiles, cache, channels, vectors;
};

static void note(struct loader *l, cudaError_t rc)
{
	if (rc != cudaSuccess && l->cuda == cudaSuccess)
		l->cuda = rc;
}

/* Rows first … first + n - 1 of a (and of b beside it) to tiles. */
static void upload_slice(struct loader *l, const struct apr_mat *w, const uint8_t *a, const uint8_t *b, uint32_t first,
                         uint32_t n, uint8_t *tiles)
{
	uint64_t rb = row_bytes(w), bytes = n * rb, second = round_up(bytes, 256), all = b ? second + bytes : bytes;
	uint8_t *dev = l->dev[l->at], *host = l->host[l->at];
	struct apr_mat sub = *w;

	sub.n_out = b ? 2 * n : n;
	note(l, cudaEventSynchronize(l->done[l->at]));
	memcpy(host, a + first * rb, bytes);
	if (b)
		memcpy(host + second, b + first * rb, bytes);
	if (w->tile == APR_TILE_RAW) { /* straight to their place: up's rows after all of gate's */
		note(l, cudaMemcpyAsync(tiles, host, bytes, cudaMemcpyHostToDevice, l->c->setup));
		if (b)
			note(l, cudaMemcpyAsync(tiles + w->n_out / 2 * rb, host + second, bytes, cudaMemcpyHostToDevice, l->c->setup));
		note(l, cudaEventRecord(l->done[l->at], l->c->setup));
		l->at = !l->at;
		return;
	}
	note(l, cudaMemcpyAsync(dev, host, all, cudaMemcpyHostToDevice, l->c->setup));
	if (!l->rc)
		l->rc = apr_cuda_repack(l->c->setup, &sub, dev, b ? dev + second : NULL, tiles);
	note(l, cudaEventRecord(l->done[l->at], l->c->setup));
	l->at = !l->at;
}

/* What this route's GEMMs read: rows in the file's order, those of one product without gaps. */
static void make_cache(struct loader *l, struct mat *w)
{
	uint8_t *to = l->cache.base + l->cache.at;
	float *channel = (float *)(void *)(l->channels.base + l->channels.at);

	if (!cache_bytes(l->route))
		return;
	w->cache = to;
	l->cache.at += (uint64_t)w->m.n_in * w->m.n_out * cache_bytes(l->route);
	if (route_is_fp8(l->route)) {
		w->channel = channel;
		l->channels.at += w->m.n_out * sizeof(float);
	}
	if (l->rc)
		return;
	if (route_is_fp8(l->route))
		l->rc = apr_cuda_unpack(l->c->setup, &w->m, 0, w->m.n_out, APR_REAL_E4M3, to, channel);
	else
		l->rc = apr_cuda_unpack_f16(l->c->setup, &w->m, to);
}

static void next_product(struct loader *l)
{
	l->cache.at = round_up(l->cache.at, 256);
	l->channels.at = round_up(l->channels.at, 256);
}

static void upload(struct loader *l, struct mat *w, const struct apr_weight *a, const struct apr_weight *b, bool cached)
{
	uint32_t unit = slice_unit(&w->m), each = b ? 2 : 1, first, n, rows;
	uint64_t rb = row_bytes(&w->m), row; /* row: 32 rows of a in what is kept */
	uint8_t *tiles = take(&l->tiles, graphs_mat_bytes(&w->m));

	if (!rb) { /* check_model has refused it */
		l->rc = -EINVAL;
		return;
	}
	row = w->m.tile == APR_TILE_RAW ? 32 * rb : each * apr_cuda_tile_bytes(w->m.tile, w->m.n_in, 32);
	rows = (uint32_t)((l->half - 1024) / (rb * each));
	rows = rows / unit * unit;
	if (rows < unit)
		rows = unit; /* the half was sized for that */
	for (first = 0; first < a->n_out; first += n) {
		n = a->n_out - first < rows ? a->n_out - first : rows;
		upload_slice(l, &w->m, a->data, b ? b->data : NULL, first, n, tiles + (uint64_t)first / 32 * row);
	}
	w->m.tiles = tiles;
	if (cached)
		make_cache(l, w);
}

static const float *vector(struct loader *l, const struct apr_weight *w)
{
	float *out;

	if (!w->data)
		return NULL;
	out = take(&l->vectors, (uint64_t)w->n_in * sizeof(float));
	note(l, cudaMemcpyAsync(out, w->data, (uint64_t)w->n_in * sizeof(float), cudaMemcpyHostToDevice, l->c->setup));
	return out;
}

static void load_layer(struct loader *l, const struct apr_model *m, const struct apr_layer *la, struct layer_mats *w,
                       struct apr_layer_weights *out)
{
	describe_layer(m, la, l->route, w);
	next_product(l);
	upload(l, &w->wq, &la->wq, NULL, true);
	upload(l, &w->wk, &la->wk, NULL, true);
	upload(l, &w->wv, &la->wv, NULL, true);
	next_product(l);
	upload(l, &w->wo, &la->wo, NULL, true);
	next_product(l);
	if (la->gate.data)
		upload(l, &w->up, &la->gate, &la->up, true);
	else
		upload(l, &w->up, &la->up, NULL, true);
	next_product(l);
	upload(l, &w->down, &la->down, NULL, true);
	*out = (struct apr_layer_weights){
		.wq = &w->wq.m, .wk = &w->wk.m, .wv = &w->wv.m, .wo = &w->wo.m, .gate = la->gate.data ? &w->up.m : NULL,
		.up = &w->up.m, .down = &w->down.m, .attn_norm = vector(l, &la->attn_norm),
		.post_attn_norm = vector(l, &la->post_attn_norm), .ffn_norm = vector(l, &la->ffn_norm),
		.post_ffn_norm = vector(l, &la->post_ffn_norm), .bq = vector(l, &la->bq), .bk = vector(l, &la->bk),
		.bv = vector(l, &la->bv), .bo = vector(l, &la->bo), .q_norm = vector(l, &la->q_norm),
		.k_norm = vector(l, &la->k_norm),
	};
}

static void load_all(struct loader *l, const struct apr_backend_load *in, struct apr_backend_model *b)
{
	const struct apr_model *m = in->model;
	uint32_t i;

	b->tok_embd.m = describe(&m->tok_embd, l->route, APR_ORDER_PLAIN, 0, 0);
	upload(l, &b->tok_embd, &m->tok_embd, NULL, false);
	if (!m->tied) {
		b->output.m = describe(&m->output, l->route, APR_ORDER_PLAIN, 0, 0);
		upload(l, &b->output, &m->output, NULL, false);
	}
	for (i = 0; i < m->n_layers && !l->rc && l->cuda == cudaSuccess; i++) {
		load_layer(l, m, &m->layers[i], &b->mats[i], &b->layers[i]);
		if (in->progress)
			in->progress(in->progress_arg, 0.8 * (i + 1.0) / m->n_layers); /* the rest is tune.c's */
	}
	*in->weights = (struct apr_weights){.tok_embd = &b->tok_embd.m, .output = m->tied ? &b->tok_embd.m : &b->output.m,
	                                    .output_norm = vector(l, &m->output_norm), .layers = b->layers};
	note(l, cudaStreamSynchronize(l->c->setup));
}

static int bring_weights(struct apr_backend_model *b, const struct apr_backend_load *in, char *err, size_t errlen)
{
	struct loader l = {.c = b->ctx, .route = b->sizes.route_id};
	uint64_t bytes;
	int i;

	l.tiles.base = line_base(in->plan, "weights", &bytes);
	l.cache.base = line_base(in->plan, route_is_fp8(l.route) ? "weights e4m3" : "weights f16", &bytes);
	l.channels.base = line_base(in->plan, "channel scales", &bytes);
	l.vectors.base = line_base(in->plan, "vectors", &bytes);
	l.dev[0] = line_base(in->plan, "upload", &bytes);
	l.host[0] = line_base(in->plan, "upload staging", &bytes);
	l.half = bytes / 2;
	l.dev[1] = l.dev[0] + l.half;
	l.host[1] = l.host[0] + l.half;
	for (i = 0; i < 2; i++)
		note(&l, cudaEventCreateWithFlags(&l.done[i], cudaEventDisableTiming));
	if (l.cuda == cudaSuccess)
		load_all(&l, in, b);
	for (i = 0; i < 2; i++)
		if (l.done[i])
			cudaEventDestroy(l.done[i]);
	if (l.rc)
		return graphs_fail(l.rc, err, errlen, "repacking weights: %s", strerror(-l.rc));
	return graphs_cuda(b->ctx, l.cuda, "uploading weights", err, errlen);
}

/* ---- load and unload --------------------------------------------------------------------- */

static int take_lines(struct apr_backend_model *b, const struct apr_backend_load *in)
{
	uint64_t bytes;
	uint32_t i;

	b->n_decode = decode_slots(&b->sizes);
	b->n_head = 2 * b->n_decode + 1;
	b->passes = calloc(b->n_decode + 1, sizeof *b->passes);
	if (!b->passes)
		return -ENOMEM;
	for (i = 0; i < APR_MAX_DEPTH; i++) {
		b->flight[i].m = b;
		b->pin[i].decode = calloc(b->n_decode, sizeof *b->pin[i].decode);
		if (!b->pin[i].decode)
			return -ENOMEM;
	}
	carve_device(&b->dev, &b->sizes, line_base(in->plan, "step rows", &bytes));
	carve_pinned(b->pin, &b->rest, &b->sizes, line_base(in->plan, "step staging", &bytes));
	b->lists_bytes = lists_bytes(&b->sizes);
	b->table = line_base(in->plan, "page tables", &bytes);
	b->gemm_in = line_base(in->plan, "gemm inputs", &b->gemm_in_bytes);
	b->row_scale = line_base(in->plan, "row scales", &bytes);
	b->gemm_out = line_base(in->plan, "gemm outputs", &bytes);
	b->gemm_out_floats = bytes / sizeof(float);
	b->wide = line_base(in->plan, "widened weights", &b->wide_bytes);
	b->hashes = line_base(in->plan, "row hashes", &bytes);
	b->scratch = line_base(in->plan, "decode scratch", &b->scratch_bytes);
	b->workspace = line_base(in->plan, "cublas workspace", &bytes);
	return 0;
}

int graphs_load(struct apr_backend_ctx *c, const struct apr_backend_load *in, struct apr_backend_model **out, char *err,
                size_t errlen)
{
	const struct apr_mat *out_mat;
	struct apr_cuda_limits limits;
	struct apr_backend_model *b;
	int rc = check_model(in->model, in->sizes->route_id, err, errlen);

	if (rc)
		return rc;
	b = calloc(1, sizeof *b);
	if (!b)
		return graphs_fail(-ENOMEM, err, errlen, "out of memory");
	b->ctx = c;
	b->sizes = *in->sizes;
	b->n_layers = in->model->n_layers;
	limits = limits_of(in->model, in->sizes);
	b->tile_plan = (struct apr_cuda_attn_plan){.sms = (uint32_t)c->sms, .items = apr_cuda_attn_items(&limits),
	                                           .parts = apr_cuda_attn_parts(&limits)};
	b->mats = calloc(b->n_layers, sizeof *b->mats);
	b->layers = calloc(b->n_layers, sizeof *b->layers);
	rc = b->mats && b->layers ? take_lines(b, in) : -ENOMEM;
	if (rc)
		graphs_fail(rc, err, errlen, "out of memory");
	else
		rc = graphs_cuda(c, cudaSetDevice(c->device), "the device", err, errlen);
	if (!rc)
		rc = bring_weights(b, in, err, errlen);
	if (!rc)
		rc = graphs_tune(b, in, err, errlen);
	if (rc) {
		graphs_unload(b);
		return rc;
	}
	out_mat = in->model->tied ? &b->tok_embd.m : &b->output.m;
	b->early = graphs_mat_bytes(out_mat) < SHORT_HEAD;
	*out = b;
	return 0;
}

void graphs_unload(struct apr_backend_model *m)
{
	if (!m)
		return;
	graphs_fence(m);
	(void)cudaSetDevice(m->ctx->device);
	graphs_forget(m);
	free(m->passes);
	free(m->pin[0].decode);
	free(m->pin[1].decode);
	free(m->mats);
	free(m->layers);
	free(m->gemms);
	free(m->fused);
	free(m);
}
