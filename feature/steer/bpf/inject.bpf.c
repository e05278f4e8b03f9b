//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Puts a packet into an interface's receive path, as if it had come over the wire. Nothing attaches
 * this: BPF_PROG_TEST_RUN hands it the packet, and the interface's index in cb[0].
 */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

SEC("tc")
int inject(struct __sk_buff *skb)
{
	return bpf_clone_redirect(skb, skb->cb[0], BPF_F_INGRESS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
