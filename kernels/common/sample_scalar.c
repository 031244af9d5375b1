/* SPDX-License-Identifier: MIT */
/* Sampling's passes in plain C: the reference of the other forms. Owns nothing but its table. */
#include "kernels/common/sample_impl.h"

const struct apr_sample_isa apr_sample_scalar = {
	.scan = row_scan,
	.mass = row_mass,
	.gather = row_gather,
	.weights = list_weights,
	.draw = row_draw,
	.draw_list = list_draw,
};
