//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Steering by sk_lookup: which member's socket gets this packet.
 *
 * The program runs for every lookup of a listener or an unconnected UDP socket of its network
 * namespace. It finds the service by protocol, address and port, hashes the source address to a
 * bucket, the bucket to a slot, and takes the slot's socket, if the slot is whole.
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
	 * Without a branch, by the bit that AF_INET6 has and AF_INET has not: the verifier would follow
	 * all that comes after for each family.
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
	/* To exactly this socket, even if it sits in a reuseport group. */
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
	return 1; /* with no socket assigned, the lookup goes on as if weir were not there */
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
	/* A service that is missing is being removed: its ports go next. */
	return steer_packet(ctx, &p, t->service - 1, STEER_ENDPOINT(t), SK_PASS);
}

/*
 * A namespace in which something is bound has steer_dispatch in place of steer_lookup: bindings
 * lead to a service of the configuration, or to sockets that were registered.
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
 * 1 while steer_ports may hold something. Where it does not, as in a namespace of registered sockets
 * alone, asking it would be a quarter of what a packet costs that nothing is bound for.
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
 * give_registered gives a packet to the socket that a service has registered for its kind. Where
 * that is in a reuseport group, the group chooses among its own as the application set it up. There
 * is nothing else that the packet may go to: it was meant for this service.
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
	/* Of prefixes that are alike the service's goes first: it names the port. */
	if (binding && (!t || BINDINGS_LENGTH(binding) > STEER_LENGTH(t))) {
		__u32 number = BINDINGS_VALUE(binding) - 1;
		__u32 kind = (p.family == AF_INET6) * 2 + p.tcp;
		struct named *at = bpf_map_lookup_elem(&steer_named, &number);
		union {
			struct named named;
			__u64 whole;
		} n;

		if (!at)
			return SK_DROP; /* nothing that user space writes */
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
