/* SPDX-License-Identifier: MIT */
/*
 * The process that serves: its threads and what they share.
 *
 * Owns: starting and ending everything, the io thread's loop (this is its main
 * thread), loading models. Does not own the listening sockets' paths (supervisor.c)
 * nor the rings (core.c).
 *
 * Threads: io (this one: sockets, frames, process ends, wakes), core (core.h), intake
 * (intake.h), loader (one, while a model is loaded), and the backend's own.
 */
#ifndef APRD_WORKER_H
#define APRD_WORKER_H

#include "daemon/core.h"
#include "daemon/supervisor.h"

enum worker_state { STATE_STARTING, STATE_LOADING, STATE_READY, STATE_DEGRADED, STATE_DRAINING };

struct load_job { /* one LOAD, UNLOAD or WARMUP, or the command line's models */
	struct load_job *next;
	bool unload, warm, rest, wake, first; /* first: of the command line */
	char *name, *path;
	struct served *served;
	uint64_t asker; /* conn that waits for the answer; 0 = none */
	int err;
	char words[400];
	uint32_t rows; /* WARMUP: name is the model or empty, path the kind or NULL */
	char *reply;
	struct mail to_core, to_io;
	struct worker *w;
};

bool job_is_load(const struct load_job *j);

struct reload { /* from io to core; m comes first */
	struct mail m;
	struct options o;
	uint32_t n;
	struct reload_row {
		struct identity *who;
		struct limits limits;
	} row[];
};

struct accepting { /* a listener's watch */
	struct worker *w;
	const struct listener *l;
};

struct worker {
	const struct worker_start *start;
	struct options o; /* limits, times and log level change with RELOAD; the rest is the command line's */
	struct loop *io;
	struct mailbox box;
	struct core core;
	struct intake intake;
	struct models models;
	struct apr_engine *engine;
	struct sessions sessions;
	enum worker_state state;
	bool lost; /* the backend failed: nothing of it can be put away in order */
	uint64_t began; /* ns */
	char loop_why[128];
	uint32_t poll_us, spin_us;
	char poll_why[160];

	/* loader */
	pthread_t loader;
	pthread_mutex_t load_lock;
	pthread_cond_t load_some;
	struct load_job *jobs, **jobs_tail;
	bool loader_stop, loader_started;
	char loading[64]; /* the model that is being loaded, or empty; under load_lock, as the jobs are */
	bool loader_busy; /* a job is out of the list and not done */
	uint32_t to_load; /* of the command line, not yet answered */
	uint32_t n_loaded, load_told; /* first models that are loaded; per cent, the last told: the loader's */
	struct mail ping;   /* through the core and back; pinged while it is on its way */
	bool pinged;
	bool load_failed;
	char load_words[400]; /* why the first of them did not load */

	/* conn.c */
	struct conn *conns;
	uint32_t n_conns;
	uint64_t next_conn;
	uint64_t listeners[20]; /* watches */
	struct accepting accepting[20];
	bool models_ready; /* until then nobody is welcomed */
	uint64_t next_check;    /* ns: time limits of handshakes */
	struct log_rate refused, broken;
	bool serve;     /* some identity's serve is set */
	uint64_t ended; /* connections, for ever */
	bool end, drain_asked, now_asked, failed;
};

int worker_main(const struct worker_start *start); /* the exit status */

/* worker.c */
void worker_load(struct worker *w, const char *name, const char *path, uint64_t asker); /* asynchronous */
void worker_unload(struct worker *w, const char *name, uint64_t asker);
/* model NULL: all; kind NULL: all of it */
void worker_warm(struct worker *w, const char *model, const char *kind, uint32_t rows, uint64_t asker);
void worker_drain(struct worker *w, uint32_t ms);  /* asks the supervisor, as SIGTERM would */
int worker_reload(struct worker *w, char *err, size_t errlen);

/* conn.c */
int conns_listen(struct worker *w);
void conns_unlisten(struct worker *w);
void conns_draining(struct worker *w); /* no more sessions: those who wait are told so */
void conns_ready(struct worker *w);   /* models are there: those who wait are welcomed */
void conns_serve(struct worker *w);   /* WELCOMEs that may go out now */
uint64_t conns_tick(struct worker *w, uint64_t now); /* time limits; when to call again */
void conns_bye(struct worker *w, enum apr_reason reason, const char *text); /* to everybody, and hang up */
void conns_models_changed(struct worker *w);
void conn_answer(struct worker *w, uint64_t asker, uint16_t type, int err, const char *text);
void session_on_wake(void *io, struct mail *m);
void session_on_broken(void *io, struct mail *m);
void session_on_bury(void *io, struct mail *m);

/* admin.c: a frame of the admin socket */
struct conn;
void admin_frame(struct worker *w, struct conn *k, const struct apr_frame *f, const char *body, size_t n);

/* status.c: malloc'ed JSON. who NULL: everything; else what that identity may see. */
char *status_json(struct worker *w, const struct identity *who);
char *settings_json(const struct worker *w); /* each setting, its value and where that came from; NULL: no memory */

#endif
