// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/kernel"
)

// plannedName is what names of planned paths begin with: a new plan takes their place.
const plannedName = "plan-"

// ErrNothingPlanned says that a plan gives a router nothing to install.
var ErrNothingPlanned = errors.New("the plan has nothing that can be installed")

// Planned are the paths of one router's plan: of each interface that may fail, the destinations that have the same way around
// it. What cannot be installed is in notes, with the reason.
func Planned(a *plan.Answer) (paths []protect.Path, notes []string, err error) {
	type way struct{ link, out, via, segments string }
	at := map[way]int{}
	numbers := map[string]int{}
	for _, row := range a.Repairs {
		n := row.Plan.Network
		prefixes := n.Nodes[row.Repair.Destination].Prefixes
		why := ""
		switch {
		case len(prefixes) == 0:
			why = "the topology names no prefix of it"
		case row.Problem != "":
			why = row.Problem
		case len(row.Segments) > 0 && len(row.SIDs) == 0:
			why = "the topology has no SIDs"
		case row.Interface == "":
			why = "the topology does not say by which interface: " + row.Out
		case len(row.SIDs) == 0 && !row.NextHop.IsValid():
			why = "the topology does not say the address of " + row.FirstHop
		}
		if why != "" {
			notes = append(notes, fmt.Sprintf("%s without %s: %s", row.Destination, row.Failure, why))
			continue
		}
		for _, l := range row.Plan.Failures[row.Repair.Failure].Local {
			if r, ok := row.Plan.For(l, row.Repair.Destination); !ok || r.Out != row.Repair.Out {
				continue // its traffic does not leave by this one
			}
			device := n.Links[l].Interface
			if device == "" {
				notes = append(notes, fmt.Sprintf("%s without %s: the topology does not say by which interface: %s", row.Destination, row.Failure, n.LinkName(l)))
				continue
			}
			key := way{device, row.Interface, row.NextHop.String(), fmt.Sprint(row.SIDs)}
			i, there := at[key]
			if !there {
				i = len(paths)
				at[key] = i
				numbers[device]++
				paths = append(paths, protect.Path{Name: fmt.Sprintf("%s%s-%d", plannedName, strings.ReplaceAll(device, ".", "_"), numbers[device]), Device: device,
					Repairs: []protect.Repair{{Segments: row.SIDs, Device: row.Interface, Via: row.NextHop}}})
			}
			for _, p := range prefixes {
				if p = p.Masked(); !slices.Contains(paths[i].Prefixes, p) {
					paths[i].Prefixes = append(paths[i].Prefixes, p)
				}
			}
		}
	}
	for _, u := range a.Unprotected {
		notes = append(notes, fmt.Sprintf("%s without %s: %s", u.Destination, u.Failure, u.Reason))
	}
	if len(paths) == 0 {
		return nil, notes, errors.Join(append([]error{ErrNothingPlanned}, texts(notes)...)...)
	}
	c := protect.Config{Paths: paths}
	return paths, notes, errors.Join(c.Validate()...)
}

func texts(all []string) (out []error) {
	for _, s := range all {
		out = append(out, errors.New(s))
	}
	return out
}

// PlannedYAML is the section of weir.yaml that has the same paths.
func PlannedYAML(paths []protect.Path) ([]byte, error) {
	type repair struct {
		Segments  []netip.Addr `yaml:"segments,omitempty,flow"`
		Interface string       `yaml:"interface"`
		Via       string       `yaml:"via,omitempty"`
	}
	type path struct {
		Name      string         `yaml:"name"`
		Interface string         `yaml:"interface"`
		Prefixes  []netip.Prefix `yaml:"prefixes,flow"`
		Repairs   []repair       `yaml:"repairs"`
	}
	var out []path
	for _, p := range paths {
		o := path{Name: p.Name, Interface: p.Device, Prefixes: p.Prefixes}
		for _, r := range p.Repairs {
			via := ""
			if r.Via.IsValid() {
				via = r.Via.String()
			}
			o.Repairs = append(o.Repairs, repair{r.Segments, r.Device, via})
		}
		out = append(out, o)
	}
	return yaml.Marshal(map[string][]path{"reroute": out})
}

// Install has planned paths, of which there are some, be in force beside those that there are, in place of those of an earlier plan. It returns what it did.
func Install(ctx context.Context, l *kernel.WriteLock, planned []protect.Path) (done []string, err error) {
	have, err := protect.ReadState(ctx, l.Root)
	if err != nil {
		return nil, err
	}
	c := protect.Config{Paths: slices.DeleteFunc(have.Configured(), func(p protect.Path) bool {
		return p.Netns == planned[0].Netns && strings.HasPrefix(p.Name, plannedName)
	})}
	c.Paths = append(c.Paths, planned...)
	if errs := c.Validate(); len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	if err := kernel.Require(protect.Needs(c)); err != nil {
		return nil, err
	}
	p, err := protect.Plan(ctx, have, c)
	if err != nil {
		return nil, err
	}
	for _, s := range p.Steps {
		if _, err := s.Do(ctx, l); err != nil {
			return done, fmt.Errorf("%s: %w", s, err)
		}
		done = append(done, s.String())
	}
	return done, nil
}
