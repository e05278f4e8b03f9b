/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Parsing of a packet before it is rerouted. */
#ifndef WEIR_PROTECT_PACKET_H
#define WEIR_PROTECT_PACKET_H

#define ETH 14 /* bytes of the link header */

#define NEXT_HOP       0
#define NEXT_TCP       6
#define NEXT_UDP       17
#define NEXT_ROUTING   43
#define NEXT_FRAGMENT  44
#define NEXT_ICMPV6    58
#define NEXT_DSTOPTS   60
#define GREATEST_HOPS  255
#define ND_FIRST       133  /* router solicitation */
#define ND_LAST	       137  /* redirect */
#define BFD_CONTROL    3784 /* RFC 5881 */
#define BFD_ECHO       3785
#define BFD_MICRO      6784   /* RFC 7130 */
#define IP4_FRAGMENT   0x3fff /* of frag_off: more fragments follow, or not the first */
#define MAX_EXTENSIONS 4

struct packet {
	__u32 addr[4];	 /* destination, network byte order; IPv4 as ::ffff:0:0/96 */
	__u32 hash;	 /* of the flow, without ports */
	__be32 first;	 /* of an outer header: version, traffic class, flow label or 0 */
	__u32 transport; /* offset of the transport header from the IP header */
	__u8 v6;
	__u8 proto;
	__u8 hops;
	__u8 whole; /* no fragment, so the ports are present */
};

static __always_inline __u32 mixed(__u32 a, __u32 b)
{
	a = (a ^ b) * 0x9e3779b1;
	return a ^ a >> 15;
}

static __always_inline void parse6(const struct ipv6hdr *ip, struct packet *p)
{
	p->v6 = 1;
	__builtin_memcpy(p->addr, &ip->daddr, sizeof(p->addr));
	p->first = *(__be32 *)ip;
	p->hash = mixed(mixed(ip->saddr.in6_u.u6_addr32[3], ip->saddr.in6_u.u6_addr32[1]),
			mixed(p->addr[3], p->addr[1]));
	p->proto = ip->nexthdr;
	p->hops = ip->hop_limit;
	p->transport = sizeof(*ip);
	p->whole = ip->nexthdr != NEXT_FRAGMENT;
}

/* parse reads the IP header. It returns 0 on success. */
static __always_inline int parse(struct __sk_buff *skb, struct packet *p)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = data + ETH;

		if ((void *)(ip + 1) > end)
			return -1;
		parse6(ip, p);
		return 0;
	}
	p->v6 = 0;
	if (skb->protocol != bpf_htons(ETH_P_IP))
		return -1;
	struct iphdr *ip = data + ETH;

	if ((void *)(ip + 1) > end)
		return -1;
	p->addr[0] = 0;
	p->addr[1] = 0;
	p->addr[2] = bpf_htonl(0xffff);
	p->addr[3] = ip->daddr;
	p->first = bpf_htonl(0x60000000 | (__u32)ip->tos << 20);
	p->hash = mixed(ip->saddr, ip->daddr);
	p->proto = ip->protocol;
	p->hops = ip->ttl;
	p->transport = ip->ihl * 4;
	p->whole = !(ip->frag_off & bpf_htons(IP4_FRAGMENT));
	return 0;
}

/* of_link reports whether an address is link-local, multicast or broadcast. */
static __always_inline int of_link(const struct packet *p, __u32 word)
{
	__u32 host = bpf_ntohl(word);

	if (p->v6)
		return host >> 24 == 0xff || host >> 22 == 0xfe80 >> 6;
	return host >> 28 == 0xe || host >> 16 == 0xa9fe || host == 0xffffffff;
}

/*
 * exempt reports whether a packet must stay on the link. These are neighbour discovery, routing
 * protocols with packets to the whole link, weir's probes, and BFD, which must notice the failure.
 */
static __always_inline int exempt(struct __sk_buff *skb, const struct packet *p)
{
	__be16 ports[2];
	__u8 type;

	if (skb->mark == REROUTE_MARK || of_link(p, p->v6 ? p->addr[0] : p->addr[3]))
		return 1;
	if (p->hops != GREATEST_HOPS)
		return 0;
	if (p->v6 && p->proto == NEXT_ICMPV6)
		return !bpf_skb_load_bytes(skb, ETH + p->transport, &type, sizeof(type)) &&
		       type >= ND_FIRST && type <= ND_LAST;
	if (p->proto != NEXT_UDP || !p->whole ||
	    bpf_skb_load_bytes(skb, ETH + p->transport, ports, sizeof(ports)))
		return 0;
	return ports[1] == bpf_htons(BFD_CONTROL) || ports[1] == bpf_htons(BFD_ECHO) ||
	       ports[1] == bpf_htons(BFD_MICRO);
}

/* labelled computes the flow label of an outer header for a flow without one (RFC 6437). */
static __always_inline __be32 labelled(const struct packet *p, __u32 ports)
{
	if (!p->whole || (p->proto != NEXT_TCP && p->proto != NEXT_UDP))
		ports = 0;
	return p->first | bpf_htonl((mixed(mixed(p->hash, ports), p->proto) & 0xfffff) | 1);
}

/*
 * label returns the first word of an outer header: the packet's traffic class, and its flow label
 * if present.
 */
static __always_inline __be32 label(struct __sk_buff *skb, const struct packet *p)
{
	__u32 ports = 0;

	if (p->first & bpf_htonl(0xfffff))
		return p->first;
	bpf_skb_load_bytes(skb, ETH + p->transport, &ports, sizeof(ports));
	return labelled(p, ports);
}

/* settle_transport skips extension headers, to find the transport header of a GSO train. */
static __always_inline void settle_transport(struct __sk_buff *skb, struct packet *p)
{
	__u8 header[2];

	for (int i = 0; i < MAX_EXTENSIONS; i++) {
		if (!p->v6 ||
		    (p->proto != NEXT_HOP && p->proto != NEXT_ROUTING && p->proto != NEXT_DSTOPTS))
			return;
		if (bpf_skb_load_bytes(skb, ETH + p->transport, header, sizeof(header)))
			return;
		p->proto = header[0];
		p->transport += 8 + header[1] * 8;
	}
}

#endif
