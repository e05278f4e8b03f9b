// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"fmt"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/guard/bpf"
	"github.com/weir-project/weir/internal/guardstate"
)

// Aliases of internal/guardstate, shared with the client.
type (
	Limit   = guardstate.Limit
	Limits  = guardstate.Limits
	Counts  = guardstate.Counts
	TierOf  = guardstate.TierOf
	Pattern = guardstate.Pattern
)

const (
	// abi is the version of the state's layout in guard.h.
	abi = guardstate.ABI
	// MaxLimit is the highest limit.
	MaxLimit = guardstate.MaxLimit
)

// object is the compiled object of the programs. Its hash identifies this weir's programs.
var object = bpf.Object()

// Tiers returns the tiers of packets, highest priority first.
func Tiers() []TierOf { return guardstate.Tiers() }

// newState creates the state of a new guard.
func newState(l Limits) (*ebpf.Map, error) {
	spec, err := bpf.LoadGuard()
	if err != nil {
		return nil, err
	}
	m, err := ebpf.NewMap(spec.Maps[bpf.GuardMapGuardOne])
	if err != nil {
		return nil, err
	}
	s, err := openState(m)
	if err == nil {
		err = s.Init(l)
		s.Close()
	}
	if err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// openState maps a guard's state for writing. The caller closes it.
func openState(m *ebpf.Map) (*guardstate.State, error) {
	if m.Type() != ebpf.Array || int(m.ValueSize()) != guardstate.Bytes || m.MaxEntries() != 1 {
		return nil, fmt.Errorf("map %s: %w", m, guardstate.ErrLayout)
	}
	return guardstate.Map(m.FD())
}

// readState copies a guard's state. It requires only read access to the map.
func readState(m *ebpf.Map) (*guardstate.Layout, error) {
	if m.Type() != ebpf.Array || int(m.ValueSize()) != guardstate.Bytes {
		return nil, fmt.Errorf("map %s: %w", m, guardstate.ErrLayout)
	}
	s := &guardstate.Layout{}
	if err := m.Lookup(uint32(0), unsafe.Slice((*byte)(unsafe.Pointer(s)), guardstate.Bytes)); err != nil {
		return nil, fmt.Errorf("read the guard's state: %w", err)
	}
	if s.Total.Version != abi {
		return nil, fmt.Errorf("version %d: %w, want version %d", s.Total.Version, guardstate.ErrLayout, abi)
	}
	return s, nil
}
