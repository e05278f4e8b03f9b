// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/daemon"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/explain"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/templates"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// caller is a UDP peer: it sends from one address and port.
type caller struct {
	t testing.TB
	c *net.UDPConn
}

func call(t testing.TB, from netip.Addr, to netip.AddrPort) *caller {
	t.Helper()
	c, err := net.DialUDP("udp", &net.UDPAddr{IP: from.AsSlice()}, net.UDPAddrFromAddrPort(to))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return &caller{t, c}
}

// asks returns the process that answers.
func (c *caller) asks() string {
	c.t.Helper()
	b := make([]byte, 64)
	c.c.Write([]byte("x"))
	c.c.SetReadDeadline(time.Now().Add(patience))
	n, err := c.c.Read(b)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return refused
	case errors.Is(err, os.ErrDeadlineExceeded):
		return silence
	case err != nil:
		c.t.Fatal(err)
	}
	return string(b[:n])
}

func (c *caller) wants(who *sink, why string) {
	c.t.Helper()
	if got := c.asks(); got != fmt.Sprint(who.pid()) {
		c.t.Errorf("%s: answered by %s, want %d", why, got, who.pid())
	}
}

func callers(t testing.TB, n int, to netip.AddrPort) (out []*caller) {
	t.Helper()
	for _, a := range sources(n) {
		out = append(out, call(t, a, to))
	}
	return out
}

// generational returns a world of one slot with generations.
func generational(t testing.TB, idle, deadline time.Duration, listen ...string) *world {
	t.Helper()
	if len(listen) == 0 {
		listen = []string{"udp 0.0.0.0:9991", "tcp 0.0.0.0:9991"}
	}
	return newWorld(t, spec.Options{Slots: 1, Generations: &spec.Generations{Idle: idle, Deadline: deadline}}, listen...)
}

func pair(t testing.TB) (a, b *sink) {
	t.Helper()
	return startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"), startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
}

func (w *world) draining() *slots.Draining { return w.state().Slots[0].Draining }

// TestGenerations: known peers stay with the old member. All other traffic goes to the new one, including TCP.
func TestGenerations(t *testing.T) {
	w := generational(t, time.Minute, time.Hour)
	a, b := pair(t)
	w.member(0, a)
	w.apply()
	known := callers(t, 5, loopback4)
	for _, c := range known {
		c.wants(a, "the first generation")
	}
	w.member(0, b)
	w.apply()
	st := w.state().Slots[0]
	if d := st.Draining; d == nil || d.PID != a.pid() || d.Peers != len(known) || st.PID != b.pid() || !st.Admitted() {
		t.Fatalf("after the change: %+v, draining %+v", st, d)
	}
	fresh := callers(t, 5, loopback4) // the same addresses with other ports
	for range 3 {
		for i := range known {
			known[i].wants(a, "a known peer")
			fresh[i].wants(b, "a new peer")
		}
		if got := ask(t, "tcp", sources(1)[0], loopback4); got != fmt.Sprint(b.pid()) {
			t.Errorf("a new connection is answered by %s, want %d", got, b.pid())
		}
	}
	if d := w.draining(); d.Kept != 3*uint64(len(known)) || d.Peers != len(known) || d.Back != 0 {
		t.Errorf("%+v; want %d peers that have sent three datagrams each", d, len(known))
	}
	if n := w.state().Slots[0].Peers; n == nil || *n != len(fresh) {
		t.Errorf("the new member has %v peers, want %d", n, len(fresh))
	}
	if v := w.state().Slots[0].Verdicts["udp"]; v.Steered != 5+15+15 {
		t.Errorf("counted %d datagrams, want those of both generations, 35", v.Steered)
	}
	for c, pid := range map[*caller]int{known[0]: a.pid(), fresh[0]: b.pid()} {
		p := explain.Packet{Proto: "udp", From: netip.MustParseAddrPort(c.c.LocalAddr().String()), To: loopback4}
		if x, err := explain.Explain(t.Context(), w.root, p); err != nil || !strings.Contains(x.Result, fmt.Sprintf("process %d ", pid)) {
			t.Errorf("explained %+v, %v; want process %d", x, err, pid)
		}
	}
	// A new program over the same maps, as after an upgrade of weir, continues.
	w.locked(func(l lock) error { return upgrade(l, w.state().Scope(), spec.EngineSkLookup) })
	for i := range known {
		known[i].wants(a, "a known peer, after an upgrade of weir")
		fresh[i].wants(b, "a new peer, after an upgrade of weir")
	}
	a.kill()
	for _, c := range known {
		c.wants(b, "the old member is gone")
	}
	if d := w.draining(); d != nil {
		t.Errorf("a dead process drains: %+v", d)
	}
	// And back: the rows alternate.
	c := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, c)
	w.apply()
	for i := range known {
		known[i].wants(b, "a peer of the second generation")
		fresh[i].wants(b, "a peer of the second generation")
	}
	call(t, sources(1)[0], loopback4).wants(c, "a new peer")
}

func TestGenerationsV6(t *testing.T) {
	w := generational(t, time.Minute, time.Hour, "udp 0.0.0.0:9991", "udp6 [::]:9991")
	w.cfg.Services[0].Listen = w.cfg.Services[0].Listen[1:]
	one, two := startSink(t, "udp6=[::]:9991"), startSink(t, "udp6=[::]:9991")
	w.member(0, one)
	w.apply()
	at := netip.MustParseAddrPort("[::1]:9991")
	known := call(t, netip.MustParseAddr("::1"), at)
	known.wants(one, "the first generation")
	w.member(0, two)
	w.apply()
	known.wants(one, "a known peer")
	call(t, netip.MustParseAddr("::1"), at).wants(two, "a new peer")
}

// judgeable repeats a test until it reports a valid run. A stall of the machine can silence peers and let deadlines
// pass.
func judgeable(t *testing.T, try func() (judged bool)) {
	t.Helper()
	for range 10 {
		if try() || t.Failed() {
			return
		}
	}
	t.Fatal("the machine stands still all the time: nothing can be judged")
}

// TestGenerationIdle: a peer silent for longer than idle is new, and any other peer stays.
func TestGenerationIdle(t *testing.T) {
	const idle = 2 * time.Second
	judgeable(t, func() bool {
		w := generational(t, idle, time.Hour)
		defer w.remove()
		a, b := pair(t)
		defer func() { a.kill(); b.kill() }()
		w.member(0, a)
		w.apply()
		busy, silent := call(t, sources(2)[0], loopback4), call(t, sources(2)[1], loopback4)
		silent.wants(a, "the first generation")
		heard := time.Now()
		nstest.Steadily(t, idle+idle/2, func() error {
			heard = time.Now()
			busy.wants(a, "the first generation")
			return nil
		})
		w.member(0, b)
		w.apply()
		got := busy.asks()
		if time.Since(heard) > idle {
			return false // it may have been silent for too long
		}
		if got != fmt.Sprint(a.pid()) {
			t.Errorf("heard just before the change: answered by %s, want %d", got, a.pid())
		}
		silent.wants(b, "silent since long before the change")
		nstest.Eventually(t, func() error {
			if d := w.draining(); d == nil || d.Peers != 0 {
				return fmt.Errorf("%+v; want no peer that is not silent", d)
			}
			return nil
		})
		busy.wants(b, "silent since the change")
		return true
	})
}

// TestGenerationDeadline: the deadline moves active peers without any process of weir.
func TestGenerationDeadline(t *testing.T) {
	const deadline = 3 * time.Second
	judgeable(t, func() bool {
		w := generational(t, deadline, deadline)
		defer w.remove()
		a, b := pair(t)
		defer func() { a.kill(); b.kill() }()
		w.member(0, a)
		w.apply()
		c, heard, judged := call(t, sources(1)[0], loopback4), time.Now(), 0
		c.wants(a, "the first generation")
		w.member(0, b)
		w.apply()
		until := w.draining().Until
		for time.Until(until) > 0 {
			last := heard
			heard = time.Now()
			got := c.asks()
			if time.Since(last) > deadline {
				return false // it may have been silent for too long
			}
			if time.Until(until) < 20*time.Millisecond { // the answer may come after the deadline
				break
			}
			if judged++; got != fmt.Sprint(a.pid()) {
				t.Fatalf("before the deadline: answered by %s, want %d", got, a.pid())
			}
			time.Sleep(50 * time.Millisecond)
		}
		time.Sleep(time.Until(until) + 20*time.Millisecond)
		c.wants(b, "after the deadline")
		kept := w.draining().Kept
		for range 20 {
			c.wants(b, "after the deadline")
		}
		if d := w.draining(); d.Kept != kept || d.Peers != 0 {
			t.Errorf("the old member was given more: %+v", d)
		}
		return judged > 0
	})
}

// TestThreeGenerations: a third generation waits for the end of the first.
func TestThreeGenerations(t *testing.T) {
	w := generational(t, time.Minute, time.Hour)
	a, b := pair(t)
	w.member(0, a)
	w.apply()
	c := call(t, sources(1)[0], loopback4)
	c.wants(a, "the first generation")
	w.member(0, b)
	w.apply()
	third := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, third)
	steps := w.apply()
	if pid := w.state().Slots[0].PID; pid != b.pid() {
		t.Errorf("after %v process %d has the slot, want %d", steps, pid, b.pid())
	}
	_, err := registerNow(w, 0)
	if !errors.Is(err, engine.ErrDraining) || !engine.Waiting(err) {
		t.Errorf("a third generation: %v", err)
	}
	c.wants(a, "a known peer")
	a.kill()
	if _, err := registerNow(w, 0); err != nil {
		t.Error(err)
	}
	call(t, sources(1)[0], loopback4).wants(third, "a new peer")
}

// TestGenerationFallsBack: a dead new member loses no packet while the previous one runs. The program sends that one
// the packets, and the next search returns the slot to it.
func TestGenerationFallsBack(t *testing.T) {
	needExitHook(t)
	w := generational(t, time.Minute, time.Hour)
	a, b := pair(t)
	write := w.byPIDFile(0)
	write(a)
	w.apply()
	known := call(t, sources(2)[0], loopback4)
	known.wants(a, "the first generation")
	write(b)
	w.locked(func(l lock) error { _, err := engine.AdmitLocked(t.Context(), l, w.slot(0), nil, nil); return err })
	fresh := call(t, sources(2)[1], loopback4)
	fresh.wants(b, "a new peer")
	b.kill()
	for _, c := range []*caller{known, fresh, call(t, sources(1)[0], loopback4)} {
		c.wants(a, "the new member has died")
	}
	if got := ask(t, "tcp", sources(1)[0], loopback4); got != fmt.Sprint(a.pid()) {
		t.Errorf("a connection is answered by %s, want %d", got, a.pid())
	}
	if d := w.draining(); d == nil || d.Back < 3 {
		t.Errorf("%+v; want the packets that came back", d)
	}
	w.serve()
	w.admitted(0, a.pid())
	fresh.wants(a, "the slot is the old member's again")
	if d := w.draining(); d != nil {
		t.Errorf("still draining: %+v", d)
	}
}

// TestGenerationWithdrawn: the old generation of a withdrawn slot gets nothing either.
func TestGenerationWithdrawn(t *testing.T) {
	w := generational(t, time.Minute, time.Hour)
	a, b := pair(t)
	w.member(0, a)
	w.apply()
	c := call(t, sources(1)[0], loopback4)
	c.wants(a, "the first generation")
	w.member(0, b)
	w.apply()
	w.locked(func(l lock) error { return engine.Withdraw(l, w.slot(0)) })
	if got := c.asks(); got != refused {
		t.Errorf("a withdrawn slot's known peer is answered by %s", got)
	}
	if _, err := registerNow(w, 0); err != nil {
		t.Fatal(err)
	}
	c.wants(b, "registered again")
}

// TestWatcherSeesNextGeneration: weir serve notices a new process in the pidfile.
func TestWatcherSeesNextGeneration(t *testing.T) {
	w := generational(t, time.Minute, time.Hour)
	write := w.byPIDFile(0)
	a, b := pair(t)
	write(a)
	w.apply()
	w.serve()
	w.admitted(0, a.pid())
	known := call(t, sources(1)[0], loopback4)
	known.wants(a, "the first generation")
	write(b)
	w.admitted(0, b.pid())
	known.wants(a, "a known peer")
	if d := w.draining(); d == nil || d.PID != a.pid() {
		t.Errorf("%+v; want process %d", d, a.pid())
	}
}

// stopped reports whether every thread of a process is stopped. A running thread may still accept a connection.
func stopped(t testing.TB, pid int) bool {
	t.Helper()
	stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(stats) == 0 {
		t.Fatal(err, stats)
	}
	for _, s := range stats {
		if b, err := os.ReadFile(s); err == nil && !strings.Contains(string(b), ") T ") {
			return false
		}
	}
	return true
}

// TestNextGenerationInCgroup: the next process of a cgroup is its next generation. The old process stays in the cgroup
// and is not taken for a new one.
func TestNextGenerationInCgroup(t *testing.T) {
	w := generational(t, 500*time.Millisecond, 2*time.Second)
	group := newCgroup(t)
	w.cfg.Services[0].Members = []service.Member{{Slot: 0, Cgroup: group}}
	a, b := pair(t)
	moveTo(t, group, a.pid())
	w.apply()
	w.serve()
	w.admitted(0, a.pid())
	known := call(t, sources(1)[0], loopback4)
	known.wants(a, "the first generation")
	moveTo(t, group, b.pid())
	w.admitted(0, b.pid())
	nstest.Steadily(t, 4*time.Second, func() error {
		if pid := w.state().Slots[0].PID; pid != b.pid() {
			return fmt.Errorf("process %d has the slot, want %d", pid, b.pid())
		}
		return nil
	})
	known.wants(b, "after the deadline")
	third := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	moveTo(t, group, third.pid())
	w.admitted(0, third.pid())
}

// queue stops a member of slot 0 and fills its listener's queue. It returns the answering processes at the end.
func (w *world) queue(a *sink, queued int) <-chan string {
	t := w.t
	a.Signal(unix.SIGSTOP)
	nstest.Until(w.t, "it is stopped", func() bool { return stopped(t, a.pid()) })
	got := make(chan string, queued)
	for _, from := range sources(queued) {
		go func() {
			who, err := askPatiently("tcp", from, loopback4, patience, patience, func() bool { return false })
			if err != nil {
				who = err.Error()
			}
			got <- who
		}()
	}
	nstest.Until(w.t, "connections wait", func() bool { return w.state().Slots[0].Sockets[1].Queue == uint32(queued) })
	return got
}

// TestRetireWaitsForQueue: connections in the old listener's queue are accepted before it ends.
func TestRetireWaitsForQueue(t *testing.T) {
	w := generational(t, time.Second, time.Minute)
	a, b := pair(t)
	w.member(0, a)
	w.apply()
	const queued = 20
	got := w.queue(a, queued)
	w.member(0, b)
	w.apply()
	if d := w.draining(); d == nil || d.Waiting != queued {
		t.Errorf("%+v; want %d waiting", d, queued)
	}
	if who := ask(t, "tcp", sources(1)[0], loopback4); who != fmt.Sprint(b.pid()) {
		t.Errorf("a new connection is answered by %s, want %d", who, b.pid())
	}
	done := make(chan error, 1)
	go func() {
		done <- daemon.Retirement{Slot: w.slot(0), Signal: unix.SIGKILL, Log: slog.New(slog.DiscardHandler)}.Run(context.Background(), w.root)
	}()
	select {
	case err := <-done:
		t.Fatalf("it did not wait: %v", err)
	case <-time.After(time.Second):
	}
	a.Signal(unix.SIGCONT)
	for range queued {
		if who := <-got; who != fmt.Sprint(a.pid()) {
			t.Errorf("a queued connection is answered by %q, want %d", who, a.pid())
		}
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	a.Wait()
	if err := (daemon.Retirement{Slot: w.slot(0), Log: slog.New(slog.DiscardHandler)}).Run(t.Context(), w.root); err != nil {
		t.Errorf("nobody drains: %v", err)
	}
}

// TestRetiredLivesOn: a process that ignores its stop signal has not ended, and the log says so.
func TestRetiredLivesOn(t *testing.T) {
	w := generational(t, 100*time.Millisecond, time.Minute)
	a, b := startSink(t, "udp4=0.0.0.0:9991", "tcp4~=0.0.0.0:9991"), startSink(t, "udp4=0.0.0.0:9991", "tcp4~=0.0.0.0:9991")
	w.member(0, a)
	w.apply()
	w.member(0, b)
	w.apply()
	var log strings.Builder
	ignored := daemon.Retirement{Slot: w.slot(0), Signal: unix.SIGCONT, Log: slog.New(slog.NewTextHandler(&log, nil))}
	if err := ignored.Run(t.Context(), w.root); err != nil {
		t.Error(err)
	}
	const sent, lives, ended = "stop signal sent to the previous generation", "previous generation lives on after its stop signal", "previous generation ended"
	if said := log.String(); !strings.Contains(said, sent) || !strings.Contains(said, lives) || strings.Contains(said, ended) {
		t.Errorf("the process lives on, but the log says\n%s", said)
	}
	log.Reset()
	ignored.Signal = unix.SIGKILL
	if err := ignored.Run(t.Context(), w.root); err != nil {
		t.Error(err)
	}
	a.Wait()
	if said := log.String(); !strings.Contains(said, sent) || strings.Contains(said, lives) || !strings.Contains(said, ended) {
		t.Errorf("the process has exited, but the log says\n%s", said)
	}
}

// said is a log that signals any message.
type said chan struct{}

func (s said) Info(string, ...any) { templates.Notify(s) }

func (s said) Warn(string, ...any) { templates.Notify(s) }

// TestRetireGoesOn: the first generation still ends if a third one arrives while it has a session.
func TestRetireGoesOn(t *testing.T) {
	w := generational(t, 200*time.Millisecond, time.Minute)
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4~=0.0.0.0:9991")
	_, b := pair(t)
	w.member(0, a)
	w.apply()
	session, err := net.Dial("tcp", loopback4.String())
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	session.Read(make([]byte, 64))
	w.member(0, b)
	w.apply()
	done, begun := make(chan error, 1), make(said, 1)
	go func() {
		done <- daemon.Retirement{Slot: w.slot(0), Signal: unix.SIGKILL, Log: begun}.Run(context.Background(), w.root)
	}()
	<-begun // the process to end is known
	third := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	w.member(0, third)
	w.apply()
	if d := w.draining(); d == nil || d.PID != b.pid() {
		t.Fatalf("%+v drains, want %d", d, b.pid())
	}
	select {
	case err := <-done:
		t.Fatalf("it did not wait for the session: %v", err)
	case <-time.After(500 * time.Millisecond):
	}
	session.Close()
	if err := <-done; err != nil {
		t.Error(err)
	}
	a.Wait()
	if !slots.Running(b.pid()) || !slots.Running(third.pid()) {
		t.Error("another one was ended")
	}
}

// TestKilledWithQueue kills an old process with connections in its queue. They are lost, unless the kernel moves them
// to the new process of the same reuseport group (tcp_migrate_req, Linux 5.14).
func TestKilledWithQueue(t *testing.T) {
	nstest.NeedRoot(t)
	const knob = "/proc/sys/net/ipv4/tcp_migrate_req"
	for _, migrate := range []string{"0", "1"} {
		t.Run("migrate "+migrate, func(t *testing.T) {
			if err := os.WriteFile(knob, []byte(migrate), 0o644); errors.Is(err, os.ErrNotExist) {
				t.Skip("need: kernel 5.14 for tcp_migrate_req")
			} else if err != nil {
				t.Fatal(err)
			}
			defer os.WriteFile(knob, []byte("0"), 0o644)
			w := generational(t, time.Second, time.Minute)
			a, b := pair(t)
			w.member(0, a)
			w.apply()
			const queued = 10
			got := w.queue(a, queued)
			w.member(0, b)
			w.apply()
			a.kill()
			want := map[string]string{"0": refused, "1": fmt.Sprint(b.pid())}[migrate]
			for range queued {
				if who := <-got; who != want {
					t.Errorf("a queued connection is answered by %q, want %q", who, want)
				}
			}
		})
	}
}

// TestRetireWaitsForPeers: a retirement waits for TCP sessions and UDP peers, and ends the rest at the deadline.
func TestRetireWaitsForPeers(t *testing.T) {
	const deadline = 4 * time.Second
	w := generational(t, 500*time.Millisecond, deadline)
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4~=0.0.0.0:9991")
	b := startSink(t, "udp4=0.0.0.0:9991", "tcp4~=0.0.0.0:9991")
	w.member(0, a)
	w.apply()
	session, err := net.Dial("tcp", loopback4.String())
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	session.Read(make([]byte, 64))
	w.member(0, b)
	w.apply()
	if d := w.draining(); d.Sessions != 1 {
		t.Errorf("%+v; want one session", d)
	}
	until := w.draining().Until
	if err := (daemon.Retirement{Slot: w.slot(0), Keep: true, Log: slog.New(slog.DiscardHandler)}).Run(t.Context(), w.root); err != nil {
		t.Error(err)
	}
	if now := time.Now(); now.Before(until) || !slots.Running(a.pid()) {
		t.Errorf("it ended %s before the deadline, though a session is left; the process runs: %v", until.Sub(now), slots.Running(a.pid()))
	}
	session.Close()
	w.locked(func(l lock) error { return engine.Withdraw(l, w.slot(0)) }) // forgets the predecessor
}

// TestGenerationSessionsAreNotReset: the change resets no session of the previous generation.
func TestGenerationSessionsAreNotReset(t *testing.T) {
	needDestroy(t)
	w := generational(t, time.Minute, time.Hour)
	a := startSink(t, "udp4=0.0.0.0:9991", "tcp4~=0.0.0.0:9991")
	b := startSink(t, "udp4=0.0.0.0:9991", "tcp4~=0.0.0.0:9991")
	w.member(0, a)
	w.apply()
	routers := connect(t, sources(3))
	w.member(0, b)
	w.apply()
	if !w.due() {
		t.Error("no reset is due: the test means nothing")
	}
	if reset := w.resetDue(); len(reset) > 0 {
		t.Errorf("reset %v", reset)
	}
	for _, r := range routers {
		if !r.up(t, true) {
			t.Errorf("the session of %s has ended", r.addr)
		}
	}
	if n := w.state().Slots[0].Draining.Sessions; n != len(routers) {
		t.Errorf("%d sessions are left, want %d", n, len(routers))
	}
	a.kill()
}

// TestGenerationKilledAtEveryStep kills the change of generations at every step, under traffic. One of the two answers
// every known and new peer at all times.
func TestGenerationKilledAtEveryStep(t *testing.T) {
	for step := firstStep(); ; step += stride() {
		w := generational(t, time.Minute, time.Hour)
		a, b := pair(t)
		w.member(0, a)
		w.apply()
		known := callers(t, 3, loopback4)
		for _, c := range known {
			c.wants(a, "the first generation")
		}
		tr := w.startTraffic(8)
		tr.asked(t, 8)
		finished := w.killedLive(step, "next", fmt.Sprint(b.pid()))
		for _, c := range known {
			c.wants(a, fmt.Sprintf("step %d: a known peer", step))
		}
		w.member(0, b)
		w.apply() // recovers
		for _, c := range known {
			c.wants(a, fmt.Sprintf("step %d, recovered: a known peer", step))
		}
		call(t, sources(1)[0], loopback4).wants(b, "a new peer")
		for key, answers := range tr.end() {
			for got, n := range answers {
				if got != fmt.Sprint(a.pid()) && got != fmt.Sprint(b.pid()) {
					t.Errorf("step %d: %s answered %d times by %s", step, key, n, got)
				}
			}
		}
		if again := w.apply(); len(again) != 0 {
			t.Errorf("step %d: after recovery, apply would %v", step, again)
		}
		w.remove()
		a.kill()
		b.kill()
		if finished {
			t.Logf("killed at each of %d steps", step)
			if step < 8 {
				t.Errorf("only %d steps: the change is not what the test means", step)
			}
			return
		}
	}
}

// TestGenerationsComeAndGo adds and removes generations of a running service.
func TestGenerationsComeAndGo(t *testing.T) {
	w, a, b := twoMembers(t)
	w.checkAnswers(sources(8), a, b)
	w.cfg.Services[0].Generations = &spec.Generations{}
	w.apply()
	w.checkAnswers(sources(8), a, b)
	next := startSink(t, "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
	was := w.where(sources(8)...)
	i := 0
	for was[i].PID != a.pid() {
		i++
	}
	known := call(t, was[i].Address, loopback4)
	known.wants(a, "before the change")
	w.member(was[i].Slot, next)
	w.apply()
	known.wants(a, "a known peer")
	call(t, was[i].Address, loopback4).wants(next, "a new peer")
	// And without generations again.
	w.cfg.Services[0].Generations = nil
	w.apply()
	known.wants(next, "no generations any more")
}

// TestSuperviseReplaces runs weir steer run --replace: the new daemon runs beside the old one, which ends after its
// drain.
func TestSuperviseReplaces(t *testing.T) {
	const idle = 3 * time.Second
	judgeable(t, func() bool {
		w := generational(t, idle, time.Minute)
		defer w.remove()
		w.apply()
		first := w.supervise(t, 0, "", "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
		defer first.end()
		a, _, _ := first.runs()
		w.admitted(0, a)
		known, heard := call(t, sources(1)[0], loopback4), time.Now()
		if got := known.asks(); got != fmt.Sprint(a) {
			t.Fatalf("answered by %s, want %d", got, a)
		}
		second := w.supervise(t, 0, "replace", "udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991")
		defer second.end()
		b, _, _ := second.runs()
		w.admitted(0, b)
		silent := false
		nstest.Steadily(t, 2*time.Second, func() error {
			last := heard
			heard = time.Now()
			got := known.asks()
			if silent = silent || time.Since(last) > idle; !silent && got != fmt.Sprint(a) {
				return fmt.Errorf("a known peer is answered by %s, want %d", got, a)
			}
			return nil
		})
		if silent {
			return false // it may have been silent for too long
		}
		first.ends(128 + int(unix.SIGTERM)) // silent for idle
		if got := known.asks(); got != fmt.Sprint(b) {
			t.Errorf("answered by %s, want %d", got, b)
		}
		second.signal(unix.SIGTERM)
		second.ends(128 + int(unix.SIGTERM))
		w.empties(0)
		return true
	})
}

// TestLatestReplaceWins starts more replacements than generations have room for. The latest one becomes the member, and
// an earlier one gives up, although it could take the slot first.
func TestLatestReplaceWins(t *testing.T) {
	w := generational(t, time.Minute, time.Hour)
	w.apply()
	listens := []string{"udp4=0.0.0.0:9991", "tcp4=0.0.0.0:9991"}
	start := func(flags string) (*supervised, int) {
		s := w.supervise(t, 0, flags, listens...)
		t.Cleanup(s.end)
		pid, _, _ := s.runs()
		return s, pid
	}
	first, a := start("")
	w.admitted(0, a)
	known := call(t, sources(1)[0], loopback4)
	nstest.Eventually(t, func() error {
		if got := known.asks(); got != fmt.Sprint(a) {
			return fmt.Errorf("answered by %s, want %d", got, a)
		}
		return nil
	})
	second, b := start("replace")
	w.admitted(0, b)
	waiting, _ := start("replace") // a has a known peer for a minute
	latest, pid := start("replace,restart")
	waiting.ends(1)
	if now := w.state().Slots[0].PID; now != b {
		t.Errorf("process %d has the slot, want %d", now, b)
	}
	first.signal(unix.SIGKILL) // the supervision dies, its daemon goes on
	if err := unix.Kill(a, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	w.admitted(0, pid)
	latest.signal(unix.SIGTERM)
	second.signal(unix.SIGTERM)
}

func TestReplaceNeedsGenerations(t *testing.T) {
	w := newWorld(t, spec.Options{Slots: 1}, "udp 0.0.0.0:9991")
	w.apply()
	c := nstest.Child("supervise", w.root.Path(), w.state().Scope(), 0, "replace", "/proc/self/exe", "stay")
	out, err := c.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "add generations: {}") {
		t.Errorf("%v: %s", err, out)
	}
}

func TestGenerationsConfig(t *testing.T) {
	for what, c := range map[string]struct {
		o    spec.Options
		want string
	}{
		"engine":   {spec.Options{Slots: 1, Engine: spec.EngineReuseport, Generations: &spec.Generations{}}, "need engine sk_lookup"},
		"quic":     {spec.Options{Slots: 1, By: spec.ByQUIC, Generations: &spec.Generations{}}, "need engine sk_lookup"},
		"idle":     {spec.Options{Slots: 1, Generations: &spec.Generations{Idle: time.Millisecond}}, "generations.idle 1ms"},
		"deadline": {spec.Options{Slots: 1, Generations: &spec.Generations{Idle: time.Minute, Deadline: time.Second}}, "generations.deadline 1s"},
		"peers":    {spec.Options{Slots: 1, Generations: &spec.Generations{Peers: 3}}, "generations.peers 3"},
	} {
		cfg := spec.Config{Services: []spec.Service{{Options: c.o}}}
		cfg.Services[0].Name = "svc"
		if err := errors.Join(cfg.Validate()...); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v; want %q", what, err, c.want)
		}
	}
}
