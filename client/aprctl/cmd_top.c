/* SPDX-License-Identifier: MIT */
/*
 * The live screens: top, and the loop under status --watch.
 *
 * Owns: the terminal while a screen is live (keys without Enter, put back at the end), rates between two looks. Does
 * not own a figure. Where standard output is no terminal, screens follow one another as text.
 */
#include "client/aprctl/ctl.h"
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

static double seconds(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* A second, or less where q was pressed or Ctrl-C came: then true. */
static bool wait_or_quit(bool keys)
{
	struct pollfd p = {.fd = keys ? STDIN_FILENO : -1, .events = POLLIN};
	double end = seconds() + 1.0;
	char key;

	for (double left = 1.0; left > 0 && !ctl_interrupted() && !ctl_terminated(); left = end - seconds()) {
		if (poll(&p, 1, (int)(left * 1000) + 1) <= 0 || !p.revents)
			continue; /* over, a signal, or the window's new size: it is asked for each screen */
		if (read(STDIN_FILENO, &key, 1) != 1)
			p.fd = -1;
		else if (key == 'q' || key == 'Q')
			return true;
	}
	return ctl_interrupted() || ctl_terminated(); /* an ordinary end of a live screen: status 0 */
}

int ctl_live(struct ctl *c, ctl_screen_fn draw, void *arg)
{
	bool tty = c->count != 1 && !c->json && isatty(STDOUT_FILENO), keys = tty && isatty(STDIN_FILENO);
	struct termios old, now;
	int status = CTL_OK;

	keys = keys && !tcgetattr(STDIN_FILENO, &old);
	if (keys) {
		now = old;
		now.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
		tcsetattr(STDIN_FILENO, TCSANOW, &now);
	}
	if (c->count != 1)
		ctl_catch_interrupt();
	for (uint32_t i = 0; status == CTL_OK; i++) {
		json_t *j = NULL;

		status = ctl_status(c, &j);
		if (status || !j)
			break;
		if (tty)
			fputs("\033[H\033[J", stdout); /* home, and clear what was there */
		draw(c, j, arg);
		json_decref(j);
		status = ctl_flush(c, CTL_OK);
		if (status || (c->count && i + 1 >= c->count) || wait_or_quit(keys))
			break;
	}
	if (keys)
		tcsetattr(STDIN_FILENO, TCSANOW, &old);
	return status;
}

/* ---- top ----------------------------------------------------------------------------- */

struct look { /* the last one, for rates */
	double at, tokens, steps, finished;
	bool some;
};

static double value(json_t *o, const char *key)
{
	return json_number_value(json_object_get(o, key));
}

static const char *text(json_t *o, const char *key)
{
	const char *s = json_string_value(json_object_get(o, key));

	return s ? s : "?";
}

static int rows(void)
{
	struct winsize w;

	return ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) || !w.ws_row ? 24 : w.ws_row;
}

static double rate(const struct look *was, double before, double now, double at)
{
	return was->some && at > was->at && now >= before ? (now - before) / (at - was->at) : 0;
}

static void draw_top(struct ctl *c, json_t *j, void *arg)
{
	struct look *was = arg, is = {seconds(), 0, 0, 0, true};
	json_t *t = json_object_get(j, "totals"), *kv = json_object_get(j, "kv"), *r;
	double total = value(kv, "pages_total"), used = total - value(kv, "pages_free"), bytes = 0;
	int left = rows() - 8;
	char size[32];
	size_t i;

	is.tokens = value(t, "tokens");
	is.steps = value(t, "steps");
	is.finished = value(t, "finished");
	json_array_foreach (json_object_get(j, "memory"), i, r)
		bytes += value(r, "bytes");
	printf("%s%s%s  aprd %s on %s, up %.0f s\n", ctl_bold(c), text(j, "state"), ctl_plain(c), text(j, "version"),
	       text(json_object_get(j, "backend"), "device"), value(j, "uptime_s"));
	printf("requests  %.0f running, %.0f waiting, %.1f ended a second\n", value(j, "running"), value(j, "queued"),
	       rate(was, was->finished, is.finished, is.at));
	printf("tokens    %.1f a second, in %.1f steps\n", rate(was, was->tokens, is.tokens, is.at),
	       rate(was, was->steps, is.steps, is.at));
	printf("KV pages  %.0f of %.0f used (%.0f %%)\n", used, total, total > 0 ? 100 * used / total : 0);
	printf("memory    %s\n\n", ctl_size((uint64_t)bytes, size));
	printf("%s%10s %-24s %8s %8s %12s %s%s\n", ctl_dim(c), "uid", "tenant", "running", "requests", "tokens", "KV pages",
	       ctl_plain(c));
	json_array_foreach (json_object_get(j, "clients"), i, r)
		if (left-- > 0)
			printf("%10.0f %-24.24s %8.0f %8.0f %12.0f %.0f\n", value(r, "uid"), text(r, "tenant"), value(r, "running"),
			       value(r, "in_flight"), value(r, "tokens"), value(r, "kv_pages"));
	*was = is;
}

static void draw_json(struct ctl *c, json_t *j, void *arg)
{
	(void)arg;
	ctl_print_json(c, json_incref(j));
}

int cmd_top(struct ctl *c)
{
	struct look was = {0};

	if (c->n_args)
		return ctl_usage(c, "top takes no words");
	return ctl_live(c, c->json ? draw_json : draw_top, &was);
}
