// SPDX-License-Identifier: Apache-2.0

// Package table writes longest-prefix tables over IPv4 and IPv6 that BPF programs read through bpf/table.h. A
// table lives in three BPF maps, and in them alone: it is opened from its pins, changed in place, and closed; what a
// process that was killed left half done is repaired by the next one that opens it for writing. A lookup, in BPF or in
// Go, sees the table as it was before a change or after it.
//
// There may be one writer at a time (whoever holds kernel.WriteLock) and any number of readers. README.md describes
// the layout, its costs and its bounds.
package table
