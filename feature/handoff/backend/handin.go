// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// handIn gives the session to a member of this backend. It sends the request first and does not wait for the answer,
// because the client is waiting. r.mu is held.
func (a *Agent) handIn(r *receiving) {
	m, turn := r.transfer(), r.turn
	m.Type, m.Name = wire.Transfer, r.c.Name
	err := r.home.ask(&m, func(err error) {
		switch {
		case err != nil:
			a.workers.run(func() { a.handInAgain(r, turn) })
		case r.mu.TryLock():
			a.handedIn(r, turn)
			r.mu.Unlock()
		default: // the reader of the keeper's connection must not block
			a.workers.run(func() {
				r.mu.Lock()
				defer r.mu.Unlock()
				a.handedIn(r, turn)
			})
		}
	})
	if err != nil {
		a.workers.run(func() { a.handInAgain(r, turn) })
	}
}

// transfer returns the message for the member.
func (r *receiving) transfer() wire.Message {
	return wire.Message{Session: r.session, Read: r.read, Written: r.written + r.pending, State: r.c.State, Unread: r.c.Unread}
}

// handInAgain retries until a member has the session.
func (a *Agent) handInAgain(r *receiving, turn int) {
	r.mu.Lock()
	fd, err := unix.FcntlInt(uintptr(max(r.fd, 0)), unix.F_DUPFD_CLOEXEC, 0)
	if r.fd < 0 || err != nil || r.turn != turn { // discarded meanwhile, or handled by a later turn
		r.mu.Unlock()
		if err == nil {
			unix.Close(fd)
		}
		return
	}
	m, home, name := r.transfer(), r.home, r.c.Name
	r.mu.Unlock()
	if !a.transfer(r.id, home, m, name, func() *wire.Message {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.turn != turn {
			return nil
		}
		return r.keep()
	}, fd) {
		a.o.Log.Info("session ended before a member accepted it", "flow", r.flow)
	}
	unix.Close(fd)
	r.mu.Lock()
	defer r.mu.Unlock()
	a.handedIn(r, turn)
}

// handedIn releases a session delivered to a member, unless another one has arrived meanwhile. r.mu is held.
func (a *Agent) handedIn(r *receiving, turn int) {
	a.o.Step(stepHandedIn)
	if r.fd >= 0 && r.turn == turn {
		unix.Close(r.fd)
		r.fd = -1
	}
}
