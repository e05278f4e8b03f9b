// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/routers"
)

// Collectors permitted for a device's records, with a move from slot 0 to slot 1 in epoch 5.
func TestWelcome(t *testing.T) {
	moving := func() *account {
		a := newAccount(netip.MustParseAddr("10.99.0.1"), false)
		a.slot = 0
		a.move(5, 1, 7)
		return a
	}
	settled := func() *account {
		a := moving()
		a.endMove(6)
		return a
	}
	port := func(session int) int { return 1024 + session }
	for _, c := range []struct {
		name      string
		a         *account
		collector int
		r         peers.Record
		want      bool
	}{
		{"sent before, at the old", moving(), 0, peers.Record{Kind: peers.Flows, Epoch: 4}, true},
		{"sent before, at the new", moving(), 1, peers.Record{Kind: peers.Flows, Epoch: 4}, false},
		{"sent meanwhile, at the old", moving(), 0, peers.Record{Kind: peers.Route, Epoch: 5}, true},
		{"sent meanwhile, at the new", moving(), 1, peers.Record{Kind: peers.Route, Epoch: 5}, true},
		{"sent meanwhile, elsewhere", moving(), 2, peers.Record{Kind: peers.Flows, Epoch: 5}, false},
		{"sent after, at the old", settled(), 0, peers.Record{Kind: peers.Flows, Epoch: 6}, false},
		{"sent after, at the new", settled(), 1, peers.Record{Kind: peers.Flows, Epoch: 6}, true},
		{"sent meanwhile, read after", settled(), 0, peers.Record{Kind: peers.Flows, Epoch: 5}, true},
		{"a new session at the old", moving(), 0, peers.Record{Kind: peers.PeerUp, Port: port(8)}, false},
		{"the old session at the old", moving(), 0, peers.Record{Kind: peers.PeerUp, Port: port(7)}, true},
		{"a new session at the new", moving(), 1, peers.Record{Kind: peers.PeerUp, Port: port(8)}, true},
		{"a session after, at the old", settled(), 0, peers.Record{Kind: peers.PeerUp, Port: port(9)}, false},
		{"statistics read late", settled(), 0, peers.Record{Kind: peers.Other}, true},
		{"statistics elsewhere", settled(), 2, peers.Record{Kind: peers.Other}, false},
	} {
		if got, _ := c.a.welcome(c.collector, c.r); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// Records from before the decision about moving devices are evaluated after it.
func TestDecide(t *testing.T) {
	l, f := book(t)
	honest(l, f)
	moves, stays := l.accounts[0], l.accounts[1]
	lost := func(i int) routers.Event {
		return routers.Event{Device: f.Devices[i], Kind: routers.Lost, Err: errors.New("reset")}
	}
	l.beginMove()
	l.book(1, peers.Record{Kind: peers.Flows, Device: moves.addr, Epoch: 5, Count: 3})
	l.book(0, peers.Record{Kind: peers.Flows, Device: stays.addr, Epoch: 5, Count: 3})
	l.notice(lost(0))
	l.notice(lost(1))
	if l.misdirected != 0 || l.rejected != 0 {
		t.Errorf("evaluated too early: %d misdirected, %d rejected", l.misdirected, l.rejected)
	}
	moved := l.decide(5, map[netip.Addr]int{moves.addr: 1, stays.addr: 1, realRouter: 2}, []int{1, 1})
	if moved != 1 || l.misdirected != 3 || len(l.resets) != 1 || l.rejected != 1 || moves.counted[routers.IPFIX][5] != 3 {
		t.Errorf("%d moved, %d misdirected, %d sessions moved, %d rejected, %v counted", moved, l.misdirected, len(l.resets), l.rejected, moves.counted)
	}
	if moves.split() || !stays.split() {
		t.Errorf("split: moved device %v, other device %v", moves.split(), stays.split())
	}
	l.endMoves(6)
	l.notice(lost(0))
	if l.rejected != 2 {
		t.Errorf("a session lost after the move is not noticed")
	}
	l.book(0, peers.Record{Kind: peers.Route, Device: moves.addr, Epoch: 6, Count: 1})
	l.book(1, peers.Record{Kind: peers.Route, Device: moves.addr, Epoch: 6, Count: 1})
	if l.misdirected != 4 || !moves.split() {
		t.Errorf("%d misdirected after the move, split %v", l.misdirected, moves.split())
	}
}

// A moved device may miss records of this epoch only. No device may have too many.
func TestAuditOfMoves(t *testing.T) {
	for _, c := range []struct {
		name   string
		extra  int // difference to the number of sent records
		epoch  uint32
		moving bool
		want   float64
	}{
		{"short while moving", -1, 1, true, 0},
		{"too many while moving", 1, 1, true, 1},
		{"short and not moving", -1, 1, false, 1},
	} {
		l, f := book(t)
		honest(l, f)
		if c.moving {
			l.accounts[0].move(1, 3, 0)
		}
		l.book(0, peers.Record{Kind: peers.Flows, Device: l.accounts[0].addr, Epoch: c.epoch, Count: c.extra})
		if got := l.audit([]span{{epoch: 1, calm: map[int]bool{0: true, 1: true, 2: true, 3: true}}})["miscounted"]; got != c.want {
			t.Errorf("%s: %g miscounted, want %g", c.name, got, c.want)
		}
	}
}

func TestBlind(t *testing.T) {
	begin := time.Now()
	at := func(s ...int) (all []time.Time) {
		for _, s := range s {
			all = append(all, begin.Add(time.Duration(s)*time.Second))
		}
		return all
	}
	for _, c := range []struct {
		sent    []time.Time
		waited  []time.Time
		decoded int
		want    int
	}{
		{at(1, 2, 3), nil, 3, 0}, {at(1, 2, 3), nil, 2, 2}, {at(1, 2, 3), nil, 1, 3}, {at(1, 2, 3), nil, 0, 9}, {nil, nil, 0, 0}, {at(1), nil, 2, 0},
		// Time holding messages back is not undecodable. Later undecoded messages are.
		{at(1, 4), at(2, 3), 1, 2}, {at(1, 4), at(5), 1, 4}, {at(1, 4, 6), at(2, 3, 5), 1, 5}, {at(1), at(2, 3), 0, 2}, {at(1), at(0), 0, 9},
	} {
		if got := blind(c.sent, c.waited, c.decoded, begin, begin.Add(9*time.Second)); got != time.Duration(c.want)*time.Second {
			t.Errorf("%d sent, %d decoded: blind for %s, want %d s", len(c.sent), c.decoded, got, c.want)
		}
	}
	if got := since(at(1, 2, 3), begin.Add(2*time.Second)); !slices.Equal(got, at(3)) {
		t.Errorf("%v", got)
	}
}

func TestBusiest(t *testing.T) {
	begin := time.Now()
	var times []time.Time
	for _, ms := range []int{1900, 0, 500, 999, 1100, 1400} {
		times = append(times, begin.Add(time.Duration(ms)*time.Millisecond))
	}
	if got := busiest(times, time.Second); got != 4 {
		t.Errorf("%d in the busiest second, want 4", got)
	}
	if got := busiest(nil, time.Second); got != 0 {
		t.Errorf("%d of none", got)
	}
}

func TestChanged(t *testing.T) {
	if got := changed([]int{0, 1, 0, 1}, []int{0, 1, 2, 1}); got != 0.25 {
		t.Errorf("%g of the buckets changed, want a quarter", got)
	}
}
