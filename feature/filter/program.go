// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/kernel"
)

// This file is where the language (package expr) and its compiler (package
// compile) are joined to what attaches programs. Everything else of this package
// knows a compiled filter as a program called "filter" and its maps, one of which
// is "filter_counts".

// view is what of a packet a program sees, and what it returns.
type view int

const (
	viewXTBPF     view = iota // socket filter asked by nftables: 1 drops, 0 does not
	viewNetfilter             // NF_ACCEPT, NF_DROP
	viewTC                    // TC_ACT_UNSPEC, TC_ACT_SHOT
	viewTCRaw                 // the same, at devices whose packets begin with the IP header
	viewXDP                   // XDP_PASS, XDP_DROP
)

// program is the name of a compiled filter's program and the prefix of its maps.
const (
	programName = "filter"
	mapPrefix   = "filter_"
	countsMap   = "filter_counts"
)

// compiled is a filter that is not loaded yet.
type compiled struct {
	spec *ebpf.CollectionSpec
	// fill writes what the program looks up (lists) into its new maps, before it is
	// attached; nil for nothing.
	fill func(maps map[string]*ebpf.Map) error
}

// placed is a mistake with its place in an expression.
type placed struct {
	Column int // from 1, in characters
	Err    error
}

func (p *placed) Error() string { return fmt.Sprintf("column %d: %v", p.Column, p.Err) }
func (p *placed) Unwrap() error { return p.Err }

// language is what checks and compiles rules.
type language interface {
	// check finds the mistakes of an expression at a hook.
	check(match string, v view, lists map[string]string) error
	compile(f Filter, v view) (*compiled, error)
}

// rules is the language of this build.
var rules language = noLanguage{}

var errNoLanguage = errors.New("this build of weir has no compiler of expressions")

type noLanguage struct{}

func (noLanguage) check(string, view, map[string]string) error { return errNoLanguage }
func (noLanguage) compile(Filter, view) (*compiled, error)     { return nil, errNoLanguage }

// view is that of the hook.
func (h Hook) view() view {
	switch h {
	case HookNFT:
		return viewXTBPF
	case HookNetfilter:
		return viewNetfilter
	case HookTCX, HookClsact:
		return viewTC
	}
	return viewXDP
}

// checkRules finds the mistakes in the expressions of a filter: file, line and
// column of the expression, and the column within it.
func (f Filter) checkRules(at string) []error {
	var errs []error
	for n, r := range f.Rules {
		if err := rules.check(r.Match.Text, f.Hook.view(), f.Lists); err != nil {
			errs = append(errs, r.place().Errorf("%s.rules[%d].match: %w", at, n, err))
		}
	}
	return errs
}

// place is that of the expression; rules that came from no file have none.
func (r Rule) place() strictyaml.Pos { return r.Match.Pos }

// compileAndLoad compiles a filter and loads its program. Maps in share are used in place
// of new ones; the lists of those that are new are filled.
func (p *published) compileAndLoad(share map[string]*ebpf.Map) (*kernel.Collection, [sha256.Size]byte, error) {
	var hash [sha256.Size]byte
	f := p.Filter
	c, err := rules.compile(f, p.view())
	if err != nil {
		return nil, hash, fmt.Errorf("filter %s: %w", f.Name, err)
	}
	hash = c.hash()
	coll, err := kernel.Load(c.spec, []string{programName}, share)
	if err != nil {
		return nil, hash, fmt.Errorf("filter %s: %w", f.Name, err)
	}
	if c.fill != nil && share == nil {
		if err := c.fill(coll.Maps); err != nil {
			coll.Close()
			return nil, hash, fmt.Errorf("filter %s: %w", f.Name, err)
		}
	}
	return coll, hash, nil
}

// hash tells a program from that of another compiler.
func (c *compiled) hash() (sum [sha256.Size]byte) {
	h := sha256.New()
	for _, ins := range c.spec.Programs[programName].Instructions {
		fmt.Fprintln(h, ins)
	}
	return [sha256.Size]byte(h.Sum(nil))
}

// hash of the program that this weir makes of a filter.
func (p *published) hash() (sum [sha256.Size]byte, err error) {
	c, err := rules.compile(p.Filter, p.view())
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
