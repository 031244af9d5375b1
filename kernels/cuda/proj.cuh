/* SPDX-License-Identifier: MIT */
/*
 * Arguments of the decode projection kernel, and what becomes of its sums.
 *
 * Owns: struct proj_args, shared by the launches (decode_ops.cu) and the kernel
 * (sm90_any_proj_decode.cu); the epilogues. Does not own the products.
 */
#ifndef APR_KERNELS_CUDA_PROJ_CUH
#define APR_KERNELS_CUDA_PROJ_CUH

#include "kernels/cuda/rows.cuh"

#define PROJ_MATS 3

enum proj_end {
	PROJ_STORE,  /* out[col][row] = sum + bias */
	PROJ_LOGITS, /* scaled, soft-capped */
	PROJ_ACT,    /* out[col][row] = act(sum) */
	PROJ_GATED,  /* rows in APR_ORDER_GATE_UP: out[col][row] = act(gate) · up */
	PROJ_QUERY,  /* bias, rotation, to out */
	PROJ_KEY,    /* bias, rotation, to the page */
	PROJ_VALUE   /* bias, to the page */
};
struct proj_mat {
	const uint8_t *tiles;
	const float *bias; /* or NULL */
	float *out;
	uint32_t tile, n_out, pairs, end;
	uint32_t pair_bytes;
	uint32_t order, dim, half;
	uint32_t ld; /* floats between columns of out */
};
struct proj_kv { /* where keys and values go */
	uint8_t *pool;
	const uint32_t *table;
	uint32_t max_pages, n_layers, layer, type, n_kv_heads, k_dim, v_dim;
	uint64_t layer_bytes;
};
struct proj_args {
	proj_mat mat[PROJ_MATS];
	uint32_t n_mats, pairs, k, act;
	chunk_plan chunks;
	/* input: one column: `in` is a row of floats, or add_norm.x is set; else acts and scales from the prepare kernel */
	add_norm_args norm;
	const float *in;
	const uint8_t *acts;
	const float *scales; /* [column][16] */
	size_t acts_tile;    /* bytes of eight columns */
	bool bf16;
	/* columns */
	uint32_t columns;       /* of the bucket */
	const uint32_t *n_live; /* columns that exist */
	const uint32_t *pick;   /* or NULL: row of `in`, x, y that a column is (one column only) */
	apr_cuda_rows rows;
	apr_rope_table rope;
	proj_kv kv;
	float scale, softcap;
	/* whole rounds of units over all the launch's workers; rounds between two epilogues */
	uint32_t workers, rounds, fold;
};

/* What a launch is, where the compiler is to know it: less code to fetch before the first product */
enum proj_role {
	ROLE_QKV,  /* one column: norm; up to three matrices, heads */
	ROLE_FFN,  /* one column: norm; an activation */
	ROLE_HEAD, /* one column: norm of a picked row; logits */
	ROLE_PROJ, /* one column: floats as they are; a plain sum */
	ROLE_MANY  /* several columns, any end */
};
HD constexpr bool one_mat(int role)
{
	return role == ROLE_FFN || role == ROLE_HEAD || role == ROLE_PROJ;
}

/* ---- activations ------------------------------------------------------------------------ */

DEV float normal_cdf_f(float x)
{
	return 0.5f * erfcf(x * -0.70710678f);
}
/* Within 3 ulp of 1 / (1 + e^-x); large divisors give 0, as they should */
DEV float sigmoid_fast(float x)
{
	return __fdividef(1.0f, 1.0f + exp2_fast(x * -APR_LOG2E));
}
DEV float activate(uint32_t act, float x)
{
	float u;

	switch (act) {
	case APR_OP_SILU: return x * sigmoid_fast(x);
	case APR_OP_GELU_TANH:
		return x * sigmoid_fast(x * fmaf(x * x, 2.0f * 0.7978845608f * 0.044715f, 2.0f * 0.7978845608f));
	case APR_OP_GELU: return x * normal_cdf_f(x);
	default: u = fmaxf(0.0f, x); return u * u;
	}
}
DEV float cap_logit(float v, float scale, float softcap)
{
	v *= scale;
	return softcap != 0.0f ? softcap * apr_tanh(v / softcap) : v;
}

/* ---- keys and values -------------------------------------------------------------------- */

DEV uint8_t *kv_page(const proj_kv &kv, uint32_t slot, uint32_t pos)
{
	uint32_t page = __ldcg(kv.table + (size_t)slot * kv.max_pages + pos / APR_KV_PAGE);

	return kv.pool + ((size_t)page * kv.n_layers + kv.layer) * kv.layer_bytes;
}
DEV void kv_store(const proj_kv &kv, uint8_t *page, uint32_t pos, bool value, uint32_t head, uint32_t d, float v)
{
	uint32_t dim = value ? kv.v_dim : kv.k_dim;
	size_t i = (value ? (size_t)kv.n_kv_heads * APR_KV_PAGE * kv.k_dim : 0) +
	           ((size_t)head * APR_KV_PAGE + pos % APR_KV_PAGE) * dim + d;

	if (kv.type == APR_KV_F32)
		((float *)page)[i] = v;
	else if (kv.type == APR_KV_F16)
		((__half *)page)[i] = __float2half_rn(v);
	else
		((__nv_bfloat16 *)page)[i] = __float2bfloat16_rn(v);
}
/* v of a pair (even, odd), turned; other: its partner */
DEV float rotate_one(float v, float other, bool odd, float c, float s)
{
	return odd ? fmaf(other, s, v * c) : fmaf(v, c, -(other * s));
}

/* What the columns of a block need for rotation and pages: asked for early, so that the epilogue does not wait for one
 * load after another. */
struct proj_heads {
	uint32_t pos[16];
	uint8_t *page[16]; /* NULL: a dead row */
	float2 turn[128];  /* the first column's row of cos_sin */
};
/* All threads call, after the previous kernel has ended; a block barrier comes before the first epilogue. */
DEV void load_heads(const proj_args &a, proj_heads *h, uint32_t col0, uint32_t n_cols)
{
	uint32_t c = threadIdx.x;

	if (a.mat[a.n_mats - 1].end <= PROJ_GATED)
		return;
	if (c < 16 && col0 + c < n_cols) {
		uint32_t slot = a.rows.slot[col0 + c], pos = a.rows.pos[col0 + c];

		h->pos[c] = pos;
		h->page[c] = slot == APR_CUDA_DEAD ? NULL : kv_page(a.kv, slot, pos);
	}
	if (c >= 32 && c - 32 < a.rope.n_rot / 2 && c - 32 < 128 && col0 < n_cols)
		h->turn[c - 32] =
				*(const float2 *)(a.rope.cos_sin + ((size_t)a.rows.pos[col0] * (a.rope.n_rot / 2) + c - 32) * 2);
}

/* ---- the epilogues: one sum a lane; lanes are 32 neighbouring rows of the tiles --------------- */

/* p: row in the tiles; c: the column's place in the block; live: it and its column exist (all lanes call, since neighbours
 * are exchanged) */
template <int ROLE> DEV void proj_finish(const proj_args &a, const proj_mat &m, const proj_heads &h, uint32_t p,
                                         uint32_t col, uint32_t c, float v, bool live)
{
	const uint32_t end = ROLE == ROLE_PROJ ? PROJ_STORE : ROLE == ROLE_HEAD ? PROJ_LOGITS : m.end;
	float other;

	if (ROLE != ROLE_QKV && end == PROJ_GATED) {
		other = __shfl_down_sync(~0u, v, 8);
		if (live && !(p & 8))
			m.out[(size_t)col * m.ld + (p >> 4) * 8 + (p & 7)] = activate(a.act, v) * other;
		return;
	}
	const uint32_t row = one_mat(ROLE) ? p : row_home_of(m.order, m.dim, m.half, p).row; /* one_mat: order is plain */

	if (ROLE != ROLE_QKV && end <= PROJ_ACT) {
		if (!live)
			return;
		if (m.bias)
			v += m.bias[row];
		if (end == PROJ_LOGITS)
			v = cap_logit(v, a.scale, a.softcap);
		m.out[(size_t)col * m.ld + row] = end == PROJ_ACT ? activate(a.act, v) : v;
		return;
	}
	if (m.bias && live)
		v += m.bias[row];
	other = __shfl_xor_sync(~0u, v, 1);
	if (!live)
		return;
	const uint32_t r = p % m.dim, pair = r >> 1;
	if (end != PROJ_VALUE && end != PROJ_STORE && r < a.rope.n_rot && a.rope.kind) {
		float2 cs = c == 0 && pair < 128
		                    ? h.turn[pair]
		                    : *(const float2 *)(a.rope.cos_sin + ((size_t)h.pos[c] * (a.rope.n_rot / 2) + pair) * 2);

		v = rotate_one(v, other, r & 1, cs.x, cs.y);
	}
	if (end == PROJ_QUERY || end == PROJ_STORE)
		m.out[(size_t)col * m.ld + row] = v;
	else if (h.page[c])
		kv_store(a.kv, h.page[c], h.pos[c], end == PROJ_VALUE, row / m.dim, row % m.dim, v);
}

/* ---- launches that other files of this folder call --------------------------------------- */

int proj_launch(const apr_cuda_launch *l, const proj_args *a);
/* Rows of floats (norm.x NULL: rows of `in`), made ready for products: acts, scales. Column c is row pick[c], or c. */
struct prepare_args {
	add_norm_args norm; /* of row 0; rows are norm.n floats apart */
	const float *in;
	const uint32_t *pick, *n_live;
	uint8_t *acts;
	float *scales;
	size_t acts_tile;
	uint32_t k, columns;
	chunk_plan chunks;
	bool bf16;
};
int prepare_launch(const apr_cuda_launch *l, const prepare_args *a);
/* What follows decode's products: q in place, F32; k to its pages. Values have gone to theirs. */
int heads_in_place(const apr_cuda_launch *l, const apr_op_attn_in *op, const float *k);

#endif
