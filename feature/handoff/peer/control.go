// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/weir-project/weir/feature/handoff/move"
)

// Registration is a backend's request to become one of a load balancer's backends.
type Registration struct {
	Address  netip.Addr `json:"address"`            // destination of the load balancer's packets to the backend
	Weight   int        `json:"weight"`             // share of new flows; 0: none, as during a drain
	Services []string   `json:"services,omitempty"` // names of its services; none: all services of the load balancer
	Agent    string     `json:"agent,omitempty"`    // host:port of its agent for agents of other hosts
	Unserved []string   `json:"unserved,omitempty"` // names of services without a member there: their new flows go elsewhere
}

// Member is a backend in a load balancer's list for its backends.
type Member struct {
	Name     string       `json:"name"`
	Number   move.Backend `json:"number"`
	Address  netip.Addr   `json:"address,omitzero"`
	Agent    string       `json:"agent,omitempty"`
	Weight   int          `json:"weight"`
	Services []string     `json:"services,omitempty"`
	Up       bool         `json:"up"` // it gets new flows, if its weight is not 0
	// Unserved and Connected are for a partner: the services without a member there, and whether
	// the backend's agent is connected to the sender.
	Unserved  []string `json:"unserved,omitempty"`
	Connected bool     `json:"connected,omitempty"`
}

// Pair is a load balancer's report to its partner, repeated on each change.
type Pair struct {
	Ring     []Share `json:"ring,omitempty"`     // the shares of new flows there
	Agents   int     `json:"agents"`             // number of connected agents of backends
	Carries  bool    `json:"carries,omitempty"`  // clients' packets pass it
	Starting bool    `json:"starting,omitempty"` // its own startup has not ended
	// Kept are the names of numbers of backends outside Members.
	Kept map[move.Backend]string `json:"kept,omitempty"`
	// Young are the numbers taken since the sender last heard its partner, with the time since then
	// in milliseconds.
	Young map[move.Backend]int64 `json:"young_ms,omitempty"`
}

// Share is a backend's share of new flows.
type Share struct {
	Number   move.Backend `json:"number"`
	Name     string       `json:"name"`
	Weight   int          `json:"weight"`
	Services []int        `json:"services"` // null: all
	Unserved []int        `json:"unserved,omitempty"`
}

// Service is a service of a load balancer.
type Service struct {
	Name     string         `json:"name,omitempty"`
	ID       uint16         `json:"id"`
	Listen   netip.AddrPort `json:"listen"`
	Proto    uint8          `json:"proto"`
	BySource bool           `json:"by_source,omitempty"`
}

// Peers is a load balancer's report to its backends, sent after their registration and on each
// change.
type Peers struct {
	Rejected string    `json:"rejected,omitempty"` // reason of a rejected registration
	Members  []Member  `json:"members,omitempty"`
	Services []Service `json:"services,omitempty"`
	// HearsLeft reports support of move.Left. An older load balancer would close the connection.
	HearsLeft bool `json:"hears_left,omitempty"`
	// Idle is how long the load balancer knows a flow without packets, in milliseconds. A backend
	// reports its sessions more often. 0: the load balancer does not accept reports.
	Idle int64 `json:"idle_ms,omitempty"`
	// BufferTimeout is how long the load balancer buffers packets of a moving session, in
	// milliseconds. 0: unknown, from an older version.
	BufferTimeout int64 `json:"buffer_timeout_ms,omitempty"`
	Pair          *Pair `json:"pair,omitempty"` // to a partner
}

// Control has the handlers of frames other than moves. A nil handler ignores them. Receive calls
// the handlers.
type Control struct {
	Register func(Registration)
	Peers    func(Peers)
	Flows    func(records []FlowRecord, last bool) // last: the end of a complete list
}

// Handle sets the handlers. Call it before Receive.
func (c *Conn) Handle(h Control) { c.control = h }

// Register registers this backend at a load balancer.
func (c *Conn) Register(r Registration) error { return c.say(typeRegister, r) }

// Tell sends the list of backends. The error wraps ErrTooLong if it is over the other side's limit:
// see [Peers.Fit].
func (c *Conn) Tell(p Peers) error { return c.say(typePeers, p) }

// ErrTooLong reports a message over the other side's limit. Nothing is sent, and the connection
// stays open.
var ErrTooLong = errors.New("message too long")

func (c *Conn) say(kind byte, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if most, err := c.limit(kind); err != nil || len(b) > most {
		return errors.Join(err, fmt.Errorf("%w: %d bytes for %s: at most %d", ErrTooLong, len(b), c.Peer.Name, most))
	}
	return c.write(kind, nil, b)
}

// aside processes a frame other than a move or a load.
func (c *Conn) aside(kind byte, body []byte) error {
	switch kind {
	case typePing:
		return c.write(typePong, nil, nil)
	case typePong:
		return nil
	case typeRegister:
		time.Sleep(c.registers.delay(time.Now(), registerEvery, registerBurst)) // its sender waits, and nobody else
		var r Registration
		return hear(body, &r, c.control.Register)
	case typePeers:
		var p Peers
		return hear(body, &p, c.control.Peers)
	case typeFlows:
		records, last, err := ParseFlows(body)
		if err == nil && c.control.Flows != nil {
			c.control.Flows(records, last)
		}
		return err
	}
	return fmt.Errorf("%w: type %d", ErrFormat, kind)
}

func hear[T any](body []byte, v *T, f func(T)) error {
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("%w: %w", ErrFormat, err)
	}
	if f != nil {
		f(*v)
	}
	return nil
}
