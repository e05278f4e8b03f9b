// SPDX-License-Identifier: Apache-2.0

package move

import "fmt"

// Backend is a backend behind a load balancer, by the number that the load balancer's flow table has for it. 0 is none.
type Backend uint16

// Epoch counts the owners that a session has had. It begins with 0, grows by 1 with each move and with each that was called
// off, and tells an answer that is late from one that is awaited. It does not come round: 2^32 moves are more than a session has.
type Epoch uint32

// Nonce tells a load balancer's record of a flow from every other that it, or another load balancer, has or had of the same one: it is
// chosen at random when the flow is learned, and stays as long as the record. 0: it is not known.
type Nonce uint32

// Role is one of the three that take part.
type Role uint8

// The roles.
const (
	AtSource Role = iota
	AtLoadBalancer
	AtDestination
)

func (r Role) String() string { return [...]string{"source", "load balancer", "destination"}[r] }

// Kind is what a message says.
type Kind uint8

// The messages.
const (
	Buffer    Kind = iota + 1 // source to load balancer: hold my packets, the session is to move to Backend
	Buffered                  // the answer: OK, or refused
	State                     // source to destination: the session; the transport adds the socket's and the application's state
	Flip                      // destination to load balancer: I have it
	Flipped                   // the answer: OK, you own it; or refused
	Done                      // destination to source: I own it
	Failed                    // destination to source: I do not, and never shall in this epoch
	Reclaim                   // source to load balancer: what became of it?
	Reclaimed                 // the answer: OK, you own it, in Epoch; or it is gone
	Revoked                   // load balancer to destination: the source has it again, in Epoch
	Ask                       // a backend to the load balancer, before a move: in which epoch do I own it?
	Known                     // the answer: OK, in Epoch, and no move is under way; or it is not yours to move now
	Left                      // a backend to the load balancer, which sends it a session's packets: it has left for Backend, in Epoch
)

var kindNames = [...]string{"?", "Buffer", "Buffered", "State", "Flip", "Flipped", "Done", "Failed", "Reclaim", "Reclaimed", "Revoked", "Ask", "Known", "Left"}

func (k Kind) String() string {
	if int(k) >= len(kindNames) {
		return fmt.Sprint("message ", uint8(k))
	}
	return kindNames[k]
}

// Message is one of them, about one session.
type Message struct {
	Kind    Kind
	From    Role
	To      Role
	Epoch   Epoch   // of the move; of Reclaimed and Revoked the one in which the source owns it now
	Move    Epoch   // of Reclaimed and Revoked: the move that they are about
	Nonce   Nonce   // of Known and Flipped: the record's, at the load balancer; of Reclaim: as the source has heard it
	Backend Backend // of Hold: the destination
	OK      bool    // of Held, Flipped, Reclaimed and Known; of Hold: packets wait at the source, and are not to be held
}

func (m Message) String() string {
	answer := ""
	if m.Kind == Buffered || m.Kind == Flipped || m.Kind == Reclaimed || m.Kind == Known {
		answer = map[bool]string{true: ", yes", false: ", no"}[m.OK]
	}
	return fmt.Sprintf("%s(%d%s) %s → %s", m.Kind, m.Epoch, answer, m.From, m.To)
}

// Action is what a side does, in the order in which it is told.
type Action uint8

// The actions.
const (
	// Dump: stop the socket's packets, switch repair on, read its state and send it as [State]. Then [Source.Dumped] or
	// [Source.DumpFailed]. The socket stays.
	Dump Action = iota + 1
	// Thaw: switch repair off, let packets through, give the session back to the application.
	Thaw
	// Close the socket in repair: silently.
	Close
	// Restore: make the socket of the state received, and leave it in repair. Then [Destination.Restored] or
	// [Destination.RestoreFailed].
	Restore
	// Deliver the session to the application and switch repair off. A second time it changes nothing.
	Deliver
	// Discard the socket: in repair, silently. An application that has it already loses it.
	Discard
)

func (a Action) String() string {
	return [...]string{"?", "dump", "thaw", "close", "restore", "deliver", "discard"}[a]
}

// Do is what follows from an event: actions first, then messages.
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
