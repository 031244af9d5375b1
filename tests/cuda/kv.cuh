/* SPDX-License-Identifier: MIT */
/*
 * A pool of KV pages with known contents, for the attention checks.
 *
 * Owns: pages in shuffled order, a page table, the same keys and values as plain
 * arrays. Places that hold no key are NaN, and so is the last page, which no
 * sequence has.
 */
#ifndef APR_TESTS_CUDA_KV_CUH
#define APR_TESTS_CUDA_KV_CUH

#include "tests/cuda/support.cuh"

struct kv_pool {
	struct shape_heads h;
	apr_kv_type type;
	uint32_t n_ctx, n_seq, per_seq, n_layers, layer;
	std::vector<float> k, v; /* [seq][pos][kv head][dim], rounded to the KV type */
	std::vector<uint32_t> table, dead;
	dbuf<uint32_t> dtable;
	dbuf<uint8_t> pool;
	apr_kv_group group;

	float round_kv(float f) const
	{
		return type == APR_KV_F32   ? f
		       : type == APR_KV_F16 ? apr_half_to_f32(apr_half_from_f32(f))
		                            : apr_bfloat_to_f32(apr_bfloat_from_f32(f));
	}
	size_t elem() const { return type == APR_KV_F32 ? 4 : 2; }
	size_t stride_k() const { return (size_t)h.n_kv * h.k_dim; }
	size_t stride_v() const { return (size_t)h.n_kv * h.v_dim; }
	const float *key(uint32_t s, uint32_t p, uint32_t head) const
	{
		return &k[((size_t)s * n_ctx + p) * stride_k() + head * h.k_dim];
	}
	const float *value(uint32_t s, uint32_t p, uint32_t head) const
	{
		return &v[((size_t)s * n_ctx + p) * stride_v() + head * h.v_dim];
	}

	kv_pool(const struct shape_heads &hh, apr_kv_type t, uint32_t ctx, uint32_t seqs, uint32_t layers, uint32_t at)
		: h(hh), type(t), n_ctx(ctx), n_seq(seqs), per_seq((ctx + 63) / 64), n_layers(layers), layer(at),
		  k(random_rows(seqs * ctx, hh.n_kv * hh.k_dim, 3, false)),
		  v(random_rows(seqs * ctx, hh.n_kv * hh.v_dim, 4, false)), dtable(APR_MAX_SLOTS * ((ctx + 63) / 64)),
		  pool(((size_t)seqs * ((ctx + 63) / 64) + 1) * layers * 64 * hh.n_kv * (hh.k_dim + hh.v_dim) *
	           (t == APR_KV_F32 ? 4 : 2))
	{
		for (float &f : k)
			f = round_kv(f);
		for (float &f : v)
			f = round_kv(f);
		memset(&group, 0, sizeof group);
		group.type = type, group.n_layers = n_layers, group.n_kv_heads = h.n_kv, group.k_dim = h.k_dim,
		group.v_dim = h.v_dim;
		group.window = h.window, group.n_pages = n_seq * per_seq + 1, group.max_pages_seq = per_seq;
		group.layer_bytes = (uint64_t)64 * h.n_kv * (h.k_dim + h.v_dim) * elem();
		group.pool = pool.p, group.table = dtable.p;
		shuffle(1);
	}
	/* Moves every page elsewhere */
	void shuffle(uint64_t seed)
	{
		std::vector<uint8_t> bytes(pool.n, 0xff);
		rng r = {seed * 1000 + 17};

		table.assign((size_t)APR_MAX_SLOTS * per_seq, 0);
		for (uint32_t i = 0; i < n_seq * per_seq; i++)
			table[i] = i;
		for (uint32_t i = n_seq * per_seq - 1; i > 0; i--)
			std::swap(table[i], table[r.below(i + 1)]);
		for (uint32_t s = 0; s < n_seq; s++)
			for (uint32_t p = 0; p < n_ctx; p++) {
				uint8_t *page = &bytes[((size_t)table[s * per_seq + p / 64] * n_layers + layer) * group.layer_bytes];

				for (uint32_t head = 0; head < h.n_kv; head++) {
					put(page, ((size_t)head * 64 + p % 64) * h.k_dim, key(s, p, head), h.k_dim);
					put(page, (size_t)h.n_kv * 64 * h.k_dim + ((size_t)head * 64 + p % 64) * h.v_dim, value(s, p, head),
					    h.v_dim);
				}
			}
		pool.put(bytes);
		dtable.put(table);
	}
	/* Pages of sequence s before the given one are gone: what is in their place is no number */
	void forget(uint32_t s, uint32_t page)
	{
		for (uint32_t i = 0; i < page; i++)
			table[s * per_seq + i] = n_seq * per_seq;
		dtable.put(table);
	}
	void put(uint8_t *page, size_t i, const float *f, uint32_t n) const
	{
		for (uint32_t d = 0; d < n; d++) {
			uint16_t b = type == APR_KV_F16 ? apr_half_from_f32(f[d]) : apr_bfloat_from_f32(f[d]);

			memcpy(page + (i + d) * elem(), type == APR_KV_F32 ? (const void *)&f[d] : &b, elem());
		}
	}
};

#endif
