/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* Egress: packets sent in a session's place. */
#ifndef WEIR_BFD_LEAVE_H
#define WEIR_BFD_LEAVE_H

#include "receive.h"

/*
 * bfd_leave drops control packets of local users to a session's neighbor. Without it they could
 * speak for the session: no socket holds its source port, and the hop limit stops other hosts only.
 * The sessions' packets have the mark, which needs CAP_NET_ADMIN. Root may send anything.
 */
SEC("tc")
int bfd_leave(struct __sk_buff *skb)
{
	struct bfd_from to = { .ifindex = skb->ifindex };
	struct bfd_arrival a = {};
	struct bfd_setup *c;
	struct bfd_state *s;
	__u32 *place;

	if (skb->mark == REROUTE_MARK || reroute_tagged(skb) || !bfd_parse(skb, &a) || a.echo ||
	    a.hops != BFD_HOPS)
		return BFD_PASS;
	__builtin_memcpy(to.peer, a.to, 16);
	place = bpf_map_lookup_elem(&bfd_peers, &to);
	if (!place)
		return BFD_PASS;
	c = bpf_map_lookup_elem(&bfd_setups, place);
	s = bpf_map_lookup_elem(&bfd_states, place);
	if (!c || !s || !c->generation || !bfd_same(a.from, c->local) || !bpf_get_socket_uid(skb))
		return BFD_PASS;
	bpf_spin_lock(&s->lock);
	s->not_authentic++;
	bpf_spin_unlock(&s->lock);
	return TC_ACT_SHOT;
}

#endif
