/* SPDX-License-Identifier: MIT */
/*
 * Speed of the CPU's matrix products, by type and shape.
 *
 * Method: for each shape the real call chain of an op (apr_act_prepare and
 * apr_linear_run), on all usable CPUs. Weights of a shape are repeated until they
 * exceed 192 MiB for one row (so that they come from memory, as a decode step's do),
 * or run from wherever they lie for many rows. Each figure is the fastest of several
 * rounds, which is what a shared machine disturbs least; the read bandwidth that
 * GB/s is set against is measured in the same rounds, all threads summing 256 MiB.
 *
 * Then all products of one step of two real models, in their order, as one figure:
 * with one row everything is read once, with 512 rows the head is left out (a prompt
 * needs it for its last row alone).
 *
 * stdout: one JSON object a line; stderr: a table.
 * bench_linear [-i ISA] [-s] [rows …]   (default 1 4 512; -s: the models' steps alone)
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernels/cpu/linear.h"
#include "kernels/cpu/pool.h"

#define STREAM_BYTES ((size_t)192 << 20)
#define READ_BYTES ((size_t)256 << 20)
#define ROUNDS 7
#define MAX_COPIES 1024u

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void *get(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED) {
		perror("bench_linear: mmap");
		exit(1);
	}
	return p;
}

struct reader {
	const char *mem;
	size_t part;
	uint64_t sums[1024];
};

typedef uint64_t v8 __attribute__((vector_size(64), aligned(64), may_alias));

static void read_part(void *arg, uint32_t i, unsigned worker)
{
	struct reader *r = arg;
	const v8 *p = (const v8 *)(r->mem + i * r->part);
	v8 s[4] = {{0}};

	for (size_t k = 0; k < r->part / 64; k += 8) {
		for (int j = 0; j < 8; j++)
			s[j % 4] += p[k + j];
	}
	s[0] += s[1] + s[2] + s[3];
	r->sums[worker] += s[0][0] + s[0][7];
}

static double read_seconds(struct apr_pool *pool, struct reader *r)
{
	double t = now();

	apr_pool_run(pool, (uint32_t)(READ_BYTES / r->part), read_part, r);
	return now() - t;
}

struct shape {
	uint32_t type, n_in, n_out;
	const char *what;
};
static const struct shape shapes[] = {
	{APR_TYPE_Q4_1, 576, 576, "SmolLM2 q, o"},
	{APR_TYPE_Q4_1, 576, 1536, "SmolLM2 gate, up"},
	{APR_TYPE_Q4_1, 1536, 576, "SmolLM2 down"},
	{APR_TYPE_Q8_0, 576, 49152, "SmolLM2 head"},
	{APR_TYPE_Q5_0, 640, 1024, "Gemma 3 q"},
	{APR_TYPE_Q8_0, 640, 256, "Gemma 3 v"},
	{APR_TYPE_Q4_K, 1024, 640, "Gemma 3 o"},
	{APR_TYPE_Q5_0, 640, 2048, "Gemma 3 gate, up"},
	{APR_TYPE_Q6_K, 2048, 640, "Gemma 3 down"},
	{APR_TYPE_Q8_0, 640, 262144, "Gemma 3 head"},
	{APR_TYPE_Q4_0, 1024, 1024, ""},
	{APR_TYPE_Q5_1, 1024, 1024, ""},
	{APR_TYPE_Q2_K, 1024, 1024, ""},
	{APR_TYPE_Q3_K, 1024, 1024, ""},
	{APR_TYPE_Q5_K, 1024, 1024, ""},
	{APR_TYPE_F16, 1024, 1024, ""},
	{APR_TYPE_BF16, 1024, 1024, ""},
	{APR_TYPE_F32, 1024, 1024, ""},
};

static void fill(uint8_t *p, size_t n)
{
	uint64_t s = 88172645463325252u;

	for (size_t i = 0; i + 8 <= n; i += 8) {
		s ^= s << 13;
		s ^= s >> 7;
		s ^= s << 17;
		memcpy(p + i, &(uint64_t){s & 0x3b3b3b3b3b3b3b3bu}, 8); /* no F16 of it is infinite or NaN */
	}
}

struct run {
	struct apr_pool *pool;
	enum apr_cpu_math math;
	const struct shape *s;
	uint32_t rows, copies;
	const char *weights;
	size_t bytes; /* a copy */
	float *x, *y;
	void *act;
};

/* seconds a product */
static double time_run(const struct run *r)
{
	double t = now();

	for (uint32_t c = 0; c < r->copies; c++) {
		struct apr_linear w = {r->s->type, r->s->n_in, r->s->n_out, r->weights + c * r->bytes};
		const struct apr_linear *ws[] = {&w};
		float *ys[] = {r->y};
		struct apr_act a;

		apr_act_prepare(r->pool, &a, r->math, r->x, r->s->n_in, r->rows, r->s->n_in, r->act);
		apr_linear_run(r->pool, &a, 1, ws, NULL, ys, (const size_t[]){r->s->n_out});
	}
	return (now() - t) / r->copies;
}

static void bench(struct apr_pool *pool, const struct shape *s, uint32_t rows, enum apr_cpu_math math, struct reader *rd)
{
	struct run r = {.pool = pool, .math = math, .s = s, .rows = rows};
	size_t bytes = (apr_panel_bytes(s->type, s->n_in, s->n_out) + 63) / 64 * 64;
	size_t act = apr_act_bytes(math, rows, s->n_in), x = (size_t)rows * s->n_in * 4, y = (size_t)rows * s->n_out * 4;
	double best = 1e9, read = 1e9, macs, bytes_s, read_s;
	char *w;

	if (rows > 4 && s->n_out > 8192)
		return; /* a head is asked for single rows */
	r.bytes = bytes;
	r.copies = rows > 4 ? 4 : (uint32_t)((STREAM_BYTES - 1) / bytes + 1);
	if (r.copies > MAX_COPIES)
		r.copies = MAX_COPIES;
	w = get(bytes * r.copies);
	fill((uint8_t *)w, bytes * r.copies);
	r.weights = w;
	r.x = get(x);
	for (size_t i = 0; i < x / 4; i++)
		r.x[i] = (float)((int)(i * 2654435761u >> 20) - 2048) * 1e-3f;
	r.y = get(y);
	r.act = get(act);
	for (int i = 0; i < ROUNDS; i++) {
		double t = time_run(&r), rt = read_seconds(pool, rd);

		best = t < best ? t : best;
		read = rt < read ? rt : read;
	}
	macs = (double)rows * s->n_in * s->n_out;
	bytes_s = (double)bytes / best * 1e-9;
	read_s = (double)READ_BYTES / read * 1e-9;
	fprintf(stderr, "%-5s %5u x %-6u rows %3u %-5s %8.1f us %7.1f GFLOP/s %6.1f GB/s (%3.0f %% of %.1f)  %s\n",
		apr_type_info(s->type).name, s->n_in, s->n_out, rows, math == APR_CPU_F32 ? "f32" : "int16", best * 1e6,
		2 * macs / best * 1e-9, bytes_s, 100 * bytes_s / read_s, read_s, s->what);
	printf("{\"bench\":\"linear\",\"isa\":\"%s\",\"threads\":%u,\"type\":\"%s\",\"n_in\":%u,\"n_out\":%u,\"rows\":%u,"
	       "\"math\":\"%s\",\"us\":%.2f,\"gflops\":%.1f,\"gbs\":%.2f,\"read_gbs\":%.2f}\n",
	       apr_cpu_isa_name(apr_cpu_isa_current()), apr_pool_threads(pool), apr_type_info(s->type).name, s->n_in,
	       s->n_out, rows, math == APR_CPU_F32 ? "f32" : "int16", best * 1e6, 2 * macs / best * 1e-9, bytes_s, read_s);
	munmap(w, bytes * r.copies);
	munmap(r.x, x);
	munmap(r.y, y);
	munmap(r.act, act);
}

/* ---- the products of a model's step ---- */

#define MAX_PARTS 4
struct region {
	uint32_t n_in, n;
	struct {
		uint32_t type, n_out;
	} part[MAX_PARTS];
};
struct model {
	const char *name;
	uint32_t layers, n_regions;
	struct region region[2][4]; /* even and odd layers */
	struct region head;
};
static const struct model models[] = {
	{"SmolLM2-135M Q4_1", 30, 4,
	 {{{576, 3, {{APR_TYPE_Q4_1, 576}, {APR_TYPE_Q4_1, 192}, {APR_TYPE_Q4_1, 192}}},
	   {576, 1, {{APR_TYPE_Q4_1, 576}}},
	   {576, 2, {{APR_TYPE_Q4_1, 1536}, {APR_TYPE_Q4_1, 1536}}},
	   {1536, 1, {{APR_TYPE_Q4_1, 576}}}},
	  {{576, 3, {{APR_TYPE_Q4_1, 576}, {APR_TYPE_Q4_1, 192}, {APR_TYPE_Q4_1, 192}}},
	   {576, 1, {{APR_TYPE_Q4_1, 576}}},
	   {576, 2, {{APR_TYPE_Q4_1, 1536}, {APR_TYPE_Q4_1, 1536}}},
	   {1536, 1, {{APR_TYPE_Q4_1, 576}}}}},
	 {576, 1, {{APR_TYPE_Q8_0, 49152}}}},
	{"Gemma 3 270M Q4_K_M", 18, 4,
	 {{{640, 3, {{APR_TYPE_Q5_0, 1024}, {APR_TYPE_Q5_0, 256}, {APR_TYPE_Q5_0, 256}}},
	   {1024, 1, {{APR_TYPE_Q4_K, 640}}},
	   {640, 2, {{APR_TYPE_Q5_0, 2048}, {APR_TYPE_Q5_0, 2048}}},
	   {2048, 1, {{APR_TYPE_Q4_K, 640}}}},
	  {{640, 3, {{APR_TYPE_Q5_0, 1024}, {APR_TYPE_Q5_0, 256}, {APR_TYPE_Q8_0, 256}}},
	   {1024, 1, {{APR_TYPE_Q4_K, 640}}},
	   {640, 2, {{APR_TYPE_Q5_0, 2048}, {APR_TYPE_Q5_0, 2048}}},
	   {2048, 1, {{APR_TYPE_Q6_K, 640}}}}},
	 {640, 1, {{APR_TYPE_Q8_0, 262144}}}},
};

struct step {
	struct apr_pool *pool;
	uint32_t rows;
	const char *weights;
	float *x, *y[MAX_PARTS];
	void *act;
	size_t bytes; /* weights read */
	double macs;
};

/* Runs the region on weights at s->weights + s->bytes, or only counts where there are none. */
static void run_region(struct step *s, const struct region *g)
{
	struct apr_linear w[MAX_PARTS];
	const struct apr_linear *ws[MAX_PARTS];
	size_t ldy[MAX_PARTS];
	struct apr_act a;

	for (uint32_t i = 0; i < g->n; i++) {
		w[i] = (struct apr_linear){g->part[i].type, g->n_in, g->part[i].n_out, s->weights + s->bytes};
		ws[i] = &w[i];
		ldy[i] = g->part[i].n_out;
		s->bytes += (apr_panel_bytes(w[i].type, w[i].n_in, w[i].n_out) + 63) / 64 * 64;
		s->macs += (double)s->rows * g->n_in * g->part[i].n_out;
	}
	if (!s->weights)
		return;
	apr_act_prepare(s->pool, &a, APR_CPU_INT16, s->x, g->n_in, s->rows, g->n_in, s->act);
	apr_linear_run(s->pool, &a, g->n, ws, NULL, s->y, ldy);
}

static void run_step(struct step *s, const struct model *m)
{
	s->bytes = 0;
	s->macs = 0;
	for (uint32_t l = 0; l < m->layers; l++) {
		for (uint32_t r = 0; r < m->n_regions; r++)
			run_region(s, &m->region[l % 2][r]);
	}
	if (s->rows == 1)
		run_region(s, &m->head);
}

static void bench_step(struct apr_pool *pool, const struct model *m, uint32_t rows, struct reader *rd)
{
	struct step s = {.pool = pool, .rows = rows};
	double best = 1e9, read = 1e9;
	size_t y = (size_t)rows * 4096 * 4 + ((size_t)1 << 21), x = (size_t)rows * 2048 * 4, w;
	char *mem;

	run_step(&s, m);
	w = s.bytes;
	mem = get(w);
	fill((uint8_t *)mem, w);
	s.weights = mem;
	s.x = get(x);
	for (size_t i = 0; i < x / 4; i++)
		s.x[i] = (float)((int)(i * 2654435761u >> 20) - 2048) * 1e-3f;
	for (int i = 0; i < MAX_PARTS; i++)
		s.y[i] = get(y);
	s.act = get(apr_act_bytes(APR_CPU_INT16, rows, 2048));
	for (int i = 0; i < (rows > 8 ? ROUNDS : 5 * ROUNDS); i++) {
		double t = now(), rt;

		run_step(&s, m);
		t = now() - t;
		rt = read_seconds(pool, rd);
		best = t < best ? t : best;
		read = rt < read ? rt : read;
	}
	fprintf(stderr, "%-20s rows %3u: %8.0f us, %7.1f rows/s, %6.1f GFLOP/s, %5.1f GB/s = %3.0f %% of %.1f\n", m->name, rows,
		best * 1e6, rows / best, 2e-9 * s.macs / best, 1e-9 * (double)w / best,
		100 * ((double)w / best) / ((double)READ_BYTES / read), 1e-9 * (double)READ_BYTES / read);
	printf("{\"bench\":\"linear_step\",\"model\":\"%s\",\"isa\":\"%s\",\"threads\":%u,\"rows\":%u,\"us\":%.1f,"
	       "\"rows_per_s\":%.1f,\"gflops\":%.1f,\"gbs\":%.2f,\"read_gbs\":%.2f}\n",
	       m->name, apr_cpu_isa_name(apr_cpu_isa_current()), apr_pool_threads(pool), rows, best * 1e6, rows / best,
	       2e-9 * s.macs / best, 1e-9 * (double)w / best, 1e-9 * (double)READ_BYTES / read);
	munmap(mem, w);
	munmap(s.x, x);
	for (int i = 0; i < MAX_PARTS; i++)
		munmap(s.y[i], y);
	munmap(s.act, apr_act_bytes(APR_CPU_INT16, rows, 2048));
}

static void nothing(void *arg, uint32_t i, unsigned worker)
{
	(void)arg;
	(void)i;
	(void)worker;
}

static void bench_handoff(struct apr_pool *pool)
{
	double best = 1e9;

	for (int i = 0; i < ROUNDS; i++) {
		double t = now();

		for (int k = 0; k < 2000; k++)
			apr_pool_run(pool, 2, nothing, NULL);
		t = (now() - t) / 2000;
		best = t < best ? t : best;
	}
	fprintf(stderr, "an empty region: %.2f us\n", best * 1e6);
	printf("{\"bench\":\"pool\",\"threads\":%u,\"region_us\":%.3f}\n", apr_pool_threads(pool), best * 1e6);
}

static int force_isa(const char *name)
{
	for (int i = APR_ISA_SCALAR; i <= APR_ISA_NEON; i++) {
		if (strcmp(apr_cpu_isa_name((enum apr_cpu_isa)i), name) == 0)
			return apr_cpu_isa_force((enum apr_cpu_isa)i);
	}
	return -1;
}

int main(int argc, char **argv)
{
	uint32_t rows[16] = {1, 4, 512}, n = 3;
	struct reader rd = {.part = 1 << 20};
	struct apr_pool *pool;
	int opt, steps_only = 0;
	char *mem;

	while ((opt = getopt(argc, argv, "i:s")) != -1) {
		if (opt == 's') {
			steps_only = 1;
		} else if (opt != 'i' || force_isa(optarg)) {
			fputs("usage: bench_linear [-i scalar|avx2|avx512|avx512-vnni|neon] [-s] [rows ...]\n", stderr);
			return 2;
		}
	}
	for (int i = optind; i < argc && i < optind + 16; i++) {
		n = (uint32_t)(i - optind);
		rows[n++] = (uint32_t)strtoul(argv[i], NULL, 10);
		if (!rows[n - 1] || rows[n - 1] > 65536) {
			fprintf(stderr, "bench_linear: %s: rows must be 1 to 65536\n", argv[i]);
			return 2;
		}
	}
	if (apr_pool_new(&pool, 0)) {
		fputs("bench_linear: no threads\n", stderr);
		return 1;
	}
	mem = get(READ_BYTES);
	memset(mem, 1, READ_BYTES);
	rd.mem = mem;
	bench_handoff(pool);
	for (uint32_t i = 0; i < n; i++) {
		for (size_t k = 0; k < sizeof models / sizeof models[0]; k++)
			bench_step(pool, &models[k], rows[i], &rd);
		for (size_t k = 0; k < sizeof shapes / sizeof shapes[0] && !steps_only; k++) {
			bench(pool, &shapes[k], rows[i], APR_CPU_INT16, &rd);
			if (rows[i] >= 64 && apr_type_info(shapes[k].type).block > 1)
				bench(pool, &shapes[k], rows[i], APR_CPU_F32, &rd);
		}
	}
	munmap(mem, READ_BYTES);
	apr_pool_free(pool);
	return 0;
}
