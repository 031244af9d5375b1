/* SPDX-License-Identifier: MIT */
/*
 * Decode projections: up to 64 columns of activations times weights in their tiles.
 *
 * Owns: the kernel that streams tiles through a ring a warp and sums chunks of K by
 * one fixed tree. Does not own the products of a tile (products.cuh), what becomes
 * of a sum (proj.cuh), nor which matrices go together (decode_ops.cu). The scalar
 * reference is apr_ref_proj in sm90_any_proj_decode_ref.h.
 *
 * A block of 16 warps works on 16 / C pairs of row tiles at a time; warp w has chunk
 * w mod C of K. Its ring is refilled by the copy engine while it multiplies, and the
 * first stages are asked for before the previous kernel has ended: weights do not
 * depend on it.
 */
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/proj.cuh"

#define WARPS 16u

/* Units of 32 rows dealt to workers: whole rounds, then what is left, halved where that keeps more of them busy. */
struct work_list {
	uint32_t rounds, tail, tail_unit, tail_half; /* tail: 0 none, 1 a whole unit, 2 half of one */
};
HD work_list deal_work(uint32_t units, uint32_t workers, uint32_t me)
{
	work_list w = {units / workers, 0, 0, 0};
	uint32_t done = w.rounds * workers, left = units - done;

	w.tail_unit = done;
	if (2 * left <= workers) {
		if (me < 2 * left) {
			w.tail = 2;
			w.tail_unit = done + (me >> 1);
			w.tail_half = me & 1;
		}
	} else if (me < left) {
		w.tail = 1;
		w.tail_unit = done + me;
	}
	return w;
}
/* Item j of a worker: its unit, or units (none) */
HD uint32_t work_unit(const work_list &w, uint32_t workers, uint32_t me, uint32_t j)
{
	return j < w.rounds ? j * workers + me : w.tail_unit;
}

/* Which matrix a unit of the whole launch is of; unit becomes its own */
DEV uint32_t mat_of(const proj_args &a, uint32_t &unit)
{
	uint32_t i = 0;

	while (i + 1 < a.n_mats && unit >= a.mat[i].pairs)
		unit -= a.mat[i++].pairs;
	return i;
}

/* The side of the ring that asks for stages: an item, a place in its chunk. The whole warp keeps it in step. From item to
 * item of one matrix only a constant is added: this runs between products, whose speed instructions limit. */
template <uint32_t MASK> struct feeder {
	const uint8_t *src;
	uint32_t left, slot, items; /* bytes of this item's chunk, the slot to fill, items from this one on */
	uint32_t unit, end, m, skip,
			chunk_bytes; /* of the matrix: its last unit + 1, what lies between two items' chunks */

	static __device__ __forceinline__ uint32_t tile_of(const proj_args &a, uint32_t i)
	{
		return (MASK & (MASK - 1)) == 0 ? 31 - __clz(MASK) : a.mat[i].tile;
	}
	/* The item at hand, from scratch: the first, the first of a matrix, a half */
	__device__ __forceinline__ void open(const proj_args &a, const work_list &w, uint32_t step, uint32_t k_begin,
	                                     uint32_t k_end)
	{
		const bool half = items == 1 && w.tail == 2;

		if (half)
			unit = w.tail_unit;
		while (unit >= end)
			end += a.mat[++m].pairs;
		const uint32_t tile = tile_of(a, m), size = tile_size(tile), kt = tile_k(tile), pair = a.mat[m].pair_bytes;

		chunk_bytes = left = (k_end - k_begin + kt - 1) / kt * 2 * size;
		skip = step * pair - chunk_bytes;
		src = a.mat[m].tiles + (size_t)(unit - (end - a.mat[m].pairs)) * pair + (size_t)(k_begin / kt) * 2 * size +
		      (half ? w.tail_half * size : 0);
	}
	__device__ __forceinline__ void start(const proj_args &a, const work_list &w, uint32_t me, uint32_t step,
	                                      uint32_t k_begin, uint32_t k_end)
	{
		unit = me;
		m = slot = 0;
		end = a.mat[0].pairs;
		items = w.rounds + (w.tail ? 1 : 0);
		if (items)
			open(a, w, step, k_begin, k_end);
	}
	__device__ __forceinline__ void put(const proj_args &a, const work_list &w, uint32_t step, uint32_t k_begin,
	                                    uint32_t k_end, uint32_t ring, uint32_t bars)
	{
		if (!items)
			return;
		const uint32_t bytes = min(left, stage_size(tile_of(a, m))), dst = ring + slot * a.slot_bytes,
					   bar = bars + slot * 8;

		if (items == 1 && w.tail == 2) { /* one row tile of each two: the other's place keeps what it had, unused */
			if (elect_one()) {
				const uint32_t size = tile_size(tile_of(a, m));

				mbar_expect(bar, bytes / 2);
				for (uint32_t i = 0; i < bytes; i += 2 * size)
					bulk_copy(dst + i, src + i, size, bar);
			}
		} else if (elect_one()) {
			mbar_expect(bar, bytes);
			bulk_copy(dst, src, bytes, bar);
		}
		src += bytes;
		left -= bytes;
		slot = slot + 1 == a.slots ? 0 : slot + 1;
		if (left)
			return;
		items--;
		unit += step;
		if (unit < end && !(items == 1 && w.tail == 2)) {
			src += skip;
			left = chunk_bytes;
		} else if (items) {
			open(a, w, step, k_begin, k_end);
		}
	}
};

struct reader { /* the side that multiplies */
	uint32_t slot, phase;

	__device__ __forceinline__ void next(uint32_t slots)
	{
		if (++slot == slots) {
			slot = 0;
			phase ^= 1;
		}
	}
};

/* One item: the chunk's products with two row tiles, stage by stage */
template <int TILE, int NTM, uint32_t MASK>
static __device__ __forceinline__ void run_item(const proj_args &a, const work_list &w, uint32_t step, uint32_t ring,
                                                uint32_t bars, feeder<MASK> &f, reader &rd, const Acts<NTM> &x,
                                                uint32_t k_begin, uint32_t k_end, float (*acc)[Acts<NTM>::NT][4])
{
	const int lane = threadIdx.x & 31;

	for (uint32_t k = k_begin; k < k_end; k += stage_k(TILE)) {
		const uint32_t sp = ring + rd.slot * a.slot_bytes;
		const uint32_t n = (min(k_end, k + stage_k(TILE)) - k + tile_k(TILE) - 1) / tile_k(TILE);

		mbar_wait(bars + rd.slot * 8, rd.phase);
		if constexpr (TILE == APR_TILE_Q6_K) {
			Stage<TILE> s0, s1;

			s0.load(sp, lane);
			if (NTM)
				s0.mul(x, k, acc[0]);
			s1.load(sp + tile_size(TILE), lane);
			fence_reads_before_refill();
			__syncwarp();
			f.put(a, w, step, k_begin, k_end, ring, bars);
			if (!NTM)
				s0.mul(x, k, acc[0]);
			s1.mul(x, k, acc[1]);
		} else {
			Stage<TILE> s;

			s.load(sp, lane, n);
			fence_reads_before_refill();
			__syncwarp();
			f.put(a, w, step, k_begin, k_end, ring, bars);
			s.mul(x, k, n, lane, acc);
		}
		rd.next(a.slots);
	}
}

/* Chunk sums of one item to shared memory: [column][36] or, for one column, [32] */
template <int NTM> DEV void store_sums(float *o, const float (*acc)[Acts<NTM>::NT][4], const float *unscale)
{
	const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

#pragma unroll
	for (int r = 0; r < 2; r++) {
		if constexpr (NTM == 0) {
			if (t == 0) {
				o[r * 16 + g] = acc[r][0][0] * unscale[0];
				o[r * 16 + g + 8] = acc[r][0][2] * unscale[0];
			}
		} else {
#pragma unroll
			for (int n = 0; n < Acts<NTM>::NT; n++) {
				float *c = o + (n * 8 + 2 * t) * 36 + r * 16 + g;

				c[0] = acc[r][n][0] * unscale[2 * n];
				c[36] = acc[r][n][1] * unscale[2 * n + 1];
				c[8] = acc[r][n][2] * unscale[2 * n];
				c[44] = acc[r][n][3] * unscale[2 * n + 1];
			}
		}
	}
}

/* The tree over the chunks, then the epilogue, for items first … last - 1 of all the block's workers */
template <int NTM> DEV void fold_sums(const proj_args &a, const float *part, uint32_t first, uint32_t last,
                                      uint32_t group0, uint32_t n_cols, uint32_t workers, uint32_t col0,
                                      const proj_heads &heads, const work_list &own)
{
	const uint32_t cols = NTM ? 8 * NTM : 1, C = a.chunks.chunks, teams = WARPS / C, stride = NTM ? 36 * cols : 32;

	for (uint32_t o = threadIdx.x >> 5; o < (last - first) * teams * cols; o += WARPS) {
		const uint32_t place = o / cols, c = o % cols, me = group0 + place % teams, j = first + place / teams;
		const work_list w = teams == 1 ? own : deal_work(a.pairs, workers, me); /* a division less where it can be */
		const uint32_t lane = threadIdx.x & 31;
		bool live = col0 + c < n_cols;
		float v[16];

		if (j >= w.rounds + (w.tail ? 1 : 0))
			continue;
		uint32_t unit = work_unit(w, workers, me, j), m = mat_of(a, unit), p = unit * 32 + lane;

		if (j == w.rounds && w.tail == 2) { /* this half's rows lie in the first sixteen places */
			p = unit * 32 + w.tail_half * 16 + (lane & 15);
			live = live && lane < 16;
		}
#pragma unroll
		for (uint32_t i = 0; i < 16; i++)
			v[i] = i < C ? part[(place * C + i) * stride + c * (NTM ? 36 : 0) + lane] : 0.0f;
#pragma unroll
		for (uint32_t s = 1; s < 16; s *= 2)
#pragma unroll
			for (uint32_t i = 0; i < 16; i += 2 * s)
				if (s < C)
					v[i] = v[i] + v[i + s];
		proj_finish(a, a.mat[m], heads, p, col0 + c, c, v[0], live && p < a.mat[m].n_out);
	}
}

/* One column: this block's own activations, in shared memory. Waits for the previous kernel. Returns the warp's scale. */
DEV float prologue_one(const proj_args &a, uint8_t *xs, float *h, float *red, float *scales, uint32_t chunk,
                       uint32_t team)
{
	const float *row = a.in;

	if (a.norm.x) {
		add_norm_args n = a.norm;

		n.live = a.n_live;
		if (blockIdx.x)
			n.x_out = NULL;
		if (a.pick) { /* the row is known only when the previous kernel has ended; a step of no rows has none */
			pdl_wait();
			size_t at = *a.n_live ? (size_t)a.pick[0] * n.n : 0;

			n.x += at;
			n.y = n.y ? n.y + at : NULL;
		}
		row_add_norm_any<true>(n, h, red);
		row = h;
	} else {
		pdl_wait();
	}
	if (team == 0) {
		float s = act_chunk<false>(row, a.k, chunk_begin(a.chunks, chunk), chunk_begin(a.chunks, chunk + 1), a.bf16, xs,
		                           0);

		if ((threadIdx.x & 31) == 0)
			scales[chunk] = s;
	}
	if (a.chunks.chunks < WARPS)
		__syncthreads();
	else
		__syncwarp();
	return scales[chunk];
}

/* MASK: the tile types that the launch can meet. Those that meet often have a kernel of their own: all seven in one cost
 * registers that none of them needs. */
template <int NTM, uint32_t MASK> static __global__ void __launch_bounds__(WARPS * 32, 1)
		proj_decode(const __grid_constant__ proj_args a)
{
	extern __shared__ __align__(128) uint8_t sm[];
	const uint32_t lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
	const uint32_t C = a.chunks.chunks, teams = WARPS / C, chunk = warp % C, team = warp / C;
	const uint32_t workers = gridDim.x * teams, me = blockIdx.x * teams + team, col0 = blockIdx.y * (NTM ? 8 * NTM : 1);
	const uint32_t k_begin = chunk_begin(a.chunks, chunk) * 32, k_end = chunk_begin(a.chunks, chunk + 1) * 32;
	const work_list w = deal_work(a.pairs, workers, me);
	const uint32_t items = w.rounds + (w.tail ? 1 : 0), rounds = (a.pairs + workers - 1) / workers;
	const uint32_t ring = smem_addr(sm) + warp * a.slots * a.slot_bytes;
	uint8_t *after = sm + WARPS * a.slots * a.slot_bytes;
	const uint32_t bars = smem_addr(after) + warp * a.slots * 8;
	float *red = (float *)(after + WARPS * a.slots * 8), *scales = red + 2 * ROW_WARPS;
	proj_heads *heads = (proj_heads *)(scales + 16);
	float *part = (float *)(heads + 1);
	const uint32_t part_size = a.fold * WARPS * (NTM ? 36 * 8 * NTM : 32), parts = rounds > a.fold ? 2 : 1;
	uint8_t *xs = (uint8_t *)(part + parts * part_size);
	float unscale[2 * Acts<NTM>::NT];
	feeder<MASK> f;
	reader rd = {0, 0};
	Acts<NTM> x;

	if (lane == 0) {
		for (uint32_t i = 0; i < a.slots; i++)
			mbar_init(bars + i * 8);
		mbar_init_fence();
	}
	__syncwarp();
	f.start(a, w, me, workers, k_begin, k_end);
	for (uint32_t i = 0; i < a.slots; i++)
		f.put(a, w, workers, k_begin, k_end, ring, bars);
	pdl_next();
	uint32_t n_cols;

	if (NTM == 0) {
		uint32_t cells = (a.k + 255) / 256;
		float *h = (float *)(xs + cells * (a.bf16 ? X_ONE_BF16 : X_ONE_F16));

		unscale[0] = act_unscale(prologue_one(a, xs, h, red, scales, chunk, team));
		n_cols = min(*a.n_live, 1u);
		load_heads(a, heads, 0, n_cols);
		x.smem = smem_addr(xs) + (lane & 3) * 16;
	} else {
		pdl_wait();
		n_cols = min(*a.n_live, a.columns);
		load_heads(a, heads, col0, n_cols);
		x.tile_stride = (uint32_t)a.acts_tile;
		x.gmem = a.acts + (size_t)blockIdx.y * NTM * a.acts_tile + lane * 16;
#pragma unroll
		for (int n = 0; n < Acts<NTM>::NT; n++)
#pragma unroll
			for (int e = 0; e < 2; e++) {
				uint32_t c = col0 + n * 8 + (lane & 3) * 2 + e;

				unscale[2 * n + e] = c < n_cols ? act_unscale(__ldcg(a.scales + c * 16 + chunk)) : 0.0f;
			}
	}
	uint32_t first = 0, side = 0;

	for (uint32_t it = 0; it < rounds; it++) {
		if (it < items) {
			float acc[2][Acts<NTM>::NT][4] = {};
			uint32_t unit = work_unit(w, workers, me, it), m = mat_of(a, unit);

#define ITEM(T) \
	if ((MASK >> T & 1) && (MASK == 1u << T || a.mat[m].tile == T)) \
	run_item<T, NTM, MASK>(a, w, workers, ring, bars, f, rd, x, k_begin, k_end, acc)
			ITEM(APR_TILE_Q4_K);
			ITEM(APR_TILE_Q6_K);
			ITEM(APR_TILE_Q8_0);
			ITEM(APR_TILE_Q4_1);
			ITEM(APR_TILE_Q5_0);
			ITEM(APR_TILE_F16);
			ITEM(APR_TILE_BF16);
#undef ITEM
			store_sums<NTM>(part + side * part_size +
			                        (((it - first) * teams + team) * C + chunk) * (NTM ? 36 * 8 * NTM : 32),
			                acc, unscale);
		}
		if (it + 1 - first == a.fold || it + 1 == rounds) {
			__syncthreads();
			fold_sums<NTM>(a, part + side * part_size, first, it + 1, blockIdx.x * teams, n_cols, workers, col0, *heads,
			               w);
			side ^= parts - 1;
			first = it + 1;
		}
	}
}

/* ---- activations of several columns --------------------------------------------------------- */

static __global__ void __launch_bounds__(ROW_THREADS, 1) prepare_rows(const __grid_constant__ prepare_args a)
{
	extern __shared__ __align__(128) uint8_t sm[];
	const uint32_t col = blockIdx.x, warp = threadIdx.x >> 5;
	float *red = (float *)sm, *h = red + 2 * ROW_WARPS;
	const float *row;

	pdl_next();
	pdl_wait();
	if (col >= min(*a.n_live, a.columns))
		return;
	size_t at = (size_t)(a.pick ? a.pick[col] : col) * a.k;

	row = a.in + at;
	if (a.norm.x) {
		add_norm_args n = a.norm;

		n.x += at;
		n.y = n.y ? n.y + at : NULL;
		n.x_out = n.x_out ? n.x_out + at : NULL;
		row_add_norm_any<false>(n, h, red);
		row = h;
	}
	if (warp < a.chunks.chunks) {
		float s = act_chunk<true>(row, a.k, chunk_begin(a.chunks, warp), chunk_begin(a.chunks, warp + 1), a.bf16,
		                          a.acts + (col >> 3) * a.acts_tile, col & 7);

		if ((threadIdx.x & 31) == 0)
			a.scales[col * 16 + warp] = s;
	}
}
int prepare_launch(const apr_cuda_launch *l, const prepare_args *a)
{
	size_t smem = 2 * ROW_WARPS * 4 + (a->norm.x ? (size_t)a->k * 4 : 0);

	if (a->norm.x && a->k > ROW_MAX)
		return -ENOTSUP;
	return launch(prepare_rows, dim3(a->columns), ROW_THREADS, smem, l->stream, l->pdl, *a);
}

/* ---- the launch: how many stages, how many rounds between epilogues, which grid -------------------- */

static size_t proj_smem(const proj_args *a, uint32_t ntm, uint32_t grid, uint32_t slots, uint32_t fold)
{
	uint32_t teams = WARPS / a->chunks.chunks, workers = grid * teams, rounds = (a->pairs + workers - 1) / workers;
	size_t sum = (size_t)WARPS * slots * (a->slot_bytes + 8) + (2 * ROW_WARPS + 16) * 4 + sizeof(proj_heads);

	sum += (rounds > fold ? 2 : 1) * (size_t)fold * WARPS * (ntm ? 36 * 8 * ntm : 32) * 4;
	if (!ntm)
		sum += (size_t)(a->k + 255) / 256 * (a->bf16 ? X_ONE_BF16 : X_ONE_F16) + (a->norm.x ? (size_t)a->k * 4 : 0);
	return sum;
}

template <int NTM> static int launch_mask(const apr_cuda_launch *l, const proj_args *a, dim3 grid, size_t smem)
{
	uint32_t mask = 0;

	for (uint32_t i = 0; i < a->n_mats; i++)
		mask |= 1u << a->mat[i].tile;
	switch (mask) {
#define MASKED(M) \
	case M: return launch(proj_decode<NTM, M>, grid, WARPS * 32, smem, l->stream, l->pdl, *a)
		MASKED(1u << APR_TILE_Q4_K);
		MASKED(1u << APR_TILE_Q6_K);
		MASKED(1u << APR_TILE_Q4_K | 1u << APR_TILE_Q6_K);
		MASKED(1u << APR_TILE_Q8_0);
		MASKED(1u << APR_TILE_Q4_1);
		MASKED(1u << APR_TILE_Q5_0);
		MASKED(1u << APR_TILE_F16);
		MASKED(1u << APR_TILE_BF16);
#undef MASKED
	default: return launch(proj_decode<NTM, (1u << APR_TILE_N) - 1>, grid, WARPS * 32, smem, l->stream, l->pdl, *a);
	}
}

/* a: everything but slot_bytes, slots and fold. One column where a->columns is 1, else acts and scales are ready. */
int proj_launch(const apr_cuda_launch *l, const proj_args *in)
{
	proj_args a = *in;
	uint32_t ntm = a.columns == 1   ? 0
	               : a.columns <= 8 ? 1
	                                : 2,
			 groups = ntm ? (a.columns + 8 * ntm - 1) / (8 * ntm) : 1;
	uint32_t teams = WARPS / a.chunks.chunks, most = (a.pairs * 2 + teams - 1) / teams;
	uint32_t grid = l->sms / groups, rounds;
	size_t room = ntm ? APR_SMEM_MAX * 3 / 4 : APR_SMEM_MAX; /* several columns: what is left is L1, where acts stay */

	a.slot_bytes = 0;
	for (uint32_t i = 0; i < a.n_mats; i++)
		a.slot_bytes = a.slot_bytes > stage_size(a.mat[i].tile) ? a.slot_bytes : stage_size(a.mat[i].tile);
	grid = grid < 1 ? 1 : grid > most ? most : grid;
	rounds = (a.pairs + grid * teams - 1) / (grid * teams);
	/* Stages: about 72 KB in flight fill the memory system (measured: one stage of 4608 B a warp beats two for Q4_K in a
	 * chain of dependent launches). */
	a.slots = a.slot_bytes > 4400 ? 1 : 2;
	a.fold = rounds < 16 ? rounds : 16;
	while (a.fold > 1 && proj_smem(&a, ntm, grid, a.slots, a.fold) > room)
		a.fold /= 2;
	if (proj_smem(&a, ntm, grid, a.slots, a.fold) > room)
		a.slots = 1;
	size_t smem = proj_smem(&a, ntm, grid, a.slots, a.fold);

	if (smem > APR_SMEM_MAX)
		return -ENOTSUP;
	switch (ntm) {
	case 0: return launch_mask<0>(l, &a, dim3(grid), smem);
	case 1: return launch_mask<1>(l, &a, dim3(grid, groups), smem);
	default: return launch_mask<2>(l, &a, dim3(grid, groups), smem);
	}
}
