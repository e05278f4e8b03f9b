//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Steering by sk_reuseport: the same decision as steer.bpf.c, for hosts that want no program in a
 * namespace's lookup path, and for kernels without sk_lookup.
 *
 * A program is attached to each reuseport group of a service: all members' sockets bound to one
 * address and port. Each group has its own copy of the program, with its own constants.
 */
#include <stddef.h>

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "hash.h"
#include "steer.h"

typedef struct sk_reuseport_md steer_ctx;

#include "common.h"

#define ENOENT 2

/* Row r, endpoint e is index r * STEER_MAX_ENDPOINTS + at[e] of its slot. */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, STEER_MAX_ROWS * STEER_MAX_ENDPOINTS);
	__type(key, __u32);
	__type(value, __u64);
} steer_sockets SEC(".maps");

/*
 * The holder's socket in each group, at service * STEER_MAX_ENDPOINTS + endpoint. It keeps the
 * group, and with it the program, while no member exists. It drops all packets sent to it by
 * on_empty: drop.
 */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, STEER_MAX_SERVICES * STEER_MAX_ENDPOINTS);
	__type(key, __u32);
	__type(value, __u64);
} steer_holders SEC(".maps");

/* Socket cookie to slot, for nginx's connection ids. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STEER_MAX_ROWS * STEER_MAX_ENDPOINTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} steer_cookies SEC(".maps");

const volatile struct group steer_group = {};

/* packet_read reads the packet's headers. It returns -1 if they are truncated. */
static __always_inline int packet_read(struct sk_reuseport_md *ctx, struct packet *p)
{
	__u16 *ports = ctx->data;

	p->tcp = ctx->ip_protocol == IPPROTO_TCP;
	if ((void *)(ports + 2) > ctx->data_end)
		return -1;
	p->remote_port = ports[0];
	p->port = bpf_ntohs(ports[1]);
	if (ctx->eth_protocol == bpf_htons(ETH_P_IP)) {
		__u32 addr[2];

		if (bpf_skb_load_bytes_relative(ctx, 12, addr, sizeof(addr), BPF_HDR_START_NET))
			return -1;
		p->family = AF_INET;
		p->src[0] = p->src[1] = p->dst[1] = p->dst[2] = p->dst[3] = 0;
		p->src[2] = bpf_htonl(0xffff);
		p->src[3] = addr[0];
		p->dst[0] = addr[1];
		return 0;
	}
	p->family = AF_INET6;
	if (bpf_skb_load_bytes_relative(ctx, 8, p->src, sizeof(p->src), BPF_HDR_START_NET) ||
	    bpf_skb_load_bytes_relative(ctx, 24, p->dst, sizeof(p->dst), BPF_HDR_START_NET))
		return -1;
	return 0;
}

/*
 * This type of program can check for another endpoint's socket only by selecting it. The helper
 * rejects a socket of another group, but with a different error than for a missing socket. The
 * packet's own socket is selected last, because the last selection counts.
 */
static __always_inline enum given give(struct sk_reuseport_md *ctx, struct service *s, __u32 row,
				       __u32 endpoint)
{
	struct slot *slot = bpf_map_lookup_elem(&steer_slots, &row);
	__u64 whole = ~0ULL;
	__u32 i, key;
	long err;

	if (!slot || slot->state != STEER_ADMITTED)
		return NOT_WHOLE;
	for (i = 1; i < STEER_MAX_ENDPOINTS; i++) {
		__u64 differs;
		__u32 e;

		if (i >= steer_group.endpoints)
			break;
		e = the_other(endpoint, i, steer_group.endpoints);
		key = row * STEER_MAX_ENDPOINTS + slot->at[e & (STEER_MAX_ENDPOINTS - 1)];
		/* No branch: the verifier would follow all 2^endpoints paths. */
		differs = bpf_sk_select_reuseport(ctx, &steer_sockets, &key, 0) + ENOENT;
		whole &= differs | -differs;
	}
	if (!(whole >> 63))
		return NOT_WHOLE;
	key = row * STEER_MAX_ENDPOINTS + slot->at[endpoint & (STEER_MAX_ENDPOINTS - 1)];
	err = bpf_sk_select_reuseport(ctx, &steer_sockets, &key, 0);
	if (err == -ENOENT)
		return NOT_WHOLE;
	return err ? REFUSED : GIVEN;
}

static __always_inline int swallow(struct sk_reuseport_md *ctx, struct service *s, struct packet *p)
{
	__u32 key = steer_group.holder;

	return bpf_sk_select_reuseport(ctx, &steer_holders, &key, 0);
}

/*
 * The program chooses only within a group. Generations need all sockets of a member, so only engine
 * sk_lookup has them.
 */
static __always_inline int give_known(steer_ctx *ctx, struct service *s, struct packet *p,
				      __u32 row, __u32 endpoint)
{
	return 0;
}

static __always_inline int give_before(steer_ctx *ctx, struct service *s, __u32 row, __u32 endpoint)
{
	return 0;
}

static __always_inline int pass(struct sk_reuseport_md *ctx, struct place *at)
{
	/*
	 * The kernel could choose any socket of the group, including the holder's, which nobody
	 * reads.
	 */
	at->hash = ctx->hash;
	return 0;
}

/* quic_id finds the server's connection id. It returns 0 if the packet has none. */
static __always_inline __u32 quic_id(struct sk_reuseport_md *ctx, __u32 want, __u8 *id)
{
	__u8 *data = ctx->data, *end = ctx->data_end;
	__u8 *quic = data + 8; /* after the UDP header */

	if (quic + 6 > end)
		return 0;
	if (!(quic[0] & 0x80)) { /* short header: the server's id, of a length it knows */
		if (quic + 1 + 8 > end)
			return 0;
		__builtin_memcpy(id, quic + 1, 8);
		return 1;
	}
	/* RFC 9000, 17.2: the id of Initial and 0-RTT may be chosen by the client. */
	if (!((quic[0] >> 4) & 2) || quic[5] < want || quic + 6 + 8 > end)
		return 0;
	__builtin_memcpy(id, quic + 6, 8);
	return 1;
}

/* place_quic finds the slot named by a connection id. It returns 0 on success. */
static __always_inline int place_quic(struct sk_reuseport_md *ctx, struct service *s,
				      struct place *at)
{
	__u32 server, len = s->sid_len;
	__u64 id;

	if (!quic_id(ctx, s->quic == STEER_QUIC_NGINX ? 8 : 1 + len, (__u8 *)&id))
		return -1;
	id = bpf_be64_to_cpu(id);
	if (s->quic == STEER_QUIC_NGINX) {
		__u32 *slot = bpf_map_lookup_elem(&steer_cookies, &id);

		if (!slot)
			return -1;
		server = *slot;
	} else {
		if (id >> 61 == 7)
			return -1; /* the draft's mark of an id without a server */
		server = (__u32)(id >> 24) >> ((32 - 8 * len) & 31);
	}
	if (server >= s->slots)
		return -1;
	at->slot = server & (STEER_MAX_SLOTS - 1);
	return 0;
}

static __always_inline int decide(struct sk_reuseport_md *ctx, struct service *s)
{
	struct place at = {};
	struct packet p;

	if (!s)
		return SK_PASS; /* being removed: the holder has left the group already */
	if (packet_read(ctx, &p))
		return SK_DROP;
	if (s->policy == STEER_BY_DEVICE)
		resolve_alias(s, &p);
	note_device(s, &p);
	place_of(s, &p, &at);
	if (s->policy == STEER_BY_QUIC && !p.tcp)
		place_quic(ctx, s, &at);
	return steer_to(ctx, s, &p, &at, steer_group.endpoint[p.family == AF_INET6]);
}

SEC("sk_reuseport")
int steer_reuse(struct sk_reuseport_md *ctx)
{
	return decide(ctx, service_of(steer_group.service));
}

/*
 * Since Linux 5.14 the kernel asks the program where to move the queue of a closing listener. The
 * queue moves only at the operator's request, because it goes to another collector. Without a
 * packet there is no source, so any complete slot serves.
 */
SEC("sk_reuseport/migrate")
int steer_migrate(struct sk_reuseport_md *ctx)
{
	struct service *s = service_of(steer_group.service);
	struct packet p = { .tcp = 1 };
	struct place at = {};

	if (!ctx->migrating_sk)
		return decide(ctx, s);
	if (!s || !(s->flags & STEER_MIGRATE))
		return SK_DROP;
	at.hash = ctx->hash;
	at.slot = at.hash % (s->slots ? s->slots : 1) & (STEER_MAX_SLOTS - 1);
	if (give(ctx, s, row_of(s, at.slot), steer_group.endpoint[0]) == GIVEN)
		return SK_PASS;
	return divert(ctx, s, &p, &at, steer_group.endpoint[0]) ? SK_PASS : SK_DROP;
}

char _license[] SEC("license") = "Dual BSD/GPL";
