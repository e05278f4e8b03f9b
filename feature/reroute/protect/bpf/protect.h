/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Types shared by user space and the programs of protection. Byte order is the host's except in
 * headers.
 */
#ifndef WEIR_PROTECT_H
#define WEIR_PROTECT_H

#define REROUTE_REPAIRS 4096
#define REROUTE_PATHS	1024 /* rows of counters; 0 counts packets without a repair */
#define REROUTE_HEADER	192  /* bytes: an IPv6 header and a routing header of nine segments */
#define REROUTE_CHOICES 4    /* repairs of a path, best first */

/* Flags of a repair. */
#define REROUTE_SHADOW 1  /* count the packets to reroute, and leave them alone */
#define REROUTE_INLINE 2  /* insert the routing header into IPv6 packets */
#define REROUTE_FOR4   4  /* carries IPv4 packets */
#define REROUTE_FOR6   8  /* carries IPv6 packets */
#define REROUTE_VIA4   16 /* via is an IPv4 address, in its first four bytes */
#define REROUTE_MACS   32 /* macs are known */

/*
 * reroute_repair is a way around a link. header6 and header4 are prepended to IPv6 and IPv4
 * packets; the program fills in traffic class, flow label and length. With REROUTE_INLINE, header6
 * is the packet's IPv6 header with the first segment as destination, and the routing header.
 */
struct reroute_repair {
	__u32 ifindex; /* of the backup; 0: unused */
	__u32 slot;    /* of the protected link's state */
	__u32 watch;   /* of the backup's link state */
	__u32 next;    /* repair to use if the backup is down too; 0: none */
	__u32 row;     /* of reroute_counts */
	__u32 flags;
	__u32 mtu;   /* of IP packets on the backup, in bytes */
	__u32 slow6; /* device for IPv6 packets too big, or 0 */
	__u32 slow4;
	__u32 len6; /* growth of the packet in bytes; 0: unchanged */
	__u32 len4;
	__u32 macs[3]; /* neighbour's and backup's addresses, in packet order */
	__u8 via[16] __attribute__((aligned(8))); /* neighbour on the backup, network byte order */
	__u8 header6[REROUTE_HEADER];
	__u8 header4[REROUTE_HEADER];
};

/* reroute_path is a protected link, found by its slot. */
struct reroute_path {
	__u32 ifindex;	/* 0: not protected */
	__u32 repair;	/* of destinations without a prefix; 0: none */
	__u32 prefixes; /* number of prefixes with their own repairs */
	__u32 pad;
};

/* reroute_prefix is a destination behind a link. IPv4 prefixes are in ::ffff:0:0/96. */
struct reroute_prefix {
	__u32 bits; /* 32 plus the length of the prefix */
	__u32 slot;
	__u8 addr[16];
};

/* reroute_tally counts packets. A GSO train counts as one. */
struct reroute_tally {
	__u64 packets; /* rerouted */
	__u64 bytes;   /* of packets, without added headers */
	__u64 fast;    /* of packets, rerouted at ingress */
	__u64 next;    /* of packets, not by the best repair: its backup was down */
	__u64 shadow;  /* would have been rerouted */
	__u64 exempt;  /* must stay on the link: left alone */
	__u64 shrunk;  /* GSO trains split into smaller segments */
	__u64 big;     /* too big for the backup: fragmented, or the sender is told */
	__u64 lost;    /* too big even after that */
	__u64 none;    /* left alone: no repair for the IP version */
	__u64 stuck;   /* dropped: all backups were down too */
	__u64 odd;     /* dropped: the kernel could not add the headers */
};

#endif
