//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The data path of protection.
 *
 * reroute_egress runs at the egress of a protected device, after routing, hop limit and neighbour.
 * It also sees this host's own packets. While the link may be used it costs one load. While it may
 * not, the packet gets the headers of its repair and leaves by the backup.
 *
 * reroute_ingress does the same at ingress, before the kernel's routing. It is attached only while
 * a link is down, and passes all but plain packets on to reroute_egress.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <stddef.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "clock.h"
#include "links.h"
#include "protect.h"
#include "packet.h"
#include "headers.h"
#include "table.h"

#ifndef AF_INET
#define AF_INET	 2
#define AF_INET6 10
#endif
#define NEXT	  TC_ACT_UNSPEC /* TCX_NEXT has the same number */
#define likely(x) __builtin_expect(!!(x), 1)

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, REROUTE_REPAIRS);
	__type(key, __u32);
	__type(value, struct reroute_repair);
} reroute_repairs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, REROUTE_LINKS);
	__type(key, __u32);
	__type(value, struct reroute_path);
} reroute_paths SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct reroute_prefix);
	__type(value, __u32);
} reroute_lpm SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REROUTE_PATHS);
	__type(key, __u32);
	__type(value, struct reroute_tally);
} reroute_counts SEC(".maps");

/* Destination → repair, for destinations routed to a protected link: see fast.go. */
TABLE_MAPS(fast)

/* CLOCK_MONOTONIC in ns: until then the table's routes are the kernel's. */
volatile __u64 fast_until;

const struct reroute_repair *reroute_repair_type __attribute__((unused)); /* for bpf2go */
const struct reroute_path *reroute_path_type __attribute__((unused));
const struct reroute_prefix *reroute_prefix_type __attribute__((unused));
const struct reroute_tally *reroute_tally_type __attribute__((unused));

static __always_inline struct reroute_tally *counts_of(__u32 row)
{
	return bpf_map_lookup_elem(&reroute_counts, &row);
}

#define COUNT(row, what)                                       \
	do {                                                   \
		struct reroute_tally *counts = counts_of(row); \
		if (counts)                                    \
			counts->what++;                        \
	} while (0)

static __always_inline int is_down(__u32 slot)
{
	union reroute_link *l = bpf_map_lookup_elem(&reroute_links, &slot);

	return l && l->down;
}

/*
 * choose returns the first usable repair in the chain from id on. *row is set to the path's row
 * even without a repair for the packet's IP version. *better is the number of unusable repairs
 * before it.
 */
static __always_inline struct reroute_repair *choose(__u32 id, const struct packet *p, __u32 *row,
						     int *better)
{
	__u32 suits = p->v6 ? REROUTE_FOR6 : REROUTE_FOR4;

	*row = 0;
	*better = 0;
	for (int i = 0; i < REROUTE_CHOICES; i++) {
		struct reroute_repair *r = bpf_map_lookup_elem(&reroute_repairs, &id);

		if (!id || !r || !r->ifindex)
			return 0;
		*row = r->row;
		if (r->flags & suits) {
			if (!is_down(r->watch))
				return r;
			*better = i + 1;
		}
		id = r->next;
	}
	return 0;
}

/*
 * slow sends a packet too big for the way to the helper namespace. The kernel there has a route
 * with the right MTU. It tells the sender, or fragments the packet and sends the fragments back.
 * Returning fragments fit; a returning packet too big is dropped. back is the number of times the
 * hop limit is decremented before the packet is here again.
 */
static __always_inline int slow(struct __sk_buff *skb, const struct packet *p, __u32 row,
				__u32 device, __u8 back)
{
	__u8 mac[ETH_ALEN] = { 0x02, 0x77, 0x65, 0x69, 0x72, 0x01 };
	__u8 hops = p->hops;

	if (!device || skb->ingress_ifindex == device) {
		COUNT(row, lost);
		return TC_ACT_SHOT;
	}
	COUNT(row, big);
	if (hops <= GREATEST_HOPS - back) {
		hops += back;
		if (p->v6) {
			bpf_skb_store_bytes(skb, ETH + offsetof(struct ipv6hdr, hop_limit), &hops,
					    1, 0);
		} else {
			__be16 was = bpf_htons(p->hops << 8), is = bpf_htons(hops << 8);

			bpf_l3_csum_replace(skb, ETH + offsetof(struct iphdr, check), was, is, 2);
			bpf_skb_store_bytes(skb, ETH + offsetof(struct iphdr, ttl), &hops, 1, 0);
		}
	}
	bpf_skb_store_bytes(skb, 0, mac, sizeof(mac), 0);
	return bpf_redirect(device, 0);
}

/*
 * segment returns the length of a packet, or of the longest segment of a GSO train, from its IP
 * header on (skb_gso_network_seglen in the kernel).
 */
static __always_inline __u32 segment(struct __sk_buff *skb, struct packet *p, __u32 gso)
{
	__u8 offset = 0x20; /* of UDP */

	if (!gso)
		return skb->len - ETH;
	settle_transport(skb, p);
	if (p->proto == NEXT_TCP) {
		offset = 0x50;
		bpf_skb_load_bytes(skb, ETH + p->transport + 12, &offset, sizeof(offset));
	}
	return p->transport + (offset >> 4) * 4 + gso;
}

static __always_inline int send(const struct reroute_repair *r)
{
	struct bpf_redir_neigh to = {};

	if (r->flags & REROUTE_VIA4) {
		to.nh_family = AF_INET;
		to.ipv4_nh = *(__be32 *)r->via;
	} else {
		to.nh_family = AF_INET6;
		__builtin_memcpy(to.ipv6_nh, r->via, sizeof(to.ipv6_nh));
	}
	return bpf_redirect_neigh(r->ifindex, &to, sizeof(to), 0);
}

/* go sends a packet by a repair. */
static __always_inline int go(struct __sk_buff *skb, const struct reroute_repair *r,
			      struct packet *p, int better)
{
	__u32 grows = p->v6 ? r->len6 : r->len4, device = p->v6 ? r->slow6 : r->slow4;
	__u32 gso = skb->gso_size, len = skb->len, most;
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;
	struct reroute_tally *c = counts_of(r->row);
	int err = 0;

	asm volatile("" : "+r"(gso)); /* one load of the context: the verifier requires it */
	if (!c)
		return TC_ACT_SHOT;
	most = segment(skb, p, gso);
	if (gso && most + grows > r->mtu && p->proto == NEXT_TCP && grows) {
		/* The kernel makes TCP's segments smaller, and nothing is lost. */
		flags = 0;
		most -= grows;
		c->shrunk++;
	}
	if (most + grows > r->mtu)
		return slow(skb, p, r->row, device, p->v6 ? 1 : 2);
	if (len - ETH + grows > 65535) /* the length exceeds its field; fragments do not */
		return slow(skb, p, r->row, device, 2);
	if (grows && p->v6 && r->flags & REROUTE_INLINE)
		err = insert(skb, r, p, flags);
	else if (grows)
		err = encapsulate(skb, r, p, flags, gso);
	if (err && gso) /* GSO trains of tunnels cannot grow; single packets can */
		return slow(skb, p, r->row, device, 2);
	if (err) {
		c->odd++;
		return TC_ACT_SHOT;
	}
	c->packets++;
	c->bytes += len - ETH;
	if (better)
		c->next++;
	return send(r);
}

/* shadowed reports whether a path only counts. All its repairs share the flag. */
static __always_inline int shadowed(__u32 id)
{
	struct reroute_repair *r = bpf_map_lookup_elem(&reroute_repairs, &id);

	return r && r->flags & REROUTE_SHADOW;
}

/* rescue handles a packet of an unusable link. */
static __noinline int rescue(struct __sk_buff *skb)
{
	__u32 slot = skb->ifindex & (REROUTE_LINKS - 1), id, row;
	struct reroute_path *path = bpf_map_lookup_elem(&reroute_paths, &slot);
	struct reroute_repair *r;
	struct packet p;
	int better;

	if (!path || path->ifindex != skb->ifindex || reroute_tagged(skb) || parse(skb, &p))
		return NEXT;
	id = path->repair;
	if (path->prefixes) {
		struct reroute_prefix key = { .bits = 32 + 128, .slot = slot };
		__u32 *own;

		__builtin_memcpy(key.addr, p.addr, sizeof(key.addr));
		own = bpf_map_lookup_elem(&reroute_lpm, &key);
		if (own)
			id = *own;
	}
	r = choose(id, &p, &row, &better);
	if (exempt(skb, &p)) {
		COUNT(r ? r->row : row, exempt);
		return NEXT;
	}
	if (!r && !better) {
		COUNT(row, none);
		return NEXT;
	}
	if (shadowed(id)) {
		COUNT(row, shadow);
		return NEXT;
	}
	if (!r) {
		COUNT(row, stuck);
		return TC_ACT_SHOT;
	}
	return go(skb, r, &p, better);
}

SEC("tc")
int reroute_egress(struct __sk_buff *skb)
{
	union reroute_link *l = reroute_link_of(skb->ifindex);

	if (likely(!l || !l->down))
		return NEXT;
	return rescue(skb);
}

/*
 * plain reports whether the kernel would only look up the packet's route. The checks follow
 * ip6_rcv_core and ip6_forward.
 */
static __always_inline int plain(struct __sk_buff *skb, const struct ipv6hdr *ip)
{
	__u32 from = bpf_ntohl(ip->saddr.in6_u.u6_addr32[0]);

	if (skb->pkt_type != 0 || reroute_tagged(skb) || skb->gso_size || ip->version != 6 ||
	    ip->hop_limit <= 1)
		return 0; /* 0: PACKET_HOST */
	if (bpf_ntohs(ip->payload_len) + sizeof(*ip) + ETH != skb->len)
		return 0; /* padded, truncated, or a jumbogram */
	if (ip->nexthdr == NEXT_HOP || ip->hop_limit == GREATEST_HOPS)
		return 0;
	/* no multicast, link-local, IPv4-mapped or unspecified source */
	return from >> 24 != 0xff && from >> 22 != 0xfe80 >> 6 && from != 0;
}

/* leave sends a packet to the repair's neighbour. Its link address is usually in the repair. */
static __always_inline int leave(struct __sk_buff *skb, const struct reroute_repair *r)
{
	__u32 *to = (void *)(long)skb->data;

	if (!(r->flags & REROUTE_MACS) || (void *)(to + 3) > (void *)(long)skb->data_end)
		return send(r);
	to[0] = r->macs[0];
	to[1] = r->macs[1];
	to[2] = r->macs[2];
	return bpf_redirect(r->ifindex, 0);
}

SEC("tc")
int reroute_ingress(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ipv6hdr *ip = data + ETH;
	struct reroute_repair *r;
	struct reroute_tally *c;
	struct packet p;
	__u32 words[4], id, row, len;
	__be32 first;
	int better;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) || (void *)(ip + 1) > end || !plain(skb, ip))
		return NEXT;
	for (int i = 0; i < 4; i++)
		words[i] = bpf_ntohl(ip->daddr.in6_u.u6_addr32[i]);
	id = TABLE_LOOKUP6(fast, words);
	if (!id || id >= REROUTE_REPAIRS)
		return NEXT;
	r = bpf_map_lookup_elem(&reroute_repairs, &id);
	if (!r || !is_down(r->slot) || weir_clock() > fast_until)
		return NEXT;
	parse6(ip, &p);
	if (of_link(&p, p.addr[0]) || skb->mark == REROUTE_MARK)
		return NEXT;
	r = choose(id, &p, &row, &better);
	if (!r || r->flags & (REROUTE_SHADOW | REROUTE_INLINE))
		return NEXT;
	len = skb->len;
	c = counts_of(r->row);
	if (!c || len - ETH + r->len6 > r->mtu)
		return NEXT; /* the kernel routes it to reroute_egress */
	first = p.first;
	if (!(first & bpf_htonl(0xfffff)))
		first = labelled(&p, (void *)(ip + 1) + 4 <= end ? *(__u32 *)(ip + 1) : 0);
	ip->hop_limit--;
	if (r->len6 && grow(skb, r, first)) {
		c->odd++;
		return TC_ACT_SHOT;
	}
	c->packets++;
	c->fast++;
	c->bytes += len - ETH;
	if (better)
		c->next++;
	return leave(skb, r);
}

char _license[] SEC("license") = "Dual BSD/GPL";
