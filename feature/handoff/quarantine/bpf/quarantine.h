/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The quarantine of a backend: sessions that are on their way from or to it, and what may pass meanwhile. Go reads and writes the
 * same structures (quarantine.go). Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d; ports in network byte order.
 */
#ifndef WEIR_QUARANTINE_H
#define WEIR_QUARANTINE_H

struct quarantine_key {
	__u8 client[16];
	__u8 service[16];
	__u16 client_port;
	__u16 service_port;
};

/* The beginning of struct quarantine_key. */
struct quarantine_pair {
	__u8 client[16];
	__u8 service[16];
};

struct quarantine_entry {
	__u64 since; /* CLOCK_MONOTONIC in ns */
	__u32 what;
	__u32 epoch;	/* of the move */
	__u32 returned; /* packets sent back to the load balancer */
	/*
	 * Of the device that the latest buffered packet came by, or of one that it could. Of
	 * QUARANTINE_LEFT the number of the backend that the session has gone to.
	 */
	__u32 ifindex;
};

enum {
	/* The session is on its way from here: nothing reaches its socket, nothing leaves it. */
	QUARANTINE_SHUT = 1,
	/* It is on its way to here: no reset and no end leaves for it, until the socket has spoken. */
	QUARANTINE_QUIET = 2,
	/* As QUARANTINE_SHUT, and packets wait at the device of parked ones until the agent sends them back. */
	QUARANTINE_BUFFER = 3,
	/* It stays here: everything passes, and what has waited goes to its socket. */
	QUARANTINE_PASS = 4,
	/* It has left for another backend: what comes for it all the same is dropped, and the agent told. */
	QUARANTINE_LEFT = 5,
};

enum {
	QUARANTINE_RETURNED, /* packets sent back to the load balancer, which holds them */
	QUARANTINE_DEAF,     /* packets of clients dropped */
	QUARANTINE_MUTE,     /* packets to clients dropped */
	QUARANTINE_SPOKE,    /* sessions that came and have spoken */
	QUARANTINE_BUFFERED, /* packets buffered */
	QUARANTINE_STRAYS,   /* packets of sessions that have left */
	QUARANTINE_COUNTS,
};

#endif
