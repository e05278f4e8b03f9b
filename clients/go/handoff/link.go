// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// Times for a slow or absent keeper.
const (
	patience   = 2 * time.Second       // for a keeper that does not read; then it counts as gone
	retryFirst = 10 * time.Millisecond // between attempts to connect
	retryLast  = 250 * time.Millisecond
	// unsure is the wait after a transfer interrupted by the keeper's exit. It begins when there is
	// a keeper again. The receiver reconnects within retryLast and then claims the session.
	unsure = 1500 * time.Millisecond
)

// call is a request waiting for its answer.
type call struct {
	answer  chan reply
	session *Session // moved if the answer is OK
}

type reply struct {
	m   wire.Message
	fds []int
	err error
}

// dial connects to the keeper and says hello.
func (m *Member) dial(ctx context.Context) (*wire.Conn, error) {
	c, err := wire.Dial(ctx, m.o.Keeper)
	if err != nil {
		return nil, fmt.Errorf("%w on %s: start weir serve, or weir handoff keep: %w", ErrNoKeeper, m.o.Keeper, err)
	}
	caps := wire.Exact | wire.Moves | wire.Standby
	if m.o.Orphans {
		caps |= wire.TakesOrphans
	}
	if m.o.Balances {
		caps |= wire.Balances
	}
	var fds []int
	if m.board != nil {
		caps |= wire.Boards
		fds = append(fds, m.board.FD())
	}
	stop := context.AfterFunc(ctx, func() { c.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	c.SetReadDeadline(time.Now().Add(m.o.Timeout))
	err = c.Send(&wire.Message{Type: wire.Hello, Seq: 1, Number: caps, Name: m.o.Name, Text: m.o.Service}, fds...)
	var answer wire.Message
	if err == nil {
		answer, _, err = c.Receive()
	}
	if err == nil {
		err = answer.Err()
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("keeper %s: member %s of service %s: %w", m.o.Keeper, m.o.Name, m.o.Service, err)
	}
	c.SetReadDeadline(time.Time{})
	m.maxState.Store(answer.Read)
	m.standby.Store(answer.Number&wire.Standby != 0)
	m.boards.Store(m.board != nil && answer.Number&wire.Boards != 0)
	if m.boards.Load() {
		if err := m.board.Size(answer.Written); err != nil {
			m.boards.Store(false)
			m.o.Log.Warn("no board, sending commits as messages", "err", err)
		}
	}
	return c, nil
}

// run receives from the keeper, and reconnects after it is gone.
func (m *Member) run(c *wire.Conn) {
	defer m.closeBoard() // here, because reconnect uses it in its hello
	for {
		err := m.hear(c)
		c.Close()
		m.conn.CompareAndSwap(c, nil)
		m.failCalls(fmt.Errorf("%w: %w", ErrNoKeeper, err))
		if m.isDone() {
			return
		}
		m.o.Log.Warn("keeper gone, sessions continue unkept", "err", err)
		if c = m.reconnect(); c == nil {
			return
		}
		m.o.Log.Info("keeper back")
	}
}

// reconnect connects to the keeper again and gives it all sockets and sessions of this member.
func (m *Member) reconnect() *wire.Conn {
	for pause := retryFirst; ; pause = min(2*pause, retryLast) {
		select {
		case <-m.done:
			return nil
		case <-time.After(pause):
		}
		c, err := m.dial(context.Background())
		if err != nil {
			continue
		}
		m.conn.Store(c)
		if m.isDone() {
			c.Close()
			return nil
		}
		m.mu.Lock()
		clear(m.loads) // the new keeper sends them
		proves, ready := m.proving != nil, m.ready && !m.over
		m.mu.Unlock()
		if !proves { // else the newer process has them: see alone
			m.keepSockets()
		}
		for _, s := range m.Sessions() {
			s.keepAgain()
		}
		if ready {
			m.post(&wire.Message{Type: wire.Ready, Number: m.readiness()})
		}
		m.mu.Lock()
		if m.load.told {
			m.tellLoad()
		}
		m.mu.Unlock()
		return c
	}
}

// hear handles messages from the keeper until the connection ends.
func (m *Member) hear(c *wire.Conn) error {
	for {
		msg, fds, err := c.Receive()
		if err != nil {
			return err
		}
		if m.answered(&msg, fds) {
			continue
		}
		switch msg.Type {
		case wire.Give:
			m.given(&msg, fds)
			continue
		case wire.Loads:
			m.setLoad(msg.Name, msg.Number)
		case wire.Move:
			go m.moveOnRequest(msg.Session, msg.Name)
		case wire.Replaced:
			go m.onReplaced()
		case wire.Alone:
			m.alone()
		case wire.Limits:
			m.limited(c, &msg)
		case wire.Error:
			m.onError(&msg)
		}
		wire.CloseAll(fds)
	}
}

// answered delivers an answer to its caller.
func (m *Member) answered(msg *wire.Message, fds []int) bool {
	if msg.Seq == 0 {
		return false
	}
	m.mu.Lock()
	call := m.calls[msg.Seq]
	delete(m.calls, msg.Seq)
	m.mu.Unlock()
	if call == nil {
		wire.CloseAll(fds) // the caller gave up
		return true
	}
	if msg.Type == wire.OK && call.session != nil {
		// Before the next message: that may give the session back.
		call.session.moved()
	}
	r := reply{m: *msg, fds: fds, err: msg.Err()}
	r.m.State = append([]byte(nil), msg.State...)
	call.answer <- r
	return true
}

func (m *Member) failCalls(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for seq, c := range m.calls {
		c.answer <- reply{err: err}
		delete(m.calls, seq)
	}
}

// call sends a request and waits for the answer. A keeper without an answer in time counts as gone.
// The error then wraps ErrNoKeeper.
func (m *Member) call(msg *wire.Message, s *Session, fds ...int) (reply, error) {
	c := m.conn.Load()
	if c == nil {
		return reply{}, fmt.Errorf("%w on %s", errNotAsked, m.o.Keeper)
	}
	waiting := &call{answer: make(chan reply, 1), session: s}
	m.mu.Lock()
	m.seq++
	if m.seq == 0 {
		m.seq = 1
	}
	msg.Seq = m.seq
	m.calls[msg.Seq] = waiting
	m.mu.Unlock()
	if err := m.sendOn(c, msg, fds...); err != nil {
		m.mu.Lock()
		delete(m.calls, msg.Seq)
		m.mu.Unlock()
		return reply{}, fmt.Errorf("%w: %w", errNotAsked, err)
	}
	limit := time.NewTimer(m.o.Timeout)
	defer limit.Stop()
	select {
	case r := <-waiting.answer:
		return r, r.err
	case <-limit.C:
		c.Close() // a late answer must not reach another call: reconnect
		r := <-waiting.answer
		return r, r.err
	}
}

// errNotAsked reports a request that was not sent.
var errNotAsked = fmt.Errorf("%w", ErrNoKeeper)

// post sends a message without an answer.
func (m *Member) post(msg *wire.Message, fds ...int) error {
	c := m.conn.Load()
	if c == nil {
		return fmt.Errorf("%w on %s", ErrNoKeeper, m.o.Keeper)
	}
	return m.sendOn(c, msg, fds...)
}

// sendOn sends on a connection and closes it if the keeper does not read.
func (m *Member) sendOn(c *wire.Conn, msg *wire.Message, fds ...int) error {
	err := c.SendWithin(patience, msg, fds...)
	if err == nil {
		return nil
	}
	if !errors.Is(err, wire.ErrMalformed) {
		c.Close() // its reader reconnects
	}
	return fmt.Errorf("%w: %w", ErrNoKeeper, err)
}

// onError handles an error not caused by a request.
func (m *Member) onError(msg *wire.Message) {
	err := msg.Err()
	m.o.Log.Warn("keeper rejected a session", "session", msg.Session, "err", err)
	m.mu.Lock()
	s := m.sessions[msg.Session]
	m.mu.Unlock()
	if s == nil {
		return
	}
	if errors.Is(err, wire.ErrOwned) {
		s.moved() // another member claimed it first after the keeper was away
		return
	}
	s.notKept()
}
