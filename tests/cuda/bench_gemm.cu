/* SPDX-License-Identifier: MIT */
/*
 * cuBLASLt's products: what our ops are measured against, and what capture and the
 * workspace cost it.
 *
 * Owns: one product at a time, chains of eight over weights that lie apart (so that
 * none is in the cache), eager and captured. Buffers are made once.
 */
#include <algorithm>
#include <chrono>
#include <cublasLt.h>

#include "tests/cuda/bench.cuh"
#include "tests/cuda/chain.cuh"

#define WEIGHT_BYTES (UINT64_C(2200) << 20)
#define SPACE (UINT64_C(32) << 20)
#define CHAIN 8

static struct {
	cublasLtHandle_t lt;
	dbuf<uint8_t> w, in, out, space;
} g;

#define LT(x) \
	do { \
		cublasStatus_t s_ = (x); \
		if (s_ != CUBLAS_STATUS_SUCCESS) { \
			printf("cuBLASLt %s:%d %s: %d\n", __FILE__, __LINE__, #x, (int)s_); \
			exit(2); \
		} \
	} while (0)

static void open_once(void)
{
	if (g.lt)
		return;
	LT(cublasLtCreate(&g.lt));
	g.w = dbuf<uint8_t>(WEIGHT_BYTES);
	g.in = dbuf<uint8_t>(UINT64_C(2048) * 14336 * 2);
	g.out = dbuf<uint8_t>(UINT64_C(2048) * 28672 * 4);
	g.space = dbuf<uint8_t>(SPACE);
	g.w.fill(0x2c); /* small positive numbers */
	g.in.fill(0x2c);
}

struct product { /* out[rows][n] = in[rows][k] w[n][k]' */
	uint32_t n, k, rows;
	uint64_t space;
	cublasLtMatmulDesc_t op;
	cublasLtMatrixLayout_t w, in, out;
	cublasLtMatmulHeuristicResult_t r;
	uint64_t at = 0;

	product(uint32_t n_, uint32_t k_, uint32_t rows_, uint64_t space_) : n(n_), k(k_), rows(rows_), space(space_)
	{
		const cublasOperation_t turned = CUBLAS_OP_T;
		cublasLtMatmulPreference_t pref;
		int got = 0;

		open_once();
		LT(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F));
		LT(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &turned, sizeof turned));
		LT(cublasLtMatrixLayoutCreate(&w, CUDA_R_16F, k, n, k));
		LT(cublasLtMatrixLayoutCreate(&in, CUDA_R_16F, k, rows, k));
		LT(cublasLtMatrixLayoutCreate(&out, CUDA_R_32F, n, rows, n));
		LT(cublasLtMatmulPreferenceCreate(&pref));
		LT(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space, sizeof space));
		LT(cublasLtMatmulAlgoGetHeuristic(g.lt, op, w, in, out, out, pref, 1, &r, &got));
		cublasLtMatmulPreferenceDestroy(pref);
		if (!got)
			printf("cuBLASLt offers nothing for %u x %u by %u rows\n", n, k, rows);
	}
	product(const product &) = delete;
	~product()
	{
		cublasLtMatmulDescDestroy(op);
		cublasLtMatrixLayoutDestroy(w);
		cublasLtMatrixLayoutDestroy(in);
		cublasLtMatrixLayoutDestroy(out);
	}
	int enqueue() /* the next weight each time */
	{
		const float one = 1, zero = 0;
		uint64_t bytes = (uint64_t)n * k * 2;

		if (at + bytes > WEIGHT_BYTES)
			at = 0;
		LT(cublasLtMatmul(g.lt, op, &one, g.w.p + at, w, g.in.p, in, &zero, g.out.p, out, g.out.p, out, &r.algo,
		                  space ? g.space.p : NULL, space, stream));
		at += (bytes + 255) & ~UINT64_C(255);
		return 0;
	}
};

static int chain(product &p)
{
	for (int i = 0; i < CHAIN; i++)
		p.enqueue();
	return 0;
}

/* One captured chain after the other: their weights follow each other through the buffer. */
static double captured_us(product &p)
{
	uint64_t bytes = (uint64_t)p.n * p.k * 2;
	int chains = (int)std::max<uint64_t>(1, std::min<uint64_t>(8, WEIGHT_BYTES / bytes / CHAIN));
	chain_graph graph([&] {
		for (int i = 0; i < chains; i++)
			chain(p);
		return 0;
	});

	return time_replays(graph.exec, 3) / chains / CHAIN;
}

double gemm_us(uint32_t n, uint32_t k, uint32_t rows)
{
	product p(n, k, rows, SPACE);

	return captured_us(p);
}

static double eager_us(product &p)
{
	std::vector<double> us;

	for (int r = 0; r < 6; r++) {
		CUDA(cudaStreamSynchronize(stream));
		auto t0 = std::chrono::steady_clock::now();
		for (int i = 0; i < 8; i++)
			chain(p);
		CUDA(cudaStreamSynchronize(stream));
		std::chrono::duration<double, std::micro> d = std::chrono::steady_clock::now() - t0;
		if (r)
			us.push_back(d.count() / 8 / CHAIN);
	}
	std::sort(us.begin(), us.end());
	return us[2];
}

static size_t nodes_of_chain(product &p)
{
	cudaGraph_t graph;
	size_t n = 0;

	CUDA(cudaDeviceSynchronize());
	CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
	chain(p);
	CUDA(cudaStreamEndCapture(stream, &graph));
	CUDA(cudaGraphGetNodes(graph, NULL, &n));
	CUDA(cudaGraphDestroy(graph));
	return n;
}

void bench_gemm(void)
{
	static const uint32_t shape[][2] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}};

	for (auto s : shape)
		for (uint32_t rows : {64u, 128u, 512u, 2048u}) {
			double us = gemm_us(s[0], s[1], rows), flop = 2.0 * s[0] * s[1] * rows;

			printf("{\"bench\":\"gemm\",\"what\":\"cuBLASLt F16, first choice\",\"n\":%u,\"k\":%u,\"rows\":%u,\"us\":%.1f,"
			       "\"tflop_s\":%.0f}\n", s[0], s[1], rows, us, flop / us * 1e-6);
		}
	for (auto s : shape)
		for (uint32_t rows : {8u, 128u, 512u})
			for (uint64_t space : {SPACE, UINT64_C(0)}) {
				product p(s[0], s[1], rows, space);
				double eager = eager_us(p), captured = captured_us(p);

				printf("{\"bench\":\"capture\",\"n\":%u,\"k\":%u,\"rows\":%u,\"workspace_mib\":%u,\"eager_us\":%.1f,"
				       "\"captured_us\":%.1f,\"nodes_of_8\":%zu}\n", s[0], s[1], rows, (unsigned)(space >> 20), eager, captured,
				       nodes_of_chain(p));
			}
}
