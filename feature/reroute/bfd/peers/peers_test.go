// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/featuretest"
	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/feature/reroute/frrtest"
	"github.com/weir-project/weir/feature/reroute/liveness"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/kerneltest"
)

func TestMain(m *testing.M) { nstest.Main(m) }

// world is a namespace with FRR neighbours in another one.
type world struct {
	testing.TB
	here, there *netns.Handle
	root        *kernel.Root
	ref         string     // of here
	said        nstest.Log // by Run
	stop        func()     // stops Run
}

func newWorld(t testing.TB, cable bool) *world {
	t.Helper()
	frrtest.Need(t, "bfdd")
	if err := kernel.Require(engine.Needs()); err != nil {
		t.Skip("need: kernel", err)
	}
	w := &world{TB: t, here: nstest.NewNetns(t), there: nstest.NewNetns(t), root: kernel.OpenRoot(nstest.BPFFS + "/" + strings.ReplaceAll(t.Name(), "/", "-"))}
	w.ref = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), w.here.FD())
	if cable {
		w.cable()
	}
	t.Cleanup(func() {
		w.locked(func(l *kernel.WriteLock) error { return Remove(context.Background(), l) })
		if left, err := w.root.Instances(liveness.Name); err != nil || len(left) > 0 {
			t.Errorf("left over: %v, %v", left, err)
		}
	})
	return w
}

func (w *world) cable() {
	nstest.Cable(w, w.here, "w0", w.there, "w0")
	nstest.Address(w, w.here, "w0", netip.MustParsePrefix("10.9.0.1/16"), netip.MustParsePrefix("fd09::1/64"))
	nstest.Address(w, w.there, "w0", netip.MustParsePrefix("10.9.0.2/16"), netip.MustParsePrefix("fd09::2/64"))
}

// acquaint sets the link address of each end at the other, so sessions do not wait for Run, nor Run for a lock.
func (w *world) acquaint() {
	w.Helper()
	devices := [2]netlink.Link{}
	for i, ns := range []*netns.Handle{w.here, w.there} {
		if err := ns.Do(func() (err error) { devices[i], err = netlink.LinkByName("w0"); return err }); err != nil {
			w.Fatal(err)
		}
	}
	for i, ns := range []*netns.Handle{w.here, w.there} {
		n := &netlink.Neigh{LinkIndex: devices[i].Attrs().Index, State: netlink.NUD_PERMANENT,
			IP: net.IPv4(10, 9, 0, byte(2-i)), HardwareAddr: devices[1-i].Attrs().HardwareAddr}
		if err := ns.Do(func() error { return netlink.NeighSet(n) }); err != nil {
			w.Fatal(err)
		}
	}
}

func (w *world) locked(f func(l *kernel.WriteLock) error) {
	w.Helper()
	l, err := w.root.Lock(context.Background())
	if err != nil {
		w.Fatal(err)
	}
	defer l.Unlock()
	if err := f(l); err != nil {
		w.Fatal(err)
	}
}

// apply applies a configuration and returns the steps taken.
func (w *world) apply(wants ...Config) (steps []string) {
	w.Helper()
	steps, err := featuretest.ApplyPlan(context.Background(), w.root, nil, func() (feature.Plan, error) {
		st, err := ReadState(w.root)
		if err != nil {
			return feature.Plan{}, err
		}
		return Plan(context.Background(), st, wants)
	})
	if err != nil {
		w.Fatal(err)
	}
	return steps
}

// A plan without forwarding for a neighbour's echo packets warns in any case.
func TestEchoWantsForwarding(t *testing.T) {
	w := newWorld(t, true)
	want := Config{Netns: w.ref, Sessions: []Session{
		{Name: "v4", Device: "w0", Peer: netip.MustParseAddr("10.9.0.2"), Interval: time.Second, Multiplier: 3, Echo: time.Second},
		{Name: "v6", Device: "w0", Peer: netip.MustParseAddr("fd09::2"), Interval: time.Second, Multiplier: 3, Echo: time.Second},
		{Name: "no-echo", Device: "w0", Peer: netip.MustParseAddr("10.9.0.3"), Interval: time.Second, Multiplier: 3},
	}}
	for _, forwarding := range []string{"0", "1"} {
		if err := w.here.Do(func() error {
			return errors.Join(os.WriteFile("/proc/sys/net/ipv4/conf/w0/forwarding", []byte(forwarding), 0), os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte(forwarding), 0))
		}); err != nil {
			t.Fatal(err)
		}
		st, err := ReadState(w.root)
		if err != nil {
			t.Fatal(err)
		}
		plan, err := Plan(t.Context(), st, []Config{want})
		if err != nil {
			t.Fatal(err)
		}
		warned := strings.Join(plan.Warnings, "\n")
		if forwarding == "1" && warned != "" {
			t.Errorf("with forwarding: %s", warned)
		}
		if forwarding == "0" && (len(plan.Warnings) != 2 || !strings.Contains(warned, "net/ipv4/conf/w0/forwarding=1") || !strings.Contains(warned, "net/ipv6/conf/all/forwarding=1")) {
			t.Errorf("without forwarding: %q", plan.Warnings)
		}
	}
}

// A plan warns of a peer unable to answer, with the reason.
func TestPeersThatCannotAnswer(t *testing.T) {
	w := newWorld(t, true)
	for peer, want := range map[string]string{
		"10.9.0.1": "10.9.0.1 is an address of this host",
		"10.7.0.2": "no address of w0 is in the network of 10.7.0.2",
		"10.9.0.2": "",
		"fd09::1":  "fd09::1 is an address of this host",
	} {
		plan, err := Plan(t.Context(), State{}, []Config{{Netns: w.ref, Sessions: []Session{
			{Name: "s", Device: "w0", Peer: netip.MustParseAddr(peer), Interval: time.Second, Multiplier: 3}}}})
		if text := strings.Join(plan.Warnings, "\n"); err != nil || (want == "") != (text == "") || !strings.Contains(text, want) {
			t.Errorf("%s: %q, %v", peer, text, err)
		}
	}
}

func (w *world) run() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- Run(ctx, w.root, slog.New(slog.NewTextHandler(io.MultiWriter(w.Output(), &w.said), nil)))
	}()
	w.stop = func() {
		cancel()
		if err := <-done; err != nil {
			w.Error(err)
		}
	}
}

func (w *world) session(name string) SessionState {
	w.Helper()
	st, err := ReadState(w.root)
	if err != nil {
		w.Fatal(err)
	}
	for _, s := range st.Sessions {
		if s.Name == name {
			return s
		}
	}
	w.Fatalf("no session %s: %+v", name, st.Sessions)
	return SessionState{}
}

func (w *world) eventually(what string, f func() bool) {
	w.Helper()
	nstest.Within(w, 2*time.Minute, func() error {
		if !f() {
			return errors.New("not yet: " + what)
		}
		return nil
	})
}

// Times of sessions. Daemons stall for seconds on a busy machine, so the detection time is long.
const (
	every = 40 * time.Millisecond
	times = 150
)

// neighbours returns bfdd's configuration of sessions from there to here.
func neighbours(pairs ...string) string {
	out := "bfd\n"
	for _, p := range pairs {
		local, peer, _ := strings.Cut(p, " ")
		out += fmt.Sprintf(" peer %s local-address %s interface w0\n  detect-multiplier %d\n  receive-interval %d\n  transmit-interval %d\n exit\n",
			peer, local, times, every.Milliseconds(), every.Milliseconds())
	}
	return out
}

func squeezed(s string) string { return strings.ReplaceAll(s, " ", "") }

// Configured sessions continue without a process, change, start once their device exists, and send farewells.
func TestConfigured(t *testing.T) {
	w := newWorld(t, false)
	four := Session{Name: "four", Device: "w0", Peer: netip.MustParseAddr("10.9.0.2"), Interval: every, Multiplier: times}
	six := four
	six.Name, six.Peer = "six", netip.MustParseAddr("fd09::2")
	c := Config{Netns: w.ref, Sessions: []Session{four, six}}
	if steps := w.apply(c); len(steps) != 1 {
		t.Fatalf("%q", steps)
	}
	if s := w.session("four"); !strings.Contains(s.Problem, "w0") {
		t.Errorf("without its device: %+v", s)
	}
	w.run()
	w.cable()
	r := frrtest.Start(t, w.there, "far", map[string]string{"bfdd": neighbours("10.9.0.2 10.9.0.1", "fd09::2 fd09::1")})
	up := func(name string) func() bool { return func() bool { return w.session(name).State == bfd.Up } }
	w.eventually("both sessions are up", func() bool { return up("four")() && up("six")() })
	for name, peer := range map[string]string{"four": "10.9.0.2", "six": "fd09::2"} {
		w.eventually("it is told of "+name, func() bool {
			return w.said.Has(`level=INFO msg="BFD session is up" path=` + name + " interface=w0 peer=" + peer)
		})
	}
	w.stop()
	downs := w.session("four").Downs
	if steps := w.apply(c); len(steps) != 0 {
		t.Errorf("applied again: %q", steps)
	}
	shown := func() string { return squeezed(r.Vtysh("show bfd peers json")) }
	c.Sessions[0].Interval = 2 * every
	if steps := w.apply(c); len(steps) != 1 || !strings.Contains(steps[0], "session four changed") {
		t.Errorf("%q", steps)
	}
	w.eventually("the interval is agreed on", func() bool { return strings.Contains(shown(), `"remote-transmit-interval":80`) })
	if s := w.session("four"); s.State != bfd.Up || s.Downs != downs {
		t.Errorf("after another interval: %+v", s)
	}
	c.Sessions = c.Sessions[:1]
	w.apply(c)
	w.eventually("bfdd hears that the other one ends on purpose", func() bool { return strings.Contains(shown(), "neighborsignaledsessiondown") })
	if s := w.session("four"); s.State != bfd.Up || s.Downs != downs {
		t.Errorf("after the other session's end: %+v", s)
	}
	if steps := w.apply(); len(steps) != 1 {
		t.Errorf("%q", steps)
	}
	w.eventually("bfdd hears of the last one", func() bool { return strings.Count(shown(), `"status":"up"`) == 0 })
}

// Run logs each session by name: a session up before its name is recorded, up before Run starts, or down meanwhile.
func TestTold(t *testing.T) {
	w := newWorld(t, true)
	w.acquaint()
	far := Config{Netns: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), w.there.FD()), Sessions: []Session{
		{Name: "far", Device: "w0", Peer: netip.MustParseAddr("10.9.0.1"), Interval: every, Multiplier: times}}}
	near := Config{Netns: w.ref}
	w.apply(near, far)
	w.run()
	time.Sleep(time.Second) // usually Run is at near by then; without this the result must be the same
	t.Cleanup(func() { kerneltest.OnStep(nil) })
	kerneltest.OnStep(func(step string) {
		if step != "peers:sessions" {
			return
		}
		w.eventually("the session is up before it is recorded", func() bool {
			found, err := engine.Published{Scope: fmt.Sprint(w.here.Inode())}.Sessions(w.root)
			if err != nil {
				t.Error(err)
			}
			for _, st := range found {
				return st.State == bfd.Up
			}
			return false
		})
		time.Sleep(2500 * time.Millisecond) // Run has checked twice by now
	})
	near.Sessions = []Session{{Name: "near", Device: "w0", Peer: netip.MustParseAddr("10.9.0.2"), Interval: every, Multiplier: times}}
	w.apply(near, far)
	kerneltest.OnStep(nil)
	up := func(name, peer string) []string {
		return []string{`level=INFO msg="BFD session is up" path=` + name + " interface=w0 peer=" + peer}
	}
	w.eventually("it is told of both", func() bool { return w.said.Has(up("near", "10.9.0.2")...) && w.said.Has(up("far", "10.9.0.1")...) })
	if w.said.Has(`path=""`) {
		t.Error("a session without a name was told of")
	}
	w.stop()

	w.said = nstest.Log{}
	w.run()
	w.eventually("who runs next tells of both", func() bool { return w.said.Has(up("near", "10.9.0.2")...) && w.said.Has(up("far", "10.9.0.1")...) })
	w.stop()

	w.said = nstest.Log{}
	w.apply(Config{Netns: w.ref}, far)
	w.eventually("the other end is down", func() bool { return w.session("far").State != bfd.Up })
	w.run()
	w.eventually("it is told, though nobody ran then", func() bool {
		return w.said.Has(`level=WARN msg="BFD session is down" path=far interface=w0 peer=10.9.0.1`, `peer_says="admin-down, administratively down"`)
	})
	w.stop()
}

// A bfdd with 200 sessions lets weir run them. The bfdd at the other end runs its own.
func TestHandedOver(t *testing.T) {
	const sessions = 200
	w := newWorld(t, true)
	near, far := []string{"fd09::1 fd09::2"}, []string{"fd09::2 fd09::1"}
	for i := range sessions {
		here, there := fmt.Sprintf("10.9.1.%d", 1+i), fmt.Sprintf("10.9.2.%d", 1+i)
		near, far = append(near, here+" "+there), append(far, there+" "+here)
	}
	for i, ns := range []*netns.Handle{w.here, w.there} {
		err := ns.Do(func() error {
			l, err := netlink.LinkByName("w0")
			for n := range sessions {
				if err == nil {
					err = netlink.AddrAdd(l, &netlink.Addr{IPNet: netlink.NewIPNet(netip.MustParseAddr(fmt.Sprintf("10.9.%d.%d", 1+i, 1+n)).AsSlice())})
				}
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	slower := func(text string) string { // 200 sessions at full speed are too many for a daemon
		return strings.ReplaceAll(text, fmt.Sprintf("interval %d\n", every.Milliseconds()), "interval 300\n")
	}
	a := frrtest.Start(t, w.here, "near", map[string]string{"bfdd": slower(neighbours(near...))}, "--dplaneaddr", "unix:{home}/dplane")
	b := frrtest.Start(t, w.there, "far", map[string]string{"bfdd": slower(neighbours(far...))})
	w.apply(Config{Netns: w.ref, FRR: "unix:" + a.Home + "/dplane"})
	w.run()
	up := func(r *frrtest.Router) int {
		return strings.Count(squeezed(r.Vtysh("show bfd peers json")), `"status":"up"`)
	}
	all := func() bool {
		n, f := up(a), up(b)
		t.Logf("up: %d at the near bfdd, %d at the far one", n, f)
		return n == sessions+1 && f == sessions+1
	}
	w.eventually("both show all sessions up", all)
	counters := squeezed(a.Vtysh("show bfd peer 10.9.2.7 local-address 10.9.1.7 interface w0 counters json"))
	if strings.Contains(counters, `"control-packet-input":0,`) || strings.Contains(counters, `"control-packet-output":0,`) {
		t.Errorf("counters: %s", counters)
	}
	b.Vtysh("configure terminal", "bfd", "peer 10.9.1.7 local-address 10.9.2.7 interface w0", "shutdown")
	w.eventually("the near bfdd hears that one is shut down", func() bool { return up(a) == sessions })
	b.Vtysh("configure terminal", "bfd", "peer 10.9.1.7 local-address 10.9.2.7 interface w0", "no shutdown")
	w.eventually("and that it is up again", func() bool { return up(a) == sessions+1 })
	w.stop() // the connection ends: a bfdd with a data plane cannot run sessions without it
	w.eventually("the near bfdd knows that nobody runs its sessions", func() bool { return up(a) == 0 })
	w.run()
	w.eventually("all are up again with weir", all)
	w.stop()
}

// A plan, and so a dry run, reports an unreadable key.
func TestPlanReadsKeys(t *testing.T) {
	w := newWorld(t, true)
	missing := filepath.Join(t.TempDir(), "key")
	want := Config{Netns: w.ref, Sessions: []Session{{Name: "v4", Device: "w0", Peer: netip.MustParseAddr("10.9.0.2"), Interval: time.Second, Multiplier: 3, KeyFile: missing}}}
	if _, err := Plan(t.Context(), State{}, []Config{want}); err == nil || !strings.Contains(err.Error(), missing) {
		t.Errorf("%v: want the key file that is missing", err)
	}
}

// A process waiting for the lock while a command removes BFD creates nothing.
func TestRemovedMeanwhile(t *testing.T) {
	w := newWorld(t, true)
	w.apply(Config{Netns: w.ref, Sessions: []Session{{Name: "s", Device: "w0", Peer: netip.MustParseAddr("10.9.0.2"), Interval: time.Second, Multiplier: 3}}})
	now, _, _, err := readPublished(w.root)
	if err != nil || len(now) != 1 {
		t.Fatalf("%v, %v", now, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	waits := map[string]func(p published, scope string) error{
		"a new session": func(p published, _ string) error { return p.startNew(ctx, w.root) },
		"a runner": func(p published, scope string) error {
			config := &atomic.Pointer[Config]{}
			config.Store(&p.Config)
			log := slog.New(slog.DiscardHandler)
			return configured(ctx, w.root, p, config, &told{r: w.root, scope: scope, log: log, up: map[uint32]bool{}}, log)
		},
	}
	done := make(chan error, len(waits))
	w.locked(func(l *kernel.WriteLock) error {
		for scope, p := range now {
			if err := p.remove(t.Context(), l, scope); err != nil {
				return err
			}
			for _, f := range waits {
				go func() { done <- f(p, scope) }()
			}
		}
		return nil
	})
	time.AfterFunc(2*time.Second, cancel) // ends a runner that continues wrongly
	for range waits {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if all, _, err := engine.All(w.root); err != nil || len(all) > 0 {
		t.Errorf("there is BFD again: %+v, %v", all, err)
	}
}
