//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Lookups in a list of prefixes. The compiler of filters takes the functions out of the object and
 * appends them to its own code, once for each list, with the maps of that list. The program itself
 * is not used.
 */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "table.h"

TABLE_MAPS(list)

/* Global functions are verified once, for any number of callers. Addresses are in host byte order. */
__attribute__((noinline)) __u32 list_four(__u32 ip)
{
	return TABLE_LOOKUP4(list, ip);
}

__attribute__((noinline)) __u32 list_six(__u64 high, __u64 low)
{
	__u32 words[4] = { high >> 32, high, low >> 32, low };

	return TABLE_LOOKUP6(list, words);
}

SEC("socket")
int list_entry(struct __sk_buff *skb)
{
	return list_four(skb->hash) + list_six(skb->hash, skb->len);
}

char _license[] SEC("license") = "Dual BSD/GPL";
