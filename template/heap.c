/* SPDX-License-Identifier: MIT */
/* Owns: blocks, and the way out. See heap.h. */
#include "template/heap.h"
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 64 << 10 };

struct tpl_block {
	struct tpl_block *next;
	_Alignas(16) char data[];
};

_Noreturn void tpl_fail(struct tpl_heap *h, int err, const char *fmt, ...)
{
	va_list ap;

	h->err = err;
	if (h->words && h->words_len) {
		int n = h->line ? snprintf(h->words, h->words_len, "line %u: ", h->line) : 0;
		va_start(ap, fmt);
		if (n >= 0 && (size_t)n < h->words_len)
			vsnprintf(h->words + n, h->words_len - (size_t)n, fmt, ap);
		va_end(ap);
		for (char *p = h->words; *p; p++) /* one line, whatever the template says */
			if ((unsigned char)*p < ' ')
				*p = ' ';
	}
	longjmp(h->way_out, 1);
}

static char *block(struct tpl_heap *h, size_t size)
{
	struct tpl_block *b;

	if (size > h->limit - h->used)
		tpl_fail(h, -E2BIG, "more than %zu KiB of memory", h->limit >> 10);
	b = malloc(sizeof(*b) + size);
	if (!b)
		tpl_fail(h, -ENOMEM, "out of memory");
	b->next = h->blocks;
	h->blocks = b;
	h->used += size;
	return b->data;
}

void *tpl_alloc(struct tpl_heap *h, size_t n)
{
	char *p;

	if (n > h->limit || h->used > h->limit)
		tpl_fail(h, -E2BIG, "more than %zu KiB of memory", h->limit >> 10);
	n = (n + 7) & ~(size_t)7;
	if (n > BLOCK / 4) /* one of its own, and the block in use goes on */
		return block(h, n);
	if (n > h->left) {
		h->free = block(h, BLOCK);
		h->left = BLOCK;
	}
	p = h->free;
	h->free += n;
	h->left -= n;
	return p;
}

void *tpl_array(struct tpl_heap *h, size_t n, size_t each)
{
	size_t bytes;
	void *p;

	if (__builtin_mul_overflow(n, each, &bytes))
		tpl_fail(h, -E2BIG, "more than %zu KiB of memory", h->limit >> 10);
	p = tpl_alloc(h, bytes);
	memset(p, 0, bytes);
	return p;
}

void tpl_blocks_free(struct tpl_block *b)
{
	while (b) {
		struct tpl_block *next = b->next;
		free(b);
		b = next;
	}
}
