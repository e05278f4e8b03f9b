//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * The guard's own source, with an additional program for many decisions in one run. A run of
 * BPF_PROG_TEST_RUN itself costs ten times the guard's work for a packet.
 */
#include "../../bpf/guard.bpf.c"

struct guard_entry {
	__u64 at; /* ns */
	struct guard_addresses addresses;
	__u32 passed; /* output */
};

#define GUARD_BATCH 4096

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, GUARD_BATCH);
	__type(key, __u32);
	__type(value, struct guard_entry);
} guard_entries SEC(".maps");

__u32 guard_batch_size = 0;

static long guard_step(__u32 i, void *unused)
{
	struct guard_entry *e = bpf_map_lookup_elem(&guard_entries, &i);

	if (!e)
		return 1;
	guard_clock = e->at;
	e->passed = guard_pass(&e->addresses, 0);
	return 0;
}

SEC("socket")
int guard_batch(struct __sk_buff *skb)
{
	return bpf_loop(guard_batch_size, guard_step, 0, 0);
}
