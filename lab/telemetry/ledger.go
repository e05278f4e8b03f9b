// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
	"github.com/weir-project/weir/lab/routers"
)

// ledger compares records sent by devices with records counted by collectors, and tracks disturbed slots.
type ledger struct {
	result *lab.Result
	fleet  *routers.Fleet

	mu           sync.Mutex
	accounts     []*account // simulated devices by index, then real ones
	byAddr       map[netip.Addr]*account
	disturbed    map[int]bool // slots with a killed or starting collector, or a collector not reached again yet
	misdirected  int
	odd          int // unexpected lines in a collector's log or output
	gaps         int // in sequence numbers, due to a missing template
	deafStarts   int
	crashed      map[[2]int]bool // collector and life of each crash before all routers were up
	closes       int             // ends of BMP sessions in the collectors' logs
	resets       []time.Time     // times of session ends due to a move of the device
	rejected     int             // noticed by devices of undisturbed slots
	rejectedDead int             // noticed by devices of disturbed slots
	lostDead     int             // sessions ended with their collector

	deciding  bool // a move has begun, and the moving devices are not known yet
	undecided []undecided
	reminded  int // devices forced to announce their template, because their collector would never have decoded

	rejectedByWeir int            // weir's own count, for disturbed slots
	mismatched     map[uint32]int // devices with a wrong count, by epoch
}

// undecided is a record or an event from the time before the moving devices are known.
type undecided struct {
	collector int
	record    peers.Record
	event     *routers.Event
}

func newLedger(r *lab.Result, fleet *routers.Fleet, real []netip.Addr) *ledger {
	l := &ledger{result: r, fleet: fleet, byAddr: map[netip.Addr]*account{}, disturbed: map[int]bool{}, mismatched: map[uint32]int{}, crashed: map[[2]int]bool{}}
	add := func(a netip.Addr, real bool) {
		acc := newAccount(a, real)
		l.accounts = append(l.accounts, acc)
		l.byAddr[a] = acc
	}
	for _, d := range fleet.Devices {
		add(d.Addr, false)
	}
	for _, a := range real {
		add(a, true)
	}
	return l
}

// addrs returns the source addresses of all devices, in the order of their accounts.
func (l *ledger) addrs() []netip.Addr {
	var all []netip.Addr
	for _, a := range l.accounts {
		all = append(all, a.addr)
	}
	return all
}

// book enters one line of a collector's output.
func (l *ledger) book(collector int, r peers.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.enter(collector, r)
}

func (l *ledger) enter(collector int, r peers.Record) {
	if r.Kind == peers.Gap && l.excused(l.byAddr[r.Device]) {
		l.gaps++
		return
	}
	if r.Kind == peers.Crashed && l.disturbed[collector] {
		l.crashed[[2]int{collector, r.Incarnation}] = true
		return
	}
	if r.Kind == peers.Odd || r.Kind == peers.Gap || r.Kind == peers.Crashed {
		l.odd++
		l.result.Note("%s", r.Text)
		return
	}
	if r.Kind == peers.Closed {
		l.closes++
	}
	if r.Kind == peers.Session || r.Kind == peers.Closed {
		return // the collector's own note about a connection, not a message of a device
	}
	a := l.byAddr[r.Device]
	if a == nil {
		l.odd++
		l.result.Note("collector %d counted a record of %s, not a device", collector, r.Device)
		return
	}
	if l.deciding && collector != a.slot && a.slot != unknown {
		l.undecided = append(l.undecided, undecided{collector: collector, record: r})
		return
	}
	welcome, home := a.welcome(collector, r)
	a.at[presence{home, collector}] = true
	p := routers.BMP
	if r.Kind == peers.Flows {
		p = routers.IPFIX
	}
	a.total[p] += r.Count
	if !welcome {
		l.misdirected += r.Count
		l.result.Note("collector %d received %d %s records of %s, expected at slot %d (epoch %d)", collector, r.Count, p, a.addr, a.slot, r.Epoch)
		return
	}
	l.credit(a, collector, r)
}

// credit counts a record at a permitted collector.
func (l *ledger) credit(a *account, collector int, r peers.Record) {
	here := a.slot == unknown || a.slot == collector
	switch r.Kind {
	case peers.Route:
		a.counted[routers.BMP][r.Epoch] += r.Count
	case peers.Flows:
		a.counted[routers.IPFIX][r.Epoch] += r.Count
		a.decoded[decoding{collector, r.Incarnation, r.Epoch}] += r.Count
		if here {
			a.life = r.Incarnation
		}
	case peers.PeerUp:
		a.peerUps++
		if n := routers.SessionOfPort(r.Port); here && !a.real && n > a.session {
			a.session = n
		}
	}
}

// excused reports whether a device's records may lack their template: a new collector receives records
// before the exporter repeats the template. A simulated router repeats it before its slot counts as calm
// again, a real one at any time.
func (l *ledger) excused(a *account) bool {
	return a != nil && (a.real || l.disturbed[a.slot])
}

// notice enters an event of a device.
func (l *ledger) notice(e routers.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.deciding {
		l.undecided = append(l.undecided, undecided{event: &e})
		return
	}
	l.heard(e)
}

func (l *ledger) heard(e routers.Event) {
	a := l.byAddr[e.Device.Addr]
	if a == nil || a.slot == unknown {
		return
	}
	if l.disturbed[a.slot] {
		if e.Kind == routers.Lost {
			l.lostDead++
		} else {
			l.rejectedDead++
		}
		return
	}
	if e.Kind == routers.Lost && a.moving() {
		l.resets = append(l.resets, e.Time)
		return
	}
	l.rejected++
	l.result.Note("%s of %s, slot %d with a live collector: %v", e.Kind, e.Device.Addr, a.slot, e.Err)
}

// disturb marks a slot as disturbed. Call it before the collector is killed; calm ends it.
func (l *ledger) disturb(slot int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.disturbed[slot] = true
}

func (l *ledger) calm(slot int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.disturbed, slot)
}

// deafStart counts a restart of a deaf collector.
func (l *ledger) deafStart() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deafStarts++
}

// wrote reports whether a collector counted any flow record in one of its lives.
func (l *ledger) wrote(collector, life int) bool {
	for _, a := range l.accounts {
		for d := range a.decoded {
			if d.collector == collector && d.life == life {
				return true
			}
		}
	}
	return false
}

// died reports whether a started collector has ended before all its routers were up.
func (l *ledger) died(c *peers.Collector) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !c.Running() && l.disturbed[c.Number]
}

// strays counts records at a collector not named by weir.
func (l *ledger) strays() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.misdirected
}

// undisturbed returns the currently undisturbed slots.
func (l *ledger) undisturbed(slots int) map[int]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	calm := map[int]bool{unknown: len(l.disturbed) == 0}
	for s := range slots {
		calm[s] = !l.disturbed[s]
	}
	return calm
}

// waiting counts the devices of slots with an incomplete or wrong count for an epoch. patience reports
// whether waiting may still help: a device lacks records, and none has too many.
func (l *ledger) waiting(epoch uint32, slots map[int]bool) (n int, patience bool, example string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, a := range l.accounts {
		h, _ := a.home(epoch)
		if a.real || !slots[h.slot] {
			continue
		}
		for _, p := range []routers.Protocol{routers.IPFIX, routers.BMP} {
			sent, counted := l.fleet.Sent(p, i, epoch), a.counted[p][epoch]
			if counted > sent || counted < sent && h.old == unknown { // a moving device may lose records in transit
				n++
				patience = patience || counted < sent
				example = fmt.Sprintf("%s, slot %d, epoch %d: %d %s records sent, %d counted", a.addr, a.slot, epoch, sent, p, counted)
				break
			}
		}
	}
	return n, patience, example
}

// drain waits until all records of an ended epoch are counted for the devices of the slots. Uncounted
// records after the limit are lost.
func (l *ledger) drain(ctx context.Context, epoch uint32, slots map[int]bool, limit time.Duration) error {
	for deadline := time.Now().Add(limit); ; {
		n, patience, example := l.waiting(epoch, slots)
		if n == 0 {
			return nil
		}
		if !patience || time.Now().After(deadline) {
			l.mu.Lock()
			l.mismatched[epoch] = max(l.mismatched[epoch], n)
			l.mu.Unlock()
			l.result.Note("%d devices miscounted: %s", n, example)
			return nil
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}
