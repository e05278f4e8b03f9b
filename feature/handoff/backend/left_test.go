// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"errors"
	"fmt"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/weir-project/weir/feature/handoff/lb"
)

// TestForgottenByLB makes the load balancer forget moved sessions. It routes their packets by the hash to former
// backends. These do not reset them, and report their location. The same applies after a reboot of the load balancer.
func TestForgottenByLB(t *testing.T) {
	w := newNetwork(t, 3, at4)
	cert, key, signers := w.ca.Files("lb")
	config := fmt.Sprintf(`
listen: 0.0.0.0:7946
tls: {certificate: %s, key: %s, ca: %s}
devices: [c, s1, s2, s3]
register: true
buffer_timeout: 500ms
move_timeout: 500ms
services:
  talk: {number: 3, listen: [tcp %s]}
backends: # by the hash all is the first one's
  s1: {number: 1, weight: 1}
  s2: {number: 2, weight: 0}
  s3: {number: 3, weight: 0}
`, cert, key, signers, at4)
	w.play(w.middle, "lb", config)
	for i, s := range w.servers {
		s.keep()
		w.playBackend(i, s)
		s.serve()
	}
	w.eventually("the servers know each other", func() bool {
		for _, s := range w.servers {
			st := s.status()
			if !st.LB || !st.Keeper || !st.Peers[fmt.Sprint("s", 1+s.number%3)] || !st.Peers[fmt.Sprint("s", 1+(s.number+1)%3)] {
				return false
			}
		}
		return true
	})
	var clients []*client
	for range 4 {
		c := w.dialAt(at4, 0)
		if err := c.ask("hello"); err != nil {
			t.Fatal(err)
		}
		clients = append(clients, c)
	}
	at := func(c *client, to int) {
		t.Helper()
		w.eventually(fmt.Sprint("a session goes to server ", to), func() bool { return w.servesAt(c) == to || w.sendAt(c, to) == nil && false })
	}
	defer func() {
		for _, s := range w.servers {
			t.Logf("server %d: %+v", s.number, s.status())
		}
	}()
	for round, path := range [][]int{{2}, {3}, {2, 3}, {1, 2}} { // also through a third backend, and back to the first
		for _, c := range clients {
			for _, to := range path {
				at(c, to)
				if err := c.ask("there"); err != nil {
					t.Fatal(err)
				}
			}
		}
		w.eventually("no session is on its way", func() bool {
			for _, s := range w.servers {
				if st := s.status(); st.Sending+st.Receiving+st.Quarantined > 0 {
					return false
				}
			}
			return true
		})
		w.forgetPinned()
		for _, c := range clients {
			if err := c.ask("still there"); err != nil {
				t.Fatalf("round %d, at server %d: %v", round, w.servesAt(c), err)
			}
		}
	}
	if st := w.servers[0].status(); st.Quarantine.Strays == 0 {
		t.Error("no packet came to the server that the sessions have left: this tests nothing")
	}
}

// forgetPinned makes a pinned load balancer forget all flows.
func (w *world) forgetPinned() {
	w.t.Helper()
	l, err := w.root.Lock(w.t.Context())
	if err != nil {
		w.t.Fatal(err)
	}
	defer l.Unlock()
	all, err := lb.Instances(w.root)
	if err != nil || len(all) != 1 {
		w.t.Fatal(all, err)
	}
	o, err := l.Open(all[0])
	if err != nil {
		w.t.Fatal(err)
	}
	defer o.Close()
	flows := o.Maps["flows"]
	for {
		key := make([]byte, flows.KeySize())
		if err := flows.NextKey(nil, &key); errors.Is(err, ebpf.ErrKeyNotExist) {
			return
		} else if err != nil {
			w.t.Fatal(err)
		}
		if err := flows.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			w.t.Fatal(err)
		}
	}
}
