/* SPDX-License-Identifier: MIT */
/* The row work of the ops for AVX-512. Owns nothing but its table. */
#define APR_VEC_AVX512 1
#include "kernels/cpu/rows_impl.h"

#include "kernels/cpu/attn_impl.h"

const struct apr_ops_isa apr_ops_avx512 = {
	.add_norm = rows_add_norm,
	.heads = rows_heads,
	.store_kv = rows_store_kv,
	.act = rows_act,
	.scale = rows_scale,
	.attn = attn_tile,
	.attn_merge = attn_merge,
};
