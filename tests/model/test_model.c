/* SPDX-License-Identifier: MIT */
/*
 * What the four architectures make of sound files, and the rules of CASES "Real
 * files" that are the model's: 28 to 32. Logits are the engine's tests' business;
 * here equal forms must give equal descriptions.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/types.h"
#include "model/hash.h"
#include "model/model.h"
#include "tests/harness.h"
#include "tests/support/gguf_writer.h"

static const char *tmp_file(void)
{
	static char path[512];

	snprintf(path, sizeof path, "%s/model.gguf", apr_test_tmpdir());
	return path;
}

/* Takes w. NULL after a failed assertion. */
static struct apr_model *must_open(struct gguf_writer *w)
{
	struct apr_model *m = NULL;
	char err[256];
	int rc;

	CU_ASSERT_EQUAL(gw_write(w, tmp_file()), 0);
	gw_free(w);
	rc = apr_model_open(&m, tmp_file(), err, sizeof err);
	if (rc)
		printf("\n  %s\n", err);
	CU_ASSERT_EQUAL_FATAL(rc, 0);
	return m;
}

static void must_refuse(struct gguf_writer *w, int want, const char *names)
{
	struct apr_model *m = NULL;
	char err[256] = "";
	int rc;

	CU_ASSERT_EQUAL(gw_write(w, tmp_file()), 0);
	gw_free(w);
	rc = apr_model_open(&m, tmp_file(), err, sizeof err);
	CU_ASSERT_EQUAL(rc, want);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, names));
	if (rc != want || !strstr(err, names))
		printf("\n  %d, \"%s\"; %d, %s expected\n", rc, err, want, names);
	if (!rc)
		apr_model_close(m);
}

static struct gguf_writer *tiny(const char *arch, uint32_t n_layers)
{
	struct tiny_spec spec = {.arch = arch, .n_layers = n_layers, .n_embd = 64, .n_ff = 96, .n_heads = 4,
	                         .n_kv_heads = 2, .head_dim = 32, .window = 24};

	return apr_test_tiny_model(&spec);
}

/* ---- architectures ---- */

static void llama(void)
{
	struct apr_model *m = must_open(tiny("llama", 3));
	const struct apr_layer *l = &m->layers[2];

	CU_ASSERT(m->arch == APR_ARCH_LLAMA && !strcmp(m->arch_name, "llama"));
	CU_ASSERT(m->n_layers == 3 && m->n_embd == 64 && m->n_ff == 96 && m->n_heads == 4 && m->n_ctx_train == 2048);
	CU_ASSERT(m->head_dim == 32 && m->v_dim == 32 && m->n_vocab == 320 && m->n_tokens == 320);
	CU_ASSERT(m->rope.kind == APR_ROPE_PAIRS && m->rope.n_rot == 32 && m->rope.scaling == APR_ROPE_SCALING_NONE);
	CU_ASSERT(m->act == APR_ACT_SILU && m->embd_scale == 1.0f && m->attn_scale == 1.0f / sqrtf(32.0f));
	CU_ASSERT(m->attn_softcap == 0.0f && m->logit_softcap == 0.0f && m->norm_eps == 1e-5f);
	CU_ASSERT(m->tied && m->output.data == m->tok_embd.data);
	CU_ASSERT(l->wq.n_in == 64 && l->wq.n_out == 128 && l->wk.n_out == 64 && l->wo.n_in == 128 && l->wo.n_out == 64);
	CU_ASSERT(l->down.n_in == 96 && l->down.n_out == 64 && l->attn_norm.n_in == 64 && l->attn_norm.n_out == 1);
	CU_ASSERT(!l->bq.data && !l->bo.data && !l->q_norm.data && !l->post_attn_norm.data);
	CU_ASSERT(l->window == 0 && l->rope_base == 10000.0f && l->rope_scaled && l->n_kv_heads == 2);
	CU_ASSERT_STRING_EQUAL(m->name, "tiny");
	apr_model_close(m);
}

static void qwen2_and_qwen3(void)
{
	struct apr_model *m = must_open(tiny("qwen2", 2));

	CU_ASSERT(m->arch == APR_ARCH_QWEN2 && m->rope.kind == APR_ROPE_HALVES);
	CU_ASSERT(m->layers[1].bq.data && m->layers[1].bk.n_in == 64 && m->layers[1].bv.data && !m->layers[1].bo.data);
	apr_model_close(m);
	m = must_open(tiny("qwen3", 2));
	CU_ASSERT(m->arch == APR_ARCH_QWEN3 && m->rope.kind == APR_ROPE_HALVES && m->act == APR_ACT_SILU);
	CU_ASSERT(m->layers[1].q_norm.data && m->layers[1].k_norm.n_in == 32 && !m->layers[1].bq.data);
	apr_model_close(m);
}

static void gemma3(void)
{
	struct apr_model *m = must_open(tiny("gemma3", 12));
	uint32_t i;

	CU_ASSERT(m->arch == APR_ARCH_GEMMA3 && m->act == APR_ACT_GELU_TANH && m->embd_scale == 8.0f);
	for (i = 0; i < 12; i++) {
		bool full = i == 5 || i == 11;

		CU_ASSERT_EQUAL(m->layers[i].window, full ? 0 : 24);
		CU_ASSERT_EQUAL(m->layers[i].rope_base, 10000.0f);
		CU_ASSERT_EQUAL(m->layers[i].rope_scaled, full);
		CU_ASSERT(m->layers[i].post_attn_norm.data && m->layers[i].post_ffn_norm.data && m->layers[i].q_norm.data);
	}
	apr_model_close(m);
}

static void gemma3_rope_bases(void)
{
	struct gguf_writer *w = tiny("gemma3", 6);
	struct apr_model *m;

	gw_drop(w, "gemma3.rope.freq_base");
	gw_f32(w, "gemma3.rope.freq_base", 1e6f);
	m = must_open(w);
	CU_ASSERT(m->layers[0].rope_base == 10000.0f && m->layers[5].rope_base == 1e6f);
	apr_model_close(m);
	w = tiny("gemma3", 6);
	gw_f32(w, "gemma3.rope.freq_base_swa", 20000.0f);
	m = must_open(w);
	CU_ASSERT(m->layers[0].rope_base == 20000.0f && m->layers[5].rope_base == 10000.0f);
	apr_model_close(m);
}

static void real_models(void)
{
	const char *path = apr_test_model(SMOLLM2);
	struct apr_model *m;
	char err[256];

	if (!path)
		SKIP("the models have not been fetched");
	CU_ASSERT_EQUAL_FATAL(apr_model_open(&m, path, err, sizeof err), 0);
	CU_ASSERT(m->n_layers == 30 && m->n_embd == 576 && m->head_dim == 64 && m->n_ctx_train == 8192 && m->tied);
	CU_ASSERT(m->tok_embd.type == APR_TYPE_Q8_0 && m->layers[0].wq.type == APR_TYPE_Q4_1);
	CU_ASSERT_EQUAL(m->weight_bytes, 96576768);
	apr_model_close(m);
	path = apr_test_model(GEMMA3);
	if (!path)
		SKIP("the second model has not been fetched");
	CU_ASSERT_EQUAL_FATAL(apr_model_open(&m, path, err, sizeof err), 0);
	CU_ASSERT(m->n_layers == 18 && m->n_vocab == 262144 && m->layers[4].window == 512 && !m->layers[17].window);
	CU_ASSERT(m->layers[5].rope_base == 1e6f && m->layers[0].rope_base == 10000.0f && m->rope.n_rot == 256);
	apr_model_close(m);
}

static void separate_output(void)
{
	struct tiny_spec spec = {.separate_output = true};
	struct apr_model *m = must_open(apr_test_tiny_model(&spec));

	CU_ASSERT(!m->tied && m->output.data != m->tok_embd.data && m->output.n_out == 320);
	apr_model_close(m);
}

static void every_weight_type_opens(void)
{
	uint32_t type;

	for (type = 0; type < APR_TYPE_LIMIT; type++) {
		struct tiny_spec spec = {.type = type};
		struct apr_model *m;

		if (!apr_type_info(type).block)
			continue;
		m = must_open(apr_test_tiny_model(&spec));
		CU_ASSERT_EQUAL(m->layers[0].up.type, type);
		CU_ASSERT_EQUAL((uintptr_t)m->layers[0].up.data % 32, 0);
		apr_model_close(m);
	}
}

static void unknown_architecture(void)
{
	struct gguf_writer *w = tiny("llama", 1);

	gw_drop(w, "general.architecture");
	gw_str(w, "general.architecture", "mamba");
	must_refuse(w, -ENOTSUP, "mamba");
	w = tiny("llama", 1);
	gw_u32(w, "llama.expert_count", 8);
	must_refuse(w, -ENOTSUP, "llama.expert_count");
	w = tiny("qwen2", 1);
	gw_u32(w, "qwen2.attention.sliding_window", 128);
	must_refuse(w, -ENOTSUP, "qwen2.attention.sliding_window");
}

/* ---- 28: scalar or array ---- */

static bool same_layers(const struct apr_model *a, const struct apr_model *b)
{
	uint32_t i;

	for (i = 0; i < a->n_layers; i++) {
		if (a->layers[i].n_kv_heads != b->layers[i].n_kv_heads || a->layers[i].window != b->layers[i].window ||
		    a->layers[i].rope_base != b->layers[i].rope_base)
			return false;
	}
	return a->n_layers == b->n_layers && a->n_heads == b->n_heads && a->n_ff == b->n_ff;
}

/* tiny(arch, 6) with key replaced by an array. */
static struct gguf_writer *with_array(const char *arch, const char *key, enum gw_type elem, const void *v, uint64_t n)
{
	struct gguf_writer *w = tiny(arch, 6);

	gw_drop(w, key);
	gw_arr(w, key, elem, v, n);
	return w;
}

static void case28_equal_forms(void)
{
	static const uint32_t twos[6] = {2, 2, 2, 2, 2, 2}, fours[6] = {4, 4, 4, 4, 4, 4};
	static const int32_t twos_i[6] = {2, 2, 2, 2, 2, 2};
	static const uint64_t twos_l[6] = {2, 2, 2, 2, 2, 2};
	static const uint8_t pattern[6] = {1, 1, 1, 1, 1, 0};
	static const uint32_t pattern_u[6] = {1, 1, 1, 1, 1, 0};
	struct apr_model *a = must_open(tiny("gemma3", 6)), *b;
	struct gguf_writer *forms[7];
	size_t i;

	forms[0] = with_array("gemma3", "gemma3.attention.head_count_kv", GW_U32, twos, 6);
	forms[1] = with_array("gemma3", "gemma3.attention.head_count_kv", GW_I32, twos_i, 6);
	forms[2] = with_array("gemma3", "gemma3.attention.head_count_kv", GW_U64, twos_l, 6);
	forms[3] = with_array("gemma3", "gemma3.attention.sliding_window_pattern", GW_BOOL, pattern, 6);
	forms[4] = with_array("gemma3", "gemma3.attention.sliding_window_pattern", GW_U32, pattern_u, 6);
	forms[5] = tiny("gemma3", 6);
	gw_u32(forms[5], "gemma3.attention.sliding_window_pattern", 6);
	forms[6] = with_array("gemma3", "gemma3.attention.head_count", GW_U32, fours, 6);
	for (i = 0; i < 7; i++) {
		b = must_open(forms[i]);
		CU_ASSERT(same_layers(a, b));
		apr_model_close(b);
	}
	apr_model_close(a);
}

static void case28_wrong_forms(void)
{
	static const uint32_t v[6] = {2, 2, 2, 0, 2, 2}, twos[7] = {2, 2, 2, 2, 2, 2, 2}, three[6] = {2, 2, 3, 2, 2, 2}, heads[6] = {4, 4, 2, 4, 4, 4};
	static const float f[6] = {2, 2, 2, 2, 2, 2};
	static const char *const kv = "gemma3.attention.head_count_kv", *const pattern = "gemma3.attention.sliding_window_pattern";
	static const uint8_t bools[7] = {1, 1, 1, 1, 1, 0, 1};
	struct gguf_writer *w;

	must_refuse(with_array("gemma3", kv, GW_U32, twos, 5), -EINVAL, kv);
	must_refuse(with_array("gemma3", kv, GW_U32, twos, 7), -EINVAL, kv);
	must_refuse(with_array("gemma3", kv, GW_U32, twos, 0), -EINVAL, kv);
	must_refuse(with_array("gemma3", kv, GW_U32, v, 6), -EINVAL, kv);
	must_refuse(with_array("gemma3", kv, GW_U32, three, 6), -EINVAL, kv);
	must_refuse(with_array("gemma3", kv, GW_F32, f, 6), -EINVAL, kv);
	must_refuse(with_array("gemma3", kv, GW_BOOL, bools, 6), -EINVAL, kv);
	must_refuse(with_array("gemma3", pattern, GW_BOOL, bools, 7), -EINVAL, pattern);
	must_refuse(with_array("gemma3", pattern, GW_BOOL, bools, 5), -EINVAL, pattern);
	must_refuse(with_array("gemma3", pattern, GW_U32, three, 6), -EINVAL, pattern);
	must_refuse(with_array("gemma3", "gemma3.attention.head_count", GW_U32, heads, 6), -ENOTSUP,
	            "gemma3.attention.head_count");
	w = tiny("gemma3", 6);
	gw_u32(w, pattern, 0);
	must_refuse(w, -EINVAL, pattern);
	w = tiny("gemma3", 6);
	gw_drop(w, "gemma3.attention.sliding_window");
	gw_u32(w, "gemma3.attention.sliding_window", 0);
	must_refuse(w, -EINVAL, "gemma3.attention.sliding_window");
}

/* Two KV heads in one layer, four in another: each layer's weights are checked against its own count. */
static void case28_kv_heads_by_layer(void)
{
	static const uint32_t v[2] = {2, 4};
	struct gguf_writer *w = tiny("llama", 2);
	uint64_t ne[2] = {64, 128};
	struct apr_model *m;

	gw_drop(w, "llama.attention.head_count_kv");
	gw_arr(w, "llama.attention.head_count_kv", GW_U32, v, 2);
	gw_drop_tensor(w, "blk.1.attn_k.weight");
	gw_drop_tensor(w, "blk.1.attn_v.weight");
	gw_tensor(w, "blk.1.attn_k.weight", APR_TYPE_F16, 2, ne, NULL, UINT64_C(64) * 128 * 2);
	gw_tensor(w, "blk.1.attn_v.weight", APR_TYPE_F16, 2, ne, NULL, UINT64_C(64) * 128 * 2);
	m = must_open(w);
	CU_ASSERT(m->layers[0].n_kv_heads == 2 && m->layers[1].n_kv_heads == 4 && m->layers[1].wk.n_out == 128);
	apr_model_close(m);
}

/* ---- 29: RoPE ---- */

static struct gguf_writer *with_scaling(const char *type, float factor)
{
	struct gguf_writer *w = tiny("llama", 1);

	if (type)
		gw_str(w, "llama.rope.scaling.type", type);
	if (factor != 0.0f)
		gw_f32(w, "llama.rope.scaling.factor", factor);
	return w;
}

static void case29_scalings(void)
{
	struct apr_model *m = must_open(with_scaling("linear", 4.0f));
	struct gguf_writer *w;

	CU_ASSERT(m->rope.scaling == APR_ROPE_SCALING_LINEAR && m->rope.factor == 4.0f);
	apr_model_close(m);
	m = must_open(with_scaling("none", 4.0f));
	CU_ASSERT(m->rope.scaling == APR_ROPE_SCALING_NONE && m->rope.factor == 1.0f);
	apr_model_close(m);
	m = must_open(with_scaling(NULL, 2.0f)); /* a factor with no type is linear */
	CU_ASSERT(m->rope.scaling == APR_ROPE_SCALING_LINEAR && m->rope.factor == 2.0f);
	apr_model_close(m);
	w = tiny("llama", 1);
	gw_f32(w, "llama.rope.scale_linear", 8.0f);
	m = must_open(w);
	CU_ASSERT(m->rope.scaling == APR_ROPE_SCALING_LINEAR && m->rope.factor == 8.0f);
	apr_model_close(m);
	w = with_scaling("yarn", 4.0f);
	gw_u32(w, "llama.rope.scaling.original_context_length", 512);
	m = must_open(w);
	CU_ASSERT(m->rope.scaling == APR_ROPE_SCALING_YARN && m->rope.factor == 4.0f && m->rope.original_ctx == 512);
	CU_ASSERT(m->rope.ext_factor == 1.0f && m->rope.attn_factor == 1.0f && m->rope.beta_fast == 32.0f &&
	          m->rope.beta_slow == 1.0f);
	apr_model_close(m);
	w = with_scaling("yarn", 4.0f);
	gw_u32(w, "llama.rope.scaling.original_context_length", 512);
	gw_f32(w, "llama.rope.scaling.yarn_beta_fast", 16.0f);
	gw_f32(w, "llama.rope.scaling.attn_factor", 0.5f);
	m = must_open(w);
	CU_ASSERT(m->rope.beta_fast == 16.0f && m->rope.attn_factor == 0.5f);
	apr_model_close(m);
}

static void case29_wrong_scalings(void)
{
	struct gguf_writer *w;

	must_refuse(with_scaling("su", 4.0f), -ENOTSUP, "su");
	must_refuse(with_scaling("yarn", 4.0f), -EINVAL, "llama.rope.scaling.original_context_length");
	must_refuse(with_scaling("linear", 0.0f), -EINVAL, "llama.rope.scaling.factor");
	must_refuse(with_scaling("linear", 0.5f), -EINVAL, "llama.rope.scaling.factor");
	must_refuse(with_scaling("linear", NAN), -EINVAL, "llama.rope.scaling.factor");
	must_refuse(with_scaling("linear", INFINITY), -EINVAL, "llama.rope.scaling.factor");
	w = tiny("llama", 1);
	gw_drop(w, "llama.rope.freq_base");
	gw_f32(w, "llama.rope.freq_base", 0.0f);
	must_refuse(w, -EINVAL, "llama.rope.freq_base");
}

static void case29_rope_freqs(void)
{
	struct tiny_spec spec = {.rope_freqs = true, .head_dim = 32};
	struct apr_model *m = must_open(apr_test_tiny_model(&spec));
	struct gguf_writer *w;
	float bad[16];
	uint32_t i;

	CU_ASSERT(m->rope.freq_factors && m->rope.freq_factors[0] == 1.0f && m->rope.freq_factors[15] == 8.0f);
	apr_model_close(m);
	for (i = 0; i < 16; i++)
		bad[i] = i == 9 ? 0.0f : 1.0f;
	w = tiny("llama", 1);
	gw_tensor(w, "rope_freqs.weight", APR_TYPE_F32, 1, (const uint64_t[]){16}, bad, sizeof bad);
	must_refuse(w, -EINVAL, "rope_freqs.weight");
	w = tiny("llama", 1);
	gw_tensor(w, "rope_freqs.weight", APR_TYPE_F32, 1, (const uint64_t[]){8}, bad, 32);
	must_refuse(w, -EINVAL, "rope_freqs.weight");
}

/* ---- 30: padding rows ---- */

static void case30_more_rows_than_tokens(void)
{
	struct tiny_spec spec = {.n_layers = 1, .n_vocab = 320}, small = {.n_layers = 1, .n_vocab = 300};
	struct gguf_writer *w = apr_test_tiny_model(&small), *wide = apr_test_tiny_model(&spec);
	struct apr_model *m;

	gw_drop_tensor(w, "token_embd.weight");
	gw_tensor(w, "token_embd.weight", APR_TYPE_F32, 2, (const uint64_t[]){256, 320}, NULL, UINT64_C(256) * 320 * 4);
	m = must_open(w);
	CU_ASSERT(m->n_vocab == 320 && m->n_tokens == 300 && m->output.n_out == 320);
	apr_model_close(m);
	gw_drop_tensor(wide, "token_embd.weight"); /* fewer rows than tokens */
	gw_tensor(wide, "token_embd.weight", APR_TYPE_F32, 2, (const uint64_t[]){256, 310}, NULL, UINT64_C(256) * 310 * 4);
	gw_drop(wide, "llama.vocab_size");
	must_refuse(wide, -EINVAL, "tokenizer.ggml.tokens");
}

/* ---- 31: which tensors ---- */

static void case31_extra_tensor(void)
{
	struct gguf_writer *w = tiny("llama", 2);

	gw_tensor(w, "blk.0.attn_sinks.weight", APR_TYPE_F32, 1, (const uint64_t[]){4}, NULL, 16);
	gw_tensor(w, "zzz", APR_TYPE_F32, 1, (const uint64_t[]){4}, NULL, 16);
	must_refuse(w, -EINVAL, "tensor blk.0.attn_sinks.weight");
	w = tiny("qwen3", 2); /* a bias is qwen2's, not qwen3's */
	gw_tensor(w, "blk.1.attn_q.bias", APR_TYPE_F32, 1, (const uint64_t[]){128}, NULL, 512);
	must_refuse(w, -EINVAL, "tensor blk.1.attn_q.bias");
}

static void case31_missing_tensors(void)
{
	static const struct {
		const char *arch, *name;
	} need[] = {
		{"llama", "token_embd.weight"}, {"llama", "output_norm.weight"}, {"llama", "blk.0.attn_norm.weight"},
		{"llama", "blk.1.attn_q.weight"}, {"llama", "blk.1.attn_k.weight"}, {"llama", "blk.0.attn_v.weight"},
		{"llama", "blk.0.attn_output.weight"}, {"llama", "blk.1.ffn_norm.weight"}, {"llama", "blk.1.ffn_gate.weight"},
		{"llama", "blk.1.ffn_up.weight"}, {"llama", "blk.1.ffn_down.weight"}, {"qwen2", "blk.1.attn_q.bias"},
		{"qwen2", "blk.1.attn_k.bias"}, {"qwen2", "blk.1.attn_v.bias"}, {"qwen3", "blk.0.attn_q_norm.weight"},
		{"qwen3", "blk.0.attn_k_norm.weight"}, {"gemma3", "blk.0.post_attention_norm.weight"},
		{"gemma3", "blk.0.post_ffw_norm.weight"},
	};
	size_t i;

	for (i = 0; i < sizeof need / sizeof *need; i++) {
		struct gguf_writer *w = tiny(need[i].arch, 2);

		gw_drop_tensor(w, need[i].name);
		must_refuse(w, -EINVAL, need[i].name);
	}
}

static void case31_block_count_off_by_one(void)
{
	struct gguf_writer *w = tiny("llama", 2);

	gw_drop(w, "llama.block_count");
	gw_u32(w, "llama.block_count", 3);
	must_refuse(w, -EINVAL, "tensor blk.2.attn_norm.weight: missing");
	w = tiny("llama", 2);
	gw_drop(w, "llama.block_count");
	gw_u32(w, "llama.block_count", 1);
	must_refuse(w, -EINVAL, "tensor blk.1.attn_norm.weight");
}

static void case31_llama_biases_are_optional(void)
{
	struct gguf_writer *w = tiny("llama", 1);
	struct apr_model *m;

	gw_tensor(w, "blk.0.attn_output.bias", APR_TYPE_F32, 1, (const uint64_t[]){64}, NULL, 256);
	gw_tensor(w, "blk.0.attn_q.bias", APR_TYPE_F32, 1, (const uint64_t[]){128}, NULL, 512);
	m = must_open(w);
	CU_ASSERT(m->layers[0].bo.data && m->layers[0].bq.data && !m->layers[0].bk.data);
	apr_model_close(m);
}

/* Every shape is held against the hyper-parameters. */
static void wrong_shapes(void)
{
	static const struct {
		const char *name;
		uint64_t ne[2];
		unsigned n_dims;
	} bad[] = {
		{"blk.0.attn_q.weight", {64, 127}, 2}, {"blk.0.attn_k.weight", {64, 128}, 2}, {"blk.0.attn_v.weight", {32, 64}, 2},
		{"blk.0.attn_output.weight", {64, 128}, 2}, {"blk.0.ffn_gate.weight", {64, 95}, 2},
		{"blk.0.ffn_down.weight", {64, 96}, 2}, {"blk.0.ffn_norm.weight", {63, 1}, 1}, {"output_norm.weight", {64, 2}, 2},
		{"token_embd.weight", {32, 320}, 2},
	};
	size_t i;

	for (i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct gguf_writer *w = tiny("llama", 1);

		gw_drop_tensor(w, bad[i].name);
		gw_tensor(w, bad[i].name, APR_TYPE_F32, bad[i].n_dims, bad[i].ne, NULL, bad[i].ne[0] * bad[i].ne[1] * 4);
		must_refuse(w, -EINVAL, bad[i].name);
	}
}

static void norms_are_f32(void)
{
	struct gguf_writer *w = tiny("llama", 1);

	gw_drop_tensor(w, "output_norm.weight");
	gw_tensor(w, "output_norm.weight", APR_TYPE_F16, 1, (const uint64_t[]){64}, NULL, 128);
	must_refuse(w, -ENOTSUP, "output_norm.weight");
}

/* ---- 32: sampling values of the file ---- */

static void case32_sampling(void)
{
	struct apr_model *m = must_open(tiny("llama", 1));
	struct gguf_writer *w = tiny("llama", 1);

	CU_ASSERT_EQUAL(m->sampling.have, 0);
	apr_model_close(m);
	gw_f32(w, "general.sampling.temp", 0.0f); /* given, and zero: not the same as left out */
	gw_i32(w, "general.sampling.top_k", 40);
	gw_f32(w, "general.sampling.min_p", 0.05f);
	gw_i32(w, "general.sampling.penalty_last_n", -1);
	gw_str(w, "general.sampling.sequence", "kfypmt");
	m = must_open(w);
	CU_ASSERT_EQUAL(m->sampling.have, APR_FILE_TEMPERATURE | APR_FILE_TOP_K | APR_FILE_MIN_P | APR_FILE_WINDOW);
	CU_ASSERT(m->sampling.temperature == 0.0f && m->sampling.top_k == 40 && m->sampling.min_p == 0.05f &&
	          m->sampling.penalty_window == -1);
	apr_model_close(m);
}

static void case32_sampling_out_of_range(void)
{
	static const struct {
		const char *key;
		float v;
	} bad[] = {{"general.sampling.temp", -1}, {"general.sampling.temp", NAN}, {"general.sampling.top_p", 1.5f},
	           {"general.sampling.min_p", -0.1f}, {"general.sampling.penalty_repeat", 0},
	           {"general.sampling.top_k", 1 /* a float */}};
	size_t i;

	for (i = 0; i < sizeof bad / sizeof *bad; i++) {
		struct gguf_writer *w = tiny("llama", 1);

		gw_f32(w, bad[i].key, bad[i].v);
		must_refuse(w, -EINVAL, bad[i].key);
	}
}

/* ---- the content hash ---- */

static void hash_known_answers(void)
{
	static const uint8_t empty[4] = {0x0e, 0x57, 0x51, 0xc0}, abc[4] = {0xbd, 0xdd, 0x81, 0x3c};
	uint8_t out[32], again[32], data[1000];
	struct apr_hash s;
	size_t i, cut;

	apr_hash_init(&s);
	apr_hash_final(&s, out);
	CU_ASSERT_EQUAL(memcmp(out, empty, 4), 0);
	apr_hash_init(&s);
	apr_hash_update(&s, "abc", 3);
	apr_hash_final(&s, out);
	CU_ASSERT_EQUAL(memcmp(out, abc, 4), 0);
	for (i = 0; i < sizeof data; i++)
		data[i] = (uint8_t)(i * 7);
	apr_hash_init(&s);
	apr_hash_update(&s, data, sizeof data);
	apr_hash_final(&s, out);
	for (cut = 0; cut <= sizeof data; cut += 1) { /* the same however it is fed */
		apr_hash_init(&s);
		apr_hash_update(&s, data, cut);
		apr_hash_update(&s, data + cut, sizeof data - cut);
		apr_hash_final(&s, again);
		CU_ASSERT_EQUAL(memcmp(out, again, 32), 0);
	}
}

/* Any byte of the file changes it: a key's, a weight's, the last one. */
static void hash_covers_the_file(void)
{
	struct tiny_spec spec = {.n_layers = 1};
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	struct apr_model *a = must_open(w), *b;
	uint8_t first[32], *p;
	size_t n, at[3], i;
	char err[256];

	memcpy(first, a->weights_hash, 32);
	apr_model_close(a);
	b = must_open(apr_test_tiny_model(&spec));
	CU_ASSERT_EQUAL(memcmp(first, b->weights_hash, 32), 0);
	apr_model_close(b);
	w = apr_test_tiny_model(&spec);
	gw_finish(w, &p, &n);
	gw_free(w);
	at[0] = (size_t)((uint8_t *)memmem(p, n, "tiny", 4) - p);
	at[1] = n / 2;
	at[2] = n - 1;
	for (i = 0; i < 3; i++) {
		FILE *f = fopen(tmp_file(), "wb");

		CU_ASSERT_PTR_NOT_NULL_FATAL(f);
		p[at[i]] ^= 1;
		CU_ASSERT_EQUAL(fwrite(p, 1, n, f), n);
		fclose(f);
		p[at[i]] ^= 1;
		CU_ASSERT_EQUAL_FATAL(apr_model_open(&b, tmp_file(), err, sizeof err), 0);
		CU_ASSERT_NOT_EQUAL(memcmp(first, b->weights_hash, 32), 0);
		apr_model_close(b);
	}
	free(p);
}

/* A tree over many leaves is the same on one thread and on several. */
static void hash_tree_by_hand(void)
{
	size_t n = 20 * APR_HASH_LEAF + 12345, i;
	uint8_t *data = malloc(n), leaf[32], want[32], got[32];
	struct apr_hash root, s;

	if (!data)
		abort();
	for (i = 0; i < n; i++)
		data[i] = (uint8_t)(i * 2654435761u >> 24);
	apr_hash_init(&root);
	for (i = 0; i < n; i += APR_HASH_LEAF) {
		apr_hash_init(&s);
		apr_hash_update(&s, data + i, n - i < APR_HASH_LEAF ? n - i : APR_HASH_LEAF);
		apr_hash_final(&s, leaf);
		apr_hash_update(&root, leaf, 32);
	}
	apr_hash_final(&root, want);
	apr_hash_init(&root);
	CU_ASSERT_EQUAL(apr_hash_tree(&root, data, n), 0);
	apr_hash_final(&root, got);
	CU_ASSERT_EQUAL(memcmp(want, got, 32), 0);
	free(data);
}

/* glibc keeps a finished thread's stack, with a few hundred bytes of heap, for the next one. */
#define T(f) {#f, f, 0}
#define THREADS(f) {#f, f, KEEPS_HEAP}
static const struct apr_test tests[] = {
	T(llama), T(qwen2_and_qwen3), T(gemma3), T(gemma3_rope_bases), THREADS(real_models), T(separate_output),
	T(every_weight_type_opens), T(unknown_architecture), T(case28_equal_forms), T(case28_wrong_forms),
	T(case28_kv_heads_by_layer), T(case29_scalings), T(case29_wrong_scalings), T(case29_rope_freqs),
	T(case30_more_rows_than_tokens), T(case31_extra_tensor), T(case31_missing_tensors),
	T(case31_block_count_off_by_one), T(case31_llama_biases_are_optional), T(wrong_shapes), T(norms_are_f32),
	T(case32_sampling), T(case32_sampling_out_of_range), T(hash_known_answers), T(hash_covers_the_file),
	THREADS(hash_tree_by_hand),
};

TEST_MAIN("model/model", tests)
