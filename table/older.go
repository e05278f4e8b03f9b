// SPDX-License-Identifier: Apache-2.0

package table

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// Tables that were pinned by a weir of before 2026-11-22 are laid out otherwise: pages of at most 20 items that are
// filled up to multiples of four, a root of 17 bits and pages of 15 for IPv4, a hash whose sizes are powers of two. They
// are read, to be carried over into maps of this layout, and not written.

const (
	olderMagic    = 0x77747032 // "wtp2"
	olderRoot4    = 17
	olderWidth4   = 32 - olderRoot4
	olderFan      = 0x80
	olderList     = 0x100
	olderOwnValue = 8
)

// olderHead is struct table_head as it was.
type olderHead struct {
	Active  uint32
	Magic   uint32
	Writing uint32
	Reused  uint32
	_       [4]uint32 // Next, Units, Pages, Groups
	_       [2]uint32 // Count
	_       uint32    // InLimbo
	_       [2 * 17]uint32
	_       [8192]uint32
	Short4  [2][2 << olderRoot4]uint32
	Short6  [2][2 << root6Bits]uint32
}

// olderIndex is struct table_index as it was.
type olderIndex struct {
	Root4        [1 << olderRoot4]uint32
	Root6        [1 << root6Bits]uint32
	Slot         [1 << 18]uint32
	Displacement [1 << 17]uint16
	BucketShift  uint32
	SlotMask     uint32
}

func (t *olderIndex) slotOf(key uint32) uint32 {
	h := uint64(key) * 0x9E3779B97F4A7C15
	h ^= h >> 29
	h *= 0xBF58476D1CE4E5B9
	h ^= h >> 32
	displacement := uint32(t.Displacement[h>>t.BucketShift])
	return (uint32(h) + displacement*(uint32(h>>20)|1)) & t.SlotMask
}

func isOlder(m Maps) bool {
	return m.Head != nil && m.Head.ValueSize() == uint32(unsafe.Sizeof(olderHead{}))
}

// older is such a table, open for reading.
type older struct {
	*olderHead
	index [2]*olderIndex
	pages memory // of which only the pages are there
}

// openOlder returns a copy of an older table, in this layout.
func openOlder(maps Maps) (*memory, error) {
	raw := &memory{}
	defer raw.unmap()
	for _, want := range []struct{ what, is uint32 }{
		{uint32(unsafe.Sizeof(olderIndex{})), maps.Index.ValueSize()}, {2, maps.Index.MaxEntries()},
		{segmentBytes + slackBytes, maps.Pages.ValueSize()},
	} {
		if want.what != want.is {
			return nil, fmt.Errorf("%w: %v, %v", ErrLayout, maps.Index, maps.Pages)
		}
	}
	if err := raw.mapAll(maps, false); err != nil {
		return nil, err
	}
	o := olderOf(raw.maps)
	began := atomic.LoadUint32(&o.Reused)
	if o.Magic != olderMagic {
		return nil, fmt.Errorf("%w: it says %#x, want %#x", ErrLayout, o.Magic, olderMagic)
	}
	ps4, ps6 := o.prefixes()
	now := o.Reused
	var err error
	if len(raw.mapped) == 0 { // the head was copied first
		now, err = wordOf(maps.Head, unsafe.Offsetof(olderHead{}.Reused))
	}
	if err != nil || now != began {
		return nil, err
	}
	m := newMemory(maxSegments)
	return m, m.replace(sortPrefixes(ps4), sortPrefixes(ps6))
}

func olderOf(maps [][]byte) *older {
	o := &older{olderHead: (*olderHead)(unsafe.Pointer(&maps[0][0]))}
	for i := range o.index {
		o.index[i] = (*olderIndex)(unsafe.Pointer(&maps[1][uintptr(i)*unsafe.Sizeof(olderIndex{})]))
	}
	o.pages.pages = maps[2]
	return o
}

// prefixes are those that the table has.
func (o *older) prefixes() (ps4, ps6 []prefix) {
	add4 := func(p prefix) bool { ps4 = append(ps4, p); return true }
	add6 := func(p prefix) bool { ps6 = append(ps6, p); return true }
	in4, in6 := o.Active&1, o.Active>>1&1
	walkShort(o.Short4[in4][:], add4)
	for g, e := range o.index[in4].Root4 {
		o.walk(e, prefix{hi: uint64(g) << (64 - olderRoot4)}, add4)
	}
	walkShort(o.Short6[in6][:], add6)
	t := o.index[in6]
	for g, e := range t.Root6 {
		o.walk(e, prefix{hi: uint64(g) << (64 - root6Bits)}, add6)
	}
	for s, e := range t.Slot {
		// A slot that its key moved from may lead to what the key was then.
		if e != 0 && uint32(s) <= t.SlotMask && t.slotOf(*o.pages.word(of(e), 1)) == uint32(s) {
			o.walk(e, prefix{hi: uint64(*o.pages.word(of(e), 1)) << 32}, add6)
		}
	}
	return ps4, ps6
}

// walk yields the prefixes of a page and those below it. base has the address bits above its slice.
func (o *older) walk(entry uint32, base prefix, yield func(prefix) bool) {
	o.descend(entry, base, yield, mostDeep)
}

// descend looks at so many pages below each other at most: where an older weir writes meanwhile, an entry may lead
// anywhere.
func (o *older) descend(entry uint32, base prefix, yield func(prefix) bool, most int) {
	number := of(entry)
	if !isPage(entry) || most == 0 || number >= o.pages.limit() {
		return
	}
	word := func(i uint32) uint32 { return *o.pages.word(number, i) }
	h, tell := word(0), func(p prefix, value uint32) { p.value = value; yield(p) }
	slice, bits, wide := uint8(h>>4&7), width(1), true
	if slice == 0 { // IPv4's last 15 bits
		bits, wide = olderWidth4, false
	}
	switch k := h & 7; {
	case h&olderFan != 0:
		o.descend(word(3), base, yield, most-1)
		for x := range min(uint32(1)<<word(2), 2*(o.pages.limit()-number)) {
			below := base
			if uint8(word(2)) == bits {
				below.put(slice, x)
			}
			o.descend(word(fanHead+x), below, yield, most-1)
		}
	case h&olderList != 0:
		for i := range k {
			at := 2 + 4*i
			tell(prefix{hi: base.hi, lo: uint64(word(at)) | uint64(word(at+1))<<32, len: uint8(128 - word(at+2))}, word(at+3))
		}
	default:
		before := item{start: 1 << 16}
		for i := range 4 * k {
			e := word(2 + 2*k + i)
			it := item{uint32(*(*uint16)(unsafe.Add(o.pages.at(number), 8+2*uintptr(i)))), wildcard(e), e &^ itemBits}
			if wide {
				it.start = o.pages.start(number, i)
			}
			if it == before {
				break // the last one is repeated
			}
			before = it
			p := base
			p.put(slice, it.start)
			p.len = endOf(slice) - it.shift
			if !isPage(e) {
				tell(p, of(e))
				continue
			}
			if of(e) >= o.pages.limit() {
				return
			}
			below := *o.pages.word(of(e), 0)
			if below&olderOwnValue != 0 {
				tell(p, of(below))
			}
			if below>>4&7 == h>>4&7 { // part of the same slice
				p = base
			}
			o.descend(e, p, yield, most-1)
		}
	}
}
