// SPDX-License-Identifier: Apache-2.0

package running

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"github.com/weir-project/weir/feature/filter/compile/code"
)

// Skb describes direct reads of packet memory by a program, like a tracing program's reads of kernel memory.
// bpf_rdonly_cast declares an address to be a kernel struct. A load of one of its members is then one instruction and
// cannot fault. The declared address lies so far before the packet that the scratch area of sk_buff overlaps the
// packet. That area has 48 bytes, readable at any width.
//
// Offsets are in struct sk_buff (include/linux/skbuff.h), IDs are of the kernel's BTF.
type Skb struct {
	Type    int32 // struct sk_buff
	Cast    int32 // bpf_rdonly_cast
	Context int32 // bpf_cast_to_kern_ctx: from __sk_buff to sk_buff
	Head    int16 // the buffer, a pointer
	Network int16 // offset of the network header in the buffer, u16
	Tail    int16 // end of the linear data, u32
	Data    int16 // start of the data, a pointer
	Len     int16 // of the packet, u32,
	DataLen int16 // of the nonlinear part, u32
	Scratch int16 // cb
}

// NfSkb is the offset of the sk_buff pointer in a netfilter program's context.
const NfSkb = 8

// MaxScratch is the number of bytes made readable by one cast.
const MaxScratch = 48

var (
	skbOfSockets   = sync.OnceValue(func() *Skb { return probeSkb(ebpf.SocketFilter) })
	skbOfNetfilter = sync.OnceValue(func() *Skb { return probeSkb(ebpf.Netfilter) })
)

// probeSkb returns nil if programs of this type cannot read packets this way, for any reason.
func probeSkb(t ebpf.ProgramType) *Skb {
	spec, err := btf.LoadKernelSpec()
	if err != nil {
		return nil
	}
	s, err := newSkb(spec)
	if err != nil {
		return nil
	}
	ins := asm.Instructions{asm.LoadMem(asm.R1, asm.R1, NfSkb, asm.DWord)}
	if t == ebpf.SocketFilter {
		ins = asm.Instructions{code.Kfunc(s.Context), asm.Mov.Reg(asm.R1, asm.R0)}
	}
	ins = append(ins, s.Ends(t == ebpf.SocketFilter)...)
	ins = append(ins, asm.Mov.Reg(asm.R1, asm.R2), asm.Mov.Imm(asm.R2, s.Type), code.Kfunc(s.Cast),
		asm.LoadMem(asm.R0, asm.R0, s.Scratch, asm.DWord))
	if probe(t, ins...) != nil {
		return nil
	}
	return s
}

// Ends sets R2 to the address of the IP header and R3 to the number of linear bytes there, for the sk_buff in R1. A
// socket's packets begin at the transport header. At netfilter they begin at the IP header.
func (s *Skb) Ends(socket bool) []asm.Instruction {
	if !socket {
		return []asm.Instruction{
			asm.LoadMem(asm.R2, asm.R1, s.Data, asm.DWord),
			asm.LoadMem(asm.R3, asm.R1, s.Len, asm.Word), asm.LoadMem(asm.R4, asm.R1, s.DataLen, asm.Word), asm.Sub.Reg(asm.R3, asm.R4),
		}
	}
	return []asm.Instruction{
		asm.LoadMem(asm.R2, asm.R1, s.Head, asm.DWord), asm.LoadMem(asm.R4, asm.R1, s.Network, asm.Half),
		asm.LoadMem(asm.R3, asm.R1, s.Tail, asm.Word),
		asm.Add.Reg(asm.R2, asm.R4), asm.Sub.Reg(asm.R3, asm.R4),
	}
}

// member is the position of a struct member, including members of anonymous structs in it.
type member struct {
	off  int16
	size int
}

func newSkb(spec *btf.Spec) (*Skb, error) {
	m, err := skbMembers(spec)
	if err != nil {
		return nil, err
	}
	for name, size := range map[string]int{"head": 8, "network_header": 2, "tail": 4, "data": 8, "len": 4, "data_len": 4, "cb": MaxScratch} {
		if m[name].size != size {
			return nil, fmt.Errorf("struct sk_buff has a %s of %d bytes, not %d", name, m[name].size, size)
		}
	}
	s := &Skb{Head: m["head"].off, Network: m["network_header"].off, Tail: m["tail"].off,
		Data: m["data"].off, Len: m["len"].off, DataLen: m["data_len"].off, Scratch: m["cb"].off}
	var skb *btf.Struct
	if err := spec.TypeByName("sk_buff", &skb); err != nil {
		return nil, err
	}
	id, err := spec.TypeID(skb)
	if err != nil {
		return nil, err
	}
	s.Type = int32(id)
	if s.Cast, err = functionID(spec, "bpf_rdonly_cast"); err != nil {
		return nil, err
	}
	s.Context, err = functionID(spec, "bpf_cast_to_kern_ctx")
	return s, err
}

// skbMembers returns the members of struct sk_buff by name.
func skbMembers(spec *btf.Spec) (map[string]member, error) {
	var skb *btf.Struct
	if err := spec.TypeByName("sk_buff", &skb); err != nil {
		return nil, fmt.Errorf("struct sk_buff: %w", err)
	}
	out := map[string]member{}
	addMembers(out, skb.Members, 0)
	if out["len"].size != 4 {
		return nil, errors.New("struct sk_buff has no len")
	}
	return out, nil
}

func addMembers(to map[string]member, ms []btf.Member, base uint32) {
	for _, m := range ms {
		off := base + m.Offset.Bytes()
		if m.Name != "" {
			if size, err := btf.Sizeof(m.Type); err == nil && m.BitfieldSize == 0 {
				to[m.Name] = member{int16(off), size}
			}
			continue
		}
		switch t := btf.UnderlyingType(m.Type).(type) {
		case *btf.Struct:
			addMembers(to, t.Members, off)
		case *btf.Union:
			addMembers(to, t.Members, off)
		}
	}
}

func functionID(spec *btf.Spec, name string) (int32, error) {
	var f *btf.Func
	if err := spec.TypeByName(name, &f); err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	id, err := spec.TypeID(f)
	return int32(id), err
}
