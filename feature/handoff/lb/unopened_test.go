// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb/bpf"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
	"github.com/weir-project/weir/kernel"
)

// madeUp returns a client whose packets are all forged by the test.
func (s *scene) madeUp(t *testing.T, port uint16) Key {
	t.Helper()
	at := netip.MustParseAddr("10.1.0.77")
	s.nobody(t, at)
	return Key{Client: netip.AddrPortFrom(at, port)}
}

// forgets ages a flow by 20 s until it is forgotten. Its backend may repeat an answer.
func (s *scene) forgets(t *testing.T, k Key) {
	t.Helper()
	nstest.Eventually(t, func() error {
		change(t, s.f, k, func(v *bpf.LBLbFlow) { v.Seen = kernel.Monotonic() - uint64(unanswered) })
		if n, err := s.f.Forget(0, time.Hour); n != 1 || err != nil {
			return fmt.Errorf("%d are forgotten, %v: want the one that was never opened", n, err)
		}
		return nil
	})
}

// TestOpensByDroppedACK checks that neither a silently dropped ACK opens a flow, nor the backend's
// ACK of a segment outside the window.
func TestOpensByDroppedACK(t *testing.T) {
	sc := newScene(t)
	serve(t, sc.hosts, service4)
	k := sc.madeUp(t, 5555)
	forge(t, sc, k.Client, service4, tcpSYN)
	becomes(t, sc.f, k, "answered", func(fl Flow) bool { return fl.Out > 0 })
	for i, s := range []segment{{flags: tcpACK, wrong: true}, {flags: tcpACK, fragment: true}, {flags: tcpACK | tcpPSH, wrong: true}, {flags: tcpACK | tcpFIN, wrong: true}} {
		s.forge(t, sc, k.Client, service4)
		becomes(t, sc.f, k, fmt.Sprintf("never opened, after %+v", s), func(fl Flow) bool { return fl.In == uint64(2+i) && fl.Never(k) })
	}
	sc.acknowledges(t, k)
	sc.forgets(t, k)
}

// acknowledges forges segments outside the window of an unopened connection until its backend has
// answered some.
func (s *scene) acknowledges(t *testing.T, k Key) {
	t.Helper()
	before, err := s.f.Flow(k)
	if err != nil && !errors.Is(err, errNoFlow) {
		t.Fatal(err)
	}
	nstest.Eventually(t, func() error {
		segment{seq: 1}.forge(t, s, k.Client, service4)
		if fl, err := s.f.Flow(k); err != nil || fl.Out < before.Out+3 { // at most one ACK in half a second, and repeated answers
			return fmt.Errorf("%+v, %v: want answers", fl, err)
		}
		return nil
	})
	if fl, err := s.f.Flow(k); err != nil || !fl.Never(k) {
		t.Errorf("%+v, %v: want it never opened", fl, err)
	}
}

// TestOpensMidway checks that a forgotten flow whose backend still waits for the client's ACK is
// not open when it is learned again.
func TestOpensMidway(t *testing.T) {
	sc := newScene(t)
	serve(t, sc.hosts, service4)
	k := sc.madeUp(t, 5555)
	forge(t, sc, k.Client, service4, tcpSYN)
	becomes(t, sc.f, k, "answered", func(fl Flow) bool { return fl.Out > 0 })
	if err := sc.f.maps.LbFlows.Delete(k.Raw()); err != nil {
		t.Fatal(err)
	}
	sc.acknowledges(t, k)
	sc.forgets(t, k)
}

// TestOpensByOwner checks that a flow opens by the owner's data, its end, or an ACK of the client's
// data. This holds if the client's packets pass another load balancer, and if the flow was learned
// midway.
func TestOpensByOwner(t *testing.T) {
	sc := newScene(t)
	k := sc.madeUp(t, 5555)
	for name, c := range map[string]struct {
		said  []segment
		opens segment
	}{
		"an ACK of data":         {[]segment{{flags: tcpSYN | tcpACK, ack: 7}, {flags: tcpACK, ack: 7}}, segment{flags: tcpACK, ack: 8}},
		"the numbers' end":       {[]segment{{flags: tcpSYN | tcpACK, ack: 1<<32 - 1}, {flags: tcpACK, ack: 1<<32 - 2}}, segment{flags: tcpACK, ack: 3}},
		"midway":                 {[]segment{{flags: tcpACK, ack: 7}, {flags: tcpACK, ack: 6}}, segment{flags: tcpACK, ack: 8}},
		"midway, data":           {nil, segment{flags: tcpACK | tcpPSH, ack: 7}},
		"its end":                {[]segment{{flags: tcpSYN | tcpACK, ack: 7}}, segment{flags: tcpACK | tcpFIN, ack: 7}},
		"a SYN begins anew":      {[]segment{{flags: tcpSYN | tcpACK, ack: 7}, {flags: tcpSYN | tcpACK, ack: 700}, {flags: tcpACK, ack: 700}}, segment{flags: tcpACK, ack: 701}},
		"a reset does, too":      {[]segment{{flags: tcpACK, ack: 7}, {flags: tcpRST}, {flags: tcpACK, ack: 700}}, segment{flags: tcpACK, ack: 701}},
		"a reset and end is one": {[]segment{{flags: tcpACK, ack: 7}, {flags: tcpRST | tcpFIN}}, segment{flags: tcpACK | tcpPSH, ack: 7}},
	} {
		for i, s := range append(c.said, c.opens) {
			s.forge(t, &scene{client: sc.hosts[0]}, service4, k.Client)
			becomes(t, sc.f, k, fmt.Sprintf("%s: open by the last one alone, and not by %d", name, i), func(fl Flow) bool {
				return fl.Out == uint64(1+i) && fl.Never(k) == (i < len(c.said))
			})
		}
		if err := sc.f.maps.LbFlows.Delete(k.Raw()); err != nil {
			t.Fatal(err)
		}
	}
}

// sinks reads everything at both hosts and answers nothing.
func sinks(t *testing.T, hosts [2]*netns.Handle, at netip.AddrPort) {
	t.Helper()
	for _, ns := range hosts {
		do(t, ns, func() error {
			l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
			if err != nil {
				return err
			}
			t.Cleanup(func() { l.Close() })
			go func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					go func() {
						defer c.Close()
						_, _ = io.Copy(io.Discard, c)
					}()
				}
			}()
			return nil
		})
	}
}

// TestOpensByClientsData checks that a connection opens once its backend has acknowledged the
// client's first byte, even without data from the backend.
func TestOpensByClientsData(t *testing.T) {
	sc := newScene(t)
	sinks(t, sc.hosts, service4)
	c := dial(t, sc.client, service4)
	k := keyOfConn(c, 0)
	if fl, err := sc.f.Flow(k); err != nil || !fl.Never(k) {
		t.Errorf("%+v, %v: want it not open yet", fl, err)
	}
	if _, err := io.WriteString(c, "a"); err != nil {
		t.Fatal(err)
	}
	becomes(t, sc.f, k, "open", func(fl Flow) bool { return !fl.Never(k) })
	change(t, sc.f, k, func(v *bpf.LBLbFlow) { v.Seen = kernel.Monotonic() - uint64(unanswered) })
	stays(t, sc.f, k)
}

// TestIdleFromTheBeginning checks that a connection without data stays known by its agent's report,
// and follows the hash without one.
func TestIdleFromTheBeginning(t *testing.T) {
	sc := newScene(t)
	serve(t, sc.hosts, service4)
	a := &Agent{f: sc.f, o: AgentOptions{IdleTimeout: time.Hour}}
	for _, told := range []bool{true, false} {
		c := dial(t, sc.client, service4)
		k := keyOfConn(c, 0)
		becomes(t, sc.f, k, "answered", func(fl Flow) bool { return fl.In > 1 && fl.Out > 0 && fl.Never(k) })
		fl, err := sc.f.Flow(k)
		if err != nil {
			t.Fatal(err)
		}
		if told {
			if err := a.still(k, fl, peer.FlowRecord{}); err != nil {
				t.Fatal(err)
			}
			change(t, sc.f, k, func(v *bpf.LBLbFlow) { v.Seen = kernel.Monotonic() - uint64(unanswered) })
			stays(t, sc.f, k)
		} else {
			sc.forgets(t, k)
		}
		if got, err := ask(c, "a", patience); err != nil || got[0] != byte('0'+fl.Owner) {
			t.Errorf("%q, %v: want an answer of backend %d", got, err, fl.Owner)
		}
		becomes(t, sc.f, k, "open", func(fl Flow) bool { return !fl.Never(k) })
	}
}
