/* SPDX-License-Identifier: MIT */
/*
 * The memory of one compilation or one rendering, and the way out of it.
 *
 * Owns: blocks that are given back all at once, their limit, and the jump to where
 * the work began when something is wrong. Because nothing else is held while a
 * template is read or run, that jump leaks nothing.
 */
#ifndef APR_TEMPLATE_HEAP_H
#define APR_TEMPLATE_HEAP_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

struct tpl_block;

struct tpl_heap {
	struct tpl_block *blocks;
	char *free;
	size_t left;
	size_t used, limit;
	jmp_buf way_out; /* set by who owns the heap */
	int err;
	char *words;
	size_t words_len;
	uint32_t line; /* of the template, for the words */
};

/* Writes "line N: words" and jumps to way_out. */
_Noreturn void tpl_fail(struct tpl_heap *h, int err, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* 8-aligned; does not return without memory. */
void *tpl_alloc(struct tpl_heap *h, size_t n) __attribute__((returns_nonnull));
void *tpl_array(struct tpl_heap *h, size_t n, size_t each) __attribute__((returns_nonnull)); /* zeroed */
void tpl_blocks_free(struct tpl_block *b);

#endif
