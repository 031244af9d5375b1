/* SPDX-License-Identifier: MIT */
/* The table of algorithms and its file: see algo_table.h. */
#include "graphs/algo_table.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/cache_file.h"
#include "engine/hash.h"

#define MAGIC UINT64_C(0x31474c4152505041) /* "APPRALG1", little-endian as this machine is */
#define HASH_SEED UINT64_C(0x616c676f7461626c)

struct file_head {
	uint64_t magic;
	uint32_t n, entry_bytes;
	char key[ALGO_KEY_BYTES];
	uint64_t payload; /* hash of the entries */
	uint64_t self;    /* hash of the head before this word */
};

static uint64_t head_hash(const struct file_head *h)
{
	return apr_hash_bytes(HASH_SEED, h, offsetof(struct file_head, self));
}

static int find(const struct algo_table *t, uint32_t type, uint32_t n, uint32_t k, uint32_t rows)
{
	uint32_t i;

	for (i = 0; i < t->n; i++) {
		const struct algo_entry *e = &t->entry[i];

		if (e->type == type && e->n == n && e->k == k && e->rows == rows)
			return (int)i;
	}
	return -1;
}

const struct algo_entry *algo_table_find(const struct algo_table *t, uint32_t type, uint32_t n, uint32_t k,
                                         uint32_t rows)
{
	int i = find(t, type, n, k, rows);

	return i < 0 ? NULL : &t->entry[i];
}

int algo_table_put(struct algo_table *t, const struct algo_entry *e)
{
	int i = find(t, e->type, e->n, e->k, e->rows);

	if (i >= 0) {
		t->entry[i] = *e;
		t->changed = true;
		return 0;
	}
	if (t->n == ALGO_MOST_ENTRIES)
		return -E2BIG;
	if (t->n == t->room) {
		uint32_t room = t->room ? 2 * t->room : 64;
		struct algo_entry *grown = realloc(t->entry, room * sizeof *grown);

		if (!grown)
			return -ENOMEM;
		t->entry = grown;
		t->room = room;
	}
	t->entry[t->n++] = *e;
	t->changed = true;
	return 0;
}

void algo_table_free(struct algo_table *t)
{
	free(t->entry);
	t->entry = NULL;
	t->n = t->room = 0;
}

/* ---- the file ------------------------------------------------------------------------ */

/* NULL, or what is wrong with a head of a file of len bytes. */
static const char *fault_of(const struct file_head *h, const char *key, uint64_t len)
{
	if (h->magic != MAGIC || h->self != head_hash(h))
		return "damaged head";
	if (h->entry_bytes != sizeof(struct algo_entry) || h->n > ALGO_MOST_ENTRIES)
		return "of another layout";
	if (strncmp(h->key, key, ALGO_KEY_BYTES) != 0)
		return "stale: of another GPU, driver, library or build";
	if (len != sizeof *h + (uint64_t)h->n * sizeof(struct algo_entry))
		return "cut short or too long";
	return NULL;
}

/* The entries after a good head. NULL, or what is wrong. */
static const char *take_entries(struct algo_table *t, int fd, const struct file_head *h)
{
	size_t bytes = h->n * sizeof *t->entry;
	struct algo_entry *e = malloc(bytes ? bytes : 1);
	const char *fault = NULL;

	if (!e)
		return "out of memory for it";
	if (apr_cache_read(fd, e, bytes))
		fault = "not readable";
	else if (apr_hash_bytes(HASH_SEED, e, bytes) != h->payload)
		fault = "damaged";
	if (fault) {
		free(e);
		return fault;
	}
	t->entry = e;
	t->n = t->room = h->n;
	return NULL;
}

int algo_table_read(struct algo_table *t, const char *path, char *why, size_t whylen)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK), rc = -errno; /* a FIFO is not waited for */
	const char *fault = "not a regular file, or shorter than its head";
	struct file_head h;
	struct stat st;

	t->changed = false;
	if (fd < 0) {
		snprintf(why, whylen, "%s", strerror(-rc));
		return rc;
	}
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size >= (off_t)sizeof h && apr_cache_read(fd, &h, sizeof h) == 0)
		fault = fault_of(&h, t->key, (uint64_t)st.st_size);
	if (!fault)
		fault = take_entries(t, fd, &h);
	close(fd);
	if (!fault)
		return 0;
	snprintf(why, whylen, "%s", fault);
	return -EINVAL;
}

int algo_table_write(struct algo_table *t, const char *path)
{
	struct file_head h = {.magic = MAGIC, .n = t->n, .entry_bytes = sizeof *t->entry};
	size_t bytes = t->n * sizeof *t->entry;
	int rc = apr_cache_folders(path);

	if (rc)
		return rc;
	memcpy(h.key, t->key, sizeof h.key);
	h.payload = apr_hash_bytes(HASH_SEED, t->entry, bytes);
	h.self = head_hash(&h);
	rc = apr_cache_write(path, &h, sizeof h, t->entry, bytes);
	if (!rc)
		t->changed = false;
	return rc;
}
