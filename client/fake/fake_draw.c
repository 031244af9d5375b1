/* SPDX-License-Identifier: MIT */
/*
 * The stand-in for a model: logits are a hash of what came before, and the draw
 * honours temperature, filters, bias and seed, so that programs can test that
 * they pass them on. Pure functions.
 */
#include "client/fake/fake_int.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

uint64_t fake_mix(uint64_t a, uint64_t b)
{
	uint64_t x = a ^ (b + UINT64_C(0x9e3779b97f4a7c15) + (a << 6) + (a >> 2));

	x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
	return x ^ x >> 31;
}

static double unit(uint64_t x) /* in (0, 1) */
{
	return ((double)(x >> 11) + 0.5) / 9007199254740992.0;
}

int fake_dist_make(struct fake_dist *d, const struct fake_vocab *v, uint64_t state, bool eos)
{
	uint32_t n = v->n - FAKE_WORD0 + (eos ? 1 : 0);
	double sum = 0;

	memset(d, 0, sizeof(*d));
	d->id = calloc(n, sizeof(*d->id));
	d->logit = malloc(n * sizeof(*d->logit));
	d->logprob = malloc(n * sizeof(*d->logprob));
	if (!d->id || !d->logit || !d->logprob) {
		fake_dist_free(d);
		return -ENOMEM;
	}
	for (uint32_t i = FAKE_WORD0; i < v->n; i++)
		d->id[d->n++] = i;
	if (eos)
		d->id[d->n++] = FAKE_EOS;
	for (uint32_t i = 0; i < d->n; i++) {
		d->logit[i] = (float)(unit(fake_mix(state, d->id[i])) * 8 - 4);
		sum += exp((double)d->logit[i]);
	}
	for (uint32_t i = 0; i < d->n; i++)
		d->logprob[i] = (float)((double)d->logit[i] - log(sum));
	return 0;
}

void fake_dist_free(struct fake_dist *d)
{
	free(d->id);
	free(d->logit);
	free(d->logprob);
	memset(d, 0, sizeof(*d));
}

static int best_first(const void *a, const void *b)
{
	const struct apr_top *x = a, *y = b;

	if (x->logprob != y->logprob)
		return x->logprob < y->logprob ? 1 : -1;
	return x->id < y->id ? -1 : x->id > y->id;
}

uint32_t fake_dist_top(const struct fake_dist *d, struct apr_top *top, uint32_t k)
{
	struct apr_top *all = malloc((d->n + 1) * sizeof(*all));

	if (!all)
		return 0;
	for (uint32_t i = 0; i < d->n; i++)
		all[i] = (struct apr_top){d->id[i], d->logprob[i]};
	qsort(all, d->n, sizeof(*all), best_first);
	if (k > d->n)
		k = d->n;
	memcpy(top, all, k * sizeof(*all));
	free(all);
	return k;
}

struct cand {
	uint32_t index, id;
	double logit;
};

static int cand_order(const void *a, const void *b)
{
	const struct cand *x = a, *y = b;

	if (x->logit != y->logit)
		return x->logit < y->logit ? 1 : -1;
	return x->id < y->id ? -1 : x->id > y->id;
}

/* Sorted candidates cut by top-k, top-p, min-p; how many are left. */
static uint32_t filter(const struct cand *c, uint32_t n, const struct apr_sampling *s)
{
	double sum = 0, acc = 0;
	uint32_t keep = n;

	if (!s)
		return n;
	if ((s->set & APR_SET_TOP_K) && s->top_k > 0 && (uint32_t)s->top_k < keep)
		keep = (uint32_t)s->top_k;
	for (uint32_t i = 0; i < keep; i++)
		sum += exp(c[i].logit - c[0].logit);
	if (s->set & APR_SET_TOP_P)
		for (uint32_t i = 0; i < keep; i++) {
			acc += exp(c[i].logit - c[0].logit) / sum;
			if (acc >= (double)s->top_p) {
				keep = i + 1;
				break;
			}
		}
	if (s->set & APR_SET_MIN_P)
		while (keep > 1 && exp(c[keep - 1].logit - c[0].logit) < (double)s->min_p)
			keep--;
	return keep;
}

static int draw_from(const struct cand *c, uint32_t n, double t, uint64_t seed, uint64_t at)
{
	int best = -1;
	double most = 0;

	for (uint32_t i = 0; i < n; i++) {
		double g = -log(-log(unit(fake_mix(fake_mix(seed, at), c[i].id)))), v = c[i].logit / t + g;

		if (best < 0 || v > most || (v == most && c[i].id < c[best].id)) {
			best = (int)i;
			most = v;
		}
	}
	return best;
}

int fake_dist_draw(const struct fake_dist *d, const struct apr_param_view *p, uint64_t seed, uint32_t sample,
		   uint32_t pos)
{
	const struct apr_sampling *s = p->sampling;
	double t = s && (s->set & APR_SET_TEMPERATURE) ? (double)s->temperature : 1.0;
	struct cand *c = malloc((d->n + 1) * sizeof(*c));
	uint32_t n = 0;
	int got = -1;

	if (!c)
		return -1;
	for (uint32_t i = 0; i < d->n; i++) {
		double l = (double)d->logit[i];

		for (uint32_t b = 0; b < p->n_bias; b++)
			if (p->bias[b].id == d->id[i])
				l += (double)p->bias[b].bias;
		if (isfinite(l))
			c[n++] = (struct cand){i, d->id[i], l};
	}
	qsort(c, n, sizeof(*c), cand_order);
	if (n && t <= 0)
		got = (int)c[0].index;
	else if (n) {
		int k = draw_from(c, filter(c, n, s), t, seed, (uint64_t)sample << 32 | pos);

		got = k < 0 ? -1 : (int)c[k].index;
	}
	free(c);
	return got;
}
