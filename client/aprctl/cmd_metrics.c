/* SPDX-License-Identifier: MIT */
/*
 * metrics: what status says, in the text format that Prometheus scrapes.
 *
 * Owns: the metrics' names, types and labels; they are promised in aprctl(1). Does not own a figure.
 */
#include "client/aprctl/ctl.h"
#include <string.h>

static double value(json_t *o, const char *key)
{
	return json_number_value(json_object_get(o, key));
}

static const char *text(json_t *o, const char *key)
{
	const char *s = json_string_value(json_object_get(o, key));

	return s ? s : "";
}

static void head(const char *name, const char *type, const char *help)
{
	printf("# HELP aprd_%s %s\n# TYPE aprd_%s %s\n", name, help, name, type);
}

/* {a="...",b="..."}: pairs of a name and a value, NULL at the end */
static void labels(const char *const *pairs)
{
	char open = '{';

	for (; *pairs; pairs += 2, open = ',') {
		printf("%c%s=\"", open, pairs[0]);
		for (const char *p = pairs[1]; *p; p++) {
			if (*p == '\n') {
				fputs("\\n", stdout);
				continue;
			}
			if (*p == '"' || *p == '\\')
				putchar('\\');
			putchar(*p);
		}
		putchar('"');
	}
	putchar('}');
}

static void sample(const char *name, const char *const *pairs, double v)
{
	printf("aprd_%s", name);
	if (pairs && *pairs)
		labels(pairs);
	printf(" %.15g\n", v);
}

static void single(json_t *o, const char *key, const char *name, const char *type, const char *help)
{
	if (!json_is_number(json_object_get(o, key)))
		return;
	head(name, type, help);
	sample(name, NULL, value(o, key));
}

static void histogram(json_t *m, const char *key, const char *name, const char *help)
{
	json_t *h = json_object_get(m, key), *counts = json_object_get(h, "counts"), *n;
	double edge = value(m, "le_us") * 1e-6, sum = 0;
	char bucket[64], le[32];
	size_t i;

	if (!json_is_array(counts))
		return;
	head(name, "histogram", help);
	snprintf(bucket, sizeof(bucket), "%s_bucket", name);
	json_array_foreach (counts, i, n) {
		sum += json_number_value(n);
		if (i + 1 < json_array_size(counts))
			snprintf(le, sizeof(le), "%.9g", edge);
		else
			snprintf(le, sizeof(le), "+Inf");
		sample(bucket, (const char *const[]){"le", le, NULL}, sum);
		edge *= 2;
	}
	printf("aprd_%s_sum %.15g\naprd_%s_count %.15g\n", name, value(h, "sum_us") * 1e-6, name, sum);
}

static void requests(json_t *j)
{
	json_t *m = json_object_get(j, "metrics"), *v;
	const char *outcome;

	head("requests_total", "counter", "Requests that ended, by outcome; refused: none was begun.");
	json_object_foreach (json_object_get(m, "outcomes"), outcome, v)
		sample("requests_total", (const char *const[]){"outcome", outcome, NULL}, json_number_value(v));
	single(j, "running", "requests_running", "gauge", "Requests that are computed now.");
	single(j, "queued", "requests_queued", "gauge", "Requests that wait.");
	histogram(m, "queue", "queue_seconds", "From a request's arrival to its first row in a step.");
	histogram(m, "first_token", "first_token_seconds", "From a request's arrival to its first token.");
	histogram(m, "inter_token", "inter_token_seconds", "Between two tokens of one answer.");
	histogram(m, "step", "step_seconds", "One step of the engine.");
}

static void counters(json_t *t)
{
	static const struct {
		const char *key, *name, *help;
	} rows[] = {
		{"tokens", "tokens_total", "Tokens generated."},
		{"steps", "steps_total", "Steps of the engine."},
		{"preempted", "preemptions_total", "Runs that gave their KV pages up and were computed again."},
		{"sqes", "submissions_total", "Submission entries taken."},
		{"cqes", "completions_total", "Completion entries written."},
		{"wakes", "wakeups_total", "Sleeping clients that were woken."},
		{"doorbells", "doorbells_total", "Times that clients woke the daemon."},
		{"parked", "parked_total", "Times that a request waited for room in its completion queue."},
	};

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
		single(t, rows[i].key, rows[i].name, "counter", rows[i].help);
}

struct column {
	const char *key, *name, *type, *help;
};

/* One metric a column, one sample a row. */
static void table(json_t *rows, const struct column *c, size_t n, void (*label)(json_t *row, const char **pairs))
{
	const char *pairs[8];
	json_t *r;
	size_t i;

	for (size_t k = 0; k < n && json_array_size(rows); k++) {
		head(c[k].name, c[k].type, c[k].help);
		json_array_foreach (rows, i, r) {
			label(r, pairs);
			sample(c[k].name, pairs, value(r, c[k].key));
		}
	}
}

static void model_label(json_t *row, const char **pairs)
{
	pairs[0] = "model";
	pairs[1] = text(row, "name");
	pairs[2] = NULL;
}

static void user_label(json_t *row, const char **pairs)
{
	static char uid[24];

	snprintf(uid, sizeof(uid), "%lld", (long long)json_integer_value(json_object_get(row, "uid")));
	pairs[0] = "uid";
	pairs[1] = uid;
	pairs[2] = "tenant";
	pairs[3] = text(row, "tenant");
	pairs[4] = NULL;
}

static void models(json_t *j)
{
	static const struct column c[] = {
		{"pages_total", "kv_pages", "gauge", "Pages for keys and values."},
		{"pages_free", "kv_pages_free", "gauge", "Those that nothing uses."},
		{"pages_cached", "kv_pages_cached", "gauge", "Those that hold prefixes of ended requests."},
		{"prompt_tokens", "prompt_tokens_total", "counter", "Prompt tokens of requests that began."},
		{"cached_tokens", "cached_tokens_total", "counter", "Those of them found in the prefix cache."},
		{"bytes", "model_bytes", "gauge", "Size of the weights."},
	};

	table(json_object_get(j, "models"), c, sizeof(c) / sizeof(c[0]), model_label);
}

static void users(json_t *j)
{
	static const struct column c[] = {
		{"sessions", "user_sessions", "gauge", "Sessions of a user."},
		{"in_flight", "user_requests", "gauge", "Unfinished requests of a user."},
		{"running", "user_requests_running", "gauge", "Those of them that are computed."},
		{"kv_pages", "user_kv_pages", "gauge", "KV pages that they hold."},
		{"queued_tokens", "user_queued_tokens", "gauge", "Prompt tokens that wait."},
		{"tokens", "user_tokens_total", "counter", "Tokens computed for a user."},
		{"refused", "user_refused_total", "counter", "Requests refused for a quota."},
	};

	table(json_object_get(j, "clients"), c, sizeof(c) / sizeof(c[0]), user_label);
}

/* Rows of one purpose, place and model are summed: a series may stand only once. */
static void memory(json_t *j)
{
	json_t *rows = json_object_get(j, "memory"), *r, *other;
	size_t i, k;

	if (json_array_size(rows))
		head("memory_bytes", "gauge", "Memory by purpose.");
	json_array_foreach (rows, i, r) {
		bool before = false;
		double sum = 0;

		json_array_foreach (rows, k, other) {
			if (strcmp(text(r, "purpose"), text(other, "purpose")) || strcmp(text(r, "where"), text(other, "where")) ||
			    strcmp(text(r, "model"), text(other, "model")))
				continue;
			before |= k < i;
			sum += value(other, "bytes");
		}
		if (!before)
			sample("memory_bytes", (const char *const[]){"purpose", text(r, "purpose"), "where", text(r, "where"), "model",
								     text(r, "model"), NULL}, sum);
	}
}

int cmd_metrics(struct ctl *c)
{
	json_t *j = NULL;
	int status;

	if (c->n_args)
		return ctl_usage(c, "metrics takes no words");
	status = ctl_status(c, &j);
	if (status || !j)
		return status;
	if (c->json)
		return ctl_print_json(c, j);
	head("info", "gauge", "What runs; always 1.");
	sample("info", (const char *const[]){"version", text(j, "version"), "backend",
					     text(json_object_get(j, "backend"), "name"), NULL}, 1);
	head("ready", "gauge", "1 where every model is served.");
	sample("ready", NULL, !strcmp(text(j, "state"), "ready"));
	single(j, "uptime_s", "uptime_seconds", "gauge", "Since the worker began.");
	single(j, "restarts", "worker_restarts_total", "counter", "Workers that died and were replaced.");
	single(j, "sessions", "sessions", "gauge", "Sessions with shared memory.");
	requests(j);
	counters(json_object_get(j, "totals"));
	models(j);
	memory(j);
	single(json_object_get(j, "graphs"), "replays", "graph_replays_total", "counter", "Recorded steps that were replayed.");
	users(j);
	json_decref(j);
	return ctl_flush(c, CTL_OK);
}
