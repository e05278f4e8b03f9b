// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/kernel"
)

// Mode selects how segments are put into a packet.
type Mode string

// Modes of a repair. IPv4 packets are always encapsulated.
const (
	Encap  Mode = "encap"  // prepend an IPv6 header and a reduced routing header: H.Encaps.Red, RFC 8986 section 5.2
	Inline Mode = "inline" // insert a reduced routing header; the packet's destination is the last segment
)

// Limits of a configuration.
const (
	maxSegments    = 9         // per repair
	maxPathRepairs = 4         // per path
	MaxHold        = time.Hour // per path
	maxPaths       = 1023      // per network namespace: REROUTE_PATHS less the first
	minMTU         = 1280      // of a link carrying IPv6: RFC 8200 section 5
)

// Config lists the protected paths.
type Config struct {
	Paths []Path
}

// Path is a link, or some destinations behind it, with its repairs.
type Path struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Name           string         `yaml:"name" json:"name"`
	Netns          string         `yaml:"netns" json:"netns,omitempty"`       // absent: the caller's
	Device         string         `yaml:"interface" json:"interface"`         // the protected link
	Prefixes       []netip.Prefix `yaml:"prefixes" json:"prefixes,omitempty"` // absent: all destinations without another path of this interface
	Repairs        []Repair       `yaml:"repairs" json:"repairs"`             // best first
	Hold           time.Duration  `yaml:"hold" json:"hold,omitempty"`         // time with a carrier before the interface is used again
	Shadow         bool           `yaml:"shadow" json:"shadow,omitempty"`     // count affected packets, reroute nothing
	// Slow disables the ingress program, so every packet takes the kernel's routing even while the link is down. One
	// slow path disables the program for all paths of its namespace.
	Slow bool `yaml:"slow" json:"slow,omitempty"`
}

// Repair is a way around a link.
type Repair struct {
	Mode      Mode         `yaml:"mode" json:"mode,omitempty"`           // absent: encap
	Segments  []netip.Addr `yaml:"segments" json:"segments,omitempty"`   // in the order of the visits; absent: the neighbour Via gets packets unchanged
	Segments4 []netip.Addr `yaml:"segments4" json:"segments4,omitempty"` // of IPv4 packets; absent beside Segments: IPv4 packets stay on the link
	Device    string       `yaml:"interface" json:"interface,omitempty"` // absent: the interface of the route to the first segment
	Via       netip.Addr   `yaml:"via" json:"via,omitzero"`              // next hop on Device; absent: from the route to the first segment
	Source    netip.Addr   `yaml:"source" json:"source,omitzero"`        // source address of outer headers; absent: chosen by the kernel
	MTU       int          `yaml:"mtu" json:"mtu,omitempty"`             // of the whole way, in bytes; absent: the interface's
}

// Validate checks values beyond their types. Each error carries its position in the file.
func (c *Config) Validate() []error {
	var errs []error
	names, owners := map[[2]string]bool{}, map[[2]string]map[netip.Prefix]string{}
	for i := range c.Paths {
		p := &c.Paths[i]
		fail := func(format string, a ...any) {
			errs = append(errs, p.Errorf("reroute.%s: "+format, append([]any{p.Name}, a...)...))
		}
		if !kernel.ValidName(p.Name) {
			fail("use a name of letters, digits, - and _")
		}
		if key := [2]string{p.Netns, p.Name}; names[key] {
			fail("two paths have this name")
		} else {
			names[key] = true
		}
		if p.Device == "" || len(p.Device) > 15 {
			fail("interface %q: name the protected link", p.Device)
		}
		if p.Hold < 0 || p.Hold > MaxHold {
			fail("hold %s: use 0 to %s", p.Hold, MaxHold)
		}
		p.checkRepairs(fail)
		key := [2]string{p.Netns, p.Device}
		if owners[key] == nil {
			owners[key] = map[netip.Prefix]string{}
		}
		p.checkPrefixes(owners[key], fail)
	}
	if len(c.Paths) > maxPaths {
		errs = append(errs, fmt.Errorf("reroute: %d paths: at most %d", len(c.Paths), maxPaths))
	}
	return errs
}

type failure func(format string, a ...any)

// checkPrefixes rejects two paths of an interface for the same destinations.
func (p *Path) checkPrefixes(owners map[netip.Prefix]string, fail failure) {
	all := p.Prefixes
	if len(all) == 0 {
		all = []netip.Prefix{{}} // all destinations without a prefix
	}
	for i, x := range all {
		if x.IsValid() && x != x.Masked() {
			fail("prefix %s has bits set beyond its length: use %s", x, x.Masked())
			continue
		} else if x.IsValid() && x.Addr().Is4In6() || !x.IsValid() && len(p.Prefixes) > i {
			fail("prefix %s: want an IPv6 or an IPv4 prefix, like 2001:db8::/32", x)
			continue
		}
		if o, taken := owners[x]; taken && x.IsValid() {
			fail("path %s has repairs for %s behind %s already", o, x, p.Device)
		} else if taken {
			fail("path %s has repairs for all behind %s already: give one of them prefixes", o, p.Device)
		}
		owners[x] = p.Name
	}
}

func (p *Path) checkRepairs(fail failure) {
	if len(p.Repairs) == 0 || len(p.Repairs) > maxPathRepairs {
		fail("%d repairs: give 1 to %d, the best first", len(p.Repairs), maxPathRepairs)
	}
	for i := range p.Repairs {
		r := &p.Repairs[i]
		at := func(format string, a ...any) {
			fail("repair %d: "+format, append([]any{i + 1}, a...)...)
		}
		if r.Mode == "" {
			r.Mode = Encap
		}
		if r.Mode != Encap && r.Mode != Inline {
			at("mode %q: want encap or inline", r.Mode)
		}
		if len(r.Segments) == 0 && (r.Device == "" || !r.Via.IsValid() || len(r.Segments4) > 0) {
			at("without segments a repair needs interface and via of a neighbour")
		}
		if r.Device == p.Device && p.Device != "" {
			at("interface %s is the protected link", r.Device)
		}
		if r.MTU != 0 && (r.MTU < minMTU || r.MTU > 65535) {
			at("mtu %d: use %d to 65535", r.MTU, minMTU)
		}
		r.checkAddresses(at)
	}
}

func (r *Repair) checkAddresses(fail failure) {
	for _, list := range [][]netip.Addr{r.Segments, r.Segments4} {
		if len(list) > maxSegments {
			fail("%d segments: at most %d", len(list), maxSegments)
		}
		for _, s := range list {
			if !usable(s) || !s.Is6() {
				fail("segment %q: want a global IPv6 address", s)
			}
		}
	}
	if r.Source.IsValid() && (!usable(r.Source) || !r.Source.Is6()) {
		fail("source %q: want a global IPv6 address of this host", r.Source)
	}
	if v := r.Via; v.IsValid() && (v.IsUnspecified() || v.IsMulticast() || v.Is4In6() || v.Zone() != "") {
		fail("via %q: want the address of a neighbour, without a zone", v)
	}
	if r.Via.Is4() && len(r.Segments) > 0 {
		fail("via %q: packets with segments are IPv6: want an IPv6 neighbour", r.Via)
	}
}

func usable(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && !a.IsLoopback() && !a.IsLinkLocalUnicast() && !a.Is4In6() && a.Zone() == ""
}

// carries4 reports whether the repair can carry IPv4 packets. The kernel drops IPv4 packets at the last segment of an
// IPv6 list (End.DT6, End.DX6, or End behind an inline header).
func (r Repair) carries4() bool { return len(r.Segments4) > 0 || len(r.Segments) == 0 }

// String formats the repair for plans.
func (r Repair) String() string {
	s := "via " + r.Device
	switch {
	case len(r.Segments) == 0:
		return fmt.Sprintf("to %s on %s", r.Via, r.Device)
	case r.Device == "":
		s = "as routed"
	}
	return fmt.Sprintf("%s %v %s", r.Mode, r.Segments, s)
}

// String formats the path for plans.
func (p Path) String() string {
	s := p.Device
	if len(p.Prefixes) > 0 {
		s += fmt.Sprintf(" %v", p.Prefixes)
	}
	for _, r := range p.Repairs {
		s += ", " + r.String()
	}
	if p.Hold > 0 {
		s += ", hold " + p.Hold.String()
	}
	if p.Shadow {
		s += ", shadow"
	}
	return s
}

func (p Path) equal(q Path) bool {
	return p.Name == q.Name && p.Netns == q.Netns && p.Device == q.Device && p.Hold == q.Hold && p.Shadow == q.Shadow && p.Slow == q.Slow &&
		slices.Equal(p.Prefixes, q.Prefixes) && slices.EqualFunc(p.Repairs, q.Repairs, func(a, b Repair) bool {
		return a.Mode == b.Mode && slices.Equal(a.Segments, b.Segments) && slices.Equal(a.Segments4, b.Segments4) &&
			a.Device == b.Device && a.Via == b.Via && a.Source == b.Source && a.MTU == b.MTU
	})
}
