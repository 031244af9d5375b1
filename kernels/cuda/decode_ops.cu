/* SPDX-License-Identifier: MIT */
/*
 * The decode ops of ops_cuda.h: which matrices go into one launch, with what ends.
 *
 * Owns: op arguments to proj_args; what scratch is for. Does not own kernels. One row: the projection's own prologue adds, norms and rounds;
 * more rows: a launch before it does that once for all blocks.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/proj.cuh"
#include "kernels/cuda/scratch.cuh"

static size_t max_size(size_t a, size_t b)
{
	return a > b ? a : b;
}

extern "C" size_t apr_cuda_scratch_bytes(const apr_cuda_limits *l)
{
	uint32_t rows = l->rows < APR_CUDA_DECODE_ROWS ? l->rows : APR_CUDA_DECODE_ROWS;
	uint64_t k = max_size(max_size(l->n_embd, l->n_ff), (size_t)l->n_heads * l->v_dim);
	uint64_t kv = (uint64_t)APR_CUDA_DECODE_ROWS * l->n_kv_heads * l->k_dim * sizeof(float);

	if (k > 1u << 20 || l->n_ctx > 1u << 28 || l->n_heads > 4096 || l->v_dim > 4096 || l->k_dim > 4096)
		return 0;
	/* the context is rounded up to pages, then to segments */
	return SCRATCH_COUNTERS +
	       max_size(max_size(acts_bytes((uint32_t)k) + kv, part_bytes(rows, l->n_heads, l->v_dim, l->n_ctx + 64)),
	                (size_t)apr_cuda_attn_parts(l) * l->n_heads * 64 * (l->v_dim + 2) * sizeof(float));
}

/* One op's launches: its matrices, at most three, all reading the same rows of k. */
struct proj_call {
	proj_args a;
	const uint32_t *pick;
};

static proj_mat mat_args(const apr_mat *w, const float *bias, float *out, uint32_t ld, uint32_t end)
{
	proj_mat m = {};

	m.tiles = w->tiles, m.tile = w->tile, m.n_out = w->n_out, m.pairs = row_pairs(w->n_out);
	m.pair_bytes = tiles_along_k(w->tile, w->n_in) * 2 * tile_size(w->tile);
	m.bias = bias, m.out = out, m.ld = ld, m.end = end;
	m.order = w->order, m.dim = w->dim ? w->dim : 1, m.half = w->half;
	return m;
}

/* Those of the call's matrices that want this kind of activations, in one launch (two where rows are made ready first) */
static int run_kind(const apr_cuda_launch *l, const proj_call *c, bool bf16)
{
	proj_args a = c->a;
	uint8_t *acts = (uint8_t *)l->scratch + SCRATCH_COUNTERS;
	int rc;

	a.n_mats = a.pairs = 0;
	for (uint32_t i = 0; i < c->a.n_mats; i++)
		if ((c->a.mat[i].tile == APR_TILE_BF16) == bf16) {
			a.mat[a.n_mats++] = c->a.mat[i];
			a.pairs += c->a.mat[i].pairs;
		}
	if (!a.n_mats)
		return 0;
	a.bf16 = bf16;
	a.acts_tile = acts_tile_bytes(a.k, bf16);
	if (a.columns > 1) {
		prepare_args p = {};

		p.norm = a.norm, p.in = a.in, p.pick = c->pick, p.n_live = a.n_live;
		p.acts = acts, p.scales = (float *)(acts + 8 * acts_tile_bytes(a.k, true)), p.acts_tile = a.acts_tile;
		p.k = a.k, p.columns = a.columns, p.chunks = a.chunks, p.bf16 = bf16;
		rc = prepare_launch(l, &p);
		if (rc)
			return rc;
		a.acts = acts, a.scales = p.scales;
		a.norm.x = NULL;
	} else {
		a.pick = c->pick;
	}
	return proj_launch(l, &a);
}

static int run(const apr_cuda_launch *l, proj_call *c)
{
	int rc;

	if (l->bucket == 0 || l->bucket > APR_CUDA_DECODE_ROWS)
		return -EINVAL;
	if (SCRATCH_COUNTERS + acts_bytes(c->a.k) > l->scratch_bytes)
		return -EINVAL;
	c->a.chunks = chunks_of(c->a.k);
	c->a.columns = l->bucket;
	c->a.rows = l->rows;
	if (c->a.k % 32 || (c->a.norm.x && c->a.k > ROW_MAX))
		return -ENOTSUP;
	rc = run_kind(l, c, false);
	return rc ? rc : run_kind(l, c, true);
}

static void set_norm(proj_args *a, const float *x, const float *y, float *x_out, const apr_norm &post,
                     const apr_norm &norm, uint32_t n)
{
	a->norm = {x, y, x_out, {post.w, post.eps}, {norm.w, norm.eps}, n, NULL, 1.0f / (float)n};
	a->k = n;
}

extern "C" int apr_cuda_decode_proj(const apr_cuda_launch *l, const apr_op_proj *op)
{
	proj_call c = {};

	if (op->w->n_in != op->n_in || op->w->n_out != op->n_out)
		return -EINVAL;
	c.a.k = op->n_in;
	c.a.in = op->in;
	c.a.n_live = l->rows.n;
	c.a.n_mats = 1;
	c.a.mat[0] = mat_args(op->w, op->bias, op->y, op->n_out, PROJ_STORE);
	return run(l, &c);
}

extern "C" int apr_cuda_decode_ffn_in(const apr_cuda_launch *l, const apr_op_ffn_in *op)
{
	proj_call c = {};
	bool gated = op->gate != NULL;

	if (gated && (op->gate != op->up || op->up->order != APR_ORDER_GATE_UP))
		return -ENOTSUP;
	if (op->up->n_out != op->n_ff * (gated ? 2 : 1) || op->up->n_in != op->n_embd || (gated && op->n_ff % 8))
		return -EINVAL;
	set_norm(&c.a, op->x, op->y, op->x_out, op->post, op->norm, op->n_embd);
	c.a.n_live = l->rows.n;
	c.a.act = op->act;
	c.a.n_mats = 1;
	c.a.mat[0] = mat_args(op->up, NULL, op->a, op->n_ff, gated ? PROJ_GATED : PROJ_ACT);
	return run(l, &c);
}

extern "C" int apr_cuda_decode_head(const apr_cuda_launch *l, const apr_op_head *op)
{
	proj_call c = {};

	if (op->w->n_in != op->n_embd || op->w->n_out < op->n_vocab)
		return -EINVAL;
	set_norm(&c.a, op->x, op->y, NULL, op->post, op->norm, op->n_embd);
	c.a.n_live = l->rows.n_out;
	c.pick = l->rows.out;
	c.a.scale = op->scale, c.a.softcap = op->softcap;
	c.a.n_mats = 1;
	c.a.mat[0] = mat_args(op->w, NULL, op->logits, op->n_vocab, PROJ_LOGITS);
	c.a.mat[0].n_out = op->n_vocab;
	c.a.mat[0].pairs = row_pairs(op->n_vocab);
	return run(l, &c);
}

/* Can the projection turn this matrix's heads itself? Its pairs must lie side by side. */
static bool turns_itself(const apr_mat *w, const apr_rope_table *r, uint32_t dim)
{
	if (r->kind == APR_OP_ROPE_NONE)
		return true;
	if (r->kind == APR_OP_ROPE_PAIRS)
		return w->order == APR_ORDER_PLAIN && dim % 2 == 0;
	return w->order == APR_ORDER_ROPE_HALVES && w->dim == dim && w->half == r->n_rot / 2;
}

extern "C" int apr_cuda_decode_attn_in(const apr_cuda_launch *l, const apr_op_attn_in *op)
{
	const apr_kv_group *g = op->kv.group;
	proj_call c = {};
	bool whole = !op->q_norm.w && !op->k_norm.w && turns_itself(op->wq, &op->rope, op->k_dim) &&
	             turns_itself(op->wk, &op->rope, op->k_dim);
	uint32_t n_q = op->n_heads * op->k_dim, n_k = op->n_kv_heads * op->k_dim, n_v = op->n_kv_heads * op->v_dim;
	float *keys = (float *)((uint8_t *)l->scratch + SCRATCH_COUNTERS + acts_bytes(op->n_embd));
	int rc;

	if (op->wq->n_out != n_q || op->wk->n_out != n_k || op->wv->n_out != n_v || op->wv->order != APR_ORDER_PLAIN)
		return -EINVAL;
	set_norm(&c.a, op->x, op->y, op->x_out, op->post, op->norm, op->n_embd);
	c.a.n_live = l->rows.n;
	c.a.rope = op->rope;
	c.a.kv = {g->pool,           g->table,       g->max_pages_seq, g->n_layers, op->kv.index,
	          (uint32_t)g->type, op->n_kv_heads, op->k_dim,        op->v_dim,   g->layer_bytes};
	c.a.n_mats = 3;
	/* heads that are normed first, or turned across rows of the tiles, take a launch more; its biases come then */
	c.a.mat[0] = mat_args(op->wq, whole ? op->bq : NULL, op->q, n_q, whole ? PROJ_QUERY : PROJ_STORE);
	c.a.mat[1] = mat_args(op->wk, whole ? op->bk : NULL, keys, n_k, whole ? PROJ_KEY : PROJ_STORE);
	c.a.mat[2] = mat_args(op->wv, op->bv, NULL, 0, PROJ_VALUE);
	c.a.mat[0].dim = c.a.mat[1].dim = op->k_dim;
	c.a.mat[2].dim = op->v_dim;
	if (!whole &&
	    SCRATCH_COUNTERS + acts_bytes(op->n_embd) + (size_t)l->bucket * n_k * sizeof(float) > l->scratch_bytes)
		return -EINVAL;
	rc = run(l, &c);
	if (rc || whole)
		return rc;
	return heads_in_place(l, op, keys);
}
