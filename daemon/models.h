/* SPDX-License-Identifier: MIT */
/*
 * The models that aprd serves: loading and unloading them on a thread of their own,
 * their ids, and the vocabulary region that all clients map.
 *
 * Owns: struct served and the table. Does not own what runs on a model (scheduler.c)
 * nor the weights (engine/).
 *
 * Threads: the table is read and changed on the core thread; the loader works on a
 * struct served that is in no table yet, or no more. Others read through
 * models_lock, under which rows neither come nor go.
 */
#ifndef APRD_MODELS_H
#define APRD_MODELS_H

#include "daemon/batch.h"
#include "daemon/mailbox.h"
#include "daemon/options.h"
#include "engine/engine.h"
#include <apr/abi.h>

struct core;
struct load_job;

enum { STEPS_SENT = 4 }; /* as many as any backend takes at once, and more */

struct served {
	uint32_t id; /* never used again within an epoch */
	char name[64];
	char *path;
	struct apr_loaded *loaded;
	struct chat *chat; /* the file's template */
	struct apr_loaded_info info; /* as of loading; pages are asked anew */
	int vocab_fd;
	uint64_t vocab_bytes;
	/* core thread */
	struct core *core;
	struct batch batch;     /* what waits and runs */
	struct step_sent { uint32_t decode_rows, prefill_rows; uint64_t at; } sent[STEPS_SENT]; /* in flight, oldest first */
	uint32_t n_sent;
	uint64_t step_ended; /* ns: the last one */
	uint64_t prompt_tokens, cached_tokens; /* relaxed atomics: of prompts, and those that the prefix cache had */
	enum rest_state { MODEL_AWAKE, MODEL_FALLING, MODEL_RESTING, MODEL_WAKING } rest;
	uint64_t idle_since; /* ns: nothing named it since */
	uint64_t keep_alive; /* ns; 0 = for ever */
	enum share_mode share;  /* whose requests find whose prefixes */
	uint32_t refs;     /* requests that name it */
	struct load_job *leaving; /* UNLOAD was asked: nothing new, gone at refs 0 */
};

#define MODELS_MAX 64u

struct models {
	struct apr_engine *engine;
	struct served *rows[MODELS_MAX];
	uint32_t n_rows, next_id;
	uint32_t gen; /* models_gen of the wire */
	pthread_mutex_t lock;
};

int models_init(struct models *m);
void models_fini(struct models *m);

struct load_watch { /* who is told how far a load is: 0 ... 1, on the loading thread */
	void (*progress)(void *arg, double done);
	void *arg;
};

/* Loader's side, blocking: a served model that is in no table yet. */
int served_load(struct models *m, const char *name, const char *path, const struct load_watch *watch, struct served **out,
		char *err, size_t errlen);
int served_unload(struct models *m, struct served *s); /* and frees it */

/* Core's side. */
int models_add(struct models *m, struct served *s); /* -EEXIST, -ENOSPC; gives it an id */
void models_remove(struct models *m, struct served *s);
struct served *models_find(const struct models *m, uint32_t id); /* 0 = default; NULL none */
struct served *models_named(const struct models *m, const char *name);

/* Any thread. */
uint32_t models_rows(struct models *m, struct apr_model_row *rows, uint32_t max);
/* A duplicate of the vocabulary's descriptor, or -ENOENT, -EMFILE. */
int models_vocab(struct models *m, uint32_t id);

#endif
