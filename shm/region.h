/* SPDX-License-Identifier: MIT */
/*
 * A session's two memory regions: their geometry, how the daemon makes and
 * seals them, how a client checks and maps them; and the read-only memfds that
 * carry bodies too long for a frame.
 *
 * Owns: sizes and offsets (apr_geometry_plan), seals, modes, mappings. Does not
 * own: what is written inside (ring.h), quotas (daemon/) nor sending descriptors.
 *
 * Nothing here is thread-aware; every call works on its arguments alone.
 * All return 0 or -errno.
 */
#ifndef APR_SHM_REGION_H
#define APR_SHM_REGION_H

#include <apr/abi.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* what HELLO asks for; 0 anywhere = default */
struct apr_wish {
	uint32_t sq_entries, cq_entries; /* rounded up to a power of two */
	uint32_t req_size, res_size;     /* bytes, rounded up to 4096 */
	uint16_t sqe_size, cqe_size;     /* 64, 128, 192 or 256 */
};

/* what the daemon allows this session */
struct apr_limits {
	uint32_t sq_entries, cq_entries; /* most, powers of two */
	uint32_t req_size, res_size;     /* most, bytes */
	uint32_t max_inflight;           /* most; 0 = only cq_entries / 2 binds */
};

struct apr_geometry {
	uint32_t req_size, res_size; /* bytes, multiples of 4096 */
	uint32_t sq_entries, sqe_size, sq_off;
	uint32_t cq_entries, cqe_size, cq_off;
	uint32_t req_arena_off, req_arena_len; /* offsets from the region's start, 128-aligned */
	uint32_t res_arena_off, res_arena_len;
	uint32_t max_inflight; /* <= cq_entries / 2 */
	uint32_t max_input;    /* bytes of one request's input; = req_arena_len */
	uint32_t max_blob;     /* bytes of data in one blob, without its header */
};

/* Wishes and limits to a geometry. Pure. NULL limits = the ABI's own maxima.
 * -EINVAL a wish that no daemon could grant, -EDQUOT one above the limits;
 * *why (if not NULL) then names it in a constant string. */
int apr_geometry_plan(const struct apr_wish *wish, const struct apr_limits *limits, struct apr_geometry *g,
		      const char **why);

/* The geometry that a mapped result header states, tested for consistency with the two sizes
 * of WELCOME. -EPROTO with *why where it cannot be. For clients. */
int apr_geometry_read(const struct apr_res_hdr *hdr, uint32_t req_size, uint32_t res_size, struct apr_geometry *g,
		      const char **why);

struct apr_region {
	int fd;     /* -1 once closed */
	void *base; /* NULL = not mapped */
	size_t size;
};
#define APR_REGION_INIT { -1, NULL, 0 }

/* Daemon: makes a region of size bytes (multiple of 4096), allocated for real, 0600, mapped and
 * sealed. kind APR_FD_REQ: mapped read-only here. kind APR_FD_RES: mapped read-write here and by
 * nobody after, the header's constants written from g, epoch and session.
 * -ENOSPC, -ENOMEM, -EMFILE ... leave nothing behind. */
int apr_region_create(struct apr_region *r, enum apr_fd_kind kind, const struct apr_geometry *g, uint64_t epoch,
		      uint64_t session);

/* Client: the facts to hold before mapping: fd is a memfd that contains the kind's seals, of
 * exactly size bytes, not executable-sealed facts aside. -EPROTO otherwise. */
int apr_region_check(int fd, enum apr_fd_kind kind, uint32_t size);
/* Client: check, then map (REQ read-write, RES read-only), MADV_DONTFORK. fd stays the caller's. */
int apr_region_map(struct apr_region *r, int fd, enum apr_fd_kind kind, uint32_t size);

void apr_region_close_fd(struct apr_region *r); /* the mapping stays */
void apr_region_unmap(struct apr_region *r);    /* mapping and descriptor; safe on APR_REGION_INIT and twice */

/* The peer of a connected unix socket, as it was at connect. -errno. pid, uid, gid may be NULL. */
int apr_peer_cred(int sock, pid_t *pid, uid_t *uid, gid_t *gid);

/* A sealed read-only memfd of len bytes of data (frames above APR_FRAME_MAX, vocabularies).
 * data NULL: filled by fill(arg, base) before sealing. Returns the descriptor or -errno. */
int apr_bodyfd_create(const char *name, const void *data, size_t len, void (*fill)(void *arg, void *base), void *arg);
/* Checks SHRINK, GROW and WRITE seals, maps read-only, MADV_DONTFORK. len 0 = empty, base NULL. */
int apr_bodyfd_map(struct apr_region *r, int fd);

#endif
