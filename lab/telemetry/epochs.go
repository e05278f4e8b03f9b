// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/weir-project/weir/lab/peers"
)

// drainLimit is the longest time of a record from the wire to the collector's file. nfacctd writes once a
// second. It takes longer while it handles hundreds of closed sessions.
const drainLimit = 30 * time.Second

// endEpoch ends the epoch, records its undisturbed slots, and begins the next. calmAtBegin is the result of
// undisturbed at its begin.
func (s *stage) endEpoch(calmAtBegin map[int]bool) span {
	calm := s.ledger.undisturbed(len(s.collectors))
	for slot := range calm {
		calm[slot] = calm[slot] && calmAtBegin[slot]
	}
	ended := span{epoch: s.fleet.Advance(), calm: calm, end: time.Now()}
	s.spans = append(s.spans, ended)
	return ended
}

// quietly lets all routers send undisturbed for a while, and checks the arrival of every record.
func (s *stage) quietly(ctx context.Context, quiet time.Duration) error {
	s.say("all is calm: every record must be counted at the collector named by weir")
	calm := s.ledger.undisturbed(len(s.collectors))
	if err := pause(ctx, quiet); err != nil {
		return err
	}
	ended := s.endEpoch(calm)
	return s.ledger.drain(ctx, ended.epoch, ended.calm, drainLimit)
}

// allUp waits for the collectors of the slots (nil: all). Each must have logged the Peer Up of every device
// on its current session. It must also have counted an IPFIX record of it since its start, because
// nfacctd's parts come up one by one. It returns an error after the limit. The device's own view of its
// session is not enough, because a full backlog completes the handshake for the device alone.
func (s *stage) allUp(ctx context.Context, slots map[int]bool, limit time.Duration) error {
	begin, revived := time.Now(), 0
	blind := map[int]time.Time{}
	for {
		missing, example := s.notUp(slots)
		if missing == 0 {
			return nil
		}
		s.remind(blind)
		for _, c := range s.collectors {
			if (slots == nil || slots[c.Number]) && (s.ledger.died(c) || time.Since(begin) > deafAfter && s.deaf(c)) {
				if err := s.revive(ctx, c); err != nil {
					return err
				}
				if revived++; revived <= maxRevivals {
					begin = time.Now() // the routers reconnect too
				}
			}
		}
		if time.Since(begin) > limit {
			return fmt.Errorf("%d routers have not reached their collectors with both protocols after %s; for example %s", missing, limit, example)
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// maxRevivals limits the restarts of collectors during one wait for routers. Each restart restarts the
// wait.
const maxRevivals = 10

// deafAfter is the longest time of a collector to its first flow record; it writes once a second.
const deafAfter = 6 * time.Second

// deaf reports whether a collector holds BMP sessions and has counted no flow record since its start. In
// one of a hundred starts on a busy machine nfacctd's plugin fails to connect to its core, without a
// message.
func (s *stage) deaf(c *peers.Collector) bool {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	held := false
	for i, a := range s.ledger.accounts {
		if a.slot != c.Number || a.real {
			continue
		}
		if a.life == c.Life() {
			return false
		}
		session, up := s.fleet.Session(i)
		held = held || up && a.session >= session
	}
	return held && c.Running()
}

// revive restarts a deaf collector, or one crashed before all its routers were up, like an operator would.
// nfacctd crashes at a flow record before its BMP thread has created its tables (peers.Ready). It also
// crashes at a flow record from a router while it opens this router's session.
func (s *stage) revive(ctx context.Context, c *peers.Collector) error {
	if c.Running() {
		s.say("collector %d accepts BMP but writes no flows: nfacctd's plugin did not find its core; restarting it", c.Number)
		s.ledger.deafStart()
	} else {
		s.say("collector %d crashed while its routers came back: it received flows before its BMP thread was ready; restarting it", c.Number)
	}
	s.ledger.disturb(c.Number)
	if s.revived == nil {
		s.revived = map[int]bool{}
	}
	s.revived[c.Number] = true // rejections from now on belong to a dead collector
	if c.Running() {           // else its crash is not reported yet, and must not look like ours
		if err := c.Kill(syscall.SIGKILL); err != nil {
			return err
		}
	}
	return s.bringBack(ctx, victim{Collector: c, signal: syscall.SIGKILL})
}

// notUp counts the devices of the slots not up yet, and names one.
func (s *stage) notUp(slots map[int]bool) (missing int, example string) {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	for i, a := range s.ledger.accounts {
		if slots != nil && !slots[a.slot] {
			continue
		}
		ok := a.peerUps > 0
		if !a.real {
			ok = s.sessionUp(i, a) && (a.slot == unknown || s.decodes(a))
		}
		if !ok {
			missing++
			example = a.addr.String()
		}
	}
	return missing, example
}

// sessionUp reports whether the collector logged the Peer Up of the device's current session, opened after
// the device's last move. The ledger is locked.
func (s *stage) sessionUp(i int, a *account) bool {
	session, up := s.fleet.Session(i)
	return up && session > a.before && a.session >= session
}

// decodes reports whether a device's collector has counted an IPFIX record of it since its start, or since
// the device moved to it. The ledger is locked.
func (s *stage) decodes(a *account) bool { return a.life == s.collectors[a.slot].Life() }

// remind makes sparse devices announce a template missing at their collector. blind holds the time since
// they are up without decoded records.
func (s *stage) remind(blind map[int]time.Time) {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	for i, a := range s.ledger.accounts {
		if a.real || a.slot == unknown || !s.fleet.Sparse(i) || !s.sessionUp(i, a) || s.decodes(a) {
			delete(blind, i)
		} else if since, ok := blind[i]; !ok {
			blind[i] = time.Now()
		} else if time.Since(since) > templateGrace {
			blind[i] = time.Now()
			s.fleet.Remind(i)
			s.ledger.reminded++
			s.result.Note("collector %d has no template of %s: its router announces it again", a.slot, a.addr)
		}
	}
}
