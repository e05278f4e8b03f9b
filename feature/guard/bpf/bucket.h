/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The limit in all cases: a generic cell rate algorithm (ITU-T I.371) in one word. */
#ifndef WEIR_GUARD_BUCKET_H
#define WEIR_GUARD_BUCKET_H

#define guard_cas(p, old, new) __sync_val_compare_and_swap(p, old, new)
#ifndef barrier_var
#define barrier_var(var) asm volatile("" : "+r"(var))
#endif
/*
 * Rare code is placed after common code: between two packets, the kernel's own code evicts the
 * caches.
 */
#define guard_rare(x) __builtin_expect(!!(x), 0)
#define guard_read(p) (*(volatile typeof(p) *)&(p))

/* A request for credit: packets arriving as one, and passed or refused as one. */
struct guard_price {
	__u64 interval; /* ticks a packet */
	__u32 packets;
	__u32 lent; /* enum guard_lent */
};

/* Credit rule for merged packets without enough room. */
enum guard_lent {
	GUARD_LENT_NEVER,
	GUARD_LENT_IDLE, /* if there is no debt */
	GUARD_LENT_ROOM, /* if there is room for one */
};

/*
 * guard_spend takes the credit of packets if the debt then stays within a threshold, in ticks. The
 * word changes by compare-and-swap, so concurrent packets never use the same credit. A packet
 * losing the race four times is refused, in favour of the limit.
 *
 * Merged packets may need more room than ever exists at once. With lent credit they owe their whole
 * cost, and nothing passes until it is paid. The limit is exceeded once, by less than GUARD_MERGED
 * packets.
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
 * guard_spend_of is guard_spend as a function, for all packets except a calm guard's. Each copy of
 * the loop takes 250 bytes of the maximum size of a socket's program (README.md).
 */
__noinline int guard_spend_of(__u64 *word, __u64 now, const struct guard_price *price,
			      __s64 threshold)
{
	return word && price ? guard_spend(word, now, price, threshold) : 0;
}

/* guard_refund returns ticks after another limit refused the packets. */
static __always_inline void guard_refund(__u64 *word, __u64 ticks)
{
	__sync_fetch_and_add(word, -ticks);
}

#endif
