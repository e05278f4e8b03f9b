// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"testing"

	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// runReader answers datagrams to an address from a thread blocked in recvfrom, like collectors in C.
func runReader(f []string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	at := netip.MustParseAddrPort(f[0])
	if err := errors.Join(unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1),
		unix.Bind(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()})); err != nil {
		return err
	}
	fmt.Println("ready")
	b := make([]byte, 64)
	for {
		_, from, err := unix.Recvfrom(fd, b, 0)
		if err != nil {
			return err
		}
		if err := unix.Sendto(fd, fmt.Append(nil, os.Getpid()), 0, from); err != nil {
			return err
		}
	}
}

func startReader(t *testing.T, at string) *sink {
	return &sink{Process: nstest.StartReady(t, nstest.Child("reader", at))}
}

// tryApply is apply, but returns the error.
func (w *world) tryApply() error {
	_, err := featuretest.Apply(context.Background(), w.root, Feature{}, w.cfg)
	return err
}

// readers returns a service of engine sk_lookup with two blocked readers.
func readers(t *testing.T) (w *world, check func(engine spec.Engine, seed uint32)) {
	w = newWorld(t, spec.Options{Slots: 2, Engine: spec.EngineSkLookup}, "udp 0.0.0.0:9991")
	a, b := startReader(t, "0.0.0.0:9991"), startReader(t, "0.0.0.0:9991")
	w.member(0, a)
	w.member(1, b)
	w.apply()
	return w, func(engine spec.Engine, seed uint32) {
		t.Helper()
		s := w.state()
		if s.Engine != engine || s.Seed != seed {
			t.Errorf("engine %s, seed %d; want %s, %d", s.Engine, s.Seed, engine, seed)
		}
		for _, p := range w.where(sources(16)...) {
			if got, want := ask(t, "udp", p.Address, loopback4), names(a, b)(p); got != want {
				t.Errorf("%s is answered by %s, want %s", p.Address, got, want)
			}
		}
	}
}

// TestEngineChangeWithBlockedReaders: blocked readers prevent a change of engine and the service stays unchanged. The
// change succeeds when datagrams arrive.
func TestEngineChangeWithBlockedReaders(t *testing.T) {
	w, check := readers(t)
	seed := w.state().Seed
	check(spec.EngineSkLookup, seed) // makes the readers wait in the map's receive function
	w.cfg.Services[0].Engine = spec.EngineReuseport
	if err := w.tryApply(); !errors.Is(err, errReader) {
		t.Fatalf("applied, and the error is %v", err)
	}
	check(spec.EngineSkLookup, seed)
	if st, err := state.Read(t.Context(), w.root); err != nil || len(st.Outdated) != 0 {
		t.Errorf("state %+v, %v", st, err)
	}
	stop := make(chan struct{})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
				ask(t, "udp", sources(64)[n%64], loopback4)
			}
		}
	}()
	err := w.tryApply()
	close(stop)
	<-done
	if err != nil {
		t.Fatal(err)
	}
	check(spec.EngineReuseport, seed)
	w.cfg.Services[0].Engine = spec.EngineSkLookup
	w.apply()
	check(spec.EngineSkLookup, seed)
	if again := w.apply(); len(again) != 0 {
		t.Errorf("applied again, it would %v", again)
	}
}

// TestEngineChangeFailsAtEveryStep fails a change of engine at any step. The service stays in the previous engine, with
// members and seed.
func TestEngineChangeFailsAtEveryStep(t *testing.T) {
	for _, to := range record.Engines {
		t.Run("to "+string(to), func(t *testing.T) {
			from := record.Engines[0]
			if from == to {
				from = record.Engines[1]
			}
			w := newWorld(t, spec.Options{Slots: 2, Engine: from}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
			a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			w.member(0, a)
			w.member(1, b)
			w.apply()
			seed := w.state().Seed
			injected := errors.New("injected")
			defer kerneltest.OnTry(nil)
			for fail := 0; ; fail++ {
				n := 0
				kerneltest.OnTry(func(string) error {
					if n++; n == fail+1 {
						return injected
					}
					return nil
				})
				w.cfg.Services[0].Engine = to
				err := w.tryApply()
				kerneltest.OnTry(nil)
				if err == nil {
					if fail < 4 {
						t.Errorf("only %d steps", fail)
					}
					w.check(sources(24), loopback4, names(a, b))
					if s := w.state(); s.Engine != to || s.Seed != seed {
						t.Errorf("engine %s, seed %d", s.Engine, s.Seed)
					}
					return
				}
				if !errors.Is(err, injected) {
					t.Fatal(err)
				}
				w.check(sources(24), loopback4, names(a, b))
				if s := w.state(); s.Engine != from || s.Seed != seed || s.Problem != "" {
					t.Errorf("step %d: engine %s, seed %d, %q", fail, s.Engine, s.Seed, s.Problem)
				}
				w.cfg.Services[0].Engine = from
				if again := w.apply(); len(again) != 0 {
					t.Errorf("step %d: applied again, it would %v", fail, again)
				}
			}
		})
	}
}

// TestEngineChangeKilledAtEveryStep kills a change of engine at any step. The next command completes the service in one
// of the engines, with its seed, on_empty and all members, including self-registered ones.
func TestEngineChangeKilledAtEveryStep(t *testing.T) {
	for _, to := range record.Engines {
		t.Run("to "+string(to), func(t *testing.T) {
			from := record.Engines[0]
			if from == to {
				from = record.Engines[1]
			}
			w := newWorld(t, spec.Options{Slots: 2, Engine: from}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
			a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
			w.member(0, a)
			w.apply()
			w.locked(func(l *kernel.WriteLock) error {
				_, err := engine.AdmitLocked(t.Context(), l, slots.Slot{Scope: w.state().Scope(), Service: "svc", Slot: 1}, &service.Member{PID: b.pid()}, nil)
				return err
			})
			before := w.state()
			every := nstest.Stride(20)
			for step := rand.IntN(every); ; step += every {
				w.cfg.Services[0].Engine = to
				finished := w.killedApply(step)
				w.locked(engine.Recover)
				s := w.state()
				if s.Seed != before.Seed || s.OnEmpty != before.OnEmpty || s.Problem != "" || s.Engine != from && s.Engine != to {
					t.Errorf("killed at step %d: engine %s, seed %d, on_empty %s, %q", step, s.Engine, s.Seed, s.OnEmpty, s.Problem)
				}
				w.check(sources(16), loopback4, names(a, b))
				if left, err := w.root.Kept(engine.KeptMove); left != nil || err != nil {
					t.Errorf("killed at step %d: there is still %s, %v", step, left, err)
				}
				if finished {
					t.Logf("killed at each of %d steps", step)
					return
				}
				w.cfg.Services[0].Engine = from
				w.apply()
			}
		})
	}
}

// TestEngineChangeKilledWhileLeaving kills a change of engine while it leaves a reuseport group. The next command
// restores the members, the program and the holder's socket of the group.
func TestEngineChangeKilledWhileLeaving(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 2, Engine: spec.EngineReuseport}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	b := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, a)
	w.member(1, b)
	w.apply()
	left := 0
	for step := 1; ; step++ {
		w.cfg.Services[0].Engine = spec.EngineSkLookup
		name := w.killedApplyAt(step)
		if name == "steer:service" { // it has left all groups
			break
		}
		if name == "" || step > 20 {
			t.Fatalf("step %d is %q, and no step was steer:service", step, name)
		}
		left++
		w.locked(engine.Recover)
		w.check(sources(8), loopback4, names(a, b))
		for k, leaving := range w.leaving() {
			t.Errorf("killed at step %d, %s: group %s is left (%d)", step, name, k, leaving)
		}
		w.cfg.Services[0].Engine = spec.EngineReuseport
		w.apply()
	}
	if left < 4 {
		t.Errorf("killed at %d steps of leaving, want at least 4", left)
	}
	w.locked(engine.Recover)
	w.check(sources(8), loopback4, names(a, b))
}

// leaving returns the groups marked as leaving.
func (w *world) leaving() map[string]uint32 {
	w.t.Helper()
	out := map[string]uint32{}
	w.locked(func(l *kernel.WriteLock) error {
		e, err := engine.OpenEngine(l, w.state().Scope(), spec.EngineReuseport)
		if err != nil {
			return err
		}
		defer e.Close()
		groups, err := engine.Entries[engine.GroupKey, engine.GroupValue](e.Pins.Maps["groups"])
		for k, v := range groups {
			if v.Leaving != 0 {
				out[k.String()] = v.Leaving
			}
		}
		return err
	})
	return out
}
