/* SPDX-License-Identifier: MIT */
/*
 * One part of a GGUF file: header, keys, tensor table, and where the data lies.
 * Bounds first: a cursor never passes the end, and no count is believed before
 * the smallest thing it could count is known to fit in what is left.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/types.h"
#include "model/gguf_parse.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "GGUF is read in place: a little-endian machine is needed"
#endif

_Static_assert(sizeof(void *) == 8, "a tensor's offset waits in its data pointer");

#define MAX_NAME 63u     /* of a tensor, as the format says: below 64 bytes */
#define MAX_KEY 65535u   /* of a key, as the format says */
#define MIN_KV 14u       /* length 8, one byte of name, type 4, one byte of value */
#define MIN_TENSOR 33u   /* length 8, one byte of name, n_dims 4, ne 8, type 4, offset 8 */
#define LAST_GGML_TYPE 63u /* numbers up to here are or may become types; above is damage */

struct cursor {
	const uint8_t *p, *end;
};

int gguf_fail(char *err, size_t errlen, int rc, const char *fmt, ...)
{
	va_list ap;

	if (errlen) {
		va_start(ap, fmt);
		vsnprintf(err, errlen, fmt, ap);
		va_end(ap);
	}
	return rc;
}

const char *gguf_printable(struct gguf_str s, char *out, size_t len)
{
	uint64_t i, n = s.len < len ? s.len : len - 1;

	for (i = 0; i < n; i++)
		out[i] = s.s[i] >= 0x20 && s.s[i] < 0x7f ? s.s[i] : '?';
	out[n] = 0;
	if (n < s.len && n >= 2)
		out[n - 2] = out[n - 1] = '.';
	return out;
}

static uint64_t left(const struct cursor *c)
{
	return (uint64_t)(c->end - c->p);
}

static bool take(struct cursor *c, void *out, size_t n)
{
	if (left(c) < n)
		return false;
	memcpy(out, c->p, n);
	c->p += n;
	return true;
}

static bool take_str(struct cursor *c, struct gguf_str *s)
{
	if (!take(c, &s->len, sizeof s->len) || s->len > left(c))
		return false;
	s->s = (const char *)c->p;
	c->p += s->len;
	return true;
}

static unsigned scalar_size(uint32_t type) /* 0: not a scalar of fixed size */
{
	static const uint8_t size[GGUF_TYPE_LIMIT] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

	return type < GGUF_TYPE_LIMIT ? size[type] : 0;
}

static int skip_strings(struct cursor *c, uint64_t n, const char *name, char *err, size_t errlen)
{
	struct gguf_str s;
	uint64_t i;

	if (n > left(c) / sizeof s.len)
		return gguf_fail(err, errlen, -EINVAL, "key %s: array of %llu strings passes the end of the file", name,
		                 (unsigned long long)n);
	for (i = 0; i < n; i++) {
		if (!take_str(c, &s))
			return gguf_fail(err, errlen, -EINVAL, "key %s: string %llu passes the end of the file", name,
			                 (unsigned long long)i);
	}
	return 0;
}

static int check_bools(const uint8_t *p, uint64_t n, const char *name, char *err, size_t errlen)
{
	uint64_t i;

	for (i = 0; i < n; i++) {
		if (p[i] > 1)
			return gguf_fail(err, errlen, -EINVAL, "key %s: a bool with the value %u", name, p[i]);
	}
	return 0;
}

static int skip_array(struct cursor *c, const char *name, char *err, size_t errlen)
{
	const uint8_t *start;
	uint32_t elem;
	uint64_t n;
	unsigned size;

	if (!take(c, &elem, sizeof elem) || !take(c, &n, sizeof n))
		return gguf_fail(err, errlen, -EINVAL, "key %s: array cut off by the end of the file", name);
	if (elem == GGUF_STR)
		return skip_strings(c, n, name, err, errlen);
	if (elem == GGUF_ARR)
		return gguf_fail(err, errlen, -EINVAL, "key %s: array of arrays", name);
	size = scalar_size(elem);
	if (!size)
		return gguf_fail(err, errlen, -EINVAL, "key %s: unknown array element type %u", name, elem);
	if (n > left(c) / size)
		return gguf_fail(err, errlen, -EINVAL, "key %s: array of %llu elements passes the end of the file", name,
		                 (unsigned long long)n);
	start = c->p;
	c->p += n * size;
	return elem == GGUF_BOOL ? check_bools(start, n, name, err, errlen) : 0;
}

static int skip_value(struct cursor *c, uint32_t type, const char *name, char *err, size_t errlen)
{
	struct gguf_str s;
	unsigned size = scalar_size(type);

	if (type == GGUF_ARR)
		return skip_array(c, name, err, errlen);
	if (type == GGUF_STR) {
		if (!take_str(c, &s))
			return gguf_fail(err, errlen, -EINVAL, "key %s: string passes the end of the file", name);
		return 0;
	}
	if (!size)
		return gguf_fail(err, errlen, -EINVAL, "key %s: unknown value type %u", name, type);
	if (left(c) < size)
		return gguf_fail(err, errlen, -EINVAL, "key %s: value cut off by the end of the file", name);
	c->p += size;
	return type == GGUF_BOOL ? check_bools(c->p - 1, 1, name, err, errlen) : 0;
}

static int parse_kv(struct cursor *c, struct gguf_kv *kv, uint32_t i, char *err, size_t errlen)
{
	char name[80];

	if (!take_str(c, &kv->key))
		return gguf_fail(err, errlen, -EINVAL, "key number %u: its name passes the end of the file", i);
	if (!kv->key.len || kv->key.len > MAX_KEY)
		return gguf_fail(err, errlen, -EINVAL, "key number %u: a name of %llu bytes", i,
		                 (unsigned long long)kv->key.len);
	gguf_printable(kv->key, name, sizeof name);
	if (!take(c, &kv->type, sizeof kv->type))
		return gguf_fail(err, errlen, -EINVAL, "key %s: type cut off by the end of the file", name);
	kv->value = c->p;
	return skip_value(c, kv->type, name, err, errlen);
}

static int compare_str(struct gguf_str a, struct gguf_str b)
{
	if (a.len != b.len)
		return a.len < b.len ? -1 : 1;
	return a.len ? memcmp(a.s, b.s, a.len) : 0;
}

static int compare_kv(const void *a, const void *b, void *ctx)
{
	const struct gguf_kv *kv = ctx;

	return compare_str(kv[*(const uint32_t *)a].key, kv[*(const uint32_t *)b].key);
}

static int index_keys(struct gguf_part *part, char *err, size_t errlen)
{
	char name[80];
	uint32_t i;

	part->kv_order = calloc(part->n_kv ? part->n_kv : 1, sizeof *part->kv_order);
	if (!part->kv_order)
		return gguf_fail(err, errlen, -ENOMEM, "out of memory for %u keys", part->n_kv);
	for (i = 0; i < part->n_kv; i++)
		part->kv_order[i] = i;
	qsort_r(part->kv_order, part->n_kv, sizeof *part->kv_order, compare_kv, part->kv);
	for (i = 1; i < part->n_kv; i++) {
		const struct gguf_kv *kv = &part->kv[part->kv_order[i]];

		if (!compare_str(kv->key, part->kv[part->kv_order[i - 1]].key))
			return gguf_fail(err, errlen, -EINVAL, "key %s: given twice",
			                 gguf_printable(kv->key, name, sizeof name));
	}
	return 0;
}

const struct gguf_kv *gguf_part_find(const struct gguf_part *part, const char *key)
{
	struct gguf_str want = {key, strlen(key)};
	uint32_t lo = 0, hi = part->n_kv;

	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2;
		const struct gguf_kv *kv = &part->kv[part->kv_order[mid]];
		int cmp = compare_str(want, kv->key);

		if (!cmp)
			return kv;
		if (cmp < 0)
			hi = mid;
		else
			lo = mid + 1;
	}
	return NULL;
}

/* Exactly UINT32: other types of this one key are refused, since readers disagree on them. */
static int read_alignment(const struct gguf_part *part, uint32_t *align, char *err, size_t errlen)
{
	const struct gguf_kv *kv = gguf_part_find(part, "general.alignment");

	*align = GGUF_DEFAULT_ALIGN;
	if (!kv)
		return 0;
	if (kv->type != GGUF_U32)
		return gguf_fail(err, errlen, -EINVAL, "key general.alignment: not of type UINT32");
	memcpy(align, kv->value, sizeof *align);
	if (*align < 8 || *align > GGUF_MAX_ALIGN || (*align & (*align - 1)))
		return gguf_fail(err, errlen, -EINVAL, "key general.alignment: %u is not a power of two from 8 to %u",
		                 *align, GGUF_MAX_ALIGN);
	return 0;
}

static int parse_shape(struct cursor *c, struct gguf_tensor *t, const char *name, char *err, size_t errlen)
{
	uint64_t elements = 1;
	uint32_t i;

	if (!take(c, &t->n_dims, sizeof t->n_dims))
		return gguf_fail(err, errlen, -EINVAL, "tensor %s: cut off by the end of the file", name);
	if (!t->n_dims || t->n_dims > 4)
		return gguf_fail(err, errlen, -EINVAL, "tensor %s: %u dimensions", name, t->n_dims);
	for (i = 0; i < 4; i++) {
		t->ne[i] = 1;
		if (i < t->n_dims && !take(c, &t->ne[i], sizeof t->ne[i]))
			return gguf_fail(err, errlen, -EINVAL, "tensor %s: cut off by the end of the file", name);
		if (!t->ne[i])
			return gguf_fail(err, errlen, -EINVAL, "tensor %s: dimension %u is 0", name, i);
		if (__builtin_mul_overflow(elements, t->ne[i], &elements) || elements > INT64_MAX)
			return gguf_fail(err, errlen, -EINVAL, "tensor %s: the product of its dimensions overflows", name);
	}
	return 0;
}

static int tensor_bytes(struct gguf_tensor *t, const char *name, char *err, size_t errlen)
{
	struct apr_type_info ti = apr_type_info(t->type);
	uint64_t blocks, i;

	if (!ti.block)
		return gguf_fail(err, errlen, t->type > LAST_GGML_TYPE ? -EINVAL : -ENOTSUP,
		                 "tensor %s: weight type %d is not one that is read", name, (int)t->type);
	if (t->ne[0] % ti.block)
		return gguf_fail(err, errlen, -EINVAL, "tensor %s: rows of %llu elements are not whole blocks of %s", name,
		                 (unsigned long long)t->ne[0], ti.name);
	blocks = t->ne[0] / ti.block;
	for (i = 1; i < 4; i++)
		blocks *= t->ne[i]; /* at most the checked product of all dimensions */
	if (__builtin_mul_overflow(blocks, (uint64_t)ti.block_bytes, &t->bytes) || t->bytes > SIZE_MAX / 2)
		return gguf_fail(err, errlen, -EINVAL, "tensor %s: its size overflows", name);
	return 0;
}

/* The offset is kept in data until the end of the table, and with it the data's start, is known. */
static int parse_tensor(struct cursor *c, struct gguf_tensor *t, uint32_t i, uint32_t align, char *err, size_t errlen)
{
	char name[80];
	uint64_t offset;
	int rc;

	if (!take_str(c, &t->name))
		return gguf_fail(err, errlen, -EINVAL, "tensor number %u: its name passes the end of the file", i);
	if (!t->name.len || t->name.len > MAX_NAME)
		return gguf_fail(err, errlen, -EINVAL, "tensor number %u: a name of %llu bytes", i,
		                 (unsigned long long)t->name.len);
	gguf_printable(t->name, name, sizeof name);
	rc = parse_shape(c, t, name, err, errlen);
	if (rc)
		return rc;
	if (!take(c, &t->type, sizeof t->type) || !take(c, &offset, sizeof offset))
		return gguf_fail(err, errlen, -EINVAL, "tensor %s: cut off by the end of the file", name);
	if (offset % align)
		return gguf_fail(err, errlen, -EINVAL, "tensor %s: offset %llu is not a multiple of the alignment %u", name,
		                 (unsigned long long)offset, align);
	t->data = (const void *)(uintptr_t)offset;
	return tensor_bytes(t, name, err, errlen);
}

static int compare_offset(const void *a, const void *b, void *ctx)
{
	const struct gguf_tensor *t = ctx;
	uintptr_t x = (uintptr_t)t[*(const uint32_t *)a].data, y = (uintptr_t)t[*(const uint32_t *)b].data;

	return (x > y) - (x < y);
}

static int check_overlap(const struct gguf_tensor *t, uint32_t n, char *err, size_t errlen)
{
	uint32_t *order = calloc(n ? n : 1, sizeof *order), i;
	char a[80], b[80];
	int rc = 0;

	if (!order)
		return gguf_fail(err, errlen, -ENOMEM, "out of memory for %u tensors", n);
	for (i = 0; i < n; i++)
		order[i] = i;
	qsort_r(order, n, sizeof *order, compare_offset, (void *)(uintptr_t)t);
	for (i = 1; i < n && !rc; i++) {
		const struct gguf_tensor *x = &t[order[i - 1]], *y = &t[order[i]];

		if ((uintptr_t)y->data - (uintptr_t)x->data < x->bytes)
			rc = gguf_fail(err, errlen, -EINVAL, "tensor %s: overlaps tensor %s",
			               gguf_printable(y->name, a, sizeof a), gguf_printable(x->name, b, sizeof b));
	}
	free(order);
	return rc;
}

static int place_data(const struct gguf_part *part, struct cursor *c, struct gguf_tensor *t, uint32_t n, uint32_t align,
                      char *err, size_t errlen)
{
	uint64_t head = (uint64_t)(c->p - part->p), start = (head + align - 1) / align * align;
	uint64_t room = start < part->len ? part->len - start : 0;
	char name[80];
	uint32_t i;

	for (i = 0; i < n; i++) {
		uint64_t offset = (uintptr_t)t[i].data;

		if (offset > room || t[i].bytes > room - offset)
			return gguf_fail(err, errlen, -EINVAL,
			                 "tensor %s: %llu bytes at offset %llu pass the end of the file",
			                 gguf_printable(t[i].name, name, sizeof name), (unsigned long long)t[i].bytes,
			                 (unsigned long long)offset);
	}
	for (i = 0; i < n; i++)
		t[i].data = part->p + start + (uintptr_t)t[i].data;
	return check_overlap(t, n, err, errlen);
}

static int parse_header(struct cursor *c, uint64_t *n_tensors, uint64_t *n_kv, char *err, size_t errlen)
{
	char magic[4];
	uint32_t version;

	if (!take(c, magic, sizeof magic) || memcmp(magic, "GGUF", 4) != 0)
		return gguf_fail(err, errlen, -EINVAL, "magic: not a GGUF file");
	if (!take(c, &version, sizeof version))
		return gguf_fail(err, errlen, -EINVAL, "version: cut off by the end of the file");
	if (version != 2 && version != 3) {
		bool swapped = version == 0x02000000 || version == 0x03000000;

		return gguf_fail(err, errlen, -ENOTSUP, "version: %u%s; 2 and 3 are read", version,
		                 swapped ? " (a big-endian file)" : "");
	}
	if (!take(c, n_tensors, sizeof *n_tensors) || !take(c, n_kv, sizeof *n_kv))
		return gguf_fail(err, errlen, -EINVAL, "n_tensors, n_kv: cut off by the end of the file");
	if (*n_kv > GGUF_MAX_KEYS || *n_kv > left(c) / MIN_KV)
		return gguf_fail(err, errlen, -EINVAL, "n_kv: %llu keys do not fit in the file",
		                 (unsigned long long)*n_kv);
	if (*n_tensors > GGUF_MAX_TENSORS || *n_tensors > left(c) / MIN_TENSOR)
		return gguf_fail(err, errlen, -EINVAL, "n_tensors: %llu tensors do not fit in the file",
		                 (unsigned long long)*n_tensors);
	return 0;
}

static int parse_keys(struct gguf_part *part, struct cursor *c, uint32_t n, char *err, size_t errlen)
{
	uint32_t i;
	int rc = 0;

	part->kv = calloc(n ? n : 1, sizeof *part->kv);
	if (!part->kv)
		return gguf_fail(err, errlen, -ENOMEM, "out of memory for %u keys", n);
	part->n_kv = n;
	for (i = 0; i < n && !rc; i++)
		rc = parse_kv(c, &part->kv[i], i, err, errlen);
	return rc ? rc : index_keys(part, err, errlen);
}

int gguf_parse_part(struct gguf *g, struct gguf_part *part, char *err, size_t errlen)
{
	struct cursor c = {part->p, part->p + part->len};
	uint64_t n_tensors = 0, n_kv = 0, total;
	struct gguf_tensor *t;
	uint32_t align, i;
	int rc;

	rc = parse_header(&c, &n_tensors, &n_kv, err, errlen);
	if (!rc)
		rc = parse_keys(part, &c, (uint32_t)n_kv, err, errlen);
	if (!rc)
		rc = read_alignment(part, &align, err, errlen);
	if (rc)
		return rc;
	total = g->n_tensors + n_tensors;
	if (total > GGUF_MAX_TENSORS || n_tensors > left(&c) / MIN_TENSOR)
		return gguf_fail(err, errlen, -EINVAL, "n_tensors: %llu tensors do not fit in the file",
		                 (unsigned long long)n_tensors);
	t = realloc(g->tensors, (total ? total : 1) * sizeof *t);
	if (!t)
		return gguf_fail(err, errlen, -ENOMEM, "out of memory for %llu tensors", (unsigned long long)total);
	g->tensors = t;
	t += g->n_tensors;
	for (i = 0; i < n_tensors && !rc; i++)
		rc = parse_tensor(&c, &t[i], i, align, err, errlen);
	if (!rc)
		rc = place_data(part, &c, t, (uint32_t)n_tensors, align, err, errlen);
	if (!rc)
		g->n_tensors = (uint32_t)total;
	return rc;
}

static int compare_tensor(const void *a, const void *b, void *ctx)
{
	const struct gguf_tensor *t = ctx;

	return compare_str(t[*(const uint32_t *)a].name, t[*(const uint32_t *)b].name);
}

int gguf_index_tensors(struct gguf *g, char *err, size_t errlen)
{
	char name[80];
	uint32_t i;

	g->tensor_order = calloc(g->n_tensors ? g->n_tensors : 1, sizeof *g->tensor_order);
	if (!g->tensor_order)
		return gguf_fail(err, errlen, -ENOMEM, "out of memory for %u tensors", g->n_tensors);
	for (i = 0; i < g->n_tensors; i++)
		g->tensor_order[i] = i;
	qsort_r(g->tensor_order, g->n_tensors, sizeof *g->tensor_order, compare_tensor, g->tensors);
	for (i = 1; i < g->n_tensors; i++) {
		const struct gguf_tensor *t = &g->tensors[g->tensor_order[i]];

		if (!compare_str(t->name, g->tensors[g->tensor_order[i - 1]].name))
			return gguf_fail(err, errlen, -EINVAL, "tensor %s: given twice",
			                 gguf_printable(t->name, name, sizeof name));
	}
	return 0;
}

int64_t gguf_find_tensor(const struct gguf *g, const char *name)
{
	struct gguf_str want = {name, strlen(name)};
	uint32_t lo = 0, hi = g->n_tensors;

	while (lo < hi) {
		uint32_t mid = lo + (hi - lo) / 2, i = g->tensor_order[mid];
		int cmp = compare_str(want, g->tensors[i].name);

		if (!cmp)
			return i;
		if (cmp < 0)
			hi = mid;
		else
			lo = mid + 1;
	}
	return -1;
}
