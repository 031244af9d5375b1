/* SPDX-License-Identifier: MIT */
/* What the bench's files share. */
#ifndef APR_TESTS_CUDA_BENCH_CUH
#define APR_TESTS_CUDA_BENCH_CUH

#include "tests/cuda/support.cuh"

/* Median microseconds of a replay, over batches */
double time_replays(cudaGraphExec_t e, int replays);
/* Of cuBLASLt's first choice, F16 by F16 with FP32 sums and results, captured, weights not in the cache */
double gemm_us(uint32_t n, uint32_t k, uint32_t rows);
/* Products: TFLOP/s; eager against captured, with and without a workspace */
void bench_gemm(void);

#endif
