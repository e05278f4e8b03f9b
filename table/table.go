// SPDX-License-Identifier: Apache-2.0

package table

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"sync/atomic"
	"unsafe"
)

// Table is a longest-prefix table in three maps. It is not safe for concurrent use, with one
// exception: Lookup may run during a write.
type Table struct {
	m *memory
}

// Entry is a prefix and its value, 1 to MaxValue. IPv4 and IPv6 prefixes are separate:
// ::ffff:0:0/96 covers no IPv4 address.
type Entry struct {
	Prefix netip.Prefix
	Value  uint32
}

// Stats are the contents and the memory of a table.
type Stats struct {
	IPv4, IPv6 int // prefixes
	Pages      int
	PageBytes  int // used by pages
	Capacity   int // available for pages
}

// Open opens a table for writing. New maps become an empty table. If a writer was killed during a
// change, Open completes or undoes the change and frees its leftovers. That takes a few
// milliseconds per 100,000 prefixes.
func Open(maps Maps) (*Table, error) {
	m, err := mapMemory(maps, true)
	if err != nil {
		return nil, err
	}
	switch {
	case m.Magic == 0:
		m.begin()
	case m.Magic != magic:
		m.unmap()
		return nil, fmt.Errorf("%w: its magic is %#x, want %#x", ErrLayout, m.Magic, magic)
	case m.Writing != 0:
		m.repair()
	}
	return &Table{m}, nil
}

// OpenReader opens a table for reading. Read-only map descriptors are enough. With them the table
// is a copy, made at the call.
func OpenReader(maps Maps) (*Table, error) {
	for range maxCopies {
		m, err := mapMemory(maps, false)
		if err != nil {
			return nil, err
		}
		if m.Magic != magic {
			m.unmap()
			return nil, fmt.Errorf("%w: its magic is %#x, want %#x", ErrLayout, m.Magic, magic)
		}
		now := m.Reused
		if len(m.mapped) == 0 { // mapAll copies the head first
			now, err = readWord(maps.Head, unsafe.Offsetof(head{}.Reused))
		}
		if err == nil && now == m.Reused {
			return &Table{m}, nil
		}
		m.unmap()
		if err != nil {
			return nil, err
		}
	}
	return nil, errBusy
}

var errBusy = errors.New("copy table: it changes too fast: try again")

// Close releases the mappings. The caller still owns the maps.
func (t *Table) Close() error {
	if len(t.m.vacated) > 0 {
		t.m.grace()
		t.m.rest()
	}
	t.m.unmap()
	return nil
}

// newPrefix checks a prefix and its value.
func newPrefix(p netip.Prefix, value uint32) (prefix, error) {
	if !p.IsValid() || p.Masked() != p || p.Addr().Is4In6() && p.Bits() > 96 {
		return prefix{}, fmt.Errorf("%w: %s", ErrPrefix, p)
	}
	if value < 1 || value > MaxValue {
		return prefix{}, fmt.Errorf("%w: %d is not between 1 and %d", ErrValue, value, MaxValue)
	}
	out := prefix{len: uint8(p.Bits()), value: value}
	out.hi, out.lo = words(p.Addr())
	return out, nil
}

func words(a netip.Addr) (hi, lo uint64) {
	if a.Is4() {
		b := a.As4()
		return uint64(binary.BigEndian.Uint32(b[:])) << 32, 0
	}
	b := a.As16()
	return binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])
}

// Set adds a prefix or replaces its value.
func (t *Table) Set(p netip.Prefix, value uint32) error {
	q, err := newPrefix(p, value)
	if err != nil {
		return err
	}
	return t.change(p.Addr().Is4(), &change{prefix: q})
}

// Delete removes a prefix and reports whether it existed.
func (t *Table) Delete(p netip.Prefix) (existed bool, err error) {
	q, err := newPrefix(p, 1)
	if err != nil {
		return false, err
	}
	c := &change{prefix: q, remove: true}
	err = t.change(p.Addr().Is4(), c)
	return c.found, err
}

// change carries out one change. A failed change leaves the table as it was.
func (t *Table) change(ipv4 bool, c *change) error {
	m, family := t.m, 1
	if ipv4 {
		family = 0
	}
	atomic.StoreUint32(&m.Writing, 1)
	var err error
	if ipv4 {
		err = m.set4(c)
	} else {
		err = m.set6(c)
	}
	if err != nil {
		m.repair()
		return err
	}
	switch {
	case c.remove && c.found:
		m.Count[family]--
	case !c.remove && !c.found:
		m.Count[family]++
	}
	m.retireToLimbo()
	m.rest()
	return nil
}

// rest ends a change. Only this writer knows the vacated slots. Until they are cleared, Writing
// stays 1, and after a kill the next writer searches for them.
func (m *memory) rest() {
	writing := uint32(0)
	if len(m.vacated) > 0 {
		writing = 1
	}
	atomic.StoreUint32(&m.Writing, writing)
}

// Replace replaces all prefixes at once: a reader sees the old set or the new one. If a prefix
// occurs twice, the last value counts. The old pages stay until the switch, so both sets must fit.
func (t *Table) Replace(entries []Entry) error {
	var families [2][]prefix
	n4 := 0
	for _, e := range entries {
		if e.Prefix.Addr().Is4() {
			n4++
		}
	}
	families[0], families[1] = make([]prefix, 0, n4), make([]prefix, 0, len(entries)-n4)
	for i, e := range entries {
		p, err := newPrefix(e.Prefix, e.Value)
		if err != nil {
			return fmt.Errorf("entry %d: %w", i, err)
		}
		p.order = uint32(i)
		f := 1
		if e.Prefix.Addr().Is4() {
			f = 0
		}
		families[f] = append(families[f], p)
	}
	return t.m.replace(sortPrefixes(families[0]), sortPrefixes(families[1]))
}

func (m *memory) replace(ps4, ps6 []prefix) error {
	atomic.StoreUint32(&m.Writing, 1)
	m.grace() // no reader uses the other indexes any more
	m.buckets = nil
	to4, to6 := 1-m.active4(), 1-m.active6()
	err := m.fill4(to4, ps4)
	var groups uint32
	if err == nil {
		groups, err = m.fill6(to6, ps6)
	}
	if err != nil {
		m.repair()
		if errors.Is(err, ErrFull) { // the counts in the head still describe the old prefixes
			err = fmt.Errorf("%w: %d IPv4 and %d IPv6 prefixes need more than %d MiB beside the existing ones: use fewer, or one shorter prefix for several", ErrFull, len(ps4), len(ps6), len(m.pages)/segmentBytes)
		}
		return err
	}
	m.Groups = groups
	m.Count = [2]uint32{uint32(len(ps4)), uint32(len(ps6))}
	atomic.StoreUint32(&m.Active, uint32(to4|to6<<1))
	m.retireToLimbo()
	m.grace()
	m.freeIndex(m.index[1-to4].Root4[:])
	m.freeIndex(m.index[1-to6].Root6[:])
	m.freeIndex(m.index[1-to6].Slot[:])
	atomic.StoreUint32(&m.Writing, 0)
	return nil
}

// freeIndex frees all pages of an index.
func (m *memory) freeIndex(entries []uint32) {
	for i, e := range entries {
		m.free(e)
		entries[i] = 0
	}
}

// Lookup returns the value of the longest prefix covering an address. An IPv4-mapped IPv6 address
// is an IPv6 address.
func (t *Table) Lookup(a netip.Addr) (value uint32, ok bool) {
	for {
		began := atomic.LoadUint32(&t.m.Reused)
		value = t.m.lookup(a)
		if atomic.LoadUint32(&t.m.Reused) == began {
			return value, value != 0
		}
	}
}

// Get returns the value of exactly this prefix.
func (t *Table) Get(p netip.Prefix) (value uint32, ok bool) {
	q, err := newPrefix(p, 1)
	if err != nil {
		return 0, false
	}
	t.m.walkBelow(p.Addr().Is4(), &q, func(found prefix) bool {
		if found.len == q.len && found.hi == q.hi && found.lo == q.lo {
			value, ok = found.value, true
		}
		return !ok
	})
	return value, ok
}

// All yields every prefix, IPv4 first, in no particular order. The table must not change meanwhile.
func (t *Table) All() iter.Seq[Entry] {
	return func(yield func(Entry) bool) {
		if t.m.walk4(func(p prefix) bool { return yield(p.entry(true)) }) {
			t.m.walk6(func(p prefix) bool { return yield(p.entry(false)) })
		}
	}
}

func (p prefix) entry(ipv4 bool) Entry {
	var a netip.Addr
	if ipv4 {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], uint32(p.hi>>32))
		a = netip.AddrFrom4(b)
	} else {
		var b [16]byte
		binary.BigEndian.PutUint64(b[:8], p.hi)
		binary.BigEndian.PutUint64(b[8:], p.lo)
		a = netip.AddrFrom16(b)
	}
	return Entry{netip.PrefixFrom(a, int(p.len)), p.value}
}

// Len returns the number of prefixes.
func (t *Table) Len() int { return int(t.m.Count[0] + t.m.Count[1]) }

// Stats returns the counts and sizes of the table.
func (t *Table) Stats() Stats {
	return Stats{IPv4: int(t.m.Count[0]), IPv6: int(t.m.Count[1]), Pages: int(t.m.Pages), PageBytes: 8 * int(t.m.Units),
		Capacity: 8 * int(t.m.limit())}
}
