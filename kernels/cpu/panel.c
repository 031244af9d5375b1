/* SPDX-License-Identifier: MIT */
/*
 * Packing weights into panels and reading single rows back.
 *
 * Owns: apr_panel_*; writes the layout that panel.h describes. Does not own
 * anything that must be fast at run time but the packing itself.
 */
#include "kernels/cpu/panel.h"

#include <errno.h>
#include <stddef.h>

#include "kernels/cpu/linear.h"
#include "kernels/cpu/pool.h"

static void put16(uint8_t *p, uint16_t v)
{
	p[0] = (uint8_t)v;
	p[1] = (uint8_t)(v >> 8);
}

static uint16_t get16(const uint8_t *p)
{
	return (uint16_t)(p[0] | p[1] << 8);
}

/* F16 infinity becomes NaN */
static uint16_t poison(uint16_t h)
{
	return (h & 0x7fffu) == 0x7c00u ? (uint16_t)(h | 0x200u) : h;
}

/* Sub-scale codes of one row: set (writing into zeroed bytes) or get */
static void put_scales(uint32_t type, uint8_t *sc, unsigned r, const struct apr_codes *c)
{
	for (unsigned s = 0; s < 16; s++) {
		switch (type) {
		case APR_TYPE_Q2_K: sc[s * 16 + r] = (uint8_t)(c->sc[s] | c->mn[s] << 4); break;
		case APR_TYPE_Q6_K: sc[s * 16 + r] = c->sc[s]; break;
		case APR_TYPE_Q3_K:
			sc[s % 8 * 16 + r] |= (uint8_t)((c->sc[s] & 15) << (s / 8 * 4));
			sc[128 + s % 4 * 16 + r] |= (uint8_t)((c->sc[s] >> 4) << (s / 4 * 2));
			break;
		default: /* Q4_K, Q5_K */
			if (s >= 8)
				return;
			sc[s * 16 + r] = (uint8_t)((c->sc[s] & 15) | (c->mn[s] & 15) << 4);
			sc[128 + s % 4 * 16 + r] |= (uint8_t)((c->sc[s] >> 4 | (c->mn[s] >> 4) << 2) << (s / 4 * 4));
			break;
		}
	}
}

static void get_scales(uint32_t type, const uint8_t *sc, unsigned r, struct apr_codes *c)
{
	for (unsigned s = 0; s < 16; s++) {
		unsigned hi;

		switch (type) {
		case APR_TYPE_Q2_K:
			c->sc[s] = sc[s * 16 + r] & 15;
			c->mn[s] = sc[s * 16 + r] >> 4;
			break;
		case APR_TYPE_Q6_K: c->sc[s] = sc[s * 16 + r]; break;
		case APR_TYPE_Q3_K:
			hi = sc[128 + s % 4 * 16 + r] >> (s / 4 * 2) & 3;
			c->sc[s] = (uint8_t)((sc[s % 8 * 16 + r] >> (s / 8 * 4) & 15) | hi << 4);
			break;
		default: /* Q4_K, Q5_K */
			if (s >= 8)
				return;
			hi = sc[128 + s % 4 * 16 + r] >> (s / 4 * 4) & 15;
			c->sc[s] = (uint8_t)((sc[s * 16 + r] & 15) | (hi & 3) << 4);
			c->mn[s] = (uint8_t)(sc[s * 16 + r] >> 4 | (hi >> 2) << 4);
			break;
		}
	}
}

static void put_row(uint32_t type, uint8_t *unit, unsigned r, const struct apr_codes *c)
{
	struct apr_panel_layout l = apr_panel_layout(type);
	unsigned n = apr_type_info(type).block;

	put16(unit + 2 * r, poison(c->d));
	if (l.m >= 0)
		put16(unit + l.m + 2 * r, poison(c->m));
	if (l.sc >= 0)
		put_scales(type, unit + l.sc, r, c);
	for (unsigned k = 0; k < n; k++) {
		uint8_t *body = unit + l.body + k / 32 * l.stride;
		unsigned t = k % 32 / 4, at = r * 4 + k % 4, code = c->q[k];

		if (l.byte >= 0)
			body[l.byte + t * 64 + at] = (uint8_t)code;
		if (l.nib >= 0) {
			body[l.nib + t / 2 * 64 + at] |= (uint8_t)((code & 15) << (t % 2 * 4));
			code >>= 4;
		}
		if (l.two >= 0) {
			body[l.two + t / 4 * 64 + at] |= (uint8_t)((code & 3) << (t % 4 * 2));
			code >>= 2;
		}
		if (l.one >= 0)
			body[l.one + at] |= (uint8_t)((code & 1) << t);
	}
}

void apr_panel_get(uint32_t type, const uint8_t *unit, unsigned row, struct apr_codes *c)
{
	struct apr_panel_layout l = apr_panel_layout(type);
	unsigned n = apr_type_info(type).block;

	c->d = get16(unit + 2 * row);
	c->m = l.m >= 0 ? get16(unit + l.m + 2 * row) : 0;
	if (l.sc >= 0)
		get_scales(type, unit + l.sc, row, c);
	for (unsigned k = 0; k < n; k++) {
		const uint8_t *body = unit + l.body + k / 32 * l.stride;
		unsigned t = k % 32 / 4, at = row * 4 + k % 4, code = 0, shift = 0;

		if (l.byte >= 0)
			code = body[l.byte + t * 64 + at];
		if (l.nib >= 0) {
			code = body[l.nib + t / 2 * 64 + at] >> (t % 2 * 4) & 15;
			shift = 4;
		}
		if (l.two >= 0) {
			code |= (body[l.two + t / 4 * 64 + at] >> (t % 4 * 2) & 3u) << shift;
			shift += 2;
		}
		if (l.one >= 0)
			code |= (body[l.one + at] >> t & 1u) << shift;
		c->q[k] = (uint8_t)code;
	}
}

size_t apr_panel_bytes(uint32_t type, uint32_t n_in, uint32_t n_out)
{
	struct apr_type_info info = apr_type_info(type);
	size_t panel, all;

	if (!info.block || !n_in || !n_out || n_in % info.block)
		return 0;
	if (__builtin_mul_overflow((size_t)(n_in / info.block), (size_t)APR_PANEL_ROWS * info.block_bytes, &panel) ||
	    __builtin_mul_overflow(panel, ((size_t)n_out + APR_PANEL_ROWS - 1) / APR_PANEL_ROWS, &all))
		return 0;
	return all;
}

struct pack {
	uint32_t type, n_in, n_out;
	const uint8_t *src;
	uint8_t *dst;
};

static void pack_panel(void *arg, uint32_t panel, unsigned worker)
{
	const struct pack *p = arg;
	struct apr_type_info info = apr_type_info(p->type);
	size_t units = apr_panel_units(p->type, p->n_in), unit_bytes = apr_panel_unit_bytes(p->type), row_bytes = units * info.block_bytes;
	uint8_t *dst = p->dst + panel * units * unit_bytes;
	uint32_t first = panel * APR_PANEL_ROWS, rows = p->n_out - first < APR_PANEL_ROWS ? p->n_out - first : APR_PANEL_ROWS;

	(void)worker;
	memset(dst, 0, units * unit_bytes);
	for (unsigned r = 0; r < rows; r++) {
		const uint8_t *src = p->src + (first + r) * row_bytes;

		for (size_t u = 0; u < units; u++) {
			struct apr_codes c;

			if (info.block == 1) {
				memcpy(dst + u * unit_bytes + r * info.block_bytes, src + u * info.block_bytes, info.block_bytes);
				continue;
			}
			apr_codes_read(p->type, src + u * info.block_bytes, &c);
			put_row(p->type, dst + u * unit_bytes, r, &c);
		}
	}
}

int apr_panel_pack(struct apr_pool *pool, uint32_t type, const void *src, uint32_t n_in, uint32_t n_out, void *dst)
{
	struct pack p = {.type = type, .n_in = n_in, .n_out = n_out, .src = src, .dst = dst};

	if (!apr_panel_bytes(type, n_in, n_out))
		return -EINVAL;
	apr_pool_run(pool, (n_out - 1) / APR_PANEL_ROWS + 1, pack_panel, &p);
	return 0;
}

void apr_panel_row(const struct apr_linear *w, uint32_t row, float *out)
{
	struct apr_type_info info = apr_type_info(w->type);
	size_t units = apr_panel_units(w->type, w->n_in), unit_bytes = apr_panel_unit_bytes(w->type);
	const uint8_t *panel = (const uint8_t *)w->panels + row / APR_PANEL_ROWS * units * unit_bytes;
	unsigned r = row % APR_PANEL_ROWS;

	for (size_t u = 0; u < units; u++, panel += unit_bytes) {
		struct apr_codes c;

		if (info.block == 1) {
			apr_dequant_row(w->type, panel + r * info.block_bytes, 1, out + u);
			continue;
		}
		apr_panel_get(w->type, panel, r, &c);
		apr_codes_float(w->type, &c, out + u * info.block);
	}
}
