// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/filter/compile/running"
	"github.com/weir-project/weir/internal/hookorder"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/hook"
)

// Feature implements the filter feature for package host.
type Feature struct{}

var (
	_ feature.Feature[Config, State] = Feature{}
	_ feature.Upgrader               = Feature{}
	_ feature.Runner                 = Feature{}
)

// Name implements feature.Feature.
func (Feature) Name() string { return Name }

// Needs implements feature.Feature. Needs of hooks unused in c are optional.
func (Feature) Needs(c Config) []kernel.Need {
	used := map[Hook]bool{}
	for _, f := range c.Filters {
		used[f.Hook] = true
	}
	need := func(n kernel.Need, hooks ...Hook) kernel.Need {
		n.Optional = !slices.ContainsFunc(hooks, func(h Hook) bool { return used[h] })
		return n
	}
	tcx := kernel.TCXLink
	if slices.ContainsFunc(c.Filters, func(f Filter) bool { return !f.Order.IsZero() }) {
		tcx.Optional, tcx.For, tcx.Remedy = false, "order of filters", "use a newer kernel, or leave order out"
	}
	return []kernel.Need{need(kernel.XDPProgram, HookXDP, HookXDPGeneric), tcx, need(kernel.ClsactFilter, HookClsact, HookTCX),
		need(kernel.NetfilterLink, HookNetfilter), need(running.DynptrSkb, HookNetfilter), need(hook.NFTMatch, HookNFT)}
}

// State implements feature.Feature.
func (Feature) State(ctx context.Context, r *kernel.Root) (State, error) { return ReadState(ctx, r) }

// Plan implements feature.Feature.
func (Feature) Plan(_ context.Context, have State, want Config) (feature.Plan, error) {
	var plan feature.Plan
	plan.Stays(have.Unreadable)
	var wanted []kernel.Instance
	for _, f := range want.Filters {
		if err := f.unfitLists(); err != nil { // fail before reading a large list
			return plan, err
		}
	}
	for _, f := range want.Filters {
		t, err := resolve(f)
		if err != nil {
			return plan, err
		}
		if slices.Contains(wanted, t.inst) {
			return plan, f.Pos.Errorf("filter.%s: namespace %s already has a filter of this name", f.Name, t.pub.Netns)
		}
		wanted = append(wanted, t.inst)
		if have.Unreadable.Has(t.inst) {
			continue
		}
		if err := t.plan(&plan, have); err != nil {
			return plan, err
		}
	}
	for _, s := range have.Filters {
		if !slices.Contains(wanted, s.inst) {
			plan.Add(removeStep(s.inst, s.Netns))
		}
	}
	return plan, nil
}

// Remove implements feature.Feature.
func (Feature) Remove(ctx context.Context, l *kernel.WriteLock) error {
	all, err := filters.Keys(l.Root)
	for _, i := range all {
		if ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		err = errors.Join(err, remove(l, i))
	}
	return err
}

// Recover completes or undoes changes left half done by killed commands.
func (Feature) Recover(l *kernel.WriteLock) error { return recoverAll(l) }

// target is the spec of a filter, with its namespace resolved.
type target struct {
	inst kernel.Instance
	pub  *published

	restored bool // restored from a saved state instead of a file
}

func resolve(f Filter) (*target, error) {
	f = f.withDefaults()
	ns, err := netns.Open(f.Netns)
	if err != nil {
		return nil, f.Pos.Errorf("filter.%s: netns: %w", f.Name, err)
	}
	defer ns.Close()
	t := &target{inst: filters.Name(kernel.ScopeOf(ns), f.Name), pub: &published{Filter: f, Netns: f.Netns, Attacher: f.chooseAttacher()}}
	id := ns.ID()
	t.pub.meta.Inode, t.pub.meta.Cookie = id.Inode, id.Cookie
	if t.pub.Netns == "" {
		t.pub.Netns = fmt.Sprintf("net:[%d]", ns.Inode())
	}
	if f.Hook == HookTCX || f.Hook == HookClsact {
		if t.pub.Raw, err = (&instance{pub: t.pub, ns: ns}).raw(); err != nil {
			return nil, fmt.Errorf("filter.%s: %w", f.Name, err)
		}
	}
	if t.pub.Lists, err = f.readLists(); err != nil {
		return nil, err
	}
	t.pub.Filter.saved, t.restored = nil, f.saved != nil
	return t, nil
}

func (t *target) plan(plan *feature.Plan, have State) error {
	object := "filter " + t.pub.Filter.Name
	i := slices.IndexFunc(have.Filters, func(s FilterState) bool { return s.inst == t.inst })
	create := feature.Step{Verb: "create", Object: object, Detail: t.pub.summary(),
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", t.create(l) }}
	if i < 0 {
		if err := t.anchors(plan, nil); err != nil {
			return err
		}
		plan.Add(create)
		t.warn(plan, nil)
		t.warnOfOccupied(plan, have)
		return nil
	}
	s := have.Filters[i]
	if err := t.anchors(plan, &s); err != nil {
		return err
	}
	t.refuseAbsent(plan, &s)
	if s.pub.Filter.Hook.xdp() && t.pub.Filter.Hook.xdp() && s.pub.Filter.Hook != t.pub.Filter.Hook {
		// The kernel supports one XDP mode per device: packets pass unfiltered during the switch.
		gone := removeStep(s.inst, s.Netns)
		gone.Detail = fmt.Sprintf("hook %s → %s", s.pub.Filter.Hook, t.pub.Filter.Hook)
		plan.Add(gone)
		plan.Add(create)
		plan.Warn("filter %s: packets pass unfiltered for a moment during the change from %s to %s, because a device has one XDP mode at a time", t.pub.Filter.Name, s.pub.Filter.Hook, t.pub.Filter.Hook)
		t.warn(plan, s.pub)
		return nil
	}
	d := differences(s.pub, t.pub)
	if s.outdated() {
		d = append(d, "the program of another weir, "+s.pub.meta.Version)
	}
	d = append(d, s.misplaced(t.pub.Filter.Order)...)
	switch {
	case len(d) > 0:
		plan.Add(feature.Step{Verb: "change", Object: object, Detail: strings.Join(d, "; "),
			Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", t.change(l) }})
	case len(s.lacking()) > 0:
		plan.Add(feature.Step{Verb: "attach", Object: object, Detail: strings.Join(s.lacking(), ", "),
			Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", attachAll(l, t.inst) }})
	case len(s.strays()) > 0:
		plan.Add(feature.Step{Verb: "detach", Object: object, Detail: strings.Join(s.strays(), ", "),
			Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", attachAll(l, t.inst) }})
	}
	t.warn(plan, s.pub)
	t.warnOfOccupied(plan, have)
	return nil
}

// refuseAbsent adds an error to the plan if an attached filter would move to absent or unsuitable
// interfaces.
func (t *target) refuseAbsent(plan *feature.Plan, was *FilterState) {
	f := t.pub.Filter
	ns, err := findNetns(t.pub)
	if err != nil {
		return // the step using the namespace reports the error
	}
	defer ns.Close()
	devices, without, err := (&instance{pub: t.pub, ns: ns}).devices()
	if err != nil {
		return
	}
	attached := func(p Attachment) bool { return p.Attached }
	change := feature.Interfaces{Pos: f.Pos, Key: fmt.Sprintf("filter.%s: interfaces", f.Name), Published: was.pub.Filter.Interfaces, Spec: f.Interfaces,
		Works: func(name string) bool { _, there := was.at(name); return there },
		Lacks: func(name string) string {
			if _, there := devices[name]; there {
				return ""
			}
			reason, _, _ := strings.Cut(without(name), ": ")
			return reason
		}}
	if len(change.Published) == 0 && slices.ContainsFunc(was.Attachments, attached) {
		change.Beside = was.pub.Filter.location()
	}
	change.Refuse(plan)
}

// warnOfOccupied warns of interfaces with an XDP program of another owner. The filter cannot be
// attached there.
func (t *target) warnOfOccupied(plan *feature.Plan, have State) {
	f := t.pub.Filter
	if !f.Hook.xdp() {
		return
	}
	ns, err := findNetns(t.pub)
	if err != nil {
		return // the step using the namespace reports the error
	}
	defer ns.Close()
	devices, _, err := (&instance{pub: t.pub, ns: ns}).devices()
	if err != nil {
		return
	}
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		_ = ns.Do(func() error {
			program, about := kernel.XDP{Ifindex: devices[name], Device: name}.Occupant()
			if program != 0 && !have.runs(program) {
				plan.Warn("filter %s in %s: XDP of %s is occupied by %s: weir apply rejects the filter until it is detached", f.Name, t.pub.Netns, name, about)
			}
			return nil
		})
	}
}

// runs reports whether a program belongs to a filter.
func (s State) runs(program uint32) bool {
	return slices.ContainsFunc(s.Filters, func(f FilterState) bool {
		return slices.ContainsFunc(f.Attachments, func(p Attachment) bool { return p.program == program })
	})
}

// misplaced describes attachments on the wrong side of programs attached later. It returns nothing
// if the order itself changes: [differences] reports that.
func (f FilterState) misplaced(want Order) (out []string) {
	for _, p := range f.Attachments {
		if p.misplaced && f.pub.Filter.Order.Order == want.Order {
			out = append(out, fmt.Sprintf("%s: %s → %s", p.Name, p.Position, want.Order))
		}
	}
	return out
}

// anchors rejects an order whose named program is absent, if the filter must be attached relative
// to it. An attached filter keeps its position with a warning, because the program may return.
func (t *target) anchors(plan *feature.Plan, was *FilterState) error {
	f := t.pub.Filter
	if f.Order.Anchor == "" {
		return nil
	}
	ns, err := findNetns(t.pub)
	if err != nil {
		return fmt.Errorf("filter.%s: %w", f.Name, err)
	}
	defer ns.Close()
	devices, _, err := (&instance{pub: t.pub, ns: ns}).devices()
	if err != nil {
		return fmt.Errorf("filter.%s: %w", f.Name, err)
	}
	for _, name := range slices.Sorted(maps.Keys(devices)) {
		own, attached := was.at(name)
		err := ns.Do(func() error { return f.tcx(name, devices[name]).Anchored(own) })
		switch {
		case err == nil, permission(err):
		case errors.Is(err, hookorder.ErrNoAnchor) && attached && sameAttachment(was.pub, t.pub):
			plan.Warn("filter %s: %v; it keeps its position", f.Name, err)
		case errors.Is(err, hookorder.ErrNoAnchor) && t.restored:
			plan.Warn("filter %s: %v; it is attached after all others", f.Name, err)
			t.pub.Filter.Order = Order{}
			return nil
		default:
			return f.Order.Pos.Errorf("filter.%s: %w", f.Name, err)
		}
	}
	return nil
}

// at returns the program attached by the filter to an interface.
func (f *FilterState) at(device string) (program uint32, attached bool) {
	if f == nil {
		return 0, false
	}
	for _, p := range f.Attachments {
		if p.Interface == device {
			return p.program, p.Attached
		}
	}
	return 0, false
}

// warn adds warnings to the plan: absent interfaces, cut-off interfaces, emptied lists, and rules
// evaded by fragments.
func (t *target) warn(plan *feature.Plan, was *published) {
	f := t.pub.Filter
	t.warnOfEmptied(plan, was)
	if e := f.evadedByFragments(); e != nil {
		plan.Warn("%s", e.warning(f))
	}
	ns, err := findNetns(t.pub)
	if err != nil {
		return
	}
	defer ns.Close()
	t.warnOfCut(plan, was, ns)
	devices, without, err := (&instance{pub: t.pub, ns: ns}).devices()
	if err != nil {
		return
	}
	for _, name := range t.pub.Filter.Interfaces {
		if _, ok := devices[name]; !ok {
			plan.Warn("filter %s in %s: %s", t.pub.Filter.Name, t.pub.Netns, without(name))
		}
	}
}

func (t *target) create(l *kernel.WriteLock) error {
	ns, err := netns.Find(t.pub.Filter.Netns, t.pub.meta.ID())
	if err != nil {
		return err
	}
	defer ns.Close()
	return create(l, t.pub, ns)
}

func (t *target) change(l *kernel.WriteLock) error {
	s, err := openInstance(l, t.inst)
	if err != nil {
		return err
	}
	defer s.Close()
	moves, err := s.misplaced()
	if err != nil {
		return err
	}
	return s.change(t.pub, moves)
}

func attachAll(l *kernel.WriteLock, i kernel.Instance) error {
	s, err := openInstance(l, i)
	if err != nil {
		return err
	}
	defer s.Close()
	return s.attachAll()
}

func removeStep(i kernel.Instance, ns string) feature.Step {
	return feature.Step{Verb: "remove", Object: "filter " + i.Name, Detail: "in " + ns,
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", remove(l, i) }}
}

// summary describes the filter in one line.
func (p *published) summary() string {
	n := printable.Count(len(p.Filter.Rules), "rule")
	if len(p.Filter.Rules) == 1 {
		n = "1 rule"
	}
	return fmt.Sprintf("%s at %s, in %s", n, p.Filter.location(), p.Netns)
}

// location returns the hook and position of the filter, in the words of the file.
func (f Filter) location() string {
	if f.Hook.ofDevices() {
		at := string(f.Hook)
		if f.Direction != "" {
			at += " " + string(f.Direction)
		}
		at += " of " + strings.Join(f.Interfaces, ", ")
		if !f.Order.IsZero() {
			at += ", " + f.Order.String()
		}
		return at
	}
	return fmt.Sprintf("%s %s, priority %d", f.Hook, f.At, f.Priority)
}

// differences describes the changes from one published filter to another.
func differences(have, want *published) []string {
	var out []string
	a, b := have.Filter, want.Filter
	if x, y := a.location(), b.location(); x != y {
		out = append(out, x+" → "+y)
	}
	if have.Attacher != want.Attacher {
		out = append(out, fmt.Sprintf("attacher %s → %s", have.Attacher, want.Attacher))
	}
	if have.Raw != want.Raw {
		out = append(out, "interfaces with another link layer")
	}
	if a.Default != b.Default {
		out = append(out, fmt.Sprintf("default %s → %s", a.Default, b.Default))
	}
	if !sameLists(have.Lists, want.Lists) {
		out = append(out, "lists")
	} else if !maps.Equal(a.Lists, b.Lists) {
		out = append(out, "files of lists")
	}
	if have.Netns != want.Netns {
		out = append(out, fmt.Sprintf("netns %s → %s", have.Netns, want.Netns))
	}
	return append(out, ruleDifferences(a.Rules, b.Rules)...)
}

// maxNamed is the maximum number of rules named in a plan. Above it, the plan shows their number.
const maxNamed = 5

func ruleDifferences(have, want []Rule) []string {
	was := map[string]Rule{}
	for _, r := range have {
		was[r.Key()] = r
	}
	var added, changed, removed []string
	for _, r := range want {
		o, ok := was[r.Key()]
		delete(was, r.Key())
		switch {
		case !ok:
			added = append(added, r.Key())
		case o.Match.Text != r.Match.Text || o.Action != r.Action:
			changed = append(changed, r.Key())
		}
	}
	for _, r := range have {
		if _, ok := was[r.Key()]; ok {
			removed = append(removed, r.Key())
		}
	}
	var out []string
	for _, c := range []struct {
		what  string
		rules []string
	}{{"added", added}, {"changed", changed}, {"removed", removed}} {
		switch {
		case len(c.rules) > maxNamed:
			out = append(out, fmt.Sprintf("%s %s", printable.Count(len(c.rules), "rule"), c.what))
		case len(c.rules) > 0:
			out = append(out, fmt.Sprintf("%s %s", c.what, strings.Join(c.rules, ", ")))
		}
	}
	if len(out) == 0 && !slices.EqualFunc(have, want, func(a, b Rule) bool { return a.Key() == b.Key() }) {
		out = append(out, "order of rules")
	}
	return out
}
