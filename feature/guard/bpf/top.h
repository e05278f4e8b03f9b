/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Who is being dropped: the patterns with the most refused packets, by level, decaying. */
#ifndef WEIR_GUARD_TOP_H
#define WEIR_GUARD_TOP_H

#define GUARD_TOP_SHIFT	 33 /* at counts units of 2^33 ns, 8.6 s */
#define GUARD_TOP_SAMPLE 16 /* one refused packet in so many is filed, with that weight */

/*
 * guard_top_weight is what one packet that is filed counts for: those merged into it are filed for certain if
 * they are as many.
 */
static __always_inline __u32 guard_top_weight(__u32 packets)
{
	return (packets > GUARD_TOP_SAMPLE ? packets : GUARD_TOP_SAMPLE) << 4;
}

/* guard_top_decayed halves a weight with every unit. */
static __always_inline __u32 guard_top_decayed(const struct guard_top_entry *e, __u32 at)
{
	__u32 age = at - e->at;

	return age > 31 ? 0 : e->weight >> age;
}

/* What is filed: a prefix, a port or both. */
struct guard_top_key {
	__u64 high, low; /* of the address; as it lies in memory */
	__u16 port;
	__u32 weight; /* packets << 4 */
};

/*
 * guard_top_file adds a sampled packet with its weight to one level. A pattern that is not there takes the
 * place of the lightest of its set with a chance of its weight over both: a heavy one gets in soon, and noise seldom
 * drives it out (random admission, Basat et al. 2017). It does not inherit the weight of the pattern that it
 * replaces, as it does there: a weight is of packets that were filed under this pattern, and status accuses nobody of
 * what others sent.
 */
static __always_inline void guard_top_file(struct guard_top *top, const struct guard_top_key *key,
					   __u64 hash, __u32 at, __u32 random)
{
	struct guard_top_entry *set = top->entry[hash & (GUARD_TOP_SETS - 1)], *e;
	__u32 least = ~0u, victim = 0;

	barrier_var(set);
#pragma clang loop unroll(disable)
	for (int i = 0; i < GUARD_TOP_WAYS; i++) {
		const __u64 *x;
		__u32 weight;

		e = set + i;
		barrier_var(e);
		x = (const __u64 *)e->address;
		weight = guard_top_decayed(e, at);
		if (x[0] == key->high && x[1] == key->low && e->port == key->port && e->weight) {
			if (weight < ~0u - key->weight)
				weight += key->weight;
			e->weight = weight;
			e->at = at;
			return;
		}
		if (weight < least) {
			least = weight;
			victim = i;
		}
	}
	if ((__u64)random * (least + key->weight) >> 32 >= key->weight)
		return;
	e = set + (victim & (GUARD_TOP_WAYS - 1));
	barrier_var(e);
	((__u64 *)e->address)[0] = key->high;
	((__u64 *)e->address)[1] = key->low;
	e->port = key->port;
	e->check = (__u16)(hash >> 48);
	e->weight = key->weight;
	e->at = at;
}

#endif
