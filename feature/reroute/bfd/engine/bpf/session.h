/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The state machine of a session, RFC 5880 section 6.8. feature/reroute/bfd/bfdtest/session.go is a
 * model in Go, and a test compares both. All code runs under the session's lock, so it calls no
 * helper.
 */
#ifndef WEIR_BFD_SESSION_H
#define WEIR_BFD_SESSION_H

#include "bfd.h"

#define BFD_US	     1000ULL
#define BFD_LATE     1500000ULL	  /* ns; a later tick means a stalled CPU */
#define BFD_PATIENCE 500000000ULL /* ns, longest delay of a verdict by stalls */

/* Protection of a silent neighbor's port and discriminator: bfd_other. */
#define BFD_HOLD_PACKETS 3
#define BFD_HOLD_DOWN	 3000000000ULL	/* ns, for a session that is not up */
#define BFD_HOLD_UP	 60000000000ULL /* ns, for a session that is up */

static __always_inline __u32 bfd_max(__u32 a, __u32 b)
{
	return a > b ? a : b;
}

/* bfd_desired returns the announced transmit interval, in us. */
static __always_inline __u32 bfd_desired(const struct bfd_setup *c, const struct bfd_state *s)
{
	return s->state == BFD_UP ? c->desired_tx : bfd_max(c->desired_tx, BFD_SLOW);
}

/* bfd_interval returns the actual transmit interval, in us; 0: no packets (section 6.8.7). */
static __always_inline __u32 bfd_interval(const struct bfd_setup *c, const struct bfd_state *s)
{
	__u32 tx = bfd_desired(c, s);

	if ((c->passive && !s->yours) || !s->remote_rx)
		return 0;
	if (s->remote_bits & BFD_DEMAND && s->state == BFD_UP && s->remote_state == BFD_UP &&
	    !s->poll)
		return 0;
	if (s->poll && s->tx_floor && s->tx_floor < tx)
		tx = s->tx_floor;
	return bfd_max(tx, s->remote_rx);
}

/*
 * bfd_lifetime returns the longest accepted silence, in ns; 0: no packets are expected (section
 * 6.8.4). After it, a session in Init or Up goes down, and any session forgets the peer's values
 * (section 6.8.1).
 */
static __always_inline __u64 bfd_lifetime(const struct bfd_state *s)
{
	if (!s->yours || !s->rx_in_use)
		return 0;
	return s->remote_multiplier * BFD_US * bfd_max(s->rx_in_use, s->remote_tx);
}

/*
 * bfd_forget resets the peer's values, at the start and after a silent lifetime. The sequence
 * number stays valid for a second lifetime (bfd_recent). The lifetime is computed from the received
 * packets, not from the slow interval of a restarted neighbour.
 */
static __always_inline void bfd_forget(struct bfd_state *s)
{
	__u64 limit = bfd_lifetime(s);

	if (limit)
		s->wait = s->heard + 2 * limit;
	s->yours = 0;
	s->remote_port = 0;
	s->remote_tx = 0;
	s->remote_rx = 1;
	s->remote_echo_rx = 0;
	s->remote_state = BFD_DOWN;
	s->remote_diag = 0;
	s->remote_multiplier = 0;
	s->remote_bits = 0;
}

static __always_inline void bfd_enter(struct bfd_state *s, __u8 state, __u64 now)
{
	if (s->state == BFD_UP)
		s->downs++;
	if (state == BFD_UP) {
		s->ups++;
		s->was_up = BFD_HAS_BEEN_UP;
	}
	s->state = state;
	s->changes++;
	s->since = now;
	s->next = 0;
}

static __always_inline void bfd_down(const struct bfd_setup *c, struct bfd_state *s, __u8 state,
				     __u8 diag, __u64 now)
{
	bfd_enter(s, state, now);
	s->diag = diag;
	s->poll = 0;
	s->poll_again = 0;
	s->tx_floor = 0;
	s->rx_in_use = c->required_rx;
}

static __always_inline void bfd_start_poll(struct bfd_state *s, __u32 tx_before)
{
	s->next = 0;
	if (s->poll) { /* the answer may be to the earlier values */
		s->poll_again = 1;
		if (!s->tx_floor || tx_before < s->tx_floor)
			s->tx_floor = tx_before;
		return;
	}
	s->poll = 1;
	s->tx_floor = tx_before;
}

static __always_inline void bfd_end_poll(const struct bfd_setup *c, struct bfd_state *s)
{
	if (s->poll_again) { /* poll once more for the later change */
		s->poll_again = 0;
		return;
	}
	s->poll = 0;
	s->tx_floor = 0;
	s->rx_in_use = c->required_rx;
}

/* bfd_adopt applies a new setup to the session. */
static __always_inline void bfd_adopt(const struct bfd_setup *c, struct bfd_state *s, __u64 now)
{
	int first = !s->generation;

	s->generation = c->generation;
	if (first) {
		bfd_forget(s);
		s->state = BFD_DOWN;
		s->since = now;
		s->rx_in_use = c->required_rx;
		s->said_tx = c->desired_tx;
		s->said_rx = c->required_rx;
	}
	if (c->down && s->state != BFD_ADMIN_DOWN) {
		bfd_down(c, s, BFD_ADMIN_DOWN, BFD_ADMIN_DIAG, now);
		s->was_up = BFD_NOT_YET_UP;
	} else if (!c->down && s->state == BFD_ADMIN_DOWN) {
		bfd_down(c, s, BFD_DOWN, BFD_NO_DIAG, now);
		bfd_forget(s);
	}
	if (s->state != BFD_UP) {
		s->rx_in_use = c->required_rx;
	} else if (c->desired_tx != s->said_tx || c->required_rx != s->said_rx) {
		s->rx_in_use = bfd_max(s->rx_in_use, c->required_rx);
		bfd_start_poll(s, s->said_tx);
	}
	s->said_tx = c->desired_tx;
	s->said_rx = c->required_rx;
	s->next = 0;
}

/*
 * bfd_expire handles a silent lifetime. A restarted neighbour rejects packets with its
 * predecessor's discriminator. A passive one would never send its own, so the old discriminator is
 * forgotten.
 */
static __always_inline void bfd_expire(const struct bfd_setup *c, struct bfd_state *s, __u64 now)
{
	__u8 state = s->remote_state, diag = s->remote_diag;

	bfd_forget(s);
	if (s->state == BFD_INIT || s->state == BFD_UP) {
		bfd_down(c, s, BFD_DOWN, BFD_TIME_EXPIRED, now);
		return;
	}
	s->remote_state = state;
	s->remote_diag = diag;
	s->changes++;
}

/*
 * bfd_other reports whether a packet is from another sender than the session's peer. A neighbor
 * sends from one port (RFC 5881 section 4) owned by its process; other users of its host have other
 * ports. Port and discriminator change only when it restarts. New ones are accepted after a silent
 * lifetime (bfd_forget). A session that is not up waits for BFD_HOLD_PACKETS missing packets
 * instead, because a high multiplier makes its lifetime long. Both waits are bounded, because an
 * unknown source may have chosen the intervals. A key identifies the sender better.
 */
static __always_inline int bfd_other(const struct bfd_setup *c, const struct bfd_state *s,
				     const struct bfd_packet *p, __be16 port, __u64 now)
{
	__u64 limit = BFD_HOLD_UP;

	if (c->auth || !s->yours)
		return 0;
	if (s->yours == bpf_ntohl(p->mine) && (!s->remote_port || s->remote_port == port))
		return 0;
	if (s->state != BFD_UP || !s->rx_in_use) {
		limit = BFD_US * bfd_max(s->rx_in_use, s->remote_tx);
		limit *= s->remote_multiplier < BFD_HOLD_PACKETS ? s->remote_multiplier :
								   BFD_HOLD_PACKETS;
		if (limit > BFD_HOLD_DOWN)
			limit = BFD_HOLD_DOWN;
	}
	return (__s64)(now - s->heard) <= (__s64)limit;
}

/* bfd_take handles a valid packet of the session's peer (section 6.8.6). */
static __always_inline void bfd_take(const struct bfd_setup *c, struct bfd_state *s,
				     const struct bfd_packet *p, __be16 port, __u64 now)
{
	__u32 before = bfd_interval(c, s), after;
	__u8 state = p->bits >> 6;

	/* Intervals and flags are reported only after a change. */
	if (s->yours != bpf_ntohl(p->mine) || s->remote_multiplier != p->multiplier ||
	    s->remote_tx != bpf_ntohl(p->desired_tx) || s->remote_rx != bpf_ntohl(p->required_rx) ||
	    s->remote_echo_rx != bpf_ntohl(p->echo_rx) || s->remote_state != state)
		s->changes++;
	s->remote_state = state;
	s->remote_diag = p->vers_diag & 31;
	if (!s->yours)
		s->wait = 0; /* set by bfd_forget */
	s->yours = bpf_ntohl(p->mine);
	s->remote_port = port;
	s->remote_multiplier = p->multiplier;
	s->remote_tx = bpf_ntohl(p->desired_tx);
	s->remote_rx = bpf_ntohl(p->required_rx);
	s->remote_echo_rx = bpf_ntohl(p->echo_rx);
	s->remote_bits = p->bits & (BFD_DEMAND | BFD_INDEPENDENT);
	s->heard = now;
	s->suspect = 0;
	if (p->bits & BFD_FINAL && s->poll)
		bfd_end_poll(c, s);
	after = bfd_interval(c, s);
	if (after && (!before || after < before))
		s->next = 0; /* section 6.8.3: a packet scheduled later, or never, is due */
	if (s->state == BFD_ADMIN_DOWN)
		return;
	if (p->bits & BFD_POLL)
		s->final = 1; /* an extra packet: the regular schedule is unchanged */
	if (state == BFD_ADMIN_DOWN) {
		s->was_up = BFD_NOT_YET_UP;
		if (s->state != BFD_DOWN)
			bfd_down(c, s, BFD_DOWN, BFD_NEIGHBOUR_DOWN, now);
	} else if (s->state == BFD_DOWN && state == BFD_DOWN) {
		bfd_enter(s, BFD_INIT, now);
	} else if ((s->state == BFD_DOWN && state == BFD_INIT) ||
		   (s->state == BFD_INIT && state >= BFD_INIT)) {
		bfd_enter(s, BFD_UP, now);
		s->diag = BFD_NO_DIAG;
		bfd_start_poll(s, BFD_SLOW); /* it was sending slowly before */
	} else if (s->state == BFD_UP && state == BFD_DOWN) {
		bfd_down(c, s, BFD_DOWN, BFD_NEIGHBOUR_DOWN, now);
	}
}

/* bfd_say writes the next packet without its digest. It returns the length. */
static __always_inline __u32 bfd_say(const struct bfd_setup *c, struct bfd_state *s,
				     struct bfd_packet *p)
{
	__u8 bits = s->state << 6 | BFD_INDEPENDENT;

	if (s->final)
		bits |= BFD_FINAL;
	else if (s->poll)
		bits |= BFD_POLL;
	s->final = 0;
	p->vers_diag = 1 << 5 | s->diag;
	p->multiplier = c->multiplier;
	p->length = BFD_HEAD;
	p->mine = bpf_htonl(c->mine);
	p->yours = bpf_htonl(s->yours);
	p->desired_tx = bpf_htonl(bfd_desired(c, s));
	p->required_rx = bpf_htonl(c->required_rx);
	p->echo_rx = bpf_htonl(c->echo_rx);
	if (c->auth) {
		bits |= BFD_HAS_AUTH;
		p->length += BFD_AUTH;
		p->auth_type = c->auth;
		p->auth_length = BFD_AUTH;
		p->auth_key = c->key;
		p->auth_reserved = 0;
		p->auth_sequence = bpf_htonl(++s->sent_sequence);
	}
	p->bits = bits;
	s->out++;
	s->out_bytes += p->length;
	return p->length;
}

#endif
