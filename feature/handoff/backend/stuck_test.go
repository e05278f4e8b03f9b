// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/control"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/peer/peertest"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/internal/nstest"
)

// deaf is an agent that sends hello, and then reads nothing.
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
	a := &Agent{o: Options{TLS: ca.TLS("own"), Log: slog.New(slog.DiscardHandler), Timeout: time.Millisecond}, workers: newWorkers(t.Context().Done()),
		sending: map[peer.Flow]*sending{}, receiving: map[peer.Flow]*receiving{}, attended: map[*peer.Conn]bool{},
		loads: map[string]map[string]uint32{}, unsaid: map[string]bool{}, says: make(chan struct{}, 1)}
	a.lb = &link{a: a}
	a.quarantine = new(quarantine.Quarantine) // without a buffer
	s := Service{Name: service}
	a.known.Store(&known{services: map[string][]Service{service: {s}}, home: map[string]*keeperClient{service: {a: a, service: service}}})
	return a
}

// TestAgentThatSaysNothing checks that the missing answers of a stopped agent are detected before its buffers are
// full.
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

// TestStoodStill checks that an agent resuming after a stop does not treat peers as silent before probing them again.
func TestStoodStill(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a := lonely(t, ca)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if raw, err := l.Accept(); err == nil {
			if c, err := peer.Accept(t.Context(), raw, ca.TLS("other"), peer.Hello{Number: 2, Instance: 7, Name: "other"}); err == nil {
				_, _ = c.Receive() // answers
			}
		}
	}()
	c, err := peer.Dial(t.Context(), l.Addr().String(), "other", a.o.TLS, peer.Hello{Number: 1, Instance: 5, Name: "own"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	time.Sleep(4*time.Second + 100*time.Millisecond)
	ended, gone := make(chan struct{}), make(chan error, 1)
	defer close(ended)
	go func() {
		_, err := c.Receive()
		gone <- err
	}()
	k := &link{a: a, to: Remote{Name: "other", Number: 2}}
	go k.probe(c, ended)
	select {
	case err := <-gone:
		t.Errorf("an agent that answers is given up: %v", err)
	case <-time.After(5*probeEvery/2 + probeEvery):
	}
}

// TestNobodyWaitsForOneSession checks that sending a session to an agent that does not read delays neither other
// sessions nor the keeper's answers.
func TestNobodyWaitsForOneSession(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a := lonely(t, ca)
	c, err := peer.Dial(t.Context(), deaf(t, ca), "deaf", a.o.TLS, peer.Hello{Number: 1, Instance: 5, Name: "own"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go a.reportLoads(t.Context())
	a.attended[c] = true
	stuck, sending := &sending{back: true}, make(chan struct{})
	arrives := &receiving{}
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
		a.loadHere(&keeperClient{a: a, service: service}, "0", i)
	}
	a.watchSending(stuck, start)
	a.watchReceiving(arrives, start)
	if took := time.Since(start); took > 300*time.Millisecond {
		t.Errorf("it took %v", took)
	}
	stuck.mu.Lock() // it has given up by now
	arrives.mu.Lock()
}

// narrow is a connection with 8 MiB/s.
type narrow struct{ net.Conn }

func (n narrow) Read(b []byte) (int, error) {
	c, err := n.Conn.Read(b[:min(len(b), 64<<10)])
	time.Sleep(time.Duration(c) * time.Second / (8 << 20))
	return c, err
}

// TestSlowWay checks that a large session's timeout starts after its transmission, and other sessions do not wait for
// it.
func TestSlowWay(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a := lonely(t, ca)
	a.o.Timeout, a.o.Step, a.stats.rejected = 2*time.Second, func(string) {}, map[string]uint64{}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		raw, err := l.Accept()
		if err != nil {
			return
		}
		_ = raw.(*net.TCPConn).SetReadBuffer(256 << 10)
		if c, err := peer.Accept(t.Context(), narrow{raw}, ca.TLS("slow"), peer.Hello{Number: 2, Instance: 7, Name: "slow"}); err == nil {
			c.TakeSessions()
			_, _ = c.Receive()
		}
	}()
	c, err := peer.Dial(t.Context(), l.Addr().String(), "slow", a.o.TLS, peer.Hello{Number: 1, Instance: 5, Name: "own"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	k := &link{a: a, to: Remote{Name: "slow", Number: 2}}
	k.c.Store(c)
	way := &keeperClient{a: a}
	a.known.Store(&known{links: map[move.Backend]*link{2: k}})
	id := peer.Flow{Client: netip.MustParseAddrPort("192.0.2.1:5")}
	s := &sending{id: id, by: way, to: 2, src: move.Source{Phase: move.Moving, Epoch: 1, To: 2}, state: make([]byte, 48<<20)}
	a.sending[id] = s
	sent := make(chan struct{})
	s.mu.Lock()
	go func() {
		defer close(sent)
		defer s.mu.Unlock()
		a.executeSend(s, s.src.Dumped())
	}()
	time.Sleep(50 * time.Millisecond)
	start := time.Now()
	a.lost(3)
	a.keepAgain(way)
	a.keepAgain(&keeperClient{a: a})
	a.lbIsBack()
	if took := time.Since(start); took > time.Second {
		t.Errorf("others wait for %v", took)
	}
	select {
	case <-sent:
		t.Fatalf("it was sent within %v: this tests nothing", time.Since(start))
	default:
	}
	<-sent
	a.watchSending(s, time.Now())
	if len(a.stats.rejected) > 0 {
		t.Fatalf("not sent: %v: was the machine busy for 1 s?", a.stats.rejected)
	}
	if took := time.Since(start); s.src.Phase != move.Moving || took < 3*time.Second {
		t.Errorf("sent within %v, and then the source is %s: %v", took, s.src.Phase, a.stats.rejected)
	}
	a.wg.Wait()
}

// TestFailedDrainChangesNothing checks that a drain without the load balancer's registration does not take effect later.
func TestFailedDrainChangesNothing(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a := lonely(t, ca)
	a.o.Registration = peer.Registration{Address: netip.MustParseAddr("10.0.0.1"), Weight: 3}
	a.weight = 3
	c, err := peer.Dial(t.Context(), deaf(t, ca), "deaf", a.o.TLS, peer.Hello{Number: 1, Instance: 5, Name: "own"})
	if err != nil {
		t.Fatal(err)
	}
	a.lb.c.Store(c)
	c.Close()
	if err := a.drain(t.Context(), Draining{AllowOutage: true}, func(Drained) {}); err == nil || !strings.Contains(err.Error(), "nothing was changed") {
		t.Errorf("a drain over a closed connection: %v", err)
	}
	if w := a.registration().Weight; w != 3 {
		t.Errorf("the next registration has weight %d", w)
	}
}

// TestUnconfirmedDrain checks the error of a drain that the load balancer never confirms: the weight may take effect.
func TestUnconfirmedDrain(t *testing.T) {
	ca := peertest.NewAuthority(t)
	a := lonely(t, ca)
	a.o.Registration = peer.Registration{Address: netip.MustParseAddr("10.0.0.1"), Weight: 3}
	a.weight = 3
	a.o.Keeper = filepath.Join(t.TempDir(), "no keeper")
	c, err := peer.Dial(t.Context(), deaf(t, ca), "deaf", a.o.TLS, peer.Hello{Number: 1, Instance: 5, Name: "own"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	a.lb.c.Store(c)
	fails := func(when, want string) {
		t.Helper()
		if err := a.drain(t.Context(), Draining{AllowOutage: true}, func(Drained) {}); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "weir handoff drain --undo") {
			t.Errorf("%s: %v, without %q", when, err, want)
		}
		if w := a.registration().Weight; w != 0 {
			t.Errorf("%s: the next registration has weight %d", when, w)
		}
	}
	fails("without a keeper", "the load balancer has not confirmed weight 0, and it may still take effect")
	a.unwanted = "no such backend"
	fails("rejected", "may still take effect")
}

// TestDrainOfRejected checks that a drain says why the load balancer closes the connections.
func TestDrainOfRejected(t *testing.T) {
	a := lonely(t, peertest.NewAuthority(t))
	a.o.Registration = peer.Registration{Address: netip.MustParseAddr("10.0.0.1"), Weight: 3}
	a.weight = 3
	a.told(peer.Peers{Rejected: "number 1 belongs to backend other"})
	err := a.drain(t.Context(), Draining{AllowOutage: true}, func(Drained) {})
	if err == nil || !strings.Contains(err.Error(), "rejects this backend: number 1 belongs to backend other; nothing was changed") || a.registration().Weight != 3 {
		t.Errorf("%v, weight %d", err, a.registration().Weight)
	}
}

// TestDrainOfEndedAgent checks that a drain fails if its agent ends before the last answer.
func TestDrainOfEndedAgent(t *testing.T) {
	ns, err := netns.Current()
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	nstest.NeedRoot(t)
	ctx, cancel := context.WithCancel(t.Context())
	l, err := control.Listen(ctx, controlName(ns), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- control.Serve(ctx, l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_ = json.NewEncoder(w).Encode(Drained{Backend: "s1", Left: 2})
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler) // the connection ends, as with the agent
		}), slog.New(slog.DiscardHandler))
	}()
	steps := 0
	if err := DrainHere(t.Context(), "", Draining{}, func(Drained) { steps++ }); err == nil || steps != 1 || !strings.Contains(err.Error(), "run weir handoff drain again") {
		t.Errorf("after %d steps: %v", steps, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
