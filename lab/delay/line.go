// SPDX-License-Identifier: Apache-2.0

// Package delay simulates a long-distance line between two network namespaces: delay, rate, loss and
// reordering, decided by a seed. It measures its own lateness, so an experiment can separate the line's
// faults from weir's. README.md describes its function and its punctuality.
package delay

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// Line is one direction. The zero value passes everything at once.
type Line struct {
	// Delay is the time of a packet in transit, after its last bit has left.
	Delay time.Duration
	// Rate is in bits a second, of Ethernet frames without preamble and checksum; 0: no limit.
	Rate uint64
	// Queue is the maximum of bytes waiting for a rated line; more are dropped. 0: 100 ms' worth, at least
	// 64 KiB.
	Queue int
	// Loss and Reorder are the probabilities of a packet's loss and of its late arrival. Neighbour
	// discovery (ARP, and IPv6's own) is exempt and uncounted. The kernel decides its times, and the same
	// seed must give the same fates to an experiment's packets.
	Loss, Reorder float64
	// Later is the additional delay of a reordered packet; 0: 1 ms.
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
		errs = append(errs, fmt.Errorf("a queue of %d bytes: want 0 or more", l.Queue))
	}
	return errors.Join(errs...)
}

// queue returns the length in bytes above which a rated line drops.
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

// large reports whether TCP's large packets may arrive uncut. On a slow line each would arrive as one burst
// after a long gap, unlike segments.
func (l Line) large() bool { return l.Rate == 0 || l.Rate >= 100e6 }

// Fate is the fate of a packet.
type Fate struct{ Lost, Late bool }

// Fates decides for the packets of one direction, in their order of arrival. The fate of packet n depends
// only on the seed, the direction and n.
type Fates struct {
	line Line
	rng  *rand.Rand
}

// newFates begins with the first packet. Direction 0 is from a to b, 1 from b to a.
func newFates(l Line, seed uint64, direction int) *Fates {
	return &Fates{l, rand.New(rand.NewPCG(seed, uint64(direction)))}
}

// next returns the fate of the next packet. It always draws the same number of values, so another
// probability of reordering leaves the losses unchanged.
func (f *Fates) next() Fate {
	lost, late := f.rng.Float64(), f.rng.Float64()
	return Fate{Lost: lost < f.line.Loss, Late: late < f.line.Reorder}
}

// spared reports a frame of neighbour discovery: ARP, and ICMPv6's for routers, neighbours and groups (RFC
// 4861, 2710, 3810), the latter after a hop-by-hop header.
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
