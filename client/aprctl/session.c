/* SPDX-License-Identifier: MIT */
/*
 * Reaching the daemon, choosing a model, running one request to its end.
 *
 * Owns: connection options, Ctrl-C, the words for a daemon that is not there.
 * Does not own: what an entry means to a verb.
 */
#include "client/aprctl/ctl.h"
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static volatile sig_atomic_t interrupted;

static void on_interrupt(int sig)
{
	interrupted = sig;
}

void ctl_catch_interrupt(void)
{
	/* once: a second Ctrl-C ends the program at once */
	struct sigaction sa = {.sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND};

	if (interrupted == SIGINT) /* the one that ended an earlier request of a conversation */
		interrupted = 0;
	sigaction(SIGINT, &sa, NULL);
	sa.sa_handler = on_interrupt;
	sigaction(SIGTERM, &sa, NULL);
}

bool ctl_interrupted(void)
{
	return interrupted != 0;
}

bool ctl_terminated(void)
{
	return interrupted == SIGTERM;
}

static bool is_socket(const char *path)
{
	struct stat st;

	return !stat(path, &st) && S_ISSOCK(st.st_mode);
}

/* Whether path is the admin socket of a client socket beside it, whose name is then in client. */
static bool is_admin_socket(const char *path, char *client, size_t n)
{
	const char *slash = strrchr(path, '/'), *name = slash ? slash + 1 : path;
	size_t len = strlen(path);

	if (!strcmp(name, "admin.sock"))
		snprintf(client, n, "%.*saprd.sock", (int)(name - path), path);
	else if (len > 6 && !strcmp(path + len - 6, ".admin"))
		snprintf(client, n, "%.*s", (int)(len - 6), path);
	else
		return false;
	return is_socket(path) && is_socket(client);
}

int ctl_unreachable(const struct ctl *c, int e, const char *client, const char *path, const char *err)
{
	struct stat st;
	char other[256];

	if (!stat(client, &st) && !S_ISSOCK(st.st_mode))
		return ctl_fail(c, "%s is a %s, not a socket: give -s the daemon's client socket", client,
				S_ISDIR(st.st_mode) ? "folder" : "file");
	if (is_admin_socket(client, other, sizeof(other)))
		return ctl_fail(c, "%s is the admin socket: give -s the client socket, %s", client, other);
	switch (e) {
	case -EPROTOTYPE:
		return ctl_fail(c, "%s is another program's socket, of a kind that aprd does not use: name aprd's with -s",
				path);
	case -ENOENT:
	case -ECONNREFUSED:
		return ctl_fail(c, "no daemon at %s: start one with aprd -m FILE.gguf, or name its socket with -s", path);
	case -EACCES:
		return ctl_fail(c, "%s: not allowed: join the socket's group, or run as its owner", path);
	default:
		return ctl_fail(c, "%s", err && *err ? err : apr_strerror(e));
	}
}

int ctl_connect(const struct ctl *c, size_t input, struct apr **s)
{
	struct apr_opts o = APR_OPTS_INIT;
	char err[512] = "", path[256];
	size_t need = APR_REGION_HDR + APR_SQ_DEFAULT * sizeof(struct apr_sqe) + input + APR_PARAMS_MAX + 4096;
	int e;

	if (need > APR_REGION_MAX)
		return ctl_fail(c, "%zu bytes of input are more than a session can hold (%u)", input, APR_REGION_MAX);
	if (input > APR_REGION_DEFAULT / 4) /* the session is as large as its input asks for */
		o.req_size = (uint32_t)need;
	o.path = c->socket;
	o.name = "aprctl";
	e = apr_socket_path(c->socket, path, sizeof(path));
	if (e < 0)
		return ctl_fail(c, "socket path: %s", apr_strerror(e));
	e = apr_connect(s, &o, err, sizeof(err));
	return e ? ctl_unreachable(c, e, path, path, err) : CTL_OK;
}

int ctl_model(const struct ctl *c, struct apr *s, struct apr_model_row *row)
{
	struct apr_model_row *rows;
	size_t n;
	const struct apr_welcome *w = apr_info(s);
	int e = apr_get_models(s, &rows, &n), status = CTL_FAIL;

	if (e)
		return ctl_fail(c, "asking for the models: %s", apr_strerror(e));
	for (size_t i = 0; i < n && status; i++)
		if (c->model ? !strncmp(rows[i].name, c->model, sizeof(rows[i].name)) :
			       (rows[i].flags & 1) || rows[i].id == w->default_model) {
			*row = rows[i];
			status = CTL_OK;
		}
	free(rows);
	if (status && c->model)
		return ctl_fail(c, "no model %s here: aprctl models lists those that are loaded", c->model);
	if (status)
		return ctl_fail(c, "the daemon has no model: load one with aprctl load FILE");
	return CTL_OK;
}

/* Sleeps until an entry or the socket needs us, or Ctrl-C. */
static int wait_entry(struct apr *s, sigset_t *during)
{
	struct pollfd p = {apr_fd(s), POLLIN, 0};
	struct timespec slice = {0, 250000000};
	int e = apr_arm(s);

	if (e)
		return e < 0 ? e : 0;
	ppoll(&p, 1, &slice, during);
	e = apr_poll(s);
	return e < 0 ? e : 0;
}

static void fill_last(struct apr *s, const struct apr_cqe *e, struct ctl_last *l)
{
	const char *why;
	size_t n = 0;

	l->res = e->res;
	l->at = e->pos;
	l->finish = APR_AUX_REASON(e->aux);
	l->backend = APR_AUX_BACKEND(e->aux);
	l->route = APR_AUX_ROUTE(e->aux);
	l->fell_back = APR_AUX_FELL_BACK(e->aux);
	if (e->type == APR_CQE_FINAL)
		l->cost = e->u.final_;
	why = apr_cqe_blob(s, e, APR_BLOB_ERROR, &n);
	if (why)
		snprintf(l->why, sizeof(l->why), "%.*s", (int)(n < 255 ? n : 255), why);
}

static int take_entries(struct apr *s, uint64_t user_data, ctl_entry_fn fn, void *arg, struct ctl_last *last, bool *done)
{
	const struct apr_cqe *e;
	int status = CTL_OK, k;

	while (!*done && !(k = apr_peek_cqe(s, &e))) {
		if (e->user_data == user_data && apr_cqe_last(e)) {
			fill_last(s, e, last);
			*done = true;
		}
		if (e->user_data == user_data && fn && !status)
			status = fn(arg, s, e);
		apr_cqe_seen(s, e);
	}
	if (!*done && k != -EAGAIN && k != -EPIPE && !status)
		return CTL_FAIL;
	return status;
}

int ctl_run(const struct ctl *c, struct apr *s, uint64_t user_data, ctl_entry_fn fn, void *arg, struct ctl_last *last)
{
	bool done = false, cancelled = false;
	int status = CTL_OK, e = 0;
	sigset_t block, before;

	memset(last, 0, sizeof(*last));
	sigemptyset(&block);
	sigaddset(&block, SIGINT);
	sigaddset(&block, SIGTERM);
	sigprocmask(SIG_BLOCK, &block, &before);
	for (;;) {
		status = take_entries(s, user_data, fn, arg, last, &done);
		if (done || status)
			break;
		if (interrupted && !cancelled) {
			apr_cancel_all(s);
			cancelled = last->interrupted = true;
		}
		e = wait_entry(s, &before);
		if (e == -EPIPE) { /* what is still there, the library's own last entry included */
			status = take_entries(s, user_data, fn, arg, last, &done);
			break;
		}
		if (e < 0)
			break;
	}
	sigprocmask(SIG_SETMASK, &before, NULL);
	if (!done && !status)
		return ctl_fail(c, "the session ended: %s", *apr_why(s) ? apr_why(s) : apr_strerror(e));
	if (done && last->res == -ECONNRESET && !*last->why)
		snprintf(last->why, sizeof(last->why), "%s", apr_why(s));
	return status;
}

int ctl_request_failed(const struct ctl *c, const struct ctl_last *l)
{
	const char *todo = "", *how = l->finish == APR_FINISH_DRAINED ? " (drained)" : "";

	if (l->res == -E2BIG || l->res == -ENOSPC)
		todo = ": shorten the input, or give aprd a larger context (-c)";
	else if (l->res == -ECONNRESET)
		todo = ": aprctl status tells whether the daemon is back";
	else if ((l->res == -ETIMEDOUT || l->res == -ETIME) && c->timeout_ms)
		todo = ": give it longer with --timeout";
	if (!*l->why && l->at)
		return ctl_fail(c, "%s (byte %u of the request)%s", apr_strerror(l->res), l->at, todo);
	if (*l->why)
		return ctl_fail(c, "%s%s%s", l->why, how, todo);
	return ctl_fail(c, "%s%s%s", apr_strerror(l->res), how, todo);
}

int ctl_admin(const struct ctl *c, unsigned type, json_t *body, char **reply, int timeout_ms)
{
	char client[256], path[256], err[512] = "";
	char *text = body ? json_dumps(body, JSON_COMPACT) : NULL;
	struct apr_admin *a = NULL;
	int e = apr_socket_path(c->socket, client, sizeof(client)), status;

	json_decref(body);
	if (e >= 0)
		e = apr_admin_path(client, path, sizeof(path));
	if (e < 0) {
		free(text);
		return ctl_fail(c, "socket path: %s", apr_strerror(e));
	}
	e = apr_admin_open(&a, path, err, sizeof(err));
	if (e) {
		free(text);
		return ctl_unreachable(c, e, client, path, err);
	}
	e = apr_admin_call(a, type, text, reply, timeout_ms, err, sizeof(err));
	status = e ? ctl_fail(c, "%s", *err ? err : apr_strerror(e)) : CTL_OK;
	apr_admin_close(a);
	free(text);
	return status;
}
