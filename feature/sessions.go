// SPDX-License-Identifier: Apache-2.0

package feature

import "context"

// A change of one feature can misplace live TCP sessions that another feature is able to move. The two meet in these
// interfaces: host gives the mover to the feature with the change.

// SessionMover moves live TCP sessions between members of a service. A session's id is its socket's cookie (SO_COOKIE).
type SessionMover interface {
	// Sessions lists the sessions that can be moved at this moment. The error says why there is no list: no keeper answers, say.
	Sessions(ctx context.Context) (MovableSessions, error)
}

// MovableSessions is a list of sessions and of the members that can have them.
type MovableSessions interface {
	// Len is their number, in all services.
	Len() int
	// Kept reports whether a session of the service is in the list, and whether it waits for a member.
	Kept(service string, id uint64) (waits, kept bool)
	// Owner names the member with the session, or the last one where it waits; "" for none.
	Owner(id uint64) string
	// Member names the member of the service that serves a slot by the process pid; "" if none accepts sessions.
	Member(service string, slot, pid int) string
	// Buffer lets members commit sessions and stop. Peers' data stays in the sockets. The result holds those whose member did within
	// the mover's time. The caller releases it.
	Buffer(ctx context.Context, ids ...uint64) (BufferedSessions, error)
}

// BufferedSessions are sessions that wait for a member.
type BufferedSessions interface {
	// IDs lists them.
	IDs() []uint64
	// Release gives sessions to members, by name; "" is the former one. It returns those that went back although they were for another,
	// with the reason.
	Release(ctx context.Context, to map[uint64]string) (back map[uint64]error, err error)
	// Close gives back whatever is not released.
	Close() error
}

// MoverProvider is implemented by the feature that moves sessions. socket is that of its keeper.
type MoverProvider interface {
	SessionMover(socket string) SessionMover
}

// MoverUser is implemented by features whose changes misplace sessions.
type MoverUser interface {
	// WithMover returns the feature with a mover for its Run.
	WithMover(m SessionMover) Runner
}

// KeeperUser is implemented by features whose process gives sessions to the keeper of its host.
type KeeperUser interface {
	// WithKeeper returns the feature with the socket of the keeper, for its Run, where the configuration names none; "" is the default
	// socket.
	WithKeeper(socket string) Runner
}
