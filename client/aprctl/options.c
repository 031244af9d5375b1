/* SPDX-License-Identifier: MIT */
/*
 * The one table of options and the one of verbs: getopt_long, --help and the
 * check against the man page all read them.
 *
 * Owns: the command line. Does not own: what a verb does with it.
 */
#include "client/aprctl/ctl.h"
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define V(verb) (UINT32_C(1) << (verb))
#define GEN V(VERB_GENERATE)
#define ANSWERS (GEN | V(VERB_CHAT))
#define TEXTS (ANSWERS | V(VERB_TOKENIZE))
#define REQUESTS (TEXTS | V(VERB_SCORE) | V(VERB_DETOKENIZE))
#define ALL UINT32_MAX

const struct ctl_option ctl_options[] = {
	{KEY_SOCKET, "socket", 's', "SOCKET", ALL, "the daemon's client socket"},
	{KEY_JSON, "json", 0, NULL, ALL, "print one JSON object"},
	{KEY_HELP, "help", 'h', NULL, ALL, "show this text"},
	{KEY_VERSION, "version", 'V', NULL, ALL, "show the version"},
	{KEY_COUNT, "count", 'n', "N", ANSWERS | V(VERB_PING) | V(VERB_TOP) | V(VERB_STATUS),
	 "generate, chat: at most N tokens (128, 1024); ping: N round trips (10); top, status --watch: N screens"},
	{KEY_FILE, "file", 'f', "FILE", TEXTS, "take the text from FILE"},
	{KEY_IDS, "ids", 0, "IDS", GEN | V(VERB_SCORE), "take token ids as they are: 1,2,3 or @FILE"},
	{KEY_MODEL, "model", 'm', "NAME", REQUESTS, "which model, where several are loaded"},
	{KEY_SPECIAL, "special", 0, NULL, TEXTS | V(VERB_DETOKENIZE), "special tokens' text counts as special tokens"},
	{KEY_SYSTEM, "system", 0, "TEXT", V(VERB_CHAT), "a system message that stands first"},
	{KEY_MESSAGES, "messages", 0, "FILE", V(VERB_CHAT), "take the conversation from FILE: JSON"},
	{KEY_TEMP, "temp", 0, "T", ANSWERS, "temperature; 0 takes the best token always"},
	{KEY_TOP_K, "top-k", 0, "K", ANSWERS, "draw among the K best; 0 off"},
	{KEY_TOP_P, "top-p", 0, "P", ANSWERS, "draw among the best that add up to P; 1 off"},
	{KEY_MIN_P, "min-p", 0, "P", ANSWERS, "drop what is less likely than P times the best; 0 off"},
	{KEY_REPEAT, "repeat-penalty", 0, "R", ANSWERS, "push down what stood before; 1 off"},
	{KEY_FREQUENCY, "frequency-penalty", 0, "F", ANSWERS, "push down by how often it was said; 0 off"},
	{KEY_PRESENCE, "presence-penalty", 0, "F", ANSWERS, "push down what was said at all; 0 off"},
	{KEY_BIAS, "bias", 0, "ID:V", ANSWERS, "add V to a token's logit, -inf bans it; repeatable"},
	{KEY_LOGPROBS, "logprobs", 0, "K", GEN, "log-probabilities, and the K best of each step"},
	{KEY_SAMPLES, "samples", 0, "N", GEN, "N answers to one prompt, at most 64"},
	{KEY_PRIO, "prio", 0, "LEVEL", ANSWERS, "high, normal or low: who goes first, as far as the daemon allows it"},
	{KEY_SEED, "seed", 0, "S", ANSWERS, "repeat an answer; drawn where it is not given"},
	{KEY_STOP, "stop", 0, "STR", ANSWERS, "end before this text; repeatable"},
	{KEY_IGNORE_EOS, "ignore-eos", 0, NULL, GEN, "go on after an end token"},
	{KEY_TOP, "top", 0, "K", V(VERB_SCORE), "the K best at each position"},
	{KEY_STEP, "step", 0, NULL, V(VERB_SCORE), "compute as decode does, token by token"},
	{KEY_TIMEOUT, "timeout", 0, "SECONDS", REQUESTS | V(VERB_DRAIN) | V(VERB_REPLAY),
	 "give up (drain: cancel what still runs) after that long"},
	{KEY_CLIENTS, "clients", 0, NULL, V(VERB_STATUS), "who uses what, and what each may"},
	{KEY_WATCH, "watch", 'w', NULL, V(VERB_STATUS), "again each second; q ends it"},
	{KEY_LIST, "list", 0, NULL, V(VERB_CONFORM), "name the checks, run none"},
};
const size_t ctl_n_options = sizeof(ctl_options) / sizeof(ctl_options[0]);

const struct ctl_verb ctl_verbs[N_VERBS] = {
	[VERB_STATUS] = {"status", "[--clients] [--watch]", "what the daemon is and does", cmd_status},
	[VERB_MODELS] = {"models", "", "the models loaded, with their sampling values", cmd_models},
	[VERB_PING] = {"ping", "[-n N]", "how long a round trip through the ring takes", cmd_ping},
	[VERB_GENERATE] = {"generate", "[options] TEXT | --ids IDS", "continue a text", cmd_generate},
	[VERB_CHAT] = {"chat", "[options] [TEXT]", "talk through the model's own template", cmd_chat},
	[VERB_SCORE] = {"score", "--ids IDS [--top K] [--step]", "log-probabilities of given ids", cmd_score},
	[VERB_TOKENIZE] = {"tokenize", "[--special] TEXT", "text to ids", cmd_tokenize},
	[VERB_DETOKENIZE] = {"detokenize", "[--special] IDS", "ids to text", cmd_detokenize},
	[VERB_LOAD] = {"load", "[NAME=]FILE", "load a model (admin)", cmd_load},
	[VERB_UNLOAD] = {"unload", "NAME", "unload a model (admin)", cmd_unload},
	[VERB_WARMUP] = {"warmup", "", "run every recorded step once (admin)", cmd_warmup},
	[VERB_DRAIN] = {"drain", "[--timeout SECONDS]", "finish what runs, then end (admin)", cmd_drain},
	[VERB_CANCEL] = {"cancel", "SESSION [USER_DATA]", "cancel a session's requests (admin)", cmd_cancel},
	[VERB_RELOAD] = {"reload", "", "read the configuration file again (admin)", cmd_reload},
	[VERB_CONFIG] = {"config", "", "each setting, its value and where that came from (admin)", cmd_config},
	[VERB_METRICS] = {"metrics", "", "figures in the Prometheus text format", cmd_metrics},
	[VERB_CLIENTS] = {"clients", "", "who uses what, and what each may", cmd_clients},
	[VERB_TOP] = {"top", "[-n N]", "requests, tokens a second, KV and users, live", cmd_top},
	[VERB_CAPTURE] = {"capture", "FILE -- VERB...", "run a verb or a program and write all it says and hears to FILE",
			  cmd_capture},
	[VERB_REPLAY] = {"replay", "FILE", "say it again and compare the answers", cmd_replay},
	[VERB_CONFORM] = {"conform", "[--list] [CHECK...]", "check a daemon against the protocol", cmd_conform},
};

int ctl_find_verb(const char *name)
{
	for (int i = 0; i < N_VERBS; i++)
		if (!strcmp(ctl_verbs[i].name, name))
			return i;
	return -1;
}

static void print_option(const struct ctl_option *o)
{
	char left[64];

	if (o->letter)
		snprintf(left, sizeof(left), "-%c, --%s%s%s", o->letter, o->name, o->arg ? " " : "", o->arg ? o->arg : "");
	else
		snprintf(left, sizeof(left), "    --%s%s%s", o->name, o->arg ? " " : "", o->arg ? o->arg : "");
	printf("  %-28s %s\n", left, o->help);
}

static int help(const struct ctl *c)
{
	if (!c->verb) {
		printf("usage: aprctl [-s SOCKET] [--json] VERB ...\n\nverbs:\n");
		for (int i = 0; i < N_VERBS; i++)
			printf("  %-12s %-31s %s\n", ctl_verbs[i].name, ctl_verbs[i].args, ctl_verbs[i].help);
		printf("\noptions of all verbs:\n");
		for (size_t i = 0; i < ctl_n_options; i++)
			if (ctl_options[i].verbs == ALL)
				print_option(&ctl_options[i]);
		printf("\naprctl VERB --help shows a verb's own. Wherever TEXT stands, -f FILE or - (standard input) may.\n");
		return CTL_OK;
	}
	printf("usage: aprctl [-s SOCKET] [--json] %s%s%s\n%s\n\noptions:\n", c->verb->name, *c->verb->args ? " " : "",
	       c->verb->args, c->verb->help);
	for (size_t i = 0; i < ctl_n_options; i++)
		if (ctl_options[i].verbs >> (c->verb - ctl_verbs) & 1)
			print_option(&ctl_options[i]);
	return CTL_OK;
}

/* ---- values ------------------------------------------------------------------ */

static int bad_value(const struct ctl *c, const struct ctl_option *o, const char *value, const char *want)
{
	return ctl_usage(c, "--%s %s: %s", o->name, value, want);
}

static int take_u32(const struct ctl *c, const struct ctl_option *o, const char *value, uint32_t most, uint32_t *out)
{
	uint64_t v;
	char want[64];

	if (!ctl_parse_u64(value, &v) || v > most) {
		snprintf(want, sizeof(want), "give a number from 0 to %u", most);
		return bad_value(c, o, value, want);
	}
	*out = (uint32_t)v;
	return CTL_OK;
}

/* The bounds are the protocol's, so that a value outside them is wrong usage, told by the option's name. A NaN
 * is within none. */
static int take_float(struct ctl *c, const struct ctl_option *o, const char *value, float *out, uint32_t set)
{
	if (!ctl_parse_float(value, out))
		return bad_value(c, o, value, "give a number");
	if (set == APR_SET_TEMPERATURE && !(isfinite(*out) && *out >= 0))
		return bad_value(c, o, value, "give 0 or more");
	if ((set == APR_SET_TOP_P || set == APR_SET_MIN_P) && !(*out >= 0 && *out <= 1))
		return bad_value(c, o, value, "give a number from 0 to 1");
	if (set == APR_SET_REPEAT && !(isfinite(*out) && *out > 0))
		return bad_value(c, o, value, "give a number above 0");
	if (!isfinite(*out))
		return bad_value(c, o, value, "give a finite number");
	c->sampling.set |= set;
	return CTL_OK;
}

static int take_top_k(struct ctl *c, const struct ctl_option *o, const char *value)
{
	char *end;
	long v = strtol(value, &end, 10);

	if (end == value || *end || v < INT32_MIN || v > INT32_MAX)
		return bad_value(c, o, value, "give a whole number");
	c->sampling.top_k = (int32_t)v;
	c->sampling.set |= APR_SET_TOP_K;
	return CTL_OK;
}

static int take_bias(struct ctl *c, const struct ctl_option *o, const char *value)
{
	const char *colon = strchr(value, ':');
	char id[24];
	uint64_t v;

	if (c->n_bias == CTL_BIASES)
		return bad_value(c, o, value, "more biases than a request takes (1024)");
	if (!colon || (size_t)(colon - value) >= sizeof(id))
		return bad_value(c, o, value, "give ID:VALUE, such as 42:-inf");
	memcpy(id, value, (size_t)(colon - value));
	id[colon - value] = 0;
	if (!ctl_parse_u64(id, &v) || v > UINT32_MAX || !ctl_parse_float(colon + 1, &c->bias[c->n_bias]))
		return bad_value(c, o, value, "give ID:VALUE, such as 42:-inf");
	c->bias_ids[c->n_bias++] = (uint32_t)v;
	return CTL_OK;
}

static int take_stop(struct ctl *c, const struct ctl_option *o, const char *value)
{
	if (c->n_stop == CTL_STOPS)
		return bad_value(c, o, value, "more stop texts than a request takes (16)");
	if (!*value)
		return ctl_usage(c, "--stop: the text is empty");
	if (strlen(value) > APR_STOP_BYTES_MAX)
		return ctl_usage(c, "--stop: %zu bytes, and a stop text has at most %u", strlen(value), APR_STOP_BYTES_MAX);
	c->stop[c->n_stop++] = value;
	return CTL_OK;
}

static int take_samples(struct ctl *c, const struct ctl_option *o, const char *value)
{
	uint64_t v;

	if (!ctl_parse_u64(value, &v) || !v || v > CTL_SAMPLES)
		return bad_value(c, o, value, "give a number from 1 to 64");
	c->samples = (uint32_t)v;
	return CTL_OK;
}

static int take_seed(struct ctl *c, const struct ctl_option *o, const char *value)
{
	return ctl_parse_u64(value, &c->seed) ? CTL_OK : bad_value(c, o, value, "give a number from 0 to 2^64 - 1");
}

static int take_prio(struct ctl *c, const struct ctl_option *o, const char *value)
{
	static const char *const levels[] = {"normal", "low", "high"}; /* by the wire's number */

	for (uint32_t i = 0; i < 3; i++)
		if (!strcmp(value, levels[i])) {
			c->prio = i;
			return CTL_OK;
		}
	return bad_value(c, o, value, "give high, normal or low");
}

static int take_timeout(struct ctl *c, const struct ctl_option *o, const char *value)
{
	float s;

	if (!ctl_parse_float(value, &s) || !(s > 0.0f && s <= 4000000.0f))
		return bad_value(c, o, value, "give seconds above 0, fractions too");
	c->timeout_ms = (uint32_t)((double)s * 1000.0 + 0.5);
	if (!c->timeout_ms)
		c->timeout_ms = 1;
	return CTL_OK;
}

static int take(struct ctl *c, const struct ctl_option *o, const char *value)
{
	struct apr_sampling *s = &c->sampling;

	c->given |= UINT64_C(1) << o->key;
	switch (o->key) {
	case KEY_SOCKET: c->socket = value; return CTL_OK;
	case KEY_JSON: c->json = true; return CTL_OK;
	case KEY_COUNT: return take_u32(c, o, value, UINT32_MAX, &c->count);
	case KEY_FILE: c->file = value; return CTL_OK;
	case KEY_IDS: c->ids = value; return CTL_OK;
	case KEY_MODEL: c->model = value; return CTL_OK;
	case KEY_SPECIAL: c->special = true; return CTL_OK;
	case KEY_TEMP: return take_float(c, o, value, &s->temperature, APR_SET_TEMPERATURE);
	case KEY_TOP_K: return take_top_k(c, o, value);
	case KEY_TOP_P: return take_float(c, o, value, &s->top_p, APR_SET_TOP_P);
	case KEY_MIN_P: return take_float(c, o, value, &s->min_p, APR_SET_MIN_P);
	case KEY_REPEAT: return take_float(c, o, value, &s->repeat_penalty, APR_SET_REPEAT);
	case KEY_FREQUENCY: return take_float(c, o, value, &s->frequency_penalty, APR_SET_FREQUENCY);
	case KEY_PRESENCE: return take_float(c, o, value, &s->presence_penalty, APR_SET_PRESENCE);
	case KEY_BIAS: return take_bias(c, o, value);
	case KEY_LOGPROBS: return take_u32(c, o, value, APR_LOGPROBS_MAX, &c->logprobs);
	case KEY_SAMPLES: return take_samples(c, o, value);
	case KEY_SEED: return take_seed(c, o, value);
	case KEY_STOP: return take_stop(c, o, value);
	case KEY_IGNORE_EOS:
		s->ignore_eos = 1;
		s->set |= APR_SET_IGNORE_EOS;
		return CTL_OK;
	case KEY_TOP: return take_u32(c, o, value, APR_LOGPROBS_MAX, &c->top);
	case KEY_STEP: c->step = true; return CTL_OK;
	case KEY_TIMEOUT: return take_timeout(c, o, value);
	case KEY_LIST: c->list = true; return CTL_OK;
	case KEY_PRIO: return take_prio(c, o, value);
	case KEY_WATCH: c->watch = true; return CTL_OK;
	case KEY_CLIENTS: c->clients = true; return CTL_OK;
	case KEY_SYSTEM: c->system = value; return CTL_OK;
	case KEY_MESSAGES: c->messages = value; return CTL_OK;
	default: return CTL_OK;
	}
}

/* ---- getopt ------------------------------------------------------------------- */

/* The options that stand before the verb (verb < 0), or those of a verb. '+': stop at the first word. */
static void build(int verb, char *letters, struct option *longs)
{
	size_t n = 0, l = 0;

	if (verb < 0 || verb == VERB_CAPTURE)
		letters[l++] = '+';
	letters[l++] = ':';
	for (size_t i = 0; i < ctl_n_options; i++) {
		const struct ctl_option *o = &ctl_options[i];

		if (verb < 0 ? o->verbs != ALL : !(o->verbs >> verb & 1))
			continue;
		longs[n++] = (struct option){o->name, o->arg ? required_argument : no_argument, NULL, 1000 + (int)i};
		if (o->letter) {
			letters[l++] = o->letter;
			if (o->arg)
				letters[l++] = ':';
		}
	}
	letters[l] = 0;
	longs[n] = (struct option){0};
}

static const struct ctl_option *option_of(int ch)
{
	if (ch >= 1000)
		return &ctl_options[ch - 1000];
	for (size_t i = 0; i < ctl_n_options; i++)
		if (ctl_options[i].letter && ctl_options[i].letter == ch)
			return &ctl_options[i];
	return NULL;
}

static int parse_part(struct ctl *c, int verb, int argc, char **argv, bool *done)
{
	char letters[2 * N_KEYS + 3];
	struct option longs[N_KEYS + 1];
	int ch, e;

	build(verb, letters, longs);
	optind = 0; /* glibc: start anew */
	opterr = 0;
	while ((ch = getopt_long(argc, argv, letters, longs, NULL)) != -1) {
		const struct ctl_option *o = ch == '?' || ch == ':' ? NULL : option_of(ch);

		*done = true;
		if (!o && ch == ':')
			return ctl_usage(c, "%s wants a value", argv[optind - 1]);
		if (!o && optopt && optopt < 256)
			return ctl_usage(c, "no option -%c here", optopt);
		if (!o)
			return ctl_usage(c, "no option %s here", argv[optind - 1]);
		if (o->key == KEY_HELP)
			return help(c);
		if (o->key == KEY_VERSION) {
			printf("aprctl %s, abi %u.%u\n", APR_VERSION, APR_ABI_MAJOR, APR_ABI_MINOR);
			return CTL_OK;
		}
		e = take(c, o, optarg);
		if (e)
			return e;
		*done = false;
	}
	return CTL_OK;
}

int ctl_parse(struct ctl *c, int argc, char **argv, bool *done)
{
	const char *no_color = getenv("NO_COLOR");
	int e, at, verb;

	memset(c, 0, sizeof(*c));
	*done = false;
	c->samples = 1;
	c->color = !(no_color && *no_color) && isatty(STDOUT_FILENO);
	e = parse_part(c, -1, argc, argv, done);
	if (e || *done)
		return e;
	at = optind;
	*done = true;
	if (at >= argc)
		return ctl_usage(c, "name a verb");
	if (!strcmp(argv[at], "help")) { /* no verb, and yet what many try first */
		verb = at + 1 < argc ? ctl_find_verb(argv[at + 1]) : -1;
		if (at + 1 < argc && verb < 0)
			return ctl_usage(c, "no verb %s", argv[at + 1]);
		c->verb = verb < 0 ? NULL : &ctl_verbs[verb];
		return help(c);
	}
	verb = ctl_find_verb(argv[at]);
	if (verb < 0)
		return ctl_usage(c, "no verb %s", argv[at]);
	*done = false;
	c->verb = &ctl_verbs[verb];
	e = parse_part(c, verb, argc - at, argv + at, done);
	if (e || *done)
		return e;
	c->args = argv + at + optind;
	c->n_args = argc - at - optind;
	return CTL_OK;
}
