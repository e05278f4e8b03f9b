/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Layout of the steering maps: the protocol between the program, the pins and user space.
 * docs/PINS.md describes it; a change here is a change of steer.ABI.
 */
#ifndef WEIR_STEER_H
#define WEIR_STEER_H

#define STEER_BUCKETS	    4096 /* a power of two: hash & (STEER_BUCKETS - 1) is the bucket */
#define STEER_MAX_SERVICES  1024
#define STEER_MAX_ROWS	    4096 /* slots of all services of a namespace */
#define STEER_MAX_SLOTS	    256	 /* of one service */
#define STEER_MAX_ENDPOINTS 8	 /* sockets that a slot requires */
#define STEER_MAX_DEVICES   65536
#define STEER_MAX_MOVED	    65536
#define STEER_MAX_NEXT	    32	  /* slots tried by on_empty: next */
#define STEER_MAX_EXITS	    16	  /* slots that one process may serve */
#define STEER_MAX_NAMED	    65536 /* services that bindings lead to */
#define STEER_KINDS	    4	  /* of sockets: UDP and TCP over IPv4, over IPv6 */
#define STEER_RATE_WINDOW   (10ULL * 1000 * 1000 * 1000)

/* What of a packet decides about its bucket. */
enum steer_policy {
	STEER_BY_SOURCE = 0, /* the source address */
	STEER_BY_DEVICE = 1, /* the device that the source address belongs to (steer_aliases) */
	STEER_BY_FLOW = 2,   /* addresses, ports and protocol */
	STEER_BY_PACKET = 3, /* each CPU goes through the buckets, packet by packet */
	STEER_BY_CPU = 4, /* no bucket: the slot is the number of the receiving CPU, modulo slots */
	STEER_BY_QUIC = 5, /* QUIC's connection id, as struct service says; else the flow */
};

/* How a server writes its own number into the connection ids that it chooses. */
enum steer_quic {
	STEER_QUIC_NGINX =
		0, /* nginx's quic_bpf: the first 8 bytes are the socket's cookie, big endian */
	STEER_QUIC_LB =
		1, /* draft-ietf-quic-load-balancers, in clear: bytes 1 to sid_len are the slot */
};

/* flags of a service */
#define STEER_MOVED 1 /* steer_moved has entries of this service */
#define STEER_MIGRATE \
	2 /* sk_reuseport: connections queued at a closing listener go to another member */
#define STEER_GENERATIONS 4 /* steer_known has a map of this service's UDP peers */

enum steer_on_empty {
	STEER_REJECT = 0,
	STEER_DROP = 1,
	STEER_NEXT = 2,
	STEER_PASS = 3,
};

enum steer_state {
	STEER_EMPTY = 0,     /* no member was ever admitted */
	STEER_ADMITTED = 1,  /* every socket was there when user space looked */
	STEER_EXITED = 2,    /* the member's process exited: set by steer_exit */
	STEER_WITHDRAWN = 3, /* by an operator */
	STEER_CHANGING = 4,  /* its member is being replaced, or a command was killed at it */
};

/* port_key names a port of a protocol: the first question asked of every packet. */
struct port_key {
	__u16 port; /* host byte order */
	__u8 proto;
	__u8 pad;
};

/* target is one endpoint of one service; service 0 is none. */
struct target {
	__u32 service; /* index into steer_services, plus one */
	/* 7 to 0: the endpoint; 15 to 8, of steer_dispatch: the length of the prefix */
	__u32 endpoint;
};

#define STEER_ENDPOINT(target) ((target)->endpoint & 0xff)
#define STEER_LENGTH(target)   ((target)->endpoint >> 8 & 0xff)

/* port_value answers it for wildcard addresses, and says whether prefixes must be asked first. */
struct port_value {
	struct target any4;
	struct target any6;
	__u32 prefixes; /* number of entries in steer_prefixes with this key */
	__u32 pad;
};

struct prefix_key {
	__u32 prefixlen; /* in bits, counted from proto on: 32 + the address's */
	__u8 proto;
	__u8 family; /* AF_INET or AF_INET6 */
	__u16 port;  /* host byte order */
	__u8 addr[16];
};

/*
 * service is all that one service's traffic needs; it is written once, before it is published,
 * and replaced as a whole by one pointer store, so that a packet meets the old one or the new.
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
	__u64 epoch;  /* CLOCK_MONOTONIC, ns, at jiffy 0; 0 until the program has computed it */
	__u8 quic;    /* enum steer_quic */
	__u8 sid_len; /* length of QUIC-LB's server id, bytes: 1 to 4 */
	__u8 pad[6];
	__u16 row
		[STEER_MAX_SLOTS]; /* of the flat maps: a slot keeps its row when slots come and go */
};

/* slot is what the kernel knows of a member. */
struct slot {
	__u32 state;
	__u32 tgid;  /* of the process that holds the sockets, in the initial pid namespace */
	__u64 since; /* CLOCK_MONOTONIC, ns, of the last change of state */
	__u64 start; /* start time of the process, clock ticks since boot (proc_pid_stat(5)) */
	/*
	 * sk_reuseport only: the socket of endpoint e is at row * STEER_MAX_ENDPOINTS + at[e] of
	 * steer_sockets. An array of reuseport sockets takes each once, and a dual-stack socket
	 * serves two endpoints.
	 */
	__u8 at[STEER_MAX_ENDPOINTS];
};

struct exit_key {
	__u32 tgid;
	__u32 n; /* 0, 1, 2 … for a process that serves several slots */
};

/* verdicts of one slot and protocol; datagrams for UDP, lookups of a listener for TCP. */
struct verdicts {
	__u64 steered;	/* to this slot's member */
	__u64 rejected; /* slot empty, on_empty reject */
	__u64 dropped;	/* slot empty, on_empty drop */
	__u64 passed;	/* slot empty, on_empty pass */
	__u64 diverted; /* slot empty, on_empty next: to another slot's member */
	__u64 guests;	/* steered here because their own slot was empty */
	__u64 failed;	/* the kernel refused the socket (bpf_sk_assign) */
};

struct device_key {
	__u32 service; /* index into steer_services */
	__u8 addr[16]; /* IPv4 as v4-mapped */
};

/* alias_key finds the device of an address: for by: device, and IPv4 as v4-mapped. */
struct alias_key {
	__u32 prefixlen; /* in bits, 0 to 128 */
	__u8 addr[16];
};

/* alias is the address that stands for a device: the first that its file names. */
struct alias {
	__u8 addr[16];
};

/* group is what a program of a reuseport group is made for: constants of its own copy. */
struct group {
	__u32 service;	   /* index into steer_services */
	__u32 endpoint[2]; /* of IPv4 and IPv6 packets */
	__u32 holder;	   /* index into steer_holders */
	__u32 endpoints;   /* of the service: a constant saves the verifier most of its work */
};

/*
 * named is a service as bindings know it, by a number less one that is a binding's value. If the
 * configuration has a service of the name, that gets the traffic; else the sockets that were
 * registered, at number * STEER_KINDS + kind of steer_given.
 */
struct named {
	__u32 service;		    /* index into steer_services, plus one; 0: none */
	__u8 endpoint[STEER_KINDS]; /* of it, by kind; or STEER_NO_ENDPOINT, STEER_BYPASSED */
} __attribute__((aligned(8))); /* so that it is read by one load, as it is written by one store */

#define STEER_NO_ENDPOINT 255 /* the service does not listen to this kind: rejected */
#define STEER_BYPASSED	  254 /* weir bypass: left to the kernel */

/* hits of a service that has registered sockets. */
struct hits {
	__u64 steered;	/* datagrams, and lookups of a listener */
	__u64 rejected; /* no socket is registered, or it is closed */
	__u64 failed;	/* the kernel refused the socket (bpf_sk_assign) */
};

/* peer_key is a UDP peer of a service, as the member's socket sees it. */
struct peer_key {
	__u8 addr[16]; /* IPv4 as v4-mapped */
	__u16 port;    /* network byte order */
	__u8 endpoint;
	__u8 pad;
};

/* peer says which generation of a slot's member has a UDP peer. */
struct peer {
	__u64 seen; /* CLOCK_MONOTONIC, ns, of its last datagram, but for a tick */
	__u32 row;  /* the generation's */
	__u32 pad;
};

/*
 * generation is what a row is to its slot's next or last one. A slot with generations has two rows,
 * in turn: one that the service names, and one that drains or is empty.
 */
struct generation {
	__u32 heir;   /* row of the generation that this one drains for, plus one; 0: none */
	__u32 before; /* row of the generation before this one, plus one; 0: none */
	__u64 since;  /* CLOCK_MONOTONIC, ns, when it began to drain */
	__u64 until;  /* CLOCK_MONOTONIC, ns, from when on it gets nothing */
	__u64 idle;   /* ns of silence after which a peer is the heir's */
	__u64 kept;   /* datagrams that it got since it drains */
	__u64 back;   /* packets that it got because the heir was not whole */
};

struct device {
	__u64 first;   /* CLOCK_MONOTONIC, ns */
	__u64 last[2]; /* by protocol: 0 UDP, 1 TCP */
	__u64 packets[2];
	__u64 window; /* start of the running rate window, ns */
	__u64 count;  /* packets in it */
	__u64 rate;   /* packets a second in the window before, times 1000 */
};

#endif
