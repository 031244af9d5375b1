/* SPDX-License-Identifier: MIT */
/* The row work of the ops for AArch64. Owns nothing but its table. */
#define APR_VEC_NEON 1
#include "kernels/cpu/rows_impl.h"

#include "kernels/cpu/attn_impl.h"

const struct apr_ops_isa apr_ops_neon = {
	.add_norm = rows_add_norm,
	.heads = rows_heads,
	.store_kv = rows_store_kv,
	.act = rows_act,
	.scale = rows_scale,
	.attn = attn_tile,
	.attn_merge = attn_merge,
};
