/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Priority admission with reservations: the tier of a packet, and the check for room in the total.
 * Every hook uses it, so equal packets get equal decisions.
 */
#ifndef WEIR_GUARD_ADMIT_H
#define WEIR_GUARD_ADMIT_H

#include "bucket.h"
#include "bound.h"
#include "pattern.h"
#include "source.h"
#include "top.h"

/* A packet for the algorithm. */
struct guard_packet {
	__u64 now;     /* ns */
	__u64 source;  /* keyed hash of the source: an IPv4 address, or an IPv6 /64 */
	__u64 net;     /* its /24 or /48, hashed only under attack */
	__u64 port;    /* its source port */
	__u64 host;    /* the IPv6 address, keyed, not hashed yet; 0 for IPv4 */
	__u32 packets; /* merged datagrams: 1 to GUARD_MERGED */
};

/* Values of one decision. No pointers: separate functions receive it as memory. */
struct guard_moment {
	__u64 ticks;
	__u64 dice;  /* from the time and the secret hash: unpredictable from outside */
	__u32 epoch; /* of the guard */
	__u32 own; /* of the source: epochs begin at different times, to avoid simultaneous bursts */
	__u32 phase;  /* sixteenths of its own epoch */
	__u32 hot;    /* a packet was refused in this epoch or the two before */
	__u32 scarce; /* the source has the smallest reservation */
	__u32 print;  /* of the source */
};

static __always_inline __u64 guard_mix(__u64 x)
{
	x ^= x >> 32;
	x *= 0xd6e8feb86659fd93ULL;
	x ^= x >> 32;
	x *= 0xd6e8feb86659fd93ULL;
	x ^= x >> 32;
	return x;
}

/*
 * guard_mix_of is guard_mix as a function, outside the path of a calm guard's packets: see
 * guard_spend_of.
 */
static __noinline __u64 guard_mix_of(__u64 x)
{
	return guard_mix(x);
}

/*
 * guard_share returns the maximum debt for a tier, in 1/256 of the depth. Unknown sources leave at
 * least a quarter of it to known ones. It is dithered, so no rhythm of an attack always or never
 * finds room.
 */
static __always_inline __u32 guard_share(const struct guard_moment *m, __u32 tier)
{
	__u32 random = m->dice >> 56;

	if (tier == GUARD_RESERVED) /* many tiny reservations together must not empty it */
		return m->hot && m->scarce ? 224 : 256;
	if (!guard_rare(m->hot))
		return 192;
	switch (tier) {
	case GUARD_EARNED:
		return 224 - (random >> 4);
	case GUARD_ABOVE:
		return 192 - (random >> 3);
	case GUARD_SEEN:
		return 192 - ((random * 80) >> 8);
	case GUARD_FRESH:
		return 96 - (random >> 3);
	}
	return 48 - (random >> 3);
}

/*
 * guard_threshold returns a share of a depth. The depth is at most 2^37 ticks, so nothing
 * overflows.
 */
static __always_inline __s64 guard_threshold(__u32 share, __u64 depth)
{
	return (depth * share) >> 8;
}

/* guard_add_several adds packets to a source's count, and returns its word. */
__noinline __u64 guard_add_several(__u64 *word, __u64 w, __u32 packets)
{
	if (!word)
		return w;
#pragma clang loop unroll(disable)
	for (int i = 0; i < 4; i++) {
		__u32 room = SOURCE_COUNT(w) < 4080 ? 4080 - SOURCE_COUNT(w) : 0;
		__u64 sum = w + (packets < room ? packets : room), was = guard_cas(word, w, sum);

		if (was == w)
			return sum;
		if (SOURCE_PRINT(was) != SOURCE_PRINT(w))
			return sum; /* replaced meanwhile: not counted */
		w = was;
	}
	return w;
}

/*
 * guard_add adds packets to a source's count. It adds a single packet atomically: 15 counts are
 * spare, for as many concurrent CPUs, so the count never overflows into shown. Several packets do
 * not fit the spare counts.
 */
static __always_inline __u64 guard_add(__u64 *word, __u64 w, __u32 packets)
{
	if (guard_rare(packets > 1))
		return guard_add_several(word, w, packets);
	return SOURCE_COUNT(w) < 4080 ? __sync_fetch_and_add(word, 1) + 1 : w;
}

/*
 * guard_count adds packets to a known source's word and returns the word. In a new epoch it adjusts
 * the reservation.
 */
static __always_inline __u64 guard_count(struct guard_state *s, const struct guard_moment *m,
					 __u64 *word, __u64 w, __u32 packets)
{
	struct guard_total *t = &s->total;

	/* A late clock on another CPU is not a new epoch. */
	if (guard_rare(((m->own - 1 - SOURCE_EPOCH(w)) & 4095) < 4000)) {
		__u64 turned = source_turn(s, w, m->own, m->hot, packets);

		if (guard_cas(word, w, turned) == w) {
			guard_reserve(t, (__s32)SOURCE_RESERVED(turned) - (__s32)SOURCE_RESERVED(w),
				      !!SOURCE_RESERVED(turned) - !!SOURCE_RESERVED(w));
			return turned;
		}
		w = guard_read(*word); /* another CPU turned it, or replaced it */
		return SOURCE_PRINT(w) == m->print ? guard_add(word, w, packets) : w;
	}
	if (SOURCE_SCORE(w) != GUARD_GRANTED && SOURCE_COUNT(w) > guard_allowed(s, w, m->hot)) {
		__u64 bad = source_word(m->print, SOURCE_EPOCH(w), GUARD_BAD, GUARD_ITSELF,
					GUARD_EXCEEDED);

		/* Written once an epoch: further packets of a flood add no information. */
		if (w != bad)
			guard_cas(word, w, bad);
		return bad;
	}
	return guard_add(word, w, packets);
}

/*
 * guard_one_host reports whether one host of a /64 floods. The other hosts and their reservation
 * are not affected then.
 */
static __always_inline int guard_one_host(struct guard_state *s, const struct guard_packet *p,
					  __u64 w)
{
	__u32 own = SOURCE_SCORE(w) >= GUARD_NEED_HOT && SOURCE_SCORE(w) != GUARD_BAD ?
			    SOURCE_SHOWN(w) + (SOURCE_SHOWN(w) >> 2) :
			    0;
	struct guard_sighting g = { .at = p->now >> 8, .packets = p->packets };
	__u32 calm;

	calm = guard_allowed(s, 0, 1) >> 1;
	if (own < calm)
		own = calm;
	if (!p->host || SOURCE_COUNT(w) <= own)
		return 0;
	g.wide = g.heavy = guard_limits_of(s)->pattern;
	return guard_width_of(&s->sketch[GUARD_BY_HOST], guard_mix_of(p->host ^ s->total.seed[1]),
			      &g) == GUARD_HEAVIEST;
}

/* Flags of guard_known's result, beside the tier. */
#define GUARD_SCARCE	256
#define GUARD_LARGE	512  /* above calm: heavy if others need the room */
#define GUARD_CONDEMNED 1024 /* heavy for its pattern alone */

/* guard_known returns the tier of a known source, with number i of all. */
int guard_known(struct guard_state *s, const struct guard_packet *p, const struct guard_moment *m,
		__u32 i)
{
	__u32 count, reserved, shown, paced;
	const struct guard_limits *l;
	struct guard_total *t;
	__u64 *word, w;

	if (guard_rare(!s || !p || !m))
		return GUARD_FRESH;
	t = &s->total;
	l = guard_limits_of(s);
	word = guard_source(s, i);
	w = guard_read(*word);
	if (guard_rare(m->hot) && guard_one_host(s, p, w))
		return GUARD_HEAVY;
	if (SOURCE_PRINT(w) != m->print)
		w = source_word(m->print, m->own, 0, 0, 0); /* replaced meanwhile: not counted */
	else
		w = guard_count(s, m, word, w, p->packets);
	count = SOURCE_COUNT(w);
	reserved = SOURCE_RESERVED(w);
	shown = SOURCE_SHOWN(w);
	/* Under attack, the shown rate of a source is paced over its epoch. */
	paced = count <= 1 + (shown >> 2) + ((shown * 5 * (m->phase + 1)) >> 6);
	if (!reserved) {
		if (SOURCE_SCORE(w) == GUARD_BAD)
			return shown == GUARD_ITSELF ? GUARD_HEAVY : GUARD_HEAVY | GUARD_CONDEMNED;
		if (SOURCE_SCORE(w) >= GUARD_NEED_HOT && count <= 2 * shown + 4)
			return paced ? GUARD_EARNED : GUARD_ABOVE;
		if (count > t->calm)
			return GUARD_SEEN | GUARD_LARGE;
		return count > 1 || SOURCE_SCORE(w) ? GUARD_SEEN : GUARD_FRESH;
	}
	if (paced)
		return reserved < 2 ? GUARD_RESERVED | GUARD_SCARCE : GUARD_RESERVED;
	if (count <= 2 * reserved + 4 || count <= t->fair || count <= l->per_epoch >> 8)
		return GUARD_ABOVE;
	/* Far above: demoted at once. */
	if (m->hot && guard_cas(word, w,
				source_word(m->print, SOURCE_EPOCH(w), GUARD_BAD, GUARD_ITSELF,
					    GUARD_EXCEEDED)) == w)
		guard_reserve(t, -(__s32)reserved, -1);
	return GUARD_HEAVY;
}

/* guard_condemn prevents the promotion of a source in a heavy pattern. */
int guard_condemn(struct guard_state *s, __u32 i, __u32 print)
{
	__u64 *word, w;

	if (!s)
		return 0;
	word = guard_source(s, i);
	w = guard_read(*word);
	if (SOURCE_PRINT(w) == print && !SOURCE_RESERVED(w) && SOURCE_SCORE(w) != GUARD_BAD)
		guard_cas(word, w,
			  source_word(print, SOURCE_EPOCH(w), GUARD_BAD, 0, SOURCE_COUNT(w)));
	return 0;
}

#define GUARD_IN_ANY_CASE -1 /* of guard_strange: refused in any case, without measuring */

/*
 * guard_strange returns the width of the patterns of a packet from an unreserved source. Of packets
 * refused in any case, only a quarter is measured, with four times the weight. For the others it
 * returns GUARD_IN_ANY_CASE.
 */
int guard_strange(struct guard_state *s, const struct guard_packet *p, const struct guard_moment *m,
		  __u32 tier)
{
	struct guard_sighting g = {};
	const struct guard_limits *l;
	__u32 window, step;
	int net, port;
	__u64 key;

	if (!s || !p || !m)
		return 0;
	l = guard_limits_of(s);
	key = s->total.seed[1];
	window = p->now >> GUARD_WINDOW_SHIFT;
	if (guard_rare(guard_read(s->total.window) != window))
		guard_window(s, window);
	g.at = p->now >> 8;
	g.packets = p->packets;
	g.wide = l->pattern;
	step = guard_read(s->total.pattern_step);
	g.heavy = g.wide << (step < GUARD_PATTERN_STEPS ? GUARD_PATTERN_STEPS - step : 0);
	if (tier == GUARD_FRESH && l->interval &&
	    (__s64)(guard_read(s->total.debt) + l->interval - m->ticks) >
		    guard_threshold(guard_share(m, GUARD_FRESH), l->depth)) {
		if (m->dice >> 40 & 3)
			return GUARD_IN_ANY_CASE;
		g.packets *= 4;
	}
	net = guard_width_of(&s->sketch[GUARD_BY_NET], guard_mix_of(p->net ^ key), &g);
	port = guard_width_of(&s->sketch[GUARD_BY_PORT], guard_mix_of(~p->port ^ key), &g);
	return net > port ? net : port;
}

enum { GUARD_SPENT, GUARD_NO_TARGET, GUARD_NO_TOTAL };

/*
 * guard_lent returns the credit rule for merged packets. Unreserved sources get no credit from the
 * room of others. Under attack and without debt, they may use all but a quarter of the depth. They
 * may use more only without any reservation, or if no reserved source sent for the lifetime of a
 * reservation. Otherwise a sole sender of merged packets would get nothing at a low limit.
 */
static __always_inline __u32 guard_lent(const struct guard_total *t, const struct guard_moment *m,
					__u32 tier, __u64 cost, __u64 depth)
{
	if (!m->hot || tier <= GUARD_ABOVE)
		return GUARD_LENT_ROOM;
	/* A source's own epoch may be one ahead. */
	if (cost <= depth - (depth >> 2) || !t->reserved || m->epoch + 1 - t->held > GUARD_IDLE + 1)
		return GUARD_LENT_IDLE;
	return GUARD_LENT_NEVER;
}

/*
 * guard_spend_both takes credit of both the destination and the total, or of neither. It returns
 * the refusing one.
 */
__noinline int guard_spend_both(struct guard_state *s, struct guard_target *d,
				const struct guard_moment *m, __u32 tier, __u32 packets)
{
	struct guard_price price = { .packets = packets };
	const struct guard_limits *l;
	__u32 share;

	if (!s || !m)
		return GUARD_SPENT;
	l = guard_limits_of(s);
	share = guard_share(m, tier);
	price.interval = l->target_interval;
	if (guard_rare(d) && guard_rare(packets > 1))
		price.lent =
			guard_lent(&s->total, m, tier, price.interval * packets, l->target_depth);
	if (guard_rare(d) &&
	    !guard_spend_of(&d->debt, m->ticks, &price, guard_threshold(share, l->target_depth)))
		return GUARD_NO_TARGET;
	price.interval = l->interval;
	if (guard_rare(packets > 1))
		price.lent = guard_lent(&s->total, m, tier, price.interval * packets, l->depth);
	if (!l->interval ||
	    guard_spend_of(&s->total.debt, m->ticks, &price, guard_threshold(share, l->depth)))
		return GUARD_SPENT;
	if (d)
		guard_refund(&d->debt, l->target_interval * packets);
	return GUARD_NO_TOTAL;
}

/*
 * guard_spend_early is guard_spend_both for a calm guard. A single packet without destination
 * limits needs no call.
 */
static __always_inline int guard_spend_early(struct guard_state *s, struct guard_target *d,
					     const struct guard_moment *m, __u32 packets)
{
	const struct guard_limits *l = guard_limits_of(s);
	struct guard_price one = { .interval = l->interval, .packets = 1 };

	if (guard_rare(d) || guard_rare(packets > 1))
		return guard_spend_both(s, d, m, GUARD_HEAVY, packets) == GUARD_SPENT;
	return !l->interval || guard_spend(&s->total.debt, m->ticks, &one,
					   guard_threshold(guard_share(m, GUARD_HEAVY), l->depth));
}

/* guard_stranger remembers an unknown source, at a limited rate. */
static __always_inline void guard_stranger(struct guard_state *s, const struct guard_packet *p,
					   const struct guard_moment *m)
{
	__u64 interval = guard_limits_of(s)->insert_interval, random = m->dice >> 56;
	struct guard_price one = { .interval = interval, .packets = 1 };

	if (guard_rare(guard_spend_of(&s->total.insert_debt, m->ticks, &one,
				      (interval << 4) - ((interval * random) >> 4))))
		guard_remember(s, p->source, source_word(m->print, m->own, 0, 0, p->packets & 255),
			       m->epoch, random);
}

#define GUARD_PASSES 256 /* flag of guard_decide's result, beside the tier */
#define GUARD_SAMPLE 512 /* one of GUARD_TOP_SAMPLE refused packets */

/*
 * guard_decide returns the packet's tier and whether it passes. target is the entry of its
 * destination, or 0 without a limit for each.
 */
int guard_decide(struct guard_state *s, const struct guard_packet *p, struct guard_target *target)
{
	struct guard_moment m = {};
	__u32 tier = GUARD_FRESH;
	int known, strange = GUARD_NARROW, early, refused;
	__u32 flags = 0;
	struct guard_total *t;
	__u64 shifted;

	if (guard_rare(!s || !p))
		return GUARD_PASSES;
	t = &s->total;
	shifted = p->now + ((p->source >> 9) & ((1ULL << GUARD_EPOCH_SHIFT) - 1));
	m.print = (__u32)(p->source >> 40) | 1;
	m.epoch = p->now >> GUARD_EPOCH_SHIFT;
	m.ticks = p->now << GUARD_TICK_SHIFT;
	m.dice = (p->now ^ p->source) * 0x9e3779b97f4a7c15ULL;
	m.own = shifted >> GUARD_EPOCH_SHIFT;
	if (guard_rare(guard_read(t->epoch) != m.epoch || !t->ready))
		guard_epoch(s, m.epoch);
	m.hot = m.epoch - t->hot <= 2 || (target && m.epoch - target->hot <= 2);
	m.phase = m.hot ? (__u32)(shifted >> (GUARD_EPOCH_SHIFT - 4)) & 15 : 15;

	/*
	 * In a calm guard, all sources without a reservation have the same room. If there is room,
	 * it is taken before the source lookup. A compare-and-swap waits for all earlier loads, and
	 * the source's may come from memory.
	 */
	early = !m.hot && guard_spend_early(s, target, &m, p->packets);

	known = guard_find(s, p->source, m.print);
	if (known < 0) {
		guard_stranger(s, p, &m);
	} else {
		tier = guard_known(s, p, &m, known);
		flags = tier;
		m.scarce = !!(flags & GUARD_SCARCE);
		tier &= 7;
	}
	/* The pattern of a condemned source is still measured. Otherwise it would seem too small. */
	if (guard_rare(m.hot &&
		       ((flags & GUARD_CONDEMNED) || tier == GUARD_SEEN || tier == GUARD_FRESH)))
		strange = guard_strange(s, p, &m, tier);
	if (guard_rare(strange == GUARD_HEAVIEST)) {
		tier = GUARD_HEAVY;
		if (known >= 0)
			guard_condemn(s, known, m.print);
	}
	refused = early			       ? GUARD_SPENT :
		  strange == GUARD_IN_ANY_CASE ? GUARD_NO_TOTAL :
						 guard_spend_both(s, target, &m, tier, p->packets);
	if (!guard_rare(refused != GUARD_SPENT)) {
		if (target)
			__sync_fetch_and_add(&target->passed, p->packets);
		return tier | GUARD_PASSES;
	}
	/* Most of GUARD_FRESH never return, so no bound would make room for them. */
	if (m.hot && tier == GUARD_SEEN)
		__sync_fetch_and_add(&t->unmet,
				     p->packets * (GUARD_UNMET | (__u64)strange * GUARD_UNMET_WIDE |
						   (__u64)(flags & GUARD_LARGE) *
							   (GUARD_UNMET_LARGE / GUARD_LARGE)));
	/*
	 * The refusing part is under attack from now on: a flood of one destination leaves the
	 * others calm.
	 */
	if (target)
		__sync_fetch_and_add(&target->refused, p->packets);
	if (refused == GUARD_NO_TARGET && target)
		target->hot = m.epoch;
	else if (t->hot != m.epoch)
		t->hot = m.epoch;
	return tier | ((m.dice >> 32) % GUARD_TOP_SAMPLE < p->packets ? GUARD_SAMPLE : 0);
}

#endif
