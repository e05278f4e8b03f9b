// SPDX-License-Identifier: Apache-2.0

package table

import (
	"math/bits"
	"sync/atomic"
)

// A fan replaces a page with too many items. It is an array indexed by the next bits of the
// address, like a root. An entry is a value, or a page for the remaining bits. Prefixes ending
// within the fan's bits are in separate pages, the shadow. No lookup reads the shadow, because the
// entries have its values.

const (
	// fanShare limits the entries per item of a fan without pages below.
	fanShare = 8
	// fanItems is the intended number of items per page below a fan.
	fanItems = 12
	fanHead  = 4 // words before the entries: head, tag, number of bits, shadow
)

func (m *memory) isFan(number uint32) bool { return *m.word(number, 0)&kindBits == fanPage }

// fan is the memory of a fan.
type fan struct {
	slice   uint8
	bits    uint8
	tag     uint32
	shadow  *uint32
	entries []uint32
}

func (m *memory) fanAt(number uint32) fan {
	f := fan{slice: headSlice(*m.word(number, 0)), tag: *m.word(number, 1), bits: uint8(*m.word(number, 2)), shadow: m.word(number, 3)}
	f.entries = m.words(number, fanHead, 1<<f.bits)
	return f
}

func (f *fan) shift() uint8 { return width(f.slice) - f.bits }

// below returns the slice of the pages below the entries.
func (f *fan) below() uint8 {
	if f.shift() == 0 {
		return f.slice + 1
	}
	return f.slice
}

// bitsFor returns the number of bits of a fan for these items, or 0 if a page is better. Neighbours
// of one length end in the fan, so it finds them alone. Scattered items would leave most of such an
// array empty. They get fewer bits, and a few items share a page.
func bitsFor(items []item, slice uint8) uint8 {
	if len(items) <= maxItems {
		return 0
	}
	least := width(slice)
	for _, it := range items {
		least = min(least, it.shift)
	}
	if whole := width(slice) - least; 1<<whole <= len(items)*fanShare {
		return whole
	}
	return min(width(slice)-least, uint8(bits.Len(uint(len(items)-1)/fanItems)))
}

// fanUnits returns the size of a fan in units of 8 bytes.
func fanUnits(bits uint8) uint32 { return fanHead/2 + 1<<bits/2 }

// makeFan writes the items of a page as a fan.
func (m *memory) makeFan(n *node, bits uint8) (uint32, error) {
	number, err := m.allocFan(bits)
	if err != nil {
		return 0, err
	}
	*m.word(number, 0) = valueEntry(n.value) | n.flags() | fanPage
	*m.word(number, 1), *m.word(number, 2), *m.word(number, 3) = n.tag, uint32(bits), valueEntry(n.value)
	f := m.fanAt(number)
	var short []item
	for _, it := range n.items {
		if it.shift < f.shift() {
			continue
		}
		if isPage(it.entry) { // a page of the next slice, with or without a prefix of exactly these bits
			h := *m.word(of(it.entry), 0)
			if h&ownValue == 0 {
				continue
			}
			it.entry = valueEntry(of(h))
		}
		short = append(short, it)
	}
	if len(short) > 0 {
		if *f.shadow, err = m.fit(&node{value: n.value, slice: n.slice, tag: n.tag, items: short}); err != nil {
			return 0, err
		}
	}
	for i := 0; i < len(f.entries); i++ {
		f.entries[i] = valueEntry(m.shadowValue(&f, uint32(i)))
	}
	for i := 0; i < len(n.items); {
		x := n.items[i].start >> f.shift()
		j, longer := i, []item(nil)
		for ; j < len(n.items) && n.items[j].start>>f.shift() == x; j++ {
			if it := n.items[j]; it.shift < f.shift() {
				longer = append(longer, it)
			} else if isPage(it.entry) {
				m.inherit(it.entry, of(f.entries[x]), false)
				f.entries[x] = it.entry
			}
		}
		if len(longer) > 0 {
			if f.entries[x], err = m.fit(&node{value: of(f.entries[x]), slice: n.slice, tag: n.tag, items: longer}); err != nil {
				return 0, err
			}
		}
		i = j
	}
	return pageEntryFor(number), nil
}

// shadowValue returns the value in force at an entry of a fan.
func (m *memory) shadowValue(f *fan, x uint32) uint32 {
	entry := *f.shadow
	for isPage(entry) {
		entry = m.find(of(entry), x<<f.shift())
	}
	return of(entry)
}

// inShadow reports whether exactly the bits of a fan's entry are a prefix.
func (m *memory) inShadow(f *fan, x uint32) bool {
	entry, found := *f.shadow, false
	for isPage(entry) {
		n := m.decode(of(entry))
		entry = 0
		for _, it := range n.items {
			if it.start == x<<f.shift() && it.shift == f.shift() {
				found = !isPage(it.entry) || *m.word(of(it.entry), 0)&ownValue != 0
			}
			if it.covers(x<<f.shift()) && isPage(it.entry) {
				entry = it.entry
			}
		}
	}
	return found
}

// find searches a page for 16 bits of an address.
func (m *memory) find(number, x uint32) uint32 {
	h := atomic.LoadUint32(m.word(number, 0))
	n := h & kindBits
	for i := n; i > 0; i-- { // the last covering item is the longest
		e := atomic.LoadUint32(m.entryAt(number, n, i-1))
		if (x^m.start(number, i-1))>>wildcard(e) == 0 {
			return e &^ itemBits
		}
	}
	return valueEntry(of(h))
}

// editFan carries out a change in a fan. The fan stays one until it is empty.
func (m *memory) editFan(entry uint32, c *change) (uint32, error) {
	number := of(entry)
	f := m.fanAt(number)
	x := c.part(f.slice)
	if end := sliceEnd(f.slice) - f.shift(); c.len > end {
		at := &f.entries[x>>f.shift()]
		c.tag = f.tag
		e, err := m.edit(*at, f.below(), c)
		if err != nil || e == *at {
			return entry, err
		}
		atomic.StoreUint32(at, e)
		return m.foldFan(entry, &f), nil
	}
	e, err := m.editShadow(&f, c)
	if err != nil {
		return entry, err
	}
	*f.shadow = e
	first := x >> f.shift()
	for i := range uint32(1) << (sliceEnd(f.slice) - f.shift() - c.len) {
		m.restore(&f.entries[first+i], m.shadowValue(&f, first+i))
	}
	return m.foldFan(entry, &f), nil
}

// editShadow carries out a change of a prefix ending within a fan's bits. Lookups search the shadow
// by 16 bits, so its first page must not be a list.
func (m *memory) editShadow(f *fan, c *change) (uint32, error) {
	if isPage(*f.shadow) || c.remove {
		return m.edit(*f.shadow, f.slice, c)
	}
	return m.emit(&node{value: of(*f.shadow), slice: f.slice, tag: f.tag,
		items: []item{{c.part(f.slice), sliceEnd(f.slice) - c.len, valueEntry(c.value)}}})
}

// foldFan replaces an empty fan by its value.
func (m *memory) foldFan(entry uint32, f *fan) uint32 {
	if isPage(*f.shadow) {
		return entry
	}
	for _, e := range f.entries {
		if isPage(e) {
			return entry
		}
	}
	m.retire(of(entry))
	return valueEntry(of(*m.word(of(entry), 0)))
}

// inheritFan gives the entries of a fan the values in force there.
func (m *memory) inheritFan(number uint32) {
	f := m.fanAt(number)
	m.restore(f.shadow, of(*m.word(number, 0)))
	for i := range f.entries {
		m.restore(&f.entries[i], m.shadowValue(&f, uint32(i)))
	}
}

// allocFan returns memory for a fan, all in one segment.
func (m *memory) allocFan(bits uint8) (uint32, error) {
	units := fanUnits(bits)
	number := m.FreeFan[bits]
	if number != 0 {
		m.FreeFan[bits] = *m.word(number, 0)
	} else if number = m.extendFan(units); number == 0 {
		return 0, m.full()
	}
	m.Pages++
	m.Units += units
	return number, nil
}

func (m *memory) extendFan(units uint32) uint32 {
	start := (m.Next + 7) &^ 7
	const segment = segmentBytes / 8
	if start/segment != (start+units-1)/segment {
		start = (start/segment + 1) * segment
	}
	if start+units > m.limit() {
		return 0
	}
	m.release(m.Next, start-m.Next)
	m.Next = start + units
	return start
}

// breakFan releases the memory of a free fan for pages.
func (m *memory) breakFan() bool {
	for bits, number := range m.FreeFan {
		if number != 0 {
			m.FreeFan[bits] = *m.word(number, 0)
			m.release(number, fanUnits(uint8(bits)))
			return true
		}
	}
	return false
}
