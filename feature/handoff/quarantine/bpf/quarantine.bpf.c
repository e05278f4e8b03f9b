//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The quarantine of a backend behind a load balancer, at tcx of its devices. From the dump of a
 * session on it blocks the session's packets, and it blocks RSTs for a socket being restored. It
 * works while the backend's agent is dead, as package move requires.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <stddef.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "quarantine.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct quarantine_key);
	__type(value, struct quarantine_entry);
} quarantine_sessions SEC(".maps");

/*
 * Address pairs of recent sessions. Packets between them are dropped if their transport header is
 * unreadable. The agent fills the map, and the kernel evicts the least recently used pairs.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct quarantine_pair);
	__type(value, __u8);
} quarantine_pairs SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, QUARANTINE_COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} quarantine_counts SEC(".maps");

/*
 * Departed sessions with packets still arriving here. The agent reports their location to the load
 * balancer.
 */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 16);
} quarantine_strays SEC(".maps");

/* Interface index of the agent's buffer device; 0: none. */
const volatile __u32 quarantine_buffer;

/*
 * Packets that were under way when the load balancer began to buffer go back to it, within this
 * time and number. If the load balancer sends them here again, its buffer time is over, and sending
 * them back would loop.
 */
#define RETURN_NS  (250 * 1000 * 1000ULL)
#define MOST_TURNS 4096

/* Minimum interval of events about a session. */
#define STRAY_NS (50 * 1000 * 1000ULL)

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_ACK 0x10

static __always_inline void count(__u32 what)
{
	__u64 *n = bpf_map_lookup_elem(&quarantine_counts, &what);

	if (n)
		*n += 1;
}

static __always_inline void mapped(__u8 *to, __u32 v4)
{
	__u32 *w = (__u32 *)to;

	w[0] = 0;
	w[1] = 0;
	w[2] = bpf_htonl(0xffff);
	w[3] = v4;
}

#define MOST_EXTENSIONS 8

static __always_inline int is_extension(__u8 next)
{
	return next == IPPROTO_HOPOPTS || next == IPPROTO_ROUTING || next == IPPROTO_FRAGMENT ||
	       next == IPPROTO_AH || next == IPPROTO_DSTOPTS;
}

/*
 * walk skips the extension headers that the kernel processes before TCP, and advances *at to the
 * TCP header. A later fragment is not TCP: it goes nowhere without the first one. to becomes the
 * last segment of a routing header. It returns the same values as read.
 */
static __always_inline int walk(struct __sk_buff *skb, __u32 *at, __u32 end, __u8 next, __u8 *to)
{
	struct {
		__u8 next;
		__u8 len;
		union {
			__be16 fragment; /* offset and flags */
			__u8 routing[2]; /* type and segments left */
		};
	} h;

#pragma unroll
	for (int i = 0; i < MOST_EXTENSIONS; i++) {
		if (!is_extension(next))
			break;
		if (*at + 8 > end || bpf_skb_load_bytes(skb, *at, &h, sizeof(h)))
			return 1;
		if (next == IPPROTO_FRAGMENT) {
			if (h.fragment & bpf_htons(0xfff8))
				return -1;
			*at += 8;
		} else if (next == IPPROTO_AH) {
			*at += (h.len + 2) * 4;
		} else {
			if (next == IPPROTO_ROUTING && h.routing[1] &&
			    (*at + 24 > end || bpf_skb_load_bytes(skb, *at + 8, to, 16)))
				return 1;
			*at += (h.len + 1) * 8;
		}
		next = h.next;
	}
	if (is_extension(next))
		return 1;
	return next == IPPROTO_TCP ? 0 : -1;
}

/*
 * read parses a TCP packet's session. It returns 0 on success, and a negative value if the packet
 * has no session. It returns a positive value if only the addresses are readable. The kernel may
 * then still find TCP, for example after reassembly.
 */
static __always_inline int read(struct __sk_buff *skb, struct quarantine_key *k, __u8 *flags,
				int out)
{
	struct ipv6hdr v6;
	struct iphdr v4;
	__u8 *from = out ? k->service : k->client, *to = out ? k->client : k->service;
	__be16 ports[2];
	__u32 at = ETH_HLEN, end;
	int r;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes(skb, at, &v4, sizeof(v4)) || v4.protocol != IPPROTO_TCP ||
		    v4.ihl < 5 || v4.frag_off & bpf_htons(0x1fff))
			return -1;
		mapped(from, v4.saddr);
		mapped(to, v4.daddr);
		end = at + bpf_ntohs(v4.tot_len);
		at += v4.ihl * 4;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (bpf_skb_load_bytes(skb, at, &v6, sizeof(v6)))
			return -1;
		__builtin_memcpy(from, &v6.saddr, 16);
		__builtin_memcpy(to, &v6.daddr, 16);
		at += sizeof(v6);
		end = v6.payload_len ? at + bpf_ntohs(v6.payload_len) : skb->len; /* 0: jumbo */
		r = walk(skb, &at, end, v6.nexthdr, to);
		if (r)
			return r;
	} else {
		return -1;
	}
	if (at + sizeof(ports) > end || bpf_skb_load_bytes(skb, at, ports, sizeof(ports)))
		return 1;
	/* A first fragment may end before the flags. */
	if (at + 14 > end || bpf_skb_load_bytes(skb, at + 13, flags, 1))
		*flags = 0;
	k->client_port = ports[out];
	k->service_port = ports[!out];
	return 0;
}

/* doubtful drops a packet that may belong to a session in quarantine. */
static __always_inline int doubtful(struct quarantine_key *k)
{
	if (!bpf_map_lookup_elem(&quarantine_pairs, k))
		return TC_ACT_UNSPEC;
	count(QUARANTINE_DEAF);
	return TC_ACT_SHOT;
}

/*
 * turn sends a packet back to its sender on this segment: the load balancer, or the tunnel's other
 * end.
 */
static __always_inline int turn(struct __sk_buff *skb, __u32 ifindex)
{
	__u8 macs[12], turned[12];

	if (bpf_skb_load_bytes(skb, 0, macs, sizeof(macs)))
		return TC_ACT_SHOT;
	__builtin_memcpy(turned, macs + 6, 6);
	__builtin_memcpy(turned + 6, macs, 6);
	if (bpf_skb_store_bytes(skb, 0, turned, sizeof(turned), 0))
		return TC_ACT_SHOT;
	count(QUARANTINE_RETURNED);
	return bpf_redirect(ifindex, 0);
}

/*
 * stray drops a packet of a departed session. The kernel would answer with an RST, and a load
 * balancer that has forgotten the session would forward it. A SYN is not a stray: it starts a new
 * connection.
 */
static __always_inline int stray(struct quarantine_entry *e, struct quarantine_key *k, __u8 flags)
{
	__u64 now = bpf_ktime_get_ns();

	if ((flags & (TCP_SYN | TCP_ACK)) == TCP_SYN) {
		bpf_map_delete_elem(&quarantine_sessions, k);
		return TC_ACT_UNSPEC;
	}
	count(QUARANTINE_STRAYS);
	if (now - e->since > STRAY_NS) {
		e->since = now;
		bpf_ringbuf_output(&quarantine_strays, k, sizeof(*k), 0);
	}
	return TC_ACT_SHOT;
}

/* quarantine_in is at the ingress of every device. */
SEC("tc")
int quarantine_in(struct __sk_buff *skb)
{
	struct quarantine_entry *e;
	struct quarantine_key k = {};
	__u8 flags;
	int r = read(skb, &k, &flags, 0);

	if (r)
		return r > 0 ? doubtful(&k) : TC_ACT_UNSPEC;
	e = bpf_map_lookup_elem(&quarantine_sessions, &k);
	if (!e || e->what == QUARANTINE_QUIET || e->what == QUARANTINE_PASS)
		return TC_ACT_UNSPEC;
	if (e->what == QUARANTINE_BUFFER && quarantine_buffer) {
		e->ifindex = skb->ifindex;
		count(QUARANTINE_BUFFERED);
		return bpf_redirect(quarantine_buffer, 0);
	}
	if (e->what == QUARANTINE_LEFT)
		return stray(e, &k, flags);
	if (e->returned >= MOST_TURNS || bpf_ktime_get_ns() - e->since > RETURN_NS) {
		count(QUARANTINE_DEAF);
		return TC_ACT_SHOT;
	}
	e->returned++;
	return turn(skb, skb->ifindex);
}

/* quarantine_again is at the ingress of the buffer device, for packets released by the agent. */
SEC("tc")
int quarantine_again(struct __sk_buff *skb)
{
	struct quarantine_entry *e;
	struct quarantine_key k = {};
	__u8 flags;

	if (read(skb, &k, &flags, 0))
		return TC_ACT_SHOT;
	e = bpf_map_lookup_elem(&quarantine_sessions, &k);
	if (!e || !e->ifindex)
		return TC_ACT_SHOT;
	return e->what == QUARANTINE_PASS ? bpf_redirect(e->ifindex, BPF_F_INGRESS) :
					    turn(skb, e->ifindex);
}

/* quarantine_out is at the egress of every device. */
SEC("tc")
int quarantine_out(struct __sk_buff *skb)
{
	struct quarantine_entry *e;
	struct quarantine_key k = {};
	__u8 flags;

	if (read(skb, &k, &flags, 1))
		return TC_ACT_UNSPEC;
	e = bpf_map_lookup_elem(&quarantine_sessions, &k);
	if (!e)
		return TC_ACT_UNSPEC;
	if (e->what == QUARANTINE_PASS)
		return TC_ACT_UNSPEC;
	if (e->what != QUARANTINE_QUIET || flags & (TCP_RST | TCP_FIN)) {
		count(QUARANTINE_MUTE);
		return TC_ACT_SHOT;
	}
	count(QUARANTINE_SPOKE);
	bpf_map_delete_elem(&quarantine_sessions, &k);
	return TC_ACT_UNSPEC;
}

const struct quarantine_key *quarantine_key_type __attribute__((unused)); /* for bpf2go */
const struct quarantine_pair *quarantine_pair_type __attribute__((unused));

char _license[] SEC("license") = "Dual BSD/GPL";
