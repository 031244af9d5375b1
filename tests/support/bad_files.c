/* SPDX-License-Identifier: MIT */
/* Hostile model files: see bad_files.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "model/model.h"
#include "model/tokenizer.h"
#include "tests/harness.h"
#include "tests/support/bad_files.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

#define ROOM ((rlim_t)64 << 20) /* address space that a refused file may use, its own mapping included */

const char *bad_tmp(const char *name)
{
	static char path[512];

	snprintf(path, sizeof path, "%s/%s", apr_test_tmpdir(), name);
	return path;
}

static void write_bytes(const char *path, const void *p, size_t n)
{
	FILE *f = fopen(path, "wb");

	CU_ASSERT_PTR_NOT_NULL_FATAL(f);
	CU_ASSERT_EQUAL(fwrite(p, 1, n, f), n);
	fclose(f);
}

static rlim_t address_space(void)
{
	FILE *f = fopen("/proc/self/statm", "r");
	char line[128] = "";

	if (f) {
		if (!fgets(line, sizeof line, f))
			line[0] = 0;
		fclose(f);
	}
	return (rlim_t)strtoul(line, NULL, 10) * (rlim_t)sysconf(_SC_PAGESIZE);
}

static struct rlimit limit_memory(void)
{
	struct rlimit was, now;

	getrlimit(RLIMIT_AS, &was);
	now = was;
	now.rlim_cur = address_space() + ROOM;
	if (!SANITIZED)
		setrlimit(RLIMIT_AS, &now);
	return was;
}

int bad_open(const char *path, char *err, size_t errlen)
{
	struct apr_tokenizer *t = NULL;
	struct apr_model *m = NULL;
	int rc;

	err[0] = 0;
	rc = apr_model_open(&m, path, err, errlen);
	if (rc)
		return rc;
	rc = apr_tokenizer_new(&t, m, err, errlen);
	if (!rc)
		apr_tokenizer_free(t);
	apr_model_close(m);
	return rc;
}

void bad_good_file_opens(void)
{
	struct tiny_spec spec = {.n_layers = 1, .n_embd = 32, .n_ff = 32, .n_heads = 1, .n_kv_heads = 1, .head_dim = 32};
	char err[256];

	CU_ASSERT_EQUAL(apr_test_write_tiny_model(bad_tmp("good.gguf"), &spec), 0);
	CU_ASSERT_EQUAL(bad_open(bad_tmp("good.gguf"), err, sizeof err), 0);
	if (err[0])
		printf("\n  good file: %s\n", err);
}

/* The bytes are refused with one line that holds `names`. */
void bad_refused_bytes(const void *p, size_t n, const char *names)
{
	struct rlimit was;
	char err[256];
	int rc;

	write_bytes(bad_tmp("bad.gguf"), p, n);
	was = limit_memory();
	rc = bad_open(bad_tmp("bad.gguf"), err, sizeof err);
	setrlimit(RLIMIT_AS, &was);
	CU_ASSERT(rc == -EINVAL || rc == -ENOTSUP);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, names));
	CU_ASSERT_PTR_NULL(strchr(err, '\n'));
	if (!strstr(err, names))
		printf("\n  rc %d, \"%s\" does not name %s\n", rc, err, names);
	bad_good_file_opens();
}

void bad_refused(struct gguf_writer *w, const char *names)
{
	uint8_t *p;
	size_t n;

	gw_finish(w, &p, &n);
	bad_refused_bytes(p, n, names);
	free(p);
	gw_free(w);
}

struct gguf_writer *bad_tiny(void)
{
	struct tiny_spec spec = {.n_layers = 1, .n_embd = 32, .n_ff = 32, .n_heads = 2, .n_kv_heads = 1, .head_dim = 16};

	return apr_test_tiny_model(&spec);
}
