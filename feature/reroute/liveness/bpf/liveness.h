/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Liveness: what user space configures, what the programs know of each session, and what a probe
 * looks like on the wire. Times are nanoseconds of CLOCK_MONOTONIC unless said otherwise.
 */
#ifndef WEIR_LIVENESS_H
#define WEIR_LIVENESS_H

#define LIVENESS_SESSIONS 1024 /* of a network namespace */
#define LIVENESS_LOOPS	  16   /* of its tick source, one a CPU; a power of two */
#define LIVENESS_RING	  64   /* probes whose time of sending is known; a power of two */
#define LIVENESS_BUCKETS  96   /* of round-trip times: four to each power of two from 1.024 us on */

#define LIVENESS_TLV	 252 /* RFC 8754, 8.2: experimental, may change on the way */
#define LIVENESS_VERSION 1
#define LIVENESS_HOPS	 255 /* a probe leaves with it, and the peer is the next hop: RFC 5082 */
#define LIVENESS_RETURN	 254 /* the peer forwards the answer, which takes one off */

/* skb->priority: TC_PRIO_CONTROL (linux/pkt_sched.h), before all else in queues that tell classes apart. */
#define LIVENESS_FIRST 7

enum liveness_kind {
	LIVENESS_PROBE,
	LIVENESS_ANSWER,
};

/* What the writer of a probe or an answer says of itself. */
enum liveness_flag {
	LIVENESS_HEARS = 1,   /* probes of the other side come in */
	LIVENESS_CLOSING = 2, /* it ends the session: silence from now on is no failure */
};

/* A probe's TLV, in network byte order. All of it but the tag is signed, and the segment that it returns to. */
struct liveness_tlv {
	__u8 type;
	__u8 len;
	__u8 version;
	__u8 kind;
	__be32 session;
	__be32 seq;
	__be32 ack;   /* a probe's: the last of the sender's that was answered */
	__be64 sent;  /* the sender's clock; an answer carries it back */
	__be64 got;   /* an answer's: the peer's clock; a probe's: that of the last answer */
	__be32 heard; /* how many probes, or answers, the writer has had */
	__u8 flags;
	__u8 multiplier;
	__be16 spare;
	__be32 interval; /* us */
	__be32 spare2;
	__be64 life; /* of the sender: when it began */
	__be64 tag;  /* SipHash-1-3 */
};

/*
 * The same by words. What is signed is written by whole ones: what puts a word together from parts that
 * were written just before waits for them.
 */
struct liveness_words {
	__be64 name; /* type to session */
	__be64 seq;  /* and ack */
	__be64 sent;
	__be64 got;
	__be64 heard;	 /* to spare */
	__be64 interval; /* and spare2 */
	__be64 life;
	__be64 tag;
};

struct liveness_address {
	__u8 bytes[16];
};

struct liveness_ip {
	__be32 word; /* version, class, flow label */
	__be16 payload_len;
	__u8 nexthdr;
	__u8 hop_limit;
	struct liveness_address saddr;
	struct liveness_address daddr;
};

/* The fixed part of a segment routing header: RFC 8754, 2. */
struct liveness_srh {
	__u8 nexthdr;
	__u8 hdrlen;
	__u8 type;
	__u8 segments_left;
	__u8 first_segment;
	__u8 flags;
	__be16 tag;
};

/* Before what is sent two bytes, so that the rest is aligned. */
struct liveness_frame {
	__u8 pad[2];
	__u8 dst[6];
	__u8 src[6];
	__be16 proto;
	struct liveness_ip ip;
	struct liveness_srh srh;
	struct liveness_address seg[2]; /* where it returns to, and the peer's function */
	struct liveness_tlv tlv;
};

/*
 * The same as it is found in packets, without what is before: verifiers since Linux 7 refuse pointers to before
 * a packet's beginning, also where nothing there is read.
 */
struct liveness_packet {
	struct liveness_ip ip;
	struct liveness_srh srh;
	struct liveness_address seg[2];
	struct liveness_tlv tlv;
};

#define LIVENESS_FRAME (sizeof(struct liveness_frame) - 2)
#define LIVENESS_IP_AT __builtin_offsetof(struct liveness_frame, ip)
#define LIVENESS_TLV_AT                                   \
	(sizeof(struct liveness_frame) - LIVENESS_IP_AT - \
	 sizeof(struct liveness_tlv)) /* in the IPv6 packet */

_Static_assert(sizeof(struct liveness_frame) - LIVENESS_IP_AT == sizeof(struct liveness_packet),
	       "of a frame");

/* A loop's packet is as long as a probe, which it becomes. */
struct liveness_beat_frame {
	__u8 pad[2];
	__u8 addresses[12];
	__be16 proto;
	__u32 magic;
	__u32 loop;
	__u32 generation;
};

#define LIVENESS_MAGIC 0x52494557

/* The tick source, as user space wants it. */
struct liveness_tick_source {
	__u64 tick;
	__u32 loops;
	__u32 sessions; /* one more than the highest that is on */
	__u32 ifindex[LIVENESS_LOOPS];
	__u32 generation[LIVENESS_LOOPS]; /* a packet of another one ends */
};

/* What a loop has done. It alone writes it, but for revived. */
struct liveness_beat {
	__u64 beat; /* of the last tick */
	__u64 ticks;
	__u64 stalls;  /* ticks that were late by more than LIVENESS_LATE */
	__u64 longest; /* of them */
	__u64 revived; /* when another loop last put a packet into this one */
	__u32 revivals;
	__u32 cpu;   /* of the last tick */
	__u64 spent; /* in ticks */
};

/*
 * The link address that a session's neighbour has now, where the kernel's entry has another one. User space
 * writes it only to forget, and makes the kernel's entry follow.
 */
struct liveness_move {
	__u8 was[6]; /* as the kernel has it */
	__u8 now[6]; /* of the neighbour's signed probes */
	__u32 moved; /* frames to was go to now */
};

/* Shared by the loops. */
struct liveness_common {
	__u64 stalled; /* when a CPU that has a loop was last seen not to run */
};

/* What a visit needs is in front, so that it is in one line of the cache. */
struct liveness_setup {
	__u8 on;
	__u8 sends;  /* probes, and judges by their answers */
	__u8 judges; /* by the peer's probes */
	__u8 echo;   /* the peer merely routes */
	__u8 multiplier;
	__u8 observe; /* tells nobody */
	__u8 closing;
	__u8 spare;
	__u64 interval;
	__u64 grace; /* at least so long a probe waits for its answer */
	__u32 id;
	__u32 ifindex;
	__u64 hold;	/* a run without failure of so long brings a session up */
	__u64 hold_max; /* after flaps at most of so long */
	__u64 key[2];
	__u64 life;		     /* CLOCK_REALTIME at which the session was configured */
	struct liveness_address via; /* the next hop */
	struct liveness_frame frame;
	__u32 master; /* of the device: a VRF hands what comes by its devices to segments as its own */
	__u32 spare2;
};

enum liveness_phase {
	LIVENESS_INIT, /* nothing has been heard yet: nobody is told that the link is down */
	LIVENESS_UP,
	LIVENESS_DOWN,
};

/* What one side of a session has been found to be. */
struct liveness_judgement {
	__u32 phase;
	__u32 downs;
	__u64 since;
	__u64 run;     /* without failure, since; 0: there is none */
	__u64 suspect; /* it would have been down since, but for a stall of this host */
	__u32 penalty; /* doublings of the run that brings it up */
	__u32 granted; /* verdicts that a stall put off */
};

/* What became of packets, by session where it is known. */
enum liveness_count {
	LIVENESS_FORGED,    /* a wrong tag */
	LIVENESS_STALE,	    /* replayed, of an older life, or too late to tell */
	LIVENESS_DUPLICATE, /* of one that was counted */
	LIVENESS_MALFORMED, /* not what its own header says */
	LIVENESS_FAR,	    /* a wrong hop limit: it comes from farther than the next hop */
	LIVENESS_ELSEWHERE, /* by another device than the session's */
	LIVENESS_UNKNOWN,   /* of no session */
	LIVENESS_UNSENT,    /* the kernel took no probe to send */
	LIVENESS_COUNTS,
};

struct liveness_state {
	/* As who sends. */
	__u64 last_sent;
	__u32 seq;	/* of the last probe sent */
	__u32 answered; /* the last one that was answered */
	__u64 window;	/* which of those before were, the lowest bit answered's own */
	__u64 last_answer;
	__u64 echoed; /* the peer's clock in the last answer */
	__u64 rtt_mean;
	__u64 rtt_dev; /* mean deviation: RFC 6298 */
	__u32 answers;
	__u32 peer_heard; /* probes, by the last answer */
	struct liveness_judgement sender;

	/* As who is probed. */
	__u64 last_seen;
	__u64 last_fresh; /* when a probe came that acknowledges an answer not acknowledged before */
	__u64 acknowledged; /* our clock in that answer */
	__u64 peer_life;
	__u64 peer_interval;
	__u64 peer_window;
	__u64 last_hears; /* when the peer last said that it hears us */
	__u32 peer_multiplier;
	__u32 peer_seq;
	__u32 heard;	/* probes of the peer's present life */
	__u32 peer_had; /* answers, by its last probe */
	struct liveness_judgement peer;

	__u64 closed; /* when the peer said that it ends the session */
	__u64 mac_at;
	__u8 mac[12];
	__u32 mac_known;
	__u64 counts[LIVENESS_COUNTS];
	__u64 rtt_min;
	__u64 rtt_last;
	__u64 jitter; /* RFC 3550, 6.4.1, of round trips */
	__u64 sent_at[LIVENESS_RING];
	__u32 rtt[LIVENESS_BUCKETS];
};

enum liveness_role {
	LIVENESS_BY_SENDER,
	LIVENESS_BY_PEER,
};

/* What user space may hear of. */
struct liveness_event {
	__u64 time;
	__u32 session; /* its place in the maps */
	__u32 id;
	__u32 ifindex;
	__u8 role;
	__u8 phase;
	__u8 ended; /* the peer has ended the session: down is what was found before */
	__u8 spare;
};

#endif
