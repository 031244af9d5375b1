/* SPDX-License-Identifier: MIT */
/* Who may have how much, who finds whose prompts, and what status says of either: a daemon with a configuration. */
#include "tests/daemon/running.h"

static struct daemon d, web; /* web: the same daemon's listener of another tenant */
static char config[160];

static int up(const char *name, const char *settings)
{
	daemon_name(&d, name);
	memset(&web, 0, sizeof(web));
	snprintf(web.sock, sizeof(web.sock), "%s/%s-web.sock", apr_test_tmpdir(), name);
	snprintf(config, sizeof(config), "%s/%s.conf", apr_test_tmpdir(), name);
	FILE *f = fopen(config, "we");
	fprintf(f, "listener \"%s\" { tenant = \"web\" }\n%s\n", web.sock, settings);
	fclose(f);
	return daemon_start(&d, NULL, "--config", config, NULL);
}

static void reload(const char *settings)
{
	FILE *f = fopen(config, "we");

	fprintf(f, "listener \"%s\" { tenant = \"web\" }\n%s\n", web.sock, settings);
	fclose(f);
	CU_ASSERT_EQUAL(admin(&d, APR_FRAME_RELOAD, "{}", NULL, NULL, 0), 0);
}

/* A field of the row of `clients` with this tenant; -1 none. */
static long client_number(const char *tenant, const char *key)
{
	json_t *j = status_of(&d), *row;
	size_t i;
	long v = -1;

	json_array_foreach (json_object_get(j, "clients"), i, row)
		if (!strcmp(json_string_value(json_object_get(row, "tenant")), tenant))
			v = (long)json_integer_value(json_object_get(row, key));
	json_decref(j);
	return v;
}

static int client_becomes(const char *tenant, const char *key, long want)
{
	for (int i = 0; i < 300 && client_number(tenant, key) != want; i++)
		sleep_ms(10);
	return client_number(tenant, key) == want;
}

/* n ids, `max` tokens; what it cost into r. */
static int ask(struct apr *c, uint32_t n, uint32_t max, uint32_t samples, struct apr_result *r, char *err, size_t len)
{
	struct apr_sampling s = { .set = APR_SET_IGNORE_EOS, .ignore_eos = 1 };
	uint64_t space[16];
	struct apr_params p;
	uint32_t ids[2000];

	for (uint32_t i = 0; i < n; i++)
		ids[i] = (i * 37 + 11) % 300;
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	struct apr_gen g = { .size = sizeof(g), .ids = ids, .n_ids = n, .max_tokens = max, .samples = samples,
			     .has_seed = 1, .seed = 5, .params = &p };
	return apr_generate(c, &g, NULL, NULL, r, err, len);
}

static uint32_t cached(struct apr *c, uint32_t n)
{
	struct apr_result r;
	char err[200] = "";

	CU_ASSERT_EQUAL(ask(c, n, 1, 1, &r, err, sizeof(err)), 0);
	return r.cost.cached;
}

/* ---- quotas ----------------------------------------------------------------------------------- */

static void tokens_a_minute(void)
{
	char own[80], err[200] = "";
	struct apr_result r;

	snprintf(own, sizeof(own), "user \"%u\" { tokens-minute = 600 }", getuid());
	if (!up("minute", own))
		return;
	struct apr *c = connect_to(&d), *other = connect_to(&web);
	CU_ASSERT_EQUAL(ask(c, 500, 300, 1, &r, err, sizeof(err)), 0); /* what runs may overdraw it */
	CU_ASSERT_EQUAL(ask(c, 10, 1, 1, &r, err, sizeof(err)), -EDQUOT);
	double again = 0;
	const char *at = strstr(err, "again in ");
	CU_ASSERT_PTR_NOT_NULL_FATAL(at);
	again = strtod(at + 9, NULL);
	CU_ASSERT_TRUE(again > 10 && again < 25); /* 200 of 10 a second */
	CU_ASSERT_EQUAL(ask(other, 10, 1, 1, &r, err, sizeof(err)), 0); /* of another tenant: another identity */
	CU_ASSERT_EQUAL(client_number("", "refused"), 1);
	CU_ASSERT_EQUAL(client_number("", "tokens"), 800);
	CU_ASSERT_EQUAL(client_number("web", "tokens"), 11);
	CU_ASSERT_EQUAL(client_number("", "tokens_minute"), 800); /* of the last 60 seconds: all of it */
	CU_ASSERT_EQUAL(client_number("web", "tokens_minute"), 11); /* counted without a limit too */
	/* RELOAD takes it away from those who are there */
	reload("");
	CU_ASSERT_EQUAL(ask(c, 10, 1, 1, &r, err, sizeof(err)), 0);
	apr_close(c);
	apr_close(other);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

/* The group's section, where the user has none of its own; the user's before it. */
static void a_groups_section_and_a_users(void)
{
	char text[400], err[200] = "";
	struct apr_result r;

	snprintf(text, sizeof(text), "limits { in-flight = 7 weight = 3 }\ngroup \"%u\" { queued-tokens = 100 }", getgid());
	if (!up("group", text))
		return;
	struct apr *c = connect_to(&d);
	CU_ASSERT_EQUAL(ask(c, 101, 1, 1, &r, err, sizeof(err)), -EDQUOT);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "100"));
	CU_ASSERT_EQUAL(ask(c, 99, 1, 1, &r, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(client_number("", "weight"), 3); /* what it leaves out is as in limits */
	CU_ASSERT_EQUAL(client_number("", "queued_tokens"), 0);
	snprintf(text, sizeof(text), "group \"%u\" { queued-tokens = 100 }\nuser \"%u\" { queued-tokens = 300 }", getgid(),
		 getuid());
	reload(text);
	CU_ASSERT_EQUAL(ask(c, 200, 1, 1, &r, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(ask(c, 301, 1, 1, &r, err, sizeof(err)), -EDQUOT);
	apr_close(c);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void kv_pages_hold(void)
{
	char err[200] = "";
	struct apr_result r;
	long most = 0;
	pid_t pid[4];

	if (!up("kvpages", "limits { kv-pages = 12 }"))
		return;
	for (int i = 0; i < 4; i++) {
		pid[i] = fork();
		if (!pid[i]) { /* four at once, 8 pages each: they take turns */
			struct apr_opts o = APR_OPTS_INIT;
			struct apr *c;
			o.path = d.sock;
			int bad = apr_connect(&c, &o, err, sizeof(err));
			for (int k = 0; k < 3 && !bad; k++)
				bad = ask(c, 350, 150, 1, &r, err, sizeof(err)) || r.cost.generated != 150;
			_exit(bad != 0);
		}
	}
	for (int i = 0; i < 100; i++) {
		long now = client_number("", "kv_pages");
		most = now > most ? now : most;
		sleep_ms(2);
	}
	for (int i = 0; i < 4; i++) {
		int status = 1;
		waitpid(pid[i], &status, 0);
		CU_ASSERT_EQUAL(status, 0);
	}
	CU_ASSERT_TRUE(most <= 12);
	struct apr *c = connect_to(&d);
	CU_ASSERT_EQUAL(ask(c, 900, 1, 1, &r, err, sizeof(err)), -EDQUOT); /* 15 by itself */
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "KV pages"));
	CU_ASSERT_EQUAL(ask(c, 300, 5, 1, &r, err, sizeof(err)), 0);
	CU_ASSERT_TRUE(client_becomes("", "kv_pages", 0));
	CU_ASSERT_TRUE(client_becomes("", "running", 0));
	CU_ASSERT_TRUE(client_becomes("", "in_flight", 0));
	apr_close(c);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

/* ---- prefixes ----------------------------------------------------------------------------------- */

static void shared_by_user(void)
{
	if (!up("user", "")) /* the default */
		return;
	struct apr *a = connect_to(&d), *b = connect_to(&d), *other = connect_to(&web);
	CU_ASSERT_EQUAL(cached(a, 400), 0);
	CU_ASSERT_EQUAL(cached(a, 400), 384); /* all full pages below the last token */
	CU_ASSERT_EQUAL(cached(b, 400), 384);
	CU_ASSERT_EQUAL(cached(other, 400), 0); /* another identity: no page, and no shorter time, tells it anything */
	CU_ASSERT_EQUAL(cached(other, 400), 384);
	apr_close(a);
	apr_close(b);
	struct apr *later = connect_to(&d); /* a process that comes later */
	CU_ASSERT_EQUAL(cached(later, 400), 384);
	apr_close(later);
	apr_close(other);
	json_t *j = status_of(&d), *m = json_array_get(json_object_get(j, "models"), 0);
	CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(m, "share_prefixes")), "user");
	CU_ASSERT_EQUAL(json_integer_value(json_object_get(m, "cached_tokens")), 4 * 384);
	CU_ASSERT_EQUAL(json_integer_value(json_object_get(m, "prompt_tokens")), 6 * 400);
	json_decref(j);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void shared_by_all(void)
{
	if (!up("all", "share-prefixes = none\nfor-model \"tiny\" { share-prefixes = all }"))
		return;
	struct apr *a = connect_to(&d), *other = connect_to(&web);
	CU_ASSERT_EQUAL(cached(a, 400), 0);
	CU_ASSERT_EQUAL(cached(other, 400), 384);
	apr_close(a);
	apr_close(other);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void shared_by_session(void)
{
	if (!up("session", "share-prefixes = session"))
		return;
	struct apr *a = connect_to(&d), *b = connect_to(&d);
	CU_ASSERT_EQUAL(cached(a, 400), 0);
	CU_ASSERT_EQUAL(cached(b, 400), 0);
	CU_ASSERT_EQUAL(cached(a, 400), 384);
	apr_close(a);
	apr_close(b);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void shared_by_none(void)
{
	struct apr_result r;
	char err[200] = "";

	if (!up("none", "share-prefixes = none"))
		return;
	struct apr *a = connect_to(&d);
	CU_ASSERT_EQUAL(cached(a, 400), 0);
	CU_ASSERT_EQUAL(cached(a, 400), 0);
	/* the samples of one request share its prompt all the same: 400 rows once, 16 for each other */
	long before = client_number("", "tokens");
	CU_ASSERT_EQUAL(ask(a, 400, 10, 4, &r, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(r.cost.generated, 40);
	CU_ASSERT_EQUAL(client_number("", "tokens") - before, 400 + 3 * 16 + 40);
	apr_close(a);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

/* ---- time limits ---------------------------------------------------------------------------------- */

/* Once the daemon knows what rows take, a prompt that cannot be computed in time is told so at once, not when it is over. */
static void a_limit_that_cannot_be_met(void)
{
	struct apr_result r;
	char err[200] = "";
	uint32_t ids[2000];
	int at_once = 0;

	if (!up("late", "share-prefixes = none"))
		return;
	struct apr *c = connect_to(&d);
	for (int i = 0; i < 3; i++)
		CU_ASSERT_EQUAL(ask(c, 1900, 1, 1, &r, err, sizeof(err)), 0);
	for (uint32_t i = 0; i < 2000; i++)
		ids[i] = i % 300;
	for (int i = 0; i < 20; i++) {
		struct apr_gen g = { .size = sizeof(g), .ids = ids, .n_ids = 2000, .max_tokens = 1, .timeout_ms = 2 };
		int e = apr_generate(c, &g, NULL, NULL, &r, err, sizeof(err));
		CU_ASSERT_TRUE(e == -ETIME || e == -ETIMEDOUT); /* the latter where this machine was slow to take it in */
		CU_ASSERT_EQUAL(r.finish, APR_FINISH_TIMEOUT);
		CU_ASSERT_EQUAL(r.cost.generated, 0);
		at_once += e == -ETIME && strstr(err, "2000 tokens") && r.cost.prefill_us == 0;
	}
	CU_ASSERT_TRUE(at_once > 0);
	struct apr_gen g = { .size = sizeof(g), .ids = ids, .n_ids = 2000, .max_tokens = 1, .timeout_ms = 60000 };
	CU_ASSERT_EQUAL(apr_generate(c, &g, NULL, NULL, &r, err, sizeof(err)), 0);
	apr_close(c);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void bad_settings_are_refused(void)
{
	static const struct { const char *text, *word; } bad[] = {
		{ "share-prefixes = some", "share-prefixes" },
		{ "for-model \"x\" { share-prefixes = 1 }", "share-prefixes" },
		{ "limits { weight = 0 }", "weight" },
		{ "user \"no-such-user-here\" { weight = 2 }", "no-such-user-here\" (of the section that ends here)" },
		{ "group \"-1\" { weight = 2 }", "-1" },
		{ "user \"0\" { kv-pages = -3 }", "kv-pages" },
		{ "user \"0\" { all-regions = 1M }", "all-regions" },
		{ "limits { tokens-minute = 99999999999 }", "tokens-minute" },
		{ "step-ms = -1", "step-ms" },
	};

	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		const char *args[] = { "-m", tiny_path(), "-s", d.sock, "--config", config, "--check-config", NULL };
		daemon_name(&d, "bad");
		snprintf(config, sizeof(config), "%s/bad.conf", apr_test_tmpdir());
		FILE *f = fopen(config, "we");
		fprintf(f, "%s\n", bad[i].text);
		fclose(f);
		daemon_spawn(&d, args);
		CU_ASSERT_NOT_EQUAL(daemon_wait(&d, 10), 0);
		if (!log_has(&d, bad[i].word)) {
			fprintf(stderr, "%s: not named\n", bad[i].text);
			CU_FAIL("the setting is not named");
		}
	}
}

static const struct apr_test tests[] = {
	{ "tokens_a_minute", tokens_a_minute, KEEPS_HEAP }, /* getpwnam and the like keep what they read */
	{ "a_groups_section_and_a_users", a_groups_section_and_a_users, 0 },
	{ "kv_pages_hold", kv_pages_hold, 0 },
	{ "shared_by_user", shared_by_user, 0 },
	{ "shared_by_all", shared_by_all, 0 },
	{ "shared_by_session", shared_by_session, 0 },
	{ "shared_by_none", shared_by_none, 0 },
	{ "a_limit_that_cannot_be_met", a_limit_that_cannot_be_met, 0 },
	{ "bad_settings_are_refused", bad_settings_are_refused, 0 },
};
TEST_MAIN("daemon/quota", tests)
