// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/explain"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// newerABI adds to the ABI in an instance's meta. docs/PINS.md has the offset.
func (w *world) newerABI(i kernel.Instance, by uint32) {
	w.t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(w.root.Path(), i.Scope, i.Feature, i.Name, "meta"), nil)
	if err != nil {
		w.t.Fatal(err)
	}
	defer m.Close()
	b, err := m.LookupBytes(uint32(0))
	if err == nil {
		binary.NativeEndian.PutUint32(b[8:], binary.NativeEndian.Uint32(b[8:])+by)
		err = m.Put(uint32(0), b)
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// unspecified publishes an instance with an unreadable spec.
func (w *world) unspecified(i kernel.Instance) {
	w.t.Helper()
	w.locked(func(l *kernel.WriteLock) error {
		o, err := l.Open(i)
		if err != nil {
			return err
		}
		defer o.Close()
		o.Meta.Config = []byte("{")
		return l.Publish(i, o.Meta, kernel.Pins{Maps: o.Maps})
	})
}

// without removes pins of an instance and its record.
func (w *world) without(i kernel.Instance, pins ...string) {
	w.t.Helper()
	records, err := filepath.Glob(filepath.Join(kernel.RecordDir, "*", "*", strings.Join([]string{i.Scope, i.Feature, i.Name}, "+")+"*"))
	if err != nil || len(records) == 0 {
		w.t.Fatalf("no record of %s: %v", i, err)
	}
	for _, pin := range pins {
		records = append(records, filepath.Join(w.root.Path(), i.Scope, i.Feature, i.Name, pin))
	}
	for _, path := range records {
		if err := os.Remove(path); err != nil {
			w.t.Fatal(err)
		}
	}
}

// beside adds a service of two members to the configuration.
func (w *world) beside(name string, port int) {
	w.t.Helper()
	s := spec.Service{Spec: service.Spec{Name: name}, Options: spec.Options{Slots: 2, Engine: underTest}}
	for i, proto := range []string{"udp", "tcp"} {
		s.Listen = append(s.Listen, mustListen(w.t, fmt.Sprintf("%s4 0.0.0.0:%d", proto, port)))
		sink := startSink(w.t, fmt.Sprintf("udp4=0.0.0.0:%d", port), fmt.Sprintf("tcp4=0.0.0.0:%d", port))
		s.Members = append(s.Members, service.Member{Slot: i, PID: sink.pid()})
	}
	w.cfg.Services = append(w.cfg.Services, s)
}

// answersAt returns the answer for each source.
func (w *world) answersAt(port uint16, from []netip.Addr) map[string]string {
	out := map[string]string{}
	for _, proto := range slots.Protocols {
		for _, a := range from {
			out[proto+" "+a.String()] = ask(w.t, proto, a, netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port))
		}
	}
	return out
}

// leads reports whether the engine's maps refer to a service's id.
func (w *world) leads(scope string, id uint32) (leads bool) {
	w.t.Helper()
	o, err := w.root.Open(record.EngineInstance(scope, underTest), "services")
	if err != nil {
		w.t.Fatal(err)
	}
	defer o.Close()
	var have ebpf.MapID
	return o.Maps["services"].Lookup(id, &have) == nil
}

// TestUnreadableService: an unreadable service keeps its id, its rows and all references. Other services can still be
// read, changed, added, bypassed, upgraded and removed.
func TestUnreadableService(t *testing.T) { eachEngine(t, testUnreadableService) }

func testUnreadableService(t *testing.T) {
	for name, c := range map[string]struct {
		spoil, back func(w *world, i kernel.Instance)
		roomless    bool // nothing can be allocated beside it
	}{
		"newer ABI":         {spoil: func(w *world, i kernel.Instance) { w.newerABI(i, 1) }, back: func(w *world, i kernel.Instance) { w.newerABI(i, ^uint32(0)) }},
		"no spec":           {spoil: (*world).unspecified},
		"newer, half there": {spoil: func(w *world, i kernel.Instance) { w.without(i, "map_service"); w.newerABI(i, 1) }, roomless: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, spec.Options{Slots: 2}, "udp4 0.0.0.0:9991", "tcp4 0.0.0.0:9991")
			w.member(0, startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"))
			w.member(1, startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"))
			w.beside("bad", 9993)
			w.beside("two", 9992)
			w.apply()
			src, svc := sources(16), w.state()
			was, two := w.answersAt(9993, src), w.recorded(svc.PinScope, "two")
			bad := record.Instance(svc.PinScope, "bad")
			c.spoil(w, bad)
			kept := func(after string) {
				t.Helper()
				if now := w.answersAt(9993, src); !maps.Equal(now, was) {
					t.Fatalf("after %s it answers %v, was %v", after, now, was)
				}
				st, err := state.Read(t.Context(), w.root)
				if err != nil || !st.Unreadable.Has(bad) || slices.ContainsFunc(st.Services, func(s state.Service) bool { return s.Name == "bad" }) {
					t.Fatalf("after %s: %+v, %v", after, st.Unreadable, err)
				}
			}
			kept("it was spoilt")
			x, err := explain.Explain(t.Context(), w.root, explain.Packet{Inode: w.state().Inode, Proto: "udp", From: netip.AddrPortFrom(src[0], 5000), To: netip.MustParseAddrPort("127.0.0.1:9993")})
			if err != nil || !slices.ContainsFunc(x.Steps, func(y explain.Step) bool { return y.Step == "steer bad" && y.Warning }) {
				t.Errorf("explained: %+v, %v", x, err)
			}
			if all, err := examine(t.Context(), w.root); err != nil || !slices.ContainsFunc(all, func(f feature.Finding) bool { return f.Object == "bad" }) {
				t.Errorf("examined: %+v, %v", all, err)
			}
			w.cfg.Services[0].Slots, w.cfg.Services[0].Members = 1, w.cfg.Services[0].Members[:1]
			w.apply()
			kept("svc has a slot less")
			w.locked(func(l *kernel.WriteLock) error {
				return errors.Join(engine.UpgradeEngine(l, bad.Scope, underTest), engine.Change(l, bad.Scope, "svc", nil, func(*record.Service) error { return nil }))
			})
			kept("an upgrade")
			w.cfg.Services[0].Slots = 4
			w.beside("new", 9994)
			err = w.tryApply()
			if c.roomless == (err == nil) || err != nil && !strings.Contains(err.Error(), "bad") {
				t.Fatalf("more slots, and a service more: %v", err)
			}
			if err != nil {
				w.cfg.Services[0].Slots, w.cfg.Services = 1, w.cfg.Services[:3]
			}
			kept("a service more")
			w.cfg.Services = slices.DeleteFunc(w.cfg.Services, func(s spec.Service) bool { return s.Name == "two" || s.Name == "bad" })
			w.apply()
			kept("two is gone")
			if w.leads(bad.Scope, two.ID) {
				t.Error("two was removed, and its number still leads to it")
			}
			if did, err := bypassed(w, true); !slices.Contains(did, "svc") || err == nil || !strings.Contains(err.Error(), "bad") {
				t.Errorf("bypassed %q, %v", did, err)
			}
			kept("the others are bypassed")
			thief := w.cfg.Services[0]
			thief.Name, thief.Members = "thief", nil
			thief.Listen = []service.Listen{mustListen(t, "udp4 0.0.0.0:9993")}
			w.cfg.Services = append(w.cfg.Services, thief)
			if err := w.tryApply(); err == nil && underTest == spec.EngineSkLookup {
				t.Error("a service took the port of the one that cannot be read")
			}
			w.cfg.Services = nil
			w.apply()
			kept("all others are gone")
			if c.back != nil {
				c.back(w, bad)
				w.apply()
				if all, err := w.root.Instances(spec.Name); err != nil || len(all) > 0 {
					t.Errorf("it can be read again, and is not wanted: left %v, %v", all, err)
				}
			}
		})
	}
}

func (w *world) recorded(scope, name string) *record.Service {
	w.t.Helper()
	p, err := record.Read(w.root, record.Instance(scope, name))
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

func bypassed(w *world, on bool) (did []string, err error) {
	w.locked(func(l *kernel.WriteLock) error {
		did, err = BypassAll(w.t.Context(), l, on)
		return nil
	})
	return did, err
}

// TestServiceWithoutPinsAndRecord: a plan creates a damaged service without a record again if it is wanted, and removes
// it otherwise.
func TestServiceWithoutPinsAndRecord(t *testing.T) {
	for _, wanted := range []bool{true, false} {
		t.Run(fmt.Sprint(wanted), func(t *testing.T) {
			w := newWorld(t, spec.Options{Slots: 2}, "udp4 0.0.0.0:9991", "tcp4 0.0.0.0:9991")
			w.beside("bad", 9993)
			w.apply()
			was, src := w.recorded(w.state().PinScope, "bad"), sources(8)
			answers := w.answersAt(9993, src)
			w.without(record.Instance(w.state().PinScope, "bad"), "map_service", "meta")
			if !wanted {
				w.cfg.Services = w.cfg.Services[:1]
			}
			w.apply()
			if got := w.leads(w.state().PinScope, was.ID); got && !wanted {
				t.Error("it is not wanted, and still there")
			}
			if wanted && slices.Contains(slices.Collect(maps.Values(w.answersAt(9993, src))), refused) {
				t.Errorf("it answers %v, was %v", w.answersAt(9993, src), answers)
			}
			if again := w.apply(); len(again) > 0 {
				t.Errorf("applied again, it would %v", again)
			}
		})
	}
}
