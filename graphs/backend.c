/* SPDX-License-Identifier: MIT */
/*
 * libaprd-cuda.so: the CUDA backend's table, the one symbol that the module exports.
 *
 * Owns: opening a device, its streams and cuBLASLt handle, the arena. Does not own
 * weights (weights.c), graphs (record.c), steps (step.c).
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graphs/graphs.h"

#define ALIGN 1024u
#define KEEP_FREE (UINT64_C(512) << 20) /* for graphs, kernels' local memory and the driver */

extern const uint8_t apr_engine_build_id[32]; /* of this module's objects: scripts/build-id */
extern const struct apr_backend apr_cuda_backend __attribute__((visibility("default")));

/* ---- errors and the log ------------------------------------------------------------- */

void graphs_say(char *err, size_t errlen, const char *fmt, ...)
{
	va_list ap;

	if (!err || !errlen)
		return;
	va_start(ap, fmt);
	vsnprintf(err, errlen, fmt, ap);
	va_end(ap);
}

void graphs_log(const struct apr_backend_ctx *c, int level, const char *fmt, ...)
{
	char line[400];
	va_list ap;

	if (!c->cfg.log)
		return;
	va_start(ap, fmt);
	vsnprintf(line, sizeof line, fmt, ap);
	va_end(ap);
	c->cfg.log(c->cfg.log_arg, level, line);
}

int graphs_cuda(struct apr_backend_ctx *c, cudaError_t rc, const char *what, char *err, size_t errlen)
{
	int r = rc == cudaErrorMemoryAllocation ? -ENOMEM : -EIO, none = 0;

	if (rc == cudaSuccess)
		return 0;
	if (rc != cudaErrorMemoryAllocation) /* relaxed: whoever sees it late fails by itself */
		(void)atomic_compare_exchange_strong_explicit(&c->sticky, &none, r, memory_order_relaxed, memory_order_relaxed);
	graphs_log(c, 2, "cuda: %s: %s", what, cudaGetErrorString(rc));
	return graphs_fail(r, err, errlen, "%s: %s", what, cudaGetErrorString(rc));
}

/* ---- the device ---------------------------------------------------------------------- */

static int find_device(const struct apr_backend_config *cfg, struct cudaDeviceProp *p, char *err, size_t errlen)
{
	const char *visible = getenv("CUDA_VISIBLE_DEVICES");
	int n = 0, driver = 0;
	cudaError_t rc = cudaGetDeviceCount(&n);

	if (rc == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess && !driver)
		return graphs_fail(-ENODEV, err, errlen, "CUDA: no driver here");
	if (rc == cudaErrorNoDevice && visible)
		return graphs_fail(-ENODEV, err, errlen, "CUDA: no device here (CUDA_VISIBLE_DEVICES is \"%s\")", visible);
	if (rc != cudaSuccess)
		return graphs_fail(-ENODEV, err, errlen, "CUDA: %s", cudaGetErrorString(rc));
	if (cfg->device >= (uint32_t)n)
		return graphs_fail(-ENODEV, err, errlen, "device %u: there %s %d (CUDA_VISIBLE_DEVICES %s%s)", cfg->device,
		                   n == 1 ? "is" : "are", n, visible ? "is " : "not set", visible ? visible : "");
	rc = cudaGetDeviceProperties(p, (int)cfg->device);
	if (rc != cudaSuccess)
		return graphs_fail(-ENODEV, err, errlen, "device %u: %s", cfg->device, cudaGetErrorString(rc));
	if (p->major != 9 || p->minor != 0)
		return graphs_fail(-ENOTSUP, err, errlen, "device %u: %s is sm_%d%d; the kernels are for sm_90", cfg->device, p->name,
		                   p->major, p->minor);
	return 0;
}

static int probe(const struct apr_backend_config *cfg, char *device, size_t devlen, char *err, size_t errlen)
{
	struct cudaDeviceProp p;
	int rc = find_device(cfg, &p, err, errlen);

	if (!rc)
		snprintf(device, devlen, "%s, sm_%d%d, %d multiprocessors, %zu MiB", p.name, p.major, p.minor, p.multiProcessorCount,
		         p.totalGlobalMem >> 20);
	return rc;
}

static void identify(struct apr_backend_ctx *c, const struct cudaDeviceProp *p)
{
	int driver = 0, runtime = 0;
	char hash[65];
	unsigned i;

	(void)cudaDriverGetVersion(&driver);
	(void)cudaRuntimeGetVersion(&runtime);
	for (i = 0; i < 32; i++)
		snprintf(hash + 2 * i, 3, "%02x", apr_engine_build_id[i]);
	snprintf(c->identity, sizeof c->identity, "%s, %d SMs, driver %d, runtime %d, cuBLASLt %zu, module %s", p->name,
	         p->multiProcessorCount, driver, runtime, cublasLtGetVersion(), hash);
}

static void close_ctx(struct apr_backend_ctx *c)
{
	(void)cudaSetDevice(c->device);
	if (c->lt)
		cublasLtDestroy(c->lt);
	if (c->compute)
		cudaStreamDestroy(c->compute);
	if (c->setup)
		cudaStreamDestroy(c->setup);
	algo_table_free(&c->table);
	pthread_cond_destroy(&c->wake);
	pthread_cond_destroy(&c->idle);
	pthread_mutex_destroy(&c->lock);
	pthread_mutex_destroy(&c->enqueue_lock);
	pthread_mutex_destroy(&c->warm_lock);
	free(c);
}

static int open_device(struct apr_backend_ctx *c, char *err, size_t errlen)
{
	int rc = graphs_cuda(c, cudaSetDevice(c->device), "the device", err, errlen);

	if (!rc)
		rc = graphs_cuda(c, cudaStreamCreateWithFlags(&c->compute, cudaStreamNonBlocking), "a stream", err, errlen);
	if (!rc)
		rc = graphs_cuda(c, cudaStreamCreateWithFlags(&c->setup, cudaStreamNonBlocking), "a stream", err, errlen);
	if (!rc && cublasLtCreate(&c->lt) != CUBLAS_STATUS_SUCCESS)
		rc = graphs_fail(-EIO, err, errlen, "cuBLASLt cannot be opened");
	return rc;
}

static int open_backend(struct apr_backend_ctx **out, const struct apr_backend_config *cfg, char *err, size_t errlen)
{
	struct apr_backend_ctx *c;
	struct cudaDeviceProp p;
	int rc = find_device(cfg, &p, err, errlen);

	if (rc)
		return rc;
	c = calloc(1, sizeof *c);
	if (!c)
		return graphs_fail(-ENOMEM, err, errlen, "out of memory");
	c->cfg = *cfg;
	c->device = (int)cfg->device;
	c->sms = p.multiProcessorCount;
	c->queue_tail = &c->queue;
	pthread_mutex_init(&c->lock, NULL);
	pthread_mutex_init(&c->enqueue_lock, NULL);
	pthread_mutex_init(&c->warm_lock, NULL);
	pthread_cond_init(&c->wake, NULL);
	pthread_cond_init(&c->idle, NULL);
	identify(c, &p);
	rc = open_device(c, err, errlen);
	if (!rc) {
		rc = -pthread_create(&c->thread, NULL, graphs_watch, c);
		if (rc)
			graphs_fail(rc, err, errlen, "the backend's thread: %s", strerror(-rc));
	}
	if (rc) {
		close_ctx(c);
		return rc;
	}
	(void)pthread_setname_np(c->thread, "apr-watch");
	*out = c;
	return 0;
}

static void close_backend(struct apr_backend_ctx *c)
{
	pthread_mutex_lock(&c->lock);
	c->stop = true;
	pthread_cond_signal(&c->wake);
	pthread_mutex_unlock(&c->lock);
	pthread_join(c->thread, NULL);
	close_ctx(c);
}

static uint32_t threads(const struct apr_backend_ctx *c)
{
	(void)c;
	return 0;
}

static const char *identity(const struct apr_backend_ctx *c)
{
	return c->identity;
}

static int health(struct apr_backend_ctx *c, char *err, size_t errlen)
{
	int rc = atomic_load_explicit(&c->sticky, memory_order_relaxed);

	return rc ? graphs_fail(rc, err, errlen, "the device failed; see the log") : 0;
}

/* ---- memory ----------------------------------------------------------------------------- */

static uint64_t available(struct apr_backend_ctx *c)
{
	size_t unused = 0, all = 0;

	if (cudaSetDevice(c->device) != cudaSuccess || cudaMemGetInfo(&unused, &all) != cudaSuccess || unused <= KEEP_FREE)
		return 0;
	unused -= KEEP_FREE;
	return c->cfg.memory && c->cfg.memory < unused ? c->cfg.memory : unused;
}

static bool in_arena(const struct apr_plan_line *l, enum apr_place place)
{
	return l->place == place && l->bytes;
}

/* Lines of one place at the start of one allocation each; returns the bytes of all. */
static uint64_t lay_out(struct apr_plan *plan, enum apr_place place, uint8_t *base)
{
	uint64_t at = 0;
	uint32_t i;

	for (i = 0; i < plan->n; i++)
		if (in_arena(&plan->line[i], place)) {
			if (base)
				plan->line[i].base = base + at;
			at += round_up(plan->line[i].bytes, ALIGN);
		}
	return at;
}

static void unreserve(struct apr_backend_ctx *c, struct apr_plan *plan)
{
	bool device = false, pinned = false;
	uint32_t i;

	(void)cudaSetDevice(c->device);
	for (i = 0; i < plan->n; i++) {
		struct apr_plan_line *l = &plan->line[i];

		if (!l->base)
			continue;
		if (l->place == APR_PLACE_DEVICE && !device) { /* the first is the arena's start */
			cudaFree(l->base);
			device = true;
		}
		if (l->place == APR_PLACE_PINNED && !pinned) {
			cudaFreeHost(l->base);
			pinned = true;
		}
		l->base = NULL;
	}
}

#ifdef APR_ARENA_SPLIT
/* For tests: every line an allocation of its own, full of NaN but for what must start as zeros, so that a read past a
 * buffer's end or of what nobody wrote shows. */
static int split(struct apr_backend_ctx *c, struct apr_plan *plan, char *err, size_t errlen)
{
	uint32_t i;
	int rc = 0;

	for (i = 0; i < plan->n && !rc; i++) {
		struct apr_plan_line *l = &plan->line[i];
		bool zero = !strcmp(l->purpose, "decode scratch") || !strcmp(l->purpose, "step rows");

		if (!in_arena(l, APR_PLACE_DEVICE))
			continue;
		rc = graphs_cuda(c, cudaMalloc(&l->base, l->bytes), l->purpose, err, errlen); /* never freed: a test's process ends */
		if (!rc)
			rc = graphs_cuda(c, cudaMemsetAsync(l->base, zero ? 0 : 0xff, l->bytes, c->setup), l->purpose, err, errlen);
	}
	return rc ? rc : graphs_cuda(c, cudaStreamSynchronize(c->setup), "clearing memory", err, errlen);
}
#endif

static int reserve(struct apr_backend_ctx *c, struct apr_plan *plan, char *err, size_t errlen)
{
	uint64_t device = lay_out(plan, APR_PLACE_DEVICE, NULL), pinned = lay_out(plan, APR_PLACE_PINNED, NULL);
	void *d = NULL, *h = NULL;
	char what[80];
	int rc = graphs_cuda(c, cudaSetDevice(c->device), "the device", err, errlen);

	snprintf(what, sizeof what, "%llu MiB of device memory", (unsigned long long)(device >> 20));
	if (!rc)
		rc = graphs_cuda(c, cudaMalloc(&d, device), what, err, errlen);
	snprintf(what, sizeof what, "%llu MiB of pinned host memory", (unsigned long long)(pinned >> 20));
	if (!rc)
		rc = graphs_cuda(c, cudaHostAlloc(&h, pinned, cudaHostAllocPortable), what, err, errlen);
	if (!rc)
		rc = graphs_cuda(c, cudaMemsetAsync(d, 0, device, c->setup), "clearing memory", err, errlen);
	if (!rc)
		rc = graphs_cuda(c, cudaStreamSynchronize(c->setup), "clearing memory", err, errlen);
	if (rc) {
		cudaFree(d);
		cudaFreeHost(h);
		return rc;
	}
	memset(h, 0, pinned);
	lay_out(plan, APR_PLACE_DEVICE, d);
	lay_out(plan, APR_PLACE_PINNED, h);
#ifdef APR_ARENA_SPLIT
	cudaFree(d);
	rc = split(c, plan, err, errlen);
#endif
	return rc;
}

static int upload(struct apr_backend_ctx *c, void *dst, const void *src, uint64_t bytes)
{
	int rc = graphs_cuda(c, cudaSetDevice(c->device), "the device", NULL, 0);

	if (!rc)
		rc = graphs_cuda(c, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, c->setup), "an upload", NULL, 0);
	return rc ? rc : graphs_cuda(c, cudaStreamSynchronize(c->setup), "an upload", NULL, 0);
}

/* ---- KV pages ------------------------------------------------------------------------------ */

static uint8_t *page_at(const struct apr_backend_model *m, uint32_t group, uint32_t page, uint64_t *bytes)
{
	const struct apr_kv_group *g = &m->sizes.group[group];

	*bytes = g->layer_bytes * g->n_layers;
	return g->pool + page * *bytes;
}

static int kv_zero(struct apr_backend_model *m, uint32_t group, const uint32_t *pages, uint32_t n)
{
	int rc = graphs_cuda(m->ctx, cudaSetDevice(m->ctx->device), "the device", NULL, 0);
	uint64_t bytes;
	uint32_t i;

	for (i = 0; i < n && !rc; i++) {
		uint8_t *p = page_at(m, group, pages[i], &bytes);

		rc = graphs_cuda(m->ctx, cudaMemsetAsync(p, 0, bytes, m->ctx->compute), "clearing a page", NULL, 0);
	}
	return rc;
}

static int kv_copy(struct apr_backend_model *m, uint32_t group, const uint32_t *from, const uint32_t *to, uint32_t n)
{
	int rc = graphs_cuda(m->ctx, cudaSetDevice(m->ctx->device), "the device", NULL, 0);
	uint64_t bytes;
	uint32_t i;

	for (i = 0; i < n && !rc; i++) {
		const uint8_t *src = page_at(m, group, from[i], &bytes);
		uint8_t *dst = page_at(m, group, to[i], &bytes);

		if (src != dst)
			rc = graphs_cuda(m->ctx, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, m->ctx->compute),
			                 "copying a page", NULL, 0);
	}
	return rc;
}

/* ---- the table ----------------------------------------------------------------------------- */

static const struct apr_backend_route routes[] = {
	{.name = "fp16", .id = ROUTE_FP16, .kv_type = APR_KV_F16, .arithmetic = "16-bit", .equal_bits = true},
	{.name = "quant", .id = ROUTE_QUANT, .kv_type = APR_KV_F16, .arithmetic = "16-bit", .equal_bits = true},
	{.name = "fused", .id = ROUTE_FUSED, .kv_type = APR_KV_F16, .arithmetic = "16-bit", .equal_bits = true},
	{.name = "fp8", .id = ROUTE_FP8, .kv_type = APR_KV_F16, .arithmetic = "fp8", .equal_bits = true},
	{.name = "fp8-fast", .id = ROUTE_FP8_FAST, .kv_type = APR_KV_F16, .arithmetic = "fp8-fast", .equal_bits = true},
	{.name = "f32", .id = ROUTE_F32, .kv_type = APR_KV_F32, .arithmetic = "f32", .equal_bits = false},
	{.name = NULL},
};

const struct apr_backend apr_cuda_backend = {
	.abi = APR_BACKEND_ABI,
	.size = sizeof(struct apr_backend),
	.name = "cuda",
	.id = 2, /* enum apr_backend_id */
	.routes = routes,
	.depth = APR_MAX_DEPTH,
	.place = APR_PLACE_DEVICE,
	.probe = probe,
	.open = open_backend,
	.supports = graphs_supports,
	.threads = threads,
	.available = available,
	.need = graphs_need,
	.reserve = reserve,
	.unreserve = unreserve,
	.load = graphs_load,
	.unload = graphs_unload,
	.upload = upload,
	.record = graphs_record,
	.buckets = graphs_buckets,
	.warm = graphs_warm,
	.submit = graphs_submit,
	.poll = graphs_poll,
	.records = graphs_records,
	.fence = graphs_fence,
	.kv_zero = kv_zero,
	.kv_copy = kv_copy,
	.health = health,
	.close = close_backend,
	.identity = identity,
	.describe = graphs_describe,
};
