/* SPDX-License-Identifier: MIT */
/*
 * Files of the cache folder: panels, tables of algorithms.
 *
 * Owns: how such a file comes to be. Written aside, synced, renamed: a reader sees a
 * whole file or none. Does not own what is in it, nor how damage is noticed (the head
 * of each kind has hashes of its own).
 *
 * Inline, so that a module that calls none of the engine's symbols has it too. 0 or -errno.
 */
#ifndef APR_ENGINE_CACHE_FILE_H
#define APR_ENGINE_CACHE_FILE_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#define APR_CACHE_PIECE (UINT64_C(16) << 20) /* of one write */

/* -EIO: the file ends before len. */
static inline int apr_cache_read(int fd, void *data, uint64_t len)
{
	uint8_t *p = data;

	while (len) {
		ssize_t n = read(fd, p, len);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		p += n;
		len -= (uint64_t)n;
	}
	return 0;
}

static inline int apr_cache_put(int fd, const void *data, uint64_t len)
{
	const uint8_t *p = data;

	while (len) {
		ssize_t n = write(fd, p, len < APR_CACHE_PIECE ? len : APR_CACHE_PIECE);

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return n < 0 ? -errno : -EIO;
		p += n;
		len -= (uint64_t)n;
	}
	return 0;
}

/* The folders above path. */
static inline int apr_cache_folders(const char *path)
{
	char dir[4096];
	char *p;

	if ((size_t)snprintf(dir, sizeof dir, "%s", path) >= sizeof dir)
		return -ENAMETOOLONG;
	for (p = dir + 1; *p; p++) {
		if (*p != '/')
			continue;
		*p = 0;
		if (mkdir(dir, 0700) < 0 && errno != EEXIST)
			return -errno;
		*p = '/';
	}
	return 0;
}

/* A head and what follows it, in place of what stood there; the folder exists. */
static inline int apr_cache_write(const char *path, const void *head, uint64_t head_len, const void *data, uint64_t len)
{
	char tmp[4096];
	int fd, rc;

	if ((size_t)snprintf(tmp, sizeof tmp, "%s.%ld.new", path, (long)getpid()) >= sizeof tmp)
		return -ENAMETOOLONG;
	(void)unlink(tmp); /* of an earlier process of this number that died here */
	fd = open(tmp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
	if (fd < 0)
		return -errno;
	rc = apr_cache_put(fd, head, head_len);
	if (!rc)
		rc = apr_cache_put(fd, data, len);
	if (!rc && fsync(fd) < 0)
		rc = -errno;
	close(fd);
	if (!rc && rename(tmp, path) < 0)
		rc = -errno;
	if (rc)
		unlink(tmp);
	return rc;
}

#endif
