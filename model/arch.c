/* SPDX-License-Identifier: MIT */
/*
 * The architectures and their hyper-parameters: keys ARCH.* to struct apr_model.
 * Weights are arch_weights.c. Every refusal names the key.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/arch.h"

#define GEMMA3_PERIOD 6u
#define GEMMA3_LOCAL_BASE 10000.0f
#define GEMMA3_27B_LAYERS 62u
#define MAX_CTX (1u << 24)
#define MAX_EMBD (1u << 18)
#define MAX_FF (1u << 22)
#define MAX_HEADS (1u << 14)
#define MAX_HEAD_DIM (1u << 12)

static const struct arch_def archs[] = {
	{.name = "llama", .arch = APR_ARCH_LLAMA, .rope = APR_ROPE_PAIRS, .act = APR_ACT_SILU, .optional_bias = true},
	{.name = "qwen2", .arch = APR_ARCH_QWEN2, .rope = APR_ROPE_HALVES, .act = APR_ACT_SILU, .qkv_bias = true},
	{.name = "qwen3", .arch = APR_ARCH_QWEN3, .rope = APR_ROPE_HALVES, .act = APR_ACT_SILU, .qk_norm = true},
	{.name = "gemma3", .arch = APR_ARCH_GEMMA3, .rope = APR_ROPE_HALVES, .act = APR_ACT_GELU_TANH, .qk_norm = true,
	 .post_norms = true, .windows = true, .scale_embd = true},
};

const struct arch_def *apr_arch_find(struct gguf_str name)
{
	size_t i;

	for (i = 0; i < sizeof archs / sizeof *archs; i++) {
		if (gguf_str_is(name, archs[i].name))
			return &archs[i];
	}
	return NULL;
}

struct key {
	char s[96];
};

static struct key full_key(const struct loader *ld, const char *suffix)
{
	struct key k;

	snprintf(k.s, sizeof k.s, "%s.%s", ld->def->name, suffix);
	return k;
}

static int check_range(struct loader *ld, const char *key, uint32_t v, uint32_t min, uint32_t max)
{
	if (v < min || v > max)
		return gguf_fail(ld->err, ld->errlen, -EINVAL, "key %s: %u is not from %u to %u", key, v, min, max);
	return 0;
}

/* -ENOENT where it is absent; err is then left alone. */
static int maybe_u32(struct loader *ld, const char *suffix, uint32_t min, uint32_t max, uint32_t *out)
{
	struct key k = full_key(ld, suffix);
	uint32_t v;
	int rc = gguf_get_u32(ld->g, k.s, &v, ld->err, ld->errlen);

	if (!rc)
		rc = check_range(ld, k.s, v, min, max);
	if (!rc)
		*out = v;
	return rc;
}

static int missing(struct loader *ld, const char *suffix)
{
	return gguf_fail(ld->err, ld->errlen, -EINVAL, "key %s: missing", full_key(ld, suffix).s);
}

static int need_u32(struct loader *ld, const char *suffix, uint32_t min, uint32_t max, uint32_t *out)
{
	int rc = maybe_u32(ld, suffix, min, max, out);

	return rc == -ENOENT ? missing(ld, suffix) : rc;
}

static int default_u32(struct loader *ld, const char *suffix, uint32_t min, uint32_t max, uint32_t value, uint32_t *out)
{
	int rc = maybe_u32(ld, suffix, min, max, out);

	if (rc != -ENOENT)
		return rc;
	*out = value;
	return 0;
}

static int default_f32(struct loader *ld, const char *suffix, float min, float max, float value, float *out)
{
	struct key k = full_key(ld, suffix);
	float v = value;
	int rc = gguf_get_f32(ld->g, k.s, &v, ld->err, ld->errlen);

	if (rc && rc != -ENOENT)
		return rc;
	if (!rc && !(v >= min && v <= max))
		return gguf_fail(ld->err, ld->errlen, -EINVAL, "key %s: %g is out of range", k.s, (double)v);
	*out = v;
	return 0;
}

/* A value that may be given once or by layer: out[n_layers]. -ENOENT where it is absent. */
static int by_layer_u32(struct loader *ld, const char *suffix, uint32_t min, uint32_t max, uint32_t *out)
{
	struct key k = full_key(ld, suffix);
	uint32_t i, v = 0;
	struct gguf_arr a;
	int rc;

	if (!gguf_is_arr(ld->g, k.s)) {
		rc = maybe_u32(ld, suffix, min, max, &v);
		for (i = 0; !rc && i < ld->m->n_layers; i++)
			out[i] = v;
		return rc;
	}
	rc = gguf_get_arr(ld->g, k.s, &a, ld->err, ld->errlen);
	if (rc)
		return rc;
	if (a.n != ld->m->n_layers)
		return gguf_fail(ld->err, ld->errlen, -EINVAL, "key %s: %llu values for %u layers", k.s,
		                 (unsigned long long)a.n, ld->m->n_layers);
	for (i = 0; i < ld->m->n_layers; i++) {
		if (a.elem == GGUF_BOOL || !gguf_arr_u32(&a, i, &out[i]))
			return gguf_fail(ld->err, ld->errlen, -EINVAL, "key %s: value %u is not a positive integer", k.s, i);
		rc = check_range(ld, k.s, out[i], min, max);
		if (rc)
			return rc;
	}
	return 0;
}

/* By layer in the file, but one value for all of them here. */
static int uniform_u32(struct loader *ld, const char *suffix, uint32_t min, uint32_t max, uint32_t *out)
{
	uint32_t v[APR_MODEL_MAX_LAYERS] = {0}, i;
	int rc = by_layer_u32(ld, suffix, min, max, v);

	if (rc)
		return rc == -ENOENT ? missing(ld, suffix) : rc;
	for (i = 1; i < ld->m->n_layers; i++) {
		if (v[i] != v[0])
			return gguf_fail(ld->err, ld->errlen, -ENOTSUP, "key %s: different values by layer",
			                 full_key(ld, suffix).s);
	}
	*out = v[0];
	return 0;
}

static int kv_heads(struct loader *ld)
{
	uint32_t v[APR_MODEL_MAX_LAYERS] = {0}, i;
	struct apr_model *m = ld->m;
	int rc = by_layer_u32(ld, "attention.head_count_kv", 1, m->n_heads, v);

	if (rc && rc != -ENOENT)
		return rc;
	for (i = 0; i < m->n_layers; i++) {
		m->layers[i].n_kv_heads = rc == -ENOENT ? m->n_heads : v[i];
		if (!m->layers[i].n_kv_heads || m->n_heads % m->layers[i].n_kv_heads)
			return gguf_fail(ld->err, ld->errlen, -EINVAL, "key %s: %u does not divide the %u heads",
			                 full_key(ld, "attention.head_count_kv").s, v[i], m->n_heads);
	}
	return 0;
}

static int heads(struct loader *ld)
{
	struct apr_model *m = ld->m;
	uint32_t even = 0;
	int rc = uniform_u32(ld, "attention.head_count", 1, MAX_HEADS, &m->n_heads);

	if (!rc)
		rc = kv_heads(ld);
	if (rc || !m->n_heads)
		return rc;
	even = m->n_embd / m->n_heads;
	rc = maybe_u32(ld, "attention.key_length", 1, MAX_HEAD_DIM, &m->head_dim);
	if (rc == -ENOENT) {
		if (m->n_embd % m->n_heads || even > MAX_HEAD_DIM)
			return gguf_fail(ld->err, ld->errlen, -EINVAL,
			                 "key %s: %u heads do not divide embedding_length %u, and there is no key_length",
			                 full_key(ld, "attention.head_count").s, m->n_heads, m->n_embd);
		m->head_dim = even;
		rc = 0;
	}
	if (!rc)
		rc = default_u32(ld, "attention.value_length", 1, MAX_HEAD_DIM, m->head_dim, &m->v_dim);
	if (!rc)
		rc = default_f32(ld, "attention.scale", 1e-6f, 1e6f, 1.0f / sqrtf((float)m->head_dim), &m->attn_scale);
	/* The one gemma3 whose query scale is not its head's: the 27B, told by its depth. */
	if (!rc && m->arch == APR_ARCH_GEMMA3 && m->n_layers == GEMMA3_27B_LAYERS && even &&
	    !gguf_has(ld->g, full_key(ld, "attention.scale").s))
		m->attn_scale = 1.0f / sqrtf((float)even);
	return rc;
}

/* One flag a layer: true where it attends to a window only. */
static int window_pattern(struct loader *ld, bool *local)
{
	struct key k = full_key(ld, "attention.sliding_window_pattern");
	uint32_t period = GEMMA3_PERIOD, i, v;
	struct gguf_arr a;
	int rc;

	if (!gguf_is_arr(ld->g, k.s)) {
		rc = maybe_u32(ld, "attention.sliding_window_pattern", 1, UINT32_MAX, &period);
		for (i = 0; i < ld->m->n_layers; i++)
			local[i] = (i + 1) % period != 0;
		return rc == -ENOENT ? 0 : rc;
	}
	rc = gguf_get_arr(ld->g, k.s, &a, ld->err, ld->errlen);
	if (rc)
		return rc;
	if (a.n != ld->m->n_layers)
		return gguf_fail(ld->err, ld->errlen, -EINVAL, "key %s: %llu values for %u layers", k.s,
		                 (unsigned long long)a.n, ld->m->n_layers);
	for (i = 0; i < ld->m->n_layers; i++) {
		if (!gguf_arr_u32(&a, i, &v) || v > 1)
			return gguf_fail(ld->err, ld->errlen, -EINVAL, "key %s: value %u is not a bool", k.s, i);
		local[i] = v != 0;
	}
	return 0;
}

static int no_windows(struct loader *ld)
{
	uint32_t window;
	int rc = maybe_u32(ld, "attention.sliding_window", 0, UINT32_MAX, &window);

	if (!rc && window && window < ld->m->n_ctx_train)
		return gguf_fail(ld->err, ld->errlen, -ENOTSUP, "key %s: a window of %u in architecture %s is not supported",
		                 full_key(ld, "attention.sliding_window").s, window, ld->def->name);
	return rc == -ENOENT ? 0 : rc;
}

/* Windows and RoPE bases by layer. */
static int layer_kinds(struct loader *ld)
{
	bool local[APR_MODEL_MAX_LAYERS] = {false};
	struct apr_model *m = ld->m;
	uint32_t window = 0, i;
	float base = 0.0f, local_base;
	int rc = default_f32(ld, "rope.freq_base", 1.0f, 1e12f, 10000.0f, &base);

	local_base = base;
	if (!rc && !ld->def->windows)
		rc = no_windows(ld);
	if (!rc && ld->def->windows) {
		rc = default_u32(ld, "attention.sliding_window", 1, UINT32_MAX, 0, &window);
		if (!rc)
			rc = window_pattern(ld, local);
		if (!rc)
			rc = default_f32(ld, "rope.freq_base_swa", 1.0f, 1e12f, GEMMA3_LOCAL_BASE, &local_base);
	}
	for (i = 0; !rc && i < m->n_layers; i++) {
		m->layers[i].window = local[i] ? window : 0;
		m->layers[i].rope_base = local[i] ? local_base : base;
		m->layers[i].rope_scaled = !local[i];
	}
	return rc;
}

static int yarn(struct loader *ld)
{
	struct apr_rope *r = &ld->m->rope;
	int rc = need_u32(ld, "rope.scaling.original_context_length", 1, MAX_CTX, &r->original_ctx);

	if (!rc)
		rc = default_f32(ld, "rope.scaling.yarn_ext_factor", -1.0f, 1e6f, 1.0f, &r->ext_factor);
	if (!rc && r->ext_factor < 0.0f) /* the file's way to say "the usual" */
		r->ext_factor = 1.0f;
	if (!rc)
		rc = default_f32(ld, "rope.scaling.attn_factor", 1e-6f, 1e6f, 1.0f, &r->attn_factor);
	if (!rc)
		rc = default_f32(ld, "rope.scaling.yarn_attn_factor", 1e-6f, 1e6f, r->attn_factor, &r->attn_factor);
	if (!rc)
		rc = default_f32(ld, "rope.scaling.yarn_beta_fast", 1e-6f, 1e6f, 32.0f, &r->beta_fast);
	if (!rc)
		rc = default_f32(ld, "rope.scaling.yarn_beta_slow", 1e-6f, 1e6f, 1.0f, &r->beta_slow);
	return rc;
}

static int scaling_type(struct loader *ld, bool *given)
{
	struct key k = full_key(ld, "rope.scaling.type");
	struct gguf_str s;
	char name[32];
	int rc = gguf_get_str(ld->g, k.s, &s, ld->err, ld->errlen);

	*given = !rc;
	if (rc)
		return rc == -ENOENT ? 0 : rc;
	if (gguf_str_is(s, "none"))
		ld->m->rope.scaling = APR_ROPE_SCALING_NONE;
	else if (gguf_str_is(s, "linear"))
		ld->m->rope.scaling = APR_ROPE_SCALING_LINEAR;
	else if (gguf_str_is(s, "yarn"))
		ld->m->rope.scaling = APR_ROPE_SCALING_YARN;
	else
		return gguf_fail(ld->err, ld->errlen, -ENOTSUP, "key %s: unknown type \"%s\"", k.s,
		                 gguf_printable(s, name, sizeof name));
	return 0;
}

static int rope(struct loader *ld)
{
	struct apr_rope *r = &ld->m->rope;
	bool given, factor, old_factor;
	int rc;

	*r = (struct apr_rope){.kind = ld->def->rope, .factor = 1.0f};
	rc = default_u32(ld, "rope.dimension_count", 1, UINT32_MAX, ld->m->head_dim, &r->n_rot);
	if (!rc && (r->n_rot % 2 || r->n_rot > ld->m->head_dim))
		rc = gguf_fail(ld->err, ld->errlen, -EINVAL, "key %s: %u is odd or above the head's %u",
		               full_key(ld, "rope.dimension_count").s, r->n_rot, ld->m->head_dim);
	if (!rc)
		rc = scaling_type(ld, &given);
	if (rc)
		return rc;
	/* A factor with no type, or under its first name, means linear. */
	factor = gguf_has(ld->g, full_key(ld, "rope.scaling.factor").s);
	old_factor = gguf_has(ld->g, full_key(ld, "rope.scale_linear").s);
	if (!given && (factor || old_factor))
		r->scaling = APR_ROPE_SCALING_LINEAR;
	if (r->scaling == APR_ROPE_SCALING_NONE)
		return 0;
	if (!factor && !old_factor)
		return missing(ld, "rope.scaling.factor");
	rc = default_f32(ld, factor ? "rope.scaling.factor" : "rope.scale_linear", 1.0f, 1e6f, 1.0f, &r->factor);
	if (!rc && r->scaling == APR_ROPE_SCALING_YARN)
		rc = yarn(ld);
	return rc;
}

static int epsilon(struct loader *ld)
{
	if (!gguf_has(ld->g, full_key(ld, "attention.layer_norm_rms_epsilon").s))
		return missing(ld, "attention.layer_norm_rms_epsilon");
	return default_f32(ld, "attention.layer_norm_rms_epsilon", 0.0f, 1.0f, 0.0f, &ld->m->norm_eps);
}

static int sizes(struct loader *ld)
{
	struct apr_model *m = ld->m;
	uint32_t experts = 0;
	int rc = need_u32(ld, "block_count", 1, APR_MODEL_MAX_LAYERS, &m->n_layers);

	if (!rc)
		rc = need_u32(ld, "context_length", 1, MAX_CTX, &m->n_ctx_train);
	if (!rc)
		rc = need_u32(ld, "embedding_length", 1, MAX_EMBD, &m->n_embd);
	if (!rc)
		rc = default_u32(ld, "expert_count", 0, UINT32_MAX, 0, &experts);
	if (!rc && experts)
		rc = gguf_fail(ld->err, ld->errlen, -ENOTSUP, "key %s: mixtures of experts are not supported",
		               full_key(ld, "expert_count").s);
	return rc;
}

int apr_arch_hparams(struct loader *ld)
{
	struct apr_model *m = ld->m;
	int rc;

	m->arch = ld->def->arch;
	m->arch_name = ld->def->name;
	m->act = ld->def->act;
	rc = sizes(ld);
	if (rc)
		return rc;
	m->embd_scale = ld->def->scale_embd ? sqrtf((float)m->n_embd) : 1.0f;
	m->layers = calloc(m->n_layers, sizeof *m->layers);
	if (!m->layers)
		return gguf_fail(ld->err, ld->errlen, -ENOMEM, "out of memory for %u layers", m->n_layers);
	rc = uniform_u32(ld, "feed_forward_length", 1, MAX_FF, &m->n_ff);
	if (!rc)
		rc = heads(ld);
	if (!rc)
		rc = layer_kinds(ld);
	if (!rc)
		rc = rope(ld);
	if (!rc)
		rc = epsilon(ld);
	if (!rc)
		rc = default_f32(ld, "attn_logit_softcapping", 0.0f, 1e6f, 0.0f, &m->attn_softcap);
	if (!rc)
		rc = default_f32(ld, "final_logit_softcapping", 0.0f, 1e6f, 0.0f, &m->logit_softcap);
	return rc;
}
