/* SPDX-License-Identifier: MIT */
/* Owns: the target for model files. See fuzz.h. */
#include "model/gguf.h"
#include "model/model.h"
#include "model/tokenizer.h"
#include "tests/fuzz/fuzz.h"
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char path[40];
static int fd = -1;

/* before anything counts descriptors */
__attribute__((constructor)) static void make_file(void)
{
	fd = memfd_create("fuzz", MFD_CLOEXEC);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
}

const char *fuzz_file(const uint8_t *data, size_t n)
{
	if (fd < 0 || ftruncate(fd, 0) || pwrite(fd, data, n, 0) != (ssize_t)n)
		abort();
	return path;
}

static void touch(const void *p, uint64_t n)
{
	const volatile uint8_t *b = p;

	if (n) {
		(void)b[0];
		(void)b[n / 2];
		(void)b[n - 1];
	}
}

static void every_key(const struct gguf *g)
{
	char key[300], err[256], shown[64];

	for (uint32_t i = 0; i < gguf_n_keys(g); i++) {
		struct gguf_str k = gguf_key(g, i), s;
		struct gguf_arr a;
		uint32_t u;
		int32_t v;
		float f;
		bool b;
		touch(k.s, k.len);
		gguf_printable(k, shown, sizeof(shown));
		MUST(memchr(shown, 0, sizeof(shown)));
		snprintf(key, sizeof(key), "%.*s", (int)(k.len < 299 ? k.len : 299), k.s);
		gguf_get_u32(g, key, &u, err, sizeof(err));
		gguf_get_i32(g, key, &v, err, sizeof(err));
		gguf_get_bool(g, key, &b, err, sizeof(err));
		if (!gguf_get_f32(g, key, &f, err, sizeof(err)))
			MUST(f - f == 0);
		if (!gguf_get_str(g, key, &s, err, sizeof(err)))
			touch(s.s, s.len);
		if (gguf_get_arr(g, key, &a, err, sizeof(err)))
			continue;
		const uint8_t *at = a.p;
		for (uint64_t j = 0; j < a.n && j < 1000; j++) {
			if (a.elem == GGUF_STR) {
				s = gguf_arr_next(&at);
				touch(s.s, s.len);
			} else {
				gguf_arr_u32(&a, j, &u);
				gguf_arr_i32(&a, j, &v);
				gguf_arr_f32(&a, j, &f);
			}
		}
	}
}

static void as_model(const uint8_t *data, size_t n)
{
	struct apr_model *m;
	struct apr_tokenizer *t;
	char err[300] = "";

	if (apr_model_open(&m, fuzz_file(data, n), err, sizeof(err))) {
		MUST(err[0]);
		return;
	}
	MUST(m->n_layers && m->n_embd && m->n_vocab);
	for (uint32_t i = 0; i < gguf_n_tensors(m->gguf); i++)
		touch(gguf_tensor(m->gguf, i)->data, gguf_tensor(m->gguf, i)->bytes);
	err[0] = 0;
	if (apr_tokenizer_new(&t, m, err, sizeof(err))) {
		MUST(err[0]);
	} else {
		uint32_t *ids = NULL, n_ids;
		if (!apr_tok_encode(t, "a the <|eos|>", 13, APR_TOK_ADD_BOS | APR_TOK_PARSE_SPECIAL, 0, &ids, &n_ids))
			for (uint32_t i = 0; i < n_ids; i++)
				MUST(ids[i] < apr_tokenizer_size(t));
		free(ids);
		apr_tokenizer_free(t);
	}
	apr_model_close(m);
}

int fuzz_gguf(const uint8_t *data, size_t n)
{
	uint64_t *copy = aligned_alloc(8, (n + 8) & ~(size_t)7);
	struct gguf *g;
	char err[300] = "";

	if (!copy)
		return 0;
	memcpy(copy, data, n);
	if (gguf_open_memory(&g, copy, n, err, sizeof(err))) {
		MUST(err[0] && memchr(err, 0, sizeof(err)));
		free(copy);
		return 0;
	}
	every_key(g);
	for (uint32_t i = 0; i < gguf_n_tensors(g); i++) {
		const struct gguf_tensor *t = gguf_tensor(g, i);
		MUST((const uint8_t *)t->data >= (uint8_t *)copy && (const uint8_t *)t->data + t->bytes <= (uint8_t *)copy + n);
		touch(t->data, t->bytes);
	}
	bool deeper = gguf_has(g, "general.architecture");
	gguf_close(g);
	free(copy);
	if (deeper)
		as_model(data, n);
	return 0;
}
