/* SPDX-License-Identifier: MIT */
/*
 * status and models: the daemon's JSON, cut to the fields that are promised, or
 * one screen with what matters first.
 *
 * Owns: the order and words of that screen. Does not own: any figure on it.
 */
#include "client/aprctl/ctl.h"
#include <errno.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The admin socket knows all sessions; whoever may not use it gets the totals from the client socket. */
int ctl_status(struct ctl *c, json_t **out)
{
	char client[256], path[256], err[256] = "";
	struct apr_admin *a = NULL;
	struct apr *s = NULL;
	char *text = NULL;
	json_error_t je;
	int e = apr_socket_path(c->socket, client, sizeof(client)), status = CTL_OK;

	if (e < 0 || apr_admin_path(client, path, sizeof(path)) < 0)
		return ctl_fail(c, "socket path: %s", apr_strerror(e < 0 ? e : -ENAMETOOLONG));
	if (!apr_admin_open(&a, path, err, sizeof(err))) {
		e = apr_admin_call(a, APR_FRAME_STATUS, NULL, &text, 10000, err, sizeof(err));
		apr_admin_close(a);
		if (e)
			return ctl_fail(c, "%s", *err ? err : apr_strerror(e));
	} else {
		status = ctl_connect(c, 0, &s);
		if (status)
			return status;
		e = apr_status(s, &text);
		apr_close(s);
		if (e)
			return ctl_fail(c, "asking for status: %s", apr_strerror(e));
	}
	*out = json_loads(text, 0, &je);
	free(text);
	return *out ? CTL_OK : ctl_fail(c, "the daemon's status is no JSON: %s", je.text);
}

/* The promised fields of one object, null where the daemon left one out. */
static json_t *project(json_t *j, const char *const *keys)
{
	json_t *out = json_object();

	for (; *keys; keys++) {
		json_t *v = json_object_get(j, *keys);

		json_object_set(out, *keys, v ? v : json_null());
	}
	return out;
}

static json_t *project_list(json_t *list, const char *const *keys)
{
	json_t *out = json_array(), *v;
	size_t i;

	json_array_foreach (list, i, v)
		json_array_append_new(out, project(v, keys));
	return out;
}

static const char *const model_keys[] = {"name", "path", "arch", "n_ctx", "n_vocab", "numerics", "route", "bytes",
					 "state", NULL};
static const char *const models_keys[] = {"name", "path", "arch", "n_ctx", "n_vocab", "numerics", "route", "bytes", "state", "equal_bits",
					  "how", "sampling", "share_prefixes", "prompt_tokens", "cached_tokens", "pace", NULL};

static json_t *status_json(json_t *j)
{
	static const char *const top[] = {"version", "abi", "pid", "uptime_s", "state", "state_why", "backend", "models", "loading",
					  "memory", "sessions", "running", "queued", "kv", "graphs", NULL};
	static const char *const backend[] = {"name", "device", "why", NULL};
	static const char *const memory[] = {"purpose", "where", "bytes", "model", NULL};
	static const char *const kv[] = {"pages_total", "pages_free", NULL};
	static const char *const graphs[] = {"prefill", "decode", "bytes", "replays", NULL};
	json_t *out = project(j, top);

	json_object_set_new(out, "backend", project(json_object_get(j, "backend"), backend));
	json_object_set_new(out, "models", project_list(json_object_get(j, "models"), model_keys));
	json_object_set_new(out, "memory", project_list(json_object_get(j, "memory"), memory));
	json_object_set_new(out, "kv", project(json_object_get(j, "kv"), kv));
	json_object_set_new(out, "graphs", project(json_object_get(j, "graphs"), graphs));
	return out;
}

/* ---- the screen ------------------------------------------------------------------ */

static const char *str(json_t *j, const char *key)
{
	const char *s = json_string_value(json_object_get(j, key));

	return s ? s : "?";
}

static json_int_t num(json_t *j, const char *key)
{
	json_t *v = json_object_get(j, key);

	return json_is_real(v) ? (json_int_t)json_real_value(v) : json_integer_value(v);
}

static const char *duration(json_int_t s, char buf[48])
{
	if (s < 120)
		snprintf(buf, 48, "%d s", (int)s);
	else if (s < 7200)
		snprintf(buf, 48, "%d min", (int)(s / 60));
	else if (s < 172800)
		snprintf(buf, 48, "%d h %d min", (int)(s / 3600), (int)(s / 60 % 60));
	else
		snprintf(buf, 48, "%d days", (int)(s / 86400));
	return buf;
}

/* Its size, or what it is instead of ready: one that rests has given its memory back. */
static const char *model_size(json_t *m, char buf[32])
{
	const char *state = json_string_value(json_object_get(m, "state"));

	return state && strcmp(state, "ready") != 0 ? state : ctl_size((uint64_t)num(m, "bytes"), buf);
}

static void print_models(const struct ctl *c, json_t *models, json_t *loading)
{
	json_t *m;
	size_t i;
	char buf[32];
	int wide = 5;

	json_array_foreach (models, i, m)
		wide = (int)strlen(str(m, "name")) > wide ? (int)strlen(str(m, "name")) : wide;
	json_array_foreach (loading, i, m)
		wide = (int)json_string_length(m) > wide ? (int)json_string_length(m) : wide;
	if (wide > 40)
		wide = 40;
	printf("%s  %-*s %-8s %8s %8s %-8s %9s %s%s\n", ctl_dim(c), wide, "model", "arch", "context", "vocab", "route", "size",
	       "numerics", ctl_plain(c));
	json_array_foreach (models, i, m) {
		printf("  %-*.40s %-8s %8d %8d %-8s %9s %.16s\n", wide, str(m, "name"), str(m, "arch"), (int)num(m, "n_ctx"),
		       (int)num(m, "n_vocab"), str(m, "route"), model_size(m, buf), str(m, "numerics"));
		if (json_string_value(json_object_get(m, "how")))
			printf("  %-*s %s\n", wide, "", str(m, "how"));
	}
	json_array_foreach (loading, i, m)
		printf("  %-*.40s %-8s %8s %8s %-8s %9s\n", wide, json_string_value(m), "-", "-", "-", "-", "loading");
	if (!json_array_size(models) && !json_array_size(loading))
		printf("  none: load one with aprctl load FILE\n");
}

struct memory_row {
	json_int_t bytes;
	const char *purpose, *where, *model;
};

static int by_bytes(const void *a, const void *b)
{
	const struct memory_row *x = a, *y = b;

	return x->bytes > y->bytes ? -1 : x->bytes < y->bytes;
}

/* The largest lines of the memory table; the others as one. */
static void print_memory(const struct ctl *c, json_t *memory)
{
	size_t n = json_array_size(memory), i;
	struct memory_row *rows = calloc(n + 1, sizeof(*rows));
	uint64_t total = 0, rest = 0;
	char buf[32];
	json_t *m;

	if (!rows)
		return;
	json_array_foreach (memory, i, m) {
		rows[i] = (struct memory_row){num(m, "bytes"), str(m, "purpose"), str(m, "where"),
					      json_string_value(json_object_get(m, "model"))};
		total += (uint64_t)rows[i].bytes;
	}
	qsort(rows, n, sizeof(*rows), by_bytes);
	printf("%smemory%s   %s\n", ctl_bold(c), ctl_plain(c), ctl_size(total, buf));
	while (n && !rows[n - 1].bytes) /* says nothing */
		n--;
	for (i = 0; i < n; i++) {
		if (i >= 6 && n > 7)
			rest += (uint64_t)rows[i].bytes;
		else
			printf("  %9s  %-14s %s%s%s\n", ctl_size((uint64_t)rows[i].bytes, buf), rows[i].where, rows[i].purpose,
			       rows[i].model ? " of " : "", rows[i].model ? rows[i].model : "");
	}
	if (rest)
		printf("  %9s  %-14s %zu more: aprctl --json status\n", ctl_size(rest, buf), "", n - 6);
	free(rows);
}

/* The sessions that have had most tokens; the admin socket, over which this is asked, is none. */
static void print_sessions(const struct ctl *c, json_t *rows)
{
	size_t n = json_array_size(rows), shown = 0, others = 0, i;
	json_t *s;

	if (!n)
		return;
	json_array_foreach (rows, i, s) {
		json_t *other;
		size_t k, before = 0;

		json_array_foreach (rows, k, other)
			before += num(other, "tokens") > num(s, "tokens") || (num(other, "tokens") == num(s, "tokens") && k < i);
		if (before >= 4) {
			others++;
			continue;
		}
		if (!shown++)
			printf("%s  session    name                             uid     tokens%s\n", ctl_dim(c), ctl_plain(c));
		printf("  %-10lld %-28.31s %7lld %10lld\n", (long long)num(s, "session"), str(s, "name"),
		       (long long)num(s, "uid"), (long long)num(s, "tokens"));
	}
	if (others)
		printf("  and %zu more\n", others);
}

/* ": prefill 12, decode 3400, head 3411" */
static const char *by_kind(json_t *g, char *out, size_t n)
{
	static const char *const kinds[] = {"prefill", "decode", "head"};
	json_t *b;
	size_t len = 0, i, k;

	*out = 0;
	for (k = 0; k < 3; k++) {
		json_int_t sum = 0;
		bool any = false;

		json_array_foreach (json_object_get(g, "buckets"), i, b)
			if (!strcmp(str(b, "kind"), kinds[k])) {
				sum += num(b, "replays");
				any = true;
			}
		if (any && len < n)
			len += (size_t)snprintf(out + len, n - len, "%s %s %lld", len ? "," : ":", kinds[k], (long long)sum);
	}
	return out;
}

static void print_status(const struct ctl *c, json_t *j)
{
	json_t *backend = json_object_get(j, "backend"), *kv = json_object_get(j, "kv"), *g = json_object_get(j, "graphs");
	json_t *p = json_object_get(j, "polling"), *loop = json_object_get(j, "loop");
	const char *state = str(j, "state");
	bool good = !strcmp(state, "ready");
	char buf[48], size[32], kinds[160];
	json_int_t total = num(kv, "pages_total"), pages_free = num(kv, "pages_free");

	printf("%s%s%s%s   aprd %s, abi %s, pid %d, up %s\n", ctl_bold(c), good ? ctl_green(c) : ctl_red(c), state,
	       ctl_plain(c), str(j, "version"), str(j, "abi"), (int)num(j, "pid"), duration(num(j, "uptime_s"), buf));
	if (*str(j, "state_why") && *str(j, "state_why") != '?')
		printf("%swhy%s      %s\n", ctl_bold(c), ctl_plain(c), str(j, "state_why"));
	printf("%sbackend%s  %s on %s: %s\n", ctl_bold(c), ctl_plain(c), str(backend, "name"), str(backend, "device"),
	       str(backend, "why"));
	printf("%sload%s     %d sessions, %d running, %d queued; KV pages: %d of %d used\n", ctl_bold(c), ctl_plain(c),
	       (int)num(j, "sessions"), (int)num(j, "running"), (int)num(j, "queued"), (int)(total - pages_free), (int)total);
	print_models(c, json_object_get(j, "models"), json_object_get(j, "loading"));
	print_memory(c, json_object_get(j, "memory"));
	if (json_array_size(json_object_get(g, "prefill")) || json_array_size(json_object_get(g, "decode")))
		printf("%sgraphs%s   %d prefill, %d decode, %s, %lld replays%s\n", ctl_bold(c), ctl_plain(c),
		       (int)json_array_size(json_object_get(g, "prefill")), (int)json_array_size(json_object_get(g, "decode")),
		       ctl_size((uint64_t)num(g, "bytes"), size), (long long)num(g, "replays"), by_kind(g, kinds, sizeof(kinds)));
	print_sessions(c, json_object_get(j, "session_rows"));
	if (json_is_object(p) && !num(p, "poll_us") && !num(p, "spin_us"))
		printf("%spolling%s  off; %s\n", ctl_bold(c), ctl_plain(c), str(p, "why"));
	else if (json_is_object(p))
		printf("%spolling%s  on, poll_us %d, spin_us %d; %s\n", ctl_bold(c), ctl_plain(c), (int)num(p, "poll_us"),
		       (int)num(p, "spin_us"), str(p, "why"));
	if (json_is_object(loop))
		printf("%sloop%s     %s%s%s\n", ctl_bold(c), ctl_plain(c), str(loop, "name"), *str(loop, "why") ? ": " : "",
		       str(loop, "why"));
}

/* ---- who uses what ----------------------------------------------------------------- */

static const char *user_name(json_t *row, char buf[32])
{
	const struct passwd *p = getpwuid((uid_t)num(row, "uid"));

	if (p)
		snprintf(buf, 32, "%.31s", p->pw_name);
	else
		snprintf(buf, 32, "%lld", (long long)num(row, "uid"));
	return buf;
}

/* "12/64", or "12" where there is no limit. */
static const char *of(json_t *row, const char *used, const char *limit, char buf[48])
{
	json_int_t most = limit ? num(json_object_get(row, "limits"), limit) : 0;

	if (most)
		snprintf(buf, 48, "%lld/%lld", (long long)num(row, used), (long long)most);
	else
		snprintf(buf, 48, "%lld", (long long)num(row, used));
	return buf;
}

static void print_clients(const struct ctl *c, json_t *rows)
{
	char name[32], a[48], b[48], d[48], e[48], g[48];
	json_t *r;
	size_t i;

	printf("%s%-16s %-10s %6s %11s %13s %7s %16s %13s %12s %15s %8s%s\n", ctl_dim(c), "user", "tenant", "weight", "sessions",
	       "requests", "running", "waiting tokens", "KV pages", "tokens", "tokens/min", "refused", ctl_plain(c));
	json_array_foreach (rows, i, r)
		printf("%-16s %-10.10s %6lld %11s %13s %7lld %16s %13s %12lld %15s %8lld\n", user_name(r, name),
		       *str(r, "tenant") ? str(r, "tenant") : "-", (long long)num(r, "weight"),
		       of(r, "sessions", "sessions", a), of(r, "in_flight", "in_flight", b), (long long)num(r, "running"),
		       of(r, "queued_tokens", "queued_tokens", d), of(r, "kv_pages", "kv_pages", e),
		       (long long)num(r, "tokens"), of(r, "tokens_minute", "tokens_minute", g),
		       (long long)num(r, "refused"));
	if (!json_array_size(rows))
		printf("nobody yet\n");
}

static void draw(struct ctl *c, json_t *j, void *arg)
{
	json_t *rows = json_object_get(j, "clients");

	(void)arg;
	if (c->json) {
		json_t *out = status_json(j);

		if (c->clients)
			json_object_set_new(out, "clients", rows ? json_incref(rows) : json_array());
		ctl_print_json(c, out);
	} else if (c->clients) {
		print_clients(c, rows);
	} else {
		print_status(c, j);
	}
}

int cmd_status(struct ctl *c)
{
	if (c->n_args)
		return ctl_usage(c, "%s takes no words", c->verb->name);
	if (!c->watch)
		c->count = 1;
	return ctl_live(c, draw, NULL);
}

int cmd_clients(struct ctl *c)
{
	c->clients = true;
	return cmd_status(c);
}

static void print_sampling(json_t *models)
{
	json_t *m, *v;
	size_t i;
	const char *key;

	json_array_foreach (models, i, m) {
		printf("\n%s\n  file      %s\n  numerics  %s\n  sampling ", str(m, "name"), str(m, "path"), str(m, "numerics"));
		json_object_foreach (json_object_get(m, "sampling"), key, v) {
			if (json_is_number(v))
				printf(" %s %g", key, json_number_value(v));
			else if (json_is_string(v))
				printf(" %s %s", key, json_string_value(v));
		}
		printf("\n  prefixes  shared by %s; %lld of %lld prompt tokens were cached\n", str(m, "share_prefixes"),
		       (long long)num(m, "cached_tokens"), (long long)num(m, "prompt_tokens"));
	}
}

int cmd_models(struct ctl *c)
{
	json_t *j = NULL, *models;
	int status;

	if (c->n_args)
		return ctl_usage(c, "models takes no words");
	status = ctl_status(c, &j);
	if (status || !j)
		return status;
	models = json_object_get(j, "models");
	if (c->json) {
		status = ctl_print_json(c, json_pack("{s:o}", "models", project_list(models, models_keys)));
	} else {
		print_models(c, models, json_object_get(j, "loading"));
		print_sampling(models);
		status = ctl_flush(c, CTL_OK);
	}
	json_decref(j);
	return status;
}
