// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/internal/dump"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// A loop without its packet is reseeded by another loop, with its probes sent by the other one meanwhile. User space
// then moves it back to its CPU.
func TestRevived(t *testing.T) {
	need(t)
	if cpus, err := onlineCPUs(); err != nil || len(cpus) < 2 {
		t.Skip("need: two CPUs")
	}
	for which, name := range []string{"the session's first loop", "its second loop"} {
		done := false
		for try := 1; !done && !t.Failed(); try++ { // a stalled host spoils a try, but not five
			t.Run(fmt.Sprintf("%s, try %d", name, try), func(t *testing.T) { done = revived(t, which, try == 5) })
		}
	}
}

// revived reports whether probing continued without a false alarm. Before the reseed nothing detects a stall of the
// loop's CPU, so probes waiting there count as lost. The last try accepts no excuse.
func revived(t *testing.T, which int, last bool) bool {
	p := newPair(t)
	a, b := p.sessions(10 * time.Millisecond)
	p.apply(p.w.NameA, a)
	p.apply(p.w.NameB, b)
	p.within(patience, "up", bothUp)
	loops := func() (out []TimerLoopState) {
		for _, l := range p.state().TimerLoops {
			if l.Netns == p.w.NameA {
				out = append(out, l)
			}
		}
		return out
	}
	// A packet of another generation is dropped.
	lose := func() (ticks uint64) {
		o, err := p.root.OpenMapsForWriting(instance(netnsScope(p.w.A)), pinClockwork)
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		var m bpf.LivenessLivenessTickSource
		if err := o.Maps[pinClockwork].Lookup(uint32(0), &m); err != nil {
			t.Fatal(err)
		}
		m.Generation[which]++
		if err := o.Maps[pinClockwork].Put(uint32(0), m); err != nil {
			t.Fatal(err)
		}
		return loops()[which].Ticks + 1 // one may be in flight
	}
	before := loops()[which].Revivals
	ticks, sent, begin := lose(), p.state().session("to-b").Sent, time.Now()
	nstest.Eventually(t, func() error {
		if l := loops()[which]; l.Revivals > before && l.Silent <= 500*time.Millisecond {
			return nil
		}
		if l := loops()[which]; l.Revivals == before && l.Ticks > ticks {
			ticks, sent, begin = lose(), p.state().session("to-b").Sent, time.Now()
		}
		return fmt.Errorf("not revived: %+v", loops())
	})
	if flaps, longest := p.flaps(loops()[which]); flaps > 0 && longest > 20*time.Millisecond && !last {
		t.Logf("again: a link was found to be down, and this host stood still for %v with one loop fewer", longest)
		return false
	}
	silence := time.Since(begin)
	if n := p.state().session("to-b").Sent - sent; n < uint32(silence/(20*time.Millisecond)) {
		if last {
			t.Errorf("%d probes in %v, of one each 10 ms", n, silence)
		}
		return false
	}
	p.steady("one loop fewer", loops()[which])
	nstest.Eventually(t, func() error {
		if int(loops()[which].On) == loops()[which].CPU {
			return nil
		}
		l := p.lock()
		err := Recover(l)
		l.Unlock()
		if err != nil {
			t.Fatal(err)
		}
		return fmt.Errorf("not put back: %+v", loops())
	})
	return true
}

// Remove leaves nothing behind.
func TestRemove(t *testing.T) {
	p := newPair(t)
	look := func() (out []string) {
		inside(t, p.w.A, func() error {
			ls, err := dump.LinkList()
			for _, l := range ls {
				out = append(out, l.Attrs().Name)
			}
			rs, err2 := dump.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{}, netlink.RT_FILTER_TABLE)
			for _, r := range rs {
				out = append(out, r.String())
			}
			return errors.Join(err, err2)
		})
		return out
	}
	nstest.AwaitAddresses(t, p.w.A)
	before := look()
	a, _ := p.sessions(10 * time.Millisecond)
	if said := p.apply(p.w.NameA, a); len(said) != 1 || !strings.HasPrefix(said[0], "create ") {
		t.Errorf("%q", said)
	}
	if said := p.apply(p.w.NameA, a); len(said) != 0 {
		t.Errorf("the same again: %q", said)
	}
	a.Multiplier = 5
	if said := p.apply(p.w.NameA, a); len(said) != 1 || !strings.Contains(said[0], "session to-b changed") {
		t.Errorf("%q", said)
	}
	if len(look()) == len(before) {
		t.Fatal("nothing was made")
	}
	if said := p.apply(p.w.NameA); len(said) != 1 || !strings.HasPrefix(said[0], "remove ") {
		t.Errorf("%q", said)
	}
	if after := look(); strings.Join(after, "\n") != strings.Join(before, "\n") {
		t.Errorf("%q, was %q", after, before)
	}
	if all, err := p.root.Instances(""); err != nil || len(all) > 0 {
		t.Errorf("pinned: %v, %v", all, err)
	}
}

// Programs of another weir version are replaced during probing, and sessions keep their state.
func TestUpgrade(t *testing.T) {
	p := newPair(t)
	a, b := p.sessions(10 * time.Millisecond)
	p.apply(p.w.NameA, a)
	p.apply(p.w.NameB, b)
	p.within(patience, "up", bothUp)
	ctx := context.Background()
	if plan, err := PlanUpgrade(ctx, p.root); err != nil || len(plan.Steps) != 0 {
		t.Fatalf("%v, %v", plan.Steps, err)
	}
	l := p.lock()
	defer l.Unlock()
	for _, ns := range []*netns.Handle{p.w.A, p.w.B} {
		o, err := l.Open(instance(netnsScope(ns)))
		if err != nil {
			t.Fatal(err)
		}
		meta := o.Meta
		meta.Object[0]++
		names, err := o.Links()
		delete(o.Maps, pinTimers) // absent in earlier versions
		if err == nil {
			err = l.Upgrade(instance(netnsScope(ns)), kernel.Upgrade{Meta: meta, Pins: kernel.Pins{Maps: o.Maps}, Keep: names, Swap: func() error { return nil }})
		}
		o.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
	ids := p.programs()
	plan, err := PlanUpgrade(ctx, p.root)
	if err != nil || len(plan.Steps) != 2 {
		t.Fatalf("%v, %v", plan.Steps, err)
	}
	before := p.state().session("to-b").Answered
	if err := Apply(ctx, l, plan); err != nil {
		t.Fatal(err)
	}
	for i, id := range p.programs() {
		if id == ids[i] {
			t.Errorf("link %d runs the program it ran", i)
		}
	}
	p.within(patience, "answers go on", func(a, b SessionState) bool { return a.Answered > before+20 })
	if o, err := l.Open(instance(netnsScope(p.w.A)), pinTimers); err != nil {
		t.Error(err)
	} else {
		o.Close()
	}
	p.steady("an upgrade")
}

// programs returns the ids of the programs run by a namespace's links.
func (p *pair) programs() (out []uint32) {
	p.t.Helper()
	o, err := p.root.Open(instance(netnsScope(p.w.A)))
	if err != nil {
		p.t.Fatal(err)
	}
	defer o.Close()
	names, err := o.Links()
	if err != nil {
		p.t.Fatal(err)
	}
	for _, n := range names {
		ln, err := o.Link(n)
		if err != nil {
			p.t.Fatal(err)
		}
		id, err := kernel.LinkProgram(ln)
		ln.Close()
		if err != nil {
			p.t.Fatal(err)
		}
		out = append(out, id)
	}
	return out
}

// Liveness uses a map of link states created by another package.
func TestSharedWords(t *testing.T) {
	p := newPair(t)
	words, err := ebpf.NewMap(links.Spec())
	if err != nil {
		t.Fatal(err)
	}
	defer words.Close()
	a, b := p.sessions(10 * time.Millisecond)
	p.apply(p.w.NameB, b)
	l := p.lock()
	other := kernel.Instance{Scope: netnsScope(p.w.A), Feature: Name, Name: "@other"}
	if err := l.Publish(other, kernel.Meta{ABI: 1}, kernel.Pins{Maps: map[string]*ebpf.Map{links.MapName: words}}); err != nil {
		t.Fatal(err)
	}
	plan, err := Plan(context.Background(), p.state(), Config{Netns: p.w.NameA, Sessions: []Session{a}})
	if err == nil {
		err = Apply(context.Background(), l, plan)
	}
	l.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	p.within(patience, "up", bothUp)
	// Another writer's byte stays.
	slot := links.Slot(nstest.Ifindex(t, p.w.A, nstest.WireDevice))
	if err := words.Put(slot, links.State{0, 0, 1}); err != nil {
		t.Fatal(err)
	}
	cut(t, p.w.B, nstest.WireDevice, true)
	p.within(patience, "down", func(a, b SessionState) bool { return a.Phase == Down })
	var w links.State
	// a tick changes the phase before the link state
	nstest.Eventually(t, func() error {
		if err := words.Lookup(slot, &w); err != nil {
			t.Fatal(err)
		} else if w.Reasons() == links.Probe|links.Drain {
			return nil
		}
		return fmt.Errorf("the data path reads %v", w)
	})
	p.apply(p.w.NameA)
	if err := words.Lookup(slot, &w); err != nil || w.Reasons() != links.Drain {
		t.Errorf("after removal %v, %v", w, err)
	}
	l = p.lock()
	defer l.Unlock()
	if err := l.Remove(other); err != nil {
		t.Error(err)
	}
}
