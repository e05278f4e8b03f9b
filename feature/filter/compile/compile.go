// SPDX-License-Identifier: Apache-2.0

// Package compile turns the rules of a filter into one eBPF program, in Go alone: no clang at run time.
//
//	p, err := compile.Compile(rules, compile.Options{Hook: compile.XDP})
//	c, err := kernel.Load(p.Spec, []string{compile.ProgramName}, nil)
//
// The packet is taken apart once, its headers copied to the stack, and all rules read that. Rules that only ask whether the
// same fields have certain values are looked up together in a hash map, however many they are; others are tested in turn.
// Whatever the order in which the program finds out, the first rule that matches and does not only count decides.
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

// Hook is where a program is attached, and so what it sees and says.
type Hook int

// The hooks.
const (
	Socket    Hook = iota // SO_ATTACH_BPF on a socket: passes the packet's whole length, or 0
	XTBPF                 // the bpf match of nftables: 1 says that the packet is to be dropped
	Netfilter             // a netfilter link (Linux 6.4): NF_ACCEPT, NF_DROP
	TC                    // tcx, or a filter of clsact: TC_ACT_UNSPEC, TC_ACT_SHOT
	XDP                   // XDP_PASS, XDP_DROP
)

var hookNames = [...]string{"socket", "xt_bpf", "netfilter", "tc", "xdp"}

func (h Hook) String() string {
	if h < 0 || int(h) >= len(hookNames) {
		return fmt.Sprintf("hook %d", int(h))
	}
	return hookNames[h]
}

// Action is what becomes of a packet that a rule matches.
type Action int

// The actions.
const (
	Pass  Action = iota
	Drop         //
	Count        // it is counted, and goes on to the next rule
)

func (a Action) String() string { return [...]string{"pass", "drop", "count"}[a] }

// Rule is an expression and what follows from it.
type Rule struct {
	Name   string
	Match  *expr.Expr
	Action Action

	of *expr.Expr // what Match is made of, for an unreadable header
}

// Start is where the bytes begin that a hook gives to the program.
type Start int

// The starts.
const (
	ByHook    Start = iota // what the hook gives: the transport header at Socket, Ethernet at TC and XDP, else the IP header
	Ethernet               //
	IPHeader               // raw IPv4 sockets, and TC at devices without a link layer
	Transport              // UDP, TCP and raw IPv6 sockets
)

// Options are what a program is made for.
type Options struct {
	Hook    Hook
	Start   Start  // ByHook unless the socket or the device is another
	Default Action // Pass or Drop: of packets that no rule decides
	// AbsentUnreadable takes fields of a transport header that cannot be read as absent. Else such a packet matches rules
	// that drop, where any value of these fields could, and no rule that passes for them.
	AbsentUnreadable bool
	// Lists are what $name stands for in expressions.
	Lists map[string]List
	// Kernel is what the program will run on; nil: this kernel is asked.
	Kernel *running.Kernel
}

// Names in Program.Spec.
const (
	ProgramName = "filter"
	CountsName  = "filter_counts"
)

// Counts is an element of the map CountsName, one for each rule, one for the default and one for packets
// whose transport header cannot be read, each per CPU.
type Counts struct {
	Packets uint64
	Bytes   uint64 // as long as the hook sees them
	Last    uint64 // CLOCK_MONOTONIC in ns, at the resolution of a tick
	Tick    uint64 // of the kernel's clock when Last was written; the program's own
}

// Program is what rules were compiled to.
type Program struct {
	// Spec has one program, ProgramName, and its maps.
	Spec *ebpf.CollectionSpec
	// Tables are the lists on tables: the names of their maps in Spec, for [table.Find]. Their owner fills them.
	Tables map[string]string

	rules     []Rule
	opts      Options
	plan      *plan
	functions asm.Instructions // that the program calls
	noted     bool             // for Explain: notes take as long as the code
	notes     []code.Note
	patterns  int
	automata  []byte // of all of them
	rates     map[*expr.Expr]int32
	required  []uint32 // by rule, see required
	skips     bool     // rules that ask for what a packet lacks are left out
}

var (
	// ErrRule says that a rule cannot be compiled for a hook; what it wraps says where and why.
	ErrRule = errors.New("no rule for this hook")
	// ErrTooLarge says that the rules are more than a program can hold.
	ErrTooLarge = code.ErrTooLarge
	// ErrList says that an expression names a list that there is not.
	ErrList = errors.New("no such list")
)

// MaxRules is how many rules a program may have.
const MaxRules = 1 << 20

// Running is the kernel that this process runs on, as far as a hook is concerned.
func Running(h Hook) (*running.Kernel, error) {
	switch h {
	case Netfilter:
		return running.Netfilter()
	case Socket, XTBPF:
		return running.Sockets(), nil
	}
	return running.Any(), nil
}

// Compile makes a program of rules. It loads nothing, but asks the running kernel what it has unless Options say.
func Compile(rules []Rule, o Options) (*Program, error) {
	switch {
	case o.Hook < Socket || o.Hook > XDP:
		return nil, fmt.Errorf("there is no %s", o.Hook)
	case o.Default != Pass && o.Default != Drop:
		return nil, errors.New("the default is to pass or to drop: it has no rule to go on to")
	case o.Start == Transport && o.Hook != Socket, o.Start == Ethernet && o.Hook != TC && o.Hook != XDP:
		return nil, fmt.Errorf("a %s hook's bytes do not begin there: leave Start at ByHook", o.Hook)
	}
	if len(rules) > MaxRules {
		return nil, fmt.Errorf("%w: %d, and at most %d", ErrTooLarge, len(rules), MaxRules)
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

// check says what of the rules the hook cannot see, and which lists are missing.
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
					errs = append(errs, ruleError(i, r, x.Pos(), x.String()+" is of the link layer, which this hook does not see: use tcx, clsact or xdp"))
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
