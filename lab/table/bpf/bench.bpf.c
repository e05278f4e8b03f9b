//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The table and LPM_TRIE side by side. Each program looks up many keys in one of them and
 * measures the time itself. All run by BPF_PROG_TEST_RUN; its fixed cost is too high to time a
 * single lookup.
 */
#include <linux/bpf.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "table.h"

#define KEYS   (1 << 20)
#define PROBES 64

TABLE_MAPS(bench)

/* Keys in host byte order, 16 of IPv4 or 4 of IPv6 a line. Like packets they come from memory. */
struct line {
	__u32 word[16];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, KEYS / 4);
	__type(key, __u32);
	__type(value, struct line);
} keys SEC(".maps");

struct key4 {
	__u32 bits;
	__u32 address;
};

struct key6 {
	__u32 bits;
	__u32 address[4];
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, KEYS);
	__type(key, struct key4);
	__type(value, __u32);
} trie4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, KEYS);
	__type(key, struct key6);
	__type(value, __u32);
} trie6 SEC(".maps");

/* Results of both for each key. */
struct answer {
	__u32 table;
	__u32 trie;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, KEYS);
	__type(key, __u32);
	__type(value, struct answer);
} answers SEC(".maps");

/* A looked-up address while the table changes, and its two legal values. */
struct probe {
	__u32 word[4];
	__u32 legal[2];
	__u32 wrong; /* the last illegal value */
	__u32 pad;
	__u64 seen[2];
	__u64 torn;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, PROBES);
	__type(key, __u32);
	__type(value, struct probe);
} probes SEC(".maps");

/* dependence is always 0, unknown to the compiler and the CPU. */
volatile __u32 lookups, start, dependence, probe_count, touch_lines;
volatile __u64 nanoseconds, checksum, hits;

/*
 * round is the state of a loop. It begins with values read from memory: for constants the
 * verifier would walk the loop for each of their values.
 */
struct round {
	__u64 checksum;
	__u64 hits;
	__u32 start;
	__u32 last;
	__u32 dependence;
	__u32 probes;
	__u32 lines;
};

static __always_inline const __u32 *key4(__u32 i)
{
	__u32 at = i >> 4 & (KEYS / 16 - 1);
	struct line *l = bpf_map_lookup_elem(&keys, &at);

	return l ? &l->word[i & 15] : 0;
}

static __always_inline const __u32 *key6(__u32 i)
{
	__u32 at = i >> 2 & (KEYS / 4 - 1);
	struct line *l = bpf_map_lookup_elem(&keys, &at);

	return l ? &l->word[(i & 3) * 4] : 0;
}

static __always_inline __u32 find_table4(const __u32 *key)
{
	return TABLE_LOOKUP4(bench, *key);
}

static __always_inline __u32 find_table6(const __u32 *key)
{
	return TABLE_LOOKUP6(bench, key);
}

static __always_inline __u32 find_trie4(const __u32 *key)
{
	struct key4 k = { 32, bpf_htonl(*key) };
	__u32 *value = bpf_map_lookup_elem(&trie4, &k);

	return value ? *value : 0;
}

static __always_inline __u32 find_trie6(const __u32 *key)
{
	struct key6 k = {
		128, { bpf_htonl(key[0]), bpf_htonl(key[1]), bpf_htonl(key[2]), bpf_htonl(key[3]) }
	};
	__u32 *value = bpf_map_lookup_elem(&trie6, &k);

	return value ? *value : 0;
}

static __always_inline void account(struct round *r, __u32 i, __u32 value)
{
	r->checksum += (__u64)value * (i + 1);
	r->hits += value != 0;
}

static __always_inline void begin(struct round *r)
{
	r->start = start;
	r->last = dependence;
	r->dependence = dependence;
	r->probes = probe_count;
	r->lines = touch_lines;
	r->checksum = dependence;
	r->hits = dependence;
}

static __always_inline int finish(const struct round *r, __u64 began)
{
	nanoseconds = bpf_ktime_get_ns() - began;
	checksum = r->checksum;
	hits = r->hits;
	return XDP_PASS;
}

#define PROGRAM(name)                                  \
	SEC("xdp")                                     \
	int name(struct xdp_md *ctx)                   \
	{                                              \
		struct round r;                        \
		__u64 began;                           \
                                                       \
		begin(&r);                             \
		began = bpf_ktime_get_ns();            \
		bpf_loop(lookups, name##_step, &r, 0); \
		return finish(&r, began);              \
	}

/*
 * Latency: the next key depends on the result, so the CPU cannot begin a lookup before the last
 * one has ended. A program deciding about a packet has the same limit. Independent: lookups may
 * overlap.
 */
#define MEASURE(what, family)                                                             \
	static long what##family##_latency_step(__u32 i, struct round *r)                 \
	{                                                                                 \
		const __u32 *key = key##family(r->start + i + (r->last & r->dependence)); \
                                                                                          \
		if (!key)                                                                 \
			return 1;                                                         \
		r->last = find_##what##family(key);                                       \
		account(r, i, r->last);                                                   \
		return 0;                                                                 \
	}                                                                                 \
	static long what##family##_independent_step(__u32 i, struct round *r)             \
	{                                                                                 \
		const __u32 *key = key##family(r->start + i);                             \
                                                                                          \
		if (!key)                                                                 \
			return 1;                                                         \
		account(r, i, find_##what##family(key));                                  \
		return 0;                                                                 \
	}                                                                                 \
	PROGRAM(what##family##_latency)                                                   \
	PROGRAM(what##family##_independent)

MEASURE(table, 4)
MEASURE(table, 6)
MEASURE(trie, 4)
MEASURE(trie, 6)

/*
 * touch reads one word of a line chosen by the key, among as many lines as in the table's pages.
 * This is the minimum for any table of this size with entries outside the caches.
 */
#define TOUCH(family)                                                                             \
	static long touch##family##_latency_step(__u32 i, struct round *r)                        \
	{                                                                                         \
		const __u32 *key = key##family(r->start + i + (r->last & r->dependence));         \
		struct table_segment *s;                                                          \
		__u32 line, segment;                                                              \
                                                                                                  \
		if (!key)                                                                         \
			return 1;                                                                 \
		line = ((family == 4 ? *key : key[0] ^ key[1]) * TABLE_HASH1 >> 32) * r->lines >> \
		       32;                                                                        \
		segment = line >> (TABLE_SEGMENT - 6);                                            \
		s = bpf_map_lookup_elem(&bench_pages, &segment);                                  \
		if (!s)                                                                           \
			return 1;                                                                 \
		r->last = *(__u32 *)(s->page + (line << 6 & ((1 << TABLE_SEGMENT) - 1)));         \
		account(r, i, r->last);                                                           \
		return 0;                                                                         \
	}                                                                                         \
	PROGRAM(touch##family##_latency)

TOUCH(4)
TOUCH(6)

/* check records the results of both for each key. */
#define CHECK(family)                                                  \
	static long check##family##_step(__u32 i, struct round *r)     \
	{                                                              \
		__u32 at = (r->start + i) & (KEYS - 1);                \
		struct answer *a = bpf_map_lookup_elem(&answers, &at); \
		const __u32 *key = key##family(at);                    \
                                                                       \
		if (!a || !key)                                        \
			return 1;                                      \
		a->table = find_table##family(key);                    \
		a->trie = find_trie##family(key);                      \
		account(r, i, a->table);                               \
		return 0;                                              \
	}                                                              \
	PROGRAM(check##family)

CHECK(4)
CHECK(6)

/* probe looks the same few addresses up again and again, while the table changes under it. */
#define PROBE(family)                                                \
	static long probe##family##_step(__u32 i, struct round *r)   \
	{                                                            \
		__u32 at = i % r->probes, value;                     \
		struct probe *p = bpf_map_lookup_elem(&probes, &at); \
                                                                     \
		if (!p)                                              \
			return 1;                                    \
		value = find_table##family(p->word);                 \
		account(r, i, value);                                \
		if (value == p->legal[0]) {                          \
			p->seen[0]++;                                \
		} else if (value == p->legal[1]) {                   \
			p->seen[1]++;                                \
		} else {                                             \
			p->torn++;                                   \
			p->wrong = value;                            \
		}                                                    \
		return 0;                                            \
	}                                                            \
	PROGRAM(probe##family)

PROBE(4)
PROBE(6)

char _license[] SEC("license") = "Dual BSD/GPL";
