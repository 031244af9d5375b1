/* SPDX-License-Identifier: MIT */
/* Owns: the option table and its reading. See options.h. */
#include "daemon/options.h"
#include "daemon/sockets.h"
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

enum {
	OPT_ROUTE = 256,
	OPT_KV_TYPE,
	OPT_KV_MEM,
	OPT_GPU_MEM,
	OPT_FUSED,
	OPT_NO_GRAPHS,
	OPT_POLL,
	OPT_CONFIG,
	OPT_CHECK
};

const struct option_row option_table[] = {
	{ 'm', "model", "[NAME=]FILE", "serve this GGUF file; may be given several times, the first is the default" },
	{ 's', "socket", "SOCKET", "listen here" },
	{ 'b', "backend", "NAME", "auto, cpu, cuda or cuda:N" },
	{ 'c', "context", "TOKENS", "longest context; the model's own, at most 8192, unless given" },
	{ 't', "threads", "N", "compute threads; all usable CPUs unless given" },
	{ OPT_ROUTE, "route", "NAME", "how weights are read by prefill; f32 is the exact mode" },
	{ OPT_KV_TYPE, "kv-type", "TYPE", "f16, f32 or bf16" },
	{ OPT_KV_MEM, "kv-mem", "SIZE", "memory for keys and values, a model" },
	{ OPT_GPU_MEM, "gpu-mem", "SIZE|N%", "device memory to take" },
	{ OPT_FUSED, "fused-rows", "N|auto", "prompt rows up to which the fused kernel runs; auto is as measured" },
	{ OPT_NO_GRAPHS, "no-graphs", NULL, "launch every kernel by itself" },
	{ OPT_POLL, "poll", "WHEN", "auto, always or never: spin on the rings of active sessions" },
	{ OPT_CONFIG, "config", "FILE", "read settings from FILE; the command line goes over it" },
	{ OPT_CHECK, "check-config", NULL, "check the settings, say what is wrong, and end" },
	{ 'v', "verbose", NULL, "log more" },
	{ 'V', "version", NULL, "print the version and end" },
	{ 'h', "help", NULL, "print this and end" },
};
const size_t option_rows = sizeof(option_table) / sizeof(option_table[0]);

void options_init(struct options *o)
{
	memset(o, 0, sizeof(*o));
	o->fused_rows = -1;
	o->log_level = LOG_LEVEL_INFO;
	o->drain_ms = 5000;
	o->hello_ms = 10000;
	o->park_pages_ms = 1000;
	o->park_end_ms = 300000;
	o->limits = (struct limits){ .connections = 1024, .sessions = 1024, .in_flight = 4096,
				     .region_bytes = 512u << 20, .all_regions = UINT64_C(4) << 30, .prio_max = 2, .weight = 1 };
	o->socket_mode = 0660;
	o->socket_group = (gid_t)-1;
}

void options_free(struct options *o)
{
	for (size_t i = 0; i < o->n_models; i++) {
		free(o->models[i].name);
		free(o->models[i].path);
	}
	free(o->models);
	for (size_t i = 0; i < o->n_listeners; i++) {
		free(o->listeners[i].path);
		free(o->listeners[i].tenant);
	}
	free(o->listeners);
	for (size_t i = 0; i < o->n_model_rules; i++)
		free(o->model_rules[i].name);
	free(o->model_rules);
	free(o->rules);
	free(o->socket);
	free(o->backend);
	free(o->route);
	free(o->kv_type);
	free(o->cache_dir);
	free(o->config);
	memset(o, 0, sizeof(*o));
}

void options_help(FILE *out)
{
	fputs("usage: aprd -m [NAME=]FILE.gguf [-m ...] [options]\n\n", out);
	for (size_t i = 0; i < option_rows; i++) {
		const struct option_row *r = &option_table[i];
		char left[48];

		if (r->val < 256)
			snprintf(left, sizeof(left), "-%c, --%s%s%s", r->val, r->name, r->arg ? " " : "",
				 r->arg ? r->arg : "");
		else
			snprintf(left, sizeof(left), "    --%s%s%s", r->name, r->arg ? " " : "", r->arg ? r->arg : "");
		fprintf(out, "  %-26s %s\n", left, r->help);
	}
	fputs("\nSee aprd(8).\n", out);
}

int options_set(char **slot, const char *value)
{
	char *copy = strdup(value);

	if (!copy)
		return -ENOMEM;
	free(*slot);
	*slot = copy;
	return 0;
}

/* The file's own name without folder, ".gguf" and the number of a part. */
static char *name_of(const char *path)
{
	const char *slash = strrchr(path, '/');
	char *name = strdup(slash ? slash + 1 : path);

	if (!name)
		return NULL;
	size_t n = strlen(name);
	if (n > 5 && !strcasecmp(name + n - 5, ".gguf"))
		name[n -= 5] = '\0';
	/* "-00001-of-00003" */
	const char *part = n > 15 ? name + n - 15 : "";
	if (part[0] == '-' && strspn(part + 1, "0123456789") == 5 && !strncmp(part + 6, "-of-", 4) &&
	    strspn(part + 10, "0123456789") == 5)
		name[n - 15] = '\0';
	return name;
}

int options_add_model(struct options *o, const char *arg)
{
	const char *eq = strchr(arg, '='), *slash = strchr(arg, '/');
	bool named = eq && (!slash || eq < slash); /* a '=' after the first '/' belongs to the path */
	const char *path = named ? eq + 1 : arg;
	struct model_option m;

	if (!*path || (named && (eq == arg || eq - arg > 63)))
		return -EINVAL;
	m.name = named ? strndup(arg, (size_t)(eq - arg)) : name_of(path);
	m.path = strdup(path);
	struct model_option *all = reallocarray(o->models, o->n_models + 1, sizeof(*all));
	if (all)
		o->models = all;
	if (!all || !m.name || !m.path) {
		free(m.name);
		free(m.path);
		return -ENOMEM;
	}
	if (strlen(m.name) > 63)
		m.name[63] = '\0'; /* the wire's rows hold 63 bytes */
	o->models[o->n_models++] = m;
	return 0;
}

int options_size(const char *s, uint64_t *bytes)
{
	char *end;
	unsigned shift = 0;

	if (*s < '0' || *s > '9')
		return -EINVAL;
	errno = 0;
	uint64_t v = strtoull(s, &end, 10);
	if (errno)
		return -EINVAL;
	if (*end) {
		const char *units = "KMGT", *u = strchr(units, *end & ~0x20);
		if (!u || (end[1] && strcasecmp(end + 1, "iB") && strcasecmp(end + 1, "B")))
			return -EINVAL;
		shift = 10u * (unsigned)(u - units + 1);
	}
	if (v > UINT64_MAX >> shift)
		return -EINVAL;
	*bytes = v << shift;
	return 0;
}

int options_gpu_mem(struct options *o, const char *s)
{
	char *end;
	unsigned long v = strtoul(s, &end, 10);

	if (end != s && !strcmp(end, "%")) {
		if (v < 1 || v > 100 || *s == '-')
			return -EINVAL;
		o->gpu_percent = (uint32_t)v;
		o->gpu_mem = 0;
		return 0;
	}
	o->gpu_percent = 0;
	return options_size(s, &o->gpu_mem);
}

int options_poll(const char *s, enum poll_mode *mode)
{
	static const char *const names[] = { "auto", "always", "never" };

	for (int i = 0; i < 3; i++) {
		if (!strcmp(s, names[i])) {
			*mode = (enum poll_mode)i;
			return 0;
		}
	}
	return -EINVAL;
}

const char *const share_names[] = { "user", "all", "session", "none" };

int options_share(const char *s, enum share_mode *mode)
{
	for (int i = 0; i < 4; i++) {
		if (!strcmp(s, share_names[i])) {
			*mode = (enum share_mode)i;
			return 0;
		}
	}
	return -EINVAL;
}

const struct limits *options_limits(const struct options *o, uid_t uid, const gid_t *groups, size_t n)
{
	for (size_t i = 0; i < o->n_rules; i++)
		if (!o->rules[i].group && o->rules[i].id == uid)
			return &o->rules[i].l;
	for (size_t i = 0; i < o->n_rules; i++)
		for (size_t k = 0; o->rules[i].group && k < n; k++)
			if (o->rules[i].id == groups[k])
				return &o->rules[i].l;
	return &o->limits;
}

struct model_rule options_model(const struct options *o, const char *model)
{
	for (size_t i = 0; i < o->n_model_rules; i++)
		if (!strcmp(o->model_rules[i].name, model))
			return o->model_rules[i];
	return (struct model_rule){ NULL, o->share, o->keep_alive };
}

static int one_of(const char *s, const char *const *names)
{
	while (*names && strcmp(s, *names) != 0)
		names++;
	return *names ? 0 : -EINVAL;
}

int options_backend(const char *s)
{
	static const char *const names[] = { "auto", "cpu", "cuda", NULL };
	size_t digits = strncmp(s, "cuda:", 5) ? 0 : strspn(s + 5, "0123456789");

	return digits && digits < 5 && !s[5 + digits] && strtoul(s + 5, NULL, 10) < 1024 ? 0 : one_of(s, names);
}

int options_route(const char *s)
{
	/* of enum apr_route_id; which of them a backend has is its own matter, when it starts */
	static const char *const names[] = { "auto", "f32", "quant", "fp16", "fp8", "fp8-fast", "fused", "int16", NULL };

	return one_of(s, names);
}

int options_kv_type(const char *s)
{
	static const char *const names[] = { "f16", "f32", "bf16", NULL };

	return one_of(s, names);
}

int options_socket(const char *s)
{
	char admin[sizeof(((struct sockaddr_un *)0)->sun_path)];

	if (!*s)
		return -EINVAL;
	return strlen(s) >= sizeof(admin) || sockets_admin_path(s, admin, sizeof(admin)) ? -ENAMETOOLONG : 0;
}

static int number(const char *s, uint32_t max, uint32_t *out)
{
	char *end;

	if (*s < '0' || *s > '9')
		return -EINVAL;
	errno = 0;
	unsigned long long v = strtoull(s, &end, 10);
	if (errno || *end || v > max)
		return -EINVAL;
	*out = (uint32_t)v;
	return 0;
}

static int set_sound(char **slot, const char *arg, int (*check)(const char *))
{
	int e = check(arg);

	return e ? e : options_set(slot, arg);
}

int options_fused_rows(struct options *o, const char *s)
{
	uint32_t n = 0;
	int e = strcmp(s, "auto") ? number(s, 65536, &n) : 0;

	if (!e)
		o->fused_rows = strcmp(s, "auto") ? (int32_t)n : -1;
	return e;
}

/* One option of the command line. 0 or -errno. */
static int apply(struct options *o, int val, const char *arg)
{
	switch (val) {
	case 'm': return options_add_model(o, arg);
	case 's': return set_sound(&o->socket, arg, options_socket);
	case 'b': return set_sound(&o->backend, arg, options_backend);
	case 'c': return number(arg, UINT32_MAX - 1, &o->n_ctx);
	case 't': return number(arg, 4096, &o->threads);
	case OPT_ROUTE: return set_sound(&o->route, arg, options_route);
	case OPT_KV_TYPE: return set_sound(&o->kv_type, arg, options_kv_type);
	case OPT_KV_MEM: return options_size(arg, &o->kv_mem);
	case OPT_GPU_MEM: return options_gpu_mem(o, arg);
	case OPT_FUSED: return options_fused_rows(o, arg);
	case OPT_NO_GRAPHS: o->no_graphs = true; return 0;
	case OPT_POLL: return options_poll(arg, &o->poll);
	case OPT_CHECK: o->check_config = true; return 0;
	case 'v': o->verbose = true; o->log_level = LOG_LEVEL_DEBUG; return 0;
	default: return 0;
	}
}

struct tables {
	char shorts[64];
	struct option longs[32];
};

static void make_tables(struct tables *t)
{
	size_t s = 0;

	memset(t, 0, sizeof(*t));
	t->shorts[s++] = ':'; /* our own words for what is wrong */
	for (size_t i = 0; i < option_rows; i++) {
		const struct option_row *r = &option_table[i];
		t->longs[i] = (struct option){ r->name, r->arg ? required_argument : no_argument, NULL, r->val };
		if (r->val < 256) {
			t->shorts[s++] = (char)r->val;
			if (r->arg)
				t->shorts[s++] = ':';
		}
	}
}

static int usage(const char *what, const char *which)
{
	fprintf(stderr, "aprd: %s%s%s; see aprd --help\n", what, *which ? " " : "", which);
	return 2;
}

/* apply_all false: only what must be known before the file is read. */
static int pass(struct options *o, int argc, char **argv, bool apply_all)
{
	struct tables t;
	int val, at = 0;

	make_tables(&t);
	optind = 0; /* starts anew in glibc */
	while ((val = getopt_long(argc, argv, t.shorts, t.longs, &at)) != -1) {
		int e = 0;
		if (val == '?' || val == ':')
			return usage(val == ':' ? "an argument is missing after" : "unknown option", argv[optind - 1]);
		if (val == 'h') {
			options_help(stdout);
			return 1;
		}
		if (val == 'V') {
			puts("aprd " APR_VERSION);
			return 1;
		}
		if (val == OPT_CONFIG)
			e = options_set(&o->config, optarg);
		else if (apply_all)
			e = apply(o, val, optarg);
		if (e == -ENOMEM) {
			log_error("no memory for the options");
			return e;
		}
		if (e) {
			char what[128];
			for (size_t i = 0; i < option_rows; i++)
				if (option_table[i].val == val)
					snprintf(what, sizeof(what), "not a value for --%s (%s):", option_table[i].name,
						 option_table[i].arg);
			return usage(what, *optarg ? optarg : "''");
		}
	}
	if (optind < argc)
		return usage("what is this?", argv[optind]);
	return 0;
}

int options_parse(struct options *o, int argc, char **argv)
{
	int e = pass(o, argc, argv, false);

	if (e)
		return e;
	if (o->config) {
		e = config_read(o);
		if (e)
			return e;
	}
	/* models of the command line replace those of the file */
	struct model_option *file_models = o->models;
	size_t n_file = o->n_models;
	o->models = NULL;
	o->n_models = 0;
	e = pass(o, argc, argv, true);
	if (!o->n_models) {
		free(o->models);
		o->models = file_models;
		o->n_models = n_file;
	} else {
		for (size_t i = 0; i < n_file; i++) {
			free(file_models[i].name);
			free(file_models[i].path);
		}
		free(file_models);
	}
	if (e)
		return e;
	for (size_t i = 0; o->socket && i < o->n_listeners; i++)
		if (!strcmp(o->listeners[i].path, o->socket))
			return usage("a listener of the file has the path of -s, --socket:", o->socket);
	for (size_t i = 0; i < o->n_models; i++)
		for (size_t j = 0; j < i; j++)
			if (!strcmp(o->models[i].name, o->models[j].name))
				return usage("two models are named", o->models[i].name);
	return 0;
}
