/* SPDX-License-Identifier: MIT */
/*
 * Attention of generated tokens: one row, one KV head, keys in FP16 pages.
 *
 * Owns: the kernel for FP16 KV on tensor cores and its launch. Does not own the
 * plain kernel for other KV types (sm90_any_attn_plain.cu). The scalar reference is
 * apr_ref_attn in sm90_any_attn_ref.h.
 *
 * A block takes a segment of 256 keys of a (row, KV head): scores with keys as the
 * rows of the product and up to eight query heads as its columns, then values with
 * their dimensions as rows. Each segment's (m, l, o) goes to scratch; the block that
 * finishes a (row, KV head) last merges them, ascending, whoever it is.
 */
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/scratch.cuh"

#define SEG APR_KV_SEGMENT
#define P_STRIDE (SEG + 8)
#define HEADS 8u

struct piece { /* of a row's keys: those of segment seg from lo to hi - 1 */
	uint32_t row, slot, kvh, head0, heads, seg, lo, hi;
	const uint8_t *page[SEG / 64]; /* of its blocks, asked for together: one after another would wait for each */

	__device__ __forceinline__ void at(const attn_args &a, uint32_t s, uint32_t first, uint32_t pos)
	{
		seg = s;
		lo = s * SEG < first ? first - s * SEG : 0;
		hi = min(SEG, pos + 1 - s * SEG);
#pragma unroll
		for (uint32_t b = 0; b < SEG / 64; b++)
			page[b] = b * 64 < hi ? kv_page(a.kv, slot, seg * SEG + b * 64) : NULL;
	}
};

/* The piece's keys (or values) to shared memory, zeros for the others of their blocks of 64; chunks of 16 B are permuted
 * by the key's last three bits. Those from `fresh` on are left out: this step's, not there before the previous kernel has
 * ended. */
template <int DIM> DEV void load_rows(uint32_t dst, const attn_args &a, const piece &p, bool value, uint32_t fresh)
{
	const uint32_t dim = value ? a.kv.v_dim : a.kv.k_dim, per = DIM / 8, c = threadIdx.x % per, r0 = threadIdx.x / per;
	const uint32_t STEP = 256 / per, to = dst + r0 * DIM * 2 + ((c ^ (r0 & 7)) << 4); /* STEP: a multiple of 8 */
	const size_t at = (value ? (size_t)a.kv.n_kv_heads * 64 * a.kv.k_dim : 0) + ((size_t)p.kvh * 64 + r0) * dim + c * 8;

#pragma unroll
	for (uint32_t b = 0; b < SEG / 64; b++) {
		if (b * 64 >= p.hi || b * 64 + 64 <= p.lo)
			continue;
		const __half *src = (const __half *)p.page[b] + at;

		if (b * 64 >= p.lo && b * 64 + 64 <= min(p.hi, fresh)) { /* a whole block of old ones */
#pragma unroll
			for (uint32_t i = 0; i < 64 / STEP; i++)
				cp_async16(to + (b * 64 + i * STEP) * DIM * 2,
				           c * 8 < dim ? src + i * STEP * dim : (const __half *)p.page[b], c * 8 < dim);
			continue;
		}
#pragma unroll 1
		for (uint32_t i = 0; i < 64 / STEP; i++) {
			uint32_t key = b * 64 + r0 + i * STEP;
			bool live = key >= p.lo && key < p.hi && c * 8 < dim;

			if (key < fresh || key >= p.hi)
				cp_async16(to + (b * 64 + i * STEP) * DIM * 2, live ? src + i * STEP * dim : (const __half *)p.page[b],
				           live);
		}
	}
}
/* Those that were left out */
template <int DIM> DEV void load_fresh(uint32_t dst, const attn_args &a, const piece &p, bool value, uint32_t fresh)
{
	const uint32_t dim = value ? a.kv.v_dim : a.kv.k_dim, per = DIM / 8, c = threadIdx.x % per;
	const size_t at = (value ? (size_t)a.kv.n_kv_heads * 64 * a.kv.k_dim : 0) + (size_t)p.kvh * 64 * dim + c * 8;

#pragma unroll
	for (uint32_t b = 0; b < SEG / 64; b++) {
		const uint32_t end = min(p.hi, b * 64 + 64);

#pragma unroll 1
		for (uint32_t key = max(max(p.lo, fresh), b * 64) + threadIdx.x / per; key < end; key += 256 / per) {
			bool live = c * 8 < dim;

			cp_async16(dst + key * DIM * 2 + ((c ^ (key & 7)) << 4),
			           (const __half *)p.page[b] + (live ? at + key % 64 * dim : 0), live);
		}
	}
}

/* This lane's piece of q for the head in column g, FP16, times a power of two; returns the inverse */
template <int DIM> DEV float load_query(const attn_args &a, uint32_t row, uint32_t head, bool live, uint32_t (*qf)[2])
{
	const uint32_t t = threadIdx.x & 3;
	const float *q = a.q + ((size_t)row * a.n_heads + head) * a.kv.k_dim;
	float v[DIM / 16][4], amax = 0.0f, s;

#pragma unroll
	for (int i = 0; i < DIM / 16; i++) {
		bool in = live && i * 16 < a.kv.k_dim;
		float2 lo = in ? __ldcg((const float2 *)(q + i * 16 + 2 * t)) : make_float2(0, 0);
		float2 hi = in ? __ldcg((const float2 *)(q + i * 16 + 2 * t + 8)) : make_float2(0, 0);

		v[i][0] = lo.x, v[i][1] = lo.y, v[i][2] = hi.x, v[i][3] = hi.y;
#pragma unroll
		for (int e = 0; e < 4; e++)
			amax = fmaxf(amax, fabsf(v[i][e]));
	}
	amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
	amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
	s = act_scale(amax);
#pragma unroll
	for (int i = 0; i < DIM / 16; i++) {
		qf[i][0] = pack_half2(v[i][0] * s, v[i][1] * s);
		qf[i][1] = pack_half2(v[i][2] * s, v[i][3] * s);
	}
	return act_unscale(s);
}

struct segment_memory { /* shared memory of a block */
	uint32_t k, v;
	__half *p;      /* [HEADS][P_STRIDE] */
	float *wm, *ws; /* [8 warps][HEADS] */
	uint32_t *last;
};

/* Scores of 32 keys a warp; then weights to shared memory, their sums a warp to ws. m: of columns 2t, 2t + 1. */
template <int DIM> DEV void segment_weights(const attn_args &a, const segment_memory &sm, const uint32_t (*qf)[2],
                                            const float *factor, uint32_t lo, uint32_t hi, float *m)
{
	const uint32_t lane = threadIdx.x & 31, w = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
	float s[2][4], sum[2] = {0, 0};

	m[0] = m[1] = -INFINITY;
#pragma unroll
	for (int i = 0; i < 2; i++) {
		const uint32_t k0 = w * 32 + i * 16;

		s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.0f;
		if (k0 < hi && k0 + 16 > lo)
#pragma unroll
			for (int ks = 0; ks < DIM / 16; ks++) {
				uint32_t f[4], key = k0 + (lane & 15), c = 2 * ks + (lane >> 4);

				ldmatrix4<false>(f, sm.k + key * DIM * 2 + ((c ^ (key & 7)) << 4));
				mma_f16(s[i], f, qf[ks][0], qf[ks][1], s[i]);
			}
#pragma unroll
		for (int e = 0; e < 4; e++) {
			uint32_t key = k0 + g + (e >> 1) * 8;

			s[i][e] *= factor[e & 1];
			if (a.softcap != 0.0f)
				s[i][e] = a.softcap * apr_tanh(s[i][e]) * APR_LOG2E;
			s[i][e] = key >= lo && key < hi ? s[i][e] : -INFINITY;
			m[e & 1] = fmaxf(m[e & 1], s[i][e]);
		}
	}
#pragma unroll
	for (int o = 4; o < 32; o <<= 1) {
		m[0] = fmaxf(m[0], __shfl_xor_sync(~0u, m[0], o));
		m[1] = fmaxf(m[1], __shfl_xor_sync(~0u, m[1], o));
	}
	if (g == 0)
		*(float2 *)(sm.wm + w * HEADS + 2 * t) = make_float2(m[0], m[1]);
	__syncthreads();
#pragma unroll
	for (int e = 0; e < 2; e++)
#pragma unroll
		for (int i = 0; i < 8; i++)
			m[e] = fmaxf(m[e], sm.wm[i * HEADS + 2 * t + e]);
#pragma unroll
	for (int i = 0; i < 2; i++)
#pragma unroll
		for (int e = 0; e < 4; e++) {
			float p = exp2_fast(s[i][e] - (m[e & 1] == -INFINITY ? 0.0f : m[e & 1]));

			sum[e & 1] += p;
			sm.p[(2 * t + (e & 1)) * P_STRIDE + w * 32 + i * 16 + g + (e >> 1) * 8] = __float2half_rn(p);
		}
#pragma unroll
	for (int o = 4; o < 32; o <<= 1) {
		sum[0] += __shfl_xor_sync(~0u, sum[0], o);
		sum[1] += __shfl_xor_sync(~0u, sum[1], o);
	}
	if (g == 0)
		*(float2 *)(sm.ws + w * HEADS + 2 * t) = make_float2(sum[0], sum[1]);
}

/* o[d][head] of tile dt of 16 dimensions: keys ascending from 0 */
template <int DIM> DEV void segment_values(const segment_memory &sm, uint32_t dt, uint32_t lo, uint32_t hi, float *o)
{
	const uint32_t lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, j = lane >> 3;

	o[0] = o[1] = o[2] = o[3] = 0.0f;
#pragma unroll 4
	for (uint32_t ks = lo / 64 * 4; ks * 16 < hi; ks++) {
		uint32_t f[4], key = ks * 16 + (j >> 1) * 8 + (lane & 7), c = 2 * dt + (j & 1);
		const uint32_t *p = (const uint32_t *)(sm.p + g * P_STRIDE + ks * 16 + 2 * t);

		ldmatrix4<true>(f, sm.v + key * DIM * 2 + ((c ^ (key & 7)) << 4));
		mma_f16(o, f, p[0], p[4], o);
	}
}

/* All segments of (row, head tile), merged ascending by the block's threads */
DEV void merge_row(const attn_args &a, uint32_t row, uint32_t head0, uint32_t heads, uint32_t seg0, uint32_t seg1)
{
	for (uint32_t i = threadIdx.x; i < heads * a.kv.v_dim; i += blockDim.x) {
		uint32_t h = head0 + i / a.kv.v_dim, d = i % a.kv.v_dim;
		attn_merge mg = {-INFINITY, 0.0f, 0.0f, 0.0f};
		float total = 0.0f;

#pragma unroll 4
		for (uint32_t s = seg0; s < seg1; s++) {
			size_t at = ((size_t)row * a.segs + s) * a.n_heads + h;
			float2 ml = __ldcg(a.part_ml + at);

			mg.segment(ml.x, ml.y);
			total = mg.sum(total, __ldcg(a.part_o + at * a.kv.v_dim + d));
		}
		a.o[((size_t)row * a.n_heads + h) * a.kv.v_dim + d] = total / mg.l;
	}
}

template <int DIM> DEV void ask(const attn_args &a, uint32_t dst, const piece &p, bool live, bool value)
{
	if (live)
		load_rows<DIM>(dst, a, p, value, SEG);
	cp_async_commit();
}
/* The first position of this row's sequence whose key this step itself writes. Steps' rows are known before it begins. */
DEV uint32_t first_fresh(const attn_args &a, uint32_t n, uint32_t slot, uint32_t pos)
{
	uint32_t at = pos;

	if (n == 1)
		return at;
	for (uint32_t i = threadIdx.x & 31; i < n; i += 32)
		if (a.rows.slot[i] == slot)
			at = min(at, a.rows.pos[i]);
	return __reduce_min_sync(~0u, at);
}

/* One segment that is on its way to shared memory; `next` is asked for as soon as there is room. Results to scratch, or
 * to o where the segment is the only one. Copies are committed in the order K, V, K, V, …, one group each. */
template <int DIM> DEV void one_segment(const attn_args &a, const segment_memory &sm, const piece &p, const piece &next,
                                        bool is_first, bool more, bool only, const uint32_t (*qf)[2], const float *factor)
{
	const uint32_t lane = threadIdx.x & 31, w = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
	const bool apart = DIM <= 128; /* K and V each have a place of their own */
	float m[2], l[2], r[2], o[4];

	if (apart && !is_first)
		cp_async_wait<1>();
	else
		cp_async_wait<0>();
	__syncthreads();
	segment_weights<DIM>(a, sm, qf, factor, p.lo, p.hi, m);
	__syncthreads(); /* K is read by all: its place is free, and P is whole */
	if (apart) {
		ask<DIM>(a, sm.k, next, more, false);
		cp_async_wait<1>();
	} else {
		ask<DIM>(a, sm.v, p, true, true);
		cp_async_wait<0>();
	}
	__syncthreads();
#pragma unroll
	for (int e = 0; e < 2; e++) {
		l[e] = tree_sum<8>(sm.ws + 2 * t + e, HEADS);
		r[e] = 1.0f / l[e];
	}
	for (uint32_t dt = w; dt * 16 < a.kv.v_dim; dt += 8) {
		segment_values<DIM>(sm, dt, p.lo, p.hi, o);
#pragma unroll
		for (int e = 0; e < 4; e++) {
			uint32_t h = 2 * t + (e & 1), d = dt * 16 + g + (e >> 1) * 8;

			if (h >= p.heads)
				continue;
			if (only)
				a.o[((size_t)p.row * a.n_heads + p.head0 + h) * a.kv.v_dim + d] = o[e] * r[e & 1];
			else
				a.part_o[(((size_t)p.row * a.segs + p.seg) * a.n_heads + p.head0 + h) * a.kv.v_dim + d] = o[e];
		}
	}
	if (!only && w == 0 && g == 0)
#pragma unroll
		for (int e = 0; e < 2; e++)
			if (2 * t + e < p.heads)
				a.part_ml[((size_t)p.row * a.segs + p.seg) * a.n_heads + p.head0 + 2 * t + e] = make_float2(m[e], l[e]);
	__syncthreads(); /* V and P are read */
	if (apart)
		ask<DIM>(a, sm.v, next, more, true);
	else
		ask<DIM>(a, sm.k, next, more, false);
}

template <int DIM> static __global__ void __launch_bounds__(256, 1) attn_decode(const __grid_constant__ attn_args a)
{
	extern __shared__ __align__(128) uint8_t raw[];
	const uint32_t tiles = (a.group + HEADS - 1) / HEADS, kvh = blockIdx.x / tiles, ht = blockIdx.x % tiles,
				   row = blockIdx.y;
	const uint32_t g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
	const uint32_t head0 = kvh * a.group + ht * HEADS, heads = min(HEADS, a.group - ht * HEADS);
	segment_memory sm;
	uint32_t qf[DIM / 16][2], done = 0;
	float factor[2];

	sm.k = smem_addr(raw);
	sm.v = sm.k + (DIM <= 128 ? SEG * DIM * 2 : 0);
	sm.p = (__half *)(raw + SEG * DIM * 2 * (DIM <= 128 ? 2 : 1));
	sm.wm = (float *)(sm.p + HEADS * P_STRIDE);
	sm.ws = sm.wm + 64;
	sm.last = (uint32_t *)(sm.ws + 64);
	pdl_next();
	/* What the step's rows are is known before its first kernel starts; a block of each row waits in any case, so that no
	 * kernel ends before the one ahead of it. */
	const uint32_t n_rows = min(*a.rows.n, a.bucket), pos = a.rows.pos[row], of = a.rows.slot[row]; /* all at once */
	const uint32_t slot = row < n_rows ? of : APR_CUDA_DEAD;

	if (slot == APR_CUDA_DEAD) {
		if (blockIdx.z == 0) {
			pdl_wait();
			for (uint32_t i = threadIdx.x; row < n_rows && i < heads * a.kv.v_dim; i += 256)
				a.o[((size_t)row * a.n_heads + head0) * a.kv.v_dim + i] = 0.0f;
		}
		return;
	}
	const uint32_t first = attn_first(pos, a.window), seg0 = first / SEG, seg1 = pos / SEG + 1;

	if (seg0 + blockIdx.z >= seg1)
		return;
	piece p = {row, slot, kvh, head0, heads, 0, 0, 0, {}}, next = p;

	p.at(a, seg0 + blockIdx.z, first, pos);
	uint32_t fresh = first_fresh(a, n_rows, slot, pos);

	fresh = fresh < p.seg * SEG ? 0 : fresh - p.seg * SEG;
	load_rows<DIM>(sm.k, a, p, false, fresh);
	if (DIM <= 128)
		load_rows<DIM>(sm.v, a, p, true, fresh);
	pdl_wait();
	load_fresh<DIM>(sm.k, a, p, false, fresh);
	if (DIM <= 128)
		load_fresh<DIM>(sm.v, a, p, true, fresh);
	cp_async_commit();
	float mine = load_query<DIM>(a, row, head0 + min(g, heads - 1), g < heads, qf);

	/* scores come in columns 2t, 2t + 1, q in column g */
	factor[0] = attn_factor(a, __shfl_sync(~0u, mine, 8 * t));
	factor[1] = attn_factor(a, __shfl_sync(~0u, mine, 8 * t + 4));
	for (uint32_t seg = p.seg; seg < seg1; seg += gridDim.z, done++) {
		const bool more = seg + gridDim.z < seg1;

		if (more)
			next.at(a, seg + gridDim.z, first, pos);
		one_segment<DIM>(a, sm, p, next, done == 0, more, seg1 - seg0 == 1, qf, factor);
		p = next;
	}
	if (seg1 - seg0 == 1)
		return;
	/* The last block to add its segments merges: its acquire pairs with the others' release (the fences around the add) */
	if (threadIdx.x == 0) {
		uint32_t *c = a.count + (size_t)row * gridDim.x + blockIdx.x;

		__threadfence();
		*sm.last = atomicAdd(c, done) + done == seg1 - seg0;
		if (*sm.last)
			*c = 0;
		__threadfence();
	}
	__syncthreads();
	if (*sm.last)
		merge_row(a, row, head0, heads, seg0, seg1);
}

template <int DIM> static int launch_dim(const apr_cuda_launch *l, const attn_args *a)
{
	uint32_t x = a->kv.n_kv_heads * ((a->group + HEADS - 1) / HEADS), z = 2 * l->sms / (x * a->bucket);
	size_t smem = (size_t)SEG * DIM * 2 * (DIM <= 128 ? 2 : 1) + HEADS * P_STRIDE * 2 + 2 * 64 * 4 + 16;

	/* Blocks along the context: enough to fill the device at this bucket, at least four so that one long row among
	 * short ones is not left to one block, no more than there are segments. */
	z = z < 4 ? 4 : z;
	z = z > a->segs ? a->segs : z;
	if (prefer_shared(attn_decode<DIM>))
		return -EIO;
	return launch(attn_decode<DIM>, dim3(x, a->bucket, z), 256, smem, l->stream, l->pdl, *a);
}

extern "C" int apr_cuda_decode_attn(const apr_cuda_launch *l, const apr_op_attn *op)
{
	attn_args a = attn_args_of(l, op);
	size_t segs = ((size_t)a.kv.max_pages * APR_KV_PAGE + SEG - 1) / SEG, ml;
	uint8_t *at = (uint8_t *)l->scratch + SCRATCH_COUNTERS;

	if (l->bucket > APR_CUDA_DECODE_ROWS)
		return -EINVAL;
	if (!attn_on_tensor_cores(op))
		return attn_plain_launch(l, &a);
	if ((size_t)l->bucket * a.kv.n_kv_heads * ((a.group + HEADS - 1) / HEADS) * 4 > SCRATCH_COUNTERS)
		return -ENOTSUP;
	ml = (size_t)l->bucket * segs * a.n_heads * sizeof(float2);
	if (SCRATCH_COUNTERS + part_bytes(l->bucket, a.n_heads, a.kv.v_dim, (uint32_t)(segs * SEG)) > l->scratch_bytes)
		return -EINVAL;
	a.segs = (uint32_t)segs;
	a.count = (uint32_t *)l->scratch;
	a.part_ml = (float2 *)at;
	a.part_o = (float *)(at + ml);
	if (op->k_dim <= 64 && op->v_dim <= 64)
		return launch_dim<64>(l, &a);
	if (op->k_dim <= 128 && op->v_dim <= 128)
		return launch_dim<128>(l, &a);
	return launch_dim<256>(l, &a);
}
