// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"testing"

	"github.com/weir-project/weir/internal/releasetest"
)

// This version reads the sessions of agents of every release: on the way between agents, and kept by a session keeper.
func TestSessionsOfReleases(t *testing.T) {
	c := carried{Name: "member-0", Label: "tcp 192.0.2.1:80", State: []byte("state"), Unread: []byte("unread"), Replay: 0x0102030405060708}
	releasetest.Messages(t, "carried.json", map[string][]byte{"carried": c.append(nil, []byte("kernel"))}, func(b []byte) (any, error) {
		c, kernel, err := parseCarried(b)
		return []any{c, kernel}, err
	})
	c.Unread = nil
	releasetest.Messages(t, "kept.json", map[string][]byte{
		"sending":   (&kept{Epoch: 0x11121314, Other: 1023, ReuseAddr: true, Nonce: 0x21222324, Carried: c}).append(nil),
		"receiving": (&kept{Receiving: true, Epoch: 0x11121314, Other: 1, Put: 0x3132333435363738, Carried: c, Kernel: []byte("kernel")}).append(nil),
	}, func(b []byte) (any, error) { return parseKept(b) })
}
