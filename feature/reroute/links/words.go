// SPDX-License-Identifier: Apache-2.0

package links

import (
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// StateSize is the distance between mapped link states: an array's elements begin at multiples of eight bytes
// (array_map_alloc in kernel/bpf/arraymap.c). The other constants are protection's bytes in a link state (links.h).
const (
	StateSize   = 8
	CarrierByte = 1
	DrainByte   = 2
)

// Words is the mapped memory of the link states. Each byte has one writer, and one store changes it.
type Words []byte

// MapWords maps the link states. Close unmaps them.
func MapWords(m *ebpf.Map) (Words, error) {
	memory, err := unix.Mmap(m.FD(), 0, Slots*StateSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mapping the link states: %w", err)
	}
	return Words(memory), nil
}

// Close unmaps the link states.
func (w Words) Close() { _ = unix.Munmap(w) }

// Set sets one byte of a link state. It reports whether the byte changed.
func (w Words) Set(slot uint32, at int, on bool) bool {
	var v byte
	if on {
		v = 1
	}
	b := &w[int(slot)*StateSize+at]
	was := *b
	*b = v
	return was != v
}

// Get returns the state of a link.
func (w Words) Get(slot uint32) (v State) {
	copy(v[:], w[int(slot)*StateSize:])
	return v
}
