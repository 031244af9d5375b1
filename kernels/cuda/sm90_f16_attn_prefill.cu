/* SPDX-License-Identifier: MIT */
/*
 * Attention of prompt rows by warpgroup products: heads of 64, 128, 256, keys in FP16
 * pages.
 *
 * Owns: that kernel, its launch, and which kernel a shape gets. Does not own the
 * kernel of other head sizes (sm90_f16_attn_prefill_mma.cu), nor of other KV types
 * (sm90_any_attn_plain.cu). The scalar reference is apr_ref_attn in
 * sm90_any_attn_ref.h.
 *
 * One block a multiprocessor takes items by ticket: a tile's 64 rows times two heads
 * of a KV head, one a warpgroup (heads of 256: one head, half of the values'
 * dimensions a warpgroup), or some segments of them. A thread of a third warpgroup
 * copies queries, keys and values, pages as they lie. Keys come in blocks of 128
 * (64 under heads of 256) aligned to position; a segment of 1024 has one running
 * state; segments are merged ascending, by the block that has the tile whole, or
 * from scratch where its segments were divided. A row that sees nothing of a block
 * keeps its state to the bit, so that its results do not depend on its tile.
 *
 * The sum of a row's segments rests in shared memory, not in registers: those hold
 * queries, weights, scores and the segment's sum.
 */
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/scratch.cuh"
#include "kernels/cuda/wgmma.cuh"

#define ROWS 64u
#define SEG APR_CUDA_ATTN_SEG
#define CONSUMERS 256
#define THREADS (CONSUMERS + 128)
#define MERGE_ROWS 16u /* of a merge's item */

template <int DIM> struct shape {
	static const int heads = DIM > 128 ? 1 : 2;            /* of an item */
	static const int cols = DIM > 128 ? DIM / 2 : DIM;     /* values' dimensions a warpgroup */
	static const int halves = DIM / 64;                    /* 128 B pieces of a row */
	static const int pages = DIM > 128 ? 1 : 2;            /* of a block of keys */
	static const int block = 64 * pages;                   /* keys */
	static const int page_bytes = 64 * DIM * 2;
	static const int stage_bytes = pages * page_bytes;     /* of keys, or of values */
	static const int stages = 65536 / stage_bytes;
	static const int q_bytes = heads * page_bytes;
	static const int total_bytes = CONSUMERS * cols / 2 * 4;
	static const int smem = 1024 + q_bytes + 2 * stages * stage_bytes + total_bytes + 512;
	static const uint32_t seg_blocks = SEG / block;
};

enum { ITEM_END, ITEM_ROWS, ITEM_MERGE };
struct item { /* in shared memory, from the copying thread to the others */
	uint32_t kind;
	apr_cuda_attn_tile t;
	uint32_t head;   /* the first */
	uint32_t heads;  /* that exist */
	uint32_t b0, b1; /* blocks of keys; ITEM_MERGE: b0: the first row */
};

struct prefill_args {
	CUtensorMap q, kv;
	attn_args a;
	uint32_t pairs;     /* items a KV head */
	float *parts;       /* results of divided tiles, [part][head]: [64][DIM] sums, [64] of {m, l} */
	uint32_t *ticket;   /* next item; blocks that are done; then a counter a (divided tile, item of it) */
};

/* ---- where things are ------------------------------------------------------------------- */

template <int DIM> struct areas {
	uint32_t q, k, v, bars;
	float4 *total;
	volatile item *items;

	__device__ __forceinline__ explicit areas(uint8_t *raw)
	{
		uint8_t *at = raw + (-smem_addr(raw) & 1023);

		q = smem_addr(at);
		k = q + shape<DIM>::q_bytes;
		v = k + shape<DIM>::stages * shape<DIM>::stage_bytes;
		bars = v + shape<DIM>::stages * shape<DIM>::stage_bytes;
		total = (float4 *)(at + (bars - q));
		bars += shape<DIM>::total_bytes;
		items = (volatile item *)(at + (bars - q) + 256);
	}
	__device__ __forceinline__ uint32_t q_full(void) const { return bars; }
	__device__ __forceinline__ uint32_t q_empty(void) const { return bars + 8; }
	__device__ __forceinline__ uint32_t k_full(uint32_t i) const { return bars + 16 + i * 32; }
	__device__ __forceinline__ uint32_t k_empty(uint32_t i) const { return bars + 24 + i * 32; }
	__device__ __forceinline__ uint32_t v_full(uint32_t i) const { return bars + 32 + i * 32; }
	__device__ __forceinline__ uint32_t v_empty(uint32_t i) const { return bars + 40 + i * 32; }
};

struct ring { /* place in the ring of keys' and values' stages */
	uint32_t at, phase;

	template <int DIM> __device__ __forceinline__ void next(void)
	{
		if (++at == shape<DIM>::stages) {
			at = 0;
			phase ^= 1;
		}
	}
};

template <int DIM> DEV float *part_of(const prefill_args &g, uint32_t part, uint32_t head)
{
	return g.parts + ((size_t)part * g.a.n_heads + head) * (ROWS * (DIM + 2));
}
DEV uint32_t *counter_of(const prefill_args &g, const apr_cuda_attn_tile &t, uint32_t kvh, uint32_t pair)
{
	return g.ticket + 2 + (t.merge * g.a.kv.n_kv_heads + kvh) * g.pairs + pair;
}

/* ---- the copying thread ------------------------------------------------------------------- */

template <int DIM> struct producer {
	const prefill_args &g;
	const areas<DIM> &s;
	ring r = {0, 1};

	__device__ __forceinline__ void queries(const item &w) const
	{
		mbar_expect(s.q_full(), shape<DIM>::q_bytes);
#pragma unroll
		for (int h = 0; h < shape<DIM>::heads; h++) { /* a head alone comes twice */
			uint32_t head = w.head + min((uint32_t)h, w.heads - 1);

#pragma unroll
			for (int i = 0; i < shape<DIM>::halves; i++)
				tensor_copy(s.q + h * shape<DIM>::page_bytes + i * 8192, &g.q, 0, w.t.row,
				            head * shape<DIM>::halves + i, s.q_full());
		}
	}
	/* Pages p0 … p1 of keys and of values, those of a block at a time */
	__device__ __forceinline__ void block(const item &w, uint32_t kvh, uint32_t b, uint32_t p0, uint32_t p1)
	{
		const proj_kv &kv = g.a.kv;
		uint32_t row[shape<DIM>::pages], n = 0;
		bool in[shape<DIM>::pages];

#pragma unroll
		for (uint32_t i = 0; i < shape<DIM>::pages; i++) {
			uint32_t p = b * shape<DIM>::pages + i;

			in[i] = p >= p0 && p <= p1;
			n += in[i];
			row[i] = in[i] ? ((__ldcg(kv.table + (size_t)w.t.slot * kv.max_pages + p) * kv.n_layers + kv.layer) * 2 *
			                          kv.n_kv_heads +
			                  kvh) * 64
			               : 0;
		}
		mbar_wait(s.k_empty(r.at), r.phase);
		mbar_expect(s.k_full(r.at), n * shape<DIM>::page_bytes);
#pragma unroll
		for (int i = 0; i < shape<DIM>::pages; i++)
			for (int h = 0; in[i] && h < shape<DIM>::halves; h++)
				tensor_copy(s.k + r.at * shape<DIM>::stage_bytes + h * shape<DIM>::block * 128 + i * 8192, &g.kv, 0,
				            row[i], h, s.k_full(r.at));
		mbar_wait(s.v_empty(r.at), r.phase);
		mbar_expect(s.v_full(r.at), n * shape<DIM>::page_bytes);
#pragma unroll
		for (int i = 0; i < shape<DIM>::pages; i++)
			for (int h = 0; in[i] && h < shape<DIM>::halves; h++)
				tensor_copy(s.v + r.at * shape<DIM>::stage_bytes + i * shape<DIM>::page_bytes + h * 8192, &g.kv, 0,
				            row[i] + kv.n_kv_heads * 64, h, s.v_full(r.at));
		r.next<DIM>();
	}
	/* The tile's item, or the merge, that a ticket stands for */
	__device__ __forceinline__ item item_of(uint32_t n, uint32_t n_tiles, uint32_t n_merges) const
	{
		const uint32_t each = g.a.kv.n_kv_heads * g.pairs, merges = g.a.n_heads * (ROWS / MERGE_ROWS);
		item w = {};

		if (n < n_tiles * each) {
			uint32_t pair = n % each % g.pairs, kvh = n % each / g.pairs;

			w.kind = ITEM_ROWS;
			w.t = g.a.tiles[n / each];
			w.head = kvh * g.a.group + pair * shape<DIM>::heads;
			w.heads = min((uint32_t)shape<DIM>::heads, g.a.group - pair * shape<DIM>::heads);
			w.b0 = max(attn_first(w.t.pos, g.a.window) / shape<DIM>::block, w.t.seg * shape<DIM>::seg_blocks);
			w.b1 = min((w.t.pos + w.t.rows - 1) / shape<DIM>::block + 1,
			           (w.t.seg + w.t.segs) * shape<DIM>::seg_blocks);
			if (w.t.rows == 0)
				w.b1 = 0;
		} else if (n - n_tiles * each < n_merges * merges) {
			n -= n_tiles * each;
			w.kind = ITEM_MERGE;
			w.t = g.a.tiles[n_tiles + n / merges];
			w.head = n % merges / (ROWS / MERGE_ROWS);
			w.b0 = n % (ROWS / MERGE_ROWS) * MERGE_ROWS;
		}
		return w;
	}
	__device__ __forceinline__ void run(void)
	{
		const uint32_t n_tiles = g.a.n_tiles[0], n_merges = g.a.n_tiles[1];
		item w;

		for (uint32_t q = 0;; q++) {
			w = item_of(q ? atomicAdd(g.ticket, 1) + gridDim.x : blockIdx.x, n_tiles, n_merges);
			mbar_wait(s.q_empty(), ~q & 1);
			*(item *)&s.items[q & 1] = w;
			if (w.kind != ITEM_ROWS || w.b0 >= w.b1) {
				mbar_arrive(s.q_full());
				if (w.kind == ITEM_END)
					return;
				continue;
			}
			queries(w);
			for (uint32_t b = w.b0; b < w.b1; b++)
				block(w, w.head / g.a.group, b, attn_first(w.t.pos, g.a.window) / 64,
				      (w.t.pos + w.t.rows - 1) / 64);
		}
	}
};

/* ---- a warpgroup's rows -------------------------------------------------------------------- */

template <int DIM, bool CAP> struct consumer {
	typedef shape<DIM> sh;
	const prefill_args &g;
	const areas<DIM> &s;
	const uint32_t wg, lane, row0; /* this lane's rows of the tile: row0 and row0 + 8 */
	ring r = {0, 0}, before = {0, 0};
	float o[sh::cols / 2], x[sh::block / 2]; /* the segment's sum; scores, then weights */
	uint32_t p[sh::block / 4], q[DIM / 4];
	float m[2], l[2], keep[2], factor[2];
	attn_merge mg[2];
	int adds; /* o holds something of this segment */
	bool some; /* segments have been merged into the total */

	__device__ __forceinline__ consumer(const prefill_args &args, const areas<DIM> &areas)
		: g(args), s(areas), wg(__shfl_sync(~0u, threadIdx.x / 128 - 1, 0)), lane(threadIdx.x & 31),
		  row0((threadIdx.x / 32 & 3) * 16 + (lane >> 2))
	{
	}
	__device__ __forceinline__ void arrive(uint32_t bar) const
	{
		if (lane == 0)
			mbar_arrive(bar);
	}
	__device__ __forceinline__ void load_queries(void)
	{
		const uint32_t at = s.q + (sh::heads > 1 ? wg * sh::page_bytes : 0), row = (threadIdx.x / 32 & 3) * 16 + (lane & 15);

#pragma unroll
		for (int k = 0; k < DIM / 16; k++)
			ldmatrix4<false>(q + k * 4, at + (k >> 2) * 8192 + row * 128 + ((((k & 3) * 2 + (lane >> 4)) ^ (row & 7)) << 4));
	}
	__device__ __forceinline__ void queries_read(void) const
	{
		__syncwarp();
		fence_reads_before_refill();
		__syncwarp();
		arrive(s.q_empty());
	}
	__device__ __forceinline__ void issue_scores(void)
	{
		const uint64_t k0 = wgmma_operand(s.k + r.at * sh::stage_bytes, 16);

		wgmma_fence();
#pragma unroll
		for (int k = 0; k < DIM / 16; k++)
			wgmma<sh::block, false>(x, q + k * 4, k0 + (((k >> 2) * sh::block * 128 + (k & 3) * 32) >> 4), k > 0);
		wgmma_commit();
	}
	__device__ __forceinline__ void issue_values(void)
	{
		const uint64_t v0 = wgmma_operand(s.v + before.at * sh::stage_bytes + (sh::heads > 1 ? 0 : wg * (sh::cols / 64) * 8192),
		                                  8192);

		wgmma_fence();
#pragma unroll
		for (int k = 0; k < sh::block / 16; k++)
			wgmma<sh::cols, true>(o, p + k * 4, v0 + (((k >> 2) * sh::page_bytes + (k & 3) * 2048) >> 4), k > 0 ? 1 : adds);
		wgmma_commit();
	}
	/* Values of keys that are not there: 0 × NaN is not 0. Rows from … to - 1 of the stage, by both warpgroups. */
	__device__ __forceinline__ void zero_values(uint32_t stage, uint32_t from, uint32_t to) const
	{
		for (uint32_t i = threadIdx.x - 128; i < (to - from) * (DIM / 8); i += CONSUMERS) {
			uint32_t row = from + i / (DIM / 8), c = i % (DIM / 8);

			asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(s.v + stage * sh::stage_bytes + row / 64 * sh::page_bytes +
			                                                           c / 8 * 8192 + row % 64 * 128 + c % 8 * 16),
			             "r"(0)
			             : "memory");
		}
		fence_reads_before_refill(); /* the products read by the same proxy as the copies write */
		named_barrier<1, CONSUMERS>();
	}
	__device__ __forceinline__ void mask(uint32_t key0, uint32_t pos, uint32_t window)
	{
		const uint32_t pos0 = pos + row0, first0 = attn_first(pos0, window), first1 = attn_first(pos0 + 8, window);

#pragma unroll
		for (int j = 0; j < sh::block / 8; j++)
#pragma unroll
			for (int e = 0; e < 2; e++) {
				uint32_t key = key0 + j * 8 + (lane & 3) * 2 + e;

				if (key > pos0 || key < first0)
					x[j * 4 + e] = -INFINITY;
				if (key > pos0 + 8 || key < first1)
					x[j * 4 + 2 + e] = -INFINITY;
			}
	}
	/* Scores to weights; the state moves on to the new largest score. keep: what the sum before is to be multiplied by */
	template <bool FRESH> __device__ __forceinline__ void weigh(uint32_t b, uint32_t pos, uint32_t last)
	{
		const attn_args &a = g.a;
		float mx[2][2], sum[2][2] = {}, base[2];

		if (CAP)
#pragma unroll
			for (int i = 0; i < sh::block / 2; i++)
				x[i] = attn_score_as<true>(a, x[i], factor[i >> 1 & 1]);
		if (b * sh::block + sh::block - 1 > pos || b * sh::block < attn_first(last, a.window))
			mask(b * sh::block, pos, a.window);
#pragma unroll
		for (int i = 0; i < 4; i++) /* [parity of j][row] */
			mx[i >> 1][i & 1] = fmaxf(x[(i >> 1) * 4 + (i & 1) * 2], x[(i >> 1) * 4 + (i & 1) * 2 + 1]);
#pragma unroll
		for (int j = 2; j < sh::block / 8; j++)
#pragma unroll
			for (int e = 0; e < 2; e++)
				mx[j & 1][e] = fmaxf(mx[j & 1][e], fmaxf(x[j * 4 + e * 2], x[j * 4 + e * 2 + 1]));
#pragma unroll
		for (int e = 0; e < 2; e++) {
			float f = CAP ? 1.0f : factor[e], n = fmaxf(mx[0][e], mx[1][e]);

			n = fmaxf(n, __shfl_xor_sync(~0u, n, 1));
			n = fmaxf(n, __shfl_xor_sync(~0u, n, 2));
			n = FRESH ? n : fmaxf(n, m[e]);
			base[e] = n == -INFINITY ? 0.0f : n;
			keep[e] = FRESH ? 0.0f : exp2_fast((m[e] - base[e]) * f);
			m[e] = n;
			base[e] = -(base[e] * f);
		}
#pragma unroll
		for (int j = 0; j < sh::block / 8; j++)
#pragma unroll
			for (int e = 0; e < 2; e++) {
				float f = CAP ? 1.0f : factor[e];
				float u = exp2_fast(fmaf(x[j * 4 + e * 2], f, base[e])), v = exp2_fast(fmaf(x[j * 4 + e * 2 + 1], f, base[e]));

				x[j * 4 + e * 2] = u;
				x[j * 4 + e * 2 + 1] = v;
				sum[j & 1][e] += u + v;
			}
#pragma unroll
		for (int e = 0; e < 2; e++)
			l[e] = FRESH ? sum[0][e] + sum[1][e] : fmaf(l[e], keep[e], sum[0][e] + sum[1][e]);
	}
	__device__ __forceinline__ void pack(void)
	{
#pragma unroll
		for (int i = 0; i < sh::block / 4; i++)
			p[i] = pack_half2(x[i * 2], x[i * 2 + 1]);
	}
	/* Of a segment that is complete: m in units of log2, l over the four lanes of a row */
	__device__ __forceinline__ void seal(float *ms, float *ls) const
	{
#pragma unroll
		for (int e = 0; e < 2; e++) {
			ms[e] = CAP ? ms[e] : ms[e] * factor[e];
			ls[e] += __shfl_xor_sync(~0u, ls[e], 1);
			ls[e] += __shfl_xor_sync(~0u, ls[e], 2);
		}
	}
	/* The segment joins those before it: the total is in shared memory, each thread's own; in o too after it */
	__device__ __forceinline__ void merge(const float *ms, const float *ls, bool keep_total)
	{
		float4 *t = s.total + (threadIdx.x - 128);

#pragma unroll
		for (int e = 0; e < 2; e++)
			mg[e].segment(ms[e], ls[e]);
#pragma unroll
		for (int i = 0; i < sh::cols / 8; i++) {
			float4 v = some ? t[i * CONSUMERS] : make_float4(0, 0, 0, 0);

			o[i * 4] = mg[0].sum(v.x, o[i * 4]);
			o[i * 4 + 1] = mg[0].sum(v.y, o[i * 4 + 1]);
			o[i * 4 + 2] = mg[1].sum(v.z, o[i * 4 + 2]);
			o[i * 4 + 3] = mg[1].sum(v.w, o[i * 4 + 3]);
			if (keep_total)
				t[i * CONSUMERS] = make_float4(o[i * 4], o[i * 4 + 1], o[i * 4 + 2], o[i * 4 + 3]);
		}
		some = true;
	}
	/* rows of floats, stride apart, from column 0 of this warpgroup; those at or past n are not written */
	__device__ __forceinline__ void store(float *dst, size_t stride, uint32_t n, const float *by) const
	{
#pragma unroll
		for (int e = 0; e < 2; e++) {
			if (row0 + e * 8 >= n)
				continue;
#pragma unroll
			for (int i = 0; i < sh::cols / 8; i++)
				*(float2 *)(dst + (row0 + e * 8) * stride + i * 8 + (lane & 3) * 2) =
						make_float2(fmaf(o[i * 4 + e * 2], by[e], 0.0f), fmaf(o[i * 4 + e * 2 + 1], by[e], 0.0f));
		}
	}
	__device__ __forceinline__ uint32_t head_of(const volatile item *w) const
	{
		return w->head + (sh::heads > 1 ? wg : 0);
	}
	__device__ __forceinline__ bool idle(const volatile item *w) const { return sh::heads > 1 && wg >= w->heads; }
	__device__ __forceinline__ uint32_t col0(void) const { return sh::heads > 1 ? 0 : wg * sh::cols; }

	__device__ __forceinline__ void store_part(const volatile item *w, uint32_t b, const float *ms, const float *ls) const
	{
		const float one[2] = {1.0f, 1.0f};
		float *part = part_of<DIM>(g, w->t.part + b / sh::seg_blocks, head_of(w));

		if (idle(w))
			return;
		store(part + col0(), DIM, ROWS, one);
		if ((lane & 3) == 0 && col0() == 0) {
			float2 *ml = (float2 *)(part + ROWS * DIM);

			ml[row0] = make_float2(ms[0], ls[0]);
			ml[row0 + 8] = make_float2(ms[1], ls[1]);
		}
	}
	/* The segment that ends with block b */
	__device__ __forceinline__ void end_segment(const volatile item *w, uint32_t b, float *ms, float *ls, bool last)
	{
		seal(ms, ls);
		if (w->t.merge != APR_CUDA_WHOLE)
			store_part(w, b, ms, ls);
		else
			merge(ms, ls, !last);
	}
	template <bool FRESH> __device__ __forceinline__ void step(const volatile item *w, uint32_t b, uint32_t pos, uint32_t last)
	{
		float old_m[2] = {m[0], m[1]}, old_l[2] = {l[0], l[1]};

		mbar_wait(s.k_full(r.at), r.phase);
		issue_scores();
		mbar_wait(s.v_full(before.at), before.phase);
		issue_values();
		wgmma_wait<1>();
		wgmma_done<sh::block / 2>(x);
		arrive(s.k_empty(r.at));
		weigh<FRESH>(b, pos, last);
		wgmma_wait<0>();
		wgmma_done<sh::cols / 2>(o);
		arrive(s.v_empty(before.at));
		if (FRESH) {
			end_segment(w, b - 1, old_m, old_l, false);
		} else {
#pragma unroll
			for (int i = 0; i < sh::cols / 2; i++)
				o[i] *= keep[i >> 1 & 1];
		}
		adds = !FRESH;
		pack();
		before = r;
		r.next<DIM>();
	}
	/* Blocks b0 … b1 - 1. The values of a block are multiplied while the next one's scores are. */
	__device__ __forceinline__ void rows(const volatile item *w)
	{
		const uint32_t pos = w->t.pos, last = pos + w->t.rows - 1, b0 = w->b0, b1 = w->b1;
		const uint32_t skip = attn_first(pos, g.a.window) / 64 > b0 * sh::pages ? 64 : 0; /* a page before the window */
		const uint32_t live = min((uint32_t)sh::block, last + 1 - (b1 - 1) * sh::block);

		mbar_wait(s.k_full(r.at), r.phase);
		issue_scores();
		wgmma_wait<0>();
		wgmma_done<sh::block / 2>(x);
		arrive(s.k_empty(r.at));
		weigh<true>(b0, pos, last);
		pack();
		adds = 0;
		some = false;
		mg[0] = mg[1] = {-INFINITY, 0.0f, 0.0f, 0.0f};
		before = r;
		r.next<DIM>();
		if (skip) {
			mbar_wait(s.v_full(before.at), before.phase);
			zero_values(before.at, 0, skip);
		}
		for (uint32_t b = b0 + 1; b < b1;) {
			const uint32_t end = min(b1, ((b - 1) / sh::seg_blocks + 1) * sh::seg_blocks);

			for (; b < end; b++)
				step<false>(w, b, pos, last);
			if (b < b1)
				step<true>(w, b++, pos, last);
		}
		mbar_wait(s.v_full(before.at), before.phase);
		if (live < sh::block)
			zero_values(before.at, live, sh::block);
		issue_values();
		wgmma_wait<0>();
		wgmma_done<sh::cols / 2>(o);
		arrive(s.v_empty(before.at));
		end_segment(w, b1 - 1, m, l, true);
		if (w->t.merge == APR_CUDA_WHOLE && !idle(w)) {
			const float by[2] = {1.0f / mg[0].l, 1.0f / mg[1].l};

			store(g.a.o + ((size_t)w->t.row * g.a.n_heads + head_of(w)) * DIM + col0(), (size_t)g.a.n_heads * DIM, w->t.rows, by);
		}
	}
	/* Scales of this lane's rows of q, asked for before the first product */
	__device__ __forceinline__ void load_factors(const volatile item *w)
	{
		const attn_args &a = g.a;

#pragma unroll
		for (int e = 0; e < 2; e++) {
			uint32_t row = w->t.row + min(row0 + e * 8, w->t.rows - 1);

			/* not 0, which times a masked score were NaN */
			factor[e] = fmaxf(attn_factor(a, __ldcg(attn_units(a.q, row, a.n_heads, DIM) + min(head_of(w), a.n_heads - 1))), 1.2e-38f);
		}
	}
	__device__ __forceinline__ void tell_done(const volatile item *w) const
	{
		apr_cuda_attn_tile t;
		const uint32_t kvh = w->head / g.a.group;

		t.merge = w->t.merge;
		__threadfence();
		named_barrier<1, CONSUMERS>();
		if (threadIdx.x == 128)
			atomicAdd(counter_of(g, t, kvh, w->head % g.a.group / sh::heads), 1); /* pairs with merge_rows */
	}
	/* Rows b0 … of a head of a divided tile, from its parts */
	__device__ __forceinline__ void merge_rows(const volatile item *w) const
	{
		const uint32_t head = w->head, c = (threadIdx.x - 128) % 16, row = w->b0 + (threadIdx.x - 128) / 16;
		const uint32_t pos = w->t.pos, rows = w->t.rows, part0 = w->t.part, end = (pos + rows - 1) / SEG;
		float4 sum[DIM / 64] = {};
		attn_merge mr = {-INFINITY, 0.0f, 0.0f, 0.0f};
		apr_cuda_attn_tile t;

		t.merge = w->t.merge;
		if (threadIdx.x == 128) {
			const uint32_t *count = counter_of(g, t, head / g.a.group, head % g.a.group / sh::heads);
			uint32_t n;

			do /* every item was taken before a merge was: the block that has it does not wait. Pairs with tell_done */
				asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(count) : "memory");
			while (n < w->t.seg);
		}
		named_barrier<1, CONSUMERS>();
		if (row >= rows)
			return;
#pragma unroll 4
		for (uint32_t seg = attn_first(pos, g.a.window) / SEG; seg <= end; seg++) {
			const float *part = part_of<DIM>(g, part0 + seg, head);
			float2 ml = __ldcg((const float2 *)(part + ROWS * DIM) + row);
			float4 v[DIM / 64];

#pragma unroll
			for (int i = 0; i < DIM / 64; i++)
				v[i] = __ldcg((const float4 *)(part + row * DIM) + i * 16 + c);
			mr.segment(ml.x, ml.y);
#pragma unroll
			for (int i = 0; i < DIM / 64; i++)
				sum[i] = make_float4(mr.sum(sum[i].x, v[i].x), mr.sum(sum[i].y, v[i].y), mr.sum(sum[i].z, v[i].z),
				                     mr.sum(sum[i].w, v[i].w));
		}
		const float by = 1.0f / mr.l;
		float4 *dst = (float4 *)(g.a.o + ((size_t)(w->t.row + row) * g.a.n_heads + head) * DIM);
#pragma unroll
		for (int i = 0; i < DIM / 64; i++)
			dst[i * 16 + c] = make_float4(fmaf(sum[i].x, by, 0.0f), fmaf(sum[i].y, by, 0.0f), fmaf(sum[i].z, by, 0.0f),
			                              fmaf(sum[i].w, by, 0.0f));
	}
	__device__ __forceinline__ void run(void)
	{
		for (uint32_t n = 0;; n++) {
			const volatile item *w = &s.items[n & 1];

			mbar_wait(s.q_full(), n & 1);
			if (w->kind == ITEM_END)
				break;
			if (w->kind == ITEM_MERGE) {
				merge_rows(w);
				__syncwarp();
				arrive(s.q_empty());
				continue;
			}
			if (w->b0 < w->b1) {
				load_factors(w);
				load_queries();
				queries_read();
				rows(w);
			} else {
				arrive(s.q_empty());
			}
			if (w->t.merge != APR_CUDA_WHOLE)
				tell_done(w);
		}
	}
	/* The last block leaves the counters as it found them */
	__device__ __forceinline__ void leave(void) const
	{
		named_barrier<1, CONSUMERS>();
		if (threadIdx.x != 128)
			return;
		__threadfence();
		if (atomicAdd(g.ticket + 1, 1) + 1 != gridDim.x)
			return;
		__threadfence();
		for (uint32_t i = 0; i < 2 + g.a.n_tiles[1] * g.a.kv.n_kv_heads * g.pairs; i++)
			g.ticket[i] = 0;
	}
};

template <int DIM, bool CAP> static __global__ void __launch_bounds__(THREADS, 1)
		attn_prefill(const __grid_constant__ prefill_args g)
{
	extern __shared__ __align__(128) uint8_t raw[];
	const areas<DIM> s(raw);

	pdl_next();
	if (threadIdx.x == 0) {
		mbar_init_many(s.q_full(), 1);
		mbar_init_many(s.q_empty(), CONSUMERS / 32);
		for (int i = 0; i < shape<DIM>::stages; i++) {
			mbar_init_many(s.k_full(i), 1);
			mbar_init_many(s.k_empty(i), CONSUMERS / 32);
			mbar_init_many(s.v_full(i), 1);
			mbar_init_many(s.v_empty(i), CONSUMERS / 32);
		}
		mbar_init_fence();
	}
	__syncthreads();
	pdl_wait();
	if (threadIdx.x < 128) {
		fewer_registers<40>();
		if (threadIdx.x == 0) {
			producer<DIM> p = {g, s};

			p.run();
		}
		return;
	}
	more_registers<232>();
	consumer<DIM, CAP> c(g, s);

	c.run();
	c.leave();
}

/* ---- launch ------------------------------------------------------------------------------------- */

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                              const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* n rows of pieces of 64 halves, `stride` bytes from row to row: boxes are 64 rows of one piece */
static int map_rows(CUtensorMap *m, const void *base, uint64_t n, uint64_t pieces, uint64_t stride)
{
	const cuuint64_t size[3] = {64, n, pieces}, strides[2] = {stride, 128};
	const cuuint32_t box[3] = {64, 64, 1}, each[3] = {1, 1, 1};
	cudaDriverEntryPointQueryResult found;
	void *fn = NULL;

	if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &fn, 12000, cudaEnableDefault, &found) !=
	            cudaSuccess ||
	    found != cudaDriverEntryPointSuccess)
		return -EIO;
	return ((encode_fn)fn)(m, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, (void *)base, size, strides, box, each,
	                       CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
	                       CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE)
	               ? -EIO
	               : 0;
}

static uint32_t pairs_of(uint32_t group, uint32_t dim)
{
	return dim > 128 ? group : (group + 1) / 2;
}

extern "C" uint32_t apr_cuda_attn_items(const apr_cuda_limits *l)
{
	return l->n_kv_heads * pairs_of(l->n_heads / l->n_kv_heads, l->k_dim);
}
extern "C" uint32_t apr_cuda_attn_parts(const apr_cuda_limits *l)
{
	uint32_t segs = (l->n_ctx + SEG - 1) / SEG, some = 1024 / l->n_heads; /* of few heads more fit the same bytes */

	some = some > segs * 4 ? some : segs * 4;
	return segs < 2 ? 0 : segs > APR_CUDA_ATTN_RANGES ? segs : some < APR_CUDA_ATTN_RANGES ? some : APR_CUDA_ATTN_RANGES;
}

template <int DIM> static int launch_dim(const apr_cuda_launch *l, const apr_op_attn *op, prefill_args *g,
                                         uint32_t max_tiles)
{
	const apr_kv_group *kv = op->kv.group;
	uint64_t items;
	int rc;

	g->pairs = pairs_of(g->a.group, DIM);
	items = (uint64_t)max_tiles * op->n_kv_heads * g->pairs;
	if (items > UINT32_MAX / 8 || l->scratch_bytes < SCRATCH_COUNTERS ||
	    ((uint64_t)APR_CUDA_ATTN_DIVIDED * op->n_kv_heads * g->pairs + 2) * 4 > SCRATCH_COUNTERS)
		return -EINVAL;
	rc = map_rows(&g->q, op->q, l->bucket, (uint64_t)op->n_heads * shape<DIM>::halves, (uint64_t)op->n_heads * DIM * 4);
	if (!rc)
		rc = map_rows(&g->kv, kv->pool, (uint64_t)kv->n_pages * kv->n_layers * 2 * op->n_kv_heads * 64,
		              shape<DIM>::halves, DIM * 2);
	if (rc)
		return rc;
	return op->softcap != 0.0f ? launch(attn_prefill<DIM, true>, dim3(items < l->sms ? (uint32_t)items : l->sms), THREADS,
	                                    shape<DIM>::smem, l->stream, l->pdl, *g)
	                           : launch(attn_prefill<DIM, false>, dim3(items < l->sms ? (uint32_t)items : l->sms), THREADS,
	                                    shape<DIM>::smem, l->stream, l->pdl, *g);
}

extern "C" int apr_cuda_prefill_attn(const apr_cuda_launch *l, const apr_op_attn *op, const apr_cuda_attn_tile *tiles,
                                     const uint32_t *n_tiles, uint32_t max_tiles)
{
	prefill_args g = {};

	g.a = attn_args_of(l, op);
	g.a.tiles = tiles;
	g.a.n_tiles = n_tiles;
	if (!max_tiles)
		return -EINVAL;
	if (!attn_on_tensor_cores(op))
		return attn_plain_launch(l, &g.a);
	if (!attn_queries_half(op->kv.group, op->k_dim, op->v_dim))
		return attn_mma_launch(l, op, &g.a, max_tiles);
	g.ticket = (uint32_t *)l->scratch;
	g.parts = (float *)((uint8_t *)l->scratch + SCRATCH_COUNTERS);
	return op->k_dim == 64    ? launch_dim<64>(l, op, &g, max_tiles)
	       : op->k_dim == 128 ? launch_dim<128>(l, op, &g, max_tiles)
	                          : launch_dim<256>(l, op, &g, max_tiles);
}
