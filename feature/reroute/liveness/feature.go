// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

// Needs lists the facilities of the kernel that c uses.
func Needs(c Config) []kernel.Need {
	needs := []kernel.Need{probe.TCRedirect, probe.LoopHelper, probe.TokenBucket, probe.RingBuffer, probe.CompareAndSwap, probe.SegmentFunction,
		kernel.TCXLink, kernel.ClsactFilter}
	judges := slices.ContainsFunc(c.Sessions, func(s Session) bool { return s.filled().judges() })
	for i := range needs {
		switch needs[i].Name {
		case probe.SegmentFunction.Name:
			needs[i].Optional = !judges
		case kernel.TCXLink.Name, kernel.ClsactFilter.Name:
		default:
			needs[i].Optional = !c.wanted()
		}
	}
	return needs
}

// Plan says what would change in the namespace of want, in words and steps, given what there is. It changes
// nothing.
func Plan(_ context.Context, have State, want Config) (plan feature.Plan, err error) {
	if errs := want.Validate(); len(errs) > 0 {
		return plan, errors.Join(errs...)
	}
	ns, err := netns.Open(want.Netns)
	if err != nil {
		return plan, fmt.Errorf("network namespace: %w", err)
	}
	defer ns.Close()
	for i := range want.Sessions {
		want.Sessions[i] = want.Sessions[i].filled()
	}
	scope := netnsScope(ns)
	was, has := have.published[scope]
	if have.Unreadable.Has(instance(scope)) {
		return plan, nil
	}
	if !want.wanted() {
		if has {
			plan.Add(removeStep(scope))
		}
		return plan, nil
	}
	if err := ns.Do(func() error { return examine(&plan, want) }); err != nil {
		return plan, err
	}
	p := published{Config: want, Netns: ns.String(), ID: ns.ID()}
	if want.Netns != "" {
		p.Netns = want.Netns
	}
	if err := p.assignIndexes(was.Indexes); err != nil {
		return plan, err
	}
	step := feature.Step{Verb: "create", Object: "liveness of " + ns.String(), Detail: fmt.Sprintf("%d sessions", len(want.Sessions)),
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", p.apply(l) }}
	if len(want.Sessions) == 0 {
		step.Object, step.Detail = "tick source of "+ns.String(), fmt.Sprintf("it beats each %s, for others", want.Tick)
	}
	if has {
		step.Verb, step.Detail = "change", differences(was.Config, want)
		if again := have.again(was.Netns); step.Detail == "" && len(again) > 0 {
			step.Verb, step.Detail = "attach", strings.Join(again, ", ")
		}
	}
	if !has || step.Detail != "" {
		if err := p.readKeys(); err != nil { // the step would find it out, and a dry run would not
			return plan, err
		}
		plan.Add(step)
	}
	return plan, nil
}

// again lists the sessions of a network namespace whose devices were made again, or came later.
func (st State) again(ref string) (out []string) {
	for _, s := range st.Sessions {
		if s.again && s.Netns == ref {
			out = append(out, fmt.Sprintf("session %s: %s", s.Name, s.Problem))
		}
	}
	return out
}

// differences says what of the configuration changes.
func differences(was, want Config) string {
	out := feature.Differences("session", was.Sessions, want.Sessions, func(s Session) string { return s.Name })
	if was.Tick != want.Tick {
		out = append(out, fmt.Sprintf("tick %s → %s", was.Tick, want.Tick))
	}
	if !slices.Equal(was.CPUs, want.CPUs) {
		out = append(out, fmt.Sprintf("cpus %v → %v", was.CPUs, want.CPUs))
	}
	return strings.Join(out, ", ")
}

// Apply carries a plan of this package out. Killed at any step, it leaves what the next Recover finishes.
func Apply(ctx context.Context, l *kernel.WriteLock, p feature.Plan) error {
	for _, s := range p.Steps {
		if _, err := s.Do(ctx, l); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return nil
}

// readKeys says which session's key cannot be read.
func (p *published) readKeys() error {
	for _, s := range p.Config.Sessions {
		if _, err := readKey(s.KeyFile); err != nil {
			return fmt.Errorf("session %q: %w", s.Name, err)
		}
	}
	return nil
}

func (p *published) apply(l *kernel.WriteLock) error {
	if err := kernel.Require(Needs(p.Config)); err != nil {
		return err
	}
	if err := p.readKeys(); err != nil { // before anything changes
		return err
	}
	ns, err := netns.Find(p.Netns, p.ID)
	if err != nil {
		return err
	}
	defer ns.Close()
	if err := p.farewell(l, netnsScope(ns)); err != nil {
		return err
	}
	if err := p.publish(l, ns); err != nil {
		return err
	}
	kernel.Step("liveness:published")
	return reconcileScope(l, netnsScope(ns))
}

// farewell has sessions that are there, and not in p, tell their peers that they end: silence is no failure then. It takes a few
// intervals.
func (p *published) farewell(l *kernel.WriteLock, scope string) error {
	was, err := readPublished(l.Root, scope)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	o, err := l.Open(instance(scope))
	if err != nil {
		return err
	}
	defer o.Close()
	longest := time.Duration(0)
	var waits []func() bool
	for name, i := range was.Indexes {
		if _, stays := p.Indexes[name]; stays {
			continue
		}
		interval, said, err := closing(o.Maps, i)
		if err != nil {
			return err
		}
		longest = max(longest, interval)
		waits = append(waits, said)
	}
	// A peer that is gone hears nothing, and who probes seldom does not keep the command for long. What counts is not the time: a
	// host that stands still says nothing meanwhile.
	const nap = time.Millisecond
	for left := min(max(20*longest, 200*time.Millisecond), 2*time.Second); len(waits) > 0 && left > 0; left -= nap {
		time.Sleep(nap)
		waits = slices.DeleteFunc(waits, func(said func() bool) bool { return said() })
	}
	return nil
}

func removeStep(scope string) feature.Step {
	return feature.Step{Verb: "remove", Object: "liveness of namespace " + scope,
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", remove(l, scope) }}
}

// Remove takes liveness of all namespaces away.
func Remove(_ context.Context, l *kernel.WriteLock) error {
	all, err := scopes(l.Root)
	if err != nil {
		return err
	}
	for _, scope := range all {
		err = errors.Join(err, remove(l, scope))
	}
	return err
}

// DropGone removes the liveness of a network namespace that is gone, readable or not.
func DropGone(l *kernel.WriteLock, scope string) error { return store.Remove(l, instance(scope)) }

// remove takes a namespace's liveness away: the peers are told, the words of links are cleared, and devices, filters and routes
// go; then the pins. Killed on the way, the next Recover finds nothing wanted any more and does the rest.
func remove(l *kernel.WriteLock, scope string) error {
	p, err := readPublished(l.Root, scope)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	ns, err := netns.Find(p.Netns, p.ID)
	if errors.Is(err, netns.ErrGone) {
		return store.Remove(l, instance(scope))
	} else if err != nil {
		return err
	}
	defer ns.Close()
	none := published{Netns: p.Netns, ID: p.ID, Indexes: map[string]uint32{}}
	if p.Config.wanted() {
		if err := none.farewell(l, scope); err != nil {
			return err
		}
		if err := none.publish(l, ns); err != nil {
			return err
		}
		kernel.Step("liveness:emptied")
	}
	s, err := openInstance(l, scope)
	if err != nil {
		return err
	}
	defer s.close()
	if err := s.ns.Do(s.clear); err != nil {
		return err
	}
	return store.Remove(l, instance(scope))
}

// clear takes away all that is in the namespace.
func (s *scopeInstance) clear() error {
	if err := s.followMoves(); err != nil {
		return err
	}
	if err := s.putSessions(nil); err != nil {
		return err
	}
	if err := s.dropSegments(nil); err != nil {
		return err
	}
	kernel.Step("liveness:no segments")
	if err := removeLoops(0); err != nil {
		return err
	}
	kernel.Step("liveness:no loops")
	if err := s.attach(nil, false); err != nil {
		return err
	}
	kernel.Step("liveness:detached")
	return nil
}

// Recover finishes what a killed command left half done, sets right what has changed on the host since (a device that came back, a
// route that somebody removed, a loop that lost its packet), and removes what was for namespaces that are gone. The state tells of
// what cannot be read.
func Recover(l *kernel.WriteLock) error {
	all, _, err := store.All(l.Root)
	errs := []error{err}
	for _, rec := range all {
		if !rec.Spec.Config.wanted() {
			err = remove(l, rec.Scope)
		} else if err = reconcileScope(l, rec.Scope); errors.Is(err, netns.ErrGone) {
			err = store.Remove(l, rec.Instance)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// PlanUpgrade says whose programs are another weir's and what would change. It changes nothing.
func PlanUpgrade(_ context.Context, r *kernel.Root) (plan feature.Plan, err error) {
	all, unreadable, err := store.All(r)
	plan.Stays(unreadable)
	for _, rec := range all {
		if store.Outdated(rec) {
			plan.Add(feature.Step{Verb: "upgrade", Object: "liveness of namespace " + rec.Scope, Detail: "programs of another weir",
				Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", upgrade(l, rec.Scope) }})
		}
	}
	return plan, err
}

// upgrade puts this weir's programs in place of another's, over the same maps: a packet meets one or the other, and no session
// loses what is known of it.
func upgrade(l *kernel.WriteLock, scope string) error {
	s, err := openInstance(l, scope)
	if err != nil {
		return err
	}
	defer s.close()
	return store.Upgrade(l, instance(scope), func() error { return s.ns.Do(func() error { return s.reconcile(true) }) }, s.pins.Maps)
}
