/* SPDX-License-Identifier: MIT */
/*
 * A template as a tree.
 *
 * Owns: struct tpl_node and what is known of a whole template. Children hang in
 * chains (next); every chain's and every child's depth is bounded while parsing, so
 * that a walk may recurse.
 */
#ifndef APR_TEMPLATE_TREE_H
#define APR_TEMPLATE_TREE_H

#include "template/value.h"

enum tpl_type {
	/* expressions; a, b, c and kids as said */
	N_LITERAL,  /* value */
	N_NAME,     /* sym, value its text */
	N_LIST,     /* kids */
	N_TUPLE,    /* kids */
	N_DICT,     /* kids: key, value, key, value */
	N_ATTR,     /* a . value */
	N_ITEM,     /* a [ b ] */
	N_SLICE,    /* a [ kids: three, N_NOTHING where left out ] */
	N_NOTHING,
	N_CALL,     /* a ( kids ) */
	N_FILTER,   /* a | value ( kids ); a NULL: of a block */
	N_TEST,     /* a is value ( kids ) */
	N_NOT,      /* a */
	N_SIGN,     /* a; op '-' or '+' */
	N_AND,      /* a b */
	N_OR,
	N_IF_ELSE,  /* a if b else c (or NULL) */
	N_COMPARE,  /* a, then kids: N_OPERAND with op and a */
	N_OPERAND,
	N_ARITH,    /* a op b */
	N_CONCAT,   /* kids */
	N_KEYWORD,  /* in arguments: value = a */
	N_STAR,     /* in arguments: *a */
	N_STARS,    /* **a */
	/* statements */
	N_TEXT,     /* value */
	N_PRINT,    /* a */
	N_FOR,      /* a target in b (if c): kids, alt; op: recursive */
	N_IF,       /* kids: N_CLAUSE */
	N_CLAUSE,   /* a condition (NULL: else), kids */
	N_SET,      /* a = b */
	N_SET_BLOCK, /* a, b filter chain or NULL, kids */
	N_MACRO,    /* sym, value its name, alt: N_PARAM, kids; op TPL_NAMES_* */
	N_PARAM,    /* sym, value its name, a default or NULL */
	N_CALL_BLOCK, /* a the call, alt: N_PARAM, kids */
	N_FILTER_BLOCK, /* b filter chain, kids */
	N_WITH,     /* alt: N_SET, kids */
	N_SCOPE,    /* kids */
	N_BREAK,
	N_CONTINUE,
	/* targets */
	N_NS_ATTR   /* sym the namespace, value the attribute */
};

enum tpl_op { /* of N_ARITH and N_OPERAND */
	OP_ADD,
	OP_SUB,
	OP_MUL,
	OP_DIV,
	OP_FLOORDIV,
	OP_MOD,
	OP_POW,
	OP_EQ,
	OP_NE,
	OP_LT,
	OP_LE,
	OP_GT,
	OP_GE,
	OP_IN,
	OP_NOT_IN
};

#define TPL_NAMES_VARARGS 1u /* the macro's text has the name, so that it takes more than its parameters */
#define TPL_NAMES_KWARGS 2u

struct tpl_node {
	uint8_t type, op;
	uint16_t height; /* of what hangs below */
	uint32_t line, sym;
	struct tpl_node *next, *a, *b, *c, *kids, *alt;
	struct tpl_val value;
};

#define TPL_NODES_MAX 200000u
#define TPL_HEIGHT_MAX 150u /* of a tree: what nests, and how many operators stand in a row */

struct apr_template {
	struct tpl_node *body;
	const struct tpl_str **symbols;
	uint32_t n_symbols;
	uint32_t s_loop, s_caller, s_varargs, s_kwargs;
	struct tpl_block *blocks;
};

/* ---- tokens (lex.c) ---------------------------------------------------------------- */

enum tpl_token_type {
	T_EOF,
	T_DATA,
	T_VAR_BEGIN,
	T_VAR_END,
	T_BLOCK_BEGIN,
	T_BLOCK_END,
	T_WORD,
	T_STRING,
	T_INT,
	T_FLOAT,
	T_OP
};

#define OPCODE(a, b) ((unsigned)(a) | (unsigned)(b) << 8) /* T_OP's op: one or two characters */

struct tpl_token {
	enum tpl_token_type type;
	uint32_t line;
	const char *p; /* DATA, WORD, STRING (unescaped) */
	size_t len;
	unsigned op;
	int64_t i;
	double f;
};

struct tpl_lex {
	struct tpl_heap *h;
	const char *p;
	size_t len, at;
	uint32_t line;
	enum { IN_TEXT, IN_VAR, IN_BLOCK } in;
	bool line_start;      /* what is at `at` in IN_TEXT begins a line */
	unsigned n_open;
	char open[64];        /* brackets not yet closed */
	bool tag_next;        /* a tag's begin follows the text just given */
};

/* The text with one kind of newline, and without the last one. */
void tpl_lex_init(struct tpl_lex *x, struct tpl_heap *h, const char *text, size_t len);
struct tpl_token tpl_lex_next(struct tpl_lex *x);

/* ---- parsing (parse.c, parse_expr.c) --------------------------------------------------- */

struct tpl_parse {
	struct tpl_heap h; /* first */
	struct tpl_lex x;
	struct tpl_token now, ahead;
	struct apr_template *t;
	uint32_t n_nodes, cap_symbols;
	unsigned depth, loops; /* loops: around the statement */
	unsigned saw;          /* TPL_NAMES_*: of the macro being read */
};

struct tpl_node *tpl_node_new(struct tpl_parse *p, enum tpl_type type, uint32_t line);
void tpl_own(struct tpl_parse *p, struct tpl_node *n, const struct tpl_node *child); /* height */
void tpl_advance(struct tpl_parse *p);
bool tpl_at_op(const struct tpl_parse *p, unsigned op);
bool tpl_at_word(const struct tpl_parse *p, const char *word);
bool tpl_ahead_word(const struct tpl_parse *p, const char *word);
bool tpl_take_op(struct tpl_parse *p, unsigned op);
bool tpl_take_word(struct tpl_parse *p, const char *word);
void tpl_want_op(struct tpl_parse *p, unsigned op);
_Noreturn void tpl_unexpected(struct tpl_parse *p, const char *wanted);
struct tpl_node *tpl_name(struct tpl_parse *p);  /* takes a word: N_NAME */
uint32_t tpl_symbol(struct tpl_parse *p, const char *name, size_t len);
void tpl_deeper(struct tpl_parse *p);
static inline void tpl_higher(struct tpl_parse *p)
{
	p->depth--;
}

struct tpl_node *tpl_parse_expr(struct tpl_parse *p);      /* with ... if ... else ... */
struct tpl_node *tpl_parse_or(struct tpl_parse *p);        /* without */
struct tpl_node *tpl_parse_tuple(struct tpl_parse *p, bool with_if);
struct tpl_node *tpl_parse_target(struct tpl_parse *p, bool namespaces);
struct tpl_node *tpl_parse_filters(struct tpl_parse *p, struct tpl_node *of, bool inline_first);

#endif
