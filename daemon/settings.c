/* SPDX-License-Identifier: MIT */
/*
 * Owns: the one table of settings: how each is named, read, checked and shown. The
 * command line (options.c), the file (config.c), --help, `aprctl config` and, through
 * --help, the completions follow from it. See options.h.
 */
#include "daemon/options.h"
#include <errno.h>
#include <grp.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static void *place(struct options *o, const struct option_row *r)
{
	return (char *)o + r->at;
}

static const void *seen(const struct options *o, const struct option_row *r)
{
	return (const char *)o + r->at;
}

/* ---- kinds of values ---------------------------------------------------------- */

static int number(const char *s, uint32_t max, uint32_t *out)
{
	char *end;

	if (!s || *s < '0' || *s > '9')
		return -EINVAL;
	errno = 0;
	unsigned long long v = strtoull(s, &end, 10);
	if (errno || *end || v > max)
		return -EINVAL;
	*out = (uint32_t)v;
	return 0;
}

static int set_number(struct options *o, const struct option_row *r, const char *arg)
{
	return number(arg, r->max, place(o, r));
}

static void show_number(const struct options *o, const struct option_row *r, char *out, size_t n)
{
	snprintf(out, n, "%" PRIu32, *(const uint32_t *)seen(o, r));
}

/* The place of s in "a b c", or -1. */
static int word_at(const char *words, const char *s)
{
	size_t len = strlen(s);

	for (int i = 0; *words; i++) {
		size_t w = strcspn(words, " ");
		if (w == len && !memcmp(words, s, w))
			return i;
		words += w + (words[w] == ' ');
	}
	return -1;
}

static void word_name(const char *words, unsigned i, char *out, size_t n)
{
	for (; i && *words; i--)
		words += strcspn(words, " ") + 1;
	snprintf(out, n, "%.*s", (int)strcspn(words, " "), words);
}

/* An enum whose values are the words' places. */
static int set_word(struct options *o, const struct option_row *r, const char *arg)
{
	int i = word_at(r->words, arg);

	if (i >= 0)
		memcpy(place(o, r), &(unsigned){ (unsigned)i }, sizeof(unsigned));
	return i < 0 ? -EINVAL : 0;
}

static void show_word(const struct options *o, const struct option_row *r, char *out, size_t n)
{
	unsigned i;

	memcpy(&i, seen(o, r), sizeof(i));
	word_name(r->words, i, out, n);
}

static int set_text(struct options *o, const struct option_row *r, const char *arg)
{
	if (!*arg || (r->words && word_at(r->words, arg) < 0))
		return -EINVAL;
	return options_set(place(o, r), arg);
}

static void show_text(const struct options *o, const struct option_row *r, char *out, size_t n)
{
	const char *s = *(char *const *)seen(o, r);

	snprintf(out, n, "%s", s ? s : "");
}

static int set_flag(struct options *o, const struct option_row *r, const char *arg)
{
	int i = arg ? word_at("false true no yes off on", arg) : 1;

	if (i < 0)
		return -EINVAL;
	*(bool *)place(o, r) = i & 1;
	return 0;
}

static void show_flag(const struct options *o, const struct option_row *r, char *out, size_t n)
{
	snprintf(out, n, "%s", *(const bool *)seen(o, r) ? "true" : "false");
}

static int set_size(struct options *o, const struct option_row *r, const char *arg)
{
	return options_size(arg, place(o, r));
}

static void show_size(const struct options *o, const struct option_row *r, char *out, size_t n)
{
	snprintf(out, n, "%" PRIu64, *(const uint64_t *)seen(o, r));
}

/* ---- settings of a kind of their own ------------------------------------------- */

static int set_model(struct options *o, const struct option_row *r, const char *arg)
{
	(void)r;
	return options_add_model(o, arg);
}

static void show_model(const struct options *o, const struct option_row *r, char *out, size_t n)
{
	size_t at = 0;

	(void)r;
	*out = '\0';
	for (size_t i = 0; i < o->n_models && at < n; i++)
		at += (size_t)snprintf(out + at, n - at, "%s%s=%s", i ? " " : "", o->models[i].name, o->models[i].path);
}

static int set_socket(struct options *o, const struct option_row *r, const char *arg)
{
	return options_socket(arg) ? -EINVAL : options_set(place(o, r), arg);
}

static void show_socket(const struct options *o, const struct option_row *r, char *out, size_t n)
{
	const char *env = getenv("APRD_SOCKET");

	if (!o->socket && env && o->from[r - option_table] == FROM_ENVIRONMENT)
		snprintf(out, n, "%s", env);
	else
		show_text(o, r, out, n);
}

static int set_backend(struct options *o, const struct option_row *r, const char *arg)
{
	uint32_t gpu;

	if (word_at(r->words, arg) < 0 && (strncmp(arg, "cuda:", 5) != 0 || strlen(arg) > 9 || number(arg + 5, 1023, &gpu)))
		return -EINVAL;
	return options_set(place(o, r), arg);
}

static int set_gpu_mem(struct options *o, const struct option_row *r, const char *arg)
{
	size_t n = strlen(arg);
	char digits[8];
	uint32_t v;

	(void)r;
	if (!n || arg[n - 1] != '%') {
		int e = options_size(arg, &o->gpu_mem);
		o->gpu_percent = e ? o->gpu_percent : 0;
		return e;
	}
	if (n > sizeof(digits))
		return -EINVAL;
	snprintf(digits, sizeof(digits), "%.*s", (int)n - 1, arg);
	if (number(digits, 100, &v) || !v)
		return -EINVAL;
	o->gpu_percent = v;
	o->gpu_mem = 0;
	return 0;
}

static void show_gpu_mem(const struct options *o, const struct option_row *r, char *out, size_t n)
{
	if (o->gpu_percent)
		snprintf(out, n, "%" PRIu32 "%%", o->gpu_percent);
	else
		show_size(o, r, out, n);
}

static int set_fused(struct options *o, const struct option_row *r, const char *arg)
{
	uint32_t v = 0;
	bool measured = !strcmp(arg, "auto");

	if (!measured && number(arg, r->max, &v))
		return -EINVAL;
	o->fused_rows = measured ? -1 : (int32_t)v;
	return 0;
}

static void show_fused(const struct options *o, const struct option_row *r, char *out, size_t n)
{
	(void)r;
	if (o->fused_rows < 0)
		snprintf(out, n, "auto");
	else
		snprintf(out, n, "%" PRId32, o->fused_rows);
}

static int set_level(struct options *o, const struct option_row *r, const char *arg)
{
	(void)r;
	return log_parse_level(arg, &o->log_level) ? -EINVAL : 0;
}

static void show_level(const struct options *o, const struct option_row *r, char *out, size_t n)
{
	enum log_level l;

	for (unsigned i = 0; i < 3; i++) {
		word_name(r->words, i, out, n);
		if (!log_parse_level(out, &l) && l == o->log_level)
			return;
	}
}

static int set_verbose(struct options *o, const struct option_row *r, const char *arg)
{
	(void)r;
	(void)arg;
	o->verbose = true;
	return option_set(o, option_named("log-level"), "debug", FROM_FLAG);
}

static int set_mode(struct options *o, const struct option_row *r, const char *arg)
{
	char *end;
	unsigned long v = strtoul(arg, &end, 8);

	(void)r;
	if (*arg < '0' || *arg > '7' || *end || v > 0777)
		return -EINVAL;
	o->socket_mode = (mode_t)v;
	return 0;
}

static void show_mode(const struct options *o, const struct option_row *r, char *out, size_t n)
{
	(void)r;
	snprintf(out, n, "%04o", (unsigned)o->socket_mode);
}

static int set_group(struct options *o, const struct option_row *r, const char *arg)
{
	const struct group *g = getgrnam(arg);

	(void)r;
	if (!g)
		return -EINVAL;
	o->socket_group = g->gr_gid;
	return 0;
}

static void show_group(const struct options *o, const struct option_row *r, char *out, size_t n)
{
	(void)r;
	*out = '\0';
	if (o->socket_group != (gid_t)-1)
		snprintf(out, n, "%u", (unsigned)o->socket_group);
}

static int nothing(struct options *o, const struct option_row *r, const char *arg)
{
	(void)o;
	(void)r;
	(void)arg;
	return 0;
}

/* ---- the table ------------------------------------------------------------------- */

#define AT(field) .at = offsetof(struct options, field)
#define NUMBER(field, most) .set = set_number, .show = show_number, AT(field), .max = (most)
#define WORD(field) .set = set_word, .show = show_word, AT(field)
#define TEXT(field) .set = set_text, .show = show_text, AT(field)
#define FLAG(field) .set = set_flag, .show = show_flag, AT(field), .want = "true or false"
#define SIZE(field) .set = set_size, .show = show_size, AT(field), .want = "a size such as 512M or 4G"
#define HEAD(n, a, l, where, h) .name = (n), .arg = (a), .letter = (l), .in = (where), .help = (h)

const struct option_row option_table[] = {
	{ HEAD("model", "[NAME=]FILE", 'm', IN_BOTH, "serve this GGUF file; may be given several times, the first is the default"),
	  .set = set_model, .show = show_model, .want = "[NAME=]FILE, the name of at most 63 bytes" },
	{ HEAD("socket", "SOCKET", 's', IN_BOTH, "listen here"), .set = set_socket, .show = show_socket, AT(socket),
	  .want = "a path that a socket can have" },
	{ HEAD("backend", "NAME", 'b', IN_BOTH, "auto, cpu, cuda or cuda:N"), .set = set_backend, .show = show_text,
	  AT(backend), .words = "auto cpu cuda", .want = "auto, cpu, cuda or cuda:N" },
	{ HEAD("context", "TOKENS", 'c', IN_BOTH, "longest context; the model's own, at most 8192, unless given"),
	  NUMBER(n_ctx, UINT32_MAX - 1) },
	{ HEAD("threads", "N", 't', IN_BOTH, "compute threads; all usable CPUs unless given"), NUMBER(threads, 4096) },
	{ HEAD("route", "NAME", 0, IN_BOTH, "how weights are read by prefill; f32 is the exact mode"), TEXT(route),
	  /* of enum apr_route_id; which of them a backend has is its own matter, when it starts */
	  .words = "auto f32 quant fp16 fp8 fp8-fast fused int16" },
	{ HEAD("kv-type", "TYPE", 0, IN_BOTH, "f16, f32 or bf16"), TEXT(kv_type), .words = "f16 f32 bf16" },
	{ HEAD("kv-mem", "SIZE", 0, IN_BOTH, "memory for keys and values, a model"), SIZE(kv_mem) },
	{ HEAD("gpu-mem", "SIZE|N%", 0, IN_BOTH, "device memory to take"), .set = set_gpu_mem, .show = show_gpu_mem,
	  AT(gpu_mem), .want = "a size such as 40G, or a percentage such as 90%" },
	{ HEAD("fused-rows", "N|auto", 0, IN_BOTH, "prompt rows up to which the fused kernel runs; auto is as measured"),
	  .set = set_fused, .show = show_fused, AT(fused_rows), .max = 65536, .want = "auto, or a number from 0 to 65536" },
	{ HEAD("no-graphs", NULL, 0, IN_BOTH, "launch every kernel by itself"), FLAG(no_graphs) },
	{ HEAD("poll", "WHEN", 0, IN_BOTH, "auto, always or never: spin on the rings of active sessions"), WORD(poll),
	  .words = "auto always never" },
	{ HEAD("socket-mode", "MODE", 0, IN_FILE, "permissions of the socket"), .set = set_mode, .show = show_mode,
	  .want = "an octal mode such as 0660" },
	{ HEAD("socket-group", "GROUP", 0, IN_FILE, "group of the socket"), .set = set_group, .show = show_group,
	  .want = "the name of a group that is known here" },
	{ HEAD("chunk", "ROWS", 0, IN_FILE, "prompt rows a step"), NUMBER(chunk, INT32_MAX) },
	{ HEAD("log-level", "LEVEL", 0, IN_FILE | IN_LIVE, "warn, info or debug"), .set = set_level, .show = show_level,
	  .words = "warn info debug" },
	{ HEAD("cache-dir", "FOLDER", 0, IN_FILE, "where packed weights are kept"), TEXT(cache_dir), .want = "a folder" },
	{ HEAD("drain-ms", "MS", 0, IN_FILE | IN_LIVE, "how long SIGTERM waits"), NUMBER(drain_ms, INT32_MAX) },
	{ HEAD("hello-ms", "MS", 0, IN_FILE | IN_LIVE, "how long a connection may stay silent"), NUMBER(hello_ms, INT32_MAX) },
	{ HEAD("park-pages-ms", "MS", 0, IN_FILE | IN_LIVE, "when a parked request gives up its memory"),
	  NUMBER(park_pages_ms, INT32_MAX) },
	{ HEAD("park-end-ms", "MS", 0, IN_FILE | IN_LIVE, "when a parked request ends"), NUMBER(park_end_ms, INT32_MAX) },
	{ HEAD("step-ms", "MS", 0, IN_FILE, "how long a step with running streams may take"), NUMBER(step_ms, INT32_MAX) },
	{ HEAD("share-prefixes", "WHOSE", 0, IN_FILE, "whose prompts are found in the prefix cache"), WORD(share),
	  .words = "user all session none" },
	{ HEAD("keep-alive", "SECONDS", 0, IN_FILE, "after how long an unused model gives up its memory"),
	  NUMBER(keep_alive, INT32_MAX) },
	{ HEAD("config", "FILE", 0, IN_LINE, "read settings from FILE; the command line goes over it"), TEXT(config),
	  .want = "a file" },
	{ HEAD("check-config", NULL, 0, IN_LINE, "check the settings, say what is wrong, and end"), FLAG(check_config) },
	{ HEAD("verbose", NULL, 'v', IN_LINE, "log more"), .set = set_verbose },
	{ HEAD("version", NULL, 'V', IN_LINE, "print the version and end"), .set = nothing },
	{ HEAD("help", NULL, 'h', IN_LINE, "print this and end"), .set = nothing },
};
const size_t option_rows = sizeof(option_table) / sizeof(option_table[0]);
_Static_assert(sizeof(option_table) / sizeof(option_table[0]) <= OPTION_ROWS_MAX, "raise OPTION_ROWS_MAX");
_Static_assert(sizeof(enum poll_mode) == sizeof(unsigned) && sizeof(enum share_mode) == sizeof(unsigned),
	       "set_word writes an unsigned");

const struct option_row *option_named(const char *name)
{
	for (size_t i = 0; i < option_rows; i++)
		if (!strcmp(option_table[i].name, name))
			return &option_table[i];
	return NULL;
}

void option_expects(const struct option_row *r, char *out, size_t n)
{
	size_t at = 0;

	if (r->want) {
		snprintf(out, n, "%s", r->want);
	} else if (r->words) {
		at = (size_t)snprintf(out, n, "one of ");
		for (const char *p = r->words; *p && at + 2 < n; p++) {
			if (*p == ' ')
				out[at++] = ',';
			out[at++] = *p;
		}
		out[at] = '\0';
	} else {
		snprintf(out, n, "a number from 0 to %" PRIu32, r->max);
	}
}

int option_set(struct options *o, const struct option_row *r, const char *arg, enum option_from from)
{
	int e = r->set(o, r, arg);

	if (!e)
		o->from[r - option_table] = (uint8_t)from;
	return e;
}
