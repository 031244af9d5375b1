/* SPDX-License-Identifier: MIT */
/*
 * Times of decode ops and of whole decode steps of real shapes (random weights, every
 * layer its own), of prefill attention and of sampling, as JSON lines.
 *
 * Owns: that bench. All is captured in a graph; medians of five event-timed batches of
 * replays. GB/s counts what has to be read at least: weights, keys and values; share is
 * of 4,540 GB/s, what an H200 reads of 8 GB. x_cublas: the time of cuBLASLt's FP16
 * product of that shape over ours.
 */
#include "tests/cuda/bench.cuh"
#include "tests/cuda/chain.cuh"

#define READ_GB_S 4540.0

double time_replays(cudaGraphExec_t e, int replays)
{
	cudaEvent_t t0, t1;
	std::vector<float> us;

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
	CUDA(cudaEventDestroy(t0));
	CUDA(cudaEventDestroy(t1));
	return us[2];
}

template <typename F> static double time_calls(F call, int n)
{
	chain_graph g([&] {
		int rc = 0;

		for (int i = 0; i < n; i++)
			rc = rc ? rc : call();
		return rc;
	});

	return time_replays(g.exec, 1) / n;
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
					time_calls([&] { return apr_cuda_sample(&st.l, lg.p, n, n, dd.p, nd.p, step_no.p, rec.p, top.p); }, 20);

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
	double us = time_calls([&] { return apr_cuda_prefill_attn(&st.l, &op, dt.p, nt.p, (uint32_t)t.size()); }, 20), flops = 0;

	for (uint32_t i = 0; i < all; i++)
		flops += 4.0 * dim * lim.n_heads * (pos[i] + 1);
	printf("{\"bench\":\"prefill_attn\",\"heads\":%u,\"kv_heads\":%u,\"dim\":%u,\"prompts\":%u,\"rows\":%u,\"pos\":%u,"
	       "\"divided\":%u,\"us\":%.1f,\"tflop_s\":%.0f}\n",
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
		chain_buffers b(chain_shape{8, 4096, 64, 32, 8, 128, 64, 8, false}, rows / 64, 64);
		apr_norm nw = {b.norm.p, 1e-5f}, none = {NULL, 0};
		dbuf<float> x(random_rows(rows, 4096, 1, false)), y(random_rows(rows, 4096, 2, false)), x2(x.n), scale(rows),
				wide((size_t)rows * 28672), a((size_t)rows * 14336), cs(std::vector<float>((size_t)64 * 128, 0.5f));
		dbuf<uint8_t> in((size_t)rows * 14336 * 2);
		std::vector<uint32_t> pos(rows), slot(rows);
		step st(256 * 1024);
		apr_cuda_gemm_in dst = {APR_REAL_F16, in.p, scale.p, rows, false, NULL};
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
			printf("{\"bench\":\"prefill_rows_%s\",\"rows\":%u,\"us\":%.1f,\"gb_s\":%.0f}\n", name, rows, us,
			       floats * 4 * rows / us * 1e-3);
		};
		say("norm", time_calls([&] { return apr_cuda_prefill_norm(&st.l, x.p, y.p, x2.p, none, nw, 4096, NULL, &dst); }, 20), 3.5 * 4096);
		say("convert_4096", time_calls([&] { return apr_cuda_prefill_convert(&st.l, x.p, 4096, &dst); }, 20), 1.5 * 4096);
		say("convert_14336", time_calls([&] { return apr_cuda_prefill_convert(&st.l, a.p, 14336, &dst); }, 20), 1.5 * 14336);
		say("heads",
		    time_calls(
					[&] {
						return apr_cuda_prefill_heads(&st.l, &op, wide.p, 6144, wide.p + 4096, 6144, wide.p + 5120, 6144,
						                              {scale.p, NULL});
					},
					20),
		    1.5 * 6144);
		say("act_in",
		    time_calls(
					[&] {
						return apr_cuda_prefill_act_in(&st.l, APR_OP_SILU, wide.p, wide.p + 14336, 28672, 14336,
						                               {scale.p, NULL}, &dst);
					},
					20),
		    2.5 * 14336);
	}
}

void bench_prefill(void)
{
	bench_prefill_attn();
	bench_prefill_rows();
}

static const struct bench_file {
	const char *name;
	chain_shape s;
} files[] = {
		{"llama-8b-Q4_K_M", {32, 4096, 14336, 32, 8, 128, 128256, APR_TYPE_Q4_K, true}},
		{"llama-8b-Q8_0", {32, 4096, 14336, 32, 8, 128, 128256, APR_TYPE_Q8_0, false}},
		{"qwen2-1.5b-Q4_K_M", {28, 1536, 8960, 12, 2, 128, 151936, APR_TYPE_Q4_K, true}},
};

/* cuBLASLt's product of the same shape; 0 for attention */
static double cublas_us(const chain_shape &s, int what, uint32_t rows)
{
	uint32_t nq = s.heads * s.dim;

	switch (what) {
	case CHAIN_ATTN_IN: return gemm_us(nq + 2 * s.kv * s.dim, s.embd, rows);
	case CHAIN_O: return gemm_us(s.embd, nq, rows);
	case CHAIN_FFN_IN: return gemm_us(2 * s.ff, s.embd, rows);
	case CHAIN_DOWN: return gemm_us(s.embd, s.ff, rows);
	case CHAIN_HEAD: return gemm_us(s.vocab, s.embd, rows);
	default: return 0;
	}
}

static void bench_ops(const bench_file &f, const chain_model &m, uint32_t rows, uint32_t ctx)
{
	static const char *const name[] = {"attn_in", "attn", "o", "ffn_in", "down", "head"};
	chain_buffers b(f.s, rows, ctx);
	double plain;

	for (int what = CHAIN_STEP; what <= CHAIN_HEAD; what++) {
		chain_graph g([&] { return chain_enqueue(m, b, what); });
		double us = time_replays(g.exec, what < 0 ? 20 : 5), bytes = m.bytes_of(what, rows, ctx);
		uint32_t calls = what < 0 || what == CHAIN_HEAD ? 1 : f.s.layers;

		if (what < 0) {
			b.st.l.pdl = false;
			chain_graph without([&] { return chain_enqueue(m, b, what); });
			plain = time_replays(without.exec, 20);
			b.st.l.pdl = true;
			printf("{\"bench\":\"step\",\"file\":\"%s\",\"rows\":%u,\"ctx\":%u,\"us\":%.1f,\"plain_us\":%.1f,\"gb_s\":%.0f,"
			       "\"share\":%.3f}\n", f.name, rows, ctx, us, plain, bytes / us * 1e-3, bytes / us * 1e-3 / READ_GB_S);
			continue;
		}
		double other = cublas_us(f.s, what, rows);
		char ratio[40] = "";

		if (other > 0)
			snprintf(ratio, sizeof ratio, ",\"x_cublas\":%.2f", other / (us / calls));
		printf("{\"bench\":\"op\",\"what\":\"decode %s\",\"file\":\"%s\",\"rows\":%u,\"ctx\":%u,\"us\":%.2f,\"gb_s\":%.0f,"
		       "\"share\":%.3f%s}\n", name[what], f.name, rows, ctx, us / calls, bytes / us * 1e-3,
		       bytes / us * 1e-3 / READ_GB_S, ratio);
	}
}

void bench(void)
{
	for (const bench_file &f : files) {
		chain_model m(f.s);

		bench_ops(f, m, 1, 128);
		bench_ops(f, m, 16, 128);
		if (&f == files) {
			bench_ops(f, m, 1, 4096);
			bench_ops(f, m, 64, 128);
		}
	}
	bench_sample();
	bench_prefill();
	bench_gemm();
}
