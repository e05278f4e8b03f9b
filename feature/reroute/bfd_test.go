// SPDX-License-Identifier: Apache-2.0

package reroute

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/bfd/peers"
	"github.com/weir-project/weir/feature/reroute/protect"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// A configuration without a namespace keeps the loops used by BFD. Remove removes BFD too.
func TestBFDStaysUntilRemove(t *testing.T) {
	w := newWorld(t)
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	e, err := engine.Open(t.Context(), w.root, w.r1, 5*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	loops := func() (there bool) {
		w.in(w.r1, func() error {
			_, err := net.InterfaceByName("weir-tick0")
			there = err == nil
			return nil
		})
		return there
	}
	if steps := w.apply("reroute: []"); len(steps) != 0 || !loops() {
		t.Errorf("plan %q; loops: %t", steps, loops())
	}
	w.locked(func(l *kernel.WriteLock) error { return Feature{}.Remove(context.Background(), l) })
	left, err := w.root.Instances(Name)
	if err != nil || len(left) != 0 || loops() {
		t.Errorf("left %v, %v; loops: %t", left, err, loops())
	}
}

// Both ends judge the links by BFD: a cut link is rerouted and used again, without a process.
func TestBFDReroutes(t *testing.T) {
	w := newWorld(t)
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	text := w.bothByBFD()
	w.apply(text)
	if again := w.apply(text); len(again) != 0 {
		t.Errorf("applied again: %q", again)
	}
	w.bothUp()
	s := w.stream()
	w.flows(s)
	a, b := w.cut(w.r1, "r12"), w.cut(w.r2, "r21")
	w.links("both ends reroute", func(p protect.PathState) bool { return p.Down && p.Probe })
	w.flows(s)
	a.Close()
	b.Close()
	w.links("the link is used again", func(p protect.PathState) bool { return p.Attached && !p.Down })
	w.flows(s)
	w.upgradeBFD()
	w.flows(s)
	// Sessions removed from the configuration end on purpose: neither end takes the link for dead.
	began := w.state().Paths[0].Counts.Packets
	w.apply(strings.ReplaceAll(text, "    bfd:", "    # bfd:"))
	if st := w.state(); len(st.BFD) != 0 || st.Paths[0].Down || st.Paths[1].Down || st.Paths[0].Counts.Packets != began {
		t.Errorf("after the sessions' end: %+v", st)
	}
	w.flows(s)
}

// Echo detects a cut long before control packets do.
func TestEchoReroutes(t *testing.T) {
	w := newWorld(t)
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	w.apply(w.bothEnds("bfd: {peer: fd00:12::2, interval: 2s, echo: 10ms}", "bfd: {peer: fd00:12::1, interval: 2s, echo: 10ms}"))
	w.bothUp()
	echoes := func() bool {
		return !slices.ContainsFunc(w.state().BFD, func(s peers.SessionState) bool {
			return s.Echo == nil || s.Echo.Returned == 0 || s.Echo.Interval != 10*time.Millisecond || s.Echo.Failed
		})
	}
	w.eventually("echo comes back to both", echoes)
	a, b := w.cut(w.r1, "r12"), w.cut(w.r2, "r21")
	w.links("both ends reroute", func(p protect.PathState) bool { return p.Down && p.Probe })
	if !slices.ContainsFunc(w.state().BFD, func(s peers.SessionState) bool { return s.Diag == bfd.EchoFailed }) {
		t.Errorf("%+v", w.state().BFD)
	}
	a.Close()
	b.Close()
	w.links("the link is used again", func(p protect.PathState) bool { return p.Attached && !p.Down })
	w.eventually("echo comes back again", echoes)
}

// bothByBFD returns a configuration with BFD at both ends of the link.
func (w *world) bothByBFD() string {
	w.Helper()
	key := w.key("a secret\n")
	return w.bothEnds("bfd: {peer: fd00:12::2, interval: 10ms, key_file: "+key+", key_id: 3}", "bfd: {peer: fd00:12::1, interval: 10ms, key_file: "+key+", key_id: 3}")
}

func (w *world) bothUp() {
	w.Helper()
	w.eventually("both sessions are up", func() bool {
		st := w.state()
		return len(st.BFD) == 2 && st.BFD[0].State == bfd.Up && st.BFD[1].State == bfd.Up
	})
}

// upgradeBFD marks BFD's programs as another weir version's and upgrades them. No session notices.
func (w *world) upgradeBFD() {
	w.Helper()
	ctx := context.Background()
	var instances []kernel.Instance
	for _, ns := range []*netns.Handle{w.r1, w.r2} {
		instances = append(instances, kernel.Instance{Scope: fmt.Sprint(ns.Inode()), Feature: Name, Name: "@bfd"})
	}
	programs := func() (out []uint32) {
		for _, i := range instances {
			o, err := w.root.Open(i, "clock")
			if err != nil {
				w.Fatal(err)
			}
			defer o.Close()
			names, err := o.Links()
			if err != nil {
				w.Fatal(err)
			}
			for _, name := range names {
				ln, err := o.Link(name)
				if err != nil {
					w.Fatal(err)
				}
				id, err := kernel.LinkProgram(ln)
				ln.Close()
				if err != nil {
					w.Fatal(err)
				}
				out = append(out, uint32(id))
			}
		}
		return out
	}
	w.locked(func(l *kernel.WriteLock) error {
		if plan, err := (Feature{}).PlanUpgrade(ctx, w.root); err != nil || len(plan.Steps) != 0 {
			w.Errorf("programs of this weir are to be upgraded: %v, %v", plan.Steps, err)
		}
		for _, i := range instances {
			o, err := l.Open(i)
			if err != nil {
				return err
			}
			meta := o.Meta
			meta.Object[0]++
			names, err := o.Links()
			if err == nil {
				err = l.Upgrade(i, kernel.Upgrade{Meta: meta, Pins: kernel.Pins{Maps: o.Maps}, Keep: names, Swap: func() error { return nil }})
			}
			o.Close()
			if err != nil {
				return err
			}
		}
		were, before := programs(), w.state().BFD
		plan, err := Feature{}.PlanUpgrade(ctx, w.root)
		if err != nil || len(plan.Steps) != len(instances) {
			return fmt.Errorf("%v, %w", plan.Steps, err)
		}
		if err := plan.Apply(ctx, l, nil); err != nil {
			return err
		}
		are := programs()
		if len(are) != len(were) || len(are) == 0 {
			w.Errorf("links run the programs %v, they ran %v", are, were)
		}
		for _, id := range are {
			if slices.Contains(were, id) {
				w.Errorf("program %d still runs", id)
			}
		}
		for i := range before {
			w.eventually("packets are heard", func() bool { return w.state().BFD[i].In > before[i].In+10 })
			if s := w.state().BFD[i]; s.State != bfd.Up || s.Downs != before[i].Downs || s.Ups != before[i].Ups {
				w.Errorf("after the upgrade %+v, before %+v", s, before[i])
			}
		}
		if plan, err := (Feature{}).PlanUpgrade(ctx, w.root); err != nil || len(plan.Steps) != 0 {
			w.Errorf("again: %v, %v", plan.Steps, err)
		}
		return nil
	})
}
