/* SPDX-License-Identifier: MIT */
/*
 * What a model is: a GGUF file (or its split parts) mapped read-only, checked
 * whole, and translated into hyper-parameters and a table of named weights.
 *
 * Owns: the mapping, every check of file contents, the architecture table.
 * Does not own: how weights are laid out for a backend (engine/), nor text
 * (model/tokenizer.h, which is built from the same open model).
 *
 * Which tensors a file must have: exactly those of its architecture, for layers
 * 0 .. block_count - 1. One that is missing is refused by name (token_embd,
 * output_norm, output, then by layer), and so is one that is left over (the first
 * in the file's order), for example of a layer beyond block_count: a model that
 * would silently run without some of its weights is not run. Left out at will are
 * output.weight (then tied to token_embd), rope_freqs.weight, and for llama the
 * biases of attn_q, attn_k, attn_v and attn_output (qwen2 must have the first
 * three). Norms, biases and rope_freqs are F32; matrices any type of types.h.
 *
 * Sliding windows are gemma3's alone: attention.sliding_window absent means none;
 * attention.sliding_window_pattern is the period of full layers (6 if absent) or
 * a bool for each layer, true where it is local.
 *
 * Functions return 0 or -errno and fill err (one line, naming the field) on
 * failure. A struct apr_model is immutable after open: any thread may read it.
 */
#ifndef APR_MODEL_H
#define APR_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/types.h"

#define APR_MODEL_MAX_LAYERS 512
#define APR_MODEL_MAX_END_IDS 16

enum apr_arch { APR_ARCH_LLAMA, APR_ARCH_QWEN2, APR_ARCH_QWEN3, APR_ARCH_GEMMA3 };
enum apr_ffn_act { APR_ACT_SILU, APR_ACT_GELU_TANH, APR_ACT_GELU, APR_ACT_RELU2 };
enum apr_rope_kind { APR_ROPE_NONE, APR_ROPE_PAIRS, APR_ROPE_HALVES };
enum apr_rope_scaling { APR_ROPE_SCALING_NONE, APR_ROPE_SCALING_LINEAR, APR_ROPE_SCALING_YARN };

struct apr_weight { /* data points into the mapping; rows of n_in contiguous elements */
	const void *data;
	uint64_t bytes;
	uint32_t type;        /* enum apr_type */
	uint32_t n_in, n_out; /* GGUF ne[0], ne[1]; a vector has n_out 1 */
};
/* A weight that the model does not have has data == NULL. */

struct apr_layer {
	struct apr_weight attn_norm, post_attn_norm; /* post_*: gemma3 only */
	struct apr_weight wq, wk, wv, wo;
	struct apr_weight bq, bk, bv, bo;
	struct apr_weight q_norm, k_norm; /* per head, over the head's dimension */
	struct apr_weight ffn_norm, post_ffn_norm;
	struct apr_weight gate, up, down;
	uint32_t n_kv_heads; /* head_count_kv may be given by layer */
	uint32_t window;     /* 0 = full attention; else the last `window` positions, own included */
	float rope_base;
	bool rope_scaled;    /* file's scaling applies (gemma3: full layers only) */
};

struct apr_rope {
	enum apr_rope_kind kind;
	enum apr_rope_scaling scaling;
	uint32_t n_rot;
	float factor;             /* linear, yarn: >= 1 */
	uint32_t original_ctx;    /* yarn */
	float ext_factor, attn_factor, beta_fast, beta_slow; /* yarn: 1, 1, 32, 1 unless the file says otherwise;
	                                                      * attn_factor multiplies the usual 1 + 0.1 ln(factor) */
	const float *freq_factors; /* rope_freqs.weight: n_rot / 2 values, or NULL */
};

/* apr_model_sampling.have, the same bits as APR_SET_* of the wire */
#define APR_FILE_TEMPERATURE 0x0001u
#define APR_FILE_TOP_K 0x0002u
#define APR_FILE_TOP_P 0x0004u
#define APR_FILE_MIN_P 0x0008u
#define APR_FILE_REPEAT 0x0010u
#define APR_FILE_FREQUENCY 0x0020u
#define APR_FILE_PRESENCE 0x0040u
#define APR_FILE_WINDOW 0x0080u

/* general.sampling.* of the file: temp, top_k, top_p, min_p, penalty_repeat, penalty_freq,
 * penalty_present, penalty_last_n. A value outside its range is refused by name; other keys
 * of that family (samplers not built here) are left unread. */
struct apr_model_sampling {
	uint32_t have; /* which fields the file gives; the others hold 0 */
	float temperature, top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty;
	int32_t top_k, penalty_window;
};

struct apr_model {
	char *path, *name; /* general.name or the file's */
	enum apr_arch arch;
	const char *arch_name;
	uint32_t n_layers, n_embd, n_ff, n_heads, n_ctx_train;
	uint32_t n_vocab;  /* rows of token_embd and output, so logits a row */
	uint32_t n_tokens; /* ids of the tokenizer's tables, <= n_vocab: a row from here on is padding, never to be
	                    * sampled nor counted. n_vocab where the file has no tokenizer */
	uint32_t head_dim, v_dim; /* key_length, value_length */
	float norm_eps;
	float embd_scale;    /* gemma3: sqrt(n_embd); else 1 */
	float attn_scale;    /* 1/sqrt(head_dim) unless the file says otherwise */
	float attn_softcap, logit_softcap; /* 0 = none */
	enum apr_ffn_act act;
	struct apr_rope rope;
	struct apr_weight tok_embd, output_norm, output; /* output == tok_embd where tied */
	bool tied;
	struct apr_layer *layers;
	struct apr_model_sampling sampling;
	uint64_t weight_bytes;    /* sum over tensors used */
	uint8_t weights_hash[32]; /* covers every byte of every part, keys and weights: BLAKE2b-256 over the lengths of
	                           * the parts and the BLAKE2b-256 of each MiB (model/hash.h) */
	struct gguf *gguf;
};

/* Opens path (a GGUF file, or the first part NAME-00001-of-0000N.gguf of a split one).
 * Never trusts the file: every size is checked against its length before use.
 * ENOENT, EACCES, EINVAL (damaged), ENOTSUP (sound but not a model we run), ENOMEM. */
int apr_model_open(struct apr_model **out, const char *path, char *err, size_t errlen);
void apr_model_close(struct apr_model *m); /* NULL is fine */

#endif
