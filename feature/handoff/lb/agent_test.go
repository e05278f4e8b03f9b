// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/internal/nstest"
)

// agents are a load balancer's agent and the agents of two hosts. The test plays the hosts message
// by message.
type agents struct {
	t       *testing.T
	ca      *peertest.Authority
	address string
	name    string        // of the load balancer; "": lb
	hosts   [3]*peer.Conn // by number
	lives   [3]uint64
	scarce  *nstest.Scarce
}

func newAgents(t *testing.T, f *DataPath, hold time.Duration) *agents {
	t.Helper()
	return agentsOf(t, f, hold, [3]uint64{})
}

// agentsOf is newAgents with the instances of the hosts' agents. 0 means a new one.
func agentsOf(t *testing.T, f *DataPath, hold time.Duration, lives [3]uint64) *agents {
	t.Helper()
	s := &agents{t: t, ca: peertest.NewAuthority(t), lives: lives}
	a, err := NewAgent(f, AgentOptions{Name: "lb", TLS: s.ca.TLS("lb"), BufferTimeout: hold, MoveTimeout: hold,
		Backends: []Backend{{Number: 1, Name: "h1"}, {Number: 2, Name: "h2"}}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.address, s.scarce = l.Addr().String(), &nstest.Scarce{Listener: l}
	done := make(chan error, 1)
	go func() { done <- a.Serve(t.Context(), s.scarce) }()
	t.Cleanup(func() {
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	s.connect(1)
	s.connect(2)
	return s
}

func (s *agents) connect(number int) {
	s.t.Helper()
	name := []string{"", "h1", "h2"}[number]
	life := cmp.Or(s.lives[number], peer.NewInstance())
	c, err := peer.Dial(s.t.Context(), s.address, cmp.Or(s.name, "lb"), s.ca.TLS(name), peer.Hello{Number: move.Backend(number), Instance: life, Name: name})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	s.hosts[number] = c
}

// says sends a message from a host about a flow.
func (s *agents) says(number move.Backend, k Key, m move.Message) {
	s.t.Helper()
	f := peer.Frame{Message: m, Flow: peer.Flow{Service: uint16(k.Service), Client: k.Client}}
	if err := s.hosts[number].Send(f); err != nil {
		s.t.Fatal(err)
	}
}

// hears waits for the next message to a host.
func (s *agents) hears(number move.Backend) move.Message {
	s.t.Helper()
	type heard struct {
		f   peer.Frame
		err error
	}
	c := make(chan heard, 1)
	go func() {
		f, err := s.hosts[number].Receive()
		c <- heard{f, err}
	}()
	select {
	case h := <-c:
		if h.err != nil {
			s.t.Fatal(h.err)
		}
		return h.f.Message
	case <-time.After(patience):
		s.t.Fatalf("host %d hears nothing", number)
		return move.Message{}
	}
}

// session returns a client's connection with one exchange behind it.
func session(t *testing.T, s *scene) (c net.Conn, k Key, owner, other move.Backend) {
	t.Helper()
	if !s.served {
		serve(t, s.hosts, service4)
		s.served = true
	}
	c = dial(t, s.client, service4)
	if _, err := ask(c, "a", patience); err != nil {
		t.Fatal(err)
	}
	k = keyOfConn(c, 0)
	fl, err := s.f.Flow(k)
	if err != nil {
		t.Fatal(err)
	}
	return c, k, fl.Owner, 3 - fl.Owner
}

// silent requires that a word gets no answer.
func silent(t *testing.T, c net.Conn, word string) {
	t.Helper()
	if got, err := ask(c, word, 100*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("%q, %v: want no answer", got, err)
	}
}

// answers reads until the client has received these bytes, ignoring the hosts' numbers.
func answers(t *testing.T, c net.Conn, want string) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	for got := ""; got != want; {
		b := make([]byte, 16)
		n, err := c.Read(b)
		if err != nil {
			t.Fatalf("%q, %v: want %q", got, err, want)
		}
		for _, x := range b[:n] {
			if x != '1' && x != '2' {
				got += string(x)
			}
		}
	}
}

func asksHold(epoch move.Epoch, to move.Backend) move.Message {
	return move.Message{Kind: move.Buffer, From: move.AtSource, To: move.AtLoadBalancer, Epoch: epoch, Backend: to}
}

func reclaim(epoch move.Epoch) move.Message {
	return move.Message{Kind: move.Reclaim, From: move.AtSource, To: move.AtLoadBalancer, Epoch: epoch}
}

func flip(epoch move.Epoch) move.Message {
	return move.Message{Kind: move.Flip, From: move.AtDestination, To: move.AtLoadBalancer, Epoch: epoch}
}

// TestAgentReclaim checks a cancelled move: packets wait, and then reach the source.
func TestAgentReclaim(t *testing.T) {
	sc := newScene(t)
	f := sc.f
	c, k, owner, other := session(t, sc)
	s := newAgents(t, f, 30*time.Second)
	s.says(other, k, asksHold(1, owner))
	if m := s.hears(other); m.Kind != move.Buffered || m.OK {
		t.Fatalf("who does not own it asks to hold it: %v", m)
	}
	s.says(owner, k, asksHold(1, other))
	if m := s.hears(owner); m.Kind != move.Buffered || !m.OK {
		t.Fatal(m)
	}
	silent(t, c, "b")
	if _, err := io.WriteString(c, "c"); err != nil {
		t.Fatal(err)
	}
	s.says(owner, k, reclaim(1))
	if m := s.hears(owner); m.Kind != move.Reclaimed || !m.OK || m.Epoch != 2 {
		t.Fatal(m)
	}
	answers(t, c, "bc")
	s.says(other, k, flip(1))
	if m := s.hears(other); m.Kind != move.Flipped || m.OK {
		t.Fatalf("a flip that is late: %v", m)
	}
}

// TestAgentGivesBack checks that the source gets a flow back if the destination's agent dies before
// it answers the client.
func TestAgentGivesBack(t *testing.T) {
	sc := newScene(t)
	f := sc.f
	c, k, owner, other := session(t, sc)
	s := newAgents(t, f, 30*time.Second)
	s.says(owner, k, asksHold(1, other))
	s.hears(owner)
	s.says(other, k, flip(1))
	if m := s.hears(other); m.Kind != move.Flipped || !m.OK {
		t.Fatal(m)
	}
	s.says(owner, k, reclaim(1))
	if m := s.hears(owner); m.OK {
		t.Fatalf("the destination lives: %v", m)
	}
	// Once more, but now the destination's agent dies. The earlier rejection is final, so this
	// takes another session.
	c.Close()
	c, k, owner, other = session(t, sc)
	s.says(owner, k, asksHold(1, other))
	s.hears(owner)
	s.says(other, k, flip(1))
	s.hears(other)
	s.hosts[other].Close()
	s.connect(int(other))
	s.says(other, k, flip(7)) // the load balancer's agent knows the new instance once it answers
	s.hears(other)
	s.says(owner, k, reclaim(1))
	if m := s.hears(owner); m.Kind != move.Reclaimed || !m.OK || m.Epoch != 2 {
		t.Fatal(m)
	}
	if m := s.hears(other); m.Kind != move.Revoked || m.Move != 1 {
		t.Fatal(m)
	}
	if got, err := ask(c, "d", patience); err != nil || got[1:] != "d" {
		t.Errorf("%q, %v", got, err)
	}
}

// TestAgentDeadlines checks that buffering ends at its deadline, and the move later, without any
// message.
func TestAgentDeadlines(t *testing.T) {
	sc := newScene(t)
	f := sc.f
	c, k, owner, other := session(t, sc)
	s := newAgents(t, f, 200*time.Millisecond)
	s.says(owner, k, asksHold(1, other))
	s.hears(owner)
	if got, err := ask(c, "b", patience); err != nil || got[1:] != "b" {
		t.Fatalf("%q, %v", got, err)
	}
	nstest.Eventually(t, func() error {
		fl, err := f.Flow(k)
		if err == nil && fl.To == 0 && fl.Epoch == 2 && !fl.Buffered {
			return nil
		}
		return fmt.Errorf("%+v, %v", fl, err)
	})
}

// TestAgentStrangers checks that a host with another's number is rejected.
func TestAgentStrangers(t *testing.T) {
	f := newScene(t).f
	s := newAgents(t, f, time.Second)
	c, err := peer.Dial(t.Context(), s.address, "lb", s.ca.TLS("h2"), peer.Hello{Number: 1, Instance: 1, Name: "h2"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if f, err := c.Receive(); err == nil {
		t.Errorf("host 2 speaks as host 1: %+v", f)
	}
}

// TestAgentEarlyFlip checks that a Flip waits for a later Buffer message, and the move fails if
// none arrives.
func TestAgentEarlyFlip(t *testing.T) {
	sc := newScene(t)
	c, k, owner, other := session(t, sc)
	s := newAgents(t, sc.f, 30*time.Second)
	s.says(other, k, flip(1))
	s.says(other, k, flip(1))                                                                    // repeated
	s.says(other, k, move.Message{Kind: move.Ask, From: move.AtSource, To: move.AtLoadBalancer}) // answered after it
	if m := s.hears(other); m.Kind != move.Known || m.OK {
		t.Fatalf("%v: want Flip to wait", m)
	}
	s.says(owner, k, asksHold(1, other))
	if m := s.hears(owner); m.Kind != move.Buffered || !m.OK {
		t.Fatal(m)
	}
	m := s.hears(other)
	if m.Kind != move.Flipped || !m.OK || m.Nonce == 0 {
		t.Fatal(m)
	}
	nstest.Eventually(t, func() error { // buffered packets are released after the answer
		fl, err := sc.f.Flow(k)
		if err != nil || fl.Owner != other || fl.Nonce != m.Nonce || fl.Buffered {
			return fmt.Errorf("%+v, %v", fl, err)
		}
		return nil
	})
	c.Close()

	// The next move has no Buffer message in time. Late messages change nothing.
	c, k, owner, other = session(t, sc)
	defer c.Close()
	s.says(other, k, flip(1))
	if m := s.hears(other); m.Kind != move.Flipped || m.OK {
		t.Fatal(m)
	}
	s.says(owner, k, asksHold(1, other))
	if m := s.hears(owner); m.Kind != move.Buffered || m.OK {
		t.Fatal(m)
	}
	fl, err := sc.f.Flow(k)
	if err != nil {
		t.Fatal(err)
	}
	gone := reclaim(1)
	gone.Nonce = fl.Nonce + 2 // of another record
	s.says(owner, k, gone)
	if m := s.hears(owner); m.Kind != move.Reclaimed || m.OK {
		t.Fatal(m)
	}
	gone.Nonce = fl.Nonce
	s.says(owner, k, gone)
	if m := s.hears(owner); m.Kind != move.Reclaimed || !m.OK || m.Epoch != 2 {
		t.Fatal(m)
	}
	if got, err := ask(c, "b", patience); err != nil || got[1:] != "b" {
		t.Errorf("%q, %v", got, err)
	}
}

// TestAgentPassesOn checks that packets of a move with buffering at the source go to the source
// until the Flip.
func TestAgentPassesOn(t *testing.T) {
	sc := newScene(t)
	c, k, owner, other := session(t, sc)
	defer c.Close()
	s := newAgents(t, sc.f, 30*time.Second)
	hold := asksHold(1, other)
	hold.OK = true
	s.says(owner, k, hold)
	if m := s.hears(owner); m.Kind != move.Buffered || !m.OK {
		t.Fatal(m)
	}
	if got, err := ask(c, "b", patience); err != nil || got[1:] != "b" {
		t.Errorf("%q, %v", got, err)
	}
	s.says(other, k, flip(1))
	if m := s.hears(other); m.Kind != move.Flipped || !m.OK {
		t.Fatal(m)
	}
	if fl, err := sc.f.Flow(k); err != nil || fl.Owner != other {
		t.Errorf("%+v, %v", fl, err)
	}
}
