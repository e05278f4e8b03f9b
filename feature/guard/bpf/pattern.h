/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Detection of patterns far above the others' rates: decaying rates in a count-min sketch. */
#ifndef WEIR_GUARD_PATTERN_H
#define WEIR_GUARD_PATTERN_H

#define GUARD_WINDOW 19 /* rates decay over 2^19 units of 2^8 ns: 134 ms */
#define GUARD_RATE   8	/* fraction bits of a rate */
/* Increment of a rate by one packet. */
#define GUARD_PACKET ((__u32)((1000000000ULL << GUARD_RATE) >> (GUARD_WINDOW + 8)))

static __noinline __u32 guard_decayed(const struct guard_cell *c, __u32 at)
{
	__s32 elapsed = at - c->at;

	if (elapsed < 0)
		elapsed = 0;
	if (elapsed >= 1 << GUARD_WINDOW)
		return 0;
	return c->rate - (__u32)(((__u64)c->rate * (__u32)elapsed) >> GUARD_WINDOW);
}

/*
 * guard_cell returns a cell of a row. Without the barrier its address is recomputed for each
 * access.
 */
static __always_inline struct guard_cell *guard_cell(struct guard_cell *row, __u32 i)
{
	struct guard_cell *c = row + (i & (GUARD_COLUMNS - 1));

	barrier_var(c);
	return c;
}

/* The rate of a pattern compared with the others. */
enum guard_width {
	GUARD_NARROW,
	GUARD_WIDE,	/* above guard_limits.pattern: heavy only if unreserved sources lack room */
	GUARD_HEAVIEST, /* above the present bound for patterns */
};

/* A packet for a sketch. */
struct guard_sighting {
	__u32 at;    /* units of 2^8 ns */
	__u32 wide;  /* rates: packets/s << GUARD_RATE */
	__u32 heavy; /* wide or more */
	__u32 packets;
};

/*
 * guard_width_of adds packets to the rate of a pattern and returns its width. A wide pattern is
 * above a rate and above eight times the rate of its neighbours: millions of random keys make every
 * cell high without a pattern. Cells are written without synchronization, because a lost update
 * does not matter. A cell far above the limit is written once per sixteenth of the window, to avoid
 * contention between the CPUs of a flood.
 */
int guard_width_of(struct guard_sketch *s, __u64 key, const struct guard_sighting *g)
{
	struct guard_cell *a, *b;
	__u32 i = key >> 16, j = key >> 40;
	__u32 x, y, m, n, rate, at;

	if (!s || !g)
		return GUARD_NARROW;
	at = g->at;
	a = guard_cell(s->cell[0], i);
	b = guard_cell(s->cell[1], j);
	x = guard_decayed(a, at);
	y = guard_decayed(b, at);
	m = guard_decayed(guard_cell(s->cell[0], i + 1), at);
	n = guard_decayed(guard_cell(s->cell[1], j + 1), at);
	rate = (x < y ? x : y) + GUARD_PACKET * g->packets;
	if (n < m)
		m = n;
	if ((rate >> 2) > g->heavy && (rate >> 4) > m && at - a->at < 1 << (GUARD_WINDOW - 4) &&
	    at - b->at < 1 << (GUARD_WINDOW - 4))
		return GUARD_HEAVIEST;
	/* Conservative update: no row is raised above the key's possible rate. */
	a->rate = x < rate ? rate : x;
	a->at = at;
	b->rate = y < rate ? rate : y;
	b->at = at;
	if (rate <= g->wide || (rate >> 3) <= m)
		return GUARD_NARROW;
	return rate > g->heavy ? GUARD_HEAVIEST : GUARD_WIDE;
}

#endif
