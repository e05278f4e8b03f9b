// SPDX-License-Identifier: Apache-2.0

package table

// repair rebuilds derived data from the prefixes and frees unused memory. It runs after an
// interrupted change or a failed allocation. Published pages are whole. Only inherited values of
// pages and roots, and unreferenced memory, can be wrong.
func (m *memory) repair() {
	m.wait()
	t := m.index[m.active6()]
	m.retired, m.buckets, m.InLimbo = m.retired[:0], nil, 0
	m.clearVacated()
	m.Free, m.FreeFan, m.Pages, m.Units, m.Groups, m.Count = [maxUnits + 1]uint32{}, [17]uint32{}, 0, 0, 0, [2]uint32{}
	m.Reused++
	for s, e := range t.Slot {
		if e != 0 && (uint32(s) >= t.Slots || t.find(*m.word(of(e), 1)) != uint32(s)) {
			t.Slot[s] = 0 // its key moved away
		}
	}
	for g := range m.index[m.active4()].Root4 {
		m.restore(&m.index[m.active4()].Root4[g], shortValue(m.Short4[m.active4()][:], uint32(1<<root4Bits+g)))
	}
	for g := range t.Root6 {
		m.restore(&t.Root6[g], shortValue(m.Short6[m.active6()][:], uint32(1<<root6Bits+g)))
	}
	used := make([]uint16, m.limit()) // the size of the page beginning there, in units
	for _, e := range m.index[m.active4()].Root4 {
		m.mark(e, used)
	}
	for _, e := range t.Root6 {
		m.mark(e, used)
	}
	for _, e := range t.Slot {
		if e != 0 {
			m.Groups++
			m.inheritGroup(t, e)
			m.mark(e, used)
		}
	}
	m.reclaim(used)
	m.walk4(func(prefix) bool { m.Count[0]++; return true })
	m.walk6(func(prefix) bool { m.Count[1]++; return true })
	m.Writing = 0
}

// mark records the pages below an entry and corrects their inherited values.
func (m *memory) mark(entry uint32, used []uint16) {
	if !isPage(entry) || used[of(entry)] != 0 {
		return
	}
	units := m.pageUnits(of(entry))
	used[of(entry)] = uint16(units)
	m.Pages++
	m.Units += units
	if m.isFan(of(entry)) {
		m.inheritFan(of(entry))
		f := m.fanAt(of(entry))
		m.mark(*f.shadow, used)
		for _, e := range f.entries {
			m.mark(e, used)
		}
		return
	}
	n := m.decode(of(entry))
	m.inheritAll(&n)
	for _, it := range n.items {
		m.mark(it.entry, used)
	}
}

// reclaim frees the memory between pages.
func (m *memory) reclaim(used []uint16) {
	end := uint32(firstPage)
	for number := end; number < uint32(len(used)); number++ {
		if used[number] != 0 {
			m.release(end, number-end)
			end = number + uint32(used[number])
			number = end - 1
		}
	}
	m.Next = end
}
