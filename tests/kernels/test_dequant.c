/* SPDX-License-Identifier: MIT */
/*
 * The scalar dequantisers against the answers of the `gguf` package
 * (tests/golden/dequant.txt, made by make-dequant.py), and the panels' way back.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/common/dequant.h"
#include "kernels/cpu/linear.h"
#include "tests/harness.h"

#define GOLDEN "tests/golden/dequant.txt"
#define MAX_LINE 65536

static size_t unhex(const char *hex, uint8_t *out, size_t size)
{
	size_t n = 0;

	for (; hex[0] && hex[1] && n < size; hex += 2) {
		unsigned byte;

		if (sscanf(hex, "%2x", &byte) != 1)
			break;
		out[n++] = (uint8_t)byte;
	}
	return n;
}

static int type_by_name(const char *name)
{
	for (uint32_t t = 0; t < APR_TYPE_LIMIT; t++) {
		if (apr_type_info(t).block && strcmp(apr_type_info(t).name, name) == 0)
			return (int)t;
	}
	return -1;
}

struct golden_case {
	uint32_t type, n;
	uint8_t raw[4096];
	float want[1024];
};

/* Calls check for each line; the number of types seen. */
static unsigned each_case(void (*check)(const struct golden_case *))
{
	FILE *f = fopen(GOLDEN, "re");
	static char line[MAX_LINE];
	unsigned seen = 0;
	uint32_t mask = 0;

	CU_ASSERT_PTR_NOT_NULL_FATAL(f);
	while (fgets(line, sizeof line, f)) {
		char *save, *name = strtok_r(line, " \n", &save), *raw = strtok_r(NULL, " \n", &save);
		char *want = strtok_r(NULL, " \n", &save);
		struct golden_case c;
		size_t bytes;
		int type = name ? type_by_name(name) : -1;

		if (!name || name[0] == '#')
			continue;
		CU_ASSERT_FATAL(type >= 0 && raw && want);
		c.type = (uint32_t)type;
		bytes = unhex(raw, c.raw, sizeof c.raw);
		c.n = (uint32_t)(unhex(want, (uint8_t *)c.want, sizeof c.want) / 4);
		CU_ASSERT_EQUAL_FATAL(bytes, c.n / apr_type_info(c.type).block * apr_type_info(c.type).block_bytes);
		check(&c);
		seen += !(mask >> type & 1);
		mask |= 1u << type;
	}
	(void)fclose(f);
	return seen;
}

static void check_row(const struct golden_case *c)
{
	float got[1024];

	apr_dequant_row(c->type, c->raw, c->n, got);
	if (memcmp(got, c->want, c->n * 4) != 0) {
		printf("\n  %s differs", apr_type_info(c->type).name);
		CU_FAIL("dequantised floats differ from the package's");
	}
}

static void golden_floats(void)
{
	CU_ASSERT_EQUAL(each_case(check_row), 13);
}

static void check_panel(const struct golden_case *c)
{
	float got[1024];
	size_t bytes = apr_panel_bytes(c->type, c->n, 1);
	void *panels = aligned_alloc(64, (bytes + 63) / 64 * 64);
	struct apr_linear w = {c->type, c->n, 1, panels};

	CU_ASSERT_PTR_NOT_NULL_FATAL(panels);
	CU_ASSERT_EQUAL(apr_panel_pack(NULL, c->type, c->raw, c->n, 1, panels), 0);
	apr_panel_row(&w, 0, got);
	CU_ASSERT_EQUAL(memcmp(got, c->want, c->n * 4), 0);
	free(panels);
}

static void golden_floats_through_panels(void)
{
	CU_ASSERT_EQUAL(each_case(check_panel), 13);
}

/* Every half against arithmetic that shares nothing with the conversion. */
static void every_half(void)
{
	unsigned bad = 0;

	for (uint32_t h = 0; h < 65536; h++) {
		int exp = (int)(h >> 10 & 31), man = (int)(h & 1023);
		double v = exp == 31 ? (man ? NAN : INFINITY) : exp ? ldexp(1024 + man, exp - 25) : ldexp(man, -24);
		float got = apr_f16_float((uint16_t)h);

		v = h & 0x8000 ? -v : v;
		bad += isnan(v) ? !isnan(got) : !((double)got == v && !signbit(got) == !signbit(v));
	}
	CU_ASSERT_EQUAL(bad, 0);
}

static void panel_sizes(void)
{
	/* no byte added but the padding rows */
	CU_ASSERT_EQUAL(apr_panel_bytes(APR_TYPE_Q4_1, 576, 1536), (size_t)1536 * 576 / 32 * 20);
	CU_ASSERT_EQUAL(apr_panel_bytes(APR_TYPE_Q6_K, 2048, 641), (size_t)656 * 8 * 210);
	CU_ASSERT_EQUAL(apr_panel_bytes(APR_TYPE_F16, 7, 16), 7 * 16 * 2);
	CU_ASSERT_EQUAL(apr_panel_bytes(APR_TYPE_Q4_K, 640, 16), 0); /* not a multiple of 256 */
	CU_ASSERT_EQUAL(apr_panel_bytes(APR_TYPE_Q4_0, 0, 16), 0);
	CU_ASSERT_EQUAL(apr_panel_bytes(APR_TYPE_Q4_0, 32, 0), 0);
	CU_ASSERT_EQUAL(apr_panel_bytes(9, 32, 16), 0); /* no such type */
	CU_ASSERT_EQUAL(apr_panel_bytes(1000, 32, 16), 0);
	CU_ASSERT_EQUAL(apr_panel_bytes(APR_TYPE_F32, UINT32_MAX, UINT32_MAX), 0); /* 2^66 bytes */
	CU_ASSERT_NOT_EQUAL(apr_panel_pack(NULL, APR_TYPE_Q4_K, "", 640, 16, NULL), 0);
}

/* An infinite factor must not become a finite weight: it is packed as NaN. */
static void infinite_factor_is_nan(void)
{
	uint8_t block[18] = {0x00, 0x7c, 0x88}; /* d = inf; codes 8 (zero), 8, then 0 */
	_Alignas(64) uint8_t panel[16 * 18];
	struct apr_linear w = {APR_TYPE_Q4_0, 32, 1, panel};
	float out[32];

	CU_ASSERT_EQUAL(apr_panel_pack(NULL, APR_TYPE_Q4_0, block, 32, 1, panel), 0);
	apr_panel_row(&w, 0, out);
	for (int i = 0; i < 32; i++)
		CU_ASSERT(isnan(out[i]));
}

static const struct apr_test tests[] = {
	{"golden_floats", golden_floats, KEEPS_HEAP}, /* stdio's and sscanf's first use */
	{"golden_floats_through_panels", golden_floats_through_panels, KEEPS_HEAP}, /* freed blocks stay in malloc's cache */
	{"every_half", every_half, 0},
	{"panel_sizes", panel_sizes, 0},
	{"infinite_factor_is_nan", infinite_factor_is_nan, 0},
};
TEST_MAIN("kernels/dequant", tests)
