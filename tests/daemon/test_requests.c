/* SPDX-License-Identifier: MIT */
/* What requests get from a running aprd: every opcode, limits, ends, stops, sampling values. */
#include "tests/daemon/running.h"
#include <limits.h>
#include <math.h>

static struct daemon d;

static struct apr_sampling ignore_eos(void)
{
	return (struct apr_sampling){ .set = APR_SET_IGNORE_EOS, .ignore_eos = 1 };
}

struct run {
	uint32_t ids[4096];
	float logprobs[4096];
	unsigned n, bad_pos;
	char text[65536];
	size_t len;
	struct apr_result r;
	char err[256];
	int e;
};

static int take(void *arg, const struct apr_token *t)
{
	struct run *g = arg;

	if (t->id != APR_NO_ID && g->n < 4096) {
		g->bad_pos += t->pos != g->n;
		g->logprobs[g->n] = t->logprob;
		g->ids[g->n++] = t->id;
	}
	if (g->len + t->len < sizeof(g->text)) {
		memcpy(g->text + g->len, t->text, t->len);
		g->len += t->len;
	}
	return 0;
}

/* Prompt of `n` ids (i % 250), seed 1, end ids ignored, with an extra parameter list. */
static struct run *generate_n(struct apr *c, uint32_t n, uint32_t max_tokens, const struct apr_params *p,
			      uint32_t flags)
{
	static struct run g;
	uint64_t space[64];
	struct apr_params usual;
	struct apr_sampling s = ignore_eos();
	uint32_t *ids = calloc(n + 1, sizeof(*ids));

	memset(&g, 0, sizeof(g));
	for (uint32_t i = 0; i < n; i++)
		ids[i] = i % 250;
	apr_params_init(&usual, space, sizeof(space));
	apr_params_sampling(&usual, &s);
	struct apr_gen gen = { .size = sizeof(gen),
			       .ids = ids,
			       .n_ids = n,
			       .max_tokens = max_tokens,
			       .has_seed = 1,
			       .seed = 1,
			       .flags = flags,
			       .params = p ? p : &usual };
	g.e = apr_generate(c, &gen, take, &g, &g.r, g.err, sizeof(g.err));
	free(ids);
	return &g;
}

static void nop_and_tokenize(void)
{
	struct apr *c = connect_to(&d);
	char err[200];
	uint64_t ns;
	uint32_t *ids;
	size_t n, len;
	char *text;

	CU_ASSERT_EQUAL(apr_ping(c, 5000000, &ns, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(apr_tokenize(c, 0, "the th", 6, 0, &ids, &n, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(n, 4); /* "th" is the one merge */
	CU_ASSERT_EQUAL(apr_detokenize(c, 0, ids, n, &text, &len, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(len, 6);
	CU_ASSERT_STRING_EQUAL(text, "the th");
	free(ids);
	free(text);
	CU_ASSERT_EQUAL(apr_tokenize(c, 0, "", 0, 0, &ids, &n, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(n, 0);
	free(ids);
	apr_close(c);
}

/* Three NOPs under one tail, after the daemon has slept: idle time is in no figure. */
static void nop_times_hold_no_idle_time(void)
{
	struct hand h;
	struct apr_cqe e[3];
	uint64_t before = 0;

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	for (int round = 0; round < 2; round++) {
		sleep_ms(700);
		for (uint64_t i = 0; i < 3; i++) {
			struct apr_sqe *s = apr_rc_sqe(&h.ring);
			CU_ASSERT_PTR_NOT_NULL_FATAL(s);
			s->user_data = i + 1;
		}
		apr_rc_publish(&h.ring, h.ring.sq_tail);
		if (apr_rc_need_wakeup(&h.ring))
			apr_doorbell_ring(h.doorbell);
		before = 0;
		for (int i = 0; i < 3; i++) {
			CU_ASSERT_EQUAL_FATAL(hand_next(&h, &e[i], 5000), 0);
			CU_ASSERT_TRUE(e[i].u.nop.served_ns > 0 && e[i].u.nop.served_ns < 300000000);
			CU_ASSERT_TRUE(e[i].u.nop.waited_ns >= before && e[i].u.nop.waited_ns < 300000000);
			before = e[i].u.nop.waited_ns;
		}
		CU_ASSERT_TRUE(before > 0); /* the third waited for the two before it */
	}
	hand_close(&h);
}

/* timeout_ms counts from acceptance, not from when the daemon fell asleep. */
static void timeouts_begin_at_acceptance(void)
{
	struct hand h;
	struct apr_sqe s = { .op = APR_OP_TOKENIZE, .user_data = 1, .in_len = 5, .timeout_ms = 400 };

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	s.in_off = h.geo.req_arena_off;
	memcpy((char *)h.req.base + s.in_off, "hello", 5);
	for (int i = 0; i < 2; i++) {
		sleep_ms(600);
		hand_submit(&h, &s);
		CU_ASSERT_EQUAL(hand_finish(&h, 1, NULL, NULL, 5000), 0);
	}
	hand_close(&h);
}

static void long_results_come_in_parts(void)
{
	struct apr *c = connect_to(&d);
	size_t n = 60000, got, len;
	char *text = malloc(n), *back, err[200];
	uint32_t *ids;

	for (size_t i = 0; i < n; i++)
		text[i] = (char)('a' + i % 20);
	CU_ASSERT_EQUAL(apr_tokenize(c, 0, text, n, 0, &ids, &got, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(got, n); /* 240,000 bytes of ids through an arena of 110,000 */
	CU_ASSERT_EQUAL(apr_detokenize(c, 0, ids, 20000, &back, &len, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(len, 20000);
	CU_ASSERT_EQUAL(memcmp(back, text, 20000), 0);
	free(back);
	free(ids);
	free(text);
	apr_close(c);
}

static void case06_invalid_utf8_prompts(void)
{
	static const struct { const char *s; size_t n; } bad[] = { { "\xE2\x80", 2 }, { "\xFF", 1 }, { "\xC0\x80", 2 },
		{ "\xED\xA0\x80", 3 }, { "\xF0\x9F\x98", 3 }, { "a\0b", 3 } };
	struct apr *c = connect_to(&d);
	char err[200], *text;
	uint32_t *ids;
	size_t n, len;

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		CU_ASSERT_EQUAL(apr_tokenize(c, 0, bad[i].s, bad[i].n, 0, &ids, &n, err, sizeof(err)), 0);
		CU_ASSERT_EQUAL(apr_detokenize(c, 0, ids, n, &text, &len, err, sizeof(err)), 0);
		CU_ASSERT_TRUE(len == bad[i].n && !memcmp(text, bad[i].s, len));
		free(ids);
		free(text);
	}
	apr_close(c);
}

static void case01_long_runs_are_linear(void)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c;
	char err[200];
	double t[3];

	o.path = d.sock;
	o.req_size = 1 << 20;
	CU_ASSERT_EQUAL_FATAL(apr_connect(&c, &o, err, sizeof(err)), 0);
	for (int k = 0; k < 3; k++) {
		size_t n = (size_t)65536 << k, got;
		char *text = malloc(n);
		uint32_t *ids;
		memset(text, 'A', n);
		double began = now_s();
		CU_ASSERT_EQUAL(apr_tokenize(c, 0, text, n, 0, &ids, &got, err, sizeof(err)), 0);
		t[k] = now_s() - began;
		CU_ASSERT_EQUAL(got, n);
		free(ids);
		free(text);
	}
	CU_ASSERT_TRUE(t[2] < 0.5 + 12 * (t[0] + 0.001)); /* 4 times the text, with room for noise */
	apr_close(c);
}

static void case02_special_text_stays_text(void)
{
	struct apr *c = connect_to(&d);
	uint32_t *ids;
	size_t n;
	char err[200];

	CU_ASSERT_EQUAL(apr_tokenize(c, 0, "a<|eos|>b", 9, 0, &ids, &n, err, sizeof(err)), 0);
	CU_ASSERT_TRUE(n >= 9);
	free(ids);
	CU_ASSERT_EQUAL(apr_tokenize(c, 0, "a<|eos|>b", 9, APR_SQE_PARSE_SPECIAL, &ids, &n, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(n, 3);
	CU_ASSERT_EQUAL(ids[1], 319);
	free(ids);
	apr_close(c);
}

static void case09_around_the_context(void)
{
	struct apr *c = connect_to(&d);

	/* n_ctx 2048 */
	struct run *g = generate_n(c, 2047, 8, NULL, 0);
	CU_ASSERT_EQUAL(g->e, 0);
	CU_ASSERT_EQUAL(g->r.finish, APR_FINISH_LENGTH);
	CU_ASSERT_TRUE(g->n >= 1 && g->n <= 2);
	CU_ASSERT_EQUAL(g->r.cost.generated, g->n);
	g = generate_n(c, 2048, 8, NULL, 0);
	CU_ASSERT_TRUE(g->e == -E2BIG || (g->e == 0 && g->r.finish == APR_FINISH_LENGTH));
	g = generate_n(c, 2049, 8, NULL, 0);
	CU_ASSERT_EQUAL(g->e, -E2BIG);
	CU_ASSERT_PTR_NOT_NULL(strstr(g->err, "2048"));
	g = generate_n(c, 20000, 8, NULL, 0); /* 40 × does not fit this arena: about 10 × */
	CU_ASSERT_EQUAL(g->e, -E2BIG);
	g = generate_n(c, 2000, UINT32_MAX, NULL, 0); /* to the context's end */
	CU_ASSERT_EQUAL(g->e, 0);
	CU_ASSERT_EQUAL(g->r.finish, APR_FINISH_LENGTH);
	CU_ASSERT_TRUE(g->n >= 48 && g->n <= 49);
	g = generate_n(c, 2000, 1000, NULL, 0);
	CU_ASSERT_EQUAL(g->r.finish, APR_FINISH_LENGTH);
	CU_ASSERT_TRUE(g->n >= 48 && g->n <= 49);
	apr_close(c);
}

static void case15_empty_and_out_of_range(void)
{
	struct apr *c = connect_to(&d);
	struct apr_gen gen = { .size = sizeof(gen), .text = "", .len = 0, .max_tokens = 4 };
	uint32_t bad[] = { 5, 320, 6 }, worse[] = { 5, UINT32_MAX };
	struct apr_result r;
	char err[200];

	CU_ASSERT_EQUAL(apr_generate(c, &gen, NULL, NULL, &r, err, sizeof(err)), -EINVAL);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "empty"));
	gen.flags = APR_SQE_ADD_BOS;
	CU_ASSERT_EQUAL(apr_generate(c, &gen, NULL, NULL, &r, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(r.cost.prompt, 1);
	gen = (struct apr_gen){ .size = sizeof(gen), .ids = bad, .n_ids = 3, .max_tokens = 4 };
	CU_ASSERT_EQUAL(apr_generate(c, &gen, NULL, NULL, &r, err, sizeof(err)), -EINVAL);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "320"));
	gen.ids = worse;
	gen.n_ids = 2;
	CU_ASSERT_EQUAL(apr_generate(c, &gen, NULL, NULL, &r, err, sizeof(err)), -EINVAL);
	apr_close(c);
}

static void case36_exactly_so_many(void)
{
	struct apr *c = connect_to(&d);

	for (int warm = 0; warm < 2; warm++) {
		for (uint32_t n = 0; n < 4; n++) {
			struct run *g = generate_n(c, 70, n, NULL, 0);
			CU_ASSERT_EQUAL(g->e, 0);
			CU_ASSERT_EQUAL(g->n, n);
			CU_ASSERT_EQUAL(g->r.cost.generated, n);
			CU_ASSERT_EQUAL(g->r.cost.prompt, 70);
			CU_ASSERT_EQUAL(g->r.finish, APR_FINISH_LENGTH);
			CU_ASSERT_EQUAL(g->bad_pos, 0);
			if (warm)
				CU_ASSERT_EQUAL(g->r.cost.cached, 64); /* the page below the prompt's end */
		}
	}
	apr_close(c);
}

static void no_stream_gives_the_same_ids(void)
{
	struct apr *c = connect_to(&d);
	struct run a = *generate_n(c, 20, 30, NULL, 0), *b;
	struct apr_sqe *sqe = apr_get_sqe(c);
	const struct apr_cqe *e;
	uint64_t space[16];
	struct apr_params p;
	struct apr_sampling s = ignore_eos();
	uint32_t ids[20];
	unsigned data = 0;

	b = &a;
	for (uint32_t i = 0; i < 20; i++)
		ids[i] = i;
	apr_prep_generate_ids(c, sqe, ids, 20, 30);
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	CU_ASSERT_EQUAL(apr_sqe_params(c, sqe, &p), 0);
	sqe->flags = APR_SQE_NO_STREAM;
	sqe->seed = 1;
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	while (!apr_wait_cqe_timeout(c, &e, 10000000)) {
		size_t n = 0;
		const uint32_t *got = apr_cqe_ids(c, e, &n);
		if (got) {
			data++;
			CU_ASSERT_EQUAL(n, 30);
			CU_ASSERT_EQUAL(memcmp(got, b->ids, n * 4), 0);
		} else {
			CU_ASSERT_EQUAL(e->type, APR_CQE_FINAL);
			CU_ASSERT_EQUAL(e->u.final_.generated, 30);
		}
		int last = apr_cqe_last(e);
		apr_cqe_seen(c, e);
		if (last)
			break;
	}
	CU_ASSERT_EQUAL(data, 1);
	apr_close(c);
}

static void case16_bias(void)
{
	struct apr *c = connect_to(&d);
	uint64_t space[1024];
	struct apr_params p;
	uint32_t ids[320];
	float bias[320];

	uint32_t id = 320;
	float v[] = { 1, INFINITY, NAN, -INFINITY };
	for (int k = 0; k < 4; k++) {
		apr_params_init(&p, space, sizeof(space));
		uint32_t at = k ? 7 : id;
		apr_params_bias(&p, &at, &v[k], 1);
		struct run *g = generate_n(c, 5, 3, &p, 0);
		CU_ASSERT_EQUAL(g->e, k < 3 ? -EINVAL : 0); /* -inf bans and is fine */
	}
	for (uint32_t i = 0; i < 320; i++) {
		ids[i] = i;
		bias[i] = -INFINITY;
	}
	apr_params_init(&p, space, sizeof(space));
	apr_params_bias(&p, ids, bias, 320);
	struct run *g = generate_n(c, 5, 3, &p, 0);
	CU_ASSERT_EQUAL(g->e, -EDOM);
	CU_ASSERT_EQUAL(g->r.finish, APR_FINISH_NUMERIC);
	g = generate_n(c, 5, 3, NULL, 0);
	CU_ASSERT_EQUAL(g->e, 0); /* nobody else noticed */
	apr_close(c);
}

static void case17_sampling_values(void)
{
	static const float temps[] = { 0, 1e-7f, -1, NAN, INFINITY, 1e6f };
	static const int32_t top_ks[] = { 0, -1, 1, 320, INT_MAX };
	static const float top_ps[] = { 0, 1, 1.5f }, min_ps[] = { 0, 1 };
	struct apr *c = connect_to(&d);
	uint32_t greedy[4] = { 0 };
	uint64_t space[32];
	struct apr_params p;

	for (int t = 0; t < 6; t++)
		for (int k = 0; k < 5; k++)
			for (int q = 0; q < 3; q++)
				for (int m = 0; m < 2; m++) {
					struct apr_sampling s = { .set = APR_SET_TEMPERATURE | APR_SET_TOP_K |
									 APR_SET_TOP_P | APR_SET_MIN_P |
									 APR_SET_IGNORE_EOS,
								  .temperature = temps[t],
								  .top_k = top_ks[k],
								  .top_p = top_ps[q],
								  .min_p = min_ps[m],
								  .ignore_eos = 1 };
					int ok = t != 2 && t != 3 && t != 4 && q != 2;
					apr_params_init(&p, space, sizeof(space));
					apr_params_sampling(&p, &s);
					struct run *g = generate_n(c, 9, 4, &p, 0);
					CU_ASSERT_EQUAL(g->e, ok ? 0 : -EINVAL);
					CU_ASSERT_EQUAL(g->n, ok ? 4 : 0);
					if (ok && t == 0 && !greedy[0] && !greedy[1])
						memcpy(greedy, g->ids, sizeof(greedy));
					/* each of these keeps the best alone */
					if (ok && (t == 0 || top_ks[k] == 1 || q == 0 || m == 1))
						CU_ASSERT_EQUAL(memcmp(greedy, g->ids, sizeof(greedy)), 0);
				}
	apr_close(c);
}

static void case17_same_seed_same_text(void)
{
	struct apr *c = connect_to(&d), *load = connect_to(&d);
	struct run first = *generate_n(c, 30, 24, NULL, 0);

	/* others run beside it half of the time */
	for (int i = 0; i < 20; i++) {
		if (i == 10)
			for (int k = 0; k < 4; k++) {
				struct apr_sqe *sqe = apr_get_sqe(load);
				apr_prep_generate(load, sqe, "load beside it", 14, 200);
				sqe->user_data = (uint64_t)k + 1;
				apr_submit(load);
			}
		struct run *g = generate_n(c, 30, 24, NULL, 0);
		CU_ASSERT_EQUAL(g->n, first.n);
		CU_ASSERT_EQUAL(memcmp(g->ids, first.ids, first.n * 4), 0);
		CU_ASSERT_EQUAL(memcmp(g->logprobs, first.logprobs, first.n * 4), 0);
	}
	apr_close(load);
	apr_close(c);
}

static void case33_settings_do_not_stick(void)
{
	struct apr *c = connect_to(&d);
	struct run alone = *generate_n(c, 30, 16, NULL, 0);
	uint64_t space[64];
	struct apr_params p;
	struct apr_sampling s = { .set = APR_SET_TEMPERATURE | APR_SET_REPEAT | APR_SET_FREQUENCY, .temperature = 3,
				  .repeat_penalty = 1.9f, .frequency_penalty = 2 };
	uint32_t id = 40, stop = alone.ids[2];
	float b = -50;

	for (int k = 0; k < 4; k++) {
		apr_params_init(&p, space, sizeof(space));
		if (k == 0)
			apr_params_sampling(&p, &s);
		else if (k == 1)
			apr_params_bias(&p, &id, &b, 1);
		else if (k == 2)
			apr_params_stop_ids(&p, &stop, 1);
		else
			id = 9999, apr_params_bias(&p, &id, &b, 1); /* a failed one */
		generate_n(c, 30, 16, &p, 0);
		struct run *g = generate_n(c, 30, 16, NULL, 0);
		CU_ASSERT_TRUE(g->n == alone.n && !memcmp(g->ids, alone.ids, alone.n * 4) &&
			       !memcmp(g->logprobs, alone.logprobs, alone.n * 4));
	}
	apr_close(c);
}

static void stop_id_and_stop_string(void)
{
	struct apr *c = connect_to(&d);
	struct run alone = *generate_n(c, 40, 40, NULL, 0);
	uint64_t space[64];
	struct apr_params p;
	struct apr_sampling s = ignore_eos();
	uint32_t stop = alone.ids[10];
	unsigned first = 0;

	while (alone.ids[first] != stop)
		first++;
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	apr_params_stop_ids(&p, &stop, 1);
	struct run *g = generate_n(c, 40, 40, &p, 0);
	CU_ASSERT_EQUAL(g->e, 0);
	CU_ASSERT_EQUAL(g->n, first); /* the stop id itself is not delivered */
	CU_ASSERT_EQUAL(g->r.finish, APR_FINISH_STOP);
	CU_ASSERT_EQUAL(g->r.cost.generated, first);
	apr_close(c);
}

static void score_positions(void)
{
	struct apr *c = connect_to(&d);
	struct apr_sqe *sqe = apr_get_sqe(c);
	const struct apr_cqe *e;
	uint64_t space[8];
	struct apr_params p;
	uint32_t ids[1500], seen = 0;

	for (uint32_t i = 0; i < 1500; i++)
		ids[i] = i * 7 % 300;
	apr_prep_score(c, sqe, ids, 1500);
	apr_params_init(&p, space, sizeof(space));
	apr_params_logprobs(&p, 3);
	apr_sqe_params(c, sqe, &p);
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	while (!apr_wait_cqe_timeout(c, &e, 20000000)) {
		size_t len = 0, pos = 0;
		const void *scores = apr_cqe_blob(c, e, APR_BLOB_SCORES, &len);
		const struct apr_score *sc;
		while (scores && (sc = apr_score_next(scores, len, &pos))) {
			seen++;
			CU_ASSERT_EQUAL(sc->pos, seen);
			CU_ASSERT_EQUAL(sc->id, ids[seen]);
			CU_ASSERT_EQUAL(sc->k, 3);
			CU_ASSERT_TRUE(apr_score_top(sc)[0].logprob >= apr_score_top(sc)[1].logprob);
		}
		int last = apr_cqe_last(e);
		if (last)
			CU_ASSERT_EQUAL(e->res, 0);
		apr_cqe_seen(c, e);
		if (last)
			break;
	}
	CU_ASSERT_EQUAL(seen, 1499); /* 60 kB in blobs of 27 */
	apr_close(c);
}

static void sixty_four_samples(const struct daemon *at)
{
	struct apr *c = connect_to(at);
	struct apr_sqe *sqe = apr_get_sqe(c);
	const struct apr_cqe *e;
	unsigned tokens[100] = { 0 }, ends = 0, differ = 0;
	uint32_t first[100] = { 0 };
	uint64_t space[16];
	struct apr_params p;
	struct apr_sampling s = ignore_eos();

	apr_prep_generate(c, sqe, "many", 4, 12);
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	apr_sqe_params(c, sqe, &p);
	sqe->n = 64;
	sqe->seed = 3;
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	for (;;) {
		CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &e, 20000000), 0);
		if (e->type == APR_CQE_TOKEN) {
			if (!tokens[e->sample]++)
				first[e->sample] = (uint32_t)e->res;
		} else if (e->type == APR_CQE_SAMPLE_END) {
			ends++;
			CU_ASSERT_EQUAL(tokens[e->sample], 12);
			CU_ASSERT_EQUAL(APR_AUX_REASON(e->aux), APR_FINISH_LENGTH);
		}
		int last = apr_cqe_last(e);
		if (last) {
			CU_ASSERT_EQUAL(e->res, 0);
			CU_ASSERT_EQUAL(e->u.final_.generated, 64 * 12);
		}
		apr_cqe_seen(c, e);
		if (last)
			break;
	}
	CU_ASSERT_EQUAL(ends, 64);
	for (int i = 1; i < 64; i++)
		differ += first[i] != first[0];
	CU_ASSERT_TRUE(differ > 0);
	apr_close(c);
}

static void several_samples(void)
{
	sixty_four_samples(&d);
}

/* More samples than pages, all beginning in one step: they take turns, and none is told that it never fits. */
static void case10_samples_above_the_pool(void)
{
	struct daemon small = { 0 };

	daemon_name(&small, "few-pages");
	if (!daemon_start(&small, NULL, "-c", "640", "--kv-mem", "160K", NULL))
		return;
	CU_ASSERT_TRUE(status_number(&small, "kv.pages_total") < 24);
	sixty_four_samples(&small);
	CU_ASSERT_TRUE(status_becomes(&small, "running", 0));
	CU_ASSERT_TRUE(status_becomes(&small, "kv.pages_free", status_number(&small, "kv.pages_total")));
	CU_ASSERT_EQUAL(daemon_stop(&small), 0);
}

static void cancel_and_timeout(void)
{
	struct hand h;
	struct apr_cqe last = { 0 };
	struct apr_sqe gen = {
		.op = APR_OP_GENERATE, .user_data = 1, .in_len = 8, .in_fmt = APR_IN_TEXT, .max_tokens = UINT32_MAX
	};
	struct apr_sqe cancel = { .op = APR_OP_CANCEL, .user_data = 2, .arg = 1 };

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	gen.in_off = h.geo.req_arena_off;
	memcpy((char *)h.req.base + gen.in_off, "go on...", 8);
	hand_write(&h, &gen); /* both at once, or it may have ended before */
	hand_submit(&h, &cancel);
	CU_ASSERT_EQUAL(hand_finish(&h, 1, &last, NULL, 5000), -ECANCELED);
	CU_ASSERT_EQUAL(APR_AUX_REASON(last.aux), APR_FINISH_CANCELLED);
	CU_ASSERT_EQUAL(hand_finish(&h, 2, NULL, NULL, 5000), 0); /* after the target's FINAL */
	cancel.arg = 99;
	hand_submit(&h, &cancel);
	CU_ASSERT_EQUAL(hand_finish(&h, 2, NULL, NULL, 5000), -ENOENT);
	hand_submit(&h, &gen);
	gen.user_data = 1;
	hand_submit(&h, &gen); /* a duplicate in flight */
	int dup = 0;
	while (!dup) {
		struct apr_cqe e;
		CU_ASSERT_EQUAL_FATAL(hand_next(&h, &e, 5000), 0);
		if (e.type == APR_CQE_FINAL)
			dup = e.res;
	}
	CU_ASSERT_TRUE(dup == -EEXIST || dup == 0); /* 0: the first had ended by an end id */
	struct apr_frame all = { APR_FRAME_MAGIC, APR_FRAME_CANCEL_ALL, 0, sizeof(all), 0 };
	CU_ASSERT_EQUAL(send(h.sock, &all, sizeof(all), 0), (ssize_t)sizeof(all));
	hand_close(&h);
	CU_ASSERT_TRUE(status_becomes(&d, "running", 0));

	struct apr *c = connect_to(&d);
	struct apr_sqe *sqe = apr_get_sqe(c);
	const struct apr_cqe *e;
	uint64_t space[16];
	struct apr_params p;
	struct apr_sampling s = ignore_eos();
	double began = now_s();
	apr_prep_generate(c, sqe, "slow", 4, UINT32_MAX);
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	apr_sqe_params(c, sqe, &p);
	sqe->timeout_ms = 30;
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	for (;;) {
		CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &e, 20000000), 0);
		int end = apr_cqe_last(e), res = e->res;
		unsigned reason = APR_AUX_REASON(e->aux);
		apr_cqe_seen(c, e);
		if (end) {
			CU_ASSERT_EQUAL(res, -ETIMEDOUT);
			CU_ASSERT_EQUAL(reason, APR_FINISH_TIMEOUT);
			break;
		}
	}
	CU_ASSERT_TRUE(now_s() - began >= 0.03 && now_s() - began < 2);
	apr_close(c);
}

static void case47_tokens_come_one_by_one(void)
{
	struct apr *c = connect_to(&d);
	struct apr_sqe *sqe = apr_get_sqe(c);
	const struct apr_cqe *e;
	uint64_t space[16];
	struct apr_params p;
	struct apr_sampling s = ignore_eos();
	unsigned n = 0, bursts = 0;

	apr_prep_generate(c, sqe, "stream", 6, 300);
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	apr_sqe_params(c, sqe, &p);
	apr_submit(c);
	for (;;) {
		CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &e, 20000000), 0);
		n++;
		int last = apr_cqe_last(e);
		apr_cqe_seen(c, e);
		if (last)
			break;
		bursts += apr_cqe_at(c, 8) != NULL; /* more than a few wait at once */
	}
	CU_ASSERT_TRUE(n > 290);
	CU_ASSERT_TRUE(bursts < n / 2);
	apr_close(c);
}

static void unbuilt_is_refused(void)
{
	static const uint8_t ops[] = { APR_OP_EMBED, 9, 127, 128, 255 };
	struct hand h;

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	for (size_t i = 0; i < sizeof(ops); i++) {
		struct apr_sqe s = { .op = ops[i], .user_data = i, .in_off = h.geo.req_arena_off };
		hand_submit(&h, &s);
		int res = hand_finish(&h, i, NULL, NULL, 5000);
		CU_ASSERT_TRUE(res == -EOPNOTSUPP || (ops[i] >= APR_OP_LIMIT && res == -EINVAL));
		CU_ASSERT_EQUAL(h.welcome.opcodes[ops[i] / 64 % 2] >> ops[i] % 64 & (ops[i] < 128), 0);
	}
	struct apr_sqe s = { .op = APR_OP_NOP, .user_data = 1, .model = 77 };
	s.op = APR_OP_TOKENIZE;
	s.in_off = h.geo.req_arena_off;
	hand_submit(&h, &s);
	CU_ASSERT_EQUAL(hand_finish(&h, 1, NULL, NULL, 5000), -ENOENT);
	hand_close(&h);
}

static void daemon_up(void)
{
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "requests", NULL));
}

static void daemon_down(void)
{
	CU_ASSERT_TRUE(status_becomes(&d, "running", 0));
	CU_ASSERT_TRUE(status_becomes(&d, "queued", 0));
	CU_ASSERT_TRUE(status_becomes(&d, "kv.pages_free", status_number(&d, "kv.pages_total")));
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static const struct apr_test tests[] = {
	{ "daemon_up", daemon_up, KEEPS_HEAP }, /* the log's path and the like are made once */
	{ "nop_and_tokenize", nop_and_tokenize, 0 },
	{ "nop_times_hold_no_idle_time", nop_times_hold_no_idle_time, 0 },
	{ "timeouts_begin_at_acceptance", timeouts_begin_at_acceptance, 0 },
	{ "long_results_come_in_parts", long_results_come_in_parts, 0 },
	{ "case01_long_runs_are_linear", case01_long_runs_are_linear, 0 },
	{ "case02_special_text_stays_text", case02_special_text_stays_text, 0 },
	{ "case06_invalid_utf8_prompts", case06_invalid_utf8_prompts, 0 },
	{ "case09_around_the_context", case09_around_the_context, 0 },
	{ "case15_empty_and_out_of_range", case15_empty_and_out_of_range, 0 },
	{ "case16_bias", case16_bias, 0 },
	{ "case17_sampling_values", case17_sampling_values, 0 },
	{ "case17_same_seed_same_text", case17_same_seed_same_text, 0 },
	{ "case33_settings_do_not_stick", case33_settings_do_not_stick, 0 },
	{ "case36_exactly_so_many", case36_exactly_so_many, 0 },
	{ "case47_tokens_come_one_by_one", case47_tokens_come_one_by_one, 0 },
	{ "no_stream_gives_the_same_ids", no_stream_gives_the_same_ids, 0 },
	{ "stop_id_and_stop_string", stop_id_and_stop_string, 0 },
	{ "score_positions", score_positions, 0 },
	{ "several_samples", several_samples, 0 },
	{ "case10_samples_above_the_pool", case10_samples_above_the_pool, 0 },
	{ "cancel_and_timeout", cancel_and_timeout, 0 },
	{ "unbuilt_is_refused", unbuilt_is_refused, 0 },
	{ "daemon_down", daemon_down, KEEPS_HEAP },
};

TEST_MAIN("daemon/requests", tests)
