/* SPDX-License-Identifier: MIT */
/*
 * What stands around a pass's graphs: structs that C and CUDA share, and the two
 * kernels that read and write them (edges.cu).
 *
 * Owns: the block of wanted rows, what is kept of a slot from one step to the next.
 * Does not own the rows' meaning (step.c) nor what a draw is (kernels/cuda).
 */
#ifndef APR_GRAPHS_EDGES_H
#define APR_GRAPHS_EDGES_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "kernels/cuda/ops_cuda.h"

#define ENDS_INLINE 8u

struct slot_state { /* in device memory, of each slot, written by each draw of it */
	uint32_t token; /* drawn last */
	uint32_t alive; /* something follows it */
};

struct draw_end { /* what becomes of the slot that a draw is for */
	uint32_t slot;
	uint16_t sample; /* not a score: there is a slot's state to write */
	uint8_t last;    /* the limit: nothing follows */
	uint8_t unseen;  /* the slot's last token counts once more in the draw's seen ids, which have room for it */
	uint32_t row_of_last; /* the row's token was that token: it may be dead */
	uint32_t n_ends;
	const uint32_t *ends; /* device; where they are more than fit below */
	uint32_t few[ENDS_INLINE];
	uint32_t dead; /* on the device: the row was */
	uint32_t unused;
};

struct head_block { /* at most APR_HEAD_ROWS wanted rows */
	uint32_t n_out, step, unused[14];
	uint32_t out[APR_HEAD_ROWS];
	struct apr_cuda_draw draws[APR_HEAD_ROWS];
	struct draw_end ends[APR_HEAD_ROWS];
};

#ifdef __cplusplus
extern "C" {
#endif

struct edge_begin { /* from pinned memory to where the graphs read; either part may be missing */
	uint32_t n_rows, n_out;
	const int32_t *tok; /* pinned */
	const uint32_t *pos, *slot;
	uint32_t *to_n;
	int32_t *to_tok;
	uint32_t *to_pos, *to_slot;
	const struct head_block *head; /* pinned */
	struct head_block *to_head;
	const struct slot_state *states;
	uint32_t *near; /* pinned, NULL: not to be stored */
	uint32_t number;
};
int apr_graphs_begin(cudaStream_t stream, const struct edge_begin *a);

struct edge_end { /* from where the sampler wrote to pinned memory */
	uint32_t n_out;
	const struct head_block *head;
	const struct apr_cuda_record *records;
	struct apr_cuda_record *to_records; /* pinned */
	const struct apr_cuda_top *tops;
	struct apr_cuda_top *to_tops; /* pinned, NULL: none asked for */
	struct slot_state *states;
	uint32_t *mark; /* pinned, NULL: the step goes on */
	uint32_t number;
};
int apr_graphs_end(cudaStream_t stream, const struct edge_end *a);
int apr_graphs_mark(cudaStream_t stream, uint32_t *mark, uint32_t number);
int apr_graphs_edges_load(void); /* before READY: loads the three */

#ifdef __cplusplus
}
#endif

#endif
