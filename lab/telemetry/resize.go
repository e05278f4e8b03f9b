// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/weir-project/weir/lab/routers"
)

// moveRate limits weir's session resets a second. Moved routers must not all reconnect at once.
const moveRate = 10

// moveLimit is the longest time until the last moved router is up at its new collector, beyond the paced
// resets.
const moveLimit = 60 * time.Second

// resized holds the effects of a change of the number of slots.
type resized struct {
	ratio       float64 // share of buckets with another slot
	moved       int     // devices with another slot
	misdirected int     // records at a collector of neither the old nor the new table, and devices incomplete at their new one
	collateral  int     // devices disturbed without a move
	resets      int     // sessions reset in the busiest second
	duration    time.Duration
}

// resize changes the number of slots under traffic. Afterwards the last spare collectors have no slot.
//
// In the epoch of the change a moving device may be at both collectors. Its datagrams switch to the new one
// at one moment, and its session stays with the old one until weir resets it. After the epoch all its
// records must be at the new collector. Records of other devices must never be missing.
func (s *stage) resize(ctx context.Context, spare int) (r resized, err error) {
	calm := s.ledger.undisturbed(len(s.collectors))
	was, err := s.service.Table(ctx)
	if err != nil {
		return r, err
	}
	before := s.endEpoch(calm)
	if err := s.ledger.drain(ctx, before.epoch, before.calm, drainLimit); err != nil {
		return r, err
	}
	held := s.sessions()
	strays, rejected := s.ledger.strays(), s.ledger.rejections()
	s.ledger.beginMove()
	begin := time.Now()
	s.service.Spare(spare)
	if err := s.weir.Apply(ctx, "--rate", fmt.Sprintf("%d/s", moveRate)); err != nil {
		return r, err
	}
	s.service.Reopen()
	now, err := s.service.Table(ctx)
	if err != nil {
		return r, err
	}
	slots, err := s.service.Where(ctx, s.ledger.addrs())
	if err != nil {
		return r, err
	}
	r.ratio = changed(was, now)
	r.moved = s.ledger.decide(s.fleet.Epoch(), slots, held)
	limit := moveLimit + time.Duration(r.moved)*time.Second/moveRate
	if err := s.allUp(ctx, nil, limit); ctx.Err() != nil {
		return r, err
	} else if err != nil {
		missing, example := s.notUp(nil)
		r.misdirected += missing
		s.result.Note("%s: %d moved devices are incomplete at their new collector; for example %s", s.name, missing, example)
	}
	r.duration = time.Since(begin)
	s.revived = nil
	if s.lostBase, err = s.lost(ctx); err != nil { // new slots count from here
		return r, err
	}
	during := s.endEpoch(calm)
	s.ledger.endMoves(s.fleet.Epoch())
	if err := s.ledger.drain(ctx, during.epoch, during.calm, drainLimit); err != nil {
		return r, err
	}
	if err := s.quietly(ctx, time.Second); err != nil {
		return r, err
	}
	r.misdirected += s.ledger.strays() - strays
	r.resets = busiest(s.ledger.resetTimes(), time.Second)
	r.collateral = s.ledger.rejections() - rejected + s.touched(held)
	return r, nil
}

// sessions returns the current session numbers of the devices.
func (s *stage) sessions() []int {
	var all []int
	for i := range s.fleet.Devices {
		n, _ := s.fleet.Session(i)
		all = append(all, n)
	}
	return all
}

// touched counts the devices with a new session since held, though they did not move.
func (s *stage) touched(held []int) (n int) {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	for i, a := range s.ledger.accounts[:len(held)] {
		session, up := s.fleet.Session(i)
		if a.before != held[i] && (session != held[i] || !up) {
			s.result.Note("%s: the session of %s was reset without a move", s.name, a.addr)
			n++
		}
	}
	return n
}

// busiest returns the largest number of times within one window. It sorts them.
func busiest(times []time.Time, window time.Duration) (most int) {
	slices.SortFunc(times, time.Time.Compare)
	for first, last := 0, 0; last < len(times); last++ {
		for times[last].Sub(times[first]) >= window {
			first++
		}
		most = max(most, last-first+1)
	}
	return most
}

// changed returns the share of the buckets with another slot.
func changed(was, now []int) float64 {
	n := 0
	for b := range was {
		if was[b] != now[b] {
			n++
		}
	}
	return float64(n) / float64(len(was))
}

// beginMove begins a time with unknown moving devices. Affected records wait for decide.
func (l *ledger) beginMove() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.deciding = true
}

// decide enters the slots of the devices after a move in an epoch, and evaluates the waiting records. held
// are the devices' sessions before the move. It returns the number of moved devices.
func (l *ledger) decide(epoch uint32, slots map[netip.Addr]int, held []int) (moved int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, a := range l.accounts {
		if to := slots[a.addr]; to != a.slot {
			a.move(epoch, to, held[i])
			moved++
		}
	}
	waiting := l.undecided
	l.deciding, l.undecided = false, nil
	for _, u := range waiting {
		if u.event != nil {
			l.heard(*u.event)
		} else {
			l.enter(u.collector, u.record)
		}
	}
	return moved
}

// endMoves ends the moves: from an epoch on every device is at one collector again.
func (l *ledger) endMoves(epoch uint32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.accounts {
		a.endMove(epoch)
	}
}

// resetTimes returns the times at which devices noticed a reset of their session by a move.
func (l *ledger) resetTimes() []time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.resets)
}

// rejections counts the rejections noticed by devices of live collectors so far.
func (l *ledger) rejections() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rejected
}

// add merges results: counts are added, measurements keep the worst.
func (r *resized) add(other resized) {
	r.ratio = max(r.ratio, other.ratio)
	r.moved += other.moved
	r.misdirected += other.misdirected
	r.collateral += other.collateral
	r.resets = max(r.resets, other.resets)
	r.duration = max(r.duration, other.duration)
}

// lostRecords counts the uncounted records of a calm epoch.
func (l *ledger) lostRecords(epoch uint32) (lost int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, a := range l.accounts {
		for _, p := range []routers.Protocol{routers.IPFIX, routers.BMP} {
			if !a.real {
				lost += l.fleet.Sent(p, i, epoch) - a.counted[p][epoch]
			}
		}
	}
	return lost
}
