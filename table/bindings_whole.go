// SPDX-License-Identifier: Apache-2.0

package table

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/cilium/ebpf"
)

// Changes of all bindings at once: replacement, and repair after a killed writer.

// Replace replaces all bindings at once: a reader sees the old ones or the new. If a key occurs
// twice, the last value counts. Both sets must fit.
func (b *Bindings) Replace(all []Binding) error {
	for i, x := range all {
		if err := x.check(); err != nil {
			return fmt.Errorf("binding %d: %w", i, err)
		}
	}
	all = sortBindings(all)
	if err := b.room(len(all)); err != nil {
		return err
	}
	atomic.StoreUint32(&b.m.Writing, 1)
	b.m.grace()
	used := make([]uint8, b.m.limit()) // size of the memory beginning there, in units
	entries, err := b.build(all, used)
	if err == nil {
		err = b.t.Replace(entries)
	}
	if err != nil {
		return errors.Join(err, b.repair())
	}
	b.m.Bindings, b.m.Sets = uint32(len(all)), uint32(len(entries))
	b.m.reclaim(used) // Table.Replace has waited for readers of the old sets
	if err := b.sweep(); err != nil {
		return err
	}
	atomic.StoreUint32(&b.m.Writing, 0)
	return nil
}

// sortBindings returns the bindings sorted, as a copy unless they already are. A prefix precedes
// the enclosed ones. Of equal keys the last remains.
func sortBindings(all []Binding) []Binding {
	compare := func(x, y Binding) int {
		return cmp.Or(x.Prefix.Addr().Compare(y.Prefix.Addr()), x.Prefix.Bits()-y.Prefix.Bits(),
			int(x.Proto)-int(y.Proto), int(x.Port)-int(y.Port))
	}
	sorted := true
	for i := 1; i < len(all) && sorted; i++ {
		sorted = compare(all[i-1], all[i]) < 0
	}
	if sorted {
		return all
	}
	out := slices.Clone(all)
	slices.SortStableFunc(out, compare)
	n := 0
	for i, x := range out {
		if i+1 < len(out) && out[i+1].Key() == x.Key() {
			continue
		}
		out[n] = x
		n++
	}
	return out[:n]
}

// build writes unpublished sets of sorted bindings.
func (b *Bindings) build(all []Binding, used []uint8) ([]Entry, error) {
	entries := make([]Entry, 0, len(all))
	var above enclosing
	var of []uint64
	same := [2]alike{{}, {}} // by family, because a set does not contain it
	for i := 0; i < len(all); {
		p := all[i].Prefix
		of = of[:0]
		for ; i < len(all) && all[i].Prefix == p; i++ {
			of = append(of, packBinding(all[i]))
		}
		s := set{Link: packLink(p, above.of(p)), First: of[0]}
		if len(of) == 1 && (i == len(all) || !p.Overlaps(all[i].Prefix)) { // nothing is below it
			s.Link |= sharedSet
			family := &same[p.Addr().BitLen()>>7]
			if id, ok := (*family)[s]; ok {
				entries = append(entries, Entry{p, id})
				continue
			}
			id, err := b.m.alloc(1)
			if err != nil {
				return nil, err
			}
			*b.m.set(id), (*family)[s], used[id] = s, id, 1
			entries = append(entries, Entry{p, id})
			continue
		}
		id, err := b.m.alloc(1)
		if err != nil {
			return nil, err
		}
		above.enter(p, id)
		used[id] = 1
		if others := of[1:]; len(others) > maxInline {
			err = b.hash(id, others)
			s.More = hashed | uint32(len(others))
		} else if s.More, err = b.m.writeRun(others); s.More != 0 {
			used[s.More&MaxValue] = uint8(unitsOfRun(uint32(len(others))))
		}
		if err != nil {
			return nil, err
		}
		*b.m.set(id) = s
		entries = append(entries, Entry{p, id})
	}
	return entries, nil
}

// enclosing finds the enclosing prefix of each of a sequence of sorted prefixes.
type enclosing []struct {
	p  netip.Prefix
	id uint32
}

// of returns the set of the prefix enclosing p, or 0. p must follow the previous prefix in order.
func (e *enclosing) of(p netip.Prefix) (above uint32) {
	for n := len(*e); n > 0 && !(*e)[n-1].p.Overlaps(p); n-- {
		*e = (*e)[:n-1]
	}
	if n := len(*e); n > 0 {
		return (*e)[n-1].id
	}
	return 0
}

// enter adds p as a possible encloser of the next prefixes.
func (e *enclosing) enter(p netip.Prefix, id uint32) {
	*e = append(*e, struct {
		p  netip.Prefix
		id uint32
	}{p, id})
}

// reclaim frees the memory between the used parts.
func (m *sets) reclaim(used []uint8) {
	atomic.AddUint32(&m.Reused, 1)
	m.Free, m.InLimbo, m.retired = [maxRun + 1]uint32{}, 0, m.retired[:0]
	end := uint32(firstUnit)
	for unit := end; unit < m.Next; unit++ {
		if used[unit] == 0 {
			continue
		}
		m.free(end, unit)
		end = unit + uint32(used[unit])
		unit = end - 1
	}
	m.Next = end
}

// free adds the memory between two units to the lists, split at the ends of segments.
func (m *sets) free(from, to uint32) {
	for from < to {
		n := min(to-from, unitsOfSegment-from%unitsOfSegment)
		m.release(from, n)
		from += n
	}
}

// sweep removes the hash entries without a set.
func (b *Bindings) sweep() error {
	var gone []manyKey
	counts := map[uint32]uint32{}
	for e := range b.t.All() {
		if hash, _ := b.m.set(e.Value).others(); hash {
			counts[e.Value] = 0
		}
	}
	var k manyKey
	var v uint32
	it := b.many.Iterate()
	for it.Next(&k, &v) {
		if _, ok := counts[k.Set]; ok {
			counts[k.Set]++
		} else {
			gone = append(gone, k)
		}
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("read bindings: %w", err)
	}
	for _, k := range gone {
		if err := b.many.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("remove bindings without a prefix: %w", err)
		}
	}
	b.m.Hashed = 0
	for id, n := range counts {
		b.m.Hashed += n
		more := hashed | n
		if n == 0 {
			more = 0
		}
		atomic.StoreUint32(&b.m.set(id).More, more)
	}
	return nil
}

// repair rebuilds derived data from the bindings after an interrupted or failed change: the parents
// of sets, the counts, and the free memory. The bindings themselves are whole, because each was
// added or removed by one store.
func (b *Bindings) repair() error {
	b.m.wait()
	if err := b.sweep(); err != nil {
		return err
	}
	entries := slices.Collect(b.t.All())
	slices.SortFunc(entries, func(x, y Entry) int {
		return cmp.Or(x.Prefix.Addr().Compare(y.Prefix.Addr()), x.Prefix.Bits()-y.Prefix.Bits())
	})
	used := make([]uint8, b.m.limit())
	b.m.Bindings, b.m.Sets = 0, 0
	var above enclosing
	var misled []Entry // prefixes with a shared set of the wrong parent
	for _, e := range entries {
		s := b.m.set(e.Value)
		if s.First == 0 && s.More == 0 {
			if _, err := b.t.Delete(e.Prefix); err != nil {
				return err
			}
			continue
		}
		link := packLink(e.Prefix, above.of(e.Prefix))
		above.enter(e.Prefix, e.Value)
		switch {
		case !s.shared():
			atomic.StoreUint32(&s.Link, link)
		case s.Link&^sharedSet != link:
			misled = append(misled, Entry{e.Prefix, link})
		}
		used[e.Value] = 1
		hash, n := s.others()
		if !hash && n > 0 {
			used[s.More&MaxValue] = uint8(unitsOfRun(n))
		}
		b.m.Sets++
		b.m.Bindings += n
		if s.First != 0 {
			b.m.Bindings++
		}
	}
	b.m.wait() // for readers still in the empty sets
	b.m.reclaim(used)
	for _, e := range misled {
		id, _ := b.t.Get(e.Prefix)
		s := *b.m.set(id)
		s.Link = e.Value
		if _, err := b.own(e.Prefix, s); err != nil {
			return err
		}
	}
	atomic.StoreUint32(&b.m.Writing, 0)
	return nil
}
