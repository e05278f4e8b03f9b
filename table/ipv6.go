// SPDX-License-Identifier: Apache-2.0

package table

import "sync/atomic"

// IPv6: head.Short6 keeps prefixes up to /16, and the root has their values. Prefixes up to /32 are
// in pages below the root. Longer ones, and /32s, form one group per 32 bits. The hash leads to a
// group's page. A group without a slot in the hash lies below the root's pages.

func (m *memory) active6() int { return int(m.Active >> 1 & 1) }

// set6 carries out a change.
func (m *memory) set6(c *change) error {
	if c.len > 32 {
		return m.setLong(c)
	}
	t := m.index[m.active6()]
	if c.len <= root6Bits {
		short := m.Short6[m.active6()][:]
		if !setShort(short, c) {
			return nil
		}
		m.spread(short, t.Root6[:], root6Bits, c)
		m.inheritGroups(c)
		return nil
	}
	if err := m.editRoot(t, c); err != nil {
		return err
	}
	if c.remove && !c.found {
		return nil
	}
	if c.len == 32 {
		return m.setGroup(c)
	}
	m.inheritGroups(c)
	return nil
}

func (m *memory) editRoot(t *index, c *change) error {
	g := uint32(c.hi >> (64 - root6Bits))
	e, err := m.edit(t.Root6[g], 1, c)
	if err == nil && e != t.Root6[g] {
		atomic.StoreUint32(&t.Root6[g], e)
	}
	return err
}

// setLong carries out a change of a prefix longer than 32 bits.
func (m *memory) setLong(c *change) error {
	key := uint32(c.hi >> 32)
	c.tag = key
	t := m.index[m.active6()]
	old := m.group(t, key)
	if old == 0 {
		value, page, _ := m.below(t, key)
		if page != 0 || c.remove {
			return m.editRoot(t, c)
		}
		e, err := m.build([]prefix{c.prefix}, 2, value, false, key)
		if err != nil {
			return err
		}
		if m.enter(key, e) {
			return nil
		}
		m.free(e) // never published
		return m.editRoot(m.index[m.active6()], c)
	}
	e, err := m.edit(old, 2, c)
	if err != nil || e == old {
		return err
	}
	return m.regroup(t, key, e)
}

// regroup links a key to another page. It removes a group with nothing but a value left, unless the
// /32 itself is a prefix.
func (m *memory) regroup(t *index, key, e uint32) error {
	if !isPage(e) {
		if _, _, own := m.below(t, key); !own {
			m.remove(t, key)
			m.Groups--
			return nil
		}
		var err error
		if e, err = m.emit(&node{value: of(e), slice: 2, tag: key}); err != nil {
			return err
		}
	}
	atomic.StoreUint32(&t.Slot[t.find(key)], e)
	return nil
}

// enter adds a group to the hash and grows the hash if necessary. It returns false if no slot is
// free.
func (m *memory) enter(key, e uint32) bool {
	t := m.index[m.active6()]
	if !t.room(m.Groups) && m.grow() {
		t = m.index[m.active6()]
	}
	if m.Groups >= maxKeys {
		return false
	}
	if !m.insert(t, key, e) {
		if !m.grow() || !m.insert(m.index[m.active6()], key, e) {
			return false
		}
	}
	m.Groups++
	return true
}

// below returns the root's data for the 32 bits of a group: the value in force, and the page of the
// group, if any. own reports whether exactly these bits are a prefix.
func (m *memory) below(t *index, key uint32) (value, page uint32, own bool) {
	e := t.Root6[key>>16]
	for isPage(e) {
		if m.isFan(of(e)) && headSlice(*m.word(of(e), 0)) == 1 {
			f := m.fanAt(of(e))
			x := key & 0xffff >> f.shift()
			if e, value = f.entries[x], m.shadowValue(&f, x); !isPage(e) {
				return value, 0, f.shift() == 0 && m.inShadow(&f, x)
			}
			own = f.shift() == 0 && m.inShadow(&f, x)
			if f.shift() == 0 {
				return value, e, own
			}
			continue
		}
		n := m.decode(of(e))
		value = n.value
		x, next := key&0xffff, uint32(0)
		if n.slice > 1 {
			return value, e, n.own
		}
		own = false
		for _, it := range n.items {
			switch {
			case !it.covers(x):
			case isPage(it.entry):
				next = it.entry
			default:
				value, own = of(it.entry), it.shift == 0
			}
		}
		if next == 0 {
			return value, 0, own
		}
		e = next
	}
	return of(e), 0, false
}

// setGroup applies a change of a /32 to its group: a new value, creation or removal.
func (m *memory) setGroup(c *change) error {
	key := uint32(c.hi >> 32)
	t := m.index[m.active6()]
	value, page, own := m.below(t, key)
	if page != 0 {
		return nil // the group lies below the root and has changed with it
	}
	old := m.group(t, key)
	if old == 0 {
		if !own {
			return nil
		}
		e, err := m.emit(&node{value: value, slice: 2, tag: key})
		if err == nil && !m.enter(key, e) {
			m.free(e) // the root's pages have the value, too
		}
		return err
	}
	m.inherit(old, value, false)
	if !own && *m.word(of(old), 0)&kindBits == 0 { // the group is empty
		m.retire(of(old))
		return m.regroup(t, key, valueEntry(value))
	}
	return nil
}

// inheritGroups gives the groups below a prefix the value now in force for them.
func (m *memory) inheritGroups(c *change) {
	t := m.index[m.active6()]
	first := uint32(c.hi >> 32)
	if 32-c.len <= 10 {
		for i := range uint32(1) << (32 - c.len) {
			if e := m.group(t, first+i); e != 0 {
				m.inheritGroup(t, e)
			}
		}
		return
	}
	for s := range t.Slots {
		if key, ok := m.keyAt(t, s); ok && uint64(key^first)>>(32-c.len) == 0 {
			m.inheritGroup(t, t.Slot[s])
		}
	}
}

func (m *memory) inheritGroup(t *index, e uint32) {
	value, _, _ := m.below(t, *m.word(of(e), 1))
	m.inherit(e, value, false)
}

// fill6 builds an index from sorted prefixes and returns the number of groups in its hash.
func (m *memory) fill6(which int, ps []prefix) (count uint32, err error) {
	t, short := m.index[which], m.Short6[which][:]
	clear(short)
	keys := 0
	var top []prefix
	for i := range ps {
		p := &ps[i]
		if p.len <= root6Bits {
			short[shortIndex(p)] = p.value
		}
		if p.len <= 32 {
			top = append(top, *p)
		}
		if p.len >= 32 && (i == 0 || ps[i-1].len < 32 || ps[i-1].hi>>32 != p.hi>>32) {
			keys++
		}
	}
	if err := m.fillRoot(t.Root6[:], short, root6Bits, 1, top); err != nil {
		return 0, err
	}
	t.shape(keys)
	var groups []group
	var members [][]prefix
	for i := 0; i < len(ps); {
		if ps[i].len < 32 {
			i++
			continue
		}
		j := i + 1
		for j < len(ps) && ps[j].len >= 32 && ps[j].hi>>32 == ps[i].hi>>32 {
			j++
		}
		g, err := m.buildGroup(t, ps[i:j])
		if err != nil {
			return 0, err
		}
		groups, members = append(groups, g), append(members, ps[i:j])
		i = j
	}
	homeless := func(i int) {
		m.free(groups[i].entry)
		for _, p := range members[i] {
			if p.len > 32 && err == nil {
				err = m.editRoot(t, &change{prefix: p, tag: groups[i].key})
			}
		}
		count--
	}
	count = uint32(len(groups))
	for len(groups) > maxKeys {
		homeless(len(groups) - 1)
		groups = groups[:len(groups)-1]
	}
	t.assignGroups(groups, homeless)
	return count, err
}

// buildGroup builds the page of one group.
func (m *memory) buildGroup(t *index, ps []prefix) (g group, err error) {
	g.key = uint32(ps[0].hi >> 32)
	value, _, _ := m.below(t, g.key)
	if ps[0].len == 32 {
		ps = ps[1:]
	}
	if len(ps) == 0 {
		g.entry, err = m.emit(&node{value: value, slice: 2, tag: g.key})
	} else {
		g.entry, err = m.build(ps, 2, value, false, g.key)
	}
	return g, err
}
