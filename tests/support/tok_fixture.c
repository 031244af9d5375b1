/* SPDX-License-Identifier: MIT */
/* See tok_fixture.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/harness.h"
#include "tests/support/tok_fixture.h"

void *tok_room(size_t n)
{
	void *p = calloc(1, n);

	if (!p)
		abort();
	return p;
}

static const char *tmp_file(void)
{
	static char path[512];

	snprintf(path, sizeof path, "%s/model.gguf", apr_test_tmpdir());
	return path;
}

static int open_path(struct tok_fixture *f, const char *path, char *err, size_t errlen)
{
	int rc;

	*f = (struct tok_fixture){0};
	rc = apr_model_open(&f->m, path, err, errlen);
	if (!rc)
		rc = apr_tokenizer_new(&f->t, f->m, err, errlen);
	return rc;
}

void tok_close(struct tok_fixture *f)
{
	apr_tokenizer_free(f->t);
	apr_model_close(f->m);
}

bool tok_open_real(struct tok_fixture *f, const char *file)
{
	const char *path = apr_test_model(file);
	char err[256] = "";

	if (!path)
		return false;
	CU_ASSERT_EQUAL_FATAL(open_path(f, path, err, sizeof err), 0);
	return true;
}

/* Takes w. */
static int open_writer(struct tok_fixture *f, struct gguf_writer *w, char *err, size_t errlen)
{
	CU_ASSERT_EQUAL(gw_write(w, tmp_file()), 0);
	gw_free(w);
	err[0] = 0;
	return open_path(f, tmp_file(), err, errlen);
}

void tok_must_open(struct tok_fixture *f, struct gguf_writer *w)
{
	char err[256];
	int rc = open_writer(f, w, err, sizeof err);

	if (rc)
		printf("\n  %s\n", err);
	CU_ASSERT_EQUAL_FATAL(rc, 0);
}

/* Takes w: the file is refused and err holds `names`. */
void tok_must_refuse(struct gguf_writer *w, const char *names)
{
	struct tok_fixture f;
	char err[256];

	CU_ASSERT(open_writer(&f, w, err, sizeof err) < 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, names));
	if (!strstr(err, names))
		printf("\n  \"%s\" does not name %s\n", err, names);
	tok_close(&f);
}

/* ids as "1 2 3" */
const char *tok_ids(const struct tok_fixture *f, const char *text, unsigned flags)
{
	static char out[8192];
	uint32_t *ids, n, i;
	size_t at = 0;
	int rc = apr_tok_encode(f->t, text, strlen(text), flags, 0, &ids, &n);

	if (rc) {
		snprintf(out, sizeof out, "error %d", rc);
		return out;
	}
	out[0] = 0;
	for (i = 0; i < n && at < sizeof out - 16; i++)
		at += (size_t)snprintf(out + at, sizeof out - at, i ? " %u" : "%u", ids[i]);
	free(ids);
	return out;
}

bool tok_round_trips(const struct tok_fixture *f, const char *text, size_t len)
{
	uint32_t *ids, n, i;
	struct apr_detok d = {0};
	char *back, out[512];
	size_t back_len, at = 0, k, got;
	bool same;

	if (apr_tok_encode(f->t, text, len, 0, 0, &ids, &n))
		return false;
	same = !apr_tok_decode(f->t, ids, n, false, &back, &back_len);
	if (same) {
		same = back_len == len && !memcmp(back, text, len);
		free(back);
	}
	for (i = 0; i < n && same; i++) { /* streamed, it is the same text */
		const char *piece = apr_piece(f->t, ids[i], false, &k);

		same = k + 4 <= sizeof out;
		got = same ? apr_detok_push(&d, piece, k, out) : 0;
		same = same && at + got <= len && !memcmp(out, text + at, got);
		at += got;
	}
	got = apr_detok_flush(&d, out);
	same = same && at + got == len && !memcmp(out, text + at, got);
	free(ids);
	return same;
}

bool tok_gives_control(const struct tok_fixture *f, const char *text, size_t len)
{
	uint32_t *ids, n, i;
	bool control = false;

	if (apr_tok_encode(f->t, text, len, 0, 0, &ids, &n))
		return false;
	for (i = 0; i < n; i++)
		control |= apr_tokenizer_kind(f->t, ids[i]) == APR_PIECE_CONTROL;
	free(ids);
	return control;
}
