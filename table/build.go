// SPDX-License-Identifier: Apache-2.0

package table

import "sort"

// build writes the pages for prefixes sharing all bits above a slice. The prefixes are longer than
// these bits and sorted by address, shorter ones first. value is the value of the shorter prefix
// above. own reports whether that prefix has exactly these bits. build returns the entry leading to
// the page.
func (m *memory) build(ps []prefix, slice uint8, value uint32, own bool, tag uint32) (uint32, error) {
	n := node{value: value, own: own, slice: slice, tag: tag}
	if slice == 4 && len(ps) <= maxList {
		n.list = append(make([]prefix, 0, len(ps)), ps...)
		return m.emit(&n)
	}
	end := sliceEnd(slice)
	n.items = make([]item, 0, len(ps))
	var open [18]item // the prefixes enclosing the current one
	depth := 0
	for i := 0; i < len(ps); {
		p := &ps[i]
		x := p.part(slice)
		for depth > 0 && !open[depth-1].covers(x) {
			depth--
		}
		if p.len <= end {
			it := item{x, end - p.len, valueEntry(p.value)}
			n.items = append(n.items, it)
			open[depth] = it
			depth++
			i++
			continue
		}
		j := i + 1
		for j < len(ps) && ps[j].part(slice) == x {
			j++
		}
		above := value
		if depth > 0 {
			above = of(open[depth-1].entry)
		}
		last := len(n.items) - 1
		exact := last >= 0 && n.items[last].start == x && n.items[last].shift == 0
		e, err := m.build(ps[i:j], slice+1, above, exact, tag)
		if err != nil {
			return 0, err
		}
		if exact {
			n.items[last].entry = e
		} else {
			n.items = append(n.items, item{x, 0, e})
		}
		i = j
	}
	if bits := bitsFor(n.items, slice); bits > 0 {
		return m.makeFan(&n, bits)
	}
	return m.fit(&n)
}

// fit writes a page of any number of items. It moves the excess to pages below.
func (m *memory) fit(n *node) (uint32, error) {
	if n.list == nil && len(n.items) > maxItems {
		items, err := m.carve(n.items, item{0, width(n.slice), valueEntry(n.value)}, n)
		if err != nil {
			return 0, err
		}
		n.items = items
	}
	return m.emit(n)
}

// carve reduces the items within a region to at most maxItems. It moves halves, quarters and so on
// to pages of their own. region.entry is the value in force in the region.
func (m *memory) carve(items []item, region item, n *node) ([]item, error) {
	if len(items) <= maxItems {
		return items, nil
	}
	var out []item
	inner := region
	if items[0].start == region.start && items[0].shift == region.shift {
		out, inner.entry, items = append(out, items[0]), items[0].entry, items[1:]
	}
	half := region.shift - 1
	middle := region.start | 1<<half
	at := sort.Search(len(items), func(i int) bool { return items[i].start >= middle })
	sides := [2]item{{region.start, half, inner.entry}, {middle, half, inner.entry}}
	parts := [2][]item{items[:at], items[at:]}
	for i := range parts {
		var err error
		if parts[i], err = m.carve(parts[i], sides[i], n); err != nil {
			return nil, err
		}
	}
	for len(out)+len(parts[0])+len(parts[1]) > maxItems {
		larger := 0
		if len(parts[1]) > len(parts[0]) {
			larger = 1
		}
		moved, err := m.move(parts[larger], sides[larger], n)
		if err != nil {
			return nil, err
		}
		parts[larger] = []item{moved}
	}
	return append(append(out, parts[0]...), parts[1]...), nil
}

// move writes the items of a region to a page of their own. It returns the item leading there.
func (m *memory) move(items []item, region item, n *node) (item, error) {
	below := node{value: of(region.entry), slice: n.slice, tag: n.tag}
	if items[0].start == region.start && items[0].shift == region.shift {
		below.value, below.own, items = of(items[0].entry), true, items[1:]
	}
	below.items = items
	e, err := m.emit(&below)
	return item{region.start, region.shift, e}, err
}
