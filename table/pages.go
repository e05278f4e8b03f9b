// SPDX-License-Identifier: Apache-2.0

package table

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// Pages are allocated in units of 8 bytes, from lists of free pages by size, else from the end. A
// page removed from the table goes to limbo first, because programs may be reading it. Its memory
// is reused after an RCU grace period. By then every program running at the start of the period has
// ended.

const maxUnits = 22

// maxVacated limits the slots searched by each removal of a key.
const maxVacated = 256

// at returns the address of a page's memory.
func (m *memory) at(number uint32) unsafe.Pointer { return unsafe.Pointer(&m.pages[physical(number)]) }

// physical returns the byte offset of a page in the mapped segments.
func physical(number uint32) int {
	o := int(number) << 3
	return o/segmentBytes*(segmentBytes+slackBytes) + o%segmentBytes
}

func (m *memory) word(number, i uint32) *uint32 {
	return (*uint32)(unsafe.Add(m.at(number), 4*uintptr(i)))
}

func (m *memory) words(number, first, n uint32) []uint32 {
	return unsafe.Slice(m.word(number, first), n)
}

// limit returns the first number behind all pages.
func (m *memory) limit() uint32 {
	return uint32(len(m.pages) / (segmentBytes + slackBytes) * (segmentBytes / 8))
}

// alloc returns memory of a number of units.
func (m *memory) alloc(units uint32) (uint32, error) {
	number := m.pop(units)
	if number == 0 && units < 8 { // leftovers of page alignment
		number = m.split(units, 7)
	}
	if number == 0 {
		number = m.extend(units)
	}
	if number == 0 && m.InLimbo > 0 {
		m.grace()
		number = m.pop(units)
	}
	if number == 0 {
		number = m.split(units, maxUnits)
	}
	if number == 0 && m.breakFan() {
		return m.alloc(units)
	}
	if number == 0 {
		return 0, m.full()
	}
	m.Pages++
	m.Units += units
	return number, nil
}

func (m *memory) full() error {
	return fmt.Errorf("%w: %d prefixes use all %d MiB", ErrFull, m.Count[0]+m.Count[1], len(m.pages)/segmentBytes)
}

func (m *memory) pop(units uint32) uint32 {
	number := m.Free[units]
	if number != 0 {
		m.Free[units] = *m.word(number, 0)
	}
	return number
}

func (m *memory) push(number, units uint32) {
	*m.word(number, 0) = m.Free[units]
	m.Free[units] = number
}

// split takes memory from the smallest larger free page, up to a size.
func (m *memory) split(units, most uint32) uint32 {
	for size := units + 1; size <= most; size++ {
		if number := m.pop(size); number != 0 {
			m.push(number+units, size-units)
			return number
		}
	}
	return 0
}

// extend allocates never used memory. A page spans as few cache lines as its size allows, and never
// two pages of virtual memory. extend returns 0 when all memory is used.
func (m *memory) extend(units uint32) uint32 {
	for _, line := range []int{64, 4096} {
		span := int(units) * 8
		if line == 64 {
			span = (span + 63) &^ 63
		} else {
			span = line
		}
		if r := physical(m.Next) & (line - 1); r+int(units)*8 > span {
			m.release(m.Next, uint32(line-r)/8)
			m.Next += uint32(line-r) / 8
		}
	}
	if end := m.Next + units; end > m.limit() || end < m.Next {
		return 0
	}
	number := m.Next
	m.Next += units
	return number
}

// release adds memory to the free pages.
func (m *memory) release(number, units uint32) {
	for ; units > 0 && number < m.limit(); number, units = number+min(units, maxUnits), units-min(units, maxUnits) {
		m.push(number, min(units, maxUnits, m.limit()-number))
	}
}

// retire queues a page for limbo. It leaves the table when the current change is published.
func (m *memory) retire(number uint32) {
	m.Pages--
	m.Units -= m.pageUnits(number)
	m.retired = append(m.retired, number)
}

// retireToLimbo moves the pages retired by the published change to limbo.
func (m *memory) retireToLimbo() {
	if int(m.InLimbo)+len(m.retired) > limboPages || len(m.vacated) > maxVacated {
		m.grace()
		for _, number := range m.retired {
			m.giveBack(number)
		}
	} else {
		m.InLimbo += uint32(copy(m.Limbo[m.InLimbo:], m.retired))
	}
	m.retired = m.retired[:0]
}

// pageUnits returns the size of a page in units.
func (m *memory) pageUnits(number uint32) uint32 {
	h := *m.word(number, 0)
	switch h & kindBits {
	case fanPage:
		return fanUnits(uint8(*m.word(number, 2)))
	case listPage:
		return 1 + 2**m.word(number, 1)
	}
	return itemUnits(h & kindBits)
}

// free releases pages without possible readers.
func (m *memory) free(entry uint32) {
	if !isPage(entry) {
		return
	}
	number := of(entry)
	if m.isFan(number) {
		f := m.fanAt(number)
		m.free(*f.shadow)
		for _, e := range f.entries {
			m.free(e)
		}
	} else if *m.word(number, 0)&kindBits != listPage {
		n := m.decode(number)
		for _, it := range n.items {
			m.free(it.entry)
		}
	}
	m.Pages--
	m.Units -= m.pageUnits(number)
	m.giveBack(number)
}

// giveBack adds a page's memory to the lists.
func (m *memory) giveBack(number uint32) {
	if m.isFan(number) {
		bits := *m.word(number, 2)
		*m.word(number, 0), m.FreeFan[bits] = m.FreeFan[bits], number
		return
	}
	m.push(number, m.pageUnits(number))
}

// grace waits for a grace period and frees the pages in limbo.
func (m *memory) grace() {
	m.wait()
	m.clearVacated()
	atomic.AddUint32(&m.Reused, 1)
	for _, number := range m.Limbo[:m.InLimbo] {
		m.giveBack(number)
	}
	m.InLimbo = 0
}
