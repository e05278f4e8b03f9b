// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/service"
)

// planned returns the outages and steps of applying the configuration.
func (w *world) planned() (outages, steps []string) {
	w.t.Helper()
	c := spec.Config{Services: append([]spec.Service{}, w.cfg.Services...)}
	for i := range c.Services {
		c.Services[i].Members = append([]service.Member{}, c.Services[i].Members...)
	}
	if errs := c.Validate(); len(errs) > 0 {
		w.t.Fatal(errs)
	}
	st, err := state.Read(w.t.Context(), w.root)
	if err != nil {
		w.t.Fatal(err)
	}
	p, err := Feature{}.Plan(w.t.Context(), st, c)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, s := range p.Steps {
		steps = append(steps, s.String())
	}
	return p.Outages, steps
}

// TestPlanSaysWhatItEmpties reports slots that a plan would empty, and traffic it would direct to an empty slot. Other
// plans have no outage.
func TestPlanSaysWhatItEmpties(t *testing.T) { eachEngine(t, testPlanSaysWhatItEmpties) }

func testPlanSaysWhatItEmpties(t *testing.T) {
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w := newWorld(t, spec.Options{Slots: 2, OnEmpty: spec.Next}, "udp 0.0.0.0:9991")
	w.member(0, a)
	w.apply()
	stands := w.cfg.Services[0]
	for _, c := range []struct {
		name string
		to   func(s *spec.Service)
		want string // substring of the outage; empty: none
	}{
		{"the same", func(*spec.Service) {}, ""},
		{"a port that nobody has", func(s *spec.Service) { s.Listen = append(s.Listen, mustListen(t, "udp 0.0.0.0:2055")) }, "slot 0 of service svc would be emptied: process"},
		{"a port that the member has", func(s *spec.Service) { s.Listen = append(s.Listen, mustListen(t, "tcp 0.0.0.0:9991")) }, ""},
		{"one listen in place of another", func(s *spec.Service) { s.Listen = []service.Listen{mustListen(t, "udp 0.0.0.0:2055")} }, "slot 0 of service svc would be emptied"},
		{"on_empty", func(s *spec.Service) { s.OnEmpty = spec.Reject }, "slot 1 of service svc is empty and would get 50 % of the service's traffic, served now"},
		{"a member for it", func(s *spec.Service) {
			s.OnEmpty = spec.Reject
			s.Members = append(s.Members[:1:1], service.Member{Slot: 1, PID: b.pid()})
		}, ""},
		{"a slot more", func(s *spec.Service) { s.Slots = 3 }, ""}, // on_empty: next
		{"a slot more that rejects", func(s *spec.Service) { s.Slots, s.OnEmpty = 3, spec.Drop }, "slot 2 of service svc would get 33 % of the service's traffic"},
		{"seed", func(s *spec.Service) { s.Seed = randomSeed() }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := stands
			c.to(&s)
			w.t, w.cfg.Services[0] = t, s
			outages, steps := w.planned()
			if c.want == "" && len(outages) > 0 || !strings.Contains(strings.Join(outages, "\n"), c.want) {
				t.Errorf("%q would take away %q, want %q", steps, outages, c.want)
			}
		})
	}
	w.t, w.cfg.Services[0] = t, stands
}

// TestLimitsAreToldBeforeAnythingChanges: exceeded limits of an engine are reported before any change, with the
// service's name.
func TestLimitsAreToldBeforeAnythingChanges(t *testing.T) {
	of := func(n, slots int) (all []target) {
		for range n {
			all = append(all, target{scope: "1", service: spec.Service{Options: spec.Options{Engine: spec.EngineSkLookup, Slots: slots}}})
		}
		return all
	}
	for _, c := range []struct {
		name           string
		services, rows int // in use
		want           []target
		ok             bool
	}{
		{"as many as can be", 0, 0, of(spec.MaxServices, 4), true},
		{"a service too many", 0, 0, of(spec.MaxServices+1, 1), false},
		{"slots too many", 0, 0, of(17, 256), false},
		{"beside those that go", 1000, 1000, of(25, 1), false},
		{"beside slots that go", 10, 4000, of(1, 200), false},
		{"generations have two rows", 0, 0, append(of(15, 256), target{scope: "1", service: spec.Service{Options: spec.Options{Engine: spec.EngineSkLookup, Slots: 200, Generations: &spec.Generations{}}}}), false},
	} {
		have := state.State{}
		for i := range c.services {
			have.Services = append(have.Services, state.Service{Name: string(rune('a' + i)), PinScope: "1", Engine: spec.EngineSkLookup, Record: &record.Service{Rows: make([]uint32, c.rows/c.services)}})
		}
		if err := checkLimits(have, c.want); (err == nil) != c.ok {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestRemovalReachesMembersAtThePort: a member on the service's port still gets traffic after the removal. A member on
// another port does not.
func TestRemovalReachesMembersAtThePort(t *testing.T) {
	a := startSink(t, "udp4=0.0.0.0:9991")
	for bound, want := range map[string]int{"udp 0.0.0.0:9991": 0, "udp 0.0.0.0:9992": 1} {
		w := newWorld(t, spec.Options{Slots: 1}, "udp 127.0.0.0/8:9991")
		s := a
		if want > 0 {
			s = startSink(t, "udp4=0.0.0.0:9992")
		}
		w.member(0, s, bound)
		w.apply()
		if !w.state().Slots[0].Admitted() {
			t.Fatalf("bound %s: %s", bound, w.state().Slots[0].Reason)
		}
		st, err := state.Read(t.Context(), w.root)
		if err != nil {
			t.Fatal(err)
		}
		p, err := Feature{}.Plan(t.Context(), st, spec.Config{})
		if err != nil || len(p.Outages) != want {
			t.Errorf("bound %s: removal has outages %q, %v, want %d", bound, p.Outages, err, want)
		}
		w.cfg.Services = nil
		w.apply()
	}
}
