// SPDX-License-Identifier: Apache-2.0

// Package liveness finds out whether links work, both ways, from inside the kernel. A tick source (packets in a loop that a
// queue's timer clocks) sends probes; the peer's function, of an SRv6 segment, answers them; both sides judge, in the
// kernel, and tell the data path by the link's word (package links). A configuration is applied once: nothing of it needs a
// process.
package liveness

// Name is the feature whose instances hold liveness.
const Name = "reroute"
