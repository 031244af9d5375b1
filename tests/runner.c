/* SPDX-License-Identifier: MIT */
/*
 * Runs test programs: a process each, a few at a time, with a time limit.
 *
 * Owns: the time limit, killing a hung suite with all it started, keeping each
 * suite's output together, the closing counts of tests and of suites and, last of
 * all, what failed: whoever sees only a log's end sees that. Does not own what a suite checks.
 * Exit status of a suite: 0 passed, 77 all of it skipped (counted, said),
 * anything else failed.
 *
 *   runner [-a] [-j JOBS] [-t SECONDS] PROGRAM...
 *   -a: a suite that failed beside others is run again, alone, when they are done. What passes then is
 *       counted as passed and named as shaky, with what it said the first time: it is to be mended, but a
 *       machine that stood still for a second is no reason to throw a change away.
 *   APR_TEST_TIMEOUT overrides the limit of 900 s, which only a hang exceeds.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_JOBS 16
#define SHOWN_AGAIN 12 /* lines a failed suite gets at the end */

struct job {
	const char *program;
	pid_t pid; /* 0 = free */
	FILE *out; /* what it prints, shown whole when it ends */
	double began;
};

struct tally {
	unsigned passed, failed, skipped;
};

struct tallies {
	struct tally suites, tests; /* tests: as the suites' closing lines count them */
	unsigned uncounted;         /* suites that ended without such a line */
	FILE *failures;             /* what is said again at the end */
	const char **again;         /* suites to be run once more, alone; NULL without -a */
	unsigned n_again, shaky;
};

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static int start(struct job *j, const char *program)
{
	*j = (struct job){.program = program, .out = tmpfile(), .began = now()};
	if (!j->out)
		return -errno;
	j->pid = fork();
	if (j->pid == 0) {
		setpgid(0, 0);
		dup2(fileno(j->out), 1);
		dup2(fileno(j->out), 2);
		fclose(j->out);
		execl(program, program, (char *)NULL);
		fprintf(stderr, "runner: %s: %s\n", program, strerror(errno));
		_exit(126);
	}
	if (j->pid < 0) {
		fclose(j->out);
		j->pid = 0;
		return -errno;
	}
	return 0;
}

static void show_output(FILE *out)
{
	char buf[4096], last = '\n';
	size_t n;

	rewind(out);
	while ((n = fread(buf, 1, sizeof buf, out)) > 0) {
		fwrite(buf, 1, n, stdout);
		last = buf[n - 1];
	}
	if (last != '\n')
		putchar('\n');
}

/* "folder/name: P passed, F failed, S skipped", alone on its line. */
static int read_closing(const char *line, struct tally *t)
{
	const char *rest = strstr(line, ": ");
	int end = 0;

	return rest && !memchr(line, ' ', (size_t)(rest - line)) &&
	       sscanf(rest, ": %u passed, %u failed, %u skipped%n", &t->passed, &t->failed, &t->skipped, &end) == 3 &&
	       end && !strcmp(rest + end, "\n");
}

/* Adds what the suite's last closing line says; a suite that died has none. */
static void count_tests(FILE *out, struct tallies *all)
{
	struct tally seen, last = {0};
	int found = 0;
	char *line = NULL;
	size_t cap = 0;

	rewind(out);
	while (getline(&line, &cap, out) > 0)
		if (read_closing(line, &seen)) {
			last = seen;
			found = 1;
		}
	free(line);
	all->tests.passed += last.passed;
	all->tests.failed += last.failed;
	all->tests.skipped += last.skipped;
	all->uncounted += !found;
}

/* CUnit's "Test: name ...FAILED", its numbered assertions below, a sanitizer's summary. */
static int tells_failure(const char *line)
{
	const char *c = line + strspn(line, " ");
	size_t digits = strspn(c, "0123456789");

	return strstr(line, "FAILED") || strstr(line, "SUMMARY: ") || strstr(line, "runtime error: ") ||
	       (c != line && digits && !strncmp(c + digits, ". ", 2));
}

/* Keeps the lines of a failed suite that say why. */
static void keep_failure(const char *program, FILE *out, FILE *to)
{
	char *line = NULL;
	size_t cap = 0;
	int n = 0;

	fprintf(to, "-- %s\n", program);
	rewind(out);
	while (getline(&line, &cap, out) > 0)
		if (tells_failure(line) && ++n <= SHOWN_AGAIN)
			fputs(line, to);
	free(line);
	if (n > SHOWN_AGAIN)
		fprintf(to, "   and %d lines more above\n", n - SHOWN_AGAIN);
}

static void show_failures(const struct tallies *t)
{
	if (t->shaky)
		printf("%u shaky: failed beside others, passed alone\n", t->shaky);
	if (!t->suites.failed && !t->shaky)
		return;
	puts("failed:");
	show_output(t->failures);
}

static void finish(struct job *j, int status, int timed_out, struct tallies *all)
{
	struct tally *t = &all->suites;
	const char *verdict = "passed";

	kill(-j->pid, SIGKILL); /* what a suite left running does not outlive it */
	if (!timed_out && status == 0) {
		t->passed++;
	} else if (!timed_out && WIFEXITED(status) && WEXITSTATUS(status) == 77) {
		t->skipped++;
		verdict = "SKIPPED";
	} else {
		t->failed++;
		verdict = timed_out ? "FAILED (timeout)" : "FAILED";
	}
	show_output(j->out);
	if (verdict[0] == 'F')
		keep_failure(j->program, j->out, all->failures);
	if (verdict[0] == 'F' && all->again) {
		t->failed--; /* not yet */
		all->again[all->n_again++] = j->program;
	} else {
		count_tests(j->out, all);
	}
	fclose(j->out);
	printf("== %s: %s in %.1f s\n", j->program, verdict, now() - j->began);
	if (!timed_out && WIFSIGNALED(status))
		printf("   killed by signal %d (%s)\n", WTERMSIG(status), strsignal(WTERMSIG(status)));
	j->pid = 0;
}

/* Looks once at every running job; those that ended or hang are finished. */
static void look(struct job *jobs, unsigned n, double limit, struct tallies *t)
{
	for (unsigned i = 0; i < n; i++) {
		int status = 0, timed_out = 0;
		pid_t got;

		if (!jobs[i].pid)
			continue;
		got = waitpid(jobs[i].pid, &status, WNOHANG);
		if (got == 0 && now() - jobs[i].began > limit) {
			kill(-jobs[i].pid, SIGKILL);
			waitpid(jobs[i].pid, &status, 0);
			timed_out = 1;
		} else if (got != jobs[i].pid) {
			continue;
		}
		finish(&jobs[i], status, timed_out, t);
	}
}

static struct job *free_job(struct job *jobs, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		if (!jobs[i].pid)
			return &jobs[i];
	return NULL;
}

/* A second try of those that failed, one after the other. */
static void run_again(double limit, struct tallies *t)
{
	const char **again = t->again;
	unsigned n = t->n_again, i;

	t->again = NULL; /* what fails now has failed */
	for (i = 0; i < n; i++) {
		unsigned failed = t->suites.failed;
		struct job j = {0};

		printf("== %s: again, alone\n", again[i]);
		if (start(&j, again[i]))
			t->suites.failed++;
		while (j.pid) {
			look(&j, 1, limit, t);
			nanosleep(&(struct timespec){0, 5000000}, NULL);
		}
		if (failed == t->suites.failed)
			t->shaky++;
	}
	free(again);
}

static int any_running(const struct job *jobs, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		if (jobs[i].pid)
			return 1;
	return 0;
}

int main(int argc, char **argv)
{
	const char *env = getenv("APR_TEST_TIMEOUT");
	double limit = env ? atof(env) : 900, began = now();
	struct job jobs[MAX_JOBS] = {{0}};
	struct tallies t = {0};
	int n = 1, again = 0, opt;

	while ((opt = getopt(argc, argv, "aj:t:")) != -1) {
		if (opt == 'a')
			again = 1;
		else if (opt == 'j')
			n = atoi(optarg);
		else if (opt == 't')
			limit = atof(optarg);
		else
			return 2;
	}
	if (n < 1 || n > MAX_JOBS || limit <= 0) {
		fprintf(stderr, "usage: runner [-a] [-j 1..%d] [-t SECONDS] PROGRAM...\n", MAX_JOBS);
		return 2;
	}
	t.failures = tmpfile();
	t.again = again ? calloc((size_t)argc, sizeof *t.again) : NULL;
	if (!t.failures || (again && !t.again)) {
		perror("runner");
		return 1;
	}
	setvbuf(stdout, NULL, _IOLBF, 1024);
	while (optind < argc || any_running(jobs, (unsigned)n)) {
		struct job *j = optind < argc ? free_job(jobs, (unsigned)n) : NULL;

		if (j && start(j, argv[optind++])) {
			printf("== %s: FAILED: cannot start it\n", j->program);
			fprintf(t.failures, "-- %s: cannot start it\n", j->program);
			t.suites.failed++;
			t.uncounted++;
		}
		look(jobs, (unsigned)n, limit, &t);
		nanosleep(&(struct timespec){0, 5000000}, NULL);
	}
	if (t.again)
		run_again(limit, &t);
	printf("tests in the suites: %u passed, %u failed, %u skipped\n", t.tests.passed, t.tests.failed, t.tests.skipped);
	if (t.uncounted)
		printf("suites that ended without counting their tests: %u\n", t.uncounted);
	printf("suites, %.0f s in all:\n%u passed, %u failed, %u skipped\n", now() - began, t.suites.passed, t.suites.failed,
	       t.suites.skipped);
	show_failures(&t);
	fclose(t.failures);
	return t.suites.failed ? 1 : 0;
}
