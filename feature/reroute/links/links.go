// SPDX-License-Identifier: Apache-2.0

// Package links holds the link states: a map written by liveness and protection, and read by the data path. It tells
// which links of a network namespace are unusable, and why. Layout: feature/reroute/links.h.
package links

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// Slots is the number of link states of a network namespace.
const Slots = 4096

// MapName is the map's name in the sharing objects and of its pin.
const MapName = "reroute_links"

// Mark marks packets of link detection. They stay on the link even when it is down: REROUTE_MARK of links.h.
const Mark = 0x77656972

// LeaveProgram is liveness' egress program of a device. It only replaces the link address of a moved neighbour.
const LeaveProgram = "liveness_leave"

// Reason is a bit set of reasons against a link. Bit n belongs to byte n of the link state.
type Reason uint8

// Reasons.
const (
	Probe   Reason = 1 << iota // liveness: probes are not answered, or no longer arrive
	Carrier                    // the device has no carrier, or is set down
	Drain                      // an operator has drained the link
)

// State is a link state: one byte per reason, in the order of the reasons. It is zero while the link may be used. In
// the mapped memory the states are eight bytes apart (array_map_alloc, kernel/bpf/arraymap.c).
type State [4]byte

// Reasons returns the reasons against the link; 0: it may be used.
func (w State) Reasons() (r Reason) {
	for i, b := range w {
		if b != 0 {
			r |= 1 << i
		}
	}
	return r
}

// Slot returns the index of a device's link state. Two devices of a network namespace can share a slot; then only one
// of them can be protected.
func Slot(ifindex int) uint32 { return uint32(ifindex) % Slots }

// Spec returns the map's specification. The first user creates the map; the other objects load with this map in place
// of their own.
func Spec() *ebpf.MapSpec {
	return &ebpf.MapSpec{Name: MapName, Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: Slots, Flags: unix.BPF_F_MMAPABLE}
}

// stride is the distance between mapped link states, in bytes.
const stride = 8

// ClearProbe clears liveness' byte of a link state after the last probe. It writes only this byte, because the others
// have other writers. No program writing the byte may still run: see kernel.WaitForPrograms.
func ClearProbe(m *ebpf.Map, ifindex int) error {
	b, err := unix.Mmap(m.FD(), 0, Slots*stride, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mapping the link states: %w", err)
	}
	b[Slot(ifindex)*stride] = 0
	return unix.Munmap(b)
}

// Shared returns the map pinned by another instance of the namespace than the given one, or nil. The caller closes
// it.
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
