// SPDX-License-Identifier: Apache-2.0

package table

// Many prefixes are mostly bound to few services, alike but for their addresses. Replace gives those of one length, with
// the same encloser and nothing below them, one set in common: a million addresses of one service then have 16 bytes of
// sets and not 16 MB, which is one cold cache line less for each lookup. A prefix that changes gets a set of its own.
// What nobody shares any more is freed by the next Replace or repair.

import "net/netip"

// alike finds sets that prefixes may have in common.
type alike map[set]uint32

// setShared changes a prefix whose set is shared: it gets one of its own, and both at once.
func (b *Bindings) setShared(id uint32, x Binding) error {
	s, e := *b.m.set(id), packBinding(x)
	if s.First == e {
		return nil
	}
	return b.whole(func() error {
		added := s.First>>32 != e>>32
		if added {
			more, err := b.m.writeRun([]uint64{e})
			if err != nil {
				return err
			}
			s.More = more
		} else {
			s.First = e
		}
		if _, err := b.own(x.Prefix, s); err != nil {
			return err
		}
		if added {
			b.m.Bindings++
		}
		return nil
	})
}

// own gives a prefix a set of its own in place of a shared one.
func (b *Bindings) own(p netip.Prefix, s set) (uint32, error) {
	id, err := b.m.alloc(1)
	if err != nil {
		return 0, err
	}
	s.Link &^= sharedSet
	*b.m.set(id) = s
	return id, b.t.Set(p, id)
}

// unshare gives the prefix that encloses p, and whose set is id, one of its own: what lies below it will name it.
func (b *Bindings) unshare(p netip.Prefix, id uint32) (uint32, error) {
	s := *b.m.set(id)
	above, err := p.Addr().Prefix(s.bits())
	if err != nil {
		return 0, err
	}
	return b.own(above, s)
}

// reparentShared has prefixes with shared sets go on to another set than before. Those of them that have one in common
// have another one in common then.
func (b *Bindings) reparentShared(prefixes []Entry, to uint32) error {
	if len(prefixes) == 0 {
		return nil
	}
	now := map[uint32]uint32{} // set, to the one in its place
	for _, e := range prefixes {
		id, ok := now[e.Value]
		if !ok {
			var err error
			if id, err = b.m.alloc(1); err != nil {
				return err
			}
			s := *b.m.set(e.Value)
			s.Link = s.Link&^MaxValue | to
			*b.m.set(id) = s
			now[e.Value] = id
		}
		if err := b.t.Set(e.Prefix, id); err != nil {
			return err
		}
	}
	return nil
}
