// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/feature/reroute/topo"
)

// lanOf returns the plan for a of a LAN of four, from FRR's output. a has also a cable to b at pb and to amsterdam at
// pc, so ways around the LAN differ. more changes the routers' announcements.
func lanOf(t *testing.T, more ...string) *plan.Answer {
	t.Helper()
	text, err := os.ReadFile("topo/testdata/isis-lan.txt")
	if err != nil {
		t.Fatal(err)
	}
	const ams = "averylonghostname-in-amsterdam"
	to := func(system, metric, address string) string {
		return fmt.Sprintf("  MT Reachability: 0000.0000.000%s.00 (Metric: %s) ipv6-unicast\n    Remote Interface IPv6 Address(es): %s\n", system, metric, address)
	}
	port := func(neighbour, device, address string) string {
		return fmt.Sprintf(" %s\n    Interface: %s, Level: 2, State: Up, Expires in 10s\n    Global IPv6 Address(es):\n      %s\n\n", neighbour, device, address)
	}
	end := func(address string) string { return "  IPv4 Interface Address: " + address + "\n" }
	text = []byte(strings.NewReplacer(append(more,
		"Area 1:\n b ", "Area 1:\n"+port("b", "pb", "fd00:b::2")+port(ams, "pc", "fd00:c::3")+" b ",
		end("10.77.1.1"), to("2", "50", "fd00:b::2")+to("3", "55", "fd00:c::3")+end("10.77.1.1"),
		end("10.77.1.2"), to("1", "50", "fd00:b::1")+end("10.77.1.2"),
		end("10.77.1.3"), to("1", "55", "fd00:c::1")+end("10.77.1.3"))...).Replace(string(text)))
	n, err := topo.Read("isis-lan.txt", text)
	if err != nil {
		t.Fatal(err)
	}
	a, err := plan.Ask(n, plan.Question{Node: n.Self, Options: plan.Options{Mode: plan.Link}})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// A prefix announced by all routers of a LAN, including this one, is connected here: its packets go to no router.
func TestPlannedLAN(t *testing.T) {
	paths, notes, err := Planned(lanOf(t))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, p := range paths {
		got = append(got, fmt.Sprint(p.Name, p.Device, p.Prefixes, p.Repairs[0].Device, p.Repairs[0].Via))
	}
	if want := []string{"plan-lan-1lan[fd00:ff::2/128 fd00:ff::4/128]pbfd00:b::2", "plan-lan-2lan[fd00:ff::3/128]pcfd00:c::3"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q; notes %q", got, want, notes)
	}
	// The same paths pass validation.
	if errs := (&protect.Config{Paths: paths}).Validate(); len(errs) > 0 {
		t.Error(errs)
	}
}

// A prefix of several routers belongs to the nearest by metric. If several are equally near, their common repair
// applies, or the prefix is omitted with a note.
func TestPlannedAnycast(t *testing.T) {
	const prefix = "fd00:bb::/64"
	announce := func(router, metric string) []string {
		line := fmt.Sprintf("  MT IPv6 Reachability: fd00:ff::%s/128 (Metric: 10) ipv6-unicast\n", router)
		return []string{line, line + fmt.Sprintf("  MT IPv6 Reachability: %s (Metric: %s) ipv6-unicast\n", prefix, metric)}
	}
	for name, c := range map[string]struct {
		more        []string
		with, noted string
	}{
		"b is nearer":               {append(announce("2", "10"), announce("3", "11")...), "plan-lan-1", ""},
		"amsterdam is nearer":       {append(announce("2", "12"), announce("3", "11")...), "plan-lan-2", ""},
		"of one way":                {append(announce("2", "10"), announce("4", "10")...), "plan-lan-1", ""},
		"of two ways":               {append(announce("2", "10"), announce("3", "10")...), "", "fd00:bb::/64 behind lan: packets for it go to several routers with different repairs: "},
		"the router's own":          {append(announce("1", "10"), announce("3", "1")...), "", ""},
		"far away, and one nearest": {slices.Concat(announce("2", "90"), announce("3", "90"), announce("4", "80")), "plan-lan-1", ""},
	} {
		t.Run(name, func(t *testing.T) {
			paths, notes, err := Planned(lanOf(t, c.more...))
			if err != nil {
				t.Fatal(err)
			}
			with := ""
			for _, p := range paths {
				for _, x := range p.Prefixes {
					if x.String() == prefix {
						with += p.Name
					}
				}
			}
			noted := slices.ContainsFunc(notes, func(s string) bool { return strings.Contains(s, prefix) })
			if with != c.with || noted != (c.noted != "") || c.noted != "" && !strings.Contains(strings.Join(notes, "\n"), c.noted) {
				t.Errorf("it is with %q, want %q; notes %q", with, c.with, notes)
			}
		})
	}
}

// For a failed neighbour on a LAN, a repair through the same LAN is not installed, because an interface is protected
// as a whole. All others are.
func TestPlannedAroundNode(t *testing.T) {
	n, err := topo.Read("hall.yaml", []byte(`nodes: [{name: a}, {name: b}, {name: c}, {name: d, prefixes: ["fd00:d::/64"]}, {name: e, prefixes: ["fd00:e::/64"]}]
links:
  - {from: a, to: b, interface: eth0, lan: hall, back: {address: "fd00:1::b"}}
  - {from: a, to: c, interface: eth0, lan: hall, metric: 2, back: {address: "fd00:1::c"}}
  - {from: b, to: d}
  - {from: c, to: d, metric: 3}
  - {from: a, to: e, interface: eth1, back: {address: "fd00:2::e"}}
  - {from: e, to: c}
  - {from: c, to: e, metric: 9}
`))
	if err != nil {
		t.Fatal(err)
	}
	a, err := plan.Ask(n, plan.Question{Node: "a", Options: plan.Options{Mode: plan.Node, Fallback: true}})
	if err != nil {
		t.Fatal(err)
	}
	paths, notes, err := Planned(a)
	if err != nil || len(paths) != 1 || paths[0].Device != "eth1" {
		t.Errorf("%v, %v", paths, err)
	}
	if !slices.ContainsFunc(notes, func(s string) bool {
		return strings.Contains(s, "d without node b: the repair leaves by eth0 too")
	}) {
		t.Errorf("notes %q", notes)
	}
}
