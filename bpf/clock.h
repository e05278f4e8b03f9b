/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef WEIR_CLOCK_H
#define WEIR_CLOCK_H

/*
 * weir_clock returns CLOCK_MONOTONIC in nanoseconds. With the coarse clock (Linux 5.11) its
 * resolution is a tick. That suffices for "last seen", and reading the counter would cost more than
 * the rest of a device's bookkeeping.
 */
static __always_inline __u64 weir_clock(void)
{
	if (bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_ktime_get_coarse_ns))
		return bpf_ktime_get_coarse_ns();
	return bpf_ktime_get_ns();
}

#endif
