//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Rakelimit, the limiter of UDP floods published by Cloudflare, in a new implementation. It finds
 * hierarchical heavy hitters over source address, source port and destination port. Each
 * generalisation has a count-min sketch of moving rates. doc.go lists the parts of the original
 * and the differences.
 */
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "fields.h"

#define NODES  12
#define LEVELS 5
#define SECOND 1000000000ULL
#define WINDOW 27 /* 2^27 ns: older rates are forgotten */
#define PASS   (-1)
#define DROP   0

/* Loads like classic BPF's: out of range they end the program with 0. */
unsigned long long load_byte(void *skb, unsigned long long off) asm("llvm.bpf.load.byte");
unsigned long long load_half(void *skb, unsigned long long off) asm("llvm.bpf.load.half");
unsigned long long load_word(void *skb, unsigned long long off) asm("llvm.bpf.load.word");
#define NET_OFF (-0x100000)

const volatile __u32 limit;    /* packets per second; 0: pass all */
const volatile __u32 injected; /* time and random numbers come from control */

struct control {
	__u64 now;    /* ns */
	__u64 random; /* state of the generator; 0: the kernel's numbers */
	__u32 level;  /* out: level of the excess, LEVELS for none */
	__u32 count;  /* in: packets of the batch */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct control);
} control SEC(".maps");

/* A packet of a batch. */
struct entry {
	__u64 at;
	__u8 source[16]; /* IPv4: the first four bytes */
	__u16 port;	 /* host byte order */
	__u8 ipv6;
	__u8 passed; /* out */
	__u32 level; /* out */
};

#define BATCH 4096

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, BATCH);
	__type(key, __u32);
	__type(value, struct entry);
} batch SEC(".maps");

struct cell {
	__u32 rate; /* packets per second */
	__u64 last; /* ns */
};

struct sketch {
	struct cell row[2][COLUMNS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NODES);
	__type(key, __u32);
	__type(value, struct sketch);
} sketches SEC(".maps");

/* Packets dropped, by level. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LEVELS);
	__type(key, __u32);
	__type(value, __u64);
} drops SEC(".maps");

/*
 * Exponentially weighted moving average of 1/gap; a gap's weight is its share of the window. The
 * first packet after a pause of a window has no rate, the second the rate of their gap.
 */
static __always_inline __u32 moving_rate(__u32 rate, __u64 last, __u64 now)
{
	__u64 gap = now - last, weight;
	__u32 instant;

	if (now <= last)
		return rate; /* another CPU was faster */
	if (!last || gap >> WINDOW)
		return 0;
	instant = (__u32)SECOND / (__u32)gap;
	if (!rate)
		return instant;
	weight = gap << (32 - WINDOW); /* of 2^32 */
	return (weight * instant + ((1ULL << 32) - weight) * rate) >> 32;
}

/* Two CPUs at once lose updates here, like in the original. */
static __always_inline __u32 count(struct cell *c, __u64 now)
{
	c->rate = moving_rate(c->rate, c->last, now);
	c->last = now;
	return c->rate;
}

static __always_inline __u32 node_rate(__u32 node, const struct fields *f, __u64 now, int source,
				       int source_port, int destination_port)
{
	struct sketch *s = bpf_map_lookup_elem(&sketches, &node);
	__u32 first, second;

	if (!s)
		return 0;
	first = count(&s->row[0][column(f, 0, source, source_port, destination_port)], now);
	second = count(&s->row[1][column(f, 1, source, source_port, destination_port)], now);
	return first < second ? first : second;
}

/* The packet passes with probability limit / rate. */
static __always_inline int draw(__u32 level, __u32 rate, __u32 random)
{
	__u64 *dropped;

	if (((__u64)limit << 32) / rate >= random)
		return PASS;
	dropped = bpf_map_lookup_elem(&drops, &level);
	if (dropped)
		*dropped += 1;
	return DROP;
}

#define NODE(n, ...)                                         \
	do {                                                 \
		__u32 r = node_rate(n, f, now, __VA_ARGS__); \
		if (r > rate)                                \
			rate = r;                            \
	} while (0)

#define DECIDE(n)                                     \
	do {                                          \
		if (rate > limit) {                   \
			*level = n;                   \
			return draw(n, rate, random); \
		}                                     \
		rate = 0;                             \
	} while (0)

/*
 * From the most to the least specific. The first level with a rate above the limit decides, and
 * levels above it do not count the packet. One flow's flood is therefore not charged to all.
 * Many sources at the limit each pass in sum for the same reason.
 */
static __always_inline int decide(const struct fields *f, __u64 now, __u32 random, __u32 *level)
{
	__u32 rate = 0;

	NODE(0, HOST, EXACT, EXACT);
	DECIDE(0);
	NODE(1, NET, EXACT, EXACT);
	NODE(2, HOST, ANY_PORT, EXACT);
	NODE(3, HOST, EXACT, ANY_PORT);
	DECIDE(1);
	NODE(4, ANY, EXACT, EXACT);
	NODE(5, NET, ANY_PORT, EXACT);
	NODE(6, NET, EXACT, ANY_PORT);
	NODE(7, HOST, ANY_PORT, ANY_PORT);
	DECIDE(2);
	NODE(8, ANY, ANY_PORT, EXACT);
	NODE(9, ANY, EXACT, ANY_PORT);
	NODE(10, NET, ANY_PORT, ANY_PORT);
	DECIDE(3);
	NODE(11, ANY, ANY_PORT, ANY_PORT);
	DECIDE(4);
	*level = LEVELS;
	return PASS;
}

/* xorshift64*: the same numbers for a seed, on every kernel. */
static __always_inline __u32 next_random(struct control *c)
{
	__u64 x = c->random;

	if (!x)
		return bpf_get_prandom_u32();
	x ^= x >> 12;
	x ^= x << 25;
	x ^= x >> 27;
	c->random = x;
	return (x * 0x2545f4914f6cdd1dULL) >> 32;
}

static __always_inline int judge(const struct fields *f)
{
	__u32 zero = 0, level;
	struct control *c;

	if (!injected)
		return decide(f, bpf_ktime_get_ns(), bpf_get_prandom_u32(), &level);
	c = bpf_map_lookup_elem(&control, &zero);
	if (!c)
		return PASS;
	return decide(f, c->now, next_random(c), &c->level);
}

/*
 * A filter of a UDP socket sees the packet from the UDP header on. Addresses are loaded from the
 * network header. Ports are loaded as if the packet began there: on a real socket from the
 * payload, or out of range, and the packet is dropped. This is the original's behaviour.
 */
SEC("socket")
int rake_ipv4(struct __sk_buff *skb)
{
	struct fields f;
	__u32 source, destination, transport;

	if (!limit)
		return PASS;
	transport = (load_byte(skb, 0) & 15) * 4;
	source = load_word(skb, NET_OFF + offsetof(struct iphdr, saddr));
	destination = load_word(skb, NET_OFF + offsetof(struct iphdr, daddr));
	hash_ipv4(&f, source, destination);
	hash_ports(&f, load_half(skb, transport), load_half(skb, transport + 2));
	return judge(&f);
}

/* Here addresses are also loaded relative to the packet's begin in the filter. */
SEC("socket")
int rake_ipv6(struct __sk_buff *skb)
{
	struct fields f;
	__u32 source[4], destination[4];

	if (!limit)
		return PASS;
	if (bpf_skb_load_bytes(skb, offsetof(struct ipv6hdr, saddr), source, sizeof(source)) ||
	    bpf_skb_load_bytes(skb, offsetof(struct ipv6hdr, daddr), destination,
			       sizeof(destination)))
		return DROP;
	hash_ipv6(&f, source, destination);
	hash_ports(&f, load_half(skb, sizeof(struct ipv6hdr)),
		   load_half(skb, sizeof(struct ipv6hdr) + 2));
	return judge(&f);
}

/* The cost of an empty filter. */
SEC("socket")
int rake_empty(struct __sk_buff *skb)
{
	return PASS;
}

/* Common destination of a batch: 10.77.0.2 or fd00::2, port 443. */
static __always_inline void hash_entry(struct fields *f, const struct entry *e)
{
	const __u32 destination[4] = { bpf_htonl(0xfd000000), 0, 0, bpf_htonl(2) };
	const __u32 *source = (const __u32 *)e->source;

	if (e->ipv6)
		hash_ipv6(f, source, destination);
	else
		hash_ipv4(f, bpf_ntohl(source[0]), 0x0a4d0002);
	hash_ports(f, e->port, 443);
}

/* bpf_loop passes only objects on the stack. */
struct context {
	struct control *control;
};

static long step(__u32 i, struct context *context)
{
	struct entry *e = bpf_map_lookup_elem(&batch, &i);
	struct fields f;
	__u32 level = LEVELS;

	if (!e)
		return 1;
	hash_entry(&f, e);
	e->passed = !limit || decide(&f, e->at, next_random(context->control), &level) != DROP;
	e->level = level;
	return 0;
}

/* Many packets in one run: the overhead of a run exceeds the cost of a packet. */
SEC("socket")
int rake_batch(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct context context = { bpf_map_lookup_elem(&control, &zero) };

	return context.control ? bpf_loop(context.control->count, step, &context, 0) : 0;
}

static long step_empty(__u32 i, void *unused)
{
	struct entry *e = bpf_map_lookup_elem(&batch, &i);

	if (!e)
		return 1;
	e->passed = 1;
	return 0;
}

/* The cost of a batch without decisions. */
SEC("socket")
int rake_batch_empty(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct control *c = bpf_map_lookup_elem(&control, &zero);

	return c ? bpf_loop(c->count, step_empty, 0, 0) : 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
