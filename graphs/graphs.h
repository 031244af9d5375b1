/* SPDX-License-Identifier: MIT */
/*
 * What the files of the CUDA backend share.
 *
 * Owns: the structs behind engine/backend.h's opaque names, the layout of what a
 * pass reads on the device, the order of the plan's lines. Does not own the ops'
 * arithmetic (kernels/cuda).
 *
 * A step becomes passes on one stream: generated rows through decode graphs of at
 * most 64 rows, the prompt rows through one prefill graph, each followed by head
 * graphs of at most 64 wanted rows. A pass is: its rows from pinned memory to the
 * fixed address that the graph reads, the graph, its wanted rows' graph, their
 * records to pinned memory (edges.cu). The step's last launch stores its number there;
 * one thread watches for it. Two steps may be on the stream, so everything pinned that
 * a step is read from or written to is there twice; on the device the stream's order
 * is enough. Nothing waits on the device between load and unload but fence.
 */
#ifndef APR_GRAPHS_GRAPHS_H
#define APR_GRAPHS_GRAPHS_H

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>

#include "engine/backend.h"
#include "graphs/algo_table.h"
#include "graphs/edges.h"
#include "kernels/cuda/ops_cuda.h"

#define WORKSPACE_BYTES (UINT64_C(32) << 20)
#define MAX_BUCKETS 24u

enum route_id { /* numbers of enum apr_route_id */
	ROUTE_F32 = 1,   /* raw blocks, to F32 on the way */
	ROUTE_QUANT = 2, /* tiles, to F16 on the way */
	ROUTE_FP16 = 3,  /* tiles, and F16 made at load */
	ROUTE_FP8 = 4,
	ROUTE_FP8_FAST = 5, /* tiles, and E4M3 made at load */
	ROUTE_FUSED = 6     /* tiles alone */
};

struct mat { /* struct apr_mat first: ops get its address */
	struct apr_mat m;
	const void *cache;    /* n_out × n_in in the file's order (gate's rows, then up's), or NULL */
	const float *channel; /* E4M3: a scale a row */
};
struct layer_mats {
	struct mat wq, wk, wv, wo, up, down; /* up: gate and up as one where there is a gate */
};

/* ---- what a pass reads, at fixed device addresses and in pinned slots of the same shape ---- */

struct rows_at {
	void *base;
	uint32_t *n, *n_tiles; /* n_tiles[2]: tiles, divided tiles */
	int32_t *tok;
	uint32_t *pos, *slot;
	struct apr_cuda_attn_tile *tiles;
	uint64_t bytes;
};
/* Places the block of `rows` rows and `tiles` tiles at base (which may be NULL: sizes alone). */
void rows_place(struct rows_at *r, void *base, uint32_t rows, uint32_t tiles);

struct device_step { /* the line "step rows" */
	struct rows_at prefill, decode;
	struct head_block *head;
	struct apr_cuda_record *records; /* [APR_HEAD_ROWS] */
	struct apr_cuda_top *tops;
	struct slot_state *states; /* [APR_MAX_SLOTS] */
	uint8_t *lists; /* biases, seen ids and ends of the step's draws */
};
struct pinned_step { /* one of the two in the line "step staging" */
	struct rows_at prefill, *decode; /* decode[n_decode] */
	struct head_block *head;         /* [n_head] */
	struct apr_cuda_record *records; /* [max_rows], in the order of passes */
	struct apr_cuda_top *tops;
	uint32_t *draw_of;               /* [max_rows]: which draw of the step a record is */
	uint8_t *lists;
};
struct pinned_rest { /* the rest of that line */
	uint32_t *mark;  /* number of the last step that ended */
	uint32_t *near;  /* of the last one that was near its end; another line of memory */
	uint32_t *place; /* [max_rows]: a row's place among its kind */
	uint32_t *table; /* mirror of the page tables */
	struct apr_sample_result *results;
	struct rows_at warm; /* rows of a replay that is no step */
	struct head_block *warm_head;
};

struct bucket {
	uint32_t rows;
	cudaGraphExec_t exec; /* NULL: its launches one by one */
	_Atomic uint64_t replays; /* relaxed: for status */
};
struct bucket_set {
	struct bucket b[MAX_BUCKETS];
	uint32_t n;
};

struct pass { /* of a step: rows first … first + n - 1 of a kind, and their heads in pinned memory */
	uint8_t kind;
	uint32_t first, n, first_head, n_heads;
};

enum gemm_type { GEMM_F16, GEMM_E4M3, GEMM_E4M3_FAST, GEMM_F32 };
struct gemm { /* an algorithm for one shape, chosen before capture */
	uint32_t type, n, k, rows;
	cublasLtMatmulAlgo_t algo;
};
struct fused_choice { /* of one shape: prompt rows up to which our own kernel computes it */
	uint32_t mask, n, k; /* mask: of the tile types in it */
	uint32_t upto;
	bool admitted; /* its bits are the reference loop's */
};

struct apr_backend_ctx {
	struct apr_backend_config cfg;
	int device, sms;
	char identity[480];
	cudaStream_t compute, setup; /* setup: uploads, repacking, recording */
	cublasLtHandle_t lt;
	pthread_t thread; /* watches for marks */
	pthread_mutex_t lock; /* guards queue, stop */
	pthread_cond_t wake, idle;
	pthread_mutex_t warm_lock, enqueue_lock; /* a step, or a bucket of a warm-up, goes onto the stream in one piece */
	struct flight *queue, **queue_tail; /* steps not seen to end, in order */
	bool stop;
	struct algo_table table; /* load's alone */
	char table_path[512];    /* or "" */
	/* first error of the device, which is of no use after it; set by whoever meets it. It orders nothing. */
	_Atomic int sticky;
};

struct flight { /* a step on the stream, or whose records wait */
	struct apr_backend_model *m;
	struct flight *next;
	uint32_t number, n_records;
	bool has_tops;
	int failed; /* written by the watcher before state */
	/* RUNNING by submit, NEAR and DONE with release by the watcher: pairs with the acquire in graphs_poll, after which
	 * records reads. IDLE by records. */
	_Atomic int state;
};

struct apr_backend_model {
	struct apr_backend_ctx *ctx;
	struct apr_sizes sizes;
	uint32_t n_layers;
	struct layer_mats *mats;
	struct mat tok_embd, output;
	struct apr_layer_weights *layers;

	/* where things are, from the plan */
	struct device_step dev;
	struct pinned_step pin[APR_MAX_DEPTH];
	struct pinned_rest rest;
	uint32_t *table;      /* device page tables: all groups', as the engine laid them */
	uint64_t lists_bytes;
	uint32_t n_decode, n_head; /* pinned slots */
	void *gemm_in, *scratch, *workspace, *wide; /* wide: weights on their way to a GEMM */
	float *gemm_out, *row_scale;
	uint64_t *hashes; /* of output rows, while algorithms are chosen */
	uint64_t gemm_out_floats, gemm_in_bytes, scratch_bytes, wide_bytes;

	struct apr_cuda_attn_plan tile_plan;

	struct bucket_set prefill, decode, head;
	apr_build_fn build; /* what was recorded, for launches one by one */
	void *build_arg;
	struct apr_op_head head_op;
	uint64_t graph_bytes;
	struct { /* between two ops of one recording: what the op before left to the next */
		bool owes;        /* scales and bias of the product in y */
		struct apr_cuda_owed owed;
		const float *held; /* the op's output that gemm_in holds already, ready for the next product; or NULL */
	} between;
	struct gemm *gemms;
	uint32_t n_gemms, room_gemms;
	struct fused_choice *fused;
	uint32_t n_fused, room_fused;

	/* steps: flight i has pin[i]. oldest, n_flights and number are the driving thread's. */
	struct flight flight[APR_MAX_DEPTH];
	uint32_t oldest, n_flights, number;
	struct pass *passes; /* [n_decode + 1] of the step being submitted */
	bool early; /* its head is so short that the next step is wanted before the last pass, not after it */
};

/* ---- small things ------------------------------------------------------------------ */

static inline uint64_t round_up(uint64_t n, uint64_t to)
{
	return (n + to - 1) / to * to;
}
__attribute__((format(printf, 3, 4))) void graphs_say(char *err, size_t errlen, const char *fmt, ...);
static inline int graphs_rc(int rc)
{
	return rc;
}
/* Fills err (which may be NULL) and is rc. A macro, so that whoever analyses a caller sees which rc that is. */
#define graphs_fail(rc, err, errlen, ...) (graphs_say(err, errlen, __VA_ARGS__), graphs_rc(rc))
__attribute__((format(printf, 3, 4))) void graphs_log(const struct apr_backend_ctx *c, int level, const char *fmt, ...);
/* A CUDA error as -errno, kept in c->sticky; err says what could not be done. */
int graphs_cuda(struct apr_backend_ctx *c, cudaError_t rc, const char *what, char *err, size_t errlen);

/* ---- weights.c --------------------------------------------------------------------- */

int graphs_need(struct apr_backend_ctx *c, const struct apr_model *m, const struct apr_sizes *s, bool have_cache,
                struct apr_plan *plan);
int graphs_load(struct apr_backend_ctx *c, const struct apr_backend_load *in, struct apr_backend_model **out, char *err,
                size_t errlen);
void graphs_unload(struct apr_backend_model *m);
/* Widths that the matrices have and the kernels can read, else -ENOTSUP */
int graphs_bad_mat(const struct apr_mat *m, const char *what, char *err, size_t errlen);

/* Of a matrix as this route keeps it; 0: it cannot */
uint64_t graphs_mat_bytes(const struct apr_mat *m);
static inline bool route_is_16bit(uint8_t id)
{
	return id == ROUTE_FP16 || id == ROUTE_QUANT || id == ROUTE_FUSED;
}
static inline bool route_is_fp8(uint8_t id)
{
	return id == ROUTE_FP8 || id == ROUTE_FP8_FAST;
}

/* ---- gemm.c ------------------------------------------------------------------------ */

/* out[rows][n] (ld floats apart) = in[rows][k] · w[n][k]ᵀ: FP32 sums, F32 out */
struct gemm_call {
	uint32_t type, n, k, rows, ld;
};
struct gemm_layouts {
	cublasLtMatmulDesc_t op;
	cublasLtMatrixLayout_t w, in, out;
};
int gemm_layouts_make(struct gemm_layouts *l, const struct gemm_call *g); /* -EIO */
void gemm_layouts_free(struct gemm_layouts *l);
int gemm_launch(struct apr_backend_model *m, cudaStream_t stream, const struct gemm_layouts *l,
                const cublasLtMatmulAlgo_t *algo, const void *w, const void *in, void *out);
/* At most `most` algorithms without split-K or reduction: the library's proposals, then others of the same family that
 * it does not propose. The first *proposed are the former. For 16-bit and 8-bit types of id 66 alone. */
uint32_t gemm_candidates(struct apr_backend_ctx *c, const struct gemm_layouts *l, const struct gemm_call *g,
                         cublasLtMatmulAlgo_t *out, uint32_t most, uint32_t *proposed);
bool gemm_usable(struct apr_backend_ctx *c, const struct gemm_layouts *l, const cublasLtMatmulAlgo_t *algo);
const struct gemm *gemm_find(const struct apr_backend_model *m, const struct gemm_call *g);
int gemm_keep(struct apr_backend_model *m, const struct gemm_call *g, const cublasLtMatmulAlgo_t *algo);
/* With the algorithm that was kept for it; -EINVAL where none was. */
int graphs_gemm(struct apr_backend_model *m, cudaStream_t stream, const struct gemm_call *g, const void *w,
                const void *in, float *out);

/* ---- tune.c ------------------------------------------------------------------------ */

/* Chooses an algorithm for every shape and bucket of the model, from the table or by timing. */
int graphs_tune(struct apr_backend_model *m, const struct apr_backend_load *in, char *err, size_t errlen);
const struct fused_choice *graphs_fused(const struct apr_backend_model *m, uint32_t mask, uint32_t n, uint32_t k);

/* ---- routes.c: what an op of a prompt becomes, and in the exact route every op ------------ */

int graphs_attn_in(struct apr_backend_model *m, const struct apr_cuda_launch *l, const struct apr_op_attn_in *a);
int graphs_proj(struct apr_backend_model *m, const struct apr_cuda_launch *l, const struct apr_op_proj *a);
int graphs_ffn_in(struct apr_backend_model *m, const struct apr_cuda_launch *l, const struct apr_op_ffn_in *a);
int graphs_head(struct apr_backend_model *m, const struct apr_cuda_launch *l, const struct apr_op_head *a);
/* Prompt rows up to which some shape takes our own kernel */
uint32_t graphs_most_fused(const struct apr_backend_model *m);
/* Sizes of a model's prefill graphs, ascending, at most MAX_BUCKETS; the last is max_rows. small: with those below 64
 * rows, which are recorded up to what our own kernel is chosen for. */
uint32_t graphs_sizes(const struct apr_backend_model *m, bool small, uint32_t *rows);
/* Rows of an output matrix that the exact route widens at a time, by the bytes it may use */
static inline uint32_t wide_rows(uint64_t wide_bytes, uint32_t k, uint32_t n)
{
	uint64_t rows = wide_bytes / ((uint64_t)k * sizeof(float));

	return rows < n ? (uint32_t)rows : n;
}
uint32_t graphs_mask(const struct apr_mat *const *w, uint32_t n); /* of tile types */
/* One line for status: what this model's prompt products are made of */
int graphs_describe(const struct apr_backend_model *m, char *buf, size_t len);

/* ---- record.c ---------------------------------------------------------------------- */

int graphs_record(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t bucket, apr_build_fn build, void *arg,
                  char *err, size_t errlen);
int graphs_supports(struct apr_backend_ctx *c, enum apr_op_kind kind, const void *args, uint8_t route_id, char *err,
                    size_t errlen);
void graphs_forget(struct apr_backend_model *m); /* destroys what was recorded */
/* The bucket for so many rows onto the compute stream. */
int graphs_launch(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t rows);
uint32_t graphs_buckets(const struct apr_backend_model *m, struct apr_bucket *out, uint32_t max, uint64_t *bytes);
static inline uint32_t tiles_of(uint32_t rows)
{
	/* tiles never span sequences */
	return (rows + 63) / 64 + APR_MAX_SLOTS - 1 + APR_CUDA_ATTN_MORE;
}

/* ---- warm.c ------------------------------------------------------------------------ */

int graphs_warm(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t rows, double *us, char *err, size_t errlen);

/* ---- step.c ------------------------------------------------------------------------ */

int graphs_submit(struct apr_backend_model *m, const struct apr_step *step);
enum apr_step_state graphs_poll(struct apr_backend_model *m);
int graphs_records(struct apr_backend_model *m, const struct apr_sample_result **out);
void graphs_fence(struct apr_backend_model *m);
void *graphs_watch(void *ctx); /* the watching thread */

#endif
