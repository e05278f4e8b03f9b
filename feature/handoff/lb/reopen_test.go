// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/lb/flow"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// unwell directs new flows to the other backend, as the agent does for an unwell one.
func (s *scene) unwell(t *testing.T, number move.Backend) {
	t.Helper()
	var all []Backend
	for _, b := range s.f.backends {
		b.Weight, b.Unwell = 1, b.Number == number
		if b.Unwell {
			b.Weight = 0
		}
		all = append(all, b)
	}
	if err := s.f.SetBackends(all); err != nil {
		t.Fatal(err)
	}
}

// bothEnds marks a flow as closed by both sides, but too fresh to be forgotten.
func bothEnds(v *bpf.LBLbFlow) {
	v.Flags, v.Seen = flow.FinIn|flow.FinOut, kernel.Monotonic()+uint64(time.Hour)
}

// down disconnects a backend's device.
func down(t *testing.T, ns *netns.Handle, device string) {
	t.Helper()
	do(t, ns, func() error {
		l, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		return netlink.LinkSetDown(l)
	})
}

// ended returns a session reset by its client, with a dead backend. Nonzero flags replace the
// flow's.
func (s *scene) ended(t *testing.T, flags uint32) (k Key, owner, other move.Backend) {
	t.Helper()
	c, k, owner, other := session(t, s)
	if err := c.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	c.Close()
	becomes(t, s.f, k, "ended", func(fl Flow) bool { return fl.Ended })
	if flags != 0 {
		change(t, s.f, k, func(v *bpf.LBLbFlow) { v.Flags = flags })
	}
	down(t, s.hosts[owner-1], "w0")
	return k, owner, other
}

// begin starts a connection from a port used before, and sends its result later.
func (s *scene) begin(t *testing.T, k Key) <-chan error {
	t.Helper()
	out := make(chan error, 1)
	go func() {
		out <- s.client.Do(func() error {
			d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(k.Client), Timeout: patience}
			c, err := d.Dial("tcp", service4.String())
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = ask(c, "b", patience)
			return err
		})
	}()
	return out
}

// TestReopenedUnwell checks that a client reconnecting from the port of an ended flow is served by
// another backend if the former one is unwell. The agent may notice it only after the first SYN.
func TestReopenedUnwell(t *testing.T) {
	for name, c := range map[string]struct {
		flags        uint32
		late, silent bool
	}{"both ends": {flags: flow.FinIn | flow.FinOut}, "reset by the backend": {flags: flow.WasReset | flow.ResetOut}, "late": {flags: flow.FinIn | flow.FinOut, late: true},
		"reset long ago": {flags: flow.WasReset, silent: true}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sc := newScene(t)
			k, owner, other := sc.ended(t, c.flags)
			was, err := sc.f.Flow(k)
			if err != nil {
				t.Fatal(err)
			}
			if !c.late {
				sc.unwell(t, owner)
			}
			if c.silent {
				sc.endsAfter(t, time.Second)
				quieten(t, sc.f, k)
				if n, err := sc.f.Forget(time.Second, time.Hour); n != 0 || err != nil {
					t.Errorf("%d flows are forgotten, %v", n, err)
				}
			}
			served := sc.begin(t, k)
			if c.late {
				becomes(t, sc.f, k, "opened anew", func(fl Flow) bool { return !fl.Ended && fl.In > was.In })
				sc.unwell(t, owner)
			}
			if err := <-served; err != nil {
				t.Error(err)
			}
			fl, err := sc.f.Flow(k)
			if err != nil || fl.Owner != other || fl.Epoch != was.Epoch+1 || fl.Nonce == was.Nonce || fl.Nonce == 0 || fl.Opening || fl.Incarnation != 0 {
				t.Errorf("%+v, %v: want backend %d's in epoch %d", fl, err, other, was.Epoch+1)
			}
		})
	}
}

// TestOpenedUnwell checks that a new connection is reassigned as soon as its silent backend is
// known to be unwell.
func TestOpenedUnwell(t *testing.T) {
	sc := newScene(t)
	k, owner, other := sc.ended(t, 0)
	if err := sc.f.maps.LbFlows.Delete(k.Raw()); err != nil {
		t.Fatal(err)
	}
	served := sc.begin(t, k)
	becomes(t, sc.f, k, "learned", func(fl Flow) bool { return fl.Owner == owner })
	sc.unwell(t, owner)
	if err := <-served; err != nil {
		t.Error(err)
	}
	if fl, err := sc.f.Flow(k); err != nil || fl.Owner != other {
		t.Errorf("%+v, %v", fl, err)
	}
}

// TestReopenedStays checks that a live session stays at its backend, well or not, in spite of
// forged segments. The backend answers one SYN in half a second (tcp_invalid_ratelimit), or none
// while it is stopped.
func TestReopenedStays(t *testing.T) {
	for name, limit := range map[string]string{"answers": "500", "stands still": "3600000"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sc := newScene(t)
			c, k, owner, other := session(t, sc)
			do(t, sc.hosts[owner-1], func() error {
				return os.WriteFile("/proc/sys/net/ipv4/tcp_invalid_ratelimit", []byte(limit), 0)
			})
			sc.unwell(t, owner)
			sc.endsAfter(t, time.Minute)
			forges := func(flags byte) {
				t.Helper()
				before, err := sc.f.Flow(k)
				if err != nil {
					t.Fatal(err)
				}
				forge(t, sc, k.Client, service4, flags)
				becomes(t, sc.f, k, "seen", func(fl Flow) bool { return fl.In > before.In })
			}
			opened, err := sc.f.Flow(k)
			if err != nil {
				t.Fatal(err)
			}
			forges(tcpSYN)
			becomes(t, sc.f, k, "answered", func(fl Flow) bool { return fl.Out > opened.Out })
			for _, segments := range [][]byte{{tcpSYN}, {tcpRST, tcpSYN, 0, tcpSYN, 0, tcpSYN}, {tcpRST, 0, tcpSYN, 0, tcpSYN}, {tcpRST, tcpRST, 0, tcpFIN, tcpSYN, 0, tcpSYN}} {
				for _, flags := range segments {
					if flags == 0 { // silence
						change(t, sc.f, k, func(v *bpf.LBLbFlow) { v.Seen -= uint64(2 * time.Second) })
						continue
					}
					forges(flags)
				}
				if fl, err := sc.f.Flow(k); err != nil || fl.Owner != owner || fl.Epoch != 0 {
					t.Errorf("segments %v: %+v, %v", segments, fl, err)
				}
				if got, err := ask(c, "b", patience); err != nil || got[0] != byte('0'+owner) {
					t.Fatalf("segments %v: %q, %v", segments, got, err)
				}
			}
			for what, v := range map[string]func(*bpf.LBLbFlow){
				"it moves":         func(v *bpf.LBLbFlow) { v.Word |= uint64(other) << flow.ToAt },
				"it is held":       func(v *bpf.LBLbFlow) { v.Word |= flow.BufferingBit },
				"it is overridden": func(v *bpf.LBLbFlow) { v.Flags |= flow.Pinned },
			} {
				change(t, sc.f, k, func(f *bpf.LBLbFlow) { f.Flags = flow.FinIn | flow.FinOut; v(f) })
				forges(tcpSYN)
				change(t, sc.f, k, func(f *bpf.LBLbFlow) {
					if move, _ := flow.Unword(f.Word); move.Owner != owner || move.Epoch != 0 {
						t.Errorf("%s: %+v", what, move)
					}
					f.Word, f.Flags = uint64(owner), 0
				})
			}
			if got, err := ask(c, "c", patience); err != nil || got[0] != byte('0'+owner) {
				t.Errorf("in the end: %q, %v", got, err)
			}
		})
	}
}

// TestExplainReopened checks that the explanation of a SYN in a known flow matches its treatment.
func TestExplainReopened(t *testing.T) {
	sc, root := published(t)
	_, k, owner, other := session(t, sc)
	for _, ns := range sc.hosts { // nobody answers
		down(t, ns, "w0")
	}
	sc.unwell(t, owner)
	sc.endsAfter(t, 1500*time.Millisecond)
	goes := func(name, says string, want move.Backend, v func(*bpf.LBLbFlow)) {
		t.Helper()
		const in = 10
		change(t, sc.f, k, func(f *bpf.LBLbFlow) {
			f.Word, f.Flags, f.In, f.Until, f.Seen = uint64(owner), 0, in, 0, kernel.Monotonic()+uint64(time.Hour)
			v(f)
		})
		said, text := explains(t, root, sc.middle, "c", "tcp", k.Client, service4)
		if backendOf(t, said, "by hN") != byte('0'+want) || !strings.Contains(text, says) {
			t.Errorf("%s: %+v\n%s", name, said, text)
		}
		forge(t, sc, k.Client, service4, tcpSYN)
		becomes(t, sc.f, k, name, func(fl Flow) bool { return fl.In != in })
		if fl, err := sc.f.Flow(k); err != nil || fl.Owner != want {
			t.Errorf("%s: %+v, %v: want backend %d", name, fl, err, want)
		}
	}
	old := func(v *bpf.LBLbFlow) { v.Seen = kernel.Monotonic() - uint64(time.Second) }
	longReset := func(v *bpf.LBLbFlow) { v.Flags, v.Seen = flow.WasReset, kernel.Monotonic()-uint64(2*time.Second) }
	for _, c := range []struct {
		name, says string
		want       move.Backend
		v          func(*bpf.LBLbFlow)
	}{
		{"lives", "the flow is known", owner, old},
		{"both ends", "has ended at", other, bothEnds},
		{"the client's reset", "the same backend", owner, func(v *bpf.LBLbFlow) { v.Flags = flow.WasReset }},
		{"the client's reset long ago", "has not reported it", other, longReset},
		{"the agent has told of it", "without an answer for 600ms", owner, func(v *bpf.LBLbFlow) { longReset(v); v.Flags |= flow.Named }},
		{"and the backend has ended it", "without an answer for 600ms", owner, func(v *bpf.LBLbFlow) { longReset(v); v.Flags |= flow.OwnerReset }},
		{"the backend's reset", "without an answer for 600ms", owner, func(v *bpf.LBLbFlow) { v.Flags = flow.WasReset | flow.ResetOut }},
		{"unanswered", "has left a SYN without an answer", other, func(v *bpf.LBLbFlow) { v.Flags = flow.NoAnswer; old(v) }},
		{"not yet", "without an answer for 600ms", owner, func(v *bpf.LBLbFlow) { v.Flags = flow.NoAnswer }},
		{"overridden", "weir lb override", owner, func(v *bpf.LBLbFlow) { bothEnds(v); v.Flags |= flow.Pinned }},
		{"moves", "it moves to", owner, func(v *bpf.LBLbFlow) { bothEnds(v); v.Word |= uint64(other) << flow.ToAt }},
		{"held", "the flow is known", owner, func(v *bpf.LBLbFlow) { bothEnds(v); v.Word |= flow.BufferingBit }},
		{"has moved", "the flow is known", owner, func(v *bpf.LBLbFlow) { bothEnds(v); justMoved(v, other) }},
	} {
		goes(c.name, c.says, c.want, c.v)
	}
	sc.drained(t, owner)
	goes("drained", "has not reported it", other, longReset)
	if err := sc.f.SetBackends([]Backend{sc.f.backends[other-1]}); err != nil {
		t.Fatal(err)
	}
	if err := sc.f.removeBackend(owner); err != nil {
		t.Fatal(err)
	}
	goes("removed", "was removed", other, old)
	change(t, sc.f, k, func(v *bpf.LBLbFlow) { v.Word = uint64(owner); justMoved(v, other) })
	if v, text := explains(t, root, sc.middle, "c", "tcp", k.Client, service4); !strings.Contains(v.Result, fmt.Sprintf("no location of backend number %d", owner)) {
		t.Errorf("removed, and has moved: %+v\n%s", v, text)
	}
}

// justMoved marks a flow as just moved, so the previous backend may reclaim it.
func justMoved(v *bpf.LBLbFlow, before move.Backend) {
	v.Word, v.Until = v.Word|uint64(before)<<flow.BeforeAt, kernel.Monotonic()
}

// TestReopenedPartner checks that the partner learns of the new owner and does not restore the
// former one. Without the later epoch its lesser name would win.
func TestReopenedPartner(t *testing.T) {
	p := newPairOfLBs(t, [2][2]int{{0, 1}, {1, 0}})
	p.by(1)
	p.start(0)
	p.start(1)
	c := dial(t, p.client, service4)
	if got, err := ask(c, "a", patience); err != nil || got[0] != '1' {
		t.Fatalf("%q, %v", got, err)
	}
	k := keyOfConn(c, 0)
	p.knows(0, k, func(fl Flow, err error) bool { return err == nil && fl.Owner == 1 })
	sc := &scene{client: p.client, f: p.lbs[1]}
	sc.unwell(t, 1)
	down(t, p.hosts[1], "w1") // no answer: the flow stays open
	change(t, sc.f, k, bothEnds)
	forge(t, sc, k.Client, service4, tcpSYN)
	p.knows(0, k, func(fl Flow, err error) bool { return err == nil && fl.Owner == 2 })
	nstest.Steadily(t, 1500*time.Millisecond, func() error { // by then each has reported everything
		fl, err := sc.f.Flow(k)
		if err == nil && fl.Owner != 2 {
			err = fmt.Errorf("%+v: want backend 2's", fl)
		}
		return err
	})
}

// TestUnwellTold checks that the agent marks a backend as unwell in the data path while another one
// is well, and Explain reports the consequence.
func TestUnwellTold(t *testing.T) {
	sc, root := published(t)
	_, k, owner, other := session(t, sc)
	ca, _, at := manage(t, sc, AgentOptions{Register: true})
	one := register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1})
	two := register(t, ca, at, "h2", 2, peer.Registration{Address: netip.MustParseAddr("10.2.1.2"), Weight: 1})
	told := func(want bool) {
		t.Helper()
		nstest.Eventually(t, func() error {
			for n := range move.Backend(2) {
				var b bpf.LBLbBackend
				if err := sc.f.maps.LbBackends.Lookup(uint32(n+1), &b); err != nil {
					return err
				}
				if (b.Unwell == 1) != (want && n+1 == owner) || b.Ifindex == 0 {
					return errors.New("the data path does not know yet")
				}
			}
			return nil
		})
	}
	one.hears(t, func(p peer.Peers) bool { return len(ups(p)) == 2 })
	told(false)
	map[move.Backend]*registrar{1: one, 2: two}[owner].c.Close()
	told(true)
	waitOwners(t, sc, service4, string(rune('0'+other)))
	change(t, sc.f, k, bothEnds)
	v, text := explains(t, root, sc.middle, "c", "tcp", k.Client, service4)
	if v.Stage != feature.StageTC || backendOf(t, v, "by hN") != byte('0'+other) || !strings.Contains(text, "is not well") {
		t.Errorf("%+v\n%s", v, text)
	}
}

// removal starts an agent with only the backend other than owner.
func (s *scene) removal(t *testing.T, owner move.Backend, register bool) {
	t.Helper()
	n := 3 - owner
	manage(t, s, AgentOptions{Register: register, Managed: []Managed{{Number: n, Name: fmt.Sprintf("h%d", n), Address: netip.AddrFrom4([4]byte{10, 2, byte(n - 1), 2}), Weight: 1}}})
	waitOwners(t, s, service4, string(rune('0'+n)))
}

// TestRemovedBackend checks that flows of a removed backend are reassigned by any packet of the
// client. Datagrams and SYNs are served. Other segments are reset.
func TestRemovedBackend(t *testing.T) {
	sc := bySource(t)
	from := dialUDP(t, sc.client, flows4)
	first, err := askUDP(from, "a")
	if err != nil {
		t.Fatal(err)
	}
	owner := move.Backend(first[0] - '0')
	var sessions []net.Conn
	for len(sessions) < 2 {
		if c, _, of, _ := session(t, sc); of == owner {
			sessions = append(sessions, c)
		}
	}
	again := keyOfConn(sessions[1], 0)
	if err := sessions[1].(*net.TCPConn).SetLinger(0); err != nil { // a reset frees the port at once
		t.Fatal(err)
	}
	sessions[1].Close()
	down(t, sc.hosts[owner-1], "w0")
	sc.removal(t, owner, false)
	nstest.Eventually(t, func() error {
		got, err := askUDP(from, "b") // from the same source, without long pauses
		if err == nil && got[0] == first[0] {
			err = fmt.Errorf("%q: served by the removed backend", got)
		}
		return err
	})
	if got, err := ask(sessions[0], "c", patience); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%q, %v: want a reset by the other backend", got, err)
	}
	if err := <-sc.begin(t, again); err != nil {
		t.Error("a SYN:", err)
	}
	for _, k := range []Key{client4(), again} {
		if fl, err := sc.f.Flow(k); err != nil || fl.Owner != 3-owner || fl.Epoch != 1 || fl.To != 0 {
			t.Errorf("%+v, %v: want backend %d's in epoch 1", fl, err, 3-owner)
		}
	}
}

// TestRemovedBackendStays checks that a moving, buffered or overridden flow keeps its removed
// backend, and so do flows of a backend that may register again.
func TestRemovedBackendStays(t *testing.T) {
	sc := newScene(t)
	_, k, owner, other := session(t, sc)
	down(t, sc.hosts[owner-1], "w0")
	one := sc.f.backends[other-1]
	if err := sc.f.SetBackends([]Backend{one}); err != nil {
		t.Fatal(err)
	}
	sent := func(what string, want move.Backend) {
		t.Helper()
		before, err := sc.f.Flow(k)
		if err != nil {
			t.Fatal(err)
		}
		forge(t, sc, k.Client, service4, tcpACK)
		becomes(t, sc.f, k, "seen: "+what, func(fl Flow) bool { return fl.Owner == want && (fl.In > before.In || want == other) })
	}
	sent("it may come back", owner)
	if err := sc.f.removeBackend(owner); err != nil {
		t.Fatal(err)
	}
	for what, v := range map[string]func(*bpf.LBLbFlow){
		"it moves":         func(v *bpf.LBLbFlow) { v.Word |= uint64(other) << flow.ToAt },
		"it is held":       func(v *bpf.LBLbFlow) { v.Word |= flow.BufferingBit },
		"it is overridden": func(v *bpf.LBLbFlow) { v.Flags |= flow.Pinned },
		"it has moved":     func(v *bpf.LBLbFlow) { justMoved(v, other) },
	} {
		change(t, sc.f, k, v)
		sent(what, owner)
		change(t, sc.f, k, func(f *bpf.LBLbFlow) { f.Word, f.Flags = uint64(owner), 0 })
	}
	change(t, sc.f, k, func(v *bpf.LBLbFlow) {
		justMoved(v, other)
		v.Until -= uint64(46 * time.Second)
	})
	sent("in the end", other)
}

// TestRemovedMayRegister checks that an agent waits for an unknown backend to register before it
// removes the backend.
func TestRemovedMayRegister(t *testing.T) {
	const n = 7
	a := &Agent{members: map[move.Backend]*member{1: {}}, o: AgentOptions{IdleTimeout: time.Hour}, began: time.Now()}
	if a.removed(1) || !a.removed(n) {
		t.Error("without registering: want what no file names removed, and nothing else")
	}
	a.o.Register = true
	if a.removed(n) {
		t.Error("it may register")
	}
	a.began = time.Now().Add(-2 * time.Hour)
	if !a.removed(n) {
		t.Error("it has not registered within idle_timeout")
	}
	a.pair = newPairing()
	a.pair.conn = &peer.Conn{}
	if a.removed(n) {
		t.Error("the partner has not said which backends it knows")
	}
	a.pair.names = map[move.Backend]string{n: "h7"}
	if a.removed(n) {
		t.Error("the partner knows it")
	}
	a.pair.conn, a.pair.lost = nil, time.Now()
	if a.removed(n) {
		t.Error("the partner may be back in a moment")
	}
	a.pair.lost = time.Now().Add(-time.Minute)
	if !a.removed(n) {
		t.Error("the partner is gone")
	}
}
