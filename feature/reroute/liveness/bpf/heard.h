/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Handling of genuine probes and answers. */
#ifndef WEIR_LIVENESS_HEARD_H
#define WEIR_LIVENESS_HEARD_H

#define LIVENESS_CLOCK_BACK (10 * 1000 * LIVENESS_MS) /* oldest acknowledged answer */
#define LIVENESS_LONGEST    (60 * 1000 * LIVENESS_MS) /* longest accepted interval */

enum liveness_novelty {
	LIVENESS_NEWEST,
	LIVENESS_LATER, /* overtaken by others */
	LIVENESS_SEEN,
	LIVENESS_OLD,
};

/*
 * liveness_slide records a number in a window of the last 64. Two CPUs at once may lose a bit of
 * each other's. A duplicate is then counted twice, but the highest number stays the highest.
 */
static __always_inline enum liveness_novelty liveness_slide(__u32 *top, __u64 *window, __u32 seq)
{
	__u32 old = *top;
	__s32 ahead = (__s32)(seq - old);

	if (ahead > 0) {
		if (__sync_val_compare_and_swap(top, old, seq) != old && (__s32)(seq - *top) <= 0)
			return LIVENESS_LATER; /* another CPU has a newer one */
		*window = ahead < 64 ? *window << (ahead & 63) | 1 : 1;
		return LIVENESS_NEWEST;
	}
	if (ahead <= -64)
		return LIVENESS_OLD;
	ahead = -ahead & 63;
	if (*window >> ahead & 1)
		return LIVENESS_SEEN;
	*window |= 1ULL << ahead;
	return LIVENESS_LATER;
}

/*
 * liveness_shaped checks the form of a probe or an answer. It returns the reason for a rejection,
 * or LIVENESS_COUNTS.
 */
static __always_inline __u32 liveness_shaped(const struct liveness_packet *f, __u8 hops)
{
	if (f->srh.hdrlen != (sizeof(f->seg) + sizeof(f->tlv)) / 8 || f->srh.type != 4 ||
	    f->srh.segments_left != 0 || f->srh.first_segment != 1 ||
	    f->ip.payload_len != bpf_htons(sizeof(*f) - sizeof(f->ip)) ||
	    f->tlv.type != LIVENESS_TLV || f->tlv.len != sizeof(f->tlv) - 2 ||
	    f->tlv.version != LIVENESS_VERSION)
		return LIVENESS_MALFORMED;
	if (f->ip.hop_limit != hops)
		return LIVENESS_FAR;
	return LIVENESS_COUNTS;
}

/*
 * liveness_lives checks the incarnation of a probe. It returns the reason for a rejection, or
 * LIVENESS_COUNTS.
 */
static __always_inline __u32 liveness_lives(struct liveness_state *s, __u64 life, __u64 now)
{
	if (life == s->peer_life)
		return LIVENESS_COUNTS;
	/*
	 * A restarted peer has a later incarnation. A peer with its clock set back has an earlier
	 * one, accepted once the former has been silent. A replayed probe acknowledges nothing new,
	 * so it neither brings a session up nor keeps it up.
	 */
	if ((__s64)(life - s->peer_life) < 0 && s->last_fresh &&
	    now - s->last_fresh < LIVENESS_CLOCK_BACK)
		return LIVENESS_STALE;
	s->peer_life = life;
	s->peer_seq = 0;
	s->peer_window = 0;
	s->heard = 0;
	s->acknowledged = 0;
	return LIVENESS_COUNTS;
}

/* liveness_probed records a probe. */
static __always_inline __u32 liveness_probed(struct liveness_state *s, const struct liveness_tlv *t,
					     __u64 now)
{
	__u64 got = bpf_be64_to_cpu(t->got), interval = bpf_ntohl(t->interval) * 1000ULL;
	enum liveness_novelty n;

	n = liveness_slide(&s->peer_seq, &s->peer_window, bpf_ntohl(t->seq));
	if (n == LIVENESS_OLD)
		return LIVENESS_STALE;
	if (n == LIVENESS_SEEN)
		return LIVENESS_DUPLICATE;
	__sync_fetch_and_add(&s->heard, 1);
	s->last_seen = now;
	if (t->flags & LIVENESS_HEARS)
		s->last_hears = now;
	if (n != LIVENESS_NEWEST)
		return LIVENESS_COUNTS;
	if (interval >= LIVENESS_MS && interval <= LIVENESS_LONGEST && t->multiplier) {
		s->peer_interval = interval;
		s->peer_multiplier = t->multiplier;
	}
	s->peer_had = bpf_ntohl(t->heard);
	/* The path and the time count only with a new and recent acknowledgement. */
	if ((__s64)(got - s->acknowledged) > 0 && (__s64)(now - got) >= 0 &&
	    now - got < LIVENESS_CLOCK_BACK && s->peer_interval) {
		s->acknowledged = got;
		s->last_fresh = now;
		/* Nor does a recorded farewell count. */
		if (t->flags & LIVENESS_CLOSING)
			s->closed = now;
	}
	return LIVENESS_COUNTS;
}

/* liveness_bucket returns the bucket of a round-trip time: four per power of two, from 1,024 ns. */
static __always_inline __u32 liveness_bucket(__u64 ns)
{
	__u32 log = 0, v, b;

	ns >>= 8; /* two bits below the first one select among the four */
	if (ns < 4)
		return 0;
	v = ns >> 32 ? ~0U : (__u32)ns;
	if (v >> 16)
		log += 16, v >>= 16;
	if (v >> 8)
		log += 8, v >>= 8;
	if (v >> 4)
		log += 4, v >>= 4;
	if (v >> 2)
		log += 2, v >>= 2;
	if (v >> 1)
		log += 1;
	b = (log - 2) * 4 + (__u32)(ns >> (log - 2) & 3);
	return b < LIVENESS_BUCKETS ? b : LIVENESS_BUCKETS - 1;
}

static __always_inline __u64 liveness_distance(__u64 a, __u64 b)
{
	return a > b ? a - b : b - a;
}

/*
 * liveness_timed records a round trip. An answer much slower than the mean counts as twice the mean
 * plus an eighth of grace. It was probably delayed by a stall, and must not lengthen the wait of
 * every probe. After a change of the path the mean adapts within some ten probes.
 */
static __always_inline void liveness_timed(const struct liveness_setup *c, struct liveness_state *s,
					   __u64 rtt)
{
	__u64 d, most = 2 * s->rtt_mean + c->grace / 8;
	__u32 b = liveness_bucket(rtt);

	if (b < LIVENESS_BUCKETS)
		__sync_fetch_and_add(&s->rtt[b], 1);
	if (!s->rtt_min || rtt < s->rtt_min)
		s->rtt_min = rtt;
	if (s->rtt_last) {
		d = liveness_distance(rtt, s->rtt_last);
		s->jitter = s->jitter - s->jitter / 16 + d / 16;
	}
	s->rtt_last = rtt;
	if (rtt > most)
		rtt = most;
	d = liveness_distance(rtt, s->rtt_mean);
	s->rtt_dev = s->rtt_dev - s->rtt_dev / 4 + d / 4;
	s->rtt_mean = s->rtt_mean - s->rtt_mean / 8 + rtt / 8;
}

/* liveness_answered records an answer. */
static __always_inline __u32 liveness_answered(const struct liveness_setup *c,
					       struct liveness_state *s,
					       const struct liveness_tlv *t, __u64 now)
{
	__u32 seq = bpf_ntohl(t->seq), sent = s->seq;
	enum liveness_novelty n;

	if (t->life != bpf_cpu_to_be64(c->life) || (__s32)(seq - sent) > 0)
		return LIVENESS_STALE;
	/* The lowest numbers of an incarnation precede the window. */
	n = liveness_slide(&s->answered, &s->window, seq);
	if (n == LIVENESS_OLD)
		return LIVENESS_STALE;
	if (n == LIVENESS_SEEN)
		return LIVENESS_DUPLICATE;
	__sync_fetch_and_add(&s->answers, 1);
	s->last_answer = now;
	liveness_timed(c, s, now - bpf_be64_to_cpu(t->sent));
	if (n != LIVENESS_NEWEST || c->echo)
		return LIVENESS_COUNTS;
	s->echoed = t->got;
	s->peer_heard = bpf_ntohl(t->heard);
	s->last_hears = now;
	if (t->flags & LIVENESS_CLOSING)
		s->closed = now;
	return LIVENESS_COUNTS;
}

#endif
