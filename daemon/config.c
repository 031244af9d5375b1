/* SPDX-License-Identifier: MIT */
/*
 * The configuration file: the settings of the command line and those that are too
 * many for it.
 *
 * Owns: the grammar (libconfuse) and its errors, with file and line. Does not own
 * defaults (options.c).
 */
#include "daemon/options.h"
#include <confuse.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FILE_MAX ((size_t)1 << 20) /* bytes: no list of settings is longer */

static struct {
	const char *file; /* sections that stand only once do not know it */
} reading;

static void tell(cfg_t *cfg, const char *fmt, va_list ap)
{
	char line[512];

	vsnprintf(line, sizeof(line), fmt, ap);
	if (cfg && cfg->line)
		log_error("%s:%d: %s", reading.file, cfg->line, line);
	else
		log_error("%s", line);
}

static int check_size(cfg_t *cfg, cfg_opt_t *opt)
{
	const char *s = cfg_opt_getnstr(opt, cfg_opt_size(opt) - 1);
	uint64_t bytes;

	if (s && *s && options_size(s, &bytes)) {
		cfg_error(cfg, "%s: not a size: %s", opt->name, s);
		return -1;
	}
	return 0;
}

static int check_count(cfg_t *cfg, cfg_opt_t *opt)
{
	long v = cfg_opt_getnint(opt, cfg_opt_size(opt) - 1);

	if (v < 0 || v > 0x7fffffff) {
		cfg_error(cfg, "%s: out of range: %ld", opt->name, v);
		return -1;
	}
	return 0;
}

static int check_mode(cfg_t *cfg, cfg_opt_t *opt)
{
	const char *s = cfg_opt_getnstr(opt, cfg_opt_size(opt) - 1);
	char *end;

	if (s && *s && (strtoul(s, &end, 8) > 0777 || *end)) {
		cfg_error(cfg, "%s: not an octal mode: %s", opt->name, s);
		return -1;
	}
	return 0;
}

static int check_group(cfg_t *cfg, cfg_opt_t *opt)
{
	const char *s = cfg_opt_getnstr(opt, cfg_opt_size(opt) - 1);

	if (s && *s && !getgrnam(s)) {
		cfg_error(cfg, "%s: no such group: %s", opt->name, s);
		return -1;
	}
	return 0;
}

static int check_share(cfg_t *cfg, cfg_opt_t *opt)
{
	const char *s = cfg_opt_getnstr(opt, cfg_opt_size(opt) - 1);
	enum share_mode mode;

	if (s && options_share(s, &mode)) {
		cfg_error(cfg, "%s: not one of user, all, session, none: %s", opt->name, s);
		return -1;
	}
	return 0;
}

/* A user's or group's number; a name that is not known, or what is no number: -EINVAL. */
static int id_of(const char *s, bool group, uint32_t *id)
{
	const struct group *g = group && s ? getgrnam(s) : NULL;
	const struct passwd *p = !group && s ? getpwnam(s) : NULL;
	char *end = NULL;

	if (g || p) {
		*id = g ? g->gr_gid : p->pw_uid;
		return 0;
	}
	if (!s || *s < '0' || *s > '9')
		return -EINVAL;
	errno = 0;
	unsigned long v = strtoul(s, &end, 10);
	if (errno || *end || v > UINT32_MAX)
		return -EINVAL;
	*id = (uint32_t)v;
	return 0;
}

static int check_who(cfg_t *cfg, cfg_opt_t *opt)
{
	const char *name = cfg_title(cfg_opt_getnsec(opt, cfg_opt_size(opt) - 1));
	uint32_t id;

	if (id_of(name, !strcmp(opt->name, "group"), &id)) {
		cfg_error(cfg, "%s: neither known here nor a number: \"%s\"", opt->name, name ? name : "");
		return -1;
	}
	return 0;
}

static int check_weight(cfg_t *cfg, cfg_opt_t *opt)
{
	long v = cfg_opt_getnint(opt, cfg_opt_size(opt) - 1);

	if (v < 1 || v > 1000) {
		cfg_error(cfg, "%s: not from 1 to 1000: %ld", opt->name, v);
		return -1;
	}
	return 0;
}

static int check_word(cfg_t *cfg, cfg_opt_t *opt)
{
	const char *s = cfg_opt_getnstr(opt, cfg_opt_size(opt) - 1);
	enum poll_mode mode;
	enum log_level level;

	if (!s || !*s)
		return 0;
	if (!strcmp(opt->name, "poll") ? options_poll(s, &mode) : log_parse_level(s, &level)) {
		cfg_error(cfg, "%s: not one of %s: %s", opt->name,
			  !strcmp(opt->name, "poll") ? "auto, always, never" : "warn, info, debug", s);
		return -1;
	}
	return 0;
}

static int check_gpu(cfg_t *cfg, cfg_opt_t *opt)
{
	const char *s = cfg_opt_getnstr(opt, cfg_opt_size(opt) - 1);
	struct options scratch;

	options_init(&scratch);
	if (s && *s && options_gpu_mem(&scratch, s)) {
		cfg_error(cfg, "%s: neither a size nor a percentage: %s", opt->name, s);
		return -1;
	}
	return 0;
}

static int check_fused(cfg_t *cfg, cfg_opt_t *opt)
{
	const char *s = cfg_opt_getnstr(opt, cfg_opt_size(opt) - 1);
	struct options scratch;

	options_init(&scratch);
	if (!s || options_fused_rows(&scratch, s)) {
		cfg_error(cfg, "%s: neither a number of rows nor auto: %s", opt->name, s ? s : "");
		return -1;
	}
	return 0;
}

/* Settings whose value is a name: what is not set stays unset, what is set to nothing is refused. */
static int check_name(cfg_t *cfg, cfg_opt_t *opt)
{
	static const struct { const char *name; int (*check)(const char *); const char *what; } names[] = {
		{ "socket", options_socket, "not a path that a socket can have" },
		{ "backend", options_backend, "not one of auto, cpu, cuda, cuda:N" },
		{ "route", options_route, "not auto, and not the name of a route" },
		{ "kv-type", options_kv_type, "not one of f16, f32, bf16" },
	};
	const char *s = cfg_opt_getnstr(opt, cfg_opt_size(opt) - 1);

	for (size_t i = 0; s && i < sizeof(names) / sizeof(names[0]); i++) {
		if (!strcmp(opt->name, names[i].name) && names[i].check(s)) {
			cfg_error(cfg, "%s: %s: \"%s\"", opt->name, names[i].what, s);
			return -1;
		}
	}
	return 0;
}

static int check_listener(cfg_t *cfg, cfg_opt_t *opt)
{
	const char *path = cfg_title(cfg_opt_getnsec(opt, cfg_opt_size(opt) - 1));

	if (!path || options_socket(path)) {
		cfg_error(cfg, "listener: not a path that a socket can have: \"%s\"", path ? path : "");
		return -1;
	}
	return 0;
}

static gid_t group_of(const char *s)
{
	struct group *g = s && *s ? getgrnam(s) : NULL;

	return g ? g->gr_gid : (gid_t)-1;
}

static int take_listener(struct options *o, cfg_t *sec)
{
	struct listener_option l = { NULL, NULL, group_of(cfg_getstr(sec, "group")),
				     (mode_t)strtoul(cfg_getstr(sec, "mode"), NULL, 8) };
	struct listener_option *all = reallocarray(o->listeners, o->n_listeners + 1, sizeof(*all));

	if (!all)
		return -ENOMEM;
	o->listeners = all;
	l.path = strdup(cfg_title(sec));
	l.tenant = strdup(cfg_getstr(sec, "tenant"));
	if (!l.path || !l.tenant) {
		free(l.path);
		free(l.tenant);
		return -ENOMEM;
	}
	o->listeners[o->n_listeners++] = l;
	return 0;
}

static void take_count(uint32_t *to, cfg_t *sec, const char *name)
{
	if (cfg_size(sec, name))
		*to = (uint32_t)cfg_getint(sec, name);
}

static void take_size(uint64_t *to, cfg_t *sec, const char *name)
{
	if (cfg_size(sec, name) && *cfg_getstr(sec, name))
		options_size(cfg_getstr(sec, name), to);
}

/* What the section sets; the rest stays. */
static void take_limits(struct limits *l, cfg_t *sec)
{
	uint32_t queued = (uint32_t)l->queued_tokens, minute = (uint32_t)l->tokens_minute;

	if (!sec)
		return;
	take_count(&l->connections, sec, "connections");
	take_count(&l->sessions, sec, "sessions");
	take_count(&l->in_flight, sec, "in-flight");
	take_count(&l->prio_max, sec, "prio-max");
	take_count(&l->weight, sec, "weight");
	take_count(&l->kv_pages, sec, "kv-pages");
	take_count(&queued, sec, "queued-tokens");
	take_count(&minute, sec, "tokens-minute");
	l->queued_tokens = queued;
	l->tokens_minute = minute;
	take_size(&l->region_bytes, sec, "region-bytes");
}

static int take_rules(struct options *o, cfg_t *cfg, const char *kind)
{
	for (unsigned i = 0; i < cfg_size(cfg, kind); i++) {
		cfg_t *sec = cfg_getnsec(cfg, kind, i);
		struct limit_rule r = { !strcmp(kind, "group"), 0, o->limits };
		struct limit_rule *all = reallocarray(o->rules, o->n_rules + 1, sizeof(*all));
		if (!all)
			return -ENOMEM;
		o->rules = all;
		if (id_of(cfg_title(sec), r.group, &r.id)) /* it was checked: gone since */
			return -EINVAL;
		take_limits(&r.l, sec);
		o->rules[o->n_rules++] = r;
	}
	return 0;
}

static int take_models(struct options *o, cfg_t *cfg)
{
	for (unsigned i = 0; i < cfg_size(cfg, "for-model"); i++) {
		cfg_t *sec = cfg_getnsec(cfg, "for-model", i);
		struct model_rule r = { strdup(cfg_title(sec)), o->share, o->keep_alive };
		struct model_rule *all = reallocarray(o->model_rules, o->n_model_rules + 1, sizeof(*all));
		if (all)
			o->model_rules = all;
		if (!all || !r.name) {
			free(r.name);
			return -ENOMEM;
		}
		if (cfg_size(sec, "share-prefixes"))
			options_share(cfg_getstr(sec, "share-prefixes"), &r.share);
		take_count(&r.keep_alive, sec, "keep-alive");
		o->model_rules[o->n_model_rules++] = r;
	}
	return 0;
}

static int take_string(char **slot, const char *value)
{
	return value && *value ? options_set(slot, value) : 0;
}

static int take(struct options *o, cfg_t *cfg)
{
	int e = 0;

	for (unsigned i = 0; i < cfg_size(cfg, "model") && !e; i++)
		e = options_add_model(o, cfg_getnstr(cfg, "model", i));
	for (unsigned i = 0; i < cfg_size(cfg, "listener") && !e; i++)
		e = take_listener(o, cfg_getnsec(cfg, "listener", i));
	if (!e)
		e = take_string(&o->socket, cfg_getstr(cfg, "socket"));
	if (!e)
		e = take_string(&o->backend, cfg_getstr(cfg, "backend"));
	if (!e)
		e = take_string(&o->route, cfg_getstr(cfg, "route"));
	if (!e)
		e = take_string(&o->kv_type, cfg_getstr(cfg, "kv-type"));
	if (!e)
		e = take_string(&o->cache_dir, cfg_getstr(cfg, "cache-dir"));
	if (e)
		return e;
	o->n_ctx = (uint32_t)cfg_getint(cfg, "context");
	o->threads = (uint32_t)cfg_getint(cfg, "threads");
	o->chunk = (uint32_t)cfg_getint(cfg, "chunk");
	if (*cfg_getstr(cfg, "kv-mem"))
		options_size(cfg_getstr(cfg, "kv-mem"), &o->kv_mem);
	if (*cfg_getstr(cfg, "gpu-mem"))
		options_gpu_mem(o, cfg_getstr(cfg, "gpu-mem"));
	options_fused_rows(o, cfg_getstr(cfg, "fused-rows"));
	o->no_graphs = cfg_getbool(cfg, "no-graphs");
	options_poll(cfg_getstr(cfg, "poll"), &o->poll);
	log_parse_level(cfg_getstr(cfg, "log-level"), &o->log_level);
	o->drain_ms = (uint32_t)cfg_getint(cfg, "drain-ms");
	o->hello_ms = (uint32_t)cfg_getint(cfg, "hello-ms");
	o->park_pages_ms = (uint32_t)cfg_getint(cfg, "park-pages-ms");
	o->park_end_ms = (uint32_t)cfg_getint(cfg, "park-end-ms");
	o->socket_mode = (mode_t)strtoul(cfg_getstr(cfg, "socket-mode"), NULL, 8);
	o->socket_group = group_of(cfg_getstr(cfg, "socket-group"));
	o->step_ms = (uint32_t)cfg_getint(cfg, "step-ms");
	options_share(cfg_getstr(cfg, "share-prefixes"), &o->share);
	o->keep_alive = (uint32_t)cfg_getint(cfg, "keep-alive");
	take_limits(&o->limits, cfg_getsec(cfg, "limits"));
	take_size(&o->limits.all_regions, cfg_getsec(cfg, "limits"), "all-regions");
	e = take_rules(o, cfg, "user");
	if (!e)
		e = take_rules(o, cfg, "group");
	return e ? e : take_models(o, cfg);
}

/* The whole file as text. 0, or -errno; what is wrong is told. */
static int slurp(const char *path, char **text)
{
	const char *why = NULL;
	struct stat st;
	size_t n = 0;
	int e = 0;
	/* O_NONBLOCK: a pipe without a writer is refused, not waited for */
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);

	*text = NULL;
	if (fd < 0 || fstat(fd, &st))
		e = -errno;
	else if (!S_ISREG(st.st_mode))
		e = -EINVAL, why = "not a regular file";
	else if (!(*text = malloc(FILE_MAX + 2)))
		e = -ENOMEM;
	while (!e && n <= FILE_MAX) {
		ssize_t got = read(fd, *text + n, FILE_MAX + 1 - n);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			e = -errno;
		if (got <= 0)
			break;
		n += (size_t)got;
	}
	if (!e && n > FILE_MAX)
		e = -EFBIG, why = "more than 1 MiB: not a configuration file";
	else if (*text && !e && memchr(*text, 0, n))
		e = -EINVAL, why = "holds a NUL byte: not a text file";
	if (fd >= 0)
		close(fd);
	if (e || !*text) {
		log_error("%s: %s", path, why ? why : strerror(-e));
		free(*text);
		*text = NULL;
	} else {
		(*text)[n] = '\0';
	}
	return e;
}

#define EACH_LIMIT \
	CFG_INT("connections", 0, CFGF_NODEFAULT), CFG_INT("sessions", 0, CFGF_NODEFAULT), \
		CFG_INT("in-flight", 0, CFGF_NODEFAULT), CFG_STR("region-bytes", NULL, CFGF_NODEFAULT), \
		CFG_INT("prio-max", 0, CFGF_NODEFAULT), CFG_INT("weight", 0, CFGF_NODEFAULT), \
		CFG_INT("kv-pages", 0, CFGF_NODEFAULT), CFG_INT("queued-tokens", 0, CFGF_NODEFAULT), \
		CFG_INT("tokens-minute", 0, CFGF_NODEFAULT)

static void check_limits(cfg_t *cfg, const char *section)
{
	static const char *const counts[] = { "connections", "sessions", "in-flight", "prio-max",
					      "kv-pages",    "queued-tokens", "tokens-minute" };
	char path[64];

	for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
		snprintf(path, sizeof(path), "%s|%s", section, counts[i]);
		cfg_set_validate_func(cfg, path, check_count);
	}
	snprintf(path, sizeof(path), "%s|region-bytes", section);
	cfg_set_validate_func(cfg, path, check_size);
	snprintf(path, sizeof(path), "%s|weight", section);
	cfg_set_validate_func(cfg, path, check_weight);
}

int config_read(struct options *o)
{
	/* what is not set stays: the defaults are options.c's, and a user's or group's those of limits */
	cfg_opt_t limits[] = { EACH_LIMIT, CFG_STR("all-regions", NULL, CFGF_NODEFAULT), CFG_END() };
	cfg_opt_t rule[] = { EACH_LIMIT, CFG_END() };
	cfg_opt_t model[] = { CFG_STR("share-prefixes", NULL, CFGF_NODEFAULT), CFG_INT("keep-alive", 0, CFGF_NODEFAULT),
			      CFG_END() };
	cfg_opt_t listener[] = {
		CFG_STR("tenant", "", CFGF_NONE),
		CFG_STR("group", "", CFGF_NONE),
		CFG_STR("mode", "0660", CFGF_NONE),
		CFG_END()
	};
	cfg_opt_t opts[] = {
		CFG_STR_LIST("model", "{}", CFGF_NONE),
		CFG_STR("socket", "", CFGF_NONE),
		CFG_STR("socket-mode", "0660", CFGF_NONE),
		CFG_STR("socket-group", "", CFGF_NONE),
		CFG_STR("backend", "", CFGF_NONE),
		CFG_INT("context", 0, CFGF_NONE),
		CFG_INT("threads", 0, CFGF_NONE),
		CFG_INT("chunk", 0, CFGF_NONE),
		CFG_STR("route", "", CFGF_NONE),
		CFG_STR("kv-type", "", CFGF_NONE),
		CFG_STR("kv-mem", "", CFGF_NONE),
		CFG_STR("gpu-mem", "", CFGF_NONE),
		CFG_STR("fused-rows", "auto", CFGF_NONE),
		CFG_BOOL("no-graphs", cfg_false, CFGF_NONE),
		CFG_STR("poll", "auto", CFGF_NONE),
		CFG_STR("log-level", "info", CFGF_NONE),
		CFG_STR("cache-dir", "", CFGF_NONE),
		CFG_INT("drain-ms", (long)o->drain_ms, CFGF_NONE),
		CFG_INT("hello-ms", (long)o->hello_ms, CFGF_NONE),
		CFG_INT("park-pages-ms", (long)o->park_pages_ms, CFGF_NONE),
		CFG_INT("park-end-ms", (long)o->park_end_ms, CFGF_NONE),
		CFG_INT("step-ms", (long)o->step_ms, CFGF_NONE),
		CFG_INT("keep-alive", (long)o->keep_alive, CFGF_NONE),
		CFG_STR("share-prefixes", "user", CFGF_NONE),
		CFG_SEC("limits", limits, CFGF_NONE),
		CFG_SEC("user", rule, CFGF_MULTI | CFGF_TITLE | CFGF_NO_TITLE_DUPES),
		CFG_SEC("group", rule, CFGF_MULTI | CFGF_TITLE | CFGF_NO_TITLE_DUPES),
		CFG_SEC("for-model", model, CFGF_MULTI | CFGF_TITLE | CFGF_NO_TITLE_DUPES),
		CFG_SEC("listener", listener, CFGF_MULTI | CFGF_TITLE | CFGF_NO_TITLE_DUPES),
		CFG_END()
	};
	static const char *const counts[] = { "context", "threads", "chunk", "drain-ms", "hello-ms",
					      "park-pages-ms", "park-end-ms", "step-ms", "keep-alive", "for-model|keep-alive" };
	static const char *const sizes[] = { "kv-mem", "limits|all-regions" };
	static const char *const names[] = { "socket", "backend", "route", "kv-type" };
	char *text;
	int e = slurp(o->config, &text);

	if (e)
		return e;
	cfg_t *cfg = cfg_init(opts, CFGF_NONE);
	if (!cfg) {
		free(text);
		log_error("%s: no memory to read it", o->config);
		return -ENOMEM;
	}
	cfg_set_error_function(cfg, tell);
	for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
		cfg_set_validate_func(cfg, counts[i], check_count);
	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
		cfg_set_validate_func(cfg, sizes[i], check_size);
	for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		cfg_set_validate_func(cfg, names[i], check_name);
	check_limits(cfg, "limits");
	check_limits(cfg, "user");
	check_limits(cfg, "group");
	cfg_set_validate_func(cfg, "user", check_who);
	cfg_set_validate_func(cfg, "group", check_who);
	cfg_set_validate_func(cfg, "share-prefixes", check_share);
	cfg_set_validate_func(cfg, "for-model|share-prefixes", check_share);
	cfg_set_validate_func(cfg, "listener", check_listener);
	cfg_set_validate_func(cfg, "gpu-mem", check_gpu);
	cfg_set_validate_func(cfg, "fused-rows", check_fused);
	cfg_set_validate_func(cfg, "socket-mode", check_mode);
	cfg_set_validate_func(cfg, "listener|mode", check_mode);
	cfg_set_validate_func(cfg, "socket-group", check_group);
	cfg_set_validate_func(cfg, "listener|group", check_group);
	cfg_set_validate_func(cfg, "poll", check_word);
	cfg_set_validate_func(cfg, "log-level", check_word);

	reading.file = o->config;
	if (cfg_parse_buf(cfg, text) != CFG_SUCCESS) {
		e = -EINVAL;
	} else {
		e = take(o, cfg);
		if (e)
			log_error("%s: %s", o->config,
				  e == -EINVAL ? "a model entry is not [NAME=]FILE" : strerror(-e));
	}
	cfg_free(cfg);
	free(text);
	return e;
}
