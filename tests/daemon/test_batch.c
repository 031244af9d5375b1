/* SPDX-License-Identifier: MIT */
/*
 * What a step is made of, on a virtual clock: no daemon, no engine, no time that passes
 * by itself. Steps are counted.
 */
#include "tests/harness.h"
#include "tests/support/virtual_engine.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static struct vengine v;

/* ms: 1 and 0.05 a decode row; 0.1 a prompt row */
static double linear(void *arg, uint32_t decode, uint32_t prefill)
{
	(void)arg;
	return 1e6 * (1.0 + 0.05 * decode + 0.1 * prefill);
}

static void begin(uint32_t pages)
{
	CU_ASSERT_EQUAL_FATAL(vengine_init(&v, pages, 512 + BATCH_SLOTS), 0);
	v.step_ns = linear;
	v.b.pace.budget_ns = 15000000;
	v.b.pace.first = 32;
	v.b.pace.least = 16;
}

struct many {
	uint32_t n;
	struct vreq *r;
	struct vrun *run;
};

static struct many make(uint32_t n, uint32_t samples)
{
	struct many m = { n, calloc(n, sizeof(struct vreq)), calloc((size_t)n * samples, sizeof(struct vrun)) };

	for (uint32_t i = 0; i < n; i++) {
		m.r[i].run = &m.run[(size_t)i * samples];
		m.r[i].q.n = samples;
		m.r[i].q.cls = 1;
		m.r[i].weight = 1;
	}
	return m;
}

static void drop(struct many *m)
{
	for (uint32_t i = 0; i < m->n; i++)
		vengine_cancel(&v, &m->r[i]);
	free(m->r);
	free(m->run);
}

static void finish(void)
{
	CU_ASSERT_EQUAL(v.pages_free, v.pages_total);
	CU_ASSERT_EQUAL(v.slots_free, BATCH_SLOTS);
	CU_ASSERT_EQUAL(v.b.n_runs + v.b.waiting + v.b.out, 0);
	CU_ASSERT_EQUAL(v.b.due.n, 0);
	vengine_fini(&v);
}

static struct vreq *put(struct many *m, uint32_t i, uint64_t who, uint64_t session, uint32_t prompt, uint32_t tokens)
{
	struct vreq *r = &m->r[i];

	r->identity = who;
	r->session = session;
	r->q.prompt = prompt;
	r->tokens = tokens;
	CU_ASSERT_EQUAL(vengine_submit(&v, r), 0);
	return r;
}

static void steps(uint32_t n)
{
	while (n-- && vengine_step(&v))
		;
}

/* ---- fairness ------------------------------------------------------------------------------ */

/* A has a thousand requests over eight sessions, more than there are slots; B one, each second. */
static void one_beside_a_thousand(void)
{
	struct many a = make(1000, 1), b = make(20, 1);
	uint64_t next = 0;
	uint32_t sent = 0;

	begin(100000);
	for (uint32_t i = 0; i < a.n; i++)
		put(&a, i, 1, 10 + i % 8, 512, 128);
	while (sent < b.n || b.r[b.n - 1].result == 1) {
		if (sent < b.n && v.now >= next) {
			next = v.now + 1000000000;
			put(&b, sent++, 2, 2, 512, 64);
		}
		if (!vengine_step(&v))
			break;
	}
	CU_ASSERT_EQUAL(sent, b.n);
	for (uint32_t i = 0; i < b.n; i++) {
		CU_ASSERT_EQUAL(b.r[i].result, 0);
		CU_ASSERT_TRUE(b.r[i].started_step && b.r[i].started_step - b.r[i].arrived_step <= 2);
	}
	drop(&a);
	drop(&b);
	finish();
}

/* The same while A's requests hold every page. */
static void one_beside_a_full_pool(void)
{
	struct many a = make(100, 1), b = make(1, 1);

	begin(200);
	for (uint32_t i = 0; i < a.n; i++)
		put(&a, i, 1, 10, 500, 200);
	steps(150);
	CU_ASSERT_TRUE(v.pages_free < 9);
	const struct vreq *r = put(&b, 0, 2, 2, 520, 10);
	steps(3);
	CU_ASSERT_TRUE(r->started_step && r->started_step - r->arrived_step <= 2);
	steps(40);
	CU_ASSERT_EQUAL(r->result, 0);
	while (vengine_step(&v))
		;
	for (uint32_t i = 0; i < a.n; i++)
		CU_ASSERT_EQUAL(a.r[i].result, 0); /* preempted, never failed */
	drop(&a);
	drop(&b);
	finish();
}

struct share {
	uint64_t tokens[4];
};

static void count_tokens(struct vengine *e, struct vrun *run, uint64_t gap)
{
	struct share *s = e->user;

	(void)gap;
	s->tokens[run->r->identity]++;
}

/* Three identities, always with more than enough: weights 1, 1 and 2 share slots and tokens so. */
static void weights_share_slots_and_tokens(void)
{
	struct many m = make(3000, 1);
	struct share s = { { 0 } };

	begin(100000);
	v.user = &s;
	v.on_token = count_tokens;
	for (uint32_t i = 0; i < m.n; i++) {
		m.r[i].weight = i % 3 == 2 ? 2 : 1;
		put(&m, i, 1 + i % 3, 10 + i % 7, 64, 100);
	}
	steps(1500);
	double all = (double)(s.tokens[1] + s.tokens[2] + s.tokens[3]);
	CU_ASSERT_DOUBLE_EQUAL((double)s.tokens[1] / all, 0.25, 0.03);
	CU_ASSERT_DOUBLE_EQUAL((double)s.tokens[2] / all, 0.25, 0.03);
	CU_ASSERT_DOUBLE_EQUAL((double)s.tokens[3] / all, 0.5, 0.03);
	drop(&m);
	finish();
}

/* One asks with long prompts, the other with short ones: work is what is shared, prompts counted. */
static void prompts_count_as_work(void)
{
	struct many m = make(2000, 1);
	uint64_t work[3] = { 0 };

	begin(100000);
	for (uint32_t i = 0; i < m.n; i++)
		put(&m, i, 1 + i % 2, 10 + i % 2, i % 2 ? 2000 : 200, 20);
	steps(2000);
	for (uint32_t i = 0; i < m.n; i++) {
		const struct vreq *r = &m.r[i];
		work[r->identity] += r->run->live || r->result == 0 ? r->run->known : 0;
	}
	double ratio = (double)work[1] / (double)work[2];
	CU_ASSERT_TRUE(ratio > 0.8 && ratio < 1.25);
	drop(&m);
	finish();
}

/* Within an identity the sessions share alike. */
static void sessions_of_one_identity_share(void)
{
	struct many m = make(1200, 1);
	uint32_t done[2] = { 0 };

	begin(100000);
	for (uint32_t i = 0; i < m.n; i++)
		put(&m, i, 1, i < 1000 ? 10 : 11, 64, 50); /* a thousand stand before the two hundred */
	steps(400);
	for (uint32_t i = 0; i < m.n; i++)
		done[i >= 1000] += m.r[i].result == 0;
	CU_ASSERT_TRUE(done[0] > 50 && done[1] > 50);
	CU_ASSERT_TRUE(done[0] < done[1] * 5 / 4 && done[1] < done[0] * 5 / 4);
	drop(&m);
	finish();
}

/* Whoever was idle gets its share from now on, not what it left unused. */
static void idling_saves_nothing_up(void)
{
	struct many m = make(2000, 1);
	struct share s = { { 0 } };

	begin(100000);
	v.user = &s;
	put(&m, 0, 2, 2, 64, 1);
	steps(4);
	for (uint32_t i = 1; i < 1000; i++)
		put(&m, i, 1, 1, 64, 50);
	steps(400);
	for (uint32_t i = 1000; i < 2000; i++)
		put(&m, i, 2, 2, 64, 50);
	steps(50);
	v.on_token = count_tokens;
	steps(400);
	double ratio = (double)s.tokens[1] / (double)s.tokens[2];
	CU_ASSERT_TRUE(ratio > 0.8 && ratio < 1.25);
	drop(&m);
	finish();
}

/* ---- streams beside prompts ------------------------------------------------------------------- */

static uint64_t missed, longest;

static void watch(struct vengine *e, struct vrun *run, uint64_t gap)
{
	(void)e;
	longest = gap > longest ? gap : longest;
	(void)run;
}

/* Every run that decodes has a row in every step. */
static void no_row_missed(struct many *streams)
{
	for (uint32_t i = 0; i < streams->n; i++) {
		const struct vrun *run = streams->r[i].run;
		if (run->live && run->last && run->last_step != v.step)
			missed++;
	}
}

static void case14_no_stream_misses_a_step(void)
{
	struct many s = make(8, 1), p = make(40, 1);

	begin(100000);
	missed = longest = 0;
	v.on_token = watch;
	for (uint32_t i = 0; i < s.n; i++)
		put(&s, i, 1 + i, 1, 64, 2000);
	steps(30);
	for (uint32_t i = 0; i < p.n; i++) {
		put(&p, i, 100 + i % 3, 1, 8192, 1);
		for (uint32_t k = 0; k < 20; k++) {
			steps(1);
			no_row_missed(&s);
		}
	}
	CU_ASSERT_EQUAL(missed, 0);
	CU_ASSERT_TRUE(longest <= 15000000); /* by the clock: the chunk is chosen by time */
	CU_ASSERT_TRUE(longest > 10000000);  /* and what there is of it is used */
	drop(&s);
	drop(&p);
	finish();
}

static double stepwise(void *arg, uint32_t decode, uint32_t prefill)
{
	static const uint32_t bucket[] = { 64, 128, 256, 512, 1024 };
	uint32_t i = 0;

	while (i < 4 && bucket[i] < prefill)
		i++;
	return 1e6 * (*(double *)arg + 0.02 * decode + (prefill ? 1.5 + 0.03 * bucket[i] : 0));
}

/* The cost of a row changes under it: the chunk follows, and recovers from one slow step. */
static void the_chunk_follows_measured_time(void)
{
	struct many s = make(4, 1), p = make(400, 1);
	double base = 2.0;

	begin(1000000);
	v.step_ns = stepwise;
	v.step_arg = &base;
	for (uint32_t i = 0; i < s.n; i++)
		put(&s, i, 1 + i, 1, 64, 100000);
	steps(20);
	for (uint32_t i = 0; i < p.n; i++)
		put(&p, i, 100, 1, 4096, 1);
	steps(60);
	CU_ASSERT_TRUE(v.plan.prefill_rows >= 256 && v.plan.prefill_rows <= 512);
	base = 9.0; /* everything has become slower */
	steps(60);
	CU_ASSERT_TRUE(v.plan.prefill_rows <= 128);
	base = 2.0;
	for (uint32_t i = 0; i < 8; i++) /* steps of streams alone show it */
		pace_learn(&v.b.pace, 4, 0, 2080000);
	steps(200);
	CU_ASSERT_TRUE(v.plan.prefill_rows >= 256);
	pace_learn(&v.b.pace, 4, 384, 400000000); /* one bad moment */
	steps(200);
	CU_ASSERT_TRUE(v.plan.prefill_rows >= 256);
	drop(&s);
	drop(&p);
	finish();
}

static void short_prompts_are_packed(void)
{
	struct many m = make(10, 1);

	begin(100000);
	for (uint32_t i = 0; i < m.n; i++)
		put(&m, i, 1 + i % 3, 1, 40, 5);
	steps(1);
	CU_ASSERT_EQUAL(v.plan.n, 10);
	CU_ASSERT_EQUAL(v.plan.prefill_rows, 400);
	for (uint32_t i = 0; i < m.n; i++)
		CU_ASSERT_EQUAL(m.r[i].started_step, 1);
	drop(&m);
	finish();
}

/* A short prompt shares a step with a piece of a long one, whoever came first. */
static void a_long_prompt_lets_short_ones_in(void)
{
	struct many m = make(2, 1);

	begin(100000);
	put(&m, 0, 1, 1, 50000, 1);
	steps(3);
	const struct vreq *r = put(&m, 1, 2, 1, 100, 1);
	steps(1);
	CU_ASSERT_EQUAL(r->result, 0);
	CU_ASSERT_TRUE(v.plan.prefill_rows > 500);
	drop(&m);
	finish();
}

/* ---- classes ------------------------------------------------------------------------------------- */

static void case48_background_yields(void)
{
	struct many low = make(30, 1), high = make(10, 1);
	uint64_t next = 0;
	uint32_t sent = 0;

	begin(100000);
	for (uint32_t i = 0; i < low.n; i++) {
		low.r[i].q.cls = 2;
		put(&low, i, 1, 1, 8192, 50);
	}
	while (sent < high.n || high.r[high.n - 1].result == 1) {
		if (sent < high.n && v.now >= next) {
			next = v.now + 1000000000;
			high.r[sent].q.cls = 0;
			put(&high, sent++, 2, 2, 200, 30);
		}
		if (!vengine_step(&v))
			break;
		if (sent && high.r[sent - 1].result == 1 && !high.r[sent - 1].first)
			for (uint32_t i = 0; i < v.plan.n; i++) /* the person's prompt is not shared with */
				CU_ASSERT_TRUE(v.plan.part[i].run->q->cls == 0 || v.plan.part[i].decode ||
					       v.step == high.r[sent - 1].arrived_step);
	}
	for (uint32_t i = 0; i < high.n; i++) {
		CU_ASSERT_EQUAL(high.r[i].result, 0);
		CU_ASSERT_EQUAL(high.r[i].started_step - high.r[i].arrived_step, 1);
		/* 30 tokens: as if alone but for low rows in a quarter of the budget */
		CU_ASSERT_TRUE(high.r[i].ended - high.r[i].arrived < 30 * UINT64_C(5000000) + 60000000);
	}
	drop(&low);
	drop(&high);
	finish();
}

static void a_higher_class_takes_slots_and_pages(void)
{
	struct many low = make(64, 1), high = make(64, 1);

	begin(64 * 5);
	for (uint32_t i = 0; i < low.n; i++) {
		low.r[i].q.cls = 2;
		put(&low, i, 1 + i, 1, 200, 100);
	}
	steps(40);
	CU_ASSERT_EQUAL(v.slots_free, 0);
	for (uint32_t i = 0; i < high.n; i++) {
		high.r[i].q.cls = 0;
		put(&high, i, 1 + i, 2, 200, 20);
	}
	steps(1);
	uint32_t n = 0;
	for (uint32_t i = 0; i < v.b.n_runs; i++)
		n += v.b.run[i]->q->cls == 0;
	CU_ASSERT_EQUAL(n, 64);
	while (vengine_step(&v))
		;
	for (uint32_t i = 0; i < 64; i++) {
		CU_ASSERT_EQUAL(high.r[i].result, 0);
		CU_ASSERT_EQUAL(low.r[i].result, 0);
	}
	drop(&low);
	drop(&high);
	finish();
}

/* ---- deadlines, refusals ----------------------------------------------------------------------------- */

static void a_deadline_that_cannot_be_met(void)
{
	struct many m = make(40, 1);

	begin(100000);
	put(&m, 0, 1, 1, 1000, 50); /* the pace is known from here on: some 0.1 ms a row */
	steps(60);
	/* 5,000 rows are half a second: refused at once */
	m.r[1].identity = 1;
	m.r[1].q.prompt = 5000;
	m.r[1].tokens = 1;
	m.r[1].q.deadline = v.now + 100000000;
	CU_ASSERT_EQUAL(vengine_submit(&v, &m.r[1]), -ETIME);
	/* in time if it were alone: it is */
	m.r[2].q.deadline = v.now + 700000000;
	put(&m, 2, 1, 1, 5000, 1);
	while (vengine_step(&v))
		;
	CU_ASSERT_EQUAL(m.r[2].result, 0);
	/* behind long ones of its own session it waits, and is failed when it is too late, not at the deadline */
	for (uint32_t i = 10; i < 40; i++)
		put(&m, i, 1, 1, 8000, 1);
	steps(2);
	m.r[3].q.deadline = v.now + 600000000;
	m.r[3].q.cls = 2;
	put(&m, 3, 1, 1, 5000, 1);
	while (m.r[3].result == 1 && vengine_step(&v))
		;
	CU_ASSERT_EQUAL(m.r[3].result, -ETIME);
	CU_ASSERT_TRUE(m.r[3].ended < m.r[3].q.deadline - 300000000);
	drop(&m);
	finish();
}

/* Of one session's requests the one with the nearest deadline goes first. */
static void the_nearest_deadline_first(void)
{
	struct many m = make(100, 1);

	begin(100000);
	for (uint32_t i = 0; i < 99; i++)
		put(&m, i, 1, 1, 512, 400);
	steps(20);
	m.r[99].q.deadline = v.now + UINT64_C(60000000000);
	const struct vreq *r = put(&m, 99, 1, 1, 512, 10);
	while (r->result == 1 && vengine_step(&v))
		;
	CU_ASSERT_EQUAL(r->result, 0);
	uint32_t before = 0;
	for (uint32_t i = 64; i < 99; i++)
		before += m.r[i].started_step && m.r[i].started_step < r->started_step;
	CU_ASSERT_EQUAL(before, 0);
	drop(&m);
	finish();
}

static void case10_never_fits_is_told_at_once(void)
{
	struct many m = make(20, 1);

	begin(32);
	for (uint32_t i = 1; i < m.n; i++)
		put(&m, i, 1, 1, 300, 50);
	steps(5);
	struct vreq *r = &m.r[0];
	r->identity = 2;
	r->q.prompt = 64 * 40;
	r->tokens = 1;
	CU_ASSERT_EQUAL(vengine_submit(&v, r), 0);
	steps(2);
	CU_ASSERT_EQUAL(r->result, -ENOSPC);
	while (vengine_step(&v))
		;
	for (uint32_t i = 1; i < m.n; i++)
		CU_ASSERT_EQUAL(m.r[i].result, 0);
	drop(&m);
	finish();
}

/* A quota of pages: its own runs wait for each other, nobody else is touched; above it alone: EDQUOT. */
static void a_quota_of_pages(void)
{
	struct many m = make(20, 1);
	uint32_t most = 0;

	begin(1000);
	for (uint32_t i = 0; i < m.n; i++)
		m.r[i].q.max_pages = i < 10 ? 20 : 0;
	for (uint32_t i = 0; i < m.n; i++)
		put(&m, i, i < 10 ? 1 : 2, 1, 500, 60);
	m.r[0].q.max_pages = 20;
	for (bool any = true; any;) {
		uint32_t held = 0;
		any = vengine_step(&v);
		for (uint32_t i = 0; i < 10; i++)
			held += m.r[i].run->pages;
		most = held > most ? held : most;
	}
	CU_ASSERT_TRUE(most > 10 && most <= 20);
	for (uint32_t i = 0; i < m.n; i++)
		CU_ASSERT_EQUAL(m.r[i].result, 0);
	drop(&m);
	m = make(1, 1);
	m.r[0].q.max_pages = 4;
	put(&m, 0, 1, 1, 500, 60);
	steps(2);
	CU_ASSERT_EQUAL(m.r[0].result, -EDQUOT);
	drop(&m);
	finish();
}

/* ---- several samples ------------------------------------------------------------------------------------ */

static void samples_share_their_prompt(void)
{
	struct many m = make(1, 16);

	begin(1000);
	put(&m, 0, 1, 1, 4000, 30);
	while (vengine_step(&v))
		;
	CU_ASSERT_EQUAL(m.r[0].result, 0);
	/* the prompt once, and of each other sample what lies beyond its last full page */
	CU_ASSERT_EQUAL(v.rows, 4000 + 15 * (4000 - 3999 / 64 * 64));
	CU_ASSERT_EQUAL(v.tokens, 16 * 30);
	drop(&m);
	finish();
}

/* ---- everything at once ------------------------------------------------------------------------------------ */

static uint32_t rnd(uint32_t *x, uint32_t n)
{
	*x = *x * 1664525u + 1013904223u;
	return (*x >> 8) % n;
}

/* Random arrivals, classes, samples, cancels, holds in a small pool: all end, nothing is lost. */
static void random_lives(void)
{
	struct many m = make(3000, 4);
	uint32_t x = 7, sent = 0, ok = 0;

	begin(150);
	while (sent < m.n || v.b.n_runs || v.b.waiting || v.b.out) {
		if (sent < m.n && rnd(&x, 3)) {
			struct vreq *r = &m.r[sent];
			r->q.n = 1 + (rnd(&x, 5) == 0) * rnd(&x, 4);
			r->q.cls = rnd(&x, 3);
			r->weight = 1 + rnd(&x, 3);
			r->q.deadline = rnd(&x, 10) ? 0 : v.now + rnd(&x, 1000) * UINT64_C(1000000);
			r->identity = 1 + rnd(&x, 20);
			r->session = rnd(&x, 3);
			r->q.prompt = 1 + rnd(&x, rnd(&x, 4) ? 300 : 3000);
			r->tokens = 1 + rnd(&x, 100);
			r->cached = rnd(&x, 4) ? 0 : (r->q.prompt - 1) / 128 * 64;
			vengine_submit(&v, r);
			sent++;
		}
		struct vreq *one = &m.r[rnd(&x, sent + 1) % m.n];
		if (one->result == 1 && !rnd(&x, 20)) {
			vengine_cancel(&v, one);
		} else if (one->result == 1 && one->running && !rnd(&x, 10)) {
			batch_pause(&v.b, &one->q);
			for (uint32_t i = 0; i < one->q.n; i++)
				if (one->run[i].live)
					batch_hold(&v.b, &one->run[i].b, rnd(&x, 2));
			for (uint32_t i = 0; i < 3; i++)
				vengine_step(&v);
			for (uint32_t i = 0; i < one->q.n && one->result == 1; i++)
				if (one->run[i].live)
					CU_ASSERT_EQUAL(batch_unhold(&v.b, &one->run[i].b), 0);
			if (one->result == 1)
				CU_ASSERT_EQUAL(batch_go_on(&v.b, &one->q), 0);
		}
		if (!vengine_step(&v) && sent == m.n && (v.b.n_runs || v.b.waiting || v.b.out)) {
			CU_FAIL("something waits and nothing moves");
			break;
		}
	}
	for (uint32_t i = 0; i < m.n; i++) {
		CU_ASSERT_NOT_EQUAL(m.r[i].result, 1);
		ok += m.r[i].result == 0;
	}
	CU_ASSERT_TRUE(ok > 2000);
	CU_ASSERT_TRUE(v.b.suspended > 50);
	drop(&m);
	finish();
}

/* Flows that nobody names any more are forgotten. */
static void flows_are_forgotten(void)
{
	struct many m = make(1, 1);

	begin(1000);
	for (uint32_t i = 0; i < 5000; i++) {
		memset(m.r, 0, sizeof(*m.r));
		m.r[0].run = m.run;
		m.r[0].q.n = 1;
		put(&m, 0, i, i, 10, 2);
		while (vengine_step(&v))
			;
	}
	CU_ASSERT_TRUE(v.b.fair.n < 10);
	drop(&m);
	finish();
}

static const struct apr_test tests[] = {
	{ "one_beside_a_thousand", one_beside_a_thousand, 0 },
	{ "one_beside_a_full_pool", one_beside_a_full_pool, 0 },
	{ "weights_share_slots_and_tokens", weights_share_slots_and_tokens, 0 },
	{ "prompts_count_as_work", prompts_count_as_work, 0 },
	{ "sessions_of_one_identity_share", sessions_of_one_identity_share, 0 },
	{ "idling_saves_nothing_up", idling_saves_nothing_up, 0 },
	{ "case14_no_stream_misses_a_step", case14_no_stream_misses_a_step, 0 },
	{ "the_chunk_follows_measured_time", the_chunk_follows_measured_time, 0 },
	{ "short_prompts_are_packed", short_prompts_are_packed, 0 },
	{ "a_long_prompt_lets_short_ones_in", a_long_prompt_lets_short_ones_in, 0 },
	{ "case48_background_yields", case48_background_yields, 0 },
	{ "a_higher_class_takes_slots_and_pages", a_higher_class_takes_slots_and_pages, 0 },
	{ "a_deadline_that_cannot_be_met", a_deadline_that_cannot_be_met, 0 },
	{ "the_nearest_deadline_first", the_nearest_deadline_first, 0 },
	{ "case10_never_fits_is_told_at_once", case10_never_fits_is_told_at_once, 0 },
	{ "a_quota_of_pages", a_quota_of_pages, 0 },
	{ "samples_share_their_prompt", samples_share_their_prompt, 0 },
	{ "random_lives", random_lives, 0 },
	{ "flows_are_forgotten", flows_are_forgotten, 0 },
};
TEST_MAIN("daemon/batch", tests)
