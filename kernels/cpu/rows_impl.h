/* SPDX-License-Identifier: MIT */
/*
 * Work on single rows: norms, rotation, activations, rounding to the KV type.
 *
 * Owns: the arithmetic of these, over kernels/common/vec.h. Included once by each
 * ops_<isa>.c. A row's result depends on that row alone.
 */
#include <math.h>

#include "kernels/common/vec.h"
#include "kernels/cpu/ops_isa.h"

/* 1 / sqrt(mean(x²) + eps): lane i mod 16 takes x[i], lanes are summed by the tree of vec.h. */
VEC float inverse_rms(const float *x, uint32_t n, float eps)
{
	vf acc = vf_set1(0.0f);
	uint32_t i;

	for (i = 0; i < n; i += VL) {
		vf v = vf_load_upto(x + i, n - i);

		acc = vf_fma(v, v, acc);
	}
	return 1.0f / sqrtf(vf_sum(acc) / (float)n + eps);
}

static void rows_add_norm(const float *x, const float *y, const struct apr_norm *post, float *x_out,
                          const struct apr_norm *norm, float *h, uint32_t n)
{
	const float *sum = x;
	uint32_t i;

	if (y) {
		float inv = post->w ? inverse_rms(y, n, post->eps) : 0.0f;

		for (i = 0; i < n; i += VL) {
			vf v = vf_load_upto(y + i, n - i);

			if (post->w)
				v = vf_mul(vf_mul(v, vf_set1(inv)), vf_load_upto(post->w + i, n - i));
			vf_store_upto(x_out + i, n - i, vf_add(vf_load_upto(x + i, n - i), v));
		}
		sum = x_out;
	} else if (x_out && x_out != x) {
		memcpy(x_out, x, n * sizeof(*x));
	}
	if (h) {
		vf inv = vf_set1(inverse_rms(sum, n, norm->eps));

		for (i = 0; i < n; i += VL)
			vf_store_upto(h + i, n - i,
			              vf_mul(vf_mul(vf_load_upto(sum + i, n - i), inv), vf_load_upto(norm->w + i, n - i)));
	}
}

/* (a, b) turned by the angle of (c, s) */
VEC void rotate(vf *a, vf *b, vf c, vf s)
{
	vf t = vf_fma(*a, c, vf_sub(vf_set1(0.0f), vf_mul(*b, s)));

	*b = vf_fma(*a, s, vf_mul(*b, c));
	*a = t;
}

static void rope_halves(float *v, uint32_t half, const float *cs)
{
	uint32_t i;

	for (i = 0; i < half; i += VL) {
		uint32_t left = half - i < VL ? half - i : VL;
		vf a = vf_load_upto(v + i, left), b = vf_load_upto(v + half + i, left), c, s;

		if (left == VL) {
			vf_load_pairs(cs + 2 * i, &c, &s);
		} else {
			float t[2 * VL] = {0};

			memcpy(t, cs + 2 * i, left * 2 * sizeof(*cs));
			vf_load_pairs(t, &c, &s);
		}
		rotate(&a, &b, c, s);
		vf_store_upto(v + i, left, a);
		vf_store_upto(v + half + i, left, b);
	}
}

static void rope_pairs(float *v, uint32_t pairs, const float *cs)
{
	uint32_t i;

	for (i = 0; i < pairs; i += VL) {
		uint32_t left = pairs - i < VL ? pairs - i : VL;
		float t[4 * VL] = {0}; /* a short end is turned in here */
		const float *from = cs + 2 * i;
		float *at = v + 2 * i;
		vf a, b, c, s;

		if (left < VL) {
			memcpy(t, at, left * 2 * sizeof(*t));
			memcpy(t + 2 * VL, from, left * 2 * sizeof(*t));
			at = t;
			from = t + 2 * VL;
		}
		vf_load_pairs(at, &a, &b);
		vf_load_pairs(from, &c, &s);
		rotate(&a, &b, c, s);
		vf_store_pairs(at, a, b);
		if (left < VL)
			memcpy(v + 2 * i, t, left * 2 * sizeof(*t));
	}
}

static void rows_heads(float *v, uint32_t n_heads, uint32_t dim, const struct apr_norm *norm,
                       const struct apr_rope_table *rope, const float *cs)
{
	uint32_t h, i;

	for (h = 0; h < n_heads; h++, v += dim) {
		if (norm->w) {
			vf inv = vf_set1(inverse_rms(v, dim, norm->eps));

			for (i = 0; i < dim; i += VL)
				vf_store_upto(v + i, dim - i,
				              vf_mul(vf_mul(vf_load_upto(v + i, dim - i), inv), vf_load_upto(norm->w + i, dim - i)));
		}
		if (rope->kind == APR_OP_ROPE_HALVES)
			rope_halves(v, rope->n_rot / 2, cs);
		else if (rope->kind == APR_OP_ROPE_PAIRS)
			rope_pairs(v, rope->n_rot / 2, cs);
	}
}

static void rows_store_kv(enum apr_kv_type type, const float *src, void *dst, uint32_t n)
{
	uint16_t *d = dst;
	uint32_t i;

	if (type == APR_KV_F32) {
		memcpy(dst, src, n * sizeof(*src));
		return;
	}
	for (i = 0; i < n; i += VL) {
		uint16_t t[VL], *to = n - i < VL ? t : d + i;
		vf v = vf_load_upto(src + i, n - i);

		if (type == APR_KV_F16)
			vf_store_half(to, v);
		else
			vf_store_bfloat(to, v);
		if (n - i < VL)
			memcpy(d + i, t, (n - i) * sizeof(*t));
	}
}

/* Φ(x) = erfc(-x/√2) / 2, by erfc(z) = t · exp(P(t) - z²), t = 1 / (1 + z/2), z >= 0: both tails keep their digits.
 * P was fitted for z up to 10.5 (5e-8), where erfc leaves float's range. */
VEC vf normal_cdf(vf x)
{
	static const float c[10] = {-0x1.43f4bap+0f, 0x1.ff5908p-1f, 0x1.8b2b32p-2f,  0x1.35c022p-5f,  -0x1.e47fp-8f,
	                            -0x1.0b3f22p-4f, -0x1.6d1d6p-1f, 0x1.2b26ep+0f, -0x1.5f007ep-1f, 0x1.2a7f4ap-3f};
	vf zero = vf_set1(0.0f), z = vf_mul(vf_max(vf_sub(zero, x), x), vf_set1(0x1.6a09e6p-1f));
	vf t = vf_div(vf_set1(1.0f), vf_fma(z, vf_set1(0.5f), vf_set1(1.0f)));
	vf hi = vf_mul(z, z), lo = vf_fma(z, z, vf_sub(zero, hi)); /* z² = hi + lo: a large square keeps its digits */
	vf p = vf_set1(c[9]), e;
	int i;

	APR_UNROLL
	for (i = 8; i >= 0; i--)
		p = vf_fma(p, t, vf_set1(c[i]));
	e = vf_mul(vf_exp2(vf_mul(hi, vf_set1(-APR_LOG2E))), vf_exp2(vf_mul(vf_sub(p, lo), vf_set1(APR_LOG2E))));
	e = vf_mul(vf_mul(t, e), vf_set1(0.5f));
	return vf_select(vf_lt(x, zero), e, vf_sub(vf_set1(1.0f), e));
}

VEC vf activate(uint32_t act, vf x)
{
	vf u;

	switch (act) {
	case APR_OP_SILU:
		return vf_mul(x, vf_sigmoid(x));
	case APR_OP_GELU_TANH: /* x/2 (1 + tanh u) = x · sigmoid(2 u), u = √(2/π) (x + 0.044715 x³) */
		u = vf_mul(x, vf_fma(vf_mul(x, x), vf_set1(2.0f * 0.7978845608f * 0.044715f), vf_set1(2.0f * 0.7978845608f)));
		return vf_mul(x, vf_sigmoid(u));
	case APR_OP_GELU:
		return vf_mul(x, normal_cdf(x));
	default: /* ReLU² */
		u = vf_max(vf_set1(0.0f), x);
		return vf_mul(u, u);
	}
}

VEC void act_row(uint32_t act, float *a, const float *g, const float *u, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i += VL) {
		vf v = activate(act, vf_load_upto(g + i, n - i));

		if (u)
			v = vf_mul(v, vf_load_upto(u + i, n - i));
		vf_store_upto(a + i, n - i, v);
	}
}

static void rows_act(uint32_t act, float *a, const float *g, const float *u, uint32_t n)
{
	switch (act) { /* so that each loop holds one activation */
	case APR_OP_SILU:
		act_row(APR_OP_SILU, a, g, u, n);
		break;
	case APR_OP_GELU_TANH:
		act_row(APR_OP_GELU_TANH, a, g, u, n);
		break;
	case APR_OP_GELU:
		act_row(APR_OP_GELU, a, g, u, n);
		break;
	default:
		act_row(APR_OP_RELU2, a, g, u, n);
		break;
	}
}

static void rows_scale(float *v, uint32_t n, float scale, float softcap)
{
	uint32_t i;

	for (i = 0; i < n; i += VL) {
		vf x = vf_mul(vf_load_upto(v + i, n - i), vf_set1(scale));

		if (softcap != 0.0f)
			x = vf_mul(vf_set1(softcap), vf_tanh(vf_div(x, vf_set1(softcap))));
		vf_store_upto(v + i, n - i, x);
	}
}
