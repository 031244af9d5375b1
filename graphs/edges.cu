/* SPDX-License-Identifier: MIT */
/*
 * Before and after a pass's graphs: see edges.h.
 *
 * Owns: reading rows and draws from pinned memory, the tokens that are known on the
 * device alone, the slots' states, the records' way to pinned memory, the marks. A
 * step's launches are in one stream's order, so that what one step's end leaves in a
 * slot's state is there when the next one begins; nothing here waits for anything else.
 */
#include <cuda_runtime.h>
#include <errno.h>

#include "graphs/edges.h"

extern "C" {
#include "kernels/common/sample.h"
}

#define THREADS 128u
#define LAST_TOKEN (-1) /* APR_TOK_LAST */

static_assert(sizeof(draw_end) % 8 == 0 && sizeof(apr_cuda_draw) % 8 == 0, "copied by words");
static_assert(sizeof(apr_cuda_record) == 64 && sizeof(apr_cuda_top) % 16 == 0, "copied by lines");

static __device__ __forceinline__ void store_release(uint32_t *at, uint32_t v)
{
	/* pairs with the acquire loads of graphs/step.c's watching thread */
	asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

static __device__ void begin_rows(const edge_begin &a)
{
	for (uint32_t i = threadIdx.x; i < a.n_rows; i += THREADS) {
		int32_t tok = a.tok[i];
		uint32_t slot = a.slot[i], pos = a.pos[i];

		if (tok == LAST_TOKEN) {
			slot_state s = a.states[slot];

			tok = s.alive ? (int32_t)s.token : 0;
			slot = s.alive ? slot : APR_CUDA_DEAD;
		}
		a.to_tok[i] = tok;
		a.to_pos[i] = pos;
		a.to_slot[i] = slot;
	}
	if (threadIdx.x == 0)
		*a.to_n = a.n_rows;
}

/* One more output occurrence of id; the list has room for one more entry. All threads call. */
static __device__ uint32_t see(apr_seen *list, uint32_t n, uint32_t id)
{
	__shared__ uint32_t found;

	if (threadIdx.x == 0)
		found = 0;
	__syncthreads();
	for (uint32_t i = threadIdx.x; i < n; i += THREADS)
		if (list[i].id == id) { /* each id stands once */
			list[i].output++;
			found = 1;
		}
	__syncthreads();
	if (!found && threadIdx.x == 0)
		list[n] = {id, 0, 1};
	return found ? n : n + 1;
}

/* One draw a block: its words first, then what is known here alone. */
static __device__ void begin_draw(const edge_begin &a, uint32_t i)
{
	const uint64_t *from = (const uint64_t *)&a.head->draws[i], *end = (const uint64_t *)&a.head->ends[i];
	uint64_t *to = (uint64_t *)&a.to_head->draws[i], *to_end = (uint64_t *)&a.to_head->ends[i];
	uint32_t t = threadIdx.x;
	draw_end e;

	if (t < sizeof(apr_cuda_draw) / 8)
		to[t] = from[t];
	if (t >= 32 && t - 32 < sizeof(draw_end) / 8)
		to_end[t - 32] = end[t - 32];
	if (t == 64)
		a.to_head->out[i] = a.head->out[i];
	__syncthreads();
	e = a.to_head->ends[i];
	if (!e.row_of_last)
		return;
	slot_state s = a.states[e.slot];

	if (!s.alive) {
		if (t == 0)
			a.to_head->ends[i].dead = 1;
		return;
	}
	if (e.unseen) {
		apr_cuda_draw *d = &a.to_head->draws[i];
		uint32_t n = see((apr_seen *)d->seen, d->n_seen, s.token);

		__syncthreads();
		if (t == 0)
			d->n_seen = n;
	}
}

static __global__ void __launch_bounds__(THREADS) begin_pass(const __grid_constant__ edge_begin a)
{
	if (blockIdx.x) {
		begin_draw(a, blockIdx.x - 1);
		return;
	}
	if (a.n_rows)
		begin_rows(a);
	if (threadIdx.x == 0 && a.n_out) {
		a.to_head->n_out = a.n_out;
		a.to_head->step = a.number;
	}
	if (threadIdx.x == 0 && a.near)
		store_release(a.near, a.number);
}

static __device__ bool ends_with(const draw_end &e, uint32_t id)
{
	const uint32_t *list = e.n_ends > ENDS_INLINE ? e.ends : e.few;

	for (uint32_t i = 0; i < e.n_ends; i++)
		if (list[i] == id)
			return true;
	return false;
}

static __global__ void __launch_bounds__(THREADS) end_pass(const __grid_constant__ edge_end a)
{
	const uint4 *rec = (const uint4 *)a.records, *top = (const uint4 *)a.tops;

	for (uint32_t i = threadIdx.x; i < a.n_out * (sizeof(apr_cuda_record) / 16); i += THREADS)
		((uint4 *)a.to_records)[i] = rec[i];
	for (uint32_t i = threadIdx.x; a.to_tops && i < a.n_out * (sizeof(apr_cuda_top) / 16); i += THREADS)
		((uint4 *)a.to_tops)[i] = top[i];
	for (uint32_t i = threadIdx.x; i < a.n_out; i += THREADS) {
		draw_end e = a.head->ends[i];
		apr_cuda_record r = a.records[i];

		if (e.sample)
			a.states[e.slot] = {r.id, !e.dead && !e.last && !r.numeric && !ends_with(e, r.id)};
	}
	__threadfence_system();
	__syncthreads();
	if (threadIdx.x == 0 && a.mark)
		store_release(a.mark, a.number);
}

static __global__ void store_mark(uint32_t *mark, uint32_t number)
{
	store_release(mark, number);
}

/* A kernel is loaded when it is first asked for. These are in no graph, so without this the first request would load them. */
extern "C" int apr_graphs_edges_load(void)
{
	const void *const kernel[] = {(const void *)begin_pass, (const void *)end_pass, (const void *)store_mark};
	cudaFuncAttributes a;

	for (const void *k : kernel)
		if (cudaFuncGetAttributes(&a, k) != cudaSuccess)
			return -EIO;
	return 0;
}

static int launched(void)
{
	return cudaGetLastError() == cudaSuccess ? 0 : -EIO;
}

extern "C" int apr_graphs_begin(cudaStream_t stream, const edge_begin *a)
{
	begin_pass<<<1 + a->n_out, THREADS, 0, stream>>>(*a);
	return launched();
}

extern "C" int apr_graphs_end(cudaStream_t stream, const edge_end *a)
{
	end_pass<<<1, THREADS, 0, stream>>>(*a);
	return launched();
}

extern "C" int apr_graphs_mark(cudaStream_t stream, uint32_t *mark, uint32_t number)
{
	store_mark<<<1, 1, 0, stream>>>(mark, number);
	return launched();
}
