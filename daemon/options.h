/* SPDX-License-Identifier: MIT */
/*
 * What aprd is told to do: command line over configuration file over defaults.
 *
 * Owns: the one option table (settings.c: getopt_long, --help, the configuration file,
 * `aprctl config`, the completions and the man page's check live on it: a new setting is
 * one row), the values, their ranges. Does not own what they lead to.
 */
#ifndef APRD_OPTIONS_H
#define APRD_OPTIONS_H

#include "daemon/log.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

enum poll_mode { POLL_AUTO, POLL_ALWAYS, POLL_NEVER };

struct model_option {
	char *name, *path;
};

struct listener_option { /* the first is the -s socket */
	char *path;
	char *tenant; /* "" = the default one */
	gid_t group;  /* (gid_t)-1 = left as it is */
	mode_t mode;
};

/* whose requests find whose prefixes in the cache: everybody's, those of one identity, of one session, their own alone */
enum share_mode { SHARE_USER, SHARE_ALL, SHARE_SESSION, SHARE_NONE };

struct limits { /* of one identity: (listener's tenant, uid) */
	uint32_t connections;  /* open client sockets */
	uint32_t sessions;     /* with regions */
	uint32_t in_flight;    /* requests taken and unfinished, over all its sessions */
	uint64_t region_bytes; /* of all its sessions */
	uint64_t all_regions;  /* of everybody together */
	uint32_t prio_max;     /* 0 normal, 1 low, 2 high */
	uint32_t weight;       /* its share beside others */
	uint32_t kv_pages;     /* held by what runs; 0 = no limit, here and below */
	uint64_t queued_tokens; /* prompts of unfinished requests that have not begun */
	uint64_t tokens_minute; /* prompt and generated, on average */
};

struct limit_rule { /* for one user, or for the members of a group, instead of limits */
	bool group;
	uint32_t id;
	struct limits l;
};

struct model_rule { /* for the model of that name */
	char *name;
	enum share_mode share;
	uint32_t keep_alive;
};

enum option_from { FROM_DEFAULT, FROM_FILE, FROM_ENVIRONMENT, FROM_FLAG };
enum { OPTION_ROWS_MAX = 48 };

struct options {
	uint8_t from[OPTION_ROWS_MAX]; /* enum option_from, by row of option_table */
	struct model_option *models;
	size_t n_models;
	char *socket; /* as given; NULL = the default rule */
	struct listener_option *listeners;
	size_t n_listeners;
	char *backend, *route, *kv_type, *cache_dir, *config;
	uint32_t n_ctx, threads, chunk;
	uint64_t kv_mem, gpu_mem;
	uint32_t gpu_percent;
	int32_t fused_rows; /* -1 = measured */
	bool no_graphs, check_config, verbose;
	enum poll_mode poll;
	enum log_level log_level;
	uint32_t drain_ms, hello_ms, park_pages_ms, park_end_ms;
	uint32_t step_ms; /* of a step with running streams; 0 = the backend's default */
	enum share_mode share;
	uint32_t keep_alive; /* s: a model that nobody used for so long gives up its memory; 0 = never */
	struct limits limits;
	struct limit_rule *rules;
	size_t n_rules;
	struct model_rule *model_rules;
	size_t n_model_rules;
	mode_t socket_mode;
	gid_t socket_group;
};

enum { IN_LINE = 1, IN_FILE = 2, IN_BOTH = 3, IN_LIVE = 4 }; /* where it may stand; IN_LIVE: a reload takes it over */

struct option_row {
	const char *name, *arg, *help; /* arg NULL: without a value */
	char letter;                   /* the short option, or 0 */
	uint8_t in;
	/* 0, -ENOMEM, or -EINVAL: then want says what was expected. arg NULL: the flag without a value. */
	int (*set)(struct options *o, const struct option_row *r, const char *arg);
	/* what is in force, as the file would say it; "" = not set */
	void (*show)(const struct options *o, const struct option_row *r, char *out, size_t n);
	size_t at;         /* of the value in struct options */
	uint32_t max;      /* of a number */
	const char *words; /* "a b c": what it may be, where it is one of a few */
	const char *want;  /* what was expected, where words or max do not say it */
};
extern const struct option_row option_table[];
extern const size_t option_rows;
const struct option_row *option_named(const char *name);
void option_expects(const struct option_row *r, char *out, size_t n);
/* Sets one, and notes where it came from. */
int option_set(struct options *o, const struct option_row *r, const char *arg, enum option_from from);

void options_init(struct options *o);
void options_free(struct options *o);
void options_help(FILE *out);
/* 0 go on; 1 done, exit 0 (--help, --version); 2 wrong usage, said on stderr; -errno another failure, said. */
int options_parse(struct options *o, int argc, char **argv);

/* Parts that config.c shares. 0 or -EINVAL, -ENOMEM. */
int options_add_model(struct options *o, const char *arg); /* [NAME=]FILE */
int options_size(const char *s, uint64_t *bytes);          /* 512M, 4G, 1048576 */
int options_set(char **slot, const char *value);
int options_share(const char *s, enum share_mode *mode);   /* user, all, session, none */
extern const char *const share_names[];                    /* by enum share_mode */
int options_socket(const char *s);                         /* a path that a socket, and its admin socket, can have */

/* What holds for one identity: its own rule, else the first of a group of its, else limits. */
const struct limits *options_limits(const struct options *o, uid_t uid, const gid_t *groups, size_t n);
struct model_rule options_model(const struct options *o, const char *model); /* its rule, or what holds for all */

/* config.c: reads o->config into o; a fault is told with file and line on stderr: -EINVAL, or -errno. */
int config_read(struct options *o);

#endif
