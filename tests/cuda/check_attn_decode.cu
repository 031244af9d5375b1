/* SPDX-License-Identifier: MIT */
/* Attention of generated rows: error against double, and equal bits wherever a row's pages lie, in whatever bucket and
 * beside whatever rows; windows, soft caps, groups, head sizes; every KV type. */
#include "kernels/cuda/sm90_any_attn_ref.h"
#include "tests/cuda/kv.cuh"

static void one_shape(const struct shape_heads &h, apr_kv_type type)
{
	const uint32_t n_seq = COUNT(shape_contexts);
	kv_pool kv(h, type, 1100, n_seq, 3, 1);
	std::vector<float> q = random_rows(n_seq, h.n_heads * h.k_dim, 7, true);
	dbuf<float> dq(q), dq2(q), dout((size_t)64 * h.n_heads * h.v_dim);
	apr_cuda_limits lim = {64, 64, 64, h.n_heads, h.n_kv, h.k_dim, h.v_dim, 1152};
	step st(apr_cuda_scratch_bytes(&lim));
	apr_op_attn op = {dq.p,      dout.p,   h.n_heads,     h.n_kv, h.k_dim, h.v_dim, 1.0f / sqrtf((float)h.k_dim),
	                  h.softcap, h.window, {&kv.group, 1}};
	std::vector<uint32_t> pos(n_seq), slot(n_seq);
	std::vector<double> ref(h.v_dim);
	size_t width = (size_t)h.n_heads * h.v_dim;
	double worst = 0, err2 = 0, ref2 = 0;

	for (uint32_t i = 0; i < n_seq; i++) {
		pos[i] = shape_contexts[i] - 1;
		slot[i] = i;
		/* queries whose scores do not all fall on one key: the planted magnitudes are tested by the bound on q alone */
		for (uint32_t d = 0; d < h.n_heads * h.k_dim; d++)
			q[(size_t)i * h.n_heads * h.k_dim + d] /= i % 7 == 5 ? 300 : i % 7 == 3 ? 1e-6f : 40;
	}
	dq.put(q);
	st.set(16, n_seq, pos, slot);
	CHECK(apr_cuda_decode_attn(&st.l, &op) == 0, "launch");
	std::vector<float> all = dout.get();
	for (uint32_t i = 0; i < n_seq; i++)
		for (uint32_t n = 0; n < h.n_heads; n++) {
			uint32_t kvh = n / (h.n_heads / h.n_kv);

			apr_ref_attn(&q[((size_t)i * h.n_heads + n) * h.k_dim], kv.key(i, 0, kvh), kv.stride_k(),
			             kv.value(i, 0, kvh), kv.stride_v(), pos[i], h.window, h.k_dim, h.v_dim, op.scale, h.softcap,
			             ref.data());
			for (uint32_t d = 0; d < h.v_dim; d++) {
				double e = fabs(all[i * width + n * h.v_dim + d] - ref[d]);

				worst = fmax(worst, e);
				if (!(e < 1e9))
					worst = 1e9;
				err2 += e * e;
				ref2 += ref[d] * ref[d];
			}
		}
	CHECK(sqrt(err2 / ref2) < (type == APR_KV_F16 ? 2e-3 : 1e-5), "heads %u/%u dim %u type %d: rms %.3g, max %.3g",
	      h.n_heads, h.n_kv, h.k_dim, type, sqrt(err2 / ref2), worst);
	rng g = {h.n_heads * 100 + h.k_dim};
	for (uint32_t b : {1u, 2u, 8u, 16u, 64u}) {
		uint32_t live = b == 1 ? 1 : b - 1;
		std::vector<float> q2((size_t)live * h.n_heads * h.k_dim, NAN);
		std::vector<uint32_t> from(live), pos2(live), slot2(live);
		size_t bad = 0;

		for (uint32_t i = 0; i < live; i++) {
			from[i] = g.below(n_seq);
			pos2[i] = pos[from[i]], slot2[i] = i == 3 ? APR_CUDA_DEAD : slot[from[i]];
			if (i != 2)
				memcpy(&q2[(size_t)i * h.n_heads * h.k_dim], &q[(size_t)from[i] * h.n_heads * h.k_dim],
				       h.n_heads * h.k_dim * 4);
		}
		dbuf<float> dqq(q2);
		op.q = dqq.p;
		kv.shuffle(b);
		dout.poison();
		st.set(b, live, pos2, slot2);
		st.l.sms = b == 8 ? 13 : device_sms;
		CHECK(apr_cuda_decode_attn(&st.l, &op) == 0, "launch");
		std::vector<float> o = dout.get();
		for (uint32_t i = 0; i < live; i++)
			if (i == 3)
				for (size_t j = 0; j < width; j++)
					bad += o[i * width + j] != 0;
			else if (i != 2)
				bad += !same_bits(&o[i * width], &all[from[i] * width], width);
		for (size_t i = live * width; i < o.size(); i++)
			bad += memcmp(&o[i], "\xff\xff\xff\xff", 4) != 0;
		CHECK(!bad, "heads %u/%u dim %u type %d bucket %u: %zu wrong", h.n_heads, h.n_kv, h.k_dim, type, b, bad);
	}
}

void check_attn_decode(void)
{
	for (const struct shape_heads &h : shape_heads)
		for (apr_kv_type t : {APR_KV_F16, APR_KV_F32, APR_KV_BF16})
			if (!few || t == APR_KV_F16)
				one_shape(h, t);
}
