// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/weir-project/weir/lab/peers"
)

// drainLimit is how long a record may take from the wire to the collector's file. nfacctd writes once a
// second; a collector that works off hundreds of closed sessions first takes longer.
const drainLimit = 30 * time.Second

// endEpoch ends the epoch, notes which slots were calm from its begin to its end, and begins the next.
// calmAtBegin is what undisturbed returned when it began.
func (s *stage) endEpoch(calmAtBegin map[int]bool) span {
	calm := s.ledger.undisturbed(len(s.collectors))
	for slot := range calm {
		calm[slot] = calm[slot] && calmAtBegin[slot]
	}
	ended := span{epoch: s.fleet.Advance(), calm: calm, end: time.Now()}
	s.spans = append(s.spans, ended)
	return ended
}

// quietly lets everyone send undisturbed for a while, and checks that every record arrives.
func (s *stage) quietly(ctx context.Context, quiet time.Duration) error {
	s.say("all is calm: every record sent must be counted, at the one collector that weir names")
	calm := s.ledger.undisturbed(len(s.collectors))
	if err := pause(ctx, quiet); err != nil {
		return err
	}
	ended := s.endEpoch(calm)
	return s.ledger.drain(ctx, ended.epoch, ended.calm, drainLimit)
}

// allUp waits until the collectors of the slots (nil: of all) have logged the Peer Up of every device, on the
// session that the device holds now, and counted an IPFIX record of it since they started: nfacctd's own
// parts come up one by one. It returns an error after the limit. A device's own opinion of its session is
// not enough: a full backlog completes the handshake for the device alone.
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
					begin = time.Now() // the routers begin anew, too
				}
			}
		}
		if time.Since(begin) > limit {
			return fmt.Errorf("%d routers have not reached their collectors with both protocols after %s, %s for one", missing, limit, example)
		}
		if err := pause(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// maxRevivals is how often a wait for routers begins anew because a collector had to be started again.
const maxRevivals = 10

// deafAfter is how long a collector may take to write its first flow record; it writes once a second.
const deafAfter = 6 * time.Second

// deaf tells whether a collector holds BMP sessions and counted no flow record at all since it started: in one
// of a hundred starts on a busy machine nfacctd's plugin fails to connect to its core, without a word.
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

// revive restarts a collector that is deaf, or that crashed before all its routers were up, as whoever watches it
// would. nfacctd crashes when a flow record comes before its BMP thread has made its tables (peers.Ready), or
// from a router whose session that thread is just opening.
func (s *stage) revive(ctx context.Context, c *peers.Collector) error {
	if c.Running() {
		s.say("collector %d takes BMP but writes no flows: nfacctd's plugin did not find its core; it is restarted", c.Number)
		s.ledger.deafStart()
	} else {
		s.say("collector %d crashed while its routers came back, for it takes flows before its BMP thread is ready for them; it is restarted", c.Number)
	}
	s.ledger.disturb(c.Number)
	if s.revived == nil {
		s.revived = map[int]bool{}
	}
	s.revived[c.Number] = true // what is rejected meanwhile is a dead collector's
	if c.Running() {           // else its crash is yet to be reported, and must not look like ours
		if err := c.Kill(syscall.SIGKILL); err != nil {
			return err
		}
	}
	return s.bringBack(ctx, victim{Collector: c, signal: syscall.SIGKILL})
}

// notUp counts the devices of the slots that are not up, and names one.
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

// sessionUp tells whether the collector logged the Peer Up of the session that a device holds, which is younger
// than the device's last move. The ledger is locked.
func (s *stage) sessionUp(i int, a *account) bool {
	session, up := s.fleet.Session(i)
	return up && session > a.before && a.session >= session
}

// decodes tells whether a device's collector counted an IPFIX record of it since it started, or since the device
// moved to it. The ledger is locked.
func (s *stage) decodes(a *account) bool { return a.life == s.collectors[a.slot].Life() }

// remind makes sparse devices announce their template that nobody provided; blind is since when they are up
// and not decoded.
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
			s.result.Note("nobody gave collector %d the template of %s: its router announces it again", a.slot, a.addr)
		}
	}
}
