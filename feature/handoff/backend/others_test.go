// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/weir-project/weir/clients/go/handoff"
)

// TestDrainCountsUnnamedServices checks the drain of a backend with a member of a service unknown to the load
// balancer. Its immovable sessions are counted, with the service's name.
func TestDrainCountsUnnamedServices(t *testing.T) {
	w := newNetwork(t, 1, at4)
	cert, key, signers := w.ca.Files("lb")
	w.play(w.middle, "lb", fmt.Sprintf(`
listen: 0.0.0.0:7946
tls: {certificate: %s, key: %s, ca: %s}
devices: [c, s1]
register: true
services:
  talk: {number: 3, listen: [tcp %s]}
`, cert, key, signers, w.at))
	s := w.servers[0]
	s.keep()
	w.playBackend(0, s)
	var l *handoff.Listener
	w.in(s.ns, func() (err error) {
		l, err = handoff.Listen(t.Context(), "tcp", w.at.String(), handoff.Options{Service: "chat", Name: "0", Keeper: s.keeper})
		return err
	})
	defer l.Close()
	w.eventually("the load balancer knows the backend", func() bool { st := s.status(); return st.LB && st.Keeper })
	c := w.dial()
	defer c.Close()
	session, err := l.AcceptSession()
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	var last Drained
	w.in(s.ns, func() error {
		err = DrainHere(t.Context(), "s1", Draining{AllowOutage: true}, func(d Drained) { last = d })
		return nil
	})
	if err != nil || last.Left != 0 || last.Others != 1 || last.Unnamed["chat"] != 1 {
		t.Fatalf("%+v, %v: want one connection, of a member of chat", last, err)
	}
}

// TestDrainCountsOtherPrograms checks that a drain counts connections of programs without handoff, and waits for
// their end if requested.
func TestDrainCountsOtherPrograms(t *testing.T) {
	w := newNetwork(t, 1, at4)
	other := netip.AddrPortFrom(at4.Addr(), at4.Port()+1)
	cert, key, signers := w.ca.Files("lb")
	w.play(w.middle, "lb", fmt.Sprintf(`
listen: 0.0.0.0:7946
tls: {certificate: %s, key: %s, ca: %s}
devices: [c, s1]
register: true
services:
  talk: {number: 3, listen: [tcp %s]}
  web: {number: 4, listen: [tcp %s]}
`, cert, key, signers, w.at, other))
	s := w.servers[0]
	s.keep()
	w.playBackend(0, s)
	s.serve()
	var l net.Listener
	w.in(s.ns, func() (err error) { l, err = net.Listen("tcp", other.String()); return err })
	defer l.Close()
	w.eventually("both services are served", func() bool { st := s.status(); return st.LB && st.Keeper && len(st.Unserved) == 0 })
	var c net.Conn
	w.in(w.client, func() (err error) { c, err = net.Dial("tcp", other.String()); return err })
	defer c.Close()
	served, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	talk := w.dial() // a session at the keeper is counted separately
	defer talk.Close()
	if err := talk.ask("hello"); err != nil {
		t.Fatal(err)
	}

	drain := func(ctx context.Context, how Draining, progress func(Drained)) (err error) {
		w.in(s.ns, func() error { err = DrainHere(ctx, "s1", how, progress); return nil })
		return err
	}
	talk.Close()
	w.eventually("the session has ended", func() bool { return len(s.member.Member().Sessions()) == 0 })
	var last Drained
	if err := drain(t.Context(), Draining{AllowOutage: true}, func(d Drained) { last = d }); err != nil || last.Others != 1 || last.Left != 0 {
		t.Fatalf("%+v, %v: want one connection of another program", last, err)
	}
	closed := false
	err = drain(t.Context(), Draining{All: true, AllowOutage: true}, func(d Drained) {
		if last = d; d.Others == 1 && d.Reason == "" && !closed {
			closed = true // while the drain waits
			served.Close()
			c.Close()
		}
	})
	if err != nil || !closed || last.Others != 0 {
		t.Fatalf("%+v, %v: want the end of the drain with the connection's", last, err)
	}
}
