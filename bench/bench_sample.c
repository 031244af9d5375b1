/* SPDX-License-Identifier: MIT */
/*
 * How long choosing one token takes, by vocabulary and by kind of sampling.
 *
 * Timing window: one apr_sample call from logits in the cache where the head left
 * them (a pass touches them first) to the id. Median and best of 200 calls with
 * another position each, one thread. Logits are normal, deviation 3, with one id in
 * 1,000 raised by 8: about as peaked as a language model's. JSON lines on stdout, a
 * table on stderr.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "kernels/common/sample.h"
#include "kernels/cpu/linear.h"

enum { CALLS = 200 };

static double now_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int ascending(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static float normal(uint64_t *s)
{
	double u[2];
	int i;

	for (i = 0; i < 2; i++) {
		*s = *s * 6364136223846793005u + 1442695040888963407u;
		u[i] = ((double)(*s >> 40) + 0.5) * 0x1p-24;
	}
	return (float)(sqrt(-2.0 * log(u[0])) * cos(6.283185307 * u[1]));
}

static void bench(const char *name, const float *z, uint32_t n, struct apr_sample_params p, bool logprob, void *work)
{
	double t[CALLS];
	struct apr_sample_result r;
	uint32_t i;

	for (i = 0; i < CALLS; i++) {
		double start = now_us();

		apr_sample(z, n, &p, NULL, 0, i, logprob, logprob ? 5 : 0, work, &r);
		t[i] = now_us() - start;
		if (r.numeric)
			exit(1);
	}
	qsort(t, CALLS, sizeof(*t), ascending);
	printf("{\"bench\":\"sample\",\"kind\":\"%s\",\"vocab\":%u,\"isa\":\"%s\",\"us_median\":%.1f,\"us_best\":%.1f}\n", name, n,
	       apr_cpu_isa_name(apr_cpu_isa_current()), t[CALLS / 2], t[0]);
	fprintf(stderr, "%-28s %8u %12s %9.1f µs median %9.1f best\n", name, n, apr_cpu_isa_name(apr_cpu_isa_current()), t[CALLS / 2], t[0]);
}

static void bench_vocab(uint32_t n)
{
	const struct apr_sample_params plain = {.temperature = 1.0f, .top_p = 1.0f, .repeat_penalty = 1.0f, .seed = 7};
	struct apr_sample_params p = plain;
	float *z = malloc(n * sizeof(*z));
	void *work = malloc(apr_sample_work_bytes(n));
	uint64_t s = 1;
	uint32_t i;

	if (!z || !work)
		exit(1);
	for (i = 0; i < n; i++)
		z[i] = 3.0f * normal(&s) + (i % 1000 == 7 ? 8.0f : 0.0f);
	p.temperature = 0.0f;
	bench("greedy", z, n, p, false, work);
	bench("greedy, log-probability", z, n, p, true, work);
	p = plain;
	p.top_k = 40;
	p.top_p = 0.95f;
	bench("top-k 40 + top-p 0.95", z, n, p, false, work);
	p = plain;
	p.top_p = 0.95f;
	bench("top-p 0.95", z, n, p, false, work);
	p = plain;
	p.min_p = 0.05f;
	bench("min-p 0.05", z, n, p, false, work);
	bench("temperature 1", z, n, plain, false, work);
	p.min_p = 0.0f;
	p.temperature = 5.0f;
	bench("temperature 5", z, n, p, false, work);
	free(z);
	free(work);
}

int main(void)
{
	static const enum apr_cpu_isa isas[] = {APR_ISA_AVX2, APR_ISA_SCALAR};
	size_t i;

	bench_vocab(49152);
	bench_vocab(262144);
	for (i = 0; i < sizeof(isas) / sizeof(isas[0]); i++)
		if (!apr_cpu_isa_force(isas[i]))
			bench_vocab(262144);
	return 0;
}
