//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * BFD (RFC 5880, 5881) in the kernel: bfd_tick sends what is due and finds out who is silent, at each tick of a tick source;
 * bfd_receive, at tcx ingress of the sessions' devices, takes what comes; bfd_leave, at their egress, drops what others send in
 * a session's place. User space says which sessions there are, and hears
 * of what becomes of them; they begin, go on and end without it.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/pkt_sched.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../../../links.h"
#include "sha1.h"
#include "maps.h"
#include "session.h"
#include "send.h"
#include "tick.h"
#include "receive.h"
#include "leave.h"

/* So that the type is known to who reads the ring. */
const struct bfd_event *bfd_event_type __attribute__((unused));

char LICENSE[] SEC("license") = "Dual BSD/GPL";
