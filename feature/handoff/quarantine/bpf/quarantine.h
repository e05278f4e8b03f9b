/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The quarantine of a backend: sessions under way from or to it, and their permitted packets. Go
 * uses the same structures (quarantine.go). Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d. Ports
 * are in network byte order.
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
	__u64 since; /* CLOCK_MONOTONIC, ns */
	__u32 what;
	__u32 epoch;	/* of the move */
	__u32 returned; /* packets sent back to the load balancer */
	/*
	 * Ingress device of the latest buffered packet, or initially one of the devices. With
	 * QUARANTINE_LEFT: number of the session's backend.
	 */
	__u32 ifindex;
};

enum {
	/* The session is departing: nothing reaches or leaves its socket. */
	QUARANTINE_SHUT = 1,
	/* The session is arriving: no RST or FIN leaves until its socket has sent a packet. */
	QUARANTINE_QUIET = 2,
	/*
	 * Like QUARANTINE_SHUT, with packets buffered at the buffer device until the agent releases
	 * them.
	 */
	QUARANTINE_BUFFER = 3,
	/* The session stays: everything passes, and buffered packets go to its socket. */
	QUARANTINE_PASS = 4,
	/* The session has left for another backend: its packets are dropped, and the agent is told. */
	QUARANTINE_LEFT = 5,
};

enum {
	QUARANTINE_RETURNED, /* packets sent back to the load balancer, which buffers them */
	QUARANTINE_DEAF,     /* packets of clients dropped */
	QUARANTINE_MUTE,     /* packets to clients dropped */
	QUARANTINE_SPOKE,    /* arrived sessions with a first sent packet */
	QUARANTINE_BUFFERED, /* packets buffered */
	QUARANTINE_STRAYS,   /* packets of departed sessions */
	QUARANTINE_COUNTS,
};

#endif
