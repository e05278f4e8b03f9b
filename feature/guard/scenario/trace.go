// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"cmp"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"time"
)

// uptime is the beginning of a trace's virtual clock. It is not zero, as on a host receiving
// traffic. With zero, timestamps never set would look recent.
const uptime = uint64(1000 * time.Second)

// epochs is the range of a trace's random beginning. Algorithms counting in epochs up to this
// length meet the attack in another phase with each seed.
const epochs = uint64(4 * time.Second)

// Trace returns the packets of a scenario, ordered by time. It generates the attack while it is
// read: a million packets a second need no memory.
type Trace struct {
	start  uint64   // virtual time of the trace's time 0
	quiet  []Packet // packets without a steady rate, ordered by time
	floods []*flood
}

// flood has packets at a steady rate.
type flood struct {
	next     Packet
	from     uint64 // ns of the virtual clock
	interval float64
	i, n     int
	on       func(since time.Duration) bool // nil: always
	draw     draw
	r        *rand.Rand
	class    Class
}

// draw fills in the source of the i-th packet of a flood. since is the time from the flood's
// beginning.
type draw func(r *rand.Rand, i int, since time.Duration, p *Packet)

// Trace returns the scenario's trace for a seed.
func (s Scenario) Trace(seed uint64) *Trace {
	h := fnv.New64a()
	h.Write([]byte(s.Name))
	b := &builder{Scenario: s, seed: seed, name: h.Sum64(), r: rand.New(rand.NewPCG(seed, h.Sum64()))}
	b.trace.start = uptime + b.r.Uint64N(epochs)
	s.build(b)
	slices.SortStableFunc(b.trace.quiet, func(x, y Packet) int { return cmp.Compare(x.At, y.At) })
	for _, f := range b.trace.floods {
		f.advance()
	}
	return &b.trace
}

// Start returns the trace's beginning in virtual time, in ns. A scenario's From and To count from
// it.
func (t *Trace) Start() uint64 { return t.start }

// Next fills batch with the next packets and returns their number. It is less than len(batch) only
// at the end, then 0.
func (t *Trace) Next(batch []Packet) int {
	for i := range batch {
		var first *flood
		for _, f := range t.floods {
			if f.i <= f.n && (first == nil || f.next.At < first.next.At) {
				first = f
			}
		}
		switch {
		case len(t.quiet) > 0 && (first == nil || t.quiet[0].At <= first.next.At):
			batch[i] = t.quiet[0]
			t.quiet = t.quiet[1:]
		case first != nil:
			batch[i] = first.next
			first.advance()
		default:
			return i
		}
	}
	return len(batch)
}

// All returns the rest of the trace in one slice, of 24 bytes a packet.
func (t *Trace) All() []Packet {
	var all []Packet
	for {
		n := len(all)
		all = slices.Grow(all, 1<<16)[:n+1<<16]
		got := t.Next(all[n:])
		all = all[:n+got]
		if got < 1<<16 {
			return all
		}
	}
}

// advance generates the next packet. After the last one, i is n+1.
func (f *flood) advance() {
	for ; f.i < f.n; f.i++ {
		since := uint64(float64(f.i) * f.interval)
		if f.on != nil && !f.on(time.Duration(since)) {
			continue
		}
		f.next = Packet{At: f.from + since, Src: Source{Host: client}, Class: f.class}
		f.draw(f.r, f.i, time.Duration(since), &f.next)
		f.i++
		return
	}
	f.i = f.n + 1
}

// Skip discards all packets before a time, counted from the trace's beginning.
func (t *Trace) Skip(until time.Duration) {
	at := t.start + uint64(until)
	i, _ := slices.BinarySearchFunc(t.quiet, at, func(p Packet, at uint64) int { return cmp.Compare(p.At, at) })
	t.quiet = t.quiet[i:]
	for _, f := range t.floods {
		for f.i <= f.n && f.next.At < at {
			f.advance()
		}
	}
}
