// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"context"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/kernel"
)

// Another weir's program is replaced under traffic. The link, the maps, the drain and the counts stay.
func TestUpgrade(t *testing.T) {
	w := newWorld(t)
	w.apply(w.path(around()))
	w.drain(true)
	p := w.pair(true)
	if !p.arrives(100, patience) {
		t.Fatal("nothing arrives")
	}
	ctx := context.Background()
	if plan, err := PlanUpgrade(ctx, w.root); err != nil || len(plan.Steps) != 0 {
		t.Fatalf("a plan to upgrade to itself: %v, %v", plan.Steps, err)
	}
	var all []kernel.Instance
	program := func(l *kernel.WriteLock) (id uint32) {
		o, err := l.Open(all[0])
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		names, err := o.Links()
		if err != nil || len(names) != 1 {
			t.Fatalf("links %v, %v", names, err)
		}
		ln, err := o.Link(names[0])
		if err != nil {
			t.Fatal(err)
		}
		defer ln.Close()
		if id, err = kernel.LinkProgram(ln); err != nil {
			t.Fatal(err)
		}
		return id
	}
	locked(t, w.root, func(l *kernel.WriteLock) (err error) {
		if all, err = allInstances(w.root); err != nil {
			return err
		}
		// The same instance, but with another object's hash.
		o, err := l.Open(all[0])
		if err != nil {
			return err
		}
		defer o.Close()
		meta := o.Meta
		meta.Object[0]++
		names, err := o.Links()
		if err != nil {
			return err
		}
		return l.Upgrade(all[0], kernel.Upgrade{Meta: meta, Pins: kernel.Pins{Maps: o.Maps}, Keep: names, Swap: func() error { return nil }})
	})
	plan, err := PlanUpgrade(ctx, w.root)
	if err != nil || len(plan.Steps) != 1 {
		t.Fatalf("plan %v, %v", plan.Steps, err)
	}
	locked(t, w.root, func(l *kernel.WriteLock) error {
		before := program(l)
		if err := Apply(ctx, l, plan); err != nil {
			return err
		}
		if program(l) == before {
			t.Error("the link runs the same program")
		}
		return nil
	})
	if !p.arrives(100, patience) {
		t.Error("nothing arrives after the upgrade")
	}
	if st := w.state("core"); st.Counts.Packets != 2 || !st.Drain || !st.Attached {
		t.Errorf("%+v", st)
	}
	if plan, err := PlanUpgrade(ctx, w.root); err != nil || len(plan.Steps) != 0 {
		t.Errorf("still to upgrade: %v, %v", plan.Steps, err)
	}
}

// Liveness and protection share the map of link states: protection uses a map pinned by liveness.
func TestSharesLinks(t *testing.T) {
	w := newWorld(t)
	m, err := ebpf.NewMap(links.Spec())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	live := kernel.Instance{Scope: netnsScope(w.r1), Feature: Feature, Name: "@liveness"}
	locked(t, w.root, func(l *kernel.WriteLock) error {
		return l.Publish(live, kernel.Meta{ABI: 1}, kernel.Pins{Maps: map[string]*ebpf.Map{pinLinks: m}})
	})
	w.apply(w.path(around()))
	if err := m.Put(slotOf(t, w.r1, "main"), links.State{1}); err != nil {
		t.Fatal(err)
	}
	if st := w.state("core"); !st.Probe || !st.Down {
		t.Errorf("what liveness says is not heard: %+v", st)
	}
	if !w.pair(true).arrives(10, patience) || w.state("core").Counts.Packets != 1 {
		t.Errorf("not rerouted: %+v", w.state("core"))
	}
	w.apply()
	locked(t, w.root, func(l *kernel.WriteLock) error { return l.Remove(live) })
}
