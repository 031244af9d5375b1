/* SPDX-License-Identifier: MIT */
/*
 * The daemon's scheduling code (daemon/batch.c, fair.c, pace.c: the same objects) on a
 * virtual clock: how long first tokens and gaps take for up to 100,000 clients, and
 * what making a step costs.
 *
 *   bench_simulate [--times FILE] [--clients N[,N...]] [--rate R[,R...]] [--seconds S]
 *                  [--pages N] [--step-ms MS] [--seed S] [--svg FILE]
 *   bench_simulate --cost
 *
 * --times: what a step takes, as `aprctl --json models` prints it (models[0].pace), so
 * a model measured somewhere can be simulated anywhere. Without it: H200, 8B Q4_K_M
 * (docs/scheduling.md says where the figures come from).
 *
 * The trace is of the kind that published ones of LLM services show (BurstGPT, Azure's
 * LLM inference traces): arrivals in bursts, a Gamma-distributed gap with a coefficient of
 * variation above 1; lengths heavy-tailed, log-normal with a Pareto tail; a few clients
 * ask most (Zipf). Each client is an identity. One JSON line a run on stdout; a table on
 * stderr; --svg draws first token and gap over the load.
 *
 * Timing: everything but --cost is virtual time, so this machine's speed is no part of
 * it. --cost is real time of batch_make, from call to return.
 */
#include "tests/support/virtual_engine.h"
#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RUNS_MAX = 64, CHUNK = 2048 };

/* ---- what a step takes ----------------------------------------------------------------------- */

struct times {
	uint32_t n[2], rows[2][32]; /* 0 decode, 1 prefill */
	double us[2][32];
};

/* docs/gpu.md: decode at 1 and 16 sequences, prompts of 128 and 1,920 rows; at 64 and 2,048 those lines' continuation. */
static void h200_8b(struct times *t)
{
	static const struct times measured = {
		{ 3, 3 },
		{ { 1, 16, 64 }, { 128, 1920, 2048 } },
		{ { 2433, 4600, 11500 }, { 7600, 67500, 71800 } },
	};

	*t = measured;
}

/* Between two points a straight line; below the first its time (a GPU's bucket); above the last by rows. */
static double time_us(const struct times *t, int kind, uint32_t rows)
{
	uint32_t n = t->n[kind], i = 0;
	const uint32_t *r = t->rows[kind];
	const double *us = t->us[kind];

	if (!rows || !n)
		return 0;
	while (i < n && r[i] < rows)
		i++;
	if (i == 0)
		return us[0];
	if (i == n)
		return us[n - 1] * rows / r[n - 1];
	return us[i - 1] + (us[i] - us[i - 1]) * (rows - r[i - 1]) / (r[i] - r[i - 1]);
}

static double step_ns(void *arg, uint32_t decode, uint32_t prefill)
{
	return 1e3 * (time_us(arg, 0, decode) + time_us(arg, 1, prefill));
}

static int read_times(struct times *t, const char *path)
{
	static const char *const key[2] = { "decode", "prefill" };
	json_t *j = json_load_file(path, 0, NULL);
	const json_t *pace = json_object_get(json_array_get(json_object_get(j, "models"), 0), "pace");

	memset(t, 0, sizeof(*t));
	for (int k = 0; k < 2; k++) {
		json_t *list = json_object_get(pace ? pace : j, key[k]), *row;
		size_t i;
		json_array_foreach (list, i, row) {
			if (t->n[k] == 32)
				break;
			t->rows[k][t->n[k]] = (uint32_t)json_integer_value(json_array_get(row, 0));
			t->us[k][t->n[k]++] = json_number_value(json_array_get(row, 1));
		}
	}
	json_decref(j);
	return t->n[0] && t->n[1] ? 0 : -EINVAL;
}

/* ---- chance -------------------------------------------------------------------------------------- */

static uint64_t state;

static double uniform(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return ((double)(state >> 11) + 0.5) / 9007199254740992.0;
}

static double normal(void)
{
	return sqrt(-2 * log(uniform())) * cos(2 * M_PI * uniform());
}

/* Marsaglia and Tsang; shape below 1 by the usual power. */
static double gamma_of(double shape)
{
	if (shape < 1)
		return gamma_of(shape + 1) * pow(uniform(), 1 / shape);
	double d = shape - 1.0 / 3, c = 1 / sqrt(9 * d);
	for (;;) {
		double x = normal(), v = 1 + c * x;
		if (v <= 0)
			continue;
		v = v * v * v;
		if (log(uniform()) < 0.5 * x * x + d - d * v + d * log(v))
			return d * v;
	}
}

static uint32_t length(double median, double sigma, uint32_t most)
{
	double v = exp(log(median) + sigma * normal());

	if (uniform() < 0.03) /* the tail */
		v = median * 4 * pow(uniform(), -1 / 1.3);
	return v < 1 ? 1 : v > most ? most : (uint32_t)v;
}

/* ---- one run -------------------------------------------------------------------------------------- */

struct sim {
	uint32_t clients, pages;
	double rate, seconds, step_ms;
	struct times *times;
	double *first, *gap; /* ms */
	size_t n_first, n_gap, cap_first, cap_gap;
	uint32_t sent, done, failed;
	uint64_t queue_most;
};

struct figures {
	double rate, first50, first99, gap50, gap99, gap_most, busy, tokens_s, light99;
};

static void add(double **v, size_t *n, size_t *cap, double x)
{
	if (*n == *cap) {
		*cap = *cap ? *cap * 2 : 4096;
		*v = reallocarray(*v, *cap, sizeof(double));
		if (!*v)
			abort();
	}
	(*v)[(*n)++] = x;
}

static void on_token(struct vengine *v, struct vrun *run, uint64_t gap)
{
	struct sim *s = v->user;

	if (gap)
		add(&s->gap, &s->n_gap, &s->cap_gap, (double)gap * 1e-6);
	else
		add(&s->first, &s->n_first, &s->cap_first, (double)(v->now - run->r->arrived) * 1e-6);
}

static void on_end(struct vengine *v, struct vreq *r)
{
	struct sim *s = v->user;

	s->done += r->result == 0;
	s->failed += r->result != 0;
	r->user = s; /* may be freed: nothing of the batch names it any more once this step is over */
}

static int up(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static double quantile(double *v, size_t n, double q)
{
	return n ? v[(size_t)(q * (double)(n - 1))] : 0;
}

/* Which client: Zipf with exponent 1, by inversion of its continuous form. */
static uint32_t who(uint32_t clients)
{
	double x = exp(uniform() * log((double)clients + 1)) - 1;

	return x >= clients ? clients - 1 : (uint32_t)x;
}

static struct vreq *arrival(const struct sim *s)
{
	struct vreq *r = calloc(1, sizeof(*r));
	struct vrun *run = calloc(1, sizeof(*run));

	if (!r || !run)
		abort();
	r->run = run;
	r->identity = who(s->clients);
	r->session = 1;
	r->weight = 1;
	r->q.n = 1;
	r->q.cls = 1;
	r->q.prompt = length(400, 1.1, 7000);
	r->tokens = length(130, 0.9, 1000);
	return r;
}

static void run_sim(struct sim *s, struct figures *f)
{
	static struct vengine v;
	uint32_t n = (uint32_t)(s->rate * s->seconds), next = 0;
	struct vreq **all = calloc(n, sizeof(struct vreq *));
	double at = 0, *when = calloc(n, sizeof(double));
	const double shape = 0.25; /* gaps vary by twice their mean */

	if (!all || !when || vengine_init(&v, s->pages, CHUNK + BATCH_SLOTS))
		abort();
	v.step_ns = step_ns;
	v.step_arg = s->times;
	v.b.pace.budget_ns = (uint64_t)(s->step_ms * 1e6);
	v.b.pace.first = v.b.pace.least = 64;
	v.user = s;
	v.on_token = on_token;
	v.on_end = on_end;
	for (uint32_t i = 0; i < n; i++) {
		at += gamma_of(shape) / shape / s->rate;
		when[i] = at * 1e9;
		all[i] = arrival(s);
	}
	while (next < n || v.b.n_runs || v.b.waiting || v.b.out) {
		for (; next < n && when[next] <= (double)v.now; next++) {
			s->sent++;
			if (vengine_submit(&v, all[next]))
				s->failed++;
		}
		s->queue_most = v.b.waiting > s->queue_most ? v.b.waiting : s->queue_most;
		if (v.now > (uint64_t)(s->seconds * 1.25e9)) /* what still waits then is counted as waiting so long */
			break;
		if (!vengine_step(&v)) {
			if (next == n)
				break;
			v.now = (uint64_t)when[next] + 1;
		}
	}
	double window = s->seconds * 1e9 < (double)v.now ? (double)v.now : s->seconds * 1e9;
	for (uint32_t i = 0; i < n; i++) {
		if (i < next && all[i]->result == 1) {
			if (!all[i]->first)
				add(&s->first, &s->n_first, &s->cap_first, (double)(v.now - all[i]->arrived) * 1e-6);
			vengine_cancel(&v, all[i]);
		}
	}
	/* clients that ask seldom, beside those that ask much */
	double *light = calloc(n + 1, sizeof(double));
	size_t n_light = 0;
	uint32_t *asked = calloc(s->clients, sizeof(*asked));
	for (uint32_t i = 0; asked && light && i < next; i++)
		asked[all[i]->identity]++;
	for (uint32_t i = 0; asked && light && i < next; i++)
		if (asked[all[i]->identity] <= 3)
			light[n_light++] = (double)((all[i]->first ? all[i]->first : v.now) - all[i]->arrived) * 1e-6;
	qsort(light, n_light, sizeof(double), up);
	qsort(s->first, s->n_first, sizeof(double), up);
	qsort(s->gap, s->n_gap, sizeof(double), up);
	*f = (struct figures){ s->rate,
			       quantile(s->first, s->n_first, 0.5),
			       quantile(s->first, s->n_first, 0.99),
			       quantile(s->gap, s->n_gap, 0.5),
			       quantile(s->gap, s->n_gap, 0.99),
			       quantile(s->gap, s->n_gap, 1),
			       (double)v.busy_ns / window,
			       (double)v.tokens / window * 1e9,
			       quantile(light, n_light, 0.99) };
	printf("{\"bench\":\"simulate\",\"clients\":%u,\"rate\":%.3f,\"seconds\":%.0f,\"step_ms\":%.1f,\"sent\":%u,\"done\":%u,\"failed\":%u,"
	       "\"first_ms_p50\":%.3f,\"first_ms_p99\":%.3f,\"first_ms_p99_light\":%.3f,\"gap_ms_p50\":%.3f,\"gap_ms_p99\":%.3f,"
	       "\"gap_ms_max\":%.3f,\"busy\":%.4f,\"tokens_s\":%.1f,\"prompt_rows_s\":%.1f,\"queue_most\":%llu,\"suspended\":%llu,"
	       "\"steps\":%llu,\"plan_us_mean\":%.3f,\"flows\":%u}\n",
	       s->clients, s->rate, s->seconds, s->step_ms, s->sent, s->done, s->failed, f->first50, f->first99, f->light99, f->gap50,
	       f->gap99, f->gap_most, f->busy, f->tokens_s, (double)v.rows / window * 1e9, (unsigned long long)s->queue_most,
	       (unsigned long long)v.b.suspended, (unsigned long long)v.step,
	       v.step ? (double)v.plan_ns / (double)v.step * 1e-3 : 0, v.b.fair.n);
	fprintf(stderr, "%8u %8.1f %9.1f %10.1f %10.1f %8.2f %8.2f %8.2f %6.1f %% %8.0f %9llu\n", s->clients, s->rate, f->first50,
		f->first99, f->light99, f->gap50, f->gap99, f->gap_most, 100 * f->busy, f->tokens_s,
		(unsigned long long)s->queue_most);
	fflush(stdout);
	vengine_fini(&v);
	for (uint32_t i = 0; i < n; i++) {
		free(all[i]->run);
		free(all[i]);
	}
	free(all);
	free(when);
	free(light);
	free(asked);
	free(s->first);
	free(s->gap);
}

/* ---- the plot ---------------------------------------------------------------------------------------- */

static double y_of(double ms)
{
	double l = log10(ms < 1 ? 1 : ms); /* 1 ms … 100 s */

	return 340 - (l > 5 ? 5 : l) * 60;
}

static void curve(FILE *f, const struct figures *v, uint32_t n, const char *colour, const char *name, int at,
		  double (*of)(const struct figures *))
{
	double most = v[n - 1].rate;

	fprintf(f, "<polyline fill='none' stroke='%s' stroke-width='2' points='", colour);
	for (uint32_t i = 0; i < n; i++)
		fprintf(f, "%.1f,%.1f ", 60 + 540 * v[i].rate / most, y_of(of(&v[i])));
	fprintf(f, "'/>\n<text x='%d' y='20' fill='%s' font-size='12'>%s</text>\n", at, colour, name);
}

static double first50(const struct figures *f)
{
	return f->first50;
}
static double first99(const struct figures *f)
{
	return f->first99;
}
static double gap99(const struct figures *f)
{
	return f->gap99;
}
static double light99(const struct figures *f)
{
	return f->light99;
}

static int draw(const char *path, const struct figures *v, uint32_t n)
{
	FILE *f = fopen(path, "we");

	if (!f)
		return -errno;
	fprintf(f, "<svg xmlns='http://www.w3.org/2000/svg' width='640' height='390' font-family='sans-serif'>\n"
		   "<rect width='640' height='390' fill='white'/>\n");
	for (int d = 0; d <= 5; d++)
		fprintf(f, "<line x1='60' x2='600' y1='%d' y2='%d' stroke='#ddd'/><text x='52' y='%d' font-size='11' "
			   "text-anchor='end'>%g ms</text>\n", 340 - 60 * d, 340 - 60 * d, 344 - 60 * d, pow(10, d));
	for (uint32_t i = 0; i < n; i++)
		fprintf(f, "<text x='%.1f' y='356' font-size='11' text-anchor='middle'>%g</text>\n",
			60 + 540 * v[i].rate / v[n - 1].rate, v[i].rate);
	fprintf(f, "<text x='330' y='378' font-size='12' text-anchor='middle'>requests a second</text>\n");
	curve(f, v, n, "#1f77b4", "first token p50", 70, first50);
	curve(f, v, n, "#d62728", "first token p99", 190, first99);
	curve(f, v, n, "#ff7f0e", "p99, clients that ask seldom", 310, light99);
	curve(f, v, n, "#2ca02c", "gap p99", 520, gap99);
	fprintf(f, "</svg>\n");
	return fclose(f) ? -EIO : 0;
}

/* ---- what making a step costs -------------------------------------------------------------------------- */

static double flat_step(void *arg, uint32_t decode, uint32_t prefill)
{
	(void)arg;
	(void)decode;
	(void)prefill;
	return 1e6;
}

/* 64 run, `waiting` more wait over `sessions` sessions, each of an identity of its own. Mean and worst µs a step. */
static void cost(uint32_t sessions, uint32_t waiting, uint32_t steps)
{
	static struct vengine v;
	struct vreq *r = calloc(waiting + BATCH_SLOTS, sizeof(*r));
	struct vrun *run = calloc(waiting + BATCH_SLOTS, sizeof(*run));

	if (!r || !run || vengine_init(&v, 1000000, 512 + BATCH_SLOTS))
		abort();
	v.step_ns = flat_step;
	v.b.pace.budget_ns = 12000000;
	v.b.pace.first = v.b.pace.least = 64;
	for (uint32_t i = 0; i < waiting + BATCH_SLOTS; i++) {
		r[i].run = &run[i];
		r[i].identity = i % sessions;
		r[i].session = i % sessions;
		r[i].weight = 1 + i % 3;
		r[i].q.n = 1;
		r[i].q.cls = 1;
		r[i].q.prompt = 100 + i % 1000;
		r[i].tokens = 20 + i % 200;
		if (vengine_submit(&v, &r[i]))
			abort();
	}
	for (uint32_t i = 0; i < 200; i++)
		vengine_step(&v);
	v.plan_ns = v.plan_ns_most = 0;
	uint32_t i = 0;
	while (i < steps && vengine_step(&v))
		i++;
	printf("{\"bench\":\"simulate\",\"what\":\"cost\",\"sequences\":%u,\"sessions\":%u,\"waiting\":%u,\"steps\":%u,"
	       "\"plan_us_mean\":%.3f,\"plan_us_max\":%.3f}\n", v.b.n_runs, sessions, waiting, i,
	       i ? (double)v.plan_ns / i * 1e-3 : 0, (double)v.plan_ns_most * 1e-3);
	fprintf(stderr, "%9u sessions %9u waiting %3u running: %7.2f us a step, worst %8.2f\n", sessions, waiting, v.b.n_runs,
		i ? (double)v.plan_ns / i * 1e-3 : 0, (double)v.plan_ns_most * 1e-3);
	for (uint32_t k = 0; k < waiting + BATCH_SLOTS; k++)
		vengine_cancel(&v, &r[k]);
	vengine_fini(&v);
	free(r);
	free(run);
}

static void costs(void)
{
	static const uint32_t waiting[] = { 4096, 16384, 65536, 262144 };

	for (size_t i = 0; i < sizeof(waiting) / sizeof(waiting[0]); i++)
		cost(4096, waiting[i], 1000);
	cost(100000, 100000, 1000);
}

/* ---- the command line ------------------------------------------------------------------------------------ */

static uint32_t list(const char *s, double *v)
{
	uint32_t n = 0;
	char *end;

	for (; *s && n < RUNS_MAX; s = *end == ',' ? end + 1 : end) {
		v[n] = strtod(s, &end);
		if (end == s || v[n] <= 0) {
			fprintf(stderr, "bench_simulate: not a list of numbers: %s\n", s);
			exit(2);
		}
		n++;
	}
	return n;
}

int main(int argc, char **argv)
{
	static const struct option longs[] = { { "times", 1, NULL, 't' }, { "clients", 1, NULL, 'c' },
					       { "rate", 1, NULL, 'r' },  { "seconds", 1, NULL, 's' },
					       { "pages", 1, NULL, 'p' }, { "seed", 1, NULL, 'S' },
					       { "svg", 1, NULL, 'v' },	  { "cost", 0, NULL, 'C' },
					       { "step-ms", 1, NULL, 'm' },
					       { NULL, 0, NULL, 0 } };
	double clients[RUNS_MAX] = { 1000 }, rate[RUNS_MAX] = { 2, 4, 6, 8, 10, 12 }, seconds = 300, step_ms = 12;
	uint32_t n_clients = 1, n_rate = 6, pages = 16384, n = 0;
	static struct figures f[RUNS_MAX * RUNS_MAX];
	struct times times;
	const char *svg = NULL;
	uint64_t seed = 1;
	int o;

	h200_8b(&times);
	while ((o = getopt_long(argc, argv, "", longs, NULL)) != -1) {
		switch (o) {
		case 't':
			if (read_times(&times, optarg)) {
				fprintf(stderr, "%s: no step times: want aprctl --json models of a daemon that has worked\n",
					optarg);
				return 2;
			}
			break;
		case 'c': n_clients = list(optarg, clients); break;
		case 'r': n_rate = list(optarg, rate); break;
		case 's': seconds = strtod(optarg, NULL); break;
		case 'p': pages = (uint32_t)strtoul(optarg, NULL, 10); break;
		case 'S': seed = strtoull(optarg, NULL, 10); break;
		case 'm': step_ms = strtod(optarg, NULL); break;
		case 'v': svg = optarg; break;
		case 'C': costs(); return 0;
		default: return 2;
		}
	}
	fprintf(stderr, "%8s %8s %9s %10s %10s %8s %8s %8s %8s %8s %9s\n", "clients", "req/s", "first p50", "p99 ms", "p99 light",
		"gap p50", "p99 ms", "max ms", "busy", "tok/s", "queue max");
	for (uint32_t c = 0; c < n_clients; c++) {
		for (uint32_t r = 0; r < n_rate; r++) {
			struct sim s = { .clients = (uint32_t)clients[c], .pages = pages, .rate = rate[r], .seconds = seconds,
					 .step_ms = step_ms, .times = &times };
			state = seed * 0x9e3779b97f4a7c15u + 1;
			run_sim(&s, &f[n++]);
		}
	}
	if (svg && n_rate > 1 && draw(svg, &f[n - n_rate], n_rate))
		fprintf(stderr, "%s: not written\n", svg);
	return 0;
}
