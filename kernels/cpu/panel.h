/* SPDX-License-Identifier: MIT */
/*
 * The panel layout: where each code of 16 interleaved weight rows lies.
 *
 * Owns: the one description that packing, the scalar reference and every vector
 * unpacker share. Does not own arithmetic.
 *
 * A panel is 16 output rows; along k it is a run of units, one a block of the type,
 * each exactly 16 × block_bytes long. F32, F16 and BF16: unit k holds the 16 rows'
 * elements. Quantised types: d[16], m[16] (F16, m only where the type has it), the
 * sub-scales, then for every 32 elements the planes that the type needs:
 *
 *   byte  512 B: byte t·64 + r·4 + j is the code of row r, k = 4 t + j
 *   nib   256 B: byte (t/2)·64 + r·4 + j, nibble t mod 2
 *   two   128 B: byte (t/4)·64 + r·4 + j, 2-bit field t mod 4
 *   one    64 B: byte r·4 + j, bit t
 *
 * so that 64 loaded bytes are 16 rows × 4 k, what a dot-product instruction eats.
 * A code is nib | one << 4, nib | two << 4, two | one << 2, two or byte.
 *
 * Sub-scales: Q2_K and Q6_K 256 B: byte s·16 + r (Q2_K: scale | min << 4). The
 * 6-bit ones of Q3_K (16 a row), Q4_K and Q5_K (8 scales and 8 mins) 192 B:
 *   Q4_K, Q5_K  byte b·16 + r: low nibbles of scale and min b;
 *               byte 128 + (b mod 4)·16 + r, nibble b/4: scale's high 2 bits | min's << 2
 *   Q3_K        byte (s mod 8)·16 + r, nibble s/8: scale's low nibble;
 *               byte 128 + (s mod 4)·16 + r, 2-bit field s/4: its high bits
 *
 * An infinite d or m is packed as NaN: whatever reads that block comes out as NaN.
 */
#ifndef APR_KERNELS_CPU_PANEL_H
#define APR_KERNELS_CPU_PANEL_H

#include <stdint.h>

#include "kernels/common/dequant.h"

#define APR_PANEL_ROWS 16u

struct apr_panel_layout { /* byte offsets; planes are relative to body + b · stride; -1 = absent */
	int16_t m, sc, body, stride;
	int16_t byte, nib, two, one;
};

static inline struct apr_panel_layout apr_panel_layout(uint32_t type)
{
	switch (type) {
	case APR_TYPE_Q4_0: return (struct apr_panel_layout){-1, -1, 32, 256, -1, 0, -1, -1};
	case APR_TYPE_Q4_1: return (struct apr_panel_layout){32, -1, 64, 256, -1, 0, -1, -1};
	case APR_TYPE_Q5_0: return (struct apr_panel_layout){-1, -1, 32, 320, -1, 64, -1, 0};
	case APR_TYPE_Q5_1: return (struct apr_panel_layout){32, -1, 64, 320, -1, 64, -1, 0};
	case APR_TYPE_Q8_0: return (struct apr_panel_layout){-1, -1, 32, 512, 0, -1, -1, -1};
	case APR_TYPE_Q2_K: return (struct apr_panel_layout){32, 64, 320, 128, -1, -1, 0, -1};
	case APR_TYPE_Q3_K: return (struct apr_panel_layout){-1, 32, 224, 192, -1, -1, 64, 0};
	case APR_TYPE_Q4_K: return (struct apr_panel_layout){32, 64, 256, 256, -1, 0, -1, -1};
	case APR_TYPE_Q5_K: return (struct apr_panel_layout){32, 64, 256, 320, -1, 64, -1, 0};
	case APR_TYPE_Q6_K: return (struct apr_panel_layout){-1, 32, 288, 384, -1, 0, 256, -1};
	default: return (struct apr_panel_layout){-1, -1, -1, -1, -1, -1, -1, -1};
	}
}

static inline uint32_t apr_panel_unit_bytes(uint32_t type)
{
	return APR_PANEL_ROWS * apr_type_info(type).block_bytes;
}

/* units that n elements of a row take; 0 for an unknown type */
static inline uint32_t apr_panel_units(uint32_t type, uint32_t n)
{
	uint32_t block = apr_type_info(type).block;

	return block ? n / block : 0;
}

/* One row of a quantised unit, code by code. */
void apr_panel_get(uint32_t type, const uint8_t *unit, unsigned row, struct apr_codes *out);

#endif
