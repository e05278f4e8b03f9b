// SPDX-License-Identifier: Apache-2.0

package table

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/kernel"
)

// The layout of sets is the one of bpf/bindings.h. Each part is described there.
const (
	unitBytes = 16
	maxInline = 15
	hashed    = 1 << 31
	sharedSet = 1 << 30
	maxRun    = (maxInline + 1) / 2 // units of a run
	firstUnit = 4096                // setsHead is before it
	setsMagic = 0x77627331          // "wbs1", for this layout

	unitsOfSegment = segmentBytes / unitBytes
)

// errMapFull is the kernel's error for a full hash.
const errMapFull = syscall.E2BIG

// set is struct bindings_set.
type set struct {
	Link  uint32
	More  uint32
	First uint64
}

// manyKey is struct bindings_key.
type manyKey struct {
	Set   uint32
	Port  uint16
	Proto uint8
	_     uint8
}

// setsHead is struct bindings_head.
type setsHead struct {
	Magic    uint32
	Writing  uint32
	Reused   uint32
	Next     uint32
	Bindings uint32
	Sets     uint32
	Hashed   uint32
	InLimbo  uint32
	Free     [maxRun + 1]uint32
	Limbo    [8192]uint32 // unit, and its number of units minus one in the upper bits
}

func packKey(proto uint8, port uint16) uint64 { return 1<<31 | uint64(port)<<8 | uint64(proto) }

func packBinding(x Binding) uint64 { return packKey(x.Proto, x.Port)<<32 | uint64(x.Value) }

func unpackBinding(p netip.Prefix, e uint64) Binding {
	return Binding{Prefix: p, Proto: uint8(e >> 32), Port: uint16(e >> 40), Value: uint32(e) & MaxBound}
}

func packLink(p netip.Prefix, above uint32) uint32 { return uint32(p.Bits())<<22 | above }

func (s *set) bits() int { return int(atomic.LoadUint32(&s.Link) >> 22 & 0xff) }

func (s *set) shared() bool { return atomic.LoadUint32(&s.Link)&sharedSet != 0 }

func (s *set) parent() uint32 { return atomic.LoadUint32(&s.Link) & MaxValue }

// others returns the number of bindings beyond the first and whether they are in the hash.
func (s *set) others() (hash bool, n uint32) { return unpackMore(atomic.LoadUint32(&s.More)) }

func unpackMore(more uint32) (hash bool, n uint32) {
	if more&hashed != 0 {
		return true, more &^ hashed
	}
	return false, more >> 22
}

// sets is the mapped memory of sets and runs. It is allocated and reused like the memory of pages.
type sets struct {
	*setsHead
	memory  []byte
	retired []uint32 // by the current change, as in Limbo
	wait    func()
	mapped  []byte
}

func mapSets(m *ebpf.Map, write bool) (*sets, error) {
	if m == nil || m.Type() != ebpf.Array || m.ValueSize() != segmentBytes+slackBytes {
		return nil, fmt.Errorf("%w: %v", ErrLayout, m)
	}
	b, mapped, err := mapArray(m, write)
	if err != nil {
		return nil, err
	}
	out := &sets{setsHead: (*setsHead)(unsafe.Pointer(&b[0])), memory: b[:int(m.MaxEntries())*(segmentBytes+slackBytes)], wait: kernel.WaitForPrograms}
	if mapped {
		out.mapped = b
	}
	return out, nil
}

// CountBindings returns the number of bindings. It needs only the map of their sets.
func CountBindings(sets *ebpf.Map) (int, error) {
	n, err := readWord(sets, unsafe.Offsetof(setsHead{}.Bindings))
	return int(n), err
}

func (m *sets) unmap() {
	if m.mapped != nil {
		_ = unix.Munmap(m.mapped) // the address is from our own Mmap
	}
	m.setsHead, m.memory, m.mapped = nil, nil, nil
}

// at returns the address of a unit. For a unit out of range it returns the first one. A reader may
// find such a number in reused memory.
func (m *sets) at(unit uint32) unsafe.Pointer {
	o := int(unit) * unitBytes
	o = o/segmentBytes*(segmentBytes+slackBytes) + o%segmentBytes
	if o >= len(m.memory) {
		o = 0
	}
	return unsafe.Pointer(&m.memory[o])
}

func (m *sets) set(id uint32) *set { return (*set)(m.at(id)) }

// limit returns the first unit behind the memory.
func (m *sets) limit() uint32 {
	return uint32(len(m.memory) / (segmentBytes + slackBytes) * unitsOfSegment)
}

// run returns a copy of the entries at More.
func (m *sets) run(more uint32) []uint64 {
	hash, n := unpackMore(more)
	if hash || n == 0 {
		return nil
	}
	out := make([]uint64, n, n+1)
	first := (*uint64)(m.at(more & MaxValue))
	for i := range out {
		out[i] = atomic.LoadUint64((*uint64)(unsafe.Add(unsafe.Pointer(first), 8*i)))
	}
	return out
}

// find returns the address of a key's entry in a set, nil if the key is absent or in the hash.
func (m *sets) find(id uint32, key uint64) *uint64 {
	s := m.set(id)
	if s.First>>32 == key {
		return &s.First
	}
	hash, n := s.others()
	for i := range n {
		if hash {
			break
		}
		if e := (*uint64)(unsafe.Add(m.at(s.More&MaxValue), 8*i)); *e>>32 == key {
			return e
		}
	}
	return nil
}

// writeRun writes entries to new memory and returns the value of More for them.
func (m *sets) writeRun(entries []uint64) (more uint32, err error) {
	if len(entries) == 0 {
		return 0, nil
	}
	unit, err := m.alloc(unitsOfRun(uint32(len(entries))))
	if err != nil {
		return 0, err
	}
	copy(unsafe.Slice((*uint64)(m.at(unit)), len(entries)), entries)
	return uint32(len(entries))<<22 | unit, nil
}

func unitsOfRun(entries uint32) uint32 { return (entries + 1) / 2 }

// alloc returns memory of a number of units within one segment.
func (m *sets) alloc(units uint32) (uint32, error) {
	if unit := m.reuse(units); unit != 0 {
		return unit, nil
	}
	if left := unitsOfSegment - m.Next%unitsOfSegment; left < units {
		m.release(m.Next, left)
		m.Next += left
	}
	if m.Next+units <= m.limit() {
		m.Next += units
		return m.Next - units, nil
	}
	if m.InLimbo > 0 {
		m.grace()
		if unit := m.reuse(units); unit != 0 {
			return unit, nil
		}
	}
	return 0, fmt.Errorf("%w: %d bindings of %d prefixes use all %d MiB of sets", ErrFull, m.Bindings, m.Sets,
		len(m.memory)/segmentBytes)
}

// reuse takes memory from the lists: of the exact size, or part of a larger piece.
func (m *sets) reuse(units uint32) uint32 {
	for size := units; size <= maxRun; size++ {
		unit := m.Free[size]
		if unit == 0 {
			continue
		}
		m.Free[size] = *(*uint32)(m.at(unit))
		m.release(unit+units, size-units)
		return unit
	}
	return 0
}

// release adds memory to the lists.
func (m *sets) release(unit, units uint32) {
	for units > 0 {
		n := min(units, maxRun)
		*(*uint32)(m.at(unit)) = m.Free[n]
		m.Free[n] = unit
		unit, units = unit+n, units-n
	}
}

// retire queues memory for limbo. It leaves the table when the current change is published.
func (m *sets) retire(unit, units uint32) { m.retired = append(m.retired, unit|(units-1)<<22) }

func (m *sets) retireRun(more uint32) {
	if hash, n := unpackMore(more); !hash && n > 0 {
		m.retire(more&MaxValue, unitsOfRun(n))
	}
}

// retireToLimbo moves the memory retired by the published change to limbo.
func (m *sets) retireToLimbo() {
	if int(m.InLimbo)+len(m.retired) > len(m.Limbo) {
		m.grace()
	}
	m.InLimbo += uint32(copy(m.Limbo[m.InLimbo:], m.retired))
	m.retired = m.retired[:0]
}

// grace waits for a grace period and frees the memory in limbo.
func (m *sets) grace() {
	m.wait()
	atomic.AddUint32(&m.Reused, 1)
	for _, r := range m.Limbo[:m.InLimbo] {
		m.release(r&MaxValue, r>>22+1)
	}
	m.InLimbo = 0
}
