// SPDX-License-Identifier: Apache-2.0

// Package handoff keeps the sessions of a service alive when its process ends. A keeper (weir serve
// or weir handoff keep) holds a duplicate of every connection, with the latest committed state of
// the application. A restart, an update or SIGKILL moves the sessions to the next process. The peer
// notices nothing.
//
//	l, err := handoff.Listen(ctx, "tcp", ":1790", handoff.Options{Service: "bmp", Name: "0"})
//	for {
//		s, err := l.AcceptSession() // a new connection, or a session of another process
//		go serve(s)
//	}
//
//	func serve(s *handoff.Session) {
//		parser := restore(s.State())       // nil for a new session
//		for {
//			n, err := s.Read(buf)          // continues after the last commit
//			answer := parser.parse(buf[:n])
//			s.Write(answer)
//			s.Commit(parser.state())       // the next process continues here
//		}
//	}
//
// # Guarantees
//
// Read returns bytes and leaves them in the socket. Commit stores the application's position at the
// keeper and takes the bytes out. If Read has to wait with uncommitted bytes, the keeper gets a copy
// of them. So the keeper and the kernel together always have the whole session, and the next owner
// continues after the last commit:
//
//   - It reads the bytes read after that commit again.
//   - It must write the bytes written after that commit again. They follow from the state and the
//     bytes read again, or the state contains them. The library drops bytes already sent.
//
// The stream is therefore exact in both directions, without a copy of it anywhere.
//
// docs/HANDOFF-PROTOCOL.md describes the protocol, for clients in other languages.
package handoff

import (
	"errors"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// DefaultSocket is the path of the keeper's socket, unless Options or $WEIR_HANDOFF_SOCKET name
// another.
const DefaultSocket = wire.DefaultSocket

// Errors of this package. Errors from the keeper contain its text.
var (
	// ErrMoved reports a session owned by another process now. A handler returns, as after a close
	// by the peer.
	ErrMoved = errors.New("the session has moved to another member")
	// ErrReplaced reports that a newer process of the same name has proved itself and has all
	// sessions: see Options.Proof.
	ErrReplaced = errors.New("replaced by a newer member")
	// ErrUncommitted reports too many bytes read without a commit. The keeper has all of them. See
	// Options.Window.
	ErrUncommitted = errors.New("too many bytes read without a Commit")
	// ErrNoKeeper reports that no keeper answers. Sessions continue but are not kept.
	ErrNoKeeper = errors.New("no keeper answers")
	// ErrUncertain reports that the keeper exited while it moved a session. The owner is unknown
	// until the keeper is back. Until then the session stands still.
	ErrUncertain = errors.New("the owner of the session is unknown until the keeper is back")

	ErrNotMember = wire.ErrNotMember // this process is no member of the service
	ErrNoPeer    = wire.ErrNoPeer    // no member of this name is ready
	ErrSlow      = wire.ErrSlow      // the peer did not accept in time
	ErrLimit     = wire.ErrLimit     // too many sessions, or too much state
	ErrBadSocket = wire.ErrBadSocket // an unsupported socket, MPTCP for example
)
