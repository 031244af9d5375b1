/* SPDX-License-Identifier: MIT */
/* A whole layer and its logits by the decode ops against the CPU's ops in F32, on the same file's blocks: real models'
 * shapes, mixed types, rows of one sequence in one step. */
#include "tests/cuda/cpu_side.h"
#include "tests/cuda/support.cuh"

struct layer_shape {
	const char *name;
	uint32_t n_embd, n_ff, n_heads, n_kv, dim, vocab, rope, act;
	bool norms, bias, post;
	float softcap;
	uint32_t types[SIDE_N];
};
static const layer_shape shapes[] = {
		{"smollm2", 576, 1536, 9, 3, 64, 512, 1, 0, false, false, false, 0, {3, 3, 3, 3, 3, 3, 3, 8}},
		{"gemma3", 640, 2048, 4, 1, 256, 300, 2, 1, true, false, true, 0, {6, 6, 8, 6, 6, 6, 14, 8}},
		{"qwen2", 896, 4864, 14, 2, 64, 1000, 2, 0, false, true, false, 0, {6, 6, 8, 6, 6, 6, 12, 8}},
		{"llama q4_k_m", 2048, 5632, 32, 4, 64, 2000, 1, 0, false, false, false, 0, {12, 12, 14, 12, 12, 12, 14, 14}},
		{"capped bf16", 1536, 1024, 8, 2, 128, 257, 2, 2, true, true, false, 30, {30, 30, 30, 30, 30, 30, 30, 30}},
		{"mixed", 768, 1024, 6, 6, 128, 100, 1, 3, false, true, true, 0, {1, 30, 2, 10, 11, 11, 13, 0}},
};

static double rel_rms(const std::vector<float> &got, const std::vector<float> &want)
{
	double e = 0, r = 0;

	for (size_t i = 0; i < want.size(); i++) {
		e += pow((double)got[i] - want[i], 2);
		r += pow(want[i], 2);
	}
	return sqrt(e / r);
}

static void one_layer(const layer_shape &p)
{
	const uint32_t rows = 13, ctx = 300, nq = p.n_heads * p.dim, nk = p.n_kv * p.dim, pages = (ctx + 63) / 64,
				   half = p.dim / 2;
	uint32_t order = p.rope == APR_OP_ROPE_HALVES ? APR_ORDER_ROPE_HALVES : APR_ORDER_PLAIN;
	weight q(p.types[SIDE_Q], p.n_embd, nq, 1, order, p.dim, half),
			k(p.types[SIDE_K], p.n_embd, nk, 2, order, p.dim, half);
	weight v(p.types[SIDE_V], p.n_embd, nk, 3), o(p.types[SIDE_O], nq, p.n_embd, 4),
			gu(p.types[SIDE_UP], p.n_embd, 2 * p.n_ff, 5, APR_ORDER_GATE_UP);
	weight down(p.types[SIDE_DOWN], p.n_ff, p.n_embd, 6), head(p.types[SIDE_HEAD], p.n_embd, p.vocab, 7);
	const weight *all[] = {&q, &k, &v, &o, &gu, &gu, &down, &head};
	std::vector<float> x = random_rows(rows, p.n_embd, 8, false), norm(p.n_embd, 1.1f), post(p.n_embd, 0.7f),
					   hn(p.dim, 1.2f), bias = random_rows(1, nq + 2 * nk, 9, false), cs((size_t)ctx * p.dim),
					   y((size_t)rows * p.n_embd), a((size_t)rows * p.n_ff), y2(y), lg((size_t)rows * p.vocab);
	std::vector<uint32_t> pos(rows), slot(rows);
	cpu_side c = {};

	for (uint32_t i = 0; i < cs.size() / 2; i++)
		cs[2 * i] = cosf(i * 0.11f), cs[2 * i + 1] = sinf(i * 0.11f);
	for (uint32_t i = 0; i < rows; i++)
		pos[i] = i;
	for (int i = 0; i < SIDE_N; i++) {
		c.w[i].type = all[i]->type, c.w[i].n_in = all[i]->m.n_in, c.w[i].n_out = all[i]->m.n_out;
		c.w[i].blocks = i == SIDE_UP ? all[i]->b.data() : all[i]->a.data();
	}
	c.w[SIDE_GATE].n_out = c.w[SIDE_UP].n_out = p.n_ff;
	c.n_embd = p.n_embd, c.n_ff = p.n_ff, c.n_heads = p.n_heads, c.n_kv_heads = p.n_kv, c.k_dim = c.v_dim = p.dim,
	c.n_ctx = ctx, c.n_vocab = p.vocab;
	c.rows = rows, c.act = p.act, c.norm = norm.data(), c.post = p.post ? post.data() : NULL,
	c.head_norm = p.norms ? hn.data() : NULL;
	c.bq = p.bias ? &bias[0] : NULL, c.bk = p.bias ? &bias[nq] : NULL, c.bv = p.bias ? &bias[nq + nk] : NULL;
	c.rope = {p.rope, p.dim, cs.data()}, c.softcap = p.softcap, c.x = x.data(), c.pos = pos.data();
	c.y = y.data(), c.a = a.data(), c.y2 = y2.data(), c.logits = lg.data();
	int rc = cpu_side_layer(&c);
	CHECK(rc == 0, "%s: the CPU's side: %d", p.name, rc);

	dbuf<float> dx(x), dx1(x.size()), dx2(x.size()), dn(norm), dp(post), dh(hn), db(bias), dcs(cs),
			dq((size_t)rows * nq), dout((size_t)rows * nq), dy(y.size()), da(a.size()), dy2(y.size()), dl(lg.size());
	dbuf<uint8_t> pool((size_t)pages * 64 * 2 * nk * 2);
	std::vector<uint32_t> t(APR_MAX_SLOTS * pages);
	for (uint32_t i = 0; i < pages; i++)
		t[i] = pages - 1 - i;
	dbuf<uint32_t> dt(t);
	apr_kv_group g = {APR_KV_F16, 1, p.n_kv, p.dim, p.dim, 0, pages, pages, (uint64_t)64 * 2 * nk * 2, pool.p, dt.p};
	apr_cuda_limits lim = {64, p.n_embd, p.n_ff, p.n_heads, p.n_kv, p.dim, p.dim, ctx};
	step st(apr_cuda_scratch_bytes(&lim));
	apr_norm none = {NULL, 0}, nw = {dn.p, 1e-5f}, pw = {p.post ? dp.p : NULL, 1e-5f},
			 hw = {p.norms ? dh.p : NULL, 1e-5f};
	apr_op_attn_in in = {dx.p,
	                     NULL,
	                     dx1.p,
	                     none,
	                     nw,
	                     p.n_embd,
	                     p.n_heads,
	                     p.n_kv,
	                     p.dim,
	                     p.dim,
	                     &q.m,
	                     &k.m,
	                     &v.m,
	                     p.bias ? db.p : NULL,
	                     p.bias ? db.p + nq : NULL,
	                     p.bias ? db.p + nq + nk : NULL,
	                     hw,
	                     hw,
	                     {p.rope, p.dim, dcs.p},
	                     dq.p,
	                     {&g, 0}};
	apr_op_attn at = {dq.p, dout.p, p.n_heads, p.n_kv, p.dim, p.dim, 0.1f, p.softcap, 0, {&g, 0}};
	apr_op_proj po = {dout.p, dy.p, nq, p.n_embd, &o.m, NULL}, pd = {da.p, dy2.p, p.n_ff, p.n_embd, &down.m, NULL};
	apr_op_ffn_in ffn = {dx1.p, dy.p, dx2.p, pw, nw, p.n_embd, p.n_ff, &gu.m, &gu.m, p.act, da.p};
	apr_op_head lm = {dx2.p, dy2.p, pw, nw, p.n_embd, p.vocab, &head.m, dl.p, 1, 0};

	st.set(16, rows, pos, slot);
	CHECK(!apr_cuda_decode_attn_in(&st.l, &in) && !apr_cuda_decode_attn(&st.l, &at) &&
	              !apr_cuda_decode_proj(&st.l, &po) && !apr_cuda_decode_ffn_in(&st.l, &ffn) &&
	              !apr_cuda_decode_proj(&st.l, &pd) && !apr_cuda_decode_head(&st.l, &lm),
	      "%s: launch", p.name);
	double ey = rel_rms(dy.get(), y), ea = rel_rms(da.get(), a), ey2 = rel_rms(dy2.get(), y2),
		   el = rel_rms(dl.get(), lg);
	printf("  layer %-14s against the CPU's F32, relative rms: o %.1e, act %.1e, down %.1e, logits %.1e\n", p.name, ey,
	       ea, ey2, el);
	CHECK(ey < 4e-3 && ea < 4e-3 && ey2 < 4e-3 && el < 4e-3, "%s: too far from the CPU", p.name);
}

void check_layer(void)
{
	for (const layer_shape &p : shapes)
		one_layer(p);
}
