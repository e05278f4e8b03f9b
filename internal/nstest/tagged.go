// SPDX-License-Identifier: Apache-2.0

package nstest

import (
	"encoding/binary"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// Tagged returns a tc program that calls another one with a packet carrying an 802.1Q tag. A device
// delivers that tag beside the packet. Callers of a test run (BPF_PROG_TEST_RUN) cannot pass one.
func Tagged(t testing.TB, p *ebpf.Program, vlan uint16) *ebpf.Program {
	t.Helper()
	NeedRoot(t)
	next, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatalf("nstest: %v", err)
	}
	t.Cleanup(func() { next.Close() })
	if err := next.Put(uint32(0), p); err != nil {
		t.Fatalf("nstest: %v", err)
	}
	const failed = 0xff // not returned by any tc program
	dot1q := binary.NativeEndian.Uint16([]byte{0x81, 0})
	out, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.Mov.Imm(asm.R2, int32(dot1q)),
		asm.Mov.Imm(asm.R3, int32(vlan)),
		asm.FnSkbVlanPush.Call(),
		asm.JNE.Imm(asm.R0, 0, "failed"),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, next.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, failed).WithSymbol("failed"),
		asm.Return(),
	}})
	if err != nil {
		t.Fatalf("nstest: %v", err)
	}
	t.Cleanup(func() { out.Close() })
	return out
}
