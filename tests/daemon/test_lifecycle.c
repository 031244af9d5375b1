/* SPDX-License-Identifier: MIT */
/* Starting, ending, crashing: sockets and locks, signals, drain, notices, the log, threads, idleness. */
#include "tests/daemon/running.h"
#include <sched.h>
#include <sys/file.h>
#include <sys/resource.h>

static int exists(const char *path)
{
	struct stat st;

	return lstat(path, &st) == 0;
}

static void bad_model_ends_it_with_1(void)
{
	struct daemon d;
	char bad[160];
	const char *args[] = { "-m", bad, "-s", NULL, NULL };

	daemon_name(&d, "bad");
	args[3] = d.sock;
	snprintf(bad, sizeof(bad), "%s/none.gguf", apr_test_tmpdir());
	daemon_spawn(&d, args);
	CU_ASSERT_EQUAL(daemon_wait(&d, 10), 1);
	CU_ASSERT_TRUE(log_has(&d, "none.gguf"));
	char line[200]; /* the file, which names the model too: once */
	snprintf(line, sizeof(line), "aprd: error: %s: ", bad);
	CU_ASSERT_TRUE(log_has(&d, line));
	CU_ASSERT_FALSE(log_has(&d, "warning"));
	CU_ASSERT_FALSE(exists(d.sock));
	FILE *f = fopen(bad, "we");
	fputs("GGUF", f);
	fclose(f);
	daemon_spawn(&d, args);
	CU_ASSERT_EQUAL(daemon_wait(&d, 10), 1);
	/* one line, not a page */
	char *text = file_text(d.log);
	unsigned lines = 0;
	for (char *p = text; *p; p++)
		lines += *p == '\n';
	CU_ASSERT_EQUAL(lines, 1);
	free(text);
}

static void usage_is_2(void)
{
	static const char *const wrong[][6] = { { "--nonsense" },
						{ "-m" },
						{ "-c", "x", "-m", "a" },
						{ "-m", "a", "stray" },
						{ "-m", "a", "--poll", "sometimes" },
						{ "-m", "a", "--kv-mem", "12Q" },
						{ "-m", "a", "--gpu-mem", "101%" },
						{ NULL } };
	struct daemon d;

	for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		daemon_name(&d, "usage");
		daemon_spawn(&d, wrong[i]);
		CU_ASSERT_EQUAL(daemon_wait(&d, 10), 2);
	}
}

static void signals_without_a_meaning_are_ignored(void)
{
	struct daemon d;

	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "usr1", NULL));
	pid_t worker = (pid_t)status_number(&d, "worker_pid");
	kill(d.pid, SIGUSR1);
	kill(worker, SIGUSR1);
	kill(d.pid, SIGUSR2);
	kill(worker, SIGUSR2);
	sleep_ms(50);
	CU_ASSERT_TRUE(alive(&d));
	CU_ASSERT_EQUAL(status_number(&d, "worker_pid"), (long)worker);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void case20_kill_and_restart_at_once(void)
{
	struct daemon d;

	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "c20", NULL));
	for (int i = 0; i < 3; i++) {
		kill(d.pid, SIGKILL);
		waitpid(d.pid, NULL, 0);
		CU_ASSERT_TRUE(exists(d.sock));
		CU_ASSERT_TRUE_FATAL(daemon_start(&d, NULL, NULL));
		CU_ASSERT_TRUE(alive(&d));
	}
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
	CU_ASSERT_FALSE(exists(d.sock));
}

static void case20_second_instance_refuses(void)
{
	struct daemon d, second;

	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "c20b", NULL));
	second = d;
	snprintf(second.log, sizeof(second.log), "%s/second.log", apr_test_tmpdir());
	const char *args[] = { "-m", tiny_path(), "-s", d.sock, NULL };
	daemon_spawn(&second, args);
	CU_ASSERT_EQUAL(daemon_wait(&second, 10), 1);
	CU_ASSERT_TRUE(log_has(&second, "another aprd"));
	CU_ASSERT_TRUE(alive(&d));
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void case20_what_is_no_socket_stays(void)
{
	struct daemon d;
	struct stat st;
	char target[160];

	snprintf(target, sizeof(target), "%s/target", apr_test_tmpdir());
	for (int kind = 0; kind < 3; kind++) {
		daemon_name(&d, kind == 0 ? "file" : kind == 1 ? "link" : "folder");
		const char *args[] = { "-m", tiny_path(), "-s", d.sock, NULL };
		if (kind == 0)
			close(open(d.sock, O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
		else
			CU_ASSERT_EQUAL(kind == 1 ? symlink(target, d.sock) : mkdir(d.sock, 0700), 0);
		daemon_spawn(&d, args);
		CU_ASSERT_EQUAL(daemon_wait(&d, 10), 1);
		CU_ASSERT_EQUAL(lstat(d.sock, &st), 0);
		CU_ASSERT_FALSE(S_ISSOCK(st.st_mode));
		CU_ASSERT_TRUE(log_has(&d, "not a socket"));
		char lock[200];
		snprintf(lock, sizeof(lock), "%s.lock", d.sock);
		CU_ASSERT_FALSE(exists(lock));
	}
	CU_ASSERT_FALSE(exists(target));
}

static void a_missing_folder_is_named(void)
{
	struct daemon d;
	char sock[200], line[240];

	daemon_name(&d, "nofolder");
	snprintf(sock, sizeof(sock), "%s/none/x.sock", apr_test_tmpdir());
	daemon_spawn(&d, (const char *[]){ "-m", tiny_path(), "-s", sock, NULL });
	CU_ASSERT_EQUAL(daemon_wait(&d, 10), 1);
	snprintf(line, sizeof(line), "%s/none: no such folder", apr_test_tmpdir());
	CU_ASSERT_TRUE(log_has(&d, line));
	CU_ASSERT_FALSE(log_has(&d, ".lock"));
}

static void case20_two_start_together(void)
{
	for (int round = 0; round < 4; round++) {
		struct daemon a, b;
		daemon_name(&a, "together");
		b = a;
		snprintf(b.log, sizeof(b.log), "%s/together-b.log", apr_test_tmpdir());
		const char *args[] = { "-m", tiny_path(), "-s", a.sock, "-t", "1", NULL };
		daemon_spawn(&a, args);
		daemon_spawn(&b, args);
		int ra = daemon_ready(&a), rb = daemon_ready(&b);
		CU_ASSERT_EQUAL(ra + rb, 1);
		CU_ASSERT_TRUE(alive(&a));
		CU_ASSERT_EQUAL(daemon_stop(ra ? &a : &b), 0);
	}
}

/* A long generation is under way on h. */
static void start_long(struct hand *h, const struct daemon *d)
{
	struct {
		struct apr_param p;
		struct apr_sampling s;
	} par = { { APR_PARAM_SAMPLING, 0, sizeof(struct apr_sampling) },
		  { .set = APR_SET_IGNORE_EOS, .ignore_eos = 1 } };
	struct apr_sqe gen = { .op = APR_OP_GENERATE, .user_data = 1, .in_len = 4, .max_tokens = 1900 };
	struct apr_cqe e;

	int opened = hand_open(h, d, NULL);
	if (opened)
		fprintf(stderr, "  %s: hand_open: %d (%s)\n", d->sock, opened, h->why);
	CU_ASSERT_EQUAL_FATAL(opened, 0);
	gen.in_off = h->geo.req_arena_off;
	gen.par_off = gen.in_off + 64;
	gen.par_len = sizeof(par);
	memcpy((char *)h->req.base + gen.in_off, "long", 4);
	memcpy((char *)h->req.base + gen.par_off, &par, sizeof(par));
	hand_submit(h, &gen);
	CU_ASSERT_EQUAL(hand_next(h, &e, 10000), 0);
}

static void case21_drain_tells_why(void)
{
	struct daemon d;
	struct hand h;
	struct apr_cqe last = { 0 };
	char config[160];

	snprintf(config, sizeof(config), "%s/drain.conf", apr_test_tmpdir());
	FILE *f = fopen(config, "we");
	fputs("drain-ms = 100\n", f);
	fclose(f);
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "c21", "--config", config, NULL));
	start_long(&h, &d);
	/* nobody reads: it parks, so it cannot end by itself */
	double began = now_s();
	kill(d.pid, SIGTERM);
	int status = daemon_wait(&d, 5);
	CU_ASSERT_EQUAL(status, 0);
	CU_ASSERT_TRUE(now_s() - began < 2.5);
	CU_ASSERT_EQUAL(hand_finish(&h, 1, &last, NULL, 1000), -ESHUTDOWN);
	CU_ASSERT_EQUAL(APR_AUX_REASON(last.aux), APR_FINISH_DRAINED);
	const struct apr_res_hdr *hdr = h.res.base;
	CU_ASSERT_TRUE(hdr->flags & APR_RES_DEAD);
	CU_ASSERT_EQUAL(hdr->reason, APR_REASON_SHUTDOWN);
	CU_ASSERT_FALSE(exists(d.sock));
	hand_close(&h);
}

static void case21_drain_lets_it_finish(void)
{
	struct daemon d;
	struct hand h;
	unsigned tokens = 1;
	char config[160];

	/* time enough for 1,900 tokens under a sanitizer beside other suites */
	snprintf(config, sizeof(config), "%s/patient.conf", apr_test_tmpdir());
	FILE *f = fopen(config, "we");
	fputs("drain-ms = 60000\n", f);
	fclose(f);
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "c21b", "--config", config, NULL));
	start_long(&h, &d);
	kill(d.pid, SIGTERM);
	CU_ASSERT_EQUAL(hand_finish(&h, 1, NULL, &tokens, 60000), 0);
	CU_ASSERT_EQUAL(tokens, 1900);
	CU_ASSERT_EQUAL(daemon_wait(&d, 5), 0);
	hand_close(&h);
}

/* The socket is asked as a client and as the administrator, while a request is still running. */
static void case21_status_while_draining(void)
{
	struct daemon d;
	struct hand h, late;
	struct apr_frame ask = { APR_FRAME_MAGIC, APR_FRAME_STATUS, 0, sizeof(ask), 0 };
	char buf[4096];

	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "c21d", NULL));
	start_long(&h, &d); /* parks for want of a reader: the drain lasts */
	kill(d.pid, SIGTERM);
	sleep_ms(100);
	for (int i = 0; i < 3; i++) {
		double began = now_s();
		json_t *j = status_of(&d);
		CU_ASSERT_TRUE(now_s() - began < 0.5);
		const char *state = json_string_value(json_object_get(j, "state"));
		CU_ASSERT_TRUE(state && !strcmp(state, "draining"));
		json_decref(j);

		int sock = hand_socket(&d);
		CU_ASSERT_TRUE_FATAL(sock >= 0);
		CU_ASSERT_EQUAL(send(sock, &ask, sizeof(ask), MSG_NOSIGNAL), (ssize_t)sizeof(ask));
		int n = hand_recv(sock, buf, sizeof(buf) - 1, NULL, 500);
		CU_ASSERT_TRUE_FATAL(n > (int)sizeof(ask));
		buf[n] = '\0';
		CU_ASSERT_PTR_NOT_NULL(strstr(buf + sizeof(ask), "draining"));
		close(sock);

		began = now_s();
		CU_ASSERT_EQUAL(hand_open(&late, &d, NULL), -ESHUTDOWN);
		CU_ASSERT_TRUE(now_s() - began < 0.5);
		hand_close(&late);
	}
	kill(d.pid, SIGTERM);
	CU_ASSERT_EQUAL(daemon_wait(&d, 5), 0);
	hand_close(&h);
}

static void case21_second_sigterm_is_now(void)
{
	struct daemon d;
	struct hand h;

	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "c21c", NULL));
	start_long(&h, &d); /* parks for want of a reader */
	double began = now_s();
	kill(d.pid, SIGTERM);
	sleep_ms(100);
	CU_ASSERT_EQUAL(kill(d.pid, 0), 0);
	kill(d.pid, SIGTERM);
	CU_ASSERT_EQUAL(daemon_wait(&d, 5), 0);
	CU_ASSERT_TRUE(now_s() - began < 3); /* the drain's own 5 s were not waited for */
	CU_ASSERT_FALSE(exists(d.sock));
	hand_close(&h);
}

static void case46_worker_dies_another_comes(void)
{
	struct daemon d;
	struct hand h[20];

	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "c46", NULL));
	pid_t worker = (pid_t)status_number(&d, "worker_pid");
	for (int i = 0; i < 20; i++)
		CU_ASSERT_EQUAL(hand_open(&h[i], &d, NULL), 0);
	kill(worker, SIGKILL);
	double began = now_s();
	for (int i = 0; i < 20; i++)
		CU_ASSERT_TRUE(hand_ended(&h[i], 1000));
	CU_ASSERT_TRUE(now_s() - began < 1);
	for (int i = 0; i < 20; i++)
		hand_close(&h[i]);
	CU_ASSERT_TRUE(alive(&d)); /* waits in the backlog until the new one welcomes it */
	CU_ASSERT_NOT_EQUAL(status_number(&d, "worker_pid"), (long)worker);
	CU_ASSERT_EQUAL(status_number(&d, "restarts"), 1);
	CU_ASSERT_EQUAL(status_number(&d, "pid"), (long)d.pid);
	/* aprd goes on: a warning, not an error; what is as it should be is neither */
	CU_ASSERT_TRUE(log_has(&d, "aprd: warning: the worker was killed by signal 9"));
	CU_ASSERT_TRUE(log_has(&d, "aprd: ready on"));
	CU_ASSERT_FALSE(log_has(&d, "error: "));
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

/* A model that a restart does not find again: degraded, and status says why. */
static void degraded_says_why(void)
{
	struct daemon d;
	char two[200];
	struct tiny_spec spec = { .n_embd = 64, .n_ff = 128, .n_heads = 2, .n_kv_heads = 1, .head_dim = 32, .seed = 9 };

	snprintf(two, sizeof(two), "%s/goes.gguf", apr_test_tmpdir());
	CU_ASSERT_EQUAL_FATAL(apr_test_write_tiny_model(two, &spec), 0);
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "why", "-m", two, NULL));
	json_t *j = status_of(&d);
	CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(j, "state_why")), "");
	json_decref(j);
	unlink(two);
	kill((pid_t)status_number(&d, "worker_pid"), SIGKILL);
	CU_ASSERT_TRUE(status_becomes(&d, "restarts", 1));
	CU_ASSERT_TRUE(alive(&d)); /* welcomed: all were tried */
	j = status_of(&d);
	const char *why = json_string_value(json_object_get(j, "state_why"));
	CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(j, "state")), "degraded");
	CU_ASSERT_PTR_NOT_NULL_FATAL(why);
	CU_ASSERT_PTR_NOT_NULL(strstr(why, "restart 1"));
	CU_ASSERT_PTR_NOT_NULL(strstr(why, "goes.gguf"));
	json_decref(j);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

/*
 * Shared memory runs out: what is behind a memfd has no size to set here, so a limit
 * on file sizes stands in for the full tmpfs: the same fallocate fails, and where sizes
 * were only announced (ftruncate) the limit would be met as late as the first touch.
 */
static void case25_full_shared_memory_is_refused(void)
{
	struct daemon d;
	struct rlimit was, small = { 512 << 10, 512 << 10 };
	struct apr_hello big = hand_hello(), bigger = hand_hello();
	struct hand h;

	CU_ASSERT_EQUAL_FATAL(getrlimit(RLIMIT_FSIZE, &was), 0);
	small.rlim_max = was.rlim_max;
	big.req_size = 1 << 20;
	bigger.res_size = 8 << 20;
	/* inherited; SIGXFSZ is left as it is: aprd must see to that itself */
	CU_ASSERT_EQUAL_FATAL(setrlimit(RLIMIT_FSIZE, &small), 0);
	int up = daemon_start(&d, "c25", NULL);
	CU_ASSERT_EQUAL(setrlimit(RLIMIT_FSIZE, &was), 0);
	CU_ASSERT_TRUE_FATAL(up);
	unsigned fds = 0;
	pid_t worker = (pid_t)status_number(&d, "worker_pid");
	for (int i = 0; i < 50; i++) {
		int e = hand_open(&h, &d, i % 2 ? &big : &bigger);
		CU_ASSERT_EQUAL(e, -ENOSPC);
		CU_ASSERT_PTR_NOT_NULL(strstr(h.why, "no room"));
		hand_close(&h);
		if (e != -ENOSPC)
			break;
		if (i == 9) {
			CU_ASSERT_TRUE(status_becomes(&d, "connections", 1));
			fds = descriptors_of(worker);
		}
	}
	CU_ASSERT_TRUE(alive(&d)); /* what fits is served */
	CU_ASSERT_TRUE(status_becomes(&d, "sessions", 0));
	CU_ASSERT_TRUE(status_becomes(&d, "connections", 1));
	for (int i = 0; i < 100 && descriptors_of(worker) > fds; i++)
		sleep_ms(20);
	CU_ASSERT_TRUE(descriptors_of(worker) <= fds + 4); /* nothing half made is left */
	CU_ASSERT_EQUAL(status_number(&d, "restarts"), 0);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

/* NVML is for display: where it is wrong or absent everything is served (the device's own part is tests/cuda's). */
static void case38_nvml_wrong_or_absent(void)
{
	char dir[160], path[200];
	struct daemon d;

	snprintf(dir, sizeof(dir), "%s/nvml", apr_test_tmpdir());
	CU_ASSERT_EQUAL(mkdir(dir, 0700), 0);
	snprintf(path, sizeof(path), "%s/libnvidia-ml.so.1", dir);
	const char *was = getenv("LD_LIBRARY_PATH");
	char *kept = was ? strdup(was) : NULL;
	for (int wrong = 0; wrong < 2; wrong++) {
		if (wrong) {
			FILE *f = fopen(path, "we");
			fputs("not a library\n", f);
			fclose(f);
		}
		setenv("LD_LIBRARY_PATH", dir, 1);
		int up = daemon_start(&d, "c38", "-b", "cpu", NULL);
		if (kept)
			setenv("LD_LIBRARY_PATH", kept, 1);
		else
			unsetenv("LD_LIBRARY_PATH");
		CU_ASSERT_TRUE_FATAL(up);
		CU_ASSERT_TRUE(alive(&d));
		json_t *j = status_of(&d);
		const char *device = json_string_value(json_object_get(json_object_get(j, "backend"), "device"));
		CU_ASSERT_TRUE(device && *device);
		json_decref(j);
		CU_ASSERT_EQUAL(daemon_stop(&d), 0);
	}
	free(kept);
}

static void ready_and_stopping_are_told(void)
{
	struct daemon d;
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	char buf[300];
	ssize_t n;

	snprintf(a.sun_path, sizeof(a.sun_path), "%s/notify", apr_test_tmpdir());
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	CU_ASSERT_EQUAL(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
	setenv("NOTIFY_SOCKET", a.sun_path, 1);
	CU_ASSERT_TRUE(daemon_start(&d, "notify", NULL));
	unsetenv("NOTIFY_SOCKET");
	unsigned percent = 0, last = 0;
	while ((n = recv(fd, buf, sizeof(buf) - 1, MSG_DONTWAIT)) > 0) { /* how far loading is comes first */
		buf[n] = 0;
		if (sscanf(buf, "STATUS=Loading models: %u %%", &percent) != 1)
			break;
		CU_ASSERT_TRUE(percent > last && percent <= 100);
		last = percent;
	}
	CU_ASSERT_EQUAL(last, 100);
	CU_ASSERT_TRUE(n > 8 && !memcmp(buf, "READY=1\n", 8));
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
	n = recv(fd, buf, sizeof(buf), MSG_DONTWAIT);
	CU_ASSERT_TRUE(n > 11 && !memcmp(buf, "STOPPING=1\n", 11));
	close(fd);
}

/* Signs of life come while both threads answer, and none comes from a worker that is stopped. */
static void the_watchdog_is_fed_by_the_worker(void)
{
	struct daemon d;
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	char buf[300];
	int beats = 0;

	snprintf(a.sun_path, sizeof(a.sun_path), "%s/watchdog", apr_test_tmpdir());
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	CU_ASSERT_EQUAL(bind(fd, (struct sockaddr *)&a, sizeof(a)), 0);
	setenv("NOTIFY_SOCKET", a.sun_path, 1);
	setenv("WATCHDOG_USEC", "40000", 1);
	CU_ASSERT_TRUE(daemon_start(&d, "watchdog", NULL));
	unsetenv("NOTIFY_SOCKET");
	unsetenv("WATCHDOG_USEC");
	for (uint64_t end = apr_now_ns() + UINT64_C(5000000000); beats < 3 && apr_now_ns() < end;) {
		ssize_t n = recv(fd, buf, sizeof(buf) - 1, MSG_DONTWAIT);
		if (n < 0)
			usleep(2000);
		else
			beats += !strncmp(buf, "WATCHDOG=1", 10);
	}
	CU_ASSERT_EQUAL(beats, 3);
	pid_t worker = (pid_t)status_number(&d, "worker_pid");
	CU_ASSERT_TRUE_FATAL(worker > 0);
	kill(worker, SIGSTOP);
	usleep(50000); /* what was on its way */
	while (recv(fd, buf, sizeof(buf), MSG_DONTWAIT) > 0)
		;
	usleep(150000);
	CU_ASSERT_EQUAL(recv(fd, buf, sizeof(buf), MSG_DONTWAIT), -1);
	kill(worker, SIGCONT);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
	close(fd);
}

struct handed {
	int fd;
	char path[108];
};

static void hand_over(struct handed *h, const char *name, int type, mode_t mode)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };

	snprintf(h->path, sizeof(h->path), "%s/%s", apr_test_tmpdir(), name);
	memcpy(a.sun_path, h->path, sizeof(a.sun_path) - 1);
	h->fd = socket(AF_UNIX, type | SOCK_CLOEXEC, 0);
	CU_ASSERT_EQUAL(bind(h->fd, (struct sockaddr *)&a, sizeof(a)), 0);
	CU_ASSERT_EQUAL(chmod(h->path, mode), 0);
	CU_ASSERT_EQUAL(listen(h->fd, 16), 0);
}

/* aprd with descriptors 3 and on, as systemd starts it; LISTEN_PID is the started process's own. */
static pid_t start_handed(const struct handed *h, int n, const char *model, const char *log)
{
	pid_t pid = fork();

	if (pid)
		return pid;
	char number[24];
	for (int i = 0; i < n; i++)
		fcntl(h[i].fd, F_DUPFD, 100 + i); /* out of the way of 3 and on */
	for (int i = 0; i < n; i++)
		dup2(100 + i, 3 + i);
	int out = open(log, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
	dup2(out, 2);
	snprintf(number, sizeof(number), "%d", (int)getpid());
	setenv("LISTEN_PID", number, 1);
	snprintf(number, sizeof(number), "%d", n);
	setenv("LISTEN_FDS", number, 1);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	execl(apr_test_program("aprd"), "aprd", "-b", "cpu", "-m", model, (char *)NULL);
	_exit(127);
}

static void sockets_are_taken_over(void)
{
	struct handed h[2], bad;
	struct daemon d;
	struct hand hand;
	struct stat before, after;
	char log[200];
	int status = -1;

	daemon_name(&d, "handed");
	hand_over(&h[0], "aprd.sock", SOCK_SEQPACKET, 0660);
	hand_over(&h[1], "admin.sock", SOCK_SEQPACKET, 0600);
	CU_ASSERT_EQUAL(stat(h[0].path, &before), 0);
	snprintf(log, sizeof(log), "%s/handed.log", apr_test_tmpdir());
	pid_t pid = start_handed(h, 2, tiny_path(), log);
	snprintf(d.sock, sizeof(d.sock), "%s", h[0].path);
	struct apr_hello hello = hand_hello();
	/* the backlog holds the first client until the model is loaded */
	CU_ASSERT_EQUAL(hand_open(&hand, &d, &hello), 0);
	hand_close(&hand);
	kill(pid, SIGTERM);
	CU_ASSERT_EQUAL(waitpid(pid, &status, 0), pid);
	CU_ASSERT_TRUE(WIFEXITED(status) && !WEXITSTATUS(status));
	/* whoever made the paths keeps them */
	CU_ASSERT_EQUAL(stat(h[0].path, &after), 0);
	CU_ASSERT_EQUAL(before.st_ino, after.st_ino);
	CU_ASSERT_EQUAL(access(h[1].path, F_OK), 0);

	/* an admin socket that others may open is refused */
	CU_ASSERT_EQUAL(chmod(h[1].path, 0660), 0);
	pid = start_handed(h, 2, tiny_path(), log);
	CU_ASSERT_EQUAL(waitpid(pid, &status, 0), pid);
	CU_ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1);
	close(h[0].fd);
	close(h[1].fd);

	hand_over(&bad, "stream.sock", SOCK_STREAM, 0600);
	pid = start_handed(&bad, 1, tiny_path(), log);
	CU_ASSERT_EQUAL(waitpid(pid, &status, 0), pid);
	CU_ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 1);
	char *text = file_text(log);
	CU_ASSERT_PTR_NOT_NULL(strstr(text, "SOCK_SEQPACKET"));
	free(text);
	close(bad.fd);
}

/* Tokens, while every line of the log has nowhere to go. */
static void speak(struct daemon *d, int expect_exit)
{
	char err[100];

	CU_ASSERT_TRUE(status_becomes(d, "sessions", 0));
	CU_ASSERT_EQUAL(admin(d, APR_FRAME_LOG, "{\"level\":\"debug\"}", NULL, err, sizeof(err)), 0);
	for (int i = 0; i < 50; i++) {
		struct hand h;
		struct apr_hello bad = hand_hello();
		bad.major = 99;
		CU_ASSERT_EQUAL(hand_open(&h, d, &bad), -EPROTONOSUPPORT);
		hand_close(&h);
	}
	struct hand h;
	start_long(&h, d);
	CU_ASSERT_EQUAL(hand_finish(&h, 1, NULL, NULL, 60000), 0);
	hand_close(&h);
	CU_ASSERT_EQUAL(daemon_stop(d), expect_exit);
}

static int wait_socket(struct daemon *d)
{
	for (int i = 0; i < 1000; i++) {
		if (status_number(d, "pid") > 0)
			return 1;
		sleep_ms(10);
	}
	return 0;
}

static void case37_stderr_closed_full_or_unread(void)
{
	struct daemon d;

	for (int kind = 0; kind < 3; kind++) {
		int fds[2] = { -1, -1 };
		daemon_name(&d, "c37");
		const char *args[] = { "-m", tiny_path(), "-s", d.sock, "-t", "1", "-v", NULL };
		if (kind == 0) { /* a pipe that nobody reads, full */
			CU_ASSERT_EQUAL(pipe2(fds, O_CLOEXEC), 0);
			fcntl(fds[1], F_SETFL, O_NONBLOCK);
			char block[4096];
			memset(block, 0, sizeof(block));
			while (write(fds[1], block, sizeof(block)) > 0)
				;
			fcntl(fds[1], F_SETFL, 0);
			d.stderr_fd = fds[1];
		} else if (kind == 1) { /* a pipe whose reader is gone */
			CU_ASSERT_EQUAL(pipe2(fds, O_CLOEXEC), 0);
			close(fds[0]);
			fds[0] = -1;
			d.stderr_fd = fds[1];
		} else { /* a full disk */
			d.stderr_fd = fds[1] = open("/dev/full", O_WRONLY | O_CLOEXEC);
		}
		daemon_spawn(&d, args);
		CU_ASSERT_TRUE(wait_socket(&d));
		speak(&d, 0);
		if (fds[0] >= 0)
			close(fds[0]);
		close(fds[1]);
	}
}

static void case22_log_is_rate_limited(void)
{
	struct daemon d;

	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "c22", NULL));
	for (int i = 0; i < 200; i++) {
		struct hand h;
		struct apr_hello bad = hand_hello();
		bad.major = 99;
		CU_ASSERT_EQUAL(hand_open(&h, &d, &bad), -EPROTONOSUPPORT);
		CU_ASSERT_PTR_NOT_NULL(strstr(h.why, "version"));
		hand_close(&h);
	}
	char *text = file_text(d.log);
	unsigned lines = 0;
	for (char *p = text; *p; p++)
		lines += *p == '\n';
	CU_ASSERT_TRUE(lines < 25);
	free(text);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void case39_threads_follow_affinity(void)
{
	struct daemon d;
	cpu_set_t old, one;

	sched_getaffinity(0, sizeof(old), &old);
	CPU_ZERO(&one);
	for (int i = 0; i < CPU_SETSIZE; i++) {
		if (CPU_ISSET(i, &old)) {
			CPU_SET(i, &one);
			break;
		}
	}
	daemon_name(&d, "c39");
	const char *args[] = { "-m", tiny_path(), "-s", d.sock, NULL };
	sched_setaffinity(0, sizeof(one), &one);
	daemon_spawn(&d, args);
	CU_ASSERT_TRUE(daemon_ready(&d));
	sched_setaffinity(0, sizeof(old), &old);
	CU_ASSERT_EQUAL(status_number(&d, "threads.usable_cpus"), 1);
	CU_ASSERT_EQUAL(status_number(&d, "threads.compute"), 1);
	CU_ASSERT_EQUAL(status_number(&d, "polling.poll_us"), 0);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static double cpu_of(pid_t pid)
{
	char path[64], *text, *p;
	unsigned long user = 0, sys = 0;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	text = file_text(path);
	p = strrchr(text, ')');
	if (p)
		sscanf(p, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &sys);
	free(text);
	return (double)(user + sys) / (double)sysconf(_SC_CLK_TCK);
}

static void case40_idle_costs_nothing(void)
{
	struct daemon d;
	struct hand h;

	/* polling on, a session connected: the most that idleness could cost. 5 s stand for a minute */
	CU_ASSERT_TRUE_FATAL(daemon_start(&d, "c40", "--poll", "always", NULL));
	start_long(&h, &d);
	CU_ASSERT_EQUAL(hand_finish(&h, 1, NULL, NULL, 60000), 0);
	pid_t worker = (pid_t)status_number(&d, "worker_pid");
	sleep_ms(300);
	double before = cpu_of(worker) + cpu_of(d.pid);
	sleep_ms(5000);
	CU_ASSERT_TRUE(cpu_of(worker) + cpu_of(d.pid) - before <= 0.021);
	hand_close(&h);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void both_loops_serve(void)
{
	static const char *const loops[] = { "epoll", "io_uring" };
	struct daemon d;

	for (int i = 0; i < 2; i++) {
		struct hand h;
		daemon_name(&d, loops[i]);
		strcpy(d.env_loop, loops[i]);
		CU_ASSERT_TRUE_FATAL(daemon_start(&d, NULL, NULL));
		json_t *j = status_of(&d);
		const char *name = json_string_value(json_object_get(json_object_get(j, "loop"), "name"));
		const char *why = json_string_value(json_object_get(json_object_get(j, "loop"), "why"));
		CU_ASSERT_PTR_NOT_NULL_FATAL(name);
		if (i == 0)
			CU_ASSERT_STRING_EQUAL(name, "epoll");
		/* where io_uring is not to be had, epoll, and a reason */
		CU_ASSERT_TRUE(!strcmp(name, loops[i]) || (why && *why));
		json_decref(j);
		start_long(&h, &d);
		CU_ASSERT_EQUAL(hand_finish(&h, 1, NULL, NULL, 60000), 0);
		hand_close(&h);
		CU_ASSERT_TRUE(status_becomes(&d, "sessions", 0));
		CU_ASSERT_EQUAL(daemon_stop(&d), 0);
	}
}

static const struct apr_test tests[] = {
	{ "bad_model_ends_it_with_1", bad_model_ends_it_with_1, KEEPS_HEAP }, /* stdio and paths are warmed */
	{ "usage_is_2", usage_is_2, 0 },
	{ "signals_without_a_meaning_are_ignored", signals_without_a_meaning_are_ignored, 0 },
	{ "case20_kill_and_restart_at_once", case20_kill_and_restart_at_once, KEEPS_HEAP },
	{ "case20_second_instance_refuses", case20_second_instance_refuses, 0 },
	{ "case20_what_is_no_socket_stays", case20_what_is_no_socket_stays, 0 },
	{ "a_missing_folder_is_named", a_missing_folder_is_named, 0 },
	{ "case20_two_start_together", case20_two_start_together, 0 },
	{ "case21_drain_tells_why", case21_drain_tells_why, 0 },
	{ "case21_drain_lets_it_finish", case21_drain_lets_it_finish, 0 },
	{ "case21_status_while_draining", case21_status_while_draining, 0 },
	{ "case21_second_sigterm_is_now", case21_second_sigterm_is_now, 0 },
	{ "case22_log_is_rate_limited", case22_log_is_rate_limited, 0 },
	{ "case37_stderr_closed_full_or_unread", case37_stderr_closed_full_or_unread, 0 },
	{ "case39_threads_follow_affinity", case39_threads_follow_affinity, 0 },
	{ "case40_idle_costs_nothing", case40_idle_costs_nothing, 0 },
	{ "case46_worker_dies_another_comes", case46_worker_dies_another_comes, 0 },
	{ "degraded_says_why", degraded_says_why, 0 },
	{ "case25_full_shared_memory_is_refused", case25_full_shared_memory_is_refused, 0 },
	{ "case38_nvml_wrong_or_absent", case38_nvml_wrong_or_absent, KEEPS_HEAP }, /* setenv */
	{ "the_watchdog_is_fed_by_the_worker", the_watchdog_is_fed_by_the_worker, KEEPS_HEAP },
	{ "sockets_are_taken_over", sockets_are_taken_over, KEEPS_HEAP },
	{ "ready_and_stopping_are_told", ready_and_stopping_are_told, KEEPS_HEAP }, /* setenv */
	{ "both_loops_serve", both_loops_serve, 0 },
};

TEST_MAIN("daemon/lifecycle", tests)
