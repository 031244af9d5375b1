/* SPDX-License-Identifier: MIT */
/*
 * Pre-tokenizers: where a text is cut before byte-pair merging.
 *
 * The published definitions are regular expressions; each is written here as a
 * scanner that looks at every character at most twice, so that no text can make
 * it slow. The expressions (L, N: letters and numbers of Unicode, S: white space):
 *
 *   gpt-2      's|'t|'re|'ve|'m|'ll|'d| ?L+| ?N+| ?[^SLN]+|S+(?!non-S)|S+
 *   smollm     every N alone, then gpt-2 on what lies between
 *   llama-bpe  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\nLN]?L+|N{1,3}| ?[^SLN]+[\r\n]*|S*[\r\n]+|S+(?!non-S)|S+
 *   qwen2      the same with N for N{1,3}
 *
 * The classes are those of the Unicode version of the installed utf8proc (15 for 2.8): a character that
 * was assigned later counts as a symbol.
 *
 * A byte that is no character counts as a symbol ([^SLN]). Text is taken as it is:
 * no normal form is applied, so that ids give the text back byte for byte.
 */
#ifndef APR_PRETOK_H
#define APR_PRETOK_H

#include <stdbool.h>
#include <stddef.h>

#include "model/gguf.h"

enum apr_pretok { APR_PRETOK_GPT2, APR_PRETOK_SMOLLM, APR_PRETOK_LLAMA3, APR_PRETOK_QWEN2 };

/* By tokenizer.ggml.pre; false: unknown. Names that share one definition are accepted for each other. */
bool apr_pretok_find(struct gguf_str name, enum apr_pretok *out);

/* The end of the piece that starts at pos < len. */
size_t apr_pretok_next(enum apr_pretok kind, const char *text, size_t len, size_t pos);

#endif
