// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/netns"
)

// resolution is a protocol for resolving neighbours' link addresses. A filter with default: drop
// also drops its packets unless a rule passes them. The host then loses the network within moments.
type resolution struct {
	name   string
	remedy string   // the rule to add
	asks   []string // texts of rules from users aware of the problem
	link   []byte   // Ethernet header of a request
	packet []byte   // the request
}

var (
	arp = resolution{"ARP", "pass eth.type == 0x0806", []string{"eth.type"},
		[]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 0x08, 0x06},
		append([]byte{0, 1, 8, 0, 6, 4, 0, 1}, make([]byte, 20)...)}
	nd = resolution{"IPv6 neighbour discovery", "pass icmpv6", []string{"icmpv6", "ipv6.nxt", "ip.proto"},
		[]byte{0x33, 0x33, 0xff, 0, 0, 1, 2, 0, 0, 0, 0, 1, 0x86, 0xdd},
		solicitation(netip.MustParseAddr("fe80::2"), netip.MustParseAddr("ff02::1:ff00:1"))}
)

// solicitation returns a neighbour solicitation (RFC 4861, section 4.3) without options and
// checksum.
func solicitation(src, dst netip.Addr) []byte {
	const icmp, asked = 58, 135
	p := []byte{0x60, 0, 0, 0, 0, 24, icmp, 255}
	p = append(append(p, src.AsSlice()...), dst.AsSlice()...)
	p = append(p, asked, 0, 0, 0, 0, 0, 0, 0)
	return append(p, netip.MustParseAddr("fe80::1").AsSlice()...)
}

// drops reports whether the filter's default drops the request, with no pass rule about its kind of
// packet.
func (r resolution) drops(p *published) bool {
	f := p.Filter
	if f.Default != Drop {
		return false
	}
	env := expr.Env{Lists: sets(p.Lists), Now: func() uint64 { return 0 }}
	var exprs []*expr.Expr
	for _, rule := range f.Rules {
		if rule.Action == Pass && slices.ContainsFunc(r.asks, func(s string) bool { return strings.Contains(rule.Match.Text, s) }) {
			return false
		}
		e, err := rule.parse()
		if err != nil {
			return false // reported elsewhere
		}
		exprs = append(exprs, e.Match)
	}
	packet := expr.Packet{Data: r.packet, Layer: expr.Network}
	if f.Hook.ofDevices() {
		packet = expr.Packet{Data: append(slices.Clone(r.link), r.packet...), Layer: expr.Link}
	}
	decides := func(i int) bool { return f.Rules[i].Action != Count }
	return env.EvalRules(exprs, &packet, f.unreadable, decides) == len(exprs)
}

// cutsOff returns the interfaces unable to resolve neighbours by r. For a filter of a whole
// namespace it returns "the host".
func (p *published) cutsOff(r resolution, ns *netns.Handle) []string {
	f := p.Filter
	var at []string
	switch {
	case p.Raw || f.At == "forward": // tunnels have no neighbours, and requests are not forwarded
	case f.Hook.ofDevices():
		at = slices.DeleteFunc(slices.Clone(f.Interfaces), func(name string) bool { return name == "lo" })
	case r.name == nd.name: // ARP bypasses the netfilter hooks of the IP stack
		at = []string{"the host"}
	}
	if len(at) == 0 || !r.drops(p) {
		return nil
	}
	if r.name == nd.name {
		users := ipv6Users(ns)
		if !f.Hook.ofDevices() && len(users) == 0 {
			return nil
		}
		at = slices.DeleteFunc(at, func(name string) bool { return f.Hook.ofDevices() && !users[name] })
	}
	return at
}

// ipv6Users returns the interfaces of a namespace with an IPv6 address other than link-local and
// loopback.
func ipv6Users(ns *netns.Handle) map[string]bool {
	out := map[string]bool{}
	_ = ns.Do(func() error { // on error, no use of IPv6 is known
		links, err := dump.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			addrs, err := dump.AddrList(l, netlink.FAMILY_V6)
			if err == nil && slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return !a.IP.IsLinkLocalUnicast() && !a.IP.IsLoopback() }) {
				out[l.Attrs().Name] = true
			}
		}
		return nil
	})
	return out
}

// warnOfCut warns of cut-off interfaces: as an outage if they were connected before.
func (t *target) warnOfCut(plan *feature.Plan, was *published, ns *netns.Handle) {
	for _, r := range []resolution{arp, nd} {
		now := t.pub.cutsOff(r, ns)
		if len(now) == 0 {
			continue
		}
		var before []string
		if was != nil {
			before = was.cutsOff(r, ns)
		}
		tell := plan.Warn
		if slices.ContainsFunc(now, func(name string) bool { return !slices.Contains(before, name) }) {
			tell = plan.Outage
		}
		tell("filter %s drops %s by default: drop, so %s will soon lose all neighbours: %s", t.pub.Filter.Name, r.name, strings.Join(now, ", "), r.remedy)
	}
}
