//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * copy: SERVICE. A filter of devices' incoming packets, before routing. It sends a copy of every
 * datagram of a service to the port of another service, with the original source address. The copy
 * arrives at the same device as if received from the network. The original continues, regardless of
 * the copy.
 */
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET	     2
#define AF_INET6     10
#define LOOPBACK     1	    /* index of lo in every network namespace */
#define OFFSET_MASK  0x1fff /* of an IPv4 fragment */
#define MORE	     0x2000 /* more fragments follow */
#define COPY_MAX     1024
#define COPY_DEVICES 16384

#ifndef barrier_var
#define barrier_var(var) asm volatile("" : "+r"(var))
#endif

/* copy_key is a listen of a service. */
struct copy_key {
	__u32 prefixlen; /* in bits, counted from family: 32 + the address's */
	__u8 family;	 /* AF_INET or AF_INET6 */
	__u8 pad;
	__u16 port;    /* host byte order */
	__u8 addr[16]; /* IPv4: the first four bytes */
};

/* copy_to is the target of the copies. */
struct copy_to {
	__u8 addr[16];	   /* network byte order */
	__u16 port;	   /* network byte order */
	__u16 readdressed; /* 0: the copy keeps the destination address */
	__u32 pad;
	__u64 copied;	  /* datagrams */
	__u64 fragmented; /* datagrams in fragments: not copied */
	__u64 failed;	  /* the kernel had no memory */
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, COPY_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct copy_key);
	__type(value, struct copy_to);
} copy_targets SEC(".maps");

/* copy_device is a device with the filter. */
struct copy_device {
	__u32 header; /* length of its link header, bytes */
	__u32 qdisc;  /* 1: the filter's qdisc was created with it */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, COPY_DEVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* ifindex */
	__type(value, struct copy_device);
} copy_devices SEC(".maps");

/* datagram holds the source, the destination and the UDP offset of a packet. */
struct datagram {
	struct copy_key to;
	__u8 src[16];
	__u32 at; /* offset of UDP from the network header, bytes */
	__u32 fragment;
};

static __always_inline long load(struct __sk_buff *skb, __u32 at, void *to, __u32 len)
{
	return bpf_skb_load_bytes_relative(skb, at, to, len, BPF_HDR_START_NET);
}

/* read_ip reads the addresses of a UDP datagram. It returns 0 for UDP and -1 otherwise. */
static __always_inline int read_ip(struct __sk_buff *skb, struct datagram *d)
{
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr h;

		/* Only the first fragment has ports. */
		if (load(skb, 0, &h, sizeof(h)) || h.protocol != IPPROTO_UDP ||
		    h.frag_off & bpf_htons(OFFSET_MASK))
			return -1;
		d->fragment = h.frag_off & bpf_htons(MORE);
		d->at = (h.ihl & 15) * 4;
		d->to.family = AF_INET;
		__builtin_memcpy(d->src, &h.saddr, 4);
		__builtin_memcpy(d->to.addr, &h.daddr, 4);
		return 0;
	}
	if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr h;

		if (load(skb, 0, &h, sizeof(h)) || h.nexthdr != IPPROTO_UDP)
			return -1;
		d->at = sizeof(h);
		d->to.family = AF_INET6;
		__builtin_memcpy(d->src, &h.saddr, 16);
		__builtin_memcpy(d->to.addr, &h.daddr, 16);
		return 0;
	}
	return -1;
}

/*
 * forwarded reports whether the packet is destined to another host, because the port alone does not
 * tell. Without forwarding, a host delivers or drops. With forwarding, the lookup finds a next hop.
 */
static __always_inline int forwarded(struct __sk_buff *skb, struct datagram *d)
{
	struct bpf_fib_lookup fib = { .family = d->to.family,
				      .l4_protocol = IPPROTO_UDP,
				      .ifindex = skb->ifindex };
	long ret;

	if (skb->ifindex == LOOPBACK)
		return 0;
	if (d->to.family == AF_INET) {
		__builtin_memcpy(&fib.ipv4_src, d->src, 4);
		__builtin_memcpy(&fib.ipv4_dst, d->to.addr, 4);
	} else {
		__builtin_memcpy(fib.ipv6_src, d->src, 16);
		__builtin_memcpy(fib.ipv6_dst, d->to.addr, 16);
	}
	ret = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	return ret != BPF_FIB_LKUP_RET_NOT_FWDED && ret != BPF_FIB_LKUP_RET_FWD_DISABLED;
}

/* readdress replaces the destination address and updates the checksums over it. */
static __always_inline void readdress(struct __sk_buff *skb, __u32 ip, struct datagram *d,
				      const __u8 *from, const __u8 *to)
{
	__u32 sum = ip + d->at + offsetof(struct udphdr, check);
	__u32 words = d->to.family == AF_INET ? 1 : 4, i;

	for (i = 0; i < 4; i++) {
		__u32 was, now;

		if (i >= words)
			break;
		__builtin_memcpy(&was, from + 4 * i, 4);
		__builtin_memcpy(&now, to + 4 * i, 4);
		bpf_l4_csum_replace(skb, sum, was, now,
				    4 | BPF_F_PSEUDO_HDR | BPF_F_MARK_MANGLED_0);
		if (d->to.family == AF_INET)
			bpf_l3_csum_replace(skb, ip + offsetof(struct iphdr, check), was, now, 4);
	}
	if (d->to.family == AF_INET)
		bpf_skb_store_bytes(skb, ip + offsetof(struct iphdr, daddr), to, 4, 0);
	else
		bpf_skb_store_bytes(skb, ip + offsetof(struct ipv6hdr, daddr), to, 16, 0);
}

static __always_inline void change_port(struct __sk_buff *skb, __u32 udp, __u16 from, __u16 to)
{
	bpf_l4_csum_replace(skb, udp + offsetof(struct udphdr, check), from, to,
			    2 | BPF_F_MARK_MANGLED_0);
	bpf_skb_store_bytes(skb, udp + offsetof(struct udphdr, dest), &to, 2, 0);
}

SEC("tc")
int copy_ingress(struct __sk_buff *skb)
{
	struct datagram d = { .to.prefixlen = 32 + 128 };
	struct copy_device *device;
	__u32 index = skb->ifindex, ip;
	struct copy_to *to, what;
	__u16 port;
	long err;

	/* The packets of a VLAN arrive again at the VLAN's device. */
	if (skb->pkt_type != PACKET_HOST || skb->vlan_present || read_ip(skb, &d) ||
	    load(skb, d.at + offsetof(struct udphdr, dest), &port, sizeof(port)))
		return TC_ACT_UNSPEC;
	d.to.port = bpf_ntohs(port);
	to = bpf_map_lookup_elem(&copy_targets, &d.to);
	if (!to)
		return TC_ACT_UNSPEC;
	device = bpf_map_lookup_elem(&copy_devices, &index);
	if (!device || forwarded(skb, &d))
		return TC_ACT_UNSPEC;
	if (d.fragment) {
		/* Copied fragments could be reassembled with fragments of the original. */
		__sync_fetch_and_add(&to->fragmented, 1);
		return TC_ACT_UNSPEC;
	}
	ip = device->header;
	what = *to;
	if (what.readdressed)
		readdress(skb, ip, &d, d.to.addr, what.addr);
	change_port(skb, ip + d.at, port, what.port);
	/*
	 * Packets on loopback carry their route. Received without one, a packet from a local
	 * address would be rejected. Therefore the copy on loopback is sent, not received.
	 */
	err = bpf_clone_redirect(skb, index, index == LOOPBACK ? 0 : BPF_F_INGRESS);
	change_port(skb, ip + d.at, what.port, port);
	if (what.readdressed)
		readdress(skb, ip, &d, what.addr, d.to.addr);
	if (err)
		__sync_fetch_and_add(&to->failed, 1);
	else
		__sync_fetch_and_add(&to->copied, 1);
	return TC_ACT_UNSPEC;
}

char _license[] SEC("license") = "Dual BSD/GPL";
