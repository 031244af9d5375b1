/* SPDX-License-Identifier: MIT */
/*
 * kill -9 at any moment: the next start is an ordinary one, and requests that may be replayed end with the text they
 * would have had. 50 kills; APR_KILLS=N for more.
 */
#include "tests/daemon/running.h"
#include <pthread.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FEW 1 /* each start takes its time there */
#else
#define FEW 0
#endif

enum { CLIENTS = 3, SEEDS = 8, TOKENS = 40, TEXT = 1024, SLEEPERS = 20 };

struct client_state { /* shared with the client's process */
	uint32_t done, wrong, lost, fds_first, fds_last, over;
	char why[200];
};

static char right[SEEDS][TEXT]; /* the answers, undisturbed */

struct text {
	size_t n;
	char s[TEXT];
};

static void add(struct text *t, const char *piece, size_t len)
{
	for (size_t i = 0; piece && i < len && t->n < TEXT - 1; i++)
		t->s[t->n++] = piece[i] ? piece[i] : '0';
	t->s[t->n] = '\0';
}

/* One answer. 0, the FINAL's -errno, or that of a call. */
static int answer(struct apr *c, uint64_t seed, struct text *t)
{
	struct apr_sampling s = { .set = APR_SET_IGNORE_EOS | APR_SET_TEMPERATURE, .ignore_eos = 1, .temperature = 0.9f };
	const struct apr_cqe *q;
	uint64_t space[32];
	struct apr_params p;
	struct apr_sqe *e = apr_get_sqe(c);
	size_t len;

	t->n = 0;
	t->s[0] = '\0';
	if (!e)
		return -EPIPE;
	apr_prep_generate(c, e, "once upon a time", 16, TOKENS);
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	int r = apr_sqe_params(c, e, &p);
	apr_sqe_seed(e, seed);
	apr_sqe_user_data(e, 1);
	apr_sqe_flags(e, APR_SQE_REPLAYABLE);
	if (r)
		return r;
	r = apr_submit(c);
	while (r >= 0 && !(r = apr_wait_cqe_timeout(c, &q, 20000000))) {
		bool last = apr_cqe_last(q);
		int res = q->res;
		const char *piece = apr_cqe_text(c, q, &len);
		if (!last)
			add(t, piece, len);
		apr_cqe_seen(c, q);
		if (last)
			return res;
	}
	return r;
}

static struct apr *join(const struct daemon *d, uint32_t flags)
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr *c = NULL;

	o.path = d->sock;
	o.flags = flags;
	o.reconnect_ms = 20000;
	return apr_connect(&c, &o, NULL, 0) ? NULL : c;
}

static void live(const struct daemon *d, struct client_state *me, uint32_t number)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	struct apr *c = join(d, APR_CONNECT_RECONNECT);
	struct text t;

	if (!c)
		_exit(1);
	me->fds_first = descriptors_of(getpid());
	for (uint32_t i = number; !__atomic_load_n(&me->over, __ATOMIC_RELAXED); i++) {
		int e = answer(c, 100 + i % SEEDS, &t);
		if (e == -ECONNRESET || e == -EPIPE) { /* gone between its making and its sending */
			me->lost++;
			apr_reconnect(c, NULL, 0);
			if (apr_unfinished(c)) {
				snprintf(me->why, sizeof(me->why), "unfinished after %d", e);
				_exit(1);
			}
			continue;
		}
		if (!me->wrong && (e || strcmp(t.s, right[i % SEEDS]) != 0)) {
			me->wrong++;
			size_t at = 0;
			while (t.s[at] && t.s[at] == right[i % SEEDS][at])
				at++;
			at -= at < 8 ? at : 8;
			snprintf(me->why, sizeof(me->why), "seed %u: %d, %zu bytes of %zu; from %zu '%.40s' not '%.40s'",
				 100 + i % SEEDS, e, t.n, strlen(right[i % SEEDS]), at, t.s + at, right[i % SEEDS] + at);
		}
		me->done++;
	}
	me->fds_last = descriptors_of(getpid());
	_exit(0);
}

static bool gone(pid_t pid)
{
	for (int i = 0; i < 400; i++) {
		if (waitpid(pid, NULL, WNOHANG) == pid || (kill(pid, 0) && errno == ESRCH))
			return true;
		sleep_ms(5);
	}
	return false;
}

static void only_whole_files(void)
{
	char path[200];
	struct dirent *e;

	snprintf(path, sizeof(path), "%s/aprd", apr_test_tmpdir());
	DIR *dir = opendir(path);
	while (dir && (e = readdir(dir)))
		if (strstr(e->d_name, ".panels") && strlen(e->d_name) > 100)
			CU_FAIL("a name that grows");
	if (dir)
		closedir(dir);
}

static void no_panels(void)
{
	char path[600];
	struct dirent *e;

	snprintf(path, sizeof(path), "%s/aprd", apr_test_tmpdir());
	DIR *dir = opendir(path);
	while (dir && (e = readdir(dir))) {
		snprintf(path, sizeof(path), "%s/aprd/%s", apr_test_tmpdir(), e->d_name);
		if (e->d_name[0] != '.')
			unlink(path);
	}
	if (dir)
		closedir(dir);
}

static void kill_at_a_random_moment(struct daemon *d, uint32_t *x, int round)
{
	*x = *x * 1664525u + 1013904223u;
	sleep_ms(2 + (*x >> 16) % 120);
	pid_t worker = (pid_t)status_number(d, "worker_pid");
	CU_ASSERT_TRUE(worker > 0);
	if (round % 10 == 9) { /* the worker alone: the supervisor brings another */
		kill(worker, SIGKILL);
		CU_ASSERT_TRUE(alive(d));
		return;
	}
	kill(d->pid, SIGKILL);
	waitpid(d->pid, NULL, 0);
	CU_ASSERT_TRUE(gone(worker)); /* nothing is left that holds memory */
	if (round % 5 == 4)
		no_panels();
	if (round % 7 == 6) { /* in mid-start, too */
		const char *args[] = { "-m", tiny_path(), "-s", d->sock, "-t", "1", NULL };
		daemon_spawn(d, args);
		sleep_ms((*x >> 8) % 40);
		kill(d->pid, SIGKILL);
		waitpid(d->pid, NULL, 0);
	}
	CU_ASSERT_TRUE_FATAL(daemon_start(d, NULL, NULL));
	CU_ASSERT_FALSE(log_has(d, "making it again")); /* no damaged file */
	CU_ASSERT_FALSE(log_has(d, "stays in this process"));
}

static void kill9_under_load(void)
{
	const char *more = getenv("APR_KILLS");
	int kills = more ? atoi(more) : FEW ? 10 : 50;
	struct client_state *s = mmap(NULL, CLIENTS * sizeof(*s), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	pid_t pid[CLIENTS];
	struct daemon d;
	struct text t;
	uint32_t x = 20, done = 0, lost = 0;

	prctl(PR_SET_CHILD_SUBREAPER, 1); /* orphaned workers are ours to see off */
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "kill9", NULL));
	struct apr *c = join(&d, 0);
	CU_ASSERT_PTR_NOT_NULL_FATAL(c);
	for (uint64_t i = 0; i < SEEDS; i++) {
		CU_ASSERT_EQUAL(answer(c, 100 + i, &t), 0);
		memcpy(right[i], t.s, sizeof(t.s));
	}
	CU_ASSERT_STRING_NOT_EQUAL(right[0], right[1]);
	apr_close(c);
	for (uint32_t i = 0; i < CLIENTS; i++) {
		pid[i] = fork();
		if (!pid[i])
			live(&d, &s[i], i);
	}
	for (int i = 0; i < kills; i++)
		kill_at_a_random_moment(&d, &x, i);
	for (uint32_t i = 0; i < CLIENTS; i++)
		__atomic_store_n(&s[i].over, 1, __ATOMIC_RELAXED);
	for (uint32_t i = 0; i < CLIENTS; i++) {
		int status = -1;
		waitpid(pid[i], &status, 0);
		CU_ASSERT_EQUAL(status, 0);
		CU_ASSERT_EQUAL(s[i].wrong, 0);
		CU_ASSERT_TRUE(s[i].done > 0);
		CU_ASSERT_TRUE(s[i].fds_last <= s[i].fds_first);
		if (s[i].wrong || status)
			fprintf(stderr, "client %u: %u of %u wrong: %s\n", i, s[i].wrong, s[i].done, s[i].why);
		done += s[i].done;
		lost += s[i].lost;
	}
	printf("%d kills, %u answers, all of them right; %u asked again by the program ", kills, done, lost);
	only_whole_files();
	CU_ASSERT_TRUE(status_becomes(&d, "sessions", 0));
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
	munmap(s, CLIENTS * sizeof(*s));
}

/* ---- everybody asleep ------------------------------------------------------------------------- */

struct sleeper {
	struct apr *c;
	pthread_t t;
	double told;
	int got;
};

static void *asleep(void *arg)
{
	struct sleeper *s = arg;
	const struct apr_cqe *q;

	s->got = apr_wait_cqe(s->c, &q);
	s->told = now_s();
	return NULL;
}

static void kill9_with_all_asleep(void)
{
	struct sleeper s[SLEEPERS];
	struct daemon d;
	unsigned late = 0;
	double worst = 0;

	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "asleep", NULL));
	for (int i = 0; i < SLEEPERS; i++) {
		struct apr_opts o = APR_OPTS_INIT;
		o.path = d.sock;
		o.wait = i % 2 ? APR_WAIT_SOCKET : APR_WAIT_FUTEX;
		CU_ASSERT_EQUAL_FATAL(apr_connect(&s[i].c, &o, NULL, 0), 0);
		CU_ASSERT_EQUAL(pthread_create(&s[i].t, NULL, asleep, &s[i]), 0);
	}
	sleep_ms(150);
	double began = now_s();
	kill(d.pid, SIGKILL);
	waitpid(d.pid, NULL, 0);
	for (int i = 0; i < SLEEPERS; i++) {
		pthread_join(s[i].t, NULL);
		CU_ASSERT_EQUAL(s[i].got, -EPIPE);
		double took = s[i].told - began;
		late += took > 0.2;
		worst = took > worst ? took : worst;
		apr_close(s[i].c);
	}
	/* a machine that is busy with other suites may be late for some of them */
	CU_ASSERT_TRUE(late <= SLEEPERS / 2);
	CU_ASSERT_TRUE(worst < 2);
	printf("worst %.0f ms ", worst * 1e3);
}

/* ---- files and processes under its feet ------------------------------------------------------------- */

static void cut_cache(void)
{
	char path[600];
	struct dirent *e;

	snprintf(path, sizeof(path), "%s/aprd", apr_test_tmpdir());
	DIR *dir = opendir(path);
	while (dir && (e = readdir(dir))) {
		snprintf(path, sizeof(path), "%s/aprd/%s", apr_test_tmpdir(), e->d_name);
		if (strstr(e->d_name, ".panels"))
			CU_ASSERT_EQUAL(truncate(path, 5000), 0);
	}
	if (dir)
		closedir(dir);
}

/* Packed weights are mapped: the worker may fall over them (SIGBUS), never aprd; the file is made again. */
static void a_cache_file_cut_while_mapped(void)
{
	struct text before, after;
	struct daemon d;

	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "cut", NULL));
	struct apr *c = join(&d, APR_CONNECT_RECONNECT);
	CU_ASSERT_PTR_NOT_NULL_FATAL(c);
	CU_ASSERT_EQUAL(answer(c, 5, &before), 0);
	cut_cache();
	CU_ASSERT_EQUAL(answer(c, 5, &after), 0); /* replayed in the worker that comes after */
	CU_ASSERT_STRING_EQUAL(before.s, after.s);
	CU_ASSERT_EQUAL(status_number(&d, "pid"), (long)d.pid);
	apr_close(c);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void a_model_file_cut_while_mapped(void)
{
	struct tiny_spec spec = { .n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32, .seed = 9 };
	char path[160];
	struct text before, after;
	struct daemon d;

	snprintf(path, sizeof(path), "%s/cut.gguf", apr_test_tmpdir());
	CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(path, &spec), 0);
	daemon_name(&d, "cutmodel");
	const char *args[] = { "-m", path, "-s", d.sock, "-t", "1", NULL };
	daemon_spawn(&d, args);
	CU_ASSERT_TRUE_FATAL(daemon_ready(&d));
	struct apr *c = join(&d, 0);
	CU_ASSERT_PTR_NOT_NULL_FATAL(c);
	CU_ASSERT_EQUAL(answer(c, 5, &before), 0);
	CU_ASSERT_EQUAL(truncate(path, 1000), 0);
	CU_ASSERT_EQUAL(answer(c, 5, &after), 0); /* what is needed of it was copied or packed at load */
	CU_ASSERT_STRING_EQUAL(before.s, after.s);
	CU_ASSERT_EQUAL(status_number(&d, "restarts"), 0);
	apr_close(c);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void stopped_and_continued(void)
{
	struct text before, after;
	struct daemon d;

	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "stopped", NULL));
	struct apr *c = join(&d, 0);
	CU_ASSERT_PTR_NOT_NULL_FATAL(c);
	CU_ASSERT_EQUAL(answer(c, 5, &before), 0);
	pid_t worker = (pid_t)status_number(&d, "worker_pid");
	pid_t waker = fork();
	if (!waker) {
		kill(worker, SIGSTOP);
		kill(d.pid, SIGSTOP);
		sleep_ms(400);
		kill(worker, SIGCONT);
		kill(d.pid, SIGCONT);
		_exit(0);
	}
	sleep_ms(50);
	CU_ASSERT_EQUAL(answer(c, 5, &after), 0);
	CU_ASSERT_STRING_EQUAL(before.s, after.s);
	waitpid(waker, NULL, 0);
	CU_ASSERT_EQUAL(status_number(&d, "restarts"), 0);
	apr_close(c);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static const struct apr_test tests[] = {
	{ "kill9_under_load", kill9_under_load, 0 },
	{ "kill9_with_all_asleep", kill9_with_all_asleep, KEEPS_HEAP }, /* threads' stacks */
	{ "a_cache_file_cut_while_mapped", a_cache_file_cut_while_mapped, 0 },
	{ "a_model_file_cut_while_mapped", a_model_file_cut_while_mapped, 0 },
	{ "stopped_and_continued", stopped_and_continued, 0 },
};
TEST_MAIN("system/kill", tests)
