/* SPDX-License-Identifier: MIT */
/*
 * Hostile model files: one is written, must be refused by name and in little
 * memory, and a good one must open right afterwards.
 */
#ifndef APR_TEST_BAD_FILES_H
#define APR_TEST_BAD_FILES_H

#include <stddef.h>

#include "tests/support/gguf_writer.h"

/* A small sound llama of one layer (width 32, two heads of 16, one KV head, 320 pieces), to be damaged. */
struct gguf_writer *bad_tiny(void);

/* Model and tokenizer of a file, opened and closed: what they return. */
int bad_open(const char *path, char *err, size_t errlen);

/* Asserts that the file is refused with -EINVAL or -ENOTSUP and one line that holds `names`. */
void bad_refused_bytes(const void *p, size_t n, const char *names);
void bad_refused(struct gguf_writer *w, const char *names); /* takes w */

void bad_good_file_opens(void);

/* A path in the test's folder; static storage. */
const char *bad_tmp(const char *name);

#endif
