/* SPDX-License-Identifier: MIT */
/* One accepted socket: what conn.c and admin.c share. Io thread. */
#ifndef APRD_CONN_H
#define APRD_CONN_H

#include "daemon/worker.h"

/* no HELLO yet; no WELCOME yet; both; told that it is one too many, and open until it has sent something */
enum conn_state { CONN_SILENT, CONN_WAITING, CONN_LIVE, CONN_REFUSED };

struct conn {
	struct worker *w;
	struct conn *next, *prev;
	uint64_t id, watch, process; /* watches of the socket and of the pidfd */
	int fd, pidfd;
	pid_t pid;
	uid_t uid;
	bool admin, unread; /* unread: WELCOME is sent, READY has not come */
	enum conn_state state;
	enum apr_reason reason; /* why it ends */
	uint64_t since;         /* ns: accepted, HELLO, or WELCOME sent */
	struct identity *who; /* NULL on the admin socket */
	struct session *session;
	struct apr_hello hello;
};

int conn_send(struct conn *k, const void *frame, size_t n, const int *fds, unsigned n_fds);
int conn_reply(struct conn *k, uint16_t type, int err, const void *body, size_t n);
void conn_end(struct worker *w, struct conn *k);

#endif
