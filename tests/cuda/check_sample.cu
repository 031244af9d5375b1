/* SPDX-License-Identifier: MIT */
/* The device draws what the CPU draws: id, numeric, log-probability and the best list, bit for bit, under every control,
 * on rows that are ordinary, flat, tied, spiked, full of -inf, or sick. */
#include "tests/cuda/support.cuh"

extern "C" {
#include "kernels/common/sample.h"
}

enum row_kind { NORMAL, FLAT, TIED, SPIKE, MASKED, SICK_NAN, SICK_INF, ALL_MASKED, KINDS };

static std::vector<float> make_row(uint32_t n, row_kind kind, uint64_t seed)
{
	std::vector<float> v(n);
	rng r = {seed};

	for (uint32_t i = 0; i < n; i++) {
		v[i] = r.normal() * 3;
		if (kind == FLAT)
			v[i] = 1.5f;
		if (kind == TIED)
			v[i] = floorf(v[i]) * (i & 1 ? 1 : -1) * 0.0f + floorf(v[i]);
		if (kind == SPIKE && i == n / 2)
			v[i] = 60;
		if ((kind == MASKED && i % 5) || kind == ALL_MASKED)
			v[i] = -INFINITY;
	}
	if (kind == SICK_NAN)
		v[n - 1] = NAN;
	if (kind == SICK_INF)
		v[n / 3] = INFINITY;
	return v;
}

struct request { /* one draw, for both */
	apr_sample_params p;
	apr_cuda_draw d;
	std::vector<uint32_t> bias_id;
	std::vector<float> bias;
	std::vector<apr_seen> seen;
	dbuf<uint32_t> did;
	dbuf<float> dbias;
	dbuf<apr_seen> dseen;

	request(rng &r, uint32_t n)
	{
		static const float temps[] = {0, 0.2f, 0.7f, 1, 1, 1.3f, 5}, ps[] = {1, 1, 0.95f, 0.5f, 0.1f, 0},
						   mins[] = {0, 0, 0.05f, 0.5f};
		static const uint32_t ks[] = {0, 0, 1, 2, 40, 200, 5000};

		memset(&p, 0, sizeof p);
		memset(&d, 0, sizeof d);
		d.temperature = p.temperature = temps[r.below(7)];
		d.top_k = p.top_k = ks[r.below(7)];
		d.top_p = p.top_p = ps[r.below(6)];
		d.min_p = p.min_p = mins[r.below(4)];
		bool pen = r.below(2);
		d.repeat_penalty = p.repeat_penalty = pen ? 1.3f : 1;
		d.frequency_penalty = p.frequency_penalty = pen ? 0.3f : 0;
		d.presence_penalty = p.presence_penalty = pen ? -0.2f : 0;
		d.seed = p.seed = (uint64_t)r.u32() << 32 | r.u32();
		d.sample = p.sample = r.below(3);
		d.position = r.below(100000);
		d.want_logprob = r.below(2);
		d.n_top = r.below(3) ? 0 : r.below(21);
		for (uint32_t i = r.below(2) * r.below(60); i > 0; i--) {
			bias_id.push_back(r.below(i % 3 ? n : 20));
			bias.push_back(i % 11 == 0 ? -INFINITY : r.normal() * 4);
		}
		for (uint32_t i = pen ? r.below(400) : 0; i > 0; i--)
			if (i * 3 < n)
				seen.push_back({i * 3, r.below(3), r.below(3)});
		did = dbuf<uint32_t>(bias_id.size() + 1), dbias = dbuf<float>(bias_id.size() + 1),
		dseen = dbuf<apr_seen>(seen.size() + 1);
		did.put(bias_id), dbias.put(bias), dseen.put(seen);
		p.n_bias = d.n_bias = (uint32_t)bias_id.size(), d.n_seen = (uint32_t)seen.size();
		p.bias_id = bias_id.data(), p.bias = bias.data();
		d.bias_id = did.p, d.bias = dbias.p, d.seen = dseen.p;
	}
};

static void compare(const apr_sample_result &want, const apr_cuda_record &got, const apr_cuda_top &top,
                    const request &q, uint32_t n, int kind)
{
	bool ok = want.numeric == (got.numeric != 0) && got.step == 77;

	if (!want.numeric) {
		ok &= want.id == got.id;
		if (q.d.want_logprob || q.d.n_top)
			ok &= same_bits(&want.logprob, &got.logprob, 1) && want.n_top == got.n_top;
		for (uint32_t i = 0; i < want.n_top && i < got.n_top; i++)
			ok &= want.top_id[i] == top.id[i] && same_bits(&want.top_logprob[i], &top.logprob[i], 1);
	}
	CHECK(ok, "V %u kind %d temp %g k %u p %g min %g bias %u seen %u: id %u %u numeric %d %u logprob %g %g tops %u %u",
	      n, kind, q.d.temperature, q.d.top_k, q.d.top_p, q.d.min_p, q.d.n_bias, q.d.n_seen, want.id, got.id,
	      want.numeric, got.numeric, want.logprob, got.logprob, want.n_top, got.n_top);
}

static void vocabulary(uint32_t n, uint32_t draws)
{
	rng r = {n};
	std::vector<float> rows;
	std::vector<request> q;
	std::vector<apr_cuda_draw> d;
	std::vector<uint8_t> work(apr_sample_work_bytes(n));
	dbuf<apr_cuda_record> rec(draws);
	dbuf<apr_cuda_top> top(draws);
	dbuf<uint32_t> nd(std::vector<uint32_t>{draws}), step_no(std::vector<uint32_t>{77});
	step st(256 * 1024);

	q.reserve(draws);
	for (uint32_t i = 0; i < draws; i++) {
		std::vector<float> v = make_row(n, (row_kind)(i % 3 ? 0 : i / 3 % KINDS), n + i);

		rows.insert(rows.end(), v.begin(), v.end());
		q.emplace_back(r, n);
		d.push_back(q.back().d);
		if (i % 13 == 7) {
			d.back().kind = q.back().d.kind = APR_CUDA_SCORE;
			d.back().score_id = q.back().d.score_id = r.below(n);
		}
	}
	dbuf<float> lg(rows);
	dbuf<apr_cuda_draw> dd(d);
	st.l.bucket = draws;
	CHECK(apr_cuda_sample(&st.l, lg.p, n, n, dd.p, nd.p, step_no.p, rec.p, top.p) == 0, "launch");
	std::vector<apr_cuda_record> got = rec.get();
	std::vector<apr_cuda_top> tops = top.get();
	for (uint32_t i = 0; i < draws; i++) {
		apr_sample_result want;

		if (d[i].kind == APR_CUDA_SCORE) {
			int rc = apr_score_row(&rows[(size_t)i * n], n, d[i].score_id, d[i].n_top, &want);

			q[i].d.want_logprob = 1;
			want.numeric = rc != 0;
		} else {
			apr_sample(&rows[(size_t)i * n], n, &q[i].p, q[i].seen.data(), (uint32_t)q[i].seen.size(), q[i].d.position,
			           q[i].d.want_logprob, q[i].d.n_top, work.data(), &want);
		}
		compare(want, got[i], tops[i], q[i], n, i % 3 ? 0 : i / 3 % KINDS);
	}
	CHECK(same_bits(lg.get().data(), rows.data(), rows.size()), "logits were changed");
}

void check_sample(void)
{
	for (uint32_t n : {1u, 2u, 7u, 63u, 1000u, 32000u, 49152u, 128256u, 151936u, 262144u, 262147u})
		if (!few || n < 50000 || n > 262144)
			vocabulary(n, few ? n < 2000 ? 48 : 16 : n < 2000 ? 256 : 64);
}
