// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"fmt"
	"time"

	"github.com/weir-project/weir/internal/strictyaml"
)

// A slot with generations has two rows and alternates between them. The next member gets the spare row while the
// current one continues. When all its sockets exist, one store switches the service to the spare row, for every later
// packet. From then on the program sends packets of known UDP peers to the previous row, until the peers fall silent or
// the deadline passes.

// Generations configures the replacement of members. The previous member keeps its known UDP peers. The next one gets
// all other traffic.
type Generations struct {
	strictyaml.Pos `yaml:"-" json:"-"`
	Idle           time.Duration `yaml:"idle" json:"idle" zero:"default"`         // silence after which a peer counts as new, ns
	Deadline       time.Duration `yaml:"deadline" json:"deadline" zero:"default"` // after which the previous member gets nothing, ns
	Peers          int           `yaml:"peers" json:"peers" zero:"default"`       // remembered UDP peers; beyond, the longest silent are forgotten
}

// Defaults of generations. Idle is QUIC's usual idle timeout. Deadline is about the time an operator waits.
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
		fail("generations need engine sk_lookup, because it can select any socket")
	case g.Idle < 20*time.Millisecond || g.Idle > time.Hour:
		fail("generations.idle %s: want a time from 20ms to 1h", g.Idle)
	case g.Deadline < g.Idle || g.Deadline > 24*time.Hour:
		fail("generations.deadline %s: want a time from idle (%s) to 24h", g.Deadline, g.Idle)
	case g.Peers < 256 || g.Peers > 1<<22:
		fail("generations.peers %d: want a number from 256 to %d", g.Peers, 1<<22)
	}
}

// String formats the option for plans.
func (g *Generations) String() string {
	if g == nil {
		return "none"
	}
	return fmt.Sprintf("(idle %s, deadline %s, %d peers)", g.Idle, g.Deadline, g.Peers)
}
