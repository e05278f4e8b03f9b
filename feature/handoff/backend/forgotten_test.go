// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"net"
	"testing"

	"github.com/weir-project/weir/feature/handoff/lb"
)

// dialFrom connects a client from a port.
func (w *world) dialFrom(port uint16) *client {
	w.t.Helper()
	var c net.Conn
	w.in(w.client, func() (err error) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{Port: int(port)}, Timeout: longest}
		c, err = d.Dial("tcp", w.at.String())
		return err
	})
	return &client{Conn: c}
}

// forget makes the load balancer forget all flows, as after a reboot.
func (w *world) forget() {
	w.t.Helper()
	if _, err := w.lb.Forget(0, 0); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) mustAsk(c *client, word string) {
	w.t.Helper()
	if err := c.ask(word); err != nil {
		w.t.Fatal(err)
	}
}

// roundTrip moves a session twice, back to the first backend. It then remembers its epoch.
func (w *world) roundTrip(c *client) {
	w.t.Helper()
	w.mustAsk(c, "hello")
	w.mustSend(c, 2)
	w.mustAsk(c, "there")
	w.mustSend(c, 1)
	w.mustAsk(c, "and back")
}

// TestLearnedAnew moves a session that the load balancer has learned again in epoch 0.
func TestLearnedAnew(t *testing.T) {
	w := newWorld(t, 2, at4)
	c := w.dialFrom(5555)
	defer c.Close()
	w.roundTrip(c)
	w.forget()
	w.mustAsk(c, "it is learned anew")
	w.mustSend(c, 2)
	w.mustAsk(c, "there again")
	if st, err := w.servers[0].agent.Status(); err != nil || st.Returned != 0 {
		t.Errorf("%+v, %v", st, err)
	}
}

// TestUnknownStays checks that a session unknown to the load balancer stays unharmed, and moves at the second
// request.
func TestUnknownStays(t *testing.T) {
	w := newWorld(t, 2, at4)
	c := w.dialFrom(5555)
	defer c.Close()
	w.roundTrip(c)
	w.forget()
	w.ask(c, 2)
	w.eventually("it has come back", func() bool {
		st, err := w.servers[0].agent.Status()
		return err == nil && st.Returned == 1 && st.Sending == 0 && st.Rejected["departure"] == 1
	})
	w.mustBeAt(c, 1)
	w.mustSend(c, 2) // asks the load balancer, which learns the owner
	w.mustAsk(c, "there again")
}

// TestUnknownMoves moves a session without earlier moves that the load balancer never knew, or has forgotten.
func TestUnknownMoves(t *testing.T) {
	w := newWorld(t, 2, at4)
	c := w.dialFrom(5555)
	defer c.Close()
	w.mustAsk(c, "hello")
	w.forget()
	w.mustSend(c, 2)
	w.mustAsk(c, "there")
}

// TestSamePort checks that a session inherits nothing from an earlier one of the same port.
func TestSamePort(t *testing.T) {
	w := newWorld(t, 2, at4)
	c := w.dialFrom(5555)
	w.roundTrip(c)
	for _, s := range w.servers[0].member.Member().Sessions() {
		if err := s.CloseWrite(); err != nil { // before the client, to free its port
			t.Fatal(err)
		}
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Fatal(n, err)
	}
	c.Close()
	w.eventually("the session has ended, and its moves", func() bool {
		for _, s := range w.servers {
			if st, err := s.agent.Status(); err != nil || st.Sending+st.Receiving > 0 {
				return false
			}
		}
		return len(w.servers[0].member.Member().Sessions()) == 0
	})
	w.forget()
	c = w.dialFrom(5555)
	defer c.Close()
	w.mustAsk(c, "hello")
	w.mustSend(c, 2)
	w.mustAsk(c, "there")
	fl, err := w.lb.Flow(lb.Key{Client: c.LocalAddr().(*net.TCPAddr).AddrPort()})
	if err != nil || fl.Epoch != 1 {
		t.Errorf("%+v, %v: want its own epochs", fl, err)
	}
	if st, err := w.servers[0].agent.Status(); err != nil || st.Returned != 0 {
		t.Errorf("%+v, %v", st, err)
	}
}
