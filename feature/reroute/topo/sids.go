// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/weir-project/weir/internal/safefile"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/internal/suggest"
)

// SIDs are SRv6 SIDs (RFC 8986) for a network with missing SIDs. SIDs of nodes and links override the source's; SIDs
// from functions do not.
type SIDs struct {
	strictyaml.Pos `yaml:"-"`
	// Locators contains the locators of all routers: each router announces one prefix within it.
	Locators  netip.Prefix `yaml:"locators"`
	Functions *functions   `yaml:"functions"` // for every router with a locator
	Nodes     []nodeSIDs   `yaml:"nodes"`
	Links     []linkSIDs   `yaml:"links"`
}

// functions are the bits of SIDs after a locator.
type functions struct {
	strictyaml.Pos `yaml:"-"`
	End            netip.Addr `yaml:"end"`
	DT6            netip.Addr `yaml:"dt6"`
	DT4            netip.Addr `yaml:"dt4"`
	DT46           netip.Addr `yaml:"dt46"`
}

// nodeSIDs are the SIDs of one router; they override functions.
type nodeSIDs struct {
	strictyaml.Pos `yaml:"-"`
	Name           string       `yaml:"name"`
	Locator        netip.Prefix `yaml:"locator"`
	End            netip.Addr   `yaml:"end"`
	DT6            netip.Addr   `yaml:"dt6"`
	DT4            netip.Addr   `yaml:"dt4"`
	DT46           netip.Addr   `yaml:"dt46"`
}

// linkSIDs are the SIDs of one direction of an adjacency. Interface or address, of From, distinguish parallel ones.
type linkSIDs struct {
	strictyaml.Pos `yaml:"-"`
	From           string     `yaml:"from"`
	To             string     `yaml:"to"`
	Interface      string     `yaml:"interface"`
	Address        netip.Addr `yaml:"address"`
	EndX           netip.Addr `yaml:"endx"`
	DX6            netip.Addr `yaml:"dx6"`
}

// ReadSIDs reads a file of SIDs. Errors, including unknown keys, carry their position.
func ReadSIDs(file string) (*SIDs, error) {
	name, data, err := safefile.Input(file, maxFile)
	if err != nil {
		return nil, err
	}
	return ParseSIDs(name, data)
}

// ParseSIDs parses a file of SIDs.
func ParseSIDs(file string, data []byte) (*SIDs, error) {
	s := &SIDs{Pos: strictyaml.Pos{File: file, Line: 1, Column: 1}}
	if err := strictyaml.Decode(file, data, s); err != nil {
		return nil, err
	}
	if s.Functions == nil && len(s.Nodes)+len(s.Links) == 0 {
		return nil, s.Errorf("no SIDs: give functions (with locators), nodes or links")
	}
	var errs []error
	if s.Locators.IsValid() && !s.Locators.Addr().Is6() {
		errs = append(errs, s.Errorf("locators: %s: want an IPv6 prefix, like fc00::/16", s.Locators))
	}
	if f := s.Functions; f != nil {
		errs = append(errs, sidErrors(f.Pos, "functions", map[string]netip.Addr{"end": f.End, "dt6": f.DT6, "dt4": f.DT4, "dt46": f.DT46}))
		if *f == (functions{Pos: f.Pos}) {
			errs = append(errs, f.Errorf("functions: none is given: want end and dt6, as in {end: \"::e\", dt6: \"::d6\"}"))
		}
	}
	for _, x := range s.Nodes {
		errs = append(errs, sidErrors(x.Pos, "node "+x.Name, map[string]netip.Addr{"end": x.End, "dt6": x.DT6, "dt4": x.DT4, "dt46": x.DT46}))
		if x.Locator.IsValid() && !x.Locator.Addr().Is6() {
			errs = append(errs, x.Errorf("node %s: locator: %s: want an IPv6 prefix", x.Name, x.Locator))
		}
		if x.Locator.IsValid() && s.Functions == nil {
			errs = append(errs, x.Errorf("node %s: locator: SIDs follow from it by functions: give those as well", x.Name))
		}
	}
	owners := sidOwners{}
	for _, x := range s.Nodes {
		n := Node{Name: x.Name}
		n.setSIDs(x.End, x.DT6, x.DT4, x.DT46)
		errs = append(errs, placed(x.Pos, owners.node(&n)))
	}
	for _, x := range s.Links {
		errs = append(errs, placed(x.Pos, owners.link(x.EndX, x.DX6, x.From, x.To)))
		errs = append(errs, sidErrors(x.Pos, "link "+x.From+"→"+x.To, map[string]netip.Addr{"endx": x.EndX, "dx6": x.DX6}))
	}
	return s, errors.Join(errs...)
}

func sidErrors(at strictyaml.Pos, of string, sids map[string]netip.Addr) error {
	var errs []error
	for _, what := range []string{"end", "dt6", "dt4", "dt46", "endx", "dx6"} {
		if a := sids[what]; a.IsValid() && (!a.Is6() || a.Is4In6() || a.Zone() != "" || a.IsMulticast() || a.IsUnspecified()) {
			errs = append(errs, at.Errorf("%s: %s: %s is no SID: want an IPv6 address", of, what, a))
		}
	}
	return errors.Join(errs...)
}

// AddTo adds the SIDs to a network. After an error the network is unusable.
func (s *SIDs) AddTo(n *Network) error {
	locators, errs := map[int]netip.Prefix{}, []error(nil)
	for i := range n.Nodes {
		if l := n.Nodes[i].Locator; l.IsValid() && (!s.Locators.IsValid() || s.Locators.Overlaps(l)) {
			locators[i] = l
		}
	}
	for i, x := range s.Nodes {
		if slices.IndexFunc(s.Nodes, func(o nodeSIDs) bool { return o.Name == x.Name }) < i {
			errs = append(errs, x.Errorf("node %s is listed twice", x.Name))
		}
		at, err := s.node(n, x.Pos, x.Name)
		if err != nil {
			errs = append(errs, err)
		} else if x.Locator.IsValid() {
			locators[at] = x.Locator.Masked()
		}
	}
	if s.Functions != nil {
		errs = append(errs, s.locate(n, locators), s.Functions.addTo(n, locators))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	for _, x := range s.Nodes {
		at := &n.Nodes[n.Node(x.Name)]
		at.setSIDs(x.End, x.DT6, x.DT4, x.DT46)
	}
	for _, x := range s.Links {
		errs = append(errs, s.addLink(n, x))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return placed(s.Pos, n.checkSIDs())
}

// node returns the index of an entry's router.
func (s *SIDs) node(n *Network, at strictyaml.Pos, name string) (int, error) {
	i := n.Node(name)
	if i >= 0 {
		return i, nil
	}
	var names []string
	for _, x := range n.Nodes {
		names = append(names, x.Name)
	}
	if near := suggest.Nearest(name, names); near != "" {
		return i, at.Errorf("there is no node %q in the topology; did you mean %q?", name, near)
	}
	return i, at.Errorf("there is no node %q in the topology: there is %s", name, few(names))
}

// few lists the first of many names.
func few(names []string) string {
	const maxNames = 8
	if len(names) > maxNames {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:maxNames], ", "), len(names)-maxNames)
	}
	return strings.Join(names, ", ")
}

// locate finds the missing locators of routers.
func (s *SIDs) locate(n *Network, locators map[int]netip.Prefix) error {
	if !s.Locators.IsValid() {
		if len(locators) == 0 {
			return s.Functions.Errorf("functions: the topology names no locator: say which prefix contains them, as in locators: fc00::/16")
		}
		return nil
	}
	var errs []error
	for i, x := range n.Nodes {
		if _, known := locators[i]; known {
			continue
		}
		var within []string
		for _, p := range x.Prefixes {
			if p.Addr().Is6() && !p.IsSingleIP() && p.Bits() >= s.Locators.Bits() && s.Locators.Contains(p.Addr()) {
				within, locators[i] = append(within, p.String()), p.Masked()
			}
		}
		if len(within) > 1 {
			errs = append(errs, s.Errorf("locators: %s announces several prefixes in %s (%s): say which is its locator: nodes: [{name: %s, locator: %s}]",
				x.Name, s.Locators, few(within), x.Name, within[0]))
		}
	}
	if len(locators) == 0 {
		return s.Errorf("locators: no router announces a locator in %s", s.Locators)
	}
	by := map[netip.Prefix]string{}
	for i, x := range n.Nodes {
		l := locators[i]
		if other, taken := by[l]; taken && l.IsValid() {
			errs = append(errs, s.Errorf("locators: %s and %s both announce %s: a locator is one router's", other, x.Name, l))
		}
		by[l] = x.Name
	}
	return errors.Join(errs...)
}

// addTo sets missing SIDs of routers with a locator.
func (f *functions) addTo(n *Network, locators map[int]netip.Prefix) error {
	for i := range n.Nodes {
		l, known := locators[i]
		if !known {
			continue
		}
		var sids [4]netip.Addr
		for k, a := range []netip.Addr{f.End, f.DT6, f.DT4, f.DT46} {
			if !a.IsValid() {
				continue
			}
			if netip.PrefixFrom(a, l.Bits()).Masked().Addr() != netip.IPv6Unspecified() {
				return f.Errorf("functions: %s has bits within the first %d, the locator's part (%s of %s)", a, l.Bits(), l, n.Nodes[i].Name)
			}
			sid, bits := l.Addr().As16(), a.As16()
			for b := range sid {
				sid[b] |= bits[b]
			}
			sids[k] = netip.AddrFrom16(sid)
		}
		had := n.Nodes[i]
		n.Nodes[i].setSIDs(sids[0], sids[1], sids[2], sids[3])
		n.Nodes[i].setSIDs(had.End, had.DT6, had.DT4, netip.Addr{})
	}
	return nil
}

// setSIDs sets the given SIDs. End.DT46 is both End.DT6 and End.DT4.
func (x *Node) setSIDs(end, dt6, dt4, dt46 netip.Addr) {
	for _, s := range []struct {
		to  *netip.Addr
		sid netip.Addr
	}{{&x.DT6, dt46}, {&x.DT4, dt46}, {&x.End, end}, {&x.DT6, dt6}, {&x.DT4, dt4}} {
		if s.sid.IsValid() {
			*s.to = s.sid
		}
	}
}

func (s *SIDs) addLink(n *Network, x linkSIDs) error {
	from, err := s.node(n, x.Pos, x.From)
	to, err2 := s.node(n, x.Pos, x.To)
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	var fit []int
	for i, l := range n.Links {
		if l.From == from && l.To == to && (x.Interface == "" || x.Interface == l.Interface) && (!x.Address.IsValid() || x.Address == l.Local) {
			fit = append(fit, i)
		}
	}
	switch {
	case len(fit) == 0:
		return x.Errorf("the topology has no such link from %s to %s", x.From, x.To)
	case len(fit) > 1:
		return x.Errorf("%d links from %s to %s: tell them apart by interface or address of %s", len(fit), x.From, x.To, x.From)
	}
	l := &n.Links[fit[0]]
	if x.EndX.IsValid() {
		l.EndX = x.EndX
	}
	if x.DX6.IsValid() {
		l.DX6 = x.DX6
	}
	return nil
}
