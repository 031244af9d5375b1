/* SPDX-License-Identifier: MIT */
/* aprctl chat: one answer, lines from a pipe, a conversation on a terminal. Against the fake daemon. */
#include "tests/aprctl/cli.h"
#include <sys/ioctl.h>
#include <termios.h>
#include <time.h>

static const char script[] = "{\"token_ms\": 1, \"answers\": ["
			     "{\"match\": \"user: slow\", \"times\": 1, \"steps\": [\"begun\", {\"stall\": true}]},"
			     "{\"match\": \"user: half\", \"steps\": [\"as far\", {\"die\": \"drop\"}]},"
			     "{\"match\": \"user: bad\\n\", \"steps\": [{\"error\": \"EIO\", \"why\": \"the disk\"}]},"
			     "{\"match\": \"user: /slash\\n\", \"steps\": [\"a slash\"]},"
			     "{\"match\": \"assistant: begun\\nuser: and now\", \"steps\": [\"it goes on\"]},"
			     "{\"match\": \"system: S\\nuser: hi\\nassistant:\", \"steps\": [\"with a system\"]},"
			     "{\"match\": \"user: hi\\nassistant: hello you\\nuser: again\\nassistant:\", \"steps\": [\"seen\"]},"
			     "{\"match\": \"user: two\\nlines\\nassistant:\", \"steps\": [\"two lines\"]},"
			     "{\"match\": \"user: hi\\nassistant:\", \"steps\": [\"hello\", \" you\"]},"
			     "{\"steps\": [\"what?\"]}]}";

static void one_answer(void)
{
	struct cli c;
	struct fake *f = cli_fake(&c, script);
	json_t *j;

	CU_ASSERT_EQUAL(CLI(&c, "chat", "hi"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "hello you\n");
	CU_ASSERT_STRING_EQUAL(c.err, "");
	CU_ASSERT_EQUAL(CLI(&c, "chat", "--system", "S", "hi"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "with a system\n");
	c.input = "hi";
	CU_ASSERT_EQUAL(CLI(&c, "chat", "-"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "hello you\n");
	CU_ASSERT_EQUAL(CLI(&c, "--json", "chat", "--seed", "7", "hi"), 0);
	j = cli_json(&c);
	CU_ASSERT(cli_keys(j, "text ids seed numerics prompt_tokens cached_tokens finish queue_us prefill_us decode_us backend"));
	CU_ASSERT_STRING_EQUAL(cli_str(j, "text"), "hello you");
	CU_ASSERT_EQUAL(json_integer_value(json_object_get(j, "seed")), 7);
	json_decref(j);
	fake_end(f);
}

static void from_a_file(void)
{
	struct cli c;
	struct fake *f = cli_fake(&c, script);

	c.input = "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"},{\"role\":\"assistant\",\"content\":\"hello you\"},"
		  "{\"role\":\"user\",\"content\":\"again\"}]}";
	CU_ASSERT_EQUAL(CLI(&c, "chat", "--messages", "-"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "seen\n");
	c.input = "[{\"role\":\"user\",\"content\":\"hi\"}]";
	CU_ASSERT_EQUAL(CLI(&c, "chat", "--messages", "-"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "hello you\n");
	fake_end(f);
}

static void what_is_wrong_is_one_line(void)
{
	struct cli c;
	struct fake *f = cli_fake(&c, script);

	CU_ASSERT_EQUAL(CLI(&c, "chat", "bad"), 1);
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "the disk"));
	CU_ASSERT_EQUAL(CLI(&c, "chat", "--messages", "-", "hi"), 2);
	CU_ASSERT(cli_one_line(&c));
	CU_ASSERT_EQUAL(CLI(&c, "chat", "two", "words"), 2);
	CU_ASSERT_EQUAL(CLI(&c, "chat", "--samples", "2", "hi"), 2);
	CU_ASSERT_EQUAL(CLI(&c, "chat", "a\xff"), 1);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "not UTF-8"));
	c.input = "{\"messages\":";
	CU_ASSERT_EQUAL(CLI(&c, "chat", "--messages", "-"), 1);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "line 1"));
	c.input = "{}";
	CU_ASSERT_EQUAL(CLI(&c, "chat", "--messages", "-"), 1);
	c.input = "[1]";
	CU_ASSERT_EQUAL(CLI(&c, "chat", "--messages", "-"), 1); /* the daemon's word */
	CU_ASSERT(cli_one_line(&c));
	fake_end(f);
	f = cli_fake(&c, "{\"ops\": [\"NOP\", \"GENERATE\"]}");
	CU_ASSERT_EQUAL(CLI(&c, "chat", "hi"), 1);
	CU_ASSERT_PTR_NOT_NULL(strstr(c.err, "does not serve CHAT"));
	fake_end(f);
}

/* From a pipe each line is a message, what was said before goes with it, and no prompt is printed. */
static void lines_from_a_pipe(void)
{
	struct cli c;
	struct fake *f = cli_fake(&c, script);

	c.input = "hi\nagain\n";
	CU_ASSERT_EQUAL(CLI(&c, "chat"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "hello you\nseen\n");
	CU_ASSERT_STRING_EQUAL(c.err, "");
	c.input = "\n\ntwo\\\nlines\n//slash";
	CU_ASSERT_EQUAL(CLI(&c, "chat"), 0);
	CU_ASSERT_STRING_EQUAL(c.out, "two lines\na slash\n");
	c.input = "bad\nhi\n"; /* nobody watches: the first failure ends it */
	CU_ASSERT_EQUAL(CLI(&c, "chat"), 1);
	CU_ASSERT_STRING_EQUAL(c.out, "");
	c.input = "";
	CU_ASSERT_EQUAL(CLI(&c, "chat"), 0);
	c.input = "hi\nhi\n";
	CU_ASSERT_EQUAL(CLI(&c, "--json", "chat"), 0);
	CU_ASSERT_EQUAL(c.out[0], '{');
	CU_ASSERT_PTR_NOT_NULL(strstr(c.out, "}\n{"));
	fake_end(f);
}

static void interrupt_ends_the_one_answer(void)
{
	struct cli c;
	struct fake *f = cli_fake(&c, script);

	c.signal = SIGINT;
	CU_ASSERT_EQUAL(CLI(&c, "chat", "slow"), 130);
	CU_ASSERT_STRING_EQUAL(c.out, "begun\n");
	fake_end(f);
}

/* ---- a terminal --------------------------------------------------------------------------- */

struct term {
	int fd;
	pid_t pid;
	char out[65536];
	size_t n;
};

static void term_start(struct term *t, const struct cli *c, const char *no_color)
{
	const char *name, *argv[] = {"aprctl", "-s", c->socket, "chat", NULL};
	struct winsize w = {.ws_row = 24, .ws_col = 60};
	char program[4096];

	memset(t, 0, sizeof(*t));
	snprintf(program, sizeof(program), "%s", apr_test_program("aprctl"));
	t->fd = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
	CU_ASSERT_FATAL(t->fd >= 0 && !grantpt(t->fd) && !unlockpt(t->fd));
	name = ptsname(t->fd);
	ioctl(t->fd, TIOCSWINSZ, &w);
	fflush(NULL);
	t->pid = fork();
	if (t->pid)
		return;
	setsid();
	int fd = open(name, O_RDWR);
	ioctl(fd, TIOCSCTTY, 0);
	dup2(fd, 0);
	dup2(fd, 1);
	dup2(fd, 2);
	setenv("NO_COLOR", no_color, 1);
	execv(program, (char *const *)(void *)argv);
	_exit(127);
}

/* Reads until `what` has come after what was seen before; false after 10 s. */
static bool term_until(struct term *t, const char *what)
{
	size_t from = 0;

	for (int i = 0; i < 1000; i++) {
		struct pollfd p = {t->fd, POLLIN, 0};
		const char *at = strstr(t->out + from, what);
		if (at) {
			size_t used = (size_t)(at - t->out) + strlen(what);
			memmove(t->out, t->out + used, t->n - used + 1);
			t->n -= used;
			return true;
		}
		if (poll(&p, 1, 10) == 1) {
			ssize_t k = read(t->fd, t->out + t->n, sizeof(t->out) - 1 - t->n);
			if (k > 0)
				t->n += (size_t)k;
			t->out[t->n] = 0;
		}
	}
	fprintf(stderr, "\n  no \"%s\" in \"%s\"\n", what, t->out);
	return false;
}

static void term_type(struct term *t, const char *keys)
{
	CU_ASSERT_EQUAL(write(t->fd, keys, strlen(keys)), (ssize_t)strlen(keys));
}

static int term_end(struct term *t)
{
	int status = 0;

	for (time_t end = time(NULL) + 10; time(NULL) < end;) {
		char sink[4096];
		struct pollfd p = {t->fd, POLLIN, 0};
		if (waitpid(t->pid, &status, WNOHANG) == t->pid) {
			close(t->fd);
			return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
		}
		if (poll(&p, 1, 10) == 1 && p.revents & POLLIN)
			(void)!read(t->fd, sink, sizeof(sink));
	}
	kill(t->pid, SIGKILL);
	waitpid(t->pid, &status, 0);
	close(t->fd);
	return -1;
}

static void a_conversation(void)
{
	struct cli c;
	struct fake *f = cli_fake(&c, script);
	struct term t;

	term_start(&t, &c, "1");
	CU_ASSERT(term_until(&t, "/help says more, Ctrl-D ends."));
	CU_ASSERT(term_until(&t, "> "));
	term_type(&t, "hi\r");
	CU_ASSERT(term_until(&t, "hello you\r\n"));
	term_type(&t, "half\r"); /* a turn whose daemon went away is not kept */
	CU_ASSERT(term_until(&t, "as far"));
	CU_ASSERT(term_until(&t, "are not kept"));
	term_type(&t, "again\r");
	CU_ASSERT(term_until(&t, "seen\r\n"));
	term_type(&t, "bad\r"); /* said, and the conversation goes on */
	CU_ASSERT(term_until(&t, "the disk"));
	term_type(&t, "/clear\r");
	CU_ASSERT(term_until(&t, "> "));
	term_type(&t, "/nonsense\r");
	CU_ASSERT(term_until(&t, "no command /nonsense"));
	term_type(&t, "hi\r");
	CU_ASSERT(term_until(&t, "hello you\r\n"));
	CU_ASSERT_PTR_NULL(strstr(t.out, "\033[1m")); /* NO_COLOR */
	CU_ASSERT(term_until(&t, "> "));
	term_type(&t, "\004");
	CU_ASSERT_EQUAL(term_end(&t), 0);
	fake_end(f);
}

static void interrupt_ends_the_answer_not_the_program(void)
{
	struct cli c;
	struct fake *f = cli_fake(&c, script);
	struct term t;

	term_start(&t, &c, "");
	CU_ASSERT(term_until(&t, "\033[1m>\033[0m "));
	term_type(&t, "slow\r");
	CU_ASSERT(term_until(&t, "begun"));
	term_type(&t, "\003");
	CU_ASSERT(term_until(&t, ">\033[0m "));
	/* what came of it is part of the conversation */
	term_type(&t, "and now\r");
	CU_ASSERT(term_until(&t, "it goes on\r\n"));
	CU_ASSERT(term_until(&t, ">\033[0m "));
	term_type(&t, "half a li\003"); /* at the prompt: the line is given up */
	CU_ASSERT(term_until(&t, "\r\n"));
	CU_ASSERT(term_until(&t, ">\033[0m "));
	term_type(&t, "/exit\r");
	CU_ASSERT_EQUAL(term_end(&t), 0);
	fake_end(f);
}

/* Keys with a meaning are read as such once the next prompt stands; before it the terminal itself takes some of them. */
static void clear(struct term *t)
{
	CU_ASSERT(term_until(t, "> "));
	term_type(t, "/clear\r");
	CU_ASSERT(term_until(t, "/clear"));
	CU_ASSERT(term_until(t, "\n"));
	CU_ASSERT(term_until(t, "> "));
}

static void lines_are_edited(void)
{
	struct cli c;
	struct fake *f = cli_fake(&c, script);
	struct term t;

	term_start(&t, &c, "1");
	CU_ASSERT(term_until(&t, "> "));
	term_type(&t, "xhiq\177\001\033[3~\r"); /* backspace, home, delete */
	CU_ASSERT(term_until(&t, "hello you\r\n"));
	clear(&t);
	term_type(&t, "\033[A\033[A\r"); /* two lines back */
	CU_ASSERT(term_until(&t, "hello you\r\n"));
	clear(&t);
	term_type(&t, "\303\244\303\266\302\177\177\177\033[D\033[D hi\001\004\r"); /* whole characters go */
	CU_ASSERT(term_until(&t, "hello you\r\n"));
	clear(&t);
	term_type(&t, "some words\027\027\025two\\\rlines\r");
	CU_ASSERT(term_until(&t, "two lines\r\n"));
	for (int i = 0; i < 100; i++) /* longer than the window */
		term_type(&t, "\346\274\242 ");
	term_type(&t, "\025/exit\r");
	CU_ASSERT_EQUAL(term_end(&t), 0);
	fake_end(f);
}

static void sigterm_ends_a_conversation(void)
{
	struct cli c;
	struct fake *f = cli_fake(&c, script);
	struct term t;
	struct termios modes;

	term_start(&t, &c, "1");
	CU_ASSERT(term_until(&t, "> "));
	kill(t.pid, SIGTERM);
	CU_ASSERT(term_until(&t, "\r\n"));
	CU_ASSERT_EQUAL(tcgetattr(t.fd, &modes), 0);
	CU_ASSERT(modes.c_lflag & ICANON); /* the terminal is as it was */
	CU_ASSERT_EQUAL(term_end(&t), 130);
	fake_end(f);
}

static const struct apr_test tests[] = {
	{"one_answer", one_answer, KEEPS_HEAP}, /* the harness's folder has a name from here on */
	{"from_a_file", from_a_file, 0},
	{"what_is_wrong_is_one_line", what_is_wrong_is_one_line, 0},
	{"lines_from_a_pipe", lines_from_a_pipe, 0},
	{"interrupt_ends_the_one_answer", interrupt_ends_the_one_answer, 0},
	{"a_conversation", a_conversation, 0},
	{"interrupt_ends_the_answer_not_the_program", interrupt_ends_the_answer_not_the_program, 0},
	{"lines_are_edited", lines_are_edited, 0},
	{"sigterm_ends_a_conversation", sigterm_ends_a_conversation, 0},
};
TEST_MAIN("aprctl/chat", tests)
