/* SPDX-License-Identifier: MIT */
/*
 * Replaying a bucket beside the steps that run: with the model's weights, and rows
 * that belong to no sequence.
 *
 * Owns: those rows and their timing. Their slots are dead, so that no page is written
 * and nothing attends; a prefill bucket has no tiles. A bucket goes onto the compute
 * stream in one piece between two steps, whose launches write anew whatever it leaves
 * behind. Waits without holding anything up: the driving thread is another one.
 */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "graphs/graphs.h"

#define REPLAYS 3u

static void fill_rows(const struct rows_at *r, uint32_t n)
{
	uint32_t i;

	*r->n = n;
	r->n_tiles[0] = r->n_tiles[1] = 0;
	for (i = 0; i < n; i++) {
		r->tok[i] = 0;
		r->pos[i] = 0;
		r->slot[i] = APR_CUDA_DEAD;
	}
}

static void fill_head(struct head_block *h, uint32_t n)
{
	uint32_t i;

	memset(h, 0, sizeof *h);
	h->n_out = n;
	for (i = 0; i < n; i++) {
		h->out[i] = i;
		h->draws[i] = (struct apr_cuda_draw){.kind = APR_CUDA_SAMPLE, .top_p = 1.0f, .repeat_penalty = 1.0f};
	}
}

static int put_rows(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t n)
{
	const struct rows_at *r = &m->rest.warm, *to = &m->dev.decode;
	struct edge_begin a = {.n_rows = n, .tok = r->tok, .pos = r->pos, .slot = r->slot, .to_n = to->n, .to_tok = to->tok,
	                       .to_pos = to->pos, .to_slot = to->slot, .states = m->dev.states, .to_head = m->dev.head};
	cudaError_t rc;

	if (kind == APR_GRAPH_PREFILL) {
		rc = cudaMemcpyAsync(m->dev.prefill.base, r->base, r->bytes, cudaMemcpyHostToDevice, m->ctx->compute);
		return graphs_cuda(m->ctx, rc, "a copy to the device", NULL, 0);
	}
	if (kind == APR_GRAPH_HEAD) {
		a.n_rows = 0;
		a.head = m->rest.warm_head;
		a.n_out = n;
	}
	return apr_graphs_begin(m->ctx->compute, &a);
}

/* One replay between two events. */
static int replay(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t n, cudaEvent_t at[2])
{
	struct apr_backend_ctx *c = m->ctx;
	int rc;

	pthread_mutex_lock(&c->enqueue_lock);
	rc = put_rows(m, kind, n);
	if (!rc)
		rc = graphs_cuda(c, cudaEventRecord(at[0], c->compute), "an event", NULL, 0);
	if (!rc)
		rc = graphs_launch(m, kind, n);
	if (!rc)
		rc = graphs_cuda(c, cudaEventRecord(at[1], c->compute), "an event", NULL, 0);
	pthread_mutex_unlock(&c->enqueue_lock);
	return rc;
}

static int wait_for(struct apr_backend_ctx *c, cudaEvent_t e)
{
	const struct timespec nap = {.tv_nsec = 100000};
	cudaError_t rc;

	while ((rc = cudaEventQuery(e)) == cudaErrorNotReady)
		nanosleep(&nap, NULL);
	return graphs_cuda(c, rc, "a replay", NULL, 0);
}

static int time_replays(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t n, cudaEvent_t at[2], double *us)
{
	uint32_t i;
	int rc = 0;

	*us = 0.0;
	for (i = 0; i < REPLAYS && !rc; i++) {
		float ms = 0.0f;

		rc = replay(m, kind, n, at);
		if (!rc)
			rc = wait_for(m->ctx, at[1]);
		if (!rc)
			rc = graphs_cuda(m->ctx, cudaEventElapsedTime(&ms, at[0], at[1]), "an event", NULL, 0);
		if (!i || (double)ms * 1e3 < *us)
			*us = (double)ms * 1e3;
	}
	return rc;
}

int graphs_warm(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t rows, double *us, char *err, size_t errlen)
{
	struct apr_backend_ctx *c = m->ctx;
	cudaEvent_t at[2] = {NULL, NULL};
	int rc;

	if (rows > (kind == APR_GRAPH_PREFILL ? m->sizes.max_rows : APR_CUDA_DECODE_ROWS))
		return graphs_fail(-EINVAL, err, errlen, "no bucket of %u rows", rows);
	pthread_mutex_lock(&c->warm_lock); /* the pinned rows are one replay's at a time */
	rc = graphs_cuda(c, cudaSetDevice(c->device), "the device", err, errlen);
	if (!rc)
		rc = graphs_cuda(c, cudaEventCreate(&at[0]), "an event", err, errlen);
	if (!rc)
		rc = graphs_cuda(c, cudaEventCreate(&at[1]), "an event", err, errlen);
	if (!rc) {
		fill_rows(&m->rest.warm, rows);
		fill_head(m->rest.warm_head, rows < APR_HEAD_ROWS ? rows : APR_HEAD_ROWS);
		rc = time_replays(m, kind, rows, at, us);
		if (rc)
			graphs_say(err, errlen, "the device failed in a replay; see the log");
	}
	if (at[0])
		cudaEventDestroy(at[0]);
	if (at[1])
		cudaEventDestroy(at[1]);
	pthread_mutex_unlock(&c->warm_lock);
	return rc;
}
