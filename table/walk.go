// SPDX-License-Identifier: Apache-2.0

package table

import "net/netip"

// The prefixes of a table are read from its pages. For each value a page tells whether it is a
// prefix or inherited.

// walk yields the prefixes of a page and of the pages below. base has the address bits above its
// slice.
func (m *memory) walk(entry uint32, base prefix, yield func(prefix) bool) bool {
	if m.isFan(of(entry)) {
		return m.walkFan(entry, base, yield)
	}
	n := m.decode(of(entry))
	for _, p := range n.list {
		p.hi = base.hi
		if !yield(p) {
			return false
		}
	}
	end := sliceEnd(n.slice)
	for _, it := range n.items {
		p := base
		p.put(n.slice, it.start)
		p.len = end - it.shift
		if !isPage(it.entry) {
			p.value = of(it.entry)
			if !yield(p) {
				return false
			}
			continue
		}
		if h := *m.word(of(it.entry), 0); h&ownValue != 0 {
			p.value = of(h)
			if !yield(p) {
				return false
			}
		}
		below := base
		if headSlice(*m.word(of(it.entry), 0)) != n.slice {
			below = p
		}
		if !m.walk(it.entry, below, yield) {
			return false
		}
	}
	return true
}

// walkFan yields the prefixes of a fan and the pages below it.
func (m *memory) walkFan(entry uint32, base prefix, yield func(prefix) bool) bool {
	f := m.fanAt(of(entry))
	if isPage(*f.shadow) && !m.walk(*f.shadow, base, yield) {
		return false
	}
	for x, e := range f.entries {
		if !isPage(e) {
			continue
		}
		below := base
		if f.shift() == 0 {
			below.put(f.slice, uint32(x))
		}
		if !m.walk(e, below, yield) {
			return false
		}
	}
	return true
}

// put sets the bits of a slice.
func (p *prefix) put(slice uint8, x uint32) {
	switch {
	case slice == 0:
		p.hi |= uint64(x) << 32
	case slice < 4:
		p.hi |= uint64(x) << (48 - 16*slice)
	default:
		p.lo |= uint64(x) << (48 - 16*(slice-4))
	}
}

func walkShort(short []uint32, yield func(prefix) bool) bool {
	length := uint8(0)
	for i := uint32(1); i < uint32(len(short)); i++ {
		if i == 2<<length {
			length++
		}
		if v := short[i]; v != 0 {
			b := uint64(i - 1<<length)
			if !yield(prefix{hi: b << 1 << (63 - length), len: length, value: v}) {
				return false
			}
		}
	}
	return true
}

func (m *memory) walk4(yield func(prefix) bool) bool {
	if !walkShort(m.Short4[m.active4()][:], yield) {
		return false
	}
	for g, e := range m.index[m.active4()].Root4 {
		if isPage(e) && !m.walk(e, prefix{hi: uint64(g) << (64 - root4Bits)}, yield) {
			return false
		}
	}
	return true
}

func (m *memory) walk6(yield func(prefix) bool) bool {
	t := m.index[m.active6()]
	if !walkShort(m.Short6[m.active6()][:], yield) {
		return false
	}
	for g, e := range t.Root6 {
		if isPage(e) && !m.walk(e, prefix{hi: uint64(g) << (64 - root6Bits)}, yield) {
			return false
		}
	}
	for s := range t.Slots {
		if key, ok := m.keyAt(t, s); ok && !m.walk(t.Slot[s], prefix{hi: uint64(key) << 32}, yield) {
			return false
		}
	}
	return true
}

// walkBelow yields the prefixes in the part of the table containing p.
func (m *memory) walkBelow(ipv4 bool, p *prefix, yield func(prefix) bool) {
	if ipv4 {
		m.walkShortest(m.Short4[m.active4()][:], root4Bits, p, yield)
		if p.len > root4Bits {
			m.walkOne(m.index[m.active4()].Root4[p.hi>>(64-root4Bits)], prefix{hi: p.hi >> (64 - root4Bits) << (64 - root4Bits)}, p, yield)
		}
		return
	}
	t := m.index[m.active6()]
	m.walkShortest(m.Short6[m.active6()][:], root6Bits, p, yield)
	if p.len > 32 {
		if e := m.group(t, uint32(p.hi>>32)); e != 0 {
			m.walkOne(e, prefix{hi: p.hi >> 32 << 32}, p, yield)
			return
		}
	}
	if p.len > root6Bits {
		m.walkOne(t.Root6[p.hi>>(64-root6Bits)], prefix{hi: p.hi >> (64 - root6Bits) << (64 - root6Bits)}, p, yield)
	}
}

func (m *memory) walkShortest(short []uint32, bits uint8, p *prefix, yield func(prefix) bool) {
	if p.len <= bits {
		if v := short[shortIndex(p)]; v != 0 {
			q := *p
			q.value = v
			yield(q)
		}
	}
}

// walkOne descends to the position of a prefix and yields it if it exists.
func (m *memory) walkOne(entry uint32, base prefix, p *prefix, yield func(prefix) bool) {
	for isPage(entry) {
		if m.isFan(of(entry)) {
			f := m.fanAt(of(entry))
			if p.len <= sliceEnd(f.slice)-f.shift() {
				entry = *f.shadow
			} else {
				entry = f.entries[p.part(f.slice)>>f.shift()]
				if f.shift() == 0 {
					base.hi, base.lo = p.hi, p.lo
				}
			}
			continue
		}
		n := m.decode(of(entry))
		for _, q := range n.list {
			if q.hi = base.hi; q.len == p.len && q.lo == p.lo {
				yield(q)
			}
		}
		end, x := sliceEnd(n.slice), p.part(n.slice)
		entry = 0
		for _, it := range n.items {
			switch {
			case !it.covers(x) || end-it.shift > p.len:
			case isPage(it.entry) && end-it.shift < p.len:
				entry = it.entry
				base.hi, base.lo = p.hi, p.lo
			case end-it.shift == p.len && it.start == x:
				q := *p
				q.value = of(it.entry)
				if isPage(it.entry) {
					h := *m.word(of(it.entry), 0)
					if h&ownValue == 0 {
						continue
					}
					q.value = of(h)
				}
				yield(q)
			}
		}
	}
}

// within yields the prefixes enclosed by p, including p itself, with their values.
func (t *Table) within(p netip.Prefix, yield func(prefix, uint32)) {
	q, err := newPrefix(p, 1)
	if err != nil {
		return
	}
	m, each := t.m, func(found prefix) bool {
		if q.encloses(found) {
			yield(found, found.value)
		}
		return true
	}
	if p.Addr().Is4() {
		m.walkRoot(m.Short4[m.active4()][:], m.index[m.active4()].Root4[:], root4Bits, &q, each)
		return
	}
	idx := m.index[m.active6()]
	m.walkRoot(m.Short6[m.active6()][:], idx.Root6[:], root6Bits, &q, each)
	if q.len >= 32 {
		if key := uint32(q.hi >> 32); m.group(idx, key) != 0 {
			m.walk(m.group(idx, key), prefix{hi: uint64(key) << 32}, each)
		}
		return
	}
	for s := range idx.Slots {
		if key, ok := m.keyAt(idx, s); ok && q.encloses(prefix{hi: uint64(key) << 32, len: 32}) {
			m.walk(idx.Slot[s], prefix{hi: uint64(key) << 32}, each)
		}
	}
}

// encloses reports whether q is within p or equal to it.
func (p *prefix) encloses(q prefix) bool {
	if q.len < p.len {
		return false
	}
	if p.len == 0 {
		return true
	}
	if p.len <= 64 {
		return (p.hi^q.hi)>>(64-p.len) == 0
	}
	return p.hi == q.hi && (p.lo^q.lo)>>(128-p.len) == 0
}

// walkRoot yields the short prefixes within p, and the prefixes below the root entries in p.
func (m *memory) walkRoot(short, root []uint32, bits uint8, p *prefix, yield func(prefix) bool) {
	first := p.hi >> (64 - bits)
	last := first
	if p.len < bits {
		last = first | (1<<(bits-p.len) - 1)
	}
	for length := p.len; length <= bits; length++ {
		for b := first >> (bits - length); b <= last>>(bits-length); b++ {
			if v := short[1<<length|b]; v != 0 {
				yield(prefix{hi: b << 1 << (63 - length), len: length, value: v})
			}
		}
	}
	for g := first; g <= last; g++ {
		if isPage(root[g]) {
			m.walk(root[g], prefix{hi: g << (64 - bits)}, yield)
		}
	}
}
