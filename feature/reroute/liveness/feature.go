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
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

// Needs lists the kernel features used by c.
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

// Plan compares the found and the wanted state of a namespace and returns the steps between them. It changes nothing.
func Plan(_ context.Context, have State, want Config) (plan feature.Plan, err error) {
	if errs := want.Validate(); len(errs) > 0 {
		return plan, errors.Join(errs...)
	}
	ns, err := netns.Open(want.Netns)
	if err != nil {
		return plan, fmt.Errorf("reroute: %w", err)
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
	step := feature.Step{Verb: "create", Object: "liveness of " + ns.String(), Detail: printable.Count(len(want.Sessions), "session"),
		Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", p.apply(l) }}
	if len(want.Sessions) == 0 {
		step.Object, step.Detail = "tick source of "+ns.String(), fmt.Sprintf("ticks every %s, for others", want.Tick)
	}
	if has {
		step.Verb, step.Detail = "change", differences(was.Config, want)
		if again := have.again(was.Netns); step.Detail == "" && len(again) > 0 {
			step.Verb, step.Detail = "attach", strings.Join(again, ", ")
		}
	}
	if !has || step.Detail != "" {
		if err := p.readKeys(); err != nil { // the step would fail too, but a dry run must report it
			return plan, err
		}
		plan.Add(step)
	}
	return plan, nil
}

// again lists the sessions of a network namespace with a recreated or late device.
func (st State) again(ref string) (out []string) {
	for _, s := range st.Sessions {
		if s.again && s.Netns == ref {
			out = append(out, fmt.Sprintf("session %s: %s", s.Name, s.Problem))
		}
	}
	return out
}

// differences describes the changes of the configuration.
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

// Apply executes a plan of this package. Recover finishes an Apply killed at any step.
func Apply(ctx context.Context, l *kernel.WriteLock, p feature.Plan) error {
	for _, s := range p.Steps {
		if _, err := s.Do(ctx, l); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return nil
}

// readKeys returns an error for a session without a readable key.
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
	if err := p.readKeys(); err != nil { // before any change
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

// farewell tells the peers of removed sessions about the end, so their silence is no failure. It takes a few
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
	// The wait is bounded for peers that are gone or probe seldom. It is counted in naps rather than time: a stalled
	// host sends no farewell meanwhile.
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

// Remove removes the liveness of all namespaces.
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

// DropGone removes the liveness of a deleted network namespace, readable or not.
func DropGone(l *kernel.WriteLock, scope string) error { return store.Remove(l, instance(scope)) }

// remove removes a namespace's liveness. It tells the peers, clears the link states, and removes devices, filters and
// routes, then the pins. If it is killed, the configuration is already empty and the next Recover finishes.
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

// clear removes everything in the namespace.
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

// Recover finishes the work of a killed command. It repairs changes on the host: a device that is back, a deleted
// route, a loop without its packet. It removes the instances of deleted namespaces. ReadState reports unreadable
// instances.
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

// PlanUpgrade lists the namespaces with programs of another weir version. It changes nothing.
func PlanUpgrade(_ context.Context, r *kernel.Root) (plan feature.Plan, err error) {
	all, unreadable, err := store.All(r)
	plan.Stays(unreadable)
	for _, rec := range all {
		if store.Outdated(rec) {
			plan.Add(feature.Step{Verb: "upgrade", Object: "liveness of namespace " + rec.Scope, Detail: "programs of another weir version",
				Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", upgrade(l, rec.Scope) }})
		}
	}
	return plan, err
}

// upgrade replaces the programs of another weir version over the same maps. A packet meets one version or the other,
// and sessions keep their state.
func upgrade(l *kernel.WriteLock, scope string) error {
	s, err := openInstance(l, scope)
	if err != nil {
		return err
	}
	defer s.close()
	return store.Upgrade(l, instance(scope), func() error { return s.ns.Do(func() error { return s.reconcile(true) }) }, s.pins.Maps)
}
