// SPDX-License-Identifier: Apache-2.0

package table

import (
	"slices"
	"sync/atomic"
)

// IPv4: the first 17 bits lead to a page or a value. head.Short4 keeps prefixes of up to 17 bits as
// a binary tree. Each root entry has the value of the longest of them covering it.

func (m *memory) active4() int { return int(m.Active & 1) }

// set4 carries out a change.
func (m *memory) set4(c *change) error {
	t := m.index[m.active4()]
	if c.len > root4Bits {
		g := uint32(c.hi >> (64 - root4Bits))
		e, err := m.edit(t.Root4[g], 0, c)
		if err == nil && e != t.Root4[g] {
			atomic.StoreUint32(&t.Root4[g], e)
		}
		return err
	}
	short := m.Short4[m.active4()][:]
	if setShort(short, c) {
		m.spread(short, t.Root4[:], root4Bits, c)
	}
	return nil
}

// shortIndex returns the position of a prefix no longer than the root.
func shortIndex(p *prefix) uint32 { return 1<<p.len | uint32(p.hi>>1>>(63-p.len)) }

// setShort stores a short prefix and reports whether anything changed.
func setShort(short []uint32, c *change) bool {
	i := shortIndex(&c.prefix)
	c.found = short[i] != 0
	value := c.value
	if c.remove {
		value = 0
	}
	if short[i] == value {
		return false
	}
	short[i] = value
	return true
}

// shortValue returns the value in force at a position of the tree.
func shortValue(short []uint32, i uint32) uint32 {
	for ; i > 0; i >>= 1 {
		if short[i] != 0 {
			return short[i]
		}
	}
	return 0
}

// spread stores the value of a short prefix in all root entries without a longer short prefix.
func (m *memory) spread(short, root []uint32, bits uint8, c *change) {
	from := shortIndex(&c.prefix)
	value := shortValue(short, from)
	stack := []uint32{from}
	for len(stack) > 0 {
		i := stack[len(stack)-1]
		stack = stack[:len(stack)-1]
		if i != from && short[i] != 0 {
			continue // a longer prefix applies below
		}
		if i < 1<<bits {
			stack = append(stack, 2*i+1, 2*i)
			continue
		}
		m.restore(&root[i-1<<bits], value)
	}
}

// restore stores the inherited value in a root entry or in the page below it.
func (m *memory) restore(e *uint32, value uint32) {
	if isPage(*e) {
		m.inherit(*e, value, false)
	} else {
		atomic.StoreUint32(e, valueEntry(value))
	}
}

// fill4 builds an index from sorted prefixes.
func (m *memory) fill4(which int, ps []prefix) error {
	t, short := m.index[which], m.Short4[which][:]
	clear(t.Root4[:])
	clear(short)
	for i := range ps {
		if ps[i].len <= root4Bits {
			short[shortIndex(&ps[i])] = ps[i].value
		}
	}
	return m.fillRoot(t.Root4[:], short, root4Bits, 0, ps)
}

// fillRoot builds the pages below a root.
func (m *memory) fillRoot(root, short []uint32, bits, slice uint8, ps []prefix) error {
	above := make([]uint32, 2<<bits) // values in force, from the top of the tree down
	for i := uint32(1); i < 2<<bits; i++ {
		if above[i] = short[i]; above[i] == 0 {
			above[i] = above[i>>1]
		}
	}
	for i := range root {
		root[i] = valueEntry(above[1<<bits+i])
	}
	longer := make([]prefix, 0, 64)
	for i := 0; i < len(ps); {
		g := ps[i].hi >> (64 - bits)
		longer = longer[:0]
		j := i
		for ; j < len(ps) && ps[j].hi>>(64-bits) == g; j++ {
			if ps[j].len > bits {
				longer = append(longer, ps[j])
			}
		}
		if len(longer) > 0 {
			e, err := m.build(longer, slice, above[1<<bits+g], false, 0)
			if err != nil {
				return err
			}
			root[g] = e
		}
		i = j
	}
	return nil
}

func comparePrefixes(a, b prefix) int {
	switch {
	case a.hi != b.hi:
		if a.hi < b.hi {
			return -1
		}
		return 1
	case a.lo != b.lo:
		if a.lo < b.lo {
			return -1
		}
		return 1
	case a.len != b.len:
		return int(a.len) - int(b.len)
	}
	return int(a.order) - int(b.order)
}

// sortPrefixes sorts prefixes. Of equal ones it keeps the last one given.
func sortPrefixes(ps []prefix) []prefix {
	slices.SortFunc(ps, comparePrefixes)
	out := ps[:0]
	for i := range ps {
		if i+1 < len(ps) && ps[i].hi == ps[i+1].hi && ps[i].lo == ps[i+1].lo && ps[i].len == ps[i+1].len {
			continue
		}
		out = append(out, ps[i])
	}
	return out
}
