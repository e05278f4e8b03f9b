//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Source of measured packets. BPF_PROG_TEST_RUN creates frames (BPF_F_TEST_XDP_LIVE_FRAMES).
 * This program sets the source address of each. The kernel then handles them as received by the
 * device.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/ip.h>

#include <bpf/bpf_helpers.h>

#define ADDRESSES (1 << 20)

/* In network byte order. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ADDRESSES / 2);
	__type(key, __u32);
	__type(value, __u64);
} addresses SEC(".maps");

volatile __u32 next;

SEC("xdp")
int source(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct iphdr *ip = data + sizeof(struct ethhdr);
	__u32 i = next, at = i >> 1 & (ADDRESSES / 2 - 1), sum = 0;
	__u64 *pair = bpf_map_lookup_elem(&addresses, &at);
	__u16 *word = (__u16 *)ip;

	if (!pair || (void *)(ip + 1) > end)
		return XDP_ABORTED;
	next = i + 1;
	ip->saddr = i & 1 ? *pair >> 32 : *pair;
	ip->check = 0;
#pragma unroll
	for (int n = 0; n < 10; n++)
		sum += word[n];
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	ip->check = ~sum;
	return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
