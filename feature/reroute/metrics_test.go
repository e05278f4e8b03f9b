// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/feature/reroute/protect"
)

// A learnt size is reported by a metric and a finding; an interface's own MTU is not.
func TestLearntSizeIsTold(t *testing.T) {
	p := protect.PathState{Name: "core", Netns: "net", Attached: true, Repairs: []protect.RepairState{{Device: "eth1", MTU: 1500}, {Device: "eth2", MTU: 1400, Fits: 1336, Learnt: true}}}
	var sizes []string
	path(p, func(d *prometheus.Desc, _ prometheus.ValueType, v float64, labels ...string) {
		if d == learntDesc {
			sizes = append(sizes, fmt.Sprint(labels, v))
		}
	})
	if !slices.Equal(sizes, []string{"[core net 2] 1400"}) {
		t.Errorf("the metrics are %q", sizes)
	}
	found := learntSizes(p)
	if len(found) != 1 || found[0].Text != "a link on the way of repair 2 has an MTU of 1400 bytes, less than eth2" {
		t.Errorf("findings: %+v", found)
	}
	p.Repairs[1].MTU, p.Repairs[1].Fits = 1344, 1280
	if found := learntSizes(p); len(found) != 1 || found[0].Remedy != "give the link a larger MTU" {
		t.Errorf("findings of a link that takes less than IPv6 needs: %+v", found)
	}
}

// Doctor's remedy for a path not in force is the instruction in its problem.
func TestProblemRemedy(t *testing.T) {
	w := newWorld(t)
	w.apply(fmt.Sprintf(`
reroute:
  - {name: there, netns: %[1]s, interface: r12, repairs: [{segments: [fc00:3::e, fc00:2::d6], interface: r13, via: "fe80::3"}]}
  - {name: absent, netns: %[1]s, interface: nil0, repairs: [{interface: r13, via: "fe80::3"}]}
  - {name: degraded, netns: %[1]s, interface: r13, repairs: [{interface: r12, via: "fe80::2"}, {interface: nil0, via: "fe80::3"}]}
`, w.name[w.r1]))
	w.ip(w.r1, "addr flush scope global")
	found, err := Feature{}.Examine(t.Context(), w.root)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []feature.Finding{
		{Object: "path there", Text: "repair 1: this host has no global IPv6 address for outer headers", Remedy: "say source in the file, then weir apply", Fails: true},
		{Object: "path absent", Text: "there is no interface nil0: nothing is rerouted until it exists", Remedy: "weir serve applies it once this has changed; else change the path in the file, then weir apply", Fails: true},
		{Object: "path degraded", Text: "repair 2: there is no interface nil0: nothing is rerouted until it exists", Remedy: "weir serve applies it once this has changed; else change the path in the file, then weir apply"},
	} {
		if !slices.Contains(found, want) {
			t.Errorf("no %+v in %+v", want, found)
		}
	}
}

// A missing repair, and a link bfdd does not judge, are warnings. A path without a repair in force is a failure.
func TestDegradedIsNoFailure(t *testing.T) {
	const absent = "repair 2: there is no interface wg0: nothing is rerouted until it exists"
	path := func(inForce bool) []protect.PathState {
		return []protect.PathState{{Name: "core", Device: "eth1", Attached: true, InForce: inForce, Problems: []string{absent}}}
	}
	for name, x := range map[string]struct {
		st    State
		fails bool
	}{
		"another repair in force":  {State{Paths: path(true)}, false},
		"no other repair in force": {State{Paths: path(false)}, true},
		"nobody judges":            {State{BFD: []peers.SessionState{{Name: "core", Unjudged: true, Problem: "nobody judges link eth1"}}}, false},
		"no device":                {State{BFD: []peers.SessionState{{Name: "core", Problem: "there is no interface eth1"}}}, true},
	} {
		if found := x.st.findings(); len(found) != 1 || found[0].Fails != x.fails || len(x.st.Failures()) > 0 != x.fails {
			t.Errorf("%s: %+v", name, found)
		}
	}
}

// Sessions without a key are one warning of doctor, and no failure.
func TestKeyless(t *testing.T) {
	found := keyless([]peers.SessionState{{Name: "a", Keyless: true}, {Name: "keyed"}, {Name: "gone", Keyless: true, Gone: true}, {Name: "frr", FRR: "unix:/x"}, {Name: "b", Keyless: true}})
	if len(found) != 1 || found[0].Fails || !strings.HasPrefix(found[0].Text, "a, b: ") || !strings.Contains(found[0].Remedy, "key_file") {
		t.Errorf("%+v", found)
	}
	if found := keyless([]peers.SessionState{{Name: "keyed"}}); len(found) > 0 {
		t.Errorf("of keyed ones: %+v", found)
	}
}

// The documentation and the metric's help explain each fate.
func TestFatesAreTold(t *testing.T) {
	page, err := os.ReadFile("../../docs/REROUTE.md")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	path(protect.PathState{}, func(d *prometheus.Desc, _ prometheus.ValueType, _ float64, labels ...string) {
		if d != packetsDesc {
			return
		}
		n++
		fate := labels[2]
		if !strings.Contains(string(page), "\n| `"+fate+"` |") {
			t.Errorf("docs/REROUTE.md does not tell of fate %q", fate)
		}
		if !strings.Contains(d.String(), fate) {
			t.Errorf("the help does not tell of fate %q: %s", fate, d)
		}
	})
	if n < 8 {
		t.Errorf("%d fates", n)
	}
}
