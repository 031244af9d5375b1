/* SPDX-License-Identifier: MIT */
/*
 * The CPU's weights: every matrix repacked once into panels, kept as a file in
 * the cache folder and mapped shared and read-only, or in anonymous memory where
 * there is no such folder.
 *
 * Owns: the file's format, when it is good, its making. Does not own the panels'
 * inner layout (kernels/cpu/panel.h); a fingerprint of what packing gives is in
 * the file's key, so a changed layout never meets an old file.
 */
#ifndef APR_ENGINE_PANELS_H
#define APR_ENGINE_PANELS_H

#include "engine/backend.h"
#include "kernels/cpu/ops_cpu.h"

struct apr_panels;

struct apr_panels_ask {
	const struct apr_model *model;
	const char *cache_dir; /* or NULL */
	unsigned threads;
	void (*progress)(void *arg, double done);
	void *progress_arg;
	void (*log)(void *arg, int level, const char *line);
	void *log_arg;
};

/* Bytes of all panels, each at a multiple of 4096; 0 with err where a matrix cannot be packed. */
uint64_t apr_panels_bytes(const struct apr_model *m, char *err, size_t errlen);
/* A cache folder that cannot be written is said in the log and anonymous memory is used. */
int apr_panels_open(struct apr_panels **out, const struct apr_panels_ask *ask, char *err, size_t errlen);
void apr_panels_close(struct apr_panels *p);
bool apr_panels_from_file(const struct apr_panels *p);
/* The matrix made from w (one of the model's struct apr_weight, by address of its data), or NULL. */
const struct apr_mat *apr_panels_mat(const struct apr_panels *p, const struct apr_weight *w);

#endif
