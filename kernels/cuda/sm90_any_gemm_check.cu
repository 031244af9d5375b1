/* SPDX-License-Identifier: MIT */
/*
 * What the table of algorithms is checked with: inputs of wide exponents, the
 * reference loop, hashes of output rows.
 *
 * Owns: those kernels. Run at load alone, so plain.
 */
#include "kernels/cuda/fused_order.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ops_cuda.h"
#include "kernels/cuda/ptx.cuh"

DEV uint32_t mix32(uint32_t x)
{
	x ^= x >> 16;
	x *= 0x7feb352du;
	x ^= x >> 15;
	x *= 0x846ca68bu;
	return x ^ x >> 16;
}

static __global__ void __launch_bounds__(256)
		fill_wide(apr_cuda_real real, bool fused, uint32_t rows, uint32_t k, void *dst)
{
	const size_t n = (size_t)rows * k;

	for (size_t i = (size_t)blockIdx.x * 256 + threadIdx.x; i < n; i += (size_t)gridDim.x * 256) {
		const uint32_t row = (uint32_t)(i / k), at = (uint32_t)(i % k), h = mix32(row * 0x9e3779b9u ^ mix32(at + 1));
		/* eleven bits of mantissa, exponents from -14 to 9 */
		const float v = (float)((int)(h & 0xfff) - 2048) * 0x1p-11f * exp2f((float)(int)(h >> 12 & 31) * 0.75f - 14.0f);
		const uint32_t b = h >> 20 & 0xff;

		if (real == APR_REAL_E4M3)
			((uint8_t *)dst)[i] = (uint8_t)((b & 0x7f) == 0x7f ? b ^ 8 : b); /* no NaN */
		else if (real == APR_REAL_F32)
			((float *)dst)[i] = v;
		else
			((__half *)dst)[fused ? fused_place(row, at, k) : i] = __float2half_rn(v);
	}
}
extern "C" int apr_cuda_fill_wide(cudaStream_t stream, apr_cuda_real real, bool fused, uint32_t rows, uint32_t k,
                                  void *dst)
{
	return launch(fill_wide, dim3(1024), 256, 0, stream, false, real, fused, rows, k, dst);
}

/* A warp: 16 weight rows, 32 rows of the input. */
static __global__ void __launch_bounds__(128)
		gemm_loop(const __half *w, const __half *in, float *out, uint32_t n, uint32_t k, uint32_t rows)
{
	const uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
	const uint32_t r0 = (blockIdx.x * 4 + (threadIdx.x >> 5)) * 16, c0 = blockIdx.y * 32;
	float acc[4][4] = {};

	if (r0 >= n)
		return;
	const __half *w0 = w + (size_t)min(r0 + g, n - 1) * k + 2 * t, *w8 = w + (size_t)min(r0 + g + 8, n - 1) * k + 2 * t;

	for (uint32_t kk = 0; kk < k; kk += 16) {
		uint32_t a[4] = {*(const uint32_t *)(w0 + kk), *(const uint32_t *)(w8 + kk), *(const uint32_t *)(w0 + kk + 8),
		                 *(const uint32_t *)(w8 + kk + 8)};

#pragma unroll
		for (int j = 0; j < 4; j++) {
			const __half *x = in + (size_t)min(c0 + j * 8 + g, rows - 1) * k + kk + 2 * t;

			mma_f16(acc[j], a, *(const uint32_t *)x, *(const uint32_t *)(x + 8), acc[j]);
		}
	}
#pragma unroll
	for (int j = 0; j < 4; j++)
#pragma unroll
		for (int e = 0; e < 4; e++) {
			uint32_t c = c0 + j * 8 + 2 * t + (e & 1), r = r0 + g + (e >> 1) * 8;

			if (c < rows && r < n)
				out[(size_t)c * n + r] = acc[j][e];
		}
}
extern "C" int apr_cuda_gemm_loop(cudaStream_t stream, const void *w, const void *in, float *out, uint32_t n, uint32_t k,
                                  uint32_t rows)
{
	if (k % 16 || !rows || !n)
		return -ENOTSUP;
	return launch(gemm_loop, dim3((n + 63) / 64, (rows + 31) / 32), 128, 0, stream, false, (const __half *)w,
	              (const __half *)in, out, n, k, rows);
}

DEV uint64_t mix64(uint64_t z)
{
	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}
static __global__ void __launch_bounds__(256) row_hash(const float *out, uint32_t n, uint64_t *hash)
{
	const uint32_t *row = (const uint32_t *)out + (size_t)blockIdx.x * n;
	__shared__ unsigned long long sum;
	uint64_t h = 0;

	if (threadIdx.x == 0)
		sum = 0;
	__syncthreads();
	for (uint32_t i = threadIdx.x; i < n; i += 256)
		h += mix64((uint64_t)(i + 1) << 32 | row[i]);
	atomicAdd(&sum, (unsigned long long)h); /* integers: any order */
	__syncthreads();
	if (threadIdx.x == 0)
		hash[blockIdx.x] = sum;
}
extern "C" int apr_cuda_row_hash(cudaStream_t stream, const float *out, uint32_t n, uint32_t rows, uint64_t *hash)
{
	return rows ? launch(row_hash, dim3(rows), 256, 0, stream, false, out, n, hash) : 0;
}
