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
enum { STRUCK_MAX = 100 };         /* lines that the grammar could not read, and that are told */

static struct {
	const char *file; /* sections that stand only once do not know it */
	int told;         /* the mistakes up to this line are told */
	int last;         /* line of the last one */
	unsigned mistakes;
} reading;

static void tell(cfg_t *cfg, const char *fmt, va_list ap)
{
	char line[512];

	reading.mistakes++;
	if (cfg && cfg->line && cfg->line <= reading.told)
		return;
	vsnprintf(line, sizeof(line), fmt, ap);
	if (cfg && cfg->line)
		log_error("%s:%d: %s%s", reading.file, cfg->line, line,
			  strncmp(line, "no such option", 14) ? "" : ": see CONFIGURATION in aprd(8) for those there are");
	else
		log_error("%s: %s", reading.file, line);
	reading.last = cfg ? cfg->line : 0;
}

/* What checks find is counted and told, and the file is read on: every mistake is told at once. */

/* A setting outside sections, and those of sections that are named as one of the table. */
static int check_row(cfg_t *cfg, cfg_opt_t *opt)
{
	const struct option_row *r = option_named(opt->name);
	const char *s = cfg_opt_getnstr(opt, cfg_opt_size(opt) - 1);
	struct options scratch;
	char want[128];

	options_init(&scratch);
	int e = s ? option_set(&scratch, r, s, FROM_FILE) : -EINVAL;
	if (e == -ENOMEM) {
		cfg_error(cfg, "%s: no memory", opt->name);
	} else if (e) {
		option_expects(r, want, sizeof(want));
		cfg_error(cfg, "%s: expected %s, not \"%s\"", opt->name, want, s ? s : "");
	}
	options_free(&scratch);
	return 0;
}

static int check_like(cfg_t *cfg, cfg_opt_t *opt, const char *name)
{
	const struct option_row *r = option_named(name);
	const char *s = cfg_opt_getnstr(opt, cfg_opt_size(opt) - 1);
	struct options scratch;
	char want[128];

	options_init(&scratch);
	if (s && *s && option_set(&scratch, r, s, FROM_FILE)) {
		option_expects(r, want, sizeof(want));
		cfg_error(cfg, "%s: expected %s, not \"%s\"", opt->name, want, s);
	}
	options_free(&scratch);
	return 0;
}

static int check_size(cfg_t *cfg, cfg_opt_t *opt)
{
	return check_like(cfg, opt, "kv-mem");
}

static int check_mode(cfg_t *cfg, cfg_opt_t *opt)
{
	return check_like(cfg, opt, "socket-mode");
}

static int check_group(cfg_t *cfg, cfg_opt_t *opt)
{
	return check_like(cfg, opt, "socket-group");
}

static int check_count(cfg_t *cfg, cfg_opt_t *opt)
{
	long v = cfg_opt_getnint(opt, cfg_opt_size(opt) - 1);

	if (v < 0 || v > 0x7fffffff) {
		cfg_error(cfg, "%s: expected a number from 0 to 2147483647, not %ld", opt->name, v);
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

	/* asked when the section is whole: the line is its last one */
	if (id_of(name, !strcmp(opt->name, "group"), &id))
		cfg_error(cfg, "%s: expected a name that is known here, or a number, not \"%s\" (of the section that ends here)",
			  opt->name, name ? name : "");
	return 0;
}

static int check_weight(cfg_t *cfg, cfg_opt_t *opt)
{
	long v = cfg_opt_getnint(opt, cfg_opt_size(opt) - 1);

	if (v < 1 || v > 1000) {
		cfg_error(cfg, "%s: expected a number from 1 to 1000, not %ld", opt->name, v);
	}
	return 0;
}

static int check_listener(cfg_t *cfg, cfg_opt_t *opt)
{
	const char *path = cfg_title(cfg_opt_getnsec(opt, cfg_opt_size(opt) - 1));

	if (!path || options_socket(path)) {
		cfg_error(cfg, "listener: expected a path that a socket can have, not \"%s\"", path ? path : "");
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

static int take(struct options *o, cfg_t *cfg)
{
	int e = 0;

	for (size_t i = 0; i < option_rows && !e; i++) {
		const struct option_row *r = &option_table[i];
		unsigned n = r->in & IN_FILE ? cfg_size(cfg, r->name) : 0;
		for (unsigned k = 0; k < n && !e; k++)
			e = option_set(o, r, cfg_getnstr(cfg, r->name, k), FROM_FILE);
	}
	for (unsigned i = 0; i < cfg_size(cfg, "listener") && !e; i++)
		e = take_listener(o, cfg_getnsec(cfg, "listener", i));
	if (e)
		return e;
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

static void set_checks(cfg_t *cfg)
{
	for (size_t i = 0; i < option_rows; i++)
		if (option_table[i].in & IN_FILE)
			cfg_set_validate_func(cfg, option_table[i].name, check_row);
	check_limits(cfg, "limits");
	check_limits(cfg, "user");
	check_limits(cfg, "group");
	cfg_set_validate_func(cfg, "limits|all-regions", check_size);
	cfg_set_validate_func(cfg, "user", check_who);
	cfg_set_validate_func(cfg, "group", check_who);
	cfg_set_validate_func(cfg, "for-model|share-prefixes", check_row);
	cfg_set_validate_func(cfg, "for-model|keep-alive", check_count);
	cfg_set_validate_func(cfg, "listener", check_listener);
	cfg_set_validate_func(cfg, "listener|mode", check_mode);
	cfg_set_validate_func(cfg, "listener|group", check_group);
}

/* The grammar stops at a line that it cannot read: that line goes, and the section that it opens, so that the rest is
 * read, too. False: there is no such line. */
static bool strike(char *text, int line)
{
	char *at = text;
	int deep = 0;

	for (int i = 1; at && i < line; i++)
		at = strchr(at, '\n') ? strchr(at, '\n') + 1 : NULL;
	if (!at || !*at)
		return false;
	for (; *at && (*at != '\n' || deep > 0); at++) {
		deep += (*at == '{') - (*at == '}');
		if (*at != '\n')
			*at = ' ';
	}
	return true;
}

/* One pass over the text. -EINVAL: mistakes, told. */
static int parse(struct options *o, cfg_opt_t *opts, char *text)
{
	cfg_t *cfg = cfg_init(opts, CFGF_NONE);
	int e = 0;

	if (!cfg)
		return -ENOMEM;
	cfg_set_error_function(cfg, tell);
	set_checks(cfg);
	reading.mistakes = 0;
	bool whole = cfg_parse_buf(cfg, text) == CFG_SUCCESS;
	if (!whole && reading.last > reading.told && strike(text, reading.last))
		e = -EAGAIN;
	else if (!whole && !reading.mistakes) /* libconfuse tells why, but for memory */
		e = -ENOMEM;
	else if (!whole || reading.mistakes)
		e = -EINVAL;
	else
		e = take(o, cfg);
	cfg_free(cfg);
	return e;
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
	cfg_opt_t sections[] = {
		CFG_SEC("limits", limits, CFGF_NONE),
		CFG_SEC("user", rule, CFGF_MULTI | CFGF_TITLE | CFGF_NO_TITLE_DUPES),
		CFG_SEC("group", rule, CFGF_MULTI | CFGF_TITLE | CFGF_NO_TITLE_DUPES),
		CFG_SEC("for-model", model, CFGF_MULTI | CFGF_TITLE | CFGF_NO_TITLE_DUPES),
		CFG_SEC("listener", listener, CFGF_MULTI | CFGF_TITLE | CFGF_NO_TITLE_DUPES),
		CFG_END()
	};
	cfg_opt_t opts[OPTION_ROWS_MAX + sizeof(sections) / sizeof(sections[0])];
	size_t n = 0;
	char *text;
	int e = slurp(o->config, &text);

	if (e)
		return e;
	for (size_t i = 0; i < option_rows; i++) {
		if (!strcmp(option_table[i].name, "model"))
			opts[n++] = (cfg_opt_t)CFG_STR_LIST("model", NULL, CFGF_NODEFAULT);
		else if (option_table[i].in & IN_FILE)
			opts[n++] = (cfg_opt_t)CFG_STR(option_table[i].name, NULL, CFGF_NODEFAULT);
	}
	memcpy(opts + n, sections, sizeof(sections));
	memset(&reading, 0, sizeof(reading));
	reading.file = o->config;
	bool sound = true;
	unsigned struck = 0;
	while ((e = parse(o, opts, text)) == -EAGAIN) {
		reading.told = reading.last;
		sound = false;
		if (++struck == STRUCK_MAX) { /* each costs a pass */
			log_error("%s: more mistakes than %d; what follows line %d is not looked at", o->config, STRUCK_MAX,
				  reading.last);
			e = -EINVAL;
			break;
		}
	}
	free(text);
	if (!e && !sound) /* what was struck out was a mistake, too */
		e = -EINVAL;
	else if (e && e != -EINVAL)
		log_error("%s: %s", o->config, strerror(-e));
	return e;
}
