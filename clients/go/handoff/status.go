// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// Counts are the events of a service since the keeper started.
type Counts struct {
	Kept      uint64 `json:"kept"`       // sockets kept
	Commits   uint64 `json:"commits"`    // positions and states stored
	Transfers uint64 `json:"transfers"`  // sessions moved by their owners
	Rescued   uint64 `json:"rescued"`    // sessions given to another member after a crash
	Inherited uint64 `json:"inherited"`  // the same after an orderly leave, or a refusal
	Rejected  uint64 `json:"rejected"`   // transfers that failed or were rejected
	Expired   uint64 `json:"expired"`    // sessions reset because no member accepted them in time
	Gaps      uint64 `json:"gaps"`       // sessions reset because their member had not committed
	Closed    uint64 `json:"closed"`     // sessions already closed when their member died
	OverLimit uint64 `json:"over_limit"` // sockets and states over a limit
}

// Report is the contents of a keeper.
type Report struct {
	Services []ServiceReport `json:"services"`
	State    int64           `json:"state_bytes"`
	Strange  uint64          `json:"refused_processes"` // processes that are not members
}

// ServiceReport is a service in the keeper.
type ServiceReport struct {
	Name     string          `json:"name"`
	Members  []MemberReport  `json:"members"`
	Sessions []SessionReport `json:"sessions"`
	Counts   Counts          `json:"counts"`
}

// MemberReport is a connected process.
type MemberReport struct {
	Name     string    `json:"name"`
	PID      int       `json:"pid"`
	UID      uint32    `json:"uid"`
	Ready    bool      `json:"ready"`
	Standby  bool      `json:"standby,omitempty"` // replaced by a newer process, still unproved or without all sessions
	Since    time.Time `json:"since"`
	Sessions int       `json:"sessions"`
}

// SessionReport is a kept socket.
type SessionReport struct {
	ID           string    `json:"id"`   // decimal
	Kind         string    `json:"kind"` // session, listener, packet
	Local        string    `json:"local"`
	Remote       string    `json:"remote,omitempty"`
	Label        string    `json:"label,omitempty"`
	Member       string    `json:"member"` // its owner, or the last one
	PID          int       `json:"pid"`    // 0: waiting for a member
	Since        time.Time `json:"since"`
	Waits        float64   `json:"waits_seconds,omitempty"` // without an owner
	Read         uint64    `json:"read"`                    // as committed
	Written      uint64    `json:"written"`
	State        int64     `json:"state_bytes"`
	Moves        int       `json:"moves"`
	Given        bool      `json:"given,omitempty"`         // offered to its owner, not accepted yet
	Rejected     int       `json:"rejected,omitempty"`      // transfers rejected or returned
	ReturnReason string    `json:"return_reason,omitempty"` // of the last one, until another member gets the session
}

// Status asks the keeper at a socket ("": as in Options) for a report. It contains the services
// open to this process.
func Status(ctx context.Context, socket string) (Report, error) {
	var r Report
	m, err := ask(ctx, socket, &wire.Message{Type: wire.Status, Seq: 1})
	if err == nil {
		err = json.Unmarshal(m.State, &r)
	}
	return r, err
}

// Send asks the owner to move a session of a service to another member, or all sessions of a member
// if session is 0. The owner moves them as soon as it is told. The error wraps wire.ErrUnable if
// the owner does not support this.
func Send(ctx context.Context, socket, service, member string, session uint64, to string) error {
	_, err := ask(ctx, socket, &wire.Message{Type: wire.Send, Seq: 1, Session: session, Name: to, Text: service + "/" + member})
	return err
}

// Forget makes the keeper release a waiting session or listener by number. If the number is 0, it
// releases all sockets waiting for a member of a name: listeners and packet sockets, and sessions,
// which it resets. With listeners set it releases only listeners, which frees their addresses. It
// returns the number of released sockets. Sockets of a living process stay. If nothing else exists,
// the error wraps wire.ErrOwned.
func Forget(ctx context.Context, socket, service, member string, session uint64, listeners bool) (int, error) {
	msg := &wire.Message{Type: wire.Forget, Seq: 1, Session: session, Text: service + "/" + member}
	if listeners {
		msg.Number = wire.ForgetListeners
	}
	m, err := ask(ctx, socket, msg)
	return int(m.Number), err
}

// ask sends one request to a keeper without being a member.
func ask(ctx context.Context, socket string, msg *wire.Message) (wire.Message, error) {
	socket = wire.Socket(socket)
	c, err := wire.Dial(ctx, socket)
	if err != nil {
		return wire.Message{}, fmt.Errorf("%w on %s: start weir serve, or weir handoff keep: %w", ErrNoKeeper, socket, err)
	}
	defer c.Close()
	stop := context.AfterFunc(ctx, func() { c.SetReadDeadline(past) })
	defer stop()
	c.SetReadDeadline(time.Now().Add(5 * time.Second))
	if err := c.Send(msg); err != nil {
		return wire.Message{}, err
	}
	answer, fds, err := c.Receive()
	defer wire.CloseAll(fds)
	if err != nil {
		return answer, fmt.Errorf("keeper %s: %w", socket, err)
	}
	if answer.Flags&wire.StateFD != 0 && len(fds) > 0 {
		err = answer.Fetch(fds[len(fds)-1], wire.MaxState)
	}
	if err == nil {
		err = answer.Err()
	}
	return answer, err
}
