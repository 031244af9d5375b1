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
DEV work_list deal_work(const proj_args &a, uint32_t me)
{
	const uint32_t done = a.rounds * a.workers, left = a.pairs - done;
	work_list w = {a.rounds, 0, done, 0};

	if (2 * left <= a.workers) {
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
/* Item j of a worker: its unit */
DEV uint32_t work_unit(const work_list &w, uint32_t workers, uint32_t me, uint32_t j)
{
	return j < w.rounds ? j * workers + me : w.tail_unit;
}

/* Which matrix a unit of the whole launch is of; unit becomes its own */
template <int ROLE> DEV uint32_t mat_of(const proj_args &a, uint32_t &unit)
{
	uint32_t i = 0;

	if constexpr (!one_mat(ROLE))
		while (i + 1 < a.n_mats && unit >= a.mat[i].pairs)
			unit -= a.mat[i++].pairs;
	return i;
}

/* ---- the ring: what a warp reads ahead --------------------------------------------------------- */

HD constexpr bool one_tile(uint32_t mask)
{
	return (mask & (mask - 1)) == 0;
}
/* Bytes of a slot: the largest stage among the types that the launch can meet. */
HD constexpr uint32_t slot_size(uint32_t mask)
{
	uint32_t most = 0;

	for (uint32_t t = 0; t < APR_TILE_N; t++)
		if (mask >> t & 1)
			most = most > stage_size(t) ? most : stage_size(t);
	return most;
}
/* Slots a warp: about 72 KB in flight fill the memory system (measured: one stage of 4608 B a warp beats two for Q4_K in
 * a chain of dependent launches); sixteen columns leave no room for more. */
HD constexpr uint32_t ring_slots(uint32_t mask, int ntm)
{
	return slot_size(mask) > (ntm == 2 ? 4200u : 4400u) ? 1 : 2;
}

/* The side of the ring that asks for stages: an item, a place in its chunk. The whole warp keeps it in step. From item to
 * item of one matrix only a constant is added: this runs between products, whose speed instructions limit. */
template <int NTM, uint32_t MASK, int ROLE> struct feeder {
	static const uint32_t SLOTS = ring_slots(MASK, NTM), SLOT = slot_size(MASK);
	const uint8_t *src;
	uint32_t left, slot, items; /* bytes of this item's chunk, the slot to fill, items from this one on */
	uint32_t unit, end, m, skip,
			chunk_bytes; /* of the matrix: its last unit + 1, what lies between two items' chunks */
	uint32_t ring, bars;

	static __device__ __forceinline__ uint32_t tile_of(const proj_args &a, uint32_t i)
	{
		return one_tile(MASK) ? 31 - __clz(MASK) : a.mat[i].tile;
	}
	/* The item at hand, from scratch: the first, the first of a matrix, a half */
	__device__ __forceinline__ void open(const proj_args &a, const work_list &w, uint32_t k_begin, uint32_t k_end)
	{
		const bool half = items == 1 && w.tail == 2;

		if (half)
			unit = w.tail_unit;
		while (!one_mat(ROLE) && unit >= end)
			end += a.mat[++m].pairs;
		const uint32_t tile = tile_of(a, m), size = tile_size(tile), kt = tile_k(tile), pair = a.mat[m].pair_bytes;

		chunk_bytes = left = (k_end - k_begin + kt - 1) / kt * 2 * size;
		skip = a.workers * pair - chunk_bytes;
		src = a.mat[m].tiles + (size_t)(unit - (end - a.mat[m].pairs)) * pair + (size_t)(k_begin / kt) * 2 * size +
		      (half ? w.tail_half * size : 0);
	}
	__device__ __forceinline__ void start(const proj_args &a, const work_list &w, uint32_t me, uint32_t k_begin,
	                                      uint32_t k_end)
	{
		unit = me;
		m = slot = 0;
		end = a.mat[0].pairs;
		items = w.rounds + (w.tail ? 1 : 0);
		if (items)
			open(a, w, k_begin, k_end);
	}
	__device__ __forceinline__ void put(const proj_args &a, const work_list &w, uint32_t k_begin, uint32_t k_end)
	{
		if (!items)
			return;
		const uint32_t tile = tile_of(a, m), bytes = min(left, stage_size(tile)), dst = ring + slot * SLOT,
					   bar = bars + slot * 8;

		if (items == 1 && w.tail == 2) { /* one row tile of each two: the other's place keeps what it had, unused */
			if (elect_one()) {
				const uint32_t size = tile_size(tile);

				mbar_expect(bar, bytes / 2);
				for (uint32_t i = 0; i < bytes; i += 2 * size)
					bulk_copy_once(dst + i, src + i, size, bar);
			}
		} else if (elect_one()) {
			mbar_expect(bar, bytes);
			bulk_copy_once(dst, src, bytes, bar);
		}
		src += bytes;
		left -= bytes;
		slot = slot + 1 == SLOTS ? 0 : slot + 1;
		if (left)
			return;
		items--;
		unit += a.workers;
		if ((one_mat(ROLE) || unit < end) && !(items == 1 && w.tail == 2)) {
			src += skip;
			left = chunk_bytes;
		} else if (items) {
			open(a, w, k_begin, k_end);
		}
	}
	/* The slot that the warp has read is free: asked for again, where there is more to come */
	__device__ __forceinline__ void refill(const proj_args &a, const work_list &w, uint32_t k_begin, uint32_t k_end)
	{
		if (items)
			fence_reads_before_refill();
		__syncwarp();
		put(a, w, k_begin, k_end);
	}
};

struct reader { /* the side that multiplies */
	uint32_t slot, phase;

	template <uint32_t SLOTS> __device__ __forceinline__ void next(void)
	{
		if (++slot == SLOTS) {
			slot = 0;
			phase ^= 1;
		}
	}
};

/* One item: the chunk's products with R row tiles, stage by stage */
template <int TILE, int R, int NTM, uint32_t MASK, int ROLE>
static __device__ __forceinline__ void run_item(const proj_args &a, const work_list &w, feeder<NTM, MASK, ROLE> &f,
                                                reader &rd, const Acts<NTM> &x, uint32_t k_begin, uint32_t k_end,
                                                float (*acc)[Acts<NTM>::NT][4])
{
	typedef feeder<NTM, MASK, ROLE> F;
	const int lane = threadIdx.x & 31;

	for (uint32_t k = k_begin; k < k_end; k += stage_k(TILE)) {
		const uint32_t sp = f.ring + rd.slot * F::SLOT;
		const uint32_t n = (min(k_end, k + stage_k(TILE)) - k + tile_k(TILE) - 1) / tile_k(TILE);

		mbar_wait(f.bars + rd.slot * 8, rd.phase);
		if constexpr (TILE == APR_TILE_Q6_K) {
			Stage<TILE, 1> s0, s1;

			s0.load(sp, lane);
			if (NTM)
				s0.mul(x, k, acc[0]);
			if (R == 2)
				s1.load(sp + tile_size(TILE), lane);
			f.refill(a, w, k_begin, k_end);
			if (!NTM)
				s0.mul(x, k, acc[0]);
			if (R == 2)
				s1.mul(x, k, acc[1]);
		} else {
			Stage<TILE, R> s;

			s.load(sp, lane, n);
			f.refill(a, w, k_begin, k_end);
			s.mul(x, k, n, lane, acc);
		}
		rd.template next<F::SLOTS>();
	}
}
template <int R, int NTM, uint32_t MASK, int ROLE>
static __device__ __forceinline__ void run_any(uint32_t tile, const proj_args &a, const work_list &w,
                                               feeder<NTM, MASK, ROLE> &f, reader &rd, const Acts<NTM> &x,
                                               uint32_t k_begin, uint32_t k_end, float (*acc)[Acts<NTM>::NT][4])
{
#define ITEM(T) \
	if ((MASK >> T & 1) && (MASK == 1u << T || tile == T)) \
	run_item<T, R>(a, w, f, rd, x, k_begin, k_end, acc)
	ITEM(APR_TILE_Q4_K);
	ITEM(APR_TILE_Q6_K);
	ITEM(APR_TILE_Q8_0);
	ITEM(APR_TILE_Q4_1);
	ITEM(APR_TILE_Q5_0);
	ITEM(APR_TILE_F16);
	ITEM(APR_TILE_BF16);
#undef ITEM
}

/* ---- sums --------------------------------------------------------------------------------------- */

/* Floats that a chunk's sums take: [column][36] or, for one column, [32] */
HD constexpr uint32_t sums_size(int ntm)
{
	return ntm ? 36 * 8 * ntm : 32;
}
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
template <int NTM, int ROLE> DEV void fold_sums(const proj_args &a, const float *part, uint32_t first, uint32_t last,
                                                uint32_t n_cols, uint32_t col0, const proj_heads &heads)
{
	const uint32_t cols = NTM ? 8 * NTM : 1, C = a.chunks.chunks, log_teams = 4 - a.chunks.log2;
	const uint32_t lane = threadIdx.x & 31;

	for (uint32_t o = threadIdx.x >> 5; o < ((last - first) << log_teams) * cols; o += WARPS) {
		const uint32_t place = o / cols, c = o % cols, j = first + (place >> log_teams);
		const uint32_t me = (blockIdx.x << log_teams) + (place & ((1u << log_teams) - 1));
		const work_list w = deal_work(a, me);
		bool live = col0 + c < n_cols;
		float v[16];

		if (j >= w.rounds + (w.tail ? 1 : 0))
			continue;
		uint32_t unit = work_unit(w, a.workers, me, j), m = mat_of<ROLE>(a, unit), p = unit * 32 + lane;

		if (j == w.rounds && w.tail == 2) { /* this half's rows lie in the first sixteen places */
			p = unit * 32 + w.tail_half * 16 + (lane & 15);
			live = live && lane < 16;
		}
#pragma unroll
		for (uint32_t i = 0; i < 16; i++)
			v[i] = i < C ? part[(place * C + i) * sums_size(NTM) + c * 36 + lane] : 0.0f;
#pragma unroll
		for (uint32_t s = 1; s < 16; s *= 2)
#pragma unroll
			for (uint32_t i = 0; i < 16; i += 2 * s)
				if (s < C)
					v[i] = v[i] + v[i + s];
		proj_finish<ROLE>(a, a.mat[m], heads, p, col0 + c, c, v[0], live && p < a.mat[m].n_out);
	}
}

/* One column: this block's own activations, in shared memory. Waits for the previous kernel. b, e: the chunk's 32-groups, e
 * = b where another team makes it; w: its norm's weights. Returns the warp's scale. */
template <int ROLE, uint32_t PIECES, bool BF16>
DEV float prologue_one(const proj_args &a, uint8_t *xs, float *red, float *scales, uint32_t chunk, uint32_t b, uint32_t e,
                       float (*w)[8], bool live)
{
	float s = 1.0f;

	if (ROLE == ROLE_PROJ) {
		pdl_wait();
		if (b < e)
			s = act_chunk<false>(a.in, a.k, b, e, BF16, xs, 0);
	} else {
		add_norm_args n = a.norm;
		bool keep = ROLE != ROLE_HEAD && n.x_out && live &&
		            min(chunk, gridDim.x - 1) == blockIdx.x; /* each block a chunk of it */

		if (ROLE == ROLE_HEAD && a.pick) { /* a step of no rows has none */
			size_t at = live ? (size_t)a.pick[0] * n.n : 0;

			n.x += at;
			n.y = n.y ? n.y + at : NULL;
		}
		s = norm_chunk<false, PIECES>(n, b, e, w, keep, BF16, xs, 0, red);
	}
	if (a.chunks.chunks == WARPS) {
		__syncwarp();
		return s;
	}
	if (b < e && (threadIdx.x & 31) == 0)
		scales[chunk] = s;
	__syncthreads();
	return scales[chunk];
}
/* A launch's arguments are new to the constant cache, line by line: one warp asks for all of them at once. */
DEV void touch_arguments(const proj_args &a)
{
	const uint32_t lines = (sizeof a + 63) / 64, lane = threadIdx.x & 31;

	if (threadIdx.x >> 5 == WARPS - 1) {
		uint32_t v = ((const uint32_t *)&a)[lane < lines ? lane * 16 : 0];

		asm volatile("" ::"r"(v));
	}
}

/* MASK: the tile types that the launch can meet. Those that meet often have a kernel of their own: all seven in one cost
 * registers that none of them needs. */
template <int NTM, uint32_t MASK, int ROLE, uint32_t PIECES> static __global__ void __launch_bounds__(WARPS * 32, 1)
		proj_decode(const __grid_constant__ proj_args a)
{
	extern __shared__ __align__(128) uint8_t sm[];
	typedef feeder<NTM, MASK, ROLE> F;
	const uint32_t lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
	const uint32_t C = a.chunks.chunks, log_teams = 4 - a.chunks.log2, chunk = warp & (C - 1), team = warp >> a.chunks.log2;
	const uint32_t me = (blockIdx.x << log_teams) + team, col0 = blockIdx.y * (NTM ? 8 * NTM : 1);
	const uint32_t k_begin = chunk_begin(a.chunks, chunk) * 32, k_end = chunk_begin(a.chunks, chunk + 1) * 32;
	const work_list w = deal_work(a, me);
	const uint32_t items = w.rounds + (w.tail ? 1 : 0), rounds = a.rounds + (a.pairs > a.rounds * a.workers ? 1 : 0);
	uint8_t *after = sm + WARPS * F::SLOTS * F::SLOT;
	float *red = (float *)(after + WARPS * F::SLOTS * 8), *scales = red + 32;
	proj_heads *heads = (proj_heads *)(scales + 16);
	float *part = (float *)(heads + 1);
	const uint32_t part_size = a.fold * WARPS * sums_size(NTM), parts = rounds > a.fold ? 2 : 1;
	uint8_t *xs = (uint8_t *)(part + parts * part_size);
	float unscale[2 * Acts<NTM>::NT];
	const bool norm = ROLE == ROLE_QKV || ROLE == ROLE_FFN || ROLE == ROLE_HEAD;
	const uint32_t own_end = team ? k_begin : k_end; /* of the chunks that this warp makes ready */
	float nw[PIECES][8];
	F f;
	reader rd = {0, 0};
	Acts<NTM> x;

	const uint32_t n_cols = min(__ldcg(a.n_live), NTM ? a.columns : 1u);
	touch_arguments(a);
	if (norm)
		norm_weights<PIECES>(a.norm, k_begin / 32, own_end / 32, nw);
	f.ring = smem_addr(sm) + warp * F::SLOTS * F::SLOT;
	f.bars = smem_addr(after) + warp * F::SLOTS * 8;
	if (lane == 0) {
#pragma unroll
		for (uint32_t i = 0; i < F::SLOTS; i++)
			mbar_init(f.bars + i * 8);
		mbar_init_fence();
	}
	__syncwarp();
	f.start(a, w, me, k_begin, k_end);
#pragma unroll
	for (uint32_t i = 0; i < F::SLOTS; i++)
		f.put(a, w, k_begin, k_end);
	pdl_next();
	if (ROLE == ROLE_QKV || ROLE == ROLE_MANY)
		load_heads(a, heads, col0, n_cols);
	if (NTM == 0) {
		unscale[0] = act_unscale(prologue_one<ROLE, PIECES, MASK == 1u << APR_TILE_BF16>(
				a, xs, red, scales, chunk, k_begin / 32, own_end / 32, nw, n_cols != 0));
		x.smem = smem_addr(xs) + (lane & 3) * 16;
	} else {
		pdl_wait();
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
			uint32_t unit = work_unit(w, a.workers, me, it), tile = a.mat[mat_of<ROLE>(a, unit)].tile;

			if (ROLE == ROLE_QKV && it == w.rounds && w.tail == 2)
				run_any<1>(tile, a, w, f, rd, x, k_begin, k_end, acc);
			else
				run_any<2>(tile, a, w, f, rd, x, k_begin, k_end, acc);
			store_sums<NTM>(part + side * part_size +
			                        (((((it - first) << log_teams) + team) << a.chunks.log2) + chunk) * sums_size(NTM),
			                acc, unscale);
		}
		if (it + 1 - first == a.fold || it + 1 == rounds) {
			__syncthreads();
			fold_sums<NTM, ROLE>(a, part + side * part_size, first, it + 1, n_cols, col0, *heads);
			side ^= parts - 1;
			first = it + 1;
		}
	}
}

/* ---- activations of several columns --------------------------------------------------------- */

static __global__ void __launch_bounds__(ROW_THREADS, 1) prepare_rows(const __grid_constant__ prepare_args a)
{
	__shared__ __align__(16) float red[32];
	const uint32_t col = blockIdx.x, warp = threadIdx.x >> 5;
	float s = 1.0f;

	pdl_next();
	if (col >= min(*a.n_live, a.columns)) {
		pdl_wait();
		return;
	}
	const size_t at = (size_t)(a.pick ? a.pick[col] : col) * a.k;
	const bool mine = warp < a.chunks.chunks;
	uint8_t *dst = a.acts + (col >> 3) * a.acts_tile;

	if (a.norm.x) {
		add_norm_args n = a.norm;

		n.x += at;
		n.y = n.y ? n.y + at : NULL;
		n.x_out = n.x_out ? n.x_out + at : NULL;
		float w[PIECES_MAX][8];
		const uint32_t b = mine ? chunk_begin(a.chunks, warp) : 0, e = mine ? chunk_begin(a.chunks, warp + 1) : 0;

		norm_weights<PIECES_MAX>(n, b, e, w);
		s = norm_chunk<true, PIECES_MAX>(n, b, e, w, n.x_out != NULL, a.bf16, dst, col & 7, red);
	} else {
		pdl_wait();
		if (mine)
			s = act_chunk<true>(a.in + at, a.k, chunk_begin(a.chunks, warp), chunk_begin(a.chunks, warp + 1), a.bf16,
			                    dst, col & 7);
	}
	if (mine && (threadIdx.x & 31) == 0)
		a.scales[col * 16 + warp] = s;
}
int prepare_launch(const apr_cuda_launch *l, const prepare_args *a)
{
	if (a->norm.x && a->k > ROW_MAX)
		return -ENOTSUP;
	return launch(prepare_rows, dim3(a->columns), ROW_THREADS, 0, l->stream, l->pdl, *a);
}

/* ---- the launch: how many rounds between epilogues, which grid ------------------------------------ */

static size_t proj_smem(const proj_args *a, uint32_t mask, int ntm, uint32_t fold)
{
	uint32_t rounds = (a->pairs + a->workers - 1) / a->workers;
	size_t sum = (size_t)WARPS * ring_slots(mask, ntm) * (slot_size(mask) + 8) + (32 + 16) * 4 + sizeof(proj_heads);

	sum += (rounds > fold ? 2 : 1) * (size_t)fold * WARPS * sums_size(ntm) * 4;
	return ntm ? sum : sum + (size_t)(a->k + 255) / 256 * (a->bf16 ? X_ONE_BF16 : X_ONE_F16);
}

template <int NTM, uint32_t MASK, int ROLE, uint32_t PIECES>
static int launch_kernel(const apr_cuda_launch *l, const proj_args *a, dim3 grid, size_t smem)
{
	if (NTM == 0 && prefer_shared(proj_decode<NTM, MASK, ROLE, PIECES>))
		return -EIO;
	return launch(proj_decode<NTM, MASK, ROLE, PIECES>, grid, WARPS * 32, smem, l->stream, l->pdl, *a);
}
/* A norm of one piece of 256 a warp has a kernel of its own: the code is a third shorter */
template <int NTM, uint32_t MASK, int ROLE>
static int launch_sized(const apr_cuda_launch *l, const proj_args *a, dim3 grid, size_t smem)
{
	const uint32_t cells = (a->chunks.cells + a->chunks.chunks - 1) / a->chunks.chunks;

	if (ROLE == ROLE_PROJ || ROLE == ROLE_MANY || cells * a->chunks.cell32 <= 8)
		return launch_kernel<NTM, MASK, ROLE, 1>(l, a, grid, smem);
	return launch_kernel<NTM, MASK, ROLE, ROLE == ROLE_PROJ || ROLE == ROLE_MANY ? 1 : PIECES_MAX>(l, a, grid, smem);
}
template <int NTM, uint32_t MASK, int ROLE> static int launch_one(const apr_cuda_launch *l, proj_args *a, dim3 grid)
{
	const size_t room = NTM ? APR_SMEM_MAX * 3 / 4 : APR_SMEM_MAX; /* several columns: what is left is L1: acts stay */
	const uint32_t rounds = (a->pairs + a->workers - 1) / a->workers;

	a->fold = rounds < 32 ? rounds : 32;
	while (a->fold > 1 && proj_smem(a, MASK, NTM, a->fold) > room)
		a->fold /= 2;
	const size_t smem = proj_smem(a, MASK, NTM, a->fold);

	if (smem > APR_SMEM_MAX)
		return -ENOTSUP;
	return launch_sized<NTM, MASK, ROLE>(l, a, grid, smem);
}
template <int NTM, int ROLE>
static int launch_mask(const apr_cuda_launch *l, uint32_t mask, proj_args *a, dim3 grid)
{
	const uint32_t all = (1u << APR_TILE_N) - 1;

	switch (mask) {
#define MASKED(M) \
	case M: return launch_one<NTM, M, ROLE>(l, a, grid)
		MASKED(1u << APR_TILE_Q4_K);
		MASKED(1u << APR_TILE_Q6_K);
		MASKED(1u << APR_TILE_Q8_0);
		MASKED(1u << APR_TILE_Q4_1);
		MASKED(1u << APR_TILE_Q5_0);
		MASKED(1u << APR_TILE_F16);
		MASKED(1u << APR_TILE_BF16);
#undef MASKED
	}
	if constexpr (one_mat(ROLE))
		return -ENOTSUP;
	else if (mask == (1u << APR_TILE_Q4_K | 1u << APR_TILE_Q6_K))
		return launch_one<NTM, 1u << APR_TILE_Q4_K | 1u << APR_TILE_Q6_K, ROLE>(l, a, grid);
	else
		return launch_one<NTM, all, ROLE>(l, a, grid);
}
static int role_of(const proj_args *a)
{
	switch (a->mat[0].end) {
	case PROJ_LOGITS: return ROLE_HEAD;
	case PROJ_ACT:
	case PROJ_GATED: return ROLE_FFN;
	default: return a->norm.x ? ROLE_QKV : ROLE_PROJ;
	}
}

/* a: everything but workers, rounds and fold. One column where a->columns is 1, else acts and scales are ready. */
int proj_launch(const apr_cuda_launch *l, const proj_args *in)
{
	proj_args a = *in;
	const uint32_t ntm = a.columns == 1 ? 0 : a.columns <= 8 ? 1 : 2;
	const uint32_t groups = ntm ? (a.columns + 8 * ntm - 1) / (8 * ntm) : 1, teams = WARPS / a.chunks.chunks;
	const uint32_t most = (a.pairs * 2 + teams - 1) / teams;
	uint32_t grid = l->sms / groups, mask = 0;

	grid = grid < 1 ? 1 : grid > most ? most : grid;
	a.workers = grid * teams;
	a.rounds = a.pairs / a.workers;
	for (uint32_t i = 0; i < a.n_mats; i++)
		mask |= 1u << a.mat[i].tile;
	if (ntm == 1)
		return launch_mask<1, ROLE_MANY>(l, mask, &a, dim3(grid, groups));
	if (ntm == 2)
		return launch_mask<2, ROLE_MANY>(l, mask, &a, dim3(grid, groups));
	switch (role_of(&a)) {
	case ROLE_QKV: return launch_mask<0, ROLE_QKV>(l, mask, &a, dim3(grid));
	case ROLE_FFN: return launch_mask<0, ROLE_FFN>(l, mask, &a, dim3(grid));
	case ROLE_HEAD: return launch_mask<0, ROLE_HEAD>(l, mask, &a, dim3(grid));
	default: return launch_mask<0, ROLE_PROJ>(l, mask, &a, dim3(grid));
	}
}
