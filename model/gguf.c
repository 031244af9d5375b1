/* SPDX-License-Identifier: MIT */
/*
 * Opens a GGUF file or all parts of a split one, and reads typed values from it.
 * The parser is gguf_parse.c.
 */
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model/gguf_parse.h"

/* O_NONBLOCK: a FIFO at the path is refused, not waited for. */
static int map_file(struct gguf_part *part, const char *path, char *err, size_t errlen)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc = 0;
	struct stat st;
	void *p;

	if (fd < 0)
		return gguf_fail(err, errlen, -errno, "%s: %s", path, strerror(errno));
	if (fstat(fd, &st)) {
		rc = gguf_fail(err, errlen, -errno, "%s: %s", path, strerror(errno));
	} else if (!S_ISREG(st.st_mode)) {
		rc = gguf_fail(err, errlen, -EINVAL, "%s: not a regular file", path);
	} else if (st.st_size <= 0 || (uint64_t)st.st_size > SIZE_MAX / 2) {
		rc = gguf_fail(err, errlen, -EINVAL, "magic: not a GGUF file (%lld bytes)", (long long)st.st_size);
	} else {
		p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
		if (p == MAP_FAILED) {
			rc = gguf_fail(err, errlen, -errno, "%s: mmap: %s", path, strerror(errno));
		} else {
			part->p = p;
			part->len = (uint64_t)st.st_size;
			part->mapped = true;
		}
	}
	close(fd);
	return rc;
}

void gguf_close(struct gguf *g)
{
	uint32_t i;

	if (!g)
		return;
	for (i = 0; i < g->n_parts; i++) {
		if (g->parts[i].mapped)
			munmap((void *)(uintptr_t)g->parts[i].p, g->parts[i].len);
		free(g->parts[i].kv);
		free(g->parts[i].kv_order);
	}
	free(g->parts);
	free(g->tensors);
	free(g->tensor_order);
	free(g);
}

static struct gguf *new_gguf(uint32_t n_parts)
{
	struct gguf *g = calloc(1, sizeof *g);

	if (!g)
		return NULL;
	g->parts = calloc(n_parts, sizeof *g->parts);
	g->n_parts = n_parts;
	if (!g->parts) {
		free(g);
		return NULL;
	}
	return g;
}

/* NAME-00001-of-000NN.gguf: puts part i's number (from 1) into a copy of the first part's path. */
static char *part_path(const char *first, uint32_t i, uint32_t n)
{
	char want[32], *path = strdup(first);
	size_t len = strlen(first), tail;

	if (!path)
		return NULL;
	tail = (size_t)snprintf(want, sizeof want, "-%05u-of-%05u.gguf", 1u, n);
	if (len <= tail || strcmp(path + len - tail, want) != 0) {
		free(path);
		errno = EINVAL;
		return NULL;
	}
	snprintf(want, sizeof want, "-%05u-of-%05u.gguf", i, n);
	memcpy(path + len - tail, want, tail);
	return path;
}

static int open_rest_part(struct gguf *g, const char *first, uint32_t i, char *err, size_t errlen)
{
	char *path = part_path(first, i + 1, g->n_parts), why[256];
	uint32_t no = 0, count;
	int rc;

	if (!path)
		return gguf_fail(err, errlen, -errno,
		                 "key split.count: %u parts, but the file's name does not end in -00001-of-%05u.gguf",
		                 g->n_parts, g->n_parts);
	rc = map_file(&g->parts[i], path, why, sizeof why);
	if (!rc)
		rc = gguf_parse_part(g, &g->parts[i], why, sizeof why);
	if (!rc)
		rc = gguf_part_u32(&g->parts[i], "split.no", &no, why, sizeof why);
	if (rc == -ENOENT && g->parts[i].n_kv)
		rc = gguf_fail(why, sizeof why, -EINVAL, "key split.no: missing");
	if (!rc && no != i)
		rc = gguf_fail(why, sizeof why, -EINVAL, "key split.no: %u where %u is expected", no, i);
	if (!rc && gguf_part_u32(&g->parts[i], "split.count", &count, why, sizeof why) == 0 && count != g->n_parts)
		rc = gguf_fail(why, sizeof why, -EINVAL, "key split.count: %u, but %u in the first part", count,
		               g->n_parts);
	if (rc)
		gguf_fail(err, errlen, rc, "part %u of %u: %s", i + 1, g->n_parts, why);
	free(path);
	return rc;
}

static int open_rest(struct gguf *g, const char *path, char *err, size_t errlen)
{
	uint32_t count = 1, no = 0, total, i;
	int rc = gguf_part_u32(&g->parts[0], "split.count", &count, err, errlen);

	if (rc == -ENOENT)
		return 0;
	if (rc)
		return rc;
	rc = gguf_part_u32(&g->parts[0], "split.no", &no, err, errlen);
	if (rc && rc != -ENOENT)
		return rc;
	if (count > GGUF_MAX_PARTS)
		return gguf_fail(err, errlen, -EINVAL, "key split.count: %u parts", count);
	if (no != 0)
		return gguf_fail(err, errlen, -EINVAL, "key split.no: this is part %u; open the first one", no + 1);
	if (count > 1 && !path)
		return gguf_fail(err, errlen, -EINVAL, "key split.count: %u parts, but only one is given", count);
	if (count > 1) {
		struct gguf_part *parts;

		parts = realloc(g->parts, count * sizeof *parts);
		if (!parts)
			return gguf_fail(err, errlen, -ENOMEM, "out of memory for %u parts", count);
		memset(parts + 1, 0, (count - 1) * sizeof *parts);
		g->parts = parts;
		g->n_parts = count;
	}
	for (i = 1; path && i < g->n_parts; i++) {
		rc = open_rest_part(g, path, i, err, errlen);
		if (rc)
			return rc;
	}
	rc = gguf_part_u32(&g->parts[0], "split.tensors.count", &total, err, errlen);
	if (!rc && total != g->n_tensors)
		return gguf_fail(err, errlen, -EINVAL, "key split.tensors.count: %u, but the parts hold %u", total,
		                 g->n_tensors);
	return rc == -ENOENT ? 0 : rc;
}

static int finish_open(struct gguf *g, const char *path, char *err, size_t errlen)
{
	int rc = gguf_parse_part(g, &g->parts[0], err, errlen);

	if (!rc)
		rc = open_rest(g, path, err, errlen);
	return rc ? rc : gguf_index_tensors(g, err, errlen);
}

int gguf_open(struct gguf **out, const char *path, char *err, size_t errlen)
{
	struct gguf *g = new_gguf(1);
	int rc;

	if (!g)
		return gguf_fail(err, errlen, -ENOMEM, "out of memory");
	rc = map_file(&g->parts[0], path, err, errlen);
	if (!rc)
		rc = finish_open(g, path, err, errlen);
	if (rc)
		gguf_close(g);
	else
		*out = g;
	return rc;
}

int gguf_open_memory(struct gguf **out, const void *data, size_t len, char *err, size_t errlen)
{
	struct gguf *g = new_gguf(1);
	int rc;

	if (!g)
		return gguf_fail(err, errlen, -ENOMEM, "out of memory");
	g->parts[0].p = data;
	g->parts[0].len = len;
	rc = finish_open(g, NULL, err, errlen);
	if (rc)
		gguf_close(g);
	else
		*out = g;
	return rc;
}

bool gguf_part(const struct gguf *g, uint32_t i, const uint8_t **bytes, uint64_t *len)
{
	if (i >= g->n_parts)
		return false;
	*bytes = g->parts[i].p;
	*len = g->parts[i].len;
	return true;
}

uint32_t gguf_n_tensors(const struct gguf *g)
{
	return g->n_tensors;
}

const struct gguf_tensor *gguf_tensor(const struct gguf *g, uint32_t i)
{
	return &g->tensors[i];
}

uint32_t gguf_n_keys(const struct gguf *g)
{
	return g->parts[0].n_kv;
}

struct gguf_str gguf_key(const struct gguf *g, uint32_t i)
{
	return g->parts[0].kv[i].key;
}

bool gguf_has(const struct gguf *g, const char *key)
{
	return gguf_part_find(&g->parts[0], key) != NULL;
}

bool gguf_is_arr(const struct gguf *g, const char *key)
{
	const struct gguf_kv *kv = gguf_part_find(&g->parts[0], key);

	return kv && kv->type == GGUF_ARR;
}

/* Any integer as a signed 64-bit one; false: no integer, or above INT64_MAX. */
static bool load_int(uint32_t type, const uint8_t *p, int64_t *out)
{
	union {
		uint8_t u8; int8_t i8; uint16_t u16; int16_t i16; uint32_t u32; int32_t i32; uint64_t u64; int64_t i64;
	} v;

	switch (type) {
	case GGUF_U8: case GGUF_BOOL: *out = *p; return true;
	case GGUF_I8: memcpy(&v.i8, p, 1); *out = (int64_t)v.i8; return true;
	case GGUF_U16: memcpy(&v.u16, p, 2); *out = v.u16; return true;
	case GGUF_I16: memcpy(&v.i16, p, 2); *out = v.i16; return true;
	case GGUF_U32: memcpy(&v.u32, p, 4); *out = v.u32; return true;
	case GGUF_I32: memcpy(&v.i32, p, 4); *out = v.i32; return true;
	case GGUF_I64: memcpy(&v.i64, p, 8); *out = v.i64; return true;
	case GGUF_U64:
		memcpy(&v.u64, p, 8);
		*out = (int64_t)v.u64;
		return v.u64 <= INT64_MAX;
	default:
		return false;
	}
}

static bool load_f32(uint32_t type, const uint8_t *p, float *out)
{
	double d;

	if (type == GGUF_F32) {
		memcpy(out, p, sizeof *out);
		return true;
	}
	if (type != GGUF_F64)
		return false;
	memcpy(&d, p, sizeof d);
	*out = (float)d;
	return true;
}

static int get_int(const struct gguf_part *part, const char *key, int64_t min, int64_t max, int64_t *out, char *err,
                   size_t errlen)
{
	const struct gguf_kv *kv = gguf_part_find(part, key);

	if (!kv)
		return -ENOENT;
	if (kv->type == GGUF_BOOL || !load_int(kv->type, kv->value, out)) {
		if (kv->type == GGUF_U64)
			return gguf_fail(err, errlen, -EINVAL, "key %s: out of range", key);
		return gguf_fail(err, errlen, -EINVAL, "key %s: not an integer", key);
	}
	if (*out < min || *out > max)
		return gguf_fail(err, errlen, -EINVAL, "key %s: %lld is out of range", key, (long long)*out);
	return 0;
}

int gguf_part_u32(const struct gguf_part *part, const char *key, uint32_t *out, char *err, size_t errlen)
{
	int64_t v = 0;
	int rc = get_int(part, key, 0, UINT32_MAX, &v, err, errlen);

	if (!rc)
		*out = (uint32_t)v;
	return rc;
}

int gguf_get_u32(const struct gguf *g, const char *key, uint32_t *out, char *err, size_t errlen)
{
	return gguf_part_u32(&g->parts[0], key, out, err, errlen);
}

int gguf_get_i32(const struct gguf *g, const char *key, int32_t *out, char *err, size_t errlen)
{
	int64_t v = 0;
	int rc = get_int(&g->parts[0], key, INT32_MIN, INT32_MAX, &v, err, errlen);

	if (!rc)
		*out = (int32_t)v;
	return rc;
}

int gguf_get_f32(const struct gguf *g, const char *key, float *out, char *err, size_t errlen)
{
	const struct gguf_kv *kv = gguf_part_find(&g->parts[0], key);
	float v;

	if (!kv)
		return -ENOENT;
	if (!load_f32(kv->type, kv->value, &v))
		return gguf_fail(err, errlen, -EINVAL, "key %s: not a float", key);
	if (!isfinite(v))
		return gguf_fail(err, errlen, -EINVAL, "key %s: not a finite number", key);
	*out = v;
	return 0;
}

int gguf_get_bool(const struct gguf *g, const char *key, bool *out, char *err, size_t errlen)
{
	const struct gguf_kv *kv = gguf_part_find(&g->parts[0], key);
	int64_t v;

	if (!kv)
		return -ENOENT;
	if (!load_int(kv->type, kv->value, &v) || v < 0 || v > 1)
		return gguf_fail(err, errlen, -EINVAL, "key %s: not a bool", key);
	*out = v != 0;
	return 0;
}

int gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *out, char *err, size_t errlen)
{
	const struct gguf_kv *kv = gguf_part_find(&g->parts[0], key);

	if (!kv)
		return -ENOENT;
	if (kv->type != GGUF_STR)
		return gguf_fail(err, errlen, -EINVAL, "key %s: not a string", key);
	memcpy(&out->len, kv->value, sizeof out->len);
	out->s = (const char *)kv->value + sizeof out->len;
	return 0;
}

int gguf_get_arr(const struct gguf *g, const char *key, struct gguf_arr *out, char *err, size_t errlen)
{
	const struct gguf_kv *kv = gguf_part_find(&g->parts[0], key);

	if (!kv)
		return -ENOENT;
	if (kv->type != GGUF_ARR)
		return gguf_fail(err, errlen, -EINVAL, "key %s: not an array", key);
	memcpy(&out->elem, kv->value, sizeof out->elem);
	memcpy(&out->n, kv->value + sizeof out->elem, sizeof out->n);
	out->p = kv->value + sizeof out->elem + sizeof out->n;
	return 0;
}

static unsigned elem_size(uint32_t type)
{
	static const uint8_t size[GGUF_TYPE_LIMIT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

	return size[type];
}

bool gguf_arr_u32(const struct gguf_arr *a, uint64_t i, uint32_t *out)
{
	int64_t v;

	if (!load_int(a->elem, a->p + i * elem_size(a->elem), &v) || v < 0 || v > UINT32_MAX)
		return false;
	*out = (uint32_t)v;
	return true;
}

bool gguf_arr_i32(const struct gguf_arr *a, uint64_t i, int32_t *out)
{
	int64_t v;

	if (!load_int(a->elem, a->p + i * elem_size(a->elem), &v) || v < INT32_MIN || v > INT32_MAX)
		return false;
	*out = (int32_t)v;
	return true;
}

bool gguf_arr_f32(const struct gguf_arr *a, uint64_t i, float *out)
{
	return load_f32(a->elem, a->p + i * elem_size(a->elem), out);
}

struct gguf_str gguf_arr_next(const uint8_t **cursor)
{
	struct gguf_str s;

	memcpy(&s.len, *cursor, sizeof s.len);
	s.s = (const char *)*cursor + sizeof s.len;
	*cursor += sizeof s.len + s.len;
	return s;
}

bool gguf_str_is(struct gguf_str s, const char *z)
{
	return s.len == strlen(z) && !memcmp(s.s, z, s.len);
}
