/* SPDX-License-Identifier: MIT */
/*
 * What a client sees of a GPU: aprd on random models of real shapes, through its
 * rings. JSON lines on stdout, the same in words on stderr.
 *
 *   bench_gpu [-q] [-b BACKEND] [-d DIR] [-m SHAPE:MIX]... [PART]...
 *     -q    fewer repetitions
 *     -b    default cuda; another shows that the bench itself is right
 *     -d    where models lie or are put (SHAPE-MIX.gguf); default: made in /tmp, removed
 *     -m    default llama-8b:Q4_K_M, llama-8b:Q8_0, qwen2-1.5b:Q4_K_M
 *     PART  start decode batch prefill gap eager routes peer; default: all
 *
 * Windows. Start: from fork to READY=1 on the notify socket, the file in the page
 * cache, the algorithm table there (the first start, which may make it, is a line of
 * its own). Decode: from a request's first token to its last as the client loads them,
 * greedy, end ids ignored, 128 tokens. Batch: from when the last of the requests has
 * its first token to when the first has its last. First token: from apr_submit to the
 * token's entry, ids that no earlier request had. The GPU's own time of the same
 * request: two events put around its graphs inside the daemon (tests/support/watch.h).
 * Everybody polls: the daemon by --poll always, the client by never sleeping.
 * The peer (APR_LLAMA_BENCH) runs on the same file when the daemon has ended.
 * Exit: 0; 1 where something could not be measured; 77 where there is no device.
 */
#include <apr/client.h>
#include <errno.h>
#include <jansson.h>
#include <libgen.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests/support/aprd.h"
#include "tests/support/shape_model.h"
#include "tests/support/watch.h"

enum { MAX_FLOWS = 64, MAX_TOKENS = 512, MAX_IDS = 8192, MAX_SAMPLES = 64, MAX_FILES = 8 };

struct flow { /* one request and when its tokens came */
	struct apr *c;
	uint32_t n_prompt, max_tokens, n, id; /* id: whose tokens; requests of equal id share their prompt */
	double sent, at[MAX_TOKENS];
	bool ended;
	int res;
};

struct series {
	double v[MAX_SAMPLES];
	unsigned n;
};

static struct { /* the file and daemon being measured */
	char home[PATH_MAX], dir[64], model[PATH_MAX], name[64], route[24];
	struct test_aprd d;
	struct watch watch;
	bool watching;
	unsigned runs;
	struct apr *c[MAX_FLOWS];
	unsigned n_clients;
	const char *backend;
	bool absent, failed; /* no device here; something that should have been measured was not */
} b = {.runs = 5, .backend = "cuda"};

static struct flow flows[MAX_FLOWS];
static uint32_t next_id = 1;

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- figures -------------------------------------------------------------------------- */

static void add(struct series *s, double v)
{
	if (s->n < MAX_SAMPLES)
		s->v[s->n++] = v;
}

static int by_value(const void *x, const void *y)
{
	double p = *(const double *)x, q = *(const double *)y;

	return (p > q) - (p < q);
}

static double median(struct series *s)
{
	qsort(s->v, s->n, sizeof *s->v, by_value);
	return s->n ? s->n % 2 ? s->v[s->n / 2] : (s->v[s->n / 2 - 1] + s->v[s->n / 2]) / 2 : 0;
}

/* One line; fmt adds fields to it ("\"rows\":%d"). Returns the median. */
__attribute__((format(printf, 4, 5))) static double line(const char *what, const char *unit, struct series *s,
                                                         const char *fmt, ...)
{
	double m = median(s);
	char more[300];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(more, sizeof more, fmt, ap);
	va_end(ap);
	if (!s->n) {
		fprintf(stderr, "%-16s %-22s no result (%s)\n", b.name, what, more);
		return 0;
	}
	printf("{\"bench\":\"gpu\",\"what\":\"%s\",\"file\":\"%s\",\"route\":\"%s\"%s%s,\"n\":%u,\"median\":%.4g,\"min\":%.4g,"
	       "\"max\":%.4g,\"unit\":\"%s\"}\n", what, b.name, b.route, *more ? "," : "", more, s->n, m, s->v[0], s->v[s->n - 1],
	       unit);
	fflush(stdout);
	fprintf(stderr, "%-18s %-8s %-24s %10.4g %-6s (%.4g … %.4g) %s\n", b.name, b.route, what, m, unit, s->v[0],
	        s->v[s->n - 1], more);
	return m;
}

static double single(const char *what, const char *unit, double v, const char *more)
{
	struct series s = {.v = {v}, .n = 1};

	return line(what, unit, &s, "%s", more);
}

/* ---- the daemon ------------------------------------------------------------------------- */

static int join(void)
{
	struct apr_opts o = APR_OPTS_INIT;
	char err[200];

	o.path = b.d.sock;
	o.spin_us = 1000000;
	if (b.n_clients == MAX_FLOWS || apr_connect(&b.c[b.n_clients], &o, err, sizeof err)) {
		fprintf(stderr, "bench_gpu: %s\n", err);
		return -1;
	}
	b.n_clients++;
	return 0;
}

static void read_status(void)
{
	char *text = NULL;
	json_t *j, *m;

	snprintf(b.route, sizeof b.route, "?");
	if (apr_status(b.c[0], &text))
		return;
	j = json_loads(text, 0, NULL);
	m = json_array_get(json_object_get(j, "models"), 0);
	if (json_is_string(json_object_get(m, "route")))
		snprintf(b.route, sizeof b.route, "%s", json_string_value(json_object_get(m, "route")));
	json_decref(j);
	free(text);
}

/* Nothing can be measured where the backend says that it has no device. */
static void note_failure(void)
{
	char text[4096] = "";
	FILE *f = fopen(b.d.log, "r");

	if (f) {
		text[fread(text, 1, sizeof text - 1, f)] = 0;
		fclose(f);
	}
	b.absent |= strstr(text, "backend cuda: ") != NULL;
	b.failed = true;
}

/* With two more arguments, which may be NULL. The seconds it took; negative: it did not start. */
static double start(const char *option, const char *value)
{
	const char *args[] = {"-m", b.model, "-b", b.backend, "-c", "9216", "--poll", "always", option, value, NULL};
	char program[PATH_MAX + 8];
	double t0 = now();

	snprintf(program, sizeof program, "%s/aprd", b.home);
	if (test_aprd_start(&b.d, program, b.dir, args)) {
		if (!option)
			note_failure();
		return -1;
	}
	t0 = now() - t0;
	b.n_clients = 0;
	if (join()) {
		test_aprd_stop(&b.d);
		return -1;
	}
	read_status();
	return t0;
}

static void stop(void)
{
	while (b.n_clients)
		apr_close(b.c[--b.n_clients]);
	if (test_aprd_stop(&b.d))
		fprintf(stderr, "bench_gpu: aprd did not end as it should\n");
}

/* ---- requests ------------------------------------------------------------------------------ */

static int send_flow(struct flow *f, uint64_t user_data)
{
	static uint32_t ids[MAX_IDS];
	struct apr_sampling s = {.set = APR_SET_IGNORE_EOS | APR_SET_TEMPERATURE, .ignore_eos = 1};
	struct apr_sqe *q = apr_get_sqe(f->c);
	uint64_t space[16];
	struct apr_params p;

	if (!q)
		return -EBUSY;
	for (uint32_t i = 0; i < f->n_prompt; i++)
		ids[i] = 300 + (uint32_t)((f->id * UINT64_C(0x9e3779b97f4a7c15) + i * UINT64_C(0xbf58476d1ce4e5b9)) >> 40) % 3700;
	f->n = 0;
	f->ended = false;
	apr_params_init(&p, space, sizeof space);
	apr_params_sampling(&p, &s);
	f->res = apr_prep_generate_ids(f->c, q, ids, f->n_prompt, f->max_tokens);
	if (!f->res)
		f->res = apr_sqe_params(f->c, q, &p);
	apr_sqe_user_data(q, user_data);
	f->sent = now();
	return f->res ? f->res : apr_submit(f->c) < 1 ? -EPIPE : 0;
}

/* What has come for the flow's client; 1 where a request ended. */
static int take(struct apr *c)
{
	const struct apr_cqe *q;
	int ended = 0;

	while (!apr_peek_cqe(c, &q)) {
		struct flow *f = &flows[q->user_data];

		if (q->type == APR_CQE_TOKEN && f->n < MAX_TOKENS)
			f->at[f->n++] = now();
		if (q->type == APR_CQE_FINAL) {
			f->ended = true;
			f->res = q->res;
			ended++;
		}
		apr_cqe_seen(c, q);
	}
	return ended;
}

/* flows[0 … n - 1] at once, each on its client; 0 where all went well. */
static int run_flows(unsigned n)
{
	double give_up = now() + 60;
	unsigned ended = 0;
	int bad = 0;

	for (unsigned i = 0; i < n; i++)
		bad |= send_flow(&flows[i], i);
	while (ended < n && !bad && now() < give_up)
		for (unsigned i = 0; i < b.n_clients; i++)
			ended += (unsigned)take(b.c[i]);
	for (unsigned i = 0; i < n; i++)
		bad |= flows[i].res || flows[i].n != flows[i].max_tokens;
	if (bad || ended < n) {
		fprintf(stderr, "bench_gpu: a request failed: %s\n", apr_strerror(flows[0].res));
		b.failed = true;
	}
	return bad || ended < n ? -1 : 0;
}

static struct flow flow(unsigned client, uint32_t n_prompt, uint32_t n)
{
	return (struct flow){.c = b.c[client], .n_prompt = n_prompt, .max_tokens = n, .id = next_id++};
}

/* ---- parts ------------------------------------------------------------------------------------ */

/* The median microseconds of a step at that context */
static double decode(uint32_t ctx, unsigned runs, const char *what)
{
	struct series rate = {.n = 0}, step = {.n = 0};

	for (unsigned r = 0; r <= runs; r++) {
		flows[0] = flow(0, ctx, 128);
		if (run_flows(1))
			return 0;
		if (!r)
			continue;
		add(&rate, 127 / (flows[0].at[127] - flows[0].at[0]));
		for (unsigned i = 1; i < 128; i += 16) /* a sample of the gaps, for the spread */
			add(&step, (flows[0].at[i] - flows[0].at[i - 1]) * 1e6);
	}
	line(what, "tok/s", &rate, "\"rows\":1,\"ctx\":%u", ctx);
	return line("step", "µs", &step, "\"rows\":1,\"ctx\":%u", ctx);
}

static double batch(unsigned n, unsigned runs)
{
	struct series step = {.n = 0}, rate = {.n = 0};

	while (b.n_clients < n && !join())
		;
	for (unsigned r = 0; r <= runs && b.n_clients >= n; r++) {
		double from = 0, to = 1e30;
		unsigned k = 0;

		for (unsigned i = 0; i < n; i++)
			flows[i] = flow(i, 64, 128);
		if (run_flows(n))
			return 0;
		for (unsigned i = 0; i < n; i++) {
			from = flows[i].at[0] > from ? flows[i].at[0] : from;
			to = flows[i].at[127] < to ? flows[i].at[127] : to;
		}
		for (unsigned i = 0; i < 128; i++) /* steps that the first request took part in */
			k += flows[0].at[i] > from && flows[0].at[i] <= to;
		if (!r || k < 2)
			continue;
		add(&step, (to - from) / k * 1e6);
		add(&rate, n * k / (to - from));
	}
	line("batch decode", "tok/s", &rate, "\"rows\":%u,\"ctx\":128", n);
	return line("batch step", "µs", &step, "\"rows\":%u,\"ctx\":128", n);
}

static void batches(void)
{
	double one = batch(1, b.runs > 2 ? 3 : 1), sixteen = batch(16, b.runs > 2 ? 3 : 1);
	struct series whole = {.n = 0};

	if (one > 0 && sixteen > 0)
		single("batch 16 / batch 1", "×", sixteen / one, "\"ctx\":128");
	batch(64, 1);
	for (unsigned r = 0; r < (b.runs > 2 ? 3 : 1); r++) {
		double t0 = now(), end = 0;

		for (unsigned i = 0; i < 16; i++)
			flows[i] = flow(i, 512, 128);
		if (b.n_clients < 16 || run_flows(16))
			return;
		for (unsigned i = 0; i < 16; i++)
			end = flows[i].at[127] > end ? flows[i].at[127] : end;
		add(&whole, 16 * 128 / (end - t0));
	}
	line("16 clients, 512 in, 128 out", "tok/s", &whole, "\"clients\":16");
}

/* First tokens of prompts of n ids; with a watch also the GPU's own time and the rest. */
static double first_token(uint32_t n, unsigned runs, const char *what)
{
	struct series all = {.n = 0}, gpu = {.n = 0}, rest = {.n = 0};

	for (unsigned r = 0; r <= runs; r++) {
		double ms;

		flows[0] = flow(0, n, 1);
		if (b.watching && watch_order(&b.watch, WATCH_ARM))
			return 0;
		if (run_flows(1))
			return 0;
		if (b.watching && watch_order(&b.watch, WATCH_SPAN))
			return 0;
		if (!r)
			continue;
		ms = (flows[0].at[0] - flows[0].sent) * 1e3;
		add(&all, ms);
		if (b.watching) {
			add(&gpu, (double)b.watch.page->span_us * 1e-3);
			add(&rest, ms * 1e3 - (double)b.watch.page->span_us);
		}
	}
	if (b.watching) {
		line("first token, GPU's own", "ms", &gpu, "\"prompt\":%u", n);
		return line("first token less the GPU's own", "µs", &rest, "\"prompt\":%u", n);
	}
	return line(what, "ms", &all, "\"prompt\":%u", n);
}

static void prefix(void)
{
	struct series share = {.n = 0};

	for (unsigned r = 0; r < b.runs; r++) {
		double cold;

		flows[0] = flow(0, 4160, 1);
		if (run_flows(1))
			return;
		cold = flows[0].at[0] - flows[0].sent;
		if (run_flows(1))
			return;
		add(&share, (flows[0].at[0] - flows[0].sent) / cold * 100);
	}
	line("second request, shared 4k prefix", "%", &share, "\"prompt\":4160");
}

static void prefill(void)
{
	static const uint32_t n[] = {128, 512, 2048};

	for (unsigned i = 0; i < 3; i++)
		first_token(n[i], b.runs, "first token");
	prefix();
}

/* The longest gap of a running stream while prompts of 8k arrive */
static void gap(void)
{
	struct series worst = {.n = 0}, usual = {.n = 0};

	while (b.n_clients < 4 && !join())
		;
	for (unsigned r = 0; r < (b.runs > 2 ? 3 : 1) && b.n_clients >= 4; r++) {
		double longest = 0;

		flows[0] = flow(0, 64, MAX_TOKENS);
		for (unsigned i = 1; i < 4; i++)
			flows[i] = flow(i, MAX_IDS, 1);
		if (run_flows(4))
			return;
		for (unsigned i = 1; i < MAX_TOKENS; i++) {
			double g = (flows[0].at[i] - flows[0].at[i - 1]) * 1e3;

			longest = g > longest ? g : longest;
			if (i % 64 == 0)
				add(&usual, g);
		}
		add(&worst, longest);
	}
	line("longest gap while 8k prompts arrive", "ms", &worst, "\"prompts\":3");
	line("gaps meanwhile", "ms", &usual, "\"prompts\":3");
}

/* aprd says so where it does not know the option. */
static bool knows(const char *option)
{
	char command[PATH_MAX + 100];

	snprintf(command, sizeof command, "'%s/aprd' --help 2>&1 | grep -q -e '%s'", b.home, option);
	return system(command) == 0;
}

static void eager(void)
{
	if (!knows("--no-graphs")) {
		fprintf(stderr, "bench_gpu: SKIPPED: eager: this aprd has no --no-graphs\n");
		return;
	}
	for (int k = 0; k < 2; k++) {
		if (start(k ? "--no-graphs" : NULL, NULL) < 0)
			return;
		decode(128, 2, k ? "decode, eager" : "decode, captured");
		first_token(128, b.runs, k ? "first token, eager" : "first token, captured");
		first_token(512, b.runs, k ? "first token, eager" : "first token, captured");
		stop();
	}
}

static void routes(void)
{
	static const char *const name[] = {"fp8", "fp8-fast", "quant", "fused", "f32"};

	for (unsigned i = 0; i < sizeof name / sizeof *name; i++) {
		if (start("--route", name[i]) < 0) {
			fprintf(stderr, "bench_gpu: SKIPPED: route %s\n", name[i]);
			continue;
		}
		first_token(128, b.runs, "first token");
		first_token(512, b.runs, "first token");
		first_token(2048, b.runs, "first token");
		stop();
	}
}

static void starts(void)
{
	struct series s = {.n = 0};
	double t = start(NULL, NULL);

	if (t < 0)
		return;
	stop();
	single("first start to READY", "s", t, "");
	for (unsigned r = 0; r < (b.runs > 2 ? 3 : 1); r++) {
		t = start(NULL, NULL);
		if (t < 0)
			return;
		stop();
		add(&s, t);
	}
	line("start to READY", "s", &s, "\"page_cache\":true");
}

/* ---- the GPU's own time -------------------------------------------------------------------------- */

static void watched_prefill(void)
{
	static const uint32_t n[] = {1, 128, 512, 2048};
	char library[PATH_MAX + 40];

	snprintf(library, sizeof library, "%s/libapr-watch-driver.so", b.home);
	if (access(library, F_OK)) {
		fprintf(stderr, "bench_gpu: SKIPPED: the GPU's own time: no %s\n", library);
		return;
	}
	if (watch_open(&b.watch, b.dir, library))
		return;
	if (start(NULL, NULL) >= 0) {
		b.watching = watch_state(&b.watch) == WATCH_ON;
		for (unsigned i = 0; i < 4 && b.watching; i++)
			first_token(n[i], b.runs, "");
		if (!b.watching)
			fprintf(stderr, "bench_gpu: SKIPPED: the GPU's own time: no CUPTI\n");
		b.watching = false;
		stop();
	}
	watch_close(&b.watch);
}

/* ---- the peer ---------------------------------------------------------------------------------------- */

static void peer_line(const char *text)
{
	json_t *j = json_loads(text, 0, NULL), *ts = json_object_get(j, "samples_ts");
	json_int_t prompt = json_integer_value(json_object_get(j, "n_prompt"));
	json_int_t gen = json_integer_value(json_object_get(j, "n_gen"));
	json_int_t depth = json_integer_value(json_object_get(j, "n_depth"));
	struct series s = {.n = 0};

	for (size_t i = prompt ? 1 : 0; i < json_array_size(ts); i++) { /* a prompt's first sample warms up */
		double rate = json_number_value(json_array_get(ts, i));

		add(&s, prompt ? (double)prompt / rate * 1e3 : rate);
	}
	if (prompt)
		line("peer: prompt", "ms", &s, "\"prompt\":%d", (int)prompt);
	else if (gen)
		line("peer: decode", "tok/s", &s, "\"rows\":1,\"ctx\":%d", (int)depth);
	json_decref(j);
}

static void peer(void)
{
	static const char *const args[] = {"-p 128,512,2048 -n 128 -r 5", "-p 0 -n 128 -d 4096 -r 3"};
	const char *program = getenv("APR_LLAMA_BENCH");
	char command[2 * PATH_MAX + 100], text[8192];

	if (!program || !*program) {
		fprintf(stderr, "bench_gpu: SKIPPED: the peer: APR_LLAMA_BENCH names none\n");
		return;
	}
	snprintf(b.route, sizeof b.route, "llama.cpp");
	for (unsigned i = 0; i < 2; i++) {
		FILE *f;

		snprintf(command, sizeof command, "'%s' -m '%s' -ngl 99 -fa 1 %s -o jsonl 2>/dev/null", program, b.model, args[i]);
		f = popen(command, "r");
		while (f && fgets(text, sizeof text, f))
			peer_line(text);
		if (f && pclose(f))
			fprintf(stderr, "bench_gpu: the peer failed on %s\n", b.name);
	}
}

/* ---- files and parts --------------------------------------------------------------------------------------- */

static bool wanted(char **parts, const char *part)
{
	if (!*parts)
		return true;
	for (; *parts; parts++)
		if (!strcmp(*parts, part))
			return true;
	return false;
}

/* Makes b.model unless a file of its size is there. */
static int provide(const char *shape, const char *mix, const char *dir)
{
	struct stat st;
	double t0 = now();
	int e;

	snprintf(b.name, sizeof b.name, "%s-%s", shape, mix);
	snprintf(b.model, sizeof b.model, "%s/%s.gguf", dir, b.name);
	snprintf(b.route, sizeof b.route, "-");
	if (!stat(b.model, &st) && (uint64_t)st.st_size >= apr_test_shape_bytes(shape, mix))
		return 0;
	e = apr_test_write_shape(b.model, shape, mix, 0, 7);
	if (e)
		fprintf(stderr, "bench_gpu: %s: %s\n", b.model, strerror(-e));
	else if (now() - t0 > 0.5)
		single("random model written", "s", now() - t0, "");
	return e;
}

static void measure(char **parts, bool whole)
{
	if (wanted(parts, "start"))
		starts();
	if ((wanted(parts, "decode") || wanted(parts, "batch") || wanted(parts, "prefill") || wanted(parts, "gap")) &&
	    start(NULL, NULL) >= 0) {
		if (wanted(parts, "decode")) {
			decode(128, b.runs, "decode");
			decode(1024, b.runs, "decode");
			decode(4096, b.runs, "decode");
		}
		if (wanted(parts, "batch"))
			batches();
		if (wanted(parts, "prefill"))
			prefill();
		if (wanted(parts, "gap"))
			gap();
		stop();
	}
	if (wanted(parts, "prefill"))
		watched_prefill();
	if (whole && wanted(parts, "eager"))
		eager();
	if (whole && wanted(parts, "routes"))
		routes();
	if (wanted(parts, "peer"))
		peer();
}

/* Is there a device? Asked with a small model, before gigabytes are written. */
static void probe(void)
{
	if (!provide("small", "Q8_0", b.dir) && start(NULL, NULL) >= 0)
		stop();
}

static int usage(void)
{
	fprintf(stderr, "usage: bench_gpu [-q] [-b BACKEND] [-d DIR] [-m SHAPE:MIX]... [PART]...\n"
	                "parts: start decode batch prefill gap eager routes peer\n");
	return 2;
}

int main(int argc, char **argv)
{
	const char *file[MAX_FILES] = {"llama-8b:Q4_K_M", "llama-8b:Q8_0", "qwen2-1.5b:Q4_K_M"}, *dir = NULL;
	char self[PATH_MAX], command[100], shape[40], mix[16];
	unsigned n = 3, given = 0;
	int o, rc = 0;

	while ((o = getopt(argc, argv, "qb:d:m:")) != -1)
		if (o == 'q')
			b.runs = 2;
		else if (o == 'b')
			b.backend = optarg;
		else if (o == 'd')
			dir = optarg;
		else if (o == 'm' && given < MAX_FILES)
			file[given++] = optarg;
		else
			return usage();
	n = given ? given : n;
	snprintf(b.dir, sizeof b.dir, "/tmp/bench_gpu.XXXXXX");
	if (!realpath("/proc/self/exe", self) || !mkdtemp(b.dir)) {
		perror("bench_gpu");
		return 1;
	}
	snprintf(b.home, sizeof b.home, "%s", dirname(dirname(self)));
	probe();
	for (unsigned i = 0; i < n && !rc && !b.absent; i++) {
		if (sscanf(file[i], "%39[^:]:%15s", shape, mix) != 2 || !apr_test_shape_bytes(shape, mix)) {
			fprintf(stderr, "bench_gpu: %s: not a SHAPE:MIX\n", file[i]);
			rc = 2;
		} else if (provide(shape, mix, dir ? dir : b.dir)) {
			rc = 1;
		} else {
			measure(argv + optind, i == 0);
			if (!dir)
				unlink(b.model);
		}
	}
	snprintf(command, sizeof command, "rm -rf %s", b.dir);
	if (system(command))
		fprintf(stderr, "bench_gpu: %s stays\n", b.dir);
	return b.absent ? 77 : rc ? rc : b.failed;
}
