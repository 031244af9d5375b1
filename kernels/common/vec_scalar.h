/* SPDX-License-Identifier: MIT */
/* kernels/common/vec.h in plain C: the reference. Included by vec.h alone. */
#ifndef APR_KERNELS_COMMON_VEC_SCALAR_H
#define APR_KERNELS_COMMON_VEC_SCALAR_H

typedef struct {
	float l[VL];
} vf;
typedef struct {
	int32_t l[VL];
} vi;
typedef struct {
	uint32_t bits;
} vm;

#define VEC_EACH for (uint32_t i_ = 0; i_ < VL; i_++)
#define VEC_F(name, args, expr) \
	VEC vf name args \
	{ \
		vf r_; \
		VEC_EACH r_.l[i_] = (expr); \
		return r_; \
	}
#define VEC_I(name, args, expr) \
	VEC vi name args \
	{ \
		vi r_; \
		VEC_EACH r_.l[i_] = (int32_t)(expr); \
		return r_; \
	}
#define VEC_M(name, args, expr) \
	VEC vm name args \
	{ \
		vm r_ = {0}; \
		VEC_EACH r_.bits |= (uint32_t)((expr) ? 1 : 0) << i_; \
		return r_; \
	}

VEC_F(vf_load, (const float *p), p[i_])
VEC_F(vf_set1, (float x), x)
VEC_F(vf_add, (vf a, vf b), a.l[i_] + b.l[i_])
VEC_F(vf_sub, (vf a, vf b), a.l[i_] - b.l[i_])
VEC_F(vf_mul, (vf a, vf b), a.l[i_] * b.l[i_])
VEC_F(vf_div, (vf a, vf b), a.l[i_] / b.l[i_])
VEC_F(vf_fma, (vf a, vf b, vf c), fmaf(a.l[i_], b.l[i_], c.l[i_]))
VEC_F(vf_max, (vf a, vf b), a.l[i_] > b.l[i_] ? a.l[i_] : b.l[i_])
VEC_F(vf_min, (vf a, vf b), a.l[i_] < b.l[i_] ? a.l[i_] : b.l[i_])
VEC_F(vf_select, (vm m, vf a, vf b), m.bits >> i_ & 1 ? a.l[i_] : b.l[i_])
VEC_F(vf_of_bits, (vi a), apr_bits_f32((uint32_t)a.l[i_]))
VEC_F(vf_of_int, (vi a), (float)a.l[i_])
VEC_F(vf_of_uint, (vi a), (float)(uint32_t)a.l[i_])
VEC_F(vf_load_half, (const uint16_t *p), apr_half_to_f32(p[i_]))
VEC_F(vf_load_bfloat, (const uint16_t *p), apr_bfloat_to_f32(p[i_]))
VEC_I(vi_set1, (int32_t x), x)
VEC_I(vi_load, (const int32_t *p), p[i_])
VEC_I(vi_add, (vi a, vi b), (uint32_t)a.l[i_] + (uint32_t)b.l[i_])
VEC_I(vi_sub, (vi a, vi b), (uint32_t)a.l[i_] - (uint32_t)b.l[i_])
VEC_I(vi_and, (vi a, vi b), a.l[i_] & b.l[i_])
VEC_I(vi_xor, (vi a, vi b), a.l[i_] ^ b.l[i_])
VEC_I(vi_sra1, (vi a), a.l[i_] >> 1)
VEC_I(vi_sra23, (vi a), a.l[i_] >> 23)
VEC_I(vi_sll23, (vi a), (uint32_t)a.l[i_] << 23)
VEC_I(vi_of_bits, (vf a), apr_f32_bits(a.l[i_]))
VEC_I(vi_trunc, (vf a), a.l[i_]) /* |a| < 2^31 */
VEC_M(vf_lt, (vf a, vf b), a.l[i_] < b.l[i_])
VEC_M(vf_le, (vf a, vf b), a.l[i_] <= b.l[i_])
VEC_M(vf_unordered, (vf a), a.l[i_] != a.l[i_])
VEC_M(vi_gt, (vi a, vi b), a.l[i_] > b.l[i_])

VEC vm vm_or(vm a, vm b)
{
	return (vm){a.bits | b.bits};
}
VEC vm vm_and(vm a, vm b)
{
	return (vm){a.bits & b.bits};
}
VEC uint32_t vm_bits(vm m)
{
	return m.bits;
}
VEC void vf_store(float *p, vf v)
{
	memcpy(p, v.l, sizeof(v.l));
}
VEC void vi_store(int32_t *p, vi v)
{
	memcpy(p, v.l, sizeof(v.l));
}
VEC void vf_store_half(uint16_t *p, vf v)
{
	VEC_EACH p[i_] = apr_half_from_f32(v.l[i_]);
}
VEC void vf_store_bfloat(uint16_t *p, vf v)
{
	VEC_EACH p[i_] = apr_bfloat_from_f32(v.l[i_]);
}
VEC float vf_sum(vf v)
{
	for (uint32_t s = 8; s; s >>= 1)
		for (uint32_t i = 0; i < s; i++)
			v.l[i] += v.l[i + s];
	return v.l[0];
}
VEC float vf_hmax(vf v)
{
	for (uint32_t s = 8; s; s >>= 1)
		for (uint32_t i = 0; i < s; i++)
			v.l[i] = v.l[i] > v.l[i + s] ? v.l[i] : v.l[i + s];
	return v.l[0];
}
/* a: p[0 2 4 …], b: p[1 3 5 …] */
VEC void vf_load_pairs(const float *p, vf *a, vf *b)
{
	VEC_EACH {
		a->l[i_] = p[2 * i_];
		b->l[i_] = p[2 * i_ + 1];
	}
}
VEC void vf_store_pairs(float *p, vf a, vf b)
{
	VEC_EACH {
		p[2 * i_] = a.l[i_];
		p[2 * i_ + 1] = b.l[i_];
	}
}
VEC void vf_transpose(vf r[VL])
{
	for (uint32_t i = 0; i < VL; i++)
		for (uint32_t j = 0; j < i; j++) {
			float t = r[i].l[j];

			r[i].l[j] = r[j].l[i];
			r[j].l[i] = t;
		}
}
VEC uint32_t vh_turn(const uint16_t *src, size_t ld, uint32_t left, uint16_t *dst, size_t ldd)
{
	(void)left;
	for (uint32_t i = 0; i < VL; i++)
		for (uint32_t j = 0; j < VL; j++)
			dst[j * ldd + i] = src[i * ld + j];
	return VL;
}
VEC void vu_mul_wide(vi a, uint32_t m, vi *hi, vi *lo)
{
	VEC_EACH {
		uint64_t p = (uint64_t)m * (uint32_t)a.l[i_];

		hi->l[i_] = (int32_t)(uint32_t)(p >> 32);
		lo->l[i_] = (int32_t)(uint32_t)p;
	}
}

#endif
