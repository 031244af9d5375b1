/* SPDX-License-Identifier: MIT */
/*
 * Times of decode ops and of a whole decode step of an 8B shape (random weights, every
 * layer its own), as JSON lines: captured in a graph, programmatic launch on and off.
 *
 * Owns: that bench. Medians of event-timed batches of replays.
 */
#include <algorithm>

#include "tests/cuda/support.cuh"

struct model { /* 8B Llama shape */
	static const uint32_t layers = 32, embd = 4096, ff = 14336, heads = 32, kv = 8, dim = 128, vocab = 128256;
	uint32_t type;
	std::vector<dbuf<uint8_t>> mem;
	std::vector<apr_mat> mats; /* q k v o gate/up down a layer, then head */

	void add(uint32_t n_in, uint32_t n_out, uint32_t order, const weight &from)
	{
		apr_mat m = from.m;
		size_t bytes = apr_cuda_tile_bytes(m.tile, n_in, n_out);

		mem.emplace_back(bytes);
		for (size_t at = 0; at < bytes; at += from.tiles.n)
			CUDA(cudaMemcpyAsync(mem.back().p + at, from.tiles.p, std::min(from.tiles.n, bytes - at),
			                     cudaMemcpyDeviceToDevice, stream));
		m.n_in = n_in, m.n_out = n_out, m.order = order, m.tiles = mem.back().p;
		mats.push_back(m);
	}
	explicit model(uint32_t t) : type(t)
	{
		weight from(t, 4096, 2048, 1);

		CUDA(cudaDeviceSynchronize());
		for (uint32_t i = 0; i < layers; i++) {
			add(embd, heads * dim, APR_ORDER_PLAIN, from);
			add(embd, kv * dim, APR_ORDER_PLAIN, from);
			add(embd, kv * dim, APR_ORDER_PLAIN, from);
			add(heads * dim, embd, APR_ORDER_PLAIN, from);
			add(embd, 2 * ff, APR_ORDER_GATE_UP, from);
			add(ff, embd, APR_ORDER_PLAIN, from);
		}
		add(embd, vocab, APR_ORDER_PLAIN, from);
		CUDA(cudaDeviceSynchronize());
	}
};

struct buffers {
	dbuf<float> x0, x1, y, q, o, a, logits, norm, cs;
	dbuf<uint8_t> pool;
	dbuf<uint32_t> table;
	apr_kv_group g;

	buffers(uint32_t rows, uint32_t ctx)
		: x0(random_rows(rows, 4096, 1, false)), x1(rows * 4096), y(random_rows(rows, 4096, 2, false)), q(rows * 4096),
		  o(rows * 4096), a((size_t)rows * 14336), logits((size_t)64 * 128256), norm(std::vector<float>(4096, 1.0f)),
		  cs(std::vector<float>((size_t)(ctx + 64) * 128, 0.5f)),
		  pool((size_t)rows * ((ctx + 63) / 64) * 32 * 64 * 8 * 256 * 2),
		  table(std::vector<uint32_t>(64 * ((ctx + 63) / 64)))
	{
		uint32_t per = (ctx + 63) / 64;
		std::vector<uint32_t> t(64 * per);

		for (uint32_t i = 0; i < 64 * per; i++)
			t[i] = i < rows * per ? i : 0;
		table.put(t);
		CUDA(cudaMemset(pool.p, 0x21, pool.n));
		memset(&g, 0, sizeof g);
		g.type = APR_KV_F16, g.n_layers = 32, g.n_kv_heads = 8, g.k_dim = g.v_dim = 128, g.n_pages = rows * per,
		g.max_pages_seq = per;
		g.layer_bytes = (uint64_t)64 * 8 * 256 * 2, g.pool = pool.p, g.table = table.p;
	}
};

/* what: -1 the whole step, else one op of all layers (0 attn_in, 1 attn, 2 o, 3 ffn_in, 4 down, 5 head) */
static void enqueue(const model &m, buffers &b, apr_cuda_launch *l, int what)
{
	apr_norm nw = {b.norm.p, 1e-5f}, none = {NULL, 0};
	int rc = 0;

	for (uint32_t i = 0; i < m.layers; i++) {
		const apr_mat *w = &m.mats[i * 6];
		apr_op_attn_in in = {b.x0.p,
		                     b.y.p,
		                     b.x1.p,
		                     none,
		                     nw,
		                     4096,
		                     32,
		                     8,
		                     128,
		                     128,
		                     w,
		                     w + 1,
		                     w + 2,
		                     NULL,
		                     NULL,
		                     NULL,
		                     none,
		                     none,
		                     {APR_OP_ROPE_PAIRS, 128, b.cs.p},
		                     b.q.p,
		                     {&b.g, i}};
		apr_op_attn at = {b.q.p, b.o.p, 32, 8, 128, 128, 0.088f, 0, 0, {&b.g, i}};
		apr_op_proj o = {b.o.p, b.y.p, 4096, 4096, w + 3, NULL}, down = {b.a.p, b.y.p, 14336, 4096, w + 5, NULL};
		apr_op_ffn_in ffn = {b.x1.p, b.y.p, b.x0.p, none, nw, 4096, 14336, w + 4, w + 4, APR_OP_SILU, b.a.p};

		if (what < 0 || what == 0)
			rc |= apr_cuda_decode_attn_in(l, &in);
		if (what < 0 || what == 1)
			rc |= apr_cuda_decode_attn(l, &at);
		if (what < 0 || what == 2)
			rc |= apr_cuda_decode_proj(l, &o);
		if (what < 0 || what == 3)
			rc |= apr_cuda_decode_ffn_in(l, &ffn);
		if (what < 0 || what == 4)
			rc |= apr_cuda_decode_proj(l, &down);
	}
	apr_op_head head = {b.x0.p, b.y.p, none, nw, 4096, m.vocab, &m.mats.back(), b.logits.p, 1, 0};
	if (what < 0 || what == 5)
		rc |= apr_cuda_decode_head(l, &head);
	if (rc)
		printf("bench: enqueue failed %d %s\n", rc, cudaGetErrorString(cudaGetLastError()));
}

static double time_graph(const model &m, buffers &b, apr_cuda_launch *l, int what, int replays)
{
	cudaGraph_t g;
	cudaGraphExec_t e;
	cudaEvent_t t0, t1;
	std::vector<float> us;

	CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
	enqueue(m, b, l, what);
	CUDA(cudaStreamEndCapture(stream, &g));
	CUDA(cudaGraphInstantiate(&e, g, 0));
	CUDA(cudaEventCreate(&t0));
	CUDA(cudaEventCreate(&t1));
	for (int k = 0; k < 6; k++) {
		float ms;

		CUDA(cudaEventRecord(t0, stream));
		for (int i = 0; i < replays; i++)
			CUDA(cudaGraphLaunch(e, stream));
		CUDA(cudaEventRecord(t1, stream));
		CUDA(cudaEventSynchronize(t1));
		CUDA(cudaEventElapsedTime(&ms, t0, t1));
		if (k)
			us.push_back(ms * 1e3f / replays);
	}
	std::sort(us.begin(), us.end());
	CUDA(cudaGraphExecDestroy(e));
	CUDA(cudaGraphDestroy(g));
	cudaEventDestroy(t0);
	cudaEventDestroy(t1);
	return us[2];
}

/* Do the logits of replays in a chain differ from those of the same launches one by one? */
static void stress(const model &m, buffers &b, apr_cuda_launch *l, uint32_t rows, int replays)
{
	std::vector<float> x = random_rows(rows, 4096, 1, false), first;
	int bad = 0;
	cudaGraph_t g;
	cudaGraphExec_t e;

	for (int k = 0; k < 2; k++) {
		l->pdl = k;
		CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
		enqueue(m, b, l, -1);
		CUDA(cudaStreamEndCapture(stream, &g));
		CUDA(cudaGraphInstantiate(&e, g, 0));
		for (int i = 0; i < (k ? replays : 1); i++) {
			b.x0.put(x);
			b.y.zero();
			CUDA(cudaDeviceSynchronize());
			CUDA(cudaGraphLaunch(e, stream));
			CUDA(cudaStreamSynchronize(stream));
			std::vector<float> lg((size_t)rows * 128256);
			CUDA(cudaMemcpy(lg.data(), b.logits.p, lg.size() * 4, cudaMemcpyDeviceToHost));
			if (!k)
				first = lg;
			else
				bad += !same_bits(lg.data(), first.data(), lg.size());
		}
		CUDA(cudaGraphExecDestroy(e));
		CUDA(cudaGraphDestroy(g));
	}
	CHECK(!bad, "%d of %d replays with programmatic launch differ from the plain graph", bad, replays);
	printf("{\"bench\":\"step_bits\",\"rows\":%u,\"replays\":%d,\"differ\":%d,\"finite\":%s}\n", rows, replays, bad,
	       std::all_of(first.begin(), first.end(), [](float f) { return isfinite(f); }) ? "true" : "false");
}

template <typename F> static double time_calls(F call, int n)
{
	cudaGraph_t g;
	cudaGraphExec_t e;
	cudaEvent_t t0, t1;
	std::vector<float> us;

	CUDA(cudaDeviceSynchronize());
	CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
	for (int i = 0; i < n; i++)
		call();
	CUDA(cudaStreamEndCapture(stream, &g));
	CUDA(cudaGraphInstantiate(&e, g, 0));
	CUDA(cudaEventCreate(&t0));
	CUDA(cudaEventCreate(&t1));
	for (int k = 0; k < 6; k++) {
		float ms;

		CUDA(cudaEventRecord(t0, stream));
		CUDA(cudaGraphLaunch(e, stream));
		CUDA(cudaEventRecord(t1, stream));
		CUDA(cudaEventSynchronize(t1));
		CUDA(cudaEventElapsedTime(&ms, t0, t1));
		if (k)
			us.push_back(ms * 1e3f / n);
	}
	std::sort(us.begin(), us.end());
	CUDA(cudaGraphExecDestroy(e));
	CUDA(cudaGraphDestroy(g));
	cudaEventDestroy(t0);
	cudaEventDestroy(t1);
	return us[2];
}

static void bench_sample(void)
{
	const uint32_t n = 262144;
	dbuf<float> lg(random_rows(64, n, 1, false));
	dbuf<apr_cuda_record> rec(64);
	dbuf<apr_cuda_top> top(64);
	dbuf<uint32_t> step_no(std::vector<uint32_t>{1});
	step st(256 * 1024);

	for (uint32_t rows : {1u, 16u, 64u})
		for (int kind = 0; kind < 4; kind++) {
			static const char *const name[] = {"greedy", "plain", "top_k_p", "top_k_p_logprob"};
			apr_cuda_draw d = {};

			d.temperature = kind ? 0.8f : 0;
			d.top_k = kind > 1 ? 40 : 0, d.top_p = kind > 1 ? 0.9f : 1, d.repeat_penalty = 1, d.seed = 5,
			d.want_logprob = kind == 3;
			dbuf<apr_cuda_draw> dd(std::vector<apr_cuda_draw>(64, d));
			dbuf<uint32_t> nd(std::vector<uint32_t>{rows});
			st.l.bucket = rows;
			double us =
					time_calls([&] { apr_cuda_sample(&st.l, lg.p, n, n, dd.p, nd.p, step_no.p, rec.p, top.p); }, 20);

			printf("{\"bench\":\"sample_%s\",\"vocab\":%u,\"rows\":%u,\"us\":%.1f}\n", name[kind], n, rows, us);
		}
}

static void bench_prefill_attn(void)
{
	for (uint32_t rows : {128u, 512u, 2048u}) {
		buffers b(1, 2048);
		dbuf<float> q(random_rows(rows, 4096, 1, false)), o((size_t)rows * 4096);
		std::vector<apr_cuda_attn_tile> t;
		step st(256 * 1024);
		apr_op_attn op = {q.p, o.p, 32, 8, 128, 128, 0.088f, 0, 0, {&b.g, 3}};

		for (int i = (int)rows / 64 - 1; i >= 0; i--)
			t.push_back({0, (uint32_t)i * 64, 64, (uint32_t)i * 64});
		dbuf<apr_cuda_attn_tile> dt(t);
		dbuf<uint32_t> nt(std::vector<uint32_t>{(uint32_t)t.size()});
		st.set(rows, rows, std::vector<uint32_t>(rows), std::vector<uint32_t>(rows));
		double us = time_calls([&] { apr_cuda_prefill_attn(&st.l, &op, dt.p, nt.p, (uint32_t)t.size()); }, 20);

		printf("{\"bench\":\"prefill_attn\",\"rows\":%u,\"us\":%.1f,\"tflops\":%.0f}\n", rows, us,
		       4.0 * 128 * 32 * rows * (rows + 1) / 2 / us * 1e-6);
	}
}

void bench(void)
{
	static const char *const name[] = {"step", "attn_in", "attn", "o", "ffn_in", "down", "head"};

	for (uint32_t type : {12u, 8u}) {
		model m(type);

		for (uint32_t rows : {1u, 16u, 64u})
			for (uint32_t ctx : {128u, 4096u}) {
				if ((ctx == 4096 && rows == 64) || (type != 12 && (ctx > 128 || rows == 64)))
					continue;
				buffers b(rows, ctx);
				apr_cuda_limits lim = {64, 4096, 14336, 32, 8, 128, 128, ctx};
				step st(apr_cuda_scratch_bytes(&lim));
				std::vector<uint32_t> pos(rows, ctx - 1), slot(rows);

				for (uint32_t i = 0; i < rows; i++)
					slot[i] = i;
				st.set(rows, rows, pos, slot);
				for (int what = -1; what < 6; what++) {
					double us = time_graph(m, b, &st.l, what, what < 0 ? 20 : 5);

					st.l.pdl = false;
					double plain = what < 0 ? time_graph(m, b, &st.l, what, 20) : 0;
					st.l.pdl = true;
					printf("{\"bench\":\"decode_%s\",\"type\":%u,\"rows\":%u,\"ctx\":%u,\"us\":%.1f,\"us_each\":%.2f,"
					       "\"plain_us\":%.1f}\n",
					       name[what + 1], type, rows, ctx, us, what < 0 || what == 5 ? us : us / m.layers, plain);
				}
				if (ctx == 128 && rows <= 16)
					stress(m, b, &st.l, rows, 60);
			}
	}
	bench_sample();
	bench_prefill_attn();
}
