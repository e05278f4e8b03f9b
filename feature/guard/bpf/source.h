/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* The history of a source: its word, and the changes from epoch to epoch. */
#ifndef WEIR_GUARD_SOURCE_H
#define WEIR_GUARD_SOURCE_H

#define GUARD_IDLE	56 /* epochs, 120 s, until a silent source loses its reservation */
#define GUARD_NEED_CALM 3  /* behaving epochs for a reservation */
#define GUARD_NEED_HOT	4  /* the same under attack */
#define GUARD_BAD	15 /* score of a source above its share when last seen */
#define GUARD_ITSELF	1  /* shown of such a source: itself, not its network, exceeded the share */
#define GUARD_GRANTED	14 /* score of a source with a reservation: the value of shown */
#define GUARD_MAX_SCORE 13
#define GUARD_MAX_COUNT 4000 /* below 2^12, with room for concurrent CPUs */
#define GUARD_EXCEEDED	4095 /* count of a source above its share, independent of later calm */

#define SOURCE_PRINT(w)	   ((__u32)((w) >> 40))
#define SOURCE_EPOCH(w)	   ((__u32)((w) >> 28) & 4095)
#define SOURCE_SCORE(w)	   ((__u32)((w) >> 24) & 15)
#define SOURCE_SHOWN(w)	   ((__u32)((w) >> 12) & 4095)
#define SOURCE_RESERVED(w) (SOURCE_SCORE(w) == GUARD_GRANTED ? SOURCE_SHOWN(w) : 0)
#define SOURCE_COUNT(w)	   ((__u32)(w)&4095)

static __always_inline __u64 source_word(__u32 print, __u32 epoch, __u32 score, __u32 shown,
					 __u32 count)
{
	return (__u64)print << 40 | (__u64)(epoch & 4095) << 28 | (__u64)score << 24 |
	       (__u64)shown << 12 | count;
}

/* guard_limits_of returns the limits in force. */
static __always_inline const struct guard_limits *guard_limits_of(struct guard_state *s)
{
	return &s->total.limits[guard_read(s->total.active) & 1];
}

/* source_age returns the number of epochs since the word was written. */
static __always_inline __u32 source_age(__u64 w, __u32 epoch)
{
	return (epoch - SOURCE_EPOCH(w)) & 4095;
}

/*
 * guard_reserve adjusts the sum of reservations. The caller has swapped a word and passes the
 * difference.
 */
static __always_inline void guard_reserve(struct guard_total *t, __s32 packets, __s32 holders)
{
	if (packets)
		__sync_fetch_and_add(&t->reserved, (__u32)packets);
	if (holders)
		__sync_fetch_and_add(&t->holders, (__u32)holders);
}

/*
 * guard_calm returns the maximum packets an epoch of a behaving source. In a calm guard it is half
 * of the limit, because one of a few clients may send much of it. Under attack it falls from there
 * to twice the fair share, as far as others need the room (bound.h).
 */
static __always_inline __u32 guard_calm(const struct guard_total *t, const struct guard_limits *l,
					int hot)
{
	__u32 step = hot ? guard_read(t->source_step) : 0;
	__u32 calm = l->per_epoch >> 1 >> (step & 31);

	if (hot && calm < t->calm)
		calm = t->calm;
	if (calm < 4)
		calm = 4;
	return calm > GUARD_MAX_COUNT ? GUARD_MAX_COUNT : calm;
}

/*
 * guard_allowed returns the maximum packets an epoch of a behaving source without a reservation.
 * It is guard_calm, or twice the rate shown for enough epochs to earn a reservation. A resolver
 * known before the attack, without room for its reservation, keeps behaving at its rate.
 */
__noinline __u32 guard_allowed(struct guard_state *s, __u64 w, __u32 hot)
{
	__u32 calm, score = SOURCE_SCORE(w), shown;

	if (!s)
		return 0;
	calm = guard_calm(&s->total, guard_limits_of(s), hot);
	if (score < GUARD_NEED_CALM || score > GUARD_MAX_SCORE)
		return calm;
	shown = 2 * SOURCE_SHOWN(w) + 4;
	if (shown > GUARD_MAX_COUNT)
		shown = GUARD_MAX_COUNT;
	return shown > calm ? shown : calm;
}

/*
 * guard_room reports whether reservations may grow by grow, for a source with want afterwards. At
 * most 5/8 of the limit is reserved, under attack 3/4. For sources above twice the fair share, the
 * bound is half of the limit, under attack 3/8: a few large ones never keep out many small ones.
 */
__noinline int guard_room(struct guard_state *s, __u32 hot, __u32 grow, __u32 want)
{
	const struct guard_limits *l;
	__u32 eighth, room;

	if (!s)
		return 0;
	l = guard_limits_of(s);
	eighth = l->per_epoch >> 3;
	room = hot ? (l->per_epoch >> 2) * 3 : eighth * 5;
	if (want > 2 * s->total.fair)
		room = eighth * (hot ? 3 : 4);
	return s->total.reserved + grow <= room;
}

/* source_earns reports whether a source gets its shown rate reserved after score behaving epochs. */
static __always_inline int source_earns(struct guard_state *s, __u32 score, __u32 shown, int hot)
{
	return score >= (hot ? GUARD_NEED_HOT : GUARD_NEED_CALM) &&
	       guard_room(s, hot, shown, shown);
}

/*
 * source_adjust follows the source's rate with its reservation: slowly down, and under attack
 * slowly up.
 */
static __always_inline __u32 source_adjust(struct guard_state *s, __u64 w, __u32 epoch, __u32 calm,
					   int hot)
{
	__u32 reserved = SOURCE_SHOWN(w), count = SOURCE_COUNT(w), want;

	if (count <= reserved)
		return reserved -
		       (reserved > 1 && count < reserved && ((epoch ^ SOURCE_PRINT(w)) & 7) == 0);
	want = count > calm ? calm : count;
	if (hot && want > s->total.fair)
		want = s->total.fair;
	if (hot && want > reserved + 1)
		want = reserved + 1;
	if (want > reserved && guard_room(s, hot, want - reserved, want))
		return want;
	return reserved;
}

/*
 * source_turn brings a word into the current epoch, with packets as its first count. The caller
 * swaps it in and, on success, adds the change to the sum of reservations. Code for few packets is
 * in separate functions: the verifier follows each of them once instead of after every path to it.
 */
__u64 source_turn(struct guard_state *s, __u64 w, __u32 epoch, __u32 hot, __u32 packets)
{
	__u32 shown = SOURCE_SHOWN(w), score = SOURCE_SCORE(w), count = SOURCE_COUNT(w);
	__u32 age = source_age(w, epoch), was = shown;
	struct guard_total *t;
	__u32 calm;

	if (!s)
		return w;
	t = &s->total;
	calm = guard_allowed(s, 0, hot);
	if (age > GUARD_IDLE) {
		score = 0;
		shown = 0;
	} else if (score == GUARD_GRANTED) {
		if (age == 1)
			__sync_fetch_and_add(&t->behaved, 1);
		shown = source_adjust(s, w, epoch, calm, hot);
	} else if (count > guard_allowed(s, w, hot)) {
		score = GUARD_BAD;
		shown = GUARD_ITSELF;
	} else if (score == GUARD_BAD) {
		score = 1;
		shown = 1;
	} else {
		if (score && age == 1)
			__sync_fetch_and_add(&t->behaved, 1);
		if (score < GUARD_MAX_SCORE)
			score++;
		/* Up at once, down by halves. Under attack, shown never rises above the fair share. */
		shown = count >= shown ? count : shown - ((shown - count) >> 1);
		if (hot && shown > t->fair)
			shown = was > t->fair ? (shown < was ? shown : was) : t->fair;
		if (!shown)
			shown = 1;
		if (source_earns(s, score, shown, hot))
			score = GUARD_GRANTED;
	}
	if (score == GUARD_GRANTED)
		t->held = epoch;
	return source_word(SOURCE_PRINT(w), epoch, score, shown, packets & 255);
}

/* guard_epoch computes the fair share, once an epoch: the only divisions are here. */
int guard_epoch(struct guard_state *s, __u32 epoch)
{
	__u32 was, fair, calm, mean, behaved, holders;
	const struct guard_limits *l;
	struct guard_total *t;

	if (!s)
		return 0;
	t = &s->total;
	l = guard_limits_of(s);
	was = t->epoch;
	if ((was == epoch && t->ready) || guard_cas(&t->epoch, was, epoch) != was)
		return 0;
	behaved = __sync_fetch_and_and(&t->behaved, 0);
	holders = t->holders;
	fair = l->per_epoch / (behaved ? behaved : 1);
	if (!fair)
		fair = 1;
	mean = holders ? 2 * t->reserved / holders + 2 : 0;
	calm = fair * 2;
	if (calm < mean)
		calm = mean;
	if (calm < l->per_epoch >> 8)
		calm = l->per_epoch >> 8;
	if (calm > l->per_epoch >> 3 && l->per_epoch >> 3 > 4)
		calm = l->per_epoch >> 3;
	t->fair = fair;
	t->calm = calm;
	t->ready = 1;
	return 0;
}

/*
 * guard_source returns the word of source i: i has the bucket's number and its way. Both indices
 * are applied one after the other. Combined by an OR, verifiers as of Linux 6.1 lose the bound.
 */
static __always_inline __u64 *guard_source(struct guard_state *s, __u32 i)
{
	struct guard_bucket *b = &s->sources[(i / GUARD_WAYS) & (GUARD_BUCKETS - 1)];

	barrier_var(b);
	return &b->source[i & (GUARD_WAYS - 1)];
}

/* guard_print returns the print of source i. */
static __always_inline __u16 *guard_print(struct guard_state *s, __u32 i)
{
	struct guard_prints *p = &s->prints[(i / GUARD_WAYS) & (GUARD_BUCKETS - 1)];

	barrier_var(p);
	return &p->print[i & (GUARD_WAYS - 1)];
}

/* guard_expire removes the reservations of silent sources in a quarter of a bucket. */
static __always_inline void guard_expire(struct guard_total *t, __u64 *source, __u32 epoch)
{
#pragma clang loop unroll(disable)
	for (int i = 0; i < GUARD_CHOICE; i++) {
		__u64 w = source[i];

		/* A source's own epoch may be one ahead. */
		if (SOURCE_RESERVED(w) && source_age(w, epoch + 1) > GUARD_IDLE &&
		    guard_cas(&source[i], w, 0) == w)
			guard_reserve(t, -(__s32)SOURCE_RESERVED(w), -1);
	}
}

/* guard_victim returns the most dispensable one of some sources, or -1. */
static __always_inline int guard_victim(const __u64 *source, __u32 epoch, __u32 random)
{
	__u32 best = 0;
	int victim = -1;

#pragma clang loop unroll(disable)
	for (int i = 0; i < GUARD_CHOICE; i++) {
		__u64 x = source[i];
		__u32 age = source_age(x, epoch + 1);
		__u32 rank = x ? age * 16 + 16 - SOURCE_SCORE(x) : 1 << 20;

		if (!SOURCE_SCORE(x) && SOURCE_COUNT(x) <= 1)
			rank += 1 << 17;
		rank = rank * 8 + ((i + random) & 7); /* random among equals */
		if (SOURCE_RESERVED(x) && age <= GUARD_IDLE)
			rank = 0;
		if (rank > best) {
			best = rank;
			victim = i;
		}
	}
	return victim;
}

/*
 * guard_remember stores an unknown source in its bucket, in place of one of eight others. Sources
 * seen once are replaced first, then the longest silent ones. A live reservation is never replaced.
 * It also removes expired reservations in part of another bucket, so all buckets are visited in
 * time.
 */
int guard_remember(struct guard_state *s, __u32 bucket, __u64 word, __u32 epoch, __u32 random)
{
	__u32 first = bucket * GUARD_WAYS + (random & (GUARD_WAYS - GUARD_CHOICE)), way, next;
	struct guard_total *t;
	__u64 *p, w;
	int victim;

	if (!s)
		return 0;
	t = &s->total;
	victim = guard_victim(guard_source(s, first & -GUARD_CHOICE), epoch, random);
	if (victim >= 0) {
		way = first + victim;
		p = guard_source(s, way);
		w = guard_read(*p);
		if (guard_cas(p, w, word) == w) {
			*guard_print(s, way) = SOURCE_PRINT(word) >> 8;
			if (SOURCE_RESERVED(w))
				guard_reserve(t, -(__s32)SOURCE_RESERVED(w), -1);
		}
	}
	next = __sync_fetch_and_add(&t->sweep, 1);
	guard_expire(t, guard_source(s, next * GUARD_CHOICE), epoch);
	return 0;
}

/* guard_any returns 1 if a bit is set, without a branch. */
static __always_inline __u32 guard_any(__u32 x)
{
	return (x | -x) >> 31;
}

/*
 * guard_find returns the number of a source, or -1. It compares four prints at once and computes
 * the way without a branch. The way is random: branches would be mispredicted, and the verifier
 * would follow the rest once for each of 32 ways.
 */
static __always_inline int guard_find(struct guard_state *s, __u32 bucket, __u32 print)
{
	const __u64 ones = 0x0001000100010001ULL, *prints;
	__u64 sought = (print >> 8) * ones, hits = 0;
	__u32 found;

	bucket &= GUARD_BUCKETS - 1;
	prints = (const __u64 *)s->prints[bucket].print;
	/* Lane l of word i is bit 16 l + i. A lane above an equal one may be set, too. */
	for (int i = 0; i < GUARD_WAYS / 4; i++) {
		__u64 x = prints[i] ^ sought;

		hits |= ((x - ones) & ~x & (ones << 15)) >> (15 - i);
	}
	/*
	 * The bits of lanes 2 and 3 go between and after the bits of 0 and 1: every way is one of
	 * 32 bits.
	 */
	found = hits | hits >> 24;
#pragma clang loop unroll(disable)
	for (int i = 0; i < 3 && found; i++) {
		__u32 bit = found & -found;
		__u32 way = guard_any(bit & 0xffff0000) | guard_any(bit & 0xff00ff00) << 1 |
			    guard_any(bit & 0xaaaaaaaa) << 2 | guard_any(bit & 0xcccccccc) << 3 |
			    guard_any(bit & 0xf0f0f0f0) << 4;

		way |= bucket * GUARD_WAYS;
		if (!guard_rare(SOURCE_PRINT(guard_read(*guard_source(s, way))) != print))
			return way;
		found ^= bit;
	}
	return -1;
}

#endif
