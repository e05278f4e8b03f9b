// SPDX-License-Identifier: Apache-2.0

// Package compile compiles the rules of a filter to one eBPF program, in pure Go without clang.
//
//	p, err := compile.Compile(rules, compile.Options{Hook: compile.XDP})
//	c, err := kernel.Load(p.Spec, []string{compile.ProgramName}, nil)
//
// The program dissects a packet once and copies its headers to the stack, where all rules read them. Rules comparing
// the same fields with constants share one hash map lookup, even thousands of them. Other rules are tested in turn.
// Independent of the evaluation order, the first matching rule with the action pass or drop decides.
package compile

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/weir-project/weir/feature/filter/compile/code"
	"github.com/weir-project/weir/feature/filter/compile/running"
	"github.com/weir-project/weir/feature/filter/expr"
)

// Hook is the kernel hook of a program. It determines the visible bytes and the return codes.
type Hook int

// The hooks.
const (
	Socket    Hook = iota // SO_ATTACH_BPF on a socket: returns the packet's length to pass, or 0
	XTBPF                 // the bpf match of nftables: returns 1 to drop
	Netfilter             // a netfilter link (Linux 6.4): NF_ACCEPT, NF_DROP
	TC                    // tcx, or a clsact filter: TC_ACT_UNSPEC, TC_ACT_SHOT
	XDP                   // XDP_PASS, XDP_DROP
)

var hookNames = [...]string{"socket", "xt_bpf", "netfilter", "tc", "xdp"}

func (h Hook) String() string {
	if h < 0 || int(h) >= len(hookNames) {
		return fmt.Sprintf("hook %d", int(h))
	}
	return hookNames[h]
}

// Action is the action of a rule for matching packets.
type Action int

// The actions.
const (
	Pass  Action = iota
	Drop         //
	Count        // count the packet and continue with the next rule
)

func (a Action) String() string { return [...]string{"pass", "drop", "count"}[a] }

// Rule is an expression and an action.
type Rule struct {
	Name   string
	Match  *expr.Expr
	Action Action

	of *expr.Expr // the original of Match, in a copy for unreadable headers
}

// Start is the first header visible to a program.
type Start int

// The starts.
const (
	ByHook    Start = iota // default of the hook: the transport header at Socket, Ethernet at TC and XDP, else the IP header
	Ethernet               //
	IPHeader               // raw IPv4 sockets, and TC at devices without a link layer
	Transport              // UDP, TCP and raw IPv6 sockets
)

// Options are the properties of the program's hook and kernel.
type Options struct {
	Hook    Hook
	Start   Start  // ByHook, except for other kinds of sockets or devices
	Default Action // Pass or Drop, for packets not decided by any rule
	// AbsentUnreadable treats fields of an unreadable transport header as absent. By default, such a packet matches a
	// drop rule if any value of these fields could match, and no pass rule by these fields.
	AbsentUnreadable bool
	// Lists maps the $names of expressions to lists.
	Lists map[string]List
	// Kernel describes the target kernel; nil: the running one.
	Kernel *running.Kernel
}

// Names in Program.Spec.
const (
	ProgramName = "filter"
	CountsName  = "filter_counts"
)

// Counts is a per-CPU element of the map CountsName. There is one for each rule, one for the default and one for
// packets with an unreadable transport header.
type Counts struct {
	Packets uint64
	Bytes   uint64 // of the length visible to the hook
	Last    uint64 // CLOCK_MONOTONIC in ns, with the resolution of a tick
	Tick    uint64 // jiffies at the last write of Last, internal to the program
}

// Program is the result of compiling rules.
type Program struct {
	// Spec has one program, ProgramName, and its maps.
	Spec *ebpf.CollectionSpec
	// Tables maps lists in tables to the common prefix of their maps' names in Spec, for [table.Find]. The list's
	// owner fills them.
	Tables map[string]string

	rules     []Rule
	opts      Options
	plan      *plan
	functions asm.Instructions // called by the program
	noted     bool             // for Explain: notes take as long as the code
	notes     []code.Note
	patterns  int
	automata  []byte // all automata
	rates     map[*expr.Expr]int32
	required  []uint32 // by rule, see required
	skips     bool     // packets skip rules for layers they lack
}

var (
	// ErrRule reports a rule unsuited to a hook. It wraps the position and the reason.
	ErrRule = errors.New("no rule for this hook")
	// ErrTooLarge reports more rules than fit a program.
	ErrTooLarge = code.ErrTooLarge
	// ErrList reports an unknown list in an expression.
	ErrList = errors.New("no such list")
)

// MaxRules is the maximum number of rules of a program.
const MaxRules = 1 << 20

// Running returns the running kernel's properties for a hook.
func Running(h Hook) (*running.Kernel, error) {
	switch h {
	case Netfilter:
		return running.Netfilter()
	case Socket, XTBPF:
		return running.Sockets(), nil
	}
	return running.Any(), nil
}

// Compile compiles rules to a program. It loads nothing, but probes the running kernel unless Options describe one.
func Compile(rules []Rule, o Options) (*Program, error) {
	switch {
	case o.Hook < Socket || o.Hook > XDP:
		return nil, fmt.Errorf("unknown %s", o.Hook)
	case o.Default != Pass && o.Default != Drop:
		return nil, errors.New("default action: want pass or drop")
	case o.Start == Transport && o.Hook != Socket, o.Start == Ethernet && o.Hook != TC && o.Hook != XDP:
		return nil, fmt.Errorf("start does not suit hook %s: leave Start at ByHook", o.Hook)
	}
	if len(rules) > MaxRules {
		return nil, fmt.Errorf("%w: %d rules, want at most %d", ErrTooLarge, len(rules), MaxRules)
	}
	if o.Start == ByHook {
		o.Start = [...]Start{Socket: Transport, XTBPF: IPHeader, Netfilter: IPHeader, TC: Ethernet, XDP: Ethernet}[o.Hook]
	}
	if err := check(rules, o); err != nil {
		return nil, err
	}
	if o.Kernel == nil {
		k, err := Running(o.Hook)
		if err != nil {
			return nil, err
		}
		o.Kernel = k
	}
	p := &Program{rules: rules, opts: o, Tables: map[string]string{}}
	p.plan = newPlan(rules, "filter_g")
	return p, p.generate()
}

// check reports fields invisible to the hook, and missing lists.
func check(rules []Rule, o Options) error {
	var errs []error
	for i, r := range rules {
		if r.Match == nil {
			errs = append(errs, fmt.Errorf("%w: rule %d %s has no expression", ErrRule, i+1, r.Name))
			continue
		}
		expr.Walk(r.Match.Root, func(n expr.Node) {
			for _, x := range expr.Operands(n) {
				if x.Field.Link && o.Start != Ethernet {
					errs = append(errs, ruleError(i, r, x.Pos(), x.String()+" needs the link layer, invisible to this hook: use tcx, clsact or xdp"))
				}
			}
			if in, ok := n.(*expr.In); ok && in.List != "" {
				if _, ok := o.Lists[in.List]; !ok {
					errs = append(errs, fmt.Errorf("%w: %w", ErrList, ruleError(i, r, in.Pos(), fmt.Sprintf("there is no list %q", in.List))))
				}
			}
		})
	}
	return errors.Join(errs...)
}

func ruleError(i int, r Rule, at expr.Pos, msg string) error {
	name := r.Name
	if name == "" {
		name = fmt.Sprint(i + 1)
	}
	return fmt.Errorf("%w: rule %s: %w", ErrRule, name, &expr.Error{Source: r.Match.Source, Pos: at, Msg: msg})
}
