/* SPDX-License-Identifier: MIT */
/*
 * Products of decode tiles with activations on the tensor cores.
 *
 * Owns: for each tile type, how a stage of two row tiles is read into registers
 * and multiplied; the layout of activations. Does not own the ring that brings the
 * stages nor the order of chunks (sm90_any_proj_decode.cu).
 *
 * Activations: FP16, each (column, chunk of K) divided by a power of two so that
 * its largest magnitude lies in [512, 1024) (exact; 16-bit sums of 32 then fit too).
 * Per 256 k: 8 groups of 32 (lane column t: k 4t … 4t + 3, 16 + 4t … 16 + 4t + 3,
 * 16 B), then sums of each group of 32, as FP16 high and low parts:
 * [group / 2] {sum[2], its low part[2], offset sum[2], its low part[2]}.
 * For BF16 weights: the high and the low part of each value, 8 groups each, no sums,
 * no scaling.
 *   one column:   576 (BF16: 1024) bytes in shared memory
 *   eight columns: each group's 16 B pieces side by side, 4608 (8192) bytes
 *
 * Every sum is one ascending chain over k per (row, column), whatever the number of
 * columns: the bits of a column do not depend on the others.
 */
#ifndef APR_KERNELS_CUDA_PRODUCTS_CUH
#define APR_KERNELS_CUDA_PRODUCTS_CUH

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/tiles.cuh"

#define X_ONE_F16 576u
#define X_ONE_BF16 1024u
#define X_EIGHT_F16 4608u
#define X_EIGHT_BF16 8192u

/* Activations as a warp reads them. NTM 0: one column, shared memory; else NTM tiles of eight, global memory. */
template <int NTM> struct Acts {
	static const int NT = NTM ? NTM : 1;
	uint32_t smem, tile_stride;
	const uint8_t *gmem;

	struct place { /* of a 32-group; the groups after it in its 256 follow at constant distances */
		uint32_t smem;
		const uint8_t *gmem[NT];
	};
	__device__ __forceinline__ place at(uint32_t k32, uint32_t one, uint32_t eight) const
	{
		place p;

		if (NTM == 0) {
			p.smem = smem + (k32 >> 3) * one + (k32 & 7) * 64;
			return p;
		}
		p.gmem[0] = gmem + (k32 >> 3) * eight + (k32 & 7) * 512;
#pragma unroll
		for (int n = 1; n < NT; n++)
			p.gmem[n] = p.gmem[n - 1] + tile_stride;
		return p;
	}
	__device__ __forceinline__ place f16(uint32_t k32) const
	{
		return at(k32, X_ONE_F16, X_EIGHT_F16);
	}
	__device__ __forceinline__ place bf16(uint32_t k32) const
	{
		return at(k32, X_ONE_BF16, X_EIGHT_BF16);
	}
	static __device__ __forceinline__ uint4 read(const place &p, int n, uint32_t one, uint32_t eight)
	{
		return NTM == 0 ? lds128(p.smem + one) : *(const uint4 *)(p.gmem[n] + eight);
	}
	/* Group gi after the place; the sums of the 256 that begin at the place; a low part of BF16 */
	static __device__ __forceinline__ uint4 group(const place &p, int n, int gi)
	{
		return read(p, n, gi * 64, gi * 512);
	}
	static __device__ __forceinline__ uint4 sums(const place &p, int n)
	{
		return read(p, n, 512, 4096);
	}
	static __device__ __forceinline__ uint4 low(const place &p, int n, int gi)
	{
		return read(p, n, 512 + gi * 64, 4096 + gi * 512);
	}
};

/* ---- bits to FP16 -------------------------------------------------------------------- */

/* A Q4_K word to one product's operand: codes at mantissa bits 6-9 of 16.0 or 2-5 of 256.0 stand for 16 + q, 256 + q. */
DEV void q4k_operand(uint32_t w, uint32_t *a)
{
	uint32_t r = __funnelshift_r(w, w, 8);

	a[0] = and_or<0x03C003C0u, 0x4C004C00u>(w);
	a[2] = and_or<0x003C003Cu, 0x5C005C00u>(w);
	a[1] = and_or<0x03C003C0u, 0x4C004C00u>(r);
	a[3] = and_or<0x003C003Cu, 0x5C005C00u>(r);
}
/* Four bytes to four FP16 integers less OFF: byte b over 0x64 is 1024 + b. */
template <int OFF> DEV void bytes_operand(uint32_t g, uint32_t g8, uint32_t *a)
{
	const float k = 1024.0f + OFF;

	a[0] = hsub2_const(__byte_perm(g, 0x64646464u, 0x4140), k);
	a[2] = hsub2_const(__byte_perm(g, 0x64646464u, 0x4342), k);
	a[1] = hsub2_const(__byte_perm(g8, 0x64646464u, 0x4140), k);
	a[3] = hsub2_const(__byte_perm(g8, 0x64646464u, 0x4342), k);
}
DEV float half_lo(uint32_t v)
{
	return __low2float(*(__half2 *)&v);
}
DEV float half_hi(uint32_t v)
{
	return __high2float(*(__half2 *)&v);
}
/* Byte i of v, below 64 and exact, as float */
DEV float small_byte(uint32_t v, int i)
{
	uint32_t h = hsub2_const(__byte_perm(v, 0x64646464u, i < 2 ? 0x4140 : 0x4342), 1024.0f);

	return i & 1 ? half_hi(h) : half_lo(h);
}
DEV float signed_byte(uint32_t v, int i)
{
	return (float)((int32_t)(v << (24 - 8 * i)) >> 24);
}

/* acc += d · P: rows g and g + 8 */
DEV void add_scaled(float *acc, float d0, float d1, const float *p)
{
	acc[0] = fmaf(d0, p[0], acc[0]);
	acc[1] = fmaf(d0, p[1], acc[1]);
	acc[2] = fmaf(d1, p[2], acc[2]);
	acc[3] = fmaf(d1, p[3], acc[3]);
}

/* ---- a stage of each type: registers, load, multiply ----------------------------------- */
/* sp: the stage in shared memory, [tile along k][2][tile_size]. n: tiles along k that it holds. k: its first. */

/* R: row tiles of the pair that are multiplied, 2 or (a half at the end of the work) the first alone. */
template <int TILE, int R> struct Stage;

template <int R> struct Stage<APR_TILE_Q4_K, R> {
	uint4 q[R][4], s0[R], s1[R];

	__device__ __forceinline__ void load(uint32_t sp, int lane, uint32_t)
	{
#pragma unroll
		for (int r = 0; r < R; r++) {
#pragma unroll
			for (int j = 0; j < 4; j++)
				q[r][j] = lds128(sp + r * 2304 + j * 512 + lane * 16);
			s0[r] = lds128(sp + r * 2304 + 2048 + (lane >> 2) * 16);
			s1[r] = lds128(sp + r * 2304 + 2048 + (lane >> 2) * 16 + 128);
		}
	}
	/* The first four and last four six-bit scales of a row's 16 bytes (d, dmin, 12 bytes), a byte each; mins alike */
	static __device__ __forceinline__ void scales(const uint4 &s, uint32_t &lo, uint32_t &hi)
	{
		lo = s.y & 0x3f3f3f3fu;
		hi = (s.w & 0x0f0f0f0fu) | (s.y >> 2 & 0x30303030u);
	}
	static __device__ __forceinline__ uint32_t mins(const uint4 &s, bool upper)
	{
		return upper ? (s.w >> 4 & 0x0f0f0f0fu) | (s.z >> 2 & 0x30303030u) : s.z & 0x3f3f3f3fu;
	}
	template <int NTM> __device__ __forceinline__ void mul(const Acts<NTM> &x, uint32_t k, uint32_t, int lane,
	                                                       float (*acc)[Acts<NTM>::NT][4]) const
	{
		const int NT = Acts<NTM>::NT;
		const float zero[4] = {0, 0, 0, 0};
		uint32_t lo0[R], hi0[R], lo1[R], hi1[R];
		const typename Acts<NTM>::place at = x.f16(k >> 5);
		float blk[R][NT][4];
		uint4 xv[NT];

#pragma unroll
		for (int r = 0; r < R; r++) {
			scales(s0[r], lo0[r], hi0[r]);
			scales(s1[r], lo1[r], hi1[r]);
#pragma unroll
			for (int n = 0; n < NT; n++)
				blk[r][n][0] = blk[r][n][1] = blk[r][n][2] = blk[r][n][3] = 0.0f;
		}
#pragma unroll
		for (int gi = 0; gi < 8; gi++) {
#pragma unroll
			for (int n = 0; n < NT; n++)
				xv[n] = x.group(at, n, gi);
#pragma unroll
			for (int r = 0; r < R; r++) {
				const uint4 &qq = q[r][gi >> 1];
				float f0 = small_byte(gi < 4 ? lo0[r] : hi0[r], gi & 3),
					  f1 = small_byte(gi < 4 ? lo1[r] : hi1[r], gi & 3);
				uint32_t a[4], b[4];

				q4k_operand(gi & 1 ? qq.z : qq.x, a);
				q4k_operand(gi & 1 ? qq.w : qq.y, b);
#pragma unroll
				for (int n = 0; n < NT; n++) {
					float p[4];

					mma_f16(p, a, xv[n].x, xv[n].y, zero);
					mma_f16(p, b, xv[n].z, xv[n].w, p);
					add_scaled(blk[r][n], f0, f1, p);
				}
			}
		}
		finish<NTM>(at, lane, lo0, hi0, lo1, hi1, blk, acc);
	}
	/* acc += d · (blk - 256 · Σ scale · offset sum) - dmin · Σ min · sum: one product each over the eight groups */
	template <int NTM>
	__device__ __forceinline__ void finish(const typename Acts<NTM>::place &at, int lane, const uint32_t *lo0,
	                                       const uint32_t *hi0, const uint32_t *lo1, const uint32_t *hi1,
	                                       float (*blk)[Acts<NTM>::NT][4], float (*acc)[Acts<NTM>::NT][4]) const
	{
		const int NT = Acts<NTM>::NT;
		const float zero[4] = {0, 0, 0, 0};
		const bool upper = (lane & 2) != 0;
		const uint32_t sel = lane & 1 ? 0x4342u : 0x4140u; /* groups 2t, 2t + 1 */

#pragma unroll
		for (int r = 0; r < R; r++) {
			uint32_t sc[4], mn[4];
			float d0 = half_lo(s0[r].x), d1 = half_lo(s1[r].x), m0 = half_hi(s0[r].x), m1 = half_hi(s1[r].x);

			sc[0] = sc[2] = hsub2_const(__byte_perm(upper ? hi0[r] : lo0[r], 0x64646464u, sel), 1024.0f);
			sc[1] = sc[3] = hsub2_const(__byte_perm(upper ? hi1[r] : lo1[r], 0x64646464u, sel), 1024.0f);
			mn[0] = mn[2] = hsub2_const(__byte_perm(mins(s0[r], upper), 0x64646464u, sel), 1024.0f);
			mn[1] = mn[3] = hsub2_const(__byte_perm(mins(s1[r], upper), 0x64646464u, sel), 1024.0f);
#pragma unroll
			for (int n = 0; n < NT; n++) {
				uint4 xs = Acts<NTM>::sums(at, n);
				float o[4], m[4];

				mma_f16(o, sc, xs.z, xs.w, zero);
				mma_f16(m, mn, xs.x, xs.y, zero);
#pragma unroll
				for (int e = 0; e < 4; e++) {
					float v = fmaf(-256.0f, o[e], blk[r][n][e]);

					acc[r][n][e] = fmaf(e < 2 ? -m0 : -m1, m[e], fmaf(e < 2 ? d0 : d1, v, acc[r][n][e]));
				}
			}
		}
	}
};

template <int R> struct Stage<APR_TILE_Q6_K, R> : TileQ6K { /* one row tile at a time: two do not fit beside many columns */
	template <int NTM> __device__ __forceinline__ void mul(const Acts<NTM> &x, uint32_t k, float (*acc)[4]) const
	{
		const int NT = Acts<NTM>::NT;
		const float zero[4] = {0, 0, 0, 0};
		const typename Acts<NTM>::place at = x.f16(k >> 5);
		float blk[NT][4];
		uint4 xv[NT];

#pragma unroll
		for (int n = 0; n < NT; n++)
			blk[n][0] = blk[n][1] = blk[n][2] = blk[n][3] = 0.0f;
#pragma unroll
		for (int gi = 0; gi < 8; gi++) {
			uint32_t w0 = word_of(q[gi >> 1], gi % 2 * 2), w1 = word_of(q[gi >> 1], gi % 2 * 2 + 1),
					 w2 = word_of(f[gi >> 2], gi & 3);

#pragma unroll
			for (int n = 0; n < NT; n++)
				xv[n] = x.group(at, n, gi);
#pragma unroll
			for (int h = 0; h < 2; h++) {
				uint32_t a[4], w = h ? w1 : w0;
				uint32_t g = (w & 0x0f0f0f0fu) | ((h ? w2 : w2 << 4) & 0x30303030u);
				uint32_t g8 = (w >> 4 & 0x0f0f0f0fu) | ((h ? w2 >> 2 : w2 << 2) & 0x30303030u);
				float c0 = signed_byte(word_of(s0, gi >> 1), gi % 2 * 2 + h),
					  c1 = signed_byte(word_of(s1, gi >> 1), gi % 2 * 2 + h);

				bytes_operand<32>(g, g8, a);
#pragma unroll
				for (int n = 0; n < NT; n++) {
					float p[4];

					mma_f16(p, a, h ? xv[n].z : xv[n].x, h ? xv[n].w : xv[n].y, zero);
					add_scaled(blk[n], c0, c1, p);
				}
			}
		}
#pragma unroll
		for (int n = 0; n < NT; n++)
			add_scaled(acc[n], half_lo(d), half_hi(d), blk[n]);
	}
};

/* One 32-group of bytes with one scale a row: acc += d · Σ (code - OFF) · x */
template <int OFF, int NT> DEV void mul_bytes32(const uint32_t *part, uint32_t d, const uint4 *xv, float (*acc)[4])
{
	const float zero[4] = {0, 0, 0, 0};
	uint32_t a[4], b[4];

	bytes_operand<OFF>(part[0], part[1], a);
	bytes_operand<OFF>(part[2], part[3], b);
#pragma unroll
	for (int n = 0; n < NT; n++) {
		float p[4];

		mma_f16(p, a, xv[n].x, xv[n].y, zero);
		mma_f16(p, b, xv[n].z, xv[n].w, p);
		add_scaled(acc[n], half_lo(d), half_hi(d), p);
	}
}

template <int R> struct Stage<APR_TILE_Q8_0, R> {
	uint4 q[2][R][2]; /* [tile along k][row tile][group] */
	uint32_t d[2][R][2];

	__device__ __forceinline__ void load(uint32_t sp, int lane, uint32_t n)
	{
#pragma unroll
		for (int i = 0; i < 2; i++)
#pragma unroll
			for (int r = 0; r < R; r++)
#pragma unroll
				for (int gi = 0; gi < 2; gi++)
					if (i < n) {
						q[i][r][gi] = lds128(sp + (i * 2 + r) * 1088 + gi * 512 + lane * 16);
						d[i][r][gi] = lds32(sp + (i * 2 + r) * 1088 + 1024 + gi * 32 + (lane >> 2) * 4);
					}
	}
	template <int NTM> __device__ __forceinline__ void mul(const Acts<NTM> &x, uint32_t k, uint32_t n, int,
	                                                       float (*acc)[Acts<NTM>::NT][4]) const
	{
		const int NT = Acts<NTM>::NT;
		uint4 xv[NT];

#pragma unroll
		for (int i = 0; i < 2; i++)
			if (i < n) {
				const typename Acts<NTM>::place at = x.f16((k >> 5) + i * 2);

#pragma unroll
				for (int gi = 0; gi < 2; gi++) {
#pragma unroll
					for (int c = 0; c < NT; c++)
						xv[c] = x.group(at, c, gi);
#pragma unroll
					for (int r = 0; r < R; r++) {
						const uint4 &w = q[i][r][gi];
						const uint32_t part[4] = {w.x, w.y, w.z, w.w};

						mul_bytes32<128, NT>(part, d[i][r][gi], xv, acc[r]);
					}
				}
			}
	}
};

template <int R> struct Stage<APR_TILE_Q4_1, R> {
	uint4 q[4][R];
	uint2 s[4][R][2]; /* {d, m} of row g, of row g + 8: [tile along k][row tile][group] */

	__device__ __forceinline__ void load(uint32_t sp, int lane, uint32_t n)
	{
#pragma unroll
		for (int i = 0; i < 4; i++)
#pragma unroll
			for (int r = 0; r < R; r++)
				if (i < n) {
					uint32_t b = sp + (i * 2 + r) * 640;

					q[i][r] = lds128(b + lane * 16);
#pragma unroll
					for (int gi = 0; gi < 2; gi++) {
						s[i][r][gi].x = lds32(b + 512 + gi * 64 + (lane >> 2) * 8);
						s[i][r][gi].y = lds32(b + 512 + gi * 64 + (lane >> 2) * 8 + 4);
					}
				}
	}
	template <int NTM> __device__ __forceinline__ void mul(const Acts<NTM> &x, uint32_t k, uint32_t n, int lane,
	                                                       float (*acc)[Acts<NTM>::NT][4]) const
	{
		const int NT = Acts<NTM>::NT;
		uint4 xv[NT];

#pragma unroll
		for (int i = 0; i < 4; i++)
			if (i < n) {
				const typename Acts<NTM>::place at = x.f16((k >> 5) + i * 2);

#pragma unroll
				for (int gi = 0; gi < 2; gi++) {
#pragma unroll
					for (int c = 0; c < NT; c++)
						xv[c] = x.group(at, c, gi);
#pragma unroll
					for (int r = 0; r < R; r++) {
						uint32_t w0 = gi ? q[i][r].z : q[i][r].x, w1 = gi ? q[i][r].w : q[i][r].y;
						const uint32_t part[4] = {w0 & 0x0f0f0f0fu, w0 >> 4 & 0x0f0f0f0fu, w1 & 0x0f0f0f0fu,
						                          w1 >> 4 & 0x0f0f0f0fu};

						mul_bytes32<0, NT>(part, __byte_perm(s[i][r][gi].x, s[i][r][gi].y, 0x5410), xv, acc[r]);
					}
				}
				add_mins<NTM>(x, k + i * 64, i, lane, acc);
			}
	}
	/* acc += Σ m · sum over the tile's two groups: they stand in lane column (k / 64) % 4, zeros elsewhere */
	template <int NTM> __device__ __forceinline__ void add_mins(const Acts<NTM> &x, uint32_t k, int i, int lane,
	                                                            float (*acc)[Acts<NTM>::NT][4]) const
	{
		const bool mine = (lane & 3) == (k >> 6 & 3);
		const typename Acts<NTM>::place at = x.f16(k >> 5 & ~7u);

#pragma unroll
		for (int r = 0; r < R; r++) {
			uint32_t a[4];

			a[0] = a[2] = mine ? __byte_perm(s[i][r][0].x, s[i][r][1].x, 0x7632) : 0;
			a[1] = a[3] = mine ? __byte_perm(s[i][r][0].y, s[i][r][1].y, 0x7632) : 0;
#pragma unroll
			for (int c = 0; c < Acts<NTM>::NT; c++) {
				uint4 xs = x.sums(at, c); /* of other groups: not ours to multiply, even by zero */

				mma_f16(acc[r][c], a, mine ? xs.x : 0, mine ? xs.y : 0, acc[r][c]);
			}
		}
	}
};

template <int R> struct Stage<APR_TILE_Q5_0, R> {
	uint4 q[4][R];
	uint32_t f[4][R], d[4][R][2];

	__device__ __forceinline__ void load(uint32_t sp, int lane, uint32_t n)
	{
#pragma unroll
		for (int i = 0; i < 4; i++)
#pragma unroll
			for (int r = 0; r < R; r++)
				if (i < n) {
					uint32_t b = sp + (i * 2 + r) * 704;

					q[i][r] = lds128(b + lane * 16);
					f[i][r] = lds32(b + 512 + lane * 4);
					d[i][r][0] = lds32(b + 640 + (lane >> 2) * 4);
					d[i][r][1] = lds32(b + 672 + (lane >> 2) * 4);
				}
	}
	template <int NTM> __device__ __forceinline__ void mul(const Acts<NTM> &x, uint32_t k, uint32_t n, int,
	                                                       float (*acc)[Acts<NTM>::NT][4]) const
	{
		const int NT = Acts<NTM>::NT;
		uint4 xv[NT];

#pragma unroll
		for (int i = 0; i < 4; i++)
			if (i < n) {
				const typename Acts<NTM>::place at = x.f16((k >> 5) + i * 2);

#pragma unroll
				for (int gi = 0; gi < 2; gi++) {
#pragma unroll
					for (int c = 0; c < NT; c++)
						xv[c] = x.group(at, c, gi);
#pragma unroll
					for (int r = 0; r < R; r++) {
						uint32_t w0 = gi ? q[i][r].z : q[i][r].x, w1 = gi ? q[i][r].w : q[i][r].y, part[4];
						uint32_t h =
								gi ? f[i][r] : f[i][r] << 4; /* fifth bit of part p now at bit 4 + p of each byte */

						part[0] = (w0 & 0x0f0f0f0fu) | (h & 0x10101010u);
						part[1] = (w0 >> 4 & 0x0f0f0f0fu) | (h >> 1 & 0x10101010u);
						part[2] = (w1 & 0x0f0f0f0fu) | (h >> 2 & 0x10101010u);
						part[3] = (w1 >> 4 & 0x0f0f0f0fu) | (h >> 3 & 0x10101010u);
						mul_bytes32<16, NT>(part, d[i][r][gi], xv, acc[r]);
					}
				}
			}
	}
};

template <bool BF16, int R> struct StageReal {
	uint4 q[R][4]; /* [row tile][group · 2 + product] */

	__device__ __forceinline__ void load(uint32_t sp, int lane, uint32_t)
	{
#pragma unroll
		for (int r = 0; r < R; r++)
#pragma unroll
			for (int j = 0; j < 4; j++)
				q[r][j] = lds128(sp + r * 2048 + j * 512 + lane * 16);
	}
	template <int NTM> __device__ __forceinline__ void mul(const Acts<NTM> &x, uint32_t k, uint32_t, int,
	                                                       float (*acc)[Acts<NTM>::NT][4]) const
	{
		const typename Acts<NTM>::place at = BF16 ? x.bf16(k >> 5) : x.f16(k >> 5);

#pragma unroll
		for (int gi = 0; gi < 2; gi++)
#pragma unroll
			for (int c = 0; c < Acts<NTM>::NT; c++)
#pragma unroll
				for (int low = 0; low < (BF16 ? 2 : 1); low++) {
					uint4 xv = low ? x.low(at, c, gi) : x.group(at, c, gi);

#pragma unroll
					for (int r = 0; r < R; r++) {
						const uint4 &a = q[r][gi * 2], &b = q[r][gi * 2 + 1];
						const uint32_t a4[4] = {a.x, a.y, a.z, a.w}, b4[4] = {b.x, b.y, b.z, b.w};

						if (BF16) {
							mma_bf16(acc[r][c], a4, xv.x, xv.y, acc[r][c]);
							mma_bf16(acc[r][c], b4, xv.z, xv.w, acc[r][c]);
						} else {
							mma_f16(acc[r][c], a4, xv.x, xv.y, acc[r][c]);
							mma_f16(acc[r][c], b4, xv.z, xv.w, acc[r][c]);
						}
					}
				}
	}
};
template <int R> struct Stage<APR_TILE_F16, R> : StageReal<false, R> {
};
template <int R> struct Stage<APR_TILE_BF16, R> : StageReal<true, R> {
};

#endif
