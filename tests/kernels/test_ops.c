/* SPDX-License-Identifier: MIT */
/*
 * embed, attn_in, proj, ffn_in and head on the CPU: each against F64 within a derived
 * bound, and a layer's bits equal however rows are cut, threaded and computed.
 *
 * u = 2^-24 throughout. The bounds are on absolute errors and follow the steps:
 *   sum    x + post(y): one rounding, and the norm's relative error on post(y)
 *   norm   x · inv · w: the sum of n squares in 16 lanes costs n/16 + 5 roundings, half
 *          of that after the square root; division, addition of eps, root, 1/x and two
 *          products 6 more; so ε = (n/32 + 9) u, and an error δ of x adds |w| inv
 *          (δ + |x| |δ|₂ / |x|₂)
 *   chain  of n fmaf: (n + 1) u Σ|h w| plus Σ δ|w|
 */
#include "tests/kernels/ops_fixture.h"

#include "kernels/types.h"

static const double u = 0x1p-24;

/* A weight in panels and, for the reference, as floats. */
struct weight {
	struct apr_mat m;
	float *w; /* n_out × n_in */
	void *panels;
};

static struct weight weight_new(struct rng *r, uint32_t type, uint32_t n_in, uint32_t n_out)
{
	size_t n = (size_t)n_in * n_out, bytes = apr_panel_bytes(type, n_in, n_out), i;
	struct weight t = {.w = random_floats(r, n, 1.0f / sqrtf((float)n_in))};
	uint8_t *src = mem_of(n * 4);

	for (i = 0; type == APR_TYPE_F32 && i < n; i++)
		memcpy(src + 4 * i, &t.w[i], 4);
	for (i = 0; type == APR_TYPE_F16 && i < n; i++) {
		uint16_t h = apr_half_from_f32(t.w[i]);

		memcpy(src + 2 * i, &h, 2);
		t.w[i] = apr_half_to_f32(h);
	}
	for (i = 0; type == APR_TYPE_Q8_0 && i < n; i++) { /* block of 32: F16 scale, 32 int8 */
		uint16_t d = apr_half_from_f32(0.02f / sqrtf((float)n_in));
		int8_t q = (int8_t)(rng_u32(r) & 0xff);

		memcpy(src + i / 32 * 34, &d, 2);
		memcpy(src + i / 32 * 34 + 2 + i % 32, &q, 1);
		t.w[i] = apr_half_to_f32(d) * (float)q;
	}
	CU_ASSERT_FATAL(bytes > 0);
	t.panels = mem_of(bytes);
	CU_ASSERT_EQUAL_FATAL(apr_panel_pack(NULL, type, src, n_in, n_out, t.panels), 0);
	t.m.lin = (struct apr_linear){type, n_in, n_out, t.panels};
	free(src);
	return t;
}

static void weight_free(struct weight *t)
{
	free(t->w);
	free(t->panels);
}

/* A value with the bound of its error. */
struct vec {
	double *v, *e;
	uint32_t n;
};

static struct vec vec_new(uint32_t n)
{
	return (struct vec){mem_of(n * sizeof(double)), mem_of(n * sizeof(double)), n};
}

static void vec_free(struct vec *a)
{
	free(a->v);
	free(a->e);
}

static void ref_norm(const struct vec *x, const float *w, float eps, struct vec *h)
{
	double sum = 0, delta = 0, inv, rel;
	uint32_t i;

	for (i = 0; i < x->n; i++) {
		sum += x->v[i] * x->v[i];
		delta += x->e[i] * x->e[i];
	}
	inv = 1 / sqrt(sum / x->n + eps);
	rel = sum > 0 ? sqrt(delta / sum) : 0;
	for (i = 0; i < x->n; i++) {
		h->v[i] = x->v[i] * inv * w[i];
		h->e[i] = fabs((double)w[i]) * inv * (x->e[i] + fabs(x->v[i]) * (rel + (x->n / 32.0 + 9) * u)) * 1.01;
	}
}

/* x + post(y) */
static void ref_sum(const float *x, const float *y, const struct apr_norm *post, struct vec *s)
{
	struct vec t = vec_new(s->n), p = vec_new(s->n);
	uint32_t i;

	for (i = 0; i < s->n; i++)
		t.v[i] = y ? y[i] : 0;
	if (y && post->w)
		ref_norm(&t, post->w, post->eps, &p);
	for (i = 0; i < s->n; i++) {
		s->v[i] = x[i] + (y && post->w ? p.v[i] : t.v[i]);
		s->e[i] = p.e[i] + (y ? u * (fabs(s->v[i]) + p.e[i]) : 0);
	}
	vec_free(&t);
	vec_free(&p);
}

static void ref_linear(const struct vec *h, const struct weight *w, const float *bias, struct vec *y)
{
	uint32_t i, o;

	for (o = 0; o < y->n; o++) {
		double sum = 0, mag = 0, err = 0;

		for (i = 0; i < h->n; i++) {
			double c = w->w[(size_t)o * h->n + i];

			sum += h->v[i] * c;
			mag += fabs(h->v[i] * c);
			err += h->e[i] * fabs(c);
		}
		y->v[o] = sum + (bias ? bias[o] : 0);
		y->e[o] = err + (h->n + 1) * u * (mag + err) + u * fabs(y->v[o]);
	}
}

static bool within(const char *what, const float *got, const struct vec *want)
{
	uint32_t i;

	for (i = 0; i < want->n; i++)
		if (!(fabs(got[i] - want->v[i]) <= want->e[i])) {
			fprintf(stderr, "%s[%u]: %g, want %g within %g\n", what, i, got[i], want->v[i], want->e[i]);
			return false;
		}
	return true;
}

/* ---- a layer, its weights and its inputs ------------------------------------------------ */
struct layer_shape {
	uint32_t n_embd, n_ff, n_heads, n_kv_heads, k_dim, v_dim, n_vocab, n_rot;
	enum apr_op_rope rope;
	enum apr_op_act act;
	bool post, qk_norm, bias, gate;
	float scale, softcap;
	enum apr_kv_type kv;
	uint32_t type;
};

static const struct layer_shape shapes[] = {
	{96, 160, 3, 1, 32, 32, 100, 32, APR_OP_ROPE_PAIRS, APR_OP_SILU, false, false, false, true, 1.0f, 0.0f, APR_KV_F16, APR_TYPE_F32},
	{160, 96, 4, 2, 64, 32, 77, 64, APR_OP_ROPE_HALVES, APR_OP_GELU_TANH, true, true, false, true, 1.0f, 30.0f, APR_KV_F32, APR_TYPE_F16},
	{64, 64, 2, 2, 40, 24, 50, 20, APR_OP_ROPE_HALVES, APR_OP_GELU, false, false, true, true, 0.5f, 0.0f, APR_KV_BF16, APR_TYPE_F32},
	{576, 192, 9, 3, 64, 64, 300, 64, APR_OP_ROPE_PAIRS, APR_OP_RELU2, true, false, true, false, 1.0f, 0.0f, APR_KV_F16, APR_TYPE_Q8_0},
	{128, 96, 2, 1, 48, 48, 64, 22, APR_OP_ROPE_PAIRS, APR_OP_SILU, false, true, false, true, 2.0f, 5.0f, APR_KV_F16, APR_TYPE_Q8_0},
};
#define N_SHAPES (sizeof(shapes) / sizeof(shapes[0]))
enum { N_CTX = 512, MAX_ROWS = 257 };

struct layer {
	struct layer_shape sh;
	struct weight emb, wq, wk, wv, wo, gate, up, down, head;
	float *norms[7]; /* post, norm, ffn post, ffn norm, q, k, out */
	float *bq, *bk, *bv, *bo, *cos_sin;
	struct kv_fix kv;
	struct apr_kv_layer kvl;
	float *x, *y, *x1, *x2, *q, *o, *a, *logits; /* of MAX_ROWS rows */
	int32_t tok[MAX_ROWS];
	uint32_t pos[MAX_ROWS], slot[MAX_ROWS], out[MAX_ROWS];
};

static void layer_init(struct layer *l, const struct layer_shape *sh, struct rng *r)
{
	uint32_t i, qn = sh->n_heads * sh->k_dim, kn = sh->n_kv_heads * sh->k_dim, vn = sh->n_kv_heads * sh->v_dim;
	uint32_t wide[7] = {sh->n_embd, sh->n_embd, sh->n_embd, sh->n_embd, sh->k_dim, sh->k_dim, sh->n_embd};

	memset(l, 0, sizeof(*l));
	l->sh = *sh;
	l->emb = weight_new(r, sh->type, sh->n_embd, sh->n_vocab);
	l->wq = weight_new(r, sh->type, sh->n_embd, qn);
	l->wk = weight_new(r, sh->type, sh->n_embd, kn);
	l->wv = weight_new(r, sh->type, sh->n_embd, vn);
	l->wo = weight_new(r, APR_TYPE_F32, sh->n_heads * sh->v_dim, sh->n_embd);
	l->gate = weight_new(r, sh->type, sh->n_embd, sh->n_ff);
	l->up = weight_new(r, sh->type, sh->n_embd, sh->n_ff);
	l->down = weight_new(r, sh->type, sh->n_ff, sh->n_embd);
	l->head = weight_new(r, sh->type, sh->n_embd, sh->n_vocab);
	for (i = 0; i < 7; i++)
		l->norms[i] = random_floats(r, wide[i], 1.0f);
	l->bq = random_floats(r, qn, 1.0f);
	l->bk = random_floats(r, kn, 1.0f);
	l->bv = random_floats(r, vn, 1.0f);
	l->bo = random_floats(r, sh->n_embd, 1.0f);
	l->cos_sin = random_floats(r, (size_t)N_CTX * sh->n_rot, 1.0f);
	for (i = 0; i < N_CTX * sh->n_rot / 2; i++) {
		float angle = l->cos_sin[2 * i];

		l->cos_sin[2 * i] = cosf(angle);
		l->cos_sin[2 * i + 1] = sinf(angle);
	}
	kv_fix_init(&l->kv, r, sh->kv, 2, sh->n_kv_heads, sh->k_dim, sh->v_dim, 2, N_CTX);
	l->kvl = (struct apr_kv_layer){&l->kv.g, 1};
	l->x = random_floats(r, (size_t)MAX_ROWS * sh->n_embd, 2.0f);
	l->y = random_floats(r, (size_t)MAX_ROWS * sh->n_embd, 1.0f);
	l->x1 = mem_of((size_t)MAX_ROWS * sh->n_embd * 4);
	l->x2 = mem_of((size_t)MAX_ROWS * sh->n_embd * 4);
	l->q = mem_of((size_t)MAX_ROWS * qn * 4);
	l->o = mem_of((size_t)MAX_ROWS * sh->n_heads * sh->v_dim * 4);
	l->a = mem_of((size_t)MAX_ROWS * sh->n_ff * 4);
	l->logits = mem_of((size_t)APR_HEAD_ROWS * sh->n_vocab * 4);
	for (i = 0; i < MAX_ROWS; i++) {
		l->tok[i] = (int32_t)(rng_u32(r) % sh->n_vocab);
		l->pos[i] = i;
		l->slot[i] = 1;
		l->out[i] = i;
	}
}

static void layer_free(struct layer *l)
{
	struct weight *w[] = {&l->emb, &l->wq, &l->wk, &l->wv, &l->wo, &l->gate, &l->up, &l->down, &l->head};
	float *f[] = {l->bq, l->bk, l->bv, l->bo, l->cos_sin, l->x, l->y, l->x1, l->x2, l->q, l->o, l->a, l->logits};
	size_t i;

	for (i = 0; i < sizeof(w) / sizeof(w[0]); i++)
		weight_free(w[i]);
	for (i = 0; i < sizeof(f) / sizeof(f[0]); i++)
		free(f[i]);
	for (i = 0; i < 7; i++)
		free(l->norms[i]);
	kv_fix_free(&l->kv);
}

static struct apr_cpu_limits limits(const struct layer *l, enum apr_cpu_math math)
{
	return (struct apr_cpu_limits){.rows = MAX_ROWS, .n_embd = l->sh.n_embd, .n_ff = l->sh.n_ff, .n_heads = l->sh.n_heads,
	                               .n_kv_heads = l->sh.n_kv_heads, .k_dim = l->sh.k_dim, .v_dim = l->sh.v_dim, .n_ctx = N_CTX,
	                               .math = math};
}

static struct apr_norm norm_of(const struct layer *l, int i, bool used)
{
	return (struct apr_norm){used ? l->norms[i] : NULL, 1e-5f};
}

/* Rows first … first + n - 1 through one op; every pointer is moved to the first of them. */
static struct apr_rows rows_of(const struct layer *l, uint32_t first, uint32_t n)
{
	return (struct apr_rows){.n = n, .n_out = n, .tok = l->tok + first, .pos = l->pos + first, .slot = l->slot + first, .out = l->out};
}

static void do_attn_in(struct layer *l, struct apr_cpu_scratch *s, uint32_t first, uint32_t n, bool with_y)
{
	const struct layer_shape *sh = &l->sh;
	struct apr_rows r = rows_of(l, first, n);
	size_t at = (size_t)first * sh->n_embd;
	struct apr_op_attn_in op = {
		.x = l->x + at, .y = with_y ? l->y + at : NULL, .x_out = l->x1 + at, .post = norm_of(l, 0, sh->post), .norm = norm_of(l, 1, true),
		.n_embd = sh->n_embd, .n_heads = sh->n_heads, .n_kv_heads = sh->n_kv_heads, .k_dim = sh->k_dim, .v_dim = sh->v_dim,
		.wq = &l->wq.m, .wk = &l->wk.m, .wv = &l->wv.m, .q_norm = norm_of(l, 4, sh->qk_norm), .k_norm = norm_of(l, 5, sh->qk_norm),
		.rope = {sh->rope, sh->n_rot, l->cos_sin}, .q = l->q + (size_t)first * sh->n_heads * sh->k_dim, .kv = l->kvl};

	if (sh->bias) {
		op.bq = l->bq;
		op.bk = l->bk;
		op.bv = l->bv;
	}
	apr_cpu_attn_in(s, &r, &op);
}

static void do_rest(struct layer *l, struct apr_cpu_scratch *s, uint32_t first, uint32_t n)
{
	const struct layer_shape *sh = &l->sh;
	struct apr_rows r = rows_of(l, first, n);
	size_t at = (size_t)first * sh->n_embd, o_at = (size_t)first * sh->n_heads * sh->v_dim, a_at = (size_t)first * sh->n_ff;
	struct apr_op_attn attn = {.q = l->q + (size_t)first * sh->n_heads * sh->k_dim, .o = l->o + o_at, .n_heads = sh->n_heads,
	                           .n_kv_heads = sh->n_kv_heads, .k_dim = sh->k_dim, .v_dim = sh->v_dim, .scale = 0.125f, .kv = l->kvl};
	struct apr_op_proj wo = {.in = l->o + o_at, .y = l->y + at, .n_in = sh->n_heads * sh->v_dim, .n_out = sh->n_embd, .w = &l->wo.m,
	                         .bias = sh->bias ? l->bo : NULL};
	struct apr_op_ffn_in ffn = {.x = l->x1 + at, .y = l->y + at, .x_out = l->x2 + at, .post = norm_of(l, 2, sh->post),
	                            .norm = norm_of(l, 3, true), .n_embd = sh->n_embd, .n_ff = sh->n_ff, .gate = sh->gate ? &l->gate.m : NULL,
	                            .up = &l->up.m, .act = sh->act, .a = l->a + a_at};
	struct apr_op_proj down = {.in = l->a + a_at, .y = l->y + at, .n_in = sh->n_ff, .n_out = sh->n_embd, .w = &l->down.m};

	apr_cpu_attn(s, &r, &attn);
	apr_cpu_proj(s, &r, &wo);
	apr_cpu_ffn_in(s, &r, &ffn);
	apr_cpu_proj(s, &r, &down);
}

static void do_head(struct layer *l, struct apr_cpu_scratch *s, const uint32_t *out, uint32_t n_out, uint32_t first, uint32_t n)
{
	struct apr_rows r = {.n = MAX_ROWS, .n_out = n_out, .out = out};
	struct apr_op_head op = {.x = l->x, .y = l->y, .post = norm_of(l, 0, l->sh.post), .norm = norm_of(l, 6, true), .n_embd = l->sh.n_embd,
	                         .n_vocab = l->sh.n_vocab, .w = &l->head.m, .logits = l->logits, .scale = l->sh.scale, .softcap = l->sh.softcap};

	apr_cpu_head(s, &r, &op, first, n);
}

/* ---- against F64 ---------------------------------------------------------------------------- */
static void embed_is_exact(void)
{
	struct rng r = {21};
	size_t i;

	for (i = 0; i < N_SHAPES; i++) {
		struct layer l;
		struct scratch_fix sf;
		struct apr_cpu_limits lim;
		struct apr_rows rows;
		struct apr_op_embed op;
		uint32_t n, j;

		layer_init(&l, &shapes[i], &r);
		lim = limits(&l, APR_CPU_F32);
		scratch_fix_init(&sf, &lim, 2);
		rows = rows_of(&l, 0, MAX_ROWS);
		op = (struct apr_op_embed){.x = l.x, .w = &l.emb.m, .n_embd = l.sh.n_embd, .scale = i ? 1.0f : 9.797959f};
		apr_cpu_embed(sf.s, &rows, &op);
		for (n = 0; n < MAX_ROWS; n++)
			for (j = 0; j < l.sh.n_embd; j++)
				CU_ASSERT_FATAL(l.x[(size_t)n * l.sh.n_embd + j] == l.emb.w[(size_t)l.tok[n] * l.sh.n_embd + j] * op.scale);
		scratch_fix_free(&sf);
		layer_free(&l);
	}
}

/* q or k heads of one row: norm, then rotation: |c| δa + |s| δb and 3 roundings of |a c| + |b s| */
static void ref_heads(const struct layer *l, struct vec *v, uint32_t n_heads, const float *w, uint32_t pos)
{
	uint32_t dim = l->sh.k_dim, half = l->sh.n_rot / 2, h, i;

	for (h = 0; h < n_heads; h++) {
		struct vec in = {v->v + (size_t)h * dim, v->e + (size_t)h * dim, dim};

		if (l->sh.qk_norm)
			ref_norm(&in, w, 1e-5f, &in);
		for (i = 0; i < half; i++) {
			uint32_t a = l->sh.rope == APR_OP_ROPE_PAIRS ? 2 * i : i, b = l->sh.rope == APR_OP_ROPE_PAIRS ? 2 * i + 1 : i + half;
			double c = l->cos_sin[((size_t)pos * half + i) * 2], s = l->cos_sin[((size_t)pos * half + i) * 2 + 1];
			double x = in.v[a], y = in.v[b], ex = in.e[a], ey = in.e[b];

			in.v[a] = x * c - y * s;
			in.v[b] = x * s + y * c;
			in.e[a] = fabs(c) * ex + fabs(s) * ey + 3 * u * (fabs(x * c) + fabs(y * s));
			in.e[b] = fabs(s) * ex + fabs(c) * ey + 3 * u * (fabs(x * s) + fabs(y * c));
		}
	}
}

/* The page's values of one row: rounding to the KV type adds its half unit. */
static bool kv_within(const struct layer *l, uint32_t slot, uint32_t pos, bool v, const struct vec *want)
{
	uint32_t dim = v ? l->sh.v_dim : l->sh.k_dim, i;
	double half = l->sh.kv == APR_KV_F16 ? 0x1p-11 : l->sh.kv == APR_KV_BF16 ? 0x1p-8 : 0;

	for (i = 0; i < want->n; i++) {
		double got = kv_get(&l->kv, kv_at(&l->kv, 1, slot, pos, i / dim, v), i % dim);
		double e = want->e[i] + half * (fabs(want->v[i]) + want->e[i]) + (half > 0 ? 0x1p-25 : 0);

		if (!(fabs(got - want->v[i]) <= e)) {
			fprintf(stderr, "%s at %u[%u]: %g, want %g within %g\n", v ? "V" : "K", pos, i, got, want->v[i], e);
			return false;
		}
	}
	return true;
}

static void attn_in_within_bound(void)
{
	static const uint32_t counts[] = {1, 2, 7, 17, 63, 64, 65, 128, 257};
	struct rng r = {22};
	size_t i, j;

	for (i = 0; i < N_SHAPES; i++) {
		struct layer l;
		struct scratch_fix sf;
		struct apr_cpu_limits lim;

		layer_init(&l, &shapes[i], &r);
		lim = limits(&l, APR_CPU_F32);
		scratch_fix_init(&sf, &lim, 2);
		for (j = 0; j < sizeof(counts) / sizeof(counts[0]); j++) {
			uint32_t n = counts[j], row, k;
			bool with_y = j & 1;

			for (k = 0; k < n; k++) {
				l.pos[k] = (uint32_t)(j * 29) + k;
				l.slot[k] = k & 1;
			}
			do_attn_in(&l, sf.s, 0, n, with_y);
			for (row = 0; row < n; row += row + 20 < n ? 13 : 1) {
				size_t at = (size_t)row * l.sh.n_embd;
				struct vec s = vec_new(l.sh.n_embd), h = vec_new(l.sh.n_embd), q = vec_new(l.sh.n_heads * l.sh.k_dim);
				struct vec kk = vec_new(l.sh.n_kv_heads * l.sh.k_dim), v = vec_new(l.sh.n_kv_heads * l.sh.v_dim);
				struct apr_norm post = norm_of(&l, 0, l.sh.post);

				ref_sum(l.x + at, with_y ? l.y + at : NULL, &post, &s);
				ref_norm(&s, l.norms[1], 1e-5f, &h);
				ref_linear(&h, &l.wq, l.sh.bias ? l.bq : NULL, &q);
				ref_linear(&h, &l.wk, l.sh.bias ? l.bk : NULL, &kk);
				ref_linear(&h, &l.wv, l.sh.bias ? l.bv : NULL, &v);
				ref_heads(&l, &q, l.sh.n_heads, l.norms[4], l.pos[row]);
				ref_heads(&l, &kk, l.sh.n_kv_heads, l.norms[5], l.pos[row]);
				CU_ASSERT(within("x_out", l.x1 + at, &s));
				CU_ASSERT(within("q", l.q + (size_t)row * q.n, &q));
				CU_ASSERT(kv_within(&l, l.slot[row], l.pos[row], false, &kk));
				CU_ASSERT(kv_within(&l, l.slot[row], l.pos[row], true, &v));
				vec_free(&s);
				vec_free(&h);
				vec_free(&q);
				vec_free(&kk);
				vec_free(&v);
			}
		}
		scratch_fix_free(&sf);
		layer_free(&l);
	}
}

/* The activation's value and, from the bound of its argument, of its error: slopes are at most 1.13 (2|g| for
 * ReLU²); its own roundings grow with the exponent's argument: g², or g³ inside the tanh form. */
static void ref_act(enum apr_op_act act, double g, double eg, double *a, double *e)
{
	double slope = 1.13, own = 16 + 4 * fabs(g), k = 0.7978845608028654;

	switch (act) {
	case APR_OP_SILU:
		*a = g / (1 + exp(-g));
		break;
	case APR_OP_GELU_TANH:
		*a = 0.5 * g * (1 + tanh(k * (g + 0.044715 * g * g * g)));
		own = 16 + 8 * fabs(g) + fabs(g * g * g);
		break;
	case APR_OP_GELU:
		*a = 0.5 * g * erfc(-g * 0.7071067811865476);
		own = 16 + 2 * g * g;
		break;
	default:
		*a = g > 0 ? g * g : 0;
		slope = 2 * (fabs(g) + eg);
		break;
	}
	if (act == APR_OP_GELU_TANH && g < -4) /* 1 + tanh loses the reference's own digits here */
		*a = g / (1 + exp(-2 * k * (g + 0.044715 * g * g * g)));
	*e = slope * eg + own * u * fabs(*a) + (act == APR_OP_GELU ? 2 * u * fabs(g) * (g > 0) : 0);
}

static void ffn_in_and_proj_within_bound(void)
{
	static const uint32_t counts[] = {1, 3, 16, 65, 129};
	struct rng r = {23};
	size_t i, j;

	for (i = 0; i < N_SHAPES; i++) {
		struct layer l;
		struct scratch_fix sf;
		struct apr_cpu_limits lim;

		layer_init(&l, &shapes[i], &r);
		lim = limits(&l, APR_CPU_F32);
		scratch_fix_init(&sf, &lim, 2);
		for (j = 0; j < sizeof(counts) / sizeof(counts[0]); j++) {
			uint32_t n = counts[j], row, k;

			do_attn_in(&l, sf.s, 0, n, true); /* x1 and KV */
			do_rest(&l, sf.s, 0, n);
			for (row = 0; row < n; row += row + 10 < n ? 7 : 1) {
				size_t at = (size_t)row * l.sh.n_embd;
				struct vec o = vec_new(l.sh.n_heads * l.sh.v_dim), y = vec_new(l.sh.n_embd), s = vec_new(l.sh.n_embd), h = vec_new(l.sh.n_embd);
				struct vec g = vec_new(l.sh.n_ff), up = vec_new(l.sh.n_ff), a = vec_new(l.sh.n_ff), d = vec_new(l.sh.n_embd);
				float *y_mid = mem_of(l.sh.n_embd * sizeof(float));
				struct apr_norm post = norm_of(&l, 2, l.sh.post);

				for (k = 0; k < o.n; k++)
					o.v[k] = l.o[(size_t)row * o.n + k];
				ref_linear(&o, &l.wo, l.sh.bias ? l.bo : NULL, &y);
				/* y itself is overwritten by the last proj: its value is taken from the reference, its error too */
				for (k = 0; k < y.n; k++)
					y_mid[k] = (float)y.v[k];
				ref_sum(l.x1 + at, y_mid, &post, &s);
				for (k = 0; k < s.n && !l.sh.post; k++)
					s.e[k] += y.e[k] + u * fabs(y.v[k]);
				if (l.sh.post) { /* the norm passes y's error on */
					struct vec p = vec_new(y.n);

					for (k = 0; k < y.n; k++)
						y.e[k] += u * fabs(y.v[k]);
					ref_norm(&y, l.norms[2], 1e-5f, &p);
					for (k = 0; k < s.n; k++)
						s.e[k] += p.e[k];
					vec_free(&p);
				}
				CU_ASSERT(within("ffn x_out", l.x2 + at, &s));
				ref_norm(&s, l.norms[3], 1e-5f, &h);
				ref_linear(&h, &l.gate, NULL, &g);
				ref_linear(&h, &l.up, NULL, &up);
				for (k = 0; k < a.n; k++) {
					double v, e;

					ref_act(l.sh.act, l.sh.gate ? g.v[k] : up.v[k], l.sh.gate ? g.e[k] : up.e[k], &v, &e);
					a.v[k] = l.sh.gate ? v * up.v[k] : v;
					a.e[k] = l.sh.gate ? e * (fabs(up.v[k]) + up.e[k]) + fabs(v) * up.e[k] + u * fabs(a.v[k]) : e;
				}
				CU_ASSERT(within("a", l.a + (size_t)row * a.n, &a));
				for (k = 0; k < a.n; k++) {
					a.v[k] = l.a[(size_t)row * a.n + k];
					a.e[k] = 0;
				}
				ref_linear(&a, &l.down, NULL, &d);
				CU_ASSERT(within("down", l.y + at, &d));
				free(y_mid);
				vec_free(&o);
				vec_free(&y);
				vec_free(&s);
				vec_free(&h);
				vec_free(&g);
				vec_free(&up);
				vec_free(&a);
				vec_free(&d);
			}
			free(l.y);
			l.y = random_floats(&r, (size_t)MAX_ROWS * l.sh.n_embd, 1.0f);
		}
		scratch_fix_free(&sf);
		layer_free(&l);
	}
}

/* Only the rows asked for, in windows of 64; scale and soft cap (its error: tanh's 2^-22 and 4 u of the cap). */
static void head_within_bound(void)
{
	struct rng r = {24};
	size_t i;

	for (i = 0; i < N_SHAPES; i++) {
		uint32_t out[100], first, j, k;
		struct layer l;
		struct scratch_fix sf;
		struct apr_cpu_limits lim;

		layer_init(&l, &shapes[i], &r);
		lim = limits(&l, APR_CPU_F32);
		scratch_fix_init(&sf, &lim, 2);
		for (j = 0; j < 100; j++)
			out[j] = 2 * j + 1;
		for (first = 0; first < 100; first += APR_HEAD_ROWS) {
			uint32_t n = 100 - first < APR_HEAD_ROWS ? 100 - first : APR_HEAD_ROWS;

			do_head(&l, sf.s, out, 100, first, n);
			for (j = 0; j < n; j += 5) {
				size_t at = (size_t)out[first + j] * l.sh.n_embd;
				struct vec s = vec_new(l.sh.n_embd), h = vec_new(l.sh.n_embd), z = vec_new(l.sh.n_vocab);
				struct apr_norm post = norm_of(&l, 0, l.sh.post);

				ref_sum(l.x + at, l.y + at, &post, &s);
				ref_norm(&s, l.norms[6], 1e-5f, &h);
				ref_linear(&h, &l.head, NULL, &z);
				for (k = 0; k < z.n; k++) {
					z.v[k] *= l.sh.scale;
					z.e[k] = z.e[k] * l.sh.scale + u * fabs(z.v[k]);
					if (l.sh.softcap != 0.0f) {
						z.e[k] += 2 * u * fabs(z.v[k]) + l.sh.softcap * (0x1p-22 + 4 * u);
						z.v[k] = l.sh.softcap * tanh(z.v[k] / l.sh.softcap);
					}
				}
				CU_ASSERT(within("logits", l.logits + (size_t)j * z.n, &z));
				vec_free(&s);
				vec_free(&h);
				vec_free(&z);
			}
		}
		scratch_fix_free(&sf);
		layer_free(&l);
	}
}

/* ---- the same bits ------------------------------------------------------------------------------ */
struct outcome {
	float *x2, *y, *logits;
};

/* A layer over 200 rows in chunks; then the head over the last 64. */
static struct outcome run_layer(struct layer *l, const float *x, const float *y, unsigned threads, uint32_t chunk, enum apr_cpu_math math)
{
	enum { ROWS = 200 };
	size_t n = (size_t)ROWS * l->sh.n_embd, nl = (size_t)APR_HEAD_ROWS * l->sh.n_vocab;
	struct outcome out = {mem_of(n * 4), mem_of(n * 4), mem_of(nl * 4)};
	struct apr_cpu_limits lim = limits(l, math);
	struct scratch_fix sf;
	uint32_t i, at[APR_HEAD_ROWS];

	scratch_fix_init(&sf, &lim, threads);
	memcpy(l->x, x, n * 4);
	memcpy(l->y, y, n * 4);
	memset(l->kv.g.pool, 0xff, l->kv.g.layer_bytes * l->kv.g.n_layers * l->kv.g.n_pages);
	for (i = 0; i < ROWS; i += chunk) {
		uint32_t c = ROWS - i < chunk ? ROWS - i : chunk;

		do_attn_in(l, sf.s, i, c, true);
		do_rest(l, sf.s, i, c);
	}
	memcpy(out.x2, l->x2, n * 4);
	memcpy(out.y, l->y, n * 4);
	for (i = 0; i < APR_HEAD_ROWS; i++)
		at[i] = ROWS - APR_HEAD_ROWS + i;
	memcpy(l->x, l->x2, n * 4);
	for (i = 0; i < APR_HEAD_ROWS; i += chunk) { /* logits of several calls are gathered in order */
		uint32_t c = APR_HEAD_ROWS - i < chunk ? APR_HEAD_ROWS - i : chunk;

		do_head(l, sf.s, at, APR_HEAD_ROWS, i, c);
		memcpy(out.logits + (size_t)i * l->sh.n_vocab, l->logits, (size_t)c * l->sh.n_vocab * 4);
	}
	scratch_fix_free(&sf);
	return out;
}

static bool same_outcome(const struct layer *l, const struct outcome *a, struct outcome *b)
{
	size_t n = (size_t)200 * l->sh.n_embd;
	bool same = same_bits(a->x2, b->x2, n) && same_bits(a->y, b->y, n) &&
	            same_bits(a->logits, b->logits, (size_t)APR_HEAD_ROWS * l->sh.n_vocab);

	free(b->x2);
	free(b->y);
	free(b->logits);
	return same;
}

static void layer_same_bits(void)
{
	static const uint32_t chunks[] = {1, 63, 64, 65, 512};
	const enum apr_cpu_isa best = apr_cpu_isa_current();
	struct rng r = {25};
	size_t i, j;
	int math;

	for (i = 0; i < N_SHAPES; i++)
		for (math = APR_CPU_F32; math <= APR_CPU_INT16; math++) {
			struct layer l;
			struct outcome want, got;
			float *x, *y;
			uint32_t k;
			unsigned t;

			layer_init(&l, &shapes[i], &r);
			x = random_floats(&r, (size_t)MAX_ROWS * l.sh.n_embd, 2.0f);
			y = random_floats(&r, (size_t)MAX_ROWS * l.sh.n_embd, 1.0f);
			want = run_layer(&l, x, y, 1, 200, math);
			for (t = 1; t <= 4; t++)
				for (j = 0; j < sizeof(chunks) / sizeof(chunks[0]); j++) {
					got = run_layer(&l, x, y, t, chunks[j], math);
					CU_ASSERT(same_outcome(&l, &want, &got));
				}
			for (j = 0; j < sizeof(isas) / sizeof(isas[0]) + 1; j++) {
				if (apr_cpu_isa_force(j ? isas[j - 1] : APR_ISA_SCALAR))
					continue;
				got = run_layer(&l, x, y, 2, 65, math);
				CU_ASSERT(same_outcome(&l, &want, &got));
			}
			CU_ASSERT(!apr_cpu_isa_force(best));
			/* one row of NaN: the rows before it keep their bits */
			for (k = 0; k < l.sh.n_embd; k++)
				x[(size_t)150 * l.sh.n_embd + k] = NAN;
			got = run_layer(&l, x, y, 2, 200, math);
			CU_ASSERT(same_bits(want.x2, got.x2, (size_t)150 * l.sh.n_embd));
			CU_ASSERT(same_bits(want.y, got.y, (size_t)150 * l.sh.n_embd));
			CU_ASSERT(isnan(got.y[(size_t)150 * l.sh.n_embd]));
			(void)same_outcome(&l, &want, &got);
			free(want.x2);
			free(want.y);
			free(want.logits);
			free(x);
			free(y);
			layer_free(&l);
		}
}

static void scratch_size_is_checked(void)
{
	struct apr_cpu_limits l = {.rows = 512, .n_embd = 576, .n_ff = 1536, .n_heads = 9, .n_kv_heads = 3, .k_dim = 64, .v_dim = 64,
	                           .n_ctx = 8192, .math = APR_CPU_INT16};
	struct apr_cpu_limits big;

	CU_ASSERT(apr_cpu_scratch_bytes(&l, 4) > 0);
	CU_ASSERT(apr_cpu_scratch_bytes(&l, 4) < 64u << 20);
	big = l;
	big.rows = UINT32_MAX;
	big.n_ff = UINT32_MAX;
	CU_ASSERT_EQUAL(apr_cpu_scratch_bytes(&big, 4), 0);
	big = l;
	big.n_heads = UINT32_MAX;
	big.v_dim = UINT32_MAX - 15;
	CU_ASSERT_EQUAL(apr_cpu_scratch_bytes(&big, 4), 0);
	big = l;
	big.rows = 0;
	CU_ASSERT_EQUAL(apr_cpu_scratch_bytes(&big, 4), 0);
}

/* KEEPS_HEAP: libc keeps the stacks of ended threads, and what hangs on them, for the next ones. */
static const struct apr_test tests[] = {
	{"embed_is_exact", embed_is_exact, KEEPS_HEAP},
	{"attn_in_within_bound", attn_in_within_bound, KEEPS_HEAP},
	{"ffn_in_and_proj_within_bound", ffn_in_and_proj_within_bound, KEEPS_HEAP},
	{"head_within_bound", head_within_bound, KEEPS_HEAP},
	{"layer_same_bits", layer_same_bits, KEEPS_HEAP},
	{"scratch_size_is_checked", scratch_size_is_checked, 0},
};
TEST_MAIN("kernels/ops", tests)
