/* SPDX-License-Identifier: MIT */
/* Owns: the command line, and parsers of values. The table is settings.c's. See options.h. */
#include "daemon/options.h"
#include "daemon/sockets.h"
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

enum { LONG_ONLY = 256 }; /* getopt's value of a row without a letter: this and its number */

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

		if (!(r->in & IN_LINE))
			continue;
		snprintf(left, sizeof(left), r->letter ? "-%c, --%s%s%s" : "%c   --%s%s%s", r->letter ? r->letter : ' ', r->name,
			 r->arg ? " " : "", r->arg ? r->arg : "");
		fprintf(out, "  %-26s %s\n", left, r->help);
	}
	fputs("\nOnly in the file:", out);
	for (size_t i = 0; i < option_rows; i++)
		if (!(option_table[i].in & IN_LINE))
			fprintf(out, " %s", option_table[i].name);
	fputs(".\nSee aprd(8).\n", out);
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

int options_socket(const char *s)
{
	char admin[sizeof(((struct sockaddr_un *)0)->sun_path)];

	if (!*s)
		return -EINVAL;
	return strlen(s) >= sizeof(admin) || sockets_admin_path(s, admin, sizeof(admin)) ? -ENAMETOOLONG : 0;
}

struct tables {
	char shorts[2 * OPTION_ROWS_MAX + 2];
	struct option longs[OPTION_ROWS_MAX + 1];
};

static void make_tables(struct tables *t)
{
	size_t s = 0, n = 0;

	memset(t, 0, sizeof(*t));
	t->shorts[s++] = ':'; /* our own words for what is wrong */
	for (size_t i = 0; i < option_rows; i++) {
		const struct option_row *r = &option_table[i];
		if (!(r->in & IN_LINE))
			continue;
		t->longs[n++] = (struct option){ r->name, r->arg ? required_argument : no_argument, NULL, LONG_ONLY + (int)i };
		if (r->letter) {
			t->shorts[s++] = r->letter;
			if (r->arg)
				t->shorts[s++] = ':';
		}
	}
}

static const struct option_row *row_of(int val)
{
	if (val >= LONG_ONLY)
		return &option_table[val - LONG_ONLY];
	for (size_t i = 0; i < option_rows; i++)
		if (option_table[i].letter == val)
			return &option_table[i];
	return NULL;
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
		const struct option_row *r = row_of(val);
		if (r->letter == 'h') {
			options_help(stdout);
			return 1;
		}
		if (r->letter == 'V') {
			puts("aprd " APR_VERSION);
			return 1;
		}
		if (apply_all || !strcmp(r->name, "config"))
			e = option_set(o, r, optarg, FROM_FLAG);
		if (e == -ENOMEM) {
			log_error("no memory for the options");
			return e;
		}
		if (e) {
			char what[192], want[128];
			option_expects(r, want, sizeof(want));
			snprintf(what, sizeof(what), "--%s: expected %s, not", r->name, want);
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
	const char *env = getenv("APRD_SOCKET"); /* its place: sockets.c */
	if (!o->socket && !o->n_listeners && env && *env)
		o->from[option_named("socket") - option_table] = FROM_ENVIRONMENT;
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
