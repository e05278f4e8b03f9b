/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * The ticks come from liveness' tick source (feature/reroute/liveness). bfd_tick runs before
 * liveness_tick at the same devices, and leaves the packet unchanged.
 */
#ifndef WEIR_BFD_TICK_H
#define WEIR_BFD_TICK_H

#include "send.h"

#define BFD_LOOPS 16

struct bfd_clockwork {
	__u32 sessions; /* one more than the highest place in use */
	__u32 tick;	/* longest us between ticks; 0: unknown */
	__u64 beat; /* time of the last tick: the process holding the links of bfdd's sessions may have ended */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct bfd_clockwork);
} bfd_clock SEC(".maps");

/*
 * Time a CPU with a loop was last seen stalled: liveness' struct liveness_common. Liveness writes
 * it.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} liveness_shared SEC(".maps");

struct bfd_round {
	struct __sk_buff *skb;
	struct bfd_scratch *scratch;
	__u64 now;
	__u64 stalled;
	__u64 tick; /* ns */
};

static long bfd_visit(__u32 place, struct bfd_round *r)
{
	if (place >= BFD_SESSIONS || !r->scratch)
		return 1;
	bfd_step(r->skb, place, r->scratch, r->now, r->stalled, r->tick);
	return 0;
}

/*
 * bfd_stalled returns the time a CPU of this host was last seen stalled. Liveness checks the other
 * loops, but its tick comes after this one. After a stall of all CPUs the first tick would take its
 * own silence for the neighbor's, so this checks it too.
 */
static __always_inline __u64 bfd_stalled(const struct bfd_clockwork *m, __u64 *stalled, __u64 now)
{
	__s64 late = now - m->beat - m->tick * BFD_US;

	if (m->beat && m->tick && late > (__s64)BFD_LATE && late < (__s64)BFD_PATIENCE)
		*stalled = now;
	return *stalled;
}

SEC("tc")
int bfd_tick(struct __sk_buff *skb)
{
	struct bfd_round r = { .skb = skb };
	__u32 zero = 0, length = skb->len, mark = skb->mark, priority = skb->priority;
	struct bfd_clockwork *m = bpf_map_lookup_elem(&bfd_clock, &zero);
	__u64 *stalled = bpf_map_lookup_elem(&liveness_shared, &zero);

	r.scratch = bpf_map_lookup_elem(&bfd_scratches, &zero);
	if (!m || !stalled || !r.scratch || !m->sessions)
		return BFD_PASS;
	if (length < sizeof(r.scratch->head) ||
	    bpf_skb_load_bytes(skb, 0, r.scratch->head, sizeof(r.scratch->head)))
		return BFD_PASS;
	r.now = bfd_now();
	r.stalled = bfd_stalled(m, stalled, r.now);
	m->beat = r.now;
	r.tick = m->tick * BFD_US;
	bpf_loop(m->sessions < BFD_SESSIONS ? m->sessions : BFD_SESSIONS, bfd_visit, &r, 0);
	skb->mark = mark;
	skb->priority = priority;
	if (skb->len != length && bpf_skb_change_tail(skb, length, 0))
		return TC_ACT_SHOT; /* liveness puts another packet into the loop */
	bpf_skb_store_bytes(skb, 0, r.scratch->head, sizeof(r.scratch->head), 0);
	return BFD_PASS;
}

#endif
