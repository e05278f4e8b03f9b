// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"math/rand/v2"
	"time"
)

// builder builds a trace. Times count from the beginning of the trace.
type builder struct {
	Scenario
	seed, name uint64
	r          *rand.Rand
	trace      Trace
}

func (b *builder) at(t time.Duration) uint64 { return b.trace.start + uint64(t) }

// habit is the timing of a client's packets.
type habit int

const (
	jittered habit = iota // intervals between 0.6 and 1.4 of the mean
	poisson
	bursts // four packets within 3 ms, then silence to keep the mean
)

// inBurst is the number of packets in a burst.
const inBurst = 4

// client adds packets of one source at a mean rate in packets per second.
func (b *builder) client(from, to time.Duration, pps float64, h habit, p Packet) {
	interval, n := float64(time.Second)/pps, 1
	if h == bursts {
		interval, n = interval*inBurst, inBurst
	}
	for t := float64(from) + b.r.Float64()*interval; t < float64(to); {
		for i := range n {
			p.At = b.at(min(time.Duration(t)+time.Duration(i)*time.Millisecond, to-1))
			b.trace.quiet = append(b.trace.quiet, p)
		}
		if h == poisson {
			t += b.r.ExpFloat64() * interval
		} else {
			t += interval * (0.6 + 0.8*b.r.Float64())
		}
	}
}

// someone returns a random client address and port, from networks like an ISP's customers.
func (b *builder) someone(c Class) Packet {
	return Packet{
		Src:     Source{Identity: uint32(b.r.IntN(200)+20)<<24 | b.r.Uint32N(1<<24), Host: client},
		SrcPort: uint16(1024 + b.r.IntN(60000)),
		Class:   c,
	}
}

// clients adds n legitimate clients, each at pps, until the end.
func (b *builder) clients(n int, pps float64, from time.Duration, h habit, c Class) {
	for range n {
		b.client(from, b.To, pps, h, b.someone(c))
	}
}

// clientNet has the clients of crowds: 192.0.2.0 (RFC 5737) and the following networks.
const clientNet = 0xc0000200

// crowd adds n clients with successive addresses from base on. Together they send pps at random
// moments.
func (b *builder) crowd(base uint32, n int, pps float64, c Class) {
	for i := range n {
		p := b.someone(c)
		p.Src.Identity = base + uint32(i)
		b.client(0, b.To, pps/float64(n), poisson, p)
	}
}

// joining adds newcomers one after the other, evenly over the attack.
func (b *builder) joining(n int) {
	for i := range n {
		from := b.From + time.Duration(i)*(b.To-b.From)/time.Duration(n)
		b.client(from, b.To, clientPPS, jittered, b.someone(Newcomer))
	}
}

// flood adds an attack at a steady rate, from From to To, while on returns true.
func (b *builder) flood(pps float64, on func(time.Duration) bool, d draw) {
	b.trace.floods = append(b.trace.floods, &flood{
		from: b.at(b.From), interval: float64(time.Second) / pps, n: int(pps * (b.To - b.From).Seconds()),
		on: on, draw: d, class: Attack,
		// A separate random source: the attack does not depend on the clients.
		r: rand.New(rand.NewPCG(b.seed, b.name+uint64(len(b.trace.floods))+1)),
	})
}

// patient adds attackers sending at rate low until the attack begins, then at rate high.
func (b *builder) patient(n int, low, high float64) {
	for i := range n {
		p := Packet{Src: Source{Identity: 0x11000000 + uint32(i)*0x1a3d5b, Host: client}, SrcPort: uint16(3000 + i), Class: Mimic}
		b.client(0, b.From, low, jittered, p)
		p.Class = Attack
		b.client(b.From, b.To, high, jittered, p)
	}
}
