/* SPDX-License-Identifier: MIT */
/* kernels/common/vec.h on AArch64 Advanced SIMD: four quarters of four. Included by vec.h alone. */
#ifndef APR_KERNELS_COMMON_VEC_NEON_H
#define APR_KERNELS_COMMON_VEC_NEON_H

#include <arm_neon.h>

typedef struct {
	float32x4_t q[4];
} vf;
typedef struct {
	int32x4_t q[4];
} vi;
typedef struct {
	uint32x4_t q[4];
} vm;

#define VEC4(type, name, args, expr) \
	VEC type name args \
	{ \
		type r_; \
		APR_UNROLL \
		for (uint32_t i_ = 0; i_ < 4; i_++) \
			r_.q[i_] = (expr); \
		return r_; \
	}

VEC4(vf, vf_load, (const float *p), vld1q_f32(p + 4 * i_))
VEC4(vf, vf_set1, (float x), vdupq_n_f32(x))
VEC4(vf, vf_add, (vf a, vf b), vaddq_f32(a.q[i_], b.q[i_]))
VEC4(vf, vf_sub, (vf a, vf b), vsubq_f32(a.q[i_], b.q[i_]))
VEC4(vf, vf_mul, (vf a, vf b), vmulq_f32(a.q[i_], b.q[i_]))
VEC4(vf, vf_div, (vf a, vf b), vdivq_f32(a.q[i_], b.q[i_]))
VEC4(vf, vf_fma, (vf a, vf b, vf c), vfmaq_f32(c.q[i_], a.q[i_], b.q[i_]))
VEC4(vf, vf_max, (vf a, vf b), vbslq_f32(vcgtq_f32(a.q[i_], b.q[i_]), a.q[i_], b.q[i_]))
VEC4(vf, vf_min, (vf a, vf b), vbslq_f32(vcltq_f32(a.q[i_], b.q[i_]), a.q[i_], b.q[i_]))
VEC4(vf, vf_select, (vm m, vf a, vf b), vbslq_f32(m.q[i_], a.q[i_], b.q[i_]))
VEC4(vf, vf_of_bits, (vi a), vreinterpretq_f32_s32(a.q[i_]))
VEC4(vf, vf_of_int, (vi a), vcvtq_f32_s32(a.q[i_]))
VEC4(vf, vf_of_uint, (vi a), vcvtq_f32_u32(vreinterpretq_u32_s32(a.q[i_])))
VEC4(vf, vf_load_half, (const uint16_t *p), vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i_))))
VEC4(vf, vf_load_bfloat, (const uint16_t *p), vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i_), 16)))
VEC4(vi, vi_set1, (int32_t x), vdupq_n_s32(x))
VEC4(vi, vi_load, (const int32_t *p), vld1q_s32(p + 4 * i_))
VEC4(vi, vi_add, (vi a, vi b), vaddq_s32(a.q[i_], b.q[i_]))
VEC4(vi, vi_sub, (vi a, vi b), vsubq_s32(a.q[i_], b.q[i_]))
VEC4(vi, vi_and, (vi a, vi b), vandq_s32(a.q[i_], b.q[i_]))
VEC4(vi, vi_xor, (vi a, vi b), veorq_s32(a.q[i_], b.q[i_]))
VEC4(vi, vi_sra1, (vi a), vshrq_n_s32(a.q[i_], 1))
VEC4(vi, vi_sra23, (vi a), vshrq_n_s32(a.q[i_], 23))
VEC4(vi, vi_sll23, (vi a), vshlq_n_s32(a.q[i_], 23))
VEC4(vi, vi_of_bits, (vf a), vreinterpretq_s32_f32(a.q[i_]))
VEC4(vi, vi_trunc, (vf a), vcvtq_s32_f32(a.q[i_]))
VEC4(vm, vf_lt, (vf a, vf b), vcltq_f32(a.q[i_], b.q[i_]))
VEC4(vm, vf_le, (vf a, vf b), vcleq_f32(a.q[i_], b.q[i_]))
VEC4(vm, vf_unordered, (vf a), vmvnq_u32(vceqq_f32(a.q[i_], a.q[i_])))
VEC4(vm, vi_gt, (vi a, vi b), vcgtq_s32(a.q[i_], b.q[i_]))
VEC4(vm, vm_or, (vm a, vm b), vorrq_u32(a.q[i_], b.q[i_]))
VEC4(vm, vm_and, (vm a, vm b), vandq_u32(a.q[i_], b.q[i_]))

VEC uint32_t vm_bits(vm m)
{
	static const uint32_t w[4] = {1, 2, 4, 8};
	uint32x4_t k = vld1q_u32(w);

	return vaddvq_u32(vandq_u32(m.q[0], k)) | vaddvq_u32(vandq_u32(m.q[1], k)) << 4 |
	       vaddvq_u32(vandq_u32(m.q[2], k)) << 8 | vaddvq_u32(vandq_u32(m.q[3], k)) << 12;
}
VEC void vf_store(float *p, vf v)
{
	for (uint32_t i = 0; i < 4; i++)
		vst1q_f32(p + 4 * i, v.q[i]);
}
VEC void vi_store(int32_t *p, vi v)
{
	for (uint32_t i = 0; i < 4; i++)
		vst1q_s32(p + 4 * i, v.q[i]);
}
VEC void vf_store_half(uint16_t *p, vf v)
{
	for (uint32_t i = 0; i < 4; i++)
		vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(v.q[i])));
}
VEC void vf_store_bfloat(uint16_t *p, vf v)
{
	for (uint32_t i = 0; i < 4; i++) {
		uint32x4_t u = vreinterpretq_u32_f32(v.q[i]), even = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
		uint32x4_t r = vaddq_u32(vaddq_u32(u, vdupq_n_u32(0x7fff)), even);

		r = vbslq_u32(vceqq_f32(v.q[i], v.q[i]), r, vorrq_u32(u, vdupq_n_u32(0x400000)));
		vst1_u16(p + 4 * i, vshrn_n_u32(r, 16));
	}
}
VEC float vf_sum(vf v)
{
	float32x4_t a = vaddq_f32(vaddq_f32(v.q[0], v.q[2]), vaddq_f32(v.q[1], v.q[3]));
	float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));

	return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}
VEC float vf_hmax(vf v)
{
	float t[VL], m;

	vf_store(t, v);
	for (uint32_t s = 8; s; s >>= 1)
		for (uint32_t i = 0; i < s; i++)
			t[i] = t[i] > t[i + s] ? t[i] : t[i + s];
	m = t[0];
	return m;
}
VEC void vf_load_pairs(const float *p, vf *a, vf *b)
{
	for (uint32_t i = 0; i < 4; i++) {
		float32x4x2_t t = vld2q_f32(p + 8 * i);

		a->q[i] = t.val[0];
		b->q[i] = t.val[1];
	}
}
VEC void vf_store_pairs(float *p, vf a, vf b)
{
	for (uint32_t i = 0; i < 4; i++)
		vst2q_f32(p + 8 * i, (float32x4x2_t){{a.q[i], b.q[i]}});
}
VEC void vec4_transpose(float32x4_t r[4])
{
	float32x4x2_t a = vtrnq_f32(r[0], r[1]), b = vtrnq_f32(r[2], r[3]);

	r[0] = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
	r[1] = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
	r[2] = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
	r[3] = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}
VEC void vf_transpose(vf r[VL])
{
	vf t[VL];

	for (uint32_t i = 0; i < 4; i++) /* block row i, block column j goes to row j, column i */
		for (uint32_t j = 0; j < 4; j++) {
			float32x4_t b[4] = {r[4 * i].q[j], r[4 * i + 1].q[j], r[4 * i + 2].q[j], r[4 * i + 3].q[j]};

			vec4_transpose(b);
			for (uint32_t k = 0; k < 4; k++)
				t[4 * j + k].q[i] = b[k];
		}
	memcpy(r, t, sizeof(t));
}
/* Sixteen rows of at least 16 columns of 16 bits, ld apart, to columns of 16, ldd apart; returns the columns done.
 * One interleaving of rows i and i + 8 turns the bits of (row, column) left by one. */
VEC uint32_t vh_turn(const uint16_t *src, size_t ld, uint32_t left, uint16_t *dst, size_t ldd)
{
	uint16x8_t r[VL], t[VL];
	uint32_t half, i, round;

	(void)left;
	for (half = 0; half < VL; half += 8) {
		for (i = 0; i < VL; i++)
			r[i] = vld1q_u16(src + i * ld + half);
		APR_UNROLL
		for (round = 0; round < 4; round++) {
			APR_UNROLL
			for (i = 0; i < 8; i++) {
				t[2 * i] = vzip1q_u16(r[i], r[i + 8]);
				t[2 * i + 1] = vzip2q_u16(r[i], r[i + 8]);
			}
			APR_UNROLL
			for (i = 0; i < VL; i++)
				r[i] = t[i];
		}
		for (i = 0; i < 8; i++) {
			vst1q_u16(dst + (half + i) * ldd, r[2 * i]);
			vst1q_u16(dst + (half + i) * ldd + 8, r[2 * i + 1]);
		}
	}
	return VL;
}
VEC void vu_mul_wide(vi a, uint32_t m, vi *hi, vi *lo)
{
	uint32x2_t k = vdup_n_u32(m);

	for (uint32_t i = 0; i < 4; i++) {
		uint32x4_t u = vreinterpretq_u32_s32(a.q[i]);
		uint64x2_t x = vmull_u32(vget_low_u32(u), k), y = vmull_u32(vget_high_u32(u), k);

		hi->q[i] = vreinterpretq_s32_u32(vcombine_u32(vshrn_n_u64(x, 32), vshrn_n_u64(y, 32)));
		lo->q[i] = vreinterpretq_s32_u32(vcombine_u32(vmovn_u64(x), vmovn_u64(y)));
	}
}

#endif
