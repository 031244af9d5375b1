/* SPDX-License-Identifier: MIT */
/*
 * Opening an engine and loading models into it: see engine.h.
 *
 * Owns: the choice of backend, route and KV type, the order of a load, what status
 * reads. Does not own sequences (seq.c) nor steps (step.c).
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine/internal.h"
#include "engine/plan.h"
#include "engine/sampling.h"
#include "kernels/cpu/pool.h"

void apr_engine_say(char *err, size_t errlen, const char *fmt, ...)
{
	va_list ap;

	if (!err || !errlen)
		return;
	va_start(ap, fmt);
	vsnprintf(err, errlen, fmt, ap);
	va_end(ap);
}

void apr_engine_log(const struct apr_engine *e, enum apr_log_level level, const char *fmt, ...)
{
	char line[512];
	va_list ap;

	if (!e->cfg.log)
		return;
	va_start(ap, fmt);
	vsnprintf(line, sizeof line, fmt, ap);
	va_end(ap);
	e->cfg.log(e->cfg.log_arg, level, line);
}

/* ---- the engine ------------------------------------------------------------------ */

static int copy_string(char **out, const char **field)
{
	if (!*field)
		return 0;
	*out = strdup(*field);
	*field = *out;
	return *out ? 0 : -ENOMEM;
}

/* auto: the GPU where a module drives one; else the CPU, and why says what was missing. */
static int pick_auto(struct apr_engine *e)
{
	char err[200];

	e->backend = &apr_cpu_backend;
	if (access("/dev/nvidiactl", F_OK) != 0) {
		snprintf(e->info.why, sizeof e->info.why, "auto: no NVIDIA device here, so the CPU");
		return 0;
	}
	if (!apr_module_open(&e->backend, 0, err, sizeof err)) {
		snprintf(e->info.why, sizeof e->info.why, "auto: an NVIDIA device is here");
		return 0;
	}
	e->info.fell_back = true;
	snprintf(e->info.why, sizeof e->info.why, "auto: an NVIDIA device is here, but %s, so the CPU", err);
	apr_engine_log(e, APR_LOG_WARN, "%s", e->info.why);
	return 0;
}

static int pick_backend(struct apr_engine *e, char *err, size_t errlen)
{
	const char *name = e->cfg.backend ? e->cfg.backend : "auto";
	unsigned long n = 0;
	char why[200], *end;
	int rc;

	if (!strcmp(name, "cpu")) {
		e->backend = &apr_cpu_backend;
		return 0;
	}
	if (!strcmp(name, "auto"))
		return pick_auto(e);
	if (strcmp(name, "cuda") != 0 && strncmp(name, "cuda:", 5) != 0)
		return apr_engine_fail(-EINVAL, err, errlen, "backend %s: not one of auto, cpu, cuda[:N]", name);
	if (name[4]) {
		errno = 0;
		n = strtoul(name + 5, &end, 10);
		if (name[5] < '0' || name[5] > '9' || *end || errno || n > 1023)
			return apr_engine_fail(-EINVAL, err, errlen, "backend %s: what follows cuda: is not a device number", name);
	}
	e->device = (uint32_t)n;
	rc = apr_module_open(&e->backend, e->device, why, sizeof why);
	return rc ? apr_engine_fail(rc, err, errlen, "backend %s: %s", name, why) : 0;
}

static void pass_log(void *arg, int level, const char *line)
{
	const struct apr_engine *e = arg;

	if (e->cfg.log)
		e->cfg.log(e->cfg.log_arg, (enum apr_log_level)level, line);
}

static int open_backend(struct apr_engine *e, char *err, size_t errlen)
{
	struct apr_backend_config bc = {.threads = e->cfg.threads, .device = e->device, .memory = e->cfg.gpu_mem,
	                              .no_graphs = e->cfg.no_graphs,
	                                .set_fused_rows = e->cfg.set_fused_rows, .fused_rows = e->cfg.fused_rows,
	                                .log = pass_log, .log_arg = e};
	int rc;

	e->notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (e->notify_fd < 0)
		return apr_engine_fail(-errno, err, errlen, "eventfd: %s", strerror(errno));
	bc.notify_fd = e->notify_fd;
	rc = e->backend->probe(&bc, e->info.device, sizeof e->info.device, err, errlen);
	if (!rc)
		rc = e->backend->open(&e->ctx, &bc, err, errlen);
	if (rc)
		return rc;
	e->info.backend = e->backend->name;
	e->info.backend_id = e->backend->id;
	e->info.threads = e->backend->threads(e->ctx);
	e->info.usable_cpus = apr_pool_usable_cpus();
	if (e->cfg.gpu_mem && e->backend == &apr_cpu_backend)
		apr_engine_log(e, APR_LOG_WARN, "GPU memory is not used by the cpu backend");
	return 0;
}

int apr_engine_open(struct apr_engine **out, const struct apr_engine_config *cfg, char *err, size_t errlen)
{
	struct apr_engine *e = calloc(1, sizeof *e);
	int rc;

	if (!e)
		return apr_engine_fail(-ENOMEM, err, errlen, "out of memory");
	e->cfg = *cfg;
	e->notify_fd = -1;
	pthread_mutex_init(&e->lock, NULL);
	rc = copy_string(&e->backend_name, &e->cfg.backend);
	if (!rc)
		rc = copy_string(&e->route_name, &e->cfg.route);
	if (!rc)
		rc = copy_string(&e->kv_name, &e->cfg.kv_type);
	if (!rc)
		rc = copy_string(&e->cache_dir, &e->cfg.cache_dir);
	if (rc)
		apr_engine_fail(rc, err, errlen, "out of memory");
	else
		rc = pick_backend(e, err, errlen);
	if (!rc)
		rc = open_backend(e, err, errlen);
	if (rc) {
		apr_engine_close(e);
		return rc;
	}
	*out = e;
	return 0;
}

void apr_engine_close(struct apr_engine *e)
{
	if (!e)
		return;
	while (e->loaded)
		if (apr_engine_unload(e, e->loaded))
			break; /* sequences still live: the caller's fault, and theirs is the memory */
	if (e->ctx)
		e->backend->close(e->ctx);
	if (e->notify_fd >= 0)
		close(e->notify_fd);
	pthread_mutex_destroy(&e->lock);
	free(e->backend_name);
	free(e->route_name);
	free(e->kv_name);
	free(e->cache_dir);
	free(e);
}

void apr_engine_info(const struct apr_engine *e, struct apr_engine_info *info)
{
	*info = e->info;
}

int apr_engine_health(const struct apr_engine *e, char *err, size_t errlen)
{
	return e->backend->health(e->ctx, err, errlen);
}

int apr_engine_fd(const struct apr_engine *e)
{
	return e->notify_fd;
}

size_t apr_engine_memory(const struct apr_engine *e, struct apr_memory_row *rows, size_t max)
{
	static const char *const where[] = {"host", "device", "pinned host", "cache file", "host"};
	const struct apr_loaded *m;
	size_t n = 0;
	uint32_t i;

	pthread_mutex_lock((pthread_mutex_t *)&e->lock); /* the one thing a reader writes */
	for (m = e->loaded; m; m = m->next)
		for (i = 0; i < m->plan.n; i++, n++)
			if (n < max)
				rows[n] = (struct apr_memory_row){m->plan.line[i].purpose, where[m->plan.line[i].place],
				                                  m->plan.line[i].bytes, m->name};
	pthread_mutex_unlock((pthread_mutex_t *)&e->lock);
	return n;
}

/* ---- loading --------------------------------------------------------------------- */

static int pick_route(struct apr_loaded *m, char *err, size_t errlen)
{
	const struct apr_engine *e = m->engine;
	const struct apr_backend_route *r = e->backend->routes;
	const char *kv = e->cfg.kv_type, *want = e->cfg.route;
	char names[128] = "";
	size_t len = 0;

	if (want && strcmp(want, "auto") != 0)
		for (; r->name && strcmp(r->name, want) != 0; r++)
			len += (size_t)snprintf(names + len, sizeof names - len, "%s%s", len ? ", " : "", r->name);
	if (!r->name)
		return apr_engine_fail(-EINVAL, err, errlen, "route %s: not one of the %s backend's: auto, %s", want,
		                       e->backend->name, names);
	m->route = r;
	m->sizes.route_id = r->id;
	m->sizes.kv_type = r->kv_type;
	if (!kv)
		return 0;
	if (!strcmp(kv, "f16"))
		m->sizes.kv_type = APR_KV_F16;
	else if (!strcmp(kv, "f32"))
		m->sizes.kv_type = APR_KV_F32;
	else if (!strcmp(kv, "bf16"))
		m->sizes.kv_type = APR_KV_BF16;
	else
		return apr_engine_fail(-EINVAL, err, errlen, "KV type %s: not one of f16, f32, bf16", kv);
	return 0;
}

static int check_sampling(const struct apr_model *m, char *err, size_t errlen)
{
	struct apr_sampling_request r = apr_sampling_of_file(&m->sampling);
	const char *fault = apr_sampling_fault(&r);

	return fault ? apr_engine_fail(-EINVAL, err, errlen, "general.sampling: %s is out of range", fault) : 0;
}

static int set_sizes(struct apr_loaded *m, char *err, size_t errlen)
{
	const struct apr_engine_config *cfg = &m->engine->cfg;
	const struct apr_model *mo = m->model;
	uint32_t chunk = cfg->chunk ? cfg->chunk : APR_DEFAULT_CHUNK;
	uint32_t ctx = cfg->n_ctx ? cfg->n_ctx : mo->n_ctx_train < APR_DEFAULT_CTX ? mo->n_ctx_train : APR_DEFAULT_CTX;

	if (ctx > UINT32_C(1) << 24 || chunk > UINT32_C(1) << 16)
		return apr_engine_fail(-EINVAL, err, errlen, "context %u or chunk %u is too large", ctx, chunk);
	if (ctx > mo->n_ctx_train)
		apr_engine_log(m->engine, APR_LOG_WARN, "%s: a context of %u is more than the %u it was trained for", m->name, ctx,
		               mo->n_ctx_train);
	m->sizes.n_ctx = ctx;
	m->sizes.max_rows = chunk + APR_MAX_SLOTS;
	m->sizes.n_vocab = mo->n_vocab;
	m->sizes.n_real = mo->n_tokens;
	return pick_route(m, err, errlen);
}

static int fill_plan(struct apr_loaded *m, struct apr_plan *p)
{
	const struct apr_engine *e = m->engine;
	int rc;

	memset(p, 0, sizeof *p);
	rc = e->backend->need(e->ctx, m->model, &m->sizes, e->cfg.cache_dir != NULL, p);
	apr_plan_buffers(p, &m->forward, e->backend->place);
	apr_plan_add(p, "page index", APR_PLACE_HEAP, apr_kv_bytes(&m->sizes), 1);
	apr_plan_add(p, "step buffers", APR_PLACE_HEAP, apr_stepper_bytes(&m->sizes, e->backend->depth), 1);
	return p->overflow ? -EOVERFLOW : rc;
}

static int make_plan(struct apr_loaded *m, char *err, size_t errlen)
{
	const struct apr_engine *e = m->engine;
	uint64_t have = e->backend->available(e->ctx), rest;
	int rc = fill_plan(m, &m->plan); /* no page yet */

	if (!rc && !apr_plan_bytes(&m->plan))
		rc = -EOVERFLOW;
	if (rc)
		return apr_engine_fail(rc, err, errlen, "the memory plan: %s", rc == -EOVERFLOW ? "a size overflows" : strerror(-rc));
	rest = apr_plan_bytes(&m->plan);
	if (rest > have)
		return apr_engine_fail(-ENOMEM, err, errlen, "the model needs %llu MiB besides its KV, and %llu MiB are to be had",
		                       (unsigned long long)(rest >> 20) + 1, (unsigned long long)(have >> 20));
	rc = apr_plan_kv(&m->sizes, e->cfg.kv_mem, have - rest, err, errlen);
	if (rc)
		return rc;
	rc = fill_plan(m, &m->plan);
	return rc ? apr_engine_fail(rc, err, errlen, "the memory plan: a size overflows") : 0;
}

/* The backend's chunk where none is asked for: on a device a large one, or what the CPU has where that does not fit. */
static int plan_chunk(struct apr_loaded *m, char *err, size_t errlen)
{
	const struct apr_engine *e = m->engine;
	uint32_t most = m->sizes.n_ctx < APR_DEVICE_CHUNK ? m->sizes.n_ctx : APR_DEVICE_CHUNK, least = m->sizes.max_rows;
	int rc;

	if (e->cfg.chunk || e->backend->place == APR_PLACE_HOST || most <= APR_DEFAULT_CHUNK)
		return make_plan(m, err, errlen);
	m->sizes.max_rows = most + APR_MAX_SLOTS;
	rc = make_plan(m, err, errlen);
	if (rc != -ENOMEM && rc != -ENOSPC)
		return rc;
	apr_engine_log(e, APR_LOG_INFO, "%s: chunks of %u rows do not fit: %u", m->name, most, least - APR_MAX_SLOTS);
	m->sizes.max_rows = least;
	return make_plan(m, err, errlen);
}

static int upload_ropes(struct apr_loaded *m)
{
	uint64_t bytes = (uint64_t)m->sizes.n_ctx * (m->model->rope.n_rot / 2) * 2 * sizeof(float);
	float *table;
	uint32_t i;
	int rc = 0;

	if (!m->forward.n_ropes)
		return 0;
	table = malloc(bytes);
	if (!table)
		return -ENOMEM;
	for (i = 0; i < m->forward.n_ropes && !rc; i++) {
		apr_rope_fill(&m->model->rope, m->forward.rope[i].base, m->forward.rope[i].scaled, m->sizes.n_ctx, table);
		rc = m->engine->backend->upload(m->engine->ctx, m->forward.rope_table[i], table, bytes);
	}
	free(table);
	return rc;
}

/* What recording took, as a line of the plan. */
static void count_graphs(struct apr_loaded *m)
{
	const struct apr_backend *b = m->engine->backend;
	uint64_t bytes = 0;

	(void)b->buckets(m->bm, NULL, 0, &bytes);
	for (uint32_t i = 0; i < m->plan.n; i++)
		if (!strcmp(m->plan.line[i].purpose, "graphs")) /* woken: as it was */
			return;
	if (bytes)
		apr_plan_add(&m->plan, "graphs", b->place == APR_PLACE_HOST ? APR_PLACE_HEAP : b->place, bytes, 1);
}

static int bring_up(struct apr_loaded *m, void (*progress)(void *arg, double done), void *arg, char *err, size_t errlen)
{
	const struct apr_engine *e = m->engine;
	struct apr_backend_load in = {.model = m->model, .sizes = &m->sizes, .plan = &m->plan, .cache_dir = e->cfg.cache_dir,
	                              .progress = progress, .progress_arg = arg, .weights = &m->weights};
	int rc = e->backend->reserve(e->ctx, &m->plan, err, errlen);

	if (rc)
		return rc;
	m->reserved = true;
	apr_plan_bind(&m->plan, &m->forward, &m->sizes);
	m->forward.weights = &m->weights;
	rc = upload_ropes(m);
	if (rc)
		return apr_engine_fail(rc, err, errlen, "RoPE tables: %s", strerror(-rc));
	rc = e->backend->load(e->ctx, &in, &m->bm, err, errlen);
	if (!rc)
		rc = e->backend->record(m->bm, APR_GRAPH_STEP, 0, apr_forward_build, &m->forward, err, errlen);
	if (rc)
		return rc;
	count_graphs(m);
	rc = apr_kv_new(&m->kv, &m->sizes);
	if (!rc)
		rc = apr_stepper_new(m);
	if (rc)
		return apr_engine_fail(rc, err, errlen, "out of memory");
	if (!m->resting) /* else it is what it was, and others read it */
		apr_numerics(m, m->numerics);
	return 0;
}

/* What bring_up has made, as far as it came. */
static void take_down(struct apr_loaded *m)
{
	const struct apr_engine *e = m->engine;

	if (m->stepper)
		apr_stepper_free(m);
	apr_kv_free(m->kv);
	m->kv = NULL;
	if (m->bm)
		e->backend->unload(m->bm);
	m->bm = NULL;
	if (m->reserved)
		e->backend->unreserve(e->ctx, &m->plan);
	m->reserved = false;
}

static void destroy(struct apr_loaded *m)
{
	take_down(m);
	apr_forward_free(&m->forward);
	if (m->tok)
		apr_tokenizer_free(m->tok);
	if (m->model)
		apr_model_close(m->model);
	free(m->name);
	free(m);
}

/* Seen by readers from here on, and no longer. */
static void list(struct apr_loaded *m)
{
	struct apr_engine *e = m->engine;

	pthread_mutex_lock(&e->lock);
	m->next = e->loaded;
	e->loaded = m;
	m->resting = false;
	pthread_mutex_unlock(&e->lock);
}

static void unlist(struct apr_engine *e, struct apr_loaded *m)
{
	struct apr_loaded **link;

	pthread_mutex_lock(&e->lock);
	for (link = &e->loaded; *link && *link != m; link = &(*link)->next)
		;
	if (*link)
		*link = m->next;
	m->resting = true;
	pthread_mutex_unlock(&e->lock);
}

int apr_engine_load(struct apr_engine *e, const char *name, const char *path, void (*progress)(void *arg, double done),
                    void *arg, struct apr_loaded **out, char *err, size_t errlen)
{
	struct apr_loaded *m = calloc(1, sizeof *m);
	int rc;

	if (!m)
		return apr_engine_fail(-ENOMEM, err, errlen, "out of memory");
	m->engine = e;
	m->name = strdup(name);
	rc = m->name ? apr_model_open(&m->model, path, err, errlen) : apr_engine_fail(-ENOMEM, err, errlen, "out of memory");
	if (!rc)
		rc = apr_tokenizer_new(&m->tok, m->model, err, errlen);
	if (!rc)
		rc = check_sampling(m->model, err, errlen);
	if (!rc)
		rc = set_sizes(m, err, errlen);
	if (!rc)
		rc = apr_forward_init(&m->forward, m->model, &m->sizes, err, errlen);
	if (!rc)
		rc = plan_chunk(m, err, errlen);
	if (!rc)
		rc = bring_up(m, progress, arg, err, errlen);
	if (rc) {
		destroy(m);
		return rc;
	}
	list(m);
	*out = m;
	return 0;
}

int apr_engine_unload(struct apr_engine *e, struct apr_loaded *m)
{
	apr_stepper_settle(m); /* of sequences freed during a step */
	if (m->n_seqs)
		return -EBUSY;
	unlist(e, m);
	destroy(m);
	return 0;
}

int apr_engine_rest(struct apr_loaded *m)
{
	if (m->resting)
		return 0;
	apr_stepper_settle(m);
	if (m->n_seqs)
		return -EBUSY;
	unlist(m->engine, m);
	take_down(m);
	return 0;
}

int apr_engine_wake(struct apr_loaded *m, char *err, size_t errlen)
{
	int rc = m->resting ? bring_up(m, NULL, NULL, err, errlen) : 0;

	if (rc)
		take_down(m);
	else if (m->resting)
		list(m);
	return rc;
}

const struct apr_model *apr_loaded_model(const struct apr_loaded *m)
{
	return m->model;
}

const struct apr_tokenizer *apr_loaded_tokenizer(const struct apr_loaded *m)
{
	return m->tok;
}

const char *apr_loaded_name(const struct apr_loaded *m)
{
	return m->name;
}

void apr_loaded_info(const struct apr_loaded *m, struct apr_loaded_info *info)
{
	static const char *const kv[] = {"f16", "f32", "bf16"};
	struct apr_kv_counts c = {0};

	memset(info, 0, sizeof *info);
	pthread_mutex_lock(&m->engine->lock);
	info->resting = m->resting;
	if (!m->resting)
		apr_kv_counts(m->kv, &c);
	if (!m->resting && m->engine->backend->describe)
		(void)m->engine->backend->describe(m->bm, info->how, sizeof info->how);
	pthread_mutex_unlock(&m->engine->lock);
	info->n_ctx = m->sizes.n_ctx;
	info->n_vocab = m->sizes.n_real;
	info->route = m->route->name;
	info->kv_type = kv[m->sizes.kv_type];
	info->route_id = m->route->id;
	info->equal_bits = m->route->equal_bits;
	memcpy(info->numerics, m->numerics, sizeof info->numerics);
	info->bytes = info->resting ? 0 : apr_plan_bytes(&m->plan);
	info->pages_total = c.total;
	info->pages_free = c.free;
	info->pages_cached = c.cached;
}

/* ---- what is recorded ---------------------------------------------------------------- */

#define MAX_BUCKETS 64u

static const char *const kind_name[] = {
	[APR_GRAPH_STEP] = "step", [APR_GRAPH_DECODE] = "decode", [APR_GRAPH_PREFILL] = "prefill", [APR_GRAPH_HEAD] = "head"};

size_t apr_loaded_graphs(const struct apr_loaded *m, struct apr_graph_row *rows, size_t max, uint64_t *bytes)
{
	struct apr_bucket b[MAX_BUCKETS];
	uint32_t n = 0, i;

	pthread_mutex_lock(&m->engine->lock);
	if (m->resting)
		*bytes = 0;
	else
		n = m->engine->backend->buckets(m->bm, b, MAX_BUCKETS, bytes);
	pthread_mutex_unlock(&m->engine->lock);
	for (i = 0; i < n && i < max && i < MAX_BUCKETS; i++)
		rows[i] = (struct apr_graph_row){kind_name[b[i].kind], b[i].rows, b[i].replays};
	return n;
}

int apr_loaded_warm(struct apr_loaded *m, const char *kind, uint32_t rows, double *us, char *err, size_t errlen)
{
	const struct apr_backend *be = m->engine->backend;
	struct apr_bucket b[MAX_BUCKETS];
	uint64_t bytes;
	uint32_t n = be->buckets(m->bm, b, MAX_BUCKETS, &bytes), i;

	for (i = 0; i < n && i < MAX_BUCKETS && (b[i].rows != rows || strcmp(kind_name[b[i].kind], kind) != 0); i++)
		;
	if (i == n || i == MAX_BUCKETS)
		return apr_engine_fail(-ENOENT, err, errlen, "%s: no bucket of %u %s rows", m->name, rows, kind);
	if (!be->warm)
		return apr_engine_fail(-EOPNOTSUPP, err, errlen, "the %s backend prepares everything when it loads", be->name);
	return be->warm(m->bm, b[i].kind, rows, us, err, errlen);
}
