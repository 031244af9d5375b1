/* SPDX-License-Identifier: MIT */
/*
 * Owns: statements as trees, the token at hand, what a compiled template keeps.
 * Does not own: expressions (parse_expr.c), characters (lex.c).
 */
#include "template/tree.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct tpl_node node;

enum { DEPTH_MAX = 100 }; /* brackets, blocks and signs inside each other */

node *tpl_node_new(struct tpl_parse *p, enum tpl_type type, uint32_t line)
{
	node *n = tpl_array(&p->h, 1, sizeof(*n));

	if (++p->n_nodes > TPL_NODES_MAX) {
		p->h.line = line;
		tpl_fail(&p->h, -E2BIG, "the template has more than %u parts", TPL_NODES_MAX);
	}
	n->type = (uint8_t)type;
	n->line = line;
	return n;
}

void tpl_own(struct tpl_parse *p, node *n, const node *child)
{
	if (child->height >= n->height)
		n->height = (uint16_t)(child->height + 1);
	if (n->height > TPL_HEIGHT_MAX) {
		p->h.line = n->line;
		tpl_fail(&p->h, -E2BIG, "more than %u operators or blocks upon each other", TPL_HEIGHT_MAX);
	}
}

void tpl_deeper(struct tpl_parse *p)
{
	if (++p->depth > DEPTH_MAX) {
		p->h.line = p->now.line;
		tpl_fail(&p->h, -E2BIG, "nested deeper than %d levels", DEPTH_MAX);
	}
}

void tpl_advance(struct tpl_parse *p)
{
	p->now = p->ahead;
	p->ahead = tpl_lex_next(&p->x);
}

bool tpl_at_op(const struct tpl_parse *p, unsigned op)
{
	return p->now.type == T_OP && p->now.op == op;
}

static bool is_word(const struct tpl_token *t, const char *word)
{
	return t->type == T_WORD && t->len == strlen(word) && !memcmp(t->p, word, t->len);
}

bool tpl_at_word(const struct tpl_parse *p, const char *word)
{
	return is_word(&p->now, word);
}

bool tpl_ahead_word(const struct tpl_parse *p, const char *word)
{
	return is_word(&p->ahead, word);
}

bool tpl_take_op(struct tpl_parse *p, unsigned op)
{
	bool is = tpl_at_op(p, op);

	if (is)
		tpl_advance(p);
	return is;
}

bool tpl_take_word(struct tpl_parse *p, const char *word)
{
	bool is = tpl_at_word(p, word);

	if (is)
		tpl_advance(p);
	return is;
}

_Noreturn void tpl_unexpected(struct tpl_parse *p, const char *wanted)
{
	const struct tpl_token *t = &p->now;
	char got[48] = "the end of the template";

	if (t->type == T_OP)
		snprintf(got, sizeof(got), "'%c%c'", (char)(t->op & 0xff), t->op >> 8 ? (char)(t->op >> 8) : '\'');
	else if (t->type == T_WORD || t->type == T_STRING)
		snprintf(got, sizeof(got), "'%.*s'", t->len < 30 ? (int)t->len : 30, t->p);
	else if (t->type == T_INT || t->type == T_FLOAT)
		snprintf(got, sizeof(got), "a number");
	else if (t->type != T_EOF)
		snprintf(got, sizeof(got), "the tag's end");
	if (t->type == T_OP && !(t->op >> 8))
		got[3] = 0;
	p->h.line = t->line;
	tpl_fail(&p->h, -EINVAL, "%s where %s should be", got, wanted);
}

void tpl_want_op(struct tpl_parse *p, unsigned op)
{
	char wanted[8] = { '\'', (char)op, '\'', 0 };

	if (!tpl_take_op(p, op))
		tpl_unexpected(p, wanted);
}

uint32_t tpl_symbol(struct tpl_parse *p, const char *name, size_t len)
{
	struct apr_template *t = p->t;

	for (uint32_t i = 0; i < t->n_symbols; i++)
		if (t->symbols[i]->len == len && !memcmp(t->symbols[i]->p, name, len))
			return i;
	if (t->n_symbols == p->cap_symbols) {
		uint32_t cap = p->cap_symbols ? p->cap_symbols * 2 : 32;
		const struct tpl_str **more;
		if (cap > 4096) { /* each is looked for one by one */
			p->h.line = p->now.line;
			tpl_fail(&p->h, -E2BIG, "the template has more than 4096 names");
		}
		more = tpl_alloc(&p->h, cap * sizeof(struct tpl_str *));
		if (t->n_symbols)
			memcpy(more, t->symbols, t->n_symbols * sizeof(struct tpl_str *));
		t->symbols = more;
		p->cap_symbols = cap;
	}
	t->symbols[t->n_symbols] = tpl_str_new(&p->h, name, len, NULL, 0);
	return t->n_symbols++;
}

node *tpl_name(struct tpl_parse *p)
{
	node *n = tpl_node_new(p, N_NAME, p->now.line);

	if (p->now.type != T_WORD)
		tpl_unexpected(p, "a name");
	n->sym = tpl_symbol(p, p->now.p, p->now.len);
	n->value = tpl_str_val(p->t->symbols[n->sym]);
	if (n->sym == p->t->s_varargs)
		p->saw |= TPL_NAMES_VARARGS;
	if (n->sym == p->t->s_kwargs)
		p->saw |= TPL_NAMES_KWARGS;
	tpl_advance(p);
	return n;
}

/* ---- statements -------------------------------------------------------------------------- */

static void block_end(struct tpl_parse *p)
{
	if (p->now.type != T_BLOCK_END)
		tpl_unexpected(p, "the tag's end");
	tpl_advance(p);
}

static node *statement(struct tpl_parse *p);

static void add(struct tpl_parse *p, node *of, node ***end, node *n)
{
	**end = n;
	*end = &n->next;
	tpl_own(p, of, n);
}

static bool at_any(const struct tpl_parse *p, const char *const *words)
{
	for (; words && *words; words++)
		if (tpl_at_word(p, *words))
			return true;
	return false;
}

/* Text, {{ }} and statements into *end, until a tag that begins with one of the words: that word is then at hand. */
static void body(struct tpl_parse *p, node *of, node **end, const char *const *until)
{
	uint32_t line = p->now.line;

	for (;;) {
		node *n;
		switch (p->now.type) {
		case T_DATA:
			n = tpl_node_new(p, N_TEXT, p->now.line);
			n->value = tpl_str_val(tpl_str_new(&p->h, p->now.p, p->now.len, NULL, 0));
			tpl_advance(p);
			break;
		case T_VAR_BEGIN:
			n = tpl_node_new(p, N_PRINT, p->now.line);
			tpl_advance(p);
			n->a = tpl_parse_tuple(p, true);
			tpl_own(p, n, n->a);
			if (p->now.type != T_VAR_END)
				tpl_unexpected(p, "'}}'");
			tpl_advance(p);
			break;
		case T_BLOCK_BEGIN:
			tpl_advance(p);
			if (at_any(p, until))
				return;
			n = statement(p);
			block_end(p);
			break;
		default:
			if (until) {
				p->h.line = line;
				tpl_fail(&p->h, -EINVAL, "a block without its %s", until[0]);
			}
			return;
		}
		add(p, of, &end, n);
	}
}

/* A statement's own body: from the end of its first tag to the word that ends it, which is taken. */
static void inside(struct tpl_parse *p, node *n, const char *const *until)
{
	tpl_take_op(p, ':');
	block_end(p);
	tpl_deeper(p);
	body(p, n, &n->kids, until);
	tpl_higher(p);
}

static node *for_loop(struct tpl_parse *p)
{
	static const char *const until[] = { "endfor", "else", NULL }, *const end[] = { "endfor", NULL };
	node *n = tpl_node_new(p, N_FOR, p->now.line);

	tpl_advance(p);
	n->a = tpl_parse_target(p, false);
	if (!tpl_take_word(p, "in"))
		tpl_unexpected(p, "'in'");
	n->b = tpl_parse_tuple(p, false);
	tpl_own(p, n, n->b);
	if (tpl_take_word(p, "if")) {
		n->c = tpl_parse_expr(p);
		tpl_own(p, n, n->c);
	}
	n->op = tpl_take_word(p, "recursive");
	p->loops++;
	inside(p, n, until);
	p->loops--;
	if (tpl_take_word(p, "else")) {
		node *other = tpl_node_new(p, N_SCOPE, p->now.line);
		inside(p, other, end);
		n->alt = other;
		tpl_own(p, n, other);
	}
	tpl_advance(p);
	return n;
}

static node *if_chain(struct tpl_parse *p)
{
	static const char *const until[] = { "endif", "elif", "else", NULL }, *const end[] = { "endif", NULL };
	node *n = tpl_node_new(p, N_IF, p->now.line), **last = &n->kids;
	bool other = false;

	while (!tpl_at_word(p, "endif")) {
		node *k = tpl_node_new(p, N_CLAUSE, p->now.line);
		other = tpl_at_word(p, "else");
		tpl_advance(p);
		if (!other) {
			k->a = tpl_parse_tuple(p, false);
			tpl_own(p, k, k->a);
		}
		inside(p, k, other ? end : until);
		add(p, n, &last, k);
	}
	tpl_advance(p);
	return n;
}

static node *set(struct tpl_parse *p)
{
	static const char *const end[] = { "endset", NULL };
	node *n = tpl_node_new(p, N_SET, p->now.line);

	tpl_advance(p);
	n->a = tpl_parse_target(p, true);
	if (tpl_take_op(p, '=')) {
		n->b = tpl_parse_tuple(p, true);
		tpl_own(p, n, n->b);
		return n;
	}
	n->type = N_SET_BLOCK;
	n->b = tpl_parse_filters(p, NULL, false);
	if (n->b)
		tpl_own(p, n, n->b);
	inside(p, n, end);
	tpl_advance(p);
	return n;
}

static void params(struct tpl_parse *p, node *of)
{
	node **end = &of->alt;
	bool defaults = false;

	tpl_want_op(p, '(');
	while (!tpl_at_op(p, ')')) {
		node *n;
		if (of->alt) {
			tpl_want_op(p, ',');
			if (tpl_at_op(p, ')'))
				break;
		}
		n = tpl_name(p);
		n->type = N_PARAM;
		if (tpl_take_op(p, '=')) {
			n->a = tpl_parse_expr(p);
			tpl_own(p, n, n->a);
			defaults = true;
		} else if (defaults) {
			tpl_unexpected(p, "a default value");
		}
		add(p, of, &end, n);
	}
	tpl_advance(p);
}

/* A body that runs on its own: no break leaves it. */
static void apart(struct tpl_parse *p, node *n, const char *const *end)
{
	unsigned loops = p->loops, saw = p->saw;

	p->loops = p->saw = 0;
	inside(p, n, end);
	n->op = (uint8_t)p->saw;
	p->loops = loops;
	p->saw = saw;
	tpl_advance(p);
}

static node *macro(struct tpl_parse *p)
{
	static const char *const end[] = { "endmacro", NULL };
	node *n;

	tpl_advance(p);
	n = tpl_name(p);
	n->type = N_MACRO;
	params(p, n);
	apart(p, n, end);
	return n;
}

static node *call_block(struct tpl_parse *p)
{
	static const char *const end[] = { "endcall", NULL };
	node *n = tpl_node_new(p, N_CALL_BLOCK, p->now.line);

	tpl_advance(p);
	if (tpl_at_op(p, '('))
		params(p, n);
	n->a = tpl_parse_expr(p);
	if (n->a->type != N_CALL)
		tpl_unexpected(p, "a call");
	tpl_own(p, n, n->a);
	apart(p, n, end);
	return n;
}

static node *filter_block(struct tpl_parse *p)
{
	static const char *const end[] = { "endfilter", NULL };
	node *n = tpl_node_new(p, N_FILTER_BLOCK, p->now.line);

	tpl_advance(p);
	n->b = tpl_parse_filters(p, NULL, true);
	tpl_own(p, n, n->b);
	inside(p, n, end);
	tpl_advance(p);
	return n;
}

static node *with(struct tpl_parse *p)
{
	static const char *const until[] = { "endwith", NULL };
	node *n = tpl_node_new(p, N_WITH, p->now.line), **end = &n->alt;

	tpl_advance(p);
	while (p->now.type != T_BLOCK_END) {
		node *s;
		if (n->alt)
			tpl_want_op(p, ',');
		s = tpl_node_new(p, N_SET, p->now.line);
		s->a = tpl_name(p);
		tpl_want_op(p, '=');
		s->b = tpl_parse_expr(p);
		tpl_own(p, s, s->b);
		add(p, n, &end, s);
	}
	inside(p, n, until);
	tpl_advance(p);
	return n;
}

static node *generation(struct tpl_parse *p)
{
	static const char *const end[] = { "endgeneration", NULL };
	node *n = tpl_node_new(p, N_SCOPE, p->now.line);

	tpl_advance(p);
	apart(p, n, end);
	return n;
}

static node *jump(struct tpl_parse *p)
{
	node *n = tpl_node_new(p, tpl_at_word(p, "break") ? N_BREAK : N_CONTINUE, p->now.line);

	if (!p->loops)
		tpl_unexpected(p, "something that needs no loop");
	tpl_advance(p);
	return n;
}

static node *statement(struct tpl_parse *p)
{
	static const struct {
		const char *word;
		node *(*parse)(struct tpl_parse *p);
	} table[] = { { "for", for_loop },	{ "if", if_chain }, { "set", set },	   { "macro", macro },
		      { "call", call_block },	{ "with", with },   { "break", jump },	   { "continue", jump },
		      { "filter", filter_block }, { "generation", generation } };
	node *n;

	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		if (!tpl_at_word(p, table[i].word))
			continue;
		tpl_deeper(p);
		n = table[i].parse(p);
		tpl_higher(p);
		return n;
	}
	tpl_unexpected(p, "a statement");
}

/* ---- the whole ------------------------------------------------------------------------------ */

static void parse(struct tpl_parse *p, const char *text, size_t len)
{
	struct apr_template *t = p->t;

	if (len > APR_TEMPLATE_TEXT_MAX)
		tpl_fail(&p->h, -E2BIG, "the template's text is above %u bytes", APR_TEMPLATE_TEXT_MAX);
	if (!tpl_utf8_ok(text, len))
		tpl_fail(&p->h, -EINVAL, "the template's text is not UTF-8");
	tpl_lex_init(&p->x, &p->h, text, len);
	tpl_advance(p);
	tpl_advance(p);
	t->s_loop = tpl_symbol(p, "loop", 4);
	t->s_caller = tpl_symbol(p, "caller", 6);
	t->s_varargs = tpl_symbol(p, "varargs", 7);
	t->s_kwargs = tpl_symbol(p, "kwargs", 6);
	t->body = tpl_node_new(p, N_SCOPE, 1);
	body(p, t->body, &t->body->kids, NULL);
}

int apr_template_compile(struct apr_template **out, const char *text, size_t len, char *err, size_t errlen)
{
	struct tpl_parse *p = calloc(1, sizeof(*p));
	int e;

	if (p)
		p->t = calloc(1, sizeof(*p->t));
	if (!p || !p->t) {
		free(p);
		return -ENOMEM;
	}
	/* a node is some 100 bytes, and its text once or twice */
	p->h = (struct tpl_heap){ .limit = (size_t)64 << 20, .words = err, .words_len = errlen };
	if (errlen)
		*err = 0;
	if (!setjmp(p->h.way_out))
		parse(p, text, len);
	e = p->h.err;
	p->t->blocks = p->h.blocks;
	if (e)
		apr_template_free(p->t);
	else
		*out = p->t;
	free(p);
	return e;
}

void apr_template_free(struct apr_template *t)
{
	if (!t)
		return;
	tpl_blocks_free(t->blocks);
	free(t);
}

bool apr_template_names(const struct apr_template *t, const char *name)
{
	for (uint32_t i = 0; i < t->n_symbols; i++)
		if (tpl_eq(t->symbols[i], name))
			return true;
	return false;
}
