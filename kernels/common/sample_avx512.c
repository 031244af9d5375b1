/* SPDX-License-Identifier: MIT */
/* Sampling's passes for AVX-512. Owns nothing but its table. */
#define APR_VEC_AVX512 1
#include "kernels/common/sample_impl.h"

const struct apr_sample_isa apr_sample_avx512 = {
	.scan = row_scan,
	.mass = row_mass,
	.gather = row_gather,
	.weights = list_weights,
	.draw = row_draw,
	.draw_list = list_draw,
};
