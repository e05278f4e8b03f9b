// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/service"
)

// serve runs the watcher until the test ends.
func (w *world) serve() { w.serveLog() }

// lockedBuffer is a log that the test reads while the watcher writes.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// serveLog is serve. It returns the log.
func (w *world) serveLog() *lockedBuffer {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	log := &lockedBuffer{}
	go func() { done <- Feature{}.Run(ctx, w.root, slog.New(slog.NewTextHandler(log, nil))) }()
	w.t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
		if w.t.Failed() {
			w.t.Logf("the watcher said\n%s", log.String())
		}
	})
	return log
}

// slotReader reads only the slots. Reading the whole state takes CPU time and, before Linux 6.2, grace periods from the
// watcher, and would distort measurements.
func (w *world) slotReader() *slots.Reader {
	w.t.Helper()
	r, err := slots.Open(w.root, "", "svc")
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { r.Close() })
	return r
}

// admitted waits until a slot has a given process, and returns the duration.
func (w *world) admitted(slot, pid int) time.Duration {
	w.t.Helper()
	r := w.slotReader()
	start := time.Now()
	nstest.Within(w.t, 2*time.Minute, func() error {
		p, ok, err := r.Admitted(slot)
		if err != nil {
			w.t.Fatal(err)
		}
		if !ok || p != pid {
			return notGiven{w, slot, pid}
		}
		return nil
	})
	return time.Since(start)
}

// notGiven describes the slot only when printed, because reading the state at each attempt would disturb the watcher.
type notGiven struct {
	w         *world
	slot, pid int
}

func (e notGiven) Error() string {
	return fmt.Sprintf("slot %d was not given to process %d: %+v", e.slot, e.pid, e.w.state().Slots[e.slot])
}

// byPIDFile configures a slot's member by a pidfile written by the test.
func (w *world) byPIDFile(slot int) (write func(*sink)) {
	file := w.t.TempDir() + "/pid"
	w.cfg.Services[0].Members = append(w.cfg.Services[0].Members, service.Member{Slot: slot, PIDFile: file})
	return func(s *sink) {
		if err := os.WriteFile(file, []byte(strconv.Itoa(s.pid())), 0o644); err != nil {
			w.t.Fatal(err)
		}
	}
}

func TestWatcherAdmitsByEvent(t *testing.T) { eachEngine(t, testWatcherAdmitsByEvent) }

func testWatcherAdmitsByEvent(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	write := w.byPIDFile(0)
	w.apply()
	was := lookEvery
	t.Cleanup(func() { lookEvery = was })
	lookEvery = time.Hour // so every admission is caused by an event
	w.serve()
	time.Sleep(100 * time.Millisecond)
	var took []time.Duration
	// Take the best of five, because the machine may stall and other tests run concurrently. Retry with more if all
	// five are slow.
	limit, times := 100*time.Millisecond, 20
	if testing.Short() { // on an emulated kernel or a busy machine, a single admission may take seconds
		limit, times = time.Hour, 2
	}
	for i := range times {
		if i >= 5 && slices.Min(took) <= limit {
			break
		}
		s := startSink(t)
		write(s)
		time.Sleep(30 * time.Millisecond)
		first, second := "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"
		if i%2 == 1 { // opens its sockets slowly, in either order
			first, second = second, first
		}
		s.do("open " + first)
		r := w.slotReader()
		nstest.Steadily(t, 400*time.Millisecond, func() error {
			if _, ok, err := r.Admitted(0); ok || err != nil {
				return fmt.Errorf("admitted with half its sockets, %v", err)
			}
			return nil
		})
		s.do("open " + second)
		took = append(took, w.admitted(0, s.pid()))
		w.check(sources(3), loopback4, names(s))
		s.kill()
	}
	t.Logf("admitted %v after the last socket", took)
	if best := slices.Min(took); best > limit {
		t.Errorf("at best after %v, want below %v", best, limit)
	}
}

func TestWatcherLeavesWithdrawn(t *testing.T) { eachEngine(t, testWatcherLeavesWithdrawn) }

func testWatcherLeavesWithdrawn(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	write := w.byPIDFile(0)
	s := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	write(s)
	w.apply()
	w.serve()
	slot := slots.Slot{Scope: w.state().Scope(), Service: "svc", Slot: 0}
	w.locked(func(l *kernel.WriteLock) error { return engine.Withdraw(l, slot) })
	nstest.Steadily(t, 1200*time.Millisecond, func() error {
		if w.state().Slots[0].Admitted() {
			return errors.New("the watcher admitted a slot that an operator withdrew")
		}
		return nil
	})
	w.check(sources(2), loopback4, names(nil))
	buffer := 1 << 20
	w.cfg.Services[0].ReceiveBuffer = &buffer
	for range 2 { // with a change, and without
		st, err := state.Read(t.Context(), w.root)
		if err != nil {
			t.Fatal(err)
		}
		p, err := Feature{}.Plan(t.Context(), st, w.cfg)
		if err != nil || !slices.Contains(p.Warnings, "slot 0 of service svc stays withdrawn until weir steer admit svc --slot 0") {
			t.Errorf("the plan's warnings are %q, %v", p.Warnings, err)
		}
		w.apply()
		if s := w.state().Slots[0]; !s.Withdrawn {
			t.Errorf("after weir apply: %+v", s)
		}
	}
	w.locked(func(l *kernel.WriteLock) error {
		_, err := engine.AdmitLocked(t.Context(), l, slot, nil, nil)
		return err
	})
	w.check(sources(2), loopback4, names(s))
}

// deadline waits until cond holds.
func deadline(t testing.TB, cond func() bool) {
	t.Helper()
	nstest.Until(t, "the condition of this line", cond)
}

// TestWatcherFollowsNamespace: the watcher moves a service to the new namespace of a restarted container.
func TestWatcherFollowsNamespace(t *testing.T) { eachEngine(t, testWatcherFollowsNamespace) }

func testWatcherFollowsNamespace(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	write := w.byPIDFile(0)
	start := func(name string) (*sink, *netns.Handle) {
		ns, err := netns.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { ns.Close(); netns.Delete(name) })
		var s *sink
		if err := ns.Do(func() error { s = startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"); return nil }); err != nil {
			t.Fatal(err)
		}
		write(s)
		return s, ns
	}
	s, _ := start("first")
	w.apply()
	w.serve()
	s.kill()
	s, second := start("second")
	deadline(t, func() bool { return w.state().Inode == second.Inode() && w.state().Slots[0].Admitted() })
	var got string
	second.Do(func() error { got = ask(t, "udp", sources(1)[0], loopback4); return nil })
	if want := names(s)(state.Assignment{}); got != want {
		t.Errorf("after the move %s answers, want %s", got, want)
	}
	s.kill()
	w.locked(func(l *kernel.WriteLock) error {
		scope := w.slot(0).Scope
		start("third")
		time.Sleep(2 * lookEvery) // the watcher waits for the lock
		return engine.RemoveService(l, scope, "svc")
	})
	nstest.Steadily(t, 2*lookEvery, func() error {
		if st, err := state.Read(t.Context(), w.root); err != nil || len(st.Services) > 0 {
			return fmt.Errorf("a removed service moved to the next namespace: %+v, %v", st.Services, err)
		}
		return nil
	})
}
