/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Layout of the steering maps, shared by the program, the pins and user space. docs/PINS.md
 * describes it. A change here changes record.ABI.
 */
#ifndef WEIR_STEER_H
#define WEIR_STEER_H

#define STEER_BUCKETS	    4096 /* a power of two: bucket = hash & (STEER_BUCKETS - 1) */
#define STEER_MAX_SERVICES  1024
#define STEER_MAX_ROWS	    4096 /* slots of all services of a namespace */
#define STEER_MAX_SLOTS	    256	 /* of one service */
#define STEER_MAX_ENDPOINTS 8	 /* sockets required by a slot */
#define STEER_MAX_DEVICES   65536
#define STEER_MAX_MOVED	    65536
#define STEER_MAX_NEXT	    32	  /* slots tried by on_empty: next */
#define STEER_MAX_EXITS	    16	  /* slots per process */
#define STEER_MAX_NAMED	    65536 /* services with bindings */
#define STEER_KINDS	    4	  /* of sockets: UDP and TCP over IPv4, then over IPv6 */
#define STEER_RATE_WINDOW   (10ULL * 1000 * 1000 * 1000)

/* The part of a packet that selects its bucket. */
enum steer_policy {
	STEER_BY_SOURCE = 0, /* the source address */
	STEER_BY_DEVICE = 1, /* device of the source address (steer_aliases) */
	STEER_BY_FLOW = 2,   /* addresses, ports and protocol */
	STEER_BY_PACKET = 3, /* each CPU cycles through the buckets */
	STEER_BY_CPU = 4,    /* no bucket: slot = number of the receiving CPU modulo slots */
	STEER_BY_QUIC = 5,   /* QUIC connection id, see struct service; otherwise the flow */
};

/* The form of the server number in connection ids. */
enum steer_quic {
	STEER_QUIC_NGINX =
		0, /* nginx's quic_bpf: the first 8 bytes are the socket's cookie, big endian */
	STEER_QUIC_LB =
		1, /* draft-ietf-quic-load-balancers, in clear: bytes 1 to sid_len are the slot */
};

/* flags of a service */
#define STEER_MOVED 1 /* steer_moved has entries of this service */
#define STEER_MIGRATE \
	2 /* sk_reuseport: connections queued at a closing listener move to another member */
#define STEER_GENERATIONS 4 /* steer_known has a map of this service's UDP peers */

enum steer_on_empty {
	STEER_REJECT = 0,
	STEER_DROP = 1,
	STEER_NEXT = 2,
	STEER_PASS = 3,
};

enum steer_state {
	STEER_EMPTY = 0,     /* never had a member */
	STEER_ADMITTED = 1,  /* had every socket at its admission */
	STEER_EXITED = 2,    /* the member's process exited: set by steer_exit */
	STEER_WITHDRAWN = 3, /* by an operator */
	STEER_CHANGING = 4,  /* its member is being replaced, or a command was killed meanwhile */
};

/* port_key is the key of the first lookup of every packet. */
struct port_key {
	__u16 port; /* host byte order */
	__u8 proto;
	__u8 pad;
};

/* target is an endpoint of a service. Service 0 means none. */
struct target {
	__u32 service; /* index into steer_services, plus one */
	/* bits 7 to 0: the endpoint; bits 15 to 8, for steer_dispatch: the length of the prefix */
	__u32 endpoint;
};

#define STEER_ENDPOINT(target) ((target)->endpoint & 0xff)
#define STEER_LENGTH(target)   ((target)->endpoint >> 8 & 0xff)

/* port_value has the targets of wildcard addresses, and tells whether to look up prefixes first. */
struct port_value {
	struct target any4;
	struct target any6;
	__u32 prefixes; /* number of entries in steer_prefixes with this key */
	__u32 pad;
};

struct prefix_key {
	__u32 prefixlen; /* in bits, counted from proto: 32 + the address's */
	__u8 proto;
	__u8 family; /* AF_INET or AF_INET6 */
	__u16 port;  /* host byte order */
	__u8 addr[16];
};

/*
 * service is the configuration of one service. It is written once, before its publication, and
 * replaced as a whole by one pointer store. A packet sees either the old or the new one.
 */
struct service {
	__u32 seed;
	__u32 slots;
	__u32 endpoints;
	__u32 on_empty;
	__u32 id; /* index into steer_services */
	__u32 flags;
	__u32 policy;		     /* enum steer_policy */
	__u32 tick;		     /* length of a jiffy, ns */
	__u16 bucket[STEER_BUCKETS]; /* bucket to slot */
	__u64 epoch;  /* CLOCK_MONOTONIC, ns, at jiffy 0; 0 until computed by the program */
	__u8 quic;    /* enum steer_quic */
	__u8 sid_len; /* length of QUIC-LB's server id, bytes: 1 to 4 */
	__u8 pad[6];
	__u16 row[STEER_MAX_SLOTS]; /* of the flat maps, by slot; other slots do not affect it */
};

/* slot is the state of a slot's member. */
struct slot {
	__u32 state;
	__u32 tgid;  /* process of the member, in the initial pid namespace */
	__u64 since; /* last change of state, CLOCK_MONOTONIC, ns */
	__u64 start; /* start time of the process, clock ticks since boot (proc_pid_stat(5)) */
	/*
	 * sk_reuseport only: the socket of endpoint e is at row * STEER_MAX_ENDPOINTS + at[e] of
	 * steer_sockets. A reuseport array accepts each socket once, and a dual-stack socket serves
	 * two endpoints.
	 */
	__u8 at[STEER_MAX_ENDPOINTS];
};

struct exit_key {
	__u32 tgid;
	__u32 n; /* 0, 1, 2 … for a process in several slots */
};

/* verdicts count one slot and protocol: datagrams of UDP, lookups of a TCP listener. */
struct verdicts {
	__u64 steered;	/* to this slot's member */
	__u64 rejected; /* slot empty, on_empty reject */
	__u64 dropped;	/* slot empty, on_empty drop */
	__u64 passed;	/* slot empty, on_empty pass */
	__u64 diverted; /* slot empty, on_empty next: to another slot's member */
	__u64 guests;	/* from other, empty slots */
	__u64 failed;	/* the kernel rejected the socket (bpf_sk_assign) */
};

struct device_key {
	__u32 service; /* index into steer_services */
	__u8 addr[16]; /* IPv4 as v4-mapped */
};

/* alias_key finds the device of an address, for by: device. IPv4 is v4-mapped. */
struct alias_key {
	__u32 prefixlen; /* in bits, 0 to 128 */
	__u8 addr[16];
};

/* alias is the representative address of a device: the first one in its file. */
struct alias {
	__u8 addr[16];
};

/* group has the constants of a reuseport group's program. */
struct group {
	__u32 service;	   /* index into steer_services */
	__u32 endpoint[2]; /* of IPv4 and IPv6 packets */
	__u32 holder;	   /* index into steer_holders */
	__u32 endpoints;   /* of the service: a constant saves the verifier most of its work */
};

/*
 * named is a service by its number; a binding's value is the number plus one. A configured service
 * of the name gets the traffic. Otherwise the registered sockets do, at number * STEER_KINDS + kind
 * of steer_given.
 */
struct named {
	__u32 service;		    /* index into steer_services, plus one; 0: none */
	__u8 endpoint[STEER_KINDS]; /* by kind; or STEER_NO_ENDPOINT, STEER_BYPASSED */
} __attribute__((aligned(8)));	    /* read by one load, written by one store */

#define STEER_NO_ENDPOINT 255 /* the service has no listen of this kind: rejected */
#define STEER_BYPASSED	  254 /* weir bypass: left to the kernel */

/* hits count the packets of a service with registered sockets. */
struct hits {
	__u64 steered;	/* datagrams, and lookups of a listener */
	__u64 rejected; /* no socket is registered, or it is closed */
	__u64 failed;	/* the kernel rejected the socket (bpf_sk_assign) */
};

/* peer_key is a UDP peer of a service, as seen by the member's socket. */
struct peer_key {
	__u8 addr[16]; /* IPv4 as v4-mapped */
	__u16 port;    /* network byte order */
	__u8 endpoint;
	__u8 pad;
};

/* peer is the generation of a UDP peer. */
struct peer {
	__u64 seen; /* last datagram, CLOCK_MONOTONIC, ns, to the precision of a tick */
	__u32 row;  /* row of the generation */
	__u32 pad;
};

/*
 * generation relates a row to its slot's next or previous row. A slot with generations alternates
 * between two rows: the service's current one, and a draining or empty one.
 */
struct generation {
	__u32 heir;   /* row of the generation this one drains for, plus one; 0: none */
	__u32 before; /* row of the previous generation, plus one; 0: none */
	__u64 since;  /* start of the drain, CLOCK_MONOTONIC, ns */
	__u64 until;  /* end of the drain, CLOCK_MONOTONIC, ns */
	__u64 idle;   /* silence in ns after which a peer moves to the heir */
	__u64 kept;   /* datagrams it got during the drain */
	__u64 back;   /* packets it got because the heir was not complete */
};

struct device {
	__u64 first;   /* CLOCK_MONOTONIC, ns */
	__u64 last[2]; /* by protocol: 0 UDP, 1 TCP */
	__u64 packets[2];
	__u64 window; /* start of the current rate window, ns */
	__u64 count;  /* packets in the current window */
	__u64 rate;   /* packets per second in the previous window, times 1000 */
};

#endif
