// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// outages returns the outages in the plan of a file.
func (w *world) outages(text string) string {
	w.Helper()
	plan, err := Feature{}.Plan(w.Context(), w.state(), w.parse(text))
	if err != nil {
		w.Fatal(err)
	}
	return strings.Join(plan.Outages, "\n")
}

// A repair at a missing interface is refused in place of a working one. It is accepted beside a repair from the
// routing table, and in place of a repair with a deleted interface.
func TestAbsentRepairs(t *testing.T) {
	nstest.NeedRoot(t)
	const byTable, absent, elsewhere = "{segments: [fc00:3::1]}", "{segments: [fc00:3::2], interface: nil0, via: fd00:13::3}", "{segments: [fc00:3::1], interface: lo, via: fd00:12::3}"
	for name, x := range map[string]struct {
		published, repairs string
		refused            bool
	}{
		"in place of one that works":           {"eth2", absent, true},
		"in place of the routing table's":      {"eth2", elsewhere + ", " + absent, true},
		"beside the routing table's":           {"eth2", byTable + ", " + absent, false},
		"the routing table's, without another": {"eth2", byTable, false},
		"in place of one that has gone":        {"", absent, false},
	} {
		want, err := parse("reroute: [{name: core, interface: eth9, repairs: [" + x.repairs + "]}]")
		if err != nil {
			t.Fatal(err)
		}
		have := State{Paths: []protect.PathState{{Name: "core", Device: "eth9", Attached: true, Repairs: []protect.RepairState{{Device: x.published}}}}}
		plan := feature.Plan{}
		refuseAbsent(&plan, have, want, namespacesByRef{})
		if refused := len(plan.Outages) > 0; refused != x.refused {
			t.Errorf("%s: outages %q", name, plan.Outages)
		}
	}
}

// An attached path does not move to an interface unable to hold its program.
func TestInterfaceWithoutEthernet(t *testing.T) {
	nstest.NeedRoot(t)
	want, err := parse("reroute: [{name: core, interface: lo, segments: [fc00:3::1]}]")
	if err != nil {
		t.Fatal(err)
	}
	plan := feature.Plan{}
	refuseAbsent(&plan, State{Paths: []protect.PathState{{Name: "core", Device: "eth9", Attached: true}}}, want, namespacesByRef{})
	if text := strings.Join(plan.Outages, "\n"); !strings.Contains(text, "packets of lo have no Ethernet header") {
		t.Errorf("outages %q", text)
	}
}

// A change sending packets back to a dead link is an outage and names the link. Other changes are not.
func TestOutages(t *testing.T) {
	w := newWorld(t)
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	text := w.config()
	w.apply(text)
	w.eventually("both ends are up", func() bool {
		st := w.state()
		return len(st.Sessions) == 2 && st.Sessions[0].Phase == liveness.Up && st.Sessions[1].Phase == liveness.Up
	})
	if got := w.outages("reroute: []"); got != "" {
		t.Errorf("of links that are used: %s", got)
	}
	if err := w.r1.Do(func() error {
		l, err := netlink.LinkByName("r13")
		if err != nil {
			return err
		}
		return netlink.LinkAddAltName(l, "another13")
	}); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{
		strings.Replace(text, "interface: r13", "interface: another13", 1): `reroute\.there: repairs: it works at r13 now, and would not at another13: another13 is an alternative name of interface r13, `,
		strings.Replace(text, "interface: r12", "interface: r1x", 1):       `reroute\.there: interface: it works at r12 now, and would not at r1x: there is no interface r1x in \S+: correct the name`,
		strings.Replace(text, "interface: r13", "interface: r3x", 1):       `reroute\.there: repairs: it works at r13 now, and would not at r3x: there is no interface r3x in `,
		strings.Replace(text, "hold: 300ms", "hold: 200ms", 1):             `^$`,
	} {
		if got := w.outages(text); !regexp.MustCompile(want).MatchString(got) {
			t.Errorf("outages %q, want %s", got, want)
		}
	}
	ends := strings.SplitAfter(text, "  - name: back")
	without := regexp.MustCompile(`(?m)^ *probe: .*$`)
	there := `(?s)^reroute of path there: interface r12 in \S+ is down \(%s\) and its packets are rerouted: %s, so they are sent to the link again$`
	check := func(why string, changes map[string][2]string) {
		t.Helper()
		for name, c := range changes {
			want := "^$"
			if c[1] != "" {
				want = strings.Replace(strings.Replace(there, "%s", why, 1), "%s", c[1], 1)
			}
			if got := w.outages(c[0]); !regexp.MustCompile(want).MatchString(got) {
				t.Errorf("%s, %s: outages %q, want %s", why, name, got, want)
			}
		}
	}
	a, b := w.cut(w.r1, "r12"), w.cut(w.r2, "r21")
	w.links("both ends reroute", func(p protect.PathState) bool { return p.Down && p.Probe })
	if got := w.outages("reroute: []"); strings.Count(got, "\n") != 1 || !strings.Contains(got, "path there: interface r12") || !strings.Contains(got, "path back: interface r21") {
		t.Errorf("of everything: %s", got)
	}
	none := "no path of the link is left"
	session := "session there, the one with the down verdict, is removed or only observes"
	check("not answered", map[string][2]string{
		"the same":           {text, ""},
		"another name":       {strings.Replace(text, "name: there", "name: other", 1), session},
		"no path":            {"reroute:\n  - name: back" + ends[1], none},
		"no probe":           {without.ReplaceAllString(ends[0], "") + ends[1], session},
		"a probe that sees":  {strings.Replace(text, "probe: {id: 7", "probe: {observe: true, id: 7", 1), session},
		"a shadow":           {strings.Replace(text, "hold: 300ms", "shadow: true", 1), "path there becomes a shadow"},
		"one prefix":         {strings.Replace(text, "hold: 300ms", "prefix: fd00:d::/64", 1), none},
		"another probe":      {strings.Replace(text, "id: 7", "id: 8", 1), ""},
		"another way":        {strings.Replace(text, "fc00:3::e, ", "", 1), ""},
		"two paths":          {strings.Replace(text, "reroute:", "reroute:\n  - {name: dest, netns: "+w.name[w.r1]+", interface: r12, prefix: 'fd00:d::/64', repairs: [{interface: r13, via: 'fd00:13::3'}]}", 1), ""},
		"two, one is shadow": {strings.Replace(text, "reroute:", "reroute:\n  - {name: dest, netns: "+w.name[w.r1]+", interface: r12, prefix: 'fd00:d::/64', shadow: true, repairs: [{interface: r13, via: 'fd00:13::3'}]}", 1), ""},
		"BFD in place of it": {without.ReplaceAllString(ends[0], "    bfd: {peer: 'fd00:12::2'}") + ends[1], session},
	})
	w.locked(func(l *kernel.WriteLock) error { return Drain(l, "there") })
	check("not answered, drained", map[string][2]string{"no probe": {without.ReplaceAllString(ends[0], "") + ends[1], ""}, "no path": {"reroute:\n  - name: back" + ends[1], none}})
	a.Close()
	b.Close()
	w.eventually("only the drain is left", func() bool {
		return !slices.ContainsFunc(w.state().Paths, func(p protect.PathState) bool { return p.Probe || p.Down != p.Drain || p.Drain != (p.Name == "there") })
	})
	check("drained", map[string][2]string{"the same": {text, ""}, "no path": {"reroute:\n  - name: back" + ends[1], none}})
}

// The same for a link found down by BFD.
func TestBFDOutages(t *testing.T) {
	w := newWorld(t)
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	text := w.bothByBFD()
	w.apply(text)
	w.bothUp()
	a, b := w.cut(w.r1, "r12"), w.cut(w.r2, "r21")
	defer a.Close()
	defer b.Close()
	w.links("both ends reroute", func(p protect.PathState) bool { return p.Down && p.Probe })
	for name, c := range map[string]struct {
		text string
		want int
	}{
		"the same":        {text, 0},
		"other intervals": {strings.ReplaceAll(text, "interval: 10ms", "interval: 20ms"), 0},
		"observing":       {strings.ReplaceAll(text, "interval: 10ms", "interval: 10ms, observe: true"), 2},
		"another peer":    {strings.Replace(text, "peer: fd00:12::2", "peer: fd00:12::3", 1), 1},
		"none":            {strings.ReplaceAll(text, "    bfd:", "    # bfd:"), 2},
	} {
		if got := w.outages(c.text); strings.Count(got, "BFD session ") != c.want {
			t.Errorf("%s: outages %q, want %d", name, got, c.want)
		}
	}
}
