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

// plannedName is the name prefix of planned paths. A new plan replaces them.
const plannedName = "plan-"

// errNothingPlanned reports a plan without an installable path.
var errNothingPlanned = errors.New("the plan has nothing to install")

// way is a repair of an interface.
type way struct {
	device, out string
	via         netip.Addr
	segments    string
}

// behind is a prefix reached by an interface.
type behind struct {
	device string
	netip.Prefix
}

// planning collects ways in the order of the plan.
type planning struct {
	paths map[way]*protect.Path
	order []way
	ways  map[behind][]way // several: ambiguous
	to    map[behind][]string
	notes []string
}

func (p *planning) note(format string, a ...any) {
	if s := fmt.Sprintf(format, a...); !slices.Contains(p.notes, s) {
		p.notes = append(p.notes, s)
	}
}

// Planned returns the paths of one router's plan. Each path has the destinations of an interface with equal repairs.
// A prefix belongs to its nearest announcer. notes lists the parts impossible to install, with reasons.
func Planned(a *plan.Answer) (paths []protect.Path, notes []string, err error) {
	g := planning{paths: map[way]*protect.Path{}, ways: map[behind][]way{}, to: map[behind][]string{}}
	for _, row := range a.Repairs {
		prefixes, why := repairedPrefixes(a, row)
		switch {
		case why != "":
		case row.Problem != "":
			why = row.Problem
		case len(row.Segments) > 0 && len(row.SIDs) == 0:
			why = "the topology has no SIDs: give them beside it (weir reroute plan --sids FILE)"
		case row.Interface == "":
			why = "the topology does not name the interface: " + row.Out
		case len(row.SIDs) == 0 && !row.NextHop.IsValid():
			why = "the topology does not name the address of " + row.FirstHop
		}
		if why != "" {
			g.note("%s without %s: %s", row.Destination, row.Failure, why)
			continue
		}
		g.add(a, row, prefixes)
	}
	for _, u := range a.Unprotected {
		g.note("%s without %s: %s", u.Destination, u.Failure, u.Reason)
	}
	if paths = g.done(); len(paths) == 0 {
		return nil, g.notes, errors.Join(append([]error{errNothingPlanned}, texts(g.notes)...)...)
	}
	c := protect.Config{Paths: paths}
	return paths, g.notes, errors.Join(c.Validate()...)
}

// repairedPrefixes returns the prefixes of a repair's destination with packets going there. It excludes prefixes with
// a nearer announcer, and the router's own, for example of a shared LAN.
func repairedPrefixes(a *plan.Answer, row plan.RepairRow) (out []netip.Prefix, why string) {
	all := row.Plan.Network.Nodes[row.Repair.Destination].Prefixes
	if len(all) == 0 {
		return nil, "the topology names no prefix of it"
	}
	for _, p := range all {
		if slices.Contains(a.Planner.Announcers(row.Plan.Node, p), row.Repair.Destination) {
			out = append(out, p.Masked())
		}
	}
	if len(out) == 0 {
		return nil, "its prefixes are at this router, or at a nearer one"
	}
	return out, ""
}

// add adds a repair's prefixes to each of their output interfaces.
func (g *planning) add(a *plan.Answer, row plan.RepairRow, prefixes []netip.Prefix) {
	n := row.Plan.Network
	for _, l := range row.Plan.Failures[row.Repair.Failure].Local {
		if r, ok := row.Plan.For(l, row.Repair.Destination); !ok || r.Out != row.Repair.Out {
			continue // its traffic leaves by another link
		}
		device := n.Links[l].Interface
		switch device {
		case "":
			g.note("%s without %s: the topology does not name the interface: %s", row.Destination, row.Failure, n.LinkName(l))
			continue
		case row.Interface:
			g.note("%s without %s: the repair leaves by %s too, and an interface is protected as a whole", row.Destination, row.Failure, device)
			continue
		}
		w := way{device, row.Interface, row.NextHop, fmt.Sprint(row.SIDs, row.SIDs4)}
		if g.paths[w] == nil {
			g.paths[w] = &protect.Path{Device: device, Repairs: []protect.Repair{{Segments: row.SIDs, Segments4: row.SIDs4, Device: row.Interface, Via: row.NextHop}}}
			g.order = append(g.order, w)
		}
		for _, p := range prefixes {
			b := behind{device, p}
			switch {
			case p.Addr().Is4() && len(row.SIDs) > 0 && len(row.SIDs4) == 0:
				g.note("%s of %s without %s: IPv4 packets have no way around: %s", p, row.Destination, row.Failure, row.Problem4)
			case !a.Planner.Carries(row.Plan, row.Repair, p):
				g.note("%s of %s without %s: the repair would send packets to another router announcing it", p, row.Destination, row.Failure)
			case !slices.Contains(g.ways[b], w):
				g.ways[b] = append(g.ways[b], w)
				g.to[b] = append(g.to[b], row.Destination)
				g.paths[w].Prefixes = append(g.paths[w].Prefixes, p)
			}
		}
	}
}

// done returns the paths with prefixes, named.
func (g *planning) done() (out []protect.Path) {
	numbers := map[string]int{}
	for _, w := range g.order {
		p := g.paths[w]
		p.Prefixes = slices.DeleteFunc(p.Prefixes, func(x netip.Prefix) bool {
			b := behind{w.device, x}
			if len(g.ways[b]) > 1 {
				g.note("%s behind %s: packets for it go to several routers with different repairs: %s", x, w.device, strings.Join(g.to[b], ", "))
			}
			return len(g.ways[b]) > 1
		})
		if len(p.Prefixes) == 0 {
			continue
		}
		numbers[w.device]++
		p.Name = fmt.Sprintf("%s%s-%d", plannedName, strings.ReplaceAll(w.device, ".", "_"), numbers[w.device])
		out = append(out, *p)
	}
	return out
}

func texts(all []string) (out []error) {
	for _, s := range all {
		out = append(out, errors.New(s))
	}
	return out
}

// PlannedYAML formats paths as a section of weir.yaml.
func PlannedYAML(paths []protect.Path) ([]byte, error) {
	type repair struct {
		Segments  []netip.Addr `yaml:"segments,omitempty,flow"`
		Segments4 []netip.Addr `yaml:"segments4,omitempty,flow"`
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
			o.Repairs = append(o.Repairs, repair{r.Segments, r.Segments4, r.Device, via})
		}
		out = append(out, o)
	}
	return yaml.Marshal(map[string][]path{"reroute": out})
}

// errOtherRouter reports a plan of another router.
var errOtherRouter = errors.New("the plan is another router's")

// Install applies planned paths, at least one, beside the existing paths, and replaces an earlier plan's. It returns
// the executed steps. Unless allowOutage is set, it refuses to end the rerouting of packets. It refuses interfaces
// and neighbours this host does not have: [errOtherRouter].
func Install(ctx context.Context, l *kernel.WriteLock, planned []protect.Path, allowOutage bool) (done []string, err error) {
	if err := isOfHost(planned); err != nil {
		return nil, err
	}
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
	ns := namespacesByRef{}
	for _, path := range have.Paths {
		if why := uncovered(path, c, ns); rerouted(path) && why != "" {
			addOutage(&p, path, why)
		}
	}
	if err := p.Refuse(allowOutage); err != nil {
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
