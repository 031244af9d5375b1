/* SPDX-License-Identifier: MIT */
/*
 * The passes over a whole row of logits that sampling makes, by instruction set.
 *
 * Owns: the table that each kernels/common/sample_<isa>.c fills in from
 * sample_impl.h, all to the same bits. Private to kernels/common/.
 */
#ifndef APR_KERNELS_COMMON_SAMPLE_ISA_H
#define APR_KERNELS_COMMON_SAMPLE_ISA_H

#include <stdbool.h>
#include <stdint.h>

#define APR_SAMPLE_BLOCK 64u /* ids whose largest z is kept, so that later passes skip most of the row */

struct apr_draw_pass {
	const float *z, *block_max;
	uint32_t n;
	float max, temperature;
	uint64_t seed;
	uint32_t sample, position;
	uint64_t last;    /* rank of the last id that may win */
	float log2_min_p; /* -inf: off */
	float best;       /* in: of best_id; out: the largest draw */
	uint32_t best_id;
};

struct apr_sample_isa {
	/* Largest of each block and, returned, of all. *bad is set where a NaN or +inf is seen. */
	float (*scan)(const float *z, uint32_t n, float *block_max, bool *bad);
	/* Sum of apr_weight_fixed over all */
	uint64_t (*mass)(const float *z, const float *block_max, uint32_t n, float max, float temperature);
	/* Ranks of all z >= low (finite), ids ascending; returns how many */
	uint32_t (*gather)(const float *z, const float *block_max, uint32_t n, float low, uint64_t *out);
	/* apr_weight_fixed of each of n ranks */
	void (*weights)(const uint64_t *rank, uint32_t n, float max, float temperature, uint64_t *weight);
	/* The draw over the whole row */
	void (*draw)(struct apr_draw_pass *d);
	/* The draw over n ranks; last and log2_min_p are heeded too */
	void (*draw_list)(struct apr_draw_pass *d, const uint64_t *rank, uint32_t n);
};

extern const struct apr_sample_isa apr_sample_scalar, apr_sample_avx2, apr_sample_avx512, apr_sample_neon;

#endif
