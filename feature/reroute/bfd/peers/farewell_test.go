// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/bfdtest"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// losesFarewells drops the first IPv4 packets with state admin-down arriving in the other namespace.
func (w *world) losesFarewells(packets int32) (lost func() uint32) {
	w.Helper()
	return w.loses(w.there, packets, asm.JEq, bfd.AdminDown)
}

// loses drops a number of IPv4 session packets with a matching state arriving in a namespace.
func (w *world) loses(ns *netns.Handle, packets int32, compares asm.JumpOp, to bfd.State) (lost func() uint32) {
	w.Helper()
	counts, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { counts.Close() })
	const (
		pass, drop     = -1, 2 // TCX_NEXT, TCX_DROP
		network, proto = 12, 23
		port, state    = 14 + 20 + 2, 14 + 20 + 8 + 1
	)
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadAbs(network, asm.Half),
		asm.JNE.Imm(asm.R0, unix.ETH_P_IP, "pass"),
		asm.LoadAbs(proto, asm.Byte),
		asm.JNE.Imm(asm.R0, unix.IPPROTO_UDP, "pass"),
		asm.LoadAbs(port, asm.Half),
		asm.JNE.Imm(asm.R0, bfdtest.Port, "pass"),
		asm.LoadAbs(state, asm.Byte),
		asm.RSh.Imm(asm.R0, 6),
		compares.Imm(asm.R0, int32(to), "lose"),
		asm.Mov.Imm(asm.R0, pass),
		asm.Return(),
		asm.StoreImm(asm.RFP, -4, 0, asm.Word).WithSymbol("lose"),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, counts.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),
		asm.LoadMem(asm.R1, asm.R0, 0, asm.Word),
		asm.JGE.Imm(asm.R1, packets, "pass"),
		asm.Add.Imm(asm.R1, 1),
		asm.StoreMem(asm.R0, 0, asm.R1, asm.Word),
		asm.Mov.Imm(asm.R0, drop),
		asm.Return(),
		asm.Mov.Imm(asm.R0, pass).WithSymbol("pass"),
		asm.Return(),
	}})
	if err != nil {
		w.Fatal(err)
	}
	defer prog.Close()
	index := nstest.Ifindex(w, ns, "w0")
	var l link.Link
	err = ns.Do(func() (err error) {
		l, err = link.AttachTCX(link.TCXOptions{Interface: index, Program: prog, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
		return err
	})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { l.Close() })
	return func() (n uint32) {
		if err := counts.Lookup(uint32(0), &n); err != nil {
			w.Fatal(err)
		}
		return n
	}
}

// shown is bfdd's output about its one peer.
type shown struct {
	Status, Diagnostic string
	Remote             string `json:"remote-diagnostic"`
}

func show(t *testing.T, r *frrtest.Router) shown {
	t.Helper()
	var all []shown
	if err := json.Unmarshal([]byte(r.Vtysh("show bfd peers json")), &all); err != nil || len(all) != 1 {
		t.Fatalf("bfdd shows %d peers, %v", len(all), err)
	}
	return all[0]
}

// The neighbour of a removed session learns of the shutdown, even if some packets are lost. The command waits only
// until it knows.
func TestFarewell(t *testing.T) {
	for name, lost := range map[string]int32{"none is lost": 0, "three are lost": 3} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, true)
			w.acquaint()
			r := frrtest.Start(t, w.there, "far", map[string]string{"bfdd": neighbours("10.9.0.2 10.9.0.1")})
			s := Session{Name: "four", Device: "w0", Peer: netip.MustParseAddr("10.9.0.2"), Interval: every, Multiplier: times}
			w.apply(Config{Netns: w.ref, Sessions: []Session{s}})
			w.eventually("both ends are up", func() bool { return show(t, r).Status == "up" && w.session("four").Detection == times*every })
			count := w.losesFarewells(lost)
			began := time.Now()
			w.apply()
			took := time.Since(began)
			got := show(t, r)
			t.Logf("after %v: bfdd shows %+v; lost: %d", took, got, count())
			if got.Status != "down" || got.Diagnostic != "neighbor signaled session down" || got.Remote != "administratively down" || count() != uint32(lost) {
				t.Errorf("bfdd shows %+v; lost: %d", got, count())
			}
		})
	}
}

// A session with another name, as after renaming its path, stays up, and has no farewell.
func TestRenamed(t *testing.T) {
	w := newWorld(t, true)
	w.acquaint()
	r := frrtest.Start(t, w.there, "far", map[string]string{"bfdd": neighbours("10.9.0.2 10.9.0.1", "fd09::2 fd09::1")})
	four := Session{Name: "four", Device: "w0", Peer: netip.MustParseAddr("10.9.0.2"), Interval: every, Multiplier: times}
	six := four
	six.Name, six.Peer = "six", netip.MustParseAddr("fd09::2")
	w.run()
	defer func() { w.stop() }()
	w.apply(Config{Netns: w.ref, Sessions: []Session{four, six}})
	w.eventually("both sessions are up", func() bool {
		return w.session("four").State == bfd.Up && w.session("six").State == bfd.Up && strings.Count(squeezed(r.Vtysh("show bfd peers json")), `"status":"up"`) == 2
	})
	ups, downs := w.session("four").Ups, w.session("four").Downs
	four.Name, six.Name = "six", "other" // a name of another session, and a new one
	w.apply(Config{Netns: w.ref, Sessions: []Session{four, six}})
	if s := w.session("six"); s.State != bfd.Up || s.Ups != ups || s.Downs != downs || s.Peer != four.Peer {
		t.Errorf("renamed from four: %+v, before: ups %d, downs %d", s, ups, downs)
	}
	if s := w.session("other"); s.State != bfd.Up || s.Peer != six.Peer {
		t.Errorf("renamed from six: %+v", s)
	}
	if text := squeezed(r.Vtysh("show bfd peers json")); strings.Count(text, `"status":"up"`) != 2 {
		t.Errorf("bfdd shows %s", text)
	}
}

// A session shut down while it comes up does not know that the peer is up already. The peer's last packet is from
// before, so it is no answer.
func TestFarewellComingUp(t *testing.T) {
	w := newWorld(t, true)
	w.acquaint()
	w.loses(w.here, math.MaxInt32, asm.JGE, bfd.Init)
	count := w.losesFarewells(1)
	r := frrtest.Start(t, w.there, "far", map[string]string{"bfdd": neighbours("10.9.0.2 10.9.0.1")})
	// It speaks second: otherwise the peer would go to Init on its first Down, and this end would learn nothing.
	s := Session{Name: "four", Device: "w0", Peer: netip.MustParseAddr("10.9.0.2"), Interval: every, Multiplier: times, Passive: true}
	w.apply(Config{Netns: w.ref, Sessions: []Session{s}})
	w.eventually("the other end is up, and this one does not know", func() bool { return show(t, r).Status == "up" && w.session("four").State == bfd.Init })
	w.apply()
	if got := show(t, r); got.Status != "down" || got.Diagnostic != "neighbor signaled session down" || count() != 1 {
		t.Errorf("bfdd shows %+v; lost: %d", got, count())
	}
}

// A session without its interface has no farewell: its packets cannot leave.
func TestFarewellWithoutDevice(t *testing.T) {
	w := newWorld(t, true)
	w.acquaint()
	configs := map[string]Config{
		"near": {Netns: w.ref, Sessions: []Session{{Name: "near", Device: "w0", Peer: netip.MustParseAddr("10.9.0.2"), Interval: every, Multiplier: times}}},
		"far": {Netns: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), w.there.FD()),
			Sessions: []Session{{Name: "far", Device: "w0", Peer: netip.MustParseAddr("10.9.0.1"), Interval: every, Multiplier: times}}},
	}
	w.apply(configs["near"], configs["far"])
	w.eventually("both are up", func() bool { return w.session("near").State == bfd.Up && w.session("far").State == bfd.Up })
	if err := w.here.Do(func() error {
		l, err := netlink.LinkByName("w0")
		if err != nil {
			return err
		}
		return netlink.LinkDel(l)
	}); err != nil {
		t.Fatal(err)
	}
	for name, ns := range map[string]*netns.Handle{"near": w.here, "far": w.there} {
		w.locked(func(l *kernel.WriteLock) error {
			c := configs[name]
			e, err := engine.OpenWith(t.Context(), l, ns, c.Tick())
			if err != nil {
				return err
			}
			defer e.Close()
			there, err := e.Sessions()
			if err != nil {
				return err
			}
			said, err := departing(ns, e, there, nil)
			if len(there) != 1 || len(said) > 0 {
				t.Errorf("%s: of sessions %v these are waited for: %v", name, there, said)
			}
			return err
		})
	}
}
