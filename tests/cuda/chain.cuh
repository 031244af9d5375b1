/* SPDX-License-Identifier: MIT */
/*
 * A chain of decode ops like a model's step, of any shape: for the check that replays
 * of it give equal bits, and for the bench.
 *
 * Owns: weights (each layer its own memory), buffers, the order of launches. Weights of a
 * tensor repeat one random block of rows: bits and speed do not care.
 */
#ifndef APR_TESTS_CUDA_CHAIN_CUH
#define APR_TESTS_CUDA_CHAIN_CUH

#include <algorithm>

#include "tests/cuda/support.cuh"

struct chain_shape {
	uint32_t layers, embd, ff, heads, kv, dim, vocab;
	uint32_t type;
	bool mixed; /* Q6_K for the output and, where Q4_K_M has it, for v and down */
};
enum chain_what { CHAIN_STEP = -1, CHAIN_ATTN_IN, CHAIN_ATTN, CHAIN_O, CHAIN_FFN_IN, CHAIN_DOWN, CHAIN_HEAD };

struct chain_model {
	chain_shape s;
	std::vector<dbuf<uint8_t>> mem;
	std::vector<apr_mat> mats; /* q k v o gate/up down a layer, then head */

	void add(uint32_t type, uint32_t n_in, uint32_t n_out, uint32_t order)
	{
		uint32_t some = std::min(n_out, 2048u);
		weight from(type, n_in, some, mats.size() + 1);
		apr_mat m = from.m;
		size_t bytes = apr_cuda_tile_bytes(m.tile, n_in, n_out);

		mem.emplace_back(bytes);
		for (size_t at = 0; at < bytes; at += from.tiles.n)
			CUDA(cudaMemcpyAsync(mem.back().p + at, from.tiles.p, std::min(from.tiles.n, bytes - at),
			                     cudaMemcpyDeviceToDevice, stream));
		CUDA(cudaStreamSynchronize(stream));
		m.n_in = n_in, m.n_out = n_out, m.order = order, m.tiles = mem.back().p;
		mats.push_back(m);
	}
	/* As an earlier matrix, in memory of its own */
	void again(const apr_mat &m)
	{
		size_t bytes = apr_cuda_tile_bytes(m.tile, m.n_in, m.n_out);

		mem.emplace_back(bytes);
		CUDA(cudaMemcpyAsync(mem.back().p, m.tiles, bytes, cudaMemcpyDeviceToDevice, stream));
		mats.push_back(m);
		mats.back().tiles = mem.back().p;
	}
	uint32_t type_of(uint32_t layer, bool down_or_v) const
	{
		uint32_t e = s.layers / 8;
		bool up = layer < e || layer >= 7 * e || (layer - e) % 3 == 2;

		return s.mixed && down_or_v && up ? (uint32_t)APR_TYPE_Q6_K : s.type;
	}
	void layer(uint32_t i)
	{
		for (uint32_t j = 0; j < i; j++) /* one like it, where there is one */
			if (type_of(i, true) == type_of(j, true)) {
				for (uint32_t k = 0; k < 6; k++)
					again(apr_mat(mats[j * 6 + k]));
				return;
			}
		add(s.type, s.embd, s.heads * s.dim, APR_ORDER_PLAIN);
		add(s.type, s.embd, s.kv * s.dim, APR_ORDER_PLAIN);
		add(type_of(i, true), s.embd, s.kv * s.dim, APR_ORDER_PLAIN);
		add(s.type, s.heads * s.dim, s.embd, APR_ORDER_PLAIN);
		add(s.type, s.embd, 2 * s.ff, APR_ORDER_GATE_UP);
		add(type_of(i, true), s.ff, s.embd, APR_ORDER_PLAIN);
	}
	explicit chain_model(const chain_shape &shape) : s(shape)
	{
		for (uint32_t i = 0; i < s.layers; i++)
			layer(i);
		add(s.mixed ? (uint32_t)APR_TYPE_Q6_K : s.type, s.embd, s.vocab, APR_ORDER_PLAIN);
		CUDA(cudaDeviceSynchronize());
	}
	size_t bytes(const apr_mat &m) const { return apr_cuda_tile_bytes(m.tile, m.n_in, m.n_out); }
	/* What an op of the whole chain has to read at least: weights, and keys and values of ctx positions a row */
	double bytes_of(int what, uint32_t rows, uint32_t ctx) const
	{
		double n = 0;

		for (uint32_t i = 0; i < s.layers; i++)
			for (uint32_t k = 0; k < 6; k++)
				if (what < 0 || what == (k < 3 ? CHAIN_ATTN_IN : k == 3 ? CHAIN_O : k == 4 ? CHAIN_FFN_IN : CHAIN_DOWN))
					n += (double)bytes(mats[i * 6 + k]);
		if (what < 0 || what == CHAIN_ATTN)
			n += (double)s.layers * rows * ctx * s.kv * 2 * s.dim * 2;
		return n + (what < 0 || what == CHAIN_HEAD ? (double)bytes(mats.back()) : 0);
	}
};

struct chain_buffers {
	std::vector<float> first;
	dbuf<float> x0, x1, y, q, o, a, logits, norm, cs;
	dbuf<uint8_t> pool;
	dbuf<uint32_t> table;
	apr_kv_group g;
	step st;

	static apr_cuda_limits limits(const chain_shape &s, uint32_t ctx)
	{
		return {64, s.embd, s.ff, s.heads, s.kv, s.dim, s.dim, ctx};
	}
	static size_t scratch(const chain_shape &s, uint32_t ctx)
	{
		apr_cuda_limits l = limits(s, ctx);

		return apr_cuda_scratch_bytes(&l);
	}
	chain_buffers(const chain_shape &s, uint32_t rows, uint32_t ctx)
		: first(random_rows(rows, s.embd, 1, false)), x0(first), x1((size_t)rows * s.embd), y((size_t)rows * s.embd),
		  q((size_t)rows * s.heads * s.dim), o((size_t)rows * s.heads * s.dim), a((size_t)rows * s.ff),
		  logits((size_t)64 * s.vocab), norm(std::vector<float>(s.embd, 1.0f)),
		  cs(std::vector<float>((size_t)(ctx + 64) * s.dim, 0.5f)),
		  pool((size_t)rows * ((ctx + 63) / 64) * s.layers * 64 * s.kv * 2 * s.dim * 2),
		  table((size_t)APR_MAX_SLOTS * ((ctx + 63) / 64)), st(scratch(s, ctx))
	{
		uint32_t per = (ctx + 63) / 64;
		std::vector<uint32_t> t((size_t)APR_MAX_SLOTS * per), pos(rows, ctx - 1), slot(rows);

		for (uint32_t i = 0; i < APR_MAX_SLOTS * per; i++)
			t[i] = i < rows * per ? i : 0;
		table.put(t);
		pool.fill(0x21);
		memset(&g, 0, sizeof g);
		g.type = APR_KV_F16, g.n_layers = s.layers, g.n_kv_heads = s.kv, g.k_dim = g.v_dim = s.dim, g.n_pages = rows * per,
		g.max_pages_seq = per, g.layer_bytes = (uint64_t)64 * s.kv * 2 * s.dim * 2, g.pool = pool.p, g.table = table.p;
		for (uint32_t i = 0; i < rows; i++)
			slot[i] = i;
		st.set(rows, rows, pos, slot);
		rewind();
	}
	void rewind() /* as before the first launch */
	{
		x0.put(first);
		y.zero();
	}
};

/* The step of all layers and the head, or one op of all layers */
static inline int chain_enqueue(const chain_model &m, chain_buffers &b, int what)
{
	const chain_shape &s = m.s;
	apr_norm nw = {b.norm.p, 1e-5f}, none = {NULL, 0};
	apr_cuda_launch *l = &b.st.l;
	uint32_t nq = s.heads * s.dim;
	int rc = 0;

	for (uint32_t i = 0; i < s.layers; i++) {
		const apr_mat *w = &m.mats[i * 6];
		apr_op_attn_in in = {b.x0.p, b.y.p,  b.x1.p, none, nw,   s.embd, s.heads, s.kv, s.dim,                             s.dim,
		                     w,      w + 1,  w + 2,  NULL, NULL, NULL,   none,    none, {APR_OP_ROPE_PAIRS, s.dim, b.cs.p}, b.q.p,
		                     {&b.g, i}};
		apr_op_attn at = {b.q.p, b.o.p, s.heads, s.kv, s.dim, s.dim, 0.088f, 0, 0, {&b.g, i}};
		apr_op_proj o = {b.o.p, b.y.p, nq, s.embd, w + 3, NULL}, down = {b.a.p, b.y.p, s.ff, s.embd, w + 5, NULL};
		apr_op_ffn_in ffn = {b.x1.p, b.y.p, b.x0.p, none, nw, s.embd, s.ff, w + 4, w + 4, APR_OP_SILU, b.a.p};

		if (what < 0 || what == CHAIN_ATTN_IN)
			rc = rc ? rc : apr_cuda_decode_attn_in(l, &in);
		if (what < 0 || what == CHAIN_ATTN)
			rc = rc ? rc : apr_cuda_decode_attn(l, &at);
		if (what < 0 || what == CHAIN_O)
			rc = rc ? rc : apr_cuda_decode_proj(l, &o);
		if (what < 0 || what == CHAIN_FFN_IN)
			rc = rc ? rc : apr_cuda_decode_ffn_in(l, &ffn);
		if (what < 0 || what == CHAIN_DOWN)
			rc = rc ? rc : apr_cuda_decode_proj(l, &down);
	}
	apr_op_head head = {b.x0.p, b.y.p, none, nw, s.embd, s.vocab, &m.mats.back(), b.logits.p, 1, 0};

	if (what < 0 || what == CHAIN_HEAD)
		rc = rc ? rc : apr_cuda_decode_head(l, &head);
	return rc;
}

struct chain_graph {
	cudaGraphExec_t exec = NULL;

	template <typename F> explicit chain_graph(F enqueue)
	{
		cudaGraph_t g;

		CUDA(cudaDeviceSynchronize());
		CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
		int rc = enqueue();
		CUDA(cudaStreamEndCapture(stream, &g));
		CHECK(rc == 0, "enqueue: %d %s", rc, cudaGetErrorString(cudaGetLastError()));
		CUDA(cudaGraphInstantiate(&exec, g, 0));
		CUDA(cudaGraphDestroy(g));
	}
	chain_graph(const chain_graph &) = delete;
	~chain_graph() { cudaGraphExecDestroy(exec); }
};

#endif
