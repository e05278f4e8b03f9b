// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// Counts are what has happened in a service since the keeper began.
type Counts struct {
	Kept      uint64 `json:"kept"`       // sockets taken into keeping
	Commits   uint64 `json:"commits"`    // positions and states noted
	Transfers uint64 `json:"transfers"`  // sessions moved by their owners
	Rescued   uint64 `json:"rescued"`    // sessions given to another member after a crash
	Inherited uint64 `json:"inherited"`  // the same after an orderly leave, or a refusal
	Rejected  uint64 `json:"rejected"`   // transfers that could not be, or were not wanted
	Expired   uint64 `json:"expired"`    // sessions reset because nobody came for them
	Gaps      uint64 `json:"gaps"`       // sessions reset because their member had not committed
	Closed    uint64 `json:"closed"`     // sessions that were over when their member died
	OverLimit uint64 `json:"over_limit"` // sockets and states that were too many or too large
}

// Report is what a keeper keeps.
type Report struct {
	Services []ServiceReport `json:"services"`
	State    int64           `json:"state_bytes"`
	Strange  uint64          `json:"refused_processes"` // that are no members
}

// ServiceReport is a service as the keeper sees it.
type ServiceReport struct {
	Name     string          `json:"name"`
	Members  []MemberReport  `json:"members"`
	Sessions []SessionReport `json:"sessions"`
	Counts   Counts          `json:"counts"`
}

// MemberReport is a process that is connected.
type MemberReport struct {
	Name     string    `json:"name"`
	PID      int       `json:"pid"`
	UID      uint32    `json:"uid"`
	Ready    bool      `json:"ready"`
	Standby  bool      `json:"standby,omitempty"` // replaced by a newer process, which has not proved itself or taken all sessions
	Since    time.Time `json:"since"`
	Sessions int       `json:"sessions"`
}

// SessionReport is a socket that is kept.
type SessionReport struct {
	ID           string    `json:"id"`   // decimal
	Kind         string    `json:"kind"` // session, listener, packet
	Local        string    `json:"local"`
	Remote       string    `json:"remote,omitempty"`
	Label        string    `json:"label,omitempty"`
	Member       string    `json:"member"` // its owner, or the last one
	PID          int       `json:"pid"`    // 0: it waits for a member
	Since        time.Time `json:"since"`
	Waits        float64   `json:"waits_seconds,omitempty"` // without an owner
	Read         uint64    `json:"read"`                    // as committed
	Written      uint64    `json:"written"`
	State        int64     `json:"state_bytes"`
	Moves        int       `json:"moves"`
	Given        bool      `json:"given,omitempty"`         // its owner has not said yet that it takes it
	Rejected     int       `json:"rejected,omitempty"`      // transfers that were refused or came back
	ReturnReason string    `json:"return_reason,omitempty"` // why the last one was, until another member has the session
}

// Status asks the keeper behind a socket ("": as in Options) what it keeps, of the
// services that this process could be a member of.
func Status(ctx context.Context, socket string) (Report, error) {
	var r Report
	m, err := ask(ctx, socket, &wire.Message{Type: wire.Status, Seq: 1})
	if err == nil {
		err = json.Unmarshal(m.State, &r)
	}
	return r, err
}

// Send has a session of a service, or all of a member if session is 0, moved to
// another: their owner does it as soon as it hears of it. The error wraps wire.ErrUnable
// where that does not move sessions on request.
func Send(ctx context.Context, socket, service, member string, session uint64, to string) error {
	_, err := ask(ctx, socket, &wire.Message{Type: wire.Send, Seq: 1, Session: session, Name: to, Text: service + "/" + member})
	return err
}

// Forget has the keeper let go of a session or listener that waits for a member, by number, or, if that is 0, of all sockets that
// wait for a member of a name: listeners, whose address is free then, packet sockets, and sessions, which are reset, unless
// listeners are all that is meant. It returns how many there were. What a living process has stays: if there is nothing else, the
// error wraps wire.ErrOwned.
func Forget(ctx context.Context, socket, service, member string, session uint64, listeners bool) (int, error) {
	msg := &wire.Message{Type: wire.Forget, Seq: 1, Session: session, Text: service + "/" + member}
	if listeners {
		msg.Number = wire.ForgetListeners
	}
	m, err := ask(ctx, socket, msg)
	return int(m.Number), err
}

// ask asks a keeper one thing, without being a member.
func ask(ctx context.Context, socket string, msg *wire.Message) (wire.Message, error) {
	socket = wire.Socket(socket)
	c, err := wire.Dial(ctx, socket)
	if err != nil {
		return wire.Message{}, fmt.Errorf("%w on %s: is weir serve, or weir handoff keep, running? %w", ErrNoKeeper, socket, err)
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
