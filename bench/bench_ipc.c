/* SPDX-License-Identifier: MIT */
/*
 * The ring against what else carries a byte to another process and back.
 *
 * Timing window of a round trip: from before apr_get_sqe to after apr_cqe_seen of
 * its answer, one NOP in flight. The clock is read once a round trip (the end of
 * one is the start of the next), which is part of every figure, also of the others:
 * pipe and socket from before the write to after the read, the bare ping-pong from
 * before the store to after the load that sees the answer.
 *
 * "Both polling": the daemon runs with --poll always and one compute thread on a
 * CPU of its own, the client never sleeps on another; the bare ping-pong's two
 * processes stand on the same two CPUs. Blocks of both alternate, and the bare
 * ones begin when the daemon has stopped polling (NEED_WAKEUP is up).
 *
 * "Sleeping": --poll never, the client never spins; before each round trip both
 * sides have gone to sleep (a pause of 150 us). Each is followed by one of a pipe
 * after the same pause, so that the two see the same machine.
 *
 * "Slot operations": NOPs taken and answered in a second, 32 in flight a client,
 * all clients together.
 *
 * System calls are counted in a run of their own, by ptrace, of the client and of
 * every thread of the daemon, in 100 windows of 2,000 NOPs. A side that loses its
 * CPU to another program for longer than poll_us is slept for, so on a busy machine
 * some windows have a few; windows without any are counted beside.
 *
 *   bench_ipc [SECONDS]     how long each part lasts, default 3
 */
#include "shm/wake.h"
#include "tests/support/aprd.h"
#include "tests/support/gguf_writer.h"
#include <apr/client.h>
#include <dirent.h>
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <linux/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BLOCK = 20000, MAX_SAMPLES = 4000000, IN_FLIGHT = 32, PAUSE_US = 150, WINDOWS = 100, TRACED_NOPS = 2000, WARM = 1000, KINDS = 512 };

struct series {
	uint32_t *ns;
	size_t n;
};

struct quant {
	double p50, p99, p999, max;
};

static int cpus[2];     /* client's, daemon's */
static double seconds = 3;
static char dir[] = "/tmp/apr-bench.XXXXXX";

static void pin(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	sched_setaffinity(0, sizeof(set), &set);
}

/* Two CPUs that are two cores if there are; false with one only. */
static bool find_cpus(void)
{
	cpu_set_t set;
	int n = 0;

	sched_getaffinity(0, sizeof(set), &set);
	for (int i = 0; i < CPU_SETSIZE && n < 2; i++) {
		char path[96], siblings[64] = "";
		if (!CPU_ISSET(i, &set))
			continue;
		snprintf(path, sizeof(path), "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", i);
		FILE *f = fopen(path, "r");
		if (f) {
			if (!fgets(siblings, sizeof(siblings), f))
				siblings[0] = '\0';
			fclose(f);
		}
		/* the second must not be named beside the first */
		if (n == 1 && atoi(siblings) == cpus[0] && strpbrk(siblings, ",-") && CPU_COUNT(&set) > 2)
			continue;
		cpus[n++] = i;
	}
	return n == 2;
}

static bool series_init(struct series *s)
{
	s->n = 0;
	s->ns = malloc(MAX_SAMPLES * sizeof(*s->ns));
	return s->ns;
}

static void add(struct series *s, uint64_t ns)
{
	if (s->n < MAX_SAMPLES)
		s->ns[s->n++] = ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns;
}

static int by_value(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
	return (x > y) - (x < y);
}

static struct quant quantiles(struct series *s)
{
	struct quant q = { 0, 0, 0, 0 };

	if (!s->n)
		return q;
	qsort(s->ns, s->n, sizeof(*s->ns), by_value);
	q.p50 = s->ns[s->n / 2];
	q.p99 = s->ns[(size_t)((double)s->n * 0.99)];
	q.p999 = s->ns[(size_t)((double)s->n * 0.999)];
	q.max = s->ns[s->n - 1];
	return q;
}

static void row(const char *what, struct series *s, struct quant *q)
{
	*q = quantiles(s);
	printf("{\"bench\":\"ipc\",\"what\":\"%s\",\"n\":%zu,\"p50_ns\":%.0f,\"p99_ns\":%.0f,\"p999_ns\":%.0f,\"max_ns\":%.0f}\n",
	       what, s->n, q->p50, q->p99, q->p999, q->max);
	fprintf(stderr, "%-34s %9zu %9.2f %9.2f %9.2f %9.1f\n", what, s->n, q->p50 / 1e3, q->p99 / 1e3, q->p999 / 1e3,
		q->max / 1e3);
	free(s->ns);
}

/* ---- the ring --------------------------------------------------------------------- */

static struct apr *join(const char *sock, int32_t spin_us)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c;
	char err[256];

	o.path = sock;
	o.spin_us = spin_us;
	int e = apr_connect(&c, &o, err, sizeof(err));
	if (e)
		fprintf(stderr, "bench_ipc: %s\n", err);
	return e ? NULL : c;
}

static bool nop(struct apr *c)
{
	const struct apr_cqe *q;
	struct apr_sqe *s = apr_get_sqe(c);

	if (!s)
		return false;
	apr_prep_nop(s);
	s->user_data = 1;
	if (apr_submit(c) != 1)
		return false;
	/* peek for as long as a client on its own core would, then as apr_wait_cqe does */
	for (int i = 0; i < 1 << 22; i++) {
		if (!apr_peek_cqe(c, &q)) {
			apr_cqe_seen(c, q);
			return true;
		}
		apr_cpu_relax();
	}
	return false;
}

static bool nops(struct apr *c, struct series *s, unsigned n)
{
	uint64_t t = apr_now_ns();

	for (unsigned i = 0; i < n; i++) {
		if (!nop(c))
			return false;
		uint64_t now = apr_now_ns();
		add(s, now - t);
		t = now;
	}
	return true;
}

/* ---- the others --------------------------------------------------------------------- */

struct pingpong {
	uint32_t ping;
	uint8_t pad0[124];
	uint32_t pong;
	uint8_t pad1[124];
	uint32_t go; /* the other side sleeps while 0 */
	uint32_t end;
};

static struct pingpong *shared;
static pid_t bare_pid;

static void bare_echo(void)
{
	uint32_t n = 0;

	pin(cpus[1]);
	while (!__atomic_load_n(&shared->end, __ATOMIC_ACQUIRE)) {
		if (!__atomic_load_n(&shared->go, __ATOMIC_ACQUIRE)) {
			usleep(500);
			continue;
		}
		if (__atomic_load_n(&shared->ping, __ATOMIC_ACQUIRE) != n) /* pairs with bare_block */
			__atomic_store_n(&shared->pong, ++n, __ATOMIC_RELEASE);
		else
			apr_cpu_relax();
	}
	_exit(0);
}

static void bare_block(struct series *s, unsigned n)
{
	__atomic_store_n(&shared->go, 1, __ATOMIC_RELEASE);
	usleep(2000);
	uint64_t t = apr_now_ns();
	for (unsigned i = 0; i < n; i++) {
		uint32_t k = shared->ping + 1;
		__atomic_store_n(&shared->ping, k, __ATOMIC_RELEASE);
		while (__atomic_load_n(&shared->pong, __ATOMIC_ACQUIRE) != k)
			apr_cpu_relax();
		uint64_t now = apr_now_ns();
		add(s, now - t);
		t = now;
	}
	__atomic_store_n(&shared->go, 0, __ATOMIC_RELEASE);
}

/* An echo process at the other end of two descriptors. */
static pid_t echo_process(int in, int out, int close_a, int close_b)
{
	pid_t pid = fork();
	char b[64];
	ssize_t n;

	if (pid)
		return pid;
	close(close_a);
	if (close_b >= 0)
		close(close_b);
	pin(cpus[1]);
	while ((n = read(in, b, sizeof(b))) > 0)
		if (write(out, b, (size_t)n) != n)
			break;
	_exit(0);
}

struct line { /* a pipe pair or a socket, with its echo */
	int in, out;
	pid_t pid;
};

static bool open_pipe(struct line *l)
{
	int a[2], b[2];

	if (pipe(a) || pipe(b))
		return false;
	l->pid = echo_process(a[0], b[1], a[1], b[0]);
	close(a[0]);
	close(b[1]);
	l->out = a[1];
	l->in = b[0];
	return true;
}

static bool open_socket(struct line *l)
{
	int s[2];

	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, s))
		return false;
	l->pid = echo_process(s[1], s[1], s[0], -1);
	close(s[1]);
	l->in = l->out = s[0];
	return true;
}

static void close_line(struct line *l)
{
	close(l->in);
	if (l->out != l->in)
		close(l->out);
	waitpid(l->pid, NULL, 0);
}

static bool echo_once(const struct line *l)
{
	char b[64] = "an entry has 64 bytes";

	return write(l->out, b, sizeof(b)) == sizeof(b) && read(l->in, b, sizeof(b)) == sizeof(b);
}

static bool echo_run(const struct line *l, struct series *s)
{
	uint64_t t = apr_now_ns(), end = t + (uint64_t)(seconds * 1e9);

	while (t < end) {
		if (!echo_once(l))
			return false;
		uint64_t now = apr_now_ns();
		add(s, now - t);
		t = now;
	}
	return true;
}

/* ---- parts ------------------------------------------------------------------------------ */

static bool start_daemon(struct test_aprd *d, const char *poll)
{
	char self[PATH_MAX], program[PATH_MAX + 8], model[96];

	if (!realpath("/proc/self/exe", self))
		return false;
	snprintf(program, sizeof(program), "%s/aprd", dirname(dirname(self)));
	snprintf(model, sizeof(model), "m=%s/tiny.gguf", dir);
	pin(cpus[1]); /* inherited */
	int e = test_aprd_start(d, program, dir, (const char *const[]){ "-m", model, "-t", "1", "--poll", poll, NULL });
	pin(cpus[0]);
	if (e)
		fprintf(stderr, "bench_ipc: aprd: %s\n", strerror(-e));
	return !e;
}

static void wait_daemon_asleep(struct apr *c)
{
	for (int i = 0; i < 2000 && !(apr_state(c) & APR_RES_NEED_WAKEUP); i++)
		usleep(500);
}

/* Round trips with both sides polling, beside the bare ping-pong, in turns. */
static bool polling(const char *sock, struct quant *ring, struct quant *bare)
{
	struct series a, b;
	struct apr *c = join(sock, 0);
	uint64_t end = apr_now_ns() + (uint64_t)(2 * seconds * 1e9);
	bool ok = true;

	if (!c || !series_init(&a) || !series_init(&b))
		return false;
	bare_pid = fork();
	if (!bare_pid)
		bare_echo();
	while (ok && apr_now_ns() < end) {
		uint32_t thrown_away[WARM];
		struct series warm = { thrown_away, 0 };

		ok = nops(c, &warm, WARM);
		ok = ok && nops(c, &a, BLOCK);
		wait_daemon_asleep(c);
		bare_block(&b, BLOCK);
	}
	__atomic_store_n(&shared->end, 1, __ATOMIC_RELEASE);
	waitpid(bare_pid, NULL, 0);
	apr_close(c);
	row("nop, both polling", &a, ring);
	row("bare ping-pong, both polling", &b, bare);
	return ok;
}

static bool sleeping(const char *sock, struct quant *ring, struct quant *pipe_)
{
	struct series a, b;
	struct line l;
	struct apr *c = join(sock, 0);
	uint64_t end = apr_now_ns() + (uint64_t)(2 * seconds * 1e9);
	const struct apr_cqe *q;
	bool ok = true;

	if (!c || !series_init(&a) || !series_init(&b) || !open_pipe(&l))
		return false;
	while (ok && apr_now_ns() < end) {
		usleep(PAUSE_US);
		wait_daemon_asleep(c);
		uint64_t t = apr_now_ns();
		struct apr_sqe *s = apr_get_sqe(c);
		if (s)
			s->user_data = 1;
		ok = s && apr_submit(c) == 1 && !apr_wait_cqe_timeout(c, &q, 2000000);
		if (ok)
			apr_cqe_seen(c, q);
		add(&a, apr_now_ns() - t);
		usleep(PAUSE_US);
		t = apr_now_ns();
		ok = ok && echo_once(&l);
		add(&b, apr_now_ns() - t);
	}
	close_line(&l);
	apr_close(c);
	row("nop, both asleep", &a, ring);
	row("pipe, both asleep", &b, pipe_);
	return ok;
}

static bool others(void)
{
	struct series s;
	struct quant q;
	struct line l;

	if (!series_init(&s) || !open_pipe(&l) || !echo_run(&l, &s))
		return false;
	close_line(&l);
	row("pipe, back to back", &s, &q);
	if (!series_init(&s) || !open_socket(&l) || !echo_run(&l, &s))
		return false;
	close_line(&l);
	row("unix socket, back to back", &s, &q);
	return true;
}

/* One client of many: keeps IN_FLIGHT NOPs going; the number answered. */
static uint64_t slot_client(const char *sock, uint64_t from, uint64_t to)
{
	struct apr *c = join(sock, -1);
	uint64_t done = 0, sent = 0;

	if (!c)
		return 0;
	while (apr_now_ns() < from)
		apr_cpu_relax();
	while (apr_now_ns() < to) {
		const struct apr_cqe *q;
		struct apr_sqe *s;
		while (sent - done < IN_FLIGHT && (s = apr_get_sqe(c)))
			s->user_data = ++sent;
		if (apr_submit(c) < 0 || apr_wait_cqes(c, 1, 1000000) < 0)
			break;
		while (!apr_peek_cqe(c, &q)) {
			apr_cqe_seen(c, q);
			done++;
		}
	}
	apr_close(c);
	return done;
}

static double slots(const char *sock, int clients)
{
	uint64_t *count = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	uint64_t from = apr_now_ns() + 300000000, to = from + (uint64_t)(seconds * 1e9);
	double sum = 0;

	if (count == MAP_FAILED)
		return 0;
	for (int i = 0; i < clients; i++)
		if (!fork()) {
			cpu_set_t set; /* wherever the daemon is not */
			CPU_ZERO(&set);
			for (int k = 0; k < (int)sysconf(_SC_NPROCESSORS_CONF) && k < CPU_SETSIZE; k++)
				if (k != cpus[1])
					CPU_SET(k, &set);
			sched_setaffinity(0, sizeof(set), &set);
			count[i] = slot_client(sock, from, to);
			_exit(0);
		}
	for (int i = 0; i < clients; i++)
		wait(NULL);
	for (int i = 0; i < clients; i++)
		sum += (double)count[i];
	munmap(count, 4096);
	sum /= seconds;
	printf("{\"bench\":\"ipc\",\"what\":\"slot operations\",\"clients\":%d,\"per_s\":%.0f}\n", clients, sum);
	fprintf(stderr, "slot operations, %2d clients         %9.0f a second\n", clients, sum);
	return sum;
}

/* ---- system calls ------------------------------------------------------------------------ */

struct window {
	int at; /* 1..WINDOWS: the NOPs of that window are sent; 0 between them */
	int ok;
};

struct calls {
	uint32_t client, daemon, clean; /* clean: windows without any */
	uint32_t kind[2][KINDS];
};

static int seize_all(pid_t pid, pid_t *tids, int n, int most)
{
	char path[64];
	snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	DIR *d = opendir(path);
	struct dirent *e;

	while (d && (e = readdir(d)) && n < most) {
		pid_t tid = atoi(e->d_name);
		if (tid && !ptrace(PTRACE_SEIZE, tid, 0, PTRACE_O_TRACESYSGOOD)) {
			ptrace(PTRACE_INTERRUPT, tid, 0, 0);
			tids[n++] = tid;
		}
	}
	if (d)
		closedir(d);
	/* its children: the worker below the supervisor */
	snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)pid, (int)pid);
	FILE *f = fopen(path, "r");
	int child;
	while (f && fscanf(f, "%d", &child) == 1)
		n = seize_all(child, tids, n, most);
	if (f)
		fclose(f);
	return n;
}

static void traced_client(const char *sock, struct window *w)
{
	struct apr *c = join(sock, 0);
	struct series s;

	raise(SIGSTOP); /* until it is traced */
	if (!c || !series_init(&s))
		_exit(1);
	for (int i = 1; i <= WINDOWS; i++) {
		bool ok = nops(c, &s, 2000); /* warm: the daemon polls, no page is new */
		__atomic_store_n(&w->at, i, __ATOMIC_SEQ_CST);
		ok = ok && nops(c, &s, TRACED_NOPS);
		__atomic_store_n(&w->at, 0, __ATOMIC_SEQ_CST);
		w->ok += ok;
	}
	_exit(0);
}

/* One stop of a traced thread: counts it if it is the entry of a call inside a window. */
static void note_stop(pid_t tid, bool is_daemon, int window, struct calls *n, uint8_t *dirty)
{
	struct __ptrace_syscall_info info;

	if (!window || ptrace(PTRACE_GET_SYSCALL_INFO, tid, sizeof(info), &info) <= 0 ||
	    info.op != PTRACE_SYSCALL_INFO_ENTRY)
		return;
	++*(is_daemon ? &n->daemon : &n->client);
	if (info.entry.nr < KINDS)
		n->kind[is_daemon][info.entry.nr]++;
	dirty[window] = 1;
}

static void trace_until_exit(pid_t client, struct window *w, struct calls *n)
{
	uint8_t dirty[WINDOWS + 1] = { 0 };
	int status;

	for (;;) {
		pid_t t = waitpid(-1, &status, __WALL);
		if (t < 0 || (t == client && (WIFEXITED(status) || WIFSIGNALED(status))))
			break;
		if (!WIFSTOPPED(status))
			continue;
		int sig = WSTOPSIG(status);
		bool call = sig == (SIGTRAP | 0x80);
		if (call)
			note_stop(t, t != client, __atomic_load_n(&w->at, __ATOMIC_SEQ_CST), n, dirty);
		bool real = !call && !(status >> 16) && sig != SIGTRAP;
		ptrace(PTRACE_SYSCALL, t, 0, real ? sig : 0);
	}
	for (int i = 1; i <= WINDOWS; i++)
		n->clean += !dirty[i];
}

/* False: could not be traced here. */
static bool count_calls(const struct test_aprd *d, struct calls *n)
{
	struct window *w = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t tids[256];
	int status;

	if (w == MAP_FAILED)
		return false;
	pid_t pid = fork();
	if (!pid)
		traced_client(d->sock, w);
	waitpid(pid, &status, WUNTRACED);
	bool traced = WIFSTOPPED(status) && !ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
	int k = traced ? seize_all(d->pid, tids, 0, 256) : 0;
	kill(pid, SIGCONT);
	trace_until_exit(pid, w, n);
	for (int i = 0; i < k; i++) { /* let them go */
		ptrace(PTRACE_INTERRUPT, tids[i], 0, 0);
		if (waitpid(tids[i], &status, __WALL) == tids[i])
			ptrace(PTRACE_DETACH, tids[i], 0, 0);
	}
	traced = traced && k > 1 && w->ok == WINDOWS;
	munmap(w, 4096);
	return traced;
}

static bool system_calls(const struct test_aprd *d)
{
	static struct calls n;

	if (!count_calls(d, &n)) {
		printf("{\"bench\":\"ipc\",\"what\":\"system calls\",\"client\":null,\"daemon\":null}\n");
		fprintf(stderr, "system calls: could not trace here\n");
		return false;
	}
	printf("{\"bench\":\"ipc\",\"what\":\"system calls\",\"nops\":%d,\"client\":%u,\"daemon\":%u,\"windows\":%d,"
	       "\"windows_without\":%u}\n", WINDOWS * TRACED_NOPS, n.client, n.daemon, WINDOWS, n.clean);
	fprintf(stderr, "system calls in %d windows of %d nops: client %u, daemon %u; none at all in %u windows\n", WINDOWS,
		TRACED_NOPS, n.client, n.daemon, n.clean);
	for (int side = 0; side < 2; side++)
		for (int i = 0; i < KINDS; i++)
			if (n.kind[side][i])
				fprintf(stderr, "  %s: call number %d, %u times\n", side ? "daemon" : "client", i, n.kind[side][i]);
	return n.clean > 0;
}

static void verdict(const char *what, bool met, const char *bar)
{
	fprintf(stderr, "%-40s %s (%s)\n", what, met ? "met" : "MISSED", bar);
}

static bool all_parts(void)
{
	struct quant ring = { 0 }, bare = { 0 }, asleep = { 0 }, pipe_ = { 0 };
	struct test_aprd d;
	double most = 0;

	fprintf(stderr, "%-34s %9s %9s %9s %9s %9s\n", "round trips, us", "n", "p50", "p99", "p99.9", "max");
	if (!start_daemon(&d, "always"))
		return false;
	bool ok = polling(d.sock, &ring, &bare);
	for (int n = 1; ok && n <= 16; n *= 4) {
		double v = slots(d.sock, n);
		most = v > most ? v : most;
	}
	bool none = ok && system_calls(&d);
	test_aprd_stop(&d);
	if (!ok || !start_daemon(&d, "never"))
		return false;
	ok = sleeping(d.sock, &asleep, &pipe_);
	test_aprd_stop(&d);
	ok = ok && others();
	fprintf(stderr, "nop p50 is %.2f x the bare ping-pong's; asleep %.2f x the pipe's\n", ring.p50 / bare.p50,
		asleep.p50 / pipe_.p50);
	verdict("nop p50", ring.p50 <= 500, "<= 0.5 us");
	verdict("nop p99.9", ring.p999 <= 5000 || ring.p999 <= 1.5 * bare.p999, "<= 5 us or 1.5 x bare");
	verdict("no system call while both poll", none, "in undisturbed windows");
	verdict("asleep p50 / pipe's", asleep.p50 <= 3 * pipe_.p50, "<= 3 x");
	verdict("slot operations", most >= 1e6, ">= 1 M a second");
	return ok;
}

int main(int argc, char **argv)
{
	struct tiny_spec spec = { .n_layers = 2, .n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32 };
	char path[64], cmd[64];

	if (argc > 1)
		seconds = atof(argv[1]) > 0 ? atof(argv[1]) : seconds;
	if (!find_cpus()) {
		fprintf(stderr, "bench_ipc: needs two CPUs\n");
		return 77;
	}
	shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED || !mkdtemp(dir))
		return 1;
	setvbuf(stdout, NULL, _IOLBF, 0);
	snprintf(path, sizeof(path), "%s/tiny.gguf", dir);
	pin(cpus[0]);
	bool ok = !apr_test_write_tiny_model(path, &spec) && all_parts();
	snprintf(cmd, sizeof(cmd), "rm -rf %s", dir);
	return system(cmd) || !ok;
}
