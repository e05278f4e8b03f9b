/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Bounds for unreserved sources before they count as heavy. A source, network or source port is
 * refused for taking the room of others. Its size alone is no reason: one /24 may have all clients
 * of a service. Both bounds therefore begin high. They fall while two conditions hold: returning
 * sources are refused, and a quarter of these packets belong to senders affected by a lower bound.
 * They rise slowly while all have room.
 */
#ifndef WEIR_GUARD_BOUND_H
#define WEIR_GUARD_BOUND_H

#define GUARD_WINDOW_SHIFT  27	/* ns: 134 ms */
#define GUARD_MET	    32	/* windows, 4.3 s, until bounds rise by a step */
#define GUARD_MET_FIRST	    -96 /* start of the count after a fall: 17 s */
#define GUARD_FORGOTTEN	    64	/* windows without an unreserved source, until bounds are reset */
#define GUARD_PATTERN_STEPS 4	/* from twice the limit down to guard_limits.pattern, an eighth */
#define GUARD_SOURCE_STEPS  10	/* from half of the limit down to calm */

/*
 * Refused packets of sources seen before, three counts in a word: all; of patterns above
 * guard_limits.pattern; of sources above calm.
 */
#define GUARD_UNMET	  1ULL
#define GUARD_UNMET_WIDE  (1ULL << 21)
#define GUARD_UNMET_LARGE (1ULL << 42)
#define GUARD_UNMET_MASK  ((1U << 21) - 1)

/*
 * guard_window moves the bounds, once a window, on the first CPU to notice it. They fall in the
 * second consecutive window without room, because rates are still being measured in the first one.
 * They rise after a long time with room for all, and after a fall even later. Otherwise an attack
 * stopped only by the lower bound would be admitted again and again.
 */
int guard_window(struct guard_state *s, __u32 window)
{
	__u32 was, unmet, least, lowered = 0;
	struct guard_total *t;
	__u64 all;
	__s32 met;

	if (!s)
		return 0;
	t = &s->total;
	was = guard_read(t->window);
	if (was == window || guard_cas(&t->window, was, window) != was)
		return 0;
	all = __sync_fetch_and_and(&t->unmet, 0);
	unmet = (__u32)all & GUARD_UNMET_MASK;
	met = t->met;
	least = (t->limits[guard_read(t->active) & 1].per_epoch >> 8) + 2;
	if (window - was > GUARD_FORGOTTEN) {
		t->pattern_step = 0;
		t->source_step = 0;
		met = 1;
	} else if (unmet > least) {
		if (met == 0 || met == GUARD_MET_FIRST) {
			if ((__u32)(all >> 42) >= unmet >> 2 &&
			    t->source_step < GUARD_SOURCE_STEPS) {
				t->source_step += 2;
				lowered = 1;
			}
			if (((__u32)(all >> 21) & GUARD_UNMET_MASK) >= unmet >> 2 &&
			    t->pattern_step < GUARD_PATTERN_STEPS) {
				t->pattern_step++;
				lowered = 1;
			}
		}
		met = lowered ? GUARD_MET_FIRST : 0;
	} else {
		met += window - was;
		if (met >= GUARD_MET) {
			met = 1;
			if (t->pattern_step)
				t->pattern_step--;
			if (t->source_step)
				t->source_step--;
		}
	}
	t->met = met;
	return 0;
}

#endif
