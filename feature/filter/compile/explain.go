// SPDX-License-Identifier: Apache-2.0

package compile

import (
	"fmt"
	"strings"

	"github.com/weir-project/weir/feature/filter/expr"
)

// Explain describes the compiled program: each rule's tree and evaluation, and the instructions annotated with their
// rule and term.
func (p *Program) Explain() string {
	p = &Program{rules: p.rules, opts: p.opts, Tables: map[string]string{}, plan: newPlan(p.rules, "filter_g"), noted: true}
	if err := p.generate(); err != nil {
		return err.Error() // the same rules compiled before
	}
	var b strings.Builder
	in := map[int]*group{}
	for _, g := range p.plan.groups {
		for _, i := range g.rules {
			in[i] = g
		}
	}
	steps := map[int]bool{}
	for _, s := range p.plan.steps {
		steps[s.rule] = true
	}
	for i, r := range p.rules {
		name := r.Name
		if name != "" {
			name = " " + name
		}
		fmt.Fprintf(&b, "rule %d%s: %s if %s\n", i+1, name, r.Action, r.Match)
		writeTree(&b, r.Match.Root, "  ")
		switch g := in[i]; {
		case g != nil && !steps[i]:
			fmt.Fprintf(&b, "  found with %d rules by one lookup of %s in map %s\n", len(g.rules), g.fields(), g.name)
		default:
			b.WriteString("  tested in turn\n")
		}
	}
	fmt.Fprintf(&b, "else: %s\n\n%s at %s, %d instructions", p.opts.Default, ProgramName, p.opts.Hook, len(p.Spec.Programs[ProgramName].Instructions))
	for list, name := range p.Tables {
		fmt.Fprintf(&b, "\nlist $%s is table %s", list, name)
	}
	b.WriteString("\n")
	p.writeInstructions(&b)
	return b.String()
}

// writeTree writes a line for each node, with its children indented.
func writeTree(b *strings.Builder, n expr.Node, indent string) {
	var children []expr.Node
	head := expr.Print(n)
	switch n := n.(type) {
	case *expr.And:
		head, children = "and", n.X
	case *expr.Or:
		head, children = "or", n.X
	case *expr.Xor:
		head, children = "xor", n.X
	case *expr.Not:
		head, children = "not", []expr.Node{n.X}
	}
	fmt.Fprintf(b, "%s%s\n", indent, head)
	for _, c := range children {
		writeTree(b, c, indent+"  ")
	}
}

func (p *Program) writeInstructions(b *strings.Builder) {
	notes := p.notes
	iter := p.Spec.Programs[ProgramName].Instructions.Iterate()
	for iter.Next() {
		if s := iter.Ins.Symbol(); s != "" && s != ProgramName {
			fmt.Fprintf(b, "; function %s\n", s)
		}
		for len(notes) > 0 && notes[0].At == iter.Index {
			fmt.Fprintf(b, "; %s\n", notes[0].Text)
			notes = notes[1:]
		}
		fmt.Fprintf(b, "%5d  %v", iter.Offset, iter.Ins)
		// Show jump targets: calls and exits have no offset.
		if op := iter.Ins.OpCode; op.Class().IsJump() && !iter.Ins.IsBuiltinCall() && !iter.Ins.IsFunctionCall() && !iter.Ins.IsKfuncCall() && iter.Ins.Offset != 0 {
			fmt.Fprintf(b, "  → %d", int(iter.Offset)+1+int(iter.Ins.Offset))
		}
		b.WriteByte('\n')
	}
}
