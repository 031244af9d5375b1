/* SPDX-License-Identifier: MIT */
/*
 * A session spoken by hand: what conform, capture and replay need and
 * libaprclient forbids, such as wrong entries and wrong ring words.
 *
 * Owns: socket, regions and ring of one session. Does not own: any rule; what
 * it is told to send it sends. One thread at a time.
 */
#ifndef APR_CTL_RAW_H
#define APR_CTL_RAW_H

#include "shm/region.h"
#include "shm/ring.h"
#include <apr/abi.h>
#include <stdbool.h>

struct raw {
	int sock, bell, req_fd, res_fd; /* -1 = none */
	struct apr_region req, res;
	struct apr_geometry g;
	struct apr_rc rc;
	struct apr_welcome w;
	uint32_t arena_at;    /* next free byte of the request arena */
	bool ring_always;
	struct apr_cqe cqe;   /* of raw_next */
	uint8_t *blob;        /* its blob's data, malloc'ed */
	uint32_t blob_len;
	unsigned blob_fmt;
	int notified;         /* NOTIFY frames seen by raw_frame */
	char why[256];        /* the daemon's words, or ours */
};

void raw_hello(struct apr_hello *h); /* a good one, all defaults */
int raw_dial(const char *path);     /* a connected socket or -errno */
/* Sends n bytes as one frame, with up to 3 descriptors. 0 or -errno. */
int raw_send(int sock, const void *frame, size_t n, const int *fds, unsigned n_fds);
/* The next frame within ms: its bytes, 0 = hang-up, -EAGAIN. Descriptors to fds[4] (-1 filled; NULL: closed). */
int raw_recv(int sock, void *buf, size_t cap, int *fds, int ms);

/* Dials, says hello (n bytes of it), maps. 0; -errno as the daemon refused (words in r->why). */
int raw_open_as(struct raw *r, const char *path, const void *hello, size_t n);
int raw_open(struct raw *r, const char *path, const struct apr_hello *h); /* h NULL: all defaults */
void raw_close(struct raw *r);

int raw_ask(struct raw *r, unsigned type, const void *body, size_t len); /* sends a frame */
/* The next frame that is not NOTIFY, MODEL_CHANGED (those are counted or dropped). As raw_recv. */
int raw_frame(struct raw *r, void *buf, size_t cap, int *fds, int ms);

/* Bytes into the request arena, 8-aligned; their offset. Starts over at its end. 0: longer than the arena. */
uint32_t raw_put(struct raw *r, const void *data, size_t len);
/* Writes the entry, publishes, rings where the daemon asks for it. False: the SQ is full. */
bool raw_push(struct raw *r, const struct apr_sqe *q);
bool raw_push_bytes(struct raw *r, const void *entry, size_t n); /* as far as a slot is long */
void raw_ring(struct raw *r);
/* The next entry into r->cqe and r->blob, marked seen. 0, -ETIMEDOUT, -EPIPE (DEAD or hang-up), -EPROTO (r->why). */
int raw_next(struct raw *r, int ms);
bool raw_dead(const struct raw *r);

#endif
