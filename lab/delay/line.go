// SPDX-License-Identifier: Apache-2.0

// Package delay is a line between two network namespaces that takes time, as one
// between two cities does: delay, rate, loss and reordering, decided by a seed. It
// counts how late it was itself, so that an experiment can tell the line's fault from
// the product's. README.md says how it works and how punctual it is.
package delay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// Line is one direction. The zero value passes everything at once.
type Line struct {
	// Delay is how long a packet is on its way, after its last bit has left.
	Delay time.Duration
	// Rate is in bits a second, of Ethernet frames without preamble and checksum; 0: without limit.
	Rate uint64
	// Queue is how many bytes may wait for a rated line before packets are dropped; 0: 100 ms' worth, at least
	// 64 KiB.
	Queue int
	// Loss and Reorder are probabilities that a packet vanishes, and that it comes late. Neighbour discovery
	// (ARP, and IPv6's own) is spared, and no part of the count: when it happens is the kernel's affair, and
	// the same seed is to mean the same fate for the packets of an experiment.
	Loss, Reorder float64
	// Later is by how much a reordered packet is later than its turn; 0: a millisecond.
	Later time.Duration
}

func (l Line) check() error {
	var errs []error
	if l.Delay < 0 || l.Delay > time.Minute || l.Later < 0 || l.Later > time.Minute {
		errs = append(errs, fmt.Errorf("a delay of %v and %v for late packets: want 0 to 1 minute", l.Delay, l.Later))
	}
	if !(l.Loss >= 0 && l.Loss <= 1 && l.Reorder >= 0 && l.Reorder <= 1) {
		errs = append(errs, fmt.Errorf("loss %v and reordering %v: want probabilities, 0 to 1", l.Loss, l.Reorder))
	}
	if l.Queue < 0 {
		errs = append(errs, fmt.Errorf("a queue of %d bytes", l.Queue))
	}
	return errors.Join(errs...)
}

// queue is the length in bytes beyond which a rated line drops.
func (l Line) queue() int {
	if l.Queue != 0 {
		return l.Queue
	}
	return max(64<<10, int(l.Rate/8/10))
}

func (l Line) later() time.Duration {
	if l.Later != 0 {
		return l.Later
	}
	return time.Millisecond
}

// large says whether TCP's large packets may come uncut. On a slow line each would
// arrive as one burst, after a long gap, which is not how segments arrive.
func (l Line) large() bool { return l.Rate == 0 || l.Rate >= 100e6 }

// Fate is what becomes of a packet.
type Fate struct{ Lost, Late bool }

// Fates decides for the packets of one direction, in the order in which they come:
// the nth packet's fate is a function of the seed, the direction and n alone.
type Fates struct {
	line Line
	rng  *rand.Rand
}

// newFates begins with the first packet. Direction 0 is from a to b, 1 from b to a.
func newFates(l Line, seed uint64, direction int) *Fates {
	return &Fates{l, rand.New(rand.NewPCG(seed, uint64(direction)))}
}

// next is the fate of the next packet. It draws as often whatever comes out, so that
// another probability of reordering leaves the same packets lost.
func (f *Fates) next() Fate {
	lost, late := f.rng.Float64(), f.rng.Float64()
	return Fate{Lost: lost < f.line.Loss, Late: late < f.line.Reorder}
}

// spared tells a frame of neighbour discovery: ARP, and ICMPv6's for routers,
// neighbours and groups (RFC 4861, 2710, 3810), the latter behind a hop-by-hop header.
func spared(frame []byte) bool {
	const ethernet, ipv6 = 14, 40
	if len(frame) < ethernet {
		return true
	}
	switch kind := uint16(frame[12])<<8 | uint16(frame[13]); kind {
	case 0x0806:
		return true
	case 0x86dd:
	default:
		return false
	}
	if len(frame) < ethernet+ipv6+1 {
		return false
	}
	next, at := frame[ethernet+6], ethernet+ipv6
	if next == 0 && len(frame) > at+8 { // hop-by-hop: its own next header, and 8 bytes
		next, at = frame[at], at+8
	}
	if next != 58 {
		return false
	}
	t := frame[at]
	return t >= 130 && t <= 137 || t == 143
}
