//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Steering by sk_reuseport: the same decision as steer.bpf.c, for hosts that want nothing in a
 * namespace's lookup path, and for kernels without sk_lookup.
 *
 * A program is attached to each reuseport group of a service: the sockets of all members that
 * are bound to one address and port. Each group has a copy of its own, with its constants.
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
 * The holder's socket in each group, service * STEER_MAX_ENDPOINTS + endpoint. It keeps the group,
 * and so the program, while no member is there, and swallows what on_empty: drop gives it.
 */
struct {
	__uint(type, BPF_MAP_TYPE_REUSEPORT_SOCKARRAY);
	__uint(max_entries, STEER_MAX_SERVICES * STEER_MAX_ENDPOINTS);
	__type(key, __u32);
	__type(value, __u64);
} steer_holders SEC(".maps");

/* Socket cookie to slot, for the connection ids of nginx. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STEER_MAX_ROWS * STEER_MAX_ENDPOINTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, __u32);
} steer_cookies SEC(".maps");

const volatile struct group steer_group = {};

/* packet_read reads the packet's headers. It returns 0 unless they are cut short. */
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
 * Selecting is also how this type of program asks whether another endpoint's socket is there: the
 * helper refuses a socket of another group, but with another error than one that is gone. The
 * packet's own comes last, for the last one selected is the one that gets it.
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
		/* Without a branch: the verifier would follow all 2^endpoints ways through here. */
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

/* Sockets of a group are chosen among here, and generations need to know them all: sk_lookup has them. */
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
	/* The kernel would choose among all sockets of the group, the holder's too, which nobody reads. */
	at->hash = ctx->hash;
	return 0;
}

/* quic_id finds the connection id that a server chose; 0 where the packet has none. */
static __always_inline __u32 quic_id(struct sk_reuseport_md *ctx, __u32 want, __u8 *id)
{
	__u8 *data = ctx->data, *end = ctx->data_end;
	__u8 *quic = data + 8; /* behind the UDP header */

	if (quic + 6 > end)
		return 0;
	if (!(quic[0] & 0x80)) { /* short header: the server's own, of a length that it knows */
		if (quic + 1 + 8 > end)
			return 0;
		__builtin_memcpy(id, quic + 1, 8);
		return 1;
	}
	/* RFC 9000, 17.2: Initial and 0-RTT may carry an id that the client made up. */
	if (!((quic[0] >> 4) & 2) || quic[5] < want || quic + 6 + 8 > end)
		return 0;
	__builtin_memcpy(id, quic + 6, 8);
	return 1;
}

/* place_quic finds the slot that a connection id names. It returns 0 if there is one. */
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
			return -1; /* the draft's mark of an id that names no server */
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
		return SK_PASS; /* being removed: the holder has left the group by now */
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
 * Since Linux 5.14 a program can be asked where the queue of a closing listener goes. It moves
 * only if the operator said so: to another collector that is. There is no packet then, and so no
 * source: any whole slot will do.
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
