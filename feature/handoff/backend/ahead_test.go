// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/lb"
	"github.com/weir-project/weir/internal/nstest"
)

// steps records the steps of each backend's agent.
type steps struct {
	mu  sync.Mutex
	all map[int][]string
}

func (s *steps) note(server int, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[server] = append(s.all[server], name)
}

// before reports whether a backend's agent took one step before another. It fails if either is missing.
func (s *steps) before(t *testing.T, server int, one, other string) bool {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	i, j := slices.Index(s.all[server], one), slices.Index(s.all[server], other)
	if i < 0 || j < 0 {
		t.Fatalf("server %d: %q and %q are not both in %q", server, one, other, s.all[server])
	}
	return i < j
}

// TestAhead checks that a backend sends a session without waiting for the load balancer's answer. Without a buffer
// device it waits.
func TestAhead(t *testing.T) {
	for name, parks := range map[string]bool{"ahead": true, "no device of buffered packets": false} {
		t.Run(name, func(t *testing.T) {
			w := newNetwork(t, 2, at4)
			s := &steps{all: map[int][]string{}}
			w.step = s.note
			if !parks { // another device has the name
				nstest.Cable(t, w.servers[0].ns, "weir-buffer", nstest.NewNetns(t), "w0")
			}
			w.run()
			c := w.dial()
			w.mustAsk(c, "hello")
			w.mustSend(c, 2)
			w.mustAsk(c, "there")
			w.eventually("the source has heard of it", func() bool {
				st, err := w.servers[0].agent.Status()
				return err == nil && st.Out == 1
			})
			if got := s.before(t, 1, stepSent, stepBuffered); got != parks {
				t.Errorf("it was sent before the load balancer had answered: %v", got)
			}
		})
	}
}

// TestSlowHold checks that packets are buffered at the source until the load balancer buffers them, and do not loop.
func TestSlowHold(t *testing.T) {
	w := newNetwork(t, 2, at4)
	w.lbStep = func(name string) {
		if name == "load balancer: held" {
			time.Sleep(20 * time.Millisecond)
		}
	}
	w.run()
	w.toAndFro()
	parked, returned := w.parked()
	if parked < 20 || returned != parked {
		t.Errorf("%d packets were parked, and %d sent back: want some of each move, each once", parked, returned)
	}
}

// toAndFro moves a session ten times under a verified stream.
func (w *world) toAndFro() {
	w.t.Helper()
	c := w.dial()
	w.mustAsk(c, "hello")
	c.said = make(chan []byte, 1024)
	c.stream(1000, time.Millisecond)
	for i := range 10 {
		w.mustSend(c, 2-i%2)
	}
	if err := c.stop(); err != nil {
		w.t.Fatal(err)
	}
}

// parked counts the packets buffered at backends, and the packets sent back.
func (w *world) parked() (parked, returned uint64) {
	w.t.Helper()
	for _, s := range w.servers {
		c, err := s.agent.quarantine.Counts()
		if err != nil {
			w.t.Fatal(err)
		}
		parked, returned = parked+c.Buffered, returned+c.Returned
	}
	return parked, returned
}

// TestParkedHere checks that the source buffers all packets of a moving session, and the load balancer none.
func TestParkedHere(t *testing.T) {
	w := newNetwork(t, 2, at4)
	w.park = true
	w.step = func(_ int, name string) {
		if name == stepKeptHere { // leaves time for some packets
			time.Sleep(10 * time.Millisecond)
		}
	}
	w.run()
	w.toAndFro()
	parked, returned := w.parked()
	counts, err := w.lb.Counts()
	if err != nil {
		t.Fatal(err)
	}
	if parked < 20 || returned < parked || counts.Buffered != 0 {
		t.Errorf("%d packets were parked, and %d sent back; %d waited at the load balancer", parked, returned, counts.Buffered)
	}
}

// TestParkedAndCalledOff abandons a move. The packets buffered at the source go to its socket only.
func TestParkedAndCalledOff(t *testing.T) {
	for name, c := range map[string]struct {
		park bool
		lets time.Duration // time before the rejection
	}{
		"parked here":                   {true, 20 * time.Millisecond},
		"held by the load balancer":     {false, 20 * time.Millisecond},
		"held longer than is sent back": {false, 300 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			w, park := newNetwork(t, 2, at4), c.park
			w.park = park
			w.servers[1].limit = 1 // of state: it rejects every session
			w.step = func(server int, name string) {
				if name == stepQuiet {
					time.Sleep(c.lets)
				}
			}
			w.run()
			c := w.dial()
			w.mustAsk(c, "hello")
			c.said = make(chan []byte, 1024)
			c.stream(1000, time.Millisecond)
			for i := range uint64(5) {
				w.ask(c, 2)
				w.eventually("it has come back", func() bool {
					st, err := w.servers[0].agent.Status()
					return err == nil && st.Returned == i+1 && st.Sending == 0
				})
				w.mustBeAt(c, 1)
			}
			if err := c.stop(); err != nil {
				t.Fatal(err)
			}
			counts, err := w.servers[0].agent.quarantine.Counts()
			if err != nil {
				t.Fatal(err)
			}
			if park && counts.Buffered < 20 || park && counts.Returned > 0 || counts.Deaf > 0 {
				t.Errorf("%+v: want what has waited to be delivered, and nothing sent back", counts)
			}
		})
	}
}

// TestParkedAndRefused makes the load balancer reject Buffer after the session was sent. The session continues at its
// source, with the packets buffered there.
func TestParkedAndRefused(t *testing.T) {
	w := newNetwork(t, 2, at4)
	w.run()
	c := w.dial()
	w.roundTrip(c)
	c.said = make(chan []byte, 1024)
	c.stream(1000, time.Millisecond)
	for range 5 {
		before, err := w.servers[0].agent.Status()
		if err != nil {
			t.Fatal(err)
		}
		// It has a later epoch than the source.
		w.laterEpoch()
		w.ask(c, 2)
		w.eventually("it has come back", func() bool {
			st, err := w.servers[0].agent.Status()
			return err == nil && st.Returned == before.Returned+1 && st.Sending == 0
		})
		w.mustBeAt(c, 1)
	}
	if err := c.stop(); err != nil {
		t.Fatal(err)
	}
}

// laterEpoch gives the load balancer a later epoch for each flow.
func (w *world) laterEpoch() {
	w.t.Helper()
	var keys []lb.Key
	if err := w.lb.Flows(func(k lb.Key, _ lb.Flow) bool { keys = append(keys, k); return true }); err != nil {
		w.t.Fatal(err)
	}
	for _, k := range keys {
		if _, err := w.lb.Change(k, func(fl *lb.Flow) { fl.Epoch += 10 }); err != nil {
			w.t.Fatal(err)
		}
	}
}

// TestLargeKeepsNobodyWaiting checks that sending a large session does not delay others.
func TestLargeKeepsNobodyWaiting(t *testing.T) {
	w := newNetwork(t, 2, at4)
	sending, send := make(chan bool, 1), make(chan bool)
	var armed atomic.Bool
	w.step = func(server int, name string) {
		if server == 1 && name == stepDumped && armed.CompareAndSwap(true, false) {
			sending <- true
			<-send
		}
	}
	w.run()
	large, small := w.dial(), w.dial()
	for _, c := range []*client{large, small} {
		w.roundTrip(c) // then the load balancer need not be asked
	}
	for _, s := range w.servers[0].member.Member().Sessions() {
		if s.RemoteAddr().String() == large.LocalAddr().String() {
			w.eventually("the member has committed what it answered", func() bool { return len(s.State()) == 8 }) // see TestTooLargeStays
			if err := s.Commit(make([]byte, 2*maxConcurrent)); err != nil {                                       // breaks talk, but nothing more is sent
				t.Fatal(err)
			}
		}
	}
	armed.Store(true)
	w.ask(large, 2)
	<-sending
	w.mustSend(small, 2)
	w.mustAsk(small, "there, while the large one waits")
	close(send)
	w.eventually("both have gone", func() bool {
		st, err := w.servers[0].agent.Status()
		return err == nil && st.Sending == 0
	})
}
