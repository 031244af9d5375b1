/* SPDX-License-Identifier: MIT */
/* KEEP, handles and FREE: the next turn names what was there instead of sending it. */
#include "tests/daemon/running.h"

static struct daemon d;

struct turn {
	uint32_t ids[600];
	uint32_t n, tokens;
	uint64_t handle, seed;
	uint32_t flags, out[200], n_out;
	struct apr_result r;
	char err[200];
};

static int take(void *arg, const struct apr_token *t)
{
	struct turn *u = arg;

	if (t->id != APR_NO_ID && u->n_out < 200)
		u->out[u->n_out++] = t->id;
	return 0;
}

static int say(struct apr *c, struct turn *t)
{
	struct apr_sampling s = { .set = APR_SET_IGNORE_EOS | APR_SET_TEMPERATURE, .ignore_eos = 1, .temperature = 0.8f };
	uint64_t space[16];
	struct apr_params p;

	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	struct apr_gen g = { .size = sizeof(g), .ids = t->ids, .n_ids = t->n, .max_tokens = t->tokens, .flags = t->flags,
			     .handle = t->handle, .has_seed = 1, .seed = t->seed, .params = &p };
	t->n_out = 0;
	return apr_generate(c, &g, take, t, &t->r, t->err, sizeof(t->err));
}

static struct turn turn_of(uint32_t n, uint32_t tokens, uint32_t from, uint64_t handle, uint32_t flags)
{
	struct turn t = { .n = n, .tokens = tokens, .handle = handle, .flags = flags, .seed = from };

	for (uint32_t i = 0; i < n; i++)
		t.ids[i] = (from + i * 13) % 300;
	return t;
}

static void daemon_up(void)
{
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "conversation", NULL));
}

/* Four turns: each pays for its new ids and what lies beyond the last full page; its answer is that of everything sent. */
static void turns_pay_for_what_is_new(void)
{
	struct apr *c = connect_to(&d);
	struct turn all = { .n = 0 };
	uint64_t handle = 0;

	for (uint32_t k = 0; k < 4; k++) {
		struct turn t = turn_of(70 + k, 30, 100 + k, handle, APR_SQE_KEEP);
		uint32_t before = all.n;
		CU_ASSERT_EQUAL_FATAL(say(c, &t), 0);
		CU_ASSERT_NOT_EQUAL(t.r.cost.handle, 0);
		CU_ASSERT_TRUE(!handle || t.r.cost.handle == handle); /* in place */
		handle = t.r.cost.handle;
		CU_ASSERT_EQUAL(t.r.cost.prompt, before + t.n);
		/* the last token sampled has no KV yet */
		CU_ASSERT_EQUAL(t.r.cost.cached, before ? (before - 1) / 64 * 64 : 0);
		memcpy(all.ids + all.n, t.ids, t.n * 4);
		all.n += t.n;
		struct apr *other = connect_to(&d);
		struct turn whole = all;
		whole.tokens = 30;
		whole.seed = t.seed;
		CU_ASSERT_EQUAL(say(other, &whole), 0);
		CU_ASSERT_EQUAL(whole.n_out, 30);
		CU_ASSERT_EQUAL(memcmp(whole.out, t.out, 30 * 4), 0);
		apr_close(other);
		memcpy(all.ids + all.n, t.out, t.n_out * 4);
		all.n += t.n_out;
	}
	/* it may go on by itself */
	struct turn more = turn_of(0, 10, 1, handle, 0);
	CU_ASSERT_EQUAL(say(c, &more), 0);
	CU_ASSERT_EQUAL(more.n_out, 10);
	CU_ASSERT_EQUAL(more.r.cost.handle, 0); /* not kept */
	apr_close(c);
}

/* Named without KEEP it is left as it is: several answers from one point. */
static void a_fork_leaves_it_as_it_is(void)
{
	struct apr *c = connect_to(&d);
	struct turn first = turn_of(100, 20, 7, 0, APR_SQE_KEEP), a, b, again;

	CU_ASSERT_EQUAL_FATAL(say(c, &first), 0);
	a = turn_of(10, 20, 50, first.r.cost.handle, 0);
	b = turn_of(10, 20, 60, first.r.cost.handle, 0);
	again = a;
	CU_ASSERT_EQUAL(say(c, &a), 0);
	CU_ASSERT_EQUAL(say(c, &b), 0);
	CU_ASSERT_EQUAL(say(c, &again), 0);
	CU_ASSERT_EQUAL(a.r.cost.prompt, 130);
	CU_ASSERT_EQUAL(memcmp(a.out, again.out, sizeof(uint32_t) * 20), 0);
	CU_ASSERT_NOT_EQUAL(memcmp(a.out, b.out, sizeof(uint32_t) * 20), 0);
	apr_close(c);
}

static int free_handle(struct apr *c, uint64_t handle, uint32_t *at)
{
	struct apr_sqe *sqe = apr_get_sqe(c);
	const struct apr_cqe *e;

	apr_prep_free(sqe, handle);
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &e, 5000000), 0);
	int res = e->res;
	CU_ASSERT_EQUAL(e->type, APR_CQE_ACK);
	*at = e->pos;
	apr_cqe_seen(c, e);
	return res;
}

static void what_is_gone_is_stale(void)
{
	struct apr *c = connect_to(&d), *other = connect_to(&d);
	struct turn t = turn_of(10, 5, 3, 0, APR_SQE_KEEP), u;
	uint32_t at = 0;

	CU_ASSERT_EQUAL_FATAL(say(c, &t), 0);
	uint64_t handle = t.r.cost.handle;
	u = turn_of(3, 1, 1, handle, 0);
	CU_ASSERT_EQUAL(say(other, &u), -ESTALE); /* another session's */
	CU_ASSERT_EQUAL(u.r.at, offsetof(struct apr_sqe, arg));
	u = turn_of(3, 1, 1, handle + 1, 0);
	CU_ASSERT_EQUAL(say(c, &u), -ESTALE);
	CU_ASSERT_EQUAL(free_handle(c, handle, &at), 0);
	CU_ASSERT_EQUAL(free_handle(c, handle, &at), -ESTALE);
	CU_ASSERT_EQUAL(at, offsetof(struct apr_sqe, arg));
	u = turn_of(3, 1, 1, handle, APR_SQE_KEEP);
	CU_ASSERT_EQUAL(say(c, &u), -ESTALE);
	/* its place is used again under another handle */
	CU_ASSERT_EQUAL(say(c, &t), 0);
	CU_ASSERT_NOT_EQUAL(t.r.cost.handle, handle);
	/* beyond 256 the one used longest ago is given up */
	uint64_t second = 0;
	handle = t.r.cost.handle;
	for (int i = 0; i < 256; i++) {
		t = turn_of(3, 1, (uint32_t)i, 0, APR_SQE_KEEP);
		CU_ASSERT_EQUAL_FATAL(say(c, &t), 0);
		second = i ? second : t.r.cost.handle;
	}
	u = turn_of(3, 1, 1, handle, 0);
	CU_ASSERT_EQUAL(say(c, &u), -ESTALE);
	u = turn_of(3, 1, 1, second, 0);
	CU_ASSERT_EQUAL(say(c, &u), 0);
	apr_close(c);
	apr_close(other);
}

/* While one request with KEEP goes on with it, no second one may, and it is not freed. */
static void one_at_a_time(void)
{
	struct apr *c = connect_to(&d);
	struct turn t = turn_of(10, 5, 3, 0, APR_SQE_KEEP);
	const struct apr_cqe *e;
	int res[3] = { 1, 1, 1 };

	CU_ASSERT_EQUAL_FATAL(say(c, &t), 0);
	for (uint64_t i = 0; i < 3; i++) {
		struct apr_sqe *sqe = apr_get_sqe(c);
		if (i == 2) {
			apr_prep_free(sqe, t.r.cost.handle);
		} else {
			apr_prep_generate_ids(c, sqe, t.ids, 10, i ? 1 : 400);
			apr_sqe_continue(sqe, t.r.cost.handle);
			apr_sqe_flags(sqe, APR_SQE_KEEP);
		}
		apr_sqe_user_data(sqe, i + 1);
		CU_ASSERT_EQUAL(apr_submit(c), 1);
		if (!i) /* its first token: it is under way */
			CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &e, 5000000), 0);
	}
	for (int left = 3; left;) {
		CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &e, 10000000), 0);
		if (apr_cqe_last(e)) {
			res[e->user_data - 1] = e->res;
			left--;
		}
		apr_cqe_seen(c, e);
	}
	CU_ASSERT_EQUAL(res[0], 0);
	/* unless the first one ended by an end id before they came */
	CU_ASSERT_TRUE(res[1] == -EINVAL || res[1] == 0);
	CU_ASSERT_TRUE(res[2] == -EINVAL || res[2] == 0);
	apr_close(c);
}

static void several_samples_are_not_kept(void)
{
	struct apr *c = connect_to(&d);
	struct apr_sqe *sqe = apr_get_sqe(c);
	const struct apr_cqe *e;

	apr_prep_generate(c, sqe, "x", 1, 3);
	apr_sqe_flags(sqe, APR_SQE_KEEP);
	sqe->n = 2;
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &e, 5000000), 0);
	CU_ASSERT_EQUAL(e->res, -EINVAL);
	CU_ASSERT_EQUAL(e->pos, offsetof(struct apr_sqe, n));
	apr_cqe_seen(c, e);
	apr_close(c);
}

static void daemon_down(void)
{
	CU_ASSERT_TRUE(status_becomes(&d, "sessions", 0));
	CU_ASSERT_TRUE(status_becomes(&d, "kv.pages_free", status_number(&d, "kv.pages_total")));
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

/* Kept ids count as inputs do: the session's oldest go first, then nothing more is kept. */
static void what_is_kept_is_counted(void)
{
	struct daemon l = { 0 };
	char config[160];
	uint64_t first = 0;
	int e = 0;

	daemon_name(&l, "kept");
	snprintf(config, sizeof(config), "%s/kept.conf", apr_test_tmpdir());
	FILE *f = fopen(config, "we");
	fputs("limits { region-bytes = \"300K\" }\n", f);
	fclose(f);
	if (!daemon_start(&l, NULL, "--config", config, NULL))
		return;
	struct apr *c = connect_to(&l);
	for (uint32_t i = 0; i < 200 && !e; i++) { /* 500 ids each, some 2 KiB */
		struct turn t = turn_of(500, 1, i, 0, APR_SQE_KEEP);
		e = say(c, &t);
		first = i ? first : t.r.cost.handle;
	}
	CU_ASSERT_EQUAL(e, 0);
	struct turn u = turn_of(3, 1, 1, first, 0);
	CU_ASSERT_EQUAL(say(c, &u), -ESTALE);
	apr_close(c);
	CU_ASSERT_EQUAL(daemon_stop(&l), 0);
}

static const struct apr_test tests[] = {
	{ "daemon_up", daemon_up, KEEPS_HEAP },
	{ "turns_pay_for_what_is_new", turns_pay_for_what_is_new, 0 },
	{ "a_fork_leaves_it_as_it_is", a_fork_leaves_it_as_it_is, 0 },
	{ "what_is_gone_is_stale", what_is_gone_is_stale, 0 },
	{ "one_at_a_time", one_at_a_time, 0 },
	{ "several_samples_are_not_kept", several_samples_are_not_kept, 0 },
	{ "daemon_down", daemon_down, KEEPS_HEAP },
	{ "what_is_kept_is_counted", what_is_kept_is_counted, 0 },
};
TEST_MAIN("daemon/conversation", tests)
