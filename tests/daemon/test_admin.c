/* SPDX-License-Identifier: MIT */
/* The admin socket: loading and unloading, bad files, cancel, log, reload, drain; who may do it. */
#include "tests/daemon/running.h"
#include <pthread.h>

static struct daemon d;

static int order(unsigned type, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static char words[512];
static int order(unsigned type, const char *fmt, ...)
{
	char json[600];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(json, sizeof(json), fmt, ap);
	va_end(ap);
	words[0] = 0;
	return admin(&d, type, json, NULL, words, sizeof(words));
}

static const char *model_file(const char *name, uint64_t seed)
{
	static char path[200];
	struct tiny_spec spec = {
		.n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32, .seed = seed
	};

	snprintf(path, sizeof(path), "%s/%s.gguf", apr_test_tmpdir(), name);
	CU_ASSERT_EQUAL(apr_test_write_tiny_model(path, &spec), 0);
	return path;
}

static void load_generate_unload(void)
{
	struct apr *c = connect_to(&d);
	struct apr_model_row *rows;
	uint32_t id = 0, n_gen = 0;
	size_t n;
	char err[200];

	CU_ASSERT_EQUAL(order(APR_FRAME_LOAD, "{\"name\":\"second\",\"path\":\"%s\"}", model_file("second", 2)), 0);
	for (int i = 0; i < 100 && n_gen < 1; i++, sleep_ms(10))
		n_gen = (uint32_t)(apr_poll(c) == 1);
	CU_ASSERT_EQUAL(n_gen, 1); /* MODEL_CHANGED came */
	CU_ASSERT_EQUAL(apr_get_models(c, &rows, &n), 0);
	CU_ASSERT_EQUAL(n, 2);
	CU_ASSERT_STRING_EQUAL(rows[1].name, "second");
	CU_ASSERT_EQUAL(rows[0].flags, 1);
	CU_ASSERT_NOT_EQUAL(memcmp(rows[0].receipt, rows[1].receipt, 16), 0);
	free(rows);
	CU_ASSERT_EQUAL(apr_find_model(c, "second", &id), 0);
	struct apr_gen g = { .size = sizeof(g), .text = "x", .len = 1, .max_tokens = 3, .model = id };
	struct apr_result r;
	CU_ASSERT_EQUAL(apr_generate(c, &g, NULL, NULL, &r, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(order(APR_FRAME_LOAD, "{\"name\":\"second\",\"path\":\"%s\"}", model_file("second", 2)),
			-EEXIST);
	CU_ASSERT_EQUAL(order(APR_FRAME_UNLOAD, "{\"name\":\"second\"}"), 0);
	CU_ASSERT_EQUAL(apr_generate(c, &g, NULL, NULL, &r, err, sizeof(err)), -ESTALE);
	CU_ASSERT_EQUAL(order(APR_FRAME_UNLOAD, "{\"name\":\"second\"}"), -ENOENT);
	apr_close(c);
}

static void vocabulary_is_shared(void)
{
	struct apr *c = connect_to(&d);
	struct apr_vocab *v;
	size_t len;
	unsigned kind;

	CU_ASSERT_EQUAL_FATAL(apr_get_vocab(c, 0, &v), 0);
	CU_ASSERT_EQUAL(apr_vocab_size(v), 320);
	const char *p = apr_vocab_piece(v, 256, &len, &kind);
	CU_ASSERT_TRUE(p && len == 2 && !memcmp(p, "th", 2));
	p = apr_vocab_piece(v, 319, &len, &kind);
	CU_ASSERT_TRUE(p && len == 7 && kind == 3);
	CU_ASSERT_PTR_NULL(apr_vocab_piece(v, 320, &len, NULL));
	apr_vocab_free(v);
	apr_close(c);
}

static void gguf_bad_files_are_refused(void)
{
	char path[200], good[200];
	uint8_t *buf;
	size_t len;
	unsigned tried = 0;

	snprintf(good, sizeof(good), "%s", model_file("whole", 3));
	FILE *f = fopen(good, "re");
	fseek(f, 0, SEEK_END);
	len = (size_t)ftell(f);
	rewind(f);
	buf = malloc(len);
	CU_ASSERT_EQUAL(fread(buf, 1, len, f), len);
	fclose(f);
	snprintf(path, sizeof(path), "%s/cut.gguf", apr_test_tmpdir());
	for (size_t n = 0; n < len; n += n < 64 ? 7 : len / 37, tried++) {
		f = fopen(path, "we");
		fwrite(buf, 1, n, f);
		fclose(f);
		CU_ASSERT_TRUE(order(APR_FRAME_LOAD, "{\"name\":\"cut\",\"path\":\"%s\"}", path) < 0);
		CU_ASSERT_TRUE(strlen(words) > 8);
	}
	free(buf);
	CU_ASSERT_TRUE(tried > 30);
	CU_ASSERT_EQUAL(order(APR_FRAME_LOAD, "{\"path\":\"/none/such\"}"), -ENOENT);
	CU_ASSERT_EQUAL(order(APR_FRAME_LOAD, "{}"), -EINVAL);
	CU_ASSERT_EQUAL(order(APR_FRAME_LOAD, "[1]"), -EINVAL);
	CU_ASSERT_EQUAL(order(APR_FRAME_LOAD, "{\"path\":"), -EINVAL);
	CU_ASSERT_TRUE(alive(&d));
	/* the next one loads */
	CU_ASSERT_EQUAL(order(APR_FRAME_LOAD, "{\"name\":\"whole\",\"path\":\"%s\"}", good), 0);
	CU_ASSERT_EQUAL(order(APR_FRAME_UNLOAD, "{\"name\":\"whole\"}"), 0);
}

static void case18_nan_in_one_weight(void)
{
	struct tiny_spec spec = {
		.n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32, .nan_row = 5
	};
	struct apr *c = connect_to(&d);
	char path[200], err[200];
	struct apr_result r;
	uint32_t id;

	snprintf(path, sizeof(path), "%s/nan.gguf", apr_test_tmpdir());
	CU_ASSERT_EQUAL(apr_test_write_tiny_model(path, &spec), 0);
	CU_ASSERT_EQUAL_FATAL(order(APR_FRAME_LOAD, "{\"name\":\"nan\",\"path\":\"%s\"}", path), 0);
	CU_ASSERT_EQUAL(apr_find_model(c, "nan", &id), 0);
	struct apr_gen g = { .size = sizeof(g), .text = "x", .len = 1, .max_tokens = 3, .model = id };
	CU_ASSERT_EQUAL(apr_generate(c, &g, NULL, NULL, &r, err, sizeof(err)), -EDOM);
	CU_ASSERT_EQUAL(r.finish, APR_FINISH_NUMERIC);
	g.model = 0;
	CU_ASSERT_EQUAL(apr_generate(c, &g, NULL, NULL, &r, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(order(APR_FRAME_UNLOAD, "{\"name\":\"nan\"}"), 0);
	apr_close(c);
}

static void unload_waits_for_what_runs(void)
{
	struct apr *c = connect_to(&d);
	struct apr_sampling s = { .set = APR_SET_IGNORE_EOS, .ignore_eos = 1 };
	const struct apr_cqe *e;
	uint64_t space[16];
	struct apr_params p;
	uint32_t id;

	CU_ASSERT_EQUAL(order(APR_FRAME_LOAD, "{\"name\":\"busy\",\"path\":\"%s\"}", model_file("busy", 4)), 0);
	CU_ASSERT_EQUAL(apr_find_model(c, "busy", &id), 0);
	struct apr_sqe *sqe = apr_get_sqe(c);
	apr_prep_generate(c, sqe, "abc", 3, 100);
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	apr_sqe_params(c, sqe, &p);
	sqe->model = id;
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	CU_ASSERT_EQUAL(apr_wait_cqe_timeout(c, &e, 5000000), 0);
	CU_ASSERT_EQUAL(order(APR_FRAME_UNLOAD, "{\"name\":\"busy\"}"), 0); /* it has ended by now */
	unsigned tokens = 0;
	int res = 1;
	while (!apr_wait_cqe_timeout(c, &e, 5000000)) {
		int last = apr_cqe_last(e);
		tokens += e->type == APR_CQE_TOKEN;
		res = last ? e->res : res;
		apr_cqe_seen(c, e);
		if (last)
			break;
	}
	CU_ASSERT_EQUAL(res, 0);
	CU_ASSERT_EQUAL(tokens, 100);
	apr_close(c);
}

/* ---- what status says meanwhile ---------------------------------------------------------------- */

struct orders { /* of a second administrator */
	const char *path;
	int loads, failed;
	bool ended; /* atomic */
};

static void *give_orders(void *arg)
{
	struct orders *o = arg;
	char load[300], err[200];

	snprintf(load, sizeof(load), "{\"name\":\"slow\",\"path\":\"%s\"}", o->path);
	for (int i = 0; i < o->loads; i++) {
		o->failed += admin(&d, APR_FRAME_LOAD, load, NULL, err, sizeof(err)) != 0;
		o->failed += i + 1 < o->loads && admin(&d, APR_FRAME_UNLOAD, "{\"name\":\"slow\"}", NULL, err, sizeof(err));
	}
	if (!o->loads)
		o->failed = admin(&d, APR_FRAME_UNLOAD, "{\"name\":\"slow\"}", NULL, err, sizeof(err)) != 0;
	__atomic_store_n(&o->ended, true, __ATOMIC_RELEASE); /* the test's loop */
	return NULL;
}

/* Whether the model is as said: loading is a list of its own. */
static bool slow_is(const char *state)
{
	json_t *j = status_of(&d), *row;
	bool is = false;
	size_t i;

	json_array_foreach (json_object_get(j, "loading"), i, row)
		is |= !strcmp(state, "loading") && !strcmp(json_string_value(row), "slow");
	json_array_foreach (json_object_get(j, "models"), i, row)
		is |= !strcmp(json_string_value(json_object_get(row, "name")), "slow") &&
		      !strcmp(json_string_value(json_object_get(row, "state")), state);
	json_decref(j);
	return is;
}

static void loading_and_unloading_are_said(void)
{
	struct orders o = { .path = model_file("slow", 5), .loads = 50 };
	struct apr *c = connect_to(&d);
	struct apr_sampling s = { .set = APR_SET_IGNORE_EOS, .ignore_eos = 1 };
	const struct apr_cqe *e;
	uint64_t space[16];
	struct apr_params p;
	uint32_t id;
	pthread_t t;

	CU_ASSERT_EQUAL_FATAL(pthread_create(&t, NULL, give_orders, &o), 0);
	bool seen = false;
	while (!seen && !__atomic_load_n(&o.ended, __ATOMIC_ACQUIRE))
		seen = slow_is("loading");
	CU_ASSERT_TRUE(seen);
	pthread_join(t, NULL);
	CU_ASSERT_EQUAL(o.failed, 0);
	CU_ASSERT_TRUE(slow_is("ready"));
	CU_ASSERT_FALSE(slow_is("loading")); /* answered: over */
	/* more tokens than its queue has room for: the request stands until they are read */
	CU_ASSERT_EQUAL(apr_find_model(c, "slow", &id), 0);
	struct apr_sqe *sqe = apr_get_sqe(c);
	apr_prep_generate(c, sqe, "abc", 3, 600);
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	apr_sqe_params(c, sqe, &p);
	sqe->model = id;
	CU_ASSERT_EQUAL(apr_submit(c), 1);
	CU_ASSERT_EQUAL(apr_wait_cqe_timeout(c, &e, 5000000), 0);
	o = (struct orders){ .loads = 0 };
	CU_ASSERT_EQUAL_FATAL(pthread_create(&t, NULL, give_orders, &o), 0);
	for (int i = 0; i < 500 && !slow_is("unloading"); i++)
		sleep_ms(5);
	CU_ASSERT_TRUE(slow_is("unloading"));
	while (!apr_wait_cqe_timeout(c, &e, 5000000)) {
		int last = apr_cqe_last(e);
		apr_cqe_seen(c, e);
		if (last)
			break;
	}
	pthread_join(t, NULL);
	CU_ASSERT_EQUAL(o.failed, 0);
	CU_ASSERT_FALSE(slow_is("unloading"));
	apr_close(c);
}

static void cancel_a_session(void)
{
	struct hand h;
	struct {
		struct apr_param p;
		struct apr_sampling s;
	} par = { { APR_PARAM_SAMPLING, 0, sizeof(struct apr_sampling) },
		  { .set = APR_SET_IGNORE_EOS, .ignore_eos = 1 } };
	struct apr_sqe gen = {
		.op = APR_OP_GENERATE, .user_data = 5, .in_len = 4, .max_tokens = 1900, .par_len = sizeof(par)
	};

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	gen.in_off = h.geo.req_arena_off;
	gen.par_off = gen.in_off + 64;
	memcpy((char *)h.req.base + gen.in_off, "long", 4);
	memcpy((char *)h.req.base + gen.par_off, &par, sizeof(par));
	hand_submit(&h, &gen);
	CU_ASSERT_EQUAL(
		order(APR_FRAME_CANCEL, "{\"session\":%llu,\"user_data\":6}", (unsigned long long)h.welcome.session),
		-ENOENT);
	CU_ASSERT_EQUAL(
		order(APR_FRAME_CANCEL, "{\"session\":%llu,\"user_data\":5}", (unsigned long long)h.welcome.session),
		0);
	CU_ASSERT_EQUAL(hand_finish(&h, 5, NULL, NULL, 5000), -ECANCELED);
	CU_ASSERT_EQUAL(order(APR_FRAME_CANCEL, "{\"session\":999999}"), -ENOENT);
	CU_ASSERT_EQUAL(order(APR_FRAME_CANCEL, "{}"), -EINVAL);
	hand_close(&h);
}

static void client_sockets_take_no_orders(void)
{
	struct hand h;
	uint8_t buf[300];

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	for (uint16_t type = APR_FRAME_LOAD; type <= APR_FRAME_LOG; type++) {
		struct apr_frame f = { APR_FRAME_MAGIC, type, 0, sizeof(f), 0 };
		CU_ASSERT_EQUAL(send(h.sock, &f, sizeof(f), 0), (ssize_t)sizeof(f));
		int n;
		do { /* what an earlier test did to the models may be told on the way */
			n = hand_recv(h.sock, buf, sizeof(buf), NULL, 5000);
			memcpy(&f, buf, sizeof(f));
		} while (n == (int)sizeof(f) && f.type == APR_FRAME_MODEL_CHANGED);
		CU_ASSERT_TRUE(n > (int)sizeof(f));
		CU_ASSERT_EQUAL(f.err, -EPERM);
	}
	hand_close(&h);
	struct stat st;
	char path[140];
	CU_ASSERT_TRUE(apr_admin_path(d.sock, path, sizeof(path)) > 0);
	CU_ASSERT_EQUAL(stat(path, &st), 0);
	CU_ASSERT_EQUAL(st.st_mode & 0777, 0600);
}

static void log_and_others(void)
{
	CU_ASSERT_EQUAL(order(APR_FRAME_LOG, "{\"level\":\"debug\"}"), 0);
	CU_ASSERT_EQUAL(order(APR_FRAME_LOG, "{\"level\":\"loud\"}"), -EINVAL);
	CU_ASSERT_EQUAL(order(APR_FRAME_LOG, "{\"level\":\"info\"}"), 0);
	CU_ASSERT_EQUAL(order(APR_FRAME_TRACE, "{}"), -EOPNOTSUPP);
	CU_ASSERT_EQUAL(order(APR_FRAME_WARMUP, "{}"), 0);
	CU_ASSERT_EQUAL(order(APR_FRAME_WARMUP, "{\"model\":\"nobody\"}"), -ENOENT);
	CU_ASSERT_EQUAL(order(APR_FRAME_WARMUP, "{\"kind\":\"decode\",\"rows\":3}"), -ENOENT);
	CU_ASSERT_EQUAL(order(APR_FRAME_WARMUP, "{\"kind\":\"decode\"}"), -EINVAL);
	CU_ASSERT_EQUAL(order(APR_FRAME_WARMUP, "{\"kind\":\"step\",\"rows\":0}"), -EINVAL);
	CU_ASSERT_EQUAL(order(APR_FRAME_RELOAD, "{}"), -ENOENT); /* no --config */
	CU_ASSERT_EQUAL(order(APR_FRAME_DRAIN, "{\"timeout_ms\":-1}"), -EINVAL);
	CU_ASSERT_TRUE(alive(&d));
}

/* A key of the contract and what its value is: s string, i integer, r real, o object, a array. */
struct key {
	const char *name;
	char kind;
};

static void has_keys(const json_t *o, const char *what, const struct key *k, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		const json_t *v = json_object_get(o, k[i].name);
		bool right = v && (k[i].kind == 's'   ? json_is_string(v)
				   : k[i].kind == 'i' ? json_is_integer(v)
				   : k[i].kind == 'r' ? json_is_real(v)
				   : k[i].kind == 'o' ? json_is_object(v)
						      : json_is_array(v));
		if (!right)
			fprintf(stderr, "status: %s.%s is missing or of another kind\n", what, k[i].name);
		CU_ASSERT_TRUE(right);
	}
}
#define HAS_KEYS(o, what, ...) \
	do { \
		static const struct key keys_[] = { __VA_ARGS__ }; \
		has_keys(o, what, keys_, sizeof(keys_) / sizeof(keys_[0])); \
	} while (0)

static void status_says_what_the_contract_names(void)
{
	struct hand h;

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	CU_ASSERT_TRUE(status_becomes(&d, "sessions", 1));
	json_t *j = status_of(&d), *v;
	CU_ASSERT_PTR_NOT_NULL_FATAL(j);
	HAS_KEYS(j, "status", { "version", 's' }, { "abi", 's' }, { "pid", 'i' }, { "uptime_s", 'r' }, { "state", 's' },
		 { "backend", 'o' }, { "models", 'a' }, { "memory", 'a' }, { "sessions", 'i' }, { "running", 'i' },
		 { "queued", 'i' }, { "kv", 'o' }, { "graphs", 'o' });
	HAS_KEYS(j, "status", { "worker_pid", 'i' }, { "restarts", 'i' }, { "loop", 'o' }, { "polling", 'o' },
		 { "threads", 'o' }, { "connections", 'i' }, { "session_rows", 'a' }, { "totals", 'o' });
	HAS_KEYS(json_object_get(j, "backend"), "backend", { "name", 's' }, { "device", 's' }, { "why", 's' });
	HAS_KEYS(json_object_get(j, "kv"), "kv", { "pages_total", 'i' }, { "pages_free", 'i' });
	HAS_KEYS(json_array_get(json_object_get(json_object_get(j, "graphs"), "decode"), 0), "graphs.decode[0]", { "rows", 'i' },
		 { "replays", 'i' });
	HAS_KEYS(json_object_get(j, "graphs"), "graphs", { "prefill", 'a' }, { "decode", 'a' }, { "bytes", 'i' },
		 { "replays", 'i' });
	HAS_KEYS(json_object_get(j, "polling"), "polling", { "poll_us", 'i' }, { "spin_us", 'i' }, { "why", 's' });
	CU_ASSERT_EQUAL(json_integer_value(json_object_get(j, "pid")), d.pid); /* who gets the SIGTERM */
	CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(j, "state")), "ready");
	CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(json_object_get(j, "backend"), "name")), "cpu");

	json_t *models = json_object_get(j, "models"), *memory = json_object_get(j, "memory");
	CU_ASSERT_EQUAL(json_array_size(models), 1);
	v = json_array_get(models, 0);
	HAS_KEYS(v, "models[]", { "name", 's' }, { "path", 's' }, { "arch", 's' }, { "n_ctx", 'i' }, { "n_vocab", 'i' },
		 { "numerics", 's' }, { "route", 's' }, { "bytes", 'i' }, { "id", 'i' }, { "kv_type", 's' },
		 { "weights", 's' }, { "sampling", 'o' });
	CU_ASSERT_EQUAL(strlen(json_string_value(json_object_get(v, "numerics"))), 32);
	CU_ASSERT_EQUAL(json_integer_value(json_object_get(v, "n_vocab")), 320);
	CU_ASSERT_TRUE(json_integer_value(json_object_get(v, "bytes")) > 0);
	HAS_KEYS(json_object_get(v, "sampling"), "sampling", { "temperature", 'r' }, { "top_k", 'i' }, { "top_p", 'r' },
		 { "min_p", 'r' }, { "repeat_penalty", 'r' }, { "frequency_penalty", 'r' }, { "presence_penalty", 'r' },
		 { "penalty_window", 'i' });
	CU_ASSERT_TRUE(json_array_size(memory) > 5);
	for (size_t i = 0; i < json_array_size(memory); i++)
		HAS_KEYS(json_array_get(memory, i), "memory[]", { "purpose", 's' }, { "where", 's' }, { "bytes", 'i' });
	v = json_array_get(json_object_get(j, "session_rows"), 0);
	HAS_KEYS(v, "session_rows[]", { "session", 'i' }, { "name", 's' }, { "uid", 'i' }, { "tenant", 's' },
		 { "bytes", 'i' }, { "sqes", 'i' }, { "cqes", 'i' }, { "wakes", 'i' }, { "parked", 'i' },
		 { "tokens", 'i' });
	json_decref(j);
	hand_close(&h);
}

static void daemon_up(void)
{
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "admin", NULL));
	struct apr *c = connect_to(&d);
	apr_close(c);
}

static void drain_by_order(void)
{
	CU_ASSERT_EQUAL(status_number(&d, "restarts"), 0);
	if (getenv("APR_TEST_LOG"))
		daemon_stop(&d);
	CU_ASSERT_EQUAL(order(APR_FRAME_DRAIN, "{\"timeout_ms\":200}"), 0);
	CU_ASSERT_EQUAL(daemon_wait(&d, 5), 0);
}

static const struct apr_test tests[] = {
	{ "daemon_up", daemon_up, KEEPS_HEAP },
	{ "status_says_what_the_contract_names", status_says_what_the_contract_names,
	  KEEPS_HEAP /* jansson's hash seed */ },
	{ "load_generate_unload", load_generate_unload, 0 },
	{ "vocabulary_is_shared", vocabulary_is_shared, 0 },
	{ "gguf_bad_files_are_refused", gguf_bad_files_are_refused, 0 },
	{ "case18_nan_in_one_weight", case18_nan_in_one_weight, 0 },
	{ "unload_waits_for_what_runs", unload_waits_for_what_runs, 0 },
	{ "loading_and_unloading_are_said", loading_and_unloading_are_said, KEEPS_HEAP }, /* a thread's stack */
	{ "cancel_a_session", cancel_a_session, 0 },
	{ "client_sockets_take_no_orders", client_sockets_take_no_orders, 0 },
	{ "log_and_others", log_and_others, 0 },
	{ "drain_by_order", drain_by_order, KEEPS_HEAP },
};

TEST_MAIN("daemon/admin", tests)
