// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"time"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/feature/steer/state"
)

// A look for a member asks for its process and for the namespace's sockets. With hundreds
// of slots that nobody fills, a look each second takes a third of a CPU. So a slot whose
// member is not found is looked for less often: each second at first, then after twice
// the time, at most lookAtMost apart. A socket that opens at one of its ports, or a change
// of its service, begins anew. Without the hooks for both, of listeners and of UDP
// sockets, every look is for all slots.
const (
	lookOften  = 10 // looks before the time between two grows
	lookAtMost = 4  // times lookEvery
)

// lookouts says when slots are looked for next.
type lookouts struct {
	slots map[slots.Slot]*lookout
	ports map[uint16]bool // where sockets have opened or closed lately
	all   bool            // or at unknown ports
}

type lookout struct {
	of    *record.Service // another one is another service
	why   string
	looks int
	wait  time.Duration
	next  time.Time
}

// opened notes a socket at a port; what is due by it is looked for until the retries are
// over.
func (o *lookouts) opened(port uint16) {
	if o.ports == nil {
		o.ports = map[uint16]bool{}
	}
	o.ports[port] = true
}

// missedEvents notes sockets at unknown ports.
func (o *lookouts) missedEvents() { o.all = true }

// quiet ends what opened and missedEvents began.
func (o *lookouts) quiet() {
	clear(o.ports)
	o.all = false
}

// due says whether a slot is to be looked for now.
func (o *lookouts) due(s *state.Service, slot slots.Slot, now time.Time) bool {
	l := o.slots[slot]
	if l == nil || l.of != s.Record || o.touched(s) {
		delete(o.slots, slot)
		return true
	}
	return !now.Before(l.next)
}

// touched says whether a socket has opened or closed at a port of a service.
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

// missed notes that a slot's member was not found, and why. Another reason than last time
// says that something happens there.
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
	// A timer may be early: what is due within half a look is due now.
	l.next = now.Add(l.wait - lookEvery/2)
}

// keep forgets all slots but those that lack their member.
func (o *lookouts) keep(lacking map[slots.Slot]bool) {
	for s := range o.slots {
		if !lacking[s] {
			delete(o.slots, s)
		}
	}
}

// Any user can open sockets at a watched port, also in a network namespace of the user's own. Each socket triggers a look at
// once, so looks have a budget of time.
const (
	lookShare = 10                     // a tenth of a CPU
	lookBurst = 500 * time.Millisecond // that many looks are not held up: daemons start together
)

// pace bounds the time that looks take.
type pace struct {
	spent time.Duration // beyond the budget if more than lookBurst
	at    time.Time
}

// spend notes that a look has ended, and how long it was.
func (p *pace) spend(d time.Duration, now time.Time) {
	p.fill(now)
	p.spent += d
}

// wait is how long the next look is to be held up.
func (p *pace) wait(now time.Time) time.Duration {
	p.fill(now)
	return max(0, lookShare*(p.spent-lookBurst))
}

func (p *pace) fill(now time.Time) {
	p.spent = max(0, p.spent-now.Sub(p.at)/lookShare)
	p.at = now
}

// Events have a budget as well: a loop of bind(2) and close(2) makes tens of thousands a second. In a rest the buffer may
// overflow.
const (
	eventBurst = 256 // events without a rest
	eventRest  = 50 * time.Millisecond
)

// eventPace bounds the events that are read, to eventBurst in eventRest.
type eventPace struct {
	began time.Time
	n     int
}

// next notes an event, and says how long to rest after it.
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
