/* SPDX-License-Identifier: MIT */
/*
 * The functions of kernels/common/vec.h in each form this build has, so that a test
 * compiled for no instruction set in particular can compare them.
 *
 * Owns: the list. Does not own the expected values.
 */
#ifndef APR_TESTS_SUPPORT_VEC_FORMS_H
#define APR_TESTS_SUPPORT_VEC_FORMS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/cpu/linear.h"

#define VEC_FORM_OUT 8u /* exp2, log2_normal, unit, gumbel(unit), sigmoid, tanh, through F16, through BF16 */

typedef void vec_form_fn(const float x[16], const uint32_t word[16], float out[VEC_FORM_OUT][16], uint32_t philox[4][16]);
vec_form_fn vec_form_scalar, vec_form_avx2, vec_form_avx512, vec_form_neon;

struct vec_form {
	const char *name;
	enum apr_cpu_isa isa;
	vec_form_fn *eval;
};

static const struct vec_form vec_forms[] = {
	{"scalar", APR_ISA_SCALAR, vec_form_scalar},
#ifdef __x86_64__
	{"avx2", APR_ISA_AVX2, vec_form_avx2},
	{"avx512", APR_ISA_AVX512, vec_form_avx512},
#endif
#ifdef __aarch64__
	{"neon", APR_ISA_NEON, vec_form_neon},
#endif
};
#define N_VEC_FORMS (sizeof(vec_forms) / sizeof(vec_forms[0]))

static inline bool vec_form_runs(const struct vec_form *f)
{
	enum apr_cpu_isa now = apr_cpu_isa_current();
	bool yes = !apr_cpu_isa_force(f->isa);

	return !apr_cpu_isa_force(now) && yes;
}

#endif
