// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	gosync "sync"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/guard/bpf"
	"golang.org/x/sys/unix"
)

// ABI is the version of the layout of a guard's state: guard.h.
const ABI = 1

// ErrLayout says that a map is not the state of a guard of this version.
var ErrLayout = errors.New("not the state of a guard of this version")

// object is the compiled object of the programs; its hash tells this weir's programs from another's.
var object = bpf.Object()

// stateLayout is a guard's state as guard.h has it.
type stateLayout bpf.GuardGuardState

// state is a guard's state, mapped: what the programs read and write.
type state struct {
	*stateLayout
	memory []byte
}

const stateBytes = int(unsafe.Sizeof(stateLayout{}))

// newState makes the state of a new guard. Its seed is drawn here and stays with it: whoever knew it could choose
// addresses that collide.
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
	if err != nil {
		m.Close()
		return nil, err
	}
	defer s.close()
	var seed [16]byte
	if _, err := rand.Read(seed[:]); err != nil {
		m.Close()
		return nil, fmt.Errorf("drawing a guard's seed: %w", err)
	}
	s.Total.Seed[0] = binary.NativeEndian.Uint64(seed[:])
	s.Total.Seed[1] = binary.NativeEndian.Uint64(seed[8:])
	s.Total.Version = ABI
	s.Total.Hot = never
	s.setLimits(l)
	return m, nil
}

// never is an epoch long before the first: nothing has been refused yet.
const never = ^uint32(7)

// openState maps a guard's state for writing; close it.
func openState(m *ebpf.Map) (*state, error) {
	if m.Type() != ebpf.Array || int(m.ValueSize()) != stateBytes || m.MaxEntries() != 1 {
		return nil, fmt.Errorf("map %s: %w", m, ErrLayout)
	}
	return mapState(m.FD())
}

// mapState maps the state behind a descriptor, which takes no right but the descriptor.
func mapState(fd int) (*state, error) {
	memory, err := unix.Mmap(fd, 0, stateBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("mapping a guard's state: %w", err)
	}
	return &state{(*stateLayout)(unsafe.Pointer(&memory[0])), memory}, nil
}

// readState copies a guard's state, which whoever may read the map can.
func readState(m *ebpf.Map) (*stateLayout, error) {
	if m.Type() != ebpf.Array || int(m.ValueSize()) != stateBytes {
		return nil, fmt.Errorf("map %s: %w", m, ErrLayout)
	}
	s := &stateLayout{}
	if err := m.Lookup(uint32(0), unsafe.Slice((*byte)(unsafe.Pointer(s)), stateBytes)); err != nil {
		return nil, fmt.Errorf("reading a guard's state: %w", err)
	}
	if s.Total.Version != ABI {
		return nil, fmt.Errorf("version %d: %w, which reads %d", s.Total.Version, ErrLayout, ABI)
	}
	return s, nil
}

func (s *state) close() { _ = unix.Munmap(s.memory) }

// changing is held while limits are put in force: two guards of this process may be of one state, as Attach makes one of the
// same grant for each socket, and both would write the form that is not in force. Other processes with the same descriptor
// are not kept out.
var changing gosync.Mutex

// setLimits puts limits in force at once: a packet meets the old ones or the new ones.
func (s *state) setLimits(l Limits) {
	changing.Lock()
	defer changing.Unlock()
	next := 1 - s.Total.Active&1
	s.Total.Limits[next] = l.layout()
	atomic.StoreUint32(&s.Total.Active, next)
}

// limits are those in force.
func (s *stateLayout) limits() bpf.GuardGuardLimits { return s.Total.Limits[s.Total.Active&1] }
