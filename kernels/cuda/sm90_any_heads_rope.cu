/* SPDX-License-Identifier: MIT */
/*
 * What follows the q, k, v products where they do not do it themselves: bias, the
 * norm of each head, rotation, keys and values to their pages.
 *
 * Owns: that kernel. A warp has a (row, head). The scalar reference is
 * apr_ref_heads in sm90_any_heads_rope_ref.h.
 */
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/launch.cuh"

#define HEAD_MAX 512u
#define WARPS 4u

struct heads_args {
	const float *q, *k, *v; /* v NULL: it has gone to its page already */
	uint32_t ld_q, ld_k, ld_v, n_heads;
	apr_cuda_scales scale;
	const float *bq, *bk, *bv;
	norm_args q_norm, k_norm;
	apr_rope_table rope;
	float *out; /* q */
	bool half;  /* q as attn_queries_half says */
	bool four;  /* everything lies so that four values can be taken at once */
	proj_kv kv;
	apr_cuda_rows rows;
	uint32_t bucket;
};

/* v[dim] in shared memory, a warp's: norm, then rotation */
DEV void turn_head(float *v, uint32_t dim, const norm_args &norm, const apr_rope_table &rope, uint32_t pos)
{
	const uint32_t lane = threadIdx.x & 31;
	float s = 0.0f, r;

	if (norm.w) {
		for (uint32_t d = lane; d < dim; d += 32)
			s = fmaf(v[d], v[d], s);
		r = 1.0f / sqrtf(warp_sum(s) / (float)dim + norm.eps);
		for (uint32_t d = lane; d < dim; d += 32)
			v[d] = v[d] * r * norm.w[d];
		__syncwarp();
	}
	if (rope.kind == APR_OP_ROPE_NONE)
		return;
	for (uint32_t i = lane; i < rope.n_rot / 2; i += 32) {
		uint32_t a = rope.kind == APR_OP_ROPE_PAIRS ? 2 * i : i,
				 b = rope.kind == APR_OP_ROPE_PAIRS ? 2 * i + 1 : i + rope.n_rot / 2;
		float2 cs = *(const float2 *)(rope.cos_sin + ((size_t)pos * (rope.n_rot / 2) + i) * 2);
		float va = v[a], vb = v[b];

		v[a] = rotate_one(va, vb, false, cs.x, cs.y);
		v[b] = rotate_one(vb, va, true, cs.x, cs.y);
	}
	__syncwarp();
}

/* A head of q as F16, times the power of two whose inverse is stored behind the row's heads */
DEV void store_half(const float *v, const heads_args &a, uint32_t row, uint32_t head)
{
	const uint32_t lane = threadIdx.x & 31, dim = a.kv.k_dim;
	uint2 *out = (uint2 *)((__half *)(a.out + (size_t)row * a.n_heads * dim) + head * dim);
	float amax = 0.0f, scale;

	for (uint32_t i = lane; i < dim / 4; i += 32) {
		float4 f = ((const float4 *)v)[i];

		amax = fmaxf(amax, fmaxf(fmaxf(fabsf(f.x), fabsf(f.y)), fmaxf(fabsf(f.z), fabsf(f.w))));
	}
	scale = act_scale(warp_max(amax));
	for (uint32_t i = lane; i < dim / 4; i += 32) {
		float4 f = ((const float4 *)v)[i];

		out[i] = make_uint2(pack_half2(f.x * scale, f.y * scale), pack_half2(f.z * scale, f.w * scale));
	}
	if (lane == 0)
		*((float *)attn_units(a.out, row, a.n_heads, dim) + head) = act_unscale(scale);
}

/* n values from src, times scale and channel's or NULL, plus bias or NULL, to v */
DEV void load_head(float *v, const float *src, const float *channel, const float *bias, uint32_t n, float scale,
                   bool four)
{
	const uint32_t lane = threadIdx.x & 31;

	for (uint32_t d = lane * 4; four && d < n; d += 128) {
		float4 f = __ldcs((const float4 *)(src + d)), c = channel ? *(const float4 *)(channel + d) : make_float4(1, 1, 1, 1);
		float4 b = bias ? *(const float4 *)(bias + d) : make_float4(0, 0, 0, 0);

		*(float4 *)(v + d) = make_float4(f.x * scale * c.x + b.x, f.y * scale * c.y + b.y, f.z * scale * c.z + b.z,
		                                 f.w * scale * c.w + b.w);
	}
	for (uint32_t d = lane; !four && d < n; d += 32)
		v[d] = src[d] * scale * (channel ? channel[d] : 1.0f) + (bias ? bias[d] : 0.0f);
}

DEV void store_page(const float *v, const heads_args &a, uint32_t slot, uint32_t pos, bool value, uint32_t head,
                    uint32_t dim)
{
	const uint32_t lane = threadIdx.x & 31;
	uint8_t *page = kv_page(a.kv, slot, pos);

	if (a.four && a.kv.type == APR_KV_F16) {
		uint2 *to = (uint2 *)((__half *)page + (value ? (size_t)a.kv.n_kv_heads * APR_KV_PAGE * a.kv.k_dim : 0) +
		                      ((size_t)head * APR_KV_PAGE + pos % APR_KV_PAGE) * dim);

		for (uint32_t i = lane; i < dim / 4; i += 32) {
			float4 f = ((const float4 *)v)[i];

			to[i] = make_uint2(pack_half2(f.x, f.y), pack_half2(f.z, f.w));
		}
		return;
	}
	for (uint32_t d = lane; d < dim; d += 32)
		kv_store(a.kv, page, pos, value, head, d, v[d]);
}

static __global__ void __launch_bounds__(WARPS * 32) heads_rope(const __grid_constant__ heads_args a)
{
	__shared__ __align__(16) float mem[WARPS][HEAD_MAX];
	const uint32_t lane = threadIdx.x & 31, row = blockIdx.y, n_kv = a.kv.n_kv_heads;
	float *v = mem[threadIdx.x >> 5];

	pdl_next();
	pdl_wait();
	uint32_t head = blockIdx.x * WARPS + (threadIdx.x >> 5);

	if (row >= min(*a.rows.n, a.bucket) || head >= a.n_heads + n_kv * (a.v ? 2 : 1))
		return;
	const uint32_t pos = a.rows.pos[row], slot = a.rows.slot[row];
	const uint32_t what = head < a.n_heads ? 0 : head < a.n_heads + n_kv ? 1 : 2; /* q, k, v */
	const float *src = what == 0   ? a.q + (size_t)row * a.ld_q
	                   : what == 1 ? a.k + (size_t)row * a.ld_k
	                               : a.v + (size_t)row * a.ld_v;
	const float *bias = what == 0 ? a.bq : what == 1 ? a.bk : a.bv;
	const uint32_t dim = what == 2 ? a.kv.v_dim : a.kv.k_dim, nq = a.n_heads * a.kv.k_dim, nk = n_kv * a.kv.k_dim;
	const float *channel = a.scale.channel ? a.scale.channel + (what == 0 ? 0 : what == 1 ? nq : nq + nk) : NULL;

	head -= what == 0 ? 0 : what == 1 ? a.n_heads : a.n_heads + n_kv;
	load_head(v, src + head * dim, channel ? channel + head * dim : NULL, bias ? bias + head * dim : NULL, dim,
	          a.scale.row ? a.scale.row[row] : 1.0f, a.four);
	__syncwarp();
	if (what < 2)
		turn_head(v, dim, what == 0 ? a.q_norm : a.k_norm, a.rope, pos);
	if (what == 0 && a.half)
		store_half(v, a, row, head);
	else if (what == 0)
		for (uint32_t d = lane; d < dim; d += 32)
			a.out[((size_t)row * a.n_heads + head) * dim + d] = v[d];
	else if (slot != APR_CUDA_DEAD)
		store_page(v, a, slot, pos, what == 2, head, dim);
}

static bool by_four(const float *p, uint32_t ld)
{
	return ld % 4 == 0 && (uintptr_t)p % 16 == 0;
}

static int heads_launch(const apr_cuda_launch *l, const apr_op_attn_in *op, heads_args *a)
{
	const apr_kv_group *g = op->kv.group;
	uint32_t heads = op->n_heads + op->n_kv_heads * (a->v ? 2 : 1);

	if (op->k_dim > HEAD_MAX || op->v_dim > HEAD_MAX || op->rope.n_rot > op->k_dim)
		return -ENOTSUP;
	a->n_heads = op->n_heads;
	a->bq = op->bq, a->bk = op->bk, a->bv = op->bv;
	a->q_norm = {op->q_norm.w, op->q_norm.eps}, a->k_norm = {op->k_norm.w, op->k_norm.eps};
	a->rope = op->rope, a->out = op->q;
	a->four = op->k_dim % 4 == 0 && op->v_dim % 4 == 0 && by_four(a->q, a->ld_q) && by_four(a->k, a->ld_k) &&
	          by_four(a->v, a->ld_v) && by_four(a->bq, 0) && by_four(a->bk, 0) && by_four(a->bv, 0) &&
	          by_four(a->scale.channel, 0);
	a->kv = {g->pool,           g->table,       g->max_pages_seq, g->n_layers, op->kv.index,
	         (uint32_t)g->type, op->n_kv_heads, op->k_dim,        op->v_dim,   g->layer_bytes};
	a->rows = l->rows, a->bucket = l->bucket;
	return launch(heads_rope, dim3((heads + WARPS - 1) / WARPS, l->bucket), WARPS * 32, 0, l->stream, l->pdl, *a);
}

extern "C" int apr_cuda_prefill_heads(const apr_cuda_launch *l, const apr_op_attn_in *op, const float *q, uint32_t ld_q,
                                      const float *k, uint32_t ld_k, const float *v, uint32_t ld_v,
                                      apr_cuda_scales scale)
{
	heads_args a = {};

	a.q = q, a.k = k, a.v = v, a.ld_q = ld_q, a.ld_k = ld_k, a.ld_v = ld_v, a.scale = scale;
	a.half = !l->generated && attn_queries_half(op->kv.group, op->k_dim, op->v_dim);
	if (a.half && q == op->q)
		return -EINVAL;
	return heads_launch(l, op, &a);
}

int heads_in_place(const apr_cuda_launch *l, const apr_op_attn_in *op, const float *k)
{
	heads_args a = {};

	a.q = op->q, a.k = k, a.ld_q = op->n_heads * op->k_dim, a.ld_k = op->n_kv_heads * op->k_dim;
	return heads_launch(l, op, &a);
}
