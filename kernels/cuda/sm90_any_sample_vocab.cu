/* SPDX-License-Identifier: MIT */
/*
 * Choosing a token on the device: every control of kernels/common/sample.h, the same
 * token from the same logits.
 *
 * Owns: the passes over a row, by a cluster of eight blocks that keep it in shared
 * memory. What an id's rank, weight and draw are is kernels/common/sample_math.h,
 * shared with the CPU. The scalar reference is kernels/common/sample.c.
 *
 * Everything summed is a 64-bit integer, everything compared a rank that no two ids
 * share, so no result depends on an order. Top-k and top-p find the rank of the last
 * id that stays by counts (or weights) in bins of distance from the best; the few ids
 * of the bin in which the target falls are compared one by one. Where they are not few,
 * by the digits of their ranks.
 */
#include <cooperative_groups.h>
#include <float.h>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/ops_cuda.h"

extern "C" {
#include "kernels/common/sample.h"
}
#include "kernels/common/sample_math.h"

namespace cg = cooperative_groups;

#define BLOCKS 8u
#define THREADS 1024u
#define BINS 2048u
#define SLICE (BINS / BLOCKS)
#define LIST 1024u      /* ids of a bin that are compared one by one: one a thread */
#define BIN_WIDTH 32.0f /* bins a unit of z */

static_assert(sizeof(apr_cuda_record) == 64, "a record is one line");
static_assert(sizeof(apr_cuda_top) == 8 * APR_SAMPLE_TOP_MAX, "as many as the reference gives");

struct shared { /* of a block, after its part of the row */
	unsigned long long hist[BINS], total[BINS];
	unsigned long long warp[THREADS / 32];
	unsigned long long mine[2]; /* this block's part of a reduction, read by the others; used in turn */
	unsigned long long answer;  /* the first block's: of select_listed */
	unsigned long long before, size;
	unsigned long long list[LIST], weight[LIST]; /* the first block's: ids of one bin */
	uint32_t digit, found;
};
struct row {          /* what a thread knows of it */
	float *z;         /* this block's part */
	uint32_t base, n; /* ids base … base + n - 1 */
	shared *s;
	float max, temperature;
	float mine; /* the largest of the ids that this thread looked at to find max */
	uint32_t turn;
};

/* ---- reductions over the cluster: all threads call, all get the result ----------------------- */

struct op_min {
	static __device__ unsigned long long of(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
};
struct op_sum {
	static __device__ unsigned long long of(unsigned long long a, unsigned long long b) { return a + b; }
};
template <typename OP>
static __device__ unsigned long long reduce(row &r, unsigned long long v, unsigned long long none)
{
	cg::cluster_group cluster = cg::this_cluster();

	for (int o = 16; o; o >>= 1)
		v = OP::of(v, __shfl_xor_sync(~0u, v, o));
	if ((threadIdx.x & 31) == 0)
		r.s->warp[threadIdx.x >> 5] = v;
	__syncthreads();
	if (threadIdx.x < 32) {
		v = r.s->warp[threadIdx.x];
		for (int o = 16; o; o >>= 1)
			v = OP::of(v, __shfl_xor_sync(~0u, v, o));
		if (threadIdx.x == 0)
			r.s->mine[r.turn] = v;
	}
	cluster.sync();
	v = none;
	for (uint32_t i = 0; i < BLOCKS; i++)
		v = OP::of(v, *cluster.map_shared_rank(&r.s->mine[r.turn], i));
	r.turn ^= 1; /* this place is written again after the next reduction's barrier, when all have read it */
	return v;
}

#define EACH(r, i) for (uint32_t i = threadIdx.x; i < (r).n; i += THREADS)

struct best_of { /* of a thread's ids, looked at in ascending order: the largest, the first of equals */
	float z;
	uint32_t id;
	bool sick;

	__device__ __forceinline__ void see(float v, uint32_t i)
	{
		sick = sick || !(v < INFINITY);
		if (v > z)
			z = v, id = i;
	}
};
/* Rank of the best id; *bad: a NaN or an infinity above */
static __device__ uint64_t best_rank(row &r, const best_of &b, bool *bad)
{
	unsigned long long best = r.n <= threadIdx.x ? ~0ull : b.sick ? 0 : apr_rank(b.z, b.id); /* no finite z has rank 0 */

	r.mine = b.z;
	best = reduce<op_min>(r, best, ~0ull);
	*bad = best == 0;
	return best;
}
/* The row to shared memory, and its best */
static __device__ uint64_t load_row(row &r, const float *logits, bool *bad)
{
	best_of b = {-INFINITY, r.base + threadIdx.x, false};
	uint32_t done = 0;

	logits += r.base;
	if (((uintptr_t)logits & 15) == 0) {
		done = r.n & ~3u;
		b.id = r.base + threadIdx.x * 4;
#pragma unroll 8
		for (uint32_t i = threadIdx.x * 4; i < done; i += THREADS * 4) {
			float4 v = __ldcg((const float4 *)(logits + i));

			*(float4 *)(r.z + i) = v;
			b.see(v.x, r.base + i);
			b.see(v.y, r.base + i + 1);
			b.see(v.z, r.base + i + 2);
			b.see(v.w, r.base + i + 3);
		}
	}
	for (uint32_t i = done + threadIdx.x; i < r.n; i += THREADS) {
		float v = __ldcg(logits + i);

		r.z[i] = v;
		b.see(v, r.base + i);
	}
	return best_rank(r, b, bad);
}
static __device__ uint64_t best_again(row &r, bool *bad)
{
	best_of b = {-INFINITY, r.base + threadIdx.x, false};

	EACH (r, i)
		b.see(r.z[i], r.base + i);
	return best_rank(r, b, bad);
}
static __device__ uint64_t mass_of(row &r, uint64_t last)
{
	unsigned long long sum = 0;

	EACH (r, i)
		if (apr_rank(r.z[i], r.base + i) <= last)
			sum += apr_weight_fixed(r.z[i], r.max, r.temperature);
	return reduce<op_sum>(r, sum, 0);
}

/* ---- the rank of the last id that stays -------------------------------------------------------- */

/* Sums hist over the cluster into total; then finds the digit in which the target falls: before < target <= before + size.
 * digit BINS: the target lies past all. */
static __device__ void find_digit(const row &r, uint64_t target)
{
	cg::cluster_group cluster = cg::this_cluster();
	shared *s = r.s;
	uint32_t t = threadIdx.x, slice = cluster.block_rank() * SLICE;

	cluster.sync();
	if (t < SLICE) {
		unsigned long long v = 0;

		for (uint32_t i = 0; i < BLOCKS; i++)
			v += cluster.map_shared_rank(s->hist, i)[slice + t];
		for (uint32_t i = 0; i < BLOCKS; i++)
			cluster.map_shared_rank(s->total, i)[slice + t] = v;
	}
	if (t == 0)
		s->digit = BINS;
	cluster.sync();
	unsigned long long a = s->total[2 * t], b = s->total[2 * t + 1], up = a + b, before;

	for (int o = 1; o < 32; o <<= 1) {
		unsigned long long v = __shfl_up_sync(~0u, up, o);

		if ((t & 31) >= (uint32_t)o)
			up += v;
	}
	if ((t & 31) == 31)
		s->warp[t >> 5] = up;
	__syncthreads();
	before = up - a - b;
	for (uint32_t i = 0; i < t >> 5; i++)
		before += s->warp[i];
	if (before < target && target <= before + a)
		s->digit = 2 * t, s->before = before, s->size = a;
	else if (before + a < target && target <= before + a + b)
		s->digit = 2 * t + 1, s->before = before + a, s->size = b;
	__syncthreads();
}

/* Digits of a rank from the top: 11, 11, 10 of the value, 11, 11 of the id (below 2^22) */
static __device__ __forceinline__ uint32_t digit_shift(int d)
{
	return d == 0 ? 53 : d == 1 ? 42 : d == 2 ? 32 : d == 3 ? 11 : 0;
}
static __device__ __forceinline__ uint32_t digit_of(uint64_t rank, int d)
{
	return (uint32_t)(rank >> digit_shift(d)) & (d == 2 ? 1023 : 2047);
}
/* The bin of a finite z: it never falls as z falls */
static __device__ __forceinline__ uint32_t bin_of(const row &r, float z)
{
	return min((uint32_t)((r.max - z) * BIN_WIDTH), BINS - 1);
}
static __device__ __forceinline__ unsigned long long share_of(const row &r, float z, bool weighted)
{
	return weighted ? apr_weight_fixed(z, r.max, r.temperature) : 1;
}
static __device__ void clear_hist(const row &r)
{
	for (uint32_t i = threadIdx.x; i < BINS; i += THREADS)
		r.s->hist[i] = 0;
	__syncthreads();
}

struct selection { /* who takes part: finite ids with rank <= limit, in a bin */
	uint64_t target, limit;
	uint32_t bin;
	bool weighted;
};

/* The bin in which the target falls, among ids with rank <= limit; the target within it. BINS: past all. */
static __device__ uint32_t select_bin(const row &r, selection &q)
{
	clear_hist(r);
	EACH (r, i) {
		float z = r.z[i];

		if (!(z >= -FLT_MAX) || apr_rank(z, r.base + i) > q.limit)
			continue;
		unsigned long long w = share_of(r, z, q.weighted);

		if (!q.weighted) /* a count stays within the low word, for which there is an instruction */
			atomicAdd((uint32_t *)&r.s->hist[bin_of(r, z)], 1);
		else if (w)
			atomicAdd(&r.s->hist[bin_of(r, z)], w);
	}
	find_digit(r, q.target);
	q.bin = r.s->digit;
	q.target -= q.bin == BINS ? 0 : r.s->before;
	__syncthreads(); /* read by all before it is written again */
	return q.bin;
}

/* The ids of the bin, gathered in the first block; false: too many. *last: the answer. */
static __device__ bool select_listed(const row &r, const selection &q, uint64_t *last)
{
	cg::cluster_group cluster = cg::this_cluster();
	shared *first = cluster.map_shared_rank(r.s, 0);
	uint32_t t = threadIdx.x, n;

	EACH (r, i) {
		float z = r.z[i];
		uint64_t rank = apr_rank(z, r.base + i);

		if (!(z >= -FLT_MAX) || rank > q.limit || bin_of(r, z) != q.bin)
			continue;
		uint32_t at = atomicAdd(&first->found, 1);

		if (at < LIST) {
			first->list[at] = rank;
			first->weight[at] = share_of(r, z, q.weighted);
		}
	}
	cluster.sync();
	n = first->found;
	if (cluster.block_rank() == 0 && t < n &&
	    n <= LIST) { /* the sum up to and with this one: the target falls into just one */
		unsigned long long before = 0, mine = r.s->list[t];

		for (uint32_t i = 0; i < n; i++)
			before += r.s->list[i] < mine ? r.s->weight[i] : 0;
		if (before < q.target && q.target <= before + r.s->weight[t])
			r.s->answer = mine;
	}
	cluster.sync(); /* found is read by all: made ready for the next time */
	if (t == 0)
		r.s->found = 0;
	*last = first->answer;
	return n <= LIST;
}

/* The same by digits, for any number of ids */
static __device__ uint64_t select_digits(const row &r, selection q)
{
	uint64_t prefix = 0, mask = 0;

	for (int d = 0; d < 5; d++) {
		clear_hist(r);
		EACH (r, i) {
			float z = r.z[i];
			uint64_t rank = apr_rank(z, r.base + i);

			if (!(z >= -FLT_MAX) || rank > q.limit || bin_of(r, z) != q.bin || (rank & mask) != prefix)
				continue;
			unsigned long long w = share_of(r, z, q.weighted);

			if (w)
				atomicAdd(&r.s->hist[digit_of(rank, d)], w);
		}
		find_digit(r, q.target);
		uint32_t digit = r.s->digit;
		uint64_t before = r.s->before, size = r.s->size;

		__syncthreads(); /* read by all before the next pass writes them */
		q.target -= before;
		prefix |= (uint64_t)digit << digit_shift(d);
		mask |= (uint64_t)(d == 2 ? 1023 : 2047) << digit_shift(d);
		if (d == 2) { /* what is left has one value: all of it, or so many of the lowest ids */
			if (q.weighted) {
				uint64_t each = apr_weight_fixed(apr_rank_value(prefix), r.max, r.temperature);

				size /= each;
				q.target = (q.target + each - 1) / each;
				q.weighted = false;
			}
			if (q.target >= size)
				return prefix | 0xffffffffu;
		}
	}
	return prefix;
}

/* Among finite ids with rank <= limit, best first: the rank of the one with which the count (or, weighted, the sum of
 * weights) reaches target > 0. ~0 where it never does. */
static __device__ uint64_t select_last(const row &r, uint64_t target, bool weighted, uint64_t limit)
{
	selection q = {target, limit, 0, weighted};
	uint64_t last;

	if (select_bin(r, q) == BINS)
		return ~0ull;
	return select_listed(r, q, &last) ? last : select_digits(r, q);
}

/* ---- bias and penalties ---------------------------------------------------------------------- */

/* Rounded step by step as the reference does (contraction is off). Each id is one thread's. */
static __device__ void adjust(const row &r, const apr_cuda_draw &d)
{
	for (uint32_t i = threadIdx.x; i < d.n_bias; i += THREADS) {
		uint32_t id = d.bias_id[i], j;

		if (id < r.base || id >= r.base + r.n)
			continue;
		for (j = 0; j < i && d.bias_id[j] != id; j++)
			;
		for (; j == i || (j > i && j < d.n_bias); j++) /* the first of an id adds all of them, in order */
			if (d.bias_id[j] == id)
				r.z[id - r.base] += d.bias[j];
	}
	__syncthreads();
	for (uint32_t i = threadIdx.x; i < d.n_seen; i += THREADS) {
		apr_seen s = d.seen[i];

		if (s.id < r.base || s.id >= r.base + r.n)
			continue;
		float x = r.z[s.id - r.base];

		if (d.repeat_penalty != 1.0f && (s.prompt || s.output))
			x = x > 0.0f ? x / d.repeat_penalty : x * d.repeat_penalty;
		if (s.output)
			x = (x - d.frequency_penalty * (float)s.output) - d.presence_penalty;
		r.z[s.id - r.base] = x;
	}
	__syncthreads();
}
static __device__ bool adjusts(const apr_cuda_draw &d)
{
	return d.n_bias ||
	       (d.n_seen && (d.repeat_penalty != 1.0f || d.frequency_penalty != 0.0f || d.presence_penalty != 0.0f));
}

/* ---- the draw --------------------------------------------------------------------------------- */

/* Largest random word with which an id at z could still beat `best`, or -1; see draw_bound in sample_impl.h */
static __device__ int64_t word_bound(const row &r, float z, float best)
{
	float need = apr_tempered(z, r.max, r.temperature) - best + 0.01f, words;

	if (!(need > -APR_GUMBEL_MAX))
		return -1;
	words = apr_exp2(need * APR_LOG2E + 32.0f);
	return words < 0x1p32f - 1024.0f ? (int64_t)words + 256 : (int64_t)0xffffffff;
}

static __device__ uint32_t draw(row &r, const apr_cuda_draw &d, uint32_t likeliest, uint64_t last)
{
	const float log2_min_p = d.min_p > 0.0f ? apr_log2(d.min_p) : -INFINITY;
	float best = apr_draw(r.max, r.max, r.temperature, d.seed, d.sample, d.position, likeliest);
	uint32_t best_id = likeliest;

	for (uint32_t i = threadIdx.x * 4; i < r.n; i += THREADS * 4) { /* four ids share a block of random words */
		float z[4], top = -INFINITY;
		uint32_t ctr[4] = {(r.base + i) >> 2, d.position, d.sample, 0}, word[4];

		for (int e = 0; e < 4; e++) {
			z[e] = i + e < r.n ? r.z[i + e] : -INFINITY;
			top = fmaxf(top, z[e]);
		}
		int64_t bound = apr_rank(top, 0) > last ? -1 : word_bound(r, top, best);

		if (bound < 0)
			continue;
		apr_philox4x32(ctr, (uint32_t)d.seed, (uint32_t)(d.seed >> 32), word);
		for (int e = 0; e < 4; e++) {
			uint32_t id = r.base + i + e;

			if (i + e >= r.n || (int64_t)word[e] > bound || apr_rank(z[e], id) > last ||
			    !apr_min_p_keeps(z[e], r.max, r.temperature, log2_min_p))
				continue;
			float key = apr_tempered(z[e], r.max, r.temperature) + apr_gumbel(apr_unit(word[e]));

			if (key > best || (key == best && id < best_id)) {
				best = key;
				best_id = id;
			}
		}
	}
	return (uint32_t)reduce<op_min>(r, apr_rank(best, best_id), ~0ull);
}

/* ---- top-k of few ------------------------------------------------------------------------------ */

/* Ids that may be among the k best, in the first block's list; how many. Where more than LIST: not all of them. The k best
 * lie no further from max than the k-th of the threads' own best. */
static __device__ uint32_t gather_best(const row &r, uint32_t k)
{
	cg::cluster_group cluster = cg::this_cluster();
	shared *first = cluster.map_shared_rank(r.s, 0);
	uint32_t bin;

	if (k > LIST)
		return LIST + 1;
	clear_hist(r);
	if (r.mine >= -FLT_MAX)
		atomicAdd((uint32_t *)&r.s->hist[bin_of(r, r.mine)], 1);
	find_digit(r, k);
	bin = r.s->digit;
	if (bin >= BINS - 1) /* past all, or where the bins end */
		return LIST + 1;
	EACH (r, i) {
		float z = r.z[i];

		if (!(z >= -FLT_MAX) || bin_of(r, z) > bin)
			continue;
		uint32_t at = atomicAdd(&first->found, 1);

		if (at < LIST)
			first->list[at] = apr_rank(z, r.base + i);
	}
	cluster.sync();
	bin = first->found;
	cluster.sync(); /* found is read by all: made ready for the next time */
	if (threadIdx.x == 0)
		r.s->found = 0;
	return bin;
}
/* Over the block alone */
template <typename OP> static __device__ unsigned long long block_reduce(shared *s, unsigned long long v)
{
	for (int o = 16; o; o >>= 1)
		v = OP::of(v, __shfl_xor_sync(~0u, v, o));
	__syncthreads();
	if ((threadIdx.x & 31) == 0)
		s->warp[threadIdx.x >> 5] = v;
	__syncthreads();
	v = s->warp[threadIdx.x & 31];
	for (int o = 16; o; o >>= 1)
		v = OP::of(v, __shfl_xor_sync(~0u, v, o));
	return v;
}
/* The first block chooses among the n ids of its list, one a thread: top-k, top-p, min-p, the draw */
static __device__ uint32_t choose_listed(const row &r, const apr_cuda_draw &d, uint32_t likeliest, uint32_t n)
{
	const float log2_min_p = d.min_p > 0.0f ? apr_log2(d.min_p) : -INFINITY;
	shared *s = r.s;
	uint32_t t = threadIdx.x, better = 0;
	uint64_t rank = t < n ? s->list[t] : ~0ull;
	float z = apr_rank_value(rank), best = apr_draw(r.max, r.max, r.temperature, d.seed, d.sample, d.position, likeliest);
	unsigned long long w, before = 0, key = apr_rank(best, likeliest);

	if (t < n)
		for (uint32_t i = 0; i < n; i++)
			better += s->list[i] < rank;
	bool kept = t < n && better < d.top_k;

	if (d.top_p < 1.0f) {
		w = kept ? apr_weight_fixed(z, r.max, r.temperature) : 0;
		s->weight[t] = w;
		uint64_t target = apr_top_p_target(block_reduce<op_sum>(s, w), d.top_p);

		if (kept)
			for (uint32_t i = 0; i < n; i++)
				before += s->list[i] < rank ? s->weight[i] : 0;
		kept = kept && before < (target ? target : 1); /* those that come after the sum has reached it are gone */
	}
	if (kept && apr_min_p_keeps(z, r.max, r.temperature, log2_min_p)) {
		uint64_t mine = apr_rank(apr_draw(z, r.max, r.temperature, d.seed, d.sample, d.position, (uint32_t)rank),
		                         (uint32_t)rank);

		key = mine < key ? mine : key;
	}
	return (uint32_t)block_reduce<op_min>(s, key);
}

static __device__ uint32_t choose(row &r, const apr_cuda_draw &d, uint64_t best, uint32_t n_vocab)
{
	uint64_t last = ~0ull;

	if (!(d.temperature > 0.0f) || d.top_k == 1 || n_vocab == 1)
		return (uint32_t)best;
	if (d.top_k && d.top_k < n_vocab) {
		uint32_t n = gather_best(r, d.top_k);

		if (n <= LIST)
			return cg::this_cluster().block_rank() == 0 ? choose_listed(r, d, (uint32_t)best, n) : 0;
		last = select_last(r, d.top_k, false, ~0ull);
	}
	if (d.top_p < 1.0f) {
		uint64_t target = apr_top_p_target(mass_of(r, last), d.top_p),
				 cut = select_last(r, target ? target : 1, true, last);

		last = cut < last ? cut : last;
	}
	return draw(r, d, (uint32_t)best, last);
}

/* ---- the kernel ---------------------------------------------------------------------------------- */

struct sample_args {
	const float *logits;
	uint32_t n_vocab;
	size_t ld;
	const apr_cuda_draw *draws;
	const uint32_t *n_draws, *step;
	apr_cuda_record *records;
	apr_cuda_top *tops;
};

/* Log-probabilities of the raw logits, which r.z still holds: log of their mass, the best of them */
static __device__ float raw_logs(row &r, const apr_cuda_draw &d, apr_cuda_top *top, uint32_t *n_top)
{
	uint64_t after = 0, rank;
	float log_sum, temperature = r.temperature;

	r.temperature = 1.0f;
	log_sum = apr_log2((float)mass_of(r, ~0ull) * 0x1p-40f) * APR_LN2;
	r.temperature = temperature;
	for (*n_top = 0; top && *n_top < min(d.n_top, APR_SAMPLE_TOP_MAX); ++*n_top) {
		unsigned long long best = ~0ull;

		EACH (r, i) {
			rank = apr_rank(r.z[i], r.base + i);
			if ((rank > after || (!*n_top && rank == 0)) && r.z[i] > -INFINITY && rank < best)
				best = rank;
		}
		after = reduce<op_min>(r, best, ~0ull);
		if (after == ~0ull)
			break;
		if (cg::this_cluster().block_rank() == 0 && threadIdx.x == 0) {
			top->id[*n_top] = (uint32_t)after;
			top->logprob[*n_top] = (apr_rank_value(after) - r.max) - log_sum;
		}
	}
	return log_sum;
}

static __device__ void one_row(const sample_args &a, row &r, const apr_cuda_draw &d, uint32_t index,
                               apr_cuda_record *out)
{
	const float *logits = a.logits + (size_t)index * a.ld;
	bool bad, raw = d.kind == APR_CUDA_SCORE || d.want_logprob || d.n_top;
	uint64_t best;
	float raw_max, log_sum = 0.0f;

	out->numeric = 1;
	best = load_row(r, logits, &bad);
	r.max = raw_max = apr_rank_value(best);
	if (bad || best == ~0ull || r.max == -INFINITY || (d.kind == APR_CUDA_SCORE && d.score_id >= a.n_vocab))
		return;
	if (raw)
		log_sum = raw_logs(r, d, a.tops ? a.tops + index : NULL, &out->n_top);
	out->id = d.score_id;
	if (d.kind == APR_CUDA_SAMPLE) {
		if (adjusts(d)) {
			adjust(r, d);
			best = best_again(r, &bad);
			r.max = apr_rank_value(best);
			if (bad || r.max == -INFINITY)
				return;
		}
		out->id = choose(r, d, best, a.n_vocab);
	}
	out->numeric = 0;
	if (raw) /* of other blocks than the first it is not looked at */
		out->logprob = (__ldcg(logits + out->id) - raw_max) - log_sum;
}

static __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1)
		sample_rows(const __grid_constant__ sample_args a)
{
	extern __shared__ __align__(128) uint8_t raw[];
	const uint32_t index = blockIdx.x / BLOCKS, part = ((a.n_vocab + BLOCKS - 1) / BLOCKS + 3) & ~3u;
	apr_cuda_record out = {};
	row r;

	pdl_next();
	pdl_wait();
	if (index >= *a.n_draws)
		return;
	const apr_cuda_draw d = a.draws[index];

	r.s = (shared *)raw;
	r.z = (float *)(r.s + 1);
	r.base = cg::this_cluster().block_rank() * part;
	r.n = r.base < a.n_vocab ? min(part, a.n_vocab - r.base) : 0;
	r.temperature = d.temperature;
	r.turn = 0;
	if (threadIdx.x == 0)
		r.s->found = 0; /* seen by all after the first reduction */
	one_row(a, r, d, index, &out);
	cg::this_cluster().sync(); /* no block ends while another may still read its shared memory */
	if (cg::this_cluster().block_rank() != 0 || threadIdx.x != 0)
		return;
	apr_cuda_record *rec = a.records + index;
	uint4 head = make_uint4(out.id, __float_as_uint(out.logprob), out.numeric, out.n_top);

	*(uint4 *)rec = head;
	/* pairs with the reader's acquire load of step */
	store_release_sys(&rec->step, *a.step);
}

extern "C" int apr_cuda_sample(const apr_cuda_launch *l, const float *logits, uint32_t n_vocab, size_t ld,
                               const apr_cuda_draw *draws, const uint32_t *n_draws, const uint32_t *step,
                               apr_cuda_record *records, apr_cuda_top *tops)
{
	sample_args a = {logits, n_vocab, ld, draws, n_draws, step, records, tops};
	size_t part = ((n_vocab + BLOCKS - 1) / BLOCKS + 3) & ~(size_t)3;

	if (!n_vocab || n_vocab > APR_CUDA_MAX_VOCAB)
		return -ENOTSUP;
	return launch(sample_rows, dim3(BLOCKS * l->bucket), THREADS, sizeof(shared) + part * sizeof(float), l->stream,
	              l->pdl, a);
}
