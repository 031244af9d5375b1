/* SPDX-License-Identifier: MIT */
/*
 * Attention of prompt rows with heads of other sizes than sm90_f16_attn_prefill.cu has:
 * tiles of up to 64 rows of one sequence, keys in FP16 pages, queries in F32.
 *
 * Owns: the kernel on mma.sync and its launch. The scalar reference is apr_ref_attn in
 * sm90_any_attn_ref.h.
 *
 * A warp has 16 rows (and, where heads are wider than 128, half of the values'
 * dimensions). Keys come in blocks of 64 aligned to position, two in flight; within
 * a segment of 256 there is one running state, segments are merged ascending. A row
 * that sees nothing of a block keeps its state to the bit, so that its results do
 * not depend on the tile it is in.
 */
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/launch.cuh"

#define BLOCK 64u
#define PER_SEG (APR_KV_SEGMENT / BLOCK)

template <int DIM> struct shape {
	static const int split = DIM > 128 ? 2 : 1; /* warps that share 16 rows */
	static const int threads = 128 * split;
	static const int cols = DIM / split;      /* dimensions of values a warp */
	static const int bytes = BLOCK * DIM * 2; /* of a block of keys, of values, of queries */
};

/* 64 rows of `dim` halves to shared memory, 16 B chunks permuted by the row; rows at or past `live` are zeros */
template <int DIM> DEV void load_block(uint32_t dst, const __half *src, uint32_t dim, uint32_t live)
{
	const uint32_t per = DIM / 8, c = threadIdx.x % per;

#pragma unroll
	for (uint32_t r = threadIdx.x / per; r < BLOCK; r += shape<DIM>::threads / per) {
		bool in = r < live && c * 8 < dim;

		cp_async16(dst + r * DIM * 2 + ((c ^ (r & 7)) << 4), src + (in ? r * dim + c * 8 : 0), in);
	}
}
template <int DIM>
DEV void load_kv(const attn_args &a, uint32_t stage, const uint8_t *at, uint32_t kvh, uint32_t block, uint32_t last)
{
	const __half *page = (const __half *)at;
	const uint32_t live = min(BLOCK, last + 1 - block * BLOCK);

	load_block<DIM>(stage, page + (size_t)kvh * BLOCK * a.kv.k_dim, a.kv.k_dim, live);
	load_block<DIM>(stage + shape<DIM>::bytes,
	                page + (size_t)a.kv.n_kv_heads * BLOCK * a.kv.k_dim + (size_t)kvh * BLOCK * a.kv.v_dim, a.kv.v_dim,
	                live);
	cp_async_commit();
}

/* The tile's queries of one head, FP16, each row times a power of two; unit[r]: its inverse */
template <int DIM>
DEV void load_queries(const attn_args &a, uint8_t *sq, float *unit, const apr_cuda_attn_tile &t, uint32_t head)
{
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

	for (uint32_t r = warp; r < BLOCK; r += shape<DIM>::threads / 32) {
		const float *q = a.q + ((size_t)(t.row + r) * a.n_heads + head) * a.kv.k_dim;
		float v[DIM / 32], amax = 0.0f, s;

#pragma unroll
		for (int i = 0; i < DIM / 32; i++) {
			uint32_t d = (lane + (i / 2) * 32) * 2 + (i & 1);

			v[i] = r < t.rows && d < a.kv.k_dim ? q[d] : 0.0f;
			amax = fmaxf(amax, fabsf(v[i]));
		}
		s = act_scale(warp_max(amax));
#pragma unroll
		for (int i = 0; i < DIM / 32; i += 2) {
			uint32_t d = (lane + (i / 2) * 32) * 2;

			*(uint32_t *)(sq + r * DIM * 2 + (((d / 8) ^ (r & 7)) << 4) + d % 8 * 2) =
					pack_half2(v[i] * s, v[i + 1] * s);
		}
		if (lane == 0)
			unit[r] = act_unscale(s);
	}
}

template <int DIM> struct row_state { /* of a lane: rows g and g + 8 of its warp's 16 */
	float o[shape<DIM>::cols / 8][4], total[shape<DIM>::cols / 8][4];
	float m[2], l[2], factor[2];
	uint32_t pos[2], first[2];
	attn_merge mg[2];

	__device__ __forceinline__ void fresh(void)
	{
#pragma unroll
		for (int i = 0; i < shape<DIM>::cols / 8; i++)
			o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.0f;
		m[0] = m[1] = -INFINITY;
		l[0] = l[1] = 0.0f;
	}
	/* The segment that ends here joins those before it */
	__device__ __forceinline__ void merge(void)
	{
#pragma unroll
		for (int r = 0; r < 2; r++) {
			float sum = l[r];

			sum += __shfl_xor_sync(~0u, sum, 1);
			sum += __shfl_xor_sync(~0u, sum, 2);
			mg[r].segment(m[r], sum);
		}
#pragma unroll
		for (int i = 0; i < shape<DIM>::cols / 8; i++)
#pragma unroll
			for (int e = 0; e < 4; e++)
				total[i][e] = mg[e >> 1].sum(total[i][e], o[i][e]);
	}
};

/* s = q · k for the warp's 16 rows and a block of 64 keys */
template <int DIM> DEV void block_scores(uint32_t sq, uint32_t sk, uint32_t row0, float (*s)[4])
{
	const uint32_t lane = threadIdx.x & 31;

#pragma unroll
	for (int j = 0; j < 8; j++)
		s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.0f;
#pragma unroll
	for (int ks = 0; ks < DIM / 16; ks++) {
		uint32_t qf[4], r = row0 + (lane & 15), c = 2 * ks + (lane >> 4);

		ldmatrix4<false>(qf, sq + r * DIM * 2 + ((c ^ (r & 7)) << 4));
#pragma unroll
		for (int j = 0; j < 4; j++) {
			uint32_t kf[4], key = j * 16 + (lane & 7) + ((lane >> 4) << 3), kc = 2 * ks + (lane >> 3 & 1);

			ldmatrix4<false>(kf, sk + key * DIM * 2 + ((kc ^ (key & 7)) << 4));
			mma_f16(s[2 * j], qf, kf[0], kf[1], s[2 * j]);
			mma_f16(s[2 * j + 1], qf, kf[2], kf[3], s[2 * j + 1]);
		}
	}
}

/* Scores to weights, in place; the state moves on to the new largest score. ALL: every row of the tile sees every key. */
template <int DIM, bool CAP, bool ALL>
DEV void block_weights(const attn_args &a, row_state<DIM> &st, uint32_t key0, float (*s)[4])
{
	const uint32_t t = threadIdx.x & 3;
	float mx[2] = {-INFINITY, -INFINITY}, keep[2], base[2], sum[2] = {0, 0};

#pragma unroll
	for (int j = 0; j < 8; j++)
#pragma unroll
		for (int e = 0; e < 4; e++) {
			uint32_t key = key0 + j * 8 + 2 * t + (e & 1);
			int r = e >> 1;

			s[j][e] = ALL || (key <= st.pos[r] && key >= st.first[r]) ? attn_score_as<CAP>(a, s[j][e], st.factor[r])
			                                                          : -INFINITY;
			mx[r] = fmaxf(mx[r], s[j][e]);
		}
#pragma unroll
	for (int r = 0; r < 2; r++) {
		mx[r] = fmaxf(mx[r], __shfl_xor_sync(~0u, mx[r], 1));
		mx[r] = fmaxf(mx[r], __shfl_xor_sync(~0u, mx[r], 2));
		mx[r] = fmaxf(mx[r], st.m[r]);
		base[r] = mx[r] == -INFINITY ? 0.0f : mx[r];
		keep[r] = exp2_fast(st.m[r] - base[r]);
		st.m[r] = mx[r];
	}
#pragma unroll
	for (int j = 0; j < 8; j++)
#pragma unroll
		for (int e = 0; e < 4; e++) {
			s[j][e] = exp2_fast(s[j][e] - base[e >> 1]);
			sum[e >> 1] += s[j][e];
		}
#pragma unroll
	for (int r = 0; r < 2; r++)
		st.l[r] = fmaf(st.l[r], keep[r], sum[r]);
#pragma unroll
	for (int i = 0; i < shape<DIM>::cols / 8; i++)
#pragma unroll
		for (int e = 0; e < 4; e++)
			st.o[i][e] *= keep[e >> 1];
}

/* o += weights · v for the warp's dimensions from col0 on */
template <int DIM> DEV void block_values(uint32_t sv, uint32_t col0, const float (*s)[4], float (*o)[4])
{
	const uint32_t lane = threadIdx.x & 31;

#pragma unroll
	for (int k = 0; k < 4; k++) {
		const uint32_t p[4] = {pack_half2(s[2 * k][0], s[2 * k][1]), pack_half2(s[2 * k][2], s[2 * k][3]),
		                       pack_half2(s[2 * k + 1][0], s[2 * k + 1][1]),
		                       pack_half2(s[2 * k + 1][2], s[2 * k + 1][3])};

#pragma unroll
		for (int j = 0; j < shape<DIM>::cols / 16; j++) {
			uint32_t vf[4], key = k * 16 + (lane & 15), c = col0 / 8 + 2 * j + (lane >> 4);

			ldmatrix4<true>(vf, sv + key * DIM * 2 + ((c ^ (key & 7)) << 4));
			mma_f16(o[2 * j], p, vf[0], vf[1], o[2 * j]);
			mma_f16(o[2 * j + 1], p, vf[2], vf[3], o[2 * j + 1]);
		}
	}
}

template <int DIM> DEV void store_tile(const attn_args &a, const row_state<DIM> &st, const apr_cuda_attn_tile &t,
                                       uint32_t head, uint32_t row0, uint32_t col0)
{
	const uint32_t lane = threadIdx.x & 31, g = lane >> 2;

#pragma unroll
	for (int r = 0; r < 2; r++) {
		uint32_t row = row0 + g + r * 8;

		if (row >= t.rows)
			continue;
#pragma unroll
		for (int i = 0; i < shape<DIM>::cols / 8; i++) {
			uint32_t d = col0 + i * 8 + (lane & 3) * 2;

			if (d < a.kv.v_dim)
				*(float2 *)(a.o + ((size_t)(t.row + row) * a.n_heads + head) * a.kv.v_dim + d) =
						make_float2(st.total[i][2 * r] / st.mg[r].l, st.total[i][2 * r + 1] / st.mg[r].l);
		}
	}
}

template <int DIM, bool CAP>
DEV void one_tile(const attn_args &a, uint8_t *raw, const apr_cuda_attn_tile &t, uint32_t head)
{
	const uint32_t warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, kvh = head / a.group;
	const uint32_t row0 = (warp & 3) * 16, col0 = (warp >> 2) * shape<DIM>::cols;
	const uint32_t sq = smem_addr(raw), sk = sq + shape<DIM>::bytes;
	float *unit = (float *)(raw + 5 * shape<DIM>::bytes);
	const uint32_t last = t.pos + t.rows - 1, b0 = attn_first(t.pos, a.window) / BLOCK, b1 = last / BLOCK + 1;
	row_state<DIM> st;
	float s[8][4];

	load_kv<DIM>(a, sk, kv_page(a.kv, t.slot, b0 * BLOCK), kvh, b0, last);
	/* pages are looked up a block ahead of their copies, so that no copy waits for its address */
	const uint8_t *ahead = b0 + 1 < b1 ? kv_page(a.kv, t.slot, (b0 + 1) * BLOCK) : NULL;
	load_queries<DIM>(a, raw, unit, t, head);
	__syncthreads();
#pragma unroll
	for (int r = 0; r < 2; r++) {
		uint32_t row = row0 + g + r * 8;

		st.pos[r] = t.pos + min(row, t.rows - 1);
		st.first[r] = attn_first(st.pos[r], a.window);
		st.factor[r] = attn_factor(a, unit[row]);
		st.mg[r] = {-INFINITY, 0.0f, 0.0f, 0.0f};
	}
#pragma unroll
	for (int i = 0; i < shape<DIM>::cols / 8; i++)
		st.total[i][0] = st.total[i][1] = st.total[i][2] = st.total[i][3] = 0.0f;
	st.fresh();
	for (uint32_t b = b0; b < b1; b++) {
		const uint32_t stage = sk + (b & 1 ^ b0 & 1) * 2 * shape<DIM>::bytes;

		if (b + 1 < b1)
			load_kv<DIM>(a, sk + ((b + 1) & 1 ^ b0 & 1) * 2 * shape<DIM>::bytes, ahead, kvh, b + 1, last);
		else
			cp_async_commit();
		if (b + 2 < b1)
			ahead = kv_page(a.kv, t.slot, (b + 2) * BLOCK);
		cp_async_wait<1>();
		__syncthreads();
		if (b != b0 && b % PER_SEG == 0) {
			st.merge();
			st.fresh();
		}
		block_scores<DIM>(sq, stage, row0, s);
		if (b * BLOCK + BLOCK - 1 <= t.pos && b * BLOCK >= attn_first(last, a.window))
			block_weights<DIM, CAP, true>(a, st, b * BLOCK, s);
		else
			block_weights<DIM, CAP, false>(a, st, b * BLOCK, s);
		block_values<DIM>(stage + shape<DIM>::bytes, col0, s, st.o);
		__syncthreads(); /* the stage is read before it is filled again */
	}
	st.merge();
	store_tile<DIM>(a, st, t, head, row0, col0);
}

template <int DIM, bool CAP> static __global__ void __launch_bounds__(shape<DIM>::threads)
		attn_prefill(const __grid_constant__ attn_args a)
{
	extern __shared__ __align__(128) uint8_t raw[];

	pdl_next();
	pdl_wait();
	const uint32_t items = *a.n_tiles * a.n_heads;

	for (uint32_t i = blockIdx.x; i < items; i += gridDim.x) {
		const apr_cuda_attn_tile t = a.tiles[i / a.n_heads];

		if (t.rows && t.seg == 0) /* a divided tile's first range does all of it */
			one_tile<DIM, CAP>(a, raw, t, i % a.n_heads);
	}
}

template <int DIM> static int launch_dim(const apr_cuda_launch *l, const attn_args *a, uint32_t max_tiles)
{
	uint32_t items = max_tiles * a->n_heads, most = l->sms * (DIM <= 64    ? 4
	                                                          : DIM <= 128 ? 2
	                                                                       : 1); /* blocks that fit at once */

	dim3 grid(items < most ? items : most);
	size_t smem = 5 * shape<DIM>::bytes + BLOCK * 4;

	return a->softcap != 0.0f
	               ? launch(attn_prefill<DIM, true>, grid, shape<DIM>::threads, smem, l->stream, l->pdl, *a)
	               : launch(attn_prefill<DIM, false>, grid, shape<DIM>::threads, smem, l->stream, l->pdl, *a);
}

int attn_mma_launch(const apr_cuda_launch *l, const apr_op_attn *op, const attn_args *a, uint32_t max_tiles)
{
	if (op->k_dim <= 64 && op->v_dim <= 64)
		return launch_dim<64>(l, a, max_tiles);
	if (op->k_dim <= 128 && op->v_dim <= 128)
		return launch_dim<128>(l, a, max_tiles);
	return launch_dim<256>(l, a, max_tiles);
}
