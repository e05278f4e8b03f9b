/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Who is being dropped: the patterns with the most refused packets, by level, decaying. */
#ifndef WEIR_GUARD_TOP_H
#define WEIR_GUARD_TOP_H

#define GUARD_TOP_SHIFT	 33 /* at counts units of 2^33 ns, 8.6 s */
#define GUARD_TOP_SAMPLE 16 /* one refused packet in so many is filed, with that weight */
#define GUARD_TOP_PACKET (GUARD_TOP_SAMPLE << 4)

/* guard_top_decayed halves a weight with every unit. */
static __always_inline __u32 guard_top_decayed(const struct guard_top_entry *e, __u32 at)
{
	__u32 age = at - e->at;

	return age > 31 ? 0 : e->weight >> age;
}

/*
 * guard_top_file adds a sampled packet to one level. A pattern that is not there takes the place of the
 * lightest of its set with a chance of its weight over both: a heavy one gets in soon, and noise seldom
 * drives it out (random admission, Basat et al. 2017).
 */
static __always_inline void guard_top_file(struct guard_top *top, const struct guard_top_entry *key,
					   __u64 hash, __u32 at, __u32 random)
{
	struct guard_top_entry *set = top->entry[hash & (GUARD_TOP_SETS - 1)], *e;
	const __u64 *k = (const __u64 *)key->address;
	__u32 least = ~0u, victim = 0;

#pragma clang loop unroll(disable)
	for (int i = 0; i < GUARD_TOP_WAYS; i++) {
		const __u64 *x = (const __u64 *)set[i].address;
		__u32 weight = guard_top_decayed(&set[i], at);

		if (x[0] == k[0] && x[1] == k[1] && set[i].port == key->port && set[i].weight) {
			if (weight < ~0u - GUARD_TOP_PACKET)
				weight += GUARD_TOP_PACKET;
			set[i].weight = weight;
			set[i].at = at;
			return;
		}
		if (weight < least) {
			least = weight;
			victim = i;
		}
	}
	if ((__u64)random * (least + GUARD_TOP_PACKET) >> 32 >= GUARD_TOP_PACKET)
		return;
	e = &set[victim & (GUARD_TOP_WAYS - 1)];
	__builtin_memcpy(e->address, key->address, 16);
	e->port = key->port;
	e->check = (__u16)(hash >> 48);
	e->weight = least + GUARD_TOP_PACKET;
	e->at = at;
}

#endif
