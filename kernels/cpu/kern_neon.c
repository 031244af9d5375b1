/* SPDX-License-Identifier: MIT */
/*
 * Kernels for AArch64's base vector instructions (no dot-product extension needed).
 *
 * Owns: the GEMM loops in 128-bit registers; a GEMV is the same loops over a tile of
 * one unit that stays in L1. Does not own unpacking (unpack.h) nor quantising.
 */
#include <arm_neon.h>

#define APR_V 16
#include "kernels/cpu/quantise.h"

#define GEMV_BLOCKS 8u /* one unit of the 256-element types */

APR_INLINE void apr_halves(const uint8_t *src, apr_f32v *out)
{
	float16x4_t h;

	memcpy(&h, src, 8);
	*out = (apr_f32v)vcvt_f32_f16(h);
}

APR_INLINE void apr_widen_u8(const uint8_t *src, apr_i32v *out)
{
	uint32_t four;

	memcpy(&four, src, 4);
	*out = (apr_i32v)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}

APR_INLINE void apr_widen_i8(const uint8_t *src, apr_i32v *out)
{
	uint32_t four;

	memcpy(&four, src, 4);
	*out = (apr_i32v)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
}

APR_INLINE int apr_abs_max32(const float *x)
{
	int32x4_t m = vdupq_n_s32(0);

	for (int i = 0; i < 32; i += 4)
		m = vmaxq_s32(m, vandq_s32(vreinterpretq_s32_f32(vld1q_f32(x + i)), vdupq_n_s32(0x7fffffff)));
	return vmaxvq_s32(m);
}

APR_INLINE void apr_round32(const float *x, float inv, int16_t q[32], int32_t sum[2])
{
	const float32x4_t magic = vdupq_n_f32(0x1.8p23f); /* added and taken off: rounds to nearest even */

	for (int h = 0; h < 2; h++) {
		int32x4_t total = vdupq_n_s32(0);

		for (int i = 16 * h; i < 16 * h + 16; i += 4) {
			float32x4_t f = vmulq_n_f32(vld1q_f32(x + i), inv);
			int32x4_t v = vcvtq_s32_f32(vsubq_f32(vaddq_f32(f, magic), magic));
			int32x4_t pairs = vcombine_s32(vzip1_s32(vget_low_s32(v), vget_high_s32(v)),
						       vzip2_s32(vget_low_s32(v), vget_high_s32(v))); /* 0 2 1 3 */

			vst1_s16(q + i, vmovn_s32(pairs));
			total = vaddq_s32(total, v);
		}
		sum[h] = vaddvq_s32(total);
	}
}

#define UNPACK_TILE(T, ...) apr_unpack_tile(T, __VA_ARGS__)
static void unpack(uint32_t type, const uint8_t *panel, uint32_t b0, uint32_t n, struct apr_tile *t)
{
	APR_EACH_TYPE(type, UNPACK_TILE, panel, b0, n, t);
}

/* d += w · a for 16 rows, w[0] rows 0 … 7, w[1] rows 8 … 15 */
APR_INLINE void mul_add16(int32x4_t d[4], const int16x8_t w[2], int16_t a)
{
	d[0] = vmlal_n_s16(d[0], vget_low_s16(w[0]), a);
	d[1] = vmlal_high_n_s16(d[1], w[0], a);
	d[2] = vmlal_n_s16(d[2], vget_low_s16(w[1]), a);
	d[3] = vmlal_high_n_s16(d[3], w[1], a);
}

APR_INLINE void add_scaled(float *acc, const float *m, float factor)
{
	for (int v = 0; v < 16; v += 4)
		vst1q_f32(acc + v, vfmaq_n_f32(vld1q_f32(acc + v), vld1q_f32(m + v), factor));
}

/* R rows, at most 4, from row r0 of the group on: their 4 R integer accumulators stay in registers */
APR_INLINE void gemm_rows(const enum apr_chain chain, const int R, const struct apr_tile *t, uint32_t n,
			  const struct apr_act_view *v, uint32_t group, uint32_t b0, uint32_t r0, float (*acc)[16])
{
	for (uint32_t b = 0; b < n; b++) {
		const size_t at = ((size_t)group * v->blocks + b0 + b) * v->width + r0;
		const int16_t *x = v->q + (((size_t)group * v->blocks + b0 + b) * 16 * v->width + r0) * 2;

		for (int h = 0; h < (chain == APR_CHAIN_HALVES ? 2 : 1); h++) {
			const int pairs = chain == APR_CHAIN_HALVES ? 8 : 16;
			int32x4_t d[4][4];

			for (int r = 0; r < R; r++) {
				for (int c = 0; c < 4; c++)
					d[r][c] = vdupq_n_s32(0);
			}
			for (int i = 0; i < pairs; i++, x += v->width * 2) {
				int16x8x2_t a = vld2q_s16(t->w[b][h * 8 + i]), z = vld2q_s16(t->w[b][h * 8 + i] + 16);
				int16x8_t first[2] = {a.val[0], z.val[0]}, second[2] = {a.val[1], z.val[1]};

				APR_UNROLL(4)
				for (int r = 0; r < R; r++) {
					mul_add16(d[r], first, x[2 * r]);
					mul_add16(d[r], second, x[2 * r + 1]);
				}
			}
			APR_UNROLL(4)
			for (int r = 0; r < R; r++) {
				APR_UNROLL(4)
				for (int c = 0; c < 4; c++) {
					float32x4_t p = vmulq_n_f32(vld1q_f32(t->p[b] + 4 * c), v->s[at + r]);

					vst1q_f32(acc[r] + 4 * c, vfmaq_f32(vld1q_f32(acc[r] + 4 * c), p, vcvtq_f32_s32(d[r][c])));
				}
			}
		}
		for (int r = 0; r < R; r++) {
			if (chain == APR_CHAIN_MIN)
				add_scaled(acc[r], t->m[b][0], v->xs[at + r]);
			if (chain == APR_CHAIN_MIN2) {
				add_scaled(acc[r], t->m[b][0], v->xh[0][at + r]);
				add_scaled(acc[r], t->m[b][1], v->xh[1][at + r]);
			}
		}
	}
}

#define GEMM_CHAIN(chain) \
	case chain: \
		switch (n_rows - r) { \
		case 1: gemm_rows(chain, 1, t, n, v, group, b0, r, acc + r); break; \
		case 2: gemm_rows(chain, 2, t, n, v, group, b0, r, acc + r); break; \
		case 3: gemm_rows(chain, 3, t, n, v, group, b0, r, acc + r); break; \
		default: gemm_rows(chain, 4, t, n, v, group, b0, r, acc + r); break; \
		} \
		break;

static void gemm(enum apr_chain chain, const struct apr_tile *t, uint32_t n, const struct apr_act_view *v,
		 uint32_t group, uint32_t b0, uint32_t n_rows, float (*acc)[16])
{
	for (uint32_t r = 0; r < n_rows; r += 4) {
		switch (chain) {
		GEMM_CHAIN(APR_CHAIN_PLAIN)
		GEMM_CHAIN(APR_CHAIN_MIN)
		GEMM_CHAIN(APR_CHAIN_HALVES)
		GEMM_CHAIN(APR_CHAIN_MIN2)
		}
	}
}

static void gemv(uint32_t type, const uint8_t *panel, const struct apr_act_view *v, float (*acc)[16])
{
	struct apr_tile t;

	memset(acc, 0, v->rows * sizeof acc[0]);
	for (uint32_t b = 0; b < v->blocks; b += GEMV_BLOCKS) {
		uint32_t n = v->blocks - b < GEMV_BLOCKS ? v->blocks - b : GEMV_BLOCKS;

		unpack(type, panel, b, n, &t);
		gemm(apr_chain_of(type), &t, n, v, 0, b, v->rows, acc);
	}
}

#define UNPACK_FLOATS(T, ...) apr_unpack_floats(T, __VA_ARGS__)
static void unpack_f32(uint32_t type, const uint8_t *panel, uint32_t k0, uint32_t n, float (*tile)[16])
{
	const uint8_t *p = panel + (size_t)k0 * apr_panel_unit_bytes(type);

	switch (type) {
	case APR_TYPE_F32: memcpy(tile, p, (size_t)n * 64); return;
	case APR_TYPE_F16:
		for (uint32_t k = 0; k < n; k++) {
			for (int i = 0; i < 4; i++)
				apr_halves(p + k * 32 + 8 * i, (apr_f32v *)(tile[k] + 4 * i));
		}
		return;
	case APR_TYPE_BF16:
		for (uint32_t k = 0; k < 4 * n; k++) {
			uint16x4_t h;

			memcpy(&h, p + k * 8, 8);
			vst1q_f32(tile[0] + 4 * k, vreinterpretq_f32_u32(vshll_n_u16(h, 16)));
		}
		return;
	default: break;
	}
	APR_EACH_TYPE(type, UNPACK_FLOATS, panel, k0, n, tile);
}

APR_INLINE void fma_rows(const int R, const float (*tile)[16], uint32_t n, const float *const *x, float (*out)[16])
{
	float32x4_t acc[4][4];

	for (int i = 0; i < R * 4; i++)
		acc[i / 4][i % 4] = vld1q_f32(out[i / 4] + i % 4 * 4);
	for (uint32_t k = 0; k < n; k++) {
		APR_UNROLL(4)
		for (int c = 0; c < 4; c++) {
			float32x4_t w = vld1q_f32(tile[k] + 4 * c);

			APR_UNROLL(4)
			for (int r = 0; r < R; r++)
				acc[r][c] = vfmaq_n_f32(acc[r][c], w, x[r][k]);
		}
	}
	for (int i = 0; i < R * 4; i++)
		vst1q_f32(out[i / 4] + i % 4 * 4, acc[i / 4][i % 4]);
}

static void fma_f32(const float (*tile)[16], uint32_t n, const float *const *x, uint32_t n_rows, float (*acc)[16])
{
	for (uint32_t r = 0; r < n_rows; r += 4) {
		switch (n_rows - r) {
		case 1: fma_rows(1, tile, n, x + r, acc + r); break;
		case 2: fma_rows(2, tile, n, x + r, acc + r); break;
		case 3: fma_rows(3, tile, n, x + r, acc + r); break;
		default: fma_rows(4, tile, n, x + r, acc + r); break;
		}
	}
}

static void fma4_f32(const float (*const tile[4])[16], uint32_t n, const float *x, float (*out)[16])
{
	float32x4_t acc[16];

	for (int i = 0; i < 16; i++)
		acc[i] = vld1q_f32(out[i / 4] + i % 4 * 4);
	for (uint32_t k = 0; k < n; k++) {
		APR_UNROLL(16)
		for (int i = 0; i < 16; i++)
			acc[i] = vfmaq_n_f32(acc[i], vld1q_f32(tile[i / 4][k] + i % 4 * 4), x[k]);
	}
	for (int i = 0; i < 16; i++)
		vst1q_f32(out[i / 4] + i % 4 * 4, acc[i]);
}

const struct apr_kern apr_kern_neon = {apr_quantise_rows, unpack, gemm, gemv, unpack_f32, fma_f32, fma4_f32};
