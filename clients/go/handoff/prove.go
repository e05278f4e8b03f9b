// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/handoff/wire"
)

// A replaced member stands by: it accepts nothing, transfers its sessions to its successor, and
// serves sessions that come back. It ends when three conditions hold: the successor has lived for
// Options.Proof, answers, and has all sessions not ended here. If the successor dies or hangs
// earlier, this member continues. The keeper decides, because only the keeper sees both.

// Times of a member on standby.
const (
	tryFirst = 2 * time.Second // between attempts to transfer returned sessions
	tryLast  = time.Minute
	endPoll  = 50 * time.Millisecond // between checks of mayEnd
)

// proof is the trial of a successor. Member.mu guards it.
type proof struct {
	died  chan struct{} // closed when the successor dies or hangs
	by    time.Time     // end of the required life
	again time.Time     // the next attempt to transfer sessions
	pause time.Duration // until the attempt after that
}

// begin starts the trial. A newer successor restarts it.
func (p *proof) begin(d time.Duration) {
	now := time.Now()
	p.by, p.again, p.pause = now.Add(d), now, tryFirst
}

// onReplaced handles a newer member of this name.
func (m *Member) onReplaced() {
	m.mu.Lock()
	if m.proving != nil {
		m.proving.begin(m.o.Proof)
		m.mu.Unlock()
		return
	}
	if m.standby.Load() && !m.over {
		p := &proof{died: make(chan struct{})}
		p.begin(m.o.Proof)
		m.proving = p
		m.pause(true)
		m.mu.Unlock()
		m.o.Log.Info("newer member ready", "service", m.o.Service, "member", m.o.Name)
		if !m.prove(p) {
			return
		}
		m.mu.Lock()
	}
	select {
	case <-m.replaced:
		m.mu.Unlock()
		return
	default:
	}
	close(m.replaced)
	m.mu.Unlock()
	m.o.Log.Info("replaced by a newer member", "service", m.o.Service, "member", m.o.Name)
	if m.o.Stay {
		m.stopListening()
		return
	}
	if err := m.HandOver(m.o.Name); err != nil {
		m.o.Log.Warn("sessions stay with a replaced member", "err", err)
	}
}

// prove transfers sessions and waits. It returns false if the successor has died or this member is
// closed.
func (m *Member) prove(p *proof) bool {
	_ = m.post(&wire.Message{Type: wire.Ready, Number: m.readiness()}) // without a keeper the next one is told
	tick := time.NewTicker(endPoll)
	defer tick.Stop()
	for {
		m.handOn(p)
		if m.mayEnd(p) {
			return true
		}
		select {
		case <-p.died:
			m.o.Log.Warn("newer member gone before it proved itself, continuing", "service", m.o.Service, "member", m.o.Name)
			return false
		case <-m.done:
			return false
		case <-tick.C:
		}
	}
}

// handOn transfers sessions to the successor, and returned ones again at intervals.
func (m *Member) handOn(p *proof) {
	m.mu.Lock()
	n, now := len(m.sessions), time.Now()
	if m.o.Stay || n == 0 || now.Before(p.again) {
		m.mu.Unlock()
		return
	}
	if p.pause > tryFirst {
		m.o.Log.Warn("newer member returned sessions, serving them", "service", m.o.Service, "member", m.o.Name, "sessions", n)
	}
	p.again, p.pause = now.Add(p.pause), min(2*p.pause, tryLast)
	m.mu.Unlock()
	if errs := m.transferAll(m.o.Name); len(errs) > 0 {
		m.o.Log.Warn("sessions stay with a replaced member", "service", m.o.Service, "member", m.o.Name, "sessions", len(errs), "err", errs[0])
	}
}

// mayEnd reports whether the successor has proved itself and has all its sessions. The keeper then
// gives this member nothing more.
func (m *Member) mayEnd(p *proof) bool {
	done := func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return m.proving == p && time.Now().After(p.by) && (m.o.Stay || len(m.sessions) == 0)
	}
	if !m.standby.Load() { // an older keeper has started meanwhile
		return true
	}
	if !done() {
		return false
	}
	r, err := m.call(&wire.Message{Type: wire.Ready, Number: wire.ReadyEnds}, nil)
	if err != nil || r.m.Number != 0 {
		return false
	}
	if done() {
		return true
	}
	_ = m.post(&wire.Message{Type: wire.Ready, Number: m.readiness()}) // a session came back meanwhile
	return false
}

// alone handles the keeper's report that no successor answers any more.
func (m *Member) alone() {
	m.mu.Lock()
	p := m.proving
	if p != nil {
		m.proving = nil
		close(p.died)
		m.pause(false)
	}
	m.mu.Unlock()
	if p != nil {
		m.keepSockets() // this keeper may not have them
	}
}

// keepSockets gives the keeper all listeners and packet sockets.
func (m *Member) keepSockets() {
	m.mu.Lock()
	listeners, packets := m.listeners, m.packets
	m.mu.Unlock()
	for _, l := range listeners {
		_ = l.keep() // fails for a closed socket or without a keeper
	}
	for _, p := range packets {
		_ = p.keep()
	}
}

// pause suspends or resumes all sockets. m.mu is held.
func (m *Member) pause(yes bool) {
	for _, l := range m.listeners {
		l.pause(yes)
	}
	for _, p := range m.packets {
		p.pause(yes)
	}
}

// readiness returns the Number of a Ready message.
func (m *Member) readiness() uint32 {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.proving == nil:
		return 1
	case m.standby.Load():
		return 1 | wire.ReadyStandby
	}
	return 0
}

// transferAll transfers all sessions as of their last commits. It returns an error for each session
// that stays.
func (m *Member) transferAll(to string) []error {
	var mu sync.Mutex
	var errs []error
	var all sync.WaitGroup
	at := make(chan struct{}, 8) // concurrent transfers
	for _, s := range m.Sessions() {
		at <- struct{}{}
		all.Go(func() {
			defer func() { <-at }()
			err := m.TransferCommitted(s, to)
			if err != nil && !errors.Is(err, ErrMoved) && !errors.Is(err, net.ErrClosed) {
				mu.Lock()
				errs = append(errs, fmt.Errorf("session %s: %w", s.RemoteAddr(), err))
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return errs
}
