/* SPDX-License-Identifier: MIT */
/*
 * Choosing a token: see sample.h. The passes over a row are in sample_impl.h; what
 * an id's rank, weight and draw are is in sample_math.h.
 *
 * How the work stays small: one pass keeps the largest z of each 64 ids, and all
 * later passes skip blocks by it. The filters end in one rank (value, then id), the
 * last that may win, found by sorting only ids near the top.
 */
#include "kernels/common/sample.h"

#include <errno.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/common/sample_isa.h"
#include "kernels/common/sample_math.h"
#include "kernels/cpu/linear.h"

#define RADIX_BITS 11u
#define RADIX_SIZE (1u << RADIX_BITS)
#define INSERTION_MAX 48u  /* below this, insertion beats three radix passes */
#define SMALL_K 128u       /* top-k by insertion over the blocks' largest */
#define LIST_MAX 256u      /* survivors that are drawn one by one */
#define MAX_VOCAB (1u << 22) /* 2^22 weights of 2^40 stay below 2^63 */

struct work {
	float *z;          /* n: logits after bias and penalties */
	float *block_max;  /* of z */
	uint64_t *rank, *other; /* n each: candidates, and a second buffer */
	uint32_t *digits;  /* 3 × RADIX_SIZE */
};

static uint32_t blocks(uint32_t n)
{
	return n / APR_SAMPLE_BLOCK + 1;
}

static size_t work_place(uint32_t n, struct work *w, void *mem)
{
	uint8_t *base = mem;
	size_t at = 0, rank, other, digits, z, bm;

	rank = at;
	at += ((size_t)n + 1) * sizeof(uint64_t);
	other = at;
	at += ((size_t)n + 1) * sizeof(uint64_t);
	digits = at;
	at += 3 * RADIX_SIZE * sizeof(uint32_t);
	z = at;
	at += (size_t)n * sizeof(float);
	bm = at;
	at += blocks(n) * sizeof(float);
	if (w)
		*w = (struct work){(float *)(base + z), (float *)(base + bm), (uint64_t *)(base + rank), (uint64_t *)(base + other),
		                   (uint32_t *)(base + digits)};
	return at;
}

size_t apr_sample_work_bytes(uint32_t n_vocab)
{
	return n_vocab > MAX_VOCAB ? 0 : work_place(n_vocab, NULL, NULL);
}

static const struct apr_sample_isa *passes(void)
{
	switch (apr_cpu_isa_current()) {
#ifdef __x86_64__
	case APR_ISA_AVX2:
		return &apr_sample_avx2;
	case APR_ISA_AVX512:
	case APR_ISA_VNNI:
		return &apr_sample_avx512;
#endif
#ifdef __aarch64__
	case APR_ISA_NEON:
		return &apr_sample_neon;
#endif
	default:
		return &apr_sample_scalar;
	}
}

/* ---- bias and penalties ------------------------------------------------------------ */
static bool changes_logits(const struct apr_sample_params *p, uint32_t n_seen)
{
	return p->n_bias || (n_seen && (p->repeat_penalty != 1.0f || p->frequency_penalty != 0.0f || p->presence_penalty != 0.0f));
}

static void apply(float *z, uint32_t n, const struct apr_sample_params *p, const struct apr_seen *seen, uint32_t n_seen)
{
	uint32_t i;

	for (i = 0; i < p->n_bias; i++)
		if (p->bias_id[i] < n)
			z[p->bias_id[i]] += p->bias[i];
	for (i = 0; i < n_seen; i++) {
		float *x;

		if (seen[i].id >= n)
			continue;
		x = &z[seen[i].id];
		if (p->repeat_penalty != 1.0f && (seen[i].prompt || seen[i].output))
			*x = *x > 0.0f ? *x / p->repeat_penalty : *x * p->repeat_penalty;
		if (seen[i].output) /* rounded apart: contraction is off */
			*x = (*x - p->frequency_penalty * (float)seen[i].output) - p->presence_penalty;
	}
}

/* ---- ranks in order ------------------------------------------------------------------ */
static void insertion_sort(uint64_t *v, uint32_t n)
{
	uint32_t i, j;

	for (i = 1; i < n; i++) {
		uint64_t x = v[i];

		for (j = i; j && v[j - 1] > x; j--)
			v[j] = v[j - 1];
		v[j] = x;
	}
}

/* Ascending, by the value's 32 bits: the ids are in order already and each pass is stable. */
static void sort_ranks(struct work *w, uint32_t n)
{
	uint64_t *from = w->rank, *to = w->other, *t;
	uint32_t pass, i;

	if (n <= INSERTION_MAX) {
		insertion_sort(w->rank, n);
		return;
	}
	memset(w->digits, 0, 3 * RADIX_SIZE * sizeof(*w->digits));
	for (i = 0; i < n; i++) {
		uint32_t v = (uint32_t)(from[i] >> 32);

		w->digits[v & (RADIX_SIZE - 1)]++;
		w->digits[RADIX_SIZE + (v >> RADIX_BITS & (RADIX_SIZE - 1))]++;
		w->digits[2 * RADIX_SIZE + (v >> 2 * RADIX_BITS)]++;
	}
	for (pass = 0; pass < 3; pass++) {
		uint32_t *d = w->digits + (size_t)pass * RADIX_SIZE, shift = 32 + pass * RADIX_BITS, at = 0;

		for (i = 0; i < RADIX_SIZE; i++) {
			uint32_t count = d[i];

			d[i] = at;
			at += count;
		}
		for (i = 0; i < n; i++)
			to[d[from[i] >> shift & (RADIX_SIZE - 1)]++] = from[i];
		t = from;
		from = to;
		to = t;
	}
	w->other = to; /* three passes: what was `other` holds the result */
	w->rank = from;
}

/* A value that at least k of the blocks' largest reach: the k best ids all do too. k <= number of blocks. */
static float top_k_bound(struct work *w, uint32_t n, uint32_t k)
{
	uint32_t n_blocks = (n + APR_SAMPLE_BLOCK - 1) / APR_SAMPLE_BLOCK, i, j;
	float best[SMALL_K];

	if (k > SMALL_K) {
		for (i = 0; i < n_blocks; i++)
			w->rank[i] = apr_rank(w->block_max[i], i);
		sort_ranks(w, n_blocks);
		return apr_rank_value(w->rank[k - 1]);
	}
	for (i = 0; i < k; i++)
		best[i] = -INFINITY;
	for (i = 0; i < n_blocks; i++) {
		float x = w->block_max[i];

		if (!(x > best[k - 1]))
			continue;
		for (j = k - 1; j && x > best[j - 1]; j--)
			best[j] = best[j - 1];
		best[j] = x;
	}
	return best[k - 1];
}

static float finite_low(float x)
{
	return x >= -FLT_MAX ? x : -FLT_MAX;
}

/* The best candidates, sorted, whose weights reach the target; returns how many (at least 1). */
static uint32_t top_p_cut(const struct apr_sample_isa *isa, struct work *w, uint32_t n, float max, float T, uint64_t target,
                          uint64_t *reached)
{
	uint64_t sum = 0;
	uint32_t i;

	isa->weights(w->rank, n, max, T, w->other);
	for (i = 0; i < n; i++) {
		sum += w->other[i];
		if (sum >= target)
			break;
	}
	*reached = sum;
	return i < n ? i + 1 : n;
}

/* Sorted survivors of top-k and top-p into w->rank; returns how many. max is finite. */
static uint32_t survivors(const struct apr_sample_isa *isa, struct work *w, const float *z, uint32_t n,
                          const struct apr_sample_params *p, float max)
{
	static const float reach[] = {10.0f, 20.0f, 41.0f}; /* log2 of how far below the best to look for top-p */
	uint32_t found = 0, i;
	uint64_t total = 0, sum;

	if (p->top_k && p->top_k < n) {
		uint32_t n_blocks = (n + APR_SAMPLE_BLOCK - 1) / APR_SAMPLE_BLOCK;

		float low = finite_low(p->top_k <= n_blocks ? top_k_bound(w, n, p->top_k) : -INFINITY);

		found = isa->gather(z, w->block_max, n, low, w->rank);
		sort_ranks(w, found);
		found = found < p->top_k ? found : p->top_k;
		if (!(p->top_p < 1.0f))
			return found;
		isa->weights(w->rank, found, max, p->temperature, w->other);
		for (i = 0; i < found; i++)
			total += w->other[i];
		return top_p_cut(isa, w, found, max, p->temperature, apr_top_p_target(total, p->top_p), &sum);
	}
	total = apr_top_p_target(isa->mass(z, w->block_max, n, max, p->temperature), p->top_p);
	for (i = 0; i < sizeof(reach) / sizeof(reach[0]); i++) {
		uint32_t kept;

		found = isa->gather(z, w->block_max, n, finite_low(max - p->temperature * (reach[i] * APR_LN2)), w->rank);
		sort_ranks(w, found);
		kept = top_p_cut(isa, w, found, max, p->temperature, total, &sum);
		if (sum >= total)
			return kept;
	}
	/* only roundings of the last bound can bring us here: take all */
	found = isa->gather(z, w->block_max, n, -FLT_MAX, w->rank);
	sort_ranks(w, found);
	return top_p_cut(isa, w, found, max, p->temperature, total, &sum);
}

static uint32_t first_equal(const float *z, const float *block_max, uint32_t n, float max)
{
	uint32_t b = 0, i;

	while (!(block_max[b] >= max))
		b++;
	for (i = b * APR_SAMPLE_BLOCK; i < n - 1 && !(z[i] >= max); i++)
		;
	return i;
}

static uint32_t choose(const struct apr_sample_isa *isa, struct work *w, const float *z, uint32_t n,
                       const struct apr_sample_params *p, float max, uint32_t position)
{
	uint32_t best = first_equal(z, w->block_max, n, max), kept;
	struct apr_draw_pass d = {.z = z, .block_max = w->block_max, .n = n, .max = max, .temperature = p->temperature,
	                          .seed = p->seed, .sample = p->sample, .position = position, .last = UINT64_MAX,
	                          .log2_min_p = p->min_p > 0.0f ? apr_log2(p->min_p) : -INFINITY};

	if (!(p->temperature > 0.0f) || p->top_k == 1 || n == 1)
		return best;
	/* the likeliest id always survives: its draw is the first to beat */
	d.best_id = best;
	d.best = apr_draw(z[best], max, p->temperature, p->seed, p->sample, position, best);
	if ((p->top_k && p->top_k < n) || p->top_p < 1.0f) {
		kept = survivors(isa, w, z, n, p, max);
		if (kept <= LIST_MAX) {
			isa->draw_list(&d, w->rank, kept);
			return d.best_id;
		}
		d.last = w->rank[kept - 1];
	}
	isa->draw(&d);
	return d.best_id;
}

/* ---- log-probabilities of the raw logits ------------------------------------------------ */
struct top {
	uint32_t n, want;
	uint32_t id[APR_SAMPLE_TOP_MAX];
	float logit[APR_SAMPLE_TOP_MAX];
};

static void top_insert(struct top *t, float x, uint32_t id)
{
	uint32_t j;

	if (t->n == t->want) {
		if (!(x > t->logit[t->n - 1]))
			return;
	} else {
		t->n++;
	}
	for (j = t->n - 1; j && x > t->logit[j - 1]; j--) {
		t->logit[j] = t->logit[j - 1];
		t->id[j] = t->id[j - 1];
	}
	t->logit[j] = x;
	t->id[j] = id;
}

/* ids of z come after all ids taken in before: a tie stays behind */
static void top_take(struct top *t, const float *z, const float *block_max, uint32_t n, uint32_t base)
{
	uint32_t i, j;

	for (i = 0; t->want && i < n; i += APR_SAMPLE_BLOCK) {
		float bound = t->n == t->want ? t->logit[t->n - 1] : -INFINITY;

		if (!(block_max[i / APR_SAMPLE_BLOCK] > bound))
			continue;
		for (j = i; j < n && j < i + APR_SAMPLE_BLOCK; j++)
			if (z[j] > bound)
				top_insert(t, z[j], base + j);
	}
}

/* ln of the sum of exp(logit - max), from the fixed-point sum: within 2^-18 for any vocabulary we take */
static float log_mass(uint64_t mass)
{
	return apr_log2((float)mass * 0x1p-40f) * APR_LN2;
}

static void fill_logprobs(struct apr_sample_result *out, const struct top *t, float max, uint64_t mass, float logit)
{
	float log_sum = log_mass(mass);
	uint32_t i;

	out->logprob = (logit - max) - log_sum;
	out->n_top = t->n;
	for (i = 0; i < t->n; i++) {
		out->top_id[i] = t->id[i];
		out->top_logprob[i] = (t->logit[i] - max) - log_sum;
	}
}

void apr_sample(const float *logits, uint32_t n_vocab, const struct apr_sample_params *p, const struct apr_seen *seen,
                uint32_t n_seen, uint32_t position, bool want_logprob, uint32_t n_top, void *work, struct apr_sample_result *out)
{
	const struct apr_sample_isa *isa = passes();
	const float *z = logits;
	struct top top = {.want = n_top < APR_SAMPLE_TOP_MAX ? n_top : APR_SAMPLE_TOP_MAX};
	bool raw = want_logprob || n_top, bad;
	uint64_t mass = 0;
	struct work w;
	float max, raw_max = 0.0f;

	memset(out, 0, sizeof(*out));
	out->numeric = true;
	if (!n_vocab || n_vocab > MAX_VOCAB)
		return;
	work_place(n_vocab, &w, work);
	max = isa->scan(logits, n_vocab, w.block_max, &bad);
	if (bad || max == -INFINITY)
		return;
	if (raw) {
		raw_max = max;
		mass = isa->mass(logits, w.block_max, n_vocab, max, 1.0f);
		top_take(&top, logits, w.block_max, n_vocab, 0);
	}
	if (changes_logits(p, n_seen)) {
		memcpy(w.z, logits, (size_t)n_vocab * sizeof(*logits));
		apply(w.z, n_vocab, p, seen, n_seen);
		z = w.z;
		max = isa->scan(z, n_vocab, w.block_max, &bad);
		if (bad || max == -INFINITY)
			return;
	}
	out->id = choose(isa, &w, z, n_vocab, p, max, position);
	out->numeric = false;
	if (raw)
		fill_logprobs(out, &top, raw_max, mass, logits[out->id]);
}

int apr_score_row(const float *logits, uint32_t n_vocab, uint32_t id, uint32_t n_top, struct apr_sample_result *out)
{
	enum { CHUNK = 64 * APR_SAMPLE_BLOCK };
	const struct apr_sample_isa *isa = passes();
	struct top top = {.want = n_top < APR_SAMPLE_TOP_MAX ? n_top : APR_SAMPLE_TOP_MAX};
	float block_max[CHUNK / APR_SAMPLE_BLOCK], max = -INFINITY;
	uint64_t mass = 0;
	uint32_t i, n;

	memset(out, 0, sizeof(*out));
	out->numeric = true;
	if (id >= n_vocab || n_vocab > MAX_VOCAB)
		return -EINVAL;
	for (i = 0; i < n_vocab; i += CHUNK) {
		bool bad;
		float m;

		n = n_vocab - i < CHUNK ? n_vocab - i : CHUNK;
		m = isa->scan(logits + i, n, block_max, &bad);
		if (bad)
			return -EDOM;
		max = m > max ? m : max;
		top_take(&top, logits + i, block_max, n, i);
	}
	if (max == -INFINITY)
		return -EDOM;
	for (i = 0; i < CHUNK / APR_SAMPLE_BLOCK; i++)
		block_max[i] = max; /* no block is skipped: the sum is the same */
	for (i = 0; i < n_vocab; i += CHUNK) {
		n = n_vocab - i < CHUNK ? n_vocab - i : CHUNK;
		mass += isa->mass(logits + i, block_max, n, max, 1.0f);
	}
	out->id = id;
	out->numeric = false;
	fill_logprobs(out, &top, max, mass, logits[id]);
	return 0;
}
