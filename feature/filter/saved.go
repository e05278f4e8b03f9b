// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

var _ feature.Restorer = Feature{}

// saved is a filter as recorded in its pins, with the contents of its lists. The list files may
// have changed by the time of the restore.
type saved struct {
	Filter Filter `json:"filter"`
	Netns  string `json:"netns"`
	netns.ID
	Lists map[string]savedList `json:"lists,omitempty"`
}

type savedList struct {
	Hash     string         `json:"hash"`
	Prefixes []netip.Prefix `json:"prefixes"`
}

// Save implements feature.Restorer.
func (Feature) Save(_ context.Context, r *kernel.Root) ([]byte, error) {
	all, _, err := filters.All(r) // unreadable instances stay as they are
	if err != nil {
		return nil, err
	}
	var out []saved
	for _, rec := range all {
		s, err := save(r, rec.Instance)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // damaged; the plan recreates it
		} else if err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return json.Marshal(out)
}

func save(r *kernel.Root, i kernel.Instance) (saved, error) {
	o, err := r.Open(i)
	if err != nil {
		return saved{}, err
	}
	defer o.Close()
	rec, err := filters.Decode(i, o.Meta)
	if err != nil {
		return saved{}, err
	}
	p := publishedFrom(rec)
	s := saved{Filter: p.Filter, Netns: p.Netns, ID: p.meta.ID(), Lists: map[string]savedList{}}
	for name, l := range p.Lists {
		prefixes, all, err := l.contents(o)
		if err != nil {
			return s, fmt.Errorf("filter %s, list %s: %w", i.Name, name, err)
		}
		kept := savedList{l.Hash, prefixes}
		if !all {
			kept.Hash = "" // incomplete: another use of the list must fill it again
		}
		s.Lists[name] = kept
	}
	return s, nil
}

// contents returns the prefixes of a published list. all is false if a family's tables do not
// exist, because no rule uses that family.
func (l *list) contents(o *kernel.Opened) (out []netip.Prefix, all bool, err error) {
	if l.Table == "" {
		return append([]netip.Prefix{}, l.Prefixes...), true, nil
	}
	all = true
	have := sharedMaps(o.Maps)
	for i, name := range l.Shards.Names(l.Table) {
		if i > 0 && have[name+tableMaps[0]] == nil {
			all = false
			continue
		}
		m, err := table.Find(have, name)
		if err != nil {
			return nil, false, err
		}
		t, err := table.OpenReader(m)
		if err != nil {
			return nil, false, err
		}
		out = slices.Grow(out, int(t.Len()))
		for e := range t.All() {
			out = append(out, e.Prefix)
		}
		if err := t.Close(); err != nil {
			return nil, false, err
		}
	}
	if l.Shards.Tables > 1 { // every table has the short prefixes
		slices.SortFunc(out, netip.Prefix.Compare)
		out = slices.Compact(out)
	}
	return out, all, nil
}

// PlanRestore implements feature.Restorer.
func (f Feature) PlanRestore(ctx context.Context, r *kernel.Root, text []byte) (feature.Plan, error) {
	var plan feature.Plan
	var was []saved
	if err := json.Unmarshal(text, &was); err != nil {
		return plan, fmt.Errorf("decode the saved filters: %w", err)
	}
	have, err := f.State(ctx, r)
	if err != nil {
		return plan, err
	}
	var want Config
	for _, s := range was {
		ref, err := netns.Reference(s.Filter.Netns, s.ID)
		if errors.Is(err, netns.ErrGone) {
			plan.Warn("filter %s: its network namespace (%s) is gone", s.Filter.Name, s.Netns)
			continue
		} else if err != nil {
			return plan, err
		}
		s.Filter.Netns, s.Filter.saved = ref, map[string]*list{}
		for name, l := range s.Lists {
			kept := &list{Hash: l.Hash, entries: l.Prefixes}
			kept.chooseStorage()
			s.Filter.saved[name] = kept
		}
		want.Filters = append(want.Filters, s.Filter)
	}
	back, err := f.Plan(ctx, have, want)
	plan.Join(back)
	return plan, err
}
