// SPDX-License-Identifier: Apache-2.0

package table

import (
	"slices"
	"sync/atomic"
	"unsafe"
)

// Bits of entries and of a page's head; see bpf/table.h.
const (
	pageEntry = 1 << 31
	widePage  = 1
	listPage  = 0x100
	ownValue  = 8
	noItem    = 31
	maxItems  = 20
	maxList   = 7

	// MaxValue is the largest value that a prefix may have.
	MaxValue = 1<<22 - 1
)

func valueEntry(v uint32) uint32  { return v << 9 }
func pageOf(number uint32) uint32 { return pageEntry | number<<9 }
func of(entry uint32) uint32      { return entry >> 9 & MaxValue }
func isPage(entry uint32) bool    { return entry&pageEntry != 0 }

// prefix is a prefix with its value. An IPv4 address is the upper half of hi.
type prefix struct {
	hi, lo uint64
	value  uint32
	order  uint32 // among those of one Replace: the last of two alike counts
	len    uint8
}

// The 16 bits that a page looks at are called its slice: 0 to 7 of an IPv6 address. Slice 0 is never that of an IPv6
// page, for the root stands in its place; it is IPv4's, and means the last 15 bits.
func (p *prefix) part(slice uint8) uint32 {
	switch {
	case slice == 0:
		return uint32(p.hi>>32) & (1<<(32-root4Bits) - 1)
	case slice < 4:
		return uint32(p.hi>>(48-16*slice)) & 0xffff
	}
	return uint32(p.lo>>(48-16*(slice-4))) & 0xffff
}

// endOf is the length of a prefix that ends where a slice does.
func endOf(slice uint8) uint8 {
	if slice == 0 {
		return 32
	}
	return 16 * (slice + 1)
}

// item is a prefix that ends in a page's slice, or leads to another page.
type item struct {
	start uint32 // in the slice
	shift uint8  // wildcard bits
	entry uint32 // its value, or a page
}

func (i item) covers(x uint32) bool { return (i.start^x)>>i.shift == 0 }

// compare orders items as pages have them: by start, those that enclose others first.
func (i item) compare(start uint32, shift uint8) int {
	if i.start != start {
		return int(i.start) - int(start)
	}
	return int(shift) - int(i.shift)
}

// node is a page, read.
type node struct {
	value uint32 // where nothing matches
	own   bool   // value is a prefix of its own, that of the page as a whole; else it is inherited
	slice uint8
	tag   uint32
	items []item
	list  []prefix // of a list, in place of items; lo, len and value are set
}

// decode reads a page.
func (m *memory) decode(number uint32) node {
	h := *m.word(number, 0)
	n := node{value: of(h), own: h&ownValue != 0, slice: uint8(h >> 4 & 7), tag: *m.word(number, 1)}
	k := h & 7
	if h&listPage != 0 {
		n.list = make([]prefix, 0, maxList+1)
		for i := range k {
			n.list = append(n.list, prefix{lo: uint64(*m.word(number, 2+4*i)) | uint64(*m.word(number, 3+4*i))<<32,
				len: uint8(128 - *m.word(number, 4+4*i)), value: *m.word(number, 5+4*i)})
		}
		return n
	}
	n.items = make([]item, 0, 4*k+1)
	for i := range 4 * k {
		e := *m.word(number, 2+2*k+i)
		it := item{m.start(number, i, n.slice), uint8(e >> 5 & 15), e &^ 0x1ff}
		if i > 0 && it == n.items[i-1] {
			break // the last one is repeated
		}
		n.items = append(n.items, it)
	}
	return n
}

// start reads a lane.
func (m *memory) start(number, i uint32, slice uint8) uint32 {
	lane := uint32(*(*uint16)(unsafe.Add(m.at(number), 8+2*uintptr(i))))
	if slice > 0 {
		lane = (lane<<1 | lane>>15) & 0xffff
	}
	return lane
}

// emit writes a page of at most maxItems items and returns the entry that leads to it.
func (m *memory) emit(n *node) (uint32, error) {
	if n.list != nil {
		return m.emitList(n)
	}
	k := uint32(len(n.items)+3) / 4
	number, err := m.alloc(1 + 3*k)
	if err != nil {
		return 0, err
	}
	*m.word(number, 0) = valueEntry(n.value) | n.flags() | k
	*m.word(number, 1) = n.tag
	next := enclosers(n)
	for i := range 4 * k {
		j := min(int(i), len(n.items)-1)
		it := n.items[j]
		lane := uint16(it.start)
		if n.slice > 0 {
			lane = lane>>1 | lane<<15
		}
		*(*uint16)(unsafe.Add(m.at(number), 8+2*uintptr(i))) = lane
		*m.word(number, 2+2*k+i) = it.entry&^0x1ff | uint32(it.shift)<<5 | uint32(next[j])
	}
	return m.wide(pageOf(number)), nil
}

func (n *node) flags() uint32 {
	f := uint32(n.slice) << 4
	if n.own {
		f |= ownValue
	}
	return f
}

// wide marks an entry whose page spans two cache lines.
func (m *memory) wide(entry uint32) uint32 {
	if m.unitsOf(of(entry)) > 8 {
		entry |= widePage
	}
	return entry
}

// enclosers finds for each item where the search goes on if the address is not in it.
func enclosers(n *node) (next [maxItems]uint8) {
	var open [17]int // items that the present one may lie in
	depth := 0
	for i, it := range n.items {
		for depth > 0 && !n.items[open[depth-1]].covers(it.start) {
			depth--
		}
		next[i] = noItem
		if depth > 0 {
			next[i] = uint8(open[depth-1])
		}
		// Two neighbours of full length have the same 15-bit lane, and the search finds the second.
		if before := i - 1; n.slice > 0 && i > 0 && it.shift == 0 && it.start&1 == 1 &&
			n.items[before].shift == 0 && n.items[before].start == it.start-1 {
			next[i] = uint8(before)
		}
		open[depth] = i
		depth++
	}
	return next
}

// emitList writes a page that lists prefixes of one /64.
func (m *memory) emitList(n *node) (uint32, error) {
	k := uint32(len(n.list))
	number, err := m.alloc(1 + 2*k)
	if err != nil {
		return 0, err
	}
	*m.word(number, 0) = valueEntry(n.value) | n.flags() | listPage | k
	*m.word(number, 1) = n.tag
	slices.SortFunc(n.list, func(a, b prefix) int { return int(b.len) - int(a.len) })
	for i, p := range n.list {
		at := 2 + 4*uint32(i)
		*m.word(number, at), *m.word(number, at+1) = uint32(p.lo), uint32(p.lo>>32)
		*m.word(number, at+2), *m.word(number, at+3) = uint32(128-p.len), p.value
	}
	return m.wide(pageOf(number)), nil
}

// point has an item of a page lead elsewhere, at once: one 32-bit store, and those that repeat it.
func (m *memory) point(number uint32, i int, entry uint32) {
	k := *m.word(number, 0) & 7
	first := m.word(number, 2+2*k+uint32(i))
	old := *first
	lane := m.start(number, uint32(i), 1)
	for j := uint32(i); j < 4*k; j++ {
		w := m.word(number, 2+2*k+j)
		if *w != old || m.start(number, j, 1) != lane {
			break
		}
		atomic.StoreUint32(w, entry&^0x1ff|old&0x1ff)
	}
}
