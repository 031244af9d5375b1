/* SPDX-License-Identifier: MIT */
/*
 * The sockets' side of the fake daemon: HELLO and WELCOME, the questions of a
 * session, the admin socket's commands, status.
 *
 * Owns: what frames say. Does not own: listening and polling (fake.c).
 */
#include "client/fake/fake_int.h"
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

static int send_with_fds(int sock, const void *frame, size_t len, const int *fds, unsigned n)
{
	union {
		char buf[CMSG_SPACE(3 * sizeof(int))];
		struct cmsghdr align;
	} control;
	struct iovec iov = {(void *)(uintptr_t)frame, len};
	struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};

	if (n) {
		struct cmsghdr *c;

		memset(&control, 0, sizeof(control));
		m.msg_control = control.buf;
		m.msg_controllen = CMSG_SPACE(n * sizeof(int));
		c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(n * sizeof(int));
		memcpy(CMSG_DATA(c), fds, n * sizeof(int));
	}
	return sendmsg(sock, &m, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ? -errno : 0;
}

int fake_send(int sock, unsigned type, int err, const void *body, size_t len)
{
	struct apr_frame h = {APR_FRAME_MAGIC, (uint16_t)type, 0, (uint32_t)sizeof(h), err};
	uint8_t *buf;
	int e;

	if (len > APR_FRAME_MAX - sizeof(h)) {
		int fd = apr_bodyfd_create("apr-body", body, len, NULL, NULL);

		if (fd < 0)
			return fd;
		h.flags = APR_FRAME_FD_BODY;
		e = send_with_fds(sock, &h, sizeof(h), &fd, 1);
		close(fd);
		return e;
	}
	buf = malloc(sizeof(h) + len);
	if (!buf)
		return -ENOMEM;
	h.size = (uint32_t)(sizeof(h) + len);
	memcpy(buf, &h, sizeof(h));
	if (len)
		memcpy(buf + sizeof(h), body, len);
	e = send_with_fds(sock, buf, h.size, NULL, 0);
	free(buf);
	return e;
}

static void refuse(struct fake_session *s, unsigned type, int err, const char *words)
{
	fake_send(s->sock, type, err, words, strlen(words));
}

/* ---- HELLO -------------------------------------------------------------------- */

static int make_regions(struct fake_session *s, const struct apr_hello *h, const char **why)
{
	const struct fake_opts *o = &s->f->o;
	struct apr_limits lim = {o->sq_max ? o->sq_max : APR_SQ_MAX, o->cq_max ? o->cq_max : APR_CQ_MAX,
				 o->req_size_max ? o->req_size_max : 16u << 20, o->res_size_max ? o->res_size_max : 16u << 20,
				 0};
	struct apr_wish w = {h->sq_entries, h->cq_entries, h->req_size, h->res_size, h->sqe_size, h->cqe_size};
	int e = apr_geometry_plan(&w, &lim, &s->g, why);

	if (e)
		return e;
	*why = "no memory for the session's regions";
	e = apr_region_create(&s->req, APR_FD_REQ, &s->g, s->f->epoch, s->id);
	if (!e)
		e = apr_region_create(&s->res, APR_FD_RES, &s->g, s->f->epoch, s->id);
	if (!e)
		e = apr_arena_init(&s->arena, s->g.res_arena_off, s->g.res_arena_len, s->g.cq_entries);
	if (e)
		return e;
	s->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (s->bell < 0)
		return -errno;
	apr_rd_init(&s->rd, s->req.base, s->res.base, &s->g);
	apr_rd_flags_set(&s->rd, APR_RES_NEED_WAKEUP); /* this daemon never polls a ring */
	s->rd.res->models_gen = s->f->models_gen;
	s->credit.max_inflight = s->g.max_inflight;
	s->check = (struct apr_check){s->g.req_arena_off, s->g.req_arena_len, s->g.max_input,
				      {s->f->script.opcodes[0], 0}, FAKE_FEATURES, 2};
	return 0;
}

static int welcome(struct fake_session *s)
{
	struct apr_welcome w = {.hdr = {APR_FRAME_MAGIC, APR_FRAME_WELCOME, 0, sizeof(w), 0},
				.major = APR_ABI_MAJOR, .minor = APR_ABI_MINOR, .features = FAKE_FEATURES,
				.epoch = s->f->epoch, .session = s->id, .req_size = s->g.req_size,
				.res_size = s->g.res_size, .max_inflight = s->g.max_inflight,
				.max_input = s->g.max_input, .max_blob = s->g.max_blob,
				.default_model = s->f->models[0].id, .n_models = s->f->n_models,
				.models_gen = s->f->models_gen, .fd_kind = {APR_FD_REQ, APR_FD_RES, APR_FD_DOORBELL}};
	int fds[3] = {s->req.fd, s->res.fd, s->bell};

	w.opcodes[0] = s->f->script.opcodes[0];
	return send_with_fds(s->sock, &w, sizeof(w), fds, 3);
}

/* The first frame. On refusal the reason is sent and the socket closes. */
void fake_hello(struct fake_session *s)
{
	uint8_t buf[512];
	struct apr_hello h;
	struct apr_fault f;
	const char *why = "";
	ssize_t n = recv(s->sock, buf, sizeof(buf), MSG_DONTWAIT | MSG_TRUNC);
	int e;

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		s->gone = true;
		return;
	}
	e = apr_check_hello(buf, (size_t)n < sizeof(buf) ? (size_t)n : sizeof(buf), FAKE_FEATURES, &h, &f);
	why = f.why;
	if (!e && s->f->draining) {
		e = -ESHUTDOWN;
		why = "the daemon is draining";
	}
	if (!e && s->f->n_sessions > s->f->script.max_sessions) {
		e = -EDQUOT;
		why = "more sessions than this daemon takes";
	}
	if (!e)
		e = make_regions(s, &h, &why);
	if (e) {
		refuse(s, APR_FRAME_WELCOME, e, why);
		s->gone = true;
		return;
	}
	memcpy(s->name, h.name, sizeof(s->name) - 1);
	e = welcome(s);
	apr_region_close_fd(&s->req);
	apr_region_close_fd(&s->res);
	if (e) {
		s->gone = true;
		return;
	}
	s->ready = 1;
	fake_say(s->f, "session %llu: %s, pid %d", (unsigned long long)s->id, s->name, (int)s->pid);
}

/* ---- a session's questions ------------------------------------------------------ */

const struct fake_model *fake_model_of(const struct fake *f, uint32_t id)
{
	for (uint32_t i = 0; i < f->n_models; i++)
		if (f->models[i].id && (f->models[i].id == id || !id))
			return &f->models[i];
	return NULL;
}

static void receipt(const struct fake_model *m, uint8_t out[16])
{
	uint64_t a = fake_mix(1, m->id), b = fake_mix(2, m->id);

	memcpy(out, &a, 8);
	memcpy(out + 8, &b, 8);
}

static void get_models(struct fake_session *s)
{
	struct apr_model_row rows[8];

	memset(rows, 0, sizeof(rows));
	for (uint32_t i = 0; i < s->f->n_models; i++) {
		const struct fake_model *m = &s->f->models[i];

		rows[i].id = m->id;
		rows[i].flags = i == 0;
		rows[i].n_ctx = s->f->script.n_ctx;
		rows[i].n_vocab = s->f->script.vocab.n;
		receipt(m, rows[i].receipt);
		memcpy(rows[i].name, m->name, sizeof(rows[i].name));
	}
	fake_send(s->sock, APR_FRAME_GET_MODELS, 0, rows, s->f->n_models * sizeof(rows[0]));
}

static void get_vocab(struct fake_session *s, const uint8_t *body, size_t len)
{
	const struct fake_vocab *v = &s->f->script.vocab;
	struct apr_frame reply = {APR_FRAME_MAGIC, APR_FRAME_GET_VOCAB, APR_FRAME_FD_BODY, sizeof(reply), 0};
	size_t total = sizeof(struct apr_vocab_hdr) + (v->n + 1) * 4 + v->n, bytes = 0;
	struct apr_vocab_hdr *h;
	uint32_t id, *offsets;
	uint8_t *buf;
	int fd;

	if (len != 4) {
		refuse(s, APR_FRAME_GET_VOCAB, -EINVAL, "the body is one u32");
		return;
	}
	memcpy(&id, body, 4);
	if (!fake_model_of(s->f, id)) {
		refuse(s, APR_FRAME_GET_VOCAB, -ENOENT, "no such model");
		return;
	}
	for (uint32_t i = 0; i < v->n; i++)
		bytes += v->len[i];
	buf = calloc(1, total + bytes);
	if (!buf) {
		refuse(s, APR_FRAME_GET_VOCAB, -ENOMEM, "out of memory");
		return;
	}
	h = (struct apr_vocab_hdr *)(void *)buf;
	*h = (struct apr_vocab_hdr){APR_VOCAB_MAGIC, fake_model_of(s->f, id)->id, v->n, sizeof(*h),
				    (uint32_t)(sizeof(*h) + (v->n + 1) * 4), (uint32_t)total, (uint32_t)bytes};
	offsets = (uint32_t *)(void *)(h + 1);
	for (uint32_t i = 0; i < v->n; i++) {
		memcpy(buf + total + offsets[i], v->piece[i], v->len[i]);
		offsets[i + 1] = offsets[i] + v->len[i];
		buf[h->kinds_off + i] = i <= FAKE_EOS ? 3 : i < FAKE_WORD0 ? 6 : 1;
	}
	fd = apr_bodyfd_create("apr-vocab", buf, total + bytes, NULL, NULL);
	free(buf);
	if (fd < 0) {
		refuse(s, APR_FRAME_GET_VOCAB, fd, "no memory for the vocabulary");
		return;
	}
	send_with_fds(s->sock, &reply, sizeof(reply), &fd, 1);
	close(fd);
}

static void session_command(struct fake_session *s, const struct apr_frame *h, const uint8_t *body, size_t len)
{
	char *json;

	switch (h->type) {
	case APR_FRAME_READY:
		return;
	case APR_FRAME_GET_MODELS:
		get_models(s);
		return;
	case APR_FRAME_GET_VOCAB:
		get_vocab(s, body, len);
		return;
	case APR_FRAME_CANCEL_ALL:
		fake_session_cancel(s, NULL, -ECANCELED);
		return;
	case APR_FRAME_STATUS:
		json = fake_status_json(s->f, s);
		fake_send(s->sock, APR_FRAME_STATUS, json ? 0 : -ENOMEM, json, json ? strlen(json) : 0);
		free(json);
		return;
	case APR_FRAME_BYE:
		s->gone = true;
		return;
	case APR_FRAME_HELLO:
	case APR_FRAME_WELCOME:
	case APR_FRAME_NOTIFY:
	case APR_FRAME_MODEL_CHANGED:
		fake_session_end(s, APR_REASON_PROTOCOL, "a frame that a client never sends here");
		return;
	default:
		if (h->type >= APR_FRAME_LOAD && h->type <= APR_FRAME_LOG)
			refuse(s, h->type, -EPERM, "only on the admin socket");
		else
			refuse(s, h->type, -EOPNOTSUPP, "not supported here");
	}
}

void fake_session_frame(struct fake_session *s)
{
	static const size_t most = APR_FRAME_MAX;
	uint8_t *buf = malloc(most);
	struct apr_frame h;
	ssize_t n = buf ? recv(s->sock, buf, most, MSG_DONTWAIT | MSG_TRUNC) : -1;

	if (n == 0 || (n < 0 && buf && errno != EAGAIN && errno != EINTR)) {
		s->gone = true;
	} else if (n > 0) {
		if ((size_t)n >= sizeof(h))
			memcpy(&h, buf, sizeof(h));
		if ((size_t)n < sizeof(h) || h.magic != APR_FRAME_MAGIC || h.size != (size_t)n || (size_t)n > most)
			fake_session_end(s, APR_REASON_PROTOCOL, "not an aprd frame");
		else
			session_command(s, &h, buf + sizeof(h), (size_t)n - sizeof(h));
	}
	free(buf);
}

/* ---- status --------------------------------------------------------------------- */

static json_t *models_json(const struct fake *f)
{
	json_t *a = json_array();

	for (uint32_t i = 0; i < f->n_models; i++) {
		char hex[33];
		uint8_t r[16];

		receipt(&f->models[i], r);
		for (int k = 0; k < 16; k++)
			snprintf(hex + 2 * k, 3, "%02x", r[k]);
		json_array_append_new(a, json_pack("{s:s, s:s, s:s, s:I, s:I, s:s, s:s, s:i, s:{s:f, s:i, s:f, s:f}}", "name",
						   f->models[i].name, "path", "(script)", "arch", "fake", "n_ctx",
						   (json_int_t)f->script.n_ctx, "n_vocab", (json_int_t)f->script.vocab.n,
						   "numerics", hex, "route", "none", "bytes", 0, "sampling", "temperature", 1.0,
						   "top_k", 0, "top_p", 1.0, "min_p", 0.0));
	}
	return a;
}

char *fake_status_json(struct fake *f, const struct fake_session *own)
{
	unsigned running = f->n_requests;
	const char *state = f->draining ? "draining" : "ready";
	json_t *j = json_pack(
		"{s:s, s:s, s:i, s:f, s:s, s:{s:s, s:s, s:s}, s:o, s:[{s:s, s:s, s:I}], s:i, s:i, s:i, s:{s:i, s:i}, "
		"s:{s:[], s:[], s:i, s:i}, s:{s:i, s:i, s:s}}",
		"version", APR_VERSION "-fake", "abi", "0.1", "pid", (int)getpid(), "uptime_s",
		(double)(apr_now_ns() - f->started) / 1e9, "state", state, "backend", "name", "fake", "device", "none", "why",
		"answers come from a script", "models", models_json(f), "memory", "purpose", "vocabulary", "where", "host",
		"bytes", (json_int_t)f->script.vocab.n * 16, "sessions", (int)f->n_sessions, "running", (int)running, "queued",
		0, "kv", "pages_total", 0, "pages_free", 0, "graphs", "prefill", "decode", "bytes", 0, "replays", 0, "polling", "poll_us", 0, "spin_us", 0, "why",
		"the fake daemon never polls");
	char *text;

	if (j && own)
		json_object_set_new(j, "session", json_integer((json_int_t)own->id));
	if (j && !own) {
		json_t *list = json_array();

		for (const struct fake_session *s = f->sessions; s; s = s->next)
			if (s->ready)
				json_array_append_new(list, json_pack("{s:I, s:s, s:i, s:i, s:i, s:I}", "session", (json_int_t)s->id,
								      "name", s->name, "pid", (int)s->pid, "uid", (int)s->uid,
								      "unfinished", (int)s->credit.unfinished, "tokens",
								      (json_int_t)s->tokens));
		json_object_set_new(j, "session_rows", list);
	}
	text = j ? json_dumps(j, JSON_COMPACT) : NULL;
	json_decref(j);
	return text;
}

/* ---- the admin socket ------------------------------------------------------------- */

static void models_changed(struct fake *f)
{
	f->models_gen++;
	for (struct fake_session *s = f->sessions; s; s = s->next)
		if (s->ready && !s->dead) {
			s->rd.res->models_gen = f->models_gen;
			fake_send(s->sock, APR_FRAME_MODEL_CHANGED, 0, NULL, 0);
		}
}

static int admin_load(struct fake *f, json_t *j, const char **why)
{
	const char *name = json_string_value(json_object_get(j, "name")), *path = json_string_value(json_object_get(j, "path"));

	*why = "LOAD wants name and path";
	if (!path || !name || !*name || strlen(name) >= sizeof(f->models[0].name))
		return -EINVAL;
	*why = "cannot read the model file";
	if (access(path, R_OK))
		return -errno;
	for (uint32_t i = 0; i < f->n_models; i++)
		if (!strcmp(f->models[i].name, name)) {
			*why = "a model of that name is loaded";
			return -EEXIST;
		}
	*why = "the fake daemon holds eight models at most";
	if (f->n_models == sizeof(f->models) / sizeof(*f->models))
		return -ENOSPC;
	f->models[f->n_models].id = f->next_model++;
	memset(f->models[f->n_models].name, 0, sizeof(f->models[0].name));
	memcpy(f->models[f->n_models++].name, name, strlen(name));
	models_changed(f);
	return 0;
}

static int admin_unload(struct fake *f, json_t *j, const char **why)
{
	const char *name = json_string_value(json_object_get(j, "name"));

	*why = "no model of that name";
	for (uint32_t i = 0; name && i < f->n_models; i++)
		if (!strcmp(f->models[i].name, name)) {
			memmove(&f->models[i], &f->models[i + 1], (f->n_models - i - 1) * sizeof(f->models[0]));
			f->n_models--;
			models_changed(f);
			return 0;
		}
	return -ENOENT;
}

static int admin_cancel(struct fake *f, json_t *j, const char **why)
{
	json_t *id = json_object_get(j, "session"), *ud = json_object_get(j, "user_data");

	*why = "no such session";
	for (struct fake_session *s = f->sessions; s; s = s->next)
		if (json_is_integer(id) && s->ready && s->id == (uint64_t)json_integer_value(id)) {
			uint64_t user_data = (uint64_t)json_integer_value(ud);

			fake_session_cancel(s, ud ? &user_data : NULL, -ECANCELED);
			return 0;
		}
	return -ENOENT;
}

static int admin_drain(struct fake *f, json_t *j)
{
	json_int_t ms = json_integer_value(json_object_get(j, "timeout_ms"));

	f->draining = true;
	f->drain_at = apr_now_ns() + (uint64_t)(ms > 0 && ms < 3600000 ? ms : 0) * 1000000;
	for (struct fake_session *s = f->sessions; s; s = s->next)
		if (s->ready && !s->dead)
			apr_rd_flags_set(&s->rd, APR_RES_DRAINING);
	return 0;
}

void fake_admin_frame(struct fake *f, struct fake_client *c)
{
	uint8_t buf[8192];
	struct apr_frame h;
	ssize_t n = recv(c->sock, buf, sizeof(buf), MSG_DONTWAIT | MSG_TRUNC);
	const char *why = "";
	json_t *j;
	char *json = NULL;
	int e = 0;

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n >= (ssize_t)sizeof(h))
		memcpy(&h, buf, sizeof(h));
	if (n < (ssize_t)sizeof(h) || n > (ssize_t)sizeof(buf) || h.magic != APR_FRAME_MAGIC || h.size != (size_t)n) {
		c->gone = true;
		return;
	}
	j = json_loadb((char *)buf + sizeof(h), (size_t)n - sizeof(h), 0, NULL);
	switch (h.type) {
	case APR_FRAME_STATUS:
		json = fake_status_json(f, NULL);
		break;
	case APR_FRAME_LOAD:
		e = admin_load(f, j, &why);
		break;
	case APR_FRAME_UNLOAD:
		e = admin_unload(f, j, &why);
		break;
	case APR_FRAME_WARMUP:
	case APR_FRAME_RELOAD:
	case APR_FRAME_LOG:
		break;
	case APR_FRAME_DRAIN:
		e = admin_drain(f, j);
		break;
	case APR_FRAME_CANCEL:
		e = admin_cancel(f, j, &why);
		break;
	default:
		e = -EOPNOTSUPP;
		why = "the fake daemon does not do that";
	}
	json_decref(j);
	if (e)
		fake_send(c->sock, h.type, e, why, strlen(why));
	else
		fake_send(c->sock, h.type, 0, json, json ? strlen(json) : 0);
	free(json);
}
