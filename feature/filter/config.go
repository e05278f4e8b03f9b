// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature/filter/compile"
	"github.com/weir-project/weir/feature/filter/expr"
	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/internal/strictyaml"
	"github.com/weir-project/weir/kernel"
	"go.yaml.in/yaml/v3"
)

// Config is the filter section of a host's configuration.
type Config struct {
	Filters []Filter
}

// Filter is a set of rules at one hook of one network namespace.
type Filter struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Name           string            `yaml:"name" json:"name"` // unique in its namespace
	Hook           Hook              `yaml:"hook" json:"hook"`
	Interfaces     []string          `yaml:"interfaces" json:"interfaces,omitempty"`   // names; xdp, xdp-generic, tcx, clsact
	Direction      Direction         `yaml:"direction" json:"direction,omitempty"`     // tcx, clsact
	Order          Order             `yaml:"order" json:"order,omitzero"`              // tcx: position among other programs
	At             Point             `yaml:"at" json:"at,omitempty"`                   // netfilter, nft
	Priority       int32             `yaml:"priority" json:"priority,omitempty"`       // netfilter, nft: the lowest runs first
	Netns          string            `yaml:"netns" json:"netns,omitempty"`             // name, path or pid:N; empty: the namespace of weir
	Default        Action            `yaml:"default" json:"default,omitempty"`         // pass or drop, for packets without a deciding rule
	Unreadable     Unreadable        `yaml:"unreadable" json:"unreadable,omitempty"`   // fields of unreadable transport headers: match (the default) or absent
	Lists          map[string]string `yaml:"lists" json:"lists,omitempty" path:"file"` // $name of an expression to a file of prefixes, relative to the configuration
	Rules          []Rule            `yaml:"rules" json:"rules"`

	saved map[string]*list // lists of a restored filter, used instead of their files
}

// Rule is an expression and the action for matching packets. The first matching rule with the
// action pass or drop decides.
type Rule struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Name           string     `yaml:"name" json:"name,omitempty"` // keeps the counters when the expression changes
	Match          Expression `yaml:"match" json:"match"`
	Action         Action     `yaml:"action" json:"action"`
}

// Key returns the identity of a rule: its name or, without one, its expression.
func (r Rule) Key() string { return cmp.Or(r.Name, r.Match.Text) }

// Expression is the text of an expression, with its position in the file.
type Expression struct {
	strictyaml.Pos
	Text string
}

// UnmarshalNode implements strictyaml.Node.
func (e *Expression) UnmarshalNode(n *yaml.Node, d *strictyaml.Decoder) error {
	e.Pos = d.Pos(n)
	return d.Decode(n, &e.Text)
}

// MarshalText implements encoding.TextMarshaler.
func (e Expression) MarshalText() ([]byte, error) { return []byte(e.Text), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (e *Expression) UnmarshalText(b []byte) error { e.Text = string(b); return nil }

// Hook is the kernel hook of a filter.
type Hook string

// Hooks.
const (
	HookXDP        Hook = "xdp"         // in the driver, before any other hook
	HookXDPGeneric Hook = "xdp-generic" // XDP on socket buffers: for drivers without XDP support
	HookTCX        Hook = "tcx"         // packets of a device, one direction; before Linux 6.6 clsact is used
	HookClsact     Hook = "clsact"      // as tcx, through a tc filter
	HookNetfilter  Hook = "netfilter"   // a netfilter hook of the IP stack (Linux 6.4)
	HookNFT        Hook = "nft"         // as netfilter, through an nftables rule in a table of weir

	// HookSocket is the hook of [AttachSocket]. [Explain] accepts it; a configuration does not.
	HookSocket Hook = "socket"
)

var hooks = []Hook{HookXDP, HookXDPGeneric, HookTCX, HookClsact, HookNetfilter, HookNFT}

// ofDevices reports whether the hook belongs to a device rather than a namespace.
func (h Hook) ofDevices() bool { return h != HookNetfilter && h != HookNFT }

// xdp reports whether the hook is an XDP hook.
func (h Hook) xdp() bool { return h == HookXDP || h == HookXDPGeneric }

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *Hook) UnmarshalText(b []byte) error { return strictyaml.Choice(h, b, "hook", hooks...) }

// Direction is the direction of a device's filtered packets.
type Direction string

// Directions.
const (
	Ingress Direction = "ingress"
	Egress  Direction = "egress"
)

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *Direction) UnmarshalText(b []byte) error {
	return strictyaml.Choice(d, b, "direction", Ingress, Egress)
}

// Order is the position of a filter among the programs of a tcx hook, with its position in the
// file.
type Order struct {
	strictyaml.Pos
	hookorder.Order
}

// IsZero reports whether the filter is appended after the existing programs.
func (o Order) IsZero() bool { return o.Order == hookorder.Order{} }

// MarshalText implements encoding.TextMarshaler.
func (o Order) MarshalText() ([]byte, error) { return o.Order.MarshalText() }

// UnmarshalText implements encoding.TextUnmarshaler.
func (o *Order) UnmarshalText(b []byte) error { return o.Order.UnmarshalText(b) }

// UnmarshalNode implements strictyaml.Node: first, last, {before: NAME} or {after: NAME}.
func (o *Order) UnmarshalNode(n *yaml.Node, d *strictyaml.Decoder) error {
	o.Pos = d.Pos(n)
	const wanted = "want first, last, {before: NAME} or {after: NAME}, NAME as bpftool prog shows it"
	switch n.Kind {
	case yaml.MappingNode:
	case yaml.ScalarNode:
		if o.Where = hookorder.Where(n.Value); o.Where != hookorder.First && o.Where != hookorder.Last {
			return d.Errorf(n, "", "order %q: %s", n.Value, wanted)
		}
		return nil
	default:
		return d.Errorf(n, "", "%s", wanted)
	}
	var m struct {
		Before string `yaml:"before"`
		After  string `yaml:"after"`
	}
	if err := d.Decode(n, &m); err != nil {
		return err
	}
	o.Where, o.Anchor = hookorder.Before, m.Before
	if m.After != "" {
		o.Where, o.Anchor = hookorder.After, m.After
	}
	switch {
	case (m.Before == "") == (m.After == ""):
		return d.Errorf(n, "", "%s", wanted)
	case strings.ContainsAny(o.Anchor, " \t\n"):
		return d.Errorf(n, "", "%s %q: want the name of a program, without spaces", o.Where, o.Anchor)
	}
	return nil
}

// Point is a netfilter hook of the IP stack.
type Point string

// points maps names to netfilter hooks.
var points = map[Point]kernel.InetHook{"prerouting": kernel.Prerouting, "input": kernel.Input, "forward": kernel.Forward,
	"output": kernel.Output, "postrouting": kernel.Postrouting}

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Point) UnmarshalText(b []byte) error {
	if d := Direction(b); d == Ingress || d == Egress {
		return fmt.Errorf("at %q: at is for hooks nft and netfilter; tcx and clsact have direction: %s", d, d)
	}
	return strictyaml.Choice(p, b, "at", "prerouting", "input", "forward", "output", "postrouting")
}

// Action is the action of a rule.
type Action string

// Actions.
const (
	Pass  Action = "pass"
	Drop  Action = "drop"
	Count Action = "count" // and continue with the next rule
)

// UnmarshalText implements encoding.TextUnmarshaler.
func (a *Action) UnmarshalText(b []byte) error {
	return strictyaml.Choice(a, b, "action", Drop, Pass, Count)
}

// Unreadable is the treatment of fields of an unreadable transport header: one cut off, or behind
// too many other headers.
type Unreadable string

// Treatments of unreadable fields.
const (
	MatchUnreadable  Unreadable = "match"  // every drop rule matches, no pass rule does
	AbsentUnreadable Unreadable = "absent" // as fields absent from the packet
)

// UnmarshalText implements encoding.TextUnmarshaler.
func (u *Unreadable) UnmarshalText(b []byte) error {
	return strictyaml.Choice(u, b, "unreadable", MatchUnreadable, AbsentUnreadable)
}

// unreadable returns the treatment of unreadable fields for a rule.
func (f Filter) unreadable(rule int) expr.Unreadable {
	if f.Unreadable == AbsentUnreadable {
		return expr.TreatAbsent
	}
	return compile.Rule{Action: actions[f.Rules[rule].Action]}.Unreadable()
}

// withDefaults returns the filter with defaults in place of unset keys.
func (f Filter) withDefaults() Filter {
	f.Default = cmp.Or(f.Default, Pass)
	if f.Hook == HookTCX || f.Hook == HookClsact {
		f.Direction = cmp.Or(f.Direction, Ingress)
	}
	if f.Hook == HookNetfilter || f.Hook == HookNFT {
		f.At = cmp.Or(f.At, "input")
	}
	return f
}

// maxRules is the maximum number of rules of a filter.
const maxRules = compile.MaxRules

// Validate checks the configuration beyond its types and fills in defaults. Errors carry the
// position in the file.
func (c *Config) Validate() []error {
	var errs []error
	for i := range c.Filters {
		f := c.Filters[i].withDefaults()
		c.Filters[i] = f
		fail := func(format string, a ...any) {
			errs = append(errs, f.Pos.Errorf("%s: "+format, append([]any{where(i, f)}, a...)...))
		}
		f.validateLocation(fail)
		switch {
		case f.Name == "":
			fail("no name: set a name, unique in the namespace")
		case !kernel.ValidName(f.Name):
			fail("name %q: use 1 to 63 letters, digits, - and _", f.Name)
		}
		if f.Default == Count {
			fail("default: count decides nothing: want pass or drop")
		}
		if len(f.Rules) == 0 || len(f.Rules) > maxRules {
			fail("%d rules: want 1 to %d, like rules: [{match: 'udp.dstport == 53', action: drop}]", len(f.Rules), maxRules)
		}
		for _, o := range c.Filters[:i] {
			if o.Netns == f.Netns {
				f.besides(o, fail)
			}
		}
		errs = append(errs, f.validateRules(i)...)
	}
	return errs
}

// where returns the path of a filter in the file, for errors.
func where(i int, f Filter) string {
	if f.Name == "" {
		return fmt.Sprintf("filter[%d]", i)
	}
	return "filter." + f.Name
}

func (f Filter) validateLocation(fail func(string, ...any)) {
	switch {
	case f.Hook == "":
		fail("no hook: want one of %s", strings.Trim(fmt.Sprint(hooks), "[]"))
		return
	case f.Hook.ofDevices() && len(f.Interfaces) == 0:
		fail("hook %s needs interfaces, like interfaces: [eth0]", f.Hook)
	case !f.Hook.ofDevices() && len(f.Interfaces) > 0:
		fail("hook %s covers the whole namespace: omit interfaces, or use hook tcx", f.Hook)
	}
	if f.Direction != "" && f.Hook != HookTCX && f.Hook != HookClsact {
		fail("direction: only hooks tcx and clsact have one; %s", directionHint(f.Hook))
	}
	if !f.Order.IsZero() && f.Hook != HookTCX {
		fail("order: only hook tcx has one; %s", orderHint(f.Hook))
	}
	if (f.At != "" || f.Priority != 0) && f.Hook.ofDevices() {
		fail("at and priority: only hooks netfilter and nft have them; programs of a device run in attachment order, or as set by order")
	}
	for i, name := range f.Interfaces {
		if name == "" || len(name) > 15 || strings.ContainsAny(name, "/ \t\n:") {
			fail("interface %q: want an interface name of at most 15 bytes", name)
		} else if slices.Contains(f.Interfaces[:i], name) {
			fail("interface %q: named twice", name)
		}
	}
}

func directionHint(h Hook) string {
	if h.xdp() {
		return "xdp sees incoming packets only"
	}
	return "for this hook set at: input, forward, output, prerouting or postrouting"
}

func orderHint(h Hook) string {
	switch {
	case h.xdp():
		return "XDP has room for one program"
	case h == HookClsact:
		return "tc filters run by their priorities, after the programs of tcx: use hook tcx"
	}
	return "for this hook set priority"
}

// besides reports conflicts with another filter of the same namespace.
func (f Filter) besides(o Filter, fail func(string, ...any)) {
	if o.Name == f.Name && f.Name != "" {
		fail("the namespace already has a filter of this name")
	}
	if f.Hook == HookNetfilter && o.Hook == HookNetfilter && f.At == o.At && f.Priority == o.Priority {
		fail("filter %s has the same priority, %d: a point has room for one BPF program of a priority", o.Name, f.Priority)
	}
	if o.ends(f) {
		fail("order %s: filter %s has the same order on a shared interface: set {before: NAME} or {after: NAME} in one of them, or merge the rules into one filter", f.Order, o.Name)
	}
	if f.Hook.xdp() && o.Hook.xdp() {
		for _, name := range f.Interfaces {
			if slices.Contains(o.Interfaces, name) {
				fail("filter %s already uses XDP of %s, with room for one program: merge the rules into one filter, or use hook tcx", o.Name, name)
			}
		}
	}
}

// ends reports whether both filters claim the first, or the last, position at a hook.
func (f Filter) ends(o Filter) bool {
	return f.Order.Order == o.Order.Order && !f.Order.IsZero() && f.Order.Anchor == "" && f.Direction == o.Direction &&
		slices.ContainsFunc(f.Interfaces, func(name string) bool { return slices.Contains(o.Interfaces, name) })
}

// oneLine shortens an expression error to its first line, without the marked source text. In the
// errors of a configuration, each line has its own position.
type oneLine struct{ error }

func (o oneLine) Error() string {
	text, _, _ := strings.Cut(o.error.Error(), "\n")
	return text
}

func (o oneLine) Unwrap() error { return o.error }

func (f Filter) validateRules(i int) []error {
	var errs []error
	keys := map[string]int{}
	for n, r := range f.Rules {
		at := fmt.Sprintf("%s.rules[%d]", where(i, f), n)
		fail := func(format string, a ...any) {
			errs = append(errs, r.Pos.Errorf("%s: "+format, append([]any{at}, a...)...))
		}
		if strings.TrimSpace(r.Match.Text) == "" {
			fail("no match: want an expression, like match: 'udp.dstport == 53'")
			continue
		}
		if r.Action == "" {
			fail("no action: want drop, pass or count")
		}
		if first, ok := keys[r.Key()]; ok {
			fail("the same name, or expression, as rules[%d]: set a unique name", first)
		}
		keys[r.Key()] = n
		if err := r.check(f); err != nil && f.Hook != "" {
			errs = append(errs, r.Match.Pos.Errorf("%s.match: %w", at, oneLine{err}))
		}
	}
	return errs
}
