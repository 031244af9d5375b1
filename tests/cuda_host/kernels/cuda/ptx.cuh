/* SPDX-License-Identifier: MIT */
/* In place of kernels/cuda/ptx.cuh: the same functions, in C++. */
#ifndef APR_KERNELS_CUDA_PTX_CUH
#define APR_KERNELS_CUDA_PTX_CUH

#include "kernels/common/math.h"
#include "tests/cuda_host/emulate.h"

#define DEV static inline

/* Shared addresses are offsets into the block's dynamic shared memory. */
DEV uint32_t smem_addr(const void *p)
{
	return (uint32_t)((const uint8_t *)p - emu_shared());
}
DEV uint8_t *emu_at(uint32_t a)
{
	return emu_shared() + a;
}
DEV void pdl_next(void)
{
}
DEV void pdl_wait(void)
{
}
DEV void pdl_late(uint32_t)
{
}

void emu_mbar_init(uint8_t *bar);
void emu_mbar_expect(uint8_t *bar, uint32_t bytes);
void emu_bulk(uint8_t *dst, const void *src, uint32_t bytes, uint8_t *bar);
void emu_mbar_wait(uint8_t *bar, uint32_t phase);
void emu_cp_async(uint8_t *dst, const void *src, bool live);
void emu_cp_commit(void);
void emu_cp_wait(unsigned n);

DEV void mbar_init(uint32_t bar)
{
	emu_mbar_init(emu_at(bar));
}
DEV void mbar_init_fence(void)
{
}
DEV void mbar_expect(uint32_t bar, uint32_t bytes)
{
	emu_mbar_expect(emu_at(bar), bytes);
}
DEV void mbar_wait(uint32_t bar, uint32_t phase)
{
	emu_mbar_wait(emu_at(bar), phase);
}
DEV void bulk_copy_once(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
	emu_bulk(emu_at(dst), src, bytes, emu_at(bar));
}
DEV void fence_reads_before_refill(void)
{
}
DEV bool elect_one(void)
{
	return emu_lane() == 0;
}
DEV uint4 lds128(uint32_t a)
{
	return *(const uint4 *)emu_at(a);
}
DEV uint32_t lds32(uint32_t a)
{
	return *(const uint32_t *)emu_at(a);
}
DEV void cp_async16(uint32_t dst, const void *src, bool live)
{
	emu_cp_async(emu_at(dst), src, live);
}
DEV void cp_async_commit(void)
{
	emu_cp_commit();
}
template <int N> DEV void cp_async_wait(void)
{
	emu_cp_wait(N);
}
template <bool TRANS> DEV void ldmatrix4(uint32_t *r, uint32_t a)
{
	const uint32_t *rows = (const uint32_t *)emu_warp(&a, sizeof a), g = emu_lane() >> 2, t = emu_lane() & 3;

	for (uint32_t i = 0; i < 4; i++) {
		if (!TRANS) {
			memcpy(&r[i], emu_at(rows[i * 8 + g]) + 4 * t, 4);
			continue;
		}
		uint16_t lo, hi;

		memcpy(&lo, emu_at(rows[i * 8 + 2 * t]) + 2 * g, 2);
		memcpy(&hi, emu_at(rows[i * 8 + 2 * t + 1]) + 2 * g, 2);
		r[i] = lo | (uint32_t)hi << 16;
	}
}

struct emu_operands { /* a lane's: A's rows g, g + 8, each k 2t, 2t + 1, 2t + 8, 2t + 9; B's column g, the same k */
	float a[2][4], b[4];
};
DEV float emu_half(uint32_t pair, uint32_t high)
{
	return apr_half_to_f32((uint16_t)(pair >> (16 * high)));
}
DEV float emu_bfloat(uint32_t pair, uint32_t high)
{
	return __uint_as_float((pair >> (16 * high) & 0xffff) << 16);
}
template <float REAL(uint32_t, uint32_t)>
DEV void emu_mma(float *d, const uint32_t *a, uint32_t b0, uint32_t b1, const float *c)
{
	emu_operands mine;

	for (uint32_t i = 0; i < 4; i++) {
		mine.a[0][i] = REAL(a[i / 2 * 2], i & 1);
		mine.a[1][i] = REAL(a[i / 2 * 2 + 1], i & 1);
		mine.b[i] = REAL(i < 2 ? b0 : b1, i & 1);
	}
	const emu_operands *all = (const emu_operands *)emu_warp(&mine, sizeof mine);
	const uint32_t g = emu_lane() >> 2, t = emu_lane() & 3;
	float out[4];

	for (uint32_t e = 0; e < 4; e++) {
		double s = c[e];

		for (uint32_t j = 0; j < 4; j++) /* the lane of four that has these k */
			for (uint32_t i = 0; i < 4; i++)
				s += (double)all[4 * g + j].a[e >> 1][i] * all[4 * (2 * t + (e & 1)) + j].b[i];
		out[e] = (float)s;
	}
	memcpy(d, out, sizeof out);
}
DEV void mma_f16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1, const float *c)
{
	emu_mma<emu_half>(d, a, b0, b1, c);
}
DEV void mma_bf16(float *d, const uint32_t *a, uint32_t b0, uint32_t b1, const float *c)
{
	emu_mma<emu_bfloat>(d, a, b0, b1, c);
}
template <uint32_t MASK, uint32_t OR> DEV uint32_t and_or(uint32_t w)
{
	return (w & MASK) | OR;
}
DEV void store_release_sys(uint32_t *p, uint32_t v)
{
	*p = v;
}
DEV float exp2_fast(float x)
{
	return exp2f(x);
}
DEV uint32_t pack_half2(float a, float b)
{
	return apr_half_from_f32(a) | (uint32_t)apr_half_from_f32(b) << 16;
}
DEV uint32_t hsub2_const(uint32_t v, float k)
{
	return pack_half2(emu_half(v, 0) - k, emu_half(v, 1) - k);
}

#endif
