// SPDX-License-Identifier: Apache-2.0

package table

import (
	"fmt"
	"iter"
	"net/netip"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
)

// Bindings is a table of prefixes with exact fields: a protocol and a port, or every port of a
// protocol. The longest prefix bound for a packet's protocol and port decides. Within one prefix, a
// binding of the port precedes a binding of every port. A longer prefix bound for something else
// hides nothing. BPF programs read the table through bpf/bindings.h.
//
// Set and Delete take effect for all addresses at once, by one store. As for Table, there is one
// writer at a time.
type Bindings struct {
	t    *Table
	m    *sets
	many *ebpf.Map
}

// Binding is a prefix, a protocol and port, and a value.
type Binding struct {
	Prefix netip.Prefix
	Proto  uint8  // IP protocol number
	Port   uint16 // 0: every port
	Value  uint32 // 1 to MaxBound
}

// MaxBound is the greatest value of a binding.
const MaxBound = 1<<24 - 1

// Key is a binding without its value.
type Key struct {
	Prefix netip.Prefix
	Proto  uint8
	Port   uint16
}

// Key returns the binding without its value.
func (x Binding) Key() Key { return Key{x.Prefix, x.Proto, x.Port} }

// BindingMaps are the maps of BINDINGS_MAPS(NAME): the maps of a table, NAME_sets and NAME_many.
type BindingMaps struct {
	Maps
	Sets, Many *ebpf.Map
}

// FindBindings returns the maps of the bindings called name.
func FindBindings(maps map[string]*ebpf.Map, name string) (BindingMaps, error) {
	t, err := Find(maps, name)
	m := BindingMaps{t, maps[name+"_sets"], maps[name+"_many"]}
	if err == nil && (m.Sets == nil || m.Many == nil) {
		err = fmt.Errorf("%w: a map is missing: want %s_sets and %s_many", ErrLayout, name, name)
	}
	return m, err
}

// SizeBindings makes room for a number of bindings, at most MaxBindings. Call it before creating
// the maps. The room suffices for all prefixes except millions of IPv6 hosts in as many networks.
// Replace needs room for the old bindings and the new.
func SizeBindings(spec *ebpf.CollectionSpec, name string, bindings int) error {
	if bindings < 1 || bindings > MaxBindings {
		return fmt.Errorf("size for %d bindings: want 1 to %d", bindings, MaxBindings)
	}
	mib := func(bytes int) int { return (bytes + segmentBytes - 1) / segmentBytes }
	if err := Size(spec, name, min(maxSegments, mib(2*24*bindings))); err != nil {
		return err
	}
	sets, many := spec.Maps[name+"_sets"], spec.Maps[name+"_many"]
	if sets == nil || many == nil {
		return fmt.Errorf("%w: the object has no maps %s_sets and %s_many", ErrLayout, name, name)
	}
	sets.MaxEntries = uint32(mib(2*unitBytes*bindings + unitBytes*firstUnit))
	many.MaxEntries = uint32(bindings)
	return nil
}

// MaxBindings is the largest number accepted by SizeBindings.
const MaxBindings = 1 << 20

// OpenBindings opens bindings for writing. New maps become an empty table. If a writer was killed
// during a change, OpenBindings repairs the table.
func OpenBindings(maps BindingMaps) (*Bindings, error) {
	m, err := mapSets(maps.Sets, true)
	if err != nil {
		return nil, err
	}
	t, err := Open(maps.Maps)
	if err != nil {
		m.unmap()
		return nil, err
	}
	b := &Bindings{t, m, maps.Many}
	switch {
	case m.Magic == 0:
		m.Next = firstUnit
		atomic.StoreUint32(&m.Magic, setsMagic)
	case m.Magic != setsMagic:
		err = fmt.Errorf("%w: the magic of its sets is %#x, want %#x", ErrLayout, m.Magic, setsMagic)
	case m.Writing != 0:
		err = b.repair()
	}
	if err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

// OpenBindingsReader opens bindings for reading. With read-only map descriptors they are a copy,
// made at the call.
func OpenBindingsReader(maps BindingMaps) (*Bindings, error) {
	for range maxCopies {
		b, again, err := openReader(maps)
		if err != nil || !again {
			return b, err
		}
	}
	return nil, errBusy
}

// openReader opens the table before its sets. If it must copy them, a set removed meanwhile is
// still in memory, unless that memory was reused. Then openReader reports again.
func openReader(maps BindingMaps) (_ *Bindings, again bool, err error) {
	reused, err := readWord(maps.Sets, unsafe.Offsetof(setsHead{}.Reused))
	if err != nil {
		return nil, false, err
	}
	t, err := OpenReader(maps.Maps)
	if err != nil {
		return nil, false, err
	}
	m, err := mapSets(maps.Sets, false)
	if err != nil {
		t.Close()
		return nil, false, err
	}
	b := &Bindings{t, m, maps.Many}
	now := reused
	if m.mapped == nil {
		now, err = readWord(maps.Sets, unsafe.Offsetof(setsHead{}.Reused))
	}
	if err == nil && m.Magic != setsMagic {
		err = fmt.Errorf("%w: the magic of its sets is %#x, want %#x", ErrLayout, m.Magic, setsMagic)
	}
	if err != nil || now != reused {
		b.Close()
	}
	return b, now != reused, err
}

// Close releases the mappings. The caller still owns the maps.
func (b *Bindings) Close() error {
	b.m.unmap()
	return b.t.Close()
}

// Len returns the number of bindings.
func (b *Bindings) Len() int { return int(b.m.Bindings) }

// check returns an error for an invalid binding.
func (x Binding) check() error {
	if _, err := newPrefix(x.Prefix, 1); err != nil {
		return err
	}
	if x.Value < 1 || x.Value > MaxBound {
		return fmt.Errorf("%w: %d is not between 1 and %d", ErrValue, x.Value, MaxBound)
	}
	return nil
}

// Get returns the value of exactly this binding.
func (b *Bindings) Get(k Key) (value uint32, ok bool) {
	id, ok := b.t.Get(k.Prefix)
	if !ok {
		return 0, false
	}
	if x, ok := b.match(id, k.Proto, k.Port); ok && x.Port == k.Port {
		return x.Value, true
	}
	return 0, false
}

// Lookup returns the binding in force for an address, protocol and port.
func (b *Bindings) Lookup(a netip.Addr, proto uint8, port uint16) (x Binding, ok bool) {
	for {
		began := atomic.LoadUint32(&b.m.Reused)
		ok = false
		id, _ := b.t.Lookup(a)
		for depth := 0; id != 0 && !ok && depth <= a.BitLen(); depth++ {
			s := b.m.set(id)
			if x, ok = b.match(id, proto, port); ok {
				x.Prefix, _ = a.Prefix(min(s.bits(), a.BitLen()))
			}
			id = s.parent()
		}
		if atomic.LoadUint32(&b.m.Reused) == began {
			return x, ok
		}
	}
}

// match mirrors bindings_match in bpf/bindings.h.
func (b *Bindings) match(id uint32, proto uint8, port uint16) (x Binding, ok bool) {
	s := b.m.set(id)
	for range 3 {
		first, more := atomic.LoadUint64(&s.First), atomic.LoadUint32(&s.More)
		e := b.entry(id, first, more, packKey(proto, port), packKey(proto, 0))
		x, ok = unpackBinding(netip.Prefix{}, e), e != 0
		if atomic.LoadUint64(&s.First) == first && atomic.LoadUint32(&s.More) == more {
			break
		}
	}
	return x, ok
}

// entry mirrors bindings_entry in bpf/bindings.h.
func (b *Bindings) entry(id uint32, first uint64, more uint32, exact, any uint64) (found uint64) {
	switch first >> 32 {
	case exact:
		return first
	case any:
		found = first
	}
	if more&hashed != 0 {
		for _, k := range []uint64{exact, any} {
			var v uint32
			if k == any && found != 0 {
				break
			}
			if b.many.Lookup(manyKey{Set: id, Port: uint16(k >> 8), Proto: uint8(k)}, &v) == nil {
				return k<<32 | uint64(v)
			}
		}
		return found
	}
	for _, e := range b.m.run(more) {
		switch e >> 32 {
		case exact:
			return e
		case any:
			found = e
		}
	}
	return found
}

// All yields every binding, in no particular order. The table must not change meanwhile.
func (b *Bindings) All() iter.Seq2[Binding, error] {
	return func(yield func(Binding, error) bool) {
		prefixes := map[uint32]netip.Prefix{} // of sets with bindings in the hash
		for e := range b.t.All() {
			s := b.m.set(e.Value)
			entries := b.m.run(s.More)
			if s.First != 0 {
				entries = append(entries, s.First)
			}
			if hash, _ := s.others(); hash {
				prefixes[e.Value] = e.Prefix
			}
			for _, x := range entries {
				if !yield(unpackBinding(e.Prefix, x), nil) {
					return
				}
			}
		}
		if len(prefixes) == 0 {
			return
		}
		var k manyKey
		var v uint32
		it := b.many.Iterate()
		for it.Next(&k, &v) {
			if p, ok := prefixes[k.Set]; ok && !yield(Binding{p, k.Proto, k.Port, v}, nil) {
				return
			}
		}
		if err := it.Err(); err != nil {
			yield(Binding{}, fmt.Errorf("read bindings: %w", err))
		}
	}
}
