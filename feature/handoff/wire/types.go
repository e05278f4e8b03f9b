// SPDX-License-Identifier: Apache-2.0

// Package wire is the protocol between a keeper of sessions and the members of a
// service: one message a packet of a Unix SOCK_SEQPACKET socket, with the sockets
// themselves as SCM_RIGHTS. docs/HANDOFF.md has it byte for byte, for clients in
// other languages.
package wire

import (
	"errors"
	"fmt"
)

// Version is the version of the protocol that this package speaks. It is the first
// byte of every message.
const Version = 1

// Sizes, in bytes.
const (
	headerSize = 48
	MaxName    = 63        // of a service, of a member
	MaxText    = 1024      // of a label, of an error's text
	MaxInline  = 64 << 10  // of state and unread inside a message; more go in a memfd
	MaxState   = 256 << 20 // of both; a keeper's own limit is lower, and told in Welcome and Limits
	maxMessage = headerSize + MaxName + MaxText + MaxInline
	maxFDs     = 2 // descriptors of one message: a socket, a memfd
)

// DefaultSocket is where weir's keeper listens, unless $WEIR_HANDOFF_SOCKET names
// another place. A path that begins with @ is an abstract socket, which belongs to
// a network namespace.
const DefaultSocket = "/run/weir/handoff.sock"

// SocketEnv names another place than DefaultSocket.
const SocketEnv = "WEIR_HANDOFF_SOCKET"

// Type says what a message is. Those of members are below 0x80.
type Type uint8

// What members say.
const (
	Hello    Type = 0x01 // who speaks: Text the service, Name the member, Number its capabilities
	Ready    Type = 0x02 // Number 1: may be given sessions; 0: gets no more of them; else see ReadyMoves
	Leave    Type = 0x03 // touches none of its sessions any more: they are for others
	Keep     Type = 0x04 // a socket to keep, with its positions and state
	Commit   Type = 0x05 // a session's positions and state from now on
	Drop     Type = 0x06 // the session is over: the keeper closes its duplicate
	Transfer Type = 0x07 // the session is Name's from now on
	Accept   Type = 0x08 // what Give gave is in good hands
	Reject   Type = 0x09 // what Give gave is for somebody else
	Find     Type = 0x0a // asks for a kept listener or packet socket by its label
	Status   Type = 0x0b // asks what the keeper keeps
	Send     Type = 0x0c // asks that the owner of a session, or of all a member's, transfers it to Name
	Suspend  Type = 0x0d // asks that nobody touches a session until Release; answered when that is so
	Release  Type = 0x0e // a parked session is Name's from now on; "": of whom it was
	Commits  Type = 0x0f // a session's commits are in slot Number of the board from now on, the latest of Read in it included: see Board
	Forget   Type = 0x11 // asks that the keeper lets go of a session that waits, or of all that wait for a member; OK says how many in Number
	Load     Type = 0x10 // Number is how much waits for this member; in which unit is between the members of the service
	Agree    Type = 0x12 // answers Limits, with its Number: all that this member says from here on keeps to them
)

// What the keeper says.
const (
	Welcome  Type = 0x81 // answers Hello: Read the largest state, Written the most sessions of a service, Number capabilities that both have
	Error    Type = 0x82 // Number says what, Text in words
	OK       Type = 0x83
	Give     Type = 0x84 // a session, or what Find asked for
	Move     Type = 0x85 // asks the owner to transfer the session to Name; session 0: all it has
	Replaced Type = 0x86 // a newer member of the same name is ready
	Report   Type = 0x87 // answers Status: JSON in State
	Alone    Type = 0x88 // no newer member of the same name is left that answers: the receiver stood by, and goes on
	Loads    Type = 0x90 // Number is what Name has said that waits for it
	Members  Type = 0x91 // Number members of this server may be given sessions; to those that resume
	Limits   Type = 0x92 // the limits have changed: Read and Written as in Welcome, Number tells this message from others
)

// Bits of Ready's Number beside 1, which says that the member may be given sessions.
const (
	ReadyMoves   = 2 // it moves them when asked, as the capability says
	ReadyStandby = 4 // only those that no newer member of its name takes: it replaces nobody
	ReadyEnds    = 8 // alone, of a member that stands by: as 0 if its successor answers. OK says in Number whether that is not so
)

// ForgetListeners, in Number of Forget, leaves sessions as they are.
const ForgetListeners = 1

// NoLoad, in Number of Load and Loads, is that of one to whom nothing can go: it has gone.
const NoLoad = 1<<32 - 1

// Flags of messages.
const (
	KeepState Flags = 1 << 0  // Commit, Transfer: the state stays what it was, and State is empty; Unread counts
	Crashed   Flags = 1 << 1  // Give: the last owner died, so positions may lie before what it did
	Returned  Flags = 1 << 2  // Give: refused by whom it was for
	StateFD   Flags = 1 << 15 // state and unread are in a sealed memfd, the message's last descriptor
)

// Flags modify a message.
type Flags uint16

// Capabilities of a member, in Hello's Number.
const (
	TakesOrphans uint32 = 1 << 0 // also sessions of dead members of other names
	Moves        uint32 = 1 << 1 // transfers its sessions when asked to
	Exact        uint32 = 1 << 2 // peeks, commits, then consumes: what it leaves at any instant can be gone on with
	Balances     uint32 = 1 << 3 // wants to hear of the loads of others
	Resumes      uint32 = 1 << 4 // an agent that goes on with moves of dead agents, whichever way they were to go
	Boards       uint32 = 1 << 5 // has a board, whose memfd comes with Hello
	Standby      uint32 = 1 << 6 // stands by once it is replaced (ReadyStandby), and hears Alone
)

// Kind is what kind of socket is kept, in Number of Keep, Find and Give.
type Kind uint32

// Kinds of sockets.
const (
	Stream   Kind = 1 // an established TCP connection
	Listener Kind = 2 // a TCP socket that listens, with the connections queued on it
	Packet   Kind = 3 // a UDP socket, with the datagrams queued on it
)

// String names a kind as people do.
func (k Kind) String() string {
	switch k {
	case Stream:
		return "session"
	case Listener:
		return "listener"
	case Packet:
		return "packet"
	}
	return fmt.Sprintf("kind %d", uint32(k))
}

// Code says what an Error is about.
type Code uint32

// Codes of errors.
const (
	BadVersion Code = 1  // the keeper speaks other versions
	Malformed  Code = 2  // the message breaks the protocol: the keeper closes the connection
	NotMember  Code = 3  // this process is no member of the service
	NoSession  Code = 4  // no such session of this member's
	NoPeer     Code = 5  // nobody of that name is ready
	Slow       Code = 6  // the peer does not read, or has not answered for what it was given
	Limit      Code = 7  // too many sessions, or too much state
	BadSocket  Code = 8  // a descriptor that cannot be kept
	Owned      Code = 9  // the session is another member's
	NotFound   Code = 10 // nothing of that label is kept
	Unable     Code = 11 // the owner does not move sessions on request
	Lost       Code = 12 // the session cannot be gone on with
)

// Errors that codes stand for; a [CodeError] is one of them.
var (
	errBadVersion = errors.New("another version of the protocol")
	ErrMalformed  = errors.New("malformed message")
	ErrNotMember  = errors.New("refused")
	ErrNoSession  = errors.New("no such session of this member")
	ErrNoPeer     = errors.New("no such member is ready")
	ErrSlow       = errors.New("the member does not keep up")
	ErrLimit      = errors.New("over the keeper's limit")
	ErrBadSocket  = errors.New("not a socket that can be kept")
	ErrOwned      = errors.New("another member's session")
	ErrNotFound   = errors.New("not kept")
	ErrUnable     = errors.New("its owner does not move sessions on request")
	ErrLost       = errors.New("the session is lost")
)

var codeErrors = map[Code]error{BadVersion: errBadVersion, Malformed: ErrMalformed, NotMember: ErrNotMember, NoSession: ErrNoSession,
	NoPeer: ErrNoPeer, Slow: ErrSlow, Limit: ErrLimit, BadSocket: ErrBadSocket, Owned: ErrOwned, NotFound: ErrNotFound,
	Unable: ErrUnable, Lost: ErrLost}

// CodeError is an error as it travels: a code, and words for people.
type CodeError struct {
	Code Code
	Text string
}

// Errorf makes a CodeError.
func Errorf(c Code, format string, a ...any) *CodeError {
	return &CodeError{c, fmt.Sprintf(format, a...)}
}

// Error implements error.
func (e *CodeError) Error() string {
	if e.Text != "" {
		return e.Text
	}
	return e.Unwrap().Error()
}

// Unwrap is the value that the code stands for.
func (e *CodeError) Unwrap() error {
	if err := codeErrors[e.Code]; err != nil {
		return err
	}
	return fmt.Errorf("error %d of the keeper", e.Code)
}
