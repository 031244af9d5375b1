/* SPDX-License-Identifier: MIT */
/*
 * Sixteen client processes at once on one aprd: mixed lengths, cancels in
 * mid-stream, processes killed in mid-stream (CASE 12). Every answer equals the
 * one obtained alone, token for token and bit for bit; afterwards descriptors, KV
 * pages and memory are what they were.
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
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CLIENTS 16
#define WORKS 24
#define MAX_OUT 48
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define REQUESTS 4 /* a client a round */
#define ROUNDS 2
#else
#define REQUESTS 12
#define ROUNDS 4
#endif
#define WARM_ROUNDS 3
#define MEMORY_SLACK (1u << 20)

struct answer {
	uint32_t n;
	uint32_t id[MAX_OUT], logprob_bits[MAX_OUT];
};

struct work { /* one request: what is asked, and the answer obtained alone */
	uint32_t n_ids, ids[400], max_tokens;
	uint64_t seed;
	struct answer alone;
};

static struct work works[WORKS];

static uint32_t next_random(uint64_t *s)
{
	*s = *s * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(*s >> 33);
}

static void make_works(void)
{
	static const uint32_t lengths[] = {1, 2, 7, 63, 64, 65, 128, 200, 257, 400};
	uint64_t s = 42;

	for (unsigned w = 0; w < WORKS; w++) {
		works[w].n_ids = lengths[w % 10];
		works[w].max_tokens = 1 + next_random(&s) % MAX_OUT;
		works[w].seed = w;
		/* Half of them share a long beginning, so that the prefix cache has work to do. */
		for (uint32_t i = 0; i < works[w].n_ids; i++)
			works[w].ids[i] = w % 2 && i < 130 ? 33 + i % 90 : next_random(&s) % 256;
	}
}

struct collect {
	struct answer got;
	uint32_t stop_after; /* cancel after that many; 0 = never */
	uint32_t die_after;  /* kill this process after that many; 0 = never */
};

static int on_token(void *arg, const struct apr_token *t)
{
	struct collect *c = arg;

	if (t->id == APR_NO_ID || c->got.n >= MAX_OUT)
		return 0;
	c->got.id[c->got.n] = t->id;
	memcpy(&c->got.logprob_bits[c->got.n], &t->logprob, 4);
	c->got.n++;
	if (c->die_after && c->got.n >= c->die_after)
		raise(SIGKILL);
	return c->stop_after && c->got.n >= c->stop_after;
}

static int ask(struct apr *c, const struct work *w, struct collect *col, struct apr_result *r)
{
	char buf[256] __attribute__((aligned(8))), err[200] = "";
	struct apr_sampling s = {.set = APR_SET_TEMPERATURE | APR_SET_IGNORE_EOS, .temperature = 0.9f, .ignore_eos = 1};
	struct apr_params p;
	struct apr_gen g = {.size = sizeof g, .ids = w->ids, .n_ids = w->n_ids, .max_tokens = w->max_tokens,
			    .has_seed = 1, .seed = w->seed, .params = &p};
	int rc;

	apr_params_init(&p, buf, sizeof buf);
	apr_params_sampling(&p, &s);
	rc = apr_generate(c, &g, on_token, col, r, err, sizeof err);
	if (rc)
		fprintf(stderr, "generate: %d %s\n", rc, err);
	return rc;
}

static struct apr *connect_to(const char *sock)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c = NULL;

	o.path = sock;
	return apr_connect(&c, &o, NULL, 0) ? NULL : c;
}

static bool same_start(const struct answer *a, const struct answer *alone, bool whole)
{
	if (a->n > alone->n || (whole && a->n != alone->n))
		return false;
	return !memcmp(a->id, alone->id, a->n * sizeof a->id[0]) &&
	       !memcmp(a->logprob_bits, alone->logprob_bits, a->n * sizeof a->logprob_bits[0]);
}

/* One client process. Exit 0 right, 1 a wrong answer, 2 a failed call; or killed by its own hand. */
static void client_process(const char *sock, uint64_t seed)
{
	struct apr *c = connect_to(sock);

	if (!c)
		_exit(2);
	for (int i = 0; i < REQUESTS; i++) {
		const struct work *w = &works[next_random(&seed) % WORKS];
		uint32_t dice = next_random(&seed) % 20, k = 1 + next_random(&seed) % w->max_tokens;
		struct collect col = {.stop_after = dice < 5 ? k : 0, .die_after = dice == 5 ? k : 0};

		if (ask(c, w, &col, NULL))
			_exit(2);
		if (!same_start(&col.got, &w->alone, !col.stop_after))
			_exit(1);
	}
	apr_close(c);
	_exit(0);
}

static void round_of_clients(const char *sock, uint64_t seed, unsigned *killed)
{
	pid_t pid[CLIENTS];

	for (unsigned i = 0; i < CLIENTS; i++) {
		pid[i] = fork();
		if (pid[i] == 0)
			client_process(sock, seed * 1000 + i);
		CU_ASSERT_FATAL(pid[i] > 0);
	}
	for (unsigned i = 0; i < CLIENTS; i++) {
		int status;

		CU_ASSERT_EQUAL(waitpid(pid[i], &status, 0), pid[i]);
		*killed += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
		CU_ASSERT(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0);
	}
}

/* Nothing running or queued, all pages free. Polled, since a killed client is noticed a moment later. */
static bool all_given_back(const char *sock)
{
	for (int i = 0; i < 300; i++) {
		struct apr *c = connect_to(sock);
		char *text = NULL;
		json_int_t total = -1, unused = 0, busy = 1, running = 1, queued = 1, sessions = 2;
		json_t *j;

		if (!c || apr_status(c, &text)) {
			apr_close(c);
			return false;
		}
		apr_close(c);
		j = json_loads(text, 0, NULL);
		free(text);
		if (json_unpack(j, "{s:I, s:I, s:I, s:{s:I, s:I}}", "running", &running, "queued", &queued, "sessions", &sessions,
				"kv", "pages_total", &total, "pages_free", &unused) == 0)
			busy = total - unused;
		json_decref(j);
		if (running == 0 && queued == 0 && busy == 0 && total > 0 && sessions <= 1)
			return true;
		nanosleep(&(struct timespec){0, 20000000}, NULL);
	}
	return false;
}

/* Spare regions are made again in the background: the usage counts once three looks in a row agree. */
static int settled_usage(const struct test_aprd *d, struct test_usage *u)
{
	unsigned equal = 0, last = 0;

	for (int i = 0; i < 200 && equal < 3; i++) {
		int rc = test_aprd_usage(d, u);

		if (rc)
			return rc;
		equal = u->fds == last ? equal + 1 : 0;
		last = u->fds;
		nanosleep(&(struct timespec){0, 30000000}, NULL);
	}
	return 0;
}

static void sixteen_clients(const char *const *extra)
{
	char model[160], arg[200];
	const char *args[16] = {"-m", arg, "-t", "2", "-c", "1024"};
	struct tiny_spec spec = {.n_layers = 2, .n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32};
	struct test_usage before, after;
	struct test_aprd d;
	struct apr *c;
	unsigned killed = 0;

	for (int i = 0; extra && extra[i] && i < 8; i++)
		args[6 + i] = extra[i];
	snprintf(model, sizeof model, "%s/tiny.gguf", apr_test_tmpdir());
	snprintf(arg, sizeof arg, "tiny=%s", model);
	CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(model, &spec), 0);
	CU_ASSERT_EQUAL_FATAL(test_aprd_start(&d, apr_test_program("aprd"), apr_test_tmpdir(), args), 0);
	make_works();
	c = connect_to(d.sock);
	CU_ASSERT_PTR_NOT_NULL_FATAL(c);
	for (unsigned w = 0; w < WORKS; w++) {
		struct collect col = {.stop_after = 0};
		struct apr_result r;

		CU_ASSERT_EQUAL(ask(c, &works[w], &col, &r), 0);
		CU_ASSERT_EQUAL(col.got.n, works[w].max_tokens);
		CU_ASSERT_EQUAL(r.cost.generated, col.got.n);
		works[w].alone = col.got;
	}
	apr_close(c);
	for (unsigned i = 0; i < WARM_ROUNDS; i++)
		round_of_clients(d.sock, i + 1, &killed);
	CU_ASSERT(all_given_back(d.sock));
	CU_ASSERT_EQUAL(settled_usage(&d, &before), 0);
	for (unsigned i = 0; i < ROUNDS; i++)
		round_of_clients(d.sock, i + 100, &killed);
	CU_ASSERT(all_given_back(d.sock));
	CU_ASSERT_EQUAL(settled_usage(&d, &after), 0);
	printf("  %u clients killed themselves in mid-stream; descriptors %u then %u; memory %llu KiB then %llu KiB\n", killed,
	       before.fds, after.fds, (unsigned long long)before.pss_anon >> 10, (unsigned long long)after.pss_anon >> 10);
	CU_ASSERT(killed > 0);
	CU_ASSERT_EQUAL(after.fds, before.fds);
	CU_ASSERT_EQUAL(after.processes, before.processes);
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) /* their shadow memory grows by itself */
	CU_ASSERT(after.pss_anon <= before.pss_anon + MEMORY_SLACK);
#endif
	CU_ASSERT_EQUAL(test_aprd_stop(&d), 0);
}

static void case12_every_answer_is_the_one_obtained_alone(void)
{
	sixteen_clients(NULL);
}

/* A pool too small for all of them: sequences wait or are preempted, and nobody's answer changes. */
static void same_answers_in_a_small_kv_pool(void)
{
	sixteen_clients((const char *const[]){"--kv-mem", "512K", NULL});
}

static void same_answers_on_the_epoll_loop(void)
{
	setenv("APR_LOOP", "epoll", 1);
	sixteen_clients(NULL);
	unsetenv("APR_LOOP");
}

static const struct apr_test tests[] = {
	{"case12_every_answer_is_the_one_obtained_alone", case12_every_answer_is_the_one_obtained_alone, 0},
	{"same_answers_in_a_small_kv_pool", same_answers_in_a_small_kv_pool, 0},
	/* setenv keeps its string */
	{"same_answers_on_the_epoll_loop", same_answers_on_the_epoll_loop, KEEPS_HEAP},
};
TEST_MAIN("system/many_clients", tests)
