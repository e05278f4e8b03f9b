/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
#ifndef WEIR_CLOCK_H
#define WEIR_CLOCK_H

/*
 * weir_clock is CLOCK_MONOTONIC in nanoseconds, at the resolution of a tick where the kernel has
 * the coarse clock (5.11): "last seen" needs no better, and reading the counter costs more than
 * the rest of a device's bookkeeping.
 */
static __always_inline __u64 weir_clock(void)
{
	if (bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_ktime_get_coarse_ns))
		return bpf_ktime_get_coarse_ns();
	return bpf_ktime_get_ns();
}

#endif
