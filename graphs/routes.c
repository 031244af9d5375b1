/* SPDX-License-Identifier: MIT */
/*
 * What the ops of a prompt become, by route; in the exact route what all ops become.
 *
 * Owns: how a product reads its weights (a cache, rows widened on the way, the tiles
 * themselves), the form of its inputs, the sizes of prefill graphs. Does not own the
 * choice of algorithms (tune.c) nor kernels.
 *
 * An input is converted once for all that read it: q, k and v, and gate and up, are
 * one product each, over one conversion. Two ops hand on to the next of the same
 * recording (struct apr_backend_model, between): the output of ffn_in goes straight
 * into the form that ffn_down reads, and scales still owed to y are settled by the
 * norm that reads it.
 */
#include <errno.h>
#include <stdio.h>

#include "graphs/graphs.h"

/* ---- the sizes of prefill graphs ---------------------------------------------------------- */

uint32_t graphs_most_fused(const struct apr_backend_model *m)
{
	uint32_t i, most = 0;

	for (i = 0; i < m->n_fused; i++)
		if (m->fused[i].upto > most)
			most = m->fused[i].upto;
	return most;
}

uint32_t graphs_sizes(const struct apr_backend_model *m, bool small, uint32_t *rows)
{
	static const uint32_t size[] = {4,   8,   16,  32,  64,   96,   128,  192, 256,
	                                384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048};
	uint32_t i, n = 0;

	for (i = 0; i < sizeof size / sizeof *size; i++)
		if (size[i] < m->sizes.max_rows && (small || size[i] >= 64) && n < MAX_BUCKETS - 1)
			rows[n++] = size[i];
	rows[n++] = m->sizes.max_rows;
	return n;
}

/* ---- a product ----------------------------------------------------------------------------- */

struct product {
	const struct apr_mat *w[3]; /* side by side */
	uint32_t n_w, n, k;
	bool fused;
	struct apr_cuda_gemm_in in;
	struct apr_cuda_scales scale; /* owed to the output */
};

static const struct mat *mat_of(const struct apr_mat *w)
{
	return (const struct mat *)(const void *)w;
}

static bool wants_fused(const struct apr_backend_model *m, const struct product *p, uint32_t rows)
{
	const struct fused_choice *f;
	struct gemm_call g = {GEMM_F16, p->n, p->k, rows, p->n};

	if (!route_is_16bit(m->sizes.route_id))
		return false;
	f = graphs_fused(m, graphs_mask(p->w, p->n_w), p->n, p->k);
	return f && f->admitted && (rows <= f->upto || !gemm_find(m, &g));
}

static uint64_t real_bytes(enum apr_cuda_real real)
{
	return real == APR_REAL_F32 ? 4 : real == APR_REAL_E4M3 ? 1 : 2;
}

/* p->w, n_w are set. -EINVAL: it does not fit the plan's buffers */
static int plan_product(const struct apr_backend_model *m, const struct apr_cuda_launch *l, struct product *p)
{
	uint8_t route = m->sizes.route_id;
	uint32_t i;

	p->k = p->w[0]->n_in;
	p->n = 0;
	for (i = 0; i < p->n_w; i++)
		p->n += p->w[i]->n_out;
	p->fused = wants_fused(m, p, l->bucket);
	p->in = (struct apr_cuda_gemm_in){
		.real = route == ROUTE_F32 ? APR_REAL_F32 : route_is_fp8(route) ? APR_REAL_E4M3 : APR_REAL_F16,
		.rows = m->gemm_in,
		.row_scale = route == ROUTE_F32 ? NULL : m->row_scale,
		.padded = p->fused ? apr_cuda_fused_columns(l->bucket) : (uint32_t)round_up(l->bucket, 16),
		.fused = p->fused,
	};
	p->scale = (struct apr_cuda_scales){.row = p->in.row_scale, .channel = mat_of(p->w[0])->channel};
	if (p->in.padded * real_bytes(p->in.real) * p->k > m->gemm_in_bytes)
		return -EINVAL;
	return 0;
}

/* F32: slices of each matrix's rows, widened, then multiplied. */
static int exact_product(struct apr_backend_model *m, const struct apr_cuda_launch *l, const struct product *p, float *out,
                         uint32_t ld)
{
	uint32_t i, at, first = 0, n;
	int rc = 0;

	for (i = 0; i < p->n_w && !rc; first += p->w[i++]->n_out) {
		uint32_t each = wide_rows(m->wide_bytes, p->k, p->w[i]->n_out);

		for (at = 0; at < p->w[i]->n_out && !rc; at += n) {
			struct gemm_call g = {GEMM_F32, 0, p->k, l->bucket, ld};

			n = p->w[i]->n_out - at < each ? p->w[i]->n_out - at : each;
			if (!n)
				return -EINVAL;
			g.n = n;
			rc = apr_cuda_unpack(l->stream, p->w[i], at, n, APR_REAL_F32, m->wide, NULL);
			if (!rc)
				rc = graphs_gemm(m, l->stream, &g, m->wide, m->gemm_in, out + first + at);
		}
	}
	return rc;
}

/* The matrices' F16 rows side by side, for one GEMM. */
static int widen(struct apr_backend_model *m, const struct apr_cuda_launch *l, const struct product *p)
{
	uint8_t *dst = m->wide;
	uint32_t i;
	int rc = 0;

	if ((uint64_t)p->n * p->k * 2 > m->wide_bytes)
		return -EINVAL;
	for (i = 0; i < p->n_w && !rc; i++) {
		rc = apr_cuda_unpack_f16(l->stream, p->w[i], dst);
		dst += (uint64_t)p->w[i]->n_in * p->w[i]->n_out * 2;
	}
	return rc;
}

/* out, p->n floats a row, of what gemm_in holds */
static int run_product(struct apr_backend_model *m, const struct apr_cuda_launch *l, const struct product *p, float *out)
{
	uint8_t route = m->sizes.route_id;
	struct gemm_call g = {GEMM_F16, p->n, p->k, l->bucket, p->n};
	const void *w = mat_of(p->w[0])->cache;
	int rc;

	if (route == ROUTE_F32)
		return exact_product(m, l, p, out, p->n);
	if (p->fused)
		return apr_cuda_fused_gemm(l, p->w, p->n_w, m->gemm_in, out, p->n);
	if (route_is_fp8(route)) {
		g.type = route == ROUTE_FP8 ? GEMM_E4M3 : GEMM_E4M3_FAST;
		g.rows = p->in.padded;
	}
	if (!w && route == ROUTE_QUANT) {
		rc = widen(m, l, p);
		if (rc)
			return rc;
		w = m->wide;
	}
	return w ? graphs_gemm(m, l->stream, &g, w, m->gemm_in, out) : -EINVAL;
}

static bool fits(const struct apr_backend_model *m, const struct product *p)
{
	return (uint64_t)p->n * p->in.padded <= m->gemm_out_floats;
}

/* ---- ops --------------------------------------------------------------------------------------- */

/* What the product before left to do to y; done by whoever reads y next. */
static const struct apr_cuda_owed *take_owed(struct apr_backend_model *m, const float *y)
{
	bool owes = m->between.owes && y;

	m->between.owes = false;
	m->between.held = NULL;
	return owes ? &m->between.owed : NULL;
}

int graphs_attn_in(struct apr_backend_model *m, const struct apr_cuda_launch *l, const struct apr_op_attn_in *a)
{
	const struct apr_cuda_owed *owed = take_owed(m, a->y);
	struct product p = {.w = {a->wq, a->wk, a->wv}, .n_w = 3};
	const float *q = m->gemm_out, *k = q + a->wq->n_out, *v = k + a->wk->n_out;
	int rc = plan_product(m, l, &p);

	if (!rc && !fits(m, &p))
		rc = -EINVAL;
	if (!rc)
		rc = apr_cuda_prefill_norm(l, a->x, a->y, a->x_out, a->post, a->norm, a->n_embd, owed, &p.in);
	if (!rc)
		rc = run_product(m, l, &p, m->gemm_out);
	return rc ? rc : apr_cuda_prefill_heads(l, a, q, p.n, k, p.n, v, p.n, p.scale);
}

int graphs_proj(struct apr_backend_model *m, const struct apr_cuda_launch *l, const struct apr_op_proj *a)
{
	bool held = m->between.held == a->in, last = a->w == &m->mats[m->n_layers - 1].down.m;
	struct product p = {.w = {a->w}, .n_w = 1};
	int rc = plan_product(m, l, &p);
	float *out;

	if (rc || (m->between.held && !held))
		return rc ? rc : -EINVAL;
	m->between.held = NULL;
	out = p.in.padded > l->bucket && p.in.real == APR_REAL_E4M3 ? m->gemm_out : a->y; /* y ends at max_rows */
	if (out != a->y && !fits(m, &p))
		return -EINVAL;
	if (!held)
		rc = apr_cuda_prefill_convert(l, a->in, a->n_in, &p.in);
	if (!rc)
		rc = run_product(m, l, &p, out);
	if (rc || (out == a->y && !p.scale.row && !p.scale.channel && !a->bias))
		return rc;
	if (out != a->y || last) /* the head reads y as it is */
		return apr_cuda_prefill_finish(l, a->y, out, a->n_out, p.scale, a->bias);
	m->between.owes = true;
	m->between.owed = (struct apr_cuda_owed){.scale = p.scale, .bias = a->bias};
	return 0;
}

/* The product that reads what ffn_in makes: the same layer's */
static const struct apr_mat *down_of(const struct apr_backend_model *m, const struct apr_mat *up)
{
	uint32_t i;

	for (i = 0; i < m->n_layers; i++)
		if (&m->mats[i].up.m == up)
			return &m->mats[i].down.m;
	return NULL;
}

int graphs_ffn_in(struct apr_backend_model *m, const struct apr_cuda_launch *l, const struct apr_op_ffn_in *a)
{
	const struct apr_cuda_owed *owed = take_owed(m, a->y);
	struct product p = {.w = {a->up}, .n_w = 1}, next = {.w = {down_of(m, a->up)}, .n_w = 1};
	const float *gate = a->gate ? m->gemm_out : NULL, *up = a->gate ? m->gemm_out + a->n_ff : m->gemm_out;
	int rc = plan_product(m, l, &p);

	if (!rc && !fits(m, &p))
		rc = -EINVAL;
	if (!rc)
		rc = apr_cuda_prefill_norm(l, a->x, a->y, a->x_out, a->post, a->norm, a->n_embd, owed, &p.in);
	if (!rc)
		rc = run_product(m, l, &p, m->gemm_out);
	if (!rc)
		rc = next.w[0] ? plan_product(m, l, &next) : -EINVAL;
	if (rc)
		return rc;
	rc = apr_cuda_prefill_act_in(l, a->act, gate, up, p.n, a->n_ff, p.scale, &next.in);
	if (rc == -ENOTSUP) /* too wide for a block */
		return apr_cuda_prefill_act(l, a->act, gate, up, p.n, a->a, a->n_ff, p.scale);
	m->between.held = rc ? NULL : a->a;
	return rc;
}

/* The exact route's logits: of the wanted rows, a slice of the output matrix at a time. */
int graphs_head(struct apr_backend_model *m, const struct apr_cuda_launch *l, const struct apr_op_head *a)
{
	struct apr_mat w = *a->w;
	struct product p = {.w = {&w}, .n_w = 1, .n = a->n_vocab, .k = a->n_embd};
	int rc;

	if (w.n_out < a->n_vocab || w.n_in != a->n_embd)
		return -EINVAL;
	w.n_out = a->n_vocab;
	p.in = (struct apr_cuda_gemm_in){.real = APR_REAL_F32, .rows = m->gemm_in, .padded = (uint32_t)round_up(l->bucket, 16),
	                                 .pick = l->rows.out};
	if (p.in.padded * sizeof(float) * p.k > m->gemm_in_bytes)
		return -EINVAL;
	rc = apr_cuda_prefill_norm(l, a->x, a->y, NULL, a->post, a->norm, a->n_embd, NULL, &p.in);
	if (!rc)
		rc = exact_product(m, l, &p, a->logits, a->n_vocab);
	if (rc || (a->scale == 1.0f && a->softcap == 0.0f)) /* exactly: nothing to do */
		return rc;
	return apr_cuda_cap_logits(l, a->logits, a->n_vocab, a->scale, a->softcap, l->rows.n_out);
}

/* ---- for status ------------------------------------------------------------------------------------ */

int graphs_describe(const struct apr_backend_model *m, char *buf, size_t len)
{
	uint8_t route = m->sizes.route_id;
	const char *form = route == ROUTE_QUANT ? "widened on the way" : "cached";
	uint32_t most = graphs_most_fused(m), least = UINT32_MAX, i;

	for (i = 0; i < m->n_fused; i++)
		if (m->fused[i].upto < least)
			least = m->fused[i].upto;
	if (route == ROUTE_F32)
		snprintf(buf, len, "F32 products (TF32 off); equal bits are not promised on this route");
	else if (route_is_fp8(route))
		snprintf(buf, len, "prompts in E4M3 (%s accumulation), generated tokens as in fp16",
		         route == ROUTE_FP8 ? "exact" : "fast");
	else if (route == ROUTE_FUSED)
		snprintf(buf, len, "prompts straight from the quantised tiles");
	else if (!most)
		snprintf(buf, len, "prompts in F16 (%s)", form);
	else
		snprintf(buf, len, "prompts in F16 (%s), from the quantised tiles up to %u rows, by shape (%u at least)", form, most,
		         least);
	return 0;
}
