// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/table"
)

// list is the value of a $name of a filter, as recorded in the pins. A short list is compiled into
// the program. A long list is a table for the program to search.
type list struct {
	Hash     string         `json:"hash"` // of the file
	Entries  int            `json:"entries"`
	Prefixes []netip.Prefix `json:"prefixes,omitempty"` // of a short list
	Segments int            `json:"segments,omitempty"` // table size of a long list, MiB
	Shards   compile.Shards `json:"shards,omitzero"`    // of a list larger than one table
	Table    string         `json:"table,omitempty"`    // prefix of the map names of its first table

	entries []netip.Prefix // as read from the file; nil if read from the pins
}

// shortList is the maximum number of prefixes compiled into the program. Beyond it, a table is
// faster to search and cheaper to change.
const shortList = 32

// chooseStorage decides between the program and a table for a list's entries.
func (l *list) chooseStorage() {
	l.Entries = len(l.entries)
	if l.Entries <= shortList {
		l.Prefixes = l.entries
	} else {
		// Twice the room for prefixes of the Internet's routing table: other prefixes are more
		// scattered.
		l.Segments = min(2+l.Entries/50_000, maxSegments)
	}
}

// List is the value of $Name in the rules of a socket.
type List struct {
	Name     string
	Prefixes []netip.Prefix
}

// ReadList reads a list file: one address or prefix a line, # begins a comment.
func ReadList(name, file string) (List, error) {
	l, err := readList(file)
	if err != nil {
		return List{}, fmt.Errorf("list %s: %w", name, err)
	}
	return List{name, l.entries}, nil
}

// forSocket converts the lists of a socket.
func forSocket(lists []List) (map[string]*list, error) {
	out := map[string]*list{}
	for _, x := range lists {
		if out[x.Name] != nil {
			return nil, fmt.Errorf("list %q: duplicate name", x.Name)
		}
		l := &list{entries: make([]netip.Prefix, len(x.Prefixes))}
		for i, p := range x.Prefixes {
			if !p.IsValid() {
				return nil, fmt.Errorf("list %q: entry %d is not a valid prefix", x.Name, i+1)
			}
			l.entries[i] = p.Masked()
		}
		l.chooseStorage()
		out[x.Name] = l
	}
	return out, nil
}

// maxSegments is the maximum table size in MiB. Tests lower it.
var maxSegments = 32

// forCompiler converts lists for the compiler.
func forCompiler(ls map[string]*list) map[string]compile.List {
	out := map[string]compile.List{}
	for name, l := range ls {
		out[name] = compile.List{Prefixes: l.Prefixes, Segments: l.Segments, Shards: l.Shards}
	}
	return out
}

// fill writes a long list into its new tables. It skips the given ones.
func (l *list) fill(ms, given map[string]*ebpf.Map) error {
	for i, name := range l.Shards.Names(l.Table) {
		if given[name+tableMaps[0]] != nil || i > 0 && ms[name+tableMaps[0]] == nil {
			continue // already filled, or unused by all rules
		}
		if l.entries == nil {
			return errNoContents
		}
		m, err := table.Find(ms, name)
		if err != nil {
			return err
		}
		if err := l.fillOne(m, i); err != nil {
			return err
		}
	}
	return nil
}

// fillOne writes the prefixes of one table.
func (l *list) fillOne(m table.Maps, shard int) error {
	t, err := table.Open(m)
	if err != nil {
		return err
	}
	defer t.Close()
	entries := make([]table.Entry, 0, len(l.entries)/max(1, l.Shards.Tables))
	for _, p := range l.entries {
		if of := l.Shards.Find(p); of == shard || of < 0 {
			entries = append(entries, table.Entry{Prefix: p, Value: 1})
		}
	}
	return t.Replace(entries)
}

// grow enlarges a list's table to the maximum size, then doubles the number of tables. It returns
// false at the limit of both.
func (l *list) grow() bool {
	switch {
	case l.Segments < maxSegments:
		l.Segments = maxSegments
	case l.Shards.Tables < compile.MaxShards && l.entries != nil:
		l.Shards = l.spread(max(2, 2*l.Shards.Tables))
	default:
		return false
	}
	return true
}

// spread chooses the number of leading bits for distributing prefixes over tables. It prefers few
// bits with an even distribution, because shorter prefixes are stored in every table.
func (l *list) spread(tables int) compile.Shards {
	out := compile.Shards{Tables: tables}
	for _, family := range []struct {
		bits   *int
		choice []int
		is     func(netip.Addr) bool
	}{{&out.Bits4, []int{16, 24, 32}, netip.Addr.Is4}, {&out.Bits6, []int{32, 48, 64, 128}, netip.Addr.Is6}} {
		n, least, best := 0, 0, 0
		for _, p := range l.entries {
			if family.is(p.Addr()) {
				n++
			}
		}
		if n < len(l.entries)/(8*tables) { // few enough for the first table
			continue
		}
		for _, bits := range family.choice {
			*family.bits = bits
			if most := l.fullest(out, family.is); least == 0 || most < least-least/8 {
				least, best = most, bits
			}
		}
		*family.bits = best
	}
	return out
}

// fullest returns the number of a family's prefixes in the fullest table.
func (l *list) fullest(s compile.Shards, is func(netip.Addr) bool) int {
	in, all := make([]int, s.Tables), 0
	for _, p := range l.entries {
		if !is(p.Addr()) {
			continue
		}
		if of := s.Find(p); of < 0 {
			all++
		} else {
			in[of]++
		}
	}
	return all + slices.Max(in)
}

// listStates returns the state of the filter's lists.
func (p *published) listStates() (out []ListState) {
	for _, name := range slices.Sorted(maps.Keys(p.Lists)) {
		l := p.Lists[name]
		s := ListState{Name: name, Prefixes: l.Entries}
		if l.Table != "" {
			s.Tables = max(1, l.Shards.Tables)
			s.MiB = s.Tables * l.Segments
		}
		out = append(out, s)
	}
	return out
}

// keepRoom preserves the table sizes of unchanged lists.
func keepRoom(next, before map[string]*list) {
	for name, l := range next {
		if o := before[name]; o != nil && o.Hash == l.Hash && o.Segments > 0 && l.Segments > 0 {
			l.Segments, l.Shards = o.Segments, o.Shards
		}
	}
}

// tableMaps are the suffixes of a table's map names.
var tableMaps = []string{"_head", "_index", "_pages"}

// inheritLists reuses the tables of unchanged lists, which need no filling. It returns the old
// form's maps under the new program's names.
func inheritLists(next, before map[string]*list, have map[string]*ebpf.Map) map[string]*ebpf.Map {
	share := map[string]*ebpf.Map{}
	for name, l := range next {
		o := before[name]
		if o == nil || l.Table == "" || o.Table == "" || o.Hash != l.Hash || o.Segments != l.Segments || o.Shards != l.Shards {
			continue
		}
		was := o.Shards.Names(strings.TrimPrefix(o.Table, mapPrefix))
		for i, table := range l.Shards.Names(l.Table) {
			for _, end := range tableMaps {
				share[table+end] = have[was[i]+end]
			}
		}
	}
	maps.DeleteFunc(share, func(_ string, m *ebpf.Map) bool { return m == nil })
	return share
}

// sameLists reports whether two forms have the same lists.
func sameLists(a, b map[string]*list) bool {
	return maps.EqualFunc(a, b, func(x, y *list) bool { return x.Hash == y.Hash })
}

// set is a list for the interpreter.
type set struct{ in map[netip.Prefix]bool }

func (s set) Contains(a netip.Addr) bool {
	for bits := a.BitLen(); bits >= 0; bits-- {
		if p, err := a.Prefix(bits); err == nil && s.in[p] {
			return true
		}
	}
	return false
}

// sets converts a filter's lists for the interpreter.
func sets(ls map[string]*list) map[string]expr.Set {
	out := map[string]expr.Set{}
	for name, l := range ls {
		s := set{map[netip.Prefix]bool{}}
		for _, p := range l.entries {
			s.in[p] = true
		}
		out[name] = s
	}
	return out
}

var errNoContents = errors.New("filling its table needs the list's file")
