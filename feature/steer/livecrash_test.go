// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/reset"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
	"github.com/weir-project/weir/service"
)

// liveChange performs a live change of service svc by name, with its argument.
func liveChange(ctx context.Context, r *kernel.Root, verb, arg string) error {
	if verb == "reset" {
		rate := fast
		return reset.ResetDue(ctx, r, &rate, nil, func(reset.Reset) {})
	}
	st, err := state.Read(ctx, r)
	if err != nil {
		return err
	}
	s, err := st.Service("svc")
	if err != nil {
		return err
	}
	l, err := r.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	n, _ := strconv.Atoi(arg)
	switch verb {
	case "drain":
		return engine.Drain(l, slots.Slot{Scope: s.Scope(), Service: "svc", Slot: n}, nil)
	case "undrain":
		return engine.Undrain(l, slots.Slot{Scope: s.Scope(), Service: "svc", Slot: n}, nil)
	case "move", "back":
		a := sources(1)[0]
		p, err := s.Where(state.WhatIf{}, a)
		if err != nil {
			return err
		}
		return engine.Move(l, s.Scope(), "svc", record.Moving{Device: a.String(), To: (p[0].Slot + 1) % 3, Back: verb == "back"}, nil)
	case "bucket":
		return engine.Move(l, s.Scope(), "svc", record.Moving{Bucket: n, To: (int(s.Table[n]) + 1) % 3}, nil)
	case "next": // the next generation of slot 0, by its PID
		_, err := engine.AdmitLocked(ctx, l, slots.Slot{Scope: s.Scope(), Service: "svc", Slot: 0}, &service.Member{PID: n}, nil)
		return err
	case "bypass":
		_, err := engine.Bypass(l, s.Scope(), "svc", true)
		return err
	case "off":
		_, err := engine.Bypass(l, s.Scope(), "svc", false)
		return err
	}
	return fmt.Errorf("no change %q", verb)
}

// runLive makes a live change and exits at the given step.
func runLive(args []string) error {
	kerneltest.DieAt(args[1])
	return liveChange(context.Background(), kernel.OpenRoot(args[0]), args[2], args[3])
}

// killedLive makes a live change in a process killed at the given step. It reports whether the process finished first.
func (w *world) killedLive(steps int, verb, arg string) bool {
	w.t.Helper()
	return kerneltest.Killed(w.t, nstest.Child("live", w.root.Path(), steps, verb, arg)) == ""
}

// TestLiveKilledAtEveryStep kills every live change at every step, under traffic. Each packet sees the old or the new
// state, the next command recovers the rest, and misplaced sessions are reset.
func TestLiveKilledAtEveryStep(t *testing.T) { eachEngine(t, testLiveKilled) }

func testLiveKilled(t *testing.T) {
	needDestroy(t)
	for _, c := range []struct{ verb, arg, first string }{
		{"drain", "1", ""}, {"undrain", "1", "drain"}, {"move", "-", ""}, {"back", "-", "move"}, {"move", "-", "move"},
		{"bypass", "-", ""}, {"off", "-", "bypass"},
	} {
		if testing.Short() && (c.verb == "undrain" || c.first == "move" || c.verb == "bypass") {
			continue // too slow on an emulated kernel, with the same steps
		}
		t.Run(c.verb+"-after-"+c.first, func(t *testing.T) {
			w, _ := collectors(t, spec.Options{Slots: 3})
			every := stride()
			if !testing.Short() && (underTest == spec.EngineReuseport || c.verb+c.first != "drain") {
				every = nstest.Stride(5) // the steps are the same
			}
			for step := rand.IntN(every); ; step += every {
				w.apply()
				if c.first != "" {
					if err := liveChange(t.Context(), w.root, c.first, c.arg); err != nil {
						t.Fatal(err)
					}
				}
				finished := w.killUnderTraffic(step, c.verb, c.arg)
				w.remove()
				if finished {
					t.Logf("killed at each of %d steps", step)
					if step < 5 {
						t.Errorf("only %d steps: the change is not what the test means", step)
					}
					return
				}
			}
		})
	}
}

func (w *world) killUnderTraffic(step int, verb, arg string) (finished bool) {
	t := w.t
	routers := connect(t, sources(6))
	any := verb == "bypass" || verb == "off" // the kernel may choose meanwhile
	old := w.expected(12)
	tr := w.startTraffic(12)
	tr.asked(t, 12)
	finished = w.killedLive(step, verb, arg)
	w.locked(engine.Recover)
	now := w.expected(12)
	tr.asked(t, 12)
	for key, answers := range tr.end() {
		for got, n := range answers {
			if got != old[key] && got != now[key] && (!any || got == refused) {
				t.Errorf("step %d: %s answered %d times by %s; old %s, new %s", step, key, n, got, old[key], now[key])
			}
		}
	}
	w.resetDue()
	if !w.state().Bypassed {
		w.expectSettled(step, routers)
	}
	if verb == "off" && !w.state().Bypassed || !any {
		for key, want := range w.expected(12) {
			var a, proto string
			fmt.Sscan(key, &a, &proto)
			if got := ask(t, proto, netip.MustParseAddr(a), loopback4); got != want {
				t.Errorf("step %d: recovered, %s is answered by %s, want %s", step, key, got, want)
			}
		}
	}
	for _, r := range routers {
		r.conn.Close()
	}
	return finished
}

// expectSettled checks that exactly the misplaced sessions are closed.
func (w *world) expectSettled(step int, routers []*router) {
	w.t.Helper()
	for _, r := range routers {
		moved := fmt.Sprint(w.where(r.addr)[0].PID) != r.who
		if up := r.up(w.t, !moved); up == moved {
			w.t.Errorf("step %d: %s moved: %v, session up: %v", step, r.addr, moved, up)
		}
	}
}

// TestServeGoesOnWithResets kills a command during its resets. weir serve performs the rest.
func TestServeGoesOnWithResets(t *testing.T) {
	needDestroy(t)
	quick := spec.Rate(200)
	w, _ := collectors(t, spec.Options{Slots: 2, ResetRate: &quick})
	w.apply()
	routers := connect(t, sources(16))
	seed := uint32(99)
	w.cfg.Services[0].Seed = &seed
	w.apply()
	want, err := w.state().Misplaced(t.Context())
	if err != nil || len(want) < 3 {
		t.Fatalf("%d sessions are misplaced, %v", len(want), err)
	}
	if w.killedLive(2, "reset", "-") {
		t.Fatal("the command was not killed")
	}
	left, err := w.state().Misplaced(t.Context())
	if err != nil || len(left) != len(want)-3 {
		t.Fatalf("killed after three of %d, %d are left, %v", len(want), len(left), err)
	}
	w.serve()
	nstest.Until(w.t, "nothing is due", func() bool { return !w.due() })
	reset := map[netip.Addr]string{}
	for _, s := range want {
		reset[s.Remote.Addr().Unmap()] = ""
	}
	w.settled(routers, reset)
}

// TestServeLeavesResetsToTheLiving: weir serve leaves resets to a running command.
func TestServeLeavesResetsToTheLiving(t *testing.T) {
	needDestroy(t)
	w, _ := collectors(t, spec.Options{Slots: 2})
	w.apply()
	connect(t, sources(8))
	seed := uint32(99)
	w.cfg.Services[0].Seed = &seed
	w.apply()
	want, err := w.state().Misplaced(t.Context())
	if err != nil || len(want) == 0 {
		t.Fatalf("%d sessions are misplaced, %v", len(want), err)
	}
	release, err := reset.ClaimEngine(t.Context(), w.root, w.state().Record.EngineInstance(w.state().PinScope), true)
	if err != nil {
		t.Fatal(err)
	}
	w.serve()
	nstest.Steadily(t, takeOverAfter+2*time.Second, func() error {
		left, err := w.state().Misplaced(t.Context())
		if err == nil && len(left) != len(want) {
			err = fmt.Errorf("%d of %d are left", len(left), len(want))
		}
		return err
	})
	release()
	nstest.Until(w.t, "nothing is due", func() bool { return !w.due() })
}

// TestServeResetsWhatAMemberBrings: weir serve admits a member with sessions and resets the misplaced ones.
func TestServeResetsWhatAMemberBrings(t *testing.T) {
	needDestroy(t)
	w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	r := fast
	w.cfg.Services[0].ResetRate = &r
	var write []func(*sink)
	for slot := range 2 {
		write = append(write, w.byPIDFile(slot))
	}
	w.apply()
	a, b := startSink(t, "tcp4~!=127.0.0.1:7001"), startSink(t, "tcp4~!=127.0.0.1:7002")
	_ = b
	a.kill()
	b.kill()
	// The daemons served before weir's program was attached.
	w.locked(func(l lock) error { _, err := engine.Bypass(l, w.state().Scope(), "svc", true); return err })
	sinks := []*sink{startSink(t, both...), startSink(t, both...)}
	routers := connect(t, sources(16))
	w.locked(func(l lock) error { _, err := engine.Bypass(l, w.state().Scope(), "svc", false); return err })
	w.resetDue() // the slots are empty, so no session is misplaced
	for _, r := range routers {
		if !r.up(t, true) {
			t.Errorf("the session of %s was reset before there was any member", r.addr)
		}
	}
	w.serve()
	for slot, s := range sinks {
		write[slot](s)
	}
	for slot, s := range sinks {
		nstest.Until(w.t, "slot "+strconv.Itoa(slot)+" is admitted", func() bool { return w.state().Slots[slot].PID == s.pid() })
	}
	nstest.Until(w.t, "nothing is due", func() bool { return !w.due() })
	reset := map[netip.Addr]string{}
	for _, r := range routers {
		if fmt.Sprint(w.where(r.addr)[0].PID) != r.who {
			reset[r.addr] = ""
		}
	}
	if len(reset) == 0 {
		t.Error("nobody was misplaced")
	}
	w.settled(routers, reset)
}

// TestDrainAndBack: draining and undraining a slot restores every bucket. A bucket placed by an operator stays over
// changes and returns on request.
func TestDrainAndBack(t *testing.T) {
	p := &record.Service{Service: spec.Service{}}
	p.Service.Slots, p.Service.By, p.Service.Name = 5, spec.BySource, "svc"
	p.Shape(nil)
	before := slices.Clone(p.Table)
	for _, f := range []func() error{
		func() error { return p.Drain(2) }, func() error { return p.Drain(0) },
		func() error { return p.Undrain(2) }, func() error { return p.Undrain(0) },
	} {
		if err := f(); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(p.Table, before) || p.Home != nil {
		t.Errorf("after draining and undraining two slots, the table is another")
	}
	if err := (record.Moving{Bucket: 7, To: 4}).Apply(p); err != nil {
		t.Fatal(err)
	}
	grown := &record.Service{Service: p.Service}
	grown.Service.Slots = 6
	grown.Shape(p)
	if grown.Table[7] != 4 {
		t.Errorf("bucket 7 was put into slot 4 and is in %d", grown.Table[7])
	}
	if err := (record.Moving{Bucket: 7, Back: true}).Apply(grown); err != nil || len(grown.Placed) != 0 {
		t.Errorf("back: %v, %v", err, grown.Placed)
	}
	for slot := range 5 {
		if err := p.Drain(slot); (err == nil) != (slot < 4) {
			t.Errorf("draining slot %d: %v", slot, err)
		}
		if slot == 4 {
			p.Drained = p.Drained[:4]
		}
	}
}
