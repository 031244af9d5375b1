/* SPDX-License-Identifier: MIT */
/* Owns: the table of served models and vocabulary regions. See models.h. */
#include "daemon/models.h"
#include "daemon/chat.h"
#include "shm/region.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int models_init(struct models *m)
{
	memset(m, 0, sizeof(*m));
	m->next_id = 1;
	return -pthread_mutex_init(&m->lock, NULL);
}

void models_fini(struct models *m)
{
	while (m->n_rows)
		served_unload(m, m->rows[--m->n_rows]);
	pthread_mutex_destroy(&m->lock);
}

/* ---- the vocabulary region --------------------------------------------------------- */

struct vocab {
	const struct apr_tokenizer *t;
	uint32_t model, n;
	uint64_t bytes;
};

static void vocab_fill(void *arg, void *base)
{
	struct vocab *v = arg;
	uint32_t kinds = (uint32_t)(sizeof(struct apr_vocab_hdr) + ((uint64_t)v->n + 1) * 4), at = 0;
	uint32_t bytes = kinds + v->n;
	struct apr_vocab_hdr h = { APR_VOCAB_MAGIC, v->model, v->n, sizeof(h), kinds, bytes, (uint32_t)v->bytes };
	uint8_t *p = base;

	memcpy(p, &h, sizeof(h));
	for (uint32_t i = 0; i < v->n; i++) {
		size_t len = 0;
		const char *piece = apr_piece(v->t, i, true, &len);
		memcpy(p + sizeof(h) + (size_t)i * 4, &at, 4);
		p[kinds + i] = (uint8_t)apr_tokenizer_kind(v->t, i);
		if (len)
			memcpy(p + bytes + at, piece, len);
		at += (uint32_t)len;
	}
	memcpy(p + sizeof(h) + (size_t)v->n * 4, &at, 4);
}

static int vocab_make(struct served *s)
{
	struct vocab v = { apr_loaded_tokenizer(s->loaded), s->id, 0, 0 };

	v.n = apr_tokenizer_size(v.t);
	for (uint32_t i = 0; i < v.n; i++) {
		size_t len = 0;
		if (apr_piece(v.t, i, true, &len))
			v.bytes += len;
	}
	uint64_t size = sizeof(struct apr_vocab_hdr) + ((uint64_t)v.n + 1) * 4 + v.n + v.bytes;
	if (size > UINT32_MAX)
		return -E2BIG;
	s->vocab_fd = apr_bodyfd_create("aprd-vocab", NULL, size, vocab_fill, &v);
	s->vocab_bytes = size;
	return s->vocab_fd < 0 ? s->vocab_fd : 0;
}

/* ---- loading ------------------------------------------------------------------------- */

static void served_free(struct served *s)
{
	if (s->vocab_fd >= 0)
		close(s->vocab_fd);
	batch_fini(&s->batch);
	chat_free(s->chat);
	free(s->path);
	free(s);
}

int served_load(struct models *m, const char *name, const char *path, const struct load_watch *watch, struct served **out,
		char *err, size_t errlen)
{
	struct served *s = calloc(1, sizeof(*s));

	if (!s)
		return -ENOMEM;
	s->vocab_fd = -1;
	s->path = strdup(path);
	snprintf(s->name, sizeof(s->name), "%s", name);
	/* the number is in the vocabulary's header, so it is drawn before there is a row */
	s->id = __atomic_fetch_add(&m->next_id, 1, __ATOMIC_RELAXED);
	int e = s->path ? 0 : -ENOMEM;
	if (!e)
		e = apr_engine_load(m->engine, s->name, path, watch->progress, watch->arg, &s->loaded, err, errlen);
	if (!e) {
		apr_loaded_info(s->loaded, &s->info);
		e = vocab_make(s);
		if (!e)
			e = chat_new(&s->chat, s->loaded);
		if (e) {
			snprintf(err, errlen, "%s: no memory for the vocabulary region or the chat template", path);
			apr_engine_unload(m->engine, s->loaded);
		}
	}
	if (e) {
		served_free(s);
		return e;
	}
	*out = s;
	return 0;
}

int served_unload(struct models *m, struct served *s)
{
	int e = apr_engine_unload(m->engine, s->loaded);

	if (!e)
		served_free(s);
	return e;
}

/* ---- the table ------------------------------------------------------------------------ */

int models_add(struct models *m, struct served *s)
{
	int e = 0;

	pthread_mutex_lock(&m->lock);
	if (models_named(m, s->name))
		e = -EEXIST;
	else if (m->n_rows == MODELS_MAX)
		e = -ENOSPC;
	else
		m->rows[m->n_rows++] = s;
	m->gen += !e;
	pthread_mutex_unlock(&m->lock);
	return e;
}

void models_remove(struct models *m, struct served *s)
{
	pthread_mutex_lock(&m->lock);
	for (uint32_t i = 0; i < m->n_rows; i++) {
		if (m->rows[i] == s) {
			memmove(&m->rows[i], &m->rows[i + 1], (m->n_rows - i - 1) * sizeof(struct served *));
			m->n_rows--;
			m->gen++;
			break;
		}
	}
	pthread_mutex_unlock(&m->lock);
}

struct served *models_find(const struct models *m, uint32_t id)
{
	for (uint32_t i = 0; i < m->n_rows; i++)
		if (id ? m->rows[i]->id == id : !m->rows[i]->leaving)
			return m->rows[i];
	return NULL;
}

struct served *models_named(const struct models *m, const char *name)
{
	for (uint32_t i = 0; i < m->n_rows; i++)
		if (!strcmp(m->rows[i]->name, name))
			return m->rows[i];
	return NULL;
}

uint32_t models_rows(struct models *m, struct apr_model_row *rows, uint32_t max)
{
	uint32_t n = 0;

	pthread_mutex_lock(&m->lock);
	for (uint32_t i = 0; i < m->n_rows && n < max; i++) {
		const struct served *s = m->rows[i];
		struct apr_model_row *r = &rows[n++];
		memset(r, 0, sizeof(*r));
		r->id = s->id;
		r->flags = n == 1;
		r->n_ctx = s->info.n_ctx;
		r->n_vocab = s->info.n_vocab;
		memcpy(r->weights_hash, apr_loaded_model(s->loaded)->weights_hash, sizeof(r->weights_hash));
		memcpy(r->receipt, s->info.numerics, sizeof(r->receipt));
		memcpy(r->name, s->name, sizeof(r->name)); /* both 64, terminated */
	}
	pthread_mutex_unlock(&m->lock);
	return n;
}

int models_vocab(struct models *m, uint32_t id)
{
	int fd = -ENOENT;

	pthread_mutex_lock(&m->lock);
	struct served *s = models_find(m, id);
	if (s) {
		fd = fcntl(s->vocab_fd, F_DUPFD_CLOEXEC, 3);
		if (fd < 0)
			fd = -errno;
	}
	pthread_mutex_unlock(&m->lock);
	return fd;
}
