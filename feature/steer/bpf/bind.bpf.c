//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * Lets unmodified daemons share a port. The programs set SO_REUSEPORT on every socket that binds a
 * port of a service with share_port. All other binds pass unchanged.
 */
#include <linux/bpf.h>
#include <linux/in.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "steer.h"

#define SOL_SOCKET   1
#define SO_REUSEPORT 15

struct bind_key {
	__u64 netns; /* SO_NETNS_COOKIE of the socket's namespace */
	__u16 port;  /* host byte order */
	__u8 proto;
	__u8 pad[5];
};

struct bind_count {
	__u64 shared; /* sockets with SO_REUSEPORT set */
	__u64 failed; /* rejected by the kernel */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, STEER_MAX_SERVICES * STEER_MAX_ENDPOINTS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct bind_key);
	__type(value, struct bind_count);
} bind_ports SEC(".maps");

static __always_inline int share(struct bpf_sock_addr *ctx)
{
	struct bind_key key = { .netns = bpf_get_netns_cookie(ctx),
				.port = bpf_ntohs(ctx->user_port),
				.proto = ctx->protocol };
	struct bind_count *count = bpf_map_lookup_elem(&bind_ports, &key);
	int one = 1;

	if (!count)
		return 1;
	if (bpf_setsockopt(ctx, SOL_SOCKET, SO_REUSEPORT, &one, sizeof(one)))
		__sync_fetch_and_add(&count->failed, 1);
	else
		__sync_fetch_and_add(&count->shared, 1);
	return 1; /* never reject the bind: at worst the port is in use, as without weir */
}

SEC("cgroup/bind4")
int bind_share4(struct bpf_sock_addr *ctx)
{
	return share(ctx);
}

SEC("cgroup/bind6")
int bind_share6(struct bpf_sock_addr *ctx)
{
	return share(ctx);
}

char _license[] SEC("license") = "Dual BSD/GPL";
