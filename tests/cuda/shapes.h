/* SPDX-License-Identifier: MIT */
/*
 * The shapes that every CUDA op is tested over, in one place.
 *
 * Owns: lists alone. Real models' and awkward ones: K that is short, not a multiple
 * of 256, or long; heads and groups that no one model has together.
 */
#ifndef APR_TESTS_CUDA_SHAPES_H
#define APR_TESTS_CUDA_SHAPES_H

#include <stdint.h>

static const uint32_t shape_widths[] = {64, 576, 640, 896, 960, 1536, 2048, 3584, 4096, 8960, 14336};
static const uint32_t shape_outs[] = {1, 16, 33, 96, 200};                           /* rows of a weight */
/* decode rows: every count up to one more than two MMAs' columns, then about the larger buckets; and fewer, for the many */
static const uint32_t shape_rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 31, 32, 33, 63, 64};
static const uint32_t shape_rows_few[] = {1, 2, 3, 5, 8, 9, 16, 17, 33, 64};
static const uint32_t shape_prefill[] = {1, 2, 3, 5, 8, 15, 16, 17, 63, 64, 65, 127, 128, 129, 2047, 2048, 2049};
static const uint32_t shape_contexts[] = {1, 2, 63, 64, 65, 128, 255, 256, 257, 300, 511, 513, 1000, 1100};

struct shape_heads {
	uint32_t n_heads, n_kv, k_dim, v_dim, window;
	float softcap;
};
static const struct shape_heads shape_heads[] = {
		{9, 3, 64, 64, 0, 0},     /* SmolLM2 */
		{4, 1, 256, 256, 512, 0}, /* Gemma 3 270m, window layers */
		{8, 8, 128, 128, 0, 0},     {14, 2, 64, 64, 0, 0}, {28, 4, 128, 128, 0, 0}, {32, 8, 128, 128, 0, 0},
		{16, 8, 256, 256, 100, 50}, {12, 1, 96, 64, 0, 0}, {8, 1, 128, 64, 33, 0},
};
static const uint32_t shape_types[] = {0, 1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 30}; /* enum apr_type */

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

#endif
