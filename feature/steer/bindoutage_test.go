// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// Bindings that lead served traffic to a service without a socket say so: that of a process at the port, and that of the
// service that they led to.
func TestBindingsSayWhatTheyTake(t *testing.T) {
	a := startSink(t, "udp4=0.0.0.0:9991")
	w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9992")
	w.member(0, startSink(t, "udp4=0.0.0.0:9992"))
	w.apply()
	w.register("full", a, "udp4 0.0.0.0:9991")
	w.bind("full udp 127.0.1.0/24 9000")
	w.bind("full udp 127.0.4.0/24 9000")
	for _, c := range []struct {
		binding string
		want    string
	}{
		{"none udp 127.0.0.0/24 9991", fmt.Sprintf("none has no socket for it; process %d", a.pid())},
		{"none udp 127.0.0.7/32 0", fmt.Sprintf("none has no socket for it; process %d", a.pid())},
		{"none udp 127.0.0.0/24 9993", ""}, // nobody has the port
		{"none tcp 127.0.0.0/24 9991", ""}, // nor that one
		{"none udp 192.0.2.0/24 9991", ""}, // not this host's
		{"full udp 127.0.0.0/24 9991", ""},
		{"none udp 127.0.1.0/24 9000", "would take traffic from full, which has a socket for it; none has no socket"},
		{"none udp 127.0.1.5/32 9000", "would take traffic from full, which has a socket for it; none has no socket"}, // a part of it
		{"none udp 127.0.1.5/32 9001", ""},
		{"none udp 127.0.4.0/22 9000", ""}, // a longer one has its part
		{"svc udp 127.0.0.0/24 9991", fmt.Sprintf("svc has a slot without a member; process %d", a.pid())}, // slot 1 is empty
	} {
		plan, err := OutagesOfBindings(t.Context(), w.root, here(t), []bindings.Binding{binding(t, c.binding)}, true)
		text := strings.Join(plan.Outages, "\n")
		if err != nil || c.want == "" && text != "" || !strings.Contains(text, c.want) {
			t.Errorf("%s: %q, %v, want %q", c.binding, text, err, c.want)
		}
	}
}

// What is damaged elsewhere keeps nobody from binding, and from being told.
func TestBindingsBesideDamage(t *testing.T) {
	a := startSink(t, "udp4=0.0.0.0:9991")
	w := newWorld(t, spec.Options{Slots: 2, Engine: spec.EngineReuseport}, "udp 0.0.0.0:9992")
	w.apply()
	w.register("full", a, "udp4 0.0.0.0:9991")
	w.bind("full udp 127.0.1.0/24 9000")
	s := w.state()
	if err := os.RemoveAll(w.root.Path() + "/steer/" + s.PinScope + "/" + record.EngineInstance(s.PinScope, spec.EngineReuseport).Name); err != nil {
		t.Fatal(err)
	}
	plan, err := OutagesOfBindings(t.Context(), w.root, here(t), []bindings.Binding{binding(t, "none udp 127.0.0.0/24 9991")}, true)
	if err != nil || len(plan.Outages) != 1 {
		t.Errorf("%q, %v", plan.Outages, err)
	}
	w.cfg.Services[0].Name, w.cfg.Services[0].Engine = "other", spec.EngineSkLookup
	w.planned() // panicked
}

// A binding reads the services that it is about, not all of them: there may be 65,536, and reading them took seconds.
func TestBindingsReadTheirServices(t *testing.T) {
	a := startSink(t, "udp4=0.0.0.0:9991")
	w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9992")
	w.apply()
	w.register("full", a, "udp4 0.0.0.0:9991")
	w.bind("full udp 127.0.1.0/24 9000")
	w.locked(func(l *kernel.WriteLock) error {
		e, err := engine.OpenEngine(l, record.Scope(here(t)), spec.EngineSkLookup)
		if err != nil {
			return err
		}
		defer e.Close()
		labels := &engine.Labels{Maps: e.Pins.Maps}
		return labels.Put("unreadable", engine.Label{ID: engine.MaxNamed, Bindings: 1})
	})
	if _, err := bindings.Registered(w.root, record.Scope(here(t)), false); err == nil {
		t.Fatal("a service whose number is none can be read")
	}
	for text, outages := range map[string]int{"full udp 127.0.2.0/24 9000": 0, "none udp 127.0.1.0/24 9000": 1} {
		plan, err := OutagesOfBindings(t.Context(), w.root, here(t), []bindings.Binding{binding(t, text)}, true)
		if err != nil || len(plan.Outages) != outages {
			t.Errorf("%s: %q, %v", text, plan.Outages, err)
		}
	}
}
