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

// A packet that is still in a program when its rules have changed twice is counted:
// the first change leaves the program's map, and the second adds its counts up,
// which must wait until nothing counts there. What counts late is a program of the
// test's own here, on the filter's map, since no rules take as long as two changes;
// on a machine whose CPUs are shared, one that stands still does.
func TestCountsOfPacketInFlight(t *testing.T) {
	needHook(t, HookTCX)
	if runtime.NumCPU() < 2 {
		t.Skip("need: kernel with two CPUs")
	}
	w := newWorld(t)
	for range 50 {
		counted, inTheMiddle := w.countLate()
		if counted != 1 {
			t.Fatalf("counted %d packets, want the one that was in flight", counted)
		}
		if inTheMiddle {
			return
		}
	}
	t.Error("no packet was in the program after a change")
}

// countLate changes a filter twice while a packet is in its program, and returns how
// many packets it has counted, and whether the packet was still there after the
// first change, which may find no CPU for as long.
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

// inFlight is how long the packet is in the program.
const inFlight = 200 * time.Millisecond

// lateCounter is a program that says that it has begun, stays inFlight in its one
// run, and then counts a packet of the first rule.
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
	const most = 1 << 23 // runs of the loop, each of which asks the clock
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
		// until(_, end) ends the loop when the time has come.
		asm.Mov.Reg(asm.R6, asm.R2).WithSymbol("until"),
		asm.FnKtimeGetNs.Call(),
		asm.LoadMem(asm.R1, asm.R6, 0, asm.DWord),
		asm.Mov.Reg(asm.R2, asm.R0), asm.Mov.Imm(asm.R0, 0),
		asm.JLT.Reg(asm.R2, asm.R1, "go_on"),
		asm.Mov.Imm(asm.R0, 1),
		asm.Return().WithSymbol("go_on"),
	)
	// The kernel wants the types of functions that are called back.
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
