/* SPDX-License-Identifier: MIT */
/*
 * Attention on the CPU: against F64 within a derived bound, and the same bits however
 * rows are cut, placed, threaded and whatever instructions compute them.
 */
#include "tests/kernels/ops_fixture.h"

struct shape {
	uint32_t n_heads, n_kv_heads, k_dim, v_dim, window;
	float softcap;
	enum apr_kv_type type;
};

struct run {
	struct shape sh;
	struct kv_fix kv;
	struct apr_kv_layer layer;
	float scale;
};

static void run_init(struct run *t, const struct shape *sh, struct rng *r, uint32_t slots, uint32_t n_ctx)
{
	t->sh = *sh;
	kv_fix_init(&t->kv, r, sh->type, 2, sh->n_kv_heads, sh->k_dim, sh->v_dim, slots, n_ctx);
	t->kv.g.window = sh->window;
	t->scale = 1.0f / sqrtf((float)sh->k_dim);
}

/* Rows [first, first + n) through the op, q and o being those of row 0. */
static void attend(const struct run *t, struct apr_cpu_scratch *s, const uint32_t *pos, const uint32_t *slot, uint32_t first,
                   uint32_t n, const float *q, float *o)
{
	struct apr_rows rows = {.n = n, .pos = pos + first, .slot = slot + first};
	struct apr_op_attn op = {.q = q + (size_t)first * t->sh.n_heads * t->sh.k_dim,
	                         .o = o + (size_t)first * t->sh.n_heads * t->sh.v_dim,
	                         .n_heads = t->sh.n_heads, .n_kv_heads = t->sh.n_kv_heads, .k_dim = t->sh.k_dim,
	                         .v_dim = t->sh.v_dim, .scale = t->scale, .softcap = t->sh.softcap, .window = t->sh.window,
	                         .kv = {&t->kv.g, 1}};

	apr_cpu_attn(s, &rows, &op);
}

static struct apr_cpu_limits limits(const struct shape *sh, uint32_t rows, uint32_t n_ctx)
{
	return (struct apr_cpu_limits){.rows = rows, .n_embd = 32, .n_ff = 32, .n_heads = sh->n_heads, .n_kv_heads = sh->n_kv_heads,
	                               .k_dim = sh->k_dim, .v_dim = sh->v_dim, .n_ctx = n_ctx, .math = APR_CPU_F32};
}

/*
 * The bound, u = 2^-24, d = k_dim. A score's chain of d fmaf errs by at most
 * (d + 1) u Σ|q k|, its scaling by 2 u |s|; in units of log2 this is δ(key). With a
 * soft cap the slope of cap·tanh is at most 1, and its own error 2^-22 + 4 u of the
 * cap is added. The subtraction of m and exp2 add u |u - m| and 2 u. So a weight
 * errs by a factor of at most 1 + ω, ω = ln2 (δ(key) + δ(best)) + u (|u - m| + 2).
 * Sums: a chain of at most 256 keys a segment for o, 16 + 4 for l; a merge costs 3
 * roundings and two exp2 (4 u each and the rounding of the difference, which was
 * counted in |u - m| again). Both o's sum and l carry ω, so in all
 *   |o - ref| <= (2 max ω + u (256 + 20 + 16 segments)) Σ w|v| / l.
 * Weights below 2^-150 of the best are lost entirely: n keys of them, 2^-140 at most.
 */
static void check_row(const struct run *t, uint32_t pos, uint32_t slot, const float *q, const float *o)
{
	uint32_t group = t->sh.n_heads / t->sh.n_kv_heads, h, i, key;
	uint32_t lo = t->sh.window && pos >= t->sh.window ? pos + 1 - t->sh.window : 0, n = pos + 1 - lo;
	double *w = mem_of(n * sizeof(*w)), *err = mem_of(n * sizeof(*err)), u = 0x1p-24, log2e = 1.4426950408889634;

	for (h = 0; h < t->sh.n_heads; h++) {
		const float *qh = q + (size_t)h * t->sh.k_dim, *oh = o + (size_t)h * t->sh.v_dim;
		double m = -INFINITY, l = 0, omega = 0, worst = 0;

		for (key = 0; key < n; key++) {
			const uint8_t *k = kv_at(&t->kv, 1, slot, lo + key, h / group, false);
			double s = 0, a = 0;

			for (i = 0; i < t->sh.k_dim; i++) {
				s += (double)qh[i] * kv_get(&t->kv, k, i);
				a += fabs((double)qh[i] * kv_get(&t->kv, k, i));
			}
			s *= t->scale;
			err[key] = ((t->sh.k_dim + 1) * u * a * t->scale + 4 * u * fabs(s)) * log2e;
			if (t->sh.softcap != 0.0f) {
				s = t->sh.softcap * tanh(s / t->sh.softcap);
				err[key] += (0x1p-22 + 4 * u) * t->sh.softcap * log2e;
			}
			w[key] = s * log2e;
			m = w[key] > m ? w[key] : m;
		}
		for (key = 0; key < n; key++)
			worst = err[key] > worst ? err[key] : worst;
		for (key = 0; key < n; key++) {
			double e = 0.6931471805599453 * (err[key] + worst) + u * (fabs(w[key] - m) + 2);

			omega = w[key] > m - 150 && e > omega ? e : omega;
			w[key] = exp2(w[key] - m);
			l += w[key];
		}
		for (i = 0; i < t->sh.v_dim; i++) {
			double ref = 0, mag = 0, bound;

			for (key = 0; key < n; key++) {
				double v = kv_get(&t->kv, kv_at(&t->kv, 1, slot, lo + key, h / group, true), i);

				ref += w[key] * v;
				mag += w[key] * fabs(v);
			}
			bound = (2 * omega + u * (276 + 16.0 * ((double)n / APR_KV_SEGMENT + 3))) * mag / l + n * 0x1p-140;
			if (!(fabs(oh[i] - ref / l) <= bound)) {
				CU_FAIL("attention is outside its bound");
				fprintf(stderr, "pos %u head %u dim %u: %g, want %g within %g\n", pos, h, i, oh[i], ref / l, bound);
				goto out;
			}
		}
	}
out:
	free(w);
	free(err);
}

static const struct shape shapes[] = {
	{9, 3, 64, 64, 0, 0.0f, APR_KV_F16},     {4, 1, 256, 256, 512, 0.0f, APR_KV_F16}, {8, 1, 128, 128, 0, 0.0f, APR_KV_F32},
	{7, 1, 64, 64, 100, 30.0f, APR_KV_BF16}, {3, 3, 128, 128, 64, 0.0f, APR_KV_F16},  {4, 2, 80, 40, 257, 50.0f, APR_KV_F32},
	{14, 2, 64, 128, 1, 0.0f, APR_KV_BF16},  {2, 1, 24, 20, 0, 0.0f, APR_KV_F16},
};
#define N_SHAPES (sizeof(shapes) / sizeof(shapes[0]))

static void attn_within_bound(void)
{
	static const uint32_t counts[] = {1, 2, 3, 5, 8, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257};
	struct rng r = {7};
	size_t i, j;

	for (i = 0; i < N_SHAPES; i++) {
		struct apr_cpu_limits lim = limits(&shapes[i], 257, 1024);
		struct scratch_fix sf;
		struct run t;
		float *q, *o;
		uint32_t pos[257], slot[257], k;

		run_init(&t, &shapes[i], &r, 2, 1024);
		kv_fill(&t.kv, &r, 1, 0, 0, 1024);
		kv_fill(&t.kv, &r, 1, 1, 0, 1024);
		scratch_fix_init(&sf, &lim, 2);
		q = random_floats(&r, (size_t)257 * lim.n_heads * lim.k_dim, 1.5f);
		o = mem_of((size_t)257 * lim.n_heads * lim.v_dim * sizeof(*o));
		for (j = 0; j < sizeof(counts) / sizeof(counts[0]); j++) {
			uint32_t n = counts[j], start = j % 3 == 0 ? 0 : rng_u32(&r) % (1024 - n);

			for (k = 0; k < n; k++) {
				pos[k] = start + k;
				slot[k] = (uint32_t)(j & 1);
			}
			attend(&t, sf.s, pos, slot, 0, n, q, o);
			for (k = 0; k < n; k += k + 3 < n ? 1 + rng_u32(&r) % 31 : 1)
				check_row(&t, pos[k], slot[k], q + (size_t)k * lim.n_heads * lim.k_dim, o + (size_t)k * lim.n_heads * lim.v_dim);
		}
		free(q);
		free(o);
		scratch_fix_free(&sf);
		kv_fix_free(&t.kv);
	}
}

/* A prompt of 700 rows: all at once, in chunks, on other threads, in other instructions. */
static void attn_same_bits_however_cut(void)
{
	static const uint32_t chunks[] = {1, 63, 64, 65, 512};
	const enum apr_cpu_isa best = apr_cpu_isa_current();
	struct rng r = {11};
	size_t i, j;

	for (i = 0; i < N_SHAPES; i++) {
		const uint32_t n = i < 2 ? 700 : 330;
		struct apr_cpu_limits lim = limits(&shapes[i], n, 1024);
		size_t row = (size_t)lim.n_heads * lim.v_dim;
		uint32_t *pos = mem_of(n * sizeof(*pos)), *slot = mem_of(n * sizeof(*slot)), k;
		float *q, *want, *got;
		struct run t;
		unsigned threads;

		run_init(&t, &shapes[i], &r, 1, 1024);
		kv_fill(&t.kv, &r, 1, 0, 0, n);
		q = random_floats(&r, (size_t)n * lim.n_heads * lim.k_dim, 1.0f);
		want = mem_of(n * row * sizeof(*want));
		got = mem_of(n * row * sizeof(*got));
		for (k = 0; k < n; k++)
			pos[k] = k;
		for (threads = 1; threads <= 4; threads++) {
			struct scratch_fix sf;

			scratch_fix_init(&sf, &lim, threads);
			if (threads == 1)
				attend(&t, sf.s, pos, slot, 0, n, q, want);
			for (j = 0; j < sizeof(chunks) / sizeof(chunks[0]); j++) {
				memset(got, 0, n * row * sizeof(*got));
				for (k = 0; k < n; k += chunks[j])
					attend(&t, sf.s, pos, slot, k, n - k < chunks[j] ? n - k : chunks[j], q, got);
				CU_ASSERT(same_bits(want, got, n * row));
			}
			scratch_fix_free(&sf);
		}
		for (j = 0; j < sizeof(isas) / sizeof(isas[0]) + 1; j++) {
			struct scratch_fix sf;

			if (apr_cpu_isa_force(j ? isas[j - 1] : APR_ISA_SCALAR))
				continue;
			scratch_fix_init(&sf, &lim, 2);
			attend(&t, sf.s, pos, slot, 0, n, q, got);
			CU_ASSERT(same_bits(want, got, n * row));
			scratch_fix_free(&sf);
		}
		CU_ASSERT_EQUAL(apr_cpu_isa_force(best), 0);
		free(pos);
		free(slot);
		free(q);
		free(want);
		free(got);
		kv_fix_free(&t.kv);
	}
}

/* The row alone, then amid others' rows: another sequence, its own earlier and later positions, NaN everywhere else. */
static void attn_same_bits_among_neighbours(void)
{
	struct rng r = {13};
	size_t i;

	for (i = 0; i < N_SHAPES; i++) {
		enum { N = 40, AT = 17 };
		struct apr_cpu_limits lim = limits(&shapes[i], N, 1024);
		size_t qrow = (size_t)lim.n_heads * lim.k_dim, row = (size_t)lim.n_heads * lim.v_dim, k;
		uint32_t pos[N], slot[N], h, d, base;
		float *q, *want = mem_of(row * sizeof(*want)), *got = mem_of(N * row * sizeof(*got));
		struct scratch_fix sf;
		struct run t;

		run_init(&t, &shapes[i], &r, 3, 1024);
		kv_fill(&t.kv, &r, 1, 0, 0, 1024);
		kv_fill(&t.kv, &r, 1, 1, 0, 1024);
		q = random_floats(&r, N * qrow, 1.0f);
		scratch_fix_init(&sf, &lim, 2);
		for (base = 40; base < 1000; base += 237) {
			for (k = 0; k < N; k++) { /* its own tile's neighbours are consecutive positions */
				slot[k] = k < 5 || k > 35 ? 1 : 0;
				pos[k] = slot[k] ? (uint32_t)(k * 13) : base - AT + (uint32_t)k;
			}
			attend(&t, sf.s, pos, slot, AT, 1, q, got);
			memcpy(want, got + AT * row, row * sizeof(*want));
			attend(&t, sf.s, pos, slot, 0, N, q, got);
			CU_ASSERT(same_bits(want, got + AT * row, row));
			for (k = 0; k < N; k++) /* every other row's query is NaN, and so is what later rows wrote */
				for (d = 0; k != AT && d < qrow; d++)
					q[k * qrow + d] = NAN;
			for (h = 0; h < lim.n_kv_heads; h++)
				for (d = 0; d < lim.k_dim || d < lim.v_dim; d++) {
					if (d < lim.k_dim)
						kv_put(&t.kv, kv_at(&t.kv, 1, 0, base + 1, h, false), d, NAN);
					if (d < lim.v_dim)
						kv_put(&t.kv, kv_at(&t.kv, 1, 0, base + 1, h, true), d, NAN);
				}
			attend(&t, sf.s, pos, slot, 0, N, q, got);
			CU_ASSERT(same_bits(want, got + AT * row, row));
			CU_ASSERT(isnan(got[(AT + 1) * row]));
			kv_fill(&t.kv, &r, 1, 0, base + 1, base + 2);
			free(q);
			q = random_floats(&r, N * qrow, 1.0f);
		}
		free(q);
		free(want);
		free(got);
		scratch_fix_free(&sf);
		kv_fix_free(&t.kv);
	}
}

/* Which pages hold the keys changes nothing. */
static void attn_same_bits_on_other_pages(void)
{
	const struct shape sh = shapes[0];
	struct apr_cpu_limits lim = limits(&sh, 100, 1024);
	size_t row = (size_t)lim.n_heads * lim.v_dim, k;
	uint32_t pos[100], slot[100] = {0};
	float *q, *got[2];
	int i;

	for (i = 0; i < 2; i++) {
		struct rng places = {100 + (uint64_t)i}, values = {5};
		struct scratch_fix sf;
		struct run t;

		run_init(&t, &sh, &places, 1, 1024);
		kv_fill(&t.kv, &values, 1, 0, 0, 600);
		q = random_floats(&values, 100 * (size_t)lim.n_heads * lim.k_dim, 1.0f);
		for (k = 0; k < 100; k++)
			pos[k] = 500 + (uint32_t)k;
		got[i] = mem_of(100 * row * sizeof(float));
		scratch_fix_init(&sf, &lim, 2);
		attend(&t, sf.s, pos, slot, 0, 100, q, got[i]);
		scratch_fix_free(&sf);
		kv_fix_free(&t.kv);
		free(q);
	}
	CU_ASSERT(same_bits(got[0], got[1], 100 * row));
	free(got[0]);
	free(got[1]);
}

/* Scores up to 10^4: the weight of the best is 1, nothing overflows. */
static void attn_extreme_scores(void)
{
	struct shape sh = {2, 1, 64, 64, 0, 0.0f, APR_KV_F32};
	struct apr_cpu_limits lim = limits(&sh, 300, 512);
	uint32_t pos[300], slot[300] = {0}, k;
	struct rng r = {3};
	struct scratch_fix sf;
	struct run t;
	float *q, *o = mem_of((size_t)300 * 128 * sizeof(*o));

	run_init(&t, &sh, &r, 1, 512);
	kv_fill(&t.kv, &r, 1, 0, 0, 300);
	q = random_floats(&r, (size_t)300 * 128, 1000.0f);
	for (k = 0; k < 300; k++)
		pos[k] = k;
	scratch_fix_init(&sf, &lim, 2);
	attend(&t, sf.s, pos, slot, 0, 300, q, o);
	for (k = 0; k < (uint32_t)300 * 128; k++)
		CU_ASSERT_FATAL(isfinite(o[k]) && fabsf(o[k]) < 10.0f);
	scratch_fix_free(&sf);
	kv_fix_free(&t.kv);
	free(q);
	free(o);
}

/* KEEPS_HEAP: libc keeps the stacks of ended threads, and what hangs on them, for the next ones. */
static const struct apr_test tests[] = {
	{"attn_within_bound", attn_within_bound, KEEPS_HEAP},
	{"attn_same_bits_however_cut", attn_same_bits_however_cut, KEEPS_HEAP},
	{"attn_same_bits_among_neighbours", attn_same_bits_among_neighbours, KEEPS_HEAP},
	{"attn_same_bits_on_other_pages", attn_same_bits_on_other_pages, KEEPS_HEAP},
	{"attn_extreme_scores", attn_extreme_scores, KEEPS_HEAP},
};
TEST_MAIN("kernels/attention", tests)
