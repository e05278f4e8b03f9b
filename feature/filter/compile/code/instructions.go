// SPDX-License-Identifier: Apache-2.0

package code

import "github.com/cilium/ebpf/asm"

// Instructions that cilium/ebpf cannot write.

// CompareExchange stores src in 8 bytes of memory if they are what is in R0, which gets what they were. The constant says
// that it is this and no addition; cilium/ebpf v0.22.0 forgets to write it.
func CompareExchange(dst asm.Register, offset int16, src asm.Register) asm.Instruction {
	i := asm.CmpXchg.Mem(dst, src, asm.DWord, offset)
	i.Constant = int64(asm.CmpXchg >> 8)
	return i
}

// MayGoto jumps where it has been passed some million times, which the verifier takes for an end of the loop.
func MayGoto(offset int16) asm.Instruction {
	return asm.Instruction{OpCode: asm.OpCode(asm.JumpClass) | 0xe0, Offset: offset} // BPF_JCOND, BPF_MAY_GOTO
}

// Kfunc calls a function of the kernel by its BTF ID.
func Kfunc(id int32) asm.Instruction {
	return asm.Instruction{OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.Call), Src: asm.PseudoKfuncCall, Constant: int64(id)}
}
