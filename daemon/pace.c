/* SPDX-License-Identifier: MIT */
/* Owns: estimates of step times. See pace.h. */
#include "daemon/pace.h"

const uint32_t pace_edge[PACE_PREFILL] = { 16,  32,  64,  96,	 128,  192,  256,  384,	 512,
					     640, 768, 1024, 1280, 1536, 1792, 2048, 4096, 65536 };

static uint32_t prefill_at(uint32_t rows)
{
	uint32_t i = 0;

	while (i + 1 < PACE_PREFILL && pace_edge[i] < rows)
		i++;
	return i;
}

static uint32_t decode_at(uint32_t rows)
{
	uint32_t i = 0;

	while (i + 1 < PACE_DECODE && (UINT32_C(1) << i) < rows)
		i++;
	return i;
}

/* Relaxed: status looks at it from another thread. */
static void set(uint64_t *est, uint64_t v)
{
	__atomic_store_n(est, v ? v : 1, __ATOMIC_RELAXED);
}

static void follow(uint64_t *est, uint64_t seen)
{
	if (!*est)
		set(est, seen);
	else if (seen > *est)
		set(est, *est + (seen - *est + 1) / 2);
	else
		set(est, *est - (*est - seen) / 8);
}

/* The nearest below `at` that was seen; -1 none. */
static int below(const uint64_t *v, int at)
{
	while (--at >= 0 && !v[at])
		;
	return at;
}

/* The nearest above; n none. */
static int above(const uint64_t *v, int at, int n)
{
	while (++at < n && !v[at])
		;
	return at;
}

/* On the line through the two nearest that were seen; of one alone its own time. Too little rather than too much: what
 * is taken for decode is not seen as the prompt rows'. */
uint64_t pace_decode_ns(const struct pace *p, uint32_t rows)
{
	int at = (int)decode_at(rows), a = below(p->decode, at), b = above(p->decode, at, PACE_DECODE);

	if (!rows)
		return 0;
	if (p->decode[at])
		return p->decode[at];
	if (b == PACE_DECODE) { /* beyond them all */
		b = a;
		a = a < 0 ? -1 : below(p->decode, a);
	}
	if (b < 0)
		return 0;
	if (a < 0 || p->decode[b] <= p->decode[a])
		return p->decode[b];
	uint64_t slope = (p->decode[b] - p->decode[a]) / ((UINT32_C(1) << b) - (UINT32_C(1) << a));
	return p->decode[a] + slope * ((UINT32_C(1) << at) - (UINT32_C(1) << a));
}

/* A count above one that was seen: on the line through that and the one seen below it, since a step has a cost that its
 * rows share; by rows where it is the least one seen. */
static uint64_t beyond(const struct pace *p, int seen, int at)
{
	uint64_t ns = p->prefill[seen], by_rows = ns / pace_edge[seen] * pace_edge[at];
	int a = below(p->prefill, seen);

	if (a < 0)
		return by_rows;
	uint64_t rise = ns > p->prefill[a] ? ns - p->prefill[a] : 0;
	uint64_t line = ns + rise / (pace_edge[seen] - pace_edge[a]) * (pace_edge[at] - pace_edge[seen]);
	return line < by_rows ? line : by_rows;
}

uint64_t pace_prefill_ns(const struct pace *p, uint32_t rows)
{
	int at = (int)prefill_at(rows), a = below(p->prefill, at), b = above(p->prefill, at, PACE_PREFILL);

	if (!rows)
		return 0;
	if (p->prefill[at])
		return p->prefill[at];
	uint64_t up = b < PACE_PREFILL ? p->prefill[b] : UINT64_MAX;
	uint64_t from = a < 0 ? UINT64_MAX : beyond(p, a, at);
	uint64_t ns = up < from ? up : from;
	return ns == UINT64_MAX ? 0 : ns;
}

static void learn_prefill(struct pace *p, uint32_t rows, uint64_t ns)
{
	uint32_t at = prefill_at(rows), low = at ? pace_edge[at - 1] : 0;

	/* few rows of a wide range say how dear it is at least, not how cheap */
	if (ns > p->prefill[at] || rows >= pace_edge[at] - (pace_edge[at] - low) / 4)
		follow(&p->prefill[at], ns);
	for (uint32_t i = 0; i < PACE_PREFILL; i++) {
		/* the line says something of the next one alone: it may bend */
		uint64_t most = i <= at	    ? p->prefill[at]
				: i == at + 1 ? beyond(p, (int)at, (int)i)
					      : p->prefill[at] / pace_edge[at] * pace_edge[i];
		if (p->prefill[i] > most)
			set(&p->prefill[i], p->prefill[i] - (p->prefill[i] - most + 7) / 8);
	}
}

void pace_learn(struct pace *p, uint32_t decode_rows, uint32_t prefill_rows, uint64_t ns)
{
	uint64_t decode = pace_decode_ns(p, decode_rows), row;

	if (!ns)
		ns = 1;
	if (!p->best_step || ns < p->best_step)
		p->best_step = ns;
	if (!prefill_rows) {
		if (decode_rows)
			follow(&p->decode[decode_at(decode_rows)], ns);
		return;
	}
	learn_prefill(p, prefill_rows, ns > decode ? ns - decode : 1);
	row = ns * 1000 / (prefill_rows + decode_rows);
	if (!p->best_row || row < p->best_row)
		p->best_row = row;
}

uint32_t pace_chunk(const struct pace *p, uint32_t decode_rows, uint32_t max, uint32_t part)
{
	uint64_t decode = pace_decode_ns(p, decode_rows), have = p->budget_ns * part / 16;
	uint32_t rows = p->least;

	if (!decode_rows || !p->budget_ns)
		return max;
	if (!pace_prefill_ns(p, 1))
		return p->first < max ? p->first : max;
	for (uint32_t i = 0; i < PACE_PREFILL && decode < have; i++) {
		if (pace_edge[i] <= rows || pace_prefill_ns(p, pace_edge[i]) > have - decode)
			continue;
		rows = pace_edge[i];
		if (!p->prefill[i]) /* one step into the unknown at a time */
			break;
	}
	return rows < max ? rows : max;
}

uint64_t pace_least_ns(const struct pace *p, uint32_t prompt)
{
	uint64_t prefill = p->best_row * prompt / 1000;

	return prefill > p->best_step ? prefill : p->best_step;
}
