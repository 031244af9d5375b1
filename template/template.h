/* SPDX-License-Identifier: MIT */
/*
 * Chat templates: the subset of Jinja that the templates inside model files use, set
 * up as their authors expect it (trim_blocks, lstrip_blocks, loop controls,
 * generation blocks, tojson without HTML escapes, raise_exception, strftime_now).
 *
 * Owns: reading a template, running it over JSON values, its limits. Does not own:
 * what a request may hold, nor turning the text into ids (daemon/).
 *
 * A template comes out of a stranger's file: it runs in steps, bytes and depth that
 * are counted, and each limit ends it with one line. It sees what it is given and
 * nothing else: no file, no clock but the moment that it is given.
 *
 * A struct apr_template is immutable after compilation: any number of threads may
 * render it at once.
 */
#ifndef APR_TEMPLATE_H
#define APR_TEMPLATE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct apr_template;

#define APR_TEMPLATE_TEXT_MAX (1u << 20) /* bytes of a template's own text */

/* text[len] must be UTF-8. 0; -EINVAL with "line N: ..." in err; -E2BIG text or tree too large; -ENOMEM. */
int apr_template_compile(struct apr_template **out, const char *text, size_t len, char *err, size_t errlen);
void apr_template_free(struct apr_template *t);
/* Whether the template names this variable or function at all. */
bool apr_template_names(const struct apr_template *t, const char *name);

struct apr_template_var {
	const char *name;
	const json_t *value;
	/* The value's strings are as good as the template's own text: names of special tokens. */
	bool own;
	/* A list of messages: of each, "role" counts as the template's text where it is one short word, since
	 * templates make delimiters of it. */
	bool messages;
};

struct apr_template_limits { /* zero = the default */
	uint64_t steps;  /* of work: about one a node of the template or 64 bytes of text */
	size_t memory;   /* bytes of all values */
	size_t output;   /* bytes of the text */
	unsigned depth;  /* of nested evaluation */
};
#define APR_TEMPLATE_STEPS UINT64_C(4000000)
#define APR_TEMPLATE_MEMORY (UINT64_C(256) << 20)
#define APR_TEMPLATE_OUTPUT (UINT64_C(16) << 20)
#define APR_TEMPLATE_DEPTH 600u

struct apr_template_args {
	const struct apr_template_var *vars;
	size_t n_vars;
	struct apr_template_limits limits;
	int64_t now; /* strftime_now's moment, seconds since 1970, shown in local time */
};

struct apr_template_text {
	char *text;       /* len bytes of UTF-8, malloc'ed, as is mark */
	uint8_t *mark;    /* for each byte: 0 the template wrote it, 1 it came in a variable */
	size_t len;
};

/* 0; -EINVAL: what the template or its raise_exception complains of, "line N: ...", also where steps or depth are
 * used up; -E2BIG: output or memory; -ENOMEM. vars that the template does not name are ignored. */
int apr_template_render(const struct apr_template *t, const struct apr_template_args *a, struct apr_template_text *out,
			char *err, size_t errlen);
void apr_template_text_free(struct apr_template_text *x);

#endif
