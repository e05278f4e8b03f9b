// SPDX-License-Identifier: Apache-2.0

// Package guardstate is the memory layout of a guard's state (feature/guard/bpf/guard.h): limits,
// counts and patterns. feature/guard and clients/go/guard both use it. It needs no code to load
// programs, which keeps the client small.
package guardstate

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ABI is the version of the layout of a guard's state: guard.h.
const ABI = 1

// ErrLayout reports a map of another kind, or of another version of the state.
var ErrLayout = errors.New("not the state of a guard of this version")

// Never is an epoch long before the first one: nothing was refused yet.
const Never = ^uint32(7)

// LimitsLayout is struct guard_limits.
type LimitsLayout struct {
	Interval       uint64
	Depth          uint64
	InsertInterval uint64
	TargetInterval uint64
	TargetDepth    uint64
	PerEpoch       uint32
	Pattern        uint32
	Dry            uint32
	Pad            [3]uint32
}

// TopEntry is struct guard_top_entry.
type TopEntry struct {
	Address [16]uint8
	Port    uint16
	Check   uint16
	Weight  uint32
	At      uint32
	Pad     uint32
}

// Layout is struct guard_state. A test of feature/guard compares it with the compiled programs.
type Layout struct {
	Total struct {
		Seed        [2]uint64
		Active      uint32
		Version     uint32
		Epoch       uint32
		Hot         uint32
		Fair        uint32
		Calm        uint32
		Ready       uint32
		Pad0        [5]uint32
		Limits      [2]LimitsLayout
		Debt        uint64
		InsertDebt  uint64
		Pad1        [6]uint64
		Reserved    uint32
		Holders     uint32
		Behaved     uint32
		Sweep       uint32
		Granted     uint32
		Held        uint32
		Unmet       uint64
		Window      uint32
		PatternStep uint32
		SourceStep  uint32
		Met         uint32
		Pad2        [4]uint32
	}
	Counters [64]struct{ Verdict [8][2]uint64 }
	Prints   [2048]struct{ Print [32]uint16 }
	Sources  [2048]struct{ Source [32]uint64 }
	Sketch   [3]struct {
		Cell [2][4096]struct {
			Rate uint32
			At   uint32
		}
	}
	Top [5]struct{ Entry [64][4]TopEntry }
}

// Bytes is the size of a guard's state.
const Bytes = int(unsafe.Sizeof(Layout{}))

// CounterSets is the number of counter sets. Further CPUs share them. GUARD_COUNTERS.
const CounterSets = len(Layout{}.Counters)

// State is a guard's state, mapped for reading and writing.
type State struct {
	*Layout
	memory []byte
}

// Map maps the state behind a descriptor of its map. It needs no privilege besides the descriptor.
// Close it.
func Map(fd int) (*State, error) {
	memory, err := unix.Mmap(fd, 0, Bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map the guard's state: %w", err)
	}
	return &State{(*Layout)(unsafe.Pointer(&memory[0])), memory}, nil
}

// Close unmaps the state.
func (s *State) Close() { _ = unix.Munmap(s.memory) }

// Init writes the state of a new guard. It draws the seed, which never changes. Anyone with the
// seed could choose colliding addresses.
func (s *State) Init(l Limits) error {
	var seed [16]byte
	if _, err := rand.Read(seed[:]); err != nil {
		return fmt.Errorf("draw the guard's seed: %w", err)
	}
	s.Total.Seed[0] = binary.NativeEndian.Uint64(seed[:])
	s.Total.Seed[1] = binary.NativeEndian.Uint64(seed[8:])
	s.Total.Version = ABI
	s.Total.Hot = Never
	s.SetLimits(l)
	return nil
}

// changing is held during a change of limits. Two guards of this process may share one state,
// because Attach creates one per socket from the same grant. Both would write the inactive limits.
// Other processes with the descriptor are not excluded.
var changing sync.Mutex

// SetLimits applies limits at once: a packet meets the old ones or the new ones. It withdraws
// reservations without room (see reduce).
func (s *State) SetLimits(l Limits) {
	changing.Lock()
	defer changing.Unlock()
	next := 1 - s.Total.Active&1
	s.Total.Limits[next] = l.Layout()
	atomic.StoreUint32(&s.Total.Active, next)
	if l.Total != 0 {
		s.reduce(uint64(s.Total.Limits[next].PerEpoch))
	}
}

// Limits returns the active limits.
func (s *Layout) Limits() LimitsLayout { return s.Total.Limits[s.Total.Active&1] }

// NetworkOrder converts a port to network byte order, or back.
func NetworkOrder(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}
