/* SPDX-License-Identifier: MIT */
/*
 * warmup: every recorded bucket replayed once more, one order each, so that there is
 * something to show meanwhile.
 *
 * Owns: the bar on a terminal's stderr, the table. Does not own which buckets there
 * are (status says) nor the replays (the daemon's). Admin socket.
 */
#include "client/aprctl/ctl.h"
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BAR = 40 };

static int ask(struct ctl *c, unsigned type, json_t *body, json_t **out)
{
	char *reply = NULL;
	json_error_t je;
	int status = ctl_admin(c, type, body, &reply, -1);

	if (status)
		return status;
	*out = json_loads(reply && *reply ? reply : "{}", 0, &je);
	free(reply);
	return *out ? CTL_OK : ctl_fail(c, "the daemon's answer is no JSON: %s", je.text);
}

static void draw_bar(const struct ctl *c, size_t done, size_t all, const char *what)
{
	size_t full = all ? done * BAR / all : BAR;
	char bar[BAR + 1];

	if (c->json || !isatty(STDERR_FILENO))
		return;
	memset(bar, '#', full);
	memset(bar + full, '.', BAR - full);
	bar[BAR] = 0;
	fprintf(stderr, "\r[%s] %zu of %zu  %-40.40s", bar, done, all, what);
	if (done == all)
		fprintf(stderr, "\r%*s\r", BAR + 70, "");
	fflush(stderr);
}

/* Adds what the daemon says of one bucket, or, for none, of all, to warmed. */
static int warm(struct ctl *c, json_t *bucket, json_t *warmed, json_t **why)
{
	json_t *body = bucket ? json_pack("{s:O, s:O, s:O}", "model", json_object_get(bucket, "model"), "kind",
					  json_object_get(bucket, "kind"), "rows", json_object_get(bucket, "rows")) :
				NULL;
	json_t *j = NULL, *w;
	int status = ask(c, APR_FRAME_WARMUP, body, &j);

	if (status)
		return status;
	json_array_extend(warmed, json_object_get(j, "warmed"));
	w = json_object_get(j, "why");
	if (w && !*why)
		*why = json_incref(w);
	json_decref(j);
	return CTL_OK;
}

static int warm_all(struct ctl *c, json_t *buckets, json_t *warmed, json_t **why)
{
	size_t n = json_array_size(buckets), i;
	int status = CTL_OK;
	char what[128];
	json_t *b;

	if (!n) /* a daemon that does not list them */
		return warm(c, NULL, warmed, why);
	json_array_foreach (buckets, i, b) {
		snprintf(what, sizeof(what), "%s: %s %d", json_string_value(json_object_get(b, "model")),
			 json_string_value(json_object_get(b, "kind")), (int)json_integer_value(json_object_get(b, "rows")));
		draw_bar(c, i, n, what);
		status = warm(c, b, warmed, why);
		if (status)
			break;
	}
	draw_bar(c, n, n, "");
	return status;
}

static bool follows(json_t *a, json_t *b) /* b stands in the line that a began */
{
	return a && !strcmp(json_string_value(json_object_get(a, "model")), json_string_value(json_object_get(b, "model"))) &&
	       !strcmp(json_string_value(json_object_get(a, "kind")), json_string_value(json_object_get(b, "kind")));
}

/* A line a model and kind: rows and their time. */
static void print_warmed(const struct ctl *c, json_t *warmed, const char *why)
{
	json_t *b, *last = NULL;
	size_t i, on_line = 0;

	json_array_foreach (warmed, i, b) {
		if (!follows(last, b) || on_line == 6) {
			printf("%s%s%.40s %-8s%s", last ? "\n" : "", ctl_dim(c), json_string_value(json_object_get(b, "model")),
			       json_string_value(json_object_get(b, "kind")), ctl_plain(c));
			on_line = 0;
		}
		on_line++;
		last = b;
		printf("  %d", (int)json_integer_value(json_object_get(b, "rows")));
		if (json_object_get(b, "us"))
			printf(": %.0f us", json_number_value(json_object_get(b, "us")));
	}
	printf("%swarm%s%s\n", last ? "\n" : "", why ? ": " : "", why ? why : "");
}

int cmd_warmup(struct ctl *c)
{
	json_t *status_of = NULL, *warmed, *why = NULL, *buckets;
	int status;

	if (c->n_args)
		return ctl_usage(c, "warmup takes no words");
	status = ask(c, APR_FRAME_STATUS, NULL, &status_of);
	if (status)
		return status;
	warmed = json_array();
	buckets = json_object_get(json_object_get(status_of, "graphs"), "buckets");
	status = warm_all(c, buckets, warmed, &why);
	if (!status && c->json) {
		status = ctl_print_json(c, json_pack("{s:O}", "warmed", warmed));
	} else if (!status) {
		print_warmed(c, warmed, why ? json_string_value(why) : NULL);
		status = ctl_flush(c, CTL_OK);
	}
	json_decref(why);
	json_decref(warmed);
	json_decref(status_of);
	return status;
}
