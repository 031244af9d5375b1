/* SPDX-License-Identifier: MIT */
/* Owns: the worker's life. See supervisor.h. */
#include "daemon/supervisor.h"
#include "daemon/notify.h"
#include "daemon/worker.h"
#include "shm/wake.h"
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BACKOFF_FIRST_MS = 100, BACKOFF_MAX_MS = 10000, STEADY_MS = 60000, GRACE_MS = 1000, MAX_LISTENERS = 17 };

struct supervisor {
	const struct options *o;
	struct listener listeners[MAX_LISTENERS];
	size_t n_listeners;
	int signals, ctl;
	pid_t worker; /* 0 = none */
	bool ready, was_ready, stopping, now, failed;
	uint32_t restarts;
	uint64_t started, restart_at, kill_at, backoff_ms; /* ms, monotonic; 0 = not set */
	uint64_t watch_ms, watch_at;                       /* of the service manager's watchdog; 0 = none */
};

static uint64_t now_ms(void)
{
	return apr_now_ns() / 1000000u;
}

/* The one of them with this path, or NULL. */
static struct passed *passed_at(struct passed *p, int n, const char *path)
{
	for (int i = 0; i < n; i++)
		if (p[i].fd >= 0 && !strcmp(p[i].path, path))
			return &p[i];
	return NULL;
}

/* The path of the first one that clients may have: not named as an admin socket is. */
static const char *first_passed(const struct passed *p, int n)
{
	for (int i = 0; i < n; i++) {
		const char *name = strrchr(p[i].path, '/') + 1; /* absolute: sockets.c saw to it */
		size_t len = strlen(name);
		if (strcmp(name, "admin.sock") != 0 && (len < 6 || strcmp(name + len - 6, ".admin") != 0))
			return p[i].path;
	}
	return NULL;
}

static int open_one(struct supervisor *s, struct passed *p, int n, const struct listener_option *l, char *err, size_t errlen)
{
	struct listener *to = &s->listeners[s->n_listeners];
	struct passed *here = passed_at(p, n, l->path);
	int e = here ? sockets_adopt(to, here, false, err, errlen) : sockets_open(to, l->path, l->group, l->mode, err, errlen);

	if (!e) {
		snprintf(to->tenant, sizeof(to->tenant), "%s", l->tenant);
		s->n_listeners++;
	}
	return e;
}

static int open_admin(struct supervisor *s, struct passed *p, int n, char *err, size_t errlen)
{
	struct listener *to = &s->listeners[s->n_listeners];
	struct passed *here = NULL;
	char path[sizeof(to->path)];

	if (!sockets_admin_path(s->listeners[0].path, path, sizeof(path)))
		here = passed_at(p, n, path);
	int e = here ? sockets_adopt(to, here, true, err, errlen) : sockets_open_admin(to, &s->listeners[0], err, errlen);
	s->n_listeners += !e;
	return e;
}

/* What was handed over and nobody listed: the first names the socket where no setting does, the others are refused. */
static int open_listeners(struct supervisor *s)
{
	struct passed p[PASSED_MAX];
	char path[200], err[400];
	int n = sockets_passed(p, err, sizeof(err)), e = n < 0 ? n : 0;

	const char *given = s->o->socket || s->o->n_listeners ? NULL : first_passed(p, n);
	if (!e && given && strlen(given) < sizeof(path))
		memcpy(path, given, strlen(given) + 1);
	else if (!e && given) {
		snprintf(err, sizeof(err), "%.180s: too long a path for a socket", given);
		e = -ENAMETOOLONG;
	} else if (!e)
		e = sockets_default(s->o, path, sizeof(path), err, sizeof(err));

	/* a listener of the file with the first path gives it its tenant, group and mode */
	struct listener_option first = { path, (char *)"", s->o->socket_group, s->o->socket_mode };
	size_t from = 0;
	if (!e && s->o->n_listeners && !strcmp(s->o->listeners[0].path, path)) {
		first = s->o->listeners[0];
		from = 1;
	}
	if (s->o->n_listeners - from > MAX_LISTENERS - 2) {
		log_error("more than %d listeners", MAX_LISTENERS - 1);
		return -EINVAL;
	}
	/* the first path, then whatever else the file lists */
	for (size_t i = from; i <= s->o->n_listeners && !e; i++)
		e = open_one(s, p, n, i == from ? &first : &s->o->listeners[i - 1], err, sizeof(err));
	if (!e)
		e = open_admin(s, p, n, err, sizeof(err));
	for (int i = 0; i < n && !e; i++) {
		if (p[i].fd < 0)
			continue;
		snprintf(err, sizeof(err), "%s: handed over (LISTEN_FDS), but no setting names it", p[i].path);
		e = -EINVAL;
	}
	if (e)
		log_error("%s", err);
	return e;
}

static int start_worker(struct supervisor *s)
{
	int pair[2];
	pid_t self = getpid();

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair))
		return -errno;
	fflush(NULL);
	pid_t pid = fork();
	if (pid < 0) {
		int e = -errno;
		close(pair[0]);
		close(pair[1]);
		return e;
	}
	if (!pid) {
		/* the locks are the supervisor's alone: they must fall with it */
		for (size_t i = 0; i < s->n_listeners; i++)
			if (s->listeners[i].lock >= 0)
				close(s->listeners[i].lock);
		close(s->signals);
		close(pair[0]);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (getppid() != self)
			_exit(1);
		struct worker_start w = { s->o, s->listeners, s->n_listeners, pair[1], s->restarts, self };
		_exit(worker_main(&w));
	}
	close(pair[1]);
	s->ctl = pair[0];
	s->worker = pid;
	s->ready = false;
	s->started = now_ms();
	return 0;
}

static void tell_worker(struct supervisor *s, enum ctl_type type, uint32_t value)
{
	struct ctl c = { type, value };

	if (s->ctl >= 0)
		(void)!send(s->ctl, &c, sizeof(c), MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void stop(struct supervisor *s, uint32_t ms)
{
	if (s->stopping) { /* said twice: now */
		if (!s->now) {
			s->now = true;
			log_info("ending now");
			tell_worker(s, CTL_NOW, 0);
			s->kill_at = now_ms() + GRACE_MS;
		}
		return;
	}
	s->stopping = true;
	notify("STOPPING=1\nSTATUS=Draining for at most %u ms", ms);
	log_info("draining for at most %u ms", ms);
	tell_worker(s, CTL_STOP, ms);
	/* a worker that does not end by itself is ended */
	s->kill_at = now_ms() + ms + GRACE_MS;
}

static void on_signal(struct supervisor *s)
{
	struct signalfd_siginfo info;

	while (read(s->signals, &info, sizeof(info)) == sizeof(info)) {
		if (info.ssi_signo == SIGTERM || info.ssi_signo == SIGINT)
			stop(s, s->o->drain_ms);
		else if (info.ssi_signo == SIGHUP)
			tell_worker(s, CTL_RELOAD, 0);
	}
}

static void on_ctl(struct supervisor *s)
{
	struct ctl c;
	ssize_t n;

	while ((n = recv(s->ctl, &c, sizeof(c), MSG_DONTWAIT)) == sizeof(c)) {
		if (c.type == CTL_READY) {
			s->ready = s->was_ready = true;
			notify("READY=1\nSTATUS=Serving on %s", s->listeners[0].path);
			log_info("ready on %s", s->listeners[0].path);
		} else if (c.type == CTL_FAILED) {
			s->failed = true;
		} else if (c.type == CTL_LOADED && !s->ready && !s->stopping) {
			notify("STATUS=Loading models: %u %%", c.value);
		} else if (c.type == CTL_ALIVE) {
			notify("WATCHDOG=1");
		} else if (c.type == CTL_DRAIN && !s->stopping) {
			stop(s, c.value);
		}
	}
	if (n == 0) {
		close(s->ctl);
		s->ctl = -1;
	}
}

/* The worker has ended. True: aprd ends too. */
static bool on_exit_of_worker(struct supervisor *s, int status)
{
	uint64_t now = now_ms();

	s->worker = 0;
	if (s->ctl >= 0)
		on_ctl(s); /* its last words */
	if (s->ctl >= 0)
		close(s->ctl);
	s->ctl = -1;
	s->kill_at = 0;
	if (s->stopping)
		return true;
	if (s->failed && !s->was_ready) /* the first start: its line is told */
		return true;
	if (WIFSIGNALED(status))
		log_warn("the worker was killed by signal %d (%s)", WTERMSIG(status), strsignal(WTERMSIG(status)));
	else
		log_warn("the worker ended with status %d", WEXITSTATUS(status));
	if (!s->was_ready) {
		log_error("it never was ready: giving up");
		s->failed = true;
		return true;
	}
	s->failed = false;
	if (!s->backoff_ms || now - s->started > STEADY_MS)
		s->backoff_ms = BACKOFF_FIRST_MS;
	else if ((s->backoff_ms *= 2) > BACKOFF_MAX_MS)
		s->backoff_ms = BACKOFF_MAX_MS;
	s->restart_at = now + s->backoff_ms;
	s->restarts++;
	notify("STATUS=The worker died; starting another one");
	log_warn("starting another one in %llu ms", (unsigned long long)s->backoff_ms);
	return false;
}

/* The worker answers for itself, through both its threads; while there is none, this process does. */
static void watch(struct supervisor *s, uint64_t now)
{
	if (!s->watch_ms || now < s->watch_at)
		return;
	s->watch_at = now + s->watch_ms;
	if (s->worker)
		tell_worker(s, CTL_PING, 0);
	else
		notify("WATCHDOG=1");
}

static int wait_ms(const struct supervisor *s)
{
	uint64_t now = now_ms(), at = s->kill_at;

	if (s->watch_ms && (!at || s->watch_at < at))
		at = s->watch_at;

	if (s->restart_at && (!at || s->restart_at < at))
		at = s->restart_at;
	if (!at)
		return -1;
	return at > now ? (int)(at - now) : 0;
}

static int run(struct supervisor *s)
{
	for (;;) {
		struct pollfd p[2] = { { s->signals, POLLIN, 0 }, { s->ctl, POLLIN, 0 } };
		int status;

		if (poll(p, 2, wait_ms(s)) < 0 && errno != EINTR)
			return 1;
		on_signal(s);
		if (s->ctl >= 0)
			on_ctl(s);
		if (s->worker && waitpid(s->worker, &status, WNOHANG) == s->worker && on_exit_of_worker(s, status))
			return s->failed ? 1 : 0;
		if (!s->worker && s->stopping)
			return 0;
		uint64_t now = now_ms();
		watch(s, now);
		if (s->worker && s->kill_at && now >= s->kill_at) {
			log_warn("the worker does not end: killing it");
			kill(s->worker, SIGKILL);
			s->kill_at = 0;
		}
		if (!s->worker && s->restart_at && now >= s->restart_at) {
			s->restart_at = 0;
			int e = start_worker(s);
			if (e) {
				log_warn("fork: %s", strerror(-e));
				s->restart_at = now + BACKOFF_MAX_MS;
			}
		}
	}
}

int supervisor_run(const struct options *o)
{
	struct supervisor s = { .o = o, .signals = -1, .ctl = -1, .watch_ms = notify_watchdog_ms() };
	int status = 1;
	sigset_t set;

	signal(SIGPIPE, SIG_IGN);
	signal(SIGXFSZ, SIG_IGN); /* a region or log above a file-size limit is an error of that call */
	signal(SIGUSR1, SIG_IGN); /* no order of ours, and no reason to end */
	signal(SIGUSR2, SIG_IGN);
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, NULL);
	s.signals = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (s.signals < 0) {
		log_error("signalfd: %s", strerror(errno));
		return 1;
	}
	if (!open_listeners(&s)) {
		int e = start_worker(&s);
		if (e)
			log_error("cannot start the worker: %s", strerror(-e));
		else
			status = run(&s);
	}
	while (s.n_listeners)
		sockets_close(&s.listeners[--s.n_listeners]);
	close(s.signals);
	return status;
}

int aprd_main(int argc, char **argv)
{
	struct options o;

	options_init(&o);
	int r = options_parse(&o, argc, argv);
	if (!r) {
		log_set_level(o.log_level);
		if (o.check_config)
			puts("aprd: the settings are sound");
		else if (!o.n_models)
			r = 2, fprintf(stderr, "aprd: no model: give one with -m [NAME=]FILE.gguf; see aprd --help\n");
		else
			r = supervisor_run(&o) ? -1 : 0;
	}
	options_free(&o);
	return r == 2 ? 2 : r < 0 ? 1 : 0;
}
