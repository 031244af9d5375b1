/* SPDX-License-Identifier: MIT */
/*
 * The paths that clients connect to: who may own one, and how it is made and removed.
 *
 * Owns: the default path, the lock beside it, binding, unlinking. Does not own what
 * comes in. For the supervisor's one thread.
 */
#ifndef APRD_SOCKETS_H
#define APRD_SOCKETS_H

#include "daemon/options.h"
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct listener {
	int fd;
	int lock; /* of PATH.lock; -1 for the admin socket, which lives under the first one's */
	bool admin;
	char path[108];
	char tenant[32];
	dev_t dev; /* what we bound, so that we unlink nothing else */
	ino_t ino;
};

/* -s, else APRD_SOCKET, else the place where aprd makes its own. 0 or -errno with one line in err. */
int sockets_default(const struct options *o, char *path, size_t n, char *err, size_t errlen);
/* admin.sock for aprd.sock, NAME.admin for another NAME. -ENAMETOOLONG. */
int sockets_admin_path(const char *path, char *out, size_t n);

/* Listening sockets that the environment's LISTEN_FDS (sd_listen_fds) hands over; the environment is cleared. */
enum { PASSED_MAX = 32 };
struct passed {
	int fd;
	char path[108];
};
/* How many; -errno with a line in err: one is no listening SOCK_SEQPACKET socket with a path. */
int sockets_passed(struct passed *p, char *err, size_t errlen);
/* Serves on one of them, with its path's lock; mode and group are whoever made it. */
int sockets_adopt(struct listener *l, struct passed *p, bool admin, char *err, size_t errlen);

/* Locks PATH.lock, takes away a dead daemon's socket, binds, listens. -EADDRINUSE another daemon has it;
 * -EEXIST something that is no socket stands there. */
int sockets_open(struct listener *l, const char *path, gid_t group, mode_t mode, char *err, size_t errlen);
/* The admin socket, beside and under the lock of `first`. */
int sockets_open_admin(struct listener *l, const struct listener *first, char *err, size_t errlen);
/* Closes; unlinks the socket where it is still ours and the lock is held. The lock file stays. */
void sockets_close(struct listener *l);

#endif
