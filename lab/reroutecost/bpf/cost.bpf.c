//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Both ends of measured traffic. The source: BPF_PROG_TEST_RUN creates frames
 * (BPF_F_TEST_XDP_LIVE_FRAMES) and reuses their memory, so each frame is written again. The sink
 * counts the packets of a device and drops them. The judge detects gaps in a numbered stream.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <stddef.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define FRAME 64 /* bytes: Ethernet, IPv6, UDP and two of payload */

volatile __u8 frame[FRAME];

SEC("xdp")
int source(struct xdp_md *ctx)
{
	__u8 *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;

	if (data + FRAME > end)
		return XDP_ABORTED;
#pragma unroll
	for (int i = 0; i < FRAME; i += 8)
		*(__u64 *)(data + i) = *(volatile __u64 *)(frame + i);
	return XDP_PASS;
}

/* Makes a veth device receive frames like a driver with XDP. */
SEC("xdp")
int pass(struct xdp_md *ctx)
{
	return XDP_PASS;
}

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} sunk SEC(".maps");

SEC("tc")
int sink(struct __sk_buff *skb)
{
	__u32 zero = 0;
	__u64 *n;

	if (skb->protocol != bpf_htons(ETH_P_IPV6))
		return TC_ACT_UNSPEC;
	n = bpf_map_lookup_elem(&sunk, &zero);
	if (n)
		*n += 1;
	return TC_ACT_SHOT;
}

#define STREAM_PORT 4739
#define STREAM_MAX  (1 << 22)

/* A bit for each received number of a stream. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u8[STREAM_MAX]);
} seen SEC(".maps");

struct sequence {
	__u64 came;
	__u64 twice;
	__u64 behind; /* after a later one */
	__u64 beyond; /* a number never sent */
	__u64 highest;
};

struct sequence stream;

const struct sequence *sequence_type __attribute__((unused)); /* for bpf2go */

/* The packets of a host arrive on one CPU at a time: the sender is bound to one. */
SEC("tc")
int judge(struct __sk_buff *skb)
{
	struct {
		__be16 from, to, length, check;
		__be32 number;
	} udp;
	struct ipv6hdr ip;
	__u32 zero = 0, n;
	__u8 *all;

	if (skb->protocol != bpf_htons(ETH_P_IPV6) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.nexthdr != 17 ||
	    bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(ip), &udp, sizeof(udp)) ||
	    udp.to != bpf_htons(STREAM_PORT))
		return TC_ACT_UNSPEC;
	all = bpf_map_lookup_elem(&seen, &zero);
	n = bpf_ntohl(udp.number);
	if (!all)
		return TC_ACT_SHOT;
	stream.came++;
	if (n >= STREAM_MAX) {
		stream.beyond++;
		return TC_ACT_SHOT;
	}
	if (all[n])
		stream.twice++;
	all[n] = 1;
	if (n < stream.highest)
		stream.behind++;
	else
		stream.highest = n;
	return TC_ACT_SHOT;
}

char _license[] SEC("license") = "Dual BSD/GPL";
