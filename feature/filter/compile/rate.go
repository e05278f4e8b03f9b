// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

// rateKeys is the maximum number of rate keys of one size. Beyond it, the least recently used are evicted.
const rateKeys = 1 << 16

// Locations of a rate's values, from the frame pointer: the clock and a new key's value.
const (
	rateNow = stackSaved - 8
	rateNew = 72 // in the scratch area
)

// retries is the number of attempts to update a bucket changed concurrently by other CPUs. After the last failure the
// packet passes: each failure means a counted packet of this key.
const retries = 4

// rateID numbers the rates of expressions.
func (p *Program) rateID(e *expr.Expr, index int) int32 {
	if p.rates == nil {
		p.rates = map[*expr.Expr]int32{}
	}
	if _, ok := p.rates[e]; !ok {
		p.rates[e] = int32(len(p.rates))
	}
	return p.rates[e]<<8 | int32(index)
}

// rate takes a packet from the bucket of its key, like [expr.Rate.next].
func (g *gen) rate(n *expr.Rate, t, f code.Label) {
	above, below := t, f
	if n.Not {
		above, below = f, t
	}
	size := g.rateKey(n, f)
	name := fmt.Sprintf("filter_r%d", size)
	if g.p.Spec.Maps[name] == nil {
		g.p.Spec.Maps[name] = &ebpf.MapSpec{Name: name, Type: ebpf.LRUHash, KeySize: uint32(size), ValueSize: 8, MaxEntries: rateKeys}
	}
	lookup := func() {
		g.Op(asm.LoadMapPtr(asm.R1, 0).WithReference(name))
		g.Op(stack(asm.R2, int32(g.scratchOff))...)
		g.Op(asm.FnMapLookupElem.Call())
	}
	g.Op(asm.FnKtimeGetNs.Call(), asm.StoreMem(asm.RFP, rateNow, asm.R0, asm.DWord))
	found := g.Label()
	lookup()
	g.Jump(asm.JNE.Imm(asm.R0, 0, ""), found)
	g.Note = "a new key: its bucket is full except for this packet"
	g.Op(asm.LoadMem(asm.R0, asm.RFP, rateNow, asm.DWord))
	g.add(n.Interval())
	g.Op(asm.StoreMem(asm.RFP, g.scratchOff+rateNew, asm.R0, asm.DWord), asm.LoadMapPtr(asm.R1, 0).WithReference(name))
	g.Op(stack(asm.R2, int32(g.scratchOff))...)
	g.Op(stack(asm.R3, int32(g.scratchOff+rateNew))...)
	g.Op(asm.Mov.Imm(asm.R4, 1 /* BPF_NOEXIST */), asm.FnMapUpdateElem.Call())
	g.Jump(asm.JEq.Imm(asm.R0, 0, ""), below)
	lookup() // another CPU was faster
	g.Jump(asm.JEq.Imm(asm.R0, 0, ""), below)
	g.Bind(found)
	g.Op(asm.Mov.Reg(asm.R7, asm.R0))
	g.bucket(n, above, below)
}

// add adds a number to R0, even one of more than 31 bits.
func (g *gen) add(v uint64) {
	g.Op(asm.LoadImm(asm.R1, int64(v), asm.DWord), asm.Add.Reg(asm.R0, asm.R1))
}

// bucket takes the packet from the bucket pointed to by R7.
func (g *gen) bucket(n *expr.Rate, above, below code.Label) {
	tries := retries
	if !g.o.Kernel.Atomics {
		// Before Linux 5.12 the new value is stored without an exchange: concurrent packets of a key may count once.
		tries = 1
	}
	for range tries {
		later := g.Label()
		g.Op(asm.LoadMem(asm.R0, asm.R7, 0, asm.DWord), asm.Mov.Reg(asm.R3, asm.R0), asm.LoadMem(asm.R2, asm.RFP, rateNow, asm.DWord))
		g.Jump(asm.JGT.Reg(asm.R3, asm.R2, ""), later)
		g.Op(asm.Mov.Reg(asm.R3, asm.R2))
		g.Bind(later)
		g.Op(asm.Mov.Reg(asm.R4, asm.R3), asm.Sub.Reg(asm.R4, asm.R2), asm.LoadImm(asm.R1, int64(n.Tolerance()), asm.DWord))
		g.Jump(asm.JGT.Reg(asm.R4, asm.R1, ""), above)
		g.Op(asm.LoadImm(asm.R1, int64(n.Interval()), asm.DWord), asm.Add.Reg(asm.R3, asm.R1))
		if tries == 1 {
			g.Op(asm.StoreMem(asm.R7, 0, asm.R3, asm.DWord))
			break
		}
		g.Op(asm.Mov.Reg(asm.R5, asm.R0), code.CompareExchange(asm.R7, 0, asm.R3))
		g.Jump(asm.JEq.Reg(asm.R0, asm.R5, ""), below)
	}
	g.GoTo(below)
}

// rateKey writes the key to the scratch area and returns its size. If a field is absent it jumps to f.
func (g *gen) rateKey(n *expr.Rate, f code.Label) int {
	at := g.scratchOff
	g.Op(asm.StoreImm(asm.RFP, at, int64(g.p.rateID(g.rule, n.Index)), asm.Word))
	at += 4
	for _, k := range n.Keys {
		ids := k.Field.Each()
		done := g.Label()
		for i, id := range ids {
			next := f
			if i < len(ids)-1 {
				next = g.Label()
			}
			g.there(locations[id].absent, next)
			g.keyField(k.Field, id, at)
			g.GoTo(done)
			if next != f {
				g.Bind(next)
			}
		}
		g.Bind(done)
		at += int16(expr.KeySize(k.Field))
	}
	return int(at - g.scratchOff)
}

// keyField writes one field of a key.
func (g *gen) keyField(f *expr.Field, id expr.ID, at int16) {
	p, field := locations[id], expr.Lookup(id)
	words := 0
	switch field.Type {
	case expr.MAC:
		for i := int16(0); i < 6; i += 2 {
			g.Op(asm.LoadMem(asm.R0, asm.R8, p.off+i, asm.Half), asm.StoreMem(asm.RFP, at+i, asm.R0, asm.Half))
		}
		g.Op(asm.StoreImm(asm.RFP, at+6, 0, asm.Half))
		return
	case expr.IPv4:
		words = 1
	case expr.IPv6:
		words = 4
	default:
		g.value(p, expr.Operand{Field: field})
		g.Op(asm.StoreMem(asm.RFP, at, asm.R0, asm.Word))
		return
	}
	for i := range int16(words) {
		g.Op(asm.LoadMem(asm.R0, asm.R8, p.off+4*i, asm.Word), asm.StoreMem(asm.RFP, at+4*i, asm.R0, asm.Word))
	}
	if f.Type == expr.IP { // the key includes the family
		for i := words; i < 4; i++ {
			g.Op(asm.StoreImm(asm.RFP, at+int16(4*i), 0, asm.Word))
		}
		g.Op(asm.StoreImm(asm.RFP, at+16, int64(words), asm.Word))
	}
}
