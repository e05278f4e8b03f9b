// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"errors"
	"fmt"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/filter"
	"github.com/weir-project/weir/kernel"
)

// product is the filter feature with the run's own pins, used like in weir apply.
type product struct{ root *kernel.Root }

// productHooks are the hooks of a configuration, each with its family for counting.
var productHooks = []struct {
	hook   filter.Hook
	family string
}{
	{filter.HookNFT, "nft"}, {filter.HookNetfilter, "netfilter"}, {filter.HookTCX, "tcx"}, {filter.HookXDP, "xdp"}, {filter.HookXDPGeneric, "xdp"},
}

// apply sets the filters of the host; all others are removed.
func (p product) apply(ctx context.Context, filters ...filter.Filter) error {
	c := filter.Config{Filters: filters}
	if errs := c.Validate(); len(errs) > 0 {
		return errors.Join(errs...)
	}
	if err := kernel.Require((filter.Feature{}).Needs(c)); err != nil {
		return err
	}
	l, err := p.root.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	st, err := filter.ReadState(ctx, p.root)
	if err != nil {
		return err
	}
	plan, err := (filter.Feature{}).Plan(ctx, st, c)
	if err != nil {
		return err
	}
	for _, step := range plan.Steps {
		if err := ctx.Err(); err != nil {
			return err // a rule file of ten thousand takes long
		}
		if err := (feature.Plan{Steps: []feature.Step{step}}).Apply(ctx, l, nil); err != nil {
			return err
		}
	}
	return nil
}

// counts returns the packets of the only filter's rules by name, "" for the default.
func (p product) counts(ctx context.Context) (map[string]uint64, error) {
	st, err := filter.ReadState(ctx, p.root)
	if err != nil {
		return nil, err
	}
	if len(st.Filters) != 1 {
		return nil, fmt.Errorf("%d filters exist, want one", len(st.Filters))
	}
	f := st.Filters[0]
	for _, pl := range f.Attachments {
		if !pl.Attached || pl.Problem != "" {
			return nil, fmt.Errorf("the filter is not at %s: %s", pl.Name, pl.Problem)
		}
	}
	out := map[string]uint64{"": f.Default.Packets}
	for _, r := range f.Rules {
		out[r.Name] = r.Packets
	}
	return out, nil
}

// filterAt returns a filter of the world's host.
func filterAt(w *world, h filter.Hook, rules ...filter.Rule) filter.Filter {
	f := filter.Filter{Name: "lab", Hook: h, Netns: w.hostName, Rules: rules}
	switch h {
	case filter.HookNFT, filter.HookNetfilter:
		f.At = "prerouting"
	default:
		f.Interfaces = []string{device}
	}
	return f
}
