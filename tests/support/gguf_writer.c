/* SPDX-License-Identifier: MIT */
/*
 * The GGUF writer of the tests: keys and tensors kept in lists, laid out at the
 * end. The random models built with it are in tiny_model.c.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/gguf_writer.h"

struct buf {
	uint8_t *p;
	size_t len, cap;
};

struct kv {
	char *key;
	uint32_t type;
	struct buf value;
};

struct tensor {
	char *name;
	uint32_t type;
	unsigned n_dims;
	uint64_t ne[8];
	uint8_t *data;
	uint64_t bytes;
	uint64_t offset;
	bool offset_set;
};

struct gguf_writer {
	uint32_t version, align;
	bool lie;
	uint64_t lie_tensors, lie_kv;
	struct kv *kv;
	size_t n_kv;
	struct tensor *t;
	size_t n_t;
};

static void *must(void *p)
{
	if (!p) {
		fputs("gguf_writer: out of memory\n", stderr);
		abort();
	}
	return p;
}

static void put(struct buf *b, const void *p, size_t n)
{
	if (b->cap - b->len < n) {
		b->cap = b->len + n + b->cap / 2 + 64;
		b->p = must(realloc(b->p, b->cap));
	}
	if (n)
		memcpy(b->p + b->len, p, n);
	b->len += n;
}

static void put_u32(struct buf *b, uint32_t v)
{
	put(b, &v, sizeof v);
}

static void put_u64(struct buf *b, uint64_t v)
{
	put(b, &v, sizeof v);
}

static void put_str(struct buf *b, const void *s, size_t n)
{
	put_u64(b, n);
	put(b, s, n);
}

static void put_zero(struct buf *b, size_t n)
{
	static const uint8_t zero[4096];

	for (; n > sizeof zero; n -= sizeof zero)
		put(b, zero, sizeof zero);
	put(b, zero, n);
}

struct gguf_writer *gw_new(void)
{
	struct gguf_writer *w = must(calloc(1, sizeof *w));

	w->version = 3;
	w->align = 32;
	return w;
}

void gw_free(struct gguf_writer *w)
{
	size_t i;

	if (!w)
		return;
	for (i = 0; i < w->n_kv; i++) {
		free(w->kv[i].key);
		free(w->kv[i].value.p);
	}
	for (i = 0; i < w->n_t; i++) {
		free(w->t[i].name);
		free(w->t[i].data);
	}
	free(w->kv);
	free(w->t);
	free(w);
}

void gw_set_version(struct gguf_writer *w, uint32_t version)
{
	w->version = version;
}

void gw_set_align(struct gguf_writer *w, uint32_t align)
{
	w->align = align;
}

void gw_set_counts(struct gguf_writer *w, uint64_t n_tensors, uint64_t n_kv)
{
	w->lie = true;
	w->lie_tensors = n_tensors;
	w->lie_kv = n_kv;
}

void gw_raw(struct gguf_writer *w, const char *key, uint32_t type, const void *value, size_t len)
{
	struct kv *kv;

	w->kv = must(realloc(w->kv, (w->n_kv + 1) * sizeof *w->kv));
	kv = &w->kv[w->n_kv++];
	memset(kv, 0, sizeof *kv);
	kv->key = must(strdup(key));
	kv->type = type;
	put(&kv->value, value, len);
}

void gw_drop(struct gguf_writer *w, const char *key)
{
	size_t i, n = 0;

	for (i = 0; i < w->n_kv; i++) {
		if (strcmp(w->kv[i].key, key) != 0) {
			w->kv[n++] = w->kv[i];
		} else {
			free(w->kv[i].key);
			free(w->kv[i].value.p);
		}
	}
	w->n_kv = n;
}

void gw_u32(struct gguf_writer *w, const char *key, uint32_t v)
{
	gw_raw(w, key, GW_U32, &v, sizeof v);
}

void gw_i32(struct gguf_writer *w, const char *key, int32_t v)
{
	gw_raw(w, key, GW_I32, &v, sizeof v);
}

void gw_u64(struct gguf_writer *w, const char *key, uint64_t v)
{
	gw_raw(w, key, GW_U64, &v, sizeof v);
}

void gw_f32(struct gguf_writer *w, const char *key, float v)
{
	gw_raw(w, key, GW_F32, &v, sizeof v);
}

void gw_bool(struct gguf_writer *w, const char *key, bool v)
{
	uint8_t b = v;

	gw_raw(w, key, GW_BOOL, &b, 1);
}

void gw_strn(struct gguf_writer *w, const char *key, const void *s, size_t len)
{
	struct buf b = {0};

	put_str(&b, s, len);
	gw_raw(w, key, GW_STR, b.p, b.len);
	free(b.p);
}

void gw_str(struct gguf_writer *w, const char *key, const char *s)
{
	gw_strn(w, key, s, strlen(s));
}

static size_t elem_size(enum gw_type t)
{
	static const uint8_t size[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

	return size[t];
}

void gw_arr(struct gguf_writer *w, const char *key, enum gw_type elem, const void *v, uint64_t n)
{
	struct buf b = {0};

	put_u32(&b, elem);
	put_u64(&b, n);
	put(&b, v, n * elem_size(elem));
	gw_raw(w, key, GW_ARR, b.p, b.len);
	free(b.p);
}

void gw_arr_str(struct gguf_writer *w, const char *key, const char *const *v, uint64_t n)
{
	struct buf b = {0};
	uint64_t i;

	put_u32(&b, GW_STR);
	put_u64(&b, n);
	for (i = 0; i < n; i++)
		put_str(&b, v[i], strlen(v[i]));
	gw_raw(w, key, GW_ARR, b.p, b.len);
	free(b.p);
}

unsigned gw_tensor(struct gguf_writer *w, const char *name, uint32_t type, unsigned n_dims, const uint64_t *ne,
                   const void *data, uint64_t bytes)
{
	struct tensor *t;

	w->t = must(realloc(w->t, (w->n_t + 1) * sizeof *w->t));
	t = &w->t[w->n_t];
	memset(t, 0, sizeof *t);
	t->name = must(strdup(name));
	t->type = type;
	t->n_dims = n_dims;
	memcpy(t->ne, ne, (n_dims < 8 ? n_dims : 8) * sizeof *ne);
	t->bytes = bytes;
	if (data && bytes) {
		t->data = must(malloc(bytes));
		memcpy(t->data, data, bytes);
	}
	return (unsigned)w->n_t++;
}

void gw_drop_tensor(struct gguf_writer *w, const char *name)
{
	size_t i, n = 0;

	for (i = 0; i < w->n_t; i++) {
		if (strcmp(w->t[i].name, name) != 0) {
			w->t[n++] = w->t[i];
		} else {
			free(w->t[i].name);
			free(w->t[i].data);
		}
	}
	w->n_t = n;
}

void gw_tensor_offset(struct gguf_writer *w, unsigned i, uint64_t offset)
{
	w->t[i].offset = offset;
	w->t[i].offset_set = true;
}

static uint64_t padding(uint64_t n, uint32_t align)
{
	return align ? (align - n % align) % align : 0;
}

static struct buf head(const struct gguf_writer *w)
{
	struct buf b = {0};
	uint64_t offset = 0;
	size_t i;

	put(&b, "GGUF", 4);
	put_u32(&b, w->version);
	put_u64(&b, w->lie ? w->lie_tensors : w->n_t);
	put_u64(&b, w->lie ? w->lie_kv : w->n_kv);
	for (i = 0; i < w->n_kv; i++) {
		put_str(&b, w->kv[i].key, strlen(w->kv[i].key));
		put_u32(&b, w->kv[i].type);
		put(&b, w->kv[i].value.p, w->kv[i].value.len);
	}
	for (i = 0; i < w->n_t; i++) {
		const struct tensor *t = &w->t[i];

		put_str(&b, t->name, strlen(t->name));
		put_u32(&b, t->n_dims);
		put(&b, t->ne, (t->n_dims < 8 ? t->n_dims : 8) * sizeof t->ne[0]);
		put_u32(&b, t->type);
		put_u64(&b, t->offset_set ? t->offset : offset);
		offset += t->bytes + padding(t->bytes, w->align);
	}
	if (w->n_t)
		put_zero(&b, padding(b.len, w->align));
	return b;
}

void gw_finish_head(const struct gguf_writer *w, uint8_t **out, size_t *len)
{
	struct buf b = head(w);

	*out = b.p;
	*len = b.len;
}

uint64_t gw_tensor_at(const struct gguf_writer *w, unsigned i)
{
	uint64_t at = 0;
	unsigned k;

	for (k = 0; k < i; k++)
		at += w->t[k].bytes + padding(w->t[k].bytes, w->align);
	return at;
}

void gw_finish(const struct gguf_writer *w, uint8_t **out, size_t *len)
{
	struct buf b = head(w);
	size_t i;

	for (i = 0; i < w->n_t; i++) {
		if (w->t[i].data)
			put(&b, w->t[i].data, w->t[i].bytes);
		else
			put_zero(&b, w->t[i].bytes);
		if (i + 1 < w->n_t)
			put_zero(&b, padding(w->t[i].bytes, w->align));
	}
	*out = b.p;
	*len = b.len;
}

int gw_write(const struct gguf_writer *w, const char *path)
{
	uint8_t *p;
	size_t len, done = 0;
	int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644), rc = 0;

	if (fd < 0)
		return -errno;
	gw_finish(w, &p, &len);
	while (done < len && !rc) {
		ssize_t n = write(fd, p + done, len - done);

		if (n >= 0)
			done += (size_t)n;
		else if (errno != EINTR)
			rc = -errno;
	}
	if (close(fd) && !rc)
		rc = -errno;
	free(p);
	return rc;
}
