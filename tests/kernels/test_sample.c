/* SPDX-License-Identifier: MIT */
/*
 * Sampling: every fast path against a plain reading of the definitions (sort all
 * ids, filter in order, draw for each survivor), in every instruction set; the
 * definitions themselves against F64; the extreme cases.
 */
#include "kernels/common/sample.h"

#include <errno.h>
#include <stdio.h>

#include "kernels/common/sample_math.h"
#include "tests/kernels/ops_fixture.h"

static const struct apr_sample_params plain = {.temperature = 1.0f, .top_p = 1.0f, .repeat_penalty = 1.0f, .penalty_window = -1};

/* ---- the plain reading ------------------------------------------------------------ */
struct entry {
	double z;
	uint32_t id;
};

static int better_first(const void *a, const void *b)
{
	const struct entry *x = a, *y = b;

	if (x->z != y->z)
		return x->z > y->z ? -1 : 1;
	return x->id < y->id ? -1 : 1;
}

/* -1: numeric. Keeps the survivors in e and says how many. */
static int64_t naive_sample(const float *logits, uint32_t n, const struct apr_sample_params *p, const struct apr_seen *seen,
                            uint32_t n_seen, uint32_t position, struct entry *e, uint32_t *kept)
{
	float *z = mem_of(n * sizeof(*z)), max, best = -INFINITY;
	int64_t id = -1;
	uint32_t i, k, m;

	memcpy(z, logits, n * sizeof(*z));
	for (i = 0; i < p->n_bias; i++)
		z[p->bias_id[i]] += p->bias[i];
	for (i = 0; i < n_seen; i++) {
		float *x = &z[seen[i].id];

		if (p->repeat_penalty != 1.0f && seen[i].prompt + seen[i].output > 0)
			*x = *x > 0 ? *x / p->repeat_penalty : *x * p->repeat_penalty;
		*x -= p->frequency_penalty * (float)seen[i].output;
		*x -= seen[i].output ? p->presence_penalty : 0.0f;
	}
	for (i = 0; i < n; i++) {
		if (isnan(z[i]) || z[i] == INFINITY || isnan(logits[i]) || logits[i] == INFINITY)
			goto out;
		e[i] = (struct entry){z[i], i};
	}
	qsort(e, n, sizeof(*e), better_first);
	max = (float)e[0].z;
	if (max == -INFINITY)
		goto out;
	for (k = n; e[k - 1].z == -INFINITY; k--)
		;
	id = e[0].id;
	*kept = 1;
	if (p->temperature == 0.0f)
		goto out;
	if (p->top_k && p->top_k < k)
		k = p->top_k;
	if (p->top_p < 1.0f) {
		uint64_t total = 0, sum = 0, target;

		for (i = 0; i < k; i++)
			total += apr_weight_fixed((float)e[i].z, max, p->temperature);
		target = apr_top_p_target(total, p->top_p);
		for (m = 0; m < k && (m == 0 || sum < target); m++)
			sum += apr_weight_fixed((float)e[m].z, max, p->temperature);
		k = m;
	}
	if (p->min_p > 0.0f)
		while (!apr_min_p_keeps((float)e[k - 1].z, max, p->temperature, apr_log2(p->min_p)))
			k--;
	*kept = k;
	for (i = 0; i < k; i++) {
		float key = apr_draw((float)e[i].z, max, p->temperature, p->seed, p->sample, position, e[i].id);

		if (key > best || (key == best && e[i].id < (uint32_t)id)) {
			best = key;
			id = e[i].id;
		}
	}
out:
	free(z);
	return id;
}

static int64_t sample(const float *logits, uint32_t n, const struct apr_sample_params *p, const struct apr_seen *seen,
                      uint32_t n_seen, uint32_t position, void *work)
{
	struct apr_sample_result r;

	memset(work, 0xff, apr_sample_work_bytes(n));
	apr_sample(logits, n, p, seen, n_seen, position, false, 0, work, &r);
	return r.numeric ? -1 : (int64_t)r.id;
}

/* Logits of several kinds: normal, peaked, flat, full of ties, partly banned, ascending. */
static void make_logits(struct rng *r, float *z, uint32_t n, uint32_t kind)
{
	uint32_t i;

	for (i = 0; i < n; i++) {
		float x = rng_normal(r);

		switch (kind % 7) {
		case 0: z[i] = 3.0f * x; break;
		case 1: z[i] = i % 997 == 5 ? 20.0f + x : 2.0f * x - 10.0f; break;
		case 2: z[i] = 1e-3f * x; break;
		case 3: z[i] = floorf(2.0f * x); break;
		case 4: z[i] = x > 0.5f ? x : -INFINITY; break;
		case 5: z[i] = (float)i * 1e-4f; break;
		default: z[i] = i & 1 ? 0.0f : -0.0f; break;
		}
	}
}

static void fast_paths_equal_plain_reading(void)
{
	static const uint32_t sizes[] = {1, 2, 15, 16, 63, 64, 65, 1000, 5003, 49152};
	static const uint32_t ks[] = {0, 1, 2, 40, 64, 200, 3000, 0x7fffffff};
	static const float ts[] = {0.0f, 1e-7f, 0.3f, 1.0f, 1.7f, 1e6f}, ps[] = {1.0f, 0.95f, 0.5f, 0.0f, 0.9999f};
	const enum apr_cpu_isa best = apr_cpu_isa_current();
	struct rng r = {99};
	size_t s, f;

	for (s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
		uint32_t n = sizes[s], i, j, rounds = n > 5003 ? 42 : 250;
		float *z = mem_of(n * sizeof(*z));
		struct entry *e = mem_of(n * sizeof(*e));
		void *work = mem_of(apr_sample_work_bytes(n));

		for (i = 0; i < rounds; i++) {
			struct apr_sample_params p = plain;
			struct apr_seen seen[8];
			uint32_t ids[4], n_seen = rng_u32(&r) % 4 ? 0 : 8, kept, position = rng_u32(&r) % 1000;
			float bias[4];
			int64_t want;

			make_logits(&r, z, n, i);
			p.temperature = ts[rng_u32(&r) % 6];
			p.top_k = rng_u32(&r) & 1 ? ks[rng_u32(&r) % 8] : 0;
			p.top_p = rng_u32(&r) & 1 ? ps[rng_u32(&r) % 5] : 1.0f;
			p.min_p = rng_u32(&r) & 1 ? 0.0f : rng_u32(&r) % 5 ? 0.05f : 1.0f;
			p.seed = ((uint64_t)rng_u32(&r) << 32) | rng_u32(&r);
			p.sample = rng_u32(&r) % 4;
			for (j = 0; j < 8; j++)
				seen[j] = (struct apr_seen){(uint32_t)((uint64_t)j * n / 8), rng_u32(&r) % 3, rng_u32(&r) % 3};
			if (n < 8)
				n_seen = 0;
			if (n_seen) {
				p.repeat_penalty = 1.3f;
				p.frequency_penalty = 0.7f;
				p.presence_penalty = -0.4f;
			}
			if (rng_u32(&r) % 4 == 0) {
				for (j = 0; j < 4; j++) {
					ids[j] = rng_u32(&r) % n;
					bias[j] = j ? rng_normal(&r) * 5.0f : -INFINITY;
				}
				p.n_bias = 4;
				p.bias_id = ids;
				p.bias = bias;
			}
			want = naive_sample(z, n, &p, seen, n_seen, position, e, &kept);
			CU_ASSERT_FATAL(sample(z, n, &p, seen, n_seen, position, work) == want);
			for (f = 0; f < sizeof(isas) / sizeof(isas[0]) + 1; f++)
				if (!apr_cpu_isa_force(f ? isas[f - 1] : APR_ISA_SCALAR))
					CU_ASSERT_FATAL(sample(z, n, &p, seen, n_seen, position, work) == want);
			CU_ASSERT_FATAL(!apr_cpu_isa_force(best));
		}
		free(z);
		free(e);
		free(work);
	}
}

/* The survivors by F64 probabilities, where no id is within 10^-5 of a border; and the shares drawn. */
static void shares_follow_f64_probabilities(void)
{
	enum { N = 12, DRAWS = 40000 };
	static const struct {
		float T, top_p, min_p;
		uint32_t top_k;
	} set[] = {{1.0f, 1.0f, 0.0f, 0}, {0.7f, 1.0f, 0.0f, 5}, {1.3f, 0.8f, 0.0f, 0}, {1.0f, 0.9f, 0.15f, 9}, {2.0f, 1.0f, 0.2f, 0}};
	struct rng r = {5};
	void *work = mem_of(apr_sample_work_bytes(N));
	size_t s;

	for (s = 0; s < sizeof(set) / sizeof(set[0]); s++) {
		struct apr_sample_params p = plain;
		float z[N];
		double prob[N], total = 0, chi = 0, border;
		uint32_t order[N], count[N] = {0}, kept = N, i, j;

		do { /* ids far enough apart that rounding cannot decide */
			border = 1;
			for (i = 0; i < N; i++) {
				z[i] = rng_normal(&r) * 1.5f;
				order[i] = i;
			}
			for (i = 0; i < N; i++)
				for (j = i; j && z[order[j]] > z[order[j - 1]]; j--) {
					uint32_t t = order[j];

					order[j] = order[j - 1];
					order[j - 1] = t;
				}
			kept = set[s].top_k ? set[s].top_k : N;
			for (total = 0, i = 0; i < kept; i++)
				total += prob[i] = exp(((double)z[order[i]] - z[order[0]]) / set[s].T);
			if (set[s].top_p < 1.0f) {
				double sum = 0;

				for (i = 0; i < kept && sum < set[s].top_p * total; i++) {
					sum += prob[i];
					border = fmin(border, fabs(sum - set[s].top_p * total));
				}
				kept = i;
			}
			for (i = 0; set[s].min_p > 0.0f && i < kept; i++) {
				border = fmin(border, fabs(prob[i] - set[s].min_p));
				if (prob[i] < set[s].min_p)
					kept = i;
			}
		} while (border < 1e-5);
		for (total = 0, i = 0; i < kept; i++)
			total += prob[i];
		p.temperature = set[s].T;
		p.top_p = set[s].top_p;
		p.min_p = set[s].min_p;
		p.top_k = set[s].top_k;
		for (i = 0; i < DRAWS; i++) {
			int64_t id;

			p.seed = 1000 + (i >> 8);
			id = sample(z, N, &p, NULL, 0, i & 255, work);
			CU_ASSERT_FATAL(id >= 0 && id < N);
			count[id]++;
		}
		for (i = 0; i < N; i++) {
			double want = i < kept ? DRAWS * prob[i] / total : 0, got = count[order[i]];

			if (i < kept)
				chi += (got - want) * (got - want) / want;
			CU_ASSERT(i < kept || got == 0);
		}
		/* seeds are fixed: this either holds or not. 11 degrees of freedom: 31.3 at 0.1 % */
		CU_ASSERT(chi < 31.3);
	}
	free(work);
}

static void case17_extreme_parameters(void)
{
	static const float ts[] = {0.0f, 1e-45f, 1e-7f, 1e6f, 3e38f}, ps[] = {0.0f, 1e-30f, 1.0f}, ms[] = {0.0f, 1e-45f, 1.0f};
	enum { N = 300 };
	static const uint32_t ks[] = {0, 1, N, 0x7fffffff};
	struct rng r = {17};
	void *work = mem_of(apr_sample_work_bytes(N));
	float z[N];
	uint32_t a, b, c, d, i, top = 0;

	for (i = 0; i < N; i++) {
		z[i] = rng_normal(&r) * 10.0f;
		top = z[i] > z[top] ? i : top;
	}
	for (a = 0; a < 5; a++)
		for (b = 0; b < 3; b++)
			for (c = 0; c < 3; c++)
				for (d = 0; d < 4; d++) {
					struct apr_sample_params p = plain;
					int64_t id, again;

					p.temperature = ts[a];
					p.top_p = ps[b];
					p.min_p = ms[c];
					p.top_k = ks[d];
					p.seed = 42;
					id = sample(z, N, &p, NULL, 0, 7, work);
					CU_ASSERT(id >= 0 && id < N);
					if (ts[a] < 1e-6f || ps[b] < 0.1f || ms[c] == 1.0f || ks[d] == 1)
						CU_ASSERT_EQUAL(id, top);
					for (i = 0; i < 20; i++) {
						again = sample(z, N, &p, NULL, 0, 7, work);
						CU_ASSERT_EQUAL(again, id);
					}
				}
	z[0] = 3e38f; /* differences that overflow */
	z[1] = -3e38f;
	for (a = 1; a < 5; a++) {
		struct apr_sample_params p = plain;

		p.temperature = ts[a];
		CU_ASSERT(sample(z, N, &p, NULL, 0, 7, work) >= 0);
	}
	free(work);
}

static void case16_bias_and_bans(void)
{
	enum { N = 200 };
	uint32_t ids[N + 2], i;
	float z[N], bias[N + 2];
	struct apr_sample_params p = plain;
	struct rng r = {1};
	void *work = mem_of(apr_sample_work_bytes(N));

	for (i = 0; i < N; i++) {
		z[i] = rng_normal(&r);
		ids[i] = i;
		bias[i] = -INFINITY;
	}
	p.bias_id = ids;
	p.bias = bias;
	p.n_bias = N;
	CU_ASSERT_EQUAL(sample(z, N, &p, NULL, 0, 1, work), -1); /* nothing left */
	p.temperature = 0;
	CU_ASSERT_EQUAL(sample(z, N, &p, NULL, 0, 1, work), -1);
	ids[N] = N; /* ids outside the vocabulary are never touched */
	ids[N + 1] = UINT32_MAX;
	bias[N] = bias[N + 1] = 5.0f;
	p.n_bias = N + 2;
	bias[77] = 0.0f; /* all banned but one */
	CU_ASSERT_EQUAL(sample(z, N, &p, NULL, 0, 1, work), 77);
	p.temperature = 1.0f;
	CU_ASSERT_EQUAL(sample(z, N, &p, NULL, 0, 1, work), 77);
	p.top_k = 5;
	p.top_p = 0.5f;
	CU_ASSERT_EQUAL(sample(z, N, &p, NULL, 0, 1, work), 77);
	free(work);
}

/* NaN or +inf anywhere, in any lane or tail, in any filter: numeric. */
static void numeric_is_reported(void)
{
	enum { N = 1003 };
	static const float poison[] = {NAN, INFINITY};
	const enum apr_cpu_isa best = apr_cpu_isa_current();
	struct rng r = {3};
	float z[N];
	void *work = mem_of(apr_sample_work_bytes(N));
	uint32_t i, k;
	size_t f;

	for (f = 0; f < sizeof(isas) / sizeof(isas[0]) + 1; f++) {
		if (apr_cpu_isa_force(f ? isas[f - 1] : APR_ISA_SCALAR))
			continue;
		for (i = 0; i < N; i += i < 130 || i > 980 ? 1 : 61)
			for (k = 0; k < 4; k++) {
				struct apr_sample_params p = plain;
				struct apr_sample_result res;
				uint32_t j;

				for (j = 0; j < N; j++)
					z[j] = rng_normal(&r);
				z[i] = poison[k & 1];
				p.temperature = k & 2 ? 1.0f : 0.0f;
				p.top_k = k & 2 ? 40 : 0;
				CU_ASSERT_FATAL(sample(z, N, &p, NULL, 0, 1, work) == -1);
				CU_ASSERT_FATAL(apr_score_row(z, N, 0, 5, &res) == -EDOM);
			}
	}
	CU_ASSERT(!apr_cpu_isa_force(best));
	for (i = 0; i < N; i++)
		z[i] = -INFINITY;
	{
		struct apr_sample_params p = plain;
		struct apr_sample_result res;

		CU_ASSERT_EQUAL(sample(z, N, &p, NULL, 0, 1, work), -1);
		CU_ASSERT_EQUAL(apr_score_row(z, N, 0, 5, &res), -EDOM);
		CU_ASSERT_EQUAL(apr_score_row(z, N, N, 5, &res), -EINVAL);
	}
	free(work);
}

/* An exact tie: the lowest id; temperature 0, top_k 1 and top_p 0 are one thing. */
static void case35_ties_go_to_the_lowest_id(void)
{
	enum { N = 500 };
	struct rng r = {35};
	float z[N];
	void *work = mem_of(apr_sample_work_bytes(N));
	uint32_t i, round;

	for (round = 0; round < 200; round++) {
		struct apr_sample_params p = plain;
		uint32_t first = rng_u32(&r) % N, second = rng_u32(&r) % N, low = first < second ? first : second;

		for (i = 0; i < N; i++)
			z[i] = -1.0f - rng_unit(&r);
		z[first] = 0.0f;
		z[second] = -0.0f;
		p.seed = round;
		p.temperature = 0.0f;
		CU_ASSERT_EQUAL(sample(z, N, &p, NULL, 0, round, work), low);
		p.temperature = 1.0f;
		p.top_k = 1;
		CU_ASSERT_EQUAL(sample(z, N, &p, NULL, 0, round, work), low);
		p.top_k = 0;
		p.top_p = 0.0f;
		CU_ASSERT_EQUAL(sample(z, N, &p, NULL, 0, round, work), low);
	}
	free(work);
}

/* Repetition once an id, over prompt and output; frequency by count and presence once, over output alone;
 * negative logits are multiplied. */
static void case34_penalties(void)
{
	float z[4] = {2.0f, -2.0f, 1.9f, -5.0f};
	struct apr_seen seen[2] = {{0, 3, 0}, {1, 0, 4}};
	struct apr_sample_params p = plain;
	void *work = mem_of(apr_sample_work_bytes(4));

	p.temperature = 0.0f;
	CU_ASSERT_EQUAL(sample(z, 4, &p, seen, 2, 0, work), 0);
	p.repeat_penalty = 1.25f; /* 2 / 1.25 = 1.6, once, however often it was seen */
	CU_ASSERT_EQUAL(sample(z, 4, &p, seen, 2, 0, work), 2);
	z[2] = 1.59f;
	CU_ASSERT_EQUAL(sample(z, 4, &p, seen, 2, 0, work), 0);
	z[0] = z[2] = -9.0f; /* -2 · 1.25 = -2.5 */
	z[3] = -2.6f;
	CU_ASSERT_EQUAL(sample(z, 4, &p, seen, 2, 0, work), 1);
	z[3] = -2.4f;
	CU_ASSERT_EQUAL(sample(z, 4, &p, seen, 2, 0, work), 3);
	p.repeat_penalty = 1.0f;
	p.frequency_penalty = 0.5f; /* -2 - 4 · 0.5 = -4; the prompt's id keeps its -9 */
	z[3] = -3.9f;
	CU_ASSERT_EQUAL(sample(z, 4, &p, seen, 2, 0, work), 3);
	z[3] = -4.1f;
	CU_ASSERT_EQUAL(sample(z, 4, &p, seen, 2, 0, work), 1);
	p.presence_penalty = 0.25f; /* -4.25 */
	CU_ASSERT_EQUAL(sample(z, 4, &p, seen, 2, 0, work), 3);
	z[0] = -4.2f;
	z[3] = -9.0f;
	CU_ASSERT_EQUAL(sample(z, 4, &p, seen, 2, 0, work), 0);
	free(work);
}

static bool same_result(const struct apr_sample_result *a, const struct apr_sample_result *b)
{
	return a->id == b->id && a->numeric == b->numeric && a->n_top == b->n_top && same_bits(&a->logprob, &b->logprob, 1) &&
	       same_bits(a->top_logprob, b->top_logprob, a->n_top) && !memcmp(a->top_id, b->top_id, a->n_top * sizeof(a->top_id[0]));
}

/* What one call leaves in the work memory does not reach the next. */
static void case33_nothing_leaks_between_calls(void)
{
	enum { N = 3000 };
	static const struct apr_seen seen[] = {{5, 1, 1}};
	struct rng r = {33};
	float *z = random_floats(&r, N, 3.0f);
	uint32_t ids[2] = {3, 9}, i;
	float bias[2] = {-INFINITY, 20.0f};
	struct apr_sample_params a = plain, b = plain;
	struct apr_sample_result alone, after;
	void *work = mem_of(apr_sample_work_bytes(N));

	a.bias_id = ids;
	a.bias = bias;
	a.n_bias = 2;
	a.top_k = 50;
	a.repeat_penalty = 2.0f;
	b.top_p = 0.9f;
	for (i = 0; i < 50; i++) {
		memset(work, 0xff, apr_sample_work_bytes(N));
		b.seed = i;
		apr_sample(z, N, &b, NULL, 0, i, true, 5, work, &alone);
		apr_sample(z, N, &a, seen, 1, i, true, 20, work, &after);
		apr_sample(z, N, &b, NULL, 0, i, true, 5, work, &after);
		CU_ASSERT(same_result(&alone, &after));
	}
	free(z);
	free(work);
}

/*
 * Against F64: log-sum-exp errs by the weights' rounding down (n · 2^-40), exp2's 2^-23
 * relative with the 2^-23 of its argument's rounding times |argument| ln 2 (weights with
 * |argument| > 40 vanish: in all below 41 · 2^-23), and log2's 3 ulp; the difference of
 * logit and max rounds once.
 */
static void logprobs_within_bound(void)
{
	static const uint32_t sizes[] = {1, 7, 64, 1001, 49152, 262144};
	const enum apr_cpu_isa best = apr_cpu_isa_current();
	struct rng r = {8};
	size_t s, f;

	for (s = 0; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
		uint32_t n = sizes[s], kind, i;
		float *z = mem_of(n * sizeof(*z));
		struct entry *e = mem_of(n * sizeof(*e));
		void *work = mem_of(apr_sample_work_bytes(n));

		for (kind = 0; kind < 4; kind++) {
			struct apr_sample_params p = plain;
			struct apr_sample_result a, b, c;
			double sum = 0, lse, bound;

			make_logits(&r, z, n, kind);
			for (i = 0; i < n; i++)
				e[i] = (struct entry){z[i], i};
			qsort(e, n, sizeof(*e), better_first);
			for (i = 0; i < n; i++)
				sum += exp(z[i] - e[0].z);
			lse = e[0].z + log(sum);
			bound = n * 0x1p-40 + 44 * 0x1p-23 + 4 * 0x1p-23 * log(sum);
			p.seed = kind;
			apr_sample(z, n, &p, NULL, 0, 3, true, 20, work, &a);
			CU_ASSERT_EQUAL(a.n_top, n < 20 ? n : 20);
			CU_ASSERT(fabs(a.logprob - (z[a.id] - lse)) <= bound + fabs(z[a.id] - lse) * 0x1p-22);
			for (i = 0; i < a.n_top; i++) {
				CU_ASSERT_EQUAL(a.top_id[i], e[i].id);
				CU_ASSERT(fabs(a.top_logprob[i] - (e[i].z - lse)) <= bound + fabs(e[i].z - lse) * 0x1p-22);
			}
			CU_ASSERT_EQUAL(apr_score_row(z, n, a.id, 20, &b), 0);
			CU_ASSERT(same_result(&a, &b));
			for (f = 0; f < sizeof(isas) / sizeof(isas[0]) + 1; f++) {
				if (apr_cpu_isa_force(f ? isas[f - 1] : APR_ISA_SCALAR))
					continue;
				apr_sample(z, n, &p, NULL, 0, 3, true, 20, work, &c);
				CU_ASSERT(same_result(&a, &c));
			}
			CU_ASSERT(!apr_cpu_isa_force(best));
		}
		free(z);
		free(e);
		free(work);
	}
}

static const struct apr_test tests[] = {
	{"fast_paths_equal_plain_reading", fast_paths_equal_plain_reading, 0},
	{"shares_follow_f64_probabilities", shares_follow_f64_probabilities, 0},
	{"case16_bias_and_bans", case16_bias_and_bans, 0},
	{"case17_extreme_parameters", case17_extreme_parameters, 0},
	{"case33_nothing_leaks_between_calls", case33_nothing_leaks_between_calls, 0},
	{"case34_penalties", case34_penalties, 0},
	{"case35_ties_go_to_the_lowest_id", case35_ties_go_to_the_lowest_id, 0},
	{"numeric_is_reported", numeric_is_reported, 0},
	{"logprobs_within_bound", logprobs_within_bound, 0},
};
TEST_MAIN("kernels/sample", tests)
