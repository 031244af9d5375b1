/* SPDX-License-Identifier: MIT */
/*
 * The step's last launch: its number, stored where the host looks.
 *
 * Owns: that store. Everything earlier on the stream is complete when it runs, and
 * the release at system scope makes it visible to a host thread that acquires the
 * number (graphs_watch).
 */
#include <cuda_runtime.h>
#include <errno.h>
#include <stdint.h>

static __global__ void store_mark(uint32_t *mark, uint32_t number)
{
	asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(mark), "r"(number) : "memory");
}

extern "C" int apr_graphs_mark(cudaStream_t stream, uint32_t *mark, uint32_t number);
extern "C" int apr_graphs_mark(cudaStream_t stream, uint32_t *mark, uint32_t number)
{
	store_mark<<<1, 1, 0, stream>>>(mark, number);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}
