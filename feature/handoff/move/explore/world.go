// SPDX-License-Identifier: Apache-2.0

// Package explore goes through every order of events that package move's protocol can meet, within bounds: messages that are
// lost, come twice and come late, agents and whole backends that are killed and come back, deadlines, packets of the client at any
// moment. It runs the very code that the agents run.
//
// In each state that it reaches it asks two things. Has the client been served by a socket that did not know what the client
// had been told by another, or been reset while a socket lived that knew? And if nothing else goes wrong from here on: does the
// session live at exactly one backend, unless every socket that knew it has died, and is nothing left over?
package explore

import (
	"fmt"

	"github.com/weir-project/weir/feature/handoff/move"
)

// The two backends.
const (
	S move.Backend = 1
	D move.Backend = 2
)

// Socket is what is left of the session at a backend.
type Socket uint8

// The sockets.
const (
	None    Socket = iota
	Live           // the application has it
	Stopped        // in repair: with the source no packet reaches it, with the destination some may
)

// letter is a message on its way, with what of the session it carries.
type letter struct {
	m   move.Message
	ver uint8
	inc uint8 // the life of the destination's agent that wrote it, or is to read it: the connection that it comes by
}

// maxLetters are on their way at once; one more is lost.
const maxLetters = 7

// World is one state. It is comparable: a world that was met is not gone through again.
type World struct {
	Flow    move.Flow
	FUp     bool // the load balancer's agent
	flipInc uint8

	Source move.Source
	SUp    bool
	SSock  Socket
	SVer   uint8 // what of the session the socket knows

	Dest  move.Destination
	DUp   bool
	DInc  uint8 // how often the destination's agent has started
	DSock Socket
	DVer  uint8
	guard bool // the destination's backend sends no reset or end of the flow, for want of a socket or for its death

	mail  [maxLetters]letter
	mails uint8

	births move.Nonce // of the records that the load balancer has had

	Client uint8 // what the client has been told
	Reset  bool  // it was reset
	Over   bool  // the session has ended at the destination, and the load balancer has forgotten it

	remaining Bounds
	killed    bool   // somebody was
	bad       string // the client was served, or reset, as it must not be
	fault     fault
}

// Bounds say how much may go wrong, and how much may happen at all.
type Bounds struct {
	Moves, Packets, Kills, Losses, Repeats, Timeouts, Forgets uint8
	// Waits has sources wait for the load balancer, as they do where they know no birth.
	Waits bool
	// Parks has packets wait at the source.
	Parks bool
}

// Quick are bounds that take some seconds, Thorough ones that take a minute and five gigabytes.
var (
	Quick    = Bounds{Moves: 1, Packets: 2, Kills: 1, Losses: 1, Timeouts: 1, Forgets: 1}
	Thorough = Bounds{Moves: 1, Packets: 1, Kills: 2, Losses: 1, Repeats: 1, Timeouts: 1}
)

// fault is something that the protocol must not do: with it the explorer has to find what is wrong.
type fault uint8

const (
	none         fault = iota
	openSource         // packets reach the source's socket after its dump
	noGuard            // the destination's backend resets flows that it has no socket for
	alwaysBack         // the load balancer gives back what has moved, whoever has spoken
	lateFlip           // it lets a session move that has been reclaimed
	closeAtState       // the source closes its socket as soon as it has sent the state
	closeUnsent        // it closes its socket when the load balancer does not know of the move, although it has sent nothing
	backUnasked        // the load balancer gives back what it was never asked to hold
	thawUnknown        // the source goes on with what it has sent, and the load balancer does not know any more
	oneNonce           // a flow that the load balancer learns anew has the birth of the one before
	bufferTwice        // a source that went ahead says Hold again, and goes by either answer
	refusedOnly        // a move that the load balancer has refused to flip can come to something yet
	noNonce            // the load balancer does not know what it was never asked
	lastFault    = noNonce
)

// start is a session that the source has.
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
	// In one order, whichever came first: they arrive in any.
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

// deliver has a letter arrive. Who is dead does not get it.
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
				w.bad = "the source goes on with a session that has ended at the destination"
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

// spoke says that the destination's session has: its agent has nothing more to do with it, and asks nobody.
func (w *World) spoke() bool { return w.DSock == Live && !w.guard }

// forgettable says whether the load balancer may forget the flow: after an hour of silence, or for a reboot. That it does not while it
// is to hold the session's packets, or a copy of it is stopped or waits to speak, is the agents' to hold. What has ended is forgotten
// in any case.
func (w *World) forgettable() bool {
	return w.Flow.Owner != 0 && w.Flow.To == 0 && w.SSock != Stopped && w.DSock != Stopped && !(w.DSock == Live && w.guard)
}

// forget loses the flow. What the source has said of an earlier move, or before it sent the state of this one, has arrived by then
// or is lost: the load balancer hears a backend in order. Whoever owns the session goes by no birth that it heard before: it believes it for
// a minute, and of no other life of the load balancer's agent.
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

// end is that of the session at the destination, so long ago that the load balancer has forgotten the flow.
func (w *World) end() {
	w.DSock, w.Dest, w.Reset, w.Over = None, move.Destination{}, true, true
	w.forget()
}

// learn has the load balancer know a flow that it has forgotten, in epoch 0: the backend that speaks has it. When the session is over it
// is another of the client's, that may go to the source's backend.
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

// packet is one of the client, and what it is told in answer. Of a flow that is forgotten it goes by the hash, wherever that leads:
// here the backend that has it speaks first.
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
		w.bad = fmt.Sprintf("backend %d serves the client, who has been told %d things, of which it knows %d", by, w.Client, *knows)
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
		w.bad = fmt.Sprintf("backend %d resets the client while a socket lives that knows the session", by)
	}
	w.Reset = true
}

// knows says whether a socket lives that knows all that the client has been told, and that the load balancer would give the
// session to. While the source is calling a move off, it may die before the load balancer has heard of it, and after that the
// destination is refused, or loses the session if its agent has died as well: that is as if both had died.
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
