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

// Config is what a host's configuration says of filters.
type Config struct {
	Filters []Filter
}

// Filter is one set of rules at one hook of one network namespace.
type Filter struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Name           string            `yaml:"name" json:"name"` // unique in its namespace
	Hook           Hook              `yaml:"hook" json:"hook"`
	Interfaces     []string          `yaml:"interfaces" json:"interfaces,omitempty"`   // names; xdp, xdp-generic, tcx, clsact
	Direction      Direction         `yaml:"direction" json:"direction,omitempty"`     // tcx, clsact
	Order          Order             `yaml:"order" json:"order,omitzero"`              // tcx: among the programs of others
	At             Point             `yaml:"at" json:"at,omitempty"`                   // netfilter, nft
	Priority       int32             `yaml:"priority" json:"priority,omitempty"`       // netfilter, nft: the lowest runs first
	Netns          string            `yaml:"netns" json:"netns,omitempty"`             // name, path or pid:N; empty: weir's own
	Default        Action            `yaml:"default" json:"default,omitempty"`         // where no rule decides: pass or drop
	Unreadable     Unreadable        `yaml:"unreadable" json:"unreadable,omitempty"`   // fields of a transport header that cannot be read: match (the default) or absent
	Lists          map[string]string `yaml:"lists" json:"lists,omitempty" path:"file"` // $name in expressions, to a file of prefixes, relative to the configuration
	Rules          []Rule            `yaml:"rules" json:"rules"`

	saved map[string]*list // contents of lists that are not read from their files: of a filter that is restored
}

// Rule is one expression and what becomes of the packets that it matches. The
// first rule that matches and does not only count decides.
type Rule struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Name           string     `yaml:"name" json:"name,omitempty"` // keeps the counters while the expression changes
	Match          Expression `yaml:"match" json:"match"`
	Action         Action     `yaml:"action" json:"action"`
}

// Key is what a rule is known by: its name, or the expression of one without.
func (r Rule) Key() string { return cmp.Or(r.Name, r.Match.Text) }

// Expression is the text of an expression, with its place in the file.
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

// Hook is where packets are filtered.
type Hook string

// Hooks.
const (
	HookXDP        Hook = "xdp"         // in the driver, before all else
	HookXDPGeneric Hook = "xdp-generic" // as xdp, on socket buffers: for drivers without
	HookTCX        Hook = "tcx"         // a device's packets, in or out; clsact before Linux 6.6
	HookClsact     Hook = "clsact"      // the same by a tc filter
	HookNetfilter  Hook = "netfilter"   // a point on the way through the IP stack (Linux 6.4)
	HookNFT        Hook = "nft"         // the same by a rule of nftables, in a table of weir's own

	// HookSocket is that of [AttachSocket], of no configuration: Explain takes it.
	HookSocket Hook = "socket"
)

var hooks = []Hook{HookXDP, HookXDPGeneric, HookTCX, HookClsact, HookNetfilter, HookNFT}

// ofDevices says whether the hook is a device's and not a namespace's.
func (h Hook) ofDevices() bool { return h != HookNetfilter && h != HookNFT }

// xdp says whether the hook is one of XDP's.
func (h Hook) xdp() bool { return h == HookXDP || h == HookXDPGeneric }

// UnmarshalText implements encoding.TextUnmarshaler.
func (h *Hook) UnmarshalText(b []byte) error { return strictyaml.Choice(h, b, "hook", hooks...) }

// Direction is which of a device's packets are filtered.
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

// Order is where a filter goes among the programs at a hook of tcx, with its place in the file.
type Order struct {
	strictyaml.Pos
	hookorder.Order
}

// IsZero says whether the filter goes behind the programs that are there.
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

// Point is a point on the way through the IP stack.
type Point string

// points are the hooks of netfilter by name.
var points = map[Point]kernel.InetHook{"prerouting": kernel.Prerouting, "input": kernel.Input, "forward": kernel.Forward,
	"output": kernel.Output, "postrouting": kernel.Postrouting}

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Point) UnmarshalText(b []byte) error {
	return strictyaml.Choice(p, b, "at", "prerouting", "input", "forward", "output", "postrouting")
}

// Action is what becomes of a packet.
type Action string

// Actions.
const (
	Pass  Action = "pass"
	Drop  Action = "drop"
	Count Action = "count" // and go on to the next rule
)

// UnmarshalText implements encoding.TextUnmarshaler.
func (a *Action) UnmarshalText(b []byte) error {
	return strictyaml.Choice(a, b, "action", Drop, Pass, Count)
}

// Unreadable is how rules take fields of a transport header that cannot be read.
type Unreadable string

// The ways to take them.
const (
	MatchUnreadable  Unreadable = "match"  // every rule that drops matches, no rule that passes
	AbsentUnreadable Unreadable = "absent" // as fields that the packet does not have
)

// UnmarshalText implements encoding.TextUnmarshaler.
func (u *Unreadable) UnmarshalText(b []byte) error {
	return strictyaml.Choice(u, b, "unreadable", MatchUnreadable, AbsentUnreadable)
}

// unreadable says how a rule takes these fields.
func (f Filter) unreadable(rule int) expr.Unreadable {
	if f.Unreadable == AbsentUnreadable {
		return expr.TreatAbsent
	}
	return compile.Rule{Action: actions[f.Rules[rule].Action]}.Unreadable()
}

// withDefaults fills in what the file leaves out.
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

// maxRules of one filter.
const maxRules = compile.MaxRules

// Validate checks what the types cannot, and fills in defaults. Errors carry
// the place in the file.
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
			fail("no name: filters are known by one")
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

// where names a filter as a path in the file.
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
		fail("hook %s is the whole namespace's: leave interfaces out, or use hook tcx", f.Hook)
	}
	if f.Direction != "" && f.Hook != HookTCX && f.Hook != HookClsact {
		fail("direction: only hooks tcx and clsact have one; %s", directionHint(f.Hook))
	}
	if !f.Order.IsZero() && f.Hook != HookTCX {
		fail("order: only hook tcx has one; %s", orderHint(f.Hook))
	}
	if (f.At != "" || f.Priority != 0) && f.Hook.ofDevices() {
		fail("at and priority: only hooks netfilter and nft have them; at a device, programs run in the order in which they were attached, or that order asks for")
	}
	for i, name := range f.Interfaces {
		if name == "" || len(name) > 15 || strings.ContainsAny(name, "/ \t\n:") {
			fail("interface %q: want the name of one, of at most 15 bytes", name)
		} else if slices.Contains(f.Interfaces[:i], name) {
			fail("interface %q: named twice", name)
		}
	}
}

func directionHint(h Hook) string {
	if h.xdp() {
		return "xdp sees incoming packets alone"
	}
	return "for this hook say at: input, forward, output, prerouting or postrouting"
}

func orderHint(h Hook) string {
	switch {
	case h.xdp():
		return "XDP has room for one program"
	case h == HookClsact:
		return "tc filters run by their priorities, after the programs of tcx: use hook tcx"
	}
	return "for this hook say priority"
}

// besides refuses what cannot stand beside another filter of the namespace.
func (f Filter) besides(o Filter, fail func(string, ...any)) {
	if o.Name == f.Name && f.Name != "" {
		fail("there is another filter of that name in the namespace")
	}
	if f.Hook == HookNetfilter && o.Hook == HookNetfilter && f.At == o.At && f.Priority == o.Priority {
		fail("filter %s has the same priority, %d: a point has room for one BPF program of a priority", o.Name, f.Priority)
	}
	if o.ends(f) {
		fail("order %s: filter %s has the same order at an interface of both: say {before: NAME} or {after: NAME} in one of them, or put the rules into one filter", f.Order, o.Name)
	}
	if f.Hook.xdp() && o.Hook.xdp() {
		for _, name := range f.Interfaces {
			if slices.Contains(o.Interfaces, name) {
				fail("filter %s is at XDP of %s already, which has room for one: put the rules into one filter, or use hook tcx", o.Name, name)
			}
		}
	}
}

// ends says whether two filters are both to be the first, or the last, at a hook.
func (f Filter) ends(o Filter) bool {
	return f.Order.Order == o.Order.Order && !f.Order.IsZero() && f.Order.Anchor == "" && f.Direction == o.Direction &&
		slices.ContainsFunc(f.Interfaces, func(name string) bool { return slices.Contains(o.Interfaces, name) })
}

// oneLine leaves the picture out that an error of the language draws: each line of a
// configuration's errors has a place of its own.
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
			fail("the same name, or expression, as rules[%d]: give it a name of its own", first)
		}
		keys[r.Key()] = n
		if err := r.check(f); err != nil && f.Hook != "" {
			errs = append(errs, r.Match.Pos.Errorf("%s.match: %w", at, oneLine{err}))
		}
	}
	return errs
}
