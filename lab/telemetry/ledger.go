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

// ledger compares what devices sent with what collectors counted, and knows which slots are disturbed.
type ledger struct {
	result *lab.Result
	fleet  *routers.Fleet

	mu           sync.Mutex
	accounts     []*account // simulated devices by index, then real ones
	byAddr       map[netip.Addr]*account
	disturbed    map[int]bool // slots whose collector is killed, starting, or not yet reached again
	misdirected  int
	odd          int // lines in a collector's log or output that should not be
	gaps         int // in sequence numbers, for want of a template
	deafStarts   int
	crashed      map[[2]int]bool // collectors, and which of their lives, that crashed before all their routers were up
	closes       int             // ends of BMP sessions that collectors logged
	resets       []time.Time     // when sessions ended because their device moved
	rejected     int             // noticed by devices of slots that were not disturbed
	rejectedDead int             // noticed by devices of a disturbed slot
	lostDead     int             // sessions that ended with their collector

	deciding  bool // a move has begun, and who moves is not known yet
	undecided []undecided
	reminded  int // devices that had to announce their template, or their collector would never have decoded

	rejectedByWeir int            // weir's own count, for disturbed slots
	mismatched     map[uint32]int // devices whose count was wrong, by epoch
}

// undecided is a record or an event that came while it was not known who moves.
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

// addrs are the source addresses of all devices, in the order of their accounts.
func (l *ledger) addrs() []netip.Addr {
	var all []netip.Addr
	for _, a := range l.accounts {
		all = append(all, a.addr)
	}
	return all
}

// book enters one line that a collector wrote.
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
		return // the collector's own note about a connection, not something a device sent
	}
	a := l.byAddr[r.Device]
	if a == nil {
		l.odd++
		l.result.Note("collector %d counted something of %s, which is no device", collector, r.Device)
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
		l.result.Note("collector %d got %d %s records of %s, which belongs to slot %d (epoch %d)", collector, r.Count, p, a.addr, a.slot, r.Epoch)
		return
	}
	l.credit(a, collector, r)
}

// credit counts a record at a collector where it may be.
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

// excused tells whether a device's records may lack their template: those that a new collector gets before
// the exporter repeats it. A simulated router repeats it before its slot counts as calm again, a real one when
// it likes.
func (l *ledger) excused(a *account) bool {
	return a != nil && (a.real || l.disturbed[a.slot])
}

// notice enters what a device noticed about its traffic.
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
	l.result.Note("%s of %s, slot %d, whose collector lives: %v", e.Kind, e.Device.Addr, a.slot, e.Err)
}

// disturb marks a slot from before its collector is killed until calm.
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

// deafStart counts a collector that had to be started again.
func (l *ledger) deafStart() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deafStarts++
}

// wrote tells whether a collector counted a flow record of anyone in one of its lives.
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

// died tells whether a collector that had started has ended before all its routers were up.
func (l *ledger) died(c *peers.Collector) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !c.Running() && l.disturbed[c.Number]
}

// strays counts what reached another collector than the one weir named.
func (l *ledger) strays() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.misdirected
}

// undisturbed returns the slots among all that are not disturbed now.
func (l *ledger) undisturbed(slots int) map[int]bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	calm := map[int]bool{unknown: len(l.disturbed) == 0}
	for s := range slots {
		calm[s] = !l.disturbed[s]
	}
	return calm
}

// waiting counts the devices of slots whose count for an epoch is not what they sent; patience says whether
// one of them may yet become right, for it is short of records and has none too many.
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
			if counted > sent || counted < sent && h.old == unknown { // what moves may lose what was under way
				n++
				patience = patience || counted < sent
				example = fmt.Sprintf("%s, slot %d, epoch %d: %d %s records sent, %d counted", a.addr, a.slot, epoch, sent, p, counted)
				break
			}
		}
	}
	return n, patience, example
}

// drain waits until the devices of the slots have all records of an ended epoch counted. What is not
// counted after the limit is lost.
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
