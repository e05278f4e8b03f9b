// SPDX-License-Identifier: Apache-2.0

package table

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/cilium/ebpf"
)

// Set adds a binding or replaces its value.
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
		if at := b.m.find(id, packKey(x.Proto, x.Port)); at != nil {
			atomic.StoreUint64(at, packBinding(x))
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

// whole carries out a change. A failed change leaves the table as it was. An interrupted one is
// repaired later.
func (b *Bindings) whole(change func() error) error {
	atomic.StoreUint32(&b.m.Writing, 1)
	if err := change(); err != nil {
		return errors.Join(err, b.repair())
	}
	b.m.retireToLimbo()
	atomic.StoreUint32(&b.m.Writing, 0)
	return nil
}

// room returns an error if the maps are too small for n bindings.
func (b *Bindings) room(n int) error {
	if most := int(b.many.MaxEntries()); n > most {
		return fmt.Errorf("%w: there is room for %d bindings", ErrFull, most)
	}
	return nil
}

// insert gives a prefix an empty set and links it between the enclosing prefix and the enclosed
// ones. No lookup changes before the first binding is stored.
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
	*b.m.set(id) = set{Link: packLink(p, above)}
	b.m.Sets++
	if err := b.t.Set(p, id); err != nil {
		return 0, err
	}
	return id, b.reparent(p, above, id)
}

// encloser returns the set of the longest prefix enclosing p. p itself has no set yet.
func (b *Bindings) encloser(p netip.Prefix) uint32 {
	id, _ := b.t.Lookup(p.Addr())
	for id != 0 && b.m.set(id).bits() >= p.Bits() {
		id = b.m.set(id).parent()
	}
	return id
}

// reparent changes the parent of the sets of prefixes within p.
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

// add puts a new binding into a set. In a hashed set the binding may exist already. add then
// replaces its value and returns false.
func (b *Bindings) add(id uint32, x Binding) (added bool, err error) {
	s, e := b.m.set(id), packBinding(x)
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
	case others < maxInline:
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

// hash puts entries of a set into the map of large sets.
func (b *Bindings) hash(id uint32, entries []uint64) error {
	for _, e := range entries {
		x := unpackBinding(netip.Prefix{}, e)
		if err := b.many.Put(manyKey{Set: id, Port: x.Port, Proto: x.Proto}, x.Value); err != nil {
			return b.manyError(err)
		}
	}
	b.m.Hashed += uint32(len(entries))
	return nil
}

func (b *Bindings) manyError(err error) error {
	if errors.Is(err, errMapFull) {
		return fmt.Errorf("%w: %d bindings of prefixes with more than %d bindings use all room for these", ErrFull, b.m.Hashed, maxInline+1)
	}
	return err
}

// Delete removes a binding and reports whether it existed.
func (b *Bindings) Delete(k Key) (existed bool, err error) {
	if err := (Binding{k.Prefix, k.Proto, k.Port, 1}).check(); err != nil {
		return false, err
	}
	id, ok := b.t.Get(k.Prefix)
	if !ok {
		return false, nil
	}
	err = b.whole(func() (err error) {
		if existed, err = b.removeFrom(id, k); err != nil || !existed {
			return err
		}
		b.m.Bindings--
		s := b.m.set(id)
		switch {
		case s.shared(): // nothing is below it, and the other prefixes keep the set
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

// removeFrom removes a binding from its set.
func (b *Bindings) removeFrom(id uint32, k Key) (existed bool, err error) {
	s, key := b.m.set(id), packKey(k.Proto, k.Port)
	if s.shared() {
		return s.First>>32 == key, nil // the prefix is removed, the set stays
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
