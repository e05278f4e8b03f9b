//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The capture of flow exporters for weir serve, off the data path: a filter of packet sockets,
 * which receive copies. It wakes user space only for messages with templates. It records the header
 * of every session's latest message, because a replay must continue it.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "clock.h"
#include "templates.h"

#define IPFIX	  10
#define NETFLOW9  9
#define FRAGMENT  0x3fff /* more fragments, or an offset */
#define FLOW_MASK 0xfffff
#define WHOLE	  0xffff /* pass the whole packet to user space */

#ifndef barrier_var
#define barrier_var(var) asm volatile("" : "+r"(var))
#endif

/* Ports of steered services. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u16);
	__type(value, struct port);
} templates_ports SEC(".maps");

/* By source address: IPv4 as v4-mapped, IPv6 only the first 64 bits. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, TEMPLATES_SOURCES);
	__type(key, __u8[16]);
	__type(value, struct budget);
} templates_sources SEC(".maps");

/* Budgets over all sources: 0 unknown sessions, 1 known sessions. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, struct budget);
} templates_budgets SEC(".maps");

/* User space adds sessions. The filter only updates existing ones. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TEMPLATES_SESSIONS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct session);
	__type(value, struct heard);
} templates_sessions SEC(".maps");

/* Maps used by user space only, declared here to generate their layout in Go. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TEMPLATES_SESSIONS * 4);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct chunk_key);
	__type(value, struct chunk);
} templates_store SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, char[64]);
	__type(value, struct counts);
} templates_counts SEC(".maps");

/*
 * datagram is the beginning of every message: the headers of both protocols as far as needed. A
 * shorter message has no set, because NetFlow v9's header is as long as IPFIX's with a set header.
 */
struct datagram {
	struct udphdr udp;
	union {
		__be16 version;
		struct {
			__be16 version, length;
			__be32 export_time, sequence, domain, set;
		} ipfix;
		struct {
			__be16 version, count;
			__be32 uptime, seconds, sequence, source;
		} netflow9;
	};
};

struct set_header {
	__be16 id, length;
};

/* message is the position in a message and the content of its header. */
struct message {
	__u32 at, end;	 /* from the network header, bytes */
	__u32 templates; /* id of template sets; options template sets have the next id */
	__u32 sequence, export_time, uptime;
};

/* The socket receives packets without their link header. load reads from the network header. */
static __always_inline long load(struct __sk_buff *skb, __u32 at, void *to, __u32 len)
{
	return bpf_skb_load_bytes_relative(skb, at, to, len, BPF_HDR_START_NET);
}

/* read_ip returns the offset of UDP, or 0 if the packet is not relevant. */
static __always_inline __u32 read_ip(struct __sk_buff *skb, struct session *s)
{
	__u16 protocol = bpf_ntohs((__u16)skb->protocol);
	struct ipv6hdr h6;
	struct iphdr h4;

	if (protocol == ETH_P_IP) {
		if (load(skb, 0, &h4, sizeof(h4)) || h4.protocol != IPPROTO_UDP)
			return 0;
		/* Only the first fragment has ports, and no fragment is complete. */
		if (h4.frag_off & bpf_htons(FRAGMENT))
			return 0;
		if (h4.ttl == TEMPLATES_REPLAY_TTL && h4.id == bpf_htons(TEMPLATES_REPLAY_ID))
			return 0;
		s->src[10] = s->src[11] = s->dst[10] = s->dst[11] = 0xff;
		__builtin_memcpy(s->src + 12, &h4.saddr, 4);
		__builtin_memcpy(s->dst + 12, &h4.daddr, 4);
		return (h4.ihl & 15) * 4;
	}
	if (protocol == ETH_P_IPV6) {
		if (load(skb, 0, &h6, sizeof(h6)) || h6.nexthdr != IPPROTO_UDP)
			return 0;
		if (h6.hop_limit == TEMPLATES_REPLAY_TTL &&
		    (bpf_ntohl(*(__be32 *)&h6) & FLOW_MASK) == TEMPLATES_REPLAY_LABEL)
			return 0;
		__builtin_memcpy(s->src, &h6.saddr, 16);
		__builtin_memcpy(s->dst, &h6.daddr, 16);
		return sizeof(h6);
	}
	return 0;
}

/* read_header reads the header of IPFIX or NetFlow v9. It returns -1 for other packets. */
static __always_inline int read_header(struct datagram *d, struct session *s, struct message *m)
{
	__u32 at = m->at + sizeof(d->udp);

	s->version = bpf_ntohs(d->version);
	m->end = m->at + bpf_ntohs(d->udp.len);
	if (s->version == IPFIX) {
		__u32 end = at + bpf_ntohs(d->ipfix.length);

		s->domain = bpf_ntohl(d->ipfix.domain);
		m->sequence = bpf_ntohl(d->ipfix.sequence);
		m->export_time = bpf_ntohl(d->ipfix.export_time);
		if (end < m->end)
			m->end = end;
		m->at = at + 16;
		m->templates = 2;
		return 0;
	}
	if (s->version != NETFLOW9)
		return -1;
	s->domain = bpf_ntohl(d->netflow9.source);
	m->sequence = bpf_ntohl(d->netflow9.sequence);
	m->export_time = bpf_ntohl(d->netflow9.seconds);
	m->uptime = bpf_ntohl(d->netflow9.uptime);
	m->at = at + 20;
	m->templates = 0;
	return 0;
}

/*
 * read_sets records the sets and reports whether one contains templates. It is written for the
 * verifier, which follows every iteration: only the end of the message branches, and each set's
 * position is known.
 */
static __always_inline __u32 read_sets(struct __sk_buff *skb, struct message *m,
				       struct heard *heard)
{
	__u32 wanted = 0, i;

	for (i = 0; i < TEMPLATES_SETS; i++) {
		struct set_header h;
		__u32 id, length, other;

		if (m->at + sizeof(h) > m->end || load(skb, m->at, &h, sizeof(h)))
			break;
		id = bpf_ntohs(h.id);
		length = bpf_ntohs(h.length);
		if (length < sizeof(h))
			break; /* malformed; user space parses the sets so far */
		if (heard && i < TEMPLATES_NOTED) {
			heard->set[i].id = id;
			heard->set[i].length = length;
		}
		/* The two template set ids differ only in the lowest bit. */
		other = (id & ~1) ^ m->templates;
		barrier_var(other);
		wanted |= ((other | -other) >> 31) ^ 1;
		m->at += length;
	}
	if (heard)
		heard->sets = i;
	return wanted;
}

/*
 * spend takes a message from a budget. It returns -1 if the budget is exhausted. Concurrent CPUs
 * may count two messages as one, so the limit is not exact.
 */
static __always_inline int spend(struct budget *b, __u64 now, __u64 gap, __u64 burst)
{
	__u64 span = gap * burst, next = b->next, least = now > span ? now - span : 0;

	if (next < least)
		next = least;
	if (next > now)
		return -1;
	b->next = next + gap;
	return 0;
}

/* affordable reports whether user space may be woken for a message with templates. */
static __always_inline int affordable(const struct session *s, __u32 known)
{
	struct budget *b, fresh = {};
	__u64 now = weir_clock();
	__u64 src[2];

	__builtin_memcpy(src, s->src, sizeof(src));
	if (src[0]) /* not v4-mapped */
		src[1] = 0;
	b = bpf_map_lookup_elem(&templates_sources, src);
	if (!b) {
		bpf_map_update_elem(&templates_sources, src, &fresh, BPF_ANY);
		b = bpf_map_lookup_elem(&templates_sources, src);
	}
	if (b && spend(b, now, TEMPLATES_SOURCE_GAP, TEMPLATES_SOURCE_BURST))
		return 0;
	b = bpf_map_lookup_elem(&templates_budgets, &known);
	if (!b)
		return 0;
	if (known)
		return !spend(b, now, TEMPLATES_KNOWN_GAP, TEMPLATES_KNOWN_BURST);
	return !spend(b, now, TEMPLATES_NEW_GAP, TEMPLATES_NEW_BURST);
}

SEC("socket")
int templates_filter(struct __sk_buff *skb)
{
	struct session s = {};
	struct message m = {};
	struct heard *heard;
	struct datagram d;
	struct port *at;
	__u16 port;

	if (skb->pkt_type == PACKET_OTHERHOST)
		return 0;
	m.at = read_ip(skb, &s);
	if (!m.at || load(skb, m.at, &d, sizeof(d)))
		return 0;
	port = bpf_ntohs(d.udp.dest);
	at = bpf_map_lookup_elem(&templates_ports, &port);
	if (!at)
		return 0;
	s.sport = bpf_ntohs(d.udp.source);
	s.dport = port;
	if (read_header(&d, &s, &m))
		return 0;
	heard = bpf_map_lookup_elem(&templates_sessions, &s);
	if (heard) {
		/*
		 * An exporter's packets mostly arrive on one CPU. A torn header costs one log line.
		 */
		heard->sequence = m.sequence;
		heard->export_time = m.export_time;
		heard->uptime = m.uptime;
		heard->ifindex = skb->ifindex;
		heard->last = weir_clock();
		heard->messages++;
	}
	if (!read_sets(skb, &m, heard))
		return 0;
	if (!affordable(&s, !!heard)) {
		__sync_fetch_and_add(&at->refused, 1);
		return 0;
	}
	return WHOLE;
}

char _license[] SEC("license") = "Dual BSD/GPL";
