/* SPDX-License-Identifier: MIT */
/*
 * What the CUDA checks share: counting, device buffers, random numbers, a step's rows.
 *
 * Owns: the runner's small tools. Needs no daemon, no socket, no CUnit, so that the
 * program runs on a bare machine with a GPU. Buffers are filled with NaN when made:
 * what an op does not write shows.
 */
#ifndef APR_TESTS_CUDA_SUPPORT_CUH
#define APR_TESTS_CUDA_SUPPORT_CUH

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utility>
#include <vector>

#include "kernels/cuda/blocks.cuh"
#include "kernels/cuda/ops_cuda.h"
#include "tests/cuda/shapes.h"

extern unsigned n_checks, n_failed;
extern cudaStream_t stream;
extern uint32_t device_sms;
extern bool few; /* the kernels run on a CPU: fewer shapes and draws */

#define CUDA(x) \
	do { \
		cudaError_t e_ = (x); \
		if (e_ != cudaSuccess) { \
			printf("CUDA %s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
			exit(2); \
		} \
	} while (0)
/* Counts; prints the first failures of the run only */
#define CHECK(ok, ...) \
	do { \
		n_checks++; \
		if (!(ok) && n_failed++ < 60) { \
			printf("  FAILED %s:%d ", __FILE__, __LINE__); \
			printf(__VA_ARGS__); \
			printf("\n"); \
		} \
	} while (0)

struct rng { /* splitmix64 */
	uint64_t s;
	uint32_t u32()
	{
		uint64_t z = (s += 0x9e3779b97f4a7c15ull);

		z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
		z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
		return (uint32_t)(z >> 32);
	}
	float unit() { return (u32() >> 8) * 0x1p-24f; }
	float normal() { return sqrtf(-2 * logf(unit() + 0x1p-25f)) * cosf(6.2831853f * unit()); }
	uint32_t below(uint32_t n) { return (uint32_t)((uint64_t)u32() * n >> 32); }
};

template <typename T> struct dbuf { /* device memory, NaN bits at first */
	T *p = NULL;
	size_t n = 0;
	dbuf() {}
	explicit dbuf(size_t count) : n(count)
	{
		CUDA(cudaMalloc(&p, n * sizeof(T) + 256));
		poison();
	}
	explicit dbuf(const std::vector<T> &v) : dbuf(v.size()) { put(v); }
	dbuf(const dbuf &) = delete;
	dbuf &operator=(const dbuf &) = delete;
	dbuf(dbuf &&o) : p(o.p), n(o.n) { o.p = NULL; }
	dbuf &operator=(dbuf &&o)
	{
		std::swap(p, o.p);
		std::swap(n, o.n);
		return *this;
	}
	~dbuf() { cudaFree(p); }
	/* The legacy stream, in which these run, is not ordered with ours: each waits for the device. */
	void fill(int byte)
	{
		CUDA(cudaDeviceSynchronize());
		CUDA(cudaMemset(p, byte, n * sizeof(T)));
		CUDA(cudaDeviceSynchronize());
	}
	void poison() { fill(0xff); }
	void zero() { fill(0); }
	void put(const std::vector<T> &v)
	{
		CUDA(cudaDeviceSynchronize());
		CUDA(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
	}
	std::vector<T> get() const
	{
		std::vector<T> v(n);

		CUDA(cudaDeviceSynchronize());
		CUDA(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
		return v;
	}
};

std::vector<uint8_t> random_blocks(uint32_t type, uint32_t n_in, uint32_t n_out, uint64_t seed);
std::vector<float> random_rows(uint32_t rows, uint32_t n, uint64_t seed, bool planted);
static inline size_t file_row_bytes(uint32_t type, uint32_t n_in)
{
	return (size_t)n_in / block_elems(type) * block_size(type);
}

struct weight { /* of a random file, packed */
	std::vector<uint8_t> a, b;
	uint32_t type;
	dbuf<uint8_t> raw_a, raw_b, tiles;
	apr_mat m;
	weight(uint32_t type, uint32_t n_in, uint32_t n_out, uint64_t seed, uint32_t order = APR_ORDER_PLAIN,
	       uint32_t dim = 0, uint32_t half = 0);
	const uint8_t *row(uint32_t r) const
	{
		uint32_t each = b.empty() ? m.n_out : m.n_out / 2;

		return (r < each ? a.data() : b.data()) + (size_t)(r % each) * file_row_bytes(type, m.n_in);
	}
};

struct step { /* rows of a step in device memory, and a launch */
	dbuf<uint32_t> n, n_out, pos, slot, out;
	dbuf<int32_t> tok;
	dbuf<uint8_t> scratch;
	apr_cuda_launch l;
	explicit step(size_t scratch_bytes);
	void set(uint32_t bucket, uint32_t live, const std::vector<uint32_t> &pos, const std::vector<uint32_t> &slot);
};

bool same_bits(const float *a, const float *b, size_t n);

void check_weights(void);
void check_proj(void);
void check_ops(void);
void check_attn_decode(void);
void check_prefill(void);
void check_attn_prefill(void);
void check_attn_prefill_brief(void);
void check_sample(void);
void check_layer(void);
void check_chain(void);
void check_gemm(void);

#endif
