// SPDX-License-Identifier: Apache-2.0

package bfdtest

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
)

const ms = time.Millisecond

func config(discriminator uint32) bfd.Config {
	return bfd.Config{Discriminator: discriminator, Multiplier: 3, DesiredTx: 10 * ms, RequiredRx: 10 * ms}
}

// pair is the two ends of a session under virtual time, with a line between them.
type pair struct {
	t     *testing.T
	ends  [2]*Session
	next  [2]time.Duration // next transmission of each end
	heard [2]time.Duration
	now   time.Duration
	drop  func(from int) bool
	log   []string
	polls int
}

func newPair(t *testing.T, a, b bfd.Config) *pair {
	return &pair{t: t, ends: [2]*Session{New(a), New(b)}, drop: func(int) bool { return false }}
}

// deliver sends a packet in wire format.
func (p *pair) deliver(from int, packet Packet) {
	if packet.Poll {
		p.polls++
	}
	if p.drop(from) {
		return
	}
	got, err := Parse(packet.Append(nil))
	if err != nil {
		p.t.Fatal(err)
	}
	to := 1 - from
	if mine := p.ends[to].Config().Discriminator; got.Yours != 0 && got.Yours != mine {
		return // nobody's session: RFC 5880 section 6.8.6
	}
	before := p.ends[to].State
	final, err := p.ends[to].Receive(got)
	if err != nil {
		p.t.Fatal(err)
	}
	p.heard[to] = p.now
	p.note(to, before)
	if final {
		answer := p.ends[to].Packet()
		answer.Final, answer.Poll = true, false
		p.deliver(to, answer)
	}
}

func (p *pair) note(end int, before bfd.State) {
	if now := p.ends[end]; now.State != before {
		p.log = append(p.log, fmt.Sprintf("%v %d: %s to %s, %s", p.now, end, before, now.State, now.Diag))
		p.next[end] = p.now
	}
}

// run advances the time by d, in steps of a millisecond.
func (p *pair) run(d time.Duration) {
	for end := p.now + d; p.now < end; p.now += ms {
		for i, s := range p.ends {
			before := s.State
			if limit := s.Lifetime(); limit != 0 && p.now-p.heard[i] > limit {
				s.Expire()
				p.note(i, before)
			}
			if every := s.Interval(); every != 0 && p.now >= p.next[i] {
				p.next[i] = p.now + every
				p.deliver(i, s.Packet())
			}
		}
	}
}

func (p *pair) states(a, b bfd.State) {
	p.t.Helper()
	if p.ends[0].State != a || p.ends[1].State != b {
		p.t.Errorf("after %v: %s and %s, want %s and %s\n%q", p.now, p.ends[0].State, p.ends[1].State, a, b, p.log)
	}
}

func TestComesUpAndGoesDown(t *testing.T) {
	p := newPair(t, config(1), config(2))
	if s := p.ends[0]; s.Interval() != bfd.SlowTx || s.DetectionTime() != 0 || s.Packet().DesiredTx != bfd.SlowTx {
		t.Errorf("down: sends every %v, waits %v, says %v", s.Interval(), s.DetectionTime(), s.Packet().DesiredTx)
	}
	p.run(3 * time.Second)
	p.states(bfd.Up, bfd.Up)
	if s := p.ends[0]; s.Interval() != 10*ms || s.DetectionTime() != 30*ms || s.poll {
		t.Errorf("up: sends every %v, waits %v, polls %v", s.Interval(), s.DetectionTime(), s.poll)
	}
	if p.polls < 2 {
		t.Errorf("%d polls: what had been said slowly was not said anew", p.polls)
	}
	cut := p.now
	p.drop = func(from int) bool { return from == 0 } // one way
	p.run(40 * ms)
	p.states(bfd.Down, bfd.Down)
	if a, b := p.ends[0].Diag, p.ends[1].Diag; a != bfd.NeighbourDown || b != bfd.TimeExpired {
		t.Errorf("%s, %s after %v", a, b, p.now-cut)
	}
	p.drop = func(int) bool { return false }
	p.run(3 * time.Second)
	p.states(bfd.Up, bfd.Up)
	p.ends[0].setDown(true)
	p.run(40 * ms)
	p.states(bfd.AdminDown, bfd.Down)
	p.run(5 * time.Second)
	p.states(bfd.AdminDown, bfd.Down)
	p.ends[0].setDown(false)
	p.run(3 * time.Second)
	p.states(bfd.Up, bfd.Up)
}

func TestPassiveWaits(t *testing.T) {
	a, b := config(1), config(2)
	a.Passive, b.Passive = true, true
	p := newPair(t, a, b)
	p.run(5 * time.Second)
	p.states(bfd.Down, bfd.Down)
	b.Passive = false
	p.ends[1].Set(b)
	p.run(5 * time.Second)
	p.states(bfd.Up, bfd.Up)
}

// An answer may be to the values before the last change. Until this is answered too, this end sends as the peer may
// expect.
func TestTwoChangesInAPoll(t *testing.T) {
	p := newPair(t, config(1), config(2))
	p.run(3 * time.Second)
	p.states(bfd.Up, bfd.Up)
	s := p.ends[0]
	final := Packet{State: bfd.Up, Final: true, Mine: 2, Yours: 1, Multiplier: 3, DesiredTx: 10 * ms, RequiredRx: 10 * ms}
	for _, tx := range []time.Duration{20 * ms, 500 * ms} {
		c := config(1)
		c.DesiredTx, c.RequiredRx = tx, 5*ms
		s.Set(c)
	}
	for answers, want := range []time.Duration{10 * ms, 10 * ms, 500 * ms} {
		if s.Interval() != want || s.poll != (answers < 2) {
			t.Errorf("after %d answers: every %v, polls: %t; want %v", answers, s.Interval(), s.poll, want)
		}
		if rx := 10 * ms; answers < 2 && s.rxInUse != rx || answers == 2 && s.rxInUse != 5*ms {
			t.Errorf("after %d answers it waits for packets every %v", answers, s.rxInUse)
		}
		if _, err := s.Receive(final); err != nil {
			t.Fatal(err)
		}
	}
	// Faster applies at once. Slower again is bounded by the values announced in between.
	for _, tx := range []time.Duration{5 * ms, 50 * ms} {
		c := config(1)
		c.DesiredTx = tx
		s.Set(c)
	}
	if s.Interval() != 10*ms { // the peer asks for no more
		t.Errorf("every %v", s.Interval())
	}
	final.RequiredRx = ms
	for _, want := range []time.Duration{5 * ms, 50 * ms} {
		if _, err := s.Receive(final); err != nil || s.Interval() != want {
			t.Errorf("every %v, want %v, %v", s.Interval(), want, err)
		}
	}
}

// A restarted passive neighbour ignores packets with the old discriminator and sends nothing first. So the old
// discriminator must be forgotten (RFC 5880 section 6.8.1, bfd.RemoteDiscr).
func TestPassiveBeginsAnew(t *testing.T) {
	passive := config(2)
	passive.Passive = true
	for name, end := range map[string]func(p *pair){
		"without a word": func(*pair) {},
		"shut down":      func(p *pair) { p.ends[1].setDown(true); p.run(2 * time.Second) },
		"down": func(p *pair) {
			p.drop = func(from int) bool { return from == 0 }
			p.run(1100 * ms)
			p.drop = func(int) bool { return false }
		},
	} {
		p := newPair(t, config(1), passive)
		p.run(4 * time.Second)
		p.states(bfd.Up, bfd.Up)
		end(p)
		anew := passive
		anew.Discriminator = 3
		p.ends[1] = New(anew)
		p.run(6 * time.Second)
		if p.states(bfd.Up, bfd.Up); t.Failed() {
			t.Fatal(name)
		}
	}
}

// RFC 5880 section 6.8.3: slower sending and a shorter detection time apply only after the peer knows.
func TestIntervalsChangeAfterAPoll(t *testing.T) {
	p := newPair(t, config(1), config(2))
	p.run(3 * time.Second)
	slower := config(1)
	slower.DesiredTx, slower.RequiredRx = 50*ms, 5*ms
	p.drop = func(from int) bool { return from == 1 && p.ends[0].poll }
	p.ends[0].Set(slower)
	if s := p.ends[0]; s.Interval() != 10*ms || s.DetectionTime() != 30*ms || !s.Packet().Poll || s.Packet().DesiredTx != 50*ms {
		t.Errorf("before the answer: sends every %v, waits %v, says %+v", s.Interval(), s.DetectionTime(), s.Packet())
	}
	p.drop = func(int) bool { return false }
	p.run(20 * ms)
	if s := p.ends[0]; s.Interval() != 50*ms || s.DetectionTime() != 30*ms || s.poll { // the peer still sends every 10 ms
		t.Errorf("after it: sends every %v, waits %v, polls %v", s.Interval(), s.DetectionTime(), s.poll)
	}
	if s := p.ends[1]; s.DetectionTime() != 150*ms {
		t.Errorf("the other waits %v", s.DetectionTime())
	}
	quicker := config(2)
	quicker.DesiredTx = 5 * ms
	p.ends[1].Set(quicker)
	if s := p.ends[1]; s.Interval() != 5*ms {
		t.Errorf("quicker at once: %v", s.Interval())
	}
	p.run(time.Second)
	p.states(bfd.Up, bfd.Up)
	if s := p.ends[0]; s.DetectionTime() != 15*ms {
		t.Errorf("it waits %v", s.DetectionTime())
	}
	none := quicker
	none.RequiredRx = 0
	p.ends[1].Set(none)
	p.run(time.Second)
	if a, b := p.ends[0].Interval(), p.ends[1].DetectionTime(); a != 0 || b != 0 {
		t.Errorf("asked for nothing: sends every %v; waits %v", a, b)
	}
	p.states(bfd.Up, bfd.Up)
}

func TestReceiveErrors(t *testing.T) {
	s := New(config(1))
	if _, err := s.Receive(Packet{State: bfd.Down, Mine: 5, Yours: 7, Multiplier: 3}); err == nil || s.Remote.Discriminator != 0 {
		t.Errorf("another's packet: %v, %+v", err, s.Remote)
	}
	for _, c := range []bfd.Config{{}, {Discriminator: 1}, {Discriminator: 1, Multiplier: 1}, {Discriminator: 1, Multiplier: 1, DesiredTx: 1500},
		{Discriminator: 1, Multiplier: 1, DesiredTx: ms, RequiredRx: 2 * time.Hour}, {Discriminator: 1, Multiplier: 1, DesiredTx: ms, EchoRx: -ms}} {
		if c.Validate() == nil {
			t.Errorf("%+v is valid", c)
		}
	}
	if err := config(1).Validate(); err != nil {
		t.Error(err)
	}
}

// After random losses and changes, both ends come up and agree on their timers once nothing is lost.
func TestRandomLoss(t *testing.T) {
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 7))
		random := func(d uint32) bfd.Config {
			return bfd.Config{Discriminator: d, Multiplier: uint8(1 + r.IntN(5)), DesiredTx: time.Duration(1+r.IntN(50)) * ms, RequiredRx: time.Duration(1+r.IntN(50)) * ms}
		}
		p := newPair(t, random(1), random(2))
		for range 20 {
			share := r.Float64()
			p.drop = func(int) bool { return r.Float64() < share }
			p.run(time.Duration(r.IntN(3000)) * ms)
			switch end := r.IntN(2); r.IntN(4) {
			case 0:
				p.ends[end].Set(random(uint32(end + 1)))
			case 1:
				p.ends[end].setDown(!p.ends[end].c.Down)
			}
		}
		p.ends[0].setDown(false)
		p.ends[1].setDown(false)
		p.drop = func(int) bool { return false }
		p.run(6 * time.Second)
		p.states(bfd.Up, bfd.Up)
		for i, s := range p.ends {
			other := p.ends[1-i]
			if s.poll || s.Interval() != max(s.c.DesiredTx, other.c.RequiredRx) || other.DetectionTime() != time.Duration(s.c.Multiplier)*max(s.c.DesiredTx, other.c.RequiredRx) {
				t.Errorf("seed %d: polls %v, sends every %v of %v and %v; the other waits %v", seed, s.poll, s.Interval(), s.c.DesiredTx, other.c.RequiredRx, other.DetectionTime())
			}
		}
		if t.Failed() {
			return
		}
	}
}
