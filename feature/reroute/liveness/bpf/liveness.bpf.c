//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Liveness of links: the tick source sends probes, the peer's function answers them, and the return
 * program receives the answers. Both ends judge in the ticks of their tick source.
 */
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../../links.h"

#include "liveness.h"

#include "siphash.h"

#include "maps.h"

#include "judge.h"
#include "stall.h"
#include "verdict.h"
#include "moved.h"
#include "send.h"
#include "heard.h"

/*
 * liveness_revive sends a packet into the next loop if this has lost its own. The loop then ticks
 * on this CPU until user space moves it back.
 */
static __always_inline void
liveness_revive(struct __sk_buff *skb, const struct liveness_tick_source *m, __u32 loop, __u64 now)
{
	__u32 other = loop + 1 < m->loops ? loop + 1 : 0, said[2];
	struct liveness_beat *o = bpf_map_lookup_elem(&liveness_beats, &other);
	__u32 ifindex;

	if (!o || other == loop || other >= LIVENESS_LOOPS)
		return;
	ifindex = m->ifindex[liveness_place(other)];
	if (!o->beat) /* not started */
		return;
	if ((__s64)(now - o->beat) < (__s64)(2 * LIVENESS_PATIENCE) ||
	    (__s64)(now - o->revived) < (__s64)(2 * LIVENESS_PATIENCE))
		return;
	o->revived = now;
	said[0] = other;
	said[1] = m->generation[liveness_place(other)];
	if (bpf_skb_store_bytes(skb, offsetof(struct liveness_beat_frame, loop) - 2, said,
				sizeof(said), 0) == 0 &&
	    bpf_clone_redirect(skb, ifindex, 0) == 0)
		o->revivals++;
}

SEC("tc")
int liveness_tick(struct __sk_buff *skb)
{
	struct liveness_round r = { .skb = skb };
	struct liveness_beat_frame head;
	struct liveness_tick_source *m;
	struct liveness_beat *b;
	__u32 key = 0, loop, alone;

	if (skb->len != LIVENESS_FRAME ||
	    bpf_skb_load_bytes(skb, 0, (void *)&head + 2, sizeof(head) - 2))
		return TC_ACT_SHOT;
	m = bpf_map_lookup_elem(&liveness_clockwork, &key);
	loop = head.loop;
	if (!m || head.magic != LIVENESS_MAGIC || loop >= LIVENESS_LOOPS || loop >= m->loops ||
	    head.generation != m->generation[liveness_place(loop)])
		return TC_ACT_SHOT;
	b = bpf_map_lookup_elem(&liveness_beats, &loop);
	if (!b)
		return TC_ACT_SHOT;
	/* Back into the loop first, so it continues after any failure below. */
	bpf_clone_redirect(skb, m->ifindex[liveness_place(loop)], 0);
	r.now = liveness_now();
	r.stalled = liveness_stalls(b, m, loop, r.now);
	b->beat = r.now;
	b->ticks++;
	b->cpu = bpf_get_smp_processor_id();
	liveness_revive(skb, m, loop, r.now);
	r.tick = m->tick;
	r.loop = loop;
	r.loops = m->loops;
	r.before = (loop ? loop : r.loops) - 1;
	r.sessions = m->sessions < LIVENESS_SESSIONS ? m->sessions : LIVENESS_SESSIONS;
	r.each = (r.sessions + r.loops - 1) / r.loops;
	r.turn = r.sessions ? b->ticks % r.sessions : 0;
	alone = liveness_silent(m, r.before, r.now);
	r.full = alone || !(b->ticks & 15);
	bpf_loop(alone && r.before != loop ? 2 * r.each : r.each, liveness_visit, &r, 0);
	b->spent += liveness_now() - r.now;
	if (!r.left)
		return TC_ACT_SHOT;
	return liveness_last(skb, r.left - 1, &r);
}

static __always_inline struct liveness_setup *liveness_session_at(const __u32 *place, __u32 id)
{
	struct liveness_setup *c = bpf_map_lookup_elem(&liveness_setups, place);

	return c && c->on && c->id == id ? c : 0;
}

/*
 * liveness_session returns the session of a probe or an answer. It first tries the last session in
 * the number's slot.
 */
static __always_inline struct liveness_setup *liveness_session(__be32 id, __u32 *place)
{
	__u32 key = bpf_ntohl(id), slot = key & (LIVENESS_SESSIONS - 1), *last, *i;
	struct liveness_setup *c;

	last = bpf_map_lookup_elem(&liveness_recent, &slot);
	if (!last)
		return 0;
	*place = *last;
	c = liveness_session_at(place, key);
	if (c)
		return c;
	i = bpf_map_lookup_elem(&liveness_ids, &key);
	if (!i)
		return 0;
	*place = *last = *i;
	return liveness_session_at(place, key);
}

static __always_inline int liveness_same(const struct liveness_address *a,
					 const struct liveness_address *b)
{
	const __u32 *x = (const __u32 *)a, *y = (const __u32 *)b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2] && x[3] == y[3];
}

/*
 * liveness_ours reports whether a probe or an answer returns to this end of the session. Both ends
 * share one key, so only this tells the sender.
 */
static __always_inline int liveness_ours(const struct liveness_setup *c,
					 const struct liveness_packet *f)
{
	return c->sends && liveness_same(&f->seg[0], &c->frame.seg[0]);
}

/* liveness_answer writes the answer to a probe. */
static __always_inline void liveness_answer(const struct liveness_setup *c,
					    const struct liveness_state *s,
					    const struct liveness_packet *f,
					    struct liveness_words *t, __u64 now)
{
	__u32 flags = LIVENESS_HEARS | (c->closing ? LIVENESS_CLOSING : 0);

	*t = *(const struct liveness_words *)&f->tlv;
	t->name ^= liveness_pair(LIVENESS_PROBE ^ LIVENESS_ANSWER, 0);
	t->got = bpf_cpu_to_be64(now);
	t->heard = (t->heard & liveness_pair(0, 0xffffff)) | liveness_pair(s->heard, flags << 24);
	t->tag = liveness_tag(c, t, &f->seg[0]);
}

/*
 * liveness_asked handles a probe at an offset of the packet. It returns 1 and writes the answer if
 * the probe is good.
 */
static __always_inline int liveness_asked(const struct __sk_buff *skb, __u32 from,
					  struct liveness_words *answer)
{
	const struct liveness_packet *f = liveness_packet(skb, from);
	__u32 place = 0, why;
	struct liveness_setup *c = 0;
	struct liveness_state *s = 0;
	__u64 now = liveness_now();

	why = LIVENESS_MALFORMED;
	if (!f) /* the kernel ensures a linear header and TLV */
		goto refuse;
	c = liveness_session(f->tlv.session, &place);
	why = LIVENESS_UNKNOWN;
	if (!c || !c->judges)
		goto refuse;
	s = bpf_map_lookup_elem(&liveness_states, &place);
	if (!s)
		goto refuse;
	why = liveness_shaped(f, LIVENESS_HOPS);
	if (why != LIVENESS_COUNTS)
		goto refuse;
	why = LIVENESS_ELSEWHERE;
	if (!liveness_clock_given && skb->ingress_ifindex != c->ifindex &&
	    skb->ingress_ifindex != c->master)
		goto refuse;
	why = LIVENESS_FORGED;
	if (f->tlv.kind != LIVENESS_PROBE || liveness_ours(c, f) || !liveness_signed(c, f))
		goto refuse;
	why = liveness_lives(s, bpf_be64_to_cpu(f->tlv.life), now);
	if (why != LIVENESS_COUNTS)
		goto refuse;
	why = liveness_probed(s, &f->tlv, now);
	if (why != LIVENESS_COUNTS)
		goto refuse;
	liveness_answer(c, s, f, answer, now);
	return 1;
refuse:
	liveness_count(s, why);
	return 0;
}

/*
 * liveness_end is a segment's function. The kernel has advanced the segment list, and forwards the
 * packet on BPF_OK.
 */
SEC("lwt_seg6local")
int liveness_end(struct __sk_buff *skb)
{
	struct liveness_words answer;

	if (!liveness_asked(skb, 0, &answer))
		return BPF_DROP;
	/* It returns over the link it came by, even if this is down. */
	skb->mark = REROUTE_MARK;
	skb->priority = LIVENESS_FIRST;
	/* The kernel checks which bytes of a packet with a segment list may change. */
	if (bpf_lwt_seg6_store_bytes(skb, LIVENESS_TLV_AT, &answer, sizeof(answer)))
		return BPF_DROP;
	return BPF_OK;
}

/* liveness_end_run is liveness_end for BPF_PROG_TEST_RUN. */
SEC("tc")
int liveness_end_run(struct __sk_buff *skb)
{
	struct liveness_words answer;

	if (!liveness_asked(skb, ETH_HLEN, &answer))
		return BPF_DROP;
	bpf_skb_store_bytes(skb, ETH_HLEN + LIVENESS_TLV_AT, &answer, sizeof(answer), 0);
	return BPF_OK;
}

/*
 * liveness_back reports whether an own probe returns unchanged: reflected by somebody, or routed in
 * a circle. It is dropped here.
 */
static __always_inline int liveness_back(const struct liveness_setup *c,
					 const struct liveness_packet *f)
{
	return f->srh.segments_left && liveness_same(&f->ip.saddr, &c->frame.ip.saddr) &&
	       f->tlv.kind == LIVENESS_PROBE && liveness_ours(c, f) && liveness_signed(c, f);
}

/* liveness_taken handles a possible answer. It passes packets of no session of ours. */
static __always_inline int liveness_taken(const struct __sk_buff *skb,
					  const struct liveness_packet *f)
{
	__u32 place = 0, why;
	struct liveness_setup *c;
	struct liveness_state *s;

	if (f->tlv.type != LIVENESS_TLV)
		return TC_ACT_UNSPEC;
	c = liveness_session(f->tlv.session, &place);
	if (!c || !c->sends)
		return TC_ACT_UNSPEC;
	s = bpf_map_lookup_elem(&liveness_states, &place);
	if (!s)
		return TC_ACT_UNSPEC;
	why = LIVENESS_FORGED;
	if (liveness_back(c, f))
		goto refuse;
	if (!liveness_same(&f->ip.daddr, &c->frame.ip.saddr)) {
		if (!liveness_ours(c, f))
			liveness_source(skb, c, s, f);
		return TC_ACT_UNSPEC;
	}
	why = liveness_shaped(f, LIVENESS_RETURN);
	if (why != LIVENESS_COUNTS)
		goto refuse;
	why = LIVENESS_ELSEWHERE;
	if (!liveness_clock_given && skb->ifindex != c->ifindex)
		goto refuse;
	why = LIVENESS_FORGED;
	if (f->tlv.kind != (c->echo ? LIVENESS_PROBE : LIVENESS_ANSWER) || !liveness_ours(c, f) ||
	    !liveness_signed(c, f))
		goto refuse;
	why = liveness_answered(c, s, &f->tlv, liveness_now());
refuse:
	if (why != LIVENESS_COUNTS)
		liveness_count(s, why);
	return TC_ACT_SHOT;
}

#define LIVENESS_PACKET_HOST 0 /* PACKET_HOST: linux/if_packet.h */

/*
 * liveness_above reports whether a packet is for a device above the current one: a VLAN, or one
 * with another link address, such as a macvlan. The packet arrives there again, for the sessions of
 * that device.
 */
static __always_inline bool liveness_above(const struct __sk_buff *skb)
{
	return reroute_tagged(skb) || skb->pkt_type != LIVENESS_PACKET_HOST;
}

/*
 * liveness_return sees all packets arriving by a session's device, and passes all but answers at
 * once.
 */
SEC("tc")
int liveness_return(struct __sk_buff *skb)
{
	const struct liveness_packet *f;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) || skb->len != LIVENESS_FRAME ||
	    liveness_above(skb))
		return TC_ACT_UNSPEC;
	f = liveness_packet(skb, ETH_HLEN);
	/* Some drivers leave most of a packet outside the linear part. */
	if (!f && bpf_skb_pull_data(skb, LIVENESS_FRAME) == 0)
		f = liveness_packet(skb, ETH_HLEN);
	if (!f || f->ip.nexthdr != IPPROTO_ROUTING)
		return TC_ACT_UNSPEC;
	return liveness_taken(skb, f);
}

char _license[] SEC("license") = "Dual BSD/GPL";
