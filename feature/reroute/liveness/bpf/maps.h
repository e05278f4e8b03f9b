/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef WEIR_LIVENESS_MAPS_H
#define WEIR_LIVENESS_MAPS_H

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LIVENESS_SESSIONS);
	__type(key, __u32);
	__type(value, struct liveness_setup);
} liveness_setups SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LIVENESS_SESSIONS);
	__type(key, __u32);
	__type(value, struct liveness_state);
} liveness_states SEC(".maps");

/*
 * The time a loop must visit a session again: one row per loop. It is derived from setup and state,
 * and separate because these take several cache lines. Only programs use it. A newly loaded program
 * starts with 0: visit now.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LIVENESS_LOOPS * LIVENESS_SESSIONS);
	__type(key, __u32);
	__type(value, __u64);
} liveness_wakes SEC(".maps");

/* Number of a session on the wire, the same at both ends, to its index. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LIVENESS_SESSIONS);
	__type(key, __u32);
	__type(value, __u32);
} liveness_ids SEC(".maps");

/*
 * Index of the last session seen with these low bits in its number. The setup confirms or refutes
 * it. It saves the hash map's lookup, which costs as much as a signature. Only programs use it.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LIVENESS_SESSIONS);
	__type(key, __u32);
	__type(value, __u32);
} liveness_recent SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct liveness_tick_source);
} liveness_clockwork SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LIVENESS_LOOPS);
	__type(key, __u32);
	__type(value, struct liveness_beat);
} liveness_beats SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct liveness_common);
} liveness_shared SEC(".maps");

/* A timer per session, for verdicts between two ticks. A working session never starts it. */
struct liveness_timer {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LIVENESS_SESSIONS);
	__type(key, __u32);
	__type(value, struct liveness_timer);
} liveness_timers SEC(".maps");

/* By device, like link states. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, REROUTE_LINKS);
	__type(key, __u32);
	__type(value, struct liveness_move);
} liveness_moves SEC(".maps");

/* Counts of packets without a known session. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LIVENESS_COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} liveness_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536);
} liveness_events SEC(".maps");

/* Tests set the time. Constant folding removes the branch in normal use. */
const volatile __u32 liveness_clock_given = 0;
__u64 liveness_clock = 0;

static __always_inline __u64 liveness_now(void)
{
	if (liveness_clock_given)
		return liveness_clock;
	return bpf_ktime_get_ns();
}

static __always_inline void liveness_count(struct liveness_state *s, __u32 reason)
{
	__u64 *n;

	if (s) {
		if (reason < LIVENESS_COUNTS)
			__sync_fetch_and_add(&s->counts[reason], 1);
		return;
	}
	n = bpf_map_lookup_elem(&liveness_counts, &reason);
	if (n)
		*n += 1;
}

/* liveness_tag signs a TLV and its returning segment. */
static __always_inline __u64 liveness_tag(const struct liveness_setup *c,
					  const struct liveness_words *t,
					  const struct liveness_address *back)
{
	return weir_siphash(c->key, (const __u64 *)t, (const __u64 *)back);
}

/* liveness_signed reports whether a probe or an answer has a valid tag. */
static __always_inline int liveness_signed(const struct liveness_setup *c,
					   const struct liveness_packet *f)
{
	const struct liveness_words *t = (const struct liveness_words *)&f->tlv;

	return t->tag == liveness_tag(c, t, &f->seg[0]);
}

/* liveness_pair combines two numbers in a word. */
static __always_inline __be64 liveness_pair(__u32 high, __u32 low)
{
	return bpf_cpu_to_be64((__u64)high << 32 | low);
}

/*
 * liveness_packet returns the IPv6 packet at an offset. It returns 0 if the packet is shorter or
 * not linear.
 */
static __always_inline struct liveness_packet *liveness_packet(const struct __sk_buff *skb,
							       __u32 from)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (data + from + sizeof(struct liveness_packet) > end)
		return 0;
	return data + from;
}

#endif
