/* SPDX-License-Identifier: MIT */
/*
 * Weights: from the file's blocks to tiles, from tiles to row-major numbers, and the
 * rows of the embedding.
 *
 * Owns: the kernels around tiles.cuh that are not products. pack_word and
 * unpack_value there are host functions too: the scalar reference. One thread a
 * word: made once at load, so plain.
 */
#include <cuda_fp8.h>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/rows.cuh"

extern "C" uint32_t apr_cuda_tile_of(uint32_t type)
{
	switch (type) {
	case APR_TYPE_Q4_K: return APR_TILE_Q4_K;
	case APR_TYPE_Q6_K: return APR_TILE_Q6_K;
	case APR_TYPE_Q8_0: return APR_TILE_Q8_0;
	case APR_TYPE_Q4_1: return APR_TILE_Q4_1;
	case APR_TYPE_Q5_0: return APR_TILE_Q5_0;
	case APR_TYPE_BF16: return APR_TILE_BF16;
	default: return APR_TILE_F16;
	}
}

extern "C" size_t apr_cuda_tile_bytes(uint32_t tile, uint32_t n_in, uint32_t n_out)
{
	if (tile >= APR_TILE_N || !n_in || !n_out || n_in % 32 || n_in > 1u << 20 || n_out > 1u << 28)
		return 0; /* raw blocks have no tiles */
	if (tile_k(tile) == 256 && n_in % 256)
		return 0;
	return (size_t)row_pairs(n_out) * tiles_along_k(tile, n_in) * 2 * tile_size(tile);
}

/* ---- file to tiles ------------------------------------------------------------------------ */

static __global__ void __launch_bounds__(128) repack_tiles(apr_mat m, const uint8_t *a, const uint8_t *b, uint8_t *dst)
{
	const uint32_t kt = tile_k(m.tile), nk = tiles_along_k(m.tile, m.n_in), words = tile_size(m.tile) / 4;
	const size_t row_bytes = (size_t)m.n_in / block_elems(m.type) * block_size(m.type),
				 n = (size_t)row_pairs(m.n_out) * 2 * nk;
	__shared__ tile_source s;

	pdl_next();
	pdl_wait();
	for (size_t i = blockIdx.x; i < n; i += gridDim.x) { /* i: tile in memory order: pair, k, half */
		uint32_t pair = (uint32_t)(i / (2 * nk)), k = (uint32_t)(i / 2 % nk) * kt, row0 = pair * 32 + (i & 1) * 16;

		__syncthreads();
		if (threadIdx.x < 16) {
			row_home home = row_home_of(m.order, m.dim, m.half, row0 + threadIdx.x);

			s.row[threadIdx.x] = row0 + threadIdx.x < m.n_out
			                             ? (home.which ? b : a) + home.row * row_bytes +
			                                       (size_t)k / block_elems(m.type) * block_size(m.type)
			                             : NULL;
			s.type = m.type;
			s.first = k % block_elems(m.type);
			s.n = m.n_in - k;
		}
		__syncthreads();
		for (uint32_t w = threadIdx.x; w < words; w += blockDim.x)
			((uint32_t *)dst)[i * words + w] = pack_word(m.tile, s, w);
	}
}

extern "C" int apr_cuda_repack(cudaStream_t stream, const apr_mat *m, const void *a, const void *b, uint8_t *dst)
{
	size_t tiles;

	if (!apr_cuda_tile_bytes(m->tile, m->n_in, m->n_out) || !block_elems(m->type) || m->n_in % block_elems(m->type))
		return -ENOTSUP;
	if (m->tile != apr_cuda_tile_of(m->type) && m->tile != APR_TILE_F16)
		return -ENOTSUP;
	if ((m->order == APR_ORDER_GATE_UP) != (b != NULL) || (b && m->n_out % 16) ||
	    (m->order == APR_ORDER_ROPE_HALVES && (!m->dim || 2 * m->half > m->dim || m->n_out % m->dim)))
		return -EINVAL;
	tiles = (size_t)row_pairs(m->n_out) * 2 * tiles_along_k(m->tile, m->n_in);
	return launch(repack_tiles, dim3(tiles < 65536 ? (unsigned)tiles : 65536), 128, 0, stream, false, *m,
	              (const uint8_t *)a, (const uint8_t *)b, dst);
}

/* ---- tiles to rows ------------------------------------------------------------------------- */

DEV float weight_at(const apr_mat &m, uint32_t row, uint32_t k) /* row in the file's order, gate's before up's */
{
	uint32_t each = m.order == APR_ORDER_GATE_UP ? m.n_out / 2 : m.n_out;

	if (m.tile == APR_TILE_RAW)
		return block_value(m.type, m.tiles + (size_t)row * (m.n_in / block_elems(m.type)) * block_size(m.type), k);
	return tile_value(m.tile, m.tiles, m.n_in, row_place(m.order, m.dim, m.half, row / each, row % each), k);
}

static __global__ void __launch_bounds__(256)
		unpack_rows(apr_mat m, uint32_t first, apr_cuda_real real, void *dst, float *scale)
{
	const uint32_t row = blockIdx.x, warp = threadIdx.x >> 5;
	const size_t at = (size_t)row * m.n_in;
	__shared__ float red[8];
	float amax = 0.0f, inv = 1.0f;

	pdl_next();
	pdl_wait();
	if (real == APR_REAL_E4M3) {
		for (uint32_t k = threadIdx.x; k < m.n_in; k += 256)
			amax = fmaxf(amax, fabsf(weight_at(m, first + row, k)));
		amax = warp_max(amax);
		if ((threadIdx.x & 31) == 0)
			red[warp] = amax;
		__syncthreads();
		for (int i = 0; i < 8; i++)
			amax = fmaxf(amax, red[i]);
		inv = amax > 0.0f ? amax / 448.0f : 1.0f;
		if (threadIdx.x == 0)
			scale[row] = inv;
	}
	for (uint32_t k = threadIdx.x; k < m.n_in; k += 256) {
		float v = weight_at(m, first + row, k);

		switch (real) {
		case APR_REAL_F32: ((float *)dst)[at + k] = v; break;
		case APR_REAL_F16: ((__half *)dst)[at + k] = __float2half_rn(v); break;
		case APR_REAL_BF16: ((__nv_bfloat16 *)dst)[at + k] = __float2bfloat16_rn(v); break;
		case APR_REAL_E4M3: ((__nv_fp8_e4m3 *)dst)[at + k] = __nv_fp8_e4m3(v / inv); break;
		}
	}
}

extern "C" int apr_cuda_unpack(cudaStream_t stream, const apr_mat *m, uint32_t first, uint32_t n, apr_cuda_real real,
                               void *dst, float *scale)
{
	if (first > m->n_out || n > m->n_out - first || (real == APR_REAL_E4M3) != (scale != NULL))
		return -EINVAL;
	return n ? launch(unpack_rows, dim3(n), 256, 0, stream, false, *m, first, real, dst, scale) : 0;
}

static __global__ void __launch_bounds__(256)
		embed_rows(apr_mat m, float *x, float scale, apr_cuda_rows rows, uint32_t bucket)
{
	const uint32_t row = blockIdx.x;

	/* The first of a pass's kernels: those behind it read the rows without waiting for anybody, hence start after what
	 * wrote them has ended. */
	pdl_wait();
	pdl_next();
	if (row >= min(*rows.n, bucket))
		return;
	const uint32_t id = (uint32_t)rows.tok[row];

	/* An id outside the matrix is a fault of the caller's; it must not read past the weights. */
	for (uint32_t k = threadIdx.x + blockIdx.y * 256; k < m.n_in; k += 256 * gridDim.y)
		x[(size_t)row * m.n_in + k] = id < m.n_out ? weight_at(m, id, k) * scale : NAN;
}

extern "C" int apr_cuda_embed(const apr_cuda_launch *l, const apr_op_embed *op)
{
	if (op->w->n_in != op->n_embd)
		return -EINVAL;
	return launch(embed_rows, dim3(l->bucket, (op->n_embd + 1023) / 1024), 256, 0, l->stream, l->pdl, *op->w, op->x,
	              op->scale, l->rows, l->bucket);
}
