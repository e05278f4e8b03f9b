// SPDX-License-Identifier: Apache-2.0

package server

import (
	"slices"
	"sync"
	"testing"
	"time"
)

// steps notes which steps each server's agent takes.
type steps struct {
	mu  sync.Mutex
	all map[int][]string
}

func (s *steps) note(server int, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all[server] = append(s.all[server], name)
}

// before says whether a server's agent took one step before another, and fails where it took one of them not.
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

// A server sends a session without waiting for the front end's answer. One that has nowhere to park packets waits for it.
func TestAhead(t *testing.T) {
	for name, parks := range map[string]bool{"ahead": true, "no device of parked packets": false} {
		t.Run(name, func(t *testing.T) {
			w := newNetwork(t, 2, at4)
			s := &steps{all: map[int][]string{}}
			w.step = s.note
			w.run()
			if !parks {
				w.servers[0].agent.gate.tap.Close()
				w.servers[0].agent.gate.tap = nil // nothing has moved yet
			}
			c := w.dial()
			w.mustAsk(c, "hello")
			w.mustSend(c, 2)
			w.mustAsk(c, "there")
			w.eventually("the source has heard of it", func() bool {
				st, err := w.servers[0].agent.Status()
				return err == nil && st.Out == 1
			})
			if got := s.before(t, 1, stepSent, stepHeld); got != parks {
				t.Errorf("it was sent before the front end had answered: %v", got)
			}
		})
	}
}

// What comes before the front end holds a session's packets waits at the server that the session leaves, and does not go to and fro.
func TestSlowHold(t *testing.T) {
	w := newNetwork(t, 2, at4)
	w.frontStep = func(name string) {
		if name == "front end: held" {
			time.Sleep(20 * time.Millisecond)
		}
	}
	w.run()
	c := w.dial()
	w.mustAsk(c, "hello")
	c.said = make(chan []byte, 1024)
	c.stream(1000, time.Millisecond)
	for i := range 10 {
		w.mustSend(c, 2-i%2)
	}
	if err := c.stop(); err != nil {
		t.Fatal(err)
	}
	parked, returned := w.parked()
	if parked < 20 || returned != parked {
		t.Errorf("%d packets were parked, and %d sent back: want some of each move, each once", parked, returned)
	}
}

// parked counts the packets that waited at servers, and those that were sent back.
func (w *world) parked() (parked, returned uint64) {
	w.t.Helper()
	for _, s := range w.servers {
		c, err := s.agent.gate.Counts()
		if err != nil {
			w.t.Fatal(err)
		}
		parked, returned = parked+c.Parked, returned+c.Returned
	}
	return parked, returned
}

// All packets of a session that moves wait at the server that it leaves, and none at the front end.
func TestParkedHere(t *testing.T) {
	w := newNetwork(t, 2, at4)
	w.park = true
	w.step = func(_ int, name string) {
		if name == stepKeptHere { // so that there are some
			time.Sleep(10 * time.Millisecond)
		}
	}
	w.run()
	c := w.dial()
	w.mustAsk(c, "hello")
	c.said = make(chan []byte, 1024)
	c.stream(1000, time.Millisecond)
	for i := range 10 {
		w.mustSend(c, 2-i%2)
	}
	if err := c.stop(); err != nil {
		t.Fatal(err)
	}
	parked, returned := w.parked()
	counts, err := w.front.Counts()
	if err != nil {
		t.Fatal(err)
	}
	if parked < 20 || returned < parked || counts.Held != 0 {
		t.Errorf("%d packets were parked, and %d sent back; %d waited at the front end", parked, returned, counts.Held)
	}
}
