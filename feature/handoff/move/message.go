// SPDX-License-Identifier: Apache-2.0

package move

import "fmt"

// Backend is the number of a backend in the load balancer's flow table. 0 is none.
type Backend uint16

// Epoch counts a session's owners. It starts at 0 and grows by 1 with each move and each abandoned move. It separates
// late answers from expected ones. It does not wrap: no session reaches 2^32 moves.
type Epoch uint32

// Nonce identifies a load balancer's record of a flow among all records of that flow, at this or another load
// balancer. It is chosen at random when the flow is learned, and does not change. 0: unknown.
type Nonce uint32

// Role is a party of a move.
type Role uint8

const (
	AtSource Role = iota
	AtLoadBalancer
	AtDestination
)

func (r Role) String() string { return [...]string{"source", "load balancer", "destination"}[r] }

// Kind is the type of a message.
type Kind uint8

const (
	Buffer    Kind = iota + 1 // source to load balancer: buffer my packets, the session moves to Backend
	Buffered                  // answer: OK, or rejected
	State                     // source to destination: the session; the transport adds the state of socket and application
	Flip                      // destination to load balancer: I have it
	Flipped                   // answer: OK, you own it; or rejected
	Done                      // destination to source: I own it
	Failed                    // destination to source: I do not own it, and never will in this epoch
	Reclaim                   // source to load balancer: did it move?
	Reclaimed                 // answer: OK, you own it, in Epoch; or it has moved
	Revoked                   // load balancer to destination: the source owns it again, in Epoch
	Ask                       // backend to load balancer, before a move: in which epoch do I own it?
	Known                     // answer: OK, in Epoch, without a move under way; or you cannot move it now
	Left                      // backend to load balancer, on packets of a moved session: it has moved to Backend, in Epoch
)

var kindNames = [...]string{"?", "Buffer", "Buffered", "State", "Flip", "Flipped", "Done", "Failed", "Reclaim", "Reclaimed", "Revoked", "Ask", "Known", "Left"}

func (k Kind) String() string {
	if int(k) >= len(kindNames) {
		return fmt.Sprint("message ", uint8(k))
	}
	return kindNames[k]
}

// Message is a protocol message about one session.
type Message struct {
	Kind    Kind
	From    Role
	To      Role
	Epoch   Epoch   // of the move; Reclaimed, Revoked: the source's new epoch
	Move    Epoch   // Reclaimed, Revoked: the epoch of the move
	Nonce   Nonce   // Known, Flipped: the record's nonce at the load balancer; Reclaim: the nonce known to the source
	Backend Backend // Buffer: the destination
	OK      bool    // Buffered, Flipped, Reclaimed, Known: yes; Buffer: the source buffers the packets itself
}

func (m Message) String() string {
	answer := ""
	if m.Kind == Buffered || m.Kind == Flipped || m.Kind == Reclaimed || m.Kind == Known {
		answer = map[bool]string{true: ", yes", false: ", no"}[m.OK]
	}
	return fmt.Sprintf("%s(%d%s) %s → %s", m.Kind, m.Epoch, answer, m.From, m.To)
}

// Action is a step that a party has to perform.
type Action uint8

const (
	// Dump blocks the socket's packets, enables repair mode, and reads the state for a [State] message. It is
	// followed by [Source.Dumped] or [Source.DumpFailed]. The socket stays.
	Dump Action = iota + 1
	// Thaw disables repair mode, unblocks packets, and returns the session to the application.
	Thaw
	// Close closes the socket silently, in repair mode.
	Close
	// Restore creates the socket from the received state, and leaves it in repair mode. It is followed by
	// [Destination.Restored] or [Destination.RestoreFailed].
	Restore
	// Deliver gives the session to the application and disables repair mode. It is idempotent.
	Deliver
	// Discard closes the socket silently, in repair mode. An application with the session loses it.
	Discard
)

func (a Action) String() string {
	return [...]string{"?", "dump", "thaw", "close", "restore", "deliver", "discard"}[a]
}

// Do is the reaction to an event: actions first, in order, then messages.
type Do struct {
	Actions [2]Action // 0: none
	Send    [2]Message
}

func act(a ...Action) (d Do) {
	copy(d.Actions[:], a)
	return d
}

func (d Do) send(m ...Message) Do {
	copy(d.Send[:], m)
	return d
}
