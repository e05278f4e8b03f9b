/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* What probes and answers say once they are known to be genuine. */
#ifndef WEIR_LIVE_HEARD_H
#define WEIR_LIVE_HEARD_H

#define LIVE_CLOCK_BACK (10 * 1000 * LIVE_MS) /* how old an acknowledged answer may be */
#define LIVE_LONGEST	(60 * 1000 * LIVE_MS) /* interval that is believed */

enum live_novelty {
	LIVE_NEWEST,
	LIVE_LATER, /* one that others overtook */
	LIVE_SEEN,
	LIVE_OLD,
};

/*
 * live_slide notes a number in a window of the last 64. Two CPUs at once may lose a bit of each
 * other's: a duplicate then counts twice, and the highest number stays the highest.
 */
static __always_inline enum live_novelty live_slide(__u32 *top, __u64 *window, __u32 seq)
{
	__u32 old = *top;
	__s32 ahead = (__s32)(seq - old);

	if (ahead > 0) {
		if (__sync_val_compare_and_swap(top, old, seq) != old && (__s32)(seq - *top) <= 0)
			return LIVE_LATER; /* another CPU has a newer one */
		*window = ahead < 64 ? *window << (ahead & 63) | 1 : 1;
		return LIVE_NEWEST;
	}
	if (ahead <= -64)
		return LIVE_OLD;
	ahead = -ahead & 63;
	if (*window >> ahead & 1)
		return LIVE_SEEN;
	*window |= 1ULL << ahead;
	return LIVE_LATER;
}

/* live_shaped says why what claims to be a probe or an answer is none; LIVE_COUNTS: it is one. */
static __always_inline __u32 live_shaped(const struct live_packet *f, __u8 hops)
{
	if (f->srh.hdrlen != (sizeof(f->seg) + sizeof(f->tlv)) / 8 || f->srh.type != 4 ||
	    f->srh.segments_left != 0 || f->srh.first_segment != 1 ||
	    f->ip.payload_len != bpf_htons(sizeof(*f) - sizeof(f->ip)) || f->tlv.type != LIVE_TLV ||
	    f->tlv.len != sizeof(f->tlv) - 2 || f->tlv.version != LIVE_VERSION)
		return LIVE_MALFORMED;
	if (f->ip.hop_limit != hops)
		return LIVE_FAR;
	return LIVE_COUNTS;
}

/* live_lives says why a probe is not of the peer's present life; LIVE_COUNTS: it is. */
static __always_inline __u32 live_lives(struct live_state *s, __u64 life, __u64 now)
{
	if (life == s->peer_life)
		return LIVE_COUNTS;
	/*
	 * A peer that began anew has a later life. One whose clock went back has an earlier one, and is
	 * believed once the former has been silent; what is replayed acknowledges nothing new, so that
	 * it brings no session up and keeps none.
	 */
	if ((__s64)(life - s->peer_life) < 0 && s->last_fresh &&
	    now - s->last_fresh < LIVE_CLOCK_BACK)
		return LIVE_STALE;
	s->peer_life = life;
	s->peer_seq = 0;
	s->peer_window = 0;
	s->heard = 0;
	s->acknowledged = 0;
	return LIVE_COUNTS;
}

/* live_probed records a probe. */
static __always_inline __u32 live_probed(struct live_state *s, const struct live_tlv *t, __u64 now)
{
	__u64 got = bpf_be64_to_cpu(t->got), interval = bpf_ntohl(t->interval) * 1000ULL;
	enum live_novelty n;

	n = live_slide(&s->peer_seq, &s->peer_window, bpf_ntohl(t->seq));
	if (n == LIVE_OLD)
		return LIVE_STALE;
	if (n == LIVE_SEEN)
		return LIVE_DUPLICATE;
	__sync_fetch_and_add(&s->heard, 1);
	s->last_seen = now;
	if (t->flags & LIVE_HEARS)
		s->last_hears = now;
	if (n != LIVE_NEWEST)
		return LIVE_COUNTS;
	if (interval >= LIVE_MS && interval <= LIVE_LONGEST && t->multiplier) {
		s->peer_interval = interval;
		s->peer_multiplier = t->multiplier;
	}
	s->peer_had = bpf_ntohl(t->heard);
	/* Path and time only when an answer is acknowledged that was not before, and is recent. */
	if ((__s64)(got - s->acknowledged) > 0 && (__s64)(now - got) >= 0 &&
	    now - got < LIVE_CLOCK_BACK && s->peer_interval) {
		s->acknowledged = got;
		s->last_fresh = now;
		/* Nor is a farewell believed that somebody has recorded. */
		if (t->flags & LIVE_CLOSING)
			s->closed = now;
	}
	return LIVE_COUNTS;
}

/* live_bucket is the number of a round-trip time's bucket: four to each power of two from 1,024 ns on. */
static __always_inline __u32 live_bucket(__u64 ns)
{
	__u32 log = 0, v, b;

	ns >>= 8; /* the two bits below the first one tell the four apart */
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
	return b < LIVE_BUCKETS ? b : LIVE_BUCKETS - 1;
}

static __always_inline __u64 live_distance(__u64 a, __u64 b)
{
	return a > b ? a - b : b - a;
}

/*
 * live_timed takes a round trip into account. For the mean an answer that took far longer than those
 * before counts as twice their time: it was a stall that kept it, most likely, and must not have
 * every probe wait as long. Where the way has become longer the mean follows in some ten probes.
 */
static __always_inline void live_timed(const struct live_setup *c, struct live_state *s, __u64 rtt)
{
	__u64 d, most = 2 * s->rtt_mean + c->grace / 8;
	__u32 b = live_bucket(rtt);

	if (b < LIVE_BUCKETS)
		__sync_fetch_and_add(&s->rtt[b], 1);
	if (!s->rtt_min || rtt < s->rtt_min)
		s->rtt_min = rtt;
	if (s->rtt_last) {
		d = live_distance(rtt, s->rtt_last);
		s->jitter = s->jitter - s->jitter / 16 + d / 16;
	}
	s->rtt_last = rtt;
	if (rtt > most)
		rtt = most;
	d = live_distance(rtt, s->rtt_mean);
	s->rtt_dev = s->rtt_dev - s->rtt_dev / 4 + d / 4;
	s->rtt_mean = s->rtt_mean - s->rtt_mean / 8 + rtt / 8;
}

/* live_answered records an answer. */
static __always_inline __u32 live_answered(const struct live_setup *c, struct live_state *s,
					   const struct live_tlv *t, __u64 now)
{
	__u32 seq = bpf_ntohl(t->seq), sent = s->seq;
	enum live_novelty n;

	if (t->life != bpf_cpu_to_be64(c->life) || (__s32)(seq - sent) > 0)
		return LIVE_STALE;
	/* The lowest numbers of a life come before the window does. */
	n = live_slide(&s->answered, &s->window, seq);
	if (n == LIVE_OLD)
		return LIVE_STALE;
	if (n == LIVE_SEEN)
		return LIVE_DUPLICATE;
	__sync_fetch_and_add(&s->answers, 1);
	s->last_answer = now;
	live_timed(c, s, now - bpf_be64_to_cpu(t->sent));
	if (n != LIVE_NEWEST || c->echo)
		return LIVE_COUNTS;
	s->echoed = t->got;
	s->peer_heard = bpf_ntohl(t->heard);
	s->last_hears = now;
	if (t->flags & LIVE_CLOSING)
		s->closed = now;
	return LIVE_COUNTS;
}

#endif
