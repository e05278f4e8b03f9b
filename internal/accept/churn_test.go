// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"log/slog"
	"testing"
	"time"
)

// TestChurns checks that a user with too many connections is refused until time has passed. Other
// users, root and TCP clients are not.
func TestChurns(t *testing.T) {
	l := New(nil, Options{Log: slog.New(slog.DiscardHandler)})
	often, other := Peer{UID: 1 << 30, kind: unixUser}, Peer{UID: 1<<30 + 1, kind: unixUser} // not this process's user
	now := time.Now()
	refused := 0
	for range 5 * connectBurst {
		if l.churns(often, now) {
			refused++
		}
	}
	if refused != 4*connectBurst {
		t.Errorf("refused %d of %d, want those beyond %d", refused, 5*connectBurst, connectBurst)
	}
	for _, p := range []Peer{other, {UID: 0, kind: unixUser}, {Net: prefix(loopback.Addr())}, {UID: 1 << 30, kind: localTCP}} {
		if l.churns(p, now) {
			t.Errorf("%s is refused", p)
		}
	}
	if now = now.Add(time.Second / 2); l.churns(often, now) {
		t.Error("refused after half a second")
	}
	for uid := range uint32(2 * maxChurners) {
		l.churns(Peer{UID: uid + 1, kind: unixUser}, now)
	}
	if len(l.churners) > maxChurners {
		t.Errorf("%d users are remembered", len(l.churners))
	}
}
