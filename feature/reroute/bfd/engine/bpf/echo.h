/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The echo function, RFC 5880 sections 6.4 and 6.8.9, RFC 5881 section 4. Packets to this end's own
 * address are sent to the neighbour, and its forwarding returns them. They need no process of the
 * neighbour, so they can be faster than its control packets, and they test its forwarding.
 *
 * A session with a failed echo goes down (diagnostic 2). Control packets may bring it up at once,
 * but the link is not used before an echo returns. If none ever returned, the neighbour does not
 * loop packets back despite its announcement, and no verdict follows.
 */
#ifndef WEIR_BFD_ECHO_H
#define WEIR_BFD_ECHO_H

#include "session.h"

#define BFD_ECHO_MAGIC 0x77656972
#define BFD_SETTLE     5000000ULL /* ns, minimum time to receive packets after a stall */

/*
 * An echo packet. Its content is private to this end. It has the length of a control packet, in
 * network byte order.
 */
struct bfd_echo_packet {
	__be32 magic;
	__be32 mine;
	__be32 sequence;
	__be32 spare;
	__u64 nonce; /* secret from hosts unable to see packets */
};

/* bfd_echo_interval returns the transmit interval, in us; 0: no packets. */
static __always_inline __u32 bfd_echo_interval(const struct bfd_state *s, const struct bfd_echo *e)
{
	if (!e->wanted || s->state != BFD_UP || s->remote_state != BFD_UP || !s->remote_echo_rx)
		return 0;
	return bfd_max(e->wanted, s->remote_echo_rx);
}

/*
 * bfd_echo_idle resets the function while no packets are sent: packets in flight are not awaited.
 */
static __always_inline void bfd_echo_idle(struct bfd_state *s, struct bfd_echo *e)
{
	e->back = e->sequence;
	e->suspect = 0;
	e->next = 0;
	if (!e->wanted || (s->state == BFD_UP && !s->remote_echo_rx))
		e->failed = 0;
}

/*
 * bfd_echo_judge detects lost echo packets by count, like liveness_judge_sender: a stalled host
 * sends none and blames no link. After a stall, received packets get time to be handled. It runs
 * under the lock.
 */
static __always_inline void bfd_echo_judge(const struct bfd_setup *c, struct bfd_state *s,
					   struct bfd_echo *e, __u64 now, __u64 stalled)
{
	__u64 every = bfd_echo_interval(s, e) * BFD_US, grace = e->rtt + 4 * e->rtt_dev, settle;
	__u32 waited;

	if (!every) {
		bfd_echo_idle(s, e);
		return;
	}
	if (!e->returned || e->failed || e->sequence - e->back < c->multiplier)
		return;
	if (grace < every * 3 / 10)
		grace = every * 3 / 10;
	waited = (__u32)(now >> BFD_ECHO_UNIT) -
		 e->at[(e->back + c->multiplier) & (BFD_ECHO_RING - 1)];
	if ((__u64)waited << BFD_ECHO_UNIT < grace)
		return;
	if (!e->suspect)
		e->suspect = now;
	settle = grace + every / 2;
	if (settle < BFD_SETTLE)
		settle = BFD_SETTLE;
	if (stalled && (__s64)(now - stalled) < (__s64)settle && now - e->suspect < BFD_PATIENCE)
		return;
	e->failed = 1;
	e->failures++;
	bfd_down(c, s, BFD_DOWN, BFD_ECHO_FAILED, now);
	bfd_echo_idle(s, e);
}

/* bfd_echo_due decides whether an echo packet is sent now. It runs under the lock. */
static __always_inline int bfd_echo_due(const struct bfd_setup *c, const struct bfd_state *s,
					struct bfd_echo *e, __u64 now, __u32 random)
{
	__u64 every = bfd_echo_interval(s, e) * BFD_US;

	if (!every || (__s64)(now - e->next) < 0)
		return 0;
	if (!e->next || now - e->next > every)
		e->next = now;
	e->next += every;
	if (!e->nonce)
		e->nonce = (__u64)random << 32 | (c->mine ^ (__u32)now);
	e->sequence++;
	e->at[e->sequence & (BFD_ECHO_RING - 1)] = now >> BFD_ECHO_UNIT;
	e->sent++;
	return 1;
}

/* bfd_echo_back handles a returned packet if it is ours. It runs under the lock. */
static __always_inline void bfd_echo_back(struct bfd_echo *e, const struct bfd_echo_packet *p,
					  __u64 now)
{
	__u32 sequence = bpf_ntohl(p->sequence), d, rtt;

	if (p->magic != bpf_htonl(BFD_ECHO_MAGIC) || !e->nonce || p->nonce != e->nonce ||
	    e->sequence - sequence >= BFD_ECHO_RING) {
		e->refused++;
		return;
	}
	e->returned++;
	if ((__s32)(sequence - e->back) <= 0)
		return; /* overtaken by others, or a duplicate */
	e->back = sequence;
	e->suspect = 0;
	e->failed = 0;
	rtt = ((__u32)(now >> BFD_ECHO_UNIT) - e->at[sequence & (BFD_ECHO_RING - 1)])
	      << BFD_ECHO_UNIT;
	/* RFC 6298, like liveness_timed. */
	d = rtt > e->rtt ? rtt - e->rtt : e->rtt - rtt;
	e->rtt_dev = e->rtt_dev - e->rtt_dev / 4 + d / 4;
	e->rtt = e->rtt - e->rtt / 8 + rtt / 8;
}

#endif
