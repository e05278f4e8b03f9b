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

// Director has sessions of other processes wait while something changes, and then go to
// the member whose they are. It is for whoever may be a member of their service. If it
// ends before it has released them, they go back.
type Director struct {
	c      *wire.Conn
	socket string
	seq    uint32
}

// Direct connects to the keeper behind a socket ("": as in Options). The error wraps
// ErrNoKeeper where there is none.
func Direct(ctx context.Context, socket string) (*Director, error) {
	socket = wire.Socket(socket)
	c, err := wire.Dial(ctx, socket)
	if err != nil {
		return nil, fmt.Errorf("%w on %s: is weir serve, or weir handoff keep, running? %w", ErrNoKeeper, socket, err)
	}
	return &Director{c: c, socket: socket}, nil
}

// Suspend has sessions wait, by number: their owners commit and let go of them, and what
// their peers send stays in their sockets. It returns those that wait now, and for the
// others why they do not; within limit, and with an error only where the keeper has
// gone.
func (d *Director) Suspend(ctx context.Context, limit time.Duration, ids ...uint64) (parked []uint64, stay map[uint64]error, err error) {
	answers, err := d.ask(ctx, limit, wire.Suspend, ids, nil)
	if err != nil {
		return nil, nil, err
	}
	stay = map[uint64]error{}
	for _, id := range ids {
		switch err, ok := answers[id]; {
		case !ok:
			stay[id] = fmt.Errorf("%w: its member has not let go of the session in %v", ErrSlow, limit)
		case err != nil:
			stay[id] = err
		default:
			parked = append(parked, id)
		}
	}
	return parked, stay, d.giveUp(ids, answers)
}

// giveUp takes back what has not been answered.
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

// Release gives sessions that wait to members, by name; "" is whom they were taken from.
// It returns those that went back although they were for another, with the reason.
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
			err = fmt.Errorf("%w: it has not answered in %v", ErrNoKeeper, answerTime)
		}
		if err != nil {
			back[id] = err
		}
	}
	return back, nil
}

const answerTime = 2 * time.Second // of a keeper that has nobody to wait for

// ask asks one thing about each of several sessions, and collects the answers.
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
		if id, ok := asked[m.Seq]; ok { // else of one that was given up
			answers[id] = m.Err()
		}
	}
	return answers, nil
}

// Close ends it. What waits goes back to whom it was taken from.
func (d *Director) Close() error { return d.c.Close() }
