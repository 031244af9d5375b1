/* SPDX-License-Identifier: MIT */
/*
 * The products of a prompt: cuBLASLt, F16 by F16 with FP32 accumulation.
 *
 * Owns: which algorithm a shape gets: of those without split-K or a reduction the
 * first of id 66, all of which give a row the same bits at every row count
 * (ENGINE, section 1); where the library offers none, the first it offers, counted
 * in other_algos. Does not own the conversion around it.
 */
#include <errno.h>

#include "graphs/graphs.h"

#define CANDIDATES 32
#define SAME_BITS_ID 66

struct layouts {
	cublasLtMatmulDesc_t op;
	cublasLtMatrixLayout_t w, in, out;
};

static void layouts_free(struct layouts *l)
{
	if (l->op)
		cublasLtMatmulDescDestroy(l->op);
	if (l->w)
		cublasLtMatrixLayoutDestroy(l->w);
	if (l->in)
		cublasLtMatrixLayoutDestroy(l->in);
	if (l->out)
		cublasLtMatrixLayoutDestroy(l->out);
}

/* Column-major, as the library sees them: w is k × n, in is k × rows, out is n × rows. */
static int layouts_make(struct layouts *l, uint32_t n, uint32_t k, uint32_t rows)
{
	const cublasOperation_t turned = CUBLAS_OP_T, plain = CUBLAS_OP_N;

	*l = (struct layouts){0};
	if (cublasLtMatmulDescCreate(&l->op, CUBLAS_COMPUTE_32F, CUDA_R_32F) ||
	    cublasLtMatmulDescSetAttribute(l->op, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned) ||
	    cublasLtMatmulDescSetAttribute(l->op, CUBLASLT_MATMUL_DESC_TRANSB, &plain, sizeof plain) ||
	    cublasLtMatrixLayoutCreate(&l->w, CUDA_R_16F, k, n, k) ||
	    cublasLtMatrixLayoutCreate(&l->in, CUDA_R_16F, k, rows, k) ||
	    cublasLtMatrixLayoutCreate(&l->out, CUDA_R_32F, n, rows, n)) {
		layouts_free(l);
		return -EIO;
	}
	return 0;
}

static int config_of(const cublasLtMatmulAlgo_t *a, cublasLtMatmulAlgoConfigAttributes_t what)
{
	int v = -1;
	size_t n;

	return cublasLtMatmulAlgoConfigGetAttribute(a, what, &v, sizeof v, &n) ? -1 : v;
}

static int choose_algo(struct apr_backend_model *m, const struct layouts *l, struct gemm *g)
{
	cublasLtMatmulHeuristicResult_t r[CANDIDATES];
	cublasLtMatmulPreference_t pref;
	const uint64_t space = WORKSPACE_BYTES;
	const uint32_t none = CUBLASLT_REDUCTION_SCHEME_NONE;
	int got = 0, i, pick = -1;

	if (cublasLtMatmulPreferenceCreate(&pref))
		return -ENOMEM;
	if (cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space, sizeof space) ||
	    cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &none, sizeof none) ||
	    cublasLtMatmulAlgoGetHeuristic(m->ctx->lt, l->op, l->w, l->in, l->out, l->out, pref, CANDIDATES, r, &got))
		got = 0;
	cublasLtMatmulPreferenceDestroy(pref);
	for (i = 0; i < got; i++) {
		if (r[i].state || r[i].workspaceSize > space || config_of(&r[i].algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1 ||
		    config_of(&r[i].algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) > 0)
			continue;
		if (config_of(&r[i].algo, CUBLASLT_ALGO_CONFIG_ID) == SAME_BITS_ID) {
			pick = i;
			break;
		}
		if (pick < 0)
			pick = i;
	}
	if (pick < 0)
		return -ENOTSUP;
	g->algo = r[pick].algo;
	if (config_of(&g->algo, CUBLASLT_ALGO_CONFIG_ID) != SAME_BITS_ID) {
		m->other_algos++;
		graphs_log(m->ctx, 2, "%u x %u by %u rows: cuBLASLt offers no algorithm of id %d, taken: %d", g->n, g->k, g->rows,
		           SAME_BITS_ID, config_of(&g->algo, CUBLASLT_ALGO_CONFIG_ID));
	}
	return 0;
}

static const struct gemm *find(const struct apr_backend_model *m, uint32_t n, uint32_t k, uint32_t rows)
{
	uint32_t i;

	for (i = 0; i < m->n_gemms; i++)
		if (m->gemms[i].n == n && m->gemms[i].k == k && m->gemms[i].rows == rows)
			return &m->gemms[i];
	return NULL;
}

int graphs_gemm(struct apr_backend_model *m, cudaStream_t stream, const void *w, uint32_t n, uint32_t k, uint32_t rows,
                const void *in, float *out, bool choose)
{
	const float one = 1.0f, zero = 0.0f;
	const struct gemm *g = find(m, n, k, rows);
	struct layouts l;
	int rc = layouts_make(&l, n, k, rows);

	if (rc)
		return rc;
	if (!g && choose) {
		struct gemm *fresh = &m->gemms[m->n_gemms];

		fresh->n = n;
		fresh->k = k;
		fresh->rows = rows;
		rc = m->n_gemms < MAX_GEMMS ? choose_algo(m, &l, fresh) : -E2BIG;
		if (!rc) {
			m->n_gemms++;
			g = fresh;
		}
	}
	if (!g) {
		layouts_free(&l);
		return rc ? rc : -EINVAL;
	}
	if (cublasLtMatmul(m->ctx->lt, l.op, &one, w, l.w, in, l.in, &zero, out, l.out, out, l.out, &g->algo, m->workspace,
	                   WORKSPACE_BYTES, stream))
		rc = -EIO;
	layouts_free(&l);
	return rc;
}
