//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Steering by sk_lookup: chooses the member's socket for a packet.
 *
 * The program runs for every lookup of a listener or an unconnected UDP socket of its network
 * namespace. It finds the service by protocol, address and port. It hashes the source address to a
 * bucket, and the bucket to a slot. If the slot is complete, it selects the slot's socket.
 */
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/in.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "bindings.h"
#include "hash.h"
#include "steer.h"

typedef struct bpf_sk_lookup steer_ctx;

#include "common.h"

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

/*
 * Row r, endpoint e is index r * STEER_MAX_ENDPOINTS + e. The kernel removes an entry when its
 * socket closes.
 */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, STEER_MAX_ROWS * STEER_MAX_ENDPOINTS);
	__type(key, __u32);
	__type(value, __u64);
} steer_sockets SEC(".maps");

/* One sink per family and protocol: a socket that drops everything, for on_empty: drop. */
struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, 4);
	__type(key, __u32);
	__type(value, __u64);
} steer_sinks SEC(".maps");

static __always_inline void packet_read(struct bpf_sk_lookup *ctx, struct packet *p)
{
	/*
	 * Read every field for both families. Otherwise clang 14 merges the loads of the two
	 * branches into one at a computed offset, and the verifier rejects it.
	 */
	__u32 r4 = ctx->remote_ip4, l4 = ctx->local_ip4;
	__u32 r0 = ctx->remote_ip6[0], r1 = ctx->remote_ip6[1];
	__u32 r2 = ctx->remote_ip6[2], r3 = ctx->remote_ip6[3];
	__u32 l0 = ctx->local_ip6[0], l1 = ctx->local_ip6[1];
	__u32 l2 = ctx->local_ip6[2], l3 = ctx->local_ip6[3];
	__u32 rport = (__u16)ctx->remote_port, v6;

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
	barrier_var(rport);
	p->remote_port = rport;
	p->family = ctx->family;
	p->tcp = ctx->protocol == IPPROTO_TCP;
	p->port = ctx->local_port;
	/*
	 * No branch: select by the bit set in AF_INET6 and clear in AF_INET. With a branch the
	 * verifier would follow the rest of the program for each family.
	 */
	v6 = 0 - (p->family >> 3 & 1);
	p->src[0] = r0 & v6;
	p->src[1] = r1 & v6;
	p->src[2] = (r2 & v6) | (bpf_htonl(0xffff) & ~v6);
	p->src[3] = (r3 & v6) | (r4 & ~v6);
	p->dst[0] = (l0 & v6) | (l4 & ~v6);
	p->dst[1] = l1 & v6;
	p->dst[2] = l2 & v6;
	p->dst[3] = l3 & v6;
}

/* find_target returns the endpoint of a packet's service, or NULL. */
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

static __always_inline enum given give(struct bpf_sk_lookup *ctx, struct service *s, __u32 row,
				       __u32 endpoint)
{
	struct slot *slot = bpf_map_lookup_elem(&steer_slots, &row);
	__u32 whole = 1, i;
	struct bpf_sock *sk;
	long err;

	if (!slot || slot->state != STEER_ADMITTED)
		return NOT_WHOLE;
	row *= STEER_MAX_ENDPOINTS;
	for (i = 1; i < STEER_MAX_ENDPOINTS; i++) {
		__u32 key;

		if (i >= s->endpoints)
			break;
		key = row + the_other(endpoint, i, s->endpoints);
		sk = bpf_map_lookup_elem(&steer_sockets, &key);
		if (sk)
			bpf_sk_release(sk);
		else
			whole = 0;
	}
	row += endpoint;
	sk = bpf_map_lookup_elem(&steer_sockets, &row);
	if (!sk)
		return NOT_WHOLE;
	if (!whole) {
		bpf_sk_release(sk);
		return NOT_WHOLE;
	}
	/* Exactly this socket, even if it is in a reuseport group. */
	err = bpf_sk_assign(ctx, sk, BPF_SK_LOOKUP_F_NO_REUSEPORT);
	bpf_sk_release(sk);
	return err ? REFUSED : GIVEN;
}

#include "generations.h"

static __always_inline int swallow(struct bpf_sk_lookup *ctx, struct service *s, struct packet *p)
{
	__u32 key = (p->family == AF_INET6) * 2 + p->tcp;
	struct bpf_sock *sk = bpf_map_lookup_elem(&steer_sinks, &key);
	long err;

	if (!sk)
		return -1;
	err = bpf_sk_assign(ctx, sk, BPF_SK_LOOKUP_F_NO_REUSEPORT);
	bpf_sk_release(sk);
	return err;
}

static __always_inline int pass(struct bpf_sk_lookup *ctx, struct place *at)
{
	return 1; /* without an assigned socket the lookup continues as if weir were absent */
}

static __always_inline int steer_packet(struct bpf_sk_lookup *ctx, struct packet *p, __u32 service,
					__u32 endpoint, int missing)
{
	struct service *s = service_of(service);
	struct place at;

	if (!s)
		return missing;
	if (s->policy == STEER_BY_DEVICE)
		resolve_alias(s, p);
	note_device(s, p);
	place_of(s, p, &at);
	return steer_to(ctx, s, p, &at, endpoint);
}

SEC("sk_lookup")
int steer_lookup(struct bpf_sk_lookup *ctx)
{
	struct packet p;
	struct target *t;

	packet_read(ctx, &p);
	t = find_target(&p);
	if (!t)
		return SK_PASS;
	/* A missing service is being removed, its ports next. */
	return steer_packet(ctx, &p, t->service - 1, STEER_ENDPOINT(t), SK_PASS);
}

/*
 * A namespace with bindings uses steer_dispatch in place of steer_lookup. Bindings lead to a
 * configured service or to registered sockets.
 */
BINDINGS_MAPS(bound)

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, STEER_MAX_NAMED);
	__type(key, __u32);
	__type(value, struct named);
} steer_named SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, STEER_MAX_NAMED * STEER_KINDS);
	__type(key, __u32);
	__type(value, __u64);
} steer_given SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, STEER_MAX_NAMED);
	__type(key, __u32);
	__type(value, struct hits);
} steer_hits SEC(".maps");

/*
 * 1 while steer_ports may have entries. In a namespace with registered sockets only, its lookup
 * would be a quarter of the cost of a packet without a binding.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} steer_listens SEC(".maps");

static __always_inline __u64 find_binding(struct packet *p)
{
	__u32 proto = p->tcp ? IPPROTO_TCP : IPPROTO_UDP, words[4];

	if (p->family == AF_INET)
		return BINDINGS_LOOKUP4(bound, bpf_ntohl(p->dst[0]), proto, p->port);
	words[0] = bpf_ntohl(p->dst[0]);
	words[1] = bpf_ntohl(p->dst[1]);
	words[2] = bpf_ntohl(p->dst[2]);
	words[3] = bpf_ntohl(p->dst[3]);
	return BINDINGS_LOOKUP6(bound, words, proto, p->port);
}

/*
 * give_registered assigns the registered socket of a service for the packet's kind. A reuseport
 * group chooses among its sockets as set up by the application. Without a socket the packet is
 * rejected, because it was meant for this service.
 */
static __always_inline int give_registered(struct bpf_sk_lookup *ctx, __u32 number, __u32 kind)
{
	struct hits *h = bpf_map_lookup_elem(&steer_hits, &number);
	struct bpf_sock *sk;
	long err;

	if (!h)
		return SK_DROP;
	number = number * STEER_KINDS + kind;
	sk = bpf_map_lookup_elem(&steer_given, &number);
	if (!sk) {
		h->rejected++;
		return SK_DROP;
	}
	err = bpf_sk_assign(ctx, sk, 0);
	bpf_sk_release(sk);
	if (err) {
		h->failed++;
		return SK_DROP;
	}
	h->steered++;
	return SK_PASS;
}

SEC("sk_lookup")
int steer_dispatch(struct bpf_sk_lookup *ctx)
{
	__u32 service, endpoint, zero = 0, *listens;
	struct target *t = NULL;
	struct packet p;
	__u64 binding;

	packet_read(ctx, &p);
	listens = bpf_map_lookup_elem(&steer_listens, &zero);
	if (listens && *listens)
		t = find_target(&p);
	binding = find_binding(&p);
	/* For prefixes of equal length the service's listen wins, because it names the port. */
	if (binding && (!t || BINDINGS_LENGTH(binding) > STEER_LENGTH(t))) {
		__u32 number = BINDINGS_VALUE(binding) - 1;
		__u32 kind = (p.family == AF_INET6) * 2 + p.tcp;
		struct named *at = bpf_map_lookup_elem(&steer_named, &number);
		union {
			struct named named;
			__u64 whole;
		} n;

		if (!at)
			return SK_DROP; /* never written by user space */
		n.whole = *(volatile __u64 *)at;
		if (!n.named.service)
			return give_registered(ctx, number, kind);
		service = n.named.service;
		endpoint = n.named.endpoint[kind & (STEER_KINDS - 1)];
		if (endpoint >= STEER_MAX_ENDPOINTS)
			return endpoint == STEER_BYPASSED ? SK_PASS : SK_DROP;
	} else {
		if (!t)
			return SK_PASS;
		service = t->service;
		endpoint = STEER_ENDPOINT(t);
		binding = 0;
	}
	return steer_packet(ctx, &p, service - 1, endpoint, binding ? SK_DROP : SK_PASS);
}

char _license[] SEC("license") = "Dual BSD/GPL";
