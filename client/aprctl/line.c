/* SPDX-License-Identifier: MIT */
/*
 * Owns: reading and editing lines. See line.h. On a terminal the modes are changed for
 * one line only: while an answer runs, Ctrl-C is a signal as ever.
 */
#include "client/aprctl/line.h"
#include "client/aprctl/ctl.h"
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

enum { PAST_MAX = 500, LINE_MAX_BYTES = 1 << 20 };
enum { CTRL_A = 1, CTRL_B, CTRL_C, CTRL_D, CTRL_E, CTRL_F, CTRL_H = 8, TAB = 9, CTRL_K = 11, CTRL_L, ENTER, CTRL_N,
       CTRL_P = 16, CTRL_U = 21, CTRL_W = 23, ESCAPE = 27, DELETE = 127 };

void ctl_line_init(struct ctl_line *l, bool terminal, const char *bold, const char *plain)
{
	*l = (struct ctl_line){.terminal = terminal, .bold = bold, .plain = plain};
}

void ctl_line_free(struct ctl_line *l)
{
	for (size_t i = 0; i < l->n_past; i++)
		free(l->past[i]);
	free(l->past);
	free(l->buf);
	*l = (struct ctl_line){0};
}

/* ---- the text ---------------------------------------------------------------------------- */

static bool room(struct ctl_line *l, size_t n)
{
	size_t cap = l->cap ? l->cap : 256;
	char *more;

	if (n > LINE_MAX_BYTES || l->len + n >= LINE_MAX_BYTES)
		return false;
	while (cap - l->len <= n)
		cap *= 2;
	if (cap == l->cap)
		return true;
	more = calloc(1, cap);
	if (!more)
		return false;
	if (l->len)
		memcpy(more, l->buf, l->len);
	free(l->buf);
	l->buf = more;
	l->cap = cap;
	return true;
}

static void insert(struct ctl_line *l, const char *text, size_t n)
{
	if (!room(l, n))
		return;
	memmove(l->buf + l->at + n, l->buf + l->at, l->len - l->at);
	memcpy(l->buf + l->at, text, n);
	l->at += n;
	l->len += n;
}

static void remove_span(struct ctl_line *l, size_t from, size_t end)
{
	if (from == end)
		return;
	memmove(l->buf + from, l->buf + end, l->len - end);
	l->len -= end - from;
	l->at = from;
}

static bool inside(char c)
{
	return ((unsigned char)c & 0xc0) == 0x80;
}

static size_t before(const struct ctl_line *l, size_t i)
{
	while (i && inside(l->buf[--i]))
		;
	return i;
}

static size_t after(const struct ctl_line *l, size_t i)
{
	while (i < l->len && inside(l->buf[++i]) && i < l->len)
		;
	return i < l->len ? i : l->len;
}

static size_t word_before(const struct ctl_line *l)
{
	size_t i = l->at;

	while (i && l->buf[i - 1] == ' ')
		i--;
	while (i && l->buf[i - 1] != ' ')
		i--;
	return i;
}

static void replace(struct ctl_line *l, const char *text)
{
	l->len = l->at = 0;
	insert(l, text, strlen(text));
}

/* ---- the screen ------------------------------------------------------------------------------ */

/* Columns of the character at i: what terminals agree on, near enough to place a cursor. */
static unsigned columns(const struct ctl_line *l, size_t i)
{
	static const struct {
		unsigned from, to, width;
	} odd[] = {{0x300, 0x36f, 0}, {0x200b, 0x200f, 0}, {0xfe00, 0xfe0f, 0}, {0x1100, 0x115f, 2}, {0x2e80, 0xa4cf, 2},
		   {0xac00, 0xd7a3, 2}, {0xf900, 0xfaff, 2}, {0xfe30, 0xfe6f, 2}, {0xff00, 0xff60, 2}, {0xffe0, 0xffe6, 2},
		   {0x1f300, 0x1faff, 2}, {0x20000, 0x3fffd, 2}};
	const unsigned char *s = (const unsigned char *)l->buf;
	unsigned c = s[i];
	size_t end = after(l, i);

	if (c >= 0xc0)
		c &= c >= 0xf0 ? 7 : c >= 0xe0 ? 15 : 31;
	for (size_t k = i + 1; k < end; k++)
		c = c << 6 | (s[k] & 63);
	for (size_t k = 0; k < sizeof(odd) / sizeof(odd[0]); k++)
		if (c >= odd[k].from && c <= odd[k].to)
			return odd[k].width;
	return 1;
}

/* One row: where the line is longer, the part round the cursor. */
static void draw(const struct ctl_line *l)
{
	struct winsize w = {0};
	unsigned width = 80, used = 0, cursor = 0;
	size_t from = l->at, end;

	if (!ioctl(STDOUT_FILENO, TIOCGWINSZ, &w) && w.ws_col > 8)
		width = w.ws_col;
	width -= 3; /* the prompt, and a last column that nothing is written to */
	while (from) {
		size_t i = before(l, from);
		if (cursor + columns(l, i) > width)
			break;
		cursor += columns(l, i);
		from = i;
	}
	for (end = from; end < l->len; end = after(l, end)) {
		if (used + columns(l, end) > width)
			break;
		used += columns(l, end);
	}
	printf("\r%s>%s ", l->bold, l->plain);
	if (l->len)
		fwrite(l->buf + from, 1, end - from, stdout);
	printf("\033[K\r\033[%uC", cursor + 2);
	fflush(stdout);
}

/* ---- keys ---------------------------------------------------------------------------------------- */

/* Signals are let in while it waits and nowhere else, so that none comes between a look and the waiting. */
static int byte(const struct ctl_line *l, unsigned char *c)
{
	struct pollfd p = {STDIN_FILENO, POLLIN, 0};
	ssize_t n;

	if (ctl_interrupted())
		return -EINTR;
	if (ppoll(&p, 1, NULL, &l->signals) < 0)
		return -errno;
	n = read(STDIN_FILENO, c, 1);
	return n < 0 ? -errno : (int)n;
}

/* The final character of an escape sequence, and its first number. */
static int escape_sequence(const struct ctl_line *l, unsigned *number)
{
	unsigned char c = 0;

	*number = 0;
	if (byte(l, &c) != 1 || (c != '[' && c != 'O'))
		return 0;
	do {
		if (byte(l, &c) != 1)
			return 0;
		if (c >= '0' && c <= '9' && *number < 1000)
			*number = *number * 10 + c - '0';
	} while (c < 0x40);
	return c;
}

static void walk_past(struct ctl_line *l, size_t *place, int step)
{
	if ((step < 0 && !*place) || (step > 0 && *place >= l->n_past))
		return;
	*place += (size_t)(ptrdiff_t)step;
	replace(l, *place < l->n_past ? l->past[*place] : "");
}

static void special_key(struct ctl_line *l, size_t *place)
{
	unsigned number;
	int c = escape_sequence(l, &number);

	switch (c == '~' ? (number == 1 || number == 7 ? 'H' : number == 4 || number == 8 ? 'F' : number == 3 ? '~' : 0) : c) {
	case 'A': walk_past(l, place, -1); break;
	case 'B': walk_past(l, place, 1); break;
	case 'C': l->at = after(l, l->at); break;
	case 'D': l->at = before(l, l->at); break;
	case 'H': l->at = 0; break;
	case 'F': l->at = l->len; break;
	case '~': remove_span(l, l->at, after(l, l->at)); break;
	default: break;
	}
}

static void edit_key(struct ctl_line *l, unsigned char c, size_t *place)
{
	char ch = (char)c;

	switch (c) {
	case CTRL_A: l->at = 0; break;
	case CTRL_B: l->at = before(l, l->at); break;
	case CTRL_D: remove_span(l, l->at, after(l, l->at)); break;
	case CTRL_E: l->at = l->len; break;
	case CTRL_F: l->at = after(l, l->at); break;
	case CTRL_H:
	case DELETE: remove_span(l, before(l, l->at), l->at); break;
	case CTRL_K: l->len = l->at; break;
	case CTRL_L: printf("\033[H\033[2J"); break;
	case CTRL_N: walk_past(l, place, 1); break;
	case CTRL_P: walk_past(l, place, -1); break;
	case CTRL_U: remove_span(l, 0, l->at); break;
	case CTRL_W: remove_span(l, word_before(l), l->at); break;
	case ESCAPE: special_key(l, place); break;
	default:
		if (c >= ' ' || c == TAB)
			insert(l, c == TAB ? " " : &ch, 1);
	}
}

/* Until Enter: 1; 0 Ctrl-D on an empty line; -EINTR Ctrl-C; -errno. */
static int edit(struct ctl_line *l)
{
	size_t place = l->n_past;
	unsigned char c = 0;

	l->len = l->at = 0;
	if (!room(l, 1))
		return -ENOMEM;
	for (;;) {
		int e;
		if (l->at == l->len || !inside(l->buf[l->at]))
			draw(l);
		e = byte(l, &c);
		if (e == -EINTR && !ctl_interrupted())
			continue; /* a resized window */
		if (e <= 0)
			return e;
		if (c == ENTER || c == '\n')
			return 1;
		if (c == CTRL_C)
			return -EINTR;
		if (c == CTRL_D && !l->len)
			return 0;
		edit_key(l, c, &place);
	}
}

/* ---- a line ------------------------------------------------------------------------------------------ */

static void keep(struct ctl_line *l)
{
	char *text;

	if (!l->len || (l->n_past && strlen(l->past[l->n_past - 1]) == l->len && !memcmp(l->past[l->n_past - 1], l->buf, l->len)))
		return;
	if (l->n_past == PAST_MAX) {
		free(l->past[0]);
		memmove(l->past, l->past + 1, --l->n_past * sizeof(char *));
	}
	if (l->n_past == l->cap_past) {
		size_t cap = l->cap_past ? l->cap_past * 2 : 32;
		char **more = realloc(l->past, cap * sizeof(char *));
		if (!more)
			return;
		l->past = more;
		l->cap_past = cap;
	}
	text = strndup(l->buf, l->len);
	if (text)
		l->past[l->n_past++] = text;
}

static int from_terminal(struct ctl_line *l)
{
	struct termios was, raw;
	int e;

	if (tcgetattr(STDIN_FILENO, &was))
		return -errno;
	raw = was;
	raw.c_iflag &= ~(tcflag_t)(ICRNL | IXON | ISTRIP | INLCR | IGNCR);
	raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO | ISIG | IEXTEN);
	raw.c_cc[VMIN] = 1;
	raw.c_cc[VTIME] = 0;
	tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
	e = edit(l);
	tcsetattr(STDIN_FILENO, TCSADRAIN, &was);
	putchar('\n');
	fflush(stdout);
	if (e == 1)
		keep(l);
	return e;
}

static int from_pipe(struct ctl_line *l)
{
	unsigned char c = 0;
	int e;

	l->len = l->at = 0;
	for (;;) {
		e = byte(l, &c); /* one at a time: the rest is for whoever reads after us */
		if (e < 0)
			return e;
		if (!e)
			return l->len ? 1 : 0;
		if (c == '\n')
			return 1;
		if (!room(l, 1))
			return -E2BIG;
		l->buf[l->len++] = (char)c;
	}
}

static int one_line(struct ctl_line *l)
{
	sigset_t block;
	int e;

	sigemptyset(&block);
	sigaddset(&block, SIGINT);
	sigaddset(&block, SIGTERM);
	sigprocmask(SIG_BLOCK, &block, &l->signals);
	ctl_catch_interrupt();
	e = l->terminal ? from_terminal(l) : from_pipe(l);
	sigprocmask(SIG_SETMASK, &l->signals, NULL);
	return e == -EINTR && (ctl_terminated() || !l->terminal) ? -ECANCELED : e;
}

int ctl_line_read(struct ctl_line *l, char **text, size_t *len)
{
	char *all = NULL;
	size_t n = 0;
	bool more;

	do {
		int e = one_line(l);
		if (e <= 0) {
			free(all);
			return e;
		}
		more = l->len && l->buf[l->len - 1] == '\\';
		l->len -= more;
		char *grown = realloc(all, n + l->len + 2);
		if (!grown) {
			free(all);
			return -ENOMEM;
		}
		all = grown;
		if (l->len)
			memcpy(all + n, l->buf, l->len);
		n += l->len;
		if (more)
			all[n++] = '\n';
	} while (more);
	all[n] = 0;
	*text = all;
	*len = n;
	return 1;
}
