// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
)

// resumeDeparture continues a departure interrupted by the death of an earlier agent. s.mu is held.
func (a *Agent) resumeDeparture(s *sending, m wire.Message) {
	k, err := parseKept(m.State)
	if err != nil || k.Epoch == 0 { // it had not started
		s.kept.Carried.Name = ""
		if err == nil {
			s.kept = k
		}
		a.giveBack(s)
		return
	}
	s.kept = k
	frozen, err := repair.Frozen(s.fd)
	s.src = move.Resumed(k.Epoch, k.Nonce, frozen || err != nil)
	a.o.Log.Info("departure resumed", "flow", s.flow, "epoch", k.Epoch, "stopped", s.src.Sent)
	a.executeSend(s, s.src.Retry())
}

// resumeArrival continues an arrival interrupted by the death of an earlier agent, or a departure on a way that is
// now closed.
func (a *Agent) resumeArrival(p *keeperClient, m wire.Message, fd int) {
	k, err := parseKept(m.State)
	if wire.Elsewhere(m.Name) && err == nil && !k.Receiving {
		a.startSend(p, k.Other, m, fd)
		return
	}
	if m.Name != p.name || err != nil || !k.Receiving {
		why := "it is at this backend already"
		if wire.Moving(m.State) && err != nil { // from an agent of another version
			why = err.Error()
			a.refused("arrival", err)
		}
		_ = p.post(&wire.Message{Type: wire.Reject, Session: m.Session, Text: why})
		unix.Close(fd)
		return
	}
	_ = p.post(&wire.Message{Type: wire.Accept, Session: m.Session})
	local, remote := sock.Addresses(fd)
	r := a.receivingAt(a.known.Load().flowID(p.service, local, remote), repair.Flow{Local: local, Remote: remote}, p)
	r.mu.Lock()
	defer r.mu.Unlock()
	// An existing record belongs to a retiring way, or to an earlier connection to the keeper. It is replaced.
	if r.fd >= 0 {
		unix.Close(r.fd)
	}
	if r.built != nil {
		r.built.Close()
		r.built = nil
	}
	r.home, r.turn = p, r.turn+1
	r.fd, r.session, r.read, r.written, r.kept, r.c, r.delivered = fd, m.Session, m.Read, m.Written, k, k.Carried, false
	r.c.Unread = m.Unread
	if r.dst.Phase == move.Idle {
		r.dst = move.Destination{Phase: move.Flipping, Epoch: k.Epoch}
	}
	if err := a.adopt(r, fd); err != nil {
		a.refused("start", err)
		a.discard(r)
		return
	}
	a.o.Log.Info("arrival resumed", "flow", r.flow, "epoch", k.Epoch)
	if r.dst.Phase == move.Active {
		a.deliver(r)
		return
	}
	a.come(r, r.dst.Retry())
}

// adopt takes over the socket in its present state: some of the unsent bytes may have been sent.
func (a *Agent) adopt(r *receiving, fd int) error {
	state, err := repair.Parse(r.kept.Kernel)
	if err != nil {
		return err
	}
	at, err := sock.ReadPositions(fd)
	if err != nil {
		return err
	}
	sent := at.Written - r.kept.Put
	if sent > uint64(len(state.Send)) {
		return fmt.Errorf("%d bytes were sent of %d", sent, len(state.Send))
	}
	r.pending = uint64(len(state.Send))
	state.Send = state.Send[sent:]
	state.Unsent = len(state.Send)
	r.state = state
	r.built, err = repair.Adopt(fd, state)
	return err
}

// orphans asks the load balancer about sessions of earlier agents that the quarantine still has, and about sessions
// only the quarantine has.
func (a *Agent) orphans() {
	entries, err := a.quarantine.Entries()
	if err != nil {
		a.o.Log.Warn("cannot read the quarantine", "err", err)
		return
	}
	know := a.known.Load()
	for _, e := range entries {
		if e.Since > a.began || e.State == quarantine.Left {
			continue
		}
		s, ok := know.serviceAt(e.Flow.Local)
		id := peer.Flow{Service: s.ID, Client: e.Flow.Remote}
		a.mu.Lock()
		busy := a.sending[id] != nil || a.receiving[id] != nil
		a.mu.Unlock()
		switch {
		case !ok, e.State == quarantine.Pass:
			_ = a.quarantine.Lift(e.Flow, e.Epoch)
		case busy:
		case e.State == quarantine.Shut, e.State == quarantine.Buffered: // if the keeper has it, this agent eventually receives it
			a.mu.Lock()
			known := a.stopped[id]
			a.stopped[id] = true
			a.mu.Unlock()
			if !known { // the load balancer may reconnect repeatedly
				a.wg.Go(func() { a.openForNobody(id, e) })
			}
		default:
			r := a.receivingAt(id, e.Flow, know.home[s.Name])
			r.mu.Lock()
			if r.dst.Phase == move.Idle {
				r.dst, r.delivered = move.Destination{Phase: move.Flipping, Epoch: e.Epoch}, true
				a.come(r, r.dst.Retry())
			}
			r.mu.Unlock()
		}
	}
}

// openForNobody opens a quarantine closed by an earlier agent, once no process has the session's socket. A process's
// socket may be stopped, and would answer packets. Without a socket, the client must receive an RST.
func (a *Agent) openForNobody(id peer.Flow, e quarantine.Entry) {
	defer func() {
		a.mu.Lock()
		delete(a.stopped, id)
		a.mu.Unlock()
	}()
	t := time.NewTicker(orphanTime)
	defer t.Stop()
	for {
		select {
		case <-a.ctx.Done():
			return
		case <-t.C:
		}
		a.mu.Lock()
		busy := a.sending[id] != nil
		a.mu.Unlock()
		now, there, err := a.quarantine.Lookup(e.Flow)
		if busy || err == nil && (!there || now.Epoch != e.Epoch || now.State == quarantine.Left) {
			return // this agent has, or had, the session
		}
		held, err := a.socketOpen(e.Flow)
		if err == nil && !held {
			if err = a.quarantine.Lift(e.Flow, e.Epoch); err == nil {
				return
			}
		}
		if err != nil {
			a.o.Log.Warn("packets of a session stay blocked", "flow", e.Flow, "err", err)
		}
	}
}

// orphanTime is the interval for checking the sessions of an earlier agent.
const orphanTime = 2 * time.Second
