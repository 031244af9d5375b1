/* SPDX-License-Identifier: MIT */
/*
 * Which backend runs, and who is told: CASES 19. Where there is no device the
 * refusals and the words of auto are tested; where there is one (and the module
 * beside aprd) what CUDA_VISIBLE_DEVICES makes of it.
 */
#include "tests/daemon/running.h"
#include <dlfcn.h>

/* A model that every backend serves */
static const char *model_path(void)
{
	static char path[128];
	struct tiny_spec spec = { .type = 8 }; /* Q8_0 */

	if (!path[0]) {
		snprintf(path, sizeof(path), "%s/any.gguf", apr_test_tmpdir());
		if (apr_test_write_tiny_model(path, &spec))
			abort();
	}
	return path;
}

static void spawn(struct daemon *d, const char *visible, const char *backend)
{
	const char *args[] = { "-m", model_path(), "-s", d->sock, "-t", "1", "-c", "256", "-b", backend, NULL };

	if (visible)
		setenv("CUDA_VISIBLE_DEVICES", visible, 1);
	else
		unsetenv("CUDA_VISIBLE_DEVICES");
	daemon_spawn(d, args);
	unsetenv("CUDA_VISIBLE_DEVICES");
}

/* Refused with status 1, in one line that names the backend, and `word` if there is one; nothing stays behind. */
static void refuses(const char *visible, const char *backend, const char *word)
{
	struct daemon d;
	char *text;

	daemon_name(&d, "refuse");
	spawn(&d, visible, backend);
	CU_ASSERT_EQUAL(daemon_wait(&d, 60), 1);
	text = file_text(d.log);
	CU_ASSERT_PTR_NOT_NULL(strstr(text, "error: "));
	CU_ASSERT_PTR_NOT_NULL(strstr(text, backend));
	if (word)
		CU_ASSERT_PTR_NOT_NULL(strstr(text, word));
	if (CU_get_number_of_failure_records())
		fprintf(stderr, "  -b %s, CUDA_VISIBLE_DEVICES %s: %s", backend, visible ? visible : "not set", text);
	free(text);
	CU_ASSERT_NOT_EQUAL(access(d.sock, F_OK), 0);
}

static struct apr_result one_request(const struct daemon *d)
{
	struct apr_gen g = { .size = sizeof(g), .text = "x", .len = 1, .max_tokens = 3 };
	struct apr *c = connect_to(d);
	struct apr_result r;

	memset(&r, 0, sizeof(r));
	CU_ASSERT_EQUAL(apr_generate(c, &g, NULL, NULL, &r, NULL, 0), 0);
	apr_close(c);
	return r;
}

/* Served by `want`; the reply and status agree on that, and status says why where nobody named a backend. */
static void serves(const char *visible, const char *backend, const char *want)
{
	bool automatic = !strcmp(backend, "auto");
	struct apr_result r;
	struct daemon d;
	const char *why;
	json_t *j, *b;

	daemon_name(&d, "serve");
	spawn(&d, visible, backend);
	CU_ASSERT_TRUE_FATAL(daemon_ready(&d));
	r = one_request(&d);
	CU_ASSERT_EQUAL(r.backend, strcmp(want, "cpu") ? APR_BACKEND_CUDA : APR_BACKEND_CPU);
	j = status_of(&d);
	b = json_object_get(j, "backend");
	CU_ASSERT_STRING_EQUAL(json_string_value(json_object_get(b, "name")), want);
	CU_ASSERT_TRUE(json_string_length(json_object_get(b, "device")) > 0);
	why = json_string_value(json_object_get(b, "why"));
	CU_ASSERT_TRUE(why && (!automatic || !strncmp(why, "auto: ", 6)));
	CU_ASSERT_EQUAL(json_is_true(json_object_get(b, "fell_back")), (int)r.fell_back);
	/* who fell back says what was missing, in the log too */
	if (r.fell_back)
		CU_ASSERT_TRUE(why && strstr(why, "so the CPU") && log_has(&d, why));
	json_decref(j);
	CU_ASSERT_EQUAL(daemon_stop(&d), 0);
}

static void case19_wanted_and_absent(void)
{
	static const char *const none[] = { "", "-1", "9999", "GPU-00000000-0000-0000-0000-000000000000" };

	for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++)
		refuses(none[i], "cuda", "libaprd-cuda.so");
	refuses(NULL, "cuda:99", "cuda:99");
}

static void case19_auto_says_that_it_fell_back(void)
{
	serves("", "auto", "cpu");
	serves("-1", "auto", "cpu");
	serves("", "cpu", "cpu");
}

/* Devices and the first one's UUID, by a child: whoever asks the driver keeps its descriptors. */
static int devices(char uuid[48])
{
	char line[64] = "0";
	int fds[2];
	pid_t pid;

	if (pipe(fds))
		return 0;
	fflush(NULL);
	pid = fork();
	if (pid == 0) {
		void *so = dlopen("libcuda.so.1", RTLD_NOW);
		int (*init)(unsigned) = NULL, (*count)(int *) = NULL, (*id)(unsigned char *, int) = NULL, n = 0;
		unsigned char b[16] = { 0 };

		if (so) {
			*(void **)&init = dlsym(so, "cuInit");
			*(void **)&count = dlsym(so, "cuDeviceGetCount");
			*(void **)&id = dlsym(so, "cuDeviceGetUuid_v2");
		}
		if (!init || !count || !id || init(0) || count(&n) || (n && id(b, 0)))
			n = 0;
		snprintf(line, sizeof(line),
			 "%d GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", n, b[0], b[1], b[2],
			 b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
		_exit(write(fds[1], line, strlen(line)) < 0);
	}
	close(fds[1]);
	ssize_t n = read(fds[0], line, sizeof(line) - 1);
	close(fds[0]);
	waitpid(pid, NULL, 0);
	line[n > 0 ? n : 0] = 0;
	snprintf(uuid, 48, "%s", strchr(line, ' ') ? strchr(line, ' ') + 1 : "");
	return atoi(line);
}

static void case19_visible_devices(void)
{
	char uuid[48], beyond[12];
	int n = devices(uuid);

	if (!n)
		SKIP("no NVIDIA device here");
	if (access(apr_test_program("libaprd-cuda.so"), F_OK))
		SKIP("no libaprd-cuda.so beside aprd");
	snprintf(beyond, sizeof(beyond), "%d", n);
	serves(NULL, "cuda", "cuda");
	serves("0", "auto", "cuda");
	serves(uuid, "cuda", "cuda");
	refuses(beyond, "cuda", "CUDA_VISIBLE_DEVICES");
	refuses("0", "cuda:1", "CUDA_VISIBLE_DEVICES");
	if (n > 1)
		serves("1", "cuda", "cuda");
}

/* KEEPS_HEAP: setenv keeps what it was given */
static const struct apr_test tests[] = {
	{ "case19_wanted_and_absent", case19_wanted_and_absent, KEEPS_HEAP },
	{ "case19_auto_says_that_it_fell_back", case19_auto_says_that_it_fell_back, KEEPS_HEAP },
	{ "case19_visible_devices", case19_visible_devices, KEEPS_HEAP },
};

TEST_MAIN("daemon/backend", tests)
