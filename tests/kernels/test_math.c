/* SPDX-License-Identifier: MIT */
/*
 * exp2, log2, Philox, 16-bit floats: against libm over every binade, against known
 * answers, and each vector form against the scalar one bit for bit.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>

#include "kernels/common/math.h"
#include "tests/harness.h"
#include "tests/support/vec_forms.h"

static double ulp_of(double exact)
{
	int e = ilogb(exact);

	return ldexp(1.0, (e < -126 ? -126 : e) - 23);
}

/* Every binade of arguments, 4096 mantissas each; 1.0 ulp is stated in math.h */
static void exp2_within_one_ulp(void)
{
	double worst = 0;
	int e, s;
	uint32_t m;

	for (s = 0; s < 2; s++)
		for (e = -30; e < 8; e++)
			for (m = 0; m < 4096; m++) {
				float x = ldexpf(1.0f + (float)m / 4096.0f, e) * (s ? -1.0f : 1.0f);
				double want = exp2((double)x), err;

				if (want >= 0x1p128 || x < -149.0f)
					continue;
				err = fabs((double)apr_exp2(x) - want) / ulp_of(want);
				worst = err > worst ? err : worst;
			}
	printf("exp2: %.3f ulp at most\n", worst);
	CU_ASSERT(worst <= 1.0);
}

static void exp2_exact_and_edges(void)
{
	int n;

	for (n = -149; n < 128; n++)
		CU_ASSERT_EQUAL(apr_exp2((float)n), ldexpf(1.0f, n));
	CU_ASSERT_EQUAL(apr_exp2(128.0f), INFINITY);
	CU_ASSERT_EQUAL(apr_exp2(1e30f), INFINITY);
	CU_ASSERT_EQUAL(apr_exp2(INFINITY), INFINITY);
	CU_ASSERT_EQUAL(apr_exp2(-151.0f), 0.0f);
	CU_ASSERT_EQUAL(apr_exp2(-INFINITY), 0.0f);
	CU_ASSERT_EQUAL(apr_exp2(-0.0f), 1.0f);
	CU_ASSERT(isnan(apr_exp2(NAN)));
	CU_ASSERT(isnan(apr_exp2(-NAN)));
}

static void log2_within_three_ulp(void)
{
	double worst = 0;
	uint32_t e, m;

	for (e = 0; e < 255; e++)
		for (m = 0; m < 1u << 23; m += 2047) {
			float x = apr_bits_f32(e << 23 | m);
			double want, err;

			if (x == 0.0f || x == 1.0f)
				continue;
			want = log2((double)x);
			err = fabs((double)apr_log2(x) - want) / ulp_of(want);
			worst = err > worst ? err : worst;
		}
	for (m = 1; m < 4096; m++) { /* both sides of 1, where the result is small */
		float x = apr_bits_f32(0x3f800000u + m), y = apr_bits_f32(0x3f800000u - m);
		double a = fabs((double)apr_log2(x) - log2((double)x)) / ulp_of(log2((double)x));
		double b = fabs((double)apr_log2(y) - log2((double)y)) / ulp_of(log2((double)y));

		worst = a > worst ? a : worst;
		worst = b > worst ? b : worst;
	}
	printf("log2: %.3f ulp at most\n", worst);
	CU_ASSERT(worst <= 3.0);
}

static void log2_edges(void)
{
	int n;

	for (n = -149; n < 128; n++)
		CU_ASSERT_EQUAL(apr_log2(ldexpf(1.0f, n)), (float)n);
	CU_ASSERT_EQUAL(apr_log2(0.0f), -INFINITY);
	CU_ASSERT_EQUAL(apr_log2(INFINITY), INFINITY);
	CU_ASSERT(isnan(apr_log2(-1.0f)));
	CU_ASSERT(isnan(apr_log2(NAN)));
}

/* Known answers of Philox4x32-10 (Salmon and others, Random123). */
static void philox_known_answers(void)
{
	static const struct {
		uint32_t ctr[4], key[2], out[4];
	} kat[] = {
		{{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
		{{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
		{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
	};
	size_t i;

	for (i = 0; i < sizeof(kat) / sizeof(kat[0]); i++) {
		uint32_t out[4];

		apr_philox4x32(kat[i].ctr, kat[i].key[0], kat[i].key[1], out);
		CU_ASSERT(!memcmp(out, kat[i].out, sizeof(out)));
	}
}

/* The draw's two ends are finite and inside what the pruning assumes; the middle agrees with libm. */
static void gumbel_range_and_error(void)
{
	uint32_t i;

	CU_ASSERT(apr_gumbel(apr_unit(0)) < APR_GUMBEL_MAX);
	CU_ASSERT(apr_gumbel(apr_unit(0)) > 22.8f);
	CU_ASSERT(apr_gumbel(apr_unit(UINT32_MAX)) > -2.9f);
	for (i = 0; i < 200000; i++) {
		uint32_t r = i * 2654435761u;
		double t = apr_unit(r), want = -log(-log1p(-t)), e = apr_log2_1m((float)t) / (log1p(-t) / log(2.0)) - 1;

		CU_ASSERT_FATAL(fabs(e) < 4e-7);
		CU_ASSERT_FATAL(fabs(apr_gumbel((float)t) - want) < 1e-5);
		CU_ASSERT_FATAL(want <= -log(t)); /* what the pruning in sample_impl.h rests on */
	}
}

/* All 65,536 halves there and back; halfway cases to even, by value. */
static void sixteen_bit_floats(void)
{
	uint32_t h;

	for (h = 0; h < 0x10000; h++) {
		float x = apr_half_to_f32((uint16_t)h), b = apr_bfloat_to_f32((uint16_t)h);
		uint32_t mag = h & 0x7fff, up;

		if (mag < 0x7c00) {
			double v = mag < 0x400 ? ldexp(mag, -24) : ldexp(0x400 + (mag & 0x3ff), (int)(mag >> 10) - 25);

			CU_ASSERT_FATAL((double)fabsf(x) == v);
			CU_ASSERT_FATAL(apr_half_from_f32(x) == h);
			up = mag + 1;
			if (up < 0x7c00) { /* halfway to the next: the even one of the two */
				float mid = (fabsf(x) + apr_half_to_f32((uint16_t)up)) * 0.5f;

				CU_ASSERT_FATAL(apr_half_from_f32(mid) == (mag & 1 ? up : mag));
			}
		} else {
			CU_ASSERT_FATAL(mag == 0x7c00 ? isinf(x) : isnan(x));
			CU_ASSERT_FATAL(mag == 0x7c00 ? apr_half_from_f32(x) == h : (apr_half_from_f32(x) & 0x7fff) > 0x7c00);
		}
		if (!isnan(b))
			CU_ASSERT_FATAL(apr_bfloat_from_f32(b) == h);
	}
	CU_ASSERT_EQUAL(apr_half_from_f32(65519.99f), 0x7bff);
	CU_ASSERT_EQUAL(apr_half_from_f32(65520.0f), 0x7c00);
	CU_ASSERT_EQUAL(apr_half_from_f32(0x1p-25f), 0);
	CU_ASSERT_EQUAL(apr_half_from_f32(0x1.000002p-25f), 1);
	CU_ASSERT_EQUAL(apr_bfloat_from_f32(1.00390625f), 0x3f80);
	CU_ASSERT(isnan(apr_bfloat_to_f32(apr_bfloat_from_f32(apr_bits_f32(0x7f800001u)))));
}

static bool same(float a, float b)
{
	return apr_f32_bits(a) == apr_f32_bits(b) || (isnan(a) && isnan(b));
}

/* Every vector form that runs here, on bit patterns from all binades. */
static void vector_forms_equal_scalar(void)
{
	size_t f;

	for (f = 0; f < N_VEC_FORMS; f++) {
		uint32_t i, j, seed = 1;

		if (!vec_form_runs(&vec_forms[f]))
			continue;
		for (i = 0; i < 200000; i += 16) {
			float x[16], got[VEC_FORM_OUT][16];
			uint32_t word[16], philox[4][16];

			for (j = 0; j < 16; j++) {
				seed = seed * 1664525u + 1013904223u;
				word[j] = seed;
				x[j] = apr_bits_f32(i < 100000 ? seed : (seed >> 9) | 0x3f800000u);
				if (i & 16)
					x[j] = (float)(int32_t)seed * 0x1p-24f;
			}
			vec_forms[f].eval(x, word, got, philox);
			for (j = 0; j < 16; j++) {
				uint32_t ctr[4] = {word[j], 5, 6, 7}, want[4], w;
				bool normal = x[j] >= 0x1p-126f && x[j] < INFINITY;

				CU_ASSERT_FATAL(same(got[0][j], apr_exp2(x[j])));
				CU_ASSERT_FATAL(!normal || same(got[1][j], apr_log2(x[j])));
				CU_ASSERT_FATAL(same(got[2][j], apr_unit(word[j])));
				CU_ASSERT_FATAL(same(got[3][j], apr_gumbel(apr_unit(word[j]))));
				CU_ASSERT_FATAL(same(got[4][j], apr_sigmoid(x[j])));
				CU_ASSERT_FATAL(same(got[5][j], apr_tanh(x[j])));
				CU_ASSERT_FATAL(same(got[6][j], apr_half_to_f32(apr_half_from_f32(x[j]))));
				CU_ASSERT_FATAL(same(got[7][j], apr_bfloat_to_f32(apr_bfloat_from_f32(x[j]))));
				apr_philox4x32(ctr, 8, 9, want);
				for (w = 0; w < 4; w++)
					CU_ASSERT_FATAL(philox[w][j] == want[w]);
			}
		}
		printf("%s form equals the scalar one\n", vec_forms[f].name);
	}
}

static const struct apr_test tests[] = {
	{"exp2_within_one_ulp", exp2_within_one_ulp, 0},
	{"exp2_exact_and_edges", exp2_exact_and_edges, 0},
	{"log2_within_three_ulp", log2_within_three_ulp, 0},
	{"log2_edges", log2_edges, 0},
	{"philox_known_answers", philox_known_answers, 0},
	{"gumbel_range_and_error", gumbel_range_and_error, 0},
	{"sixteen_bit_floats", sixteen_bit_floats, 0},
	{"vector_forms_equal_scalar", vector_forms_equal_scalar, 0},
};
TEST_MAIN("kernels/math", tests)
