// SPDX-License-Identifier: Apache-2.0

package topo

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// OSPF6Command makes ospf6d print its whole database.
const OSPF6Command = "vtysh -c 'show ipv6 ospf6 database detail json'"

type ospf6Database struct {
	Area []struct {
		ID  string     `json:"areaId"`
		LSA []ospf6LSA `json:"lsa"`
	} `json:"areaScopedLinkStateDb"`
	Interface []struct {
		Name string     `json:"interface"`
		LSA  []ospf6LSA `json:"lsa"`
	} `json:"interfaceScopedLinkStateDb"`
}

// ospf6LSA is an LSA of RFC 5340 section A.4, with the needed fields of all types.
type ospf6LSA struct {
	Type        string   `json:"type"`
	ID          string   `json:"linkStateId"`
	Router      string   `json:"advertisingRouter"`
	Options     string   `json:"options"`
	Attached    []string `json:"attachedRouter"`
	Description []struct {
		Type            string `json:"type"`
		Metric          uint32 `json:"metric"`
		Interface       string `json:"interfaceId"`
		RemoteInterface string `json:"neighborInterfaceId"`
		Remote          string `json:"neighborRouterId"`
	} `json:"lsaDescription"`
	Reference       string `json:"reference"`
	ReferenceID     string `json:"referenceId"`
	ReferenceRouter string `json:"referenceAdv"`
	LinkLocal       string `json:"linkLocalAddress"`
	Prefix          []struct {
		Prefix string `json:"prefix"`
		Metric uint32 `json:"metric"`
	} `json:"prefix"`
}

// port is an interface: a router with its number for it.
type port struct{ router, id string }

// ospf6Reader builds the network of one area.
type ospf6Reader struct {
	b          *Builder
	interfaces map[port]string
	addresses  map[port]netip.Addr
	lans       map[port][]member // by the designated router's port
	attached   map[port][]string
	halves     []half
}

// readOSPF6 reads one area from the output of OSPF6Command. Routers are named by router id.
func readOSPF6(file string, data []byte) (*Network, error) {
	var db ospf6Database
	if err := json.Unmarshal(data, &db); err != nil {
		return nil, fmt.Errorf("%s: no database of ospf6d: %w", withLine(file, data, err), err)
	}
	if len(db.Area) == 0 {
		return nil, fmt.Errorf("%s: the database has no area: use the output of %s", file, OSPF6Command)
	}
	r := &ospf6Reader{b: NewBuilder("ospf6"), interfaces: map[port]string{}, addresses: map[port]netip.Addr{},
		lans: map[port][]member{}, attached: map[port][]string{}}
	r.ports(db)
	// Of several areas, use the backbone or else the first.
	area := db.Area[max(0, slices.IndexFunc(db.Area, func(a struct {
		ID  string     `json:"areaId"`
		LSA []ospf6LSA `json:"lsa"`
	}) bool {
		return a.ID == "0.0.0.0"
	}))]
	if len(db.Area) > 1 {
		r.b.note("the database has %d areas: the plan is for %s only", len(db.Area), area.ID)
	}
	n, err := r.area(area.LSA)
	if err != nil {
		return nil, fmt.Errorf("%s: area %s: %w", file, area.ID, err)
	}
	return n, nil
}

// ports reads names and addresses of interfaces from the link LSAs. The routers of a link exchange these, so the
// queried router is in the list of each of its interfaces.
func (r *ospf6Reader) ports(db ospf6Database) {
	seen := map[string]int{}
	used := 0 // interfaces with a link LSA; loopback has none
	for _, i := range db.Interface {
		routers := map[string]bool{}
		for _, l := range i.LSA {
			if l.Type == "Link" && !routers[l.Router] {
				routers[l.Router] = true
				seen[l.Router]++
			}
		}
		used += min(1, len(routers))
	}
	everywhere := 0 // if two routers share all their links, the queried one is unknown
	for _, count := range seen {
		if count == used {
			everywhere++
		}
	}
	for _, i := range db.Interface {
		for _, l := range i.LSA {
			if l.Type != "Link" {
				continue
			}
			if a, err := netip.ParseAddr(l.LinkLocal); err == nil {
				r.addresses[port{l.Router, l.ID}] = a
			}
			if seen[l.Router] == used && everywhere == 1 {
				r.b.n.Self = l.Router
				r.interfaces[port{l.Router, l.ID}] = i.Name
			}
		}
	}
}

func (r *ospf6Reader) area(lsas []ospf6LSA) (*Network, error) {
	routers := map[string]int{}
	for _, l := range lsas {
		switch l.Type {
		case "Router":
			i := r.b.Node(l.Router)
			routers[l.Router] = i
			// RFC 5340 section A.2: without the R bit others do not route through it.
			if l.Options != "" && !slices.Contains(strings.Split(l.Options, "|"), "R") {
				r.b.At(i).Overload = true
			}
		case "Network":
			r.attached[port{l.Router, l.ID}] = l.Attached
		}
	}
	for _, l := range lsas {
		if l.Type == "Router" {
			if err := r.router(routers, l); err != nil {
				return nil, err
			}
		}
	}
	for _, l := range lsas {
		if l.Type == "Intra-Prefix" {
			if err := r.prefixes(routers, l); err != nil {
				return nil, err
			}
		}
	}
	r.b.join(r.halves)
	var lans []port
	for at := range r.lans {
		lans = append(lans, at)
	}
	slices.SortFunc(lans, func(x, y port) int { return strings.Compare(x.router+x.id, y.router+y.id) })
	for _, at := range lans {
		r.b.lan(at.router+" "+at.id, r.lans[at])
	}
	return r.b.Network()
}

// prefixes reads an intra-area-prefix LSA of a router or a LAN. All routers of a LAN reach its prefixes at the cost
// of their interface.
func (r *ospf6Reader) prefixes(routers map[string]int, l ospf6LSA) error {
	of, cost := []string{l.ReferenceRouter}, map[int]uint32{}
	if l.Reference != "Router" {
		lan := port{l.ReferenceRouter, l.ReferenceID}
		of = r.attached[lan]
		for _, m := range r.lans[lan] {
			cost[m.From] = m.Metric
		}
	}
	for _, p := range l.Prefix {
		prefix, err := netip.ParsePrefix(p.Prefix)
		if err != nil {
			return fmt.Errorf("prefix %q of %s: %w", p.Prefix, l.Router, err)
		}
		for _, router := range of {
			if i, ok := routers[router]; ok {
				r.b.Announce(i, prefix, p.Metric+cost[i])
			}
		}
	}
	return nil
}

// router reads the links of a router LSA.
func (r *ospf6Reader) router(routers map[string]int, l ospf6LSA) error {
	for _, d := range l.Description {
		if d.Metric > maxMetric {
			return fmt.Errorf("a link of %s has metric %d: want 1 to %d", l.Router, d.Metric, maxMetric)
		}
		mine, far := port{l.Router, d.Interface}, port{d.Remote, d.RemoteInterface}
		link := Link{From: routers[l.Router], Metric: max(d.Metric, 1), Interface: r.interfaces[mine], Local: r.addresses[mine]}
		switch d.Type {
		case "Point-To-Point", "Virtual-Link":
			to, ok := routers[d.Remote]
			if !ok || d.Remote == l.Router || d.Type == "Virtual-Link" {
				r.b.note("%s announces an unused link of type %s to %s", l.Router, d.Type, d.Remote)
				continue
			}
			link.To, link.Remote = to, r.addresses[far]
			r.halves = append(r.halves, half{Link: link, mine: mine.router + " " + mine.id, other: far.router + " " + far.id})
		case "Transit-Network":
			// The router and the designated router must list each other.
			if slices.Contains(r.attached[far], l.Router) {
				r.lans[far] = append(r.lans[far], member{Link: link})
			}
		}
	}
	return nil
}
