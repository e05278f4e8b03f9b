// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/netns"
)

// namespacesByRef compares network namespaces by identity, because a file and the pins may use different references.
type namespacesByRef map[string]string

func (m namespacesByRef) of(ref string) string {
	if id, ok := m[ref]; ok {
		return id
	}
	id := ref
	open := netns.Open
	if ref == "" {
		open = func(string) (*netns.Handle, error) { return netns.Current() }
	}
	if ns, err := open(ref); err == nil {
		id = fmt.Sprint(ns.Inode())
		ns.Close()
	}
	m[ref] = id
	return id
}

// rerouted reports whether a path's packets take a repair now.
func rerouted(p protect.PathState) bool {
	return p.Attached && p.Down && !p.Shadow && slices.ContainsFunc(p.Repairs, func(r protect.RepairState) bool { return !r.Down })
}

// outages adds to a plan the links with packets now rerouted, but afterwards sent over them again.
func outages(plan *feature.Plan, have State, want Config) {
	ns := namespacesByRef{}
	protection := want.protection()
	refuseAbsent(plan, have, want, ns)
	for _, p := range have.Paths {
		if !rerouted(p) {
			continue
		}
		if why := uncovered(p, protection, ns); why != "" {
			addOutage(plan, p, why)
		} else if why := unjudged(p, have, want, ns); why != "" {
			addOutage(plan, p, why)
		}
	}
}

// refuseAbsent refuses to move an attached path, or its repairs, to a missing interface. Repairs with an interface
// from the routing table are not checked.
func refuseAbsent(plan *feature.Plan, have State, want Config, ns namespacesByRef) {
	for _, w := range want.protection().Paths {
		i := slices.IndexFunc(have.Paths, func(p protect.PathState) bool { return p.Name == w.Name && ns.of(p.Netns) == ns.of(w.Netns) })
		if i < 0 {
			continue
		}
		p := have.Paths[i]
		lacks := func(name string) string { return lacking(w.Netns, name) }
		feature.Interfaces{Pos: w.Pos, Key: fmt.Sprintf("reroute.%s: interface", w.Name), Published: []string{p.Device}, Spec: []string{w.Device},
			Works: func(string) bool { return p.Attached }, Lacks: lacks}.Refuse(plan)
		ways := feature.Interfaces{Pos: w.Pos, Key: fmt.Sprintf("reroute.%s: repairs", w.Name), Works: func(string) bool { return p.Attached }, Lacks: lacks}
		for _, r := range p.Repairs {
			if r.Device != "" { // "": the device was deleted
				ways.Published = append(ways.Published, r.Device)
			}
		}
		for _, r := range w.Repairs {
			ways.Spec = append(ways.Spec, r.Device)
		}
		if !slices.Contains(ways.Spec, "") {
			ways.Refuse(plan)
		}
	}
}

// lacking explains why paths cannot use an interface: it is missing, or not Ethernet. "": they can, or this is
// unknown.
func lacking(ref, name string) (text string) {
	ns, err := netns.Current()
	if ref != "" {
		ns, err = netns.Open(ref)
	}
	if err != nil {
		return "" // its user fails and reports it
	}
	defer ns.Close()
	_ = ns.Do(func() error {
		if l, err := netlink.LinkByName(name); errors.As(err, &netlink.LinkNotFoundError{}) {
			text = fmt.Sprintf("there is no interface %s in %s", name, ns)
		} else if err == nil && l.Attrs().Name != name {
			text = fmt.Sprintf("%s is an alternative name of interface %s, and paths need the latter", name, l.Attrs().Name)
		} else if err == nil && l.Attrs().EncapType != "ether" {
			text = fmt.Sprintf("packets of %s have no Ethernet header, but protection needs one", name)
		}
		return nil
	})
	return text
}

func addOutage(plan *feature.Plan, p protect.PathState, change string) {
	plan.Outage("reroute of path %s: interface %s in %s is down (%s) and its packets are rerouted: %s, so they are sent to the link again",
		p.Name, p.Device, p.Netns, strings.Join(whyDown(p), ", "), change)
}

// whyDown lists the reasons against a link.
func whyDown(p protect.PathState) (out []string) {
	for _, r := range []struct {
		on   bool
		text string
	}{{p.Probe, "not answered"}, {p.Carrier, "no carrier"}, {p.Drain, "drained"}} {
		if r.on {
			out = append(out, r.text)
		}
	}
	return out
}

// uncovered explains why a configuration has no repair for a path's packets; "": it has one.
func uncovered(p protect.PathState, want protect.Config, ns namespacesByRef) string {
	prefixes := p.Prefixes
	if len(prefixes) == 0 {
		prefixes = []netip.Prefix{{}} // all destinations without another path of the link
	}
	for _, x := range prefixes {
		best, bits := (*protect.Path)(nil), -2
		for i, w := range want.Paths {
			if w.Device != p.Device || ns.of(w.Netns) != ns.of(p.Netns) {
				continue
			}
			if len(w.Prefixes) == 0 && bits < -1 {
				best, bits = &want.Paths[i], -1
			}
			for _, o := range w.Prefixes {
				if x.IsValid() && o.Bits() <= x.Bits() && o.Contains(x.Addr()) && o.Bits() > bits {
					best, bits = &want.Paths[i], o.Bits()
				}
			}
		}
		switch of := ""; {
		case best != nil && best.Shadow:
			return "path " + best.Name + " becomes a shadow"
		case best == nil:
			if x.IsValid() && len(prefixes) > 1 {
				of = " for " + x.String()
			}
			return "no path of the link is left" + of
		}
	}
	return ""
}

// unjudged explains why a path's link would lose its down verdict; "": it keeps it. Carrier and drain are kept while
// the link has a path.
func unjudged(p protect.PathState, have State, want Config, ns namespacesByRef) string {
	if p.Carrier || p.Drain || !p.Probe {
		return ""
	}
	same := func(w Path, name string) bool {
		return w.Name == name && w.Device == p.Device && ns.of(w.Netns) == ns.of(p.Netns)
	}
	gone := ""
	for _, s := range have.Sessions {
		if s.Device != p.Device || s.Netns != p.Netns || s.Phase != liveness.Down {
			continue
		}
		if slices.ContainsFunc(want.Paths, func(w Path) bool { return same(w, s.Name) && w.Probe != nil && !w.Probe.Observe }) {
			return ""
		}
		gone = "session " + s.Name + ", the one with the down verdict, is removed or only observes"
	}
	for _, s := range have.BFD {
		if s.Device != p.Device || s.Netns != p.Netns || s.Unjudged || s.State == bfd.Up && (s.Echo == nil || !s.Echo.Failed) {
			continue
		}
		if slices.ContainsFunc(want.Paths, func(w Path) bool {
			return same(w, s.Name) && w.BFD != nil && !w.BFD.Observe && w.BFD.Peer == s.Peer && w.BFD.FRR == (s.FRR != "")
		}) {
			return ""
		}
		gone = "BFD session " + s.Name + ", the one with the down verdict, is removed, has another peer, or only observes"
	}
	return gone
}
