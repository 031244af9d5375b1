/* SPDX-License-Identifier: MIT */
/*
 * Unpacking panel units in 64-byte vectors (16 rows × 4 elements), for every
 * instruction set: written in GCC's vector types, compiled once per *_<isa>.c.
 *
 * Owns: planes to codes, packed sub-scales to bytes, blocks to scale and min
 * vectors. The including file provides what vector types cannot say well: apr_half16()
 * (16 F16 to floats), apr_widen_u8() and apr_widen_i8() (16 bytes to int32). All
 * functions are inlined with a constant type, so that a type's tests vanish.
 */
#ifndef APR_KERNELS_CPU_UNPACK_H
#define APR_KERNELS_CPU_UNPACK_H

#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kern.h"

#define APR_INLINE static inline __attribute__((always_inline))

typedef uint8_t apr_u8x64 __attribute__((vector_size(64)));
typedef uint16_t apr_u16x32 __attribute__((vector_size(64)));
typedef int16_t apr_i16x32 __attribute__((vector_size(64)));
typedef int32_t apr_i32x16 __attribute__((vector_size(64)));
typedef float apr_f32x16 __attribute__((vector_size(64)));

APR_INLINE void apr_half16(const uint8_t *src, apr_f32x16 *out);
APR_INLINE void apr_widen_u8(const uint8_t *src, apr_i32x16 *out);
APR_INLINE void apr_widen_i8(const uint8_t *src, apr_i32x16 *out);

/* n vectors, one by one: a single memcpy of them all would go through the stack */
APR_INLINE void apr_load64(apr_u8x64 *out, const uint8_t *src, int n)
{
#pragma GCC unroll 8
	for (int i = 0; i < n; i++)
		memcpy(&out[i], src + 64 * i, 64);
}

/* moves the bits of mask at position from to position to; mask is in the destination */
#define APR_PLACE(v, from, to, mask) \
	((apr_u8x64)((to) >= (from) ? (apr_u16x32)(v) << (((to) - (from)) & 15) \
				    : (apr_u16x32)(v) >> (((from) - (to)) & 15)) & (uint8_t)(mask))

/* q[t] = the codes of elements 4 t … 4 t + 3 of one block of 32 */
APR_INLINE void apr_unpack_codes(uint32_t type, const uint8_t *body, apr_u8x64 q[8])
{
	const struct apr_panel_layout l = apr_panel_layout(type);
	apr_u8x64 nib[4], two[2], one;

	if (l.byte >= 0) {
		apr_load64(q, body + l.byte, 8);
		return;
	}
	if (l.nib >= 0)
		apr_load64(nib, body + l.nib, 4);
	if (l.two >= 0)
		apr_load64(two, body + l.two, 2);
	if (l.one >= 0)
		apr_load64(&one, body + l.one, 1);
#pragma GCC unroll 8
	for (int t = 0; t < 8; t++) {
		const int low = l.nib >= 0 ? 4 : l.two >= 0 ? 2 : 0; /* bits below the last plane's */

		if (l.nib >= 0)
			q[t] = t % 2 ? APR_PLACE(nib[t / 2], 4, 0, 15) : nib[t / 2] & 15;
		if (l.two >= 0 && l.nib >= 0)
			q[t] |= APR_PLACE(two[t / 4], t % 4 * 2, 4, 3 << 4);
		else if (l.two >= 0)
			q[t] = APR_PLACE(two[t / 4], t % 4 * 2, 0, 3);
		if (l.one >= 0)
			q[t] |= APR_PLACE(one, t, low, 1 << low);
	}
}

/* Asks for what lies APR_AHEAD bytes behind block i of a unit: hardware prefetchers stop at every page.
 * Near a weight's end this reaches beyond it, which a prefetch may. */
#define APR_AHEAD 2048u
APR_INLINE void apr_prefetch_block(uint32_t type, const uint8_t *unit, unsigned i)
{
	const struct apr_panel_layout l = apr_panel_layout(type);
	const unsigned bytes = (unsigned)l.stride + (apr_type_info(type).block == 32 ? (unsigned)l.body : 0u);
	const uint8_t *p = unit + l.body + i * (unsigned)l.stride + APR_AHEAD;

#pragma GCC unroll 9
	for (unsigned k = 0; k < bytes; k += 64)
		__builtin_prefetch(p + k, 0, 3);
}

/* A unit's factors: d and m of the 16 rows, and the sub-scales' codes [sub-block][row] */
struct apr_unit_scales {
	apr_f32x16 d, m;
	_Alignas(64) uint8_t sc[16][16], mn[16][16];
};

APR_INLINE void apr_unpack_scales(uint32_t type, const uint8_t *unit, struct apr_unit_scales *s)
{
	const struct apr_panel_layout l = apr_panel_layout(type);
	apr_u8x64 a, b, hi, out[4];

	apr_half16(unit, &s->d);
	if (l.m >= 0)
		apr_half16(unit + l.m, &s->m);
	switch (type) {
	case APR_TYPE_Q6_K: memcpy(s->sc, unit + l.sc, 256); break;
	case APR_TYPE_Q2_K:
		memcpy(out, unit + l.sc, 256);
		for (int i = 0; i < 4; i++) {
			apr_u8x64 sc = out[i] & 15, mn = APR_PLACE(out[i], 4, 0, 15);

			memcpy(s->sc[i * 4], &sc, 64);
			memcpy(s->mn[i * 4], &mn, 64);
		}
		break;
	case APR_TYPE_Q3_K:
	case APR_TYPE_Q4_K:
	case APR_TYPE_Q5_K:
		memcpy(&a, unit + l.sc, 64);
		memcpy(&b, unit + l.sc + 64, 64);
		memcpy(&hi, unit + l.sc + 128, 64);
		if (type == APR_TYPE_Q3_K) { /* out: scales 0 … 3, 4 … 7, 8 … 11, 12 … 15 */
			out[0] = (a & 15) | APR_PLACE(hi, 0, 4, 0x30);
			out[1] = (b & 15) | APR_PLACE(hi, 2, 4, 0x30);
			out[2] = APR_PLACE(a, 4, 0, 15) | APR_PLACE(hi, 4, 4, 0x30);
			out[3] = APR_PLACE(b, 4, 0, 15) | APR_PLACE(hi, 6, 4, 0x30);
			for (int i = 0; i < 4; i++)
				out[i] -= 32; /* int8 from here on, as Q6_K's */
			memcpy(s->sc, out, 256);
		} else {
			out[0] = (a & 15) | APR_PLACE(hi, 0, 4, 0x30);
			out[1] = (b & 15) | APR_PLACE(hi, 4, 4, 0x30);
			out[2] = APR_PLACE(a, 4, 0, 15) | APR_PLACE(hi, 2, 4, 0x30);
			out[3] = APR_PLACE(b, 4, 0, 15) | APR_PLACE(hi, 6, 4, 0x30);
			memcpy(s->sc, out, 128);
			memcpy(s->mn, out + 2, 128);
		}
		break;
	default: break;
	}
}

/* sub-scale s of a type that has them; negative ones are int8 */
APR_INLINE void apr_sub_scale(uint32_t type, const struct apr_unit_scales *s, unsigned i, apr_i32x16 *out)
{
	if (type == APR_TYPE_Q3_K || type == APR_TYPE_Q6_K)
		apr_widen_i8(s->sc[i], out);
	else
		apr_widen_u8(s->sc[i], out);
}

APR_INLINE void apr_sub_min(const struct apr_unit_scales *s, unsigned i, apr_f32x16 *out)
{
	apr_i32x16 mn;

	apr_widen_u8(s->mn[i], &mn);
	*out = -(s->m * __builtin_convertvector(mn, apr_f32x16));
}

/* p and m (as kern.h has them) of block b in its unit */
APR_INLINE void apr_block_factors(uint32_t type, const struct apr_unit_scales *s, unsigned b, apr_f32x16 *p,
				  apr_f32x16 m[2])
{
	const struct apr_quant_traits t = apr_quant_traits(type);

	*p = s->d;
	if (t.has_sc && t.sub == 32) {
		apr_i32x16 sc;

		apr_sub_scale(type, s, b, &sc);
		*p = s->d * __builtin_convertvector(sc, apr_f32x16);
	}
	if (t.has_min == 1)
		m[0] = s->m;
	if (t.has_min == 2 && t.sub == 32)
		apr_sub_min(s, b, m);
	if (t.has_min == 2 && t.sub == 16) {
		apr_sub_min(s, 2 * b, m);
		apr_sub_min(s, 2 * b + 1, m + 1);
	}
}

APR_INLINE void apr_unpack_tile(uint32_t type, const uint8_t *panel, uint32_t b0, uint32_t n, struct apr_tile *t)
{
	const struct apr_quant_traits tr = apr_quant_traits(type);
	const struct apr_panel_layout l = apr_panel_layout(type);
	const unsigned per_unit = apr_type_info(type).block / 32u;
	const uint8_t *unit = panel + (size_t)(b0 / per_unit) * apr_panel_unit_bytes(type);

	for (uint32_t b = 0; b < n; b += per_unit, unit += apr_panel_unit_bytes(type)) {
		struct apr_unit_scales s;

		apr_unpack_scales(type, unit, &s);
		for (unsigned i = 0; i < per_unit && b + i < n; i++) {
			apr_u8x64 q[8];
			apr_f32x16 p, m[2];

			apr_prefetch_block(type, unit, i);
			apr_unpack_codes(type, unit + l.body + i * l.stride, q);
			apr_block_factors(type, &s, i, &p, m);
			memcpy(t->p[b + i], &p, sizeof p);
			if (tr.has_min)
				memcpy(t->m[b + i], m, tr.sub == 16 ? 2 * sizeof p : sizeof p);
			for (unsigned h = 0; h < 2; h++) {
				apr_i32x16 sc = {0};

				if (tr.sub == 16) {
					apr_sub_scale(type, &s, 2 * i + h, &sc);
					sc = (sc & 0xffff) | sc << 16;
				}
				for (unsigned k = h * 4; k < h * 4 + 4; k++) {
					apr_i16x32 even = (apr_i16x32)((apr_u16x32)q[k] & 255) - tr.offset;
					apr_i16x32 odd = (apr_i16x32)((apr_u16x32)q[k] >> 8) - tr.offset;

					if (tr.sub == 16) {
						even *= (apr_i16x32)sc;
						odd *= (apr_i16x32)sc;
					}
					memcpy(t->w[b + i][2 * k], &even, 64);
					memcpy(t->w[b + i][2 * k + 1], &odd, 64);
				}
			}
		}
	}
}

/* Quantised types to floats; scale · (code - offset) + min, as dequant.h */
APR_INLINE void apr_unpack_floats(uint32_t type, const uint8_t *panel, uint32_t k0, uint32_t n, float (*tile)[16])
{
	const struct apr_quant_traits tr = apr_quant_traits(type);
	const struct apr_panel_layout l = apr_panel_layout(type);
	const unsigned block = apr_type_info(type).block;
	const uint8_t *unit = panel + (size_t)(k0 / block) * apr_panel_unit_bytes(type);

	for (uint32_t k = 0; k < n; k += block, unit += apr_panel_unit_bytes(type)) {
		struct apr_unit_scales s;

		apr_unpack_scales(type, unit, &s);
		for (unsigned i = 0; i < block / 32; i++) {
			apr_u8x64 q[8];
			apr_f32x16 p, m[2];

			apr_unpack_codes(type, unit + l.body + i * l.stride, q);
			apr_block_factors(type, &s, i, &p, m);
			for (unsigned e = 0; e < 32; e++) {
				apr_i32x16 w = (((apr_i32x16)q[e / 4] >> (e % 4 * 8)) & 255) - tr.offset;
				apr_f32x16 f;

				if (tr.sub == 16 && e % 16 == 0) {
					apr_i32x16 sc;

					apr_sub_scale(type, &s, 2 * i + e / 16, &sc);
					p = s.d * __builtin_convertvector(sc, apr_f32x16);
				}
				f = p * __builtin_convertvector(w, apr_f32x16);
				if (tr.has_min)
					f += m[tr.sub == 16 ? e / 16 : 0];
				memcpy(tile[k + i * 32 + e], &f, sizeof f);
			}
		}
	}
}

/* One call a quantised type, each with the type a constant: F(type, arguments) */
#define APR_EACH_TYPE(type, F, ...) \
	do { \
		switch (type) { \
		case APR_TYPE_Q4_0: F(APR_TYPE_Q4_0, __VA_ARGS__); break; \
		case APR_TYPE_Q4_1: F(APR_TYPE_Q4_1, __VA_ARGS__); break; \
		case APR_TYPE_Q5_0: F(APR_TYPE_Q5_0, __VA_ARGS__); break; \
		case APR_TYPE_Q5_1: F(APR_TYPE_Q5_1, __VA_ARGS__); break; \
		case APR_TYPE_Q8_0: F(APR_TYPE_Q8_0, __VA_ARGS__); break; \
		case APR_TYPE_Q2_K: F(APR_TYPE_Q2_K, __VA_ARGS__); break; \
		case APR_TYPE_Q3_K: F(APR_TYPE_Q3_K, __VA_ARGS__); break; \
		case APR_TYPE_Q4_K: F(APR_TYPE_Q4_K, __VA_ARGS__); break; \
		case APR_TYPE_Q5_K: F(APR_TYPE_Q5_K, __VA_ARGS__); break; \
		case APR_TYPE_Q6_K: F(APR_TYPE_Q6_K, __VA_ARGS__); break; \
		default: break; \
		} \
	} while (0)

#endif
