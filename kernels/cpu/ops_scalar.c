/* SPDX-License-Identifier: MIT */
/* The row work of the ops in plain C: the reference of the other forms. Owns nothing but its table. */
#include "kernels/cpu/rows_impl.h"

#include "kernels/cpu/attn_impl.h"

const struct apr_ops_isa apr_ops_scalar = {
	.add_norm = rows_add_norm,
	.heads = rows_heads,
	.store_kv = rows_store_kv,
	.act = rows_act,
	.scale = rows_scale,
	.attn = attn_tile,
	.attn_merge = attn_merge,
};
