// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/reset"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/feature/steer/state"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/internal/sockdiag"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
	"github.com/weir-project/weir/service"
	"golang.org/x/sys/unix"
)

// both are the sockets of a collector with persistent sessions.
var both = []string{"udp4=0.0.0.0:9991", "tcp4~=0.0.0.0:9991"}

// collectors starts a world with a collector in each slot.
func collectors(t *testing.T, o spec.Options) (*world, []*sink) {
	if o.Seed == nil { // two random seeds may not move any device
		seed := uint32(1)
		o.Seed = &seed
	}
	w := newWorld(t, o, "udp 0.0.0.0:9991", "tcp 0.0.0.0:9991")
	var sinks []*sink
	for slot := range o.Slots {
		sinks = append(sinks, startSink(t, both...))
		w.member(slot, sinks[slot])
	}
	return w, sinks
}

// router has a session.
type router struct {
	addr netip.Addr
	conn net.Conn
	who  string // PID of the answering process
}

// connect opens a session from each source.
func connect(t testing.TB, addrs []netip.Addr) []*router {
	t.Helper()
	return connectTo(t, addrs, loopback4)
}

func connectTo(t testing.TB, addrs []netip.Addr, to netip.AddrPort) []*router {
	t.Helper()
	var out []*router
	for _, a := range addrs {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: a.AsSlice()}, Timeout: patiently}
		d.SetMultipathTCP(false)
		var c net.Conn
		// The kernel detaches an unpinned program asynchronously, so the previous test's program may still answer.
		nstest.Eventually(t, func() (err error) {
			if c, err = d.Dial("tcp", to.String()); err != nil && !errors.Is(err, syscall.ECONNREFUSED) {
				t.Fatal(err)
			}
			return err
		})
		t.Cleanup(func() { c.Close() })
		b := make([]byte, 64)
		c.SetReadDeadline(time.Now().Add(patiently))
		n, err := c.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, &router{a, c, string(b[:n])})
	}
	return out
}

// up reports whether the session is still open. It waits for an expected reset, because a reset may take long on an
// emulated kernel.
func (r *router) up(t testing.TB, want bool) bool {
	t.Helper()
	wait := patiently
	if want {
		wait = 20 * time.Millisecond
	}
	r.conn.SetReadDeadline(time.Now().Add(wait))
	_, err := r.conn.Read(make([]byte, 1))
	var ne net.Error
	switch {
	case errors.As(err, &ne) && ne.Timeout():
		return true
	case errors.Is(err, unix.ECONNRESET):
		return false
	}
	t.Fatalf("session of %s: %v", r.addr, err)
	return false
}

// needDestroy skips the test on kernels that cannot close sessions of other processes.
func needDestroy(t testing.TB) {
	t.Helper()
	if err := probe.DiagDestroy.Check(); err != nil {
		t.Skip("need: kernel", err)
	}
}

const fast = spec.Rate(1000)

// resetDue performs the due resets and returns the routers and their slots.
func (w *world) resetDue() map[netip.Addr]string {
	w.t.Helper()
	out := map[netip.Addr]string{}
	rate := fast
	err := reset.ResetDue(w.t.Context(), w.root, &rate, nil, func(r reset.Reset) {
		if r.Err != nil {
			w.t.Errorf("%s: %v", r.Router(), r.Err)
		}
		out[r.Remote.Addr().Unmap()] = r.Slots()
	})
	if err != nil {
		w.t.Error(err)
	}
	return out
}

// settled checks that exactly the routers with a new collector lost their session, that all protocols go there, and
// that nothing remains due.
func (w *world) settled(routers []*router, reset map[netip.Addr]string) {
	w.t.Helper()
	for _, r := range routers {
		p := w.where(r.addr)[0]
		moved := fmt.Sprint(p.PID) != r.who
		if up := r.up(w.t, !moved); up == moved {
			w.t.Errorf("%s (slot %d, process %d; session at %s): session up %v", r.addr, p.Slot, p.PID, r.who, up)
		}
		if _, told := reset[r.addr]; told != moved {
			w.t.Errorf("%s: told of %v, moved %v", r.addr, told, moved)
		}
		if got := ask(w.t, "udp", r.addr, loopback4); got != fmt.Sprint(p.PID) {
			w.t.Errorf("%s: UDP goes to %s, want %d", r.addr, got, p.PID)
		}
	}
	if left, err := w.state().Misplaced(w.t.Context()); err != nil || len(left) > 0 {
		w.t.Errorf("misplaced: %+v, %v", left, err)
	}
}

// TestLiveChanges changes where devices belong in every way there is.
func TestLiveChanges(t *testing.T) { eachEngine(t, testLiveChanges) }

func testLiveChanges(t *testing.T) {
	needDestroy(t)
	w, sinks := collectors(t, spec.Options{Slots: 3})
	w.apply()
	n := 48
	if testing.Short() {
		n = 16
	}
	change := func(name string, f func()) {
		t.Helper()
		routers := connect(t, sources(n))
		if left := w.resetDue(); len(left) > 0 {
			t.Fatalf("before %s, sessions are reset: %v", name, left)
		}
		before := w.state().Table
		f()
		reset := w.resetDue()
		w.settled(routers, reset)
		moved := 0
		for b, s := range w.state().Table {
			if s != before[b] {
				moved++
			}
		}
		t.Logf("%s: %d buckets moved, %d of %d sessions reset", name, moved, len(reset), n)
		for _, r := range routers {
			r.conn.Close()
		}
	}
	locked := func(f func(l *kernel.WriteLock) error) func() { return func() { w.locked(f) } }
	scope := w.state().Scope()
	svc := &w.cfg.Services[0]
	change("a slot more", func() {
		sinks = append(sinks, startSink(t, both...))
		svc.Slots = 4
		w.member(3, sinks[3])
		w.apply()
	})
	change("weights", func() { svc.Weights = spec.Weights{0: 2}; w.apply() })
	change("drain", locked(func(l *kernel.WriteLock) error {
		return engine.Drain(l, slots.Slot{Scope: scope, Service: "svc", Slot: 1}, nil)
	}))
	if held := w.state().Slots[1].Buckets; held != 0 {
		t.Errorf("the drained slot holds %d buckets", held)
	}
	change("apply while drained", func() { svc.Weights = nil; w.apply() })
	if held := w.state().Slots[1].Buckets; held != 0 {
		t.Errorf("the drained slot holds %d buckets after apply", held)
	}
	change("undrain", locked(func(l *kernel.WriteLock) error {
		return engine.Undrain(l, slots.Slot{Scope: scope, Service: "svc", Slot: 1}, nil)
	}))
	change("move", func() { w.moveOne(sources(1)[0], 1) })
	change("seed", func() { seed := uint32(4711); svc.Seed = &seed; w.apply() })
	if p := w.where(sources(1)[0])[0]; !p.Moved {
		t.Errorf("apply took the move back: %+v", p)
	}
	change("move back", locked(func(l *kernel.WriteLock) error {
		return engine.Move(l, scope, "svc", record.Moving{Device: sources(1)[0].String(), Back: true}, nil)
	}))
	change("member changed", func() {
		s := startSink(t, both...)
		w.member(0, s)
		w.locked(func(l *kernel.WriteLock) error {
			_, err := engine.AdmitLocked(t.Context(), l, slots.Slot{Scope: scope, Service: "svc", Slot: 0}, &svc.Members[0], nil)
			return err
		})
	})
	change("a slot less", func() {
		svc.Slots = 3
		svc.Members = slices.DeleteFunc(svc.Members, func(m service.Member) bool { return m.Slot == 3 })
		w.apply()
	})
}

// moveOne moves a device to another slot.
func (w *world) moveOne(a netip.Addr, by int) (to int) {
	w.t.Helper()
	p := w.where(a)[0]
	to = (p.Slot + by) % w.cfg.Services[0].Slots
	scope := w.state().Scope()
	w.locked(func(l *kernel.WriteLock) error {
		return engine.Move(l, scope, "svc", record.Moving{Device: a.String(), To: to}, nil)
	})
	if now := w.where(a)[0]; now.Slot != to || !now.Moved {
		w.t.Errorf("moved to %d, it is at %+v", to, now)
	}
	return to
}

// TestAdoptionResetsTheMisplaced adopts daemons with sessions from before weir. Only misplaced sessions are reset.
func TestAdoptionResetsTheMisplaced(t *testing.T) { eachEngine(t, testAdoptionResets) }

func testAdoptionResets(t *testing.T) {
	needDestroy(t)
	w, _ := collectors(t, spec.Options{Slots: 2})
	routers := connect(t, sources(24)) // distributed by the kernel
	w.apply()
	if m, err := w.state().Misplaced(t.Context()); err != nil || len(m) == 0 || len(m) == len(routers) {
		t.Fatalf("misplaced after adoption: %d of %d, %v", len(m), len(routers), err)
	}
	w.settled(routers, w.resetDue())
}

// TestResetsOfOwnSessions: sessions through a binding belong to the service, at any port. Sessions of another service
// with an overlapping listen or binding do not.
func TestResetsOfOwnSessions(t *testing.T) {
	needDestroy(t)
	w, _ := collectors(t, spec.Options{Slots: 2})
	beside := startSink(t, "tcp4~=127.0.0.9:9991")
	listens, err := service.ParseListen("tcp 127.0.0.9:9991")
	if err != nil {
		t.Fatal(err)
	}
	w.cfg.Services = append(w.cfg.Services, spec.Service{Spec: service.Spec{Name: "beside", Listen: []service.Listen{listens},
		Members: []service.Member{{PID: beside.pid()}}}, Options: spec.Options{Slots: 1, Engine: underTest}})
	w.apply()
	registered := startSink(t, "tcp4~=127.0.0.1:7091")
	w.register("registered", registered, "tcp 127.0.0.1:7091")
	w.bind("svc tcp 127.20.0.0/16 80")
	w.bind("registered tcp 127.21.0.0/16 0")
	routers := connect(t, sources(24))
	bound := connectTo(t, sources(24), netip.MustParseAddrPort("127.20.1.1:80"))
	others := append(connectTo(t, sources(12), netip.MustParseAddrPort("127.0.0.9:9991")),
		connectTo(t, sources(12), netip.MustParseAddrPort("127.21.1.1:9991"))...)
	for i := range bound {
		if bound[i].who != routers[i].who {
			t.Errorf("%s: at %s by its binding, at %s by itself", bound[i].addr, bound[i].who, routers[i].who)
		}
	}
	seed := uint32(99)
	w.cfg.Services[0].Seed = &seed
	w.apply()
	n := len(w.resetDue())
	moved := 0
	for i, r := range routers {
		if now := fmt.Sprint(w.where(r.addr)[0].PID); now != r.who {
			moved++
			if r.up(t, false) || bound[i].up(t, false) {
				t.Errorf("%s moved, and has a session still", r.addr)
			}
		} else if !r.up(t, true) || !bound[i].up(t, true) {
			t.Errorf("%s lost a session, and has not moved", r.addr)
		}
	}
	if moved == 0 || n != moved {
		t.Errorf("%d routers were reset, %d moved", n, moved)
	}
	for _, o := range others {
		if !o.up(t, true) {
			t.Errorf("%s lost its session with another service, at %s", o.addr, o.who)
		}
	}
}

// TestRateZeroLeavesSessions: rate 0 leaves sessions and makes nothing due.
func TestRateZeroLeavesSessions(t *testing.T) {
	zero := spec.Rate(0)
	w, _ := collectors(t, spec.Options{Slots: 2, ResetRate: &zero})
	w.apply()
	routers := connect(t, sources(12))
	seed := uint32(99)
	w.cfg.Services[0].Seed = &seed
	w.apply()
	if reset := w.resetDue(); len(reset) > 0 {
		t.Errorf("reset: %v", reset)
	}
	for _, r := range routers {
		if !r.up(t, true) {
			t.Errorf("the session of %s is gone", r.addr)
		}
	}
}

func TestResetsArePaced(t *testing.T) {
	needDestroy(t)
	w, _ := collectors(t, spec.Options{Slots: 2})
	w.apply()
	connect(t, sources(12))
	after := uint32(99)
	w.cfg.Services[0].Seed = &after
	w.apply()
	rate := spec.Rate(20)
	var at []time.Time
	if err := reset.ResetDue(t.Context(), w.root, &rate, nil, func(reset.Reset) { at = append(at, time.Now()) }); err != nil {
		t.Fatal(err)
	}
	if len(at) < 4 {
		t.Fatalf("%d sessions reset", len(at))
	}
	t.Logf("%d sessions reset", len(at))
	// The first time may have been recorded late, so require one interval less.
	if took, least := at[len(at)-1].Sub(at[0]), time.Duration(len(at)-2)*45*time.Millisecond; took < least {
		t.Errorf("%d sessions were reset within %s, want at least %s", len(at), took, least)
	}
}

// TestForesee compares foreseen and actual resets.
func TestForesee(t *testing.T) {
	needDestroy(t)
	w, _ := collectors(t, spec.Options{Slots: 3})
	w.apply()
	routers := connect(t, sources(24))
	foreseen, err := ForeseeDrain(t.Context(), w.root, w.state(), 1, false)
	if err != nil {
		t.Fatal(err)
	}
	w.locked(func(l *kernel.WriteLock) error {
		return engine.Drain(l, slots.Slot{Scope: w.state().Scope(), Service: "svc", Slot: 1}, nil)
	})
	reset := w.resetDue()
	w.settled(routers, reset)
	if len(foreseen.Sessions) != len(reset) || len(reset) == 0 {
		t.Errorf("foreseen %d, reset %d", len(foreseen.Sessions), len(reset))
	}
	for _, s := range foreseen.Sessions {
		if reset[s.Remote.Addr().Unmap()] != s.Slots() {
			t.Errorf("%s: foreseen %s, happened %q", s.Router(), s.Slots(), reset[s.Remote.Addr().Unmap()])
		}
	}
	seed := uint32(4)
	w.cfg.Services[0].Seed = &seed
	st, err := state.Read(t.Context(), w.root)
	if err != nil {
		t.Fatal(err)
	}
	routers = connect(t, sources(24))
	all, err := ForeseeApply(t.Context(), st, w.cfg)
	if err != nil || len(all) != 1 {
		t.Fatalf("%+v, %v", all, err)
	}
	w.apply()
	reset = w.resetDue()
	w.settled(routers, reset)
	if len(all[0].Sessions) < len(reset) || len(reset) == 0 {
		t.Errorf("foreseen %d, reset %d", len(all[0].Sessions), len(reset))
	}
}

// TestBypass: the kernel alone chooses during a bypass, and apply keeps it.
func TestBypass(t *testing.T) { eachEngine(t, testBypass) }

func testBypass(t *testing.T) {
	w, sinks := collectors(t, spec.Options{Slots: 3})
	sinks[2].kill() // an empty slot rejects while steered
	w.apply()
	pids := []string{fmt.Sprint(sinks[0].pid()), fmt.Sprint(sinks[1].pid())}
	set := func(on bool) {
		t.Helper()
		w.locked(func(l *kernel.WriteLock) error {
			did, err := engine.Bypass(l, w.state().Scope(), "svc", on)
			if err == nil && !did {
				t.Errorf("bypass %v: it was so already", on)
			}
			return err
		})
	}
	free := func() {
		t.Helper()
		elsewhere := 0
		for _, p := range w.where(sources(40)...) {
			for _, proto := range slots.Protocols {
				got := ask(t, proto, p.Address, loopback4)
				if !slices.Contains(pids, got) {
					t.Errorf("bypassed, %s from %s is answered by %s", proto, p.Address, got)
				}
				if got != fmt.Sprint(p.PID) {
					elsewhere++
				}
			}
		}
		if elsewhere == 0 {
			t.Error("bypassed, everything goes where it would be steered")
		}
	}
	w.check(sources(20), loopback4, names(sinks[0], sinks[1], nil))
	set(true)
	free()
	w.apply()
	free()
	if !w.state().Bypassed {
		t.Error("the state does not say so")
	}
	set(false)
	w.check(sources(20), loopback4, names(sinks[0], sinks[1], nil))
}

// TestResetWhereTheKernelCannot: sessions are listed with the reason if the kernel cannot close them.
func TestResetWhereTheKernelCannot(t *testing.T) {
	w, _ := collectors(t, spec.Options{Slots: 2})
	w.apply()
	routers := connect(t, sources(12))
	reset.DestroySocket = func(sockdiag.Socket) error { return fmt.Errorf("no: %w", errors.ErrUnsupported) }
	defer func() { reset.DestroySocket = sockdiag.Destroy }()
	seed := uint32(99)
	w.cfg.Services[0].Seed = &seed
	w.apply()
	want, err := w.state().Misplaced(t.Context())
	if err != nil || len(want) == 0 {
		t.Fatalf("%d misplaced, %v", len(want), err)
	}
	listed := 0
	rate := fast
	err = reset.ResetDue(t.Context(), w.root, &rate, nil, func(r reset.Reset) {
		if errors.Is(r.Err, reset.ErrCannotReset) {
			listed++
		}
	})
	if !errors.Is(err, reset.ErrCannotReset) || listed != len(want) {
		t.Errorf("%v; %d listed, want %d", err, listed, len(want))
	}
	for _, r := range routers {
		if !r.up(t, true) {
			t.Errorf("the session of %s is gone", r.addr)
		}
	}
	// They do not stay due.
	if again := w.resetDue(); len(again) != 0 {
		t.Errorf("again: %v", again)
	}
}
