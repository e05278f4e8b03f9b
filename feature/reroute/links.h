/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What the data path knows of the links that it protects: a word for each, which is zero while the
 * link may be used. Whoever judges a link sets a byte of its own, so that no two writers share one
 * and none needs an atomic; the data path reads the word. A zeroed map says that every link is up.
 *
 * Links are found by the index of their device, modulo REROUTE_LINKS: two protected devices of a
 * network namespace with the same remainder are refused when they are configured (links.Slot).
 */
#ifndef WEIR_REROUTE_LINKS_H
#define WEIR_REROUTE_LINKS_H

#include <stdbool.h>

#define REROUTE_LINKS 4096

/* The mark of packets that find out about a link, and so stay on it whatever it is used for. */
#define REROUTE_MARK 0x77656972

union reroute_link {
	struct {
		__u8 probe;   /* liveness: probes are not answered, or no longer come */
		__u8 carrier; /* the device has no carrier, or is administratively down */
		__u8 drain;   /* an operator takes the link out of use */
		__u8 spare;
	};
	__u32 down; /* any of them */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, REROUTE_LINKS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, union reroute_link);
} reroute_links SEC(".maps");

static __always_inline union reroute_link *reroute_link_of(__u32 ifindex)
{
	__u32 slot = ifindex & (REROUTE_LINKS - 1);

	return bpf_map_lookup_elem(&reroute_links, &slot);
}

/*
 * reroute_tagged says that a packet is a VLAN device's above this one: the kernel takes the tag off before programs see what
 * comes in (__netif_receive_skb_core), and puts it on behind those that see what goes out (validate_xmit_vlan), so that it
 * looks like this device's own. VLAN 0 is none: a tag that says a priority alone (IEEE 802.1Q, 6.9).
 */
static __always_inline bool reroute_tagged(const struct __sk_buff *skb)
{
	return skb->vlan_present && skb->vlan_tci & 0xfff;
}

#endif
