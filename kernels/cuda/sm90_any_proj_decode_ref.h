/* SPDX-License-Identifier: MIT */
/*
 * The scalar reference of projections and of what surrounds them, in double.
 *
 * Owns: one output of x · Wᵀ from the file's blocks, a row's add and norm, an
 * activation. Host code, for tests; nothing is rounded on the way.
 */
#ifndef APR_KERNELS_CUDA_PROJ_DECODE_REF_H
#define APR_KERNELS_CUDA_PROJ_DECODE_REF_H

#include <math.h>

#include "kernels/cuda/blocks.cuh"
#include "kernels/ops.h"

/* A row of a weight: its values, and the magnitudes that an implementation adds up (codes and minimum apart) */
static inline void apr_ref_row(uint32_t type, const uint8_t *row, uint32_t n, double *w, double *mag)
{
	uint32_t per = block_elems(type);

	for (uint32_t k = 0; k < n; k++) {
		const uint8_t *b = row + (size_t)(k / per) * block_size(type);

		w[k] = block_value(type, row, k);
		mag[k] = fabs(w[k]);
		if (per > 1) {
			block_scale s = block_scale_of(type, b, k % per);

			mag[k] = fabs((double)s.scale * ((int)block_code(type, b, k % per) - s.offset)) + fabs(s.min);
		}
	}
}
/* One output; *bound: Σ of the magnitudes of its terms, against which errors are held */
static inline double apr_ref_proj(const double *w, const double *mag, const float *x, uint32_t n, double *bound)
{
	double sum = 0, m = 0;

	for (uint32_t k = 0; k < n; k++) {
		sum += w[k] * x[k];
		m += mag[k] * fabs(x[k]);
	}
	*bound = m;
	return sum;
}

/* x_out = x + post(y); h = norm(x_out). post_w, y may be NULL. */
static inline void apr_ref_add_norm(const float *x, const float *y, const float *post_w, double post_eps,
                                    const float *w, double eps, uint32_t n, double *x_out, double *h)
{
	double s = 0, r = 1;

	if (y && post_w) {
		for (uint32_t i = 0; i < n; i++)
			s += (double)y[i] * y[i];
		r = 1 / sqrt(s / n + post_eps);
	}
	s = 0;
	for (uint32_t i = 0; i < n; i++) {
		x_out[i] = x[i] + (y ? y[i] * r * (post_w ? post_w[i] : 1.0) : 0.0);
		s += x_out[i] * x_out[i];
	}
	r = 1 / sqrt(s / n + eps);
	for (uint32_t i = 0; i < n; i++)
		h[i] = x_out[i] * r * w[i];
}

static inline double apr_ref_act(uint32_t act, double x)
{
	switch (act) {
	case APR_OP_SILU: return x / (1 + exp(-x));
	case APR_OP_GELU_TANH: return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
	case APR_OP_GELU: return 0.5 * x * erfc(-x / sqrt(2.0));
	default: return x > 0 ? x * x : 0;
	}
}

#endif
