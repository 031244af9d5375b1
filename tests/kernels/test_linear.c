/* SPDX-License-Identifier: MIT */
/*
 * Matrix products: the same bits on every instruction set, row count, thread count
 * and cut; and the error against an F64 reference within its derived bound.
 *
 * The bound, for one output. u = 2^-24. Let block b have activations x_k, s = their
 * scale and q_k the integers; weights are exactly w_k = a_k + m_k, where a_k = d ·
 * sub-scale · (code - offset) and m_k is the sub-block's minimum.
 *
 *  APR_CPU_INT16. s = fl(amax / A), inv = fl(A / amax), v = fl(x · inv), q = round(v),
 *  A = 32512. v differs from x / s by at most 3 u (1 + u)^3 |x / s| <= 4 u A < 0.008, so
 *  |x_k - s q_k| <= 0.508 s; where amax < 2^-100 it is at most 2^-100. So quantising costs
 *     Q = sum over k of |w_k| (0.508 s_b + 2^-100).
 *  What remains is a chain of N fmas (1 to 3 a block) over terms fl(s p) fl(dot) and
 *  m fl(s fl(sum q)). Each term has at most 2 roundings besides the fma's (the sum of
 *  32 q is below 2^24, exact), so the chain's error is at most
 *     R = gamma(N + 2) · sum over k of (|a_k| + |m_k|) s_b |q_k|,  gamma(n) = n u / (1 - n u),
 *  as |dot| and |sum q| are at most the sums of magnitudes, and s |q| <= |x| + 0.508 s.
 *  A product below 2^-126 loses up to 2^-150 times |dot| < 2^31: 2^-119 a block at most.
 *
 *  APR_CPU_F32. w_k is the dequantiser's float (one rounding, u |w_k|, where scale ·
 *  code or the sum is not exact: at most 2), then a chain of K fmas: gamma(K + 2) ·
 *  sum of (|a_k| + |m_k|) |x_k|.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/common/dequant.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/pool.h"
#include "tests/harness.h"

#define MAX_ROWS 129u
#define N_OUT 40u /* not a multiple of 16 */

static const uint32_t all_types[] = {APR_TYPE_F32,  APR_TYPE_F16,  APR_TYPE_BF16, APR_TYPE_Q4_0, APR_TYPE_Q4_1,
				     APR_TYPE_Q5_0, APR_TYPE_Q5_1, APR_TYPE_Q8_0, APR_TYPE_Q2_K, APR_TYPE_Q3_K,
				     APR_TYPE_Q4_K, APR_TYPE_Q5_K, APR_TYPE_Q6_K};
#define N_TYPES (sizeof all_types / sizeof all_types[0])
static const enum apr_cpu_isa isas[] = {APR_ISA_AVX2, APR_ISA_AVX512, APR_ISA_VNNI, APR_ISA_NEON};
static const enum apr_cpu_math maths[] = {APR_CPU_F32, APR_CPU_INT16};
static const uint32_t row_counts[] = {1,  2,  3,  4,  5,  6,  7,  8,  9,  10,  11,  12,
				      13, 14, 15, 16, 17, 63, 64, 65, 127, 128, 129};

static uint64_t rng_state;

static uint32_t rnd(void)
{
	rng_state ^= rng_state << 13;
	rng_state ^= rng_state >> 7;
	rng_state ^= rng_state << 17;
	return (uint32_t)(rng_state >> 16);
}

static float rnd_float(void)
{
	return (float)((int32_t)rnd() >> 8) * 0x1p-23f; /* -1 … 1 */
}

static void *get(size_t bytes)
{
	void *p = aligned_alloc(64, (bytes + 63) / 64 * 64);

	CU_ASSERT_PTR_NOT_NULL_FATAL(p);
	memset(p, 0xff, bytes); /* NaN where read as float: what is not written must not be used */
	return p;
}

static uint32_t width_for(uint32_t type, uint32_t n_in)
{
	uint32_t block = apr_type_info(type).block;

	return (n_in + block - 1) / block * block;
}

static size_t row_bytes(uint32_t type, uint32_t n_in)
{
	return (size_t)n_in / apr_type_info(type).block * apr_type_info(type).block_bytes;
}

/* random codes; factors between 2^-11 and 2^-5 in magnitude, either sign */
static uint8_t *random_weights(uint32_t type, uint32_t n_in, uint32_t n_out)
{
	static const int8_t at[APR_TYPE_LIMIT][2] = {
		[APR_TYPE_F16] = {0, -1},  [APR_TYPE_Q4_0] = {0, -1}, [APR_TYPE_Q4_1] = {0, 2},   [APR_TYPE_Q5_0] = {0, -1},
		[APR_TYPE_Q5_1] = {0, 2},  [APR_TYPE_Q8_0] = {0, -1}, [APR_TYPE_Q2_K] = {80, 82}, [APR_TYPE_Q3_K] = {108, -1},
		[APR_TYPE_Q4_K] = {0, 2},  [APR_TYPE_Q5_K] = {0, 2},
	};
	struct apr_type_info info = apr_type_info(type);
	size_t bytes = row_bytes(type, n_in) * n_out;
	uint8_t *w = get(bytes);

	for (size_t b = 0; b < bytes; b += info.block_bytes) {
		for (unsigned i = 0; i < info.block_bytes; i++)
			w[b + i] = (uint8_t)rnd();
		if (type == APR_TYPE_F32) {
			float f = rnd_float();

			memcpy(w + b, &f, 4);
		} else if (type == APR_TYPE_BF16) {
			w[b + 1] = (uint8_t)((w[b + 1] & 0x80) | 0x3d);
		}
		for (unsigned i = 0; i < 2 && info.block_bytes != 4 && type != APR_TYPE_BF16; i++) {
			int o = type == APR_TYPE_Q6_K ? (i ? -1 : 104) * 2 : at[type][i]; /* 208 */

			if (o >= 0)
				w[b + (size_t)o + 1] = (uint8_t)((w[b + (size_t)o + 1] & 0x87) | 0x10 | (rnd() & 0x18));
		}
	}
	return w;
}

static float *random_rows(uint32_t rows, uint32_t n_in)
{
	float *x = get((size_t)rows * n_in * 4);

	for (size_t i = 0; i < (size_t)rows * n_in; i++)
		x[i] = rnd_float() * (i % 97 == 5 ? 1000.0f : 1.0f); /* planted large channels */
	return x;
}

struct product {
	uint32_t type, n_in, n_out;
	enum apr_cpu_math math;
	uint8_t *raw;
	struct apr_linear w;
	void *panels;
};

static struct product new_product(uint32_t type, uint32_t n_in, uint32_t n_out, enum apr_cpu_math math)
{
	struct product p = {.type = type, .n_in = width_for(type, n_in), .n_out = n_out, .math = math};

	rng_state = 88172645463325252u + type * 977u + n_in;
	p.raw = random_weights(type, p.n_in, n_out);
	p.panels = get(apr_panel_bytes(type, p.n_in, n_out));
	CU_ASSERT_EQUAL_FATAL(apr_panel_pack(NULL, type, p.raw, p.n_in, n_out, p.panels), 0);
	p.w = (struct apr_linear){type, p.n_in, n_out, p.panels};
	return p;
}

static void free_product(struct product *p)
{
	free(p->raw);
	free(p->panels);
}

/* y: rows × n_out */
static void run(struct apr_pool *pool, const struct product *p, const float *x, uint32_t rows, float *y)
{
	void *mem = get(apr_act_bytes(p->math, rows, p->n_in));
	const struct apr_linear *w[] = {&p->w};
	float *ys[] = {y};
	struct apr_act a;

	apr_act_prepare(pool, &a, p->math, x, p->n_in, rows, p->n_in, mem);
	apr_linear_run(pool, &a, 1, w, NULL, ys, (const size_t[]){p->n_out});
	free(mem);
}

static int equal(const float *a, const float *b, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		if (memcmp(a + i, b + i, 4) != 0 && !(isnan(a[i]) && isnan(b[i])))
			return 0;
	}
	return 1;
}

static void scalar(const struct product *p, const float *x, uint32_t rows, float *y)
{
	CU_ASSERT_EQUAL_FATAL(apr_cpu_isa_force(APR_ISA_SCALAR), 0);
	run(NULL, p, x, rows, y);
	CU_ASSERT_EQUAL_FATAL(apr_cpu_isa_force(apr_cpu_isa_best()), 0);
}

static void check_bits(struct apr_pool *const pools[4], uint32_t type, uint32_t n_in, enum apr_cpu_math math)
{
	struct product p = new_product(type, n_in, N_OUT, math);
	float *x = random_rows(MAX_ROWS, p.n_in), *want = get(MAX_ROWS * N_OUT * 4), *y = get(MAX_ROWS * N_OUT * 4);

	scalar(&p, x, MAX_ROWS, want);
	for (size_t i = 0; i < sizeof isas / sizeof isas[0]; i++) {
		if (apr_cpu_isa_force(isas[i]))
			continue;
		for (size_t k = 0; k < sizeof row_counts / sizeof row_counts[0]; k++) {
			uint32_t rows = row_counts[k], first = rows < 64 ? (uint32_t)(k * 5 % 64) : 0;

			memset(y, 0xff, MAX_ROWS * N_OUT * 4);
			run(pools[(k + i) % 4], &p, x + (size_t)first * p.n_in, rows, y);
			if (!equal(y, want + (size_t)first * N_OUT, (size_t)rows * N_OUT)) {
				printf("\n  %s %s n_in %u rows %u", apr_type_info(type).name, apr_cpu_isa_name(isas[i]), p.n_in, rows);
				CU_FAIL("bits differ from the scalar reference");
			}
		}
	}
	CU_ASSERT_EQUAL(apr_cpu_isa_force(apr_cpu_isa_best()), 0);
	free(x);
	free(want);
	free(y);
	free_product(&p);
}

static void same_bits_everywhere(void)
{
	static const uint32_t widths[] = {576, 640, 896, 1536, 2304};
	struct apr_pool *pools[4];

	for (unsigned t = 0; t < 4; t++)
		CU_ASSERT_EQUAL_FATAL(apr_pool_new(&pools[t], t + 1), 0);
	for (size_t i = 0; i < N_TYPES; i++) {
		for (size_t k = 0; k < sizeof widths / sizeof widths[0]; k++) {
			for (size_t m = 0; m < 2; m++)
				check_bits(pools, all_types[i], widths[k], maths[m]);
		}
	}
	for (unsigned t = 0; t < 4; t++)
		apr_pool_free(pools[t]);
}

/* Few rows in the scalar reference too: alone equals among others. */
static void scalar_row_alone(void)
{
	for (size_t i = 0; i < N_TYPES; i++) {
		for (size_t m = 0; m < 2; m++) {
			struct product p = new_product(all_types[i], 256, N_OUT, maths[m]);
			float *x = random_rows(9, p.n_in), all[9 * N_OUT], one[N_OUT];

			scalar(&p, x, 9, all);
			for (uint32_t r = 0; r < 9; r++) {
				scalar(&p, x + (size_t)r * p.n_in, 1, one);
				CU_ASSERT(equal(one, all + (size_t)r * N_OUT, N_OUT));
			}
			free(x);
			free_product(&p);
		}
	}
}

/* a_k and m_k of one row in F64 */
static void exact_row(uint32_t type, const uint8_t *row, uint32_t n, double *a, double *m)
{
	struct apr_quant_traits t = apr_quant_traits(type);
	struct apr_type_info info = apr_type_info(type);

	for (uint32_t k = 0; k < n; k += info.block, row += info.block_bytes) {
		struct apr_codes c;
		float f;

		if (info.block == 1) {
			apr_dequant_row(type, row, 1, &f);
			a[k] = f;
			m[k] = 0;
			continue;
		}
		apr_codes_read(type, row, &c);
		for (unsigned i = 0; i < info.block; i++) {
			unsigned s = i / t.sub;

			a[k + i] = (double)apr_f16_float(c.d) * apr_codes_scale(t, &c, s) * ((int)c.q[i] - t.offset);
			m[k + i] = t.has_min == 2 ? -(double)apr_f16_float(c.m) * c.mn[s] : t.has_min ? apr_f16_float(c.m) : 0;
		}
	}
}

/* error / bound of one output */
static double error_ratio(const struct product *p, const float *x, const double *a, const double *m, float got)
{
	const double u = 0x1p-24;
	int ints = p->math == APR_CPU_INT16 && apr_type_info(p->type).block > 1;
	double y = 0, quant = 0, sum = 0, n;

	for (uint32_t k = 0; k < p->n_in; k++) {
		double s = 0;

		y += (a[k] + m[k]) * x[k];
		if (ints) {
			for (uint32_t i = k / 32 * 32; i < k / 32 * 32 + 32; i++)
				s = fmax(s, fabs((double)x[i]) / 32512);
			quant += fabs(a[k] + m[k]) * (0.508 * s + 0x1p-100);
			if (k % 32 == 0)
				quant += 0x1p-119;
		}
		sum += (fabs(a[k]) + fabs(m[k])) * (fabs((double)x[k]) + 0.508 * s);
	}
	n = ints ? p->n_in / 32.0 * 3 + 2 : p->n_in + 2.0;
	return fabs(y - (double)got) / (quant + n * u / (1 - n * u) * sum);
}

static double worst_ratio(const struct product *p, const float *x, uint32_t rows)
{
	float *y = get((size_t)rows * p->n_out * 4);
	double *a = get(p->n_in * sizeof *a), *m = get(p->n_in * sizeof *m), worst = 0;

	run(NULL, p, x, rows, y);
	for (uint32_t o = 0; o < p->n_out; o++) {
		exact_row(p->type, p->raw + o * row_bytes(p->type, p->n_in), p->n_in, a, m);
		for (uint32_t r = 0; r < rows; r++)
			worst = fmax(worst, error_ratio(p, x + (size_t)r * p->n_in, a, m, y[r * p->n_out + o]));
	}
	free(a);
	free(m);
	free(y);
	return worst;
}

static void error_within_bound(void)
{
	for (size_t i = 0; i < N_TYPES; i++) {
		for (size_t m = 0; m < 2; m++) {
			struct product p = new_product(all_types[i], 1536, N_OUT, maths[m]);
			float *x = random_rows(6, p.n_in);
			double worst;

			for (uint32_t k = 0; k < p.n_in; k++) {
				x[p.n_in + k] *= 0x1p-90f;      /* a small row, partly under the smallest scale */
				x[2 * p.n_in + k] *= 0x1p-108f;
				x[3 * p.n_in + k] *= 0x1p90f;
			}
			memset(x + 4 * (size_t)p.n_in, 0, p.n_in * sizeof *x);
			worst = worst_ratio(&p, x, 6);
			if (!(worst <= 1)) {
				printf("\n  %s: error is %g of its bound", apr_type_info(p.type).name, worst);
				CU_FAIL("error beyond its bound");
			}
			free(x);
			free_product(&p);
		}
	}
}

/* The check above must be able to fail: one wrong code in one weight is seen. */
static void error_check_finds_a_planted_fault(void)
{
	struct product p = new_product(APR_TYPE_Q4_K, 1024, 16, APR_CPU_INT16);
	float *x = random_rows(1, p.n_in);

	for (uint32_t k = 0; k < p.n_in; k++) /* no large channel to hide behind */
		x[k] = rnd_float();
	x[7] = 1;
	CU_ASSERT(worst_ratio(&p, x, 1) <= 1);
	p.raw[16 + 7] ^= 0x04; /* element 7 of row 0, after packing */
	CU_ASSERT(worst_ratio(&p, x, 1) > 1);
	free(x);
	free_product(&p);
}

static void several_weights_bias_and_strides(void)
{
	static const uint32_t types[3] = {APR_TYPE_Q5_0, APR_TYPE_F16, APR_TYPE_Q8_0}, outs[3] = {48, 7, 33};
	enum { ROWS = 11, WIDE = 60 };
	struct product p[3];
	const struct apr_linear *w[3];
	float *x, *y[3], bias[3][48], *alone = get(ROWS * 48 * 4);
	const float *b[3];
	size_t ldy[3] = {WIDE, WIDE, WIDE};
	struct apr_pool *pool;
	struct apr_act a;
	void *mem = get(apr_act_bytes(APR_CPU_INT16, ROWS, 640));

	CU_ASSERT_EQUAL_FATAL(apr_pool_new(&pool, 3), 0);
	x = random_rows(ROWS, 640);
	for (int i = 0; i < 3; i++) {
		p[i] = new_product(types[i], 640, outs[i], APR_CPU_INT16);
		w[i] = &p[i].w;
		y[i] = get(ROWS * WIDE * 4);
		for (unsigned k = 0; k < 48; k++)
			bias[i][k] = rnd_float();
		b[i] = i == 1 ? NULL : bias[i];
	}
	apr_act_prepare(pool, &a, APR_CPU_INT16, x, 640, ROWS, 640, mem);
	apr_linear_run(pool, &a, 3, w, b, y, ldy);
	for (int i = 0; i < 3; i++) {
		unsigned wrong = 0, touched = 0;

		run(NULL, &p[i], x, ROWS, alone);
		for (unsigned r = 0; r < ROWS; r++) {
			for (unsigned o = 0; o < outs[i]; o++) {
				float want = alone[r * outs[i] + o] + (i == 1 ? 0 : bias[i][o]);

				wrong += !equal(&y[i][r * WIDE + o], &want, 1);
			}
			for (unsigned o = outs[i]; o < WIDE; o++)
				touched += apr_float_bits(y[i][r * WIDE + o]) != 0xffffffffu;
		}
		CU_ASSERT_EQUAL(wrong, 0);
		CU_ASSERT_EQUAL(touched, 0);
		free(y[i]);
		free_product(&p[i]);
	}
	apr_pool_free(pool);
	free(x);
	free(mem);
	free(alone);
}

/* A NaN or infinity in a row makes that row NaN, in a weight's factor that output; nothing else. */
static void not_finite_stays_in_its_row(void)
{
	static const float bad[] = {NAN, INFINITY, -INFINITY};

	for (size_t i = 0; i < N_TYPES; i++) {
		struct product p = new_product(all_types[i], 512, N_OUT, APR_CPU_INT16);
		float *x = random_rows(12, p.n_in), *clean = get(12 * N_OUT * 4), *y = get(12 * N_OUT * 4);
		int ints = apr_type_info(p.type).block > 1;

		for (uint32_t rows = 3; rows <= 12; rows += 9) {
			run(NULL, &p, x, rows, clean);
			for (int k = 0; k < 3; k++) {
				float keep = x[p.n_in + 77];
				unsigned wrong = 0;

				x[p.n_in + 77] = bad[k];
				run(NULL, &p, x, rows, y);
				x[p.n_in + 77] = keep;
				for (uint32_t o = 0; o < rows * N_OUT; o++) {
					if (o / N_OUT != 1)
						wrong += !equal(y + o, clean + o, 1);
					else
						wrong += ints || k == 0 ? !isnan(y[o]) : !!isfinite(y[o]);
				}
				CU_ASSERT_EQUAL(wrong, 0);
			}
		}
		free(x);
		free(clean);
		free(y);
		free_product(&p);
	}
}

static void case18_bad_factor_stays_in_its_output(void)
{
	static const uint8_t high[] = {0x7c, 0xfc, 0x7e}; /* inf, -inf, NaN */

	for (int k = 0; k < 3; k++) {
		struct product p = new_product(APR_TYPE_Q4_1, 576, N_OUT, APR_CPU_INT16);
		float *x = random_rows(2, p.n_in), y[2 * N_OUT];
		unsigned wrong = 0;

		p.raw[5 * row_bytes(p.type, p.n_in) + 40] = 0;
		p.raw[5 * row_bytes(p.type, p.n_in) + 41] = high[k];
		CU_ASSERT_EQUAL(apr_panel_pack(NULL, p.type, p.raw, p.n_in, N_OUT, p.panels), 0);
		run(NULL, &p, x, 2, y);
		for (uint32_t o = 0; o < 2 * N_OUT; o++)
			wrong += (o % N_OUT == 5) != !!isnan(y[o]);
		CU_ASSERT_EQUAL(wrong, 0);
		free(x);
		free_product(&p);
	}
}

static void act_bytes_serve_fewer_rows(void)
{
	size_t most = apr_act_bytes(APR_CPU_INT16, 129, 2048);

	for (uint32_t r = 1; r <= 129; r++) {
		CU_ASSERT(apr_act_bytes(APR_CPU_INT16, r, 2048) <= most);
		CU_ASSERT(apr_act_bytes(APR_CPU_INT16, r, 2048) <= apr_act_bytes(APR_CPU_INT16, r + 1, 2048));
	}
	CU_ASSERT(apr_act_bytes(APR_CPU_F32, 129, 2048) > 0);
	CU_ASSERT(apr_act_bytes(APR_CPU_INT16, 8, 100) > 0); /* float weights of a width that is no multiple of 32 */
}

/* Widths that are no multiple of anything, for float weights, in both kinds of arithmetic. */
static void odd_float_widths(void)
{
	for (size_t i = 0; i < 3; i++) {
		for (size_t m = 0; m < 2; m++) {
			struct product p = new_product(all_types[i], 77, 5, maths[m]);
			float *x = random_rows(10, 77), want[50], y[50];

			scalar(&p, x, 10, want);
			run(NULL, &p, x, 10, y);
			CU_ASSERT(equal(y, want, 50));
			free(x);
			free_product(&p);
		}
	}
}

static void isa_names_and_force(void)
{
	enum apr_cpu_isa best = apr_cpu_isa_best();

	CU_ASSERT_EQUAL(apr_cpu_isa_current(), best);
	CU_ASSERT_NOT_EQUAL(apr_cpu_isa_force((enum apr_cpu_isa)99), 0);
	CU_ASSERT_NOT_EQUAL(apr_cpu_isa_force(best == APR_ISA_NEON ? APR_ISA_AVX2 : APR_ISA_NEON), 0);
	CU_ASSERT_EQUAL(apr_cpu_isa_current(), best);
	CU_ASSERT_STRING_EQUAL(apr_cpu_isa_name(APR_ISA_SCALAR), "scalar");
	printf("\n  best here: %s\n", apr_cpu_isa_name(best));
}

/* KEEPS_HEAP throughout: what is freed may stay in malloc's thread caches, which the harness
 * counts as in use; leaks are for the sanitizer build to find. */
static const struct apr_test tests[] = {
	{"isa_names_and_force", isa_names_and_force, KEEPS_HEAP},
	{"scalar_row_alone", scalar_row_alone, KEEPS_HEAP},
	{"same_bits_everywhere", same_bits_everywhere, KEEPS_HEAP},
	{"error_within_bound", error_within_bound, KEEPS_HEAP},
	{"error_check_finds_a_planted_fault", error_check_finds_a_planted_fault, KEEPS_HEAP},
	{"several_weights_bias_and_strides", several_weights_bias_and_strides, KEEPS_HEAP},
	{"not_finite_stays_in_its_row", not_finite_stays_in_its_row, KEEPS_HEAP},
	{"case18_bad_factor_stays_in_its_output", case18_bad_factor_stays_in_its_output, KEEPS_HEAP},
	{"act_bytes_serve_fewer_rows", act_bytes_serve_fewer_rows, 0},
	{"odd_float_widths", odd_float_widths, KEEPS_HEAP},
};
TEST_MAIN("kernels/linear", tests)
