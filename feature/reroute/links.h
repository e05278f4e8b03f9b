/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The link states of the protected links: one word per link, zero while the link may be used. Each
 * writer has its own byte, so no byte has two writers and no store needs an atomic. The data path
 * reads the whole word. A zeroed map means all links are up.
 *
 * Links are found by the index of their device, modulo REROUTE_LINKS. The configuration rejects two
 * protected devices of a network namespace with the same remainder (links.Slot).
 */
#ifndef WEIR_REROUTE_LINKS_H
#define WEIR_REROUTE_LINKS_H

#include <stdbool.h>

#define REROUTE_LINKS 4096

/* The mark of packets of link detection. They stay on the link even when it is down. */
#define REROUTE_MARK 0x77656972

union reroute_link {
	struct {
		__u8 probe;   /* liveness: probes are not answered, or no longer arrive */
		__u8 carrier; /* the device has no carrier, or is set down */
		__u8 drain;   /* an operator has drained the link */
		__u8 spare;
	};
	__u32 down; /* all bytes: nonzero if any is set */
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
 * reroute_tagged reports whether a packet belongs to a VLAN device above this one. The kernel
 * removes the tag before ingress programs run (__netif_receive_skb_core) and adds it after egress
 * programs (validate_xmit_vlan), so the packet looks like this device's own. VLAN 0 is a tag with a
 * priority only (IEEE 802.1Q section 6.9).
 */
static __always_inline bool reroute_tagged(const struct __sk_buff *skb)
{
	return skb->vlan_present && skb->vlan_tci & 0xfff;
}

#endif
