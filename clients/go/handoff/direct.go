// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// Director suspends sessions of other processes during a change and then releases them to their new
// members. It requires the right to be a member of their service. If the process ends before
// Release, the sessions return to their owners.
type Director struct {
	c      *wire.Conn
	socket string
	seq    uint32
}

// Direct connects to the keeper at a socket ("": as in Options). Without a keeper the error wraps
// ErrNoKeeper.
func Direct(ctx context.Context, socket string) (*Director, error) {
	socket = wire.Socket(socket)
	c, err := wire.Dial(ctx, socket)
	if err != nil {
		return nil, fmt.Errorf("%w on %s: start weir serve, or weir handoff keep: %w", ErrNoKeeper, socket, err)
	}
	return &Director{c: c, socket: socket}, nil
}

// Suspend suspends sessions by number. Their owners commit and release them. Data from their peers
// stays in the sockets. It returns the suspended sessions, and for each other one the reason. It
// takes at most limit. It returns an error only if the keeper exited.
func (d *Director) Suspend(ctx context.Context, limit time.Duration, ids ...uint64) (parked []uint64, stay map[uint64]error, err error) {
	answers, err := d.ask(ctx, limit, wire.Suspend, ids, nil)
	if err != nil {
		return nil, nil, err
	}
	stay = map[uint64]error{}
	for _, id := range ids {
		switch err, ok := answers[id]; {
		case !ok:
			stay[id] = fmt.Errorf("%w: its member has not released the session within %v", ErrSlow, limit)
		case err != nil:
			stay[id] = err
		default:
			parked = append(parked, id)
		}
	}
	return parked, stay, d.giveUp(ids, answers)
}

// giveUp releases the sessions without an answer.
func (d *Director) giveUp(ids []uint64, answers map[uint64]error) error {
	for _, id := range ids {
		if _, ok := answers[id]; ok {
			continue
		}
		if err := d.c.Send(&wire.Message{Type: wire.Release, Session: id}); err != nil {
			return fmt.Errorf("keeper %s: %w", d.socket, err)
		}
	}
	return nil
}

// Release gives suspended sessions to members by name; "" is the previous owner. It returns the
// sessions that went back against the request, with the reasons.
func (d *Director) Release(ctx context.Context, to map[uint64]string) (back map[uint64]error, err error) {
	var ids []uint64
	for id := range to {
		ids = append(ids, id)
	}
	answers, err := d.ask(ctx, answerTime, wire.Release, ids, to)
	if err != nil {
		return nil, err
	}
	back = map[uint64]error{}
	for _, id := range ids {
		err, ok := answers[id]
		if !ok {
			err = fmt.Errorf("%w: no answer within %v", ErrNoKeeper, answerTime)
		}
		if err != nil {
			back[id] = err
		}
	}
	return back, nil
}

const answerTime = 2 * time.Second // of a keeper that waits for nobody

// ask sends one request for each of several sessions and collects the answers.
func (d *Director) ask(ctx context.Context, limit time.Duration, what wire.Type, ids []uint64, names map[uint64]string) (map[uint64]error, error) {
	deadline := time.Now().Add(limit)
	asked := map[uint32]uint64{}
	for _, id := range ids {
		d.seq++
		asked[d.seq] = id
		if err := d.c.SendWithin(limit, &wire.Message{Type: what, Seq: d.seq, Session: id, Name: names[id]}); err != nil {
			return nil, fmt.Errorf("keeper %s: %w", d.socket, err)
		}
	}
	stop := context.AfterFunc(ctx, func() { d.c.SetReadDeadline(past) })
	defer stop()
	d.c.SetReadDeadline(deadline)
	answers := map[uint64]error{}
	for len(answers) < len(ids) {
		m, fds, err := d.c.Receive()
		wire.CloseAll(fds)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return answers, ctx.Err()
		}
		if err != nil {
			return nil, fmt.Errorf("keeper %s: %w", d.socket, err)
		}
		if id, ok := asked[m.Seq]; ok { // else an abandoned request
			answers[id] = m.Err()
		}
	}
	return answers, nil
}

// Close closes the connection. Suspended sessions return to their owners.
func (d *Director) Close() error { return d.c.Close() }
