/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The bound that holds whatever comes: a generic cell rate algorithm (ITU-T I.371) in one word. */
#ifndef WEIR_GUARD_BUCKET_H
#define WEIR_GUARD_BUCKET_H

#define guard_cas(p, old, new) __sync_val_compare_and_swap(p, old, new)
#ifndef barrier_var
#define barrier_var(var) asm volatile("" : "+r"(var))
#endif
/* What few packets do stands behind what all do: between two packets the kernel's own code takes the caches. */
#define guard_rare(x) __builtin_expect(!!(x), 0)
#define guard_read(p) (*(volatile typeof(p) *)&(p))

/* What somebody asks for: packets that come as one, and pass or are refused as one. */
struct guard_price {
	__u64 interval; /* ticks a packet */
	__u32 packets;
	__u32 lent; /* enum guard_lent */
};

/* To whom several that come as one are lent what there is no room for. */
enum guard_lent {
	GUARD_LENT_NEVER,
	GUARD_LENT_IDLE, /* where nothing is owed */
	GUARD_LENT_ROOM, /* where there is room for one */
};

/*
 * guard_spend takes the credit of packets if the debt then stays within a threshold, in ticks. The
 * word moves by compare-and-swap, so packets on several CPUs never pass on the same credit. Who loses
 * the race four times is refused: that errs on the side of the limit.
 *
 * Of several that come as one there may be more than ever have room at once. Whoever is lent the rest owes
 * all of them, and nobody passes until that is paid, so that the limit is exceeded once, by less than
 * GUARD_MERGED packets.
 */
static __always_inline int guard_spend(__u64 *word, __u64 now, const struct guard_price *price,
				       __s64 threshold)
{
	__u64 interval = price->interval, cost = interval * price->packets;
	__u64 old = guard_read(*word);

#pragma clang loop unroll(disable)
	for (int i = 0; i < 4; i++) {
		__u64 from = (__s64)(old - now) < 0 ? now : old;
		__u64 was;

		if ((__s64)(from + interval - now) > threshold)
			return 0;
		if (guard_rare(price->packets > 1) && price->lent != GUARD_LENT_ROOM &&
		    (from != now || price->lent == GUARD_LENT_NEVER) &&
		    (__s64)(from + cost - now) > threshold)
			return 0;
		was = guard_cas(word, old, from + cost);
		if (!guard_rare(was != old))
			return 1;
		old = was;
	}
	return 0;
}

/*
 * guard_spend_of is guard_spend as a function of its own, for all but the packets of a calm guard: each copy of the loop
 * takes 250 bytes of what a socket may hold (README.md).
 */
__noinline int guard_spend_of(__u64 *word, __u64 now, const struct guard_price *price,
			      __s64 threshold)
{
	return word && price ? guard_spend(word, now, price, threshold) : 0;
}

/* guard_refund gives ticks back: another limit refused the packets. */
static __always_inline void guard_refund(__u64 *word, __u64 ticks)
{
	__sync_fetch_and_add(word, -ticks);
}

#endif
