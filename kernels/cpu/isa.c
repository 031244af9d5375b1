/* SPDX-License-Identifier: MIT */
/*
 * Which instruction set the kernels use: detected once, or forced by a test.
 *
 * Owns: detection and the current choice. Does not own the kernels.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "kernels/cpu/kern.h"

#if defined(__x86_64__)
#include <cpuid.h>

static bool has_f16c(void) /* no name for it in older __builtin_cpu_supports; needs what AVX2 needs of the OS */
{
	unsigned a, b, c, d;

	return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

static bool can_run(enum apr_cpu_isa isa)
{
	switch (isa) {
	case APR_ISA_SCALAR: return true;
#if defined(__x86_64__)
	/* __builtin_cpu_supports also asks the OS (XGETBV) whether it saves the registers */
	case APR_ISA_AVX2:
		return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
	case APR_ISA_AVX512:
		return can_run(APR_ISA_AVX2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
		       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
	case APR_ISA_VNNI: return can_run(APR_ISA_AVX512) && __builtin_cpu_supports("avx512vnni");
#elif defined(__aarch64__)
	case APR_ISA_NEON: return true;
#endif
	default: return false;
	}
}

enum apr_cpu_isa apr_cpu_isa_best(void)
{
	static const enum apr_cpu_isa order[] = {APR_ISA_VNNI, APR_ISA_AVX512, APR_ISA_AVX2, APR_ISA_NEON};

	for (unsigned i = 0; i < sizeof order / sizeof order[0]; i++) {
		if (can_run(order[i]))
			return order[i];
	}
	return APR_ISA_SCALAR;
}

/* -1 until first asked. Relaxed: any thread that finds -1 computes the same value. */
static _Atomic int current = -1;

enum apr_cpu_isa apr_cpu_isa_current(void)
{
	int isa = atomic_load_explicit(&current, memory_order_relaxed);

	if (isa < 0) {
		isa = (int)apr_cpu_isa_best();
		atomic_store_explicit(&current, isa, memory_order_relaxed);
	}
	return (enum apr_cpu_isa)isa;
}

int apr_cpu_isa_force(enum apr_cpu_isa isa)
{
	if (!can_run(isa))
		return -ENOTSUP;
	atomic_store_explicit(&current, (int)isa, memory_order_relaxed);
	return 0;
}

const char *apr_cpu_isa_name(enum apr_cpu_isa isa)
{
	static const char *const names[] = {"scalar", "avx2", "avx512", "avx512-vnni", "neon"};

	return (unsigned)isa < sizeof names / sizeof names[0] ? names[isa] : "unknown";
}

const struct apr_kern *apr_kern_current(void)
{
	switch (apr_cpu_isa_current()) {
#if defined(__x86_64__)
	case APR_ISA_AVX2: return &apr_kern_avx2;
	case APR_ISA_AVX512: return &apr_kern_avx512;
	case APR_ISA_VNNI: return &apr_kern_vnni;
#elif defined(__aarch64__)
	case APR_ISA_NEON: return &apr_kern_neon;
#endif
	default: return &apr_kern_scalar;
	}
}
