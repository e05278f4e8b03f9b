// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"log/slog"
	"net"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
)

// heardLog sends the lines of a log to a channel.
type heardLog chan string

func (h heardLog) Write(b []byte) (int, error) {
	select {
	case h <- string(b):
	default:
	}
	return len(b), nil
}

// TestRefusedLinkPauses checks that an agent backs off and logs if its connections are accepted and closed at once,
// as by a rejecting load balancer.
func TestRefusedLinkPauses(t *testing.T) {
	ca := peertest.NewAuthority(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var came atomic.Int32
	lb := ca.TLS("lb")
	go func() {
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			came.Add(1)
			if c, err := peer.Accept(t.Context(), raw, lb, peer.Hello{Role: peer.LBAgent, Instance: 7, Name: "lb"}); err == nil {
				c.Close()
			}
		}
	}()
	defer l.Close()
	log := make(heardLog, 1)
	a := &Agent{o: Options{TLS: ca.TLS("own"), Log: slog.New(slog.NewTextHandler(log, nil))}, workers: newWorkers(t.Context().Done())}
	k := &link{a: a, to: Remote{Name: "lb", Address: l.Addr().String()}, hello: func() peer.Hello { return peer.Hello{Number: 1, Instance: 5, Name: "own"} },
		changed: func(*link) {}}
	go k.run(t.Context())
	if line := <-log; !strings.Contains(line, "cannot connect to an agent") || !strings.Contains(line, "closes each connection at once") {
		t.Errorf("the log says %q", line)
	}
	if n := came.Load(); n > 12 { // 20 ms, doubled each time up to 1 s
		t.Errorf("it came %d times in a second or so", n)
	}
}

// TestWaysFollowLinks checks that a way is open if its link and the load balancer's are connected, even with
// concurrent checks.
func TestWaysFollowLinks(t *testing.T) {
	a := &Agent{}
	a.lb = &link{a: a}
	a.lb.c.Store(&peer.Conn{})
	k := &link{a: a, to: Remote{Name: "other", Number: 2}}
	p := &keeperClient{a: a}
	a.known.Store(&known{links: map[move.Backend]*link{2: k}, away: map[move.Backend][]*keeperClient{2: {p}}})
	for i := range 20_000 {
		k.c.Store(nil)
		var others sync.WaitGroup
		for range 2 { // the load balancer sends its backends, and reconnects
			others.Go(func() {
				if i%2 == 0 {
					runtime.Gosched()
				}
				a.linkChanged(k)
			})
		}
		runtime.Gosched()
		k.c.Store(&peer.Conn{})
		a.linkChanged(k)
		others.Wait()
		if !p.ready {
			t.Fatalf("round %d: the link is there, and the way is closed", i)
		}
	}
}

// TestLinkOfSecondName checks that a load balancer with the second name sees no failed handshake.
func TestLinkOfSecondName(t *testing.T) {
	ca := peertest.NewAuthority(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	accepted := make(chan error, 1)
	lb := ca.TLS("lb-b")
	go func() {
		raw, err := l.Accept()
		if err == nil {
			var c *peer.Conn
			if c, err = peer.Accept(t.Context(), raw, lb, peer.Hello{Role: peer.LBAgent, Instance: 7, Name: "lb-b"}); err == nil {
				defer c.Close()
			}
		}
		accepted <- err
	}()
	k := &link{a: &Agent{o: Options{TLS: ca.TLS("own")}}, to: Remote{Name: "lb-a", Address: l.Addr().String()}, names: []string{"lb-a", "lb-b"},
		hello: func() peer.Hello { return peer.Hello{Number: 1, Instance: 5, Name: "own"} }}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		if c, err := k.dial(ctx); err == nil {
			defer c.Close()
			<-ctx.Done()
		}
	}()
	if err := <-accepted; err != nil {
		t.Errorf("its first connection: %v", err)
	}
}
