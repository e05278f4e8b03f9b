// SPDX-License-Identifier: Apache-2.0

package feature

import "context"

// A change of one feature can misplace live TCP sessions that another feature can move. These interfaces connect the
// two: package host passes the mover to the changing feature.

// SessionMover moves live TCP sessions between members of a service. A session's ID is its socket's cookie (SO_COOKIE).
type SessionMover interface {
	// Sessions lists the movable sessions. It fails, for example, if no keeper answers.
	Sessions(ctx context.Context) (MovableSessions, error)
}

// MovableSessions is a list of sessions and of their possible members.
type MovableSessions interface {
	// Len returns the number of sessions in all services.
	Len() int
	// Kept reports whether a session of the service is in the list, and whether it waits for a member.
	Kept(service string, id uint64) (waits, kept bool)
	// Owner names the member with the session, or its last member if it waits; "" for none.
	Owner(id uint64) string
	// Member names the member of the service that serves a slot with process pid; "" if none accepts sessions.
	Member(service string, slot, pid int) string
	// Buffer makes members commit sessions and stop serving them. Peers' data stays in the sockets. The result holds the
	// sessions committed within the mover's timeout. The caller releases it.
	Buffer(ctx context.Context, ids ...uint64) (BufferedSessions, error)
}

// BufferedSessions are sessions waiting for a member.
type BufferedSessions interface {
	// IDs lists them.
	IDs() []uint64
	// Release gives sessions to members by name; "" means the previous member. back holds sessions that returned to
	// their previous member in place of another, with the reason.
	Release(ctx context.Context, to map[uint64]string) (back map[uint64]error, err error)
	// Close returns all unreleased sessions.
	Close() error
}

// MoverProvider is implemented by the feature that moves sessions. socket is its keeper's socket.
type MoverProvider interface {
	SessionMover(socket string) SessionMover
}

// MoverUser is implemented by features whose changes misplace sessions.
type MoverUser interface {
	// WithMover returns the feature with a mover for its Run.
	WithMover(m SessionMover) Runner
}

// KeeperUser is implemented by features whose process gives sessions to the host's keeper.
type KeeperUser interface {
	// WithKeeper returns the feature with the keeper's socket for its Run, used if the configuration names none; "" is
	// the default socket.
	WithKeeper(socket string) Runner
}
