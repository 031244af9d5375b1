/* SPDX-License-Identifier: MIT */
/*
 * Fuzz targets: functions over any bytes, which end the process where something is wrong.
 *
 * Owns: their names. Each is one file fuzz_NAME.c with a folder corpus/NAME of seeds. Does not own who calls them:
 * tests/fuzz/test_fuzz.c (a fixed number of mutations, with every check), libFuzzer (make fuzz), or any program that
 * calls them with a file's bytes.
 */
#ifndef APR_TEST_FUZZ_H
#define APR_TEST_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int fuzz_gguf(const uint8_t *data, size_t n);   /* the reader, the architecture's table, the tokenizer's */
int fuzz_tokens(const uint8_t *data, size_t n); /* text to ids and back, whole and streamed */
int fuzz_sqe(const uint8_t *data, size_t n);    /* a submission entry and its parameters */
int fuzz_hello(const uint8_t *data, size_t n);  /* frames of a socket, a session's wishes */
int fuzz_config(const uint8_t *data, size_t n); /* the configuration file */

/* A promise that holds whatever comes. */
#define MUST(what) \
	do { \
		if (!(what)) { \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what); \
			abort(); \
		} \
	} while (0)

/* The bytes as a file for what takes a path; written anew at each call, /proc/self/fd/N. */
const char *fuzz_file(const uint8_t *data, size_t n);

#endif
