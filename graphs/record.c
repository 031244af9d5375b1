/* SPDX-License-Identifier: MIT */
/*
 * The forward pass as CUDA graphs: one a bucket of prefill rows, of decode rows, of
 * wanted rows.
 *
 * Owns: which launches an op becomes in either arithmetic, capture, the check of
 * what was captured, replay; where no graphs are wanted, the same launches one by
 * one. Each bucket runs once eagerly over no rows before capture: that loads the
 * kernels outside of it.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "graphs/graphs.h"

#define MAX_NODES 8192

struct recorder {
	struct apr_backend_model *m;
	enum apr_graph_kind kind;
	struct apr_cuda_launch l;
	uint32_t n_calls;
	struct apr_op_head head;
	bool has_head;
	char why[160];
};

/* ---- refusals ------------------------------------------------------------------------- */

int graphs_supports(struct apr_backend_ctx *c, enum apr_op_kind kind, const void *args, uint8_t route_id, char *err,
                    size_t errlen)
{
	const struct apr_op_attn_in *ai = args;
	const struct apr_op_ffn_in *fi = args;
	int rc;

	(void)c;
	(void)route_id; /* each reads every type */
	switch (kind) {
	case APR_OP_EMBED:
		return graphs_bad_mat(((const struct apr_op_embed *)args)->w, "token_embd", err, errlen);
	case APR_OP_ATTN_IN:
		rc = graphs_bad_mat(ai->wq, "attn_q", err, errlen);
		rc = rc ? rc : graphs_bad_mat(ai->wk, "attn_k", err, errlen);
		return rc ? rc : graphs_bad_mat(ai->wv, "attn_v", err, errlen);
	case APR_OP_ATTN:
		return 0;
	case APR_OP_PROJ:
		return graphs_bad_mat(((const struct apr_op_proj *)args)->w, "weight", err, errlen);
	case APR_OP_FFN_IN:
		if (fi->gate && fi->gate != fi->up)
			return graphs_fail(-ENOTSUP, err, errlen, "ffn_gate and ffn_up are not one matrix");
		return graphs_bad_mat(fi->up, "ffn_up", err, errlen);
	case APR_OP_HEAD:
		return graphs_bad_mat(((const struct apr_op_head *)args)->w, "output", err, errlen);
	}
	return graphs_fail(-ENOTSUP, err, errlen, "unknown op %u", (unsigned)kind);
}

static int checked(struct recorder *r, enum apr_op_kind kind, const void *args)
{
	r->n_calls++;
	return graphs_supports(r->m->ctx, kind, args, 0, r->why, sizeof r->why);
}

/* ---- ops ----------------------------------------------------------------------------------- */

/* The exact route has one arithmetic, for generated rows too. */
static bool by_route(const struct recorder *r)
{
	return r->kind == APR_GRAPH_PREFILL || r->m->sizes.route_id == ROUTE_F32;
}

static int rec_embed(void *ctx, const struct apr_op_embed *a)
{
	struct recorder *r = ctx;
	int rc = checked(r, APR_OP_EMBED, a);

	return rc ? rc : apr_cuda_embed(&r->l, a);
}
static int rec_attn_in(void *ctx, const struct apr_op_attn_in *a)
{
	struct recorder *r = ctx;
	int rc = checked(r, APR_OP_ATTN_IN, a);

	if (rc)
		return rc;
	return by_route(r) ? graphs_attn_in(r->m, &r->l, a) : apr_cuda_decode_attn_in(&r->l, a);
}
static int rec_attn(void *ctx, const struct apr_op_attn *a)
{
	struct recorder *r = ctx;
	const struct rows_at *p = &r->m->dev.prefill;
	int rc = checked(r, APR_OP_ATTN, a);

	if (rc)
		return rc;
	if (r->kind == APR_GRAPH_PREFILL)
		return apr_cuda_prefill_attn(&r->l, a, p->tiles, p->n_tiles, tiles_of(r->l.bucket));
	return apr_cuda_decode_attn(&r->l, a);
}
static int rec_proj(void *ctx, const struct apr_op_proj *a)
{
	struct recorder *r = ctx;
	int rc = checked(r, APR_OP_PROJ, a);

	if (rc)
		return rc;
	return by_route(r) ? graphs_proj(r->m, &r->l, a) : apr_cuda_decode_proj(&r->l, a);
}
static int rec_ffn_in(void *ctx, const struct apr_op_ffn_in *a)
{
	struct recorder *r = ctx;
	int rc = checked(r, APR_OP_FFN_IN, a);

	if (rc)
		return rc;
	return by_route(r) ? graphs_ffn_in(r->m, &r->l, a) : apr_cuda_decode_ffn_in(&r->l, a);
}
static int rec_head(void *ctx, const struct apr_op_head *a) /* a graph of its own */
{
	struct recorder *r = ctx;
	int rc = checked(r, APR_OP_HEAD, a);

	r->head = *a;
	r->has_head = !rc;
	return rc;
}

/* ---- capture ---------------------------------------------------------------------------------- */

struct job { /* what one bucket runs */
	struct recorder *r;
	apr_build_fn build; /* NULL: head and sampling */
	void *arg;
};

static int run_head(struct recorder *r)
{
	struct apr_backend_model *m = r->m;
	int rc = by_route(r) ? graphs_head(m, &r->l, &r->head) : apr_cuda_decode_head(&r->l, &r->head);

	return rc ? rc : apr_cuda_sample(&r->l, r->head.logits, m->sizes.n_real, r->head.n_vocab, m->dev.head->draws,
	                                 &m->dev.head->n_out, &m->dev.head->step, m->dev.records, m->dev.tops);
}

static int run_job(const struct job *j)
{
	const struct apr_ops ops = {.ctx = j->r, .embed = rec_embed, .attn_in = rec_attn_in, .attn = rec_attn,
	                            .proj = rec_proj, .ffn_in = rec_ffn_in, .head = rec_head};

	j->r->n_calls = 0;
	j->r->has_head = j->r->has_head && !j->build;
	return j->build ? j->build(j->arg, &ops) : run_head(j->r);
}

static const char *where(char *buf, size_t len, const struct job *j)
{
	static const char *const op[5] = {"attn_in", "attn", "attn_output", "ffn_in", "ffn_down"};
	uint32_t n = j->r->n_calls;

	if (!j->build)
		snprintf(buf, len, "output and sampling");
	else if (n <= 1)
		snprintf(buf, len, "embed");
	else
		snprintf(buf, len, "blk.%u %s", (n - 2) / 5, op[(n - 2) % 5]);
	return buf;
}

static const char *node_name(enum cudaGraphNodeType t)
{
	switch (t) {
	case cudaGraphNodeTypeHost:
		return "a call of the host";
	case cudaGraphNodeTypeMemAlloc:
		return "an allocation of memory";
	case cudaGraphNodeTypeMemFree:
		return "a freeing of memory";
	case cudaGraphNodeTypeWaitEvent:
	case cudaGraphNodeTypeEventRecord:
		return "an event";
	case cudaGraphNodeTypeExtSemaphoreSignal:
	case cudaGraphNodeTypeExtSemaphoreWait:
		return "a semaphore";
	case cudaGraphNodeTypeGraph:
		return "another graph";
	default:
		return "a node of a type that is not known here";
	}
}

/* Kernels, copies and fills alone: nothing that allocates, calls the host or waits for it. */
static int check_nodes(cudaGraph_t g, char *err, size_t errlen)
{
	static cudaGraphNode_t node[MAX_NODES]; /* recording is on one thread at a time */
	size_t n = 0, i;

	if (cudaGraphGetNodes(g, NULL, &n) || n > MAX_NODES || cudaGraphGetNodes(g, node, &n))
		return graphs_fail(-EIO, err, errlen, "a graph of %zu nodes cannot be checked", n);
	for (i = 0; i < n; i++) {
		enum cudaGraphNodeType t;

		if (cudaGraphNodeGetType(node[i], &t))
			return graphs_fail(-EIO, err, errlen, "a graph's node has no type");
		if (t != cudaGraphNodeTypeKernel && t != cudaGraphNodeTypeMemcpy && t != cudaGraphNodeTypeMemset &&
		    t != cudaGraphNodeTypeEmpty)
			return graphs_fail(-ENOTSUP, err, errlen, "%s was captured: node %zu of %zu", node_name(t), i, n);
	}
	return 0;
}

static int capture(const struct job *j, cudaGraphExec_t *exec, char *err, size_t errlen)
{
	struct apr_backend_ctx *c = j->r->m->ctx;
	cudaGraph_t g = NULL;
	char at[32], why[120];
	cudaError_t ce = cudaStreamBeginCapture(c->setup, cudaStreamCaptureModeThreadLocal);
	int rc = graphs_cuda(c, ce, "capture", err, errlen), end;

	if (rc)
		return rc;
	rc = run_job(j);
	if (rc)
		graphs_fail(rc, err, errlen, "capture of %s: %s", where(at, sizeof at, j), strerror(-rc));
	ce = cudaStreamEndCapture(c->setup, &g);
	end = graphs_cuda(c, ce, "the end of capture", rc ? NULL : err, errlen);
	rc = rc ? rc : end;
	if (!rc) {
		rc = check_nodes(g, why, sizeof why);
		if (rc)
			graphs_fail(rc, err, errlen, "%s, %u rows: %s", j->build ? "the forward pass" : "output and sampling", j->r->l.bucket,
			            why);
	}
	if (!rc)
		rc = graphs_cuda(c, cudaGraphInstantiate(exec, g, 0), "instantiating a graph", err, errlen);
	if (!rc)
		rc = graphs_cuda(c, cudaGraphUpload(*exec, c->setup), "uploading a graph", err, errlen);
	if (g)
		cudaGraphDestroy(g);
	return rc;
}

/* Eagerly over no rows, then captured. */
static int record_one(const struct job *j, struct bucket_set *set, uint32_t rows, char *err, size_t errlen)
{
	struct apr_backend_ctx *c = j->r->m->ctx;
	struct bucket *b = &set->b[set->n];
	char at[32];
	int rc;

	if (set->n == MAX_BUCKETS)
		return graphs_fail(-E2BIG, err, errlen, "too many buckets");
	j->r->l.bucket = rows;
	rc = run_job(j);
	if (rc) {
		cudaError_t ce = cudaGetLastError();

		return graphs_fail(rc, err, errlen, "%s, %u rows: %s", where(at, sizeof at, j), rows,
		                   j->r->why[0]        ? j->r->why
		                   : rc == -ENOTSUP    ? "the cuda backend has no kernel for this shape"
		                   : ce != cudaSuccess ? cudaGetErrorString(ce)
		                                       : strerror(-rc));
	}
	rc = graphs_cuda(c, cudaStreamSynchronize(c->setup), "the first run of a bucket", err, errlen);
	if (!rc && !c->cfg.no_graphs)
		rc = capture(j, &b->exec, err, errlen);
	if (rc) {
		if (b->exec)
			cudaGraphExecDestroy(b->exec);
		b->exec = NULL;
		return rc;
	}
	b->rows = rows;
	set->n++;
	return 0;
}

/* What the launches of a kind share. */
static void aim(struct recorder *r, enum apr_graph_kind kind)
{
	struct apr_backend_model *m = r->m;
	const struct rows_at *at = kind == APR_GRAPH_PREFILL ? &m->dev.prefill : &m->dev.decode;

	r->kind = kind;
	r->l.generated = kind != APR_GRAPH_PREFILL;
	r->l.pdl = !by_route(r); /* the products between do not take part */
	if (kind == APR_GRAPH_HEAD)
		r->l.rows = (struct apr_cuda_rows){.n = &m->dev.head->n_out, .n_out = &m->dev.head->n_out, .out = m->dev.head->out};
	else
		r->l.rows = (struct apr_cuda_rows){.n = at->n, .n_out = at->n, .tok = at->tok, .pos = at->pos, .slot = at->slot};
}

static int record_prefill(struct job *j, char *err, size_t errlen)
{
	struct apr_backend_model *m = j->r->m;
	uint32_t size[MAX_BUCKETS], n = graphs_sizes(m, true, size), most = graphs_most_fused(m), i;
	int rc = 0;

	aim(j->r, APR_GRAPH_PREFILL);
	for (i = 0; i < n && !rc; i++)
		if (size[i] >= 64 || size[i] <= most)
			rc = record_one(j, &m->prefill, size[i], err, errlen);
	return rc;
}

static int record_decode(struct job *j, enum apr_graph_kind kind, struct bucket_set *set, char *err, size_t errlen)
{
	uint32_t rows;
	int rc = 0;

	aim(j->r, kind);
	for (rows = 1; rows <= APR_CUDA_DECODE_ROWS && !rc; rows *= 2)
		rc = record_one(j, set, rows, err, errlen);
	return rc;
}

int graphs_record(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t bucket, apr_build_fn build, void *arg,
                  char *err, size_t errlen)
{
	struct apr_backend_ctx *c = m->ctx;
	struct recorder r = {.m = m, .l = {.stream = c->setup, .sms = (uint32_t)c->sms, .scratch = m->scratch,
	                                   .scratch_bytes = m->scratch_bytes}};
	struct job j = {.r = &r, .build = build, .arg = arg};
	size_t before = 0, after = 0, all;
	int rc;

	if (kind != APR_GRAPH_STEP || bucket)
		return graphs_fail(-EINVAL, err, errlen, "the cuda backend records all buckets of a model at once");
	rc = graphs_cuda(c, cudaSetDevice(c->device), "the device", err, errlen);
	if (rc)
		return rc;
	graphs_forget(m);
	m->build = build;
	m->build_arg = arg;
	(void)cudaMemGetInfo(&before, &all);
	if (apr_graphs_edges_load())
		return graphs_fail(-EIO, err, errlen, "loading kernels: %s", cudaGetErrorString(cudaGetLastError()));
	rc = record_prefill(&j, err, errlen);
	if (!rc)
		rc = record_decode(&j, APR_GRAPH_DECODE, &m->decode, err, errlen);
	if (!rc && !r.has_head)
		rc = graphs_fail(-EINVAL, err, errlen, "a forward pass must end in its head");
	j.build = NULL;
	if (!rc)
		rc = record_decode(&j, APR_GRAPH_HEAD, &m->head, err, errlen);
	if (!rc)
		rc = graphs_cuda(c, cudaStreamSynchronize(c->setup), "uploading graphs", err, errlen);
	if (rc)
		return rc;
	(void)cudaMemGetInfo(&after, &all);
	m->head_op = r.head;
	m->graph_bytes = before > after ? before - after : 0;
	graphs_log(c, 1, "recorded %u graphs of prompt rows, %u of generated rows, %u of wanted rows: %zu MiB beside the plan%s",
	           m->prefill.n, m->decode.n, m->head.n, (size_t)(m->graph_bytes >> 20),
	           c->cfg.no_graphs ? "; not captured, as asked" : "");
	return 0;
}

/* ---- replay ------------------------------------------------------------------------------------ */

static struct bucket_set *set_of(struct apr_backend_model *m, enum apr_graph_kind kind)
{
	return kind == APR_GRAPH_PREFILL ? &m->prefill : kind == APR_GRAPH_DECODE ? &m->decode : &m->head;
}

/* A bucket's launches one by one. */
static int run_eagerly(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t rows)
{
	struct apr_backend_ctx *c = m->ctx;
	struct recorder r = {.m = m, .head = m->head_op, .has_head = true,
	                     .l = {.stream = c->compute, .sms = (uint32_t)c->sms, .bucket = rows, .scratch = m->scratch,
	                           .scratch_bytes = m->scratch_bytes}};
	struct job j = {.r = &r, .build = kind == APR_GRAPH_HEAD ? NULL : m->build, .arg = m->build_arg};

	aim(&r, kind);
	return run_job(&j);
}

int graphs_launch(struct apr_backend_model *m, enum apr_graph_kind kind, uint32_t rows)
{
	struct bucket_set *set = set_of(m, kind);
	struct bucket *b = set->b;

	while (b < set->b + set->n && b->rows < rows)
		b++;
	if (b == set->b + set->n)
		return -EINVAL; /* max_rows is the last bucket: the engine gives no more */
	atomic_fetch_add_explicit(&b->replays, 1, memory_order_relaxed);
	if (!b->exec)
		return run_eagerly(m, kind, b->rows);
	return graphs_cuda(m->ctx, cudaGraphLaunch(b->exec, m->ctx->compute), "a graph", NULL, 0);
}

uint32_t graphs_buckets(const struct apr_backend_model *m, struct apr_bucket *out, uint32_t max, uint64_t *bytes)
{
	static const enum apr_graph_kind kinds[] = {APR_GRAPH_PREFILL, APR_GRAPH_DECODE, APR_GRAPH_HEAD};
	const struct bucket_set *sets[] = {&m->prefill, &m->decode, &m->head};
	uint32_t n = 0, k, i;

	for (k = 0; k < 3; k++)
		for (i = 0; i < sets[k]->n; i++, n++)
			if (n < max)
				out[n] = (struct apr_bucket){kinds[k], sets[k]->b[i].rows,
				                             atomic_load_explicit(&sets[k]->b[i].replays, memory_order_relaxed)};
	*bytes = m->graph_bytes;
	return n;
}

static void forget_set(struct bucket_set *s)
{
	uint32_t i;

	for (i = 0; i < s->n; i++)
		if (s->b[i].exec)
			cudaGraphExecDestroy(s->b[i].exec);
	s->n = 0;
}

void graphs_forget(struct apr_backend_model *m)
{
	forget_set(&m->prefill);
	forget_set(&m->decode);
	forget_set(&m->head);
}
