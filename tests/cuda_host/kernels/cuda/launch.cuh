/* SPDX-License-Identifier: MIT */
/* In place of kernels/cuda/launch.cuh: a launch runs its blocks at once, on this thread. */
#ifndef APR_KERNELS_CUDA_LAUNCH_CUH
#define APR_KERNELS_CUDA_LAUNCH_CUH

#include <errno.h>

#include "tests/cuda_host/emulate.h"

#define APR_SMEM_MAX (227u * 1024u)

/* EMU_CLUSTER: blocks of a cluster, which need one another; given with the file that has such a kernel. */
template <typename... Params, typename... Args> static inline int
launch(void (*kernel)(Params...), dim3 grid, unsigned threads, size_t smem, cudaStream_t, bool, Args... args)
{
	if (smem > APR_SMEM_MAX || threads > 1024 || threads % 32)
		return -EIO;
	emu_run(grid, threads, smem, EMU_CLUSTER, [=] { kernel(Params(args)...); });
	return 0;
}
template <typename... Params> static inline int prefer_shared(void (*)(Params...))
{
	return 0;
}

#endif
