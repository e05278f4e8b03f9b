// SPDX-License-Identifier: Apache-2.0

// Package handoff has the sessions of a service outlive the process that serves them.
// A keeper (weir serve, weir handoff keep) holds a duplicate of every connection with
// the state that the application committed last; a restart, an update or SIGKILL moves
// sessions to the next process, and the peer sees nothing.
//
//	l, err := handoff.Listen(ctx, "tcp", ":1790", handoff.Options{Service: "bmp", Name: "0"})
//	for {
//		s, err := l.AcceptSession() // a new connection, or one that another process had
//		go serve(s)
//	}
//
//	func serve(s *handoff.Session) {
//		parser := restore(s.State())       // nil for a new one
//		for {
//			n, err := s.Read(buf)          // what follows, from whoever it was that read before
//			answer := parser.parse(buf[:n])
//			s.Write(answer)
//			s.Commit(parser.state())       // from here on goes whoever is next
//		}
//	}
//
// # What is promised
//
// Read shows bytes and leaves them in the socket; Commit has the keeper note how far
// the application has come, and takes them out. (Where Read has to wait with bytes that
// are not committed, the keeper is given these too.) So at every instant the keeper
// and the kernel together know all: the next owner reads on after the last commit.
// What was read after it is read again. What was written after it must be written again,
// the same bytes, which follow from the state and what is read again, or are in the
// state; the library drops those that the kernel has taken already. So the stream is
// exact in both directions, without a copy of it anywhere.
//
// docs/HANDOFF.md has the protocol, for clients in other languages.
package handoff

import (
	"errors"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// DefaultSocket is where a keeper is looked for, unless Options or
// $WEIR_HANDOFF_SOCKET name another place.
const DefaultSocket = wire.DefaultSocket

// Errors. Those of the keeper carry its words.
var (
	// ErrMoved says that another process has the session now. A handler returns, as it
	// does when the peer has closed.
	ErrMoved = errors.New("the session has moved to another member")
	// ErrReplaced says that a newer process of the same name has proved itself and has all sessions: see Options.Proof.
	ErrReplaced = errors.New("replaced by a newer member")
	// ErrUncommitted says that more was read than may be without a commit: the keeper has
	// all of it. See Options.Window.
	ErrUncommitted = errors.New("too many bytes were read without a Commit")
	// ErrNoKeeper says that no keeper answers: sessions go on, and are not kept.
	ErrNoKeeper = errors.New("no keeper answers")
	// ErrUncertain says that the keeper went while it moved a session. Whose it is shows
	// when it is back; until then the session stands still.
	ErrUncertain = errors.New("whether the session has moved is known when the keeper is back")

	ErrNotMember = wire.ErrNotMember // this process is no member of the service
	ErrNoPeer    = wire.ErrNoPeer    // nobody of that name is ready
	ErrSlow      = wire.ErrSlow      // the peer does not answer for what it was given
	ErrLimit     = wire.ErrLimit     // too many sessions, or too much state
	ErrBadSocket = wire.ErrBadSocket // MPTCP, for example
)
