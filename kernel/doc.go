// SPDX-License-Identifier: Apache-2.0

// Package kernel is the only part of weir that loads, pins, links, locks and
// upgrades. Packages below it attach without links and probe. State lives in the kernel: BPF maps and links pinned in
// directories of a BPF file system,
//
//	/sys/fs/bpf/weir/<netns>/<feature>/<instance>/{meta,map_*,link_*}
//
// where <netns> is the inode number of a network namespace, or "host" for what
// spans namespaces. docs/PINS.md describes the layout, which is a protocol
// between versions of weir.
//
// Reading needs a [Root]; whatever changes state is a method of [WriteLock], so
// that the compiler sees to it that a writer holds the lock.
package kernel
