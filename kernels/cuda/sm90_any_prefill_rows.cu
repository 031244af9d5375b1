/* SPDX-License-Identifier: MIT */
/*
 * What stands around the GEMMs of a prompt: residual and norm, conversion of GEMM
 * inputs to F16, BF16, E4M3 or F32, activations, scales and biases of outputs.
 *
 * Owns: kernels of one block a row, which holds it in registers: each value is read
 * once. The tree of a row's sum is by its width alone. The scalar references are
 * apr_ref_add_norm and apr_ref_act in sm90_any_proj_decode_ref.h.
 */
#include <cuda_fp8.h>

#include "kernels/cuda/fused_order.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/proj.cuh"

#define PREFILL_THREADS 256u
#define PREFILL_WARPS 8u
#define HELD_MAX 32768u /* widest row that a block's registers hold */

struct convert_args { /* a row comes from one of three */
	add_norm_args norm; /* x not NULL */
	apr_cuda_owed owed; /* to norm's y */
	const float *up, *gate; /* up not NULL: act(gate) · up, or act(up) */
	apr_cuda_scales scale;
	uint32_t act, ld;
	const float *in;
	apr_cuda_gemm_in dst;
	uint32_t n, bucket;
	const uint32_t *n_live;
};

/* ---- a row over a block -------------------------------------------------------------------- */

/* red: PREFILL_WARPS floats of its own a call. All threads take part. */
DEV float row_max(float v, float *red)
{
	v = warp_max(v);
	if ((threadIdx.x & 31) == 0)
		red[threadIdx.x >> 5] = v;
	__syncthreads();
	v = red[0];
#pragma unroll
	for (uint32_t i = 1; i < PREFILL_WARPS; i++)
		v = fmaxf(v, red[i]);
	return v;
}
DEV float max_abs(float4 v)
{
	return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}
DEV float squares(float4 v)
{
	return (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
}
DEV float4 add4(float4 a, float4 b)
{
	return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
DEV float4 times4(float4 a, float s)
{
	return make_float4(a.x * s, a.y * s, a.z * s, a.w * s);
}
DEV float4 weighted4(float4 a, float r, float4 w) /* a · r · w */
{
	return make_float4(a.x * r * w.x, a.y * r * w.y, a.z * r * w.z, a.w * r * w.w);
}
/* Values of this file are read once: past the L1 cache's lines, which others' use */
DEV float4 read4(const float *p)
{
	return __ldcs((const float4 *)p);
}

/* Four values from k on of row r of n */
DEV void store4(const apr_cuda_gemm_in &dst, uint32_t r, uint32_t k, uint32_t n, float4 v, float scale)
{
	const size_t at = dst.fused ? fused_place(r, k, n) : (size_t)r * n + k;

	if (dst.real == APR_REAL_F32) {
		*(float4 *)((float *)dst.rows + at) = v;
	} else if (dst.real == APR_REAL_F16) {
		*(uint2 *)((__half *)dst.rows + at) =
				make_uint2(pack_half2(v.x * scale, v.y * scale), pack_half2(v.z * scale, v.w * scale));
	} else if (dst.real == APR_REAL_BF16) {
		__nv_bfloat162 p[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};

		*(uint2 *)((__nv_bfloat16 *)dst.rows + at) = *(uint2 *)p;
	} else {
		float4 s = make_float4(v.x / scale, v.y / scale, v.z / scale, v.w / scale);

		*(__nv_fp8x4_e4m3 *)((uint8_t *)dst.rows + at) = __nv_fp8x4_e4m3(s);
	}
}
/* The scale of a row whose largest magnitude is amax, for store4; its inverse is kept. All threads call. */
DEV float row_scale(const apr_cuda_gemm_in &dst, uint32_t r, float amax, float *red)
{
	float scale, keep;

	if (dst.real != APR_REAL_F16 && dst.real != APR_REAL_E4M3)
		return 1.0f;
	amax = row_max(amax, red);
	if (dst.real == APR_REAL_F16) {
		scale = act_scale(amax);
		keep = act_unscale(scale);
	} else { /* a row with an infinity or a NaN must not look sound: E4M3 has NaN */
		scale = keep = amax > 0.0f && amax < INFINITY ? amax / 448.0f : 1.0f;
	}
	if (threadIdx.x == 0)
		dst.row_scale[r] = keep;
	return scale;
}

/* Four of a GEMM's outputs from i on, times what is owed to them, plus bias or NULL */
DEV float4 owed4(const float *p, uint32_t i, float row, const float *channel, const float *bias)
{
	float4 v = times4(read4(p + i), row);

	if (channel) {
		float4 c = *(const float4 *)(channel + i);

		v = make_float4(v.x * c.x, v.y * c.y, v.z * c.z, v.w * c.w);
	}
	return bias ? add4(v, *(const float4 *)(bias + i)) : v;
}
struct act_args { /* act(gate) · up of n columns, or act(up) where gate is NULL */
	uint32_t act, n;
	const float *gate, *up; /* of the row */
	const float *channel;
	float row;
};
DEV float4 activated4(const act_args &a, uint32_t i)
{
	float4 u = owed4(a.up, i, a.row, a.channel && a.gate ? a.channel + a.n : a.channel, NULL), g;

	if (!a.gate)
		return make_float4(activate(a.act, u.x), activate(a.act, u.y), activate(a.act, u.z),
		                   activate(a.act, u.w));
	g = owed4(a.gate, i, a.row, a.channel, NULL);
	return make_float4(activate(a.act, g.x) * u.x, activate(a.act, g.y) * u.y,
	                   activate(a.act, g.z) * u.z, activate(a.act, g.w) * u.w);
}

/* ---- a row held in registers: U pieces of four a thread ----------------------------------------- */

/* Row `from` of x + post(y), kept; then its norm. row: scale owed to y. */
template <int U> DEV void norm_row(const convert_args &c, uint32_t from, float row, float4 *v, float *red)
{
	const add_norm_args &a = c.norm;
	const size_t at = (size_t)from * a.n;
	float s = 0.0f;

#pragma unroll
	for (int j = 0; j < U; j++) {
		const uint32_t i = (threadIdx.x + j * PREFILL_THREADS) * 4;

		v[j] = make_float4(0, 0, 0, 0);
		if (i >= a.n)
			continue;
		v[j] = a.y ? owed4(a.y + at, i, row, c.owed.scale.channel, c.owed.bias) : read4(a.x + at + i);
		if (a.y && !a.post.w)
			v[j] = add4(read4(a.x + at + i), v[j]);
	}
	if (a.y && a.post.w) { /* v is y alone until its norm is known */
#pragma unroll
		for (int j = 0; j < U; j++)
			s += squares(v[j]);
		s = 1.0f / sqrtf(block_sum<PREFILL_WARPS>(s, red) / (float)a.n + a.post.eps);
#pragma unroll
		for (int j = 0; j < U; j++) {
			const uint32_t i = (threadIdx.x + j * PREFILL_THREADS) * 4;

			if (i < a.n)
				v[j] = add4(read4(a.x + at + i), weighted4(v[j], s, *(const float4 *)(a.post.w + i)));
		}
	}
	s = 0.0f;
#pragma unroll
	for (int j = 0; j < U; j++) {
		const uint32_t i = (threadIdx.x + j * PREFILL_THREADS) * 4;

		if (i < a.n && a.x_out)
			*(float4 *)(a.x_out + at + i) = v[j];
		s += squares(v[j]);
	}
	s = 1.0f / sqrtf(block_sum<PREFILL_WARPS>(s, red + PREFILL_WARPS) / (float)a.n + a.norm.eps);
#pragma unroll
	for (int j = 0; j < U; j++) {
		const uint32_t i = (threadIdx.x + j * PREFILL_THREADS) * 4;

		if (i < a.n)
			v[j] = weighted4(v[j], s, *(const float4 *)(a.norm.w + i));
	}
}

enum { FROM_NORM, FROM_ROWS, FROM_ACT };

template <int U, int FROM> static __global__ void __launch_bounds__(PREFILL_THREADS)
		convert_held(const __grid_constant__ convert_args a)
{
	__shared__ float red[3 * PREFILL_WARPS];
	const uint32_t r = blockIdx.x;
	float4 v[U];
	float amax = 0.0f;

	pdl_next();
	pdl_wait();
	const bool live = r < min(*a.n_live, a.bucket); /* padding: zeros, made here so that no host copy is needed */
	const uint32_t from = live && a.dst.pick ? a.dst.pick[r] : r;
	const float *owed = FROM == FROM_ACT ? a.scale.row : a.owed.scale.row;
	const float row = FROM != FROM_ROWS && live && owed ? owed[from] : 1.0f;
	const act_args act = {a.act, a.n, a.gate ? a.gate + (size_t)from * a.ld : NULL, a.up + (size_t)from * a.ld,
	                      a.scale.channel, row};

	if (FROM == FROM_NORM && live)
		norm_row<U>(a, from, row, v, red);
#pragma unroll
	for (int j = 0; j < U; j++) {
		const uint32_t i = (threadIdx.x + j * PREFILL_THREADS) * 4;

		if (!live || (FROM != FROM_NORM && i >= a.n))
			v[j] = make_float4(0, 0, 0, 0);
		else if (FROM == FROM_ROWS)
			v[j] = read4(a.in + (size_t)from * a.n + i);
		else if (FROM == FROM_ACT)
			v[j] = activated4(act, i);
		amax = fmaxf(amax, max_abs(v[j]));
	}
	/* the row's new scale may replace `row`: all have read that before row_scale's barrier */
	const float scale = row_scale(a.dst, r, amax, red + 2 * PREFILL_WARPS);
#pragma unroll
	for (int j = 0; j < U; j++) {
		const uint32_t i = (threadIdx.x + j * PREFILL_THREADS) * 4;

		if (i < a.n)
			store4(a.dst, r, i, a.n, v[j], scale);
	}
}

/* Wider rows, read twice */
static __global__ void __launch_bounds__(PREFILL_THREADS) convert_wide(const __grid_constant__ convert_args a)
{
	__shared__ float red[PREFILL_WARPS];
	const uint32_t r = blockIdx.x;
	float amax = 0.0f, scale;

	pdl_next();
	pdl_wait();
	const bool live = r < min(*a.n_live, a.bucket);
	const float *row = a.in + (size_t)(live && a.dst.pick ? a.dst.pick[r] : r) * a.n;

	for (uint32_t i = threadIdx.x * 4; live && i < a.n; i += PREFILL_THREADS * 4)
		amax = fmaxf(amax, max_abs(*(const float4 *)(row + i)));
	scale = row_scale(a.dst, r, amax, red);
	for (uint32_t i = threadIdx.x * 4; i < a.n; i += PREFILL_THREADS * 4)
		store4(a.dst, r, i, a.n, live ? *(const float4 *)(row + i) : make_float4(0, 0, 0, 0), scale);
}

template <int FROM> static int launch_held(const apr_cuda_launch *l, const convert_args *a)
{
	const dim3 grid(a->dst.padded);

	if (a->n <= 1024)
		return launch(convert_held<1, FROM>, grid, PREFILL_THREADS, 0, l->stream, l->pdl, *a);
	if (a->n <= 4096)
		return launch(convert_held<4, FROM>, grid, PREFILL_THREADS, 0, l->stream, l->pdl, *a);
	if (a->n <= 8192)
		return launch(convert_held<8, FROM>, grid, PREFILL_THREADS, 0, l->stream, l->pdl, *a);
	if (a->n <= 16384)
		return launch(convert_held<16, FROM>, grid, PREFILL_THREADS, 0, l->stream, l->pdl, *a);
	return launch(convert_held<32, FROM>, grid, PREFILL_THREADS, 0, l->stream, l->pdl, *a);
}

static int convert_launch(const apr_cuda_launch *l, convert_args *a, const apr_cuda_gemm_in *dst)
{
	bool scaled = dst->real == APR_REAL_F16 || dst->real == APR_REAL_E4M3;

	if (a->n % 32 || ((a->norm.x || a->up) && a->n > HELD_MAX))
		return -ENOTSUP;
	if (dst->padded < l->bucket || (scaled && !dst->row_scale) ||
	    (dst->fused && (dst->real != APR_REAL_F16 || dst->padded % 8)))
		return -EINVAL;
	a->dst = *dst;
	a->bucket = l->bucket;
	a->n_live = l->rows.n;
	if (a->norm.x)
		return launch_held<FROM_NORM>(l, a);
	if (a->up)
		return launch_held<FROM_ACT>(l, a);
	if (a->n <= HELD_MAX)
		return launch_held<FROM_ROWS>(l, a);
	return launch(convert_wide, dim3(dst->padded), PREFILL_THREADS, 0, l->stream, l->pdl, *a);
}

extern "C" int apr_cuda_prefill_norm(const apr_cuda_launch *l, const float *x, const float *y, float *x_out,
                                     apr_norm post, apr_norm norm, uint32_t n, const apr_cuda_owed *owed,
                                     const apr_cuda_gemm_in *dst)
{
	convert_args a = {};

	if (owed)
		a.owed = *owed;
	a.norm = {x, y, x_out, {post.w, post.eps}, {norm.w, norm.eps}, n, NULL, 1.0f / (float)n};
	a.n = n;
	return convert_launch(l, &a, dst);
}
extern "C" int apr_cuda_prefill_convert(const apr_cuda_launch *l, const float *in, uint32_t n,
                                        const apr_cuda_gemm_in *dst)
{
	convert_args a = {};

	a.in = in;
	a.n = n;
	return convert_launch(l, &a, dst);
}

extern "C" int apr_cuda_prefill_act_in(const apr_cuda_launch *l, uint32_t act, const float *gate, const float *up,
                                       uint32_t ld, uint32_t n, apr_cuda_scales scale, const apr_cuda_gemm_in *dst)
{
	convert_args a = {};

	if (ld % 4 || n % 4)
		return -ENOTSUP;
	a.up = up, a.gate = gate, a.ld = ld, a.act = act, a.scale = scale;
	a.n = n;
	return convert_launch(l, &a, dst);
}

/* ---- outputs ------------------------------------------------------------------------------ */

static __global__ void __launch_bounds__(256)
		act_rows(uint32_t act, const float *gate, const float *up, uint32_t ld, float *out, uint32_t n,
                 apr_cuda_scales scale, const uint32_t *n_live)
{
	const uint32_t r = blockIdx.y, i = (blockIdx.x * 256 + threadIdx.x) * 4;

	pdl_next();
	pdl_wait();
	if (r >= *n_live || i >= n)
		return;
	const act_args a = {act, n, gate ? gate + (size_t)r * ld : NULL, up + (size_t)r * ld, scale.channel,
	                    scale.row ? scale.row[r] : 1.0f};

	*(float4 *)(out + (size_t)r * n + i) = activated4(a, i);
}
extern "C" int apr_cuda_prefill_act(const apr_cuda_launch *l, uint32_t act, const float *gate, const float *up,
                                    uint32_t ld, float *a, uint32_t n, apr_cuda_scales scale)
{
	if (ld % 4 || n % 4)
		return -ENOTSUP;
	return launch(act_rows, dim3((n + 1023) / 1024, l->bucket), 256, 0, l->stream, l->pdl, act, gate, up, ld, a, n,
	              scale, l->rows.n);
}

static __global__ void __launch_bounds__(256)
		finish_rows(float *y, const float *from, uint32_t n, apr_cuda_scales scale, const float *bias, const uint32_t *n_live)
{
	const uint32_t r = blockIdx.y, i = (blockIdx.x * 256 + threadIdx.x) * 4;

	pdl_next();
	pdl_wait();
	if (r >= *n_live || i >= n)
		return;
	*(float4 *)(y + (size_t)r * n + i) =
			owed4(from + (size_t)r * n, i, scale.row ? scale.row[r] : 1.0f, scale.channel, bias);
}
extern "C" int apr_cuda_prefill_finish(const apr_cuda_launch *l, float *y, const float *from, uint32_t n,
                                       apr_cuda_scales scale, const float *bias)
{
	if (n % 4)
		return -ENOTSUP;
	return launch(finish_rows, dim3((n + 1023) / 1024, l->bucket), 256, 0, l->stream, l->pdl, y, from, n, scale, bias,
	              l->rows.n);
}

static __global__ void __launch_bounds__(256)
		cap_rows(float *logits, uint32_t n, float scale, float softcap, const uint32_t *n_live)
{
	const uint32_t r = blockIdx.y;

	pdl_next();
	pdl_wait();
	if (r >= *n_live)
		return;
	for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256)
		logits[(size_t)r * n + i] = cap_logit(logits[(size_t)r * n + i], scale, softcap);
}
extern "C" int apr_cuda_cap_logits(const apr_cuda_launch *l, float *logits, uint32_t n, float scale, float softcap,
                                   const uint32_t *n_live)
{
	return launch(cap_rows, dim3((n + 4095) / 4096, l->bucket), 256, 0, l->stream, l->pdl, logits, n, scale, softcap,
	              n_live);
}
