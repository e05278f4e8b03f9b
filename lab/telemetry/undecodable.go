// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"fmt"
	"time"
)

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
const templateGrace = 30 * time.Second

// undecodable returns the longest time for which a collector that had started accepted records of a sparse
// device and did not decode them, and which that was; held is the longest with the time in which the device held its
// messages back.
func (s *stage) undecodable() (longest, held time.Duration, which string) {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	for _, ad := range s.admissions {
		if s.ledger.crashed[[2]int{ad.slot, ad.life}] || !s.ledger.wrote(ad.slot, ad.life) {
			continue // it was deaf or crashed, which is its own trouble; see revive
		}
		for i, a := range s.ledger.accounts {
			if h, _ := a.home(ad.epoch); h.slot != ad.slot || a.real || !s.fleet.Sparse(i) {
				continue
			}
			sent := since(s.fleet.SentAt(i, ad.epoch), ad.at)
			decoded := a.messages(ad.slot, ad.life, ad.epoch)
			held = max(held, blind(sent, nil, decoded, ad.at, s.epochEnd(ad.epoch)))
			if d := blind(sent, s.fleet.WaitedAt(i), decoded, ad.at, s.epochEnd(ad.epoch)); d > longest {
				longest = d
				which = fmt.Sprintf("slot %d, life %d of its collector, admitted at %s: of %d messages of %s it decoded %d",
					ad.slot, ad.life, ad.at.Format("15:04:05.000"), len(sent), a.addr, decoded)
			}
		}
	}
	return longest, held, which
}

// sides is what became of the messages that sparse devices sent in the epochs in which they moved.
type sides struct {
	undecodable time.Duration // the longest time for which the new collector accepted records and did not decode them
	overlap     time.Duration // from the first message that went to a new collector to the last one that went to an old one
}

// moved returns the worst over all moves.
func (s *stage) moved() (worst sides) {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	first, last := map[uint32]time.Time{}, map[uint32]time.Time{} // at the new collectors, at the old ones; by epoch
	for i, a := range s.ledger.accounts {
		for _, h := range a.homes {
			if h.old == unknown || a.real || !s.fleet.Sparse(i) {
				continue
			}
			sent, before := s.fleet.SentAt(i, h.from), a.messages(h.old, 0, h.from)
			if before > 0 && sent[before-1].After(last[h.from]) {
				last[h.from] = sent[before-1]
			}
			if before >= len(sent) {
				continue
			}
			if t := first[h.from]; t.IsZero() || sent[before].Before(t) {
				first[h.from] = sent[before]
			}
			after := sent[before:]
			worst.undecodable = max(worst.undecodable, blind(after, s.fleet.WaitedAt(i), a.messages(h.slot, 0, h.from), after[0], s.epochEnd(h.from)))
		}
	}
	for epoch, t := range first {
		worst.overlap = max(worst.overlap, last[epoch].Sub(t))
	}
	return worst
}

// epochEnd is when an epoch ended.
func (s *stage) epochEnd(epoch uint32) time.Time {
	for _, sp := range s.spans {
		if sp.epoch == epoch {
			return sp.end
		}
	}
	return time.Now()
}

// blind is the time from begin until a collector decoded the first of the messages that were sent to it at these
// times, of which it decoded so many, the last ones. A device that held its messages back after the last one that was
// not decoded waited for its BMP session, not for templates: that time is not the collector's blindness.
func blind(sent, waited []time.Time, decoded int, begin, end time.Time) time.Duration {
	lost := len(sent) - decoded
	if lost <= 0 {
		return 0
	}
	until := end
	if decoded > 0 {
		until = sent[lost]
	}
	if held := since(waited, sent[lost-1]); len(held) > 0 && held[0].Before(until) {
		until = held[0]
	}
	return until.Sub(begin)
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
func (a *account) messages(collector, life int, epoch uint32) int {
	records := 0
	for d, n := range a.decoded {
		if d.collector == collector && d.epoch == epoch && (life == 0 || d.life == life) {
			records += n
		}
	}
	return records / recordsEach
}
