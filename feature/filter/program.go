// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/compile/running"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/table"
)

// This file is where the language (package expr) and its compiler (package
// compile) are joined to what attaches programs. Everything else of this package
// knows a compiled filter as a program called "filter" and its maps, one of which
// is "filter_counts".

// view is what of a packet a program sees, and what it returns.
type view int

const (
	viewXTBPF     view = iota // socket filter asked by nftables: 0 drops, all else passes
	viewNetfilter             // NF_ACCEPT, NF_DROP
	viewTC                    // TC_ACT_UNSPEC, TC_ACT_SHOT
	viewTCRaw                 // the same, at devices whose packets begin with the IP header
	viewXDP                   // XDP_PASS, XDP_DROP
	viewSocket                // how many bytes the socket gets: 0 drops
)

// What a compiled filter's program and its map of counts are called, and how its
// maps' names begin.
const (
	programName = compile.ProgramName
	mapPrefix   = "filter_"
	countsMap   = compile.CountsName
)

// compiled is a filter that is not loaded yet.
type compiled struct{ *compile.Program }

// options are what the compiler is told of a hook.
func (v view) options() compile.Options {
	switch v {
	case viewXTBPF:
		return compile.Options{Hook: compile.Socket, Start: compile.IPHeader}
	case viewNetfilter:
		return compile.Options{Hook: compile.Netfilter}
	case viewTC:
		return compile.Options{Hook: compile.TC}
	case viewTCRaw:
		return compile.Options{Hook: compile.TC, Start: compile.IPHeader}
	case viewSocket:
		return compile.Options{Hook: compile.Socket, Start: compile.Transport}
	}
	return compile.Options{Hook: compile.XDP}
}

var actions = map[Action]compile.Action{Pass: compile.Pass, Drop: compile.Drop, Count: compile.Count}

// parse reads the expression of a rule.
func (r Rule) parse() (compile.Rule, error) {
	e, err := expr.Parse(r.Match.Text)
	return compile.Rule{Name: r.Name, Match: e, Action: actions[r.Action]}, err
}

// check finds the mistakes of a rule at a hook, whatever this kernel can.
func (r Rule) check(f Filter) error {
	rule, err := r.parse()
	if err != nil {
		return err
	}
	o := f.Hook.view().options()
	if o.Hook == compile.Socket && f.Hook != HookSocket {
		o.Hook = compile.XTBPF // as messages name it
	}
	o.Kernel = &running.Kernel{}
	o.Lists = map[string]compile.List{}
	for name := range f.Lists {
		o.Lists[name] = compile.List{} // that there is one is enough
	}
	_, err = compile.Compile([]compile.Rule{rule}, o)
	if e, ok := errors.AsType[*expr.Error](err); ok {
		return e // which rule it is, the place in the file says
	}
	return err
}

// compile makes one program of a filter's rules.
func (f Filter) compile(v view, lists map[string]*list) (*compiled, error) {
	return f.compileFor(v.options(), lists)
}

func (f Filter) compileFor(o compile.Options, lists map[string]*list) (*compiled, error) {
	if f.Default != Pass && f.Default != Drop {
		return nil, fmt.Errorf("default %q: want %s or %s", f.Default, Pass, Drop)
	}
	o.Default = actions[f.Default]
	o.AbsentUnreadable = f.Unreadable == AbsentUnreadable
	o.Lists = forCompiler(lists)
	var rules []compile.Rule
	for i, r := range f.Rules {
		rule, err := r.parse()
		if err != nil {
			return nil, fmt.Errorf("rule %d: %w", i+1, err)
		}
		if _, ok := actions[r.Action]; !ok { // a program's own: files are read with Action.UnmarshalText
			return nil, fmt.Errorf("rule %d: action %q: want %s, %s or %s", i+1, r.Action, Drop, Pass, Count)
		}
		rules = append(rules, rule)
	}
	p, err := compile.Compile(rules, o)
	if err != nil {
		return nil, err
	}
	for name, l := range lists {
		l.Table = p.Tables[name]
	}
	return &compiled{p}, nil
}

// view is that of the hook.
func (h Hook) view() view {
	switch h {
	case HookNFT:
		return viewXTBPF
	case HookNetfilter:
		return viewNetfilter
	case HookTCX, HookClsact:
		return viewTC
	case HookSocket:
		return viewSocket
	}
	return viewXDP
}

// compileAndLoad compiles a filter and loads its program. share gives maps in place
// of new ones once the program is compiled; the tables of lists that are new are filled.
func (p *published) compileAndLoad(share func() map[string]*ebpf.Map) (coll *kernel.Collection, hash [sha256.Size]byte, err error) {
	err = withRoom(p.Lists, func() error {
		c, err := p.Filter.compile(p.view(), p.Lists)
		if err == nil {
			hash = c.hash()
			coll, err = loadFilled(c, p.Lists, share())
		}
		return err
	})
	if err != nil {
		return nil, hash, fmt.Errorf("filter %s: %w", p.Filter.Name, err)
	}
	return coll, hash, nil
}

// withRoom does what fills lists' tables; once more with larger tables, and then with more of them, if they have no room.
func withRoom(lists map[string]*list, do func() error) error {
	for {
		err := do()
		grown := false
		for _, l := range lists {
			grown = errors.Is(err, table.ErrFull) && l.Segments > 0 && l.grow() || grown
		}
		if !grown {
			return err
		}
	}
}

// loadFilled loads a program with maps that are given in place of new ones, and fills the tables of lists that are new.
func loadFilled(c *compiled, lists map[string]*list, given map[string]*ebpf.Map) (*kernel.Collection, error) {
	coll, err := kernel.Load(c.Spec, []string{programName}, given)
	if err != nil {
		return nil, err
	}
	for name, l := range lists {
		if l.Table == "" {
			continue // short, or asked for by no rule
		}
		if err := l.fill(coll.Maps, given); err != nil {
			coll.Close()
			return nil, fmt.Errorf("list %s: %w", name, err)
		}
	}
	return coll, nil
}

// noMaps are shared where all are to be new.
func noMaps() map[string]*ebpf.Map { return nil }

// hash tells a program from that of another compiler.
func (c *compiled) hash() (sum [sha256.Size]byte) {
	h := sha256.New()
	for _, ins := range c.Spec.Programs[programName].Instructions {
		fmt.Fprintln(h, ins)
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// hash of the program that this weir makes of a filter.
func (p *published) hash() (sum [sha256.Size]byte, err error) {
	c, err := p.Filter.compile(p.view(), p.Lists)
	if err != nil {
		return sum, err
	}
	return c.hash(), nil
}

// pinnedMaps are the maps of a program by the names of their pins.
func pinnedMaps(c *kernel.Collection) map[string]*ebpf.Map {
	out := map[string]*ebpf.Map{}
	for name, m := range c.Maps {
		if !strings.HasPrefix(name, ".") {
			out[strings.TrimPrefix(name, mapPrefix)] = m
		}
	}
	return out
}

// sharedMaps are pinned maps by the names that the program has for them.
func sharedMaps(pins map[string]*ebpf.Map) map[string]*ebpf.Map {
	out := map[string]*ebpf.Map{}
	for name, m := range pins {
		out[mapPrefix+name] = m
		out[name] = m
	}
	return out
}
