// SPDX-License-Identifier: Apache-2.0

package lb

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/weir-project/weir/feature/handoff/peer"
)

// TestCloneOfAServerIsRefused checks that a clone with the certificate, name and number of a
// connected server is rejected while the server answers. It is accepted once the server is gone.
func TestCloneOfAServerIsRefused(t *testing.T) {
	_, ca, _, at := managed(t, AgentOptions{Register: true})
	mine := peer.Registration{Address: netip.MustParseAddr("10.2.0.2"), Weight: 1}
	first := register(t, ca, at, "h1", 1, mine)
	isUp := func(p peer.Peers) bool { return len(ups(p)) == 1 }
	first.hears(t, isUp)

	_, port, err := net.SplitHostPort(at)
	if err != nil {
		t.Fatal(err)
	}
	elsewhere := net.JoinHostPort("::1", port) // for connections from another address
	theirs := peer.Registration{Address: netip.MustParseAddr("10.2.1.2"), Weight: 1}
	clone := register(t, ca, elsewhere, "h1", 1, theirs)
	clone.hears(t, func(p peer.Peers) bool {
		return strings.Contains(p.Rejected, "connected from 127.0.0.1") && strings.Contains(p.Rejected, "::1")
	})
	if err := first.c.Ping(); err != nil {
		t.Fatalf("the clone has cut the connection of the server: %v", err)
	}

	again := register(t, ca, at, "h1", 1, mine) // the server's agent has restarted
	again.hears(t, isUp)
	again.c.Close()
	for {
		moved := register(t, ca, elsewhere, "h1", 1, theirs)
		told := peer.Peers{}
		moved.hears(t, func(p peer.Peers) bool { told = p; return p.Rejected != "" || len(p.Members) > 0 })
		if told.Rejected == "" {
			break
		}
	}
}
