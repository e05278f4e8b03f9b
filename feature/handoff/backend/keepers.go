// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// Timing of connections to a keeper.
const (
	keeperTimeout = 2 * time.Second // for a keeper that does not read or answer
	keeperRetry   = 250 * time.Millisecond
)

// keeperClient is a member of a service in the keeper's view. Under another backend's name it is the way to that
// backend; under this backend's name it is the way for arriving sessions.
type keeperClient struct {
	a       *Agent
	service string // its name
	name    string // @ and the backend's name
	caps    uint32
	stop    func()
	give    func(p *keeperClient, m wire.Message, fd int)

	mu    sync.Mutex
	conn  *wire.Conn // nil: no keeper
	seq   uint32
	calls map[uint32]func(error)
	ready bool
	over  bool // its backend or service is gone: see retire
	limit int  // bytes of a state, as the keeper allows

	members atomic.Int64 // ready members on this backend, as reported by the keeper, or unknown
}

// run stays connected to the keeper until ctx is done.
func (p *keeperClient) run(ctx context.Context) {
	for warned := false; ctx.Err() == nil; {
		c, err := p.dial(ctx)
		if err == nil {
			warned = false
			p.serve(ctx, c)
		} else if !warned {
			p.a.o.Log.Warn("no keeper: sessions cannot move", "service", p.service, "keeper", p.a.o.Keeper, "err", err)
			warned = true
		}
		select {
		case <-ctx.Done():
		case <-time.After(keeperRetry):
		}
	}
}

func (p *keeperClient) dial(ctx context.Context) (*wire.Conn, error) {
	c, err := wire.Dial(ctx, p.a.o.Keeper)
	if err != nil {
		return nil, fmt.Errorf("connect to the keeper (run weir serve, or weir handoff keep): %w", err)
	}
	c.SetReadDeadline(time.Now().Add(keeperTimeout))
	err = c.Send(&wire.Message{Type: wire.Hello, Seq: 1, Text: p.service, Name: p.name, Number: p.caps})
	var answer wire.Message
	if err == nil {
		answer, _, err = c.Receive()
	}
	if err == nil {
		err = answer.Err()
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("keeper %s: %w", p.a.o.Keeper, err)
	}
	c.SetReadDeadline(time.Time{})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conn, p.limit = c, int(min(answer.Read, wire.MaxState))
	return c, nil
}

// serve processes a keeper's messages until the connection ends.
func (p *keeperClient) serve(ctx context.Context, c *wire.Conn) {
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	if p.caps&wire.Balances != 0 {
		p.a.forgetLoads(p.service)
	}
	p.a.keepAgain(p)
	p.mu.Lock()
	if p.ready {
		_ = c.Send(&wire.Message{Type: wire.Ready, Number: 1})
	}
	p.mu.Unlock()
	for {
		m, fds, err := c.Receive()
		if err != nil {
			break
		}
		if m.Flags&wire.StateFD != 0 && len(fds) > 0 {
			last := len(fds) - 1
			err = m.Fetch(fds[last], wire.MaxState)
			unix.Close(fds[last])
			fds = fds[:last]
		} else {
			m.State, m.Unread = bytes.Clone(m.State), bytes.Clone(m.Unread) // the next message reuses the memory
		}
		switch {
		case m.Type == wire.Give && len(fds) > 0 && err == nil:
			fd := fds[0]
			fds = fds[1:]
			p.give(p, m, fd)
		case m.Type == wire.Give:
			_ = p.post(&wire.Message{Type: wire.Reject, Session: m.Session})
		case m.Type == wire.Members:
			p.members.Store(int64(m.Number))
			p.a.tell(p.service)
			p.a.pollServed()
		case m.Type == wire.Loads:
			p.a.loadHere(p, m.Name, m.Number)
		case m.Type == wire.Limits:
			p.limited(&m)
		case m.Seq != 0:
			p.answer(m.Seq, m.Err())
		case m.Type == wire.Error:
			p.a.o.Log.Warn("keeper rejected a request", "service", p.service, "session", m.Session, "err", m.Err())
		}
		wire.CloseAll(fds)
	}
	c.Close()
	p.members.Store(unknown)
	p.mu.Lock()
	p.conn, p.limit = nil, 0
	calls := p.calls
	p.calls = map[uint32]func(error){}
	p.mu.Unlock()
	for _, answered := range calls {
		answered(errNoKeeper)
	}
}

// limited applies the keeper's changed limits.
func (p *keeperClient) limited(m *wire.Message) {
	p.mu.Lock()
	p.limit = int(min(m.Read, wire.MaxState))
	p.mu.Unlock()
	_ = p.post(&wire.Message{Type: wire.Agree, Number: m.Number}) // otherwise the connection is broken, and the next Receive fails
}

// maxBytes returns the keeper's limit for a session's state and unread data, in bytes; 0: no keeper.
func (p *keeperClient) maxBytes() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.limit
}

var errNoKeeper = errors.New("the keeper is gone")

// answer delivers an answer to its caller; a second one is ignored.
func (p *keeperClient) answer(seq uint32, err error) {
	p.mu.Lock()
	answered := p.calls[seq]
	delete(p.calls, seq)
	p.mu.Unlock()
	if answered != nil {
		answered(err)
	}
}

// setReady makes the keeper give sessions to this member, or stop it.
func (p *keeperClient) setReady(yes bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ready == yes || p.over && yes {
		return
	}
	p.ready = yes
	if p.conn != nil {
		_ = p.conn.SendWithin(keeperTimeout, &wire.Message{Type: wire.Ready, Number: uint32(bit(yes))})
	}
}

// post sends a message without an answer. The keeper reads it once the kernel has accepted it, even if this process
// dies.
func (p *keeperClient) post(m *wire.Message, fds ...int) error {
	p.mu.Lock()
	c := p.conn
	p.mu.Unlock()
	if c == nil {
		return errNoKeeper
	}
	large, err := m.Spill()
	if err != nil {
		return err
	}
	if large >= 0 {
		defer unix.Close(large)
		fds = append(fds, large)
	}
	if err := c.SendWithin(keeperTimeout, m, fds...); err != nil {
		c.Close() // serve reconnects
		return fmt.Errorf("%w: %w", errNoKeeper, err)
	}
	return nil
}

// ask sends a request, and calls answered with the keeper's answer or a substitute error. answered must not block. If
// ask returns an error, nothing was sent.
func (p *keeperClient) ask(m *wire.Message, answered func(error)) error {
	p.mu.Lock()
	if p.seq++; p.seq == 0 {
		p.seq = 1
	}
	seq := p.seq
	m.Seq = seq
	late := time.AfterFunc(keeperTimeout, func() { p.answer(seq, fmt.Errorf("%w: it does not answer", errNoKeeper)) })
	p.calls[seq] = func(err error) {
		late.Stop()
		answered(err)
	}
	p.mu.Unlock()
	err := p.post(m)
	if err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.calls[seq] == nil {
			return nil // answered already, when its connection ended
		}
		late.Stop()
		delete(p.calls, seq)
	}
	return err
}

// call sends a request, and waits for the answer.
func (p *keeperClient) call(m *wire.Message) error {
	answer := make(chan error, 1)
	if err := p.ask(m, func(err error) { answer <- err }); err != nil {
		return err
	}
	return <-answer
}
