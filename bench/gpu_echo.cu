/* SPDX-License-Identifier: MIT */
/* The resident kernel: see gpu_echo.h. */
#include "bench/gpu_echo.h"

#include <cuda_runtime.h>
#include <errno.h>

static cudaStream_t stream;
static uint32_t *words; /* ask, and 256 bytes on the record */

static __global__ void echo(const uint32_t *ask, uint32_t *record)
{
	uint32_t last = 0, now;

	for (;;) {
		do {
			/* pairs with the host's release store of a number */
			asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(now) : "l"(ask) : "memory");
		} while (now == last);
		if (now == GPU_ECHO_STOP)
			return;
		last = now;
		record[0] = now ^ 0x5a5a; /* what a token's record carries */
		/* pairs with the host's acquire load */
		asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(record + 15), "r"(now) : "memory");
	}
}

extern "C" int gpu_echo_start(uint32_t **ask, uint32_t **answer)
{
	int n = 0;

	if (cudaGetDeviceCount(&n) != cudaSuccess || !n)
		return -ENODEV;
	if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess ||
	    cudaHostAlloc((void **)&words, 4096, cudaHostAllocMapped) != cudaSuccess)
		return -EIO;
	for (int i = 0; i < 1024; i++)
		words[i] = 0;
	*ask = words;
	*answer = words + 64 + 15;
	echo<<<1, 1, 0, stream>>>(words, words + 64);
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

extern "C" int gpu_echo_end(void)
{
	return cudaStreamSynchronize(stream) == cudaSuccess ? 0 : -EIO;
}
