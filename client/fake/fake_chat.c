/* SPDX-License-Identifier: MIT */
/*
 * Owns: what a CHAT becomes here, where there is no model and so no template of its
 * own: "role: content" a line, and "assistant:" at the end. From then on it is a
 * GENERATE of that text. Contents other than texts count as their JSON.
 */
#include "client/fake/fake_int.h"
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool put_message(FILE *to, const json_t *m)
{
	const json_t *role = json_object_get(m, "role"), *content = json_object_get(m, "content");
	char *text;

	if (!json_is_string(role))
		return false;
	fprintf(to, "%s: ", json_string_value(role));
	if (json_is_string(content)) {
		fwrite(json_string_value(content), 1, json_string_length(content), to);
	} else if (content) {
		text = json_dumps(content, JSON_ENCODE_ANY | JSON_COMPACT);
		fputs(text ? text : "", to);
		free(text);
	}
	fputc('\n', to);
	return true;
}

static int put_messages(FILE *to, json_t *j, const char **why)
{
	json_t *messages = json_is_array(j) ? j : json_object_get(j, "messages"), *m;
	size_t i;

	*why = "messages: an array of objects, each with a role, or an object that has it";
	if (!json_is_array(messages) || !json_array_size(messages))
		return -EINVAL;
	json_array_foreach (messages, i, m)
		if (!put_message(to, m))
			return -EINVAL;
	fputs("assistant:", to);
	*why = NULL;
	return 0;
}

int fake_chat(struct fake_req *r, const char **why)
{
	json_t *j = json_loadb((const char *)r->in, r->sqe.in_len, JSON_ALLOW_NUL | JSON_REJECT_DUPLICATES, NULL);
	char *text = NULL;
	size_t len = 0;
	FILE *to;
	int e;

	if (!j) {
		*why = "the messages are no JSON";
		return -EINVAL;
	}
	to = open_memstream(&text, &len);
	e = to ? put_messages(to, j, why) : -ENOMEM;
	json_decref(j);
	if (to && fclose(to) && !e)
		e = -ENOMEM;
	if (e || len > UINT32_MAX) {
		free(text);
		return e ? e : -E2BIG;
	}
	free(r->in);
	r->in = (uint8_t *)text;
	r->sqe.in_len = (uint32_t)len;
	r->sqe.in_fmt = APR_IN_TEXT;
	r->sqe.op = APR_OP_GENERATE;
	return 0;
}
