/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What a hook reads of a packet. Two readers, of the same rules: of an skb by bpf_skb_load_bytes, of an
 * XDP frame directly.
 *
 *	IPv4 options, IPv6 extension headers	skipped, up to eight headers
 *	more headers than that			GUARD_BAD_HEADERS: no host sends them
 *	later fragments (XDP only)		source port 0, any port of the destination
 *	cut off before the UDP header's end	GUARD_BAD_HEADERS
 *	UDP-Lite				as UDP at a socket of its own; elsewhere it is nobody's
 */
#ifndef WEIR_GUARD_PARSE_H
#define WEIR_GUARD_PARSE_H

#define GUARD_EXTENSIONS 8
#define IPV6_FRAGMENT	 44
#define IPV6_AUTH	 51

struct guard_addresses {
	__u8 saddr[16]; /* v4 as ::ffff:a.b.c.d */
	__u8 daddr[16];
	__u16 sport; /* network byte order */
	__u16 dport;
	__u8 family; /* 4 or 6 */
	__u8 proto;
	__u8 later; /* a later fragment: no ports */
	__u8 pad;
};

enum { GUARD_OK, GUARD_NOT_OURS, GUARD_BAD_HEADERS };

static __always_inline void guard_mapped(__u8 *to, __u32 v4)
{
	__u32 *w = (__u32 *)to;

	w[0] = 0;
	w[1] = 0;
	w[2] = bpf_htonl(0xffff);
	w[3] = v4;
}

/* guard_extension says whether a header is one that stands before the transport's. */
static __always_inline int guard_extension(__u8 proto)
{
	return proto == IPPROTO_HOPOPTS || proto == IPPROTO_ROUTING || proto == IPPROTO_DSTOPTS ||
	       proto == IPV6_FRAGMENT || proto == IPV6_AUTH;
}

/* guard_after is how long an extension header is, by its second byte. */
static __always_inline __u32 guard_after(__u8 proto, __u8 length)
{
	if (proto == IPV6_FRAGMENT)
		return 8;
	return proto == IPV6_AUTH ? (length + 2) * 4 : (length + 1) * 8;
}

static __always_inline int guard_udp(__u8 proto)
{
	return proto == IPPROTO_UDP || proto == IPPROTO_UDPLITE;
}

/* guard_load reads from the network header of an skb. */
static __always_inline int guard_load(struct __sk_buff *skb, __u32 at, void *to, __u32 n)
{
	return bpf_skb_load_bytes_relative(skb, at, to, n, BPF_HDR_START_NET);
}

static __always_inline int guard_read_ports(struct __sk_buff *skb, __u32 at,
					    struct guard_addresses *a)
{
	struct udphdr h;

	if (!guard_udp(a->proto))
		return GUARD_NOT_OURS;
	if (guard_load(skb, at, &h, sizeof(h)))
		return GUARD_BAD_HEADERS;
	a->sport = h.source;
	a->dport = h.dest;
	return GUARD_OK;
}

static __always_inline int guard_read_v4(struct __sk_buff *skb, struct guard_addresses *a)
{
	struct {
		struct iphdr ip;
		struct udphdr udp;
	} h;

	/* Without options, and that is nearly always, one call reads everything. */
	if (guard_load(skb, 0, &h, sizeof(h)))
		return GUARD_BAD_HEADERS;
	guard_mapped(a->saddr, h.ip.saddr);
	guard_mapped(a->daddr, h.ip.daddr);
	a->family = 4;
	a->proto = h.ip.protocol;
	if (h.ip.ihl < 5 || h.ip.frag_off & bpf_htons(0x1fff))
		return GUARD_BAD_HEADERS; /* fragments have been put together before this hook */
	if (h.ip.ihl > 5)
		return guard_read_ports(skb, h.ip.ihl * 4, a);
	if (!guard_udp(a->proto))
		return GUARD_NOT_OURS;
	a->sport = h.udp.source;
	a->dport = h.udp.dest;
	return GUARD_OK;
}

static __always_inline int guard_read_v6(struct __sk_buff *skb, struct guard_addresses *a)
{
	__u32 at = sizeof(struct ipv6hdr);
	struct {
		struct ipv6hdr ip;
		struct udphdr udp;
	} h;

	if (guard_load(skb, 0, &h, sizeof(h)))
		return GUARD_BAD_HEADERS;
	__builtin_memcpy(a->saddr, &h.ip.saddr, 16);
	__builtin_memcpy(a->daddr, &h.ip.daddr, 16);
	a->family = 6;
	a->proto = h.ip.nexthdr;
	if (guard_udp(a->proto)) {
		a->sport = h.udp.source;
		a->dport = h.udp.dest;
		return GUARD_OK;
	}
	for (int i = 0; i < GUARD_EXTENSIONS && guard_extension(a->proto); i++) {
		__u8 next[2];

		if (guard_load(skb, at, next, 2))
			return GUARD_BAD_HEADERS;
		at += guard_after(a->proto, next[1]);
		a->proto = next[0];
	}
	if (guard_extension(a->proto))
		return GUARD_BAD_HEADERS;
	return guard_read_ports(skb, at, a);
}

/*
 * guard_read_skb reads a packet that a socket is about to get. skb->protocol is the packet's and not the
 * socket's: an IPv6 socket gets IPv4, too.
 */
static __always_inline int guard_read_skb(struct __sk_buff *skb, struct guard_addresses *a)
{
	switch (skb->protocol) {
	case bpf_htons(ETH_P_IP):
		return guard_read_v4(skb, a);
	case bpf_htons(ETH_P_IPV6):
		return guard_read_v6(skb, a);
	}
	return GUARD_NOT_OURS;
}

/* guard_frame_ports reads the ports of an XDP frame. */
static __always_inline int guard_frame_ports(void *at, void *end, struct guard_addresses *a)
{
	struct udphdr *h = at;

	if (a->proto != IPPROTO_UDP)
		return GUARD_NOT_OURS;
	if (a->later)
		return GUARD_OK;
	if ((void *)(h + 1) > end)
		return GUARD_BAD_HEADERS;
	a->sport = h->source;
	a->dport = h->dest;
	return GUARD_OK;
}

/*
 * guard_frame_v4 and guard_frame_v6 read an IP packet that begins at an offset of a frame: functions of
 * their own, so that the verifier walks them once and not behind each number of VLAN tags.
 */
int guard_frame_v4(struct xdp_md *ctx, __u32 offset, struct guard_addresses *a)
{
	void *at = (void *)(long)ctx->data + (offset & 31), *end = (void *)(long)ctx->data_end;
	struct iphdr *ip = at;

	if (!a)
		return GUARD_NOT_OURS;
	if ((void *)(ip + 1) > end || ip->ihl < 5)
		return GUARD_NOT_OURS; /* IP itself drops it */
	guard_mapped(a->saddr, ip->saddr);
	guard_mapped(a->daddr, ip->daddr);
	a->family = 4;
	a->proto = ip->protocol;
	a->later = !!(ip->frag_off & bpf_htons(0x1fff));
	return guard_frame_ports(at + ip->ihl * 4, end, a);
}

int guard_frame_v6(struct xdp_md *ctx, __u32 offset, struct guard_addresses *a)
{
	void *at = (void *)(long)ctx->data + (offset & 31), *end = (void *)(long)ctx->data_end;
	struct ipv6hdr *ip = at;

	if (!a)
		return GUARD_NOT_OURS;
	if ((void *)(ip + 1) > end)
		return GUARD_NOT_OURS;
	__builtin_memcpy(a->saddr, &ip->saddr, 16);
	__builtin_memcpy(a->daddr, &ip->daddr, 16);
	a->family = 6;
	a->proto = ip->nexthdr;
	at = ip + 1;
	for (int i = 0; i < GUARD_EXTENSIONS && guard_extension(a->proto) && !a->later; i++) {
		__u8 *next = at;

		if (at + 8 > end)
			return GUARD_BAD_HEADERS;
		if (a->proto == IPV6_FRAGMENT)
			a->later = !!(*(__u16 *)(next + 2) & bpf_htons(0xfff8));
		at += guard_after(a->proto, next[1]);
		a->proto = next[0];
	}
	if (guard_extension(a->proto))
		return GUARD_BAD_HEADERS;
	return guard_frame_ports(at, end, a);
}

struct guard_vlan {
	__be16 tag;
	__be16 proto;
};

/* guard_read_frame reads an Ethernet frame with up to two VLAN tags. */
static __always_inline int guard_read_frame(struct xdp_md *ctx, struct guard_addresses *a)
{
	void *at = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = at;
	__be16 proto;

	if ((void *)(eth + 1) > end)
		return GUARD_NOT_OURS;
	proto = eth->h_proto;
	at = eth + 1;
	for (int i = 0; i < 2; i++) {
		struct guard_vlan *vlan = at;

		if (proto != bpf_htons(ETH_P_8021Q) && proto != bpf_htons(ETH_P_8021AD))
			break;
		if ((void *)(vlan + 1) > end)
			return GUARD_NOT_OURS;
		proto = vlan->proto;
		at = vlan + 1;
	}
	if (proto == bpf_htons(ETH_P_IP))
		return guard_frame_v4(ctx, at - (void *)eth, a);
	if (proto == bpf_htons(ETH_P_IPV6))
		return guard_frame_v6(ctx, at - (void *)eth, a);
	return GUARD_NOT_OURS;
}

#endif
