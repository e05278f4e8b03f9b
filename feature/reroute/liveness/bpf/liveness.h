/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Liveness: the configuration from user space, the programs' state of each session, and the format
 * of probes. Times are in nanoseconds of CLOCK_MONOTONIC unless stated otherwise.
 */
#ifndef WEIR_LIVENESS_H
#define WEIR_LIVENESS_H

#define LIVENESS_SESSIONS 1024 /* per network namespace */
#define LIVENESS_LOOPS	  16   /* per tick source, one per CPU; a power of two */
#define LIVENESS_RING	  64   /* probes with a recorded send time; a power of two */
#define LIVENESS_BUCKETS  96   /* of round-trip times: four per power of two, from 1.024 us */

#define LIVENESS_TLV	 252 /* RFC 8754 section 8.2: experimental, mutable en route */
#define LIVENESS_VERSION 1
#define LIVENESS_HOPS	 255 /* hop limit of a sent probe; the peer is the next hop: RFC 5082 */
#define LIVENESS_RETURN	 254 /* hop limit of an arriving answer, forwarded once by the peer */

/* skb->priority: TC_PRIO_CONTROL (linux/pkt_sched.h), first in queues with priorities. */
#define LIVENESS_FIRST 7

enum liveness_kind {
	LIVENESS_PROBE,
	LIVENESS_ANSWER,
};

/* Flags of a probe or an answer. */
enum liveness_flag {
	LIVENESS_HEARS = 1,   /* the writer receives the other side's probes */
	LIVENESS_CLOSING = 2, /* the writer ends the session: later silence is no failure */
};

/*
 * A probe's TLV, in network byte order. The tag signs the rest of the TLV and the returning
 * segment.
 */
struct liveness_tlv {
	__u8 type;
	__u8 len;
	__u8 version;
	__u8 kind;
	__be32 session;
	__be32 seq;
	__be32 ack;   /* in a probe: the last answered number of the sender's */
	__be64 sent;  /* the sender's clock, echoed in the answer */
	__be64 got;   /* in an answer: the peer's clock; in a probe: got of the last answer */
	__be32 heard; /* probes or answers received by the writer */
	__u8 flags;
	__u8 multiplier;
	__be16 spare;
	__be32 interval; /* us */
	__be32 spare2;
	__be64 life; /* the sender's incarnation: its start time */
	__be64 tag;  /* SipHash-1-3 */
};

/*
 * The TLV as words. Signed fields are written as whole words: assembling a word from parts just
 * written stalls the CPU.
 */
struct liveness_words {
	__be64 name; /* type to session */
	__be64 seq;  /* with ack */
	__be64 sent;
	__be64 got;
	__be64 heard;	 /* to spare */
	__be64 interval; /* with spare2 */
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

/* The fixed part of a segment routing header: RFC 8754 section 2. */
struct liveness_srh {
	__u8 nexthdr;
	__u8 hdrlen;
	__u8 type;
	__u8 segments_left;
	__u8 first_segment;
	__u8 flags;
	__be16 tag;
};

/* A frame. Two bytes of padding align the rest and are not sent. */
struct liveness_frame {
	__u8 pad[2];
	__u8 dst[6];
	__u8 src[6];
	__be16 proto;
	struct liveness_ip ip;
	struct liveness_srh srh;
	struct liveness_address seg[2]; /* destination of the answer, and the peer's function */
	struct liveness_tlv tlv;
};

/*
 * The same without the Ethernet header, for access to packets. Since Linux 7 the verifier rejects
 * pointers before a packet's beginning, even if nothing there is read.
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

/* A loop's packet. It has the length of a probe, because it becomes one. */
struct liveness_beat_frame {
	__u8 pad[2];
	__u8 addresses[12];
	__be16 proto;
	__u32 magic;
	__u32 loop;
	__u32 generation;
};

#define LIVENESS_MAGIC 0x52494557

/* The tick source as configured by user space. */
struct liveness_tick_source {
	__u64 tick;
	__u32 loops;
	__u32 sessions; /* one more than the highest session in use */
	__u32 ifindex[LIVENESS_LOOPS];
	__u32 generation[LIVENESS_LOOPS]; /* packets of other generations are dropped */
};

/* State of a loop. Only the loop itself writes it, except revived. */
struct liveness_beat {
	__u64 beat; /* of the last tick */
	__u64 ticks;
	__u64 stalls;  /* ticks late by more than LIVENESS_LATE */
	__u64 longest; /* longest of them */
	__u64 revived; /* time of the last reseed by another loop */
	__u32 revivals;
	__u32 cpu;   /* of the last tick */
	__u64 spent; /* in ticks */
};

/*
 * The new link address of a session's neighbour, while the kernel's entry has an old one. User
 * space only clears it, and updates the kernel's entry.
 */
struct liveness_move {
	__u8 was[6]; /* the kernel's address */
	__u8 now[6]; /* source of the neighbour's signed probes */
	__u32 moved; /* frames to was are sent to now */
};

/* Shared by the loops. */
struct liveness_common {
	__u64 stalled; /* time a CPU with a loop was last seen stalled */
};

/* Fields used by every visit come first, in one cache line. */
struct liveness_setup {
	__u8 on;
	__u8 sends;  /* probes, and judges by their answers */
	__u8 judges; /* judges by the peer's probes */
	__u8 echo;   /* the peer is a plain router */
	__u8 multiplier;
	__u8 observe; /* does not set the link state */
	__u8 closing;
	__u8 spare;
	__u64 interval;
	__u64 grace; /* minimum wait of a probe for its answer */
	__u32 id;
	__u32 ifindex;
	__u64 hold;	/* time without failure before up */
	__u64 hold_max; /* upper bound of hold after flaps */
	__u64 key[2];
	__u64 life; /* incarnation: CLOCK_REALTIME of the session's configuration */
	struct liveness_address via; /* the next hop */
	struct liveness_frame frame;
	__u32 master; /* of the device: segments see a VRF's packets with its index */
	__u32 spare2;
};

enum liveness_phase {
	LIVENESS_INIT, /* nothing received yet: the link stays in use */
	LIVENESS_UP,
	LIVENESS_DOWN,
};

/* The verdict of one side of a session. */
struct liveness_judgement {
	__u32 phase;
	__u32 downs;
	__u64 since;
	__u64 run;     /* start of the time without failure; 0: none */
	__u64 suspect; /* it would have been down since then, but for a stall of this host */
	__u32 penalty; /* doublings of the time without failure */
	__u32 granted; /* verdicts delayed by a stall */
};

/* Reasons for ignored packets, per session if known. */
enum liveness_count {
	LIVENESS_FORGED,    /* a wrong tag */
	LIVENESS_STALE,	    /* replayed, of an older incarnation, or too late to tell */
	LIVENESS_DUPLICATE, /* already counted */
	LIVENESS_MALFORMED, /* inconsistent headers */
	LIVENESS_FAR,	    /* a wrong hop limit: not from the next hop */
	LIVENESS_ELSEWHERE, /* by another device than the session's */
	LIVENESS_UNKNOWN,   /* without a session */
	LIVENESS_UNSENT,    /* the kernel rejected a probe to send */
	LIVENESS_COUNTS,
};

struct liveness_state {
	/* As sender. */
	__u64 last_sent;
	__u32 seq;	/* number of the last probe sent */
	__u32 answered; /* number of the last answered probe */
	__u64 window;	/* answered probes before; the lowest bit is answered itself */
	__u64 last_answer;
	__u64 echoed; /* the peer's clock in the last answer */
	__u64 rtt_mean;
	__u64 rtt_dev; /* mean deviation: RFC 6298 */
	__u32 answers;
	__u32 peer_heard; /* probes received by the peer, as of its last answer */
	struct liveness_judgement sender;

	/* As probed end. */
	__u64 last_seen;
	__u64 last_fresh;   /* arrival of the last probe with a new acknowledgement */
	__u64 acknowledged; /* our clock in the acknowledged answer */
	__u64 peer_life;
	__u64 peer_interval;
	__u64 peer_window;
	__u64 last_hears; /* last time the peer reported to receive us */
	__u32 peer_multiplier;
	__u32 peer_seq;
	__u32 heard;	/* probes of the peer's current incarnation */
	__u32 peer_had; /* answers received by the peer, as of its last probe */
	struct liveness_judgement peer;

	__u64 closed; /* time of the peer's farewell */
	__u64 mac_at;
	__u8 mac[12];
	__u32 mac_known;
	__u64 counts[LIVENESS_COUNTS];
	__u64 rtt_min;
	__u64 rtt_last;
	__u64 jitter; /* of round trips: RFC 3550 section 6.4.1 */
	__u64 sent_at[LIVENESS_RING];
	__u32 rtt[LIVENESS_BUCKETS];
};

enum liveness_role {
	LIVENESS_BY_SENDER,
	LIVENESS_BY_PEER,
};

/* An event for user space. */
struct liveness_event {
	__u64 time;
	__u32 session; /* its index in the maps */
	__u32 id;
	__u32 ifindex;
	__u8 role;
	__u8 phase;
	__u8 ended; /* the peer ended the session; down was found before */
	__u8 spare;
};

#endif
