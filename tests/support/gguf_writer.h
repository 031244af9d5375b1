/* SPDX-License-Identifier: MIT */
/*
 * Writes GGUF files for tests: any keys and tensors one likes, sound or not, and
 * whole small models of random weights.
 *
 * Owns: the bytes of the files it writes. Checks little on purpose: the readers
 * under test do that. Out of memory ends the test program.
 */
#ifndef APR_TEST_GGUF_WRITER_H
#define APR_TEST_GGUF_WRITER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Value types of GGUF keys, as numbered in the file. */
enum gw_type {
	GW_U8, GW_I8, GW_U16, GW_I16, GW_U32, GW_I32, GW_F32, GW_BOOL, GW_STR, GW_ARR, GW_U64, GW_I64, GW_F64
};

struct gguf_writer;

struct gguf_writer *gw_new(void); /* version 3, alignment 32 (no key written for it) */
void gw_free(struct gguf_writer *w);
void gw_set_version(struct gguf_writer *w, uint32_t version);
void gw_set_align(struct gguf_writer *w, uint32_t align); /* lays data so; writes no key */
void gw_set_counts(struct gguf_writer *w, uint64_t n_tensors, uint64_t n_kv); /* lies in the header */

/* Keys. A key written again stands twice in the file; gw_drop removes what was written before. */
void gw_u32(struct gguf_writer *w, const char *key, uint32_t v);
void gw_i32(struct gguf_writer *w, const char *key, int32_t v);
void gw_u64(struct gguf_writer *w, const char *key, uint64_t v);
void gw_f32(struct gguf_writer *w, const char *key, float v);
void gw_bool(struct gguf_writer *w, const char *key, bool v);
void gw_str(struct gguf_writer *w, const char *key, const char *s);
void gw_strn(struct gguf_writer *w, const char *key, const void *s, size_t len);
void gw_arr(struct gguf_writer *w, const char *key, enum gw_type elem, const void *v, uint64_t n); /* fixed-size */
void gw_arr_str(struct gguf_writer *w, const char *key, const char *const *v, uint64_t n);
void gw_raw(struct gguf_writer *w, const char *key, uint32_t type, const void *value, size_t len); /* as it is */
void gw_drop(struct gguf_writer *w, const char *key);

/* Tensors. data may be NULL (zeros). bytes is what is laid in the file. Returns its index.
 * gw_tensor_* change what the table says of a tensor, not the data. */
unsigned gw_tensor(struct gguf_writer *w, const char *name, uint32_t type, unsigned n_dims, const uint64_t *ne,
                   const void *data, uint64_t bytes);
void gw_drop_tensor(struct gguf_writer *w, const char *name);
void gw_tensor_offset(struct gguf_writer *w, unsigned i, uint64_t offset);

/* The whole file. *buf is malloc'ed. */
void gw_finish(const struct gguf_writer *w, uint8_t **buf, size_t *len);
/* What precedes the tensors' data, padded; with tensors whose data somebody else writes. */
void gw_finish_head(const struct gguf_writer *w, uint8_t **buf, size_t *len);
/* Where tensor i's data begin, counted from the end of the head */
uint64_t gw_tensor_at(const struct gguf_writer *w, unsigned i);
int gw_write(const struct gguf_writer *w, const char *path); /* 0 or -errno */

/*
 * A small random model. A zero field takes the default in brackets. Weights have
 * mean 0 and deviation 1/sqrt(n_in); norms are near 1; equal specs give equal
 * files. The vocabulary: ids 0..255 the single bytes in the GPT-2 order, then
 * "th" (the one merge), then pieces "<fillerN>", then <|bos|> and <|eos|> last.
 */
struct tiny_spec {
	const char *arch;     /* llama [llama], qwen2, qwen3, gemma3 */
	uint32_t n_layers;    /* [2] */
	uint32_t n_embd;      /* [256] */
	uint32_t n_ff;        /* [512] */
	uint32_t n_heads;     /* [4] */
	uint32_t n_kv_heads;  /* [2] */
	uint32_t head_dim;    /* [64] */
	uint32_t n_vocab;     /* [320], at least 259 */
	uint32_t n_ctx;       /* [2048] */
	uint32_t type;        /* enum apr_type of the matrices; 0 is F32 */
	uint32_t embd_type;   /* of token_embd and output, plus 1; 0 = as type */
	uint32_t wo_down_type; /* of attn_output and ffn_down, plus 1; 0 = as type */
	uint64_t seed;        /* [1] */
	bool separate_output; /* output.weight of its own */
	uint32_t planted;     /* so many rows of each ffn_up and attn_output are times 1,000 */
	uint32_t window;      /* gemma3 [16] */
	uint32_t pattern;     /* gemma3: sliding_window_pattern; 0 = no key (6) */
	float rope_base;      /* [10000] */
	uint32_t n_rot;       /* rope.dimension_count; 0 = no key */
	const char *rope_scaling; /* NULL = no key; linear, yarn */
	float rope_factor;    /* [4] where rope_scaling is set */
	uint32_t rope_original_ctx; /* [64] with yarn */
	bool rope_freqs;      /* adds rope_freqs.weight, rising from 1 to 8 */
	bool no_bos;          /* no bos_token_id, add_bos_token false */
	uint32_t nan_row;     /* row + 1 of blk.0.ffn_up.weight that has a NaN (F32, F16, Q8_0); 0 = none */
	uint32_t nan_token;   /* row + 1 of token_embd.weight that has one (the same types); with separate_output */
};

/* The writer with the spec's keys and vocabulary and no tensor; NULL for an unknown arch or too small a vocabulary. */
struct gguf_writer *apr_test_tiny_keys(const struct tiny_spec *spec);
uint16_t apr_test_to_f16(float f); /* to nearest even; finite; clamps at the largest */
/* Sets the scales of a block of random bytes so that its values have a deviation of about dev. */
void apr_test_scale_block(uint32_t type, uint8_t *block, float dev);
/* The writer with all keys and tensors of the spec, for a test to change; NULL where the
 * spec asks for a type whose blocks do not divide the row, or an unknown arch. */
struct gguf_writer *apr_test_tiny_model(const struct tiny_spec *spec);
/* Writes it: 0, -errno, or -EINVAL for such a spec. */
int apr_test_write_tiny_model(const char *path, const struct tiny_spec *spec);

#endif
