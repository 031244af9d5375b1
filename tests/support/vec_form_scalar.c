/* SPDX-License-Identifier: MIT */
/* vec.h's scalar form for tests. */
#define VEC_FORM vec_form_scalar
#include "tests/support/vec_form_impl.h"
