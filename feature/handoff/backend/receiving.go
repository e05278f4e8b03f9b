// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
	"github.com/weir-project/weir/feature/handoff/quarantine"
	"github.com/weir-project/weir/feature/handoff/repair"
	"github.com/weir-project/weir/feature/handoff/sock"
	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/awake"
	"github.com/weir-project/weir/internal/sockdiag"
)

// receiving is a session arriving here, until it has sent a packet.
type receiving struct {
	id   peer.Flow
	flow repair.Flow
	home *keeperClient

	mu     sync.Mutex
	dst    move.Destination
	since  time.Time  // of its arrival
	source *peer.Conn // connection for answers; nil: its agent is gone
	lb     uint64     // instance of the load balancer's agent with the latest message
	asked  time.Time

	packed  []byte // as received
	c       carried
	state   *repair.State
	built   *repair.Built // until started
	fd      int           // own descriptor while the keeper holds it under this agent's name; else -1
	session uint64        // number at the keeper
	kept    kept
	read    uint64 // positions at the keeper
	written uint64
	pending uint64 // unsent bytes at that time; the application's state includes them

	before    quarantine.Entry // quarantine entry before the arrival
	delivered bool             // a member has it
	turn      int              // number of arrivals and resumes: a handover for an earlier turn stops
}

// startReceive processes a frame of a session sent by another backend.
func (a *Agent) startReceive(c *peer.Conn, f peer.Frame) {
	if f.Message.Kind != move.State || f.Instance != a.own.Instance {
		return // for an earlier incarnation of this agent, which may have owned the session since
	}
	awake.For(awake.Moment)
	a.o.Step(stepState)
	flow, home := a.known.Load().findFlow(f.Flow)
	if home == nil {
		a.refused("arrival", fmt.Errorf("unknown service %d", f.Flow.Service))
		_ = c.Send(peer.Frame{Flow: f.Flow, Instance: c.Peer.Instance,
			Message: move.Message{Kind: move.Failed, From: move.AtDestination, To: move.AtSource, Epoch: f.Message.Epoch}})
		return
	}
	r := a.receivingAt(f.Flow, flow, home)
	r.mu.Lock()
	defer r.mu.Unlock()
	if f.Message.Epoch > r.dst.Epoch { // a later move: the earlier one has failed
		if r.dst.Phase == move.Restoring || r.dst.Phase == move.Flipping {
			a.discard(r)
		}
		r.dst, r.delivered, r.since = move.Destination{}, false, time.Now()
	}
	if r.fd < 0 && r.built == nil {
		r.home = home // the earlier one may have been retired
	}
	r.source, r.packed = c, f.Session
	a.come(r, r.dst.Receive(f.Message))
}

func (a *Agent) receivingAt(id peer.Flow, flow repair.Flow, home *keeperClient) *receiving {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.receiving[id]
	if r == nil {
		r = &receiving{id: id, flow: flow, home: home, fd: -1, since: time.Now()}
		a.receiving[id] = r
	}
	return r
}

// toDestination processes the load balancer's message about an arriving session.
func (a *Agent) toDestination(c *peer.Conn, f peer.Frame) {
	a.mu.Lock()
	r := a.receiving[f.Flow]
	a.mu.Unlock()
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lb = c.Peer.Instance
	a.come(r, r.dst.Receive(f.Message))
}

// come executes the protocol's actions and sends its messages. r.mu is held.
func (a *Agent) come(r *receiving, do move.Do) {
	for _, action := range do.Actions {
		switch action {
		case move.Restore:
			a.come(r, a.restore(r))
		case move.Deliver:
			a.deliver(r)
		case move.Discard:
			a.discard(r)
		}
	}
	for _, m := range do.Send {
		f := peer.Frame{Message: m, Flow: r.id}
		switch {
		case m.Kind == 0:
		case m.To == move.AtLoadBalancer:
			r.asked = time.Now()
			_ = a.lb.send(f) // lost messages are repeated
			a.o.Step(stepFlip)
		case r.source != nil:
			f.Instance = r.source.Peer.Instance
			_ = r.source.Send(f) // without this message the source asks the load balancer
			a.o.Step(stepToldDone)
		}
	}
}

// restore creates the socket from the received state, and leaves it in repair mode.
func (a *Agent) restore(r *receiving) move.Do {
	err := a.build(r)
	r.packed = nil
	if err != nil {
		a.refused("arrival", err)
		return r.dst.RestoreFailed()
	}
	return r.dst.Restored()
}

// leftTimeout is a fraction of the timeout: the wait for an earlier socket of the session on this backend. Its member
// and keeper close theirs shortly after its departure.
const leftTimeout = 0.3

// errNoMember means a session has to stay at its source.
var errNoMember = errors.New("no member of this backend is ready for it")

func (a *Agent) build(r *receiving) error {
	if r.home.members.Load() == 0 {
		return fmt.Errorf("service %s: %w", r.home.service, errNoMember)
	}
	c, kernelState, err := parseCarried(r.packed)
	if err != nil {
		return err
	}
	state, err := repair.Parse(kernelState)
	if err != nil {
		return err
	}
	if got := state.Flow(); got != r.flow {
		return fmt.Errorf("%w: it is %s, want %s", errCarried, got, r.flow)
	}
	r.c, r.state = c, state
	// Before anything exists that could cause an RST.
	if r.before, _, err = a.quarantine.Lookup(r.flow); err == nil {
		err = a.quarantine.Quiet(r.flow, r.dst.Epoch)
	}
	if err != nil {
		return err
	}
	a.o.Step(stepQuiet)
	a.untrack(r.flow) // an entry may remain from an earlier stay of the session, or an older weir
	for end := time.Now().Add(time.Duration(leftTimeout * float64(a.timeout()))); ; time.Sleep(time.Millisecond) {
		err = a.inside(func() (err error) {
			r.built, err = repair.Build(state, repair.RestoreOptions{Probe: true})
			return err
		})
		if !errors.Is(err, repair.ErrInUse) || time.Now().After(end) {
			break
		}
	}
	if err == nil {
		a.o.Step(stepBuilt)
		err = a.keepArrival(r)
	}
	if err != nil {
		if r.built != nil {
			r.built.Close()
			r.built = nil
		}
		return errors.Join(err, a.quarantine.BackTo(r.flow, r.dst.Epoch, r.before))
	}
	return nil
}

// inside runs f in the services' network namespace.
func (a *Agent) inside(f func() error) error {
	if a.o.home {
		return f()
	}
	return a.o.Netns.Do(f)
}

// deliver starts the session. It outlives this agent, because the keeper has it.
func (a *Agent) deliver(r *receiving) {
	if r.delivered || r.built == nil {
		return
	}
	a.o.Step(stepFlipped)
	if err := a.start(r); err != nil {
		a.refused("start", err)
		a.discard(r)
		return
	}
	a.o.Step(stepStarted)
	a.setEpoch(r.id, owned{session: r.session, epoch: r.dst.Epoch, nonce: r.dst.Nonce, by: r.lb, at: time.Now()})
	a.arrived(r)
	r.delivered = true
	a.handIn(r)
}

func (a *Agent) start(r *receiving) error {
	b := r.built
	r.built = nil
	if err := b.StartFD(); err != nil { // the descriptors of the keeper and the agent stay
		return err
	}
	for _, lost := range b.Lost {
		a.o.Log.Info("session continues without a feature", "flow", r.flow, "lost", lost)
	}
	return nil
}

// keepArrival gives a session in repair mode to the keeper. Without room there the session stays at its source. If
// this agent dies, its successor asks the load balancer for the owner.
func (a *Agent) keepArrival(r *receiving) error {
	fd, err := unix.FcntlInt(uintptr(r.built.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return err
	}
	at, err := sock.ReadPositions(fd)
	if err == nil {
		r.session, err = sock.Cookie(fd)
	}
	unsent := *r.state
	unsent.TLS = nil // the socket has it, and no other part needs the keys
	unsent.Send = r.built.Pending()
	unsent.Unsent = len(unsent.Send)
	var b []byte
	if err == nil {
		b, err = unsent.MarshalBinary()
	}
	if err != nil {
		unix.Close(fd)
		return err
	}
	r.read, r.written, r.pending = at.Read, at.Written-r.c.Replay, uint64(unsent.Unsent)
	c := r.c
	c.Unread = nil // sent separately
	r.kept = kept{Receiving: true, Epoch: r.dst.Epoch, Put: at.Written, Carried: c, Kernel: b}
	if most := r.home.maxBytes(); most == 0 {
		err = errNoKeeper
	} else if n := len(c.State) + len(r.c.Unread); n > most {
		err = fmt.Errorf("%w: %d bytes of state and unread data; the keeper keeps at most %d", wire.ErrLimit, n, most)
	} else {
		err = r.home.post(r.keep(), fd) // accepted: the keeper has no further condition
	}
	if err != nil {
		unix.Close(fd)
		return err
	}
	r.fd, r.turn = fd, r.turn+1
	a.o.Step(stepKeptHere)
	return nil
}

func (r *receiving) keep() *wire.Message {
	return &wire.Message{Type: wire.Keep, Session: r.session, Number: uint32(wire.Stream), Text: r.kept.Carried.Label,
		Read: r.read, Written: r.written, State: r.kept.append(nil), Unread: r.c.Unread}
}

// socketOpen reports whether a process has a connection's socket open.
func (a *Agent) socketOpen(f repair.Flow) (yes bool, err error) {
	err = a.inside(func() error {
		s, there, err := find(f)
		yes = there && s.Inode != 0
		return err
	})
	return yes, err
}

// discard ends a session owned by another backend, silently and for all local holders. r.mu is held.
func (a *Agent) discard(r *receiving) {
	switch {
	case r.built != nil:
		r.built.Close()
		r.built = nil
	case r.delivered: // its member sees an aborted connection; the quarantine blocks the RST
		if err := a.inside(func() error { return destroy(r.flow) }); err != nil {
			a.o.Log.Error("cannot close the copy of a moved session", "flow", r.flow, "err", err)
		}
	}
	if r.fd >= 0 {
		if err := repair.Freeze(r.fd); err != nil {
			a.o.Log.Warn("copy of a moved session ends with a reset", "flow", r.flow, "err", err)
		}
		_ = r.home.post(&wire.Message{Type: wire.Drop, Session: r.session})
		unix.Close(r.fd)
		r.fd = -1
	}
	epoch, before := r.dst.Epoch, r.before
	a.mu.Lock()
	delete(a.epochs, r.id)
	a.stats.discarded++
	a.mu.Unlock()
	time.AfterFunc(time.Second, func() { _ = a.quarantine.BackTo(r.flow, epoch, before) })
}

// destroy closes a connection of this namespace.
func destroy(f repair.Flow) error {
	s, there, err := find(f)
	if err != nil || !there {
		return err
	}
	return sockdiag.Destroy(s)
}

// find looks up a connection in this namespace.
func find(f repair.Flow) (s sockdiag.Socket, there bool, err error) {
	all, err := sockdiag.Dump(sockdiag.Query{Proto: unix.IPPROTO_TCP, LocalPort: f.Local.Port()})
	for _, s := range all {
		if s.Remote.Port() == f.Remote.Port() && s.Remote.Addr().Unmap() == f.Remote.Addr() && s.Local.Addr().Unmap() == f.Local.Addr() {
			return s, true, nil
		}
	}
	return s, false, err
}

// watchReceiving repeats unanswered requests, and forgets arrived sessions.
func (a *Agent) watchReceiving(r *receiving, now time.Time) {
	if !r.mu.TryLock() { // see watchSending
		return
	}
	defer r.mu.Unlock()
	switch {
	case r.dst.Phase == move.Flipping && now.Sub(r.asked) > a.timeout()/4:
		a.come(r, r.dst.Retry())
	case r.dst.Phase == move.Idle && r.fd < 0, r.dst.Phase == move.Active && r.delivered && r.fd < 0 && a.spoke(r):
		a.mu.Lock()
		if a.receiving[r.id] == r {
			delete(a.receiving, r.id)
		}
		a.mu.Unlock()
	}
}

// spoke reports whether the session has sent a packet: from then on nobody reclaims it.
func (a *Agent) spoke(r *receiving) bool {
	e, there, err := a.quarantine.Lookup(r.flow)
	return err == nil && (!there || e.State == quarantine.Left)
}
