/* SPDX-License-Identifier: MIT */
/*
 * Unpacking panel units in GCC's vector types, compiled once per instruction set.
 *
 * Owns: planes to codes, packed sub-scales to bytes, blocks to scale and min
 * vectors. The including file defines APR_V, its vectors' bytes (16, 32 or 64), and
 * provides what vector types cannot say well: apr_halves() (APR_V / 4 F16 to floats),
 * apr_widen_u8() and apr_widen_i8() (as many bytes to int32). 64 bytes of a plane are
 * 16 rows × 4 elements; a part is one vector of them, APR_V / 4 rows. All functions
 * are inlined with a constant type, so that a type's tests vanish.
 */
#ifndef APR_KERNELS_CPU_UNPACK_H
#define APR_KERNELS_CPU_UNPACK_H

#include <stdint.h>
#include <string.h>

#include "kernels/cpu/kern.h"

/* A sanitizer build gets one body a loop, with the type a variable: instrumenting every
 * unrolled copy takes the compiler minutes and finds nothing more. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define APR_ONE_BODY 1
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define APR_ONE_BODY 1
#endif

#define APR_PRAGMA(text) _Pragma(#text)
#ifdef APR_ONE_BODY
#define APR_INLINE static inline
#define APR_UNROLL(n)
#else
#define APR_INLINE static inline __attribute__((always_inline))
#define APR_UNROLL(n) APR_PRAGMA(GCC unroll n)
#endif
#define APR_PARTS (64 / APR_V)
#define APR_PART_ROWS (APR_V / 4)

typedef uint8_t apr_u8v __attribute__((vector_size(APR_V)));
typedef uint16_t apr_u16v __attribute__((vector_size(APR_V)));
typedef int16_t apr_i16v __attribute__((vector_size(APR_V)));
typedef int32_t apr_i32v __attribute__((vector_size(APR_V)));
typedef float apr_f32v __attribute__((vector_size(APR_V)));

APR_INLINE void apr_halves(const uint8_t *src, apr_f32v *out);
APR_INLINE void apr_widen_u8(const uint8_t *src, apr_i32v *out);
APR_INLINE void apr_widen_i8(const uint8_t *src, apr_i32v *out);

/* one part of each of n × 64 bytes; vector by vector, as a single memcpy would go through the stack */
APR_INLINE void apr_load_part(apr_u8v *out, const uint8_t *src, int part, int n)
{
	APR_UNROLL(8)
	for (int i = 0; i < n; i++)
		memcpy(&out[i], src + 64 * i + APR_V * part, APR_V);
}

/* moves the bits of mask at position from to position to; mask is in the destination */
#define APR_PLACE(v, from, to, mask) \
	((apr_u8v)((to) >= (from) ? (apr_u16v)(v) << (((to) - (from)) & 15) : (apr_u16v)(v) >> (((from) - (to)) & 15)) & \
	 (uint8_t)(mask))

/* q[t] = the part's codes of elements 4 t … 4 t + 3 of one block of 32 */
APR_INLINE void apr_unpack_codes(uint32_t type, const uint8_t *body, int part, apr_u8v q[8])
{
	const struct apr_panel_layout l = apr_panel_layout(type);
	apr_u8v nib[4] = {{0}}, two[2] = {{0}}, one = {0};

	if (l.byte >= 0) {
		apr_load_part(q, body + l.byte, part, 8);
		return;
	}
	if (l.nib >= 0)
		apr_load_part(nib, body + l.nib, part, 4);
	if (l.two >= 0)
		apr_load_part(two, body + l.two, part, 2);
	if (l.one >= 0)
		apr_load_part(&one, body + l.one, part, 1);
	APR_UNROLL(8)
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

/* Asks for what lies APR_AHEAD bytes behind block i of a unit: hardware prefetchers stop at every page. Into L2: its
 * own prefetcher runs on from there, where a prefetch into L1 would take the few places that loads need.
 * Near a weight's end this reaches beyond it, which a prefetch may. */
#define APR_AHEAD 1024u
APR_INLINE void apr_prefetch_block(uint32_t type, const uint8_t *unit, unsigned i)
{
	const struct apr_panel_layout l = apr_panel_layout(type);
	const unsigned from = i ? (unsigned)l.body + i * (unsigned)l.stride : 0u;
	const unsigned bytes = (unsigned)l.stride + (i ? 0u : (unsigned)l.body);
	const uint8_t *p = unit + from + APR_AHEAD;

	APR_UNROLL(12)
	for (unsigned k = 0; k < bytes; k += 64)
		__builtin_prefetch(p + k, 0, 2);
}

/* A unit's factors: d and m of the 16 rows, and the sub-scales' codes [sub-block][row] */
struct apr_unit_scales {
	apr_f32v d[APR_PARTS], m[APR_PARTS];
	_Alignas(64) uint8_t sc[16][16], mn[16][16];
};

/* The 6-bit scales of Q3_K, Q4_K and Q5_K: four runs of four sub-scales */
APR_INLINE void apr_unpack_scales6(uint32_t type, const uint8_t *packed, struct apr_unit_scales *s)
{
	const int k3 = type == APR_TYPE_Q3_K;

	APR_UNROLL(4)
	for (int part = 0; part < APR_PARTS; part++) {
		apr_u8v in[3], out[4];

		apr_load_part(in, packed, part, 3);
		out[0] = (in[0] & 15) | APR_PLACE(in[2], 0, 4, 0x30);
		out[1] = (in[1] & 15) | APR_PLACE(in[2], k3 ? 2 : 4, 4, 0x30);
		out[2] = APR_PLACE(in[0], 4, 0, 15) | APR_PLACE(in[2], k3 ? 4 : 2, 4, 0x30);
		out[3] = APR_PLACE(in[1], 4, 0, 15) | APR_PLACE(in[2], 6, 4, 0x30);
		for (int i = 0; i < 4; i++) {
			uint8_t *to = k3 || i < 2 ? s->sc[4 * i] : s->mn[4 * (i - 2)]; /* scales, then mins */

			if (k3)
				out[i] -= 32; /* int8 from here on, as Q6_K's */
			memcpy(to + part * APR_V, &out[i], APR_V);
		}
	}
}

APR_INLINE void apr_unpack_scales(uint32_t type, const uint8_t *unit, struct apr_unit_scales *s)
{
	const struct apr_panel_layout l = apr_panel_layout(type);

	APR_UNROLL(4)
	for (int part = 0; part < APR_PARTS; part++) {
		apr_halves(unit + 2 * part * APR_PART_ROWS, &s->d[part]);
		if (l.m >= 0)
			apr_halves(unit + l.m + 2 * part * APR_PART_ROWS, &s->m[part]);
	}
	if (type == APR_TYPE_Q6_K) {
		memcpy(s->sc, unit + l.sc, 256);
	} else if (type == APR_TYPE_Q2_K) {
		for (int i = 0; i < 256 / APR_V; i++) {
			apr_u8v both, sc, mn;

			memcpy(&both, unit + l.sc + i * APR_V, APR_V);
			sc = both & 15;
			mn = APR_PLACE(both, 4, 0, 15);
			memcpy(s->sc[0] + i * APR_V, &sc, APR_V);
			memcpy(s->mn[0] + i * APR_V, &mn, APR_V);
		}
	} else if (l.sc >= 0) {
		apr_unpack_scales6(type, unit + l.sc, s);
	}
}

/* sub-scale i of a type that has them; negative ones are int8 */
APR_INLINE void apr_sub_scale(uint32_t type, const struct apr_unit_scales *s, unsigned i, int part, apr_i32v *out)
{
	const uint8_t *from = s->sc[i] + part * APR_PART_ROWS;

	if (type == APR_TYPE_Q3_K || type == APR_TYPE_Q6_K)
		apr_widen_i8(from, out);
	else
		apr_widen_u8(from, out);
}

APR_INLINE void apr_sub_min(const struct apr_unit_scales *s, unsigned i, int part, apr_f32v *out)
{
	apr_i32v mn;

	apr_widen_u8(s->mn[i] + part * APR_PART_ROWS, &mn);
	*out = -(s->m[part] * __builtin_convertvector(mn, apr_f32v));
}

/* p and m (as kern.h has them) of block b in its unit */
APR_INLINE void apr_block_factors(uint32_t type, const struct apr_unit_scales *s, unsigned b, int part, apr_f32v *p,
				  apr_f32v m[2])
{
	const struct apr_quant_traits t = apr_quant_traits(type);

	*p = s->d[part];
	if (t.has_sc && t.sub == 32) {
		apr_i32v sc;

		apr_sub_scale(type, s, b, part, &sc);
		*p = s->d[part] * __builtin_convertvector(sc, apr_f32v);
	}
	if (t.has_min == 1)
		m[0] = s->m[part];
	if (t.has_min == 2 && t.sub == 32)
		apr_sub_min(s, b, part, m);
	if (t.has_min == 2 && t.sub == 16) {
		apr_sub_min(s, 2 * b, part, m);
		apr_sub_min(s, 2 * b + 1, part, m + 1);
	}
}

/* block i of a unit as a tile's block b, one part of the rows */
APR_INLINE void apr_tile_part(uint32_t type, const uint8_t *unit, const struct apr_unit_scales *s, unsigned i, int part,
			      struct apr_tile *t, uint32_t b)
{
	const struct apr_quant_traits tr = apr_quant_traits(type);
	const struct apr_panel_layout l = apr_panel_layout(type);
	apr_u8v q[8];
	apr_f32v p, m[2] = {{0}};

	apr_unpack_codes(type, unit + l.body + i * (unsigned)l.stride, part, q);
	apr_block_factors(type, s, i, part, &p, m);
	memcpy(t->p[b] + part * APR_PART_ROWS, &p, sizeof p);
	if (tr.has_min)
		memcpy(t->m[b][0] + part * APR_PART_ROWS, &m[0], sizeof p);
	if (tr.has_min && tr.sub == 16)
		memcpy(t->m[b][1] + part * APR_PART_ROWS, &m[1], sizeof p);
	APR_UNROLL(8)
	for (unsigned k = 0; k < 8; k++) {
		apr_i16v even = (apr_i16v)((apr_u16v)q[k] & 255) - tr.offset, odd = (apr_i16v)((apr_u16v)q[k] >> 8) - tr.offset;

		if (tr.sub == 16) {
			apr_i32v sc;

			apr_sub_scale(type, s, 2 * i + k / 4, part, &sc);
			sc = (sc & 0xffff) | sc << 16;
			even *= (apr_i16v)sc;
			odd *= (apr_i16v)sc;
		}
		memcpy(t->w[b][2 * k] + part * APR_V / 2, &even, sizeof even);
		memcpy(t->w[b][2 * k + 1] + part * APR_V / 2, &odd, sizeof odd);
	}
}

APR_INLINE void apr_unpack_tile(uint32_t type, const uint8_t *panel, uint32_t b0, uint32_t n, struct apr_tile *t)
{
	const unsigned per_unit = apr_type_info(type).block / 32u;
	const uint8_t *unit = panel + (size_t)(b0 / per_unit) * apr_panel_unit_bytes(type);

	for (uint32_t b = 0; b < n; b += per_unit, unit += apr_panel_unit_bytes(type)) {
		struct apr_unit_scales s;

		apr_unpack_scales(type, unit, &s);
		for (unsigned i = 0; i < per_unit && b + i < n; i++) {
			apr_prefetch_block(type, unit, i);
			APR_UNROLL(4)
			for (int part = 0; part < APR_PARTS; part++)
				apr_tile_part(type, unit, &s, i, part, t, b + i);
		}
	}
}

/* block i of a unit as floats, one part of the rows; scale · (code - offset) + min, as dequant.h */
APR_INLINE void apr_floats_part(uint32_t type, const uint8_t *unit, const struct apr_unit_scales *s, unsigned i, int part,
				float (*tile)[16])
{
	const struct apr_quant_traits tr = apr_quant_traits(type);
	const struct apr_panel_layout l = apr_panel_layout(type);
	apr_u8v q[8];
	apr_f32v p, m[2] = {{0}};

	apr_unpack_codes(type, unit + l.body + i * (unsigned)l.stride, part, q);
	apr_block_factors(type, s, i, part, &p, m);
	APR_UNROLL(32)
	for (unsigned e = 0; e < 32; e++) {
		apr_i32v w = (((apr_i32v)q[e / 4] >> (e % 4 * 8)) & 255) - tr.offset;
		apr_f32v f;

		if (tr.sub == 16 && e % 16 == 0) {
			apr_i32v sc;

			apr_sub_scale(type, s, 2 * i + e / 16, part, &sc);
			p = s->d[part] * __builtin_convertvector(sc, apr_f32v);
		}
		f = p * __builtin_convertvector(w, apr_f32v);
		if (tr.has_min)
			f += m[tr.sub == 16 ? e / 16 : 0];
		memcpy(tile[e] + part * APR_PART_ROWS, &f, sizeof f);
	}
}

/* Quantised types to floats */
APR_INLINE void apr_unpack_floats(uint32_t type, const uint8_t *panel, uint32_t k0, uint32_t n, float (*tile)[16])
{
	const unsigned block = apr_type_info(type).block;
	const uint8_t *unit = panel + (size_t)(k0 / block) * apr_panel_unit_bytes(type);

	for (uint32_t k = 0; k < n; k += block, unit += apr_panel_unit_bytes(type)) {
		struct apr_unit_scales s;

		apr_unpack_scales(type, unit, &s);
		for (unsigned i = 0; i < block / 32; i++) {
			for (int part = 0; part < APR_PARTS; part++)
				apr_floats_part(type, unit, &s, i, part, tile + k + i * 32);
		}
	}
}

/* One call a quantised type, each with the type a constant: F(type, arguments) */
#ifdef APR_ONE_BODY
#define APR_EACH_TYPE(type, F, ...) F(type, __VA_ARGS__)
#else
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

#endif
