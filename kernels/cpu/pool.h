/* SPDX-License-Identifier: MIT */
/*
 * Compute threads that run one parallel region after another.
 *
 * Owns: the threads, within the process's affinity and cgroup quota; the hand-off
 * (spin briefly, then futex). Does not own what they compute. The caller is worker
 * 0 of each region. One region at a time; regions do not nest.
 */
#ifndef APR_KERNELS_CPU_POOL_H
#define APR_KERNELS_CPU_POOL_H

#include <stddef.h>
#include <stdint.h>

struct apr_pool;

/* Threads this process may use: min(affinity, cgroup cpu.max rounded up), at least 1. */
unsigned apr_pool_usable_cpus(void);

/* threads 0 = usable CPUs. -ENOMEM, -EAGAIN. */
int apr_pool_new(struct apr_pool **out, unsigned threads);
void apr_pool_free(struct apr_pool *p);
unsigned apr_pool_threads(const struct apr_pool *p); /* 1 for NULL */

/* Calls fn(arg, i, worker) for i in 0..n-1, each once, on any worker (dynamic); returns when all are done.
 * A NULL pool runs them here. worker < apr_pool_threads(). */
void apr_pool_run(struct apr_pool *p, uint32_t n, void (*fn)(void *arg, uint32_t i, unsigned worker), void *arg);

/* For a task to call, of its own worker: what that worker will read first in a later region. While it waits it
 * prefetches these bytes, which need not stay mapped. */
void apr_pool_ahead(struct apr_pool *p, unsigned worker, const void *mem, size_t bytes);

#endif
