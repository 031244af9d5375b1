/* SPDX-License-Identifier: MIT */
/* Whole decode steps chained by programmatic launch, replayed: the bits of the same launches without the edges, one by
 * one and as a graph. Built with APR_PDL_TEST every kernel is late at random at both ends. */
#include "tests/cuda/chain.cuh"

static std::vector<float> logits_of(chain_buffers &b, uint32_t rows, uint32_t vocab)
{
	std::vector<float> v = b.logits.get();

	v.resize((size_t)rows * vocab);
	return v;
}

static void one_chain(const chain_shape &s, uint32_t rows, uint32_t ctx, int replays)
{
	chain_model m(s);
	chain_buffers b(s, rows, ctx);
	int bad = 0;

	b.st.l.pdl = false;
	CHECK(chain_enqueue(m, b, CHAIN_STEP) == 0, "launch");
	std::vector<float> want = logits_of(b, rows, s.vocab);
	CHECK(std::all_of(want.begin(), want.end(), [](float f) { return isfinite(f); }), "logits are finite");
	for (int pdl = 0; pdl < 2; pdl++) {
		b.st.l.pdl = pdl;
		chain_graph g([&] { return chain_enqueue(m, b, CHAIN_STEP); });

		bad = 0;
		for (int i = 0; i < (pdl ? replays : 2); i++) {
			b.rewind();
			b.logits.poison();
			CUDA(cudaGraphLaunch(g.exec, stream));
			bad += !same_bits(logits_of(b, rows, s.vocab).data(), want.data(), want.size());
		}
		CHECK(!bad, "embd %u type %u rows %u ctx %u: %d replays %s edges differ", s.embd, s.type, rows, ctx, bad,
		      pdl ? "with" : "without");
	}
	bad = 0;
	for (int i = 0; i < 3; i++) { /* eagerly, with edges */
		b.rewind();
		b.logits.poison();
		CHECK(chain_enqueue(m, b, CHAIN_STEP) == 0, "launch");
		bad += !same_bits(logits_of(b, rows, s.vocab).data(), want.data(), want.size());
	}
	CHECK(!bad, "embd %u type %u rows %u ctx %u: %d eager runs with edges differ", s.embd, s.type, rows, ctx, bad);
}

void check_chain(void)
{
	static const chain_shape shapes[] = {
			{4, 1024, 2816, 8, 2, 128, 4096, 12, true}, /* Q4_K and Q6_K */
			{4, 576, 1536, 9, 3, 64, 2000, 3, false},   /* Q4_1, short K */
			{3, 1536, 4096, 12, 2, 128, 3000, 8, false},
			{3, 640, 2048, 4, 1, 256, 1000, 6, false},
			{2, 896, 4864, 14, 2, 64, 1000, 30, false},
	};

	for (const chain_shape &s : shapes)
		for (uint32_t rows : {1u, 3u, 8u, 16u, 40u, 64u})
			one_chain(s, rows, rows == 1 ? 700 : 130, rows == 1 ? 100 : 25);
}
