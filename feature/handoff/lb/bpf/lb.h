/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * What a load balancer keeps: services, the backends behind them, and flows. Go reads and writes the same structures
 * (flows.go, backends.go). Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d; ports in network byte order.
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
 * A service is found by its port, and a later fragment of a packet to it, which has no ports, by
 * port 0.
 */
struct lb_service {
	/* of its flows: the number, below LB_SERVICES, and above that the tag of this address */
	__u32 id;
	__u16 by_source; /* a client's flows are of one backend: its port does not matter */
	__u16 broken;	 /* of port 0: a fragment's backend is not known */
};

/* lb_backend is a backend. */
struct lb_backend {
	__u32 ifindex; /* where it is; 0: there is none of this number */
	__u8 mac[6];   /* its own */
	__u8 from[6];  /* of the interface that leads to it */
	/* Where a tunnel leads to it: the other end, IPv4 as ::ffff:a.b.c.d. All zero: none does. */
	__u8 tunnel[16];
	__u16 tunnel6; /* it is an IPv6 address */
	__u16 unwell;  /* it gets no new flows; LB_REMOVED, with ifindex 0: others get its flows */
};

/*
 * unwell of a removed backend. An entry is not written in one step: one that was not well is no removed
 * one while it goes.
 */
#define LB_REMOVED 2

/* lb_config is what the agent may change under traffic. */
struct lb_config {
	__u32 tap;     /* interface where packets of parked flows go */
	__u32 tunnel;  /* interface of tunnels, or 0 */
	__u32 vni;     /* of packets in them */
	__u16 full;    /* learn no sources: connections have the rest of the room */
	__u16 reclaim; /* s in addition to LB_RECLAIM_TIME */
	/* learned flows that the agent is told of, for another load balancer: 1 all, 2 not the hash's */
	__u32 news;
	__u32 ended; /* ms of silence after which a client's reset counts for its next connection; 0: never */
	__u64 settle; /* CLOCK_MONOTONIC in ns: until then packets of unknown connections wait */
};

/* lb_mac_key finds the backend that a packet comes from. */
struct lb_mac_key {
	__u32 ifindex;
	__u8 mac[6];
	__u16 pad;
};

/* lb_tunnel_key finds the backend that a packet out of a tunnel comes from. */
struct lb_tunnel_key {
	__u8 addr[16];
};

/* lb_flow_key is a flow of a service, as the client's packets have it. */
struct lb_flow_key {
	__u8 client[16];
	__u16 port;    /* 0 where the service is by source */
	__u16 service; /* lb_service.id */
};

/*
 * lb_flow: word is move.Flow in 64 bits, that one instruction exchanges. From the lowest bit on: owner, to and before
 * 10 bits each, held, parked, and the epoch in 32. parked is the data path's: packets to the owner go to the agent.
 */
struct lb_flow {
	__u64 word;
	__u64 seen; /* CLOCK_MONOTONIC in ns, of the latest packet */
	__u64 in;   /* packets */
	__u64 out;
	/*
	 * CLOCK_MONOTONIC in ns: parked no longer, also if nobody is there to end it; or when it left LB_BEFORE. Of an LB_UNOPENED
	 * flow that neither moves nor has just moved: what the owner has acknowledged at first, see LB_ACKED.
	 */
	__u64 until;
	__u64 life; /* instance of the owner's agent that flipped it, 0: none has */
	__u32 flags;
	__u32 birth; /* move.Birth: at random, of this record; 0: it was made before there were births */
};

/*
 * lb_unasked counts LB_UNASKED flows. The agent writes it after each count of the table; in between the data path adds and
 * subtracts. Without an agent the count begins anew after LB_UNASKED_TIME.
 */
struct lb_unasked {
	__s64 flows;
	__u64 counted; /* CLOCK_MONOTONIC in ns */
};

#define LB_UNASKED_TIME 60000000000ULL

/* Who else than root sends to the tunnels' port: RFC 7348's, and the least source port that any user can bind. */
#define LB_TUNNEL_PORT	 4789
#define LB_USER_PORT	 1024
#define LB_USER_INTERVAL 1000000000ULL /* ns between notes of one backend */

/* lb_change_args is what lb_change gets as its packet. */
struct lb_change_args {
	struct lb_flow_key key;
	__u32 named; /* see LB_NAMED */
	__u64 have;
	__u64 want;
	__u64 until; /* 0: it stays */
	__u64 life;
	__u64 seen; /* it has been, elsewhere */
};

enum { LB_CHANGED, LB_IS_OTHER, LB_IS_NONE }; /* what it returns */

#define LB_OWNER(w)	((__u32)((w)&0x3ff))
#define LB_TO(w)	((__u32)((w) >> 10 & 0x3ff))
#define LB_BEFORE	(0x3ffULL << 20)
#define LB_BUFFERING(w) ((w) >> 31 & 1)

#define LB_MOVES ((__u64)0x3ff << 10 | 3ULL << 30) /* to, held, parked */

/*
 * An owner that is not well, and has no answer but a reset to a SYN for so long, in ns, loses the connection that the client opens. A client
 * repeats a SYN after a second. Linux answers segments out of a connection's window once in 500 ms (tcp_invalid_ratelimit).
 */
#define LB_ANSWER_TIME 600000000ULL

/* The backend that a flow has left may ask for it back for so long, in ns: as openFor of partner.go. See lb_config.reclaim. */
#define LB_RECLAIM_TIME 45000000000ULL

/* The mark of a packet that is to wait, on its way to the device where others only turn round. */
#define LB_MARK 0x77656972

/* lb_flow.until with this bit, and with none above it, has a TCP sequence number in its lower half. */
#define LB_ACKED (1ULL << 32)

/* Flags of a flow: what has been seen of it. */
#define LB_FIN_IN  1
#define LB_FIN_OUT 2
#define LB_RST	   4  /* of either side: anybody can make up one of the client's */
#define LB_TOLD	   8  /* not seen but told: it does not go for want of packets */
#define LB_PINNED  16 /* by the agent: the owner stays */
#define LB_OPENING \
	32 /* learned by a SYN, or reset by the owner, and the owner has said nothing since that only a session says */
/* 64 is Go's, and so are the 10 bits from 16 on: the backend that has told of it */
#define LB_UNANSWERED \
	128 /* nothing but the client's SYNs and the owner's resets since it was opened, or opened anew after an end that counts */
#define LB_RST_OUT \
	256 /* of the owner, with LB_RST: it has no session; the client has said nothing since */
#define LB_BALANCED  512  /* by the data path, which has chosen the epoch */
#define LB_RST_OWNER 1024 /* of the owner, since the connection was opened */
#define LB_NAMED     2048 /* the owner's agent has told of the session */
#define LB_MIDWAY \
	4096 /* learned by a segment that opens nothing, and the owner has said nothing that only a session says */
#define LB_UNASKED \
	8192 /* learned by a backend's packet, and neither its client nor the backend's agent has confirmed it */
#define LB_UNOPENED (LB_OPENING | LB_MIDWAY)
#define LB_FINS	    (LB_FIN_IN | LB_FIN_OUT)
#define LB_RSTS	    (LB_RST | LB_RST_OUT | LB_RST_OWNER)
#define LB_MADE_UP \
	(LB_UNOPENED | LB_UNANSWERED | LB_BALANCED) /* of a flow that may be no more than that */

/* Why packets did not go on, or went another way: lb_counts. */
enum {
	LB_IN,	       /* passed to a backend */
	LB_OUT,	       /* passed to a client */
	LB_LEARNED,    /* flows */
	LB_BUFFERED,   /* packets handed to the agent */
	LB_MUTE,       /* of backends that do not own the flow */
	LB_NO_RESET,   /* resets of flows that are about to move */
	LB_NO_BACKEND, /* no backend for the flow */
	LB_FULL,       /* flows that there was no room for: they go by the hash */
	LB_ICMP,       /* errors that went to a flow's owner */
	LB_STRANGER,   /* by none of the backends, or out of a tunnel and of no service */
	LB_FRAGMENT,   /* later fragments of a service by flow: nobody knows whose they are */
	LB_BIG,	       /* too big for the tunnel: the kernel says so to the client */
	LB_LATE,       /* of parked flows whose deadline has passed */
	LB_AWAITED,    /* of unknown connections, before the backends have said which are theirs */
	LB_COUNTS,
};

/*
 * lb_sources: flows that the data path has learned, ever, and at how many of them no source becomes known. The
 * agent sets that once a second by its count of the table. 0: an older weir's agent has not, and sets lb_config.full alone. See package sources.
 */
enum { LB_SOURCES_LEARNED, LB_SOURCES_UNTIL, LB_SOURCES };

#endif
