/* SPDX-License-Identifier: MIT */
/*
 * Private to model/: how each architecture names its hyper-parameters and
 * weights in a GGUF file.
 */
#ifndef APR_ARCH_H
#define APR_ARCH_H

#include "model/gguf_parse.h"
#include "model/model.h"

struct arch_def {
	const char *name;
	enum apr_arch arch;
	enum apr_rope_kind rope;
	enum apr_ffn_act act;
	bool qkv_bias;       /* must have attn_{q,k,v}.bias */
	bool optional_bias;  /* may have attn_{q,k,v,output}.bias, each on its own */
	bool qk_norm, post_norms;
	bool windows;        /* sliding windows by layer, and local layers' own RoPE base */
	bool scale_embd;     /* embeddings times sqrt(n_embd) */
};

struct loader { /* what one apr_model_open carries along */
	const struct gguf *g;
	struct apr_model *m;
	const struct arch_def *def;
	uint8_t *used; /* a flag for each tensor */
	char *err;
	size_t errlen;
};

const struct arch_def *apr_arch_find(struct gguf_str name);
int apr_arch_hparams(struct loader *ld); /* allocates m->layers */
int apr_arch_weights(struct loader *ld); /* after apr_arch_hparams; fills ld->used */

#endif
