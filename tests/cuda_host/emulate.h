/* SPDX-License-Identifier: MIT */
/*
 * CUDA kernels run on the CPU, a thread a fiber: what the checks of tests/cuda need
 * of a device, for machines that have none.
 *
 * Owns: fibers, warps, blocks, clusters; shared memory; the intrinsics that the
 * kernels use. kernels/cuda/ptx.cuh and launch.cuh beside this file take the place
 * of the real ones. Does not own speed, nor races between blocks: blocks run one
 * after another (those of a cluster together), threads of a block in turn, each to
 * its next barrier. What the copy engine or cp.async brings is poisoned when it is
 * asked for and comes as late as it may: a reader that does not wait, and a refill
 * of what is still to be read, give NaN.
 */
#ifndef APR_TESTS_CUDA_HOST_EMULATE_H
#define APR_TESTS_CUDA_HOST_EMULATE_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <functional>

#ifndef __launch_bounds__
#define __launch_bounds__(...)
#endif
#ifndef __cluster_dims__
#define __cluster_dims__(...)
#endif
#ifndef __grid_constant__
#define __grid_constant__
#endif
#undef __shared__
#define __shared__ static /* blocks of one launch run one after another; see emu_shared for what has a size of its own */
#undef __forceinline__
#define __forceinline__ inline

struct emu_place { /* of the fiber that runs */
	uint3 thread, block;
	dim3 block_size, grid;
};
extern emu_place emu;
#define threadIdx (emu.thread)
#define blockIdx (emu.block)
#define blockDim (emu.block_size)
#define gridDim (emu.grid)

/* A launch: kernel() for each thread. cluster: blocks that run together. */
void emu_run(dim3 grid, unsigned threads, size_t smem, unsigned cluster, const std::function<void(void)> &kernel);
/* The block's dynamic shared memory; that of block `rank` of its cluster */
uint8_t *emu_shared(void);
uint8_t *emu_shared_of(unsigned rank);
unsigned emu_cluster_rank(void);

void emu_block_sync(void);
void emu_cluster_sync(void);
/* All lanes of the warp give v (at most 64 bytes); each gets all of them, [32]. */
const void *emu_warp(const void *v, size_t bytes);
/* Others run first */
void emu_yield(void);

/* ---- intrinsics --------------------------------------------------------------------- */

static inline void __syncthreads(void)
{
	emu_block_sync();
}
static inline void __syncwarp(unsigned = ~0u)
{
	int none = 0;

	emu_warp(&none, sizeof none);
}
template <typename T> static inline T emu_from(T v, unsigned lane)
{
	return ((const T *)emu_warp(&v, sizeof v))[lane & 31];
}
static inline unsigned emu_lane(void)
{
	return emu.thread.x & 31;
}
template <typename T> static inline T __shfl_sync(unsigned, T v, int lane)
{
	return emu_from(v, (unsigned)lane);
}
template <typename T> static inline T __shfl_xor_sync(unsigned, T v, int mask)
{
	return emu_from(v, emu_lane() ^ (unsigned)mask);
}
template <typename T> static inline T __shfl_down_sync(unsigned, T v, unsigned d)
{
	return emu_from(v, emu_lane() + d < 32 ? emu_lane() + d : emu_lane());
}
template <typename T> static inline T __shfl_up_sync(unsigned, T v, unsigned d)
{
	return emu_from(v, emu_lane() >= d ? emu_lane() - d : emu_lane());
}
static inline unsigned __reduce_max_sync(unsigned, unsigned v)
{
	const unsigned *all = (const unsigned *)emu_warp(&v, sizeof v);

	return *std::max_element(all, all + 32);
}
static inline unsigned __reduce_min_sync(unsigned, unsigned v)
{
	const unsigned *all = (const unsigned *)emu_warp(&v, sizeof v);

	return *std::min_element(all, all + 32);
}
static inline int __any_sync(unsigned, int p)
{
	const int *all = (const int *)emu_warp(&p, sizeof p);

	return std::any_of(all, all + 32, [](int i) { return i != 0; });
}

template <typename T> static inline T __ldcg(const T *p)
{
	return *p;
}
template <typename T> static inline T __ldcs(const T *p)
{
	return *p;
}
template <typename T> static inline void __stcs(T *p, T v)
{
	*p = v;
}
template <typename T> static inline T __ldg(const T *p)
{
	return *p;
}
static inline void __threadfence(void)
{
}
template <typename T, typename U> static inline T atomicAdd(T *p, U v) /* fibers do not interrupt one another */
{
	T old = *p;

	*p = old + (T)v;
	return old;
}

template <typename TO, typename FROM> static inline TO emu_bits(FROM v)
{
	TO o;

	static_assert(sizeof o == sizeof v, "one size");
	memcpy(&o, &v, sizeof o);
	return o;
}
static inline unsigned __float_as_uint(float f)
{
	return emu_bits<unsigned>(f);
}
static inline float __uint_as_float(unsigned u)
{
	return emu_bits<float>(u);
}
static inline int __float_as_int(float f)
{
	return emu_bits<int>(f);
}
static inline float __int_as_float(int i)
{
	return emu_bits<float>(i);
}
static inline int __clz(unsigned v)
{
	return v ? __builtin_clz(v) : 32;
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned sel)
{
	uint64_t all = (uint64_t)b << 32 | a;
	unsigned r = 0;

	for (int i = 0; i < 4; i++) {
		unsigned s = sel >> (4 * i) & 15, byte = (unsigned)(all >> (8 * (s & 7))) & 255;

		r |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
	}
	return r;
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n)
{
	return (unsigned)(((uint64_t)hi << 32 | lo) >> (n & 31));
}
static inline float __fdividef(float a, float b)
{
	return a / b;
}
static inline float rsqrtf(float v)
{
	return 1.0f / sqrtf(v);
}

template <typename A, typename B> static inline auto min(A a, B b) -> decltype(a + b)
{
	typedef decltype(a + b) T;

	return (T)a < (T)b ? (T)a : (T)b;
}
template <typename A, typename B> static inline auto max(A a, B b) -> decltype(a + b)
{
	typedef decltype(a + b) T;

	return (T)a > (T)b ? (T)a : (T)b;
}

#endif
