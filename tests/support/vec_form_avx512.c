/* SPDX-License-Identifier: MIT */
/* vec.h's avx512 form for tests. */
#define APR_VEC_AVX512 1
#define VEC_FORM vec_form_avx512
#include "tests/support/vec_form_impl.h"
