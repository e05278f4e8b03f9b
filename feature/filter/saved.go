// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

var _ feature.Restorer = Feature{}

// saved is a filter as its pins describe it. It holds what its lists hold: their files may be others by then.
type saved struct {
	Filter Filter               `json:"filter"`
	Netns  string               `json:"netns"`
	Inode  uint64               `json:"inode"`
	Lists  map[string]savedList `json:"lists,omitempty"`
}

type savedList struct {
	Hash     string         `json:"hash"`
	Prefixes []netip.Prefix `json:"prefixes"`
}

// Save implements feature.Restorer.
func (Feature) Save(_ context.Context, r *kernel.Root) ([]byte, error) {
	all, err := r.Instances(Name)
	if err != nil {
		return nil, err
	}
	var out []saved
	for _, i := range all {
		s, err := save(r, i)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // damaged, and made anew by the plan
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
	p, err := parse(i, o.Meta)
	if err != nil {
		return saved{}, err
	}
	s := saved{Filter: p.Filter, Netns: p.Netns, Inode: p.meta.Inode, Lists: map[string]savedList{}}
	for name, l := range p.Lists {
		prefixes, err := l.contents(o)
		if err != nil {
			return s, fmt.Errorf("filter %s, list %s: %w", i.Name, name, err)
		}
		s.Lists[name] = savedList{l.Hash, prefixes}
	}
	return s, nil
}

// contents are the prefixes of a published list.
func (l *list) contents(o *kernel.Opened) ([]netip.Prefix, error) {
	if l.Table == "" {
		return append([]netip.Prefix{}, l.Prefixes...), nil
	}
	m, err := table.Of(sharedMaps(o.Maps), l.Table)
	if err != nil {
		return nil, err
	}
	t, err := table.OpenReader(m)
	if err != nil {
		return nil, err
	}
	defer t.Close()
	out := make([]netip.Prefix, 0, t.Len())
	for e := range t.All() {
		out = append(out, e.Prefix)
	}
	return out, nil
}

// PlanRestore implements feature.Restorer.
func (f Feature) PlanRestore(ctx context.Context, r *kernel.Root, text []byte) (feature.Plan, error) {
	var plan feature.Plan
	var was []saved
	if err := json.Unmarshal(text, &was); err != nil {
		return plan, fmt.Errorf("the saved filters: %w", err)
	}
	have, err := f.State(ctx, r)
	if err != nil {
		return plan, err
	}
	var want Config
	for _, s := range was {
		ref, err := netns.Reference(s.Filter.Netns, s.Inode)
		if errors.Is(err, netns.ErrGone) {
			plan.Warn("filter %s: its network namespace (%s) is gone", s.Filter.Name, s.Netns)
			continue
		} else if err != nil {
			return plan, err
		}
		s.Filter.Netns, s.Filter.saved = ref, map[string]*list{}
		for name, l := range s.Lists {
			kept := &list{Hash: l.Hash, entries: l.Prefixes}
			kept.place()
			s.Filter.saved[name] = kept
		}
		want.Filters = append(want.Filters, s.Filter)
	}
	back, err := f.Plan(ctx, have, want)
	plan.Join(back)
	return plan, err
}
