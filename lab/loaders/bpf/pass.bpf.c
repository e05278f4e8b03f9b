//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/* Programs passing every packet, for foreign loaders. */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_helpers.h>

SEC("xdp")
int foreign_xdp(struct xdp_md *ctx)
{
	return XDP_PASS;
}

SEC("tc")
int foreign_tc(struct __sk_buff *skb)
{
	return TC_ACT_UNSPEC;
}

SEC("sk_lookup")
int foreign_lookup(struct bpf_sk_lookup *ctx)
{
	return SK_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
