/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The state machine of a session, RFC 5880, 6.8. feature/reroute/bfd/session.go is the same in Go,
 * and a test has both do the same. All of it runs under the session's lock, so it calls no helper.
 */
#ifndef WEIR_BFD_SESSION_H
#define WEIR_BFD_SESSION_H

#include "bfd.h"

#define BFD_US	     1000ULL
#define BFD_LATE     1500000ULL	  /* ns that a tick may be late before its CPU counts as stalled */
#define BFD_PATIENCE 500000000ULL /* ns for which stalls put an end off */

/* How long a silent neighbor's port and discriminator are held: bfd_other. */
#define BFD_HOLD_PACKETS 3
#define BFD_HOLD_DOWN	 3000000000ULL	/* ns, of a session that is not up */
#define BFD_HOLD_UP	 60000000000ULL /* ns, of one that is */

static __always_inline __u32 bfd_max(__u32 a, __u32 b)
{
	return a > b ? a : b;
}

/* bfd_desired is what this end says that it would like to send at, in us. */
static __always_inline __u32 bfd_desired(const struct bfd_setup *c, const struct bfd_state *s)
{
	return s->state == BFD_UP ? c->desired_tx : bfd_max(c->desired_tx, BFD_SLOW);
}

/* bfd_interval is how often to send, in us; 0: not at all (6.8.7). */
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
 * bfd_lifetime is how long nothing may come, in ns; 0: nothing is expected (6.8.4). Then the session goes
 * down, if it is to have been up, and in any state forgets what the other end has said (6.8.1).
 */
static __always_inline __u64 bfd_lifetime(const struct bfd_state *s)
{
	if (!s->yours || !s->rx_in_use)
		return 0;
	return s->remote_multiplier * BFD_US * bfd_max(s->rx_in_use, s->remote_tx);
}

/*
 * bfd_forget is at the beginning, and when nothing has come for the lifetime. The sequence number of the last packet is
 * remembered for as long again (bfd_recent): the lifetime is that of the packets which came, and not the
 * slow one of a neighbour that begins anew.
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
	if (s->poll) { /* its answer may be about what was said before */
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
	if (s->poll_again) { /* what applies goes on to */
		s->poll_again = 0;
		return;
	}
	s->poll = 0;
	s->tx_floor = 0;
	s->rx_in_use = c->required_rx;
}

/* bfd_adopt has a session go by what user space wants now. */
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
 * bfd_expire is when nothing has come for the lifetime. A neighbour that has begun anew takes no packet
 * that names the discriminator of the one before, and a passive one would never say which it has now.
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
 * bfd_other says that a packet is not from the end that this session talks to. A neighbor sends from one port
 * (RFC 5881, 4), which is its process's alone: other users of its host have other ports. Neither its port nor its discriminator
 * changes unless it begins anew. A new one is taken when the old one was silent for the lifetime (bfd_forget). A session that is
 * not up waits for BFD_HOLD_PACKETS of the old one, since its lifetime is long where the multiplier is high. Both waits are bounded:
 * a stranger may have said the intervals. A key says better who sends.
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

/* bfd_take is a packet for this session in which nothing is wrong (6.8.6). */
static __always_inline void bfd_take(const struct bfd_setup *c, struct bfd_state *s,
				     const struct bfd_packet *p, __be16 port, __u64 now)
{
	__u32 before = bfd_interval(c, s), after;
	__u8 state = p->bits >> 6;

	/* Of intervals and flags user space is told when something has changed. */
	if (s->yours != bpf_ntohl(p->mine) || s->remote_multiplier != p->multiplier ||
	    s->remote_tx != bpf_ntohl(p->desired_tx) || s->remote_rx != bpf_ntohl(p->required_rx) ||
	    s->remote_echo_rx != bpf_ntohl(p->echo_rx) || s->remote_state != state)
		s->changes++;
	s->remote_state = state;
	s->remote_diag = p->vers_diag & 31;
	if (!s->yours)
		s->wait = 0; /* of bfd_forget */
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
		s->next = 0; /* 6.8.3: what was to be sent later, or never, is due or soon */
	if (s->state == BFD_ADMIN_DOWN)
		return;
	if (p->bits & BFD_POLL)
		s->final = 1; /* in between: what is sent once an interval stays as it was */
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
		bfd_start_poll(s, BFD_SLOW); /* it has sent slowly until here */
	} else if (s->state == BFD_UP && state == BFD_DOWN) {
		bfd_down(c, s, BFD_DOWN, BFD_NEIGHBOUR_DOWN, now);
	}
}

/* bfd_say writes what is to be sent, without its digest. Returned is its length. */
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
