// SPDX-License-Identifier: Apache-2.0

package protect

import (
	"net"
	"time"
)

// Kept neighbours have permanent entries, and the kernel never updates these. It would keep sending to a link address
// now unused, or used by another host. So [Run] takes over the kernel's part (RFC 826; RFC 4861 sections 7.2 and
// 7.3). It receives ARP and neighbour discovery. It asks neighbours silent for askAfter, and all neighbours of a link
// that is down, and accepts their answers. While the old address still answers, it stays: two hosts with one address
// do not alternate.

const (
	askEvery  = time.Second            // until the neighbour answers
	askOnly   = 3                      // questions to its known link address; later ones go to the whole link
	askSeldom = 5 * time.Second        // for neighbours silent to these too
	verify    = 300 * time.Millisecond // time for the old address to answer
)

// askAfter is the time between the last packet of a neighbour and the next question. Tests change it.
var askAfter = 10 * time.Second

// keptNeighbour is a neighbour with a permanent entry of weir's.
type keptNeighbour struct {
	mac   net.HardwareAddr
	heard time.Time
	asked time.Time
	times int              // questions without an answer
	other net.HardwareAddr // possible new address,
	since time.Time        // claimed since
}
