/* SPDX-License-Identifier: MIT */
/*
 * How the scratch of a launch is divided.
 *
 * Owns: offsets, by the limits that apr_cuda_scratch_bytes was asked with; each op
 * checks that its needs fit. The first part (counters) is zero between launches.
 */
#ifndef APR_KERNELS_CUDA_SCRATCH_CUH
#define APR_KERNELS_CUDA_SCRATCH_CUH

#include "kernels/cuda/rows.cuh"

#define SCRATCH_COUNTERS (256u * 1024u) /* bytes: a counter a (row, KV head, head tile) */

/* Activations of up to 64 columns: tiles of eight, then scales. */
static inline size_t acts_tile_bytes(uint32_t k, bool bf16)
{
	return (size_t)((k + 255) / 256) * (bf16 ? X_EIGHT_BF16 : X_EIGHT_F16);
}
static inline size_t acts_bytes(uint32_t k)
{
	return 8 * acts_tile_bytes(k, true) + APR_CUDA_DECODE_ROWS * 16 * sizeof(float);
}
/* Partial attention: (row, segment, head) of v_dim sums, then of {m, l}. */
static inline size_t part_bytes(uint32_t rows, uint32_t n_heads, uint32_t v_dim, uint32_t n_ctx)
{
	size_t segs = (n_ctx + APR_KV_SEGMENT - 1) / APR_KV_SEGMENT;

	return (size_t)rows * segs * n_heads * (v_dim + 2) * sizeof(float);
}

#endif
