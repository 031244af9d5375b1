/* SPDX-License-Identifier: MIT */
/* Owns: the script's JSON, the vocabulary and its tokenizer. See fake.h for the format. */
#include "client/fake/fake_int.h"
#include "shm/errors.h"
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const default_words[] = {
	" the", " a", " lamp", " river", " small", " old", " light", " stone", " falls", " over", " under", " slowly",
	" and", " then", " we", " walk", " home", " where", " snow", " sings", " bright", " door", " opens", " again",
	"The", "A", ".", ",", " is", " of", " in", " night",
};

int64_t fake_vocab_add(struct fake_vocab *v, const char *text, size_t len)
{
	for (uint32_t i = FAKE_WORD0; i < v->n; i++)
		if (v->len[i] == len && !memcmp(v->piece[i], text, len))
			return i;
	if (v->n == v->cap) {
		uint32_t cap = v->cap ? v->cap * 2 : 512;
		char **piece = realloc(v->piece, cap * sizeof(*piece));
		uint32_t *lens;

		if (!piece)
			return -ENOMEM;
		v->piece = piece;
		lens = realloc(v->len, cap * sizeof(*lens));
		if (!lens)
			return -ENOMEM;
		v->len = lens;
		v->cap = cap;
	}
	v->piece[v->n] = malloc(len + 1);
	if (!v->piece[v->n])
		return -ENOMEM;
	memcpy(v->piece[v->n], text, len);
	v->piece[v->n][len] = 0;
	v->len[v->n] = (uint32_t)len;
	return v->n++;
}

/* The first ids are fixed: begin, end, the 256 bytes. */
static int vocab_init(struct fake_vocab *v)
{
	int64_t id = fake_vocab_add(v, "<s>", 3);

	if (id >= 0)
		id = fake_vocab_add(v, "</s>", 4);
	for (unsigned b = 0; b < 256 && id >= 0; b++) {
		char c = (char)b;

		id = fake_vocab_add(v, &c, 1);
	}
	return id < 0 ? (int)id : 0;
}

static uint32_t longest_word(const struct fake_vocab *v, const char *text, size_t len)
{
	uint32_t best = FAKE_BYTE0 + (unsigned char)text[0], best_len = 1;

	for (uint32_t i = FAKE_WORD0; i < v->n; i++)
		if (v->len[i] >= best_len && v->len[i] <= len && v->piece[i][0] == text[0] &&
		    !memcmp(v->piece[i], text, v->len[i])) {
			if (v->len[i] == best_len && best >= FAKE_WORD0)
				continue; /* the first of two equal ones */
			best = i;
			best_len = v->len[i];
		}
	return best;
}

int fake_tokenize(const struct fake_vocab *v, const char *text, size_t len, unsigned flags, uint32_t **ids, uint32_t *n)
{
	uint32_t *out = malloc((len + 1) * sizeof(*out)), k = 0;

	if (!out)
		return -ENOMEM;
	if (flags & APR_SQE_ADD_BOS)
		out[k++] = FAKE_BOS;
	for (size_t at = 0; at < len;) {
		uint32_t id = longest_word(v, text + at, len - at);

		for (uint32_t sp = FAKE_BOS; (flags & APR_SQE_PARSE_SPECIAL) && sp <= FAKE_EOS; sp++)
			if (v->len[sp] <= len - at && !memcmp(v->piece[sp], text + at, v->len[sp]))
				id = sp;
		out[k++] = id;
		at += v->len[id];
	}
	*ids = out;
	*n = k;
	return 0;
}

static int bad(char *err, size_t errlen, const char *what)
{
	snprintf(err, errlen, "script: %s", what);
	return -EINVAL;
}

static int errno_by_name(const char *name)
{
	for (size_t i = 0; i < apr_errno_rows; i++)
		if (!strcmp(apr_errno_table[i].name, name))
			return apr_errno_table[i].err;
	return 0;
}

static int step_death(struct fake_step *st, const char *how, char *err, size_t errlen)
{
	if (!strcmp(how, "bye"))
		st->kind = STEP_BYE;
	else if (!strcmp(how, "drop"))
		st->kind = STEP_DROP;
	else if (!strcmp(how, "kill"))
		st->kind = STEP_KILL;
	else
		return bad(err, errlen, "die is one of bye, drop, kill");
	return 0;
}

static int step_object(struct fake_script *s, struct fake_step *st, json_t *j, char *err, size_t errlen)
{
	const char *text = NULL, *error = NULL, *why = NULL, *die = NULL;
	size_t len = 0;
	double logprob = -0.25;
	json_int_t ms = -1, repeat = 1;
	int stall = 0;
	json_error_t je;

	if (json_unpack_ex(j, &je, JSON_STRICT, "{s?s%, s?F, s?I, s?I, s?b, s?s, s?s, s?s}", "text", &text, &len, "logprob",
			   &logprob, "ms", &ms, "repeat", &repeat, "stall", &stall, "error", &error, "why", &why, "die",
			   &die))
		return bad(err, errlen, je.text);
	if (die)
		return step_death(st, die, err, errlen);
	if (error) {
		st->kind = STEP_ERROR;
		st->err = -errno_by_name(error);
		st->why = strdup(why ? why : "scripted error");
		if (!st->err)
			return bad(err, errlen, "error is no errno of this protocol");
		return st->why ? 0 : -ENOMEM;
	}
	if (stall) {
		st->kind = STEP_STALL;
		return 0;
	}
	if (text) {
		int64_t id = fake_vocab_add(&s->vocab, text, len);

		if (id < 0 || !len || repeat < 1 || repeat > 1000000)
			return bad(err, errlen, "text must not be empty, repeat lies in 1..1000000");
		st->kind = STEP_TOKEN;
		st->id = (uint32_t)id;
		st->repeat = (uint32_t)repeat;
		st->logprob = (float)logprob;
		return 0;
	}
	if (ms < 0 || ms > 3600000)
		return bad(err, errlen, "a step is text, ms, stall, error or die");
	st->kind = STEP_PAUSE;
	st->ms = (uint32_t)ms;
	return 0;
}

static int read_step(struct fake_script *s, struct fake_step *st, json_t *j, char *err, size_t errlen)
{
	int64_t id;

	if (!json_is_string(j))
		return step_object(s, st, j, err, errlen);
	id = json_string_length(j) ? fake_vocab_add(&s->vocab, json_string_value(j), json_string_length(j)) : -1;
	if (id < 0)
		return bad(err, errlen, "an empty token");
	st->kind = STEP_TOKEN;
	st->id = (uint32_t)id;
	st->repeat = 1;
	st->logprob = -0.25f;
	return 0;
}

static int op_by_name(const char *name)
{
	for (unsigned op = 0; op <= APR_OP_FREE; op++)
		if (!strcmp(apr_wire_op(op), name))
			return (int)op;
	return -1;
}

static int read_answer(struct fake_script *s, struct fake_answer *a, json_t *j, char *err, size_t errlen)
{
	const char *op = "GENERATE", *match = NULL, *finish = "stop";
	json_int_t times = UINT32_MAX;
	json_t *steps = NULL, *step;
	size_t i;
	json_error_t je;
	int e, o;

	if (json_unpack_ex(j, &je, JSON_STRICT, "{s?s, s?s, s?I, s?s, s:o}", "op", &op, "match", &match, "times", &times,
			   "finish", &finish, "steps", &steps))
		return bad(err, errlen, je.text);
	o = op_by_name(op);
	if (o < 0 || !json_is_array(steps) || times < 0 || times > UINT32_MAX)
		return bad(err, errlen, "op must be an opcode's name, steps an array, times a count");
	if (strcmp(finish, "stop") && strcmp(finish, "length"))
		return bad(err, errlen, "finish is stop or length");
	a->op = (unsigned)o;
	a->finish = !strcmp(finish, "stop") ? APR_FINISH_STOP : APR_FINISH_LENGTH;
	a->times = (uint32_t)times;
	a->match = match ? strdup(match) : NULL;
	a->steps = calloc(json_array_size(steps) + 1, sizeof(*a->steps));
	if (!a->steps || (match && !a->match))
		return -ENOMEM;
	a->n_steps = json_array_size(steps);
	json_array_foreach (steps, i, step) {
		e = read_step(s, &a->steps[i], step, err, errlen);
		if (e)
			return e;
	}
	return 0;
}

static int read_ops(struct fake_script *s, json_t *ops, char *err, size_t errlen)
{
	json_t *op;
	size_t i;

	s->opcodes[0] = UINT64_C(1) << APR_OP_CANCEL;
	json_array_foreach (ops, i, op) {
		int o = json_is_string(op) ? op_by_name(json_string_value(op)) : -1;

		if (o < 0 || o == APR_OP_EMBED)
			return bad(err, errlen, "ops names an opcode that the fake daemon does not have");
		s->opcodes[0] |= UINT64_C(1) << o;
	}
	return 0;
}

static int read_top(struct fake_script *s, json_t *root, char *err, size_t errlen)
{
	const char *name = "fake";
	json_int_t n_ctx = 4096, token_ms = 0, max_sessions = 256;
	json_t *words = NULL, *ops = NULL, *answers = NULL, *j;
	json_error_t je;
	size_t i;
	int e = 0;

	if (json_unpack_ex(root, &je, JSON_STRICT, "{s?{s?s, s?I}, s?o, s?I, s?o, s?I, s?o}", "model", "name", &name,
			   "n_ctx", &n_ctx, "words", &words, "token_ms", &token_ms, "ops", &ops, "max_sessions",
			   &max_sessions, "answers", &answers))
		return bad(err, errlen, je.text);
	if (!*name || strlen(name) >= sizeof(s->model) || n_ctx < 16 || n_ctx > 1 << 20 || token_ms < 0 ||
	    token_ms > 60000 || max_sessions < 1 || max_sessions > 4096)
		return bad(err, errlen, "a value of model, token_ms or max_sessions is out of range");
	memcpy(s->model, name, strlen(name));
	s->n_ctx = (uint32_t)n_ctx;
	s->token_ms = (uint32_t)token_ms;
	s->max_sessions = (uint32_t)max_sessions;
	if (words)
		json_array_foreach (words, i, j)
			if (!json_string_length(j) || fake_vocab_add(&s->vocab, json_string_value(j), json_string_length(j)) < 0)
				return bad(err, errlen, "words is an array of texts, none of them empty");
	if (ops && (e = read_ops(s, ops, err, errlen)))
		return e;
	if (!answers)
		return 0;
	s->answers = calloc(json_array_size(answers) + 1, sizeof(*s->answers));
	if (!s->answers)
		return -ENOMEM;
	s->n_answers = json_array_size(answers);
	json_array_foreach (answers, i, j) {
		e = read_answer(s, &s->answers[i], j, err, errlen);
		if (e)
			return e;
	}
	return 0;
}

int fake_script_read(struct fake_script *s, const char *json, char *err, size_t errlen)
{
	json_error_t je;
	json_t *root = json_loads(json ? json : "{}", JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &je);
	int e;

	memset(s, 0, sizeof(*s));
	if (!root) {
		snprintf(err, errlen, "script: line %d: %s", je.line, je.text);
		return -EINVAL;
	}
	s->opcodes[0] = UINT64_C(1) << APR_OP_NOP | UINT64_C(1) << APR_OP_GENERATE | UINT64_C(1) << APR_OP_CHAT |
			UINT64_C(1) << APR_OP_SCORE |
			UINT64_C(1) << APR_OP_TOKENIZE | UINT64_C(1) << APR_OP_DETOKENIZE | UINT64_C(1) << APR_OP_CANCEL |
			UINT64_C(1) << APR_OP_FREE;
	snprintf(err, errlen, "script: out of memory");
	e = vocab_init(&s->vocab);
	for (size_t i = 0; !e && i < sizeof(default_words) / sizeof(*default_words); i++)
		if (fake_vocab_add(&s->vocab, default_words[i], strlen(default_words[i])) < 0)
			e = -ENOMEM;
	if (!e)
		e = read_top(s, root, err, errlen);
	json_decref(root);
	if (e)
		fake_script_free(s);
	else if (errlen)
		err[0] = 0;
	return e;
}

void fake_script_free(struct fake_script *s)
{
	for (uint32_t i = 0; i < s->vocab.n; i++)
		free(s->vocab.piece[i]);
	free(s->vocab.piece);
	free(s->vocab.len);
	for (size_t i = 0; i < s->n_answers; i++) {
		for (size_t k = 0; k < s->answers[i].n_steps; k++)
			free(s->answers[i].steps[k].why);
		free(s->answers[i].steps);
		free(s->answers[i].match);
	}
	free(s->answers);
	memset(s, 0, sizeof(*s));
}
