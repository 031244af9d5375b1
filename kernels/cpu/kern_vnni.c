/* SPDX-License-Identifier: MIT */
/*
 * The table of kernels for AVX-512 with VNNI (integer dot-product instructions).
 * Owns: compiling kern512.h with this file's flags. Does not own a kernel of its own.
 */
#include "kernels/cpu/kern512.h"

const struct apr_kern apr_kern_vnni = {quantise, unpack, gemm, gemv, unpack_f32, fma_f32, fma4_f32};
