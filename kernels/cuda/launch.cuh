/* SPDX-License-Identifier: MIT */
/*
 * Host side of a launch: attributes, shared-memory limits, errors as -errno.
 *
 * Owns: how kernels/cuda starts a kernel. Does not own grids (each op's file).
 */
#ifndef APR_KERNELS_CUDA_LAUNCH_CUH
#define APR_KERNELS_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>
#include <errno.h>

/* smem beyond 48 KB needs the kernel's own permission, which is the same for every call. */
template <typename... Params, typename... Args> static inline int
launch(void (*kernel)(Params...), dim3 grid, unsigned threads, size_t smem, cudaStream_t stream, bool pdl, Args... args)
{
	cudaLaunchConfig_t c = {};
	cudaLaunchAttribute a[1];

	if (smem > 48 * 1024 && cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
	                                             (int)smem) != cudaSuccess)
		return -EIO;
	a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
	a[0].val.programmaticStreamSerializationAllowed = 1;
	c.gridDim = grid;
	c.blockDim = dim3(threads);
	c.dynamicSmemBytes = smem;
	c.stream = stream;
	c.attrs = a;
	c.numAttrs = pdl ? 1 : 0;
	return cudaLaunchKernelEx(&c, kernel, Params(args)...) == cudaSuccess ? 0 : -EIO;
}

/* Kernels of one chain are to want the same division of L1 and shared memory: a multiprocessor changes it only when it is
 * empty. */
template <typename... Params> static inline int prefer_shared(void (*kernel)(Params...))
{
	return cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
	                            cudaSharedmemCarveoutMaxShared) == cudaSuccess
	               ? 0
	               : -EIO;
}

#define APR_SMEM_MAX (227u * 1024u) /* what one block can have on sm_90 */

#endif
