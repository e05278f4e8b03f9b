// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"os"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// Members are isolated by user: a name says which place a process wants, its credentials say what it may have. A session
// belongs to the user of its owner. It goes to a process of that user, of root, or of the keeper's own user. It goes to
// another user's process if root sends it there: weir steer move, drain, and the agents of servers do.

// may says whether a process may have the sessions of a user, direct them, and replace that user's members.
func (p *process) may(user uint32) bool {
	return p.UID == 0 || int(p.UID) == os.Geteuid() || p.UID == user
}

// gives says whether a member may give its sessions to another one.
func (m *member) gives(o *member) bool {
	return m.process.may(o.process.UID) || o.process.may(m.process.UID) || m.sent[o.name]
}

// send notes that root has a member's sessions go to a name.
func (m *member) send(name string, by *member) {
	if !by.process.may(m.process.UID) || by.process.UID == m.process.UID {
		return
	}
	if m.sent == nil {
		m.sent = map[string]bool{}
	}
	m.sent[name] = true
}

// accepts says whether a member may have a session that nobody owns now.
func (m *member) accepts(s *session) bool { return m.process.may(s.user) }

// youngest is the member of a name that came last, of those that a process may direct.
func (v *service) youngest(name string, by *process) *member {
	for i := len(v.members) - 1; i >= 0; i-- {
		if o := v.members[i]; o.name == name && by.may(o.process.UID) {
			return o
		}
	}
	return nil
}

// directs says whether a process may direct a session.
func (s *session) directs(p *process) error {
	if p.may(s.user) {
		return nil
	}
	return wire.Errorf(wire.NotMember, "session %d is another user's: user %d may not direct it", s.id, p.UID)
}
