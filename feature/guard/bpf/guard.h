/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The state of a guard: one limit, and who has earned what of it. docs/PINS.md has its version;
 * README.md has the algorithm in words. Times are CLOCK_MONOTONIC in ticks of 1/16 ns unless a
 * comment says otherwise, so that limits of many millions a second are met to a per mille.
 */
#ifndef WEIR_GUARD_H
#define WEIR_GUARD_H

#define GUARD_TICK_SHIFT  4  /* ticks in a nanosecond: 1 << 4 */
#define GUARD_EPOCH_SHIFT 31 /* an epoch is 2^31 ns: 2.147 s */
#define GUARD_WAYS	  32 /* sources in a bucket */
#define GUARD_BUCKETS	  2048
#define GUARD_CHOICE	  8    /* of a bucket's ways, looked at for one to replace: a cache line */
#define GUARD_COLUMNS	  4096 /* of a row of a sketch */
#define GUARD_TOP_SETS	  64   /* of patterns that are dropped, a level */
#define GUARD_TOP_WAYS	  4
#define GUARD_COUNTERS	  64 /* sets of counters, one for a CPU or more */

/*
 * How much of the total's debt a packet may find and still pass: the first of these that is true of it.
 * The order is that of what they may.
 */
enum guard_tier {
	GUARD_RESERVED, /* within what its source has reserved */
	GUARD_EARNED, /* within what its source has long shown, though there was no room to reserve it */
	GUARD_ABOVE, /* above it, but not by much */
	GUARD_SEEN,  /* its source has been seen before */
	GUARD_FRESH, /* never seen, or forgotten */
	GUARD_HEAVY, /* of a source or pattern that takes far more than its share */
	GUARD_TIERS,
};

/* What else is counted. */
enum guard_other {
	GUARD_MALFORMED = GUARD_TIERS, /* headers that cannot be read to their end */
	GUARD_UNLIMITED,	       /* passed while the guard was off */
	GUARD_VERDICTS,
};

/* What a dropped packet is filed under. */
enum guard_level {
	GUARD_TOP_HOST,	  /* the source's address */
	GUARD_TOP_NET,	  /* its /24, or /64 */
	GUARD_TOP_WIDE,	  /* its /16, or /48 */
	GUARD_TOP_SPORT,  /* the source port */
	GUARD_TOP_TARGET, /* the destination's address and port */
	GUARD_LEVELS,
};

/* What user space sets, live. 0 as interval: no limit. */
struct guard_limits {
	__u64 interval;	       /* ticks a packet: 16e9 / limit */
	__u64 depth;	       /* debt that the total may have, ticks */
	__u64 insert_interval; /* ticks between sources that are remembered though never seen */
	__u64 target_interval; /* as interval, for each destination address and port */
	__u64 target_depth;
	__u32 per_epoch; /* packets of an epoch at the limit */
	__u32 pattern;	 /* rate from which a pattern can be heavy: packets/s << 8 */
	__u32 dry;	 /* count, and pass everything */
	__u32 pad[3];
};

#define GUARD_ABI 1

/* What all sources share. What is written at different rates lies on cache lines of its own, in the order in which
 * packets meet them. */
struct guard_total {
	__u64 seed[2]; /* secret; drawn once */
	__u32 active;  /* which of limits */
	__u32 version; /* of this layout: GUARD_ABI */
	__u32 epoch;   /* in which the next three were worked out */
	__u32 hot;     /* epoch of the last packet that was refused */
	__u32 fair; /* packets an epoch: the limit over the sources that behaved in the last epoch */
	__u32 calm; /* packets an epoch that a source may send and still be behaving, under attack */
	__u32 ready; /* fair and calm are there */
	__u32 pad0[5];
	struct guard_limits limits[2]; /* so that a packet meets the old ones or the new ones */
	__u64 debt; /* the theoretical arrival time of GCRA; written once a packet that passes */
	__u64 insert_debt; /* the same of insert_interval */
	__u64 pad1[6];
	__u32 reserved; /* sum of the reservations, packets an epoch; exact */
	__u32 holders;	/* sources that have one */
	__u32 behaved;	/* sources that behaved, counted for the next fair */
	__u32 sweep;	/* bucket that is searched next for reservations of the silent */
	__u32 granted; /* packets/s that a process without a right may set at most, 0: any; programs do not look */
	__u32 held; /* epoch in which a source with a reservation was last heard */
	/* What strangers may send (bound.h): a window is 2^27 ns, 134 ms. */
	__u64 unmet;  /* packets that were refused in it: GUARD_UNMET */
	__u32 window; /* whose refusals are being counted */
	__u32 pattern_step; /* halvings of what a pattern may send; 0 for a guard that has seen no attack */
	__u32 source_step; /* of what a source may send */
	__u32 met;	   /* windows since the last one in which too many were refused */
	__u32 pad2[4];
};

/*
 * A source, in one word, so that a compare-and-swap moves it:
 *	63..40 fingerprint, odd	39..28 epoch	27..24 score	23..12 shown	11..0 count
 * Count is of the packets of its epoch, shown of those of its past ones: what it has reserved, if its
 * score says so. 0: nobody.
 */
struct guard_bucket {
	__u64 source[GUARD_WAYS];
};

/*
 * The upper 16 bits of the fingerprints of a bucket, in one cache line: a stranger costs that line and no more, and
 * all of them take 128 KiB, which a CPU's cache may hold. A word is swapped first; a print that
 * belongs to no word, or to another one, hides a source or shows one that the word then denies.
 */
struct guard_prints {
	__u16 print[GUARD_WAYS];
};

struct guard_cell {
	__u32 rate; /* packets/s << 8, decaying */
	__u32 at;   /* units of 2^8 ns */
};

/* Rates of patterns that only strangers count for: a count-min sketch of two rows. */
struct guard_sketch {
	struct guard_cell cell[2][GUARD_COLUMNS];
};

/* A pattern of what is dropped. Writers do not wait for one another: what is torn has another check. */
struct guard_top_entry {
	__u8 address[16]; /* v4 as ::ffff:a.b.c.d; zero for a source port */
	__u16 port;	  /* network byte order */
	__u16 check;	  /* of address and port */
	__u32 weight;	  /* packets << 4, decaying: halved every 8.6 s */
	__u32 at;	  /* units of 2^33 ns */
	__u32 pad;
};

struct guard_top {
	struct guard_top_entry entry[GUARD_TOP_SETS][GUARD_TOP_WAYS];
};

/* Packets: [0] passed, [1] refused (and, while dry, passed all the same). */
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

/* One destination of a guard that limits each. */
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

/* Which guard a destination has. Port 0, of a later fragment: any of them. */
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
		__u16 at;	  /* the hook that decides: enum guard_at */
	} prefix[GUARD_PREFIXES]; /* the longest first */
	__u32 count;
};

#define GUARD_MAX 64 /* guards of a namespace */

#endif
