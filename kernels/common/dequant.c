/* SPDX-License-Identifier: MIT */
/*
 * Scalar dequantisers: from a block's bytes as the file has them to codes and floats.
 *
 * Owns: the bit order inside each block of the file format. Does not own speed:
 * kernels unpack their own layouts and are tested against this.
 */
#include "kernels/common/dequant.h"

static uint16_t le16(const uint8_t *p)
{
	return (uint16_t)(p[0] | p[1] << 8);
}

/* 16 bytes of nibbles: low ones are elements 0 … 15, high ones 16 … 31; high: their fifth bits, or 0 */
static void nibbles32(const uint8_t *qs, uint32_t high, uint8_t *q)
{
	for (unsigned j = 0; j < 16; j++) {
		q[j] = (uint8_t)((qs[j] & 15) | (high >> j & 1) << 4);
		q[j + 16] = (uint8_t)(qs[j] >> 4 | (high >> (j + 16) & 1) << 4);
	}
}

/* 12 bytes: eight 6-bit scales and eight 6-bit mins (Q4_K, Q5_K) */
static void scales_mins8(const uint8_t *s, struct apr_codes *c)
{
	for (unsigned j = 0; j < 4; j++) {
		c->sc[j] = s[j] & 63;
		c->mn[j] = s[j + 4] & 63;
		c->sc[j + 4] = (uint8_t)((s[j + 8] & 15) | (s[j] >> 6) << 4);
		c->mn[j + 4] = (uint8_t)(s[j + 8] >> 4 | (s[j + 4] >> 6) << 4);
	}
}

/* 64 bytes of 2-bit fields: 128 elements from each 32 bytes, field after field (Q2_K, Q3_K) */
static void fields2(const uint8_t *qs, uint8_t *q)
{
	for (unsigned k = 0; k < 256; k++)
		q[k] = qs[(k / 128) * 32 + k % 32] >> (2 * (k / 32 % 4)) & 3;
}

static void read_q2_k(const uint8_t *b, struct apr_codes *c)
{
	for (unsigned s = 0; s < 16; s++) {
		c->sc[s] = b[s] & 15;
		c->mn[s] = b[s] >> 4;
	}
	fields2(b + 16, c->q);
	c->d = le16(b + 80);
	c->m = le16(b + 82);
}

static void read_q3_k(const uint8_t *b, struct apr_codes *c)
{
	const uint8_t *hmask = b, *s12 = b + 96;

	fields2(b + 32, c->q);
	for (unsigned k = 0; k < 256; k++)
		c->q[k] |= (uint8_t)((hmask[k % 32] >> (k / 32) & 1) << 2);
	for (unsigned s = 0; s < 16; s++)
		c->sc[s] = (uint8_t)((s12[s % 8] >> (s < 8 ? 0 : 4) & 15) | (s12[8 + s % 4] >> (2 * (s / 4)) & 3) << 4);
	c->d = le16(b + 108);
}

/* Q4_K, and Q5_K where qh is its 32 bytes of fifth bits */
static void read_q45_k(const uint8_t *b, const uint8_t *qh, const uint8_t *qs, struct apr_codes *c)
{
	c->d = le16(b);
	c->m = le16(b + 2);
	scales_mins8(b + 4, c);
	for (unsigned k = 0; k < 256; k++) {
		unsigned sub = k / 32, l = k % 32;

		c->q[k] = qs[(sub / 2) * 32 + l] >> (sub % 2 * 4) & 15;
		if (qh)
			c->q[k] |= (uint8_t)((qh[l] >> sub & 1) << 4);
	}
}

static void read_q6_k(const uint8_t *b, struct apr_codes *c)
{
	for (unsigned k = 0; k < 256; k++) {
		unsigned half = k / 128, part = k / 32 % 4, l = k % 32;
		unsigned lo = b[half * 64 + (part % 2) * 32 + l] >> (part / 2 * 4) & 15;
		unsigned hi = b[128 + half * 32 + l] >> (part * 2) & 3;

		c->q[k] = (uint8_t)(lo | hi << 4);
	}
	memcpy(c->sc, b + 192, 16);
	c->d = le16(b + 208);
}

static uint32_t le32(const uint8_t *p)
{
	return (uint32_t)le16(p) | (uint32_t)le16(p + 2) << 16;
}

void apr_codes_read(uint32_t type, const void *block, struct apr_codes *out)
{
	const uint8_t *b = block;

	memset(out, 0, sizeof *out);
	switch (type) {
	case APR_TYPE_Q2_K: read_q2_k(b, out); return;
	case APR_TYPE_Q3_K: read_q3_k(b, out); return;
	case APR_TYPE_Q4_K: read_q45_k(b, NULL, b + 16, out); return;
	case APR_TYPE_Q5_K: read_q45_k(b, b + 16, b + 48, out); return;
	case APR_TYPE_Q6_K: read_q6_k(b, out); return;
	default: break;
	}
	out->d = le16(b);
	if (type == APR_TYPE_Q4_1 || type == APR_TYPE_Q5_1)
		out->m = le16(b + 2);
	switch (type) {
	case APR_TYPE_Q4_0: nibbles32(b + 2, 0, out->q); break;
	case APR_TYPE_Q4_1: nibbles32(b + 4, 0, out->q); break;
	case APR_TYPE_Q5_0: nibbles32(b + 6, le32(b + 2), out->q); break;
	case APR_TYPE_Q5_1: nibbles32(b + 8, le32(b + 4), out->q); break;
	case APR_TYPE_Q8_0:
		for (unsigned k = 0; k < 32; k++)
			out->q[k] = b[2 + k] ^ 0x80;
		break;
	default: break;
	}
}

void apr_codes_float(uint32_t type, const struct apr_codes *c, float *out)
{
	struct apr_quant_traits t = apr_quant_traits(type);
	unsigned n = apr_type_info(type).block;
	float d = apr_f16_float(c->d), m = apr_f16_float(c->m);

	for (unsigned k = 0; k < n && t.sub; k++) {
		unsigned s = k / t.sub;
		float scale = d * (float)apr_codes_scale(t, c, s), min = t.has_min == 2 ? -(m * (float)c->mn[s]) : m;
		float w = scale * (float)((int)c->q[k] - t.offset);

		out[k] = t.has_min ? w + min : w;
	}
}

void apr_dequant_row(uint32_t type, const void *src, uint32_t n, float *dst)
{
	struct apr_type_info info = apr_type_info(type);
	const uint8_t *p = src;

	if (type == APR_TYPE_F32) {
		memcpy(dst, src, (size_t)n * 4);
		return;
	}
	for (uint32_t k = 0; k < n; k += info.block, p += info.block_bytes) {
		struct apr_codes c;

		if (type == APR_TYPE_F16) {
			dst[k] = apr_f16_float(le16(p));
		} else if (type == APR_TYPE_BF16) {
			dst[k] = apr_bf16_float(le16(p));
		} else {
			apr_codes_read(type, p, &c);
			apr_codes_float(type, &c, dst + k);
		}
	}
}
