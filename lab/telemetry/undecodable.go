// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"fmt"
	"time"
)

// An IPFIX collector cannot decode an exporter's records before it has the exporter's template, and
// exporters repeat it only about every ten minutes. A collector is blind for this time after its start, or
// after gaining a device, unless weir serve gives it the templates. This file measures the blind time, from
// the collector's admission to the first message with counted records, over the messages of sparse devices
// (routers.Config).

// admission is the time of a collector's return to its slot.
type admission struct {
	slot, life int
	epoch      uint32
	at         time.Time
}

// templateGrace is the longest time of a device up without decoded records. After it the lab counts its
// template as missing and makes the device announce it, to continue the run.
const templateGrace = 30 * time.Second

// undecodable returns the longest time a restarted collector accepted records of a sparse device without
// decoding them, and describes the case. held is the longest such time, with the time the device held its
// messages back included.
func (s *stage) undecodable() (longest, held time.Duration, which string) {
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	for _, ad := range s.admissions {
		if s.ledger.crashed[[2]int{ad.slot, ad.life}] || !s.ledger.wrote(ad.slot, ad.life) {
			continue // it was deaf or crashed, a separate fault; see revive
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
				which = fmt.Sprintf("slot %d, life %d of its collector, admitted at %s: of %d messages of %s, %d were decoded",
					ad.slot, ad.life, ad.at.Format("15:04:05.000"), len(sent), a.addr, decoded)
			}
		}
	}
	return longest, held, which
}

// sides describes the messages of sparse devices from the epochs of their moves.
type sides struct {
	undecodable time.Duration // longest time the new collector accepted records without decoding them
	overlap     time.Duration // from the first message at a new collector to the last one at an old collector
}

// moved returns the worst case over all moves.
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

// epochEnd returns the end time of an epoch.
func (s *stage) epochEnd(epoch uint32) time.Time {
	for _, sp := range s.spans {
		if sp.epoch == epoch {
			return sp.end
		}
	}
	return time.Now()
}

// blind returns the time from begin until a collector decoded its first message. sent are the send times of
// the messages to it, and it decoded the last decoded ones of them. A device may have held messages back
// after the last undecoded one. It then waited for its BMP session, not for templates, and this time does
// not count as blind.
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

// since returns the times after t.
func since(times []time.Time, t time.Time) []time.Time {
	for i, at := range times {
		if at.After(t) {
			return times[i:]
		}
	}
	return nil
}

// messages counts the fully decoded IPFIX messages of an epoch at a collector, in one of its lives or (0)
// in all.
func (a *account) messages(collector, life int, epoch uint32) int {
	records := 0
	for d, n := range a.decoded {
		if d.collector == collector && d.epoch == epoch && (life == 0 || d.life == life) {
			records += n
		}
	}
	return records / recordsEach
}
