// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"encoding/json"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/internal/nstest"
)

// losesFarewells has the other namespace lose the first packets by which a session over IPv4 says that it is shut down.
func (w *world) losesFarewells(packets int32) (lost func() uint32) {
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
		asm.JNE.Imm(asm.R0, bfd.Port, "pass"),
		asm.LoadAbs(state, asm.Byte),
		asm.RSh.Imm(asm.R0, 6),
		asm.JNE.Imm(asm.R0, int32(bfd.AdminDown), "pass"),
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
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
	index := nstest.Ifindex(w, w.there, "w0")
	var l link.Link
	err = w.there.Do(func() (err error) {
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

// A session that is taken out of the configuration is one that its neighbour knows to have been shut down, also where packets that
// say so are lost; and the command waits no longer than until it knows.
func TestFarewell(t *testing.T) {
	for name, lost := range map[string]int32{"none is lost": 0, "three are lost": 3} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, true)
			w.acquaint()
			r := frrtest.Start(t, w.there, "far", map[string]string{"bfdd": neighbours("10.9.0.2 10.9.0.1")})
			s := Session{Name: "four", Device: "w0", Peer: netip.MustParseAddr("10.9.0.2"), Interval: every, Multiplier: times}
			w.apply(Config{Netns: w.ref, Sessions: []Session{s}})
			type peer struct {
				Status, Diagnostic string
				Remote             string `json:"remote-diagnostic"`
			}
			shown := func() peer {
				var all []peer
				if err := json.Unmarshal([]byte(r.Vtysh("show bfd peers json")), &all); err != nil || len(all) != 1 {
					t.Fatalf("bfdd shows %d peers, %v", len(all), err)
				}
				return all[0]
			}
			w.eventually("both ends are up", func() bool { return shown().Status == "up" && w.session("four").Detection == times*every })
			count := w.losesFarewells(lost)
			began := time.Now()
			w.apply()
			took := time.Since(began)
			got := shown()
			t.Logf("after %v: bfdd shows %+v; lost: %d", took, got, count())
			if got.Status != "down" || got.Diagnostic != "neighbor signaled session down" || got.Remote != "administratively down" || count() != uint32(lost) {
				t.Errorf("bfdd shows %+v; lost: %d", got, count())
			}
		})
	}
}
