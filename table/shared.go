// SPDX-License-Identifier: Apache-2.0

package table

// Often many prefixes are bound to few services and differ only in their addresses. Replace gives
// prefixes of one length, with the same encloser and nothing below them, one common set. A million
// addresses of one service then need 16 bytes of sets instead of 16 MB. This saves each lookup a
// cold cache line. A changed prefix gets a set of its own. The next Replace or repair frees unused
// shared sets.

import "net/netip"

// alike finds sets for prefixes to share.
type alike map[set]uint32

// setShared changes a prefix with a shared set. The prefix gets a set of its own, and the store
// that links it also publishes the change.
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

// unshare gives the prefix enclosing p a set of its own in place of the shared set id. Prefixes
// below it will name it as their parent.
func (b *Bindings) unshare(p netip.Prefix, id uint32) (uint32, error) {
	s := *b.m.set(id)
	above, err := p.Addr().Prefix(s.bits())
	if err != nil {
		return 0, err
	}
	return b.own(above, s)
}

// reparentShared gives prefixes with shared sets another parent. Prefixes that shared a set before
// share a new one.
func (b *Bindings) reparentShared(prefixes []Entry, to uint32) error {
	if len(prefixes) == 0 {
		return nil
	}
	now := map[uint32]uint32{} // old set to its replacement
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
