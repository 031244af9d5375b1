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

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/proj.cuh"

struct convert_args {
	add_norm_args norm; /* x NULL: rows of `in` */
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

DEV void store4(const apr_cuda_gemm_in &dst, size_t at, float4 v, float scale)
{
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
		store4(a.dst, (size_t)r * a.n + i, *(const float4 *)(row + i), scale);
}

static __global__ void __launch_bounds__(ROW_THREADS, 1) convert_rows(const __grid_constant__ convert_args a)
{
	extern __shared__ __align__(128) uint8_t sm[];
	float *red = (float *)sm, *h = red + 3 * ROW_WARPS;
	const uint32_t r = blockIdx.x;

	pdl_next();
	pdl_wait();
	if (r >= min(*a.n_live, a.bucket)) { /* padding: zeros, made here so that no host copy is needed */
		for (uint32_t i = threadIdx.x * 4; i < a.n; i += ROW_THREADS * 4)
			store4(a.dst, (size_t)r * a.n + i, make_float4(0, 0, 0, 0), 1.0f);
		if (threadIdx.x == 0 && a.dst.row_scale)
			a.dst.row_scale[r] = 1.0f;
		return;
	}
	if (a.norm.x) {
		add_norm_args n = a.norm;
		size_t at = (size_t)r * n.n;

		n.x += at;
		n.y = n.y ? n.y + at : NULL;
		n.x_out = n.x_out ? n.x_out + at : NULL;
		row_add_norm_any<false>(n, h, red);
		convert_row(h, a, r, red + 2 * ROW_WARPS);
	} else {
		convert_row(a.in + (size_t)r * a.n, a, r, red + 2 * ROW_WARPS);
	}
}

static int convert_launch(const apr_cuda_launch *l, convert_args *a, const apr_cuda_gemm_in *dst)
{
	bool scaled = dst->real == APR_REAL_F16 || dst->real == APR_REAL_E4M3;

	if (a->n % 32 || (a->norm.x && a->n > ROW_MAX))
		return -ENOTSUP;
	if (dst->padded < l->bucket || (scaled && !dst->row_scale))
		return -EINVAL;
	a->dst = *dst;
	a->bucket = l->bucket;
	a->n_live = l->rows.n;
	return launch(convert_rows, dim3(dst->padded), ROW_THREADS, 3 * ROW_WARPS * 4 + (a->norm.x ? (size_t)a->n * 4 : 0),
	              l->stream, l->pdl, *a);
}

extern "C" int apr_cuda_prefill_norm(const apr_cuda_launch *l, const float *x, const float *y, float *x_out,
                                     apr_norm post, apr_norm norm, uint32_t n, const apr_cuda_gemm_in *dst)
{
	convert_args a = {};

	a.norm = {x, y, x_out, {post.w, post.eps}, {norm.w, norm.eps}, n, NULL};
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

/* ---- outputs ------------------------------------------------------------------------------ */

static __global__ void __launch_bounds__(256)
		act_rows(uint32_t act, const float *gate, const float *up, uint32_t ld, float *out, uint32_t n,
                 const float *scale, const uint32_t *n_live)
{
	const uint32_t r = blockIdx.y;

	pdl_next();
	pdl_wait();
	if (r >= *n_live)
		return;
	const float s = scale ? scale[r] : 1.0f;

	for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) {
		float u = up[(size_t)r * ld + i] * s;

		out[(size_t)r * n + i] = gate ? activate(act, gate[(size_t)r * ld + i] * s) * u : activate(act, u);
	}
}
extern "C" int apr_cuda_prefill_act(const apr_cuda_launch *l, uint32_t act, const float *gate, const float *up,
                                    uint32_t ld, float *a, uint32_t n, const float *scale)
{
	return launch(act_rows, dim3((n + 1023) / 1024, l->bucket), 256, 0, l->stream, l->pdl, act, gate, up, ld, a, n,
	              scale, l->rows.n);
}

static __global__ void __launch_bounds__(256)
		finish_rows(float *y, uint32_t n, const float *scale, const float *bias, const uint32_t *n_live)
{
	const uint32_t r = blockIdx.y;

	pdl_next();
	pdl_wait();
	if (r >= *n_live)
		return;
	for (uint32_t i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256)
		y[(size_t)r * n + i] = y[(size_t)r * n + i] * (scale ? scale[r] : 1.0f) + (bias ? bias[i] : 0.0f);
}
extern "C" int apr_cuda_prefill_finish(const apr_cuda_launch *l, float *y, uint32_t n, const float *scale,
                                       const float *bias)
{
	return launch(finish_rows, dim3((n + 1023) / 1024, l->bucket), 256, 0, l->stream, l->pdl, y, n, scale, bias,
	              l->rows.n);
}
