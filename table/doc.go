// SPDX-License-Identifier: Apache-2.0

// Package table writes longest-prefix tables over IPv4 and IPv6. BPF programs read them through
// bpf/table.h. A table lives in three BPF maps and nowhere else. The writer opens it from its pins,
// changes it in place and closes it. After a writer is killed, the next Open for writing repairs
// the table. A lookup, in BPF or in Go, sees the table before a change or after it, never in
// between.
//
// A table has one writer at a time, the owner of kernel.WriteLock, and any number of readers.
// README.md describes the layout, its costs and its bounds.
package table
