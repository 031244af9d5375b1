/* SPDX-License-Identifier: MIT */
/*
 * What the suites of the CPU ops share: random numbers, paged KV with shuffled
 * pages, a scratch with its pool, the instruction sets to try.
 *
 * Owns: fixtures. Does not own any expected value.
 */
#ifndef APR_TESTS_KERNELS_OPS_FIXTURE_H
#define APR_TESTS_KERNELS_OPS_FIXTURE_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/common/math.h"
#include "kernels/cpu/ops_cpu.h"
#include "kernels/cpu/pool.h"
#include "tests/harness.h"

struct rng {
	uint64_t s;
};

static inline uint32_t rng_u32(struct rng *r)
{
	r->s = r->s * 6364136223846793005u + 1442695040888963407u;
	return (uint32_t)(r->s >> 33) ^ (uint32_t)(r->s >> 13);
}

static inline float rng_unit(struct rng *r) /* [0, 1) */
{
	return (float)(rng_u32(r) >> 8) * 0x1p-24f;
}

static inline float rng_normal(struct rng *r)
{
	float u = rng_unit(r) + 0x1p-25f, v = rng_unit(r);

	return sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * v);
}

/* Memory for a test, zeroed: without it there is no test to go on with. */
static inline void *mem_of(size_t bytes)
{
	void *p = aligned_alloc(64, (bytes + 64) & ~(size_t)63);

	if (!p)
		abort();
	return memset(p, 0, bytes);
}

static inline float *random_floats(struct rng *r, size_t n, float scale)
{
	float *p = mem_of(n * sizeof(*p));
	size_t i;

	for (i = 0; i < n; i++)
		p[i] = rng_normal(r) * scale;
	return p;
}

/* Paged KV of several sequences; every page starts as NaN, pages are handed out in a random order. */
struct kv_fix {
	struct apr_kv_group g;
	uint32_t *table;
	uint32_t *order, used;
};

static inline void kv_fix_free(struct kv_fix *f)
{
	free(f->g.pool);
	free(f->table);
	free(f->order);
}

static inline void kv_fix_init(struct kv_fix *f, struct rng *r, enum apr_kv_type type, uint32_t layers, uint32_t kv_heads,
                               uint32_t k_dim, uint32_t v_dim, uint32_t slots, uint32_t n_ctx)
{
	uint32_t per = (n_ctx + APR_KV_PAGE - 1) / APR_KV_PAGE, n = per * slots, i;
	size_t size = type == APR_KV_F32 ? 4 : 2;

	memset(f, 0, sizeof(*f));
	f->g = (struct apr_kv_group){.type = type, .n_layers = layers, .n_kv_heads = kv_heads, .k_dim = k_dim, .v_dim = v_dim,
	                             .n_pages = n, .max_pages_seq = per};
	f->g.layer_bytes = size * APR_KV_PAGE * kv_heads * (k_dim + v_dim);
	f->g.pool = mem_of(f->g.layer_bytes * layers * n);
	memset(f->g.pool, 0xff, f->g.layer_bytes * layers * n);
	f->table = mem_of((size_t)APR_MAX_SLOTS * per * sizeof(*f->table));
	f->order = mem_of(n * sizeof(*f->order));
	for (i = 0; i < n; i++)
		f->order[i] = i;
	for (i = n; i > 1; i--) {
		uint32_t j = rng_u32(r) % i, t = f->order[i - 1];

		f->order[i - 1] = f->order[j];
		f->order[j] = t;
	}
	for (i = 0; i < n; i++)
		f->table[(i / per) * per + i % per] = f->order[i];
	f->g.table = f->table;
}

/* Address of element 0 of a key (or value) */
static inline uint8_t *kv_at(const struct kv_fix *f, uint32_t layer, uint32_t slot, uint32_t pos, uint32_t head, bool v)
{
	const struct apr_kv_group *g = &f->g;
	size_t size = g->type == APR_KV_F32 ? 4 : 2;
	uint32_t page = g->table[(size_t)slot * g->max_pages_seq + pos / APR_KV_PAGE];
	uint8_t *p = g->pool + ((uint64_t)page * g->n_layers + layer) * g->layer_bytes;

	if (v)
		return p + size * APR_KV_PAGE * ((size_t)g->n_kv_heads * g->k_dim + (size_t)head * g->v_dim) +
		       size * (pos % APR_KV_PAGE) * g->v_dim;
	return p + size * APR_KV_PAGE * (size_t)head * g->k_dim + size * (pos % APR_KV_PAGE) * g->k_dim;
}

static inline float kv_get(const struct kv_fix *f, const uint8_t *at, uint32_t i)
{
	float x;

	if (f->g.type == APR_KV_F32) {
		memcpy(&x, at + (size_t)4 * i, 4);
		return x;
	}
	uint16_t h;

	memcpy(&h, at + (size_t)2 * i, 2);
	return f->g.type == APR_KV_F16 ? apr_half_to_f32(h) : apr_bfloat_to_f32(h);
}

static inline void kv_put(const struct kv_fix *f, uint8_t *at, uint32_t i, float x)
{
	uint16_t h = f->g.type == APR_KV_F16 ? apr_half_from_f32(x) : apr_bfloat_from_f32(x);

	if (f->g.type == APR_KV_F32)
		memcpy(at + (size_t)4 * i, &x, 4);
	else
		memcpy(at + (size_t)2 * i, &h, 2);
}

static inline void kv_fill(const struct kv_fix *f, struct rng *r, uint32_t layer, uint32_t slot, uint32_t from, uint32_t to)
{
	uint32_t pos, h, i;

	for (pos = from; pos < to; pos++)
		for (h = 0; h < f->g.n_kv_heads; h++) {
			for (i = 0; i < f->g.k_dim; i++)
				kv_put(f, kv_at(f, layer, slot, pos, h, false), i, rng_normal(r));
			for (i = 0; i < f->g.v_dim; i++)
				kv_put(f, kv_at(f, layer, slot, pos, h, true), i, rng_normal(r));
		}
}

/* A scratch and its pool. */
struct scratch_fix {
	struct apr_pool *pool;
	struct apr_cpu_scratch *s;
	void *mem;
};

static inline void scratch_fix_init(struct scratch_fix *f, const struct apr_cpu_limits *l, unsigned threads)
{
	size_t n = apr_cpu_scratch_bytes(l, threads);

	f->pool = NULL;
	CU_ASSERT_EQUAL_FATAL(apr_pool_new(&f->pool, threads), 0);
	CU_ASSERT_FATAL(n > 0);
	f->mem = mem_of(n);
	memset(f->mem, 0xff, n); /* NaN wherever something is read before it is written */
	f->s = apr_cpu_scratch_init(l, f->pool, f->mem);
	CU_ASSERT_PTR_NOT_NULL_FATAL(f->s);
}

static inline void scratch_fix_free(struct scratch_fix *f)
{
	apr_pool_free(f->pool);
	free(f->mem);
}

static inline bool same_bits(const float *a, const float *b, size_t n)
{
	return !memcmp(a, b, n * sizeof(*a));
}

/* Instruction sets to compare with the scalar form; those that cannot run here are passed over. */
static const enum apr_cpu_isa isas[] = {APR_ISA_AVX2, APR_ISA_AVX512, APR_ISA_VNNI, APR_ISA_NEON};

#endif
