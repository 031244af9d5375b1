/* SPDX-License-Identifier: MIT */
/*
 * UTF-8, strictly: no surrogates, nothing overlong, nothing above U+10FFFF.
 * Bytes that form no character are taken one by one.
 */
#ifndef APR_UTF8_H
#define APR_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes that the character starting with lead should have; 0: no lead byte. */
static inline unsigned apr_utf8_want(uint8_t lead)
{
	return lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
}

/* May second follow lead? (The later bytes are plain continuations.) */
static inline bool apr_utf8_second_ok(uint8_t lead, uint8_t second)
{
	uint8_t min = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
	uint8_t max = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;

	return second >= min && second <= max;
}

/* The character at s[0..len), len > 0: its bytes, 1 to 4, and *cp; -1 in *cp for a byte that is none. */
static inline unsigned apr_utf8_next(const char *text, size_t len, int32_t *cp)
{
	const uint8_t *s = (const uint8_t *)text;
	unsigned n = apr_utf8_want(s[0]), i;
	int32_t c;

	*cp = s[0];
	if (n == 1)
		return 1;
	*cp = -1;
	if (!n || len < n || !apr_utf8_second_ok(s[0], s[1]))
		return 1;
	c = s[0] & (0x7f >> n);
	for (i = 1; i < n; i++) {
		if ((s[i] & 0xc0) != 0x80)
			return 1;
		c = c << 6 | (s[i] & 0x3f);
	}
	*cp = c;
	return n;
}

#endif
