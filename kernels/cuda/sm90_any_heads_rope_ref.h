/* SPDX-License-Identifier: MIT */
/*
 * The scalar reference of a head's norm and rotation, in double.
 *
 * Owns: one head. Host code, for tests.
 */
#ifndef APR_KERNELS_CUDA_HEADS_ROPE_REF_H
#define APR_KERNELS_CUDA_HEADS_ROPE_REF_H

#include <math.h>
#include <stdint.h>

#include "kernels/ops.h"

/* cs: the position's row of the table; norm_w may be NULL */
static inline void apr_ref_head(double *v, uint32_t dim, const float *norm_w, double eps, uint32_t kind, uint32_t n_rot,
                                const float *cs)
{
	double s = 0;

	if (norm_w) {
		for (uint32_t d = 0; d < dim; d++)
			s += v[d] * v[d];
		s = 1 / sqrt(s / dim + eps);
		for (uint32_t d = 0; d < dim; d++)
			v[d] *= s * norm_w[d];
	}
	for (uint32_t i = 0; kind != APR_OP_ROPE_NONE && i < n_rot / 2; i++) {
		uint32_t a = kind == APR_OP_ROPE_PAIRS ? 2 * i : i, b = kind == APR_OP_ROPE_PAIRS ? 2 * i + 1 : i + n_rot / 2;
		double va = v[a], vb = v[b], c = cs[2 * i], sn = cs[2 * i + 1];

		v[a] = va * c - vb * sn;
		v[b] = va * sn + vb * c;
	}
}

#endif
