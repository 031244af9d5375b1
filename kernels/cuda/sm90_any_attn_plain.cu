/* SPDX-License-Identifier: MIT */
/*
 * Attention on the ordinary cores, in F32: any KV type, any head size.
 *
 * Owns: the kernel that the exact route (F32 keys) and BF16 keys use, for prompt and
 * generated rows alike. Plain, not fast. The scalar reference is apr_ref_attn in
 * sm90_any_attn_ref.h.
 *
 * A block has one row and one query head; a warp takes every eighth key of a segment
 * for the scores, a thread every 256th dimension for the values.
 */
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/launch.cuh"

DEV float kv_read(const proj_kv &kv, const uint8_t *page, size_t i)
{
	if (kv.type == APR_KV_F32)
		return ((const float *)page)[i];
	if (kv.type == APR_KV_F16)
		return __half2float(((const __half *)page)[i]);
	return __bfloat162float(((const __nv_bfloat16 *)page)[i]);
}

static __global__ void __launch_bounds__(256) attn_plain(const __grid_constant__ attn_args a)
{
	__shared__ float p[APR_KV_SEGMENT], red[16];
	extern __shared__ float q[]; /* [k_dim], then [v_dim] sums */
	const uint32_t head = blockIdx.x, row = blockIdx.y, kvh = head / a.group, lane = threadIdx.x & 31,
				   w = threadIdx.x >> 5;
	float *total = q + a.kv.k_dim;

	pdl_next();
	pdl_wait();
	if (row >= min(*a.rows.n, a.bucket))
		return;
	const uint32_t pos = a.rows.pos[row], slot = a.rows.slot[row], first = attn_first(pos, a.window);
	attn_merge mg = {-INFINITY, 0.0f, 0.0f, 0.0f};

	for (uint32_t d = threadIdx.x; d < a.kv.k_dim; d += 256)
		q[d] = a.q[((size_t)row * a.n_heads + head) * a.kv.k_dim + d];
	for (uint32_t d = threadIdx.x; d < a.kv.v_dim; d += 256)
		total[d] = 0.0f;
	__syncthreads();
	for (uint32_t seg = first / APR_KV_SEGMENT; slot != APR_CUDA_DEAD && seg <= pos / APR_KV_SEGMENT; seg++) {
		float m = -INFINITY, sum = 0.0f;
		uint32_t key0 = seg * APR_KV_SEGMENT;

		for (uint32_t j = w; j < APR_KV_SEGMENT; j += 8) {
			uint32_t key = key0 + j;
			float s = 0.0f;

			if (key >= first && key <= pos) {
				const uint8_t *page = kv_page(a.kv, slot, key);
				size_t at = ((size_t)kvh * APR_KV_PAGE + key % APR_KV_PAGE) * a.kv.k_dim;

				for (uint32_t d = lane; d < a.kv.k_dim; d += 32)
					s = fmaf(q[d], kv_read(a.kv, page, at + d), s);
				s = attn_score(a, warp_sum(s), 1.0f);
			} else {
				s = -INFINITY;
			}
			if (lane == 0)
				p[j] = s;
		}
		__syncthreads();
		m = warp_max(p[threadIdx.x]);
		if (lane == 0)
			red[w] = m;
		__syncthreads();
		for (int i = 0; i < 8; i++)
			m = fmaxf(m, red[i]);
		float e = exp2_fast(p[threadIdx.x] - m);

		sum = warp_sum(e);
		p[threadIdx.x] = e;
		if (lane == 0)
			red[8 + w] = sum;
		__syncthreads();
		mg.segment(m, tree_sum<8>(red + 8, 1));
		for (uint32_t d = threadIdx.x; d < a.kv.v_dim; d += 256) {
			float o = 0.0f;

			for (uint32_t key = max(first, key0); key <= min(pos, key0 + APR_KV_SEGMENT - 1); key++) {
				size_t at = (size_t)a.kv.n_kv_heads * APR_KV_PAGE * a.kv.k_dim +
				            ((size_t)kvh * APR_KV_PAGE + key % APR_KV_PAGE) * a.kv.v_dim;

				o = fmaf(p[key - key0], kv_read(a.kv, kv_page(a.kv, slot, key), at + d), o);
			}
			total[d] = mg.sum(total[d], o);
		}
		__syncthreads();
	}
	for (uint32_t d = threadIdx.x; d < a.kv.v_dim; d += 256)
		a.o[((size_t)row * a.n_heads + head) * a.kv.v_dim + d] = slot == APR_CUDA_DEAD ? 0.0f : total[d] / mg.l;
}

int attn_plain_launch(const apr_cuda_launch *l, const attn_args *a)
{
	return launch(attn_plain, dim3(a->n_heads, a->bucket), 256, (a->kv.k_dim + a->kv.v_dim) * sizeof(float), l->stream,
	              l->pdl, *a);
}
