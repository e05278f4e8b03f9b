// SPDX-License-Identifier: Apache-2.0

package table

import (
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"
)

// Bindings is a table whose prefixes carry exact fields: a protocol and a port, or every port of a protocol. The longest
// prefix that is bound for a packet's protocol and port decides; of one prefix, the binding of the port goes before
// that of every port. A longer prefix that is bound for something else hides nothing. BPF programs read it through
// bpf/bindings.h.
//
// Set and Delete take effect for all addresses at once, by one store. One writer at a time, as for Table.
type Bindings struct {
	t    *Table
	m    *sets
	many *ebpf.Map
}

// Binding is a prefix, what of its traffic is meant, and a value.
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

// Key returns what a binding is of.
func (x Binding) Key() Key { return Key{x.Prefix, x.Proto, x.Port} }

// BindingMaps are the maps of BINDINGS_MAPS(NAME): a table's, NAME_sets and NAME_many.
type BindingMaps struct {
	Maps
	Sets, Many *ebpf.Map
}

// BindingsOf picks the maps of the bindings called name.
func BindingsOf(maps map[string]*ebpf.Map, name string) (BindingMaps, error) {
	t, err := Of(maps, name)
	m := BindingMaps{t, maps[name+"_sets"], maps[name+"_many"]}
	if err == nil && (m.Sets == nil || m.Many == nil) {
		err = fmt.Errorf("%w: %s_sets and %s_many are not all there", ErrLayout, name, name)
	}
	return m, err
}

// SizeBindings makes room for so many bindings, at most MostBindings, before the maps are made, wherever their prefixes
// lie, but for millions of IPv6 hosts in as many networks. Replace needs room for the old bindings and the new.
func SizeBindings(spec *ebpf.CollectionSpec, name string, bindings int) error {
	if bindings < 1 || bindings > MostBindings {
		return fmt.Errorf("room for %d bindings: there may be 1 to %d", bindings, MostBindings)
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

// MostBindings is the greatest number that SizeBindings takes.
const MostBindings = 1 << 20

// OpenBindings opens bindings for writing. Maps that were just made become an empty table; what a killed writer left
// half done is repaired.
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
		err = fmt.Errorf("%w: its sets say %#x, want %#x", ErrLayout, m.Magic, setsMagic)
	case m.Writing != 0:
		err = b.repair()
	}
	if err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

// OpenBindingsReader opens bindings for reading. Of maps that are open for reading alone it is a copy: the bindings as
// they were at the call.
func OpenBindingsReader(maps BindingMaps) (*Bindings, error) {
	for range mostCopies {
		b, again, err := openReader(maps)
		if err != nil || !again {
			return b, err
		}
	}
	return nil, errBusy
}

// openReader copies, if it must, the table before the sets that it leads to: a set that went meanwhile is still in its
// memory, unless that was used again.
func openReader(maps BindingMaps) (_ *Bindings, again bool, err error) {
	reused, err := wordOf(maps.Sets, unsafe.Offsetof(setsHead{}.Reused))
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
		now, err = wordOf(maps.Sets, unsafe.Offsetof(setsHead{}.Reused))
	}
	if err == nil && m.Magic != setsMagic {
		err = fmt.Errorf("%w: its sets say %#x, want %#x", ErrLayout, m.Magic, setsMagic)
	}
	if err != nil || now != reused {
		b.Close()
	}
	return b, now != reused, err
}

// Close ends the use of the maps, which stay the caller's.
func (b *Bindings) Close() error {
	b.m.unmap()
	return b.t.Close()
}

// Len is how many bindings there are.
func (b *Bindings) Len() int { return int(b.m.Bindings) }

// check says what is wrong with a binding.
func (x Binding) check() error {
	if _, err := prefixOf(x.Prefix, 1); err != nil {
		return err
	}
	if x.Value < 1 || x.Value > MaxBound {
		return fmt.Errorf("%w: %d is not between 1 and %d", ErrValue, x.Value, MaxBound)
	}
	return nil
}

// Set binds, or gives what is bound another value.
func (b *Bindings) Set(x Binding) error {
	if err := x.check(); err != nil {
		return err
	}
	if err := b.room(b.Len() + 1); err != nil {
		if _, ok := b.Get(x.Key()); !ok {
			return err
		}
	}
	id, ok := b.t.Get(x.Prefix)
	switch {
	case ok && b.m.set(id).shared():
		return b.setShared(id, x)
	case ok:
		if at := b.m.find(id, keyOf(x.Proto, x.Port)); at != nil {
			atomic.StoreUint64(at, entryOf(x))
			return nil
		}
	}
	return b.whole(func() (err error) {
		if !ok {
			if id, err = b.insert(x.Prefix); err != nil {
				return err
			}
		}
		added, err := b.add(id, x)
		if added {
			b.m.Bindings++
		}
		return err
	})
}

// whole carries out a change. One that fails has changed nothing, and one in which the writer is killed is repaired.
func (b *Bindings) whole(change func() error) error {
	atomic.StoreUint32(&b.m.Writing, 1)
	if err := change(); err != nil {
		return errors.Join(err, b.repair())
	}
	b.m.settle()
	atomic.StoreUint32(&b.m.Writing, 0)
	return nil
}

// room says whether the maps were made for so many bindings.
func (b *Bindings) room(n int) error {
	if most := int(b.many.MaxEntries()); n > most {
		return fmt.Errorf("%w: there is room for %d bindings", ErrFull, most)
	}
	return nil
}

// insert gives a prefix an empty set, and puts it between the one that encloses it and those that it encloses. That
// changes no lookup: the binding that comes after it does.
func (b *Bindings) insert(p netip.Prefix) (uint32, error) {
	id, err := b.m.alloc(1)
	if err != nil {
		return 0, err
	}
	above := b.encloser(p)
	if above != 0 && b.m.set(above).shared() {
		if above, err = b.unshare(p, above); err != nil {
			return 0, err
		}
	}
	*b.m.set(id) = set{Link: linkOf(p, above)}
	b.m.Sets++
	if err := b.t.Set(p, id); err != nil {
		return 0, err
	}
	return id, b.reparent(p, above, id)
}

// encloser is the set of the longest prefix that encloses another one that has none.
func (b *Bindings) encloser(p netip.Prefix) uint32 {
	id, _ := b.t.Lookup(p.Addr())
	for id != 0 && b.m.set(id).bits() >= p.Bits() {
		id = b.m.set(id).parent()
	}
	return id
}

// reparent has the sets of prefixes within p go on to another one than before.
func (b *Bindings) reparent(p netip.Prefix, from, to uint32) error {
	if p.IsSingleIP() {
		return nil
	}
	var shared []Entry
	b.t.within(p, func(q prefix, id uint32) {
		s := b.m.set(id)
		switch {
		case id == to || s.parent() != from || s.bits() <= p.Bits():
		case s.shared():
			shared = append(shared, Entry{q.entry(p.Addr().Is4()).Prefix, id})
		default:
			atomic.StoreUint32(&s.Link, s.Link&^MaxValue|to)
		}
	})
	return b.reparentShared(shared, to)
}

// add puts a binding that is not there yet into a set; with many in one, it may turn out to be.
func (b *Bindings) add(id uint32, x Binding) (added bool, err error) {
	s, e := b.m.set(id), entryOf(x)
	hash, others := s.others()
	switch {
	case hash:
		key := manyKey{Set: id, Port: x.Port, Proto: x.Proto}
		err := b.many.Update(key, uint32(e), ebpf.UpdateNoExist)
		if errors.Is(err, ebpf.ErrKeyExist) {
			return false, b.many.Put(key, uint32(e))
		}
		if err != nil {
			return false, b.manyError(err)
		}
		b.m.Hashed++
		atomic.StoreUint32(&s.More, s.More+1)
	case s.First == 0:
		atomic.StoreUint64(&s.First, e)
	case others < mostInline:
		run, err := b.m.writeRun(append(b.m.run(s.More), e))
		if err != nil {
			return false, err
		}
		b.m.retireRun(s.More)
		atomic.StoreUint32(&s.More, run)
	default:
		was := s.More
		if err := b.hash(id, append(b.m.run(was), e)); err != nil {
			return false, err
		}
		b.m.retireRun(was)
		atomic.StoreUint32(&s.More, hashed|(others+1))
	}
	return true, nil
}

// hash puts entries of a set into the map for sets of many.
func (b *Bindings) hash(id uint32, entries []uint64) error {
	for _, e := range entries {
		x := bindingOf(netip.Prefix{}, e)
		if err := b.many.Put(manyKey{Set: id, Port: x.Port, Proto: x.Proto}, x.Value); err != nil {
			return b.manyError(err)
		}
	}
	b.m.Hashed += uint32(len(entries))
	return nil
}

func (b *Bindings) manyError(err error) error {
	if errors.Is(err, errMapFull) {
		return fmt.Errorf("%w: %d bindings of prefixes with more than %d take all room for such", ErrFull, b.m.Hashed, mostInline+1)
	}
	return err
}

// Delete removes a binding, and says whether it was there.
func (b *Bindings) Delete(k Key) (existed bool, err error) {
	if err := (Binding{k.Prefix, k.Proto, k.Port, 1}).check(); err != nil {
		return false, err
	}
	id, ok := b.t.Get(k.Prefix)
	if !ok {
		return false, nil
	}
	err = b.whole(func() (err error) {
		if existed, err = b.take(id, k); err != nil || !existed {
			return err
		}
		b.m.Bindings--
		s := b.m.set(id)
		switch {
		case s.shared(): // it has nothing below it, and the set stays the others'
		case s.First == 0 && s.More == 0:
			if err := b.reparent(k.Prefix, id, s.parent()); err != nil {
				return err
			}
			b.m.retire(id, 1)
		default:
			return nil
		}
		b.m.Sets--
		_, err = b.t.Delete(k.Prefix)
		return err
	})
	return existed && err == nil, err
}

// take removes a binding from its set.
func (b *Bindings) take(id uint32, k Key) (existed bool, err error) {
	s, key := b.m.set(id), keyOf(k.Proto, k.Port)
	if s.shared() {
		return s.First>>32 == key, nil // the prefix goes, the set stays
	}
	if s.First>>32 == key {
		atomic.StoreUint64(&s.First, 0)
		return true, nil
	}
	if inHash, others := s.others(); inHash {
		err := b.many.Delete(manyKey{Set: id, Port: k.Port, Proto: k.Proto})
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		b.m.Hashed--
		more := s.More - 1
		if others == 1 {
			more = 0
		}
		atomic.StoreUint32(&s.More, more)
		return true, nil
	}
	run := b.m.run(s.More)
	for i, e := range run {
		if e>>32 == key {
			more, err := b.m.writeRun(append(run[:i], run[i+1:]...))
			if err != nil {
				return false, err
			}
			b.m.retireRun(s.More)
			atomic.StoreUint32(&s.More, more)
			return true, nil
		}
	}
	return false, nil
}

// Get returns the value of a binding.
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

// Lookup returns the binding that decides for an address, protocol and port.
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

// match is bindings_match.
func (b *Bindings) match(id uint32, proto uint8, port uint16) (x Binding, ok bool) {
	s := b.m.set(id)
	for range 3 {
		first, more := atomic.LoadUint64(&s.First), atomic.LoadUint32(&s.More)
		e := b.entry(id, first, more, keyOf(proto, port), keyOf(proto, 0))
		x, ok = bindingOf(netip.Prefix{}, e), e != 0
		if atomic.LoadUint64(&s.First) == first && atomic.LoadUint32(&s.More) == more {
			break
		}
	}
	return x, ok
}

// entry is bindings_entry.
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

// All yields every binding, in no particular order. The table must not be changed meanwhile.
func (b *Bindings) All() iter.Seq2[Binding, error] {
	return func(yield func(Binding, error) bool) {
		prefixes := map[uint32]netip.Prefix{} // of sets whose bindings are in the hash
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
				if !yield(bindingOf(e.Prefix, x), nil) {
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
			yield(Binding{}, fmt.Errorf("reading bindings: %w", err))
		}
	}
}
