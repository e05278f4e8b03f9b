// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/awake"
)

// sending is a departing session.
type sending struct {
	id   peer.Flow
	flow repair.Flow
	by   *keeperClient // the way to the destination
	to   move.Backend

	mu      sync.Mutex
	lb      uint64 // instance of the load balancer's agent with the latest message
	src     move.Source
	fd      int
	session uint64 // number at the keeper
	read    uint64 // committed positions
	written uint64
	unread  []byte
	kept    kept
	skip    int // bytes at the head of the receive queue included in the application's state

	prepared *repair.Prepared // nil: the dump has to read everything

	asking  bool // the load balancer was asked for the session's epoch
	state   []byte
	since   time.Time // of its transfer to this agent
	asked   time.Time // of the latest unanswered message
	stopped time.Time
	parked  bool // its packets are buffered here
	back    bool // on its way back to the application
	doubt   bool // the load balancer does not know the move
}

// startSend starts the move of a session that a member has transferred to another backend's name.
func (a *Agent) startSend(p *keeperClient, to move.Backend, m wire.Message, fd int) {
	awake.For(awake.Moment)
	s := &sending{by: p, to: to, fd: fd, session: m.Session, read: m.Read, written: m.Written, unread: m.Unread, since: time.Now()}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := a.admit(s, m); err != nil {
		a.refused("departure", err)
		unix.Close(fd) // with its lock, because the member gets the session back at once
		_ = p.post(&wire.Message{Type: wire.Reject, Session: m.Session, Number: uint32(wire.BadSocket), Text: err.Error()})
		return
	}
	_ = p.post(&wire.Message{Type: wire.Accept, Session: m.Session})
	a.o.Step(stepGiven)
	if wire.Elsewhere(m.Name) { // an earlier agent had it
		a.resumeDeparture(s, m)
		return
	}
	epoch, birth, known := a.lookupEpoch(s)
	if known {
		a.begin(s, epoch, birth)
		return
	}
	s.asking = true
	_ = p.post(s.commit()) // records that the move has not started
	a.tellLB(s, move.Message{Kind: move.Ask, From: move.AtSource, To: move.AtLoadBalancer})
}

// admit identifies the session, and rejects immovable ones.
func (a *Agent) admit(s *sending, m wire.Message) error {
	if _, err := parseKept(m.State); wire.Moving(m.State) && err != nil {
		return err // from an agent of another version
	}
	if wire.Kind(m.Number) != wire.Stream {
		return fmt.Errorf("a %s cannot move", wire.Kind(m.Number))
	}
	if !sock.Lock(s.fd) {
		return errors.New("a member has taken it back")
	}
	local, remote := sock.Addresses(s.fd)
	know := a.known.Load()
	service, ok := know.serviceAt(local)
	if !ok || service.Name != s.by.service {
		return fmt.Errorf("the session is at %s, but service %s is at %s", local, s.by.service, know.addresses(s.by.service))
	}
	s.flow = repair.Flow{Local: local, Remote: remote}
	s.id = peer.Flow{Service: service.ID, Client: remote}
	at, err := sock.ReadPositions(s.fd)
	if err != nil {
		return err
	}
	if wire.Before(m.Read, at.Read) {
		return fmt.Errorf("%d bytes were read and not committed: the member must commit before the transfer", at.Read-m.Read)
	}
	s.skip = int(m.Read - at.Read)
	// Quiesce while packets still arrive: once the load balancer buffers them, the rest of a kTLS record would not
	// arrive.
	if !wire.Moving(m.State) {
		if err := repair.Quiesce(s.fd, repair.DumpOptions{Limit: a.o.Limit}); err != nil {
			return err
		}
	}
	reuse, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_REUSEADDR)
	if err != nil {
		return err
	}
	s.kept = kept{Other: s.to, ReuseAddr: reuse != 0,
		Carried: carried{Name: m.Name, Label: m.Text, State: m.State, Replay: at.Written - m.Written}}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.sending[s.id] != nil {
		return errors.New("it is already under way")
	}
	a.sending[s.id] = s
	return nil
}

// begin moves a session owned in an epoch. With the nonce of the load balancer's record it does not wait for the
// answer, if this backend can buffer packets until the load balancer does. s.mu is held.
func (a *Agent) begin(s *sending, e move.Epoch, b move.Nonce) {
	if !a.quarantine.Buffers() {
		b = 0
	}
	s.src = move.Source{Epoch: e, Nonce: b, Parks: a.o.Buffer}
	do, err := s.src.Start(s.to)
	if err != nil {
		a.o.Log.Error("cannot start a move", "flow", s.flow, "err", err) // cannot happen: a new source can always start
		return
	}
	s.kept.Epoch, s.kept.Nonce = s.src.Epoch, b
	if err := s.by.post(s.commit()); err != nil {
		a.giveBack(s) // without a kept state nobody could continue after this agent's death
		return
	}
	a.o.Step(stepKept)
	a.executeSend(s, do)
	// Prepare while the load balancer works. The dump reports its errors.
	s.prepared, _ = repair.Prepare(s.fd, repair.DumpOptions{Limit: a.o.Limit})
	if s.size() <= maxConcurrent {
		a.executeSend(s, s.src.Ahead())
		return
	}
	a.workers.run(func() { // the reader of the keeper's connection must not wait for a long transmission
		s.mu.Lock()
		defer s.mu.Unlock()
		a.executeSend(s, s.src.Ahead())
	})
}

// maxConcurrent is the maximum of bytes of a session sent by the goroutine that received it.
const maxConcurrent = 64 << 10

// size returns the approximate number of bytes to send for a session.
func (s *sending) size() int {
	unread, _ := unix.IoctlGetInt(s.fd, unix.SIOCINQ) // the dump reports errors
	unacked, _ := unix.IoctlGetInt(s.fd, unix.SIOCOUTQ)
	return len(s.kept.Carried.State) + len(s.unread) + unread + unacked
}

// keep returns the message that gives a keeper the session with its descriptor. commit returns the update for a
// keeper that has it.
func (s *sending) keep() *wire.Message {
	return &wire.Message{Type: wire.Keep, Session: s.session, Number: uint32(wire.Stream), Text: s.kept.Carried.Label,
		Read: s.read, Written: s.written, State: s.kept.append(nil), Unread: s.unread}
}

func (s *sending) commit() *wire.Message {
	m := s.keep()
	m.Type, m.Number, m.Text = wire.Commit, 0, ""
	return m
}

// toSource processes a message about a departing session, from the load balancer on connection lb, or from a
// destination (lb is nil).
func (a *Agent) toSource(lb *peer.Conn, f peer.Frame) {
	a.mu.Lock()
	s := a.sending[f.Flow]
	a.mu.Unlock()
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if lb != nil {
		s.lb = lb.Peer.Instance
	}
	m := f.Message
	if m.Kind == move.Buffered && m.Epoch == s.src.Epoch {
		a.o.Step(stepBuffered)
	}
	switch {
	case m.Kind != move.Known:
		if m.Kind == move.Buffered && m.OK && m.Epoch == s.src.Epoch && !s.src.Parks && s.src.Phase != move.Reclaiming {
			a.release(s, false) // the load balancer buffers them
		}
		if m.Kind == move.Done && m.Epoch == s.src.Epoch && s.src.Phase == move.Moving {
			a.release(s, false) // the load balancer forwards them
			a.moved(s)
			a.o.Step(stepDone)
		}
		if m.Kind == move.Reclaimed && m.Move == s.src.Epoch && s.src.Phase == move.Reclaiming { // a late answer about an earlier move is ignored
			if s.doubt = !m.OK; s.doubt && !s.src.Sent {
				a.refused("departure", errors.New("the load balancer does not know the session in this epoch"))
			}
		}
		a.executeSend(s, s.src.Receive(m))
	case s.asking && m.OK:
		s.asking = false
		epoch, _, _ := a.lookupEpoch(s)
		a.begin(s, max(m.Epoch, epoch), m.Nonce) // the load balancer may have forgotten moves; their late messages must not match
	case s.asking:
		s.asking = false
		a.refused("departure", errors.New("the load balancer does not know this backend as the session's owner"))
		a.giveBack(s)
	}
}

// executeSend executes the protocol's actions and sends its messages. s.mu is held.
func (a *Agent) executeSend(s *sending, do move.Do) {
	for _, action := range do.Actions {
		switch action {
		case move.Dump:
			a.executeSend(s, a.dump(s))
		case move.Thaw:
			a.thaw(s)
		case move.Close:
			a.gone(s)
		}
	}
	for _, m := range do.Send {
		switch m.To {
		case move.AtLoadBalancer:
			if m.Kind != 0 {
				a.tellLB(s, m)
			}
		case move.AtDestination:
			s.asked = time.Now()
			f := peer.Frame{Message: m, Flow: s.id, Session: s.state}
			if err := a.sendTo(s.to, f); err != nil {
				a.refused("departure", fmt.Errorf("%s: %w", a.backendName(s.to), err))
				a.executeSend(s, s.src.Retry())
			} else {
				s.asked = time.Now() // sending much data takes long, and the destination has received it only now
			}
			a.o.Step(stepSent)
		}
	}
}

func (a *Agent) tellLB(s *sending, m move.Message) {
	s.asked = time.Now()
	if m.Kind == move.Reclaim {
		a.await(s)
	}
	err := a.lb.send(peer.Frame{Message: m, Flow: s.id}) // lost messages are repeated
	if m.Kind == move.Buffer {
		if err != nil {
			s.src.Nonce = 0 // going ahead is pointless
		}
		a.o.Step(stepBuffer)
	}
}

// dump takes the session out of the kernel.
func (a *Agent) dump(s *sending) move.Do {
	s.stopped = time.Now()
	epoch := s.src.Epoch
	dump := repair.Dump
	if s.prepared != nil {
		dump = s.prepared.Dump
	}
	// Do not wait for kTLS here: the load balancer holds the missing packets, and admit has waited.
	state, err := dump(s.fd, repair.DumpOptions{Limit: a.o.Limit, Quiet: -1, Stop: func(f repair.Flow) (func(), error) {
		shut := a.quarantine.Shut
		if s.src.Parks || s.src.Nonce != 0 {
			shut, s.parked = a.quarantine.Buffer, true
		}
		err := shut(s.flow, epoch)
		a.o.Step(stepShut)
		return func() { a.release(s, true); _ = a.quarantine.Lift(s.flow, epoch) }, err
	}})
	if err == nil && len(state.Unread) < s.skip {
		err = errors.New("committed bytes are missing in the receive queue")
	}
	if err == nil {
		c := s.kept.Carried
		c.Unread = append(bytes.Clone(s.unread), state.Unread[s.skip:]...)
		state.Unread = nil
		s.state, err = s.pack(c, state)
	}
	if err != nil {
		a.refused("dump", err)
		return s.src.DumpFailed()
	}
	a.o.Step(stepDumped)
	return s.src.Dumped()
}

func (s *sending) pack(c carried, state *repair.State) ([]byte, error) {
	b, err := state.MarshalBinary()
	if err != nil {
		return nil, err
	}
	return c.append(make([]byte, 0, len(b)+len(c.State)+len(c.Unread)+256), b), nil
}

// thaw continues the session here. s.mu is held.
func (a *Agent) thaw(s *sending) {
	frozen, err := repair.Frozen(s.fd)
	if err == nil && frozen {
		err = repair.Resume(s.fd, &repair.State{ReuseAddr: s.kept.ReuseAddr})
	}
	if err != nil {
		a.o.Log.Error("cannot resume a session", "flow", s.flow, "err", err)
	}
	a.release(s, true)
	if err := a.quarantine.Lift(s.flow, s.kept.Epoch); err != nil {
		a.o.Log.Error("packets of a session stay blocked", "flow", s.flow, "err", err)
	}
	a.setEpoch(s.id, owned{session: s.session, epoch: s.src.Epoch, doubt: s.doubt, nonce: s.src.Nonce, by: s.lb, at: time.Now()})
	a.giveBack(s)
}

// gone ends the remains of a departed session. The quarantine stays shut, and then drops late packets. The kernel
// would answer them with an RST, and a load balancer that has forgotten the session would forward it. s.mu is held.
func (a *Agent) gone(s *sending) {
	a.o.Step(stepReclaimed)
	a.release(s, false)
	if err := repair.Freeze(s.fd); err != nil {
		a.o.Log.Warn("copy of a moved session ends with a reset", "flow", s.flow, "err", err)
	}
	_ = s.by.post(&wire.Message{Type: wire.Drop, Session: s.session})
	unix.Close(s.fd)
	a.untrack(s.flow)
	a.mu.Lock()
	delete(a.sending, s.id)
	delete(a.epochs, s.id)
	a.mu.Unlock()
	a.o.Step(stepDropped)
	a.quarantine.Leaves(s.flow, s.kept.Epoch, s.to, func(err error) { a.o.Log.Warn("cannot remember a departed session", "err", err) })
}

// giveBack gives the session to a member of this backend. s.mu is held.
func (a *Agent) giveBack(s *sending) {
	s.back = true
	a.mu.Lock()
	a.stats.back++
	a.mu.Unlock()
	c := s.kept.Carried
	sock.Unlock(s.fd) // the member locks it
	m := wire.Message{Session: s.session, Read: s.read, Written: s.written, State: c.State, Unread: s.unread}
	go func() {
		if !a.transfer(s.id, s.by, m, c.Name, func() *wire.Message { return s.keep() }, s.fd) {
			a.o.Log.Warn("session ended before its return", "flow", s.flow)
		}
		unix.Close(s.fd)
		a.mu.Lock()
		delete(a.sending, s.id)
		a.mu.Unlock()
	}()
}

// transfer gives a session to a local member: to the named one, or to the one with the fewest sessions. It waits for
// such a member, and returns false if the session ends before. keep returns the session's Keep message for a keeper
// without it, or nil if another caller handles it.
func (a *Agent) transfer(id peer.Flow, p *keeperClient, m wire.Message, name string, keep func() *wire.Message, fd int) bool {
	defer a.waitsFor(id, nil)
	for try := 0; ; try++ {
		t := m
		t.Type, t.Name = wire.Transfer, name
		err := p.call(&t)
		if name != "" && (errors.Is(err, wire.ErrNoPeer) || errors.Is(err, wire.ErrSlow)) {
			t = m
			t.Type, t.Name = wire.Transfer, ""
			err = p.call(&t)
		}
		switch {
		case err == nil:
			return true
		case errors.Is(err, wire.ErrLost):
			_ = p.post(&wire.Message{Type: wire.Drop, Session: m.Session})
			return false
		case errors.Is(err, wire.ErrNoSession), errors.Is(err, errNoKeeper):
			again := keep()
			if again == nil {
				return true // given to this agent again, and handled by another caller
			}
			_ = p.post(again, fd) // a new keeper
		case try == 20:
			a.o.Log.Warn("session waits for a member", "service", p.service, "err", err)
		}
		a.waitsFor(id, err)
		time.Sleep(min(time.Duration(try+1)*time.Millisecond, 100*time.Millisecond))
		if _, err := sock.ReadPositions(fd); err != nil {
			_ = p.post(&wire.Message{Type: wire.Drop, Session: m.Session})
			return false
		}
	}
}

// watchSending ends the timeouts of a session.
func (a *Agent) watchSending(s *sending, now time.Time) {
	if !s.mu.TryLock() { // the session is in use, perhaps for long: others must not wait
		return
	}
	defer s.mu.Unlock()
	waited := now.Sub(s.asked)
	switch {
	case s.back:
	case s.asking && waited > a.timeout():
		s.asking = false
		a.refused("departure", errors.New("the load balancer does not answer"))
		a.giveBack(s)
	case s.src.Phase == move.Moving && waited > a.timeout():
		a.refused("departure", fmt.Errorf("%s does not answer", a.backendName(s.to)))
		a.executeSend(s, s.src.Retry())
	case (s.src.Phase == move.Holding || s.src.Phase == move.Reclaiming) && waited > a.timeout()/4:
		a.executeSend(s, s.src.Retry())
	}
}

// lost reclaims the sessions under way to a backend whose agent is gone.
func (a *Agent) lost(to move.Backend) {
	all, _ := a.all()
	for _, s := range all {
		if s.to != to {
			continue // its lock may be held for long by a transmission to another backend
		}
		s.mu.Lock()
		if s.src.Phase == move.Moving {
			a.executeSend(s, s.src.Retry())
		}
		s.mu.Unlock()
	}
}
