/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Ingress: received packets. */
#ifndef WEIR_BFD_RECEIVE_H
#define WEIR_BFD_RECEIVE_H

#include "maps.h"
#include "session.h"
#include "echo.h"

struct bfd_arrival {
	__u32 from[4];
	__u32 to[4];
	__u32 at; /* offset of the control packet in the frame */
	__u32 length;
	__be16 port; /* source port */
	__u8 hops;
	__u8 echo;
};

/* bfd_parse finds a single-hop control packet or an echo packet. It returns 0 for others. */
static __always_inline int bfd_parse(struct __sk_buff *skb, struct bfd_arrival *a)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct udphdr *udp;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = data + ETH_HLEN;

		udp = (void *)(ip + 1);
		if ((void *)(udp + 1) > end || ip->protocol != IPPROTO_UDP || ip->ihl != 5 ||
		    ip->frag_off & bpf_htons(0x3fff))
			return 0;
		a->from[0] = ip->saddr;
		a->to[0] = ip->daddr;
		a->hops = ip->ttl;
		a->at = ETH_HLEN + sizeof(*ip) + sizeof(*udp);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = data + ETH_HLEN;

		udp = (void *)(ip + 1);
		if ((void *)(udp + 1) > end || ip->nexthdr != IPPROTO_UDP)
			return 0;
		__builtin_memcpy(a->from, &ip->saddr, 16);
		__builtin_memcpy(a->to, &ip->daddr, 16);
		a->hops = ip->hop_limit;
		a->at = ETH_HLEN + sizeof(*ip) + sizeof(*udp);
	} else {
		return 0;
	}
	a->echo = udp->dest == bpf_htons(BFD_ECHO_PORT);
	if (udp->dest != bpf_htons(BFD_PORT) && !a->echo)
		return 0;
	a->port = udp->source;
	a->length = bpf_ntohs(udp->len);
	if (a->length < sizeof(*udp))
		return 0;
	a->length -= sizeof(*udp);
	return 1;
}

/* bfd_valid makes the sessionless checks of RFC 5880 section 6.8.6. */
static __always_inline int bfd_valid(const struct bfd_packet *p, __u32 had)
{
	__u32 length = p->bits & BFD_HAS_AUTH ? BFD_HEAD + BFD_AUTH : BFD_HEAD;

	if (p->vers_diag >> 5 != 1 || p->length != length || had < length)
		return 0;
	if (!p->multiplier || p->bits & BFD_MULTIPOINT || !p->mine)
		return 0;
	if (!p->yours && p->bits >> 6 > BFD_DOWN)
		return 0;
	return (p->bits & (BFD_POLL | BFD_FINAL)) != (BFD_POLL | BFD_FINAL);
}

/* bfd_authentic checks the digest. The sequence number is checked under the lock. */
static __always_inline int bfd_authentic(const struct bfd_setup *c, struct bfd_scratch *w)
{
	int i, wrong = 0;

	if (!c->auth)
		return !(w->packet.bits & BFD_HAS_AUTH);
	if (!(w->packet.bits & BFD_HAS_AUTH) || w->packet.auth_type != c->auth ||
	    w->packet.auth_key != c->key || w->packet.auth_length != BFD_AUTH)
		return 0;
	bfd_digest(c, w);
#pragma clang loop unroll(full)
	for (i = 0; i < SHA1_DIGEST; i++)
		wrong |= ((__be32 *)w->packet.digest)[i] != bpf_htonl(w->digest[i]);
	return !wrong;
}

/* bfd_recent checks a packet's sequence number (section 6.7.4). It runs under the lock. */
static __always_inline int bfd_recent(const struct bfd_setup *c, struct bfd_state *s,
				      const struct bfd_packet *p, __u64 now)
{
	__u32 sequence = bpf_ntohl(p->auth_sequence), ahead;

	if (!c->auth)
		return 1;
	if (!s->yours && (__s64)(now - s->wait) >= 0)
		s->auth_known = 0; /* section 6.8.1: nothing for twice the detection time */
	ahead = sequence - s->received;
	if (s->auth_known &&
	    (ahead > 3u * p->multiplier || (!ahead && c->auth == BFD_METICULOUS_SHA1)))
		return 0;
	s->auth_known = 1;
	s->received = sequence;
	return 1;
}

static __always_inline __u32 *bfd_place(struct __sk_buff *skb, const struct bfd_arrival *a,
					const struct bfd_packet *p)
{
	struct bfd_from from = { .ifindex = skb->ifindex };
	__u32 mine = bpf_ntohl(p->yours);

	if (mine)
		return bpf_map_lookup_elem(&bfd_mine, &mine);
	__builtin_memcpy(from.peer, a->from, 16);
	return bpf_map_lookup_elem(&bfd_peers, &from);
}

static __always_inline int bfd_same(const __u32 *a, const __u32 *b)
{
	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3];
}

/* bfd_echoed handles a returned echo packet of ours. The kernel forwards the neighbours' own. */
static __always_inline int bfd_echoed(struct __sk_buff *skb, const struct bfd_arrival *a)
{
	struct bfd_echo_packet p;
	struct bfd_news news = {};
	struct bfd_setup *c;
	struct bfd_state *s;
	struct bfd_echo *e;
	__u32 mine, *place;
	__u64 now;

	if (a->hops != BFD_ECHO_HOPS || a->length != sizeof(p) || !bfd_same(a->from, a->to) ||
	    bpf_skb_load_bytes(skb, a->at, &p, sizeof(p)))
		return BFD_PASS;
	mine = bpf_ntohl(p.mine);
	place = bpf_map_lookup_elem(&bfd_mine, &mine);
	if (!place)
		return BFD_PASS;
	c = bpf_map_lookup_elem(&bfd_setups, place);
	s = bpf_map_lookup_elem(&bfd_states, place);
	e = bpf_map_lookup_elem(&bfd_echoes, place);
	if (!c || !s || !e || !c->generation || c->ifindex != skb->ifindex ||
	    !bfd_same(a->to, c->local))
		return BFD_PASS;
	now = bfd_now();
	bpf_spin_lock(&s->lock);
	bfd_echo_back(e, &p, now);
	bfd_gather(s, e, &news);
	bpf_spin_unlock(&s->lock);
	bfd_tell(c, &news, *place, now);
	return TC_ACT_SHOT;
}

SEC("tc")
int bfd_receive(struct __sk_buff *skb)
{
	struct bfd_arrival a = {};
	struct bfd_news news = {};
	struct bfd_scratch *w;
	struct bfd_setup *c;
	struct bfd_state *s;
	struct bfd_echo *e;
	__u32 one = 1, *place, had;
	int authentic, good;
	__u64 now;

	if (reroute_tagged(skb) || !bfd_parse(skb, &a))
		return BFD_PASS;
	if (a.echo)
		return bfd_echoed(skb, &a);
	w = bpf_map_lookup_elem(&bfd_scratches, &one);
	if (!w)
		return BFD_PASS;
	had = a.length;
	if (had >= BFD_HEAD + BFD_AUTH &&
	    !bpf_skb_load_bytes(skb, a.at, &w->packet, BFD_HEAD + BFD_AUTH))
		had = BFD_HEAD + BFD_AUTH;
	else if (had >= BFD_HEAD && !bpf_skb_load_bytes(skb, a.at, &w->packet, BFD_HEAD))
		had = BFD_HEAD;
	else
		return BFD_PASS;
	place = bfd_place(skb, &a, &w->packet);
	if (!place)
		return BFD_PASS; /* another BFD daemon of this host may own it */
	c = bpf_map_lookup_elem(&bfd_setups, place);
	s = bpf_map_lookup_elem(&bfd_states, place);
	e = bpf_map_lookup_elem(&bfd_echoes, place);
	if (!c || !s || !e || !c->generation || c->ifindex != skb->ifindex)
		return BFD_PASS;
	good = bfd_valid(&w->packet, had) && a.hops == BFD_HOPS && bfd_same(a.from, c->peer) &&
	       bfd_same(a.to, c->local);
	authentic = good && bfd_authentic(c, w);
	now = bfd_now();
	bpf_spin_lock(&s->lock);
	if (s->generation != c->generation)
		bfd_adopt(c, s, now);
	if (!good) {
		s->malformed++;
	} else if (!authentic || bfd_other(c, s, &w->packet, a.port, now) ||
		   !bfd_recent(c, s, &w->packet, now)) {
		s->not_authentic++;
	} else {
		s->in++;
		s->in_bytes += w->packet.length;
		bfd_take(c, s, &w->packet, a.port, now);
	}
	bfd_gather(s, e, &news);
	bpf_spin_unlock(&s->lock);
	bfd_tell(c, &news, *place, now);
	return TC_ACT_SHOT;
}

#endif
