// SPDX-License-Identifier: Apache-2.0

package table

import (
	"net/netip"
	"sync/atomic"
)

// lookup mirrors table_lookup4 and table_lookup6. Only the search within a page is a plain loop
// here.
func (m *memory) lookup(a netip.Addr) uint32 {
	var p prefix
	p.hi, p.lo = words(a)
	active := atomic.LoadUint32(&m.Active)
	if a.Is4() {
		return m.descend(atomic.LoadUint32(&m.index[active&1].Root4[p.hi>>(64-root4Bits)]), &p)
	}
	t := m.index[active>>1&1]
	key := uint32(p.hi >> 32)
	if e := atomic.LoadUint32(&t.Slot[t.find(key)]); e != 0 && *m.word(of(e), 1) == key {
		return m.descend(e, &p)
	}
	return m.descend(atomic.LoadUint32(&t.Root6[p.hi>>(64-root6Bits)]), &p)
}

// maxDepth bounds the depth of pages. Each page consumes at least one bit of the address.
const maxDepth = 128 - root6Bits + 1

func (m *memory) descend(entry uint32, p *prefix) uint32 {
	// Pages form no cycle. But reused memory may lead a reader anywhere.
	for range maxDepth {
		if !isPage(entry) {
			break
		}
		entry = m.search(of(entry), p)
	}
	return of(entry)
}

// search returns the entry of a page for an address.
func (m *memory) search(number uint32, p *prefix) uint32 {
	if number >= m.limit() {
		return 0
	}
	h := atomic.LoadUint32(m.word(number, 0))
	slice := headSlice(h)
	switch x := p.part(slice); h & kindBits {
	case fanPage:
		at := fanHead + x>>(width(slice)-min(uint8(*m.word(number, 2)), width(slice)))
		if number+at/2 >= m.limit() {
			return 0
		}
		return atomic.LoadUint32(m.word(number, at))
	case listPage:
		for i := range min(*m.word(number, 1), maxList) {
			start := uint64(*m.word(number, 2+4*i)) | uint64(*m.word(number, 3+4*i))<<32
			if (p.lo^start)>>(*m.word(number, 4+4*i)&63) == 0 {
				return valueEntry(*m.word(number, 5+4*i))
			}
		}
		return valueEntry(of(h))
	default:
		return m.find(number, x)
	}
}
