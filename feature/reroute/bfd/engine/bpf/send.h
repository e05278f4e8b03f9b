/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The work of a tick for each session. */
#ifndef WEIR_BFD_SEND_H
#define WEIR_BFD_SEND_H

#include "maps.h"
#include "session.h"
#include "echo.h"

#define BFD_HOP_FRESH 1000000000ULL /* ns between two lookups of a link address */

/*
 * bfd_due decides whether a session sends now, and writes the packet. It runs under the lock. Gaps
 * are a random 75 to 100 % of the interval, or up to 90 % with a multiplier of 1: RFC 5880 section
 * 6.8.7. tick is the longest delay of a due packet, in ns. A long tick leaves less room for
 * randomness.
 */
static __always_inline __u32 bfd_due(const struct bfd_setup *c, struct bfd_state *s,
				     struct bfd_packet *p, __u64 now, __u32 random, __u64 tick)
{
	__u64 every = bfd_interval(c, s) * BFD_US, least = every / 4 * 3, most = every;

	if (s->final) /* answered regardless of the interval */
		return bfd_say(c, s, p);
	if (!every || (__s64)(now - s->next) < 0)
		return 0;
	if (c->multiplier == 1)
		most -= every / 10;
	if (most > least + tick)
		least += (most - least - tick) * (random & 0xff) / 256;
	s->next = now + least;
	return bfd_say(c, s, p);
}

/*
 * bfd_judge detects a silent peer. It runs under the lock. stalled is the time a CPU of this host
 * was last seen stalled; packets may wait there. Then the peer gets one more interval at a time, in
 * total at most its detection time or BFD_PATIENCE (as in liveness), whichever is longer. So
 * repeated stalls cannot keep a dead session up.
 */
static __always_inline void bfd_judge(const struct bfd_setup *c, struct bfd_state *s, __u64 now,
				      __u64 stalled)
{
	__u64 limit = bfd_lifetime(s), patience = limit > BFD_PATIENCE ? limit : BFD_PATIENCE;

	if (!limit || (__s64)(now - s->heard) <= (__s64)limit || (__s64)(now - s->wait) < 0)
		return;
	if (!s->suspect)
		s->suspect = now;
	if (stalled && (__s64)(now - stalled) < (__s64)limit && now - s->suspect < patience) {
		s->wait = now + BFD_US * bfd_max(s->rx_in_use, s->remote_tx);
		return;
	}
	bfd_expire(c, s, now);
}

/*
 * bfd_find_hop looks up the neighbour's link address. A known address stays until there is a new
 * one.
 */
static __always_inline int bfd_find_hop(struct __sk_buff *skb, const struct bfd_setup *c,
					struct bfd_hop *h, struct bfd_scratch *w, __u64 now)
{
	struct bpf_fib_lookup *f = &w->fib;
	int i;

	if (h->at && now - h->at < BFD_HOP_FRESH)
		return h->known;
	h->at = now;
	__builtin_memset(f, 0, sizeof(*f));
	f->ifindex = c->ifindex;
	f->l4_protocol = IPPROTO_UDP;
	if (c->ipv6) {
		f->family = 10;
		for (i = 0; i < 4; i++) {
			f->ipv6_src[i] = c->local[i];
			f->ipv6_dst[i] = c->peer[i];
		}
	} else {
		f->family = 2;
		f->ipv4_src = c->local[0];
		f->ipv4_dst = c->peer[0];
	}
	if (bpf_fib_lookup(skb, f, sizeof(*f), BPF_FIB_LOOKUP_OUTPUT) || f->ifindex != c->ifindex)
		return h->known;
	__builtin_memcpy(h->addresses, f->dmac, 6);
	__builtin_memcpy(h->addresses + 6, f->smac, 6);
	h->known = 1;
	return 1;
}

static __always_inline __u16 bfd_fold(__s64 sum)
{
	__u64 s = (__u32)sum;

	s = (s & 0xffff) + (s >> 16);
	s = (s & 0xffff) + (s >> 16);
	return ~s;
}

/* bfd_frame writes the headers before the packet. It returns the frame's length. */
static __always_inline __u32 bfd_frame(const struct bfd_setup *c, const struct bfd_hop *h,
				       struct bfd_scratch *w, __u32 length, int echo)
{
	struct ethhdr *eth = (void *)w->frame;
	struct udphdr *udp;
	__u32 at = ETH_HLEN;

	__builtin_memcpy(eth, h->addresses, 12);
	if (c->ipv6) {
		struct ipv6hdr *ip = (void *)(w->frame + ETH_HLEN);

		eth->h_proto = bpf_htons(ETH_P_IPV6);
		__builtin_memset(ip, 0, sizeof(*ip));
		ip->version = 6;
		ip->priority = 0xc; /* CS6: network control */
		ip->payload_len = bpf_htons(sizeof(*udp) + length);
		ip->nexthdr = IPPROTO_UDP;
		ip->hop_limit = BFD_HOPS;
		__builtin_memcpy(&ip->saddr, c->local, 16);
		__builtin_memcpy(&ip->daddr, echo ? c->local : c->peer, 16);
		at += sizeof(*ip);
	} else {
		struct iphdr *ip = (void *)(w->frame + ETH_HLEN);

		eth->h_proto = bpf_htons(ETH_P_IP);
		__builtin_memset(ip, 0, sizeof(*ip));
		ip->version = 4;
		ip->ihl = 5;
		ip->tos = 0xc0;
		ip->tot_len = bpf_htons(sizeof(*ip) + sizeof(*udp) + length);
		ip->frag_off = bpf_htons(0x4000);
		ip->ttl = BFD_HOPS;
		ip->protocol = IPPROTO_UDP;
		ip->saddr = c->local[0];
		ip->daddr = echo ? c->local[0] : c->peer[0];
		ip->check = bfd_fold(bpf_csum_diff(0, 0, (__be32 *)ip, sizeof(*ip), 0));
		at += sizeof(*ip);
	}
	udp = (void *)(w->frame + at);
	udp->source = echo ? bpf_htons(BFD_ECHO_PORT) : c->source_port;
	udp->dest = echo ? bpf_htons(BFD_ECHO_PORT) : bpf_htons(BFD_PORT);
	udp->len = bpf_htons(sizeof(*udp) + length);
	udp->check = 0;
	__builtin_memcpy(w->frame + at + sizeof(*udp), &w->packet, sizeof(w->packet));
	if (c->ipv6) {
		__builtin_memcpy(w->pseudo, c->local, 16);
		__builtin_memcpy(w->pseudo + 4, echo ? c->local : c->peer, 16);
		w->pseudo[8] = bpf_htonl(sizeof(*udp) + length);
		w->pseudo[9] = bpf_htonl(IPPROTO_UDP);
		__s64 sum = bpf_csum_diff(0, 0, w->pseudo, sizeof(w->pseudo), 0);

		sum = bpf_csum_diff(0, 0, (__be32 *)udp, sizeof(*udp), sum);
		if (length == BFD_HEAD)
			sum = bpf_csum_diff(0, 0, (__be32 *)&w->packet, BFD_HEAD, sum);
		else
			sum = bpf_csum_diff(0, 0, (__be32 *)&w->packet, BFD_HEAD + BFD_AUTH, sum);
		udp->check = bfd_fold(sum);
		if (!udp->check)
			udp->check = 0xffff;
	}
	return at + sizeof(*udp) + length;
}

/*
 * bfd_emit sends w->packet: a control packet of the given length, or an echo packet if length is 0.
 */
static __noinline int bfd_emit(struct __sk_buff *skb, const struct bfd_setup *c,
			       const struct bfd_hop *h, struct bfd_scratch *w, __u32 length)
{
	if (!skb || !c || !h || !w)
		return 0;
	length = length ? bfd_frame(c, h, w, length, 0) : bfd_frame(c, h, w, BFD_HEAD, 1);
	if (length < ETH_HLEN + 20 + 8 + BFD_HEAD || length > sizeof(w->frame) - 2)
		return 0;
	if (skb->len != length && bpf_skb_change_tail(skb, length, 0))
		return 0;
	if (bpf_skb_store_bytes(skb, 0, w->frame, length, 0))
		return 0;
	skb->mark = REROUTE_MARK;
	skb->priority = TC_PRIO_CONTROL; /* a full link must not take the session down */
	bpf_clone_redirect(skb, c->ifindex, 0);
	return 0;
}

/*
 * bfd_step does a session's part of a tick. skb is the tick's packet; sent packets are copies of
 * it.
 */
static __always_inline void bfd_step(struct __sk_buff *skb, __u32 place, struct bfd_scratch *w,
				     __u64 now, __u64 stalled, __u64 tick)
{
	struct bfd_setup *c = bpf_map_lookup_elem(&bfd_setups, &place);
	struct bfd_state *s = bpf_map_lookup_elem(&bfd_states, &place);
	struct bfd_hop *h = bpf_map_lookup_elem(&bfd_hops, &place);
	struct bfd_echo *e = bpf_map_lookup_elem(&bfd_echoes, &place);
	struct bfd_news news = {};
	__u32 length, random, sequence;
	__u64 nonce;
	int echo;

	if (!c || !s || !h || !e || !c->generation)
		return;
	random = bpf_get_prandom_u32();
	bpf_spin_lock(&s->lock);
	if (s->generation != c->generation)
		bfd_adopt(c, s, now);
	bfd_judge(c, s, now, stalled);
	bfd_echo_judge(c, s, e, now, stalled);
	length = bfd_due(c, s, &w->packet, now, random, tick);
	echo = bfd_echo_due(c, s, e, now, random);
	sequence = e->sequence;
	nonce = e->nonce;
	bfd_gather(s, e, &news);
	bpf_spin_unlock(&s->lock);
	bfd_tell(c, &news, place, now);
	if ((!length && !echo) || !bfd_find_hop(skb, c, h, w, now))
		return;
	if (length) {
		if (c->auth) {
			int i;

			bfd_digest(c, w);
#pragma clang loop unroll(full)
			for (i = 0; i < SHA1_DIGEST; i++)
				((__be32 *)w->packet.digest)[i] = bpf_htonl(w->digest[i]);
		}
		bfd_emit(skb, c, h, w, length);
	}
	if (echo) {
		struct bfd_echo_packet *p = (void *)&w->packet;

		p->magic = bpf_htonl(BFD_ECHO_MAGIC);
		p->mine = bpf_htonl(c->mine);
		p->sequence = bpf_htonl(sequence);
		p->spare = 0;
		p->nonce = nonce;
		bfd_emit(skb, c, h, w, 0);
	}
}

#endif
