//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Dispatch to registered sockets like tubular, for comparison. Bindings are an LPM_TRIE with
 * keys beginning with protocol and port. A packet is looked up with its port and with port 0,
 * and the longer prefix wins. The layout of keys and the order of steps are tubular's; the text
 * is not.
 */
#include <linux/bpf.h>
#include <linux/in.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define AF_INET	     2
#define DESTINATIONS 65536

struct binding_key {
	__u32 prefixlen; /* of all following fields, in bits */
	__u8 protocol;
	__u16 port;    /* host byte order; 0: every port */
	__u32 addr[4]; /* network byte order; IPv4 is v4-mapped */
} __attribute__((packed));

struct binding {
	__u32 destination;
	__u32 prefixlen;
};

struct counts {
	__u64 lookups;
	__u64 misses; /* no socket */
	__u64 errors; /* rejected by the kernel */
};

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1 << 20);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct binding_key);
	__type(value, struct binding);
} bindings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DESTINATIONS);
	__type(key, __u32);
	__type(value, struct counts);
} destinations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SOCKMAP);
	__uint(max_entries, DESTINATIONS);
	__type(key, __u32);
	__type(value, __u64);
} sockets SEC(".maps");

/* 1 maps all bindings to the first two destinations, one of each protocol. */
volatile __u32 destination_mask = 0xffffffff;

SEC("sk_lookup")
int trie_dispatch(struct bpf_sk_lookup *ctx)
{
	/*
	 * Read for any family: clang 14 merges loads of two branches into one at a computed
	 * offset.
	 */
	__u32 l4 = ctx->local_ip4, l0 = ctx->local_ip6[0], l1 = ctx->local_ip6[1];
	__u32 l2 = ctx->local_ip6[2], l3 = ctx->local_ip6[3], destination;
	struct binding *b, *any;
	struct binding_key key;
	struct bpf_sock *sk;
	struct counts *c;
	long err;

	barrier_var(l4);
	barrier_var(l0);
	barrier_var(l1);
	barrier_var(l2);
	barrier_var(l3);
	key.prefixlen = 8 + 16 + 128;
	key.protocol = ctx->protocol;
	key.port = ctx->local_port;
	if (ctx->family == AF_INET) {
		key.addr[0] = 0;
		key.addr[1] = 0;
		key.addr[2] = bpf_htonl(0xffff);
		key.addr[3] = l4;
	} else {
		key.addr[0] = l0;
		key.addr[1] = l1;
		key.addr[2] = l2;
		key.addr[3] = l3;
	}
	b = bpf_map_lookup_elem(&bindings, &key);
	key.port = 0;
	any = bpf_map_lookup_elem(&bindings, &key);
	if (!b || (any && any->prefixlen > b->prefixlen))
		b = any;
	if (!b)
		return SK_PASS;
	destination = b->destination & destination_mask;
	c = bpf_map_lookup_elem(&destinations, &destination);
	if (!c)
		return SK_DROP; /* user space writes no such destination */
	c->lookups++;
	sk = bpf_map_lookup_elem(&sockets, &destination);
	if (!sk) {
		c->misses++;
		return SK_DROP;
	}
	err = bpf_sk_assign(ctx, sk, 0);
	bpf_sk_release(sk);
	if (err) {
		c->errors++;
		return SK_DROP;
	}
	return SK_PASS;
}

/* Measures the fixed cost of a test run. */
SEC("sk_lookup")
int no_dispatch(struct bpf_sk_lookup *ctx)
{
	return SK_PASS;
}

char _license[] SEC("license") = "Dual BSD/GPL";
