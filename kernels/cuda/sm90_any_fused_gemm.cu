/* SPDX-License-Identifier: MIT */
/*
 * Prompt products straight from the decode tiles, and tiles to F16 rows.
 *
 * Owns: two kernels over fragments.cuh. The product is one ascending chain of
 * m16n8k16 over K an output, which is what cuBLASLt's algorithm 66 computes, so a
 * row has the same bits by either. The scalar reference of both is tile_value
 * (tiles.cuh); apr_cuda_gemm_loop is that of the chain.
 *
 * A warp has a row tile (16 weight rows) and up to 64 columns. Its ring of tiles is
 * refilled by the copy engine as soon as a tile is in registers, and asked for before
 * the previous kernel has ended: weights do not depend on it. No warp waits for
 * another.
 */
#include "kernels/cuda/fragments.cuh"
#include "kernels/cuda/launch.cuh"

#define MATS 3
#define MOST_WARPS 8u
#define MOST_SLOTS 8u

struct fused_mat {
	const uint8_t *tiles;
	uint32_t tile, n_out, row_tiles, order, dim, half;
	uint32_t first; /* its first row's place in out */
};
struct fused_args {
	fused_mat mat[MATS];
	uint32_t n_mats, row_tiles, k;
	const uint8_t *acts; /* [tile of eight columns][32-group] 512 bytes: 16 a lane */
	float *out;
	uint32_t ld, columns, tiles8; /* tiles8: tiles of eight columns in acts */
	const uint32_t *n_live;
	uint32_t slots, slot_bytes;
};

/* Which matrix row tile rt of the launch is of; rt becomes its own */
DEV uint32_t mat_of_tile(const fused_args &a, uint32_t &rt)
{
	uint32_t i = 0;

	while (i + 1 < a.n_mats && rt >= a.mat[i].row_tiles)
		rt -= a.mat[i++].row_tiles;
	return i;
}
/* A matrix's row, counting up's after gate's, of row p of its tiles */
DEV uint32_t row_in_order(const fused_mat &m, uint32_t p)
{
	row_home home = row_home_of(m.order, m.dim, m.half, p);

	return home.which * (m.n_out / 2) + home.row;
}

struct tile_ring { /* a warp's: tiles of one row tile, ascending along k */
	const uint8_t *src;
	uint32_t base, bars, size, left, put, get, phase;

	__device__ __forceinline__ void refill(const fused_args &a)
	{
		if (!left)
			return;
		if (elect_one()) {
			mbar_expect(bars + put * 8, size);
			bulk_copy(base + put * a.slot_bytes, src, size, bars + put * 8);
		}
		src += 2 * size; /* the other half of the pair lies between */
		left--;
		put = put + 1 == a.slots ? 0 : put + 1;
	}
	__device__ __forceinline__ uint32_t wait(const fused_args &a)
	{
		mbar_wait(bars + get * 8, phase);
		return base + get * a.slot_bytes;
	}
	__device__ __forceinline__ void next(const fused_args &a)
	{
		if (++get == a.slots) {
			get = 0;
			phase ^= 1;
		}
	}
};

template <int TILE, int NT>
static __device__ __forceinline__ void run_chain(const fused_args &a, tile_ring &ring, const uint8_t *x,
                                                 float (*acc)[4])
{
	const uint32_t lane = threadIdx.x & 31, groups = a.k / 32;
	const int per = TILE == APR_TILE_Q4_K || TILE == APR_TILE_Q6_K ? 8 : 2;

	for (uint32_t k32 = 0; k32 < groups; k32 += per) {
		Fragments<TILE> f;

		f.load(ring.wait(a), lane);
		fence_reads_before_refill();
		__syncwarp();
		ring.next(a);
		ring.refill(a);
#pragma unroll
		for (int gi = 0; gi < per; gi++) {
			uint32_t w[4], v[4];
			uint4 xv[NT];

			if (gi && k32 + gi >= groups)
				break;
#pragma unroll
			for (int n = 0; n < NT; n++)
				xv[n] = *(const uint4 *)(x + (size_t)n * groups * 512 + gi * 512);
			f.group(gi, w, v);
#pragma unroll
			for (int n = 0; n < NT; n++)
				mma_f16(acc[n], w, xv[n].x, xv[n].y, acc[n]);
#pragma unroll
			for (int n = 0; n < NT; n++)
				mma_f16(acc[n], v, xv[n].z, xv[n].w, acc[n]);
		}
		x += per * 512;
	}
}

template <int NT> static __global__ void __launch_bounds__(MOST_WARPS * 32, 2) fused_gemm(const __grid_constant__ fused_args a)
{
	extern __shared__ __align__(128) uint8_t sm[];
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
	uint32_t rt = blockIdx.x * warps + warp;
	const uint32_t col0 = blockIdx.y * NT * 8;
	float acc[NT][4] = {};
	tile_ring ring;

	if (rt >= a.row_tiles) {
		pdl_next();
		pdl_wait();
		return;
	}
	const fused_mat &m = a.mat[mat_of_tile(a, rt)];

	ring.size = tile_size(m.tile);
	ring.left = tiles_along_k(m.tile, a.k);
	ring.base = smem_addr(sm) + warp * a.slots * a.slot_bytes;
	ring.bars = smem_addr(sm) + warps * a.slots * a.slot_bytes + warp * a.slots * 8;
	ring.src = m.tiles + ((size_t)(rt >> 1) * ring.left * 2 + (rt & 1)) * ring.size;
	ring.put = ring.get = ring.phase = 0;
	if (lane == 0) {
		for (uint32_t i = 0; i < a.slots; i++)
			mbar_init(ring.bars + i * 8);
		mbar_init_fence();
	}
	__syncwarp();
	for (uint32_t i = 0; i < a.slots; i++)
		ring.refill(a);
	pdl_next();
	pdl_wait();
	const uint8_t *x = a.acts + (size_t)(col0 / 8) * (a.k / 32) * 512 + lane * 16;

	switch (m.tile) {
#define CHAIN(T) \
	case T: run_chain<T, NT>(a, ring, x, acc); break
		CHAIN(APR_TILE_Q4_K);
		CHAIN(APR_TILE_Q6_K);
		CHAIN(APR_TILE_Q8_0);
		CHAIN(APR_TILE_Q4_1);
		CHAIN(APR_TILE_Q5_0);
		CHAIN(APR_TILE_F16);
		CHAIN(APR_TILE_BF16);
#undef CHAIN
	}
	const uint32_t live = min(*a.n_live, a.columns);

#pragma unroll
	for (int n = 0; n < NT; n++)
#pragma unroll
		for (int e = 0; e < 4; e++) {
			uint32_t col = col0 + n * 8 + (lane & 3) * 2 + (e & 1), p = rt * 16 + (lane >> 2) + (e >> 1) * 8;

			if (col < live && p < m.n_out)
				a.out[(size_t)col * a.ld + m.first + row_in_order(m, p)] = acc[n][e];
		}
}

static uint32_t columns_at_once(uint32_t bucket)
{
	return bucket <= 8 ? 8 : bucket <= 16 ? 16 : bucket <= 32 ? 32 : 64;
}
extern "C" uint32_t apr_cuda_fused_columns(uint32_t bucket)
{
	uint32_t each = columns_at_once(bucket);

	return (bucket + each - 1) / each * each;
}

static fused_mat fused_mat_of(const apr_mat *w, uint32_t first)
{
	return {w->tiles, w->tile, w->n_out, (w->n_out + 15) / 16, w->order, w->dim ? w->dim : 1, w->half, first};
}

extern "C" int apr_cuda_fused_gemm(const apr_cuda_launch *l, const apr_mat *const *w, uint32_t n, const void *in, float *out,
                                   uint32_t ld)
{
	fused_args a = {};
	uint32_t first = 0, waves, warps, groups, nt = columns_at_once(l->bucket) / 8;
	size_t room, smem;

	if (!n || n > MATS || !l->bucket)
		return -EINVAL;
	a.k = w[0]->n_in;
	for (uint32_t i = 0; i < n; i++) {
		if (w[i]->n_in != a.k || w[i]->tile >= APR_TILE_N || a.k % 32)
			return -ENOTSUP;
		a.mat[i] = fused_mat_of(w[i], first);
		a.row_tiles += a.mat[i].row_tiles;
		a.slot_bytes = a.slot_bytes > tile_size(w[i]->tile) ? a.slot_bytes : tile_size(w[i]->tile);
		first += w[i]->n_out;
	}
	if (first > ld)
		return -EINVAL;
	a.n_mats = n, a.acts = (const uint8_t *)in, a.out = out, a.ld = ld, a.columns = l->bucket;
	a.n_live = l->rows.n;
	a.slot_bytes = (a.slot_bytes + 127) / 128 * 128;
	groups = apr_cuda_fused_columns(l->bucket) / (nt * 8);
	/* all row tiles at once where two blocks of eight warps a multiprocessor hold them, evenly */
	waves = (a.row_tiles + l->sms * MOST_WARPS - 1) / (l->sms * MOST_WARPS);
	warps = (a.row_tiles + l->sms * waves - 1) / (l->sms * waves);
	room = (waves > 1 || groups > 1 ? APR_SMEM_MAX / 2 - 1024 : APR_SMEM_MAX) / warps;
	a.slots = (uint32_t)(room / (a.slot_bytes + 8));
	a.slots = a.slots > MOST_SLOTS ? MOST_SLOTS : a.slots;
	if (!a.slots)
		return -ENOTSUP;
	smem = (size_t)warps * a.slots * (a.slot_bytes + 8);
	dim3 grid((a.row_tiles + warps - 1) / warps, groups);
	switch (nt) {
	case 1: return launch(fused_gemm<1>, grid, warps * 32, smem, l->stream, l->pdl, a);
	case 2: return launch(fused_gemm<2>, grid, warps * 32, smem, l->stream, l->pdl, a);
	case 4: return launch(fused_gemm<4>, grid, warps * 32, smem, l->stream, l->pdl, a);
	default: return launch(fused_gemm<8>, grid, warps * 32, smem, l->stream, l->pdl, a);
	}
}

/* ---- tiles to F16 rows ------------------------------------------------------------------ */

/* A warp a tile; tiles of a row tile in neighbouring warps, so that rows are written side by side. */
template <int TILE> static __global__ void __launch_bounds__(256) unpack_tiles(fused_mat m, uint32_t k, __half *dst)
{
	__shared__ __align__(128) uint8_t sm[8][TILE == APR_TILE_Q4_K ? 2304 : TILE == APR_TILE_Q6_K ? 3360 : 2048];
	const uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, nk = tiles_along_k(TILE, k), size = tile_size(TILE);
	const int per = TILE == APR_TILE_Q4_K || TILE == APR_TILE_Q6_K ? 8 : 2;
	const size_t n = (size_t)m.row_tiles * nk;

	for (size_t i = (size_t)blockIdx.x * 8 + warp; i < n; i += (size_t)gridDim.x * 8) {
		const uint32_t rt = (uint32_t)(i / nk), kt = (uint32_t)(i % nk), p = rt * 16 + (lane >> 2);
		const uint4 *src = (const uint4 *)(m.tiles + (((size_t)(rt >> 1) * nk + kt) * 2 + (rt & 1)) * size);
		Fragments<TILE> f;

		__syncwarp();
		for (uint32_t b = lane; b < size / 16; b += 32)
			((uint4 *)sm[warp])[b] = src[b];
		__syncwarp();
		f.load(smem_addr(sm[warp]), lane);
		__half *r0 = dst + (size_t)row_in_order(m, p) * k, *r8 = dst + (size_t)row_in_order(m, p + 8) * k;
#pragma unroll
		for (int gi = 0; gi < per; gi++) {
			uint32_t a[4], b[4], at = (kt * per + gi) * 32 + (lane & 3) * 4;

			if ((kt * per + gi) * 32 >= k)
				break;
			f.group(gi, a, b);
			if (p < m.n_out) {
				*(uint2 *)(r0 + at) = make_uint2(a[0], a[2]);
				*(uint2 *)(r0 + at + 16) = make_uint2(b[0], b[2]);
			}
			if (p + 8 < m.n_out) {
				*(uint2 *)(r8 + at) = make_uint2(a[1], a[3]);
				*(uint2 *)(r8 + at + 16) = make_uint2(b[1], b[3]);
			}
		}
	}
}

extern "C" int apr_cuda_unpack_f16(cudaStream_t stream, const apr_mat *w, void *dst)
{
	fused_mat m = fused_mat_of(w, 0);
	size_t blocks = ((size_t)m.row_tiles * tiles_along_k(w->tile, w->n_in) + 7) / 8;
	dim3 grid(blocks < 4096 ? (unsigned)blocks : 4096);

	switch (w->tile) {
#define UNPACK(T) \
	case T: return launch(unpack_tiles<T>, grid, 256, 0, stream, false, m, w->n_in, (__half *)dst)
		UNPACK(APR_TILE_Q4_K);
		UNPACK(APR_TILE_Q6_K);
		UNPACK(APR_TILE_Q8_0);
		UNPACK(APR_TILE_Q4_1);
		UNPACK(APR_TILE_Q5_0);
		UNPACK(APR_TILE_F16);
		UNPACK(APR_TILE_BF16);
#undef UNPACK
	default: return -ENOTSUP;
	}
}
