/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The gate of a server: sessions that are on their way from or to it, and what may pass meanwhile. Go reads and writes the
 * same structures (gate.go). Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d; ports in network byte order.
 */
#ifndef WEIR_GATE_H
#define WEIR_GATE_H

struct gate_key {
	__u8 client[16];
	__u8 service[16];
	__u16 client_port;
	__u16 service_port;
};

/* The beginning of struct gate_key. */
struct gate_pair {
	__u8 client[16];
	__u8 service[16];
};

struct gate_entry {
	__u64 since; /* CLOCK_MONOTONIC in ns */
	__u32 what;
	__u32 epoch;	/* of the move */
	__u32 returned; /* packets sent back to the load balancer */
	/*
	 * Of the device that the latest parked packet came by, or of one that it could. Of
	 * GATE_LEFT the number of the server that the session has gone to.
	 */
	__u32 ifindex;
};

enum {
	/* The session is on its way from here: nothing reaches its socket, nothing leaves it. */
	GATE_SHUT = 1,
	/* It is on its way to here: no reset and no end leaves for it, until the socket has spoken. */
	GATE_QUIET = 2,
	/* As GATE_SHUT, and packets wait at the device of parked ones until the agent sends them back. */
	GATE_PARK = 3,
	/* It stays here: everything passes, and what has waited goes to its socket. */
	GATE_PASS = 4,
	/* It has left for another server: what comes for it all the same is dropped, and the agent told. */
	GATE_LEFT = 5,
};

enum {
	GATE_RETURNED, /* packets sent back to the load balancer, which holds them */
	GATE_DEAF,     /* packets of clients dropped */
	GATE_MUTE,     /* packets to clients dropped */
	GATE_SPOKE,    /* sessions that came and have spoken */
	GATE_PARKED,   /* packets parked */
	GATE_STRAYS,   /* packets of sessions that have left */
	GATE_COUNTS,
};

#endif
