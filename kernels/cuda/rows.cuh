/* SPDX-License-Identifier: MIT */
/*
 * Work on single rows: residual and norm, activations made ready for products.
 *
 * Owns: the trees of row reductions (by width alone), the scaling and the rounding of
 * activations. Every decode kernel that needs a row's norm calls norm_chunk, every
 * kernel of a prompt row_add_norm, with ROW_THREADS threads, so its bits are the same
 * in all of either kind.
 */
#ifndef APR_KERNELS_CUDA_ROWS_CUH
#define APR_KERNELS_CUDA_ROWS_CUH

#include "kernels/cuda/products.cuh"

#define ROW_THREADS 512u
#define ROW_WARPS 16u

/* ((0+1)+(2+3)) + … over n <= 16 values, stride apart */
template <int N> DEV float tree_sum(const float *v, int stride)
{
	float a[N];

#pragma unroll
	for (int i = 0; i < N; i++)
		a[i] = v[i * stride];
#pragma unroll
	for (int s = 1; s < N; s *= 2)
#pragma unroll
		for (int i = 0; i + s < N; i += 2 * s)
			a[i] = a[i] + a[i + s];
	return a[0];
}
DEV float warp_sum(float s)
{
#pragma unroll
	for (int o = 16; o; o >>= 1)
		s += __shfl_xor_sync(~0u, s, o);
	return s;
}
DEV float warp_max(float s)
{
#pragma unroll
	for (int o = 16; o; o >>= 1)
		s = fmaxf(s, __shfl_xor_sync(~0u, s, o));
	return s;
}
/* The largest of numbers that are not negative: their bits compare as they do. A NaN is the largest. */
DEV float warp_amax(float s)
{
	return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(s)));
}
/* Sum over a block of WARPS; red: as many floats of its own a call. All threads take part. */
template <int WARPS> DEV float block_sum(float s, float *red)
{
	s = warp_sum(s);
	if ((threadIdx.x & 31) == 0)
		red[threadIdx.x >> 5] = s;
	__syncthreads();
	return tree_sum<WARPS>(red, 1);
}
DEV float sum_squares8(const float *v)
{
	return ((v[0] * v[0] + v[1] * v[1]) + (v[2] * v[2] + v[3] * v[3])) +
	       ((v[4] * v[4] + v[5] * v[5]) + (v[6] * v[6] + v[7] * v[7]));
}
DEV void load8(float *v, const float *p)
{
	float4 a = __ldcg((const float4 *)p), b = __ldcg((const float4 *)(p + 4));

	v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
DEV void store8(float *p, const float *v)
{
	*(float4 *)p = make_float4(v[0], v[1], v[2], v[3]);
	*(float4 *)(p + 4) = make_float4(v[4], v[5], v[6], v[7]);
}

struct norm_args {
	const float *w; /* NULL: none */
	float eps;
};
struct add_norm_args {  /* of one row: x_out = x + post(y); h = norm(x_out) */
	const float *x, *y; /* y NULL: none */
	float *x_out;       /* NULL: not kept */
	norm_args post, norm;
	uint32_t n;
	const uint32_t *live; /* or NULL: x_out is kept only where this is not 0 (read after the wait) */
	float inv_n;          /* 1 / n, of norm_chunk alone */
};

/* h: shared memory, n floats, in order. red: 2 · ROW_WARPS floats. U: pieces of 8 a thread, U · 4096 >= n.
 * WAIT: the previous kernel is waited for here, after the norm's weights have been asked for. Ends with the block in
 * step. */
template <int U, bool WAIT> DEV void row_add_norm(const add_norm_args &a, float *h, float *red)
{
	const bool early = U <= 2; /* else registers are short */
	float v[U][8], w[early ? U : 1][8], u[8], s = 0.0f, r = 1.0f;

#pragma unroll
	for (int j = 0; j < (early ? U : 0); j++)
		if ((threadIdx.x + j * ROW_THREADS) * 8 < a.n)
			load8(w[early ? j : 0], a.norm.w + (threadIdx.x + j * ROW_THREADS) * 8);
	if (WAIT)
		pdl_wait();
#pragma unroll
	for (int j = 0; j < U; j++) {
		uint32_t i = (threadIdx.x + j * ROW_THREADS) * 8;

#pragma unroll
		for (int e = 0; e < 8; e++)
			v[j][e] = u[e] = 0.0f;
		if (i >= a.n)
			continue;
		if (!(a.y && a.post.w))
			load8(v[j], a.x + i);
		if (a.y) {
			load8(u, a.y + i);
#pragma unroll
			for (int e = 0; e < 8; e++)
				v[j][e] += u[e];
		}
		if (a.y && a.post.w) /* v is y alone until its norm is known */
			s += sum_squares8(v[j]);
	}
	if (a.y && a.post.w) {
		r = 1.0f / sqrtf(block_sum<ROW_WARPS>(s, red) / (float)a.n + a.post.eps);
#pragma unroll
		for (int j = 0; j < U; j++) {
			uint32_t i = (threadIdx.x + j * ROW_THREADS) * 8;
			float x[8];

			if (i >= a.n)
				continue;
			load8(u, a.post.w + i);
			load8(x, a.x + i);
#pragma unroll
			for (int e = 0; e < 8; e++)
				v[j][e] = x[e] + v[j][e] * r * u[e];
		}
	}
	s = 0.0f;
#pragma unroll
	for (int j = 0; j < U; j++)
		s += sum_squares8(v[j]);
	r = 1.0f / sqrtf(block_sum<ROW_WARPS>(s, red + ROW_WARPS) / (float)a.n + a.norm.eps);
#pragma unroll
	for (int j = 0; j < U; j++) {
		uint32_t i = (threadIdx.x + j * ROW_THREADS) * 8;

		if (i >= a.n)
			continue;
		if (a.x_out && (!a.live || *a.live))
			store8(a.x_out + i, v[j]);
		if (!early)
			load8(w[0], a.norm.w + i);
#pragma unroll
		for (int e = 0; e < 8; e++)
			u[e] = v[j][e] * r * w[early ? j : 0][e];
		store8(h + i, u);
	}
	__syncthreads();
}
template <bool WAIT> DEV void row_add_norm_any(const add_norm_args &a, float *h, float *red)
{
	if (a.n <= 4096)
		row_add_norm<1, WAIT>(a, h, red);
	else if (a.n <= 8192)
		row_add_norm<2, WAIT>(a, h, red);
	else
		row_add_norm<4, WAIT>(a, h, red);
}
#define ROW_MAX 16384u /* widest row of row_add_norm_any */

/* ---- activations for products ---------------------------------------------------------- */

/* The power of two that brings a largest magnitude into [512, 1024); 1 for 0, infinity and NaN. */
DEV float act_scale(float amax)
{
	uint32_t e = __float_as_uint(amax) >> 23;

	if (e == 0 || e >= 255)
		return 1.0f;
	e = 127 + 9 + 127 - e; /* 2^(9 - exponent) */
	return __uint_as_float((e > 254 ? 254 : e) << 23);
}
/* Its inverse, exact: scales lie in 2^-118 … 2^127 */
DEV float act_unscale(float scale)
{
	uint32_t e = __float_as_uint(scale) >> 23;

	return __uint_as_float(e == 254 ? 1u << 22 : (254 - e) << 23);
}

/* Where the 16 B piece of (32-group k32, lane column t) goes, and the sums: base + these. EIGHT: column g of a tile. */
template <bool EIGHT> DEV uint32_t act_at(uint32_t k32, uint32_t g, uint32_t t)
{
	return EIGHT ? (k32 >> 3) * X_EIGHT_F16 + (k32 & 7) * 512 + g * 64 + t * 16
	             : (k32 >> 3) * X_ONE_F16 + (k32 & 7) * 64 + t * 16;
}
template <bool EIGHT> DEV uint32_t act_sums_at(uint32_t k32, uint32_t g)
{
	return (EIGHT ? (k32 >> 3) * X_EIGHT_F16 + 4096 + g * 64 : (k32 >> 3) * X_ONE_F16 + 512) + (k32 & 7) / 2 * 16;
}
template <bool EIGHT> DEV uint32_t act_bf16_at(uint32_t k32, uint32_t g, uint32_t t, int low)
{
	return EIGHT ? (k32 >> 3) * X_EIGHT_BF16 + low * 4096 + (k32 & 7) * 512 + g * 64 + t * 16
	             : (k32 >> 3) * X_ONE_BF16 + low * 512 + (k32 & 7) * 64 + t * 16;
}

/* Eight values of a lane column in a 32-group, from row[n]; zeros past n */
DEV void act_load(float *v, const float *row, uint32_t k32, uint32_t t, uint32_t n)
{
	uint32_t k = k32 * 32 + 4 * t;
	float4 a = k < n ? __ldcg((const float4 *)(row + k)) : make_float4(0, 0, 0, 0);
	float4 b = k + 16 < n ? __ldcg((const float4 *)(row + k + 16)) : make_float4(0, 0, 0, 0);

	v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
/* Rounds them, stores them and, with the group's four lanes together, the group's sums. All 32 lanes call; live: this
 * lane's group exists. */
template <bool EIGHT>
DEV void act_store(const float *v, float scale, uint8_t *dst, uint32_t k32, uint32_t g, uint32_t t, bool live)
{
	uint4 d = make_uint4(pack_half2(v[0] * scale, v[1] * scale), pack_half2(v[2] * scale, v[3] * scale),
	                     pack_half2(v[4] * scale, v[5] * scale), pack_half2(v[6] * scale, v[7] * scale));
	float b0 = (half_lo(d.x) + half_hi(d.x)) + (half_lo(d.z) + half_hi(d.z));
	float b1 = (half_lo(d.y) + half_hi(d.y)) + (half_lo(d.w) + half_hi(d.w));
	float s = b0 + b1, o = fmaf(b0, 0.0625f, b1);

#pragma unroll
	for (int i = 1; i < 4; i *= 2) {
		s += __shfl_xor_sync(~0u, s, i);
		o += __shfl_xor_sync(~0u, o, i);
	}
	if (!live)
		return;
	*(uint4 *)(dst + act_at<EIGHT>(k32, g, t)) = d;
	if (t == 0) {
		__half *h = (__half *)(dst + act_sums_at<EIGHT>(k32, g)) + (k32 & 1);
		__half sh = __float2half_rn(s), oh = __float2half_rn(o);

		h[0] = sh;
		h[2] = __float2half_rn(s - __half2float(sh));
		h[4] = oh;
		h[6] = __float2half_rn(o - __half2float(oh));
	}
}
template <bool EIGHT> DEV void act_store_bf16(const float *v, uint8_t *dst, uint32_t k32, uint32_t g, uint32_t t)
{
	__nv_bfloat162 hi[4], lo[4];

#pragma unroll
	for (int i = 0; i < 4; i++) {
		hi[i] = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
		lo[i] = __floats2bfloat162_rn(v[2 * i] - __low2float(hi[i]), v[2 * i + 1] - __high2float(hi[i]));
	}
	*(uint4 *)(dst + act_bf16_at<EIGHT>(k32, g, t, 0)) = *(uint4 *)hi;
	*(uint4 *)(dst + act_bf16_at<EIGHT>(k32, g, t, 1)) = *(uint4 *)lo;
}

/* One warp makes 32-groups b … e - 1 of a row ready; returns the scale (1 for BF16). */
template <bool EIGHT>
DEV float act_chunk(const float *row, uint32_t n, uint32_t b, uint32_t e, bool bf16, uint8_t *dst, uint32_t g)
{
	const uint32_t lane = threadIdx.x & 31, t = lane & 3;
	float v[4][8], amax = 0.0f, scale = 1.0f;

#pragma unroll
	for (int j = 0; j < 4; j++) { /* the first 1024 k stay in registers */
		uint32_t k32 = b + j * 8 + (lane >> 2);

		if (b + j * 8 < e) {
			act_load(v[j], row, k32, t, k32 < e ? n : 0);
#pragma unroll
			for (int i = 0; i < 8; i++)
				amax = fmaxf(amax, fabsf(v[j][i]));
		}
	}
#pragma unroll 1
	for (uint32_t k = b + 32; k < e; k += 8) {
		float u[8];

		act_load(u, row, k + (lane >> 2), t, k + (lane >> 2) < e ? n : 0);
#pragma unroll
		for (int i = 0; i < 8; i++)
			amax = fmaxf(amax, fabsf(u[i]));
	}
	if (!bf16)
		scale = act_scale(warp_amax(amax));
#pragma unroll
	for (int j = 0; j < 4; j++) {
		uint32_t k32 = b + j * 8 + (lane >> 2);

		if (b + j * 8 < e) {
			if (!bf16)
				act_store<EIGHT>(v[j], scale, dst, k32, g, t, k32 < e);
			else if (k32 < e)
				act_store_bf16<EIGHT>(v[j], dst, k32, g, t);
		}
	}
#pragma unroll 1
	for (uint32_t k = b + 32; k < e; k += 8) {
		uint32_t k32 = k + (lane >> 2);
		float u[8];

		act_load(u, row, k32, t, k32 < e ? n : 0);
		if (!bf16)
			act_store<EIGHT>(u, scale, dst, k32, g, t, k32 < e);
		else if (k32 < e)
			act_store_bf16<EIGHT>(u, dst, k32, g, t);
	}
	return scale;
}

/* ---- the chunk table: by K alone --------------------------------------------------------- */
struct chunk_plan {
	uint32_t chunks, log2; /* a power of two, at most 16; its logarithm */
	uint32_t cells;  /* K in cells of 256 where K is a multiple of it, else of 64 (the last one padded) */
	uint32_t cell32; /* 32-groups a cell: 8 or 2 */
};
HD chunk_plan chunks_of(uint32_t k)
{
	chunk_plan c;

	c.cell32 = k % 256 == 0 ? 8 : 2;
	c.cells = (k + c.cell32 * 32 - 1) / (c.cell32 * 32);
	c.log2 = 4;
	while (1u << c.log2 > c.cells)
		c.log2--;
	c.chunks = 1u << c.log2;
	return c;
}
HD uint32_t chunk_begin(const chunk_plan &c, uint32_t i) /* in 32-groups */
{
	return (c.cells * i >> c.log2) * c.cell32;
}

/* ---- a row's norm, made ready for products in one pass --------------------------------------- */

/* Sum over the block of what its first `chunks` warps have, by one tree; red: 16 floats of its own a call */
DEV float chunks_sum(float s, bool mine, float *red)
{
	s = warp_sum(s);
	if ((threadIdx.x & 31) == 0)
		red[threadIdx.x >> 5] = mine ? s : 0.0f;
	__syncthreads();
	return tree_sum<16>(red, 1);
}
/* x + post(y) of a chunk, from v = y and x. Its squares' sum goes over the whole row, hence all warps call. */
template <uint32_t PIECES> DEV void post_norm(const add_norm_args &a, float (*v)[8], bool mine, uint32_t b, uint32_t e, float *red)
{
	const uint32_t t = threadIdx.x & 3, g = (threadIdx.x & 31) >> 2;
	float s = 0.0f, r;

#pragma unroll
	for (uint32_t j = 0; j < PIECES; j++)
		if (b + j * 8 < e)
			s += sum_squares8(v[j]);
	r = rsqrtf(chunks_sum(s, mine, red) * a.inv_n + a.post.eps);
#pragma unroll
	for (uint32_t j = 0; j < PIECES; j++) {
		uint32_t k32 = b + j * 8 + g, n = k32 < e ? a.n : 0;
		float u[8], x[8];

		if (!mine || b + j * 8 >= e)
			continue;
		act_load(u, a.post.w, k32, t, n);
		act_load(x, a.x, k32, t, n);
#pragma unroll
		for (int i = 0; i < 8; i++)
			v[j][i] = x[i] + v[j][i] * r * u[i];
	}
}
#define PIECES_MAX 4u /* of 256 k: what a chunk of ROW_MAX has */

/* The norm's weights of a warp's chunk, asked for before anything else: b, e its 32-groups, none where it has no chunk */
template <uint32_t PIECES> DEV void norm_weights(const add_norm_args &a, uint32_t b, uint32_t e, float (*w)[8])
{
	const uint32_t t = threadIdx.x & 3, g = (threadIdx.x & 31) >> 2;

#pragma unroll
	for (uint32_t j = 0; j < PIECES; j++)
		if (b + j * 8 < e)
			act_load(w[j], a.norm.w, b + j * 8 + g, t, b + j * 8 + g < e ? a.n : 0);
}
/* Each of the block's warps makes its chunk (w: its weights; e: b where it has none) of norm(x + post(y)) ready and, where
 * `keep`, stores x + post(y). Waits for the previous kernel. red: 32 floats. Returns the chunk's scale to its own warp. */
template <bool EIGHT, uint32_t PIECES>
DEV float norm_chunk(const add_norm_args &a, uint32_t b, uint32_t e, float (*w)[8], bool keep, bool bf16, uint8_t *dst,
                     uint32_t col, float *red)
{
	const uint32_t t = threadIdx.x & 3, g = (threadIdx.x & 31) >> 2;
	const bool mine = b < e;
	float v[PIECES][8], s = 0.0f, amax = 0.0f, scale = 1.0f, f;

	pdl_wait();
#pragma unroll
	for (uint32_t j = 0; j < PIECES; j++) {
		uint32_t k32 = b + j * 8 + g, n = k32 < e ? a.n : 0;
		float u[8];

		if (b + j * 8 >= e)
			continue;
		act_load(v[j], a.y && a.post.w ? a.y : a.x, k32, t, n);
		if (a.y && !a.post.w) {
			act_load(u, a.y, k32, t, n);
#pragma unroll
			for (int i = 0; i < 8; i++)
				v[j][i] += u[i];
		}
	}
	if (a.y && a.post.w)
		post_norm<PIECES>(a, v, mine, b, e, red + 16);
#pragma unroll
	for (uint32_t j = 0; j < PIECES; j++) {
		const uint32_t k = (b + j * 8 + g) * 32 + 4 * t;

		if (b + j * 8 >= e)
			continue;
		s += sum_squares8(v[j]);
		if (keep && b + j * 8 + g < e && k < a.n) {
			*(float4 *)(a.x_out + k) = make_float4(v[j][0], v[j][1], v[j][2], v[j][3]);
			*(float4 *)(a.x_out + k + 16) = make_float4(v[j][4], v[j][5], v[j][6], v[j][7]);
		}
#pragma unroll
		for (int i = 0; i < 8; i++) {
			v[j][i] *= w[j][i];
			amax = fmaxf(amax, fabsf(v[j][i]));
		}
	}
	amax = warp_amax(amax);
	f = rsqrtf(chunks_sum(s, mine, red) * a.inv_n + a.norm.eps);
	if (!bf16) {
		scale = fminf(act_scale(amax * f), 0x1p100f); /* so that f stays finite */
		f *= scale;
	}
#pragma unroll
	for (uint32_t j = 0; j < PIECES; j++) {
		const uint32_t k32 = b + j * 8 + g;

		if (b + j * 8 >= e)
			continue;
#pragma unroll
		for (int i = 0; i < 8; i++)
			v[j][i] *= f;
		if (!bf16)
			act_store<EIGHT>(v[j], 1.0f, dst, k32, col, t, k32 < e);
		else if (k32 < e)
			act_store_bf16<EIGHT>(v[j], dst, k32, col, t);
	}
	return scale;
}

#endif
