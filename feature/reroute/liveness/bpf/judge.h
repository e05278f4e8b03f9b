/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Judgement, at every tick of either loop of a session. The sender counts probes sent and not
 * answered. A stalled host sends none, so it blames no link. The probed end has only the time since
 * the last probe. Stalls of a CPU of this host extend that time, by up to LIVENESS_PATIENCE.
 */
#ifndef WEIR_LIVENESS_JUDGE_H
#define WEIR_LIVENESS_JUDGE_H

#define LIVENESS_MS	   1000000ULL
#define LIVENESS_LATE	   (1500 * 1000ULL)    /* a CPU with a later tick is stalled */
#define LIVENESS_PATIENCE  (500 * LIVENESS_MS) /* longest delay of a verdict by stalls */
#define LIVENESS_DOUBLINGS 6		       /* of the stable run, by flaps */

static __always_inline void liveness_tell(const struct liveness_setup *c, __u32 i, __u32 role,
					  __u32 phase, __u32 ended, __u64 now)
{
	struct liveness_event *e = bpf_ringbuf_reserve(&liveness_events, sizeof(*e), 0);

	if (!e)
		return; /* no reader; the state has the result */
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

/* liveness_enter changes the phase. It reports whether this CPU made the change. */
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

/* The current findings about one side of a session. */
struct liveness_finding {
	__u8 broken;  /* enough is missing for a verdict */
	__u8 sound;   /* no failure */
	__u8 stalled; /* this host may be the cause */
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
		/* A flap expires after a long time without another one. */
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

/*
 * liveness_grace returns the wait of a probe for its answer: three tenths of an interval, or more
 * if answers take longer.
 */
static __always_inline __u64 liveness_grace(const struct liveness_setup *c,
					    const struct liveness_state *s)
{
	__u64 grace = s->rtt_mean + 4 * s->rtt_dev;

	return grace > c->grace ? grace : c->grace;
}

/*
 * liveness_overdue reports whether the n-th probe after the last answered one has waited long
 * enough.
 */
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
		return; /* no answer yet: nothing can have failed */
	f.broken = liveness_overdue(s, c->multiplier, grace, now);
	f.sound = !liveness_overdue(s, 2, grace, now);
	f.stalled = (__s64)(now - stalled) <
		    (__s64)(settle > 5 * LIVENESS_MS ? settle : 5 * LIVENESS_MS);
	liveness_decide(&s->sender, c, &f, now, i);
}

/*
 * The peer sends every interval, and acknowledges an answer one interval later. So the window is
 * one interval more than its multiplier.
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
 * liveness_part restarts one side of a session. A link that was down stays down, because the end of
 * a session does not prove the link. It comes up again after enough packets.
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
 * liveness_forget restarts a session after the peer's farewell. From then on neither silence nor
 * late packets prove anything. The peer may return as another incarnation.
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
 * liveness_show sets the link state, at every tick. If a loop was late, the next one corrects it.
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
 * liveness_silent_peer reports whether the peer has ended the session and may have stopped. Before
 * that its farewells arrive every interval, and missing ones were lost on the link.
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
		/* Wait for the peer's last packets. */
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
