// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/guard/bpf"
	"github.com/weir-project/weir/internal/guardstate"
	"github.com/weir-project/weir/kernel"
)

// Simulation is an unattached guard. It decides given packets at given times, using the same
// program as a hook. Its decisions are reproducible, except for the guard's secret seed.
type Simulation struct {
	hook    Hook
	c       *kernel.Collection
	state   *guardstate.State
	maps    []*ebpf.Map
	each    *ebpf.Map // the map of destinations, one of maps
	clock   *uint64
	memory  []byte
	options ebpf.RunOptions
}

// Simulate creates a guard of one destination, ignored at hook Socket. With realClock, it uses the
// kernel's clock instead of the given times.
func Simulate(h Hook, l Limits, to netip.AddrPort, realClock bool) (_ *Simulation, err error) {
	s := &Simulation{hook: h}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if s.c, err = load(constants{clockGiven: !realClock}, nil, h); err != nil {
		return nil, err
	}
	m, err := newState(l)
	if err != nil {
		return nil, err
	}
	s.maps = append(s.maps, m)
	if s.state, err = openState(m); err != nil {
		return nil, err
	}
	each, err := newTargets()
	if err != nil {
		return nil, err
	}
	s.maps, s.each = append(s.maps, each), each
	if err := put(s.c, 0, m, each); err != nil {
		return nil, err
	}
	if h != Socket {
		d := destination{prefix: netip.PrefixFrom(to.Addr(), to.Addr().BitLen()), port: to.Port()}
		if h == XDP {
			d.at = atInterfaces
		}
		want, err := listens([]destination{d})
		if err != nil {
			return nil, err
		}
		if err := reconcileListens(s.c.Maps[bpf.GuardMapGuardListens], want); err != nil {
			return nil, err
		}
	}
	data := s.c.Maps[".bss"]
	if s.memory, err = unix.Mmap(data.FD(), 0, int(data.ValueSize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, err
	}
	s.clock = (*uint64)(unsafe.Pointer(&s.memory[0]))
	return s, nil
}

// Passes decides a packet, an Ethernet frame, at a time in nanoseconds. The time is not 0 and never
// decreases. It returns an error for frames shorter than the kernel's minimum for test runs.
func (s *Simulation) Passes(at uint64, frame []byte) (bool, error) {
	*s.clock = at
	s.options.Data = frame
	verdict, err := s.c.Programs[s.hook.program()].Run(&s.options)
	if s.hook == XDP {
		return verdict == 2, err // XDP_PASS
	}
	return verdict != 0, err
}

// setLimits changes the limits immediately.
func (s *Simulation) setLimits(l Limits) { s.state.SetLimits(l) }

// Seed sets the secret seed, to make decisions reproducible.
func (s *Simulation) Seed(a, b uint64) { s.state.Total.Seed = [2]uint64{a, b} }

// Counts returns the guard's counts at a time of its clock.
func (s *Simulation) Counts(at uint64) Counts { return s.state.Read(at) }

// Spent returns the number of packets in the total's debt at a time of its clock.
func (s *Simulation) Spent(at uint64) int {
	return int((s.state.Total.Debt - at<<guardstate.TickShift) / s.state.Limits().Interval)
}

// Counted returns the highest packet count of a source in its epoch.
func (s *Simulation) Counted() int {
	most := uint64(0)
	for _, b := range s.state.Sources {
		for _, w := range b.Source {
			most = max(most, w&4095)
		}
	}
	return int(most)
}

// Program returns the program, for measurements.
func (s *Simulation) Program() *ebpf.Program { return s.c.Programs[s.hook.program()] }

// Maps returns the program's maps, for others using the same state.
func (s *Simulation) Maps() map[string]*ebpf.Map { return s.c.Maps }

// Close releases the guard.
func (s *Simulation) Close() {
	if s.memory != nil {
		_ = unix.Munmap(s.memory)
	}
	if s.state != nil {
		s.state.Close()
	}
	for _, m := range s.maps {
		m.Close()
	}
	if s.c != nil {
		s.c.Close()
	}
}
