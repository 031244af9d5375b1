/* SPDX-License-Identifier: MIT */
/*
 * The few instructions that CUDA C++ has no name for: barriers of the copy engine,
 * bulk copies, tensor-core products, programmatic dependent launch.
 *
 * Owns: one inline function an instruction. Does not own how they are used.
 */
#ifndef APR_KERNELS_CUDA_PTX_CUH
#define APR_KERNELS_CUDA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#define DEV static __device__ __forceinline__

DEV uint32_t smem_addr(const void *p)
{
	return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- programmatic dependent launch ------------------------------------------------ */
/* Every kernel calls both: a kernel that ends without waiting would let the next one
 * pass the one before it. */
#ifdef APR_PDL_TEST
/* For tests: one block in four is late by up to 3 µs, another at every call: before it waits, when it has waited, and
 * after it let the next kernel start. What relies on luck then differs. */
DEV void pdl_late(uint32_t salt)
{
	uint32_t h = (uint32_t)clock64() ^ salt ^ (blockIdx.x * 0x9e3779b9u + blockIdx.y * 0x85ebca6bu);

	h = (h ^ (h >> 15)) * 0x2c1b3c6du;
	h ^= h >> 12;
	if ((h & 3) == 0)
		__nanosleep(h >> 8 & 0xbff);
}
#else
DEV void pdl_late(uint32_t)
{
}
#endif
DEV void pdl_next(void)
{
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
	pdl_late(1);
}
DEV void pdl_wait(void)
{
	pdl_late(2);
	asm volatile("griddepcontrol.wait;" ::: "memory");
	pdl_late(3);
}

/* ---- barriers and bulk copies ------------------------------------------------------- */
DEV void mbar_init(uint32_t bar)
{
	asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
}
DEV void mbar_init_fence(void)
{
	asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEV void mbar_expect(uint32_t bar, uint32_t bytes)
{
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
DEV void mbar_wait(uint32_t bar, uint32_t phase)
{
	asm volatile("{\n.reg .pred p;\nTRY:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE;\n"
	             "bra TRY;\nDONE:\n}" ::"r"(bar),
	             "r"(phase)
	             : "memory");
}
/* Of what is read once: it leaves the L2 first, and what every kernel reads (code, arguments, pages' numbers) stays. */
DEV void bulk_copy_once(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
	const uint64_t evict_first = 0x12f0000000000000ull; /* what createpolicy gives for it */

	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
	             "%4;" ::"r"(dst),
	             "l"(src), "r"(bytes), "r"(bar), "l"(evict_first)
	             : "memory");
}
DEV void bulk_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
	             "l"(src), "r"(bytes), "r"(bar)
	             : "memory");
}
/* Before the copy engine refills memory that this warp has read by ordinary loads: the
 * refill is another proxy, not ordered after them without this. Followed by __syncwarp. */
DEV void fence_reads_before_refill(void)
{
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
DEV bool elect_one(void)
{
	uint32_t p;

	asm volatile("{\n.reg .pred P;\nelect.sync _|P, 0xffffffff;\nselp.u32 %0, 1, 0, P;\n}" : "=r"(p));
	return p != 0;
}

/* ---- loads --------------------------------------------------------------------------- */
DEV uint4 lds128(uint32_t a)
{
	uint4 v;

	asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
	return v;
}
DEV uint32_t lds32(uint32_t a)
{
	uint32_t v;

	asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
	return v;
}
DEV void cp_async16(uint32_t dst, const void *src, bool live) /* not live: 16 zero bytes */
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(live ? 16 : 0) : "memory");
}
DEV void cp_async_commit(void)
{
	asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> DEV void cp_async_wait(void)
{
	asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
template <bool TRANS> DEV void ldmatrix4(uint32_t *r, uint32_t a)
{
	if (TRANS)
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
		             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
		             : "r"(a)
		             : "memory");
	else
		asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
		             : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
		             : "r"(a)
		             : "memory");
}

/* ---- tensor cores: d = a · b + c, 16 × 8 × 16, F32 sums ------------------------------ */
/* lane = 4 g + t. a: rows g and g + 8, k 2t, 2t+1 and 2t+8, 2t+9; b: column g, the same
 * k; c, d: rows g and g + 8, columns 2t and 2t + 1. */
DEV void mma_f16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1, const float *c)
{
	asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
	    : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
	    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
DEV void mma_bf16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1, const float *c)
{
	asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
	    : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
	    : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

/* (w & MASK) | OR, in one instruction */
template <uint32_t MASK, uint32_t OR> DEV uint32_t and_or(uint32_t w)
{
	uint32_t r;

	asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(w), "n"(MASK), "r"(OR));
	return r;
}
DEV float exp2_fast(float x) /* 2 ulp; -inf gives 0 */
{
	float y;

	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
	return y;
}
DEV uint32_t pack_half2(float a, float b)
{
	__half2 h = __floats2half2_rn(a, b);

	return *(uint32_t *)&h;
}
DEV uint32_t hsub2_const(uint32_t v, float k)
{
	__half2 h = __hsub2(*(__half2 *)&v, __float2half2_rn(k));

	return *(uint32_t *)&h;
}

/* A reader that acquires it at system scope sees what was stored before */
DEV void store_release_sys(uint32_t *p, uint32_t v)
{
	asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

#endif
