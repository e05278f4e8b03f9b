// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// TestBindingsSayWhatTheyTake reports bindings that direct served traffic to a service without a socket: traffic of a
// process at the port, or of the previously bound service.
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
		{"none udp 127.0.0.0/24 9993", ""}, // no process has the port
		{"none tcp 127.0.0.0/24 9991", ""}, // same for TCP
		{"none udp 192.0.2.0/24 9991", ""}, // not an address of this host
		{"full udp 127.0.0.0/24 9991", ""},
		{"none udp 127.0.1.0/24 9000", "would take traffic from full, which has a socket for it; none has no socket"},
		{"none udp 127.0.1.5/32 9000", "would take traffic from full, which has a socket for it; none has no socket"}, // a part of the prefix
		{"none udp 127.0.1.5/32 9001", ""},
		{"none udp 127.0.4.0/22 9000", ""}, // a longer prefix keeps its part
		{"svc udp 127.0.0.0/24 9991", fmt.Sprintf("svc has a slot without a member; process %d", a.pid())}, // slot 1 is empty
	} {
		plan, err := OutagesOfBindings(t.Context(), w.root, w.root, here(t), []bindings.Binding{binding(t, c.binding)}, true)
		text := strings.Join(plan.Outages, "\n")
		if err != nil || c.want == "" && text != "" || !strings.Contains(text, c.want) {
			t.Errorf("%s: %q, %v, want %q", c.binding, text, err, c.want)
		}
	}
}

// TestBindingsBesideDamage: damage of another service prevents neither bindings nor their outages.
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
	plan, err := OutagesOfBindings(t.Context(), w.root, w.root, here(t), []bindings.Binding{binding(t, "none udp 127.0.0.0/24 9991")}, true)
	if err != nil || len(plan.Outages) != 1 {
		t.Errorf("%q, %v", plan.Outages, err)
	}
	w.cfg.Services[0].Name, w.cfg.Services[0].Engine = "other", spec.EngineSkLookup
	w.planned() // panicked previously
}

// registered returns a world with a configured service and a registered service, full, with a socket.
func registered(t *testing.T) *world {
	t.Helper()
	a := startSink(t, "udp4=0.0.0.0:9991")
	w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9992")
	w.apply()
	w.register("full", a, "udp4 0.0.0.0:9991")
	return w
}

// TestBindingsReadTheirServices: a binding reads only its own services. There may be 65,536, and reading all took
// seconds.
func TestBindingsReadTheirServices(t *testing.T) {
	w := registered(t)
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
		plan, err := OutagesOfBindings(t.Context(), w.root, w.root, here(t), []bindings.Binding{binding(t, text)}, true)
		if err != nil || len(plan.Outages) != outages {
			t.Errorf("%s: %q, %v", text, plan.Outages, err)
		}
	}
}

// TestBindingsReadNoOthers: a new binding neither copies the table nor reads other bindings. There may be a million.
func TestBindingsReadNoOthers(t *testing.T) {
	w := registered(t)
	var many []bindings.Binding
	for i := range 4000 {
		many = append(many, binding(t, fmt.Sprintf("full udp 10.0.%d.%d/32 9000", i>>8, i&255)))
	}
	w.locked(func(l *kernel.WriteLock) error {
		if _, err := bindings.AddBindings(l, here(t), many); err != nil {
			return err
		}
		for text, outages := range map[string]int{"full udp 127.0.2.0/24 9000": 0, "none udp 10.0.1.1/32 9000": 1, "none udp 10.0.1.2/32 9000": 1} {
			one := []bindings.Binding{binding(t, text)}
			var plan feature.Plan
			var err error
			if n := allocated(func() { plan, err = OutagesOfBindings(t.Context(), l.Root, l, here(t), one, true) }); n > 4<<20 {
				t.Errorf("%s: the check takes %d bytes, as much as a copy of the table", text, n)
			}
			if err != nil || len(plan.Outages) != outages {
				t.Errorf("%s: %q, %v", text, plan.Outages, err)
			}
		}
		v, err := bindings.OpenView(l, record.Scope(here(t)))
		if err != nil {
			return err
		}
		defer v.Close()
		want := []bindings.Binding{binding(t, "other udp 10.0.0.0/24 9000"), many[0], binding(t, "other udp 10.0.0.1/32 9000")}
		var diff bindings.Diff
		if n := allocated(func() { _, err = v.Diff(l.Root, record.Scope(here(t)), want[:1], true) }); err != nil || n > 150_000 {
			t.Errorf("what a binding adds takes %d bytes to find out, as much as reading all: %v", n, err)
		}
		diff, err = v.Diff(l.Root, record.Scope(here(t)), want, true)
		if len(diff.Added) != 1 || len(diff.Moved) != 1 || diff.Moved[0].From != "full" || diff.Same != 1 || len(diff.Removed) != 0 {
			t.Errorf("%+v", diff)
		}
		return err
	})
}

// TestBindingsOfServedReadNoTable: binding a service with a socket does not read the bindings.
func TestBindingsOfServedReadNoTable(t *testing.T) {
	w := registered(t)
	w.bind("full udp 127.0.1.0/24 9000")
	w.locked(func(l *kernel.WriteLock) error {
		m, err := l.OpenMap(record.EngineInstance(record.Scope(here(t)), spec.EngineSkLookup), "bound_sets")
		if err != nil {
			return err
		}
		defer m.Close()
		return m.Put(uint32(0), make([]byte, m.ValueSize())) // the table is no longer valid
	})
	if _, err := bindings.Bindings(t.Context(), w.root, record.Scope(here(t))); err == nil {
		t.Fatal("a table without its layout can be read")
	}
	plan, err := OutagesOfBindings(t.Context(), w.root, w.root, here(t), []bindings.Binding{binding(t, "full udp 127.0.2.0/24 9000")}, true)
	if err != nil || len(plan.Outages) != 0 {
		t.Errorf("%q, %v", plan.Outages, err)
	}
}

// allocated returns the bytes allocated by f, including freed ones.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestNumbersOfOneChangeDiffer: new names of one change get different numbers, also after 65,536 names. Previously two
// names got the same number, and the traffic of the first went to the second.
func TestNumbersOfOneChangeDiffer(t *testing.T) {
	w := registered(t)
	w.bind("full udp 127.0.1.0/24 9000")
	w.locked(func(l *kernel.WriteLock) error {
		e, err := engine.OpenEngine(l, record.Scope(here(t)), spec.EngineSkLookup)
		if err != nil {
			return err
		}
		defer e.Close()
		return e.Pins.Maps["registry"].Put(uint32(0), [2]uint32{engine.MaxNamed, 0})
	})
	var want []bindings.Binding
	for i := range 5 {
		want = append(want, binding(t, fmt.Sprintf("new-%d udp 127.0.2.%d/32 9000", i, i)))
	}
	w.locked(func(l *kernel.WriteLock) error {
		_, err := bindings.AddBindings(l, here(t), want)
		return err
	})
	have, err := bindings.Bindings(t.Context(), w.root, record.Scope(here(t)))
	if want = append([]bindings.Binding{binding(t, "full udp 127.0.1.0/24 9000")}, want...); err != nil || !slices.Equal(have, want) {
		t.Errorf("bound is %v, want %v (%v)", have, want, err)
	}
}

// TestRemoveTellsOfBindings checks the outages of a removal: it also removes bindings of services without a section,
// and some have a socket.
func TestRemoveTellsOfBindings(t *testing.T) {
	w := registered(t)
	w.bind("full udp 127.0.1.0/24 9000")
	w.bind("none udp 127.0.2.0/24 9000")
	plan, err := Feature{}.PlanRemove(t.Context(), w.root)
	if err != nil || len(plan.Outages) != 1 || !strings.HasPrefix(plan.Outages[0], "1 binding in ") || !strings.Contains(plan.Outages[0], " lead to service full with a socket") {
		t.Errorf("%q, %v", plan.Outages, err)
	}
}
