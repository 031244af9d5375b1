/* SPDX-License-Identifier: MIT */
/*
 * GGUF, versions 2 and 3, little-endian: a file (or all parts of a split one)
 * mapped read-only and checked whole before anything of it is used.
 *
 * Owns: the mappings, the tables of keys and tensors, every check that needs no
 * knowledge of a model: bounds, types, duplicates, alignment, overlap.
 * Does not own: what a key or tensor means (model/arch.c, model/tokenizer.c).
 *
 * The file is hostile: every length is compared with what is left of the file
 * before it is used, tables are allocated only after their counts are known to
 * fit, and no check is worse than n log n. Keys and strings point into the
 * mapping, are not NUL-terminated, and may hold any bytes.
 *
 * Functions return 0 or -errno. On failure err holds one line that names the key
 * or tensor: EINVAL damaged, ENOTSUP sound but not read here (version, type),
 * ENOENT a key that is absent (accessors; err is left alone), or of open and mmap.
 * A struct gguf is immutable after open: any thread may read it.
 */
#ifndef APR_GGUF_H
#define APR_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GGUF_MAX_KEYS 65536u     /* in one file; real ones have under 100 */
#define GGUF_MAX_TENSORS 131072u /* over all parts; real ones have under 3,000 */
#define GGUF_MAX_PARTS 1024u
#define GGUF_MAX_ALIGN 65536u
#define GGUF_DEFAULT_ALIGN 32u

enum gguf_type {
	GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_STR, GGUF_ARR, GGUF_U64,
	GGUF_I64, GGUF_F64, GGUF_TYPE_LIMIT
};

struct gguf_str {
	const char *s;
	uint64_t len;
};

struct gguf_tensor {
	struct gguf_str name;
	const void *data; /* in the mapping, aligned as the file says (8 at least) */
	uint64_t bytes;
	uint64_t ne[4]; /* elements; ne[0] is contiguous; those from n_dims on are 1 */
	uint32_t n_dims, type; /* type is one that apr_type_info() knows */
};

struct gguf_arr { /* an array's value; strings are read with a cursor */
	uint32_t elem;
	uint64_t n;
	const uint8_t *p;
};

struct gguf;

int gguf_open(struct gguf **out, const char *path, char *err, size_t errlen);
/* The same from memory that the caller keeps until gguf_close (8-aligned); not for split files. */
int gguf_open_memory(struct gguf **out, const void *data, size_t len, char *err, size_t errlen);
void gguf_close(struct gguf *g);

uint32_t gguf_n_tensors(const struct gguf *g);
const struct gguf_tensor *gguf_tensor(const struct gguf *g, uint32_t i); /* in the file's order */
/* Its index, or -1. */
int64_t gguf_find_tensor(const struct gguf *g, const char *name);

uint32_t gguf_n_keys(const struct gguf *g);
struct gguf_str gguf_key(const struct gguf *g, uint32_t i);
bool gguf_has(const struct gguf *g, const char *key);

/* Integers of any width and sign are accepted where the value fits; F64 where F32 is wanted;
 * an integer 0 or 1 where a bool is. */
int gguf_get_u32(const struct gguf *g, const char *key, uint32_t *out, char *err, size_t errlen);
int gguf_get_i32(const struct gguf *g, const char *key, int32_t *out, char *err, size_t errlen);
int gguf_get_f32(const struct gguf *g, const char *key, float *out, char *err, size_t errlen); /* finite */
int gguf_get_bool(const struct gguf *g, const char *key, bool *out, char *err, size_t errlen);
int gguf_get_str(const struct gguf *g, const char *key, struct gguf_str *out, char *err, size_t errlen);
int gguf_get_arr(const struct gguf *g, const char *key, struct gguf_arr *out, char *err, size_t errlen);
bool gguf_is_arr(const struct gguf *g, const char *key); /* false where it is absent, too */

/* Elements of a non-string array: false where the element type or value does not fit. i < n. */
bool gguf_arr_u32(const struct gguf_arr *a, uint64_t i, uint32_t *out);
bool gguf_arr_i32(const struct gguf_arr *a, uint64_t i, int32_t *out);
bool gguf_arr_f32(const struct gguf_arr *a, uint64_t i, float *out);
/* Strings in turn: start with *cursor = a->p; call at most n times. */
struct gguf_str gguf_arr_next(const uint8_t **cursor);

bool gguf_str_is(struct gguf_str s, const char *z);
/* For error lines: printable ASCII, at most len - 1 bytes, cut with "..". Returns out. */
const char *gguf_printable(struct gguf_str s, char *out, size_t len);

/* The bytes before tensor data of part i (header, keys, tensor table) and the part's data;
 * false where there is no such part. For hashing. */
bool gguf_part(const struct gguf *g, uint32_t i, const uint8_t **bytes, uint64_t *len);

#endif
