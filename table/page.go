// SPDX-License-Identifier: Apache-2.0

package table

import (
	"slices"
	"sync/atomic"
	"unsafe"
)

// Bits of entries and of page heads, see bpf/table.h.
const (
	pageEntry = 1 << 31
	ownValue  = 0x100
	kindBits  = 31 // number of items, or listPage or fanPage
	listPage  = 30
	fanPage   = 31
	maxItems  = 28
	maxList   = 7
	itemBits  = 0x1ff // of an entry: the wildcard bits and the distance to the encloser

	// MaxValue is the largest value of a prefix.
	MaxValue = 1<<22 - 1
)

func valueEntry(v uint32) uint32        { return v << 9 }
func pageEntryFor(number uint32) uint32 { return pageEntry | number<<9 }
func headSlice(head uint32) uint8       { return uint8(head >> 5 & 7) }
func of(entry uint32) uint32            { return entry >> 9 & MaxValue }
func isPage(entry uint32) bool          { return entry&pageEntry != 0 }

// prefix is a prefix with its value. An IPv4 address is in the upper 32 bits of hi.
type prefix struct {
	hi, lo uint64
	value  uint32
	order  uint32 // position in the input of Replace: of equal prefixes the last counts
	len    uint8
}

// A page examines 16 bits of the address, its slice: 0 to 7 of an IPv6 address. The root replaces
// slice 0 of IPv6. Slice 0 is therefore IPv4's: the bits after its root.
func (p *prefix) part(slice uint8) uint32 {
	switch {
	case slice == 0:
		return uint32(p.hi>>32) & (1<<(32-root4Bits) - 1)
	case slice < 4:
		return uint32(p.hi>>(48-16*slice)) & 0xffff
	}
	return uint32(p.lo>>(48-16*(slice-4))) & 0xffff
}

// width returns the number of address bits in a slice.
func width(slice uint8) uint8 {
	if slice == 0 {
		return 32 - root4Bits
	}
	return 16
}

// sliceEnd returns the length of a prefix ending with a slice.
func sliceEnd(slice uint8) uint8 {
	if slice == 0 {
		return 32
	}
	return 16 * (slice + 1)
}

// item is a prefix ending in a page's slice, or a link to another page.
type item struct {
	start uint32 // in the slice
	shift uint8  // wildcard bits
	entry uint32 // its value, or a page
}

func (i item) covers(x uint32) bool { return (i.start^x)>>i.shift == 0 }

// compare orders items as in a page: by start, enclosing ones first.
func (i item) compare(start uint32, shift uint8) int {
	if i.start != start {
		return int(i.start) - int(start)
	}
	return int(shift) - int(i.shift)
}

// node is a decoded page.
type node struct {
	value uint32 // of addresses without a matching item
	own   bool   // value is a prefix of exactly the page's bits; else it is inherited
	slice uint8
	tag   uint32
	items []item
	list  []prefix // for a list, in place of items; lo, len and value are set
}

// laneBytes returns the size of the starts of n items, in bytes.
func laneBytes(n uint32) uint32 { return (n + 3) / 4 * 8 }

// itemUnits returns the size of a page of n items, in units.
func itemUnits(n uint32) uint32 { return (8 + laneBytes(n) + 4*n + 7) / 8 }

// entryAt returns the entry of item i, in a page of n items.
func (m *memory) entryAt(number, n, i uint32) *uint32 { return m.word(number, 2+laneBytes(n)/4+i) }

// wildcard returns the number of wildcard bits at the end of an item's slice.
func wildcard(entry uint32) uint8 { return uint8(entry >> 5 & 15) }

// decode reads a page.
func (m *memory) decode(number uint32) node {
	h := *m.word(number, 0)
	n := node{value: of(h), own: h&ownValue != 0, slice: headSlice(h)}
	if h&kindBits == listPage {
		k := *m.word(number, 1)
		n.list = make([]prefix, 0, maxList+1)
		for i := range k {
			n.list = append(n.list, prefix{lo: uint64(*m.word(number, 2+4*i)) | uint64(*m.word(number, 3+4*i))<<32,
				len: uint8(128 - *m.word(number, 4+4*i)), value: *m.word(number, 5+4*i)})
		}
		return n
	}
	n.tag = *m.word(number, 1)
	k := h & kindBits
	if k == fanPage {
		k = 0
	}
	n.items = make([]item, 0, k+1)
	for i := range k {
		e := *m.entryAt(number, k, i)
		n.items = append(n.items, item{m.start(number, i), wildcard(e), e &^ itemBits})
	}
	return n
}

// start returns the start in lane i.
func (m *memory) start(number, i uint32) uint32 {
	lane := uint32(*(*uint16)(unsafe.Add(m.at(number), 8+2*uintptr(i))))
	return (lane<<1 | lane>>15) & 0xffff
}

// emit writes a page of at most maxItems items and returns the entry leading to it.
func (m *memory) emit(n *node) (uint32, error) {
	if n.list != nil {
		return m.emitList(n)
	}
	k := uint32(len(n.items))
	number, err := m.alloc(itemUnits(k))
	if err != nil {
		return 0, err
	}
	*m.word(number, 0), *m.word(number, 1) = valueEntry(n.value)|n.flags()|k, n.tag
	back := enclosers(n)
	for i := range laneBytes(k) / 2 {
		lane := (*uint16)(unsafe.Add(m.at(number), 8+2*uintptr(i)))
		if i >= k {
			*lane = 0xffff
			continue
		}
		it := n.items[i]
		*lane = uint16(it.start)>>1 | uint16(it.start)<<15
		*m.entryAt(number, k, i) = it.entry&^itemBits | uint32(it.shift)<<5 | uint32(back[i])
	}
	return m.leadTo(number), nil
}

func (n *node) flags() uint32 {
	f := uint32(n.slice) << 5
	if n.own {
		f |= ownValue
	}
	return f
}

// leadTo returns the entry leading to a page, with its number of further cache lines.
func (m *memory) leadTo(number uint32) uint32 {
	from := uint32(physical(number)) % 64
	return pageEntryFor(number) | min((from+8*m.pageUnits(number)-1)/64, 3)
}

// enclosers returns for each item the distance back to the next item to try, if the address is not
// in this one. 0 means none.
func enclosers(n *node) (back [maxItems]uint8) {
	var open [17]int // possible enclosers of the current item
	depth := 0
	for i, it := range n.items {
		for depth > 0 && !n.items[open[depth-1]].covers(it.start) {
			depth--
		}
		if depth > 0 {
			back[i] = uint8(i - open[depth-1])
		}
		// Two neighbours of full length share a 15-bit lane. The search then finds the second of
		// them.
		if before := i - 1; i > 0 && it.shift == 0 && it.start&1 == 1 &&
			n.items[before].shift == 0 && n.items[before].start == it.start-1 {
			back[i] = 1
		}
		open[depth] = i
		depth++
	}
	return back
}

// emitList writes a page of prefixes of one /64.
func (m *memory) emitList(n *node) (uint32, error) {
	k := uint32(len(n.list))
	number, err := m.alloc(1 + 2*k)
	if err != nil {
		return 0, err
	}
	*m.word(number, 0), *m.word(number, 1) = valueEntry(n.value)|n.flags()|listPage, k
	slices.SortFunc(n.list, func(a, b prefix) int { return int(b.len) - int(a.len) })
	for i, p := range n.list {
		at := 2 + 4*uint32(i)
		*m.word(number, at), *m.word(number, at+1) = uint32(p.lo), uint32(p.lo>>32)
		*m.word(number, at+2), *m.word(number, at+3) = uint32(128-p.len), p.value
	}
	return m.leadTo(number), nil
}

// point changes the entry of an item by one 32-bit store.
func (m *memory) point(number uint32, i int, entry uint32) {
	w := m.entryAt(number, *m.word(number, 0)&kindBits, uint32(i))
	atomic.StoreUint32(w, entry&^itemBits|*w&itemBits)
}
