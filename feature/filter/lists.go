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

// list is what a $name of a filter stands for, as the pins have it: a short one is
// in the program, a long one in a table that the program looks up.
type list struct {
	Hash     string         `json:"hash"` // of the file
	Entries  int            `json:"entries"`
	Prefixes []netip.Prefix `json:"prefixes,omitempty"` // of a short one
	Segments int            `json:"segments,omitempty"` // of the table of a long one, MiB
	Shards   compile.Shards `json:"shards,omitzero"`    // of a list larger than one table
	Table    string         `json:"table,omitempty"`    // what the names of its first table's maps begin with

	entries []netip.Prefix // as read from the file; nil where only the pins are known
}

// shortList is how many prefixes are compiled into the program: more are found
// faster, and changed cheaper, in a table.
const shortList = 32

// chooseStorage decides where a list's entries are kept.
func (l *list) chooseStorage() {
	l.Entries = len(l.entries)
	if l.Entries <= shortList {
		l.Prefixes = l.entries
	} else {
		// Twice what prefixes of the Internet's table take: others are scattered more.
		l.Segments = min(2+l.Entries/50_000, maxSegments)
	}
}

// List is what $Name stands for in the rules of a socket.
type List struct {
	Name     string
	Prefixes []netip.Prefix
}

// ReadList reads a list from a file as configurations name them: an address or a
// prefix a line; what follows a # is a comment.
func ReadList(name, file string) (List, error) {
	l, err := readList(file)
	if err != nil {
		return List{}, fmt.Errorf("list %s: %w", name, err)
	}
	return List{name, l.entries}, nil
}

// forSocket is lists as a program has them.
func forSocket(lists []List) (map[string]*list, error) {
	out := map[string]*list{}
	for _, x := range lists {
		if out[x.Name] != nil {
			return nil, fmt.Errorf("list %q: given twice", x.Name)
		}
		l := &list{entries: make([]netip.Prefix, len(x.Prefixes))}
		for i, p := range x.Prefixes {
			if !p.IsValid() {
				return nil, fmt.Errorf("list %q: number %d is no prefix", x.Name, i+1)
			}
			l.entries[i] = p.Masked()
		}
		l.chooseStorage()
		out[x.Name] = l
	}
	return out, nil
}

// maxSegments is the size of the largest table. Tests make it less.
var maxSegments = 32

// forCompiler is the lists as the compiler takes them.
func forCompiler(ls map[string]*list) map[string]compile.List {
	out := map[string]compile.List{}
	for name, l := range ls {
		out[name] = compile.List{Prefixes: l.Prefixes, Segments: l.Segments, Shards: l.Shards}
	}
	return out
}

// fill writes a long list into those of its tables that are new: not given.
func (l *list) fill(ms, given map[string]*ebpf.Map) error {
	for i, name := range l.Shards.Names(l.Table) {
		if given[name+tableMaps[0]] != nil || i > 0 && ms[name+tableMaps[0]] == nil {
			continue // full already, or asked for by no rule
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

// grow gives a list's table all the room that there is, and then the list twice the tables; false if it had all that.
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

// spread chooses the bits that tell the tables of a list's prefixes: as few as fill the tables alike, since shorter prefixes
// are in each.
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
		if n < len(l.entries)/(8*tables) { // a few more in the first table
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

// fullest is how many prefixes of a family the fullest table has.
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

// listStates tell of a filter's lists.
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

// keepRoom gives lists that stay the room that they have.
func keepRoom(next, before map[string]*list) {
	for name, l := range next {
		if o := before[name]; o != nil && o.Hash == l.Hash && o.Segments > 0 && l.Segments > 0 {
			l.Segments, l.Shards = o.Segments, o.Shards
		}
	}
}

// tableMaps are the endings of the names of a table's maps.
var tableMaps = []string{"_head", "_index", "_pages"}

// inheritLists takes over the tables of lists that are the same as before: they
// need not be filled again. It returns the old form's maps by the names that the
// new program has for them.
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

// sameLists says whether two forms have the same lists.
func sameLists(a, b map[string]*list) bool {
	return maps.EqualFunc(a, b, func(x, y *list) bool { return x.Hash == y.Hash })
}

// set is a list as the interpreter asks it.
type set struct{ in map[netip.Prefix]bool }

func (s set) Contains(a netip.Addr) bool {
	for bits := a.BitLen(); bits >= 0; bits-- {
		if p, err := a.Prefix(bits); err == nil && s.in[p] {
			return true
		}
	}
	return false
}

// sets are a filter's lists as the interpreter asks them.
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

var errNoContents = errors.New("the file of the list is needed to fill its table")
