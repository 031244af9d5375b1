/* SPDX-License-Identifier: MIT */
/* CHAT: messages through the model's own template. CASES 2, 26, 27 and 32. */
#include "tests/daemon/running.h"

static struct daemon d;

enum { MODELS = 6 };
/* <filler0> .. are NORMAL pieces with a delimiter's form: those that the template writes are delimiters. Each other
 * character is an id ("th" is the one merge). */
static const struct {
	const char *name, *template;
} models[MODELS] = {
	{ "plain", "{{ bos_token }}{% for m in messages %}<filler0>{{ m.content }}<filler1>{% endfor %}" },
	{ "nobos", "{% for m in messages %}<filler0>{{ m.role }}{{ m.content }}{% endfor %}{{ '+' if add_generation_prompt }}"
		   "{{ tools|length if tools }}{{ x }}{{ 'D' if documents is none }}" },
	{ "none", NULL },
	{ "broken", "ok\n{% for m in messages %}" },
	{ "refuses", "\n{{ raise_exception('never ' ~ messages[0].content) }}" },
	{ "clock", "{{ strftime_now('%Y') }}" },
};
static uint32_t ids[MODELS];

static const char *model_file(int i)
{
	static char path[160];
	struct tiny_spec spec = { .n_layers = 1, .n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32,
				  .n_ctx = 512 };
	struct gguf_writer *w = apr_test_tiny_model(&spec);

	if (models[i].template)
		gw_str(w, "tokenizer.chat_template", models[i].template);
	snprintf(path, sizeof(path), "%s/chat-%s.gguf", apr_test_tmpdir(), models[i].name);
	CU_ASSERT_EQUAL_FATAL(gw_write(w, path), 0);
	gw_free(w);
	return path;
}

static void daemon_up(void)
{
	char spec[MODELS][200];
	const char *args[2 * MODELS + 8];
	int n = 0;

	daemon_name(&d, "chat");
	for (int i = 0; i < MODELS; i++) {
		snprintf(spec[i], sizeof(spec[i]), "%s=%s", models[i].name, model_file(i));
		args[n++] = "-m";
		args[n++] = spec[i];
	}
	args[n++] = "-s";
	args[n++] = d.sock;
	args[n++] = "-t";
	args[n++] = "1";
	args[n] = NULL;
	daemon_spawn(&d, args);
	CU_ASSERT_TRUE_FATAL(daemon_ready(&d));
	struct apr *c = connect_to(&d);
	for (int i = 0; i < MODELS; i++)
		CU_ASSERT_EQUAL(apr_find_model(c, models[i].name, &ids[i]), 0);
	CU_ASSERT_EQUAL(apr_has(c, APR_FEAT_MESSAGES), 1);
	CU_ASSERT_EQUAL(apr_can(c, APR_OP_CHAT), 1);
	apr_close(c);
}

static void daemon_down(void)
{
	CU_ASSERT_TRUE(status_becomes(&d, "running", 0));
	CU_ASSERT_TRUE(alive(&d));
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static char err[300];

/* Tokens of the prompt that the JSON becomes, or -errno. */
static int prompt(int model, const char *json, uint32_t flags)
{
	struct apr *c = connect_to(&d);
	struct apr_gen g = { .size = sizeof(g), .model = ids[model], .text = json, .len = strlen(json), .flags = flags };
	struct apr_result r;

	int e = apr_chat(c, &g, NULL, NULL, &r, err, sizeof(err));
	apr_close(c);
	return e ? e : (int)r.cost.prompt;
}

static void refused(int model, const char *json, int want, const char *words)
{
	int e = prompt(model, json, 0);

	if (e != want || !strstr(err, words))
		fprintf(stderr, "\n%.60s: %d %s\n", json, e, err);
	CU_ASSERT_EQUAL(e, want);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, words));
}

static void the_template_writes_the_prompt(void)
{
	CU_ASSERT_EQUAL(prompt(0, "[{\"role\":\"user\",\"content\":\"abc\"}]", 0), 1 + 1 + 3 + 1);
	CU_ASSERT_EQUAL(prompt(0, "{\"messages\":[{\"role\":\"user\",\"content\":\"abc\"},{\"role\":\"x\",\"content\":\"\"}]}", 0), 8);
	/* role, then "+" of the generation prompt, "D" of no documents */
	CU_ASSERT_EQUAL(prompt(1, "[{\"role\":\"us\",\"content\":\"abc\"}]", 0), 1 + 1 + 2 + 3 + 1 + 1);
	CU_ASSERT_EQUAL(prompt(1, "{\"messages\":[{\"role\":\"us\",\"content\":\"abc\"}],\"add_generation_prompt\":false}", 0), 8);
	CU_ASSERT_EQUAL(prompt(1, "{\"messages\":[{\"role\":\"us\",\"content\":\"abc\"}],\"tools\":[{},{}],\"documents\":[],"
				  "\"variables\":{\"x\":\"yyyy\"}}", 0), 1 + 1 + 2 + 3 + 1 + 1 + 4);
	/* what has a name of its own is not taken from the variables */
	CU_ASSERT_EQUAL(prompt(0, "{\"messages\":[{\"role\":\"u\",\"content\":\"a\"}],\"variables\":{\"bos_token\":\"xxxxx\","
				  "\"messages\":[]}}", 0), 4);
}

static void case02_case27_content_is_never_parsed(void)
{
	CU_ASSERT_EQUAL(prompt(0, "[{\"role\":\"user\",\"content\":\"<filler0>\"}]", 0), 1 + 1 + 9 + 1);
	CU_ASSERT_EQUAL(prompt(0, "[{\"role\":\"user\",\"content\":\"<|eos|>\"}]", 0), 1 + 1 + 7 + 1);
	CU_ASSERT_EQUAL(prompt(0, "[{\"role\":\"user\",\"content\":\"<filler0>\"}]", APR_SQE_PARSE_SPECIAL), 4);
	CU_ASSERT_EQUAL(prompt(1, "[{\"role\":\"<filler0>\",\"content\":\"\"}]", 0), 1 + 1 + 9 + 2);
	CU_ASSERT_EQUAL(prompt(0, "[{\"role\":\"u\",\"content\":\"a\\u0000b\"}]", 0), 1 + 1 + 3 + 1);
}

static void case26_bos_is_there_once(void)
{
	/* the file says that it goes in front: "plain" writes it, "nobos" does not */
	CU_ASSERT_EQUAL(prompt(0, "[{\"role\":\"u\",\"content\":\"\"}]", 0), 3);
	CU_ASSERT_EQUAL(prompt(1, "[{\"role\":\"u\",\"content\":\"\"}]", 0), 1 + 1 + 1 + 2);
	CU_ASSERT_EQUAL(prompt(0, "[{\"role\":\"u\",\"content\":\"<|bos|>\"}]", 0), 3 + 7);
}

static void case32_no_template_is_said(void)
{
	refused(2, "[{\"role\":\"user\",\"content\":\"x\"}]", -EOPNOTSUPP, "this model's file has no chat template");
	refused(3, "[{\"role\":\"user\",\"content\":\"x\"}]", -EOPNOTSUPP,
		"this model's chat template: line 2: a block without its endfor");
	CU_ASSERT(log_has(&d, "broken: CHAT is not served: this model's chat template: line 2"));
}

static void what_is_wrong_is_said(void)
{
	refused(4, "[{\"role\":\"user\",\"content\":\"my\\nword\"}]", -EINVAL,
		"chat template: line 2: the template refuses: never my word");
	refused(0, "[{\"role\":\"user\",\"content\":\"x\"}", -EINVAL, "messages: line 1: ");
	refused(0, "[{\"role\":\"u\",\"role\":\"v\"}]", -EINVAL, "duplicate");
	refused(0, "", -EINVAL, "messages: line 1");
	refused(0, "[]", -EINVAL, "messages: there is none");
	refused(0, "{}", -EINVAL, "the object has no messages");
	refused(0, "{\"messages\":{}}", -EINVAL, "messages: an array");
	refused(0, "[1]", -EINVAL, "messages: number 0 has no role");
	refused(0, "[{\"role\":\"u\"},{\"content\":\"x\"}]", -EINVAL, "messages: number 1 has no role");
	refused(0, "{\"messages\":[{\"role\":\"u\"}],\"tool\":[]}", -EINVAL, "\"tool\" is not known");
	refused(0, "{\"messages\":[{\"role\":\"u\"}],\"tools\":5}", -EINVAL, "tools: an array");
	refused(0, "{\"messages\":[{\"role\":\"u\"}],\"add_generation_prompt\":1}", -EINVAL, "add_generation_prompt: true or false");
	refused(0, "{\"messages\":[{\"role\":\"u\"}],\"now\":\"x\"}", -EINVAL, "now: whole seconds");
	refused(0, "{\"messages\":[{\"role\":\"u\"}],\"variables\":[]}", -EINVAL, "variables: an object");
	refused(0, "[{\"role\":\"u\",\"content\":\"\xff\"}]", -EINVAL, "messages: line 1");
}

static void more_than_the_context(void)
{
	char json[1024];

	snprintf(json, sizeof(json), "[{\"role\":\"u\",\"content\":\"%0600d\"}]", 0);
	refused(0, json, -E2BIG, "the messages are more than the context of 512 tokens");
}

static void the_clock_is_given_where_it_must_be(void)
{
	struct apr *c = connect_to(&d);

	CU_ASSERT_EQUAL(prompt(5, "[{\"role\":\"u\"}]", 0), 5);
	CU_ASSERT_EQUAL(prompt(5, "[{\"role\":\"u\"}]", APR_SQE_REPLAYABLE), -EINVAL);
	CU_ASSERT_PTR_NOT_NULL(strstr(err, "\"now\""));
	CU_ASSERT_EQUAL(prompt(5, "{\"messages\":[{\"role\":\"u\"}],\"now\":1000000000}", APR_SQE_REPLAYABLE), 5);
	CU_ASSERT_EQUAL(prompt(0, "[{\"role\":\"u\",\"content\":\"\"}]", APR_SQE_REPLAYABLE), 3);
	apr_close(c);
}

/* ---- the answer ------------------------------------------------------------------------ */

struct answer {
	uint32_t ids[256];
	unsigned n, samples;
	char text[4096];
	size_t len;
};

static int take(void *arg, const struct apr_token *t)
{
	struct answer *a = arg;

	if (t->id != APR_NO_ID && a->n < 256)
		a->ids[a->n++] = t->id;
	if (t->sample + 1 > a->samples)
		a->samples = t->sample + 1;
	if (a->len + t->len < sizeof(a->text)) {
		memcpy(a->text + a->len, t->text, t->len);
		a->len += t->len;
	}
	return 0;
}

/* A CHAT is the GENERATE of the ids that its template gives: the same answer for the same seed. */
static void same_answer_as_the_ids_alone(void)
{
	static struct answer a, b;
	struct apr *c = connect_to(&d);
	const char *json = "[{\"role\":\"user\",\"content\":\"abc\"}]";
	struct apr_gen g = { .size = sizeof(g), .model = ids[0], .text = json, .len = strlen(json), .max_tokens = 24,
			     .has_seed = 1, .seed = 5 };
	struct apr_result r;

	memset(&a, 0, sizeof(a));
	memset(&b, 0, sizeof(b));
	CU_ASSERT_EQUAL(apr_chat(c, &g, take, &a, &r, err, sizeof(err)), 0);
	uint32_t *want;
	size_t n;
	CU_ASSERT_EQUAL_FATAL(apr_tokenize(c, ids[0], "<|bos|><filler0>abc<filler1>", 28, APR_SQE_PARSE_SPECIAL, &want, &n,
					   err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(n, 6);
	g.text = NULL;
	g.len = 0;
	g.ids = want;
	g.n_ids = n;
	CU_ASSERT_EQUAL(apr_generate(c, &g, take, &b, &r, err, sizeof(err)), 0);
	CU_ASSERT(a.n > 0);
	CU_ASSERT_EQUAL(a.n, b.n);
	CU_ASSERT_EQUAL(memcmp(a.ids, b.ids, sizeof(a.ids)), 0);
	CU_ASSERT_EQUAL(apr_chat(c, &g, NULL, NULL, NULL, err, sizeof(err)), -EINVAL); /* ids are no conversation */
	free(want);
	apr_close(c);
}

static void samples_stream_and_blob(void)
{
	static struct answer a;
	struct apr *c = connect_to(&d);
	const char *json = "[{\"role\":\"user\",\"content\":\"abc\"}]";
	struct apr_gen g = { .size = sizeof(g), .model = ids[0], .text = json, .len = strlen(json), .max_tokens = 6, .samples = 3 };
	struct apr_result r;

	memset(&a, 0, sizeof(a));
	CU_ASSERT_EQUAL(apr_chat(c, &g, take, &a, &r, err, sizeof(err)), 0);
	CU_ASSERT_EQUAL(a.samples, 3);
	memset(&a, 0, sizeof(a));
	g.samples = 0;
	g.flags = APR_SQE_NO_STREAM;
	CU_ASSERT_EQUAL(apr_chat(c, &g, take, &a, &r, err, sizeof(err)), 0);
	CU_ASSERT(a.n > 0 && a.n <= 6);
	apr_close(c);
}

/* The real thing: SmolLM2's own template, an answer with sense that ends by its end token. */
static void smollm2_answers_and_ends(void)
{
	static struct answer a;
	static const char json[] = "[{\"role\":\"user\",\"content\":\"What is the capital of France?\"}]";
	const char *path = apr_test_model(SMOLLM2);
	struct apr_sampling greedy = { .set = APR_SET_TEMPERATURE };
	uint64_t space[32];
	struct apr_params p;
	struct apr_result r;
	struct daemon real;

	if (!path)
		SKIP("SmolLM2 has not been fetched");
	daemon_name(&real, "chat-real");
	daemon_spawn(&real, (const char *const[]){ "-m", path, "-s", real.sock, "-t", "2", "-c", "512", NULL });
	CU_ASSERT_TRUE_FATAL(daemon_ready(&real));
	struct apr *c = connect_to(&real);
	struct apr_gen g = { .size = sizeof(g), .text = json, .len = sizeof(json) - 1, .max_tokens = 100, .params = &p };
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &greedy);
	memset(&a, 0, sizeof(a));
	CU_ASSERT_EQUAL(apr_chat(c, &g, take, &a, &r, err, sizeof(err)), 0);
	CU_ASSERT_PTR_NOT_NULL(strstr(a.text, "Paris"));
	CU_ASSERT_EQUAL(r.finish, APR_FINISH_STOP);
	CU_ASSERT_PTR_NULL(strstr(a.text, "<|"));
	/* the template puts a system message of its own in front: two turns and the answer's head */
	CU_ASSERT(r.cost.prompt > 25 && r.cost.prompt < 50);
	apr_close(c);
	CU_ASSERT_EQUAL(daemon_stop(&real), 0);
}

static const struct apr_test tests[] = {
	{ "daemon_up", daemon_up, KEEPS_HEAP },
	{ "the_template_writes_the_prompt", the_template_writes_the_prompt, 0 },
	{ "case02_case27_content_is_never_parsed", case02_case27_content_is_never_parsed, 0 },
	{ "case26_bos_is_there_once", case26_bos_is_there_once, 0 },
	{ "case32_no_template_is_said", case32_no_template_is_said, 0 },
	{ "what_is_wrong_is_said", what_is_wrong_is_said, 0 },
	{ "more_than_the_context", more_than_the_context, 0 },
	{ "the_clock_is_given_where_it_must_be", the_clock_is_given_where_it_must_be, 0 },
	{ "same_answer_as_the_ids_alone", same_answer_as_the_ids_alone, 0 },
	{ "samples_stream_and_blob", samples_stream_and_blob, 0 },
	{ "daemon_down", daemon_down, 0 },
	{ "smollm2_answers_and_ends", smollm2_answers_and_ends, KEEPS_HEAP },
};
TEST_MAIN("daemon/chat", tests)
