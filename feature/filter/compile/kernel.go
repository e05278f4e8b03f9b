// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"

	"github.com/weir-project/weir/kernel"
)

// Kernel is what programs make use of where the kernel has it.
type Kernel struct {
	CoarseClock bool  // bpf_ktime_get_coarse_ns, 5.11
	Atomics     bool  // compare and exchange, 5.12
	DynptrSkb   int32 // BTF ID of bpf_dynptr_from_skb, 6.4: netfilter only
	SkbLen      int16 // where struct sk_buff has its len: netfilter only
}

// DynptrSkb lets a netfilter program read packets.
var DynptrSkb = kernel.Need{Name: "netfilter programs with bpf_dynptr_from_skb", Since: "6.4", For: "filters at netfilter links",
	Remedy: "use the hooks nft, tc or xdp on this kernel",
	Probe: func() error {
		if err := features.HaveProgramType(ebpf.Netfilter); err != nil {
			return err
		}
		_, err := runningNetfilter()
		return err
	}}

// Running is the kernel that this process runs on, as far as a hook is concerned.
func Running(h Hook) (*Kernel, error) {
	k := *runningAny()
	if h != Netfilter {
		return &k, nil
	}
	k.CoarseClock = false // netfilter programs may not ask it
	if err := DynptrSkb.Check(); err != nil {
		return nil, err
	}
	nf, err := runningNetfilter()
	if err != nil {
		return nil, err
	}
	k.DynptrSkb, k.SkbLen = nf.DynptrSkb, nf.SkbLen
	return &k, nil
}

var runningAny = sync.OnceValue(func() *Kernel {
	// Whatever the reason that a probe fails for, the program is then made without.
	return &Kernel{
		CoarseClock: features.HaveProgramHelper(ebpf.SocketFilter, asm.FnKtimeGetCoarseNs) == nil,
		Atomics:     probeAtomics() == nil,
	}
})

// probeAtomics loads the smallest program that compares and exchanges.
func probeAtomics() error {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: license, Instructions: asm.Instructions{
		asm.Mov.Imm(asm.R0, 0), asm.Mov.Imm(asm.R1, 1), asm.StoreMem(asm.RFP, -8, asm.R0, asm.DWord),
		compareExchange(asm.RFP, -8, asm.R1), asm.Mov.Imm(asm.R0, 0), asm.Return(),
	}})
	if err != nil {
		return err
	}
	return p.Close()
}

// compareExchange stores src in 8 bytes of memory if they are what is in R0, which gets what they were. The constant says
// that it is this and no addition; cilium/ebpf v0.22.0 forgets to write it.
func compareExchange(dst asm.Register, offset int16, src asm.Register) asm.Instruction {
	i := asm.CmpXchg.Mem(dst, src, asm.DWord, offset)
	i.Constant = int64(asm.CmpXchg >> 8)
	return i
}

var runningNetfilter = sync.OnceValues(func() (Kernel, error) {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return Kernel{}, fmt.Errorf("the kernel's types: %w", err)
	}
	var f *btf.Func
	if err := spec.TypeByName("bpf_dynptr_from_skb", &f); err != nil {
		return Kernel{}, fmt.Errorf("bpf_dynptr_from_skb: %w", err)
	}
	id, err := spec.TypeID(f)
	if err != nil {
		return Kernel{}, err
	}
	var skb *btf.Struct
	if err := spec.TypeByName("sk_buff", &skb); err != nil {
		return Kernel{}, fmt.Errorf("struct sk_buff: %w", err)
	}
	for _, m := range skb.Members {
		if m.Name == "len" {
			return Kernel{DynptrSkb: int32(id), SkbLen: int16(m.Offset.Bytes())}, nil
		}
	}
	return Kernel{}, errors.New("struct sk_buff has no len")
})
