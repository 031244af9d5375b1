/* SPDX-License-Identifier: MIT */
/*
 * Every call that can fail fails once: aprd starts, answers, ends; one allocation, mapping, descriptor, read or
 * submission of it does not work (tests/fault/inject.c). It starts or says why it cannot; the request ends with the
 * right text or a clear error; the next one is served as if nothing had been; nothing leaks; nothing dies by a signal.
 *
 * The first, the second and the last call of each stack; all of them with APR_FAULT=full (make fault-full).
 * APR_FAULT=KIND:STACK:N runs that one alone and shows aprd's log.
 */
#include "tests/daemon/running.h"
#include "tests/fault/inject.h"
#include <sys/mman.h>


#define SPREAD 6 /* blocks: how many watches the loop has made is a matter of time */
#define JOBS 4
#define TRACED "tests/fault/inject.so"

struct fault {
	char kind[48], where[300];
	uint64_t stack, n, calls;
};

struct outcome {
	int status;       /* of aprd: -1 = it had to be killed, -2 = it served */
	int first, again; /* of the two requests: 0 or -errno */
	char words[200], text[64], text_again[64];
	long restarts;
	unsigned fds;
	int32_t blocks;
	int64_t bytes;
	bool fired, sessions_left;
};

static struct {
	char trace[160], counts[200], heap[160], mark[160], cache[160], name[32], inject[4200], aprd[4200];
	struct fault_heap *map;
	struct fault *all;
	size_t n;
	bool tracing;
	struct outcome right; /* nothing fails */
} t;

/* ---- one run -------------------------------------------------------------------------------- */

static void fresh_file(const char *path, off_t size)
{
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

	CU_ASSERT_FATAL(fd >= 0 && !ftruncate(fd, size));
	close(fd);
}

static void rm_tree(const char *path)
{
	char sub[512];
	DIR *dir = opendir(path);
	struct dirent *e;

	while (dir && (e = readdir(dir))) {
		if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, ".."))
			continue;
		snprintf(sub, sizeof(sub), "%s/%s", path, e->d_name);
		if (unlink(sub))
			rm_tree(sub);
	}
	if (dir)
		closedir(dir);
	rmdir(path);
}

static void spawn(struct daemon *d, const struct fault *f)
{
	char fail[400];

	if (f) {
		snprintf(fail, sizeof(fail), "%s:%llx:%llu:%s", f->kind, (unsigned long long)f->stack,
			 (unsigned long long)f->n, t.mark);
		setenv("APR_FAULT_FAIL", fail, 1);
	} else if (t.tracing) {
		setenv("APR_FAULT_TRACE", t.trace, 1);
	}
	setenv("APR_FAULT_HEAP", t.heap, 1);
	setenv("LD_PRELOAD", t.inject, 1);
	fflush(NULL);
	unlink(d->log);
	d->pid = fork();
	if (!d->pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		dup2(open(d->log, O_WRONLY | O_CREAT | O_APPEND, 0600), 2);
		setenv("XDG_CACHE_HOME", t.cache, 1);
		execl(t.aprd, "aprd", "-m", tiny_path(), "-s", d->sock, "-t", "1", "-b", "cpu", (char *)NULL);
		_exit(127);
	}
	unsetenv("LD_PRELOAD");
	unsetenv("APR_FAULT_HEAP");
	unsetenv("APR_FAULT_FAIL");
	unsetenv("APR_FAULT_TRACE");
}

/* Its end within 6 s, or that it serves: the log may be what fails, so the socket is asked. */
static int started(struct daemon *d)
{
	for (int i = 0; i < 1500; i++) {
		int status;
		if (log_has(d, "ready on"))
			return -2;
		if (waitpid(d->pid, &status, WNOHANG) == d->pid) {
			d->pid = 0;
			return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
		}
		sleep_ms(4);
	}
	return alive(d) ? -2 : -1;
}

static int keep_text(void *arg, const struct apr_token *k)
{
	char *text = arg;
	size_t n = strlen(text), len = k->len;

	if (len > 62 - n)
		len = 62 - n;
	for (size_t i = 0; i < len; i++)
		text[n + i] = k->text[i] ? k->text[i] : '0';
	text[n + len] = '\0';
	return 0;
}

/* One client's life. */
static int ask(const struct daemon *d, char text[64], char words[200])
{
	struct apr_opts o = APR_OPTS_INIT;
	struct apr_gen g = {
		.size = sizeof(g), .text = "hello", .len = 5, .max_tokens = 8, .has_seed = 1, .seed = 5, .timeout_ms = 4000
	};
	uint64_t space[32];
	struct apr_params p;
	struct apr_sampling s = { .set = APR_SET_IGNORE_EOS, .ignore_eos = 1 };
	struct apr_result r;
	struct apr *c;

	text[0] = words[0] = '\0';
	o.path = d->sock;
	o.connect_ms = 4000;
	apr_params_init(&p, space, sizeof(space));
	apr_params_sampling(&p, &s);
	g.params = &p;
	int e = apr_connect(&c, &o, words, 200);
	if (e)
		return e;
	char *json = NULL;
	if (getenv("APR_FAULT") && !apr_status(c, &json)) /* a hundred stacks of their own */
		free(json);
	e = apr_generate(c, &g, keep_text, text, &r, words, 200);
	apr_close(c);
	return e;
}

/* When it is quiet: the last status was asked over a connection too, and spare regions are made again. */
static void look_at(pid_t worker, struct outcome *o)
{
	const struct fault_heap_row *r = &t.map->row[(unsigned)worker % FAULT_PROCESSES];

	for (int i = 0; i < 100; i++) {
		sleep_ms(t.right.fds ? 5 : 50);
		o->fds = descriptors_of(worker);
		o->blocks = __atomic_load_n(&r->blocks, __ATOMIC_RELAXED);
		o->bytes = __atomic_load_n(&r->bytes, __ATOMIC_RELAXED);
		if (t.right.fds ? o->fds <= t.right.fds + 1 && o->blocks <= t.right.blocks + SPREAD : i > 1)
			return;
	}
}

static void run(const struct fault *f, struct outcome *o)
{
	struct daemon d;

	memset(o, 0, sizeof(*o));
	memset(t.map, 0, sizeof(*t.map)); /* an earlier process may have had the number */
	rm_tree(t.cache);
	unlink(t.mark);
	daemon_name(&d, t.name);
	spawn(&d, f);
	o->status = started(&d);
	if (o->status == -1) {
		kill(d.pid, SIGKILL);
		waitpid(d.pid, NULL, 0);
	}
	if (o->status == -2) {
		o->first = ask(&d, o->text, o->words);
		char words[200];
		double end = now_s() + 3; /* a worker that had to end comes back */
		do
			o->again = ask(&d, o->text_again, words);
		while (o->again && now_s() < end);
	}
	if (o->status == -2 && t.tracing) { /* the administrator's questions are the test's own */
		o->status = daemon_stop(&d);
	} else if (o->status == -2) {
		o->sessions_left = !status_becomes(&d, "sessions", 0) || !status_becomes(&d, "connections", 1);
		o->restarts = status_number(&d, "restarts");
		pid_t worker = (pid_t)status_number(&d, "worker_pid");
		(void)status_becomes(&d, "connections", 1);
		look_at(worker, o);
		o->status = daemon_stop(&d);
	} else if (o->status >= 0) {
		o->restarts = -1;
	}
	o->fired = access(t.mark, F_OK) == 0;
}

/* ---- what must come of it ---------------------------------------------------------------------- */

static const char *verdict(const struct fault *f, const struct outcome *o, const char *log)
{
	bool log_itself = !strcmp(f->kind, "write"); /* its one line may be what could not be written */

	if (strstr(log, "killed by signal"))
		return "the worker was killed by a signal";
	if (o->status == -1)
		return "neither ready nor ended, or no end when told to";
	if (o->restarts < 0) { /* never served */
		if (o->status != 1)
			return "the start failed, but not with status 1";
		return !log_itself && !strstr(log, "error: ") ? "the start failed without a word" : NULL;
	}
	if (o->status)
		return "served, but did not end with status 0";
	if (o->first == -ETIMEDOUT || o->first == -ETIME)
		return "the request was left hanging";
	if (o->first && !o->words[0])
		return "the request failed without a word";
	if (!o->first && strcmp(o->text, t.right.text) != 0)
		return "a wrong answer";
	if (o->again || strcmp(o->text_again, t.right.text) != 0)
		return "the next request was not served";
	if (o->restarts && !strstr(log, "warning: "))
		return "the worker ended without a word";
	if (o->sessions_left)
		return "a session or connection is left";
	if (!o->restarts && o->fds > t.right.fds + 1)
		return "descriptors are left";
	if (!o->restarts && o->blocks > t.right.blocks + SPREAD)
		return "memory is left";
	return NULL;
}

static void show(const struct fault *f, const struct outcome *o, const char *what, const char *log)
{
	fprintf(stderr, "APR_FAULT=%s:%llx:%llu (of %llu)%s\n  frames%s\n  %s: status %d, requests %d (%s), %d; restarts %ld, "
			"descriptors %u (%u), blocks %d (%d), bytes %lld (%lld)\n  log: %s\n",
		f->kind, (unsigned long long)f->stack, (unsigned long long)f->n, (unsigned long long)f->calls,
		o->fired ? "" : " (not reached)", f->where, what, o->status, o->first, o->words, o->again, o->restarts, o->fds,
		t.right.fds, o->blocks, t.right.blocks, (long long)o->bytes, (long long)t.right.bytes, log);
}

/* ---- all of them --------------------------------------------------------------------------------- */

static uint64_t calls_of(const struct fault_counts *c, uint64_t stack)
{
	for (uint32_t i = 0; i < FAULT_ROWS; i++) {
		const struct fault_row *r = &c->row[(stack + i) % FAULT_ROWS];
		if (r->stack == stack)
			return r->n;
		if (!r->stack)
			break;
	}
	return 0;
}

static void read_trace(void)
{
	int fd = open(t.counts, O_RDONLY | O_CLOEXEC);
	const struct fault_counts *c = mmap(NULL, sizeof(*c), PROT_READ, MAP_SHARED, fd, 0);
	char line[600];
	FILE *in = fopen(t.trace, "re");

	close(fd);
	CU_ASSERT_FATAL(in && c != MAP_FAILED);
	while (fgets(line, sizeof(line), in)) {
		struct fault f = { .n = 1 };
		unsigned long long stack;
		if (sscanf(line, "%47s %llx %299[^\n]", f.kind, &stack, f.where) < 2)
			continue;
		f.stack = stack;
		f.calls = calls_of(c, f.stack);
		t.all = realloc(t.all, (t.n + 1) * sizeof(*t.all));
		t.all[t.n++] = f;
	}
	fclose(in);
	munmap((void *)c, sizeof(*c));
}

/* Of job number `job`: its socket, its log, its cache. */
static void own_files(unsigned job)
{
	if (t.map)
		munmap(t.map, sizeof(*t.map));
	snprintf(t.name, sizeof(t.name), "fault%u", job);
	snprintf(t.heap, sizeof(t.heap), "%s/heap%u", apr_test_tmpdir(), job);
	snprintf(t.mark, sizeof(t.mark), "%s/mark%u", apr_test_tmpdir(), job);
	snprintf(t.cache, sizeof(t.cache), "%s/cache%u", apr_test_tmpdir(), job);
	fresh_file(t.heap, sizeof(struct fault_heap));
	int fd = open(t.heap, O_RDWR | O_CLOEXEC);
	t.map = mmap(NULL, sizeof(*t.map), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	CU_ASSERT_FATAL(t.map != MAP_FAILED);
}

static void nothing_fails(void)
{
	snprintf(t.inject, sizeof(t.inject), "%s", apr_test_program(TRACED));
	if (access(t.inject, R_OK))
		SKIP("the library to preload is not built here (sanitizers bring an allocator of their own)");
	snprintf(t.trace, sizeof(t.trace), "%s/trace", apr_test_tmpdir());
	snprintf(t.counts, sizeof(t.counts), "%s.counts", t.trace);
	snprintf(t.aprd, sizeof(t.aprd), "%s", apr_test_program("aprd"));
	(void)tiny_path();
	fresh_file(t.trace, 0);
	fresh_file(t.counts, sizeof(struct fault_counts));
	own_files(0);
	t.tracing = true;
	run(NULL, &t.right);
	CU_ASSERT_EQUAL_FATAL(t.right.status, 0);
	t.tracing = false;
	run(NULL, &t.right);
	CU_ASSERT_EQUAL_FATAL(t.right.status, 0);
	CU_ASSERT_EQUAL_FATAL(t.right.first, 0);
	CU_ASSERT_EQUAL_FATAL(t.right.again, 0);
	CU_ASSERT_FALSE(t.right.sessions_left);
	CU_ASSERT_TRUE(t.right.fds > 10);
	CU_ASSERT_TRUE(t.right.blocks > 10);
	read_trace();
	CU_ASSERT_TRUE(t.n > 200); /* or the library sees nothing */
}

static bool chosen(const struct fault *f, const char *how)
{
	return f->n <= 2 || f->n == f->calls || !strcmp(how, "full");
}

static bool one(const struct fault *f, uint32_t *fired, bool talk)
{
	struct outcome o;
	char log[160];

	run(f, &o);
	*fired += o.fired;
	snprintf(log, sizeof(log), "%s/%s.log", apr_test_tmpdir(), t.name);
	char *words = file_text(log);
	const char *bad = verdict(f, &o, words);
	if (bad || talk)
		show(f, &o, bad ? bad : "as it should be", words);
	free(words);
	return !bad;
}

struct sums {
	uint32_t tried, fired, bad;
};

/* What waits is not the processor: several jobs at once. */
static void job(unsigned number, const char *how, struct sums *sums)
{
	uint32_t turn = 0;

	own_files(number);
	for (size_t i = 0; i < t.n; i++) {
		for (t.all[i].n = 1; t.all[i].n <= t.all[i].calls; t.all[i].n++) {
			if (!chosen(&t.all[i], how) || turn++ % JOBS != number)
				continue;
			sums->bad += !one(&t.all[i], &sums->fired, false);
			sums->tried++;
		}
	}
}

static void each_call_fails_once(void)
{
	const char *how = getenv("APR_FAULT");
	struct sums *sums, all = { 0, 0, 0 };
	pid_t pid[JOBS];

	if (!t.n)
		SKIP("no trace");
	if (how && strchr(how, ':')) {
		struct fault f = { .calls = 1 };
		unsigned long long stack, n;
		CU_ASSERT_EQUAL_FATAL(sscanf(how, "%47[^:]:%llx:%llu", f.kind, &stack, &n), 3);
		f.stack = stack;
		f.n = n;
		CU_ASSERT_TRUE(one(&f, &all.fired, true));
		return;
	}
	sums = mmap(NULL, JOBS * sizeof(*sums), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CU_ASSERT_FATAL(sums != MAP_FAILED);
	fflush(NULL);
	for (unsigned i = 0; i < JOBS; i++) {
		pid[i] = fork();
		if (!pid[i]) {
			job(i, how ? how : "", &sums[i]);
			_exit(0);
		}
	}
	for (unsigned i = 0; i < JOBS; i++) {
		int status = -1;
		waitpid(pid[i], &status, 0);
		CU_ASSERT_EQUAL(status, 0);
		all.tried += sums[i].tried;
		all.fired += sums[i].fired;
		all.bad += sums[i].bad;
	}
	printf("%zu stacks, %u calls failed of %u tried ", t.n, all.fired, all.tried);
	CU_ASSERT_EQUAL(all.bad, 0);
	CU_ASSERT_TRUE(all.tried > 300);
	CU_ASSERT_TRUE(all.fired > all.tried * 3 / 4); /* threads vary; most are met */
	munmap(sums, JOBS * sizeof(*sums));
	munmap(t.map, sizeof(*t.map));
	free(t.all);
}

static const struct apr_test tests[] = {
	{ "nothing_fails", nothing_fails, KEEPS_HEAP }, /* the list and the map serve the other test */
	{ "each_call_fails_once", each_call_fails_once, KEEPS_HEAP }, /* and gives the list back */
};
TEST_MAIN("fault/fault", tests)
