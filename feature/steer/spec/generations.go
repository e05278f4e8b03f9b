// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"fmt"
	"time"

	"github.com/weir-project/weir/internal/strictyaml"
)

// A slot with generations has two rows, in turn: the one that the service names,
// and one beside it. The next member gets the other row while the one before goes
// on; when all its sockets are there, the service names the other row: one store,
// for every packet after it. From then on the program gives the row before what
// its known UDP peers send, until they are silent or its time is over, by itself.

// Generations is what a service says of members that replace each other: the one
// before keeps the UDP peers that it knows, and all else is the next one's.
type Generations struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Idle           time.Duration `yaml:"idle" json:"idle" zero:"default"`         // silence after which a peer is new, ns
	Deadline       time.Duration `yaml:"deadline" json:"deadline" zero:"default"` // after which the one before gets nothing, ns
	Peers          int           `yaml:"peers" json:"peers" zero:"default"`       // UDP peers that are remembered; beyond, those silent longest go
}

// Defaults of generations: QUIC's usual idle timeout, and what an operator waits.
const (
	DefaultGenerationIdle     = 30 * time.Second
	DefaultGenerationDeadline = 5 * time.Minute
	defaultGenerationPeers    = 65536
)

func (g *Generations) withDefaults() *Generations {
	if g == nil {
		return nil
	}
	out := *g
	if out.Idle == 0 {
		out.Idle = DefaultGenerationIdle
	}
	if out.Deadline == 0 {
		out.Deadline = DefaultGenerationDeadline
	}
	if out.Peers == 0 {
		out.Peers = defaultGenerationPeers
	}
	return &out
}

func (s Service) validateGenerations(fail func(string, ...any)) {
	g := s.Generations
	switch {
	case g == nil:
	case s.By == ByQUIC || s.Engine == EngineReuseport:
		fail("generations need engine sk_lookup, which can give a packet to any socket")
	case g.Idle < 20*time.Millisecond || g.Idle > time.Hour:
		fail("generations.idle %s: want a time from 20ms to 1h", g.Idle)
	case g.Deadline < g.Idle || g.Deadline > 24*time.Hour:
		fail("generations.deadline %s: want a time from idle (%s) to 24h", g.Deadline, g.Idle)
	case g.Peers < 256 || g.Peers > 1<<22:
		fail("generations.peers %d: want a number from 256 to %d", g.Peers, 1<<22)
	}
}

// String is the option as plans show it.
func (g *Generations) String() string {
	if g == nil {
		return "none"
	}
	return fmt.Sprintf("(idle %s, deadline %s, %d peers)", g.Idle, g.Deadline, g.Peers)
}
