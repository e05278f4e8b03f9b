// SPDX-License-Identifier: Apache-2.0

// Package links is the map that liveness writes and the data path of protection reads: which of the
// protected links of a network namespace may not be used, and why. Layout: feature/reroute/links.h.
package links

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// Slots is how many links of a network namespace can be told apart.
const Slots = 4096

// MapName is the map's name in the objects that share it, and of its pin.
const MapName = "reroute_links"

// Mark is of packets that find out about a link, and so stay on it whatever it is used for: REROUTE_MARK of links.h.
const Mark = 0x77656972

// LeaveProgram is liveness' program where packets leave by a device. It changes nothing but the link address of a neighbour that has
// moved.
const LeaveProgram = "liveness_leave"

// Reason is a bit set of why a link is not to be used. Each has a byte of the link's word, at the place of its bit.
type Reason uint8

// Reasons.
const (
	Probe   Reason = 1 << iota // liveness: probes are not answered, or no longer come
	Carrier                    // the device has no carrier, or is administratively down
	Drain                      // an operator takes the link out of use
)

// State is a link's word, its bytes in the order of the reasons; zero while the link may be used. Where the map is mapped, words are
// eight bytes apart (array_map_alloc, kernel/bpf/arraymap.c).
type State [4]byte

// Reasons says why the link is not to be used; 0: it may be.
func (w State) Reasons() (r Reason) {
	for i, b := range w {
		if b != 0 {
			r |= 1 << i
		}
	}
	return r
}

// Slot is where the word of a device stands. Two devices of a network namespace may have the same one: then only one of
// them can be protected.
func Slot(ifindex int) uint32 { return uint32(ifindex) % Slots }

// Spec is the map, for whoever makes it first; the others' objects get it as a replacement of theirs.
func Spec() *ebpf.MapSpec {
	return &ebpf.MapSpec{Name: MapName, Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: Slots, Flags: unix.BPF_F_MMAPABLE}
}

// stride is from one word to the next where the map is mapped.
const stride = 8

// ClearProbe takes liveness' byte out of a link's word: nobody probes the link any more. The other bytes have other writers, so the byte
// alone is written. No program that wrote it may still run: kernel.WaitForPrograms.
func ClearProbe(m *ebpf.Map, ifindex int) error {
	b, err := unix.Mmap(m.FD(), 0, Slots*stride, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mapping the words of links: %w", err)
	}
	b[Slot(ifindex)*stride] = 0
	return unix.Munmap(b)
}

// Shared is the map of a namespace's links if another of its instances has pinned it (under MapName), not the one named; nil if
// none has. The caller closes it.
func Shared(l *kernel.WriteLock, but kernel.Instance) (*ebpf.Map, error) {
	all, err := l.Instances(but.Feature)
	if err != nil {
		return nil, err
	}
	for _, i := range all {
		if i.Scope != but.Scope || i.Name == but.Name {
			continue
		}
		o, err := l.Open(i, MapName)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // another kind of instance
		} else if err != nil {
			return nil, err
		}
		return o.Maps[MapName], nil
	}
	return nil, nil
}
