//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Steering by sk_lookup: which member's socket gets this packet.
 *
 * The program runs for every lookup of a listener or an unconnected UDP socket of its network
 * namespace. It finds the service by protocol, address and port, hashes the source address to a
 * bucket, the bucket to a slot, and takes the slot's socket, if the slot is whole.
 */
#include <linux/bpf.h>
#include <linux/in.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "clock.h"
#include "hash.h"
#include "steer.h"

#define AF_INET	 2
#define AF_INET6 10

#ifndef barrier_var
#define barrier_var(var) asm volatile("" : "+r"(var))
#endif

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STEER_MAX_SERVICES * STEER_MAX_ENDPOINTS);
	__type(key, struct port_key);
	__type(value, struct port_value);
} steer_ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, STEER_MAX_SERVICES * STEER_MAX_ENDPOINTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix_key);
	__type(value, struct target);
} steer_prefixes SEC(".maps");

struct inner_service {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct service));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, STEER_MAX_SERVICES);
	__type(key, __u32);
	__array(values, struct inner_service);
} steer_services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEER_MAX_ROWS);
	__type(key, __u32);
	__type(value, struct slot);
} steer_slots SEC(".maps");

/* Nothing else makes clang describe the type that user space fills in. */
const struct service *steer_service_type __attribute__((unused));

/* Row r, endpoint e is index r * STEER_MAX_ENDPOINTS + e. An entry goes when its socket closes. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, STEER_MAX_ROWS * STEER_MAX_ENDPOINTS);
	__type(key, __u32);
	__type(value, __u64);
} steer_sockets SEC(".maps");

/* One socket a family and protocol that swallows everything: what on_empty: drop assigns. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 4);
	__type(key, __u32);
	__type(value, __u64);
} steer_sinks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STEER_MAX_ROWS * 2);
	__type(key, __u32);
	__type(value, struct verdicts);
} steer_verdicts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, STEER_MAX_DEVICES);
	__type(key, struct device_key);
	__type(value, struct device);
} steer_devices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STEER_MAX_ROWS * 2);
	__type(key, struct exit_key);
	__type(value, __u32); /* row */
} steer_exits SEC(".maps");

/* packet is what a lookup is decided by, read from the context once. */
struct packet {
	__u32 family;
	__u32 tcp; /* 1 for TCP, 0 for UDP */
	__u32 port;
	__u32 src[4]; /* IPv4 as v4-mapped, so that a device is one in both families of socket */
	__u32 dst[4];
};

static __always_inline void packet_read(struct bpf_sk_lookup *ctx, struct packet *p)
{
	/*
	 * Every field is read whatever the family: clang 14 otherwise merges the loads of the two
	 * branches into one at a computed offset, which the verifier refuses.
	 */
	__u32 r4 = ctx->remote_ip4, l4 = ctx->local_ip4;
	__u32 r0 = ctx->remote_ip6[0], r1 = ctx->remote_ip6[1];
	__u32 r2 = ctx->remote_ip6[2], r3 = ctx->remote_ip6[3];
	__u32 l0 = ctx->local_ip6[0], l1 = ctx->local_ip6[1];
	__u32 l2 = ctx->local_ip6[2], l3 = ctx->local_ip6[3];

	barrier_var(r4);
	barrier_var(l4);
	barrier_var(r0);
	barrier_var(r1);
	barrier_var(r2);
	barrier_var(r3);
	barrier_var(l0);
	barrier_var(l1);
	barrier_var(l2);
	barrier_var(l3);
	p->family = ctx->family;
	p->tcp = ctx->protocol == IPPROTO_TCP;
	p->port = ctx->local_port;
	if (p->family == AF_INET) {
		p->src[0] = p->src[1] = p->dst[1] = p->dst[2] = p->dst[3] = 0;
		p->src[2] = bpf_htonl(0xffff);
		p->src[3] = r4;
		p->dst[0] = l4;
	} else {
		p->src[0] = r0;
		p->src[1] = r1;
		p->src[2] = r2;
		p->src[3] = r3;
		p->dst[0] = l0;
		p->dst[1] = l1;
		p->dst[2] = l2;
		p->dst[3] = l3;
	}
}

/* find_target returns the endpoint of the service that a packet belongs to, or NULL. */
static __always_inline struct target *find_target(struct packet *p)
{
	struct port_key port = { .port = p->port, .proto = p->tcp ? IPPROTO_TCP : IPPROTO_UDP };
	struct port_value *v = bpf_map_lookup_elem(&steer_ports, &port);
	struct target *t;

	if (!v)
		return NULL;
	if (v->prefixes) {
		struct prefix_key key = { .prefixlen = 32 + 128,
					  .proto = port.proto,
					  .family = p->family,
					  .port = p->port };

		__builtin_memcpy(key.addr, p->dst, sizeof(key.addr));
		t = bpf_map_lookup_elem(&steer_prefixes, &key);
		if (t)
			return t;
	}
	t = p->family == AF_INET ? &v->any4 : &v->any6;
	return t->service ? t : NULL;
}

/* note_device keeps when, how often and over what a source was heard. */
static __always_inline void note_device(struct service *s, struct packet *p)
{
	struct device_key key = { .service = s->id };
	__u32 tcp = p->tcp & 1;
	struct device *d;
	__u64 now = weir_clock();

	__builtin_memcpy(key.addr, p->src, sizeof(key.addr));
	d = bpf_map_lookup_elem(&steer_devices, &key);
	if (!d) {
		struct device fresh = { .first = now, .window = now };

		bpf_map_update_elem(&steer_devices, &key, &fresh, BPF_NOEXIST);
		d = bpf_map_lookup_elem(&steer_devices, &key);
		if (!d)
			return;
	}
	d->last[tcp] = now;
	__sync_fetch_and_add(&d->packets[tcp], 1);
	__sync_fetch_and_add(&d->count, 1);
	if (now - d->window > STEER_RATE_WINDOW) {
		/* Two CPUs may both close a window: a rate is then off once, a count never. */
		d->rate = d->count * 1000000000000ULL / (now - d->window);
		d->window = now;
		d->count = 0;
	}
}

/*
 * slot_whole says whether a slot has an admitted member and every socket it requires. It is
 * asked for every packet, so that a slot is withdrawn the moment one of its sockets closes,
 * with no process of weir's running: half a member would split a router over two collectors.
 */
static __always_inline int slot_whole(struct service *s, __u32 row)
{
	struct slot *slot = bpf_map_lookup_elem(&steer_slots, &row);
	__u32 missing = 0, e;

	if (!slot || slot->state != STEER_ADMITTED)
		return 0;
	for (e = 0; e < STEER_MAX_ENDPOINTS; e++) {
		__u32 key = row * STEER_MAX_ENDPOINTS + e;
		struct bpf_sock *sk;

		if (e >= s->endpoints)
			break;
		sk = bpf_map_lookup_elem(&steer_sockets, &key);
		if (sk)
			bpf_sk_release(sk);
		else
			missing++;
	}
	return !missing;
}

/* assign gives the packet to exactly this socket, even if it sits in a reuseport group. */
static __always_inline long assign(struct bpf_sk_lookup *ctx, void *map, __u32 key)
{
	struct bpf_sock *sk = bpf_map_lookup_elem(map, &key);
	long err;

	if (!sk)
		return -1;
	err = bpf_sk_assign(ctx, sk, BPF_SK_LOOKUP_F_NO_REUSEPORT);
	bpf_sk_release(sk);
	return err;
}

static __always_inline struct verdicts *verdicts_of(__u32 row, __u32 tcp)
{
	__u32 key = row * 2 + (tcp & 1);

	return bpf_map_lookup_elem(&steer_verdicts, &key);
}

/* divert looks for another whole slot: the same one for every protocol of a source. */
static __always_inline int divert(struct bpf_sk_lookup *ctx, struct service *s, struct packet *p,
				  __u32 slot, __u32 hash, __u32 endpoint)
{
	/* Neighbours of a dead slot share its traffic: each source starts somewhere else. */
	__u32 step = 1 + (hash >> 12) % (s->slots > 1 ? s->slots - 1 : 1);
	__u32 i, at = slot;

	for (i = 0; i < STEER_MAX_NEXT; i++) {
		__u32 row;

		if (i + 1 >= s->slots)
			break;
		at += i ? 1 : step;
		if (at >= s->slots)
			at -= s->slots;
		if (at == slot) {
			at++;
			if (at >= s->slots)
				at -= s->slots;
		}
		row = s->first_row + at;
		if (slot_whole(s, row) &&
		    !assign(ctx, &steer_sockets, row * STEER_MAX_ENDPOINTS + endpoint)) {
			struct verdicts *v = verdicts_of(row, p->tcp);

			if (v)
				v->guests++;
			return 1;
		}
	}
	return 0;
}

/* on_empty decides for a packet whose slot has no whole member. */
static __always_inline int on_empty(struct bpf_sk_lookup *ctx, struct service *s, struct packet *p,
				    __u32 slot, __u32 hash, __u32 endpoint, struct verdicts *v)
{
	switch (s->on_empty) {
	case STEER_PASS:
		v->passed++;
		return SK_PASS;
	case STEER_NEXT:
		if (divert(ctx, s, p, slot, hash, endpoint)) {
			v->diverted++;
			return SK_PASS;
		}
		break;
	case STEER_DROP:
		/* SK_DROP answers (RST, ICMP unreachable); only a socket that swallows is silent. */
		if (!assign(ctx, &steer_sinks, (p->family == AF_INET6) * 2 + p->tcp)) {
			v->dropped++;
			return SK_PASS;
		}
		break;
	}
	v->rejected++;
	return SK_DROP;
}

SEC("sk_lookup")
int steer_lookup(struct bpf_sk_lookup *ctx)
{
	__u32 id, zero = 0, hash, slot, row;
	struct verdicts *v;
	struct service *s;
	struct packet p;
	struct target *t;
	void *inner;

	packet_read(ctx, &p);
	t = find_target(&p);
	if (!t)
		return SK_PASS;
	id = t->service - 1;
	inner = bpf_map_lookup_elem(&steer_services, &id);
	if (!inner)
		return SK_PASS; /* being removed: its ports go next */
	s = bpf_map_lookup_elem(inner, &zero);
	if (!s)
		return SK_PASS;
	note_device(s, &p);
	hash = weir_hash_addr(p.src, s->seed);
	slot = s->bucket[hash & (STEER_BUCKETS - 1)];
	row = s->first_row + slot;
	v = verdicts_of(row, p.tcp);
	if (!v)
		return SK_DROP; /* a row out of range: nothing that user space writes */
	if (!slot_whole(s, row))
		return on_empty(ctx, s, &p, slot, hash, t->endpoint, v);
	if (assign(ctx, &steer_sockets, row * STEER_MAX_ENDPOINTS + t->endpoint)) {
		/*
		 * A socket that connect()ed itself, or closed since: never the kernel's own choice,
		 * which would hand the router to another collector.
		 */
		v->failed++;
		return SK_DROP;
	}
	v->steered++;
	return SK_PASS;
}

struct signal_struct {
	struct {
		int counter;
	} live;
} __attribute__((preserve_access_index));

struct task_struct {
	struct signal_struct *signal;
} __attribute__((preserve_access_index));

/*
 * steer_exit withdraws the slots of a process when its last thread exits, before its
 * descriptors close: all protocols at once, and also where a child that outlives it holds
 * duplicates of every socket (pmacct's plugins do).
 */
SEC("raw_tracepoint/sched_process_exit")
int steer_exit(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = (struct task_struct *)ctx->args[0];
	struct exit_key key = { .tgid = bpf_get_current_pid_tgid() >> 32 };
	__u32 i;

	if (BPF_CORE_READ(task, signal, live.counter))
		return 0; /* other threads live on */
	for (i = 0; i < STEER_MAX_EXITS; i++) {
		struct slot *slot;
		__u32 *row;

		key.n = i;
		row = bpf_map_lookup_elem(&steer_exits, &key);
		if (!row)
			break;
		slot = bpf_map_lookup_elem(&steer_slots, row);
		/* Another process may have taken the slot over: then it is not ours to empty. */
		if (slot && slot->tgid == key.tgid && slot->state == STEER_ADMITTED) {
			slot->state = STEER_EXITED;
			slot->since = bpf_ktime_get_ns();
		}
		bpf_map_delete_elem(&steer_exits, &key);
	}
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
