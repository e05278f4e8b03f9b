// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/wire"
	"github.com/weir-project/weir/internal/accept"
	"github.com/weir-project/weir/internal/awake"
)

// member is a process of a service while it is connected, and afterwards until it has exited: before its exit it may
// still use its sessions.
type member struct {
	conn    *wire.Conn
	admit   func() bool  // see accept.Conn.Admit
	end     func() error // accept.Conn.Close; waits for the reader
	process *process
	service *service
	name    string
	caps    uint32
	limit   int64  // bytes of state: MaxState, or an older value until the member has agreed to the change
	serial  uint64 // larger for younger members
	since   time.Time
	ready   bool      // accepts sessions
	standby bool      // accepts only sessions not accepted by a newer member of its name
	alone   bool      // stood by, and was told that no newer member is left
	patient time.Time // earliest time to be told that
	asked   time.Time // time of the unread probe: see prove
	hangs   bool      // has not read it for slowTime
	load    uint32
	loaded  bool      // has sent its load
	gone    bool      // disconnected
	heard   bool      // if gone: the connection was read to its end
	readied time.Time // time of the first Ready
	ended   time.Time

	released context.CancelFunc // if gone: ends the wait for the process's exit

	sessions map[uint64]*session
	given    map[uint64]time.Time // unanswered sessions, and since when
	looked   time.Time            // time of the last evaluation of late: see slow
	late     bool                 // has not answered for slowTime
	parks    map[uint64]*session  // sessions suspended by it
	sent     map[string]bool      // names to which root sends its sessions
	board    *wire.BoardReader    // nil: none

	queue  []outgoing         // unread messages, next first
	newest map[string]*uint32 // numbers in the queue that later ones replace: see postNewest
	kick   chan struct{}

	cost time.Duration // of the latest request; used by the reader only
	ends ends          // of the passed socket; used by the reader only
}

// outgoing is a queued message. A message that gives a session gets the session's state when it is sent. A message
// with a newest number gets its latest value.
type outgoing struct {
	message wire.Message
	gives   *session
	newest  *uint32
}

// connection serves a process from its first to its last message.
func (k *Keeper) connection(ctx context.Context, c *accept.Conn) {
	release := sync.OnceFunc(c.Release)
	defer release()
	defer c.Close()
	u, ok := c.Conn.(*net.UnixConn)
	if !ok {
		return
	}
	p, err := identify(u)
	if err != nil {
		k.Log.Warn("connection rejected", "uid", c.Peer.UID, "err", err)
		return
	}
	defer func() {
		if ctx.Err() == nil { // otherwise bequeath needs the pidfd: a closed one would report a live process as exited
			p.pidfd.Close()
		}
	}()
	conn, err := wire.NewConn(u)
	if err != nil {
		return
	}
	conn.SetReadDeadline(time.Now().Add(helloTime))
	// When the keeper exits, messages already sent still count, for example a Leave.
	stop := context.AfterFunc(ctx, func() {
		conn.SetReadDeadline(time.Now().Add(lastWords))
		time.AfterFunc(time.Second, func() { c.Close() }) // even if the member continues to send
	})
	defer stop()
	m := &member{conn: conn, admit: c.Admit, end: c.Close, process: p, since: time.Now(), sessions: map[uint64]*session{}, given: map[uint64]time.Time{}, parks: map[uint64]*session{}, kick: make(chan struct{}, 1)}
	ended := make(chan struct{})
	go m.write(k, ended)
	err = k.read(ctx, m)
	close(ended)
	c.Close()
	release()
	if err != nil && ctx.Err() == nil {
		k.Log.Warn("member connection failed", "service", m.serviceName(), "member", m.name, "pid", p.PID, "uid", p.UID, "err", err)
	}
	k.releaseAll(m)
	m.heard = err == nil
	k.endMember(ctx, m)
}

func (m *member) serviceName() string {
	if m.service == nil {
		return ""
	}
	return m.service.name
}

// read processes messages until the process has exited or closes the connection.
func (k *Keeper) read(ctx context.Context, m *member) error {
	receive := m.conn.Receive
	for {
		msg, fds, err := receive()
		if msg.Session != 0 && wire.Elsewhere(m.name) { // a session moves
			awake.For(awake.Moment)
		}
		switch {
		case err == io.EOF, errors.Is(err, wire.ErrEmpty):
			return nil
		case errors.Is(err, os.ErrDeadlineExceeded) && m.service == nil:
			return errors.New("no Hello in time")
		case errors.Is(err, os.ErrDeadlineExceeded):
			// The process has exited, and a child may hold the connection open; or the keeper exits. All earlier
			// messages still count, however long reading them takes.
			receive = m.conn.TryReceive
			continue
		case errors.Is(err, wire.ErrMalformed):
			m.conn.TrySend(&wire.Message{Type: wire.Error, Number: uint32(wire.Malformed), Text: short(err.Error())})
			return err
		case err != nil:
			return err
		}
		if msg.Version != wire.Version {
			wire.CloseAll(fds)
			err := wire.Errorf(wire.BadVersion, "this keeper supports version %d of the protocol, not %d", wire.Version, msg.Version)
			m.conn.TrySend(errorMessage(&msg, err))
			return err
		}
		wire.CloseAll(k.answer(ctx, m, &msg, fds))
		k.pay(ctx, m)
	}
}

// answer processes a message, and returns the unused descriptors.
func (k *Keeper) answer(ctx context.Context, m *member, msg *wire.Message, fds []int) []int {
	if msg.Cut && msg.Type == wire.Hello { // boards are optional
		msg.Cut, msg.Number = false, msg.Number&^wire.Boards
	}
	var err error
	switch {
	case msg.Cut:
		err = wire.ErrNoDescriptors()
	case msg.Flags&wire.StateFD != 0 && hasState(msg.Type):
		defer k.fetches.turn(m.process)()
		fds, err = k.fetch(m, msg, fds)
	}
	if err == nil && msg.Type == wire.Keep && m.service != nil && len(fds) > 0 {
		m.ends, err = socketEnds(m.process, fds[0])
	}
	if err == nil {
		return k.handle(ctx, m, msg, fds)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.reply(m, msg, nil, err)
	return fds
}

// hasState reports whether requests of a type carry a state. Other states are not read.
func hasState(t wire.Type) bool { return t == wire.Keep || t == wire.Commit || t == wire.Transfer }

// fetch reads a state too large for its message, before the keeper is locked.
func (k *Keeper) fetch(m *member, msg *wire.Message, fds []int) ([]int, error) {
	if len(fds) == 0 {
		return fds, wire.Errorf(wire.BadSocket, "the descriptor of the state is missing")
	}
	last := len(fds) - 1
	if err := msg.Fetch(fds[last], k.fetchable(m, msg.Session)); err != nil {
		return fds, err
	}
	unix.Close(fds[last])
	return fds[:last], nil
}

// handle processes a message, and returns the unused descriptors.
func (k *Keeper) handle(ctx context.Context, m *member, msg *wire.Message, fds []int) []int {
	var answer *wire.Message
	var err error
	if msg.Type == wire.Send || msg.Type == wire.Forget || msg.Type == wire.Suspend {
		m.cost += memberCost
	}
	switch {
	case msg.Type == wire.Hello:
		if fds, err = k.hello(ctx, m, msg, fds); err == nil {
			return fds // answered already
		}
	case msg.Type == wire.Status:
		return k.report(ctx, m, msg, fds)
	case msg.Type == wire.Send:
		answer, err = k.ask(ctx, m, msg)
	case msg.Type == wire.Forget:
		answer, err = k.forgets(ctx, m, msg)
	case msg.Type == wire.Suspend:
		if err = k.suspend(ctx, m, msg); err == nil {
			return fds // answered when the session is suspended
		}
	case msg.Type == wire.Release:
		err = k.release(m, msg)
	case m.service == nil:
		err = wire.Errorf(wire.NotMember, "send Hello first, with the name of a service")
	default:
		k.mu.Lock()
		defer k.mu.Unlock()
		answer, fds, err = k.request(m, msg, fds)
		k.reply(m, msg, answer, err)
		return fds
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.reply(m, msg, answer, err)
	return fds
}

// reply answers a request. It sends errors even if no answer was requested. k.mu is held.
func (k *Keeper) reply(m *member, msg, answer *wire.Message, err error) {
	switch {
	case err != nil:
		if m.cost += refusalCost; msg.Type == wire.Hello {
			m.cost += memberCost
		}
		log := k.Log.Warn
		if errors.Is(err, wire.ErrNotFound) {
			log = k.Log.Debug // the first member of a name always gets this error
		}
		log("refused", "service", m.serviceName(), "member", m.name, "pid", m.process.PID, "uid", m.process.UID, "request", msg.Type.Request(), "err", err)
		k.post(m, outgoing{message: *errorMessage(msg, err)})
	case msg.Seq == 0:
	case answer != nil:
		answer.Seq = msg.Seq
		k.post(m, outgoing{message: *answer})
	default:
		k.post(m, outgoing{message: wire.Message{Type: wire.OK, Seq: msg.Seq, Session: msg.Session}})
	}
}

func errorMessage(request *wire.Message, err error) *wire.Message {
	code := wire.Malformed
	if e, ok := errors.AsType[*wire.CodeError](err); ok {
		code = e.Code
	} else if errors.Is(err, wire.ErrBadSocket) {
		code = wire.BadSocket
	} else if errors.Is(err, wire.ErrLimit) {
		code = wire.Limit
	}
	return &wire.Message{Type: wire.Error, Seq: request.Seq, Session: request.Session, Number: uint32(code), Text: short(err.Error())}
}

// short truncates a text for a message. It copies it, so the long text can be freed.
func short(s string) string { return strings.Clone(s[:min(len(s), wire.MaxText)]) }

// post sends a message, or queues it behind earlier ones. k.mu is held.
func (k *Keeper) post(m *member, o outgoing) {
	if m.gone {
		return
	}
	if len(m.queue) == 0 && !errors.Is(k.sendNow(m, o), wire.ErrFull) {
		return // sent; or the connection is broken, and its reader handles that
	}
	if !k.queues(m, &o.message) {
		k.Log.Warn("member send queue full, disconnecting", "service", m.serviceName(), "member", m.name, "pid", m.process.PID, "uid", m.process.UID)
		go m.end() // not under mu: its queue may contain descriptors
		return
	}
	m.queue = append(m.queue, o)
	if o.newest != nil {
		if m.newest == nil {
			m.newest = map[string]*uint32{}
		}
		m.newest[o.message.Name] = o.newest
	}
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// postNewest is post for a number that a later one of the same name may replace. Other processes choose the rate of
// changes, so at most one is queued for each name.
func (k *Keeper) postNewest(m *member, t wire.Type, name string, n uint32) {
	if waits := m.newest[name]; waits != nil {
		*waits = n
		return
	}
	k.post(m, outgoing{message: wire.Message{Type: t, Name: name}, newest: &n})
}

func (k *Keeper) sendNow(m *member, o outgoing) error {
	if o.newest != nil {
		o.message.Number = *o.newest
	}
	if o.gives == nil {
		return m.conn.TrySend(&o.message)
	}
	s := o.gives
	if s.owner != m {
		return nil // it has another owner by now
	}
	o.message.State, o.message.Unread = s.state, s.unread
	large, err := o.message.Spill()
	if err != nil {
		k.Log.Warn("cannot send session", "service", s.service.name, "to", m.name, "err", err)
		return wire.ErrFull // out of memory or descriptors: retry later
	}
	if large >= 0 {
		defer unix.Close(large)
		return m.conn.TrySend(&o.message, s.fd, large)
	}
	return m.conn.TrySend(&o.message, s.fd)
}

// write sends queued messages while the member reads.
func (m *member) write(k *Keeper, ended chan struct{}) {
	for {
		select {
		case <-ended:
			return
		case <-m.kick:
		}
		for m.flush(k) {
			if m.conn.WaitWritable() != nil {
				return
			}
		}
	}
}

// flush sends queued messages until the socket is full. It reports whether messages remain.
func (m *member) flush(k *Keeper) bool {
	k.mu.Lock()
	for sent := 0; len(m.queue) > 0; sent++ {
		if errors.Is(k.sendNow(m, m.queue[0]), wire.ErrFull) {
			k.mu.Unlock()
			if sent == 0 {
				// The socket has room, but too many descriptors are in flight.
				time.Sleep(time.Millisecond)
			}
			return true
		}
		k.unqueues(m, &m.queue[0].message)
		if m.queue[0].newest != nil {
			delete(m.newest, m.queue[0].message.Name)
		}
		m.queue[0] = outgoing{} // the array may stay allocated
		m.queue = m.queue[1:]
	}
	m.queue = nil
	k.mu.Unlock()
	return false
}

// disconnected reports whether the process has given up the connection. Earlier messages may still be unread: a
// process with a slow keeper reconnects, and announces its sessions at once.
func (m *member) disconnected() bool { return m.gone || m.conn.Ended() }

// hello admits a process to a service and welcomes it. It returns the unused descriptors.
func (k *Keeper) hello(ctx context.Context, m *member, msg *wire.Message, fds []int) ([]int, error) {
	switch {
	case m.service != nil:
		return fds, wire.Errorf(wire.Malformed, "second Hello: a connection is one member of one service")
	case !wire.ValidName(msg.Text):
		return fds, wire.Errorf(wire.Malformed, "%q is no name for a service: use 1 to %d printable characters without spaces", msg.Text, wire.MaxName)
	case !wire.ValidName(msg.Name):
		return fds, wire.Errorf(wire.Malformed, "%q is no name for a member: use 1 to %d printable characters without spaces", msg.Name, wire.MaxName)
	}
	if err := k.authorise(ctx, msg.Text, msg.Name, m.process); err != nil {
		k.mu.Lock()
		k.refused++
		k.mu.Unlock()
		return fds, wire.Errorf(wire.NotMember, "%v", err)
	}
	if !m.admit() {
		return fds, wire.Errorf(wire.NotMember, "the connection was closed to admit another")
	}
	both := msg.Number & wire.Standby
	if msg.Number&wire.Boards != 0 {
		if len(fds) == 0 {
			return fds, wire.Errorf(wire.BadSocket, "the descriptor of the board is missing")
		}
		board, err := wire.NewBoardReader(fds[0])
		if err != nil {
			return fds, err
		}
		m.board, fds, both = board, fds[1:], both|wire.Boards
	}
	m.conn.SetReadDeadline(time.Time{})
	if ctx.Err() != nil {
		m.end() // the lifted deadline may have been the keeper's exit
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.serial++
	m.service, m.name, m.caps, m.serial, m.limit = k.service(msg.Text), msg.Name, msg.Number, k.serial, k.MaxState
	m.service.members = append(m.service.members, m)
	k.Log.Info("member", "service", msg.Text, "member", m.name, "pid", m.process.PID, "uid", m.process.UID)
	go k.watchExit(ctx, m)
	// Under one lock: messages to all members must follow Welcome.
	k.reply(m, msg, &wire.Message{Type: wire.Welcome, Read: uint64(k.MaxState), Written: uint64(k.MaxSessions), Number: both}, nil)
	k.tellMembersTo(m)
	k.tellLoads(m)
	return fds, nil
}

// watchExit ends the connection of an exited process after reading its messages, because a child may hold the
// connection open. Usually the connection has ended already.
func (k *Keeper) watchExit(ctx context.Context, m *member) {
	if m.process.wait(ctx) == nil {
		m.conn.SetReadDeadline(time.Now().Add(drainTime))
	}
}

// authorise returns nil if a process may be a member of a service.
func (k *Keeper) authorise(ctx context.Context, service, name string, p *process) error {
	if p.UID == 0 || int(p.UID) == os.Geteuid() {
		return nil
	}
	if wire.Elsewhere(name) {
		return fmt.Errorf("user %d may not use the name of another server: names with @ are for root's agents", p.UID)
	}
	if err := k.allow(ctx, service, name, p.Peer); err != nil {
		return err
	}
	if p.exited() { // the checked PID may have been another process
		return fmt.Errorf("process %d has exited", p.PID)
	}
	return nil
}

// allow calls Options.Allow. If it rejects, a rule of the limits may still allow the process, except after a [firm]
// rejection.
func (k *Keeper) allow(ctx context.Context, service, name string, p Peer) error {
	k.mu.Lock()
	rules := k.rules
	k.mu.Unlock()
	if k.Allow == nil {
		return rules.Allow(ctx, service, name, p)
	}
	err := k.Allow(ctx, service, name, p)
	var no firm
	if err == nil || errors.As(err, &no) || rules.Allow(ctx, service, name, p) != nil {
		return err
	}
	return nil
}

// firm is a rejection by Options.Allow that no rule of the limits overrides.
type firm struct{ error }

// endMember ends a member. Its sessions become orphans once its process cannot use them any more.
func (k *Keeper) endMember(ctx context.Context, m *member) {
	k.mu.Lock()
	m.gone, m.ready, m.ended = true, false, time.Now()
	k.dequeue(m)
	if m.service == nil {
		k.mu.Unlock()
		return
	}
	if m.heard && len(m.given) > 0 {
		m.service.unanswered[m] = true
	}
	m.service.members = slices.DeleteFunc(m.service.members, func(o *member) bool { return o == m })
	k.tellMembers(m.service)
	k.unload(m)
	if ctx.Err() == nil { // otherwise the keeper exits, and its members do not
		k.tellAlone(m.service, m.ended)
	}
	left := len(m.sessions)
	ended := ctx
	ctx, m.released = context.WithCancel(ctx)
	k.mu.Unlock()
	defer m.released()
	defer func() {
		if m.board != nil && ended.Err() == nil { // otherwise see bequeath
			m.board.Close()
		}
	}()
	if left == 0 {
		return
	}
	// A live process continues with its sessions, and may reconnect.
	if err := m.process.wait(ctx); err != nil || ctx.Err() != nil {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(m.sessions) > 0 {
		k.Log.Info("member died", "service", m.service.name, "member", m.name, "pid", m.process.PID, "sessions", len(m.sessions))
	}
	delete(m.service.unanswered, m)
	k.orphan(m, true)
}
