/* SPDX-License-Identifier: MIT */
/*
 * replay: sends a capture again and compares what comes back.
 *
 * Owns: the order in which things are sent, and the comparison. Does not own: the
 * file's format (capture.h).
 *
 * Order: an entry is sent once as many last entries of its session have come as
 * had come when it was captured; a CANCEL and CANCEL_ALL wait besides for as many
 * entries of their targets. Compared: every request's res and finish reason; its
 * ids, data and log-probability bits where the model's numerics are the same (a
 * cancelled one as far as both go). Conversation handles and model ids are
 * translated; everything else goes out as it stands.
 */
#include "client/aprctl/capture.h"
#include "shm/wire.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct side { /* what came for a request, then or now */
	bool done;
	int res;
	unsigned finish;
	uint64_t handle;
	uint32_t *ids; /* TOKEN entries: id and log-probability bits, two words each */
	size_t n_ids, cap_ids;
	uint8_t *data;
	size_t len, cap;
};

struct request {
	struct request *next;
	unsigned session;
	uint64_t user_data;
	uint8_t op;
	bool comparable;
	struct side then, now;
};

struct sess {
	struct sess *next;
	unsigned number;
	bool open, refused, over;
	struct raw raw;
	uint32_t lasts_then, lasts_now;
	uint32_t entries_then, entries_now;
};

struct replay {
	struct ctl *c;
	char path[256];
	struct sess *sessions;
	struct request *first, **last;
	struct { uint32_t then, now; bool same; } models[64];
	size_t n_models;
	unsigned requests, different;
	json_t *list; /* differences, with --json */
	int ms;
};

static void differs(struct replay *r, unsigned session, const struct request *q, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));
static void differs(struct replay *r, unsigned session, const struct request *q, const char *fmt, ...)
{
	char what[400];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(what, sizeof(what), fmt, ap);
	va_end(ap);
	r->different++;
	if (r->list)
		json_array_append_new(r->list, json_pack("{s:i, s:I, s:s, s:s}", "session", (int)session, "user_data",
							 (json_int_t)(q ? q->user_data & INT64_MAX : 0), "op",
							 q ? apr_wire_op(q->op) : "", "what", what));
	else if (q)
		printf("session %u, %s %llu: %s\n", session, apr_wire_op(q->op), (unsigned long long)q->user_data, what);
	else
		printf("session %u: %s\n", session, what);
}

/* ---- what came ------------------------------------------------------------------------ */

static bool append(void **p, size_t *n, size_t *cap, const void *data, size_t len)
{
	if (*n + len > *cap) {
		size_t want = (*n + len) * 2 + 64;
		void *more = realloc(*p, want);

		if (!more)
			return false;
		*p = more;
		*cap = want;
	}
	memcpy((uint8_t *)*p + *n, data, len);
	*n += len;
	return true;
}

static void take(struct side *s, const struct apr_cqe *e, const uint8_t *blob, size_t len)
{
	uint32_t word[2] = {(uint32_t)e->res, 0};
	void *p;

	switch (e->type) {
	case APR_CQE_TOKEN:
		memcpy(&word[1], &e->logprob, 4);
		p = s->ids;
		append(&p, &s->n_ids, &s->cap_ids, word, sizeof(word));
		s->ids = p;
		break;
	case APR_CQE_DATA:
		p = s->data;
		if (blob)
			append(&p, &s->len, &s->cap, blob, len);
		s->data = p;
		break;
	case APR_CQE_FINAL:
		s->handle = e->u.final_.handle;
		s->finish = APR_AUX_REASON(e->aux);
		s->res = e->res;
		s->done = true;
		break;
	case APR_CQE_ACK:
		s->res = e->res;
		s->done = true;
		break;
	default:
		break;
	}
}

/* Which request of a session an entry belongs to: the oldest that still runs, of -EEXIST the youngest. */
static struct request *owner(struct replay *r, unsigned session, const struct apr_cqe *e, bool then)
{
	struct request *found = NULL;
	bool last = e->type == APR_CQE_FINAL || e->type == APR_CQE_ACK;

	for (struct request *q = r->first; q; q = q->next)
		if (q->session == session && q->user_data == e->user_data && !(then ? q->then.done : q->now.done) &&
		    (!found || (last && e->res == -EEXIST)))
			found = q;
	return found;
}

/* ---- models and handles ----------------------------------------------------------------- */

static int learn_models(struct replay *r, json_t *head)
{
	json_t *m;
	size_t i, n = 0;
	struct apr_model_row *rows = NULL;
	struct apr *s;
	int status = ctl_connect(r->c, 0, &s), e;

	if (status)
		return status;
	e = apr_get_models(s, &rows, &n);
	apr_close(s);
	if (e)
		return ctl_fail(r->c, "asking for the models: %s", apr_strerror(e));
	json_array_foreach (json_object_get(head, "models"), i, m) {
		const char *name = json_string_value(json_object_get(m, "name"));
		const char *numerics = json_string_value(json_object_get(m, "numerics"));

		for (size_t k = 0; name && numerics && k < n && r->n_models < 64; k++) {
			char hex[33];

			if (strncmp(rows[k].name, name, sizeof(rows[k].name)))
				continue;
			ctl_hex(rows[k].receipt, sizeof(rows[k].receipt), hex);
			r->models[r->n_models].then = (uint32_t)json_integer_value(json_object_get(m, "id"));
			r->models[r->n_models].now = rows[k].id;
			r->models[r->n_models++].same = !strcmp(hex, numerics);
		}
	}
	free(rows);
	return CTL_OK;
}

/* Model 0 is the default: the first that the capture knew. */
static bool translate_model(struct replay *r, struct apr_sqe *q)
{
	for (size_t i = 0; i < r->n_models; i++)
		if (r->models[i].then == q->model || !q->model) {
			if (q->model)
				q->model = r->models[i].now;
			return r->models[i].same;
		}
	return false;
}

static void translate_handle(struct replay *r, struct apr_sqe *q)
{
	if (!q->arg || (q->op != APR_OP_GENERATE && q->op != APR_OP_CHAT && q->op != APR_OP_FREE))
		return;
	for (struct request *p = r->first; p; p = p->next)
		if (p->then.handle == q->arg && p->now.handle) {
			q->arg = p->now.handle;
			return;
		}
}

/* ---- pumping ------------------------------------------------------------------------------ */

/* Takes one entry of the session; false: none within ms, or the session is over. */
static bool pump(struct replay *r, struct sess *s, int ms)
{
	struct request *q;
	int e = raw_next(&s->raw, ms);

	if (e) {
		s->over = s->over || e == -EPIPE || e == -EPROTO;
		return false;
	}
	q = owner(r, s->number, &s->raw.cqe, false);
	if (q)
		take(&q->now, &s->raw.cqe, s->raw.blob_fmt ? s->raw.blob : NULL, s->raw.blob_len);
	else
		differs(r, s->number, NULL, "an entry for user_data %llu, which nobody sent",
			(unsigned long long)s->raw.cqe.user_data);
	s->entries_now++;
	s->lasts_now += s->raw.cqe.type == APR_CQE_FINAL || s->raw.cqe.type == APR_CQE_ACK;
	return true;
}

static struct sess *find(struct replay *r, unsigned number)
{
	struct sess *s = r->sessions;

	while (s && s->number != number)
		s = s->next;
	return s;
}

static void catch_up(struct replay *r, struct sess *s)
{
	while (s->open && !s->over && s->lasts_now < s->lasts_then && pump(r, s, r->ms))
		;
}

/* Before a CANCEL: as far as its target had come. */
static void catch_up_to(struct replay *r, struct sess *s, uint64_t user_data)
{
	for (struct request *q = r->first; q; q = q->next)
		while (q->session == s->number && q->user_data == user_data && !q->then.done && !q->now.done && !s->over &&
		       q->now.n_ids < q->then.n_ids && pump(r, s, r->ms))
			;
}

/* ---- events -------------------------------------------------------------------------------- */

/* A field's bytes; *n of them. NULL where the field is not there or no hex. */
static uint8_t *bytes(json_t *j, const char *key, size_t *n)
{
	const char *hex = json_string_value(json_object_get(j, key));
	size_t len = hex ? strlen(hex) / 2 : 0;
	uint8_t *p = hex ? calloc(1, len + sizeof(struct apr_hello)) : NULL; /* so that a short one reads as zeros */

	if (p && !ctl_unhex(hex, p, len)) {
		free(p);
		p = NULL;
	}
	*n = p ? len : 0;
	return p;
}

static void on_hello(struct replay *r, unsigned number, json_t *j)
{
	struct sess *s = calloc(1, sizeof(*s));
	size_t n;
	uint8_t *hello = bytes(j, "hello", &n);

	if (!s || !hello) {
		free(s);
		free(hello);
		return;
	}
	s->number = number;
	s->next = r->sessions;
	r->sessions = s;
	s->refused = raw_open_as(&s->raw, r->path, hello, n) != 0;
	s->open = !s->refused;
	if (n >= sizeof(struct apr_hello))
		s->raw.ring_always = ((struct apr_hello *)(void *)hello)->flags & APR_HELLO_RING_ALWAYS;
	free(hello);
}

static void on_welcome(struct replay *r, struct sess *s, json_t *j)
{
	size_t n;
	struct apr_welcome *w = (struct apr_welcome *)(void *)bytes(j, "welcome", &n);

	if (!w)
		return;
	if (!w->hdr.err != !s->refused)
		differs(r, s->number, NULL, "the daemon %s this HELLO%s%s", s->refused ? "refuses" : "takes",
			s->refused ? ": " : "", s->refused ? s->raw.why : "");
	else if (s->open && w->req_size != s->raw.w.req_size)
		differs(r, s->number, NULL, "the daemon grants a request region of %u bytes, not %u", s->raw.w.req_size,
			w->req_size);
	free(w);
}

static void put_input(struct sess *s, json_t *j, const char *key, uint32_t off)
{
	size_t n;
	uint8_t *p = bytes(j, key, &n);

	if (p && off >= s->raw.g.req_arena_off && (uint64_t)off + n <= s->raw.w.req_size)
		memcpy((uint8_t *)s->raw.req.base + off, p, n);
	free(p);
}

static void on_sqe(struct replay *r, struct sess *s, json_t *j)
{
	struct request *q = calloc(1, sizeof(*q));
	size_t n;
	struct apr_sqe *e = (struct apr_sqe *)(void *)bytes(j, "sqe", &n);

	if (!q || !e) {
		free(q);
		free(e);
		return;
	}
	catch_up(r, s);
	if (e->op == APR_OP_CANCEL)
		catch_up_to(r, s, e->arg);
	q->session = s->number;
	q->user_data = e->user_data;
	q->op = e->op;
	q->comparable = translate_model(r, e);
	translate_handle(r, e);
	*r->last = q;
	r->last = &q->next;
	r->requests++;
	while (s->open && !s->over && !apr_rc_sq_space(&s->raw.rc) && pump(r, s, r->ms))
		;
	if (s->open && !s->over) {
		put_input(s, j, "in", e->in_off);
		put_input(s, j, "par", e->par_off);
		if (!raw_push_bytes(&s->raw, e, n))
			differs(r, s->number, q, "the submission queue stays full");
	}
	free(e);
}

static void on_cqe(struct replay *r, struct sess *s, json_t *j)
{
	size_t n, len;
	struct apr_cqe *e = (struct apr_cqe *)(void *)bytes(j, "cqe", &n);
	uint8_t *blob = bytes(j, "blob", &len);
	struct request *q = e ? owner(r, s->number, e, true) : NULL;

	if (q)
		take(&q->then, e, len > sizeof(struct apr_blob) ? blob + sizeof(struct apr_blob) : NULL,
		     len > sizeof(struct apr_blob) ? len - sizeof(struct apr_blob) : 0);
	if (e) {
		s->entries_then++;
		s->lasts_then += e->type == APR_CQE_FINAL || e->type == APR_CQE_ACK;
	}
	free(e);
	free(blob);
}

static void on_frame(struct replay *r, struct sess *s, json_t *j)
{
	const char *by = json_string_value(json_object_get(j, "by"));
	size_t n;
	uint8_t *frame = bytes(j, "frame", &n);

	if (frame && by && !strcmp(by, "client") && s->open) {
		if (n >= sizeof(struct apr_frame) && ((struct apr_frame *)(void *)frame)->type == APR_FRAME_CANCEL_ALL) {
			catch_up(r, s);
			for (struct request *q = r->first; q; q = q->next)
				if (q->session == s->number)
					catch_up_to(r, s, q->user_data);
		}
		raw_send(s->raw.sock, frame, n, NULL, 0);
	}
	free(frame);
}

static void on_word(struct replay *r, struct sess *s, uint32_t *word, json_t *v)
{
	catch_up(r, s);
	__atomic_store_n(word, (uint32_t)json_integer_value(v), __ATOMIC_RELEASE);
	raw_ring(&s->raw);
}

static void on_end(struct replay *r, struct sess *s, const char *by)
{
	uint8_t buf[1024];
	uint64_t until = apr_now_ns() + (uint64_t)r->ms * 1000000;

	if (!s->open)
		return;
	catch_up(r, s);
	if (by && !strcmp(by, "daemon")) {
		while (!s->over && !raw_dead(&s->raw) && apr_now_ns() < until)
			if (!raw_recv(s->raw.sock, buf, sizeof(buf), NULL, 50))
				s->over = true;
		if (!s->over && !raw_dead(&s->raw))
			differs(r, s->number, NULL, "the daemon ended this session then and does not now");
	}
	raw_close(&s->raw);
	s->open = false;
}

static void on_event(struct replay *r, json_t *j)
{
	unsigned number = (unsigned)json_integer_value(json_object_get(j, "s"));
	struct sess *s = find(r, number);
	json_t *v;

	if (json_object_get(j, "hello"))
		on_hello(r, number, j);
	else if (!s)
		return;
	else if (json_object_get(j, "welcome"))
		on_welcome(r, s, j);
	else if (json_object_get(j, "frame"))
		on_frame(r, s, j);
	else if (json_object_get(j, "sqe"))
		on_sqe(r, s, j);
	else if (json_object_get(j, "cqe"))
		on_cqe(r, s, j);
	else if ((v = json_object_get(j, "sq_tail")) && s->open)
		on_word(r, s, &s->raw.rc.req->sq_tail, v);
	else if ((v = json_object_get(j, "cq_head")) && s->open)
		on_word(r, s, &s->raw.rc.req->cq_head, v);
	else if ((v = json_object_get(j, "end")))
		on_end(r, s, json_string_value(v));
}

/* ---- comparing ------------------------------------------------------------------------------- */

static void compare(struct replay *r, const struct request *q)
{
	const struct side *a = &q->then, *b = &q->now;
	size_t n = a->n_ids < b->n_ids ? a->n_ids : b->n_ids;

	/* the client left before it ended: no answer to hold this one against; or how far it came was a matter of time */
	if (!a->done || (b->done && (a->res == -ETIMEDOUT || a->res == -ETIME)))
		return;
	if (!b->done)
		differs(r, q->session, q, "no last entry");
	else if (a->res != b->res)
		differs(r, q->session, q, "res is %d (%s), was %d (%s)", b->res, apr_strerror(b->res), a->res,
			apr_strerror(a->res));
	else if (a->finish != b->finish)
		differs(r, q->session, q, "finish is %s, was %s", apr_wire_finish(b->finish), apr_wire_finish(a->finish));
	else if (q->comparable && n && memcmp(a->ids, b->ids, n))
		differs(r, q->session, q, "other ids or log-probabilities");
	else if (q->comparable && !a->res && a->n_ids != b->n_ids)
		differs(r, q->session, q, "%zu tokens, were %zu", b->n_ids / 8, a->n_ids / 8);
	else if (q->comparable && !a->res && (a->len != b->len || (a->len && memcmp(a->data, b->data, a->len))))
		differs(r, q->session, q, "other data");
}

static int conclude(struct replay *r)
{
	bool numerics = r->n_models;

	for (size_t i = 0; i < r->n_models; i++)
		numerics = numerics && r->models[i].same;
	for (struct request *q = r->first; q; q = q->next)
		compare(r, q);
	if (r->c->json) {
		int e = ctl_print_json(r->c, json_pack("{s:i, s:i, s:b, s:O}", "requests", (int)r->requests, "differences",
						       (int)r->different, "same_numerics", numerics, "list", r->list));
		if (e)
			return e;
	} else {
		printf("%u requests, %u differences%s\n", r->requests, r->different,
		       numerics ? "" : " (other models or numerics: texts not compared)");
	}
	return r->different ? ctl_fail(r->c, "%u differences", r->different) : ctl_flush(r->c, CTL_OK);
}

static void clean(struct replay *r)
{
	while (r->sessions) {
		struct sess *s = r->sessions;

		r->sessions = s->next;
		if (s->open)
			raw_close(&s->raw);
		free(s);
	}
	while (r->first) {
		struct request *q = r->first;

		r->first = q->next;
		free(q->then.ids);
		free(q->then.data);
		free(q->now.ids);
		free(q->now.data);
		free(q);
	}
	json_decref(r->list);
}

static int replay(struct replay *r, char *text, size_t len)
{
	json_t *head = NULL;
	size_t line_no = 0;
	int status;

	for (char *line = text, *end; line < text + len; line = end + 1) {
		json_error_t je;
		json_t *j;

		end = memchr(line, '\n', (size_t)(text + len - line));
		if (!end)
			end = text + len;
		line_no++;
		if (end == line)
			continue;
		j = json_loadb(line, (size_t)(end - line), 0, &je);
		if (!j) {
			json_decref(head);
			return ctl_fail(r->c, "%s: line %zu is no JSON: %s", r->c->args[0], line_no, je.text);
		}
		if (!head) {
			if (json_integer_value(json_object_get(j, "aprctl_capture")) != 1) {
				json_decref(j);
				return ctl_fail(r->c, "%s: not a capture that this aprctl knows", r->c->args[0]);
			}
			head = j;
			status = learn_models(r, head);
			if (status) {
				json_decref(head);
				return status;
			}
			continue;
		}
		on_event(r, j);
		json_decref(j);
	}
	if (!head)
		return ctl_fail(r->c, "%s: the file is empty", r->c->args[0]);
	json_decref(head);
	for (struct sess *s = r->sessions; s; s = s->next)
		catch_up(r, s);
	return conclude(r);
}

int cmd_replay(struct ctl *c)
{
	struct replay r = {.c = c, .last = &r.first, .ms = c->timeout_ms ? (int)c->timeout_ms : 30000};
	char *text = NULL;
	size_t len = 0;
	int status, e;

	if (c->n_args != 1)
		return ctl_usage(c, "give the capture's FILE");
	if (apr_socket_path(c->socket, r.path, sizeof(r.path)) < 0)
		return ctl_fail(c, "the socket's path is too long");
	e = ctl_slurp(c->args[0], &text, &len);
	if (e)
		return ctl_fail(c, "%s: %s", c->args[0], strerror(-e));
	r.list = c->json ? json_array() : NULL;
	status = replay(&r, text, len);
	clean(&r);
	free(text);
	return status;
}
