// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"os"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// Members are isolated by user. A name is a request for a role; credentials decide. A session belongs to the user of
// its owner. It may go to a process of that user, of root, or of the keeper's own user. It goes to another user's
// process only on behalf of root: by weir steer move or drain, or the agents of servers.

// may reports whether a process may own or direct sessions of a user, and replace that user's members.
func (p *process) may(user uint32) bool {
	return p.UID == 0 || int(p.UID) == os.Geteuid() || p.UID == user
}

// gives reports whether a member may give its sessions to another one.
func (m *member) gives(o *member) bool {
	return m.process.may(o.process.UID) || o.process.may(m.process.UID) || m.sent[o.name]
}

// send records that root sends a member's sessions to a name.
func (m *member) send(name string, by *member) {
	if !by.process.may(m.process.UID) || by.process.UID == m.process.UID {
		return
	}
	if m.sent == nil {
		m.sent = map[string]bool{}
	}
	m.sent[name] = true
}

// accepts reports whether a member may have a session without an owner.
func (m *member) accepts(s *session) bool { return m.process.may(s.user) }

// youngest returns the youngest member of a name that a process may direct.
func (v *service) youngest(name string, by *process) *member {
	for i := len(v.members) - 1; i >= 0; i-- {
		if o := v.members[i]; o.name == name && by.may(o.process.UID) {
			return o
		}
	}
	return nil
}

// directs returns an error if a process may not direct a session.
func (s *session) directs(p *process) error {
	if p.may(s.user) {
		return nil
	}
	return wire.Errorf(wire.NotMember, "session %d belongs to another user: user %d may not direct it", s.id, p.UID)
}
