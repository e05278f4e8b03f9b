/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Verdicts between ticks. Loops tick once an interval. The last unanswered probe has waited long
 * enough three tenths of an interval after it was sent, and a timer judges at that moment.
 */
#ifndef WEIR_LIVENESS_VERDICT_H
#define WEIR_LIVENESS_VERDICT_H

#define LIVENESS_CLOCK_MONOTONIC 1

/* One tick of one loop. */
struct liveness_round {
	struct __sk_buff *skb;
	__u64 now;
	__u64 tick;
	__u64 stalled;
	__u32 loop;
	__u32 before; /* the loop backed up by this one */
	__u32 loops;
	__u32 sessions;
	__u32 each; /* sessions per loop */
	__u32 turn; /* session with its probe sent by the kernel's neighbour code */
	__u32 left; /* session plus one with a probe left for that code; it goes last */
	__u32 full; /* ignore wake times: the sessions may have been replaced */
};

/*
 * liveness_verdict returns the time an up session will be down if nothing arrives. It returns all
 * ones if more must be missing first.
 */
static __always_inline __u64 liveness_verdict(const struct liveness_setup *c,
					      const struct liveness_state *s)
{
	__u32 last = s->answered + c->multiplier;
	__u64 at = ~0ULL, silent;

	if (s->closed)
		return at;
	if (c->sends && s->answers && s->sender.phase == LIVENESS_UP && (__s32)(s->seq - last) >= 0)
		at = s->sent_at[last & (LIVENESS_RING - 1)] + liveness_grace(c, s);
	if (c->judges && s->last_fresh && s->peer.phase == LIVENESS_UP) {
		silent = s->last_fresh + liveness_window(s);
		if (silent < at)
			at = silent;
	}
	return at;
}

/*
 * liveness_delay returns the delay of the session's timer; 0: a tick judges in time. now may be
 * slightly old.
 */
static __always_inline __u64 liveness_delay(const struct liveness_setup *c,
					    const struct liveness_state *s, __u64 tick, __u64 now)
{
	__u64 at = liveness_verdict(c, s);
	__s64 left;

	if (at == ~0ULL || (__s64)(at - now) > (__s64)(2 * tick))
		return 0;
	left = (__s64)(at - liveness_now());
	if (left > (__s64)tick)
		return 0;
	/* A verdict delayed by a stall is judged again soon. */
	return left > 0 ? left : c->interval / 4;
}

static int liveness_judge_again(void *map, __u32 *i, struct liveness_timer *t)
{
	__u32 zero = 0, place = *i;
	struct liveness_tick_source *m = bpf_map_lookup_elem(&liveness_clockwork, &zero);
	struct liveness_common *shared = bpf_map_lookup_elem(&liveness_shared, &zero);
	struct liveness_setup *c = bpf_map_lookup_elem(&liveness_setups, &place);
	struct liveness_state *s = bpf_map_lookup_elem(&liveness_states, &place);
	__u64 now = liveness_now(), delay;

	if (!m || !shared || !c || !s || !c->on)
		return 0;
	liveness_judge(c, s, now, liveness_look(m, shared, LIVENESS_LOOPS, now), place);
	delay = liveness_delay(c, s, m->tick, now);
	if (delay)
		bpf_timer_start(&t->timer, delay, 0);
	return 0;
}

/* liveness_await starts the session's timer if a verdict may fall before the next tick. */
static __noinline int liveness_await(const struct liveness_setup *c, const struct liveness_state *s,
				     const struct liveness_round *r, __u32 i)
{
	struct liveness_timer *t;
	__u64 delay;

	if (!c || !s || !r || liveness_clock_given)
		return 0;
	delay = liveness_delay(c, s, r->tick, r->now);
	if (!delay)
		return 0;
	t = bpf_map_lookup_elem(&liveness_timers, &i);
	if (!t)
		return 0;
	/* Init fails if done before, and in unpinned maps: then only ticks judge. */
	bpf_timer_init(&t->timer, &liveness_timers, LIVENESS_CLOCK_MONOTONIC);
	bpf_timer_set_callback(&t->timer, liveness_judge_again);
	bpf_timer_start(&t->timer, delay, 0);
	return 0;
}

#endif
