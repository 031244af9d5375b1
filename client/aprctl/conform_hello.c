/* SPDX-License-Identifier: MIT */
/* Owns: the checks of the handshake, the regions and the frames of a session. */
#include "client/aprctl/conform.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

/* A HELLO of n bytes is refused with this error; the daemon goes on. */
static enum conf_result refused_as(struct conf *k, const void *hello, size_t n, int err)
{
	struct raw r;
	int e = raw_open_as(&r, k->path, hello, n);

	if (!e)
		raw_close(&r);
	CHECK(k, e, "such a HELLO is welcomed");
	/* hanging up without words is a refusal only of what is no HELLO at all */
	CHECK(k, e == err || (err == -EPROTO && e == -ECONNRESET), "refused with %d (%s), not %d (%s)", e, apr_strerror(e),
	      err, apr_strerror(err));
	return conf_alive(k);
}

static enum conf_result accepted_as(struct conf *k, const void *hello, size_t n)
{
	int e = raw_open_as(&k->s, k->path, hello, n);

	CHECK(k, !e, "refused: %s (%s)", k->s.why, apr_strerror(e));
	return conf_nop(k);
}

static enum conf_result welcome(struct conf *k)
{
	const struct apr_welcome *w = &k->s.w;

	PASS(conf_open(k));
	CHECK(k, w->hdr.type == APR_FRAME_WELCOME && w->hdr.size >= sizeof(*w), "WELCOME has type %u, size %u", w->hdr.type,
	      w->hdr.size);
	CHECK(k, w->major == APR_ABI_MAJOR, "major version %u", w->major);
	CHECK(k, w->epoch && w->session, "epoch or session is 0");
	CHECK(k, w->max_inflight && w->max_input && w->max_blob, "a limit is 0");
	CHECK(k, w->opcodes[0] & 1u << APR_OP_NOP, "NOP is not served");
	CHECK(k, w->opcodes[0] & 1u << APR_OP_CANCEL, "CANCEL is not served");
	for (size_t i = 0; i < sizeof(w->zero); i++)
		CHECK(k, !w->zero[i], "reserved byte %zu of WELCOME is not 0", i);
	return CONF_OK;
}

static enum conf_result sessions_differ(struct conf *k)
{
	struct raw other;
	uint64_t epoch, session;
	int e;

	PASS(conf_open(k));
	e = raw_open(&other, k->path, NULL);
	CHECK(k, !e, "a second session is refused: %s", other.why);
	epoch = other.w.epoch;
	session = other.w.session;
	raw_close(&other);
	CHECK(k, epoch == k->s.w.epoch, "two sessions of one daemon have different epochs");
	CHECK(k, session != k->s.w.session, "two sessions have one number");
	return CONF_OK;
}

static enum conf_result major(struct conf *k)
{
	struct apr_hello h;

	raw_hello(&h);
	h.major = APR_ABI_MAJOR + 1;
	return refused_as(k, &h, sizeof(h), -EPROTONOSUPPORT);
}

static enum conf_result minor(struct conf *k)
{
	struct apr_hello h;

	raw_hello(&h);
	h.minor = APR_ABI_MINOR + 100;
	return accepted_as(k, &h, sizeof(h));
}

static enum conf_result hello_short(struct conf *k)
{
	struct apr_hello h;

	raw_hello(&h);
	h.hdr.size = 64;
	return refused_as(k, &h, 64, -EPROTO);
}

static enum conf_result hello_wrong_size(struct conf *k)
{
	struct apr_hello h;

	raw_hello(&h);
	h.hdr.size = 4096;
	return refused_as(k, &h, sizeof(h), -EPROTO);
}

static enum conf_result hello_longer(struct conf *k)
{
	uint8_t buf[160] = {0};
	struct apr_hello h;

	raw_hello(&h);
	h.hdr.size = sizeof(buf);
	memcpy(buf, &h, sizeof(h));
	return accepted_as(k, buf, sizeof(buf));
}

static enum conf_result hello_longer_unknown(struct conf *k)
{
	uint8_t buf[160] = {0};
	struct apr_hello h;

	raw_hello(&h);
	h.hdr.size = sizeof(buf);
	memcpy(buf, &h, sizeof(h));
	buf[150] = 1;
	return refused_as(k, buf, sizeof(buf), -EINVAL);
}

static enum conf_result hello_flag(struct conf *k)
{
	struct apr_hello h;

	raw_hello(&h);
	h.flags = 0x80000000u;
	return refused_as(k, &h, sizeof(h), -EINVAL);
}

static enum conf_result hello_reserved(struct conf *k)
{
	struct apr_hello h;

	raw_hello(&h);
	h.zero0 = 1;
	PASS(refused_as(k, &h, sizeof(h), -EINVAL));
	h.zero0 = 0;
	h.zero1[15] = 1;
	return refused_as(k, &h, sizeof(h), -EINVAL);
}

static enum conf_result hello_need(struct conf *k)
{
	struct apr_hello h;

	raw_hello(&h);
	h.need = UINT64_C(1) << 63;
	return refused_as(k, &h, sizeof(h), -EOPNOTSUPP);
}

static enum conf_result hello_want(struct conf *k)
{
	struct apr_hello h;

	raw_hello(&h);
	h.want = UINT64_C(1) << 63;
	return accepted_as(k, &h, sizeof(h));
}

static enum conf_result hello_magic(struct conf *k)
{
	struct apr_hello h;

	raw_hello(&h);
	h.hdr.magic = 0x20544547;
	return refused_as(k, &h, sizeof(h), -EPROTO);
}

static enum conf_result hello_first(struct conf *k)
{
	struct apr_frame f = {APR_FRAME_MAGIC, APR_FRAME_GET_MODELS, 0, sizeof(f), 0};

	return refused_as(k, &f, sizeof(f), -EPROTO);
}

static enum conf_result rings_rounded(struct conf *k)
{
	PASS(conf_open_rings(k, 5, 20));
	CHECK(k, k->s.g.sq_entries == 8 && k->s.g.cq_entries == 32, "asked for 5 and 20 entries, got %u and %u",
	      k->s.g.sq_entries, k->s.g.cq_entries);
	return conf_nop(k);
}

static enum conf_result rings_huge(struct conf *k)
{
	struct apr_hello h;
	struct raw r;
	int e;

	raw_hello(&h);
	h.sq_entries = 0x80000000u;
	e = raw_open(&r, k->path, &h);
	if (!e)
		raw_close(&r);
	CHECK(k, e == -EINVAL || e == -EDQUOT, "2^31 entries give %d (%s)", e, apr_strerror(e));
	return conf_alive(k);
}

static enum conf_result regions_huge(struct conf *k)
{
	struct apr_hello h;
	struct raw r;
	int e;

	raw_hello(&h);
	h.req_size = 0xfffff000u;
	e = raw_open(&r, k->path, &h);
	if (!e)
		raw_close(&r);
	CHECK(k, e == -EINVAL || e == -EDQUOT, "a region of 4 GiB gives %d (%s)", e, apr_strerror(e));
	return conf_alive(k);
}

static enum conf_result strides(struct conf *k)
{
	struct apr_hello h;
	int e;

	raw_hello(&h);
	h.sqe_size = h.cqe_size = 128;
	h.sq_entries = 4;
	e = raw_open(&k->s, k->path, &h);
	CHECK(k, !e, "entries of 128 bytes are refused: %s", k->s.why);
	CHECK(k, k->s.g.sqe_size == 128 && k->s.g.cqe_size == 128, "strides %u and %u", k->s.g.sqe_size, k->s.g.cqe_size);
	for (int i = 0; i < 20; i++)
		PASS(conf_nop(k));
	return CONF_OK;
}

static enum conf_result stride_tail(struct conf *k)
{
	struct apr_hello h;
	struct apr_sqe *slot;
	int e;

	raw_hello(&h);
	h.sqe_size = 128;
	e = raw_open(&k->s, k->path, &h);
	CHECK(k, !e, "entries of 128 bytes are refused: %s", k->s.why);
	slot = apr_rc_sqe(&k->s.rc);
	slot->user_data = 7;
	((uint8_t *)slot)[100] = 1;
	apr_rc_publish(&k->s.rc, k->s.rc.sq_tail);
	raw_ring(&k->s);
	e = raw_next(&k->s, CONF_MS);
	CHECK(k, !e, "no answer: %s", apr_strerror(e));
	CHECK(k, k->s.cqe.res == -EINVAL, "an unknown tail that is not zero gives %d", k->s.cqe.res);
	return conf_nop(k);
}

static enum conf_result stride_odd(struct conf *k)
{
	struct apr_hello h;

	raw_hello(&h);
	h.sqe_size = 60;
	return refused_as(k, &h, sizeof(h), -EINVAL);
}

/* ---- regions --------------------------------------------------------------------- */

static enum conf_result seals(struct conf *k)
{
	int req, res;

	PASS(conf_open(k));
	req = fcntl(k->s.req_fd, F_GET_SEALS);
	res = fcntl(k->s.res_fd, F_GET_SEALS);
	CHECK(k, req >= 0 && (req & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) == (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL),
	      "the request region's seals are %#x", (unsigned)req);
	CHECK(k, res >= 0 && (res & (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE)) ==
			     (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE),
	      "the result region's seals are %#x", (unsigned)res);
	return CONF_OK;
}

static enum conf_result read_only(struct conf *k)
{
	void *p;
	char path[64];
	int fd;

	PASS(conf_open(k));
	p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, k->s.res_fd, 0);
	if (p != MAP_FAILED)
		munmap(p, 4096);
	CHECK(k, p == MAP_FAILED, "the result region can be mapped for writing");
	CHECK(k, pwrite(k->s.res_fd, "x", 1, 0x80) < 0, "the result region can be written");
	CHECK(k, fallocate(k->s.res_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), "a hole can be punched in it");
	snprintf(path, sizeof(path), "/proc/self/fd/%d", k->s.res_fd);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd >= 0) {
		p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		close(fd);
		if (p != MAP_FAILED)
			munmap(p, 4096);
		CHECK(k, p == MAP_FAILED, "the result region can be opened anew and mapped for writing");
	}
	return conf_nop(k);
}

static enum conf_result sizes(struct conf *k)
{
	struct stat req, res;

	PASS(conf_open(k));
	CHECK(k, !fstat(k->s.req_fd, &req) && !fstat(k->s.res_fd, &res), "fstat: %s", strerror(errno));
	CHECK(k, req.st_size == k->s.w.req_size && res.st_size == k->s.w.res_size, "the regions are not as WELCOME says");
	CHECK(k, !(req.st_mode & 077) && !(res.st_mode & 077), "the regions' modes are %o and %o", req.st_mode & 0777u,
	      res.st_mode & 0777u);
	CHECK(k, ftruncate(k->s.req_fd, 0) && ftruncate(k->s.req_fd, 1 << 30), "the request region can change its size");
	CHECK(k, (uint64_t)req.st_blocks * 512 >= (uint64_t)req.st_size, "the request region is not allocated for real");
	return conf_nop(k);
}

static enum conf_result header(struct conf *k)
{
	const struct apr_res_hdr *h;

	PASS(conf_open(k));
	h = k->s.res.base;
	CHECK(k, h->magic == APR_REGION_MAGIC && h->major == APR_ABI_MAJOR && h->hdr_len >= 64, "magic, version or length");
	CHECK(k, h->epoch == k->s.w.epoch && h->session == k->s.w.session, "epoch or session is not WELCOME's");
	CHECK(k, h->max_inflight == k->s.w.max_inflight && h->max_inflight <= h->cq_entries / 2,
	      "max_inflight %u with %u entries", h->max_inflight, h->cq_entries);
	CHECK(k, !(h->sq_entries & (h->sq_entries - 1)) && !(h->cq_entries & (h->cq_entries - 1)), "ring sizes");
	CHECK(k, h->req_arena_off + (uint64_t)h->req_arena_len <= k->s.w.req_size &&
			 h->res_arena_off + (uint64_t)h->res_arena_len <= k->s.w.res_size, "arenas");
	CHECK(k, !h->zero0, "reserved word");
	return CONF_OK;
}

/* ---- frames ----------------------------------------------------------------------- */

static enum conf_result ask(struct conf *k, unsigned type, const void *body, size_t len, uint8_t *buf, size_t cap, int *n)
{
	struct apr_frame h;

	CHECK(k, !raw_ask(&k->s, type, body, len), "the frame cannot be sent");
	*n = raw_frame(&k->s, buf, cap, NULL, CONF_MS);
	CHECK(k, *n >= (int)sizeof(h), "no answer to a frame of type %u", type);
	memcpy(&h, buf, sizeof(h));
	CHECK(k, h.magic == APR_FRAME_MAGIC && h.size == (uint32_t)*n, "the answer is no frame");
	CHECK(k, h.type == type, "the answer to type %u has type %u", type, h.type);
	return CONF_OK;
}

static enum conf_result refuses_frame(struct conf *k, unsigned type, int err)
{
	uint8_t buf[4096];
	struct apr_frame h;
	int n;

	PASS(ask(k, type, NULL, 0, buf, sizeof(buf), &n));
	memcpy(&h, buf, sizeof(h));
	CHECK(k, h.err == err, "type %u gives err %d (%s)", type, h.err, apr_strerror(h.err));
	return conf_nop(k);
}

static enum conf_result frame_models(struct conf *k)
{
	uint8_t *buf = malloc(APR_FRAME_MAX);
	struct apr_model_row row;
	enum conf_result r;
	int n = 0, defaults = 0;
	bool names = true;

	CHECK(k, buf, "out of memory");
	r = conf_open(k);
	if (r == CONF_OK)
		r = ask(k, APR_FRAME_GET_MODELS, NULL, 0, buf, APR_FRAME_MAX, &n);
	for (size_t at = sizeof(struct apr_frame); r == CONF_OK && at + sizeof(row) <= (size_t)n; at += sizeof(row)) {
		memcpy(&row, buf + at, sizeof(row));
		defaults += row.id == k->s.w.default_model;
		names = names && row.id && memchr(row.name, 0, sizeof(row.name)) && row.n_vocab && row.n_ctx;
	}
	free(buf);
	PASS(r);
	CHECK(k, (size_t)n == sizeof(struct apr_frame) + k->s.w.n_models * sizeof(row), "%u models, an answer of %d bytes",
	      k->s.w.n_models, n);
	CHECK(k, names, "a row without id, name, context or vocabulary");
	CHECK(k, defaults == (k->s.w.n_models ? 1 : 0), "%d rows are the default model", defaults);
	return conf_nop(k);
}

static enum conf_result frame_status(struct conf *k)
{
	static const char *const want[] = {"version", "abi", "pid", "uptime_s", "state", "backend", "models", "memory",
					   "sessions", "running", "queued", "kv", "graphs"};
	struct apr *s;
	struct apr_opts o = APR_OPTS_INIT;
	char *text = NULL;
	json_t *j;
	int e;

	o.path = k->path;
	e = apr_connect(&s, &o, NULL, 0);
	CHECK(k, !e, "no session: %s", apr_strerror(e));
	e = apr_status(s, &text);
	apr_close(s);
	CHECK(k, !e, "STATUS: %s", apr_strerror(e));
	j = json_loads(text, 0, NULL);
	free(text);
	CHECK(k, j, "STATUS is no JSON");
	for (size_t i = 0; i < sizeof(want) / sizeof(want[0]); i++)
		if (!json_object_get(j, want[i])) {
			json_decref(j);
			return conf_no(k, "STATUS has no \"%s\"", want[i]);
		}
	json_decref(j);
	return CONF_OK;
}

static enum conf_result frame_unknown(struct conf *k)
{
	PASS(conf_open(k));
	return refuses_frame(k, 9999, -EOPNOTSUPP);
}

static enum conf_result frame_admin(struct conf *k)
{
	PASS(conf_open(k));
	for (unsigned type = APR_FRAME_LOAD; type <= APR_FRAME_LOG; type++)
		PASS(refuses_frame(k, type, -EPERM));
	return CONF_OK;
}

static enum conf_result frame_attach(struct conf *k)
{
	PASS(conf_open(k));
	if (k->s.w.features & APR_FEAT_ATTACH)
		return conf_skip(k, "the daemon has the feature");
	return refuses_frame(k, APR_FRAME_ATTACH, -EOPNOTSUPP);
}

static enum conf_result frame_garbage(struct conf *k)
{
	PASS(conf_open(k));
	CHECK(k, !raw_send(k->s.sock, "GET / HTTP/1.1\r\n\r\n", 18, NULL, 0), "cannot send");
	PASS(conf_dies(k, &k->s));
	return conf_alive(k);
}

static enum conf_result frame_descriptors(struct conf *k)
{
	struct apr_frame f = {APR_FRAME_MAGIC, APR_FRAME_READY, 0, sizeof(f), 0};
	int fds[3];

	PASS(conf_open(k));
	for (int i = 0; i < 20; i++) {
		fds[0] = fds[1] = fds[2] = k->s.bell;
		if (raw_send(k->s.sock, &f, sizeof(f), fds, 3))
			break; /* it may have ended the session for this: also right */
	}
	return conf_alive(k);
}

static enum conf_result hangup(struct conf *k)
{
	for (int i = 0; i < 20; i++) {
		struct apr_sqe q;

		PASS(conf_open(k));
		q = conf_sqe(k, APR_OP_NOP);
		raw_push(&k->s, &q);
		raw_close(&k->s);
	}
	return conf_alive(k);
}

const struct conf_check conf_hello_checks[] = {
	{"hello-welcome", 0, 0, welcome},
	{"hello-sessions-differ", 0, 0, sessions_differ},
	{"hello-other-major", 0, 0, major},
	{"hello-later-minor", 0, 0, minor},
	{"hello-too-short", 0, 0, hello_short},
	{"hello-wrong-size", 0, 0, hello_wrong_size},
	{"hello-longer-zero-tail", 0, 0, hello_longer},
	{"hello-longer-unknown-tail", 0, 0, hello_longer_unknown},
	{"hello-unknown-flag", 0, 0, hello_flag},
	{"hello-reserved", 0, 0, hello_reserved},
	{"hello-needs-unknown-feature", 0, 0, hello_need},
	{"hello-wants-unknown-feature", 0, 0, hello_want},
	{"hello-magic", 0, 0, hello_magic},
	{"hello-comes-first", 0, 0, hello_first},
	{"hello-rings-rounded", 0, 0, rings_rounded},
	{"hello-rings-huge", 0, 0, rings_huge},
	{"hello-regions-huge", 0, 0, regions_huge},
	{"hello-entry-stride", 0, 0, strides},
	{"hello-entry-stride-tail", 0, 0, stride_tail},
	{"hello-entry-stride-odd", 0, 0, stride_odd},
	{"region-seals", 0, 0, seals},
	{"region-result-read-only", 0, 0, read_only},
	{"region-size-and-mode", 0, 0, sizes},
	{"region-header", 0, 0, header},
	{"frame-models", 0, 0, frame_models},
	{"frame-status", 0, 0, frame_status},
	{"frame-unknown", 0, 0, frame_unknown},
	{"frame-admin-on-client-socket", 0, 0, frame_admin},
	{"frame-attach", 0, 0, frame_attach},
	{"frame-garbage", 0, 0, frame_garbage},
	{"frame-with-descriptors", 0, 0, frame_descriptors},
	{"session-hangups", 0, 0, hangup},
};
const size_t conf_n_hello = sizeof(conf_hello_checks) / sizeof(conf_hello_checks[0]);
