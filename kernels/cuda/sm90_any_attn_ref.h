/* SPDX-License-Identifier: MIT */
/*
 * The scalar reference of attention, in double: no segments, no rounding.
 *
 * Owns: one row and head over keys 0 … pos of a sequence. Host code, for tests.
 */
#ifndef APR_KERNELS_CUDA_ATTN_REF_H
#define APR_KERNELS_CUDA_ATTN_REF_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

/* k, v: position p's vectors at k + p * stride_k, v + p * stride_v */
static inline void apr_ref_attn(const float *q, const float *k, size_t stride_k, const float *v, size_t stride_v,
                                uint32_t pos, uint32_t window, uint32_t k_dim, uint32_t v_dim, double scale,
                                double softcap, double *o)
{
	uint32_t first = window && pos >= window ? pos + 1 - window : 0;
	double *s = (double *)malloc((pos + 1) * sizeof(*s)), max = -INFINITY, l = 0;

	for (uint32_t p = first; p <= pos; p++) {
		s[p] = 0;
		for (uint32_t d = 0; d < k_dim; d++)
			s[p] += (double)q[d] * k[p * stride_k + d];
		s[p] *= scale;
		if (softcap != 0)
			s[p] = softcap * tanh(s[p] / softcap);
		max = s[p] > max ? s[p] : max;
	}
	for (uint32_t d = 0; d < v_dim; d++)
		o[d] = 0;
	for (uint32_t p = first; p <= pos; p++) {
		double w = exp(s[p] - max);

		l += w;
		for (uint32_t d = 0; d < v_dim; d++)
			o[d] += w * v[p * stride_v + d];
	}
	for (uint32_t d = 0; d < v_dim; d++)
		o[d] /= l;
	free(s);
}

#endif
