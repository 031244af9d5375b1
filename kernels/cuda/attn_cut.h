/* SPDX-License-Identifier: MIT */
/*
 * Tiles of a prompt's attention, as the host makes them and the device reads them.
 *
 * Owns: their struct and how rows are cut into them. No CUDA here: it is host code,
 * tested where there is no device.
 *
 * A tile has at most 64 consecutive positions of one sequence in consecutive rows. One
 * over many keys may be divided, so that it fills the device: it then stands once for
 * each range of segments, n_tiles[0] in all, and once more after those, among the
 * n_tiles[1] divided ones, whose results are merged.
 */
#ifndef APR_KERNELS_CUDA_ATTN_CUT_H
#define APR_KERNELS_CUDA_ATTN_CUT_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define APR_CUDA_ATTN_ROWS 64u       /* of a tile */
#define APR_CUDA_ATTN_SEG 1024u      /* keys that have one running state */
#define APR_CUDA_ATTN_SEGS (1u << 18) /* of a whole tile: more than any has */
#define APR_CUDA_ATTN_RANGES 128u    /* that tiles are divided into beyond one each, at most */
#define APR_CUDA_ATTN_DIVIDED 32u    /* divided tiles of a step, at most */
#define APR_CUDA_ATTN_MORE (APR_CUDA_ATTN_RANGES + APR_CUDA_ATTN_DIVIDED)
#define APR_CUDA_WHOLE 0xffffffffu

struct apr_cuda_attn_tile {
	uint32_t slot, row, rows, pos; /* row, pos: of the first */
	uint32_t seg, segs; /* the range; whole: 0 and APR_CUDA_ATTN_SEGS; among the divided: how many ranges, 0 */
	uint32_t part;      /* divided: its segments' results go to parts part …, one each */
	uint32_t merge;     /* APR_CUDA_WHOLE, or its place among the divided */
};

struct apr_cuda_attn_plan { /* what the division goes by */
	uint32_t sms, items; /* multiprocessors; how many of them a tile keeps busy, in a layer */
	uint32_t parts;      /* that scratch holds */
};

/* The tiles of n rows, those with the most keys first. tiles has room for as many as sequences and rows need
 * (ceil(n / 64) + sequences - 1) and APR_CUDA_ATTN_MORE; n_tiles[2]. */
void apr_cuda_attn_cut(const struct apr_cuda_attn_plan *p, const uint32_t *pos, const uint32_t *slot, uint32_t n,
                       struct apr_cuda_attn_tile *tiles, uint32_t *n_tiles);

#ifdef __cplusplus
}
#endif

#endif
