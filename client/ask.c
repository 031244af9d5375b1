/* SPDX-License-Identifier: MIT */
/* Owns: questions over the session's socket: models, vocabulary, status. Does not own: frames (frames.c). */
#include "client/handle.h"
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

/* As apr_ask, with a body that came in a descriptor read into memory. */
static int ask_bytes(struct apr *c, unsigned type, const void *send, size_t send_len, void **body, size_t *len)
{
	int fd = -1, state;

	*body = NULL;
	int e = apr_enter(c);
	if (e)
		return e;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	e = apr_ask(c, type, send, send_len, body, len, &fd, NULL, 0);
	if (!e && fd >= 0) {
		struct apr_region r;
		free(*body);
		*body = NULL;
		e = apr_bodyfd_map(&r, fd);
		if (!e) {
			char *copy = malloc(r.size + 1);
			if (copy) {
				if (r.size)
					memcpy(copy, r.base, r.size);
				copy[r.size] = '\0';
			} else {
				e = -ENOMEM;
			}
			*body = copy;
			*len = r.size;
			apr_region_unmap(&r);
		}
		close(fd);
	}
	if (e) {
		free(*body);
		*body = NULL;
	}
	pthread_setcancelstate(state, NULL);
	apr_leave(c, 0);
	return e;
}

int apr_get_models(struct apr *c, struct apr_model_row **rows, size_t *n)
{
	void *body = NULL;
	size_t len = 0;

	int e = ask_bytes(c, APR_FRAME_GET_MODELS, NULL, 0, &body, &len);
	if (e)
		return e;
	if (!body || len % sizeof(**rows)) {
		free(body);
		return -EPROTO;
	}
	*rows = body;
	*n = len / sizeof(**rows);
	for (size_t i = 0; i < *n; i++)
		(*rows)[i].name[sizeof((*rows)[i].name) - 1] = '\0';
	return 0;
}

int apr_find_model(struct apr *c, const char *name, uint32_t *id)
{
	struct apr_model_row *rows;
	size_t n;

	if (!name) {
		*id = 0;
		return apr_forked(c) ? -EOWNERDEAD : 0;
	}
	int e = apr_get_models(c, &rows, &n);
	if (e)
		return e;
	e = -ENOENT;
	for (size_t i = 0; i < n && e; i++)
		if (!strcmp(rows[i].name, name)) {
			*id = rows[i].id;
			e = 0;
		}
	free(rows);
	return e;
}

int apr_status(struct apr *c, char **json)
{
	void *body = NULL;
	size_t len = 0;

	int e = ask_bytes(c, APR_FRAME_STATUS, NULL, 0, &body, &len);
	if (!e)
		*json = body;
	return e;
}

/* ---- vocabulary --------------------------------------------------------------- */

struct apr_vocab {
	struct apr_region map;
	const struct apr_vocab_hdr *h;
	const uint32_t *offsets; /* n_vocab + 1 */
	const uint8_t *kinds, *bytes;
};

static bool inside(uint64_t off, uint64_t len, size_t size)
{
	return off >= sizeof(struct apr_vocab_hdr) && off + len <= size; /* both below 2^40 */
}

static int check_vocab(struct apr_vocab *v, uint32_t model)
{
	if (v->map.size < sizeof(*v->h))
		return -EPROTO;
	const struct apr_vocab_hdr *h = v->h = v->map.base;
	size_t size = v->map.size;
	if (h->magic != APR_VOCAB_MAGIC || (model && h->model != model) || h->offsets_off % 4 ||
	    !inside(h->offsets_off, ((uint64_t)h->n_vocab + 1) * 4, size) ||
	    !inside(h->kinds_off, h->n_vocab, size) || !inside(h->bytes_off, h->bytes_len, size))
		return -EPROTO;
	const uint8_t *base = v->map.base;
	v->offsets = (const void *)(base + h->offsets_off);
	v->kinds = base + h->kinds_off;
	v->bytes = base + h->bytes_off;
	for (uint32_t i = 0; i < h->n_vocab; i++)
		if (v->offsets[i] > v->offsets[i + 1])
			return -EPROTO;
	return v->offsets[h->n_vocab] <= h->bytes_len ? 0 : -EPROTO;
}

int apr_get_vocab(struct apr *c, uint32_t model, struct apr_vocab **out)
{
	void *body = NULL;
	size_t len;
	int fd = -1, state;

	int e = apr_enter(c);
	if (e)
		return e;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	e = apr_ask(c, APR_FRAME_GET_VOCAB, &model, sizeof(model), &body, &len, &fd, NULL, 0);
	free(body);
	struct apr_vocab *v = e ? NULL : calloc(1, sizeof(*v));
	if (!e && !v)
		e = -ENOMEM;
	if (!e)
		e = fd < 0 ? -EPROTO : apr_bodyfd_map(&v->map, fd);
	if (!e)
		e = check_vocab(v, model);
	if (fd >= 0)
		close(fd);
	if (e)
		apr_vocab_free(v);
	else
		*out = v;
	pthread_setcancelstate(state, NULL);
	return apr_leave(c, e);
}

void apr_vocab_free(struct apr_vocab *v)
{
	if (!v)
		return;
	v->map.fd = -1; /* closed already; the mapping alone is ours */
	apr_region_unmap(&v->map);
	free(v);
}

uint32_t apr_vocab_size(const struct apr_vocab *v)
{
	return v->h->n_vocab;
}

const char *apr_vocab_piece(const struct apr_vocab *v, uint32_t id, size_t *len, unsigned *kind)
{
	if (id >= v->h->n_vocab)
		return NULL;
	*len = v->offsets[id + 1] - v->offsets[id];
	if (kind)
		*kind = v->kinds[id];
	return (const char *)v->bytes + v->offsets[id];
}
