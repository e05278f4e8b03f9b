/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Adding a repair's headers to a packet. */
#ifndef WEIR_PROTECT_HEADERS_H
#define WEIR_PROTECT_HEADERS_H

#define EALREADY 114
#define OWN	 8  /* bytes of an outer header written per packet */
#define INLINE	 64 /* bytes of an IPv6 and a routing header written per packet */

/*
 * write_outer writes the headers of a repair into the room before a grown packet. The kernel
 * rewrites the length for each segment of a GSO train.
 */
static __always_inline int write_outer(struct __sk_buff *skb, const struct reroute_repair *r,
				       const struct packet *p, __be32 first)
{
	const __u8 *header = p->v6 ? r->header6 : r->header4;
	__u32 rest = (p->v6 ? r->len6 : r->len4) - OWN - 1;
	struct {
		__be32 first;
		__be16 length;
		__u8 next, hops;
	} own = { first, bpf_htons((__u16)(skb->len - ETH - sizeof(struct ipv6hdr))), header[6],
		  header[7] };

	asm volatile("" : "+r"(rest)); /* shows the bounds to the verifier */
	if (rest >= REROUTE_HEADER - OWN)
		return -1;
	if (bpf_skb_store_bytes(skb, ETH + OWN, header + OWN, rest + 1, 0))
		return -1;
	return bpf_skb_store_bytes(skb, ETH, &own, sizeof(own), 0);
}

/* write_inline writes the packet's own IPv6 header, followed by the repair's routing header. */
static __always_inline int write_inline(struct __sk_buff *skb, const struct reroute_repair *r,
					const __u8 *own)
{
	__u32 rest = r->len6 - (INLINE - sizeof(struct ipv6hdr)) - 1;
	__u64 piece[INLINE / 8];
	__u8 *h = (__u8 *)piece;

	__builtin_memcpy(piece, r->header6, sizeof(piece));
	__builtin_memcpy(h, own, offsetof(struct ipv6hdr, daddr));
	*(__be16 *)(h + 4) = bpf_htons((__u16)(skb->len - ETH - sizeof(struct ipv6hdr)));
	h[6] = NEXT_ROUTING;
	h[40] = own[6];
	__builtin_memcpy(h + 48, own + offsetof(struct ipv6hdr, daddr), 16);
	if (bpf_skb_store_bytes(skb, ETH, piece, sizeof(piece), 0))
		return -1;
	asm volatile("" : "+r"(rest));
	if (rest >= REROUTE_HEADER - INLINE)
		return 0; /* nothing left: one segment and the packet's destination */
	return bpf_skb_store_bytes(skb, ETH + INLINE, r->header6 + INLINE, rest + 1, 0);
}

/* insert makes an IPv6 packet visit the segments before its destination. */
static __always_inline int insert(struct __sk_buff *skb, const struct reroute_repair *r,
				  const struct packet *p, __u64 flags)
{
	__u8 own[sizeof(struct ipv6hdr)];

	/* Hop-by-hop options come first (RFC 8200 section 4.1): no header may precede them. */
	if (bpf_skb_load_bytes(skb, ETH, own, sizeof(own)) || own[6] == NEXT_HOP)
		return -1;
	if (bpf_skb_adjust_room(skb, r->len6, BPF_ADJ_ROOM_NET, flags))
		return -1;
	return write_inline(skb, r, own);
}

static __always_inline int encapsulate(struct __sk_buff *skb, const struct reroute_repair *r,
				       const struct packet *p, __u64 flags, __u32 gso)
{
	__u32 length = p->v6 ? r->len6 : r->len4;
	__be32 first = label(skb, p);
	int err;

	err = bpf_skb_adjust_room(skb, length, BPF_ADJ_ROOM_MAC,
				  flags | BPF_F_ADJ_ROOM_ENCAP_L3_IPV6);
	/*
	 * The kernel supports one level of tunnels. A packet without GSO needs no tunnel metadata.
	 */
	if (err == -EALREADY && p->v6 && !gso)
		err = bpf_skb_adjust_room(skb, length, BPF_ADJ_ROOM_MAC, 0);
	return err ? err : write_outer(skb, r, p, first);
}

/* grow prepends the headers of a repair with direct stores, which are cheap here. */
static __always_inline int grow(struct __sk_buff *skb, const struct reroute_repair *r, __be32 first)
{
	__u32 rest = r->len6 - INLINE - 1;
	__u64 *to, *end;
	const __u64 *from = (const __u64 *)r->header6;

	if (bpf_skb_adjust_room(skb, r->len6, BPF_ADJ_ROOM_MAC,
				BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV6))
		return -1;
	to = (void *)(long)skb->data + ETH;
	end = (void *)(long)skb->data_end;
	if (to + INLINE / 8 > end) /* the packet's own header follows the repair's headers */
		return -1;
	for (int i = 0; i < 5; i++)
		to[i] = from[i];
	*(__be32 *)to = first;
	*((__be16 *)to + 2) = bpf_htons((__u16)(skb->len - ETH - sizeof(struct ipv6hdr)));
	if (r->len6 < INLINE)
		return 0;
	for (int i = 5; i < INLINE / 8; i++)
		to[i] = from[i];
	asm volatile("" : "+r"(rest));
	if (rest >= REROUTE_HEADER - INLINE)
		return 0;
	return bpf_skb_store_bytes(skb, ETH + INLINE, r->header6 + INLINE, rest + 1, 0);
}

#endif
