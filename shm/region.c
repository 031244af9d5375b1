/* SPDX-License-Identifier: MIT */
/* Owns: making, sealing, checking and mapping regions. See region.h. Does not own: their contents. */
#include "shm/region.h"
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

/* newer than some libc headers */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

enum { PAGE = 4096, LINE = 128, ENTRY = 64, ENTRY_MAX = 256, SQ_MIN = 2, CQ_MIN = 8, ARENA_MIN = 4096 };
#define SEALS_REQ (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define SEALS_RES (SEALS_REQ | F_SEAL_FUTURE_WRITE)
#define SEALS_BODY (SEALS_REQ | F_SEAL_WRITE)

static int refuse(int err, const char **why, const char *text)
{
	if (why)
		*why = text;
	return err;
}

static uint64_t round_up(uint64_t v, uint64_t to)
{
	return (v + to - 1) / to * to;
}

static uint32_t pow2_up(uint32_t v) /* v <= 2^31 */
{
	uint32_t p = 1;
	while (p < v)
		p <<= 1;
	return p;
}

static bool is_pow2(uint32_t v)
{
	return v && !(v & (v - 1));
}

static uint32_t stride(uint16_t wish) /* 0 = impossible */
{
	uint32_t s = wish ? wish : ENTRY;
	return s % ENTRY || s > ENTRY_MAX ? 0 : s;
}

/* One region: header, ring, arena. want 0 = a default that has room for the default's arena. */
static int plan_region(uint64_t ring, uint32_t want, uint32_t limit, uint32_t *size, uint32_t *arena, uint32_t *len)
{
	uint64_t off = round_up(APR_REGION_HDR + ring, LINE);
	uint64_t bytes = want;

	if (!want) {
		bytes = APR_REGION_DEFAULT;
		if (off + APR_REGION_DEFAULT / 2 > bytes)
			bytes = off + APR_REGION_DEFAULT / 2;
	}
	bytes = round_up(bytes, PAGE);
	if (bytes < off + ARENA_MIN)
		return -EINVAL;
	if (bytes > limit)
		return -EDQUOT;
	*size = (uint32_t)bytes;
	*arena = (uint32_t)off;
	*len = (uint32_t)(bytes - off);
	return 0;
}

int apr_geometry_plan(const struct apr_wish *wish, const struct apr_limits *limits, struct apr_geometry *g,
		      const char **why)
{
	static const struct apr_limits widest = { APR_SQ_MAX, APR_CQ_MAX, APR_REGION_MAX, APR_REGION_MAX, 0 };
	const struct apr_limits *l = limits ? limits : &widest;

	memset(g, 0, sizeof(*g));
	g->sqe_size = stride(wish->sqe_size);
	g->cqe_size = stride(wish->cqe_size);
	if (!g->sqe_size || !g->cqe_size)
		return refuse(-EINVAL, why, "sqe_size and cqe_size must be 64, 128, 192 or 256");
	if (wish->sq_entries > APR_SQ_MAX)
		return refuse(-EINVAL, why, "sq_entries above the protocol's maximum");
	if (wish->cq_entries > APR_CQ_MAX)
		return refuse(-EINVAL, why, "cq_entries above the protocol's maximum");
	if (wish->req_size > APR_REGION_MAX || wish->res_size > APR_REGION_MAX)
		return refuse(-EINVAL, why, "req_size or res_size above the protocol's maximum");

	g->sq_entries = pow2_up(wish->sq_entries ? wish->sq_entries : APR_SQ_DEFAULT);
	g->cq_entries = pow2_up(wish->cq_entries ? wish->cq_entries : APR_CQ_DEFAULT);
	if (g->sq_entries < SQ_MIN)
		g->sq_entries = SQ_MIN;
	if (g->cq_entries < CQ_MIN)
		g->cq_entries = CQ_MIN;
	if (g->sq_entries > l->sq_entries)
		return refuse(-EDQUOT, why, "sq_entries above what this user may have");
	if (g->cq_entries > l->cq_entries)
		return refuse(-EDQUOT, why, "cq_entries above what this user may have");

	g->sq_off = g->cq_off = APR_REGION_HDR;
	int e = plan_region((uint64_t)g->sq_entries * g->sqe_size, wish->req_size, l->req_size, &g->req_size,
			    &g->req_arena_off, &g->req_arena_len);
	if (e)
		return refuse(e, why, e == -EINVAL ? "req_size has no room for header, queue and 4 KiB of arena"
						   : "req_size above what this user may have");
	e = plan_region((uint64_t)g->cq_entries * g->cqe_size, wish->res_size, l->res_size, &g->res_size,
			&g->res_arena_off, &g->res_arena_len);
	if (e)
		return refuse(e, why, e == -EINVAL ? "res_size has no room for header, queue and 4 KiB of arena"
						   : "res_size above what this user may have");

	g->max_inflight = g->cq_entries / 2;
	if (l->max_inflight && l->max_inflight < g->max_inflight)
		g->max_inflight = l->max_inflight;
	g->max_input = g->req_arena_len;
	/* a quarter of the arena, so that one long result never waits for an arena all its own */
	g->max_blob = g->res_arena_len / 4 / 8 * 8 - (uint32_t)sizeof(struct apr_blob);
	return 0;
}

/* Does [off, off + n * each) lie in [hdr, size)? */
static bool fits(uint64_t off, uint64_t n, uint64_t each, uint64_t hdr, uint64_t size)
{
	return off >= hdr && off <= size && n * each <= size - off;
}

int apr_geometry_read(const struct apr_res_hdr *h, uint32_t req_size, uint32_t res_size, struct apr_geometry *g,
		      const char **why)
{
	if (h->magic != APR_REGION_MAGIC)
		return refuse(-EPROTO, why, "the result region has no magic number");
	if (h->major != APR_ABI_MAJOR)
		return refuse(-EPROTONOSUPPORT, why, "the result region is of another major version");
	if (h->hdr_len < APR_REGION_HDR || h->hdr_len > res_size || h->hdr_len > req_size)
		return refuse(-EPROTO, why, "hdr_len out of range");
	memset(g, 0, sizeof(*g));
	g->req_size = req_size;
	g->res_size = res_size;
	g->sq_entries = h->sq_entries;
	g->sqe_size = h->sqe_size;
	g->sq_off = h->sq_off;
	g->cq_entries = h->cq_entries;
	g->cqe_size = h->cqe_size;
	g->cq_off = h->cq_off;
	g->req_arena_off = h->req_arena_off;
	g->req_arena_len = h->req_arena_len;
	g->res_arena_off = h->res_arena_off;
	g->res_arena_len = h->res_arena_len;
	g->max_inflight = h->max_inflight;
	if (!is_pow2(g->sq_entries) || g->sq_entries > APR_SQ_MAX || !is_pow2(g->cq_entries) ||
	    g->cq_entries > APR_CQ_MAX)
		return refuse(-EPROTO, why, "a queue's entry count is no power of two in range");
	if (g->sqe_size < ENTRY || g->sqe_size % 8 || g->sqe_size > PAGE || g->cqe_size < ENTRY || g->cqe_size % 8 ||
	    g->cqe_size > PAGE)
		return refuse(-EPROTO, why, "an entry stride is out of range");
	if (g->sq_off % 8 || g->cq_off % 8 || g->req_arena_off % 8 || g->res_arena_off % 8)
		return refuse(-EPROTO, why, "an offset is not 8-aligned");
	if (!fits(g->sq_off, g->sq_entries, g->sqe_size, h->hdr_len, req_size) ||
	    !fits(g->cq_off, g->cq_entries, g->cqe_size, h->hdr_len, res_size) ||
	    !fits(g->req_arena_off, 1, g->req_arena_len, h->hdr_len, req_size) ||
	    !fits(g->res_arena_off, 1, g->res_arena_len, h->hdr_len, res_size))
		return refuse(-EPROTO, why, "a queue or arena lies outside its region");
	if (!g->max_inflight || g->max_inflight > g->cq_entries / 2)
		return refuse(-EPROTO, why, "max_inflight out of range");
	g->max_input = g->req_arena_len;
	return 0;
}

static int memfd(const char *name)
{
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL) /* before Linux 6.3 */
		fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	return fd < 0 ? -errno : fd;
}

/* fallocate, not ftruncate: on a full tmpfs the lack must show here and not at a first touch. */
static int allocate(int fd, size_t size)
{
	if (fchmod(fd, 0600))
		return -errno;
	int r;
	do
		r = fallocate(fd, 0, 0, (off_t)size);
	while (r && errno == EINTR);
	return r ? -errno : 0;
}

/* Maps a memfd that this process has just made. A function of its own for tests/tsan.supp to name. */
static void *map_new(int fd, size_t size, int prot)
{
	return mmap(NULL, size, prot, MAP_SHARED, fd, 0);
}

static void write_constants(struct apr_res_hdr *h, const struct apr_geometry *g, uint64_t epoch, uint64_t session)
{
	h->magic = APR_REGION_MAGIC;
	h->major = APR_ABI_MAJOR;
	h->minor = APR_ABI_MINOR;
	h->hdr_len = APR_REGION_HDR;
	h->epoch = epoch;
	h->session = session;
	h->sq_entries = g->sq_entries;
	h->sqe_size = g->sqe_size;
	h->sq_off = g->sq_off;
	h->cq_entries = g->cq_entries;
	h->cqe_size = g->cqe_size;
	h->cq_off = g->cq_off;
	h->req_arena_off = g->req_arena_off;
	h->req_arena_len = g->req_arena_len;
	h->res_arena_off = g->res_arena_off;
	h->res_arena_len = g->res_arena_len;
	h->max_inflight = g->max_inflight;
}

int apr_region_create(struct apr_region *r, enum apr_fd_kind kind, const struct apr_geometry *g, uint64_t epoch,
		      uint64_t session)
{
	bool result = kind == APR_FD_RES;
	size_t size = result ? g->res_size : g->req_size;

	*r = (struct apr_region)APR_REGION_INIT;
	if ((kind != APR_FD_REQ && !result) || !size)
		return -EINVAL;
	int fd = memfd(result ? "aprd-result" : "aprd-request");
	if (fd < 0)
		return fd;
	r->fd = fd;
	r->size = size;
	int e = allocate(fd, size);
	if (e)
		goto fail;
	/* FUTURE_WRITE forbids every later writable map, so the daemon's own comes first */
	void *base = map_new(fd, size, result ? PROT_READ | PROT_WRITE : PROT_READ);
	if (base == MAP_FAILED) {
		e = -errno;
		goto fail;
	}
	r->base = base;
	if (result)
		write_constants(base, g, epoch, session);
	if (fcntl(fd, F_ADD_SEALS, result ? SEALS_RES : SEALS_REQ)) {
		e = -errno;
		goto fail;
	}
	return 0;
fail:
	apr_region_unmap(r);
	return e;
}

static int check_sealed(int fd, int seals)
{
	int have = fcntl(fd, F_GET_SEALS);
	if (have < 0)
		return errno == EBADF ? -EBADF : -EPROTO; /* EINVAL: no memfd at all */
	return (have & seals) == seals ? 0 : -EPROTO;
}

int apr_region_check(int fd, enum apr_fd_kind kind, uint32_t size)
{
	struct stat st;

	if (kind != APR_FD_REQ && kind != APR_FD_RES)
		return -EINVAL;
	int e = check_sealed(fd, kind == APR_FD_RES ? SEALS_RES : SEALS_REQ);
	if (e)
		return e;
	if (fstat(fd, &st))
		return -errno;
	return S_ISREG(st.st_mode) && st.st_size == (off_t)size && size >= APR_REGION_HDR ? 0 : -EPROTO;
}

static int map_client(struct apr_region *r, int fd, size_t size, int prot)
{
	void *base = mmap(NULL, size, prot, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED)
		return -errno;
	/* a forked child must not reach the parent's session even by mistake */
	if (madvise(base, size, MADV_DONTFORK)) {
		int e = -errno;
		munmap(base, size);
		return e;
	}
	r->base = base;
	r->size = size;
	return 0;
}

int apr_region_map(struct apr_region *r, int fd, enum apr_fd_kind kind, uint32_t size)
{
	*r = (struct apr_region)APR_REGION_INIT;
	int e = apr_region_check(fd, kind, size);
	return e ? e : map_client(r, fd, size, kind == APR_FD_REQ ? PROT_READ | PROT_WRITE : PROT_READ);
}

void apr_region_close_fd(struct apr_region *r)
{
	if (r->fd >= 0)
		close(r->fd);
	r->fd = -1;
}

void apr_region_unmap(struct apr_region *r)
{
	if (r->base)
		munmap(r->base, r->size);
	r->base = NULL;
	r->size = 0;
	apr_region_close_fd(r);
}

int apr_peer_cred(int sock, pid_t *pid, uid_t *uid, gid_t *gid)
{
	struct ucred c;
	socklen_t n = sizeof(c);

	if (getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &c, &n))
		return -errno;
	if (pid)
		*pid = c.pid;
	if (uid)
		*uid = c.uid;
	if (gid)
		*gid = c.gid;
	return 0;
}

int apr_bodyfd_create(const char *name, const void *data, size_t len, void (*fill)(void *arg, void *base), void *arg)
{
	int fd = memfd(name);
	int e = 0;

	if (fd < 0)
		return fd;
	if (!len) {
		if (fchmod(fd, 0600))
			e = -errno;
		goto seal;
	}
	e = allocate(fd, len);
	if (e)
		goto fail;
	void *base = map_new(fd, len, PROT_READ | PROT_WRITE);
	if (base == MAP_FAILED) {
		e = -errno;
		goto fail;
	}
	if (data)
		memcpy(base, data, len);
	else if (fill)
		fill(arg, base);
	munmap(base, len); /* SEAL_WRITE asks that no writable map is left */
seal:
	if (!e && fcntl(fd, F_ADD_SEALS, SEALS_BODY))
		e = -errno;
	if (!e)
		return fd;
fail:
	close(fd);
	return e;
}

int apr_bodyfd_map(struct apr_region *r, int fd)
{
	struct stat st;

	*r = (struct apr_region)APR_REGION_INIT;
	int e = check_sealed(fd, SEALS_BODY);
	if (e)
		return e;
	if (fstat(fd, &st))
		return -errno;
	if (st.st_size == 0)
		return 0;
	return map_client(r, fd, (size_t)st.st_size, PROT_READ);
}
