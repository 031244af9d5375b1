/* SPDX-License-Identifier: MIT */
/*
 * Dividing products over threads: which panels and rows a task computes.
 *
 * Owns: activation memory, the cut into tasks, bias and storing. Does not own the
 * arithmetic: struct apr_kern of the current instruction set does. Cuts are along
 * rows and panels only, and the accumulators pass from slab to slab unrounded, so
 * that no cut changes a bit.
 */
#include "kernels/cpu/linear.h"

#include <stdatomic.h>
#include <string.h>

#include "kernels/cpu/kern.h"
#include "kernels/cpu/pool.h"

#define ROW_CHUNK_BYTES (320u << 10) /* activations that stay in L2 beside a tile */
#define ROW_CHUNK_MAX 256u
#define PANELS_TAKEN 4u /* from a long run */
#define RUNS_MAX 64u /* threads with a run of their own; others help */
#define AHEAD_MAX (128u << 10) /* of the next products, prefetched into L2 by a thread that waits */
#define PANELS_F32 4u /* panels of one row done together, where a chain alone would wait on its latency */

static size_t take(size_t *used, size_t count, size_t size)
{
	size_t at = *used, bytes;

	if (at == SIZE_MAX || __builtin_mul_overflow(count, size, &bytes) ||
	    __builtin_add_overflow(bytes, at + 63, &bytes)) {
		*used = SIZE_MAX;
		return 0;
	}
	*used = bytes / 64 * 64;
	return at;
}

struct apr_act_view apr_act_view(void *mem, uint32_t rows, uint32_t n_in)
{
	struct apr_act_view v = {.rows = rows, .n_in = n_in, .blocks = n_in / 32};
	size_t used = 0, padded, small = rows <= APR_SMALL_ROWS ? rows : 0;
	size_t q, s, xs, xh[2], hi, lo, sum[2];
	char *base = mem;

	if (n_in % 32)
		v.blocks = 0; /* float weights alone can have such a width */
	v.width = rows < APR_GROUP ? rows : APR_GROUP;
	padded = v.width ? ((size_t)rows + v.width - 1) / v.width * v.width : 0;
	q = take(&used, padded * v.blocks, 64);
	s = take(&used, padded * v.blocks, 4);
	xs = take(&used, padded * v.blocks, 4);
	xh[0] = take(&used, padded * v.blocks, 4);
	xh[1] = take(&used, padded * v.blocks, 4);
	hi = take(&used, small * v.blocks, 32);
	lo = take(&used, small * v.blocks, 32);
	sum[0] = take(&used, small * v.blocks, 4);
	sum[1] = take(&used, small * v.blocks, 4);
	v.bytes = used == SIZE_MAX ? 0 : used;
	if (!base || !v.bytes)
		return v;
	v.q = (int16_t *)(base + q);
	v.s = (float *)(base + s);
	v.xs = (float *)(base + xs);
	v.xh[0] = (float *)(base + xh[0]);
	v.xh[1] = (float *)(base + xh[1]);
	v.hi = (int8_t *)(base + hi);
	v.lo = (int8_t *)(base + lo);
	v.sum[0] = (int32_t *)(base + sum[0]);
	v.sum[1] = (int32_t *)(base + sum[1]);
	return v;
}

size_t apr_act_bytes(enum apr_cpu_math math, uint32_t rows, uint32_t n_in)
{
	size_t most = 64;

	if (math == APR_CPU_F32)
		return most;
	/* fewer rows have byte planes besides: the answer must serve any smaller count too */
	for (uint32_t r = rows; r; r = r > APR_GROUP ? APR_GROUP : r - 1) {
		size_t bytes = apr_act_view(NULL, r, n_in).bytes;

		if (!bytes && n_in >= 32 && n_in % 32 == 0)
			return 0;
		if (bytes > most)
			most = bytes;
	}
	return most;
}

struct prepare {
	const struct apr_kern *kern;
	struct apr_act_view v;
	const float *x;
	size_t ldx;
};

static void prepare_group(void *arg, uint32_t g, unsigned worker)
{
	const struct prepare *p = arg;
	uint32_t first = g * p->v.width, n = p->v.rows - first < p->v.width ? p->v.rows - first : p->v.width;

	(void)worker;
	p->kern->quantise(&p->v, p->x, p->ldx, first, n);
}

void apr_act_prepare(struct apr_pool *pool, struct apr_act *a, enum apr_cpu_math math, const float *x, size_t ldx,
		     uint32_t rows, uint32_t n_in, void *mem)
{
	struct prepare p = {.kern = apr_kern_current(), .x = x, .ldx = ldx};

	*a = (struct apr_act){.math = math, .rows = rows, .n_in = n_in, .mem = mem, .x = x, .ldx = ldx};
	if (math == APR_CPU_F32 || !rows)
		return;
	p.v = apr_act_view(mem, rows, n_in);
	if (p.v.blocks)
		apr_pool_run(pool, (rows - 1) / p.v.width + 1, prepare_group, &p);
}

struct job {
	struct apr_pool *pool;
	const struct apr_kern *kern;
	const struct apr_act *a;
	struct apr_act_view v;
	uint32_t n;
	const struct apr_linear *const *w;
	const float *const *bias;
	float *const *y;
	const size_t *ldy;
	uint32_t panels;     /* of all weights */
	uint32_t row_chunk;  /* rows an item, where there are many */
	/* few rows: each worker has a run of panels of its own, so that it reads memory as one stream; whoever is done
	 * takes from the end of another's */
	uint32_t workers;
	uint32_t least; /* panels taken at once */
	const struct apr_linear_next *next;
	struct run {
		/* first << 32 | end of what is left. Relaxed: the region publishes the job, this only divides it */
		_Alignas(64) _Atomic uint64_t left;
	} run[RUNS_MAX];
};

/* where panel p of the job lies */
struct spot {
	uint32_t i;     /* weight */
	uint32_t panel; /* in that weight */
};

static uint32_t panels_of(const struct apr_linear *w)
{
	return (w->n_out - 1) / APR_PANEL_ROWS + 1;
}

static struct spot spot_of(const struct job *j, uint32_t panel)
{
	struct spot s = {0, panel};

	while (s.panel >= panels_of(j->w[s.i]))
		s.panel -= panels_of(j->w[s.i++]);
	return s;
}

static const uint8_t *panel_at(const struct apr_linear *w, uint32_t panel)
{
	return (const uint8_t *)w->panels +
	       (size_t)panel * apr_panel_units(w->type, w->n_in) * apr_panel_unit_bytes(w->type);
}

static void store(const struct job *j, struct spot s, uint32_t row, uint32_t n, float (*acc)[16])
{
	uint32_t o = s.panel * APR_PANEL_ROWS, n_out = j->w[s.i]->n_out;
	uint32_t cols = n_out - o < APR_PANEL_ROWS ? n_out - o : APR_PANEL_ROWS;
	const float *bias = j->bias ? j->bias[s.i] : NULL;
	float *y = j->y[s.i] + row * j->ldy[s.i] + o;

	for (uint32_t r = 0; r < n; r++, y += j->ldy[s.i]) {
		if (bias) {
			for (uint32_t c = 0; c < cols; c++)
				acc[r][c] += bias[o + c];
		}
		if (cols == APR_PANEL_ROWS)
			memcpy(y, acc[r], sizeof acc[r]);
		else
			memcpy(y, acc[r], cols * sizeof *y);
	}
}

static void panel_int16(const struct job *j, struct spot s, uint32_t row, uint32_t n)
{
	const struct apr_linear *w = j->w[s.i];
	const uint8_t *panel = panel_at(w, s.panel);
	enum apr_chain chain = apr_chain_of(w->type);
	_Alignas(64) float acc[ROW_CHUNK_MAX][16];
	struct apr_tile tile;

	if (j->v.rows <= APR_SMALL_ROWS) {
		j->kern->gemv(w->type, panel, &j->v, acc);
		store(j, s, 0, n, acc);
		return;
	}
	memset(acc, 0, (n + APR_GROUP - 1) / APR_GROUP * APR_GROUP * sizeof acc[0]);
	for (uint32_t b = 0; b < j->v.blocks; b += APR_SLAB) {
		uint32_t nb = j->v.blocks - b < APR_SLAB ? j->v.blocks - b : APR_SLAB;

		j->kern->unpack(w->type, panel, b, nb, &tile);
		for (uint32_t r = 0; r < n; r += APR_GROUP) {
			uint32_t nr = n - r < APR_GROUP ? n - r : APR_GROUP;

			j->kern->gemm(chain, &tile, nb, &j->v, (row + r) / APR_GROUP, b, nr, acc + r);
		}
	}
	store(j, s, row, n, acc);
}

static void panel_f32(const struct job *j, struct spot s, uint32_t row, uint32_t n)
{
	const struct apr_linear *w = j->w[s.i];
	const uint8_t *panel = panel_at(w, s.panel);
	_Alignas(64) float acc[ROW_CHUNK_MAX][16], tile[APR_SLAB_F32][16];

	memset(acc, 0, n * sizeof acc[0]);
	for (uint32_t k = 0; k < w->n_in; k += APR_SLAB_F32) {
		uint32_t nk = w->n_in - k < APR_SLAB_F32 ? w->n_in - k : APR_SLAB_F32;

		j->kern->unpack_f32(w->type, panel, k, nk, tile);
		for (uint32_t r = 0; r < n; r += APR_GROUP) {
			uint32_t nr = n - r < APR_GROUP ? n - r : APR_GROUP;
			const float *x[APR_GROUP];

			for (uint32_t i = 0; i < nr; i++)
				x[i] = j->a->x + (row + r + i) * j->a->ldx + k;
			j->kern->fma_f32((const float(*)[16])tile, nk, x, nr, acc + r);
		}
	}
	store(j, s, row, n, acc);
}

/* one row, PANELS_F32 panels of one weight */
static void panels_f32_row(const struct job *j, struct spot s, uint32_t row)
{
	const struct apr_linear *w = j->w[s.i];
	_Alignas(64) float acc[PANELS_F32][16], tile[PANELS_F32][256][16];
	const float(*tiles[PANELS_F32])[16];
	uint32_t slab = apr_type_info(w->type).block > 64 ? 256 : 64; /* whole units; in L1 where that can be */

	memset(acc, 0, sizeof acc);
	for (uint32_t k = 0; k < w->n_in; k += slab) {
		uint32_t nk = w->n_in - k < slab ? w->n_in - k : slab;

		for (uint32_t p = 0; p < PANELS_F32; p++) {
			j->kern->unpack_f32(w->type, panel_at(w, s.panel + p), k, nk, tile[p]);
			tiles[p] = (const float(*)[16])tile[p];
		}
		j->kern->fma4_f32(tiles, nk, j->a->x + row * j->a->ldx + k, acc);
	}
	for (uint32_t p = 0; p < PANELS_F32; p++)
		store(j, (struct spot){s.i, s.panel + p}, row, 1, acc + p);
}

/* n rows from row on, panels first … end - 1 */
static void panels(const struct job *j, uint32_t row, uint32_t n, uint32_t first, uint32_t end)
{
	struct spot s = spot_of(j, first);

	for (uint32_t p = first, done; p < end; p += done, s.panel += done) {
		const struct apr_linear *w = j->w[s.i];

		if (s.panel == panels_of(w)) {
			s = (struct spot){s.i + 1, 0};
			w = j->w[s.i];
		}
		done = 1;
		if (j->a->math == APR_CPU_INT16 && apr_type_info(w->type).block > 1) {
			panel_int16(j, s, row, n);
		} else if (n == 1 && end - p >= PANELS_F32 && panels_of(w) - s.panel >= PANELS_F32) {
			panels_f32_row(j, s, row);
			done = PANELS_F32;
		} else {
			panel_f32(j, s, row, n);
		}
	}
}

static void panel_of_chunk(void *arg, uint32_t i, unsigned worker)
{
	const struct job *j = arg;
	uint32_t row = i / j->panels * j->row_chunk, panel = i % j->panels;

	(void)worker;
	panels(j, row, j->a->rows - row < j->row_chunk ? j->a->rows - row : j->row_chunk, panel, panel + 1);
}

static uint32_t row_chunk(const struct apr_act *a)
{
	size_t row_bytes = (size_t)a->n_in * (a->math == APR_CPU_INT16 ? 2 : 4);
	size_t rows = ROW_CHUNK_BYTES / row_bytes / APR_GROUP * APR_GROUP;

	if (rows < 2 * APR_GROUP) /* with fewer, unpacking would cost more than it saves */
		rows = 2 * (size_t)APR_GROUP;
	return rows > ROW_CHUNK_MAX ? ROW_CHUNK_MAX : (uint32_t)rows;
}

/* the first panel of worker w's run, of all panels; the last one's end for w = workers */
static uint32_t run_start(const struct job *j, uint32_t all, unsigned w)
{
	return w == j->workers ? all : (uint32_t)((uint64_t)all * w / j->workers) / j->least * j->least;
}

/* Tells worker w, done with this region, where its run of the next products begins. */
static void look_ahead(const struct job *j, unsigned w)
{
	const struct apr_linear_next *next = j->next;
	struct job n = {.w = next->w, .n = next->n};
	const struct apr_linear *l;
	const uint8_t *from;
	size_t bytes;
	struct spot s;

	for (uint32_t i = 0; i < n.n; i++)
		n.panels += panels_of(n.w[i]);
	if (!n.panels)
		return;
	s = spot_of(&n, run_start(j, n.panels, w));
	l = n.w[s.i];
	from = panel_at(l, s.panel);
	bytes = (size_t)(panel_at(l, panels_of(l)) - from);
	apr_pool_ahead(j->pool, w, from, bytes < AHEAD_MAX ? bytes : AHEAD_MAX);
}

/* Panels to take from a run that has so many left: few at its end, where another thread may be waiting. */
static uint32_t share(const struct job *j, uint32_t left)
{
	uint32_t n = left > 4 * PANELS_TAKEN ? PANELS_TAKEN : j->least;

	return n < left ? n : left;
}

/* One of the region's items: all that is left, own run first. */
static void run_of(void *arg, uint32_t item, unsigned worker)
{
	struct job *j = arg;

	(void)item;
	for (unsigned k = 0; k < j->workers; k++) {
		_Atomic uint64_t *run = &j->run[(worker + k) % j->workers].left;
		uint64_t r = atomic_load_explicit(run, memory_order_relaxed);

		while (r >> 32 < (uint32_t)r) {
			uint32_t first = (uint32_t)(r >> 32), end = (uint32_t)r, n = share(j, end - first);
			uint64_t left = k ? r - n : r + ((uint64_t)n << 32);

			if (!atomic_compare_exchange_weak_explicit(run, &r, left, memory_order_relaxed, memory_order_relaxed))
				continue;
			first = k ? end - n : first;
			panels(j, 0, j->a->rows, first, first + n);
			r = atomic_load_explicit(run, memory_order_relaxed);
		}
	}
	if (j->next && worker < j->workers)
		look_ahead(j, worker);
}

void apr_linear_run(struct apr_pool *pool, const struct apr_act *a, uint32_t n, const struct apr_linear *const w[],
		    const float *const bias[], float *const y[], const size_t ldy[])
{
	apr_linear_run_then(pool, a, n, w, bias, y, ldy, NULL);
}

void apr_linear_run_then(struct apr_pool *pool, const struct apr_act *a, uint32_t n, const struct apr_linear *const w[],
			 const float *const bias[], float *const y[], const size_t ldy[],
			 const struct apr_linear_next *next)
{
	struct job j = {.pool = pool, .kern = apr_kern_current(), .a = a, .n = n, .w = w, .bias = bias, .y = y, .ldy = ldy,
			.next = next};
	unsigned threads = apr_pool_threads(pool);

	if (!a->rows)
		return;
	if (a->math == APR_CPU_INT16)
		j.v = apr_act_view(a->mem, a->rows, a->n_in);
	for (uint32_t i = 0; i < n; i++)
		j.panels += panels_of(w[i]);
	j.row_chunk = row_chunk(a);
	if (a->rows > APR_SMALL_ROWS) {
		apr_pool_run(pool, j.panels * ((a->rows - 1) / j.row_chunk + 1), panel_of_chunk, &j);
		return;
	}
	j.least = a->math == APR_CPU_F32 || apr_type_info(w[0]->type).block == 1 ? PANELS_F32 : 1;
	j.workers = threads < RUNS_MAX ? threads : RUNS_MAX;
	for (unsigned k = 0; k < j.workers; k++)
		atomic_init(&j.run[k].left, (uint64_t)run_start(&j, j.panels, k) << 32 | run_start(&j, j.panels, k + 1));
	apr_pool_run(pool, j.panels > j.least ? threads : 1, run_of, &j);
}
