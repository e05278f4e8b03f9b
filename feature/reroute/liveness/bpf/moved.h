/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Neighbours with a changed link address: a replaced card, port or router. The kernel keeps the old
 * address, because protection makes its entries permanent. The source of the neighbour's signed
 * probes is trusted. Frames go there until user space has updated the kernel's entries.
 */
#ifndef WEIR_LIVENESS_MOVED_H
#define WEIR_LIVENESS_MOVED_H

#define LIVENESS_ICMPV6	       58
#define LIVENESS_ADVERTISEMENT 136 /* RFC 4861 section 4.4 */

static __always_inline struct liveness_move *liveness_move_of(__u32 ifindex)
{
	__u32 slot = ifindex & (REROUTE_LINKS - 1);

	return bpf_map_lookup_elem(&liveness_moves, &slot);
}

static __always_inline bool liveness_same_mac(const __u8 *a, const __u8 *b)
{
	int i;

#pragma clang loop unroll(full)
	for (i = 0; i < 6; i++)
		if (a[i] != b[i])
			return 0;
	return 1;
}

/* liveness_unmoved ends a redirection once the kernel knows the address. */
static __always_inline void liveness_unmoved(__u32 ifindex, const __u8 *kernels)
{
	struct liveness_move *m = liveness_move_of(ifindex);

	if (!m || !m->moved || liveness_same_mac(m->was, kernels))
		return;
	if (liveness_same_mac(m->now, kernels))
		m->moved = 0;
	else
		__builtin_memcpy(m->was, kernels, 6);
}

/*
 * liveness_genuine reports whether a frame is a fresh probe of the peer: signed, from the next hop,
 * and newer than all before, so not a replay. The probe is counted later, by the segment.
 */
static __always_inline bool liveness_genuine(const struct liveness_setup *c,
					     const struct liveness_state *s,
					     const struct liveness_packet *f)
{
	__u64 life = bpf_be64_to_cpu(f->tlv.life);

	if (f->tlv.kind != LIVENESS_PROBE || f->tlv.len != sizeof(f->tlv) - 2 ||
	    f->tlv.version != LIVENESS_VERSION || f->ip.hop_limit != LIVENESS_HOPS ||
	    f->srh.hdrlen != (sizeof(f->seg) + sizeof(f->tlv)) / 8 || f->srh.type != 4 ||
	    f->srh.first_segment != 1)
		return 0;
	if (life == s->peer_life ? (__s32)(bpf_ntohl(f->tlv.seq) - s->peer_seq) <= 0 :
				   (__s64)(life - s->peer_life) < 0)
		return 0;
	return liveness_signed(c, f);
}

/* liveness_source checks the source of a peer's probe. Usually it equals the kernel's address. */
static __always_inline void liveness_source(const struct __sk_buff *skb,
					    const struct liveness_setup *c,
					    const struct liveness_state *s,
					    const struct liveness_packet *f)
{
	struct liveness_move *m = liveness_move_of(c->ifindex);
	const struct ethhdr *eth = (void *)(long)skb->data;
	__u8 from[6];

	if (!m || !c->judges || !s->mac_known ||
	    (!liveness_clock_given && skb->ifindex != c->ifindex) ||
	    (void *)(eth + 1) > (void *)(long)skb->data_end)
		return;
	__builtin_memcpy(from, eth->h_source, 6);
	if (liveness_same_mac(from, m->moved ? m->now : s->mac) || from[0] & 1 ||
	    !liveness_genuine(c, s, f))
		return;
	m->moved = 0;
	if (liveness_same_mac(from, s->mac))
		return;
	__builtin_memcpy(m->was, s->mac, 6);
	__builtin_memcpy(m->now, from, 6);
	asm volatile("" ::: "memory");
	m->moved = 1;
}

/*
 * liveness_advertises reports whether a packet is an advertisement of this device's link address.
 */
static __always_inline bool liveness_advertises(struct __sk_buff *skb)
{
	struct {
		struct liveness_ip ip;
		__u8 type;
	} h;

	return skb->protocol == bpf_htons(ETH_P_IPV6) &&
	       !bpf_skb_load_bytes(skb, ETH_HLEN, &h, sizeof(h.ip) + 1) &&
	       h.ip.nexthdr == LIVENESS_ICMPV6 && h.ip.hop_limit == LIVENESS_HOPS &&
	       h.type == LIVENESS_ADVERTISEMENT;
}

/*
 * liveness_leave sees all packets leaving by a session's device. While the link is down, the
 * neighbour may have an unknown link address. Advertisements then go to all nodes, so the neighbour
 * learns this host's address and its probes arrive.
 */
SEC("tc")
int liveness_leave(struct __sk_buff *skb)
{
	static const __u8 all[6] = { 0x33, 0x33, 0, 0, 0, 1 }; /* all nodes: RFC 2464 section 7 */
	struct liveness_move *m = liveness_move_of(skb->ifindex);
	union reroute_link *l = reroute_link_of(skb->ifindex);
	__u8 to[6];

	if (!m || !l || !(m->moved | l->probe))
		return TC_ACT_UNSPEC;
	if (bpf_skb_load_bytes(skb, 0, to, sizeof(to)) || to[0] & 1)
		return TC_ACT_UNSPEC;
	if (l->probe && liveness_advertises(skb))
		bpf_skb_store_bytes(skb, 0, all, sizeof(all), 0);
	else if (m->moved && liveness_same_mac(to, m->was))
		bpf_skb_store_bytes(skb, 0, m->now, sizeof(m->now), 0);
	return TC_ACT_UNSPEC;
}

#endif
