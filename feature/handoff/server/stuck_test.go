// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
)

// deaf is an agent that says hello, and reads nothing more.
func deaf(t *testing.T, ca *peertest.Authority) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			if c, err := peer.Accept(t.Context(), raw, ca.TLS("deaf"), peer.Hello{Number: 2, Instance: 7, Name: "deaf"}); err == nil {
				t.Cleanup(func() { c.Close() })
			}
		}
	}()
	return l.Addr().String()
}

func lonely(t *testing.T, ca *peertest.Authority) *Agent {
	a := &Agent{o: Options{TLS: ca.TLS("own"), Log: slog.New(slog.DiscardHandler), Patience: time.Millisecond}, workers: newWorkers(t.Context().Done()),
		leaving: map[peer.Flow]*leaving{}, arriving: map[peer.Flow]*arriving{}, attended: map[*peer.Conn]bool{},
		loads: map[string]map[string]uint32{}, unsaid: map[string]bool{}, says: make(chan struct{}, 1)}
	a.front = &link{a: a}
	s := Service{Name: service}
	a.known.Store(&known{services: map[string]Service{service: s}, home: map[string]*place{service: {a: a, service: s}}})
	return a
}

// An agent that stands still takes what is sent until nothing fits any more: before that it is noticed that it answers nothing.
func TestAgentThatSaysNothing(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a := lonely(t, ca)
	there, gone := make(chan struct{}, 100), make(chan struct{}, 100)
	k := &link{a: a, to: Remote{Name: "deaf", Number: 2, Address: deaf(t, ca)}, hello: func() peer.Hello { return peer.Hello{Number: 1, Instance: 5, Name: "own"} },
		hear: func(*peer.Conn, peer.Frame) {}, changed: func(k *link) {
			if k.conn() != nil {
				there <- struct{}{}
			} else {
				gone <- struct{}{}
			}
		}}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); k.run(ctx) }()
	defer func() { cancel(); <-done }()
	<-there
	select {
	case <-gone:
	case <-time.After(longest):
		t.Error("the link to an agent that answers nothing stays")
	}
}

// A session that is being sent to an agent that does not read keeps nobody else's waiting, and no keeper's answers.
func TestNobodyWaitsForOneSession(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a := lonely(t, ca)
	c, err := peer.Dial(t.Context(), deaf(t, ca), "deaf", a.o.TLS, peer.Hello{Number: 1, Instance: 5, Name: "own"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go a.sayLoads(t.Context())
	a.attended[c] = true
	stuck, sending := &leaving{back: true}, make(chan struct{})
	arrives := &arriving{}
	go func() {
		stuck.mu.Lock()
		arrives.mu.Lock()
		close(sending)
		for c.Send(peer.Frame{Message: move.Message{Kind: move.State, To: move.AtDestination}, Session: make([]byte, 16<<20)}) == nil {
		}
		arrives.mu.Unlock()
		stuck.mu.Unlock()
	}()
	<-sending
	time.Sleep(100 * time.Millisecond)
	start := time.Now()
	for i := range uint32(100) {
		a.loadHere(&place{a: a, service: Service{Name: service}}, "0", i)
	}
	a.watchLeaving(stuck, start)
	a.watchArriving(arrives, start)
	if took := time.Since(start); took > 300*time.Millisecond {
		t.Errorf("it took %v", took)
	}
	stuck.mu.Lock() // in the end it has given up
	arrives.mu.Lock()
}
