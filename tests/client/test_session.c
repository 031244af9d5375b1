/* SPDX-License-Identifier: MIT */
/* A session from connect to close against the fake daemon: every call of the library, one test a promise. */
#include "client/fake/fake.h"
#include "tests/harness.h"
#include <apr/client.h>
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char path[128];
static __thread char err[256]; /* threads connect too */

static struct fake *start(const char *script)
{
	struct fake_opts o = { .path = path, .script = script };
	struct fake *f = NULL;

	snprintf(path, sizeof(path), "%s/aprd.sock", apr_test_tmpdir());
	int e = fake_start(&f, &o, err, sizeof(err));
	if (e)
		fprintf(stderr, "fake: %d %s\n", e, err);
	CU_ASSERT_EQUAL_FATAL(e, 0);
	return f;
}

static struct apr *join(uint32_t flags)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c = NULL;

	o.path = path;
	o.flags = flags;
	int e = apr_connect(&c, &o, err, sizeof(err));
	if (e)
		fprintf(stderr, "connect: %d %s\n", e, err);
	CU_ASSERT_EQUAL_FATAL(e, 0);
	return c;
}

static const struct apr_cqe *next(struct apr *c)
{
	const struct apr_cqe *q = NULL;
	int e = apr_wait_cqe_timeout(c, &q, 5000000);
	if (e)
		fprintf(stderr, "wait: %d %s\n", e, apr_why(c));
	CU_ASSERT_EQUAL_FATAL(e, 0);
	return q;
}

static uint64_t now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000;
}

static void nop_there_and_back(void)
{
	struct fake *f = start(NULL);
	struct apr *c = join(0);

	for (uint64_t i = 1; i <= 1000; i++) {
		struct apr_sqe *s = apr_get_sqe(c);
		CU_ASSERT_PTR_NOT_NULL_FATAL(s);
		apr_prep_nop(s);
		apr_sqe_user_data(s, i);
		CU_ASSERT_EQUAL(apr_submit(c), 1);
		CU_ASSERT_EQUAL(apr_unfinished(c), 1);
		const struct apr_cqe *q = next(c);
		CU_ASSERT_EQUAL(q->user_data, i);
		CU_ASSERT_EQUAL(q->type, APR_CQE_ACK);
		CU_ASSERT_EQUAL(q->res, 0);
		CU_ASSERT(apr_cqe_last(q));
		apr_cqe_seen(c, q);
		CU_ASSERT_EQUAL(apr_unfinished(c), 0);
	}
	const struct apr_cqe *q;
	CU_ASSERT_EQUAL(apr_peek_cqe(c, &q), -EAGAIN);
	uint64_t ns;
	CU_ASSERT_EQUAL(apr_ping(c, 1000000, &ns, err, sizeof(err)), 0);
	CU_ASSERT(ns > 0);
	apr_close(c);
	fake_end(f);
}

struct heard {
	char text[4096];
	size_t len, tokens;
	uint32_t stop_after;
};

static int hear(void *arg, const struct apr_token *t)
{
	struct heard *h = arg;

	memcpy(h->text + h->len, t->text, t->len);
	h->len += t->len;
	h->text[h->len] = '\0';
	if (t->id != APR_NO_ID)
		h->tokens++;
	return h->stop_after && h->tokens >= h->stop_after;
}

static void generate_streams_the_script(void)
{
	struct fake *f = start("{\"answers\":[{\"match\":\"hi\",\"steps\":[\"a\",\"b\",\"c\"]}]}");
	struct apr *c = join(0);
	struct heard h = { .len = 0 };
	struct apr_gen g = { .size = sizeof(g), .text = "hi there", .len = 8, .max_tokens = 10 };
	struct apr_result r;

	CU_ASSERT_EQUAL(apr_generate(c, &g, hear, &h, &r, err, sizeof(err)), 0);
	CU_ASSERT_STRING_EQUAL(h.text, "abc");
	CU_ASSERT_EQUAL(h.tokens, r.cost.generated);
	CU_ASSERT_EQUAL(r.finish, APR_FINISH_STOP);
	CU_ASSERT_EQUAL(r.backend, APR_BACKEND_FAKE);
	CU_ASSERT_NOT_EQUAL(r.seed, 0);
	uint64_t seed = r.seed;
	memset(&h, 0, sizeof(h));
	CU_ASSERT_EQUAL(apr_generate(c, &g, hear, &h, &r, err, sizeof(err)), 0);
	CU_ASSERT_NOT_EQUAL(r.seed, seed);
	g.has_seed = 1;
	g.seed = 7;
	memset(&h, 0, sizeof(h));
	CU_ASSERT_EQUAL(apr_generate(c, &g, hear, &h, &r, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(r.seed, 7);
	apr_close(c);
	fake_end(f);
}

static void callback_ends_a_request(void)
{
	struct fake *f = start("{\"token_ms\":1,\"answers\":[{\"steps\":[{\"text\":\"x\",\"repeat\":1000}]}]}");
	struct apr *c = join(0);
	struct heard h = { .stop_after = 5 };
	struct apr_gen g = { .size = sizeof(g), .text = "go", .len = 2, .max_tokens = 1000 };
	struct apr_result r;
	uint64_t ns;

	CU_ASSERT_EQUAL(apr_generate(c, &g, hear, &h, &r, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(r.finish, APR_FINISH_CANCELLED);
	CU_ASSERT_EQUAL(h.tokens, 5);
	/* nothing of it is left for the next call */
	CU_ASSERT_EQUAL(apr_unfinished(c), 0);
	CU_ASSERT_EQUAL(apr_ping(c, 1000000, &ns, err, sizeof(err)), 0);
	apr_close(c);
	fake_end(f);
}

static void refusals_name_the_culprit(void)
{
	struct fake *f = start("{\"answers\":[{\"steps\":[\"a\",{\"error\":\"EIO\",\"why\":\"the lamp went out\"}]}]}");
	struct apr *c = join(0);
	struct heard h = { .len = 0 };
	struct apr_gen g = { .size = sizeof(g), .text = "go", .len = 2, .max_tokens = 10 };
	struct apr_result r;

	CU_ASSERT_EQUAL(apr_generate(c, &g, hear, &h, &r, err, sizeof(err)), -EIO);
	CU_ASSERT_STRING_EQUAL(err, "the lamp went out");

	struct apr_sqe *s = apr_get_sqe(c);
	s->op = 255;
	s->user_data = 9;
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	const struct apr_cqe *q = next(c);
	CU_ASSERT_EQUAL(q->res, -EINVAL);
	CU_ASSERT_EQUAL(q->pos, 0);
	apr_cqe_seen(c, q);
	CU_ASSERT_EQUAL(apr_unfinished(c), 0);

	s = apr_get_sqe(c);
	apr_prep_nop(s);
	s->zero = 1;
	s->user_data = 10;
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	q = next(c);
	CU_ASSERT_EQUAL(q->res, -EINVAL);
	CU_ASSERT_EQUAL(q->pos, offsetof(struct apr_sqe, zero));
	apr_cqe_seen(c, q);
	apr_close(c);
	fake_end(f);
}

static void tokenize_and_back(void)
{
	struct fake *f = start(NULL);
	struct apr *c = join(0);
	char text[9000], *back;
	uint32_t *ids;
	size_t n, len;

	for (size_t i = 0; i < sizeof(text); i++)
		text[i] = (char)('a' + i % 26);
	CU_ASSERT_EQUAL_FATAL(apr_tokenize(c, 0, text, sizeof(text), 0, &ids, &n, err, sizeof(err)), 0);
	CU_ASSERT(n > 0 && n <= sizeof(text));
	CU_ASSERT_EQUAL_FATAL(apr_detokenize(c, 0, ids, n, &back, &len, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(len, sizeof(text));
	CU_ASSERT(!memcmp(back, text, len));
	free(ids);
	free(back);
	CU_ASSERT_EQUAL_FATAL(apr_tokenize(c, 0, "", 0, 0, &ids, &n, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(n, 0);
	free(ids);
	apr_close(c);
	fake_end(f);
}

static int count_score(void *arg, const struct apr_score *s, const struct apr_top *top)
{
	size_t *n = arg;
	CU_ASSERT_EQUAL(s->pos, *n + 1);
	CU_ASSERT(s->k == 0 || top != NULL);
	++*n;
	return 0;
}

static void score_walks_every_position(void)
{
	struct fake *f = start(NULL);
	struct apr *c = join(0);
	uint32_t ids[500];
	struct apr_result r;
	size_t n = 0;

	for (uint32_t i = 0; i < 500; i++)
		ids[i] = 97 + i % 20;
	CU_ASSERT_EQUAL(apr_score_ids(c, 0, ids, 500, 3, 0, count_score, &n, &r, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(n, 499);
	apr_close(c);
	fake_end(f);
}

static void models_vocab_status(void)
{
	struct fake *f = start("{\"model\":{\"name\":\"toy\"}}");
	struct apr *c = join(0);
	struct apr_model_row *rows;
	struct apr_vocab *v;
	size_t n, len;
	unsigned kind;
	uint32_t id;
	char *json;

	CU_ASSERT_EQUAL_FATAL(apr_get_models(c, &rows, &n), 0);
	CU_ASSERT_EQUAL_FATAL(n, 1);
	CU_ASSERT_STRING_EQUAL(rows[0].name, "toy");
	CU_ASSERT_EQUAL(apr_find_model(c, "toy", &id), 0);
	CU_ASSERT_EQUAL(id, rows[0].id);
	CU_ASSERT_EQUAL(apr_find_model(c, "none", &id), -ENOENT);
	CU_ASSERT_EQUAL_FATAL(apr_get_vocab(c, rows[0].id, &v), 0);
	CU_ASSERT_EQUAL(apr_vocab_size(v), rows[0].n_vocab);
	CU_ASSERT_PTR_NOT_NULL(apr_vocab_piece(v, 0, &len, &kind));
	CU_ASSERT_PTR_NULL(apr_vocab_piece(v, rows[0].n_vocab, &len, &kind));
	apr_vocab_free(v);
	CU_ASSERT_EQUAL(apr_get_vocab(c, 4711, &v) < 0, 1);
	free(rows);
	CU_ASSERT_EQUAL_FATAL(apr_status(c, &json), 0);
	CU_ASSERT_EQUAL(json[0], '{');
	free(json);
	apr_close(c);
	fake_end(f);
}

static void admin_calls(void)
{
	struct fake *f = start(NULL);
	char admin[160], *reply = NULL;
	struct apr_admin *a = NULL;

	CU_ASSERT(apr_admin_path(path, admin, sizeof(admin)) > 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(admin, "/admin.sock"));
	CU_ASSERT_EQUAL_FATAL(apr_admin_open(&a, admin, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(apr_admin_call(a, APR_FRAME_STATUS, NULL, &reply, 2000, err, sizeof(err)), 0);
	CU_ASSERT(reply && reply[0] == '{');
	free(reply);
	CU_ASSERT(apr_admin_call(a, APR_FRAME_UNLOAD, "{\"name\":\"no such\"}", NULL, 2000, err, sizeof(err)) < 0);
	CU_ASSERT(strlen(err) > 0);
	apr_admin_close(a);
	CU_ASSERT_EQUAL(apr_admin_path("/x/other", admin, sizeof(admin)), 14);
	CU_ASSERT_STRING_EQUAL(admin, "/x/other.admin");
	CU_ASSERT_EQUAL(apr_admin_path("/x/other", admin, 5), -ENAMETOOLONG);
	fake_end(f);
}

static void input_above_max_is_refused_before_submitting(void)
{
	struct fake *f = start(NULL);
	struct apr *c = join(0);
	size_t n = apr_info(c)->max_input;
	char *big = calloc(1, n + 1);
	int e = 0;

	struct apr_sqe *s = apr_get_sqe(c);
	CU_ASSERT_EQUAL(apr_prep_generate(c, s, big, n + 1, 1), -E2BIG);
	CU_ASSERT_EQUAL(s->op, APR_OP_NOP);
	CU_ASSERT_EQUAL(apr_prep_generate_ids(c, s, (uint32_t *)(void *)big, SIZE_MAX / 2, 1), -E2BIG);
	CU_ASSERT_EQUAL(apr_prep_tokenize(c, s, big, n), 0);
	/* the arena is full until the daemon took the entry */
	CU_ASSERT_PTR_NULL(apr_sqe_input(c, s, 8, &e));
	CU_ASSERT_EQUAL(e, -ENOBUFS);
	free(big);
	apr_close(c);
	fake_end(f);
}

static void credits_are_never_exceeded(void)
{
	struct fake *f = start("{\"answers\":[{\"steps\":[{\"stall\":true}]}]}");
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c;
	uint32_t got = 0;

	o.path = path;
	o.sq_entries = 64;
	o.cq_entries = 16;
	CU_ASSERT_EQUAL_FATAL(apr_connect(&c, &o, err, sizeof(err)), 0);
	uint32_t most = apr_info(c)->max_inflight;
	CU_ASSERT(most <= 8);
	for (uint32_t i = 0; i < most + 4; i++) {
		struct apr_sqe *s = apr_get_sqe(c);
		CU_ASSERT_EQUAL_FATAL(apr_prep_generate(c, s, "x", 1, 10), 0);
		apr_sqe_user_data(s, 100 + i);
	}
	CU_ASSERT_EQUAL(apr_submit(c), (int)most);
	CU_ASSERT_EQUAL(apr_submit(c), -EBUSY);
	CU_ASSERT_EQUAL(apr_unfinished(c), most);
	/* a CANCEL goes ahead of what is held back; a second one waits for the first */
	CU_ASSERT_EQUAL(apr_cancel(c, 100, 7), 0);
	CU_ASSERT_EQUAL(apr_cancel(c, 101, 8), -EBUSY);
	const struct apr_cqe *q = next(c);
	CU_ASSERT_EQUAL(q->user_data, 100);
	CU_ASSERT_EQUAL(q->res, -ECANCELED);
	apr_cqe_seen(c, q);
	q = next(c);
	CU_ASSERT_EQUAL(q->user_data, 7);
	CU_ASSERT_EQUAL(q->type, APR_CQE_ACK);
	CU_ASSERT_EQUAL(q->res, 0);
	apr_cqe_seen(c, q);
	CU_ASSERT_EQUAL(apr_cancel(c, 4711, 9), 0);
	q = next(c);
	CU_ASSERT_EQUAL(q->user_data, 9);
	CU_ASSERT_EQUAL(q->res, -ENOENT);
	apr_cqe_seen(c, q);
	/* one credit came back */
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	CU_ASSERT_EQUAL(apr_submit(c), -EBUSY);
	/* an entry that may be half prepared is not moved */
	CU_ASSERT_PTR_NOT_NULL(apr_get_sqe(c));
	CU_ASSERT_EQUAL(apr_cancel(c, 102, 9), -EBUSY);
	usleep(20000); /* CANCEL_ALL may overtake what was only just submitted: let it be taken */
	CU_ASSERT_EQUAL(apr_cancel_all(c), 0);
	while (got < most) {
		q = next(c);
		CU_ASSERT_EQUAL(q->res, -ECANCELED);
		got += (uint32_t)apr_cqe_last(q);
		apr_cqe_seen(c, q);
	}
	apr_close(c);
	fake_end(f);
}

static void many_in_flight_in_a_small_ring(void)
{
	struct fake *f = start("{\"answers\":[{\"steps\":[{\"text\":\"y\",\"repeat\":30}]}]}");
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c;
	uint32_t tokens[200] = { 0 }, finals = 0, sent = 0;

	o.path = path;
	o.cq_entries = 16;
	o.req_size = 16384;
	CU_ASSERT_EQUAL_FATAL(apr_connect(&c, &o, err, sizeof(err)), 0);
	while (finals < 200) {
		struct apr_sqe *s;
		while (sent < 200 && apr_unfinished(c) < 6 && (s = apr_get_sqe(c))) {
			CU_ASSERT_EQUAL_FATAL(apr_prep_generate(c, s, "some words to fill an arena with", 32, 64), 0);
			apr_sqe_user_data(s, sent++);
			CU_ASSERT_EQUAL_FATAL(apr_submit(c), 1);
		}
		const struct apr_cqe *q = next(c);
		CU_ASSERT_FATAL(q->user_data < 200);
		if (q->type == APR_CQE_TOKEN) {
			CU_ASSERT_EQUAL(q->pos, tokens[q->user_data]);
			tokens[q->user_data]++;
		}
		if (apr_cqe_last(q)) {
			CU_ASSERT_EQUAL(q->res, 0);
			CU_ASSERT_EQUAL(q->u.final_.generated, tokens[q->user_data]);
			finals++;
		}
		apr_cqe_seen(c, q);
	}
	apr_close(c);
	fake_end(f);
}

static void timeouts_hold(void)
{
	struct fake *f = start(NULL);
	struct apr *c = join(0);
	const struct apr_cqe *q;

	uint64_t t = now_us();
	CU_ASSERT_EQUAL(apr_wait_cqe_timeout(c, &q, 30000), -ETIMEDOUT);
	t = now_us() - t;
	CU_ASSERT(t >= 30000 && t < 500000);
	t = now_us();
	CU_ASSERT_EQUAL(apr_wait_cqe_timeout(c, &q, 250000), -ETIMEDOUT); /* over slices */
	t = now_us() - t;
	CU_ASSERT(t >= 250000 && t < 900000);
	CU_ASSERT_EQUAL(apr_wait_cqe_timeout(c, &q, 0), -EAGAIN);
	CU_ASSERT_EQUAL(apr_wait_cqes(c, 1u << 20, 0), -EINVAL);
	apr_close(c);
	fake_end(f);
}

static void wait_for_several_wakes_once(void)
{
	struct fake *f = start("{\"token_ms\":5,\"answers\":[{\"steps\":[{\"text\":\"z\",\"repeat\":8}]}]}");
	struct apr *c = join(0);

	struct apr_sqe *s = apr_get_sqe(c);
	CU_ASSERT_EQUAL(apr_prep_generate(c, s, "x", 1, 100), 0);
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	CU_ASSERT_EQUAL(apr_wait_cqes(c, 9, 5000000), 9);
	CU_ASSERT_EQUAL(apr_cqe_at(c, 8)->type, APR_CQE_FINAL);
	CU_ASSERT_PTR_NULL(apr_cqe_at(c, 9));
	for (int i = 0; i < 9; i++)
		apr_cqe_seen(c, apr_cqe_at(c, 0));
	apr_close(c);
	fake_end(f);
}

static void event_loop_on_the_socket(void)
{
	struct fake *f = start("{\"token_ms\":3,\"answers\":[{\"steps\":[{\"text\":\"z\",\"repeat\":10}]}]}");
	struct apr *c = join(0);
	const struct apr_cqe *q;
	int tokens = 0, polls = 0;
	bool done = false;

	struct apr_sqe *s = apr_get_sqe(c);
	CU_ASSERT_EQUAL(apr_prep_generate(c, s, "x", 1, 100), 0);
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	while (!done) {
		int armed = apr_arm(c);
		CU_ASSERT_FATAL(armed >= 0);
		if (!armed) {
			struct pollfd p = { apr_fd(c), POLLIN, 0 };
			CU_ASSERT_EQUAL_FATAL(poll(&p, 1, 5000), 1);
			polls++;
			CU_ASSERT(apr_poll(c) >= 0);
		}
		while (!apr_peek_cqe(c, &q)) {
			tokens += q->type == APR_CQE_TOKEN;
			done |= apr_cqe_last(q);
			apr_cqe_seen(c, q);
		}
	}
	CU_ASSERT_EQUAL(tokens, 10);
	CU_ASSERT(polls >= 2);
	apr_close(c);
	fake_end(f);
}

static void socket_mode_and_ring_always(void)
{
	struct fake *f = start("{\"token_ms\":2,\"answers\":[{\"steps\":[{\"text\":\"z\",\"repeat\":10}]}]}");

	for (int always = 0; always < 2; always++) {
		struct apr_opts o = APR_OPTS_INIT;
		struct heard h = { .len = 0 };
		struct apr_gen g = { .size = sizeof(g), .text = "go", .len = 2, .max_tokens = 100 };
		struct apr_result r;
		struct apr *c;
		o.path = path;
		o.wait = APR_WAIT_SOCKET;
		o.flags = always ? APR_CONNECT_RING_ALWAYS : 0;
		CU_ASSERT_EQUAL_FATAL(apr_connect(&c, &o, err, sizeof(err)), 0);
		for (int i = 0; i < 5; i++) {
			memset(&h, 0, sizeof(h));
			CU_ASSERT_EQUAL(apr_generate(c, &g, hear, &h, &r, err, sizeof(err)), 0);
			CU_ASSERT_EQUAL(h.tokens, 10);
		}
		apr_close(c);
	}
	fake_end(f);
}

static void case47_gaps_follow_the_steps(void)
{
	struct fake *f = start("{\"token_ms\":20,\"answers\":[{\"steps\":[{\"text\":\"s\",\"repeat\":8}]}]}");
	struct apr *c = join(0);
	uint64_t first = 0, last = 0;

	struct apr_sqe *s = apr_get_sqe(c);
	CU_ASSERT_EQUAL(apr_prep_generate(c, s, "x", 1, 100), 0);
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	for (int i = 0; i < 8; i++) {
		const struct apr_cqe *q = next(c);
		CU_ASSERT_EQUAL(q->type, APR_CQE_TOKEN);
		apr_cqe_seen(c, q);
		last = now_us();
		if (!i)
			first = last;
	}
	/* seven gaps of 20 ms: a burst at the end would have none */
	CU_ASSERT(last - first >= 7 * 15000);
	apr_close(c);
	fake_end(f);
}

static void kept_conversation(void)
{
	struct fake *f = start("{\"answers\":[{\"steps\":[\"a\"]}]}");
	struct apr *c = join(0);
	struct apr_gen g = { .size = sizeof(g), .text = "hi", .len = 2, .max_tokens = 4, .flags = APR_SQE_KEEP };
	struct apr_result r;

	CU_ASSERT_EQUAL_FATAL(apr_generate(c, &g, NULL, NULL, &r, err, sizeof(err)), 0);
	CU_ASSERT_NOT_EQUAL(r.cost.handle, 0);
	struct apr_sqe *s = apr_get_sqe(c);
	apr_prep_free(s, r.cost.handle);
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	const struct apr_cqe *q = next(c);
	CU_ASSERT_EQUAL(q->type, APR_CQE_ACK);
	CU_ASSERT_EQUAL(q->res, 0);
	apr_cqe_seen(c, q);
	g.handle = r.cost.handle;
	CU_ASSERT_EQUAL(apr_generate(c, &g, NULL, NULL, &r, err, sizeof(err)), -ESTALE);
	apr_close(c);
	fake_end(f);
}

static void connect_failures(void)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c = NULL;
	char longname[400], file[160];

	snprintf(path, sizeof(path), "%s/nobody.sock", apr_test_tmpdir());
	o.path = path;
	CU_ASSERT_EQUAL(apr_connect(&c, &o, err, sizeof(err)), -ENOENT);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "no daemon at "));
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "nobody.sock"));
	CU_ASSERT_PTR_NULL(c);
	snprintf(file, sizeof(file), "%s/plain", apr_test_tmpdir());
	fclose(fopen(file, "w"));
	o.path = file;
	CU_ASSERT_EQUAL(apr_connect(&c, &o, NULL, 0), -ECONNREFUSED);
	memset(longname, 'x', sizeof(longname) - 1);
	longname[0] = '/';
	longname[399] = '\0';
	o.path = longname;
	CU_ASSERT_EQUAL(apr_connect(&c, &o, err, sizeof(err)), -ENAMETOOLONG);

	struct fake *f = start(NULL);
	o.path = path;
	o.need = APR_FEAT_GRAMMAR;
	CU_ASSERT_EQUAL(apr_connect(&c, &o, err, sizeof(err)), -EOPNOTSUPP);
	CU_ASSERT(strlen(err) > 0);
	o.need = 0;
	o.flags = 1u << 30;
	CU_ASSERT_EQUAL(apr_connect(&c, &o, err, sizeof(err)), -EINVAL);
	o.flags = 0;
	o.sq_entries = 1u << 20;
	CU_ASSERT(apr_connect(&c, &o, err, sizeof(err)) < 0);
	o.sq_entries = 0;
	o.size = 3;
	CU_ASSERT_EQUAL(apr_connect(&c, &o, err, sizeof(err)), -EINVAL);
	fake_end(f);
}

static void socket_path_rule(void)
{
	char buf[256], dir[160];

	unsetenv("APRD_SOCKET");
	unsetenv("XDG_RUNTIME_DIR");
	CU_ASSERT_EQUAL(apr_socket_path("/a/b", buf, sizeof(buf)), 4);
	CU_ASSERT_STRING_EQUAL(buf, "/a/b");
	CU_ASSERT(apr_socket_path(NULL, buf, sizeof(buf)) > 0);
	CU_ASSERT_STRING_EQUAL(buf, "/run/aprd/aprd.sock");
	setenv("XDG_RUNTIME_DIR", apr_test_tmpdir(), 1);
	apr_socket_path(NULL, buf, sizeof(buf));
	CU_ASSERT_STRING_EQUAL(buf, "/run/aprd/aprd.sock"); /* not there yet */
	snprintf(dir, sizeof(dir), "mkdir -p %s/aprd && : > %s/aprd/aprd.sock", apr_test_tmpdir(), apr_test_tmpdir());
	CU_ASSERT_EQUAL(system(dir), 0);
	apr_socket_path(NULL, buf, sizeof(buf));
	CU_ASSERT_PTR_NOT_NULL(strstr(buf, "/aprd/aprd.sock"));
	CU_ASSERT(strncmp(buf, "/run", 4) != 0);
	setenv("APRD_SOCKET", "/env/sock", 1);
	apr_socket_path(NULL, buf, sizeof(buf));
	CU_ASSERT_STRING_EQUAL(buf, "/env/sock");
	CU_ASSERT_EQUAL(apr_socket_path("/a/b", buf, sizeof(buf)), 4);
	CU_ASSERT_EQUAL(apr_socket_path("/a/b", buf, 3), -ENAMETOOLONG);
	unsetenv("APRD_SOCKET");
	unsetenv("XDG_RUNTIME_DIR");
}

static const struct apr_test tests[] = {
	{ "nop_there_and_back", nop_there_and_back, KEEPS_HEAP }, /* thread stacks and stdio warm up */
	{ "generate_streams_the_script", generate_streams_the_script, 0 },
	{ "callback_ends_a_request", callback_ends_a_request, 0 },
	{ "refusals_name_the_culprit", refusals_name_the_culprit, 0 },
	{ "tokenize_and_back", tokenize_and_back, 0 },
	{ "score_walks_every_position", score_walks_every_position, 0 },
	{ "models_vocab_status", models_vocab_status, 0 },
	{ "admin_calls", admin_calls, 0 },
	{ "input_above_max_is_refused_before_submitting", input_above_max_is_refused_before_submitting, 0 },
	{ "credits_are_never_exceeded", credits_are_never_exceeded, 0 },
	{ "many_in_flight_in_a_small_ring", many_in_flight_in_a_small_ring, 0 },
	{ "timeouts_hold", timeouts_hold, 0 },
	{ "wait_for_several_wakes_once", wait_for_several_wakes_once, 0 },
	{ "event_loop_on_the_socket", event_loop_on_the_socket, 0 },
	{ "socket_mode_and_ring_always", socket_mode_and_ring_always, 0 },
	{ "case47_gaps_follow_the_steps", case47_gaps_follow_the_steps, 0 },
	{ "kept_conversation", kept_conversation, 0 },
	{ "connect_failures", connect_failures, 0 },
	{ "socket_path_rule", socket_path_rule, KEEPS_HEAP }, /* the environment grows */
};
TEST_MAIN("client/session", tests)
