// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/service"
)

// TestPlanSaysWhatACreationTakes reports the traffic of a running daemon that a new service at its port would direct to
// an empty slot.
func TestPlanSaysWhatACreationTakes(t *testing.T) {
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	at := fmt.Sprintf("process %d", a.pid())
	for _, c := range []struct {
		name   string
		listen string
		o      spec.Options
		member bool
		want   []string // one for each outage
	}{
		{"a port that nobody has", "udp 0.0.0.0:2055", spec.Options{Slots: 2}, false, nil},
		{"no member", "udp 0.0.0.0:9991", spec.Options{Slots: 2}, false, []string{"slot 0 of service svc would stay empty (on_empty: reject) and get 50 % of the traffic of " + at, "slot 1"}},
		{"one member of two", "udp 0.0.0.0:9991", spec.Options{Slots: 2, OnEmpty: spec.Drop}, true, []string{"slot 1 of service svc would stay empty (on_empty: drop)"}},
		{"one address", "tcp 127.0.0.7:9991", spec.Options{Slots: 1}, false, []string{"slot 0"}},
		{"an address that is not local", "tcp 192.0.2.7:9991", spec.Options{Slots: 1}, false, nil},
		{"another family", "udp6 [::]:9991", spec.Options{Slots: 1}, false, nil},
		{"all slots served", "udp 0.0.0.0:9991", spec.Options{Slots: 1}, true, nil},
		{"no share", "udp 0.0.0.0:9991", spec.Options{Slots: 2, Weights: spec.Weights{1: 0}}, true, nil},
		{"next", "udp 0.0.0.0:9991", spec.Options{Slots: 2, OnEmpty: spec.Next}, true, nil},
		{"next of nobody", "udp 0.0.0.0:9991", spec.Options{Slots: 2, OnEmpty: spec.Next}, false, []string{"slot 0", "slot 1"}},
		{"pass", "udp 0.0.0.0:9991", spec.Options{Slots: 2, OnEmpty: spec.Pass}, false, nil},
		{"sk_reuseport without members", "udp 0.0.0.0:9991", spec.Options{Slots: 2, Engine: spec.EngineReuseport}, false, nil},
		{"sk_reuseport with one", "udp 0.0.0.0:9991", spec.Options{Slots: 2, Engine: spec.EngineReuseport}, true, []string{"slot 1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, c.o, c.listen)
			if c.member {
				w.member(0, a)
			}
			outages, _ := w.planned()
			if len(outages) != len(c.want) {
				t.Fatalf("outages %q, want %q", outages, c.want)
			}
			for i, want := range c.want {
				remedy := "name a member for it"
				if c.o.Slots > 1 { // the only slot needs its weight
					remedy += ", or set its weight to 0"
				}
				if !strings.Contains(outages[i], want) || !strings.HasSuffix(outages[i], remedy) {
					t.Errorf("outage %q, want %q and %q", outages[i], want, remedy)
				}
			}
		})
	}
}

// TestPlanSaysWhatAChangeTakesFromTheKernel reports the traffic taken from a daemon by an additional listen, or by an
// on_empty that replaces pass. A renamed service takes no more than before.
func TestPlanSaysWhatAChangeTakesFromTheKernel(t *testing.T) {
	startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:2055")
	w.apply()
	s := &w.cfg.Services[0]
	check := func(what string, want ...string) {
		t.Helper()
		outages, steps := w.planned()
		if len(outages) != len(want) || len(want) > 0 && !strings.Contains(outages[0], want[0]) {
			t.Errorf("%s: %q would take away %q, want %q", what, steps, outages, want)
		}
	}
	was := s.Listen
	s.Listen = append(s.Listen[:1:1], mustListen(t, "tcp 0.0.0.0:9991"))
	check("an added listen", "slot 0 of service svc would stay empty (on_empty: reject) and get 100 %")
	s.OnEmpty = spec.Pass
	check("an added listen that passes")
	w.apply()
	s.OnEmpty = spec.Drop
	check("on_empty", "slot 0 of service svc would stay empty (on_empty: drop)")
	w.apply()
	s.Name = "renamed"
	check("another name")
	s.Listen = append(s.Listen, mustListen(t, "udp 0.0.0.0:9991"))
	check("another name and one more listen", "slot 0 of service renamed would stay empty (on_empty: drop) and get 100 %")
	s.Name, s.Listen = "svc", []service.Listen{was[0]}
	check("the listen gone")
}
