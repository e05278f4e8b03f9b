/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Two generations of a slot's member. Known UDP peers stay with the old one until they fall silent
 * or the deadline passes. The new one gets all other traffic. Only engine sk_lookup can select any
 * socket, so steer.bpf.c includes this file.
 */
#ifndef WEIR_STEER_GENERATIONS_H
#define WEIR_STEER_GENERATIONS_H

/* By row. User space starts a drain here. It ends by itself. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEER_MAX_ROWS);
	__type(key, __u32);
	__type(value, struct generation);
} steer_gens SEC(".maps");

struct inner_peers {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, STEER_MAX_DEVICES); /* a service's own map may have another size */
	__uint(key_size, sizeof(struct peer_key));
	__uint(value_size, sizeof(struct peer));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, STEER_MAX_SERVICES);
	__type(key, __u32);
	__array(values, struct inner_peers);
} steer_known SEC(".maps");

/* Makes clang emit the types read by user space. */
const struct peer_key *steer_peer_key_type __attribute__((unused));
const struct peer *steer_peer_type __attribute__((unused));

/*
 * give_old assigns a packet to a draining generation. Its other sockets may be closed already: a
 * listener closes before the datagrams of known peers end.
 */
static __always_inline int give_old(struct bpf_sk_lookup *ctx, __u32 row, __u32 endpoint)
{
	struct slot *slot = bpf_map_lookup_elem(&steer_slots, &row);
	struct bpf_sock *sk;
	long err;

	if (!slot || slot->state != STEER_ADMITTED)
		return 0;
	row = row * STEER_MAX_ENDPOINTS + endpoint;
	sk = bpf_map_lookup_elem(&steer_sockets, &row);
	if (!sk)
		return 0;
	err = bpf_sk_assign(ctx, sk, BPF_SK_LOOKUP_F_NO_REUSEPORT);
	bpf_sk_release(sk);
	return !err;
}

/* draining returns the generation of a row that drains for heir, or NULL. */
static __always_inline struct generation *draining(__u32 row, __u32 heir, __u64 now)
{
	struct generation *g = bpf_map_lookup_elem(&steer_gens, &row);

	return g && g->heir == heir + 1 && now < g->until ? g : NULL;
}

static __always_inline int give_known(struct bpf_sk_lookup *ctx, struct service *s,
				      struct packet *p, __u32 row, __u32 endpoint)
{
	struct peer_key key = { .port = p->remote_port, .endpoint = endpoint };
	struct generation *g;
	__u32 id = s->id;
	struct peer *k;
	void *inner;
	__u64 now;

	if (!(s->flags & STEER_GENERATIONS) || p->tcp)
		return 0;
	inner = bpf_map_lookup_elem(&steer_known, &id);
	if (!inner)
		return 0;
	now = clock_of(s);
	__builtin_memcpy(key.addr, p->src, sizeof(key.addr));
	k = bpf_map_lookup_elem(inner, &key);
	if (!k) {
		struct peer fresh = { .seen = now, .row = row };

		bpf_map_update_elem(inner, &key, &fresh, BPF_NOEXIST);
		return 0;
	}
	if (k->row != row) {
		__u32 old = k->row;

		g = draining(old, row, now);
		if (g && (__s64)(now - k->seen) <= (__s64)g->idle && give_old(ctx, old, endpoint)) {
			k->seen = now;
			__sync_fetch_and_add(&g->kept, 1);
			return 1;
		}
		k->row = row; /* permanently: a peer does not return */
	}
	k->seen = now;
	return 0;
}

/*
 * give_before handles a new generation that exits before its predecessor. A failed start then loses
 * no packet.
 */
static __always_inline int give_before(struct bpf_sk_lookup *ctx, struct service *s, __u32 row,
				       __u32 endpoint)
{
	struct generation *g;
	__u32 old;

	if (!(s->flags & STEER_GENERATIONS))
		return 0;
	g = bpf_map_lookup_elem(&steer_gens, &row);
	if (!g || !g->before)
		return 0;
	old = g->before - 1;
	g = draining(old, row, clock_of(s));
	if (!g || !give_old(ctx, old, endpoint))
		return 0;
	__sync_fetch_and_add(&g->back, 1);
	return 1;
}

#endif
