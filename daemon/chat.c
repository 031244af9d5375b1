/* SPDX-License-Identifier: MIT */
/* Owns: CHAT's JSON and what a template is given. See chat.h. */
#include "daemon/chat.h"
#include "engine/engine.h"
#include "model/gguf.h"
#include "model/model.h"
#include "model/tokenizer.h"
#include "template/template.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct chat {
	struct apr_template *template; /* NULL: why says why */
	const struct apr_tokenizer *tok;
	json_t *bos, *eos, *none, *yes; /* what templates are given besides; immutable, and never counted on */
	bool tells_time;
	char why[200];
};

static int fail(char *why, size_t n, int err, const char *fmt, ...) __attribute__((format(printf, 4, 5)));
static int fail(char *why, size_t n, int err, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(why, n, fmt, ap);
	va_end(ap);
	return err;
}

/* A special token's text, "" where the file names none. */
static json_t *token_text(const struct apr_tokenizer *t, int64_t id)
{
	size_t len = 0;
	const char *text = id < 0 || id > UINT32_MAX ? NULL : apr_piece(t, (uint32_t)id, true, &len);
	json_t *j = json_stringn(text ? text : "", text ? len : 0);

	return j ? j : json_string(""); /* it is not UTF-8 */
}

int chat_new(struct chat **out, const struct apr_loaded *m)
{
	const struct gguf *g = apr_loaded_model(m)->gguf;
	struct chat *c = calloc(1, sizeof(*c));
	struct gguf_str text;
	char words[160] = "";
	uint32_t eos;
	int e;

	if (!c)
		return -ENOMEM;
	c->tok = apr_loaded_tokenizer(m);
	c->bos = token_text(c->tok, apr_tokenizer_bos(c->tok));
	e = gguf_get_u32(g, "tokenizer.ggml.eos_token_id", &eos, NULL, 0);
	c->eos = token_text(c->tok, e ? -1 : (int64_t)eos);
	c->none = json_null();
	c->yes = json_true();
	if (!c->bos || !c->eos) {
		chat_free(c);
		return -ENOMEM;
	}
	if (gguf_get_str(g, "tokenizer.chat_template", &text, NULL, 0)) {
		snprintf(c->why, sizeof(c->why), "this model's file has no chat template");
	} else {
		e = apr_template_compile(&c->template, text.s, text.len, words, sizeof(words));
		if (e == -ENOMEM) {
			chat_free(c);
			return e;
		}
		if (e)
			snprintf(c->why, sizeof(c->why), "this model's chat template: %s", words);
		else
			c->tells_time = apr_template_names(c->template, "strftime_now");
	}
	*out = c;
	return 0;
}

void chat_free(struct chat *c)
{
	if (!c)
		return;
	apr_template_free(c->template);
	json_decref(c->bos);
	json_decref(c->eos);
	free(c);
}

const char *chat_why(const struct chat *c)
{
	return c->why[0] ? c->why : NULL;
}

/* ---- the JSON ------------------------------------------------------------------------ */

enum { VARS_MAX = 64 };

struct vars {
	struct apr_template_var v[VARS_MAX];
	size_t n;
	int64_t now;
	bool has_now;
};

/* A later one of a name takes the earlier one's place. */
static bool set(struct vars *x, const char *name, const json_t *value, bool own)
{
	struct apr_template_var v = { .name = name, .value = value, .own = own, .messages = !strcmp(name, "messages") };
	size_t i = 0;

	while (i < x->n && strcmp(x->v[i].name, name) != 0)
		i++;
	if (i == VARS_MAX)
		return false;
	x->v[i] = v;
	x->n += i == x->n;
	return true;
}

static int take_messages(struct vars *x, const json_t *messages, char *why, size_t n)
{
	if (!json_is_array(messages))
		return fail(why, n, -EINVAL, "messages: an array of objects, each with a role");
	for (size_t i = 0; i < json_array_size(messages); i++)
		if (!json_is_string(json_object_get(json_array_get(messages, i), "role")))
			return fail(why, n, -EINVAL, "messages: number %zu has no role", i);
	if (!json_array_size(messages))
		return fail(why, n, -EINVAL, "messages: there is none");
	set(x, "messages", messages, false);
	return 0;
}

static int take_variables(struct vars *x, json_t *object, char *why, size_t n)
{
	const char *name;
	json_t *value;

	if (!json_is_object(object))
		return fail(why, n, -EINVAL, "variables: an object of names and values");
	json_object_foreach(object, name, value)
		if (!set(x, name, value, false))
			return fail(why, n, -E2BIG, "variables: more than %d", VARS_MAX);
	return 0;
}

static int take_member(struct vars *x, const char *name, json_t *value, char *why, size_t n)
{
	if (!strcmp(name, "messages"))
		return take_messages(x, value, why, n);
	if (!strcmp(name, "variables"))
		return take_variables(x, value, why, n);
	if (!strcmp(name, "now")) {
		if (!json_is_integer(value))
			return fail(why, n, -EINVAL, "now: whole seconds since 1970");
		x->now = json_integer_value(value);
		x->has_now = true;
		return 0;
	}
	if (!strcmp(name, "add_generation_prompt")) {
		if (!json_is_boolean(value))
			return fail(why, n, -EINVAL, "add_generation_prompt: true or false");
	} else if (!strcmp(name, "tools") || !strcmp(name, "documents")) {
		if (!json_is_array(value) && !json_is_null(value))
			return fail(why, n, -EINVAL, "%s: an array", name);
	} else {
		return fail(why, n, -EINVAL, "\"%.40s\" is not known: messages, tools, documents, add_generation_prompt, "
			    "now, variables", name);
	}
	set(x, name, value, false);
	return 0;
}

static int take_json(const struct chat *c, struct vars *x, json_t *j, char *why, size_t n)
{
	const char *name;
	json_t *value;
	int e = 0;

	set(x, "tools", c->none, true);
	set(x, "documents", c->none, true);
	set(x, "add_generation_prompt", c->yes, true);
	if (json_is_array(j))
		return take_messages(x, j, why, n);
	if (!json_object_get(j, "messages"))
		return fail(why, n, -EINVAL, "the object has no messages");
	/* variables first, so that they cannot pass for what has a name of its own */
	value = json_object_get(j, "variables");
	if (value)
		e = take_variables(x, value, why, n);
	json_object_foreach(j, name, value) {
		if (e)
			break;
		if (strcmp(name, "variables") != 0)
			e = take_member(x, name, value, why, n);
	}
	return e;
}

/* ---- text and ids ----------------------------------------------------------------------- */

static int render(const struct chat *c, const struct chat_input *in, json_t *j, struct apr_template_text *text, char *why,
		  size_t n)
{
	struct vars x = { .n = 0 };
	struct apr_template_args a = { .vars = x.v };
	int e = take_json(c, &x, j, why, n), at;

	if (e)
		return e;
	if (c->tells_time && in->replayable && !x.has_now)
		return fail(why, n, -EINVAL, "this model's template asks for the time: REPLAYABLE wants \"now\" beside the messages");
	if (!set(&x, "bos_token", c->bos, true) || !set(&x, "eos_token", c->eos, true))
		return fail(why, n, -E2BIG, "variables: more than %d", VARS_MAX);
	a.n_vars = x.n;
	a.now = x.has_now ? x.now : (int64_t)time(NULL);
	at = snprintf(why, n, "chat template: ");
	e = apr_template_render(c->template, &a, text, why + at, n - (size_t)at);
	if (!e || e == -ENOMEM)
		*why = 0;
	return e;
}

int chat_ids(const struct chat *c, const struct chat_input *in, uint32_t **ids, uint32_t *n_ids, char *why, size_t whylen)
{
	struct apr_template_text text = { 0 };
	json_error_t err;
	json_t *j;
	int e;

	*why = 0;
	if (!c->template)
		return fail(why, whylen, -EOPNOTSUPP, "%s", c->why);
	j = json_loadb(in->json, in->len, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, &err);
	if (!j)
		return fail(why, whylen, -EINVAL, "messages: line %d: %.120s", err.line, err.text);
	e = render(c, in, j, &text, why, whylen);
	json_decref(j);
	if (e)
		return e;
	unsigned flags = APR_TOK_ADD_BOS | (in->parse_special ? APR_TOK_PARSE_SPECIAL : 0);
	e = apr_tok_encode_marked(c->tok, text.text, text.mark, text.len, flags, in->most, ids, n_ids);
	apr_template_text_free(&text);
	if (e == -E2BIG)
		fail(why, whylen, e, "the messages are more than the context of %u tokens", in->most);
	else if (e == -EILSEQ)
		fail(why, whylen, e, "a byte of the messages has no piece in this model's vocabulary");
	return e;
}
