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

/*
 * guard_spend takes the credit of one packet if the debt then stays within a threshold, in ticks. The
 * word moves by compare-and-swap, so packets on several CPUs never pass on the same credit. Who loses
 * the race four times is refused: that errs on the side of the limit.
 */
static __always_inline int guard_spend(__u64 *word, __u64 now, __u64 interval, __s64 threshold)
{
	__u64 old = guard_read(*word);

#pragma clang loop unroll(disable)
	for (int i = 0; i < 4; i++) {
		__u64 from = (__s64)(old - now) < 0 ? now : old;
		__u64 was;

		if ((__s64)(from + interval - now) > threshold)
			return 0;
		was = guard_cas(word, old, from + interval);
		if (!guard_rare(was != old))
			return 1;
		old = was;
	}
	return 0;
}

/* guard_refund gives it back: another limit refused the packet. */
static __always_inline void guard_refund(__u64 *word, __u64 interval)
{
	__sync_fetch_and_add(word, -interval);
}

#endif
