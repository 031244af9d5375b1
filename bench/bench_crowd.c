/* SPDX-License-Identifier: MIT */
/*
 * Many clients on one daemon: tokens over the whole time, and how one client fares
 * beside one that has a thousand requests queued. JSON lines on stdout, the same in
 * words on stderr.
 *
 *   bench_crowd [-b BACKEND] [-m FILE] [-t THREADS] [-p PROMPT] [-n TOKENS]
 *               [-c CLIENTS[,...]] [PART]...
 *     -b    cpu
 *     -m    a GGUF file; a random two-layer model where none is given
 *     -p -n prompt and generated tokens a request: 512 and 128
 *     -c    1,2,4,8,16,32,64
 *     PART  throughput fairness; default both
 *
 * Windows. Throughput: N clients, each a session that asks twice, one request after the
 * other; from the first apr_submit to the last FINAL, prefill and queueing included; prompts
 * that no earlier request had. Fairness: client B (a tenant of its own) asks once a second,
 * from apr_submit to its first token's entry; first alone, then beside client A's 1,000
 * requests over eight sessions, all submitted before (steps are counted where the clock is
 * virtual: tests/daemon/test_batch.c). One process sends and takes everything.
 */
#include "tests/support/aprd.h"
#include "tests/support/gguf_writer.h"

#include <apr/client.h>
#include <errno.h>
#include <jansson.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { CLIENTS_MAX = 64, QUEUED = 1000, A_SESSIONS = 8, B_ASKS = 10, LIST_MAX = 16 };

static struct {
	char dir[64], model[PATH_MAX], tenant[100], program[PATH_MAX + 8];
	const char *backend, *threads;
	uint32_t prompt, tokens, n_vocab, next;
	uint32_t clients[LIST_MAX], n_clients;
	struct test_aprd d;
} b = {.backend = "cpu", .prompt = 512, .tokens = 128, .clients = {1, 2, 4, 8, 16, 32, 64}, .n_clients = 7};

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static struct apr *join(const char *sock)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c = NULL;
	char err[200] = "";

	o.path = sock;
	if (apr_connect(&c, &o, err, sizeof err))
		fprintf(stderr, "bench_crowd: %s\n", err);
	return c;
}

/* One request with a prompt of its own. 0, or why not now (-EAGAIN and the like: take entries first). */
static int send_one(struct apr *c)
{
	struct apr_sampling s = {.set = APR_SET_IGNORE_EOS | APR_SET_TEMPERATURE, .ignore_eos = 1};
	struct apr_sqe *sqe = apr_get_sqe(c);
	uint64_t space[16];
	struct apr_params p;
	uint32_t *ids = calloc(b.prompt, sizeof *ids), n = b.next + 1;
	int rc = sqe && ids ? 0 : -EAGAIN;

	for (uint32_t i = 0; ids && i < b.prompt; i++) /* the first ids tell prompts apart: nothing is in the prefix cache */
		ids[i] = (i < 4 ? n >> (8 * i) & 255 : i * 31 + n * 7) % b.n_vocab;
	apr_params_init(&p, space, sizeof space);
	apr_params_sampling(&p, &s);
	if (!rc)
		rc = apr_prep_generate_ids(c, sqe, ids, b.prompt, b.tokens);
	if (!rc)
		rc = apr_sqe_params(c, sqe, &p);
	if (!rc) {
		apr_sqe_user_data(sqe, n);
		b.next = n;
		rc = apr_submit(c) == 1 ? 0 : -EAGAIN;
	}
	free(ids);
	return rc;
}

static long status_number(const char *section, const char *key)
{
	char path[200], err[200], *text = NULL;
	struct apr_admin *a;
	long v = -1;

	if (apr_admin_path(b.d.sock, path, sizeof path) < 0 || apr_admin_open(&a, path, err, sizeof err))
		return -1;
	if (!apr_admin_call(a, APR_FRAME_STATUS, NULL, &text, 20000, err, sizeof err)) {
		json_t *j = json_loads(text, 0, NULL), *at = json_object_get(j, section);
		at = json_is_array(at) ? json_array_get(at, 0) : at;
		v = (long)json_integer_value(key ? json_object_get(at, key) : at);
		json_decref(j);
	}
	free(text);
	apr_admin_close(a);
	return v;
}

/* ---- throughput ------------------------------------------------------------------------------ */

static int throughput(uint32_t n)
{
	struct apr *c[CLIENTS_MAX] = {NULL};
	uint32_t left[CLIENTS_MAX], ended = 0, tokens = 0;
	double t0 = now(), last = 0, t;
	int failed = 0;

	for (uint32_t i = 0; i < n; i++) {
		c[i] = join(b.d.sock);
		left[i] = 1;
		failed |= !c[i] || send_one(c[i]);
	}
	while (ended < n && !failed) {
		for (uint32_t i = 0; i < n; i++) {
			const struct apr_cqe *e;
			while (!apr_peek_cqe(c[i], &e)) {
				bool final = apr_cqe_last(e);
				tokens += e->type == APR_CQE_TOKEN;
				failed |= final && e->res;
				apr_cqe_seen(c[i], e);
				if (final && left[i]) {
					left[i]--;
					failed |= send_one(c[i]) != 0;
				} else if (final) {
					ended++;
				}
			}
		}
		last = now();
		if (last - t0 > 900)
			failed = 1;
		nanosleep(&(struct timespec){0, 200000}, NULL);
	}
	t = last - t0;
	for (uint32_t i = 0; i < n; i++)
		apr_close(c[i]);
	if (failed) {
		fprintf(stderr, "throughput, %u clients: failed\n", n);
		return 1;
	}
	printf("{\"bench\":\"crowd\",\"what\":\"throughput\",\"backend\":\"%s\",\"clients\":%u,\"prompt\":%u,\"tokens\":%u,"
	       "\"generated\":%u,\"seconds\":%.3f,\"tok_s\":%.1f}\n", b.backend, n, b.prompt, b.tokens, tokens, t, tokens / t);
	fprintf(stderr, "%3u clients, %u in, %u out: %9.1f generated tokens a second over the whole time\n", n, b.prompt, b.tokens,
		tokens / t);
	fflush(stdout);
	return 0;
}

/* ---- fairness ---------------------------------------------------------------------------------- */

static void drain(struct apr *c)
{
	const struct apr_cqe *e;

	while (!apr_peek_cqe(c, &e))
		apr_cqe_seen(c, e);
}

/* B's request: ms to its first token; its other tokens are taken to the end. */
static double ask(struct apr *me, struct apr **others, uint32_t n)
{
	const struct apr_cqe *e;
	double t0 = now(), first = 0;

	if (send_one(me))
		return -1;
	for (bool ended = false; !ended;) {
		while (!apr_peek_cqe(me, &e)) {
			if (!first)
				first = now() - t0;
			ended |= apr_cqe_last(e);
			apr_cqe_seen(me, e);
		}
		for (uint32_t i = 0; i < n; i++)
			drain(others[i]);
		if (now() - t0 > 300)
			return -1;
		nanosleep(&(struct timespec){0, 100000}, NULL);
	}
	return 1e3 * first;
}

static int by_value(const void *x, const void *y)
{
	double p = *(const double *)x, q = *(const double *)y;

	return (p > q) - (p < q);
}

static int asks(const char *what, struct apr *me, struct apr **others, uint32_t n, double *median)
{
	double ms[B_ASKS], until;

	for (int i = 0; i < B_ASKS; i++) {
		until = now() + 1;
		ms[i] = ask(me, others, n);
		if (ms[i] < 0)
			return 1;
		while (now() < until) {
			for (uint32_t k = 0; k < n; k++)
				drain(others[k]);
			nanosleep(&(struct timespec){0, 500000}, NULL);
		}
	}
	qsort(ms, B_ASKS, sizeof ms[0], by_value);
	*median = ms[B_ASKS / 2];
	printf("{\"bench\":\"crowd\",\"what\":\"fairness\",\"beside\":\"%s\",\"backend\":\"%s\",\"prompt\":%u,\"first_ms\":%.3f,"
	       "\"first_ms_min\":%.3f,\"first_ms_max\":%.3f}\n", what, b.backend, b.prompt, *median, ms[0],
	       ms[B_ASKS - 1]);
	fprintf(stderr, "B's first token beside %-14s %9.2f ms (%.2f … %.2f)\n", what, *median, ms[0],
		ms[B_ASKS - 1]);
	fflush(stdout);
	return 0;
}

static int fairness(void)
{
	struct apr *a[A_SESSIONS] = {NULL}, *me = join(b.tenant);
	double alone = 0, crowd = 0;
	uint32_t sent = 0;
	int rc = !me || asks("nobody", me, a, 0, &alone);

	for (uint32_t i = 0; i < A_SESSIONS && !rc; i++) {
		a[i] = join(b.d.sock);
		rc = !a[i];
	}
	for (double until = now() + 60; !rc && sent < QUEUED && now() < until;) {
		for (uint32_t i = 0; i < A_SESSIONS && sent < QUEUED; i++)
			sent += !send_one(a[i]);
		for (uint32_t i = 0; i < A_SESSIONS; i++)
			drain(a[i]);
	}
	if (!rc)
		rc = sent < QUEUED || asks("1,000 queued", me, a, A_SESSIONS, &crowd);
	long queued = status_number("queued", NULL);
	if (!rc)
		fprintf(stderr, "%.2f times; %ld of A's still wait\n", crowd / alone, queued);
	else
		fprintf(stderr, "fairness: failed (%u sent)\n", sent);
	for (uint32_t i = 0; i < A_SESSIONS; i++)
		apr_close(a[i]);
	apr_close(me);
	return rc;
}

/* ---- the command line ---------------------------------------------------------------------------- */

static int start(void)
{
	char config[100], context[16];
	const char *args[] = {"-m", b.model, "-b", b.backend, "-c", context, "--config", config,
			      b.threads ? "-t" : NULL, b.threads, NULL};
	struct tiny_spec spec = {.n_layers = 2, .n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32};
	FILE *f;

	if (!b.model[0]) {
		snprintf(b.model, sizeof b.model, "%s/tiny.gguf", b.dir);
		if (apr_test_write_tiny_model(b.model, &spec))
			return -1;
	}
	snprintf(b.tenant, sizeof b.tenant, "%s/b.sock", b.dir);
	snprintf(config, sizeof config, "%s/aprd.conf", b.dir);
	snprintf(context, sizeof context, "%u", b.prompt + b.tokens + 64);
	f = fopen(config, "we");
	if (!f)
		return -1;
	fprintf(f, "listener \"%s\" { tenant = \"b\" }\n", b.tenant);
	fclose(f);
	if (test_aprd_start(&b.d, b.program, b.dir, args))
		return -1;
	b.n_vocab = (uint32_t)status_number("models", "n_vocab");
	return b.n_vocab > 0 && b.n_vocab < UINT32_MAX ? 0 : -1;
}

static int take_clients(const char *s)
{
	char *end;

	for (b.n_clients = 0; *s && b.n_clients < LIST_MAX; s = *end == ',' ? end + 1 : end) {
		unsigned long v = strtoul(s, &end, 10);
		if (end == s || !v || v > CLIENTS_MAX)
			return -1;
		b.clients[b.n_clients++] = (uint32_t)v;
	}
	return b.n_clients ? 0 : -1;
}

static bool wanted(int argc, char **argv, const char *part)
{
	for (int i = optind; i < argc; i++)
		if (!strcmp(argv[i], part))
			return true;
	return optind == argc;
}

int main(int argc, char **argv)
{
	char self[PATH_MAX];
	int o, rc = 0;

	while ((o = getopt(argc, argv, "b:m:t:p:n:c:")) != -1) {
		switch (o) {
		case 'b': b.backend = optarg; break;
		case 'm': snprintf(b.model, sizeof b.model, "%s", optarg); break;
		case 't': b.threads = optarg; break;
		case 'p': b.prompt = (uint32_t)strtoul(optarg, NULL, 10); break;
		case 'n': b.tokens = (uint32_t)strtoul(optarg, NULL, 10); break;
		case 'c':
			if (!take_clients(optarg))
				break;
			/* fall through */
		default:
			fprintf(stderr, "usage: see the head of bench/bench_crowd.c\n");
			return 2;
		}
	}
	snprintf(self, sizeof self, "%s", argv[0]);
	snprintf(b.program, sizeof b.program, "%s/../aprd", dirname(self));
	snprintf(b.dir, sizeof b.dir, "/tmp/apr-bench.XXXXXX");
	if (b.prompt < 8 || !b.tokens || !mkdtemp(b.dir) || start()) {
		fprintf(stderr, "bench_crowd: the daemon did not start\n");
		return 1;
	}
	for (uint32_t i = 0; i < b.n_clients && wanted(argc, argv, "throughput"); i++)
		rc |= throughput(b.clients[i]);
	if (wanted(argc, argv, "fairness"))
		rc |= fairness();
	if (test_aprd_stop(&b.d))
		rc = 1;
	char gone[PATH_MAX];
	snprintf(gone, sizeof gone, "rm -rf '%s'", b.dir);
	return system(gone) ? 1 : rc;
}
