/* SPDX-License-Identifier: MIT */
/*
 * While both sides poll, neither makes a system call: counted by ptrace, of the
 * client's thread and of the daemon's core thread, over NOPs sent one at a time.
 *
 * Who loses its CPU for longer than poll_us is slept for, and that is right. So NOPs
 * are sent in short windows, and those count in which neither thread was taken
 * off its CPU against its will.
 */
#include "tests/daemon/running.h"
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/resource.h>

enum { WINDOWS = 20, NOPS = 500, WARM = 200, SECONDS = 20, SPARE_CALLS = 8 };

enum { PROBE = 2 }; /* counting: ends of calls too, on the core */

struct shared { /* of the client process and its tracer */
	uint32_t counting, client_calls, core_calls; /* of this window */
	uint32_t windows, tried;                     /* undisturbed ones, all */
	uint32_t client_total, core_total;           /* of the undisturbed ones */
	uint32_t client_probe, core_probe;           /* calls that must be seen */
	bool failed;
};

static struct daemon d;

static pid_t thread_named(pid_t pid, const char *name)
{
	char path[64];
	pid_t tid = 0;

	snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
	DIR *dir = opendir(path);
	for (struct dirent *e; dir && !tid && (e = readdir(dir));) {
		char comm[330], *text;
		snprintf(comm, sizeof(comm), "%s/%s/comm", path, e->d_name);
		text = file_text(comm);
		if (text && !strncmp(text, name, strlen(name)) && text[strlen(name)] == '\n')
			tid = (pid_t)atoi(e->d_name);
		free(text);
	}
	if (dir)
		closedir(dir);
	return tid;
}

/* How often this client and the core were taken off their CPUs. */
static long disturbed(pid_t worker, pid_t core)
{
	struct rusage r;
	char path[80], *text, *p;
	long n = 0;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/status", (int)worker, (int)core);
	text = file_text(path);
	p = text ? strstr(text, "nonvoluntary_ctxt_switches:") : NULL;
	if (p)
		n = atol(p + strlen("nonvoluntary_ctxt_switches:"));
	free(text);
	getrusage(RUSAGE_SELF, &r);
	return n + r.ru_nivcsw;
}

/* One at a time, never sleeping. */
static bool nops(struct apr *c, unsigned n)
{
	for (unsigned i = 0; i < n; i++) {
		const struct apr_cqe *e;
		struct apr_sqe *s = apr_get_sqe(c);
		if (!s)
			return false;
		apr_prep_nop(s);
		if (apr_submit(c) != 1)
			return false;
		double end = now_s() + 5; /* the vDSO's clock */
		int r;
		while ((r = apr_peek_cqe(c, &e)) == -EAGAIN && now_s() < end)
			apr_cpu_relax();
		if (r)
			return false;
		apr_cqe_seen(c, e);
	}
	return true;
}

static void client(struct shared *w, pid_t worker, pid_t core)
{
	struct apr *c = connect_to(&d);
	double end = now_s() + SECONDS;

	raise(SIGSTOP); /* until it is traced */
	w->failed = !c || !nops(c, 1);
	sleep_ms(100); /* the core sleeps now: it cannot wake but out of a call, nor ask we without one */
	__atomic_store_n(&w->counting, PROBE, __ATOMIC_SEQ_CST);
	w->failed |= !nops(c, 1);
	__atomic_store_n(&w->counting, 0, __ATOMIC_SEQ_CST);
	w->client_probe = w->client_calls;
	w->core_probe = w->core_calls;
	while (!w->failed && w->windows < WINDOWS && now_s() < end) {
		w->failed = !nops(c, WARM);
		long before = disturbed(worker, core);
		w->failed |= !nops(c, 20); /* that look took its time */
		w->client_calls = w->core_calls = 0;
		__atomic_store_n(&w->counting, 1, __ATOMIC_SEQ_CST);
		w->failed |= !nops(c, NOPS);
		__atomic_store_n(&w->counting, 0, __ATOMIC_SEQ_CST);
		w->tried++;
		if (disturbed(worker, core) != before)
			continue;
		w->windows++;
		w->client_total += w->client_calls;
		w->core_total += w->core_calls;
	}
	apr_close(c);
	_exit(w->failed);
}

static bool is_entry(pid_t tid)
{
	struct __ptrace_syscall_info info;

	return ptrace(PTRACE_GET_SYSCALL_INFO, tid, sizeof(info), &info) > 0 && info.op == PTRACE_SYSCALL_INFO_ENTRY;
}

/* Counts until the client ends: its exit status, -1 where it was killed. */
static int trace(struct shared *w, pid_t pid)
{
	int status;

	for (;;) {
		pid_t t = waitpid(-1, &status, __WALL);
		if (t < 0)
			return -1;
		if (!WIFSTOPPED(status)) {
			if (t == pid)
				return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
			continue;
		}
		int sig = WSTOPSIG(status);
		bool call = sig == (SIGTRAP | 0x80);
		uint32_t counting = call ? __atomic_load_n(&w->counting, __ATOMIC_SEQ_CST) : 0;
		/* the probe's core may have nothing to enter: that it came out of its sleep is what there is to see */
		if (counting && (is_entry(t) || (counting == PROBE && t != pid)))
			++*(t == pid ? &w->client_calls : &w->core_calls);
		bool real = !call && !(status >> 16) && sig != SIGTRAP;
		ptrace(PTRACE_SYSCALL, t, 0, real ? sig : 0);
	}
}

static bool start_tracing(pid_t tid)
{
	if (ptrace(PTRACE_SEIZE, tid, 0, PTRACE_O_TRACESYSGOOD))
		return false;
	return !ptrace(PTRACE_INTERRUPT, tid, 0, 0); /* its stop is met by the loop, which sets it going for calls */
}

static void stop_tracing(pid_t tid)
{
	int status;

	if (!ptrace(PTRACE_INTERRUPT, tid, 0, 0) && waitpid(tid, &status, __WALL) == tid)
		ptrace(PTRACE_DETACH, tid, 0, 0);
}

static void no_system_call_while_both_poll(void)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
	SKIP("a sanitizer makes calls of its own");
#endif
	pid_t worker = (pid_t)status_number(&d, "worker_pid"), core = thread_named(worker, "aprd-core");
	struct shared *w = mmap(NULL, sizeof(*w), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int status;

	CU_ASSERT_TRUE_FATAL(core > 0 && w != MAP_FAILED);
	if (sysconf(_SC_NPROCESSORS_ONLN) < 2) {
		munmap(w, sizeof(*w));
		SKIP("two that poll need two CPUs");
	}
	fflush(NULL);
	pid_t pid = fork();
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		client(w, worker, core);
	}
	waitpid(pid, &status, WUNTRACED);
	bool traced = WIFSTOPPED(status) && start_tracing(pid) && start_tracing(core);
	kill(pid, traced ? SIGCONT : SIGKILL);
	int ended = traced ? trace(w, pid) : -1;
	if (traced)
		stop_tracing(core);
	else
		waitpid(pid, &status, 0);
	struct shared got = *w;
	munmap(w, sizeof(*w));
	if (!traced)
		SKIP("ptrace is not allowed here");
	CU_ASSERT_EQUAL(ended, 0);
	CU_ASSERT_EQUAL(got.client_probe, 1); /* the doorbell */
	CU_ASSERT_TRUE(got.core_probe > 0);
	fprintf(stderr, "  %u NOPs in %u undisturbed windows of %u: client %u calls, core %u\n", got.windows * NOPS,
		got.windows, got.tried, got.client_total, got.core_total);
	if (got.windows < WINDOWS)
		SKIP("too few moments in which neither side lost its CPU");
	/* a hypervisor takes CPUs away without a word: one sleep of both sides is let pass */
	CU_ASSERT_TRUE(got.client_total + got.core_total <= SPARE_CALLS);
}

/* The same daemon, and nobody submits: it polls no longer than it says. */
static void polling_ends_when_nothing_comes(void)
{
	struct hand h;
	struct apr_sqe nop = { .op = APR_OP_NOP, .user_data = 1 };

	CU_ASSERT_EQUAL_FATAL(hand_open(&h, &d, NULL), 0);
	CU_ASSERT_TRUE(h.welcome.poll_us > 0 && h.welcome.spin_us > 0);
	hand_submit(&h, &nop);
	CU_ASSERT_EQUAL(hand_finish(&h, 1, NULL, NULL, 5000), 0);
	const struct apr_res_hdr *r = h.res.base;
	double end = now_s() + 5;
	while (!(__atomic_load_n(&r->flags, __ATOMIC_ACQUIRE) & APR_RES_NEED_WAKEUP) && now_s() < end)
		sleep_ms(1);
	CU_ASSERT_TRUE(now_s() < end);
	hand_close(&h);
}

static void daemon_up(void)
{
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "polling", "--poll", "always", NULL));
}

static void daemon_down(void)
{
	CU_ASSERT_TRUE(status_becomes(&d, "sessions", 0));
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static const struct apr_test tests[] = {
	{ "daemon_up", daemon_up, KEEPS_HEAP },
	{ "no_system_call_while_both_poll", no_system_call_while_both_poll, KEEPS_HEAP }, /* stdio */
	{ "polling_ends_when_nothing_comes", polling_ends_when_nothing_comes, 0 },
	{ "daemon_down", daemon_down, KEEPS_HEAP },
};

TEST_MAIN("daemon/polling", tests)
