/* SPDX-License-Identifier: MIT */
/*
 * Owns: characters as Python's str sees them: counting, blanks, case, searching,
 * lines. Does not own: how values print (text.c).
 */
#include "template/value.h"

#include <utf8proc.h>

unsigned tpl_next(const char *p, size_t len, int32_t *c)
{
	utf8proc_ssize_t n;

	if ((uint8_t)*p < 0x80) {
		*c = (uint8_t)*p;
		return 1;
	}
	n = utf8proc_iterate((const utf8proc_uint8_t *)p, (utf8proc_ssize_t)len, c);
	return n > 0 ? (unsigned)n : 1;
}

bool tpl_utf8_ok(const char *p, size_t len)
{
	for (size_t i = 0; i < len;) {
		int32_t c = 0;
		unsigned n = tpl_next(p + i, len - i, &c);
		if (c < 0)
			return false;
		i += n;
	}
	return true;
}

uint32_t tpl_chars(const char *p, size_t len)
{
	uint32_t n = 0;

	for (size_t i = 0; i < len; i++)
		n += ((uint8_t)p[i] & 0xc0) != 0x80;
	return n;
}

size_t tpl_byte_of(const struct tpl_str *s, uint32_t ch)
{
	size_t i = 0;

	if (ch >= s->chars)
		return s->len;
	if (s->chars == s->len)
		return ch;
	for (uint32_t n = 0; i < s->len; i++)
		if (((uint8_t)s->p[i] & 0xc0) != 0x80 && n++ == ch)
			break;
	return i;
}

bool tpl_space(int32_t c)
{
	return (c >= 9 && c <= 13) || (c >= 28 && c <= 32) || c == 0x85 || c == 0xa0 || c == 0x1680 ||
	       (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

bool tpl_printable(int32_t c)
{
	switch (utf8proc_category(c)) {
	case UTF8PROC_CATEGORY_CN:
	case UTF8PROC_CATEGORY_CC:
	case UTF8PROC_CATEGORY_CF:
	case UTF8PROC_CATEGORY_CS:
	case UTF8PROC_CATEGORY_CO:
	case UTF8PROC_CATEGORY_ZL:
	case UTF8PROC_CATEGORY_ZP: return false;
	case UTF8PROC_CATEGORY_ZS: return c == ' ';
	default: return true;
	}
}

/* ---- case ----------------------------------------------------------------------------- */

/* Characters whose upper case is several. Their title form has only the first of them large. */
static const struct {
	int32_t c;
	const char *upper, *title;
} grow[] = {
	{ 0xdf, "SS", "Ss" },	      { 0x149, "\xca\xbcN", "\xca\xbcN" },	  { 0x1f0, "J\xcc\x8c", "J\xcc\x8c" },
	{ 0xfb00, "FF", "Ff" },	      { 0xfb01, "FI", "Fi" },		  { 0xfb02, "FL", "Fl" },
	{ 0xfb03, "FFI", "Ffi" },     { 0xfb04, "FFL", "Ffl" },		  { 0xfb05, "ST", "St" },
	{ 0xfb06, "ST", "St" },	      { 0x587, "\xd4\xb5\xd5\x92", "\xd4\xb5\xd6\x82" },
};

static bool cased(int32_t c)
{
	utf8proc_category_t k = utf8proc_category(c);

	return k == UTF8PROC_CATEGORY_LU || k == UTF8PROC_CATEGORY_LL || k == UTF8PROC_CATEGORY_LT;
}

/* What the rule of the final sigma looks through. */
static bool ignorable(int32_t c)
{
	utf8proc_category_t k = utf8proc_category(c);

	return k == UTF8PROC_CATEGORY_MN || k == UTF8PROC_CATEGORY_ME || k == UTF8PROC_CATEGORY_CF ||
	       k == UTF8PROC_CATEGORY_LM || k == UTF8PROC_CATEGORY_SK || c == '\'' || c == '.' || c == ':' || c == 0xb7 ||
	       c == 0x2018 || c == 0x2019 || c == 0x2024 || c == 0x2027;
}

static bool final_sigma(const struct tpl_str *s, size_t at, size_t end)
{
	int32_t c;
	bool before = false;
	size_t i = at;

	while (i > 0) {
		do
			i--;
		while (i && ((uint8_t)s->p[i] & 0xc0) == 0x80);
		tpl_next(s->p + i, s->len - i, &c);
		if (!ignorable(c)) {
			before = cased(c);
			break;
		}
	}
	for (i = end; before && i < s->len;) {
		i += tpl_next(s->p + i, s->len - i, &c);
		if (!ignorable(c))
			return !cased(c);
	}
	return before;
}

struct recase {
	struct tpl_run *r;
	const struct tpl_str *s;
	struct tpl_buf *b;
};

static void put_char(struct recase *k, size_t at, int32_t c)
{
	utf8proc_uint8_t out[4];
	utf8proc_ssize_t n = utf8proc_encode_char(c, out);

	tpl_put(k->r, k->b, (const char *)out, (size_t)n, NULL, k->s->mark ? k->s->mark[at] : k->s->from);
}

static void put_upper(struct recase *k, size_t at, int32_t c, bool title)
{
	for (size_t i = 0; c >= 0xdf && i < sizeof(grow) / sizeof(grow[0]); i++)
		if (grow[i].c == c) {
			const char *to = title ? grow[i].title : grow[i].upper;
			tpl_put(k->r, k->b, to, strlen(to), NULL, k->s->mark ? k->s->mark[at] : k->s->from);
			return;
		}
	put_char(k, at, title ? utf8proc_totitle(c) : utf8proc_toupper(c));
}

static void put_lower(struct recase *k, size_t at, size_t end, int32_t c)
{
	if (c == 0x130) { /* I with a dot keeps it */
		put_char(k, at, 'i');
		put_char(k, at, 0x307);
	} else if (c == 0x3a3) {
		put_char(k, at, final_sigma(k->s, at, end) ? 0x3c2 : 0x3c3);
	} else {
		put_char(k, at, utf8proc_tolower(c));
	}
}

/* The title filter's words begin after blanks and opening brackets. */
static bool word_break(int32_t c)
{
	return tpl_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
}

struct tpl_val tpl_recase(struct tpl_run *r, const struct tpl_str *s, enum tpl_case how)
{
	struct tpl_buf b = { 0 };
	struct recase k = { r, s, &b };
	bool first = true;

	for (size_t i = 0; i < s->len;) {
		int32_t c;
		size_t end = i + tpl_next(s->p + i, s->len - i, &c);
		bool up = how == TPL_UPPER || (how == TPL_SWAP && utf8proc_category(c) == UTF8PROC_CATEGORY_LL);
		bool one = first && (how == TPL_TITLE || how == TPL_CAPITALIZE || how == TPL_TITLE_WORDS);

		tpl_work(r, 1);
		if (up || (one && how == TPL_TITLE_WORDS))
			put_upper(&k, i, c, false);
		else if (one)
			put_upper(&k, i, c, true);
		else if (how == TPL_SWAP && utf8proc_category(c) != UTF8PROC_CATEGORY_LU)
			put_char(&k, i, c);
		else
			put_lower(&k, i, end, c);
		first = how == TPL_TITLE ? !cased(c) : how == TPL_TITLE_WORDS && word_break(c);
		i = end;
	}
	return tpl_buf_val(r, &b);
}

static bool in_class(int32_t c, enum tpl_class what)
{
	utf8proc_category_t k = utf8proc_category(c);
	bool letter = k >= UTF8PROC_CATEGORY_LU && k <= UTF8PROC_CATEGORY_LO;

	switch (what) {
	case TPL_ALPHA: return letter;
	case TPL_DIGIT: return k == UTF8PROC_CATEGORY_ND;
	case TPL_ALNUM: return letter || (k >= UTF8PROC_CATEGORY_ND && k <= UTF8PROC_CATEGORY_NO);
	default: return tpl_space(c);
	}
}

bool tpl_all_of(const struct tpl_str *s, enum tpl_class what)
{
	bool any = false, inside = false;

	for (size_t i = 0; i < s->len;) {
		int32_t c;
		i += tpl_next(s->p + i, s->len - i, &c);
		if (what <= TPL_IS_SPACE) {
			if (!in_class(c, what))
				return false;
			any = true;
		} else if (cased(c)) {
			bool lower = utf8proc_category(c) == UTF8PROC_CATEGORY_LL;
			if ((what == TPL_IS_UPPER && lower) || (what == TPL_IS_LOWER && !lower) ||
			    (what == TPL_IS_TITLE && lower != inside))
				return false;
			any = inside = true;
		} else {
			inside = false;
		}
	}
	return any;
}

/* ---- ends, places, lines ------------------------------------------------------------------ */

static bool strips(int32_t c, const struct tpl_str *set)
{
	if (!set)
		return tpl_space(c);
	for (size_t i = 0; i < set->len;) {
		int32_t k;
		i += tpl_next(set->p + i, set->len - i, &k);
		if (k == c)
			return true;
	}
	return false;
}

struct tpl_val tpl_strip(struct tpl_run *r, const struct tpl_str *s, const struct tpl_str *set, bool left, bool right)
{
	size_t from = 0, end = s->len;
	int32_t c;

	while (left && from < end) {
		unsigned n = tpl_next(s->p + from, end - from, &c);
		if (!strips(c, set))
			break;
		tpl_work(r, set ? 1 + set->len / 16 : 1);
		from += n;
	}
	while (right && end > from) {
		size_t i = end - 1;
		while (i > from && ((uint8_t)s->p[i] & 0xc0) == 0x80)
			i--;
		tpl_next(s->p + i, end - i, &c);
		if (!strips(c, set))
			break;
		tpl_work(r, set ? 1 + set->len / 16 : 1);
		end = i;
	}
	return tpl_part(r, s, from, end - from);
}

size_t tpl_find(struct tpl_run *r, const struct tpl_str *s, const struct tpl_str *what, size_t at)
{
	const char *hit;

	if (at > s->len || what->len > s->len - at)
		return SIZE_MAX;
	if (!what->len)
		return at;
	hit = memmem(s->p + at, s->len - at, what->p, what->len); /* linear, as glibc has it */
	tpl_work_bytes(r, hit ? (size_t)(hit - (s->p + at)) : s->len - at);
	return hit ? (size_t)(hit - s->p) : SIZE_MAX;
}

static struct tpl_val replace_nothing(struct tpl_run *r, const struct tpl_str *s, const struct tpl_str *by, int64_t most)
{
	struct tpl_buf b = { 0 };
	size_t i = 0;

	for (; most; most--) {
		int32_t c;
		tpl_put_str(r, &b, by);
		if (i == s->len)
			break;
		size_t n = tpl_next(s->p + i, s->len - i, &c);
		tpl_put_part(r, &b, s, i, n);
		i += n;
	}
	tpl_put_part(r, &b, s, i, s->len - i);
	return tpl_buf_val(r, &b);
}

struct tpl_val tpl_replace(struct tpl_run *r, const struct tpl_str *s, const struct tpl_str *old,
			   const struct tpl_str *by, int64_t most)
{
	struct tpl_buf b = { 0 };
	size_t at = 0, hit;

	if (most < 0)
		most = INT64_MAX;
	if (!old->len)
		return replace_nothing(r, s, by, most);
	for (; most && (hit = tpl_find(r, s, old, at)) != SIZE_MAX; most--) {
		tpl_put_part(r, &b, s, at, hit - at);
		tpl_put_str(r, &b, by);
		at = hit + old->len;
	}
	if (!at)
		return tpl_str_val(s);
	tpl_put_part(r, &b, s, at, s->len - at);
	return tpl_buf_val(r, &b);
}

static bool line_end(int32_t c)
{
	return (c >= 10 && c <= 13) || (c >= 28 && c <= 30) || c == 0x85 || c == 0x2028 || c == 0x2029;
}

static size_t next_line(const struct tpl_str *s, size_t i, size_t *end)
{
	while (i < s->len) {
		int32_t c;
		size_t n = tpl_next(s->p + i, s->len - i, &c);
		if (line_end(c)) {
			*end = i;
			return i + n + (c == '\r' && i + 1 < s->len && s->p[i + 1] == '\n');
		}
		i += n;
	}
	return *end = s->len;
}

struct tpl_list *tpl_lines(struct tpl_run *r, const struct tpl_str *s, bool keep)
{
	size_t n = 0, i, k, end;

	for (i = 0; i < s->len; n++)
		i = next_line(s, i, &end);
	struct tpl_list *l = tpl_list_new(r, n, TPL_PLAIN_LIST);
	for (i = 0, n = 0; i < s->len; i = k, n++) {
		k = next_line(s, i, &end);
		l->v[n] = tpl_part(r, s, i, (keep ? k : end) - i);
	}
	return l;
}
