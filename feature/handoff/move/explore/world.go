// SPDX-License-Identifier: Apache-2.0

// Package explore explores every order of events of package move's protocol, within bounds. Events are the loss,
// repetition and delay of messages, kills and restarts of agents and backends, deadlines, and packets of the client.
// The package runs the agents' own code.
//
// In each state it checks two properties:
//   - No socket without the client's latest data has served the client. No RST was sent while a socket with that data
//     lived.
//   - Without further faults the session ends up at exactly one backend, and nothing is left over. The exception is
//     the death of every socket with the data.
package explore

import (
	"fmt"

	"github.com/weir-project/weir/feature/handoff/move"
)

// Backends of the model.
const (
	S move.Backend = 1
	D move.Backend = 2
)

// Socket is a session's socket at a backend.
type Socket uint8

const (
	None    Socket = iota
	Live           // the application has it
	Stopped        // in repair mode: no packet reaches the source's; some may reach the destination's
)

// letter is a message under way, with its version of the session.
type letter struct {
	m   move.Message
	ver uint8
	inc uint8 // incarnation of the destination's agent that writes or reads it: its connection
}

// maxLetters is the number of messages under way; further ones are lost.
const maxLetters = 7

// World is a state. It is comparable, so no state is explored twice.
type World struct {
	Flow    move.Flow
	FUp     bool // the load balancer's agent runs
	flipInc uint8

	Source move.Source
	SUp    bool
	SSock  Socket
	SVer   uint8 // the client's data known to the socket

	Dest  move.Destination
	DUp   bool
	DInc  uint8 // starts of the destination's agent
	DSock Socket
	DVer  uint8
	guard bool // the destination's backend sends no RST or FIN for the flow

	mail  [maxLetters]letter
	mails uint8

	births move.Nonce // nonces used by the load balancer

	Client uint8 // data sent to the client
	Reset  bool  // the client was reset
	Over   bool  // the session has ended at the destination, and the load balancer has forgotten it

	remaining Bounds
	killed    bool   // something was killed
	bad       string // the client was wrongly served or reset
	fault     fault
}

// Bounds limit the faults and events of an exploration.
type Bounds struct {
	Moves, Packets, Kills, Losses, Repeats, Timeouts, Forgets uint8
	// Waits makes sources wait for the load balancer, as without a nonce.
	Waits bool
	// Parks makes the source buffer packets.
	Parks bool
}

// Quick takes some seconds. Thorough takes a minute and 5 GB.
var (
	Quick    = Bounds{Moves: 1, Packets: 2, Kills: 1, Losses: 1, Timeouts: 1, Forgets: 1}
	Thorough = Bounds{Moves: 1, Packets: 1, Kills: 2, Losses: 1, Repeats: 1, Timeouts: 1}
)

// fault is a deliberate violation of the protocol. The explorer must find its consequence.
type fault uint8

const (
	none         fault = iota
	openSource         // packets reach the source's socket after its dump
	noGuard            // the destination's backend resets flows without a socket
	alwaysBack         // the load balancer returns a moved session even after its new owner's packets
	lateFlip           // the load balancer accepts Flip for a reclaimed session
	closeAtState       // the source closes its socket right after sending the state
	closeUnsent        // the source closes its socket, without having sent the state, if the load balancer does not know the move
	backUnasked        // the load balancer returns a session without a Buffer
	thawUnknown        // the source continues after sending the state, although the load balancer has forgotten the move
	oneNonce           // a flow learned again keeps its old nonce
	bufferTwice        // a source that went ahead sends Buffer again, and believes either answer
	refusedOnly        // a move with a rejected Flip can still succeed
	noNonce            // the load balancer cannot detect a missing Buffer
	lastFault    = noNonce
)

// start returns a world with the session at the source.
func start(b Bounds, f fault) World {
	w := World{Flow: move.Flow{Owner: S}, FUp: true, SUp: true, SSock: Live, DUp: true, remaining: b, fault: f}
	w.Source.Parks = b.Parks
	if !b.Waits {
		w.births = 1
		w.Flow.Nonce, w.Source.Nonce = w.births, w.births
	}
	return w
}

func (w *World) post(m move.Message, ver uint8) {
	if m.Kind == 0 {
		return
	}
	l := letter{m: m, ver: ver}
	if m.From == move.AtDestination || m.To == move.AtDestination {
		l.inc = w.DInc
	}
	w.repost(l)
}

func (w *World) repost(l letter) {
	if w.mails == maxLetters {
		return
	}
	w.mail[w.mails] = l
	w.mails++
	// Keep them sorted: equal worlds compare equal, and delivery has no order anyway.
	for i := w.mails - 1; i > 0 && before(w.mail[i], w.mail[i-1]); i-- {
		w.mail[i], w.mail[i-1] = w.mail[i-1], w.mail[i]
	}
}

func before(a, b letter) bool {
	x, y := a.m, b.m
	switch {
	case x.Kind != y.Kind:
		return x.Kind < y.Kind
	case x.Epoch != y.Epoch:
		return x.Epoch < y.Epoch
	case x.Move != y.Move:
		return x.Move < y.Move
	case x.OK != y.OK:
		return !x.OK
	case x.Nonce != y.Nonce:
		return x.Nonce < y.Nonce
	}
	return a.ver < b.ver || a.ver == b.ver && a.inc < b.inc
}

func (w *World) removeLetter(i uint8) letter {
	l := w.mail[i]
	copy(w.mail[i:], w.mail[i+1:w.mails])
	w.mails--
	w.mail[w.mails] = letter{}
	return l
}

// deliver delivers a letter. A dead agent does not get it.
func (w *World) deliver(i uint8) {
	l := w.removeLetter(i)
	switch l.m.To {
	case move.AtLoadBalancer:
		if w.FUp {
			w.atLoadBalancer(l)
		}
	case move.AtSource:
		if w.SUp {
			if l.m.Kind == move.Reclaimed && (w.fault == closeUnsent || w.fault == thawUnknown && w.Flow.Owner == 0) {
				w.Source.Sent = w.fault == closeUnsent
			}
			w.source(w.Source.Receive(l.m))
		}
	case move.AtDestination:
		if w.spoke() && l.m.From == move.AtLoadBalancer {
			return
		}
		if w.DUp && l.inc == w.DInc {
			w.destination(w.Dest.Receive(l.m), l.ver)
		}
	}
}

func (w *World) atLoadBalancer(l letter) {
	from := S
	if l.m.From == move.AtDestination {
		from = D
	}
	switch {
	case w.fault == alwaysBack && l.m.Kind == move.Reclaim && w.Flow.Owner != from:
		w.Flow.Predecessor, w.flipInc = from, w.DInc+1
	case w.fault == lateFlip && l.m.Kind == move.Flip && w.Flow.Owner == S:
		w.Flow.To, w.Flow.Epoch = D, l.m.Epoch-1
	case w.fault == backUnasked && l.m.Kind == move.Reclaim && w.Flow.Owner == from && l.m.Epoch == w.Flow.Epoch+1:
		w.Flow.To = D
	}
	if w.fault == noNonce {
		l.m.Nonce = 0
	}
	was := w.Flow
	answers := w.Flow.Receive(from, l.m, !w.DUp || w.flipInc != w.DInc)
	if w.fault == refusedOnly && l.m.Kind == move.Flip && !answers[0].OK {
		w.Flow = was
	}
	for _, a := range answers {
		if a.Kind == move.Flipped && a.OK {
			w.flipInc = max(w.flipInc, l.inc)
		}
		if a.Kind == move.Flipped {
			w.repost(letter{m: a, inc: l.inc})
			continue
		}
		w.post(a, 0)
	}
}

func (w *World) source(do move.Do) {
	for _, a := range do.Actions {
		switch a {
		case move.Dump:
			if w.SSock == None { // its application has died with it
				w.source(w.Source.DumpFailed())
				continue
			}
			w.SSock = Stopped
			w.source(w.Source.Dumped())
			if w.fault == closeAtState {
				w.SSock = None
			}
		case move.Thaw:
			if w.SSock == Stopped && w.Over {
				w.bad = "the source continues a session after its end at the destination"
			}
			if w.SSock == Stopped {
				w.SSock = Live
			}
		case move.Close:
			w.SSock = None
		}
	}
	for _, m := range do.Send {
		w.post(m, w.SVer)
	}
}

func (w *World) destination(do move.Do, ver uint8) {
	for _, a := range do.Actions {
		switch a {
		case move.Restore:
			w.DSock, w.DVer, w.guard = Stopped, ver, true
			w.destination(w.Dest.Restored(), 0)
		case move.Deliver:
			if w.DSock == Stopped {
				w.DSock = Live
			}
		case move.Discard:
			w.DSock, w.guard = None, false
		}
	}
	for _, m := range do.Send {
		w.post(m, 0)
	}
}

// spoke reports whether the destination's session has sent a packet. Its agent then has nothing left to do, and asks
// nobody.
func (w *World) spoke() bool { return w.DSock == Live && !w.guard }

// forgettable reports whether the load balancer may forget the flow, after an hour of silence or a reboot. The agents
// guarantee a record while packets are buffered, and while a copy is stopped or has not sent a packet. An ended
// session is forgotten in any case.
func (w *World) forgettable() bool {
	return w.Flow.Owner != 0 && w.Flow.To == 0 && w.SSock != Stopped && w.DSock != Stopped && !(w.DSock == Live && w.guard)
}

// forget removes the flow's record. The source's earlier messages have arrived or are lost by then, because the load
// balancer processes a backend's messages in order. The owner drops its nonce: a nonce is valid for a minute, from
// one incarnation of the load balancer's agent.
func (w *World) forget() {
	w.Flow = move.Flow{}
	w.Source.Nonce = 0
	for i := uint8(0); i < w.mails; {
		m := w.mail[i].m
		if m.Kind == move.Buffer && (w.Source.Phase != move.Holding || m.Epoch != w.Source.Epoch) {
			w.removeLetter(i)
			continue
		}
		i++
	}
}

// end ends the session at the destination, long enough ago for the load balancer to have forgotten the flow.
func (w *World) end() {
	w.DSock, w.Dest, w.Reset, w.Over = None, move.Destination{}, true, true
	w.forget()
}

// learn makes the load balancer learn a forgotten flow in epoch 0, from the sending backend. After the session's end
// it is a new session of the client, possibly at the source's backend.
func (w *World) learn() {
	switch {
	case w.Flow.Owner != 0:
		return
	case w.Over || w.SSock == Live:
		w.Flow.Owner = S
	case w.DSock == Live:
		w.Flow.Owner = D
	default:
		return
	}
	if !w.remaining.Waits {
		if w.fault != oneNonce {
			w.births++
		}
		w.Flow.Nonce = w.births
	}
}

// packet delivers a packet of the client, and the answer to it. A packet of a forgotten flow may reach any backend,
// by the hash. In this model the backend with the session sends first.
func (w *World) packet() {
	if w.Reset || w.Flow.Buffering {
		return
	}
	switch {
	case w.Flow.Owner == S && (w.SSock == Live || w.fault == openSource && w.SSock == Stopped):
		w.served(&w.SVer, S)
	case w.Flow.Owner == S && w.SSock == None:
		w.reset(S)
	case w.Flow.Owner == D && w.DSock != None:
		w.served(&w.DVer, D)
		w.guard = false
	case w.Flow.Owner == D && (!w.guard || w.fault == noGuard):
		w.reset(D)
	}
}

func (w *World) served(knows *uint8, by move.Backend) {
	if *knows != w.Client {
		w.bad = fmt.Sprintf("backend %d serves the client: %d items were sent to it, the socket knows %d", by, w.Client, *knows)
	}
	w.Client++
	*knows = w.Client
	w.Flow.Out(by, false)
}

func (w *World) reset(by move.Backend) {
	knew := w.knows()
	if !w.Flow.Out(by, true) {
		return
	}
	if knew {
		w.bad = fmt.Sprintf("backend %d resets the client while a socket with its data lives", by)
	}
	w.Reset = true
}

// knows reports whether a socket with all of the client's data lives, and the load balancer would let it have the
// session. A source that abandons a move may die before its Reclaim arrives. The destination is then rejected, or
// loses the session if its agent has died as well. This counts as the death of both.
func (w *World) knows() bool {
	f := &w.Flow
	source := w.SSock != None && w.SVer == w.Client && (f.Owner == S || f.Predecessor == S || f.Owner == 0 && w.SSock == Live)
	destination := w.DSock != None && w.DVer == w.Client && (f.Owner == D || f.To == D && f.Epoch+1 == w.Dest.Epoch || f.Owner == 0 && w.spoke())
	for _, l := range w.mail[:w.mails] {
		if l.m.Kind == move.Reclaim && !source {
			return f.Owner == D && destination && w.DUp && w.flipInc == w.DInc
		}
	}
	return source || destination
}

func (w World) String() string {
	return fmt.Sprintf("load balancer: owner %d, epoch %d, held %v, before %d, up %v; source: %s in %d, socket %d knows %d, up %v; "+
		"destination: %s in %d, socket %d knows %d, up %v, guard %v; client told %d, reset %v, over %v; on the way %v; left %+v",
		w.Flow.Owner, w.Flow.Epoch, w.Flow.Buffering, w.Flow.Predecessor, w.FUp, w.Source.Phase, w.Source.Epoch, w.SSock, w.SVer, w.SUp,
		w.Dest.Phase, w.Dest.Epoch, w.DSock, w.DVer, w.DUp, w.guard, w.Client, w.Reset, w.Over, w.mail[:w.mails], w.remaining)
}
