//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Reports the program of each socket's reuseport group. The kernel offers no other way to read it.
 * The iterators cover the network namespace of their creator. Each socket with a program produces
 * one struct member.
 */
#include <linux/bpf.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

struct sock_common {
	struct {
		long long counter;
	} skc_cookie;
	volatile unsigned char skc_state;
} __attribute__((preserve_access_index));

struct bpf_prog_aux {
	__u32 id;
} __attribute__((preserve_access_index));

struct bpf_prog {
	struct bpf_prog_aux *aux;
} __attribute__((preserve_access_index));

struct sock_reuseport {
	__u16 num_socks;
	struct bpf_prog *prog;
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
	struct sock_reuseport *sk_reuseport_cb;
} __attribute__((preserve_access_index));

struct udp_sock;

struct bpf_iter_meta {
	struct seq_file *seq;
} __attribute__((preserve_access_index));

struct bpf_iter__udp {
	struct bpf_iter_meta *meta;
	struct udp_sock *udp_sk;
} __attribute__((preserve_access_index));

struct bpf_iter__tcp {
	struct bpf_iter_meta *meta;
	struct sock_common *sk_common;
} __attribute__((preserve_access_index));

/* member is a socket of a group with a program. */
struct member {
	__u64 cookie;
	__u32 program; /* program id */
	__u32 sockets; /* in the group */
};

const struct member *steer_member_type __attribute__((unused));

#define TCP_LISTEN 10

static __always_inline int tell(struct bpf_iter_meta *meta, struct sock *sk)
{
	struct sock_reuseport *group = BPF_CORE_READ(sk, sk_reuseport_cb);
	struct bpf_prog *prog = group ? BPF_CORE_READ(group, prog) : NULL;
	struct member m = {};

	if (!prog)
		return 0;
	m.cookie = BPF_CORE_READ(sk, __sk_common.skc_cookie.counter);
	m.program = BPF_CORE_READ(prog, aux, id);
	m.sockets = BPF_CORE_READ(group, num_socks);
	bpf_seq_write(meta->seq, &m, sizeof(m));
	return 0;
}

SEC("iter/udp")
int steer_udp_groups(struct bpf_iter__udp *ctx)
{
	struct sock *sk = (struct sock *)ctx->udp_sk;

	return sk ? tell(ctx->meta, sk) : 0;
}

SEC("iter/tcp")
int steer_tcp_groups(struct bpf_iter__tcp *ctx)
{
	struct sock_common *skc = ctx->sk_common;

	/* Only a listener is certainly a full sock. Others may be request or TIME_WAIT sockets. */
	if (!skc || BPF_CORE_READ(skc, skc_state) != TCP_LISTEN)
		return 0;
	return tell(ctx->meta, (struct sock *)skc);
}

char _license[] SEC("license") = "Dual BSD/GPL";
