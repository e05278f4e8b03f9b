// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/kernel"
)

// TestReadOutdated: pins of another version are read without changing them.
func TestReadOutdated(t *testing.T) {
	w, a, b := twoMembers(t)
	defer otherObject(1)()
	src := sources(20)
	w.check(src, loopback4, names(a, b)) // steered by the other version's program
	before := pinIDs(t, w.root)
	st := w.state()
	if len(st.Slots) != 2 || !st.Slots[0].Admitted() || st.Slots[0].PID != a.pid() || st.Slots[1].PID != b.pid() || st.Seed != 7 || st.Problem != "" {
		t.Errorf("state: %+v", st)
	}
	if n := st.Slots[0].Verdicts["udp"].Steered + st.Slots[1].Verdicts["udp"].Steered; n < 20 || n > 25 {
		t.Errorf("%d datagrams are counted, 20 were sent", n)
	}
	if d, problem, err := st.Devices(w.root); err != nil || problem != nil || len(d) != 20 {
		t.Errorf("devices: %d, %v, %v", len(d), problem, err)
	}
	r, err := slots.Open(w.root, "", "svc")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if pid, ok, err := r.Admitted(1); pid != b.pid() || !ok || err != nil {
		t.Errorf("slot 1 is of process %d, %v, %v", pid, ok, err)
	}
	metrics := make(chan prometheus.Metric, 1000)
	newCollector(w.root).Collect(metrics)
	close(metrics)
	admitted := 0
	for m := range metrics {
		if m.Desc() == admittedDesc {
			admitted++
		}
	}
	if admitted != 2 {
		t.Errorf("metrics of %d slots", admitted)
	}
	all, err := state.Read(t.Context(), w.root)
	if err != nil || len(all.Outdated) != 1 {
		t.Fatalf("outdated: %v, %v", all.Outdated, err)
	}
	if o := all.Outdated[0].String(); !strings.Contains(o, "object ") {
		t.Errorf("the upgrade is described as %q", o)
	}
	if findings, err := examine(t.Context(), w.root); err != nil || len(findings) != 1 || !strings.Contains(findings[0].Remedy, "weir upgrade") {
		t.Errorf("doctor finds %v, %v", findings, err)
	}
	w.locked(engine.Recover) // leaves programs to the upgrade
	if after := pinIDs(t, w.root); !slices.Equal(before, after) {
		t.Errorf("reading changed the pins from\n%v\nto\n%v", before, after)
	}
	w.check(src, loopback4, names(a, b))
	plan := w.apply()
	if len(plan) != 1 || !strings.HasPrefix(plan[0], "upgrade engine sk_lookup of net:[") {
		t.Errorf("apply did %v", plan)
	}
	w.check(src, loopback4, names(a, b))
	if pid, ok, err := r.Admitted(1); pid != b.pid() || !ok || err != nil {
		t.Errorf("after the upgrade slot 1 is of process %d, %v, %v", pid, ok, err)
	}
	b.kill()
	if _, ok, err := r.Admitted(1); ok || err != nil {
		t.Errorf("a reader that was open before the upgrade sees slot 1 admitted: %v, %v", ok, err)
	}
}

// pinIDs lists the pins with the ids of their objects.
func pinIDs(t testing.TB, r *kernel.Root) []string {
	t.Helper()
	var out []string
	files, err := filepath.Glob(r.Path() + "/*/*/*/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if strings.HasPrefix(filepath.Base(f), "link_") {
			ln, err := link.LoadPinnedLink(f, nil)
			if err != nil {
				t.Fatal(err)
			}
			info, err := ln.Info()
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, fmt.Sprint(f, " link ", info.ID, " program ", info.Program))
			ln.Close()
			continue
		}
		m, err := ebpf.LoadPinnedMap(f, nil)
		if err != nil {
			t.Fatal(err)
		}
		info, err := m.Info()
		if err != nil {
			t.Fatal(err)
		}
		id, _ := info.ID()
		out = append(out, fmt.Sprint(f, " map ", id))
		m.Close()
	}
	return out
}

// TestNewerABI: pins of a newer ABI are reported, rejected by every command about them, and not changed. Other commands
// do not fail.
func TestNewerABI(t *testing.T) {
	w, a, b := twoMembers(t)
	scope := w.state().Scope()
	for _, instance := range []kernel.Instance{record.Instance(scope, "svc"), record.EngineInstance(scope, spec.EngineSkLookup)} {
		t.Run(instance.Name, func(t *testing.T) {
			restore := w.newer(instance)
			defer restore()
			before := pinIDs(t, w.root)
			writes := func(f func(l *kernel.WriteLock) error) error {
				l, err := w.root.Lock(t.Context())
				if err != nil {
					return err
				}
				defer l.Unlock()
				return f(l)
			}
			st, err := state.Read(t.Context(), w.root)
			plan, perr := Feature{}.PlanUpgrade(t.Context(), w.root)
			if err = errors.Join(err, perr, writes(engine.Recover)); err != nil {
				t.Error(err)
			}
			for what, err := range map[string]error{
				"status":  st.Err(),
				"upgrade": plan.Unread.Err(),
				"register": writes(func(l *kernel.WriteLock) error {
					_, err := engine.AdmitLocked(t.Context(), l, slots.Slot{Scope: scope, Service: "svc", Slot: 0}, nil, nil)
					return err
				}),
				"remove": writes(func(l *kernel.WriteLock) error { return engine.RemoveService(l, scope, "svc") }),
			} {
				if !errors.Is(err, kernel.ErrABI) || !strings.Contains(err.Error(), "made by weir v9.9.9") {
					t.Errorf("%s: %v", what, err)
				}
			}
			if after := pinIDs(t, w.root); !slices.Equal(before, after) {
				t.Errorf("changed the pins from\n%v\nto\n%v", before, after)
			}
			w.checkAnswers(sources(8), a, b)
		})
	}
}

// newer publishes an instance like a future version of weir.
func (w *world) newer(i kernel.Instance) (restore func()) {
	w.t.Helper()
	again := func(change func(m *kernel.Meta)) {
		w.locked(func(l *kernel.WriteLock) error {
			o, err := l.Open(i)
			if err != nil {
				return err
			}
			defer o.Close()
			meta := o.Meta
			change(&meta)
			pins := kernel.Pins{Maps: o.Maps, Links: map[string]kernel.Link{}}
			links, err := o.Links()
			if err != nil {
				return err
			}
			for _, name := range links {
				ln, err := o.Link(name)
				if err != nil {
					return err
				}
				defer ln.Close()
				pins.Links[name] = ln
			}
			return l.Publish(i, meta, pins)
		})
	}
	again(func(m *kernel.Meta) { m.ABI, m.Version = record.ABI+1, "v9.9.9" })
	return func() { again(func(m *kernel.Meta) { m.ABI, m.Version = record.ABI, kernel.Version }) }
}

// checkAnswers is check without the pins: each of the two members answers its own sources over both protocols.
func (w *world) checkAnswers(addrs []netip.Addr, a, b *sink) {
	w.t.Helper()
	for _, addr := range addrs {
		udp, tcp := ask(w.t, "udp", addr, loopback4), ask(w.t, "tcp", addr, loopback4)
		if udp != tcp || udp != fmt.Sprint(a.pid()) && udp != fmt.Sprint(b.pid()) {
			w.t.Errorf("%s is answered by %s over UDP and %s over TCP", addr, udp, tcp)
		}
	}
}
