// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/internal/nstest"
)

// TestMuteBackendDelaysNobody checks that announcements and pings wait for no backend. The agent of
// one reads nothing: its connection ends by itself, and the other backend hears the latest list.
func TestMuteBackendDelaysNobody(t *testing.T) {
	_, ca, a, at := managed(t, AgentOptions{Register: true})
	mute := register(t, ca, at, "h1", 1, peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1})
	mute.hears(t, func(p peer.Peers) bool { return len(p.Members) == 1 })
	other := register(t, ca, at, "h2", 2, peer.Registration{Address: netip.MustParseAddr("10.2.1.2"), Weight: 1})
	other.hears(t, func(p peer.Peers) bool { return len(p.Members) == 2 })
	close(mute.mute)
	var p peer.Peers
	for i := range 900 { // of nearly 1 MB
		p.Members = append(p.Members, peer.Member{Name: strings.Repeat("n", 255), Number: move.Backend(i), Services: []string{strings.Repeat("s", 255), strings.Repeat("t", 255)}})
	}
	a.mu.Lock()
	conn := a.backends[1]
	a.mu.Unlock()
	const limit = 500 * time.Millisecond // a write may wait for 1 s
	last := int64(0)
	nstest.Eventually(t, func() error { // until the socket is full, and the write has timed out
		last++
		p.Idle = last
		for name, call := range map[string]func(){"announce": func() { a.announce(p) }, "ping": a.pingAll} {
			began := time.Now()
			call()
			if took := time.Since(began); took > limit {
				t.Fatalf("%s takes %s", name, took)
			}
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.backends[1] == conn {
			return fmt.Errorf("the connection of the mute backend is open after %d announcements", last)
		}
		return nil
	})
	a.mu.Lock()
	a.news = true // the last announcement above may have followed the agent's own
	a.mu.Unlock()
	a.kicked()
	other.hears(t, func(p peer.Peers) bool { return len(p.Members) == 2 && !p.Members[0].Up })
}

// TestRejectedRegistrationsWait checks that a connection's registrations above a burst wait, and that
// the backend still hears the list with the rejection.
func TestRejectedRegistrationsWait(t *testing.T) {
	_, ca, a, at := managed(t, AgentOptions{Register: true})
	wrong := peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: -1}
	h := register(t, ca, at, "h1", 1, wrong)
	began := time.Now()
	const n = 24
	for i := range n {
		wrong.Weight = -1 - i
		if err := h.c.Register(wrong); err != nil {
			t.Fatal(err)
		}
	}
	h.hears(t, func(p peer.Peers) bool { return strings.HasPrefix(p.Rejected, fmt.Sprintf("weight %d:", -n)) })
	if took := time.Since(began); took < 2*time.Second {
		t.Errorf("%d registrations within %s: want 2 s at least", n, took)
	}
	a.mu.Lock()
	a.news = true
	a.mu.Unlock()
	a.kicked()
	h.hears(t, func(p peer.Peers) bool { return len(p.Services) > 0 && p.Rejected != "" })
}
