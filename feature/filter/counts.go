// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"encoding/binary"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/kernel"
)

// tally is the common beginning of a filter_counts element in all versions. The rest of an element
// belongs to the program. In the base map, a tally is the whole element.
type tally struct {
	Packets uint64
	Bytes   uint64
	Last    uint64 // ns of CLOCK_MONOTONIC; 0: never
}

func (t tally) plus(o tally) tally {
	return tally{t.Packets + o.Packets, t.Bytes + o.Bytes, max(t.Last, o.Last)}
}

// The counts of a rule never decrease while the rule keeps its name. A changed filter gets a new
// map of counts, because packets are counted by the old program until the last one leaves it. The
// new form therefore keeps the old map as "before". Counts of all earlier forms are added up in
// "base" after their programs have ended; no program writes to it. The count of a rule is the sum
// of the three maps.

// baseMap creates the map of counts from before the previous form.
func baseMap(entries int) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Name: "filter_base", Type: ebpf.Array, KeySize: 4, ValueSize: 24, MaxEntries: uint32(entries)})
	if err != nil {
		return nil, fmt.Errorf("create the map of earlier counts: %w", err)
	}
	return m, nil
}

// countKeys returns the keys of all rules in order, then the default's and the unreadable packets'
// key.
func (f Filter) countKeys() []string {
	keys := make([]string, 0, len(f.Rules)+2)
	for _, r := range f.Rules {
		keys = append(keys, r.Key())
	}
	return append(keys, defaultKey, unreadableKey)
}

// Keys of the default and unreadable counters. They differ from all rules: rule keys are not empty
// and have no NUL.
const (
	defaultKey    = ""
	unreadableKey = "\x00unreadable"
)

// sumCounts adds up the per-CPU values of an element.
func sumCounts(m *ebpf.Map, i int) (sum tally, err error) {
	b, err := m.LookupBytes(uint32(i))
	if err != nil {
		return sum, fmt.Errorf("read counts %d: %w", i, err)
	}
	share := int(m.ValueSize()+7) / 8 * 8 // per-CPU values are aligned to 8 bytes
	if share < 24 {
		return sum, fmt.Errorf("read counts %d: %w: element size is %d bytes", i, kernel.ErrABI, share)
	}
	for ; len(b) >= share; b = b[share:] {
		word := func(at int) uint64 { return binary.NativeEndian.Uint64(b[at:]) }
		sum = sum.plus(tally{word(0), word(8), word(16)})
	}
	return sum, nil
}

// carried returns the counts to carry on to the next form, by key.
func carried(o *kernel.Opened, p *published) (map[string]tally, error) {
	out := map[string]tally{}
	for i, key := range p.Filter.countKeys() {
		var t tally
		if err := o.Maps["base"].Lookup(uint32(i), &t); err != nil {
			return nil, fmt.Errorf("read earlier counts: %w", err)
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

// counts returns the counts of each rule, then of the default, then of unreadable packets.
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
