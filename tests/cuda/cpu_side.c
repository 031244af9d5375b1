/* SPDX-License-Identifier: MIT */
/* The CPU's half of check_layer.cu: see cpu_side.h. */
#include "tests/cuda/cpu_side.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/ops_cpu.h"

static int pack(struct apr_mat *m, uint32_t type, const void *blocks, uint32_t n_in, uint32_t n_out)
{
	size_t bytes = apr_panel_bytes(type, n_in, n_out);
	void *p = bytes ? aligned_alloc(64, (bytes + 63) & ~(size_t)63) : NULL;

	if (!p)
		return -ENOMEM;
	m->lin = (struct apr_linear){.type = type, .n_in = n_in, .n_out = n_out, .panels = p};
	return apr_panel_pack(NULL, type, blocks, n_in, n_out, p);
}

struct memory { /* one block for all buffers */
	float *x1, *x2, *q, *o;
	uint8_t *pool;
	void *scratch;
};

static void run(struct cpu_side *s, const struct apr_mat *m, struct memory *b, struct apr_cpu_scratch *sc)
{
	uint32_t table[APR_MAX_SLOTS * 8], slot[64] = {0}, out[64], i, pages = (s->n_ctx + APR_KV_PAGE - 1) / APR_KV_PAGE;
	int32_t tok[64] = {0};
	struct apr_kv_group g = {.type = APR_KV_F32,
	                         .n_layers = 1,
	                         .n_kv_heads = s->n_kv_heads,
	                         .k_dim = s->k_dim,
	                         .v_dim = s->v_dim,
	                         .n_pages = pages,
	                         .max_pages_seq = pages,
	                         .pool = b->pool,
	                         .table = table,
	                         .layer_bytes =
	                                 (uint64_t)APR_KV_PAGE * s->n_kv_heads * (s->k_dim + s->v_dim) * sizeof(float)};
	struct apr_rows r = {.n = s->rows, .n_out = s->rows, .tok = tok, .pos = s->pos, .slot = slot, .out = out};
	struct apr_norm norm = {s->norm, 1e-5f}, post = {s->post, 1e-5f}, none = {NULL, 0}, head = {s->head_norm, 1e-5f};
	struct apr_op_attn_in in = {.x = s->x,
	                            .x_out = b->x1,
	                            .post = none,
	                            .norm = norm,
	                            .n_embd = s->n_embd,
	                            .n_heads = s->n_heads,
	                            .n_kv_heads = s->n_kv_heads,
	                            .k_dim = s->k_dim,
	                            .v_dim = s->v_dim,
	                            .wq = &m[SIDE_Q],
	                            .wk = &m[SIDE_K],
	                            .wv = &m[SIDE_V],
	                            .bq = s->bq,
	                            .bk = s->bk,
	                            .bv = s->bv,
	                            .q_norm = head,
	                            .k_norm = head,
	                            .rope = s->rope,
	                            .q = b->q,
	                            .kv = {&g, 0}};
	struct apr_op_attn at = {.q = b->q,
	                         .o = b->o,
	                         .n_heads = s->n_heads,
	                         .n_kv_heads = s->n_kv_heads,
	                         .k_dim = s->k_dim,
	                         .v_dim = s->v_dim,
	                         .scale = 0.1f,
	                         .softcap = s->softcap,
	                         .kv = {&g, 0}};
	struct apr_op_proj o = {.in = b->o, .y = s->y, .n_in = s->n_heads * s->v_dim, .n_out = s->n_embd, .w = &m[SIDE_O]};
	struct apr_op_ffn_in ffn = {.x = b->x1,
	                            .y = s->y,
	                            .x_out = b->x2,
	                            .post = post,
	                            .norm = norm,
	                            .n_embd = s->n_embd,
	                            .n_ff = s->n_ff,
	                            .gate = &m[SIDE_GATE],
	                            .up = &m[SIDE_UP],
	                            .act = s->act,
	                            .a = s->a};
	struct apr_op_proj down = {.in = s->a, .y = s->y2, .n_in = s->n_ff, .n_out = s->n_embd, .w = &m[SIDE_DOWN]};
	struct apr_op_head lm = {.x = b->x2,
	                         .y = s->y2,
	                         .post = post,
	                         .norm = norm,
	                         .n_embd = s->n_embd,
	                         .n_vocab = s->n_vocab,
	                         .w = &m[SIDE_HEAD],
	                         .logits = s->logits,
	                         .scale = 1.0f};

	for (i = 0; i < pages; i++)
		table[i] = i;
	for (i = 0; i < s->rows; i++)
		out[i] = i;
	apr_cpu_attn_in(sc, &r, &in);
	apr_cpu_attn(sc, &r, &at);
	apr_cpu_proj(sc, &r, &o);
	apr_cpu_ffn_in(sc, &r, &ffn);
	apr_cpu_proj(sc, &r, &down);
	apr_cpu_head(sc, &r, &lm, 0, s->rows);
}

int cpu_side_layer(struct cpu_side *s)
{
	struct apr_cpu_limits lim = {.rows = s->rows,
	                             .n_embd = s->n_embd,
	                             .n_ff = s->n_ff,
	                             .n_heads = s->n_heads,
	                             .n_kv_heads = s->n_kv_heads,
	                             .k_dim = s->k_dim,
	                             .v_dim = s->v_dim,
	                             .n_ctx = s->n_ctx,
	                             .math = APR_CPU_F32};
	size_t scratch = apr_cpu_scratch_bytes(&lim, 1), rows = s->rows;
	struct apr_mat m[SIDE_N];
	struct memory b = {NULL, NULL, NULL, NULL, NULL, NULL};
	int rc = 0, i;

	memset(m, 0, sizeof m);
	if (!scratch || s->rows > 64 || s->n_ctx > 512)
		return -EINVAL;
	b.x1 = calloc(rows * s->n_embd, sizeof(float));
	b.x2 = calloc(rows * s->n_embd, sizeof(float));
	b.q = calloc(rows * s->n_heads * s->k_dim, sizeof(float));
	b.o = calloc(rows * s->n_heads * s->v_dim, sizeof(float));
	b.pool = calloc((size_t)8 * APR_KV_PAGE * s->n_kv_heads, (s->k_dim + s->v_dim) * sizeof(float));
	b.scratch = aligned_alloc(64, (scratch + 63) & ~(size_t)63);
	if (!b.x1 || !b.x2 || !b.q || !b.o || !b.pool || !b.scratch)
		rc = -ENOMEM;
	for (i = 0; i < SIDE_N && !rc; i++)
		rc = pack(&m[i], s->w[i].type, s->w[i].blocks, s->w[i].n_in, s->w[i].n_out);
	if (!rc)
		run(s, m, &b, apr_cpu_scratch_init(&lim, NULL, b.scratch));
	for (i = 0; i < SIDE_N; i++)
		free((void *)m[i].lin.panels);
	free(b.x1);
	free(b.x2);
	free(b.q);
	free(b.o);
	free(b.pool);
	free(b.scratch);
	return rc;
}
