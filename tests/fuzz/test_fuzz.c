/* SPDX-License-Identifier: MIT */
/*
 * Each fuzz target over its corpus and a fixed series of mutations of it: the same in every run. Seconds; make fuzz
 * searches further (libFuzzer). APR_FUZZ_RUNS=N mutations a target; APR_FUZZ_FILE=FILE: that file alone, to each target
 * (run one with its test's name).
 */
#include "tests/fuzz/fuzz.h"
#include "tests/harness.h"
#include <dirent.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

enum { SEEDS = 64, ROOM = 1 << 17 };

struct seed {
	uint8_t *data;
	size_t n;
};

static uint64_t state;

static uint32_t draw(uint32_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return below ? (uint32_t)(state >> 32) % below : 0;
}

static bool slurp(const char *path, struct seed *s)
{
	FILE *f = fopen(path, "re");

	if (!f)
		return false;
	s->data = malloc(ROOM);
	s->n = s->data ? fread(s->data, 1, ROOM, f) : 0;
	fclose(f);
	return s->data != NULL;
}

static unsigned corpus(const char *name, struct seed seeds[SEEDS])
{
	char path[512];
	struct dirent **list;
	unsigned n = 0;

	snprintf(path, sizeof(path), "tests/fuzz/corpus/%s", name);
	int count = scandir(path, &list, NULL, alphasort); /* one order everywhere */
	for (int i = 0; i < count; i++) {
		snprintf(path, sizeof(path), "tests/fuzz/corpus/%s/%s", name, list[i]->d_name);
		if (list[i]->d_name[0] != '.' && n < SEEDS && slurp(path, &seeds[n]))
			n++;
		free(list[i]);
	}
	if (count >= 0)
		free(list);
	return n;
}

static size_t mutate(uint8_t *b, size_t n, const struct seed *other)
{
	static const uint32_t odd[] = { 0, 1, 0x7f, 0x80, 0xff, 0x100, 0x7fffffff, 0x80000000u, 0xfffffffcu, 0xffffffffu };

	for (uint32_t i = 0, k = 1 + draw(4); i < k; i++) {
		size_t at = n ? draw((uint32_t)n) : 0;
		switch (draw(6)) {
		case 0:
			if (n)
				b[at] ^= (uint8_t)(1u << draw(8));
			break;
		case 1:
			if (n)
				b[at] = (uint8_t)draw(256);
			break;
		case 2:
			if (at + 4 <= n)
				memcpy(b + at, &odd[draw(10)], 4);
			break;
		case 3: n = at; break; /* cut */
		case 4: { /* a piece of another */
			size_t from = draw((uint32_t)other->n + 1), len = draw(64);
			if (from + len <= other->n && at + len <= ROOM) {
				memcpy(b + at, other->data + from, len);
				n = at + len > n ? at + len : n;
			}
			break;
		}
		default: { /* a run again */
			size_t len = draw(32);
			if (at + 2 * len <= n) {
				memmove(b + at + len, b + at, len);
			}
		}
		}
	}
	return n;
}

static void run(const char *name, int (*target)(const uint8_t *, size_t), unsigned runs)
{
	static uint8_t work[ROOM];
	struct seed seeds[SEEDS];
	const char *file = getenv("APR_FUZZ_FILE"), *more = getenv("APR_FUZZ_RUNS");
	unsigned n = file ? (unsigned)slurp(file, &seeds[0]) : corpus(name, seeds);
	int err = dup(2), null = open("/dev/null", O_WRONLY | O_CLOEXEC);

	CU_ASSERT_TRUE(n > 0);
	if (!file)
		dup2(null, 2); /* refusals are told there */
	for (unsigned i = 0; i < n; i++)
		target(seeds[i].data, seeds[i].n);
	state = UINT64_C(0x9e3779b97f4a7c15);
	for (unsigned i = 0, k = file ? 0 : more ? (unsigned)atoi(more) : runs; n && i < k; i++) {
		const struct seed *s = &seeds[draw(n)];
		memcpy(work, s->data, s->n);
		target(work, mutate(work, s->n, &seeds[draw(n)]));
	}
	dup2(err, 2);
	close(err);
	close(null);
	for (unsigned i = 0; i < n; i++)
		free(seeds[i].data);
}

static void gguf(void)
{
	run("gguf", fuzz_gguf, 15000);
}

static void tokens(void)
{
	run("tokens", fuzz_tokens, 60000);
}

static void sqe(void)
{
	run("sqe", fuzz_sqe, 300000);
}

static void hello(void)
{
	run("hello", fuzz_hello, 300000);
}

static void config(void)
{
	run("config", fuzz_config, 6000);
}

static const struct apr_test tests[] = {
	{ "gguf", gguf, 0 },
	{ "tokens", tokens, KEEPS_HEAP }, /* two tokenizers */
	{ "sqe", sqe, 0 },
	{ "hello", hello, 0 },
	{ "config", config, KEEPS_HEAP }, /* group names: libc's own */
};
TEST_MAIN("fuzz/fuzz", tests)
