/* SPDX-License-Identifier: MIT */
/* A forward pass in double: see ref_forward.h. */
#include "tests/support/ref_forward.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/common/dequant.h"

static void *need(size_t n, size_t size)
{
	void *p = calloc(n ? n : 1, size);

	if (!p)
		abort();
	return p;
}

/* out[n_out] = W · in (+ bias) */
static void linear(const struct apr_weight *w, const struct apr_weight *bias, const double *in, double *out)
{
	size_t row = w->bytes / w->n_out;
	float *f = need(w->n_in, sizeof *f);
	uint32_t o, i;

	for (o = 0; o < w->n_out; o++) {
		double sum = bias && bias->data ? (double)((const float *)bias->data)[o] : 0.0;

		apr_dequant_row(w->type, (const uint8_t *)w->data + o * row, w->n_in, f);
		for (i = 0; i < w->n_in; i++)
			sum += (double)f[i] * in[i];
		out[o] = sum;
	}
	free(f);
}

static void norm(const struct apr_weight *w, double eps, const double *in, double *out, uint32_t n)
{
	const float *f = w->data;
	double sum = 0, scale;
	uint32_t i;

	for (i = 0; i < n; i++)
		sum += in[i] * in[i];
	scale = 1.0 / sqrt(sum / n + eps);
	for (i = 0; i < n; i++)
		out[i] = in[i] * scale * (double)f[i];
}

void ref_rope(const struct apr_rope *r, double base, int scaled, uint32_t i, double pos, double *angle, double *magnitude)
{
	double theta = pos / pow(base, 2.0 * i / r->n_rot), low, high, g;

	*magnitude = 1.0;
	*angle = theta;
	if (!scaled)
		return;
	if (r->freq_factors)
		theta /= (double)r->freq_factors[i];
	*angle = theta;
	if (r->scaling == APR_ROPE_SCALING_LINEAR)
		*angle = theta / (double)r->factor;
	if (r->scaling != APR_ROPE_SCALING_YARN)
		return;
	/* "NTK by parts": pairs that turn often keep their angle, slow ones are interpolated, a ramp between */
	low = floor(r->n_rot * log((double)r->original_ctx / ((double)r->beta_fast * 2 * M_PI)) / (2 * log(base)));
	high = ceil(r->n_rot * log((double)r->original_ctx / ((double)r->beta_slow * 2 * M_PI)) / (2 * log(base)));
	if (low < 0)
		low = 0;
	if (high > r->n_rot - 1)
		high = r->n_rot - 1;
	g = (i - low) / (high - low > 0.001 ? high - low : 0.001);
	g = g < 0 ? 0 : g > 1 ? 1 : g;
	g = 1 - (1 - g) * (double)r->ext_factor; /* share of the interpolated angle */
	*angle = g * theta / (double)r->factor + (1 - g) * theta;
	*magnitude = (double)r->attn_factor * (0.1 * log((double)r->factor) + 1);
}

static void rotate(const struct apr_model *m, const struct apr_layer *la, double *head, uint32_t pos)
{
	uint32_t half = m->rope.n_rot / 2, i;

	for (i = 0; m->rope.kind != APR_ROPE_NONE && i < half; i++) {
		uint32_t a = m->rope.kind == APR_ROPE_PAIRS ? 2 * i : i, b = m->rope.kind == APR_ROPE_PAIRS ? 2 * i + 1 : i + half;
		double angle, mag, x = head[a], y = head[b];

		ref_rope(&m->rope, (double)la->rope_base, la->rope_scaled, i, pos, &angle, &mag);
		head[a] = (x * cos(angle) - y * sin(angle)) * mag;
		head[b] = (x * sin(angle) + y * cos(angle)) * mag;
	}
}

static void heads(const struct apr_model *m, const struct apr_layer *la, const struct apr_weight *nw, double *v, uint32_t n,
                  uint32_t pos)
{
	double *t = need(m->head_dim, sizeof *t);
	uint32_t h;

	for (h = 0; h < n; h++) {
		double *head = v + (size_t)h * m->head_dim;

		if (nw->data) {
			norm(nw, (double)m->norm_eps, head, t, m->head_dim);
			memcpy(head, t, m->head_dim * sizeof *t);
		}
		rotate(m, la, head, pos);
	}
	free(t);
}

struct past { /* keys and values of one layer */
	double *k, *v;
};

static void attend(const struct apr_model *m, const struct apr_layer *la, const struct past *p, const double *q, uint32_t pos,
                   double *o)
{
	uint32_t from = la->window && pos + 1 > la->window ? pos + 1 - la->window : 0, h, t, d;
	uint32_t group = m->n_heads / la->n_kv_heads;
	double *s = need(pos + 1, sizeof *s), best, sum;

	for (h = 0; h < m->n_heads; h++) {
		best = -INFINITY;
		sum = 0;
		for (t = from; t <= pos; t++) {
			const double *k = p->k + ((size_t)t * la->n_kv_heads + h / group) * m->head_dim;

			s[t] = 0;
			for (d = 0; d < m->head_dim; d++)
				s[t] += q[(size_t)h * m->head_dim + d] * k[d];
			s[t] *= (double)m->attn_scale;
			if (m->attn_softcap > 0)
				s[t] = (double)m->attn_softcap * tanh(s[t] / (double)m->attn_softcap);
			best = fmax(best, s[t]);
		}
		for (t = from; t <= pos; t++)
			sum += s[t] = exp(s[t] - best);
		for (d = 0; d < m->v_dim; d++) {
			double acc = 0;

			for (t = from; t <= pos; t++)
				acc += s[t] * p->v[((size_t)t * la->n_kv_heads + h / group) * m->v_dim + d];
			o[(size_t)h * m->v_dim + d] = acc / sum;
		}
	}
	free(s);
}

static double activate(enum apr_ffn_act act, double x)
{
	switch (act) {
	case APR_ACT_SILU:
		return x / (1 + exp(-x));
	case APR_ACT_GELU_TANH:
		return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
	case APR_ACT_GELU:
		return 0.5 * x * (1 + erf(x / sqrt(2)));
	case APR_ACT_RELU2:
		return x > 0 ? x * x : 0;
	}
	return NAN;
}

static void add(const struct apr_model *m, const struct apr_weight *post, double *x, double *y)
{
	double *t = need(m->n_embd, sizeof *t);
	uint32_t i;

	memcpy(t, y, m->n_embd * sizeof *t);
	if (post->data)
		norm(post, (double)m->norm_eps, y, t, m->n_embd);
	for (i = 0; i < m->n_embd; i++)
		x[i] += t[i];
	free(t);
}

static void layer(const struct apr_model *m, const struct apr_layer *la, struct past *p, double *x, uint32_t pos)
{
	double *h = need(m->n_embd, sizeof *h), *y = need(m->n_embd, sizeof *y);
	double *q = need((size_t)m->n_heads * m->head_dim, sizeof *q), *o = need((size_t)m->n_heads * m->v_dim, sizeof *o);
	double *g = need(m->n_ff, sizeof *g), *u = need(m->n_ff, sizeof *u);
	double *k = p->k + (size_t)pos * la->n_kv_heads * m->head_dim;
	uint32_t i;

	norm(&la->attn_norm, (double)m->norm_eps, x, h, m->n_embd);
	linear(&la->wq, &la->bq, h, q);
	linear(&la->wk, &la->bk, h, k);
	linear(&la->wv, &la->bv, h, p->v + (size_t)pos * la->n_kv_heads * m->v_dim);
	heads(m, la, &la->q_norm, q, m->n_heads, pos);
	heads(m, la, &la->k_norm, k, la->n_kv_heads, pos);
	attend(m, la, p, q, pos, o);
	linear(&la->wo, &la->bo, o, y);
	add(m, &la->post_attn_norm, x, y);
	norm(&la->ffn_norm, (double)m->norm_eps, x, h, m->n_embd);
	linear(&la->up, NULL, h, u);
	if (la->gate.data) {
		linear(&la->gate, NULL, h, g);
		for (i = 0; i < m->n_ff; i++)
			u[i] *= activate(m->act, g[i]);
	} else {
		for (i = 0; i < m->n_ff; i++)
			u[i] = activate(m->act, u[i]);
	}
	linear(&la->down, NULL, u, y);
	add(m, &la->post_ffn_norm, x, y);
	free(h);
	free(y);
	free(q);
	free(o);
	free(g);
	free(u);
}

void ref_forward(const struct apr_model *m, const uint32_t *ids, uint32_t n, double *logits)
{
	struct past *past = need(m->n_layers, sizeof *past);
	double *x = need(m->n_embd, sizeof *x), *h = need(m->n_embd, sizeof *h);
	float *row = need(m->n_embd, sizeof *row);
	uint32_t l, t, i;

	for (l = 0; l < m->n_layers; l++) {
		past[l].k = need((size_t)n * m->layers[l].n_kv_heads * m->head_dim, sizeof(double));
		past[l].v = need((size_t)n * m->layers[l].n_kv_heads * m->v_dim, sizeof(double));
	}
	for (t = 0; t < n; t++) {
		double *out = logits + (size_t)t * m->n_vocab;

		apr_dequant_row(m->tok_embd.type, (const uint8_t *)m->tok_embd.data + ids[t] * (m->tok_embd.bytes / m->tok_embd.n_out),
		                m->n_embd, row);
		for (i = 0; i < m->n_embd; i++)
			x[i] = (double)row[i] * (double)m->embd_scale;
		for (l = 0; l < m->n_layers; l++)
			layer(m, &m->layers[l], &past[l], x, t);
		norm(&m->output_norm, (double)m->norm_eps, x, h, m->n_embd);
		linear(&m->output, NULL, h, out);
		for (i = 0; m->logit_softcap > 0 && i < m->n_vocab; i++)
			out[i] = (double)m->logit_softcap * tanh(out[i] / (double)m->logit_softcap);
	}
	for (l = 0; l < m->n_layers; l++) {
		free(past[l].k);
		free(past[l].v);
	}
	free(past);
	free(x);
	free(h);
	free(row);
}
