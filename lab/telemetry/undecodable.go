// SPDX-License-Identifier: Apache-2.0

package telemetry

import "time"

// An IPFIX collector decodes nothing of an exporter before it has the exporter's template, and exporters repeat
// theirs only every ten minutes or so. So a collector that starts, or gains a device, is blind for that long,
// unless somebody gives it the templates: weir serve does. What is measured here is how long it was blind: from
// its admission until the first message whose records it counted, among the messages that sparse devices
// sent to it (routers.Config).

// admission is when a slot had its collector again.
type admission struct {
	slot, life int
	epoch      uint32
	at         time.Time
}

// templateGrace is how long a device may be up without a record decoded, before the lab takes it that nobody
// will provide its template, counts that as missing and makes the device announce it; so the run goes on.
const templateGrace = 10 * time.Second

// undecodable returns the longest time for which a collector accepted records of a sparse device and did not
// decode them: after restarts, and after moves.
func (s *stage) undecodable() (restarts, moves time.Duration) {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	ends := map[uint32]time.Time{}
	for _, sp := range s.spans {
		ends[sp.epoch] = sp.end
	}
	for i, a := range s.ledger.accounts {
		if a.real || !s.fleet.Sparse(i) {
			continue
		}
		for _, ad := range s.admissions {
			if h, _ := a.home(ad.epoch); h.slot == ad.slot && s.ledger.wrote(ad) {
				sent := since(s.fleet.SentAt(i, ad.epoch), ad.at)
				restarts = max(restarts, blind(sent, 0, s.messages(a, ad.slot, ad.life, ad.epoch), ad.at, ends[ad.epoch]))
			}
		}
		for _, h := range a.homes {
			if h.old == unknown || s.ledger.disturbed[h.slot] {
				continue
			}
			sent := s.fleet.SentAt(i, h.from)
			before := s.messages(a, h.old, 0, h.from)
			if before < len(sent) {
				moves = max(moves, blind(sent, before, s.messages(a, h.slot, 0, h.from), sent[before], ends[h.from]))
			}
		}
	}
	return restarts, moves
}

// blind is the time from begin until a collector decoded the first of the messages sent at these times: skip of
// them went to somebody else, and it decoded the last ones, so many.
func blind(sent []time.Time, skip, decoded int, begin, end time.Time) time.Duration {
	switch lost := len(sent) - skip - decoded; {
	case lost <= 0:
		return 0
	case decoded == 0:
		return end.Sub(begin)
	default:
		return sent[skip+lost].Sub(begin)
	}
}

// since are the times after t.
func since(times []time.Time, t time.Time) []time.Time {
	for i, at := range times {
		if at.After(t) {
			return times[i:]
		}
	}
	return nil
}

// messages is how many IPFIX messages of an epoch a collector decoded whole, in one of its lives or (0) in all.
func (s *stage) messages(a *account, collector, life int, epoch uint32) int {
	records := 0
	for d, n := range a.decoded {
		if d.collector == collector && d.epoch == epoch && (life == 0 || d.life == life) {
			records += n
		}
	}
	return records / recordsEach
}

// wrote tells whether a collector counted a flow record of anyone in the life that an admission began: one that
// did not was deaf, which is its own trouble; see deaf.
func (l *ledger) wrote(ad admission) bool {
	for _, a := range l.accounts {
		for d := range a.decoded {
			if d.collector == ad.slot && d.life == ad.life {
				return true
			}
		}
	}
	return false
}
