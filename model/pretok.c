/* SPDX-License-Identifier: MIT */
/* The scanners of pretok.h. Unicode classes are utf8proc's. */
#include <utf8proc.h>

#include "model/pretok.h"
#include "model/utf8.h"

enum class { OTHER, LETTER, NUMBER, SPACE, END };

struct scan {
	const char *text;
	size_t len;
};

static bool is_space(int32_t c) /* Unicode's White_Space */
{
	return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
	       c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

static enum class classify(int32_t c)
{
	if (c < 0x80) {
		if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'))
			return LETTER;
		if (c >= '0' && c <= '9')
			return NUMBER;
		return c >= 0 && is_space(c) ? SPACE : OTHER;
	}
	if (is_space(c))
		return SPACE;
	switch (utf8proc_category(c)) {
	case UTF8PROC_CATEGORY_LU: case UTF8PROC_CATEGORY_LL: case UTF8PROC_CATEGORY_LT:
	case UTF8PROC_CATEGORY_LM: case UTF8PROC_CATEGORY_LO:
		return LETTER;
	case UTF8PROC_CATEGORY_ND: case UTF8PROC_CATEGORY_NL: case UTF8PROC_CATEGORY_NO:
		return NUMBER;
	default:
		return OTHER;
	}
}

/* The class of the character at p, and where the next one starts. */
static enum class at(const struct scan *s, size_t p, size_t *next)
{
	int32_t c;

	*next = p;
	if (p >= s->len)
		return END;
	*next = p + apr_utf8_next(s->text + p, s->len - p, &c);
	return classify(c);
}

static size_t run(const struct scan *s, size_t p, enum class want)
{
	size_t next;

	while (at(s, p, &next) == want)
		p = next;
	return p;
}

static bool is_newline(const struct scan *s, size_t p)
{
	return p < s->len && (s->text[p] == '\n' || s->text[p] == '\r');
}

static char letter(const struct scan *s, size_t p, bool fold)
{
	char c = p < s->len ? s->text[p] : 0;

	return fold && c >= 'A' && c <= 'Z' ? (char)(c + 32) : c;
}

/* 's 't 're 've 'm 'll 'd at p: its end, or p. With fold, case is ignored; U+017F folds to s. */
static size_t contraction(const struct scan *s, size_t p, bool fold)
{
	char a, b;

	if (s->text[p] != '\'')
		return p;
	a = letter(s, p + 1, fold);
	b = letter(s, p + 2, fold);
	if (a == 's' || a == 't' || a == 'm' || a == 'd')
		return p + 2;
	if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l'))
		return p + 3;
	if (fold && a == '\xc5' && b == '\xbf')
		return p + 3;
	return p;
}

/* S+(?!non-S)|S+ : a run of white space leaves its last character to what follows, if something does and
 * if it is not all there is. With numbers_end, a number counts as nothing following. */
static size_t white(const struct scan *s, size_t p, bool numbers_end)
{
	size_t last = p, end = p, next;
	enum class c;

	while ((c = at(s, end, &next)) == SPACE) {
		last = end;
		end = next;
	}
	if (c == END || (numbers_end && c == NUMBER) || last == p)
		return end;
	return last;
}

static size_t next_gpt2(const struct scan *s, size_t p, bool smollm)
{
	size_t end = contraction(s, p, false), next, first = p + (s->text[p] == ' ');
	enum class c;

	if (end != p)
		return end;
	c = at(s, p, &next);
	if (smollm && c == NUMBER)
		return next;
	c = at(s, first, &next);
	if (c == LETTER || c == OTHER || (c == NUMBER && !smollm))
		return run(s, next, c);
	return white(s, p, smollm);
}

/* S*[\r\n]+ at p: its end, or p. */
static size_t lines(const struct scan *s, size_t p)
{
	size_t end = p, next, q = p;

	while (at(s, q, &next) == SPACE) {
		if (is_newline(s, q))
			end = next;
		q = next;
	}
	return end;
}

static size_t next_llama3(const struct scan *s, size_t p, unsigned digits)
{
	size_t end = contraction(s, p, true), next, after;
	enum class c;

	if (end != p)
		return end;
	c = at(s, p, &next);
	if (c == LETTER)
		return run(s, next, LETTER);
	if (c != NUMBER && !is_newline(s, p) && at(s, next, &after) == LETTER)
		return run(s, after, LETTER);
	if (c == NUMBER) {
		for (end = next; --digits && at(s, end, &next) == NUMBER;)
			end = next;
		return end;
	}
	if (at(s, p + (s->text[p] == ' '), &next) == OTHER) {
		end = run(s, next, OTHER);
		while (is_newline(s, end))
			end++;
		return end;
	}
	end = lines(s, p);
	return end != p ? end : white(s, p, false);
}

size_t apr_pretok_next(enum apr_pretok kind, const char *text, size_t len, size_t pos)
{
	struct scan s = {text, len};

	switch (kind) {
	case APR_PRETOK_SMOLLM:
		return next_gpt2(&s, pos, true);
	case APR_PRETOK_LLAMA3:
		return next_llama3(&s, pos, 3);
	case APR_PRETOK_QWEN2:
		return next_llama3(&s, pos, 1);
	case APR_PRETOK_GPT2:
	default:
		return next_gpt2(&s, pos, false);
	}
}

bool apr_pretok_find(struct gguf_str name, enum apr_pretok *out)
{
	static const struct {
		const char *name;
		enum apr_pretok kind;
	} known[] = {
		{"gpt-2", APR_PRETOK_GPT2},       {"smollm", APR_PRETOK_SMOLLM},
		{"llama-bpe", APR_PRETOK_LLAMA3}, {"llama3", APR_PRETOK_LLAMA3},
		{"llama-v3", APR_PRETOK_LLAMA3},  {"qwen2", APR_PRETOK_QWEN2},
		{"deepseek-r1-qwen", APR_PRETOK_QWEN2},
	};
	size_t i;

	for (i = 0; i < sizeof known / sizeof *known; i++) {
		if (gguf_str_is(name, known[i].name)) {
			*out = known[i].kind;
			return true;
		}
	}
	return false;
}
