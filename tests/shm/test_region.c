/* SPDX-License-Identifier: MIT */
/* Geometry as a pure function, what the seals forbid, and the guarded copy under truncation and full memory. */
#include "shm/guard.h"
#include "shm/region.h"
#include "shm/ring.h"
#include "tests/harness.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static struct apr_geometry plan(struct apr_wish w)
{
	struct apr_geometry g;
	const char *why = "";
	int e = apr_geometry_plan(&w, NULL, &g, &why);
	if (e)
		fprintf(stderr, "%s\n", why);
	CU_ASSERT_EQUAL(e, 0);
	return g;
}

static void defaults(void)
{
	struct apr_geometry g = plan((struct apr_wish){ 0 });

	CU_ASSERT_EQUAL(g.req_size, APR_REGION_DEFAULT);
	CU_ASSERT_EQUAL(g.res_size, APR_REGION_DEFAULT);
	CU_ASSERT_EQUAL(g.sq_entries, APR_SQ_DEFAULT);
	CU_ASSERT_EQUAL(g.cq_entries, APR_CQ_DEFAULT);
	CU_ASSERT_EQUAL(g.sq_off, 4096);
	CU_ASSERT_EQUAL(g.req_arena_off, 4096 + 64 * 64);
	CU_ASSERT_EQUAL(g.req_arena_off + g.req_arena_len, g.req_size);
	CU_ASSERT_EQUAL(g.res_arena_off, 4096 + 256 * 64);
	CU_ASSERT_EQUAL(g.max_inflight, 128);
	CU_ASSERT_EQUAL(g.max_input, g.req_arena_len);
	CU_ASSERT(g.max_blob + 8 <= g.res_arena_len / 4);
}

static void every_wish_fits_or_is_refused(void)
{
	static const uint32_t entries[] = { 0, 1, 2, 3, 63, 64, 65, 1000, 4096, 4097, 16384, 16385, 1u << 31, UINT32_MAX };
	static const uint32_t sizes[] = { 0, 1, 4096, 8192, 12288, 131072, 131073, 1 << 20, APR_REGION_MAX,
					  APR_REGION_MAX + 1, UINT32_MAX };
	static const uint16_t strides[] = { 0, 64, 63, 128, 192, 256, 320, 65535 };
	unsigned good = 0, refused = 0;

	for (size_t a = 0; a < sizeof(entries) / 4; a++)
		for (size_t b = 0; b < sizeof(entries) / 4; b++)
			for (size_t c = 0; c < sizeof(sizes) / 4; c++)
				for (size_t d = 0; d < sizeof(strides) / 2; d++) {
					struct apr_wish w = { entries[a], entries[b], sizes[c], sizes[(c + d) % 11],
							      strides[d], strides[(d + a) % 8] };
					struct apr_geometry g;
					const char *why = NULL;
					int e = apr_geometry_plan(&w, NULL, &g, &why);
					if (e) {
						CU_ASSERT(e == -EINVAL || e == -EDQUOT);
						CU_ASSERT_PTR_NOT_NULL(why);
						refused++;
						continue;
					}
					good++;
					struct apr_res_hdr h = {
						.magic = APR_REGION_MAGIC, .major = APR_ABI_MAJOR, .hdr_len = APR_REGION_HDR,
						.sq_entries = g.sq_entries, .sqe_size = g.sqe_size, .sq_off = g.sq_off,
						.cq_entries = g.cq_entries, .cqe_size = g.cqe_size, .cq_off = g.cq_off,
						.req_arena_off = g.req_arena_off, .req_arena_len = g.req_arena_len,
						.res_arena_off = g.res_arena_off, .res_arena_len = g.res_arena_len,
						.max_inflight = g.max_inflight,
					};
					struct apr_geometry back;
					CU_ASSERT_EQUAL(apr_geometry_read(&h, g.req_size, g.res_size, &back, &why), 0);
					CU_ASSERT(g.sq_entries >= w.sq_entries && g.cq_entries >= w.cq_entries);
					CU_ASSERT(g.max_inflight >= 1 && g.max_inflight <= g.cq_entries / 2);
					CU_ASSERT(g.req_arena_len >= 4096 && g.res_arena_len >= 4096);
				}
	CU_ASSERT(good > 100);
	CU_ASSERT(refused > 100);
}

static void limits_refuse_by_name(void)
{
	struct apr_limits l = { 64, 256, 1 << 20, 1 << 20, 16 };
	struct apr_geometry g;
	const char *why;
	struct apr_wish w = { .sq_entries = 128 };

	CU_ASSERT_EQUAL(apr_geometry_plan(&w, &l, &g, &why), -EDQUOT);
	CU_ASSERT_PTR_NOT_NULL(strstr(why, "sq_entries"));
	w = (struct apr_wish){ .cq_entries = 512 };
	CU_ASSERT_EQUAL(apr_geometry_plan(&w, &l, &g, &why), -EDQUOT);
	CU_ASSERT_PTR_NOT_NULL(strstr(why, "cq_entries"));
	w = (struct apr_wish){ .req_size = 2 << 20 };
	CU_ASSERT_EQUAL(apr_geometry_plan(&w, &l, &g, &why), -EDQUOT);
	CU_ASSERT_PTR_NOT_NULL(strstr(why, "req_size"));
	w = (struct apr_wish){ .res_size = 2 << 20 };
	CU_ASSERT_EQUAL(apr_geometry_plan(&w, &l, &g, &why), -EDQUOT);
	w = (struct apr_wish){ .res_size = 8192 };
	CU_ASSERT_EQUAL(apr_geometry_plan(&w, &l, &g, NULL), -EINVAL);
	w = (struct apr_wish){ 0 };
	CU_ASSERT_EQUAL(apr_geometry_plan(&w, &l, &g, &why), 0);
	CU_ASSERT_EQUAL(g.max_inflight, 16);
}

static void a_broken_header_is_refused(void)
{
	struct apr_geometry g = plan((struct apr_wish){ 0 }), back;
	struct apr_res_hdr good = {
		.magic = APR_REGION_MAGIC, .major = APR_ABI_MAJOR, .hdr_len = APR_REGION_HDR, .sq_entries = 64,
		.sqe_size = 64, .sq_off = 4096, .cq_entries = 256, .cqe_size = 64, .cq_off = 4096,
		.req_arena_off = g.req_arena_off, .req_arena_len = g.req_arena_len, .res_arena_off = g.res_arena_off,
		.res_arena_len = g.res_arena_len, .max_inflight = 128,
	}, h;
	const char *why;

#define REFUSED(change, e) \
	do { \
		h = good; \
		change; \
		why = NULL; \
		CU_ASSERT_EQUAL(apr_geometry_read(&h, g.req_size, g.res_size, &back, &why), e); \
		CU_ASSERT((e) == 0 || why != NULL); \
	} while (0)
	REFUSED((void)0, 0);
	REFUSED(h.magic++, -EPROTO);
	REFUSED(h.major++, -EPROTONOSUPPORT);
	REFUSED(h.hdr_len = 4095, -EPROTO);
	REFUSED(h.hdr_len = UINT32_MAX, -EPROTO);
	REFUSED(h.sq_entries = 0, -EPROTO);
	REFUSED(h.sq_entries = 63, -EPROTO);
	REFUSED(h.cq_entries = 1u << 31, -EPROTO);
	REFUSED(h.sqe_size = 0, -EPROTO);
	REFUSED(h.cqe_size = 8, -EPROTO);
	REFUSED(h.cqe_size = 1u << 31, -EPROTO);
	REFUSED(h.sq_off = UINT32_MAX - 7, -EPROTO);
	REFUSED(h.cq_off = 4092, -EPROTO);
	REFUSED(h.req_arena_off = 4, -EPROTO);
	REFUSED(h.req_arena_len = UINT32_MAX, -EPROTO);
	REFUSED(h.res_arena_off = g.res_size + 8, -EPROTO);
	REFUSED(h.max_inflight = 0, -EPROTO);
	REFUSED(h.max_inflight = 129, -EPROTO);
#undef REFUSED
}

static void request_region_seals(void)
{
	struct apr_geometry g = plan((struct apr_wish){ 0 });
	struct apr_region d, c;
	struct stat st;

	CU_ASSERT_EQUAL_FATAL(apr_region_create(&d, APR_FD_REQ, &g, 1, 2), 0);
	CU_ASSERT_EQUAL(fstat(d.fd, &st), 0);
	CU_ASSERT_EQUAL(st.st_mode & 07777, 0600);
	CU_ASSERT_EQUAL((uint64_t)st.st_blocks * 512, g.req_size); /* allocated for real */
	CU_ASSERT_EQUAL(ftruncate(d.fd, 0), -1);
	CU_ASSERT_EQUAL(errno, EPERM);
	CU_ASSERT_EQUAL(ftruncate(d.fd, 1 << 20), -1);
	CU_ASSERT_EQUAL(fcntl(d.fd, F_ADD_SEALS, F_SEAL_WRITE), -1);
	CU_ASSERT_EQUAL(fcntl(d.fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
	CU_ASSERT_EQUAL_FATAL(apr_region_map(&c, d.fd, APR_FD_REQ, g.req_size), 0);
	/* one memory seen from both sides, writable for the client alone */
	*(volatile uint32_t *)c.base = 42;
	CU_ASSERT_EQUAL(*(volatile uint32_t *)d.base, 42);
	apr_region_unmap(&c);
	CU_ASSERT_EQUAL(apr_region_map(&c, d.fd, APR_FD_RES, g.req_size), -EPROTO); /* lacks FUTURE_WRITE */
	CU_ASSERT_EQUAL(apr_region_check(d.fd, APR_FD_REQ, g.req_size + 4096), -EPROTO);
	apr_region_unmap(&d);
	apr_region_unmap(&d);
}

static void result_region_seals(void)
{
	struct apr_geometry g = plan((struct apr_wish){ 0 });
	struct apr_region d, c;

	CU_ASSERT_EQUAL_FATAL(apr_region_create(&d, APR_FD_RES, &g, 11, 22), 0);
	CU_ASSERT_EQUAL_FATAL(apr_region_map(&c, d.fd, APR_FD_RES, g.res_size), 0);
	const struct apr_res_hdr *h = c.base;
	CU_ASSERT_EQUAL(h->magic, APR_REGION_MAGIC);
	CU_ASSERT(!memcmp(&h->magic, "ARGION01", 8));
	CU_ASSERT_EQUAL(h->epoch, 11);
	CU_ASSERT_EQUAL(h->session, 22);
	((struct apr_res_hdr *)d.base)->cq_tail = 7; /* the map made before the seal still writes */
	CU_ASSERT_EQUAL(h->cq_tail, 7);
	/* nobody maps it writable again, writes to it or punches it */
	CU_ASSERT_PTR_EQUAL(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, d.fd, 0), MAP_FAILED);
	CU_ASSERT_EQUAL(errno, EPERM);
	CU_ASSERT_EQUAL(mprotect(c.base, c.size, PROT_READ | PROT_WRITE), -1);
	CU_ASSERT_EQUAL(pwrite(d.fd, "x", 1, 0), -1);
	CU_ASSERT_EQUAL(errno, EPERM);
	CU_ASSERT_EQUAL(fallocate(d.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
	CU_ASSERT_EQUAL(errno, EPERM);
	CU_ASSERT_EQUAL(ftruncate(d.fd, 0), -1);
	apr_region_unmap(&c);
	apr_region_close_fd(&d);
	CU_ASSERT_EQUAL(d.fd, -1);
	CU_ASSERT_PTR_NOT_NULL(d.base);
	apr_region_unmap(&d);
}

static void impostors_are_not_mapped(void)
{
	struct apr_region c;
	int fd = memfd_create("x", MFD_CLOEXEC | MFD_ALLOW_SEALING), p[2];

	CU_ASSERT_EQUAL(ftruncate(fd, 131072), 0);
	CU_ASSERT_EQUAL(apr_region_map(&c, fd, APR_FD_REQ, 131072), -EPROTO); /* no seals */
	CU_ASSERT_EQUAL(apr_bodyfd_map(&c, fd), -EPROTO);
	close(fd);
	CU_ASSERT_EQUAL(pipe2(p, O_CLOEXEC), 0);
	CU_ASSERT_EQUAL(apr_region_map(&c, p[0], APR_FD_REQ, 131072), -EPROTO);
	CU_ASSERT_EQUAL(apr_region_map(&c, -1, APR_FD_REQ, 131072), -EBADF);
	CU_ASSERT_EQUAL(apr_region_map(&c, p[0], APR_FD_DOORBELL, 131072), -EINVAL);
	close(p[0]);
	close(p[1]);
}

static void a_forked_child_has_no_regions(void)
{
	struct apr_geometry g = plan((struct apr_wish){ 0 });
	struct apr_region d, c;
	int status;

	CU_ASSERT_EQUAL_FATAL(apr_region_create(&d, APR_FD_REQ, &g, 1, 2), 0);
	CU_ASSERT_EQUAL_FATAL(apr_region_map(&c, d.fd, APR_FD_REQ, g.req_size), 0);
	pid_t pid = fork();
	if (!pid) {
		unsigned char vec[1];
		_exit(mincore(c.base, 4096, vec) == -1 && errno == ENOMEM ? 0 : 1);
	}
	waitpid(pid, &status, 0);
	CU_ASSERT_EQUAL(status, 0);
	apr_region_unmap(&c);
	apr_region_unmap(&d);
}

static void fill(void *arg, void *base)
{
	memset(base, *(int *)arg, 100);
}

static void bodies(void)
{
	struct apr_region m;
	int v = 'q';

	int fd = apr_bodyfd_create("t", "hello", 5, NULL, NULL);
	CU_ASSERT_FATAL(fd >= 0);
	CU_ASSERT_EQUAL(apr_bodyfd_map(&m, fd), 0);
	CU_ASSERT_EQUAL(m.size, 5);
	CU_ASSERT(!memcmp(m.base, "hello", 5));
	CU_ASSERT_EQUAL(pwrite(fd, "x", 1, 0), -1);
	apr_region_unmap(&m);
	close(fd);
	fd = apr_bodyfd_create("t", NULL, 100, fill, &v);
	CU_ASSERT_EQUAL(apr_bodyfd_map(&m, fd), 0);
	CU_ASSERT_EQUAL(((char *)m.base)[99], 'q');
	apr_region_unmap(&m);
	close(fd);
	fd = apr_bodyfd_create("t", NULL, 0, NULL, NULL);
	CU_ASSERT_EQUAL(apr_bodyfd_map(&m, fd), 0);
	CU_ASSERT_PTR_NULL(m.base);
	close(fd);
}

static void peer(void)
{
	int s[2];
	pid_t pid;
	uid_t uid;
	gid_t gid;

	CU_ASSERT_EQUAL(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, s), 0);
	CU_ASSERT_EQUAL(apr_peer_cred(s[0], &pid, &uid, &gid), 0);
	CU_ASSERT(pid == getpid() && uid == getuid() && gid == getgid());
	CU_ASSERT_EQUAL(apr_peer_cred(s[0], NULL, NULL, NULL), 0);
	CU_ASSERT_EQUAL(apr_peer_cred(-1, NULL, NULL, NULL), -EBADF);
	close(s[0]);
	close(s[1]);
}

/* ---- the guarded copy ------------------------------------------------------------- */

/* A mapping of two pages whose second has no memory behind it: touching it is SIGBUS. */
static uint8_t *cut_short(void)
{
	int fd = memfd_create("cut", MFD_CLOEXEC);
	CU_ASSERT_EQUAL(ftruncate(fd, 8192), 0);
	uint8_t *p = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CU_ASSERT_PTR_NOT_EQUAL_FATAL(p, MAP_FAILED);
	memset(p, 'a', 8192);
	CU_ASSERT_EQUAL(ftruncate(fd, 4096), 0);
	close(fd);
	return p;
}

static void guarded_copy(void)
{
	uint8_t from[700], to[702];

	CU_ASSERT_EQUAL(apr_guard_install(), 0);
	CU_ASSERT_EQUAL(apr_guard_install(), 0);
	CU_ASSERT_EQUAL(apr_guard_thread(), 0);
	for (size_t i = 0; i < sizeof(from); i++)
		from[i] = (uint8_t)(i * 7 + 1);
	for (size_t n = 0; n <= sizeof(from); n++) {
		memset(to, 0, sizeof(to));
		CU_ASSERT_EQUAL(apr_guard_copy(to + 1, from, n), 0);
		CU_ASSERT(!memcmp(to + 1, from, n) && !to[0] && !to[n + 1]);
	}
	uint32_t word = 0xdeadbeef, out = 0;
	CU_ASSERT_EQUAL(apr_guard_load32(&word, &out), 0);
	CU_ASSERT_EQUAL(out, word);
	apr_guard_remove();
}

static void case23_truncated_memory_is_efault(void)
{
	uint8_t *p = cut_short(), to[8192];
	uint32_t out;

	CU_ASSERT_EQUAL(apr_guard_install(), 0);
	CU_ASSERT_EQUAL(apr_guard_copy(to, p, 4096), 0);
	for (size_t at = 4000; at < 4096; at++) {
		CU_ASSERT_EQUAL(apr_guard_copy(to, p + at, 4096 - at), 0);
		CU_ASSERT_EQUAL(apr_guard_copy(to, p + at, 4097 - at), -EFAULT);
		CU_ASSERT_EQUAL(apr_guard_copy(to, p + at, 1000), -EFAULT);
	}
	CU_ASSERT_EQUAL(apr_guard_copy(to, p + 4096, 1), -EFAULT);
	CU_ASSERT_EQUAL(apr_guard_load32((const uint32_t *)(void *)(p + 4096), &out), -EFAULT);
	CU_ASSERT_EQUAL(apr_guard_load32((const uint32_t *)(void *)(p + 4092), &out), 0);
	munmap(p, 8192);
	apr_guard_remove();
}

static void case23_punched_hole_reads_as_zeros(void)
{
	struct apr_geometry g = plan((struct apr_wish){ 0 });
	struct apr_region d;
	uint8_t to[4096];

	CU_ASSERT_EQUAL(apr_guard_install(), 0);
	CU_ASSERT_EQUAL_FATAL(apr_region_create(&d, APR_FD_REQ, &g, 1, 2), 0);
	CU_ASSERT_EQUAL(pwrite(d.fd, "client", 6, 8192), 6);
	CU_ASSERT_EQUAL(apr_guard_copy(to, (uint8_t *)d.base + 8192, sizeof(to)), 0);
	CU_ASSERT(!memcmp(to, "client", 6));
	/* its seals allow this: it must end in zeros or -EFAULT, never in a dead daemon */
	CU_ASSERT_EQUAL(fallocate(d.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, g.req_size), 0);
	CU_ASSERT_EQUAL(apr_guard_copy(to, (uint8_t *)d.base + 8192, sizeof(to)), 0);
	CU_ASSERT_EQUAL(to[0], 0);
	apr_region_unmap(&d);
	apr_guard_remove();
}

static void *fault_often(void *arg)
{
	uint8_t *bad = arg, good[64], to[64];
	uintptr_t wrong = 0;

	memset(good, 'g', sizeof(good));
	apr_guard_thread();
	for (int i = 0; i < 20000; i++) {
		wrong += apr_guard_copy(to, bad + 4090, 64) != -EFAULT;
		wrong += apr_guard_copy(to, good, 64) != 0;
	}
	return (void *)wrong;
}

static void faults_in_eight_threads(void)
{
	uint8_t *p = cut_short();
	pthread_t t[8];

	CU_ASSERT_EQUAL(apr_guard_install(), 0);
	for (int i = 0; i < 8; i++)
		pthread_create(&t[i], NULL, fault_often, p);
	for (int i = 0; i < 8; i++) {
		void *wrong;
		pthread_join(t[i], &wrong);
		CU_ASSERT_PTR_NULL(wrong);
	}
	munmap(p, 8192);
	apr_guard_remove();
}

static volatile sig_atomic_t chained;
static uint8_t *volatile heal_at;

static void heal(int sig, siginfo_t *info, void *context)
{
	(void)sig, (void)info, (void)context;
	chained++;
	mmap(heal_at, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

static void foreign_faults_go_to_the_earlier_handler(void)
{
	uint8_t *p = cut_short(), to[64];
	struct sigaction sa = { .sa_sigaction = heal, .sa_flags = SA_SIGINFO }, now;

	sigaction(SIGBUS, &sa, NULL);
	CU_ASSERT_EQUAL(apr_guard_install(), 0);
	chained = 0;
	CU_ASSERT_EQUAL(apr_guard_copy(to, p + 4096, 64), -EFAULT);
	CU_ASSERT_EQUAL(chained, 0);
	heal_at = p + 4096;
	CU_ASSERT_EQUAL(*(volatile uint8_t *)(p + 4096), 0); /* not through the guard */
	CU_ASSERT_EQUAL(chained, 1);
	apr_guard_remove();
	sigaction(SIGBUS, NULL, &now);
	CU_ASSERT(now.sa_sigaction == heal);
	signal(SIGBUS, SIG_DFL);
	munmap(p, 8192);
}

static void with_no_earlier_handler_a_foreign_fault_kills(void)
{
	int status;
	pid_t pid = fork();

	if (!pid) {
		uint8_t *p = cut_short();
		signal(SIGBUS, SIG_DFL);
		apr_guard_install();
		_exit(*(volatile uint8_t *)(p + 4096));
	}
	waitpid(pid, &status, 0);
	CU_ASSERT(WIFSIGNALED(status) || WEXITSTATUS(status) != 0); /* a sanitizer exits in its own way */
}

static const struct apr_test tests[] = {
	{ "defaults", defaults, 0 },
	{ "every_wish_fits_or_is_refused", every_wish_fits_or_is_refused, 0 },
	{ "limits_refuse_by_name", limits_refuse_by_name, 0 },
	{ "a_broken_header_is_refused", a_broken_header_is_refused, 0 },
	{ "case25_request_region_seals", request_region_seals, 0 },
	{ "result_region_seals", result_region_seals, 0 },
	{ "case23_impostors_are_not_mapped", impostors_are_not_mapped, 0 },
	{ "case43_a_forked_child_has_no_regions", a_forked_child_has_no_regions, 0 },
	{ "bodies", bodies, 0 },
	{ "peer", peer, 0 },
	{ "guarded_copy", guarded_copy, 0 },
	{ "case23_truncated_memory_is_efault", case23_truncated_memory_is_efault, 0 },
	{ "case23_punched_hole_reads_as_zeros", case23_punched_hole_reads_as_zeros, 0 },
	{ "faults_in_eight_threads", faults_in_eight_threads, KEEPS_HEAP }, /* thread stacks */
	{ "foreign_faults_go_to_the_earlier_handler", foreign_faults_go_to_the_earlier_handler, 0 },
	{ "with_no_earlier_handler_a_foreign_fault_kills", with_no_earlier_handler_a_foreign_fault_kills, 0 },
};
TEST_MAIN("shm/region", tests)
