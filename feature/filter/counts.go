// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/kernel"
)

// tally is what all versions have at the beginning of an element of filter_counts:
// what follows is the program's own. It is a whole element of the map that carries
// counts on.
type tally struct {
	Packets uint64
	Bytes   uint64
	Last    uint64 // ns of CLOCK_MONOTONIC; 0: never
}

func (t tally) plus(o tally) tally {
	return tally{t.Packets + o.Packets, t.Bytes + o.Bytes, max(t.Last, o.Last)}
}

// Counts only ever rise while a rule keeps its name. A filter that changes gets a
// map of counts of its own: packets are counted into the old program's until the
// last of them has left it. So the old map goes with the new form as "before", and
// what it had from its own predecessors is added up in "base", which no program
// writes, once all of theirs have ended. What a rule has counted is the sum of the three.

// baseMap makes the map of what rules had counted before the form before.
func baseMap(entries int) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "filter_base", Type: ebpf.Array, KeySize: 4, ValueSize: 24, MaxEntries: uint32(entries)})
	if err != nil {
		return nil, fmt.Errorf("making the map of earlier counts: %w", err)
	}
	return m, nil
}

// countKeys are the rules' keys in order, then that of the default and that of unreadable packets.
func (f Filter) countKeys() []string {
	keys := make([]string, 0, len(f.Rules)+2)
	for _, r := range f.Rules {
		keys = append(keys, r.Key())
	}
	return append(keys, defaultKey, unreadableKey)
}

// Keys of no rule: a rule's is not empty, and no name of a configuration has a NUL.
const (
	defaultKey    = ""
	unreadableKey = "\x00unreadable"
)

// sumCounts adds up the CPUs' shares of one element.
func sumCounts(m *ebpf.Map, i int) (sum tally, err error) {
	b, err := m.LookupBytes(uint32(i))
	if err != nil {
		return sum, fmt.Errorf("reading counts %d: %w", i, err)
	}
	share := int(m.ValueSize()+7) / 8 * 8 // as the kernel lays out the CPUs' values
	if share < 24 {
		return sum, fmt.Errorf("reading counts %d: %w: elements of %d bytes", i, kernel.ErrABI, share)
	}
	for ; len(b) >= share; b = b[share:] {
		word := func(at int) uint64 { return binary.NativeEndian.Uint64(b[at:]) }
		sum = sum.plus(tally{word(0), word(8), word(16)})
	}
	return sum, nil
}

// carried is what a form of a filter brings its successor: by key.
func carried(o *kernel.Opened, p *published) (map[string]tally, error) {
	out := map[string]tally{}
	for i, key := range p.Filter.countKeys() {
		var t tally
		if err := o.Maps["base"].Lookup(uint32(i), &t); err != nil {
			return nil, fmt.Errorf("reading earlier counts: %w", err)
		}
		if n := slices.Index(p.Before, key); n >= 0 && o.Maps["before"] != nil {
			b, err := sumCounts(o.Maps["before"], n)
			if err != nil {
				return nil, err
			}
			t = t.plus(b)
		}
		out[key] = t
	}
	return out, nil
}

// counts are what each rule has counted, then the default, and last unreadable packets.
func counts(o *kernel.Opened, p *published) ([]tally, error) {
	before, err := carried(o, p)
	if err != nil {
		return nil, err
	}
	out := make([]tally, 0, len(p.Filter.Rules)+2)
	for i, key := range p.Filter.countKeys() {
		t, err := sumCounts(o.Maps["counts"], i)
		if err != nil {
			return nil, err
		}
		out = append(out, t.plus(before[key]))
	}
	return out, nil
}
