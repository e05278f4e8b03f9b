/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Sending: a probe overwrites the loop's packet, and a copy leaves by the session's device. */
#ifndef WEIR_LIVENESS_SEND_H
#define WEIR_LIVENESS_SEND_H

#define LIVENESS_AF_INET6 10
#define LIVENESS_REFRESH  (250 * LIVENESS_MS) /* between lookups of a link address */

/*
 * liveness_neighbour caches the next hop's link address from the kernel. Until the kernel knows it,
 * probes use liveness_last only, which resolves it.
 */
static __noinline void liveness_neighbour(struct __sk_buff *skb, const struct liveness_setup *c,
					  struct liveness_state *s, __u64 now)
{
	struct bpf_fib_lookup f = {};

	if (!skb || !c || !s)
		return;
	f.family = LIVENESS_AF_INET6;
	f.ifindex = c->ifindex;
	f.tot_len = sizeof(struct liveness_frame);
	__builtin_memcpy(f.ipv6_src, &c->frame.ip.saddr, 16);
	__builtin_memcpy(f.ipv6_dst, &c->via, 16);
	s->mac_at = now;
	/* Restricted to the device: parallel links have equal routes. */
	if (bpf_fib_lookup(skb, &f, sizeof(f), BPF_FIB_LOOKUP_DIRECT | BPF_FIB_LOOKUP_OUTPUT) !=
		    BPF_FIB_LKUP_RET_SUCCESS ||
	    f.ifindex != c->ifindex) {
		s->mac_known = 0;
		return;
	}
	__builtin_memcpy(s->mac, f.dmac, 6);
	__builtin_memcpy(s->mac + 6, f.smac, 6);
	s->mac_known = 1;
	liveness_unmoved(c->ifindex, s->mac);
}

/* liveness_write writes the next probe into the packet and records its time. */
static __noinline int liveness_write(struct __sk_buff *skb, const struct liveness_setup *c,
				     struct liveness_state *s, __u64 before)
{
	const struct liveness_words *given;
	struct liveness_packet *f;
	struct liveness_words *t;
	struct ethhdr *eth;
	__u32 seq, flags = 0;
	__u64 now;

	if (!skb || !c || !s)
		return -1;
	f = liveness_packet(skb, ETH_HLEN); /* a loop's packet is linear */
	if (!f)
		return -1;
	eth = (void *)f - ETH_HLEN;
	__builtin_memcpy(eth->h_dest, s->mac, sizeof(s->mac));
	eth->h_proto = c->frame.proto;
	__builtin_memcpy(f, &c->frame.ip, LIVENESS_TLV_AT);
	t = (struct liveness_words *)&f->tlv;
	given = (const struct liveness_words *)&c->frame.tlv;
	now = liveness_now();
	seq = __sync_fetch_and_add(&s->seq, 1) + 1;
	s->sent_at[seq & (LIVENESS_RING - 1)] = now;
	if (s->last_seen && (__s64)(before - s->last_seen) < (__s64)liveness_window(s))
		flags |= LIVENESS_HEARS;
	if (c->closing)
		flags |= LIVENESS_CLOSING;
	t->name = given->name;
	t->seq = liveness_pair(seq, s->answered);
	t->sent = bpf_cpu_to_be64(now);
	t->got = s->echoed;
	t->heard = given->heard | liveness_pair(s->answers, flags << 24);
	t->interval = given->interval;
	t->life = given->life;
	t->tag = liveness_tag(c, t, &f->seg[0]);
	skb->mark = REROUTE_MARK;
	skb->priority = LIVENESS_FIRST;
	return 0;
}

/* liveness_need returns the time from one probe to the next. */
static __always_inline __u64 liveness_need(const struct liveness_setup *c, __u64 tick)
{
	return c->interval - tick / 2;
}

/* liveness_due assigns a due probe to one of the session's loops. */
static __always_inline int liveness_due(const struct liveness_setup *c, struct liveness_state *s,
					const struct liveness_round *r, __u32 i)
{
	__u64 last = s->last_sent;

	if (!last) {
		/* Spread the sessions over the ticks of an interval. */
		s->last_sent = r->now + r->tick - c->interval + (i & 3) * (c->interval / 4);
		return 0;
	}
	if ((__s64)(r->now - last) < (__s64)liveness_need(c, r->tick))
		return 0;
	return __sync_val_compare_and_swap(&s->last_sent, last, r->now) == last;
}

/*
 * liveness_wake returns the time of a loop's next visit to a session; 0: at every tick. An up
 * session needs no visit before its next probe, or before a verdict by missing probes of the peer.
 * Packets arriving meanwhile only delay the verdict.
 */
static __always_inline __u64 liveness_wake(const struct liveness_setup *c,
					   const struct liveness_state *s,
					   const struct liveness_round *r)
{
	__u64 at = ~0ULL, missed;

	if (s->closed)
		return 0;
	if (c->sends) {
		if (s->sender.phase != LIVENESS_UP || s->seq - s->answered >= c->multiplier)
			return 0;
		at = s->last_sent + liveness_need(c, r->tick);
	}
	if (c->judges) {
		if (s->peer.phase != LIVENESS_UP)
			return 0;
		missed = s->last_fresh + liveness_window(s) - r->tick; /* a timer does the rest */
		if (missed < at)
			at = missed;
	}
	return at;
}

/* liveness_tend judges a session and sends its probe if it is due. */
static __always_inline void liveness_tend(const struct liveness_setup *c, struct liveness_state *s,
					  struct liveness_round *r, __u32 i)
{
	liveness_judge(c, s, r->now, r->stalled, i);
	if (!c->sends || !liveness_due(c, s, r, i))
		return;
	if (!s->mac_known || r->now - s->mac_at > LIVENESS_REFRESH)
		liveness_neighbour(r->skb, c, s, r->now);
	if (i == r->turn || !s->mac_known) {
		r->left = i + 1;
		if (i == r->turn)
			return;
	}
	if (!s->mac_known)
		return;
	if (liveness_write(r->skb, c, s, r->now) || bpf_clone_redirect(r->skb, c->ifindex, 0))
		liveness_count(s, LIVENESS_UNSENT);
}

/*
 * liveness_visit visits a session. The sessions with this loop as their first come first. For the
 * others this is the second loop, which does their work if the first one is silent.
 */
static long liveness_visit(__u32 k, struct liveness_round *r)
{
	__u32 i, mine;
	struct liveness_setup *c;
	struct liveness_state *s;
	__u64 *wake;

	i = k < r->each ? k * r->loops + r->loop : (k - r->each) * r->loops + r->before;
	if (i >= r->sessions)
		return 0;
	mine = r->loop * LIVENESS_SESSIONS + i;
	wake = bpf_map_lookup_elem(&liveness_wakes, &mine);
	/* Most visits to probed-only sessions end here and read only this word. */
	if (!wake || (!r->full && r->now < *wake))
		return 0;
	c = bpf_map_lookup_elem(&liveness_setups, &i);
	s = bpf_map_lookup_elem(&liveness_states, &i);
	if (!c || !s || !c->on)
		return 0;
	liveness_tend(c, s, r, i);
	liveness_await(c, s, r, i);
	*wake = liveness_wake(c, s, r);
	return 0;
}

/*
 * liveness_last sends a session's probe through the kernel's neighbour code. This resolves the
 * neighbour and keeps its entry reachable.
 */
static __always_inline int liveness_last(struct __sk_buff *skb, __u32 i,
					 const struct liveness_round *r)
{
	struct liveness_setup *c = bpf_map_lookup_elem(&liveness_setups, &i);
	struct liveness_state *s = bpf_map_lookup_elem(&liveness_states, &i);
	struct bpf_redir_neigh nh = { .nh_family = LIVENESS_AF_INET6 };

	if (!c || !s || !c->on)
		return TC_ACT_SHOT;
	if (liveness_write(skb, c, s, r->now)) {
		liveness_count(s, LIVENESS_UNSENT);
		return TC_ACT_SHOT;
	}
	liveness_await(c, s, r, i);
	__builtin_memcpy(nh.ipv6_nh, &c->via, 16);
	return bpf_redirect_neigh(c->ifindex, &nh, sizeof(nh), 0);
}

#endif
