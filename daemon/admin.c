/* SPDX-License-Identifier: MIT */
/*
 * The admin socket: orders that change something.
 *
 * Owns: reading their JSON and answering. Does not own carrying them out. Who may
 * connect is a matter of the socket's mode (0600). Io thread.
 */
#include "daemon/conn.h"
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

static void say(struct worker *w, struct conn *k, uint16_t type, int err, const char *text)
{
	if (conn_reply(k, type, err, text, strlen(text)))
		conn_end(w, k);
}

static void load(struct worker *w, struct conn *k, json_t *j)
{
	const char *name = json_string_value(json_object_get(j, "name")),
		   *path = json_string_value(json_object_get(j, "path"));
	struct options o;

	if (!path || !*path) {
		say(w, k, APR_FRAME_LOAD, -EINVAL, "\"path\" is missing");
		return;
	}
	if (name && (!*name || strlen(name) > 63)) {
		say(w, k, APR_FRAME_LOAD, -EINVAL, "\"name\" has 1 to 63 bytes");
		return;
	}
	if (w->state == STATE_DRAINING) {
		say(w, k, APR_FRAME_LOAD, -ESHUTDOWN, "aprd is draining");
		return;
	}
	options_init(&o);
	if (!name && !options_add_model(&o, path)) /* the file's own name */
		name = o.models[0].name;
	if (name)
		worker_load(w, name, path, k->id);
	else
		say(w, k, APR_FRAME_LOAD, -EINVAL, "\"name\" is missing");
	options_free(&o);
}

static void unload(struct worker *w, struct conn *k, json_t *j)
{
	const char *name = json_string_value(json_object_get(j, "name"));

	if (name)
		worker_unload(w, name, k->id);
	else
		say(w, k, APR_FRAME_UNLOAD, -EINVAL, "\"name\" is missing");
}

struct cancel {
	struct mail m; /* first */
	struct worker *w;
	uint64_t session, user_data, asker;
	bool one;
	int err;
};

static void cancel_done(void *io, struct mail *m)
{
	struct cancel *x = (struct cancel *)m;

	conn_answer(io, x->asker, APR_FRAME_CANCEL, x->err, x->err ? "no such session or request" : "{}");
	free(x);
}

static void core_cancel(void *core, struct mail *m)
{
	struct cancel *x = (struct cancel *)m;
	struct core *c = core;
	struct session *s = c->all;
	struct request *r = NULL;

	while (s && s->id != x->session)
		s = s->core_next;
	if (s && !s->gone && x->one)
		r = request_find(s, x->user_data);
	x->err = s && (r || !x->one) ? 0 : -ENOENT;
	if (r)
		request_finish(c, r, -ECANCELED, APR_FINISH_CANCELLED, "cancelled by the administrator");
	else if (s && !x->one)
		request_end_all(c, s, -ECANCELED, APR_FINISH_CANCELLED, "cancelled by the administrator");
	x->m.fn = cancel_done;
	mailbox_post(&x->w->box, &x->m);
}

static void cancel(struct worker *w, struct conn *k, json_t *j)
{
	json_t *session = json_object_get(j, "session"), *one = json_object_get(j, "user_data");
	struct cancel *x = json_is_integer(session) && (!one || json_is_integer(one)) ? calloc(1, sizeof(*x)) : NULL;

	if (!x) {
		say(w, k, APR_FRAME_CANCEL, -EINVAL, "\"session\" is missing, or not a number");
		return;
	}
	x->w = w;
	x->asker = k->id;
	x->session = (uint64_t)json_integer_value(session);
	x->user_data = (uint64_t)json_integer_value(one);
	x->one = one != NULL;
	x->m.fn = core_cancel;
	mailbox_post(&w->core.box, &x->m);
}

static void set_log(struct worker *w, struct conn *k, json_t *j)
{
	const char *level = json_string_value(json_object_get(j, "level"));
	enum log_level l;

	if (!level || log_parse_level(level, &l)) {
		say(w, k, APR_FRAME_LOG, -EINVAL, "\"level\" is one of warn, info, debug");
		return;
	}
	log_set_level(l);
	say(w, k, APR_FRAME_LOG, 0, "{}");
}

static void drain(struct worker *w, struct conn *k, json_t *j)
{
	json_t *t = json_object_get(j, "timeout_ms");
	json_int_t ms = t ? json_integer_value(t) : (json_int_t)w->o.drain_ms;

	if ((t && !json_is_integer(t)) || ms < 0 || ms > 3600000) {
		say(w, k, APR_FRAME_DRAIN, -EINVAL, "\"timeout_ms\" is between 0 and 3600000");
		return;
	}
	say(w, k, APR_FRAME_DRAIN, 0, "{}"); /* k may be gone now */
	worker_drain(w, (uint32_t)ms);
}

static void reload(struct worker *w, struct conn *k)
{
	char err[300];
	int e = worker_reload(w, err, sizeof(err));

	say(w, k, APR_FRAME_RELOAD, e, e ? err : "{}");
}

static void warmup(struct worker *w, struct conn *k, json_t *j)
{
	json_t *model = json_object_get(j, "model"), *kind = json_object_get(j, "kind"), *rows = json_object_get(j, "rows");
	json_int_t n = json_integer_value(rows);

	if ((model && !json_is_string(model)) || (kind && !json_is_string(kind)) || !kind != !rows ||
	    (rows && (!json_is_integer(rows) || n < 1 || n > UINT32_MAX)))
		say(w, k, APR_FRAME_WARMUP, -EINVAL, "\"model\" and \"kind\" are strings; \"rows\" goes with \"kind\"");
	else
		worker_warm(w, json_string_value(model), json_string_value(kind), (uint32_t)n, k->id);
}

/* {"config": true} asks for the settings instead. */
static void status(struct worker *w, struct conn *k, json_t *j)
{
	char *text = json_is_true(json_object_get(j, "config")) ? settings_json(w) : status_json(w, NULL);

	say(w, k, APR_FRAME_STATUS, text ? 0 : -ENOMEM, text ? text : "no memory");
	free(text);
}

void admin_frame(struct worker *w, struct conn *k, const struct apr_frame *f, const char *body, size_t n)
{
	json_error_t at;
	json_t *j = n ? json_loadb(body, n, JSON_REJECT_DUPLICATES, &at) : json_object();

	if (!json_is_object(j)) {
		json_decref(j);
		say(w, k, f->type, -EINVAL, "the body is not a JSON object");
		return;
	}
	switch (f->type) {
	case APR_FRAME_STATUS: status(w, k, j); break;
	case APR_FRAME_LOAD: load(w, k, j); break;
	case APR_FRAME_UNLOAD: unload(w, k, j); break;
	case APR_FRAME_WARMUP: warmup(w, k, j); break;
	case APR_FRAME_RELOAD: reload(w, k); break;
	case APR_FRAME_DRAIN: drain(w, k, j); break;
	case APR_FRAME_CANCEL: cancel(w, k, j); break;
	case APR_FRAME_LOG: set_log(w, k, j); break;
	case APR_FRAME_HELLO: say(w, k, APR_FRAME_WELCOME, -EPERM, "this is the admin socket: no sessions here"); break;
	case APR_FRAME_BYE: conn_end(w, k); break;
	default: say(w, k, f->type, -EOPNOTSUPP, "not built");
	}
	json_decref(j);
}
