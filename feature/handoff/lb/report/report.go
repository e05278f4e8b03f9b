// SPDX-License-Identifier: Apache-2.0

// Package report is what a load balancer says of itself: its status and its metrics.
package report

import (
	"net/netip"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/handoff/move"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// Status is what a load balancer does.
type Status struct {
	Name     string `json:"name"`
	Netns    string `json:"netns"`                // inode number of its network namespace
	Gone     bool   `json:"netns_gone,omitempty"` // the namespace, and its data path with it
	Agent    bool   `json:"agent"`                // whether its agent answers; without one there is no Backends
	Counts   Counts `json:"counts"`               // since it was made
	Flows    int    `json:"flows"`                // that it knows
	Buffered int    `json:"buffered"`             // of them, whose packets wait
	Moving   int    `json:"moving"`               // of them, that are being moved
	// Settling: it has begun anew, and packets of unknown connections wait for the backends to say which are theirs.
	Starting bool            `json:"starting,omitempty"`
	Backends []BackendStatus `json:"backends,omitempty"` // by number
	Partner  *PairStatus     `json:"partner,omitempty"`  // nil: there is none

	Certificate *peer.Certificate `json:"certificate,omitempty"` // of the agent

	Devices []DeviceFault `json:"device_faults,omitempty"` // of its interfaces, those at which nothing of it runs
}

// DeviceFault is a device of a load balancer at which nothing of it runs.
type DeviceFault = feature.DeviceFault

// PairStatus is how two load balancers stand to each other, as the agent of one sees it.
type PairStatus struct {
	Name      string `json:"name"`
	Connected bool   `json:"connected"`
	// Silent is for how long nothing was heard of it, connected or not; 0: it is heard. -1: nothing since the agent began.
	Silent  float64 `json:"silent_seconds"`
	Agents  int     `json:"agents"`  // of backends, that are connected to it
	Carries bool    `json:"carries"` // clients' packets come by this load balancer
	There   bool    `json:"there"`   // and by the partner, as it says
	Told    uint64  `json:"told"`    // flows, since the agent began
	Heard   uint64  `json:"heard"`
	// Apart: clients' packets come by here, the partner is not heard, and agents of backends that were at the partner are not here. It
	// has ended a moment ago, or both go on without each other.
	Apart bool `json:"apart"`
	// Seconds is the time for which both carried clients' packets, or were apart. Dropped counts what this one dropped in that time,
	// of flows with another owner than it knows.
	Seconds float64 `json:"split_seconds"`
	Dropped uint64  `json:"split_dropped"`
}

// BackendStatus is a backend as the agent sees it.
type BackendStatus struct {
	Name      string       `json:"name,omitempty"`
	Number    move.Backend `json:"number"`
	Address   netip.Addr   `json:"address,omitzero"`
	Where     string       `json:"where,omitempty"` // the interface, or tunnel
	Weight    int          `json:"weight"`
	Up        bool         `json:"up"`
	Reason    string       `json:"reason,omitempty"`   // it is not
	Unserved  []string     `json:"unserved,omitempty"` // services that nobody serves there: others get their new flows
	Connected bool         `json:"connected"`          // its agent
	// Registered: its agent is connected, here or at the partner, and has registered it. It needs no entry in lb.backends then.
	Registered bool `json:"registered,omitempty"`
	// UserPorts: packets of its tunnel came from source ports that any user of its host can bind, in the last ten minutes.
	UserPorts bool    `json:"user_ports,omitempty"`
	Silent    float64 `json:"silent_seconds"` // of an agent that is connected; 0: it is heard
	Flows     int     `json:"flows"`          // that it owns
	// Loads are what waits for the least busy member there, by service, in the service's own unit, where members say it.
	Loads map[string]uint32 `json:"loads,omitempty"`
}

// Counts are packets and flows since New, as lb.h's enum has them.
type Counts struct {
	In, Out       uint64 // packets passed to backends, and to clients
	Learned       uint64 // flows
	Buffered      uint64 // packets buffered
	Mute          uint64 // packets of backends that do not own the flow, dropped
	NoReset       uint64 // resets of flows that are about to move, dropped
	NoBackend     uint64 // packets that there is no backend for, dropped
	Full          uint64 // flows that there was no room for: they go by the hash
	ICMP          uint64 // errors passed to a flow's owner
	UnknownSource uint64 // dropped: packets of no backend, or out of a tunnel and of no service
	Fragment      uint64 // later fragments of a service by flow, dropped
	Big           uint64 // packets too big for their tunnel, left to the kernel to answer
	Late          uint64 // packets of parked flows after their deadline: passed to the owner
	Awaited       uint64 // packets of unknown connections, before the backends have said which are theirs: dropped
}
