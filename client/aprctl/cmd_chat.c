/* SPDX-License-Identifier: MIT */
/*
 * chat: messages through the model's own template. With words one answer; without, a
 * conversation: lines are read, answers stream, and Ctrl-C ends the answer, not the
 * program.
 *
 * Owns: the conversation. Does not own: the template (the daemon's), showing an answer
 * (answer.c), editing a line (line.c).
 */
#include "client/aprctl/answer.h"
#include "client/aprctl/line.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DEFAULT_COUNT = 1024 }; /* tokens an answer, without -n */

struct chat {
	struct ctl *c;
	struct apr *s; /* NULL: to be connected */
	struct apr_model_row row;
	size_t room;     /* bytes of input that the session was made for */
	json_t *request; /* what CHAT is sent: an object with messages */
	json_t *messages;
	struct ctl_line line;
	bool talk, terminal;
};

static int add_message(struct chat *k, const char *role, json_t *content)
{
	json_t *m = content ? json_object() : NULL;

	if (!m || json_object_set_new(m, "role", json_string(role)) || json_object_set_new(m, "content", content) ||
	    json_array_append_new(k->messages, m))
		return ctl_fail(k->c, "out of memory");
	return CTL_OK;
}

static void drop_last(struct chat *k)
{
	json_array_remove(k->messages, json_array_size(k->messages) - 1);
}

/* What --system gives stands first, at the beginning and after /clear. */
static int begin_anew(struct chat *k)
{
	const struct ctl *c = k->c;

	json_array_clear(k->messages);
	if (!c->system)
		return CTL_OK;
	if (!ctl_is_utf8(c->system, strlen(c->system)))
		return ctl_usage(c, "--system is not UTF-8");
	return add_message(k, "system", json_string(c->system));
}

/* ---- one answer ---------------------------------------------------------------------- */

/* A session with room for len bytes of messages: a conversation grows. */
static int connected(struct chat *k, size_t len)
{
	int status, state = k->s ? apr_state(k->s) : 0;

	if (k->s && (state < 0 || state & APR_RES_DEAD)) {
		apr_close(k->s);
		k->s = NULL;
	}
	if (k->s && len <= apr_info(k->s)->max_input)
		return CTL_OK;
	apr_close(k->s);
	k->s = NULL;
	k->room = k->talk && len < SIZE_MAX / 4 ? 2 * len + 65536 : len;
	status = ctl_connect(k->c, k->room, &k->s);
	if (!status && apr_can(k->s, APR_OP_CHAT) != 1)
		status = ctl_fail(k->c, "this daemon does not serve CHAT: it is older than this aprctl");
	return status ? status : ctl_model(k->c, k->s, &k->row);
}

static int submit(struct chat *k, const struct ctl_answer *a, const char *json, size_t len)
{
	const struct ctl *c = k->c;
	struct apr_sqe *q = apr_get_sqe(k->s);
	int e;

	if (!q)
		return ctl_fail(c, "the session ended: %s", apr_why(k->s));
	e = apr_prep_chat(k->s, q, json, len, a->max);
	if (e)
		return ctl_fail(c, "%s", e == -E2BIG ? "the conversation is longer than this daemon takes" : apr_strerror(e));
	if (c->special)
		apr_sqe_flags(q, APR_SQE_PARSE_SPECIAL);
	return ctl_answer_submit(a, k->s, q, &k->row);
}

/* What an answer leaves in the conversation: what came of it, where it ended by itself, by Ctrl-C or by --timeout. One
 * that failed leaves nothing, nor does its question: asked again, it stands there once. */
static void keep_turn(struct chat *k, const struct ctl_answer *a, int status, const struct ctl_last *last)
{
	bool ended = !status || status == CTL_INTR || last->finish == APR_FINISH_TIMEOUT;
	bool some = a->samples && a->samples[0].len;

	if (ended && some)
		add_message(k, "assistant", ctl_json_text(a->samples[0].text, a->samples[0].len));
	else
		drop_last(k);
	if (!ended && some && k->terminal)
		ctl_note(k->c, "this question and what came of the answer are not kept: ask again");
}

/* The answer, shown, and kept as the conversation's next message. */
static int answer(struct chat *k)
{
	struct ctl *c = k->c;
	char *json = json_dumps(k->request, JSON_COMPACT);
	size_t len = json ? strlen(json) : 0;
	struct ctl_answer a = {0};
	struct ctl_last last = {0};
	int status = json ? connected(k, len) : ctl_fail(c, "out of memory");

	if (!GIVEN(c, KEY_SEED))
		c->seed = ctl_draw_seed();
	if (!status)
		status = ctl_answer_init(&a, c, 1, GIVEN(c, KEY_COUNT) ? c->count : DEFAULT_COUNT);
	if (!status) {
		ctl_catch_interrupt();
		status = submit(k, &a, json, len);
	}
	if (!status)
		status = ctl_run(c, k->s, 1, ctl_answer_entry, &a, &last);
	if (!status)
		status = ctl_answer_end(&a, &k->row, &last);
	if (!status && !GIVEN(c, KEY_COUNT) && last.finish == APR_FINISH_LENGTH && a.samples[0].n_ids >= a.max)
		ctl_note(c, "stopped after %u tokens: -n asks for more", a.max);
	if (last.res == -E2BIG && k->talk)
		ctl_note(c, "/clear forgets what was said so far");
	if (k->talk)
		keep_turn(k, &a, status, &last);
	ctl_answer_free(&a);
	free(json);
	return status;
}

/* ---- a conversation ------------------------------------------------------------------- */

static void say_help(const struct chat *k)
{
	printf("%s/clear    forget the conversation, but for --system\n"
	       "/help     this\n"
	       "/exit     end; so does Ctrl-D\n"
	       "//TEXT    a message that begins with a slash\n"
	       "A line that ends with a backslash goes on in the next. Ctrl-C ends the answer that runs.%s\n",
	       ctl_dim(k->c), ctl_plain(k->c));
}

/* A line that is for us and not for the model. *end: the conversation's end. */
static bool command(struct chat *k, const char *line, bool *end)
{
	if (line[0] != '/' || line[1] == '/')
		return false;
	if (!strcmp(line, "/exit") || !strcmp(line, "/quit"))
		*end = true;
	else if (!strcmp(line, "/clear"))
		begin_anew(k);
	else if (!strcmp(line, "/help"))
		say_help(k);
	else
		ctl_note(k->c, "no command %s: /help names them, //... sends a slash", line);
	return true;
}

static int turn(struct chat *k, const char *line, size_t len)
{
	bool slash = len > 1 && line[0] == '/' && line[1] == '/';
	int status = add_message(k, "user", ctl_json_text(line + slash, len - slash));

	if (!status)
		status = answer(k);
	if (k->terminal && !k->c->json)
		putchar('\n');
	fflush(stdout);
	return status;
}

/* Each line a message, until the end of input. On a terminal a failed answer is said and the conversation goes on;
 * from a pipe it ends it. */
static int converse(struct chat *k)
{
	int status = connected(k, 0);
	bool end = false;

	if (!status && k->terminal && !k->c->json)
		printf("%s%s, context %u. /help says more, Ctrl-D ends.%s\n", ctl_dim(k->c), k->row.name, k->row.n_ctx,
		       ctl_plain(k->c));
	while (!status && !end) {
		char *text = NULL;
		size_t len = 0;
		int e = ctl_line_read(&k->line, &text, &len);

		if (e == -EINTR) /* Ctrl-C at the prompt: the line is given up */
			continue;
		if (e <= 0) {
			status = !e ? CTL_OK : e == -ECANCELED ? CTL_INTR : ctl_fail(k->c, "standard input: %s", strerror(-e));
			break;
		}
		if (len && !(k->terminal && command(k, text, &end)))
			status = turn(k, text, len);
		if (status && k->terminal && !ferror(stdout) && !ctl_terminated())
			status = CTL_OK;
		free(text);
	}
	return status;
}

/* ---- the verb ---------------------------------------------------------------------------- */

static int from_file(struct chat *k)
{
	struct ctl *c = k->c;
	json_error_t err;
	json_t *j, *messages;
	char *text = NULL;
	size_t len = 0;
	int e = ctl_slurp(c->messages, &text, &len);

	if (e)
		return ctl_fail(c, "%s: %s", c->messages, strerror(-e));
	j = json_loadb(text, len, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, &err);
	free(text);
	if (!j)
		return ctl_fail(c, "%s: line %d: %s", c->messages, err.line, err.text);
	messages = json_is_array(j) ? j : json_object_get(j, "messages");
	if (!json_is_array(messages)) {
		json_decref(j);
		return ctl_fail(c, "%s: an array of messages, or an object with \"messages\", is wanted", c->messages);
	}
	json_decref(k->request);
	k->request = j;
	k->messages = messages;
	return CTL_OK;
}

static int once(struct chat *k)
{
	struct ctl_input in = {0};
	int status;

	if (k->c->messages)
		return answer(k);
	status = ctl_read_text(k->c, &in);
	if (!status && !ctl_is_utf8(in.text, in.len))
		status = ctl_fail(k->c, "the text is not UTF-8");
	if (!status)
		status = add_message(k, "user", json_stringn(in.text, in.len));
	ctl_input_free(&in);
	return status ? status : answer(k);
}

int cmd_chat(struct ctl *c)
{
	struct chat k = {.c = c};
	int status;

	if (c->messages && (c->n_args || c->file || c->system))
		return ctl_usage(c, "--messages, or a text and --system, not both");
	k.talk = !c->n_args && !c->file && !c->messages;
	k.terminal = k.talk && isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
	k.request = json_object();
	k.messages = json_array();
	if (json_object_set_new(k.request, "messages", k.messages)) {
		json_decref(k.request);
		return ctl_fail(c, "out of memory");
	}
	ctl_line_init(&k.line, k.terminal, ctl_bold(c), ctl_plain(c));
	status = c->messages ? from_file(&k) : begin_anew(&k);
	if (!status)
		status = k.talk ? converse(&k) : once(&k);
	ctl_line_free(&k.line);
	apr_close(k.s);
	json_decref(k.request);
	return status;
}
