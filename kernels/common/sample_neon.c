/* SPDX-License-Identifier: MIT */
/* Sampling's passes for AArch64. Owns nothing but its table. */
#define APR_VEC_NEON 1
#include "kernels/common/sample_impl.h"

const struct apr_sample_isa apr_sample_neon = {
	.scan = row_scan,
	.mass = row_mass,
	.gather = row_gather,
	.weights = list_weights,
	.draw = row_draw,
	.draw_list = list_draw,
};
