/* SPDX-License-Identifier: MIT */
/* Private to gguf*.c: the tables, and one part's parser. */
#ifndef APR_GGUF_PARSE_H
#define APR_GGUF_PARSE_H

#include "model/gguf.h"

struct gguf_kv {
	struct gguf_str key;
	uint32_t type;
	const uint8_t *value; /* checked to lie in the file */
};

struct gguf_part {
	const uint8_t *p;
	uint64_t len;
	bool mapped;
	struct gguf_kv *kv;
	uint32_t *kv_order; /* indices into kv by key */
	uint32_t n_kv;
};

struct gguf {
	struct gguf_part *parts;
	uint32_t n_parts;
	struct gguf_tensor *tensors;
	uint32_t *tensor_order; /* indices into tensors by name */
	uint32_t n_tensors;
};

/* Reads part->p[0..len): fills its keys and appends its tensors to g. */
int gguf_parse_part(struct gguf *g, struct gguf_part *part, char *err, size_t errlen);
/* After the last part: sorts tensors by name, refuses duplicates. */
int gguf_index_tensors(struct gguf *g, char *err, size_t errlen);
const struct gguf_kv *gguf_part_find(const struct gguf_part *part, const char *key);
int gguf_part_u32(const struct gguf_part *part, const char *key, uint32_t *out, char *err, size_t errlen);

__attribute__((format(printf, 4, 5))) int gguf_fail(char *err, size_t errlen, int rc, const char *fmt, ...);

#endif
