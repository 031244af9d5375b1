/* SPDX-License-Identifier: MIT */
/*
 * Tensor names to the weights of struct apr_model, each checked against the
 * hyper-parameters. The rule for what must be there is written in model.h.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/arch.h"

#define MAX_VOCAB (1u << 22)

enum presence { REQUIRED, OPTIONAL };

static int wrong_shape(struct loader *ld, const char *name, const struct gguf_tensor *t, uint64_t n_in, uint64_t n_out)
{
	return gguf_fail(ld->err, ld->errlen, -EINVAL,
	                 "tensor %s: shape [%llu, %llu, %llu, %llu] where [%llu, %llu] is expected", name,
	                 (unsigned long long)t->ne[0], (unsigned long long)t->ne[1], (unsigned long long)t->ne[2],
	                 (unsigned long long)t->ne[3], (unsigned long long)n_in, (unsigned long long)n_out);
}

static int find(struct loader *ld, const char *name, enum presence presence, const struct gguf_tensor **t)
{
	int64_t i = gguf_find_tensor(ld->g, name);

	*t = NULL;
	if (i < 0)
		return presence == OPTIONAL ? 0
		                            : gguf_fail(ld->err, ld->errlen, -EINVAL, "tensor %s: missing", name);
	*t = gguf_tensor(ld->g, (uint32_t)i);
	if (!ld->used[i])
		ld->m->weight_bytes += (*t)->bytes;
	ld->used[i] = 1;
	return 0;
}

static int matrix(struct loader *ld, struct apr_weight *w, const char *name, enum presence presence, uint64_t n_in,
                  uint64_t n_out)
{
	const struct gguf_tensor *t;
	int rc = find(ld, name, presence, &t);

	if (rc || !t)
		return rc;
	if (t->ne[0] != n_in || t->ne[1] != n_out || t->ne[2] != 1 || t->ne[3] != 1)
		return wrong_shape(ld, name, t, n_in, n_out);
	*w = (struct apr_weight){.data = t->data, .bytes = t->bytes, .type = t->type, .n_in = (uint32_t)n_in,
	                         .n_out = (uint32_t)n_out};
	return 0;
}

static int vector(struct loader *ld, struct apr_weight *w, const char *name, enum presence presence, uint64_t n)
{
	int rc = matrix(ld, w, name, presence, n, 1);

	if (!rc && w->data && w->type != APR_TYPE_F32)
		rc = gguf_fail(ld->err, ld->errlen, -ENOTSUP, "tensor %s: of type %s; F32 is expected", name,
		               apr_type_info(w->type).name);
	return rc;
}

static int layer_matrix(struct loader *ld, uint32_t l, struct apr_weight *w, const char *name, uint64_t n_in,
                        uint64_t n_out)
{
	char full[64];

	snprintf(full, sizeof full, "blk.%u.%s.weight", l, name);
	return matrix(ld, w, full, REQUIRED, n_in, n_out);
}

static int layer_vector(struct loader *ld, uint32_t l, struct apr_weight *w, const char *name, enum presence presence,
                        uint64_t n)
{
	char full[64];

	snprintf(full, sizeof full, "blk.%u.%s", l, name);
	return vector(ld, w, full, presence, n);
}

static int biases(struct loader *ld, uint32_t l, uint64_t q, uint64_t k, uint64_t v)
{
	struct apr_layer *y = &ld->m->layers[l];
	enum presence presence = ld->def->qkv_bias ? REQUIRED : OPTIONAL;
	int rc;

	if (!ld->def->qkv_bias && !ld->def->optional_bias)
		return 0;
	rc = layer_vector(ld, l, &y->bq, "attn_q.bias", presence, q);
	if (!rc)
		rc = layer_vector(ld, l, &y->bk, "attn_k.bias", presence, k);
	if (!rc)
		rc = layer_vector(ld, l, &y->bv, "attn_v.bias", presence, v);
	if (!rc && ld->def->optional_bias)
		rc = layer_vector(ld, l, &y->bo, "attn_output.bias", OPTIONAL, ld->m->n_embd);
	return rc;
}

static int attention(struct loader *ld, uint32_t l)
{
	const struct apr_model *m = ld->m;
	struct apr_layer *y = &m->layers[l];
	uint64_t q = (uint64_t)m->n_heads * m->head_dim, k = (uint64_t)y->n_kv_heads * m->head_dim;
	uint64_t v = (uint64_t)y->n_kv_heads * m->v_dim, o = (uint64_t)m->n_heads * m->v_dim;
	int rc = layer_vector(ld, l, &y->attn_norm, "attn_norm.weight", REQUIRED, m->n_embd);

	if (!rc)
		rc = layer_matrix(ld, l, &y->wq, "attn_q", m->n_embd, q);
	if (!rc)
		rc = layer_matrix(ld, l, &y->wk, "attn_k", m->n_embd, k);
	if (!rc)
		rc = layer_matrix(ld, l, &y->wv, "attn_v", m->n_embd, v);
	if (!rc)
		rc = layer_matrix(ld, l, &y->wo, "attn_output", o, m->n_embd);
	if (!rc)
		rc = biases(ld, l, q, k, v);
	if (!rc && ld->def->qk_norm)
		rc = layer_vector(ld, l, &y->q_norm, "attn_q_norm.weight", REQUIRED, m->head_dim);
	if (!rc && ld->def->qk_norm)
		rc = layer_vector(ld, l, &y->k_norm, "attn_k_norm.weight", REQUIRED, m->head_dim);
	if (!rc && ld->def->post_norms)
		rc = layer_vector(ld, l, &y->post_attn_norm, "post_attention_norm.weight", REQUIRED, m->n_embd);
	return rc;
}

static int feed_forward(struct loader *ld, uint32_t l)
{
	const struct apr_model *m = ld->m;
	struct apr_layer *y = &m->layers[l];
	int rc = layer_vector(ld, l, &y->ffn_norm, "ffn_norm.weight", REQUIRED, m->n_embd);

	if (!rc)
		rc = layer_matrix(ld, l, &y->gate, "ffn_gate", m->n_embd, m->n_ff);
	if (!rc)
		rc = layer_matrix(ld, l, &y->up, "ffn_up", m->n_embd, m->n_ff);
	if (!rc)
		rc = layer_matrix(ld, l, &y->down, "ffn_down", m->n_ff, m->n_embd);
	if (!rc && ld->def->post_norms)
		rc = layer_vector(ld, l, &y->post_ffn_norm, "post_ffw_norm.weight", REQUIRED, m->n_embd);
	return rc;
}

/* The embedding's rows give n_vocab, which vocab_size and the tokenizer's tables may not exceed. */
static int vocabulary(struct loader *ld)
{
	struct apr_model *m = ld->m;
	const struct gguf_tensor *t;
	struct gguf_arr tokens;
	uint32_t said;
	char key[64];
	int rc = find(ld, "token_embd.weight", REQUIRED, &t);

	if (rc || !t)
		return rc;
	if (t->ne[1] > MAX_VOCAB)
		return gguf_fail(ld->err, ld->errlen, -ENOTSUP, "tensor token_embd.weight: %llu rows",
		                 (unsigned long long)t->ne[1]);
	m->n_vocab = m->n_tokens = (uint32_t)t->ne[1];
	snprintf(key, sizeof key, "%s.vocab_size", ld->def->name);
	rc = gguf_get_u32(ld->g, key, &said, ld->err, ld->errlen);
	if (!rc && said > m->n_vocab)
		return gguf_fail(ld->err, ld->errlen, -EINVAL, "key %s: %u, but token_embd.weight has %u rows", key, said,
		                 m->n_vocab);
	if (rc && rc != -ENOENT)
		return rc;
	rc = gguf_get_arr(ld->g, "tokenizer.ggml.tokens", &tokens, ld->err, ld->errlen);
	if (!rc && (!tokens.n || tokens.n > m->n_vocab))
		return gguf_fail(ld->err, ld->errlen, -EINVAL,
		                 "key tokenizer.ggml.tokens: %llu pieces, but token_embd.weight has %u rows",
		                 (unsigned long long)tokens.n, m->n_vocab);
	if (!rc)
		m->n_tokens = (uint32_t)tokens.n;
	return rc == -ENOENT ? 0 : rc;
}

static int rope_freqs(struct loader *ld)
{
	struct apr_rope *r = &ld->m->rope;
	struct apr_weight w = {0};
	const float *f;
	uint32_t i;
	int rc = vector(ld, &w, "rope_freqs.weight", OPTIONAL, r->n_rot / 2);

	if (rc || !w.data)
		return rc;
	f = w.data;
	for (i = 0; i < r->n_rot / 2; i++) {
		if (!isfinite(f[i]) || f[i] <= 0.0f)
			return gguf_fail(ld->err, ld->errlen, -EINVAL, "tensor rope_freqs.weight: value %u is not positive", i);
	}
	r->freq_factors = f;
	return 0;
}

/* The architecture uses all that the file has, or the first one left over is named. */
static int leftovers(struct loader *ld)
{
	char name[80];
	uint32_t i;

	for (i = 0; i < gguf_n_tensors(ld->g); i++) {
		if (!ld->used[i])
			return gguf_fail(ld->err, ld->errlen, -EINVAL,
			                 "tensor %s: not part of a %s model with block_count %u",
			                 gguf_printable(gguf_tensor(ld->g, i)->name, name, sizeof name), ld->def->name,
			                 ld->m->n_layers);
	}
	return 0;
}

int apr_arch_weights(struct loader *ld)
{
	struct apr_model *m = ld->m;
	uint32_t l;
	int rc = vocabulary(ld);

	if (!rc)
		rc = matrix(ld, &m->tok_embd, "token_embd.weight", REQUIRED, m->n_embd, m->n_vocab);
	if (!rc)
		rc = vector(ld, &m->output_norm, "output_norm.weight", REQUIRED, m->n_embd);
	if (!rc)
		rc = matrix(ld, &m->output, "output.weight", OPTIONAL, m->n_embd, m->n_vocab);
	if (!rc)
		rc = rope_freqs(ld);
	m->tied = !m->output.data;
	if (m->tied)
		m->output = m->tok_embd;
	for (l = 0; l < m->n_layers && !rc; l++) {
		rc = attention(ld, l);
		if (!rc)
			rc = feed_forward(ld, l);
	}
	return rc ? rc : leftovers(ld);
}
