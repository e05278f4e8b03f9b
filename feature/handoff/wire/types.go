// SPDX-License-Identifier: Apache-2.0

// Package wire is the protocol between a keeper of sessions and the members of a service. Each
// packet of a Unix SOCK_SEQPACKET socket is one message. Sockets travel as SCM_RIGHTS.
// docs/HANDOFF-PROTOCOL.md describes the bytes for clients in other languages.
package wire

import (
	"errors"
	"fmt"
)

// Version is the protocol version of this package. It is the first byte of every message.
const Version = 1

// These are sizes in bytes.
const (
	headerSize = 48
	MaxName    = 63        // of a service or a member
	MaxText    = 1024      // of a label or an error's text
	MaxInline  = 64 << 10  // of state and unread inside a message; larger ones go in a memfd
	MaxState   = 256 << 20 // of both; a keeper's own limit is lower, and sent in Welcome and Limits
	maxMessage = headerSize + MaxName + MaxText + MaxInline
	maxFDs     = 2 // descriptors of one message: a socket, a memfd
)

// DefaultSocket is the path of weir's keeper, unless $WEIR_HANDOFF_SOCKET is set. A path beginning
// with @ is an abstract socket of the network namespace.
const DefaultSocket = "/run/weir/handoff.sock"

// SocketEnv is the environment variable that replaces DefaultSocket.
const SocketEnv = "WEIR_HANDOFF_SOCKET"

// Type is the type of a message. Types of members are below 0x80.
type Type uint8

// These are the messages of members.
const (
	Hello    Type = 0x01 // introduction: Text is the service, Name the member, Number its capabilities
	Ready    Type = 0x02 // Number 1: accepts sessions; 0: accepts no more; see ReadyMoves for other bits
	Leave    Type = 0x03 // the member no longer uses its sessions: others get them
	Keep     Type = 0x04 // a socket to keep, with its positions and state
	Commit   Type = 0x05 // new positions and state of a session
	Drop     Type = 0x06 // the session is over: the keeper closes its duplicate
	Transfer Type = 0x07 // gives the session to Name
	Accept   Type = 0x08 // accepts the session of a Give
	Reject   Type = 0x09 // rejects the session of a Give: somebody else gets it
	Find     Type = 0x0a // requests a kept listener or packet socket by its label
	Status   Type = 0x0b // requests a report of everything kept
	Send     Type = 0x0c // requests a Transfer to Name from the owner of a session, or of all sessions of a member
	Suspend  Type = 0x0d // requests that nobody uses a session until Release; the answer confirms it
	Release  Type = 0x0e // gives a suspended session to Name; "": back to its previous owner
	Commits  Type = 0x0f // the session's commits are now in slot Number of the board, including the latest at Read: see Board
	Forget   Type = 0x11 // requests that the keeper drops a waiting session, or all that wait for a member; OK has their number in Number
	Load     Type = 0x10 // Number is the member's load, in a unit of the service's own
	Agree    Type = 0x12 // answers Limits, with its Number: later messages of this member observe them
)

// requests are the names of the messages of members, for logs.
var requests = map[Type]string{Hello: "hello", Ready: "ready", Leave: "leave", Keep: "keep", Commit: "commit", Drop: "drop", Transfer: "transfer",
	Accept: "accept", Reject: "reject", Find: "find", Status: "status", Send: "send", Suspend: "suspend", Release: "release", Commits: "commits",
	Load: "load", Forget: "forget", Agree: "agree"}

// Request returns the name of a member's message, or its number if it is unknown.
func (t Type) Request() string {
	if name, known := requests[t]; known {
		return name
	}
	return fmt.Sprintf("%#x", uint8(t))
}

// These are the messages of the keeper.
const (
	Welcome  Type = 0x81 // answers Hello: Read is the largest state, Written the most sessions of a service, Number the common capabilities
	Error    Type = 0x82 // Number is the code, Text the explanation
	OK       Type = 0x83
	Give     Type = 0x84 // a session, or the socket of a Find
	Move     Type = 0x85 // requests a Transfer of the session to Name; session 0: of all sessions
	Replaced Type = 0x86 // a newer member of the same name is ready
	Report   Type = 0x87 // answers Status: JSON in State
	Alone    Type = 0x88 // no newer member of the same name answers: the receiver stood by, and continues
	Loads    Type = 0x90 // Number is the load of Name
	Members  Type = 0x91 // Number members of this server accept sessions; sent to members with Resumes
	Limits   Type = 0x92 // new limits: Read and Written as in Welcome, Number identifies this message
)

// These are bits of Ready's Number besides 1, the readiness for sessions.
const (
	ReadyMoves   = 2 // it moves sessions on request, as the capability
	ReadyStandby = 4 // accepts only sessions rejected by newer members of its name: it replaces nobody
	ReadyEnds    = 8 // alone, from a member standing by: as 0 if its successor answers. OK has 1 in Number otherwise
)

// ForgetListeners, in Number of Forget, keeps sessions.
const ForgetListeners = 1

// NoLoad, in Number of Load and Loads, means that the member accepts nothing, because it is gone.
const NoLoad = 1<<32 - 1

// These are flags of messages.
const (
	KeepState Flags = 1 << 0  // Commit, Transfer: the state is unchanged, and State is empty; Unread counts
	Crashed   Flags = 1 << 1  // Give: the last owner died, so the real positions may be ahead
	Returned  Flags = 1 << 2  // Give: rejected by the intended receiver
	StateFD   Flags = 1 << 15 // state and unread are in a sealed memfd, the message's last descriptor
)

// Flags modify a message.
type Flags uint16

// These are capabilities of a member, in Hello's Number.
const (
	TakesOrphans uint32 = 1 << 0 // accepts sessions of dead members of other names
	Moves        uint32 = 1 << 1 // transfers its sessions on request
	Exact        uint32 = 1 << 2 // peeks, commits, then consumes: its sessions can be continued at any instant
	Balances     uint32 = 1 << 3 // wants the loads of other members
	Resumes      uint32 = 1 << 4 // an agent continuing moves of dead agents, in either direction
	Boards       uint32 = 1 << 5 // has a board, with the memfd in Hello
	Standby      uint32 = 1 << 6 // stands by once it is replaced (ReadyStandby), and receives Alone
)

// Kind is the kind of a kept socket, in Number of Keep, Find and Give.
type Kind uint32

// These are the kinds of sockets.
const (
	Stream   Kind = 1 // an established TCP connection
	Listener Kind = 2 // a listening TCP socket, with its queued connections
	Packet   Kind = 3 // a UDP socket, with its queued datagrams
)

// String returns the everyday name of a kind.
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

// Code is the code of an Error.
type Code uint32

// These are the codes of errors.
const (
	BadVersion Code = 1  // the keeper has other protocol versions
	Malformed  Code = 2  // the message breaks the protocol: the keeper closes the connection
	NotMember  Code = 3  // this process may not join the service
	NoSession  Code = 4  // the member has no such session
	NoPeer     Code = 5  // no member of that name is ready
	Slow       Code = 6  // the peer does not read, or has not answered an earlier Give
	Limit      Code = 7  // too many sessions, or too much state
	BadSocket  Code = 8  // unsuitable descriptor
	Owned      Code = 9  // another member has the session
	NotFound   Code = 10 // nothing kept has that label
	Unable     Code = 11 // the owner does not move sessions on request
	Lost       Code = 12 // the session cannot be continued
)

// These are the errors of the codes. A [CodeError] unwraps to one of them.
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

// CodeError is a transmitted error: a code and a text.
type CodeError struct {
	Code Code
	Text string
}

// Errorf returns a CodeError with a formatted text.
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

// Unwrap returns the error of the code.
func (e *CodeError) Unwrap() error {
	if err := codeErrors[e.Code]; err != nil {
		return err
	}
	return fmt.Errorf("error %d of the keeper", e.Code)
}
