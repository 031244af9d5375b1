/* SPDX-License-Identifier: MIT */
/*
 * Every architecture, RoPE scaling and shape against a forward pass in double
 * (tests/support/ref_forward.h), by small random models: all log-probabilities of
 * all positions that score reports.
 *
 * Bounds. A model of 2–3 layers of width 256 carries about 60 chained roundings of
 * 2^-24 on values of order 1, and logits are sums of 256 products: 1e-4 nats is
 * ten times what is seen and a thousandth of what any misplaced piece gives.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/forward.h"
#include "engine/internal.h"
#include "engine/plan.h"
#include "tests/harness.h"
#include "tests/support/drive.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/ref_forward.h"

#define N 90u

static const char *write_file(struct gguf_writer *w)
{
	static char path[256];
	static unsigned count;

	CU_ASSERT_PTR_NOT_NULL_FATAL(w);
	snprintf(path, sizeof path, "%s/arch-%u.gguf", apr_test_tmpdir(), count++);
	CU_ASSERT_EQUAL_FATAL(gw_write(w, path), 0);
	gw_free(w);
	return path;
}

static void fill_ids(uint32_t *ids, uint32_t n)
{
	uint32_t i;

	for (i = 0; i < n; i++)
		ids[i] = (i * 131u + 7) % 300;
}

static double compare(const struct apr_loaded *m, const uint32_t *ids, const struct drive_job *job)
{
	uint32_t v = apr_loaded_model(m)->n_vocab, t, i;
	double *logits = malloc((size_t)job->p.n_ids * v * sizeof *logits), worst = 0;

	if (!logits)
		abort();
	ref_forward(apr_loaded_model(m), ids, job->p.n_ids, logits);
	for (t = 0; t + 1 < job->p.n_ids; t++) {
		const double *row = logits + (size_t)t * v;
		const struct drive_token *tok = &job->tok[t];
		double best = -INFINITY, sum = 0, lse, d;

		for (i = 0; i < v; i++)
			best = fmax(best, row[i]);
		for (i = 0; i < v; i++)
			sum += exp(row[i] - best);
		lse = best + log(sum);
		d = fabs((double)tok->logprob - (row[ids[t + 1]] - lse));
		for (i = 0; i < tok->n_top; i++)
			d = fmax(d, fabs((double)tok->top_logprob[i] - (row[tok->top_id[i]] - lse)));
		if (!(d <= worst))
			worst = d;
	}
	free(logits);
	return worst;
}

/* Worst error in nats of the model in w, which is freed. */
static double error_of(struct gguf_writer *w, const char *route, uint32_t n)
{
	const char *path = write_file(w);
	struct apr_engine_config cfg = drive_config(route, 512, 2);
	struct drive_job job = {.p = {.kind = APR_SEQ_SCORE, .n_ids = n, .n_top = APR_SAMPLE_TOP_MAX}};
	uint32_t ids[512];
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[256] = "";
	double d;

	fill_ids(ids, n);
	job.p.ids = ids;
	if (drive_open(&cfg, path, &e, &m, err, sizeof err)) {
		printf("\n  %s\n", err);
		CU_FAIL_FATAL("open");
		return 1e9;
	}
	CU_ASSERT(drive_run(m, e, &job, 1) > 0);
	CU_ASSERT_EQUAL_FATAL(job.n_tok, n - 1);
	d = compare(m, ids, &job);
	drive_done(&job, 1);
	drive_close(e, m);
	return d;
}

static const char *const archs[] = {"llama", "qwen2", "qwen3", "gemma3"};

static void each_architecture(void)
{
	size_t i;

	for (i = 0; i < 4; i++) {
		struct tiny_spec spec = {.arch = archs[i], .n_layers = 3, .pattern = 3};
		double d = error_of(apr_test_tiny_model(&spec), "f32", N);

		printf("\n  %-8s %.2e", archs[i], d);
		CU_ASSERT(d < 1e-4);
		spec.separate_output = true;
		spec.n_heads = 6;
		spec.n_kv_heads = 3;
		spec.head_dim = 32;
		CU_ASSERT(error_of(apr_test_tiny_model(&spec), "f32", N) < 1e-4);
		spec.n_kv_heads = 1;
		spec.head_dim = 80;
		CU_ASSERT(error_of(apr_test_tiny_model(&spec), "f32", N) < 1e-4);
	}
}

static void each_weight_type(void)
{
	uint32_t t;

	for (t = 0; t < APR_TYPE_LIMIT; t++) {
		struct tiny_spec spec = {.type = t, .seed = 40 + t};
		double exact, quick;

		if (!apr_type_info(t).block)
			continue;
		exact = error_of(apr_test_tiny_model(&spec), "f32", 40);
		quick = error_of(apr_test_tiny_model(&spec), NULL, 40);
		printf("\n  %-5s f32 %.1e int16 %.1e", apr_type_info(t).name, exact, quick);
		CU_ASSERT(exact < 1e-4);
		CU_ASSERT(quick < 2e-2); /* F16 KV: 2^-11 a value, and the int16 activations below it */
	}
}

static void kv_types(void)
{
	static const char *const kv[] = {"f32", "f16", "bf16"};
	static const double bound[] = {1e-4, 1e-2, 1e-1};
	struct tiny_spec spec = {.n_layers = 2};
	size_t i;

	for (i = 0; i < 3; i++) {
		const char *path = write_file(apr_test_tiny_model(&spec));
		struct apr_engine_config cfg = drive_config("f32", 512, 2);
		struct drive_job job = {.p = {.kind = APR_SEQ_SCORE, .n_ids = N, .n_top = 5}};
		struct apr_loaded_info info;
		uint32_t ids[N];
		struct apr_engine *e;
		struct apr_loaded *m;
		char err[256];
		double d;

		cfg.kv_type = kv[i];
		fill_ids(ids, N);
		job.p.ids = ids;
		CU_ASSERT_EQUAL_FATAL(drive_open(&cfg, path, &e, &m, err, sizeof err), 0);
		apr_loaded_info(m, &info);
		CU_ASSERT_STRING_EQUAL(info.kv_type, kv[i]);
		CU_ASSERT(drive_run(m, e, &job, 1) > 0);
		d = compare(m, ids, &job);
		CU_ASSERT(d < bound[i]);
		CU_ASSERT(i == 0 || d > 1e-6); /* it is not simply F32 */
		drive_done(&job, 1);
		drive_close(e, m);
	}
}

static void windows(void)
{
	static const uint32_t window[] = {1, 5, 63, 64, 65, 100};
	size_t i;

	for (i = 0; i < sizeof window / sizeof *window; i++) {
		struct tiny_spec spec = {.arch = "gemma3", .n_layers = 4, .pattern = 2, .window = window[i], .n_embd = 64, .n_ff = 96};

		CU_ASSERT(error_of(apr_test_tiny_model(&spec), "f32", 150) < 1e-4);
	}
}

/* ---- RoPE ------------------------------------------------------------------------ */

struct rope_case {
	const char *name, *scaling;
	bool freqs;
	uint32_t n_rot;
};
static const struct rope_case rope_cases[] = {
	{"none", NULL, false, 0},      {"partial", NULL, false, 32},       {"linear", "linear", false, 0},
	{"yarn", "yarn", false, 0},    {"rope_freqs", NULL, true, 0},      {"yarn, partial", "yarn", false, 32},
	{"freqs, linear", "linear", true, 0},
};

/* The tables themselves at the positions where short prompts hide a fault. */
static void case29_rope_tables(void)
{
	static const uint32_t at[] = {0, 1, 63, 64, 200};
	size_t c, p, a;

	for (a = 0; a < 2; a++)
		for (c = 0; c < sizeof rope_cases / sizeof *rope_cases; c++) {
			struct tiny_spec spec = {.arch = archs[a], .n_layers = 1, .rope_scaling = rope_cases[c].scaling,
			                         .rope_freqs = rope_cases[c].freqs, .n_rot = rope_cases[c].n_rot};
			const char *path = write_file(apr_test_tiny_model(&spec));
			struct apr_model *m;
			uint32_t half, i;
			float *table;
			char err[256];

			CU_ASSERT_EQUAL_FATAL(apr_model_open(&m, path, err, sizeof err), 0);
			half = m->rope.n_rot / 2;
			table = malloc((size_t)201 * half * 2 * sizeof *table);
			apr_rope_fill(&m->rope, m->layers[0].rope_base, m->layers[0].rope_scaled, 201, table);
			for (p = 0; p < sizeof at / sizeof *at; p++)
				for (i = 0; i < half; i++) {
					const float *cs = table + ((size_t)at[p] * half + i) * 2;
					double angle, mag;

					ref_rope(&m->rope, (double)m->layers[0].rope_base, m->layers[0].rope_scaled, i, at[p], &angle, &mag);
					CU_ASSERT(fabs((double)cs[0] - cos(angle) * mag) < 1e-6);
					CU_ASSERT(fabs((double)cs[1] - sin(angle) * mag) < 1e-6);
				}
			free(table);
			apr_model_close(m);
		}
}

static void case29_rope_in_the_forward_pass(void)
{
	size_t c, a;

	for (a = 0; a < 4; a++)
		for (c = 0; c < sizeof rope_cases / sizeof *rope_cases; c++) {
			struct tiny_spec spec = {.arch = archs[a], .n_layers = 2, .pattern = 2, .n_embd = 64, .n_ff = 64,
			                         .n_heads = 2, .n_kv_heads = 1, .rope_scaling = rope_cases[c].scaling,
			                         .rope_freqs = rope_cases[c].freqs, .n_rot = rope_cases[c].n_rot};
			double d = error_of(apr_test_tiny_model(&spec), "f32", 210);

			CU_ASSERT(d < 2e-4);
			if (!(d < 2e-4))
				printf("\n  %s %s: %g", archs[a], rope_cases[c].name, d);
		}
}

/* ---- shapes by layer ------------------------------------------------------------- */

/* KV heads 2 in layers 0 and 2, 1 in layer 1. */
static struct gguf_writer *mixed_kv(const char *arch)
{
	struct tiny_spec spec = {.arch = arch, .n_layers = 3, .pattern = 2};
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	static const uint32_t heads[3] = {2, 1, 2};
	static const char *const name[2] = {"blk.1.attn_k.weight", "blk.1.attn_v.weight"};
	static const char *const bias[2] = {"blk.1.attn_k.bias", "blk.1.attn_v.bias"};
	float *data = malloc((256 * 64 + 1) * sizeof *data);
	uint64_t ne[2] = {256, 64}, one = 64;
	char key[64];
	uint32_t i, k;

	snprintf(key, sizeof key, "%s.attention.head_count_kv", arch);
	gw_drop(w, key);
	gw_arr(w, key, GW_U32, heads, 3);
	for (i = 0; i < 256 * 64 + 1; i++)
		data[i] = (float)((i * 2654435761u >> 8) % 2001) / 16000.0f - 0.0625f;
	for (k = 0; k < 2; k++) {
		gw_drop_tensor(w, name[k]);
		gw_tensor(w, name[k], APR_TYPE_F32, 2, ne, data + k, 256 * 64 * sizeof *data);
		if (!strcmp(arch, "qwen2")) {
			gw_drop_tensor(w, bias[k]);
			gw_tensor(w, bias[k], APR_TYPE_F32, 1, &one, data, one * sizeof *data);
		}
	}
	free(data);
	return w;
}

static void case28_kv_heads_by_layer(void)
{
	const char *path = write_file(mixed_kv("llama"));
	struct apr_engine_config cfg = drive_config("f32", 512, 1);
	struct apr_engine *e;
	struct apr_loaded *m;
	char err[256] = "";

	if (drive_open(&cfg, path, &e, &m, err, sizeof err)) {
		printf("\n  %s\n", err);
		CU_FAIL_FATAL("open");
		return;
	}
	CU_ASSERT_EQUAL(m->sizes.n_groups, 2);
	/* bytes a position: the sum over layers of heads · (64 + 64) · 4 */
	CU_ASSERT_EQUAL(apr_plan_kv_token(&m->sizes), (2 + 1 + 2) * 128 * 4);
	drive_close(e, m);
	CU_ASSERT(error_of(mixed_kv("llama"), "f32", 150) < 1e-4);
	CU_ASSERT(error_of(mixed_kv("qwen2"), "f32", 150) < 1e-4);
	CU_ASSERT(error_of(mixed_kv("gemma3"), "f32", 150) < 1e-4);
}

/* One value for all layers, or the same value once a layer: equal bits. */
static void case28_equal_forms(void)
{
	static const uint32_t heads[3] = {2, 2, 2};
	static const uint8_t local[3] = {1, 0, 1}; /* what a pattern of 2 means */
	struct tiny_spec spec = {.arch = "gemma3", .n_layers = 3, .pattern = 2, .window = 20};
	struct apr_engine_config cfg = drive_config(NULL, 512, 2);
	struct drive_job job[2];
	uint32_t ids[N], form, i;

	fill_ids(ids, N);
	for (form = 0; form < 2; form++) {
		struct gguf_writer *w = apr_test_tiny_model(&spec);
		struct apr_engine *e;
		struct apr_loaded *m;
		char err[256] = "";

		if (form) {
			gw_drop(w, "gemma3.attention.head_count_kv");
			gw_drop(w, "gemma3.attention.sliding_window_pattern");
			gw_arr(w, "gemma3.attention.head_count_kv", GW_U32, heads, 3);
			gw_arr(w, "gemma3.attention.sliding_window_pattern", GW_BOOL, local, 3);
		}
		job[form] = (struct drive_job){.p = {.kind = APR_SEQ_SCORE, .ids = ids, .n_ids = N}};
		if (drive_open(&cfg, write_file(w), &e, &m, err, sizeof err)) {
			printf("\n  %s", err);
			CU_FAIL_FATAL("open");
			return;
		}
		CU_ASSERT_EQUAL(m->sizes.n_groups, 2);
		CU_ASSERT(drive_run(m, e, &job[form], 1) > 0);
		drive_close(e, m);
	}
	CU_ASSERT_EQUAL_FATAL(job[0].n_tok, job[1].n_tok);
	for (i = 0; i < job[0].n_tok; i++)
		CU_ASSERT_EQUAL(memcmp(&job[0].tok[i].logprob, &job[1].tok[i].logprob, sizeof(float)), 0);
	drive_done(job, 2);
}

static void softcaps_and_biases(void)
{
	struct tiny_spec spec = {.arch = "gemma3", .n_layers = 2, .pattern = 2};
	struct gguf_writer *w = apr_test_tiny_model(&spec);
	float *b = malloc(256 * sizeof *b);
	uint64_t ne = 256;
	double plain, capped;
	uint32_t i;

	gw_f32(w, "gemma3.attn_logit_softcapping", 2.0f);
	gw_f32(w, "gemma3.final_logit_softcapping", 1.5f);
	CU_ASSERT(error_of(w, "f32", N) < 1e-4);
	/* an output bias, which llama files may have */
	spec = (struct tiny_spec){.arch = "llama"};
	w = apr_test_tiny_model(&spec);
	for (i = 0; i < 256; i++)
		b[i] = sinf((float)i);
	gw_tensor(w, "blk.1.attn_output.bias", APR_TYPE_F32, 1, &ne, b, 256 * sizeof *b);
	gw_tensor(w, "blk.0.attn_q.bias", APR_TYPE_F32, 1, &ne, b, 256 * sizeof *b);
	CU_ASSERT(error_of(w, "f32", N) < 1e-4);
	free(b);
	/* a scale of the file's own */
	w = apr_test_tiny_model(&spec);
	gw_f32(w, "llama.attention.scale", 0.03f);
	plain = error_of(apr_test_tiny_model(&spec), "f32", N);
	capped = error_of(w, "f32", N);
	CU_ASSERT(plain < 1e-4 && capped < 1e-4);
}

/* Channels a thousand times the others, as real models have them. */
static void planted_channels(void)
{
	struct tiny_spec spec = {.arch = "gemma3", .n_layers = 3, .pattern = 3, .planted = 2};
	double d = error_of(apr_test_tiny_model(&spec), "f32", N), q;

	CU_ASSERT(d < 1e-3);
	spec.type = APR_TYPE_Q4_K;
	q = error_of(apr_test_tiny_model(&spec), NULL, N);
	printf("\n  f32 %.1e, Q4_K int16 %.1e", d, q);
	CU_ASSERT(q < 5e-2);
}

static const struct apr_test tests[] = {
	{"each_architecture", each_architecture, KEEPS_HEAP}, /* stdio's buffer, ended threads' stacks */
	{"each_weight_type", each_weight_type, 0},
	{"kv_types", kv_types, 0},
	{"windows", windows, 0},
	{"case29_rope_tables", case29_rope_tables, 0},
	{"case29_rope_in_the_forward_pass", case29_rope_in_the_forward_pass, 0},
	{"case28_kv_heads_by_layer", case28_kv_heads_by_layer, 0},
	{"case28_equal_forms", case28_equal_forms, 0},
	{"softcaps_and_biases", softcaps_and_biases, 0},
	{"planted_channels", planted_channels, 0},
};
TEST_MAIN("engine/arch", tests)
