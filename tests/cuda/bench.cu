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

static void one_prefill_attn(const apr_cuda_limits &lim, uint32_t prompts, uint32_t rows, uint32_t pos0)
{
	const uint32_t dim = lim.k_dim, all = prompts * rows, ctx = pos0 + rows, per = (ctx + 63) / 64;
	dbuf<uint8_t> pool((size_t)prompts * per * 64 * lim.n_kv_heads * dim * 4);
	std::vector<uint32_t> table(prompts * per), pos(all), slot(all), counts(2);
	std::vector<apr_cuda_attn_tile> t((all + 63) / 64 + prompts + APR_CUDA_ATTN_MORE);
	dbuf<uint32_t> dtab(table.size()), nt(2);
	dbuf<float> q((size_t)all * lim.n_heads * dim), o(q.n);
	apr_kv_group g = {APR_KV_F16,    1, lim.n_kv_heads, dim,   dim, 0, prompts * per, per, (uint64_t)64 * lim.n_kv_heads * dim * 4,
	                  pool.p, dtab.p};
	apr_op_attn op = {q.p, o.p, lim.n_heads, lim.n_kv_heads, dim, dim, 1 / sqrtf((float)dim), 0, 0, {&g, 0}};
	apr_cuda_attn_plan plan = {device_sms, apr_cuda_attn_items(&lim), apr_cuda_attn_parts(&lim)};
	step st(apr_cuda_scratch_bytes(&lim));
	rng r = {7};

	for (uint32_t i = 0; i < all; i++)
		pos[i] = pos0 + i % rows, slot[i] = i / rows;
	for (uint32_t i = 0; i < prompts * per; i++)
		table[i] = i;
	for (uint32_t i = prompts * per - 1; i > 0; i--)
		std::swap(table[i], table[r.below(i + 1)]);
	std::vector<uint16_t> some(1 << 20); /* keys and values, then queries of the size they have: powers of two */
	for (uint16_t &h : some)
		h = apr_half_from_f32(r.normal());
	for (size_t at = 0; at < pool.n; at += some.size() * 2)
		CUDA(cudaMemcpy(pool.p + at, some.data(), std::min(some.size() * 2, pool.n - at), cudaMemcpyHostToDevice));
	for (size_t at = 0; at < q.n * 4; at += some.size() * 2)
		CUDA(cudaMemcpy((uint8_t *)q.p + at, some.data(), std::min(some.size() * 2, q.n * 4 - at), cudaMemcpyHostToDevice));
	std::vector<float> ones(lim.n_heads, 1.0f);
	for (uint32_t i = 0; i < all; i++)
		CUDA(cudaMemcpy((uint8_t *)q.p + (size_t)i * lim.n_heads * dim * 4 + lim.n_heads * dim * 2, ones.data(), ones.size() * 4,
		                cudaMemcpyHostToDevice));
	dtab.put(table);
	apr_cuda_attn_cut(&plan, pos.data(), slot.data(), all, t.data(), counts.data());
	dbuf<apr_cuda_attn_tile> dt(t);
	nt.put(counts);
	st.l.bucket = all;
	double us = time_calls([&] { apr_cuda_prefill_attn(&st.l, &op, dt.p, nt.p, (uint32_t)t.size()); }, 20), flops = 0;

	for (uint32_t i = 0; i < all; i++)
		flops += 4.0 * dim * lim.n_heads * (pos[i] + 1);
	printf("{\"bench\":\"prefill_attn\",\"heads\":%u,\"kv_heads\":%u,\"dim\":%u,\"prompts\":%u,\"rows\":%u,\"pos\":%u,"
	       "\"divided\":%u,\"us\":%.1f,\"tflops\":%.0f}\n",
	       lim.n_heads, lim.n_kv_heads, dim, prompts, rows, pos0, counts[1], us, flops / us * 1e-6);
}

static void bench_prefill_attn(void)
{
	const apr_cuda_limits big = {64, 4096, 14336, 32, 8, 128, 128, 32768}, small = {64, 2048, 8192, 32, 8, 64, 64, 8192},
						  gemma = {64, 640, 2048, 4, 1, 256, 256, 8192}, mha = {64, 4096, 11008, 32, 32, 128, 128, 8192};

	one_prefill_attn(big, 1, 2048, 0);
	one_prefill_attn(big, 1, 512, 7680);
	one_prefill_attn(big, 1, 64, 32704);
	one_prefill_attn(big, 1, 128, 4096);
	one_prefill_attn(big, 1, 128, 0);
	one_prefill_attn(big, 8, 256, 0);
	one_prefill_attn(small, 1, 2048, 0);
	one_prefill_attn(small, 1, 512, 7680);
	one_prefill_attn(gemma, 1, 2048, 0);
	one_prefill_attn(gemma, 1, 512, 7680);
	one_prefill_attn(mha, 1, 2048, 0);
}

/* What stands around an 8B layer's GEMMs */
static void bench_prefill_rows(void)
{
	for (uint32_t rows : {128u, 2048u}) {
		buffers b(rows / 64, 64);
		apr_norm nw = {b.norm.p, 1e-5f}, none = {NULL, 0};
		dbuf<float> x(random_rows(rows, 4096, 1, false)), y(random_rows(rows, 4096, 2, false)), x2(x.n), scale(rows),
				wide((size_t)rows * 28672), a((size_t)rows * 14336), cs(std::vector<float>((size_t)64 * 128, 0.5f));
		dbuf<uint8_t> in((size_t)rows * 14336 * 2);
		std::vector<uint32_t> pos(rows), slot(rows);
		step st(256 * 1024);
		apr_cuda_gemm_in dst = {APR_REAL_F16, in.p, scale.p, rows};
		apr_op_attn_in op = {};

		wide.zero();
		a.zero();
		scale.zero();
		op.n_heads = 32, op.n_kv_heads = 8, op.k_dim = op.v_dim = 128, op.rope = {APR_OP_ROPE_PAIRS, 128, cs.p};
		op.q = a.p, op.kv = {&b.g, 3};
		for (uint32_t i = 0; i < rows; i++)
			pos[i] = i % 64, slot[i] = i / 64;
		st.set(rows, rows, pos, slot);
		auto say = [&](const char *name, double us, double floats) {
			printf("{\"bench\":\"prefill_rows_%s\",\"rows\":%u,\"us\":%.1f,\"gbs\":%.0f}\n", name, rows, us,
			       floats * 4 * rows / us * 1e-3);
		};
		say("norm", time_calls([&] { apr_cuda_prefill_norm(&st.l, x.p, y.p, x2.p, none, nw, 4096, &dst); }, 20), 3.5 * 4096);
		say("convert_4096", time_calls([&] { apr_cuda_prefill_convert(&st.l, x.p, 4096, &dst); }, 20), 1.5 * 4096);
		say("convert_14336", time_calls([&] { apr_cuda_prefill_convert(&st.l, a.p, 14336, &dst); }, 20), 1.5 * 14336);
		say("heads",
		    time_calls(
					[&] {
						apr_cuda_prefill_heads(&st.l, &op, wide.p, 6144, wide.p + 4096, 6144, wide.p + 5120, 6144, scale.p);
					},
					20),
		    1.5 * 6144);
		say("act",
		    time_calls([&] { apr_cuda_prefill_act(&st.l, APR_OP_SILU, wide.p, wide.p + 14336, 28672, a.p, 14336, scale.p); },
		               20),
		    3 * 14336);
		say("finish", time_calls([&] { apr_cuda_prefill_finish(&st.l, y.p, 4096, scale.p, NULL); }, 20), 2 * 4096);
	}
}

void bench_prefill(void)
{
	bench_prefill_attn();
	bench_prefill_rows();
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
	bench_prefill();
}
