/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef WEIR_BFD_MAPS_H
#define WEIR_BFD_MAPS_H

#include "bfd.h"

#define BFD_PASS -1 /* TC_ACT_UNSPEC, TCX_NEXT: a foreign packet */

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BFD_SESSIONS);
	__type(key, __u32);
	__type(value, struct bfd_setup);
} bfd_setups SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BFD_SESSIONS);
	__type(key, __u32);
	__type(value, struct bfd_state);
} bfd_states SEC(".maps");

/* Places of sessions, by our discriminator. Packets without it are looked up by their source. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, BFD_SESSIONS);
	__type(key, __u32);
	__type(value, __u32);
} bfd_mine SEC(".maps");

struct bfd_from {
	__u32 ifindex;
	__u32 peer[4];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, BFD_SESSIONS);
	__type(key, struct bfd_from);
	__type(value, __u32);
} bfd_peers SEC(".maps");

/* Link addresses of the neighbour and of this end, as last known. */
struct bfd_hop {
	__u64 at; /* time of the last lookup; 0: never */
	__u8 addresses[12];
	__u32 known;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BFD_SESSIONS);
	__type(key, __u32);
	__type(value, struct bfd_hop);
} bfd_hops SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BFD_SESSIONS);
	__type(key, __u32);
	__type(value, struct bfd_echo);
} bfd_echoes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536);
} bfd_events SEC(".maps");

/* Buffers for writing and reading packets. Softirqs of one CPU never overlap. */
struct bfd_scratch {
	__u8 frame[ETH_HLEN + 40 + 8 + BFD_HEAD + BFD_AUTH + 2];
	struct bfd_packet packet;
	__u32 words[SHA1_WORDS];
	__u32 digest[SHA1_DIGEST];
	__u32 pseudo[10];
	struct bpf_fib_lookup fib;
	__u8 head[ETH_HLEN + 40 + 8 + BFD_HEAD + BFD_AUTH]; /* of the tick's packet */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2); /* one for ticks, one for received packets */
	__type(key, __u32);
	__type(value, struct bfd_scratch);
} bfd_scratches SEC(".maps");

/* Tests set the time. Constant folding removes the branch in normal use. */
const volatile __u32 bfd_clock_given = 0;
__u64 bfd_given_clock = 0;

static __always_inline __u64 bfd_now(void)
{
	return bfd_clock_given ? bfd_given_clock : bpf_ktime_get_ns();
}

/*
 * bfd_digest computes the digest of w->packet with a session's secret to w->digest, in host byte
 * order.
 */
static __always_inline void bfd_digest(const struct bfd_setup *c, struct bfd_scratch *w)
{
	const __u32 *from = (const __u32 *)&w->packet;
	const __u32 *secret = (const __u32 *)c->secret;
	int i;

#pragma clang loop unroll(full)
	for (i = 0; i < 8; i++)
		w->words[i] = bpf_ntohl(from[i]);
#pragma clang loop unroll(full)
	for (i = 0; i < 5; i++)
		w->words[8 + i] = bpf_ntohl(secret[i]);
	w->words[13] = 0x80000000;
	w->words[14] = 0;
	w->words[15] = 8 * (BFD_HEAD + BFD_AUTH);
	sha1_block(w->words, w->digest);
}

/* The values to report about a session, copied under its lock. */
struct bfd_news {
	__u32 changed;
	__u8 state;
	__u8 diag;
	__u8 remote_state;
	__u8 was_up;
	__u8 echo_failed;
};

static __always_inline void bfd_gather(struct bfd_state *s, const struct bfd_echo *e,
				       struct bfd_news *n)
{
	n->changed = s->told != s->changes;
	s->told = s->changes;
	n->state = s->state;
	n->diag = s->diag;
	n->remote_state = s->remote_state;
	n->was_up = s->was_up == BFD_HAS_BEEN_UP;
	n->echo_failed = e->failed;
}

/*
 * bfd_tell sets the link state from the session's verdict, and reports a change to user space.
 * There is no verdict before the session was up. After a shutdown by either end there is none until
 * it has been up again, because an intended end proves nothing (RFC 5882 section 3.2). After a
 * failed echo, an up session's link stays bad until an echo returns.
 */
static __always_inline void bfd_tell(const struct bfd_setup *c, const struct bfd_news *n,
				     __u32 place, __u64 now)
{
	__u8 bad = n->was_up && (n->state != BFD_UP || n->echo_failed) &&
		   n->state != BFD_ADMIN_DOWN && n->remote_state != BFD_ADMIN_DOWN;
	union reroute_link *link;
	struct bfd_event *e;

	if (c->link) {
		link = reroute_link_of(c->link);
		if (link && link->probe != bad)
			link->probe = bad;
	}
	if (!n->changed)
		return;
	e = bpf_ringbuf_reserve(&bfd_events, sizeof(*e), 0);
	if (!e)
		return; /* readers check all sessions regularly */
	__builtin_memset(e, 0, sizeof(*e));
	e->time = now;
	e->session = place;
	e->mine = c->mine;
	e->state = n->state;
	e->diag = n->diag;
	bpf_ringbuf_submit(e, 0);
}

#endif
