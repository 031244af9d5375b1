/* SPDX-License-Identifier: MIT */
/*
 * A resident kernel that answers through pinned host memory.
 *
 * Owns: the kernel, its stream, the two words. Does not own timing (gpu_ring.c).
 */
#ifndef APR_BENCH_GPU_ECHO_H
#define APR_BENCH_GPU_ECHO_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GPU_ECHO_STOP UINT32_MAX

/* Starts it. ask: stored with release by the host; answer: the same number, in the last word of a 64-byte record stored with
 * release by the kernel. 0; -ENODEV no device; -EIO. */
int gpu_echo_start(uint32_t **ask, uint32_t **answer);
int gpu_echo_end(void); /* after GPU_ECHO_STOP was stored */

#ifdef __cplusplus
}
#endif

#endif
