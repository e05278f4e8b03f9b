/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/*
 * Two generations of a slot's member, side by side: UDP peers that the old one knows stay with it
 * until they are silent or its time is over, and all else is the new one's. For engine sk_lookup,
 * which can give a packet to any socket; steer.bpf.c includes this.
 */
#ifndef WEIR_STEER_GENERATIONS_H
#define WEIR_STEER_GENERATIONS_H

/* By row. What is drained is told here; that it is over needs nobody to say. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEER_MAX_ROWS);
	__type(key, __u32);
	__type(value, struct generation);
} steer_gens SEC(".maps");

struct inner_peers {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, STEER_MAX_DEVICES); /* a service's own may have others */
	__uint(key_size, sizeof(struct peer_key));
	__uint(value_size, sizeof(struct peer));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, STEER_MAX_SERVICES);
	__type(key, __u32);
	__array(values, struct inner_peers);
} steer_known SEC(".maps");

/* Nothing else makes clang describe the types that user space reads. */
const struct peer_key *steer_peer_key_type __attribute__((unused));
const struct peer *steer_peer_type __attribute__((unused));

/*
 * give_old gives a packet to a generation that drains. Its other sockets may be closed by now: it
 * is going, and a listener goes before the datagrams of known peers.
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

/* draining is what is known of a row that drains for another one, or NULL. */
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
		k->row = row; /* for good: a peer does not go back */
	}
	k->seen = now;
	return 0;
}

/*
 * give_before is for a new generation that is gone before the one before it is: a start that failed
 * costs nothing then.
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
