/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Which CPUs of this host do not run, by the beats of the loops. */
#ifndef WEIR_LIVENESS_STALL_H
#define WEIR_LIVENESS_STALL_H

/*
 * liveness_place is the place of a loop in the clockwork's arrays. Compilers know that it is one and
 * leave bounds out that they have proven; verifiers up to Linux 6.12 do not follow the proof.
 */
static __always_inline __u32 liveness_place(__u32 loop)
{
	asm volatile("" : "+r"(loop));
	return loop & (LIVENESS_LOOPS - 1);
}

/*
 * liveness_look notes a stall if a loop, but for one, is later than LIVENESS_LATE. It is called with every
 * verdict: a CPU that has not run for as long as a verdict takes is found by then.
 */
static __always_inline __u64 liveness_look(const struct liveness_tick_source *m,
					   struct liveness_common *shared, __u32 but, __u64 now)
{
	struct liveness_beat *o;
	__u32 loop, key;
	__s64 late;

	for (loop = 0; loop < LIVENESS_LOOPS; loop++) {
		if (loop >= m->loops)
			break;
		key = loop;
		o = bpf_map_lookup_elem(&liveness_beats, &key);
		if (!o || loop == but)
			continue;
		/* One that has been silent for long has ended, and tells nothing of its CPU. */
		late = (__s64)(now - o->beat - m->tick);
		if (late > (__s64)LIVENESS_LATE && late < (__s64)LIVENESS_PATIENCE)
			shared->stalled = now;
	}
	return shared->stalled;
}

/* liveness_stalls says when a CPU with a loop was last seen not to run, and notes it if it is this one. */
static __always_inline __u64 liveness_stalls(struct liveness_beat *b,
					     const struct liveness_tick_source *m, __u32 loop,
					     __u64 now)
{
	__u32 key = 0;
	struct liveness_common *shared = bpf_map_lookup_elem(&liveness_shared, &key);
	__s64 late;

	if (!shared)
		return 0;
	late = b->beat ? (__s64)(now - b->beat - m->tick) : 0;
	if (late > (__s64)LIVENESS_LATE) {
		b->stalls++;
		if (late > (__s64)b->longest)
			b->longest = late;
		shared->stalled = now;
	}
	return liveness_look(m, shared, loop, now);
}

/* liveness_silent says whether a loop has missed its beat, so that another one does its work. */
static __always_inline __u32 liveness_silent(const struct liveness_tick_source *m, __u32 loop,
					     __u64 now)
{
	struct liveness_beat *o = bpf_map_lookup_elem(&liveness_beats, &loop);

	return !o || (__s64)(now - o->beat) > (__s64)(m->tick + m->tick / 8);
}

#endif
