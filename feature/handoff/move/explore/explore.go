// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"context"
	"fmt"

	"github.com/weir-project/weir/feature/handoff/move"
)

// Violation is a forbidden state and its history.
type Violation struct {
	What  string
	Trace []string // all events from the start
	World World
}

func (v Violation) String() string { return fmt.Sprintf("%s\n%v\nafter %q", v.What, v.World, v.Trace) }

// Result is the outcome of an exploration.
type Result struct {
	States     int
	Events     map[string]int // number of times, by kind
	Violations []Violation    // the first maxKept
}

// maxKept limits the violations in a Result.
const maxKept = 10

// Run explores every state within bounds, breadth first. When ctx ends, it returns early with its results so far.
func Run(ctx context.Context, b Bounds) (Result, error) { return run(ctx, b, none) }

func run(ctx context.Context, b Bounds, f fault) (Result, error) {
	type step struct {
		from  World
		event string
	}
	first := start(b, f)
	came := map[World]step{first: {}}
	r := Result{Events: map[string]int{}}
	for todo := []World{first}; len(todo) > 0; todo = todo[1:] {
		if err := ctx.Err(); err != nil {
			return r, err
		}
		w := todo[0]
		r.States++
		what := w.bad
		if what == "" {
			what = w.quiesce()
		}
		if what != "" {
			if len(r.Violations) < maxKept {
				var trace []string
				for at := w; at != first; at = came[at].from {
					trace = append([]string{came[at].event}, trace...)
				}
				r.Violations = append(r.Violations, Violation{what, trace, w})
			}
			if f != none { // found: one violation is enough
				return r, nil
			}
			continue
		}
		w.events(func(kind, event string, next World) {
			r.Events[kind]++
			if _, ok := came[next]; !ok {
				came[next] = step{w, event}
				todo = append(todo, next)
			}
		})
	}
	return r, nil
}

// events calls yield with every possible next world.
func (w World) events(yield func(kind, event string, next World)) {
	try := func(kind, event string, budget func(*Bounds) *uint8, do func(*World)) {
		next := w
		if budget != nil {
			b := budget(&next.remaining)
			if *b == 0 {
				return
			}
			*b--
		}
		do(&next)
		yield(kind, event, next)
	}
	for i := range w.mails {
		l := w.mail[i].m.String()
		try("arrives", l, nil, func(n *World) { n.deliver(i) })
		try("lost", l+" is lost", func(b *Bounds) *uint8 { return &b.Losses }, func(n *World) { n.removeLetter(i) })
		if w.mail[i].m.Kind == move.Buffer { // a source that sends it twice uses no nonce: see Source.Retry
			continue
		}
		try("repeated", l+" arrives, and will arrive again", func(b *Bounds) *uint8 { return &b.Repeats }, func(n *World) {
			again := n.mail[i]
			n.deliver(i)
			n.repost(again)
		})
	}
	try("packet", "a packet of the client", func(b *Bounds) *uint8 { return &b.Packets }, (*World).packet)
	forgets := func(b *Bounds) *uint8 { return &b.Forgets }
	if w.forgettable() {
		try("forget", "the load balancer forgets the flow", forgets, (*World).forget)
	}
	if w.spoke() && w.Flow.Owner == D {
		try("end", "the session ends at the destination, and is forgotten", forgets, (*World).end)
	}
	if w.Flow.Owner == 0 {
		try("learn", "the load balancer learns the flow anew", nil, (*World).learn)
	}
	timeouts := func(b *Bounds) *uint8 { return &b.Timeouts }
	kills := func(b *Bounds) *uint8 { return &b.Kills }
	if w.SUp {
		if w.Source.Phase == move.Owns && w.SSock == Live {
			try("move", "the source begins", func(b *Bounds) *uint8 { return &b.Moves }, func(n *World) {
				do, err := n.Source.Start(D)
				if err == nil {
					n.source(do)
				}
			})
		}
		if w.Source.Phase == move.Owns && w.SSock == Live && w.Flow.Owner == S && w.Source.Nonce != w.Flow.Nonce {
			try("ask", "the source asks for the nonce", nil, func(n *World) { n.Source.Nonce = n.Flow.Nonce })
		}
		if w.Source.Phase == move.Holding && w.Source.Nonce != 0 {
			try("ahead", "the source goes ahead", nil, func(n *World) { n.source(n.Source.Ahead()) })
		}
		if w.Source.Phase != move.Owns && w.Source.Phase != move.Closed {
			try("timeout", "the source's timeout ends", timeouts, func(n *World) { n.patience() })
		}
		try("kill", "the source's agent is killed", kills, func(n *World) { n.killSource(false) })
		try("kill", "the source's agent and application are killed", kills, func(n *World) { n.killSource(true) })
	} else {
		try("start", "the source's agent starts", nil, (*World).startSource)
	}
	if w.DUp {
		if w.Dest.Phase == move.Flipping {
			try("timeout", "the destination's timeout ends", timeouts, func(n *World) { n.destination(n.Dest.Retry(), 0) })
		}
		try("kill", "the destination's agent is killed", kills, func(n *World) { n.killDestination(false) })
		try("kill", "the destination's agent and application are killed", kills, func(n *World) { n.killDestination(true) })
	} else {
		try("start", "the destination's agent starts", nil, (*World).startDestination)
	}
	if w.FUp {
		try("kill", "the load balancer's agent is killed", kills, func(n *World) { n.FUp, n.killed = false, true })
		if w.Flow.Buffering {
			try("timeout", "holding ends", timeouts, func(n *World) { n.Flow.Expire() })
		}
		if w.Flow.To != 0 && w.SSock == None && w.DSock == None { // otherwise one of them answers before the lapse
			try("timeout", "the move lapses", timeouts, func(n *World) { n.Flow.Lapse() })
		}
	} else {
		try("start", "the load balancer's agent starts", nil, func(n *World) { n.FUp = true })
	}
}

// patience ends the source's timeout.
func (w *World) patience() {
	if w.fault == bufferTwice && w.Source.Phase == move.Moving && w.Source.Nonce != 0 {
		w.post(move.Message{Kind: move.Buffer, From: move.AtSource, To: move.AtLoadBalancer, Epoch: w.Source.Epoch, Backend: D}, 0)
		return
	}
	w.source(w.Source.Retry())
}

// killSource kills the source's agent. The application has the socket, too: it survives unless application is set.
func (w *World) killSource(application bool) {
	w.SUp, w.killed = false, true
	if application {
		w.SSock = None
	}
}

// startSource starts the source's agent. The application reports its sessions, and the move of each stopped one.
func (w *World) startSource() {
	w.SUp = true
	switch w.SSock {
	case Stopped:
		w.resumed(true)
	case Live:
		if w.Source.Phase == move.Owns {
			w.Source.Nonce = 0 // it has received none
			return
		}
		w.resumed(false)
	case None:
		w.Source.Phase = move.Closed
	}
}

func (w *World) resumed(stopped bool) {
	w.Source = move.Resumed(w.Source.Epoch, w.Source.Nonce, stopped)
	w.Source.Parks = w.remaining.Parks
	w.source(w.Source.Retry())
}

// killDestination kills the destination's agent. The keeper, or the application, has the socket, too: it survives
// unless application is set.
func (w *World) killDestination(application bool) {
	w.DUp, w.killed = false, true
	if application {
		w.DSock = None
	}
}

// startDestination starts the destination's agent. For a session with a socket that has sent nothing, it asks the
// load balancer for the owner.
func (w *World) startDestination() {
	w.DUp = true
	w.DInc++
	if w.DSock == None || w.spoke() {
		w.Dest = move.Destination{}
		return
	}
	w.Dest.Phase = move.Flipping
	w.destination(w.Dest.Retry(), 0)
}

// quiesce starts everything dead, delivers all messages and ends all timeouts, until nothing changes. It returns the
// violation in that state, or "".
func (w World) quiesce() string {
	knew := w.knows() && !w.Reset
	for range 12 {
		was := w
		if !w.FUp {
			w.FUp = true
		}
		if !w.SUp {
			w.startSource()
		}
		if !w.DUp {
			w.startDestination()
		}
		for w.mails > 0 {
			w.deliver(0)
		}
		if w.Source.Phase != move.Owns && w.Source.Phase != move.Closed {
			w.source(w.Source.Retry())
		}
		if !w.spoke() {
			w.destination(w.Dest.Reconnected(), 0)
		}
		w.learn()
		for w.mails > 0 {
			w.deliver(0)
		}
		if w == was {
			break
		}
	}
	w.Flow.Lapse()
	w.guard = w.guard && w.Flow.Predecessor != 0
	at := 0
	if w.Flow.Owner == S && w.SSock == Live && w.SVer == w.Client {
		at++
	}
	if w.Flow.Owner == D && w.DSock == Live && w.DVer == w.Client {
		at++
	}
	switch {
	case w.bad != "":
		return "in the end: " + w.bad
	case w.SSock == Live && w.DSock == Live:
		return "in the end two applications have the session"
	case w.SSock == Stopped || w.DSock == Stopped:
		return "in the end a stopped socket is left without an owner"
	case !w.killed && !w.Over && at != 1:
		return fmt.Sprintf("without a kill, %d sockets serve the session in the end: %v", at, w)
	case knew && at != 1:
		return fmt.Sprintf("a socket had the client's data, and in the end %d sockets have it: %v", at, w)
	}
	return ""
}
