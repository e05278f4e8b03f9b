/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Judgement, at every tick of either loop of a session. Who sends counts the probes that were sent
 * and not answered: a host that does not run sends none and blames nobody. Who is probed has only
 * the time since the last probe; what of it a CPU of this host did not run does not count, up to
 * LIVENESS_PATIENCE.
 */
#ifndef WEIR_LIVENESS_JUDGE_H
#define WEIR_LIVENESS_JUDGE_H

#define LIVENESS_MS 1000000ULL
#define LIVENESS_LATE \
	(1500 * 1000ULL) /* that a tick may be late before its CPU counts as stalled */
#define LIVENESS_PATIENCE  (500 * LIVENESS_MS) /* that stalls put one verdict off */
#define LIVENESS_DOUBLINGS 6		       /* of the stable run, by flaps */

static __always_inline void liveness_tell(const struct liveness_setup *c, __u32 i, __u32 role,
					  __u32 phase, __u32 ended, __u64 now)
{
	struct liveness_event *e = bpf_ringbuf_reserve(&liveness_events, sizeof(*e), 0);

	if (!e)
		return; /* nobody reads; the state says it all the same */
	e->time = now;
	e->session = i;
	e->id = c->id;
	e->ifindex = c->ifindex;
	e->role = role;
	e->phase = phase;
	e->ended = ended;
	e->spare = 0;
	bpf_ringbuf_submit(e, 0);
}

/* liveness_enter says whether this CPU is the one that takes a judgement to another phase. */
static __always_inline int liveness_enter(struct liveness_judgement *j, __u32 from, __u32 to,
					  __u64 now)
{
	if (__sync_val_compare_and_swap(&j->phase, from, to) != from)
		return 0;
	j->since = now;
	j->run = 0;
	j->suspect = 0;
	return 1;
}

static __always_inline __u64 liveness_hold(const struct liveness_setup *c,
					   const struct liveness_judgement *j)
{
	__u32 n = j->penalty < LIVENESS_DOUBLINGS ? j->penalty : LIVENESS_DOUBLINGS;
	__u64 hold = c->hold << n;

	return hold < c->hold_max || n == 0 ? hold : c->hold_max;
}

/* What is known at this moment of one side of a session. */
struct liveness_finding {
	__u8 broken;  /* enough is missing for a verdict */
	__u8 sound;   /* nothing is missing that counts */
	__u8 stalled; /* this host is to blame, perhaps */
	__u8 role;
};

static __noinline void liveness_decide(struct liveness_judgement *j, const struct liveness_setup *c,
				       const struct liveness_finding *f, __u64 now, __u32 i)
{
	__u32 phase;

	if (!j || !c || !f)
		return;
	phase = j->phase;
	if (f->broken) {
		j->run = 0;
		if (phase != LIVENESS_UP)
			return;
		if (!j->suspect)
			j->suspect = now;
		if (f->stalled && now - j->suspect < LIVENESS_PATIENCE) {
			j->granted++;
			return;
		}
		if (!liveness_enter(j, LIVENESS_UP, LIVENESS_DOWN, now))
			return;
		j->downs++;
		if (j->penalty < LIVENESS_DOUBLINGS && j->downs > 1)
			j->penalty++;
		liveness_tell(c, i, f->role, LIVENESS_DOWN, 0, now);
		return;
	}
	j->suspect = 0;
	if (phase == LIVENESS_UP) {
		/* A flap is forgotten after a long time without another. */
		if (j->penalty && now - j->since > 16 * liveness_hold(c, j)) {
			j->penalty--;
			j->since = now;
		}
		return;
	}
	if (!f->sound) {
		j->run = 0;
		return;
	}
	if (!j->run) {
		j->run = now;
		return;
	}
	if ((__s64)(now - j->run) >= (__s64)liveness_hold(c, j) &&
	    liveness_enter(j, phase, LIVENESS_UP, now))
		liveness_tell(c, i, f->role, LIVENESS_UP, 0, now);
}

/* liveness_grace is how long a probe waits for its answer: three tenths of an interval, longer where answers take longer. */
static __always_inline __u64 liveness_grace(const struct liveness_setup *c,
					    const struct liveness_state *s)
{
	__u64 grace = s->rtt_mean + 4 * s->rtt_dev;

	return grace > c->grace ? grace : c->grace;
}

/* liveness_overdue says whether the n-th probe after the last answered one has waited long enough. */
static __always_inline int liveness_overdue(const struct liveness_state *s, __u32 n, __u64 grace,
					    __u64 now)
{
	__u32 seq = s->answered + n, sent = s->seq;

	if ((__s32)(sent - seq) < 0)
		return 0;
	if (sent - seq >= LIVENESS_RING)
		return 1;
	return (__s64)(now - s->sent_at[seq & (LIVENESS_RING - 1)]) >= (__s64)grace;
}

static __always_inline void liveness_judge_sender(const struct liveness_setup *c,
						  struct liveness_state *s, __u64 now,
						  __u64 stalled, __u32 i)
{
	__u64 grace = liveness_grace(c, s), settle = grace + c->interval / 2;
	struct liveness_finding f = { .role = LIVENESS_BY_SENDER };

	if (!s->answers)
		return; /* nobody has ever answered: there is nothing that could have failed */
	f.broken = liveness_overdue(s, c->multiplier, grace, now);
	f.sound = !liveness_overdue(s, 2, grace, now);
	f.stalled = (__s64)(now - stalled) <
		    (__s64)(settle > 5 * LIVENESS_MS ? settle : 5 * LIVENESS_MS);
	liveness_decide(&s->sender, c, &f, now, i);
}

/*
 * The peer sends every interval, and acknowledges what it was answered an interval later, hence one
 * interval more than its multiplier says.
 */
static __always_inline __u64 liveness_window(const struct liveness_state *s)
{
	return s->peer_interval * (s->peer_multiplier + 1);
}

static __always_inline void liveness_judge_peer(const struct liveness_setup *c,
						struct liveness_state *s, __u64 now, __u64 stalled,
						__u32 i)
{
	struct liveness_finding f = { .role = LIVENESS_BY_PEER };
	__s64 silent;

	if (!s->last_fresh)
		return;
	silent = (__s64)(now - s->last_fresh);
	f.broken = silent >= (__s64)liveness_window(s);
	f.sound = silent < (__s64)(s->peer_interval * 5 / 2);
	f.stalled = (__s64)(now - stalled) < (__s64)(s->peer_interval * 5 / 2);
	liveness_decide(&s->peer, c, &f, now, i);
}

/*
 * liveness_part has one side of a session begin anew. A link that was found down stays down: the end of
 * the session does not say that it works. The side comes up again once it hears enough.
 */
static __always_inline void liveness_part(const struct liveness_setup *c,
					  struct liveness_judgement *j, __u32 role, __u64 now,
					  __u32 i)
{
	j->run = 0;
	j->suspect = 0;
	if (j->phase == LIVENESS_UP) {
		j->phase = LIVENESS_INIT;
		j->since = now;
		liveness_tell(c, i, role, LIVENESS_INIT, 1, now);
	} else if (j->phase == LIVENESS_DOWN) {
		liveness_tell(c, i, role, LIVENESS_DOWN, 1, now);
	}
}

/*
 * liveness_forget begins anew after the peer has said that it ends the session: neither silence nor what
 * still comes tells of the link. It may return as whoever it is then.
 */
static __always_inline void liveness_forget(const struct liveness_setup *c,
					    struct liveness_state *s, __u64 now, __u32 i)
{
	s->closed = 0;
	s->last_fresh = 0;
	s->answers = 0;
	s->answered = s->seq;
	liveness_part(c, &s->sender, LIVENESS_BY_SENDER, now, i);
	liveness_part(c, &s->peer, LIVENESS_BY_PEER, now, i);
}

/*
 * liveness_show tells the data path. At every tick: whichever loop was late in telling, the next one
 * tells it again.
 */
static __always_inline void liveness_show(const struct liveness_setup *c,
					  const struct liveness_state *s)
{
	union reroute_link *l;
	__u8 down;

	if (c->observe)
		return;
	l = reroute_link_of(c->ifindex);
	if (!l)
		return;
	down = s->sender.phase == LIVENESS_DOWN || s->peer.phase == LIVENESS_DOWN;
	if (l->probe != down)
		l->probe = down;
}

/*
 * liveness_silent_peer says that the peer has ended the session, and may send and answer nothing any more.
 * Until then its farewells come every interval, and what misses meanwhile was lost on the link.
 */
static __always_inline int liveness_silent_peer(const struct liveness_setup *c,
						const struct liveness_state *s, __u64 now)
{
	__u64 each = c->interval;

	if (s->peer_interval && s->peer_interval < each)
		each = s->peer_interval;
	return s->closed && (__s64)(now - s->closed) > (__s64)(each * 3 / 2);
}

static __always_inline void liveness_judge(const struct liveness_setup *c, struct liveness_state *s,
					   __u64 now, __u64 stalled, __u32 i)
{
	if (liveness_silent_peer(c, s, now)) {
		/* Not before the last of what the peer still sends has come. */
		if (now - s->closed > 4 * c->interval + 4 * s->peer_interval)
			liveness_forget(c, s, now, i);
	} else {
		if (c->sends)
			liveness_judge_sender(c, s, now, stalled, i);
		if (c->judges)
			liveness_judge_peer(c, s, now, stalled, i);
	}
	liveness_show(c, s);
}

#endif
