// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"net"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// TestStrangers checks that silent connections and a lack of descriptors neither keep an agent out
// nor end the server.
func TestStrangers(t *testing.T) {
	s := newScene(t)
	a := newAgents(t, s.f, time.Second)
	_, k, owner, _ := session(t, s)
	for range 300 {
		c, err := net.Dial("tcp", a.address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
	a.scarce.Fail.Store(5)
	was := a.hosts[owner]
	a.connect(int(owner)) // again, from the strangers' address
	if a.hosts[owner] == was {
		t.Fatal("not connected anew")
	}
	a.says(owner, k, move.Message{Kind: move.Ask, Epoch: 1})
	if m := a.hears(owner); m.Kind == 0 {
		t.Errorf("answer %v", m)
	}
	if _, err := peer.Dial(t.Context(), a.address, "lb", a.ca.TLS("h3"), peer.Hello{Number: 3, Instance: 1, Name: "h3"}); err != nil {
		t.Log("a stranger with a certificate is answered:", err)
	}
}
