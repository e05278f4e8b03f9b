// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature/reroute/links"
	"github.com/weir-project/weir/feature/reroute/liveness/bpf"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/kernel/probe"
)

// word returns the link state read by the data path of a namespace.
func (p *pair) word(ns *netns.Handle, device string) (w links.State) {
	p.t.Helper()
	o, err := p.root.Open(instance(netnsScope(ns)), pinLinks)
	if err != nil {
		p.t.Fatal(err)
	}
	defer o.Close()
	if err := o.Maps[pinLinks].Lookup(links.Slot(nstest.Ifindex(p.t, ns, device)), &w); err != nil {
		p.t.Fatal(err)
	}
	return w
}

// Both ends find a working link up in both directions. They detect a cut of either direction, and distinguish the
// direction where possible. After the cut they find the link up again.
func TestCuts(t *testing.T) {
	p := newPair(t)
	a, b := p.sessions(10 * time.Millisecond)
	p.apply(p.w.NameA, a)
	p.apply(p.w.NameB, b)
	p.within(patience, "up", bothUp)
	for _, c := range []struct {
		name     string
		a, b     bool // ends losing incoming packets
		okA, okB [2]Direction
	}{
		{name: "both ways", a: true, b: true, okA: [2]Direction{Unknown, Broken}, okB: [2]Direction{Unknown, Broken}},
		{name: "from a to b", b: true, okA: [2]Direction{Broken, Works}, okB: [2]Direction{Unknown, Broken}},
		{name: "from b to a", a: true, okA: [2]Direction{Unknown, Broken}, okB: [2]Direction{Broken, Works}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.a {
				cut(t, p.w.A, nstest.WireDevice, true)
			}
			if c.b {
				cut(t, p.w.B, nstest.WireDevice, true)
			}
			p.within(patience, "down", func(a, b SessionState) bool {
				return a.Phase == Down && b.Phase == Down && [2]Direction{a.Out, a.In} == c.okA && [2]Direction{b.Out, b.In} == c.okB
			})
			p.words(links.Probe)
			if c.a {
				cut(t, p.w.A, nstest.WireDevice, false)
			}
			if c.b {
				cut(t, p.w.B, nstest.WireDevice, false)
			}
			p.within(patience, "up again", bothUp)
			p.words(0)
		})
	}
	st := p.state().session("to-b")
	if st.RTT.Min <= 0 || st.RTT.P50 < st.RTT.Min || st.RTT.P99 < st.RTT.P50 || st.Flaps == 0 {
		t.Errorf("%+v", st)
	}
}

// A link without any packet from the peer is not down, because the peer may not be configured yet.
func TestNeverHeard(t *testing.T) {
	p := newPair(t)
	a, _ := p.sessions(10 * time.Millisecond)
	p.apply(p.w.NameA, a)
	nstest.Eventually(t, func() error {
		if p.state().session("to-b").Sent < 20 {
			return errors.New("it does not probe")
		}
		return nil
	})
	if s := p.state().session("to-b"); s.Phase != Init || p.word(p.w.A, nstest.WireDevice).Reasons() != 0 {
		t.Errorf("%+v", s)
	}
}

// A peer ending its session is no failed link.
func TestFarewell(t *testing.T) {
	p := newPair(t)
	a, b := p.sessions(10 * time.Millisecond)
	p.apply(p.w.NameA, a)
	p.apply(p.w.NameB, b)
	p.within(patience, "up", bothUp)
	p.apply(p.w.NameB) // an empty configuration
	init := func() error {
		if s := p.state().session("to-b"); s.Phase != Init {
			return fmt.Errorf("%+v", s)
		}
		return nil
	}
	nstest.Eventually(t, init)
	nstest.Steadily(t, 200*time.Millisecond, init) // many times the detection time
	p.steady("a peer that ended its session")
	p.apply(p.w.NameB, b)
	p.within(patience, "up again", bothUp)
}

// Mode echo probes a kernel router without weir through its plain End segment.
func TestEcho(t *testing.T) { probeByEcho(t) }

// Mode echo needs no SRv6 functions. Mode active names them.
func TestEchoWithoutSegmentFunctions(t *testing.T) {
	missing := &kernel.NeedError{Need: probe.SegmentFunction, Err: errors.New("not in this test")}
	has := segmentFunction
	t.Cleanup(func() { segmentFunction = has })
	segmentFunction = func() error { return missing }
	probeByEcho(t)
	p := newPair(t)
	a, _ := p.sessions(10 * time.Millisecond)
	if _, err := applyTo(p.root, Config{Netns: p.w.NameA, Sessions: []Session{a}}); !errors.Is(err, missing) {
		t.Errorf("applied: %v, want %v", err, missing)
	}
}

func probeByEcho(t *testing.T) {
	p := newPair(t)
	inside(t, p.w.B, func() error {
		l, err := netlink.LinkByName(nstest.WireDevice)
		if err != nil {
			return err
		}
		e := &netlink.SEG6LocalEncap{Action: 1} // SEG6_LOCAL_ACTION_END
		e.Flags[1] = true
		r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: netlink.NewIPNet(functionB.AsSlice()), Encap: e}
		return netlink.RouteAdd(r)
	})
	a, _ := p.sessions(10 * time.Millisecond)
	a.Mode, a.Function = Echo, netip.Addr{}
	p.apply(p.w.NameA, a)
	is := func(want Phase) {
		t.Helper()
		nstest.Eventually(t, func() error {
			if p.state().session("to-b").Phase != want {
				return fmt.Errorf("never %s: %+v", want, p.state())
			}
			return nil
		})
	}
	is(Up)
	cut(t, p.w.B, nstest.WireDevice, true)
	is(Down)
	cut(t, p.w.B, nstest.WireDevice, false)
	is(Up)
}

// Peers are reached by compressed lists (NEXT-C-SID, RFC 9800). One peer is a plain router behind two of its
// functions in one container. The other runs weir, with its function last in a container.
func TestCompressed(t *testing.T) {
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("need: tool ip")
	}
	p := newPair(t)
	const container = "encap seg6local action End flavors next-csid lblen 32 nflen 16 dev " + nstest.WireDevice
	routes := func() error {
		for _, function := range []string{"fc00:b:1::/48", "fc00:b:2::/48"} {
			args := strings.Fields("-6 route add " + function + " " + container)
			if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
				return fmt.Errorf("%w: %s", err, out)
			}
		}
		return nil
	}
	if err := p.w.B.Do(routes); err != nil {
		t.Skip("need: kernel 6.1 (NEXT-C-SID):", err)
	}
	a, b := p.sessions(10 * time.Millisecond)
	echo := a
	echo.Name, echo.ID, echo.Mode, echo.Function, echo.Observe = "echo", 8, Echo, netip.Addr{}, true
	echo.Peer = netip.MustParseAddr("fc00:b:1:2::")
	b.Function = netip.MustParseAddr("fc00:b:bf::")
	a.Peer = netip.MustParseAddr("fc00:b:1:bf::")
	p.apply(p.w.NameA, a, echo)
	p.apply(p.w.NameB, b)
	all := func(want Phase) {
		t.Helper()
		is := func() bool {
			st := p.state()
			return !slices.ContainsFunc(st.Sessions, func(s SessionState) bool { return s.Phase != want })
		}
		nstest.Eventually(t, func() error {
			if !is() {
				return fmt.Errorf("never all %s: %+v", want, p.state())
			}
			return nil
		})
	}
	all(Up)
	cut(t, p.w.A, nstest.WireDevice, true)
	cut(t, p.w.B, nstest.WireDevice, true)
	all(Down)
	cut(t, p.w.A, nstest.WireDevice, false)
	cut(t, p.w.B, nstest.WireDevice, false)
	all(Up)
}

// Parallel links are judged separately: one is cut, and the other's probes and answers do not count for it. One link
// has link-local next hops.
func TestParallel(t *testing.T) {
	p := newPair(t)
	nstest.Cable(t, p.w.A, "w1", p.w.B, "w1")
	addressOn(t, p.w.A, "w1", "fd78::1/64")
	addressOn(t, p.w.B, "w1", "fd78::2/64")
	addressOn(t, p.w.A, "w1", "fe80::a/64")
	addressOn(t, p.w.B, "w1", "fe80::b/64")
	a, b := p.sessions(10 * time.Millisecond)
	a1, b1 := a, b
	a1.Name, a1.ID, a1.Device, a1.Via, a1.Source = "second-to-b", 8, "w1", netip.MustParseAddr("fe80::b"), netip.MustParseAddr("fd78::1")
	b1.Name, b1.ID, b1.Device, b1.Via, b1.Source = "second-to-a", 8, "w1", netip.MustParseAddr("fe80::a"), netip.MustParseAddr("fd78::2")
	p.apply(p.w.NameA, a, a1)
	p.apply(p.w.NameB, b, b1)
	phases := func() (out [4]Phase) {
		st := p.state()
		for i, name := range []string{"to-b", "to-a", "second-to-b", "second-to-a"} {
			out[i] = st.session(name).Phase
		}
		return out
	}
	until := func(want [4]Phase) {
		t.Helper()
		nstest.Eventually(t, func() error {
			if phases() != want {
				return fmt.Errorf("never %v: %v", want, p.state())
			}
			return nil
		})
	}
	until([4]Phase{Up, Up, Up, Up})
	cut(t, p.w.B, "w1", true)
	until([4]Phase{Up, Up, Down, Down})
	if w := p.word(p.w.A, "w0"); w.Reasons() != 0 {
		t.Errorf("the other link's word is %v", w)
	}
	cut(t, p.w.B, "w1", false)
	until([4]Phase{Up, Up, Up, Up})
}

// Verdicts do not wait for the next tick. The sender's falls when the last unanswered probe has waited for its grace,
// the probed end's when its window is over. Ticks are one interval apart.
func TestBetweenTicks(t *testing.T) {
	const interval, most = 10 * time.Millisecond, 3 * time.Millisecond
	p := newPair(t)
	a, b := p.sessions(interval)
	a.Mode, a.Function = Sender, netip.Addr{}
	b.Mode, b.Peer, b.Via, b.Source = Passive, netip.Addr{}, netip.Addr{}, netip.Addr{}
	a.StableFor, a.StableMax = 100*time.Millisecond, 100*time.Millisecond
	b.StableFor, b.StableMax = a.StableFor, a.StableMax
	a.Grace = 3 * time.Millisecond
	p.apply(p.w.NameA, a)
	p.apply(p.w.NameB, b)
	state := func(ns *netns.Handle) (v bpf.LivenessLivenessState) {
		o, err := p.root.Open(instance(netnsScope(ns)), pinStates)
		if err != nil {
			t.Fatal(err)
		}
		defer o.Close()
		if err := o.Maps[pinStates].Lookup(uint32(0), &v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	// A busy host is late, and its stall delays a verdict. Without timers the sender would be 7 ms late each time.
	const tries, want = 60, 5
	inTime := [2]int{}
	for n := 0; n < tries && min(inTime[0], inTime[1]) < want; n++ {
		p.within(patience, "up", bothUp)
		cut(t, p.w.A, nstest.WireDevice, true)
		cut(t, p.w.B, nstest.WireDevice, true)
		p.within(patience, "down", func(a, b SessionState) bool { return a.Phase == Down && b.Phase == Down })
		va, vb := state(p.w.A), state(p.w.B)
		late := [2]time.Duration{
			time.Duration(va.Sender.Since-va.SentAt[(va.Answered+3)%64]) - max(a.Grace, time.Duration(va.RttMean+4*va.RttDev)),
			time.Duration(vb.Peer.Since-vb.LastFresh) - 4*interval,
		}
		t.Logf("late by %v", late)
		for i, d := range late {
			if d < 0 {
				t.Errorf("a verdict came %v early", -d)
			} else if d < most {
				inTime[i]++
			}
		}
		cut(t, p.w.A, nstest.WireDevice, false)
		cut(t, p.w.B, nstest.WireDevice, false)
	}
	if min(inTime[0], inTime[1]) < want {
		t.Errorf("verdicts less than %v late, of who sends and who is probed: %v", most, inTime)
	}
}

// Detection continues without any process of weir.
func TestWithoutProcess(t *testing.T) {
	p := newPair(t)
	a, b := p.sessions(10 * time.Millisecond)
	p.appliedElsewhere(p.w.NameA, a)
	p.appliedElsewhere(p.w.NameB, b)
	p.within(patience, "up", bothUp)
	for tries := 1; ; tries++ {
		before := p.state().session("to-b").Sent
		// Stop this process too: a child wakes it.
		c := nstest.Child("wake", os.Getpid())
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		if err := syscall.Kill(os.Getpid(), syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		for time.Since(begin) < time.Second {
			time.Sleep(time.Millisecond)
		}
		want := uint32(time.Since(begin) / (20 * time.Millisecond))
		if err := c.Wait(); err != nil {
			t.Fatal(err)
		}
		sent := p.state().session("to-b").Sent - before
		if sent >= want {
			break
		}
		if tries == 5 { // a stalled host sends nothing, but not in every try
			t.Fatalf("%d probes, want at least %d", sent, want)
		}
		t.Logf("%d probes, want at least %d: tried again", sent, want)
	}
	p.steady("nobody runs")
}
