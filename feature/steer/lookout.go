// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"time"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/state"
)

// A search for a member reads its process and the namespace's sockets. With hundreds of empty slots, a search every
// second takes a third of a CPU. Therefore searches for a missing member become rarer: first every second, then at
// doubling intervals up to lookAtMost. A socket opened at one of the slot's ports, or a change of its service, resets
// the interval. Without the hooks for both listeners and UDP sockets, every search covers all slots.
const (
	lookOften  = 10 // searches before the interval grows
	lookAtMost = 4  // times lookEvery
)

// lookouts schedules the searches for slots.
type lookouts struct {
	slots map[slots.Slot]*lookout
	ports map[uint16]bool // with recently opened or closed sockets
	all   bool            // some ports are unknown
}

type lookout struct {
	of    *record.Service // a different record is a different service
	why   string
	looks int
	wait  time.Duration
	next  time.Time
}

// opened records a socket at a port. Slots with this port are searched until the retries are over.
func (o *lookouts) opened(port uint16) {
	if o.ports == nil {
		o.ports = map[uint16]bool{}
	}
	o.ports[port] = true
}

// missedEvents records sockets at unknown ports.
func (o *lookouts) missedEvents() { o.all = true }

// quiet resets opened and missedEvents.
func (o *lookouts) quiet() {
	clear(o.ports)
	o.all = false
}

// due reports whether a slot should be searched now.
func (o *lookouts) due(s *state.Service, slot slots.Slot, now time.Time) bool {
	l := o.slots[slot]
	if l == nil || l.of != s.Record || o.touched(s) {
		delete(o.slots, slot)
		return true
	}
	return !now.Before(l.next)
}

// touched reports whether a socket was opened or closed at a port of a service.
func (o *lookouts) touched(s *state.Service) bool {
	if o.all || len(o.ports) == 0 {
		return o.all
	}
	for _, e := range s.Endpoints {
		if o.ports[e.Port] {
			return true
		}
	}
	for _, m := range s.Record.Service.Members {
		for _, b := range m.Bound {
			if o.ports[b.Port] {
				return true
			}
		}
	}
	return false
}

// missed records a failed search and its reason. A new reason means that something is happening, so it resets the
// interval.
func (o *lookouts) missed(s *state.Service, slot slots.Slot, why error, now time.Time) {
	if o.slots == nil {
		o.slots = map[slots.Slot]*lookout{}
	}
	l := o.slots[slot]
	if l == nil || l.why != why.Error() {
		l = &lookout{of: s.Record, why: why.Error(), wait: lookEvery}
		o.slots[slot] = l
	}
	if l.looks++; l.looks > lookOften {
		l.wait = min(2*l.wait, lookAtMost*lookEvery)
	}
	// A timer may fire early, so a search within half an interval counts as due.
	l.next = now.Add(l.wait - lookEvery/2)
}

// keep forgets all slots except lacking ones.
func (o *lookouts) keep(lacking map[slots.Slot]bool) {
	for s := range o.slots {
		if !lacking[s] {
			delete(o.slots, s)
		}
	}
}

// Any user can open sockets at a watched port, also in a private network namespace. Each socket triggers a search at
// once, so searches have a time budget.
const (
	lookShare = 10                     // a tenth of a CPU
	lookBurst = 500 * time.Millisecond // not delayed: daemons start together
)

// pace limits the time spent in searches.
type pace struct {
	spent time.Duration // over budget if more than lookBurst
	at    time.Time
}

// spend records the duration of a search.
func (p *pace) spend(d time.Duration, now time.Time) {
	p.fill(now)
	p.spent += d
}

// wait returns the delay of the next search.
func (p *pace) wait(now time.Time) time.Duration {
	p.fill(now)
	return max(0, lookShare*(p.spent-lookBurst))
}

func (p *pace) fill(now time.Time) {
	p.spent = max(0, p.spent-now.Sub(p.at)/lookShare)
	p.at = now
}

// Events have a budget as well: a loop of bind(2) and close(2) causes tens of thousands per second. During a pause the
// buffer may overflow.
const (
	eventBurst = 256 // events without a pause
	eventRest  = 50 * time.Millisecond
)

// eventPace limits the rate of events to eventBurst per eventRest.
type eventPace struct {
	began time.Time
	n     int
}

// next counts an event and returns the pause after it.
func (p *eventPace) next(now time.Time) time.Duration {
	if p.n++; p.n < eventBurst && now.Sub(p.began) < eventRest {
		return 0
	}
	rest := time.Duration(0)
	if p.n >= eventBurst {
		rest = max(0, eventRest-now.Sub(p.began))
	}
	p.began, p.n = now.Add(rest), 0
	return rest
}
