/* SPDX-License-Identifier: MIT */
/* The row work of the ops for AVX2, FMA and F16C. Owns nothing but its table. */
#define APR_VEC_AVX2 1
#include "kernels/cpu/rows_impl.h"

#include "kernels/cpu/attn_impl.h"

const struct apr_ops_isa apr_ops_avx2 = {
	.add_norm = rows_add_norm,
	.heads = rows_heads,
	.store_kv = rows_store_kv,
	.act = rows_act,
	.scale = rows_scale,
	.attn = attn_tile,
	.attn_merge = attn_merge,
};
