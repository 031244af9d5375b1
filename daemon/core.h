/* SPDX-License-Identifier: MIT */
/*
 * The core thread: rings, scheduling and the engine's steps, all on one thread that
 * makes no system call while there is something to do.
 *
 * Owns: the loop of passes, the list of hot sessions, waking clients. Its parts:
 * service.c (takes SQEs), deliver.c (writes CQEs), request.c, scheduler.c. Does not
 * own sockets (conn.c, on the io thread).
 *
 * A pass: letters, hot rings, finished steps, timers, then all tails are published,
 * one full fence, and the clients that sleep are woken. A wake costs its caller some
 * 15 µs: one is made here (handing it over would cost the same), several go to the io
 * thread.
 */
#ifndef APRD_CORE_H
#define APRD_CORE_H

#include "daemon/metrics.h"
#include "daemon/intake.h"
#include "daemon/loop.h"
#include "daemon/models.h"
#include "daemon/request.h"
#include "daemon/session.h"

enum { HOT_MAX = 64 };

struct worker;

/* what aprctl metrics prints beside these: metrics.h */
struct totals { /* relaxed atomics: the io thread prints them */
	uint64_t sqes, cqes, wakes, doorbells, parked, tokens, steps, step_ns_max, plan_ns, preempted, finished, failed;
	uint32_t sessions, running, queued;
};

struct core {
	const struct options *o; /* limits and times: opts */
	struct options opts;     /* pointers in it are not ours */
	struct loop *loop;
	struct mailbox box;
	struct mailbox *io; /* where letters to the io thread go */
	struct models *models;
	struct intake *intake;
	struct worker *worker; /* whose loader is asked: worker.c's */
	pthread_t thread;
	uint64_t mail_watch, step_watch;
	bool started, stop;

	uint64_t now;     /* ns, of this pass */
	uint64_t poll_ns; /* how long a session stays hot */
	uint64_t looked;  /* when the loop was last asked */
	struct session *hot[HOT_MAX];
	uint32_t n_hot;
	struct session *dirty, *all;
	uint64_t requests; /* numbers of those that share their prompt with nobody */
	struct request **heap; /* deadlines */
	uint32_t n_heap, cap_heap;
	uint64_t next_sweep; /* parked requests are looked at then; UINT64_MAX none is parked */
	uint32_t n_parked, unfinished;
	bool draining, drained_told;
	bool lost, lost_told; /* the backend is of no use any more */
	uint64_t drain_until;
	struct mail drain, drain_now, drained, losing; /* from and to the io thread */
	uint32_t drain_ms;
	struct totals t;
	struct metrics metrics;
	struct apr_engine_info engine;
	void (*on_drained)(void *io, struct mail *m);
	void (*on_lost)(void *io, struct mail *m);
	bool poll_steps; /* look for the end of a step instead of sleeping */
	struct log_rate rate;
};

int core_start(struct core *c); /* the thread; everything else is set */
void core_join(struct core *c); /* after c->stop by letter */

/* letters that the io thread posts to c->box; they lie in the session */
void core_attach(void *core, struct mail *m);
void core_detach(void *core, struct mail *m);
void core_cancel_all(void *core, struct mail *m);
void core_drain(void *core, struct mail *m); /* c->drain; c->drain_ms says how long */
void core_drain_now(void *core, struct mail *m);
void core_stop(void *core, struct mail *m);

#define COUNT(c, s, field, index, n) \
	do { \
		__atomic_store_n(&(c)->t.field, (c)->t.field + (n), __ATOMIC_RELAXED); \
		__atomic_store_n(&(s)->ring.res->counters[index], (s)->ring.res->counters[index] + (n), \
				 __ATOMIC_RELAXED); \
	} while (0)
#define COUNT_ALL(c, field, n) __atomic_store_n(&(c)->t.field, (c)->t.field + (n), __ATOMIC_RELAXED)

/* The client broke a rule, or its memory: nothing of it is touched any more. */
void core_broken(struct core *c, struct session *s, enum apr_reason reason, const char *why);

/* The session's memory goes back to the io thread once nothing of it is in use. */
void core_may_bury(struct core *c, struct session *s);
/* To the loader: give up an idle model's memory, or bring it back. */
void core_model_rest(struct core *c, struct served *m, bool wake);
/* A model that is leaving and that nothing names any more: out of the table and to the loader. */
void core_model_gone(struct core *c, struct served *m);

/* ---- service.c --------------------------------------------------------------- */
/* Takes what is in the SQ and flushes what waited for room. True: something was done. */
bool service_session(struct core *c, struct session *s);
/* Takes SQEs until there are none and the doorbell is sure to ring. */
void service_until_quiet(struct core *c, struct session *s);
/* A request that needs no input any more: to the scheduler, or its result out. */
void service_taken_in(void *core, struct mail *m);
void service_copied(void *core, struct mail *m);

/* ---- deliver.c --------------------------------------------------------------- */
/* Is there room for one entry that is nobody's last? Looks at cq_head again if need be. */
bool deliver_room(struct core *c, struct session *s);
/* Room for n bytes in the result arena, its header written: the blob's offset, 0 none now. */
uint32_t deliver_blob(struct core *c, struct session *s, uint16_t fmt, const void *data, uint32_t n);
void deliver_entry(struct core *c, struct session *s, const struct apr_cqe *e);
void deliver_ack(struct core *c, struct session *s, uint64_t user_data, int res, uint32_t at);
void deliver_final(struct core *c, struct request *r, int err, enum apr_finish finish, const char *why);
/* As much of r's output as there is room for. True: all that may go now is out. */
bool deliver_pump(struct core *c, struct request *r);
/* Looks at cq_head and frees what is behind it. -errno: the session is broken. */
int deliver_refresh(struct core *c, struct session *s);
/* CQ_STALLED is up: room made from now on is told by the doorbell. */
void deliver_stalled(struct session *s);
void deliver_unstall(struct core *c, struct session *s);

/* ---- scheduler.c ------------------------------------------------------------- */
int sched_model(struct core *c, struct served *m); /* it is served from now on: -ENOMEM */
void sched_rested(struct core *c, struct served *m, int err, const char *why); /* the loader has done with it */
void sched_enqueue(struct core *c, struct request *r);
void sched_dequeue(struct request *r); /* no run of it starts or goes on any more */
void sched_gone(struct request *r);    /* after its runs were released */
/* Gives up a run's sequence; the run is not ACTIVE any more. */
void sched_release(struct core *c, struct run *run);
bool sched_run(struct core *c);  /* true: something moved */
bool sched_busy(const struct core *c); /* a step runs */
void sched_sweep(struct core *c);      /* parked requests */
void sched_park(struct request *r);    /* no step for it until sched_wake: its output is out. -ENOMEM */
int sched_wake(struct request *r);
uint64_t sched_next(const struct core *c); /* ns: when a waiting request is too late to begin; UINT64_MAX none */
bool sched_late(struct core *c);           /* ends those; true: there were some */

#endif
