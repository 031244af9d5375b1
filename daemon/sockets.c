/* SPDX-License-Identifier: MIT */
/* Owns: listening sockets on paths. See sockets.h. */
#include "daemon/sockets.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83 /* Linux 6.16 */
#endif

enum { BACKLOG = 1024 };

static int fault(int e, char *err, size_t errlen, const char *path, const char *what)
{
	snprintf(err, errlen, "%s: %s", path, what);
	return e;
}

static int make_folder(const char *path, mode_t mode, char *err, size_t errlen)
{
	if (mkdir(path, mode) && errno != EEXIST)
		return fault(-errno, err, errlen, path, strerror(errno));
	return 0;
}

int sockets_default(const struct options *o, char *path, size_t n, char *err, size_t errlen)
{
	const char *given = o->socket ? o->socket : o->n_listeners ? o->listeners[0].path : getenv("APRD_SOCKET");
	const char *folder = getenv("RUNTIME_DIRECTORY"), *run = getenv("XDG_RUNTIME_DIR");
	char made[96];
	int len;

	if (given && *given) {
		len = snprintf(path, n, "%s", given);
	} else if (geteuid() == 0 || (folder && *folder)) {
		/* systemd makes RuntimeDirectory= and names it; several are parted by colons */
		int part = folder && *folder ? (int)strcspn(folder, ":") : 0;
		if (!part)
			folder = "/run/aprd", part = 9;
		len = snprintf(path, n, "%.*s/aprd.sock", part, folder);
		snprintf(made, sizeof(made), "%.*s", part, folder);
		int e = make_folder(made, 0755, err, errlen);
		if (e)
			return e;
	} else if (run && *run) {
		len = snprintf(path, n, "%s/aprd/aprd.sock", run);
		if (snprintf(made, sizeof(made), "%s/aprd", run) >= (int)sizeof(made))
			return fault(-ENAMETOOLONG, err, errlen, run, "too long for a socket's path");
		int e = make_folder(made, 0700, err, errlen);
		if (e)
			return e;
	} else {
		return fault(-ENOENT, err, errlen, "no socket", "XDG_RUNTIME_DIR is not set: name one with -s");
	}
	if (len < 0 || (size_t)len >= n)
		return fault(-ENAMETOOLONG, err, errlen, given ? given : "socket", "too long for a socket's path");
	return 0;
}

int sockets_admin_path(const char *path, char *out, size_t n)
{
	const char *slash = strrchr(path, '/');
	int dir = slash ? (int)(slash + 1 - path) : 0, len;

	if (!strcmp(path + dir, "aprd.sock"))
		len = snprintf(out, n, "%.*sadmin.sock", dir, path);
	else
		len = snprintf(out, n, "%s.admin", path);
	return len < 0 || (size_t)len >= n ? -ENAMETOOLONG : 0;
}

/* 1: a socket stands at the path; 0: nothing does. */
static int look_at(const char *path, char *err, size_t errlen)
{
	struct stat st;

	if (lstat(path, &st))
		return errno == ENOENT ? 0 : fault(-errno, err, errlen, path, strerror(errno));
	if (!S_ISSOCK(st.st_mode))
		return fault(-EEXIST, err, errlen, path, "something that is not a socket is there; it is left alone");
	return 1;
}

/* With the lock held: whatever stands at the path goes, if it is a socket. */
static int clear_path(const char *path, char *err, size_t errlen)
{
	int there = look_at(path, err, errlen);

	if (there <= 0)
		return there;
	if (unlink(path))
		return fault(-errno, err, errlen, path, strerror(errno));
	return 0;
}

static int bind_at(struct listener *l, gid_t group, mode_t mode, char *err, size_t errlen)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	struct stat st;
	int off = 0;

	memcpy(a.sun_path, l->path, strlen(l->path) + 1);
	l->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (l->fd < 0)
		return fault(-errno, err, errlen, l->path, strerror(errno));
	/* accepted sockets take it over: no descriptor of a client's ever gets in. ENOPROTOOPT before Linux 6.16 */
	(void)setsockopt(l->fd, SOL_SOCKET, SO_PASSRIGHTS, &off, sizeof(off));
	mode_t old = umask(0177); /* nobody gets in between bind and chmod */
	int r = bind(l->fd, (struct sockaddr *)&a, sizeof(a));
	int e = errno;
	umask(old);
	if (r)
		return fault(-e, err, errlen, l->path, strerror(e));
	if (lstat(l->path, &st))
		return fault(-errno, err, errlen, l->path, strerror(errno));
	l->dev = st.st_dev;
	l->ino = st.st_ino;
	if (group != (gid_t)-1 && lchown(l->path, (uid_t)-1, group))
		return fault(-errno, err, errlen, l->path, "cannot give it to its group");
	if (chmod(l->path, mode) || listen(l->fd, BACKLOG))
		return fault(-errno, err, errlen, l->path, strerror(errno));
	return 0;
}

/* The lock could not be made: the user gave the folder's name, not the lock's. */
static int no_lock(int e, const char *path, const char *name, char *err, size_t errlen)
{
	const char *slash = strrchr(path, '/');
	char folder[128];
	struct stat st;

	if (!lstat(name, &st)) /* it is there, and will not open */
		return fault(-e, err, errlen, name, strerror(e));
	snprintf(folder, sizeof(folder), "%.*s", slash > path ? (int)(slash - path) : 1, slash ? path : ".");
	return fault(-e, err, errlen, folder, e == ENOENT ? "no such folder for the socket" : strerror(e));
}

static int lock_beside(const char *path, int *fd, char *err, size_t errlen)
{
	char name[128];

	snprintf(name, sizeof(name), "%s.lock", path);
	*fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (*fd < 0)
		return no_lock(errno, path, name, err, errlen);
	if (flock(*fd, LOCK_EX | LOCK_NB)) {
		int e = errno;
		close(*fd);
		*fd = -1;
		if (e == EWOULDBLOCK)
			return fault(-EADDRINUSE, err, errlen, path, "another aprd serves it");
		return fault(-e, err, errlen, name, strerror(e));
	}
	return 0;
}

int sockets_open(struct listener *l, const char *path, gid_t group, mode_t mode, char *err, size_t errlen)
{
	memset(l, 0, sizeof(*l));
	l->fd = l->lock = -1;
	if (strlen(path) + sizeof(".admin") > sizeof(l->path))
		return fault(-ENAMETOOLONG, err, errlen, path, "too long for a socket's path");
	memcpy(l->path, path, strlen(path) + 1);
	int e = look_at(path, err, errlen); /* before the lock, which would stay beside somebody's file */
	if (e >= 0)
		e = lock_beside(path, &l->lock, err, errlen);
	if (!e)
		e = clear_path(path, err, errlen);
	if (!e)
		e = bind_at(l, group, mode, err, errlen);
	if (e)
		sockets_close(l);
	return e;
}

int sockets_open_admin(struct listener *l, const struct listener *first, char *err, size_t errlen)
{
	memset(l, 0, sizeof(*l));
	l->fd = l->lock = -1;
	l->admin = true;
	int e = sockets_admin_path(first->path, l->path, sizeof(l->path));
	if (e)
		return fault(e, err, errlen, first->path, "too long for an admin socket beside it");
	e = clear_path(l->path, err, errlen);
	if (!e)
		e = bind_at(l, (gid_t)-1, 0600, err, errlen);
	if (e)
		sockets_close(l);
	return e;
}

void sockets_close(struct listener *l)
{
	struct stat st;

	if (l->ino && !lstat(l->path, &st) && S_ISSOCK(st.st_mode) && st.st_dev == l->dev && st.st_ino == l->ino)
		unlink(l->path);
	if (l->fd >= 0)
		close(l->fd);
	if (l->lock >= 0)
		close(l->lock); /* gives the lock back; the file stays for whoever comes next */
	memset(l, 0, sizeof(*l));
	l->fd = l->lock = -1;
}

/* ---- handed over --------------------------------------------------------------- */

static int look_at_passed(struct passed *p, char *err, size_t errlen)
{
	struct sockaddr_un a;
	socklen_t len = sizeof(a), n = sizeof(int);
	int type = 0, listening = 0;

	memset(&a, 0, sizeof(a));
	if (getsockname(p->fd, (struct sockaddr *)&a, &len) || a.sun_family != AF_UNIX ||
	    getsockopt(p->fd, SOL_SOCKET, SO_TYPE, &type, &n) || type != SOCK_SEQPACKET ||
	    getsockopt(p->fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &n) || !listening || a.sun_path[0] != '/') {
		snprintf(err, errlen, "LISTEN_FDS: descriptor %d is no listening AF_UNIX socket of type SOCK_SEQPACKET with a path "
			 "(ListenSequentialPacket=)", p->fd);
		return -EINVAL;
	}
	snprintf(p->path, sizeof(p->path), "%.*s", (int)sizeof(a.sun_path) - 1, a.sun_path);
	if (fcntl(p->fd, F_SETFD, FD_CLOEXEC) || fcntl(p->fd, F_SETFL, O_NONBLOCK))
		return fault(-errno, err, errlen, p->path, strerror(errno));
	return 0;
}

int sockets_passed(struct passed *p, char *err, size_t errlen)
{
	const char *pid = getenv("LISTEN_PID"), *count = getenv("LISTEN_FDS");
	long n = count ? strtol(count, NULL, 10) : 0;
	int e = 0;

	if (!pid || strtol(pid, NULL, 10) != (long)getpid())
		n = 0; /* another process's */
	unsetenv("LISTEN_PID");
	unsetenv("LISTEN_FDS");
	unsetenv("LISTEN_FDNAMES");
	if (n < 0 || n > PASSED_MAX)
		return fault(-EINVAL, err, errlen, "LISTEN_FDS", "not a number of descriptors from 0 to 32");
	for (int i = 0; i < n && !e; i++) {
		p[i].fd = 3 + i; /* SD_LISTEN_FDS_START */
		e = look_at_passed(&p[i], err, errlen);
	}
	return e ? e : (int)n;
}

/* The path's mode is all that keeps others from the admin socket. */
static int private_path(const char *path, char *err, size_t errlen)
{
	struct stat st;

	if (lstat(path, &st))
		return fault(-errno, err, errlen, path, strerror(errno));
	if (st.st_mode & 0077)
		return fault(-EPERM, err, errlen, path, "an admin socket that is handed over must be of mode 0600 (SocketMode=)");
	return 0;
}

int sockets_adopt(struct listener *l, struct passed *p, bool admin, char *err, size_t errlen)
{
	int off = 0;

	memset(l, 0, sizeof(*l)); /* no ino: whoever made the path takes it away */
	l->lock = -1;
	l->admin = admin;
	memcpy(l->path, p->path, sizeof(l->path));
	l->fd = p->fd;
	p->fd = -1;
	(void)setsockopt(l->fd, SOL_SOCKET, SO_PASSRIGHTS, &off, sizeof(off)); /* as in bind_at */
	int e = admin ? private_path(l->path, err, errlen) : lock_beside(l->path, &l->lock, err, errlen);
	if (e)
		sockets_close(l);
	return e;
}
