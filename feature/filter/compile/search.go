// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
)

// maxSpans is the maximum number of spans of numbers or addresses compared in code. More would exceed the range of a
// jump.
const maxSpans = 8192

var errSpans = fmt.Errorf("%w: a set has more than %d members: use a list", ErrTooLarge, maxSpans)

// merge sorts spans and joins adjacent ones.
func merge(ss []span) []span {
	slices.SortFunc(ss, func(a, b span) int { return cmp.Compare(a.lo, b.lo) })
	var out []span
	for _, s := range ss {
		if n := len(out); n > 0 && s.lo <= out[n-1].hi+1 {
			out[n-1].hi = max(out[n-1].hi, s.hi)
			continue
		}
		out = append(out, s)
	}
	return out
}

// inTurn is the maximum number of spans compared one by one.
const inTurn = 3

// search jumps to t if R0, a number of bits bits, is in a sorted span.
func (g *gen) search(ss []span, bits int, t, f code.Label) {
	if len(ss) > maxSpans {
		g.fail(errSpans)
		return
	}
	g.searchFrom(ss, uint64(1)<<bits-1, t, f)
	g.GoTo(f)
}

func (g *gen) searchFrom(ss []span, most uint64, t, f code.Label) {
	if len(ss) > inTurn {
		upper, mid := g.Label(), len(ss)/2
		g.Jump(asm.JGE.Imm32(asm.R0, int32(ss[mid].lo), ""), upper)
		g.searchFrom(ss[:mid], most, t, f)
		g.GoTo(f)
		g.Bind(upper)
		g.searchFrom(ss[mid:], most, t, f)
		return
	}
	for _, s := range ss {
		switch {
		case s.lo == s.hi:
			g.Jump(asm.JEq.Imm32(asm.R0, int32(s.lo), ""), t)
		case s.lo == 0:
			g.Jump(asm.JLE.Imm32(asm.R0, int32(s.hi), ""), t)
		case s.hi >= most:
			g.Jump(asm.JGE.Imm32(asm.R0, int32(s.lo), ""), t)
		default:
			g.Op(asm.Mov.Reg32(asm.R1, asm.R0), asm.Sub.Imm32(asm.R1, int32(s.lo)))
			g.Jump(asm.JLE.Imm32(asm.R1, int32(s.hi-s.lo), ""), t)
		}
	}
}

// addresses compares addresses of either family.
func (g *gen) addresses(x expr.Operand, op expr.Op, vs []expr.Value, t, f code.Label) {
	var four, six []expr.Value
	for _, v := range vs {
		a := v.From
		if !a.IsValid() {
			a = v.Prefix.Addr()
		}
		if a.Is4() {
			four = append(four, v)
		} else {
			six = append(six, v)
		}
	}
	g.each(ofFamily(x, vs), t, f, func(p location, id expr.ID, t, f code.Label) {
		if expr.Lookup(id).Type == expr.IPv4 {
			g.four(p, op, four, t, f)
		} else {
			g.six(p, op, six, t, f)
		}
	})
}

func number4(a netip.Addr) uint64 {
	b := a.As4()
	return uint64(binary.BigEndian.Uint32(b[:]))
}

// numbers4 converts IPv4 addresses to numbers.
func numbers4(vs []expr.Value) []expr.Value {
	out := make([]expr.Value, len(vs))
	for i, v := range vs {
		from, to := ends(v)
		out[i] = expr.Value{Lo: number4(from), Hi: number4(to)}
	}
	return out
}

// last returns the last address of a prefix.
func last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

func ends(v expr.Value) (from, to netip.Addr) {
	if v.From.IsValid() {
		return v.From, v.To
	}
	return v.Prefix.Addr(), last(v.Prefix)
}

func (g *gen) four(p location, op expr.Op, vs []expr.Value, t, f code.Label) {
	if len(vs) == 0 {
		g.GoTo(f)
		return
	}
	if len(vs) == 1 && op == expr.Eq && !vs[0].From.IsValid() { // compared in memory byte order
		n := vs[0].Prefix
		if n.Bits() == 0 {
			g.GoTo(t)
			return
		}
		g.Op(asm.LoadMem(asm.R0, asm.R8, p.off, asm.Word))
		if n.Bits() < 32 {
			g.Op(asm.And.Imm32(asm.R0, int32(swapped(^uint32(0)<<(32-n.Bits()), asm.Word))))
		}
		g.Jump(asm.JEq.Imm32(asm.R0, int32(swapped(uint32(number4(n.Addr())), asm.Word)), ""), t)
		g.GoTo(f)
		return
	}
	ss := spans(op, numbers4(vs), 32)
	g.Op(asm.LoadMem(asm.R0, asm.R8, p.off, asm.Word), asm.HostTo(asm.BE, asm.R0, asm.Word))
	g.search(ss, 32, t, f)
}

// span6 is the interval of addresses from lo to hi, each as two halves in host byte order.
type span6 struct{ lo, hi [2]uint64 }

func halves(a netip.Addr) [2]uint64 {
	b := a.As16()
	return [2]uint64{binary.BigEndian.Uint64(b[:8]), binary.BigEndian.Uint64(b[8:])}
}

func less(a, b [2]uint64) bool { return a[0] < b[0] || a[0] == b[0] && a[1] < b[1] }

func spans6(op expr.Op, vs []expr.Value) []span6 {
	most := [2]uint64{^uint64(0), ^uint64(0)}
	var out []span6
	for _, v := range vs {
		from, to := ends(v)
		s := span6{halves(from), halves(to)}
		switch op {
		case expr.Lt:
			if s.lo == ([2]uint64{}) {
				continue
			}
			s = span6{hi: halves(from.Prev())}
		case expr.Le:
			s.lo = [2]uint64{}
		case expr.Gt:
			if s.lo == most {
				continue
			}
			s = span6{halves(from.Next()), most}
		case expr.Ge:
			s.hi = most
		}
		out = append(out, s)
	}
	slices.SortFunc(out, func(a, b span6) int {
		return cmp.Or(cmp.Compare(a.lo[0], b.lo[0]), cmp.Compare(a.lo[1], b.lo[1]))
	})
	merged := out[:0]
	for _, s := range out {
		if n := len(merged); n > 0 && !less(merged[n-1].hi, s.lo) {
			if less(merged[n-1].hi, s.hi) {
				merged[n-1].hi = s.hi
			}
			continue
		}
		merged = append(merged, s)
	}
	return merged
}

func (g *gen) six(p location, op expr.Op, vs []expr.Value, t, f code.Label) {
	if len(vs) == 0 {
		g.GoTo(f)
		return
	}
	if len(vs) == 1 && op == expr.Eq && !vs[0].From.IsValid() {
		g.prefix6(p, vs[0].Prefix, t, f)
		return
	}
	ss := spans6(op, vs)
	if len(ss) > maxSpans/4 {
		g.fail(errSpans)
		return
	}
	g.Op(asm.LoadMem(asm.R0, asm.R8, p.off, asm.DWord), asm.HostTo(asm.BE, asm.R0, asm.DWord),
		asm.LoadMem(asm.R1, asm.R8, p.off+8, asm.DWord), asm.HostTo(asm.BE, asm.R1, asm.DWord))
	g.search6(ss, t, f)
}

// prefix6 compares the words of the prefix in memory byte order.
func (g *gen) prefix6(p location, n netip.Prefix, t, f code.Label) {
	b := n.Addr().As16()
	for i := 0; i < n.Bits(); i += 32 {
		g.Op(asm.LoadMem(asm.R0, asm.R8, p.off+int16(i/8), asm.Word))
		if left := n.Bits() - i; left < 32 {
			g.Op(asm.And.Imm32(asm.R0, int32(swapped(^uint32(0)<<(32-left), asm.Word))))
		}
		g.Jump(asm.JNE.Imm32(asm.R0, int32(swapped(binary.BigEndian.Uint32(b[i/8:]), asm.Word)), ""), f)
	}
	g.GoTo(t)
}

// notBelow jumps to yes if the address in R0 and R1 is at least v, else to no.
func (g *gen) notBelow(v [2]uint64, yes, no code.Label) {
	g.Op(asm.LoadImm(asm.R2, int64(v[0]), asm.DWord))
	g.Jump(asm.JGT.Reg(asm.R0, asm.R2, ""), yes)
	g.Jump(asm.JLT.Reg(asm.R0, asm.R2, ""), no)
	g.Op(asm.LoadImm(asm.R2, int64(v[1]), asm.DWord))
	g.Jump(asm.JGE.Reg(asm.R1, asm.R2, ""), yes)
	g.GoTo(no)
}

// search6 jumps to t if the address in R0 and R1 is in a sorted span.
func (g *gen) search6(ss []span6, t, f code.Label) {
	if len(ss) == 0 {
		g.GoTo(f)
		return
	}
	upper, lower := g.Label(), g.Label()
	if len(ss) > 1 {
		mid := len(ss) / 2
		g.notBelow(ss[mid].lo, upper, lower)
		g.Bind(lower)
		g.search6(ss[:mid], t, f)
		g.Bind(upper)
		g.search6(ss[mid:], t, f)
		return
	}
	g.notBelow(ss[0].lo, upper, f)
	g.Bind(upper)
	g.Op(asm.LoadImm(asm.R2, int64(ss[0].hi[0]), asm.DWord))
	g.Jump(asm.JLT.Reg(asm.R0, asm.R2, ""), t)
	g.Jump(asm.JGT.Reg(asm.R0, asm.R2, ""), f)
	g.Op(asm.LoadImm(asm.R2, int64(ss[0].hi[1]), asm.DWord))
	g.Jump(asm.JLE.Reg(asm.R1, asm.R2, ""), t)
	g.GoTo(f)
}
