// SPDX-License-Identifier: Apache-2.0

// Package report has the status and the metrics of a load balancer.
package report

import (
	"net/netip"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// Status is the status of a load balancer.
type Status struct {
	Name     string `json:"name"`
	Netns    string `json:"netns"`                // inode number of its network namespace
	Gone     bool   `json:"netns_gone,omitempty"` // the namespace is gone, and the data path with it
	Agent    bool   `json:"agent"`                // its agent answers; without it Backends has numbers and flows alone
	Counts   Counts `json:"counts"`               // since the data path was created
	Flows    int    `json:"flows"`                // known flows
	Buffered int    `json:"buffered"`             // buffered ones of these
	Moving   int    `json:"moving"`               // moving ones of these
	// Starting: it is new, and drops packets of unknown connections until the backends have
	// reported their sessions.
	Starting bool            `json:"starting,omitempty"`
	Backends []BackendStatus `json:"backends,omitempty"` // by number
	Kept     []KeptNumber    `json:"kept,omitempty"`     // numbers of absent backends outside Backends
	Partner  *PairStatus     `json:"partner,omitempty"`  // nil: none

	Certificate *peer.Certificate `json:"certificate,omitempty"` // of the agent

	Devices []DeviceFault `json:"device_faults,omitempty"` // its devices without its program
	Problem string        `json:"problem,omitempty"`       // a wrong answer at its agent's socket: the rest is from the pins
}

// KeptNumber is a number kept for a backend without a connection, location and flows.
type KeptNumber struct {
	Name   string       `json:"name"`
	Number move.Backend `json:"number"`
	Free   float64      `json:"free_seconds"` // time until another backend may have it
}

// DeviceFault is a device of a load balancer without its program.
type DeviceFault = feature.DeviceFault

// PairStatus is the relation of two load balancers, as seen by the agent of one.
type PairStatus struct {
	Name      string `json:"name"`
	Connected bool   `json:"connected"`
	// Silent is the time since the partner's latest message, connected or not. 0: it answers. -1:
	// none since the agent started.
	Silent  float64 `json:"silent_seconds"`
	Agents  int     `json:"agents"`  // connected to the partner, of backends
	Carries bool    `json:"carries"` // clients' packets pass this load balancer
	There   bool    `json:"there"`   // clients' packets pass the partner, as it reports
	Told    uint64  `json:"told"`    // flow records, since the agent started
	Heard   uint64  `json:"heard"`
	// Apart: clients' packets pass here without a connection to the partner, while agents known
	// from the partner are not connected here. Either the partner has just died, or both work
	// without each other.
	Apart bool `json:"apart"`
	// Seconds is the total time in which clients' packets passed both, or the two were apart.
	// Dropped counts the packets dropped here in that time, of flows with another owner than this
	// load balancer knows.
	Seconds float64 `json:"split_seconds"`
	Dropped uint64  `json:"split_dropped"`
}

// BackendStatus is a backend as seen by the agent.
type BackendStatus struct {
	Name      string       `json:"name,omitempty"`
	Number    move.Backend `json:"number"`
	Address   netip.Addr   `json:"address,omitzero"`
	Where     string       `json:"where,omitempty"` // the interface, or "tunnel"
	Weight    int          `json:"weight"`
	Up        bool         `json:"up"`
	Reason    string       `json:"reason,omitempty"`   // why it is not up
	Unserved  []string     `json:"unserved,omitempty"` // services without a member there: other backends get their new flows
	Connected bool         `json:"connected"`          // its agent
	// Registered: its agent is connected, here or at the partner, and has registered it. It needs
	// no entry in lb.backends.
	Registered bool `json:"registered,omitempty"`
	// UserPorts: packets of its tunnel came from source ports open to every user of its host in the
	// last ten minutes.
	UserPorts bool    `json:"user_ports,omitempty"`
	Silent    float64 `json:"silent_seconds"` // silence of a connected agent; 0: it answers
	Flows     int     `json:"flows"`          // owned flows
	// Loads is the load of the least busy member there, by service, in the service's own unit.
	// Services without a report are missing.
	Loads map[string]uint32 `json:"loads,omitempty"`
}

// Counts are packets and flows since New. lb.h's enum has the same order.
type Counts struct {
	In, Out       uint64 // packets forwarded to backends, and to clients
	Learned       uint64 // learned flows
	Buffered      uint64 // buffered packets
	Mute          uint64 // dropped packets of backends that do not own the flow
	NoReset       uint64 // dropped resets of flows about to move
	NoBackend     uint64 // dropped packets without a backend
	Full          uint64 // flows without room in the table: they follow the hash
	ICMP          uint64 // ICMP errors forwarded to a flow's owner
	UnknownSource uint64 // dropped packets of unknown backends, or from a tunnel and of no service
	Fragment      uint64 // dropped later fragments of a service by flow
	Big           uint64 // packets too big for their tunnel, left for the kernel to answer
	Late          uint64 // packets of buffered flows after the deadline, forwarded to the owner
	Awaited       uint64 // dropped packets of unknown connections during startup
}
