// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"fmt"
	"strings"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// forgets drops a waiting session, or all waiting sockets of a name. Queued connections of a listener are reset, its
// address becomes free, and sessions are reset. Sockets of live processes are untouched.
func (k *Keeper) forgets(ctx context.Context, m *member, msg *wire.Message) (*wire.Message, error) {
	name, of, _ := strings.Cut(msg.Text, "/")
	if err := k.directs(ctx, m, msg.Session, name); err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	named, what := k.named(name, of, msg)
	var all []*session
	var lives error
	for _, s := range named { // check all before any change
		switch {
		case s.directs(m.process) != nil:
			return nil, s.directs(m.process)
		case s.suspension != nil, wire.Elsewhere(s.member), wire.Moving(s.state):
			return nil, wire.Errorf(wire.Owned, "session %d is being moved: try again", s.id)
		case s.owner != nil && !s.owner.process.exited():
			lives = wire.Errorf(wire.Owned, "member %s (process %d) of %s is running: stop it first, or move its sessions with weir handoff send", s.member, s.owner.process.PID, s.service.name)
		default:
			all = append(all, s)
		}
	}
	if len(all) == 0 && lives != nil {
		return nil, lives
	}
	if len(all) == 0 {
		return nil, wire.Errorf(wire.NotFound, "nothing of %s is waiting: see weir handoff status", what)
	}
	for _, s := range all {
		k.Log.Info("socket forgotten", "service", s.service.name, "member", s.member, "kind", s.kind.String(), s.address(), "uid", m.process.UID)
		k.remove(s, true)
	}
	return &wire.Message{Type: wire.OK, Number: uint32(len(all))}, nil
}

// named returns the sockets named by a Forget request, and a description of them.
func (k *Keeper) named(service, member string, msg *wire.Message) (all []*session, what string) {
	if msg.Session != 0 {
		if s := k.sessions[msg.Session]; s != nil {
			all = append(all, s)
		}
		return all, fmt.Sprintf("session %d", msg.Session)
	}
	if v := k.services[service]; v != nil {
		for _, s := range v.sessions {
			if s.member == member && (msg.Number&wire.ForgetListeners == 0 || s.kind != wire.Stream) {
				all = append(all, s)
			}
		}
	}
	return all, fmt.Sprintf("member %s of %s", member, service)
}
