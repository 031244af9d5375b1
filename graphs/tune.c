/* SPDX-License-Identifier: MIT */
/*
 * Which algorithm computes each product of a prompt.
 *
 * Owns: the shapes of a model, the timing of candidates with its real weights, the
 * test that lets one in: bits equal to the reference's on that weight, over inputs
 * of wide exponents. The reference of 16-bit products is the plain ascending loop of
 * m16n8k16 (apr_cuda_gemm_loop); that of E4M3 products is the library's first
 * proposal at 2048 rows. The fastest of those let in wins, so timing anew cannot
 * change a bit. What was found is kept in the table (algo_table.h).
 *
 * Our own kernel over the tiles is one more candidate for few rows; up to which is
 * measured here, or set (--fused-rows).
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "graphs/graphs.h"

#define MOST_CANDIDATES 320u
#define SAMPLES 8u /* weights of a shape that take turns while timing, so that none stays in the cache */
#define KEPT 6u    /* of a first round, timed again beside the library's proposals */
#define PINNED_ROWS 2048u
#define DEFAULT_FUSED_ROWS 4u /* where it is let in but cannot be timed */
#define ENTRY_FUSED 0x100u  /* type of a table entry: | mask << 16 */
#define ENTRY_UNPACK 0x200u /* ns: tiles to F16 rows */

static const uint32_t fused_sizes[] = {4, 8, 16, 32, 64, 96, 128, 192, 256};
#define N_FUSED_SIZES (sizeof fused_sizes / sizeof *fused_sizes)

struct shape {
	uint32_t n, k, mask, n_parts, n_samples;
	struct {
		const struct mat *first;
		const struct apr_mat *part[3];
	} sample[SAMPLES];
};

struct tuner {
	struct apr_backend_model *m;
	cudaStream_t stream;
	struct shape *shape;
	uint32_t n_shapes, room, done, todo;
	const struct shape *at;
	uint32_t type, rows; /* of the products being chosen; rows that `want` has */
	uint64_t *want, *got;
	const void *weight[SAMPLES];
	uint32_t n_weights;
	cudaEvent_t event[MOST_CANDIDATES + 1];
	cublasLtMatmulAlgo_t algo[MOST_CANDIDATES];
	float us[MOST_CANDIDATES];
	bool ready; /* want holds this shape's hashes */
	const struct apr_backend_load *in;
};

/* ---- the shapes ------------------------------------------------------------------------ */

uint32_t graphs_mask(const struct apr_mat *const *w, uint32_t n)
{
	uint32_t i, mask = 0;

	for (i = 0; i < n; i++)
		mask |= 1u << w[i]->tile;
	return mask;
}

static void add_sample(struct shape *s, const struct mat *first, const struct apr_mat *const *part)
{
	uint32_t i;

	if (s->n_samples == SAMPLES)
		return;
	s->sample[s->n_samples].first = first;
	for (i = 0; i < 3; i++)
		s->sample[s->n_samples].part[i] = part[i];
	s->n_samples++;
}

static int add_shape(struct tuner *t, const struct mat *first, const struct apr_mat *const *part, uint32_t n_parts)
{
	uint32_t n = 0, mask = graphs_mask(part, n_parts), i;
	struct shape *s;

	for (i = 0; i < n_parts; i++)
		n += part[i]->n_out;
	for (i = 0; i < t->n_shapes; i++) {
		s = &t->shape[i];
		if (s->n != n || s->k != part[0]->n_in || s->mask != mask)
			continue;
		add_sample(s, first, part);
		return 0;
	}
	if (t->n_shapes == t->room) {
		uint32_t room = t->room ? 2 * t->room : 16;

		s = realloc(t->shape, room * sizeof *s);
		if (!s)
			return -ENOMEM;
		t->shape = s;
		t->room = room;
	}
	s = &t->shape[t->n_shapes++];
	*s = (struct shape){.n = n, .k = part[0]->n_in, .mask = mask, .n_parts = n_parts};
	add_sample(s, first, part);
	return 0;
}

static int list_shapes(struct tuner *t)
{
	struct apr_backend_model *m = t->m;
	uint32_t i;
	int rc = 0;

	for (i = 0; i < m->n_layers && !rc; i++) {
		const struct layer_mats *w = &m->mats[i];
		const struct apr_mat *const qkv[3] = {&w->wq.m, &w->wk.m, &w->wv.m}, *const o[3] = {&w->wo.m},
		                      *const up[3] = {&w->up.m}, *const down[3] = {&w->down.m};

		rc = add_shape(t, &w->wq, qkv, 3);
		rc = rc ? rc : add_shape(t, &w->wo, o, 1);
		rc = rc ? rc : add_shape(t, &w->up, up, 1);
		rc = rc ? rc : add_shape(t, &w->down, down, 1);
	}
	return rc;
}

/* ---- timing ---------------------------------------------------------------------------- */

static int cuda_rc(const struct tuner *t, cudaError_t rc, const char *what)
{
	return graphs_cuda(t->m->ctx, rc, what, NULL, 0);
}

static int run_algo(struct tuner *t, const struct gemm_layouts *l, const cublasLtMatmulAlgo_t *a, uint32_t turn)
{
	return gemm_launch(t->m, t->stream, l, a, t->weight[turn % t->n_weights], t->m->gemm_in, t->m->gemm_out);
}

/* us[i] of algorithms first … end - 1, `times` launches each; one that cannot run is never. */
static int time_algos(struct tuner *t, const struct gemm_layouts *l, uint32_t first, uint32_t end, uint32_t times)
{
	uint32_t i, k;
	int rc = 0;

	if (first < end)
		(void)run_algo(t, l, &t->algo[first], 0); /* loads its kernel */
	rc = cuda_rc(t, cudaEventRecord(t->event[first], t->stream), "timing");
	for (i = first; i < end && !rc; i++) {
		t->us[i] = 0.0f;
		for (k = 0; k < times; k++)
			if (run_algo(t, l, &t->algo[i], i * times + k + 1))
				t->us[i] = 1e9f;
		rc = cuda_rc(t, cudaEventRecord(t->event[i + 1], t->stream), "timing");
	}
	if (!rc)
		rc = cuda_rc(t, cudaStreamSynchronize(t->stream), "timing algorithms");
	for (i = first; i < end && !rc; i++) {
		float ms = 0.0f;

		rc = cuda_rc(t, cudaEventElapsedTime(&ms, t->event[i], t->event[i + 1]), "timing");
		t->us[i] += ms * 1e3f / (float)times;
	}
	return rc;
}

static void swap(struct tuner *t, uint32_t a, uint32_t b)
{
	cublasLtMatmulAlgo_t algo = t->algo[a];
	float us = t->us[a];

	t->algo[a] = t->algo[b];
	t->us[a] = t->us[b];
	t->algo[b] = algo;
	t->us[b] = us;
}

/* The fastest `most` of first … end - 1 to its beginning, in order. */
static void sort_best(struct tuner *t, uint32_t first, uint32_t end, uint32_t most)
{
	uint32_t i, k, best;

	for (i = first; i < end && i - first < most; i++) {
		for (best = i, k = i + 1; k < end; k++)
			if (t->us[k] < t->us[best])
				best = k;
		swap(t, i, best);
	}
}

/* ---- the reference ----------------------------------------------------------------------- */

static int hash_rows(struct tuner *t, uint32_t rows, uint64_t *to)
{
	struct apr_backend_model *m = t->m;
	int rc = apr_cuda_row_hash(t->stream, m->gemm_out, t->at->n, rows, m->hashes);

	if (!rc)
		rc = cuda_rc(t, cudaMemcpyAsync(to, m->hashes, rows * sizeof *to, cudaMemcpyDeviceToHost, t->stream), "row hashes");
	return rc ? rc : cuda_rc(t, cudaStreamSynchronize(t->stream), "row hashes");
}

static bool equal_bits(struct tuner *t, uint32_t rows)
{
	return hash_rows(t, rows, t->got) == 0 && memcmp(t->got, t->want, rows * sizeof *t->got) == 0;
}

/* The samples' weights as the products of this type read them: caches, or the first one widened on the spot. */
static int take_weights(struct tuner *t)
{
	struct apr_backend_model *m = t->m;
	const struct shape *s = t->at;
	uint8_t *dst = m->wide;
	uint32_t i;
	int rc = 0;

	t->n_weights = 0;
	if (s->sample[0].first->cache) {
		for (i = 0; i < s->n_samples; i++)
			t->weight[t->n_weights++] = s->sample[i].first->cache;
		return 0;
	}
	for (i = 0; i < s->n_parts && !rc; i++) {
		const struct apr_mat *w = s->sample[0].part[i];

		rc = apr_cuda_unpack_f16(t->stream, w, dst);
		dst += (uint64_t)w->n_in * w->n_out * 2;
	}
	t->weight[t->n_weights++] = m->wide;
	return rc;
}

/* E4M3: an algorithm of id 66, whichever the library proposes first for many rows. */
static int run_pinned(struct tuner *t)
{
	struct gemm_call many = {t->type, t->at->n, t->at->k, PINNED_ROWS, t->at->n}, here = many;
	struct gemm_layouts l;
	uint32_t proposed, n;
	int rc = gemm_layouts_make(&l, &many);

	if (rc)
		return rc;
	n = gemm_candidates(t->m->ctx, &l, &many, t->algo, MOST_CANDIDATES, &proposed);
	gemm_layouts_free(&l);
	here.rows = t->rows;
	rc = n ? gemm_layouts_make(&l, &here) : -ENOTSUP;
	if (rc)
		return rc;
	rc = gemm_usable(t->m->ctx, &l, &t->algo[0]) ? run_algo(t, &l, &t->algo[0], 0) : -ENOTSUP;
	gemm_layouts_free(&l);
	return rc;
}

/* Inputs, and the hashes that all must have. */
static int make_reference(struct tuner *t)
{
	struct apr_backend_model *m = t->m;
	bool f16 = t->type == GEMM_F16;
	int rc;

	if (t->ready)
		return 0;
	rc = apr_cuda_fill_wide(t->stream, f16 ? APR_REAL_F16 : APR_REAL_E4M3, false, t->rows, t->at->k, m->gemm_in);
	if (!rc && f16)
		rc = apr_cuda_gemm_loop(t->stream, t->weight[0], m->gemm_in, m->gemm_out, t->at->n, t->at->k, t->rows);
	else if (!rc)
		rc = run_pinned(t);
	if (!rc)
		rc = hash_rows(t, t->rows, t->want);
	t->ready = !rc;
	return rc;
}

/* ---- one bucket of one shape ------------------------------------------------------------- */

static struct algo_entry entry_of(const struct tuner *t, uint32_t type, uint32_t rows)
{
	return (struct algo_entry){.type = type, .n = t->at->n, .k = t->at->k, .rows = rows};
}

static const struct algo_entry *known(const struct tuner *t, uint32_t type, uint32_t rows)
{
	return algo_table_find(&t->m->ctx->table, type, t->at->n, t->at->k, rows);
}

static uint32_t nanoseconds(float us)
{
	return us < 4e6f ? (uint32_t)(us * 1e3f + 0.5f) : UINT32_MAX;
}

/* All once; the best of them and the proposals again; the first, from the fastest on, that has the reference's bits. */
static int choose(struct tuner *t, const struct gemm_layouts *l, const struct gemm_call *g, struct algo_entry *e)
{
	uint32_t proposed, n = gemm_candidates(t->m->ctx, l, g, t->algo, MOST_CANDIDATES, &proposed), i, end = proposed;
	int rc = 0;

	e->candidates = n;
	if (n > proposed) {
		rc = time_algos(t, l, proposed, n, 1);
		sort_best(t, proposed, n, KEPT);
		end = n - proposed < KEPT ? n : proposed + KEPT;
	}
	if (!rc)
		rc = time_algos(t, l, 0, end, g->rows <= 256 ? 8 : 3);
	if (rc)
		return rc;
	e->first_ns = proposed ? nanoseconds(t->us[0]) : 0;
	sort_best(t, 0, end, end);
	for (i = 0; i < end && t->us[i] < 1e8f; i++) {
		if (run_algo(t, l, &t->algo[i], 0) || !equal_bits(t, g->rows))
			continue;
		e->admitted = 1;
		e->ns = nanoseconds(t->us[i]);
		memcpy(e->algo, &t->algo[i], sizeof e->algo);
		break;
	}
	return 0;
}

static void say_choice(const struct tuner *t, const struct algo_entry *e)
{
	static const char *const name[] = {"f16", "e4m3", "e4m3 fast"};
	uint32_t id = 0, tile = 0;
	size_t got;
	cublasLtMatmulAlgo_t a;

	memcpy(&a, e->algo, sizeof a);
	(void)cublasLtMatmulAlgoConfigGetAttribute(&a, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof id, &got);
	(void)cublasLtMatmulAlgoConfigGetAttribute(&a, CUBLASLT_ALGO_CONFIG_TILE_ID, &tile, sizeof tile, &got);
	graphs_log(t->m->ctx, 0, "%s %u x %u, %u rows: first proposal %.1f us, chosen %.1f us of %u%s (id %u, tile %u)",
	           name[e->type], e->n, e->k, e->rows, e->first_ns * 1e-3, e->ns * 1e-3, e->candidates,
	           e->admitted ? "" : ", NONE with the reference's bits", id, tile);
}

static int gemm_bucket(struct tuner *t, uint32_t rows)
{
	struct gemm_call g = {t->type, t->at->n, t->at->k, rows, t->at->n};
	const struct algo_entry *e = known(t, t->type, rows);
	struct gemm_layouts l;
	struct algo_entry fresh = entry_of(t, t->type, rows);
	cublasLtMatmulAlgo_t algo;
	int rc;

	_Static_assert(sizeof algo == sizeof e->algo, "an algorithm is ALGO_WORDS words");
	if (gemm_find(t->m, &g))
		return 0;
	rc = gemm_layouts_make(&l, &g);
	if (rc)
		return rc;
	if (e && e->admitted)
		memcpy(&algo, e->algo, sizeof algo);
	if (!e || (e->admitted && !gemm_usable(t->m->ctx, &l, &algo))) {
		rc = make_reference(t);
		if (!rc)
			rc = choose(t, &l, &g, &fresh);
		if (!rc)
			say_choice(t, &fresh);
		if (!rc)
			rc = algo_table_put(&t->m->ctx->table, &fresh);
		e = &fresh;
	}
	gemm_layouts_free(&l);
	if (rc || !e->admitted)
		return rc;
	memcpy(&algo, e->algo, sizeof algo);
	return gemm_keep(t->m, &g, &algo);
}

/* ---- our own kernel ------------------------------------------------------------------------ */

static int run_fused(struct tuner *t, uint32_t rows, uint32_t turn)
{
	struct apr_backend_model *m = t->m;
	const struct shape *s = t->at;
	const struct apr_cuda_launch l = {.stream = t->stream, .rows = {.n = m->dev.prefill.n}, .bucket = rows,
	                                  .sms = (uint32_t)m->ctx->sms};

	return apr_cuda_fused_gemm(&l, s->sample[turn % s->n_samples].part, s->n_parts, m->gemm_in, m->gemm_out, s->n);
}

static int time_fused(struct tuner *t, uint32_t rows, float *us)
{
	const uint32_t times = 8;
	float ms = 0.0f;
	uint32_t i;
	int rc = run_fused(t, rows, 0);

	if (!rc)
		rc = cuda_rc(t, cudaEventRecord(t->event[0], t->stream), "timing");
	for (i = 0; i < times && !rc; i++)
		rc = run_fused(t, rows, i + 1);
	if (!rc)
		rc = cuda_rc(t, cudaEventRecord(t->event[1], t->stream), "timing");
	if (!rc)
		rc = cuda_rc(t, cudaStreamSynchronize(t->stream), "timing the fused product");
	if (!rc)
		rc = cuda_rc(t, cudaEventElapsedTime(&ms, t->event[0], t->event[1]), "timing");
	*us = ms * 1e3f / (float)times;
	return rc;
}

static int fused_bucket(struct tuner *t, uint32_t rows)
{
	struct apr_backend_model *m = t->m;
	struct algo_entry e = entry_of(t, ENTRY_FUSED | t->at->mask << 16, rows);
	float us = 0.0f;
	int rc;

	if (known(t, e.type, rows))
		return 0;
	rc = make_reference(t);
	if (!rc)
		rc = apr_cuda_fill_wide(t->stream, APR_REAL_F16, true, apr_cuda_fused_columns(rows), t->at->k, m->gemm_in);
	if (!rc)
		rc = cuda_rc(t, cudaMemcpyAsync(m->dev.prefill.n, &rows, sizeof rows, cudaMemcpyHostToDevice, t->stream), "rows");
	if (!rc)
		rc = run_fused(t, rows, 0);
	if (rc == -ENOTSUP)
		return algo_table_put(&m->ctx->table, &e);
	if (rc)
		return rc;
	e.candidates = 1;
	e.admitted = equal_bits(t, rows);
	if (e.admitted)
		rc = time_fused(t, rows, &us);
	e.ns = nanoseconds(us);
	graphs_log(m->ctx, 0, "fused %u x %u, tiles %#x, %u rows: %s, %.1f us", e.n, e.k, t->at->mask, rows,
	           e.admitted ? "the reference's bits" : "OTHER bits", e.ns * 1e-3);
	return rc ? rc : algo_table_put(&m->ctx->table, &e);
}

/* ns of making F16 rows of a weight, which route quant does for each product. */
static int unpack_cost(struct tuner *t, uint32_t *ns)
{
	struct algo_entry e = entry_of(t, ENTRY_UNPACK | t->at->mask << 16, 0);
	const struct algo_entry *found = known(t, e.type, 0);
	float ms = 0.0f;
	int rc;

	*ns = 0;
	if (t->m->sizes.route_id != ROUTE_QUANT)
		return 0;
	if (found) {
		*ns = found->ns;
		return 0;
	}
	rc = take_weights(t);
	if (!rc)
		rc = cuda_rc(t, cudaEventRecord(t->event[0], t->stream), "timing");
	if (!rc)
		rc = take_weights(t);
	if (!rc)
		rc = cuda_rc(t, cudaEventRecord(t->event[1], t->stream), "timing");
	if (!rc)
		rc = cuda_rc(t, cudaStreamSynchronize(t->stream), "timing");
	if (!rc)
		rc = cuda_rc(t, cudaEventElapsedTime(&ms, t->event[0], t->event[1]), "timing");
	e.admitted = 1;
	e.ns = *ns = nanoseconds(ms * 1e3f);
	return rc ? rc : algo_table_put(&t->m->ctx->table, &e);
}

/* Rows up to which it is not slower than the GEMM, every smaller size included. */
static int choose_fused(struct tuner *t, struct fused_choice *f)
{
	const struct apr_backend_config *cfg = &t->m->ctx->cfg;
	uint32_t unpack, i, max = t->m->sizes.max_rows;
	int rc = unpack_cost(t, &unpack);

	*f = (struct fused_choice){.mask = t->at->mask, .n = t->at->n, .k = t->at->k, .admitted = true};
	for (i = 0; i < N_FUSED_SIZES && fused_sizes[i] <= max && !rc; i++) {
		const struct algo_entry *e = known(t, ENTRY_FUSED | t->at->mask << 16, fused_sizes[i]),
		                        *g = known(t, GEMM_F16, fused_sizes[i]);

		f->admitted &= e && e->admitted;
		if (!f->admitted)
			break;
		if (!e->ns || !g) {
			f->upto = f->upto ? f->upto : DEFAULT_FUSED_ROWS;
			continue;
		}
		if ((!g->admitted || e->ns <= (uint64_t)g->ns + unpack) && (!i || f->upto == fused_sizes[i - 1]))
			f->upto = fused_sizes[i];
	}
	if (!f->admitted)
		f->upto = 0;
	else if (t->m->sizes.route_id == ROUTE_FUSED)
		f->upto = UINT32_MAX;
	else if (cfg->set_fused_rows)
		f->upto = cfg->fused_rows;
	return rc;
}

static int keep_fused(struct tuner *t)
{
	struct apr_backend_model *m = t->m;
	int rc;

	if (m->n_fused == m->room_fused) {
		uint32_t room = m->room_fused ? 2 * m->room_fused : 16;
		struct fused_choice *grown = realloc(m->fused, room * sizeof *grown);

		if (!grown)
			return -ENOMEM;
		m->fused = grown;
		m->room_fused = room;
	}
	rc = choose_fused(t, &m->fused[m->n_fused]);
	if (!rc)
		m->n_fused++;
	return rc;
}

const struct fused_choice *graphs_fused(const struct apr_backend_model *m, uint32_t mask, uint32_t n, uint32_t k)
{
	uint32_t i;

	for (i = 0; i < m->n_fused; i++)
		if (m->fused[i].mask == mask && m->fused[i].n == n && m->fused[i].k == k)
			return &m->fused[i];
	return NULL;
}

/* ---- one shape ------------------------------------------------------------------------------- */

static bool fused_known(const struct tuner *t)
{
	uint32_t i;

	for (i = 0; i < N_FUSED_SIZES && fused_sizes[i] <= t->m->sizes.max_rows; i++)
		if (!known(t, ENTRY_FUSED | t->at->mask << 16, fused_sizes[i]))
			return false;
	return true;
}

static int tune_16bit(struct tuner *t)
{
	uint32_t rows[MAX_BUCKETS], n = graphs_sizes(t->m, true, rows), i;
	int rc = take_weights(t);

	t->type = GEMM_F16;
	t->rows = t->m->sizes.max_rows;
	for (i = 0; i < n && !rc && t->m->sizes.route_id != ROUTE_FUSED; i++)
		rc = gemm_bucket(t, rows[i]);
	for (i = 0; i < N_FUSED_SIZES && fused_sizes[i] <= t->rows && !rc && !fused_known(t); i++)
		rc = fused_bucket(t, fused_sizes[i]);
	return rc ? rc : keep_fused(t);
}

static int tune_fp8(struct tuner *t)
{
	uint32_t rows[MAX_BUCKETS], n = graphs_sizes(t->m, false, rows), i;
	int rc = take_weights(t);

	t->type = t->m->sizes.route_id == ROUTE_FP8 ? GEMM_E4M3 : GEMM_E4M3_FAST;
	t->rows = (uint32_t)round_up(t->m->sizes.max_rows, 16);
	for (i = 0; i < n && !rc; i++)
		rc = gemm_bucket(t, (uint32_t)round_up(rows[i], 16));
	return rc;
}

/* F32: the library's first proposal; this route promises exactness, not equal bits. */
static int take_f32(struct tuner *t, uint32_t n, uint32_t k, uint32_t rows, uint32_t ld)
{
	struct gemm_call g = {GEMM_F32, n, k, rows, ld};
	struct gemm_layouts l;
	uint32_t proposed;
	int rc;

	if (gemm_find(t->m, &g))
		return 0;
	rc = gemm_layouts_make(&l, &g);
	if (rc)
		return rc;
	if (!gemm_candidates(t->m->ctx, &l, &g, t->algo, MOST_CANDIDATES, &proposed))
		rc = -ENOTSUP;
	gemm_layouts_free(&l);
	return rc ? rc : gemm_keep(t->m, &g, &t->algo[0]);
}

/* A matrix in the slices that its widened rows fit; its GEMM of each size of slice. */
static int tune_f32_mat(struct tuner *t, uint32_t n, uint32_t k, const uint32_t *rows, uint32_t n_rows, uint32_t ld)
{
	uint32_t each = wide_rows(t->m->wide_bytes, k, n), i;
	int rc = each ? 0 : -EINVAL;

	for (i = 0; i < n_rows && !rc; i++) {
		rc = take_f32(t, each, k, rows[i], ld);
		if (!rc && n % each)
			rc = take_f32(t, n % each, k, rows[i], ld);
	}
	return rc;
}

static int tune_f32(struct tuner *t)
{
	static const uint32_t decode[] = {1, 2, 4, 8, 16, 32, 64};
	const struct shape *s = t->at;
	uint32_t rows[MAX_BUCKETS], n = graphs_sizes(t->m, false, rows), i;
	int rc = 0;

	for (i = 0; i < s->n_parts && !rc; i++) {
		uint32_t part = s->sample[0].part[i]->n_out;

		rc = tune_f32_mat(t, part, s->k, rows, n, s->n);
		rc = rc ? rc : tune_f32_mat(t, part, s->k, decode, sizeof decode / sizeof *decode, s->n);
	}
	return rc;
}

static int tune_f32_head(struct tuner *t)
{
	static const uint32_t decode[] = {1, 2, 4, 8, 16, 32, 64};
	const struct apr_backend_model *m = t->m;

	return tune_f32_mat(t, m->sizes.n_vocab, m->tok_embd.m.n_in, decode, sizeof decode / sizeof *decode, m->sizes.n_vocab);
}

static int tune_shape(struct tuner *t)
{
	uint8_t route = t->m->sizes.route_id;

	t->ready = false;
	return route_is_16bit(route) ? tune_16bit(t) : route_is_fp8(route) ? tune_fp8(t) : tune_f32(t);
}

/* ---- the whole ----------------------------------------------------------------------------------- */

static const char *shape_fault(const struct apr_backend_model *m, const struct shape *s)
{
	uint32_t rows[MAX_BUCKETS], n = graphs_sizes(m, false, rows), i;
	const struct fused_choice *f = graphs_fused(m, s->mask, s->n, s->k);
	uint8_t route = m->sizes.route_id;

	if (route == ROUTE_F32 || (f && f->admitted && route == ROUTE_FUSED))
		return NULL;
	if (route == ROUTE_FUSED)
		return "the fused kernel does not have the reference's bits";
	for (i = 0; i < n; i++) {
		struct gemm_call g = {GEMM_F16, s->n, s->k, rows[i], s->n};

		if (route_is_fp8(route)) {
			g.type = route == ROUTE_FP8 ? GEMM_E4M3 : GEMM_E4M3_FAST;
			g.rows = (uint32_t)round_up(rows[i], 16);
		}
		if (!gemm_find(m, &g) && !(f && f->admitted))
			return "no algorithm of cuBLASLt has the reference's bits";
	}
	return NULL;
}

static int tune_all(struct tuner *t, char *err, size_t errlen)
{
	int rc = list_shapes(t);
	uint32_t i;

	for (i = 0; i < t->n_shapes && !rc; i++) {
		const char *fault;

		t->at = &t->shape[i];
		rc = tune_shape(t);
		fault = rc ? strerror(-rc) : shape_fault(t->m, t->at);
		if (fault)
			return graphs_fail(rc ? rc : -ENOTSUP, err, errlen, "products of %u x %u: %s", t->at->n, t->at->k, fault);
		if (t->in->progress)
			t->in->progress(t->in->progress_arg, 0.8 + 0.2 * (i + 1.0) / t->n_shapes);
	}
	if (!rc && t->m->sizes.route_id == ROUTE_F32)
		rc = tune_f32_head(t);
	if (!rc) /* no row is live until a step says so */
		rc = cuda_rc(t, cudaMemsetAsync(t->m->dev.prefill.n, 0, sizeof(uint32_t), t->stream), "rows");
	if (!rc)
		rc = cuda_rc(t, cudaStreamSynchronize(t->stream), "rows");
	return rc ? graphs_fail(rc, err, errlen, "choosing algorithms: %s", strerror(-rc)) : 0;
}

/* The table of this GPU, driver, library and module, read once. */
static void open_table(struct apr_backend_ctx *c, const char *dir)
{
	char why[120];
	int rc;

	if (c->table_path[0] || !dir)
		return;
	if ((size_t)snprintf(c->table_path, sizeof c->table_path, "%s/cublaslt-%d.algorithms", dir, c->device) >=
	    sizeof c->table_path) {
		c->table_path[0] = 0;
		return;
	}
	snprintf(c->table.key, sizeof c->table.key, "%s", c->identity);
	rc = algo_table_read(&c->table, c->table_path, why, sizeof why);
	if (!rc)
		graphs_log(c, 1, "%s: %u products' algorithms", c->table_path, c->table.n);
	else if (rc != -ENOENT)
		graphs_log(c, 2, "%s: %s; ignored, algorithms are timed again", c->table_path, why);
}

static void keep_table(struct apr_backend_ctx *c, double seconds)
{
	int rc;

	if (!c->table.changed)
		return;
	rc = c->table_path[0] ? algo_table_write(&c->table, c->table_path) : -ENOENT;
	if (rc)
		graphs_log(c, c->table_path[0] ? 2 : 1, "algorithms timed in %.1f s; not kept: %s", seconds,
		           c->table_path[0] ? strerror(-rc) : "there is no cache folder");
	else
		graphs_log(c, 1, "algorithms timed in %.1f s and kept in %s", seconds, c->table_path);
	c->table.changed = false;
}

static double now_s(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int graphs_tune(struct apr_backend_model *m, const struct apr_backend_load *in, char *err, size_t errlen)
{
	struct tuner *t = calloc(1, sizeof *t);
	uint64_t rows = round_up(m->sizes.max_rows, 64);
	double start = now_s();
	uint32_t i;
	int rc = 0;

	if (t) {
		t->want = calloc(rows, sizeof *t->want);
		t->got = calloc(rows, sizeof *t->got);
	}
	if (!t || !t->want || !t->got) {
		rc = graphs_fail(-ENOMEM, err, errlen, "out of memory");
	} else {
		t->m = m;
		t->in = in;
		t->stream = m->ctx->setup;
		open_table(m->ctx, in->cache_dir);
		for (i = 0; i <= MOST_CANDIDATES && !rc; i++)
			rc = graphs_cuda(m->ctx, cudaEventCreate(&t->event[i]), "an event", err, errlen);
		if (!rc)
			rc = tune_all(t, err, errlen);
		for (i = 0; i <= MOST_CANDIDATES; i++)
			if (t->event[i])
				cudaEventDestroy(t->event[i]);
		free(t->shape);
	}
	if (!rc)
		keep_table(m->ctx, now_s() - start);
	if (t) {
		free(t->want);
		free(t->got);
	}
	free(t);
	return rc;
}
