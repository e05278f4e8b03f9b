// SPDX-License-Identifier: Apache-2.0

package code

import "github.com/cilium/ebpf/asm"

// Instructions unsupported by cilium/ebpf.

// CompareExchange stores src in 8 bytes of memory if these equal R0. R0 becomes their previous value. The constant
// selects the operation; cilium/ebpf v0.22.0 does not write it.
func CompareExchange(dst asm.Register, offset int16, src asm.Register) asm.Instruction {
	i := asm.CmpXchg.Mem(dst, src, asm.DWord, offset)
	i.Constant = int64(asm.CmpXchg >> 8)
	return i
}

// MayGoto jumps after some million passes. The verifier accepts it as the end of a loop.
func MayGoto(offset int16) asm.Instruction {
	return asm.Instruction{OpCode: asm.OpCode(asm.JumpClass) | 0xe0, Offset: offset} // BPF_JCOND, BPF_MAY_GOTO
}

// Kfunc calls a kernel function by its BTF ID.
func Kfunc(id int32) asm.Instruction {
	return asm.Instruction{OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.Call), Src: asm.PseudoKfuncCall, Constant: int64(id)}
}
