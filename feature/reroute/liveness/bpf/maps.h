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
 * When a loop has to look at a session again: a row for each loop. It follows from the setup and the state,
 * and is here since these take several lines of the cache each. Programs have it to themselves: in those
 * that are loaded anew it is 0, and says nothing.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LIVENESS_LOOPS * LIVENESS_SESSIONS);
	__type(key, __u32);
	__type(value, __u64);
} liveness_wakes SEC(".maps");

/* A session's number on the wire, which both ends have, to its place. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LIVENESS_SESSIONS);
	__type(key, __u32);
	__type(value, __u32);
} liveness_ids SEC(".maps");

/*
 * The place of the last session whose number ends so: whether it is the one looked for its setup says.
 * The hash map takes as long as a signature. Programs have it to themselves.
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

/*
 * A timer for each session: a verdict that falls between two ticks is found at its moment. Of a session
 * that works none is ever started.
 */
struct liveness_timer {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LIVENESS_SESSIONS);
	__type(key, __u32);
	__type(value, struct liveness_timer);
} liveness_timers SEC(".maps");

/* By the device, as words of links are. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, REROUTE_LINKS);
	__type(key, __u32);
	__type(value, struct liveness_move);
} liveness_moves SEC(".maps");

/* What cannot be said to be of a session. */
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

/* Tests give the time. The verifier removes what a constant rules out, so it costs nothing else. */
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

/* liveness_tag signs a TLV and where it returns to. */
static __always_inline __u64 liveness_tag(const struct liveness_setup *c,
					  const struct liveness_words *t,
					  const struct liveness_address *back)
{
	return weir_siphash(c->key, (const __u64 *)t, (const __u64 *)back);
}

/* liveness_signed says whether a probe or an answer is what somebody has signed who has the key. */
static __always_inline int liveness_signed(const struct liveness_setup *c,
					   const struct liveness_packet *f)
{
	const struct liveness_words *t = (const struct liveness_words *)&f->tlv;

	return t->tag == liveness_tag(c, t, &f->seg[0]);
}

/* liveness_pair is a word of two numbers. */
static __always_inline __be64 liveness_pair(__u32 high, __u32 low)
{
	return bpf_cpu_to_be64((__u64)high << 32 | low);
}

/*
 * liveness_packet is the IPv6 packet at an offset of what the program sees, where it is. 0: it is shorter, or lies
 * elsewhere in part.
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
