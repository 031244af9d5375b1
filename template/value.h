/* SPDX-License-Identifier: MIT */
/*
 * Values of a template as it runs, and what can be done with them.
 *
 * Owns: struct tpl_val and the run's state. All values but namespaces are immutable,
 * so that they are shared freely; all live in the run's heap. Strings are valid UTF-8
 * and know of each byte whether the template wrote it or it came in a variable.
 *
 * Nothing here returns an error: tpl_fail leaves the whole run.
 */
#ifndef APR_TEMPLATE_VALUE_H
#define APR_TEMPLATE_VALUE_H

#include <stdbool.h>
#include <string.h>

#include "template/heap.h"
#include "template/template.h"

struct tpl_node;
struct tpl_frame;
struct tpl_run;

enum tpl_kind {
	TPL_UNDEF, /* u.str: what was looked for, or NULL */
	TPL_NONE,
	TPL_BOOL,
	TPL_INT,
	TPL_FLOAT,
	TPL_STR,
	TPL_LIST,
	TPL_DICT,
	TPL_NAMESPACE,
	TPL_MACRO,
	TPL_METHOD,
	TPL_FUNCTION,
	TPL_LOOP
};

struct tpl_str {
	const char *p;
	const uint8_t *mark; /* a byte each, or NULL: all are `from` */
	uint32_t len, chars;
	uint8_t from;
};

enum tpl_flavour { /* of TPL_LIST: how it prints, and what it does not do */
	TPL_PLAIN_LIST,
	TPL_TUPLE,
	TPL_ONCE, /* a generator: always true, no length, no index, walked through once */
	TPL_KEYS,
	TPL_VALUES,
	TPL_ITEMS,
	TPL_RANGE
};

struct tpl_val {
	uint8_t kind;
	union {
		bool b;
		int64_t i;
		double f;
		const struct tpl_str *s;
		struct tpl_list *l;
		struct tpl_dict *d; /* NAMESPACE too */
		const struct tpl_macro *macro;
		const struct tpl_bound *method;
		const struct tpl_function *fn;
		struct tpl_loop *loop;
	} u;
};

struct tpl_list {
	uint32_t n, at; /* at: ONCE: the next one */
	uint8_t flavour;
	struct tpl_val *v;
};

struct tpl_dict {
	uint32_t n, cap;
	struct tpl_val *k, *v;
};

struct tpl_macro {
	const struct tpl_node *node; /* MACRO or CALL_BLOCK */
	struct tpl_frame *home;      /* where it was defined */
};

struct tpl_loop {
	struct tpl_val *v;
	uint32_t n, i; /* i: the one now, from 0 */
	uint32_t depth;
	const struct tpl_node *node; /* of a recursive one, which loop(...) runs again */
	struct tpl_frame *home;
	struct tpl_val seen; /* of loop.changed */
	bool has_seen;
};

struct tpl_kwarg {
	const struct tpl_str *name;
	struct tpl_val v;
};
struct tpl_args {
	struct tpl_val *pos;
	struct tpl_kwarg *kw;
	uint32_t n, n_kw;
};

/* One filter, test, method or function of the language. `params` names what it takes, blanks between, the first
 * `need` of them required; v[i] is NULL for one left out. params NULL: it gets the arguments as they are. */
enum { TPL_PARAMS_MAX = 6 };
struct tpl_function {
	const char *name;
	struct tpl_val (*fn)(struct tpl_run *r, struct tpl_val in, const struct tpl_val *const *v);
	const char *params;
	uint32_t need;
	struct tpl_val (*raw)(struct tpl_run *r, struct tpl_val in, const struct tpl_args *a);
};
struct tpl_bound { /* a method with what it is of */
	const struct tpl_function *fn;
	struct tpl_val of;
};

struct tpl_frame { /* a scope */
	struct tpl_frame *up;
	struct tpl_binding *names;
};

struct tpl_buf { /* text that grows */
	char *p;
	uint8_t *mark;
	size_t len, cap;
};

enum tpl_flow { TPL_GO_ON, TPL_BREAK, TPL_CONTINUE };

struct tpl_run {
	struct tpl_heap h; /* first: tpl_fail(&r->h, ...) */
	const struct apr_template *t;
	struct tpl_val *globals; /* by symbol */
	struct tpl_frame *frame;
	struct tpl_buf *out;
	enum tpl_flow flow;
	unsigned depth, max_depth;
	uint64_t steps, max_steps;
	size_t max_output;
	int64_t now;
};

/* ---- counting ------------------------------------------------------------------ */

void tpl_out_of_steps(struct tpl_run *r);
static inline void tpl_work(struct tpl_run *r, uint64_t n)
{
	r->steps += n;
	if (r->steps > r->max_steps)
		tpl_out_of_steps(r);
}
static inline void tpl_work_bytes(struct tpl_run *r, size_t n)
{
	tpl_work(r, 1 + n / 64);
}
void tpl_enter(struct tpl_run *r); /* one deeper; every function that may reach itself again does */
static inline void tpl_leave(struct tpl_run *r)
{
	r->depth--;
}

/* ---- making (value.c) ------------------------------------------------------------- */

#define TPL_UNDEFINED ((struct tpl_val){ .kind = TPL_UNDEF })
#define TPL_NULL ((struct tpl_val){ .kind = TPL_NONE })
static inline struct tpl_val tpl_bool(bool b)
{
	return (struct tpl_val){ TPL_BOOL, { .b = b } };
}
static inline struct tpl_val tpl_int(int64_t i)
{
	return (struct tpl_val){ TPL_INT, { .i = i } };
}
static inline struct tpl_val tpl_float(double f)
{
	return (struct tpl_val){ TPL_FLOAT, { .f = f } };
}
static inline struct tpl_val tpl_list_val(struct tpl_list *l)
{
	return (struct tpl_val){ TPL_LIST, { .l = l } };
}
static inline bool tpl_is(struct tpl_val v, enum tpl_kind k)
{
	return v.kind == k;
}
/* The bytes are kept, not copied. */
const struct tpl_str *tpl_str_new(struct tpl_heap *h, const char *p, size_t len, const uint8_t *mark, uint8_t from);
struct tpl_val tpl_str_val(const struct tpl_str *s);
struct tpl_val tpl_text(struct tpl_run *r, const char *constant); /* the template's, static */
struct tpl_val tpl_part(struct tpl_run *r, const struct tpl_str *s, size_t from, size_t len); /* bytes */
struct tpl_val tpl_undefined(struct tpl_run *r, const char *name, size_t len);
struct tpl_list *tpl_list_new(struct tpl_run *r, size_t n, enum tpl_flavour flavour);
struct tpl_val tpl_pair(struct tpl_run *r, struct tpl_val a, struct tpl_val b);
struct tpl_val tpl_dict_new(struct tpl_run *r, size_t room, enum tpl_kind kind);
void tpl_dict_set(struct tpl_run *r, struct tpl_dict *d, struct tpl_val k, struct tpl_val v);
const struct tpl_val *tpl_dict_get(struct tpl_run *r, const struct tpl_dict *d, struct tpl_val k);
const struct tpl_val *tpl_dict_get_name(struct tpl_run *r, const struct tpl_dict *d, const struct tpl_str *name);
struct tpl_val tpl_from_json(struct tpl_run *r, const json_t *j, uint8_t from);

static inline bool tpl_eq(const struct tpl_str *s, const char *text)
{
	size_t n = strlen(text);
	return s->len == n && !memcmp(s->p, text, n);
}

void tpl_put(struct tpl_run *r, struct tpl_buf *b, const char *p, size_t n, const uint8_t *mark, uint8_t from);
void tpl_put_str(struct tpl_run *r, struct tpl_buf *b, const struct tpl_str *s);
void tpl_put_part(struct tpl_run *r, struct tpl_buf *b, const struct tpl_str *s, size_t from, size_t len);
void tpl_put_text(struct tpl_run *r, struct tpl_buf *b, const char *constant);
struct tpl_val tpl_buf_val(struct tpl_run *r, const struct tpl_buf *b);

/* ---- looking (ops.c) ---------------------------------------------------------------- */

const char *tpl_kind_name(struct tpl_val v);
bool tpl_true(struct tpl_run *r, struct tpl_val v);
bool tpl_same(struct tpl_run *r, struct tpl_val a, struct tpl_val b); /* == */
int tpl_order(struct tpl_run *r, struct tpl_val a, struct tpl_val b); /* < 0, 0, > 0; fails where they have none */
bool tpl_within(struct tpl_run *r, struct tpl_val item, struct tpl_val of);
bool tpl_number(struct tpl_val v, double *f);   /* bool, int or float */
bool tpl_whole(struct tpl_val v, int64_t *i);   /* bool or int */
int64_t tpl_want_whole(struct tpl_run *r, const struct tpl_val *v, int64_t none); /* an argument; none: left out, None */
struct tpl_val tpl_arith(struct tpl_run *r, int op, struct tpl_val a, struct tpl_val b);
struct tpl_val tpl_negate(struct tpl_run *r, struct tpl_val v, bool minus);
struct tpl_val tpl_item(struct tpl_run *r, struct tpl_val of, struct tpl_val key);
struct tpl_val tpl_attr(struct tpl_run *r, struct tpl_val of, const struct tpl_str *name);
struct tpl_val tpl_slice(struct tpl_run *r, struct tpl_val of, const struct tpl_val part[3]);
struct tpl_list *tpl_walk(struct tpl_run *r, struct tpl_val v); /* what a for loop goes through; used up if ONCE */
size_t tpl_length(struct tpl_run *r, struct tpl_val v);
/* Stable; cmp may leave the run, which the C library's sort would not survive without a leak. */
void tpl_sort(struct tpl_run *r, uint32_t *at, size_t n, int (*cmp)(const void *, const void *, void *), void *arg);

/* ---- text (text.c, json.c) ------------------------------------------------------------ */

void tpl_put_val(struct tpl_run *r, struct tpl_buf *b, struct tpl_val v);  /* as {{ }} prints it */
void tpl_put_repr(struct tpl_run *r, struct tpl_buf *b, struct tpl_val v); /* as inside a list */
const struct tpl_str *tpl_to_str(struct tpl_run *r, struct tpl_val v);
size_t tpl_float_text(double f, char out[40]);
struct tpl_json {
	const struct tpl_str *indent; /* NULL: on one line */
	const struct tpl_str *comma, *colon; /* NULL: ", " and ": " */
	bool ascii, sort;
};
struct tpl_val tpl_to_json(struct tpl_run *r, struct tpl_val v, const struct tpl_json *how);
struct tpl_val tpl_percent(struct tpl_run *r, const struct tpl_str *fmt, struct tpl_val *v, uint32_t n);

/* ---- characters (chars.c) --------------------------------------------------------------- */

bool tpl_utf8_ok(const char *p, size_t len);
uint32_t tpl_chars(const char *p, size_t len);
unsigned tpl_next(const char *p, size_t len, int32_t *c);     /* bytes of the character at p */
size_t tpl_byte_of(const struct tpl_str *s, uint32_t ch);      /* where character ch begins */
bool tpl_space(int32_t c);
enum tpl_case { TPL_UPPER, TPL_LOWER, TPL_TITLE, TPL_CAPITALIZE, TPL_SWAP, TPL_TITLE_WORDS };
struct tpl_val tpl_recase(struct tpl_run *r, const struct tpl_str *s, enum tpl_case how);
struct tpl_val tpl_strip(struct tpl_run *r, const struct tpl_str *s, const struct tpl_str *set, bool left, bool right);
/* The next `what` in s from byte `at`; SIZE_MAX none. */
size_t tpl_find(struct tpl_run *r, const struct tpl_str *s, const struct tpl_str *what, size_t at);
struct tpl_val tpl_replace(struct tpl_run *r, const struct tpl_str *s, const struct tpl_str *old,
			   const struct tpl_str *by, int64_t most);
struct tpl_list *tpl_lines(struct tpl_run *r, const struct tpl_str *s, bool keep);
bool tpl_printable(int32_t c);
enum tpl_class { TPL_ALPHA, TPL_DIGIT, TPL_ALNUM, TPL_IS_SPACE, TPL_IS_UPPER, TPL_IS_LOWER, TPL_IS_TITLE };
bool tpl_all_of(const struct tpl_str *s, enum tpl_class what);

/* ---- running (eval.c, call.c) ------------------------------------------------------------ */

struct tpl_binding {
	struct tpl_binding *next;
	uint32_t sym;
	struct tpl_val v;
};
struct tpl_val tpl_eval(struct tpl_run *r, const struct tpl_node *n);
void tpl_exec(struct tpl_run *r, const struct tpl_node *body); /* a chain of statements */
void tpl_bind(struct tpl_run *r, uint32_t sym, struct tpl_val v);
void tpl_assign(struct tpl_run *r, const struct tpl_node *target, struct tpl_val v);
struct tpl_val tpl_call(struct tpl_run *r, struct tpl_val fn, const struct tpl_args *a);
struct tpl_val tpl_call_macro(struct tpl_run *r, const struct tpl_macro *m, const struct tpl_args *a,
			      const struct tpl_val *caller);
struct tpl_val tpl_call_loop(struct tpl_run *r, const struct tpl_loop *l, struct tpl_val items);
struct tpl_args tpl_args_of(struct tpl_run *r, const struct tpl_node *list);
struct tpl_val tpl_invoke(struct tpl_run *r, const struct tpl_function *f, const char *what, struct tpl_val in,
			  const struct tpl_args *a);
struct tpl_val tpl_filter(struct tpl_run *r, const struct tpl_str *name, struct tpl_val in, const struct tpl_args *a);
bool tpl_test(struct tpl_run *r, const struct tpl_str *name, struct tpl_val in, const struct tpl_args *a);

const struct tpl_function *tpl_find_filter(const struct tpl_str *name);
const struct tpl_function *tpl_find_seq_filter(const struct tpl_str *name);
const struct tpl_function *tpl_find_test(const struct tpl_str *name);
const struct tpl_function *tpl_find_method(struct tpl_val of, const struct tpl_str *name);
const struct tpl_function *tpl_find_global(const char *name, size_t len);
const struct tpl_function *tpl_in_table(const struct tpl_function *t, size_t n, const char *name, size_t len);
struct tpl_val tpl_loop_attr(struct tpl_run *r, struct tpl_loop *l, const struct tpl_str *name);

#endif
