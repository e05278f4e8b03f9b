// SPDX-License-Identifier: Apache-2.0

// Package running finds out which instructions, helpers and types the running kernel has for filters.
package running

import (
	"fmt"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/kernel"
)

// Kernel is what programs make use of where the kernel has it.
type Kernel struct {
	CoarseClock bool  // bpf_ktime_get_coarse_ns, 5.11
	Atomics     bool  // compare and exchange, 5.12
	MayGoto     bool  // may_goto, 6.9: loops that the verifier goes through twice, not in each turn
	Unwritten   bool  // reads of stack that nothing has written, 6.3: what is absent need not be written
	DynptrSkb   int32 // BTF ID of bpf_dynptr_from_skb, 6.4: netfilter only
	SkbLen      int16 // where struct sk_buff has its len: netfilter only
	// Skb is how programs of sockets, xt_bpf and netfilter read packets where they are, 6.2. Nil: by helpers, of which
	// each takes as long as a rule.
	Skb *Skb
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

// Netfilter is the running kernel as netfilter programs see it.
func Netfilter() (*Kernel, error) {
	if err := DynptrSkb.Check(); err != nil {
		return nil, err
	}
	nf, err := runningNetfilter()
	if err != nil {
		return nil, err
	}
	k := Any()
	k.CoarseClock = false // netfilter programs may not ask it
	k.DynptrSkb, k.SkbLen, k.Skb = nf.DynptrSkb, nf.SkbLen, skbOfNetfilter()
	return k, nil
}

// Sockets is the running kernel as programs of sockets see it.
func Sockets() *Kernel {
	k := Any()
	k.Skb = skbOfSockets()
	return k
}

// Any is the running kernel as programs of any hook see it.
func Any() *Kernel {
	k := *runningAny()
	return &k
}

var runningAny = sync.OnceValue(func() *Kernel {
	// Whatever the reason that a probe fails for, the program is then made without.
	return &Kernel{
		CoarseClock: features.HaveProgramHelper(ebpf.SocketFilter, asm.FnKtimeGetCoarseNs) == nil,
		Atomics:     probeAtomics() == nil,
		MayGoto:     probe(ebpf.SocketFilter, code.MayGoto(0)) == nil,
		Unwritten:   probe(ebpf.SocketFilter, asm.LoadMem(asm.R0, asm.RFP, -8, asm.DWord)) == nil,
	}
})

// probe loads a program of these instructions.
func probe(t ebpf.ProgramType, ins ...asm.Instruction) error {
	spec := &ebpf.ProgramSpec{Type: t, License: code.License, Instructions: append(ins, asm.Mov.Imm(asm.R0, 0), asm.Return())}
	if t == ebpf.Netfilter {
		spec.AttachType = ebpf.AttachNetfilter
	}
	p, err := ebpf.NewProgram(spec)
	if err != nil {
		return err
	}
	return p.Close()
}

// probeAtomics loads the smallest program that compares and exchanges.
func probeAtomics() error {
	return probe(ebpf.SocketFilter, asm.Mov.Imm(asm.R0, 0), asm.Mov.Imm(asm.R1, 1), asm.StoreMem(asm.RFP, -8, asm.R0, asm.DWord),
		code.CompareExchange(asm.RFP, -8, asm.R1))
}

var runningNetfilter = sync.OnceValues(func() (Kernel, error) {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return Kernel{}, fmt.Errorf("the kernel's types: %w", err)
	}
	id, err := functionID(spec, "bpf_dynptr_from_skb")
	if err != nil {
		return Kernel{}, err
	}
	s, err := skbMembers(spec)
	if err != nil {
		return Kernel{}, err
	}
	return Kernel{DynptrSkb: id, SkbLen: s["len"].off}, nil
})
