/* SPDX-License-Identifier: MIT */
/* vec.h's neon form for tests. */
#define APR_VEC_NEON 1
#define VEC_FORM vec_form_neon
#include "tests/support/vec_form_impl.h"
