/* SPDX-License-Identifier: MIT */
/*
 * Host memory for the CPU backend: what is to be had, and taking a plan's lines.
 *
 * Owns: anonymous mappings, one a line. Does not own the sizes (engine/plan.c).
 */
#ifndef APR_ENGINE_CPU_MEMORY_H
#define APR_ENGINE_CPU_MEMORY_H

#include "engine/backend.h"

/* Bytes that can be taken now: the system's available memory, the cgroup's limit and RLIMIT_AS considered. */
uint64_t apr_cpu_memory_available(void);
/* All lines but FILE and HEAP ones, or none. -ENOMEM with the line's name. */
int apr_cpu_memory_reserve(struct apr_plan *plan, char *err, size_t errlen);
void apr_cpu_memory_release(struct apr_plan *plan);
/* "AMD EPYC 9B14"; "cpu" where the system does not say. */
void apr_cpu_model_name(char *out, size_t len);

#endif
