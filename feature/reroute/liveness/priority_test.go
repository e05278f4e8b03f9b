// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// Probes and answers leave before other packets in queues with priorities.
func TestPriority(t *testing.T) {
	p := newPair(t)
	if err := kernel.TCXLink.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
	counts := map[*netns.Handle]*ebpf.Map{p.w.A: outgoing(t, p.w.A), p.w.B: outgoing(t, p.w.B)}
	a, b := p.sessions(10 * time.Millisecond)
	a.Mode, a.Function = Sender, netip.Addr{}
	b.Mode, b.Peer, b.Via, b.Source = Passive, netip.Addr{}, netip.Addr{}, netip.Addr{}
	// A second session: in each tick one session's probe takes the kernel's neighbour code.
	a2, b2 := a, b
	a2.Name, a2.ID, a2.Observe, b2.Name, b2.ID, b2.Observe = "second-to-b", 8, true, "second-to-a", 8, true
	p.apply(p.w.NameA, a, a2)
	p.apply(p.w.NameB, b, b2)
	for ns, m := range counts {
		var n [2]uint64
		nstest.Eventually(t, func() error {
			if err := m.Lookup(uint32(0), &n); err != nil {
				t.Fatal(err)
			}
			err := fmt.Errorf("%s: %d packets of the first class, %d of others", ns, n[1], n[0])
			switch {
			case n[0] != 0:
				t.Fatal(err)
			case n[1] >= 40:
				return nil
			}
			return err
		})
	}
}

// outgoing counts packets of a probe's length leaving by the wire: [0] with another priority, [1] with
// TC_PRIO_CONTROL.
func outgoing(t *testing.T, ns *netns.Handle) *ebpf.Map {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 16, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Dual BSD/GPL", Instructions: asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, 0 /* len */, asm.Word),
		asm.JNE.Imm(asm.R2, int32(frameBytes), "out"),
		asm.LoadMem(asm.R2, asm.R1, 32 /* priority */, asm.Word),
		asm.LoadMapValue(asm.R3, m.FD(), 0),
		asm.JNE.Imm(asm.R2, 7 /* TC_PRIO_CONTROL */, "count"),
		asm.Add.Imm(asm.R3, 8),
		asm.Mov.Imm(asm.R2, 1).WithSymbol("count"),
		asm.StoreXAdd(asm.R3, asm.R2, asm.DWord),
		asm.Mov.Imm(asm.R0, -1 /* TCX_NEXT */).WithSymbol("out"),
		asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	at := kernel.TCX{Ifindex: nstest.Ifindex(t, ns, nstest.WireDevice), Device: nstest.WireDevice, Egress: true}
	inside(t, ns, func() error {
		l, err := at.Attach(p)
		if err == nil {
			t.Cleanup(func() { l.Close() })
		}
		return err
	})
	return m
}
