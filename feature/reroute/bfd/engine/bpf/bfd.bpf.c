//go:build ignore
// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
/*
 * BFD (RFC 5880, 5881) in the kernel. At each tick of a tick source, bfd_tick sends due packets and
 * detects silent peers. bfd_receive, at tcx ingress of the sessions' devices, handles arriving
 * packets. bfd_leave, at their egress, drops packets forged by local users. User space configures
 * the sessions and receives events. The sessions start, run and end without it.
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

/* Exports the type for readers of the ring. */
const struct bfd_event *bfd_event_type __attribute__((unused));

char LICENSE[] SEC("license") = "Dual BSD/GPL";
