/* SPDX-License-Identifier: MIT */
/*
 * A forward pass in double, as plain as can be: no pages, no batch, no cache, no
 * panels. What the engine's forward pass is tested against.
 *
 * Owns: its own reading of every architecture, RoPE scaling included; shares with
 * the engine the open model and the dequantiser alone.
 */
#ifndef APR_TEST_REF_FORWARD_H
#define APR_TEST_REF_FORWARD_H

#include "model/model.h"

/* logits: n × n_vocab doubles. Ends the program when memory does. */
void ref_forward(const struct apr_model *m, const uint32_t *ids, uint32_t n, double *logits);
/* Angle and magnitude of RoPE pair i at a position, by the formulas of the papers. */
void ref_rope(const struct apr_rope *r, double base, int scaled, uint32_t i, double pos, double *angle, double *magnitude);

#endif
