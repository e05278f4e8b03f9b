/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What user space and the programs of protection share. Byte order is the host's but in headers. */
#ifndef WEIR_PROTECT_H
#define WEIR_PROTECT_H

#define REROUTE_REPAIRS 4096
#define REROUTE_PATHS	1024 /* rows of counters; 0 is of packets that no repair is for */
#define REROUTE_HEADER	192  /* bytes: an IPv6 header and a routing header of nine segments */
#define REROUTE_CHOICES 4    /* repairs of a path, best first */

/* Flags of a repair. */
#define REROUTE_SHADOW 1  /* count what would be rerouted, and leave it alone */
#define REROUTE_INLINE 2  /* IPv6 packets get the routing header into their own header */
#define REROUTE_FOR4   4  /* it is for IPv4 packets */
#define REROUTE_FOR6   8  /* it is for IPv6 packets */
#define REROUTE_VIA4   16 /* via is an IPv4 address, in its first four bytes */
#define REROUTE_MACS   32 /* macs are known */

/*
 * reroute_repair is a way around a link. header6 and header4 are what goes before an IPv6 and an
 * IPv4 packet, ready but for traffic class, flow label and length. Inserted inline, header6 is the
 * packet's own IPv6 header with the first segment as its destination, and the routing header.
 */
struct reroute_repair {
	__u32 ifindex; /* of the backup; 0: there is none */
	__u32 slot;    /* of the protected link's word */
	__u32 watch;   /* of the backup's word */
	__u32 next;    /* what to take if the backup is down as well; 0: nothing */
	__u32 row;     /* of reroute_counts */
	__u32 flags;
	__u32 mtu;   /* of IP packets on the backup, in bytes */
	__u32 slow6; /* device where IPv6 packets go that are too big, or 0 */
	__u32 slow4;
	__u32 len6; /* bytes that the packet grows by; 0: it goes as it is */
	__u32 len4;
	__u32 macs[3]; /* of the neighbour and of the backup, as they stand in a packet */
	__u8 via[16] __attribute__((aligned(8))); /* neighbour on the backup, network byte order */
	__u8 header6[REROUTE_HEADER];
	__u8 header4[REROUTE_HEADER];
};

/* reroute_path is what is known of a protected link, found by the slot of its word. */
struct reroute_path {
	__u32 ifindex;	/* 0: it is not protected */
	__u32 repair;	/* of what no prefix covers; 0: none */
	__u32 prefixes; /* how many have repairs of their own */
	__u32 pad;
};

/* reroute_prefix is a destination behind a link; an IPv4 prefix is one of ::ffff:0:0/96. */
struct reroute_prefix {
	__u32 bits; /* 32 and the length of the prefix */
	__u32 slot;
	__u8 addr[16];
};

/* reroute_tally is what is counted: packets, a train of segments (GSO) being one. */
struct reroute_tally {
	__u64 packets; /* rerouted */
	__u64 bytes;   /* of them, before they grew */
	__u64 fast;    /* of packets, by the program at the device where they came in */
	__u64 next;    /* of packets, not by the best repair: its backup was down as well */
	__u64 shadow;  /* that would have been rerouted */
	__u64 exempt;  /* that belong to the link: left alone */
	__u64 shrunk;  /* trains whose segments were made smaller to fit */
	__u64 big;     /* too big for the backup: the kernel tells the sender, or cuts them */
	__u64 lost;    /* too big also after that */
	__u64 none;    /* left alone: no repair is for them */
	__u64 stuck;   /* dropped: every repair's backup was down as well */
	__u64 odd;     /* dropped: the kernel could not make them grow */
};

#endif
