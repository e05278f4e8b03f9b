// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// guardsOf are the guards that the pins tell of.
func (w *world) guardsOf(name string) []GuardState {
	w.t.Helper()
	st, err := ReadState(context.Background(), w.root)
	if err != nil {
		w.t.Fatal(err)
	}
	return st.Service(name)
}

// TestKilledSaysSo kills the apply of a second guard, and a change of its destinations, at each of their steps: before
// anything mends it, the state says that it limits only if it does, and weir serve finds out.
func TestKilledSaysSo(t *testing.T) {
	w := newWorld(t, kernel.CgroupIngress)
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
					continue // as it was
				}
				lacking, err := lacks(w.root, guardInstance(g.scope, "ntp"), func(string, uint64) {})
				if err != nil || lacking != (g.Problem != "") {
					t.Errorf("after %d steps: problem %q, and weir serve sees %t, %v", step, g.Problem, lacking, err)
				}
				if g.Problem != "" {
					said++
					continue
				}
				limited(t, s, 100)
			}
			w.apply(first, second)
			if p := w.state("ntp").Problem; p != "" {
				t.Errorf("mended after %d steps: %s", step, p)
			}
			if ended {
				break
			}
		}
	}
	if said < 2 {
		t.Errorf("only %d times was a guard not in force: this kills nothing in between", said)
	}
}

// TestNotAttachedNotThere has attaching fail, as somebody else has the interface: a new guard is not there afterwards,
// and one that is changed stays as it was.
func TestNotAttachedNotThere(t *testing.T) {
	need(t, kernel.XDPProgram, kernel.CgroupIngress)
	wire := nstest.NewWire(t)
	w := &world{t, kernel.OpenRoot(nstest.BPFFS + "/weir-occupied")}
	theirs, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "GPL", Name: "theirs",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}})
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	err = wire.B.Do(func() error {
		index, err := ifindexOf(nstest.WireDevice)
		if err != nil {
			return err
		}
		ln, err := kernel.XDP{Ifindex: index, Device: nstest.WireDevice}.Attach(theirs)
		if err == nil {
			t.Cleanup(func() { ln.Close() })
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	dns := func(o Options) Service {
		s := guarded(t, "dns", o, "udp :5300")
		s.Netns = wire.NameB
		return s
	}
	at := Options{Limit: 50, Interfaces: []string{nstest.WireDevice}}
	if _, err := applyTo(w.root, Config{[]Service{dns(at)}}); !errors.Is(err, kernel.ErrOccupied) {
		t.Fatalf("%v: want ErrOccupied", err)
	}
	if g := w.guardsOf("dns"); len(g) > 0 {
		t.Errorf("it is there: %+v", g)
	}
	for _, left := range w.pinned() {
		if strings.Contains(left, "/guard/") {
			t.Errorf("left behind: %s", left)
		}
	}
	w.apply(dns(Options{Limit: 100}))
	defer w.apply()
	if _, err := applyTo(w.root, Config{[]Service{dns(at)}}); !errors.Is(err, kernel.ErrOccupied) {
		t.Fatalf("a change: %v: want ErrOccupied", err)
	}
	if g := w.state("dns"); g.Limit != 100 || g.At != "its sockets" || g.Problem != "" {
		t.Errorf("it is not what it was: %+v", g)
	}
	if err := wire.B.Do(func() error { limited(t, listenUDP(t, "127.0.0.1:5300"), 100); return nil }); err != nil {
		t.Fatal(err)
	}
}
