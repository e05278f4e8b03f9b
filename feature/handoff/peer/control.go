// SPDX-License-Identifier: Apache-2.0

package peer

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/weir-project/weir/feature/handoff/move"
)

// Registration is what a backend says of itself to a load balancer: there, it is one of its backends from then on.
type Registration struct {
	Address  netip.Addr `json:"address"`            // of the backend, where the load balancer sends packets to it
	Weight   int        `json:"weight"`             // of its share of new flows; 0: none, as while it is drained
	Services []string   `json:"services,omitempty"` // names of those it serves; none: all that the load balancer has
	Agent    string     `json:"agent,omitempty"`    // host:port where the agents of other hosts find its own
	Unserved []string   `json:"unserved,omitempty"` // names of services that nobody serves there now: their new flows go elsewhere
}

// Member is a backend as a load balancer tells it to the others.
type Member struct {
	Name     string       `json:"name"`
	Number   move.Backend `json:"number"`
	Address  netip.Addr   `json:"address,omitzero"`
	Agent    string       `json:"agent,omitempty"`
	Weight   int          `json:"weight"`
	Services []string     `json:"services,omitempty"`
	Up       bool         `json:"up"` // it gets new flows, its weight permitting
	// Unserved and Connected are for another load balancer: services that nobody serves there, and whether its agent is at this one.
	Unserved  []string `json:"unserved,omitempty"`
	Connected bool     `json:"connected,omitempty"`
}

// Pair is what a load balancer tells the other one beside it, whenever it changes.
type Pair struct {
	Ring     []Share `json:"ring,omitempty"`     // by which new flows are spread there
	Agents   int     `json:"agents"`             // backends' agents that are connected there
	Carries  bool    `json:"carries,omitempty"`  // clients' packets come by it
	Starting bool    `json:"starting,omitempty"` // it waits for backends itself
}

// Share is what a backend gets of new flows.
type Share struct {
	Number   move.Backend `json:"number"`
	Name     string       `json:"name"`
	Weight   int          `json:"weight"`
	Services []int        `json:"services"` // null: all
	Unserved []int        `json:"unserved,omitempty"`
}

// Service is what a load balancer spreads.
type Service struct {
	Name     string         `json:"name,omitempty"`
	ID       uint16         `json:"id"`
	Listen   netip.AddrPort `json:"listen"`
	Proto    uint8          `json:"proto"`
	BySource bool           `json:"by_source,omitempty"`
}

// Peers is what a load balancer tells its backends: once they have registered, and whenever it changes.
type Peers struct {
	Rejected string    `json:"rejected,omitempty"` // why the registration is
	Members  []Member  `json:"members,omitempty"`
	Services []Service `json:"services,omitempty"`
	// HearsLeft says that this load balancer takes move.Left. An older one would end the connection.
	HearsLeft bool `json:"hears_left,omitempty"`
	// Idle is for how long this load balancer knows a flow of which nothing is seen, in milliseconds. A backend tells of its sessions
	// more often. 0: this load balancer does not want to hear of them.
	Idle int64 `json:"idle_ms,omitempty"`
	// Hold is how long this load balancer holds packets of a session that moves, in milliseconds. 0: an older one does not say.
	BufferTimeout int64 `json:"buffer_timeout_ms,omitempty"`
	Pair          *Pair `json:"pair,omitempty"` // to another load balancer
}

// Control is what one side does with what the other says beside moves; nil: it is ignored. The functions are called by Receive.
type Control struct {
	Register func(Registration)
	Peers    func(Peers)
	Flows    func(records []FlowRecord, last bool) // last: a list of them is complete
}

// Handle sets what is done with what is no move. Call it before Receive.
func (c *Conn) Handle(h Control) { c.control = h }

// Register tells a load balancer of this host.
func (c *Conn) Register(r Registration) error { return c.say(typeRegister, r) }

// Tell tells a backend of the others. The error is ErrTooLong for more than the other side takes: see [Peers.Fit].
func (c *Conn) Tell(p Peers) error { return c.say(typePeers, p) }

// ErrTooLong says that a message is longer than the other side takes. Nothing of it is sent, and the connection stays.
var ErrTooLong = errors.New("message too long")

func (c *Conn) say(kind byte, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if most, err := c.limit(kind); err != nil || len(b) > most {
		return errors.Join(err, fmt.Errorf("%w: %d bytes to tell %s, which takes at most %d", ErrTooLong, len(b), c.Peer.Name, most))
	}
	return c.write(kind, nil, b)
}

// aside does what a frame asks for that is no move.
func (c *Conn) aside(kind byte, body []byte) error {
	switch kind {
	case typePing:
		return c.write(typePong, nil, nil)
	case typePong:
		return nil
	case typeRegister:
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
