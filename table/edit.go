// SPDX-License-Identifier: Apache-2.0

package table

import (
	"slices"
	"sync/atomic"
)

// A change rewrites the page whose items change, and is published by the store of one entry: in the page above, or in
// the index. Pages below that inherit another value than before get it in place, one after the other: for a moment the
// change may hold for some addresses and not yet for others, but for each of them it holds or does not.

// change is what edit is asked for: set a prefix, or remove it.
type change struct {
	prefix
	remove bool
	tag    uint32 // of pages that are made
	found  bool   // it was there
}

// edit carries a change out below an entry, which leads to a page of a slice or is the value in force, and returns the
// entry that is to replace it: the same if everything was done below.
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

// editBelow carries a change out in the page that an item leads to.
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

// editItem changes or removes the item of exactly the prefix.
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

// deepen adds a prefix that is longer than the page can tell, where no page is below it yet.
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

// above is the value of what encloses an item.
func (n *node) above(i int) uint32 {
	for j := i - 1; j >= 0; j-- {
		if o := n.items[j]; o.shift > n.items[i].shift && o.covers(n.items[i].start) {
			return of(o.entry) // a value: nothing else of the page lies below a page
		}
	}
	return n.value
}

// editList carries a change out in a list.
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
		n.list[i].hi = c.hi // which a list does not keep
	}
	slices.SortFunc(n.list, comparePrefixes)
	e, err := m.build(n.list, n.slice, n.value, n.own, n.tag)
	if err == nil {
		m.retire(of(entry))
	}
	return e, err
}

// rewrite writes a page anew, and has the pages below inherit from it. A page that has nothing more to tell than a value
// becomes that.
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
	m.inheritAll(n) // nothing can fail from here on
	m.retire(of(entry))
	return e, nil
}

// inherit gives a page the value in force above it, or one of its own, and the pages below it theirs. It is stored in
// place: no reader looks at more than one of them.
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

// inheritAll gives every page that a page leads to the value in force there.
func (m *memory) inheritAll(n *node) {
	for i, it := range n.items {
		if isPage(it.entry) && *m.word(of(it.entry), 0)&ownValue == 0 {
			m.inherit(it.entry, n.above(i), false)
		}
	}
}
