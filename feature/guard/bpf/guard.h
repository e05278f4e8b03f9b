/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The state of a guard: one limit, and the history of its sources. docs/PINS.md has its version,
 * README.md describes the algorithm. Times are CLOCK_MONOTONIC in ticks of 1/16 ns unless stated
 * otherwise. Limits of many millions a second are therefore accurate to a per mille.
 */
#ifndef WEIR_GUARD_H
#define WEIR_GUARD_H

#define GUARD_TICK_SHIFT  4  /* ticks in a nanosecond: 1 << 4 */
#define GUARD_EPOCH_SHIFT 31 /* an epoch is 2^31 ns: 2.147 s */
#define GUARD_WAYS	  32 /* sources in a bucket */
#define GUARD_BUCKETS	  2048
#define GUARD_CHOICE	  8    /* candidates for replacement in a bucket: a cache line */
#define GUARD_COLUMNS	  4096 /* columns of a sketch row */
#define GUARD_TOP_SETS	  64   /* sets of dropped patterns, for each level */
#define GUARD_TOP_WAYS	  4
#define GUARD_COUNTERS	  64 /* sets of counters, each for one or more CPUs */

/*
 * The tier of a packet is the first matching one. It determines the maximum debt of the total for
 * the packet to pass, highest first.
 */
enum guard_tier {
	GUARD_RESERVED, /* within the source's reservation */
	GUARD_EARNED,	/* within the rate shown for long, without room for a reservation */
	GUARD_ABOVE,	/* above it, but not by much */
	GUARD_SEEN,	/* of a source seen before */
	GUARD_FRESH,	/* of a source never seen, or forgotten */
	GUARD_HEAVY,	/* of a source or pattern far above its share */
	GUARD_TIERS,
};

/* Other counters. */
enum guard_other {
	GUARD_MALFORMED = GUARD_TIERS, /* incomplete or malformed headers */
	GUARD_UNLIMITED,	       /* passed while no limit was set */
	GUARD_VERDICTS,
};

/* Levels of recorded dropped patterns. */
enum guard_level {
	GUARD_TOP_HOST,	  /* source address */
	GUARD_TOP_NET,	  /* its /24, or /64 */
	GUARD_TOP_WIDE,	  /* its /16, or /48 */
	GUARD_TOP_SPORT,  /* source port */
	GUARD_TOP_TARGET, /* destination address and port */
	GUARD_LEVELS,
};

/* Set by user space at run time. Interval 0: no limit. */
struct guard_limits {
	__u64 interval;	       /* ticks a packet: 16e9 / limit */
	__u64 depth;	       /* maximum debt of the total, ticks */
	__u64 insert_interval; /* ticks between insertions of unknown sources */
	__u64 target_interval; /* as interval, for each destination address and port */
	__u64 target_depth;
	__u32 per_epoch; /* packets of an epoch at the limit */
	__u32 pattern;	 /* minimum rate of a heavy pattern: packets/s << 8 */
	__u32 dry;	 /* count, but pass everything */
	__u32 pad[3];
};

#define GUARD_ABI 1

/*
 * State shared by all sources. Fields written at different rates are on separate cache lines, in
 * the order of their use by a packet.
 */
struct guard_total {
	__u64 seed[2]; /* secret, random for each guard */
	__u32 active;  /* index of limits in force */
	__u32 version; /* layout version: GUARD_ABI */
	__u32 epoch;   /* epoch of fair, calm and ready */
	__u32 hot;     /* epoch of the last refused packet */
	__u32 fair; /* packets an epoch: the limit over the sources that behaved in the last epoch */
	__u32 calm;  /* packets an epoch of a behaving source under attack */
	__u32 ready; /* fair and calm are valid */
	__u32 pad0[5];
	struct guard_limits limits[2]; /* two, for atomic changes */
	__u64 debt;	   /* theoretical arrival time of GCRA; written once per passed packet */
	__u64 insert_debt; /* the same for insert_interval */
	__u64 pad1[6];
	__u32 reserved; /* exact sum of the reservations, packets an epoch */
	__u32 holders;	/* number of reservations */
	__u32 behaved;	/* sources that behaved, counted for the next fair */
	__u32 sweep;	/* next eight sources to search for expired reservations */
	__u32 granted; /* maximum packets/s for an unprivileged process, 0: any; unused by programs */
	__u32 held;    /* epoch of the last packet from a source with a reservation */
	/* Bounds for unreserved sources (bound.h). A window is 2^27 ns, 134 ms. */
	__u64 unmet;	    /* packets refused in the window: GUARD_UNMET */
	__u32 window;	    /* window of unmet */
	__u32 pattern_step; /* halvings of a pattern's bound; 0 before any attack */
	__u32 source_step;  /* of a source's bound */
	__u32 met;	    /* windows since the last one with too many refusals */
	__u32 pad2[4];
};

/*
 * A source in one word, for compare-and-swap:
 *
 *	63..40 fingerprint, odd	39..28 epoch	27..24 score	23..12 shown	11..0 count
 *
 * Count is the packets of its epoch. Shown is the packets of past epochs: its reservation, if its
 * score is GUARD_GRANTED. 0: no source.
 */
struct guard_bucket {
	__u64 source[GUARD_WAYS];
};

/*
 * The upper 16 bits of a bucket's fingerprints, in one cache line. An unknown source costs only
 * this line. All prints take 128 KiB and may fit a CPU's cache. The word is swapped before its
 * print is written. A stale print may hide a source, or lead to a word of another source; the
 * word's own print is checked.
 */
struct guard_prints {
	__u16 print[GUARD_WAYS];
};

struct guard_cell {
	__u32 rate; /* packets/s << 8, decaying */
	__u32 at;   /* units of 2^8 ns */
};

/* Rates of patterns among unreserved sources: a count-min sketch of two rows. */
struct guard_sketch {
	struct guard_cell cell[2][GUARD_COLUMNS];
};

/* A pattern of dropped packets. Writers do not synchronize: a torn entry has a wrong check. */
struct guard_top_entry {
	__u8 address[16]; /* v4 as ::ffff:a.b.c.d; zero for a source port */
	__u16 port;	  /* network byte order */
	__u16 check;	  /* checksum of address and port */
	__u32 weight;	  /* packets << 4, decaying: halved every 8.6 s */
	__u32 at;	  /* units of 2^33 ns */
	__u32 pad;
};

struct guard_top {
	struct guard_top_entry entry[GUARD_TOP_SETS][GUARD_TOP_WAYS];
};

/* Packets: [0] passed, [1] refused (counted in dry run, too, but passed). */
struct guard_counters {
	__u64 verdict[GUARD_VERDICTS][2];
};

enum { GUARD_BY_NET, GUARD_BY_PORT, GUARD_BY_HOST, GUARD_SKETCHES };

struct guard_state {
	struct guard_total total;
	struct guard_counters counters[GUARD_COUNTERS];
	struct guard_prints prints[GUARD_BUCKETS];
	struct guard_bucket sources[GUARD_BUCKETS];
	struct guard_sketch sketch[GUARD_SKETCHES];
	struct guard_top top[GUARD_LEVELS];
};

/* One destination of a guard with a limit for each. */
struct guard_target_key {
	__u8 address[16];
	__u16 port; /* network byte order */
	__u16 pad;
};

struct guard_target {
	__u64 debt;
	__u32 hot;
	__u32 pad;
	__u64 passed;
	__u64 refused;
};

/* The guards of a port and family. Port 0 is for later fragments: any port. */
struct guard_listen_key {
	__u16 port;  /* network byte order */
	__u8 family; /* 4 or 6 */
	__u8 pad;
};

enum guard_at { GUARD_AT_SOCKETS, GUARD_AT_INTERFACES };

#define GUARD_PREFIXES 8
struct guard_listen {
	struct {
		__u8 address[16];
		__u32 bits;	  /* of 128; v4 is ::ffff:0:0/96 and longer */
		__u16 guard;	  /* index */
		__u16 at;	  /* hook of the decision: enum guard_at */
	} prefix[GUARD_PREFIXES]; /* longest first */
	__u32 count;
};

#define GUARD_MAX 64 /* guards of a namespace */

#endif
