// SPDX-License-Identifier: Apache-2.0

package handoff

import "github.com/weir-project/weir/feature/handoff/wire"

// limited goes by limits that have changed at the keeper.
func (m *Member) limited(c *wire.Conn, msg *wire.Message) {
	m.maxState.Store(msg.Read)
	m.o.Log.Info("the keeper's limits have changed", "max_state", msg.Read, "max_sessions", msg.Written)
	go m.agree(c, msg.Number)
}

// agree tells the keeper that no commit that comes from here on is over its limits. One in progress may have been measured by the
// limits of before: it is waited for. (A transfer in progress is not: the keeper refuses one that is over, and the session stays.) Not by the reader: a commit can wait for a keeper that does not read.
func (m *Member) agree(c *wire.Conn, change uint32) {
	for _, s := range m.Sessions() {
		_ = s.ours() // takes the lock, which a commit holds from its check until it is sent
	}
	_ = m.sendOn(c, &wire.Message{Type: wire.Agree, Number: change}) // the next keeper tells its own
}
