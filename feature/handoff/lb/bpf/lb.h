/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * State of a load balancer: services, backends and flows. Go reads and writes the same structures
 * (flows.go, backends.go). Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d. Ports are in network
 * byte order.
 */
#ifndef WEIR_LB_H
#define WEIR_LB_H

#define LB_BACKENDS	1024 /* backend 0 is none */
#define LB_SERVICES	64
#define LB_BUCKETS	4096 /* of a service */
#define LB_FLOWS	262144
#define LB_UNASKED_MOST (LB_FLOWS / 2)

/* lb_service_key finds the service of a packet. */
struct lb_service_key {
	__u8 addr[16];
	__u16 port;
	__u8 proto;
	__u8 pad;
};

/*
 * lb_service is the entry of a service under its port. A second entry under port 0 is for later
 * fragments, which have no ports.
 */
struct lb_service {
	/* of its flows: the service's number, below LB_SERVICES, and above it the address's tag */
	__u32 id;
	__u16 by_source; /* a client's flows belong to one backend, at any port */
	__u16 broken;	 /* at port 0: the backend of a fragment is unknown */
};

/* lb_backend is a backend. */
struct lb_backend {
	__u32 ifindex; /* of its location; 0: no backend has this number */
	__u8 mac[6];   /* of the backend */
	__u8 from[6];  /* of the load balancer's interface towards it */
	/* End of its tunnel, IPv4 as ::ffff:a.b.c.d. All zero: no tunnel. */
	__u8 tunnel[16];
	__u16 tunnel6; /* the end is an IPv6 address */
	__u16 unwell;  /* gets no new flows; LB_REMOVED with ifindex 0: others get its flows */
};

/*
 * Value of unwell for a removed backend. Entries are not written atomically. A half-written entry
 * of an unwell backend (1) must not look like a removed one.
 */
#define LB_REMOVED 2

/* lb_config is the configuration. The agent may change it under traffic. */
struct lb_config {
	__u32 tap;     /* interface for packets of buffered flows */
	__u32 tunnel;  /* interface of tunnels, or 0 */
	__u32 vni;     /* of tunnels' packets */
	__u16 full;    /* learn no sources: connections have the rest of the table */
	__u16 reclaim; /* s in addition to LB_RECLAIM_TIME */
	/* learned flows to report to the agent, for a partner: 1 all, 2 only flows outside the hash */
	__u32 news;
	__u32 ended;  /* ms of silence until a client's reset counts, see long_reset; 0: never */
	__u64 settle; /* CLOCK_MONOTONIC in ns: end of the startup, see awaited */
};

/* lb_mac_key identifies the backend of a packet. */
struct lb_mac_key {
	__u32 ifindex;
	__u8 mac[6];
	__u16 pad;
};

/* lb_tunnel_key identifies the backend of a packet from a tunnel. */
struct lb_tunnel_key {
	__u8 addr[16];
};

/* lb_flow_key identifies a flow: the client's end and the service. */
struct lb_flow_key {
	__u8 client[16];
	__u16 port;    /* 0 for a service by source */
	__u16 service; /* lb_service.id */
};

/*
 * lb_flow is a flow. word is move.Flow in 64 bits, exchanged by one instruction. From the lowest
 * bit: owner, to and predecessor (10 bits each), buffering, buffered, and the epoch (32 bits).
 * buffered belongs to the data path: packets to the owner go to the agent.
 */
struct lb_flow {
	__u64 word;
	__u64 seen; /* CLOCK_MONOTONIC in ns, of the latest packet */
	__u64 in;   /* packets from the client */
	__u64 out;  /* packets from the owner */
	/*
	 * CLOCK_MONOTONIC in ns: deadline of the buffering, valid without an agent too, or the time
	 * of the latest move (LB_BEFORE). For an LB_UNOPENED flow without a move or LB_BEFORE: the
	 * owner's first acknowledgment number, see LB_ACKED.
	 */
	__u64 until;
	__u64 life; /* instance of the owner's agent that acquired the flow; 0: none */
	__u32 flags;
	__u32 birth; /* move.Nonce: random, per record; 0: from a version without nonces */
};

/*
 * lb_unasked counts LB_UNASKED flows. The agent writes the count after each census of the table. In
 * between the data path updates it. Without an agent the count restarts from 0 after
 * LB_UNASKED_TIME.
 */
struct lb_unasked {
	__s64 flows;
	__u64 counted; /* CLOCK_MONOTONIC in ns */
};

#define LB_UNASKED_TIME 60000000000ULL

/* Tunnels' port (RFC 7348), and the lowest source port open to every user. */
#define LB_TUNNEL_PORT	 4789
#define LB_USER_PORT	 1024
#define LB_USER_INTERVAL 1000000000ULL /* ns between notes about one backend */

/* lb_change_args is the input packet of lb_change. */
struct lb_change_args {
	struct lb_flow_key key;
	__u32 named; /* see LB_NAMED */
	__u64 have;
	__u64 want;
	__u64 until; /* 0: unchanged */
	__u64 life;
	__u64 seen; /* latest packet elsewhere */
};

enum { LB_CHANGED, LB_IS_OTHER, LB_IS_NONE }; /* results of lb_change */

#define LB_OWNER(w)	((__u32)((w)&0x3ff))
#define LB_TO(w)	((__u32)((w) >> 10 & 0x3ff))
#define LB_BEFORE	(0x3ffULL << 20)
#define LB_BUFFERING(w) ((w) >> 31 & 1)

#define LB_MOVES ((__u64)0x3ff << 10 | 3ULL << 30) /* to, buffering, buffered */

/*
 * In ns. An unwell owner loses a connection being opened if it leaves the SYN unanswered for this
 * time, or answers with a reset. Clients repeat a SYN after 1 s. Linux answers segments outside a
 * connection's window once in 500 ms (tcp_invalid_ratelimit).
 */
#define LB_ANSWER_TIME 600000000ULL

/*
 * In ns. A flow's previous backend may reclaim it for this time, as openFor in partner.go. See
 * lb_config.reclaim.
 */
#define LB_RECLAIM_TIME 45000000000ULL

/*
 * Mark of a packet to buffer, on its way to the buffer device. Packets without it only turn around
 * there.
 */
#define LB_MARK 0x77656972

/* lb_flow.until is a TCP sequence number in its lower half if this is its highest bit. */
#define LB_ACKED (1ULL << 32)

/* Flags of a flow. 64 is Go's, and so are the 10 bits from 16 on: the reporting backend. */
#define LB_FIN_IN  1
#define LB_FIN_OUT 2
/* a reset of either side; a client's can be forged */
#define LB_RST 4
/* recorded by the agent, without a packet: not forgotten for lack of packets */
#define LB_TOLD 8
/* overridden by the agent: keeps its owner */
#define LB_PINNED 16
/* learned from a SYN, or reset by the owner, and the owner has not shown a session since */
#define LB_OPENING 32
/* only SYNs of the client and resets of the owner since it was opened */
#define LB_UNANSWERED 128
/* the owner's, with LB_RST: it has no session; nothing from the client since */
#define LB_RST_OUT 256
/* assigned by the data path, with an epoch of its own */
#define LB_BALANCED 512
/* the owner's, since the connection was opened */
#define LB_RST_OWNER 1024
/* the owner's agent has reported the session */
#define LB_NAMED 2048
/* learned from a segment other than a SYN, and the owner has not shown a session since */
#define LB_MIDWAY 4096
/* learned from a backend's packet, and not confirmed by its client or the backend's agent */
#define LB_UNASKED  8192
#define LB_UNOPENED (LB_OPENING | LB_MIDWAY)
#define LB_FINS	    (LB_FIN_IN | LB_FIN_OUT)
#define LB_RSTS	    (LB_RST | LB_RST_OUT | LB_RST_OWNER)
/* of a flow known perhaps by forged packets alone */
#define LB_MADE_UP (LB_UNOPENED | LB_UNANSWERED | LB_BALANCED)

/* Counters of packets and flows: lb_counts. */
enum {
	LB_IN,	       /* forwarded to a backend */
	LB_OUT,	       /* forwarded to a client */
	LB_LEARNED,    /* flows */
	LB_BUFFERED,   /* packets redirected to the agent */
	LB_MUTE,       /* of backends that do not own the flow */
	LB_NO_RESET,   /* resets of flows about to move */
	LB_NO_BACKEND, /* no backend for the flow */
	LB_FULL,       /* flows without room in the table: they follow the hash */
	LB_ICMP,       /* ICMP errors forwarded to a flow's owner */
	LB_STRANGER,   /* of no backend, or from a tunnel and of no service */
	LB_FRAGMENT,   /* later fragments of a service by flow: owner unknown */
	LB_BIG,	       /* too big for the tunnel: the kernel answers the client */
	LB_LATE,       /* of buffered flows after the deadline */
	LB_AWAITED,    /* of unknown connections during startup */
	LB_COUNTS,
};

/*
 * lb_sources: flows learned since the data path was created, and the count at which no further
 * source is learned. The agent sets the limit once a second from its census of the table. 0: an
 * agent of an older version sets lb_config.full alone. See package sources.
 */
enum { LB_SOURCES_LEARNED, LB_SOURCES_UNTIL, LB_SOURCES };

#endif
