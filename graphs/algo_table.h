/* SPDX-License-Identifier: MIT */
/*
 * The table of algorithms: which one computes a product of some type, shape and
 * number of rows fastest, and how fast, as timed once on this machine.
 *
 * Owns: the entries, their file in the cache folder: a key that names GPU, driver,
 * library and module, the entries, a checksum. Knows no CUDA: an algorithm is 64
 * bytes that mean something to the library of the same key alone. Does not own how
 * an algorithm gets in (tune.c).
 */
#ifndef APR_GRAPHS_ALGO_TABLE_H
#define APR_GRAPHS_ALGO_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ALGO_KEY_BYTES 512u
#define ALGO_WORDS 8u
#define ALGO_MOST_ENTRIES 65536u

struct algo_entry {
	uint32_t type, n, k, rows;
	uint32_t ns;       /* of the one chosen */
	uint32_t first_ns; /* of the library's own first proposal; 0: not timed */
	uint32_t candidates, admitted; /* admitted: 0 = none has the reference's bits */
	uint64_t algo[ALGO_WORDS];
};
struct algo_table {
	char key[ALGO_KEY_BYTES];
	struct algo_entry *entry;
	uint32_t n, room;
	bool changed; /* since it was read or written */
};

/* t: zeros but for the key. 0: entries of the file at path; -ENOENT: there is none; other: why says what is wrong with
 * it, and t stays empty. -ENOMEM. */
int algo_table_read(struct algo_table *t, const char *path, char *why, size_t whylen);
/* Aside, synced, renamed: a reader sees a whole file or none. */
int algo_table_write(struct algo_table *t, const char *path);
const struct algo_entry *algo_table_find(const struct algo_table *t, uint32_t type, uint32_t n, uint32_t k,
                                         uint32_t rows);
int algo_table_put(struct algo_table *t, const struct algo_entry *e); /* replaces; -ENOMEM, -E2BIG */
void algo_table_free(struct algo_table *t);

#endif
