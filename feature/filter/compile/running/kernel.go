// SPDX-License-Identifier: Apache-2.0

// Package running detects the running kernel's instructions, helpers and types for filters.
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

// Kernel has the optional kernel features used by programs.
type Kernel struct {
	CoarseClock bool  // bpf_ktime_get_coarse_ns, 5.11
	Atomics     bool  // compare and exchange, 5.12
	MayGoto     bool  // may_goto, 6.9: the verifier follows a loop twice instead of every turn
	Unwritten   bool  // reads of unwritten stack, 6.3: absent headers need no initialisation
	DynptrSkb   int32 // BTF ID of bpf_dynptr_from_skb, 6.4: netfilter only
	SkbLen      int16 // offset of len in struct sk_buff: netfilter only
	// Skb describes direct packet reads for sockets, xt_bpf and netfilter, 6.2. Nil: programs use helpers, each as
	// slow as a rule.
	Skb *Skb
}

// DynptrSkb is the need of netfilter programs for reading packets.
var DynptrSkb = kernel.Need{Name: "netfilter programs with bpf_dynptr_from_skb", Since: "6.4", For: "filters at netfilter links",
	Remedy: "use the hooks nft, tc or xdp on this kernel",
	Probe: func() error {
		if err := features.HaveProgramType(ebpf.Netfilter); err != nil {
			return err
		}
		_, err := runningNetfilter()
		return err
	}}

// Netfilter returns the running kernel's features for netfilter programs.
func Netfilter() (*Kernel, error) {
	if err := DynptrSkb.Check(); err != nil {
		return nil, err
	}
	nf, err := runningNetfilter()
	if err != nil {
		return nil, err
	}
	k := Any()
	k.CoarseClock = false // not allowed in netfilter programs
	k.DynptrSkb, k.SkbLen, k.Skb = nf.DynptrSkb, nf.SkbLen, skbOfNetfilter()
	return k, nil
}

// Sockets returns the running kernel's features for programs of sockets.
func Sockets() *Kernel {
	k := Any()
	k.Skb = skbOfSockets()
	return k
}

// Any returns the running kernel's features for programs of any hook.
func Any() *Kernel {
	k := *runningAny()
	return &k
}

var runningAny = sync.OnceValue(func() *Kernel {
	// If a probe fails, for any reason, programs do not use the feature.
	return &Kernel{
		CoarseClock: features.HaveProgramHelper(ebpf.SocketFilter, asm.FnKtimeGetCoarseNs) == nil,
		Atomics:     probeAtomics() == nil,
		MayGoto:     probe(ebpf.SocketFilter, code.MayGoto(0)) == nil,
		Unwritten:   probe(ebpf.SocketFilter, asm.LoadMem(asm.R0, asm.RFP, -8, asm.DWord)) == nil,
	}
})

// probe loads a program with these instructions.
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

// probeAtomics loads a minimal program with a compare and exchange.
func probeAtomics() error {
	return probe(ebpf.SocketFilter, asm.Mov.Imm(asm.R0, 0), asm.Mov.Imm(asm.R1, 1), asm.StoreMem(asm.RFP, -8, asm.R0, asm.DWord),
		code.CompareExchange(asm.RFP, -8, asm.R1))
}

var runningNetfilter = sync.OnceValues(func() (Kernel, error) {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return Kernel{}, fmt.Errorf("load the kernel's BTF: %w", err)
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
