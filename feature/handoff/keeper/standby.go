// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"slices"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// A replaced member with capability Standby stands by until its successor has proved itself. It receives only
// sessions not accepted by a newer member of its name. It becomes active again if no newer member answers. A
// successor answers if it reads its socket. The kernel reports this, for clients of all versions.

// successor returns the youngest member of m's name that is active and does not hang, or nil.
func (v *service) successor(m *member) *member {
	for _, o := range slices.Backward(v.members) {
		if o != m && o.name == m.name && o.ready && !o.standby && !o.hangs && (o.process.may(m.process.UID) || m.process.may(o.process.UID)) {
			return o
		}
	}
	return nil
}

// replace tells older members of a name that a newer one is ready. A member that was told to be alone counts as
// older, because members reconnect in any order after the keeper's exit.
func (k *Keeper) replace(m *member) {
	for _, o := range m.service.members {
		if o != m && o.name == m.name && o.ready && (o.serial < m.serial || o.alone) && m.process.may(o.process.UID) {
			k.post(o, outgoing{message: wire.Message{Type: wire.Replaced, Name: m.name, Number: uint32(m.process.PID)}})
		}
	}
}

// tellAlone reactivates standing-by members without an answering newer member of their name. It picks the youngest,
// which is then the others' successor.
func (k *Keeper) tellAlone(v *service, now time.Time) {
	for _, m := range slices.Backward(v.members) {
		if !m.standby || now.Before(m.patient) || v.successor(m) != nil {
			continue
		}
		m.standby, m.alone = false, true
		k.Log.Warn("no successor answers, replaced member continues", "service", v.name, "member", m.name, "pid", m.process.PID)
		k.post(m, outgoing{message: wire.Message{Type: wire.Alone, Name: m.name}})
	}
}

// prove checks whether the successors of standing-by members read their messages.
func (k *Keeper) prove(v *service, now time.Time) {
	for _, m := range v.members {
		if !m.ready || m.standby || !m.hangs && !v.standsBy(m.name) {
			m.asked = time.Time{}
			continue
		}
		switch {
		case len(m.queue) == 0 && !m.conn.Unread():
			if m.hangs {
				m.hangs = false
				k.replace(m)
			}
			m.asked = now
			k.post(m, outgoing{message: wire.Message{Type: wire.OK}}) // all clients ignore it
		case m.asked.IsZero():
			m.asked = now
		case !m.hangs && now.Sub(m.asked) >= slowTime:
			m.hangs = true
			k.Log.Warn("successor does not read", "service", v.name, "member", m.name, "pid", m.process.PID)
		}
	}
	k.tellAlone(v, now)
}

func (v *service) standsBy(name string) bool {
	return slices.ContainsFunc(v.members, func(o *member) bool { return o.standby && o.name == name })
}

// ends lets a standing-by member leave, like Ready 0, if its successor answers and has accepted all of its sessions.
func (k *Keeper) ends(m *member) *wire.Message {
	o := m.service.successor(m)
	if !m.standby || o == nil || len(o.queue) > 0 || o.conn.Unread() || len(m.given) > 0 || k.owes(o, m) {
		return &wire.Message{Type: wire.OK, Number: 1}
	}
	m.standby = false
	k.ready(m, false)
	return &wire.Message{Type: wire.OK}
}

// owes reports whether m has not answered for a session transferred to it by to.
func (k *Keeper) owes(m, to *member) bool {
	for id := range m.given {
		if s := k.sessions[id]; s != nil && s.from == to {
			return true
		}
	}
	return false
}
