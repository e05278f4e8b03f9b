//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Injects a packet into an interface's receive path, as if received from the wire. The program is
 * never attached: BPF_PROG_TEST_RUN passes the packet, and the interface's index in cb[0].
 */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

SEC("tc")
int inject(struct __sk_buff *skb)
{
	return bpf_clone_redirect(skb, skb->cb[0], BPF_F_INGRESS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
