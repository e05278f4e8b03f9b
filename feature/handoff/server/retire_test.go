// SPDX-License-Identifier: Apache-2.0

package server

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// A server, or a service, that the front end does not tell of any more while a session is on its way takes no session along: it goes
// on where it is, or comes to its member, and moves again when the server is known again.
func TestForgottenWay(t *testing.T) {
	for step, server := range map[string]int{stepKept: 1, stepHeld: 1, stepSent: 1, stepKeptHere: 2, stepFlipped: 2} {
		t.Run(strings.ReplaceAll(step, " ", ""), func(t *testing.T) {
			w := newNetwork(t, 2, at4)
			did := false // from one goroutine, after another
			w.step = func(n int, name string) {
				if n != server || name != step || did {
					return
				}
				did = true
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
			w.eventually("a member has it", func() bool { return did && w.has(c) != 0 })
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
					return err == nil && st.Leaving == 0 && len(st.Stuck) == 0 && s.places() == 2
				})
			}
		})
	}
}

// has is the server whose member has a client's session at this moment; 0: none.
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

// places is how many members of the service the agent is to the keeper.
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

// What stands still is told, and why.
func TestStuck(t *testing.T) {
	w := newWorld(t, 2, at4)
	a := w.servers[0].agent
	id := peer.Flow{Client: netip.MustParseAddrPort("192.0.2.1:5")}
	home := a.known.Load().home[service]
	old := time.Now().Add(-time.Minute)
	s := &leaving{id: id, by: home, since: old, back: true}
	a.mu.Lock()
	a.leaving[id] = s
	a.mu.Unlock()
	for _, c := range []struct {
		change func()
		want   string
	}{
		{func() { a.waitsFor(id, wire.ErrNoPeer) }, wire.ErrNoPeer.Error()},
		{func() { s.mu.Lock(); s.back, s.asking, s.asked = false, true, time.Now(); s.mu.Unlock() }, "the front end has not answered"},
		{func() { w.stopF(); w.eventually("it has gone", func() bool { return a.front.conn() == nil }) }, "is not connected"},
	} {
		c.change()
		st, err := a.Status()
		if err != nil || len(st.Stuck) != 1 || !strings.Contains(st.Stuck[0].Why, c.want) || st.Stuck[0].For < time.Minute || st.Stuck[0].Client != id.Client.String() {
			t.Errorf("%+v, %v: want %q", st.Stuck, err, c.want)
		}
	}
	a.mu.Lock()
	delete(a.leaving, id)
	a.mu.Unlock()
}
