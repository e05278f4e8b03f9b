// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/kernel"
)

// CompareAndSwap updates words written by several CPUs.
var CompareAndSwap = kernel.Need{Name: "atomic compare-and-exchange in BPF", Since: "5.12", Optional: true,
	For: "limits across several CPUs", Remedy: "use a newer kernel",
	Probe: probeInstructions(ebpf.SocketFilter, asm.Instructions{
		asm.Mov.Imm(asm.R0, 0),
		asm.StoreMem(asm.RFP, -8, asm.R0, asm.DWord),
		compareAndSwap,
		asm.Mov.Imm(asm.R0, 0),
		asm.Return(),
	})}

// compareAndSwap is the instruction, on the word at the top of the stack. cilium/ebpf 0.22.0 encodes every atomic
// operation as an addition, so the operation is set here (BPF_CMPXCHG, linux/bpf.h).
var compareAndSwap = func() asm.Instruction {
	ins := asm.CmpXchg.Mem(asm.RFP, asm.R0, asm.DWord, -8)
	ins.Constant = 0xf1
	return ins
}()

// CgroupIngress sees packets before delivery to the sockets of a cgroup.
var CgroupIngress = kernel.Need{Name: "cgroup_skb ingress hooks with links", Since: "5.7", Optional: true,
	For:    "guarding services at their sockets; without it at interfaces only",
	Remedy: "use a newer kernel",
	Probe: func() error {
		if _, err := cgroupRoot(); err != nil {
			return err
		}
		return kernel.ProbeProgram(ebpf.CGroupSKB)()
	}}

// PacketNetnsCookie gives a program at a socket the cookie of its network namespace.
var PacketNetnsCookie = kernel.Need{Name: "bpf_get_netns_cookie in cgroup_skb hooks", Since: "6.15", Optional: true,
	For: "guarding services at their sockets in one of several network namespaces; without it a guard counts datagrams to the same address and port in all namespaces",
	Probe: probeInstructions(ebpf.CGroupSKB, asm.Instructions{
		asm.FnGetNetnsCookie.Call(),
		asm.Mov.Imm(asm.R0, 1),
		asm.Return(),
	})}

// probeInstructions returns a probe that loads a program.
func probeInstructions(t ebpf.ProgramType, ins asm.Instructions) func() error {
	return func() error {
		kernel.LiftMemlock()
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: t, License: "Dual BSD/GPL", Instructions: ins})
		if err != nil {
			return kernel.ExplainProbe(err)
		}
		return p.Close()
	}
}
