// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"net"
	"time"
)

// Neighbours that are kept are permanent, and the kernel changes no permanent entry: it would go
// on sending to a link address that somebody else has by now, or nobody. So [Run] does what the
// kernel does for its own entries (RFC 826; RFC 4861, 7.2 and 7.3): it hears ARP and neighbour
// discovery, asks neighbours that were silent for askAfter, and all neighbours of a link that is
// down, and believes the address that they tell. Where the old address still answers for the
// neighbour, that stays: two hosts with one address do not take turns.

const (
	askEvery  = time.Second            // until it answers
	askOnly   = 3                      // times its own link address; then all of the link are asked
	askSeldom = 5 * time.Second        // those that do not answer either
	verify    = 300 * time.Millisecond // until then the old address must answer
)

// askAfter is how long after it was heard last a neighbour is not asked. Tests change it.
var askAfter = 10 * time.Second

// keptNeighbour is one whose entry is weir's, and permanent.
type keptNeighbour struct {
	mac   net.HardwareAddr
	heard time.Time
	asked time.Time
	times int              // asked without an answer
	other net.HardwareAddr // that it may have by now,
	since time.Time        // since
}
