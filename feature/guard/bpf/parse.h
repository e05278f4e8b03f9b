/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Parsing of packets, by two parsers with the same rules: bpf_skb_load_bytes for an skb, direct
 * access for an XDP frame.
 *
 *	IPv4 options, IPv6 extension headers	skipped, up to 32 headers
 *	more headers				GUARD_BAD_HEADERS: no host sends as many
 *	later fragments (XDP only)		source port 0, any destination port; of UDP, or of an
 *						unfinished chain of extension headers
 *	cut off before the UDP header's end	GUARD_BAD_HEADERS
 *	merged by the kernel (UDP_GRO)		counted as its datagrams, up to GUARD_MERGED
 *	VLAN tags (XDP only)			skipped, up to 34; more: GUARD_NOBODYS. The kernel removes
 *						any number of tags of VLAN 0
 *	UDP-Lite				as UDP at a socket's own filter; elsewhere ignored
 */
#ifndef WEIR_GUARD_PARSE_H
#define WEIR_GUARD_PARSE_H

#define GUARD_EXTENSIONS 32
#define GUARD_TAGS	 34
#define GUARD_FARTHEST	 9216 /* bytes of extension headers in a frame, at most */
#define IPV6_FRAGMENT	 44
#define IPV6_AUTH	 51

struct guard_addresses {
	__u8 saddr[16] __attribute__((aligned(8))); /* v4 as ::ffff:a.b.c.d */
	__u8 daddr[16];
	__u16 sport; /* network byte order */
	__u16 dport;
	__u8 family; /* 4 or 6 */
	__u8 proto;
	__u8 later;  /* a later fragment: no ports */
	__u8 merged; /* number of datagrams merged by the kernel, 0: one; or GUARD_UNREADABLE */
};

#define GUARD_MERGED	 128 /* maximum merged by kernels: UDP_MAX_SEGMENTS; GRO uses 64 */
#define GUARD_UNREADABLE 255 /* more merged datagrams, or malformed headers */

enum { GUARD_OK, GUARD_NOT_OURS, GUARD_BAD_HEADERS, GUARD_NOBODYS };

static __always_inline void guard_mapped(__u8 *to, __u32 v4)
{
	__u32 *w = (__u32 *)to;

	w[0] = 0;
	w[1] = 0;
	w[2] = bpf_htonl(0xffff);
	w[3] = v4;
}

/* guard_extension reports whether a protocol number is an IPv6 extension header. */
static __always_inline int guard_extension(__u8 proto)
{
	const __u64 all = 1ULL << IPPROTO_HOPOPTS | 1ULL << IPPROTO_ROUTING |
			  1ULL << IPPROTO_DSTOPTS | 1ULL << IPV6_FRAGMENT | 1ULL << IPV6_AUTH;

	return proto < 64 && (all >> proto & 1);
}

/* guard_after returns the length of an extension header from its second byte. */
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

/* guard_load loads bytes relative to the network header of an skb. */
static __always_inline int guard_load(struct __sk_buff *skb, __u32 at, void *to, __u32 n)
{
	return bpf_skb_load_bytes_relative(skb, at, to, n, BPF_HDR_START_NET);
}

/*
 * guard_take reads the ports and the number of datagrams. With UDP_GRO, the kernel passes several
 * datagrams of a flow to a socket as one packet. For packets from a virtual machine of this host
 * the number is missing (gso_segs is 0, SKB_GSO_DODGY) and follows from the size. The same applies
 * to one large datagram before its fragmentation (UFO, VIRTIO_NET_HDR_GSO_UDP). A program does not
 * see gso_type, so such a datagram is charged as its fragments.
 */
static __always_inline void guard_take(struct __sk_buff *skb, const struct udphdr *h,
				       struct guard_addresses *a)
{
	__u32 n = skb->gso_segs, size = skb->gso_size, bytes;

	a->sport = h->source;
	a->dport = h->dest;
	if (!guard_rare(n | size))
		return;
	bytes = bpf_ntohs(h->len);
	if (!n && bytes > sizeof(*h))
		n = (bytes - sizeof(*h) + size - 1) / size;
	a->merged = n > GUARD_MERGED ? GUARD_UNREADABLE : n;
}

/* Read in one load: complete for packets without options and extension headers, nearly all. */
union guard_headers {
	struct {
		struct iphdr ip;
		struct udphdr udp;
	} v4;
	struct {
		struct ipv6hdr ip;
		struct udphdr udp;
	} v6;
};

/*
 * guard_read_v4 and guard_read_v6 return the offset of the transport header, 0 if it is already
 * read, or a negative value on error.
 */
static __always_inline int guard_read_v4(struct __sk_buff *skb, struct guard_addresses *a,
					 union guard_headers *h)
{
	const struct iphdr *ip = &h->v4.ip;

	if (guard_load(skb, 0, &h->v4, sizeof(h->v4)))
		return -1;
	guard_mapped(a->saddr, ip->saddr);
	guard_mapped(a->daddr, ip->daddr);
	a->family = 4;
	a->proto = ip->protocol;
	if (ip->ihl < 5 || ip->frag_off & bpf_htons(0x1fff))
		return -1; /* fragments are reassembled before this hook */
	return ip->ihl > 5 ? ip->ihl * 4 : 0;
}

static __always_inline int guard_read_v6(struct __sk_buff *skb, struct guard_addresses *a,
					 union guard_headers *h)
{
	const struct ipv6hdr *ip = &h->v6.ip;
	int at = sizeof(*ip);

	if (guard_load(skb, 0, &h->v6, sizeof(h->v6)))
		return -1;
	__builtin_memcpy(a->saddr, &ip->saddr, 16);
	__builtin_memcpy(a->daddr, &ip->daddr, 16);
	a->family = 6;
	a->proto = ip->nexthdr;
	if (guard_udp(a->proto))
		return 0;
	for (int i = 0; i < GUARD_EXTENSIONS && guard_extension(a->proto); i++) {
		__u8 next[2];

		if (guard_load(skb, at, next, 2))
			return -1;
		at += guard_after(a->proto, next[1]);
		a->proto = next[0];
	}
	return guard_extension(a->proto) ? -1 : at;
}

/*
 * guard_read_skb parses a packet before a socket receives it. skb->protocol is the packet's
 * protocol, not the socket's: an IPv6 socket receives IPv4, too.
 */
static __always_inline int guard_read_skb(struct __sk_buff *skb, struct guard_addresses *a)
{
	struct udphdr *udp;
	union guard_headers h;
	int at;

	switch (skb->protocol) {
	case bpf_htons(ETH_P_IP):
		at = guard_read_v4(skb, a, &h);
		udp = &h.v4.udp;
		break;
	case bpf_htons(ETH_P_IPV6):
		at = guard_read_v6(skb, a, &h);
		udp = &h.v6.udp;
		break;
	default:
		return GUARD_NOT_OURS;
	}
	if (at < 0)
		return GUARD_BAD_HEADERS;
	if (!guard_udp(a->proto))
		return GUARD_NOT_OURS;
	if (at && guard_load(skb, at, udp, sizeof(*udp)))
		return GUARD_BAD_HEADERS;
	guard_take(skb, udp, a);
	return GUARD_OK;
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
 * guard_frame_v4 and guard_frame_v6 parse an IP packet at an offset of a frame. They are separate
 * functions, so the verifier follows them once instead of once for each number of VLAN tags.
 */
int guard_frame_v4(struct xdp_md *ctx, __u32 offset, struct guard_addresses *a)
{
	void *at = (void *)(long)ctx->data + (offset & 255), *end = (void *)(long)ctx->data_end;
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
	void *at = (void *)(long)ctx->data + (offset & 255), *end = (void *)(long)ctx->data_end;
	struct ipv6hdr *ip = at;
	__u32 n = 0; /* bytes of extension headers */

	if (!a)
		return GUARD_NOT_OURS;
	if ((void *)(ip + 1) > end)
		return GUARD_NOT_OURS;
	__builtin_memcpy(a->saddr, &ip->saddr, 16);
	__builtin_memcpy(a->daddr, &ip->daddr, 16);
	a->family = 6;
	a->proto = ip->nexthdr;
	for (int i = 0; i < GUARD_EXTENSIONS && guard_extension(a->proto) && !a->later; i++) {
		__u8 *next;

		/*
		 * Load n from memory, where the verifier does not track it. Otherwise it follows
		 * each sum of lengths.
		 */
		a->dport = n;
		barrier();
		n = a->dport & 0x3fff; /* a bound for the verifier only */
		a->dport = 0;
		next = (void *)(ip + 1) + n;
		if ((void *)(next + 8) > end)
			return GUARD_BAD_HEADERS;
		if (a->proto == IPV6_FRAGMENT)
			a->later = !!(*(__u16 *)(next + 2) & bpf_htons(0xfff8));
		n += guard_after(a->proto, next[1]);
		a->proto = next[0];
		if (n > GUARD_FARTHEST)
			return GUARD_BAD_HEADERS;
	}
	at = (void *)(ip + 1) + n;
	if (guard_extension(a->proto)) {
		if (!a->later)
			return GUARD_BAD_HEADERS;
		/* The rest of the headers is in the first fragment: it may be UDP. */
		a->proto = IPPROTO_UDP;
	}
	return guard_frame_ports(at, end, a);
}

struct guard_vlan {
	__be16 tag;
	__be16 proto;
};

/* guard_read_frame parses an Ethernet frame with up to GUARD_TAGS VLAN tags. */
static __always_inline int guard_read_frame(struct xdp_md *ctx, struct guard_addresses *a)
{
	void *at = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = at;
	__be16 proto;

	if ((void *)(eth + 1) > end)
		return GUARD_NOT_OURS;
	proto = eth->h_proto;
	at = eth + 1;
	for (int i = 0; proto == bpf_htons(ETH_P_8021Q) || proto == bpf_htons(ETH_P_8021AD); i++) {
		struct guard_vlan *vlan = at;

		if (i == GUARD_TAGS)
			return GUARD_NOBODYS;
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
