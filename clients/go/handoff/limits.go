// SPDX-License-Identifier: Apache-2.0

package handoff

import "github.com/weir-project/weir/feature/handoff/wire"

// limited applies changed limits of the keeper.
func (m *Member) limited(c *wire.Conn, msg *wire.Message) {
	m.maxState.Store(msg.Read)
	m.o.Log.Info("keeper limits changed", "max_state", msg.Read, "max_sessions", msg.Written)
	go m.agree(c, msg.Number)
}

// agree tells the keeper about the end of commits under the old limits. It waits for commits
// already checked against them. It does not wait for transfers: the keeper rejects one over the
// limit, and the session stays. It must not run in the receiving goroutine, because a commit may
// wait for a blocked keeper.
func (m *Member) agree(c *wire.Conn, change uint32) {
	for _, s := range m.Sessions() {
		_ = s.ours() // takes the lock; a commit holds it from its check until it is sent
	}
	_ = m.sendOn(c, &wire.Message{Type: wire.Agree, Number: change}) // the next keeper sends its own limits
}
