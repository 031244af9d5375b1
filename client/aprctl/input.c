/* SPDX-License-Identifier: MIT */
/* Owns: TEXT, FILE and IDS as they come from the command line. Does not own: what they mean to a model. */
#include "client/aprctl/ctl.h"
#include <errno.h>
#include <locale.h>
#include <stdlib.h>
#include <string.h>

bool ctl_parse_u64(const char *s, uint64_t *v)
{
	uint64_t n = 0;

	if (!*s)
		return false;
	for (; *s; s++) {
		if (*s < '0' || *s > '9' || n > (UINT64_MAX - (uint64_t)(*s - '0')) / 10)
			return false;
		n = n * 10 + (uint64_t)(*s - '0');
	}
	*v = n;
	return true;
}

bool ctl_parse_float(const char *s, float *v)
{
	char *end;

	*v = strtof(s, &end);
	return end != s && !*end;
}

int ctl_slurp(const char *path, char **text, size_t *len)
{
	bool in = !strcmp(path, "-");
	FILE *f = in ? stdin : fopen(path, "rb");
	size_t n = 0, cap = 65536;
	char *buf = f ? malloc(cap) : NULL;
	int e = buf ? 0 : -errno;

	while (!e) {
		size_t k = fread(buf + n, 1, cap - n - 1, f);

		n += k;
		if (ferror(f))
			e = errno ? -errno : -EIO;
		if (!k)
			break;
		if (n + 1 == cap) {
			char *more = cap > SIZE_MAX / 2 ? NULL : realloc(buf, cap * 2);

			if (!more) {
				e = -ENOMEM;
				break;
			}
			buf = more;
			cap *= 2;
		}
	}
	if (f && !in)
		fclose(f);
	if (e) {
		free(buf);
		return e;
	}
	buf[n] = 0;
	*text = buf;
	*len = n;
	return 0;
}

static int from_file(struct ctl *c, const char *path, struct ctl_input *in)
{
	int e = ctl_slurp(path, &in->text, &in->len);

	return e ? ctl_fail(c, "%s: %s", path, strerror(-e)) : CTL_OK;
}

int ctl_read_text(struct ctl *c, struct ctl_input *in)
{
	memset(in, 0, sizeof(*in));
	if (c->n_args + !!c->file != 1)
		return ctl_usage(c, c->n_args > 1 ? "one TEXT, please: put quotes round it" :
				    c->file && c->n_args ? "TEXT or -f FILE, not both" :
							   "give TEXT, -f FILE or - for standard input");
	if (c->file)
		return from_file(c, c->file, in);
	if (!strcmp(c->args[0], "-"))
		return from_file(c, "-", in);
	in->text = strdup(c->args[0]);
	in->len = in->text ? strlen(in->text) : 0;
	return in->text ? CTL_OK : ctl_fail(c, "out of memory");
}

static bool space(char ch)
{
	return ch == ' ' || ch == '\n' || ch == '\t' || ch == '\r';
}

/* Decimal numbers with one comma (and any blanks) or blanks alone between. */
static int parse_ids(struct ctl *c, const char *s, size_t len, struct ctl_input *in)
{
	const char *end = s + len;
	bool comma = true;

	in->ids = malloc((len / 2 + 1) * sizeof(*in->ids));
	if (!in->ids)
		return ctl_fail(c, "out of memory");
	while (s < end) {
		uint64_t v = 0;
		const char *from = s;

		if (space(*s)) {
			s++;
			continue;
		}
		if (*s == ',' && !comma) {
			comma = true;
			s++;
			continue;
		}
		while (s < end && *s >= '0' && *s <= '9' && v <= UINT32_MAX)
			v = v * 10 + (uint64_t)(*s++ - '0');
		if (s == from || v > UINT32_MAX || (s < end && !space(*s) && *s != ','))
			return ctl_usage(c, "IDS: \"%.*s\" is no id: give numbers from 0 to 4294967295 with commas between",
					 (int)(end - from < 12 ? end - from : 12), from);
		in->ids[in->n_ids++] = (uint32_t)v;
		comma = false;
	}
	if (comma && in->n_ids)
		return ctl_usage(c, "IDS: nothing after the last comma");
	if (!in->n_ids)
		return ctl_usage(c, "IDS: there is none");
	return CTL_OK;
}

int ctl_read_ids(struct ctl *c, const char *spec, struct ctl_input *in)
{
	int e;

	memset(in, 0, sizeof(*in));
	if (*spec != '@')
		return parse_ids(c, spec, strlen(spec), in);
	e = from_file(c, spec + 1, in);
	if (e)
		return e;
	e = parse_ids(c, in->text, in->len, in);
	free(in->text);
	in->text = NULL;
	in->len = 0;
	return e;
}

void ctl_input_free(struct ctl_input *in)
{
	free(in->text);
	free(in->ids);
	memset(in, 0, sizeof(*in));
}
