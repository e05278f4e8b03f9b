// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// BenchmarkClock compares two clocks of a loop: a token bucket, as in the tick source, and departure times (fq). The
// local kernel may lack fq. Debian's has it: WEIR_VM_PACKAGES="./feature/reroute/liveness -test.v -test.run=SipHash
// -test.bench=Clock -test.benchtime=3000x" vm/run 6.12. An operation is a tick. late-us is the delay of a tick beyond
// one tick period after its predecessor; negative values are early.
func BenchmarkClock(b *testing.B) {
	for _, tick := range []time.Duration{10 * time.Millisecond, time.Millisecond} {
		b.Run(fmt.Sprint("tbf/", tick), func(b *testing.B) { clockBench(b, tick, false) })
		b.Run(fmt.Sprint("fq/", tick), func(b *testing.B) { clockBench(b, tick, true) })
	}
}

// keptBeats is the number of recorded ticks, a power of two.
const keptBeats = 1 << 14

// Indexes in the word map of the loop's programs.
const (
	wordBeats = iota // number of ticks
	wordNext         // departure of the next packet, CLOCK_MONOTONIC in ns
	words
)

func clockBench(b *testing.B, tick time.Duration, departs bool) {
	need(b)
	nstest.Enter(b)
	l, err := makeLoop(0, 0, tick)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := removeLoops(0); err != nil {
			b.Error(err)
		}
	})
	if departs {
		fq := netlink.NewFq(netlink.QdiscAttrs{LinkIndex: l.entry, Handle: netlink.MakeHandle(2, 0), Parent: netlink.HANDLE_ROOT})
		if err := netlink.QdiscReplace(fq); err != nil {
			b.Skip("need: kernel with sch_fq:", err)
		}
	}
	times, state := array(b, keptBeats), array(b, words)
	attach(b, kernel.Clsact{Ifindex: l.exit, Name: "weir-clock"}, beatProgram(times, state, l.entry))
	if departs {
		attach(b, kernel.Clsact{Ifindex: l.entry, Name: "weir-clock", Egress: true}, departProgram(state, tick))
	}
	if err := seed(l, 0, 1); err != nil {
		b.Fatal(err)
	}
	count := func() (n uint64) {
		if err := state.Lookup(uint32(wordBeats), &n); err != nil {
			b.Fatal(err)
		}
		return n
	}
	b.ResetTimer()
	nstest.Within(b, time.Minute+4*time.Duration(b.N)*tick, func() error {
		if n := count(); n < uint64(b.N)+2 {
			return fmt.Errorf("%d beats in place of %d", n, b.N)
		}
		return nil
	})
	b.StopTimer()
	n := count()
	at := make([]uint64, keptBeats)
	for i := range at {
		if err := times.Lookup(uint32(i), &at[i]); err != nil {
			b.Fatal(err)
		}
	}
	var late []float64
	for i := uint64(1); i < min(n, keptBeats); i++ {
		if at[i] < at[i-1] {
			continue // the ring buffer wraps here
		}
		late = append(late, float64(int64(at[i]-at[i-1])-int64(tick))/1000)
	}
	slices.Sort(late)
	b.ReportMetric(late[len(late)/2], "late-us/p50")
	b.ReportMetric(late[len(late)*99/100], "late-us/p99")
}

func array(b *testing.B, entries uint32) *ebpf.Map {
	b.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: entries})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { m.Close() })
	return m
}

func attach(b *testing.B, at kernel.Clsact, text asm.Instructions) {
	b.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "weir_clock", Type: ebpf.SchedCLS, License: "GPL", Instructions: text})
	if err != nil {
		b.Fatalf("%+v", err)
	}
	defer p.Close()
	if err := at.Attach(p); err != nil {
		b.Fatal(err)
	}
}

// wordOf makes R0 point to a map element, or ends the program.
func wordOf(m *ebpf.Map, store asm.Instruction) asm.Instructions {
	return asm.Instructions{
		store, // stores the index on the stack at -4
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "end"),
	}
}

// beatProgram records the arrival of a packet and sends a copy round again. It does not reuse the packet itself: this
// belongs to its sending socket and keeps the network namespace alive.
func beatProgram(times, state *ebpf.Map, entry int) asm.Instructions {
	text := append(asm.Instructions{asm.Mov.Reg(asm.R8, asm.R1)}, wordOf(state, asm.StoreImm(asm.RFP, -4, wordBeats, asm.Word))...)
	text = append(text,
		asm.LoadMem(asm.R7, asm.R0, 0, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R7),
		asm.Add.Imm(asm.R1, 1),
		asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
		asm.And.Imm(asm.R7, keptBeats-1),
	)
	text = append(text, wordOf(times, asm.StoreMem(asm.RFP, -4, asm.R7, asm.Word))...)
	return append(text,
		asm.Mov.Reg(asm.R6, asm.R0),
		asm.FnKtimeGetNs.Call(),
		asm.StoreMem(asm.R6, 0, asm.R0, asm.DWord),
		asm.Mov.Reg(asm.R1, asm.R8),
		asm.Mov.Imm(asm.R2, int32(entry)),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnCloneRedirect.Call(),
		asm.Mov.Imm(asm.R0, 2).WithSymbol("end"), // TC_ACT_SHOT
		asm.Return(),
	)
}

// departProgram sets the departure of a packet to one tick after the previous one, and not before now.
func departProgram(state *ebpf.Map, tick time.Duration) asm.Instructions {
	const tstamp = 152 // in struct __sk_buff
	text := append(asm.Instructions{asm.Mov.Reg(asm.R6, asm.R1)}, wordOf(state, asm.StoreImm(asm.RFP, -4, wordNext, asm.Word))...)
	return append(text,
		asm.Mov.Reg(asm.R7, asm.R0),
		asm.FnKtimeGetNs.Call(),
		asm.LoadMem(asm.R1, asm.R7, 0, asm.DWord),
		asm.Add.Imm(asm.R1, int32(tick)),
		asm.JGE.Reg(asm.R1, asm.R0, "in time"),
		asm.Mov.Reg(asm.R1, asm.R0),
		asm.StoreMem(asm.R7, 0, asm.R1, asm.DWord).WithSymbol("in time"),
		asm.StoreMem(asm.R6, tstamp, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("end"), // TC_ACT_OK
		asm.Return(),
	)
}
