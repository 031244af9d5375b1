/* SPDX-License-Identifier: MIT */
/* Models that nobody uses give up their memory, and are there again when somebody does. */
#include "tests/daemon/running.h"

static struct daemon d;

struct answer {
	uint32_t ids[64], n;
};

static int take(void *arg, const struct apr_token *t)
{
	struct answer *a = arg;

	if (t->id != APR_NO_ID && a->n < 64)
		a->ids[a->n++] = t->id;
	return 0;
}

static int ask(struct apr *c, uint32_t model, struct answer *a)
{
	struct apr_sampling s = { .set = APR_SET_IGNORE_EOS, .ignore_eos = 1 };
	uint64_t space[16];
	struct apr_params p;
	uint32_t ids[100];
	char err[200] = "";

	for (uint32_t i = 0; i < 100; i++)
		ids[i] = i * 3;
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	struct apr_gen g = { .size = sizeof(g), .model = model, .ids = ids, .n_ids = 100, .max_tokens = 20, .has_seed = 1,
			     .seed = 3, .params = &p };
	a->n = 0;
	int e = apr_generate(c, &g, take, a, NULL, err, sizeof(err));
	if (e)
		fprintf(stderr, "%d %s\n", e, err);
	return e;
}

/* Of the model of that name: is it resting (1, 0), and what it holds. -1: no such model. */
static int resting(const char *name, long *bytes)
{
	json_t *j = status_of(&d), *row;
	size_t i;
	int v = -1;

	*bytes = 0;
	json_array_foreach (json_object_get(j, "models"), i, row)
		if (!strcmp(json_string_value(json_object_get(row, "name")), name))
			v = !strcmp(json_string_value(json_object_get(row, "state")), "resting");
	json_array_foreach (json_object_get(j, "memory"), i, row) {
		const char *model = json_string_value(json_object_get(row, "model"));
		if (model && !strcmp(model, name) && strcmp(json_string_value(json_object_get(row, "purpose")), "vocabulary") != 0)
			*bytes += (long)json_integer_value(json_object_get(row, "bytes"));
	}
	json_decref(j);
	return v;
}

static int becomes(const char *name, int want, long *bytes)
{
	for (int i = 0; i < 500 && resting(name, bytes) != want; i++)
		sleep_ms(10);
	return resting(name, bytes) == want;
}

static void start(void)
{
	char config[160], two[200];

	daemon_name(&d, "rest");
	snprintf(config, sizeof(config), "%s/rest.conf", apr_test_tmpdir());
	FILE *f = fopen(config, "we");
	fputs("for-model \"sleepy\" { keep-alive = 1 }\n", f);
	fclose(f);
	snprintf(two, sizeof(two), "sleepy=%s", tiny_path());
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, NULL, "-m", two, "--config", config, NULL));
}

static uint32_t id_of(const char *name)
{
	json_t *j = status_of(&d), *row;
	size_t i;
	uint32_t id = 0;

	json_array_foreach (json_object_get(j, "models"), i, row)
		if (!strcmp(json_string_value(json_object_get(row, "name")), name))
			id = (uint32_t)json_integer_value(json_object_get(row, "id"));
	json_decref(j);
	return id;
}

static void an_idle_model_rests_and_wakes(void)
{
	struct answer first, again;
	struct apr *c = connect_to(&d);
	uint32_t id = id_of("sleepy");
	long awake = 0, asleep = 0, others = 0;
	char err[200];

	CU_ASSERT_EQUAL(ask(c, id, &first), 0);
	CU_ASSERT_EQUAL(resting("sleepy", &awake), 0);
	CU_ASSERT_TRUE(awake > 0);
	for (int i = 0; i < 3; i++) {
		CU_ASSERT_TRUE(becomes("sleepy", 1, &asleep));
		CU_ASSERT_EQUAL(asleep, 0);
		CU_ASSERT_EQUAL(resting("tiny", &others), 0); /* it has no time */
		CU_ASSERT_TRUE(others > 0);
		/* text needs no weights: it goes on resting */
		uint32_t *ids = NULL;
		size_t n = 0;
		CU_ASSERT_EQUAL(apr_tokenize(c, id, "abc", 3, 0, &ids, &n, err, sizeof(err)), 0);
		free(ids);
		CU_ASSERT_EQUAL(resting("sleepy", &asleep), 1);
		CU_ASSERT_EQUAL(ask(c, id, &again), 0); /* under the number that it had */
		CU_ASSERT_EQUAL(again.n, first.n);
		CU_ASSERT_EQUAL(memcmp(again.ids, first.ids, sizeof(uint32_t) * first.n), 0);
		CU_ASSERT_EQUAL(resting("sleepy", &asleep), 0);
		CU_ASSERT_EQUAL(asleep, awake);
	}
	apr_close(c);
}

/* Several at once while it comes back; one of them gives up. */
static void many_wait_for_one_load(void)
{
	struct apr *c = connect_to(&d);
	const struct apr_cqe *e;
	uint32_t id = id_of("sleepy"), ids[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
	long bytes;
	int ok = 0, cancelled = 0;

	CU_ASSERT_TRUE(becomes("sleepy", 1, &bytes));
	for (uint64_t i = 1; i <= 8; i++) {
		struct apr_sqe *sqe = apr_get_sqe(c);
		apr_prep_generate_ids(c, sqe, ids, 8, 4);
		apr_sqe_model(sqe, id);
		apr_sqe_user_data(sqe, i);
	}
	struct apr_sqe *sqe = apr_get_sqe(c);
	apr_prep_cancel(sqe, 5);
	apr_sqe_user_data(sqe, 100);
	apr_submit(c);
	for (int left = 9; left;) {
		CU_ASSERT_EQUAL_FATAL(apr_wait_cqe_timeout(c, &e, 10000000), 0);
		if (apr_cqe_last(e)) {
			left--;
			ok += e->type == APR_CQE_FINAL && e->res == 0;
			cancelled += e->type == APR_CQE_FINAL && e->res == -ECANCELED;
		}
		apr_cqe_seen(c, e);
	}
	CU_ASSERT_EQUAL(ok + cancelled, 8);
	CU_ASSERT_EQUAL(cancelled, 1);
	apr_close(c);
}

static void unloading_one_that_rests(void)
{
	struct apr *c = connect_to(&d);
	struct answer a;
	uint32_t id = id_of("sleepy");
	long bytes;

	CU_ASSERT_TRUE(becomes("sleepy", 1, &bytes));
	CU_ASSERT_EQUAL(admin(&d, APR_FRAME_UNLOAD, "{\"name\":\"sleepy\"}", NULL, NULL, 0), 0);
	CU_ASSERT_EQUAL(resting("sleepy", &bytes), -1);
	CU_ASSERT_EQUAL(ask(c, id, &a), -ESTALE);
	CU_ASSERT_EQUAL(ask(c, 0, &a), 0);
	apr_close(c);
}

static void ending_with_one_that_rests(void)
{
	char two[200];
	long bytes;

	snprintf(two, sizeof(two), "{\"name\":\"sleepy\",\"path\":\"%s\"}", tiny_path());
	CU_ASSERT_EQUAL(admin(&d, APR_FRAME_LOAD, two, NULL, NULL, 0), 0);
	CU_ASSERT_TRUE(becomes("sleepy", 1, &bytes));
	CU_ASSERT_EQUAL(status_number(&d, "restarts"), 0);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static const struct apr_test tests[] = {
	{ "start", start, KEEPS_HEAP },
	{ "an_idle_model_rests_and_wakes", an_idle_model_rests_and_wakes, KEEPS_HEAP }, /* jansson's hash seed */
	{ "many_wait_for_one_load", many_wait_for_one_load, 0 },
	{ "unloading_one_that_rests", unloading_one_that_rests, 0 },
	{ "ending_with_one_that_rests", ending_with_one_that_rests, 0 },
};
TEST_MAIN("daemon/rest", tests)
