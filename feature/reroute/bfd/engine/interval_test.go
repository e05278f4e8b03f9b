// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"net/netip"
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/bfdtest"
)

// pace is a session that is up, with ticks by the test.
type pace struct {
	*bench
	p bfdtest.Packet // the neighbour's
	s *Session
}

// newPace brings a session up. The neighbour asks for one packet per interval.
func newPace(t *testing.T, interval time.Duration, multiplier uint8) *pace {
	t.Helper()
	return newPaceOf(t, local4, peer4, interval, multiplier)
}

func newPaceOf(t *testing.T, local, peer netip.Addr, interval time.Duration, multiplier uint8) *pace {
	t.Helper()
	b := newBench(t)
	s := &Session{Config: bfd.Config{Discriminator: 0x01020304, Multiplier: multiplier, DesiredTx: time.Millisecond, RequiredRx: time.Millisecond},
		Local: local, Peer: peer, Ifindex: b.index, SourcePort: 50000}
	if err := b.w.put(0, s, 1); err != nil {
		t.Fatal(err)
	}
	x := &pace{b, bfdtest.Packet{State: bfd.Init, Multiplier: 255, Mine: 5, Yours: s.Discriminator, DesiredTx: time.Minute, RequiredRx: interval, Final: true}, s}
	for range 2 {
		x.hear()
		x.beat(0)
		x.p.State = bfd.Up
	}
	x.p.Final = false
	if st, _, err := b.w.status(0); err != nil || st.State != bfd.Up || st.Polling || st.Interval != interval {
		t.Fatalf("%+v, %v", st, err)
	}
	return x
}

// hear receives a packet of the neighbour.
func (x *pace) hear() {
	x.t.Helper()
	x.receive(frame(x.s.Peer, x.s.Local, bfdtest.HopLimit, x.p.Append(nil)))
}

// beat ticks after a delay and returns the packets sent.
func (x *pace) beat(after time.Duration) (out []bfdtest.Packet) {
	x.t.Helper()
	x.now += after
	x.at(0)
	x.tick()
	for f := x.sent(); f != nil; f = x.sent() {
		at := 42
		if x.s.Peer.Is6() {
			at = 62
		}
		p, err := bfdtest.Parse(f[at:])
		if err != nil {
			x.t.Fatal(err)
		}
		out = append(out, p)
	}
	return out
}

// A poll is answered at once, and no other packet is sent earlier because of it (RFC 5880 section 6.8.7).
func TestAnswersAreExtra(t *testing.T) {
	const interval, step, length = 100 * time.Millisecond, 5 * time.Millisecond, 5 * time.Second
	x := newPace(t, interval, 3)
	x.p.Poll = true
	answers, others := 0, 0
	for range length / step {
		x.hear()
		for _, p := range x.beat(step) {
			if p.Final {
				answers++
			} else {
				others++
			}
		}
		for _, p := range x.beat(0) { // a tick soon after
			if p.Final {
				t.Fatal("a poll is answered twice")
			}
			others++
		}
	}
	if most := int(length * 4 / 3 / interval); answers != int(length/step) || others < int(length/interval)*9/10 || others > most+1 {
		t.Errorf("%d answers to %d polls, and %d packets in %v: want one in 75 to 100 %% of %v", answers, length/step, others, length, interval)
	}
}

// A neighbour asking for a shorter interval gets it at once, even after asking for no packets (RFC 5880 section
// 6.8.3).
func TestShorterAtOnce(t *testing.T) {
	x := newPace(t, 10*time.Second, 3)
	for x.beat(10*time.Millisecond) == nil {
	}
	x.p.RequiredRx = 100 * time.Millisecond
	x.hear()
	if got := x.beat(10 * time.Millisecond); len(got) != 1 {
		t.Errorf("%d packets are sent at once", len(got))
	}
	x.p.RequiredRx = 200 * time.Millisecond
	x.hear()
	if got := x.beat(10 * time.Millisecond); len(got) != 0 {
		t.Errorf("%d packets are sent at once where the neighbour asks for less", len(got))
	}
	x.p.RequiredRx = 0
	x.hear()
	for range 100 {
		if got := x.beat(time.Second / 10); len(got) != 0 {
			t.Fatalf("%d packets are sent to a neighbour that wants none: %+v", len(got), got)
		}
	}
	x.p.Poll = true
	x.hear()
	if got := x.beat(0); len(got) != 1 || !got[0].Final {
		t.Errorf("its poll is not answered: %+v", got)
	}
	x.p.Poll, x.p.RequiredRx = false, 10*time.Second
	x.hear()
	if got := x.beat(10 * time.Millisecond); len(got) != 1 {
		t.Errorf("%d packets are sent at once", len(got))
	}
	x.p.RequiredRx = 0 // it wants none, long after the next packet was scheduled
	x.hear()
	x.beat(time.Second)
	x.p.RequiredRx = 20 * time.Second
	x.hear()
	if got := x.beat(10 * time.Millisecond); len(got) != 1 {
		t.Errorf("%d packets are sent at once where there were none", len(got))
	}
}

// Packets are 75 to 100 % of the interval apart, or up to 90 % with a multiplier of 1 (RFC 5880 section 6.8.7),
// though they leave at ticks. Within these limits the gap is random.
func TestJitter(t *testing.T) {
	const interval = 80 * time.Millisecond
	for name, c := range map[string]struct {
		multiplier         uint8
		tick               time.Duration
		most, below, above time.Duration // some are below and some above
	}{
		"many ticks":           {3, interval / 80, interval, interval * 80 / 100, interval * 95 / 100},
		"ten an interval":      {3, interval / 10, interval, interval * 85 / 100, interval * 85 / 100},
		"four an interval":     {3, interval / 4, interval, interval, 0},
		"of one, many ticks":   {1, interval / 80, interval * 90 / 100, interval * 80 / 100, interval * 85 / 100},
		"of one, eight":        {1, interval / 8, interval * 90 / 100, interval, 0},
		"no multiple of ticks": {3, interval / 7, interval, interval * 90 / 100, 0},
	} {
		t.Run(name, func(t *testing.T) {
			x := newPace(t, interval, c.multiplier)
			if err := x.w.tick(c.tick); err != nil {
				t.Fatal(err)
			}
			for len(x.beat(c.tick)) == 0 {
			}
			x.beat(interval) // packets due before the tick was known
			last, below, above := time.Duration(0), 0, 0
			for n := 0; n < 200; {
				if len(x.beat(c.tick)) == 0 {
					continue
				}
				gap := x.now - last
				if n++; last != 0 {
					if gap < interval*3/4 || gap > c.most {
						t.Fatalf("%v between two packets: want %v to %v", gap, interval*3/4, c.most)
					}
					if gap < c.below {
						below++
					}
					if gap > c.above {
						above++
					}
				}
				last = x.now
			}
			if below < 10 || above < 10 {
				t.Errorf("%d below %v, %d above %v: nothing is left to chance", below, c.below, above, c.above)
			}
		})
	}
}
