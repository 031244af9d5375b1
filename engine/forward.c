/* SPDX-License-Identifier: MIT */
/* The forward pass as a list of op calls: see forward.h. */
#include "engine/forward.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"

/* ---- RoPE ---------------------------------------------------------------------- */

/* The dimension pair whose wave turns `turns` times within ctx positions. */
static double yarn_pair(uint32_t n_rot, uint32_t ctx, double turns, double base)
{
	return n_rot * log(ctx / (turns * 2.0 * M_PI)) / (2.0 * log(base));
}

/* Angle of pair i a position; *magnitude is what cosine and sine are multiplied by. */
static double rope_angle(const struct apr_rope *r, double base, bool scaled, uint32_t i, double *magnitude)
{
	double freq = pow(base, -2.0 * i / r->n_rot), slow, low, high, span, ramp, keep;

	*magnitude = 1.0;
	if (!scaled)
		return freq;
	if (r->freq_factors)
		freq /= (double)r->freq_factors[i];
	if (r->scaling == APR_ROPE_SCALING_LINEAR)
		return freq / (double)r->factor;
	if (r->scaling != APR_ROPE_SCALING_YARN)
		return freq;
	slow = freq / (double)r->factor;
	*magnitude = (double)r->attn_factor;
	if (r->ext_factor == 0.0f) /* exactly: yarn without its blend is linear */
		return slow;
	low = floor(yarn_pair(r->n_rot, r->original_ctx, (double)r->beta_fast, base));
	high = ceil(yarn_pair(r->n_rot, r->original_ctx, (double)r->beta_slow, base));
	low = fmax(low, 0.0);
	high = fmin(high, r->n_rot - 1.0);
	span = fmax(high - low, 0.001);
	ramp = fmin(fmax((i - low) / span, 0.0), 1.0);
	keep = (1.0 - ramp) * (double)r->ext_factor; /* share of the unscaled angle */
	*magnitude *= 1.0 + 0.1 * log((double)r->factor);
	return slow * (1.0 - keep) + freq * keep;
}

void apr_rope_fill(const struct apr_rope *r, float base, bool scaled, uint32_t n_ctx, float *out)
{
	uint32_t half = r->n_rot / 2, i, p;

	for (i = 0; i < half; i++) {
		double magnitude, angle = rope_angle(r, (double)base, scaled, i, &magnitude);

		for (p = 0; p < n_ctx; p++) {
			float *cs = out + ((size_t)p * half + i) * 2;

			cs[0] = (float)(cos(p * angle) * magnitude);
			cs[1] = (float)(sin(p * angle) * magnitude);
		}
	}
}

static int find_ropes(struct apr_forward *f, char *err, size_t errlen)
{
	const struct apr_model *m = f->model;
	uint32_t l, i;

	if (m->rope.kind == APR_ROPE_NONE)
		return 0;
	for (l = 0; l < m->n_layers; l++) {
		const struct apr_layer *la = &m->layers[l];

		for (i = 0; i < f->n_ropes; i++)
			if (f->rope[i].base == la->rope_base && f->rope[i].scaled == la->rope_scaled)
				break;
		if (i == f->n_ropes) {
			if (i == APR_MAX_ROPE_TABLES)
				return apr_engine_fail(-ENOTSUP, err, errlen, "blk.%u: more than %u distinct rope bases", l,
				                       APR_MAX_ROPE_TABLES);
			f->rope[f->n_ropes++] = (struct apr_rope_spec){la->rope_base, la->rope_scaled};
		}
		f->rope_of[l] = (uint8_t)i;
	}
	return 0;
}

/* ---- KV groups ----------------------------------------------------------------- */

static int find_groups(struct apr_forward *f, struct apr_sizes *s, char *err, size_t errlen)
{
	const struct apr_model *m = f->model;
	uint32_t l, g;

	s->n_groups = 0;
	for (l = 0; l < m->n_layers; l++) {
		const struct apr_layer *la = &m->layers[l];
		/* a window that the context never fills is none */
		uint32_t window = la->window < s->n_ctx ? la->window : 0;

		for (g = 0; g < s->n_groups; g++)
			if (s->group[g].n_kv_heads == la->n_kv_heads && s->group[g].window == window)
				break;
		if (g == s->n_groups) {
			if (g == APR_MAX_KV_GROUPS)
				return apr_engine_fail(-ENOTSUP, err, errlen, "blk.%u: more than %u distinct KV shapes", l,
				                       APR_MAX_KV_GROUPS);
			s->group[g] = (struct apr_kv_group){.type = s->kv_type, .n_kv_heads = la->n_kv_heads,
			                                    .k_dim = m->head_dim, .v_dim = m->v_dim, .window = window};
			s->n_groups++;
		}
		f->kv[l].group = &s->group[g];
		f->kv[l].index = s->group[g].n_layers++;
	}
	return 0;
}

int apr_forward_init(struct apr_forward *f, const struct apr_model *m, struct apr_sizes *s, char *err, size_t errlen)
{
	int rc;

	memset(f, 0, sizeof *f);
	f->model = m;
	f->sizes = s;
	f->kv = calloc(m->n_layers, sizeof *f->kv);
	f->rope_of = calloc(m->n_layers, sizeof *f->rope_of);
	if (!f->kv || !f->rope_of) {
		apr_forward_free(f);
		return apr_engine_fail(-ENOMEM, err, errlen, "out of memory");
	}
	rc = find_ropes(f, err, errlen);
	if (!rc)
		rc = find_groups(f, s, err, errlen);
	if (rc)
		apr_forward_free(f);
	return rc;
}

void apr_forward_free(struct apr_forward *f)
{
	free(f->kv);
	free(f->rope_of);
	f->kv = NULL;
	f->rope_of = NULL;
}

/* ---- the pass ------------------------------------------------------------------ */

struct pass { /* where the residual stands between two ops */
	const struct apr_forward *f;
	const struct apr_ops *ops;
	uint32_t at;       /* x[at] holds the residual */
	const float *y;    /* not yet added, or NULL */
	struct apr_norm post; /* what y goes through first */
};

static struct apr_norm norm_of(const struct pass *p, const float *w)
{
	return (struct apr_norm){.w = w, .eps = p->f->model->norm_eps};
}

static int attention(struct pass *p, uint32_t l)
{
	const struct apr_forward *f = p->f;
	const struct apr_model *m = f->model;
	const struct apr_layer *la = &m->layers[l];
	const struct apr_layer_weights *w = &f->weights->layers[l];
	struct apr_op_attn_in in = {
		.x = f->x[p->at], .y = p->y, .x_out = f->x[!p->at], .post = p->post, .norm = norm_of(p, w->attn_norm),
		.n_embd = m->n_embd, .n_heads = m->n_heads, .n_kv_heads = la->n_kv_heads, .k_dim = m->head_dim, .v_dim = m->v_dim,
		.wq = w->wq, .wk = w->wk, .wv = w->wv, .bq = w->bq, .bk = w->bk, .bv = w->bv,
		.q_norm = norm_of(p, w->q_norm), .k_norm = norm_of(p, w->k_norm),
		.q = f->q, .kv = f->kv[l],
	};
	struct apr_op_attn at = {
		.q = f->q, .o = f->o, .n_heads = m->n_heads, .n_kv_heads = la->n_kv_heads, .k_dim = m->head_dim, .v_dim = m->v_dim,
		.scale = m->attn_scale, .softcap = m->attn_softcap, .window = f->kv[l].group->window, .kv = f->kv[l],
	};
	struct apr_op_proj out = {
		.in = f->o, .y = f->y, .n_in = m->n_heads * m->v_dim, .n_out = m->n_embd, .w = w->wo, .bias = w->bo,
	};
	int rc;

	if (m->rope.kind != APR_ROPE_NONE)
		in.rope = (struct apr_rope_table){m->rope.kind, m->rope.n_rot, f->rope_table[f->rope_of[l]]};
	rc = p->ops->attn_in(p->ops->ctx, &in);
	if (!rc)
		rc = p->ops->attn(p->ops->ctx, &at);
	if (!rc)
		rc = p->ops->proj(p->ops->ctx, &out);
	p->at = !p->at;
	p->y = f->y;
	p->post = norm_of(p, w->post_attn_norm);
	return rc;
}

static int feed_forward(struct pass *p, uint32_t l)
{
	const struct apr_forward *f = p->f;
	const struct apr_model *m = f->model;
	const struct apr_layer_weights *w = &f->weights->layers[l];
	struct apr_op_ffn_in in = {
		.x = f->x[p->at], .y = p->y, .x_out = f->x[!p->at], .post = p->post, .norm = norm_of(p, w->ffn_norm),
		.n_embd = m->n_embd, .n_ff = m->n_ff, .gate = w->gate, .up = w->up, .act = m->act, .a = f->a,
	};
	struct apr_op_proj out = {.in = f->a, .y = f->y, .n_in = m->n_ff, .n_out = m->n_embd, .w = w->down};
	int rc;

	rc = p->ops->ffn_in(p->ops->ctx, &in);
	if (!rc)
		rc = p->ops->proj(p->ops->ctx, &out);
	p->at = !p->at;
	p->y = f->y;
	p->post = norm_of(p, w->post_ffn_norm);
	return rc;
}

int apr_forward_build(void *arg, const struct apr_ops *ops)
{
	const struct apr_forward *f = arg;
	const struct apr_model *m = f->model;
	struct pass p = {.f = f, .ops = ops};
	struct apr_op_embed embed = {.x = f->x[0], .w = f->weights->tok_embd, .n_embd = m->n_embd, .scale = m->embd_scale};
	struct apr_op_head head;
	uint32_t l;
	int rc;

	rc = ops->embed(ops->ctx, &embed);
	for (l = 0; l < m->n_layers && !rc; l++) {
		rc = attention(&p, l);
		if (!rc)
			rc = feed_forward(&p, l);
	}
	if (rc)
		return rc;
	head = (struct apr_op_head){
		.x = f->x[p.at], .y = p.y, .post = p.post, .norm = norm_of(&p, f->weights->output_norm), .n_embd = m->n_embd,
		.n_vocab = f->sizes->n_vocab, .w = f->weights->output, .logits = f->logits, .scale = 1.0f, .softcap = m->logit_softcap,
	};
	return ops->head(ops->ctx, &head);
}

const char *apr_forward_where(char *buf, size_t len, uint32_t call)
{
	static const char *const op[5] = {"attn_in", "attn", "attn_output", "ffn_in", "ffn_down"};

	if (call == 0)
		snprintf(buf, len, "embed");
	else
		snprintf(buf, len, "blk.%u %s", (call - 1) / 5, op[(call - 1) % 5]);
	return buf;
}
