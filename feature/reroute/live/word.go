// SPDX-License-Identifier: Apache-2.0

package live

import (
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/links"
)

// wordStride is from one word of the links to the next: arrays round values up to eight bytes (kernel/bpf/arraymap.c).
const wordStride = 8

// clearWord takes liveliness' byte out of a link's word. The other bytes have other writers, so the byte alone is written.
func clearWord(m *ebpf.Map, ifindex uint32) error {
	b, err := unix.Mmap(m.FD(), 0, links.Slots*wordStride, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mapping the words of links: %w", err)
	}
	b[links.Slot(int(ifindex))*wordStride] = 0
	return unix.Munmap(b)
}
