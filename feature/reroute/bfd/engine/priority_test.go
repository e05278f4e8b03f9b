// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/bfdtest"
	"github.com/weir-project/weir/kernel"
)

// priorities counts packets with the sessions' mark leaving by the device, by priority.
func (b *bench) priorities() func() map[uint32]uint64 {
	b.t.Helper()
	counts, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 16})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { counts.Close() })
	const markAt, priorityAt = 8, 32 // struct __sk_buff
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.LoadMem(asm.R2, asm.R1, markAt, asm.Word),
		asm.JNE.Imm32(asm.R2, rerouteMark, "pass"),
		asm.LoadMem(asm.R2, asm.R1, priorityAt, asm.Word),
		asm.StoreMem(asm.RFP, -4, asm.R2, asm.Word),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, counts.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("pass"),
		asm.Return(),
	}})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { prog.Close() })
	l, err := link.AttachTCX(link.TCXOptions{Interface: b.index, Program: prog, Attach: ebpf.AttachTCXEgress})
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { l.Close() })
	return func() map[uint32]uint64 {
		out := map[uint32]uint64{}
		for p := range counts.MaxEntries() {
			var n uint64
			if err := counts.Lookup(p, &n); err != nil {
				b.t.Fatal(err)
			}
			if n > 0 {
				out[p] = n
			}
		}
		return out
	}
}

const rerouteMark = 0x77656972 // REROUTE_MARK

// Control and echo packets precede others, on this host (TC_PRIO_CONTROL) and on the way (CS6), like packets of bfdd
// and BIRD. The tick source's own packet is unchanged.
func TestPriority(t *testing.T) {
	if err := kernel.Require(Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	const control, own = 7, 3
	for name, a := range map[string]*Session{
		"IPv4": {Local: local4, Peer: peer4},
		"IPv6": {Local: local6, Peer: peer6},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			count := b.priorities()
			s := *a
			s.Config = bfd.Config{Discriminator: 0x01020304, Multiplier: 3, DesiredTx: 10 * time.Millisecond, RequiredRx: 10 * time.Millisecond}
			s.Ifindex, s.SourcePort, s.Echo = b.index, 50000, 10*time.Millisecond
			if err := b.w.put(0, &s, 1); err != nil {
				t.Fatal(err)
			}
			b.at(0)
			p := bfdtest.Packet{State: bfd.Init, Multiplier: 3, Mine: 5, Yours: s.Discriminator, DesiredTx: 10 * time.Millisecond, RequiredRx: 10 * time.Millisecond,
				EchoRx: 10 * time.Millisecond}
			for range 2 {
				b.receive(frame(s.Peer, s.Local, bfdtest.HopLimit, p.Append(nil)))
				p.State = bfd.Up
			}
			b.setClock()
			beat := make([]byte, 180)
			binary.BigEndian.PutUint16(beat[12:], unix.ETH_P_IPV6)
			in, out := make([]byte, 192), make([]byte, 192)
			const priorityAt = 32 // struct __sk_buff
			binary.NativeEndian.PutUint32(in[priorityAt:], own)
			if ret, err := b.o.BfdTick.Run(&ebpf.RunOptions{Data: beat, Context: in, ContextOut: out}); err != nil || int32(ret) != -1 {
				t.Fatalf("a tick: %d, %v", int32(ret), err)
			}
			if got := binary.NativeEndian.Uint32(out[priorityAt:]); got != own {
				t.Errorf("the tick's packet has priority %d, and had %d", got, own)
			}
			if got := count(); len(got) != 1 || got[control] != 2 {
				t.Errorf("packets by priority: %v, want a control packet and an echo of %d", got, control)
			}
			n := 0
			for f := b.sent(); f != nil; f = b.sent() {
				n++
				class := f[15]
				if s.Peer.Is6() {
					class = f[14]<<4 | f[15]>>4
				}
				if class != 0xc0 {
					t.Errorf("traffic class %#x of %x", class, f[:60])
				}
			}
			if n != 2 {
				t.Errorf("%d were sent", n)
			}
		})
	}
}
