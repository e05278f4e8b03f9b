// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"
	"time"

	"github.com/weir-project/weir/feature/reroute/bfd"
	"github.com/weir-project/weir/feature/reroute/bfd/bfdtest"
	"github.com/weir-project/weir/feature/reroute/bfd/engine/bpf"
)

// A stall delays the verdict, so waiting packets can be received. Repeated stalls delay it for a limited time.
func TestStallsPutAnEndOff(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct {
		name              string
		interval          time.Duration
		multiplier        uint8
		every             time.Duration // between ticks: the length of each stall
		stalls            bool
		atLeast, atLatest time.Duration // silence before down
	}{
		{"no stall", 10 * ms, 3, 2 * ms, false, 30 * ms, 33 * ms},
		{"a stall at each tick", 10 * ms, 3, 5 * ms, true, 500 * ms, 550 * ms},           // half a second more
		{"stalls longer than all of it", 10 * ms, 3, 200 * ms, true, 400 * ms, 900 * ms}, // and a stall
		{"many intervals", 40 * ms, 125, 900 * ms, true, 5400 * ms, 12 * time.Second},    // a second detection time, and a stall
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t)
			s := &Session{Config: bfd.Config{Discriminator: 0x01020304, Multiplier: 3, DesiredTx: c.interval, RequiredRx: c.interval},
				Local: local4, Peer: peer4, Ifindex: b.index, SourcePort: 50000}
			if err := b.w.put(0, s, 1); err != nil {
				t.Fatal(err)
			}
			b.at(0)
			p := bfdtest.Packet{State: bfd.Init, Multiplier: c.multiplier, Mine: 5, Yours: s.Discriminator, DesiredTx: c.interval, RequiredRx: c.interval, Final: true}
			for range 2 {
				b.receive(frame(peer4, local4, bfdtest.HopLimit, p.Append(nil)))
				b.tick()
				p.State = bfd.Up
			}
			state := func() Status {
				st, _, err := b.w.status(0)
				if err != nil {
					t.Fatal(err)
				}
				return st
			}
			if st := state(); st.State != bfd.Up || st.Detection != time.Duration(c.multiplier)*c.interval {
				t.Fatalf("%+v", st)
			}
			heard := b.now
			for state().State == bfd.Up {
				if b.now += c.every; b.now-heard > time.Minute {
					t.Fatal("up after a minute of silence")
				}
				if c.stalls {
					if err := b.o.LivenessShared.Put(uint32(0), uint64(b.now)); err != nil {
						t.Fatal(err)
					}
				}
				b.at(0)
				b.tick()
			}
			if silent := b.now - heard; silent < c.atLeast || silent > c.atLatest {
				t.Errorf("down after %v of silence: want %v to %v", silent, c.atLeast, c.atLatest)
			}
		})
	}
}

// After a stall of all CPUs beyond the detection time, the first tick gives no verdict, though liveness has not seen
// the stall yet. A silent neighbor goes down a detection time and an interval later.
func TestFirstTickAfterStall(t *testing.T) {
	const interval, tick = 10 * time.Millisecond, 2500 * time.Microsecond
	for name, dead := range map[string]bool{"alive": false, "dead": true} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			s := &Session{Config: bfd.Config{Discriminator: 0x01020304, Multiplier: 3, DesiredTx: interval, RequiredRx: interval},
				Local: local4, Peer: peer4, Ifindex: b.index, SourcePort: 50000}
			if err := b.w.put(0, s, 1); err != nil {
				t.Fatal(err)
			}
			if err := b.o.BfdClock.Put(uint32(0), bpf.BfdBfdClockwork{Sessions: 1, Tick: uint32(tick / time.Microsecond)}); err != nil {
				t.Fatal(err)
			}
			b.at(0)
			p := bfdtest.Packet{State: bfd.Init, Multiplier: 3, Mine: 5, Yours: s.Discriminator, DesiredTx: interval, RequiredRx: interval, Final: true}
			hear := func() {
				b.receive(frame(peer4, local4, bfdtest.HopLimit, p.Append(nil)))
				b.tick()
				p.State = bfd.Up
			}
			step := func(d time.Duration) bfd.State {
				t.Helper()
				b.now += d
				b.at(0)
				b.tick()
				st, _, err := b.w.status(0)
				if err != nil {
					t.Fatal(err)
				}
				return st.State
			}
			for range 8 {
				hear()
				for range 4 {
					step(tick)
				}
			}
			if state := step(59 * time.Millisecond); state != bfd.Up {
				t.Fatalf("after 59 ms in which this host did not run: %v", state)
			}
			if !dead {
				hear()
			}
			state := bfd.Up
			for i := range 18 {
				if state = step(tick); !dead && i%4 == 3 {
					hear()
				}
			}
			if (state == bfd.Up) == dead {
				t.Errorf("the neighbor is dead: %t, and 45 ms later the session is %v", dead, state)
			}
		})
	}
}
