/* SPDX-License-Identifier: MIT */
/*
 * The ops of kernels/ops.h as launches on a CUDA stream, and the weights they read.
 *
 * Owns: the device layout of weights (decode tiles), the launch functions, what
 * scratch they need. Does not own streams, graphs, cuBLAS, memory or the step
 * (graphs/). Nothing here allocates, waits for the device or copies: every function
 * that takes a struct apr_cuda_launch only enqueues, and may be captured.
 *
 * Rows: addresses of the step's rows are fixed; what they hold is read on the
 * device (struct apr_cuda_rows), so a captured launch serves every step of its
 * bucket. l->bucket is the number of rows that the launch can serve; rows at or
 * past *rows.n are not read and not written. slot[i] == APR_CUDA_DEAD: row i
 * computes nothing that is kept: no KV is written for it and its o is zero.
 * What the rows are (struct apr_cuda_rows), page tables and the keys and values of
 * positions before the step's own do not change while its launches run: kernels of
 * decode read them before the kernel ahead of them has ended.
 *
 * Bits: a row's results depend on that row alone: not on the bucket, its place in
 * it, the other rows, the page placement nor the grid. apr_cuda_decode_* and
 * apr_cuda_prefill_* are two arithmetics (ENGINE, section 1).
 *
 * Returns: 0; -ENOTSUP (a shape or type with no kernel; nothing enqueued);
 * -EINVAL; -EIO where the CUDA runtime refused a launch (cudaGetLastError has it).
 */
#ifndef APR_KERNELS_CUDA_OPS_CUDA_H
#define APR_KERNELS_CUDA_OPS_CUDA_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cuda/attn_cut.h"
#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

struct apr_seen; /* kernels/common/sample.h */

#define APR_CUDA_DEAD 0xffffffffu
#define APR_CUDA_DECODE_ROWS 64u /* the largest decode bucket */

/* ---- weights -------------------------------------------------------------------- */

/* How a weight lies in decode tiles. Types without tiles of their own become F16. */
enum apr_cuda_tile {
	APR_TILE_Q4_K,
	APR_TILE_Q6_K,
	APR_TILE_Q8_0,
	APR_TILE_Q4_1,
	APR_TILE_Q5_0,
	APR_TILE_F16,
	APR_TILE_BF16,
	APR_TILE_N,
	APR_TILE_RAW = 15 /* the file's own blocks, row by row, a matrix after the other: for the exact route, not for decode */
};

/* Order of rows in the tiles, so that what an epilogue joins lies side by side. */
enum apr_cuda_order {
	APR_ORDER_PLAIN,
	APR_ORDER_ROPE_HALVES, /* in each head of dim rows: i and i + half are neighbours, i < half */
	APR_ORDER_GATE_UP      /* eight rows of the first matrix, eight of the second, and so on */
};

struct apr_mat {          /* lives as long as the model; everything it points to is device memory */
	uint32_t type;        /* enum apr_type, as in the file */
	uint32_t tile;        /* enum apr_cuda_tile */
	uint32_t n_in, n_out; /* n_out counts both matrices of APR_ORDER_GATE_UP */
	uint32_t order, dim, half;
	const uint8_t *tiles; /* 128-aligned */
};

/* The tile that a file's type becomes. */
uint32_t apr_cuda_tile_of(uint32_t type);
/* Bytes of the tiles; 0 where the shape is not one we can read (n_in not a multiple of the block, 0, too large). */
size_t apr_cuda_tile_bytes(uint32_t tile, uint32_t n_in, uint32_t n_out);
/* Fills m->tiles (dst, that many bytes) from device copies of the file's blocks, on the stream. m's other fields say
 * type, tile, shape and order. b: the second matrix of APR_ORDER_GATE_UP, same type and rows as a; else NULL. */
int apr_cuda_repack(cudaStream_t stream, const struct apr_mat *m, const void *a, const void *b, uint8_t *dst);

enum apr_cuda_real { APR_REAL_F32, APR_REAL_F16, APR_REAL_BF16, APR_REAL_E4M3 };
/* Rows first … first + n - 1 of m, in the file's order (gate's, then up's), to dst: n × n_in, row-major. E4M3: each row
 * is divided by scale[row - first] = max |w| / 448, which is written. All other types: scale NULL. */
int apr_cuda_unpack(cudaStream_t stream, const struct apr_mat *m, uint32_t first, uint32_t n, enum apr_cuda_real real,
                    void *dst, float *scale);
/* All rows of m to F16 in the file's order, many times faster: the numbers that apr_cuda_unpack gives. */
int apr_cuda_unpack_f16(cudaStream_t stream, const struct apr_mat *m, void *dst);

/* ---- launches -------------------------------------------------------------------- */

struct apr_cuda_rows { /* device addresses; see struct apr_rows */
	const uint32_t *n, *n_out;
	const int32_t *tok;
	const uint32_t *pos, *slot, *out;
};

struct apr_cuda_launch {
	cudaStream_t stream;
	struct apr_cuda_rows rows;
	uint32_t bucket; /* rows of this launch's bucket */
	uint32_t sms;    /* multiprocessors to fill */
	bool pdl;        /* programmatic dependent launch between these kernels */
	bool generated;  /* attention of these rows is apr_cuda_decode_attn */
	void *scratch;   /* apr_cuda_scratch_bytes() bytes, 256-aligned, zeroed once at start */
	size_t scratch_bytes;
};

struct apr_cuda_limits { /* the largest values any op call of the model has */
	uint32_t rows, n_embd, n_ff, n_heads, n_kv_heads, k_dim, v_dim, n_ctx;
};
/* Scratch of the decode ops and of divided prompts' attention; 0: overflow. */
size_t apr_cuda_scratch_bytes(const struct apr_cuda_limits *l);

/* Decode: at most APR_CUDA_DECODE_ROWS rows, weights from their tiles. Rotation by halves wants wq and wk in
 * APR_ORDER_ROPE_HALVES to be part of the projection (else a launch more); gate and up are one matrix in
 * APR_ORDER_GATE_UP, given as both op->gate and op->up. */
int apr_cuda_decode_attn_in(const struct apr_cuda_launch *l, const struct apr_op_attn_in *op);
int apr_cuda_decode_attn(const struct apr_cuda_launch *l, const struct apr_op_attn *op);
int apr_cuda_decode_proj(const struct apr_cuda_launch *l, const struct apr_op_proj *op);
int apr_cuda_decode_ffn_in(const struct apr_cuda_launch *l, const struct apr_op_ffn_in *op);
/* Logits of all *rows.n_out rows (at most l->bucket). */
int apr_cuda_decode_head(const struct apr_cuda_launch *l, const struct apr_op_head *op);

/* ---- prefill: what stands around the GEMMs ------------------------------------------ */

/* GEMM inputs are rows of h in one of four forms. F16: each row is times a power of two, its inverse in row_scale;
 * E4M3: each row is divided by row_scale = max |h| / 448; BF16, F32: as they are, row_scale NULL. GEMM outputs are
 * F32; those of F16 inputs are still to be multiplied by row_scale, by whoever reads them (scale below, or NULL). */
struct apr_cuda_gemm_in {
	enum apr_cuda_real real;
	void *rows;       /* padded × n, row-major */
	float *row_scale; /* [padded] */
	uint32_t padded;  /* at least l->bucket; rows past the live ones are zeroed */
	bool fused;       /* F16 in the order that apr_cuda_fused_gemm reads, padded a multiple of 8; else row-major */
	const uint32_t *pick; /* device: which row of x and y (or of in) each is; NULL: the same */
};
struct apr_cuda_scales { /* outer factors still owed to a GEMM's output; either may be NULL */
	const float *row;     /* of a row of the input */
	const float *channel; /* of a row of the weight: of its first output on */
};
/* What a product left to do to its output: times scales, plus bias. Exactly what apr_cuda_prefill_finish does. */
struct apr_cuda_owed {
	struct apr_cuda_scales scale;
	const float *bias; /* or NULL */
};
/* x_out = x + post(y); h = norm(x_out) → dst. y NULL: x_out = x. owed, or NULL: what y lacks, added on the way: y itself
 * stays as it is. owed's row scales may be dst's: a row's are read before they are written. */
int apr_cuda_prefill_norm(const struct apr_cuda_launch *l, const float *x, const float *y, float *x_out,
                          struct apr_norm post, struct apr_norm norm, uint32_t n, const struct apr_cuda_owed *owed,
                          const struct apr_cuda_gemm_in *dst);
int apr_cuda_prefill_convert(const struct apr_cuda_launch *l, const float *in, uint32_t n,
                             const struct apr_cuda_gemm_in *dst);
/* q, k, v: GEMM outputs, ld floats between rows: bias, norm of each head, rotation; q to op->q, k and v to pages, in one
 * launch. op's x, y and matrices are not looked at. Where keys and values are F16 and heads of 64, 128 or 256 (both the
 * same), a row of op->q, n_heads × k_dim × 4 bytes apart as ever, gets F16: each head times a power of two, then their
 * inverses as floats; so apr_cuda_prefill_attn reads it. Elsewhere, and where l->generated, op->q is F32,
 * and q may be op->q itself. Channels: q's, k's, v's. */
int apr_cuda_prefill_heads(const struct apr_cuda_launch *l, const struct apr_op_attn_in *op, const float *q,
                           uint32_t ld_q, const float *k, uint32_t ld_k, const float *v, uint32_t ld_v,
                           struct apr_cuda_scales scale);
/* a = act(gate) · up, or act(up) where gate is NULL; ld floats between rows of each. Channels: gate's, up's. */
int apr_cuda_prefill_act(const struct apr_cuda_launch *l, uint32_t act, const float *gate, const float *up, uint32_t ld,
                         float *a, uint32_t n, struct apr_cuda_scales scale);
/* The same, to dst instead of memory: the next product's input. -ENOTSUP: n is above 32,768. The
 * scales' rows may be dst's. */
int apr_cuda_prefill_act_in(const struct apr_cuda_launch *l, uint32_t act, const float *gate, const float *up,
                            uint32_t ld, uint32_t n, struct apr_cuda_scales scale, const struct apr_cuda_gemm_in *dst);
/* y = from · scales + bias; from may be y; bias may be NULL */
int apr_cuda_prefill_finish(const struct apr_cuda_launch *l, float *y, const float *from, uint32_t n,
                            struct apr_cuda_scales scale, const float *bias);
/* l->bucket rows of logits, in place: scaled, soft-capped. Rows at or past *n_live stay. */
int apr_cuda_cap_logits(const struct apr_cuda_launch *l, float *logits, uint32_t n, float scale, float softcap,
                        const uint32_t *n_live);

/* out[row][first of each …] = in · wᵀ, ld floats between rows, of at most three matrices side by side, straight from
 * their tiles. in: F16 rows in the fused order, apr_cuda_fused_columns(bucket) of them. Row scales are still owed. */
uint32_t apr_cuda_fused_columns(uint32_t bucket);
int apr_cuda_fused_gemm(const struct apr_cuda_launch *l, const struct apr_mat *const *w, uint32_t n, const void *in,
                        float *out, uint32_t ld);

/* ---- what a GEMM must equal -------------------------------------------------------------- */

/* rows × k inputs of wide exponents, of this seed: F16 (row-major or in the fused order), E4M3 or F32 */
int apr_cuda_fill_wide(cudaStream_t stream, enum apr_cuda_real real, bool fused, uint32_t rows, uint32_t k, void *dst);
/* out[rows][n] = in[rows][k] · w[n][k]ᵀ, F16, row-major: the plain ascending loop of m16n8k16 */
int apr_cuda_gemm_loop(cudaStream_t stream, const void *w, const void *in, float *out, uint32_t n, uint32_t k,
                       uint32_t rows);
/* hash[row] of the bits of n floats from each row on */
int apr_cuda_row_hash(cudaStream_t stream, const float *out, uint32_t n, uint32_t rows, uint64_t *hash);

/* Blocks that a tile keeps busy, and parts that the scratch of these limits holds: for apr_cuda_attn_cut. */
uint32_t apr_cuda_attn_items(const struct apr_cuda_limits *l);
uint32_t apr_cuda_attn_parts(const struct apr_cuda_limits *l);
/* tiles, n_tiles[2]: device memory, as apr_cuda_attn_cut makes them; max_tiles bounds both kinds together. A row's
 * result does not depend on how rows are cut into tiles, nor tiles divided. */
int apr_cuda_prefill_attn(const struct apr_cuda_launch *l, const struct apr_op_attn *op,
                          const struct apr_cuda_attn_tile *tiles, const uint32_t *n_tiles, uint32_t max_tiles);

/* ---- choosing tokens ------------------------------------------------------------------ */

enum apr_cuda_draw_kind { APR_CUDA_SAMPLE, APR_CUDA_SCORE };

/* One row of logits and what to do with it, in device memory; see struct apr_sample_params. Values are in range. */
struct apr_cuda_draw {
	uint32_t kind;
	float temperature, top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty;
	uint32_t top_k;
	uint64_t seed;
	uint32_t sample, position;
	uint32_t n_bias, n_seen;
	const uint32_t *bias_id; /* device; an id may stand more than once */
	const float *bias;
	const struct apr_seen *seen; /* device; each id once */
	uint32_t score_id;           /* SCORE: whose log-probability */
	uint32_t want_logprob, n_top;
};
/* What comes of it. step is stored last, with release at system scope: a reader that acquires it has the rest. */
struct apr_cuda_record {
	uint32_t id;
	float logprob;    /* of the raw logits; where asked for */
	uint32_t numeric; /* NaN or +inf among the logits, or nothing left to draw: id is meaningless */
	uint32_t n_top;
	uint32_t reserved[11];
	uint32_t step;
};
struct apr_cuda_top { /* best of the raw logits, descending, ties to the lowest id */
	uint32_t id[20];
	float logprob[20];
};
#define APR_CUDA_MAX_VOCAB 360000u
/* logits: l->bucket rows of n_vocab (ld floats apart). Rows at or past *n_draws are not looked at. records, tops: one a
 * row, device memory or registered host memory; tops may be NULL where no draw has n_top. step: read on the device. The
 * same token as apr_sample, bit for bit, from the same logits. -ENOTSUP: n_vocab above APR_CUDA_MAX_VOCAB. */
int apr_cuda_sample(const struct apr_cuda_launch *l, const float *logits, uint32_t n_vocab, size_t ld,
                    const struct apr_cuda_draw *draws, const uint32_t *n_draws, const uint32_t *step,
                    struct apr_cuda_record *records, struct apr_cuda_top *tops);

/* Both arithmetics. */
int apr_cuda_embed(const struct apr_cuda_launch *l, const struct apr_op_embed *op);

#ifdef __cplusplus
}
#endif

#endif
