/* SPDX-License-Identifier: MIT */
/*
 * CASE 11: 64 client processes of two tenants, each with a secret under a long prefix
 * that all share, on a pool too small for them; requests are cancelled and clients are
 * killed at random. Every answer is the one obtained alone, to the bit of its
 * log-probabilities; nobody's secret stands in another's answer; pages, descriptors and
 * memory are afterwards what they were.
 *
 * APR_ISOLATION_S seconds of it (10); `make check-isolation` runs 600.
 */
#include "tests/harness.h"
#include "tests/support/aprd.h"
#include "tests/support/gguf_writer.h"

#include <apr/client.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CLIENTS = 64, PREFIX = 512, SECRET = 6, TAIL = 20, OUT = 40, PROMPT = PREFIX + SECRET + TAIL };

struct answer {
	uint32_t n;
	uint32_t id[OUT], logprob_bits[OUT];
};

struct shared { /* between the processes */
	struct answer alone[CLIENTS];
	uint32_t whole, cancelled, killed, wrong, leaked, failed;
};

static struct shared *all;
static struct test_aprd d;
static char web[160];

static double now_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint32_t next_random(uint64_t *s)
{
	*s = *s * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(*s >> 33);
}

static void secret_of(unsigned who, uint32_t id[SECRET])
{
	uint64_t s = 77 + who;

	for (unsigned i = 0; i < SECRET; i++)
		id[i] = next_random(&s) % 256;
}

static void prompt_of(unsigned who, uint32_t id[PROMPT])
{
	for (uint32_t i = 0; i < PREFIX; i++)
		id[i] = (i * 29 + 7) % 256;
	secret_of(who, id + PREFIX);
	for (uint32_t i = 0; i < TAIL; i++)
		id[PREFIX + SECRET + i] = 100 + i; /* the question */
}

struct collect {
	struct answer got;
	uint32_t stop_after, die_after;
};

static int on_token(void *arg, const struct apr_token *t)
{
	struct collect *c = arg;

	if (t->id == APR_NO_ID || c->got.n >= OUT)
		return 0;
	c->got.id[c->got.n] = t->id;
	memcpy(&c->got.logprob_bits[c->got.n], &t->logprob, 4);
	c->got.n++;
	if (c->die_after && c->got.n >= c->die_after) {
		__atomic_fetch_add(&all->killed, 1, __ATOMIC_RELAXED);
		raise(SIGKILL);
	}
	return c->stop_after && c->got.n >= c->stop_after;
}

static int ask(struct apr *c, unsigned who, uint32_t prio, struct collect *col)
{
	char buf[256] __attribute__((aligned(8))), err[200] = "";
	struct apr_sampling s = {.set = APR_SET_TEMPERATURE | APR_SET_IGNORE_EOS, .temperature = 0.9f, .ignore_eos = 1};
	uint32_t ids[PROMPT];
	struct apr_params p;
	struct apr_gen g = {.size = sizeof g, .ids = ids, .n_ids = PROMPT, .max_tokens = OUT, .prio = prio,
			    .has_seed = 1, .seed = who, .params = &p};

	prompt_of(who, ids);
	apr_params_init(&p, buf, sizeof buf);
	apr_params_sampling(&p, &s);
	int rc = apr_generate(c, &g, on_token, col, NULL, err, sizeof err);
	if (rc)
		fprintf(stderr, "generate: %d %s\n", rc, err);
	return rc;
}

static struct apr *connect_to(const char *sock)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c = NULL;

	o.path = sock;
	o.connect_ms = 20000;
	return apr_connect(&c, &o, NULL, 0) ? NULL : c;
}

static bool has_secret(const struct answer *a, unsigned who)
{
	uint32_t id[SECRET];

	secret_of(who, id);
	for (uint32_t i = 0; i + SECRET <= a->n; i++)
		if (!memcmp(&a->id[i], id, sizeof id))
			return true;
	return false;
}

static void judge(unsigned who, const struct answer *got, bool whole)
{
	const struct answer *want = &all->alone[who];
	bool same = (whole ? got->n == want->n : got->n <= want->n) &&
		    !memcmp(got->id, want->id, got->n * sizeof got->id[0]) &&
		    !memcmp(got->logprob_bits, want->logprob_bits, got->n * sizeof got->logprob_bits[0]);

	if (!same)
		__atomic_fetch_add(&all->wrong, 1, __ATOMIC_RELAXED);
	for (unsigned other = 0; other < CLIENTS; other++)
		if (other != who && has_secret(got, other) && !has_secret(want, other))
			__atomic_fetch_add(&all->leaked, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(whole ? &all->whole : &all->cancelled, 1, __ATOMIC_RELAXED);
}

/* One life of client `who`: until the time is over or it kills itself. */
static void client_process(unsigned who, uint64_t seed, double until)
{
	struct apr *c = connect_to(who % 2 ? web : d.sock);

	while (c && now_s() < until) {
		uint32_t dice = next_random(&seed) % 40, k = 1 + next_random(&seed) % (OUT - 1);
		struct collect col = {.stop_after = dice < 10 ? k : 0, .die_after = dice == 10 ? k : 0};
		if (ask(c, who, next_random(&seed) % 3, &col)) {
			__atomic_fetch_add(&all->failed, 1, __ATOMIC_RELAXED);
			_exit(1);
		}
		judge(who, &col.got, !col.stop_after);
	}
	apr_close(c);
	_exit(c ? 0 : 2);
}

static void crowd(double seconds, uint64_t seed)
{
	pid_t pid[CLIENTS];
	double until = now_s() + seconds;
	unsigned left = CLIENTS;

	fflush(NULL);
	for (unsigned i = 0; i < CLIENTS; i++) {
		pid[i] = fork();
		if (!pid[i])
			client_process(i, seed + i, until);
		CU_ASSERT_FATAL(pid[i] > 0);
	}
	while (left) {
		int status = 0;
		pid_t p = waitpid(-1, &status, 0);
		unsigned i = 0;
		while (i < CLIENTS && pid[i] != p)
			i++;
		if (i == CLIENTS)
			continue;
		CU_ASSERT(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0);
		pid[i] = WIFSIGNALED(status) && now_s() < until ? fork() : -1;
		if (!pid[i]) /* another one takes its place */
			client_process(i, ++seed * 1000 + i, until);
		left -= pid[i] < 0;
	}
}

/* Of the admin's status: numbers by "key.key". */
static long status_number(const char *path)
{
	char admin[200], key[64], *text = NULL, err[200];
	struct apr_admin *a;
	long v = -1;

	if (apr_admin_path(d.sock, admin, sizeof admin) < 0 || apr_admin_open(&a, admin, err, sizeof err))
		return -1;
	if (!apr_admin_call(a, APR_FRAME_STATUS, NULL, &text, 20000, err, sizeof err)) {
		json_t *j = json_loads(text, 0, NULL), *at = j;
		while (at && *path) {
			size_t n = strcspn(path, ".");
			snprintf(key, sizeof key, "%.*s", (int)n, path);
			at = json_is_array(at) ? json_array_get(at, (size_t)strtoul(key, NULL, 10)) : json_object_get(at, key);
			path += n + (path[n] == '.');
		}
		v = json_is_integer(at) ? (long)json_integer_value(at) : -1;
		json_decref(j);
	}
	free(text);
	apr_admin_close(a);
	return v;
}

static bool all_given_back(void)
{
	long total = status_number("kv.pages_total");

	for (int i = 0; i < 500; i++) {
		if (status_number("running") == 0 && status_number("queued") == 0 && status_number("sessions") == 0 &&
		    status_number("kv.pages_free") == total)
			return true;
		nanosleep(&(struct timespec){0, 20000000}, NULL);
	}
	return false;
}

static int settled_usage(struct test_usage *u)
{
	unsigned equal = 0, last = 0;

	for (int i = 0; i < 200 && equal < 3; i++) {
		int rc = test_aprd_usage(&d, u);
		if (rc)
			return rc;
		equal = u->fds == last ? equal + 1 : 0;
		last = u->fds;
		nanosleep(&(struct timespec){0, 30000000}, NULL);
	}
	return 0;
}

static void start(void)
{
	char model[160], arg[200], config[200];
	const char *args[] = {"-m", arg, "-t", "2", "-c", "1024", "--kv-mem", "1M", "--config", config, NULL};
	struct tiny_spec spec = {.n_layers = 2, .n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32};
	FILE *f;

	snprintf(model, sizeof model, "%s/tiny.gguf", apr_test_tmpdir());
	snprintf(arg, sizeof arg, "tiny=%s", model);
	snprintf(web, sizeof web, "%s/web.sock", apr_test_tmpdir());
	snprintf(config, sizeof config, "%s/aprd.conf", apr_test_tmpdir());
	f = fopen(config, "we");
	CU_ASSERT_PTR_NOT_NULL_FATAL(f);
	fprintf(f, "listener \"%s\" { tenant = \"web\" }\n", web);
	fclose(f);
	CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(model, &spec), 0);
	CU_ASSERT_EQUAL_FATAL(test_aprd_start(&d, apr_test_program("aprd"), apr_test_tmpdir(), args), 0);
}

static void case11_no_secret_crosses(void)
{
	const char *given = getenv("APR_ISOLATION_S");
	double seconds = given ? strtod(given, NULL) : 10;
	struct test_usage before, after;
	struct apr *c;

	all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CU_ASSERT_FATAL(all != MAP_FAILED);
	start();
	c = connect_to(d.sock);
	CU_ASSERT_PTR_NOT_NULL_FATAL(c);
	for (unsigned i = 0; i < CLIENTS; i++) {
		struct collect col = {.stop_after = 0};
		CU_ASSERT_EQUAL_FATAL(ask(c, i, 0, &col), 0);
		CU_ASSERT_EQUAL(col.got.n, OUT);
		all->alone[i] = col.got;
		/* they differ, or a mix-up would not show */
		for (unsigned k = 0; k < i; k++)
			CU_ASSERT(memcmp(&all->alone[k], &all->alone[i], sizeof all->alone[i]) != 0);
	}
	apr_close(c);
	crowd(seconds / 5, 1);
	CU_ASSERT(all_given_back());
	CU_ASSERT_EQUAL(settled_usage(&before), 0);
	crowd(seconds * 4 / 5, 1000);
	CU_ASSERT(all_given_back());
	CU_ASSERT_EQUAL(settled_usage(&after), 0);
	printf("  %u whole answers, %u cancelled, %u clients killed; %u wrong, %u leaked, %u failed; %ld suspended; %ld of %ld "
	       "prompt tokens cached; descriptors %u, %u; memory %llu KiB, %llu KiB\n",
	       all->whole, all->cancelled, all->killed, all->wrong, all->leaked, all->failed, status_number("totals.preempted"),
	       status_number("models.0.cached_tokens"), status_number("models.0.prompt_tokens"), before.fds, after.fds,
	       (unsigned long long)before.pss_anon >> 10, (unsigned long long)after.pss_anon >> 10);
	CU_ASSERT_EQUAL(all->wrong, 0);
	CU_ASSERT_EQUAL(all->leaked, 0);
	CU_ASSERT_EQUAL(all->failed, 0);
	CU_ASSERT(all->whole > 0);
	CU_ASSERT(status_number("totals.preempted") > 0); /* the pool was full */
	CU_ASSERT_EQUAL(after.fds, before.fds);
	CU_ASSERT_EQUAL(after.processes, before.processes);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) /* their shadow memory grows by itself */
	CU_ASSERT(after.pss_anon <= before.pss_anon + (1u << 20));
#endif
	CU_ASSERT_EQUAL(test_aprd_stop(&d), 0);
	munmap(all, sizeof *all);
}

static const struct apr_test tests[] = {
	{"case11_no_secret_crosses", case11_no_secret_crosses, 0},
};
TEST_MAIN("system/isolation", tests)
