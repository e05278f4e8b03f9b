// SPDX-License-Identifier: Apache-2.0

package table

import (
	"slices"
	"sync/atomic"
)

// A change rewrites the page of the changed items. The store of one entry, in the page above or in
// the index, publishes it. Pages below with a newly inherited value get it in place, one after the
// other. Meanwhile the change may apply to some addresses and not yet to others. For each single
// address it applies or does not.

// change is a request to edit: set a prefix, or remove it.
type change struct {
	prefix
	remove bool
	tag    uint32 // of new pages
	found  bool   // the prefix existed
}

// edit carries out a change below an entry. The entry leads to a page of the slice or is the value
// in force. edit returns the replacement of the entry, or the same entry if all changes were made
// below.
func (m *memory) edit(entry uint32, slice uint8, c *change) (uint32, error) {
	if !isPage(entry) {
		if c.remove {
			return entry, nil
		}
		return m.build([]prefix{c.prefix}, slice, of(entry), false, c.tag)
	}
	if m.isFan(of(entry)) {
		return m.editFan(entry, c)
	}
	n := m.decode(of(entry))
	if n.list != nil {
		return m.editList(entry, &n, c)
	}
	end, x := sliceEnd(n.slice), c.part(n.slice)
	for i, it := range n.items {
		if !isPage(it.entry) || !it.covers(x) || c.len <= end-it.shift {
			continue
		}
		return m.editBelow(entry, &n, i, c)
	}
	if c.len > end {
		if c.remove {
			return entry, nil
		}
		return m.deepen(entry, &n, x, c)
	}
	i, exact := slices.BinarySearchFunc(n.items, c, func(it item, c *change) int { return it.compare(x, end-c.len) })
	switch {
	case exact:
		return m.editItem(entry, &n, i, c)
	case c.remove:
		return entry, nil
	}
	n.items = slices.Insert(n.items, i, item{x, end - c.len, valueEntry(c.value)})
	return m.rewrite(entry, &n)
}

// editBelow carries out a change in the page of an item.
func (m *memory) editBelow(entry uint32, n *node, i int, c *change) (uint32, error) {
	below := n.items[i].entry
	own := *m.word(of(below), 0)&ownValue != 0
	e, err := m.edit(below, n.slice, c)
	switch {
	case err != nil, e == below:
		return entry, err
	case isPage(e):
		m.point(of(entry), i, e)
		return entry, nil
	case own: // the page is gone, its value stays
		n.items[i].entry = e
	default:
		n.items = slices.Delete(n.items, i, i+1)
	}
	return m.rewrite(entry, n)
}

// editItem changes or removes the item of exactly this prefix.
func (m *memory) editItem(entry uint32, n *node, i int, c *change) (uint32, error) {
	it := &n.items[i]
	if !isPage(it.entry) {
		c.found = true
		if c.remove {
			n.items = slices.Delete(n.items, i, i+1)
			return m.rewrite(entry, n)
		}
		if it.entry == valueEntry(c.value) {
			return entry, nil
		}
		leadsOn := slices.ContainsFunc(n.items[i+1:], func(o item) bool { return isPage(o.entry) && it.covers(o.start) })
		it.entry = valueEntry(c.value)
		if leadsOn {
			return m.rewrite(entry, n)
		}
		m.point(of(entry), i, it.entry)
		return entry, nil
	}
	c.found = *m.word(of(it.entry), 0)&ownValue != 0
	if c.remove && !c.found {
		return entry, nil
	}
	value := c.value
	if c.remove {
		value = n.above(i)
	}
	m.inherit(it.entry, value, !c.remove)
	return entry, nil
}

// deepen adds a prefix too long for the page, at a position without a page below.
func (m *memory) deepen(entry uint32, n *node, x uint32, c *change) (uint32, error) {
	i, exact := slices.BinarySearchFunc(n.items, c, func(it item, _ *change) int { return it.compare(x, 0) })
	if exact {
		e, err := m.build([]prefix{c.prefix}, n.slice+1, of(n.items[i].entry), true, n.tag)
		if err == nil {
			m.point(of(entry), i, e)
		}
		return entry, err
	}
	n.items = slices.Insert(n.items, i, item{x, 0, 0})
	e, err := m.build([]prefix{c.prefix}, n.slice+1, n.above(i), false, n.tag)
	if err != nil {
		return entry, err
	}
	n.items[i].entry = e
	return m.rewrite(entry, n)
}

// above returns the value of the item enclosing item i, or the page's own.
func (n *node) above(i int) uint32 {
	for j := i - 1; j >= 0; j-- {
		if o := n.items[j]; o.shift > n.items[i].shift && o.covers(n.items[i].start) {
			return of(o.entry) // a value: items of one page do not lie below another page
		}
	}
	return n.value
}

// editList carries out a change in a list.
func (m *memory) editList(entry uint32, n *node, c *change) (uint32, error) {
	i := slices.IndexFunc(n.list, func(p prefix) bool { return p.len == c.len && p.lo == c.lo })
	c.found = i >= 0
	switch {
	case i < 0 && c.remove, i >= 0 && !c.remove && n.list[i].value == c.value:
		return entry, nil
	case i < 0:
		n.list = append(n.list, c.prefix)
	case c.remove:
		n.list = slices.Delete(n.list, i, i+1)
	default:
		n.list[i].value = c.value
	}
	if len(n.list) <= maxList {
		return m.rewrite(entry, n)
	}
	for i := range n.list {
		n.list[i].hi = c.hi // lists do not store it
	}
	slices.SortFunc(n.list, comparePrefixes)
	e, err := m.build(n.list, n.slice, n.value, n.own, n.tag)
	if err == nil {
		m.retire(of(entry))
	}
	return e, err
}

// rewrite writes a page anew. The pages below then inherit from it. A page without items becomes a
// value.
func (m *memory) rewrite(entry uint32, n *node) (uint32, error) {
	e := valueEntry(n.value)
	if len(n.items)+len(n.list) > 0 {
		var err error
		items := n.items
		if e, err = m.fit(n); err != nil {
			return entry, err
		}
		n.items = items
	}
	m.inheritAll(n) // nothing fails after this point
	m.retire(of(entry))
	return e, nil
}

// inherit gives a page the value in force above it, or a value of its own. It then updates the
// pages below. The stores are in place, because a reader reads only one of these values.
func (m *memory) inherit(entry, value uint32, own bool) {
	head := m.word(of(entry), 0)
	h := *head&(itemBits&^ownValue) | valueEntry(value)
	if own {
		h |= ownValue
	}
	if h == *head {
		return
	}
	atomic.StoreUint32(head, h)
	if m.isFan(of(entry)) {
		m.inheritFan(of(entry))
		return
	}
	n := m.decode(of(entry))
	m.inheritAll(&n)
}

// inheritAll gives every page below a page the value in force there.
func (m *memory) inheritAll(n *node) {
	for i, it := range n.items {
		if isPage(it.entry) && *m.word(of(it.entry), 0)&ownValue == 0 {
			m.inherit(it.entry, n.above(i), false)
		}
	}
}
