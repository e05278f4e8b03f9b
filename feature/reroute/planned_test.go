// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/plan"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/feature/reroute/topo"
	"github.com/weir-project/weir/kernel"
)

// triangle is the world's network in weir's own format.
const triangle = `
name: triangle
nodes:
  - {name: r1, prefixes: [fd00:a::/64]}
  - {name: r2, prefixes: [fd00:d::/64], dt6: "fc00:2::d6", end: "fc00:2::e"}
  - {name: r3, end: "fc00:3::e"}
links:
  - {from: r1, to: r2, metric: 1, interface: r12, address: "fd00:12::1", back: {metric: 1, interface: r21, address: "fd00:12::2"}}
  - {from: r1, to: r3, metric: 1, interface: r13, address: "fd00:13::1", back: {metric: 1, interface: r31, address: "fd00:13::3"}}
  - {from: r3, to: r2, metric: 1, interface: r32, address: "fd00:32::3", back: {metric: 1, interface: r23, address: "fd00:32::2"}}
`

func planOf(t *testing.T, text, node string) *plan.Answer {
	t.Helper()
	n, err := topo.Read("triangle.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	a, err := plan.Ask(n, plan.Question{Node: node, Options: plan.Options{Mode: plan.Link}})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// The printed plan is a section of weir.yaml with the plan's paths.
func TestPlannedYAML(t *testing.T) {
	paths, notes, err := Planned(planOf(t, triangle, "r1"))
	if err != nil {
		t.Fatal(err)
	}
	text, err := PlannedYAML(paths)
	if err != nil {
		t.Fatal(err)
	}
	c, err := parse(string(text))
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	got := c.protection().Paths
	if len(got) != 1 || got[0].Device != "r12" || got[0].Repairs[0].Device != "r13" || got[0].Repairs[0].Via.String() != "fd00:13::3" || got[0].Prefixes[0].String() != "fd00:d::/64" {
		t.Errorf("%s", text)
	}
	// r3 has no prefix, so nothing is installed for it, with a note.
	if all := strings.Join(notes, "\n"); !strings.Contains(all, "r3 without") || !strings.Contains(all, "no prefix") {
		t.Errorf("notes %q", notes)
	}
	_, _, err = Planned(planOf(t, strings.ReplaceAll(triangle, "interface: r12,", ""), "r1"))
	if !errors.Is(err, errNothingPlanned) || !strings.Contains(err.Error(), "name the interface") {
		t.Errorf("without an interface: %v", err)
	}
}

// IPv4 prefixes take repairs with their own segments, or are noted without any.
func TestPlannedIPv4(t *testing.T) {
	// The repair over r3 needs a segment, because r3 would send packets back.
	text := strings.NewReplacer("prefixes: [fd00:d::/64]", "prefixes: [fd00:d::/64, 10.2.0.0/24]", "{from: r3, to: r2, metric: 1", "{from: r3, to: r2, metric: 9, endx: 'fc00:3::2'").Replace(triangle)
	paths, notes, err := Planned(planOf(t, text, "r1"))
	if all := strings.Join(notes, "\n"); err != nil || len(paths) != 1 || len(paths[0].Prefixes) != 1 || len(paths[0].Repairs[0].Segments4) != 0 ||
		!strings.Contains(all, "10.2.0.0/24 of r2 without r1→r2 (r12): IPv4 packets have no way around: r2 has no End.DT4 SID") {
		t.Errorf("without End.DT4: %v, %+v, %q", err, paths, notes)
	}
	paths, notes, err = Planned(planOf(t, strings.Replace(text, "dt6:", `dt4: "fc00:2::d4", dt6:`, 1), "r1"))
	if err != nil || len(paths) != 1 || len(paths[0].Prefixes) != 2 || strings.Contains(strings.Join(notes, "\n"), "IPv4") {
		t.Fatalf("with End.DT4: %v, %+v, %q", err, paths, notes)
	}
	section, err := PlannedYAML(paths)
	if err != nil {
		t.Fatal(err)
	}
	c, err := parse(string(section))
	if err != nil || fmt.Sprint(c.protection().Paths[0].Repairs[0].Segments4) != "[fc00:3::2 fc00:2::d4]" {
		t.Errorf("%v\n%s", err, section)
	}
}

// An installed plan keeps traffic flowing, beside existing paths, and is replaced by the next one.
func TestInstall(t *testing.T) {
	w := newWorld(t)
	planned := func() []protect.Path {
		paths, _, err := Planned(planOf(t, triangle, "r1"))
		if err != nil {
			t.Fatal(err)
		}
		for i := range paths {
			paths[i].Netns = w.name[w.r1]
		}
		return paths
	}
	w.apply("reroute: [{name: mine, netns: " + w.name[w.r2] + ", interface: r21, prefix: fd00:a::/64, repairs: [{interface: r23, via: 'fd00:32::3'}]}]")
	install := func() (done []string) {
		w.locked(func(l *kernel.WriteLock) (err error) {
			done, err = Install(context.Background(), l, planned(), false)
			return err
		})
		return done
	}
	if done := install(); len(done) == 0 {
		t.Error("nothing was done")
	}
	if done := install(); len(done) != 0 {
		t.Errorf("installed again: %q", done)
	}
	st := w.state()
	if len(st.Paths) != 2 {
		t.Fatalf("%+v", st.Paths)
	}
	s := w.stream()
	w.flows(s)
	w.locked(func(l *kernel.WriteLock) error { return errors.Join(Drain(l, "plan-r12-1"), Drain(l, "mine")) })
	w.links("both are rerouted", func(p protect.PathState) bool { return p.Down })
	w.flows(s)
	for _, p := range w.state().Paths {
		if p.Counts.Packets == 0 {
			t.Errorf("%s: nothing was rerouted", p.Name)
		}
	}
	// Plans of another router have other interfaces, or other neighbours on interfaces with these names.
	for name, change := range map[string]func(p *protect.Path){
		"no interface r21 here":        func(p *protect.Path) { p.Device = "r21" },
		"no interface r99 here":        func(p *protect.Path) { p.Repairs[0].Device = "r99" },
		"fd00:13::1, a neighbour":      func(p *protect.Path) { p.Repairs[0].Via = netip.MustParseAddr("fd00:13::1") },
		"in no network of interface r": func(p *protect.Path) { p.Repairs[0].Via = netip.MustParseAddr("fd00:23::3") },
	} {
		paths := planned()
		for i := range paths {
			change(&paths[i])
		}
		w.locked(func(l *kernel.WriteLock) error {
			if _, err := Install(context.Background(), l, paths, true); !errors.Is(err, errOtherRouter) || !strings.Contains(err.Error(), name) {
				t.Errorf("%s: %v", name, err)
			}
			return nil
		})
	}
	// A plan without a repair of the link would send rerouted packets to it.
	other := planned()
	for i := range other {
		other[i].Device, other[i].Repairs[0].Device = "in", "r13"
	}
	w.locked(func(l *kernel.WriteLock) error {
		if _, err := Install(context.Background(), l, other, false); !errors.Is(err, feature.ErrOutage) || !strings.Contains(err.Error(), "path plan-r12-1: interface r12") {
			t.Errorf("a plan without the link that is drained: %v", err)
		}
		if _, err := Install(context.Background(), l, other, true); err != nil {
			t.Errorf("allowed: %v", err)
		}
		return nil
	})
}
