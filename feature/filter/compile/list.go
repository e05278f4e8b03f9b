// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"

	"github.com/weir-project/weir/feature/filter/bpf"
	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/table"
)

// List is the value of a $name in an expression: prefixes of either family.
type List struct {
	// Prefixes are compiled into the program and fixed there. Use at most some hundred.
	Prefixes []netip.Prefix
	// Segments, unless 0, selects a lookup in a [table.Table] of this size in MiB. The list's owner fills and changes
	// the table. Its maps are in [Program.Spec], named by [Program.Tables]. A prefix with any value is a member.
	Segments int
	// Shards spreads the list over several tables of Segments MiB each. The owner fills each with its own prefixes.
	Shards Shards
}

func (g *gen) list(n *expr.In, t, f code.Label) {
	l := g.o.Lists[n.List]
	if l.Segments == 0 {
		vs := make([]expr.Value, len(l.Prefixes))
		for i, p := range l.Prefixes {
			vs[i] = expr.Value{Prefix: p.Masked()}
		}
		g.addresses(n.X, expr.Eq, vs, t, f)
		return
	}
	name, err := g.p.table(n.List, l)
	if err != nil {
		g.fail(err)
		return
	}
	g.each(n.X, t, f, func(p location, id expr.ID, t, f code.Label) {
		fn, bits := "six", l.Shards.Bits6
		if expr.Lookup(id).Type == expr.IPv4 {
			fn, bits = "four", l.Shards.Bits4
			g.Op(asm.LoadMem(asm.R1, asm.R8, p.off, asm.Word), asm.HostTo(asm.BE, asm.R1, asm.Word))
		} else {
			g.Op(asm.LoadMem(asm.R1, asm.R8, p.off, asm.DWord), asm.HostTo(asm.BE, asm.R1, asm.DWord),
				asm.LoadMem(asm.R2, asm.R8, p.off+8, asm.DWord), asm.HostTo(asm.BE, asm.R2, asm.DWord))
		}
		g.lookUp(name, fn, l.Shards, bits)
		g.Jump(asm.JNE.Imm32(asm.R0, 0, ""), t)
		g.GoTo(f)
	})
}

// call calls a function of the program.
func (g *gen) call(name string) {
	g.Op(asm.Instruction{OpCode: asm.OpCode(asm.JumpClass).SetJumpOp(asm.Call), Src: asm.PseudoCall, Constant: -1}.WithReference(name))
}

// table adds a list's maps and functions, and returns the common prefix of their names.
func (p *Program) table(list string, l List) (string, error) {
	if name, ok := p.Tables[list]; ok {
		return name, nil
	}
	object, err := lookupObject()
	if err != nil {
		return "", err
	}
	name := fmt.Sprintf("filter_l%d", len(p.Tables))
	p.Tables[list] = name
	for _, name := range l.Shards.Names(name) {
		for _, part := range tableParts {
			m := object.Maps["list"+part].Copy()
			m.Name = name + part
			p.Spec.Maps[m.Name] = m
		}
		if err := table.Size(p.Spec, name, l.Segments); err != nil {
			return "", fmt.Errorf("list %s: %w", list, err)
		}
		p.functions = append(p.functions, renamed(object.Programs[bpf.LookupProgListEntry].Instructions, name)...)
	}
	return name, nil
}

// tableParts are the suffixes of a table's map names.
var tableParts = [...]string{"_head", "_index", "_pages"}

var lookupObject = sync.OnceValues(bpf.LoadLookup)

// renamed returns the functions after the entry function, adapted to the maps of one list.
func renamed(ins asm.Instructions, name string) asm.Instructions {
	var out asm.Instructions
	for _, i := range ins {
		if s := i.Symbol(); s == bpf.LookupProgListEntry || s == "" && len(out) == 0 {
			continue // the entry function
		}
		// The kernel requires line info for all functions or for none.
		c := i.WithSource(nil)
		if s := i.Symbol(); s != "" {
			c = c.WithSymbol(name + s[len("list"):])
		}
		if r := i.Reference(); r != "" {
			c = c.WithReference(name + r[len("list"):])
		}
		out = append(out, c)
	}
	return out
}

// dropTables removes the maps of lists unused by all functions, because their rules are unreachable.
func (p *Program) dropTables(functions asm.Instructions) {
	read := map[string]bool{}
	for i := range functions {
		read[functions[i].Reference()] = true
	}
	for list, first := range p.Tables {
		any := false
		for _, name := range p.opts.Lists[list].Shards.Names(first) {
			if read[name+"_pages"] {
				any = true
				continue
			}
			for _, part := range tableParts {
				delete(p.Spec.Maps, name+part)
			}
		}
		if !any {
			delete(p.Tables, list)
		}
	}
}

// called returns the functions of ins called by main, directly or indirectly. The kernel rejects uncalled functions.
func called(main, ins asm.Instructions) (out asm.Instructions) {
	starts := map[string]int{}
	for i := range ins {
		if s := ins[i].Symbol(); s != "" {
			starts[s] = i
		}
	}
	done := map[string]bool{}
	for todo := main; len(todo) > 0; {
		var next asm.Instructions
		for i := range todo {
			name := todo[i].Reference()
			start, ok := starts[name]
			if !ok || done[name] || !todo[i].IsFunctionCall() {
				continue
			}
			done[name] = true
			end := start + 1
			for end < len(ins) && ins[end].Symbol() == "" {
				end++
			}
			next = append(next, ins[start:end]...)
		}
		out, todo = append(out, next...), next
	}
	return out
}

// withTypes adds BTF type information to the main function: either all functions have it, or none.
func withTypes(main asm.Instructions) {
	integer := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	f := &btf.Func{Name: ProgramName, Linkage: btf.StaticFunc, Type: &btf.FuncProto{Return: integer,
		Params: []btf.FuncParam{{Name: "ctx", Type: &btf.Pointer{Target: &btf.Void{}}}}}}
	main[0] = btf.WithFuncMetadata(main[0].WithSymbol(ProgramName), f)
}
