/* SPDX-License-Identifier: MIT */
/*
 * Owns: a template's text as tokens: tags, the blanks around them, words, numbers,
 * quoted texts. Does not own: what they mean (parse.c).
 *
 * Blanks are treated as with trim_blocks and lstrip_blocks: the newline after a block
 * or comment goes, and so do the blanks before one that begins its line; "-" takes
 * all blanks on its side, "+" leaves them. The very last newline goes too.
 */
#include "template/tree.h"

#include <errno.h>
#include <stdlib.h>
#include <utf8proc.h>

void tpl_lex_init(struct tpl_lex *x, struct tpl_heap *h, const char *text, size_t len)
{
	char *copy = tpl_alloc(h, len + 1);
	size_t n = 0;

	for (size_t i = 0; i < len; i++) {
		if (text[i] == '\r') {
			copy[n++] = '\n';
			i += i + 1 < len && text[i + 1] == '\n';
		} else {
			copy[n++] = text[i];
		}
	}
	if (n && copy[n - 1] == '\n')
		n--;
	copy[n] = 0;
	*x = (struct tpl_lex){ .h = h, .p = copy, .len = n, .line = 1, .in = IN_TEXT, .line_start = true };
}

static bool here(const struct tpl_lex *x, size_t at, const char *what)
{
	size_t n = strlen(what);

	return x->len - at >= n && !memcmp(x->p + at, what, n);
}

static size_t blanks(const struct tpl_lex *x, size_t at)
{
	while (at < x->len) {
		int32_t c;
		size_t n = tpl_next(x->p + at, x->len - at, &c);
		if (!tpl_space(c))
			break;
		at += n;
	}
	return at;
}

static void go(struct tpl_lex *x, size_t to)
{
	for (; x->at < to; x->at++)
		x->line += x->p[x->at] == '\n';
}

/* ---- text up to the next tag ------------------------------------------------------------- */

static size_t next_tag(const struct tpl_lex *x, size_t at)
{
	for (; at + 1 < x->len; at++)
		if (x->p[at] == '{' && (x->p[at + 1] == '{' || x->p[at + 1] == '%' || x->p[at + 1] == '#'))
			return at;
	return x->len;
}

/* Where the text before a tag at `tag` ends, as the tag's sign has it. */
static size_t text_end(const struct tpl_lex *x, size_t from, size_t tag, char sign, bool block)
{
	size_t end = tag;

	if (sign == '-') {
		while (end > from) {
			size_t i = end - 1;
			int32_t c;
			while (i > from && ((uint8_t)x->p[i] & 0xc0) == 0x80)
				i--;
			tpl_next(x->p + i, end - i, &c);
			if (!tpl_space(c))
				break;
			end = i;
		}
	} else if (sign != '+' && block) {
		size_t line = tag;
		while (line > from && x->p[line - 1] != '\n')
			line--;
		if ((line > from || x->line_start) && blanks(x, line) >= tag)
			end = line;
	}
	return end;
}

/* After a block's or comment's closing characters at `at`: what of the blanks goes. */
static size_t after_close(const struct tpl_lex *x, size_t at, char sign)
{
	if (sign == '-')
		return blanks(x, at);
	return sign != '+' && at < x->len && x->p[at] == '\n' ? at + 1 : at;
}

/* Just past the words of a {% WORD %} at `tag`, or 0 where there is another tag. *sign is the closing one's. */
static size_t tag_is(const struct tpl_lex *x, size_t tag, const char *word, char *sign, bool plus)
{
	size_t i = tag + 2;

	if (i < x->len && (x->p[i] == '-' || x->p[i] == '+'))
		i++;
	i = blanks(x, i);
	if (!here(x, i, word))
		return 0;
	i = blanks(x, i + strlen(word));
	*sign = 0;
	if (i < x->len && (x->p[i] == '-' || (plus && x->p[i] == '+')))
		*sign = x->p[i++];
	return here(x, i, "%}") ? i + 2 : 0;
}

static struct tpl_token data(struct tpl_lex *x, size_t from, size_t end, uint32_t line)
{
	return (struct tpl_token){ .type = T_DATA, .line = line, .p = x->p + from, .len = end - from };
}

/* {% raw %} at x->at: its contents are text. `body` is where they begin. */
static struct tpl_token raw(struct tpl_lex *x, size_t body)
{
	uint32_t line = x->line;

	for (size_t tag = body; tag < x->len; tag++) {
		char sign = 0, open;
		size_t past = here(x, tag, "{%") ? tag_is(x, tag, "endraw", &sign, true) : 0;
		if (!past)
			continue;
		open = tag + 2 < x->len ? x->p[tag + 2] : 0;
		x->line_start = false;
		size_t end = text_end(x, body, tag, open, true);
		past = after_close(x, past, sign);
		go(x, past);
		x->line_start = x->p[past - 1] == '\n';
		return data(x, body, end, line);
	}
	x->h->line = line;
	tpl_fail(x->h, -EINVAL, "a raw block without its end");
}

static void comment(struct tpl_lex *x)
{
	for (size_t i = x->at + 2; i + 1 < x->len; i++)
		if (x->p[i] == '#' && x->p[i + 1] == '}') {
			char before = i > x->at + 2 ? x->p[i - 1] : 0;
			go(x, after_close(x, i + 2, before == '-' || before == '+' ? before : 0));
			x->line_start = x->p[x->at - 1] == '\n';
			return;
		}
	x->h->line = x->line;
	tpl_fail(x->h, -EINVAL, "a comment without its end");
}

static struct tpl_token open_tag(struct tpl_lex *x)
{
	bool block = x->p[x->at + 1] == '%';
	struct tpl_token t = { .type = block ? T_BLOCK_BEGIN : T_VAR_BEGIN, .line = x->line };

	x->at += 2;
	x->at += x->at < x->len && (x->p[x->at] == '-' || x->p[x->at] == '+');
	x->in = block ? IN_BLOCK : IN_VAR;
	x->n_open = 0;
	return t;
}

static struct tpl_token in_text(struct tpl_lex *x)
{
	for (;;) {
		size_t from = x->at, tag = next_tag(x, from), body;
		uint32_t line = x->line;
		char kind, sign, raw_sign;

		if (from == x->len)
			return (struct tpl_token){ .type = T_EOF, .line = x->line };
		if (tag == x->len) {
			go(x, x->len);
			return data(x, from, x->len, line);
		}
		kind = x->p[tag + 1];
		sign = tag + 2 < x->len ? x->p[tag + 2] : 0;
		size_t end = x->tag_next ? from : text_end(x, from, tag, sign, kind != '{');
		go(x, tag);
		if (end > from) {
			x->tag_next = true; /* its blanks are dealt with */
			return data(x, from, end, line);
		}
		x->tag_next = false;
		if (kind == '#') {
			comment(x);
			continue;
		}
		body = kind == '%' ? tag_is(x, tag, "raw", &raw_sign, false) : 0;
		if (!body)
			return open_tag(x);
		return raw(x, raw_sign == '-' ? blanks(x, body) : body);
	}
}

/* ---- inside a tag ---------------------------------------------------------------------------- */

static _Noreturn void bad(struct tpl_lex *x, const char *what)
{
	x->h->line = x->line;
	tpl_fail(x->h, -EINVAL, "%s", what);
}

static bool word_char(int32_t c, bool first)
{
	if (c < 0x80)
		return c == '_' || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (!first && c >= '0' && c <= '9');
	utf8proc_category_t k = utf8proc_category(c);
	return (k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO) || k == UTF8PROC_CATEGORY_NL ||
	       (!first && k >= UTF8PROC_CATEGORY_MN && k <= UTF8PROC_CATEGORY_ND);
}

static struct tpl_token word(struct tpl_lex *x)
{
	struct tpl_token t = { .type = T_WORD, .line = x->line, .p = x->p + x->at };

	while (x->at < x->len) {
		int32_t c;
		size_t n = tpl_next(x->p + x->at, x->len - x->at, &c);
		if (!word_char(c, !t.len))
			break;
		t.len += n;
		x->at += n;
	}
	return t;
}

static size_t digits(const struct tpl_lex *x, size_t i, const char *set)
{
	while (i < x->len && (strchr(set, x->p[i]) != NULL || (x->p[i] == '_' && i + 1 < x->len && x->p[i + 1] &&
							      strchr(set, x->p[i + 1]) != NULL)) && x->p[i])
		i++;
	return i;
}

static int64_t whole(struct tpl_lex *x, const char *text, int base)
{
	char *end;

	errno = 0;
	long long v = strtoll(text, &end, base);
	if (errno || *end)
		bad(x, "a number beyond 64 bits");
	return v;
}

static struct tpl_token number(struct tpl_lex *x)
{
	static const char dec[] = "0123456789";
	struct tpl_token t = { .type = T_INT, .line = x->line };
	size_t from = x->at, i, n = 0;
	char text[128], second = from + 1 < x->len ? (char)(x->p[from + 1] | 0x20) : 0;
	int base = x->p[from] != '0' ? 10 : second == 'x' ? 16 : second == 'o' ? 8 : second == 'b' ? 2 : 10;

	if (base != 10) {
		i = digits(x, from + 2, base == 16 ? "0123456789abcdefABCDEF" : base == 8 ? "01234567" : "01");
		from += 2;
	} else {
		i = digits(x, from, dec);
		/* not after a dot: x.0.1 is two indexes */
		bool dot = i + 1 < x->len && x->p[i] == '.' && x->p[i + 1] >= '0' && x->p[i + 1] <= '9' &&
			   !(from && x->p[from - 1] == '.');
		size_t e = dot ? digits(x, i + 1, dec) : i, sign;
		if (e < x->len && (x->p[e] | 0x20) == 'e') {
			sign = e + 1 < x->len && (x->p[e + 1] == '+' || x->p[e + 1] == '-');
			size_t past = digits(x, e + 1 + sign, dec);
			if (past > e + 1 + sign) {
				dot = true;
				e = past;
			}
		}
		if (dot) {
			t.type = T_FLOAT;
			i = e;
		}
	}
	for (size_t k = from; k < i; k++)
		if (x->p[k] != '_' && n < sizeof(text) - 1)
			text[n++] = x->p[k];
	text[n] = 0;
	if (n == sizeof(text) - 1 || !n)
		bad(x, "a number that is none");
	if (t.type == T_FLOAT)
		t.f = strtod(text, NULL);
	else
		t.i = whole(x, text, base);
	x->at = i;
	return t;
}

static unsigned hex(struct tpl_lex *x, size_t at, size_t n)
{
	unsigned v = 0;

	for (size_t i = at; i < at + n; i++) {
		char c = i < x->len ? (char)(x->p[i] | 0x20) : 0;
		if (!(c >= '0' && c <= '9' && x->p[i] == c) && !(c >= 'a' && c <= 'f'))
			bad(x, "an escape that is cut short");
		v = v << 4 | (unsigned)(c <= '9' ? c - '0' : c - 'a' + 10);
	}
	return v;
}

static size_t encode(struct tpl_lex *x, unsigned c, char *out)
{
	if (c > 0x10ffff || (c >= 0xd800 && c < 0xe000))
		bad(x, "an escape that is no character");
	return (size_t)utf8proc_encode_char((utf8proc_int32_t)c, (utf8proc_uint8_t *)out);
}

/* The escape whose backslash is at i - 1: writes it, and gives what follows it. */
static size_t escape(struct tpl_lex *x, size_t i, char *out, size_t *n)
{
	static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
	char c = x->p[i];
	const char *named = c ? strchr(from, c) : NULL;
	size_t width = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;

	if (c == '\n')
		return i + 1;
	if (named) {
		out[(*n)++] = to[named - from];
		return i + 1;
	}
	if (width) {
		*n += encode(x, hex(x, i + 1, width), out + *n);
		return i + 1 + width;
	}
	if (c >= '0' && c <= '7') {
		unsigned v = 0;
		size_t k = i;
		while (k < i + 3 && k < x->len && x->p[k] >= '0' && x->p[k] <= '7')
			v = v * 8 + (unsigned)(x->p[k++] - '0');
		*n += encode(x, v, out + *n);
		return k;
	}
	if (c == 'N')
		bad(x, "characters by their names (\\N) are not known here");
	out[(*n)++] = '\\'; /* no escape: both stand */
	return i;
}

static struct tpl_token quoted(struct tpl_lex *x)
{
	struct tpl_token t = { .type = T_STRING, .line = x->line };
	char quote = x->p[x->at], *out;
	size_t i = x->at + 1, n = 0;

	while (i < x->len && x->p[i] != quote)
		i += x->p[i] == '\\' ? 2 : 1;
	if (i >= x->len)
		bad(x, "a quoted text without its end");
	out = tpl_alloc(x->h, i - x->at); /* no escape is shorter than its character */
	for (size_t k = x->at + 1; k < i;) {
		if (x->p[k] == '\\')
			k = escape(x, k + 1, out, &n);
		else
			out[n++] = x->p[k++];
	}
	go(x, i + 1);
	t.p = out;
	t.len = n;
	return t;
}

static void bracket(struct tpl_lex *x, char c)
{
	if (c == '(' || c == '[' || c == '{') {
		if (x->n_open == sizeof(x->open))
			bad(x, "too many brackets inside each other");
		x->open[x->n_open++] = c == '(' ? ')' : c == '[' ? ']' : '}';
	} else if (c == ')' || c == ']' || c == '}') {
		if (!x->n_open || x->open[--x->n_open] != c)
			bad(x, "a closing bracket that nothing opened");
	}
}

static struct tpl_token operator(struct tpl_lex *x)
{
	static const char *const two[] = { "//", "**", "==", "!=", ">=", "<=" };
	struct tpl_token t = { .type = T_OP, .line = x->line, .op = (uint8_t)x->p[x->at] };

	for (size_t i = 0; i < sizeof(two) / sizeof(two[0]); i++)
		if (here(x, x->at, two[i])) {
			t.op = OPCODE(two[i][0], two[i][1]);
			x->at += 2;
			return t;
		}
	if (!strchr("+-/*%~[](){}><=.:|,;", x->p[x->at]) || !x->p[x->at])
		bad(x, "a character that has no meaning here");
	bracket(x, x->p[x->at]);
	x->at++;
	return t;
}

/* The tag's end at x->at, if it is one. */
static bool close_tag(struct tpl_lex *x, struct tpl_token *t)
{
	bool block = x->in == IN_BLOCK;
	const char *end = block ? "%}" : "}}";
	char c = x->p[x->at], sign = c == '-' || (block && c == '+') ? c : 0;
	size_t at = x->at + (sign != 0);

	if (x->n_open || !here(x, at, end))
		return false;
	at += 2;
	*t = (struct tpl_token){ .type = block ? T_BLOCK_END : T_VAR_END, .line = x->line };
	go(x, block ? after_close(x, at, sign) : sign ? blanks(x, at) : at);
	x->line_start = x->p[x->at - 1] == '\n';
	x->in = IN_TEXT;
	return true;
}

struct tpl_token tpl_lex_next(struct tpl_lex *x)
{
	struct tpl_token t;
	int32_t c;

	if (x->in == IN_TEXT)
		return in_text(x);
	go(x, blanks(x, x->at));
	if (x->at == x->len)
		return (struct tpl_token){ .type = T_EOF, .line = x->line };
	if (close_tag(x, &t))
		return t;
	tpl_next(x->p + x->at, x->len - x->at, &c);
	if (word_char(c, true))
		return word(x);
	if (c >= '0' && c <= '9')
		return number(x);
	return c == '"' || c == '\'' ? quoted(x) : operator(x);
}
