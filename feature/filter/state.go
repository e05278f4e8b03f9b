// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/instances"
)

// State is the state of this host's filters, read from the pins.
type State struct {
	Filters    []FilterState        `json:"filters"`
	Unreadable instances.Unreadable `json:"unreadable,omitempty"`
}

// Unread implements feature.Unreads.
func (st State) Unread() instances.Unreadable { return st.Unreadable }

// FilterState is the state of one filter.
type FilterState struct {
	Name        string       `json:"name"`
	Netns       string       `json:"netns"`
	Inode       uint64       `json:"netns_inode"`
	Hook        Hook         `json:"hook"`
	Attacher    string       `json:"attacher"` // tcx or clsact where the hook allows both
	Direction   Direction    `json:"direction,omitempty"`
	Order       Order        `json:"order,omitzero"`
	At          Point        `json:"at,omitempty"`
	Priority    int32        `json:"priority,omitempty"`
	Attachments []Attachment `json:"attachments"`
	Rules       []RuleState  `json:"rules"`
	Default     RuleState    `json:"default"` // packets not decided by any rule
	Lists       []ListState  `json:"lists,omitempty"`
	// Unreadable counts packets with an unreadable transport header, passed or dropped.
	Unreadable Counted   `json:"unreadable"`
	Problem    string    `json:"problem,omitempty"`
	Updated    time.Time `json:"updated"`

	inst kernel.Instance
	pub  *published
	gone bool // the namespace
}

// ListState is the state of a list.
type ListState struct {
	Name     string `json:"name"`
	Prefixes int    `json:"prefixes"`
	MiB      int    `json:"mib,omitempty"` // of its tables; 0 for a short list, which is in the program
	Tables   int    `json:"tables,omitempty"`
}

// Counted is a number of packets and the time of the last one.
type Counted struct {
	Packets uint64    `json:"packets"`
	Bytes   uint64    `json:"bytes"`
	Last    time.Time `json:"last,omitzero"`
}

// RuleState is a rule and its counts since its name was added to the filter.
type RuleState struct {
	Name    string    `json:"name,omitempty"`
	Match   string    `json:"match,omitempty"`
	Action  Action    `json:"action"`
	Packets uint64    `json:"packets"`
	Bytes   uint64    `json:"bytes"`
	Last    time.Time `json:"last,omitzero"` // the last packet
	// Undecided counts packets of a capture with missing bytes relevant to the rule, see [Trial].
	Undecided uint64 `json:"undecided,omitempty"`
}

// Key returns the rule's identity: its name or, without one, its expression.
func (r RuleState) Key() string { return Rule{Name: r.Name, Match: Expression{Text: r.Match}}.Key() }

// Err returns an error about unreadable filters, or nil. Faults reports damaged ones.
func (st State) Err() error { return st.Unreadable.WithoutDamage().Err() }

// ReadState reads all filters from their pins.
func ReadState(_ context.Context, r *kernel.Root) (State, error) {
	st := State{Filters: []FilterState{}}
	all, unreadable, err := filters.All(r)
	if err != nil {
		return st, err
	}
	st.Unreadable = unreadable
	for _, rec := range all {
		f, err := readFilter(r, rec.Instance)
		if errors.Is(err, kernel.ErrNotExist) {
			continue // removed meanwhile
		} else if err != nil {
			st.Unreadable.Add(rec.Instance, err)
			continue
		}
		st.Filters = append(st.Filters, f)
	}
	return st, nil
}

func readFilter(r *kernel.Root, i kernel.Instance) (FilterState, error) {
	o, err := r.Open(i)
	if err != nil {
		return FilterState{}, err
	}
	defer o.Close()
	rec, err := filters.Decode(i, o.Meta)
	if err != nil {
		return FilterState{}, err
	}
	p := publishedFrom(rec)
	f := p.Filter
	out := FilterState{Name: i.Name, Netns: p.Netns, Inode: p.meta.Inode, Hook: f.Hook, Attacher: string(p.Attacher), Direction: f.Direction, Order: f.Order, At: f.At,
		Priority: f.Priority, Attachments: []Attachment{}, Rules: []RuleState{}, Updated: o.Meta.Created, inst: i, pub: p}
	sums, err := counts(o, p)
	if err != nil {
		return out, fmt.Errorf("filter %s: %w", i.Name, err)
	}
	for n, rule := range append(f.Rules[:len(f.Rules):len(f.Rules)], Rule{Action: f.Default}) {
		s := RuleState{Name: rule.Name, Match: rule.Match.Text, Action: rule.Action,
			Packets: sums[n].Packets, Bytes: sums[n].Bytes, Last: kernel.WallTime(sums[n].Last)}
		if n == len(f.Rules) {
			out.Default = s
		} else {
			out.Rules = append(out.Rules, s)
		}
	}
	out.Lists = p.listStates()
	u := sums[len(sums)-1]
	out.Unreadable = Counted{u.Packets, u.Bytes, kernel.WallTime(u.Last)}
	out.checkAttachments(o)
	return out, nil
}

// checkAttachments fills in the state of the attachments.
func (f *FilterState) checkAttachments(o *kernel.Opened) {
	ns, err := findNetns(f.pub)
	switch {
	case errors.Is(err, netns.ErrGone):
		f.gone = true
		f.Problem = "its network namespace is gone, or is not visible to this user: " + netns.RemedyGone
		return
	case err != nil:
		f.Problem = err.Error()
		return
	}
	defer ns.Close()
	attachments, err := f.pub.Attacher.attacher().attachments(&instance{inst: f.inst, pub: f.pub, pins: o, ns: ns})
	switch {
	case permission(err):
		f.Problem = problemUnseen
	case err != nil:
		f.Problem = err.Error()
	default:
		f.Attachments = attachments
	}
}

// outdated reports whether this weir compiles the filter's rules to another program.
func (f FilterState) outdated() bool {
	hash, err := f.pub.hash()
	return err == nil && hash != f.pub.meta.Object
}

// lacking returns the names of missing and outdated attachments.
func (f FilterState) lacking() []string {
	var out []string
	for _, p := range f.Attachments {
		if p.lacks || p.stale {
			out = append(out, p.Name)
		}
	}
	return out
}

// strays returns the names of attachments to interfaces not named by the filter.
func (f FilterState) strays() (out []string) {
	for _, p := range f.Attachments {
		if p.stray {
			out = append(out, p.Name)
		}
	}
	return out
}

// Filter returns the states of the filters with a name, in all namespaces.
func (st State) Filter(name string) []FilterState {
	var out []FilterState
	for _, f := range st.Filters {
		if f.Name == name {
			out = append(out, f)
		}
	}
	return out
}

// PlanUpgrade implements feature.Upgrader. It plans to recompile filters of another compiler
// version.
func (Feature) PlanUpgrade(ctx context.Context, r *kernel.Root) (feature.Plan, error) {
	var plan feature.Plan
	st, err := ReadState(ctx, r)
	plan.Stays(st.Unreadable)
	for _, f := range st.Filters {
		if f.outdated() {
			plan.Add(feature.Step{Verb: "upgrade", Object: "filter " + f.Name, Detail: fmt.Sprintf("compiled by weir %s, in %s", f.pub.meta.Version, f.Netns),
				Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", recompile(l, f.inst) }})
		}
	}
	return plan, err
}

// recompile replaces a filter's program by the output of this weir's compiler.
func recompile(l *kernel.WriteLock, i kernel.Instance) error {
	s, err := openInstance(l, i)
	if err != nil {
		return err
	}
	defer s.Close()
	next := *s.pub
	next.Was, next.Before, next.Lists = nil, nil, map[string]*list{}
	for name, l := range s.pub.Lists {
		same := *l
		next.Lists[name] = &same
	}
	return s.change(&next, false)
}
