// SPDX-License-Identifier: Apache-2.0

// Package filter drops, passes and counts packets by expressions. It works at XDP, tcx, netfilter
// and nftables hooks. The rules of a filter are compiled into one BPF program with counters for
// each rule. The program runs without any weir process. README.md describes the use, docs/PINS.md
// the pinned objects.
package filter

// abi is the version of a filter's pin layout
const abi = 1

// Name of the feature: pin directory, config key, command, metric prefix.
const Name = "filter"
