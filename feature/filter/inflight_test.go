// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"runtime"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/weir-project/weir/internal/nstest"
)

// A packet is counted even if its program's rules change twice meanwhile. The first change keeps
// the program's map as "before". The second adds up its counts and must wait for running programs.
// No rules run long enough for two changes, so a test program on the filter's map counts late. On
// machines with shared CPUs, a preempted program does the same.
func TestCountsOfPacketInFlight(t *testing.T) {
	needHook(t, HookTCX)
	if runtime.NumCPU() < 2 {
		t.Skip("need: kernel with two CPUs")
	}
	w := newWorld(t)
	for range 50 {
		counted, inTheMiddle := w.countLate()
		if counted != 1 {
			t.Fatalf("counted %d packets, want only the packet in flight", counted)
		}
		if inTheMiddle {
			return
		}
	}
	t.Error("no packet was in flight during a change")
}

// countLate changes a filter twice while a packet is in its program. It returns the filter's count,
// and whether the packet was still in the program after the first change. A busy machine may delay
// that change for too long.
func (w *world) countLate() (counted uint64, inTheMiddle bool) {
	w.t.Helper()
	w.apply(w.filter(HookTCX, drops(5001), drops(1)))
	defer w.apply()
	o, err := w.root.Open(w.one().inst)
	if err != nil {
		w.t.Fatal(err)
	}
	defer o.Close()
	begun, err := ebpf.NewMap(&ebpf.MapSpec{Name: "begun", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		w.t.Fatal(err)
	}
	defer begun.Close()
	late := lateCounter(w.t, o.Maps["counts"], begun)
	defer late.Close()
	done := make(chan error, 1)
	go func() {
		_, err := late.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
		done <- err
	}()
	nstest.Until(w.t, "the packet is in the program", func() bool {
		var yes uint64
		return begun.Lookup(uint32(0), &yes) == nil && yes != 0
	})
	w.apply(w.filter(HookTCX, drops(5001), drops(2)))
	inTheMiddle = len(done) == 0
	w.apply(w.filter(HookTCX, drops(5001), drops(3)))
	if err := <-done; err != nil {
		w.t.Fatal(err)
	}
	return w.one().Rules[0].Packets, inTheMiddle
}

// inFlight is the time of the packet in the program.
const inFlight = 200 * time.Millisecond

// lateCounter returns a program that reports its start in begun, waits for inFlight and then counts
// a packet of the first rule.
func lateCounter(t testing.TB, counts, begun *ebpf.Map) *ebpf.Program {
	t.Helper()
	if err := features.HaveProgramHelper(ebpf.SchedCLS, asm.FnLoop); err != nil {
		t.Skip("need: kernel", err, "(bpf_loop, Linux 5.17)")
	}
	element := func(m *ebpf.Map) asm.Instructions {
		return asm.Instructions{
			asm.StoreImm(asm.RFP, -4, 0, asm.Word),
			asm.LoadMapPtr(asm.R1, m.FD()), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
			asm.FnMapLookupElem.Call(),
			asm.JEq.Imm(asm.R0, 0, "end"),
		}
	}
	const most = 1 << 23 // iterations of the loop, each reading the clock
	ins := element(begun)
	ins = append(ins,
		asm.Mov.Imm(asm.R1, 1), asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
		asm.FnKtimeGetNs.Call(),
		asm.Add.Imm(asm.R0, int32(inFlight)),
		asm.StoreMem(asm.RFP, -16, asm.R0, asm.DWord),
		asm.Mov.Imm(asm.R1, most),
		asm.Instruction{OpCode: asm.LoadImmOp(asm.DWord), Dst: asm.R2, Src: asm.PseudoFunc, Constant: -1}.WithReference("until"),
		asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -16),
		asm.Mov.Imm(asm.R4, 0),
		asm.FnLoop.Call(),
	)
	ins = append(ins, element(counts)...)
	ins = append(ins,
		asm.LoadMem(asm.R1, asm.R0, 0, asm.DWord), asm.Add.Imm(asm.R1, 1), asm.StoreMem(asm.R0, 0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("end"), asm.Return(),
		// until(_, end) ends the loop at the deadline.
		asm.Mov.Reg(asm.R6, asm.R2).WithSymbol("until"),
		asm.FnKtimeGetNs.Call(),
		asm.LoadMem(asm.R1, asm.R6, 0, asm.DWord),
		asm.Mov.Reg(asm.R2, asm.R0), asm.Mov.Imm(asm.R0, 0),
		asm.JLT.Reg(asm.R2, asm.R1, "go_on"),
		asm.Mov.Imm(asm.R0, 1),
		asm.Return().WithSymbol("go_on"),
	)
	// The kernel requires BTF types of callback functions.
	number := &btf.Int{Name: "long", Size: 8, Encoding: btf.Signed}
	for i := range ins {
		switch name := ins[i].Symbol(); {
		case i == 0:
			ins[i] = function(ins[i], "late", number, &btf.Pointer{Target: &btf.Void{}})
		case name == "until":
			ins[i] = function(ins[i], name, number, number, &btf.Pointer{Target: &btf.Void{}})
		}
	}
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "late", Type: ebpf.SchedCLS, License: "GPL", Instructions: ins})
	if err != nil {
		t.Fatalf("%+v", err)
	}
	return p
}

func function(ins asm.Instruction, name string, returns btf.Type, takes ...btf.Type) asm.Instruction {
	proto := &btf.FuncProto{Return: returns}
	for i, p := range takes {
		proto.Params = append(proto.Params, btf.FuncParam{Name: string(rune('a' + i)), Type: p})
	}
	return btf.WithFuncMetadata(ins.WithSymbol(name), &btf.Func{Name: name, Type: proto, Linkage: btf.StaticFunc})
}
