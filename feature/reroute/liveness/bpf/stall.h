/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Detection of stalled CPUs by the ticks of the loops. */
#ifndef WEIR_LIVENESS_STALL_H
#define WEIR_LIVENESS_STALL_H

/*
 * liveness_place returns a loop's index in the arrays of the tick source. The mask repeats a check
 * the compiler would otherwise remove as proven. Verifiers up to Linux 6.12 do not follow the
 * proof.
 */
static __always_inline __u32 liveness_place(__u32 loop)
{
	asm volatile("" : "+r"(loop));
	return loop & (LIVENESS_LOOPS - 1);
}

/*
 * liveness_look records a stall if any loop except but is later than LIVENESS_LATE. It runs with
 * every verdict: a CPU stalled for as long as a verdict takes is found by then.
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
		/* A loop silent for longer has ended, and tells nothing about its CPU. */
		late = (__s64)(now - o->beat - m->tick);
		if (late > (__s64)LIVENESS_LATE && late < (__s64)LIVENESS_PATIENCE)
			shared->stalled = now;
	}
	return shared->stalled;
}

/*
 * liveness_stalls returns the time a CPU with a loop was last seen stalled. It also records a stall
 * of this CPU.
 */
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

/* liveness_silent reports whether a loop has missed its tick, so another loop does its work. */
static __always_inline __u32 liveness_silent(const struct liveness_tick_source *m, __u32 loop,
					     __u64 now)
{
	struct liveness_beat *o = bpf_map_lookup_elem(&liveness_beats, &loop);

	return !o || (__s64)(now - o->beat) > (__s64)(m->tick + m->tick / 8);
}

#endif
