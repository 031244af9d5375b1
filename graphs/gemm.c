/* SPDX-License-Identifier: MIT */
/*
 * The products of a prompt by cuBLASLt.
 *
 * Owns: descriptors of the four types of product, which algorithms may be considered:
 * never split-K or a reduction, of 16-bit and 8-bit types id 66 alone, all of which
 * give a row the same bits at every row count (ENGINE, section 1; tune.c checks it).
 * Does not own the choice among them (tune.c) nor the conversions around (routes.c).
 *
 * Type by type: F16 inputs and weights; E4M3 ones, with exact or fast accumulation;
 * F32 ones, by ordinary FP32 arithmetic (compute type 32F never uses TF32).
 */
#include <errno.h>
#include <stdlib.h>

#include "graphs/graphs.h"

#define PROPOSALS 16
#define SAME_BITS_ID 66
#define FEW_ROWS 256u /* up to here the library's proposals miss the fastest tiles */

void gemm_layouts_free(struct gemm_layouts *l)
{
	if (l->op)
		cublasLtMatmulDescDestroy(l->op);
	if (l->w)
		cublasLtMatrixLayoutDestroy(l->w);
	if (l->in)
		cublasLtMatrixLayoutDestroy(l->in);
	if (l->out)
		cublasLtMatrixLayoutDestroy(l->out);
	*l = (struct gemm_layouts){0};
}

static cudaDataType_t input_type(uint32_t type)
{
	return type == GEMM_F32 ? CUDA_R_32F : type == GEMM_F16 ? CUDA_R_16F : CUDA_R_8F_E4M3;
}

/* Column-major, as the library sees them: w is k × n, in is k × rows, out is n × rows. */
int gemm_layouts_make(struct gemm_layouts *l, const struct gemm_call *g)
{
	const cublasOperation_t turned = CUBLAS_OP_T, plain = CUBLAS_OP_N;
	const cudaDataType_t in = input_type(g->type);
	const int8_t fast = g->type == GEMM_E4M3_FAST;

	*l = (struct gemm_layouts){0};
	if (cublasLtMatmulDescCreate(&l->op, CUBLAS_COMPUTE_32F, CUDA_R_32F) ||
	    cublasLtMatmulDescSetAttribute(l->op, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned) ||
	    cublasLtMatmulDescSetAttribute(l->op, CUBLASLT_MATMUL_DESC_TRANSB, &plain, sizeof plain) ||
	    (in == CUDA_R_8F_E4M3 &&
	     cublasLtMatmulDescSetAttribute(l->op, CUBLASLT_MATMUL_DESC_FAST_ACCUM, &fast, sizeof fast)) ||
	    cublasLtMatrixLayoutCreate(&l->w, in, g->k, g->n, g->k) ||
	    cublasLtMatrixLayoutCreate(&l->in, in, g->k, g->rows, g->k) ||
	    cublasLtMatrixLayoutCreate(&l->out, CUDA_R_32F, g->n, g->rows, g->ld)) {
		gemm_layouts_free(l);
		return -EIO;
	}
	return 0;
}

int gemm_launch(struct apr_backend_model *m, cudaStream_t stream, const struct gemm_layouts *l,
                const cublasLtMatmulAlgo_t *algo, const void *w, const void *in, void *out)
{
	const float one = 1.0f, zero = 0.0f;

	return cublasLtMatmul(m->ctx->lt, l->op, &one, w, l->w, in, l->in, &zero, out, l->out, out, l->out, algo, m->workspace,
	                      WORKSPACE_BYTES, stream)
	               ? -EIO
	               : 0;
}

/* ---- candidates ------------------------------------------------------------------------ */

static int config_of(const cublasLtMatmulAlgo_t *a, cublasLtMatmulAlgoConfigAttributes_t what)
{
	int v = 0;
	size_t n;

	return cublasLtMatmulAlgoConfigGetAttribute(a, what, &v, sizeof v, &n) ? -1 : v;
}

static bool may_be_used(const struct gemm_call *g, const cublasLtMatmulAlgo_t *a)
{
	return config_of(a, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) <= 1 &&
	       config_of(a, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) <= 0 &&
	       (g->type == GEMM_F32 || config_of(a, CUBLASLT_ALGO_CONFIG_ID) == SAME_BITS_ID);
}

bool gemm_usable(struct apr_backend_ctx *c, const struct gemm_layouts *l, const cublasLtMatmulAlgo_t *algo)
{
	cublasLtMatmulHeuristicResult_t r;

	return cublasLtMatmulAlgoCheck(c->lt, l->op, l->w, l->in, l->out, l->out, algo, &r) == CUBLAS_STATUS_SUCCESS &&
	       r.workspaceSize <= WORKSPACE_BYTES;
}

static uint32_t proposals(struct apr_backend_ctx *c, const struct gemm_layouts *l, const struct gemm_call *g,
                          cublasLtMatmulAlgo_t *out, uint32_t most)
{
	cublasLtMatmulHeuristicResult_t r[PROPOSALS];
	cublasLtMatmulPreference_t pref;
	const uint64_t space = WORKSPACE_BYTES;
	const uint32_t none = CUBLASLT_REDUCTION_SCHEME_NONE;
	uint32_t n = 0;
	int got = 0, i;

	if (cublasLtMatmulPreferenceCreate(&pref))
		return 0;
	if (cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space, sizeof space) ||
	    cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &none, sizeof none) ||
	    cublasLtMatmulAlgoGetHeuristic(c->lt, l->op, l->w, l->in, l->out, l->out, pref, PROPOSALS, r, &got))
		got = 0;
	cublasLtMatmulPreferenceDestroy(pref);
	for (i = 0; i < got && n < most; i++)
		if (!r[i].state && r[i].workspaceSize <= space && may_be_used(g, &r[i].algo))
			out[n++] = r[i].algo;
	return n;
}

/* Tiles of up to 128 × 128, clusters of 1 to 8, each schedule: what the proposals leave out is the fastest for few rows,
 * by up to 2.1 × (measured: 4096 × 14336, 16 to 128 rows). */
static uint32_t others(struct apr_backend_ctx *c, const struct gemm_layouts *l, const struct gemm_call *g,
                       cublasLtMatmulAlgo_t *out, uint32_t most)
{
	const cudaDataType_t in = input_type(g->type);
	cublasLtMatmulAlgo_t a;
	const uint16_t last = CUBLASLT_CLUSTER_SHAPE_4x2x1;
	uint32_t n = 0, tile, stages = 0;
	uint16_t cluster;
	size_t got = 0;
	const int one = 1;
	int custom;

	if (cublasLtMatmulAlgoInit(c->lt, CUBLAS_COMPUTE_32F, CUDA_R_32F, in, in, CUDA_R_32F, CUDA_R_32F, SAME_BITS_ID, &a) ||
	    cublasLtMatmulAlgoCapGetAttribute(&a, CUBLASLT_ALGO_CAP_STAGES_IDS, &stages, sizeof stages, &got) ||
	    got < sizeof stages ||
	    cublasLtMatmulAlgoConfigSetAttribute(&a, CUBLASLT_ALGO_CONFIG_STAGES_ID, &stages, sizeof stages) ||
	    cublasLtMatmulAlgoConfigSetAttribute(&a, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &one, sizeof one))
		return 0;
	for (tile = CUBLASLT_MATMUL_TILE_64x8; tile <= CUBLASLT_MATMUL_TILE_128x128; tile++)
		for (cluster = CUBLASLT_CLUSTER_SHAPE_1x1x1; cluster <= last; cluster++)
			for (custom = 0; custom < 4 && n < most; custom++) {
				if (cublasLtMatmulAlgoConfigSetAttribute(&a, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile) ||
				    cublasLtMatmulAlgoConfigSetAttribute(&a, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, &cluster, sizeof cluster) ||
				    cublasLtMatmulAlgoConfigSetAttribute(&a, CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, &custom, sizeof custom))
					continue;
				if (may_be_used(g, &a) && gemm_usable(c, l, &a))
					out[n++] = a;
			}
	return n;
}

uint32_t gemm_candidates(struct apr_backend_ctx *c, const struct gemm_layouts *l, const struct gemm_call *g,
                         cublasLtMatmulAlgo_t *out, uint32_t most, uint32_t *proposed)
{
	uint32_t n = proposals(c, l, g, out, most);

	*proposed = n;
	if (g->type != GEMM_F32 && (g->rows <= FEW_ROWS || !n))
		n += others(c, l, g, out + n, most - n);
	return n;
}

/* ---- what was chosen ---------------------------------------------------------------------- */

const struct gemm *gemm_find(const struct apr_backend_model *m, const struct gemm_call *g)
{
	uint32_t i;

	for (i = 0; i < m->n_gemms; i++)
		if (m->gemms[i].type == g->type && m->gemms[i].n == g->n && m->gemms[i].k == g->k && m->gemms[i].rows == g->rows)
			return &m->gemms[i];
	return NULL;
}

int gemm_keep(struct apr_backend_model *m, const struct gemm_call *g, const cublasLtMatmulAlgo_t *algo)
{
	if (m->n_gemms == m->room_gemms) {
		uint32_t room = m->room_gemms ? 2 * m->room_gemms : 64;
		struct gemm *grown = realloc(m->gemms, room * sizeof *grown);

		if (!grown)
			return -ENOMEM;
		m->gemms = grown;
		m->room_gemms = room;
	}
	m->gemms[m->n_gemms++] = (struct gemm){.type = g->type, .n = g->n, .k = g->k, .rows = g->rows, .algo = *algo};
	return 0;
}

int graphs_gemm(struct apr_backend_model *m, cudaStream_t stream, const struct gemm_call *g, const void *w,
                const void *in, float *out)
{
	const struct gemm *found = gemm_find(m, g);
	struct gemm_layouts l;
	int rc;

	if (!found)
		return -EINVAL;
	rc = gemm_layouts_make(&l, g);
	if (!rc)
		rc = gemm_launch(m, stream, &l, &found->algo, w, in, out);
	gemm_layouts_free(&l);
	return rc;
}
