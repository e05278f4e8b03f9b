//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The load balancer's data path, at tcx of the devices towards clients and backends. Every backend
 * has the service's address, so only MAC addresses of packets change: no NAT, no checksums, and GSO
 * packets pass. Backends behind routers are at the ends of VXLAN tunnels. One kernel device serves
 * all tunnels, and the program sets the end. A flow has one owner. Packets from clients go to the
 * owner. Packets of other backends for the flow are dropped. Package move explains why this is
 * enough.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/if_packet.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <stddef.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "lb.h"
#include "hash.h"

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LB_SERVICES);
	__type(key, struct lb_service_key);
	__type(value, struct lb_service);
} lb_services SEC(".maps");

/* The backend of each bucket, for each service. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LB_SERVICES * LB_BUCKETS);
	__type(key, __u32);
	__type(value, __u16);
} lb_ring SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LB_BACKENDS);
	__type(key, __u32);
	__type(value, struct lb_backend);
} lb_backends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LB_BACKENDS);
	__type(key, struct lb_mac_key);
	__type(value, __u32);
} lb_macs SEC(".maps");

/* The backends behind tunnels. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LB_BACKENDS);
	__type(key, struct lb_tunnel_key);
	__type(value, __u32);
} lb_tunnels SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct lb_config);
} lb_setup SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, LB_FLOWS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct lb_flow_key);
	__type(value, struct lb_flow);
} lb_flows SEC(".maps");

/*
 * Learned flows for the partner, confirmed by more than a client's packets. Flows lost for lack of
 * room are reported by the next complete comparison.
 */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} lb_learned SEC(".maps");

/*
 * By backend: CLOCK_MONOTONIC in ns of the latest tunnel packet from an unprivileged source port.
 * At index 0: 1 if these packets are dropped. Not pinned: the agent sets it.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LB_BACKENDS);
	__type(key, __u32);
	__type(value, __u64);
} lb_users SEC(".maps");

/* Not pinned: the agent counts again. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct lb_unasked);
} lb_room SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LB_COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} lb_counts SEC(".maps");

/* Room for sources, indexed by LB_SOURCES_…. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LB_SOURCES);
	__type(key, __u32);
	__type(value, __u64);
} lb_sources SEC(".maps");

const struct lb_change_args *lb_change_args_type __attribute__((unused)); /* for bpf2go */

struct packet {
	struct lb_service_key to; /* destination */
	struct lb_service_key from;
	__u32 ack;  /* TCP acknowledgment number */
	__u8 tcp;   /* TCP flags, the header's 14th byte */
	__u8 error; /* an ICMP error: to and from are of the packet inside, swapped */
	__u8 later; /* a later fragment, without ports */
	__u32 at;   /* offset of the transport header, or of the one inside an ICMP error */
};

/* linux/icmp.h needs headers of user space. */
#define ICMP_DEST_UNREACH   3
#define ICMP_TIME_EXCEEDED  11
#define ICMP_PARAMETERPROB  12
#define ICMPV6_DEST_UNREACH 1
#define ICMPV6_PARAMPROB    4
#define ICMP_HEADER	    8 /* bytes, of both */

#define IP_OFFSET     0x1fff /* of frag_off */
#define IP_DF	      0x4000
#define IP6_OFFSET    0xfff8
#define NEXT_FRAGMENT 44

#define TCP_FIN 0x01
#define TCP_SYN 0x02
#define TCP_RST 0x04
#define TCP_PSH 0x08
#define TCP_ACK 0x10

static __always_inline void count(__u32 what)
{
	__u64 *n = bpf_map_lookup_elem(&lb_counts, &what);

	if (n)
		*n += 1;
}

static __always_inline void mapped(__u8 *to, __u32 v4)
{
	__u32 *w = (__u32 *)to;

	w[0] = 0;
	w[1] = 0;
	w[2] = bpf_htonl(0xffff);
	w[3] = v4;
}

/* ports reads a transport header. It returns 0 on success. */
static __always_inline int ports(struct __sk_buff *skb, __u32 at, __u8 proto, struct packet *p)
{
	struct {
		__be32 ack;
		__u8 offset, flags;
		__be16 window;
	} tcp;
	__be16 both[2];

	if (proto != IPPROTO_TCP && proto != IPPROTO_UDP)
		return -1;
	p->from.proto = proto;
	p->to.proto = proto;
	p->at = at;
	if (p->later)
		return 0;
	if (bpf_skb_load_bytes(skb, at, both, sizeof(both)))
		return -1;
	p->from.port = both[0];
	p->to.port = both[1];
	if (proto != IPPROTO_TCP || p->error)
		return 0;
	if (bpf_skb_load_bytes(skb, at + offsetof(struct tcphdr, ack_seq), &tcp, sizeof(tcp)))
		return -1;
	p->ack = bpf_ntohl(tcp.ack);
	p->tcp = tcp.flags;
	return 0;
}

/* turned swaps the ends of the packet inside an ICMP error. The service sent that packet. */
static __always_inline void turned(struct packet *p)
{
	struct lb_service_key k = p->to;

	p->to = p->from;
	p->from = k;
}

static __always_inline int read4(struct __sk_buff *skb, __u32 at, struct packet *p, __u8 *proto,
				 __u32 *next)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, at, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5)
		return -1;
	p->later = (ip.frag_off & bpf_htons(IP_OFFSET)) != 0;
	mapped(p->from.addr, ip.saddr);
	mapped(p->to.addr, ip.daddr);
	*proto = ip.protocol;
	*next = at + ip.ihl * 4;
	return 0;
}

static __always_inline int read6(struct __sk_buff *skb, __u32 at, struct packet *p, __u8 *proto,
				 __u32 *next)
{
	struct ipv6hdr ip;

	if (bpf_skb_load_bytes(skb, at, &ip, sizeof(ip)) || ip.version != 6)
		return -1;
	__builtin_memcpy(p->from.addr, &ip.saddr, 16);
	__builtin_memcpy(p->to.addr, &ip.daddr, 16);
	*proto = ip.nexthdr; /* packets with other extension headers are not handled */
	*next = at + sizeof(ip);
	if (*proto == NEXT_FRAGMENT) {
		struct fragment {
			__u8 next, reserved;
			__be16 offset;
			__be32 id;
		} frag;

		if (bpf_skb_load_bytes(skb, *next, &frag, sizeof(frag)))
			return -1;
		p->later = (frag.offset & bpf_htons(IP6_OFFSET)) != 0;
		*proto = frag.next;
		*next += sizeof(frag);
	}
	return 0;
}

/*
 * tagged returns whether a packet belongs to a VLAN. Then it is for a device above this one, even
 * if the kernel has removed the tag. VLAN 0 is a priority tag alone (IEEE 802.1Q, 6.9).
 */
static __always_inline int tagged(const struct __sk_buff *skb)
{
	return skb->vlan_present && skb->vlan_tci & 0xfff;
}

/* read reads a packet's ends. For an ICMP error it reads the packet inside. */
static __always_inline int read(struct __sk_buff *skb, struct packet *p)
{
	__u8 proto, type;
	__u32 next;

	if (tagged(skb))
		return -1;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (read4(skb, ETH_HLEN, p, &proto, &next))
			return -1;
		if (proto != IPPROTO_ICMP)
			return ports(skb, next, proto, p);
		if (bpf_skb_load_bytes(skb, next, &type, 1) ||
		    (type != ICMP_DEST_UNREACH && type != ICMP_TIME_EXCEEDED &&
		     type != ICMP_PARAMETERPROB))
			return -1;
		p->error = 1;
		if (read4(skb, next + ICMP_HEADER, p, &proto, &next))
			return -1;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (read6(skb, ETH_HLEN, p, &proto, &next))
			return -1;
		if (proto != IPPROTO_ICMPV6)
			return ports(skb, next, proto, p);
		if (bpf_skb_load_bytes(skb, next, &type, 1) || type < ICMPV6_DEST_UNREACH ||
		    type > ICMPV6_PARAMPROB)
			return -1;
		p->error = 1;
		if (read6(skb, next + ICMP_HEADER, p, &proto, &next))
			return -1;
	} else {
		return -1;
	}
	if (ports(skb, next, proto, p))
		return -1;
	turned(p);
	return 0;
}

static __always_inline __u32 bucket_backend(const struct lb_service *s, const struct lb_flow_key *k)
{
	__u32 at = weir_hash_addr((const __u32 *)k->client, k->port) % LB_BUCKETS +
		   s->id % LB_SERVICES * LB_BUCKETS;
	__u16 *backend = bpf_map_lookup_elem(&lb_ring, &at);

	return backend ? *backend : 0;
}

static __always_inline struct lb_config *config(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&lb_setup, &zero);
}

/* may_fragment returns whether a packet may be fragmented on its way. */
static __always_inline int may_fragment(struct __sk_buff *skb)
{
	__be16 frag;

	if (skb->protocol != bpf_htons(ETH_P_IP))
		return 0;
	if (bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct iphdr, frag_off), &frag,
			       sizeof(frag)))
		return 0;
	return !(frag & bpf_htons(IP_DF));
}

/*
 * into_tunnel sets the tunnel's end of a packet. It returns 1 for a packet too big for the tunnel
 * without permission to fragment. The kernel then answers it with a Packet Too Big, because its
 * route for the service has the tunnel's MTU.
 */
static __always_inline int into_tunnel(struct __sk_buff *skb, const struct lb_backend *h)
{
	struct lb_config *c = config();
	struct bpf_tunnel_key key = { .tunnel_ttl = 64 };
	__u64 flags = BPF_F_ZERO_CSUM_TX;
	__u32 mtu = 0;

	if (!c)
		return -1;
	if (bpf_check_mtu(skb, h->ifindex, &mtu, 0, BPF_MTU_CHK_SEGS) > 0 && !may_fragment(skb)) {
		count(LB_BIG);
		return 1;
	}
	key.tunnel_id = c->vni;
	if (h->tunnel6) {
		__builtin_memcpy(key.remote_ipv6, h->tunnel, 16);
		flags = BPF_F_TUNINFO_IPV6;
	} else {
		key.remote_ipv4 = bpf_ntohl(*(const __u32 *)(h->tunnel + 12));
	}
	return bpf_skb_set_tunnel_key(skb, &key, sizeof(key), flags) ? -1 : 0;
}

/* to_backend forwards a packet to a backend. */
static __always_inline int to_backend(struct __sk_buff *skb, const struct lb_backend *h)
{
	__u8 macs[12];
	int special;

	if (!h || !h->ifindex) {
		count(LB_NO_BACKEND);
		return TC_ACT_SHOT;
	}
	if (*(__u32 *)h->tunnel || *(__u32 *)(h->tunnel + 8)) {
		special = into_tunnel(skb, h);
		if (special)
			return special > 0 ? TC_ACT_UNSPEC : TC_ACT_SHOT;
	}
	__builtin_memcpy(macs, h->mac, 6);
	__builtin_memcpy(macs + 6, h->from, 6);
	if (bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0))
		return TC_ACT_SHOT;
	count(LB_IN);
	return bpf_redirect(h->ifindex, 0);
}

/*
 * tell reports a flow to the agent, for its partner. The partner needs no report of flows found by
 * the hash.
 */
static __always_inline void tell(const struct lb_flow_key *k, const struct lb_service *s,
				 __u32 owner)
{
	struct lb_config *c = config();

	if (c && (c->news == 1 || (c->news == 2 && bucket_backend(s, k) != owner)))
		bpf_ringbuf_output(&lb_learned, (void *)k, sizeof(*k), 0);
}

static __always_inline struct lb_unasked *unasked(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&lb_room, &zero);
}

/*
 * has_room returns whether one more flow may be learned from a backend's packet alone, and counts
 * it. Any user of a backend's host can forge such packets. The other half of the table is for
 * clients.
 */
static __always_inline int has_room(void)
{
	struct lb_unasked *u = unasked();
	__u64 now = bpf_ktime_get_coarse_ns();

	if (!u)
		return 0;
	if (u->counted + LB_UNASKED_TIME < now) {
		u->counted = now;
		u->flows = 0;
	}
	if (u->flows >= LB_UNASKED_MOST)
		return 0;
	__sync_fetch_and_add(&u->flows, 1);
	return 1;
}

/* confirmed notes that more than a backend's packets confirm a flow. */
static __always_inline void confirmed(struct lb_flow *f)
{
	struct lb_unasked *u;

	if (!(f->flags & LB_UNASKED))
		return;
	f->flags &= ~LB_UNASKED;
	u = unasked();
	if (u && u->flows > 0)
		__sync_fetch_and_add(&u->flows, -1);
}

/*
 * learn records a new flow. Without room the flow follows the hash. A connection is reported only
 * after its backend has shown a session. Otherwise a flood of forged segments would fill two load
 * balancers.
 */
static __always_inline void learn(const struct lb_flow_key *k, const struct lb_service *s,
				  const struct packet *p, __u32 owner, __u32 flags, int by_backend)
{
	struct lb_flow f = {
		.word = owner,
		.seen = bpf_ktime_get_coarse_ns(),
		.in = !by_backend,
		.out = by_backend,
		.until = by_backend && flags & LB_UNOPENED && p->tcp & TCP_ACK ? LB_ACKED | p->ack :
										 0,
		.flags = by_backend ? flags | LB_UNASKED : flags,
		.birth = bpf_get_prandom_u32() | 1,
	};
	__u32 learned = LB_SOURCES_LEARNED;
	__u64 *known;

	if ((by_backend && !has_room()) || bpf_map_update_elem(&lb_flows, k, &f, BPF_NOEXIST)) {
		count(LB_FULL);
		return;
	}
	count(LB_LEARNED);
	known = bpf_map_lookup_elem(&lb_sources, &learned);
	if (known)
		__sync_fetch_and_add(known, 1);
	if ((by_backend && !(flags & LB_UNOPENED)) || !k->port)
		tell(k, s, owner);
}

/* opens returns whether a client's packet opens a connection. */
static __always_inline int opens(const struct packet *p, const struct lb_service *s)
{
	return !s->by_source && (p->tcp & (TCP_SYN | TCP_ACK | TCP_RST | TCP_FIN)) == TCP_SYN;
}

/*
 * unopened returns the flags of a flow learned from a segment that does not show a session. A
 * source has none.
 */
static __always_inline __u32 unopened(const struct lb_service *s, int syn)
{
	if (s->by_source)
		return 0;
	return syn ? LB_OPENING : LB_MIDWAY;
}

/*
 * awaited returns whether a packet must wait for the startup: the load balancer is new, and the
 * backends have not reported the packet's connection yet. The client repeats the packet. A packet
 * opening a connection never waits, unless its source may already have a backend.
 */
static __always_inline int awaited(const struct packet *p, const struct lb_service *s)
{
	struct lb_config *c;

	if (p->to.proto != IPPROTO_TCP || p->error || opens(p, s))
		return 0;
	c = config();
	return c && c->settle && bpf_ktime_get_coarse_ns() < c->settle;
}

/*
 * takes_sources returns whether one more source may be learned. Each CPU may exceed the limit by
 * one.
 */
static __always_inline int takes_sources(void)
{
	__u32 learned = LB_SOURCES_LEARNED, until = LB_SOURCES_UNTIL;
	__u64 *n = bpf_map_lookup_elem(&lb_sources, &learned);
	__u64 *most = bpf_map_lookup_elem(&lb_sources, &until);

	return n && most && (!*most || *n < *most);
}

/*
 * learns returns whether a packet makes a flow known. Packets of connections do. Sources of a
 * service by source are learned while there is room, because anybody can forge sources. A
 * datagram's source is learned only after the startup. Other datagrams follow the hash.
 */
static __always_inline int learns(const struct packet *p, const struct lb_service *s)
{
	struct lb_config *c;

	if (p->error)
		return 0;
	if (p->to.proto == IPPROTO_TCP && p->tcp & TCP_RST)
		return 0;
	if (!s->by_source)
		return p->to.proto == IPPROTO_TCP;
	c = config();
	if (!c || c->full || !takes_sources())
		return 0;
	return p->to.proto == IPPROTO_TCP || !c->settle || bpf_ktime_get_coarse_ns() >= c->settle;
}

/* ended must match Go's Flow.Ended. */
static __always_inline int ended(__u32 flags)
{
	return flags & LB_RST || (flags & LB_FINS) == LB_FINS;
}

/* saw notes a packet of a flow. The end of a connection does not end a source. */
static __always_inline void saw(struct lb_flow *f, const struct packet *p,
				const struct lb_service *s, __u32 fin, __u32 rst)
{
	f->seen = bpf_ktime_get_coarse_ns();
	if (!s->by_source && p->tcp & (TCP_FIN | TCP_RST))
		f->flags |= p->tcp & TCP_RST ? rst : fin;
}

/*
 * both_ended returns whether both sides have closed a connection, or the backend has reset it. A
 * client's reset alone does not count. Anybody can forge one, and a stopped owner does not
 * contradict it, although it has the session.
 */
static __always_inline int both_ended(__u32 flags)
{
	return flags & LB_RST_OUT || (flags & LB_FINS) == LB_FINS;
}

/*
 * unanswered returns whether nobody has the connection being opened. Either both sides closed the
 * previous one, or the owner leaves the SYNs unanswered or resets them.
 */
static __always_inline int unanswered(const struct lb_flow *f)
{
	if ((f->flags & LB_FINS) == LB_FINS)
		return 1;
	return f->flags & LB_UNANSWERED && f->seen + LB_ANSWER_TIME <= bpf_ktime_get_coarse_ns();
}

/*
 * long_reset returns whether a connection has been silent since its client's reset for the time of
 * an ended flow. The owner may still have the connection. A SYN finds out.
 */
static __always_inline int long_reset(const struct lb_flow *f)
{
	struct lb_config *c = config();

	return c && c->ended && f->flags & LB_RST &&
	       f->seen + c->ended * 1000000ULL <= bpf_ktime_get_coarse_ns();
}

/*
 * balance assigns a flow to the backend of its bucket, if its owner is unwell or removed, or with
 * any. Callers use it for connections being reopened, and for flows of removed backends. The new
 * epoch has precedence over the partner's record. A flow that has just moved stays, because its
 * previous backend may reclaim it.
 */
static __always_inline void balance(struct lb_flow *f, const struct lb_flow_key *k,
				    const struct lb_service *s, __u32 flags, int any)
{
	__u64 word = f->word;
	__u32 to, owner = LB_OWNER(word);
	struct lb_backend *h = bpf_map_lookup_elem(&lb_backends, &owner);
	struct lb_config *c = config();

	if (!h || !c || (h->ifindex && !h->unwell && !any) || word & LB_MOVES ||
	    f->flags & LB_PINNED)
		return;
	if (word & LB_BEFORE &&
	    bpf_ktime_get_coarse_ns() < f->until + LB_RECLAIM_TIME + c->reclaim * 1000000000ULL)
		return;
	to = bucket_backend(s, k);
	if (!to || to == owner)
		return;
	if (__sync_val_compare_and_swap(&f->word, word, ((word >> 32) + 1) << 32 | to) != word)
		return; /* changed meanwhile by another packet, or the agent */
	f->flags = flags | LB_BALANCED;
	f->birth = bpf_get_prandom_u32() | 1;
	f->life = 0;
	f->in = 1;
	f->out = 0;
	count(LB_LEARNED);
	if (c->news)
		bpf_ringbuf_output(&lb_learned, (void *)k, sizeof(*k), 0);
}

/*
 * opened notes that a client opens a connection between the same ends as an ended one. The new
 * connection goes to the same owner while the owner is well, because the owner may still know the
 * old one (TIME_WAIT). Long after a client's reset the owner's agent decides: if it has never
 * reported a session, there is none to cut.
 */
static __always_inline void opened(struct lb_flow *f, const struct lb_flow_key *k,
				   const struct lb_service *s)
{
	const __u32 ends = LB_RST | LB_RST_OWNER | LB_FIN_OUT;
	int left = (f->flags & (ends | LB_NAMED)) == LB_RST && long_reset(f);

	if (left || unanswered(f))
		balance(f, k, s, LB_OPENING | LB_UNANSWERED, left);
	if (both_ended(f->flags) || long_reset(f))
		f->flags |= LB_UNANSWERED;
	if (ended(f->flags))
		f->flags &= ~(LB_RSTS | LB_FINS);
}

/*
 * answers returns whether a client's packet answers a backend. It can be forged. Only the backend's
 * packets show that a connection is open, see saw_backend.
 */
static __always_inline int answers(const struct packet *p)
{
	return (p->tcp & (TCP_SYN | TCP_RST | TCP_ACK)) == TCP_ACK;
}

/* made_up returns whether a flow is known by a client's packets alone, as Go's Flow.Never. */
static __always_inline int made_up(const struct lb_flow *f)
{
	return !f->out && !(f->flags & (LB_TOLD | LB_NAMED)) &&
	       (!(f->word >> 32) || f->flags & LB_BALANCED);
}

/*
 * saw_client notes a client's packet. An ACK opens nothing. The backend may drop it silently, for
 * example for a wrong checksum, or as the first fragment of a packet without the rest.
 */
static __always_inline void saw_client(struct lb_flow *f, const struct lb_flow_key *k,
				       const struct packet *p, const struct lb_service *s)
{
	if (opens(p, s)) {
		opened(f, k, s);
		if (made_up(f))
			f->flags |= LB_OPENING;
	} else if (f->flags & (LB_UNANSWERED | LB_RST_OUT))
		f->flags &= ~(LB_UNANSWERED | LB_RST_OUT);
	if (s->by_source || answers(p))
		confirmed(f);
	saw(f, p, s, LB_FIN_IN, LB_RST);
}

/* shows returns whether an owner's segment alone proves a session: pushed data, or a FIN. */
static __always_inline int shows(const struct packet *p)
{
	return p->tcp & (TCP_PSH | TCP_FIN) && !(p->tcp & (TCP_SYN | TCP_RST));
}

/*
 * goes_on returns whether an owner has a session. Without one Linux answers with a SYN and ACK,
 * with a reset, or with an ACK of the SYN alone. The latter answers a segment outside the window of
 * an unopened connection (tcp_check_req). So data, a FIN, or an ACK beyond the first one proves a
 * session. The ACK is of the client's data, if the backend itself sends nothing. A SYN starts over.
 */
static __always_inline int goes_on(struct lb_flow *f, const struct packet *p)
{
	if (shows(p))
		return 1;
	if (!(p->tcp & TCP_ACK) || f->word & (LB_MOVES | LB_BEFORE))
		return 0;
	if (!(p->tcp & TCP_SYN) && f->until >> 32 == LB_ACKED >> 32)
		return (__s32)(p->ack - (__u32)f->until) > 0;
	f->until = LB_ACKED | p->ack;
	return 0;
}

/*
 * saw_backend notes an owner's packet:
 *
 *   - Other packets than resets and FINs revive a connection after any reset, because a
 *     client's reset can be forged. The client repeats a real one.
 *   - A reset does not answer a SYN: the host runs without a server.
 *   - The answer to a SYN begins a session, not yet reported by its agent.
 *   - After a reset the connection opens only by goes_on. Linux resets a forged ACK, and
 *     continues to repeat its earlier answer to the SYN.
 */
static __always_inline void saw_backend(struct lb_flow *f, const struct lb_flow_key *k,
					const struct packet *p, const struct lb_service *s)
{
	if (!f->out++ && k->port && !(f->flags & LB_UNOPENED))
		tell(k, s, LB_OWNER(f->word));
	if (!s->by_source && p->tcp & TCP_RST) {
		if (!(f->word & (LB_MOVES | LB_BEFORE)))
			f->until = 0;
		f->flags |= LB_OPENING;
	} else if (f->flags & LB_UNOPENED && goes_on(f, p)) {
		f->flags &= ~LB_UNOPENED;
		tell(k, s, LB_OWNER(f->word));
	}
	if (f->flags & LB_UNANSWERED && !(p->tcp & TCP_RST))
		f->flags &= ~LB_UNANSWERED;
	if (f->flags & LB_RST && !(p->tcp & (TCP_RST | TCP_FIN)))
		f->flags &= ~LB_RSTS;
	if (f->flags & LB_NAMED && p->tcp & TCP_SYN)
		f->flags &= ~LB_NAMED;
	saw(f, p, s, LB_FIN_OUT, LB_RSTS);
}

/*
 * to_owner forwards a packet to the owner of its flow. A removed backend's flow is reassigned
 * first. The new backend resets an unknown connection, so the client notices the loss.
 */
static __always_inline int to_owner(struct __sk_buff *skb, struct lb_flow *f,
				    const struct lb_flow_key *k, const struct packet *p,
				    const struct lb_service *s)
{
	__u32 owner = LB_OWNER(f->word);
	struct lb_backend *h = bpf_map_lookup_elem(&lb_backends, &owner);

	if (h && !h->ifindex && h->unwell == LB_REMOVED && !p->error && !(p->tcp & TCP_RST)) {
		balance(f, k, s, opens(p, s) ? LB_OPENING | LB_UNANSWERED : unopened(s, 0), 0);
		owner = LB_OWNER(f->word);
		h = bpf_map_lookup_elem(&lb_backends, &owner);
	}
	return to_backend(skb, h);
}

static __always_inline int from_client(struct __sk_buff *skb, struct packet *p,
				       const struct lb_service *s, int again)
{
	struct lb_flow_key k = { .service = s->id };
	struct lb_config *c;
	struct lb_flow *f;
	__u32 backend;

	if (s->broken) {
		count(LB_FRAGMENT);
		return TC_ACT_SHOT;
	}
	__builtin_memcpy(k.client, p->from.addr, 16);
	k.port = s->by_source ? 0 : p->from.port;
	f = bpf_map_lookup_elem(&lb_flows, &k);
	if (!f) {
		if (awaited(p, s)) {
			count(LB_AWAITED);
			return TC_ACT_SHOT;
		}
		backend = bucket_backend(s, &k);
		if (backend && learns(p, s))
			learn(&k, s, p, backend,
			      opens(p, s) ? LB_OPENING | LB_UNANSWERED : unopened(s, 0), 0);
		return to_backend(skb, bpf_map_lookup_elem(&lb_backends, &backend));
	}
	if (p->error) {
		count(LB_ICMP);
	} else {
		f->in++;
		saw_client(f, &k, p, s);
	}
	if (LB_BUFFERING(f->word) && !again) {
		c = config();
		if (c && bpf_ktime_get_coarse_ns() < f->until) {
			count(LB_BUFFERED);
			skb->mark = LB_MARK;
			return bpf_redirect(c->tap, 0);
		}
		count(LB_LATE);
	}
	return to_owner(skb, f, &k, p, s);
}

/* sender returns the backend of a packet. */
static __always_inline __u32 *sender(struct __sk_buff *skb)
{
	struct lb_mac_key m = { .ifindex = skb->ifindex };
	struct lb_config *c = config();

	if (c && c->tunnel == skb->ifindex) {
		struct lb_tunnel_key t = {};
		struct bpf_tunnel_key key = {};

		if (!bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0))
			mapped(t.addr, bpf_htonl(key.remote_ipv4));
		else if (!bpf_skb_get_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6))
			__builtin_memcpy(t.addr, key.remote_ipv6, 16);
		return bpf_map_lookup_elem(&lb_tunnels, &t);
	}
	if (bpf_skb_load_bytes(skb, ETH_ALEN, m.mac, ETH_ALEN))
		return 0;
	return bpf_map_lookup_elem(&lb_macs, &m);
}

static __always_inline int from_backend(struct __sk_buff *skb, struct packet *p,
					const struct lb_service *s)
{
	struct lb_flow_key k = { .service = s->id };
	struct lb_flow *f;
	__u32 *backend;
	__u64 word;

	if (s->broken) /* the first fragment has passed, and its flow was seen */
		return TC_ACT_UNSPEC;
	backend = sender(skb);
	if (!backend) {
		count(LB_STRANGER);
		return TC_ACT_SHOT;
	}
	__builtin_memcpy(k.client, p->to.addr, 16);
	k.port = s->by_source ? 0 : p->to.port;
	f = bpf_map_lookup_elem(&lb_flows, &k);
	if (!f) { /* forgotten during silence: the sender has it */
		if (learns(p, s))
			learn(&k, s, p, *backend, shows(p) ? 0 : unopened(s, p->tcp & TCP_SYN), 1);
		count(LB_OUT);
		return TC_ACT_UNSPEC;
	}
	word = f->word;
	if (LB_OWNER(word) != *backend) {
		count(LB_MUTE);
		return TC_ACT_SHOT;
	}
	if (p->tcp & TCP_RST && LB_TO(word)) {
		count(LB_NO_RESET);
		return TC_ACT_SHOT;
	}
	if (word & LB_BEFORE) /* the owner has answered: its predecessor cannot reclaim the flow */
		__sync_fetch_and_and(&f->word, ~LB_BEFORE);
	saw_backend(f, &k, p, s);
	count(LB_OUT);
	return TC_ACT_UNSPEC;
}

/*
 * has_service returns whether an address is a service's. Each has an entry at port 0, for
 * fragments.
 */
static __always_inline int has_service(struct lb_service_key *k)
{
	k->port = 0;
	k->proto = IPPROTO_TCP;
	if (bpf_map_lookup_elem(&lb_services, k))
		return 1;
	k->proto = IPPROTO_UDP;
	return bpf_map_lookup_elem(&lb_services, k) != 0;
}

/* Senders of packets from a tunnel: a service's address, the link itself, nobody. */
enum { OF_SERVICE, OF_LINK, OF_NOBODY };

/*
 * inner returns the kind of a packet from a tunnel. A new device sends router solicitations and
 * listener reports from link-local addresses. They are dropped, but do not count as intrusion.
 */
static __always_inline int inner(struct __sk_buff *skb)
{
	struct lb_service_key k = {};
	__be32 v4;

	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct iphdr, saddr), &v4,
				       sizeof(v4)))
			return OF_NOBODY;
		mapped(k.addr, v4);
		if (!v4)
			return OF_LINK;
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		__u32 *w = (__u32 *)k.addr;

		if (bpf_skb_load_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, saddr), k.addr,
				       sizeof(k.addr)))
			return OF_NOBODY;
		if ((w[0] & bpf_htonl(0xffc00000)) == bpf_htonl(0xfe800000) ||
		    !(w[0] | w[1] | w[2] | w[3]))
			return OF_LINK;
	} else {
		return OF_LINK;
	}
	return has_service(&k) ? OF_SERVICE : OF_NOBODY;
}

/*
 * intruder returns whether to drop a packet from the tunnels' device. The device accepts packets of
 * every sender, and the kernel would route the inner packets anywhere. A packet must come from a
 * backend's end, where any user can send one, and from a service's address. Only such packets enter
 * a backend's end.
 */
static __always_inline int intruder(struct __sk_buff *skb)
{
	struct lb_config *c = config();
	int of;

	if (!c || c->tunnel != skb->ifindex)
		return 0;
	of = sender(skb) ? inner(skb) : OF_NOBODY;
	if (of == OF_NOBODY)
		count(LB_STRANGER);
	return of != OF_SERVICE;
}

/*
 * of_tunnels returns whether a datagram is a VXLAN packet with weir's number. Unreadable ones count
 * as such.
 */
static __always_inline int of_tunnels(struct __sk_buff *skb, const struct packet *p,
				      const struct lb_config *c)
{
	__be32 vni;

	if (bpf_skb_load_bytes(skb, p->at + sizeof(struct udphdr) + 4, &vni, sizeof(vni)))
		return 1;
	return bpf_ntohl(vni) >> 8 == c->vni;
}

/*
 * of_user returns whether to drop a VXLAN packet because every user of the backend's host could
 * have sent it. If these are allowed, it only notes the backend. The tunnels' device does not see
 * the outer source port, so this runs at the outer devices.
 */
static __always_inline int of_user(struct __sk_buff *skb, const struct packet *p)
{
	__u64 *dropped, *seen, now = bpf_ktime_get_coarse_ns();
	struct lb_config *c = config();
	struct lb_tunnel_key t;
	__u32 *backend, zero = 0;

	if (p->to.proto != IPPROTO_UDP || p->to.port != bpf_htons(LB_TUNNEL_PORT) || p->error ||
	    p->later || bpf_ntohs(p->from.port) < LB_USER_PORT || !c || !c->tunnel ||
	    c->tunnel == skb->ifindex)
		return 0;
	__builtin_memcpy(t.addr, p->from.addr, 16);
	backend = bpf_map_lookup_elem(&lb_tunnels, &t);
	if (!backend || !of_tunnels(skb, p, c))
		return 0;
	seen = bpf_map_lookup_elem(&lb_users, backend);
	if (seen && *seen + LB_USER_INTERVAL < now)
		*seen = now;
	dropped = bpf_map_lookup_elem(&lb_users, &zero);
	return dropped && *dropped;
}

/*
 * lb_in runs at every device. It leaves frames for other MAC addresses to the kernel, which drops
 * them. A switch floods frames for a silent host, such as a dead backend. Two load balancers would
 * send them to the dead backend again for ever.
 */
SEC("tc")
int lb_in(struct __sk_buff *skb)
{
	struct packet p = {};
	struct lb_service *s;

	if (intruder(skb))
		return TC_ACT_SHOT;
	if (skb->pkt_type != PACKET_HOST)
		return TC_ACT_UNSPEC;
	if (read(skb, &p))
		return TC_ACT_UNSPEC;
	if (of_user(skb, &p)) {
		count(LB_STRANGER);
		return TC_ACT_SHOT;
	}
	s = bpf_map_lookup_elem(&lb_services, &p.to);
	if (s)
		return from_client(skb, &p, s, 0);
	s = bpf_map_lookup_elem(&lb_services, &p.from);
	if (s)
		return from_backend(skb, &p, s);
	return TC_ACT_UNSPEC;
}

/* lb_again runs at the buffer device, on packets released by the agent. */
SEC("tc")
int lb_again(struct __sk_buff *skb)
{
	struct packet p = {};
	struct lb_service *s;

	if (read(skb, &p))
		return TC_ACT_SHOT;
	s = bpf_map_lookup_elem(&lb_services, &p.to);
	return s ? from_client(skb, &p, s, 1) : TC_ACT_SHOT;
}

/*
 * lb_own runs on packets from this machine to a service's address. The kernel's routes send them to
 * the buffer device. They are ICMP errors about backends' packets, and the machine's own
 * connections. Buffered packets pass, with a mark.
 */
SEC("tc")
int lb_own(struct __sk_buff *skb)
{
	struct packet p = {};
	struct lb_service *s;

	if (skb->mark == LB_MARK) {
		skb->mark = 0;
		return TC_ACT_UNSPEC;
	}
	if (read(skb, &p))
		return TC_ACT_SHOT;
	s = bpf_map_lookup_elem(&lb_services, &p.to);
	if (!s)
		return TC_ACT_SHOT;
	/* Drop everything else, because the agent would mistake it for a buffered packet. */
	return from_client(skb, &p, s, 0) == TC_ACT_REDIRECT ? TC_ACT_REDIRECT : TC_ACT_SHOT;
}

/*
 * lb_change exchanges a flow's word if it still equals the agent's copy. It runs only by
 * BPF_PROG_RUN. A new owner or epoch, buffering, or a report of the owner's agent proves that the
 * flow has a session, so it counts as opened.
 */
SEC("tc")
int lb_change(struct __sk_buff *skb)
{
	struct lb_change_args a;
	struct lb_flow *f;

	if (bpf_skb_load_bytes(skb, 0, &a, sizeof(a)))
		return LB_IS_NONE;
	f = bpf_map_lookup_elem(&lb_flows, &a.key);
	if (!f)
		return LB_IS_NONE;
	if (a.until) {			  /* first: a buffered flow has a deadline */
		f->flags &= ~LB_UNOPENED; /* otherwise until would mean an acknowledgment */
		f->until = a.until;
	}
	if (__sync_val_compare_and_swap(&f->word, a.have, a.want) != a.have)
		return LB_IS_OTHER;
	f->life = a.life; /* the data path does not use it */
	if ((a.have ^ a.want) & ~(LB_MOVES | LB_BEFORE) && f->flags & LB_MADE_UP)
		f->flags &= ~LB_MADE_UP;
	if (a.named || (a.have ^ a.want) & ~(LB_MOVES | LB_BEFORE))
		confirmed(f);
	if (a.want & LB_BEFORE && f->until < bpf_ktime_get_coarse_ns())
		f->until = bpf_ktime_get_coarse_ns();
	if (a.seen > f->seen)
		f->seen = a.seen;
	if (a.named && !(f->flags & LB_NAMED))
		f->flags = (f->flags & ~LB_UNOPENED) | LB_NAMED;
	return LB_CHANGED;
}

char _license[] SEC("license") = "Dual BSD/GPL";
