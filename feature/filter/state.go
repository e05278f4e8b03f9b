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

// State is what the pins say of filters on this host.
type State struct {
	Filters    []FilterState        `json:"filters"`
	Unreadable instances.Unreadable `json:"unreadable,omitempty"`
}

// Unread implements feature.Unreads.
func (st State) Unread() instances.Unreadable { return st.Unreadable }

// FilterState is one filter.
type FilterState struct {
	Name        string       `json:"name"`
	Netns       string       `json:"netns"`
	Inode       uint64       `json:"netns_inode"`
	Hook        Hook         `json:"hook"`
	Attacher    string       `json:"attacher"` // tcx or clsact, where the hook leaves the choice
	Direction   Direction    `json:"direction,omitempty"`
	Order       Order        `json:"order,omitzero"`
	At          Point        `json:"at,omitempty"`
	Priority    int32        `json:"priority,omitempty"`
	Attachments []Attachment `json:"attachments"`
	Rules       []RuleState  `json:"rules"`
	Default     RuleState    `json:"default"` // packets that no rule decided
	Lists       []ListState  `json:"lists,omitempty"`
	// Unreadable counts packets whose transport header could not be read, whatever became of them.
	Unreadable Counted   `json:"unreadable"`
	Problem    string    `json:"problem,omitempty"`
	Updated    time.Time `json:"updated"`

	inst kernel.Instance
	pub  *published
	gone bool // its namespace
}

// ListState is a list of a filter.
type ListState struct {
	Name     string `json:"name"`
	Prefixes int    `json:"prefixes"`
	MiB      int    `json:"mib,omitempty"` // of its tables; a short list is in the program
	Tables   int    `json:"tables,omitempty"`
}

// Counted is how many packets were counted, and when the last one.
type Counted struct {
	Packets uint64    `json:"packets"`
	Bytes   uint64    `json:"bytes"`
	Last    time.Time `json:"last,omitzero"`
}

// RuleState is one rule and what it has counted, since its name came into the filter.
type RuleState struct {
	Name    string    `json:"name,omitempty"`
	Match   string    `json:"match,omitempty"`
	Action  Action    `json:"action"`
	Packets uint64    `json:"packets"`
	Bytes   uint64    `json:"bytes"`
	Last    time.Time `json:"last,omitzero"` // the last packet
	// Undecided is packets of a capture whose missing bytes decide, see [Trial].
	Undecided uint64 `json:"undecided,omitempty"`
}

// Key is what the rule is known by: its name, or the expression of one without.
func (r RuleState) Key() string { return Rule{Name: r.Name, Match: Expression{Text: r.Match}}.Key() }

// Err is about the filters that cannot be read, nil if all can. Faults tell of damage.
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
	out.checkAttachments(r, o)
	return out, nil
}

// checkAttachments finds out whether the filter is where it should be.
func (f *FilterState) checkAttachments(_ *kernel.Root, o *kernel.Opened) {
	ns, err := findNetns(f.pub)
	switch {
	case errors.Is(err, netns.ErrGone):
		f.gone = true
		f.Problem = "its network namespace is gone, or belongs to nobody that this user can see: " + netns.RemedyGone
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

// outdated says whether this weir would make another program of the filter's rules.
func (f FilterState) outdated() bool {
	hash, err := f.pub.hash()
	return err == nil && hash != f.pub.meta.Object
}

// lacking names the attachments that could be attached now, and are not.
func (f FilterState) lacking() []string {
	var out []string
	for _, p := range f.Attachments {
		if p.lacks || p.stale {
			out = append(out, p.Name)
		}
	}
	return out
}

// Filter returns the state of the filters of a name, in all namespaces.
func (st State) Filter(name string) []FilterState {
	var out []FilterState
	for _, f := range st.Filters {
		if f.Name == name {
			out = append(out, f)
		}
	}
	return out
}

// PlanUpgrade implements feature.Upgrader: filters that another weir compiled.
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

// recompile replaces a filter's program by the one that this weir makes of its rules.
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
