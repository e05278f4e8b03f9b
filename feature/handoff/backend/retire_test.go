// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/clients/go/handoff"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/nstest"
)

// TestForgottenWay removes a backend or service from the load balancer during a move. The session survives at its
// source or destination, and moves again once the backend is known again.
func TestForgottenWay(t *testing.T) {
	for step, server := range map[string]int{stepKept: 1, stepBuffered: 1, stepSent: 1, stepKeptHere: 2, stepFlipped: 2} {
		t.Run(strings.ReplaceAll(step, " ", ""), func(t *testing.T) {
			w := newNetwork(t, 2, at4)
			var did atomic.Bool
			w.step = func(n int, name string) {
				if n != server || name != step || did.Swap(true) {
					return
				}
				a := w.servers[n-1].agent
				if n == 1 {
					a.learn(nil, a.o.Services)
				} else {
					a.learn(a.o.Peers, nil)
				}
			}
			w.run()
			c := w.dial()
			w.mustAsk(c, "hello")
			w.ask(c, 2)
			w.eventually("a member has it", func() bool { return did.Load() && w.has(c) != 0 })
			w.mustAsk(c, "it goes on")
			at := w.has(c)
			for _, s := range w.servers {
				s.agent.learn(s.agent.o.Peers, s.agent.o.Services)
			}
			w.connected()
			w.mustSend(c, 3-at)
			w.mustAsk(c, "and moves again")
			for _, s := range w.servers {
				w.eventually("nothing is on its way, and the old way has gone", func() bool {
					st, err := s.agent.Status()
					return err == nil && st.Sending == 0 && len(st.Stuck) == 0 && s.places() == 2
				})
			}
		})
	}
}

// TestServiceComesBack removes and restores a service while a session waits for a member. The keeper gives it to the
// new keeperClient after the old one has left, and that delivers it. The old one keeps no descriptor.
func TestServiceComesBack(t *testing.T) {
	w := newNetwork(t, 2, at4)
	w.step = func(n int, name string) {
		if n == 2 && name == stepFlipped {
			s := w.servers[1]
			s.member.Close() // from here on it waits for a member
			home := s.agent.known.Load().home[service]
			w.eventually("the keeper has no member", func() bool { return home.members.Load() == 0 })
		}
	}
	w.run()
	c := w.dial()
	w.mustAsk(c, "hello")
	w.ask(c, 2)
	s := w.servers[1]
	a := s.agent
	waits := func() bool { st, err := a.Status(); return err == nil && len(st.Stuck) == 1 }
	w.eventually("it waits for a member", waits)
	old := a.known.Load().home[service]
	a.learn(a.o.Peers, nil)
	a.learn(a.o.Peers, a.o.Services)
	home := a.known.Load().home[service]
	w.eventually("the new place is there", func() bool { return home.maxBytes() > 0 })
	if err := old.post(&wire.Message{Type: wire.Leave}); err != nil { // earlier than its own Leave
		t.Fatal(err)
	}
	var socket unix.Stat_t
	w.eventually("it is the new place's", func() bool {
		_, arriving := a.all()
		for _, r := range arriving {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.home == home && unix.Fstat(r.fd, &socket) == nil
		}
		return false
	})
	s.serve()
	w.mustBeAt(c, 2)
	w.mustAsk(c, "it goes on")
	w.eventually("the old place has gone", func() bool { return s.places() == 2 })
	nstest.Steadily(t, 300*time.Millisecond, func() error { // three times the retry interval of transfer
		a.mu.Lock()
		defer a.mu.Unlock()
		if len(a.waits) > 0 {
			return fmt.Errorf("somebody still hands it on: %v", a.waits)
		}
		return nil
	})
	c.Close()
	w.eventually("nobody has its socket any more", func() bool {
		all, err := filepath.Glob("/proc/self/fd/*")
		return err == nil && !slices.ContainsFunc(all, func(fd string) bool {
			to, _ := os.Readlink(fd)
			return to == fmt.Sprintf("socket:[%d]", socket.Ino)
		})
	})
}

// TestServiceGoesAsASessionComes checks that a session arriving while its service is removed or added is rejected.
func TestServiceGoesAsASessionComes(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a := lonely(t, ca)
	a.own, a.o.Step, a.stats.rejected = peer.Hello{Number: 1, Instance: 5, Name: "own"}, func(string) {}, map[string]uint64{}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	failed := make(chan bool, 1)
	go func() { // the source
		raw, err := l.Accept()
		if err != nil {
			return
		}
		c, err := peer.Accept(t.Context(), raw, ca.TLS("deaf"), peer.Hello{Number: 2, Instance: 7, Name: "deaf"})
		if err != nil {
			return
		}
		defer c.Close()
		for {
			f, err := c.Receive()
			if err != nil {
				return
			}
			failed <- f.Message.Kind == move.Failed
		}
	}()
	c, err := peer.Dial(t.Context(), l.Addr().String(), "deaf", a.o.TLS, a.own)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	with, without := a.known.Load(), &known{}
	half := &known{services: with.services} // a torn view while a service is being added
	for i, know := range []*known{with, without, half} {
		a.known.Store(know)
		id := peer.Flow{Client: netip.MustParseAddrPort("192.0.2.1:5")}
		a.startReceive(c, peer.Frame{Message: move.Message{Kind: move.State, From: move.AtSource, To: move.AtDestination, Epoch: move.Epoch(i + 1)}, Flow: id, Instance: a.own.Instance})
		if !<-failed { // without the service, or without a member
			t.Fatal("it is not refused")
		}
	}
}

// TestLateReclaimed checks that a late answer about an earlier move has no effect.
func TestLateReclaimed(t *testing.T) {
	a := lonely(t, peertest.NewAuthority(t))
	a.stats.rejected = map[string]uint64{}
	id := peer.Flow{Client: netip.MustParseAddrPort("192.0.2.1:5")}
	s := &sending{id: id, src: move.Source{Phase: move.Reclaiming, Epoch: 5}}
	a.sending[id] = s
	a.toSource(nil, peer.Frame{Flow: id, Message: move.Message{Kind: move.Reclaimed, To: move.AtSource, Move: 3}})
	if s.doubt || a.stats.rejected["departure"] != 0 {
		t.Errorf("in doubt: %v, refused: %v", s.doubt, a.stats.rejected)
	}
}

// has returns the number of the backend with a client's session at this moment; 0: none.
func (w *world) has(c *client) int {
	for _, s := range w.servers {
		for _, session := range s.member.Member().Sessions() {
			if session.RemoteAddr().String() == c.LocalAddr().String() {
				return s.number
			}
		}
	}
	return 0
}

// places returns the number of the agent's members of the service at the keeper.
func (s *server) places() (n int) {
	s.w.t.Helper()
	r, err := handoff.Status(s.w.t.Context(), s.keeper)
	if err != nil || len(r.Services) != 1 {
		s.w.t.Fatal(r, err)
	}
	for _, m := range r.Services[0].Members {
		if wire.Elsewhere(m.Name) {
			n++
		}
	}
	return n
}

// TestStuck checks the report of stuck sessions with reasons.
func TestStuck(t *testing.T) {
	w := newWorld(t, 2, at4)
	a := w.servers[0].agent
	id := peer.Flow{Client: netip.MustParseAddrPort("192.0.2.1:5")}
	home := a.known.Load().home[service]
	old := time.Now().Add(-time.Minute)
	s := &sending{id: id, by: home, since: old, back: true}
	a.mu.Lock()
	a.sending[id] = s
	a.mu.Unlock()
	for _, c := range []struct {
		change func()
		want   string
	}{
		{func() { a.waitsFor(id, wire.ErrNoPeer) }, wire.ErrNoPeer.Error()},
		{func() { s.mu.Lock(); s.back, s.asking, s.asked = false, true, time.Now(); s.mu.Unlock() }, "the load balancer has not answered"},
		{func() { w.stopF(); w.eventually("it has gone", func() bool { return a.lb.conn() == nil }) }, "is not connected"},
	} {
		c.change()
		st, err := a.Status()
		if err != nil || len(st.Stuck) != 1 || !strings.Contains(st.Stuck[0].Reason, c.want) || st.Stuck[0].For < time.Minute || st.Stuck[0].Client != id.Client.String() {
			t.Errorf("%+v, %v: want %q", st.Stuck, err, c.want)
		}
	}
	a.mu.Lock()
	delete(a.sending, id)
	a.mu.Unlock()
}
