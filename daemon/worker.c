/* SPDX-License-Identifier: MIT */
/* Owns: the worker's beginning and end, its io loop, the loader. See worker.h. */
#include "daemon/worker.h"
#include "daemon/chat.h"
#include "daemon/graphs.h"
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { INTAKE_THREADS = 2, POLL_US = 1000, SPIN_US = 100, END_MS = 800 };

static void tell(struct worker *w, enum ctl_type type, uint32_t value)
{
	struct ctl c = { type, value };

	(void)!send(w->start->ctl, &c, sizeof(c), MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* ---- the loader ------------------------------------------------------------------------- */

static void job_free(struct load_job *j)
{
	free(j->name);
	free(j->path);
	free(j->reply);
	free(j);
}

bool job_is_load(const struct load_job *j)
{
	return !j->unload && !j->warm && !j->rest && !j->wake && !j->served;
}

static void job_post(struct worker *w, struct load_job *j)
{
	j->next = NULL;
	pthread_mutex_lock(&w->load_lock);
	*w->jobs_tail = j;
	w->jobs_tail = &j->next;
	pthread_cond_signal(&w->load_some);
	pthread_mutex_unlock(&w->load_lock);
}

static struct load_job *job_new(struct worker *w, const char *name, const char *path, uint64_t asker)
{
	struct load_job *j = calloc(1, sizeof(*j));

	if (!j)
		return NULL;
	j->w = w;
	j->asker = asker;
	j->name = strdup(name);
	j->path = path ? strdup(path) : NULL;
	if (!j->name || (path && !j->path)) {
		job_free(j);
		return NULL;
	}
	return j;
}

static void first_models_done(struct worker *w)
{
	w->state = w->load_failed ? STATE_DEGRADED : STATE_READY;
	w->models_ready = true;
	tell(w, CTL_READY, 0);
	conns_ready(w);
}

/* On the io thread: the job's end. */
static void job_done(void *io, struct mail *m)
{
	struct load_job *j = (struct load_job *)((char *)m - offsetof(struct load_job, to_io));
	struct worker *w = io;

	bool ends = j->err && j->first && !w->start->restarts;

	if (ends)
		log_error("%s", j->words);
	else if (j->err)
		log_warn("%s", j->words);
	else
		log_info("%s: %s", j->name, j->warm ? "warmed up" : j->unload ? "unloaded" : "loaded");
	if (!j->err && !j->unload && !j->warm && chat_why(j->served->chat))
		log_info("%s: CHAT is not served: %s", j->name, chat_why(j->served->chat));
	if (j->first) {
		if (ends) {
			tell(w, CTL_FAILED, 0);
			w->failed = w->end = true;
		} else {
			if (j->err && !w->load_failed)
				memcpy(w->load_words, j->words, sizeof(w->load_words));
			w->load_failed |= j->err != 0;
			if (!--w->to_load && w->state != STATE_DRAINING)
				first_models_done(w);
		}
	} else if (!j->err && !j->warm) {
		conns_models_changed(w);
	}
	if (j->asker)
		conn_answer(w, j->asker,
			    j->warm   ? APR_FRAME_WARMUP :
			    j->unload ? APR_FRAME_UNLOAD :
					APR_FRAME_LOAD,
			    j->err, j->err ? j->words : j->reply ? j->reply : "{}");
	job_free(j);
}

static void job_to_io(struct load_job *j)
{
	j->to_io.fn = job_done;
	mailbox_post(&j->w->box, &j->to_io);
}

/* On the core thread: a loaded model is served from now on. */
static void core_add_model(void *core, struct mail *m)
{
	struct load_job *j = (struct load_job *)((char *)m - offsetof(struct load_job, to_core));
	struct core *c = core;
	int e = sched_model(c, j->served);

	struct model_rule rule = options_model(j->w->start->options, j->name);
	j->served->share = rule.share;
	j->served->keep_alive = rule.keep_alive * UINT64_C(1000000000);
	if (!e)
		e = models_add(c->models, j->served);
	if (e) {
		snprintf(j->words, sizeof(j->words), "%s: %s", j->name,
			 e == -EEXIST ? "this name is in use" : e == -ENOMEM ? "no memory" : "too many models");
		j->err = e;
		job_post(j->w, j); /* the loader takes it down again */
		return;
	}
	job_to_io(j);
}

/* On the core thread: nothing new for this model, and away with it when what runs has ended. */
static void core_remove_model(void *core, struct mail *m)
{
	struct load_job *j = (struct load_job *)((char *)m - offsetof(struct load_job, to_core));
	struct core *c = core;
	struct served *s = models_named(c->models, j->name);

	if (!s || s->leaving) {
		j->err = s ? -EBUSY : -ENOENT;
		snprintf(j->words, sizeof(j->words), "%s: %s", j->name,
			 s ? "is being unloaded already" : "no such model");
		job_to_io(j);
		return;
	}
	pthread_mutex_lock(&c->models->lock);
	s->leaving = j;
	pthread_mutex_unlock(&c->models->lock);
	j->served = s;
}

void core_model_gone(struct core *c, struct served *m)
{
	struct load_job *j = m->leaving;

	models_remove(c->models, m);
	job_post(j->w, j); /* from here on m is the loader's */
}

/* On the core thread: a model rests, or is there again. */
static void core_rested(void *core, struct mail *m)
{
	struct load_job *j = (struct load_job *)((char *)m - offsetof(struct load_job, to_core));

	if (j->err)
		log_warn("%s: %s", j->name, j->words);
	else
		log_info("%s: %s", j->name, j->rest ? "rests: nobody used it" : "loaded again");
	sched_rested(core, j->served, j->err, j->words);
	job_free(j);
}

void core_model_rest(struct core *c, struct served *m, bool wake)
{
	struct load_job *j = job_new(c->worker, m->name, NULL, 0);

	if (!j) /* another time */
		return;
	j->rest = !wake;
	j->wake = wake;
	j->served = m;
	m->rest = wake ? MODEL_WAKING : MODEL_FALLING;
	job_post(c->worker, j);
}

static void run_rest(struct worker *w, struct load_job *j)
{
	j->err = j->rest ? apr_engine_rest(j->served->loaded)
			 : apr_engine_wake(j->served->loaded, j->words, sizeof(j->words));
	if (j->err && !j->words[0])
		snprintf(j->words, sizeof(j->words), "%s", strerror(-j->err));
	j->to_core.fn = core_rested;
	mailbox_post(&w->core.box, &j->to_core);
}

/* Of the models that the settings name, all together; each counts the same. */
static void first_progress(void *arg, double done)
{
	struct worker *w = arg;
	uint32_t percent = (uint32_t)(100.0 * ((double)w->n_loaded + done) / (double)w->start->options->n_models);

	if (percent > w->load_told) {
		w->load_told = percent;
		tell(w, CTL_LOADED, percent);
	}
}

static void run_job(struct worker *w, struct load_job *j)
{
	char err[300] = "";

	if (j->rest || j->wake) {
		run_rest(w, j);
		return;
	}

	if (j->warm) {
		j->err = graphs_warm_all(&w->models, j->name[0] ? j->name : NULL, j->path, j->rows, &j->reply, j->words,
					 sizeof(j->words));
		job_to_io(j);
		return;
	}
	if (j->served) { /* out of the table: unload */
		int e = served_unload(&w->models, j->served);
		if (e && !j->err) {
			j->err = e;
			snprintf(j->words, sizeof(j->words), "%s: %s", j->name, strerror(-e));
		}
		job_to_io(j);
		return;
	}
	struct load_watch watch = { j->first ? first_progress : NULL, w };
	int e = served_load(&w->models, j->name, j->path, &watch, &j->served, err, sizeof(err));
	pthread_mutex_lock(&w->load_lock);
	w->loading[0] = 0; /* before the answer goes out */
	pthread_mutex_unlock(&w->load_lock);
	w->n_loaded += j->first;
	if (j->first)
		first_progress(w, 0.0);
	if (e) {
		/* the engine's line names the file, and so the model unless that has a name of its own */
		size_t n = strlen(j->path);
		if (!strncmp(err, j->path, n) && err[n] == ':' && strstr(j->path, j->name))
			snprintf(j->words, sizeof(j->words), "%s", err);
		else
			snprintf(j->words, sizeof(j->words), "%s: %s", j->name, err[0] ? err : strerror(-e));
		j->err = e;
		job_to_io(j);
		return;
	}
	j->to_core.fn = core_add_model;
	mailbox_post(&w->core.box, &j->to_core);
}

static void *loader_main(void *arg)
{
	struct worker *w = arg;

	prctl(PR_SET_NAME, "aprd-loader");
	pthread_mutex_lock(&w->load_lock);
	for (;;) {
		while (!w->jobs && !w->loader_stop)
			pthread_cond_wait(&w->load_some, &w->load_lock);
		if (w->loader_stop)
			break;
		struct load_job *j = w->jobs;
		w->jobs = j->next;
		if (!w->jobs)
			w->jobs_tail = &w->jobs;
		w->loader_busy = true;
		snprintf(w->loading, sizeof(w->loading), "%s", job_is_load(j) ? j->name : "");
		pthread_mutex_unlock(&w->load_lock);
		run_job(w, j);
		pthread_mutex_lock(&w->load_lock);
		w->loader_busy = false;
	}
	pthread_mutex_unlock(&w->load_lock);
	return NULL;
}

void worker_load(struct worker *w, const char *name, const char *path, uint64_t asker)
{
	struct load_job *j = job_new(w, name, path, asker);

	if (!j)
		conn_answer(w, asker, APR_FRAME_LOAD, -ENOMEM, "no memory");
	else
		job_post(w, j);
}

void worker_unload(struct worker *w, const char *name, uint64_t asker)
{
	struct load_job *j = job_new(w, name, NULL, asker);

	if (!j) {
		conn_answer(w, asker, APR_FRAME_UNLOAD, -ENOMEM, "no memory");
		return;
	}
	j->unload = true;
	j->to_core.fn = core_remove_model;
	mailbox_post(&w->core.box, &j->to_core);
}

void worker_warm(struct worker *w, const char *model, const char *kind, uint32_t rows, uint64_t asker)
{
	struct load_job *j = job_new(w, model ? model : "", kind, asker);

	if (!j) {
		conn_answer(w, asker, APR_FRAME_WARMUP, -ENOMEM, "no memory");
		return;
	}
	j->warm = true;
	j->rows = rows;
	job_post(w, j);
}

/* ---- orders ------------------------------------------------------------------------------- */

void worker_drain(struct worker *w, uint32_t ms)
{
	tell(w, CTL_DRAIN, ms);
}

/* The limits of those that are known, for the core: an identity of the overflow uid may go meanwhile and is left out. */
static struct reload *reload_new(struct worker *w, const struct options *fresh)
{
	uint32_t n = 0;

	for (struct identity *who = w->sessions.identities; who; who = who->next)
		n++;
	struct reload *r = calloc(1, sizeof(*r) + n * sizeof(r->row[0]));
	if (!r)
		return NULL;
	r->o = *fresh; /* its pointers are not followed */
	for (struct identity *who = w->sessions.identities; who; who = who->next)
		if (!identity_is_nobody(who))
			r->row[r->n++] = (struct reload_row){ who, who->may };
	return r;
}

static void core_reload(void *core, struct mail *m)
{
	struct core *c = core;
	struct reload *r = (struct reload *)m;

	for (uint32_t i = 0; i < r->n; i++)
		r->row[i].who->limits = r->row[i].limits;
	c->opts.park_pages_ms = r->o.park_pages_ms;
	c->opts.park_end_ms = r->o.park_end_ms;
	free(r);
}

int worker_reload(struct worker *w, char *err, size_t errlen)
{
	struct options fresh;
	struct reload *r;

	if (!w->o.config) {
		snprintf(err, errlen, "aprd was started without --config");
		return -ENOENT;
	}
	options_init(&fresh);
	int e = options_set(&fresh.config, w->o.config);
	if (!e)
		e = config_read(&fresh);
	if (e) {
		snprintf(err, errlen, "%s: not taken over; the log says why", w->o.config);
		options_free(&fresh);
		return e;
	}
	struct limit_rule *rules = w->o.rules;
	w->o.limits = fresh.limits;
	w->o.rules = fresh.rules; /* w->o is a copy: what start's options point at stays theirs */
	w->o.n_rules = fresh.n_rules;
	fresh.rules = NULL;
	fresh.n_rules = 0;
	if (rules != w->start->options->rules)
		free(rules);
	identities_limits(&w->sessions);
	r = reload_new(w, &fresh);
	if (!r) {
		e = -ENOMEM;
		snprintf(err, errlen, "no memory");
	} else {
		w->o.hello_ms = fresh.hello_ms;
		w->o.drain_ms = fresh.drain_ms;
		w->o.park_pages_ms = fresh.park_pages_ms;
		w->o.park_end_ms = fresh.park_end_ms;
		w->o.log_level = fresh.log_level;
		for (size_t i = 0; i < option_rows; i++)
			if (option_table[i].in & IN_LIVE)
				w->o.from[i] = fresh.from[i];
		log_set_level(fresh.log_level);
		r->m.fn = core_reload;
		mailbox_post(&w->core.box, &r->m);
		log_info("%s: limits, times and log level taken over", w->o.config);
	}
	options_free(&fresh);
	return e;
}

static void stop(struct worker *w, uint32_t ms, struct mail *letter)
{
	w->state = STATE_DRAINING;
	conns_draining(w); /* still listening: whoever comes is told why nothing is taken */
	if (letter == &w->core.drain)
		w->core.drain_ms = ms;
	letter->fn = letter == &w->core.drain ? core_drain : core_drain_now;
	mailbox_post(&w->core.box, letter);
}

static void io_pong(void *io, struct mail *m)
{
	struct worker *w = io;

	(void)m;
	w->pinged = false;
	tell(w, CTL_ALIVE, 0);
}

static void core_ping(void *core, struct mail *m)
{
	struct core *c = core;

	m->fn = io_pong;
	mailbox_post(c->io, m);
}

/* A core that is stuck does not answer, and no second letter is sent after the first. */
static void ping(struct worker *w)
{
	if (w->pinged)
		return;
	w->pinged = true;
	w->ping.fn = core_ping;
	mailbox_post(&w->core.box, &w->ping);
}

static void on_ctl(void *arg, uint32_t events)
{
	struct worker *w = arg;
	struct ctl c;
	ssize_t n;
	char err[200];

	(void)events;
	while ((n = recv(w->start->ctl, &c, sizeof(c), MSG_DONTWAIT)) == sizeof(c)) {
		if (c.type == CTL_STOP && !w->drain_asked) {
			w->drain_asked = true;
			stop(w, c.value, &w->core.drain);
		} else if (c.type == CTL_NOW && !w->now_asked) {
			w->now_asked = true;
			stop(w, 0, &w->core.drain_now);
		} else if (c.type == CTL_RELOAD && worker_reload(w, err, sizeof(err))) {
			log_warn("%s", err);
		} else if (c.type == CTL_PING) {
			ping(w);
		}
	}
	if (n == 0) /* no supervisor: nobody to serve for */
		_exit(1);
}

static void on_drained(void *io, struct mail *m)
{
	struct worker *w = io;

	(void)m;
	conns_unlisten(w);
	conns_bye(w, APR_REASON_SHUTDOWN, "aprd ends");
	tell(w, CTL_DRAINED, 0);
	w->end = true;
}

static void on_lost(void *io, struct mail *m)
{
	struct worker *w = io;

	(void)m;
	conns_bye(w, APR_REASON_RESTART, "the device failed: aprd starts over");
	w->lost = w->failed = w->end = true;
}

static void on_mail(void *arg, uint32_t events)
{
	struct worker *w = arg;
	uint64_t n;

	(void)events;
	(void)!read(w->box.efd, &n, sizeof(n));
}

/* ---- beginning ------------------------------------------------------------------------------ */

static void engine_log(void *arg, enum apr_log_level level, const char *line)
{
	(void)arg;
	if (level == APR_LOG_WARN)
		log_warn("%s", line);
	else if (level == APR_LOG_INFO)
		log_info("%s", line);
	else
		log_debug("%s", line);
}

static int open_engine(struct worker *w)
{
	const struct options *o = w->start->options;
	char err[300] = "", cache[512];
	const char *home = getenv("HOME"), *xdg = getenv("XDG_CACHE_HOME");
	struct apr_engine_config cfg = {
		.backend = o->backend ? o->backend : "auto",
		.route = o->route,
		.kv_type = o->kv_type,
		.kv_mem = o->kv_mem,
		.gpu_mem = o->gpu_mem,
		.n_ctx = o->n_ctx,
		.threads = o->threads,
		.chunk = o->chunk,
		.no_graphs = o->no_graphs,
		.set_fused_rows = o->fused_rows >= 0,
		.fused_rows = o->fused_rows >= 0 ? (uint32_t)o->fused_rows : 0,
		.cache_dir = o->cache_dir,
		.log = engine_log,
	};

	if (!cfg.cache_dir && ((xdg && *xdg) || (home && *home))) {
		snprintf(cache, sizeof(cache), "%s%s/aprd", xdg && *xdg ? xdg : home, xdg && *xdg ? "" : "/.cache");
		cfg.cache_dir = cache;
	}
	int e = apr_engine_open(&w->engine, &cfg, err, sizeof(err));
	if (e)
		log_error("%s", err[0] ? err : strerror(-e));
	else
		apr_engine_info(w->engine, &w->core.engine);
	if (!e && w->core.engine.backend_id == APR_BACKEND_CPU &&
	    (o->gpu_mem || o->gpu_percent || o->fused_rows >= 0 || o->no_graphs))
		log_warn("--gpu-mem, --fused-rows and --no-graphs say nothing to the cpu backend");
	return e;
}

/* How long rings are polled: only where a CPU is left over beside those that compute. */
static void set_polling(struct worker *w)
{
	uint32_t usable = w->core.engine.usable_cpus, threads = w->core.engine.threads;
	enum poll_mode mode = w->start->options->poll;
	bool on = mode == POLL_ALWAYS || (mode == POLL_AUTO && usable > threads + 1);

	w->poll_us = on ? POLL_US : 0;
	w->spin_us = on ? SPIN_US : 0;
	snprintf(w->poll_why, sizeof(w->poll_why), "%s: %u usable CPUs, %u compute threads",
		 mode == POLL_ALWAYS  ? "--poll always"
		 : mode == POLL_NEVER ? "--poll never"
				      : "auto: on above threads + 1",
		 usable, threads);
	w->core.poll_ns = w->poll_us * UINT64_C(1000);
	w->core.poll_steps = on;
}

static void raise_descriptors(void)
{
	struct rlimit r;

	if (!getrlimit(RLIMIT_NOFILE, &r) && r.rlim_cur < r.rlim_max) {
		r.rlim_cur = r.rlim_max;
		setrlimit(RLIMIT_NOFILE, &r);
	}
}

static int start_threads(struct worker *w)
{
	struct core *c = &w->core;
	int e = intake_start(&w->intake, &c->box, INTAKE_THREADS);

	if (e)
		return e;
	c->opts = *w->start->options;
	c->o = &c->opts;
	c->io = &w->box;
	c->models = &w->models;
	c->intake = &w->intake;
	c->worker = w;
	c->on_drained = on_drained;
	c->on_lost = on_lost;
	e = core_start(c);
	if (e)
		return e;
	e = -pthread_create(&w->loader, NULL, loader_main, w);
	w->loader_started = !e;
	return e;
}

static int load_first(struct worker *w)
{
	const struct options *o = w->start->options;

	w->state = w->start->restarts ? STATE_DEGRADED : STATE_LOADING;
	for (size_t i = 0; i < o->n_models; i++) {
		struct load_job *j = job_new(w, o->models[i].name, o->models[i].path, 0);
		if (!j)
			return -ENOMEM;
		j->first = true;
		w->to_load++;
		job_post(w, j);
	}
	return 0;
}

static int begin(struct worker *w)
{
	int e = apr_guard_install();

	raise_descriptors();
	if (!e)
		e = loop_new(&w->io, w->loop_why, sizeof(w->loop_why));
	if (!e)
		e = loop_new(&w->core.loop, NULL, 0);
	if (!e)
		e = mailbox_init(&w->box);
	if (!e)
		e = mailbox_init(&w->core.box);
	if (!e)
		e = models_init(&w->models);
	if (!e)
		e = sessions_init(&w->sessions, &w->o);
	if (e) {
		log_error("cannot start: %s", strerror(-e));
		return e;
	}
	pthread_mutex_init(&w->load_lock, NULL);
	pthread_cond_init(&w->load_some, NULL);
	w->jobs_tail = &w->jobs;
	e = open_engine(w); /* told */
	if (e)
		return e;
	w->models.engine = w->engine;
	set_polling(w);
	sessions_refill(&w->sessions);
	e = start_threads(w);
	if (!e)
		e = load_first(w);
	if (!e)
		e = conns_listen(w);
	if (e)
		log_error("cannot start: %s", strerror(-e));
	return e;
}

static void turn(struct worker *w, uint64_t until)
{
	uint64_t now = apr_now_ns(), at = conns_tick(w, now);

	if (until < at)
		at = until;
	if (mailbox_sleep(&w->box)) {
		loop_run(w->io, at == UINT64_MAX ? at : at > now ? at - now : 0);
		mailbox_awake(&w->box);
	} else {
		loop_run(w->io, 0);
	}
	mailbox_read(&w->box, w);
	conns_serve(w);
}

/* Orderly where that is quick; what hangs is left to the kernel. */
static void finish(struct worker *w)
{
	uint64_t until = apr_now_ns() + END_MS * UINT64_C(1000000);

	conns_bye(w, APR_REASON_SHUTDOWN, "aprd ends");
	while ((w->sessions.n || loop_closing(w->io)) && apr_now_ns() < until)
		turn(w, until);
	if (w->sessions.n || loop_closing(w->io) || !w->loader_started || w->lost)
		_exit(w->failed);
	pthread_mutex_lock(&w->load_lock);
	if (w->loader_busy) /* in the middle of a model */
		_exit(w->failed);
	w->loader_stop = true;
	pthread_cond_signal(&w->load_some);
	pthread_mutex_unlock(&w->load_lock);
	pthread_join(w->loader, NULL);
	static struct mail last; /* outlives the thread that reads it */
	last.fn = core_stop;
	mailbox_post(&w->core.box, &last);
	core_join(&w->core);
	intake_stop(&w->intake);
	while (w->jobs) {
		struct load_job *j = w->jobs;
		w->jobs = j->next;
		job_free(j);
	}
	for (uint32_t i = 0; i < w->models.n_rows; i++)
		if (apr_step_in_flight(w->models.rows[i]->loaded))
			_exit(w->failed);
	models_fini(&w->models);
	apr_engine_close(w->engine);
	sessions_fini(&w->sessions);
	loop_free(w->core.loop);
	loop_free(w->io);
	mailbox_fini(&w->core.box);
	mailbox_fini(&w->box);
}

int worker_main(const struct worker_start *start)
{
	static struct worker w; /* the one context of this process */

	w.start = start;
	w.o = *start->options;
	w.began = apr_now_ns();
	w.state = STATE_STARTING;
	prctl(PR_SET_NAME, "aprd-io");
	int e = begin(&w);
	if (e) {
		tell(&w, CTL_FAILED, 0);
		_exit(1); /* threads may be there already */
	}
	if (!loop_poll(w.io, w.box.efd, POLLIN, false, on_mail, &w) ||
	    !loop_poll(w.io, start->ctl, POLLIN, false, on_ctl, &w))
		_exit(1);
	while (!w.end)
		turn(&w, UINT64_MAX);
	finish(&w);
	return w.failed ? 1 : 0;
}
