/* SPDX-License-Identifier: MIT */
/* vec.h's avx2 form for tests. */
#define APR_VEC_AVX2 1
#define VEC_FORM vec_form_avx2
#include "tests/support/vec_form_impl.h"
