/* SPDX-License-Identifier: MIT */
/*
 * After READY aprd neither allocates nor frees device memory, nor waits for the
 * device, nor copies on the legacy stream, nor makes a graph or an event: counted
 * in the daemon itself during a thousand requests of all kinds over the ring.
 *
 *   run_quiet [ARGUMENTS OF aprd]...
 *
 * The count can fail: each kind of call is planted in the daemon afterwards and has
 * to be seen. Exit: 0; 1; 77 where there is no device, module or CUPTI, loudly.
 */
#include <apr/client.h>
#include <errno.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/types.h"
#include "tests/support/aprd.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/watch.h"

#define REQUESTS 1000u
#define IN_FLIGHT 12u
#define N_IDS 700u

static unsigned n_checks, n_failed;
static uint32_t ids[N_IDS];

static void check(int ok, const char *what)
{
	n_checks++;
	if (ok)
		return;
	n_failed++;
	printf("  FAILED: %s\n", what);
}

/* ---- a thousand requests ------------------------------------------------------------------ */

static int prepare_generate(struct apr *c, struct apr_sqe *q, uint32_t k)
{
	struct apr_sampling s = {.set = APR_SET_IGNORE_EOS | APR_SET_TEMPERATURE, .ignore_eos = 1};
	uint64_t space[64];
	struct apr_params p;
	int e = apr_prep_generate_ids(c, q, ids + k % 5, 1 + k * 37 % 600, 1 + k % 23);

	apr_sqe_seed(q, k);
	if (k % 3) {
		s.set |= APR_SET_TOP_K | APR_SET_TOP_P | APR_SET_REPEAT;
		s.temperature = 0.9f;
		s.top_k = 40;
		s.top_p = 0.9f;
		s.repeat_penalty = 1.2f;
	}
	apr_params_init(&p, space, sizeof space);
	apr_params_sampling(&p, &s);
	if (k % 3 == 1)
		apr_params_logprobs(&p, 5);
	if (k % 7 == 1)
		apr_params_bias(&p, ids, (const float[]){1, 2, -3}, 3);
	return e ? e : apr_sqe_params(c, q, &p);
}

/* Generations of all lengths and controls, scores of both kinds. */
static int prepare(struct apr *c, uint32_t k)
{
	struct apr_sqe *q = apr_get_sqe(c);
	int e;

	if (!q)
		return -EBUSY;
	if (k % 10 == 9) {
		e = apr_prep_score(c, q, ids, 2 + k % 150);
		if (k % 20 == 9)
			apr_sqe_flags(q, APR_SQE_FORCED);
	} else {
		e = prepare_generate(c, q, k);
	}
	apr_sqe_user_data(q, k + 1);
	return e;
}

/* IN_FLIGHT at a time; one in eleven is cancelled on its way. Returns answers that are no fault. */
static uint32_t requests(struct apr *c, uint32_t n)
{
	const struct apr_cqe *q;
	uint32_t sent = 0, ended = 0, good = 0;

	while (ended < n) {
		while (sent < n && sent - ended < IN_FLIGHT && !prepare(c, sent))
			sent++;
		if (apr_submit(c) < 0 && apr_unfinished(c) == 0)
			return good;
		if (apr_wait_cqe_timeout(c, &q, 30000000))
			return good;
		if (q->type == APR_CQE_TOKEN && q->pos == 1 && q->user_data % 11 == 3)
			(void)apr_cancel(c, q->user_data, UINT64_MAX); /* -EBUSY: then not this one */
		if (q->type == APR_CQE_FINAL && q->user_data <= n) {
			ended++;
			good += q->res == 0 || q->res == -ECANCELED;
		}
		apr_cqe_seen(c, q);
	}
	return good;
}

/* ---- what was called ------------------------------------------------------------------------ */

static void counted(const struct watch *w)
{
	for (unsigned k = 0; k < WATCH_KINDS; k++) {
		char what[160];

		snprintf(what, sizeof what, "%llu %s, the first %.63s", (unsigned long long)w->page->count[k], watch_kind_name(k),
		         w->page->first[k][0] ? w->page->first[k] : "-");
		if (k < WATCH_FORBIDDEN)
			check(w->page->count[k] == 0, what);
		printf("  %s\n", what);
	}
	check(w->page->count[WATCH_LAUNCH] >= REQUESTS, "the launches of a thousand requests were seen");
}

static void planted(struct watch *w)
{
	static const struct {
		enum watch_order order;
		unsigned kind;
	} p[] = {{WATCH_PLANT_ALLOC, WATCH_ALLOC}, {WATCH_PLANT_LEGACY, WATCH_LEGACY}, {WATCH_PLANT_SYNC, WATCH_SYNC},
	         {WATCH_PLANT_FREE, WATCH_FREE},   {WATCH_PLANT_CREATE, WATCH_CREATE}};

	for (size_t i = 0; i < sizeof p / sizeof *p; i++) {
		char what[120];

		check(watch_order(w, WATCH_RESET) == 0 && watch_order(w, p[i].order) == 0, "planting a call");
		snprintf(what, sizeof what, "planted %s are caught", watch_kind_name(p[i].kind));
		check(w->page->count[p[i].kind] == 1, what);
	}
}

static uint64_t free_bytes(struct watch *w)
{
	check(watch_order(w, WATCH_MEMORY) == 0, "asking for the free memory");
	return w->page->free_bytes;
}

static void test(struct watch *w, const char *sock)
{
	struct apr_opts o = APR_OPTS_INIT;
	char err[200] = "";
	uint64_t before, after;
	uint32_t good;
	struct apr *c;

	o.path = sock;
	if (apr_connect(&c, &o, err, sizeof err)) {
		printf("  %s\n", err);
		check(0, "connecting");
		return;
	}
	/* free memory before the first request: the promise begins at READY */
	before = free_bytes(w);
	check(watch_order(w, WATCH_RESET) == 0, "resetting the counts");
	good = requests(c, REQUESTS);
	after = free_bytes(w);
	printf("  %u of %u requests answered\n", good, REQUESTS);
	check(good == REQUESTS, "every request is answered");
	counted(w);
	printf("  free device memory %llu bytes before, %llu after\n", (unsigned long long)before, (unsigned long long)after);
	check(before == after && before, "free memory is equal before and after");
	planted(w);
	apr_close(c);
}

/* ---- main ------------------------------------------------------------------------------------- */

static bool log_says(const struct test_aprd *d, const char *what)
{
	char text[4096] = "";
	FILE *f = fopen(d->log, "r");

	if (f) {
		text[fread(text, 1, sizeof text - 1, f)] = 0;
		fclose(f);
	}
	return strstr(text, what) != NULL;
}

static int under_watch(const char *home, const char *dir, char **more)
{
	static const char *const states[] = {"the driver did not load the library", "", "CUPTI is not here", "CUPTI refused"};
	struct tiny_spec spec = {.n_layers = 3, .n_embd = 512, .n_ff = 1024, .n_heads = 8, .type = APR_TYPE_Q4_K,
	                         .n_vocab = 3000};
	char model[PATH_MAX], library[PATH_MAX], program[PATH_MAX];
	const char *args[32] = {"-m", model, "-b", "cuda", "-c", "2048"};
	struct test_aprd d;
	struct watch w;
	int rc, n = 6;

	while (*more && n < 31)
		args[n++] = *more++;
	snprintf(model, sizeof model, "%s/quiet.gguf", dir);
	snprintf(library, sizeof library, "%s/libapr-watch-driver.so", home);
	snprintf(program, sizeof program, "%s/aprd", home);
	if (access(library, F_OK)) {
		printf("run_quiet: SKIPPED: %s was not built: no cupti.h in the toolkit\n", library);
		return 77;
	}
	rc = apr_test_write_tiny_model(model, &spec);
	rc = rc ? rc : watch_open(&w, dir, library);
	if (rc) {
		printf("run_quiet: %s\n", strerror(-rc));
		return 1;
	}
	rc = test_aprd_start(&d, program, dir, args);
	if (rc) {
		bool absent = log_says(&d, "backend cuda: ");

		printf("run_quiet: %s\n", absent ? "SKIPPED: no device or module here" : "aprd did not start");
		watch_close(&w);
		return absent ? 77 : 1;
	}
	if (watch_state(&w) != WATCH_ON) {
		printf("run_quiet: %s%s\n", watch_state(&w) == WATCH_NO_CUPTI ? "SKIPPED: " : "FAILED: ", states[watch_state(&w)]);
		rc = watch_state(&w) == WATCH_NO_CUPTI ? 77 : 1;
	} else {
		test(&w, d.sock);
	}
	check(test_aprd_stop(&d) == 0, "aprd ends as it should");
	watch_close(&w);
	return rc;
}

int main(int argc, char **argv)
{
	char self[PATH_MAX], dir[] = "/tmp/run_quiet.XXXXXX", command[64];
	int rc;

	(void)argc;
	if (!realpath("/proc/self/exe", self) || !mkdtemp(dir)) {
		perror("run_quiet");
		return 1;
	}
	for (uint32_t i = 0; i < N_IDS; i++)
		ids[i] = (i * 7919u + 13) % 2900;
	rc = under_watch(dirname(self), dir, argv + 1);
	snprintf(command, sizeof command, "rm -rf %s", dir);
	if (system(command))
		fprintf(stderr, "run_quiet: %s stays\n", dir);
	if (rc != 77)
		printf("run_quiet: %u checks, %u failed\n", n_checks, n_failed);
	return rc ? rc : n_failed ? 1 : 0;
}
