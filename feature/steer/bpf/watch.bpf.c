//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Notifies weir serve at once when a relevant socket is opened or closed. It does not affect
 * traffic. Nothing is pinned: the hooks are detached with the process.
 */
#include <linux/bpf.h>
#include <linux/in.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#define TCP_CLOSE  7
#define TCP_LISTEN 10

/* Ports of members' sockets, host byte order. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u16);
	__type(value, __u8);
} watch_ports SEC(".maps");

struct event {
	__u32 tgid;
	__u16 port; /* host byte order */
	__u8 proto;
	__u8 opened; /* 1: listens or is bound now, 0: closed */
};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536);
} watch_events SEC(".maps");

const struct event *watch_event_type __attribute__((unused));

static __always_inline void tell(__u16 port, __u8 proto, __u8 opened)
{
	struct event e = { .port = port, .proto = proto, .opened = opened };

	if (!bpf_map_lookup_elem(&watch_ports, &port))
		return;
	e.tgid = bpf_get_current_pid_tgid() >> 32;
	/* A full buffer loses the event: user space also polls, at most 4 s apart. */
	bpf_ringbuf_output(&watch_events, &e, sizeof(e), 0);
}

struct sock_common {
	__u16 skc_num;
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
} __attribute__((preserve_access_index));

/* inet_sock_set_state(sk, oldstate, newstate) */
SEC("raw_tracepoint/inet_sock_set_state")
int watch_listen(struct bpf_raw_tracepoint_args *ctx)
{
	struct sock *sk = (struct sock *)ctx->args[0];
	int from = ctx->args[1], to = ctx->args[2];

	/* A new connection begins as a copy of its listener, so ignore LISTEN to SYN_RECV. */
	if (to == TCP_LISTEN || (from == TCP_LISTEN && to == TCP_CLOSE))
		tell(BPF_CORE_READ(sk, __sk_common.skc_num), IPPROTO_TCP, to == TCP_LISTEN);
	return 0;
}

/* UDP has no such tracepoint. post_bind runs when the port is taken, in the binding process. */
static __always_inline int bound(struct bpf_sock *sk)
{
	if (sk->protocol == IPPROTO_UDP)
		tell(sk->src_port, IPPROTO_UDP, 1);
	return 1;
}

SEC("cgroup/post_bind4")
int watch_bind4(struct bpf_sock *sk)
{
	return bound(sk);
}

SEC("cgroup/post_bind6")
int watch_bind6(struct bpf_sock *sk)
{
	return bound(sk);
}

char _license[] SEC("license") = "Dual BSD/GPL";
