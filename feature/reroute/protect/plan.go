// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/protect/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

// Needs lists the kernel features for protection. Without tcx the program is a filter of the device's clsact qdisc.
func Needs(c Config) []kernel.Need {
	send := probe.RedirectNeigh
	send.Optional = len(c.Paths) == 0
	return []kernel.Need{send, kernel.TCXLink, kernel.ClsactFilter}
}

// Plan compares the found and the wanted state and lists the steps between them. It also warns of paths that cannot
// take effect yet. It changes nothing.
func Plan(ctx context.Context, have State, want Config) (plan feature.Plan, err error) {
	plan.Stays(have.Unreadable)
	wanted := map[uint64]bool{}
	for _, ref := range namespaces(want) {
		ns, err := open(ref)
		if err != nil {
			return plan, fmt.Errorf("reroute: %w", err)
		}
		w := scopeSpec{Netns: ref, ID: ns.ID()}
		if ref == "" {
			w.Netns = ns.String()
		}
		for _, p := range want.Paths {
			if p.Netns == ref {
				w.Paths = append(w.Paths, published{Path: p})
			}
		}
		wanted[w.Inode] = true
		if !have.Unreadable.Has(instanceKey(netnsScope(ns))) {
			err = w.plan(&plan, have, ns)
		}
		ns.Close()
		if err != nil {
			return plan, err
		}
	}
	for _, h := range have.wholes {
		if !wanted[h.Inode] {
			h.planRemove(&plan)
		}
	}
	return plan, nil
}

func namespaces(c Config) (out []string) {
	for _, p := range c.Paths {
		if !slices.Contains(out, p.Netns) {
			out = append(out, p.Netns)
		}
	}
	return out
}

func open(ref string) (*netns.Handle, error) {
	if ref == "" {
		return netns.Current()
	}
	return netns.Open(ref)
}

// plan adds the steps of one namespace. One publication changes all of its paths, so only the first step has an
// action.
func (w scopeSpec) plan(plan *feature.Plan, have State, ns *netns.Handle) error {
	i := slices.IndexFunc(have.wholes, func(h scopeSpec) bool { return h.Inode == w.Inode })
	w.followed = i >= 0 && have.wholes[i].followed
	var routes []route
	err := ns.Do(func() error {
		r, err := newResolver()
		if err == nil {
			routes = r.all(w.Paths)
			for _, p := range r.problem {
				plan.Warn("reroute of path %s: %s", p.Path, p.Text)
			}
			for _, v := range w.withCarrier(routes) {
				plan.Warn("reroute of path %s: %s; %s", v.Path, v.Text, v.Remedy)
			}
			for _, p := range w.Paths {
				if r.stranded4(p.Path) {
					plan.Warn("reroute of path %s: IPv4 packets have no way around interface %s and stay on it: give a repair segments4 ending with an End.DT4, End.DX4 or End.DT46 segment", p.Name, p.Device)
				}
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	var before []published
	if i >= 0 {
		before = have.wholes[i].Paths
	}
	do := w.apply
	add := func(verb string, p Path, detail string) {
		plan.Add(feature.Step{Verb: verb, Object: "reroute of path " + p.Name, Detail: detail, Do: do})
		do = done
	}
	for _, p := range w.Paths {
		switch n := slices.IndexFunc(before, func(b published) bool { return b.Name == p.Name }); {
		case n < 0:
			add("create", p.Path, p.String())
		case !before[n].equal(p.Path):
			add("change", p.Path, before[n].String()+" → "+p.String())
		case have.detached(have.wholes[i].Netns, p.Name) && slices.ContainsFunc(routes, func(t route) bool { return t.path.Name == p.Name }):
			add("attach", p.Path, "nothing is attached to "+p.Device)
		}
	}
	for _, b := range before {
		if !slices.ContainsFunc(w.Paths, func(p published) bool { return p.Name == b.Name }) {
			add("remove", b.Path, "")
		}
	}
	return nil
}

// detached reports whether nothing is attached to the interface of a path.
func (st State) detached(ref, path string) bool {
	return slices.ContainsFunc(st.Paths, func(p PathState) bool { return p.Netns == ref && p.Name == path && !p.Attached })
}

func (w scopeSpec) planRemove(plan *feature.Plan) {
	do := func(_ context.Context, l *kernel.WriteLock) (string, error) {
		return "", removeScope(l, fmt.Sprint(w.Inode))
	}
	for _, p := range w.Paths {
		plan.Add(feature.Step{Verb: "remove", Object: "reroute of path " + p.Name, Do: do})
		do = done
	}
}

func done(context.Context, *kernel.WriteLock) (string, error) { return "", nil }

func (w scopeSpec) apply(_ context.Context, l *kernel.WriteLock) (string, error) {
	ns, err := netns.Find(w.Netns, w.ID)
	if err != nil {
		return "", err
	}
	defer ns.Close()
	return "", publish(l, ns, w)
}

// Apply executes a plan. [Recover] finishes an Apply killed at any step.
func Apply(ctx context.Context, l *kernel.WriteLock, p feature.Plan) error {
	for _, s := range p.Steps {
		if _, err := s.Do(ctx, l); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return nil
}

// Remove removes protection from every namespace: first the programs, then the kept neighbours and the helper
// namespaces. Routes were never changed.
func Remove(_ context.Context, l *kernel.WriteLock) error {
	all, err := allInstances(l.Root)
	for _, i := range all {
		err = errors.Join(err, removeScope(l, i.Scope))
	}
	return errors.Join(err, dropOrphans())
}

// DropGone removes the protection of a deleted network namespace, readable or not.
func DropGone(l *kernel.WriteLock, scope string) error {
	dropHelper(scope)
	return store.Remove(l, instanceKey(scope))
}

// removeScope publishes an empty configuration and reconciles. If it is killed in between, the next command finds the
// empty configuration and finishes.
func removeScope(l *kernel.WriteLock, scope string) error {
	inst := instanceKey(scope)
	w, err := readSpec(l.Root, inst)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	ns, err := netns.Find(w.Netns, w.ID)
	if errors.Is(err, netns.ErrGone) {
		return reconcile(l, inst)
	} else if err != nil {
		return err
	}
	defer ns.Close()
	w.Paths = nil
	return publish(l, ns, w)
}

// Recover finishes the work of a killed command.
func Recover(l *kernel.WriteLock) error {
	all, _, err := store.All(l.Root) // ReadState reports unreadable instances
	for _, rec := range all {
		err = errors.Join(err, reconcile(l, rec.Instance))
	}
	return errors.Join(err, dropOrphans())
}

// PlanUpgrade lists the namespaces with programs of another weir version. Its steps replace the programs link by
// link, under traffic.
func PlanUpgrade(_ context.Context, r *kernel.Root) (plan feature.Plan, err error) {
	all, unreadable, err := store.All(r)
	plan.Stays(unreadable)
	for _, rec := range all {
		if store.Outdated(rec) {
			plan.Add(feature.Step{Verb: "upgrade", Object: "reroute in namespace " + rec.Scope, Detail: "programs of another weir version",
				Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return "", upgrade(l, rec.Instance) }})
		}
	}
	return plan, err
}

// upgrade replaces the programs of a namespace.
func upgrade(l *kernel.WriteLock, inst kernel.Instance) error {
	s, err := openInstance(l, inst)
	if err != nil {
		return err
	}
	defer s.close()
	names, err := s.pins.Links()
	if err != nil {
		return err
	}
	c, err := s.load(bpf.ProtectProgRerouteEgress)
	if err != nil {
		return err
	}
	defer c.Close()
	p := c.Programs[bpf.ProtectProgRerouteEgress]
	return store.Upgrade(l, inst, func() error { return s.move(names, p) }, nil)
}

// move replaces the program of every attachment.
func (s *instance) move(pins []string, p *ebpf.Program) error {
	for _, pin := range pins {
		ln, err := s.pins.Link(pin)
		if err != nil {
			return err
		}
		err = kernel.MoveLink(ln, p)
		ln.Close()
		if err != nil {
			return fmt.Errorf("moving %s to the new program: %w", pin, err)
		}
		kernel.Step("protect:moved")
	}
	var index, ours uint32
	it := s.pins.Maps[pinDevices].Iterate()
	for it.Next(&index, &ours) {
		f := kernel.Clsact{Ifindex: int(index), Name: filterName, Egress: true}
		if err := s.ns.Do(func() error { return f.Attach(p) }); err != nil {
			return err
		}
	}
	return it.Err()
}
