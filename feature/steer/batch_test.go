// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// standing returns the state to compare after an undone change.
func (w *world) standing() (out []string) {
	w.t.Helper()
	st, err := state.Read(context.Background(), w.root)
	if err != nil {
		w.t.Fatal(err)
	}
	for _, s := range st.Services {
		out = append(out, fmt.Sprint(s.Name, s.Listen, s.Engine, s.Seed, s.OnEmpty, s.Moved, s.Drained, s.Problem))
		for _, slot := range s.Slots {
			out = append(out, fmt.Sprint(" ", slot.Slot, slot.State, slot.PID, slot.Member, slot.Buckets))
		}
	}
	return out
}

// TestApplyTakesItselfBack fails or interrupts a change of several services at any step. Each service keeps its seed,
// its members and the operator overrides.
func TestApplyTakesItselfBack(t *testing.T) { eachEngine(t, testApplyTakesItselfBack) }

func testApplyTakesItselfBack(t *testing.T) {
	injected := errors.New("injected")
	for _, how := range []string{"failed", "interrupted"} {
		t.Run(how, func(t *testing.T) {
			w := newWorld(t, spec.Options{Slots: 2}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
			a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991", "udp4=0.0.0.0:9992")
			b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			w.member(0, a)
			w.member(1, b)
			goes := w.cfg.Services[0]
			goes.Name, goes.Listen = "goes", []service.Listen{mustListen(t, "udp 127.77.0.1:9993")}
			goes.Members = nil
			stands := []spec.Service{w.cfg.Services[0], goes}
			w.cfg.Services = stands
			w.apply()
			w.locked(func(l *kernel.WriteLock) error {
				return engine.Move(l, w.state().Scope(), "svc", record.Moving{Device: "127.0.0.9", To: 1}, nil)
			})
			before := w.standing()
			wanted := stands[0]
			wanted.Slots, wanted.Seed = 3, randomSeed()
			wanted.Members = append(wanted.Members[:1:1], service.Member{Slot: 2, PID: b.pid()})
			comes := goes
			comes.Name, comes.Listen = "comes", []service.Listen{mustListen(t, "udp 0.0.0.0:9992")}
			comes.Members = []service.Member{{Slot: 0, PID: a.pid()}}
			done := 0
			for step := 0; ; step += 1 + done%stride() {
				done++
				err := w.tryUntil([]spec.Service{wanted, comes}, how, step, injected)
				if err == nil {
					if step < 3 {
						t.Errorf("only %d steps", step)
					}
					break
				}
				if !errors.Is(err, injected) && !errors.Is(err, context.Canceled) {
					t.Fatal(err)
				}
				if now := w.standing(); fmt.Sprint(now) != fmt.Sprint(before) {
					t.Fatalf("%s at step %d: %q, want %q", how, step, now, before)
				}
				w.check(sources(8), loopback4, names(a, b))
			}
			if st, err := state.Read(t.Context(), w.root); err != nil || len(st.Services) != 2 || st.Services[0].Name != "comes" {
				t.Errorf("applied: %+v, %v", w.standing(), err)
			}
		})
	}
}

// tryUntil applies services and fails or interrupts the apply at a step.
func (w *world) tryUntil(services []spec.Service, how string, step int, injected error) (err error) {
	w.cfg.Services = services
	if errs := w.cfg.Validate(); len(errs) > 0 {
		w.t.Fatal(errs)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	w.locked(func(l *kernel.WriteLock) error {
		st, serr := state.Read(ctx, w.root)
		p, perr := Feature{}.Plan(ctx, st, w.cfg)
		if err = errors.Join(serr, perr); err != nil {
			return nil
		}
		n := 0
		reached := func() bool { n++; return n == step+1 }
		if how == "failed" {
			kerneltest.OnTry(func(string) error {
				if reached() {
					return injected
				}
				return nil
			})
		} else {
			kerneltest.OnStep(func(string) {
				if reached() {
					cancel()
				}
			})
		}
		defer kerneltest.OnTry(nil)
		defer kerneltest.OnStep(nil)
		err = p.Apply(ctx, l, nil)
		return nil
	})
	return err
}

// TestApplyIsLinear compares the CPU time of applies: 160 services cost less than 11 times as much as 20.
func TestApplyIsLinear(t *testing.T) { eachEngine(t, testApplyIsLinear) }

func testApplyIsLinear(t *testing.T) {
	address := func(i int) string { return fmt.Sprintf("127.1.%d.%d", i/250, i%250+1) }
	cost := func(n int) (create, change time.Duration) {
		w := newWorld(t, spec.Options{Slots: 1}, "udp 127.0.0.1:5000")
		one := w.cfg.Services[0]
		w.cfg.Services = nil
		for i := range n {
			s := one
			s.Name, s.Listen = fmt.Sprint("s", i), []service.Listen{mustListen(t, "udp4 "+address(i)+":5000")}
			if i%20 == 0 { // few sockets each: every slot reads all sockets of its process
				member := startSink(t, "udp4="+address(i)+":5000", "udp4="+address(i)+":5001")
				defer member.End()
				s.Members = []service.Member{{Slot: 0, PID: member.pid()}}
			}
			w.cfg.Services = append(w.cfg.Services, s)
		}
		before := cpuTime(t)
		w.apply()
		create = cpuTime(t) - before
		for i := range w.cfg.Services {
			s := &w.cfg.Services[i]
			s.Listen = append(s.Listen, mustListen(t, "udp4 "+address(i)+":5001"))
		}
		before = cpuTime(t)
		w.apply()
		change = cpuTime(t) - before
		w.remove()
		return create, change
	}
	cost(1) // parses the object
	few, fewChanged := cost(20)
	many, manyChanged := cost(160)
	t.Logf("20 services: %s, 160: %s; listens changed: %s, %s", few, many, fewChanged, manyChanged)
	if many > 11*few {
		t.Errorf("160 services cost %s of CPU time, 20 cost %s", many, few)
	}
	if manyChanged > 11*fewChanged {
		t.Errorf("160 services with other listens cost %s of CPU time, 20 cost %s", manyChanged, fewChanged)
	}
}

func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestResetsAreLinear checks the same for the search for sessions, after a change that moves devices in many services.
func TestResetsAreLinear(t *testing.T) {
	cost := func(n int) time.Duration {
		w := newWorld(t, spec.Options{Slots: 2, Engine: spec.EngineSkLookup, ResetRate: new(spec.Rate(100))}, "tcp 127.0.0.1:5000")
		one := w.cfg.Services[0]
		w.cfg.Services = nil
		for i := range n {
			s := one
			s.Name, s.Listen = fmt.Sprint("s", i), []service.Listen{mustListen(t, fmt.Sprintf("tcp4 127.1.0.%d:5000", i+1))}
			w.cfg.Services = append(w.cfg.Services, s)
		}
		w.apply()
		for i := range w.cfg.Services {
			w.cfg.Services[i].Slots = 3
		}
		w.apply()
		before := cpuTime(t)
		w.resetDue()
		spent := cpuTime(t) - before
		w.remove()
		return spent
	}
	cost(1)
	few, many := cost(20), cost(160)
	t.Logf("20 services: %s, 160: %s", few, many)
	if many > 16*few {
		t.Errorf("looking for sessions to reset in 160 services cost %s of CPU time, in 20 %s", many, few)
	}
}

// TestServicesShareWaits: services added or removed together share the grace periods of changes of maps of maps.
func TestServicesShareWaits(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1, Engine: spec.EngineSkLookup}, "udp 127.0.0.1:5000")
	one := w.cfg.Services[0]
	w.cfg.Services = nil
	const n = 100
	for i := range n {
		s := one
		s.Name, s.Listen = fmt.Sprint("s", i), []service.Listen{mustListen(t, fmt.Sprintf("udp4 127.1.0.%d:5000", i+1))}
		w.cfg.Services = append(w.cfg.Services, s)
	}
	w.apply()
	st, err := state.Read(t.Context(), w.root)
	if err != nil {
		t.Fatal(err)
	}
	w.locked(func(l *kernel.WriteLock) error {
		e, err := engine.OpenEngine(l, st.Services[0].PinScope, spec.EngineSkLookup)
		if err != nil {
			return err
		}
		defer e.Close()
		services := e.Pins.Maps["services"]
		ids := map[uint32]bool{}
		start := time.Now()
		for _, p := range e.Services {
			ids[p.ID] = true
			if err := services.Delete(p.ID); err != nil {
				return err
			}
		}
		one := time.Since(start)
		start = time.Now()
		if err := e.ReconcileServices(); err != nil {
			return err
		}
		put := time.Since(start)
		was := e.Services
		e.Services = nil
		start = time.Now()
		if err := e.ClearIDs(ids); err != nil {
			return err
		}
		gone := time.Since(start)
		e.Services = was
		t.Logf("%d services: %s deleted one by one; put together in %s, deleted together in %s", n, one, put, gone)
		const work = 2 * time.Millisecond * n // without waits
		if put > one/3+work || gone > one/3+work {
			t.Errorf("%d services were put in %s and deleted in %s; one after the other the latter takes %s", n, put, gone, one)
		}
		return e.Reconcile()
	})
}
