//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * UDP flood limits for a socket, a service or an interface. guard.h has the state, admit.h the
 * decision, this file the hooks.
 */
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "guard.h"

#include "admit.h"
#include "parse.h"

/* The states of a namespace's guards, each in its own map, preserved across programs. */
struct guard_one {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct guard_state);
} guard_one SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, GUARD_MAX);
	__type(key, __u32);
	__array(values, struct guard_one);
} guard_states SEC(".maps");

/* The destinations of a guard with a limit for each. */
struct guard_each {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct guard_target_key);
	__type(value, struct guard_target);
} guard_each SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, GUARD_MAX);
	__type(key, __u32);
	__array(values, struct guard_each);
} guard_targets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, struct guard_listen_key);
	__type(value, struct guard_listen);
} guard_listens SEC(".maps");

/* The namespace of the services: SO_NETNS_COOKIE. 0: not supported by this kernel (before 6.15). */
const volatile __u64 guard_netns = 0;

/* Tests set the time. The verifier removes code excluded by a constant, so this costs nothing. */
const volatile __u32 guard_clock_given = 0;
__u64 guard_clock = 0;

static __always_inline __u64 guard_now(void)
{
	return guard_clock_given ? guard_read(guard_clock) : bpf_ktime_get_ns();
}

/* More CPUs than sets of counters: some CPUs share a set. */
const volatile __u32 guard_counters_shared = 0;

static __always_inline void guard_tally(struct guard_state *s, __u32 verdict, __u32 refused,
					__u32 packets)
{
	__u32 cpu = bpf_get_smp_processor_id() & (GUARD_COUNTERS - 1);
	__u64 *count = &s->counters[cpu].verdict[verdict & 7][refused & 1];

	/* Hooks run with bottom halves off: nothing on this CPU interrupts. */
	if (guard_counters_shared)
		__sync_fetch_and_add(count, packets);
	else
		*count += packets;
}

/* guard_file records a packet under the pattern of one level. */
__noinline int guard_file(struct guard_state *s, const struct guard_addresses *a, __u32 level,
			  __u64 at)
{
	struct guard_top_key k = {};
	const __u64 *from;
	__u64 seed;

	if (!s || !a || level >= GUARD_LEVELS)
		return 0;
	k.weight = guard_top_weight(a->merged);
	from = (const __u64 *)(level == GUARD_TOP_TARGET ? a->daddr : a->saddr);
	if (level == GUARD_TOP_SPORT) {
		k.port = a->sport;
	} else {
		k.high = from[0];
		k.low = from[1];
	}
	if (level == GUARD_TOP_TARGET)
		k.port = a->dport;
	if (level == GUARD_TOP_NET || level == GUARD_TOP_WIDE) {
		__u64 rest = level == GUARD_TOP_NET ? 0xff : 0xffff;

		if (a->family != 6)
			k.low &= bpf_cpu_to_be64(~rest);
		else if (level == GUARD_TOP_WIDE)
			k.high &= bpf_cpu_to_be64(~rest);
		if (a->family == 6)
			k.low = 0;
	}
	seed = s->total.seed[0] + level;
	guard_top_file(&s->top[level], &k,
		       guard_mix_of(guard_mix_of(k.high ^ seed) ^ k.low ^ k.port),
		       at >> GUARD_TOP_SHIFT, bpf_get_prandom_u32());
	return 0;
}

static __always_inline struct guard_state *guard_state_of(__u32 guard)
{
	void *map = bpf_map_lookup_elem(&guard_states, &guard);
	__u32 zero = 0;

	return map ? bpf_map_lookup_elem(map, &zero) : 0;
}

/*
 * guard_target_of returns the entry of the packet's destination and creates it if needed. It
 * returns 0 without a limit for each, or without memory.
 */
static __noinline struct guard_target *guard_target_of(const struct guard_addresses *a, __u32 guard)
{
	void *map = bpf_map_lookup_elem(&guard_targets, &guard);
	struct guard_target_key key = { .port = a->dport };
	struct guard_target *t, fresh = { .hot = -8 };

	if (!map)
		return 0;
	__builtin_memcpy(key.address, a->daddr, 16);
	t = bpf_map_lookup_elem(map, &key);
	if (t)
		return t;
	bpf_map_update_elem(map, &key, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(map, &key);
}

/* guard_pass decides and counts a packet, and returns whether it passes. */
int guard_pass(const struct guard_addresses *a, __u32 guard)
{
	struct guard_state *s = guard_state_of(guard);
	struct guard_target *target = 0;
	struct guard_packet p = {};
	const struct guard_limits *l;
	__u32 verdict;
	__u64 mixed;

	if (!s || !a)
		return 1;
	p.packets = a->merged ? a->merged : 1;
	l = guard_limits_of(s);
	if (guard_rare(a->merged > GUARD_MERGED)) {
		/* No limit would bound it: guards refuse unreadable packets even without a limit. */
		verdict = GUARD_MALFORMED;
		p.packets = 1;
		goto count;
	}
	if (guard_rare(!l->interval && !l->target_interval)) {
		verdict = GUARD_UNLIMITED | GUARD_PASSES;
		goto count;
	}
	p.now = guard_now();
	p.port = a->sport;
	if (a->family == 4) {
		__u32 addr = bpf_ntohl(*(const __u32 *)(a->saddr + 12));

		p.source = guard_mix((addr ^ s->total.seed[0]) * (s->total.seed[1] | 1));
		p.net = addr >> 8;
	} else {
		const __u64 *k = (const __u64 *)a->saddr;

		mixed = guard_mix(k[0] ^ s->total.seed[0]);
		p.source = guard_mix(mixed + s->total.seed[1]);
		p.net = k[0] & bpf_cpu_to_be64(~0xffffULL);
		p.host = mixed ^ k[1];
	}
	if (guard_rare(l->target_interval))
		target = guard_target_of(a, guard);
	verdict = guard_decide(s, &p, target);
count:
	guard_tally(s, verdict, !(verdict & GUARD_PASSES), p.packets);
	if (!guard_rare(!(verdict & GUARD_PASSES)))
		return 1;
	if (verdict & GUARD_SAMPLE) {
#pragma clang loop unroll(disable)
		for (__u32 level = 0; level < GUARD_LEVELS; level++)
			guard_file(s, a, level, p.now);
	}
	return l->dry != 0;
}

#define GUARD_WHOLE 0x7fffffff /* bytes of the datagram kept by a socket filter */

/* For one socket: all its packets belong to the application, for any destination. */
SEC("socket")
int guard_socket(struct __sk_buff *skb)
{
	struct guard_addresses a = {};
	int read = guard_read_skb(skb, &a);

	if (guard_rare(read == GUARD_NOT_OURS))
		return GUARD_WHOLE;
	if (guard_rare(read == GUARD_BAD_HEADERS))
		a.merged = GUARD_UNREADABLE;
	return guard_pass(&a, 0) ? GUARD_WHOLE : 0;
}

/* guard_of returns the guard of a destination, or -1: none, or one deciding at another hook. */
int guard_of(const struct guard_addresses *a, __u32 at)
{
	struct guard_listen_key key = {};
	struct guard_listen *l;
	const __u64 *d;
	__u64 hi, lo;

	if (!a)
		return -1;
	key.port = a->later ? 0 : a->dport;
	key.family = a->family;
	l = bpf_map_lookup_elem(&guard_listens, &key);
	if (!l)
		return -1;
	d = (const __u64 *)a->daddr;
	hi = bpf_be64_to_cpu(d[0]);
	lo = bpf_be64_to_cpu(d[1]);
	for (__u32 i = 0; i < GUARD_PREFIXES && i < l->count; i++) {
		const __u64 *x = (const __u64 *)l->prefix[i].address;
		__u64 h = bpf_be64_to_cpu(x[0]) ^ hi, m = bpf_be64_to_cpu(x[1]) ^ lo;
		__u32 bits = l->prefix[i].bits & 255;

		if (bits < 64)
			m = 0;
		else if (bits < 128)
			m >>= 128 - bits;
		if (bits == 0)
			h = 0;
		else if (bits < 64)
			h >>= 64 - bits;
		/* 64 and 0 bits would need shifts by 64, undefined on the machine. */
		if (bits == 64)
			m = 0;
		if (!h && !m)
			return l->prefix[i].at == at ? l->prefix[i].guard : -1;
	}
	return -1;
}

/*
 * guard_unread decides a packet without readable ports and returns whether it passes. The kernel
 * itself drops truncated packets. Packets with too many extension headers would bypass every guard.
 * They are refused if the destination's address has a guard: no host sends as many.
 */
static __always_inline int guard_unread(struct guard_addresses *a, enum guard_at at)
{
	int guard;

	if (a->family != 6 || !guard_extension(a->proto))
		return 1;
	a->later = 1;
	a->merged = GUARD_UNREADABLE;
	guard = guard_of(a, at);
	return guard < 0 || guard_pass(a, guard);
}

/* For the services of a namespace. It sees every packet to any socket of the host. */
SEC("cgroup_skb/ingress")
int guard_cgroup(struct __sk_buff *skb)
{
	struct guard_addresses a = {};
	int guard;

	if (guard_netns && bpf_get_netns_cookie(skb) != guard_netns)
		return 1;
	switch (guard_read_skb(skb, &a)) {
	case GUARD_NOT_OURS:
		return 1;
	case GUARD_BAD_HEADERS:
		return guard_unread(&a, GUARD_AT_SOCKETS);
	}
	if (a.proto != IPPROTO_UDP)
		return 1;
	guard = guard_of(&a, GUARD_AT_SOCKETS);
	return guard < 0 || guard_pass(&a, guard);
}

/* For the services of a namespace, before the kernel processes the packet. */
SEC("xdp")
int guard_xdp(struct xdp_md *ctx)
{
	struct guard_addresses a = {};
	int guard;

	switch (guard_read_frame(ctx, &a)) {
	case GUARD_NOT_OURS:
		return XDP_PASS;
	case GUARD_BAD_HEADERS:
		return guard_unread(&a, GUARD_AT_INTERFACES) ? XDP_PASS : XDP_DROP;
	case GUARD_NOBODYS:
		return XDP_DROP;
	}
	guard = guard_of(&a, GUARD_AT_INTERFACES);
	return guard < 0 || guard_pass(&a, guard) ? XDP_PASS : XDP_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
