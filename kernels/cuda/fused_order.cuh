/* SPDX-License-Identifier: MIT */
/*
 * The order of F16 inputs that the fused product reads.
 *
 * Owns: where an element lies: tiles of eight rows, 32 k at a time, sixteen bytes a
 * lane 4 g + t of the tensor core: k 4t … 4t + 3, then 16 + 4t … 16 + 4t + 3 of row g.
 */
#ifndef APR_KERNELS_CUDA_FUSED_ORDER_CUH
#define APR_KERNELS_CUDA_FUSED_ORDER_CUH

#include <stddef.h>
#include <stdint.h>

/* In F16 numbers, of element k of a row of n; four from a multiple of four on lie together. */
static __host__ __device__ __forceinline__ size_t fused_place(uint32_t row, uint32_t k, uint32_t n)
{
	return ((size_t)(row >> 3) * (n / 32) + k / 32) * 256 + ((row & 7) * 4 + (k >> 2 & 3)) * 8 + (k >> 4 & 1) * 4 +
	       (k & 3);
}

#endif
