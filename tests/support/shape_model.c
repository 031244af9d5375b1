/* SPDX-License-Identifier: MIT */
/* Random models of real shapes: see shape_model.h. */
#include "tests/support/shape_model.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/types.h"
#include "tests/support/gguf_writer.h"

#define MAX_THREADS 64u
#define PIECE (4u << 20) /* bytes that a thread makes at a time */
#define DEVIATION 0.02f

struct shape {
	const char *name, *arch;
	uint32_t n_embd, n_ff, n_layers, n_heads, n_kv_heads, n_vocab;
	bool tied;
	float rope_base;
};
static const struct shape shapes[] = {
	{"small", "llama", 512, 1536, 4, 8, 4, 4096, true, 1e4f},
	{"llama-1b", "llama", 2048, 8192, 16, 32, 8, 128256, true, 5e5f},
	{"qwen2-1.5b", "qwen2", 1536, 8960, 28, 12, 2, 151936, true, 1e6f},
	{"qwen2-7b", "qwen2", 3584, 18944, 28, 28, 4, 152064, false, 1e6f},
	{"llama-8b", "llama", 4096, 14336, 32, 32, 8, 128256, false, 5e5f},
};
enum mix { MIX_Q4_K_M, MIX_Q8_0, MIX_F16, MIX_BF16, MIXES };
static const char *const mix_name[MIXES] = {"Q4_K_M", "Q8_0", "F16", "BF16"};

struct tensor {
	uint32_t type;
	bool ones; /* a norm's weight */
	uint64_t at, bytes;
};
struct job { /* what the threads share */
	int fd;
	uint64_t seed, data_at;
	struct tensor *t;
	uint32_t n_t;
	struct gguf_writer *w;
	_Atomic uint64_t next; /* piece to be made; which thread makes it does not matter, so it orders nothing */
	_Atomic int failed;
	uint64_t n_pieces;
};

static const struct shape *find_shape(const char *name)
{
	for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
		if (!strcmp(shapes[i].name, name))
			return &shapes[i];
	return NULL;
}

static int find_mix(const char *name)
{
	for (int i = 0; i < MIXES; i++)
		if (!strcmp(mix_name[i], name))
			return i;
	return -1;
}

/* ---- which tensors ------------------------------------------------------------------------ */

static uint32_t type_of(enum mix mix, const struct shape *s, const char *name, uint32_t layer)
{
	uint32_t e = s->n_layers / 8;
	bool more = layer < e || layer >= 7 * e || (layer - e) % 3 == 2; /* where the usual mix spends more bits */

	switch (mix) {
	case MIX_Q8_0: return APR_TYPE_Q8_0;
	case MIX_F16: return APR_TYPE_F16;
	case MIX_BF16: return APR_TYPE_BF16;
	default: break;
	}
	if (!strcmp(name, "output") || (!strcmp(name, "token_embd") && s->tied))
		return APR_TYPE_Q6_K;
	if ((!strcmp(name, "attn_v") || !strcmp(name, "ffn_down")) && more)
		return APR_TYPE_Q6_K;
	return APR_TYPE_Q4_K;
}

static uint64_t row_bytes(uint32_t type, uint32_t n)
{
	struct apr_type_info ti = apr_type_info(type);

	return (uint64_t)n / ti.block * ti.block_bytes;
}

static void add(struct job *j, const char *name, uint32_t type, uint32_t n_in, uint32_t n_out, bool ones)
{
	uint64_t ne[2] = {n_in, n_out}, bytes = row_bytes(type, n_in) * n_out;
	struct tensor *t;

	j->t = realloc(j->t, (j->n_t + 1) * sizeof *j->t);
	if (!j->t)
		abort();
	t = &j->t[j->n_t++];
	*t = (struct tensor){.type = type, .ones = ones, .bytes = bytes};
	if (j->w) {
		gw_tensor(j->w, name, type, n_out > 1 ? 2 : 1, ne, NULL, bytes);
		t->at = gw_tensor_at(j->w, j->n_t - 1);
	}
	j->n_pieces += (bytes + PIECE - 1) / PIECE;
}

static void layer(struct job *j, const struct shape *s, enum mix mix, uint32_t l)
{
	uint32_t d = s->n_embd, kv = d / s->n_heads * s->n_kv_heads;
	const struct {
		const char *name;
		uint32_t n_in, n_out;
	} m[] = {{"attn_q", d, d},          {"attn_k", d, kv},        {"attn_v", d, kv},       {"attn_output", d, d},
	         {"ffn_gate", d, s->n_ff}, {"ffn_up", d, s->n_ff}, {"ffn_down", s->n_ff, d}};
	char name[64];

	for (unsigned i = 0; i < 2; i++) {
		snprintf(name, sizeof name, "blk.%u.%s_norm.weight", l, i ? "ffn" : "attn");
		add(j, name, APR_TYPE_F32, d, 1, true);
	}
	for (unsigned i = 0; i < sizeof m / sizeof *m; i++) {
		snprintf(name, sizeof name, "blk.%u.%s.weight", l, m[i].name);
		add(j, name, type_of(mix, s, m[i].name, l), m[i].n_in, m[i].n_out, false);
		snprintf(name, sizeof name, "blk.%u.%s.bias", l, m[i].name);
		if (i < 3 && !strcmp(s->arch, "qwen2"))
			add(j, name, APR_TYPE_F32, m[i].n_out, 1, false);
	}
}

static void list(struct job *j, const struct shape *s, enum mix mix)
{
	add(j, "token_embd.weight", type_of(mix, s, "token_embd", 0), s->n_embd, s->n_vocab, false);
	if (!s->tied)
		add(j, "output.weight", type_of(mix, s, "output", 0), s->n_embd, s->n_vocab, false);
	add(j, "output_norm.weight", APR_TYPE_F32, s->n_embd, 1, true);
	for (uint32_t l = 0; l < s->n_layers; l++)
		layer(j, s, mix, l);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static uint64_t mixed(uint64_t z) /* splitmix64's finish */
{
	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	return z ^ (z >> 31);
}

/* Near normal: the sum of four 16-bit uniforms. */
static float normal(uint64_t u)
{
	int32_t sum = (int32_t)(u & 0xffff) + (int32_t)(u >> 16 & 0xffff) + (int32_t)(u >> 32 & 0xffff) + (int32_t)(u >> 48);

	return (float)(sum - 131070) * (DEVIATION / 37837.0f);
}

/* n bytes of tensor t from the given one on; both on a block's border */
static void make(const struct job *j, uint32_t t, uint64_t from, uint8_t *p, uint64_t n)
{
	const struct tensor *x = &j->t[t];
	struct apr_type_info ti = apr_type_info(x->type);
	uint64_t s = mixed(j->seed + t * UINT64_C(0x9e3779b97f4a7c15)) + from, i;

	if (x->type == APR_TYPE_F32 || x->type == APR_TYPE_F16 || x->type == APR_TYPE_BF16) {
		for (i = 0; i < n / ti.block_bytes; i++) {
			float f = x->ones ? 1.0f : normal(mixed(s += UINT64_C(0x9e3779b97f4a7c15)));
			uint32_t bits;
			uint16_t half;

			memcpy(&bits, &f, sizeof bits);
			half = x->type == APR_TYPE_F16 ? apr_test_to_f16(f) : (uint16_t)(bits >> 16);
			memcpy(p + i * ti.block_bytes, x->type == APR_TYPE_F32 ? (const void *)&f : &half, ti.block_bytes);
		}
		return;
	}
	for (i = 0; i + 8 <= n; i += 8) {
		uint64_t u = mixed(s += UINT64_C(0x9e3779b97f4a7c15));

		memcpy(p + i, &u, 8);
	}
	memset(p + i, 0x5a, n - i);
	for (i = 0; i < n; i += ti.block_bytes)
		apr_test_scale_block(x->type, p + i, DEVIATION);
}

static int write_all(int fd, const uint8_t *p, uint64_t n, uint64_t at)
{
	while (n) {
		ssize_t k = pwrite(fd, p, n, (off_t)at);

		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			return k < 0 ? -errno : -EIO;
		p += k;
		n -= (uint64_t)k;
		at += (uint64_t)k;
	}
	return 0;
}

/* Which bytes of which tensor a piece is. */
static void piece(const struct job *j, uint64_t k, uint32_t *t, uint64_t *from, uint64_t *n)
{
	uint64_t pieces, whole;

	for (*t = 0; k >= (pieces = (j->t[*t].bytes + PIECE - 1) / PIECE); ++*t)
		k -= pieces;
	whole = j->t[*t].bytes / apr_type_info(j->t[*t].type).block_bytes; /* blocks, dealt out evenly */
	*from = whole * k / pieces * apr_type_info(j->t[*t].type).block_bytes;
	*n = whole * (k + 1) / pieces * apr_type_info(j->t[*t].type).block_bytes - *from;
}

static void *work(void *arg)
{
	struct job *j = arg;
	uint8_t *buf = malloc(PIECE + 4096);
	uint64_t k, from, n;
	uint32_t t;
	int e = buf ? 0 : -ENOMEM;

	while (!e && (k = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed)) < j->n_pieces) {
		piece(j, k, &t, &from, &n);
		make(j, t, from, buf, n);
		e = write_all(j->fd, buf, n, j->data_at + j->t[t].at + from);
	}
	if (e)
		atomic_store_explicit(&j->failed, e, memory_order_relaxed); /* the join orders it */
	free(buf);
	return NULL;
}

static int fill(struct job *j, unsigned threads)
{
	pthread_t t[MAX_THREADS];
	unsigned n = 0;

	while (n + 1 < threads && !pthread_create(&t[n], NULL, work, j))
		n++;
	work(j);
	while (n)
		pthread_join(t[--n], NULL);
	return atomic_load_explicit(&j->failed, memory_order_relaxed);
}

static unsigned usable(void)
{
	cpu_set_t set;
	unsigned n = sched_getaffinity(0, sizeof set, &set) ? 1 : (unsigned)CPU_COUNT(&set);

	return n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
}

/* ---- the file ---------------------------------------------------------------------------------- */

uint64_t apr_test_shape_bytes(const char *shape, const char *mix)
{
	const struct shape *s = find_shape(shape);
	struct job j = {0};
	uint64_t sum = 0;
	int m = find_mix(mix);

	if (!s || m < 0)
		return 0;
	list(&j, s, (enum mix)m);
	for (uint32_t i = 0; i < j.n_t; i++)
		sum += j.t[i].bytes;
	free(j.t);
	return sum;
}

int apr_test_write_shape(const char *path, const char *shape, const char *mix, unsigned threads, uint64_t seed)
{
	const struct shape *s = find_shape(shape);
	struct tiny_spec keys = {0};
	struct job j = {.seed = seed};
	int m = find_mix(mix), e;
	uint8_t *head;
	size_t len;

	if (!s || m < 0)
		return -EINVAL;
	keys = (struct tiny_spec){.arch = s->arch, .n_layers = s->n_layers, .n_embd = s->n_embd, .n_ff = s->n_ff,
	                          .n_heads = s->n_heads, .n_kv_heads = s->n_kv_heads, .head_dim = s->n_embd / s->n_heads,
	                          .n_vocab = s->n_vocab, .n_ctx = 32768, .rope_base = s->rope_base};
	j.w = apr_test_tiny_keys(&keys);
	if (!j.w)
		return -EINVAL;
	list(&j, s, (enum mix)m);
	gw_finish_head(j.w, &head, &len);
	j.data_at = len;
	j.fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
	e = j.fd < 0 ? -errno : write_all(j.fd, head, len, 0);
	if (!e)
		e = fill(&j, threads && threads < MAX_THREADS ? threads : usable());
	if (j.fd >= 0 && close(j.fd) && !e)
		e = -errno;
	free(head);
	free(j.t);
	gw_free(j.w);
	return e;
}
