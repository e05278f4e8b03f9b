// SPDX-License-Identifier: Apache-2.0

// Package kernel is the only part of weir that loads, pins, links, locks and upgrades. The packages below it only probe,
// and attach to hooks without links. State lives in the kernel: BPF maps and links pinned in directories of a BPF file
// system,
//
//	/sys/fs/bpf/weir/<netns>/<feature>/<instance>/{meta,map_*,link_*}
//
// where <netns> is the inode number of a network namespace, or "host" for instances that span namespaces. docs/PINS.md
// describes the layout. It is a protocol between versions of weir.
//
// Readers need a [Root]. Methods that change state belong to [WriteLock]: the compiler checks that a writer holds the
// lock.
package kernel
