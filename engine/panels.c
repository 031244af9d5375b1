/* SPDX-License-Identifier: MIT */
/* Packed weights and their file: see panels.h. */
#include "engine/panels.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/cache_file.h"
#include "engine/hash.h"
#include "engine/internal.h"
#include "kernels/cpu/pool.h"

#define ALIGN 4096u
#define MAGIC UINT64_C(0x314c4e4150525041) /* "APRPANL1" */
#define PER_LAYER 7u

struct file_head { /* the first ALIGN bytes of a panel file; all little-endian as this machine is */
	uint64_t magic;
	uint8_t model[32];   /* the model's content hash */
	uint64_t layout;     /* fingerprint of what packing gives for the types used */
	uint64_t bytes;      /* after the head */
	uint64_t n;          /* matrices */
	uint64_t payload;    /* hash of the bytes after the head */
	uint64_t self;       /* hash of the head before this word */
};

struct item {
	const struct apr_weight *w;
	uint64_t offset, bytes;
};

struct apr_panels {
	struct item *item;
	struct apr_mat *mat;
	uint32_t n;
	uint64_t bytes;  /* of the panels */
	uint8_t *map;    /* the file's head, then panels; anonymous: panels alone */
	uint64_t map_len;
	const uint8_t *data;
	bool from_file;
};

__attribute__((format(printf, 3, 4))) static void say(const struct apr_panels_ask *a, enum apr_log_level level,
                                                      const char *fmt, ...)
{
	char line[512];
	va_list ap;

	if (!a->log)
		return;
	va_start(ap, fmt);
	vsnprintf(line, sizeof line, fmt, ap);
	va_end(ap);
	a->log(a->log_arg, (int)level, line);
}

/* ---- which matrices, and where --------------------------------------------------- */

static uint32_t list_weights(const struct apr_model *m, const struct apr_weight **out)
{
	uint32_t n = 0, l, i;

	out[n++] = &m->tok_embd;
	if (!m->tied)
		out[n++] = &m->output;
	for (l = 0; l < m->n_layers; l++) {
		const struct apr_layer *la = &m->layers[l];
		const struct apr_weight *w[PER_LAYER] = {&la->wq, &la->wk, &la->wv, &la->wo, &la->gate, &la->up, &la->down};

		for (i = 0; i < PER_LAYER; i++)
			if (w[i]->data)
				out[n++] = w[i];
	}
	return n;
}

static int lay_out(struct apr_panels *p, const struct apr_model *m, char *err, size_t errlen)
{
	const struct apr_weight **w = calloc(2 + (size_t)PER_LAYER * m->n_layers, sizeof(const struct apr_weight *));
	uint64_t at = 0;
	uint32_t i;
	int rc = 0;

	if (!w)
		return apr_engine_fail(-ENOMEM, err, errlen, "out of memory for the weights' table");
	p->n = list_weights(m, w);
	p->item = calloc(p->n, sizeof *p->item);
	p->mat = calloc(p->n, sizeof *p->mat);
	if (!p->item || !p->mat) {
		free(w);
		return apr_engine_fail(-ENOMEM, err, errlen, "out of memory for the weights' table");
	}
	for (i = 0; i < p->n && !rc; i++) {
		struct item *it = &p->item[i];

		it->w = w[i];
		it->offset = at;
		it->bytes = apr_panel_bytes(w[i]->type, w[i]->n_in, w[i]->n_out);
		if (!it->bytes)
			rc = apr_engine_fail(-ENOTSUP, err, errlen, "matrix %u: %s of %u columns and %u rows cannot be packed", i,
			                     apr_type_info(w[i]->type).name, w[i]->n_in, w[i]->n_out);
		else if (__builtin_add_overflow(at, it->bytes + ALIGN - 1, &at))
			rc = apr_engine_fail(-EOVERFLOW, err, errlen, "the weights' size overflows");
		at &= ~(uint64_t)(ALIGN - 1);
	}
	p->bytes = at;
	free(w);
	return rc;
}

uint64_t apr_panels_bytes(const struct apr_model *m, char *err, size_t errlen)
{
	struct apr_panels p = {0};
	int rc = lay_out(&p, m, err, errlen);

	free(p.item);
	free(p.mat);
	return rc ? 0 : p.bytes;
}

static void point(struct apr_panels *p)
{
	uint32_t i;

	for (i = 0; i < p->n; i++)
		p->mat[i].lin = (struct apr_linear){.type = p->item[i].w->type, .n_in = p->item[i].w->n_in,
		                                    .n_out = p->item[i].w->n_out, .panels = p->data + p->item[i].offset};
}

const struct apr_mat *apr_panels_mat(const struct apr_panels *p, const struct apr_weight *w)
{
	uint32_t i;

	if (!w->data)
		return NULL;
	for (i = 0; i < p->n; i++)
		if (p->item[i].w == w || (p->item[i].w->data == w->data && p->item[i].w->bytes == w->bytes))
			return &p->mat[i];
	return NULL;
}

bool apr_panels_from_file(const struct apr_panels *p)
{
	return p->from_file;
}

/* ---- packing --------------------------------------------------------------------- */

/* What packing 16 rows of one block gives for every type used, and where the matrices lie. */
static uint64_t layout_of(const struct apr_panels *p)
{
	uint8_t src[16 * 256], dst[16 * 256 + 64];
	uint64_t h = apr_hash_mix(p->n, p->bytes);
	uint32_t t, i;

	for (t = 0; t < APR_TYPE_LIMIT; t++) {
		struct apr_type_info ti = apr_type_info(t);
		size_t bytes = ti.block ? apr_panel_bytes(t, ti.block, 16) : 0;

		if (!bytes || bytes > sizeof dst || 16u * ti.block_bytes > sizeof src)
			continue;
		for (i = 0; i < 16u * ti.block_bytes; i++)
			src[i] = (uint8_t)(i * 37 + (i >> 8) * 11 + 5) & 0x3f; /* no infinite half among them */
		if (apr_panel_pack(NULL, t, src, ti.block, 16, dst) == 0)
			h = apr_hash_bytes(h ^ t, dst, bytes);
	}
	for (i = 0; i < p->n; i++)
		h = apr_hash_mix(h ^ p->item[i].offset, p->item[i].w->type);
	return h;
}

static int pack_all(struct apr_panels *p, uint8_t *dst, const struct apr_panels_ask *a, char *err, size_t errlen)
{
	struct apr_pool *pool = NULL;
	uint64_t done = 0;
	uint32_t i;
	int rc = a->threads > 1 ? apr_pool_new(&pool, a->threads) : 0;

	if (rc)
		return apr_engine_fail(rc, err, errlen, "threads to pack weights with: %s", strerror(-rc));
	for (i = 0; i < p->n && !rc; i++) {
		const struct apr_weight *w = p->item[i].w;

		rc = apr_panel_pack(pool, w->type, w->data, w->n_in, w->n_out, dst + p->item[i].offset);
		if (rc)
			apr_engine_fail(rc, err, errlen, "packing matrix %u: %s", i, strerror(-rc));
		done += p->item[i].bytes;
		if (a->progress)
			a->progress(a->progress_arg, (double)done / (double)p->bytes);
	}
	apr_pool_free(pool);
	return rc;
}

static int open_anonymous(struct apr_panels *p, const struct apr_panels_ask *a, char *err, size_t errlen)
{
	void *map = mmap(NULL, p->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int rc;

	if (map == MAP_FAILED)
		return apr_engine_fail(-ENOMEM, err, errlen, "%" PRIu64 " bytes for weights: %s", p->bytes, strerror(errno));
	(void)madvise(map, p->bytes, MADV_HUGEPAGE); /* a wish: fewer TLB misses */
	p->map = map;
	p->map_len = p->bytes;
	p->data = map;
	rc = pack_all(p, map, a, err, errlen);
	if (!rc)
		(void)mprotect(map, p->bytes, PROT_READ);
	return rc;
}

/* ---- the file -------------------------------------------------------------------- */

static uint64_t head_hash(const struct file_head *h)
{
	return apr_hash_bytes(MAGIC, h, offsetof(struct file_head, self));
}

/* NULL, or why the mapped file is not what we want. */
static const char *fault_of(const struct file_head *h, const struct file_head *want, uint64_t len)
{
	if (len < ALIGN || h->magic != MAGIC || h->self != head_hash(h))
		return "damaged head";
	if (memcmp(h->model, want->model, sizeof h->model) != 0)
		return "of another model";
	if (h->layout != want->layout || h->n != want->n || h->bytes != want->bytes)
		return "of another layout";
	if (len != ALIGN + h->bytes)
		return "cut short";
	if (apr_hash_bytes(h->layout, (const uint8_t *)h + ALIGN, h->bytes) != h->payload)
		return "damaged";
	return NULL;
}

/* 0: p->map is the good file. 1: there is none, or a bad one (said in the log). */
static int map_file(struct apr_panels *p, const char *path, const struct file_head *want, const struct apr_panels_ask *a)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
	const char *fault = "not readable";
	void *map = MAP_FAILED;
	struct stat st;

	if (fd < 0) {
		if (errno != ENOENT)
			say(a, APR_LOG_WARN, "panel file %s: %s; making it again", path, strerror(errno));
		return 1;
	}
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size >= (off_t)ALIGN)
		map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
	else
		fault = "damaged head";
	close(fd);
	if (map != MAP_FAILED) {
		fault = fault_of(map, want, (uint64_t)st.st_size);
		if (fault)
			munmap(map, (size_t)st.st_size);
	}
	if (fault) {
		say(a, APR_LOG_WARN, "panel file %s: %s; making it again", path, fault);
		return 1;
	}
	p->map = map;
	p->map_len = (uint64_t)st.st_size;
	p->data = p->map + ALIGN;
	p->from_file = true;
	return 0;
}

/* By large writes and not through a mapping: the page cache then keeps it in large folios, which decode reads a tenth
 * faster. */
static int store_file(const struct apr_panels *p, const char *path, const struct file_head *want)
{
	union {
		struct file_head h;
		uint8_t bytes[ALIGN];
	} head = {.h = *want};

	head.h.payload = apr_hash_bytes(want->layout, p->data, p->bytes);
	head.h.self = head_hash(&head.h);
	return apr_cache_write(path, head.bytes, sizeof head.bytes, p->data, p->bytes);
}

static int open_cached(struct apr_panels *p, const struct apr_panels_ask *a, char *err, size_t errlen)
{
	struct file_head want = {.magic = MAGIC, .layout = layout_of(p), .bytes = p->bytes, .n = p->n};
	char path[4096], name[48];
	uint8_t *packed;
	uint32_t i;
	int rc, fault;

	memcpy(want.model, a->model->weights_hash, sizeof want.model);
	for (i = 0; i < 16; i++)
		snprintf(name + 2 * i, 3, "%02x", want.model[i]);
	if ((size_t)snprintf(path, sizeof path, "%s/%s-%08x.panels", a->cache_dir, name, (unsigned)want.layout) >= sizeof path)
		rc = -ENAMETOOLONG;
	else
		rc = apr_cache_folders(path);
	if (!rc && map_file(p, path, &want, a) == 0) {
		if (a->progress)
			a->progress(a->progress_arg, 1.0);
		return 0;
	}
	fault = open_anonymous(p, a, err, errlen);
	if (fault)
		return fault;
	if (!rc)
		rc = store_file(p, path, &want);
	packed = p->map;
	if (!rc && map_file(p, path, &want, a) == 0) {
		munmap(packed, p->bytes);
		say(a, APR_LOG_INFO, "weights packed into %s", path);
		return 0;
	}
	say(a, APR_LOG_WARN, "no panel file in %s (%s): packed weights stay in this process's memory", a->cache_dir,
	    rc ? strerror(-rc) : "not readable after writing");
	return 0;
}

int apr_panels_open(struct apr_panels **out, const struct apr_panels_ask *ask, char *err, size_t errlen)
{
	struct apr_panels *p = calloc(1, sizeof *p);
	int rc;

	if (!p)
		return apr_engine_fail(-ENOMEM, err, errlen, "out of memory");
	rc = lay_out(p, ask->model, err, errlen);
	if (!rc)
		rc = ask->cache_dir ? open_cached(p, ask, err, errlen) : open_anonymous(p, ask, err, errlen);
	if (rc) {
		apr_panels_close(p);
		return rc;
	}
	point(p);
	*out = p;
	return 0;
}

void apr_panels_close(struct apr_panels *p)
{
	if (!p)
		return;
	if (p->map)
		munmap(p->map, p->map_len);
	free(p->item);
	free(p->mat);
	free(p);
}
