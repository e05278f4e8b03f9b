// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/guard/bpf"
	"github.com/weir-project/weir/internal/guardstate"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

// guardsOf returns the guards of a service, read from the pins.
func (w *world) guardsOf(name string) []GuardState {
	w.t.Helper()
	st, err := readGuards(context.Background(), w.root)
	if err != nil {
		w.t.Fatal(err)
	}
	return st.Service(name)
}

// TestKilledSaysSo kills the apply of a second guard, and a change of its destinations, at each of
// their steps. Before recovery, the state reports a guard as working only if it limits. weir serve
// detects the rest.
func TestKilledSaysSo(t *testing.T) {
	w := newWorld(t, probe.CgroupIngress)
	s := listenUDP(t, "127.0.0.1:5301")
	first := guarded(t, "dns", Options{Limit: 100}, "udp :5300")
	other := guarded(t, "ntp", Options{Limit: 100}, "udp :5399")
	second := guarded(t, "ntp", Options{Limit: 100}, "udp :5301")
	said := 0
	for _, from := range [][]Service{{first}, {first, other}} {
		for step := 0; ; step++ {
			w.apply(from...)
			ended := w.killedApply(step, first, second)
			for _, g := range w.guardsOf("ntp") {
				if len(g.Listen) != 1 || g.Listen[0] != "udp :5301" {
					continue // still the previous one
				}
				lacking, err := lacks(w.root, guards.Name(g.rec.Scope, "ntp"), func(string, netns.ID) {})
				if err != nil || lacking != (g.Problem != "") {
					t.Errorf("after %d steps: problem %q; weir serve reports %t, %v", step, g.Problem, lacking, err)
				}
				if g.Problem != "" {
					said++
					continue
				}
				limited(t, s, 100)
			}
			w.apply(first, second)
			if p := w.state("ntp").Problem; p != "" {
				t.Errorf("recovered after %d steps: %s", step, p)
			}
			if ended {
				break
			}
		}
	}
	if said < 2 {
		t.Errorf("a guard was out of force only %d times: the test interrupts no change", said)
	}
}

// occupy attaches another owner's XDP program to a device.
func occupy(t *testing.T, ns *netns.Handle, device string) {
	t.Helper()
	theirs, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Name: "theirs",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	err = ns.Do(func() error {
		index, err := interfaceIndex(device)
		if err != nil {
			return err
		}
		ln, err := kernel.XDP{Ifindex: index, Device: device}.Attach(theirs)
		if err == nil {
			t.Cleanup(func() { ln.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// in returns the service in a namespace.
func (s Service) in(ns string) Service {
	s.Netns = ns
	return s
}

// TestNotAttachedNotThere makes attaching fail, because the interface has another owner's program.
// A new guard does not remain, and a changed one stays as before.
func TestNotAttachedNotThere(t *testing.T) {
	need(t, kernel.XDPProgram, probe.CgroupIngress)
	wire := nstest.NewWire(t)
	w := &world{t: t, root: kernel.OpenRoot(nstest.BPFFS + "/weir-occupied")}
	occupy(t, wire.B, nstest.WireDevice)
	dns := func(o Options) Service { return guarded(t, "dns", o, "udp :5300").in(wire.NameB) }
	at := Options{Limit: 50, Interfaces: []string{nstest.WireDevice}}
	plan, err := Feature{}.Plan(t.Context(), State{}, Config{[]Service{dns(at)}})
	if err != nil || len(plan.Warnings) == 0 || !strings.Contains(plan.Warnings[0], `XDP of `+nstest.WireDevice+` is occupied by program`) {
		t.Errorf("warnings of the plan: %q, %v", plan.Warnings, err)
	}
	if _, err := applyTo(w.root, Config{[]Service{dns(at)}}); !errors.Is(err, kernel.ErrOccupied) {
		t.Fatalf("%v: want ErrOccupied", err)
	}
	if g := w.guardsOf("dns"); len(g) > 0 {
		t.Errorf("the guard still exists: %+v", g)
	}
	for _, left := range w.pinned() {
		if strings.Contains(left, "/guard/") {
			t.Errorf("left behind: %s", left)
		}
	}
	w.apply(dns(Options{Limit: 100}))
	defer w.apply()
	asItWas := func(when string) {
		t.Helper()
		if g := w.state("dns"); g.Limit != 100 || g.At != "its sockets" || g.Problem != "" {
			t.Errorf("%s: the guard is changed: %+v", when, g)
		}
		if err := wire.B.Do(func() error {
			s := listenUDP(t, "127.0.0.1:5300")
			defer s.Close()
			limited(t, s, 100)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	_, err = applyTo(w.root, Config{[]Service{dns(at)}})
	if !errors.Is(err, kernel.ErrOccupied) {
		t.Fatalf("a change: %v: want ErrOccupied", err)
	}
	if n := strings.Count(err.Error(), kernel.ErrOccupied.Error()); n != 1 {
		t.Errorf("the error gives the reason %d times: %v", n, err)
	}
	asItWas("a change")

	// Killed during its rollback, the guard is restored by the next command.
	if testing.Short() {
		return
	}
	w.fails = []string{kernel.ErrOccupied.Error()}
	died := map[string]bool{}
	for step := 0; !w.killedApply(step, dns(at)); step++ {
		died[w.died] = true
		for _, g := range w.guardsOf("dns") {
			lacking, err := lacks(w.root, guards.Name(g.rec.Scope, "dns"), func(string, netns.ID) {})
			if err != nil || lacking != (g.Problem != "") {
				t.Errorf("killed at %s: problem %q; weir serve reports %t, %v", w.died, g.Problem, lacking, err)
			}
		}
		w.apply(dns(Options{Limit: 100}))
		if w.died == "guard:taken-back" {
			asItWas("killed at " + w.died)
		}
	}
	if !died["guard:taken-back"] {
		t.Errorf("no change was killed during its rollback: %v", died)
	}
	asItWas("in the end")
}

// TestOthersHold occupies the interface of one guard. Other guards of the namespace are changed,
// added and removed, and work. The apply reports the failed one.
func TestOthersHold(t *testing.T) {
	need(t, kernel.XDPProgram, probe.CgroupIngress)
	wire := nstest.NewWire(t)
	w := &world{t: t, root: kernel.OpenRoot(nstest.BPFFS + "/weir-others")}
	nstest.Cable(t, wire.A, "up0", wire.B, "up0")
	a := guarded(t, "a", Options{Limit: 50, Interfaces: []string{"up0"}}, "udp :5300").in(wire.NameB)
	at := func(name, listen string, l Limit) Service {
		return guarded(t, name, Options{Limit: l}, listen).in(wire.NameB)
	}
	w.apply(a, at("b", "udp :5301", 50))
	defer w.apply()
	if err := wire.B.Do(func() error { return netlink.LinkDel(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Name: "up0"}}) }); err != nil {
		t.Fatal(err)
	}
	nstest.Cable(t, wire.A, "up0", wire.B, "up0")
	occupy(t, wire.B, "up0")
	for _, c := range []struct {
		name     string
		services []Service
		want     map[string]Limit // limits in effect
		gone     string
	}{
		{"changed", []Service{a, at("b", "udp :5301", 100)}, map[string]Limit{"b": 100}, ""},
		{"added", []Service{a, at("b", "udp :5301", 100), at("c", "udp :5302", 100)}, map[string]Limit{"b": 100, "c": 100}, ""},
		{"removed", []Service{a, at("c", "udp :5302", 100)}, map[string]Limit{"c": 100}, "b"},
	} {
		said, err := applyTo(w.root, Config{c.services})
		if !errors.Is(err, kernel.ErrOccupied) || strings.Count(err.Error(), kernel.ErrOccupied.Error()) != 1 || !strings.Contains(err.Error(), "service a") {
			t.Errorf("%s: %q, %v: want ErrOccupied of service a, once", c.name, said, err)
		}
		if p := w.state("a").Problem; !strings.HasPrefix(p, "not attached at up0") {
			t.Errorf("%s: the problem of a is %q", c.name, p)
		}
		for name, l := range c.want {
			g := w.guardsOf(name)
			if len(g) != 1 || g[0].Limit != l || g[0].Problem != "" {
				t.Errorf("%s: %s is %+v", c.name, name, g)
				continue
			}
			address := "127.0.0.1" + strings.TrimPrefix(g[0].Listen[0], "udp ")
			if err := wire.B.Do(func() error {
				s := listenUDP(t, address)
				defer s.Close()
				limited(t, s, l)
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		if c.gone != "" && len(w.guardsOf(c.gone)) > 0 {
			t.Errorf("%s: %s exists", c.name, c.gone)
		}
	}
	// A successful step names failed guards beside it, and weir serve recovers the others.
	l := w.lock()
	defer l.Unlock()
	ns, err := netns.Open(wire.NameB)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	note, err := target{published{Service: at("c", "udp :5302", 200), Netns: wire.NameB}, guards.Name(kernel.ScopeOf(ns), "c"), netns.ID{Inode: ns.Inode()}}.publish(l)
	if err != nil || !strings.Contains(note, "service a is still not in force") {
		t.Errorf("note %q, %v", note, err)
	}
	for name, want := range map[string]error{"a": kernel.ErrOccupied, "c": nil} {
		if did, err := adopt(l, guards.Name(kernel.ScopeOf(ns), name)); !errors.Is(err, want) {
			t.Errorf("weir serve: %s: %q, %v; want %v", name, did, err, want)
		}
	}
}

// TestUnreadableBeside has an unreadable guard of another weir beside a damaged one. The damaged
// one is recovered, and the objects of the other stay unchanged.
func TestUnreadableBeside(t *testing.T) {
	need(t, kernel.XDPProgram, probe.CgroupIngress)
	wire := nstest.NewWire(t)
	w := &world{t: t, root: kernel.OpenRoot(nstest.BPFFS + "/weir-unreadable")}
	theirs := guarded(t, "a", Options{Limit: 50, Interfaces: []string{nstest.WireDevice}}, "udp :5300").in(wire.NameB)
	mine := guarded(t, "b", Options{Limit: 100}, "udp :5301", "udp4 192.168.0.0/16:5300").in(wire.NameB)
	w.apply(theirs, mine)
	scope := w.state("b").rec.Scope
	of := func(change uint32) {
		t.Helper()
		l := w.lock()
		defer l.Unlock()
		i := guards.Name(scope, "a")
		o, err := l.Open(i)
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		o.Meta.ABI += change
		if err := l.Publish(i, o.Meta, kernel.Pins{Maps: o.Maps}); err != nil {
			t.Fatal(err)
		}
	}
	of(1)
	defer func() { of(^uint32(0)); w.apply() }()
	l := w.lock()
	defer l.Unlock()
	// Remove all shared entries of b.
	o, err := l.Open(hooksInstance(scope))
	if err != nil {
		t.Fatal(err)
	}
	defer o.Close()
	index := func() uint32 {
		rec, err := guards.Read(w.root, guards.Name(scope, "b"))
		if err != nil {
			t.Fatal(err)
		}
		return uint32(rec.Spec.Index)
	}()
	err = errors.Join(l.RemoveLink(hooksInstance(scope), linkCgroup), o.Maps[pinStates].Delete(index),
		o.Maps[pinListens].Delete(bpf.GuardGuardListenKey{Port: guardstate.NetworkOrder(5301), Family: 4}))
	if err != nil {
		t.Fatal(err)
	}
	if did, err := adopt(l, guards.Name(scope, "b")); err != nil {
		t.Errorf("service b is not recovered: %q, %v", did, err)
	}
	if _, err := adopt(l, guards.Name(scope, "a")); !errors.Is(err, kernel.ErrABI) {
		t.Errorf("a: %v, want ErrABI", err)
	}
	ns, err := netns.Open(wire.NameB)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	added := guarded(t, "c", Options{Limit: 100}, "udp :5302").in(wire.NameB)
	if note, err := (target{published{Service: added, Netns: wire.NameB}, guards.Name(scope, "c"), netns.ID{Inode: ns.Inode()}}).publish(l); !errors.Is(err, kernel.ErrABI) {
		t.Errorf("a new guard is added and may replace the guard of a: %q, %v", note, err)
	}
	if err := wire.B.Do(func() error { limited(t, listenUDP(t, "127.0.0.1:5301"), 100); return nil }); err != nil {
		t.Fatal(err)
	}
	for _, a := range []netip.Addr{wire.B4, wire.B6} {
		var s udpServer
		if err := wire.B.Do(func() error { s = listenUDP(t, netip.AddrPortFrom(a, 5300).String()); return nil }); err != nil {
			t.Fatal(err)
		}
		if err := wire.A.Do(func() error { limited(t, s, 50); return nil }); err != nil {
			t.Fatal(err)
		}
		s.Close()
	}
}
