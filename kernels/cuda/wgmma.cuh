/* SPDX-License-Identifier: MIT */
/*
 * Warpgroup products and tensor copies: the instructions of sm_90a that ptx.cuh does
 * not have.
 *
 * Owns: one inline function an instruction, and the descriptor of an operand in
 * shared memory. Operands lie in the 128-byte swizzle that a tensor copy writes:
 * rows of 128 B, eight of them (1024 B, aligned) permuted together.
 */
#ifndef APR_KERNELS_CUDA_WGMMA_CUH
#define APR_KERNELS_CUDA_WGMMA_CUH

#include <cuda.h>

#include "kernels/cuda/ptx.cuh"

/* ---- barriers ------------------------------------------------------------------------ */

DEV void mbar_init_many(uint32_t bar, uint32_t arrivals)
{
	asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}
DEV void mbar_arrive(uint32_t bar)
{
	asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
template <int ID, int THREADS> DEV void named_barrier(void)
{
	asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
/* Registers a thread of this warpgroup has from here on */
template <int N> DEV void more_registers(void)
{
	asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> DEV void fewer_registers(void)
{
	asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- copies -------------------------------------------------------------------------- */

/* The map's box at (x, y, z) to shared memory */
DEV void tensor_copy(uint32_t dst, const CUtensorMap *map, uint32_t x, uint32_t y, uint32_t z, uint32_t bar)
{
	asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3,%4}], [%5];"
	             ::"r"(dst),
	             "l"(map), "r"(x), "r"(y), "r"(z), "r"(bar)
	             : "memory");
}

/* ---- products ------------------------------------------------------------------------ */

/* What an operand at shared address a looks like. Rows are K (not turned): eight rows of 128 B after eight. Turned: k
 * along the rows, and 64 columns further lie `next` bytes further. */
DEV uint64_t wgmma_operand(uint32_t a, uint32_t next)
{
	return (uint64_t)((a & 0x3ffff) >> 4) | (uint64_t)(next >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | 1ull << 62;
}
DEV void wgmma_fence(void)
{
	asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
DEV void wgmma_commit(void)
{
	asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> DEV void wgmma_wait(void)
{
	asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* After a wait: the compiler may not have read these sums before it */
template <int N> DEV void wgmma_done(float *d)
{
#pragma unroll
	for (int i = 0; i < N; i++)
		asm volatile("" : "+f"(d[i])::"memory");
}

/* d = a · b (+ d where keep), 64 rows × n columns × 16 k of a warpgroup. a: registers, as of mma_f16, a warp has 16 rows; b:
 * F16 in shared memory, n rows of k, or TURNED, k rows of n; d: columns 8 j + 2t, + 1 of rows g and g + 8 at d[4 j]. */
template <bool TURNED> DEV void wgmma_n64(float *d, const uint32_t *a, uint64_t b, int keep)
{
	asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
	             "%0,%1,%2,%3,%4,%5,%6,%7,"
	             "%8,%9,%10,%11,%12,%13,%14,%15,"
	             "%16,%17,%18,%19,%20,%21,%22,%23,"
	             "%24,%25,%26,%27,%28,%29,%30,%31"
	             "}, {%32,%33,%34,%35}, %36, p, 1, 1, %38;\n}"
	             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
	               "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
	               "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
	               "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
	             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"((int)TURNED));
}
template <bool TURNED> DEV void wgmma_n128(float *d, const uint32_t *a, uint64_t b, int keep)
{
	asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {"
	             "%0,%1,%2,%3,%4,%5,%6,%7,"
	             "%8,%9,%10,%11,%12,%13,%14,%15,"
	             "%16,%17,%18,%19,%20,%21,%22,%23,"
	             "%24,%25,%26,%27,%28,%29,%30,%31,"
	             "%32,%33,%34,%35,%36,%37,%38,%39,"
	             "%40,%41,%42,%43,%44,%45,%46,%47,"
	             "%48,%49,%50,%51,%52,%53,%54,%55,"
	             "%56,%57,%58,%59,%60,%61,%62,%63"
	             "}, {%64,%65,%66,%67}, %68, p, 1, 1, %70;\n}"
	             : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
	               "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
	               "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
	               "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
	               "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
	               "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
	               "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
	               "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
	             : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep), "n"((int)TURNED));
}
template <int N, bool TURNED> DEV void wgmma(float *d, const uint32_t *a, uint64_t b, int keep)
{
	if (N == 64)
		wgmma_n64<TURNED>(d, a, b, keep);
	else
		wgmma_n128<TURNED>(d, a, b, keep);
}

#endif
