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

// This file connects the language (package expr) and its compiler (package compile) with the
// attachers. The other files of this package see a compiled filter as a program named "filter" and
// its maps, including "filter_counts".

// view is the kind of packet access and return codes of a program.
type view int

const (
	viewXTBPF     view = iota // socket filter called by nftables: 0 drops, other values pass
	viewNetfilter             // NF_ACCEPT, NF_DROP
	viewTC                    // TC_ACT_UNSPEC, TC_ACT_SHOT
	viewTCRaw                 // as viewTC, for devices without a link header
	viewXDP                   // XDP_PASS, XDP_DROP
	viewSocket                // number of bytes delivered to the socket: 0 drops
)

// Names of a compiled filter's program and map of counts, and the common prefix of its map names.
const (
	programName = compile.ProgramName
	mapPrefix   = "filter_"
	countsMap   = compile.CountsName
)

// compiled is a filter not loaded yet.
type compiled struct{ *compile.Program }

// options returns the compiler options of a view.
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

// parse parses the expression of a rule.
func (r Rule) parse() (compile.Rule, error) {
	e, err := expr.Parse(r.Match.Text)
	return compile.Rule{Name: r.Name, Match: e, Action: actions[r.Action]}, err
}

// check reports mistakes of a rule at a hook, independent of this kernel's abilities.
func (r Rule) check(f Filter) error {
	rule, err := r.parse()
	if err != nil {
		return err
	}
	o := f.Hook.view().options()
	if o.Hook == compile.Socket && f.Hook != HookSocket {
		o.Hook = compile.XTBPF // name used in error messages
	}
	o.Kernel = &running.Kernel{}
	o.Lists = map[string]compile.List{}
	for name := range f.Lists {
		o.Lists[name] = compile.List{} // its contents do not matter
	}
	_, err = compile.Compile([]compile.Rule{rule}, o)
	if e, ok := errors.AsType[*expr.Error](err); ok {
		return e // the position in the file identifies the rule
	}
	return err
}

// compile compiles a filter's rules into one program.
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
		if _, ok := actions[r.Action]; !ok { // from Go code: files are checked by Action.UnmarshalText
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

// view returns the view of a hook.
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

// compileAndLoad compiles a filter, loads its program and fills new tables of lists. After
// compilation it calls share, which returns existing maps to reuse.
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

// withRoom calls do, which fills the tables of lists. While a table is full, it retries with larger
// tables and then with more of them.
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

// loadFilled loads a program, reusing the given maps, and fills the new tables of lists.
func loadFilled(c *compiled, lists map[string]*list, given map[string]*ebpf.Map) (*kernel.Collection, error) {
	coll, err := kernel.Load(c.Spec, []string{programName}, given)
	if err != nil {
		return nil, err
	}
	for name, l := range lists {
		if l.Table == "" {
			continue // a short list, or unused by all rules
		}
		if err := l.fill(coll.Maps, given); err != nil {
			coll.Close()
			return nil, fmt.Errorf("list %s: %w", name, err)
		}
	}
	return coll, nil
}

// noMaps shares no maps: all are created.
func noMaps() map[string]*ebpf.Map { return nil }

// hash returns a hash of the program, to detect another compiler version.
func (c *compiled) hash() (sum [sha256.Size]byte) {
	h := sha256.New()
	for _, ins := range c.Spec.Programs[programName].Instructions {
		fmt.Fprintln(h, ins)
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// hash returns the hash of the program as compiled by this weir.
func (p *published) hash() (sum [sha256.Size]byte, err error) {
	c, err := p.Filter.compile(p.view(), p.Lists)
	if err != nil {
		return sum, err
	}
	return c.hash(), nil
}

// pinnedMaps returns the maps of a program by pin name.
func pinnedMaps(c *kernel.Collection) map[string]*ebpf.Map {
	out := map[string]*ebpf.Map{}
	for name, m := range c.Maps {
		if !strings.HasPrefix(name, ".") {
			out[strings.TrimPrefix(name, mapPrefix)] = m
		}
	}
	return out
}

// sharedMaps returns pinned maps by their names in the program.
func sharedMaps(pins map[string]*ebpf.Map) map[string]*ebpf.Map {
	out := map[string]*ebpf.Map{}
	for name, m := range pins {
		out[mapPrefix+name] = m
		out[name] = m
	}
	return out
}
