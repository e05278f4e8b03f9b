// SPDX-License-Identifier: Apache-2.0

// Package filter drops, passes and counts packets by expressions, at any hook of
// the kernel: XDP, tcx, netfilter, nftables. The rules of a filter become one
// program, which says which rule decided; no process of weir's is needed while it
// runs. See README.md for the use, docs/PINS.md for what is pinned.
package filter

// abi is the version of the layout of a filter's pins.
const abi = 1

// Name of the feature: pin directory, config key, command, metric prefix.
const Name = "filter"
