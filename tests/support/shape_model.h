/* SPDX-License-Identifier: MIT */
/*
 * Whole models of real shapes with random weights, for speed tests alone: gigabytes,
 * written by many threads straight into the file.
 *
 * Owns: the shapes, the mixes of types, the weights' bytes. Equal arguments give equal
 * files, whatever the number of threads. The vocabulary is tiny_model.c's.
 */
#ifndef APR_TEST_SHAPE_MODEL_H
#define APR_TEST_SHAPE_MODEL_H

#include <stdint.h>

/* shape: llama-1b, llama-8b, qwen2-1.5b, qwen2-7b, small; mix: Q4_K_M, Q8_0, F16, BF16. threads 0: as many as may run.
 * 0, -EINVAL for an unknown name, -errno. */
int apr_test_write_shape(const char *path, const char *shape, const char *mix, unsigned threads, uint64_t seed);
/* Bytes of that file's tensors; 0 for an unknown name. */
uint64_t apr_test_shape_bytes(const char *shape, const char *mix);

#endif
