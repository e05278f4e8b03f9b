// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/internal/nstest"
)

// A default dropping neighbour resolution cuts the host off. The plan refuses it for each protocol.
func TestRefusesToDropDiscovery(t *testing.T) {
	nstest.NeedRoot(t)
	w := newWorld(t)
	pass := func(text string) Rule { return Rule{Match: Expression{Text: text}, Action: Pass} }
	drop := func(text string) Rule { return Rule{Match: Expression{Text: text}, Action: Drop} }
	web, arp4 := pass("tcp.dstport == 80"), pass("eth.type == 0x0806")
	for _, c := range []struct {
		hook  Hook
		at    Point
		rules []Rule
		want  []string // refused protocols
	}{
		{HookTCX, "", []Rule{web}, []string{"ARP", "IPv6 neighbour discovery"}},
		{HookXDP, "", []Rule{web, arp4}, []string{"IPv6 neighbour discovery"}},
		{HookTCX, "", []Rule{web, pass("icmpv6")}, []string{"ARP"}},
		{HookTCX, "", []Rule{web, pass("icmpv6.type == 135"), arp4}, nil},
		{HookTCX, "", []Rule{drop("udp"), pass("ipv6")}, []string{"ARP"}},
		{HookTCX, "", []Rule{pass("ip or ipv6")}, []string{"ARP"}},
		{HookTCX, "", []Rule{pass("frame.len > 0")}, nil},
		{HookNFT, "input", []Rule{web}, []string{"IPv6 neighbour discovery"}},
		{HookNFT, "prerouting", []Rule{web}, []string{"IPv6 neighbour discovery"}},
		{HookNFT, "output", []Rule{web}, []string{"IPv6 neighbour discovery"}},
		{HookNetfilter, "input", []Rule{web}, []string{"IPv6 neighbour discovery"}},
		{HookNetfilter, "postrouting", []Rule{web}, []string{"IPv6 neighbour discovery"}},
		{HookNetfilter, "forward", []Rule{web}, nil},
		{HookNFT, "input", []Rule{web, pass("icmpv6")}, nil},
		{HookNFT, "input", []Rule{pass("ipv6.src == fe80::/10")}, nil},
		{HookNFT, "input", []Rule{pass("ipv6.src == 2001:db8::/32")}, []string{"IPv6 neighbour discovery"}},
	} {
		f := w.filter(c.hook, c.rules...)
		f.At, f.Default = c.at, Drop
		p, err := Feature{}.Plan(t.Context(), State{}, Config{Filters: []Filter{f}})
		if err != nil {
			t.Errorf("%s %s %v: %v", c.hook, c.at, c.rules, err)
			continue
		}
		var got []string
		for _, o := range p.Outages {
			_, rest, _ := strings.Cut(o, " drops ")
			name, _, _ := strings.Cut(rest, " by default")
			got = append(got, name)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s %s %v: refused because of %q, want %q", c.hook, c.at, c.rules, p.Outages, c.want)
		}
	}
}
