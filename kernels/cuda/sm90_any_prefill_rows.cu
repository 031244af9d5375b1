/* SPDX-License-Identifier: MIT */
/*
 * What stands around the GEMMs of a prompt: residual and norm, conversion of GEMM
 * inputs to F16, BF16, E4M3 or F32, activations, scales and biases of outputs.
 *
 * Owns: kernels of one block a row. The norm is rows.cuh's, the same as in decode.
 * The scalar references are apr_ref_add_norm and apr_ref_act in
 * sm90_any_proj_decode_ref.h.
 */
#include <cuda_fp8.h>

#include "kernels/cuda/fused_order.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/proj.cuh"

struct convert_args { /* a row comes from one of three */
	add_norm_args norm; /* x not NULL */
	float *y;           /* norm's, where something is owed to it */
	apr_cuda_owed owed;
	const float *up, *gate; /* up not NULL: act(gate) · up, or act(up) */
	apr_cuda_scales scale;
	uint32_t act, ld;
	const float *in;
	apr_cuda_gemm_in dst;
	uint32_t n, bucket;
	const uint32_t *n_live;
};

DEV float block_max(float v, float *red)
{
	v = warp_max(v);
	if ((threadIdx.x & 31) == 0)
		red[threadIdx.x >> 5] = v;
	__syncthreads();
	v = red[0];
	for (uint32_t i = 1; i < ROW_WARPS; i++)
		v = fmaxf(v, red[i]);
	return v;
}

/* Four values from k on of a row of n */
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

/* A row of floats (shared or global memory) to dst */
DEV void convert_row(const float *row, const convert_args &a, uint32_t r, float *red)
{
	float amax = 0.0f, scale = 1.0f, keep = 1.0f;

	if (a.dst.real == APR_REAL_F16 || a.dst.real == APR_REAL_E4M3) {
		for (uint32_t i = threadIdx.x * 4; i < a.n; i += ROW_THREADS * 4) {
			float4 v = *(const float4 *)(row + i);

			amax = fmaxf(fmaxf(amax, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
		}
		amax = block_max(amax, red);
		if (a.dst.real == APR_REAL_F16) {
			scale = act_scale(amax);
			keep = act_unscale(scale);
		} else { /* a row with an infinity or a NaN must not look sound: E4M3 has NaN */
			scale = keep = amax > 0.0f && amax < INFINITY ? amax / 448.0f : 1.0f;
		}
		if (threadIdx.x == 0)
			a.dst.row_scale[r] = keep;
	}
	for (uint32_t i = threadIdx.x * 4; i < a.n; i += ROW_THREADS * 4)
		store4(a.dst, r, i, a.n, *(const float4 *)(row + i), scale);
}

DEV float owed_value(float v, float row, const float *channel, const float *bias, uint32_t i)
{
	return v * row * (channel ? channel[i] : 1.0f) + (bias ? bias[i] : 0.0f);
}
/* Settles what is owed to a row of y, each thread to the elements that it reads itself in row_add_norm. */
DEV void settle_row(const convert_args &a, uint32_t r, size_t at)
{
	const float row = a.owed.scale.row ? a.owed.scale.row[r] : 1.0f;
	float v[8];

	for (uint32_t i = threadIdx.x * 8; i < a.n; i += ROW_THREADS * 8) {
		load8(v, a.y + at + i);
#pragma unroll
		for (uint32_t e = 0; e < 8; e++)
			v[e] = owed_value(v[e], row, a.owed.scale.channel, a.owed.bias, i + e);
		store8(a.y + at + i, v);
	}
}

DEV float4 scaled4(const float *p, const float *channel, uint32_t i, float row)
{
	float4 v = *(const float4 *)(p + i), c = channel ? *(const float4 *)(channel + i) : make_float4(1, 1, 1, 1);

	return make_float4(v.x * row * c.x, v.y * row * c.y, v.z * row * c.z, v.w * row * c.w);
}
/* act(gate) · up, or act(up), of a row to shared memory */
DEV void act_row(const convert_args &a, uint32_t r, float *h)
{
	const float row = a.scale.row ? a.scale.row[r] : 1.0f, *cg = a.scale.channel, *cu = cg && a.gate ? cg + a.n : cg;
	const size_t at = (size_t)r * a.ld;

	for (uint32_t i = threadIdx.x * 4; i < a.n; i += ROW_THREADS * 4) {
		float4 u = scaled4(a.up + at, cu, i, row), g = a.gate ? scaled4(a.gate + at, cg, i, row) : u;
		float4 s = make_float4(activate(a.act, g.x), activate(a.act, g.y), activate(a.act, g.z), activate(a.act, g.w));

		if (a.gate)
			s = make_float4(s.x * u.x, s.y * u.y, s.z * u.z, s.w * u.w);
		*(float4 *)(h + i) = s;
	}
	__syncthreads();
}

/* A row on its way: read once into shared memory (or, a row wider than that, from where it is), then its largest value,
 * then the conversion. FROM: which of the three; U: pieces of 8 a thread of row_add_norm. The blocks a multiprocessor
 * are what keeps enough loads in flight. */
enum row_from { FROM_ROWS, FROM_WIDE_ROWS, FROM_NORM, FROM_ACT };

template <int FROM, int U> static __global__ void __launch_bounds__(ROW_THREADS, FROM == FROM_NORM ? 4 / (U + 1) + 1 : 3)
		convert_rows(const __grid_constant__ convert_args a)
{
	extern __shared__ __align__(128) uint8_t sm[];
	float *red = (float *)sm, *h = red + 3 * ROW_WARPS;
	const uint32_t r = blockIdx.x;

	pdl_next();
	pdl_wait();
	if (r >= min(*a.n_live, a.bucket)) { /* padding: zeros, made here so that no host copy is needed */
		for (uint32_t i = threadIdx.x * 4; i < a.n; i += ROW_THREADS * 4)
			store4(a.dst, r, i, a.n, make_float4(0, 0, 0, 0), 1.0f);
		if (threadIdx.x == 0 && a.dst.row_scale)
			a.dst.row_scale[r] = 1.0f;
		return;
	}
	const size_t at = (size_t)(a.dst.pick ? a.dst.pick[r] : r) * a.n;

	if (FROM == FROM_NORM) {
		add_norm_args n = a.norm;

		if (a.y)
			settle_row(a, r, at);
		n.x += at;
		n.y = n.y ? n.y + at : NULL;
		n.x_out = n.x_out ? n.x_out + at : NULL;
		row_add_norm<U, false>(n, h, red);
	} else if (FROM == FROM_ACT) {
		act_row(a, r, h);
	} else if (FROM == FROM_ROWS) {
		for (uint32_t i = threadIdx.x * 4; i < a.n; i += ROW_THREADS * 4)
			*(float4 *)(h + i) = *(const float4 *)(a.in + at + i);
		__syncthreads();
	}
	convert_row(FROM == FROM_WIDE_ROWS ? a.in + at : h, a, r, red + 2 * ROW_WARPS);
}

#define WIDE_ROW 57344u /* bytes: beyond, too few blocks fit */

static int convert_launch(const apr_cuda_launch *l, convert_args *a, const apr_cuda_gemm_in *dst)
{
	bool scaled = dst->real == APR_REAL_F16 || dst->real == APR_REAL_E4M3, wide = a->in && a->n * 4 > WIDE_ROW;
	size_t smem = 3 * ROW_WARPS * 4 + (wide ? 0 : (size_t)a->n * 4);

	if (smem > APR_SMEM_MAX || a->n % 32 || (a->norm.x && a->n > ROW_MAX))
		return -ENOTSUP;
	if (dst->padded < l->bucket || (scaled && !dst->row_scale) ||
	    (dst->fused && (dst->real != APR_REAL_F16 || dst->padded % 8)))
		return -EINVAL;
	a->dst = *dst;
	a->bucket = l->bucket;
	a->n_live = l->rows.n;
#define ROWS(FROM, U) launch(convert_rows<FROM, U>, dim3(dst->padded), ROW_THREADS, smem, l->stream, l->pdl, *a)
	if (a->norm.x)
		return a->n <= 4096 ? ROWS(FROM_NORM, 1) : a->n <= 8192 ? ROWS(FROM_NORM, 2) : ROWS(FROM_NORM, 4);
	return a->up ? ROWS(FROM_ACT, 1) : wide ? ROWS(FROM_WIDE_ROWS, 1) : ROWS(FROM_ROWS, 1);
#undef ROWS
}

extern "C" int apr_cuda_prefill_norm(const apr_cuda_launch *l, const float *x, float *y, float *x_out, apr_norm post,
                                     apr_norm norm, uint32_t n, const apr_cuda_owed *owed, const apr_cuda_gemm_in *dst)
{
	convert_args a = {};

	if (owed && y && !dst->pick) {
		a.y = y;
		a.owed = *owed;
	} else if (owed && y) {
		return -EINVAL;
	}
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
	const uint32_t r = blockIdx.y;

	pdl_next();
	pdl_wait();
	if (r >= *n_live)
		return;
	const float s = scale.row ? scale.row[r] : 1.0f;
	const float *cg = scale.channel, *cu = cg && gate ? cg + n : cg;

	for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) {
		float u = up[(size_t)r * ld + i] * s * (cu ? cu[i] : 1.0f);

		out[(size_t)r * n + i] =
				gate ? activate(act, gate[(size_t)r * ld + i] * s * (cg ? cg[i] : 1.0f)) * u : activate(act, u);
	}
}
extern "C" int apr_cuda_prefill_act(const apr_cuda_launch *l, uint32_t act, const float *gate, const float *up,
                                    uint32_t ld, float *a, uint32_t n, apr_cuda_scales scale)
{
	return launch(act_rows, dim3((n + 1023) / 1024, l->bucket), 256, 0, l->stream, l->pdl, act, gate, up, ld, a, n,
	              scale, l->rows.n);
}

static __global__ void __launch_bounds__(256)
		finish_rows(float *y, const float *from, uint32_t n, apr_cuda_scales scale, const float *bias, const uint32_t *n_live)
{
	const uint32_t r = blockIdx.y;

	pdl_next();
	pdl_wait();
	if (r >= *n_live)
		return;
	const float s = scale.row ? scale.row[r] : 1.0f;

	for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256)
		y[(size_t)r * n + i] =
				from[(size_t)r * n + i] * s * (scale.channel ? scale.channel[i] : 1.0f) + (bias ? bias[i] : 0.0f);
}
extern "C" int apr_cuda_prefill_finish(const apr_cuda_launch *l, float *y, const float *from, uint32_t n,
                                       apr_cuda_scales scale, const float *bias)
{
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
