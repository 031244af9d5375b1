/* SPDX-License-Identifier: MIT */
/*
 * Small random models for tests (see gguf_writer.h): every architecture and
 * weight type, from a seed. Quantised blocks are random bits under scales that
 * give the wanted deviation; their bytes are not the quantisation of anything.
 */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/types.h"
#include "tests/support/gguf_writer.h"

struct rng {
	uint64_t s;
};

static uint64_t next_u64(struct rng *r) /* splitmix64 */
{
	uint64_t z = r->s += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	return z ^ (z >> 31);
}

/* Near normal, deviation 1: the sum of four 16-bit uniforms. */
static float next_normal(struct rng *r)
{
	uint64_t u = next_u64(r);
	int32_t sum = (int32_t)(u & 0xffff) + (int32_t)(u >> 16 & 0xffff) + (int32_t)(u >> 32 & 0xffff) +
	              (int32_t)(u >> 48);

	return (float)(sum - 131070) / 37837.0f; /* 65536 * sqrt(4 / 12) */
}

uint16_t apr_test_to_f16(float f) /* round to nearest even; finite input */
{
	uint32_t x, sign, mant, half, shift, rest;
	int32_t e;

	memcpy(&x, &f, sizeof x);
	sign = x >> 16 & 0x8000;
	e = (int32_t)(x >> 23 & 0xff) - 112;
	mant = (x & 0x7fffff) | 0x800000;
	if (e >= 31)
		return (uint16_t)(sign | 0x7bff);
	if (e < -10)
		return (uint16_t)sign;
	shift = e > 0 ? 13 : (uint32_t)(14 - e);
	half = mant >> shift;
	rest = mant & ((1u << shift) - 1);
	if (rest > 1u << (shift - 1) || (rest == 1u << (shift - 1) && (half & 1)))
		half++;
	return (uint16_t)(sign | (e > 0 ? ((uint32_t)(e - 1) << 10) + half : half));
}

static uint16_t to_bf16(float f)
{
	uint32_t x;

	memcpy(&x, &f, sizeof x);
	return (uint16_t)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}

static void put_f16(uint8_t *p, float f)
{
	uint16_t h = apr_test_to_f16(f);

	memcpy(p, &h, sizeof h);
}

/* The divisors are the deviation of a block's integers under a unit scale, the minima centre them. */
void apr_test_scale_block(uint32_t type, uint8_t *p, float dev)
{
	unsigned i;

	switch (type) {
	case APR_TYPE_Q4_0:
		put_f16(p, dev / 4.6f);
		break;
	case APR_TYPE_Q4_1:
		put_f16(p, dev / 4.6f);
		put_f16(p + 2, -7.5f * (dev / 4.6f));
		break;
	case APR_TYPE_Q5_0:
		put_f16(p, dev / 9.2f);
		break;
	case APR_TYPE_Q5_1:
		put_f16(p, dev / 9.2f);
		put_f16(p + 2, -15.5f * (dev / 9.2f));
		break;
	case APR_TYPE_Q8_0:
		put_f16(p, dev / 74.0f);
		break;
	case APR_TYPE_Q2_K:
		put_f16(p + 80, dev / 13.9f);
		put_f16(p + 82, 1.5f * (dev / 13.9f));
		break;
	case APR_TYPE_Q3_K:
		put_f16(p + 108, dev / 43.0f);
		break;
	case APR_TYPE_Q4_K:
		put_f16(p, dev / 257.0f);
		put_f16(p + 2, 7.5f * (dev / 257.0f));
		break;
	case APR_TYPE_Q5_K:
		put_f16(p, dev / 524.0f);
		put_f16(p + 2, 15.5f * (dev / 524.0f));
		break;
	case APR_TYPE_Q6_K:
		for (i = 0; i < 16; i++)
			p[192 + i] = (uint8_t)(6 + p[192 + i] % 5);
		put_f16(p + 208, dev / 152.0f);
		break;
	default:
		break;
	}
}

/* One block of random bits whose values have deviation about `dev`. */
static void quant_block(struct rng *r, uint32_t type, uint8_t *p, unsigned bytes, float dev)
{
	unsigned i;

	for (i = 0; i < bytes; i++)
		p[i] = (uint8_t)next_u64(r);
	apr_test_scale_block(type, p, dev);
}

static void fill_row(struct rng *r, uint32_t type, uint8_t *p, uint32_t n, float dev)
{
	struct apr_type_info ti = apr_type_info(type);
	uint32_t i;

	for (i = 0; i < n / ti.block; i++, p += ti.block_bytes) {
		if (type == APR_TYPE_F32) {
			float f = dev * next_normal(r);

			memcpy(p, &f, sizeof f);
		} else if (type == APR_TYPE_F16) {
			put_f16(p, dev * next_normal(r));
		} else if (type == APR_TYPE_BF16) {
			uint16_t h = to_bf16(dev * next_normal(r));

			memcpy(p, &h, sizeof h);
		} else {
			quant_block(r, type, p, ti.block_bytes, dev);
		}
	}
}

/* The first value, or the first block's scale; false where the type has no place for it. */
static bool put_nan(uint8_t *p, uint32_t type)
{
	static const uint16_t half = 0x7e00;
	static const float nan = NAN;

	if (type == APR_TYPE_F32)
		memcpy(p, &nan, sizeof nan);
	else if (type == APR_TYPE_F16 || type == APR_TYPE_Q8_0)
		memcpy(p, &half, sizeof half);
	else
		return false;
	return true;
}

struct tiny { /* the spec with its defaults, and what is being written */
	struct tiny_spec s;
	struct gguf_writer *w;
	struct rng rng;
	bool bad;
};

static void matrix(struct tiny *t, const char *name, uint32_t type, uint32_t n_in, uint32_t n_out, uint32_t planted)
{
	struct apr_type_info ti = apr_type_info(type);
	uint64_t ne[2] = {n_in, n_out}, row_bytes;
	uint8_t *data;
	uint32_t i, nan_at;

	if (!ti.block || n_in % ti.block) {
		t->bad = true;
		return;
	}
	row_bytes = (uint64_t)n_in / ti.block * ti.block_bytes;
	data = malloc(row_bytes * n_out);
	if (!data)
		abort();
	for (i = 0; i < n_out; i++) {
		/* planted rows lie spread over the matrix */
		bool big = planted && i % (n_out / planted ? n_out / planted : 1) == 0;

		fill_row(&t->rng, type, data + i * row_bytes, n_in, (big ? 1000.0f : 1.0f) / sqrtf((float)n_in));
	}
	nan_at = !strcmp(name, "blk.0.ffn_up.weight") ? t->s.nan_row : !strcmp(name, "token_embd.weight") ? t->s.nan_token : 0;
	if (nan_at && nan_at <= n_out)
		t->bad |= !put_nan(data + (nan_at - 1) * row_bytes, type);
	gw_tensor(t->w, name, type, 2, ne, data, row_bytes * n_out);
	free(data);
}

static void vector(struct tiny *t, const char *name, uint32_t n, float mean, float dev)
{
	uint64_t ne = n;
	float *v = malloc(n * sizeof *v);
	uint32_t i;

	if (!v)
		abort();
	for (i = 0; i < n; i++)
		v[i] = mean + dev * next_normal(&t->rng);
	gw_tensor(t->w, name, APR_TYPE_F32, 1, &ne, v, n * sizeof *v);
	free(v);
}

static void key(struct tiny *t, char *buf, size_t len, const char *suffix)
{
	snprintf(buf, len, "%s.%s", t->s.arch, suffix);
}

static void arch_u32(struct tiny *t, const char *suffix, uint32_t v)
{
	char k[96];

	key(t, k, sizeof k, suffix);
	gw_u32(t->w, k, v);
}

static void arch_f32(struct tiny *t, const char *suffix, float v)
{
	char k[96];

	key(t, k, sizeof k, suffix);
	gw_f32(t->w, k, v);
}

static void put_hparams(struct tiny *t)
{
	const struct tiny_spec *s = &t->s;
	char k[96];

	gw_str(t->w, "general.architecture", s->arch);
	gw_str(t->w, "general.name", "tiny");
	arch_u32(t, "context_length", s->n_ctx);
	arch_u32(t, "embedding_length", s->n_embd);
	arch_u32(t, "block_count", s->n_layers);
	arch_u32(t, "feed_forward_length", s->n_ff);
	arch_u32(t, "attention.head_count", s->n_heads);
	arch_u32(t, "attention.head_count_kv", s->n_kv_heads);
	arch_u32(t, "attention.key_length", s->head_dim);
	arch_u32(t, "attention.value_length", s->head_dim);
	arch_f32(t, "attention.layer_norm_rms_epsilon", 1e-5f);
	arch_f32(t, "rope.freq_base", s->rope_base);
	arch_u32(t, "vocab_size", s->n_vocab);
	if (s->n_rot)
		arch_u32(t, "rope.dimension_count", s->n_rot);
	if (!strcmp(s->arch, "gemma3")) {
		arch_u32(t, "attention.sliding_window", s->window);
		if (s->pattern)
			arch_u32(t, "attention.sliding_window_pattern", s->pattern);
	}
	if (s->rope_scaling) {
		key(t, k, sizeof k, "rope.scaling.type");
		gw_str(t->w, k, s->rope_scaling);
		arch_f32(t, "rope.scaling.factor", s->rope_factor);
		if (!strcmp(s->rope_scaling, "yarn"))
			arch_u32(t, "rope.scaling.original_context_length", s->rope_original_ctx);
	}
}

/* The GPT-2 alphabet: printable bytes stand for themselves, the others for U+0100 and up. */
static void byte_piece(unsigned index, char out[4])
{
	static const uint8_t first[3] = {33, 161, 174}, last[3] = {126, 172, 255};
	unsigned i, c = 0, n = index;

	for (i = 0; i < 3; i++) {
		unsigned span = last[i] - first[i] + 1u;

		if (n < span) {
			c = first[i] + n;
			break;
		}
		n -= span;
	}
	if (i == 3)
		c = 256 + n;
	if (c < 128) {
		out[0] = (char)c;
		out[1] = 0;
	} else {
		out[0] = (char)(0xc0 | c >> 6);
		out[1] = (char)(0x80 | (c & 63));
		out[2] = 0;
	}
}

static void put_vocab(struct tiny *t)
{
	uint32_t n = t->s.n_vocab, i;
	char(*text)[24] = calloc(n, sizeof *text);
	const char **pieces = calloc(n, sizeof *pieces);
	int32_t *kinds = calloc(n, sizeof *kinds);
	static const char *const merges[] = {"t h"};

	if (!text || !pieces || !kinds)
		abort();
	for (i = 0; i < n; i++) {
		pieces[i] = text[i];
		kinds[i] = i < n - 2 ? 1 : 3;
		if (i < 256)
			byte_piece(i, text[i]);
		else if (i == n - 2)
			snprintf(text[i], sizeof text[i], "<|bos|>");
		else if (i == n - 1)
			snprintf(text[i], sizeof text[i], "<|eos|>");
		else if (i == 256)
			snprintf(text[i], sizeof text[i], "th");
		else
			snprintf(text[i], sizeof text[i], "<filler%u>", i - 257);
	}
	gw_str(t->w, "tokenizer.ggml.model", "gpt2");
	gw_str(t->w, "tokenizer.ggml.pre", !strncmp(t->s.arch, "qwen", 4) ? "qwen2" : "llama-bpe");
	gw_arr_str(t->w, "tokenizer.ggml.tokens", pieces, n);
	gw_arr(t->w, "tokenizer.ggml.token_type", GW_I32, kinds, n);
	gw_arr_str(t->w, "tokenizer.ggml.merges", merges, 1);
	if (!t->s.no_bos)
		gw_u32(t->w, "tokenizer.ggml.bos_token_id", n - 2);
	gw_u32(t->w, "tokenizer.ggml.eos_token_id", n - 1);
	gw_bool(t->w, "tokenizer.ggml.add_bos_token", !t->s.no_bos);
	free(text);
	free(pieces);
	free(kinds);
}

static void layer_matrix(struct tiny *t, uint32_t l, const char *name, uint32_t type, uint32_t n_in, uint32_t n_out,
                         uint32_t planted)
{
	char full[64];

	snprintf(full, sizeof full, "blk.%u.%s.weight", l, name);
	matrix(t, full, type, n_in, n_out, planted);
}

static void layer_vector(struct tiny *t, uint32_t l, const char *name, uint32_t n, float mean)
{
	char full[64];

	snprintf(full, sizeof full, "blk.%u.%s", l, name);
	vector(t, full, n, mean, 0.1f);
}

static void put_layer(struct tiny *t, uint32_t l)
{
	const struct tiny_spec *s = &t->s;
	uint32_t q = s->n_heads * s->head_dim, kv = s->n_kv_heads * s->head_dim;
	uint32_t out_type = s->wo_down_type ? s->wo_down_type - 1 : s->type;
	bool gemma = !strcmp(s->arch, "gemma3");

	layer_vector(t, l, "attn_norm.weight", s->n_embd, 1.0f);
	layer_matrix(t, l, "attn_q", s->type, s->n_embd, q, 0);
	layer_matrix(t, l, "attn_k", s->type, s->n_embd, kv, 0);
	layer_matrix(t, l, "attn_v", s->type, s->n_embd, kv, 0);
	layer_matrix(t, l, "attn_output", out_type, q, s->n_embd, s->planted);
	if (!strcmp(s->arch, "qwen2")) {
		layer_vector(t, l, "attn_q.bias", q, 0.0f);
		layer_vector(t, l, "attn_k.bias", kv, 0.0f);
		layer_vector(t, l, "attn_v.bias", kv, 0.0f);
	}
	if (gemma || !strcmp(s->arch, "qwen3")) {
		layer_vector(t, l, "attn_q_norm.weight", s->head_dim, 1.0f);
		layer_vector(t, l, "attn_k_norm.weight", s->head_dim, 1.0f);
	}
	if (gemma)
		layer_vector(t, l, "post_attention_norm.weight", s->n_embd, 1.0f);
	layer_vector(t, l, "ffn_norm.weight", s->n_embd, 1.0f);
	layer_matrix(t, l, "ffn_gate", s->type, s->n_embd, s->n_ff, 0);
	layer_matrix(t, l, "ffn_up", s->type, s->n_embd, s->n_ff, s->planted);
	layer_matrix(t, l, "ffn_down", out_type, s->n_ff, s->n_embd, 0);
	if (gemma)
		layer_vector(t, l, "post_ffw_norm.weight", s->n_embd, 1.0f);
}

static void put_rope_freqs(struct tiny *t)
{
	uint32_t n = (t->s.n_rot ? t->s.n_rot : t->s.head_dim) / 2, i;
	uint64_t ne = n;
	float *v = malloc((n + 1) * sizeof *v);

	if (!v)
		abort();
	for (i = 0; i < n; i++)
		v[i] = 1.0f + 7.0f * (float)i / (float)(n > 1 ? n - 1 : 1);
	gw_tensor(t->w, "rope_freqs.weight", APR_TYPE_F32, 1, &ne, v, n * sizeof *v);
	free(v);
}

static void set_defaults(struct tiny_spec *s)
{
#define DEFAULT(field, value) s->field = s->field ? s->field : (value)
	DEFAULT(arch, "llama");
	DEFAULT(n_layers, 2);
	DEFAULT(n_embd, 256);
	DEFAULT(n_ff, 512);
	DEFAULT(n_heads, 4);
	DEFAULT(n_kv_heads, 2);
	DEFAULT(head_dim, 64);
	DEFAULT(n_vocab, 320);
	DEFAULT(n_ctx, 2048);
	DEFAULT(seed, 1);
	DEFAULT(window, 16);
	DEFAULT(rope_factor, 4.0f);
	DEFAULT(rope_original_ctx, 64);
#undef DEFAULT
	if (s->rope_base <= 0.0f)
		s->rope_base = 10000.0f;
}

/* t.w is NULL where there is no such architecture, or no room for the fixed pieces. */
static void begin_file(struct tiny *t, const struct tiny_spec *spec)
{
	static const char *const known[] = {"llama", "qwen2", "qwen3", "gemma3"};
	uint32_t i;

	*t = (struct tiny){.s = *spec};
	set_defaults(&t->s);
	for (i = 0; i < 4 && strcmp(known[i], t->s.arch) != 0; i++)
		;
	if (i == 4 || t->s.n_vocab < 259)
		return;
	t->w = gw_new();
	t->rng.s = t->s.seed;
	put_hparams(t);
	put_vocab(t);
}

struct gguf_writer *apr_test_tiny_keys(const struct tiny_spec *spec)
{
	struct tiny t;

	begin_file(&t, spec);
	return t.w;
}

struct gguf_writer *apr_test_tiny_model(const struct tiny_spec *spec)
{
	struct tiny t;
	uint32_t embd_type, i;

	begin_file(&t, spec);
	if (!t.w)
		return NULL;
	embd_type = t.s.embd_type ? t.s.embd_type - 1 : t.s.type;
	matrix(&t, "token_embd.weight", embd_type, t.s.n_embd, t.s.n_vocab, 0);
	vector(&t, "output_norm.weight", t.s.n_embd, 1.0f, 0.1f);
	if (t.s.separate_output)
		matrix(&t, "output.weight", embd_type, t.s.n_embd, t.s.n_vocab, 0);
	if (t.s.rope_freqs)
		put_rope_freqs(&t);
	for (i = 0; i < t.s.n_layers; i++)
		put_layer(&t, i);
	if (t.bad) {
		gw_free(t.w);
		return NULL;
	}
	return t.w;
}

int apr_test_write_tiny_model(const char *path, const struct tiny_spec *spec)
{
	struct gguf_writer *w = apr_test_tiny_model(spec);
	int rc = w ? gw_write(w, path) : -EINVAL;

	gw_free(w);
	return rc;
}
