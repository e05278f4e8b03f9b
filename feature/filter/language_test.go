// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
)

// portLanguage knows `udp.dstport == N` and `udp`, of IPv4 without options and
// IPv6 without extension headers: enough for tests of where programs are attached,
// which are not to depend on the compiler.
type portLanguage struct{}

// parsePort returns 0 for every port.
func parsePort(match string) (uint16, error) {
	if match == "udp" {
		return 0, nil
	}
	text, ok := strings.CutPrefix(match, "udp.dstport == ")
	if !ok {
		return 0, &placed{1, fmt.Errorf("unknown field %q", strings.Fields(match)[0])}
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil {
		return 0, &placed{16, fmt.Errorf("%q is no port", text)}
	}
	return uint16(n), nil
}

func (portLanguage) check(match string, _ view, _ map[string]string) error {
	_, err := parsePort(match)
	return err
}

// generator writes a program: R6 is the context, R7 the port (-1: no UDP).
type generator struct {
	view view
	ins  asm.Instructions
	kfn  int64 // bpf_dynptr_from_skb
	n    int
}

func (portLanguage) compile(f Filter, v view) (*compiled, error) {
	g := &generator{view: v}
	spec := &ebpf.ProgramSpec{Name: programName, License: "Dual BSD/GPL"}
	drop, pass := int32(1), int32(0)
	switch v {
	case viewXTBPF:
		spec.Type = ebpf.SocketFilter
	case viewTC, viewTCRaw:
		spec.Type, drop, pass = ebpf.SchedCLS, 2, -1
	case viewXDP:
		spec.Type, drop, pass = ebpf.XDP, 1, 2
	case viewNetfilter:
		spec.Type, spec.AttachType, drop, pass = ebpf.Netfilter, ebpf.AttachNetfilter, 0, 1
		id, err := kfunc("bpf_dynptr_from_skb")
		if err != nil {
			return nil, err
		}
		g.kfn = id
	}
	verdict := map[Action]int32{Drop: drop, Pass: pass}
	g.prologue()
	for i, r := range f.Rules {
		port, err := parsePort(r.Match.Text)
		if err != nil {
			return nil, err
		}
		next := fmt.Sprintf("rule%d", i+1)
		if port == 0 {
			g.add(asm.JEq.Imm(asm.R7, -1, next))
		} else {
			g.add(asm.JNE.Imm(asm.R7, int32(port), next))
		}
		g.count(i)
		if r.Action != Count {
			g.add(asm.Mov.Imm(asm.R0, verdict[r.Action]), asm.Return())
		}
		g.label(next)
	}
	g.count(len(f.Rules))
	g.add(asm.Mov.Imm(asm.R0, verdict[f.Default]), asm.Return())
	spec.Instructions = g.ins
	return &compiled{spec: &ebpf.CollectionSpec{Programs: map[string]*ebpf.ProgramSpec{programName: spec},
		Maps: map[string]*ebpf.MapSpec{countsMap: {Name: countsMap, Type: ebpf.PerCPUArray, KeySize: 4, ValueSize: 24, MaxEntries: uint32(len(f.Rules) + 1)}}}}, nil
}

func kfunc(name string) (int64, error) {
	ks, err := btf.LoadKernelSpec()
	if err != nil {
		return 0, err
	}
	var fn *btf.Func
	if err := ks.TypeByName(name, &fn); err != nil {
		return 0, err
	}
	id, err := ks.TypeID(fn)
	return int64(id), err
}

func (g *generator) add(ins ...asm.Instruction) { g.ins = append(g.ins, ins...) }

// label marks the next instruction, which does nothing.
func (g *generator) label(name string) { g.add(asm.Mov.Reg(asm.R8, asm.R8).WithSymbol(name)) }

func (g *generator) prologue() {
	g.add(asm.Mov.Reg(asm.R6, asm.R1), asm.Mov.Imm(asm.R7, -1), asm.Mov.Imm(asm.R8, 0))
	if g.view == viewNetfilter {
		g.add(asm.LoadMem(asm.R1, asm.R6, 8, asm.DWord), asm.Mov.Imm(asm.R2, 0), asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -32),
			asm.Instruction{OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.Call), Src: asm.PseudoKfuncCall, Constant: g.kfn},
			asm.JNE.Imm(asm.R0, 0, "parsed"))
	}
	g.load(0, asm.Byte)
	g.add(asm.RSh.Imm(asm.R9, 4), asm.JEq.Imm(asm.R9, 6, "ipv6"), asm.JNE.Imm(asm.R9, 4, "parsed"))
	g.load(9, asm.Byte)
	g.add(asm.JNE.Imm(asm.R9, 17, "parsed"))
	g.load(22, asm.Half)
	g.add(asm.Mov.Reg(asm.R7, asm.R9), asm.Ja.Label("parsed"))
	g.label("ipv6")
	g.load(6, asm.Byte)
	g.add(asm.JNE.Imm(asm.R9, 17, "parsed"))
	g.load(42, asm.Half)
	g.add(asm.Mov.Reg(asm.R7, asm.R9))
	g.label("parsed")
}

// load reads a field at an offset from the IP header into R9; what is too short is no UDP.
func (g *generator) load(off int32, size asm.Size) {
	bytes := int32(size.Sizeof())
	switch g.view {
	case viewXDP:
		g.add(asm.LoadMem(asm.R1, asm.R6, 0, asm.Word), asm.LoadMem(asm.R2, asm.R6, 4, asm.Word),
			asm.Mov.Reg(asm.R3, asm.R1), asm.Add.Imm(asm.R3, 14+off+bytes), asm.JGT.Reg(asm.R3, asm.R2, "parsed"),
			asm.LoadMem(asm.R9, asm.R1, int16(14+off), size))
	case viewNetfilter:
		g.add(asm.Mov.Reg(asm.R1, asm.RFP), asm.Add.Imm(asm.R1, -8), asm.Mov.Imm(asm.R2, bytes), asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -32),
			asm.Mov.Imm(asm.R4, off), asm.Mov.Imm(asm.R5, 0), asm.FnDynptrRead.Call(), asm.JNE.Imm(asm.R0, 0, "parsed"),
			asm.LoadMem(asm.R9, asm.RFP, -8, size))
	default:
		g.add(asm.Mov.Reg(asm.R1, asm.R6), asm.Mov.Imm(asm.R2, off), asm.Mov.Reg(asm.R3, asm.RFP), asm.Add.Imm(asm.R3, -8), asm.Mov.Imm(asm.R4, bytes),
			asm.Mov.Imm(asm.R5, 1), asm.FnSkbLoadBytesRelative.Call(), asm.JNE.Imm(asm.R0, 0, "parsed"), asm.LoadMem(asm.R9, asm.RFP, -8, size))
	}
	if size == asm.Half {
		g.add(asm.HostTo(asm.BE, asm.R9, asm.Half))
	}
}

// count counts a packet of 100 bytes, which is what tests check for.
func (g *generator) count(i int) {
	g.n++
	skip := fmt.Sprintf("counted%d", g.n)
	g.add(asm.StoreImm(asm.RFP, -4, int64(i), asm.Word), asm.LoadMapPtr(asm.R1, 0).WithReference(countsMap), asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(), asm.JEq.Imm(asm.R0, 0, skip), asm.Mov.Reg(asm.R9, asm.R0),
		asm.LoadMem(asm.R1, asm.R9, 0, asm.DWord), asm.Add.Imm(asm.R1, 1), asm.StoreMem(asm.R9, 0, asm.R1, asm.DWord),
		asm.LoadMem(asm.R1, asm.R9, 8, asm.DWord), asm.Add.Imm(asm.R1, 100), asm.StoreMem(asm.R9, 8, asm.R1, asm.DWord),
		asm.FnKtimeGetNs.Call(), asm.StoreMem(asm.R9, 16, asm.R0, asm.DWord))
	g.label(skip)
}
