// SPDX-License-Identifier: Apache-2.0

// Package liveness tests from inside the kernel whether links work in both directions.
//
// A tick source (packets in a loop, clocked by a queue's timer) sends probes. The peer's function, an SRv6 segment,
// answers them. Both ends judge in the kernel and set the link state for the data path (package links). A
// configuration is applied once; nothing afterwards needs a process.
package liveness

// Name is the feature of liveness' instances.
const Name = "reroute"
