// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/expr"
)

// plan describes the evaluation of rules. Rules comparing the same fields with constants form a group, found by one
// lookup in a hash map (tuple space search). The other rules are steps, tested in turn.
//
// Groups of deciding rules are looked up first. They leave the lowest matching rule in R9. A step runs only if R9 has
// no earlier rule. R9 finally has the first matching rule, as if all were tested in turn. A group of counting rules
// leaves its rule on the stack. That rule is counted at the end, unless an earlier rule has decided.
type plan struct {
	groups []*group
	steps  []step
}

type step struct {
	rule  int
	after bool // a grouped rule precedes it, after the previous step
}

const (
	leastGroup     = 8  // rules: testing fewer in turn is as fast as a lookup
	maxGroups      = 16 // groups of deciding rules
	maxCountGroups = 8  // groups of counting rules
	maxKeySize     = 64
)

// part is a field of a group's key.
type part struct {
	id     expr.ID
	prefix int // significant bits of an address
	off    int // offset in the key
	size   int
}

// group is a set of rules comparing the same fields.
type group struct {
	name    string
	parts   []part
	absent  uint32 // absence bits required to be clear
	keySize int
	counts  bool // its rules count
	slot    int  // of a counting group
	rules   []int
	keys    map[string]int // key → lowest rule
}

// tuple is a rule as a member of a group.
type tuple struct {
	sign   string
	parts  []part
	values [][]byte
	absent uint32
}

// newTuple returns a rule's tuple, or nil if the rule is more than equalities.
func newTuple(r Rule) *tuple {
	terms := []expr.Node{r.Match.Root}
	if and, ok := r.Match.Root.(*expr.And); ok {
		terms = and.X
	}
	t := &tuple{}
	seen := map[expr.ID]bool{}
	for _, n := range terms {
		if p, ok := n.(*expr.Present); ok && p.X.Part == expr.Whole && p.X.Field.Type == expr.Proto && len(p.X.Field.Of) == 0 {
			t.absent |= locations[p.X.Field.ID].absent
			continue
		}
		c, ok := n.(*expr.Compare)
		if !ok || c.Op != expr.Eq || c.X.Part != expr.Whole || c.X.Mask != 0 || len(c.X.Field.Of) > 0 || seen[c.X.Field.ID] {
			return nil
		}
		p, v := keyPart(c.X.Field, c.V)
		if v == nil {
			return nil
		}
		seen[p.id] = true
		t.parts, t.values = append(t.parts, p), append(t.values, v)
		t.absent |= locations[p.id].absent
	}
	if len(t.parts) == 0 {
		return nil
	}
	t.arrange(r.Action == Count)
	return t
}

// keyPart returns the key part of a comparison, nil if it does not fit a key.
func keyPart(f *expr.Field, v expr.Value) (part, []byte) {
	p := part{id: f.ID}
	switch f.Type {
	case expr.IPv4, expr.IPv6:
		if v.From.IsValid() || v.Prefix.Bits() == 0 {
			return p, nil
		}
		p.prefix, p.size = v.Prefix.Bits(), v.Prefix.Addr().BitLen()/8
		return p, v.Prefix.Addr().AsSlice()
	case expr.MAC:
		if v.Lo != v.Hi {
			return p, nil
		}
		p.size = 8
		return p, be.AppendUint64(nil, v.Lo<<16)
	case expr.Uint, expr.Bool:
		if v.Lo != v.Hi || f.ID == expr.TCPLen {
			return p, nil
		}
		if pl := locations[f.ID]; !pl.plain() {
			p.size = 4
			return p, native.AppendUint32(nil, uint32(v.Lo))
		}
		p.size = locations[f.ID].size.Sizeof()
		return p, be.AppendUint64(nil, v.Lo<<(64-8*p.size))[:p.size]
	}
	return p, nil
}

// plain reports whether the number is compared as stored in memory.
func (p location) plain() bool { return p.shift == 0 && p.mask == 0 && p.times == 0 }

// arrange sorts the parts by descending size, so each is aligned.
func (t *tuple) arrange(counts bool) {
	order := make([]int, len(t.parts))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(cmp.Compare(t.parts[b].size, t.parts[a].size), cmp.Compare(t.parts[a].id, t.parts[b].id))
	})
	parts, values, off := make([]part, len(order)), make([][]byte, len(order)), 0
	var sign strings.Builder
	fmt.Fprintf(&sign, "%t/%x", counts, t.absent)
	for i, j := range order {
		parts[i], values[i] = t.parts[j], t.values[j]
		parts[i].off = off
		off += parts[i].size
		fmt.Fprintf(&sign, "/%d:%d", parts[i].id, parts[i].prefix)
	}
	t.parts, t.values, t.sign = parts, values, sign.String()
}

func (t *tuple) key() string {
	var b []byte
	for _, v := range t.values {
		b = append(b, v...)
	}
	return string(append(b, make([]byte, roundUp(len(b), 4)-len(b))...))
}

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// newPlan groups the rules. prefix begins the names of the groups' maps.
func newPlan(rules []Rule, prefix string) *plan {
	signs := map[string]*group{}
	tuples := make([]*tuple, len(rules))
	var all []*group
	for i, r := range rules {
		t := newTuple(r)
		if t == nil || len(t.key()) > maxKeySize {
			continue
		}
		tuples[i] = t
		g := signs[t.sign]
		if g == nil {
			g = &group{parts: t.parts, absent: t.absent, keySize: len(t.key()), counts: r.Action == Count, keys: map[string]int{}}
			signs[t.sign] = g
			all = append(all, g)
		}
		g.rules = append(g.rules, i)
	}
	p := &plan{}
	grouped := make([]bool, len(rules))
	slices.SortStableFunc(all, func(a, b *group) int { return cmp.Compare(len(b.rules), len(a.rules)) })
	slots := 0
	for _, g := range all {
		if len(g.rules) < leastGroup || !g.counts && len(p.groups)-slots == maxGroups || g.counts && slots == maxCountGroups {
			continue
		}
		for _, i := range g.rules {
			k := tuples[i].key()
			if _, taken := g.keys[k]; taken && g.counts {
				continue // both count, so the second one becomes a step
			} else if !taken {
				g.keys[k] = i
			}
			grouped[i] = true
		}
		if g.counts {
			g.slot = slots
			slots++
		}
		g.name = fmt.Sprintf("%s%d", prefix, len(p.groups))
		p.groups = append(p.groups, g)
	}
	p.order(rules, grouped)
	return p
}

// order makes steps of the ungrouped rules.
func (p *plan) order(rules []Rule, grouped []bool) {
	pending := false
	for i, r := range rules {
		if r.Match.Root == never {
			continue
		}
		if grouped[i] {
			pending = pending || r.Action != Count
			continue
		}
		p.steps = append(p.steps, step{i, pending})
		pending = false
	}
}

// slotAt returns the stack offset for the rule of a counting group.
func (g *gen) slotAt(slot int) int16 { return g.scratchOff - 8 - 8*int16(slot) + 4 }

// groups generates the lookups. It leaves the first deciding rule in R9.
func (g *gen) groups() {
	for _, gr := range g.p.plan.groups {
		if gr.counts {
			g.Op(asm.Mov.Imm(asm.R1, undecided), asm.StoreMem(asm.RFP, g.slotAt(gr.slot), asm.R1, asm.Word))
		}
		next := g.Label()
		if g.Noted {
			g.Note = fmt.Sprintf("a group of %d rules: %s", len(gr.rules), gr.fields())
		}
		g.there(gr.absent, next)
		g.key(gr)
		g.Op(stack(asm.R2, int32(g.scratchOff))...)
		g.Op(asm.LoadMapPtr(asm.R1, 0).WithReference(gr.name), asm.FnMapLookupElem.Call())
		g.Jump(asm.JEq.Imm(asm.R0, 0, ""), next)
		g.Op(asm.LoadMem(asm.R1, asm.R0, 0, asm.Word))
		if gr.counts {
			g.Op(asm.StoreMem(asm.RFP, g.slotAt(gr.slot), asm.R1, asm.Word))
		} else {
			g.Jump(asm.JGE.Reg(asm.R1, asm.R9, ""), next)
			g.Op(asm.Mov.Reg(asm.R9, asm.R1))
		}
		g.Bind(next)
		g.p.groupMap(gr)
	}
}

func (gr *group) fields() string {
	var names []string
	for _, p := range gr.parts {
		n := expr.Lookup(p.id).Name
		if p.prefix != 0 && p.prefix < 8*p.size {
			n += fmt.Sprintf("/%d", p.prefix)
		}
		names = append(names, n)
	}
	return strings.Join(names, ", ")
}

// key writes a group's key to the scratch area.
func (g *gen) key(gr *group) {
	put := func(off int, r asm.Register, size asm.Size) {
		g.Op(asm.StoreMem(asm.RFP, g.scratchOff+int16(off), r, size))
	}
	used := 0
	for _, p := range gr.parts {
		pl, f := locations[p.id], expr.Lookup(p.id)
		used = p.off + p.size
		switch f.Type {
		case expr.IPv4, expr.IPv6:
			mask := netip.PrefixFrom(netip.AddrFrom16([16]byte(slices.Repeat([]byte{0xff}, 16))), p.prefix).Masked().Addr().As16()
			for i := 0; i < p.size; i += 4 {
				g.Op(asm.LoadMem(asm.R0, asm.R8, pl.off+int16(i), asm.Word))
				if m := native.Uint32(mask[i:]); m != ^uint32(0) {
					g.Op(asm.And.Imm32(asm.R0, int32(m)))
				}
				put(p.off+i, asm.R0, asm.Word)
			}
		case expr.MAC:
			for i := 0; i < 6; i += 2 {
				g.Op(asm.LoadMem(asm.R0, asm.R8, pl.off+int16(i), asm.Half))
				put(p.off+i, asm.R0, asm.Half)
			}
			g.Op(asm.StoreImm(asm.RFP, g.scratchOff+int16(p.off+6), 0, asm.Half))
		default:
			if !pl.plain() {
				g.value(pl, expr.Operand{Field: f})
				put(p.off, asm.R0, asm.Word)
				continue
			}
			g.Op(asm.LoadMem(asm.R0, asm.R8, pl.off, pl.size))
			put(p.off, asm.R0, pl.size)
		}
	}
	for ; used < gr.keySize; used++ {
		g.Op(asm.StoreImm(asm.RFP, g.scratchOff+int16(used), 0, asm.Byte))
	}
}

// groupCounts counts the rules of counting groups, unless an earlier rule has decided.
func (g *gen) groupCounts() {
	for _, gr := range g.p.plan.groups {
		if !gr.counts {
			continue
		}
		next := g.Label()
		g.Note = "a counting rule of a group"
		g.Op(asm.LoadMem(asm.R1, asm.RFP, g.slotAt(gr.slot), asm.Word))
		g.Jump(asm.JGE.Reg(asm.R1, asm.R9, ""), next)
		g.Op(asm.RSh.Imm(asm.R1, 1))
		g.count()
		g.Bind(next)
	}
}
