//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Lookups for the tests of package table: a packet contains an address, and the program returns its
 * value. */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "bindings.h"
#include "table.h"

TABLE_MAPS(probe)
BINDINGS_MAPS(bound)

/* request is the packet. XDP requires at least the size of an Ethernet frame. */
struct request {
	__u32 ipv6;
	__u32 words[4]; /* host byte order; an IPv4 address is the first */
	__u32 proto;
	__u32 port;
};

volatile __u32 probe_value;

SEC("xdp")
int probe_lookup(struct xdp_md *ctx)
{
	struct request *r = (void *)(long)ctx->data;
	__u32 words[4];

	if ((void *)(r + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	__builtin_memcpy(words, r->words, sizeof(words));
	if (r->ipv6)
		probe_value = TABLE_LOOKUP6(probe, words);
	else
		probe_value = TABLE_LOOKUP4(probe, words[0]);
	return XDP_PASS;
}

volatile __u64 probe_bound;

SEC("xdp")
int probe_bindings(struct xdp_md *ctx)
{
	struct request *r = (void *)(long)ctx->data;
	__u32 words[4];

	if ((void *)(r + 1) > (void *)(long)ctx->data_end)
		return XDP_ABORTED;
	__builtin_memcpy(words, r->words, sizeof(words));
	if (r->ipv6)
		probe_bound = BINDINGS_LOOKUP6(bound, words, r->proto, r->port);
	else
		probe_bound = BINDINGS_LOOKUP4(bound, words[0], r->proto, r->port);
	return XDP_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
