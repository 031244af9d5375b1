/* SPDX-License-Identifier: MIT */
/* Owns: identities, sessions and their accounting. See session.h. */
#include "daemon/session.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SPARES = 4, OVERFLOW_UID = 65534 };

int sessions_init(struct sessions *t, const struct options *o)
{
	memset(t, 0, sizeof(*t));
	t->o = o;
	if (getrandom(&t->epoch, sizeof(t->epoch), 0) != sizeof(t->epoch))
		return -errno;
	t->epoch |= 1; /* 0 means none in HELLO */
	t->next_id = 1;
	t->next_scope = 1;
	uint64_t most = o->limits.region_bytes < APR_REGION_MAX ? o->limits.region_bytes : APR_REGION_MAX;
	t->limits = (struct apr_limits){ APR_SQ_MAX, APR_CQ_MAX, (uint32_t)most, (uint32_t)most, 0 };
	return 0;
}

static void session_destroy(struct session *s)
{
	apr_region_unmap(&s->req);
	apr_region_unmap(&s->res);
	apr_arena_free(&s->arena);
	if (s->doorbell >= 0)
		close(s->doorbell);
	free(s);
}

/* Regions, doorbell and arena; no owner yet. */
static int session_make(struct sessions *t, const struct apr_geometry *g, struct session **out)
{
	struct session *s = calloc(1, sizeof(*s));

	if (!s)
		return -ENOMEM;
	s->id = t->next_id++;
	s->geo = *g;
	s->req = s->res = (struct apr_region)APR_REGION_INIT;
	s->doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	int e = s->doorbell < 0 ? -errno : 0;
	if (!e)
		e = apr_region_create(&s->req, APR_FD_REQ, g, t->epoch, s->id);
	if (!e)
		e = apr_region_create(&s->res, APR_FD_RES, g, t->epoch, s->id);
	if (!e)
		e = apr_arena_init(&s->arena, g->res_arena_off, g->res_arena_len, g->cq_entries);
	if (e) {
		session_destroy(s);
		return e;
	}
	s->jobs_tail = &s->jobs;
	apr_rd_init(&s->ring, s->req.base, s->res.base, g);
	*out = s;
	return 0;
}

/* What a client is told where its regions could not be had: numbers of the protocol's table. */
static int told(int err, const char **why)
{
	switch (err) {
	case -ENOSPC:
	case -EFBIG: /* RLIMIT_FSIZE holds for memfds too */
		*why = "no room for the session's regions";
		return -ENOSPC;
	case -EMFILE:
	case -ENFILE:
		*why = "aprd has too many descriptors open";
		return -EAGAIN;
	default:
		*why = "no memory for the session's regions";
		return -ENOMEM;
	}
}

static bool default_geometry(struct sessions *t, struct apr_geometry *g)
{
	struct apr_wish wish = { 0 };

	return !apr_geometry_plan(&wish, &t->limits, g, NULL);
}

void sessions_refill(struct sessions *t)
{
	struct apr_geometry g;

	if (!default_geometry(t, &g))
		return;
	while (t->n_spare < SPARES && !session_make(t, &g, &t->spare[t->n_spare]))
		t->n_spare++;
}

uint64_t sessions_spare_bytes(const struct sessions *t)
{
	uint64_t n = 0;

	for (uint32_t i = 0; i < t->n_spare; i++)
		n += t->spare[i]->req.size + t->spare[i]->res.size;
	return n;
}

void sessions_fini(struct sessions *t)
{
	while (t->n_spare)
		session_destroy(t->spare[--t->n_spare]);
}

struct identity *identity_get(struct sessions *t, const char *tenant, uid_t uid)
{
	struct identity *who;

	if (uid != OVERFLOW_UID)
		for (who = t->identities; who; who = who->next)
			if (who->uid == uid && !strcmp(who->tenant, tenant))
				return who;
	who = calloc(1, sizeof(*who));
	if (!who)
		return NULL;
	strncpy(who->tenant, tenant, sizeof(who->tenant) - 1);
	who->uid = uid;
	who->scope = t->next_scope++;
	who->next = t->identities;
	t->identities = who;
	return who;
}

void identity_groups(struct sessions *t, struct identity *who, int sock, gid_t gid)
{
	socklen_t len = sizeof(who->groups) - sizeof(gid_t);

	who->groups[0] = gid;
	who->n_groups = 1;
	/* of more groups than there is room for only the first one counts */
	if (!getsockopt(sock, SOL_SOCKET, SO_PEERGROUPS, &who->groups[1], &len))
		who->n_groups += len / (socklen_t)sizeof(gid_t);
	who->may = *options_limits(t->o, who->uid, who->groups, who->n_groups);
}

bool identity_is_nobody(const struct identity *who)
{
	return who->uid == OVERFLOW_UID;
}

void identities_limits(struct sessions *t)
{
	for (struct identity *who = t->identities; who; who = who->next)
		who->may = *options_limits(t->o, who->uid, who->groups, who->n_groups);
}

void identity_put(struct sessions *t, struct identity *who)
{
	/* a known user's scope outlives its connections, so that a short-lived process finds its prefix */
	if (who->connections || who->sessions || who->uid != OVERFLOW_UID)
		return;
	for (struct identity **p = &t->identities; *p; p = &(*p)->next) {
		if (*p == who) {
			*p = who->next;
			free(who);
			return;
		}
	}
}

static int plan(struct sessions *t, struct identity *who, const struct apr_hello *h, struct apr_geometry *g,
		const char **why)
{
	struct apr_wish wish = { h->sq_entries, h->cq_entries, h->req_size, h->res_size, h->sqe_size, h->cqe_size };
	int e = apr_geometry_plan(&wish, &t->limits, g, why);

	if (e)
		return e;
	uint64_t bytes = (uint64_t)g->req_size + g->res_size;
	if (who->sessions >= who->may.sessions)
		*why = "too many sessions of this user", e = -EDQUOT;
	else if (who->region_bytes + bytes > who->may.region_bytes)
		*why = "the regions of this user's sessions are at their limit", e = -EDQUOT;
	else if (t->region_bytes + bytes > t->o->limits.all_regions)
		*why = "the regions of all sessions are at their limit", e = -EAGAIN;
	return e;
}

int session_new(struct sessions *t, struct identity *who, const struct apr_hello *h, struct session **out,
		const char **why)
{
	struct apr_geometry g;
	struct session *s = NULL;
	int e = plan(t, who, h, &g, why);

	if (e)
		return e;
	if (t->n_spare && !memcmp(&g, &t->spare[t->n_spare - 1]->geo, sizeof(g))) {
		s = t->spare[--t->n_spare];
	} else {
		e = session_make(t, &g, &s);
		if (e)
			return told(e, why);
	}
	s->who = who;
	s->limits = who->may;
	memcpy(s->name, h->name, sizeof(s->name) - 1);
	s->ring_always = h->flags & APR_HELLO_RING_ALWAYS;
	s->io_next = t->all;
	if (t->all)
		t->all->io_prev = s;
	t->all = s;
	t->n++;
	who->sessions++;
	who->region_bytes += s->req.size + s->res.size;
	t->region_bytes += s->req.size + s->res.size;
	*out = s;
	return 0;
}

void session_free(struct sessions *t, struct session *s)
{
	struct identity *who = s->who;

	if (s->io_next)
		s->io_next->io_prev = s->io_prev;
	if (s->io_prev)
		s->io_prev->io_next = s->io_next;
	else
		t->all = s->io_next;
	t->n--;
	who->sessions--;
	who->region_bytes -= s->req.size + s->res.size;
	t->region_bytes -= s->req.size + s->res.size;
	session_destroy(s);
	identity_put(t, who);
}
