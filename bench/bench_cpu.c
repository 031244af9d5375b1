/* SPDX-License-Identifier: MIT */
/*
 * Prefill and decode on the CPU, beside llama-bench on the same file, threads and
 * machine, runs interleaved.
 *
 * Timing windows. pp512: from the submit of one step with 512 prompt rows to its
 * last record (logits of the last row, one token drawn), fresh context, after a
 * warm-up. tg128: 128 decode steps after a prompt of one id, from the first decode
 * step's submit to the last record; greedy. llama-bench (-p 512 -n 128 -r 1) counts
 * the same work. Per round: our prefill, the read bandwidth, our decode, the read
 * bandwidth again (the mean of both counts), the peer's run; figures are medians
 * over rounds, ratios are medians of each round's ratio.
 *
 * Read bandwidth: the threads sum 1 GiB in huge pages, in pieces of 4 MiB; the
 * median of three passes. (In pieces of 16 KiB that alternate between threads it
 * is half as much: the hardware's prefetchers want long streams.)
 *
 * Share of bandwidth: bytes of weights read a token (all matrices; of an untied
 * embedding one row) times tokens a second, over the bandwidth of that round.
 *
 * JSON lines on stdout, a table on stderr.
 *   bench_cpu [-t THREADS] [-r ROUNDS] [--no-peer] [MODEL.gguf …]
 * The peer is $APR_LLAMA_BENCH, where set.
 */
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "engine/internal.h"
#include "kernels/cpu/pool.h"
#include "tests/harness.h"
#include "tests/support/drive.h"

#define PROMPT 512u
#define DECODE 128u
#define MAX_ROUNDS 50
#define BUF_BYTES (UINT64_C(1) << 30)

struct bar {
	const char *file;
	double prefill, decode, bandwidth;
};
static const struct bar bars[] = {{SMOLLM2, 1.8, 1.0, 0.9}, {GEMMA3, 1.3, 1.0, 0.9}};

struct round {
	double gbps, pp, tg, peer_pp, peer_tg;
};

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double median(double *v, int n)
{
	int i, j;

	for (i = 1; i < n; i++)
		for (j = i; j > 0 && v[j - 1] > v[j]; j--) {
			double t = v[j];

			v[j] = v[j - 1];
			v[j - 1] = t;
		}
	return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* ---- read bandwidth -------------------------------------------------------------- */

struct reading {
	const uint8_t *buf;
	uint64_t part;
	uint64_t sum[1024];
};

typedef uint64_t lanes __attribute__((vector_size(32)));

static void read_part(void *arg, uint32_t i, unsigned worker)
{
	struct reading *r = arg;
	const lanes *p = (const lanes *)(const void *)(r->buf + i * r->part);
	lanes a = {0}, b = {0}, c = {0}, d = {0};
	uint64_t k, n = r->part / sizeof(lanes);

	(void)worker;
	for (k = 0; k + 4 <= n; k += 4) {
		a += p[k];
		b += p[k + 1];
		c += p[k + 2];
		d += p[k + 3];
	}
	a += b + c + d;
	r->sum[i % 1024] += a[0] + a[1] + a[2] + a[3];
}

static double bandwidth(struct apr_pool *pool, const uint8_t *buf)
{
	struct reading r = {.buf = buf, .part = UINT64_C(1) << 22};
	double v[3];
	int pass;

	for (pass = 0; pass < 3; pass++) {
		double t = now();

		apr_pool_run(pool, (uint32_t)(BUF_BYTES / r.part), read_part, &r);
		v[pass] = (double)BUF_BYTES / (now() - t) / 1e9;
	}
	return median(v, 3);
}

/* ---- ours ------------------------------------------------------------------------ */

static uint32_t ids[PROMPT];

/* Runs one step of seq and hands its records out. */
static void step(struct apr_engine *e, struct apr_loaded *m, struct apr_seq *seq, uint32_t rows)
{
	struct apr_step_part part = {seq, rows};
	struct apr_record rec[4];
	bool more = true;
	int rc = apr_seq_reserve(seq, rows);

	if (!rc)
		rc = apr_step_submit(m, &part, 1);
	while (!rc && more) {
		int n = apr_step_poll(m, rec, 4, &more);

		if (n == -EAGAIN) {
			drive_wait(e);
			more = true;
		} else if (n < 0) {
			rc = n;
		}
	}
	if (rc) {
		fprintf(stderr, "bench: a step failed: %s\n", strerror(-rc));
		exit(1);
	}
}

static double run_ours(struct apr_engine *e, struct apr_loaded *m, uint32_t n_prompt, uint32_t n_decode)
{
	struct apr_seq_params p = {.kind = APR_SEQ_GENERATE, .ids = ids, .n_ids = n_prompt, .max_tokens = n_decode + 1,
	                           .sampling = drive_greedy(), .ignore_eos = true};
	struct apr_seq *seq;
	static uint64_t scope; /* a new one each time: nothing is found in the prefix cache */
	double t;
	uint32_t i;

	p.scope = ++scope;
	if (apr_seq_new(m, &p, &seq, NULL))
		exit(1);
	t = now();
	step(e, m, seq, n_prompt);
	if (n_decode) {
		t = now();
		for (i = 0; i < n_decode; i++)
			step(e, m, seq, 1);
	}
	t = now() - t;
	apr_seq_free(seq);
	return (n_decode ? n_decode : n_prompt) / t;
}

/* ---- the peer -------------------------------------------------------------------- */

static int run_peer(const char *bench, const char *model, unsigned threads, struct round *r)
{
	char cmd[4096];
	json_t *j;
	size_t i;
	FILE *f;

	snprintf(cmd, sizeof cmd, "'%s' -m '%s' -t %u -p %u -n %u -r 1 -ngl 0 -o json 2>/dev/null", bench, model, threads, PROMPT,
	         DECODE);
	f = popen(cmd, "r"); // NOLINT(cert-env33-c): the person who sets APR_LLAMA_BENCH runs this bench
	if (!f)
		return -errno;
	j = json_loadf(f, 0, NULL);
	if (pclose(f) || !json_is_array(j)) {
		json_decref(j);
		return -EIO;
	}
	for (i = 0; i < json_array_size(j); i++) {
		const json_t *o = json_array_get(j, i);
		double ts = json_number_value(json_object_get(o, "avg_ts"));

		*(json_integer_value(json_object_get(o, "n_gen")) ? &r->peer_tg : &r->peer_pp) = ts;
	}
	json_decref(j);
	return 0;
}

/* ---- reports --------------------------------------------------------------------- */

static double bytes_per_token(const struct apr_model *m)
{
	return (double)m->weight_bytes - (m->tied ? 0.0 : (double)m->tok_embd.bytes);
}

static double median_of(const struct round *r, int n, double (*get)(const struct round *, double), double arg)
{
	double v[MAX_ROUNDS];
	int i;

	for (i = 0; i < n; i++)
		v[i] = get(&r[i], arg);
	return median(v, n);
}

static double get_gbps(const struct round *r, double arg)
{
	(void)arg;
	return r->gbps;
}
static double get_pp(const struct round *r, double arg)
{
	(void)arg;
	return r->pp;
}
static double get_tg(const struct round *r, double arg)
{
	(void)arg;
	return r->tg;
}
static double get_peer_pp(const struct round *r, double arg)
{
	(void)arg;
	return r->peer_pp;
}
static double get_peer_tg(const struct round *r, double arg)
{
	(void)arg;
	return r->peer_tg;
}
static double get_pp_ratio(const struct round *r, double arg)
{
	(void)arg;
	return r->pp / r->peer_pp;
}
static double get_tg_ratio(const struct round *r, double arg)
{
	(void)arg;
	return r->tg / r->peer_tg;
}
static double get_share(const struct round *r, double bytes)
{
	return r->tg * bytes / 1e9 / r->gbps;
}

static void report(const char *file, const struct apr_loaded *m, const char *device, const struct round *r, int n, bool peer)
{
	double bytes = bytes_per_token(apr_loaded_model(m)), pp = median_of(r, n, get_pp, 0), tg = median_of(r, n, get_tg, 0);
	double share = median_of(r, n, get_share, bytes), gbps = median_of(r, n, get_gbps, 0);
	json_t *o = json_pack("{s:s, s:s, s:s, s:s, s:i, s:f, s:f, s:f, s:f, s:f}", "bench", "cpu", "model", file, "device", device,
	                      "route", "int16", "rounds", n, "pp512_tok_s", pp, "tg128_tok_s", tg, "read_gb_s", gbps,
	                      "bytes_per_token", bytes, "decode_share_of_bandwidth", share);
	const struct bar *bar = NULL;
	size_t i;

	for (i = 0; i < sizeof bars / sizeof *bars; i++)
		if (!strcmp(bars[i].file, file))
			bar = &bars[i];
	fprintf(stderr, "%-36s pp512 %7.1f tok/s  tg128 %6.1f tok/s  %4.0f %% of %.1f GB/s read", file, pp, tg, share * 100, gbps);
	if (bar)
		fprintf(stderr, " (bar %.0f %%)", bar->bandwidth * 100);
	fprintf(stderr, "\n");
	if (peer) {
		double rp = median_of(r, n, get_pp_ratio, 0), rt = median_of(r, n, get_tg_ratio, 0);
		double pp2 = median_of(r, n, get_peer_pp, 0), tg2 = median_of(r, n, get_peer_tg, 0);

		json_object_set_new(o, "peer", json_string("llama-bench"));
		json_object_set_new(o, "peer_pp512_tok_s", json_real(pp2));
		json_object_set_new(o, "peer_tg128_tok_s", json_real(tg2));
		json_object_set_new(o, "prefill_ratio", json_real(rp));
		json_object_set_new(o, "decode_ratio", json_real(rt));
		fprintf(stderr, "%-36s pp512 %7.1f tok/s  tg128 %6.1f tok/s  ratio: prefill %.2f", "  llama-bench", pp2, tg2, rp);
		if (bar)
			fprintf(stderr, " (bar %.1f), decode %.2f (bar %.1f)\n", bar->prefill, rt, bar->decode);
		else
			fprintf(stderr, ", decode %.2f\n", rt);
	}
	json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(5));
	printf("\n");
	fflush(stdout);
	json_decref(o);
}

static int bench_model(const char *path, unsigned threads, int rounds, const char *peer, struct apr_pool *pool, const uint8_t *buf)
{
	struct apr_engine_config cfg = drive_config(NULL, 2048, threads);
	const char *file = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
	struct round r[MAX_ROUNDS] = {0};
	struct apr_engine_info info;
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[256];
	uint32_t i;
	int k, rc = drive_open(&cfg, path, &e, &m, err, sizeof err);

	if (rc) {
		fprintf(stderr, "bench: %s: %s\n", path, err);
		return 1;
	}
	apr_engine_info(e, &info);
	for (i = 0; i < PROMPT; i++)
		ids[i] = 100 + i * 7919u % 40000u;
	run_ours(e, m, PROMPT, 0);
	run_ours(e, m, 1, 16);
	for (k = 0; k < rounds; k++) {
		r[k].pp = run_ours(e, m, PROMPT, 0);
		r[k].gbps = bandwidth(pool, buf);
		r[k].tg = run_ours(e, m, 1, DECODE);
		r[k].gbps = (r[k].gbps + bandwidth(pool, buf)) / 2;
		rc = peer ? run_peer(peer, path, threads, &r[k]) : 0;
		if (rc) {
			fprintf(stderr, "bench: %s: %s\n", peer, strerror(-rc));
			break;
		}
	}
	if (!rc)
		report(file, m, info.device, r, rounds, peer != NULL);
	drive_close(e, m);
	return rc != 0;
}

int main(int argc, char **argv)
{
	static const struct option longopts[] = {{"no-peer", no_argument, NULL, 'P'}, {NULL, 0, NULL, 0}};
	const char *peer = getenv("APR_LLAMA_BENCH"), *def;
	int given;
	unsigned threads = 2;
	int rounds = 5, c, rc = 0;
	struct apr_pool *pool;
	uint8_t *buf;
	size_t i;

	while ((c = getopt_long(argc, argv, "t:r:", longopts, NULL)) != -1) {
		if (c == 't')
			threads = (unsigned)strtoul(optarg, NULL, 10);
		else if (c == 'r')
			rounds = (int)strtol(optarg, NULL, 10);
		else if (c == 'P')
			peer = NULL;
		else
			return 2;
	}
	if (rounds < 1 || rounds > MAX_ROUNDS || threads < 1 || threads > 1024) {
		fprintf(stderr, "bench: rounds 1 to %d, threads 1 to 1024\n", MAX_ROUNDS);
		return 2;
	}
	if (!peer)
		fprintf(stderr, "bench: APR_LLAMA_BENCH is not set: no peer beside these figures\n");
	buf = mmap(NULL, BUF_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (buf == MAP_FAILED || apr_pool_new(&pool, threads)) {
		fprintf(stderr, "bench: no memory or threads\n");
		return 1;
	}
	(void)madvise(buf, BUF_BYTES, MADV_HUGEPAGE);
	memset(buf, 1, BUF_BYTES);
	given = argc - optind;
	for (; optind < argc; optind++)
		rc |= bench_model(argv[optind], threads, rounds, peer, pool, buf);
	for (i = 0; !given && i < sizeof bars / sizeof *bars; i++) {
		def = apr_test_model(bars[i].file);
		if (!def)
			fprintf(stderr, "bench: %s is not there: scripts/get-model fetches it\n", bars[i].file);
		else
			rc |= bench_model(def, threads, rounds, peer, pool, buf);
	}
	apr_pool_free(pool);
	munmap(buf, BUF_BYTES);
	return rc;
}
