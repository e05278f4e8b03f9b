/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Which CPUs of this host do not run, by the beats of the loops. */
#ifndef WEIR_LIVE_STALL_H
#define WEIR_LIVE_STALL_H

/*
 * live_place is the place of a loop in the clockwork's arrays. Compilers know that it is one and
 * leave bounds out that they have proven; verifiers up to Linux 6.12 do not follow the proof.
 */
static __always_inline __u32 live_place(__u32 loop)
{
	asm volatile("" : "+r"(loop));
	return loop & (LIVE_LOOPS - 1);
}

/*
 * live_look notes a stall if a loop, but for one, is later than LIVE_LATE. It is called with every
 * verdict: a CPU that has not run for as long as a verdict takes is found by then.
 */
static __always_inline __u64 live_look(const struct live_metronome *m, struct live_common *shared,
				       __u32 but, __u64 now)
{
	struct live_beat *o;
	__u32 loop, key;
	__s64 late;

	for (loop = 0; loop < LIVE_LOOPS; loop++) {
		if (loop >= m->loops)
			break;
		key = loop;
		o = bpf_map_lookup_elem(&live_beats, &key);
		if (!o || loop == but)
			continue;
		/* One that has been silent for long has ended, and tells nothing of its CPU. */
		late = (__s64)(now - o->beat - m->tick);
		if (late > (__s64)LIVE_LATE && late < (__s64)LIVE_PATIENCE)
			shared->stalled = now;
	}
	return shared->stalled;
}

/* live_stalls says when a CPU with a loop was last seen not to run, and notes it if it is this one. */
static __always_inline __u64 live_stalls(struct live_beat *b, const struct live_metronome *m,
					 __u32 loop, __u64 now)
{
	__u32 key = 0;
	struct live_common *shared = bpf_map_lookup_elem(&live_shared, &key);
	__s64 late;

	if (!shared)
		return 0;
	late = b->beat ? (__s64)(now - b->beat - m->tick) : 0;
	if (late > (__s64)LIVE_LATE) {
		b->stalls++;
		if (late > (__s64)b->longest)
			b->longest = late;
		shared->stalled = now;
	}
	return live_look(m, shared, loop, now);
}

/* live_silent says whether a loop has missed its beat, so that another one does its work. */
static __always_inline __u32 live_silent(const struct live_metronome *m, __u32 loop, __u64 now)
{
	struct live_beat *o = bpf_map_lookup_elem(&live_beats, &loop);

	return !o || (__s64)(now - o->beat) > (__s64)(m->tick + m->tick / 8);
}

#endif
