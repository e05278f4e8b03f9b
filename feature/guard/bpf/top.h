/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The most dropped patterns: by level, with decaying weights. */
#ifndef WEIR_GUARD_TOP_H
#define WEIR_GUARD_TOP_H

#define GUARD_TOP_SHIFT	 33 /* at counts units of 2^33 ns, 8.6 s */
#define GUARD_TOP_SAMPLE 16 /* one of this many refused packets is recorded, with this weight */

/*
 * guard_top_weight returns the weight of a recorded packet. Merged packets of at least
 * GUARD_TOP_SAMPLE datagrams are always recorded, with their number.
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

/* A recorded pattern: a prefix, a port or both. */
struct guard_top_key {
	__u64 high, low; /* of the address, in memory byte order */
	__u16 port;
	__u32 weight; /* packets << 4 */
};

/*
 * guard_top_file adds a sampled packet to one level. A new pattern replaces the lightest of its set
 * with a probability of its weight divided by the sum of both. A heavy pattern enters soon, and
 * noise seldom displaces it (random admission, Basat et al. 2017). Unlike in the paper, it does not
 * inherit the weight of the replaced pattern. A weight counts only packets recorded for this
 * pattern, so status blames no source for others' packets.
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
