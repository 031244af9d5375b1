/* SPDX-License-Identifier: MIT */
/*
 * Passes over a row of logits: largest, mass, those above a bound, the draw.
 *
 * Owns: these passes, over kernels/common/vec.h. Included once by each
 * sample_<isa>.c. All results are exact or order-free, so that every form agrees.
 */
#include "kernels/common/sample_isa.h"
#include "kernels/common/sample_math.h"
#include "kernels/common/vec.h"

VEC vf load_or_low(const float *z, uint32_t left) /* lanes past the end: -inf */
{
	float t[VL];
	uint32_t i;

	if (left >= VL)
		return vf_load(z);
	for (i = 0; i < VL; i++)
		t[i] = i < left ? z[i] : -INFINITY;
	return vf_load(t);
}

static float row_scan(const float *z, uint32_t n, float *block_max, bool *bad)
{
	vf all = vf_set1(-INFINITY);
	vm nan = vf_unordered(all);
	float max;
	uint32_t i;

	for (i = 0; i + APR_SAMPLE_BLOCK <= n; i += APR_SAMPLE_BLOCK) {
		vf a = vf_load(z + i), b = vf_load(z + i + VL), c = vf_load(z + i + 2 * VL), d = vf_load(z + i + 3 * VL), m;

		nan = vm_or(nan, vm_or(vm_or(vf_unordered(a), vf_unordered(b)), vm_or(vf_unordered(c), vf_unordered(d))));
		m = vf_max(vf_max(a, b), vf_max(c, d));
		all = vf_max(all, m);
		block_max[i / APR_SAMPLE_BLOCK] = vf_hmax(m);
	}
	if (i < n) {
		vf m = vf_set1(-INFINITY);
		float *last = &block_max[i / APR_SAMPLE_BLOCK];

		for (; i < n; i += VL) {
			vf v = load_or_low(z + i, n - i);

			nan = vm_or(nan, vf_unordered(v));
			m = vf_max(m, v);
		}
		all = vf_max(all, m);
		*last = vf_hmax(m);
	}
	max = vf_hmax(all);
	*bad = vm_bits(nan) != 0 || max == INFINITY;
	return max;
}

/* Exactly 0 weights lie below this: 2^-41 is half a unit. */
#define MASS_FLOOR (-41.0f)

static uint64_t row_mass(const float *z, const float *block_max, uint32_t n, float max, float temperature)
{
	vf top = vf_set1(max), t = vf_set1(temperature), log2e = vf_set1(APR_LOG2E), unit = vf_set1(0x1p20f);
	vi hi = vi_set1(0), lo = vi_set1(0);
	int32_t part[2][VL];
	uint64_t sum = 0;
	uint32_t i, j, k, added = 0;

	for (i = 0; i < n; i += APR_SAMPLE_BLOCK) {
		uint32_t end = n - i < APR_SAMPLE_BLOCK ? n : i + APR_SAMPLE_BLOCK;

		if (apr_tempered(block_max[i / APR_SAMPLE_BLOCK], max, temperature) * APR_LOG2E < MASS_FLOOR)
			continue;
		for (j = i; j < end; j += VL) {
			vf u = vf_sub(load_or_low(z + j, end - j), top), p, whole;
			vi h;

			if (temperature != 1.0f)
				u = vf_div(u, t);
			p = vf_mul(vf_exp2(vf_mul(u, log2e)), unit);
			h = vi_trunc(p);
			whole = vf_of_int(h);
			hi = vi_add(hi, h);
			lo = vi_add(lo, vi_trunc(vf_mul(vf_sub(p, whole), unit)));
		}
		added += APR_SAMPLE_BLOCK / VL;
		if (added < 1024 && i + APR_SAMPLE_BLOCK < n) /* each lane below 2^20 a time: no overflow yet */
			continue;
		vi_store(part[0], hi);
		vi_store(part[1], lo);
		for (k = 0; k < VL; k++)
			sum += ((uint64_t)(uint32_t)part[0][k] << 20) + (uint32_t)part[1][k];
		hi = lo = vi_set1(0);
		added = 0;
	}
	vi_store(part[0], hi); /* blocks skipped at the end leave a rest */
	vi_store(part[1], lo);
	for (k = 0; k < VL; k++)
		sum += ((uint64_t)(uint32_t)part[0][k] << 20) + (uint32_t)part[1][k];
	return sum;
}

static uint32_t row_gather(const float *z, const float *block_max, uint32_t n, float low, uint64_t *out)
{
	vf bound = vf_set1(low);
	uint32_t i, j, found = 0;

	for (i = 0; i < n; i += APR_SAMPLE_BLOCK) {
		uint32_t end = n - i < APR_SAMPLE_BLOCK ? n : i + APR_SAMPLE_BLOCK;

		if (!(block_max[i / APR_SAMPLE_BLOCK] >= low))
			continue;
		for (j = i; j < end; j += VL) {
			uint32_t bits = vm_bits(vf_le(bound, load_or_low(z + j, end - j)));

			for (; bits; bits &= bits - 1) {
				uint32_t id = j + (uint32_t)__builtin_ctz(bits);

				out[found++] = apr_rank(z[id], id);
			}
		}
	}
	return found;
}

static void list_weights(const uint64_t *rank, uint32_t n, float max, float temperature, uint64_t *weight)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		weight[i] = apr_weight_fixed(apr_rank_value(rank[i]), max, temperature);
}

VEC void draw_one(struct apr_draw_pass *d, float z, uint32_t id)
{
	float key;

	if (apr_rank(z, id) > d->last || !apr_min_p_keeps(z, d->max, d->temperature, d->log2_min_p))
		return;
	key = apr_draw(z, d->max, d->temperature, d->seed, d->sample, d->position, id);
	if (key > d->best || (key == d->best && id < d->best_id)) {
		d->best = key;
		d->best_id = id;
	}
}

static void list_draw(struct apr_draw_pass *d, const uint64_t *rank, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		draw_one(d, apr_rank_value(rank[i]), (uint32_t)rank[i]);
}

/*
 * The largest random word with which an id of the block could still win, or -1.
 *
 * With w the block's largest tempered value, an id wins only with a Gumbel g such that
 * w + g >= best. For t uniform, g = -ln(-ln(1 - t)) <= -ln t, so t <= exp(w - best) is
 * needed. 0.01 is added to w - best: more than all roundings of the draw, of t and of
 * exp2 together (below 10^-3 while |w| < 100; beyond that nothing wins at all, since the
 * best begins at the likeliest id's draw, above -3).
 */
VEC int64_t draw_bound(const struct apr_draw_pass *d, float block_max)
{
	float need = apr_tempered(block_max, d->max, d->temperature) - d->best + 0.01f, words;

	if (!(need > -APR_GUMBEL_MAX) || apr_rank(block_max, 0) > d->last)
		return -1;
	words = apr_exp2(need * APR_LOG2E + 32.0f);
	return words < 0x1p32f - 1024.0f ? (int64_t)words + 256 : (int64_t)UINT32_MAX;
}

static void row_draw(struct apr_draw_pass *d)
{
	static const int32_t lane[VL] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
	vi lanes = vi_load(lane), flip = vi_set1(INT32_MIN);
	uint32_t i, w;

	for (i = 0; i < d->n; i += APR_SAMPLE_BLOCK) {
		int64_t bound = draw_bound(d, d->block_max[i / APR_SAMPLE_BLOCK]);
		vi word[4], limit;

		if (bound < 0)
			continue;
		limit = vi_xor(vi_set1((int32_t)(uint32_t)bound), flip);
		vu_philox(vi_add(lanes, vi_set1((int32_t)(i / 4))), d->position, d->sample, 0, (uint32_t)d->seed,
		          (uint32_t)(d->seed >> 32), word);
		for (w = 0; w < 4; w++) {
			uint32_t bits = ~vm_bits(vi_gt(vi_xor(word[w], flip), limit)) & 0xffffu;

			for (; bits; bits &= bits - 1) {
				uint32_t id = i + 4 * (uint32_t)__builtin_ctz(bits) + w;

				if (id < d->n)
					draw_one(d, d->z[id], id);
			}
		}
	}
}
